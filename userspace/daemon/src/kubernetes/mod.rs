//! Kubernetes: the container runtime ([`nri`]), the kubelet ([`kubelet`]), the API server and the socket of the PodResources API
//! ([`cluster`]), the preparation of resource claims (`dra`), manifests with such claims ([`claim_template`]), and the assigned resources in the forms that these publish ([`export`]).

pub mod claim_template;
pub mod cluster;
mod dra;
pub mod export;
pub mod kubelet;
pub mod nri;

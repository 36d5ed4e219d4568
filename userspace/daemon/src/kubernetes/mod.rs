//! Kubernetes: the container runtime ([`nri`]), the kubelet ([`kubelet`]), and the export of what is assigned
//! ([`export`]); [`cluster`] has what goes by the API server and sockets.

pub mod cluster;
pub mod export;
pub mod kubelet;
pub mod nri;

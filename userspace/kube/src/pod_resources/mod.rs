//! The PodResources API: the CPUs, memory and devices that are assigned to each container, over gRPC on a Unix socket.
//!
//! The kubelet serves this API for its own assignments; monitoring agents, and the topology updater of Node Feature
//! Discovery, read it. [`serve`] serves the same API for the assignments of numaward, so that these programs work
//! unchanged with numaward's socket. [`Client`] reads the kubelet's.
//!
//! The messages report *assigned* resources, not used ones. A pod has no UID here, only a namespace and a name.
//!
//! Source: `k8s.io/kubelet/pkg/apis/podresources/v1` (service `v1.PodResourcesLister`), KEP-606, KEP-2043, KEP-3695,
//! and KEP-5526 for the resources of the whole pod.

mod client;
pub mod messages;
mod server;

pub use self::{
    client::{Client, PodResourcesError},
    server::{AssignmentSource, serve},
};

/// Path of the kubelet's socket, relative to the kubelet's directory.
pub const KUBELET_SOCKET: &str = "pod-resources/kubelet.sock";

/// Name of the gRPC service.
const SERVICE: &str = "v1.PodResourcesLister";
/// HTTP paths of the methods.
const LIST: &str = "/v1.PodResourcesLister/List";
const GET: &str = "/v1.PodResourcesLister/Get";
const ALLOCATABLE: &str = "/v1.PodResourcesLister/GetAllocatableResources";

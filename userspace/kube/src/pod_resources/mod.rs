//! The PodResources API: which CPUs, memory and devices each container was given, over gRPC on a unix socket.
//!
//! The kubelet serves it for what it assigned itself; monitoring agents, and the topology updater of Node Feature
//! Discovery, read it. [`serve`] serves the same for what numaward assigned, so that they work unchanged when they
//! are pointed at our socket; [`Client`] reads the kubelet's.
//!
//! The messages hold what was *assigned*, never what is used. A pod has no UID here, only a namespace and a name.
//!
//! Source: `k8s.io/kubelet/pkg/apis/podresources/v1` (service `v1.PodResourcesLister`), KEP-606, KEP-2043, KEP-3695,
//! and KEP-5526 for the fields of a pod as a whole.

mod client;
pub mod messages;
mod server;

pub use self::{
    client::{CallError, Client},
    server::{AssignmentSource, serve},
};

/// Where the kubelet serves it, below its directory.
pub const KUBELET_SOCKET: &str = "pod-resources/kubelet.sock";

/// The service.
const SERVICE: &str = "v1.PodResourcesLister";
/// The methods, as paths of HTTP.
const LIST: &str = "/v1.PodResourcesLister/List";
const GET: &str = "/v1.PodResourcesLister/Get";
const ALLOCATABLE: &str = "/v1.PodResourcesLister/GetAllocatableResources";

//! Pods as the API server describes them, with the data that the runtime does not report.
//!
//! NRI reports limits only, and one container at a time. Requests, init and sidecar containers, resources of the
//! whole pod, and all containers together come from the API server through a [`PodSource`].

use std::sync::Arc;

pub use numaward_engine::PodId;
use numaward_engine::{ContainerRequest, PodResources, Request, Resources};

/// Annotation of the mirror pod of a static pod, with the UID that the kubelet and the runtime use: the hash of the
/// manifest. Any author of a pod can set it.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// Annotation that marks a mirror pod, with the same hash.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// A resource claim, or a request of it, that a container of a pod uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimUse {
    pub container: String,
    /// Name of the `ResourceClaim` in the pod's namespace.
    pub claim: String,
    /// Request of the claim; `None`: all of them.
    pub request: Option<String>,
}

/// A pod of this Kubernetes node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    pub id: PodId,
    /// UID in the API server. Differs from that in `id` for the mirror pod of a static pod.
    pub api_uid: String,
    /// Init containers in the order in which they start; those with `restartPolicy: Always` are sidecars.
    pub init_containers: Vec<ContainerRequest>,
    /// Regular containers.
    pub containers: Vec<ContainerRequest>,
    /// Resources of the whole pod (`spec.resources`), if set.
    pub resources: Option<PodResources>,
    /// Overhead of the runtime class (`spec.overhead`).
    pub overhead: Resources,
    /// Resource claims of the containers, as far as the claims exist.
    pub claims: Vec<ClaimUse>,
    /// True if the phase is `Succeeded` or `Failed`: the pod will not run again.
    pub is_terminal: bool,
}

impl Pod {
    /// Returns the pod's request to the engine. The owner is the pod's UID.
    pub fn request(&self) -> Request {
        Request {
            owner: self.id.uid.as_str().into(),
            init_containers: self.init_containers.clone(),
            containers: self.containers.clone(),
            resources: self.resources.clone(),
        }
    }
}

/// Contents of a Kubernetes Event on a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub pod: PodId,
    /// The event's reason: one word in `CamelCase`.
    pub reason: String,
    /// The explanation in sentences.
    pub message: String,
    /// The event's type: `Warning` if true, or else `Normal`.
    pub is_warning: bool,
}

/// Source of the pods of this Kubernetes node. All methods answer from memory and never block.
pub trait PodSource: Send + Sync + 'static {
    /// Returns the pod with this namespace, name and UID, as the runtime reports them.
    fn pod(&self, id: &PodId) -> Option<Arc<Pod>>;

    /// Returns true if all pods are known, so that a missing one is about to appear. False if there is no API server,
    /// or while it cannot be reached.
    fn is_synced(&self) -> bool;

    /// Queues a Kubernetes Event on the pod. It is dropped if it cannot be created.
    fn notify(&self, notice: Notice);
}

/// Source without an API server, for hosts that run static pods only.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPods;

impl PodSource for NoPods {
    fn pod(&self, _id: &PodId) -> Option<Arc<Pod>> {
        None
    }

    fn is_synced(&self) -> bool {
        false
    }

    fn notify(&self, _notice: Notice) {}
}

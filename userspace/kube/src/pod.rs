//! Pods as the API server describes them: what the runtime does not report about them.
//!
//! NRI carries limits only, and one container at a time. Requests, init and sidecar containers, resources of
//! the pod as a whole and all containers at once come from the API server, by way of a [`PodSource`].

use std::{collections::BTreeMap, sync::Arc};

use numaward_engine::{ContainerRequest, PodResources, Request, Resources};

/// The annotation by which the mirror pod in the API server of a static pod gives the UID that the kubelet and
/// the runtime use: the hash of its manifest. Any author of a pod can set it.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// The annotation that makes a pod a mirror pod, with the same hash.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// Which pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[display("{namespace}/{name}")]
pub struct PodId {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, as the runtime knows it: for a static pod the value of [`CONFIG_HASH`].
    pub uid: String,
}

/// A pod of this Kubernetes node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Which.
    pub id: PodId,
    /// Its UID in the API server; differs from that in `id` for the mirror of a static pod.
    pub api_uid: String,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Init containers in the order in which they start; those with `restartPolicy: Always` are sidecars.
    pub init_containers: Vec<ContainerRequest>,
    /// The containers that run together.
    pub containers: Vec<ContainerRequest>,
    /// What the pod as a whole asks for (`spec.resources`), where it does.
    pub resources: Option<PodResources>,
    /// What the runtime class adds (`spec.overhead`).
    pub overhead: Resources,
    /// Whether it has ended (`Succeeded`, `Failed`) and will not run again.
    pub is_terminal: bool,
}

impl Pod {
    /// What the engine is asked: the owner is the pod's UID.
    pub fn request(&self) -> Request {
        Request {
            owner: self.id.uid.as_str().into(),
            init_containers: self.init_containers.clone(),
            containers: self.containers.clone(),
            resources: self.resources.clone(),
        }
    }
}

/// Something that those who look at the pod in the API server should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Which pod.
    pub pod: PodId,
    /// In a word, in `CamelCase`: the event's reason.
    pub reason: String,
    /// In sentences, with the explanation.
    pub message: String,
    /// Whether something is wrong (`Warning`), or not (`Normal`).
    pub is_warning: bool,
}

/// Knows the pods of this Kubernetes node. Answers from memory and never blocks.
pub trait PodSource: Send + Sync + 'static {
    /// The pod that has this namespace, this name and this UID, all of them as the runtime reports them.
    fn pod(&self, id: &PodId) -> Option<Arc<Pod>>;

    /// Whether all pods are known, so that one that is not will be in a moment. False where there is no API
    /// server, or as long as it cannot be reached.
    fn is_synced(&self) -> bool;

    /// Makes a Kubernetes Event on the pod, at leisure and if possible.
    fn notify(&self, notice: Notice);
}

/// No API server: static pods, hosts at the edge.
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

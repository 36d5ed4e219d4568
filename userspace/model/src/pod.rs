//! Pods and their containers, by their names.

use numaward_api as api;
use numaward_engine::ContainerName;
use serde::{Deserialize, Serialize};

/// Which pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, as the runtime knows it.
    pub uid: String,
}

/// The name, in a pod's request, of what its containers share that have nothing of their own: no container's.
pub const POD_SHARE: &str = "(pod)";

/// Out of what a container is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GuaranteeSource {
    /// Its own.
    #[default]
    Own,
    /// What the pod holds as a whole, beside other containers ([`POD_SHARE`]).
    Pod,
    /// The same, before those that run together.
    #[serde(rename = "podAtFirst")]
    PodInit,
    /// A part of what the pod holds as a whole, by its own name, which others have a part of as well.
    Part,
}

/// Which container of which pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodContainer {
    /// The pod.
    pub pod: PodName,
    /// Its name within the pod.
    pub container: String,
    /// The runtime's id.
    pub id: String,
    /// The sandbox of its pod.
    pub sandbox: String,
    /// Who holds its allocation in the ledger.
    pub owner: String,
    /// Which of the owner's allocations it is.
    #[serde(default)]
    pub slice: GuaranteeSource,
}

impl PodContainer {
    /// `NAMESPACE/POD/CONTAINER`: what is served as the label `workload`, and the name of its guarantee.
    pub fn full_name(&self) -> String {
        container_name(&self.pod.namespace, &self.pod.name, &self.container)
    }

    /// The name of its allocation in its owner's account.
    pub fn ledger_name(&self) -> ContainerName {
        match self.slice {
            GuaranteeSource::Own | GuaranteeSource::Part => self.container.as_str().into(),
            GuaranteeSource::Pod | GuaranteeSource::PodInit => POD_SHARE.into(),
        }
    }

    /// Whether it shares what its pod holds as a whole.
    pub fn shares_pod(&self) -> bool {
        self.slice != GuaranteeSource::Own
    }
}

impl From<&PodContainer> for api::PodContainer {
    fn from(of: &PodContainer) -> Self {
        let PodName { namespace, name, uid } = of.pod.clone();
        Self {
            namespace,
            pod: name,
            container: of.container.clone(),
            pod_uid: uid,
            shares_pod: of.shares_pod(),
        }
    }
}

/// The name of a container: what is served as the label `workload`.
pub fn container_name(namespace: &str, pod: &str, container: &str) -> String {
    format!("{namespace}/{pod}/{container}")
}

//! Names of pods and containers.

use numaward_api as api;
use numaward_engine::{ContainerName, PodId};
use serde::{Deserialize, Serialize};

/// The name in the ledger for the share of a pod that its containers without their own resources use. No container has
/// this name.
pub const POD_SHARE: &str = "(pod)";

/// The part of its owner's guarantee that a container uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GuaranteeSource {
    /// The container's own guarantee.
    #[default]
    Own,
    /// The share of the pod that several containers use ([`POD_SHARE`]).
    Pod,
    /// The share of the pod, used by an init container before the main containers start.
    #[serde(rename = "podAtFirst")]
    PodInit,
    /// A part of the pod's guarantee under the container's own name; other containers have parts of it as well.
    Part,
    /// The reservation of a resource claim, which several containers of the pod can use.
    Claim,
}

/// The names of a container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodContainer {
    pub pod: PodId,
    /// The name of the container within the pod.
    pub container: String,
    /// The container id of the runtime.
    pub id: String,
    /// The sandbox of the pod.
    pub sandbox: String,
    /// The owner of the guarantee in the ledger.
    pub owner: String,
    /// The part of the owner's guarantee.
    #[serde(default)]
    pub slice: GuaranteeSource,
}

impl PodContainer {
    /// Returns `NAMESPACE/POD/CONTAINER`, the name of the guarantee and the value of the label `workload`.
    pub fn full_name(&self) -> String {
        container_name(&self.pod.namespace, &self.pod.name, &self.container)
    }

    /// Returns the name of the container's guarantee in the ledger entry of its owner.
    pub fn ledger_name(&self) -> ContainerName {
        match self.slice {
            GuaranteeSource::Own | GuaranteeSource::Part => self.container.as_str().into(),
            GuaranteeSource::Pod | GuaranteeSource::PodInit => POD_SHARE.into(),
            GuaranteeSource::Claim => self.owner.as_str().into(),
        }
    }

    /// Returns true if the container uses a guarantee of its pod, or of a resource claim.
    pub fn shares_pod(&self) -> bool {
        self.slice != GuaranteeSource::Own
    }
}

impl From<&PodContainer> for api::PodContainer {
    fn from(of: &PodContainer) -> Self {
        let PodId { namespace, name, uid } = of.pod.clone();
        Self {
            namespace,
            pod: name,
            container: of.container.clone(),
            pod_uid: uid,
            shares_pod: of.shares_pod(),
        }
    }
}

/// Returns `NAMESPACE/POD/CONTAINER`, the value of the label `workload`.
pub fn container_name(namespace: &str, pod: &str, container: &str) -> String {
    format!("{namespace}/{pod}/{container}")
}

//! Requests of the container runtime for pods and containers, and the stored data of admitted ones.

use std::collections::BTreeSet;

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_engine::{self as engine, PodId, QosClass};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, PodContainer},
};
use numaward_topology::Bytes;
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

/// Maximum size of all requests of a pod in the ledger, in bytes. A pod can have hundreds of containers, each with a request and
/// with the pod's labels. The ledger is read whole on start, which takes several times its size: with this limit, the start on a
/// node with 250 pods fits in the memory of the manifests.
pub(crate) const MAX_POD_BYTES: usize = 32 << 10;

/// Checks the size of a request in the ledger, together with the other requests of its pod.
///
/// # Errors
///
/// The requests of the pod have more than 32 KiB.
pub fn check_account<'a>(
    request: &engine::Request,
    terms: &engine::Terms,
    siblings: impl Iterator<Item = &'a engine::OwnerAccount>,
) -> Result<(), api::Rejection> {
    let size = account_bytes(Some(request), terms);
    let siblings = siblings.map(|account| account_bytes(account.request.as_deref(), &account.terms));
    let of_pod = siblings.fold(size, usize::saturating_add);
    let what = if size > MAX_POD_BYTES {
        format!("the request takes {size} bytes to store, and the maximum is {MAX_POD_BYTES}")
    } else if of_pod > MAX_POD_BYTES {
        format!(
            "with this request, those of its pod take {of_pod} bytes to store, and the maximum is {MAX_POD_BYTES}"
        )
    } else {
        return Ok(());
    };
    let message = format!("{what}: it has too many containers, labels or annotations");
    Err(api::Rejection { reason: "AccountTooLarge".to_owned(), message, shortfalls: Vec::new() })
}

/// Returns true if a refusal for this reason, one of the kubelet's, is for free resources: another host may have them, or
/// moves of running workloads may free them.
pub fn is_for_room(reason: &str) -> bool {
    matches!(reason, "TopologyAffinityError" | "UnexpectedAdmissionError")
}

/// Returns the size of a request in the ledger. A stale account has terms only.
pub(crate) fn account_bytes(request: Option<&engine::Request>, terms: &engine::Terms) -> usize {
    serde_json::to_vec(&(request, terms)).map_or(usize::MAX, |account| account.len())
}

/// A pod, or a container of a pod, that the engine has admitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedPod {
    pub pod: PodId,
    /// ID of the sandbox for which it was admitted last.
    pub sandbox: String,
    /// Name of the container; `None` if the pod was admitted as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Explanation of the placement; stored in `decisions.jsonl`, not in the ledger.
    #[serde(skip)]
    pub explanation: api::Explanation,
}

/// A container to which settings were assigned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacedContainer {
    pub of: PodContainer,
    /// Cgroup of the container. It may not exist yet.
    pub cgroup: CgroupPath,
    /// Input for the memory protection of the container.
    #[serde(default)]
    pub memory: MemoryClaim,
    /// True if the pod has a CPU quota that stays when the quota of the container is removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_pod_quota: bool,
    /// Settings that the container would have without numaward, if the runtime was asked to set different ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_us: Option<Settings>,
}

/// Memory values of a container from which its protection follows.
#[skip_serializing_none]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryClaim {
    /// `QoS` class of the pod; `None` if it is not known.
    pub class: Option<QosClass>,
    /// Memory request; `None` if it is known only to the API server.
    pub request: Option<Bytes>,
    /// Memory limit, if there is one.
    pub limit: Option<Bytes>,
    /// Memory overhead of the pod's `RuntimeClass`. It is added to the protection of the pod's cgroup, as the kubelet
    /// adds it to the pod's request.
    pub overhead: Option<Bytes>,
}

/// Scope of a guarantee that a container or pod requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodClaim {
    /// All containers of the pod are admitted together.
    Pod(engine::Request),
    /// Only this container is admitted.
    Container(engine::Request),
    /// No guarantee is requested: the container uses the shared pool.
    Nothing,
}

/// Request to place a pod before it runs.
#[derive(Clone, Debug)]
pub struct PodPlacementRequest {
    pub pod: PodId,
    /// ID of the sandbox.
    pub sandbox: String,
    pub asked: PodClaim,
    /// Placement terms.
    pub terms: engine::Terms,
    /// Notes for the explanation.
    pub notes: Vec<String>,
}

/// Request to place a container before it is created.
#[derive(Clone, Debug)]
pub struct ContainerPlacementRequest {
    pub pod: PodPlacementRequest,
    /// ID of the container in the runtime.
    pub id: String,
    /// Name of the container in the pod.
    pub name: String,
    /// Cgroup of the container. It may not exist yet.
    pub cgroup: CgroupPath,
    /// The part of the pod's guarantee that the container uses, if the pod is admitted as a whole.
    pub slice: GuaranteeSource,
    /// Input for the memory protection of the container.
    pub memory: MemoryClaim,
    /// True if the pod has a CPU quota that stays when the quota of the container is removed.
    pub keeps_pod_quota: bool,
    /// Settings that the runtime applies to the container, out of those that numaward can set. On creation: those
    /// that other NRI plugins request.
    pub has: Settings,
    /// The resource claims that the container uses.
    pub claims: ClaimUses,
    /// True if another program has chosen the CPUs and nodes of the container. It keeps them unless numaward has placed the
    /// container before.
    pub is_placed_by_other_program: bool,
}

/// Resource claims that a container uses. Only those that are reserved for its pod count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimUses {
    /// Names in the pod's namespace, as the API server reports them; empty if it has not reported the pod.
    pub names: BTreeSet<String>,
    /// UIDs, as the container runtime reports them; empty if it does not.
    pub uids: BTreeSet<String>,
}

impl ContainerPlacementRequest {
    /// Returns true if the container requests a guarantee.
    pub fn has_claim(&self) -> bool {
        match &self.pod.asked {
            PodClaim::Nothing => false,
            PodClaim::Container(_) => true,
            PodClaim::Pod(request) => {
                self.slice != GuaranteeSource::Own || request.has_container(&self.name.as_str().into())
            }
        }
    }

    /// Returns the owner name of a container that is admitted on its own.
    pub fn container_owner(&self) -> String {
        format!("{}/{}", self.pod.pod.uid, self.name)
    }
}

/// Settings that the runtime has to apply to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// ID of the container in the runtime.
    pub id: String,
    pub settings: Settings,
}

/// Result of the comparison with the containers that the runtime reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncResult {
    /// Settings that the runtime has to change.
    pub updates: Vec<Update>,
    /// Containers that ran without their settings, with the reason.
    pub unpinned: Vec<(String, UnpinnedReason)>,
    /// Ids of containers that another program has pinned, which stay as they are.
    pub foreign: Vec<String>,
}

/// Reason why a container ran without the settings of its guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum UnpinnedReason {
    /// The container was started while the daemon was not connected to the runtime.
    Away,
    /// The container was started while the daemon was not connected, and its request does not fit.
    DoesNotFit,
    /// The policy does not fit the machine, so no new guarantees are given.
    Unfit,
    /// The ledger could not be stored.
    Ledger,
    /// The kernel refused the settings.
    Enforcement,
}

impl UnpinnedReason {
    /// All reasons.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Label of the reason in metrics.
    pub fn label(self) -> &'static str {
        self.into()
    }
}

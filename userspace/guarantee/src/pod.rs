//! What the container runtime asks for pods and their containers, and what is stored of them.

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_engine::{self as engine, QosClass};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, PodContainer, PodName},
};
use numaward_topology::Bytes;
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

/// Bytes that what an owner asks for has in the ledger, at most. The ledger is held in memory, and read whole at a start: with this,
/// that of a node with 110 pods has some MiB, whatever they ask for.
const MAX_ACCOUNT: usize = 32 << 10;

/// Refuses what would take too much of the ledger.
///
/// # Errors
///
/// It takes more than 32 KiB.
pub fn check_account(request: &engine::Request, terms: &engine::Terms) -> Result<(), api::Rejection> {
    let size = serde_json::to_vec(&(request, terms)).map_or(usize::MAX, |account| account.len());
    if size <= MAX_ACCOUNT {
        return Ok(());
    }
    let message = format!(
        "what {} asks for takes {size} bytes in the ledger, and may take {MAX_ACCOUNT}: it has too many containers, labels or annotations",
        request.owner
    );
    Err(api::Rejection { reason: "AccountTooLarge".to_owned(), message, shortfalls: Vec::new() })
}

/// An owner that was admitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedPod {
    /// Its pod.
    pub pod: PodName,
    /// The sandbox for which it was admitted last.
    pub sandbox: String,
    /// The container that the owner is; none: the pod as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Why it was placed there: kept elsewhere.
    #[serde(skip)]
    pub explanation: api::Explanation,
}

/// A container that was placed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacedContainer {
    /// Which.
    pub of: PodContainer,
    /// Its cgroup, which may not exist yet.
    pub cgroup: CgroupPath,
    /// What its protection follows from.
    #[serde(default)]
    pub memory: MemoryClaim,
    /// Whether its pod has a quota of CPU time that stays, whatever becomes of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_pod_quota: bool,
    /// What it would hold without us, where the runtime was asked to set something else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_us: Option<Settings>,
}

/// What a container asks for of memory, as far as its protection follows from it.
#[skip_serializing_none]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryClaim {
    /// The class of service of its pod; none where nothing says so.
    pub class: Option<QosClass>,
    /// What it requests; none where only an API server could say.
    pub request: Option<Bytes>,
    /// Its limit, if it has one.
    pub limit: Option<Bytes>,
    /// What its pod costs besides (the overhead of its `RuntimeClass`): the pod's cgroup is protected with it, as the
    /// kubelet counts it to what a pod requests.
    pub overhead: Option<Bytes>,
}

/// What is asked for with a container or a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodClaim {
    /// The whole pod, which is known.
    Pod(engine::Request),
    /// This container alone.
    Container(engine::Request),
    /// Nothing but its share of what is nobody's.
    Nothing,
}

/// A pod that is to run.
#[derive(Clone, Debug)]
pub struct PodPlacementRequest {
    /// Which.
    pub pod: PodName,
    /// Its sandbox.
    pub sandbox: String,
    /// What is asked for.
    pub asked: PodClaim,
    /// How it wants to be placed.
    pub terms: engine::Terms,
    /// What the explanation should say besides.
    pub notes: Vec<String>,
}

/// A container that is to be placed.
#[derive(Clone, Debug)]
pub struct ContainerPlacementRequest {
    /// Its pod, with what is asked for.
    pub pod: PodPlacementRequest,
    /// The runtime's id.
    pub id: String,
    /// Its name within the pod.
    pub name: String,
    /// Its cgroup, which may not exist yet.
    pub cgroup: CgroupPath,
    /// Which of its pod's allocations it is, where the pod is admitted as a whole.
    pub slice: GuaranteeSource,
    /// What its protection follows from.
    pub memory: MemoryClaim,
    /// Whether its pod has a quota of CPU time that stays, whatever becomes of its own.
    pub keeps_pod_quota: bool,
    /// What the runtime sets for it, of what we may set as well. In a creation, what others ask for.
    pub has: Settings,
    /// Whether somebody else has chosen its CPUs and nodes, so that it is left alone, unless we have placed it before.
    pub is_placed_by_other_program: bool,
}

impl ContainerPlacementRequest {
    /// Whether more is asked for with it than its share of what is nobody's.
    pub fn has_claim(&self) -> bool {
        match &self.pod.asked {
            PodClaim::Nothing => false,
            PodClaim::Container(_) => true,
            PodClaim::Pod(request) => {
                self.slice != GuaranteeSource::Own || request.has_container(&self.name.as_str().into())
            }
        }
    }

    /// The owner that the container is by itself.
    pub fn container_owner(&self) -> String {
        format!("{}/{}", self.pod.pod.uid, self.name)
    }
}

/// What a container is to get from the runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// The runtime's id of the container.
    pub id: String,
    /// What it is to hold.
    pub settings: Settings,
}

/// What came of a comparison with what runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncResult {
    /// What the runtime has to change.
    pub updates: Vec<Update>,
    /// Containers that ran without their pins, with why.
    pub unpinned: Vec<(String, UnpinnedReason)>,
}

/// Why a container ran without what it should have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum UnpinnedReason {
    /// It was started while we were not connected.
    Away,
    /// It was started while we were not connected, and what it asks for is not there.
    DoesNotFit,
    /// The policy does not fit the machine, so that nothing new is promised.
    Unfit,
    /// The ledger could not be stored.
    Ledger,
    /// The kernel did not take the settings.
    Enforcement,
}

impl UnpinnedReason {
    /// All of them.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// A short name, for a metric's label.
    pub fn label(self) -> &'static str {
        self.into()
    }
}

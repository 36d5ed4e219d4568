//! Moves of workloads that run, which make room for a request.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

use super::allocation::{Allocation, AllocationRequest};

/// A request for a plan.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlanRequest {
    /// What room is to be made for.
    pub request: AllocationRequest,
    /// The most workloads that may move; absent: 3. The containers of a pod that is placed as a whole count as one.
    #[schema(minimum = 1, maximum = 16)]
    pub max_moves: Option<u32>,
    /// The most memory that may move, as Kubernetes writes quantities; absent: any amount.
    #[schema(examples("16Gi"))]
    pub max_bytes: Option<String>,
}

/// A request to carry a plan out.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RebalanceRequest {
    /// What room is to be made for.
    pub request: AllocationRequest,
    /// The most workloads that may move; absent: 3.
    #[schema(minimum = 1, maximum = 16)]
    pub max_moves: Option<u32>,
    /// The most memory that may move, as Kubernetes writes quantities; absent: any amount.
    #[schema(examples("16Gi"))]
    pub max_bytes: Option<String>,
    /// The id of the plan that is to be carried out: it is refused if something else would be done by now. Absent: whatever
    /// is planned now.
    pub plan: Option<String>,
    /// Whether the request is admitted in the end. Otherwise only room is made, which the next request may take.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admit: bool,
}

/// Moves that make a request fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MovePlan {
    /// Made of the moves and the place of the request: the same as long as the same would be done.
    #[schema(examples("8d2f6c01a3e45b79"))]
    pub id: String,
    /// The moves, in their order; none where the request fits as it is.
    pub moves: Vec<Move>,
    /// Memory that has to go to another node, in all.
    pub bytes: u64,
    /// How long the workloads may be held up, in all: `bytes` at the `rate`.
    pub pause_milliseconds: u64,
    /// How fast pages are expected to move.
    pub rate: MigrationRate,
    /// What the request would hold after all moves.
    pub allocation: Allocation,
}

/// A workload that goes to other CPUs or nodes.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Move {
    /// The workload. Of a pod that is placed as a whole: one of its containers.
    pub workload: String,
    /// The nodes on which memory is promised to it before, as a list.
    pub from_nodes: String,
    /// Those on which it is promised afterwards.
    pub to_nodes: String,
    /// Its exclusive CPUs before, as a list.
    pub from_cpus: String,
    /// Those afterwards.
    pub to_cpus: String,
    /// Memory that has to go to another node.
    pub bytes: u64,
    /// Where `bytes` comes from.
    pub bytes_source: BytesSource,
    /// How long the workload may be held up at most, as estimated: `bytes` at the plan's `rate`.
    pub pause_milliseconds: u64,
    /// How far it is; absent in a plan.
    pub state: Option<MoveState>,
    /// User memory that has left the nodes so far; absent in a plan, and where it is not known.
    pub moved_bytes: Option<u64>,
}

/// How much has to move, by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BytesSource {
    /// What lies on other nodes than those it goes to (`memory.numa_stat`, and of hugepages `hugetlb.*.numa_stat`).
    Resident,
    /// What is promised to it on other nodes: what it has is not known.
    Promised,
}

/// How fast pages move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigrationRate {
    /// Bytes in a second.
    pub bytes_per_second: u64,
    /// Where that comes from.
    pub source: RateSource,
}

/// Where a rate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RateSource {
    /// What this daemon has moved so far on this host, by the time that it took.
    Measured,
    /// An assumption: this daemon has not moved enough yet to know.
    Assumed,
}

/// How far a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MoveState {
    /// It is to be made.
    Planned,
    /// Its pages are being moved.
    Moving,
    /// It is made.
    Moved,
    /// Its pages are being moved back.
    MovingBack,
    /// It was taken back.
    TakenBack,
    /// It was to be taken back, and could not be: the workload keeps its new place.
    Stays,
    /// The workload ended meanwhile.
    Gone,
}

/// A rebalance: a plan that is carried out, or was.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rebalance {
    /// The id of the plan.
    pub id: String,
    /// The name of the request for which room is made; absent where an earlier run of the daemon began it.
    pub request: Option<String>,
    /// Whether nobody asked for it: `rebalance.mode` is `auto`.
    pub automatic: bool,
    /// How far it is.
    pub state: RebalanceState,
    /// The moves, in their order.
    pub moves: Vec<Move>,
    /// Why it failed or was cancelled.
    pub reason: Option<String>,
    /// What the request holds now, if it was to be admitted.
    pub allocation: Option<Allocation>,
}

/// How far a rebalance is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RebalanceState {
    /// The moves are being made.
    Running,
    /// They are being taken back.
    RollingBack,
    /// All are made, and the request fits.
    Done,
    /// It failed, and what was done was taken back.
    Failed,
    /// It was cancelled, and what was done was taken back.
    Cancelled,
}

impl RebalanceState {
    /// Whether it is over.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

//! Rebalancing: moves of running workloads that make room for a request.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

use super::allocation::{Allocation, AllocationRequest};

/// A request for a plan.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlanRequest {
    /// The request for which room is needed.
    pub request: AllocationRequest,
    /// The maximum number of workloads that may move; absent: 3. The containers of a pod that is placed as a whole
    /// count as one.
    #[schema(minimum = 1, maximum = 16)]
    pub max_moves: Option<u32>,
    /// The maximum memory that may move, as a Kubernetes quantity; absent: no limit.
    #[schema(examples("16Gi"))]
    pub max_bytes: Option<String>,
}

/// A request to execute a plan.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RebalanceRequest {
    /// The request for which room is needed.
    pub request: AllocationRequest,
    /// The maximum number of workloads that may move; absent: 3.
    #[schema(minimum = 1, maximum = 16)]
    pub max_moves: Option<u32>,
    /// The maximum memory that may move, as a Kubernetes quantity; absent: no limit.
    #[schema(examples("16Gi"))]
    pub max_bytes: Option<String>,
    /// The id of the plan to execute. Refused if the current plan differs. Absent: the current plan.
    pub plan: Option<String>,
    /// True to admit the request afterwards. Otherwise only room is made, which the next request can use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admit: bool,
}

/// A plan of moves that make a request fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MovePlan {
    /// The id of the plan, computed from the moves and the placement of the request: equal plans have equal ids.
    #[schema(examples("8d2f6c01a3e45b79"))]
    pub id: String,
    /// The moves, in order; empty if the request fits already.
    pub moves: Vec<Move>,
    /// The total memory that must move to another node.
    pub bytes: u64,
    /// The total time for which the workloads may be paused: `bytes` at the `rate`.
    pub pause_milliseconds: u64,
    /// The expected rate at which pages move.
    pub rate: MigrationRate,
    /// The allocation of the request after all moves.
    pub allocation: Allocation,
}

/// A move of a workload to other CPUs or nodes.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Move {
    /// The workload; for a pod that is placed as a whole, one of its containers.
    pub workload: String,
    /// The nodes of its guaranteed memory before the move, as a list.
    pub from_nodes: String,
    /// The nodes of its guaranteed memory after the move, as a list.
    pub to_nodes: String,
    /// The exclusive CPUs before the move, as a list.
    pub from_cpus: String,
    /// The exclusive CPUs after the move, as a list.
    pub to_cpus: String,
    /// The memory that must move to another node.
    pub bytes: u64,
    /// The source of `bytes`.
    pub bytes_source: BytesSource,
    /// The estimated maximum time for which the workload may be paused: `bytes` at the `rate` of the plan.
    pub pause_milliseconds: u64,
    /// The state of the move; absent in a plan.
    pub state: Option<MoveState>,
    /// User memory that has left the old nodes so far; absent in a plan, and if unknown.
    pub moved_bytes: Option<u64>,
}

/// The source of the amount of memory that must move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BytesSource {
    /// The memory that the workload has outside the new nodes (`memory.numa_stat`; for hugepages
    /// `hugetlb.*.numa_stat`).
    Resident,
    /// The guaranteed memory outside the new nodes, because the actual memory is unknown.
    #[serde(rename = "promised")]
    Guaranteed,
}

/// The rate at which pages move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigrationRate {
    /// Bytes per second.
    pub bytes_per_second: u64,
    /// The source of the rate.
    pub source: RateSource,
}

/// The source of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RateSource {
    /// Measured on the pages that this daemon has moved so far.
    Measured,
    /// Assumed, because this daemon has not moved enough pages yet.
    Assumed,
}

/// The state of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MoveState {
    /// The move has not started.
    Planned,
    /// The pages are being moved.
    Moving,
    /// The move is complete.
    Moved,
    /// The pages are being moved back.
    MovingBack,
    /// The move was reverted.
    TakenBack,
    /// The move could not be reverted: the workload keeps its new place.
    Stays,
    /// The workload has ended.
    Gone,
}

/// A rebalance: a plan that is or was executed.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rebalance {
    /// The id of the plan.
    pub id: String,
    /// The name of the request for which room is made; absent if an earlier run of the daemon started the rebalance.
    pub request: Option<String>,
    /// True if the rebalance started automatically (`rebalance.mode: auto`).
    pub automatic: bool,
    /// The state of the rebalance.
    pub state: RebalanceState,
    /// The moves, in order.
    pub moves: Vec<Move>,
    /// The reason for which it failed or was cancelled.
    pub reason: Option<String>,
    /// The allocation of the request, if it was to be admitted.
    pub allocation: Option<Allocation>,
}

/// The state of a rebalance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RebalanceState {
    /// The moves are in progress.
    Running,
    /// The moves are being reverted.
    RollingBack,
    /// All moves are complete, and the request fits.
    Done,
    /// The rebalance failed, and its moves were reverted.
    Failed,
    /// The rebalance was cancelled, and its moves were reverted.
    Cancelled,
}

impl RebalanceState {
    /// Returns true if the rebalance has ended.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

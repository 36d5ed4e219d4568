//! What `numaward simulate` prints.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

/// What strategies would have done with traces of pods.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Simulation {
    /// The machine, if it is not that of each trace.
    pub machine: Option<String>,
    /// What was asked for in all traces that were replayed.
    pub offered: PodTotals,
    /// Sums over all traces, by strategy.
    pub strategies: Vec<StrategyOutcome>,
    /// Each trace, in the order of files.
    pub traces: Vec<TraceOutcome>,
}

/// A trace and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceOutcome {
    /// Its name.
    pub name: String,
    /// The topology policy.
    pub policy: String,
    /// What was asked for.
    pub offered: PodTotals,
    /// What each strategy did.
    pub strategies: Vec<StrategyOutcome>,
}

/// What Guaranteed pods asked for. Time is in the trace's ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodTotals {
    /// Pods.
    pub pods: u64,
    /// Thousandths of CPUs times ticks.
    pub cpu_milli_ticks: u64,
    /// MiB times ticks.
    pub memory_mib_ticks: u64,
}

/// What a strategy did.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StrategyOutcome {
    /// The strategy: `kubelet` or `native`.
    pub strategy: String,
    /// How memory-only nodes count, with `native`.
    pub tiers: Option<String>,
    /// Containers that may be moved for a request, with `native`.
    pub moves: Option<usize>,
    /// Traces on whose machine the strategy does not start; nothing of these is admitted.
    pub not_started: u64,
    /// Why, for the first of them.
    pub reason: Option<String>,
    /// Pods that were admitted, and what they held.
    pub admitted: PodTotals,
    /// Pods that were placed on several nodes.
    pub on_several_nodes: u64,
    /// The mean distance from exclusive CPUs to memory in hundredths (1000 is all local), by bytes and time. Absent if
    /// nobody had both.
    pub distance_in_hundredths: Option<u64>,
    /// The share of free CPUs on nodes on which the average pod does not fit, in tenths of a percent.
    pub unusable_cpus_per_mille: Option<u64>,
    /// The share of free memory on nodes on which the average pod does not fit, in tenths of a percent.
    pub unusable_memory_per_mille: Option<u64>,
    /// Requests that were admitted after others were moved.
    pub admitted_after_moves: u64,
    /// Containers that were moved.
    pub moved: u64,
    /// Memory that was moved.
    pub moved_bytes: u64,
}

/// What a fleet would have done with the pods of traces.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedFleet {
    /// The machine, if it is not that of each trace.
    pub machine: Option<String>,
    /// The hosts.
    pub hosts: u64,
    /// What the random numbers began with.
    pub seed: u64,
    /// What was asked for.
    pub offered: PodTotals,
    /// Sums over all groups, by who decides.
    pub outcomes: Vec<FleetOutcome>,
    /// Hosts alike, in the order of files.
    pub groups: Vec<FleetGroup>,
}

/// Hosts with the same machine and the same configuration, and a scheduler of their own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetGroup {
    /// The nodes of a host.
    pub nodes: u64,
    /// Its CPUs.
    pub cpus: u64,
    /// Its memory.
    pub memory_bytes: u64,
    /// The topology policy.
    pub policy: String,
    /// Its scope.
    pub scope: String,
    /// The traces whose pods arrive.
    pub traces: Vec<String>,
    /// The hosts.
    pub hosts: u64,
    /// The ticks in which pods arrive.
    pub window_ticks: u64,
    /// What was asked for.
    pub offered: PodTotals,
    /// What became of it, by who decides.
    pub outcomes: Vec<FleetOutcome>,
}

/// What became of the pods of a fleet.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetOutcome {
    /// The strategy on the hosts: `kubelet` or `native`; `none` if each host counts as one node.
    pub strategy: String,
    /// How memory-only nodes count, with `native`.
    pub tiers: Option<String>,
    /// Containers that may be moved for a request, with `native`.
    pub moves: Option<usize>,
    /// What the scheduler goes by: `NodeResourcesFit`, or also `NodeResourceTopologyMatch`.
    pub scheduler: String,
    /// Hosts on which the strategy does not start; nothing is admitted there.
    pub not_started_hosts: u64,
    /// Why, for the first of them.
    pub reason: Option<String>,
    /// Pods that were admitted, and what they held.
    pub admitted: PodTotals,
    /// By how much less memory time that is than with the strategy `none`; negative if it is more.
    pub lost_to_numa_mib_ticks: i64,
    /// How often a host refused a pod.
    pub refusals: u64,
    /// How often a controller made a new pod for one that was refused.
    pub retries: u64,
    /// Pods that were never placed.
    pub never_placed: u64,
    /// Requests that were admitted after others were moved.
    pub admitted_after_moves: u64,
    /// Containers that were moved.
    pub moved: u64,
    /// Memory that was moved.
    pub moved_bytes: u64,
}

/// Memory to reserve on each node, from what was seen in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SuggestedReservation {
    /// For how long the host was watched.
    pub observed_seconds: u64,
    /// The nodes with memory.
    pub nodes: Vec<SuggestedNode>,
    /// The sum: what kubeReserved, systemReserved and evictionHard have to add up to.
    pub total_bytes: u64,
}

/// Memory to reserve on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SuggestedNode {
    /// The node.
    pub node: u32,
    /// The most that was in use at a time and cannot be reclaimed, without the anonymous memory of containers and of commands
    /// of `numaward exec`.
    pub used_bytes: u64,
    /// What to reserve: a quarter more.
    pub reserved_bytes: u64,
}

//! Output of `numaward simulate`.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

/// The results of all strategies for traces of pods.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Simulation {
    /// The machine of the simulation; absent if each trace has its own.
    pub machine: Option<String>,
    /// The demand of all replayed traces.
    pub offered: PodTotals,
    /// The results over all traces, by strategy.
    pub strategies: Vec<StrategyOutcome>,
    /// The results for each trace, in the order of the files.
    pub traces: Vec<TraceOutcome>,
}

/// The results for a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceOutcome {
    /// The name of the trace.
    pub name: String,
    /// The topology policy.
    pub policy: String,
    /// The demand of the trace.
    pub offered: PodTotals,
    /// The result of each strategy.
    pub strategies: Vec<StrategyOutcome>,
}

/// Totals over Guaranteed pods. Time is in ticks of the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodTotals {
    /// The number of pods.
    pub pods: u64,
    /// CPU time in thousandths of CPUs times ticks.
    pub cpu_milli_ticks: u64,
    /// Memory time in MiB times ticks.
    pub memory_mib_ticks: u64,
}

/// The result of a strategy.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StrategyOutcome {
    /// The strategy: `kubelet` or `native`.
    pub strategy: String,
    /// The use of memory-only nodes, with `native`.
    pub tiers: Option<String>,
    /// The number of traces on whose machine the strategy does not start; none of their pods is admitted.
    pub not_started: u64,
    /// The reason for the first of these traces.
    pub reason: Option<String>,
    /// The totals of the admitted pods.
    pub admitted: PodTotals,
    /// The number of pods that were placed on several nodes.
    pub on_several_nodes: u64,
    /// The mean distance from exclusive CPUs to memory in hundredths (1000 is all local), weighted by bytes and time.
    /// Absent if no pod had both.
    pub distance_in_hundredths: Option<u64>,
    /// The share of free CPUs on nodes on which the average pod does not fit, in tenths of a percent.
    pub unusable_cpus_per_mille: Option<u64>,
    /// The share of free memory on nodes on which the average pod does not fit, in tenths of a percent.
    pub unusable_memory_per_mille: Option<u64>,
}

/// The results of a simulated fleet of hosts for traces of pods.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedFleet {
    /// The machine of the simulation; absent if each trace has its own.
    pub machine: Option<String>,
    /// The number of hosts.
    pub hosts: u64,
    /// The seed of the random numbers.
    pub seed: u64,
    /// The demand of all traces.
    pub offered: PodTotals,
    /// The results over all groups, by strategy and scheduler.
    pub outcomes: Vec<FleetOutcome>,
    /// The groups of identical hosts, in the order of the files.
    pub groups: Vec<FleetGroup>,
}

/// Hosts with the same machine and configuration, and with their own scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetGroup {
    /// The number of nodes of a host.
    pub nodes: u64,
    /// The number of CPUs of a host.
    pub cpus: u64,
    /// The memory of a host.
    pub memory_bytes: u64,
    /// The topology policy.
    pub policy: String,
    /// The scope of the topology policy.
    pub scope: String,
    /// The names of the traces with the pods that arrive.
    pub traces: Vec<String>,
    /// The number of hosts.
    pub hosts: u64,
    /// The number of ticks in which pods arrive.
    pub window_ticks: u64,
    /// The demand of the traces.
    pub offered: PodTotals,
    /// The results, by strategy and scheduler.
    pub outcomes: Vec<FleetOutcome>,
}

/// The result of a strategy and a scheduler for the pods of a fleet.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetOutcome {
    /// The strategy on the hosts: `kubelet`, `native`, or `none` if each host counts as one node.
    pub strategy: String,
    /// The use of memory-only nodes, with `native`.
    pub tiers: Option<String>,
    /// The plugins of the scheduler: `NodeResourcesFit`, or also `NodeResourceTopologyMatch`, `ResourceClaims`, or `ResourceClaims, host device`.
    pub scheduler: String,
    /// The handling of a pod that a host refuses: `fail`, as with the kubelet, or the setting of `kubernetes.refused`.
    pub refused: String,
    /// The assumptions of the simulation, in sentences.
    pub assumptions: Vec<String>,
    /// The number of hosts on which the strategy does not start; no pod is admitted there.
    pub not_started_hosts: u64,
    /// The reason for the first of these hosts.
    pub reason: Option<String>,
    /// The totals of the admitted pods.
    pub admitted: PodTotals,
    /// The memory time that is lost compared with the strategy `none`; negative if it is gained.
    pub lost_to_numa_mib_ticks: i64,
    /// The number of pods that a host refused when they were bound to it.
    pub refusals: u64,
    /// The number of these pods that started there later.
    pub started_later: u64,
    /// The number of times that a controller created a new pod for a refused one.
    pub retries: u64,
    /// The number of moves of running containers.
    #[serde(default)]
    pub moves: u64,
    /// The memory that these moves took to other nodes, in bytes.
    #[serde(default)]
    pub moved_bytes: u64,
    /// The number of pods that were never placed.
    pub never_placed: u64,
}

/// The suggested reservation of memory for the system, from the observed use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SuggestedReservation {
    /// The time for which the host was observed.
    pub observed_seconds: u64,
    /// The nodes with memory.
    pub nodes: Vec<SuggestedNode>,
    /// The sum over all nodes, which kubeReserved, systemReserved and evictionHard must add up to.
    pub total_bytes: u64,
}

/// The suggested reservation on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SuggestedNode {
    /// The node.
    pub node: u32,
    /// The maximum memory in use that could not be reclaimed, without the anonymous memory of containers and of
    /// commands of `numaward exec`.
    pub used_bytes: u64,
    /// The suggested reservation: a quarter more than that.
    pub reserved_bytes: u64,
}

//! CPU time of processes by node.

use std::collections::{BTreeMap, HashMap};

use numaward_topology::{CpuId, Machine, NodeId};
use procfs::process::Process;

use crate::{NodeShare, percent_of};

/// CPU time of processes by node, as far as it was sampled. The time of a thread between two samples counts for the
/// node where it runs at the second one.
pub(super) struct NodeCpuTime {
    nodes: BTreeMap<CpuId, NodeId>,
    /// CPU time of threads by process and thread, in clock ticks.
    ticks_by_thread: HashMap<(u32, i32), u64>,
    ticks: BTreeMap<(u32, NodeId), u64>,
    /// True after the first sample: a thread without an earlier value has started since then.
    has_sample: bool,
}

impl NodeCpuTime {
    /// Creates an empty sum for a machine with these CPUs.
    pub(super) fn new(machine: &Machine) -> Self {
        let nodes = machine.cpus.iter().map(|(id, cpu)| (*id, cpu.node)).collect();
        Self { nodes, ticks_by_thread: HashMap::new(), ticks: BTreeMap::new(), has_sample: false }
    }

    /// Adds the CPU time of the processes' threads since the previous sample. Ended processes and threads are skipped.
    pub(super) fn sample(&mut self, pids: &[u32]) {
        for &pid in pids {
            let tasks = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.tasks().ok());
            for stat in tasks.into_iter().flatten().flatten().filter_map(|task| task.stat().ok()) {
                let cpu = stat.processor.and_then(|cpu| u32::try_from(cpu).ok());
                self.add_thread((pid, stat.pid), cpu, stat.utime + stat.stime);
            }
        }
        self.has_sample = true;
    }

    fn add_thread(&mut self, thread: (u32, i32), cpu: Option<u32>, ticks: u64) {
        // The nodes of the CPU time before the first sample are not known.
        let before =
            self.ticks_by_thread.insert(thread, ticks).unwrap_or(if self.has_sample { 0 } else { ticks });
        if let Some(node) = cpu.and_then(|cpu| self.nodes.get(&CpuId(cpu))) {
            *self.ticks.entry((thread.0, *node)).or_default() += ticks.saturating_sub(before);
        }
    }

    /// Returns the shares of a process in the order of nodes; empty if the process used no CPU time.
    pub(super) fn shares(&self, pid: u32) -> Vec<NodeShare> {
        let of_process =
            self.ticks.range((pid, NodeId(0))..=(pid, NodeId(u32::MAX))).filter(|(_, ticks)| **ticks > 0);
        let all: u64 = of_process.clone().map(|(_, ticks)| ticks).sum();
        of_process
            .map(|((_, node), ticks)| NodeShare { node: node.0, percent: percent_of(*ticks, all) })
            .collect()
    }
}

/// Returns the CPU time of a thread in milliseconds; `None` if the thread has ended, or the kernel does not provide it.
pub(super) fn cpu_millis(thread: i32) -> Option<u64> {
    Some(Process::new(thread).ok()?.schedstat().ok()?.sum_exec_runtime / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_for_node_of_cpu() {
        let mut cpu_time = NodeCpuTime::new(&Machine::default());
        cpu_time.nodes = [(CpuId(0), NodeId(0)), (CpuId(1), NodeId(1))].into();
        for (thread, cpu, ticks) in
            [(1, 0, 500), (2, 1, 100), (1, 0, 530), (2, 1, 110), (3, 9, 5), (3, 9, 50)]
        {
            cpu_time.add_thread((7, thread), Some(cpu), ticks);
        }
        let share = |node, percent| NodeShare { node, percent };
        assert_eq!(cpu_time.shares(7), [share(0, 75.0), share(1, 25.0)]);
        assert!(cpu_time.shares(8).is_empty());
        cpu_time.has_sample = true;
        cpu_time.add_thread((7, 4), Some(1), 40);
        assert_eq!(cpu_time.shares(7), [share(0, 37.5), share(1, 62.5)], "a new thread");
    }

    #[test]
    fn samples_own_threads() {
        let mut cpu_time = NodeCpuTime::new(&Machine::default());
        let pid = std::process::id();
        cpu_time.sample(&[pid, u32::MAX]);
        assert!(
            cpu_time.ticks_by_thread.contains_key(&(pid, i32::try_from(pid).unwrap())),
            "{:?}",
            cpu_time.ticks_by_thread
        );
    }
}

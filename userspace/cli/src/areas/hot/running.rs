//! On which nodes the threads of processes spend their CPU time.

use std::collections::{BTreeMap, HashMap};

use numaward_topology::{CpuId, Machine, NodeId};
use procfs::process::Process;

use super::super::{Share, percent_of};

/// CPU time by process and node, as far as it was seen. A thread that moves between two samples counts where it is then.
pub(super) struct Running {
    nodes: BTreeMap<CpuId, NodeId>,
    /// The CPU time of threads by process and thread, in clock ticks.
    seen: HashMap<(u32, i32), u64>,
    ticks: BTreeMap<(u32, NodeId), u64>,
    /// Whether threads that are new have begun since the look before.
    has_looked: bool,
}

impl Running {
    /// On a machine with these CPUs.
    pub(super) fn new(machine: &Machine) -> Self {
        let nodes = machine.cpus.iter().map(|(id, cpu)| (*id, cpu.node)).collect();
        Self { nodes, seen: HashMap::new(), ticks: BTreeMap::new(), has_looked: false }
    }

    /// Looks at the threads of processes: what they ran since the last time. Those that ended are passed over.
    pub(super) fn sample(&mut self, pids: &[u32]) {
        for &pid in pids {
            let tasks = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.tasks().ok());
            for stat in tasks.into_iter().flatten().flatten().filter_map(|task| task.stat().ok()) {
                let cpu = stat.processor.and_then(|cpu| u32::try_from(cpu).ok());
                self.thread((pid, stat.pid), cpu, stat.utime + stat.stime);
            }
        }
        self.has_looked = true;
    }

    fn thread(&mut self, thread: (u32, i32), cpu: Option<u32>, ticks: u64) {
        // What it ran before the first look is not known by node.
        let before = self.seen.insert(thread, ticks).unwrap_or(if self.has_looked { 0 } else { ticks });
        if let Some(node) = cpu.and_then(|cpu| self.nodes.get(&CpuId(cpu))) {
            *self.ticks.entry((thread.0, *node)).or_default() += ticks.saturating_sub(before);
        }
    }

    /// The shares of a process, in the order of nodes; none if it ran too little.
    pub(super) fn shares(&self, pid: u32) -> Vec<Share> {
        let of_process =
            self.ticks.range((pid, NodeId(0))..=(pid, NodeId(u32::MAX))).filter(|(_, ticks)| **ticks > 0);
        let all: u64 = of_process.clone().map(|(_, ticks)| ticks).sum();
        of_process
            .map(|((_, node), ticks)| Share { node: node.0, percent: percent_of(*ticks, all) })
            .collect()
    }
}

/// The CPU time of a thread, in milliseconds; `None` where it is gone, or the kernel does not say.
pub(super) fn cpu_millis(thread: i32) -> Option<u64> {
    Some(Process::new(thread).ok()?.schedstat().ok()?.sum_exec_runtime / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_for_the_node_of_the_cpu() {
        let mut running = Running::new(&Machine::default());
        running.nodes = [(CpuId(0), NodeId(0)), (CpuId(1), NodeId(1))].into();
        for (thread, cpu, ticks) in
            [(1, 0, 500), (2, 1, 100), (1, 0, 530), (2, 1, 110), (3, 9, 5), (3, 9, 50)]
        {
            running.thread((7, thread), Some(cpu), ticks);
        }
        let share = |node, percent| Share { node, percent };
        assert_eq!(running.shares(7), [share(0, 75.0), share(1, 25.0)]);
        assert!(running.shares(8).is_empty());
        running.has_looked = true;
        running.thread((7, 4), Some(1), 40);
        assert_eq!(running.shares(7), [share(0, 37.5), share(1, 62.5)], "one that is new");
    }

    #[test]
    fn our_own_threads_are_seen() {
        let mut running = Running::new(&Machine::default());
        let pid = std::process::id();
        running.sample(&[pid, u32::MAX]);
        assert!(running.seen.contains_key(&(pid, i32::try_from(pid).unwrap())), "{:?}", running.seen);
    }
}

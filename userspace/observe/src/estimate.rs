//! Estimate of remote accesses for workloads that the kernel does not sample (`observe.remoteEstimate`).
//!
//! # Problem
//! NUMA balancing skips a workload that is bound to nodes by its cpuset or its memory policy. Only hardware counters
//! could then show whether it accesses memory of other nodes.
//!
//! # Algorithm
//! The estimate assumes that every thread accesses all memory of its workload evenly. The share of remote accesses is
//! then the sum over all nodes of the share of CPU time on the node times the share of memory on the other nodes.
//! Memory is the memory mapped by tasks (anonymous memory and mapped files, from `memory.numa_stat`). If all CPUs of
//! the cpuset belong to a single node, the distribution of CPU time is known. Otherwise the CPU time that each thread
//! used since the last iteration (`/proc/PID/task/TID/stat`) counts for the node of the CPU on which it ran last.
//!
//! # Invariants
//! - An iteration opens at most as many files as the budget allows; workloads take turns if it does not suffice for
//!   all.
//! - At most [`MAX_THREADS`] threads of a workload are read; they represent all of its threads.
//! - A workload that did not run keeps its estimate for [`ESTIMATE_LIFETIME`].

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupId,
    knob::{Knob, KnobValue},
    read::{subtree_with, threads},
    read_lossy,
};
use numaward_topology::{CpuId, Machine, NodeId};

/// Most threads of a workload that are read.
const MAX_THREADS: usize = 256;
/// Duration for which an estimate is served after the workload last ran.
const ESTIMATE_LIFETIME: Duration = Duration::from_mins(5);

/// Estimated shares of remote accesses in thousandths, with the time of the estimate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Estimates(pub(crate) BTreeMap<CgroupId, (u32, Instant)>);

impl Estimates {
    /// Returns the estimate of a cgroup unless it has expired.
    pub(crate) fn get(&self, id: CgroupId) -> Option<u32> {
        self.0.get(&id).filter(|(_, at)| at.elapsed() < ESTIMATE_LIFETIME).map(|(share, _)| *share)
    }

    /// Returns the mean estimate of several cgroups.
    pub(crate) fn mean<'a>(&self, ids: impl Iterator<Item = &'a CgroupId>) -> Option<u32> {
        let (sum, count) = ids
            .filter_map(|id| self.get(*id))
            .fold((0_u32, 0_u32), |(sum, count), share| (sum + share, count + 1));
        sum.checked_div(count)
    }
}

/// CPU time of threads at the last reading, by thread id and start time, because ids are reused.
type ThreadTimes = BTreeMap<(u32, u64), u64>;
/// CPU time by node, in any unit.
pub(crate) type CpuTimeByNode = BTreeMap<NodeId, u64>;

/// Reads the CPU times of threads, within a budget of files.
#[derive(Debug)]
pub(crate) struct Estimator {
    /// Most files that are opened per iteration.
    budget: usize,
    /// First workload of the next iteration.
    next: Option<CgroupId>,
    seen: BTreeMap<CgroupId, ThreadTimes>,
}

/// A workload to estimate.
#[derive(Debug)]
pub(crate) struct EstimateTarget {
    pub(crate) id: CgroupId,
    pub(crate) dir: PathBuf,
    /// Mapped memory by node.
    pub(crate) memory: BTreeMap<NodeId, u64>,
}

/// Result of reading a workload's threads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ThreadReading {
    /// CPU time by node since the last reading; empty if the workload did not run.
    Ran(CpuTimeByNode),
    /// First reading of the workload: nothing to compare it with.
    First,
    /// The budget is exhausted.
    OutOfBudget,
}

impl Estimator {
    /// Creates an estimator that opens at most `budget` files per iteration.
    pub(crate) fn new(budget: u32) -> Self {
        Self { budget: budget as usize, next: None, seen: BTreeMap::new() }
    }

    /// Reads the targets in turn, starting with the one that was skipped last time.
    pub(crate) fn read(
        &mut self,
        proc: &Path,
        machine: &Machine,
        targets: &[EstimateTarget],
        nested: &BTreeSet<PathBuf>,
    ) -> BTreeMap<CgroupId, ThreadReading> {
        let ids: BTreeSet<CgroupId> = targets.iter().map(|target| target.id).collect();
        self.seen.retain(|id, _| ids.contains(id));
        let first =
            targets.iter().position(|target| self.next.is_none_or(|next| target.id >= next)).unwrap_or(0);
        let (before, after) = targets.split_at(first);
        let mut left = self.budget;
        let mut readings = BTreeMap::new();
        self.next = None;
        for target in after.iter().chain(before) {
            let reading = self.read_target(proc, machine, target, nested, &mut left);
            if reading == ThreadReading::OutOfBudget {
                self.next = Some(target.id);
                break;
            }
            readings.insert(target.id, reading);
        }
        readings
    }

    fn read_target(
        &mut self,
        proc: &Path,
        machine: &Machine,
        target: &EstimateTarget,
        nested: &BTreeSet<PathBuf>,
        left: &mut usize,
    ) -> ThreadReading {
        if !spend(left) {
            return ThreadReading::OutOfBudget;
        }
        if let Ok(KnobValue::Cpus(cpus)) = Knob::CpusetCpusEffective.read(&target.dir) {
            let nodes: BTreeSet<NodeId> =
                cpus.iter().filter_map(|cpu| Some(machine.cpus.get(&cpu)?.node)).collect();
            if let (Some(&node), 1) = (nodes.first(), nodes.len()) {
                return ThreadReading::Ran(CpuTimeByNode::from([(node, 1)]));
            }
        }
        let Some(ids) = threads_below(&target.dir, nested, left) else { return ThreadReading::OutOfBudget };
        let mut now = ThreadTimes::new();
        let mut ran = CpuTimeByNode::new();
        let before = self.seen.get(&target.id);
        for id in ids {
            if !spend(left) {
                return ThreadReading::OutOfBudget;
            }
            // Skips a thread that has ended.
            let stat = read_lossy(&proc.join(format!("{id}/task/{id}/stat")));
            let Some(thread) = stat.ok().and_then(|text| Thread::parse(&text)) else { continue };
            let known = before.and_then(|before| before.get(&(id, thread.started)));
            if let (Some(known), Some(cpu)) = (known, machine.cpus.get(&thread.cpu)) {
                let time = ran.entry(cpu.node).or_default();
                *time = time.saturating_add(thread.used.saturating_sub(*known));
            }
            now.insert((id, thread.started), thread.used);
        }
        let first = before.is_none();
        self.seen.insert(target.id, now);
        if first { ThreadReading::First } else { ThreadReading::Ran(ran) }
    }
}

fn spend(left: &mut usize) -> bool {
    let enough = *left > 0;
    *left = left.saturating_sub(1);
    enough
}

/// Returns the first threads of a cgroup and its descendants, without the cgroups in `nested`; `None` if the budget
/// is exhausted.
fn threads_below(dir: &Path, nested: &BTreeSet<PathBuf>, left: &mut usize) -> Option<Vec<u32>> {
    let mut ids = Vec::new();
    for dir in subtree_with(dir, |path| !nested.contains(path)) {
        if ids.len() >= MAX_THREADS {
            break;
        }
        // Two files: the directory and its list of threads.
        if !spend(left) || !spend(left) {
            return None;
        }
        // A removed cgroup has no threads; id 0 is a thread outside of this PID namespace.
        ids.extend(threads(&dir, MAX_THREADS).unwrap_or_default().into_iter().filter(|id| *id != 0));
    }
    ids.truncate(MAX_THREADS);
    Some(ids)
}

/// Fields of `/proc/PID/task/TID/stat` (`proc_pid_stat(5)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Thread {
    /// CPU time in clock ticks.
    used: u64,
    /// Start time in clock ticks since boot.
    started: u64,
    /// The CPU on which it ran last.
    cpu: CpuId,
}

impl Thread {
    fn parse(text: &str) -> Option<Self> {
        // The name, the second field, may contain blanks and brackets.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // Fields are numbered from 1; the first after the name is the third.
        let field = |number: usize| fields.get(number - 3);
        let number = |index| field(index)?.parse::<u64>().ok();
        Some(Self {
            used: number(14)?.saturating_add(number(15)?),
            started: number(22)?,
            cpu: CpuId(field(39)?.parse().ok()?),
        })
    }
}

/// Returns the share of remote accesses in thousandths; `None` if the workload did not run or has no memory. `memory_node`
/// maps a node to the node with the memory local to its CPUs.
pub(crate) fn remote_share(
    ran: &CpuTimeByNode,
    memory: &BTreeMap<NodeId, u64>,
    memory_node: impl Fn(NodeId) -> NodeId,
) -> Option<u32> {
    let sum = |of: &BTreeMap<NodeId, u64>| of.values().fold(0_u128, |sum, value| sum + u128::from(*value));
    let (time, all_memory) = (sum(ran), sum(memory));
    let local = ran.iter().fold(0_u128, |local, (node, time)| {
        let near = memory.get(&memory_node(*node)).copied().unwrap_or(0);
        // Share of local memory in millionths, weighted with the CPU time.
        let share = (u128::from(near) * 1_000_000).checked_div(all_memory).unwrap_or(0);
        local.saturating_add(share * u128::from(*time))
    });
    let local = local.checked_div(time)?;
    (all_memory > 0).then(|| 1000 - u32::try_from(local / 1000).unwrap_or(1000).min(1000))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn write(path: &Path, text: impl AsRef<[u8]>) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn stat(used: u64, cpu: u32) -> String {
        format!(
            "7 (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {used} 5 0 0 20 0 1 0 99 0 0{} {cpu} 0 0 0\n",
            " 0".repeat(14)
        )
    }

    #[test]
    fn parses_thread_stat() {
        let good = stat(37, 3);
        assert_eq!(Thread::parse(&good), Some(Thread { used: 42, started: 99, cpu: CpuId(3) }));
        for text in ["", "7 (a", "7 (a) S 1 1", &good.replace(" 37 ", " x "), &good.replace(" 3 0 0 0", "")] {
            assert_eq!(Thread::parse(text), None, "{text}");
        }
        let most = stat(u64::MAX, 3);
        assert_eq!(Thread::parse(&most).map(|thread| thread.used), Some(u64::MAX));
    }

    #[test]
    fn remote_share_weighs_time_and_memory() {
        let by_node =
            |values: &[(u32, u64)]| values.iter().map(|&(node, value)| (NodeId(node), value)).collect();
        let share = |ran: &[(u32, u64)], memory: &[(u32, u64)]| {
            remote_share(&by_node(ran), &by_node(memory), |node| node)
        };
        assert_eq!(share(&[(0, 7)], &[(0, 100)]), Some(0));
        assert_eq!(share(&[(0, 7)], &[(1, 100)]), Some(1000));
        assert_eq!(share(&[(0, 3), (1, 1)], &[(0, 100), (1, 0)]), Some(250));
        assert_eq!(share(&[(0, 1), (1, 1)], &[(0, 1), (1, 3)]), Some(500));
        assert_eq!(share(&[(0, 0)], &[(0, 100)]), None, "it did not run");
        assert_eq!(share(&[(0, 7)], &[(0, 0)]), None, "it has no memory");
        assert_eq!(share(&[(0, u64::MAX), (1, u64::MAX)], &[(0, u64::MAX), (1, u64::MAX)]), Some(500));
        let near = remote_share(&by_node(&[(2, 7)]), &by_node(&[(0, 5)]), |_| NodeId(0));
        assert_eq!(near, Some(0), "CPUs without memory of their own are at home on the nearest");
    }

    /// Two nodes with two CPUs each.
    fn machine() -> Machine {
        Machine::builder().nodes(2).cores_per_node(2).build().unwrap()
    }

    #[test]
    fn reads_threads_within_budget() {
        let root = tempfile::tempdir().unwrap();
        let (cgroups, proc) = (root.path().join("cgroups"), root.path().join("proc"));
        let target = |id, name: &str| EstimateTarget {
            id: CgroupId(id),
            dir: cgroups.join(name),
            memory: BTreeMap::from([(NodeId(0), 1)]),
        };
        let targets = [target(1, "a"), target(2, "b"), target(3, "pinned")];
        write(&cgroups.join("a/cgroup.threads"), "10\n0\n");
        write(&cgroups.join("a/below/cgroup.threads"), "11\n12\n");
        write(&cgroups.join("b/cgroup.threads"), "20\n");
        write(&cgroups.join("pinned/cgroup.threads"), "30\n");
        write(&cgroups.join("pinned/cpuset.cpus.effective"), "2-3\n");
        let run = |id: u32, used, cpu| {
            // The name of a thread may have any bytes.
            let bytes = stat(used, cpu).into_bytes();
            let bytes: Vec<u8> =
                bytes.into_iter().map(|byte| if byte == b'b' { 0xff } else { byte }).collect();
            write(&proc.join(format!("{id}/task/{id}/stat")), bytes);
        };
        run(10, 100, 0);
        run(11, 100, 0);
        run(20, 100, 2);
        let machine = machine();
        let nested = BTreeSet::from([cgroups.join("b")]);
        let mut all = Estimator::new(1000);
        let readings = all.read(&proc, &machine, &targets, &nested);
        assert_eq!(readings[&CgroupId(1)], ThreadReading::First);
        assert_eq!(
            readings[&CgroupId(3)],
            ThreadReading::Ran(CpuTimeByNode::from([(NodeId(1), 1)])),
            "without looking at threads"
        );
        run(10, 130, 1);
        run(11, 110, 3);
        // Vanished and came: neither counts.
        fs::remove_dir_all(proc.join("20")).unwrap();
        run(12, 500, 3);
        let readings = all.read(&proc, &machine, &targets, &nested);
        assert_eq!(
            readings[&CgroupId(1)],
            ThreadReading::Ran(CpuTimeByNode::from([(NodeId(0), 30), (NodeId(1), 10)]))
        );
        assert_eq!(readings[&CgroupId(2)], ThreadReading::Ran(CpuTimeByNode::new()));

        // Enough for one workload at a time; each comes to its turn.
        let mut little = Estimator::new(9);
        let turns: Vec<Vec<u64>> = (0..3)
            .map(|_| little.read(&proc, &machine, &targets, &nested).keys().map(|id| id.0).collect())
            .collect();
        assert_eq!(turns, [vec![1], vec![2, 3], vec![1]]);
        assert!(Estimator::new(0).read(&proc, &machine, &targets, &nested).is_empty());
    }
}

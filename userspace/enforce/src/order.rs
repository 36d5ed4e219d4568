//! The order in which knobs are written.
//!
//! # Problem
//! A change concerns several knobs, which the kernel changes one by one. Between two writes a cgroup must never have an
//! empty set, a set wider than both the old and the new one, too little memory because its nodes narrowed before its
//! limit rose, or no protection.
//!
//! # Algorithm
//! Each knob is written once, from the old to the new value, in these phases:
//!
//! 1. a partition that ends becomes a member while it still has its CPUs;
//! 2. limits rise (`memory.max` before `memory.high`, because a `memory.high` above the maximum has no effect), and
//!    quotas of CPU time are lifted;
//! 3. protection rises, ancestors first, because it is effective only up to the ancestors' protection;
//! 4. `cpuset.cpus.exclusive`, ancestors first, because a child may only take CPUs of its parent;
//! 5. `cpuset.cpus`, before `cpuset.mems`: it is quick, and other cgroups may wait for these CPUs, while the write of
//!    the nodes moves pages and can take seconds. Pages that are allocated on the old nodes in between move too. Sets
//!    that only grow come last, because they grow by CPUs that another cgroup had;
//! 6. `cpuset.mems`;
//! 7. a partition begins, because it has its CPUs now;
//! 8. limits fall (`memory.high` before `memory.max`, so that memory is reclaimed before processes are killed), after
//!    the pages moved, and quotas of CPU time are restored;
//! 9. protection falls, the deepest cgroup first;
//! 10. exclusive CPUs are returned, the deepest cgroup first.

use std::cmp::Reverse;

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue, Partition, Quota},
};

use super::applied::Owner;

/// One write to a knob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteStep {
    pub cgroup: CgroupPath,
    pub owner: Owner,
    pub knob: Knob,
    /// The present value.
    pub from: KnobValue,
    /// The new value.
    pub to: KnobValue,
}

impl WriteStep {
    /// Returns the write that undoes this one.
    pub(super) fn reversed(&self) -> Self {
        Self { from: self.to.clone(), to: self.from.clone(), ..self.clone() }
    }
}

/// Sorts the writes. If exclusive CPUs of an ancestor both gain and lose CPUs, they are written in two steps.
pub(super) fn ordered(steps: Vec<WriteStep>, is_ancestor: impl Fn(&CgroupPath) -> bool) -> Vec<WriteStep> {
    let mut steps: Vec<_> = steps
        .into_iter()
        .flat_map(|step| match (&step.from, &step.to) {
            (KnobValue::Cpus(from), KnobValue::Cpus(to))
                if step.knob == Knob::CpusetCpusExclusive
                    && is_ancestor(&step.cgroup)
                    && !from.is_subset(to)
                    && !to.is_subset(from) =>
            {
                let both = KnobValue::Cpus(from | to);
                vec![WriteStep { to: both.clone(), ..step.clone() }, WriteStep { from: both, ..step }]
            }
            _ => vec![step],
        })
        .collect();
    steps.sort_by_cached_key(|step| key(step, is_ancestor(&step.cgroup)));
    steps
}

/// Returns the sort key: phase, then depth (parents first or children first), then knob.
fn key(step: &WriteStep, is_ancestor: bool) -> ((u8, bool), usize, Reverse<usize>, u8) {
    let depth = step.cgroup.components().count();
    let down = |phase, rank| ((phase, false), depth, Reverse(0), rank);
    let up = |phase, rank| ((phase, false), 0, Reverse(depth), rank);
    let rises = match (&step.from, &step.to) {
        (KnobValue::Limit(from), KnobValue::Limit(to)) => to > from,
        (KnobValue::Cpus(from), KnobValue::Cpus(to)) => from.is_subset(to),
        _ => true,
    };
    match step.knob {
        Knob::CpusetPartition => match &step.to {
            KnobValue::Partition(to) if to.partition == Partition::Member => down(1, 0),
            _ => down(7, 0),
        },
        Knob::MemoryMax => down(if rises { 2 } else { 8 }, u8::from(!rises)),
        Knob::MemoryHigh => down(if rises { 2 } else { 8 }, u8::from(rises)),
        Knob::HugetlbMax(_) => down(if rises { 2 } else { 8 }, 2),
        Knob::CpuMax => down(if step.to == KnobValue::Quota(Quota::Max) { 2 } else { 8 }, 3),
        Knob::MemoryMin if rises => down(3, 0),
        Knob::MemoryMin => up(9, 0),
        Knob::MemoryLow if rises => down(3, 1),
        Knob::MemoryLow => up(9, 1),
        Knob::CpusetCpusExclusive if rises || !is_ancestor => down(4, 0),
        Knob::CpusetCpusExclusive => up(10, 0),
        Knob::CpusetCpus => ((5, grows(&step.from, &step.to)), depth, Reverse(0), 0),
        Knob::CpusetMems => down(6, 0),
        // Never written as a step.
        Knob::CpusetCpusEffective | Knob::CpusetMemsEffective | Knob::SubtreeControl | Knob::Procs => {
            down(0, 0)
        }
    }
}

/// Returns whether a set of CPUs only grows. The empty set means all that the parent has.
fn grows(from: &KnobValue, to: &KnobValue) -> bool {
    match (from, to) {
        (KnobValue::Cpus(from), _) if from.is_empty() => false,
        (KnobValue::Cpus(from), KnobValue::Cpus(to)) => to.is_empty() || from.is_subset(to),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(cgroup: &str, knob: &str, from: &str, to: &str) -> WriteStep {
        let knob: Knob = knob.parse().unwrap();
        WriteStep {
            cgroup: cgroup.parse().unwrap(),
            owner: Owner::Cgroupfs,
            knob,
            from: knob.parse(from).unwrap(),
            to: knob.parse(to).unwrap(),
        }
    }

    /// Sorts the steps, after their order was reversed, and formats the writes.
    fn written(steps: &[(&str, &str, &str, &str)]) -> Vec<String> {
        let steps =
            steps.iter().rev().map(|&(cgroup, knob, from, to)| step(cgroup, knob, from, to)).collect();
        ordered(steps, |path| path.to_string() != "/a/b")
            .iter()
            .map(|step| format!("{} {} {}", step.cgroup, step.knob, step.to))
            .collect()
    }

    /// Asserts that the steps are already in the order of their writes.
    fn stays(steps: &[(&str, &str, &str, &str)]) {
        let expected: Vec<_> =
            steps.iter().map(|(cgroup, knob, _, to)| format!("{cgroup} {knob} {to}")).collect();
        assert_eq!(written(steps), expected);
    }

    #[test]
    fn grants_guarantee_from_ancestors_down() {
        stays(&[
            ("/a/b", "memory.max", "1048576", "max"),
            ("/a/b", "memory.high", "1048576", "2097152"),
            ("/a", "memory.min", "0", "8192"),
            ("/a/b", "memory.min", "0", "8192"),
            ("/a", "cpuset.cpus.exclusive", "", "2-3"),
            ("/a/b", "cpuset.cpus.exclusive", "", "2-3"),
            ("/a/b", "cpuset.cpus", "0-1", "2-3"),
            ("/a/b", "cpuset.mems", "0", "1"),
            ("/a/b", "cpuset.cpus.partition", "member", "root"),
        ]);
    }

    #[test]
    fn releases_guarantee_from_leaves_up() {
        stays(&[
            ("/a/b", "cpuset.cpus.partition", "root", "member"),
            ("/a/b", "cpuset.cpus.exclusive", "2-3", ""),
            ("/a/b", "cpuset.cpus", "2-3", "0-3"),
            ("/a/b", "cpuset.mems", "1", "0-1"),
            ("/a/b", "memory.high", "max", "2097152"),
            ("/a/b", "memory.max", "max", "4194304"),
            ("/a/b", "memory.min", "8192", "0"),
            ("/a", "memory.min", "8192", "0"),
            ("/a", "cpuset.cpus.exclusive", "2-3", ""),
        ]);
    }

    #[test]
    fn shrinks_sets_before_growing_others() {
        assert_eq!(
            written(&[
                ("/a", "cpuset.cpus", "0-3", ""),
                ("/b", "cpuset.cpus", "0-3", "0-5"),
                ("/a/b", "cpuset.cpus", "0-3", "4-5"),
                ("/a/c", "cpuset.cpus", "", "0-3"),
            ]),
            ["/a/c cpuset.cpus 0-3", "/a/b cpuset.cpus 4-5", "/b cpuset.cpus 0-5", "/a cpuset.cpus "]
        );
    }

    #[test]
    fn moved_partition_keeps_ancestor_cpus() {
        assert_eq!(
            written(&[
                ("/a", "cpuset.cpus.exclusive", "0-1", "1-2"),
                ("/a/b", "cpuset.cpus.exclusive", "0-1", "1-2"),
                ("/a/b", "cpuset.cpus", "0-1", "1-2"),
            ]),
            [
                "/a cpuset.cpus.exclusive 0-2",
                "/a/b cpuset.cpus.exclusive 1-2",
                "/a/b cpuset.cpus 1-2",
                "/a cpuset.cpus.exclusive 1-2",
            ]
        );
    }
}

//! Verdict on the nodes of guaranteed memory.
//!
//! # Problem
//! The page, `numaward top`, `numaward get`, metrics and alerts must agree on whether a workload's memory is off its
//! guaranteed nodes.
//!
//! # Rule
//! The guarantee of a kind of memory is broken if more than 16 MiB, and more than 1 % of the workload's anonymous and
//! shared memory, are off the guaranteed nodes. Page cache alone does not break it: the kernel drops it when memory is
//! needed. The memory of a Burstable workload beyond its guarantee may be on any node.

use numaward_topology::{Bytes, NodeId, ZoneKind};

use crate::WorkloadGuarantee;

/// Memory off the guaranteed nodes that never breaks a guarantee.
const MAX_OFF: Bytes = Bytes::mib(16);
/// The part of the memory, in percent, that may be off the guaranteed nodes as well.
const MAX_OFF_PERCENT: u64 = 1;

/// User memory by type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserMemory {
    /// Anonymous memory; of a kind of hugepages, all of it.
    pub anon: Bytes,
    /// Shared memory and tmpfs.
    pub shmem: Bytes,
    /// Page cache without shared memory.
    pub file: Bytes,
}

impl UserMemory {
    /// Returns hugepages of one size.
    pub fn hugepages(bytes: Bytes) -> Self {
        Self { anon: bytes, ..Self::default() }
    }

    /// Returns the memory of all types.
    pub fn total(&self) -> Bytes {
        Bytes(self.bound().0.saturating_add(self.file.0))
    }

    /// Returns the memory that the kernel cannot drop.
    pub fn bound(&self) -> Bytes {
        Bytes(self.anon.0.saturating_add(self.shmem.0))
    }

    /// Adds memory.
    pub fn add(&mut self, more: Self) {
        for (sum, more) in
            [(&mut self.anon, more.anon), (&mut self.shmem, more.shmem), (&mut self.file, more.file)]
        {
            sum.0 = sum.0.saturating_add(more.0);
        }
    }

    /// Returns at most `limit` of this memory; page cache is left out first.
    fn limited_to(self, limit: Bytes) -> Self {
        let anon = self.anon.min(limit);
        let shmem = self.shmem.min(minus(limit, anon));
        Self { anon, shmem, file: self.file.min(minus(minus(limit, anon), shmem)) }
    }
}

/// User memory of one kind of a workload: on its guaranteed nodes, and on other nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencySplit {
    pub on: UserMemory,
    pub off: UserMemory,
}

impl ResidencySplit {
    /// Returns the split of a workload's memory of a kind, which is given by node.
    pub fn new(
        guarantee: &WorkloadGuarantee,
        kind: ZoneKind,
        memory: impl IntoIterator<Item = (NodeId, UserMemory)>,
    ) -> Self {
        let mut split = Self::default();
        for (node, more) in memory {
            if guarantee.nodes.contains(node) { split.on.add(more) } else { split.off.add(more) }
        }
        if guarantee.is_burstable {
            let guaranteed = guarantee.placed.iter().filter(|(of, ..)| *of == kind);
            let guaranteed = guaranteed.fold(0, |sum: u64, (.., bytes)| sum.saturating_add(bytes.0));
            split.off = split.off.limited_to(minus(Bytes(guaranteed), split.on.total()));
        }
        split
    }

    /// Returns true if so much memory is off the guaranteed nodes that the guarantee is broken.
    pub fn is_broken(&self) -> bool {
        let off = self.off.bound().0;
        let all = self.on.bound().0.saturating_add(off);
        off > MAX_OFF.0.max(all / 100 * MAX_OFF_PERCENT)
    }

    /// Adds the memory of another workload.
    pub fn add(&mut self, more: Self) {
        self.on.add(more.on);
        self.off.add(more.off);
    }
}

fn minus(a: Bytes, b: Bytes) -> Bytes {
    Bytes(a.0.saturating_sub(b.0))
}

#[cfg(test)]
mod tests {
    use numaward_cgroup::CgroupId;
    use numaward_topology::CpuSet;

    use super::*;

    fn user([anon, shmem, file]: [u64; 3]) -> UserMemory {
        UserMemory { anon: Bytes::mib(anon), shmem: Bytes::mib(shmem), file: Bytes::mib(file) }
    }

    #[test]
    fn anon_and_shmem_break_a_guarantee() {
        const MIB: u64 = 1 << 20;
        let split = |on, off| ResidencySplit { on: user(on), off: user(off) };
        for (on, off, is_broken) in [
            ([0; 3], [0; 3], false),
            ([64, 0, 0], [16, 0, 0], false),
            ([64, 0, 0], [17, 0, 0], true),
            ([64, 0, 0], [0, 17, 0], true),
            ([64, 0, 0], [9, 9, 0], true),
            ([64, 0, 0], [0, 0, 4096], false),
            ([1980, 0, 0], [20, 0, 0], false),
            ([1900, 0, 90_000], [21, 0, 0], true),
            ([0, 9900, 0], [100, 0, 0], false),
        ] {
            assert_eq!(split(on, off).is_broken(), is_broken, "{on:?} on, {off:?} off");
        }
        let largest = UserMemory::hugepages(Bytes(u64::MAX));
        assert!(ResidencySplit { on: largest, off: largest }.is_broken());
        let more = UserMemory { anon: Bytes(16 * MIB + 1), ..UserMemory::default() };
        assert!(ResidencySplit { on: UserMemory::default(), off: more }.is_broken());
    }

    #[test]
    fn burstable_memory_beyond_guarantee_may_be_anywhere() {
        let guarantee = WorkloadGuarantee {
            cgroup: "/a".parse().unwrap(),
            id: CgroupId(1),
            owner: "a".into(),
            container: None,
            nodes: [NodeId(0)].into_iter().collect(),
            cpus: CpuSet::new(),
            hidden_cpus: CpuSet::new(),
            is_burstable: false,
            blocks: Vec::new(),
            placed: vec![(ZoneKind::Memory, NodeId(0), Bytes::mib(100))],
            offline_cpus: CpuSet::new(),
            uncovered: Vec::new(),
        };
        for (is_burstable, on, off, expected) in [
            (false, [90, 0, 0], [30, 5, 7], [30, 5, 7]),
            (true, [90, 0, 0], [30, 5, 7], [10, 0, 0]),
            (true, [50, 0, 10], [30, 5, 7], [30, 5, 5]),
            (true, [100, 0, 0], [30, 5, 7], [0, 0, 0]),
        ] {
            let guarantee = WorkloadGuarantee { is_burstable, ..guarantee.clone() };
            let memory = [(NodeId(0), user(on)), (NodeId(1), user(off))];
            let split = ResidencySplit::new(&guarantee, ZoneKind::Memory, memory);
            let expected = ResidencySplit { on: user(on), off: user(expected) };
            assert_eq!(split, expected, "burstable: {is_burstable}, {on:?} on, {off:?} off");
        }
    }
}

//! What the probes report at once, as they put it into their ring buffers.

use std::time::Duration;

use numaward_abi::{LongStall, Miss, OTHER_SLOT, OomKill};
use numaward_topology::NodeId;

use crate::{CgroupId, OOM_CONSTRAINT_NAMES, Pages, SlotId};

/// What the probes report at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeEvent {
    /// The OOM killer takes a process.
    OomKill {
        /// The slot of its workload; `None` where it is of none that is registered.
        slot: Option<SlotId>,
        /// Its cgroup.
        cgroup: CgroupId,
        /// What constrained the allocation: a name of [`OOM_CONSTRAINT_NAMES`], or its number.
        constraint: String,
        /// Its process id, in the namespace of the host.
        pid: u32,
        /// Its name, at most 15 bytes.
        command: String,
    },
    /// A workload was given memory outside the nodes promised to it: the first time, or again after a minute.
    Miss {
        /// The slot of the workload.
        slot: SlotId,
        /// The cgroup of the task that asked for the memory.
        cgroup: CgroupId,
        /// The node on which it is; `None` where that went meanwhile.
        node: Option<NodeId>,
        /// How much it is: one allocation, after which there may have been more.
        pages: Pages,
        /// The process id of the task, in the namespace of the host.
        pid: u32,
        /// The name of the task, at most 15 bytes.
        command: String,
    },
    /// A task was stalled in reclaim for [`Options::long_stall`](crate::Options::long_stall) or longer: the first of its
    /// workload, or again after a minute.
    LongStall {
        /// The slot of the workload.
        slot: SlotId,
        /// The cgroup of the task.
        cgroup: CgroupId,
        /// For how long.
        time: Duration,
        /// The process id of the task, in the namespace of the host.
        pid: u32,
        /// The name of the task, at most 15 bytes.
        command: String,
    },
}

/// Takes the members of a struct from its bytes, one after the other.
struct Members<'a>(&'a [u8]);

impl<'a> Members<'a> {
    /// `None` where there are not as many bytes as a `T` has.
    fn of<T>(bytes: &'a [u8]) -> Option<Self> {
        (bytes.len() == size_of::<T>()).then_some(Self(bytes))
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    /// A [`numaward_abi::Task`]: its cgroup, its slot, its process id, its name.
    fn task(&mut self) -> Option<(CgroupId, u32, u32, String)> {
        let (cgroup, slot, pid) = (CgroupId(self.u64()?), self.u32()?, self.u32()?);
        Some((cgroup, slot, pid, command_name(&self.take::<16>()?)))
    }
}

/// Reads an [`OomKill`]; `None` where it is not of that size, as with the others below.
pub(crate) fn oom_kill(bytes: &[u8]) -> Option<ProbeEvent> {
    let mut members = Members::of::<OomKill>(bytes)?;
    let (cgroup, slot, pid, command) = members.task()?;
    let constraint = members.u32()?;
    let name = OOM_CONSTRAINT_NAMES.get(constraint as usize);
    Some(ProbeEvent::OomKill {
        slot: (slot != OTHER_SLOT).then_some(SlotId(slot)),
        cgroup,
        constraint: name.map_or_else(|| constraint.to_string(), |name| (*name).to_owned()),
        pid,
        command,
    })
}

/// Reads a [`Miss`]; `nodes` are the ids of the node indices.
pub(crate) fn miss(bytes: &[u8], nodes: &[NodeId]) -> Option<(u32, ProbeEvent)> {
    let mut members = Members::of::<Miss>(bytes)?;
    let (cgroup, slot, pid, command) = members.task()?;
    let pages = Pages(members.u64()?);
    let node = nodes.get(members.u32()? as usize).copied();
    Some((slot, ProbeEvent::Miss { slot: SlotId(slot), cgroup, node, pages, pid, command }))
}

/// Reads a [`LongStall`].
pub(crate) fn long_stall(bytes: &[u8]) -> Option<(u32, ProbeEvent)> {
    let mut members = Members::of::<LongStall>(bytes)?;
    let (cgroup, slot, pid, command) = members.task()?;
    let time = Duration::from_nanos(members.u64()?);
    Some((slot, ProbeEvent::LongStall { slot: SlotId(slot), cgroup, time, pid, command }))
}

/// A task's name as the kernel keeps it: up to a zero; what is no UTF-8 is replaced.
pub(crate) fn command_name(comm: &[u8]) -> String {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &[u8; 16] = b"h\xffg\0rest\0\0\0\0\0\0\0\0";

    /// A task of cgroup 77 with process id 4711, and what follows it.
    fn bytes(slot: u32, long: &[u64], short: &[u32]) -> Vec<u8> {
        let ids = [slot, 4711].map(u32::to_ne_bytes);
        let task = 77_u64.to_ne_bytes().into_iter().chain(ids.into_iter().flatten()).chain(*NAME);
        let long = long.iter().flat_map(|word| word.to_ne_bytes());
        task.chain(long).chain(short.iter().flat_map(|word| word.to_ne_bytes())).collect()
    }

    #[test]
    fn a_kill_is_read_or_left_alone() {
        let event = bytes(3, &[], &[1, 0]);
        let expected = ProbeEvent::OomKill {
            slot: Some(SlotId(3)),
            cgroup: CgroupId(77),
            constraint: "cpuset".to_owned(),
            pid: 4711,
            command: "h\u{fffd}g".to_owned(),
        };
        assert_eq!(oom_kill(&event), Some(expected));
        assert_eq!(oom_kill(&event[1..]), None);
        let Some(ProbeEvent::OomKill { slot: None, constraint, .. }) = oom_kill(&bytes(0, &[], &[9, 0]))
        else {
            panic!("no kill");
        };
        assert_eq!(constraint, "9", "a constraint that a later kernel may have");
    }

    #[test]
    fn a_miss_and_a_stall_are_read_or_left_alone() {
        let nodes = [NodeId(0), NodeId(4)];
        let event = bytes(3, &[512], &[1, 0]);
        let expected = ProbeEvent::Miss {
            slot: SlotId(3),
            cgroup: CgroupId(77),
            node: Some(NodeId(4)),
            pages: Pages(512),
            pid: 4711,
            command: "h\u{fffd}g".to_owned(),
        };
        assert_eq!(miss(&event, &nodes), Some((3, expected)));
        assert!(matches!(miss(&event, &nodes[..1]), Some((3, ProbeEvent::Miss { node: None, .. }))));
        assert_eq!(miss(&event[..47], &nodes), None);

        let event = bytes(3, &[1_500_000], &[]);
        let expected = ProbeEvent::LongStall {
            slot: SlotId(3),
            cgroup: CgroupId(77),
            time: Duration::from_micros(1500),
            pid: 4711,
            command: "h\u{fffd}g".to_owned(),
        };
        assert_eq!(long_stall(&event), Some((3, expected)));
        assert_eq!(long_stall(&[]), None);
    }
}

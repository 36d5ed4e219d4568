//! Events that the probes write into their ring buffers.

use std::time::Duration;

use numaward_abi::{EventTask, LongStall, Miss, OTHER_SLOT, OomKill};
use numaward_topology::NodeId;

use crate::{CgroupId, OOM_CONSTRAINT_NAMES, Pages, SlotId, sys};

/// An event about a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeEvent {
    /// The slot of the task's workload; `None` if the workload is not registered.
    pub slot: Option<SlotId>,
    pub cgroup: CgroupId,
    /// The process id of the task, in the host's PID namespace.
    pub pid: u32,
    /// The name of the task, at most 15 bytes.
    pub command: String,
    pub incident: Incident,
}

/// The kind of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incident {
    /// The OOM killer kills the task.
    OomKill {
        /// The constraint of the allocation: a name of [`OOM_CONSTRAINT_NAMES`], or its number.
        constraint: String,
    },
    /// The task got memory outside the nodes that are guaranteed to its workload. Reported at most once per minute and
    /// workload.
    Miss {
        /// The node of the memory; `None` if the node was removed meanwhile.
        node: Option<NodeId>,
        /// The pages of the first such allocation; there may have been more.
        pages: Pages,
    },
    /// The task was stalled in reclaim for this time, at least
    /// [`ProbeOptions::long_stall`](crate::ProbeOptions::long_stall). Reported at most once per minute and workload.
    LongStall(Duration),
}

fn new_event(task: &EventTask, incident: Incident) -> ProbeEvent {
    ProbeEvent {
        slot: (task.slot != OTHER_SLOT).then_some(SlotId(task.slot)),
        cgroup: task.cgroup,
        pid: task.pid,
        command: command_name(&task.comm),
        incident,
    }
}

/// Decodes an [`OomKill`]; `None` if the record has another size.
pub(crate) fn oom_kill(bytes: &[u8]) -> Option<ProbeEvent> {
    let OomKill { task, constraint, .. } = sys::read_value(bytes)?;
    let name = OOM_CONSTRAINT_NAMES.get(constraint as usize);
    let constraint = name.map_or_else(|| constraint.to_string(), |name| (*name).to_owned());
    Some(new_event(&task, Incident::OomKill { constraint }))
}

/// Decodes a [`Miss`]; `None` if the record has another size. `nodes` are the ids of the node indices.
pub(crate) fn miss(bytes: &[u8], nodes: &[NodeId]) -> Option<ProbeEvent> {
    let Miss { task, pages, node, .. } = sys::read_value(bytes)?;
    let node = nodes.get(node as usize).copied();
    Some(new_event(&task, Incident::Miss { node, pages: Pages(pages) }))
}

/// Decodes a [`LongStall`]; `None` if the record has another size.
pub(crate) fn long_stall(bytes: &[u8]) -> Option<ProbeEvent> {
    let LongStall { task, nanoseconds } = sys::read_value(bytes)?;
    Some(new_event(&task, Incident::LongStall(Duration::from_nanos(nanoseconds))))
}

/// Decodes a task's name, which ends at the first zero. Bytes that are not UTF-8 are replaced.
pub(crate) fn command_name(comm: &[u8]) -> String {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &[u8; 16] = b"h\xffg\0rest\0\0\0\0\0\0\0\0";

    /// Encodes a task of cgroup 77 with process id 4711, followed by these numbers.
    fn bytes(slot: u32, long: &[u64], short: &[u32]) -> Vec<u8> {
        let ids = [slot, 4711].map(u32::to_ne_bytes);
        let task = 77_u64.to_ne_bytes().into_iter().chain(ids.into_iter().flatten()).chain(*NAME);
        let long = long.iter().flat_map(|word| word.to_ne_bytes());
        task.chain(long).chain(short.iter().flat_map(|word| word.to_ne_bytes())).collect()
    }

    /// Returns an event of that task, in slot 3.
    fn expected(incident: Incident) -> ProbeEvent {
        let (slot, command) = (Some(SlotId(3)), "h\u{fffd}g".to_owned());
        ProbeEvent { slot, cgroup: CgroupId(77), pid: 4711, command, incident }
    }

    #[test]
    fn decodes_oom_kills() {
        let event = bytes(3, &[], &[1, 0]);
        let constraint = "cpuset".to_owned();
        assert_eq!(oom_kill(&event), Some(expected(Incident::OomKill { constraint })));
        assert_eq!(oom_kill(&event[1..]), None);
        let unknown = oom_kill(&bytes(0, &[], &[9, 0])).unwrap();
        assert_eq!(unknown.slot, None);
        // A constraint of a later kernel.
        assert_eq!(unknown.incident, Incident::OomKill { constraint: "9".to_owned() });
    }

    #[test]
    fn decodes_misses_and_stalls() {
        let nodes = [NodeId(0), NodeId(4)];
        let event = bytes(3, &[512], &[1, 0]);
        let of = |node| Some(expected(Incident::Miss { node, pages: Pages(512) }));
        assert_eq!(miss(&event, &nodes), of(Some(NodeId(4))));
        assert_eq!(miss(&event, &nodes[..1]), of(None));
        assert_eq!(miss(&event[..47], &nodes), None);

        let event = bytes(3, &[1_500_000], &[]);
        assert_eq!(long_stall(&event), Some(expected(Incident::LongStall(Duration::from_micros(1500)))));
        assert_eq!(long_stall(&[]), None);
    }
}

//! Events that the probes report immediately: misses, kills, long stalls.

use numaward_api::{EventKind, Severity};
use numaward_model::{EventReport, snapshot::is_pinned};
use numaward_probes::{Incident, ProbeEvent};
use numaward_topology::{Bytes, NodeId, NodeSet};

use crate::{
    observer::Observer,
    oom_kills::{MIN_FREE_ELSEWHERE, free_elsewhere},
};

/// Reads the probes' events and reports them.
pub(crate) fn report_probe_events(observer: &Observer) {
    let read_free = || observer.node_memory.read_free(&observer.machine());
    observer.registry.read_events();
    let events = std::mem::take(&mut observer.registry.probing().events);
    let is_pinned_kill = |event: &ProbeEvent| matches!(&event.incident, Incident::OomKill { constraint } if is_pinned(constraint));
    if events.iter().any(|(event, _)| is_pinned_kill(event)) {
        // Before the free memory of other nodes changes.
        observer.node_memory.kills.without_room(&observer.read(), read_free);
    }
    for (ProbeEvent { incident, pid, command, .. }, subject) in events {
        let guaranteed = subject.as_ref().and_then(|subject| subject.guaranteed.as_ref());
        let report = match incident {
            Incident::OomKill { constraint } => {
                oom_kill_event(&constraint, pid, &command, free_elsewhere(&read_free(), guaranteed))
            }
            Incident::Miss { node, pages } => {
                miss_event(guaranteed, node, observer.page_size.bytes_of(pages), pid, &command)
            }
            Incident::LongStall(time) => {
                let message = format!("{command:?} ({pid}) had to reclaim memory for {time:.0?}.");
                EventReport::new(EventKind::Stall, message)
                    .detail("command", command)
                    .detail("pid", pid)
                    .detail("micros", time.as_micros())
            }
        };
        observer.events.report(match subject {
            Some(subject) => report.workload(subject.name),
            None => report,
        });
    }
}

/// Creates the event for memory outside the guaranteed nodes. `guaranteed` is absent if the guarantee has ended
/// meanwhile.
fn miss_event(
    guaranteed: Option<&NodeSet>,
    node: Option<NodeId>,
    bytes: Bytes,
    pid: u32,
    command: &str,
) -> EventReport {
    let place = node.map_or("a node that is gone".to_owned(), |node| format!("node {node}"));
    let outside = guaranteed.map_or("outside its guaranteed nodes".to_owned(), |guaranteed| {
        format!("outside its guaranteed nodes {guaranteed}")
    });
    // The process may belong to another workload: it may have read a file, or swapped memory in, for several.
    let message = format!(
        "It got {bytes} on {place}, {outside}, by an allocation of {command:?} ({pid}); there may have been more since."
    );
    let mut report = EventReport::new(EventKind::Miss, message)
        .detail("command", command)
        .detail("pid", pid)
        .detail("bytes", bytes.0);
    if let Some(guaranteed) = guaranteed {
        report = report.detail("promisedNodes", guaranteed);
    }
    match node {
        Some(node) => report.node(node),
        None => report,
    }
}

/// Creates the event for a process that the OOM killer chose.
fn oom_kill_event(constraint: &str, pid: u32, command: &str, free_elsewhere: Bytes) -> EventReport {
    let pinned = is_pinned(constraint);
    let why = match constraint {
        "none" => "the machine had no memory left",
        "memcg" => "its cgroup reached memory.max",
        "cpuset" => "the nodes that its cpuset allows were full",
        "mempolicy" => "the nodes that its memory policy allows were full",
        _ => "it is not known what was full",
    };
    let by_pin = pinned && free_elsewhere >= MIN_FREE_ELSEWHERE;
    let elsewhere = if by_pin {
        format!(", while {free_elsewhere} were free elsewhere: the pin killed it")
    } else {
        String::new()
    };
    let message = format!("The OOM killer took {command:?} ({pid}): {why}{elsewhere}.");
    let mut report = EventReport::new(EventKind::OomKill, message)
        .detail("constraint", constraint)
        .detail("command", command)
        .detail("pid", pid);
    if pinned {
        report = report.detail("freeElsewhereBytes", free_elsewhere.0);
    }
    if by_pin { report.severity(Severity::Critical) } else { report }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Events;

    #[test]
    fn kill_by_pin_is_critical() {
        let events = Events::default();
        for (constraint, free) in
            [("cpuset", 300), ("cpuset", 3), ("mempolicy", 64), ("memcg", 300), ("none", 300), ("9", 300)]
        {
            events.report(oom_kill_event(constraint, 7, "load", Bytes::mib(free)));
        }
        let filter = numaward_api::EventFilter { limit: 10, ..Default::default() };
        let reported = events.page(&filter).events;
        let critical: Vec<bool> = reported.iter().map(|event| event.severity == Severity::Critical).collect();
        assert_eq!(critical, [true, false, true, false, false, false]);
        assert_eq!(
            reported[0].message,
            "The OOM killer took \"load\" (7): the nodes that its cpuset allows were full, while 300Mi were free \
             elsewhere: the pin killed it."
        );
        assert_eq!(reported[0].details["freeElsewhereBytes"], (300_u64 << 20).to_string());
        assert!(reported[5].message.contains("it is not known what was full"));
    }

    #[test]
    fn miss_event_names_node_and_process() {
        let events = Events::default();
        let guaranteed: NodeSet = "0-1".parse().unwrap();
        let report = |name: &str, guaranteed, node| {
            events.report(miss_event(guaranteed, node, Bytes::kib(8), 7, "load").workload(name));
        };
        report("a", Some(&guaranteed), Some(NodeId(3)));
        report("b", None, None);
        let reported = events.page(&numaward_api::EventFilter { limit: 10, ..Default::default() }).events;
        assert_eq!(
            reported[0].message,
            "It got 8Ki on node 3, outside its guaranteed nodes 0-1, by an allocation of \"load\" (7); there may have been more since."
        );
        assert_eq!((reported[0].node, reported[0].workload.as_deref()), (Some(3), Some("a")));
        let details =
            ["bytes", "command", "pid", "promisedNodes"].map(|key| reported[0].details[key].as_str());
        assert_eq!(details, ["8192", "load", "7", "0-1"]);
        assert!(
            reported[1].message.contains("a node that is gone, outside its guaranteed nodes"),
            "{reported:?}"
        );
        assert_eq!(reported[1].node, None);
    }
}

//! What workloads do beside allocating, by name: accesses, migrations, stalls, kills.
//!
//! As with allocations, what a name counts never goes down while it is listed: what its former members had counted
//! when they gave back their slots is its base.

use std::{collections::BTreeMap, sync::Arc};

use numaward_probes::{Activity, MIGRATION_REASONS, Mode, NUMA_MISPLACED, Probe, ProbeEvent, Probes, SlotId};
use numaward_topology::{Bytes, NodeId, NodeSet, sysfs};

use super::{Observer, State, sampling::Sampling, table::Series};
use crate::{
    events::{EventKind, Report, Severity},
    metrics::WorkloadActivity,
};

/// Memory that is free elsewhere when a pin kills: with less, the machine was full.
const FREE_ELSEWHERE: Bytes = Bytes::mib(64);

/// The bases.
#[derive(Debug, Default)]
pub(super) struct Activities {
    by_name: BTreeMap<Arc<str>, Activity>,
}

impl Activities {
    /// A member of this name gives back its slot, and had counted this.
    pub(super) fn release(&mut self, name: &Arc<str>, last: &Activity) {
        self.by_name.entry(name.clone()).or_default().add(last);
    }

    /// Forgets names that are no longer listed.
    pub(super) fn keep(&mut self, is_listed: impl Fn(&str) -> bool) {
        self.by_name.retain(|name, _| is_listed(name));
    }

    /// All that a name counted.
    pub(super) fn of(
        &self,
        name: &str,
        series: &Series<SlotId>,
        slots: &BTreeMap<SlotId, Activity>,
    ) -> Activity {
        let mut sum = self.by_name.get(name).cloned().unwrap_or_default();
        let held = series.members.values().filter_map(|member| member.slot);
        held.filter_map(|slot| slots.get(&slot)).for_each(|activity| sum.add(activity));
        sum
    }
}

/// What is served of it: the parts whose probes are attached.
pub(super) fn figures(
    activity: &Activity,
    nodes: &[NodeId],
    probes: &Probes,
    sampling: Vec<Sampling>,
    moved: Option<u64>,
) -> WorkloadActivity {
    let attached =
        |probe| probes.reports().iter().any(|report| report.probe == probe && report.mode != Mode::Absent);
    let remote =
        |node: &NodeId| activity.accesses.iter().find(|of| of.node == *node).map_or(0, |of| of.remote.0);
    // Those of NUMA balancing are there from the start, the others from when they happen.
    let migrated = || {
        let reasons = MIGRATION_REASONS.iter().zip(activity.migrated).enumerate();
        let told = reasons.filter(|(index, (_, pages))| *index == NUMA_MISPLACED || pages.0 > 0);
        let mut by_reason: BTreeMap<&'static str, u64> = BTreeMap::new();
        for (_, (reason, pages)) in told {
            let sum = by_reason.entry(reason).or_default();
            *sum = sum.saturating_add(pages.0);
        }
        by_reason.into_iter().collect()
    };
    WorkloadActivity {
        remote: attached(Probe::Hint).then(|| nodes.iter().map(remote).collect()),
        moved,
        sampling: sampling.into_iter().map(Sampling::as_str).collect(),
        migrated: attached(Probe::Migrate).then(migrated),
        stalls: attached(Probe::Stall).then_some(activity.stalls),
        oom_kills: attached(Probe::OomKill).then_some(activity.oom_kills),
        dram: attached(Probe::Hardware).then(|| {
            let of = |node: &NodeId| activity.dram.iter().find(|of| of.node == *node);
            nodes.iter().map(|node| of(node).map_or((None, 0), |of| (of.local, of.remote))).collect()
        }),
    }
}

impl State {
    /// Keeps what a workload had counted, before it gives back its slot.
    pub(super) fn keep_activity(&mut self, id: numaward_cgroup::CgroupId) {
        let (Some(slot), Some(name)) = (self.table.slot(id), self.table.name(id)) else { return };
        match self.probes.activity_of(slot) {
            Ok(last) => self.activities.release(name, &last),
            Err(error) => {
                tracing::warn!(workload = %name, error = super::chain(&error), "last counts are lost");
            }
        }
    }
}

impl Observer {
    /// Reports what the probes told.
    pub(super) fn report_probe_events(&self) {
        let told = {
            let mut state = self.lock();
            let events = state.probes.events();
            let name = |event: &ProbeEvent| {
                let ProbeEvent::OomKill { slot, .. } = event;
                let (id, _) =
                    state.table.members().find(|(_, member)| member.slot == *slot && slot.is_some())?;
                let promised = state.promises.nodes_of(id).cloned();
                Some((state.table.name(id)?.clone(), promised))
            };
            let named = events.into_iter().map(|event| {
                let name = name(&event);
                (event, name)
            });
            named.collect::<Vec<_>>()
        };
        for (event, workload) in told {
            let ProbeEvent::OomKill { constraint, pid, command, .. } = event;
            let (name, promised) = workload.unzip();
            let elsewhere = self.free_elsewhere(promised.flatten().as_ref());
            self.events.report(oom_kill(name, &constraint, pid, &command, elsewhere));
        }
    }

    /// Free memory on the nodes that are not `promised`, or on the one with the most where nothing is promised.
    fn free_elsewhere(&self, promised: Option<&NodeSet>) -> Bytes {
        let machine = self.machine();
        let free = machine.nodes.keys().filter_map(|&node| {
            let memory = sysfs::node_memory(&self.config.host_root, node).ok()?;
            Some((node, memory.free.0))
        });
        match promised {
            Some(promised) => {
                Bytes(free.filter(|(node, _)| !promised.contains(*node)).map(|(_, free)| free).sum())
            }
            None => Bytes(free.map(|(_, free)| free).max().unwrap_or(0)),
        }
    }
}

/// The event of a process that the OOM killer took.
fn oom_kill(
    workload: Option<Arc<str>>,
    constraint: &str,
    pid: u32,
    command: &str,
    free_elsewhere: Bytes,
) -> Report {
    let pinned = ["cpuset", "mempolicy"].contains(&constraint);
    let why = match constraint {
        "none" => "the machine had no memory left",
        "memcg" => "its cgroup reached memory.max",
        "cpuset" => "the nodes that its cpuset allows were full",
        "mempolicy" => "the nodes that its memory policy allows were full",
        _ => "it is not known what was full",
    };
    let by_pin = pinned && free_elsewhere >= FREE_ELSEWHERE;
    let elsewhere = if by_pin {
        format!(", while {free_elsewhere} were free elsewhere: the pin killed it")
    } else {
        String::new()
    };
    let message = format!("The OOM killer took {command:?} ({pid}): {why}{elsewhere}.");
    let mut report = Report::new(EventKind::OomKill, message)
        .detail("constraint", constraint)
        .detail("command", command)
        .detail("pid", pid);
    if pinned {
        report = report.detail("freeElsewhereBytes", free_elsewhere.0);
    }
    if by_pin {
        report = report.severity(Severity::Critical);
    }
    match workload {
        Some(name) => report.workload(name),
        None => report,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Events;

    #[test]
    fn a_kill_by_a_pin_is_told_from_others() {
        let events = Events::default();
        for (constraint, free) in
            [("cpuset", 300), ("cpuset", 3), ("mempolicy", 64), ("memcg", 300), ("none", 300), ("9", 300)]
        {
            events.report(oom_kill(Some("db".into()), constraint, 7, "load", Bytes::mib(free)));
        }
        let filter = crate::api::EventFilter { limit: 10, ..Default::default() };
        let told = events.page(&filter).events;
        let critical: Vec<bool> = told.iter().map(|event| event.severity == Severity::Critical).collect();
        assert_eq!(critical, [true, false, true, false, false, false]);
        assert_eq!(
            told[0].message,
            "The OOM killer took \"load\" (7): the nodes that its cpuset allows were full, while 300Mi were free \
             elsewhere: the pin killed it."
        );
        assert_eq!(told[0].details["freeElsewhereBytes"], (300_u64 << 20).to_string());
        assert!(told[5].message.contains("it is not known what was full"));
    }

    #[test]
    fn what_former_members_counted_stays() {
        let mut activities = Activities::default();
        let name: Arc<str> = "a".into();
        let one = Activity { oom_kills: [1, 0, 0, 0], ..Activity::default() };
        activities.release(&name, &one);
        activities.release(&name, &one);
        assert_eq!(activities.by_name["a"].oom_kills, [2, 0, 0, 0]);
        activities.keep(|name| name != "a");
        assert!(activities.by_name.is_empty());
    }
}

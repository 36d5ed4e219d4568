//! What workloads do beside allocating, by name: accesses, migrations, stalls, kills.
//!
//! As with allocations, what a name counts never goes down while it is listed: what its former members had counted
//! when they gave back their slots is its base. When a name is no longer listed its base is added to `other`, which also
//! has what the probes count outside all slots. So the sum over all never goes down.

use std::{
    array,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use numaward_api as api;
use numaward_model::snapshot::{StallFigures, WorkloadActivity};
use numaward_probes::{
    Activity, MIGRATION_REASONS, Mode, NUMA_MISPLACED, NodeAccesses, OOM_CONSTRAINT_NAMES, Probe,
    ProbeReport, SlotId, Stalls,
};
use numaward_topology::NodeId;

use crate::table::Series;

/// The bases.
#[derive(Clone, Debug, Default)]
pub(crate) struct Activities {
    by_name: BTreeMap<Arc<str>, Activity>,
    /// Those of names that are no longer listed.
    pub(crate) gone: Activity,
}

impl Activities {
    /// A member of this name gives back its slot, and had counted this.
    pub(crate) fn release(&mut self, name: &Arc<str>, last: &Activity) {
        self.by_name.entry(name.clone()).or_default().add(last);
    }

    /// Adds names that are no longer listed to what is gone.
    pub(crate) fn keep(&mut self, is_listed: impl Fn(&str) -> bool) {
        let gone = &mut self.gone;
        self.by_name.retain(|name, base| {
            let listed = is_listed(name);
            if !listed {
                gone.add(base);
            }
            listed
        });
    }

    /// All that a name counted.
    pub(crate) fn of(
        &self,
        name: &str,
        series: &Series<SlotId>,
        slots: &BTreeMap<SlotId, Activity>,
    ) -> Activity {
        let held = series.members.values().filter_map(|member| member.slot);
        let mut counted = self.by_name.get(name).into_iter().chain(held.filter_map(|slot| slots.get(&slot)));
        let mut sum = counted.next().cloned().unwrap_or_default();
        counted.for_each(|activity| sum.add(activity));
        sum
    }

    /// The accesses of all, with those of `counted` now.
    pub(crate) fn accesses(&self, counted: &Counted) -> Vec<NodeAccesses> {
        let mut sum = Activity::default();
        // `other` has what is gone.
        let all = self.by_name.values().chain(counted.slots.values()).chain([&counted.other]);
        // One at a time, as the rest of an activity is of no interest here.
        for activity in
            all.filter(|activity| activity.accesses.iter().any(|of| of.local.0 > 0 || of.remote.0 > 0))
        {
            sum.add(&Activity { accesses: activity.accesses.clone(), ..Activity::default() });
        }
        sum.accesses
    }
}

/// What was counted by one reading of the probes.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    pub(crate) slots: BTreeMap<SlotId, Activity>,
    /// What no name has.
    pub(crate) other: Activity,
}

/// The probes that are attached.
#[derive(Debug)]
pub(crate) struct Attached(BTreeSet<Probe>);

impl Attached {
    pub(crate) fn of(reports: &[ProbeReport]) -> Self {
        let attached = reports.iter().filter(|report| report.mode != Mode::Absent);
        Self(attached.map(|report| report.probe).collect())
    }

    pub(crate) fn has(&self, probe: Probe) -> bool {
        self.0.contains(&probe)
    }

    /// What metrics serve.
    pub(crate) fn figures(&self, activity: &Activity, nodes: &[NodeId]) -> WorkloadActivity {
        let remote =
            |node: &NodeId| activity.accesses.iter().find(|of| of.node == *node).map_or(0, |of| of.remote.0);
        WorkloadActivity {
            remote: self.has(Probe::Hint).then(|| nodes.iter().map(remote).collect()),
            migrated: self.has(Probe::Migrate).then(|| migrated(activity).into_iter().collect()),
            stalls: self.has(Probe::Stall).then(|| {
                let Stalls { buckets, total } = activity.stalls;
                StallFigures { buckets, total }
            }),
            oom_kills: self
                .has(Probe::OomKill)
                .then(|| array::from_fn(|index| (OOM_CONSTRAINT_NAMES[index], activity.oom_kills[index]))),
            dram: self.has(Probe::Hardware).then(|| {
                let of = |node: &NodeId| activity.dram.iter().find(|of| of.node == *node);
                nodes.iter().map(|node| of(node).map_or((None, 0), |of| (of.local, of.remote))).collect()
            }),
            ..WorkloadActivity::default()
        }
    }

    /// What the API serves.
    pub(crate) fn served(&self, activity: &Activity, page_size: u64) -> api::Activity {
        let in_bytes = |(reason, pages): (&str, u64)| (reason.to_owned(), pages.saturating_mul(page_size));
        let kills = || {
            let kills = OOM_CONSTRAINT_NAMES.iter().zip(activity.oom_kills);
            kills.map(|(constraint, kills)| ((*constraint).to_owned(), kills)).collect()
        };
        api::Activity {
            accesses: self.has(Probe::Hint).then(|| activity.accesses.iter().map(accesses).collect()),
            migrated_bytes: self
                .has(Probe::Migrate)
                .then(|| migrated(activity).into_iter().map(in_bytes).collect()),
            stalls: self.has(Probe::Stall).then(|| api::Stalls {
                count: activity.stalls.count(),
                micros: micros(activity.stalls.total),
            }),
            oom_kills: self.has(Probe::OomKill).then(kills),
            ..api::Activity::default()
        }
    }
}

/// Pages by reason: those of NUMA balancing are there from the start, the others from when they happen.
fn migrated(activity: &Activity) -> BTreeMap<&'static str, u64> {
    let reasons = MIGRATION_REASONS.iter().zip(activity.migrated).enumerate();
    let told = reasons.filter(|(index, (_, pages))| *index == NUMA_MISPLACED || pages.0 > 0);
    let mut by_reason: BTreeMap<&'static str, u64> = BTreeMap::new();
    for (_, (reason, pages)) in told {
        let sum = by_reason.entry(reason).or_default();
        *sum = sum.saturating_add(pages.0);
    }
    by_reason
}

/// Accesses as the API serves them.
pub(crate) fn accesses(of: &NodeAccesses) -> api::NodeAccesses {
    let remote = of.remote_by_memory.iter().map(|(memory, pages)| api::RemoteAccesses {
        memory_node: memory.map(|node| node.0),
        pages: pages.0,
    });
    api::NodeAccesses {
        node: of.node.0,
        local_pages: of.local.0,
        remote_pages: of.remote.0,
        remote: remote.collect(),
    }
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use numaward_probes::{Pages, Stalls};

    use super::*;

    fn remote(from: u32, to: u32, pages: u64) -> Activity {
        let accesses = NodeAccesses {
            node: NodeId(from),
            local: Pages(1),
            remote: Pages(pages),
            remote_by_memory: vec![(Some(NodeId(to)), Pages(pages))],
        };
        Activity { accesses: vec![accesses], ..Activity::default() }
    }

    #[test]
    fn the_sum_over_all_keeps_what_is_gone() {
        let mut activities = Activities::default();
        activities.release(&"a".into(), &remote(0, 1, 5));
        let sum = |activities: &Activities| {
            let mut other = remote(0, 1, 2);
            other.add(&activities.gone);
            let counted = Counted { slots: BTreeMap::new(), other };
            activities.accesses(&counted).iter().map(accesses).collect::<Vec<_>>()
        };
        let expected = api::NodeAccesses {
            node: 0,
            local_pages: 2,
            remote_pages: 7,
            remote: vec![api::RemoteAccesses { memory_node: Some(1), pages: 7 }],
        };
        assert_eq!(sum(&activities), std::slice::from_ref(&expected));
        activities.keep(|_| false);
        assert!(activities.by_name.is_empty());
        assert_eq!(sum(&activities), [expected]);
    }

    #[test]
    fn what_has_no_probe_is_absent_and_what_is_too_large_is_the_largest_number() {
        let none = Attached(BTreeSet::new());
        assert_eq!(none.served(&remote(0, 1, 5), 4096), api::Activity::default());
        let all = Attached([Probe::Hint, Probe::Migrate, Probe::Stall, Probe::OomKill].into());
        let mut most = remote(0, 1, u64::MAX);
        most.migrated[NUMA_MISPLACED] = Pages(u64::MAX);
        most.stalls = Stalls { total: Duration::MAX, ..Stalls::default() };
        let served = all.served(&most, 4096);
        assert_eq!(served.migrated_bytes.unwrap()["numa_misplaced"], u64::MAX);
        assert_eq!(served.stalls.unwrap().micros, u64::MAX);
        assert_eq!(served.accesses.unwrap()[0].remote_pages, u64::MAX);
        assert_eq!(served.oom_kills.unwrap().len(), OOM_CONSTRAINT_NAMES.len());
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

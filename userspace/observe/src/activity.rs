//! Activity of workloads other than allocations, by name: accesses, migrations, stalls, kills. [`crate::table`] keeps
//! it like allocations.

use std::{
    array,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use numaward_api as api;
use numaward_model::snapshot::{
    AllocatedHugepages, MigratedFigures, OomKillFigures, StallFigures, WorkloadActivity,
};
use numaward_probes::{
    Activity, MigratedPages, Mode, NodeAccesses, OOM_CONSTRAINT_NAMES, Probe, ProbeReport, SlotId, SlotMap,
    Stalls,
};
use numaward_topology::{HugepageSize, NodeId};

use crate::{page_size::PageSize, table::Table};

/// Counts of one reading of the probes.
#[derive(Debug, Default)]
pub(crate) struct ActivityCounts {
    pub(crate) slots: SlotMap<Activity>,
    /// Activity outside all slots.
    pub(crate) other: Activity,
}

impl ActivityCounts {
    /// Returns the accesses of all workloads since the start, including those of `table` that are gone.
    pub(crate) fn accesses(&self, table: &Table<SlotId>) -> Vec<NodeAccesses> {
        let mut sum = Activity::default();
        let bases = table.series().filter_map(|(_, series)| series.base_activity.as_deref());
        let all = bases.chain(self.slots.values()).chain([&self.other, &table.gone_activity]);
        // Accesses are added one by one, because the rest of an activity is not needed here.
        for activity in
            all.filter(|activity| activity.accesses.iter().any(|of| of.local.0 > 0 || of.remote.0 > 0))
        {
            sum.add(&Activity { accesses: activity.accesses.clone(), ..Activity::default() });
        }
        sum.accesses
    }
}

/// The probes that are attached.
#[derive(Debug)]
pub(crate) struct AttachedProbes(BTreeSet<Probe>);

impl AttachedProbes {
    pub(crate) fn from_reports(reports: &[ProbeReport]) -> Self {
        let attached = reports.iter().filter(|report| report.mode != Mode::Absent);
        Self(attached.map(|report| report.probe).collect())
    }

    /// Returns whether no probe that counts by workload is attached.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn has(&self, probe: Probe) -> bool {
        self.0.contains(&probe)
    }

    /// Converts an activity to metrics.
    pub(crate) fn to_metrics(
        &self,
        activity: &Activity,
        nodes: &[NodeId],
        pools: &BTreeSet<HugepageSize>,
    ) -> WorkloadActivity {
        let remote =
            |node: &NodeId| activity.accesses.iter().find(|of| of.node == *node).map_or(0, |of| of.remote.0);
        let local = || activity.accesses.iter().fold(0_u64, |sum, of| sum.saturating_add(of.local.0));
        WorkloadActivity {
            remote: self.has(Probe::Hint).then(|| nodes.iter().map(remote).collect()),
            local: self.has(Probe::Hint).then(local),
            migrated: self.has(Probe::Migrate).then(|| {
                let of = |of: &MigratedPages| MigratedFigures {
                    reason: of.reason,
                    nodes: of.nodes,
                    pages: of.pages.0,
                };
                activity.migrated.iter().map(of).collect()
            }),
            stalls: self.has(Probe::Stall).then(|| {
                let Stalls { buckets, total } = activity.stalls;
                StallFigures { buckets, total }
            }),
            oom_kills: self.has(Probe::OomKill).then(|| {
                array::from_fn(|index| {
                    OomKillFigures::new(OOM_CONSTRAINT_NAMES[index], activity.oom_kills[index])
                })
            }),
            hugepages: self.has(Probe::Hugepages).then(|| allocated(activity, nodes, pools)),
            dram: self.has(Probe::Hardware).then(|| {
                let of = |node: &NodeId| activity.dram.iter().find(|of| of.node == *node);
                nodes.iter().map(|node| of(node).map_or((None, 0), |of| (of.local, of.remote))).collect()
            }),
            ..WorkloadActivity::default()
        }
    }

    /// Converts an activity for the API.
    pub(crate) fn to_api(&self, activity: &Activity, page_size: PageSize) -> api::Activity {
        let kills = || {
            let kills = OOM_CONSTRAINT_NAMES.iter().zip(activity.oom_kills);
            kills.map(|(constraint, kills)| ((*constraint).to_owned(), kills)).collect()
        };
        api::Activity {
            accesses: self.has(Probe::Hint).then(|| activity.accesses.iter().map(accesses).collect()),
            migrated_bytes: self.has(Probe::Migrate).then(|| migrated(activity, page_size)),
            stalls: self.has(Probe::Stall).then(|| api::Stalls {
                count: activity.stalls.count(),
                micros: micros(activity.stalls.total),
            }),
            oom_kills: self.has(Probe::OomKill).then(kills),
            ..api::Activity::default()
        }
    }
}

/// Returns the hugepages allocated from the pools as metrics: for these sizes, and for other sizes with a count.
pub(crate) fn allocated(
    activity: &Activity,
    nodes: &[NodeId],
    sizes: &BTreeSet<HugepageSize>,
) -> BTreeMap<HugepageSize, Vec<AllocatedHugepages>> {
    let counted = activity.hugepages.iter().filter(|of| of.local.0 > 0 || of.remote.0 > 0);
    let sizes = sizes.iter().copied().chain(counted.map(|of| of.size)).collect::<BTreeSet<_>>();
    let of = |size, node: &NodeId| {
        let found = activity.hugepages.iter().find(|of| (of.size, of.node) == (size, *node));
        found.map_or_else(AllocatedHugepages::default, |of| AllocatedHugepages {
            local: of.local,
            remote: of.remote,
        })
    };
    sizes.into_iter().map(|size| (size, nodes.iter().map(|node| of(size, node)).collect())).collect()
}

/// Returns the migrated bytes by reason.
fn migrated(activity: &Activity, page_size: PageSize) -> BTreeMap<String, u64> {
    let mut by_reason = BTreeMap::new();
    for of in &activity.migrated {
        let sum: &mut u64 = by_reason.entry(of.reason.to_owned()).or_default();
        *sum = sum.saturating_add(page_size.bytes_of(of.pages).0);
    }
    by_reason
}

/// Converts accesses for the API.
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
    use std::time::Instant;

    use numaward_cgroup::{CgroupId, WorkloadKind};
    use numaward_probes::{NodeCounters, Pages, Stalls};

    use super::*;
    use crate::table::Member;

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
    fn total_includes_removed_workloads() {
        let mut table = Table::default();
        let (id, now) = (CgroupId(1), Instant::now());
        table.add(id, "a", Member::new("/a".parse().unwrap(), WorkloadKind::Unit, None));
        table.keep_activity(id, &remote(0, 1, 5));
        let sum = |table: &Table<SlotId>| {
            let counted = ActivityCounts { slots: SlotMap::default(), other: remote(0, 1, 2) };
            counted.accesses(table).iter().map(accesses).collect::<Vec<_>>()
        };
        let expected = api::NodeAccesses {
            node: 0,
            local_pages: 2,
            remote_pages: 7,
            remote: vec![api::RemoteAccesses { memory_node: Some(1), pages: 7 }],
        };
        assert_eq!(sum(&table), std::slice::from_ref(&expected));
        table.remove(id, &NodeCounters::new(), now);
        assert_eq!(sum(&table), std::slice::from_ref(&expected));
        table.expire(now, Duration::ZERO);
        assert_eq!(table.series().count(), 0);
        assert_eq!(sum(&table), [expected]);
    }

    #[test]
    fn absent_probes_and_overflow_in_api() {
        let none = AttachedProbes(BTreeSet::new());
        assert_eq!(none.to_api(&remote(0, 1, 5), PageSize(4096)), api::Activity::default());
        let all = AttachedProbes([Probe::Hint, Probe::Migrate, Probe::Stall, Probe::OomKill].into());
        let mut most = remote(0, 1, u64::MAX);
        let moved = |from, to| MigratedPages {
            reason: "numa_misplaced",
            nodes: Some((NodeId(from), NodeId(to))),
            pages: Pages(u64::MAX),
        };
        most.migrated = vec![moved(0, 1), moved(1, 0)];
        most.stalls = Stalls { total: Duration::MAX, ..Stalls::default() };
        let served = all.to_api(&most, PageSize(4096));
        assert_eq!(served.migrated_bytes.unwrap()["numa_misplaced"], u64::MAX);
        assert_eq!(served.stalls.unwrap().micros, u64::MAX);
        assert_eq!(served.accesses.unwrap()[0].remote_pages, u64::MAX);
        assert_eq!(served.oom_kills.unwrap().len(), OOM_CONSTRAINT_NAMES.len());
    }

    #[test]
    fn activity_of_former_members_stays() {
        let mut table = Table::default();
        table.add(CgroupId(1), "a", Member::new("/a".parse().unwrap(), WorkloadKind::Unit, None));
        let one = Activity { oom_kills: [1, 0, 0, 0], ..Activity::default() };
        table.keep_activity(CgroupId(1), &one);
        table.keep_activity(CgroupId(1), &one);
        let (_, series) = table.series().next().unwrap();
        assert_eq!(series.activity(|_: SlotId| None).oom_kills, [2, 0, 0, 0]);
    }
}

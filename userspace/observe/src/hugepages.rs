//! Hugepages of workloads: resident pages by node (`hugetlb.*.numa_stat`), allocations from the pools by node (a
//! probe), and the pages of both that are outside the guaranteed nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use numaward_api as api;
use numaward_cgroup::{ReadError, read::hugetlb_numa_stat};
use numaward_model::snapshot::{HugepagesOutside, ResidentHugepages};
use numaward_probes::{Activity, Probe, SlotId};
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId};

use crate::{reading::CounterReading, table::Series};

/// Returns the page sizes of the host's pools; workloads cannot have other sizes.
pub(crate) fn pools(machine: &Machine) -> BTreeSet<HugepageSize> {
    let pools = machine.nodes.values().flat_map(|node| &node.hugepages);
    pools.filter(|(_, pool)| pool.total > 0).map(|(size, _)| *size).collect()
}

/// Reads the resident hugepages of a cgroup and its descendants for these sizes. Empty if the `hugetlb` controller is
/// off.
pub(crate) fn resident(
    dir: &Path,
    sizes: &BTreeSet<HugepageSize>,
    nodes: &[NodeId],
) -> Result<ResidentHugepages, ReadError> {
    let mut resident = ResidentHugepages::new();
    for &size in sizes {
        match hugetlb_numa_stat(dir, size) {
            Ok(by_node) => {
                let of = |node| by_node.get(node).copied().unwrap_or_default();
                resident.insert(size, nodes.iter().map(of).collect());
            }
            Err(error) if error.is_absent() || error.is_gone() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(resident)
}

/// Subtracts the hugepages of a nested workload from those of the outer workload.
pub(crate) fn subtract_nested(rest: &mut ResidentHugepages, inner: &ResidentHugepages) {
    for (size, inner) in inner {
        let rest = rest.get_mut(size).into_iter().flatten();
        rest.zip(inner).for_each(|(rest, inner)| rest.0 = rest.0.saturating_sub(inner.0));
    }
}

impl<S> Series<S> {
    /// Returns the hugepages of all members by node; sizes that could not be read for any member are absent.
    pub(crate) fn hugepages(&self) -> Arc<ResidentHugepages> {
        let mut read = self.members.values().map(|member| &member.hugepages).filter(|read| !read.is_empty());
        let Some(mut sum) = read.next().cloned() else { return Arc::default() };
        for (size, more) in read.flat_map(|read| read.iter()) {
            let sum = Arc::make_mut(&mut sum).entry(*size).or_insert_with(|| vec![Bytes(0); more.len()]);
            sum.iter_mut().zip(more).for_each(|(sum, more)| sum.0 = sum.0.saturating_add(more.0));
        }
        sum
    }
}

/// Returns the hugepages of a node for the API, for all sizes that are known of it. `activity` is absent if
/// allocations are not counted.
pub(crate) fn of_node(
    (index, node): (usize, NodeId),
    resident: &ResidentHugepages,
    activity: Option<&Activity>,
    can_miss: bool,
) -> Vec<api::WorkloadHugepages> {
    let counted =
        || activity.into_iter().flat_map(|activity| &activity.hugepages).filter(|of| of.node == node);
    let used = counted().filter(|of| of.local.0 > 0 || of.remote.0 > 0).map(|of| of.size);
    let sizes: BTreeSet<HugepageSize> = resident.keys().copied().chain(used).collect();
    let of = |size| {
        let counted = counted().find(|of| of.size == size);
        api::WorkloadHugepages {
            size: size.to_string(),
            resident_bytes: resident.get(&size).and_then(|bytes| Some(bytes.get(index)?.0)),
            allocated: counted
                .map(|of| api::AllocatedHugepages { local_bytes: of.local.0, remote_bytes: of.remote.0 }),
            missed_bytes: counted.filter(|_| can_miss).map(|of| of.outside.0),
        }
    };
    sizes.into_iter().map(of).collect()
}

impl CounterReading {
    /// Returns the hugepages that workloads with a guarantee allocated outside its nodes. Counts of ended guarantees
    /// are kept.
    pub(crate) fn missed_hugepages(&self) -> Vec<HugepagesOutside> {
        if !self.attached.has(Probe::Hugepages) {
            return Vec::new();
        }
        let pools = pools(&self.machine);
        let mut missed = Vec::new();
        for (name, series) in self.table.series() {
            let activity = series.activity(|slot| self.activity_counts.slots.get(slot));
            let can_miss = self.can_miss(series);
            let counted = activity.hugepages.iter().filter(|of| of.outside.0 > 0).map(|of| of.size);
            let sizes = pools.iter().copied().filter(|_| can_miss).chain(counted);
            for size in sizes.collect::<BTreeSet<_>>() {
                let of = |node: NodeId| {
                    let found = activity.hugepages.iter().find(|of| (of.size, of.node) == (size, node));
                    (node, found.map_or(Bytes(0), |of| of.outside))
                };
                let bytes = self.machine.nodes.keys().copied().map(of).collect();
                missed.push(HugepagesOutside { workload: name.clone(), size, bytes });
            }
        }
        missed
    }

    /// Returns the resident hugepages outside the nodes guaranteed to their workload.
    pub(crate) fn misplaced_hugepages(&self) -> Vec<HugepagesOutside> {
        let mut misplaced = Vec::new();
        for (name, series) in self.table.series() {
            let mut by_size = BTreeMap::<HugepageSize, Vec<(NodeId, Bytes)>>::new();
            for (&id, member) in series.members.iter() {
                let Some(guaranteed) = self.guarantees.binding_nodes_of(id) else { continue };
                for (size, resident) in member.hugepages.iter() {
                    let nodes = self.machine.nodes.keys().map(|node| (*node, Bytes(0)));
                    let sums = by_size.entry(*size).or_insert_with(|| nodes.collect());
                    let sums = sums.iter_mut().zip(resident);
                    for ((_, sum), bytes) in sums.filter(|((node, _), _)| !guaranteed.contains(*node)) {
                        sum.0 = sum.0.saturating_add(bytes.0);
                    }
                }
            }
            let of = |(size, bytes)| HugepagesOutside { workload: name.clone(), size, bytes };
            misplaced.extend(by_size.into_iter().map(of));
        }
        misplaced
    }

    /// Returns whether memory that one of the workloads of a name allocates can be a miss.
    pub(crate) fn can_miss(&self, series: &Series<SlotId>) -> bool {
        series.members.keys().any(|&id| self.guarantees.binding_nodes_of(id).is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_cgroup::{CgroupId, WorkloadKind};
    use numaward_model::{Guarantees, testing::workload_guarantee};
    use numaward_probes::{Mode, NodeHugepages, ProbeReport};
    use numaward_topology::ZoneKind;

    use super::*;
    use crate::{
        activity::{ActivityCounts, AttachedProbes, allocated},
        table::{Member, Readings, Table},
    };

    const TWO_MIB: HugepageSize = HugepageSize(Bytes::mib(2));
    const GIB: HugepageSize = HugepageSize(Bytes::gib(1));
    const NODES: [NodeId; 2] = [NodeId(0), NodeId(1)];

    fn machine() -> Machine {
        let builder = Machine::builder().nodes(2).cores_per_node(1).memory(Bytes::gib(4));
        builder.hugepages(TWO_MIB, 8).hugepages(GIB, 0).build().unwrap()
    }

    fn taken(node: u32, size: HugepageSize, [local, remote, outside]: [u64; 3]) -> NodeHugepages {
        let of = |bytes| Bytes::mib(bytes);
        NodeHugepages { node: NodeId(node), size, local: of(local), remote: of(remote), outside: of(outside) }
    }

    /// A workload with guaranteed memory on node 0, and one of the same name without a guarantee.
    fn read(report: Mode) -> CounterReading {
        let mut table = Table::default();
        for id in [1, 2].map(CgroupId) {
            table.add(id, "a", Member::new(format!("/{}", id.0).parse().unwrap(), WorkloadKind::Unit, None));
            let hugepages =
                Arc::new(ResidentHugepages::from([(TWO_MIB, vec![Bytes::mib(6), Bytes::mib(4)])]));
            table.store_readings(id, Readings { hugepages, ..Readings::default() });
        }
        let pages = [taken(0, TWO_MIB, [6, 0, 0]), taken(1, TWO_MIB, [0, 4, 4]), taken(1, GIB, [0; 3])];
        table.keep_activity(CgroupId(1), &Activity { hugepages: pages.to_vec(), ..Activity::default() });
        let guarantee = workload_guarantee("/1", 1, &[(ZoneKind::Memory, 0, Bytes::mib(1))]);
        let report = ProbeReport {
            probe: Probe::Hugepages,
            mode: report,
            reason: None,
            obstacle: None,
            self_check: None,
        };
        CounterReading {
            machine: Arc::new(machine()),
            table: Arc::new(table),
            guarantees: Guarantees::new(vec![Arc::new(guarantee)], numaward_engine::Ledger::default()).into(),
            counted: None,
            activity_counts: ActivityCounts::default(),
            attached: Arc::new(AttachedProbes::from_reports(&[report])),
        }
    }

    #[test]
    fn finds_hugepages_outside_guarantee() {
        let outside = vec![HugepagesOutside {
            workload: "a".into(),
            size: TWO_MIB,
            bytes: vec![(NodeId(0), Bytes(0)), (NodeId(1), Bytes::mib(4))],
        }];
        let found = read(Mode::Fexit);
        assert_eq!(
            found.misplaced_hugepages(),
            outside,
            "hugepages of a workload without a guarantee do not count"
        );
        assert_eq!(found.missed_hugepages(), outside, "of the sizes with pages");
        let blind = read(Mode::Absent);
        assert_eq!(blind.missed_hugepages(), [], "not known is not zero");
        assert_eq!(blind.misplaced_hugepages(), outside);
        let mut ended = read(Mode::Fexit);
        ended.guarantees = Arc::default();
        assert_eq!(ended.misplaced_hugepages(), []);
        assert_eq!(ended.missed_hugepages(), outside, "what was missed stays counted");
    }

    #[test]
    fn reads_sizes_with_pools() {
        let sizes = pools(&machine());
        assert_eq!(sizes, [TWO_MIB].into(), "the pool of 1 GiB is empty");
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hugetlb.2MB.numa_stat");
        let read = || resident(dir.path(), &sizes, &NODES);
        assert_eq!(read().unwrap(), ResidentHugepages::new(), "not known is not zero");
        fs::write(&file, "total=4194304 N0=0 N1=4194304\n").unwrap();
        assert_eq!(read().unwrap(), [(TWO_MIB, vec![Bytes(0), Bytes::mib(4)])].into());
        fs::write(&file, "total=1 0=1\n").unwrap();
        assert!(read().unwrap_err().to_string().contains("numa_stat:1"));
    }

    #[test]
    fn returns_sizes_with_pools_or_counts() {
        let pages = [taken(0, TWO_MIB, [0; 3]), taken(1, TWO_MIB, [2, 4, 4]), taken(1, GIB, [0; 3])];
        let mut activity = Activity { hugepages: pages.to_vec(), ..Activity::default() };
        let sizes = |activity: &Activity, pools: &[HugepageSize]| {
            let pools = pools.iter().copied().collect();
            allocated(activity, &NODES, &pools).into_keys().collect::<Vec<_>>()
        };
        assert_eq!(sizes(&Activity::default(), &[]), []);
        assert_eq!(sizes(&Activity::default(), &[GIB]), [GIB]);
        assert_eq!(sizes(&activity, &[]), [TWO_MIB], "its pool may be empty by now");
        let of_node = |activity: &Activity, has_guarantee| {
            let resident = ResidentHugepages::from([(TWO_MIB, vec![Bytes(0), Bytes(7)])]);
            of_node((1, NodeId(1)), &resident, Some(activity), has_guarantee)
        };
        let served = api::WorkloadHugepages {
            size: "2Mi".to_owned(),
            resident_bytes: Some(7),
            allocated: Some(api::AllocatedHugepages { local_bytes: 2 << 20, remote_bytes: 4 << 20 }),
            missed_bytes: Some(4 << 20),
        };
        assert_eq!(of_node(&activity, true), std::slice::from_ref(&served));
        assert_eq!(
            of_node(&activity, false),
            [api::WorkloadHugepages { missed_bytes: None, ..served.clone() }]
        );
        activity.hugepages.clear();
        let blind = api::WorkloadHugepages { allocated: None, missed_bytes: None, ..served };
        assert_eq!(of_node(&activity, true), [blind]);
    }
}

//! Accesses of workloads by memory node, from which preferred nodes are chosen.

use std::collections::BTreeMap;

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_model::accesses::{Accesses, CountingMethod, WorkloadAccesses};
use numaward_probes::{Activity, Probe, SlotId};
use numaward_topology::NodeId;

use crate::{
    activity::AttachedProbes,
    observer::Observer,
    sampling::{Sampling, SamplingStates},
    table::{Member, Table},
};

/// Returns the accesses so far of each workload that has no workload below it.
pub(crate) fn read(observer: &Observer) -> Vec<WorkloadAccesses> {
    // The sampling state is only updated while there are requests.
    observer.demand.record();
    let read = observer.read();
    let sampled = observer.latest.sampled.borrow().clone();
    leaves(&read.table)
        .into_iter()
        .map(|(id, member)| {
            let activity = member.slot.map(|slot| read.activity_counts.slots.get(slot));
            let counted = activity.map(|activity| activity.cloned().unwrap_or_default());
            WorkloadAccesses {
                cgroup: member.path.clone(),
                id,
                accesses: counted.and_then(|counted| accesses(&read.attached, &sampled, id, &counted)),
            }
        })
        .collect()
}

/// Returns the workloads without nested workloads, except the root.
fn leaves(table: &Table<SlotId>) -> Vec<(CgroupId, &Member<SlotId>)> {
    let mut members: Vec<_> = table.members().collect();
    members.sort_by(|a, b| a.1.path.cmp(&b.1.path));
    // Descendants directly follow their ancestor.
    let paths: Vec<&CgroupPath> = members.iter().skip(1).map(|(_, next)| &next.path).collect();
    let is_outer = |index: usize, member: &Member<SlotId>| {
        paths.get(index).is_some_and(|next| member.path.contains(next))
    };
    let kept = members.iter().enumerate().filter(|(index, (_, member))| !is_outer(*index, member));
    kept.map(|(_, found)| *found).filter(|(_, member)| !member.path.is_root()).collect()
}

/// Returns the accesses of a workload, as counted by the processor if possible, otherwise as sampled.
fn accesses(
    attached: &AttachedProbes,
    sampled: &SamplingStates,
    id: CgroupId,
    of: &Activity,
) -> Option<Accesses> {
    let sum = |local: u64, more: u64| local.saturating_add(more);
    let is_counted = !of.dram.is_empty() && of.dram.iter().all(|of| of.local.is_some());
    if attached.has(Probe::Hardware) && is_counted {
        let local = of.dram.iter().filter_map(|of| of.local).fold(0, sum);
        let remote = of.dram.iter().map(|of| of.remote).fold(0, sum);
        // The processor does not count remote accesses by node.
        return Some(Accesses { by: CountingMethod::Hardware, local, remote, memory: BTreeMap::new() });
    }
    let is_sampled = matches!(sampled.state(id), Sampling::On | Sampling::Unknown);
    if !attached.has(Probe::Hint) || !is_sampled {
        return None;
    }
    let mut memory: BTreeMap<NodeId, u64> = BTreeMap::new();
    for of in &of.accesses {
        let local = [(of.node, of.local)].into_iter();
        let remote = of.remote_by_memory.iter().filter_map(|(node, pages)| Some(((*node)?, *pages)));
        for (node, pages) in local.chain(remote) {
            let so_far = memory.entry(node).or_default();
            *so_far = so_far.saturating_add(pages.0);
        }
    }
    let local = of.accesses.iter().map(|of| of.local.0).fold(0, sum);
    let remote = of.accesses.iter().map(|of| of.remote.0).fold(0, sum);
    Some(Accesses { by: CountingMethod::Sampling, local, remote, memory })
}

#[cfg(test)]
mod tests {
    use numaward_cgroup::WorkloadKind;
    use numaward_probes::{DramAccesses, Mode, NodeAccesses, Pages, ProbeReport};

    use super::*;

    fn attached(probes: &[Probe]) -> AttachedProbes {
        let report = |probe: &Probe| ProbeReport {
            probe: *probe,
            mode: Mode::Fentry,
            reason: None,
            obstacle: None,
            self_check: None,
        };
        AttachedProbes::from_reports(&probes.iter().map(report).collect::<Vec<_>>())
    }

    #[test]
    fn hardware_counts_precede_samples() {
        let of = NodeAccesses {
            node: NodeId(0),
            local: Pages(5),
            remote: Pages(9),
            remote_by_memory: vec![(Some(NodeId(1)), Pages(7)), (None, Pages(2))],
        };
        let mut activity = Activity { accesses: vec![of], ..Activity::default() };
        let of = |probes: &[Probe], activity: &Activity| {
            accesses(&attached(probes), &SamplingStates::default(), CgroupId(1), activity)
        };
        let sampled = of(&[Probe::Hint, Probe::Hardware], &activity).unwrap();
        assert_eq!((sampled.by, sampled.local, sampled.remote), (CountingMethod::Sampling, 5, 9));
        assert_eq!(sampled.memory, [(NodeId(0), 5), (NodeId(1), 7)].into());
        assert_eq!(of(&[Probe::Hardware], &activity), None);
        activity.dram = vec![DramAccesses { node: NodeId(0), local: None, remote: 4 }];
        assert_eq!(of(&[Probe::Hardware], &activity), None, "half of it is no share");
        activity.dram = vec![DramAccesses { node: NodeId(0), local: Some(3), remote: 4 }];
        let counted = of(&[Probe::Hint, Probe::Hardware], &activity).unwrap();
        assert_eq!((counted.by, counted.local, counted.remote), (CountingMethod::Hardware, 3, 4));
    }

    #[test]
    fn unsampled_workload_has_no_accesses() {
        let mut sampled = SamplingStates::default();
        let of = |sampled: &SamplingStates| {
            accesses(&attached(&[Probe::Hint]), sampled, CgroupId(1), &Activity::default()).is_some()
        };
        assert!(of(&sampled));
        for (state, is_figure) in [(Sampling::On, true), (Sampling::Off, false), (Sampling::Bound, false)] {
            sampled.seen.entry(CgroupId(1)).or_default().state = state;
            assert_eq!(of(&sampled), is_figure, "{state:?}");
        }
    }

    #[test]
    fn only_leaf_workloads_are_measured() {
        let mut table: Table<SlotId> = Table::default();
        for (id, path) in (1..).zip(["/", "/a", "/a/b", "/ab", "/c"]) {
            table.add(CgroupId(id), path, Member::new(path.parse().unwrap(), WorkloadKind::Unit, None));
        }
        let found: Vec<&str> = leaves(&table).iter().map(|(_, member)| member.path.as_str()).collect();
        assert_eq!(found, ["/a/b", "/ab", "/c"]);
    }
}

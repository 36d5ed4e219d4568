//! Huge pages that a workload has reserved and not touched: the workload must keep nodes with as many free huge pages.
//!
//! # Problem
//! Reading the mappings of processes takes time in proportion to their number.
//!
//! # Algorithm
//! The mappings are read before a decision, on a thread that may wait. The decision compares them with the pages that are
//! free in the pools at that time.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue},
};
use numaward_enforce::pages;
use numaward_guarantee::error::AdmissionError;
use numaward_topology::{Bytes, HugepageSize, NodeSet, sysfs};

use super::Core;

/// Time to read the mappings of all workloads that a decision is about.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which the read of a cgroup counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes of huge pages that a workload has mapped and not touched, or the reason why they are unknown.
pub(crate) type UntouchedBytes = Result<Bytes, String>;

/// Reads the huge pages that the processes of these cgroups have mapped and not touched. This waits, and the
/// runtime is answered meanwhile. Nothing is read on a host without pools of huge pages.
fn read_untouched(core: &mut Core, cgroups: Vec<CgroupPath>) -> BTreeMap<CgroupPath, UntouchedBytes> {
    // The pools are read again, because an administrator may change them at any time.
    let mut pools = core.policy.machine.nodes.iter().flat_map(|(id, node)| {
        let memory = sysfs::node_memory(&core.config.host_root, *id);
        memory.map_or_else(|_| node.hugepages.clone(), |memory| memory.hugepages)
    });
    if cgroups.is_empty() || !pools.any(|(_, pool)| pool.total > 0) {
        return BTreeMap::new();
    }
    let (proc, hierarchy) = (core.config.host_root.join("proc"), core.hierarchy.clone());
    let reads = core.execution.reads.clone();
    let read = move || {
        let deadline = Instant::now() + READ_TIMEOUT;
        let untouched = |path: CgroupPath| {
            let (proc, dir) = (proc.clone(), hierarchy.dir(&path));
            let own_dir = dir.clone();
            let read = move || pages::untouched_huge_pages(&proc, &own_dir, deadline);
            let untouched = reads.run(&path, &dir, HANG_TIMEOUT, read).flatten();
            (path, untouched.map_err(|error| error.to_string()))
        };
        cgroups.into_iter().map(untouched).collect()
    };
    // This operation affects no cgroup.
    core.wait_for(BTreeSet::new(), move |_| read()).unwrap_or_default()
}

/// Refuses to leave a cgroup these nodes only, if its processes have mapped so much of huge pages that they have
/// not touched and would be killed when they touch them there. The size of these pages is not known, so each size
/// that has pages must have enough free.
pub(crate) fn check_untouched(
    core: &Core,
    untouched: UntouchedBytes,
    left: &NodeSet,
) -> Result<(), HugePageShortage> {
    if untouched == Ok(Bytes(0)) {
        return Ok(());
    }
    // For each size: the number of pages in the pools of all nodes, and the free bytes on the remaining nodes.
    let mut pools: BTreeMap<HugepageSize, (u64, u64)> = BTreeMap::new();
    for node in core.policy.machine.nodes.keys() {
        let Ok(memory) = sysfs::node_memory(&core.config.host_root, *node) else { continue };
        for (size, pool) in memory.hugepages {
            let here = if left.contains(*node) { pool.free.saturating_mul(size.0.0) } else { 0 };
            let (pages, free) = pools.entry(size).or_default();
            *pages = pages.saturating_add(pool.total);
            *free = free.saturating_add(here);
        }
    }
    let in_use = pools.values().filter(|(pages, _)| *pages > 0);
    let Some(free) = in_use.map(|(_, free)| Bytes(*free)).min() else { return Ok(()) };
    match untouched {
        Ok(untouched) if untouched <= free => Ok(()),
        Ok(untouched) => Err(HugePageShortage::TooFew { untouched, free, nodes: left.clone() }),
        Err(reason) => Err(HugePageShortage::Unknown(reason)),
    }
}

/// Returns the cgroups of guarantees without huge pages that have mapped and not touched some.
pub(crate) fn cgroups_with_unguaranteed_huge_pages(core: &mut Core) -> BTreeSet<CgroupPath> {
    let unguaranteed = core.store.state.guarantees.values().filter(|held| held.settings.hugetlb.is_empty());
    let unguaranteed = unguaranteed.map(|held| held.cgroup.clone()).collect();
    let untouched = read_untouched(core, unguaranteed).into_iter();
    untouched.filter(|(_, of)| of.as_ref().is_ok_and(|bytes| bytes.0 > 0)).map(|(path, _)| path).collect()
}

/// Reads the untouched huge pages of a running cgroup; `None` if the host has no pools.
pub(crate) fn untouched_huge_pages(core: &mut Core, path: &CgroupPath) -> Option<UntouchedBytes> {
    read_untouched(core, vec![path.clone()]).remove(path)
}

/// Refuses nodes for a running cgroup that do not have the huge pages which it has reserved. What cannot be read
/// is not refused: the guarantee was asked for.
pub(crate) fn check_nodes(
    core: &Core,
    path: &CgroupPath,
    mems: Option<&NodeSet>,
    untouched: Option<UntouchedBytes>,
) -> Result<(), AdmissionError> {
    let (Some(mems), Some(untouched)) = (mems, untouched) else { return Ok(()) };
    let now = Knob::CpusetMemsEffective.read(&core.hierarchy.dir(path));
    if matches!(&now, Ok(KnobValue::Nodes(now)) if !now.is_empty() && now.is_subset(mems)) {
        return Ok(());
    }
    match check_untouched(core, untouched, mems) {
        Err(shortage @ HugePageShortage::TooFew { .. }) => Err(AdmissionError::conflict(
            "target",
            format!("{path}: {shortage}"),
            "nodes with enough free huge pages, or a workload that has touched its own",
        )),
        Ok(()) | Err(HugePageShortage::Unknown(_)) => Ok(()),
    }
}

/// The reason why a cgroup must keep its nodes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HugePageShortage {
    /// The remaining nodes have too few free huge pages.
    #[error(
        "its processes have mapped {untouched} of huge pages that they have not touched yet, and nodes {nodes} have {free} \
         free: the next touch would kill them"
    )]
    TooFew { untouched: Bytes, free: Bytes, nodes: NodeSet },
    /// The mappings cannot be read.
    #[error(
        "the huge pages that its processes have mapped cannot be read, which requires CAP_SYS_PTRACE: {0}"
    )]
    Unknown(String),
}

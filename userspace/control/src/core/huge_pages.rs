//! Huge pages that a workload has reserved and not touched: it must keep nodes that have them free.

use std::collections::BTreeMap;

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, Value},
};
use numaward_enforce::pages;
use numaward_guarantee::{error::AdmissionError, state::Guarantee};
use numaward_topology::{Bytes, HugepageSize, NodeSet, sysfs};

use super::Core;

impl Core {
    /// Refuses to leave a cgroup these nodes only, if its processes have mapped huge pages that they have not touched and would be
    /// killed when they touch them there. The size of these pages is not known, so each size that has pages must have enough free.
    pub(crate) fn check_untouched_huge_pages(
        &self,
        path: &CgroupPath,
        left: &NodeSet,
    ) -> Result<(), HugePageShortage> {
        let root = &self.config.host_root;
        // By size: the pages in the pools of all nodes, and the bytes that are free on those that are left.
        let mut pools: BTreeMap<HugepageSize, (u64, u64)> = BTreeMap::new();
        for node in self.policy.machine.nodes.keys() {
            let Ok(memory) = sysfs::node_memory(root, *node) else { continue };
            for (size, pool) in memory.hugepages {
                let here = if left.contains(*node) { pool.free.saturating_mul(size.0.0) } else { 0 };
                let (pages, free) = pools.entry(size).or_default();
                *pages = pages.saturating_add(pool.total);
                *free = free.saturating_add(here);
            }
        }
        let in_use = pools.values().filter(|(pages, _)| *pages > 0);
        let Some(free) = in_use.map(|(_, free)| Bytes(*free)).min() else { return Ok(()) };
        match pages::untouched_huge_pages(&root.join("proc"), &self.hierarchy.dir(path)) {
            Ok(untouched) if untouched <= free => Ok(()),
            Ok(untouched) => Err(HugePageShortage::TooFew { untouched, free, nodes: left.clone() }),
            Err(error) => Err(HugePageShortage::Unknown(error)),
        }
    }

    /// Whether a workload has mapped huge pages that it has not touched, and none are promised to it.
    pub(super) fn has_unpromised_huge_pages(&self, held: &Guarantee) -> bool {
        held.settings.hugetlb.is_empty()
            && matches!(
                self.check_untouched_huge_pages(&held.cgroup, &NodeSet::new()),
                Err(HugePageShortage::TooFew { .. })
            )
    }

    /// Refuses nodes for a running cgroup that do not have the huge pages which it has reserved. What cannot be read is not refused: the
    /// guarantee was asked for.
    pub(super) fn check_nodes_for_huge_pages(
        &self,
        path: &CgroupPath,
        mems: Option<&NodeSet>,
    ) -> Result<(), AdmissionError> {
        let Some(mems) = mems else { return Ok(()) };
        let now = Knob::CpusetMemsEffective.read(&self.hierarchy.dir(path));
        if matches!(&now, Ok(Value::Nodes(now)) if !now.is_empty() && now.is_subset(mems)) {
            return Ok(());
        }
        match self.check_untouched_huge_pages(path, mems) {
            Err(shortage @ HugePageShortage::TooFew { .. }) => Err(AdmissionError::conflict(
                "target",
                format!("{path}: {shortage}"),
                "nodes with enough free huge pages, or a workload that has touched its own",
            )),
            Ok(()) | Err(HugePageShortage::Unknown(_)) => Ok(()),
        }
    }
}

/// Why a cgroup must keep nodes because of huge pages.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HugePageShortage {
    /// The nodes that are left have too few.
    #[error(
        "its processes have mapped {untouched} of huge pages that they have not touched yet, and nodes {nodes} have {free} \
         free: the next touch would kill them"
    )]
    TooFew {
        /// What is mapped and not touched.
        untouched: Bytes,
        /// What is free there.
        free: Bytes,
        /// The nodes.
        nodes: NodeSet,
    },
    /// It is not known what is mapped.
    #[error("what its processes have mapped of huge pages cannot be read, which takes CAP_SYS_PTRACE: {0}")]
    Unknown(#[source] std::io::Error),
}

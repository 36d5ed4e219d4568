//! Memory of the nodes, read from files of the kernel.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use numaward_model::error_chain;
use numaward_topology::{Bytes, Machine, NodeId, sysfs};
use tokio::sync::watch;

use crate::{
    oom_kills::KillClassifier,
    page_size::PageSize,
    part::{DaemonPart, Health},
};

/// Reader of the nodes' memory, with the latest watermarks.
#[derive(Debug)]
pub(crate) struct NodeMemory {
    host_root: PathBuf,
    page_size: PageSize,
    health: Arc<Health>,
    /// Memory that the kernel reserves on each node; read only while the guard runs.
    watermarks: watch::Sender<Arc<BTreeMap<NodeId, sysfs::Watermarks>>>,
    /// OOM kills by pinned allocations.
    pub(crate) kills: KillClassifier,
}

impl NodeMemory {
    pub(crate) fn new(host_root: PathBuf, page_size: PageSize, health: Arc<Health>) -> Self {
        let (watermarks, kills) = Default::default();
        Self { host_root, page_size, health, watermarks, kills }
    }

    /// Reads the current memory of each node; `None` for a node that cannot be read.
    pub(crate) fn read(&self, machine: &Machine) -> Vec<(NodeId, Option<sysfs::NodeMeminfo>)> {
        let mut failed = None;
        let nodes = machine.nodes.keys().map(|&node| {
            let memory = sysfs::node_memory(&self.host_root, node);
            (node, memory.map_err(|error| failed = Some(error_chain(&error))).ok())
        });
        let nodes = nodes.collect();
        self.health.note(DaemonPart::NodeMemory, failed.map_or(Ok(()), Err));
        nodes
    }

    /// Reads the free memory of each node. A node that cannot be read is left out.
    pub(crate) fn read_free(&self, machine: &Machine) -> Vec<(NodeId, Bytes)> {
        let read = |&node| Some((node, sysfs::node_memory(&self.host_root, node).ok()?.free));
        machine.nodes.keys().filter_map(read).collect()
    }

    /// Reads the watermarks of the nodes.
    pub(crate) fn read_watermarks(&self) {
        match sysfs::watermarks(&self.host_root, Bytes(self.page_size.0)) {
            Ok(marks) => drop(self.watermarks.send_replace(Arc::new(marks))),
            // The kernel's reserve is small; without it a node seems to have that much more memory.
            Err(error) => tracing::debug!(%error, "the watermarks of the nodes cannot be read"),
        }
    }

    /// Reads the watermarks unless they are known.
    pub(crate) fn require_watermarks(&self) {
        if self.watermarks.borrow().is_empty() {
            self.read_watermarks();
        }
    }

    /// Returns the watermarks of a node as last read.
    pub(crate) fn watermarks(&self, node: NodeId) -> sysfs::Watermarks {
        self.watermarks.borrow().get(&node).copied().unwrap_or_default()
    }

    /// Returns the memory of a node that can be allocated: free or reclaimable, less the kernel's reserve.
    pub(crate) fn obtainable(&self, node: NodeId, memory: &sysfs::NodeMeminfo) -> Bytes {
        self.watermarks(node).obtainable(memory)
    }
}

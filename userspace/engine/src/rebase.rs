//! Carrying promises over to a machine that changed.

use numaward_topology::NodeId;

use crate::ledger::Ledger;

impl Ledger {
    /// Charges what is promised here to the accounts of `idle`, the ledger of a machine on which nothing is
    /// promised; it may be another machine than before. A workload that runs keeps what it holds. Where a node
    /// has less than was promised on it, nothing is left to promise there.
    pub fn rebase(&mut self, idle: &Self) {
        let mut nodes = idle.nodes.clone();
        let mut shared_pool = idle.shared_pool.clone();
        for (_, _, allocation) in self.allocations() {
            if let Some(cpus) = &allocation.cpus {
                shared_pool = &shared_pool - cpus;
            }
            for block in &allocation.blocks {
                for node in block.affinity.iter() {
                    if let Some(account) = nodes.get_mut(&node) {
                        account.assignments += 1;
                        account.group.clone_from(&block.affinity);
                    }
                }
            }
            for (kind, placed) in &allocation.placed {
                let mut charge = |node: NodeId, bytes: u64| {
                    let account = nodes.get_mut(&node).and_then(|node| node.kinds.get_mut(kind));
                    bytes - account.map_or(0, |account| account.charge(bytes))
                };
                let mut rest: u64 = placed.iter().map(|(&node, bytes)| charge(node, bytes.0)).sum();
                // The other nodes of the block can have room: what a group's nodes gave each is not what they
                // got back (`kubelet::defects`, `lowest_nodes_first`).
                for block in allocation.blocks.iter().filter(|block| block.kind == *kind) {
                    for node in block.affinity.iter() {
                        rest = charge(node, rest);
                    }
                }
            }
        }
        self.nodes = nodes;
        self.shared_pool = shared_pool;
    }
}

//! Counts hugepages that are taken from the pools: see `ebpf/src/hugepages.rs`.

use std::collections::BTreeSet;

use aya::maps::{Array, MapData};
use numaward_abi::{HUGEPAGE_SIZES, HugepageCounters, OTHER_SLOT, Slot};
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId, NodeSet};

use crate::{
    MapAccessError, Mode, NodeHugepages, Probe, ProbeOptions, ProbeReport,
    error::ProbeError,
    family::{Family, Hook, attach_by_first_method},
    kernel::KernelInfo,
    maps::set,
    nodes::NodeNumbering,
    objects::HUGEPAGES,
};

/// The name of the counters' map.
pub(crate) const MAP: &str = "HUGEPAGES";

/// The number of 64-bit words of the counters of one size on one node.
const WORDS: usize = size_of::<HugepageCounters>() / size_of::<u64>();

/// The loaded program and its maps.
pub(crate) struct HugepageProbe {
    pub(crate) family: Family,
    slots: Array<MapData, Slot>,
    sizes: Vec<HugepageSize>,
}

impl HugepageProbe {
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
        numbering: &NodeNumbering,
    ) -> Result<(Self, ProbeReport), ProbeError> {
        let object = HUGEPAGES.map_err(ProbeError::NotBuilt)?;
        let (function, path) = kernel.get(|structures| &structures.hugepages)?;
        let node_shift = kernel.get(|structures| &structures.node_shift)?;
        let node_shift = options.fakes.node_shift.unwrap_or(node_shift);
        let (sizes, size_bits) = sizes(options.machine);
        let nodes = numbering.capacity();
        let slots = options.slots.saturating_add(1);
        let size_count = u32::try_from(sizes.len()).unwrap_or(u32::MAX);
        let entries = nodes.checked_mul(size_count).and_then(|per_slot| slots.checked_mul(per_slot));
        let entries = entries.ok_or(ProbeError::TooManySlots { slots, nodes })?;
        let slot_path = kernel.slot_path()?;
        let settings = slot_path
            .settings()
            .global("NODES", nodes)
            .global("NODE_SHIFT", node_shift)
            .global("SIZE_PATH", path)
            .global("SIZE_BITS", size_bits)
            .global("SIZES", size_count)
            .entries("SLOTS", slots)
            // A map cannot be empty.
            .entries(MAP, entries.max(1));
        let mut family = Family::load(kernel, "hugepages", object, options.slots, settings)?;
        family.set_nodes(&numbering.table(options.machine))?;
        let mut hugepages = Self { slots: family.take("SLOTS")?, sizes, family };
        hugepages.set_allowed(OTHER_SLOT, None, numbering)?;
        let methods = vec![(Mode::Fexit, Ok(vec![("hugepages_fexit", Hook::Fexit(function))]))];
        let report = attach_by_first_method(&mut hugepages.family, Probe::Hugepages, methods, kernel.btf());
        Ok((hugepages, report))
    }

    /// Returns the number of 64-bit words of a slot.
    pub(crate) fn words_of_slot(&self, numbering: &NodeNumbering) -> usize {
        numbering.capacity() as usize * self.sizes.len() * WORDS
    }

    /// Sets the nodes that are guaranteed to the holder of a slot.
    pub(crate) fn set_allowed(
        &mut self,
        slot: u32,
        allowed: Option<&NodeSet>,
        numbering: &NodeNumbering,
    ) -> Result<(), MapAccessError> {
        set(
            &mut self.slots,
            "SLOTS",
            slot,
            &Slot { allowed: numbering.allowed_mask(allowed), counts_misses: 1 },
        )
    }

    /// Returns the counted page sizes.
    pub(crate) fn sizes(&self) -> &[HugepageSize] {
        &self.sizes
    }
}

/// Returns the page sizes of the machine's pools, and their binary logarithms.
fn sizes(machine: &Machine) -> (Vec<HugepageSize>, [u32; HUGEPAGE_SIZES]) {
    let all: BTreeSet<HugepageSize> =
        machine.nodes.values().flat_map(|node| node.hugepages.keys().copied()).collect();
    let sizes: Vec<_> =
        all.into_iter().filter(|size| size.0.0.is_power_of_two()).take(HUGEPAGE_SIZES).collect();
    let mut bits = [0; HUGEPAGE_SIZES];
    for (bits, size) in bits.iter_mut().zip(&sizes) {
        *bits = size.0.0.ilog2();
    }
    (sizes, bits)
}

/// Decodes the counters of a slot, by node and size.
pub(crate) fn counters(nodes: &[NodeId], sizes: &[HugepageSize], words: &[u64]) -> Vec<NodeHugepages> {
    let places = nodes.iter().flat_map(|&node| sizes.iter().map(move |&size| (node, size)));
    let decode = |((node, size), &[local, remote, outside]): ((NodeId, HugepageSize), &[u64; WORDS])| {
        let bytes = |pages: u64| Bytes(pages.saturating_mul(size.0.0));
        NodeHugepages { node, size, local: bytes(local), remote: bytes(remote), outside: bytes(outside) }
    };
    places.zip(words.as_chunks::<WORDS>().0).map(decode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_MIB: HugepageSize = HugepageSize(Bytes::mib(2));
    const GIB: HugepageSize = HugepageSize(Bytes::gib(1));

    #[test]
    fn counts_sizes_of_all_pools() {
        let builder = Machine::builder().nodes(2).cores_per_node(1).memory(Bytes::gib(2));
        let machine = builder.hugepages(TWO_MIB, 3).hugepages(GIB, 0).build().unwrap();
        assert_eq!(sizes(&machine), (vec![TWO_MIB, GIB], [21, 30, 0, 0]));
    }

    #[test]
    fn decodes_counts_by_node_and_size() {
        let grown: Vec<u64> = (1..=12).collect();
        let found = counters(&[NodeId(0), NodeId(4)], &[TWO_MIB, GIB], &grown);
        let expected = |node, size: HugepageSize, [local, remote, outside]: [u64; 3]| {
            let bytes = |pages: u64| Bytes(pages * size.0.0);
            NodeHugepages {
                node: NodeId(node),
                size,
                local: bytes(local),
                remote: bytes(remote),
                outside: bytes(outside),
            }
        };
        assert_eq!(
            found,
            [
                expected(0, TWO_MIB, [1, 2, 3]),
                expected(0, GIB, [4, 5, 6]),
                expected(4, TWO_MIB, [7, 8, 9]),
                expected(4, GIB, [10, 11, 12]),
            ]
        );
        assert_eq!(counters(&[NodeId(0)], &[TWO_MIB], &[u64::MAX, 0, 0])[0].local, Bytes(u64::MAX));
        assert!(counters(&[NodeId(0)], &[], &[]).is_empty());
    }
}

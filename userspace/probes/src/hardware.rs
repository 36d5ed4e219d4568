//! Counts accesses to local and remote DRAM by the processor's counters: see `ebpf/src/hardware.rs` and `pmu.rs`.
//!
//! The counters are opened at the start, for the CPUs that are online then, and held. Accesses of a CPU that comes
//! online later are not counted. They are reported as lost events.

use std::{os::fd::AsFd as _, path::Path};

use aya::maps::MapData;
use numaward_abi::DramCounters;
use numaward_topology::NodeId;
use perf_event::Counter;

use crate::{
    DramAccesses, Mode, Probe, ProbeOptions, ProbeReport,
    error::ProbeError,
    family::{Family, Hook, attach_by_first_method},
    kernel::KernelInfo,
    loader::ObjectSettings,
    nodes::NodeNumbering,
    objects::HARDWARE,
    pmu::{self, OpenCounters},
    sys,
};

/// The number of 64-bit words of a slot's counters on one node.
pub(crate) const WORDS: usize = size_of::<DramCounters>() / size_of::<u64>();

/// The loaded program and its counters.
pub(crate) struct HardwareProbe {
    pub(crate) family: Family,
    has_local: bool,
    /// When a map's descriptor is closed, the kernel removes the events that were added through it.
    _held: ([MapData; 2], (OpenCounters<Counter>, OpenCounters<Counter>)),
}

impl HardwareProbe {
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
        numbering: &NodeNumbering,
    ) -> Result<(Self, ProbeReport), ProbeError> {
        let object = HARDWARE.map_err(ProbeError::NotBuilt)?;
        let (path, parent) = kernel.ancestors()?;
        let nodes = numbering.capacity();
        let slots = options.slots.saturating_add(1);
        let entries = slots.checked_mul(nodes).ok_or(ProbeError::TooManySlots { slots, nodes })?;
        let events = match options.fakes.dram_events {
            Some(events) => events,
            None => pmu::events(Path::new("/"))?,
        };
        let has_local = events.local.is_some();
        let reads_local = u32::from(has_local);
        let settings = ObjectSettings::default()
            .global("CGROUP_PATH", path)
            .global("KERNFS_PARENT", parent)
            .global("NODES", nodes)
            .global("HAS_LOCAL", reads_local)
            .entries("DRAM", entries);
        let mut family = Family::load(kernel, "hardware", object, options.slots, settings)?;
        family.set_nodes(&numbering.table(options.machine))?;
        let maps = [family.take_data("LOCAL")?, family.take_data("REMOTE")?];
        let opened = pmu::open(events, &options.machine.cpu_ids(), pmu::count)?;
        for (map, counters) in maps.iter().zip([&opened.0, &opened.1]) {
            for (cpu, counter) in counters {
                sys::set_descriptor(map.fd().as_fd(), cpu.0, counter)
                    .map_err(|error| ProbeError::kernel(&error))?;
            }
        }
        let hook = Ok(vec![("hardware_tp_btf", Hook::TpBtf("sched_switch"))]);
        let report =
            attach_by_first_method(&mut family, Probe::Hardware, vec![(Mode::TpBtf, hook)], kernel.btf());
        Ok((Self { has_local, _held: (maps, opened), family }, report))
    }

    /// Returns true if the processor counts accesses to the same node.
    pub(crate) const fn has_local(&self) -> bool {
        self.has_local
    }
}

/// Decodes the counters of a slot, by node.
pub(crate) fn counters(nodes: &[NodeId], has_local: bool, words: &[u64]) -> Vec<DramAccesses> {
    let decode = |(&node, &[local, remote]): (&NodeId, &[u64; WORDS])| DramAccesses {
        node,
        local: has_local.then_some(local),
        remote,
    };
    nodes.iter().zip(words.as_chunks::<WORDS>().0).map(decode).collect()
}

//! Accesses to local and remote DRAM, as the processor counts them: see `ebpf/src/hardware.rs` and `pmu.rs`.
//!
//! The counters are opened at the start, for the CPUs that are online then, and held. What a CPU that comes later does
//! is not counted; how often that was so is reported as lost events.

use std::{io, os::fd::AsFd as _, path::Path};

use aya::{
    EbpfLoader,
    maps::{Array, MapData, PerCpuArray},
};
use numaward_abi::{DramCounters, DramSeen, NodeTable};
use numaward_topology::NodeId;
use perf_event::Counter;

use crate::{
    DramAccesses, Mode, Options, Probe, ProbeReport, ProbeStats,
    error::Refusal,
    family::{Family, Hook, attach_by_first},
    kernel::Kernel,
    maps::{access, set, typed},
    nodes::{Numbering, node_table},
    objects::HARDWARE,
    pmu::{self, Opened},
    sys,
};

/// What is held while the probe counts.
pub(crate) struct Hardware {
    pub(crate) family: Family,
    pub(crate) node_table: Array<MapData, NodeTable>,
    /// The map of the counters, and the nodes of a slot's.
    pub(crate) dram: MapData,
    pub(crate) nodes: u32,
    has_local: bool,
    last: PerCpuArray<MapData, DramSeen>,
    /// When a map's descriptor is closed, the kernel forgets the events put in by it.
    _held: ([MapData; 2], (Opened<Counter>, Opened<Counter>)),
}

impl Hardware {
    /// Number of 64-bit words of a slot's counters.
    pub(crate) const WORDS: usize = size_of::<DramCounters>() / size_of::<u64>();

    pub(crate) fn load(
        options: &Options<'_>,
        kernel: &Kernel,
        numbering: &Numbering,
    ) -> Result<(Self, ProbeReport), Refusal> {
        let object = HARDWARE.map_err(Refusal::NotBuilt)?;
        let (path, parent) = kernel.get(|structures| &structures.cgroup_path)?;
        let nodes = numbering.capacity();
        let slots = options.slots.saturating_add(1);
        let entries = slots.checked_mul(nodes).ok_or(Refusal::TooManySlots { slots, nodes })?;
        let events = match options.fakes.dram_events {
            Some(events) => events,
            None => pmu::events(Path::new("/"))?,
        };
        let has_local = events.local.is_some();
        let reads_local = u32::from(has_local);
        let mut loader = EbpfLoader::new();
        loader
            .btf(kernel.btf.as_ref())
            .override_global("CGROUP_PATH", &path, true)
            .override_global("KERNFS_PARENT", &parent, true)
            .override_global("NODES", &nodes, true)
            .override_global("HAS_LOCAL", &reads_local, true)
            .map_max_entries("DRAM", entries);
        let mut family = Family::load(&mut loader, "hardware", object, options.slots)?;
        let mut node_table: Array<_, NodeTable> = typed(family.take("NODE_TABLE")?, "NODE_TABLE")?;
        let table = self::node_table(options.machine, numbering, options.fakes.cpu_node);
        set(&mut node_table, "NODE_TABLE", 0, &table)?;
        let maps = [family.take_data("LOCAL")?, family.take_data("REMOTE")?];
        let opened = pmu::open(events, &options.machine.cpu_ids(), pmu::count)?;
        for (map, counters) in maps.iter().zip([&opened.0, &opened.1]) {
            for (cpu, counter) in counters {
                sys::set_descriptor(map.fd().as_fd(), cpu.0, counter)
                    .map_err(|error| Refusal::kernel(&error))?;
            }
        }
        let hook = Ok(vec![("hardware_tp_btf", Hook::TpBtf("sched_switch"))]);
        let report =
            attach_by_first(&mut family, Probe::Hardware, vec![(Mode::TpBtf, hook)], kernel.btf.as_ref());
        let hardware = Self {
            dram: family.take_data("DRAM")?,
            last: typed(family.take("LAST")?, "LAST")?,
            node_table,
            nodes,
            has_local,
            _held: (maps, opened),
            family,
        };
        Ok((hardware, report))
    }

    /// The growth of a slot's counters, by node.
    pub(crate) fn read(&self, nodes: &[NodeId], grown: &[u64]) -> Vec<DramAccesses> {
        let counters = nodes.iter().zip(grown.as_chunks::<{ Self::WORDS }>().0);
        let of = |(&node, &[local, remote]): (&NodeId, &[u64; 2])| DramAccesses {
            node,
            local: self.has_local.then_some(local),
            remote,
        };
        counters.map(of).collect()
    }

    pub(crate) fn stats(&self) -> io::Result<Vec<ProbeStats>> {
        let mut stats = self.family.stats()?;
        let last = self.last.get(&0, 0).map_err(access("LAST", "read")).map_err(io::Error::other)?;
        if let Some(stats) = stats.first_mut() {
            stats.events_lost += last.iter().fold(0_u64, |sum, cpu| sum.saturating_add(cpu.unread));
        }
        Ok(stats)
    }
}

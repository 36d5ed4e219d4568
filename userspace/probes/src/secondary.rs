//! The secondary probes, which are all probes except that of allocations: sampled accesses, migrations, stalls, kills,
//! intruders, accesses to DRAM, CPU time, hugepages taken from the pools, call chains.
//!
//! Each family is an object with its own table of registered cgroups, so a feature that this kernel does not have affects only
//! the families that need it. Counters are kept by slot, like those of allocations.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Instant};

use aya::maps::{MapData, RingBuf};
use numaward_abi::{MIGRATE_REASONS, OOM_CONSTRAINTS, ScanCounters, StallCounters};
use numaward_topology::{Machine, NodeSet};
use rustix::param::page_size;

use crate::{
    Activity, CallChain, CgroupId, MapAccessError, Mode, Probe, ProbeEvent, ProbeOptions, ProbeReport,
    activity::{MatrixColumns, NodePairs},
    alloc::AllocProbe,
    btf::BtfError,
    chains::ChainProbes,
    cpu_time::CpuTimeReader,
    error::ProbeError,
    event,
    event_gate::{self, EventGate},
    family::{AttachMethod, Family, Hook, attach_by_first_method, report},
    hardware::{self, HardwareProbe},
    hugepages::{self, HugepageProbe},
    intruders::SwitchProbe,
    kernel::KernelInfo,
    nodes::NodeNumbering,
    objects::{FAULTS, TROUBLE},
    slots::{BaseCounters, Slots},
    tables::{CounterLayout, CounterMap, CounterTable},
    tracefs,
};

/// The maximum size of the full matrix of accesses in bytes. Above it, only local and remote accesses are
/// distinguished.
const MAX_ACCESS_BYTES: u64 = 64 << 20;

/// The maximum size of the counters of migrated pages by pair of nodes, in bytes. Above it, the nodes are unknown.
const MAX_MIGRATED_BYTES: u64 = 16 << 20;

/// The attached families.
#[derive(Default)]
pub(crate) struct SecondaryProbes {
    nodes: NodeNumbering,
    columns: MatrixColumns,
    families: Vec<Family>,
    tables: BTreeMap<CounterTable, Arc<CounterMap>>,
    /// The ring buffer of kills.
    events: Option<RingBuf<MapData>>,
    long_stalls: Option<EventGate>,
    pub(crate) switch: Option<SwitchProbe>,
    hardware: Option<HardwareProbe>,
    hugepages: Option<HugepageProbe>,
    pub(crate) chains: Option<ChainProbes>,
    pub(crate) cpu_times: Option<CpuTimeReader>,
    pub(crate) reports: Vec<ProbeReport>,
}

impl SecondaryProbes {
    /// Loads and attaches the probes in [`ProbeOptions::secondary`], and call chains together with the allocation
    /// probe.
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
        alloc: Option<&mut AllocProbe>,
    ) -> Self {
        let mut secondary = Self::default();
        if options.secondary.is_empty() && options.call_chains.is_none() {
            return secondary;
        }
        secondary.nodes = NodeNumbering::new(options.machine, options.fakes.cpu_node);
        secondary.load_family(options, &[Probe::Hugepages], |secondary| {
            let (mut hugepages, report) = HugepageProbe::load(options, kernel, &secondary.nodes)?;
            let words = hugepages.words_of_slot(&secondary.nodes);
            let table = CounterMap::new(&mut hugepages.family, hugepages::MAP, words)?;
            if report.mode != Mode::Absent {
                secondary.tables.insert(CounterTable::Hugepages, Arc::new(table));
                secondary.hugepages = Some(hugepages);
            }
            secondary.reports.push(report);
            Ok(())
        });
        secondary.load_family(options, &[Probe::Hint, Probe::Scan, Probe::Migrate], |secondary| {
            secondary.load_faults(options, kernel)
        });
        secondary.load_family(options, &[Probe::Stall, Probe::OomKill], |secondary| {
            secondary.load_trouble(options, kernel)
        });
        secondary.load_family(options, &[Probe::Switch], |secondary| {
            let (switch, report) = SwitchProbe::load(options, kernel)?;
            secondary.switch = (report.mode != Mode::Absent).then_some(switch);
            secondary.reports.push(report);
            Ok(())
        });
        secondary.load_family(options, &[Probe::Hardware], |secondary| {
            let (mut hardware, report) = HardwareProbe::load(options, kernel, &secondary.nodes)?;
            let words = secondary.nodes.capacity() as usize * hardware::WORDS;
            let dram = CounterMap::new(&mut hardware.family, "DRAM", words)?;
            if report.mode != Mode::Absent {
                secondary.tables.insert(CounterTable::Dram, Arc::new(dram));
                secondary.hardware = Some(hardware);
            }
            secondary.reports.push(report);
            Ok(())
        });
        secondary.load_family(options, &[Probe::CpuTime], |secondary| {
            let (cpu_times, report) = CpuTimeReader::load(options, kernel)?;
            secondary.cpu_times = Some(cpu_times);
            secondary.reports.push(report);
            Ok(())
        });
        if let Some(wanted) = options.call_chains {
            let (chains, mut reports) = ChainProbes::load(options, wanted, kernel, &secondary.nodes, alloc);
            secondary.chains = chains;
            secondary.reports.append(&mut reports);
        }
        secondary
    }

    /// Loads a family if one of its probes is enabled. Each enabled probe gets a report.
    fn load_family(
        &mut self,
        options: &ProbeOptions<'_>,
        probes: &[Probe],
        load: impl FnOnce(&mut Self) -> Result<(), ProbeError>,
    ) {
        let wanted = |probe: &&Probe| options.secondary.contains(probe);
        if !probes.iter().any(|probe| wanted(&probe)) {
            return;
        }
        if let Err(refusal) = load(self) {
            let reason = [(refusal.obstacle(), refusal.to_string())];
            self.reports.retain(|report| !probes.contains(&report.probe));
            self.reports
                .extend(probes.iter().filter(wanted).map(|&probe| report(probe, Mode::Absent, &reason)));
        }
    }

    /// Attaches a probe if it is enabled, and keeps its counters on success.
    fn attach(
        &mut self,
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
        family: &mut Family,
        probe: Probe,
        methods: Vec<AttachMethod>,
        (of, name, words): (CounterTable, &'static str, usize),
    ) -> Result<(), ProbeError> {
        if options.secondary.contains(&probe) {
            let report = attach_by_first_method(family, probe, methods, kernel.btf());
            if report.mode != Mode::Absent {
                self.tables.insert(of, Arc::new(CounterMap::new(family, name, words)?));
            }
            self.reports.push(report);
        }
        Ok(())
    }

    fn load_faults(&mut self, options: &ProbeOptions<'_>, kernel: &KernelInfo<'_>) -> Result<(), ProbeError> {
        let object = FAULTS.map_err(ProbeError::NotBuilt)?;
        let slots = options.slots.saturating_add(1);
        let nodes = self.nodes.capacity();
        self.columns = MatrixColumns::new(slots, nodes, MAX_ACCESS_BYTES);
        let columns = self.columns.count();
        let too_many = || ProbeError::TooManySlots { slots, nodes };
        let entries = |per_slot: u32| slots.checked_mul(per_slot).ok_or_else(too_many);
        let per_slot = nodes.checked_mul(columns).ok_or_else(too_many)?;
        let scan = || kernel.get(|structures| &structures.scan);
        let reason = || kernel.get(|structures| &structures.migrate_reason);
        let (vma_range, reason_argument) = (scan().unwrap_or_default(), reason().unwrap_or_default());
        let reason_offset = tracefs::migrate_reason_offset(Path::new("/"));
        let page_shift = page_size().ilog2();
        let pairs = NodePairs::new(slots, nodes, MAX_MIGRATED_BYTES).count();
        let migrated = pairs.saturating_mul(u32::try_from(MIGRATE_REASONS).unwrap_or(u32::MAX));
        let folio = || {
            let size = kernel.get(|structures| &structures.folio_size)?;
            Ok((size, kernel.get(|structures| &structures.node_shift)?))
        };
        let (folio_size, node_shift) = folio().unwrap_or(([0; 2], 64));
        let node_shift = options.fakes.node_shift.unwrap_or(node_shift);
        let slot_path = kernel.slot_path()?;
        let settings = slot_path
            .settings()
            .global("NODES", nodes)
            .global("COLUMNS", columns)
            .global("REASON_ARGUMENT", reason_argument)
            .global("REASON_OFFSET", reason_offset.as_ref().map_or(0, |offset| *offset))
            .global("VMA_RANGE", vma_range)
            .global("PAGE_SHIFT", page_shift)
            .global("NODE_SHIFT", node_shift)
            .global("NODE_PAIRS", pairs)
            .global("FOLIO_SIZE", folio_size)
            .entries("ACCESS", entries(per_slot)?)
            .entries("SCAN", slots)
            .entries("MIGRATED_PAGES", entries(migrated)?);
        let mut family = Family::load(kernel, "faults", object, options.slots, settings)?;
        family.set_nodes(&self.nodes.table(options.machine))?;

        let as_expected = || kernel.get(|structures| &structures.hint);
        let methods = vec![
            (Mode::Fentry, as_expected().map(|()| vec![("hint_fentry", Hook::Fentry("task_numa_fault"))])),
            // Without BTF, the kernel's function cannot be checked. If it is checked, it must have the expected
            // arguments.
            (
                Mode::Kprobe,
                match as_expected() {
                    Err(ProbeError::Btf(error @ BtfError::Arguments { .. })) => Err(ProbeError::Btf(error)),
                    _ => Ok(vec![("hint_kprobe", Hook::Kprobe("task_numa_fault"))]),
                },
            ),
        ];
        let table = (CounterTable::Access, "ACCESS", per_slot as usize);
        self.attach(options, kernel, &mut family, Probe::Hint, methods, table)?;
        let methods =
            vec![(Mode::Fexit, scan().map(|_| vec![("scan_fexit", Hook::Fexit("vma_policy_mof"))]))];
        let table = (CounterTable::Scan, "SCAN", size_of::<ScanCounters>() / size_of::<u64>());
        self.attach(options, kernel, &mut family, Probe::Scan, methods, table)?;
        let by_folio = vec![
            ("migrate_fexit", Hook::Fexit("move_to_new_folio")),
            ("migrate_begin", Hook::TpBtf("mm_migrate_pages_start")),
            ("migrate_end", Hook::TpBtf("mm_migrate_pages")),
        ];
        let by_tracepoint = vec![("migrate_tracepoint", Hook::Tracepoint("migrate", "mm_migrate_pages"))];
        let methods = vec![
            (Mode::Fexit, folio().map(|_| by_folio)),
            (Mode::TpBtf, reason().map(|_| vec![("migrate_tp_btf", Hook::TpBtf("mm_migrate_pages"))])),
            (Mode::Tracepoint, reason_offset.map(|_| by_tracepoint).map_err(ProbeError::from)),
        ];
        let table = (CounterTable::Migrated, "MIGRATED_PAGES", migrated as usize);
        self.attach(options, kernel, &mut family, Probe::Migrate, methods, table)?;
        self.families.push(family);
        Ok(())
    }

    fn load_trouble(
        &mut self,
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
    ) -> Result<(), ProbeError> {
        let object = TROUBLE.map_err(ProbeError::NotBuilt)?;
        let slots = options.slots.saturating_add(1);
        let oom = || {
            kernel.ancestors()?;
            kernel.get(|structures| &structures.oom)
        };
        let layout = oom().unwrap_or_default();
        let constraints = u32::try_from(OOM_CONSTRAINTS).unwrap_or(u32::MAX);
        let long_stall = u64::try_from(options.long_stall.as_nanos()).unwrap_or(u64::MAX);
        let slot_path = kernel.slot_path()?;
        let settings = slot_path
            .settings()
            .global("OOM_LAYOUT", layout)
            .global("LONG_STALL", long_stall)
            .entries("STALLS", slots)
            .entries(event_gate::MAP, slots)
            .entries("EVENTS", event_gate::EVENTS_BYTES)
            .entries("OOM_KILLS", slots.saturating_mul(constraints));
        let mut family = Family::load(kernel, "trouble", object, options.slots, settings)?;
        self.events = Some(family.take("EVENTS")?);
        self.long_stalls = Some(EventGate::new(&mut family, "LONG_STALLS")?);
        let methods = vec![
            (
                Mode::TpBtf,
                Ok(vec![
                    ("stall_direct_begin", Hook::TpBtf("mm_vmscan_direct_reclaim_begin")),
                    ("stall_direct_end", Hook::TpBtf("mm_vmscan_direct_reclaim_end")),
                    ("stall_memcg_begin", Hook::TpBtf("mm_vmscan_memcg_reclaim_begin")),
                    ("stall_memcg_end", Hook::TpBtf("mm_vmscan_memcg_reclaim_end")),
                ]),
            ),
            (
                Mode::Tracepoint,
                Ok(vec![
                    ("stall_tracepoint_begin", Hook::Tracepoint("vmscan", "mm_vmscan_direct_reclaim_begin")),
                    ("stall_tracepoint_begin", Hook::Tracepoint("vmscan", "mm_vmscan_memcg_reclaim_begin")),
                    ("stall_tracepoint_end", Hook::Tracepoint("vmscan", "mm_vmscan_direct_reclaim_end")),
                    ("stall_tracepoint_end", Hook::Tracepoint("vmscan", "mm_vmscan_memcg_reclaim_end")),
                ]),
            ),
        ];
        let table = (CounterTable::Stalls, "STALLS", size_of::<StallCounters>() / size_of::<u64>());
        self.attach(options, kernel, &mut family, Probe::Stall, methods, table)?;
        let methods =
            vec![(Mode::Fentry, oom().map(|_| vec![("oom_fentry", Hook::Fentry("oom_kill_process"))]))];
        let table = (CounterTable::OomKills, "OOM_KILLS", OOM_CONSTRAINTS);
        self.attach(options, kernel, &mut family, Probe::OomKill, methods, table)?;
        self.families.push(family);
        Ok(())
    }

    /// Books events of `cgroup` and its descendants to `slot` from now on. `allowed` are the guaranteed nodes. Returns
    /// the previous counts of the slot by table, without tables that are all zero.
    pub(crate) fn add_root(
        &mut self,
        cgroup: CgroupId,
        slot: u32,
        allowed: Option<&NodeSet>,
    ) -> Result<BTreeMap<CounterTable, Vec<u64>>, MapAccessError> {
        let mut base = self.read_tables(slot, 1)?;
        // A slot without a previous holder has no counts, and there may be thousands.
        base.retain(|_, words| words.iter().any(|&word| word > 0));
        self.set_allowed(slot, allowed)?;
        if let Some(chains) = &mut self.chains {
            chains.begin_slot(slot)?;
        }
        let mut added = self.families_mut().try_for_each(|family| family.add_root(cgroup, slot));
        if let Some(gate) = &mut self.long_stalls {
            added = added.and_then(|()| gate.watch(slot));
        }
        if added.is_err() {
            self.families_mut().for_each(|family| {
                // The families after the failed one do not have the cgroup.
                let _best_effort = family.remove_root(cgroup);
            });
        }
        added.map(|()| base)
    }

    /// Sets the nodes that are guaranteed to the holder of a slot.
    pub(crate) fn set_allowed(&mut self, slot: u32, allowed: Option<&NodeSet>) -> Result<(), MapAccessError> {
        let hugepages = self.hugepages.as_mut();
        hugepages.map_or(Ok(()), |hugepages| hugepages.set_allowed(slot, allowed, &self.nodes))
    }

    pub(crate) fn families(&self) -> impl Iterator<Item = &Family> {
        let switch = self.switch.iter().map(|switch| &switch.family);
        let hardware = self.hardware.iter().map(|hardware| &hardware.family);
        let hugepages = self.hugepages.iter().map(|hugepages| &hugepages.family);
        let chains = self.chains.iter().map(|chains| &chains.family);
        self.families.iter().chain(switch).chain(hardware).chain(hugepages).chain(chains)
    }

    fn families_mut(&mut self) -> impl Iterator<Item = &mut Family> {
        let switch = self.switch.iter_mut().map(|switch| &mut switch.family);
        let hardware = self.hardware.iter_mut().map(|hardware| &mut hardware.family);
        let hugepages = self.hugepages.iter_mut().map(|hugepages| &mut hugepages.family);
        let chains = self.chains.iter_mut().map(|chains| &mut chains.family);
        self.families.iter_mut().chain(switch).chain(hardware).chain(hugepages).chain(chains)
    }

    /// Reads all counters of `count` slots from `first` on.
    fn read_tables(
        &self,
        first: u32,
        count: u32,
    ) -> Result<BTreeMap<CounterTable, Vec<u64>>, MapAccessError> {
        self.tables.iter().map(|(&of, table)| Ok((of, table.read(first, count)?))).collect()
    }

    /// Reverts [`SecondaryProbes::add_root`]. Continues after a failure of one family.
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        let mut result = Ok(());
        for family in self.families_mut() {
            result = family.remove_root(cgroup).and(result);
        }
        if let Some(switch) = &mut self.switch {
            result = switch.forget(slot).and(result);
        }
        if let Some(gate) = &mut self.long_stalls {
            result = gate.forget(slot).and(result);
        }
        if let Some(chains) = &mut self.chains {
            chains.end_slot(slot);
        }
        result
    }

    /// Adds new nodes. For those without room, see [`crate::Probes::refresh`].
    pub(crate) fn refresh(&mut self, machine: &Machine, slots: &Slots) -> Result<(), MapAccessError> {
        self.nodes.extend(machine);
        let table = self.nodes.table(machine);
        if self.hugepages.as_ref().is_some_and(|hugepages| hugepages.family.differs_from_nodes(&table)) {
            // A guarantee may contain a node that was added later: no page there may count as outside.
            for (slot, holder) in slots.holders().filter(|(_, holder)| holder.allowed.is_some()) {
                self.set_allowed(slot, holder.allowed.as_ref())?;
            }
        }
        self.families_mut().try_for_each(|family| family.set_nodes(&table))
    }

    /// Returns the activity of one slot since its holder took it.
    pub(crate) fn read_one(&self, slot: u32, base: &BaseCounters) -> Result<Activity, MapAccessError> {
        let now = self.read_tables(slot, 1)?;
        Ok(base.decode_activity(&self.layout(), now.iter().map(|(of, words)| (*of, words.as_slice()))))
    }

    /// Returns the maps with counters.
    pub(crate) fn tables(&self) -> &BTreeMap<CounterTable, Arc<CounterMap>> {
        &self.tables
    }

    pub(crate) fn layout(&self) -> CounterLayout {
        CounterLayout {
            nodes: self.nodes.ids().to_owned(),
            node_capacity: self.nodes.capacity(),
            columns: self.columns,
            has_local_dram: self.hardware.as_ref().map(HardwareProbe::has_local),
            hugepage_sizes: self.hugepages.as_ref().map(|hugepages| hugepages.sizes().to_owned()),
        }
    }

    /// Returns the call chains of one slot.
    pub(crate) fn call_chains(&mut self, slot: u32) -> Result<Vec<CallChain>, MapAccessError> {
        let nodes = self.nodes.ids();
        self.chains.as_mut().map_or_else(|| Ok(Vec::new()), |chains| chains.read(slot, nodes))
    }

    /// Returns the events since the last call.
    pub(crate) fn events(&mut self, now: Instant) -> Result<Vec<ProbeEvent>, MapAccessError> {
        let mut events = Vec::new();
        if let Some(gate) = &mut self.long_stalls {
            events = gate.events(now, event::long_stall)?;
        }
        if let Some(ring) = &mut self.events {
            while let Some(item) = ring.next() {
                events.extend(event::oom_kill(&item));
            }
        }
        Ok(events)
    }
}

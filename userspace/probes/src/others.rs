//! The probes beside that of allocations: sampled accesses, migrations, stalls, kills, intruders, accesses to DRAM.
//!
//! Each family is an object of its own, with its own table of registered cgroups; what is missing for one on this
//! kernel keeps no other from working. All of it is read by slots, like the counters of allocations.

use std::{collections::BTreeMap, io, path::Path, time::Instant};

use aya::{
    Btf, EbpfLoader,
    maps::{Array, MapData, RingBuf},
};
use numaward_abi::{
    MIGRATE_REASONS, NodeTable, OOM_CONSTRAINTS, OTHER_SLOT, STALL_BUCKETS, ScanCounters, StallCounters,
};
use numaward_topology::{Machine, NodeId};

use crate::{
    Activity, CgroupId, MapAccessError, MapMemory, Mode, Options, Pages, Probe, ProbeEvent, ProbeReport,
    ProbeStats, Scanned, Stalls,
    activity::{Columns, growth},
    btf::{BtfError, Structures},
    error::Refusal,
    event,
    event_gate::{self, EventGate},
    family::{Family, Hook, Way, attach_by_first, read_values, report},
    hardware::Hardware,
    intruders::Switch,
    kernel::Kernel,
    maps::{set, typed},
    nodes::{Numbering, node_table},
    objects::{FAULTS, TROUBLE},
    sys, tracefs,
};

/// Memory that the matrix of accesses may take before only local and remote are distinguished.
const ACCESS_LIMIT: u64 = 64 << 20;

/// The counters of a probe.
#[derive(Debug)]
struct Table {
    name: &'static str,
    map: MapData,
    /// Entries of a slot, and 64-bit numbers of an entry.
    entries: u32,
    words: usize,
}

impl Table {
    fn new(family: &mut Family, name: &'static str, entries: usize, words: usize) -> Result<Self, Refusal> {
        let entries = u32::try_from(entries).unwrap_or(u32::MAX);
        Ok(Self { name, map: family.take_data(name)?, entries, words })
    }

    /// The counters of `count` slots from `first` on.
    fn read(&self, first: u32, count: u32) -> Result<Vec<u64>, MapAccessError> {
        read_values(&self.map, self.name, first * self.entries, count * self.entries, self.words)
    }

    fn words_per_slot(&self) -> usize {
        self.entries as usize * self.words
    }
}

/// The tables, in this order; absent where their probe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Of {
    Access,
    Scan,
    Migrated,
    Stalls,
    OomKills,
    Dram,
}

/// The attached families.
#[derive(Default)]
pub(crate) struct Others {
    nodes: Option<Numbering>,
    /// What maps a node's id to its index, and what it holds.
    node_table: Option<(Array<MapData, NodeTable>, NodeTable)>,
    /// For tests.
    fake_home: Option<NodeId>,
    columns: Option<Columns>,
    families: Vec<Family>,
    tables: BTreeMap<Of, Table>,
    /// What the slots had counted when they were taken.
    bases: BTreeMap<u32, BTreeMap<Of, Vec<u64>>>,
    /// The kills.
    events: Option<RingBuf<MapData>>,
    /// The long stalls, and the slots of which they are reported.
    long_stalls: Option<(RingBuf<MapData>, EventGate)>,
    pub(crate) switch: Option<Switch>,
    hardware: Option<Hardware>,
    pub(crate) reports: Vec<ProbeReport>,
    /// Whether the kernel's NUMA balancing leaves alone who may use one node only; `None` where that is not known.
    pub(crate) skips_single_node_cpusets: Option<bool>,
}

impl std::fmt::Debug for Others {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Others").field("reports", &self.reports).finish_non_exhaustive()
    }
}

impl Others {
    /// Loads and attaches those of [`Options::others`].
    pub(crate) fn load(options: &Options<'_>) -> Self {
        let mut others = Self::default();
        if options.others.is_empty() {
            return others;
        }
        let structures = Structures::read(Path::new("/"));
        others.skips_single_node_cpusets =
            structures.as_ref().ok().map(|structures| structures.skips_single_node_cpusets);
        let kernel = Kernel { structures, btf: Btf::from_sys_fs().ok() };
        others.load_family(options, &[Probe::Hint, Probe::Scan, Probe::Migrate], |others| {
            others.load_faults(options, &kernel)
        });
        others.load_family(options, &[Probe::Stall, Probe::OomKill], |others| {
            others.load_trouble(options, &kernel)
        });
        others.load_family(options, &[Probe::Switch], |others| {
            let (switch, report) = Switch::load(options, &kernel)?;
            others.reports.push(report);
            others.switch = Some(switch);
            Ok(())
        });
        others.load_family(options, &[Probe::Hardware], |others| {
            let nodes = others.nodes.get_or_insert_with(|| Numbering::new(options.machine));
            let (hardware, report) = Hardware::load(options, &kernel, nodes)?;
            if report.mode != Mode::Absent {
                others.hardware = Some(hardware);
            }
            others.reports.push(report);
            Ok(())
        });
        others
    }

    /// Loads a family of which a probe is wanted; each of its probes has a report afterwards, if it is wanted.
    fn load_family(
        &mut self,
        options: &Options<'_>,
        probes: &[Probe],
        load: impl FnOnce(&mut Self) -> Result<(), Refusal>,
    ) {
        let wanted = |probe: &&Probe| options.others.contains(probe);
        if !probes.iter().any(|probe| wanted(&probe)) {
            return;
        }
        if let Err(refusal) = load(self) {
            let reason = [refusal.to_string()];
            self.reports.retain(|report| !probes.contains(&report.probe));
            self.reports
                .extend(probes.iter().filter(wanted).map(|&probe| report(probe, Mode::Absent, &reason)));
        }
    }

    /// Attaches a probe if it is wanted, and keeps its counters if that succeeds.
    fn attach(
        &mut self,
        options: &Options<'_>,
        family: &mut Family,
        probe: Probe,
        ways: Vec<Way>,
        kernel: &Kernel,
        table: (Of, Table),
    ) {
        if !options.others.contains(&probe) {
            return;
        }
        let report = attach_by_first(family, probe, ways, kernel.btf.as_ref());
        if report.mode != Mode::Absent {
            self.tables.insert(table.0, table.1);
        }
        self.reports.push(report);
    }

    fn load_faults(&mut self, options: &Options<'_>, kernel: &Kernel) -> Result<(), Refusal> {
        let object = FAULTS.map_err(Refusal::NotBuilt)?;
        let slots = options.slots.saturating_add(1);
        let numbering = Numbering::new(options.machine);
        let nodes = numbering.capacity();
        let columns = Columns::new(slots, nodes, ACCESS_LIMIT);
        let too_many = || Refusal::TooManySlots { slots, nodes };
        let entries = |per_slot: u32| slots.checked_mul(per_slot).ok_or_else(too_many);
        let per_slot = nodes.checked_mul(columns.count()).ok_or_else(too_many)?;
        let vma_range = kernel.get(|structures| &structures.scan).unwrap_or_default();
        let reason = kernel.get(|structures| &structures.migrate_reason).unwrap_or_default();
        let reason_offset = tracefs::migrate_reason_offset(Path::new("/"));
        let page_shift = sys::page_size().ilog2();
        let count = columns.count();
        let reasons = u32::try_from(MIGRATE_REASONS).unwrap_or(u32::MAX);
        let mut loader = EbpfLoader::new();
        loader
            .btf(kernel.btf.as_ref())
            .override_global("NODES", &nodes, true)
            .override_global("COLUMNS", &count, true)
            .override_global("REASON_ARGUMENT", &reason, true)
            .override_global("REASON_OFFSET", reason_offset.as_ref().unwrap_or(&0), true)
            .override_global("VMA_RANGE", &vma_range, true)
            .override_global("PAGE_SHIFT", &page_shift, true)
            .map_max_entries("ACCESS", entries(per_slot)?)
            .map_max_entries("SCAN", slots)
            .map_max_entries("MIGRATED_PAGES", entries(reasons)?);
        let mut family = Family::load(&mut loader, "faults", object, options.slots)?;
        let mut table: Array<_, NodeTable> = typed(family.take("NODE_TABLE")?, "NODE_TABLE")?;
        let value = node_table(options.machine, &numbering, options.fakes.cpu_node);
        set(&mut table, "NODE_TABLE", 0, &value)?;
        self.node_table = Some((table, value));
        self.fake_home = options.fakes.cpu_node;
        self.nodes = Some(numbering);
        self.columns = Some(columns);

        let access = Table::new(&mut family, "ACCESS", per_slot as usize, 1)?;
        let scan = Table::new(&mut family, "SCAN", 1, size_of::<ScanCounters>() / size_of::<u64>())?;
        let migrated = Table::new(&mut family, "MIGRATED_PAGES", MIGRATE_REASONS, 1)?;
        let as_expected = || kernel.get(|structures| &structures.hint);
        let ways = vec![
            (Mode::Fentry, as_expected().map(|()| vec![("hint_fentry", Hook::Fentry("task_numa_fault"))])),
            // Without BTF the kernel's function cannot be looked at; where there is some, it is as expected.
            (
                Mode::Kprobe,
                match as_expected() {
                    Err(Refusal::Btf(error @ BtfError::Arguments { .. })) => Err(Refusal::Btf(error)),
                    _ => Ok(vec![("hint_kprobe", Hook::Kprobe("task_numa_fault"))]),
                },
            ),
        ];
        self.attach(options, &mut family, Probe::Hint, ways, kernel, (Of::Access, access));
        let ways = vec![(
            Mode::Fexit,
            kernel
                .get(|structures| &structures.scan)
                .map(|_| vec![("scan_fexit", Hook::Fexit("vma_policy_mof"))]),
        )];
        self.attach(options, &mut family, Probe::Scan, ways, kernel, (Of::Scan, scan));
        let ways = vec![
            (
                Mode::TpBtf,
                kernel
                    .get(|structures| &structures.migrate_reason)
                    .map(|_| vec![("migrate_tp_btf", Hook::TpBtf("mm_migrate_pages"))]),
            ),
            (
                Mode::Tracepoint,
                reason_offset
                    .map_err(Refusal::from)
                    .map(|_| vec![("migrate_tracepoint", Hook::Tracepoint("migrate", "mm_migrate_pages"))]),
            ),
        ];
        self.attach(options, &mut family, Probe::Migrate, ways, kernel, (Of::Migrated, migrated));
        self.families.push(family);
        Ok(())
    }

    fn load_trouble(&mut self, options: &Options<'_>, kernel: &Kernel) -> Result<(), Refusal> {
        let object = TROUBLE.map_err(Refusal::NotBuilt)?;
        let slots = options.slots.saturating_add(1);
        let oom = || {
            let (path, parent) = kernel.get(|structures| &structures.cgroup_path)?;
            Ok::<_, Refusal>((path, parent, kernel.get(|structures| &structures.oom)?))
        };
        let (path, parent, layout) = oom().unwrap_or_default();
        let constraints = u32::try_from(OOM_CONSTRAINTS).unwrap_or(u32::MAX);
        let long_stall = u64::try_from(options.long_stall.as_nanos()).unwrap_or(u64::MAX);
        let mut loader = EbpfLoader::new();
        loader
            .btf(kernel.btf.as_ref())
            .override_global("CGROUP_PATH", &path, true)
            .override_global("KERNFS_PARENT", &parent, true)
            .override_global("OOM_LAYOUT", &layout, true)
            .override_global("LONG_STALL", &long_stall, true)
            .map_max_entries("STALLS", slots)
            .map_max_entries(event_gate::MAP, slots)
            .map_max_entries("OOM_KILLS", slots.saturating_mul(constraints));
        let mut family = Family::load(&mut loader, "trouble", object, options.slots)?;
        self.events = Some(typed(family.take("EVENTS")?, "EVENTS")?);
        let gate = EventGate::new(family.take(event_gate::MAP)?)?;
        self.long_stalls = Some((typed(family.take("LONG_STALLS")?, "LONG_STALLS")?, gate));
        let words = size_of::<StallCounters>() / size_of::<u64>();
        let stalls = Table::new(&mut family, "STALLS", 1, words)?;
        let kills = Table::new(&mut family, "OOM_KILLS", OOM_CONSTRAINTS, 1)?;

        let ways = vec![
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
        self.attach(options, &mut family, Probe::Stall, ways, kernel, (Of::Stalls, stalls));
        let ways =
            vec![(Mode::Fentry, oom().map(|_| vec![("oom_fentry", Hook::Fentry("oom_kill_process"))]))];
        self.attach(options, &mut family, Probe::OomKill, ways, kernel, (Of::OomKills, kills));
        self.families.push(family);
        Ok(())
    }

    /// Books what `cgroup` and those below it do to `slot`, from now on.
    pub(crate) fn add_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        let base = self.read_tables(slot, 1)?;
        let mut result = Ok(());
        for family in self.all_families() {
            result = family.add_root(cgroup, slot);
            if result.is_err() {
                break;
            }
        }
        if result.is_ok()
            && let Some(switch) = &mut self.switch
        {
            result = switch.add_root(cgroup, slot);
        }
        if result.is_ok()
            && let Some((_, gate)) = &mut self.long_stalls
        {
            result = gate.watch(slot);
        }
        match &result {
            Ok(()) => drop(self.bases.insert(slot, base)),
            Err(_) => self.all_families().for_each(|family| {
                // Those that come after the one that failed never had it.
                let _best_effort = family.remove_root(cgroup);
            }),
        }
        result
    }

    /// The families whose slots are read by tables.
    fn all_families(&mut self) -> impl Iterator<Item = &mut Family> {
        self.families.iter_mut().chain(self.hardware.as_mut().map(|hardware| &mut hardware.family))
    }

    /// All counters of `count` slots from `first` on.
    fn read_tables(&self, first: u32, count: u32) -> Result<BTreeMap<Of, Vec<u64>>, MapAccessError> {
        let mut read = BTreeMap::new();
        for (&of, table) in &self.tables {
            read.insert(of, table.read(first, count)?);
        }
        if let Some(Hardware { dram, nodes, .. }) = &self.hardware {
            let values = read_values(dram, "DRAM", first * nodes, count * nodes, Hardware::WORDS)?;
            read.insert(Of::Dram, values);
        }
        Ok(read)
    }

    /// How many 64-bit numbers a slot has of a sort.
    fn words_per_slot(&self, of: Of) -> usize {
        match (&self.hardware, self.tables.get(&of)) {
            (Some(hardware), _) if of == Of::Dram => hardware.nodes as usize * Hardware::WORDS,
            (_, table) => table.map_or(0, Table::words_per_slot),
        }
    }

    /// Undoes [`Others::add_root`]. Goes on where one family fails.
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        let mut result = Ok(());
        for family in self.all_families() {
            result = family.remove_root(cgroup).and(result);
        }
        if let Some(switch) = &mut self.switch {
            result = switch.remove_root(cgroup, slot).and(result);
        }
        if let Some((_, gate)) = &mut self.long_stalls {
            result = gate.forget(slot).and(result);
        }
        self.bases.remove(&slot);
        result
    }

    /// Takes in nodes that came. For those that find no room, see [`crate::Probes::refresh`].
    pub(crate) fn refresh(&mut self, machine: &Machine) -> Result<(), MapAccessError> {
        if let (Some(nodes), Some((map, table))) = (&mut self.nodes, &mut self.node_table) {
            nodes.extend(machine);
            let now = node_table(machine, nodes, self.fake_home);
            if now != *table {
                set(map, "NODE_TABLE", 0, &now)?;
                if let Some(hardware) = &mut self.hardware {
                    set(&mut hardware.node_table, "NODE_TABLE", 0, &now)?;
                }
                *table = now;
            }
        }
        Ok(())
    }

    /// What the slots counted since they were taken, and what all else did.
    pub(crate) fn read(
        &self,
        held: impl Iterator<Item = u32>,
        end: u32,
    ) -> Result<(BTreeMap<u32, Activity>, Activity), MapAccessError> {
        let now = self.read_tables(OTHER_SLOT, end)?;
        let of_slot = |slot: u32| {
            let counters = now.iter().filter_map(|(&of, values)| {
                let words = self.words_per_slot(of);
                let start = slot as usize * words;
                Some((of, values.get(start..start + words)?))
            });
            self.activity(slot, counters)
        };
        Ok((held.map(|slot| (slot, of_slot(slot))).collect(), of_slot(OTHER_SLOT)))
    }

    /// What one slot counted since it was taken.
    pub(crate) fn read_one(&self, slot: u32) -> Result<Activity, MapAccessError> {
        let now = self.read_tables(slot, 1)?;
        Ok(self.activity(slot, now.iter().map(|(of, words)| (*of, words.as_slice()))))
    }

    fn activity<'a>(&self, slot: u32, counters: impl Iterator<Item = (Of, &'a [u64])>) -> Activity {
        let bases = self.bases.get(&slot);
        let mut activity = Activity::default();
        for (of, now) in counters {
            let base = bases.and_then(|bases| bases.get(&of)).map_or(&[][..], Vec::as_slice);
            let grown = growth(base, now);
            match of {
                Of::Access => {
                    if let (Some(columns), Some(nodes)) = (self.columns, &self.nodes) {
                        activity.accesses = columns.read(nodes.ids(), &grown);
                    }
                }
                Of::Scan => {
                    if let &[sampled, excluded] = grown.as_slice() {
                        activity.scanned = Scanned { sampled: Pages(sampled), excluded: Pages(excluded) };
                    }
                }
                Of::Migrated => {
                    for (sum, pages) in activity.migrated.iter_mut().zip(grown) {
                        *sum = Pages(pages);
                    }
                }
                Of::Stalls => {
                    if let Some((nanoseconds, buckets)) = grown.split_last() {
                        let mut stalls = Stalls {
                            total: std::time::Duration::from_nanos(*nanoseconds),
                            buckets: [0; STALL_BUCKETS],
                        };
                        for (to, from) in stalls.buckets.iter_mut().zip(buckets) {
                            *to = *from;
                        }
                        activity.stalls = stalls;
                    }
                }
                Of::Dram => {
                    if let (Some(hardware), Some(nodes)) = (&self.hardware, &self.nodes) {
                        activity.dram = hardware.read(nodes.ids(), &grown);
                    }
                }
                Of::OomKills => {
                    for (to, from) in activity.oom_kills.iter_mut().zip(grown) {
                        *to = from;
                    }
                }
            }
        }
        activity
    }

    /// What the probes reported since the last call.
    pub(crate) fn events(&mut self, now: Instant) -> Result<Vec<ProbeEvent>, MapAccessError> {
        let mut events = Vec::new();
        if let Some((ring, gate)) = &mut self.long_stalls {
            gate.open_due(now)?;
            while let Some(item) = ring.next() {
                let Some((slot, event)) = event::long_stall(&item) else { continue };
                if gate.passed(slot, now) {
                    events.push(event);
                }
            }
        }
        if let Some(ring) = &mut self.events {
            while let Some(item) = ring.next() {
                events.extend(event::oom_kill(&item));
            }
        }
        Ok(events)
    }

    pub(crate) fn stats(&self) -> io::Result<Vec<ProbeStats>> {
        let mut stats = Vec::new();
        for family in &self.families {
            stats.extend(family.stats()?);
        }
        if let Some(switch) = &self.switch {
            stats.extend(switch.stats()?);
        }
        if let Some(hardware) = &self.hardware {
            stats.extend(hardware.stats()?);
        }
        Ok(stats)
    }

    /// The memory of each family's maps.
    pub(crate) fn map_memory(&self) -> Vec<MapMemory> {
        let hardware = self.hardware.iter().map(|hardware| &hardware.family);
        let switch = self.switch.iter().map(Switch::family);
        let families = self.families.iter().chain(switch).chain(hardware);
        families.map(|family| MapMemory { family: family.name, bytes: family.map_bytes }).collect()
    }
}

//! The allocation probe: loads one of its programs, fills its maps, and checks that it counts right.
//!
//! See `ebpf/src/alloc.rs` for what the maps mean.

use std::{fs, io, path::Path, time::Instant};

use aya::{
    Btf, Ebpf, EbpfLoader,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, RingBuf},
    programs::{Program, ProgramError, tp_btf::BtfTracePointLinkId},
};
use aya_log::{EbpfLogger, Level};
use numaward_abi::{AllocCounters, AllocTotals, NodeTable, OTHER_SLOT, Slot};
use numaward_topology::{Machine, NodeId, NodeSet};

use crate::{
    CgroupId, Counters, DutyCycle, MapAccessError, Mode, NodeCounters, Options, Pages, Probe, ProbeEvent,
    ProbeStats, RefreshError, SelfCheck,
    btf::{BtfError, KernelLayout},
    duty::Duty,
    error::Refusal,
    event,
    event_gate::{self, EventGate},
    family::{map_bytes, program_stats},
    maps::{access, set, typed},
    nodes::{Numbering, Sections, count_homes, node_table},
    objects::ALLOC,
    rows::{self, Layout, Rows, growth},
    self_check,
    slots::Slots,
    sys, tracefs,
};

/// Room for some thousand misses that nobody has read yet.
const EVENTS_BYTES: u32 = 1 << 16;

/// The attached probe. Dropping it detaches.
pub(crate) struct Alloc {
    pub(crate) mode: Mode,
    pub(crate) self_check: SelfCheck,
    /// Whether tasks are preempted inside the program, and events of other tasks lost meanwhile.
    pub(crate) preemptible: bool,
    nodes: Numbering,
    /// Stands for the home of every CPU, in tests.
    fake_home: Option<NodeId>,
    rows: Rows,
    generation: (Array<MapData, u64>, u64),
    roots: HashMap<MapData, CgroupId, u32>,
    slots: Array<MapData, Slot>,
    /// The map, and what it holds.
    node_table: (Array<MapData, NodeTable>, NodeTable),
    section_node: (Array<MapData, u16>, Sections),
    totals: PerCpuArray<MapData, AllocTotals>,
    /// The slots with a promise.
    event_gate: EventGate,
    events: RingBuf<MapData>,
    logger: Option<EbpfLogger<&'static dyn log::Log>>,
    /// Bytes that the maps take of the kernel's memory.
    pub(crate) map_bytes: u64,
    /// When it is to be attached, where that is not always.
    duty: Option<Duty>,
    /// The attachment of the program `alloc_tp_btf`.
    link: Option<BtfTracePointLinkId>,
    /// Holds the program; that of the tracepoint with its attachment.
    ebpf: Ebpf,
}

impl std::fmt::Debug for Alloc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Alloc")
            .field("mode", &self.mode)
            .field("rows", &self.rows.layout)
            .finish_non_exhaustive()
    }
}

impl Alloc {
    /// Loads and attaches the probe in one mode.
    pub(crate) fn load(options: &Options<'_>, mode: Mode) -> Result<Self, Refusal> {
        let object = ALLOC.map_err(Refusal::NotBuilt)?;
        let kernel = fs::read("/sys/kernel/btf/vmlinux");
        let kernel = kernel.map_err(|error| Refusal::from(BtfError::Unreadable(error.to_string())));
        let kernel = kernel.and_then(|data| Ok(KernelLayout::from_btf(&data)?));
        let kernel = match (mode, kernel) {
            (Mode::TpBtf, kernel) => {
                let kernel = kernel?;
                KernelLayout { node_shift: options.fakes.node_shift.unwrap_or(kernel.node_shift), ..kernel }
            }
            // Works without, only slower.
            (_, kernel) => kernel.unwrap_or(KernelLayout::unknown()),
        };
        Self::load_with(object, options, mode, kernel).or_else(|refusal| {
            match (&refusal, kernel.cgroup_path) {
                // Perhaps this kernel's verifier does not let the probe follow the path to the cgroup.
                (Refusal::Kernel(reason), Some(_)) => {
                    log::debug!("alloc by {mode} without a direct path to the cgroup's id: {reason}");
                    Self::load_with(
                        object,
                        options,
                        mode,
                        KernelLayout { node_shift: kernel.node_shift, ..KernelLayout::unknown() },
                    )
                    .map_err(|_| refusal)
                }
                _ => Err(refusal),
            }
        })
    }

    fn load_with(
        object: &[u8],
        options: &Options<'_>,
        mode: Mode,
        kernel: KernelLayout,
    ) -> Result<Self, Refusal> {
        let machine = options.machine;
        let nodes = Numbering::new(machine);
        let node_count = nodes.capacity();
        let sections = match mode {
            Mode::TpBtf => Sections::none(),
            Mode::Tracepoint => {
                tracefs::check_format(Path::new("/"), "kmem/mm_page_alloc", &tracefs::MM_PAGE_ALLOC)?;
                Sections::new(machine, &nodes)?
            }
            Mode::Fentry | Mode::Fexit | Mode::Kprobe | Mode::Absent => return Err(Refusal::Unwanted),
        };

        // Ids may have gaps.
        let highest = machine.possible_cpus.iter().last().map_or(0, |cpu| cpu.0 as usize + 1);
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| Refusal::Cpus(error))?.max(highest);
        let slots = options.slots.saturating_add(1);
        let node_table = node_table(machine, &nodes, options.fakes.cpu_node);
        let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let layout = Layout::new(slots, node_count, count_homes(&node_table), to_u32(cpus))
            .ok_or(Refusal::TooManySlots { slots, nodes: node_count })?;

        let cgroup_path = kernel.cgroup_path.unwrap_or_default();
        // Around programs of classic tracepoints, the kernel disables preemption and migration.
        let migration_disabled =
            kernel.migration_disabled.filter(|_| mode == Mode::TpBtf).unwrap_or_default();
        let btf = Btf::from_sys_fs().ok();
        let shards = if layout.per_cpu { 0 } else { layout.shards };
        let log_level = if options.debug_log { Level::Debug as u8 } else { 0 };
        let log_size = if options.debug_log { 1 << 17 } else { to_u32(sys::page_size()) };
        let mut ebpf = EbpfLoader::new()
            .btf(btf.as_ref())
            .override_global("NODE_SHIFT", &kernel.node_shift, true)
            .override_global("CGROUP_PATH", &cgroup_path, true)
            .override_global("MIGRATION_DISABLED", &migration_disabled, true)
            .override_global("NODES", &node_count, true)
            .override_global("SHARDS", &shards, true)
            .override_global("SHARD_ROWS", &layout.rows, true)
            .override_global("SECTION_SHIFT", &sections.shift, true)
            .override_global(aya_log::LEVEL, &log_level, true)
            .map_max_entries("AYA_LOGS", log_size)
            .map_max_entries("ROOTS", options.slots.max(1))
            .map_max_entries("SLOTS", slots)
            .map_max_entries(event_gate::MAP, slots)
            .map_max_entries("EVENTS", options.fakes.ring_bytes.unwrap_or(EVENTS_BYTES))
            .map_max_entries(rows::MAP, layout.entries())
            .map_max_entries("SECTION_NODE", sections.capacity())
            .load(object)
            .map_err(|error| Refusal::kernel(&error))?;

        let map_bytes = map_bytes(&ebpf);
        let mut take = |name| ebpf.take_map(name).ok_or(Refusal::Incomplete(name));
        let Map::Array(map) = take(rows::MAP)? else { return Err(Refusal::Incomplete(rows::MAP)) };
        let rows = Rows { layout, map };
        // As the kernel makes it: all unknown.
        let unwritten = Sections { shift: sections.shift, nodes: Vec::new() };
        let mut alloc = Self {
            mode,
            self_check: SelfCheck::Unchecked("not asked for".to_owned()),
            preemptible: false,
            rows,
            generation: (typed(take("GENERATION")?, "GENERATION")?, 0),
            roots: typed(take("ROOTS")?, "ROOTS")?,
            slots: typed(take("SLOTS")?, "SLOTS")?,
            node_table: (typed(take("NODE_TABLE")?, "NODE_TABLE")?, node_table),
            section_node: (typed(take("SECTION_NODE")?, "SECTION_NODE")?, unwritten),
            totals: typed(take("TOTALS")?, "TOTALS")?,
            event_gate: EventGate::new(take(event_gate::MAP)?)?,
            events: typed(take("EVENTS")?, "EVENTS")?,
            logger: None,
            map_bytes,
            duty: None,
            link: None,
            ebpf,
            nodes,
            fake_home: options.fakes.cpu_node,
        };
        if options.debug_log {
            alloc.logger = Some(EbpfLogger::init(&mut alloc.ebpf).map_err(|error| Refusal::kernel(&error))?);
        }

        let (map, table) = &mut alloc.node_table;
        set(map, "NODE_TABLE", 0, table)?;
        alloc.write_sections(&sections).map_err(|error| match error {
            RefreshError::Map(error) => Refusal::Map(error),
            // The map was made for these sections.
            _ => Refusal::Incomplete("SECTION_NODE"),
        })?;
        alloc.set_allowed(OTHER_SLOT, None)?;

        alloc.attach(btf.as_ref()).map_err(|error| Refusal::kernel(&error))?;
        // Also shows early whether the kernel lets us read.
        let before = alloc.read(OTHER_SLOT)?;
        if options.self_check {
            let touched = self_check::touch(alloc.nodes.ids(), machine);
            // Each CPU searches its first slot now, the one of this thread at least.
            let totals = alloc.totals()?;
            alloc.preemptible = 2 * totals.preemptible > totals.resolved;
            let after = alloc.read(OTHER_SLOT)?;
            alloc.self_check = self_check::compare(alloc.nodes.ids(), touched, &before, &after)?;
        }
        // To attach a tracepoint anew takes privileges.
        let duty = options.duty_cycle.filter(|_| mode == Mode::TpBtf);
        alloc.duty = duty.map(|cycle| Duty::new(cycle, Instant::now()));
        Ok(alloc)
    }

    fn attach(&mut self, btf: Option<&Btf>) -> Result<(), ProgramError> {
        let name = program_name(self.mode);
        match (self.ebpf.program_mut(name), btf) {
            (Some(Program::BtfTracePoint(program)), Some(btf)) => {
                program.load("mm_page_alloc", btf)?;
                self.link = Some(program.attach()?);
            }
            (Some(Program::TracePoint(program)), _) => {
                program.load()?;
                program.attach("kmem", "mm_page_alloc")?;
            }
            _ => return Err(ProgramError::UnexpectedProgramType),
        }
        Ok(())
    }

    /// Attaches or detaches the program, as its duty cycle demands.
    pub(crate) fn keep_duty(&mut self, now: Instant) -> Result<(), ProgramError> {
        let Some(duty) = &mut self.duty else { return Ok(()) };
        let is_on = duty.is_on(now);
        let Some(Program::BtfTracePoint(program)) = self.ebpf.program_mut(program_name(self.mode)) else {
            return Ok(());
        };
        match self.link.take() {
            Some(link) if !is_on => program.detach(link),
            None if is_on => program.attach().map(|link| self.link = Some(link)),
            link => {
                self.link = link;
                Ok(())
            }
        }
    }

    /// The duty cycle that it keeps to, if it is not always attached.
    pub(crate) fn duty_cycle(&self) -> Option<DutyCycle> {
        self.duty.as_ref().map(|duty| duty.cycle)
    }

    /// All pages, by those that were counted: on a duty cycle, an estimate.
    pub(crate) fn all_of(&self, counted: u64) -> Pages {
        Pages(self.duty_cycle().map_or(counted, |cycle| cycle.scale(counted)))
    }

    /// Books what `cgroup` and those below it allocate to `slot`, from now on.
    pub(crate) fn add_root(
        &mut self,
        cgroup: CgroupId,
        slot: u32,
        allowed: Option<&NodeSet>,
    ) -> Result<(), MapAccessError> {
        self.write_allowed(slot, allowed)?;
        self.roots.insert(cgroup, slot, 0).map_err(access("ROOTS", "write"))?;
        self.new_generation().inspect_err(|_| {
            // Else some CPUs would count the cgroup and others not.
            let _best_effort = self.roots.remove(&cgroup);
        })
    }

    /// Undoes [`Alloc::add_root`].
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        self.roots.remove(&cgroup).map_err(access("ROOTS", "write"))?;
        self.event_gate.forget(slot)?;
        self.new_generation()
    }

    pub(crate) fn set_allowed(&mut self, slot: u32, allowed: Option<&NodeSet>) -> Result<(), MapAccessError> {
        self.write_allowed(slot, allowed)?;
        self.new_generation()
    }

    fn write_allowed(&mut self, slot: u32, allowed: Option<&NodeSet>) -> Result<(), MapAccessError> {
        let value = Slot { allowed: self.nodes.mask_of(allowed) };
        set(&mut self.slots, "SLOTS", slot, &value)?;
        if allowed.is_some() { self.event_gate.watch(slot) } else { self.event_gate.forget(slot) }
    }

    /// What the probe reported since the last call: the first miss of each slot, and again after a while.
    pub(crate) fn events(&mut self, now: Instant) -> Result<Vec<ProbeEvent>, MapAccessError> {
        self.event_gate.open_due(now)?;
        let mut events = Vec::new();
        while let Some(item) = self.events.next() {
            let Some((slot, event)) = event::miss(&item, self.nodes.ids()) else { continue };
            if self.event_gate.passed(slot, now) {
                events.push(event);
            }
        }
        Ok(events)
    }

    /// Takes in what has changed of the machine: nodes and memory that came or went. What cannot be taken in
    /// is reported, and the rest is.
    pub(crate) fn refresh(&mut self, machine: &Machine, slots: &Slots) -> Result<(), RefreshError> {
        let left_out = self.nodes.extend(machine);
        let table = node_table(machine, &self.nodes, self.fake_home);
        if table != self.node_table.1 {
            // A promise may have named a node before it came: no page there may be reported as outside.
            for (slot, holder) in slots.holders().filter(|(_, holder)| holder.allowed.is_some()) {
                self.write_allowed(slot, holder.allowed.as_ref())?;
            }
            self.new_generation()?;
            set(&mut self.node_table.0, "NODE_TABLE", 0, &table)?;
            // CPUs may have another home now.
            self.new_generation()?;
            self.node_table.1 = table;
        }
        if self.mode == Mode::Tracepoint {
            let shift = self.section_node.1.shift;
            let sections = match Sections::new(machine, &self.nodes) {
                Ok(sections) if sections.shift == shift => Ok(sections),
                Ok(_) => Err(RefreshError::Sections),
                Err(error) => Err(error.into()),
            };
            match sections {
                Ok(sections) => self.write_sections(&sections)?,
                Err(error) => {
                    // Better unknown than wrong.
                    self.write_sections(&Sections { shift, nodes: Vec::new() })?;
                    return Err(error);
                }
            }
        }
        if left_out.is_empty() { Ok(()) } else { Err(RefreshError::Nodes(left_out)) }
    }

    /// Writes what differs from what the map holds.
    fn write_sections(&mut self, sections: &Sections) -> Result<(), RefreshError> {
        let (map, current) = &mut self.section_node;
        let capacity = map.len() as usize;
        current.nodes.resize(current.nodes.len().max(sections.nodes.len()).min(capacity), 0);
        let wanted = sections.nodes.iter().copied().chain(std::iter::repeat(0));
        for ((section, current), wanted) in (0..).zip(&mut current.nodes).zip(wanted) {
            if *current != wanted {
                set(map, "SECTION_NODE", section, &wanted)?;
                *current = wanted;
            }
        }
        if sections.nodes.len() > capacity { Err(RefreshError::Sections) } else { Ok(()) }
    }

    /// Makes every CPU search slots and masks anew.
    fn new_generation(&mut self) -> Result<(), MapAccessError> {
        let (map, generation) = &mut self.generation;
        *generation += 1;
        set(map, "GENERATION", 0, generation)
    }

    /// The counters of one slot, by node index.
    pub(crate) fn read(&self, slot: u32) -> Result<Vec<AllocCounters>, MapAccessError> {
        self.rows.read(slot, 1)
    }

    /// The counters of the slots `0..end`: those of each slot by node index.
    pub(crate) fn read_up_to(&self, end: u32) -> Result<Vec<AllocCounters>, MapAccessError> {
        self.rows.read(OTHER_SLOT, end)
    }

    /// How many counters a slot has.
    pub(crate) fn nodes_per_slot(&self) -> usize {
        self.rows.layout.nodes as usize
    }

    /// What was counted since `base`, by node. An empty `base` is all zero.
    pub(crate) fn since(&self, base: &[AllocCounters], now: &[AllocCounters]) -> NodeCounters {
        let counters = growth(base, now).map(|grown| Counters {
            user_local: self.all_of(grown.user_local),
            user_remote: self.all_of(grown.user_remote),
            user_outside: self.all_of(grown.user_outside),
            kernel: self.all_of(grown.kernel),
        });
        self.nodes.ids().iter().copied().zip(counters).collect()
    }

    pub(crate) fn totals(&self) -> Result<AllocTotals, MapAccessError> {
        let per_cpu = self.totals.get(&0, 0).map_err(access("TOTALS", "read"))?;
        Ok(per_cpu.iter().fold(AllocTotals::default(), |sum, cpu| AllocTotals {
            unknown_node: sum.unknown_node.wrapping_add(cpu.unknown_node),
            resolved: sum.resolved.wrapping_add(cpu.resolved),
            preemptible: sum.preemptible.wrapping_add(cpu.preemptible),
            events_lost: sum.events_lost.wrapping_add(cpu.events_lost),
        }))
    }

    /// How the counters lie in their map.
    pub(crate) fn layout(&self) -> Layout {
        self.rows.layout
    }

    pub(crate) fn stats(&self) -> io::Result<ProbeStats> {
        let fd = match self.ebpf.program(program_name(self.mode)) {
            Some(Program::BtfTracePoint(program)) => program.fd(),
            Some(Program::TracePoint(program)) => program.fd(),
            _ => Err(ProgramError::NotLoaded),
        };
        let mut stats = program_stats(Probe::Alloc, fd.map_err(io::Error::other)?)?;
        stats.events_lost += self.totals().map_err(io::Error::other)?.events_lost;
        Ok(stats)
    }

    pub(crate) fn logger(&self) -> Option<&EbpfLogger<&'static dyn log::Log>> {
        self.logger.as_ref()
    }

    pub(crate) fn flush_log(&mut self) {
        if let Some(logger) = &mut self.logger {
            logger.flush();
        }
    }
}

/// The program of the object for a mode.
fn program_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Tracepoint => "alloc_tracepoint",
        _ => "alloc_tp_btf",
    }
}

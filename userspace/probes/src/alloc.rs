//! The allocation probe: loads one of its programs, fills its maps, and checks its counts.
//!
//! `ebpf/src/alloc.rs` documents the maps.

use std::{path::Path, sync::Arc, time::Instant};

use aya::{
    maps::{Array, MapData, ProgramArray},
    programs::{ProgramError, ProgramFd},
};
use aya_log::{EbpfLogger, Level};
use numaward_abi::{OTHER_SLOT, Slot};
use numaward_topology::{Machine, NodeSet};
use rustix::param::page_size;

use crate::{
    CgroupId, DutyCycle, MapAccessError, Mode, Probe, ProbeEvent, ProbeOptions, RefreshError, SelfCheck,
    charge::ChargeProbe,
    counter_maps::AllocMaps,
    duty::DutySchedule,
    error::ProbeError,
    event,
    event_gate::{self, EventGate},
    family::{Family, Hook},
    kernel::{KernelInfo, is_confidential},
    maps::{access_error, set},
    nodes::{NodeNumbering, Sections, count_cpus, count_memory_nodes},
    objects::ALLOC,
    rows::{self, CounterRows, MissCounters, RowLayout},
    self_check,
    slots::Slots,
    tracefs,
};

const TP_BTF: &str = "alloc_tp_btf";

/// The attached probe. Dropping it detaches the program.
pub(crate) struct AllocProbe {
    pub(crate) mode: Mode,
    pub(crate) self_check: SelfCheck,
    /// True if the kernel preempts tasks inside the program, which loses the events of other tasks.
    pub(crate) preemptible: bool,
    pub(crate) family: Family,
    nodes: NodeNumbering,
    counters: AllocMaps,
    maps: SharedMaps,
    /// The misses that this probe counts.
    misses: EventGate,
    /// The probe that counts misses of the workloads with the memory controller.
    pub(crate) charge: Option<ChargeProbe>,
    pub(crate) logger: Option<EbpfLogger<&'static dyn log::Log>>,
    /// The duty cycle, unless the probe is always attached.
    duty: Option<DutySchedule>,
    /// The map for the program that takes call chains of remote user pages, and true if the probe runs that program.
    chain_program: (ProgramArray<MapData>, bool),
}

/// Maps that the program and userspace share.
struct SharedMaps {
    slots: Array<MapData, Slot>,
    /// The map and a copy of its contents.
    section_node: (Array<MapData, u16>, Sections),
}

/// Offsets and settings for the programs; zero if unknown. See `ebpf/src/alloc.rs`.
#[derive(Clone, Copy)]
struct KernelLayout {
    node_shift: u32,
    /// 1 if the current task's structures may be read directly.
    reads_task: u32,
    migration_disabled: u32,
    /// The offset of the current task's flags.
    task_flags: u32,
    /// 1 if the program for call chains is run.
    runs_chains: u32,
}

impl AllocProbe {
    /// Loads and attaches the probe in one mode. `misses` has the counters of the probe that counts misses, if there is one.
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        mode: Mode,
        kernel: &KernelInfo<'_>,
        misses: Option<&Arc<MissCounters>>,
    ) -> Result<Self, ProbeError> {
        let object = ALLOC.map_err(ProbeError::NotBuilt)?;
        let node_shift = kernel.get(|structures| &structures.node_shift);
        let is_tp_btf = mode == Mode::TpBtf;
        // The tracepoint does not need it: it is only slower without.
        let node_shift = if is_tp_btf { node_shift? } else { node_shift.unwrap_or(64) };
        // The kernel disables preemption and migration around programs of classic tracepoints.
        let task_flags = kernel.get(|structures| &structures.task_flags);
        let reads_task = kernel.has_task_helper() && kernel.ancestors().is_ok() && task_flags.is_ok();
        let migration_disabled =
            kernel.get(|structures| &structures.migration_disabled).ok().filter(|_| is_tp_btf && reads_task);
        let layout = KernelLayout {
            node_shift: options.fakes.node_shift.filter(|_| is_tp_btf).unwrap_or(node_shift),
            reads_task: reads_task.into(),
            migration_disabled: migration_disabled.unwrap_or_default(),
            // Without direct reads, a helper reads the flags, which confidentiality lockdown forbids.
            task_flags: task_flags.ok().filter(|_| reads_task || !is_confidential()).unwrap_or_default(),
            // With a duty cycle, chains would be missing while the probe is detached.
            runs_chains: (is_tp_btf && options.call_chains.is_some() && options.duty_cycle.is_none()).into(),
        };
        let try_load = |layout| Self::load_with(object, options, mode, kernel, layout, misses);
        let without_chains = KernelLayout { runs_chains: 0, ..layout };
        let mut loaded = try_load(layout);
        if let Err(ProbeError::Kernel(reason)) = &loaded
            && layout.runs_chains != 0
        {
            // This kernel may refuse tail calls in programs with functions.
            log::debug!("the allocation probe does without call chains in mode {mode}: {reason}");
            loaded = try_load(without_chains);
        }
        loaded.or_else(|refusal| match &refusal {
            // This kernel's verifier may refuse the direct path to the cgroup's id.
            ProbeError::Kernel(reason) if reads_task => {
                log::debug!("the allocation probe does without direct reads of the cgroup's id in mode {mode}: {reason}");
                let task_flags = if is_confidential() { 0 } else { layout.task_flags };
                let without =
                    KernelLayout { reads_task: 0, migration_disabled: 0, task_flags, ..without_chains };
                try_load(without).map_err(|_| refusal)
            }
            _ => Err(refusal),
        })
    }

    fn load_with(
        object: &[u8],
        options: &ProbeOptions<'_>,
        mode: Mode,
        kernel: &KernelInfo<'_>,
        layout: KernelLayout,
        misses: Option<&Arc<MissCounters>>,
    ) -> Result<Self, ProbeError> {
        let machine = options.machine;
        let nodes = NodeNumbering::new(machine, options.fakes.cpu_node);
        let node_count = nodes.capacity();
        let (sections, hook, gfp_offset) = match mode {
            Mode::TpBtf => (Sections::unused(), Hook::TpBtf("mm_page_alloc"), 0),
            Mode::Tracepoint => {
                let gfp_offset = tracefs::gfp_offset(Path::new("/"))?;
                (Sections::new(machine, &nodes)?, Hook::Tracepoint("kmem", "mm_page_alloc"), gfp_offset)
            }
            Mode::Fentry | Mode::Fexit | Mode::Kprobe | Mode::OnDemand | Mode::Absent => {
                return Err(ProbeError::Unwanted);
            }
        };

        let cpus = count_cpus(machine).map_err(ProbeError::Cpus)?;
        let slots = options.slots.saturating_add(1);
        let node_table = nodes.table(machine);
        let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let rows = RowLayout::new(slots, node_count, count_memory_nodes(&node_table), cpus)
            .ok_or(ProbeError::TooManySlots { slots, nodes: node_count })?;

        let shards = if rows.per_cpu { 0 } else { rows.shards };
        let log_level = if options.debug_log { Level::Debug as u8 } else { 0 };
        let log_size = if options.debug_log { 1 << 17 } else { to_u32(page_size()) };
        let slot_path = kernel.slot_path()?.with_direct_reads(layout.reads_task);
        let settings = slot_path
            .settings()
            .global("NODE_SHIFT", layout.node_shift)
            .global("GFP_OFFSET", gfp_offset)
            .global("MIGRATION_DISABLED", layout.migration_disabled)
            .global("TASK_FLAGS", layout.task_flags)
            .global("RUNS_CHAINS", layout.runs_chains)
            .global("NODES", node_count)
            .global("SHARDS", shards)
            .global("SHARD_ROWS", rows.rows)
            .global("SECTION_SHIFT", sections.shift)
            .global(aya_log::LEVEL, log_level)
            .entries("AYA_LOGS", log_size)
            .entries("SLOTS", slots)
            .entries("UNATTRIBUTED", node_count)
            .entries(event_gate::MAP, slots)
            .entries("EVENTS", options.fakes.ring_bytes.unwrap_or(event_gate::EVENTS_BYTES))
            .entries(rows::MAP, rows.entries())
            .entries("SECTION_NODE", sections.capacity());
        let mut family = Family::load(kernel, "alloc", object, options.slots, settings)?;
        // The kernel initializes the map with zeros, which stand for unknown nodes.
        let unwritten = Sections { shift: sections.shift, nodes: Vec::new() };
        let mut alloc = Self {
            mode,
            self_check: SelfCheck::Unchecked("not asked for".to_owned()),
            preemptible: false,
            counters: AllocMaps {
                rows: Arc::new(CounterRows {
                    layout: rows,
                    map: family.take_data(rows::MAP)?,
                    misses: misses.cloned(),
                }),
                unattributed: Arc::new(family.take("UNATTRIBUTED")?),
                totals: Arc::new(family.take("TOTALS")?),
                nodes: nodes.ids().into(),
                duty_cycle: None,
            },
            maps: SharedMaps {
                slots: family.take("SLOTS")?,
                section_node: (family.take("SECTION_NODE")?, unwritten),
            },
            misses: EventGate::new(&mut family, "EVENTS")?,
            charge: None,
            logger: None,
            duty: None,
            chain_program: (family.take("CHAIN_PROGRAM")?, layout.runs_chains != 0),
            family,
            nodes,
        };
        if options.debug_log {
            let logger = EbpfLogger::init(&mut alloc.family.ebpf);
            alloc.logger = Some(logger.map_err(|error| ProbeError::kernel(&error))?);
        }

        alloc.family.set_nodes(&node_table)?;
        alloc.write_sections(&sections).map_err(|error| match error {
            RefreshError::Map(error) => ProbeError::Map(error),
            // The map was created with the size of these sections.
            _ => ProbeError::Incomplete("SECTION_NODE"),
        })?;
        alloc.set_allowed(OTHER_SLOT, None, true)?;

        let program = if mode == Mode::TpBtf { TP_BTF } else { "alloc_tracepoint" };
        alloc.family.attach(Probe::Alloc, &[(program, hook)], kernel.btf())?;
        // The first read also shows early if the kernel permits reading.
        let before = alloc.counters.rows.read(OTHER_SLOT, 1)?;
        if options.self_check {
            let touched = self_check::touch(alloc.nodes.ids(), machine);
            // Each CPU that allocates, at least that of this thread, has now looked up its first slot.
            let totals = alloc.counters.totals()?;
            alloc.preemptible = 2 * totals.preemptible > totals.resolved;
            let counted = alloc.counters.growth_since(&before, &alloc.counters.rows.read(OTHER_SLOT, 1)?);
            alloc.self_check = self_check::compare(alloc.nodes.ids(), touched, &counted)?;
        }
        // Attaching a classic tracepoint again would need privileges.
        let duty = options.duty_cycle.filter(|_| mode == Mode::TpBtf);
        alloc.duty = duty.map(|cycle| DutySchedule::new(cycle, Instant::now()));
        alloc.counters.duty_cycle = duty;
        Ok(alloc)
    }

    /// Returns true if the probe runs the program for call chains.
    pub(crate) fn runs_chains(&self) -> bool {
        self.chain_program.1
    }

    /// Sets the program that the probe runs for remote user pages.
    pub(crate) fn set_chain_program(&mut self, program: &ProgramFd) -> Result<(), MapAccessError> {
        self.chain_program.0.set(0, program, 0).map_err(access_error("CHAIN_PROGRAM", "write"))
    }

    /// Attaches or detaches the program according to the duty cycle.
    pub(crate) fn apply_duty_cycle(&mut self, now: Instant) -> Result<(), ProgramError> {
        let Some(duty) = &mut self.duty else { return Ok(()) };
        self.family.set_attached(TP_BTF, duty.is_on(now))
    }

    /// Returns the duty cycle; `None` if the probe is always attached.
    pub(crate) fn duty_cycle(&self) -> Option<DutyCycle> {
        self.duty.as_ref().map(|duty| duty.cycle)
    }

    /// Returns the maps with counters.
    pub(crate) fn counters(&self) -> &AllocMaps {
        &self.counters
    }

    /// Books allocations of `cgroup` and its descendants to `slot` from now on.
    pub(crate) fn add_root(
        &mut self,
        cgroup: CgroupId,
        slot: u32,
        allowed: Option<&NodeSet>,
    ) -> Result<(), MapAccessError> {
        self.write_allowed(slot, allowed, true)?;
        if let Some(charge) = &mut self.charge {
            charge.family.add_root(cgroup, slot)?;
        }
        self.family.add_root(cgroup, slot).inspect_err(|_| {
            if let Some(charge) = &mut self.charge {
                // Otherwise another workload of the slot would get its misses.
                let _best_effort = charge.family.remove_root(cgroup);
            }
        })
    }

    /// Reverts [`AllocProbe::add_root`].
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        let removed = self.charge.as_mut().map_or(Ok(()), |charge| charge.remove_root(cgroup, slot));
        self.family.remove_root(cgroup)?;
        removed.and(self.misses.forget(slot))
    }

    /// Sets the nodes that are guaranteed to the holder of a slot, and whether its pages are charged to it.
    pub(crate) fn set_allowed(
        &mut self,
        slot: u32,
        allowed: Option<&NodeSet>,
        is_charged: bool,
    ) -> Result<(), MapAccessError> {
        self.write_allowed(slot, allowed, is_charged)?;
        self.family.new_generation()
    }

    fn write_allowed(
        &mut self,
        slot: u32,
        allowed: Option<&NodeSet>,
        is_charged: bool,
    ) -> Result<(), MapAccessError> {
        let counts_misses = self.charge.is_none() || !is_charged;
        if let Some(charge) = &mut self.charge {
            charge.set_allowed(slot, allowed.filter(|_| is_charged), &self.nodes)?;
        }
        // This program needs the nodes even if it counts no misses: for pages of tasks that free memory.
        let value =
            Slot { allowed: self.nodes.allowed_mask(allowed), counts_misses: u64::from(counts_misses) };
        set(&mut self.maps.slots, "SLOTS", slot, &value)?;
        if allowed.is_some() && counts_misses { self.misses.watch(slot) } else { self.misses.forget(slot) }
    }

    /// Returns the events since the last call: the first miss of each slot, and another one after a pause.
    pub(crate) fn events(&mut self, now: Instant) -> Result<Vec<ProbeEvent>, MapAccessError> {
        let mut events = self.misses.events(now, |bytes| event::miss(bytes, self.nodes.ids()))?;
        if let Some(charge) = &mut self.charge {
            events.extend(charge.events(now, &self.nodes)?);
        }
        Ok(events)
    }

    /// Adapts the maps to a changed machine: nodes and memory that were added or removed. Reports changes for which
    /// there is no room, and applies all others.
    pub(crate) fn refresh(&mut self, machine: &Machine, slots: &Slots) -> Result<(), RefreshError> {
        let without_room = self.nodes.extend(machine);
        self.counters.nodes = self.nodes.ids().into();
        let table = self.nodes.table(machine);
        if self.family.differs_from_nodes(&table) {
            // A guarantee may contain a node that was added later: no page there may count as outside.
            for (slot, holder) in slots.holders().filter(|(_, holder)| holder.allowed.is_some()) {
                self.write_allowed(slot, holder.allowed.as_ref(), holder.is_charged)?;
            }
            self.family.new_generation()?;
            // This family is last: if a write fails, it still differs, and the next call writes both.
            if let Some(charge) = &mut self.charge {
                charge.family.set_nodes(&table)?;
            }
            self.family.set_nodes(&table)?;
            // The memory node of some CPUs may have changed.
            self.family.new_generation()?;
        }
        if self.mode == Mode::Tracepoint {
            let shift = self.maps.section_node.1.shift;
            let sections = match Sections::new(machine, &self.nodes) {
                Ok(sections) if sections.shift == shift => Ok(sections),
                Ok(_) => Err(RefreshError::Sections),
                Err(error) => Err(error.into()),
            };
            match sections {
                Ok(sections) => self.write_sections(&sections)?,
                Err(error) => {
                    // An unknown node is better than a wrong one.
                    self.write_sections(&Sections { shift, nodes: Vec::new() })?;
                    return Err(error);
                }
            }
        }
        if without_room.is_empty() { Ok(()) } else { Err(RefreshError::Nodes(without_room)) }
    }

    /// Writes the entries that differ from the map's contents.
    fn write_sections(&mut self, sections: &Sections) -> Result<(), RefreshError> {
        let (map, current) = &mut self.maps.section_node;
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
}

//! All probes of a host, and the slots that they count by.

use std::{collections::BTreeMap, io, os::fd::OwnedFd, sync::Arc, time::Instant};

use numaward_abi::CgroupId;
use numaward_topology::{CpuId, KernelFeature, Machine, NodeSet};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::{
    activity::Activity,
    alloc::Alloc,
    chains::CallChain,
    costs::CostReader,
    counter_maps::CounterMaps,
    duty::DutyCycle,
    error::{DutyError, MapAccessError, RefreshError, RegisterError, SlotError, StatsError},
    event::ProbeEvent,
    explain::explain,
    family::{Family, report},
    intruders::{CpuUsage, Intruder, Switch},
    kernel::Kernel,
    kernel_features,
    options::ProbeOptions,
    report::{MapUsage, Mode, Obstacle, Probe, ProbeReport},
    rows,
    secondary::SecondaryProbes,
    slots::{Base, Holder, SlotHolders, Slots},
    sys,
    types::{NodeCounters, SlotId},
};

/// Lets the kernel count runs and time of BPF programs until the window, which is returned, is dropped.
///
/// This is a switch of the whole host; it costs every BPF program some 30–40 ns a run, so keep the window short. The
/// kernel counts its users: closing the window disturbs nobody else's. Needs `CAP_SYS_ADMIN` to be opened, and nothing
/// to be held.
pub fn stats_window() -> Result<OwnedFd, StatsError> {
    aya::sys::enable_stats(aya::sys::Stats::RunTime).map_err(|error| StatsError(explain(&error).1))
}

/// The probes of this host.
pub struct Probes {
    alloc: Option<Alloc>,
    others: SecondaryProbes,
    slots: Slots,
    reports: Vec<ProbeReport>,
    costs: Arc<CostReader>,
    skips_single_node_cpusets: Option<bool>,
}

impl Probes {
    /// Loads and attaches every probe, each on its own.
    pub fn load(options: &ProbeOptions<'_>) -> Self {
        let kernel = Kernel::new();
        let mut reasons = Vec::new();
        let mut preemptible = None;
        let mut exact = None;
        for &mode in options.alloc_modes {
            match Alloc::load(options, mode, &kernel) {
                Ok(alloc) if alloc.preemptible => {
                    let text = format!(
                        "{mode}: this kernel preempts tasks inside such programs, and loses events of others meanwhile"
                    );
                    reasons.push((Obstacle::Preemption, text));
                    preemptible.get_or_insert(alloc);
                }
                Ok(alloc) => {
                    exact = Some(alloc);
                    break;
                }
                Err(refusal) => reasons.push((refusal.obstacle(), format!("{mode}: {refusal}"))),
            }
        }
        // Better some events lost than all.
        let mut alloc = exact.or(preemptible);
        if let Some(alloc) = &alloc
            && options.duty_cycle.is_some()
            && alloc.duty_cycle().is_none()
        {
            let text = format!(
                "{}: attached all the time, as attaching it anew would take privileges: no duty cycle",
                alloc.mode
            );
            reasons.push((Obstacle::DutyCycle, text));
        }
        let mode = alloc.as_ref().map_or(Mode::Absent, |alloc| alloc.mode);
        let self_check = alloc.as_ref().map(|alloc| alloc.self_check.clone());
        let mut reports = vec![ProbeReport { self_check, ..report(Probe::Alloc, mode, &reasons) }];
        let mut others = SecondaryProbes::load(options, &kernel, alloc.as_mut());
        reports.append(&mut others.reports);
        // Nobody asks where accesses are not counted.
        let skips = || kernel.structures.as_ref().ok().map(|structures| structures.skips_single_node_cpusets);
        let skips_single_node_cpusets = (!options.secondary.is_empty()).then(skips).flatten();
        drop(kernel);
        sys::trim_heap();
        let mut probes = Self {
            alloc,
            others,
            slots: Slots::new(options.slots),
            reports,
            costs: Arc::default(),
            skips_single_node_cpusets,
        };
        match probes.families().map(Family::costs).collect::<io::Result<_>>() {
            Ok(costs) => probes.costs = Arc::new(CostReader(costs)),
            Err(error) => log::warn!("the costs of the probes cannot be read: {error}"),
        }
        probes
    }

    /// Whether this process must keep `CAP_BPF` for the calls that come: before Linux 5.19, `bpf(2)` serves nobody without
    /// it where `kernel.unprivileged_bpf_disabled` is set. It is tried, on this thread.
    pub fn needs_cap_bpf(&self) -> io::Result<bool> {
        let Some(family) = self.families().next() else { return Ok(false) };
        let held = capabilities(None)?;
        set_capabilities(None, CapabilitySets { effective: CapabilitySet::empty(), ..held })?;
        let is_readable = family.is_readable();
        set_capabilities(None, held)?;
        Ok(!is_readable)
    }

    /// What the probes use of the running kernel where it has it, and whether it does.
    pub fn kernel_features(&self) -> Vec<(KernelFeature, Option<bool>)> {
        // Without a map, or without CAP_BPF, there is no answer.
        let open = self.families().next().and_then(|_| self.needs_cap_bpf().ok()).map(|kept| !kept);
        let mut needs = kernel_features::of_helpers().to_vec();
        needs.push((kernel_features::OPEN_MAPS, open));
        needs
    }

    /// The state of every probe.
    pub fn reports(&self) -> &[ProbeReport] {
        &self.reports
    }

    /// Gives a workload a slot: from now on, pages allocated in `cgroup` and below are counted for it.
    ///
    /// `allowed` are the nodes promised to it; `None` where nothing is promised. Deeper registered
    /// cgroups keep their own slots.
    pub fn register(&mut self, cgroup: CgroupId, allowed: Option<&NodeSet>) -> Result<SlotId, RegisterError> {
        if self.slots.is_registered(cgroup) {
            return Err(RegisterError::AlreadyRegistered(cgroup));
        }
        let slot = self.slots.next(Instant::now());
        let slot = slot.ok_or(RegisterError::NoSlot { slots: self.slots.capacity() })?;
        let mut base = Base { tables: self.others.add_root(cgroup, slot, allowed)?, ..Base::default() };
        if let Some(alloc) = &mut self.alloc {
            let added = alloc.counters().rows.read(slot, 1).and_then(|read| {
                if read.iter().any(|&word| word > 0) {
                    base.rows = read;
                }
                alloc.add_root(cgroup, slot, allowed)
            });
            added.inspect_err(|_| {
                let _best_effort = self.others.remove_root(cgroup, slot);
            })?;
        }
        self.slots.take(slot, Holder { cgroup, base: Arc::new(base), allowed: allowed.cloned() });
        Ok(SlotId(slot))
    }

    /// Changes the nodes promised to a registered workload.
    pub fn set_allowed(&mut self, slot: SlotId, allowed: Option<&NodeSet>) -> Result<(), SlotError> {
        self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        if let Some(alloc) = &mut self.alloc {
            alloc.set_allowed(slot.0, allowed)?;
        }
        self.others.set_allowed(slot.0, allowed)?;
        self.slots.set_allowed(slot.0, allowed);
        Ok(())
    }

    /// Takes in what has changed of the machine since [`Probes::load`]: nodes and memory that came or went. To
    /// be called also where nothing is known to have changed: it writes only what differs.
    pub fn refresh(&mut self, machine: &Machine) -> Result<(), RefreshError> {
        self.others.refresh(machine, &self.slots)?;
        self.alloc.as_mut().map_or(Ok(()), |alloc| alloc.refresh(machine, &self.slots))
    }

    /// Takes a workload's slot back and returns its last counts. Afterwards its cgroups, if they
    /// still exist, are counted for the next registered cgroup above, or as [`AllocationSnapshot::other`].
    ///
    /// On an error the workload keeps its slot.
    pub fn release(&mut self, slot: SlotId) -> Result<NodeCounters, SlotError> {
        let holder = self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        let mut last = NodeCounters::new();
        if let Some(alloc) = &mut self.alloc {
            alloc.remove_root(holder.cgroup, slot.0)?;
            let counters = alloc.counters();
            last = counters.since(&holder.base.rows, &counters.rows.read(slot.0, 1)?);
        }
        self.others.remove_root(holder.cgroup, slot.0)?;
        self.slots.free(slot.0, Instant::now());
        Ok(last)
    }

    /// Slots that were released, but not yet long enough ago to be given to another workload.
    pub fn cooling_slots(&self) -> usize {
        self.slots.cooling(Instant::now())
    }

    /// The maps that count, to be read without access to the probes.
    pub fn counter_maps(&self) -> CounterMaps {
        CounterMaps {
            alloc: self.alloc.as_ref().map(Alloc::counters).cloned(),
            tables: self.others.tables().clone(),
            layout: self.others.layout(),
            holders: self.holders(),
        }
    }

    /// The workloads that hold slots now.
    pub fn holders(&self) -> SlotHolders {
        self.slots.held().clone()
    }

    /// Attaches or detaches the allocation probe as its duty cycle demands ([`ProbeOptions::duty_cycle`]); to be called
    /// several times in each part of the cycle. Needs no privileges.
    ///
    /// All counts of that probe are scaled up for the time not attached, so they are estimates: right on average,
    /// wrong where something happens only now and then.
    pub fn apply_duty_cycle(&mut self, now: Instant) -> Result<(), DutyError> {
        let kept = self.alloc.as_mut().map_or(Ok(()), |alloc| alloc.apply_duty_cycle(now));
        kept.map_err(|error| DutyError(explain(&error).1))
    }

    /// The duty cycle of the allocation probe; `None` where it is attached all the time, or not at all.
    pub fn duty_cycle(&self) -> Option<DutyCycle> {
        self.alloc.as_ref().and_then(Alloc::duty_cycle)
    }

    /// What all probes but that of allocations count for a workload. [`Probes::release`] does not return it: ask before.
    pub fn activity_of(&self, slot: SlotId) -> Result<Activity, SlotError> {
        let holder = self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        Ok(self.others.read_one(slot.0, &holder.base)?)
    }

    /// What the probes reported since the last call. They keep some hundred events; what finds no room is counted in
    /// [`ProbeStats::events_lost`]. To be called now and then: workloads of which something was reported are watched
    /// again from a later call on.
    pub fn events(&mut self) -> Result<Vec<ProbeEvent>, MapAccessError> {
        let now = Instant::now();
        let mut events = self.others.events(now)?;
        if let Some(alloc) = &mut self.alloc {
            events.extend(alloc.events(now)?);
        }
        Ok(events)
    }

    /// Whether the kernel's NUMA balancing leaves alone who may use one node only; `None` where that is not known.
    pub fn skips_single_node_cpusets(&self) -> Option<bool> {
        self.skips_single_node_cpusets
    }

    /// Sets which CPUs are exclusive to which registered workloads. The scheduler's probe is attached while there
    /// are some; this needs no privileges.
    pub fn set_exclusive(&mut self, cpus: &BTreeMap<CpuId, SlotId>) -> Result<(), MapAccessError> {
        self.others.switch.as_mut().map_or(Ok(()), |switch| switch.set_exclusive(cpus))
    }

    /// Whether the scheduler's probe is attached now.
    pub fn is_watching_cpus(&self) -> bool {
        self.others.switch.as_ref().is_some_and(Switch::is_attached)
    }

    /// Who used the CPUs that are exclusive, or were since the daemon started, while they were. Never goes down.
    pub fn cpu_usage(&mut self) -> Result<BTreeMap<CpuId, CpuUsage>, MapAccessError> {
        self.others.switch.as_mut().map_or_else(|| Ok(BTreeMap::new()), Switch::read_cpus)
    }

    /// Who ran on CPUs that are exclusive to others.
    pub fn intruders(&self) -> Result<Vec<Intruder>, MapAccessError> {
        self.others.switch.as_ref().map_or_else(|| Ok(Vec::new()), Switch::intruders)
    }

    /// The call chains of a workload's remote allocations and accesses since it was registered, in no order. This reads
    /// the maps entry by entry, which takes some microseconds each.
    pub fn call_chains(&mut self, slot: SlotId) -> Result<Vec<CallChain>, SlotError> {
        self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        Ok(self.others.call_chains(slot.0)?)
    }

    /// How often a call chain of any workload found no room in the maps.
    pub fn lost_chains(&self) -> Result<u64, MapAccessError> {
        self.others.chains.as_ref().map_or(Ok(0), |chains| chains.family.lost())
    }

    /// How full the maps are.
    pub fn map_usage(&self) -> Vec<MapUsage> {
        let Some(alloc) = &self.alloc else { return Vec::new() };
        let (held, slots) = (self.slots.count_held() as u64, u64::from(self.slots.capacity()));
        let per_slot = alloc.counters().rows.layout.entries_of_slot();
        vec![
            MapUsage { map: "ROOTS", entries: held, capacity: slots },
            // One slot more, for all that is not registered.
            MapUsage { map: rows::MAP, entries: (held + 1) * per_slot, capacity: (slots + 1) * per_slot },
        ]
    }

    fn families(&self) -> impl Iterator<Item = &Family> {
        self.alloc.iter().map(|alloc| &alloc.family).chain(self.others.families())
    }

    /// Bytes of the kernel's memory that the maps of each family take, as the kernel reckons (`memlock` in fdinfo), by
    /// the name of its object: the metric label `family`. All of it is taken when they are loaded.
    pub fn map_memory(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.families().map(|family| (family.name, family.map_bytes))
    }

    /// Handles of the programs, to read what the probes cost.
    pub fn costs(&self) -> Arc<CostReader> {
        self.costs.clone()
    }

    /// Passes the probes' debug messages on to the `log` crate. Nothing to do unless
    /// [`ProbeOptions::debug_log`] is set.
    pub fn flush_log(&mut self) {
        if let Some(logger) = self.alloc.as_mut().and_then(|alloc| alloc.logger.as_mut()) {
            logger.flush();
        }
    }
}

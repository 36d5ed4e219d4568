//! All probes of a host, and their slots.

use std::{collections::BTreeMap, io, os::fd::OwnedFd, sync::Arc, time::Instant};

use bumpalo::Bump;
use numaward_abi::CgroupId;
use numaward_topology::{CpuId, KernelFeature, Machine, NodeSet};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::{
    activity::Activity,
    alloc::AllocProbe,
    chains::CallChain,
    charge::ChargeProbe,
    costs::CostReader,
    counter_maps::CounterMaps,
    cpu_time::CpuTimeReader,
    duty::DutyCycle,
    error::{DutyError, MapAccessError, RefreshError, RegisterError, SlotError, StatsError},
    event::ProbeEvent,
    explain::explain,
    family::{Family, report},
    intruders::{CpuUsage, Intruder, SwitchProbe},
    kernel::KernelInfo,
    kernel_features,
    options::ProbeOptions,
    report::{MapUsage, Mode, Obstacle, Probe, ProbeReport},
    rows,
    secondary::SecondaryProbes,
    slots::{BaseCounters, Holder, SlotHolders, Slots},
    sys,
    types::{NodeCounters, SlotId},
};

/// Enables the kernel's statistics for runs and time of BPF programs until the returned window is dropped.
///
/// The statistics are global: they cost every BPF program some 30–40 ns per run, so windows should be short. The kernel
/// counts the open windows, so closing this one does not affect other programs. Opening needs `CAP_SYS_ADMIN`, holding
/// needs no privileges.
pub fn stats_window() -> Result<OwnedFd, StatsError> {
    aya::sys::enable_stats(aya::sys::Stats::RunTime).map_err(|error| StatsError(explain(&error).1))
}

pub struct Probes {
    alloc: Option<AllocProbe>,
    secondary: SecondaryProbes,
    slots: Slots,
    /// Pages that former holders of slots allocated.
    released: u64,
    reports: Vec<ProbeReport>,
    costs: Arc<CostReader>,
    /// The memory of the maps for CPU time.
    cpu_time_bytes: Option<u64>,
    skips_single_node_cpusets: Option<bool>,
}

impl Probes {
    /// Loads and attaches the probes independently of each other.
    pub fn load(options: &ProbeOptions<'_>) -> Self {
        let values = Bump::new();
        let kernel = KernelInfo::new(&values);
        let mut reasons = Vec::new();
        let mut preemptible = None;
        let mut exact = None;
        let (charge, charge_report) = ChargeProbe::load(options, &kernel);
        let misses = charge.as_ref().map(|charge| &charge.counters);
        for &mode in options.alloc_modes {
            match AllocProbe::load(options, mode, &kernel, misses) {
                Ok(alloc) if alloc.preemptible => {
                    let text = format!(
                        "{mode}: this kernel preempts tasks inside such programs, which loses events of other tasks"
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
        // Losing some events is better than losing all of them.
        let mut alloc = exact.or(preemptible);
        if let Some(alloc) = &alloc
            && options.duty_cycle.is_some()
            && alloc.duty_cycle().is_none()
        {
            let text = format!(
                "{}: attached all the time instead of in a duty cycle, because attaching it again would need privileges",
                alloc.mode
            );
            reasons.push((Obstacle::DutyCycle, text));
        }
        let mode = alloc.as_ref().map_or(Mode::Absent, |alloc| alloc.mode);
        let charge_report = charge_report.map(|found| match (&alloc, found.mode) {
            // It does not count alone.
            (None, Mode::Fexit) => {
                let text = "the allocation probe is absent".to_owned();
                report(Probe::Charge, Mode::Absent, &[(Obstacle::Setup, text)])
            }
            (Some(_), Mode::Absent) => {
                let reason = found.reason.map(|reason| format!("{reason}; the probe alloc counts misses"));
                ProbeReport { reason, ..found }
            }
            _ => found,
        });
        if let Some(alloc) = &mut alloc {
            alloc.charge = charge;
        }
        let self_check = alloc.as_ref().map(|alloc| alloc.self_check.clone());
        let mut reports = vec![ProbeReport { self_check, ..report(Probe::Alloc, mode, &reasons) }];
        reports.extend(charge_report);
        let mut secondary = SecondaryProbes::load(options, &kernel, alloc.as_mut());
        reports.append(&mut secondary.reports);
        // Not needed if accesses are not counted.
        let skips = || kernel.structures.as_ref().ok().map(|structures| structures.skips_single_node_cpusets);
        let skips_single_node_cpusets = (!options.secondary.is_empty()).then(skips).flatten();
        drop(kernel);
        sys::trim_heap();
        let mut probes = Self {
            alloc,
            secondary,
            slots: Slots::new(options.slots),
            released: 0,
            reports,
            costs: Arc::default(),
            cpu_time_bytes: None,
            skips_single_node_cpusets,
        };
        let cpu_times = probes.secondary.cpu_times.as_ref();
        probes.cpu_time_bytes = cpu_times.map(|reader| reader.map_bytes);
        let cpu_time_costs = cpu_times.map(CpuTimeReader::costs);
        match probes.families().map(Family::costs).chain(cpu_time_costs).collect::<io::Result<_>>() {
            Ok(costs) => probes.costs = Arc::new(CostReader(costs)),
            Err(error) => log::warn!("the costs of the probes cannot be read: {error}"),
        }
        probes
    }

    /// Returns true if this process must keep `CAP_BPF` for later calls: before Linux 5.19, `bpf(2)` needs it if
    /// `kernel.unprivileged_bpf_disabled` is set. This is tested on the calling thread.
    pub fn needs_cap_bpf(&self) -> io::Result<bool> {
        let Some(family) = self.families().next() else { return Ok(false) };
        let held = capabilities(None)?;
        set_capabilities(None, CapabilitySets { effective: CapabilitySet::empty(), ..held })?;
        let is_readable = family.is_readable();
        set_capabilities(None, held)?;
        Ok(!is_readable)
    }

    /// Returns the kernel features for probes, with true if the running kernel has them.
    pub fn kernel_features(&self) -> Vec<(KernelFeature, Option<bool>)> {
        // Without a map or without CAP_BPF, this is unknown.
        let open = self.families().next().and_then(|_| self.needs_cap_bpf().ok()).map(|kept| !kept);
        let mut needs = kernel_features::detect_by_helpers().to_vec();
        needs.push((kernel_features::UNPRIVILEGED_MAP_READS, open));
        needs
    }

    /// Returns the state of every probe.
    pub fn reports(&self) -> &[ProbeReport] {
        &self.reports
    }

    /// Assigns a slot to a workload: pages that `cgroup` and its descendants allocate from now on are counted for it.
    ///
    /// `allowed` are the guaranteed nodes; `None` without a guarantee. Descendants that are registered keep their own
    /// slots.
    pub fn register(&mut self, cgroup: CgroupId, allowed: Option<&NodeSet>) -> Result<SlotId, RegisterError> {
        if self.slots.is_registered(cgroup) {
            return Err(RegisterError::AlreadyRegistered(cgroup));
        }
        let slot = self.slots.next(Instant::now());
        let slot = slot.ok_or(RegisterError::NoSlot { slots: self.slots.capacity() })?;
        let mut base = BaseCounters {
            tables: self.secondary.add_root(cgroup, slot, allowed)?,
            ..BaseCounters::default()
        };
        if let Some(alloc) = &mut self.alloc {
            let added = alloc.counters().rows.read(slot, 1).and_then(|read| {
                if read.iter().any(|&word| word > 0) {
                    base.rows = read;
                }
                alloc.add_root(cgroup, slot, allowed)
            });
            added.inspect_err(|_| {
                let _best_effort = self.secondary.remove_root(cgroup, slot);
            })?;
        }
        let (base, allowed) = (Arc::new(base), allowed.cloned());
        self.slots.take(slot, Holder { cgroup, base, allowed, is_charged: true });
        Ok(SlotId(slot))
    }

    /// Changes the guaranteed nodes of a registered workload.
    pub fn set_allowed(&mut self, slot: SlotId, allowed: Option<&NodeSet>) -> Result<(), SlotError> {
        let holder = self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        if let Some(alloc) = &mut self.alloc {
            alloc.set_allowed(slot.0, allowed, holder.is_charged)?;
        }
        self.secondary.set_allowed(slot.0, allowed)?;
        self.slots.set_allowed(slot.0, allowed);
        Ok(())
    }

    /// Sets whether the kernel charges the pages of a registered workload to its own cgroup: only with the controller `memory`.
    /// Without it, misses are counted when pages are allocated. Newly registered workloads have it.
    pub fn set_charged(&mut self, slot: SlotId, is_charged: bool) -> Result<(), SlotError> {
        let holder = self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        if let Some(alloc) = &mut self.alloc
            && holder.is_charged != is_charged
        {
            alloc.set_allowed(slot.0, holder.allowed.as_ref(), is_charged)?;
            self.slots.set_charged(slot.0, is_charged);
        }
        Ok(())
    }

    /// Adapts the probes to nodes and memory that were added or removed since [`Probes::load`]. It writes only
    /// differences, so callers can call it periodically.
    pub fn refresh(&mut self, machine: &Machine) -> Result<(), RefreshError> {
        self.secondary.refresh(machine, &self.slots)?;
        self.alloc.as_mut().map_or(Ok(()), |alloc| alloc.refresh(machine, &self.slots))
    }

    /// Releases a workload's slot and returns its last counts. Its cgroups, if they still exist, are then counted for
    /// the next registered ancestor, or in [`AllocationSnapshot::other`].
    ///
    /// On an error the workload keeps its slot.
    pub fn release(&mut self, slot: SlotId) -> Result<NodeCounters, SlotError> {
        let holder = self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        let (mut last, mut released) = (NodeCounters::new(), 0);
        if let Some(alloc) = &mut self.alloc {
            alloc.remove_root(holder.cgroup, slot.0)?;
            let counters = alloc.counters();
            let rows = counters.rows.read(slot.0, 1)?;
            last = counters.growth_since(&holder.base.rows, &rows);
            released = rows::pages(&rows).wrapping_sub(rows::pages(&holder.base.rows));
        }
        self.secondary.remove_root(holder.cgroup, slot.0)?;
        self.slots.free(slot.0, Instant::now());
        self.released = self.released.wrapping_add(released);
        Ok(last)
    }

    /// Returns the number of released slots that cannot be assigned to another workload yet.
    pub fn cooling_slots(&self) -> usize {
        self.slots.count_cooling(Instant::now())
    }

    /// Returns the maps with counters, which can be read without access to the probes.
    pub fn counter_maps(&self) -> CounterMaps {
        CounterMaps {
            alloc: self.alloc.as_ref().map(AllocProbe::counters).cloned(),
            tables: self.secondary.tables().clone(),
            layout: self.secondary.layout(),
            holders: self.holders(),
            released: self.released,
        }
    }

    /// Returns the workloads that hold slots.
    pub fn holders(&self) -> SlotHolders {
        self.slots.held().clone()
    }

    /// Attaches or detaches the allocation probe according to its duty cycle ([`ProbeOptions::duty_cycle`]). It has to
    /// be called several times in each phase of the cycle. Needs no privileges.
    ///
    /// All counts of that probe are scaled up for the detached time. They are estimates: correct on average, but
    /// inaccurate for rare events.
    pub fn apply_duty_cycle(&mut self, now: Instant) -> Result<(), DutyError> {
        let kept = self.alloc.as_mut().map_or(Ok(()), |alloc| alloc.apply_duty_cycle(now));
        kept.map_err(|error| DutyError(explain(&error).1))
    }

    /// Returns the duty cycle of the allocation probe; `None` if it is always attached, or not at all.
    pub fn duty_cycle(&self) -> Option<DutyCycle> {
        self.alloc.as_ref().and_then(AllocProbe::duty_cycle)
    }

    /// Returns the counts of a workload by the secondary probes. [`Probes::release`] does not return them: call this
    /// before.
    pub fn activity_of(&self, slot: SlotId) -> Result<Activity, SlotError> {
        let holder = self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        Ok(self.secondary.read_one(slot.0, &holder.base)?)
    }

    /// Returns the events since the last call. The probes keep some hundred events; further ones are lost and counted
    /// in [`ProbeStats::events_lost`]. It has to be called periodically: after an event of a workload, the next one is
    /// only reported if a later call opens its gate again.
    pub fn events(&mut self) -> Result<Vec<ProbeEvent>, MapAccessError> {
        let now = Instant::now();
        let mut events = self.secondary.events(now)?;
        if let Some(alloc) = &mut self.alloc {
            events.extend(alloc.events(now)?);
        }
        Ok(events)
    }

    /// Returns true if the kernel's NUMA balancing skips tasks that may use only one node; `None` if that is unknown.
    pub fn skips_single_node_cpusets(&self) -> Option<bool> {
        self.skips_single_node_cpusets
    }

    /// Sets the registered workloads that own exclusive CPUs. The scheduler's probe is attached while there are
    /// exclusive CPUs. Needs no privileges.
    pub fn set_exclusive(&mut self, cpus: &BTreeMap<CpuId, SlotId>) -> Result<(), MapAccessError> {
        self.secondary.switch.as_mut().map_or(Ok(()), |switch| switch.set_exclusive(cpus))
    }

    /// Returns true if the scheduler's probe is attached.
    pub fn is_watching_cpus(&self) -> bool {
        self.secondary.switch.as_ref().is_some_and(SwitchProbe::is_attached)
    }

    /// Returns the running times on CPUs that are exclusive, or were since the daemon started. They never decrease.
    pub fn cpu_usage(&mut self) -> Result<BTreeMap<CpuId, CpuUsage>, MapAccessError> {
        self.secondary.switch.as_mut().map_or_else(|| Ok(BTreeMap::new()), SwitchProbe::read_cpus)
    }

    /// Returns the tasks that ran on CPUs exclusive to another workload.
    pub fn intruders(&self) -> Result<Vec<Intruder>, MapAccessError> {
        self.secondary.switch.as_ref().map_or_else(|| Ok(Vec::new()), SwitchProbe::intruders)
    }

    /// Returns the call chains of a workload's remote allocations and accesses since it was registered, in no
    /// particular order. This reads the maps entry by entry, which takes some microseconds each.
    pub fn call_chains(&mut self, slot: SlotId) -> Result<Vec<CallChain>, SlotError> {
        self.slots.holder(slot.0).ok_or(SlotError::NotRegistered(slot))?;
        Ok(self.secondary.call_chains(slot.0)?)
    }

    /// Returns the number of call chains of all workloads that did not fit into the maps.
    pub fn lost_chains(&self) -> Result<u64, MapAccessError> {
        self.secondary.chains.as_ref().map_or(Ok(0), |chains| chains.family.lost())
    }

    /// Returns the usage of the maps.
    pub fn map_usage(&self) -> Vec<MapUsage> {
        let Some(alloc) = &self.alloc else { return Vec::new() };
        let (held, slots) = (self.slots.count_held() as u64, u64::from(self.slots.capacity()));
        let per_slot = alloc.counters().rows.layout.entries_of_slot();
        vec![
            MapUsage { map: "ROOTS", entries: held, capacity: slots },
            // One additional slot is for all tasks that belong to no registered workload.
            MapUsage { map: rows::MAP, entries: (held + 1) * per_slot, capacity: (slots + 1) * per_slot },
        ]
    }

    fn families(&self) -> impl Iterator<Item = &Family> {
        let charge = self.alloc.iter().filter_map(|alloc| alloc.charge.as_ref()).map(|charge| &charge.family);
        self.alloc.iter().map(|alloc| &alloc.family).chain(charge).chain(self.secondary.families())
    }

    /// Returns the kernel memory of each family's maps in bytes, as the kernel reports it (`memlock` in fdinfo), by the
    /// name of the object: the metric label `family`. It does not change after loading.
    pub fn map_memory(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let families = self.families().map(|family| (family.name, family.map_bytes));
        families.chain(self.cpu_time_bytes.map(|bytes| ("cpu_time", bytes)))
    }

    /// Takes the reader of the CPU time of cgroups; `None` if the kernel does not permit reading it, or if it was taken
    /// already. It needs no access to the other probes.
    pub fn take_cpu_times(&mut self) -> Option<CpuTimeReader> {
        self.secondary.cpu_times.take()
    }

    /// Returns handles of the programs, from which their costs can be read.
    pub fn costs(&self) -> Arc<CostReader> {
        self.costs.clone()
    }

    /// Passes the probes' debug messages on to the `log` crate, if [`ProbeOptions::debug_log`] is set.
    pub fn flush_log(&mut self) {
        if let Some(logger) = self.alloc.as_mut().and_then(|alloc| alloc.logger.as_mut()) {
            logger.flush();
        }
    }
}

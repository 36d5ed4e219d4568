//! Use of exclusive CPUs by other workloads and the kernel: reading and reporting.

use std::{collections::BTreeMap, time::Instant};

use numaward_api as api;
use numaward_model::{
    EventReport,
    snapshot::{CpuFigures, InterruptFigures},
};
use numaward_probes::{CpuUsage, IntruderClass, SlotId};
use numaward_topology::CpuId;

use crate::{
    activity::micros,
    affinity::Affinity,
    exclusive::read_interrupts,
    intrusions::{COMPARE_INTERVAL, intruder_key},
    observer::Observer,
    part::DaemonPart,
};

/// Use of a CPU while it was exclusive.
struct CpuUse {
    cpu: CpuId,
    /// The workload to which the CPU is exclusive now.
    owner: Option<SlotId>,
    by: CpuUsage,
    interrupts: Option<InterruptFigures>,
}

impl Observer {
    /// Keeps all threads of this process off exclusive CPUs from now on.
    pub fn keep_off_exclusive_cpus(&self) {
        match Affinity::of_this_thread() {
            Ok(affinity) => *self.affinity.lock() = Some(affinity),
            Err(error) => tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs"),
        }
    }

    /// Moves this process's threads off exclusive CPUs.
    pub(crate) fn leave_exclusive_cpus(&self) {
        let mut held = self.affinity.lock();
        let Some(affinity) = held.as_mut() else { return };
        let guarantees = self.lock().guarantees.clone();
        let exclusive = guarantees.held_cpus();
        if let Err(error) = affinity.keep_off(&exclusive) {
            tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs");
            *held = None;
        }
    }

    /// Starts or ends the counting of interrupts if the set of exclusive CPUs changed.
    pub(crate) fn follow_interrupts(&self) {
        if self.lock().exclusive.is_due() {
            match self.read_interrupts() {
                Some(interrupts) => self.lock().exclusive.count(&interrupts),
                None => self.lock().exclusive.retry(),
            }
        }
    }

    fn read_interrupts(&self) -> Option<BTreeMap<CpuId, InterruptFigures>> {
        let interrupts = read_interrupts(&self.config.host_root);
        self.note(DaemonPart::Interrupts, interrupts.as_ref().map(|_| ()).map_err(Clone::clone));
        interrupts.ok()
    }

    /// Returns the use of all CPUs that are exclusive or have been.
    fn cpu_use(&self) -> Vec<CpuUse> {
        if self.lock().exclusive.interrupts.is_empty() {
            return Vec::new();
        }
        let interrupts = self.read_interrupts();
        let used = self.probing().cpu_use().unwrap_or_default();
        let exclusive = &mut self.lock().exclusive;
        let of = |(&cpu, &by): (&CpuId, &CpuUsage)| {
            let account = exclusive.interrupts.get_mut(&cpu)?;
            let interrupts = interrupts.as_ref().map(|now| account.total(now.get(&cpu).copied()));
            Some(CpuUse { cpu, owner: exclusive.owners.get(&cpu).copied(), by, interrupts })
        };
        used.iter().filter_map(of).collect()
    }

    /// Returns the same as figures for metrics.
    pub(crate) fn cpu_figures(&self) -> Vec<(CpuId, CpuFigures)> {
        let figures = |CpuUse { cpu, by, interrupts, .. }| {
            let intruders = IntruderClass::ALL.map(|class| (class.as_str(), by.time_of(class)));
            (cpu, CpuFigures { intruders, interrupts })
        };
        self.cpu_use().into_iter().map(figures).collect()
    }

    /// Returns the exclusive CPUs and their use by intruders.
    pub fn exclusive_cpus(&self) -> Vec<api::ExclusiveCpu> {
        let used = self.cpu_use();
        let table = self.lock().table.clone();
        let known = used.into_iter().filter_map(|CpuUse { cpu, owner, by, interrupts }| {
            let of = |class| micros(by.time_of(class));
            Some(api::ExclusiveCpu {
                cpu: cpu.0,
                workload: table.name_of_slot(owner?)?.to_string(),
                own_micros: micros(by.own),
                kernel_thread_micros: of(IntruderClass::KernelThread),
                host_micros: of(IntruderClass::Host),
                workload_micros: of(IntruderClass::Workload),
                hard_interrupts: interrupts.map(|interrupts| interrupts.hard),
                soft_interrupts: interrupts.map(|interrupts| interrupts.soft),
            })
        });
        known.collect()
    }

    /// Returns the intruders on the exclusive CPUs of the workloads of a name, the longest first; `None` if there is
    /// no such workload.
    pub fn intruders(&self, name: &str) -> Option<api::Intruders> {
        let cpus = self.exclusive_cpus().into_iter().filter(|cpu| cpu.workload == name).collect();
        let (found, watching, table) = {
            let probing = self.probing();
            (probing.intruders(), probing.probes.is_watching_cpus(), self.lock().table.clone())
        };
        let (_, series) = table.series().find(|(found, _)| &***found == name)?;
        let slots: Vec<SlotId> = series.members.values().filter_map(|member| member.slot).collect();
        let mut intruders: Vec<api::Intruder> = found
            .into_iter()
            .filter(|intruder| slots.contains(&intruder.owner))
            .map(|intruder| api::Intruder {
                class: intruder.class.as_str().to_owned(),
                workload: intruder
                    .workload
                    .and_then(|slot| table.name_of_slot(slot))
                    .map(ToString::to_string),
                command: intruder.command,
                micros: micros(intruder.time),
                runs: intruder.runs,
            })
            .collect();
        intruders.sort_by(|a, b| b.micros.cmp(&a.micros).then_with(|| a.command.cmp(&b.command)));
        intruders.truncate(api::MAX_INTRUDERS);
        Some(api::Intruders { watching, cpus, intruders })
    }

    /// Compares the use of exclusive CPUs with the previous reading, if the interval has passed.
    fn find_intruders(&self, now: Instant) -> Vec<EventReport> {
        let mut probing = self.probing();
        let (owners, table) = {
            let state = self.lock();
            (state.exclusive.owners.clone(), state.table.clone())
        };
        if owners.is_empty() {
            probing.intrusions.last_compared = None;
            return Vec::new();
        }
        if probing
            .intrusions
            .last_compared
            .is_some_and(|last_compared| now.duration_since(last_compared) < COMPARE_INTERVAL)
        {
            return Vec::new();
        }
        let Some(used) = probing.cpu_use() else { return Vec::new() };
        let first = probing.intrusions.last_compared.is_none();
        let (found, elapsed) = probing.intrusions.compare(&owners, used, now);
        // Threads that ran before the CPUs became exclusive are moved away, so the first reading is only a baseline.
        if first || found.is_empty() {
            return Vec::new();
        }
        let all = probing.intruders();
        let reports = found.iter().filter_map(|(&owner, intrusion)| {
            let name = table.name_of_slot(owner)?;
            let name_of = |slot| table.name_of_slot(slot).map(ToString::to_string);
            let seen =
                probing.intrusions.recent_intruders(owner, &all, intrusion.is_by_tasks(elapsed), name_of);
            Some(intrusion.report(elapsed, name, &seen).workload(name.clone()))
        });
        let reports = reports.collect();
        probing.intrusions.by_name =
            all.iter().map(|intruder| (intruder_key(intruder), intruder.time)).collect();
        reports
    }

    /// Reports intruders on exclusive CPUs, if the interval has passed.
    pub(crate) fn report_intruders(&self) {
        for report in self.find_intruders(Instant::now()) {
            self.events.report(report);
        }
    }
}

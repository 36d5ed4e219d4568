//! Follows who runs on exclusive CPUs, and reports it.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Instant};

use numaward_api as api;
use numaward_model::{
    Report,
    snapshot::{CpuFigures, Interrupts},
};
use numaward_probes::{CpuUse, IntruderClass, SlotId};
use numaward_topology::CpuId;

use crate::{
    activity::micros,
    affinity::Affinity,
    exclusive::{Book, read_interrupts},
    intrusions::{LOOK, name},
    observer::Observer,
    part::{Part, chain},
    state::State,
};

impl State {
    /// Tells the probe which CPUs are exclusive to whom, if that changed.
    pub(crate) fn follow_exclusive_cpus(&mut self, root: &Path) {
        let mut owners = BTreeMap::new();
        for promise in self.promises.workloads() {
            if let Some(slot) = self.table.slot(promise.id) {
                owners.extend(promise.cpus.iter().map(|cpu| (cpu, slot)));
            }
        }
        if owners == self.exclusive.owners {
            return;
        }
        let interrupts = read_interrupts(root);
        self.note(Part::Interrupts, interrupts.as_ref().map(|_| ()).map_err(Clone::clone));
        self.exclusive.change(&owners, &interrupts.unwrap_or_default());
        let told = self.probes.set_exclusive(&owners).map_err(|error| chain(&error));
        self.note(Part::Intruders, told);
    }

    /// Keeps our own threads off exclusive CPUs.
    pub(crate) fn step_aside(&mut self) {
        let Some(affinity) = &mut self.affinity else { return };
        let exclusive = self.promises.workloads().iter().flat_map(|promise| promise.cpus.iter()).collect();
        if let Err(error) = affinity.keep_off(&exclusive) {
            tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs");
            self.affinity = None;
        }
    }

    /// Who used the CPUs that are exclusive, or were.
    fn cpu_use(&mut self, root: &Path) -> Vec<(CpuId, CpuUse, Option<Interrupts>)> {
        if self.exclusive.interrupts.is_empty() {
            return Vec::new();
        }
        let interrupts = read_interrupts(root);
        self.note(Part::Interrupts, interrupts.as_ref().map(|_| ()).map_err(Clone::clone));
        let used = self.probes.cpu_use().map_err(|error| chain(&error));
        self.note(Part::Intruders, used.as_ref().map(|_| ()).map_err(Clone::clone));
        let (interrupts, used) = (interrupts.ok(), used.unwrap_or_default());
        let figures = |(&cpu, book): (&CpuId, &Book)| {
            let used = used.get(&cpu).copied()?;
            let now = interrupts.as_ref().map(|now| book.total(now.get(&cpu).copied()));
            Some((cpu, used, now))
        };
        self.exclusive.interrupts.iter().filter_map(figures).collect()
    }

    /// The same, as metrics serve it.
    pub(crate) fn cpu_figures(&mut self, root: &Path) -> Vec<(CpuId, CpuFigures)> {
        let figures = |(cpu, used, interrupts): (CpuId, CpuUse, _)| {
            let intruders = IntruderClass::ALL.map(|class| (class.as_str(), used.of(class)));
            (cpu, CpuFigures { intruders, interrupts })
        };
        self.cpu_use(root).into_iter().map(figures).collect()
    }

    pub(crate) fn name_of_slot(&self, slot: SlotId) -> Option<Arc<str>> {
        let (id, _) = self.table.members().find(|(_, member)| member.slot == Some(slot))?;
        self.table.name(id).cloned()
    }

    /// The exclusive CPUs and how clean each was.
    pub(crate) fn exclusive_cpus(&mut self, root: &Path) -> Vec<api::ExclusiveCpu> {
        let used = self.cpu_use(root);
        let known = used.into_iter().filter_map(|(cpu, used, interrupts)| {
            let owner = *self.exclusive.owners.get(&cpu)?;
            let of = |class| micros(used.of(class));
            Some(api::ExclusiveCpu {
                cpu: cpu.0,
                workload: self.name_of_slot(owner)?.to_string(),
                own_micros: micros(used.own),
                kernel_thread_micros: of(IntruderClass::KernelThread),
                host_micros: of(IntruderClass::Host),
                workload_micros: of(IntruderClass::Workload),
                hard_interrupts: interrupts.map(|interrupts| interrupts.hard),
                soft_interrupts: interrupts.map(|interrupts| interrupts.soft),
            })
        });
        known.collect()
    }
}

impl Observer {
    /// From now on, all threads of this process keep off exclusive CPUs.
    pub fn keep_off_exclusive_cpus(&self) {
        match Affinity::of_this_thread() {
            Ok(affinity) => self.lock().affinity = Some(affinity),
            Err(error) => tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs"),
        }
    }

    /// Who ran on the exclusive CPUs of the workloads of a name, the longest first; `None` where there is no such
    /// workload.
    pub fn intruders(&self, name: &str) -> Option<api::Intruders> {
        let mut state = self.lock();
        let slots: Vec<SlotId> = {
            let (_, series) = state.table.series().find(|(found, _)| &***found == name)?;
            series.members.values().filter_map(|member| member.slot).collect()
        };
        let cpus = state.exclusive_cpus(&self.config.host_root);
        let cpus = cpus.into_iter().filter(|cpu| cpu.workload == name).collect();
        let found = state.probes.intruders().map_err(|error| chain(&error));
        state.note(Part::Intruders, found.as_ref().map(|_| ()).map_err(Clone::clone));
        let mut intruders: Vec<api::Intruder> = found
            .unwrap_or_default()
            .into_iter()
            .filter(|intruder| slots.contains(&intruder.owner))
            .map(|intruder| api::Intruder {
                class: intruder.class.as_str().to_owned(),
                workload: intruder
                    .workload
                    .and_then(|slot| state.name_of_slot(slot))
                    .map(|name| name.to_string()),
                command: intruder.command,
                micros: micros(intruder.time),
                runs: intruder.runs,
            })
            .collect();
        intruders.sort_by(|a, b| b.micros.cmp(&a.micros).then_with(|| a.command.cmp(&b.command)));
        intruders.truncate(api::MAX_INTRUDERS);
        Some(api::Intruders { watching: state.probes.is_watching_cpus(), cpus, intruders })
    }
}

impl State {
    /// Looks once, if it is time to.
    fn look_for_intruders(&mut self, now: Instant) -> Vec<Report> {
        if self.exclusive.owners.is_empty() {
            self.intrusions.looked = None;
            return Vec::new();
        }
        if self.intrusions.looked.is_some_and(|looked| now.duration_since(looked) < LOOK) {
            return Vec::new();
        }
        let used = self.probes.cpu_use().map_err(|error| chain(&error));
        self.note(Part::Intruders, used.as_ref().map(|_| ()).map_err(Clone::clone));
        let Ok(used) = used else { return Vec::new() };
        let first = self.intrusions.looked.is_none();
        let (found, elapsed) = self.intrusions.compare(&self.exclusive.owners, used, now);
        // What ran before the CPUs were exclusive is moved away; the first look only notes what there is.
        if first || found.is_empty() {
            return Vec::new();
        }
        let all = self.probes.intruders().unwrap_or_default();
        let reports = found.iter().filter_map(|(&owner, intrusion)| {
            let report = intrusion.report(elapsed, &self.intrusions.names(owner, &all));
            Some(report.workload(self.name_of_slot(owner)?))
        });
        let reports = reports.collect();
        self.intrusions.by_name = all.iter().map(|intruder| (name(intruder), intruder.time)).collect();
        reports
    }
}

impl Observer {
    /// Reports who ran on CPUs that are exclusive to others, if it is time to look.
    pub(crate) fn report_intruders(&self) {
        let reports = self.lock().look_for_intruders(Instant::now());
        for report in reports {
            self.events.report(report);
        }
    }
}

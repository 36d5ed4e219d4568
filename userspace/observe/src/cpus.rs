//! Use of exclusive CPUs by other workloads and the kernel: reading and reporting.

use std::{collections::BTreeMap, time::Instant};

use numaward_cgroup::CgroupId;
use numaward_model::{
    EventReport,
    snapshot::{CpuFigures, InterruptFigures},
};
use numaward_probes::{CpuUsage, IntruderClass, SlotId};
use numaward_topology::CpuId;

use crate::{
    exclusive,
    intrusions::{CpuOwner, intruder_key},
    observer::Observer,
    part::DaemonPart,
    probing::Probing,
};

/// Use of a CPU while it was exclusive.
pub(crate) struct CpuUse {
    pub(crate) cpu: CpuId,
    /// The workload to which the CPU is exclusive now.
    pub(crate) owner: Option<SlotId>,
    pub(crate) by: CpuUsage,
    pub(crate) interrupts: Option<InterruptFigures>,
}

/// Starts or ends the counting of interrupts if the set of exclusive CPUs changed.
pub(crate) fn follow_interrupts(observer: &Observer) {
    if observer.registry.lock().exclusive.is_due() {
        match read_interrupts(observer) {
            Some(interrupts) => observer.registry.lock().exclusive.count(&interrupts),
            None => observer.registry.lock().exclusive.retry(),
        }
    }
}

fn read_interrupts(observer: &Observer) -> Option<BTreeMap<CpuId, InterruptFigures>> {
    let interrupts =
        exclusive::read_interrupts(&observer.config.host_root, rustix::param::clock_ticks_per_second());
    observer.note(DaemonPart::Interrupts, interrupts.as_ref().map(|_| ()).map_err(Clone::clone));
    interrupts.ok()
}

/// Returns the use of all CPUs that are exclusive or have been.
pub(crate) fn cpu_use(observer: &Observer) -> Vec<CpuUse> {
    if observer.registry.lock().exclusive.interrupts.is_empty() {
        return Vec::new();
    }
    let interrupts = read_interrupts(observer);
    let used = observer.registry.probing().cpu_use().unwrap_or_default();
    let exclusive = &mut observer.registry.lock().exclusive;
    let of = |(&cpu, &by): (&CpuId, &CpuUsage)| {
        let account = exclusive.interrupts.get_mut(&cpu)?;
        let interrupts = interrupts.as_ref().map(|now| account.total(now.get(&cpu).copied()));
        Some(CpuUse { cpu, owner: exclusive.owners.get(&cpu).copied(), by, interrupts })
    };
    used.iter().filter_map(of).collect()
}

/// Returns the same as figures for metrics.
pub(crate) fn cpu_figures(observer: &Observer) -> Vec<(CpuId, CpuFigures)> {
    let figures = |CpuUse { cpu, by, interrupts, .. }| {
        let intruders = IntruderClass::ALL.map(|class| (class.as_str(), by.time_of(class)));
        (cpu, CpuFigures { intruders, interrupts })
    };
    cpu_use(observer).into_iter().map(figures).collect()
}

/// Compares the use of exclusive CPUs with the previous reading, if the interval has passed.
fn find_intruders(observer: &Observer, probing: &mut Probing, now: Instant) -> Vec<EventReport> {
    let (owners, table) = {
        let state = observer.registry.lock();
        (state.exclusive.owners.clone(), state.table.clone())
    };
    if owners.is_empty() {
        probing.intrusions.clear();
        return Vec::new();
    }
    if !probing.intrusions.is_due(now) {
        return Vec::new();
    }
    let Some(used) = probing.cpu_use() else { return Vec::new() };
    let ids: BTreeMap<SlotId, CgroupId> =
        table.members().filter_map(|(id, member)| Some((member.slot?, id))).collect();
    let owner = |(cpu, slot)| Some((cpu, CpuOwner { slot, id: *ids.get(&slot)? }));
    let owners = owners.into_iter().filter_map(owner).collect();
    let (found, elapsed) = probing.intrusions.compare(owners, used, now);
    if found.is_empty() {
        return Vec::new();
    }
    let all = probing.intruders();
    let reports = found.iter().filter_map(|(&owner, intrusion)| {
        let name = table.name_of_slot(owner)?;
        let name_of = |slot| table.name_of_slot(slot).map(ToString::to_string);
        let seen = probing.intrusions.recent_intruders(owner, &all, intrusion.is_by_tasks, name_of);
        Some(intrusion.report(elapsed, name, &seen).workload(name.clone()))
    });
    let reports = reports.collect();
    probing.intrusions.by_name = all.iter().map(|intruder| (intruder_key(intruder), intruder.time)).collect();
    reports
}

/// Reports intruders on exclusive CPUs, if the interval has passed.
pub(crate) fn report_intruders(observer: &Observer) {
    let now = Instant::now();
    let (reports, intruded) = {
        let mut probing = observer.registry.probing();
        (find_intruders(observer, &mut probing, now), probing.intrusions.intruded_cpus(now))
    };
    observer.latest.publish_intruded_cpus(intruded);
    for report in reports {
        observer.events.report(report);
    }
}

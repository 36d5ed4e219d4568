//! The state of this host as last seen.

use std::{collections::BTreeMap, fmt, sync::Arc, thread::Thread, time::Instant};

use numaward_cgroup::{CgroupId, CgroupPath, Container, Hierarchy, Workload};
use numaward_model::{Promises, port::CgroupListener};
use numaward_probes::{self as probes, Mode, NodeAccesses, Probe, ProbeReport, ProbeStats, Probes, SlotId};
use numaward_topology::Machine;

use crate::{
    activity::{Activities, Attached, Counted},
    affinity::Affinity,
    containers,
    cost::Cost,
    estimate::Estimates,
    exclusive::Exclusive,
    foreign::ForeignPromises,
    intrusions::Intrusions,
    naming,
    part::{Part, chain},
    sampling::Seen,
    slot_policy::SlotPolicy,
    table::{Member, Table},
};

/// Somebody who is told of cgroups that come and go.
pub(crate) struct Listening(pub(crate) CgroupListener);

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listening")
    }
}

/// All of it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) machine: Arc<Machine>,
    pub(crate) probes: Probes,
    pub(crate) table: Table<SlotId>,
    /// Where cgroups are found, once that is known.
    pub(crate) hierarchy: Option<Hierarchy>,
    /// What is promised.
    pub(crate) promises: Arc<Promises>,
    /// Who is told of cgroups that come and go.
    pub(crate) cgroup_listeners: Vec<Listening>,
    /// How often that changed.
    pub(crate) revision: u64,
    /// Somebody else's promises, where they are taken for our own.
    pub(crate) foreign: Option<Arc<dyn ForeignPromises>>,
    /// The names of containers of pods.
    pub(crate) containers: containers::Names,
    /// Is notified of containers to which nothing is known to be promised.
    pub(crate) containers_came: Arc<tokio::sync::Notify>,
    /// What workloads do beside allocating.
    pub(crate) activities: Activities,
    /// Whether their accesses are sampled.
    pub(crate) sampling: BTreeMap<CgroupId, Seen>,
    /// Where they are not, and that is asked for: how many would be remote.
    pub(crate) estimates: Estimates,
    /// Whether `memory.stat` tells of sampling, where the probes do not.
    pub(crate) memory_stat_serves: bool,
    pub(crate) exclusive: Exclusive,
    /// What others did there.
    pub(crate) intrusions: Intrusions,
    /// Who gets a slot.
    pub(crate) slot_policy: SlotPolicy,
    /// While the kernel measures the probes.
    pub(crate) cost: Option<Cost>,
    pub(crate) degraded: BTreeMap<Part, String>,
    /// When somebody last asked for the workloads' figures.
    pub(crate) asked: Option<Instant>,
    /// Who reads them then.
    pub(crate) reader: Option<Thread>,
    /// Where our own threads run, if they are to keep off exclusive CPUs.
    pub(crate) affinity: Option<Affinity>,
}

impl State {
    /// Whether a probe counts allocations.
    pub(crate) fn is_counting(&self) -> bool {
        let counts = |report: &ProbeReport| report.probe == Probe::Alloc && report.mode != Mode::Absent;
        self.probes.reports().iter().any(counts)
    }

    /// Whether any probe counts by workload.
    pub(crate) fn needs_slots(&self) -> bool {
        self.probes.reports().iter().any(|report| report.mode != Mode::Absent)
    }

    /// How a probe is attached, or what serves in its place.
    pub(crate) fn mode(&self, report: &ProbeReport) -> String {
        match (report.probe, report.mode) {
            (Probe::Hint, Mode::Absent) if self.memory_stat_serves => "memory_stat".to_owned(),
            (Probe::OomKill, Mode::Absent) => "memory_events".to_owned(),
            (_, mode) => mode.to_string(),
        }
    }

    /// What the probes counted; `None` where none counts.
    pub(crate) fn counters(&mut self) -> Option<probes::Snapshot> {
        if !self.is_counting() {
            return None;
        }
        let counted = self.probes.counters().map_err(|error| chain(&error));
        self.note(Part::Counters, counted.as_ref().map(|_| ()).map_err(Clone::clone));
        counted.ok()
    }

    /// What the probes cost; nothing where that cannot be read.
    pub(crate) fn stats(&mut self) -> Vec<ProbeStats> {
        let stats = self.probes.stats().map_err(|error| chain(&error));
        self.note(Part::ProbeStats, stats.as_ref().map(|_| ()).map_err(Clone::clone));
        stats.unwrap_or_default()
    }

    pub(crate) fn note(&mut self, part: Part, result: Result<(), String>) {
        match result {
            Ok(()) => {
                if self.degraded.remove(&part).is_some() {
                    tracing::info!(part = part.name(), "works again");
                }
            }
            Err(reason) => {
                if self.degraded.get(&part) != Some(&reason) {
                    tracing::warn!(part = part.name(), reason, "works less well than it should");
                    self.degraded.insert(part, reason);
                }
            }
        }
    }

    /// Reads what the probes beside that of allocations counted; nothing where that fails.
    pub(crate) fn read_activity(&mut self) -> Counted {
        let read = self.probes.activity().map_err(|error| chain(&error));
        self.note(Part::Activity, read.as_ref().map(|_| ()).map_err(Clone::clone));
        let (slots, mut other) = read.unwrap_or_default();
        other.add(&self.activities.gone);
        Counted { slots, other }
    }

    /// The accesses of all workloads together; `None` where no probe samples.
    pub(crate) fn all_accesses(&self, counted: &Counted) -> Option<Vec<NodeAccesses>> {
        let attached = Attached::of(self.probes.reports());
        attached.has(Probe::Hint).then(|| self.activities.accesses(counted))
    }

    /// Ends measuring when it is time; attaches or detaches what has a duty cycle.
    pub(crate) fn follow_cost(&mut self, now: Instant) {
        self.cost.take_if(|cost| now >= cost.until);
        let kept = self.probes.keep_duty(now).map_err(|error| chain(&error));
        self.note(Part::DutyCycle, kept);
    }

    /// Which part of the time a probe watches; `None` where it is not attached.
    pub(crate) fn sampled_ratio(&self, report: &ProbeReport) -> Option<f64> {
        match (report.probe, report.mode) {
            (_, Mode::Absent) => None,
            (Probe::Alloc, _) => {
                Some(self.probes.duty_cycle().map_or(1.0, numaward_probes::DutyCycle::ratio))
            }
            _ => Some(1.0),
        }
    }

    /// The memory of the maps of each family.
    pub(crate) fn map_memory(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.probes.map_memory().into_iter().map(|memory| (memory.family, memory.bytes))
    }

    /// The name under which a workload is served.
    pub(crate) fn name_of(&self, workload: &Workload) -> String {
        self.label(workload.container.as_ref()).unwrap_or_else(|| naming::name(workload))
    }

    /// Serves under its name who has become known.
    pub(crate) fn rename(&mut self) {
        let renamed: Vec<_> = self
            .table
            .members()
            .filter_map(|(id, member)| {
                let container = member.container.clone()?;
                let label = self.label(Some(&container))?;
                let is_new = self.table.name(id).is_none_or(|name| **name != *label);
                is_new.then(|| (id, label, Member::new(member.path.clone(), member.kind, Some(container))))
            })
            .collect();
        for (id, label, member) in renamed {
            self.give_up(id);
            self.table.add(id, &label, member);
        }
    }

    /// The name under which a container is served, where it is known.
    pub(crate) fn label(&self, container: Option<&Container>) -> Option<String> {
        let container = container?;
        let known = self.containers.get(container).map(ToString::to_string);
        known.or_else(|| self.foreign.as_ref()?.label(container))
    }

    /// The cgroup of a container came: what is promised to it holds from its first page.
    pub(crate) fn container_came(
        &mut self,
        id: CgroupId,
        cgroup: &CgroupPath,
        container: Option<&Container>,
    ) {
        let promise = self
            .foreign
            .as_ref()
            .zip(container)
            .and_then(|(foreign, container)| foreign.promise(id, cgroup, container));
        match promise {
            Some(promise) => Arc::make_mut(&mut self.promises).insert(promise),
            // Maybe the promise is news too.
            None => self.containers_came.notify_one(),
        }
    }

    /// The cgroup of a container went.
    pub(crate) fn container_went(&mut self, id: CgroupId) {
        if self.foreign.is_some() && self.promises.has(id) {
            Arc::make_mut(&mut self.promises).remove(id);
        }
    }
}

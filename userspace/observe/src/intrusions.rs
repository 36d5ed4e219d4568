//! Detection of foreign threads on CPUs that are exclusive to a workload.
//!
//! # Algorithm
//! While a CPU is exclusive, the time of each class of intruders is compared once per [`COMPARE_INTERVAL`] with the
//! previous reading. It causes an event if foreign tasks ran on a CPU for at least a [`TASK_SHARE_INVERSE`]th of the time, or
//! kernel threads, some of which every CPU needs, for at least a [`KERNEL_THREAD_SHARE_INVERSE`]th. The event hub
//! limits the events to one a minute. CPUs with foreign tasks count as intruded for a minute. The first reading of a CPU
//! since it is exclusive to the workload is only a baseline: threads that ran there before are being moved away.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use numaward_api::EventKind;
use numaward_cgroup::CgroupId;
use numaward_model::EventReport;
use numaward_probes::{CpuUsage, Intruder, IntruderClass, SlotId};
use numaward_topology::{CpuId, CpuSet};

/// Interval between two readings.
pub(crate) const COMPARE_INTERVAL: Duration = Duration::from_secs(5);
/// Time for which a CPU counts as intruded after foreign tasks ran there.
const INTRUDED_TIME: Duration = Duration::from_mins(1);
/// Inverse of the share of the time from which an event is reported, for tasks on one CPU and for kernel threads on all.
const TASK_SHARE_INVERSE: u32 = 1000;
const KERNEL_THREAD_SHARE_INVERSE: u32 = 20;
/// Most names of intruders in an event.
const MAX_NAMES_IN_EVENT: usize = 3;

/// State at the last reading.
#[derive(Debug, Default)]
pub(crate) struct Intrusions {
    last_compared: Option<Instant>,
    owners: BTreeMap<CpuId, CpuOwner>,
    /// Times at which foreign tasks were last seen on exclusive CPUs.
    last_intruded: BTreeMap<CpuId, Instant>,
    used: BTreeMap<CpuId, CpuUsage>,
    /// Time of each intruder by name, when it was last needed.
    pub(crate) by_name: BTreeMap<IntruderKey, Duration>,
}

pub(crate) type IntruderKey = (SlotId, IntruderClass, Option<SlotId>, String);

/// A workload with exclusive CPUs. A slot may be assigned to another workload between two readings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuOwner {
    pub(crate) slot: SlotId,
    pub(crate) id: CgroupId,
}

/// An intruder that ran on exclusive CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IntruderSummary {
    command: String,
    class: IntruderClass,
    /// Name of the intruder's workload, if it belongs to one.
    workload: Option<String>,
}

impl IntruderSummary {
    /// Formats the intruder's name for a sentence. Names are untrusted input.
    fn display_name(&self) -> String {
        match &self.workload {
            Some(workload) => workload.escape_debug().to_string(),
            None => format!("{:?}", self.command),
        }
    }
}

/// Time for which intruders ran on the CPUs of a workload.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Intrusion {
    cpus: CpuSet,
    /// True if tasks ran long enough on one of the CPUs. Kernel threads have lower priority, because every CPU has some.
    pub(crate) is_by_tasks: bool,
    /// Time of processes of the host and of other workloads.
    tasks: Duration,
    kernel_threads: Duration,
}

impl Intrusion {
    fn is_worth_an_event(&self, elapsed: Duration) -> bool {
        self.is_by_tasks || self.kernel_threads * KERNEL_THREAD_SHARE_INVERSE >= elapsed
    }

    /// Creates the event of `owner`. It begins with the intruders, because long lines are often cut.
    pub(crate) fn report(
        &self,
        elapsed: Duration,
        owner: &str,
        intruders: &[IntruderSummary],
    ) -> EventReport {
        let is_by_tasks = self.is_by_tasks;
        let time = if is_by_tasks { self.tasks } else { self.kernel_threads };
        let tasks = intruders
            .iter()
            .filter(|one| one.class != IntruderClass::KernelThread)
            .map(IntruderSummary::display_name);
        let tasks: Vec<String> = tasks.collect::<BTreeSet<_>>().into_iter().collect();
        let who = match (is_by_tasks, &*tasks) {
            (false, _) => "Kernel threads".to_owned(),
            (true, []) => "Others".to_owned(),
            (true, [one]) => one.clone(),
            (true, _) => format!("{} and others", intruders[0].display_name()),
        };
        let listed = intruders
            .iter()
            .map(|IntruderSummary { command, class, .. }| format!("{command:?} ({})", class.as_str()));
        let listed = match listed.collect::<Vec<_>>() {
            none if none.is_empty() => String::new(),
            some => format!(": {}", some.join(", ")),
        };
        let cpus = if self.cpus.len() == 1 { "CPU" } else { "CPUs" };
        let message = format!(
            "{who} ran for {time:.1?} of the last {elapsed:.0?} on {cpus} {}, exclusive to {}{listed}.",
            self.cpus,
            owner.escape_debug(),
        );
        let mut report = EventReport::new(EventKind::Intruder, message)
            .detail("cpus", &self.cpus)
            .detail("taskMicros", self.tasks.as_micros())
            .detail("kernelThreadMicros", self.kernel_threads.as_micros());
        if let Some(IntruderSummary { command, class, .. }) = intruders.first() {
            report = report.detail("command", command).detail("class", class.as_str());
        }
        report
    }
}

impl Intrusions {
    /// Returns whether the interval since the previous reading has passed.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.last_compared.is_none_or(|last| now.duration_since(last) >= COMPARE_INTERVAL)
    }

    /// Forgets the previous reading, because no CPU is exclusive.
    pub(crate) fn clear(&mut self) {
        *self = Self { by_name: std::mem::take(&mut self.by_name), ..Self::default() };
    }

    /// Returns the intruded CPUs by the cgroups of their owners.
    pub(crate) fn intruded_cpus(&self, now: Instant) -> BTreeMap<CgroupId, CpuSet> {
        let mut intruded: BTreeMap<CgroupId, CpuSet> = BTreeMap::new();
        for (cpu, last) in &self.last_intruded {
            if let Some(owner) = self.owners.get(cpu)
                && now.duration_since(*last) < INTRUDED_TIME
            {
                intruded.entry(owner.id).or_default().insert(*cpu);
            }
        }
        intruded
    }

    /// Compares with the previous reading. Returns the intrusions and the time between the readings.
    pub(crate) fn compare(
        &mut self,
        owners: BTreeMap<CpuId, CpuOwner>,
        used: BTreeMap<CpuId, CpuUsage>,
        instant: Instant,
    ) -> (BTreeMap<SlotId, Intrusion>, Duration) {
        let elapsed = self
            .last_compared
            .map_or(COMPARE_INTERVAL, |last_compared| instant.duration_since(last_compared));
        let mut intrusions: BTreeMap<SlotId, Intrusion> = BTreeMap::new();
        for (&cpu, &owner) in &owners {
            if self.owners.get(&cpu) != Some(&owner) {
                self.last_intruded.remove(&cpu);
                continue;
            }
            let Some(now) = used.get(&cpu) else { continue };
            let before = self.used.get(&cpu).copied().unwrap_or_default();
            let grown = |class| now.time_of(class).saturating_sub(before.time_of(class));
            let kernel_threads = grown(IntruderClass::KernelThread);
            let tasks = grown(IntruderClass::Host).saturating_add(grown(IntruderClass::Workload));
            let intrusion = intrusions.entry(owner.slot).or_default();
            if !tasks.is_zero() || !kernel_threads.is_zero() {
                intrusion.cpus.insert(cpu);
            }
            if tasks * TASK_SHARE_INVERSE >= elapsed {
                intrusion.is_by_tasks = true;
                self.last_intruded.insert(cpu, instant);
            }
            intrusion.tasks = intrusion.tasks.saturating_add(tasks);
            intrusion.kernel_threads = intrusion.kernel_threads.saturating_add(kernel_threads);
        }
        intrusions.retain(|_, intrusion| intrusion.is_worth_an_event(elapsed));
        self.last_intruded.retain(|cpu, _| owners.contains_key(cpu));
        (self.last_compared, self.owners, self.used) = (Some(instant), owners, used);
        (intrusions, elapsed)
    }

    /// Returns the intruders of `owner` since the previous call, the longest first; tasks precede kernel threads if
    /// tasks are worth an event. `name_of` returns the name of a workload.
    pub(crate) fn recent_intruders(
        &self,
        owner: SlotId,
        all: &[Intruder],
        is_by_tasks: bool,
        name_of: impl Fn(SlotId) -> Option<String>,
    ) -> Vec<IntruderSummary> {
        let grown = |intruder: &Intruder| {
            intruder
                .time
                .saturating_sub(self.by_name.get(&intruder_key(intruder)).copied().unwrap_or_default())
        };
        let mut grown: Vec<(bool, Duration, &Intruder)> = all
            .iter()
            .filter(|intruder| intruder.owner == owner)
            .map(|of| (is_by_tasks && of.class != IntruderClass::KernelThread, grown(of), of))
            .filter(|(_, time, _)| !time.is_zero())
            .collect();
        grown.sort_by(|(first, time, of), (other_first, other_time, other)| {
            (other_first, other_time).cmp(&(first, time)).then_with(|| of.command.cmp(&other.command))
        });
        let seen = grown.into_iter().take(MAX_NAMES_IN_EVENT).map(|(_, _, of)| IntruderSummary {
            command: of.command.clone(),
            class: of.class,
            workload: of.workload.and_then(&name_of),
        });
        seen.collect()
    }
}

pub(crate) fn intruder_key(intruder: &Intruder) -> IntruderKey {
    (intruder.owner, intruder.class, intruder.workload, intruder.command.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exclusive::tests::slot;

    fn owner(id: u64) -> CpuOwner {
        CpuOwner { slot: slot(), id: CgroupId(id) }
    }

    fn used(host: u64, kernel_threads: u64) -> BTreeMap<CpuId, CpuUsage> {
        let intruders = [kernel_threads, host, 0].map(Duration::from_millis);
        let used = CpuUsage { intruders, ..CpuUsage::default() };
        BTreeMap::from([(CpuId(2), used), (CpuId(3), CpuUsage::default()), (CpuId(9), used)])
    }

    #[test]
    fn reports_only_long_intrusions() {
        let owners = BTreeMap::from([2, 3].map(|cpu| (CpuId(cpu), owner(1))));
        let start = Instant::now();
        let mut intrusions = Intrusions::default();
        let mut look = |number, host, kernel_threads| {
            intrusions
                .compare(owners.clone(), used(host, kernel_threads), start + number * COMPARE_INTERVAL)
                .0
                .remove(&slot())
        };
        assert_eq!(look(0, 0, 0), None);
        assert_eq!(look(1, 4, 0), None, "less than a thousandth of five seconds");
        let reported = look(2, 9, 10).unwrap();
        assert_eq!(
            (reported.cpus.to_string().as_str(), reported.tasks),
            ("2", Duration::from_millis(5)),
            "not CPU 9"
        );
        assert_eq!(look(3, 9, 250), None);
        assert_eq!(look(4, 9, 500).unwrap().kernel_threads, Duration::from_millis(250));
        assert_eq!(look(5, 9, 500), None);
        assert_eq!(look(6, 0, 0), None, "a counter that went back");
    }

    #[test]
    fn cpus_count_as_intruded_for_a_minute() {
        let start = Instant::now();
        let mut intrusions = Intrusions::default();
        let mut look = |seconds, owned: &[(u32, u64)], host, kernel_threads| {
            let owners = owned.iter().map(|(cpu, id)| (CpuId(*cpu), owner(*id))).collect();
            let now = start + Duration::from_secs(seconds);
            assert!(intrusions.is_due(now));
            intrusions.compare(owners, used(host, kernel_threads), now);
            let intruded = intrusions.intruded_cpus(now).into_iter();
            intruded.map(|(id, cpus)| format!("{}: {cpus}", id.0)).collect::<Vec<_>>().join(" ")
        };
        let both = &[(2, 1), (3, 1)][..];
        assert_eq!(look(0, both, 900, 0), "", "ran before the CPUs became exclusive");
        assert_eq!(look(5, both, 904, 4000), "", "less than a thousandth, and kernel threads");
        assert_eq!(look(10, both, 909, 4000), "1: 2");
        assert_eq!(look(65, both, 909, 4000), "1: 2");
        assert_eq!(look(70, both, 909, 4000), "");
        assert_eq!(look(75, both, 990, 4000), "1: 2");
        assert_eq!(look(80, &[(3, 1)], 2990, 4000), "", "no longer exclusive");
        assert_eq!(look(85, both, 4990, 4000), "", "exclusive again, a baseline");
        assert_eq!(look(90, both, 5990, 4000), "1: 2");
        assert_eq!(look(95, &[(2, 7), (3, 1)], 6990, 4000), "", "another workload with the same slot");
        assert_eq!(look(100, &[(2, 7), (3, 1)], 7990, 4000), "7: 2");
        let later = start + Duration::from_secs(100) + INTRUDED_TIME;
        assert_eq!(intrusions.intruded_cpus(later), BTreeMap::new(), "without another reading");
        intrusions.clear();
        assert_eq!(intrusions.intruded_cpus(start), BTreeMap::new());
    }

    fn intruder(command: &str, class: IntruderClass, millis: u64) -> Intruder {
        Intruder {
            owner: slot(),
            class,
            workload: (class == IntruderClass::Workload).then(slot),
            command: command.to_owned(),
            time: Duration::from_millis(millis),
            runs: 1,
        }
    }

    fn intrusion(cpus: &str, tasks: u64, kernel_threads: u64) -> Intrusion {
        let [tasks, kernel_threads] = [tasks, kernel_threads].map(Duration::from_millis);
        let is_by_tasks = tasks * TASK_SHARE_INVERSE >= COMPARE_INTERVAL;
        Intrusion { cpus: cpus.parse().unwrap(), is_by_tasks, tasks, kernel_threads }
    }

    /// Returns the event for the intruders `now`, of which `before` were already known at the previous reading.
    fn event(of: &Intrusion, before: &[Intruder], now: &[Intruder]) -> numaward_api::Event {
        let by_name = before.iter().map(|intruder| (intruder_key(intruder), intruder.time)).collect();
        let intrusions = Intrusions { by_name, ..Intrusions::default() };
        let seen =
            intrusions.recent_intruders(slot(), now, of.is_by_tasks, |_| Some("data\nbase".to_owned()));
        let events = crate::events::Events::default();
        events.report(of.report(COMPARE_INTERVAL, "guarded", &seen));
        let filter = numaward_api::EventFilter { limit: 1, ..Default::default() };
        events.page(&filter).events.remove(0)
    }

    #[test]
    fn event_starts_with_recent_intruders() {
        use IntruderClass::{Host, KernelThread, Workload};
        let before = [intruder("old", Host, 900), intruder("sh", Host, 10)];
        let now = [intruder("old", Host, 900), intruder("sh", Host, 15), intruder("load", Host, 7)];
        let reported = event(&intrusion("2-3", 1200, 0), &before, &now);
        assert_eq!(
            reported.message,
            "\"load\" and others ran for 1.2s of the last 5s on CPUs 2-3, exclusive to guarded: \
             \"load\" (host), \"sh\" (host)."
        );
        assert_eq!(
            (reported.details["command"].as_str(), reported.details["taskMicros"].as_str()),
            ("load", "1200000")
        );

        let now =
            [intruder("rcu", KernelThread, 2000), intruder("a", Workload, 9), intruder("b", Workload, 9)];
        let reported = event(&intrusion("2", 1000, 2000), &[], &now);
        assert_eq!(
            reported.message,
            "data\\nbase ran for 1.0s of the last 5s on CPU 2, exclusive to guarded: \
             \"a\" (workload), \"b\" (workload), \"rcu\" (kernel_thread)."
        );
        assert_eq!(reported.details["class"], "workload");

        let reported = event(&intrusion("2", 1, 400), &[], &now);
        assert!(
            reported.message.starts_with("Kernel threads ran for 400.0ms of the last 5s on CPU 2, "),
            "{reported:?}"
        );
        assert_eq!(reported.details["command"], "rcu");

        let reported = event(&intrusion("2", 1000, 0), &[], &[]);
        assert_eq!(reported.message, "Others ran for 1.0s of the last 5s on CPU 2, exclusive to guarded.");
    }
}

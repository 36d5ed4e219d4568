//! Notices when others run on CPUs that are exclusive to a workload.
//!
//! Algorithm: every [`LOOK`], while a CPU is exclusive, the time of each class of intruders is compared with that of the
//! look before. It is worth an event where tasks of others ran for more than [`TASKS`] of the time, or kernel threads,
//! some of which every CPU has and needs, for more than [`KERNEL_THREADS`]. The events' hub sees to it that there is
//! one a minute.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_api::EventKind;
use numaward_model::Report;
use numaward_probes::{CpuUse, Intruder, IntruderClass, SlotId};
use numaward_topology::{CpuId, CpuSet};

/// Time between two looks.
pub(crate) const LOOK: Duration = Duration::from_secs(5);
/// One in so many parts of the time, for tasks and for kernel threads.
const TASKS: u32 = 1000;
const KERNEL_THREADS: u32 = 20;
/// Names that an event gives.
const NAMES: usize = 3;

/// What was seen at the last look.
#[derive(Debug, Default)]
pub(crate) struct Intrusions {
    pub(crate) looked: Option<Instant>,
    used: BTreeMap<CpuId, CpuUse>,
    /// The time of each name, when it was last needed.
    pub(crate) by_name: BTreeMap<Name, Duration>,
}

pub(crate) type Name = (SlotId, IntruderClass, Option<SlotId>, String);

/// Others ran on CPUs of one workload.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Intrusion {
    cpus: CpuSet,
    /// Processes of the host and of other workloads.
    tasks: Duration,
    kernel_threads: Duration,
}

impl Intrusion {
    fn is_worth_an_event(&self, elapsed: Duration) -> bool {
        self.tasks * TASKS >= elapsed || self.kernel_threads * KERNEL_THREADS >= elapsed
    }

    /// The event. `names` are of the intruders, the longest first, as far as they are known.
    pub(crate) fn report(&self, elapsed: Duration, names: &[(String, IntruderClass)]) -> Report {
        let who = names.iter().map(|(command, class)| format!("{command:?} ({})", class.as_str()));
        let who = match who.collect::<Vec<_>>() {
            who if who.is_empty() => String::new(),
            who => format!(": {}", who.join(", ")),
        };
        let time = self.tasks + self.kernel_threads;
        let message = format!(
            "Others ran for {time:.1?} of the last {elapsed:.0?} on CPUs {}, which are exclusive to it{who}.",
            self.cpus
        );
        let mut report = Report::new(EventKind::Intruder, message)
            .detail("cpus", &self.cpus)
            .detail("taskMicros", self.tasks.as_micros())
            .detail("kernelThreadMicros", self.kernel_threads.as_micros());
        if let Some((command, class)) = names.first() {
            report = report.detail("command", command).detail("class", class.as_str());
        }
        report
    }
}

impl Intrusions {
    /// Compares with the last look: who was intruded upon, and for how long that look was.
    pub(crate) fn compare(
        &mut self,
        owners: &BTreeMap<CpuId, SlotId>,
        used: BTreeMap<CpuId, CpuUse>,
        now: Instant,
    ) -> (BTreeMap<SlotId, Intrusion>, Duration) {
        let elapsed = self.looked.map_or(LOOK, |looked| now.duration_since(looked));
        let mut intrusions: BTreeMap<SlotId, Intrusion> = BTreeMap::new();
        for (&cpu, &owner) in owners {
            let Some(now) = used.get(&cpu) else { continue };
            let before = self.used.get(&cpu).copied().unwrap_or_default();
            let grown = |class| now.of(class).saturating_sub(before.of(class));
            let kernel_threads = grown(IntruderClass::KernelThread);
            let tasks = grown(IntruderClass::Host).saturating_add(grown(IntruderClass::Workload));
            let intrusion = intrusions.entry(owner).or_default();
            if !tasks.is_zero() || !kernel_threads.is_zero() {
                intrusion.cpus.insert(cpu);
            }
            intrusion.tasks = intrusion.tasks.saturating_add(tasks);
            intrusion.kernel_threads = intrusion.kernel_threads.saturating_add(kernel_threads);
        }
        intrusions.retain(|_, intrusion| intrusion.is_worth_an_event(elapsed));
        (self.looked, self.used) = (Some(now), used);
        (intrusions, elapsed)
    }

    /// The names of those who intruded upon `owner` since names were last asked for, the longest first.
    pub(crate) fn names(&self, owner: SlotId, all: &[Intruder]) -> Vec<(String, IntruderClass)> {
        let grown = |intruder: &Intruder| {
            intruder.time.saturating_sub(self.by_name.get(&name(intruder)).copied().unwrap_or_default())
        };
        let mut grown: Vec<(Duration, &Intruder)> = all
            .iter()
            .filter(|intruder| intruder.owner == owner)
            .map(|intruder| (grown(intruder), intruder))
            .filter(|(time, _)| !time.is_zero())
            .collect();
        grown.sort_by(|(a, of_a), (b, of_b)| b.cmp(a).then_with(|| of_a.command.cmp(&of_b.command)));
        grown.into_iter().take(NAMES).map(|(_, of)| (of.command.clone(), of.class)).collect()
    }
}

pub(crate) fn name(intruder: &Intruder) -> Name {
    (intruder.owner, intruder.class, intruder.workload, intruder.command.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exclusive::tests::slot;

    fn used(host: u64, kernel_threads: u64) -> BTreeMap<CpuId, CpuUse> {
        let others = [kernel_threads, host, 0].map(Duration::from_millis);
        let used = CpuUse { others, ..CpuUse::default() };
        BTreeMap::from([(CpuId(2), used), (CpuId(3), CpuUse::default()), (CpuId(9), used)])
    }

    #[test]
    fn only_what_grew_by_enough_is_reported() {
        let owners = BTreeMap::from([(CpuId(2), slot()), (CpuId(3), slot())]);
        let start = Instant::now();
        let mut intrusions = Intrusions::default();
        let mut look = |number, host, kernel_threads| {
            intrusions.compare(&owners, used(host, kernel_threads), start + number * LOOK).0.remove(&slot())
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
    fn the_names_are_those_of_the_tasks_that_ran_since() {
        let intruder = |command: &str, millis| Intruder {
            owner: slot(),
            class: IntruderClass::Host,
            workload: None,
            command: command.to_owned(),
            time: Duration::from_millis(millis),
            runs: 1,
        };
        let before = [intruder("old", 900), intruder("sh", 10)];
        let by_name = before.iter().map(|intruder| (name(intruder), intruder.time)).collect();
        let intrusions = Intrusions { by_name, ..Intrusions::default() };
        let now = [intruder("old", 900), intruder("sh", 15), intruder("load", 7)];
        let names = intrusions.names(slot(), &now);
        assert_eq!(names, [("load".to_owned(), IntruderClass::Host), ("sh".to_owned(), IntruderClass::Host)]);

        let intrusion = Intrusion {
            cpus: "2-3".parse().unwrap(),
            tasks: Duration::from_millis(1200),
            kernel_threads: Duration::ZERO,
        };
        let events = crate::events::Events::default();
        events.report(intrusion.report(LOOK, &names));
        let reported = events.page(&numaward_api::EventFilter { limit: 1, ..Default::default() }).events;
        assert_eq!(
            reported[0].message,
            "Others ran for 1.2s of the last 5s on CPUs 2-3, which are exclusive to it: \"load\" (host), \"sh\" (host)."
        );
        assert_eq!(
            (reported[0].details["command"].as_str(), reported[0].details["taskMicros"].as_str()),
            ("load", "1200000")
        );
    }
}

//! The loop that follows changes of the host: created and removed cgroups, and changes of the machine.

use std::{
    io,
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupEvent, Hierarchy, OpenError, WatchMode, WatchOptions, Watcher};
use numaward_config::guard::GuardMode;
use numaward_model::{
    error_chain,
    health::{self, Heartbeats, Latch, Readiness},
};
use numaward_topology::sysfs;
use tokio_util::sync::CancellationToken;

use crate::{
    container_names::ContainerNames,
    cpus, guard, history_worker,
    hotplug::{self, Fingerprint},
    observer::Observer,
    part::DaemonPart,
    probe_events::report_probe_events,
    residency,
    slots::SlotLocks,
};

/// Longest time for which an iteration of the loop waits for cgroup events, and therefore the longest delay before it
/// stops.
const MAX_EVENT_WAIT: Duration = Duration::from_millis(250);

/// Interval at which the loop reads probe events and updates slots while there is no guarantee. Cgroup events are
/// handled at once.
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which the loop checks whether the machine changed.
const FINGERPRINT_INTERVAL: Duration = Duration::from_secs(1);

/// Delay before the cgroup hierarchy is opened again after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Longest duration of an iteration of `follow` before the thread counts as hung.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(30);
/// The same limit for threads that read files of many cgroups.
const READ_TIMEOUT: Duration = Duration::from_mins(1);
/// The same limit for the history: its samples are at most a minute apart.
const HISTORY_TIMEOUT: Duration = Duration::from_mins(2);

/// Readiness latches of this crate's parts.
#[derive(Debug)]
pub struct Latches {
    topology: Latch,
    probes: Latch,
    cgroups: Latch,
}

impl Latches {
    pub fn new(readiness: &mut Readiness) -> Self {
        Self {
            topology: readiness.latch("topology"),
            probes: readiness.latch("probes"),
            cgroups: readiness.latch("cgroups"),
        }
    }
}

/// Source of the cgroup hierarchy's path.
#[derive(Clone, Debug)]
pub enum CgroupSource {
    /// The mount table of this process.
    MountTable,
    /// This directory, which must be a cgroup v2 mount.
    Mount(Box<Path>),
    /// This directory, whatever its file system; for tests.
    Directory(Box<Path>),
}

impl CgroupSource {
    fn open(&self) -> Result<Hierarchy, OpenError> {
        match self {
            Self::MountTable => Hierarchy::open(),
            Self::Mount(path) => Hierarchy::open_at(path),
            Self::Directory(path) => Ok(Hierarchy::at(path)),
        }
    }
}

/// Starts the threads that keep `observer` up to date until `stop` is cancelled and they are unparked.
pub fn spawn(
    observer: &Arc<Observer>,
    cgroups: CgroupSource,
    latches: Latches,
    heartbeats: &Heartbeats,
    stop: &CancellationToken,
) -> io::Result<Vec<JoinHandle<()>>> {
    let follow = {
        let (observer, stop) = (observer.clone(), stop.clone());
        move || follow(&observer, &cgroups, latches, &stop)
    };
    let read = {
        let (observer, stop) = (observer.clone(), stop.clone());
        move || residency::run_reader(&observer, &stop)
    };
    let history = {
        let (observer, stop) = (observer.clone(), stop.clone());
        move || history_worker::run_history(&observer, &stop)
    };
    let mut threads = vec![
        heartbeats.spawn("follow", FOLLOW_TIMEOUT, stop, follow)?,
        heartbeats.spawn("residency", READ_TIMEOUT, stop, read)?,
        heartbeats.spawn("history", HISTORY_TIMEOUT, stop, history)?,
    ];
    if observer.config.guard != GuardMode::Off {
        let guard = {
            let (observer, stop) = (observer.clone(), stop.clone());
            move || guard::run_guard(&observer, &stop)
        };
        threads.push(heartbeats.spawn("guard", READ_TIMEOUT, stop, guard)?);
    }
    Ok(threads)
}

fn follow(observer: &Observer, source: &CgroupSource, latches: Latches, stop: &CancellationToken) {
    // Both were attempted before this thread was started.
    latches.topology.release();
    latches.probes.release();
    let mut latch = Some(latches.cgroups);
    let mut machine_read = Instant::now();
    let mut compared = Instant::now();
    let mut probes_maintained: Option<Instant> = None;
    let mut fingerprint = Fingerprint::take(&observer.config.host_root);
    let mut watcher: Option<Watcher> = None;
    let mut names = ContainerNames::from_config(&observer.config);
    let mut retry = Instant::now();
    while !stop.is_cancelled() {
        health::beat();
        if watcher.is_none() && Instant::now() >= retry {
            retry = Instant::now() + RETRY_DELAY;
            watcher = open(observer, source);
        }
        let has_news = if let Some(watcher) = &mut watcher {
            follow_cgroups(observer, watcher, names.as_mut())
        } else {
            thread::sleep(MAX_EVENT_WAIT);
            false
        };
        // The first iteration has found every cgroup, or has reported the error.
        if let Some(latch) = latch.take() {
            latch.release();
        }
        if has_news
            || probes_maintained.is_none_or(|at| at.elapsed() >= IDLE_POLL_INTERVAL)
            || !is_idle(observer)
        {
            probes_maintained = Some(Instant::now());
            maintain_probes(observer);
        }
        let mut is_due = machine_read.elapsed() >= observer.config.observe.topology_interval.0;
        if compared.elapsed() >= FINGERPRINT_INTERVAL {
            compared = Instant::now();
            let now = Fingerprint::take(&observer.config.host_root);
            is_due |= now != fingerprint;
            fingerprint = now;
        }
        if is_due {
            machine_read = Instant::now();
            read_machine(observer);
        }
    }
}

fn open(observer: &Observer, source: &CgroupSource) -> Option<Watcher> {
    let hierarchy = source
        .open()
        .inspect_err(|error| observer.note(DaemonPart::Cgroups, Err(error_chain(error))))
        .ok()?;
    tracing::info!(root = %hierarchy.root().display(), "following cgroups");
    observer.registry.lock().hierarchy = Some(hierarchy.clone());
    Some(Watcher::new(hierarchy, WatchOptions::default()))
}

/// Returns whether the probes need attention only once per [`IDLE_POLL_INTERVAL`]: there are no guarantees and no
/// exclusive CPUs, the cost of the probes is not being measured, and they neither run with a duty cycle nor write
/// a debug log.
fn is_idle(observer: &Observer) -> bool {
    let allocation = &observer.config.probes.allocation;
    if allocation.duty_cycle.is_some() || allocation.debug_log {
        return false;
    }
    let SlotLocks { probing, state } = observer.registry.lock_slots();
    probing.cost.is_none() && state.guarantees.workloads().is_empty() && state.exclusive.owners.is_empty()
}

/// Reports the probes' events, assigns slots, and attaches or detaches probes as required.
fn maintain_probes(observer: &Observer) {
    report_probe_events(observer);
    observer.registry.follow_slot_policy(Instant::now());
    observer.registry.follow_charges(Instant::now());
    {
        let SlotLocks { mut probing, state } = observer.registry.assign_slots();
        drop(state);
        probing.follow_cost(Instant::now());
        probing.probes.flush_log();
    }
    cpus::follow_interrupts(observer);
    cpus::report_intruders(observer);
}

/// Waits for cgroup events and processes them. Returns whether there were any.
fn follow_cgroups(observer: &Observer, watcher: &mut Watcher, names: Option<&mut ContainerNames>) -> bool {
    let events = match watcher.next(MAX_EVENT_WAIT) {
        Ok(events) => events,
        Err(error) => {
            observer.note(DaemonPart::Cgroups, Err(error_chain(&error)));
            thread::sleep(MAX_EVENT_WAIT);
            return false;
        }
    };
    let has_news = !events.is_empty();
    let names = names.map(|names| names.read(&events)).unwrap_or_default();
    let has_names = !names.is_empty();
    if has_names && let Some(known) = &mut observer.registry.lock().runtime_names {
        known.extend(names);
    }
    if has_news {
        // Before removed cgroups release their slots.
        report_probe_events(observer);
        observer.listeners.lock().retain(|listener| listener(&events));
        observer.registry.follow_cpu_times(&events);
        let mut locks = observer.registry.lock_slots();
        let are_removed = events.iter().any(|event| matches!(event, CgroupEvent::Removed(_)));
        for event in events {
            locks.handle(event);
            // A batch may hold tens of thousands of events.
            health::beat();
        }
        if are_removed {
            locks.state.forget_runtime_names();
        }
    }
    if has_names {
        // A name may be read too late, or its container may have got a guarantee before.
        observer.registry.lock_slots().rename();
    }
    observer.note(DaemonPart::Cgroups, Ok(()));
    let mode = match watcher.mode() {
        WatchMode::Inotify => Ok(()),
        WatchMode::Polling { reason } => Err(reason.clone()),
    };
    observer.note(DaemonPart::CgroupWatch, mode);
    observer.note(DaemonPart::CgroupCount, watcher.limit_exceeded().map_or(Ok(()), Err));
    has_news
}

/// Reads the machine again, because memory and CPUs can be added and removed at run time.
fn read_machine(observer: &Observer) {
    let machine = sysfs::read_again(&observer.config.host_root, &observer.machine());
    let Some(machine) = observer.health.note_result(DaemonPart::Topology, machine) else { return };
    let refreshed = observer.registry.probing().probes.refresh(&machine);
    observer.health.note_result(DaemonPart::ProbeNodes, refreshed);
    let before = observer.machine();
    if machine == *before {
        return;
    }
    for report in hotplug::changes(&before, &machine) {
        observer.events.report(report);
    }
    observer.registry.replace_machine(machine);
}

#[cfg(test)]
mod tests {
    use numaward_config::Config;
    use numaward_engine::Ledger;
    use numaward_model::{Guarantees, testing};

    use super::*;

    #[test]
    fn idle_only_without_guarantees() {
        let root = tempfile::tempdir().unwrap();
        let new = |mut config: Config| {
            config.host_root = root.path().into();
            let observer = Observer::new(&config);
            // The first seconds, in which the kernel measures the probes, are over.
            observer.registry.probing().cost = None;
            observer
        };
        let observer = new(Config::default());
        assert!(is_idle(&observer));
        let guarantee = testing::workload_guarantee("/a", 1, &[]);
        observer.registry.lock().guarantees =
            Guarantees::new(vec![guarantee.into()], Ledger::default()).into();
        assert!(!is_idle(&observer));
        let mut config = Config::default();
        config.probes.allocation.duty_cycle = Some("5s/60s".parse().unwrap());
        assert!(!is_idle(&new(config)), "the probe is attached and detached in time");
    }
}

//! Follows the host: its cgroups as they come and go, its machine as it changes.

use std::{
    io,
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use numaward_cgroup::{Hierarchy, OpenError, WatchMode, WatchOptions, Watcher};
use numaward_model::health::{Heartbeat, Latch, Readiness};
use numaward_topology::sysfs;
use tokio_util::sync::CancellationToken;

use crate::{
    hotplug::{self, Fingerprint},
    observer::Observer,
    part::{Part, chain},
    residency,
};

/// How long a turn of the loop waits for news, at most: also how late it notices that it is to stop.
const TURN: Duration = Duration::from_millis(250);

/// How often to look whether the machine changed.
const COMPARE: Duration = Duration::from_secs(1);

/// How long to wait before what failed is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// The latches of the observing parts.
#[derive(Debug)]
pub struct Latches {
    topology: Latch,
    probes: Latch,
    cgroups: Latch,
}

impl Latches {
    /// Makes them.
    pub fn new(readiness: &mut Readiness) -> Self {
        Self {
            topology: readiness.latch("topology"),
            probes: readiness.latch("probes"),
            cgroups: readiness.latch("cgroups"),
        }
    }
}

/// Where the cgroups are found.
#[derive(Clone, Debug)]
pub enum CgroupSource {
    /// In the mount table of this process.
    MountTable,
    /// In this directory, which must be cgroup v2.
    Mount(Box<Path>),
    /// In this directory, whatever its file system: for tests.
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
    heartbeat: &Heartbeat,
    stop: &CancellationToken,
) -> io::Result<Vec<JoinHandle<()>>> {
    let follow = {
        let (observer, heartbeat, stop) = (observer.clone(), heartbeat.clone(), stop.clone());
        move || follow(&observer, &cgroups, latches, &heartbeat, &stop)
    };
    let read = {
        let (observer, stop) = (observer.clone(), stop.clone());
        move || residency::keep_reading(&observer, &stop)
    };
    Ok(vec![
        thread::Builder::new().name("follow".to_owned()).spawn(follow)?,
        thread::Builder::new().name("residency".to_owned()).spawn(read)?,
    ])
}

fn follow(
    observer: &Observer,
    source: &CgroupSource,
    latches: Latches,
    heartbeat: &Heartbeat,
    stop: &CancellationToken,
) {
    // Both were done, as far as they can be, before this thread was started.
    latches.topology.release();
    latches.probes.release();
    let mut latch = Some(latches.cgroups);
    let mut machine_read = Instant::now();
    let mut compared = Instant::now();
    let mut fingerprint = Fingerprint::take(&observer.config.host_root);
    let mut watcher: Option<Watcher> = None;
    let mut retry = Instant::now();
    while !stop.is_cancelled() {
        heartbeat.beat();
        if watcher.is_none() && Instant::now() >= retry {
            retry = Instant::now() + RETRY;
            watcher = observer.open(source);
        }
        // Before cgroups that are gone give back their slots.
        observer.report_probe_events();
        match &mut watcher {
            Some(watcher) => observer.follow_cgroups(watcher),
            None => thread::sleep(TURN),
        }
        // The first turn has told every cgroup, or has told why it cannot.
        if let Some(latch) = latch.take() {
            latch.release();
        }
        observer.follow_slot_policy(Instant::now());
        {
            let mut state = observer.lock();
            state.keep_books(observer.config.observe.keep_removed.0);
            state.follow_exclusive_cpus(&observer.config.host_root);
            state.follow_cost(Instant::now());
            state.probes.flush_log();
        }
        observer.report_intruders();
        let mut is_due = machine_read.elapsed() >= observer.config.observe.topology_interval.0;
        if compared.elapsed() >= COMPARE {
            compared = Instant::now();
            let now = Fingerprint::take(&observer.config.host_root);
            is_due |= now != fingerprint;
            fingerprint = now;
        }
        if is_due {
            machine_read = Instant::now();
            observer.read_machine();
        }
    }
}

impl Observer {
    fn open(&self, source: &CgroupSource) -> Option<Watcher> {
        match source.open() {
            Ok(hierarchy) => {
                tracing::info!(root = %hierarchy.root().display(), "following cgroups");
                self.lock().hierarchy = Some(hierarchy.clone());
                Some(Watcher::new(hierarchy, WatchOptions::default()))
            }
            Err(error) => {
                self.note(Part::Cgroups, Err(chain(&error)));
                None
            }
        }
    }

    /// Waits for news of cgroups and takes it in.
    fn follow_cgroups(&self, watcher: &mut Watcher) {
        let told = watcher.next(TURN);
        let mut state = self.lock();
        match told {
            Ok(events) => {
                if !events.is_empty() {
                    state.cgroup_listeners.retain(|listening| (listening.0)(&events));
                }
                for event in events {
                    state.take(event);
                }
                state.note(Part::Cgroups, Ok(()));
            }
            Err(error) => {
                state.note(Part::Cgroups, Err(chain(&error)));
                drop(state);
                thread::sleep(TURN);
                return;
            }
        }
        let mode = match watcher.mode() {
            WatchMode::Watching => Ok(()),
            WatchMode::Sweeping { reason } => Err(reason.clone()),
        };
        state.note(Part::CgroupWatch, mode);
    }

    /// Reads the machine again, for what changes at run time: memory and CPUs that come and go.
    fn read_machine(&self) {
        let machine = sysfs::read(&self.config.host_root).map_err(|error| chain(&error));
        let mut state = self.lock();
        state.note(Part::Topology, machine.as_ref().map(|_| ()).map_err(Clone::clone));
        let Ok(machine) = machine else { return };
        let refreshed = state.probes.refresh(&machine).map_err(|error| chain(&error));
        state.note(Part::ProbeNodes, refreshed);
        if machine == *state.machine {
            return;
        }
        for report in hotplug::changes(&state.machine, &machine) {
            self.events.report(report);
        }
        if machine.node_ids() != state.machine.node_ids() {
            state.table.forget_residents();
        }
        state.machine = Arc::new(machine);
    }
}

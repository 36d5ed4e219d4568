//! Follows the host: its cgroups as they come and go, its machine as it changes.

use std::{
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use numaward_probes::{CgroupId, RegisterError};
use numaward_topology::sysfs;
use tokio_util::sync::CancellationToken;

use super::{Observer, Part, State, chain, residency};
use crate::health::{Heartbeat, Latch, Readiness};

/// How long a turn of the loop waits for news, at most.
const TURN: Duration = Duration::from_millis(250);

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

/// Starts the threads that keep `observer` up to date until `stop` is cancelled.
pub fn spawn(
    observer: &Arc<Observer>,
    latches: Latches,
    heartbeat: &Heartbeat,
    stop: &CancellationToken,
) -> io::Result<Vec<JoinHandle<()>>> {
    let follow = {
        let (observer, heartbeat, stop) = (observer.clone(), heartbeat.clone(), stop.clone());
        move || follow(&observer, latches, &heartbeat, &stop)
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

fn follow(observer: &Observer, latches: Latches, heartbeat: &Heartbeat, stop: &CancellationToken) {
    // Both were done, as far as they can be, before this thread was started.
    latches.topology.release();
    latches.probes.release();
    let mut machine_read = Instant::now();
    while !stop.is_cancelled() {
        heartbeat.beat();
        thread::sleep(TURN);
        let now = Instant::now();
        observer.lock().table.expire(now, observer.config.observe.keep_removed.0);
        if now.duration_since(machine_read) >= observer.config.observe.topology_interval.0 {
            machine_read = now;
            observer.read_machine();
        }
    }
}

impl Observer {
    /// Reads the machine again, for what changes at run time: memory and CPUs that come and go.
    fn read_machine(&self) {
        let machine = sysfs::read(&self.config.host_root).map_err(|error| chain(&error));
        let mut state = self.lock();
        state.note(Part::Topology, machine.as_ref().map(|_| ()).map_err(Clone::clone));
        match machine {
            Ok(machine) if machine != *state.machine => {
                let (nodes, cpus) = (machine.node_ids(), machine.cpu_ids());
                if (&nodes, &cpus) != (&state.machine.node_ids(), &state.machine.cpu_ids()) {
                    tracing::info!(%nodes, %cpus, "the machine changed");
                }
                state.machine = Arc::new(machine);
            }
            _ => {}
        }
    }
}

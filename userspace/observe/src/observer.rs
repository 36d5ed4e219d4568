//! The observer, which owns the state of this host.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    thread::Thread,
    time::{Duration, Instant},
};

use numaward_api::ReservationOrigin;
use numaward_config::Config;
use numaward_model::{error_chain, headroom::Headroom, port::CgroupListener};
use numaward_probes::{self as probes, Mode, Obstacle, Probe, ProbeReport, Probes};
use numaward_topology::{Machine, NodeId, sysfs};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::{
    activity::AttachedProbes,
    affinity::Affinity,
    events::Events,
    history::History,
    intrusions::Intrusions,
    part::{DaemonPart, Health},
    probing::{COST_MEASUREMENT_TIME, Probing},
    sampling::SamplingStates,
    stacks::KernelSymbols,
    state::ObserverState,
};

/// Demand for the workloads' figures, and the thread that reads them.
#[derive(Debug)]
pub(crate) struct Demand {
    /// Time of the latest request.
    pub(crate) last_request: Instant,
    /// Thread that reads the figures while there are requests.
    pub(crate) reader: Option<Thread>,
}

/// Latest snapshots. Each is replaced as a whole, so readers hold a lock only while they clone an `Arc`.
#[derive(Debug, Default)]
pub(crate) struct Latest {
    /// Replaced under the lock of `Observer.state`.
    pub(crate) machine: watch::Sender<Arc<Machine>>,
    /// Sampling states and estimates of the workloads' accesses.
    pub(crate) sampled: watch::Sender<Arc<SamplingStates>>,
    /// Memory that the kernel reserves on each node; read only while the guard runs.
    pub(crate) watermarks: watch::Sender<Arc<BTreeMap<NodeId, sysfs::Watermarks>>>,
    /// Headroom of the nodes as last published by the guard.
    pub(crate) headroom: watch::Sender<Arc<Headroom>>,
    /// Origin of the reservations.
    pub(crate) reservations: watch::Sender<Option<ReservationOrigin>>,
}

/// Latest known state of this host.
///
/// Locks are taken in the order of the fields. No file is read while a lock is held, except files of this process's
/// own threads under `affinity`. Under `probing` and `state` the code only takes short steps in memory and reads or
/// writes single slots of the probes' maps; it never reads a whole map, because the time for that grows with the
/// map's size.
pub struct Observer {
    pub(crate) config: Config,
    pub(crate) events: Events,
    pub(crate) start: Instant,
    pub(crate) page_size: u64,
    /// Callbacks for cgroups that are created or removed.
    pub(crate) listeners: Mutex<Vec<CgroupListener>>,
    /// CPU affinity of this process's threads, if they are to avoid exclusive CPUs.
    pub(crate) affinity: Mutex<Option<Affinity>>,
    pub(crate) demand: Mutex<Demand>,
    probing: Mutex<Probing>,
    state: Mutex<ObserverState>,
    pub(crate) latest: Latest,
    pub(crate) health: Arc<Health>,
    /// History of the last hour. Never locked together with another field.
    pub(crate) history: Mutex<History>,
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").finish_non_exhaustive()
    }
}

impl Observer {
    /// Reads the machine and attaches the probes. Failures are noted in the health state, not returned, because the
    /// other parts work.
    ///
    /// Attaching needs privileges; later operations do not.
    pub fn new(config: &Config) -> Self {
        let health = Arc::new(Health::default());
        let machine = sysfs::read(&config.host_root).unwrap_or_else(|error| {
            tracing::error!(error = %error_chain(&error), "the machine cannot be read: there are no figures by node");
            health.note(DaemonPart::Topology, Err(error_chain(&error)));
            Machine::default()
        });
        // Before the probes are loaded, because loading verifies them at once.
        let window = probes::stats_window()
            .inspect_err(|error| tracing::info!(%error, "the cost of the probes cannot be measured"));
        let cost = window.ok().map(|window| (window, Instant::now() + COST_MEASUREMENT_TIME));
        let probes = Probes::load(&probe_options(config, &machine));
        for report in probes.reports() {
            let (probe, mode) = (report.probe, report.mode);
            let reason = report.reason.as_deref();
            match mode {
                Mode::Absent if !is_enabled(&config.probes, probe) => {
                    tracing::info!(%probe, "this probe is switched off by the configuration");
                }
                Mode::Absent => {
                    tracing::warn!(%probe, reason, "this probe cannot be attached; run `numaward doctor` for details");
                }
                _ => tracing::info!(%probe, %mode, reason, "this probe is attached"),
            }
        }
        let events = Vec::new();
        let attached = Arc::new(AttachedProbes::from_reports(probes.reports()));
        let (intrusions, health_of) = (Intrusions::default(), health.clone());
        let kernel_symbols = config.observe.call_chains.enabled.then(|| {
            let opened = KernelSymbols::open(&config.host_root);
            opened.inspect_err(|error| tracing::info!(%error, "the kernel's symbols cannot be read: kernel functions have no names")).ok()
        });
        let kernel_symbols = kernel_symbols.flatten().map(Arc::new);
        let probing =
            Probing { probes, attached, cost, intrusions, events, health: health_of, kernel_symbols };
        Self {
            config: config.clone(),
            events: Events::default(),
            start: Instant::now(),
            page_size: rustix::param::page_size() as u64,
            listeners: Mutex::default(),
            affinity: Mutex::default(),
            demand: Mutex::new(Demand { last_request: Instant::now(), reader: None }),
            probing: Mutex::new(probing),
            state: Mutex::default(),
            latest: Latest { machine: watch::Sender::new(Arc::new(machine)), ..Latest::default() },
            health,
            history: Mutex::default(),
        }
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Returns the machine as last read.
    pub fn machine(&self) -> Arc<Machine> {
        self.latest.machine.borrow().clone()
    }

    /// Returns the number of changes of the guarantees.
    pub fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// Returns the reason why a probe is not attached in its best mode.
    pub(crate) fn reason(&self, report: &ProbeReport) -> Option<String> {
        if let (false, key) = probe_switch(&self.config.probes, report.probe) {
            return Some(format!("switched off by {key}"));
        }
        report.reason.clone()
    }

    /// Returns the same reason as a single word for metrics; empty if the probe is attached in its best mode.
    pub(crate) fn obstacle(&self, report: &ProbeReport) -> &'static str {
        let obstacle = if is_enabled(&self.config.probes, report.probe) {
            report.obstacle
        } else {
            Some(Obstacle::SwitchedOff)
        };
        obstacle.map_or("", Into::into)
    }

    /// Notes that a part works, or the reason why it does not; logs changes.
    pub fn note(&self, part: DaemonPart, result: Result<(), String>) {
        self.health.note(part, result);
    }

    /// Notes the origin of the reservations, for the status.
    pub fn note_reservations(&self, origin: ReservationOrigin) {
        self.latest.reservations.send_replace(Some(origin));
    }

    /// Returns the time since the start.
    pub fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    /// Records a request for the workloads' figures.
    pub(crate) fn record_request(&self) {
        let mut demand = self.demand.lock();
        demand.last_request = Instant::now();
        if let Some(reader) = &demand.reader {
            reader.unpark();
        }
    }

    /// Returns whether reading the probes requires `CAP_BPF`.
    pub fn needs_cap_bpf(&self) -> bool {
        self.probing().probes.needs_cap_bpf().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot determine whether the probes can be read without CAP_BPF: the daemon keeps it");
            true
        })
    }

    /// Locks the probes. Must be locked before the state if both are needed.
    pub(crate) fn probing(&self) -> MutexGuard<'_, Probing> {
        self.probing.lock()
    }

    /// Locks the state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ObserverState> {
        self.state.lock()
    }
}

/// Returns whether the configuration enables a probe, and the key that does.
fn probe_switch(config: &numaward_config::Probes, probe: Probe) -> (bool, &'static str) {
    match probe {
        Probe::Alloc | Probe::Hugepages => (config.allocation.enabled, "probes.allocation.enabled"),
        Probe::Hint | Probe::Scan | Probe::Migrate => (config.accesses.enabled, "probes.accesses.enabled"),
        Probe::Stall => (config.stalls.enabled, "probes.stalls.enabled"),
        Probe::OomKill => (config.oom_kills.enabled, "probes.oomKills.enabled"),
        Probe::Switch => (config.intruders.enabled, "probes.intruders.enabled"),
        Probe::Hardware => (config.hardware.enabled, "probes.hardware.enabled"),
        // They are loaded only if the key is true.
        Probe::AllocChains | Probe::AccessChains => (true, "observe.callChains.enabled"),
    }
}

fn is_enabled(config: &numaward_config::Probes, probe: Probe) -> bool {
    probe_switch(config, probe).0
}

fn probe_options<'a>(config: &Config, machine: &'a Machine) -> probes::ProbeOptions<'a> {
    let defaults = probes::ProbeOptions::new(machine);
    probes::ProbeOptions {
        slots: config.probes.slots,
        duty_cycle: config
            .probes
            .allocation
            .duty_cycle
            .and_then(|cycle| probes::DutyCycle::new(cycle.on.0, cycle.period.0)),
        alloc_modes: if config.probes.allocation.enabled { defaults.alloc_modes } else { &[] },
        secondary: Probe::SECONDARY.into_iter().filter(|probe| is_enabled(&config.probes, *probe)).collect(),
        call_chains: config.observe.call_chains.enabled.then_some(probes::ChainOptions {
            sample_every: config.observe.call_chains.sample_every,
            max_stacks: config.observe.call_chains.max_stacks,
        }),
        long_stall: config.probes.stalls.event_from.0,
        debug_log: config.probes.allocation.debug_log,
        ..defaults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_and_probe_defaults_agree() {
        let machine = Machine::default();
        let (options, defaults) =
            (probe_options(&Config::default(), &machine), probes::ProbeOptions::new(&machine));
        assert_eq!((options.slots, options.long_stall), (defaults.slots, defaults.long_stall));
    }
}

//! Holds the state of this host.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    thread::Thread,
    time::{Duration, Instant},
};

use numaward_config::Config;
use numaward_model::{error_chain, headroom::Headroom, port::CgroupListener};
use numaward_probes::{self as probes, Mode, Obstacle, Probe, ProbeReport, Probes};
use numaward_topology::{Machine, NodeId, sysfs};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::{
    activity::Attached,
    affinity::Affinity,
    events::Events,
    history::History,
    intrusions::Intrusions,
    part::{Health, Part},
    probing::{MEASURED, Probing},
    sampling::Sampled,
    stacks::KernelSymbols,
    state::State,
};

/// Who asks for the workloads' figures, and who reads them.
#[derive(Debug)]
pub(crate) struct Demand {
    /// When somebody last asked.
    pub(crate) asked: Instant,
    /// Reads while somebody asks.
    pub(crate) reader: Option<Thread>,
}

/// What was seen last, each replaced as a whole: readers take no lock for longer than it takes to clone an `Arc`.
#[derive(Debug, Default)]
pub(crate) struct Latest {
    /// The machine. Replaced under the lock of `Observer.state`.
    pub(crate) machine: watch::Sender<Arc<Machine>>,
    /// What is known of the workloads' accesses.
    pub(crate) sampled: watch::Sender<Arc<Sampled>>,
    /// What the kernel keeps of each node; only where the guard looks.
    pub(crate) watermarks: watch::Sender<Arc<BTreeMap<NodeId, sysfs::Watermarks>>>,
    /// What the guard saw.
    pub(crate) headroom: watch::Sender<Arc<Headroom>>,
}

/// The state of this host as last seen.
///
/// Locks are taken in the order of the fields, and no file is read while one is held, but for those of the process itself under
/// `affinity`: its threads. Under `probing` and `state` there are a few steps in memory, and slots are written and read in the probes'
/// maps: no map as a whole, as that takes as long as it is large.
pub struct Observer {
    pub(crate) config: Config,
    pub(crate) events: Events,
    pub(crate) start: Instant,
    pub(crate) page_size: u64,
    /// Those who are called with cgroups that come and go.
    pub(crate) listeners: Mutex<Vec<CgroupListener>>,
    /// Where our own threads run, if they are to keep off exclusive CPUs.
    pub(crate) affinity: Mutex<Option<Affinity>>,
    pub(crate) demand: Mutex<Demand>,
    probing: Mutex<Probing>,
    state: Mutex<State>,
    pub(crate) latest: Latest,
    pub(crate) health: Arc<Health>,
    /// The last hour. Locked alone.
    pub(crate) history: Mutex<History>,
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").finish_non_exhaustive()
    }
}

impl Observer {
    /// Reads the machine and attaches the probes. What fails is noted, not returned: the rest works.
    ///
    /// Attaching needs privileges; nothing later does.
    pub fn new(config: &Config) -> Self {
        let health = Arc::new(Health::default());
        let machine = sysfs::read(&config.host_root).unwrap_or_else(|error| {
            tracing::error!(error = %error_chain(&error), "the machine cannot be read: no figures by node");
            health.note(Part::Topology, Err(error_chain(&error)));
            Machine::default()
        });
        // Before they are loaded: they check themselves at once.
        let window = probes::stats_window()
            .inspect_err(|error| tracing::info!(%error, "what the probes cost is not measured"));
        let cost = window.ok().map(|window| (window, Instant::now() + MEASURED));
        let probes = Probes::load(&probe_options(config, &machine));
        for report in probes.reports() {
            let (probe, mode) = (report.probe, report.mode);
            let reason = report.reason.as_deref();
            match mode {
                Mode::Absent if !is_enabled(&config.probes, probe) => tracing::info!(%probe, "switched off"),
                Mode::Absent => {
                    tracing::warn!(%probe, reason, "cannot be attached; `numaward doctor` says more");
                }
                _ => tracing::info!(%probe, %mode, reason, "attached"),
            }
        }
        let events = Vec::new();
        let attached = Arc::new(Attached::of(probes.reports()));
        let (intrusions, health_of) = (Intrusions::default(), health.clone());
        let kernel_symbols = config.observe.call_chains.enabled.then(|| {
            let opened = KernelSymbols::open(&config.host_root);
            opened.inspect_err(|error| tracing::info!(%error, "functions of the kernel have no names")).ok()
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
            demand: Mutex::new(Demand { asked: Instant::now(), reader: None }),
            probing: Mutex::new(probing),
            state: Mutex::default(),
            latest: Latest { machine: watch::Sender::new(Arc::new(machine)), ..Latest::default() },
            health,
            history: Mutex::default(),
        }
    }

    /// Where what happens is reported.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The machine as last read.
    pub fn machine(&self) -> Arc<Machine> {
        self.latest.machine.borrow().clone()
    }

    /// Grows with each change of what is promised.
    pub fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// Why a probe is not attached better.
    pub(crate) fn reason(&self, report: &ProbeReport) -> Option<String> {
        if let (false, key) = switch(&self.config.probes, report.probe) {
            return Some(format!("switched off by {key}"));
        }
        report.reason.clone()
    }

    /// The same in a word, for metrics; empty where all is well.
    pub(crate) fn obstacle(&self, report: &ProbeReport) -> &'static str {
        let obstacle = if is_enabled(&self.config.probes, report.probe) {
            report.obstacle
        } else {
            Some(Obstacle::SwitchedOff)
        };
        obstacle.map_or("", Into::into)
    }

    /// Notes that a part works, or why not; logs what changed.
    pub fn note(&self, part: Part, result: Result<(), String>) {
        self.health.note(part, result);
    }

    /// Time since it was started.
    pub fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    /// Somebody asks for the workloads' figures.
    pub(crate) fn ask(&self) {
        let mut demand = self.demand.lock();
        demand.asked = Instant::now();
        if let Some(reader) = &demand.reader {
            reader.unpark();
        }
    }

    /// Whether the probes can be read only by a process with `CAP_BPF`.
    pub fn needs_cap_bpf(&self) -> bool {
        self.probing().probes.needs_cap_bpf().unwrap_or_else(|error| {
            tracing::warn!(%error, "it is not known whether the probes can be read without CAP_BPF: it is kept");
            true
        })
    }

    /// The probes. To be locked before the books, where both are.
    pub(crate) fn probing(&self) -> MutexGuard<'_, Probing> {
        self.probing.lock()
    }

    /// The books.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Whether the configuration allows a probe, and the key that says so.
fn switch(config: &numaward_config::Probes, probe: Probe) -> (bool, &'static str) {
    match probe {
        Probe::Alloc | Probe::Hugepages => (config.allocation.enabled, "probes.allocation.enabled"),
        Probe::Hint | Probe::Scan | Probe::Migrate => (config.accesses.enabled, "probes.accesses.enabled"),
        Probe::Stall => (config.stalls.enabled, "probes.stalls.enabled"),
        Probe::OomKill => (config.oom_kills.enabled, "probes.oomKills.enabled"),
        Probe::Switch => (config.intruders.enabled, "probes.intruders.enabled"),
        Probe::Hardware => (config.hardware.enabled, "probes.hardware.enabled"),
        // They are loaded only where that is true.
        Probe::AllocChains | Probe::AccessChains => (true, "observe.callChains.enabled"),
    }
}

fn is_enabled(config: &numaward_config::Probes, probe: Probe) -> bool {
    switch(config, probe).0
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
    fn the_defaults_of_the_configuration_are_those_of_the_probes() {
        let machine = Machine::default();
        let (options, defaults) =
            (probe_options(&Config::default(), &machine), probes::ProbeOptions::new(&machine));
        assert_eq!((options.slots, options.long_stall), (defaults.slots, defaults.long_stall));
    }
}

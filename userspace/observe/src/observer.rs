//! The observer, which owns the state of this host.

use std::{
    collections::BTreeMap,
    fmt,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{ContainerRuntime, ReservationOrigin};
use numaward_cgroup::{CgroupId, CgroupPath, ContainerIdentity, has_controller};
use numaward_config::Config;
use numaward_model::{Guarantees, error_chain, headroom::Headroom, port::CgroupListener};
use numaward_probes::{self as probes, Mode, Obstacle, Probe, ProbeReport, Probes};
use numaward_topology::{CpuSet, Machine, sysfs};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::{
    activity::AttachedProbes,
    affinity::OwnThreads,
    demand::Demand,
    events::Events,
    foreign::ForeignGuarantees,
    history::History,
    intrusions::Intrusions,
    node_memory::NodeMemory,
    page_size::PageSize,
    part::{DaemonPart, Health},
    probing::{COST_MEASUREMENT_TIME, Probing},
    reading::CounterReading,
    registry::WorkloadRegistry,
    sampling::SamplingStates,
    stacks::KernelSymbols,
    usage::UsageHistory,
};

/// Latest snapshots. Each is replaced as a whole, so readers hold a lock only while they clone an `Arc`.
#[derive(Debug, Default)]
pub(crate) struct Latest {
    /// Sampling states and estimates of the workloads' accesses.
    pub(crate) sampled: watch::Sender<Arc<SamplingStates>>,
    /// Headroom of the nodes as last published by the guard.
    pub(crate) headroom: watch::Sender<Arc<Headroom>>,
    /// Exclusive CPUs on which other tasks ran within the last minute, by the cgroups of their owners.
    pub(crate) intruded_cpus: watch::Sender<Arc<BTreeMap<CgroupId, CpuSet>>>,
    /// Pages that the allocation probe has seen, in thousandths of those that the kernel has allocated.
    pub(crate) coverage_permille: watch::Sender<Option<u32>>,
    /// Origin of the reservations.
    pub(crate) reservations: watch::Sender<Option<ReservationOrigin>>,
    pub(crate) container_runtime: watch::Sender<Option<ContainerRuntime>>,
}

impl Latest {
    pub(crate) fn publish_intruded_cpus(&self, intruded: BTreeMap<CgroupId, CpuSet>) {
        self.intruded_cpus.send_if_modified(|latest| {
            let is_new = **latest != intruded;
            if is_new {
                *latest = Arc::new(intruded);
            }
            is_new
        });
    }

    /// Publishes a headroom snapshot with the next sequence number.
    pub(crate) fn publish_headroom(&self, seen: Headroom) {
        self.headroom.send_modify(|headroom| {
            *headroom = Arc::new(Headroom { look: headroom.look + 1, ..seen });
        });
    }
}

/// The last hour of this host.
#[derive(Debug, Default)]
pub(crate) struct Past {
    pub(crate) history: History,
    /// CPU time and memory of workloads.
    pub(crate) usage: UsageHistory,
}

/// Latest known state of this host.
///
/// Locks are taken in the order of the fields. No file is read while a lock is held, except files of this process's
/// own threads under `threads`.
pub struct Observer {
    pub(crate) config: Config,
    pub(crate) events: Events,
    pub(crate) start: Instant,
    pub(crate) page_size: PageSize,
    /// Callbacks for cgroups that are created or removed.
    pub(crate) listeners: Mutex<Vec<CgroupListener>>,
    pub(crate) threads: OwnThreads,
    pub(crate) demand: Demand,
    pub(crate) registry: WorkloadRegistry,
    pub(crate) node_memory: NodeMemory,
    pub(crate) latest: Latest,
    pub(crate) health: Arc<Health>,
    /// The last hour. Never locked together with another field.
    pub(crate) past: Mutex<Past>,
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
        let page_size = PageSize::of_kernel();
        let registry = WorkloadRegistry::new(probing, machine, config.observe.keep_removed.0);
        registry.lock().runtime_names = config.observe.container_names.enabled.then(Default::default);
        Self {
            config: config.clone(),
            events: Events::default(),
            start: Instant::now(),
            page_size,
            listeners: Mutex::default(),
            threads: OwnThreads::default(),
            demand: Demand::new(),
            registry,
            node_memory: NodeMemory::new(config.host_root.clone(), page_size, health.clone()),
            latest: Latest::default(),
            health,
            past: Mutex::default(),
        }
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Returns the machine as last read.
    pub fn machine(&self) -> Arc<Machine> {
        self.registry.machine()
    }

    /// Returns the number of changes of the guarantees.
    pub fn revision(&self) -> u64 {
        self.registry.lock().revision
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

    /// Notes the connected container runtime, for the status.
    pub fn note_container_runtime(&self, runtime: ContainerRuntime) {
        self.latest.container_runtime.send_replace(Some(runtime));
    }

    /// Returns the time since the start.
    pub fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns whether reading the probes requires `CAP_BPF`.
    pub fn needs_cap_bpf(&self) -> bool {
        self.registry.probing().probes.needs_cap_bpf().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot determine whether the probes can be read without CAP_BPF: the daemon keeps it");
            true
        })
    }

    /// Returns the guarantees.
    pub fn guarantees(&self) -> Arc<Guarantees> {
        self.registry.lock().guarantees.clone()
    }

    /// Returns the notification of a container that appears without a known guarantee.
    pub fn new_container(&self) -> Arc<Notify> {
        self.registry.lock().new_container.clone()
    }

    /// Returns the containers with an existing cgroup.
    pub fn containers(&self) -> Vec<(CgroupPath, ContainerIdentity)> {
        let table = self.registry.lock().table.clone();
        let members = table.members();
        members.filter_map(|(_, member)| Some((member.path.clone(), member.container.clone()?))).collect()
    }

    /// Returns the root of the cgroup hierarchy, once it is open.
    pub fn cgroup_root(&self) -> Option<PathBuf> {
        self.registry.lock().hierarchy.as_ref().map(|hierarchy| hierarchy.root().to_owned())
    }

    /// Adopts the guarantees of another program from now on. Guarantees that are already known, by identity, change
    /// nothing.
    pub fn adopt_foreign_guarantees(&self, foreign: &Arc<dyn ForeignGuarantees>) {
        self.registry.adopt(foreign);
        self.leave_exclusive_cpus();
    }

    /// Keeps all threads of this process off exclusive CPUs from now on.
    pub fn keep_off_exclusive_cpus(&self) {
        self.threads.start_avoiding();
    }

    /// Moves this process's threads off exclusive CPUs.
    pub(crate) fn leave_exclusive_cpus(&self) {
        self.threads.keep_off(|| self.guarantees().held_cpus());
    }

    /// Returns whether there was a recent request for the workloads' figures.
    pub(crate) fn is_requested(&self) -> bool {
        self.demand.is_recent(self.config.observe.residency_interval.0)
    }

    /// Reads the counters of all probes, with the state to which they belong.
    pub(crate) fn read(&self) -> CounterReading {
        CounterReading::take(&self.registry, &self.health)
    }
}

/// Returns whether the configuration enables a probe, and the key that does.
fn probe_switch(config: &numaward_config::Probes, probe: Probe) -> (bool, &'static str) {
    match probe {
        Probe::Alloc | Probe::Charge | Probe::Hugepages => {
            (config.allocation.enabled, "probes.allocation.enabled")
        }
        Probe::Hint | Probe::Scan | Probe::Migrate => (config.accesses.enabled, "probes.accesses.enabled"),
        Probe::Stall => (config.stalls.enabled, "probes.stalls.enabled"),
        Probe::OomKill => (config.oom_kills.enabled, "probes.oomKills.enabled"),
        Probe::Switch => (config.intruders.enabled, "probes.intruders.enabled"),
        Probe::CpuTime => (config.cpu_time.enabled, "probes.cpuTime.enabled"),
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
        // Unknown is no reason to do without the probe.
        charges_memory: has_controller(&config.host_root, "memory").unwrap_or(true),
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

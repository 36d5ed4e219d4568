//! Holds the state of this host.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use numaward_config::Config;
use numaward_probes::{self as probes, Mode, Probe, ProbeReport, Probes};
use numaward_topology::{Machine, sysfs};

use crate::{
    activity::Activities,
    containers,
    cost::Cost,
    estimate::Estimates,
    events::Events,
    exclusive::Exclusive,
    intrusions::Intrusions,
    part::{Part, chain},
    slot_policy::SlotPolicy,
    state::State,
    table::Table,
};

/// The state of this host as last seen.
#[derive(Debug)]
pub struct Observer {
    pub(crate) config: Config,
    pub(crate) events: Events,
    pub(crate) start: Instant,
    pub(crate) page_size: u64,
    pub(crate) state: Mutex<State>,
}

impl Observer {
    /// Reads the machine and attaches the probes. What fails is noted, not returned: the rest works.
    ///
    /// Attaching needs privileges; nothing later does.
    pub fn new(config: &Config) -> Self {
        let mut degraded = BTreeMap::new();
        let machine = sysfs::read(&config.host_root).unwrap_or_else(|error| {
            tracing::error!(error = %chain(&error), "the machine cannot be read: no figures by node");
            degraded.insert(Part::Topology, chain(&error));
            Machine::default()
        });
        // Before they are loaded: they check themselves at once.
        let cost = Cost::measure(Instant::now());
        let probes = Probes::load(&probe_options(config, &machine));
        for report in probes.reports() {
            let (probe, mode) = (report.probe, report.mode);
            let reason = report.reason.as_deref();
            match mode {
                Mode::Absent if !config.probes.is_enabled(probe).0 => tracing::info!(%probe, "switched off"),
                Mode::Absent => {
                    tracing::warn!(%probe, reason, "cannot be attached; `numaward doctor` says more");
                }
                _ => tracing::info!(%probe, %mode, reason, "attached"),
            }
        }
        let machine = Arc::new(machine);
        let asked = Some(Instant::now());
        let state = State {
            machine,
            probes,
            table: Table::default(),
            hierarchy: None,
            promises: Arc::default(),
            cgroup_listeners: Vec::new(),
            revision: 0,
            foreign: None,
            containers: containers::Names::default(),
            containers_came: Arc::default(),
            activities: Activities::default(),
            sampling: BTreeMap::new(),
            estimates: Estimates::default(),
            memory_stat_serves: false,
            exclusive: Exclusive::default(),
            intrusions: Intrusions::default(),
            slot_policy: SlotPolicy::default(),
            cost,
            degraded,
            asked,
            reader: None,
            affinity: None,
        };
        Self {
            config: config.clone(),
            events: Events::default(),
            start: Instant::now(),
            page_size: rustix::param::page_size() as u64,
            state: Mutex::new(state),
        }
    }

    /// Where what happens is reported.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The machine as last read.
    pub fn machine(&self) -> Arc<Machine> {
        self.lock().machine.clone()
    }

    /// Grows with each change of what is promised.
    pub fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// Why a probe is not attached better.
    pub(crate) fn reason(&self, report: &ProbeReport) -> Option<String> {
        if let (false, key) = self.config.probes.is_enabled(report.probe) {
            return Some(format!("switched off by {key}"));
        }
        report.reason.clone()
    }

    /// Notes that a part works, or why not; logs what changed.
    pub fn note(&self, part: Part, result: Result<(), String>) {
        self.lock().note(part, result);
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of another thread leaves at worst one workload's books incomplete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn probe_options<'a>(config: &Config, machine: &'a Machine) -> probes::Options<'a> {
    let defaults = probes::Options::new(machine);
    probes::Options {
        slots: config.probes.slots,
        duty_cycle: config
            .probes
            .allocation
            .duty_cycle
            .and_then(|cycle| probes::DutyCycle::new(cycle.on.0, cycle.period.0).ok()),
        alloc_modes: if config.probes.allocation.enabled { defaults.alloc_modes } else { &[] },
        others: Probe::OTHERS.into_iter().filter(|probe| config.probes.is_enabled(*probe).0).collect(),
        long_stall: config.probes.stalls.event_from.0,
        debug_log: config.probes.allocation.debug_log,
        ..defaults
    }
}

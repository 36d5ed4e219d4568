//! The reconciler: the thread that owns the guarantees.
//!
//! # Terms
//! - [`Core`] has the state and changes it: admissions, resizes, releases.
//! - A *controller* maintains one aspect of the guarantees or of the host. It handles [`ControllerEvent`]s, changes the core,
//!   and does not know the other controllers.
//! - [`crate::core::Effects`] are the consequences of changes, such as a new view to publish. The core and the
//!   controllers add them, and the loop processes them.

mod affinities;
mod auto_placement;
mod batch;
mod budgets;
mod burstable_home;
mod caches;
mod controllers;
mod declared;
mod drift;
mod guard;
mod interrupts;
mod liveness;
pub(crate) mod mode;
mod notices;
mod power;
mod read_model;
mod rebalancing;
mod restores;
#[cfg(test)]
mod tests;
mod throttling;
pub(crate) mod upkeep;
mod weights;

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{self as cgroup, CgroupPath, Hierarchy, KnobWatch};
use numaward_config::Config;
use numaward_enforce::Enforcer;
use numaward_engine::{PodId, RebalanceLimits, claims::allocator::Amounts};
use numaward_guarantee::{
    claim::{PlacedClaim, ReservedClaim},
    command::{AdmissionOutcome, Command, Message},
    error::{AdmissionError, StartError},
    export,
    pod::is_for_room,
    ports::Ports,
    reconciler::{ReconcilerHandle, ReconcilerStatus},
    request::Request,
};
use numaward_model::{Guarantees, health};
use numaward_topology::NodeId;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use self::{
    controllers::Controllers,
    mode::ModeStatus,
    read_model::ReadModel,
    rebalancing::{RebalanceOutcome, Rebalancing},
};
use crate::{
    ControlMetrics,
    core::{
        Admission, CgroupNews, Core, EnforcementWorker, HeldChange, Inbox, admission, claims, conditions,
        cpu_isolation,
        pods::{binding, commands, room, waiting},
        preferred_node,
        rebalance::{self, RoomRequest, WaitingClaim},
        release, resize, shared_pool,
    },
    write_monitor::WriteMonitor,
};

/// Interval of the controllers' periodic work.
const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(250);
/// The same interval while there is no guarantee.
const IDLE_MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum delay of the periodic work while the container runtime has requests.
const MAX_MAINTENANCE_DELAY: Duration = Duration::from_secs(1);

/// Time after which one iteration counts as hung. Waiting for page migrations or systemd is not part of it.
const HANG_TIMEOUT: Duration = Duration::from_mins(1);

/// An event for the controllers.
#[derive(Debug)]
enum ControllerEvent<'a> {
    /// Periodic work is due.
    Tick(Instant),
    /// The kernel reported writes to watched knobs.
    KnobsWritten(Instant),
    /// The machine's topology changed.
    MachineChanged(Instant),
    /// Cgroups were created or removed.
    Cgroups(&'a [cgroup::CgroupEvent]),
    /// The settings of a cgroup changed.
    SettingsChanged(&'a HeldChange),
    /// The state changed and is about to be published.
    StateChanged,
    /// A workload may have ended.
    WorkloadsGone(Instant),
    /// CPUs or memory became free, or the machine changed.
    CapacityFreed,
}

/// A concern of the reconciler: maintains one aspect of the guarantees or of the host.
trait Controller {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>);
}

/// Loads the guarantees of the previous run and starts the thread. The thread ends when `stop` is cancelled; the guarantees remain.
#[cfg_attr(
    not(any(test, feature = "testing")),
    expect(unreachable_pub, reason = "other crates use it through the module `testing`")
)]
pub fn start(
    config: &Config,
    hierarchy: Hierarchy,
    enforcer: Enforcer,
    ports: Ports,
    metrics: ControlMetrics,
    watch: Option<KnobWatch>,
    stop: CancellationToken,
) -> Result<(ReconcilerHandle, JoinHandle<()>), StartError> {
    let (commands, queue) = mpsc::channel();
    let heartbeats = ports.heartbeats.clone();
    let write_monitor = watch.map(|watch| Arc::new(WriteMonitor::new(watch)));
    let core = Core::open(config, hierarchy, enforcer, ports, metrics)?;
    let mut reconciler = ReconcilerLoop::new(core, write_monitor.clone(), stop.clone());
    let status = reconciler.status();
    if reconciler.needs_cgroup_events() {
        // Subscribed before the scan in `adopt`, so that no cgroup is missed.
        let (commands, news) = (commands.clone(), reconciler.cgroup_news.clone());
        let send = move |events: &[_]| {
            !news.add(events.len())
                || commands.send(Message::Internal(Command::Cgroups(events.to_vec()))).is_ok()
        };
        reconciler.core.ports.host.subscribe(Box::new(send));
    }
    reconciler.adopt();
    let worker =
        EnforcementWorker::start(reconciler.core.enforcer().clone(), commands.clone(), &heartbeats, &stop)?;
    reconciler.core.serve(worker, Inbox::new(queue));
    if let Some(write_monitor) = write_monitor {
        let commands = commands.clone();
        // The channel closes with the reconciler, which ends this thread too.
        let wake = move || commands.send(Message::Internal(Command::KnobsChanged)).is_ok();
        write_monitor.spawn(wake, &heartbeats, &stop)?;
    }
    let ended = stop.clone();
    let thread = heartbeats.spawn("guarantee", HANG_TIMEOUT, &ended, move || reconciler.run(&stop))?;
    Ok((ReconcilerHandle::new(commands, status), thread))
}

struct ReconcilerLoop {
    core: Core,
    controllers: Controllers,
    rebalancing: Rebalancing,
    read_model: ReadModel,
    /// The preferred nodes as published last.
    homes: BTreeMap<CgroupPath, NodeId>,
    view: Arc<RwLock<Arc<api::Allocations>>>,
    unplaced: Arc<RwLock<Vec<PodId>>>,
    placed_pods: Arc<RwLock<BTreeSet<String>>>,
    mode_status: ModeStatus,
    cgroup_news: CgroupNews,
}

impl ReconcilerLoop {
    fn new(core: Core, write_monitor: Option<Arc<WriteMonitor>>, stop: CancellationToken) -> Self {
        Self {
            controllers: Controllers::new(&core, write_monitor, stop),
            rebalancing: Rebalancing::default(),
            read_model: ReadModel::default(),
            homes: BTreeMap::new(),
            view: Arc::default(),
            unplaced: Arc::default(),
            placed_pods: Arc::default(),
            mode_status: ModeStatus::default(),
            cgroup_news: CgroupNews::default(),
            core,
        }
    }

    /// Returns the published state, for clients.
    fn status(&self) -> ReconcilerStatus {
        ReconcilerStatus {
            allocations: Arc::clone(&self.view),
            rebalance: self.rebalancing.status(),
            unplaced: Arc::clone(&self.unplaced),
            placed_pods: Arc::clone(&self.placed_pods),
            crowded: self.controllers.guard.crowded(),
            has_pending_host_restores: self.mode_status.has_pending_host_restores(),
        }
    }

    fn run(mut self, stop: &CancellationToken) {
        let mut next = Instant::now() + MAINTENANCE_INTERVAL;
        while !stop.is_cancelled() {
            health::beat();
            if !self.step(&mut next) {
                break;
            }
        }
        self.publish();
        self.core.store.storage.write_out(true);
    }

    /// Executes one command or one background step, then the periodic work if it is due. Returns `false` if all senders are gone.
    fn step(&mut self, next: &mut Instant) -> bool {
        let has_to_bind = self.core.bindings.has_next()
            || self.rebalancing.is_due(&self.core)
            || room::has_next(&self.core) && !self.rebalancing.is_running();
        let Some(inbox) = &mut self.core.execution.inbox else { return false };
        let has_work = has_to_bind || !inbox.is_empty();
        let timeout = if has_work { Duration::ZERO } else { next.saturating_duration_since(Instant::now()) };
        inbox.receive(timeout);
        conditions::update(&mut self.core);
        let Some(inbox) = &mut self.core.execution.inbox else { return false };
        // The container runtime waits for its commands, so they go first.
        if let Some(command) = inbox.next_runtime_command() {
            let reply = commands::pod_command(&mut self.core, command, false);
            if let Some(reply) = reply {
                self.publish();
                reply();
            }
        } else {
            let waiting = inbox.next();
            if !waiting.is_empty() {
                self.handle_batch(waiting);
            } else if self.core.bindings.has_next() {
                binding::bind_next(&mut self.core);
            } else if !self.make_room() {
                self.rebalance();
            }
        }
        let now = Instant::now();
        let runtime_waits = self.core.execution.inbox.as_ref().is_some_and(Inbox::has_runtime);
        if runtime_waits && now < *next + MAX_MAINTENANCE_DELAY {
            return true;
        }
        let interval = if self.core.store.state.holds_nothing() {
            IDLE_MAINTENANCE_INTERVAL
        } else {
            MAINTENANCE_INTERVAL
        };
        if now >= *next {
            *next = now + interval;
            self.run_maintenance();
        } else {
            // After the first guarantee, the shorter interval applies at once.
            *next = (*next).min(now + interval);
        }
        self.process_effects();
        true
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Admit { request, dry_run, answer } => {
                let result = admission::admit(&mut self.core, &request, dry_run);
                self.answer_admission(&request, dry_run, answer, result);
            }
            Command::Resize { resize, dry_run, answer } => {
                let resized = resize::resize_requested(&mut self.core, &resize, dry_run);
                let resized = self.answer(resized, &resize.name);
                // The client may have disconnected; the change stays.
                let _ = answer.send(resized);
            }
            Command::Release { name, answer } => {
                let result = release::release_batch(&mut self.core, &[&name]).pop();
                self.process_effects();
                let _ = answer.send(result.unwrap_or(Err(AdmissionError::Unknown(name))));
            }
            Command::Plan { request, limits, answer } => {
                let _ = answer.send(self.plan(&request, &limits));
            }
            Command::Rebalance { asked, answer } => {
                let _ = answer.send(self.rebalancing.start(&mut self.core, *asked));
            }
            Command::Cancel { answer } => {
                let _ = answer.send(self.rebalancing.cancel(&self.core));
            }
            Command::KubeletState { answer } => {
                let Core { config, policy, store, .. } = &self.core;
                let _ = answer.send(export::export(config, &policy.machine, &store.state));
            }
            Command::ReserveClaim { uid, claim, requests, answer } => {
                let reserved = claims::reserve(&mut self.core, &uid, *claim, requests.as_ref());
                self.process_effects();
                // If the kubelet does not wait any more, it asks again.
                let _ = answer.send(reserved);
            }
            Command::PlaceClaim { uid, claim, requests, answer } => {
                let placed = self.place_claim(&uid, *claim, requests);
                self.process_effects();
                // The same request has the same result.
                let _ = answer.send(placed);
            }
            Command::LimitClaims { pod, requests, answer } => {
                let changed = claims::limit(&mut self.core, &pod, requests.as_ref());
                self.process_effects();
                let _ = answer.send(changed);
            }
            Command::ReleaseClaim { uid, answer } => {
                let released = claims::release(&mut self.core, &uid);
                self.process_effects();
                let _ = answer.send(released);
            }
            Command::ReservedClaims { answer } => {
                let _ = answer.send(Ok(self.core.store.state.claims.clone()));
            }
            Command::Declare { rules, answer } => {
                self.controllers.declarations.replace(rules);
                self.core.effects.view = true;
                let applied = if self.core.mode() == EnforcementMode::Off {
                    Ok(())
                } else {
                    self.controllers.declarations.reconcile(&mut self.core)
                };
                self.process_effects();
                // The new rules hold even if the client has disconnected.
                let _ = answer.send(applied);
            }
            Command::Cgroups(events) => {
                self.dispatch(&ControllerEvent::Cgroups(&events));
                if self.cgroup_news.take(events.len()) {
                    tracing::warn!(
                        "too many cgroups were created and removed at once: the whole hierarchy is scanned"
                    );
                    self.core.effects.isolate = true;
                    // Errors are logged.
                    let _ = self.controllers.declarations.reconcile(&mut self.core);
                }
            }
            Command::KnobsChanged => self.dispatch(&ControllerEvent::KnobsWritten(Instant::now())),
        }
    }

    #[cfg(test)]
    fn admit(&mut self, request: &Request, dry_run: bool) -> Result<AdmissionOutcome, AdmissionError> {
        let result = admission::admit(&mut self.core, request, dry_run);
        self.answer(result, &request.name)
    }

    /// Processes the effects of an admission and returns the answer for the client.
    fn answer(
        &mut self,
        result: Result<Admission, AdmissionError>,
        name: &str,
    ) -> Result<AdmissionOutcome, AdmissionError> {
        self.process_effects();
        match result? {
            // `process_effects` has just published the guarantee.
            Admission::Admitted => self
                .read_model
                .allocation(name)
                .map(AdmissionOutcome::Admitted)
                .ok_or(AdmissionError::Stopping),
            Admission::DryRun(dry) => Ok(AdmissionOutcome::Dry(*dry)),
        }
    }

    fn plan(&mut self, request: &Request, limits: &RebalanceLimits) -> Result<api::MovePlan, AdmissionError> {
        let room = RoomRequest::Workload(Box::new(request.clone()), false);
        let plan = rebalance::plan_moves(&mut self.core, &room, limits)?;
        let described = rebalance::describe_plan(&mut self.core, request, &plan)?;
        rebalancing::report_planned(&self.core, request, &described);
        Ok(described)
    }

    /// Reserves a claim of the whole host, or begins to make room for it.
    fn place_claim(
        &mut self,
        uid: &str,
        claim: ReservedClaim,
        limit: Option<Amounts>,
    ) -> Result<PlacedClaim, AdmissionError> {
        let Err(refused) = claims::reserve(&mut self.core, uid, claim.clone(), limit.as_ref()) else {
            return Ok(PlacedClaim::Reserved);
        };
        let is_for_room = match &refused {
            AdmissionError::Rejected(rejection, _) => is_for_room(&rejection.reason),
            _ => false,
        };
        let Some((request, terms)) = claims::host_request(uid, &claim).filter(|_| is_for_room) else {
            return Err(refused);
        };
        let room =
            RoomRequest::Claim(Box::new(WaitingClaim { uid: uid.to_owned(), claim, limit, request, terms }));
        if rebalance::automatic_limits(&self.core, &room).is_some() {
            claims::note_waiting(&mut self.core, uid, true);
            self.rebalancing.start_automatic(&mut self.core, &room, None);
            self.publish_placed_pods();
            // If these moves are for another request, they are planned for this claim afterwards.
            if self.rebalancing.is_running() {
                return Ok(PlacedClaim::MakesRoom);
            }
            claims::note_waiting(&mut self.core, uid, false);
        }
        Err(refused)
    }

    /// Plans moves for the next refused pod, and begins them. Returns false if there is none, or if a rebalance is in progress.
    fn make_room(&mut self) -> bool {
        if self.rebalancing.is_running() {
            return false;
        }
        let Some(pod) = room::take_next(&mut self.core) else { return false };
        self.rebalancing.start_automatic(&mut self.core, &RoomRequest::Pod(Box::new(pod)), None);
        self.publish_placed_pods();
        true
    }

    /// Executes the next step of a rebalance, if one is due.
    fn rebalance(&mut self) {
        if !self.rebalancing.is_due(&self.core) {
            return;
        }
        if let Some(outcome) = self.rebalancing.step(&mut self.core) {
            self.end_rebalance(outcome);
        }
        // May start the next rebalance.
        self.process_effects();
    }

    /// Publishes the end of a rebalance and answers the client that waits for it.
    fn end_rebalance(&mut self, RebalanceOutcome { status, admitted, waiter }: RebalanceOutcome) {
        self.publish();
        let allocation = admitted.and_then(|name| self.read_model.allocation(&name));
        self.rebalancing.publish_end(api::Rebalance { allocation: allocation.clone(), ..status });
        let Some((answer, refused)) = waiter else { return };
        let name = allocation.as_ref().map(|allocation| allocation.name.clone());
        let result = allocation.map(AdmissionOutcome::Admitted).ok_or(refused);
        if answer.send(result).is_err()
            && let Some(name) = name
        {
            tracing::info!(name, "the client of this request disconnected: the guarantee is released");
            let _ = release::release(&mut self.core, &name);
        }
    }

    fn dispatch(&mut self, event: &ControllerEvent) {
        self.controllers.handle(&mut self.core, event);
    }

    /// Returns true if the reconciler needs events of created and removed cgroups.
    fn needs_cgroup_events(&self) -> bool {
        // Guarantees may be declared later.
        self.core.mode() != EnforcementMode::Off
    }

    /// Takes over the guarantees of the previous run: releases those of ended workloads and rewrites settings that changed
    /// meanwhile.
    fn adopt(&mut self) {
        let names: Vec<String> = self.core.store.state.guarantees.keys().cloned().collect();
        for name in names {
            self.dispatch(&ControllerEvent::SettingsChanged(&HeldChange::Given(name)));
        }
        self.dispatch(&ControllerEvent::WorkloadsGone(Instant::now()));
        admission::remove_stray_cgroups(&self.core);
        preferred_node::end_all_overridden(&mut self.core);
        if let Some(rewritten) = upkeep::enforce_guarantees(&mut self.core) {
            let allocations = self.core.store.state.guarantees.len();
            tracing::info!(allocations, rewritten, "guarantees of the previous run were taken over");
        }
        mode::follow(&mut self.core);
        self.rebalancing.adopt(&mut self.core);
        if self.core.mode() != EnforcementMode::Off {
            // Errors are logged.
            let _ = self.controllers.declarations.reconcile(&mut self.core);
        }
        cpu_isolation::update(&mut self.core, true);
        shared_pool::note_guarantees_changed(&mut self.core);
        self.process_effects();
        // Host settings that are no longer configured are restored before the first client is answered.
        self.controllers.host.tick(&mut self.core, Instant::now());
        self.controllers.caches.adopt(&mut self.core);
        auto_placement::AutoPlacement::adopt(&mut self.core);
        affinities::Affinities::adopt(&mut self.core);
        self.publish_mode_status();
    }

    fn publish_mode_status(&self) {
        self.mode_status.publish(&self.core, self.controllers.affinities.is_busy(&self.core));
    }

    fn run_maintenance(&mut self) {
        let now = Instant::now();
        self.dispatch(&ControllerEvent::Tick(now));
        self.publish_mode_status();
        if self.core.isolation.is_report_due(Instant::now()) {
            cpu_isolation::update(&mut self.core, false);
        }
        self.rebalancing.update_moved_bytes(&self.core);
        if upkeep::maintain(&mut self.core, now) {
            self.publish();
            self.dispatch(&ControllerEvent::MachineChanged(now));
        }
        *self.unplaced.write() = waiting::unplaced(&self.core);
        self.publish_placed_pods();
    }

    fn publish_placed_pods(&self) {
        let admitted = self.core.store.state.pods.values().map(|admitted| admitted.pod.uid.clone());
        *self.placed_pods.write() = admitted.chain(self.rebalancing.pod_uid().map(str::to_owned)).collect();
    }

    /// Publishes the changed state.
    fn publish(&mut self) {
        while self.core.effects.is_shown() {
            let held = mem::take(&mut self.core.effects.held);
            for change in &held {
                self.dispatch(&ControllerEvent::SettingsChanged(change));
            }
            self.core.effects.view = false;
            let guarantees_changed = mem::take(&mut self.core.effects.guarantees);
            self.dispatch(&ControllerEvent::StateChanged);
            self.read_model.update(&self.core, &self.controllers);
            let homes = preferred_node::nodes_by_cgroup(&self.core);
            if guarantees_changed || homes != self.homes {
                let ledger = self.core.store.state.ledger.clone();
                let mut guarantees = Guarantees::new(self.read_model.guarantees(), ledger);
                guarantees.free_cpus = self.core.free_cpus();
                guarantees.homes.clone_from(&homes);
                guarantees.unfit.clone_from(&self.core.policy.unfit);
                self.core.ports.host.publish_guarantees(guarantees);
                self.homes = homes;
            }
            let Controllers { drift, declarations, restores, .. } = &self.controllers;
            let (waiting, pending) = (declarations.waiting(), restores.pending());
            let allocations = self.read_model.allocations(&self.core, drift, waiting, pending);
            *self.view.write() = Arc::new(allocations);
            for change in held {
                if let HeldChange::Released { cgroup, remove: Some(dir), .. } = change {
                    admission::remove_cgroup(&cgroup, &dir);
                }
            }
        }
    }

    /// Processes the effects of changes until there are none left.
    fn process_effects(&mut self) {
        // A refused request may have left CPUs in the shared pool.
        shared_pool::follow(&mut self.core);
        // Each of the two effects may cause the other. The loop ends, because an applied change causes no effect.
        while self.core.effects.is_due()
            || (self.core.isolation.is_report_due(Instant::now()) && !self.is_busy())
        {
            self.publish();
            let effects = &mut self.core.effects;
            let (gone, declared, isolate) = (
                mem::take(&mut effects.gone),
                mem::take(&mut effects.declared),
                mem::take(&mut effects.isolate),
            );
            if gone {
                self.dispatch(&ControllerEvent::WorkloadsGone(Instant::now()));
            }
            if declared {
                self.dispatch(&ControllerEvent::CapacityFreed);
                for request in mem::take(&mut self.core.effects.refused_declared) {
                    let request = RoomRequest::Workload(Box::new(request), true);
                    self.rebalancing.start_automatic(&mut self.core, &request, None);
                }
            }
            if isolate || self.core.isolation.is_report_due(Instant::now()) {
                let is_busy = self.is_busy();
                cpu_isolation::update_when_idle(&mut self.core, is_busy);
            }
        }
    }

    /// Returns true if a client waits for an answer.
    fn is_busy(&self) -> bool {
        self.core.execution.inbox.as_ref().is_some_and(|inbox| !inbox.is_empty())
    }
}

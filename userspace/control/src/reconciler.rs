//! The thread that owns what is promised.
//!
//! [`Core`] changes it. Around the core, controllers look after what is held: each is a type of its own that handles
//! [`Event`]s and changes the core, and knows nothing of the others. What follows from a change, they and the core note
//! as [`crate::core::Effects`], and the loop sees to it.

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
mod notices;
mod power;
mod read_model;
mod rebalancing;
mod restores;
#[cfg(test)]
mod tests;
mod throttling;
mod weights;

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{self as cgroup, CgroupPath, Hierarchy, KnobWatch};
use numaward_config::Config;
use numaward_enforce::Enforcer;
use numaward_engine::RebalanceLimits;
use numaward_guarantee::{
    command::{Answer, Command, Message},
    error::{AdmissionError, StartError},
    export,
    ports::Ports,
    reconciler::{ReconcilerHandle, ReconcilerStatus},
    request::Request,
};
use numaward_model::{Guarantees, health, pod::PodName};
use numaward_topology::NodeId;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use self::{
    controllers::Controllers,
    read_model::ReadModel,
    rebalancing::{RebalanceOutcome, Rebalancing},
};
use crate::{
    ControlMetrics,
    core::{Admission, CgroupNews, Core, HeldChange, Inbox, Worker, remove_cgroup},
    write_monitor::WriteMonitor,
};

/// How often what is held is looked after.
const TURN: Duration = Duration::from_millis(250);
/// The same while nothing is held.
const IDLE_TURN: Duration = Duration::from_secs(1);
/// How often others' claims on memory are read anew.
const REFRESH: Duration = Duration::from_secs(30);
/// How much later than that, while the container runtime keeps asking.
const LATEST: Duration = Duration::from_secs(1);

/// How long a turn may take before it counts as hung. A wait for pages or systemd is no turn.
const LIMIT: Duration = Duration::from_mins(1);

/// What those who look after what is held are to know.
#[derive(Debug)]
enum Event<'a> {
    /// Time goes by.
    Turn(Instant),
    /// Somebody wrote knobs.
    Written(Instant),
    /// The machine changed.
    Machine(Instant),
    /// Cgroups came or went.
    Cgroups(&'a [cgroup::CgroupEvent]),
    /// A cgroup holds something else than before.
    Held(&'a HeldChange),
    /// All that changed is about to be published.
    Changed,
    /// Workloads may be gone.
    Gone(Instant),
    /// Something came free, or the machine changed.
    Free,
}

/// Takes over what an earlier run promised, and starts the thread. It ends when `stop` is cancelled; what is
/// promised stays so.
#[cfg_attr(
    not(any(test, feature = "testing")),
    expect(unreachable_pub, reason = "others reach it by the module `testing`")
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
    let shown = reconciler.shown();
    if reconciler.wants_cgroups() {
        // Before it looks what there is, so that nothing is missed in between.
        let (commands, news) = (commands.clone(), reconciler.cgroup_news.clone());
        let send = move |events: &[_]| {
            !news.add(events.len())
                || commands.send(Message::Internal(Command::Cgroups(events.to_vec()))).is_ok()
        };
        reconciler.core.ports.cgroups.subscribe(Box::new(send));
    }
    reconciler.adopt();
    let worker = Worker::start(reconciler.core.enforcer().clone(), commands.clone(), &heartbeats, &stop)?;
    reconciler.core.serve(worker, Inbox::new(queue));
    if let Some(write_monitor) = write_monitor {
        let commands = commands.clone();
        // It ends with the reconciler: nobody takes its commands then.
        let wake = move || commands.send(Message::Internal(Command::KnobsChanged)).is_ok();
        write_monitor.spawn(wake, &heartbeats, &stop)?;
    }
    let ended = stop.clone();
    let thread = heartbeats.spawn("guarantee", LIMIT, &ended, move || reconciler.run(&stop))?;
    Ok((ReconcilerHandle::new(commands, shown), thread))
}

struct ReconcilerLoop {
    core: Core,
    controllers: Controllers,
    rebalancing: Rebalancing,
    read_model: ReadModel,
    /// Those that others know of.
    homes: BTreeMap<CgroupPath, NodeId>,
    view: Arc<RwLock<Arc<api::Allocations>>>,
    unplaced: Arc<RwLock<Vec<PodName>>>,
    has_pending_host_restores: Arc<AtomicBool>,
    cgroup_news: CgroupNews,
    refreshed: Instant,
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
            has_pending_host_restores: Arc::default(),
            cgroup_news: CgroupNews::default(),
            refreshed: Instant::now(),
            core,
        }
    }

    /// What clients see without asking.
    fn shown(&self) -> ReconcilerStatus {
        ReconcilerStatus {
            allocations: Arc::clone(&self.view),
            rebalance: self.rebalancing.shown(),
            unplaced: Arc::clone(&self.unplaced),
            crowded: self.controllers.guard.crowded(),
            has_pending_host_restores: Arc::clone(&self.has_pending_host_restores),
        }
    }

    fn run(mut self, stop: &CancellationToken) {
        let mut next = Instant::now() + TURN;
        while !stop.is_cancelled() {
            health::beat();
            if !self.step(&mut next) {
                break;
            }
        }
        self.show();
        self.core.store.storage.write_out(true);
    }

    /// Does what was asked for first, and looks after what is held when it is time for that; `false` if nobody can ask.
    fn step(&mut self, next: &mut Instant) -> bool {
        let has_to_bind = self.core.has_to_bind() || self.rebalancing.is_due(&self.core);
        let Some(inbox) = &mut self.core.execution.inbox else { return false };
        let has_work = has_to_bind || !inbox.is_empty();
        let patience = if has_work { Duration::ZERO } else { next.saturating_duration_since(Instant::now()) };
        inbox.receive(patience);
        self.core.heed_conditions();
        let Some(inbox) = &mut self.core.execution.inbox else { return false };
        // What the runtime waits for goes first.
        if let Some(command) = inbox.next_of_runtime() {
            let reply = self.core.pod_command(command, false);
            if let Some(reply) = reply {
                self.show();
                reply();
            }
        } else {
            let waiting = inbox.next();
            if !waiting.is_empty() {
                self.handle_batch(waiting);
            } else if self.core.has_to_bind() {
                self.core.bind_next();
            } else {
                self.rebalance();
            }
        }
        let now = Instant::now();
        let is_awaited = self.core.execution.inbox.as_ref().is_some_and(Inbox::has_runtime);
        if is_awaited && now < *next + LATEST {
            return true;
        }
        let turn = if self.core.store.state.holds_nothing() { IDLE_TURN } else { TURN };
        if now >= *next {
            *next = now + turn;
            self.run_maintenance();
        } else {
            // The first guarantee does not wait for the end of a longer turn.
            *next = (*next).min(now + turn);
        }
        self.process_effects();
        true
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Admit { request, dry_run, answer } => {
                let result = self.core.admit(&request, dry_run);
                self.answer_admission(&request, dry_run, answer, result);
            }
            Command::Resize { resize, dry_run, answer } => {
                let resized = self.core.resize_asked(&resize, dry_run);
                let resized = self.answer(resized, &resize.name);
                // The client may be gone; the change stays.
                let _ = answer.send(resized);
            }
            Command::Release { name, answer } => {
                let result = self.core.release_batch(&[&name]).pop();
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
            Command::Cgroups(events) => {
                self.dispatch(&Event::Cgroups(&events));
                if self.cgroup_news.take(events.len()) {
                    tracing::warn!("too many cgroups came and went at once: all are looked at");
                    self.core.effects.isolate = true;
                    self.controllers.declarations.reconcile(&mut self.core);
                }
            }
            Command::KnobsChanged => self.dispatch(&Event::Written(Instant::now())),
        }
    }

    #[cfg(test)]
    fn admit(&mut self, request: &Request, dry_run: bool) -> Result<Answer, AdmissionError> {
        let result = self.core.admit(request, dry_run);
        self.answer(result, &request.name)
    }

    /// Sees to what follows; says what became of what was asked for under this name.
    fn answer(
        &mut self,
        result: Result<Admission, AdmissionError>,
        name: &str,
    ) -> Result<Answer, AdmissionError> {
        self.process_effects();
        match result? {
            // As it was just published.
            Admission::Given => {
                self.read_model.of(name).map(Answer::Admitted).ok_or(AdmissionError::Stopping)
            }
            Admission::Dry(dry) => Ok(Answer::Dry(*dry)),
        }
    }

    fn plan(&mut self, request: &Request, limits: &RebalanceLimits) -> Result<api::MovePlan, AdmissionError> {
        let plan = self.core.plan_moves(request, limits)?;
        let described = self.core.describe_plan(request, &plan)?;
        rebalancing::report_planned(&self.core, request, &described);
        Ok(described)
    }

    /// Does the next step of a rebalance, if there is one to be done.
    fn rebalance(&mut self) {
        if !self.rebalancing.is_due(&self.core) {
            return;
        }
        if let Some(over) = self.rebalancing.step(&mut self.core) {
            self.end_rebalance(over);
        }
        // It may start the next one.
        self.process_effects();
    }

    /// Shows how a rebalance ended, and answers the client that waits for it.
    fn end_rebalance(&mut self, RebalanceOutcome { shown, admitted, waiter }: RebalanceOutcome) {
        self.show();
        let allocation = admitted.and_then(|name| self.read_model.of(&name));
        self.rebalancing.show_end(api::Rebalance { allocation: allocation.clone(), ..shown });
        let Some((answer, refused)) = waiter else { return };
        let name = allocation.as_ref().map(|allocation| allocation.name.clone());
        let result = allocation.map(Answer::Admitted).ok_or(refused);
        if answer.send(result).is_err()
            && let Some(name) = name
        {
            tracing::info!(name, "nobody waits for this allocation any more");
            let _ = self.core.release(&name);
        }
    }

    /// Lets all handle an event.
    fn dispatch(&mut self, event: &Event) {
        self.controllers.handle(&mut self.core, event);
    }

    /// Whether it matters that cgroups come and go.
    fn wants_cgroups(&self) -> bool {
        self.core.mode() != EnforcementMode::Off
            && (self.core.isolation.is_on() || !self.controllers.declarations.is_empty())
    }

    /// Takes over what runs: what is gone is released, what holds is left as it is, what does not is written.
    fn adopt(&mut self) {
        let names: Vec<String> = self.core.store.state.guarantees.keys().cloned().collect();
        for name in names {
            self.dispatch(&Event::Held(&HeldChange::Given(name)));
        }
        self.dispatch(&Event::Gone(Instant::now()));
        self.core.remove_strays();
        self.core.yield_homes();
        if let Some(rewritten) = self.core.uphold() {
            let allocations = self.core.store.state.guarantees.len();
            tracing::info!(allocations, rewritten, "allocations of an earlier run were taken over");
        }
        self.core.follow_mode();
        self.rebalancing.adopt(&mut self.core);
        if self.core.mode() != EnforcementMode::Off {
            self.controllers.declarations.reconcile(&mut self.core);
        }
        self.core.herd(true);
        self.core.promises_changed();
        self.process_effects();
        // What an earlier run moved or set is back before anybody is answered, if it is to be.
        self.controllers.host.turn(&mut self.core, Instant::now());
        self.controllers.caches.adopt(&mut self.core);
        auto_placement::AutoPlacement::adopt(&mut self.core);
        self.show_whether_host_is_owed();
    }

    /// Shows whether something outside of cgroups is yet to be given back.
    fn show_whether_host_is_owed(&self) {
        let is_owed =
            self.core.has_pending_host_restores() || self.controllers.affinities.is_busy(&self.core);
        self.has_pending_host_restores.store(is_owed, Ordering::Relaxed);
    }

    fn run_maintenance(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.refreshed) >= REFRESH {
            self.refreshed = now;
            self.core.refresh();
        }
        self.dispatch(&Event::Turn(now));
        self.show_whether_host_is_owed();
        if self.core.is_herd_report_due() {
            self.core.herd(false);
        }
        self.rebalancing.look(&self.core);
        if self.core.turn(now) {
            self.show();
            self.dispatch(&Event::Machine(now));
        }
        *self.unplaced.write() = self.core.unplaced();
    }

    /// Publishes what changed.
    fn show(&mut self) {
        while self.core.effects.is_shown() {
            let held = mem::take(&mut self.core.effects.held);
            for change in &held {
                self.dispatch(&Event::Held(change));
            }
            self.core.effects.view = false;
            let is_promise = mem::take(&mut self.core.effects.promises);
            self.dispatch(&Event::Changed);
            self.read_model.follow(&self.core, &self.controllers);
            let homes = self.core.home_nodes();
            if is_promise || homes != self.homes {
                let ledger = self.core.store.state.ledger.clone();
                let mut promises = Guarantees::new(self.read_model.promises(), ledger);
                promises.free_cpus = self.core.free_cpus();
                promises.homes.clone_from(&homes);
                promises.unfit.clone_from(&self.core.policy.unfit);
                self.core.ports.assignments.publish_guarantees(promises);
                self.homes = homes;
            }
            let Controllers { drift, declarations, restores, .. } = &self.controllers;
            let (waiting, pending) = (declarations.waiting(), restores.shown());
            let allocations = self.read_model.allocations(&self.core, drift, waiting, pending);
            *self.view.write() = Arc::new(allocations);
            for change in held {
                if let HeldChange::Released { cgroup, remove: Some(dir), .. } = change {
                    remove_cgroup(&cgroup, &dir);
                }
            }
        }
    }

    /// Does what follows from what was changed.
    fn process_effects(&mut self) {
        // What was refused may have left CPUs to those who share.
        self.core.follow_pool();
        // Each may cause the other, but not without end: what is given is not given again.
        while self.core.effects.is_due() || (self.core.is_herd_report_due() && !self.is_busy()) {
            self.show();
            let effects = &mut self.core.effects;
            let (gone, declared, isolate) = (
                mem::take(&mut effects.gone),
                mem::take(&mut effects.declared),
                mem::take(&mut effects.isolate),
            );
            if gone {
                self.dispatch(&Event::Gone(Instant::now()));
            }
            if declared {
                self.dispatch(&Event::Free);
                for request in mem::take(&mut self.core.effects.no_room) {
                    self.rebalancing.start_automatic(&mut self.core, &request, None);
                }
            }
            if isolate || self.core.is_herd_report_due() {
                self.core.herd_in_time(self.is_busy());
            }
        }
    }

    /// Whether anybody waits for an answer.
    fn is_busy(&self) -> bool {
        self.core.execution.inbox.as_ref().is_some_and(|inbox| !inbox.is_empty())
    }
}

//! The thread that owns what is promised.

mod admission;
mod cpu_isolation;
mod declared;
mod drift;
mod execution;
mod inbox;
mod liveness;
mod machine;
mod mode;
mod notices;
pub mod pods;
mod read_model;
mod stored;
mod throttling;
#[cfg(test)]
mod traced;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError, RwLock, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{CgroupPath, Event, Hierarchy, KnobWatch};
use numaward_config::Config;
use numaward_enforce::{Change, Enforcer, Moving};
use numaward_engine::Strategy;
use numaward_model::Report;
use numaward_store::{Loaded, Store};
use numaward_topology::Machine;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use self::{
    cpu_isolation::CpuIsolation, declared::Declarations, drift::DriftController, execution::Worker,
    inbox::Inbox, liveness::Liveness, machine::MissingCapacity, mode::Due, notices::Notices,
    read_model::ReadModel, throttling::Throttled,
};
use super::{
    ControlMetrics, FieldError, Guarantee, Request, State, Target,
    decisions::Decisions,
    policy, rebuild,
    serialization_cache::SerializationCache,
    write_monitor::WriteMonitor,
    xattr_backup::{self, XattrBackup},
};
use crate::{
    error::{AdmissionError, StartError},
    pod,
    ports::{Ports, View},
};

/// How often what is held is looked after.
const TURN: Duration = Duration::from_millis(250);
/// How often others' claims on memory are read anew.
const REFRESH: Duration = Duration::from_secs(30);
/// How much later than that, while the container runtime keeps asking.
const LATEST: Duration = Duration::from_secs(1);

/// What a request for an allocation comes to.
#[derive(Debug)]
pub enum Answer {
    /// It was admitted, and the kernel holds it.
    Admitted(api::Allocation),
    /// It was a dry run.
    Dry(api::DryRun),
}

enum Command {
    Admit {
        request: Box<Request>,
        dry_run: bool,
        answer: oneshot::Sender<Result<Answer, AdmissionError>>,
    },
    Release {
        name: String,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// Cgroups came or went.
    Cgroups(Vec<Event>),
    /// Somebody else wrote knobs.
    Touched,
    /// The container runtime asks or tells.
    Pods(Box<pods::Command>),
    /// What was waited for is done.
    Done,
}

/// Asks the thread. Clones ask the same one.
#[derive(Clone, Debug)]
pub struct Reconciler {
    /// As long as there are connections: few.
    commands: mpsc::Sender<Command>,
    view: Arc<RwLock<Arc<api::Allocations>>>,
}

impl Reconciler {
    /// Takes over what an earlier run promised, and starts the thread. It ends when `stop` is cancelled; what is
    /// promised stays so.
    pub fn start(
        config: &Config,
        hierarchy: Hierarchy,
        enforcer: Enforcer,
        ports: Ports,
        metrics: ControlMetrics,
        watch: Option<KnobWatch>,
        stop: CancellationToken,
    ) -> Result<(Self, JoinHandle<()>), StartError> {
        let (commands, queue) = mpsc::channel();
        let view = Arc::default();
        let write_monitor = watch.map(|watch| Arc::new(WriteMonitor::new(watch)));
        let mut reconciler = ReconcilerLoop::open(
            config,
            hierarchy,
            enforcer,
            ports,
            metrics,
            write_monitor.clone(),
            Arc::clone(&view),
        )?;
        if reconciler.wants_cgroups() {
            // Before it looks what there is, so that nothing is missed in between.
            let commands = commands.clone();
            let tell = move |events: &[Event]| commands.send(Command::Cgroups(events.to_vec())).is_ok();
            reconciler.ports.cgroups.subscribe(Box::new(tell));
        }
        reconciler.adopt();
        reconciler.worker = Some(Worker::start(reconciler.enforcer.clone(), commands.clone())?);
        reconciler.inbox = Some(Inbox::new(queue));
        if let Some(write_monitor) = write_monitor {
            let commands = commands.clone();
            // It ends with the reconciler: nobody takes its commands then.
            write_monitor.spawn(move || commands.send(Command::Touched).is_ok(), stop.clone())?;
        }
        let thread =
            thread::Builder::new().name("guarantee".to_owned()).spawn(move || reconciler.run(&stop))?;
        Ok((Self { commands, view }, thread))
    }

    /// Asks for an allocation; a dry run only tells what would happen.
    pub async fn admit(&self, request: Request, dry_run: bool) -> Result<Answer, AdmissionError> {
        let (answer, result) = oneshot::channel();
        self.send(Command::Admit { request: Box::new(request), dry_run, answer })?;
        result.await.map_err(|_| AdmissionError::Stopping)?
    }

    /// Ends an allocation.
    pub async fn release(&self, name: String) -> Result<(), AdmissionError> {
        let (answer, result) = oneshot::channel();
        self.send(Command::Release { name, answer })?;
        result.await.map_err(|_| AdmissionError::Stopping)?
    }

    /// What is held.
    pub fn allocations(&self) -> Arc<api::Allocations> {
        self.view.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on the container runtime is told of what we write ourselves.
    pub fn tell_runtime(&self, tell: tokio::sync::mpsc::UnboundedSender<Vec<pod::Update>>) {
        // Where it ends already, there is nothing to tell.
        let _ = self.send(Command::Pods(Box::new(pods::Command::Tell(tell))));
    }

    /// Gives what is held.
    pub fn view(&self) -> View {
        let reconciler = self.clone();
        Arc::new(move || reconciler.allocations())
    }

    /// Asks on behalf of the container runtime, and waits for the answer.
    async fn pods<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> pods::Command,
    ) -> Result<T, AdmissionError> {
        let (answer, result) = oneshot::channel();
        self.send(Command::Pods(Box::new(command(answer))))?;
        result.await.map_err(|_| AdmissionError::Stopping)
    }

    fn send(&self, command: Command) -> Result<(), AdmissionError> {
        self.commands.send(command).map_err(|_| AdmissionError::Stopping)
    }
}

struct ReconcilerLoop {
    config: Config,
    machine: Arc<Machine>,
    strategy: Box<dyn Strategy>,
    state: State,
    store: Store<State>,
    written_out: stored::WrittenOut,
    hierarchy: Hierarchy,
    enforcer: Arc<Enforcer>,
    /// Once the loop runs: for what may wait.
    worker: Option<Worker>,
    /// The cgroups of what is waited for.
    busy: Option<BTreeSet<CgroupPath>>,
    /// Once the loop runs: what it is asked.
    inbox: Option<Inbox>,
    /// What the runtime asked, and what has to wait for what it asked before.
    put_off: Vec<pods::Command>,
    /// What the open transactions go back to.
    open: Vec<State>,
    drift: DriftController,
    texts: SerializationCache,
    marks: XattrBackup,
    read_model: ReadModel,
    decisions: Decisions,
    isolation: CpuIsolation,
    declarations: Declarations,
    due: Due,
    ports: Ports,
    metrics: ControlMetrics,
    view: Arc<RwLock<Arc<api::Allocations>>>,
    notices: Notices,
    liveness: Liveness,
    pods: pods::Pods,
    moving: Vec<(CgroupPath, Moving)>,
    /// What was moved, of which cgroup.
    moved: BTreeMap<CgroupPath, api::Moved>,
    /// Whether something was moved that is not told yet.
    is_outdated: bool,
    throttled: Throttled,
    /// What is promised and not there, by name.
    lacks: BTreeMap<String, MissingCapacity>,
    /// Why the policy does not fit the machine, if so.
    unfit: Option<String>,
    start: Instant,
    refreshed: Instant,
}

impl ReconcilerLoop {
    fn open(
        config: &Config,
        hierarchy: Hierarchy,
        enforcer: Enforcer,
        ports: Ports,
        metrics: ControlMetrics,
        write_monitor: Option<Arc<WriteMonitor>>,
        view: Arc<RwLock<Arc<api::Allocations>>>,
    ) -> Result<Self, StartError> {
        let machine = ports.machine.machine();
        let strategy = policy::strategy(config, &machine).map_err(StartError::Policy)?;
        let (store, loaded) = Store::open(&config.state_directory)?;
        let found = xattr_backup::read(&hierarchy);
        let is_complete = matches!(loaded, Loaded::Current { .. });
        let (mut state, set_aside) = match loaded {
            Loaded::Current { ledger, set_aside } => (ledger, set_aside),
            // Also if somebody removed the file: what is held is held.
            Loaded::Fresh => (rebuild::rebuild(None, &found, &hierarchy), Vec::new()),
            Loaded::Previous { ledger, set_aside } => {
                (rebuild::rebuild(Some(ledger), &found, &hierarchy), set_aside)
            }
            Loaded::Rebuild { set_aside } => (rebuild::rebuild(None, &found, &hierarchy), set_aside),
        };
        for file in set_aside {
            let (path, reason) = (file.path.display(), &file.reason);
            if is_complete {
                tracing::warn!(%path, reason, "a damaged ledger was set aside; nothing is missing, as there is another");
                continue;
            }
            let allocations = state.guarantees.len();
            tracing::error!(%path, reason, allocations, "a damaged ledger was set aside, and rebuilt from live cgroups");
        }
        let marks = XattrBackup::new(hierarchy.clone(), found, &state);
        let decisions = Decisions::open(&config.state_directory, &mut state);
        state.undo_admitting(&*strategy);
        let (ledger, uncovered) = strategy.rebase(&state.ledger);
        state.ledger = ledger;
        let notices = Notices::new(hierarchy.clone());
        let mut reconciler = Self {
            config: config.clone(),
            machine,
            strategy,
            state,
            store,
            written_out: stored::WrittenOut::default(),
            hierarchy,
            enforcer: Arc::new(enforcer),
            worker: None,
            busy: None,
            inbox: None,
            put_off: Vec::new(),
            open: Vec::new(),
            drift: DriftController::new(write_monitor),
            texts: SerializationCache::default(),
            marks,
            read_model: ReadModel::default(),
            decisions,
            isolation: CpuIsolation::new(
                config.enforcement.herding_mode(),
                config.enforcement.herding.system_slices.clone(),
            ),
            declarations: Declarations::new(&config.guarantees),
            due: Due::default(),
            ports,
            metrics,
            view,
            notices,
            liveness: Liveness::new(),
            pods: pods::Pods::default(),
            moving: Vec::new(),
            moved: BTreeMap::new(),
            is_outdated: false,
            throttled: Throttled::default(),
            lacks: BTreeMap::new(),
            unfit: None,
            start: Instant::now(),
            refreshed: Instant::now(),
        };
        reconciler.note_lacks(uncovered);
        Ok(reconciler)
    }

    fn tell(&self, cgroup: Option<&CgroupPath>, report: Report) {
        self.ports.events.report(cgroup, report);
    }

    fn run(mut self, stop: &CancellationToken) {
        let mut next = Instant::now() + TURN;
        while !stop.is_cancelled() {
            let has_work = self.has_to_bind() || self.inbox.as_ref().is_some_and(|inbox| !inbox.is_empty());
            let patience =
                if has_work { Duration::ZERO } else { next.saturating_duration_since(Instant::now()) };
            let Some(inbox) = &mut self.inbox else { break };
            if !inbox.receive(patience) {
                break;
            }
            // What the runtime waits for goes first.
            if let Some(command) = inbox.next_of_runtime() {
                self.pod_command(command, false);
            } else if let Some(command) = inbox.next() {
                self.command(command);
            } else {
                self.bind_next();
            }
            let now = Instant::now();
            let is_awaited = self.inbox.as_ref().is_some_and(Inbox::has_runtime);
            if is_awaited && now < next + LATEST {
                continue;
            }
            if now >= next {
                next = now + TURN;
                self.look_after();
            }
            self.settle();
        }
        self.write_out(true);
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Admit { request, dry_run, answer } => {
                let result = self.admit(&request, dry_run);
                self.settle();
                let admitted = matches!(result, Ok(Answer::Admitted(_)));
                // Whoever asked is gone and will neither use nor release it.
                if answer.send(result).is_err() && admitted {
                    tracing::info!(name = request.name, "nobody waits for this allocation any more");
                    let _ = self.release(&request.name);
                }
            }
            Command::Release { name, answer } => {
                let result = self.release_asked(&name);
                self.settle();
                let _ = answer.send(result);
            }
            Command::Cgroups(events) => self.follow_cgroups(&events),
            Command::Touched => self.patrol(Instant::now(), false),
            Command::Pods(command) => self.pod_command(*command, false),
            Command::Done => {}
        }
    }

    /// Whether it matters that cgroups come and go.
    fn wants_cgroups(&self) -> bool {
        self.mode() != EnforcementMode::Off && (self.isolation.is_on() || !self.declarations.is_empty())
    }

    /// Takes over what runs: what is gone is released, what holds is left as it is, what does not is written.
    fn adopt(&mut self) {
        for (name, guarantee) in &self.state.guarantees {
            self.liveness.hold(name, guarantee, &mut self.notices);
        }
        self.release_gone(Instant::now(), false);
        self.remove_strays();
        if let Some(rewritten) = self.uphold() {
            let allocations = self.state.guarantees.len();
            tracing::info!(allocations, rewritten, "allocations of an earlier run were taken over");
        }
        self.follow_mode();
        if self.mode() != EnforcementMode::Off {
            self.reconcile_declared();
        }
        self.herd(true);
        self.publish();
        self.settle();
    }

    /// Writes what does not hold; says how much that was.
    fn uphold(&mut self) -> Option<usize> {
        match self.plan(Change::Upkeep) {
            Ok(plan) => {
                let rewritten = plan.steps().len();
                if let Err(refused) = self.carry_out(plan) {
                    tracing::error!(error = %refused, "not all that is promised could be enforced again");
                }
                Some(rewritten)
            }
            Err(error) => {
                tracing::error!(%error, "what is promised cannot be compared with the kernel");
                None
            }
        }
    }

    /// Takes note of migrations that are over.
    fn note_moved(&mut self) {
        let (figures, noted) = (&self.metrics, &mut self.moved);
        self.moving.retain(|(cgroup, moving)| {
            let migration = match moving {
                Moving::Done(migration) => migration.clone(),
                Moving::Running(result) => match result.try_recv() {
                    Ok(Ok(migration)) => migration,
                    Ok(Err(error)) => {
                        tracing::error!(%cgroup, %error, "pages cannot be moved");
                        return false;
                    }
                    Err(mpsc::TryRecvError::Empty) => return true,
                    Err(mpsc::TryRecvError::Disconnected) => return false,
                },
            };
            self.is_outdated = true;
            let (moved, left) = (migration.moved(), migration.left());
            figures.migrated(moved);
            if moved.0 > 0 || left.0 > 0 {
                let noted = noted.entry(cgroup.clone()).or_default();
                (noted.moved_bytes, noted.left_bytes) = (noted.moved_bytes + moved.0, left.0);
                tracing::info!(%cgroup, nodes = %migration.nodes, %moved, %left, took = ?migration.took, "pages were moved");
            }
            false
        });
    }

    /// What was moved of a cgroup, or still is.
    fn moved_of(&self, cgroup: &CgroupPath) -> Option<api::Moved> {
        let running = self.moving.iter().any(|(moving, _)| moving == cgroup);
        let moved = self.moved.get(cgroup).copied();
        (running || moved.is_some()).then(|| api::Moved { running, ..moved.unwrap_or_default() })
    }

    fn look_after(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.refreshed) >= REFRESH {
            self.refreshed = now;
            self.enforcer.refresh();
            self.remove_strays();
            self.herd(true);
            self.due.declared = true;
        }
        self.release_gone(now, true);
        self.patrol(now, true);
        self.note_moved();
        if self.is_outdated {
            self.publish_view();
        }
        self.write_out(false);
        self.look_at_throttled(now);
        self.follow_machine(now);
        self.look_after_pods(now);
    }
}

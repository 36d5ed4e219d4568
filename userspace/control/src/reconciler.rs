//! The thread that owns what is promised.

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
    fmt::Write as _,
    fs, io,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{
    CgroupPath, EXEC_PARENT, Event, Hierarchy, KnobWatch,
    knob::{Limit, Partition},
};
use numaward_config::Config;
use numaward_enforce::{Change, EnforceError, Enforcer, Failure, Moving};
use numaward_engine::{self as engine, Allocation, Ledger, OwnerId, ResizeError, Strategy, Terms};
use numaward_model::{Promises, Report, Settings};
use numaward_store::{Loaded, Store, StoreError, fault};
use numaward_topology::{Bytes, Machine};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use self::{
    cpu_isolation::CpuIsolation, declared::Declarations, drift::DriftController, execution::Worker,
    inbox::Inbox, liveness::Liveness, machine::MissingCapacity, mode::Due, notices::Notices,
    read_model::ReadModel, throttling::Throttled,
};
use super::{
    ControlMetrics, FieldError, Guarantee, PolicyError, Request, State, Target,
    decisions::Decisions,
    explain, policy, rebuild,
    serialization_cache::SerializationCache,
    write_monitor::WriteMonitor,
    xattr_backup::{self, XattrBackup},
};
use crate::{
    pod,
    ports::{Ports, View},
    spans,
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

/// Why something asked for was not done. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// A field is wrong.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// It conflicts with what is held.
    #[error("{0}")]
    Conflict(FieldError),
    /// The engine says no.
    #[error("{}", in_words(.0))]
    Rejected(api::Rejection, api::Explanation),
    /// Nothing is promised at all.
    #[error("enforcement.mode is off in the configuration: nothing is promised")]
    Off,
    /// The resources of a container cannot be changed within its promise.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// There is no such allocation.
    #[error("there is no allocation named {0:?}")]
    Unknown(String),
    /// The kernel does not take the settings.
    #[error("the settings cannot be enforced, and nothing was changed: {0}")]
    Enforce(#[from] EnforceError),
    /// The kernel did not take all settings.
    #[error("the settings cannot be enforced: {0}")]
    Failed(#[from] Box<Failure>),
    /// A cgroup could not be made.
    #[error("{path}: cannot make this cgroup: {source}", path = .path.display())]
    Make {
        /// Its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The ledger could not be stored.
    #[error("the ledger cannot be stored, and nothing was changed: {0}")]
    Store(#[from] StoreError),
    /// The machine changed, so that the policy does not fit it.
    #[error(
        "the policy does not fit the machine, which changed ({0}): nothing new is promised until it fits again"
    )]
    Unfit(String),
    /// The daemon is ending.
    #[error("the daemon is stopping")]
    Stopping,
}

fn in_words(rejection: &api::Rejection) -> String {
    let mut text = format!("{}: {}", rejection.reason, rejection.message);
    for lack in &rejection.shortfalls {
        let amount = |amount: u64| match lack.resource.as_str() {
            "cpu" => amount.to_string(),
            _ => Bytes(amount).to_string(),
        };
        let (requested, free) = (amount(lack.requested), amount(lack.free));
        // Writing to a String cannot fail.
        let _ = write!(text, "; node {}: {} requested {requested}, free {free}", lack.node, lack.resource);
    }
    text
}

pub(super) fn listed(problems: &[PolicyError]) -> String {
    problems.iter().fold(String::new(), |text, problem| text + "\n  " + &problem.to_string())
}

/// Guarantees cannot be given at all.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The policy does not fit the machine.
    #[error("the policy cannot be applied:{}", listed(.0))]
    Policy(Vec<PolicyError>),
    /// The ledger cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No thread can be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
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

    /// Cgroups made for commands that are promised nothing: the daemon died in between, or the command went on running
    /// after its release.
    fn remove_strays(&self) {
        let held: BTreeSet<_> = self.state.guarantees.values().map(|guarantee| &guarantee.cgroup).collect();
        let Ok(parent) = CgroupPath::root().child(EXEC_PARENT) else { return };
        let Ok(entries) = fs::read_dir(self.hierarchy.dir(&parent)) else { return };
        for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let path = entry.file_name().to_str().and_then(|name| parent.child(name).ok());
            if path.is_some_and(|path| !held.contains(&path)) {
                // One that is not empty stays: somebody runs in it.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }

    /// The settings that follow from an allocation.
    fn settings(&self, request: &Request, allocation: &Allocation) -> Settings {
        let nodes = allocation.memory_nodes();
        let memory = policy::memory_settings(&self.config, &request.limited());
        Settings {
            cpus: allocation.cpus.clone(),
            mems: (!nodes.is_empty()).then_some(nodes),
            memory_min: memory.min.map(Limit::Bytes),
            memory_low: memory.low.map(Limit::Bytes),
            memory_high: memory.high.map(Limit::Bytes),
            memory_max: Some(Limit::Bytes(request.limit)),
            partition: Some(request.partition).filter(|partition| *partition != Partition::Member),
            hugetlb: request.hugepages().map(|(size, bytes)| (size, Limit::Bytes(bytes))).collect(),
            beside: None,
        }
    }

    /// The cgroup of a request. That of a command is not there yet.
    fn cgroup(&self, request: &Request) -> Result<CgroupPath, AdmissionError> {
        let path = match &request.target {
            Target::Exec => {
                let root = CgroupPath::root().child(EXEC_PARENT);
                return root.and_then(|parent| parent.child(&request.name)).map_err(|error| {
                    AdmissionError::Field(FieldError::new(
                        "name",
                        error.to_string(),
                        "the name of a directory",
                    ))
                });
            }
            Target::Cgroup(path) => path.clone(),
            Target::Container(_) => return Err(AdmissionError::Conflict(crate::request::is_the_runtimes())),
            Target::Unit(unit) => {
                let wrong = |problem: String| {
                    AdmissionError::Field(FieldError::new(
                        "target.unit",
                        problem,
                        "a unit that runs on this host",
                    ))
                };
                let cgroups = self.hierarchy.walk().map_err(|error| wrong(error.to_string()))?;
                let of_unit = |path: &CgroupPath| path.components().last() == Some(unit);
                cgroups.into_iter().map(|cgroup| cgroup.path).find(of_unit).ok_or_else(|| {
                    wrong(format!("{unit} has no cgroup: there is no such unit, or it does not run"))
                })?
            }
        };
        Ok(path)
    }

    /// Refuses a cgroup that is not there, or that uses more than it is to have.
    fn check_cgroup(&self, path: &CgroupPath, request: &Request) -> Result<(), AdmissionError> {
        let dir = self.hierarchy.dir(path);
        if !matches!(self.hierarchy.id_of(path), Ok(Some(_))) {
            let problem = format!("{path} does not exist (there is no directory {})", dir.display());
            return Err(FieldError::new("target.cgroup", problem, "a cgroup that exists").into());
        }
        let used = fs::read_to_string(dir.join("memory.current"));
        let used = used.ok().and_then(|text| text.trim().parse().ok()).map(Bytes);
        if let Some(used) = used.filter(|used| *used > request.limit) {
            let problem = format!("{path} uses {used} now, more than the {} asked for", request.limit);
            return Err(FieldError::new("memory", problem, format!("at least {used}")).into());
        }
        Ok(())
    }

    fn admit(&mut self, request: &Request, dry_run: bool) -> Result<Answer, AdmissionError> {
        if self.mode() == EnforcementMode::Off && !dry_run {
            return Err(AdmissionError::Off);
        }
        if let Some(held) = self.state.guarantees.get(&request.name) {
            let problem = format!("{:?} is held by {}", request.name, held.cgroup);
            return Err(AdmissionError::Conflict(FieldError::new(
                "name",
                problem,
                "a name that is not in use",
            )));
        }
        let path = self.cgroup(request)?;
        self.admit_at(request, &path, dry_run)
    }

    /// Asks for an allocation for this cgroup. That of a command is not there yet.
    fn admit_at(
        &mut self,
        request: &Request,
        path: &CgroupPath,
        dry_run: bool,
    ) -> Result<Answer, AdmissionError> {
        let _span = spans::admit(&request.name, dry_run);
        let conflict = |field: &str, problem: String, allowed: &str| {
            AdmissionError::Conflict(FieldError::new(field, problem, allowed))
        };
        if let Some(held) = self.state.guarantees.get(&request.name) {
            let problem = format!("{:?} is held by {}", request.name, held.cgroup);
            return Err(conflict("name", problem, "a name that is not in use"));
        }
        if self.state.pods.contains_key(&request.name) {
            let problem = format!("{:?} is held by a pod", request.name);
            return Err(conflict("name", problem, "a name that is not in use"));
        }
        if request.target != Target::Exec {
            self.check_cgroup(path, request)?;
        }
        let overlaps = |other: &CgroupPath| path.contains(other) || other.contains(path);
        if let Some((name, held)) = self.state.guarantees.iter().find(|(_, held)| overlaps(&held.cgroup)) {
            let problem =
                format!("{path} overlaps with {}, which the allocation {name:?} holds", held.cgroup);
            return Err(conflict(
                "target",
                problem,
                "a cgroup neither above nor below one that has an allocation",
            ));
        }

        self.check_fit()?;
        let terms = Terms { policy: request.policy, ..Terms::default() };
        self.check_terms(&terms)?;
        let started = Instant::now();
        let decision = spans::decide(&*self.strategy, &self.state.ledger, &request.engine, &terms);
        let explanation = explain::explanation(&decision.explanation);
        if !dry_run {
            self.metrics.decided(&decision, started.elapsed());
        }
        let grants = match decision.outcome {
            Ok(grants) => grants,
            Err(rejection) => {
                let rejection = explain::rejection(&rejection);
                if dry_run {
                    let dry = api::DryRun {
                        admitted: false,
                        allocation: None,
                        rejection: Some(rejection),
                        explanation,
                    };
                    return Ok(Answer::Dry(dry));
                }
                // One that is declared is tried again and again, and told once.
                if request.declared.is_none() {
                    tracing::info!(name = request.name, reason = in_words(&rejection), "refused");
                }
                return Err(AdmissionError::Rejected(rejection, explanation));
            }
        };
        let allocation = grants.into_iter().next().map(|grant| grant.allocation).unwrap_or_default();
        let settings = self.settings(request, &allocation);
        if dry_run {
            let allocation = self.describe(&request.name, &request.target, path, &allocation, &settings, &[]);
            let dry =
                api::DryRun { admitted: true, allocation: Some(allocation), rejection: None, explanation };
            return Ok(Answer::Dry(dry));
        }

        let is_ours = request.target == Target::Exec;
        if is_ours {
            self.make(path)?;
        }
        let ledger = self.start_all(decision.ledger, &request.engine);
        match self.hold(request, path, settings, ledger, explanation) {
            Ok(()) => {
                tracing::info!(
                    name = request.name, cgroup = %path,
                    cpus = %allocation.cpus.clone().unwrap_or_default(), nodes = %allocation.memory_nodes(),
                    "promised"
                );
                // As it was just published.
                self.read_model.of(&request.name).map(Answer::Admitted).ok_or(AdmissionError::Stopping)
            }
            Err(refused) => {
                // The others may have their CPUs back.
                self.due.herd = true;
                if is_ours {
                    let _ = fs::remove_dir(self.hierarchy.dir(path));
                }
                Err(refused)
            }
        }
    }

    /// Refuses terms that do not go with the configuration or the machine.
    fn check_terms(&self, terms: &Terms) -> Result<(), AdmissionError> {
        self.strategy.check_terms(terms).map_err(|problem| {
            let allowed = "a policy that goes with topologyManagerPolicyOptions and the machine";
            FieldError::new("policy", listed(&[problem.into()]), allowed).into()
        })
    }

    /// What is promised counts as running from the start: there is no later moment at which we would learn of it.
    fn start_all(&self, ledger: Ledger, request: &engine::Request) -> Ledger {
        request
            .containers
            .iter()
            .fold(ledger, |ledger, container| self.strategy.started(&ledger, &request.owner, &container.name))
    }

    /// Makes the cgroup of a command.
    fn make(&self, path: &CgroupPath) -> Result<(), AdmissionError> {
        let dir = self.hierarchy.dir(path);
        fs::create_dir(&dir).map_err(|source| AdmissionError::Make { path: dir, source })?;
        fault::point("guarantee.made");
        Ok(())
    }

    fn hold(
        &mut self,
        request: &Request,
        path: &CgroupPath,
        settings: Settings,
        ledger: Ledger,
        explanation: api::Explanation,
    ) -> Result<(), AdmissionError> {
        let mut change = self.begin();
        // From now on nobody else is promised any of it.
        change.state.ledger = ledger;
        change.state.admitting.insert(request.name.clone());
        change.make_room(path);
        let gone = || EnforceError::Gone { cgroup: path.clone() };
        let id = change.hierarchy.id_of(path).ok().flatten().ok_or_else(gone)?;
        let plan = change.plan(Change::Hold(path.clone(), settings.clone()))?;
        change.state.herded.remove(path);
        let guarantee = Guarantee {
            target: request.target.clone(),
            cgroup: path.clone(),
            id,
            settings,
            declared: request.declared.clone(),
            explanation,
        };
        change.state.guarantees.insert(request.name.clone(), guarantee);
        change.state.admitting.remove(&request.name);
        change.enforce(plan)?;
        self.decisions.note(&request.name, &self.state);
        self.look_after_guarantee(&request.name);
        self.publish();
        Ok(())
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

    fn release(&mut self, name: &str) -> Result<(), AdmissionError> {
        let _span = spans::release(name);
        let Some(guarantee) = self.state.guarantees.get(name).cloned() else {
            return Err(AdmissionError::Unknown(name.to_owned()));
        };
        let after = self.strategy.removed(&self.state.ledger, &OwnerId::from(name));
        let change = match guarantee.target {
            Target::Exec => Change::Release(guarantee.cgroup.clone()),
            _ => self.let_go(&guarantee.cgroup, &after),
        };
        let plan = self.plan(change)?;
        // The CPUs stay taken until the knobs are given back. After a crash in between, the next start goes on here.
        self.state.releasing.insert(name.to_owned());
        if let Err(refused) = self.carry_out(plan) {
            let AdmissionError::Failed(failure) = &refused else {
                self.state.releasing.remove(name);
                return Err(refused);
            };
            tracing::warn!(name, error = %failure, "not everything could be given back");
        }
        fault::point("guarantee.released");
        let mut change = self.begin();
        change.state.guarantees.remove(name);
        change.state.releasing.remove(name);
        change.state.ledger = change.strategy.removed(&change.state.ledger, &OwnerId::from(name));
        if !change.lacks.is_empty() {
            // What it gives back belongs to whoever lacks it.
            change.recharge();
        }
        change.store()?;
        self.liveness.let_go(name, &mut self.notices);
        self.drift.forget(&guarantee.cgroup);
        self.moved.remove(&guarantee.cgroup);
        // Before its cgroup goes: whoever sees that it is gone finds it released.
        self.publish();
        if guarantee.target == Target::Exec {
            let dir = self.hierarchy.dir(&guarantee.cgroup);
            if let Err(error) = fs::remove_dir(&dir)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(cgroup = %guarantee.cgroup, %error, "the cgroup is still in use and stays");
            }
            fault::point("guarantee.removed");
        }
        tracing::info!(name, cgroup = %guarantee.cgroup, "released");
        Ok(())
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

    /// Tells others what is promised.
    fn publish(&mut self) {
        self.due.herd = true;
        self.due.declared = true;
        self.throttled.outdated();
        self.follow_pool();
        self.drift.follow(&self.state.book);
        self.describe_changed();
        self.ports.assignments.assigned(Promises::new(self.read_model.promises(), self.state.ledger.clone()));
        self.show();
    }

    /// Tells what is held to whoever asks.
    fn publish_view(&mut self) {
        self.describe_changed();
        self.show();
    }

    fn show(&mut self) {
        self.is_outdated = false;
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(self.allocations());
    }

    /// What is held, as it was described last.
    fn allocations(&self) -> api::Allocations {
        let ledger = &self.state.ledger;
        let free_cpus = &self.strategy.allocatable().cpus & ledger.shared_pool();
        let memory = ledger.memory();
        let nodes = self.machine.nodes.iter().map(|(&id, node)| api::NodePromises {
            node: id.0,
            free_cpus: (&free_cpus & &node.cpus).to_string(),
            memory: memory.get(&id).into_iter().flatten().map(Into::into).collect(),
        });
        api::Allocations {
            allocations: self.read_model.allocations(),
            shared_cpus: ledger.shared_pool().to_string(),
            nodes: nodes.collect(),
            enforcement: api::Enforcement { mode: self.mode(), herding: self.herding() },
            waiting: self.declarations.waiting(),
        }
    }

    fn describe(
        &self,
        name: &str,
        target: &Target,
        cgroup: &CgroupPath,
        allocation: &Allocation,
        settings: &Settings,
        drift: &[api::Drift],
    ) -> api::Allocation {
        api::Allocation {
            name: name.to_owned(),
            target: target.into(),
            cgroup: cgroup.to_string(),
            directory: self.hierarchy.dir(cgroup).display().to_string(),
            cpus: allocation.cpus.clone().unwrap_or_default().to_string(),
            nodes: allocation.memory_nodes().to_string(),
            memory: allocation.blocks.iter().map(Into::into).collect(),
            settings: settings
                .values()
                .0
                .into_iter()
                .map(|(knob, value)| (knob.to_string(), value.to_string()))
                .collect(),
            enforced: self.mode() == EnforcementMode::On,
            declared: None,
            drift: drift.to_vec(),
            stalled: self.throttled.stalls(name),
            moved: self.moved_of(cgroup),
            lack: None,
            explanation: None,
        }
    }
}

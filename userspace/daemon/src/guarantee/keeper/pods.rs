//! Containers of pods: placed while the runtime creates them, and looked after like every other guarantee.
//!
//! Problem: a container's CPUs and nodes must be decided before its cgroup exists, and in time; the runtime
//! writes them, may fail to, may be restarted, and so may we.
//!
//! Terms: an *owner* is what the engine decides on: a pod as a whole where the API server has told of it (its
//! owner is the pod's UID), else one container (`UID/NAME`). A container is *placed* when what it gets has been
//! decided and stored; it is *bound* when its cgroup exists and is held: from then on it is a guarantee like
//! others if anything is promised to it, else it keeps to the shared pool.
//!
//! Algorithm: [`Owner::run_pod`] admits pods as a whole. [`Owner::create`] admits what is not admitted yet, and
//! answers with settings for the runtime. [`Owner::bind`] runs when the process exists but not its program:
//! whatever the runtime has not written is written then, ancestors included, and the probes are told.
//! [`Owner::synchronize`] compares all of that with what runs. When the shared pool changes, containers that
//! hold no CPUs follow; the runtime is told later, so that it repeats the new pool in what it writes itself.
//! [`waiting`] has who runs without what it asks for, [`memory`] what protects memory.
//!
//! Invariants: what the runtime is answered is stored; a container that runs is never refused, whatever the
//! engine says about it.

mod memory;
mod waiting;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, Limit, Value},
};
use numaward_engine::{self as engine, Allocation, ContainerName, OwnerId};
use numaward_topology::{Bytes, CpuSet};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

pub use self::memory::MemoryAsk;
use self::waiting::Waiting;
use super::{Owner, Refused};
use crate::{
    api,
    config::enforcement::Mode,
    enforce::{Change, EnforceError, Settings},
    guarantee::{FieldError, Guarantee, State, Target, explain},
    observe::containers,
    otlp::spans,
};

/// Shared containers that are held against the shared pool in one turn.
const LOOKED_AT: usize = 16;
/// A container that was created but has no cgroup for so long will not get one.
const START_LIMIT: Duration = Duration::from_mins(10);

/// Which pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, as the runtime knows it.
    pub uid: String,
}

/// The name, in a pod's request, of what its containers share that have nothing of their own: no container's.
pub const POD_SHARE: &str = "(pod)";

/// Out of what a container is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Slice {
    /// Its own.
    #[default]
    Own,
    /// What the pod holds as a whole, beside other containers ([`POD_SHARE`]).
    Pod,
    /// The same, before those that run together.
    PodAtFirst,
}

/// Which container of which pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodContainer {
    /// The pod.
    pub pod: PodName,
    /// Its name within the pod.
    pub container: String,
    /// The runtime's id.
    pub id: String,
    /// The sandbox of its pod.
    pub sandbox: String,
    /// Who holds its allocation in the ledger.
    pub owner: String,
    /// Which of the owner's allocations it is.
    #[serde(default)]
    pub slice: Slice,
}

impl PodContainer {
    /// The name of its allocation in its owner's account.
    fn slice_name(&self) -> ContainerName {
        match self.slice {
            Slice::Own => self.container.as_str().into(),
            Slice::Pod | Slice::PodAtFirst => POD_SHARE.into(),
        }
    }

    /// Whether it shares what its pod holds as a whole.
    pub fn shares_pod(&self) -> bool {
        self.slice != Slice::Own
    }
}

impl State {
    /// Takes note of a container that holds its cgroup, where only that is known.
    pub(in crate::guarantee) fn take_over_container(&mut self, of: &PodContainer, cgroup: &CgroupPath) {
        let is_alone = of.owner != of.pod.uid;
        self.pods.entry(of.owner.clone()).or_insert_with(|| Admitted {
            pod: of.pod.clone(),
            sandbox: of.sandbox.clone(),
            container: is_alone.then(|| of.container.clone()),
            explanation: api::Explanation::default(),
        });
        // The runtime tells again, as soon as it is connected.
        let memory = MemoryAsk::default();
        self.containers.insert(of.id.clone(), Placed { of: of.clone(), cgroup: cgroup.clone(), memory });
    }
}

impl From<&PodContainer> for api::PodContainer {
    fn from(of: &PodContainer) -> Self {
        let PodName { namespace, name, uid } = of.pod.clone();
        Self {
            namespace,
            pod: name,
            container: of.container.clone(),
            pod_uid: uid,
            shares_pod: of.shares_pod(),
        }
    }
}

/// An owner that was admitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Admitted {
    /// Its pod.
    pub pod: PodName,
    /// The sandbox for which it was admitted last.
    pub sandbox: String,
    /// The container that the owner is; none: the pod as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Why it was placed there: kept elsewhere.
    #[serde(skip)]
    pub explanation: api::Explanation,
}

/// A container that was placed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placed {
    /// Which.
    pub of: PodContainer,
    /// Its cgroup, which may not exist yet.
    pub cgroup: CgroupPath,
    /// What its protection follows from.
    #[serde(default)]
    pub memory: MemoryAsk,
}

/// `memory.min`, `memory.low` and `memory.high`; none: not managed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MemoryKnobs {
    min: Option<Bytes>,
    low: Option<Bytes>,
    high: Option<Bytes>,
}

/// What is asked for with a container or a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The whole pod, which is known.
    Pod(engine::Request),
    /// This container alone.
    Container(engine::Request),
    /// Nothing but its share of what is nobody's.
    Nothing,
}

/// A pod that is to run.
#[derive(Clone, Debug)]
pub struct PodAsk {
    /// Which.
    pub pod: PodName,
    /// Its sandbox.
    pub sandbox: String,
    /// What is asked for.
    pub asked: Asked,
    /// How it wants to be placed.
    pub terms: engine::Terms,
    /// What the explanation should say besides.
    pub notes: Vec<String>,
}

/// A container that is to be placed.
#[derive(Clone, Debug)]
pub struct ContainerAsk {
    /// Its pod, with what is asked for.
    pub pod: PodAsk,
    /// The runtime's id.
    pub id: String,
    /// Its name within the pod.
    pub name: String,
    /// Its cgroup, which may not exist yet.
    pub cgroup: CgroupPath,
    /// Which of its pod's allocations it is, where the pod is admitted as a whole.
    pub slice: Slice,
    /// What its protection follows from.
    pub memory: MemoryAsk,
    /// What the runtime has it pinned to, CPUs and nodes.
    pub pinned: (Option<CpuSet>, Option<numaward_topology::NodeSet>),
}

impl ContainerAsk {
    /// The owner that the container is by itself.
    fn alone(&self) -> String {
        format!("{}/{}", self.pod.pod.uid, self.name)
    }
}

/// What a container is to get from the runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// The runtime's id of the container.
    pub id: String,
    /// What it is to hold.
    pub settings: Settings,
}

/// What came of a comparison with what runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Synchronized {
    /// What the runtime has to change.
    pub updates: Vec<Update>,
    /// Containers that ran without their pins, with why.
    pub unpinned: Vec<(String, Unpinned)>,
}

/// Whether something is asked for the first time, or tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    First,
    Again,
}

/// Why a container ran without what it should have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unpinned {
    /// It was started while we were not connected.
    Away,
    /// It was started while we were not connected, and what it asks for is not there.
    DoesNotFit,
    /// The policy does not fit the machine any more, so that nothing new is promised.
    Unfit,
    /// The ledger could not be stored.
    Ledger,
    /// The kernel did not take the settings.
    Enforcement,
}

impl Unpinned {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Away, Self::DoesNotFit, Self::Unfit, Self::Ledger, Self::Enforcement];

    /// A short name, for a metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Away => "away",
            Self::DoesNotFit => "does_not_fit",
            Self::Unfit => "unfit",
            Self::Ledger => "ledger",
            Self::Enforcement => "enforcement",
        }
    }
}

/// What the runtime asks of us, or tells.
pub(crate) enum Command {
    RunPod {
        ask: PodAsk,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Create {
        ask: ContainerAsk,
        answer: oneshot::Sender<Result<(Settings, Option<Unpinned>), Refused>>,
    },
    Bind {
        id: String,
        /// What to make of it if it is not known: its creation was not answered in time.
        ask: Option<Box<ContainerAsk>>,
        answer: oneshot::Sender<Option<Unpinned>>,
    },
    Stopped {
        id: String,
        answer: oneshot::Sender<()>,
    },
    PodOver {
        uid: String,
        sandbox: String,
        answer: oneshot::Sender<()>,
    },
    Synchronize {
        containers: Vec<ContainerAsk>,
        /// The UIDs of pods by the ids of their sandboxes.
        sandboxes: BTreeMap<String, String>,
        complete: bool,
        answer: oneshot::Sender<Synchronized>,
    },
    Resize {
        id: String,
        to: engine::Resources,
        memory: Option<MemoryAsk>,
        answer: oneshot::Sender<Result<Option<Settings>, Refused>>,
    },
    /// What the containers of a pod share that have nothing of their own.
    ResizePod {
        uid: String,
        to: engine::Resources,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    /// From now on the runtime is told of settings that we write ourselves.
    Tell(mpsc::UnboundedSender<Vec<Update>>),
}

/// Why nobody else may promise to a container, or take it back.
pub(in crate::guarantee) fn is_the_runtimes() -> FieldError {
    let problem = "a container of a pod is placed when the runtime creates it, and released with its pod";
    FieldError::new("target", problem, "a cgroup, a unit or a command")
}

/// What of pods is remembered, but not over a restart.
#[derive(Default)]
pub(super) struct Pods {
    /// Containers whose cgroups are held.
    bound: BTreeSet<String>,
    /// Containers to bind as soon as there is time.
    to_bind: VecDeque<String>,
    /// Since when a container has been waited for.
    since: BTreeMap<String, Instant>,
    /// The pool that shared containers were given last.
    pool: CpuSet,
    /// The container that was looked at last.
    looked_at: Option<String>,
    /// Those that run without what they ask for.
    waiting: Waiting,
    /// Where to tell the runtime of what we have written.
    tell: Option<mpsc::UnboundedSender<Vec<Update>>>,
}

impl Pods {
    fn tell(&self, updates: Vec<Update>) {
        if let Some(tell) = self.tell.as_ref().filter(|_| !updates.is_empty()) {
            // Who listened is gone at the end only.
            let _ = tell.send(updates);
        }
    }
}

/// The name of a container's guarantee.
fn name_of(of: &PodContainer) -> String {
    containers::name(&of.pod.namespace, &of.pod.name, &of.container)
}

impl Owner {
    /// Does what the runtime asks for.
    pub(super) fn pod_command(&mut self, command: Command) {
        // Whoever asked may have gone: what was decided stands, and is compared with what runs later.
        match command {
            Command::Tell(tell) => self.pods.tell = Some(tell),
            Command::RunPod { answer, .. } if self.mode() == Mode::Off => drop(answer.send(Ok(()))),
            Command::Bind { answer, .. } if self.mode() == Mode::Off => drop(answer.send(None)),
            Command::Create { answer, .. } if self.mode() == Mode::Off => {
                drop(answer.send(Ok((Settings::default(), None))));
            }
            Command::Synchronize { answer, .. } if self.mode() == Mode::Off => {
                drop(answer.send(Synchronized::default()));
            }
            Command::Create { ask, answer } => {
                let created = self.create(&ask);
                drop(
                    answer.send(created.map(|(settings, unpinned)| (self.told(&ask.id, settings), unpinned))),
                );
            }
            Command::RunPod { ask, answer } => drop(answer.send(self.run_pod(&ask))),
            Command::Bind { id, ask, answer } => {
                if let Some(ask) = ask.filter(|_| !self.state.containers.contains_key(&id)) {
                    self.adopt_started(&ask);
                }
                let _ = answer.send(self.bind(&id));
            }
            Command::Stopped { id, answer } => {
                self.stopped(&id);
                let _ = answer.send(());
            }
            Command::PodOver { uid, sandbox, answer } => {
                self.pod_over(&uid, &sandbox);
                let _ = answer.send(());
            }
            Command::Synchronize { containers, sandboxes, complete, answer } => {
                let mut result = self.synchronize(&containers, &sandboxes, complete);
                if self.mode() != Mode::On {
                    for update in result.updates.drain(..) {
                        self.told(&update.id, update.settings);
                    }
                }
                drop(answer.send(result));
            }
            Command::ResizePod { uid, to, answer } => drop(answer.send(self.resize_pod(&uid, &to))),
            Command::Resize { id, to, memory, answer } => {
                let resized = self.resize(&id, &to, memory);
                drop(answer.send(resized.map(|held| held.map(|settings| self.told(&id, settings)))));
            }
        }
    }

    /// What the runtime is told to set: nothing in a dry run.
    fn told(&self, id: &str, settings: Settings) -> Settings {
        if self.mode() == Mode::On {
            return settings;
        }
        for (knob, value) in settings.values().0 {
            tracing::info!(container = id, %knob, %value, "dry run: the runtime would be told");
        }
        Settings::default()
    }

    /// Admits a pod as a whole.
    fn run_pod(&mut self, ask: &PodAsk) -> Result<(), Refused> {
        let Asked::Pod(request) = &ask.asked else { return Ok(()) };
        let _span = spans::admit(request.owner.as_str(), false);
        let before = self.state.clone();
        self.admit_owner(request, ask, None, Attempt::First)?;
        self.store_or_undo(before)?;
        self.publish();
        Ok(())
    }

    /// Stores the state; what cannot be stored is undone.
    fn store_or_undo(&mut self, before: State) -> Result<(), Refused> {
        if self.state == before {
            return Ok(());
        }
        if let Err(error) = self.save() {
            self.state = before;
            return Err(error.into());
        }
        Ok(())
    }

    /// Lets the engine decide, unless the owner holds something already. Nothing is stored yet.
    fn admit_owner(
        &mut self,
        request: &engine::Request,
        ask: &PodAsk,
        container: Option<&str>,
        attempt: Attempt,
    ) -> Result<(), Refused> {
        let owner = request.owner.as_str();
        if let Some(admitted) = self.state.pods.get_mut(owner) {
            admitted.sandbox.clone_from(&ask.sandbox);
            return Ok(());
        }
        if self.take_over_imported(ask) {
            return Ok(());
        }
        self.check_fit()?;
        let mut notes = ask.notes.clone();
        let mut terms = ask.terms.clone();
        if let Err(problem) = self.check_terms(&terms) {
            notes.push(format!("the pod's own topology policy cannot be applied: {problem}"));
            terms.policy = None;
        }
        let started = Instant::now();
        let decision = spans::decide(&*self.strategy, &self.state.ledger, request, &terms);
        if attempt == Attempt::First || decision.outcome.is_ok() {
            self.figures.decided(&decision, started.elapsed());
        }
        let mut explanation = explain::explanation(&decision.explanation);
        explanation.notes = notes;
        match decision.outcome {
            Ok(_) => {
                self.state.ledger = decision.ledger;
                let admitted = Admitted {
                    pod: ask.pod.clone(),
                    sandbox: ask.sandbox.clone(),
                    container: container.map(str::to_owned),
                    explanation,
                };
                self.state.pods.insert(owner.to_owned(), admitted);
                Ok(())
            }
            Err(rejection) => {
                let refused = Refused::Rejected(explain::rejection(&rejection), explanation);
                if attempt == Attempt::First {
                    let pod = format!("{}/{}", ask.pod.namespace, ask.pod.name);
                    tracing::info!(pod, container, reason = %refused, "refused");
                }
                Err(refused)
            }
        }
    }

    /// Places a container: decides, stores, and says what the runtime shall set.
    fn create(&mut self, ask: &ContainerAsk) -> Result<(Settings, Option<Unpinned>), Refused> {
        let _span = spans::admit(&ask.id, false);
        let before = self.state.clone();
        let (owner, unpinned) = match self.place(ask, Attempt::First) {
            Ok(owner) => (owner, None),
            Err(refused @ Refused::Rejected(..)) => return Err(refused),
            // No fault of the container's.
            Err(error) => {
                tracing::error!(container = ask.id, %error, "a container gets no guarantee");
                (ask.alone(), Some(Unpinned::Unfit))
            }
        };
        let placed = self.note_placed(ask, owner);
        let settings = self.settings_of(&placed);
        match self.store_or_undo(before) {
            Ok(()) => {
                self.pods.since.insert(ask.id.clone(), Instant::now());
                self.decisions.note(&placed.of.owner, &self.state);
                self.publish();
                Ok((settings, unpinned))
            }
            Err(error) => {
                // It must keep off what is promised to others, even if nothing can be promised to it.
                tracing::error!(container = ask.id, %error, "a container gets no guarantee");
                Ok((self.shared(), Some(Unpinned::Ledger)))
            }
        }
    }

    /// Admits what is asked for with a container; says who its owner is. Nothing is stored yet.
    fn place(&mut self, ask: &ContainerAsk, attempt: Attempt) -> Result<String, Refused> {
        let alone = |request: &engine::Request| engine::Request {
            owner: ask.alone().into(),
            init_containers: Vec::new(),
            containers: request
                .all_containers()
                .filter(|asked| asked.name.as_str() == ask.name)
                .cloned()
                .collect(),
        };
        let request = match &ask.pod.asked {
            // A pod that was begun container by container goes on so.
            Asked::Pod(request) if self.is_split(&ask.pod.pod.uid) => alone(request),
            Asked::Pod(request) => {
                self.admit_owner(request, &ask.pod, None, attempt)?;
                return Ok(request.owner.to_string());
            }
            // What a kubelet promised, it promised to the pod.
            Asked::Container(_) if self.take_over_imported(&ask.pod) || self.is_whole(&ask.pod.pod.uid) => {
                return Ok(ask.pod.pod.uid.clone());
            }
            Asked::Container(request) => request.clone(),
            Asked::Nothing => return Ok(ask.alone()),
        };
        if !request.containers.is_empty() {
            self.admit_owner(&request, &ask.pod, Some(&ask.name), attempt)?;
        }
        Ok(request.owner.to_string())
    }

    /// Whether containers of this pod were admitted one by one.
    fn is_split(&self, uid: &str) -> bool {
        let of_pod = |admitted: &Admitted| admitted.pod.uid == uid && admitted.container.is_some();
        self.state.pods.values().any(of_pod)
    }

    /// Whether this pod was admitted as a whole.
    fn is_whole(&self, uid: &str) -> bool {
        self.state.pods.get(uid).is_some_and(|admitted| admitted.container.is_none())
    }

    fn note_placed(&mut self, ask: &ContainerAsk, owner: String) -> Placed {
        let of = PodContainer {
            pod: ask.pod.pod.clone(),
            container: ask.name.clone(),
            id: ask.id.clone(),
            sandbox: ask.pod.sandbox.clone(),
            slice: if owner == ask.pod.pod.uid { ask.slice } else { Slice::Own },
            owner,
        };
        let placed = Placed { of, cgroup: ask.cgroup.clone(), memory: ask.memory };
        self.state.containers.insert(ask.id.clone(), placed.clone());
        placed
    }

    pub(super) fn allocation_for(&self, of: &PodContainer) -> Option<&Allocation> {
        self.state.ledger.allocation(&OwnerId::from(of.owner.as_str()), &of.slice_name())
    }

    /// What a container is to hold now.
    fn settings_of(&self, placed: &Placed) -> Settings {
        let limit = |bytes: Option<Bytes>| bytes.map(Limit::Bytes);
        let memory = self.memory_knobs(placed);
        let mut settings = Settings {
            memory_min: limit(memory.min),
            memory_low: limit(memory.low),
            memory_high: limit(memory.high),
            beside: placed.memory.overhead.filter(|_| memory.min.is_some() || memory.low.is_some()),
            ..self.shared()
        };
        if let Some(allocation) = self.allocation_for(&placed.of) {
            settings.cpus = allocation.cpus.clone().or(settings.cpus);
            settings.mems = Some(allocation.memory_nodes()).filter(|nodes| !nodes.is_empty());
        }
        settings
    }

    /// What a container is to hold to which nothing is promised.
    fn shared(&self) -> Settings {
        // The empty set would mean all CPUs.
        let cpus = Some(self.state.ledger.shared_pool().clone()).filter(|pool| !pool.is_empty());
        Settings { cpus, ..Settings::default() }
    }

    /// Whether a container is held to more than the shared pool.
    fn is_promised(&self, placed: &Placed) -> bool {
        self.allocation_for(&placed.of).is_some() || self.memory_knobs(placed) != MemoryKnobs::default()
    }

    /// Holds a container's cgroup, which exists now, and tells the probes.
    fn bind(&mut self, id: &str) -> Option<Unpinned> {
        let placed = self.state.containers.get(id)?.clone();
        match self.try_bind(&placed) {
            Ok(()) => {
                self.pods.since.remove(id);
                self.pods.bound.insert(id.to_owned());
                None
            }
            Err(Refused::Enforce(error)) if error.is_gone() => {
                tracing::debug!(container = id, cgroup = %placed.cgroup, "has no cgroup yet");
                None
            }
            Err(error) => {
                let name = name_of(&placed.of);
                tracing::error!(name, cgroup = %placed.cgroup, %error, "a container is not held to its promise");
                Some(match error {
                    Refused::Store(_) => Unpinned::Ledger,
                    _ => Unpinned::Enforcement,
                })
            }
        }
    }

    fn try_bind(&mut self, placed: &Placed) -> Result<(), Refused> {
        let gone = || EnforceError::Gone { cgroup: placed.cgroup.clone() };
        let id = self.hierarchy.id_of(&placed.cgroup).ok().flatten().ok_or_else(gone)?;
        let before = self.state.clone();
        if placed.of.slice != Slice::PodAtFirst {
            // Init containers that ran before it have ended, and leave what they held.
            let owner = OwnerId::from(placed.of.owner.as_str());
            self.state.ledger = self.strategy.started(&self.state.ledger, &owner, &placed.of.slice_name());
        }
        let settings = self.settings_of(placed);
        if !self.is_promised(placed) {
            self.keep_to_pool(placed)?;
            if self.state.ledger != before.ledger {
                self.store_or_undo(before)?;
                self.publish();
            }
            return Ok(());
        }
        let change = Change::Hold(placed.cgroup.clone(), settings.clone());
        let plan = match self.enforcer.plan(&self.state.book, &change) {
            Ok(plan) => plan,
            Err(error) => {
                self.state = before;
                return Err(error.into());
            }
        };
        let mut name = name_of(&placed.of);
        if self.state.guarantees.get(&name).is_some_and(|held| held.cgroup != placed.cgroup) {
            // The container before it has not been removed yet.
            name = format!("{name}@{}", placed.of.id);
        }
        let explanation = self.state.pods.get(&placed.of.owner).map(|admitted| admitted.explanation.clone());
        let guarantee = Guarantee {
            target: Target::Container(placed.of.clone()),
            cgroup: placed.cgroup.clone(),
            id,
            settings,
            declared: None,
            explanation: explanation.unwrap_or_default(),
        };
        self.state.guarantees.insert(name.clone(), guarantee);
        self.enforce(plan, before)?;
        self.decisions.note(&name, &self.state);
        self.look_after_guarantee(&name);
        self.publish();
        let allocation = self.allocation_for(&placed.of).cloned().unwrap_or_default();
        tracing::info!(
            name, cgroup = %placed.cgroup, cpus = %allocation.cpus.clone().unwrap_or_default(),
            nodes = %allocation.memory_nodes(), "promised"
        );
        Ok(())
    }

    /// Writes the shared pool into a container that holds no CPUs.
    fn keep_to_pool(&self, placed: &Placed) -> Result<bool, EnforceError> {
        let pool = self.shared().cpus.filter(|_| self.mode() == Mode::On);
        let Some(pool) = pool else { return Ok(false) };
        let written = self.enforcer.set(&placed.cgroup, Knob::CpusetCpus, &Value::Cpus(pool))?;
        self.figures.enforced(&written);
        Ok(!written.written.is_empty())
    }

    /// Containers whose CPUs are those of the shared pool, and whose cgroups exist.
    fn sharing(&self) -> impl Iterator<Item = &Placed> {
        self.state.containers.values().filter(|placed| {
            let holds = self.allocation_for(&placed.of).is_some_and(|held| held.cpus.is_some());
            !holds && self.pods.bound.contains(&placed.of.id)
        })
    }

    /// Containers that hold no CPUs leave those that were just promised, and get those that were given back.
    pub(super) fn follow_pool(&mut self) {
        let pool = self.state.ledger.shared_pool().clone();
        if pool == self.pods.pool {
            return;
        }
        self.pods.pool = pool;
        let mut updates = Vec::new();
        let mut held = Vec::new();
        for placed in self.sharing() {
            if self.state.book.get(&placed.cgroup).is_some_and(|record| record.settings.cpus.is_some()) {
                held.push(placed.clone());
                continue;
            }
            match self.keep_to_pool(placed) {
                Ok(_) => {}
                Err(error) if error.is_gone() => continue,
                Err(error) => {
                    tracing::error!(cgroup = %placed.cgroup, %error, "a container does not follow the shared pool");
                }
            }
            updates.push(Update {
                id: placed.of.id.clone(),
                settings: Settings { cpus: Some(self.pods.pool.clone()), ..Settings::default() },
            });
        }
        // Of those with promised memory the book says what CPUs they have.
        let mut changes = Vec::new();
        for placed in held {
            let settings = self.settings_of(&placed);
            updates.push(Update { id: placed.of.id.clone(), settings: settings.clone() });
            changes.push((placed.cgroup.clone(), Some(settings)));
        }
        if !changes.is_empty() {
            let plan = self.enforcer.plan(&self.state.book, &Change::Each(changes));
            if let Err(error) = plan.map_err(Refused::from).and_then(|plan| self.carry_out(plan, None)) {
                tracing::error!(%error, "not all containers follow the shared pool");
            }
        }
        updates.retain(|update| update.settings.cpus.as_ref().is_some_and(|cpus| !cpus.is_empty()));
        if self.mode() == Mode::On {
            self.pods.tell(updates);
        }
    }

    /// A container ended, or was never started. What its pod holds stays until the pod is over.
    fn stopped(&mut self, id: &str) {
        let Some(placed) = self.state.containers.get(id).cloned() else { return };
        let mut names =
            self.state.guarantees.iter().filter_map(|(name, guarantee)| match &guarantee.target {
                Target::Container(of) if of.id == id => Some(name.clone()),
                _ => None,
            });
        if let Some(name) = names.next()
            && let Err(error) = self.release(&name)
        {
            tracing::error!(name, %error, "a container that ended cannot be released; tried again");
        }
        let before = self.state.clone();
        self.forget_container(id);
        let others = |other: &Placed| other.of.owner == placed.of.owner;
        let is_alone = self.state.pods.get(&placed.of.owner).is_some_and(|owner| owner.container.is_some());
        if is_alone && !self.state.containers.values().any(others) {
            self.remove_owner(&placed.of.owner);
        }
        self.store_given_back(&before);
    }

    /// A container's requests are to change to these amounts: within its promise, or not at all. What it is to hold
    /// then; none if it is not known.
    fn resize(
        &mut self,
        id: &str,
        to: &engine::Resources,
        memory: Option<MemoryAsk>,
    ) -> Result<Option<Settings>, Refused> {
        let Some(mut placed) = self.state.containers.get(id).cloned() else { return Ok(None) };
        let before = self.state.clone();
        // What the pod holds as a whole does not change with one of its containers.
        if !placed.of.shares_pod() {
            let (owner, container) = (OwnerId::from(placed.of.owner.as_str()), placed.of.slice_name());
            self.state.ledger = self.strategy.resize(&self.state.ledger, &owner, &container, to)?;
        }
        placed.memory = memory.unwrap_or(placed.memory);
        self.state.containers.insert(id.to_owned(), placed.clone());
        let settings = self.settings_of(&placed);
        if self.state == before {
            return Ok(Some(settings));
        }
        if self.note_settings(&placed.cgroup, &settings) {
            self.change_or_undo(&Change::Hold(placed.cgroup, settings.clone()), before)?;
        } else {
            self.store_or_undo(before)?;
            if self.is_promised(&placed) && self.pods.bound.remove(id) {
                self.pods.to_bind.push_back(id.to_owned());
            }
        }
        let cpus = settings.cpus.clone().unwrap_or_default();
        tracing::info!(name = name_of(&placed.of), %cpus, "resized");
        self.publish();
        Ok(Some(settings))
    }

    /// Notes what a cgroup is to hold from now on; `false` if it is not held.
    fn note_settings(&mut self, cgroup: &CgroupPath, settings: &Settings) -> bool {
        let held = self.state.guarantees.iter().find(|(_, held)| held.cgroup == *cgroup);
        let Some(name) = held.map(|(name, _)| name.clone()) else { return false };
        if let Some(held) = self.state.guarantees.get_mut(&name) {
            held.settings = settings.clone();
        }
        true
    }

    /// What a pod's containers share is to change to these amounts: within its promise, or not at all.
    fn resize_pod(&mut self, uid: &str, to: &engine::Resources) -> Result<(), Refused> {
        let (owner, slice) = (OwnerId::from(uid), ContainerName::from(POD_SHARE));
        let before = self.state.clone();
        self.state.ledger = self.strategy.resize(&self.state.ledger, &owner, &slice, to)?;
        if self.state == before {
            return Ok(());
        }
        let sharing: BTreeMap<CgroupPath, Placed> = self
            .state
            .containers
            .values()
            .filter(|placed| placed.of.owner == uid && placed.of.shares_pod())
            .map(|placed| (placed.cgroup.clone(), placed.clone()))
            .collect();
        let mut changes = Vec::new();
        let mut updates = Vec::new();
        for (path, placed) in &sharing {
            let settings = self.settings_of(placed);
            updates.push(Update { id: placed.of.id.clone(), settings: settings.clone() });
            if self.note_settings(path, &settings) {
                changes.push((path.clone(), Some(settings)));
            }
        }
        self.change_or_undo(&Change::Each(changes), before)?;
        tracing::info!(pod = uid, containers = updates.len(), "what they share was resized");
        self.publish();
        if self.mode() == Mode::On {
            self.pods.tell(updates);
        }
        Ok(())
    }

    /// Makes a change of what is held already, or none of it.
    fn change_or_undo(&mut self, change: &Change, before: State) -> Result<(), Refused> {
        // Those who share what is nobody's leave the CPUs before they are given.
        self.follow_pool();
        let planned = self.enforcer.plan(&self.state.book, change);
        let done = planned.map_err(Refused::from).and_then(|plan| self.enforce(plan, before.clone()));
        if done.is_err() {
            // What was written already is drift now, and goes back.
            self.state = before;
            if let Err(error) = self.save() {
                tracing::error!(%error, "the ledger cannot be stored");
            }
            self.follow_pool();
            self.publish();
        }
        done
    }

    fn forget_container(&mut self, id: &str) {
        self.state.containers.remove(id);
        self.pods.bound.remove(id);
        self.pods.since.remove(id);
        self.pods.waiting.forget(id);
    }

    fn remove_owner(&mut self, owner: &str) {
        self.state.pods.remove(owner);
        let owner = OwnerId::from(owner);
        let request = self.state.ledger.owner(&owner).and_then(|account| account.request.clone());
        // What was never started is given back at once too.
        for container in request.iter().flat_map(|request| request.all_containers()) {
            self.state.ledger = self.strategy.started(&self.state.ledger, &owner, &container.name);
        }
        self.state.ledger = self.strategy.removed(&self.state.ledger, &owner);
        if !self.lacks.is_empty() {
            // What it gives back belongs to whoever lacks it.
            self.recharge();
        }
    }

    /// Stores what was given back. What cannot be stored stays given back: a restart compares with what runs.
    fn store_given_back(&mut self, before: &State) {
        if self.state == *before {
            return;
        }
        if let Err(error) = self.save() {
            tracing::error!(%error, "the ledger cannot be stored");
        }
        self.publish();
    }

    /// A sandbox was stopped: what its pod holds is free, unless the pod has another sandbox by now.
    fn pod_over(&mut self, uid: &str, sandbox: &str) {
        let of_sandbox: Vec<String> = self
            .state
            .containers
            .values()
            .filter(|placed| placed.of.sandbox == sandbox)
            .map(|placed| placed.of.id.clone())
            .collect();
        for id in of_sandbox {
            self.stopped(&id);
        }
        let before = self.state.clone();
        let owners: Vec<String> = self
            .state
            .pods
            .iter()
            .filter(|(_, admitted)| admitted.pod.uid == uid && admitted.sandbox == sandbox)
            .map(|(owner, _)| owner.clone())
            .collect();
        for owner in owners {
            self.remove_owner(&owner);
            tracing::info!(owner, "the pod is over; what it held is free");
        }
        self.store_given_back(&before);
    }

    /// Compares with what runs: what is gone is released, what is not known is adopted, what lacks its pins gets
    /// them.
    fn synchronize(
        &mut self,
        containers: &[ContainerAsk],
        sandboxes: &BTreeMap<String, String>,
        complete: bool,
    ) -> Synchronized {
        if complete {
            let runs: BTreeSet<&str> = containers.iter().map(|ask| ask.id.as_str()).collect();
            let gone: Vec<String> =
                self.state.containers.keys().filter(|id| !runs.contains(id.as_str())).cloned().collect();
            for id in gone {
                self.stopped(&id);
            }
            let over: BTreeSet<(String, String)> = self
                .state
                .pods
                .values()
                .filter(|admitted| !sandboxes.contains_key(&admitted.sandbox))
                .map(|admitted| (admitted.pod.uid.clone(), admitted.sandbox.clone()))
                .collect();
            for (uid, sandbox) in over {
                self.pod_over(&uid, &sandbox);
            }
            self.drop_imported(sandboxes);
        }
        let before = self.state.clone();
        let mut result = Synchronized::default();
        let mut placed = Vec::new();
        for ask in containers {
            let known = self.state.containers.get(&ask.id).cloned();
            let mut reason = None;
            placed.push(if let Some(known) = known {
                self.note_known(ask, known)
            } else {
                let (placed, fits) = self.adopt_container(ask);
                reason = Some(if fits { Unpinned::Away } else { Unpinned::DoesNotFit });
                placed
            });
            if let Some(reason) = reason {
                result.unpinned.push((ask.id.clone(), reason));
            }
        }
        if let Err(error) = self.store_or_undo(before) {
            tracing::error!(%error, "what runs is not adopted");
            return Synchronized::default();
        }
        self.publish();
        // The pool is only known when all have been placed.
        for (ask, placed) in containers.iter().zip(&placed) {
            let settings = self.settings_of(placed);
            let wanted = (settings.cpus.clone(), settings.mems.clone());
            let differs = |wanted: bool, has: bool| wanted && !has;
            let lacks = differs(wanted.0.is_some(), wanted.0 == ask.pinned.0)
                || differs(wanted.1.is_some(), wanted.1 == ask.pinned.1);
            if lacks {
                result.updates.push(Update { id: ask.id.clone(), settings });
            } else {
                result.unpinned.retain(|(id, reason)| *id != ask.id || *reason == Unpinned::DoesNotFit);
            }
            if !self.pods.bound.contains(&ask.id) {
                self.pods.since.entry(ask.id.clone()).or_insert_with(Instant::now);
                self.pods.to_bind.push_back(ask.id.clone());
            }
        }
        result
    }

    /// One container that waits for it is bound; a few that share are held against the pool.
    pub(super) fn look_after_pods(&mut self, now: Instant) {
        self.follow_pool();
        self.try_waiting();
        let given_up: Vec<String> = self
            .pods
            .since
            .iter()
            .filter(|(_, since)| now.duration_since(**since) >= START_LIMIT)
            .map(|(id, _)| id.clone())
            .collect();
        for id in given_up {
            tracing::info!(container = id, "was created but never started; what it held is free");
            self.stopped(&id);
        }
        let after = self.pods.looked_at.take();
        let mut next: Vec<Placed> = self
            .sharing()
            .filter(|placed| after.as_ref().is_none_or(|after| placed.of.id > *after))
            .take(LOOKED_AT)
            .cloned()
            .collect();
        next.retain(|placed| !self.state.guarantees.values().any(|held| held.cgroup == placed.cgroup));
        self.pods.looked_at = next.last().map(|placed| placed.of.id.clone());
        for placed in next {
            match self.keep_to_pool(&placed) {
                Ok(false) => {}
                Ok(true) => {
                    tracing::warn!(cgroup = %placed.cgroup, "cpuset.cpus was not the shared pool; written again");
                    self.figures.drifted(Knob::CpusetCpus);
                    self.figures.repaired(Knob::CpusetCpus);
                }
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    tracing::debug!(cgroup = %placed.cgroup, %error, "cannot be held to the shared pool");
                }
            }
        }
    }

    /// Whether containers wait to be bound.
    pub(super) fn has_to_bind(&self) -> bool {
        !self.pods.to_bind.is_empty()
    }

    /// Binds one container that waits for it.
    pub(super) fn bind_next(&mut self) {
        let Some(id) = self.pods.to_bind.pop_front() else { return };
        if !self.pods.bound.contains(&id) {
            self.bind(&id);
        }
    }
}

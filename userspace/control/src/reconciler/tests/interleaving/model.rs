//! What is promised, as if one operation came after the other: the engine's decisions, and who holds what.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    sync::Arc,
};

use numaward_engine::{Ledger, OwnerId, Resources, Strategy};
use numaward_guarantee::{
    pod::{ContainerPlacementRequest, PodClaim},
    request::Request,
    state::State,
};
use numaward_topology::Bytes;

use super::checker::{Entry, Model};

/// What is asked, or happens.
#[derive(Clone)]
pub(super) enum Call {
    Admit(Box<Request>),
    Resize(String, Resources),
    Release(String),
    /// The cgroup of this workload goes, or comes again.
    Vanish(String),
    Appear(String),
    /// The workload whose cgroup was the one of this number is released, as that is gone.
    Reap(String, u32),
    /// What the operation of this index did is undone.
    Undo(usize),
    /// What this workload holds, or that it does not any more, is published.
    Publish(String),
    RunPod(Box<ContainerPlacementRequest>),
    Create(Box<ContainerPlacementRequest>),
    Bind(Box<ContainerPlacementRequest>),
    Stopped(String),
    PodStopped(String),
    /// These containers run in these sandboxes, and no others.
    Synchronize(Vec<String>, Vec<String>),
    /// What is published of those that are not pods.
    Look,
    /// The whole ledger, where nobody asks for anything.
    Inspect,
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let amounts = |request: &numaward_engine::Request| {
            let all = request.containers.iter().map(|of| (of.requests.cpu, of.requests.memory.clone()));
            let words = all.map(|(cpu, memory)| {
                let memory = memory.values().filter_map(|it| it.units()).sum();
                format!("{} CPUs, {}", cpu.map(|cpu| cpu.to_string()).unwrap_or_default(), Bytes(memory))
            });
            words.collect::<Vec<_>>().join(" + ")
        };
        let container = |ask: &ContainerPlacementRequest| match &ask.pod.asked {
            PodClaim::Pod(request) => format!("{} of a pod with {}", ask.id, amounts(request)),
            PodClaim::Container(request) => format!("{} with {}", ask.id, amounts(request)),
            PodClaim::Nothing => ask.id.clone(),
        };
        match self {
            Self::Admit(request) => write!(f, "admit {}: {}", request.name, amounts(&request.engine)),
            Self::Resize(name, to) => {
                let memory = to.memory.values().filter_map(|it| it.units()).sum();
                write!(f, "resize {name}: {}", Bytes(memory))
            }
            Self::Release(name) => write!(f, "release {name}"),
            Self::Vanish(name) => write!(f, "/{name} goes"),
            Self::Appear(name) => write!(f, "/{name} comes"),
            Self::Reap(name, number) => write!(f, "{name} is found gone, number {number}"),
            Self::Undo(index) => write!(f, "undo {index}"),
            Self::Publish(name) => write!(f, "publish {name}"),
            Self::RunPod(ask) => write!(f, "run {}", container(ask)),
            Self::Create(ask) => write!(f, "create {}", container(ask)),
            Self::Bind(ask) => write!(f, "start {}", ask.id),
            Self::Stopped(id) => write!(f, "stop {id}"),
            Self::PodStopped(sandbox) => write!(f, "{sandbox} is over"),
            Self::Synchronize(containers, sandboxes) => write!(f, "{containers:?} run in {sandboxes:?}"),
            Self::Look => write!(f, "look"),
            Self::Inspect => write!(f, "inspect"),
        }
    }
}

/// What is answered.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    Done,
    /// CPUs and nodes.
    Given(String, String),
    Refused,
    Conflict,
    NoCgroup,
    Unknown,
    List(Vec<String>),
}

/// The sequential model.
#[derive(Clone)]
pub(super) struct Promises {
    strategy: Arc<dyn Strategy>,
    ledger: Ledger,
    /// Who holds something in which of the cgroups of that name, but for pods.
    held: BTreeMap<String, u32>,
    /// What of it is published.
    shown: BTreeMap<String, String>,
    /// How many cgroups of a name there were, and whether the last one is there.
    cgroups: BTreeMap<String, (u32, bool)>,
    /// The owner and the sandbox of each container.
    containers: BTreeMap<String, (String, String)>,
    /// The sandbox of each owner, and whether it is a pod.
    owners: BTreeMap<String, (String, bool)>,
    /// Of operations: for whom they were, and the ledger before and after them.
    undo: BTreeMap<usize, (String, Ledger, Ledger)>,
}

/// What is promised to each, in words.
pub(super) fn in_words(ledger: &Ledger) -> Vec<String> {
    let all = ledger.allocations().map(|(owner, container, held)| {
        let cpus = held.cpus.as_ref().map(ToString::to_string).unwrap_or_default();
        format!("{owner} {container}: {cpus} on {}, {:?}", held.memory_nodes(), held.placed)
    });
    all.collect()
}

/// One of those that are published.
pub(super) fn line(name: &str, cpus: &str, nodes: &str) -> String {
    format!("{name}: {cpus} on {nodes}")
}

/// What the reconciler has.
pub(super) fn inspected(state: &State) -> Answer {
    Answer::List(in_words(&state.ledger))
}

impl Promises {
    pub(super) fn new(strategy: Arc<dyn Strategy>, names: &[&str]) -> Self {
        let ledger = strategy.idle();
        Self {
            strategy,
            ledger,
            held: BTreeMap::new(),
            shown: BTreeMap::new(),
            cgroups: names.iter().map(|name| ((*name).to_owned(), (0, true))).collect(),
            containers: BTreeMap::new(),
            owners: BTreeMap::new(),
            undo: BTreeMap::new(),
        }
    }

    fn place(&self, owner: &str) -> (String, String) {
        let account = self.ledger.owner(&OwnerId::from(owner));
        let held = account.and_then(|account| account.containers.values().next());
        let cpus = held.and_then(|held| held.cpus.as_ref()).map(ToString::to_string);
        let nodes = held.map(|held| held.memory_nodes().to_string());
        (cpus.unwrap_or_default(), nodes.unwrap_or_default())
    }

    fn publish(&mut self, name: &str) {
        self.shown.remove(name);
        if self.held.contains_key(name) {
            let (cpus, nodes) = self.place(name);
            self.shown.insert(name.to_owned(), line(name, &cpus, &nodes));
        }
    }

    fn admit(&mut self, request: &Request) -> Answer {
        let Some(&(number, is_there)) = self.cgroups.get(&request.name) else { return Answer::NoCgroup };
        if self.held.contains_key(&request.name) {
            return Answer::Conflict;
        }
        if !is_there {
            return Answer::NoCgroup;
        }
        let decision = self.strategy.admit_watched(&self.ledger, &request.engine, &request.terms, &|_| {});
        if decision.outcome.is_err() {
            return Answer::Refused;
        }
        self.ledger = decision.ledger;
        for container in &request.engine.containers {
            self.ledger = self.strategy.note_started(&self.ledger, &request.engine.owner, &container.name);
        }
        self.held.insert(request.name.clone(), number);
        let (cpus, nodes) = self.place(&request.name);
        Answer::Given(cpus, nodes)
    }

    fn resize(&mut self, name: &str, to: &Resources) -> Answer {
        if !self.held.contains_key(name) {
            return Answer::Unknown;
        }
        let owner = OwnerId::from(name);
        let request = self.ledger.owner(&owner).and_then(|account| account.request.clone());
        let Some(container) =
            request.and_then(|request| request.containers.first().map(|of| of.name.clone()))
        else {
            return Answer::Unknown;
        };
        let Ok(ledger) = self.strategy.resize(&self.ledger, &owner, &container, to) else {
            return Answer::Refused;
        };
        self.ledger = ledger;
        let (cpus, nodes) = self.place(name);
        Answer::Given(cpus, nodes)
    }

    fn release(&mut self, name: &str) -> Answer {
        if self.held.remove(name).is_none() {
            return Answer::Unknown;
        }
        self.ledger = self.strategy.release(&self.ledger, &OwnerId::from(name));
        Answer::Done
    }

    /// Admits the owner of a container, unless it is admitted already; whether it is.
    fn admit_owner(&mut self, ask: &ContainerPlacementRequest) -> bool {
        let (PodClaim::Pod(request) | PodClaim::Container(request)) = &ask.pod.asked else { return true };
        let owner = request.owner.to_string();
        if self.owners.contains_key(&owner) {
            return true;
        }
        let decision = self.strategy.admit_watched(&self.ledger, request, &ask.pod.terms, &|_| {});
        if decision.outcome.is_err() {
            return false;
        }
        self.ledger = decision.ledger;
        let is_pod = matches!(ask.pod.asked, PodClaim::Pod(_));
        self.owners.insert(owner, (ask.pod.sandbox.clone(), is_pod));
        true
    }

    fn create(&mut self, ask: &ContainerPlacementRequest) -> Answer {
        if !self.admit_owner(ask) {
            return Answer::Refused;
        }
        let owner = owner(ask);
        self.containers.insert(ask.id.clone(), (owner.clone(), ask.pod.sandbox.clone()));
        let held = self.ledger.allocation(&owner.as_str().into(), &ask.name.as_str().into());
        let cpus = held.and_then(|held| held.cpus.as_ref()).unwrap_or_else(|| self.ledger.shared_pool());
        let nodes = held.map(numaward_engine::Allocation::memory_nodes).unwrap_or_default();
        Answer::Given(cpus.to_string(), nodes.to_string())
    }

    fn stopped(&mut self, id: &str) {
        let Some((owner, _)) = self.containers.remove(id) else { return };
        let is_pod = self.owners.get(&owner).is_some_and(|(_, is_pod)| *is_pod);
        if !is_pod && !self.containers.values().any(|(other, _)| *other == owner) {
            self.remove_owner(&owner);
        }
    }

    fn remove_owner(&mut self, owner: &str) {
        self.owners.remove(owner);
        let mut state = State::with_ledger(self.ledger.clone());
        state.release_owner(&owner.into(), &*self.strategy);
        self.ledger = state.ledger;
    }

    fn pod_stopped(&mut self, sandbox: &str) {
        let of_sandbox = self.containers.iter().filter(|(_, (_, of))| of == sandbox);
        for id in of_sandbox.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            self.stopped(&id);
        }
        let owners = self.owners.iter().filter(|(_, (of, _))| of == sandbox);
        for owner in owners.map(|(owner, _)| owner.clone()).collect::<Vec<_>>() {
            self.remove_owner(&owner);
        }
    }

    fn synchronize(&mut self, containers: &[String], sandboxes: &[String]) {
        let gone = self.containers.keys().filter(|id| !containers.contains(id));
        for id in gone.cloned().collect::<Vec<_>>() {
            self.stopped(&id);
        }
        let over = self.owners.values().map(|(sandbox, _)| sandbox).filter(|it| !sandboxes.contains(it));
        for sandbox in over.cloned().collect::<Vec<_>>() {
            self.pod_stopped(&sandbox);
        }
    }

    /// Takes back what an operation did, where it still is so.
    fn undo(&mut self, index: usize) {
        let Some((name, before, after)) = self.undo.remove(&index) else { return };
        let owner = OwnerId::from(name.as_str());
        if self.ledger.owner(&owner) != after.owner(&owner) {
            return;
        }
        self.ledger.copy_changed_owners(&after, &before);
        self.ledger = self.strategy.rebase(&self.ledger).0;
        if before.owner(&owner).is_none() {
            self.held.remove(&name);
        }
        if self.shown.contains_key(&name) {
            self.publish(&name);
        }
    }
}

/// On whose account a container is.
pub(super) fn owner(ask: &ContainerPlacementRequest) -> String {
    match &ask.pod.asked {
        PodClaim::Pod(request) | PodClaim::Container(request) => request.owner.to_string(),
        PodClaim::Nothing => ask.container_owner(),
    }
}

impl Entry<Promises> {
    /// Whether it is the admission of this one.
    pub(super) fn is_of(&self, name: &str) -> bool {
        matches!(&self.call, Call::Admit(request) if request.name == name)
    }
}

impl Model for Promises {
    type Call = Call;
    type Answer = Answer;

    fn apply(&self, index: usize, call: &Call) -> Option<(Answer, Self)> {
        let mut next = self.clone();
        let answer = match call {
            Call::Admit(request) => {
                let answer = next.admit(request);
                let ledgers = (request.name.clone(), self.ledger.clone(), next.ledger.clone());
                next.undo.insert(index, ledgers);
                answer
            }
            Call::Resize(name, to) => {
                let answer = next.resize(name, to);
                next.undo.insert(index, (name.clone(), self.ledger.clone(), next.ledger.clone()));
                answer
            }
            Call::Release(name) => next.release(name),
            Call::Vanish(name) => {
                next.cgroups.get_mut(name)?.1 = false;
                Answer::Done
            }
            Call::Appear(name) => {
                let (number, is_there) = next.cgroups.get_mut(name)?;
                (*number, *is_there) = (*number + 1, true);
                Answer::Done
            }
            Call::Reap(name, number) => {
                let is_gone = self.cgroups.get(name).is_some_and(|(last, is)| last != number || !is);
                (is_gone && self.held.get(name) == Some(number)).then_some(())?;
                next.release(name)
            }
            Call::Undo(index) => {
                next.undo(*index);
                Answer::Done
            }
            Call::Publish(name) => {
                next.publish(name);
                Answer::Done
            }
            Call::RunPod(ask) if next.admit_owner(ask) => Answer::Done,
            Call::RunPod(_) => Answer::Refused,
            Call::Create(ask) => next.create(ask),
            Call::Bind(ask) => {
                if let Some((owner, _)) = self.containers.get(&ask.id) {
                    let (owner, container) = (owner.as_str().into(), ask.name.as_str().into());
                    next.ledger = next.strategy.note_started(&self.ledger, &owner, &container);
                }
                Answer::Done
            }
            Call::Stopped(id) => {
                next.stopped(id);
                Answer::Done
            }
            Call::PodStopped(sandbox) => {
                next.pod_stopped(sandbox);
                Answer::Done
            }
            Call::Synchronize(containers, sandboxes) => {
                next.synchronize(containers, sandboxes);
                Answer::Done
            }
            Call::Look => Answer::List(self.shown.values().cloned().collect()),
            Call::Inspect => {
                self.held.keys().for_each(|name| next.publish(name));
                next.shown.retain(|name, _| self.held.contains_key(name));
                Answer::List(in_words(&self.ledger))
            }
        };
        Some((answer, next))
    }

    fn key(&self) -> String {
        let mut key = format!("{:?} {:?} {:?} {:?}", self.held, self.shown, self.cgroups, self.containers);
        // Writing to a String cannot fail.
        let _ = write!(key, "{:?} {:?} {:?}", self.owners, in_words(&self.ledger), self.undo.keys());
        key
    }
}

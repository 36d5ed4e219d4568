//! Sequential model of the reconciler: the guarantees, with the decisions of the real engine.

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

use super::checker::{CallRecord, Model};

/// A call of a client or of the runtime, or an event.
#[derive(Clone)]
pub(super) enum Call {
    Admit(Box<Request>),
    Resize(String, Resources),
    Release(String),
    /// The cgroup of this workload is removed.
    Vanish(String),
    /// The cgroup of this workload is created again.
    Appear(String),
    /// The guarantee of this workload is released, because its cgroup of this number was removed.
    Reap(String, u32),
    /// The operation of this index is undone.
    Undo(usize),
    /// The guarantee of this workload, or its end, is published.
    Publish(String),
    RunPod(Box<ContainerPlacementRequest>),
    Create(Box<ContainerPlacementRequest>),
    Bind(Box<ContainerPlacementRequest>),
    Stopped(String),
    PodStopped(String),
    /// All running containers, and all sandboxes.
    Synchronize(Vec<String>, Vec<String>),
    /// Reads the published guarantees of workloads that are not pods.
    Look,
    /// Reads the ledger while no operation is in progress.
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

/// The answer to a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CallAnswer {
    Done,
    /// CPUs and nodes.
    Admitted(String, String),
    Refused,
    Conflict,
    NoCgroup,
    Unknown,
    List(Vec<String>),
}

/// State of the model.
#[derive(Clone)]
pub(super) struct SequentialModel {
    strategy: Arc<dyn Strategy>,
    ledger: Ledger,
    /// Guarantees of workloads that are not pods: name, and number of the cgroup.
    held: BTreeMap<String, u32>,
    /// The published ones, as lines.
    published: BTreeMap<String, String>,
    /// Number of times that each cgroup was created again, and whether it exists.
    cgroups: BTreeMap<String, (u32, bool)>,
    /// The owner and the sandbox of each container.
    containers: BTreeMap<String, (String, String)>,
    /// The sandbox of each owner, and whether the owner is a pod.
    owners: BTreeMap<String, (String, bool)>,
    /// For operations that may be undone: the owner, and the ledgers before and after.
    undo: BTreeMap<usize, (String, Ledger, Ledger)>,
}

/// Returns the allocations of a ledger as lines of text.
pub(super) fn allocation_lines(ledger: &Ledger) -> Vec<String> {
    let all = ledger.allocations().map(|(owner, container, held)| {
        let cpus = held.cpus.as_ref().map(ToString::to_string).unwrap_or_default();
        format!("{owner} {container}: {cpus} on {}, {:?}", held.memory_nodes(), held.placed)
    });
    all.collect()
}

/// Returns a published guarantee as a line of text.
pub(super) fn line(name: &str, cpus: &str, nodes: &str) -> String {
    format!("{name}: {cpus} on {nodes}")
}

/// Returns the answer to [`Call::Inspect`].
pub(super) fn inspected(state: &State) -> CallAnswer {
    CallAnswer::List(allocation_lines(&state.ledger))
}

impl SequentialModel {
    pub(super) fn new(strategy: Arc<dyn Strategy>, names: &[&str]) -> Self {
        let ledger = strategy.idle();
        Self {
            strategy,
            ledger,
            held: BTreeMap::new(),
            published: BTreeMap::new(),
            cgroups: names.iter().map(|name| ((*name).to_owned(), (0, true))).collect(),
            containers: BTreeMap::new(),
            owners: BTreeMap::new(),
            undo: BTreeMap::new(),
        }
    }

    /// Returns the CPUs and nodes of an owner.
    fn placement(&self, owner: &str) -> (String, String) {
        let account = self.ledger.owner(&OwnerId::from(owner));
        let held = account.and_then(|account| account.containers.values().next());
        let cpus = held.and_then(|held| held.cpus.as_ref()).map(ToString::to_string);
        let nodes = held.map(|held| held.memory_nodes().to_string());
        (cpus.unwrap_or_default(), nodes.unwrap_or_default())
    }

    fn publish(&mut self, name: &str) {
        self.published.remove(name);
        if self.held.contains_key(name) {
            let (cpus, nodes) = self.placement(name);
            self.published.insert(name.to_owned(), line(name, &cpus, &nodes));
        }
    }

    fn admit(&mut self, request: &Request) -> CallAnswer {
        let Some(&(number, is_there)) = self.cgroups.get(&request.name) else { return CallAnswer::NoCgroup };
        if self.held.contains_key(&request.name) {
            return CallAnswer::Conflict;
        }
        if !is_there {
            return CallAnswer::NoCgroup;
        }
        let decision = self.strategy.admit_watched(&self.ledger, &request.engine, &request.terms, &|_| {});
        if decision.outcome.is_err() {
            return CallAnswer::Refused;
        }
        self.ledger = decision.ledger;
        for container in &request.engine.containers {
            self.ledger = self.strategy.note_started(&self.ledger, &request.engine.owner, &container.name);
        }
        self.held.insert(request.name.clone(), number);
        let (cpus, nodes) = self.placement(&request.name);
        CallAnswer::Admitted(cpus, nodes)
    }

    fn resize(&mut self, name: &str, to: &Resources) -> CallAnswer {
        if !self.held.contains_key(name) {
            return CallAnswer::Unknown;
        }
        let owner = OwnerId::from(name);
        let request = self.ledger.owner(&owner).and_then(|account| account.request.clone());
        let Some(container) =
            request.and_then(|request| request.containers.first().map(|of| of.name.clone()))
        else {
            return CallAnswer::Unknown;
        };
        let Ok(ledger) = self.strategy.resize(&self.ledger, &owner, &container, to) else {
            return CallAnswer::Refused;
        };
        self.ledger = ledger;
        let (cpus, nodes) = self.placement(name);
        CallAnswer::Admitted(cpus, nodes)
    }

    fn release(&mut self, name: &str) -> CallAnswer {
        if self.held.remove(name).is_none() {
            return CallAnswer::Unknown;
        }
        self.ledger = self.strategy.release(&self.ledger, &OwnerId::from(name));
        CallAnswer::Done
    }

    /// Admits the owner of a container, unless it is admitted already. Returns false if the owner is refused.
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

    fn create(&mut self, ask: &ContainerPlacementRequest) -> CallAnswer {
        if !self.admit_owner(ask) {
            return CallAnswer::Refused;
        }
        let owner = owner(ask);
        self.containers.insert(ask.id.clone(), (owner.clone(), ask.pod.sandbox.clone()));
        let held = self.ledger.allocation(&owner.as_str().into(), &ask.name.as_str().into());
        let cpus = held.and_then(|held| held.cpus.as_ref()).unwrap_or_else(|| self.ledger.shared_pool());
        let nodes = held.map(numaward_engine::Allocation::memory_nodes).unwrap_or_default();
        CallAnswer::Admitted(cpus.to_string(), nodes.to_string())
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

    /// Undoes an operation, unless the account of its owner has changed since.
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
        if self.published.contains_key(&name) {
            self.publish(&name);
        }
    }
}

/// Returns the owner of a container in the ledger.
pub(super) fn owner(ask: &ContainerPlacementRequest) -> String {
    match &ask.pod.asked {
        PodClaim::Pod(request) | PodClaim::Container(request) => request.owner.to_string(),
        PodClaim::Nothing => ask.container_owner(),
    }
}

impl CallRecord<SequentialModel> {
    /// Returns true if the operation is the admission of this workload.
    pub(super) fn is_admission_of(&self, name: &str) -> bool {
        matches!(&self.call, Call::Admit(request) if request.name == name)
    }
}

impl Model for SequentialModel {
    type Call = Call;
    type Answer = CallAnswer;

    fn apply(&self, index: usize, call: &Call) -> Option<(CallAnswer, Self)> {
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
                CallAnswer::Done
            }
            Call::Appear(name) => {
                let (number, is_there) = next.cgroups.get_mut(name)?;
                (*number, *is_there) = (*number + 1, true);
                CallAnswer::Done
            }
            Call::Reap(name, number) => {
                let is_gone = self.cgroups.get(name).is_some_and(|(last, is)| last != number || !is);
                (is_gone && self.held.get(name) == Some(number)).then_some(())?;
                next.release(name)
            }
            Call::Undo(index) => {
                next.undo(*index);
                CallAnswer::Done
            }
            Call::Publish(name) => {
                next.publish(name);
                CallAnswer::Done
            }
            Call::RunPod(ask) if next.admit_owner(ask) => CallAnswer::Done,
            Call::RunPod(_) => CallAnswer::Refused,
            Call::Create(ask) => next.create(ask),
            Call::Bind(ask) => {
                if let Some((owner, _)) = self.containers.get(&ask.id) {
                    let (owner, container) = (owner.as_str().into(), ask.name.as_str().into());
                    next.ledger = next.strategy.note_started(&self.ledger, &owner, &container);
                }
                CallAnswer::Done
            }
            Call::Stopped(id) => {
                next.stopped(id);
                CallAnswer::Done
            }
            Call::PodStopped(sandbox) => {
                next.pod_stopped(sandbox);
                CallAnswer::Done
            }
            Call::Synchronize(containers, sandboxes) => {
                next.synchronize(containers, sandboxes);
                CallAnswer::Done
            }
            Call::Look => CallAnswer::List(self.published.values().cloned().collect()),
            Call::Inspect => {
                self.held.keys().for_each(|name| next.publish(name));
                next.published.retain(|name, _| self.held.contains_key(name));
                CallAnswer::List(allocation_lines(&self.ledger))
            }
        };
        Some((answer, next))
    }

    fn key(&self) -> String {
        let mut key =
            format!("{:?} {:?} {:?} {:?}", self.held, self.published, self.cgroups, self.containers);
        // Writing to a String cannot fail.
        let _ = write!(key, "{:?} {:?} {:?}", self.owners, allocation_lines(&self.ledger), self.undo.keys());
        key
    }
}

//! The simulated world around the reconciler: clients, a container runtime and cgroups, and the history of their calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, panic,
    path::{Path, PathBuf},
    sync::{Arc, mpsc::Sender},
};

use fastrand::Rng;
use numaward_api as api;
use numaward_engine::{Quantity, Resources};
use numaward_guarantee::{
    command::{Command, Message, PodCommand},
    pod::{ContainerPlacementRequest, PodClaim, SyncResult, UnpinnedReason},
    request::Resize,
};
use numaward_model::Settings;
use numaward_topology::Machine;
use parking_lot::RwLock;
use tokio::sync::oneshot::{self};

use super::{
    calls::{CallFailure, Poll, admission, admission_answer, container, poll, refusal_answer},
    checker::{CallRecord, Deadline},
    model::{Call, CallAnswer, SequentialModel, line},
};
use crate::testing as fixture;

/// Workloads that are not pods, each with a cgroup of the same name.
pub(super) const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// Maximum number of clients that wait for an answer.
const MAX_CLIENTS: usize = 4;
/// Maximum number of calls of the runtime that wait for an answer.
const MAX_RUNTIME_CALLS: usize = 3;
/// A time after the end of the test.
const NEVER: u32 = u32::MAX;

/// Payload of the panic that simulates a crash of the daemon.
#[derive(Debug)]
pub(super) struct Crash;

/// A call without an answer yet.
struct PendingCall {
    /// Index in the history.
    index: usize,
    poll: Poll,
}

/// The only container of a pod, as the container runtime knows it.
struct SimulatedContainer {
    ask: ContainerPlacementRequest,
    stage: ContainerStage,
    is_waiting: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ContainerStage {
    Requested,
    Admitted,
    Created,
    Running,
    Stopped,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) history: Vec<CallRecord<SequentialModel>>,
    clock: u32,
    root: PathBuf,
    machine: Arc<Machine>,
    commands: Option<Sender<Message>>,
    view: Arc<RwLock<Arc<api::Allocations>>>,
    clients: Vec<PendingCall>,
    calls: Vec<(PendingCall, String)>,
    containers: BTreeMap<String, SimulatedContainer>,
    /// The last synchronization of the runtime; `None` until the runtime has synchronized with this daemon.
    listed: Option<usize>,
    /// Number of containers so far.
    made: u32,
    /// Number of times that each cgroup was created again.
    cgroups: BTreeMap<&'static str, u32>,
    /// Number of calls that are still to begin.
    left: u32,
    /// Number of crash points until the daemon crashes.
    crash_in: Option<u32>,
    /// Number of crashes that have reached the test.
    pub(super) crashes: u32,
    /// The points at which a crash was injected.
    pub(super) injected: Vec<&'static str>,
    /// Number of starts of the daemon.
    pub(super) starts: u32,
    /// Number of steps in which several clients were answered.
    pub(super) batched_steps: u32,
    /// Containers that were bound since the daemon started.
    pub(super) bound: BTreeSet<String>,
}

impl World {
    pub(super) fn new(seed: u64, root: PathBuf, machine: Arc<Machine>) -> Self {
        for path in ["", "kubepods"].iter().chain(&NAMES) {
            fixture::cgroup(&root.join(path), &machine);
        }
        let mut rng = Rng::with_seed(seed);
        let left = rng.u32(8..28);
        Self {
            rng,
            history: Vec::new(),
            clock: 0,
            root,
            machine,
            commands: None,
            view: Arc::default(),
            clients: Vec::new(),
            calls: Vec::new(),
            containers: BTreeMap::new(),
            listed: None,
            made: 0,
            cgroups: NAMES.iter().map(|name| (*name, 0)).collect(),
            left,
            crash_in: None,
            crashes: 0,
            injected: Vec::new(),
            starts: 0,
            batched_steps: 0,
            bound: BTreeSet::new(),
        }
    }

    /// Records a start of the daemon.
    pub(super) fn begin(&mut self) {
        self.starts += 1;
        let may_crash = self.crashes < 3 && self.rng.bool();
        self.crash_in = may_crash.then(|| self.rng.u32(1..80));
    }

    /// Connects the clients and the runtime with the daemon.
    pub(super) fn serve(&mut self, commands: Sender<Message>, view: Arc<RwLock<Arc<api::Allocations>>>) {
        (self.commands, self.view, self.listed) = (Some(commands), view, None);
    }

    /// Crashes the daemon at this point if its turn has come.
    pub(super) fn reach_crash_point(&mut self, place: &'static str) {
        if let Some(left) = &mut self.crash_in {
            *left -= 1;
            if *left == 0 {
                self.crash_in = None;
                self.injected.push(place);
                panic::resume_unwind(Box::new(Crash));
            }
        }
    }

    /// Records a crash of the daemon. Operations without an answer may or may not have taken effect.
    pub(super) fn record_crash(&mut self) {
        self.poll();
        (self.commands, self.crashes) = (None, self.crashes + 1);
        self.bound.clear();
        self.clock += 1;
        for pending in std::mem::take(&mut self.clients) {
            self.abandon_call(pending.index, false);
        }
        self.drop_calls();
        let last = self.clock;
        for entry in &mut self.history {
            entry.until = match entry.until {
                Deadline::Undoes(what, NEVER) => Deadline::MaybeUndoes(what, last),
                // The next daemon still releases the guarantees of removed cgroups.
                Deadline::Maybe(NEVER) if !matches!(entry.call, Call::Reap(..)) => Deadline::Maybe(last),
                until => until,
            };
        }
    }

    /// Ends the history: the daemon has no work left.
    pub(super) fn finish(&mut self) {
        self.clock += 1;
        let now = self.clock;
        for entry in &mut self.history {
            entry.until = match entry.until {
                Deadline::Undoes(what, NEVER) => Deadline::Undoes(what, now),
                Deadline::MaybeUndoes(what, NEVER) => Deadline::MaybeUndoes(what, now),
                Deadline::Maybe(NEVER) => Deadline::Maybe(now),
                until => until,
            };
        }
    }

    /// Ends the waiting for an answer. The call takes effect until now or never, or later if the daemon is still running.
    fn abandon_call(&mut self, index: usize, is_daemon_running: bool) {
        let last = if is_daemon_running { NEVER } else { self.clock };
        self.history[index].until = Deadline::Maybe(last);
        self.record_publication(index, Deadline::MaybeUndoes(index, last));
        if let Call::Admit(_) | Call::Resize(..) = self.history[index].call {
            let until = match (is_daemon_running, &self.history[index].call) {
                (true, Call::Admit(_)) => Deadline::Undoes(index, last),
                (true, _) => return,
                (false, _) => Deadline::MaybeUndoes(index, last),
            };
            self.record(Call::Undo(index), until, None);
        }
    }

    /// Ends the connection of the runtime. Containers that are not created yet are lost.
    fn drop_calls(&mut self) {
        for (pending, id) in std::mem::take(&mut self.calls) {
            self.history[pending.index].until = Deadline::Maybe(NEVER);
            if let Some(container) = self.containers.get_mut(&id) {
                container.is_waiting = false;
                if container.stage < ContainerStage::Created {
                    self.containers.remove(&id);
                }
            }
        }
    }

    fn record(&mut self, call: Call, until: Deadline, answer: Option<CallAnswer>) -> usize {
        self.clock += 1;
        let (from, after, before) = (self.clock, None, None);
        self.history.push(CallRecord { call, from, until, answer, after, before });
        self.history.len() - 1
    }

    /// Records an operation that takes effect at once.
    pub(super) fn record_instant(&mut self, call: Call, answer: CallAnswer) -> usize {
        let until = Deadline::Answered(self.clock + 1);
        self.record(call, until, Some(answer))
    }

    /// Records that the change of an operation is published after it.
    fn record_publication(&mut self, index: usize, until: Deadline) {
        let entry = &self.history[index];
        let name = match &entry.call {
            Call::Admit(request) => request.name.clone(),
            Call::Resize(name, _) | Call::Release(name) | Call::Reap(name, _) => name.clone(),
            _ => return,
        };
        let from = entry.from;
        self.history.push(CallRecord {
            call: Call::Publish(name),
            from,
            until,
            answer: None,
            after: Some(index),
            before: None,
        });
    }

    fn record_call(&mut self, call: Call) -> usize {
        self.left = self.left.saturating_sub(1);
        self.record(call, Deadline::Maybe(NEVER), None)
    }

    /// Returns true if no calls are to come and none is pending.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0 && self.clients.is_empty() && self.calls.is_empty()
    }

    /// Records the answers that have arrived. Returns the number of clients with an answer.
    pub(super) fn poll(&mut self) -> usize {
        let before = self.clients.len();
        for index in (0..self.clients.len()).rev() {
            match (self.clients[index].poll)() {
                Ok(None) | Err(CallFailure::Closed) => {}
                Ok(Some(answer)) => {
                    let pending = self.clients.remove(index);
                    self.record_answer(pending.index, answer);
                }
                Err(CallFailure::Failed) => {
                    let pending = self.clients.remove(index);
                    self.clock += 1;
                    let (index, last, from) = (pending.index, self.clock, self.history[pending.index].from);
                    self.history[index].until = Deadline::Maybe(last);
                    let undo = self.record(Call::Undo(index), Deadline::Undoes(index, last), None);
                    self.history[undo].from = from;
                }
            }
        }
        for index in (0..self.calls.len()).rev() {
            if let Ok(Some(answer)) = (self.calls[index].0.poll)() {
                let (pending, id) = self.calls.remove(index);
                self.record_answer(pending.index, answer.clone());
                self.advance_container(&id, &answer);
            }
        }
        before - self.clients.len()
    }

    fn record_answer(&mut self, index: usize, answer: CallAnswer) {
        self.clock += 1;
        let until = Deadline::Answered(self.clock);
        if matches!(answer, CallAnswer::Done | CallAnswer::Admitted(..)) {
            self.record_publication(index, until);
        }
        (self.history[index].until, self.history[index].answer) = (until, Some(answer));
    }

    /// Continues the life of a container after an answer to the runtime.
    fn advance_container(&mut self, id: &str, answer: &CallAnswer) {
        let Some(container) = self.containers.get_mut(id) else { return };
        container.is_waiting = false;
        match (container.stage, answer) {
            (ContainerStage::Requested, CallAnswer::Done) => container.stage = ContainerStage::Admitted,
            (ContainerStage::Requested | ContainerStage::Admitted, CallAnswer::Admitted(..)) => {
                container.stage = ContainerStage::Created;
            }
            (ContainerStage::Created, _) => {
                container.stage = ContainerStage::Running;
                self.bound.insert(id.to_owned());
            }
            (ContainerStage::Requested | ContainerStage::Admitted, _) => drop(self.containers.remove(id)),
            (ContainerStage::Running | ContainerStage::Stopped, _) => {}
        }
    }

    /// Updates the files with effective CPUs and nodes, as the kernel does.
    pub(super) fn update_effective_files(&self) {
        let pods = self.containers.values().map(|container| self.dir_of(&container.ask));
        for dir in NAMES.iter().map(|name| self.root.join(name)).chain(pods) {
            for (knob, all) in [
                ("cpuset.cpus", self.machine.possible_cpus.to_string()),
                ("cpuset.mems", self.machine.node_ids().to_string()),
            ] {
                let Ok(text) = fs::read_to_string(dir.join(knob)) else { continue };
                let text = if text.trim().is_empty() { all } else { text };
                // The cgroup may be removed at any time.
                let _ = fs::write(dir.join(format!("{knob}.effective")), text);
            }
        }
    }

    fn dir_of(&self, ask: &ContainerPlacementRequest) -> PathBuf {
        self.root.join(ask.cgroup.as_str().trim_start_matches('/'))
    }

    /// Returns the cgroups of running containers that this daemon has bound.
    pub(super) fn running(&self) -> impl Iterator<Item = (&str, PathBuf)> {
        let bound = self.containers.values().filter(|container| {
            container.stage == ContainerStage::Running
                && !container.is_waiting
                && self.bound.contains(&container.ask.id)
        });
        bound.map(|container| (container.ask.id.as_str(), self.dir_of(&container.ask)))
    }

    /// Makes one random step of a client, of the runtime or of the cgroups.
    pub(super) fn step(&mut self) {
        self.poll();
        match self.rng.u32(0..20) {
            0..=4 => self.call_as_client(),
            // Several clients call at once.
            5 => (0..MAX_CLIENTS).for_each(|_| self.call_as_client()),
            6..=11 => self.call_as_runtime(),
            12 if self.left > 0 => self.toggle_cgroup(),
            13..=14 => self.read_view(),
            15 => self.disconnect_client(),
            16 if self.rng.u32(0..4) == 0 => self.restart_runtime(),
            _ => {}
        }
    }

    fn send(&self, message: Message) {
        // A daemon that has crashed receives nothing.
        let _ = self.commands.as_ref().map(|commands| commands.send(message));
    }

    fn call_as_client(&mut self) {
        if self.left == 0 || self.clients.len() >= MAX_CLIENTS {
            return;
        }
        let name = NAMES[self.rng.usize(..NAMES.len())];
        match self.rng.u32(0..6) {
            0..=2 => self.admit(name),
            3..=4 => {
                let index = self.record_call(Call::Release(name.to_owned()));
                let (answer, result) = oneshot::channel();
                self.send(Message::Internal(Command::Release { name: name.to_owned(), answer }));
                let done = |()| CallAnswer::Done;
                self.clients.push(PendingCall {
                    index,
                    poll: poll(result, move |it| it.map(done).or_else(refusal_answer)),
                });
            }
            _ => self.resize(name),
        }
    }

    fn admit(&mut self, name: &str) {
        let cpus = match self.rng.u32(0..5) {
            0 => api::Cpus::whole(1),
            1 => api::Cpus::whole(2),
            2 => api::Cpus::whole(3),
            3 => api::Cpus::whole(4),
            _ => "500m".parse().unwrap(),
        };
        let memory = ["256Mi", "1Gi", "2Gi", "3Gi"][self.rng.usize(..4)];
        let call = admission(name, cpus, memory);
        let Call::Admit(request) = call.clone() else { return };
        let index = self.record_call(call);
        let (answer, result) = oneshot::channel();
        self.send(Message::Internal(Command::Admit { request, dry_run: false, answer }));
        self.clients.push(PendingCall { index, poll: poll(result, admission_answer) });
    }

    fn resize(&mut self, name: &str) {
        let memory = ["256Mi", "1Gi", "2Gi", "3Gi"][self.rng.usize(..4)];
        let request = api::Resize { memory: Some(memory.to_owned()), ..api::Resize::default() };
        let resize = Resize::new(name.to_owned(), &request).unwrap();
        let to = Resources::none().with_memory(Quantity::whole(resize.memory.unwrap().0));
        let index = self.record_call(Call::Resize(name.to_owned(), to));
        let (answer, result) = oneshot::channel();
        self.send(Message::Internal(Command::Resize { resize: Box::new(resize), dry_run: false, answer }));
        self.clients.push(PendingCall { index, poll: poll(result, admission_answer) });
    }

    /// Disconnects a client that waits for an answer.
    fn disconnect_client(&mut self) {
        if !self.clients.is_empty() {
            let pending = self.clients.swap_remove(self.rng.usize(..self.clients.len()));
            self.abandon_call(pending.index, true);
        }
    }

    /// Creates or removes the cgroup of a workload.
    fn toggle_cgroup(&mut self) {
        let name = NAMES[self.rng.usize(..NAMES.len())];
        let dir = self.root.join(name);
        if !dir.exists() {
            fixture::cgroup(&dir, &self.machine);
            *self.cgroups.entry(name).or_default() += 1;
            self.record_instant(Call::Appear(name.to_owned()), CallAnswer::Done);
        } else if self.rng.bool() {
            remove(&dir);
            self.record_instant(Call::Vanish(name.to_owned()), CallAnswer::Done);
            let reap = Call::Reap(name.to_owned(), self.cgroups[name]);
            let index = self.record(reap, Deadline::Maybe(NEVER), None);
            self.record_publication(index, Deadline::MaybeUndoes(index, NEVER));
        }
    }

    /// Reads the published state.
    fn read_view(&mut self) {
        let view = self.view.read().clone();
        if self.left > 0 && self.commands.is_some() {
            let commands = view.allocations.iter().filter(|it| NAMES.contains(&it.name.as_str()));
            let lines = commands.map(|held| line(&held.name, &held.cpus, &held.nodes)).collect();
            self.record_instant(Call::Look, CallAnswer::List(lines));
        }
    }

    /// Starts the runtime, or restarts it, and synchronizes it with the daemon.
    fn restart_runtime(&mut self) {
        let before: Vec<usize> = self.calls.iter().map(|(pending, _)| pending.index).collect();
        self.drop_calls();
        let created = || self.containers.values().filter(|it| it.stage >= ContainerStage::Created);
        let containers: Vec<ContainerPlacementRequest> =
            created().filter(|it| it.stage < ContainerStage::Stopped).map(|it| it.ask.clone()).collect();
        // An admitted pod has a sandbox even if it has no container yet.
        let pods = self.containers.values().filter(|it| it.stage >= ContainerStage::Admitted);
        let sandboxes: BTreeMap<String, String> =
            pods.map(|it| (it.ask.pod.sandbox.clone(), it.ask.pod.pod.uid.clone())).collect();
        let ids = containers.iter().map(|ask| ask.id.clone()).collect();
        let index = self.record_call(Call::Synchronize(ids, sandboxes.keys().cloned().collect()));
        for earlier in before {
            self.history[earlier].before = Some(index);
        }
        let (answer, result) = oneshot::channel();
        let list = PodCommand::Synchronize { containers, sandboxes, complete: true, answer };
        self.send(Message::Runtime(Box::new(list)));
        let done = |_: SyncResult| Ok(CallAnswer::Done);
        self.calls.push((PendingCall { index, poll: poll(result, done) }, String::new()));
        self.listed = Some(index);
    }

    /// Makes the next call of the runtime for a random container.
    fn call_as_runtime(&mut self) {
        if self.listed.is_none() {
            return self.restart_runtime();
        }
        if self.left == 0 || self.calls.len() >= MAX_RUNTIME_CALLS {
            return;
        }
        if self.containers.len() < 4 && self.rng.bool() {
            self.made += 1;
            let millicpus = [500, 1000, 2000, 3000][self.rng.usize(..4)];
            let ask = container(&format!("p{}", self.made), millicpus, self.rng.bool());
            self.containers.insert(
                ask.id.clone(),
                SimulatedContainer { ask, stage: ContainerStage::Requested, is_waiting: false },
            );
        }
        let idle: Vec<String> =
            self.containers.iter().filter(|(_, it)| !it.is_waiting).map(|(id, _)| id.clone()).collect();
        if idle.is_empty() {
            return;
        }
        let id = idle[self.rng.usize(..idle.len())].clone();
        let is_quick = self.rng.bool();
        let dir = self.dir_of(&self.containers[&id].ask);
        let Some(container) = self.containers.get_mut(&id) else { return };
        container.is_waiting = true;
        let (ask, stage) = (container.ask.clone(), container.stage);
        let (call, command, poll): (_, _, Poll) = match stage {
            ContainerStage::Requested if matches!(ask.pod.asked, PodClaim::Pod(_)) => {
                let (answer, result) = oneshot::channel();
                let command = PodCommand::RunPod { ask: Box::new(ask.pod.clone()), answer };
                let done = |it: Result<(), _>| it.map(|()| CallAnswer::Done).or_else(refusal_answer);
                (Call::RunPod(Box::new(ask)), command, poll(result, done))
            }
            ContainerStage::Requested | ContainerStage::Admitted => {
                let (answer, result) = oneshot::channel();
                let command = PodCommand::Create { ask: Box::new(ask.clone()), answer };
                let created = |it: Result<(Settings, Option<UnpinnedReason>), _>| match it {
                    Ok((settings, None)) => {
                        let cpus = settings.cpus.unwrap_or_default().to_string();
                        Ok(CallAnswer::Admitted(cpus, settings.mems.unwrap_or_default().to_string()))
                    }
                    Ok((_, Some(unpinned))) => panic!("{unpinned:?}"),
                    Err(error) => refusal_answer(error),
                };
                (Call::Create(Box::new(ask)), command, poll(result, created))
            }
            ContainerStage::Created => {
                fixture::cgroup(dir.parent().unwrap(), &self.machine);
                fixture::cgroup(&dir, &self.machine);
                let (answer, result) = oneshot::channel();
                let command = PodCommand::Bind { id: id.clone(), ask: None, answer };
                let bound = |unpinned| {
                    assert_eq!(unpinned, None);
                    Ok(CallAnswer::Done)
                };
                (Call::Bind(Box::new(ask)), command, poll(result, bound))
            }
            ContainerStage::Running => {
                if is_quick {
                    remove(&dir);
                }
                // The answer does not matter.
                container.stage = ContainerStage::Stopped;
                let (answer, result) = oneshot::channel();
                let command = PodCommand::Stopped { id: id.clone(), answer };
                (Call::Stopped(id.clone()), command, poll(result, |()| Ok(CallAnswer::Done)))
            }
            ContainerStage::Stopped => {
                remove(dir.parent().unwrap());
                self.containers.remove(&id);
                let (answer, result) = oneshot::channel();
                let (uid, sandbox) = (ask.pod.pod.uid.clone(), ask.pod.sandbox.clone());
                let command = PodCommand::PodStopped { uid, sandbox: sandbox.clone(), answer };
                (Call::PodStopped(sandbox), command, poll(result, |()| Ok(CallAnswer::Done)))
            }
        };
        let index = self.record_call(call);
        self.history[index].after = self.listed;
        self.send(Message::Runtime(Box::new(command)));
        self.calls.push((PendingCall { index, poll }, id));
    }
}

fn remove(dir: &Path) {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        result => result.unwrap(),
    }
}

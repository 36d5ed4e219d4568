//! The others: who asks the reconciler, in an order that a number decides, and what became of it.

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
    asks::{Lost, Poll, admission, container, given, poll, refused},
    checker::{Entry, Until},
    model::{Answer, Call, Promises, line},
};
use crate::testing as fixture;

/// Workloads that are no pods, each with a cgroup of the same name.
pub(super) const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// So many clients wait for an answer at most.
const CLIENTS: usize = 4;
/// So many calls of the runtime do.
const CALLS: usize = 3;
/// An instant that never comes.
const NEVER: u32 = u32::MAX;

/// The daemon dies here.
#[derive(Debug)]
pub(super) struct Crash;

struct Waiting {
    index: usize,
    poll: Poll,
}

/// A pod's only container, as the container runtime knows it.
struct Container {
    ask: ContainerPlacementRequest,
    stage: Stage,
    is_waiting: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Asked,
    Admitted,
    Created,
    Running,
    Stopped,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) history: Vec<Entry<Promises>>,
    clock: u32,
    root: PathBuf,
    machine: Arc<Machine>,
    commands: Option<Sender<Message>>,
    view: Arc<RwLock<Arc<api::Allocations>>>,
    clients: Vec<Waiting>,
    calls: Vec<(Waiting, String)>,
    containers: BTreeMap<String, Container>,
    /// The list of all that runs which the runtime gave last, unless a new connection has given none yet.
    listed: Option<usize>,
    made: u32,
    /// How many cgroups of a name there were.
    cgroups: BTreeMap<&'static str, u32>,
    /// Operations that are still to begin.
    left: u32,
    /// The daemon dies after so many of the points at which it may.
    crash_in: Option<u32>,
    pub(super) crashes: u32,
    /// The places at which the daemon was made to die. A crash counts in [`World::crashes`] when it has reached the test.
    pub(super) injected: Vec<&'static str>,
    /// Starts of the daemon.
    pub(super) starts: u32,
    /// Steps in which several clients were answered.
    pub(super) together: u32,
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
            together: 0,
            bound: BTreeSet::new(),
        }
    }

    /// The daemon starts.
    pub(super) fn begin(&mut self) {
        self.starts += 1;
        let may_crash = self.crashes < 3 && self.rng.bool();
        self.crash_in = may_crash.then(|| self.rng.u32(1..80));
    }

    /// It takes commands.
    pub(super) fn serve(&mut self, commands: Sender<Message>, view: Arc<RwLock<Arc<api::Allocations>>>) {
        (self.commands, self.view, self.listed) = (Some(commands), view, None);
    }

    /// One of the places at which it may die.
    pub(super) fn point(&mut self, place: &'static str) {
        if let Some(left) = &mut self.crash_in {
            *left -= 1;
            if *left == 0 {
                self.crash_in = None;
                self.injected.push(place);
                panic::resume_unwind(Box::new(Crash));
            }
        }
    }

    /// The daemon has died: what it has answered was answered, all else was done or not.
    pub(super) fn crashed(&mut self) {
        self.poll();
        (self.commands, self.crashes) = (None, self.crashes + 1);
        self.bound.clear();
        self.clock += 1;
        for waiting in std::mem::take(&mut self.clients) {
            self.give_up(waiting.index, false);
        }
        self.drop_calls();
        let last = self.clock;
        for entry in &mut self.history {
            entry.until = match entry.until {
                Until::Undoes(what, NEVER) => Until::MaybeUndoes(what, last),
                // Who was to be released before is so afterwards.
                Until::Maybe(NEVER) if !matches!(entry.call, Call::Reap(..)) => Until::Maybe(last),
                until => until,
            };
        }
    }

    /// The daemon has done all that it was asked for.
    pub(super) fn settled(&mut self) {
        self.clock += 1;
        let now = self.clock;
        for entry in &mut self.history {
            entry.until = match entry.until {
                Until::Undoes(what, NEVER) => Until::Undoes(what, now),
                Until::MaybeUndoes(what, NEVER) => Until::MaybeUndoes(what, now),
                Until::Maybe(NEVER) => Until::Maybe(now),
                until => until,
            };
        }
    }

    /// Nobody waits for a call any more: it is done until now or never, unless the daemon goes on with it.
    fn give_up(&mut self, index: usize, goes_on: bool) {
        let last = if goes_on { NEVER } else { self.clock };
        self.history[index].until = Until::Maybe(last);
        self.publishes(index, Until::MaybeUndoes(index, last));
        if let Call::Admit(_) | Call::Resize(..) = self.history[index].call {
            let until = match (goes_on, &self.history[index].call) {
                (true, Call::Admit(_)) => Until::Undoes(index, last),
                (true, _) => return,
                (false, _) => Until::MaybeUndoes(index, last),
            };
            self.note(Call::Undo(index), until, None);
        }
    }

    /// The runtime is gone, with what it was about to make.
    fn drop_calls(&mut self) {
        for (waiting, id) in std::mem::take(&mut self.calls) {
            self.history[waiting.index].until = Until::Maybe(NEVER);
            if let Some(container) = self.containers.get_mut(&id) {
                container.is_waiting = false;
                if container.stage < Stage::Created {
                    self.containers.remove(&id);
                }
            }
        }
    }

    fn note(&mut self, call: Call, until: Until, answer: Option<Answer>) -> usize {
        self.clock += 1;
        let (from, after, before) = (self.clock, None, None);
        self.history.push(Entry { call, from, until, answer, after, before });
        self.history.len() - 1
    }

    /// Something that takes no time.
    pub(super) fn happens(&mut self, call: Call, answer: Answer) -> usize {
        let until = Until::Answered(self.clock + 1);
        self.note(call, until, Some(answer))
    }

    /// What an operation changes is published after it.
    fn publishes(&mut self, index: usize, until: Until) {
        let entry = &self.history[index];
        let name = match &entry.call {
            Call::Admit(request) => request.name.clone(),
            Call::Resize(name, _) | Call::Release(name) | Call::Reap(name, _) => name.clone(),
            _ => return,
        };
        let from = entry.from;
        self.history.push(Entry {
            call: Call::Publish(name),
            from,
            until,
            answer: None,
            after: Some(index),
            before: None,
        });
    }

    fn asked(&mut self, call: Call) -> usize {
        self.left = self.left.saturating_sub(1);
        self.note(call, Until::Maybe(NEVER), None)
    }

    /// Whether nothing is asked any more, and nobody waits.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0 && self.clients.is_empty() && self.calls.is_empty()
    }

    /// Takes note of what was answered; says to how many clients.
    pub(super) fn poll(&mut self) -> usize {
        let before = self.clients.len();
        for index in (0..self.clients.len()).rev() {
            match (self.clients[index].poll)() {
                Ok(None) | Err(Lost::Closed) => {}
                Ok(Some(answer)) => {
                    let waiting = self.clients.remove(index);
                    self.answered(waiting.index, answer);
                }
                Err(Lost::Failed) => {
                    let waiting = self.clients.remove(index);
                    self.clock += 1;
                    let (index, last, from) = (waiting.index, self.clock, self.history[waiting.index].from);
                    self.history[index].until = Until::Maybe(last);
                    let undo = self.note(Call::Undo(index), Until::Undoes(index, last), None);
                    self.history[undo].from = from;
                }
            }
        }
        for index in (0..self.calls.len()).rev() {
            if let Ok(Some(answer)) = (self.calls[index].0.poll)() {
                let (waiting, id) = self.calls.remove(index);
                self.answered(waiting.index, answer.clone());
                self.go_on(&id, &answer);
            }
        }
        before - self.clients.len()
    }

    fn answered(&mut self, index: usize, answer: Answer) {
        self.clock += 1;
        let until = Until::Answered(self.clock);
        if matches!(answer, Answer::Done | Answer::Given(..)) {
            self.publishes(index, until);
        }
        (self.history[index].until, self.history[index].answer) = (until, Some(answer));
    }

    /// What the runtime does when it is answered.
    fn go_on(&mut self, id: &str, answer: &Answer) {
        let Some(container) = self.containers.get_mut(id) else { return };
        container.is_waiting = false;
        match (container.stage, answer) {
            (Stage::Asked, Answer::Done) => container.stage = Stage::Admitted,
            (Stage::Asked | Stage::Admitted, Answer::Given(..)) => container.stage = Stage::Created,
            (Stage::Created, _) => {
                container.stage = Stage::Running;
                self.bound.insert(id.to_owned());
            }
            (Stage::Asked | Stage::Admitted, _) => drop(self.containers.remove(id)),
            (Stage::Running | Stage::Stopped, _) => {}
        }
    }

    /// What the kernel does by itself.
    pub(super) fn follow_kernel(&self) {
        let pods = self.containers.values().map(|container| self.dir_of(&container.ask));
        for dir in NAMES.iter().map(|name| self.root.join(name)).chain(pods) {
            for (knob, all) in [
                ("cpuset.cpus", self.machine.possible_cpus.to_string()),
                ("cpuset.mems", self.machine.node_ids().to_string()),
            ] {
                let Ok(text) = fs::read_to_string(dir.join(knob)) else { continue };
                let text = if text.trim().is_empty() { all } else { text };
                // It may go at any time.
                let _ = fs::write(dir.join(format!("{knob}.effective")), text);
            }
        }
    }

    fn dir_of(&self, ask: &ContainerPlacementRequest) -> PathBuf {
        self.root.join(ask.cgroup.as_str().trim_start_matches('/'))
    }

    /// The cgroups of containers that were bound and run.
    pub(super) fn running(&self) -> impl Iterator<Item = (&str, PathBuf)> {
        let bound = self.containers.values().filter(|container| {
            container.stage == Stage::Running
                && !container.is_waiting
                && self.bound.contains(&container.ask.id)
        });
        bound.map(|container| (container.ask.id.as_str(), self.dir_of(&container.ask)))
    }

    /// Somebody does something, if the daemon would wait or chance wants it.
    pub(super) fn step(&mut self) {
        self.poll();
        match self.rng.u32(0..20) {
            0..=4 => self.client(),
            // Several wait at once.
            5 => (0..CLIENTS).for_each(|_| self.client()),
            6..=11 => self.runtime(),
            12 if self.left > 0 => self.vanish(),
            13..=14 => self.look(),
            15 => self.abandon(),
            16 if self.rng.u32(0..4) == 0 => self.connect(),
            _ => {}
        }
    }

    fn send(&self, message: Message) {
        // One that has ended takes no more.
        let _ = self.commands.as_ref().map(|commands| commands.send(message));
    }

    fn client(&mut self) {
        if self.left == 0 || self.clients.len() >= CLIENTS {
            return;
        }
        let name = NAMES[self.rng.usize(..NAMES.len())];
        match self.rng.u32(0..6) {
            0..=2 => self.admit(name),
            3..=4 => {
                let index = self.asked(Call::Release(name.to_owned()));
                let (answer, result) = oneshot::channel();
                self.send(Message::Internal(Command::Release { name: name.to_owned(), answer }));
                let done = |()| Answer::Done;
                self.clients
                    .push(Waiting { index, poll: poll(result, move |it| it.map(done).or_else(refused)) });
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
        let index = self.asked(call);
        let (answer, result) = oneshot::channel();
        self.send(Message::Internal(Command::Admit { request, dry_run: false, answer }));
        self.clients.push(Waiting { index, poll: poll(result, given) });
    }

    fn resize(&mut self, name: &str) {
        let memory = ["256Mi", "1Gi", "2Gi", "3Gi"][self.rng.usize(..4)];
        let asked = api::Resize { memory: Some(memory.to_owned()), ..api::Resize::default() };
        let resize = Resize::new(name.to_owned(), &asked).unwrap();
        let to = Resources::none().with_memory(Quantity::whole(resize.memory.unwrap().0));
        let index = self.asked(Call::Resize(name.to_owned(), to));
        let (answer, result) = oneshot::channel();
        self.send(Message::Internal(Command::Resize { resize: Box::new(resize), dry_run: false, answer }));
        self.clients.push(Waiting { index, poll: poll(result, given) });
    }

    /// A client goes away while it waits.
    fn abandon(&mut self) {
        if !self.clients.is_empty() {
            let waiting = self.clients.swap_remove(self.rng.usize(..self.clients.len()));
            self.give_up(waiting.index, true);
        }
    }

    fn vanish(&mut self) {
        let name = NAMES[self.rng.usize(..NAMES.len())];
        let dir = self.root.join(name);
        if !dir.exists() {
            fixture::cgroup(&dir, &self.machine);
            *self.cgroups.entry(name).or_default() += 1;
            self.happens(Call::Appear(name.to_owned()), Answer::Done);
        } else if self.rng.bool() {
            remove(&dir);
            self.happens(Call::Vanish(name.to_owned()), Answer::Done);
            let reap = Call::Reap(name.to_owned(), self.cgroups[name]);
            let index = self.note(reap, Until::Maybe(NEVER), None);
            self.publishes(index, Until::MaybeUndoes(index, NEVER));
        }
    }

    fn look(&mut self) {
        let view = self.view.read().clone();
        if self.left > 0 && self.commands.is_some() {
            let others = view.allocations.iter().filter(|it| NAMES.contains(&it.name.as_str()));
            let lines = others.map(|held| line(&held.name, &held.cpus, &held.nodes)).collect();
            self.happens(Call::Look, Answer::List(lines));
        }
    }

    /// The runtime starts anew, if it ran, and lists what runs.
    fn connect(&mut self) {
        let before: Vec<usize> = self.calls.iter().map(|(waiting, _)| waiting.index).collect();
        self.drop_calls();
        let there = || self.containers.values().filter(|it| it.stage >= Stage::Created);
        let containers: Vec<ContainerPlacementRequest> =
            there().filter(|it| it.stage < Stage::Stopped).map(|it| it.ask.clone()).collect();
        // One that was admitted as a whole and has no container yet is a sandbox all the same.
        let pods = self.containers.values().filter(|it| it.stage >= Stage::Admitted);
        let sandboxes: BTreeMap<String, String> =
            pods.map(|it| (it.ask.pod.sandbox.clone(), it.ask.pod.pod.uid.clone())).collect();
        let ids = containers.iter().map(|ask| ask.id.clone()).collect();
        let index = self.asked(Call::Synchronize(ids, sandboxes.keys().cloned().collect()));
        for earlier in before {
            self.history[earlier].before = Some(index);
        }
        let (answer, result) = oneshot::channel();
        let list = PodCommand::Synchronize { containers, sandboxes, complete: true, answer };
        self.send(Message::Runtime(Box::new(list)));
        let done = |_: SyncResult| Ok(Answer::Done);
        self.calls.push((Waiting { index, poll: poll(result, done) }, String::new()));
        self.listed = Some(index);
    }

    /// The next call of a runtime's for one of its containers.
    fn runtime(&mut self) {
        if self.listed.is_none() {
            return self.connect();
        }
        if self.left == 0 || self.calls.len() >= CALLS {
            return;
        }
        if self.containers.len() < 4 && self.rng.bool() {
            self.made += 1;
            let millicpus = [500, 1000, 2000, 3000][self.rng.usize(..4)];
            let ask = container(&format!("p{}", self.made), millicpus, self.rng.bool());
            self.containers.insert(ask.id.clone(), Container { ask, stage: Stage::Asked, is_waiting: false });
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
            Stage::Asked if matches!(ask.pod.asked, PodClaim::Pod(_)) => {
                let (answer, result) = oneshot::channel();
                let command = PodCommand::RunPod { ask: Box::new(ask.pod.clone()), answer };
                let done = |it: Result<(), _>| it.map(|()| Answer::Done).or_else(refused);
                (Call::RunPod(Box::new(ask)), command, poll(result, done))
            }
            Stage::Asked | Stage::Admitted => {
                let (answer, result) = oneshot::channel();
                let command = PodCommand::Create { ask: Box::new(ask.clone()), answer };
                let created = |it: Result<(Settings, Option<UnpinnedReason>), _>| match it {
                    Ok((settings, None)) => {
                        let cpus = settings.cpus.unwrap_or_default().to_string();
                        Ok(Answer::Given(cpus, settings.mems.unwrap_or_default().to_string()))
                    }
                    Ok((_, Some(unpinned))) => panic!("{unpinned:?}"),
                    Err(error) => refused(error),
                };
                (Call::Create(Box::new(ask)), command, poll(result, created))
            }
            Stage::Created => {
                fixture::cgroup(dir.parent().unwrap(), &self.machine);
                fixture::cgroup(&dir, &self.machine);
                let (answer, result) = oneshot::channel();
                let command = PodCommand::Bind { id: id.clone(), ask: None, answer };
                let bound = |unpinned| {
                    assert_eq!(unpinned, None);
                    Ok(Answer::Done)
                };
                (Call::Bind(Box::new(ask)), command, poll(result, bound))
            }
            Stage::Running => {
                if is_quick {
                    remove(&dir);
                }
                // Whatever is answered.
                container.stage = Stage::Stopped;
                let (answer, result) = oneshot::channel();
                let command = PodCommand::Stopped { id: id.clone(), answer };
                (Call::Stopped(id.clone()), command, poll(result, |()| Ok(Answer::Done)))
            }
            Stage::Stopped => {
                remove(dir.parent().unwrap());
                self.containers.remove(&id);
                let (answer, result) = oneshot::channel();
                let (uid, sandbox) = (ask.pod.pod.uid.clone(), ask.pod.sandbox.clone());
                let command = PodCommand::PodStopped { uid, sandbox: sandbox.clone(), answer };
                (Call::PodStopped(sandbox), command, poll(result, |()| Ok(Answer::Done)))
            }
        };
        let index = self.asked(call);
        self.history[index].after = self.listed;
        self.send(Message::Runtime(Box::new(command)));
        self.calls.push((Waiting { index, poll }, id));
    }
}

fn remove(dir: &Path) {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        result => result.unwrap(),
    }
}

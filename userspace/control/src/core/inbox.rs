//! Queues of received commands. Those of the container runtime are handled first.
//!
//! While the reconciler waits for the kernel or for systemd (see `execution`), it handles only commands of the runtime
//! that affect other cgroups. All other commands keep their order. A command that was taken too early returns to its
//! place, so that a later command for the same container or pod never overtakes it.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::Receiver,
    },
    time::Duration,
};

use numaward_guarantee::{
    command::{Command, Message, PodCommand},
    pod::Update,
    request::Target,
};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

#[cfg(test)]
use super::disorder::{self, Disorder};

/// Returns true if the client has stopped waiting for the answer. Releases and cancellations are handled all the same.
fn is_abandoned(command: &Command) -> bool {
    match command {
        Command::Admit { answer, .. } | Command::Resize { answer, .. } => answer.is_closed(),
        Command::Plan { answer, .. } => answer.is_closed(),
        Command::Rebalance { answer, .. } => answer.is_closed(),
        Command::KubeletState { answer } => answer.is_closed(),
        Command::ReserveClaim { answer, .. } => answer.is_closed(),
        Command::PlaceClaim { answer, .. } => answer.is_closed(),
        Command::ReservedClaims { answer } => answer.is_closed(),
        Command::Release { .. }
        | Command::Cancel { .. }
        | Command::LimitClaims { .. }
        | Command::ReleaseClaim { .. }
        | Command::Declare { .. }
        | Command::Cgroups(_)
        | Command::KnobsChanged => false,
    }
}

/// Returns true if the command only reports an event.
fn is_news(command: &Command) -> bool {
    matches!(command, Command::Cgroups(_) | Command::KnobsChanged)
}

/// Returns the batch kind and the name of a command that can be batched. A command that requires a query to systemd
/// cannot.
pub(crate) fn batch_key(command: &Command) -> Option<(BatchKind, &str)> {
    match command {
        Command::Admit { request, dry_run: false, .. }
            if matches!(request.target, Target::Exec | Target::Cgroup(_)) =>
        {
            Some((BatchKind::Admission, &request.name))
        }
        Command::Release { name, .. } => Some((BatchKind::Release, name)),
        _ => None,
    }
}

/// Kind of commands that can be handled as one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchKind {
    Admission,
    Release,
}

/// Maximum number of commands in a batch. The container runtime waits while they are decided.
pub(crate) const MAX_BATCH_LEN: usize = 32;

/// Counter of pending cgroup events. Limits their number if a program creates cgroups faster than they are handled.
#[derive(Clone, Debug, Default)]
pub(crate) struct CgroupNews(Arc<NewsCount>);

#[derive(Debug, Default)]
struct NewsCount {
    waiting: AtomicUsize,
    has_lost: AtomicBool,
}

/// Maximum number of pending events; further events are dropped.
const MAX_PENDING_NEWS: usize = 65_536;

impl CgroupNews {
    /// Adds events; returns false if the limit is reached and they must be dropped.
    pub(crate) fn add(&self, count: usize) -> bool {
        let may = self.0.waiting.load(Ordering::Acquire) < MAX_PENDING_NEWS;
        if may {
            self.0.waiting.fetch_add(count, Ordering::AcqRel);
        } else {
            self.0.has_lost.store(true, Ordering::Release);
        }
        may
    }

    /// Removes handled events; returns true if events were dropped since the last call, so that all cgroups must be
    /// scanned.
    pub(crate) fn take(&self, count: usize) -> bool {
        self.0.waiting.fetch_sub(count, Ordering::AcqRel);
        self.0.has_lost.swap(false, Ordering::AcqRel)
    }
}

/// Received commands that are not handled yet.
pub(crate) struct Inbox {
    queue: Receiver<Message>,
    /// Sorted by number, which is the order of arrival.
    runtime: VecDeque<RuntimeCommand>,
    /// Sorted by number.
    clients: VecDeque<QueuedCommand>,
    received: u64,
    /// Runs the other threads of a test in place of a wait.
    #[cfg(test)]
    pub(crate) run_other_threads: Option<Box<dyn FnMut(Duration) + Send>>,
}

/// A command of a client, with its sequence number.
pub(crate) struct QueuedCommand {
    number: u64,
    pub(crate) command: Command,
    /// True if an earlier command was not handled yet when this one was taken.
    pub(crate) overtakes: bool,
    /// Place in the client queue, released with the command.
    _place: Option<OwnedSemaphorePermit>,
}

/// A command of the container runtime, with its sequence number.
pub(crate) struct RuntimeCommand {
    pub(crate) number: u64,
    pub(crate) command: PodCommand,
}

impl Inbox {
    pub(crate) fn new(queue: Receiver<Message>) -> Self {
        Self {
            queue,
            runtime: VecDeque::new(),
            clients: VecDeque::new(),
            received: 0,
            #[cfg(test)]
            run_other_threads: None,
        }
    }

    /// Receives all available messages; waits up to `patience` for the first one.
    pub(crate) fn receive(&mut self, patience: Duration) {
        #[cfg(test)]
        let patience = self.run_other_threads.as_mut().map_or(patience, |run| {
            run(patience);
            Duration::ZERO
        });
        let first = self.queue.recv_timeout(patience).ok();
        let mut next = first;
        while let Some(message) = next {
            match message {
                Message::Runtime(command) => {
                    let number = self.next_number();
                    self.runtime.push_back(RuntimeCommand { number, command: *command });
                }
                Message::Client(command, place) => self.enter(command, Some(place)),
                Message::Internal(command) => self.enter(command, None),
                // It only ends the wait.
                Message::Completed => {}
            }
            next = self.queue.try_recv().ok();
        }
    }

    fn next_number(&mut self) -> u64 {
        self.received += 1;
        self.received
    }

    fn enter(&mut self, command: Command, place: Option<OwnedSemaphorePermit>) {
        let number = self.next_number();
        self.clients.push_back(QueuedCommand { number, command, overtakes: false, _place: place });
    }

    /// Returns true if the container runtime waits for an answer.
    pub(crate) fn has_runtime(&self) -> bool {
        !self.runtime.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runtime.is_empty() && self.clients.is_empty()
    }

    /// Removes the oldest command of the container runtime.
    pub(crate) fn next_runtime_command(&mut self) -> Option<RuntimeCommand> {
        self.runtime.pop_front()
    }

    /// Removes the oldest command of the container runtime that may be handled now; also returns true if it overtakes
    /// an earlier one. No command overtakes `Synchronize`: its list is older, so that it would treat a newer container
    /// as gone.
    pub(super) fn next_answerable(
        &mut self,
        may: impl Fn(&PodCommand) -> bool,
    ) -> Option<(RuntimeCommand, bool)> {
        let is_all = |command: &PodCommand| matches!(command, PodCommand::Synchronize { .. });
        #[cfg(test)]
        let is_all =
            |command: &PodCommand| is_all(command) && !disorder::is_injected(Disorder::OvertakenList);
        let mut commands = self.runtime.iter().map(|numbered| &numbered.command);
        let place = commands.by_ref().take_while(|command| !is_all(command)).position(may)?;
        Some((self.runtime.remove(place)?, place > 0))
    }

    /// Puts commands of the runtime back into their places.
    pub(super) fn requeue_runtime(&mut self, commands: Vec<RuntimeCommand>) {
        self.runtime.extend(commands);
        self.runtime.make_contiguous().sort_by_key(|numbered| numbered.number);
    }

    /// Removes the oldest client command that is not abandoned, and the later commands that can be batched with it. No
    /// command overtakes an earlier one with the same name.
    pub(crate) fn next(&mut self) -> Vec<QueuedCommand> {
        let mut others = std::iter::from_fn(|| self.clients.pop_front());
        let Some(first) = others.find(|waiting| !is_abandoned(&waiting.command)) else { return Vec::new() };
        let Some((kind, name)) = batch_key(&first.command) else { return vec![first] };
        let mut names = BTreeSet::from([name.to_owned()]);
        let (mut together, mut overtakes, mut place) = (vec![first], false, 0);
        while let Some(waiting) = self.clients.get(place).filter(|_| together.len() < MAX_BATCH_LEN) {
            if is_abandoned(&waiting.command) {
                self.clients.remove(place);
                continue;
            }
            match batch_key(&waiting.command) {
                Some((other, name)) => {
                    if names.insert(name.to_owned()) && other == kind {
                        let waiting = self.clients.remove(place);
                        together.extend(waiting.map(|waiting| QueuedCommand { overtakes, ..waiting }));
                        continue;
                    }
                    overtakes = true;
                }
                None if is_news(&waiting.command) => {}
                None => break,
            }
            place += 1;
        }
        together
    }

    /// Puts client commands back into their places.
    pub(crate) fn requeue_clients(&mut self, waiting: Vec<QueuedCommand>) {
        self.clients.extend(waiting.into_iter().map(|waiting| QueuedCommand { overtakes: false, ..waiting }));
        self.clients.make_contiguous().sort_by_key(|waiting| waiting.number);
    }
}

/// Channel to inform the runtime of written settings.
#[derive(Debug, Default)]
pub(crate) struct Outbox(Option<mpsc::UnboundedSender<Vec<Update>>>);

impl Outbox {
    pub(super) fn open(&mut self, sender: mpsc::UnboundedSender<Vec<Update>>) {
        self.0 = Some(sender);
    }

    pub(super) fn send(&self, updates: Vec<Update>) {
        if let Some(sender) = self.0.as_ref().filter(|_| !updates.is_empty()) {
            // The receiver is closed only at the end of the daemon.
            let _ = sender.send(updates);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_pending_events() {
        let news = CgroupNews::default();
        assert!(news.add(MAX_PENDING_NEWS - 1) && news.add(10));
        assert!(!news.add(1) && !news.add(1));
        assert!(news.take(MAX_PENDING_NEWS - 1), "some were lost");
        assert!(!news.take(10));
        assert!(news.add(1));
    }
}

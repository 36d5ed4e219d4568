//! What the reconciler is asked: two queues, of which that of the container runtime goes first.
//!
//! While the kernel or systemd is waited for (see `execution`), only what a runtime waits for is handled, and of
//! that only what does not touch the same cgroups. All else stays in its order, and what was tried too early returns to
//! its place: what a runtime says later of the same container or pod never comes first.

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
    request::Target,
};
use tokio::sync::OwnedSemaphorePermit;

#[cfg(test)]
use super::disorder::{self, Disorder};

/// Whether nobody waits any more for what would be given, changed or shown. What gives something back is done all the same.
fn is_abandoned(command: &Command) -> bool {
    match command {
        Command::Admit { answer, .. } | Command::Resize { answer, .. } => answer.is_closed(),
        Command::Plan { answer, .. } => answer.is_closed(),
        Command::Rebalance { answer, .. } => answer.is_closed(),
        Command::KubeletState { answer } => answer.is_closed(),
        Command::Release { .. } | Command::Cancel { .. } | Command::Cgroups(_) | Command::KnobsChanged => {
            false
        }
    }
}

/// Whether it only says what has happened already.
fn is_news(command: &Command) -> bool {
    matches!(command, Command::Cgroups(_) | Command::KnobsChanged)
}

/// With what a command can be done together, and for whom it is. Not what systemd is asked for first.
pub(crate) fn goes_with(command: &Command) -> Option<(Kind, &str)> {
    match command {
        Command::Admit { request, dry_run: false, .. }
            if matches!(request.target, Target::Exec | Target::Cgroup(_)) =>
        {
            Some((Kind::Admission, &request.name))
        }
        Command::Release { name, .. } => Some((Kind::Release, name)),
        _ => None,
    }
}

/// What can be done together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Admission,
    Release,
}

/// No more are done together: a container runtime waits for the decisions on them.
pub(crate) const MOST_TOGETHER: usize = 32;

/// News of cgroups that wait to be handled: not without end, however many cgroups somebody makes meanwhile.
#[derive(Clone, Debug, Default)]
pub(crate) struct CgroupNews(Arc<NewsCount>);

#[derive(Debug, Default)]
struct NewsCount {
    waiting: AtomicUsize,
    has_lost: AtomicBool,
}

/// No more are taken while so many wait.
const MOST_NEWS: usize = 65_536;

impl CgroupNews {
    /// Whether so many more may wait. If not, they are lost.
    pub(crate) fn add(&self, count: usize) -> bool {
        let may = self.0.waiting.load(Ordering::Acquire) < MOST_NEWS;
        if may {
            self.0.waiting.fetch_add(count, Ordering::AcqRel);
        } else {
            self.0.has_lost.store(true, Ordering::Release);
        }
        may
    }

    /// So many are handled. Says whether others were lost, so that all cgroups are to be looked at.
    pub(crate) fn take(&self, count: usize) -> bool {
        self.0.waiting.fetch_sub(count, Ordering::AcqRel);
        self.0.has_lost.swap(false, Ordering::AcqRel)
    }
}

/// Commands that were received and not handled yet.
pub(crate) struct Inbox {
    queue: Receiver<Message>,
    /// In the order of their numbers, which is that in which they came.
    runtime: VecDeque<Numbered>,
    /// Likewise.
    others: VecDeque<Waiting>,
    received: u64,
    /// Lets others run before something is received, instead of a wait.
    #[cfg(test)]
    pub(crate) others_run: Option<Box<dyn FnMut(Duration) + Send>>,
}

/// A command of others, with its number.
pub(crate) struct Waiting {
    number: u64,
    pub(crate) command: Command,
    /// Whether it was taken before one that came before it.
    pub(crate) overtakes: bool,
    /// Kept while it waits.
    _place: Option<OwnedSemaphorePermit>,
}

/// A command of the container runtime, with its number.
pub(crate) struct Numbered {
    pub(crate) number: u64,
    pub(crate) command: PodCommand,
}

impl Inbox {
    pub(crate) fn new(queue: Receiver<Message>) -> Self {
        Self {
            queue,
            runtime: VecDeque::new(),
            others: VecDeque::new(),
            received: 0,
            #[cfg(test)]
            others_run: None,
        }
    }

    /// Receives all that is there; waits for something if nothing is.
    pub(crate) fn receive(&mut self, patience: Duration) {
        #[cfg(test)]
        let patience = self.others_run.as_mut().map_or(patience, |run| {
            run(patience);
            Duration::ZERO
        });
        let first = self.queue.recv_timeout(patience).ok();
        let mut next = first;
        while let Some(message) = next {
            match message {
                Message::Runtime(command) => {
                    let number = self.next_number();
                    self.runtime.push_back(Numbered { number, command: *command });
                }
                Message::Client(command, place) => self.enter(command, Some(place)),
                Message::Internal(command) => self.enter(command, None),
                // It only wakes.
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
        self.others.push_back(Waiting { number, command, overtakes: false, _place: place });
    }

    /// Whether the container runtime waits for an answer.
    pub(crate) fn has_runtime(&self) -> bool {
        !self.runtime.is_empty()
    }

    /// Whether there is anything to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.runtime.is_empty() && self.others.is_empty()
    }

    /// What the container runtime asked first.
    pub(crate) fn next_of_runtime(&mut self) -> Option<Numbered> {
        self.runtime.pop_front()
    }

    /// What the container runtime asked first of that which may be handled now, and whether it overtakes something.
    /// Nothing overtakes `Synchronize`: its list is older, so that it would treat a newer container as gone.
    pub(super) fn next_that(&mut self, may: impl Fn(&PodCommand) -> bool) -> Option<(Numbered, bool)> {
        let is_all = |command: &PodCommand| matches!(command, PodCommand::Synchronize { .. });
        #[cfg(test)]
        let is_all =
            |command: &PodCommand| is_all(command) && !disorder::is_injected(Disorder::OvertakenList);
        let mut commands = self.runtime.iter().map(|numbered| &numbered.command);
        let place = commands.by_ref().take_while(|command| !is_all(command)).position(may)?;
        Some((self.runtime.remove(place)?, place > 0))
    }

    /// What the runtime asked is to be tried again, in the place where it came.
    pub(super) fn put_back(&mut self, commands: Vec<Numbered>) {
        self.runtime.extend(commands);
        self.runtime.make_contiguous().sort_by_key(|numbered| numbered.number);
    }

    /// What anybody else asked first, and still waits for; with admissions also others, and with releases also others, that
    /// wait behind it. None overtakes what is asked for the same name.
    pub(crate) fn next(&mut self) -> Vec<Waiting> {
        let mut others = std::iter::from_fn(|| self.others.pop_front());
        let Some(first) = others.find(|waiting| !is_abandoned(&waiting.command)) else { return Vec::new() };
        let Some((kind, name)) = goes_with(&first.command) else { return vec![first] };
        let mut names = BTreeSet::from([name.to_owned()]);
        let (mut together, mut overtakes, mut place) = (vec![first], false, 0);
        while let Some(waiting) = self.others.get(place).filter(|_| together.len() < MOST_TOGETHER) {
            if is_abandoned(&waiting.command) {
                self.others.remove(place);
                continue;
            }
            match goes_with(&waiting.command) {
                Some((other, name)) => {
                    if names.insert(name.to_owned()) && other == kind {
                        let waiting = self.others.remove(place);
                        together.extend(waiting.map(|waiting| Waiting { overtakes, ..waiting }));
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

    /// What others asked is to be tried again, in the place where it came.
    pub(crate) fn put_back_others(&mut self, waiting: Vec<Waiting>) {
        self.others.extend(waiting.into_iter().map(|waiting| Waiting { overtakes: false, ..waiting }));
        self.others.make_contiguous().sort_by_key(|waiting| waiting.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_so_much_news_waits_and_that_more_was_lost_is_said_once() {
        let news = CgroupNews::default();
        assert!(news.add(MOST_NEWS - 1) && news.add(10));
        assert!(!news.add(1) && !news.add(1));
        assert!(news.take(MOST_NEWS - 1), "some were lost");
        assert!(!news.take(10));
        assert!(news.add(1));
    }
}

//! What the reconciler is asked: two queues, of which that of the container runtime goes first.
//!
//! While the kernel or systemd is waited for ([`super::execution`]), only what a runtime waits for is handled, and of
//! that only what does not touch the same cgroups. All else stays in its order.

use std::{
    collections::VecDeque,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Duration,
};

use super::{Command, pods};

/// Commands that were received and not handled yet.
pub(super) struct Inbox {
    queue: Receiver<Command>,
    runtime: VecDeque<pods::Command>,
    others: VecDeque<Command>,
}

impl Inbox {
    pub(super) fn new(queue: Receiver<Command>) -> Self {
        Self { queue, runtime: VecDeque::new(), others: VecDeque::new() }
    }

    /// Receives all that is there; waits for something if nothing is. `false`: nobody is left who could ask.
    pub(super) fn receive(&mut self, patience: Duration) -> bool {
        match self.queue.recv_timeout(patience) {
            Ok(command) => self.sort(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        while let Ok(command) = self.queue.try_recv() {
            self.sort(command);
        }
        true
    }

    fn sort(&mut self, command: Command) {
        match command {
            Command::Pods(command) => self.runtime.push_back(*command),
            // It only wakes.
            Command::Done => {}
            command => self.others.push_back(command),
        }
    }

    /// Whether the container runtime waits for an answer.
    pub(super) fn has_runtime(&self) -> bool {
        !self.runtime.is_empty()
    }

    /// Whether there is anything to do.
    pub(super) fn is_empty(&self) -> bool {
        self.runtime.is_empty() && self.others.is_empty()
    }

    /// What the container runtime asked first.
    pub(super) fn next_of_runtime(&mut self) -> Option<pods::Command> {
        self.runtime.pop_front()
    }

    /// What the container runtime asked first of that which may be handled now, and whether it overtakes something.
    /// Nothing overtakes what tells all that runs: that would take it for gone.
    pub(super) fn next_that(
        &mut self,
        may: impl Fn(&pods::Command) -> bool,
    ) -> Option<(pods::Command, bool)> {
        let is_all = |command: &&pods::Command| matches!(command, pods::Command::Synchronize { .. });
        let place = self.runtime.iter().take_while(|command| !is_all(command)).position(may)?;
        Some((self.runtime.remove(place)?, place > 0))
    }

    /// What the runtime asked is to be tried again, after what else it asked.
    pub(super) fn put_back(&mut self, commands: Vec<pods::Command>) {
        self.runtime.extend(commands);
    }

    /// What anybody else asked first.
    pub(super) fn next(&mut self) -> Option<Command> {
        self.others.pop_front()
    }
}

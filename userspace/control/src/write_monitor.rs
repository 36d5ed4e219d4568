//! Monitor of writes to knobs: records the writers that the kernel reports, until the reconciler reads them.
//!
//! # Problem
//! A writer may end right after its write, while the reconciler is busy with moving pages. A program that writes permanently must not keep
//! the reconciler busy.
//!
//! # Algorithm
//! A thread waits for events of the kernel, looks up each writer at once, and stores the last writer of each knob. The reconciler is woken
//! for the first new record, and takes all records at once. Between two reads the thread sleeps, while the kernel merges repeated events.
//! Before the reconciler reports a drift, it reads the events itself, so that no writer is reported as unknown because the thread is late.

use std::{
    collections::BTreeMap,
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use numaward_cgroup::{CgroupPath, KnobEvent, KnobWatch, KnobWatchError, KnobWriter, knob::Knob};
use numaward_model::health::{self, Heartbeats};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use tokio_util::sync::CancellationToken;

/// Maximum delay until the thread notices that it must stop, or that the kernel reports no events any more. No other thread waits for that.
const POLL_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// Pause after each read of events.
const READ_INTERVAL: Duration = Duration::from_millis(20);

/// Time that one iteration of the loop may take before the thread counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_mins(1);

/// Writes since the reconciler last read them.
#[derive(Debug, Default)]
pub(super) struct ObservedWrites {
    /// The last writer of each knob; `None` if it is outside of the daemon's PID namespace.
    pub(super) knobs: BTreeMap<(CgroupPath, Knob), Option<KnobWriter>>,
    /// True if the kernel has dropped events: any knob may have been written.
    pub(super) everything: bool,
}

#[derive(Debug, Default)]
struct MonitorState {
    seen: ObservedWrites,
    /// True if the reconciler was woken for these writes.
    reported: bool,
    /// True if events cannot be read any more.
    failed: bool,
}

/// Watches knobs and records their writers.
#[derive(Debug)]
pub(super) struct WriteMonitor {
    watch: KnobWatch,
    state: Mutex<MonitorState>,
}

impl WriteMonitor {
    pub(super) fn new(watch: KnobWatch) -> Self {
        Self { watch, state: Mutex::default() }
    }

    /// Starts the thread, which calls `wake` after new writes. It ends when `wake` returns false or `stop` is cancelled.
    pub(super) fn spawn(
        self: &Arc<Self>,
        wake: impl Fn() -> bool + Send + 'static,
        heartbeats: &Heartbeats,
        stop: &CancellationToken,
    ) -> io::Result<JoinHandle<()>> {
        let (this, ended) = (Arc::clone(self), stop.clone());
        heartbeats.spawn("write_monitor", HANG_TIMEOUT, stop, move || {
            while !ended.is_cancelled() && !this.state.lock().failed {
                health::beat();
                match poll(&mut [PollFd::new(&this.watch, PollFlags::IN)], Some(&POLL_TIMEOUT)) {
                    Ok(0) | Err(Errno::INTR) => continue,
                    Ok(_) => {}
                    Err(errno) => this.fail(&KnobWatchError::Read(errno.into())),
                }
                this.collect();
                if this.has_unreported_writes() && !wake() {
                    break;
                }
                thread::sleep(READ_INTERVAL);
            }
            // The reconciler checks the knobs periodically instead, so an ended thread is no fault.
            health::rest();
        })
    }

    /// Watches a knob; returns false if it cannot be watched and must be checked periodically.
    pub(super) fn add(&self, cgroup: &CgroupPath, knob: Knob) -> bool {
        if self.state.lock().failed {
            return false;
        }
        self.watch.add(cgroup, knob).unwrap_or_else(|error| {
            tracing::debug!(%error, "the knob cannot be watched, and is checked periodically");
            false
        })
    }

    /// Stops watching a knob.
    pub(super) fn remove(&self, cgroup: &CgroupPath, knob: Knob) {
        if let Err(error) = self.watch.remove(cgroup, knob) {
            // Its events concern no enforced knob, and are dropped.
            tracing::debug!(%error, "the knob is still watched");
        }
    }

    /// Reads the pending events.
    pub(super) fn collect(&self) {
        let mut state = self.state.lock();
        if state.failed {
            return;
        }
        match self.watch.read() {
            Ok(events) => events.into_iter().for_each(|event| match event {
                KnobEvent::Write { cgroup, knob, by } => drop(state.seen.knobs.insert((cgroup, knob), by)),
                KnobEvent::Overflow => state.seen.everything = true,
            }),
            Err(error) => {
                drop(state);
                self.fail(&error);
            }
        }
    }

    /// Returns true if there are writes for which the reconciler was not woken yet; later calls return false.
    fn has_unreported_writes(&self) -> bool {
        let mut state = self.state.lock();
        let is_news = !state.seen.knobs.is_empty() || state.seen.everything;
        is_news && !std::mem::replace(&mut state.reported, is_news)
    }

    /// Returns and removes the recorded writes.
    pub(super) fn take(&self) -> ObservedWrites {
        self.collect();
        let mut state = self.state.lock();
        state.reported = false;
        std::mem::take(&mut state.seen)
    }

    /// Returns true if the kernel still reports writes.
    pub(super) fn is_working(&self) -> bool {
        !self.state.lock().failed
    }

    fn fail(&self, error: &KnobWatchError) {
        let mut state = self.state.lock();
        if !state.failed {
            tracing::error!(%error, "knobs cannot be watched any more: they are checked every second");
            state.failed = true;
            state.seen.everything = true;
        }
    }
}

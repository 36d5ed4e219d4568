//! Who wrote the knobs that we hold: what the kernel reports at once, kept until the reconciler asks.
//!
//! Problem: a writer may end as soon as it has written, while the reconciler is busy moving pages; and one that writes
//! without end must not keep the reconciler busy.
//!
//! Algorithm: a thread waits for the kernel's events, asks at once who each writer is, and notes the last one of each
//! knob. The reconciler is woken when there is something new, and takes all notes at once. Between two readings the
//! thread pauses, in which the kernel merges what repeats itself. Before the reconciler reports a drift it reads the
//! events itself, so that no writer is reported as unknown because the thread is late.

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

/// How late the thread notices that it is to stop, or that the kernel cannot be asked any more: nobody waits for that.
const POLL_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// The pause after each reading.
const READ_INTERVAL: Duration = Duration::from_millis(20);

/// How long a turn may take before it counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_mins(1);

/// What was written since it was last asked.
#[derive(Debug, Default)]
pub(super) struct ObservedWrites {
    /// The last writer of each knob; `None` for one outside of our PID namespace.
    pub(super) knobs: BTreeMap<(CgroupPath, Knob), Option<KnobWriter>>,
    /// More happened than the kernel could report: any knob may have been written.
    pub(super) everything: bool,
}

#[derive(Debug, Default)]
struct State {
    seen: ObservedWrites,
    /// Whether the reconciler was woken for it.
    reported: bool,
    /// Whether the kernel can no longer be asked.
    failed: bool,
}

/// Watches knobs, and remembers who wrote them.
#[derive(Debug)]
pub(super) struct WriteMonitor {
    watch: KnobWatch,
    state: Mutex<State>,
}

impl WriteMonitor {
    /// Over this watch.
    pub(super) fn new(watch: KnobWatch) -> Self {
        Self { watch, state: Mutex::default() }
    }

    /// Starts the thread that calls `wake` when something was written, until that says `false` or `stop` is cancelled.
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
            // What cannot be watched is looked at instead.
            health::rest();
        })
    }

    /// Watches a knob; `false` if it cannot be watched, and has to be looked at.
    pub(super) fn add(&self, cgroup: &CgroupPath, knob: Knob) -> bool {
        if self.state.lock().failed {
            return false;
        }
        self.watch.add(cgroup, knob).unwrap_or_else(|error| {
            tracing::debug!(%error, "to be looked at instead");
            false
        })
    }

    /// Stops watching a knob.
    pub(super) fn remove(&self, cgroup: &CgroupPath, knob: Knob) {
        if let Err(error) = self.watch.remove(cgroup, knob) {
            // Its events concern nothing that is held, and are dropped.
            tracing::debug!(%error, "stays watched");
        }
    }

    /// Reads what happened until now.
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

    /// Whether there is something new; `true` once.
    fn has_unreported_writes(&self) -> bool {
        let mut state = self.state.lock();
        let is_news = !state.seen.knobs.is_empty() || state.seen.everything;
        is_news && !std::mem::replace(&mut state.reported, is_news)
    }

    /// Takes what was seen.
    pub(super) fn take(&self) -> ObservedWrites {
        self.collect();
        let mut state = self.state.lock();
        state.reported = false;
        std::mem::take(&mut state.seen)
    }

    /// Whether the kernel still reports writes.
    pub(super) fn is_working(&self) -> bool {
        !self.state.lock().failed
    }

    fn fail(&self, error: &KnobWatchError) {
        let mut state = self.state.lock();
        if !state.failed {
            tracing::error!(%error, "knobs are looked at every second instead of watched");
            state.failed = true;
            state.seen.everything = true;
        }
    }
}

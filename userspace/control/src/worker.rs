//! A thread that executes one job at a time. The caller polls for the result and never blocks.

use std::{
    fmt, io,
    sync::mpsc::{self, Receiver, Sender},
    time::Duration,
};

use numaward_model::health::{self, Heartbeats};
use tokio_util::sync::CancellationToken;

/// Handle of the thread.
pub(crate) struct Worker<Job, JobOutcome> {
    jobs: Sender<Job>,
    done: Receiver<JobOutcome>,
    is_busy: bool,
}

impl<Job, JobOutcome> fmt::Debug for Worker<Job, JobOutcome> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("is_busy", &self.is_busy).finish_non_exhaustive()
    }
}

impl<Job: Send + 'static, JobOutcome: Send + 'static> Worker<Job, JobOutcome> {
    /// Starts the thread, which counts as hung if it sends no heartbeat within `limit`. It ends when the handle is dropped, or
    /// after the current job when `stop` is cancelled.
    pub(crate) fn start(
        name: &'static str,
        limit: Duration,
        heartbeats: &Heartbeats,
        stop: &CancellationToken,
        mut perform: impl FnMut(Job) -> JobOutcome + Send + 'static,
    ) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let (sender, done) = mpsc::channel();
        let ended = stop.clone();
        let run = move || {
            health::rest();
            for job in queue {
                health::beat();
                // At the end of the daemon, the result is not needed.
                if ended.is_cancelled() || sender.send(perform(job)).is_err() {
                    break;
                }
                health::rest();
            }
            health::rest();
        };
        heartbeats.spawn(name, limit, stop, run)?;
        Ok(Self { jobs, done, is_busy: false })
    }

    /// Gives the thread a job. Returns false if it is busy or has ended.
    pub(crate) fn give(&mut self, job: Job) -> bool {
        if self.is_busy {
            return false;
        }
        // If the thread has ended unexpectedly, the heartbeats end the daemon.
        self.is_busy = self.jobs.send(job).is_ok();
        self.is_busy
    }

    /// Returns the result of the last job, once.
    pub(crate) fn take(&mut self) -> Option<JobOutcome> {
        let done = self.done.try_recv().ok()?;
        self.is_busy = false;
        Some(done)
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy
    }
}

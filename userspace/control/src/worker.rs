//! A thread that has one job at a time. The caller looks whether it is done; nobody waits.

use std::{
    fmt, io,
    sync::mpsc::{self, Receiver, Sender},
    time::Duration,
};

use numaward_model::health::{self, Heartbeats};
use tokio_util::sync::CancellationToken;

/// Gives jobs to the thread.
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
    /// Starts the thread, which counts as hung when it does not beat within `limit`. It ends with this, or when `stop` is
    /// cancelled and its job is done.
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
                // At the end of the daemon nobody takes the result.
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

    /// Gives it a job, unless it has one; whether it took it.
    pub(crate) fn give(&mut self, job: Job) -> bool {
        if self.is_busy {
            return false;
        }
        // A thread that has ended takes no more, and ends the daemon.
        self.is_busy = self.jobs.send(job).is_ok();
        self.is_busy
    }

    /// What came of the last job, once.
    pub(crate) fn take(&mut self) -> Option<JobOutcome> {
        let done = self.done.try_recv().ok()?;
        self.is_busy = false;
        Some(done)
    }

    /// Whether it has a job.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy
    }
}

//! Threads for work that reads files or takes locks.
//!
//! At most [`MAX_READERS`] requests work at a time, so that a hung file blocks only these. The threads have a lower
//! priority than all other threads of the daemon, so that many readers do not delay an admission.

use std::{cell::Cell, io, sync::Arc};

use axum::http::StatusCode;
use rustix::process::{getpid, getpriority_process, setpriority_process};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{JoinError, JoinHandle},
};

use crate::problem::Failure;

/// Difference of the `nice` value of a reader from that of the daemon. Of a CPU that it shares with another thread,
/// it then gets a tenth instead of half (`sched_prio_to_weight` in the kernel: 110 against 1024).
const NICE_OFFSET: i32 = 10;

/// Maximum number of requests that work at once; further ones wait.
pub(crate) const MAX_READERS: usize = 8;

/// A limited number of places for blocking work. Clones share the places.
#[derive(Clone, Debug)]
pub struct BlockingPool(Arc<Semaphore>);

impl Default for BlockingPool {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_READERS)))
    }
}

impl BlockingPool {
    /// Waits for a place.
    pub(crate) async fn place(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed; without a place, the work would merely not be counted.
        self.0.clone().acquire_owned().await.ok()
    }

    /// Waits for a place, then for the work. If the caller is dropped, the work continues and keeps its place.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let place = self.place().await;
        let done = spawn(move || {
            let _place = place;
            work()
        });
        done.await.map_err(|error| failed(&error))
    }
}

/// Returns the response to a request after a panic in its work.
pub(crate) fn failed(error: &JoinError) -> Failure {
    tracing::error!(%error, "a request failed");
    (StatusCode::INTERNAL_SERVER_ERROR, "numaward failed; see its log".to_owned())
}

/// Runs blocking work on a thread of low priority.
pub(crate) fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(move || {
        lower_priority();
        work()
    })
}

/// Returns a runtime with threads of a lower priority than all other threads of the daemon. It serves the
/// addresses to which any process can connect, so that a flood of connections does not delay admissions, which the
/// daemon's other runtime serves.
pub fn low_priority_runtime() -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("http")
        .on_thread_start(lower_priority)
        .enable_all()
        .build()
}

/// Lowers the priority of the current thread below that of the daemon's main thread. Further calls have no effect.
fn lower_priority() {
    thread_local!(static IS_DONE: Cell<bool> = const { Cell::new(false) });
    if IS_DONE.replace(true) {
        return;
    }
    let main = getpriority_process(Some(getpid()));
    if let Err(error) = main.and_then(|main| setpriority_process(None, main + NICE_OFFSET)) {
        tracing::debug!(%error, "the priority of a reader thread could not be lowered");
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn readers_have_low_priority() {
        let own = getpriority_process(None).unwrap();
        for _ in 0..3 {
            let reads = spawn(|| getpriority_process(None).unwrap()).await.unwrap();
            assert_eq!((reads, getpriority_process(None).unwrap()), (own + NICE_OFFSET, own));
        }
    }

    #[test]
    fn runtime_threads_have_low_priority() {
        let own = getpriority_process(None).unwrap();
        let runtime = low_priority_runtime().unwrap();
        let worker = async {
            let priority = || getpriority_process(None).unwrap();
            [priority(), tokio::task::spawn_blocking(priority).await.unwrap(), spawn(priority).await.unwrap()]
        };
        let priorities = runtime.block_on(runtime.spawn(worker)).unwrap();
        assert_eq!(priorities, [own + NICE_OFFSET; 3]);
    }

    #[tokio::test]
    async fn limits_concurrent_work() {
        let blocking = BlockingPool::default();
        let mut stuck = Vec::new();
        for _ in 0..MAX_READERS {
            let (release, released) = mpsc::channel::<()>();
            let work = blocking.run(move || released.recv().is_err());
            assert!(tokio::time::timeout(Duration::from_millis(10), work).await.is_err());
            stuck.push(release);
        }
        let waits = tokio::time::timeout(Duration::from_millis(10), blocking.run(|| ())).await;
        assert!(waits.is_err());
        stuck.pop();
        assert!(blocking.run(|| ()).await.is_ok());
    }
}

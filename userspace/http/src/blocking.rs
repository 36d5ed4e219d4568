//! Work that reads files or takes locks, on threads that may block. At most [`MAX_READERS`] at a time, so that a hanging
//! file blocks only these. The threads give way to all others of the daemon: many readers at once hold up no admission.

use std::{cell::Cell, io, sync::Arc};

use axum::http::StatusCode;
use rustix::process::{getpid, getpriority_process, setpriority_process};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{JoinError, JoinHandle},
};

use crate::problem::Failure;

/// By so much, the `nice` value of a reader is above that of the daemon. Of a CPU that it shares with another thread, it then gets a
/// tenth instead of half (`sched_prio_to_weight` in the kernel: 110 against 1024).
const GIVE_WAY: i32 = 10;

/// Requests that are worked on at once; more wait.
const MAX_READERS: usize = 8;

/// Runs such work. Clones share the places.
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

    /// Waits for a place, then for the work. It goes on, and keeps its place, where nobody waits for it any more.
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

/// What a request is answered of which the work panicked.
pub(crate) fn failed(error: &JoinError) -> Failure {
    tracing::error!(%error, "a request failed");
    (StatusCode::INTERNAL_SERVER_ERROR, "numaward failed; its log says more".to_owned())
}

/// Does such work on a thread that gives way.
pub(crate) fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(move || {
        give_way();
        work()
    })
}

/// A runtime whose threads give way to all others of the daemon. An address that any process may connect to is served there: a flood of
/// connections then delays no admission, which is served by the daemon's other runtime.
pub fn low_priority_runtime() -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("http")
        .on_thread_start(give_way)
        .enable_all()
        .build()
}

/// Lowers the priority of this thread, once, below that of the daemon's main thread.
fn give_way() {
    thread_local!(static IS_DONE: Cell<bool> = const { Cell::new(false) });
    if IS_DONE.replace(true) {
        return;
    }
    let main = getpriority_process(Some(getpid()));
    if let Err(error) = main.and_then(|main| setpriority_process(None, main + GIVE_WAY)) {
        tracing::debug!(%error, "a thread that reads keeps its priority");
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn readers_give_way_to_all_others() {
        let own = getpriority_process(None).unwrap();
        for _ in 0..3 {
            let reads = spawn(|| getpriority_process(None).unwrap()).await.unwrap();
            assert_eq!((reads, getpriority_process(None).unwrap()), (own + GIVE_WAY, own));
        }
    }

    #[test]
    fn all_threads_of_the_low_priority_runtime_give_way() {
        let own = getpriority_process(None).unwrap();
        let runtime = low_priority_runtime().unwrap();
        let worker = async {
            let priority = || getpriority_process(None).unwrap();
            [priority(), tokio::task::spawn_blocking(priority).await.unwrap(), spawn(priority).await.unwrap()]
        };
        let priorities = runtime.block_on(runtime.spawn(worker)).unwrap();
        assert_eq!(priorities, [own + GIVE_WAY; 3]);
    }

    #[tokio::test]
    async fn so_many_are_worked_on_at_once_also_where_nobody_waits_for_them() {
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

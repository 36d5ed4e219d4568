//! Work that reads files or takes locks, on threads that may block. At most [`MAX_READERS`] at a time, so that a hanging
//! file blocks only these. The threads give way to all others of the daemon: many readers at once hold up no admission.

use std::{
    cell::Cell,
    sync::{Arc, OnceLock},
};

use axum::http::StatusCode;
use rustix::process::{getpriority_process, setpriority_process};
use tokio::{sync::Semaphore, task::JoinHandle};

use crate::problem::Failure;

/// By so much, the `nice` value of a reader is above that of the daemon. Of a CPU that it shares with another thread, it then gets a
/// quarter instead of half (`sched_prio_to_weight` in the kernel: 335 against 1024).
const GIVE_WAY: i32 = 5;

/// Requests that are worked on at once; more wait.
const MAX_READERS: usize = 8;

/// Runs such work. Clones share the places.
#[derive(Clone, Debug)]
pub struct Blocking(Arc<Semaphore>);

impl Default for Blocking {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_READERS)))
    }
}

impl Blocking {
    /// Waits for a place, then for the work. It goes on, and keeps its place, where nobody waits for it any more.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        // The semaphore is never closed; without a place, the work would merely not be counted.
        let place = self.0.clone().acquire_owned().await.ok();
        let done = spawn(move || {
            let _place = place;
            work()
        });
        done.await.map_err(|error| {
            tracing::error!(%error, "a request failed");
            (StatusCode::INTERNAL_SERVER_ERROR, "numaward failed; its log says more".to_owned())
        })
    }
}

/// Does such work on a thread that gives way.
pub(crate) fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(move || {
        give_way();
        work()
    })
}

/// Lowers the priority of this thread, once. A thread may have that of another reader already, which started it.
fn give_way() {
    static DAEMON: OnceLock<i32> = OnceLock::new();
    thread_local!(static IS_DONE: Cell<bool> = const { Cell::new(false) });
    if IS_DONE.replace(true) {
        return;
    }
    let set = getpriority_process(None).and_then(|own| {
        let daemon = *DAEMON.get_or_init(|| own);
        setpriority_process(None, daemon + GIVE_WAY)
    });
    if let Err(error) = set {
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

    #[tokio::test]
    async fn so_many_are_worked_on_at_once_also_where_nobody_waits_for_them() {
        let blocking = Blocking::default();
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

//! Reads of data of the whole host, shared by all requests that wait for the same route.
//!
//! # Problem
//! On a host with many workloads, a response has megabytes. The clients of one route must not multiply the time of the
//! daemon that one response costs.
//!
//! # Algorithm
//! A request joins the read of its route that waits to begin, or else creates one. A read begins when the one before it of
//! its route has ended, and takes a place of the pool. All requests that joined get the same bytes.
//!
//! # Invariants
//! - Of each route, at most one read is in progress and at most one waits.
//! - A response is never older than its request: no request joins a read that has begun.

use std::{collections::BTreeMap, sync::Arc};

use axum::body::Bytes;
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use parking_lot::Mutex;
use tokio::sync::Mutex as Turn;

use crate::{
    blocking::{BlockingPool, failed},
    problem::Failure,
};

/// The result of a read.
type ReadResult = Result<Bytes, Failure>;

/// The reads of each route.
#[derive(Clone, Debug, Default)]
pub(crate) struct JoinedReads(Arc<Mutex<BTreeMap<&'static str, RouteReads>>>);

#[derive(Debug, Default)]
struct RouteReads {
    /// Held by the read in progress.
    turn: Arc<Turn<()>>,
    waiting: Option<Shared<BoxFuture<'static, ReadResult>>>,
}

/// Guard of a read that has not begun: no request joins it after it is dropped.
struct WaitingRead {
    reads: JoinedReads,
    route: &'static str,
}

impl Drop for WaitingRead {
    fn drop(&mut self) {
        if let Some(reads) = self.reads.0.lock().get_mut(self.route) {
            reads.waiting = None;
        }
    }
}

impl JoinedReads {
    /// Returns the result of `work`, or of that of another request for the same route, which begins after this call. The
    /// work continues if no client waits for it any more.
    pub(crate) async fn run(
        &self,
        route: &'static str,
        pool: &BlockingPool,
        work: impl FnOnce() -> ReadResult + Send + 'static,
    ) -> ReadResult {
        let read = {
            let mut routes = self.0.lock();
            let reads = routes.entry(route).or_default();
            let start = || self.start(route, reads.turn.clone(), pool.clone(), work);
            reads.waiting.get_or_insert_with(start).clone()
        };
        read.await
    }

    fn start(
        &self,
        route: &'static str,
        turn: Arc<Turn<()>>,
        pool: BlockingPool,
        work: impl FnOnce() -> ReadResult + Send + 'static,
    ) -> Shared<BoxFuture<'static, ReadResult>> {
        let waiting = WaitingRead { reads: self.clone(), route };
        let work = move || {
            drop(waiting);
            work()
        };
        let read = tokio::spawn(async move {
            let _turn = turn.lock_owned().await;
            pool.run(work).await.flatten()
        });
        async { read.await.unwrap_or_else(|error| Err(failed(&error))) }.boxed().shared()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicU32, Ordering},
            mpsc,
        },
        time::Duration,
    };

    use tokio::{task::JoinHandle, time::sleep};

    use super::*;

    const SETTLE_TIME: Duration = Duration::from_millis(50);

    #[tokio::test(flavor = "multi_thread")]
    async fn waiting_requests_share_next_read() {
        let (joined, pool) = (JoinedReads::default(), BlockingPool::default());
        let count = Arc::new(AtomicU32::new(0));
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let ask = |route: &'static str| -> JoinHandle<ReadResult> {
            let (joined, pool, count, released) =
                (joined.clone(), pool.clone(), count.clone(), released.clone());
            tokio::spawn(async move {
                let work = move || {
                    let number = count.fetch_add(1, Ordering::Relaxed);
                    let _released = released.lock().recv();
                    Ok(number.to_string().into())
                };
                joined.run(route, &pool, work).await
            })
        };
        let first = ask("same");
        sleep(SETTLE_TIME).await;
        // They came after the first read had begun.
        let mut later: Vec<_> = (0..40).map(|_| ask("same")).collect();
        sleep(SETTLE_TIME).await;
        later.drain(..20).for_each(|request| request.abort());
        assert_eq!(count.load(Ordering::Relaxed), 1, "one read of a route is in progress");
        release.send(()).unwrap();
        assert_eq!(first.await.unwrap().unwrap(), "0");
        release.send(()).unwrap();
        for request in later {
            assert_eq!(request.await.unwrap().unwrap(), "1");
        }
        drop(release);
        assert_eq!(ask("same").await.unwrap().unwrap(), "2");
        assert_eq!(ask("another").await.unwrap().unwrap(), "3");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn hung_read_holds_one_place() {
        let (joined, pool) = (JoinedReads::default(), BlockingPool::default());
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for _ in 0..100 {
            let (joined, pool, released) = (joined.clone(), pool.clone(), released.clone());
            let hang = move || {
                let _released = released.lock().recv();
                Ok(Bytes::new())
            };
            tokio::spawn(async move { joined.run("hung", &pool, hang).await });
        }
        sleep(SETTLE_TIME).await;
        assert!(joined.run("other", &pool, || Ok(Bytes::new())).await.is_ok());
        drop(release);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn panicking_read_is_an_error() {
        let (joined, pool) = (JoinedReads::default(), BlockingPool::default());
        for _ in 0..2 {
            assert!(joined.run("a", &pool, || panic!("on purpose")).await.is_err());
        }
    }
}

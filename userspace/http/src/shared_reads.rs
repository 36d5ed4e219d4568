//! Reads that take long, shared by all requests that ask for the same.
//!
//! Problem: what is looked up inside a workload takes seconds, memory, and locks of the workload's processes. Clients that ask for the
//! same at once, or again and again without waiting for the answer, must not multiply that.
//!
//! Algorithm: a request takes part in the read of its key that is under way, if there is one. Otherwise it waits for a place, and begins
//! one. All that take part get the same bytes.
//!
//! A read can hang: in a file of a workload on a file system that does not respond, or at the locks of a process that waits for one. A
//! read that takes longer than [`PATIENCE`] fails for those who wait, and gives its place to others. Its thread stays, so there are
//! at most [`MAX_READS`], and its key fails at once until it ends.
//!
//! Invariant: of each key at most one read is under way, also where no client waits for it any more.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{body::Bytes, http::StatusCode};
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::{
    blocking::{BlockingPool, failed, spawn},
    problem::Failure,
};

/// Every reader stops by itself long before.
const PATIENCE: Duration = Duration::from_secs(20);
/// Reads under way at once, with those that hang: each has a thread.
const MAX_READS: usize = 32;

/// The outcome of a read.
pub(crate) type Outcome = Result<Bytes, Failure>;

type Reads = Mutex<BTreeMap<String, Shared<BoxFuture<'static, Outcome>>>>;

/// Reads under way, by key.
#[derive(Debug)]
pub(crate) struct SharedReads {
    places: BlockingPool,
    reads: Arc<Reads>,
    patience: Duration,
}

/// Ends a read when it is dropped.
struct Entry {
    reads: Arc<Reads>,
    key: String,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.reads.lock().remove(&self.key);
    }
}

impl SharedReads {
    /// Reads of which one that takes so long hangs.
    fn new(patience: Duration) -> Self {
        Self { places: BlockingPool::default(), reads: Arc::default(), patience }
    }

    /// The outcome of the read of `key` that is under way, or else that of `work`, on a thread that may block.
    pub(crate) async fn run(&self, key: String, work: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
        let under_way = self.reads.lock().get(&key).cloned();
        if let Some(read) = under_way {
            return read.await;
        }
        let place = self.places.place().await;
        let read = {
            let mut reads = self.reads.lock();
            if let Some(read) = reads.get(&key) {
                read.clone()
            } else if reads.len() >= MAX_READS {
                return Err(hangs(&format!("{MAX_READS} reads hang")));
            } else {
                let entry = Entry { reads: self.reads.clone(), key: key.clone() };
                let done = spawn(move || {
                    let _entry = entry;
                    work()
                });
                let done = timeout(self.patience, done);
                let task = tokio::spawn(async move {
                    let _place = place;
                    done.await
                });
                let read = async {
                    match task.await {
                        Ok(Ok(Ok(outcome))) => outcome,
                        Ok(Ok(Err(error))) | Err(error) => Err(failed(&error)),
                        Ok(Err(_)) => Err(hangs("the read hangs")),
                    }
                };
                let read = read.boxed().shared();
                reads.insert(key, read.clone());
                read
            }
        };
        read.await
    }
}

impl Default for SharedReads {
    fn default() -> Self {
        Self::new(PATIENCE)
    }
}

fn hangs(what: &str) -> Failure {
    let why = "a file system or a process that a workload uses does not respond";
    (StatusCode::SERVICE_UNAVAILABLE, format!("{what}: {why}"))
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    };

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[tokio::test(flavor = "multi_thread")]
    async fn requests_for_the_same_share_one_read() {
        let (shared, count) = (Arc::new(SharedReads::default()), Arc::new(AtomicU32::new(0)));
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let ask = |key: &str| {
            let (shared, count, released, key) =
                (shared.clone(), count.clone(), released.clone(), key.to_owned());
            tokio::spawn(async move {
                let work = move || {
                    let number = count.fetch_add(1, Ordering::Relaxed);
                    let _released = released.lock().recv();
                    Ok(number.to_string().into())
                };
                shared.run(key, work).await
            })
        };
        // More than there are places.
        let mut asked: Vec<_> = (0..40).map(|_| ask("same")).collect();
        tokio::time::sleep(SOON).await;
        // Its client went away: the read goes on, and another request takes part in it.
        asked.drain(..20).for_each(|of| of.abort());
        asked.push(ask("same"));
        tokio::time::sleep(SOON).await;
        assert_eq!(count.load(Ordering::Relaxed), 1);
        release.send(()).unwrap();
        for of in asked {
            assert_eq!(of.await.unwrap().unwrap(), "0");
        }
        assert!(shared.reads.lock().is_empty());
        drop(release);
        assert_eq!(ask("same").await.unwrap().unwrap(), "1", "the next one is read anew");
        assert_eq!(ask("another").await.unwrap().unwrap(), "2");
    }

    #[tokio::test]
    async fn read_that_panics_is_an_error_and_ends() {
        let shared = SharedReads::default();
        for _ in 0..2 {
            let failed =
                timeout(Duration::from_secs(10), shared.run("a".to_owned(), || panic!("on purpose")));
            assert!(failed.await.unwrap().is_err());
            assert!(shared.reads.lock().is_empty());
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn read_that_hangs_holds_no_place_and_no_client() {
        let shared = Arc::new(SharedReads::new(SOON));
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for number in 0..MAX_READS {
            let released = released.clone();
            let hung = shared.run(format!("hung {number}"), move || {
                let _released = released.lock().recv();
                Ok(Bytes::new())
            });
            let (status, _) = timeout(10 * SOON + Duration::from_secs(5), hung).await.unwrap().unwrap_err();
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            let again = shared.run("hung 0".to_owned(), || panic!("it is under way"));
            assert!(again.await.is_err());
            if number + 1 < MAX_READS {
                assert!(shared.run("other".to_owned(), || Ok(Bytes::new())).await.is_ok(), "{number}");
            }
        }
        let (_, detail) = shared.run("other".to_owned(), || Ok(Bytes::new())).await.unwrap_err();
        assert!(detail.starts_with("32 reads hang"), "{detail}");
        drop(release);
        let start = std::time::Instant::now();
        while !shared.reads.lock().is_empty() {
            assert!(start.elapsed() < Duration::from_secs(10));
            tokio::time::sleep(SOON).await;
        }
        assert!(shared.run("hung 0".to_owned(), || Ok(Bytes::new())).await.is_ok());
    }
}

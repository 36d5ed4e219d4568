//! Slow reads, shared by all concurrent requests for the same data.
//!
//! # Problem
//! Call chains and regions of a workload require seconds, memory, and locks of the workload's processes. Clients that
//! request the same data at once, or again and again without waiting for the response, must not multiply that.
//!
//! # Algorithm
//! A request joins the read in progress for its key, if there is one. Otherwise it waits for a place and starts a
//! read. All requests that joined get the same bytes.
//!
//! A read can hang: on a file of a workload in a file system that does not respond, or on the locks of a process that
//! waits for one. A read that takes longer than [`READ_TIMEOUT`] fails for all requests that joined it, and frees its
//! place. Its thread remains blocked, so the number of threads is limited to [`MAX_READS`], and to [`MAX_HUNG_OF_OWNER`] for the
//! workloads of one owner, and requests for its key fail at once until it ends.
//!
//! # Invariant
//! At most one read is in progress for each key, even if no client waits for it any more.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

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

/// Time after which a read counts as hung. Each kind of read has a shorter limit of its own.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of reads in progress, including hung ones. Each has a thread.
const MAX_READS: usize = 32;
/// Maximum number of hung reads of one owner of cgroups, such as a pod or a user.
const MAX_HUNG_OF_OWNER: usize = 4;

/// The result of a read.
pub(crate) type ReadResult = Result<Bytes, Failure>;

type Reads = Mutex<BTreeMap<String, SharedRead>>;

/// A read in progress.
#[derive(Debug)]
struct SharedRead {
    /// The owner of the cgroups that are read.
    owner: String,
    /// True once it has exceeded its time.
    is_hung: Arc<AtomicBool>,
    result: Shared<BoxFuture<'static, ReadResult>>,
}

/// The reads in progress, by key.
#[derive(Debug)]
pub(crate) struct SharedReads {
    places: BlockingPool,
    reads: Arc<Reads>,
    timeout: Duration,
}

/// Removes its read from the map when it is dropped.
struct RunningRead {
    reads: Arc<Reads>,
    key: String,
}

impl Drop for RunningRead {
    fn drop(&mut self) {
        self.reads.lock().remove(&self.key);
    }
}

impl SharedReads {
    /// Creates the map. A read that takes longer than `timeout` counts as hung.
    fn new(timeout: Duration) -> Self {
        Self { places: BlockingPool::default(), reads: Arc::default(), timeout }
    }

    /// Returns the result of the read of `key` in progress, or else runs `work` on a thread that may block. `owner` is that of
    /// the cgroups that are read.
    pub(crate) async fn run(
        &self,
        key: String,
        owner: String,
        work: impl FnOnce() -> ReadResult + Send + 'static,
    ) -> ReadResult {
        let in_progress = self.reads.lock().get(&key).map(|read| read.result.clone());
        if let Some(read) = in_progress {
            return read.await;
        }
        let place = self.places.place().await;
        let read = {
            let mut reads = self.reads.lock();
            if let Some(read) = reads.get(&key) {
                // Another request may take the place meanwhile.
                drop(place);
                read.result.clone()
            } else if reads.len() >= MAX_READS {
                return Err(hung(&format!("{MAX_READS} reads hang")));
            } else if hung_of(&reads, &owner) >= MAX_HUNG_OF_OWNER {
                return Err(hung(&format!("{MAX_HUNG_OF_OWNER} reads of {owner} hang")));
            } else {
                let entry = RunningRead { reads: self.reads.clone(), key: key.clone() };
                let done = spawn(move || {
                    let _entry = entry;
                    work()
                });
                let done = timeout(self.timeout, done);
                let is_hung = Arc::new(AtomicBool::new(false));
                let noted = is_hung.clone();
                let task = tokio::spawn(async move {
                    let _place = place;
                    let result = done.await;
                    noted.store(result.is_err(), Ordering::Relaxed);
                    result
                });
                let read = async {
                    match task.await {
                        Ok(Ok(Ok(outcome))) => outcome,
                        Ok(Ok(Err(error))) | Err(error) => Err(failed(&error)),
                        Ok(Err(_)) => Err(hung("the read hangs")),
                    }
                };
                let result = read.boxed().shared();
                reads.insert(key, SharedRead { owner, is_hung, result: result.clone() });
                result
            }
        };
        read.await
    }
}

impl Default for SharedReads {
    fn default() -> Self {
        Self::new(READ_TIMEOUT)
    }
}

/// Returns the number of hung reads of an owner.
fn hung_of(reads: &BTreeMap<String, SharedRead>, owner: &str) -> usize {
    let is_hung = |read: &&SharedRead| read.owner == owner && read.is_hung.load(Ordering::Relaxed);
    reads.values().filter(is_hung).count()
}

fn hung(what: &str) -> Failure {
    let why = "a file system or a process that a workload uses does not respond";
    (StatusCode::SERVICE_UNAVAILABLE, format!("{what}: {why}"))
}

#[cfg(test)]
mod tests {
    use std::sync::{atomic::AtomicU32, mpsc};

    use super::*;
    use crate::blocking::MAX_READERS;

    const SHORT_TIMEOUT: Duration = Duration::from_millis(50);

    /// Returns an owner of one workload.
    fn owner(name: &str) -> String {
        format!("/{name}")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn concurrent_requests_share_one_read() {
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
                let owner = owner(&key);
                shared.run(key, owner, work).await
            })
        };
        // More requests than places.
        let mut requests: Vec<_> = (0..40).map(|_| ask("same")).collect();
        tokio::time::sleep(SHORT_TIMEOUT).await;
        // The clients disconnect: the read continues, and another request joins it.
        requests.drain(..20).for_each(|request| request.abort());
        requests.push(ask("same"));
        tokio::time::sleep(SHORT_TIMEOUT).await;
        assert_eq!(count.load(Ordering::Relaxed), 1);
        release.send(()).unwrap();
        for request in requests {
            assert_eq!(request.await.unwrap().unwrap(), "0");
        }
        assert!(shared.reads.lock().is_empty());
        drop(release);
        assert_eq!(ask("same").await.unwrap().unwrap(), "1", "the next request starts a new read");
        assert_eq!(ask("another").await.unwrap().unwrap(), "2");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn joining_requests_hold_no_place() {
        let shared = Arc::new(SharedReads::default());
        let mut places = Vec::new();
        for _ in 0..MAX_READERS {
            places.push(shared.places.place().await);
        }
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let same: Vec<_> = (0..MAX_READERS)
            .map(|_| {
                let (shared, released) = (shared.clone(), released.clone());
                tokio::spawn(async move {
                    let work = move || {
                        let _released = released.lock().recv();
                        Ok(Bytes::new())
                    };
                    shared.run("same".to_owned(), owner("same"), work).await
                })
            })
            .collect();
        // All of them wait for places.
        tokio::time::sleep(SHORT_TIMEOUT).await;
        drop(places);
        let other = shared.run("other".to_owned(), owner("other"), || Ok(Bytes::new()));
        assert!(timeout(Duration::from_secs(10), other).await.unwrap().is_ok());
        drop(release);
        for request in same {
            assert!(request.await.unwrap().is_ok());
        }
    }

    #[tokio::test]
    async fn panicking_read_is_an_error() {
        let shared = SharedReads::default();
        for _ in 0..2 {
            let failed = timeout(
                Duration::from_secs(10),
                shared.run("a".to_owned(), owner("a"), || panic!("on purpose")),
            );
            assert!(failed.await.unwrap().is_err());
            assert!(shared.reads.lock().is_empty());
        }
    }

    /// The clock stands still, so that a busy host delays no read that does not hang.
    #[tokio::test(start_paused = true)]
    async fn hung_read_frees_place_and_clients() {
        let shared = Arc::new(SharedReads::new(SHORT_TIMEOUT));
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for number in 0..MAX_READS {
            let (shared, released) = (shared.clone(), released.clone());
            let key = format!("hung {number}");
            let hung = tokio::spawn({
                let (shared, key) = (shared.clone(), key.clone());
                async move {
                    let hang = move || {
                        let _released = released.lock().recv();
                        Ok(Bytes::new())
                    };
                    let owner = owner(&key);
                    shared.run(key, owner, hang).await
                }
            });
            while !shared.reads.lock().contains_key(&key) {
                tokio::task::yield_now().await;
            }
            tokio::time::advance(2 * SHORT_TIMEOUT).await;
            let (status, _) = hung.await.unwrap().unwrap_err();
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            let again = shared.run("hung 0".to_owned(), owner("hung 0"), || panic!("it is in progress"));
            assert!(again.await.is_err());
            if number + 1 < MAX_READS {
                assert!(
                    shared.run("other".to_owned(), owner("other"), || Ok(Bytes::new())).await.is_ok(),
                    "{number}"
                );
            }
        }
        let (_, detail) =
            shared.run("other".to_owned(), owner("other"), || Ok(Bytes::new())).await.unwrap_err();
        assert!(detail.starts_with("32 reads hang"), "{detail}");
        drop(release);
        let start = std::time::Instant::now();
        while !shared.reads.lock().is_empty() {
            assert!(start.elapsed() < Duration::from_secs(10));
            tokio::time::sleep(SHORT_TIMEOUT).await;
        }
        assert!(shared.run("hung 0".to_owned(), owner("hung 0"), || Ok(Bytes::new())).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn hung_reads_of_one_owner_leave_places_to_others() {
        let shared = Arc::new(SharedReads::new(SHORT_TIMEOUT));
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let hang = |number: usize| {
            let released = released.clone();
            let hang = move || {
                let _released = released.lock().recv();
                Ok(Bytes::new())
            };
            shared.run(format!("hung {number}"), owner("user"), hang)
        };
        for number in 0..MAX_HUNG_OF_OWNER {
            let wait = async {
                while shared.reads.lock().len() <= number {
                    tokio::task::yield_now().await;
                }
                tokio::time::advance(2 * SHORT_TIMEOUT).await;
            };
            let (read, ()) = tokio::join!(hang(number), wait);
            assert!(read.is_err());
        }
        let (_, detail) = hang(MAX_HUNG_OF_OWNER).await.unwrap_err();
        assert!(detail.starts_with("4 reads of /user hang"), "{detail}");
        assert!(shared.run("other".to_owned(), owner("other"), || Ok(Bytes::new())).await.is_ok());
        drop(release);
    }
}

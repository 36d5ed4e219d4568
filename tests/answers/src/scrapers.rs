//! Clients that read continuously.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use numaward_tests_daemon::{Reply, get as ask, reply};
use rustix::thread::{CpuSet, sched_setaffinity};

const ADDRESS: &str = "127.0.0.1:9560";
const PATHS: [&str; 2] = ["/api/v1/workloads", "/metrics"];
/// CPU of the clients, because in production they are on other hosts.
const CPU: usize = 3;
/// The interval between a refusal and the next request of a client.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Reads from the public address.
pub(crate) fn get(path: &str) -> Result<String> {
    let (status, body) = ask(ADDRESS, path)?.context("incomplete answer")?;
    ensure!(status == 200, "{path}: {status} {body}");
    Ok(body)
}

#[derive(Default)]
struct ScraperState {
    stop: AtomicBool,
    /// Number of complete answers of each client.
    answers: Vec<AtomicU64>,
    bytes: AtomicU64,
    refusals: AtomicU64,
    failures: AtomicU64,
    first_failure: OnceLock<String>,
}

impl ScraperState {
    fn request(&self, client: usize, path: &str) -> Result<()> {
        match reply(ADDRESS, path)? {
            Reply::Whole(200, body) => {
                self.answers[client].fetch_add(1, Ordering::Relaxed);
                self.bytes.fetch_max(body.len() as u64, Ordering::Relaxed);
            }
            // The daemon limits the connections of one address, and the answers that wait to be read.
            Reply::Closed | Reply::Whole(503, _) => {
                self.refusals.fetch_add(1, Ordering::Relaxed);
                thread::sleep(RETRY_INTERVAL);
            }
            other => {
                let text = format!("{path}: {other:?}");
                self.first_failure.get_or_init(|| text.chars().take(200).collect());
                self.failures.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

pub(crate) struct Scrapers {
    state: Arc<ScraperState>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Scrapers {
    pub(crate) fn start(clients: usize) -> Self {
        let answers = (0..clients).map(|_| AtomicU64::new(0)).collect();
        let state = Arc::new(ScraperState { answers, ..ScraperState::default() });
        let client = |number: usize| {
            let state = state.clone();
            thread::spawn(move || {
                let mut cpus = CpuSet::new();
                cpus.set(CPU);
                sched_setaffinity(None, &cpus)?;
                for path in PATHS.iter().cycle().skip(number % PATHS.len()) {
                    if state.stop.load(Ordering::Relaxed) {
                        break;
                    }
                    state.request(number, path)?;
                }
                Ok(())
            })
        };
        Self { threads: (0..clients).map(client).collect(), state }
    }

    /// Returns the number of complete answers.
    pub(crate) fn answers(&self) -> u64 {
        self.state.answers.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Returns the number of clients with a complete answer.
    pub(crate) fn clients_answered(&self) -> usize {
        self.state.answers.iter().filter(|count| count.load(Ordering::Relaxed) > 0).count()
    }

    /// Returns the length of the longest answer, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of connections that were closed before an answer began, and of answers that ask the client to
    /// retry.
    pub(crate) fn refusals(&self) -> u64 {
        self.state.refusals.load(Ordering::Relaxed)
    }

    /// Returns the number of incomplete answers and errors.
    pub(crate) fn failures(&self) -> u64 {
        self.state.failures.load(Ordering::Relaxed)
    }

    pub(crate) fn first_failure(&self) -> Option<&str> {
        self.state.first_failure.get().map(String::as_str)
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.state.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().ok().context("a client panicked")??;
        }
        Ok(())
    }
}

//! Clients that read all the time.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result, ensure};

const ADDRESS: &str = "127.0.0.1:9560";
const PATHS: [&str; 2] = ["/api/v1/workloads", "/metrics"];

/// Asks where everybody may.
pub(crate) fn get(path: &str) -> Result<String> {
    let (status, body) = numaward_tests_daemon::get(ADDRESS, path)?.context("no whole answer")?;
    ensure!(status == 200, "{path}: {status} {body}");
    Ok(body)
}

#[derive(Default)]
struct State {
    stop: AtomicBool,
    answers: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    first_error: OnceLock<String>,
}

pub(crate) struct Scrapers {
    state: Arc<State>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Scrapers {
    pub(crate) fn start(clients: usize) -> Self {
        let state = Arc::<State>::default();
        let client = |number: usize| {
            let state = state.clone();
            thread::spawn(move || {
                // Of this thread alone.
                rustix::process::nice(19)?;
                for path in PATHS.iter().cycle().skip(number % PATHS.len()) {
                    if state.stop.load(Ordering::Relaxed) {
                        break;
                    }
                    match get(path) {
                        Ok(body) => {
                            state.answers.fetch_add(1, Ordering::Relaxed);
                            state.bytes.fetch_max(body.len() as u64, Ordering::Relaxed);
                        }
                        // A refusal as well: too many at once may be asked to come again.
                        Err(error) => {
                            state.errors.fetch_add(1, Ordering::Relaxed);
                            state.first_error.get_or_init(|| format!("{error:#}"));
                        }
                    }
                }
                Ok(())
            })
        };
        Self { threads: (0..clients).map(client).collect(), state }
    }

    /// How many answers came.
    pub(crate) fn answers(&self) -> u64 {
        self.state.answers.load(Ordering::Relaxed)
    }

    /// The length of the longest.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.bytes.load(Ordering::Relaxed)
    }

    /// How many requests were refused or failed.
    pub(crate) fn errors(&self) -> u64 {
        self.state.errors.load(Ordering::Relaxed)
    }

    pub(crate) fn first_error(&self) -> Option<&str> {
        self.state.first_error.get().map(String::as_str)
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.state.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().ok().context("a client panicked")??;
        }
        Ok(())
    }
}

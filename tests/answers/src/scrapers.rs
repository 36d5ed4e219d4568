//! Clients that read all the time.

use std::{
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result, ensure};

use crate::http;

const ADDRESS: &str = "127.0.0.1:9560";
const PATHS: [&str; 2] = ["/api/v1/workloads", "/metrics"];

/// Asks where everybody may.
pub(crate) fn get(path: &str) -> Result<String> {
    let (status, body) = http::exchange(TcpStream::connect(ADDRESS)?, "GET", path, "")?;
    ensure!(status == 200, "{path}: {status} {body}");
    Ok(body)
}

#[derive(Default)]
struct State {
    stop: AtomicBool,
    answers: AtomicU64,
    bytes: AtomicU64,
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
                    // Too many at once are told to come again.
                    if let Ok(body) = get(path) {
                        state.answers.fetch_add(1, Ordering::Relaxed);
                        state.bytes.fetch_max(body.len() as u64, Ordering::Relaxed);
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

    pub(crate) fn stop(self) -> Result<()> {
        self.state.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().ok().context("a client panicked")??;
        }
        Ok(())
    }
}

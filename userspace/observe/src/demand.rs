//! Demand for the workloads' figures, which are read only while there are requests.

use std::{
    thread::{self, Thread},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Demand for the workloads' figures, and the thread that reads them.
#[derive(Debug)]
pub(crate) struct Demand(Mutex<DemandState>);

#[derive(Debug)]
struct DemandState {
    /// Time of the latest request.
    last_request: Instant,
    /// Thread that reads the figures while there are requests.
    reader: Option<Thread>,
}

impl Demand {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(DemandState { last_request: Instant::now(), reader: None }))
    }

    /// Registers this thread as the reader, which each request wakes.
    pub(crate) fn register_reader(&self) {
        self.0.lock().reader = Some(thread::current());
    }

    /// Records a request.
    pub(crate) fn record(&self) {
        let mut state = self.0.lock();
        state.last_request = Instant::now();
        if let Some(reader) = &state.reader {
            reader.unpark();
        }
    }

    /// Returns whether there was a recent request; `interval` is the interval between readings. Less frequent readers
    /// get figures as old as their previous request.
    pub(crate) fn is_recent(&self, interval: Duration) -> bool {
        self.0.lock().last_request.elapsed() < (3 * interval).max(Duration::from_mins(1))
    }
}

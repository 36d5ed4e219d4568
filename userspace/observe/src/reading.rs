//! One reading of the probes' maps, with the books of the same instant.
//!
//! # Problem
//! A reading holds the locks that an admission needs. Clients that read are served by threads of low priority: if one of them held the
//! locks on a busy CPU, the admission would wait until all other readers have had their turn (priority inversion).
//!
//! # Algorithm
//! The thread `counters`, of the daemon's own priority, copies the maps for readers of lower priority. Requests that wait share one
//! copy. Each reader decodes it by itself, which takes longer and needs no lock.

use std::{
    mem,
    sync::{Arc, mpsc},
    thread,
};

use numaward_model::{Promises, health};
use numaward_probes::{self as probes, NodeAccesses, Probe, SlotId};
use numaward_topology::Machine;
use tokio_util::sync::CancellationToken;

use crate::{
    activity::{Attached, Counted},
    map_copy::MapCopy,
    observer::Observer,
    table::Table,
};

/// A decoded reading.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) machine: Arc<Machine>,
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) promises: Arc<Promises>,
    /// The counters of allocations; `None` without that probe.
    pub(crate) counted: Option<Arc<probes::Snapshot>>,
    /// The counters of all other probes.
    pub(crate) done: Counted,
    pub(crate) attached: Arc<Attached>,
}

/// Serves requests for copies until `stop` is cancelled. The caller that cancels it also wakes the thread.
pub(crate) fn serve_copies(observer: &Observer, stop: &CancellationToken) {
    observer.demand.lock().copier = Some(thread::current());
    while !stop.is_cancelled() {
        let waiting = mem::take(&mut observer.demand.lock().copies);
        if waiting.is_empty() {
            health::rest();
            thread::park();
            continue;
        }
        health::beat();
        let copy = Arc::new(observer.copy_maps());
        for reader in waiting {
            // A reader that has gone needs none.
            let _ = reader.send(copy.clone());
        }
    }
    let mut demand = observer.demand.lock();
    demand.copier = None;
    // The readers that wait copy by themselves.
    demand.copies.clear();
}

impl Observer {
    /// Reads each map once, for a thread that may have a low priority.
    pub(crate) fn read(&self) -> Read {
        Self::decode(&self.request_copy().unwrap_or_else(|| Arc::new(self.copy_maps())))
    }

    /// Reads each map once, on this thread, which has the daemon's own priority.
    pub(crate) fn read_directly(&self) -> Read {
        Self::decode(&self.copy_maps())
    }

    fn decode(copy: &MapCopy) -> Read {
        let (slots, other) = copy.activity.decode();
        Read {
            machine: copy.machine.clone(),
            table: copy.table.clone(),
            promises: copy.promises.clone(),
            counted: copy.counted.clone(),
            done: Counted { slots, other },
            attached: copy.attached.clone(),
        }
    }

    /// Returns a copy that was begun after the call; `None` if the thread that copies does not run.
    fn request_copy(&self) -> Option<Arc<MapCopy>> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let mut demand = self.demand.lock();
        let copier = demand.copier.clone()?;
        demand.copies.push(sender);
        drop(demand);
        copier.unpark();
        receiver.recv().ok()
    }

    /// Copies the maps. Slots change hands under both locks only, so the books fit the counters.
    fn copy_maps(&self) -> MapCopy {
        let probing = self.probing();
        let (counted, activity) = (probing.counters().map(Arc::new), probing.activity());
        let state = self.lock();
        MapCopy {
            machine: self.machine(),
            table: state.table.clone(),
            promises: state.promises.clone(),
            counted,
            activity,
            attached: probing.attached.clone(),
        }
    }
}

impl Read {
    /// The accesses of all workloads together; `None` where no probe samples.
    pub(crate) fn accesses(&self) -> Option<Vec<NodeAccesses>> {
        self.attached.has(Probe::Hint).then(|| self.done.accesses(&self.table))
    }
}

#[cfg(test)]
mod tests {
    use numaward_config::Config;

    use super::*;

    #[test]
    fn waiting_readers_share_a_copy() {
        let observer = Observer::new(&Config::default());
        assert!(observer.request_copy().is_none(), "nothing copies yet");
        observer.demand.lock().copier = Some(thread::current());
        let stop = CancellationToken::new();
        let copies = thread::scope(|scope| {
            let readers: Vec<_> = (0..8).map(|_| scope.spawn(|| observer.request_copy().unwrap())).collect();
            while observer.demand.lock().copies.len() < readers.len() {
                thread::yield_now();
            }
            let copying = scope.spawn(|| serve_copies(&observer, &stop));
            let copies: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
            stop.cancel();
            copying.thread().unpark();
            copies
        });
        assert!(copies.iter().all(|copy| Arc::ptr_eq(copy, &copies[0])));
        assert!(observer.request_copy().is_none(), "nothing copies any more");
        observer.read();
    }
}

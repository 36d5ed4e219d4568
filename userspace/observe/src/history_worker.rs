//! The thread that samples the counters of every node and workload for the history.

use std::{
    thread,
    time::{Duration, Instant},
};

use numaward_api as api;
use numaward_model::health;
use numaward_probes::{Activity, NodeCounters};
use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

use crate::{
    history::{AllocatedSoFar, NodeSample, WorkloadSample, pause_after},
    naming::OTHER,
    observer::Observer,
};

/// Takes samples until `stop` is cancelled. The caller that cancels it also wakes the thread.
pub(crate) fn run_history(observer: &Observer, stop: &CancellationToken) {
    let mut due = Instant::now();
    while !stop.is_cancelled() {
        health::beat();
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            thread::park_timeout(wait);
            continue;
        }
        let (at, spent) = (Instant::now(), thread_cpu_time());
        observer.sample_history();
        due = at + pause_after(thread_cpu_time().saturating_sub(spent));
    }
}

/// Returns the CPU time of this thread.
fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

impl Observer {
    pub(crate) fn sample_history(&self) {
        let memory = self.node_memory();
        let is_requested = self.is_requested();
        let read = self.read();
        let at = Instant::now();
        let counted = read.counted.as_ref();
        let sums = counted.map(|counted| read.table.sum(|slot| counted.slots.get(slot), &counted.other));
        let nodes = memory.iter().map(|(node, memory)| {
            let of = sums.as_ref().map(|sums| self.in_bytes(sums.get(*node)));
            NodeSample {
                node: *node,
                counted: of.map(|of| [of.local.0, of.remote.0]),
                free: memory.as_ref().map(|memory| memory.free.0),
            }
        });
        let members = read.table.series().flat_map(|(name, series)| {
            series.members.iter().map(|(&id, member)| {
                let slot = member.slot.filter(|_| counted.is_some());
                let counters = slot.and_then(|slot| counted?.slots.get(slot));
                let activity = slot.and_then(|slot| read.activity_counts.slots.get(slot));
                WorkloadSample {
                    key: member.path.as_str(),
                    name,
                    has_guarantee: read.guarantees.nodes_of(id).is_some(),
                    counted: slot.map(|_| self.totals(counters, activity)),
                    resident: member.resident_bytes().filter(|_| is_requested),
                }
            })
        });
        let other = counted.map(|counted| {
            let totals = self.totals(Some(&counted.other), Some(&read.activity_counts.other));
            WorkloadSample {
                key: OTHER,
                name: OTHER,
                has_guarantee: false,
                counted: Some(totals),
                resident: None,
            }
        });
        self.history.lock().add_sample(at, nodes, members.chain(other));
    }

    /// Returns the bytes that a workload has allocated so far, hugepages included.
    fn totals(&self, counters: Option<&NodeCounters>, activity: Option<&Activity>) -> AllocatedSoFar {
        let mut sum = [0_u64; 3];
        let mut add = |of: AllocatedSoFar| {
            sum = std::array::from_fn(|index| sum[index].saturating_add(of[index]));
        };
        for counters in counters.iter().flat_map(|counters| counters.values()) {
            let of = self.in_bytes(Some(counters));
            add([of.local.0, of.remote.0, self.bytes_of(counters.user_outside).0]);
        }
        for of in activity.iter().flat_map(|activity| &activity.hugepages) {
            add([of.local.0, of.remote.0, of.outside.0]);
        }
        sum
    }

    /// Returns the last hour of the host.
    pub fn history(&self) -> api::History {
        self.history.lock().host(self.start)
    }

    /// Returns the last hour of the workload with this cgroup, or the sum of all with this name; `None` if there is
    /// no history.
    pub fn workload_history(&self, key_or_name: &str) -> Option<api::WorkloadHistory> {
        self.history.lock().workload(self.start, key_or_name)
    }

    /// Returns the last ten minutes of all workloads.
    pub fn trends(&self) -> api::Trends {
        self.history.lock().trends(self.start)
    }
}

//! The thread that samples the counters of every node and workload for the history.

use std::{
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::read;
use numaward_model::health;
use numaward_probes::{Activity, NodeCounters, SlotId};
use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

use crate::{
    coverage::{CoverageWindow, publish_coverage},
    history::{AllocatedSoFar, NodeSample, WorkloadSample, pause_after},
    naming::OTHER,
    observer::Observer,
    page_size::PageSize,
    table::Table,
    usage::{CpuTimesByNode, UsageCounters, UsageTarget},
};

/// Takes samples until `stop` is cancelled. The caller that cancels it also wakes the thread.
pub(crate) fn run_history(observer: &Observer, stop: &CancellationToken) {
    let (mut due, mut coverage) = (Instant::now(), CoverageWindow::default());
    while !stop.is_cancelled() {
        health::beat();
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            thread::park_timeout(wait);
            continue;
        }
        let (at, spent) = (Instant::now(), thread_cpu_time());
        sample_history(observer, &mut coverage);
        sample_usage(observer);
        due = at + pause_after(thread_cpu_time().saturating_sub(spent));
    }
}

/// Returns the CPU time of this thread.
fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Adds a sample of every node and workload to the history, and updates the coverage.
fn sample_history(observer: &Observer, coverage: &mut CoverageWindow) {
    let memory = observer.node_memory.read(&observer.machine());
    let is_requested = observer.is_requested();
    let read = observer.read();
    publish_coverage(observer, &read, coverage);
    let (at, page_size) = (Instant::now(), observer.page_size);
    let counted = read.counted.as_ref();
    let sums = counted.map(|counted| read.table.sum(|slot| counted.slots.get(slot), &counted.other));
    let nodes = memory.iter().map(|(node, memory)| {
        let of = sums.as_ref().map(|sums| page_size.allocated(sums.get(*node)));
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
                counted: slot.map(|_| totals(page_size, counters, activity)),
                resident: member.resident_bytes().filter(|_| is_requested),
            }
        })
    });
    let other = counted.map(|counted| {
        let totals = totals(page_size, Some(&counted.other), Some(&read.activity_counts.other));
        WorkloadSample {
            key: OTHER,
            name: OTHER,
            has_guarantee: false,
            counted: Some(totals),
            resident: None,
        }
    });
    observer.past.lock().history.add_sample(at, nodes, members.chain(other));
}

/// Reads the CPU time of all workloads by node; `None` if the kernel's account cannot be read.
pub(crate) fn cpu_times_by_node(observer: &Observer, table: &Table<SlotId>) -> Option<CpuTimesByNode> {
    let machine = observer.machine();
    let times = observer.registry.cpu_times.read(table, &machine, &observer.health)?;
    let of = |id| machine.nodes.keys().map(|&node| (node, times.of_member(id, node))).collect();
    Some(table.members().map(|(id, _)| (id, of(id))).collect())
}

/// Reads the CPU time and memory of the workloads that are due.
fn sample_usage(observer: &Observer) {
    let Some((hierarchy, table, _)) = observer.registry.placed() else { return };
    let present = table.series().flat_map(|(name, series)| {
        series.members.iter().map(|(&id, member)| UsageTarget {
            id,
            path: member.path.clone(),
            name: name.to_string(),
        })
    });
    let now = Instant::now();
    if observer.past.lock().usage.is_window_due(now)
        && let Some(times) = cpu_times_by_node(observer, &table)
    {
        observer.past.lock().usage.start_window(now, times);
    }
    let due = observer.past.lock().usage.take_due(Instant::now(), present.collect());
    for target in due {
        let dir = hierarchy.dir(&target.path);
        // A cgroup that is gone is forgotten later.
        let Ok(cpu_time) = read::cpu_time(&dir) else { continue };
        let memory = read::memory_in_use(&dir).ok().map(|bytes| bytes.0);
        observer.past.lock().usage.add(target, Instant::now(), UsageCounters { cpu_time, memory });
    }
}

/// Returns the bytes that a workload has allocated so far, hugepages included.
fn totals(
    page_size: PageSize,
    counters: Option<&NodeCounters>,
    activity: Option<&Activity>,
) -> AllocatedSoFar {
    let mut sum = [0_u64; 3];
    let mut add = |of: AllocatedSoFar| {
        sum = std::array::from_fn(|index| sum[index].saturating_add(of[index]));
    };
    for counters in counters.iter().flat_map(|counters| counters.values()) {
        let of = page_size.allocated(Some(counters));
        add([of.local.0, of.remote.0, page_size.bytes_of(counters.user_outside).0]);
    }
    for of in activity.iter().flat_map(|activity| &activity.hugepages) {
        add([of.local.0, of.remote.0, of.outside.0]);
    }
    sum
}

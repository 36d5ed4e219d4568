//! Coverage: the pages that the allocation probe has seen, divided by those that the kernel has allocated.
//!
//! # Problem
//! The figures of workloads are as complete as the probe. The kernel counts allocations, too, without nodes and
//! workloads, so the sums can be compared.
//!
//! # Which pages both count
//! The kernel adds `1 << order` to `pgalloc_*` if its allocator hands out a page, from the lists of a CPU or of a zone
//! (`rmqueue` in `mm/page_alloc.c`). The tracepoint of the probe fires at the end of the same allocation, with its order.
//! Neither counts pages that fill the lists of a CPU, pages that a `page_pool` reuses, or contiguous ranges (gigantic
//! hugepages, CMA). They differ in these cases:
//! - Bulk allocations (`alloc_pages_bulk`, since Linux 5.13) count in `pgalloc_*`, but fire no tracepoint: vmalloc, and
//!   thereby kernel stacks, and the buffers of network drivers.
//! - Compaction gives pages to a waiting allocation directly (`compaction_capture`): it fires, but does not count.
//! - The probe loses events: `events_lost` of its [`ProbeStats`](numaward_probes::ProbeStats), and those that the kernel
//!   does not count either.
//!
//! # Window
//! The ratio is that of the last hour: if it were that of the daemon's life, it would hide a loss the better, the longer
//! the daemon runs.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use numaward_topology::sysfs;

use crate::{observer::Observer, part::DaemonPart, reading::CounterReading};

const WINDOW: Duration = Duration::from_hours(1);
/// The time between checkpoints.
const STEP: Duration = Duration::from_mins(1);
/// The number of pages that the kernel must have allocated: of fewer, those between the two readings distort the ratio.
const MIN_PAGES: u64 = 10_000;

/// Both counts at one time.
#[derive(Clone, Copy, Debug)]
struct Checkpoint {
    at: Instant,
    seen: u64,
    allocated: u64,
}

/// The checkpoints of the last hour.
#[derive(Debug, Default)]
pub(crate) struct CoverageWindow(VecDeque<Checkpoint>);

impl CoverageWindow {
    /// Adds both counts. Returns the ratio since the oldest checkpoint, in thousandths.
    fn add(&mut self, at: Instant, seen: u64, allocated: u64) -> Option<u32> {
        let age = |of: &Checkpoint| at.saturating_duration_since(of.at);
        while self.0.get(1).is_some_and(|second| age(second) >= WINDOW) {
            self.0.pop_front();
        }
        let growth = self.0.front().and_then(|oldest| {
            Some((seen.checked_sub(oldest.seen)?, allocated.checked_sub(oldest.allocated)?))
        });
        if growth.is_none() {
            self.0.clear();
        }
        if self.0.back().is_none_or(|last| age(last) >= STEP) {
            self.0.push_back(Checkpoint { at, seen, allocated });
        }
        let (seen, allocated) = growth.filter(|(_, allocated)| *allocated >= MIN_PAGES)?;
        u32::try_from(u128::from(seen) * 1000 / u128::from(allocated)).ok()
    }
}

/// Compares the counters of a reading with those of the kernel, and publishes the ratio.
pub(crate) fn publish_coverage(observer: &Observer, read: &CounterReading, window: &mut CoverageWindow) {
    let total = read.counted.as_ref().and_then(|counted| counted.total);
    let permille = total.and_then(|total| {
        let allocated = sysfs::allocated_pages(&observer.config.host_root);
        let allocated = observer.health.note_result(DaemonPart::Coverage, allocated)?;
        window.add(Instant::now(), total.0, allocated)
    });
    observer.latest.coverage_permille.send_replace(permille);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_of_the_last_hour() {
        let start = Instant::now();
        let mut window = CoverageWindow::default();
        let mut found = Vec::new();
        // The probe sees all pages in the first hour, and half of them in the second.
        let (mut seen, mut allocated) = (500, 1 << 20);
        for second in (0..7200).step_by(5) {
            found.push(window.add(start + Duration::from_secs(second), seen, allocated));
            allocated += 5000;
            seen += if second < 3600 { 5000 } else { 2500 };
        }
        assert_eq!([found[0], found[1], found[2]], [None, None, Some(1000)], "too few pages");
        let at = |minute: usize| found[minute * 12];
        assert_eq!([1, 59, 60, 90, 119].map(at), [1000, 1000, 1000, 750, 508].map(Some));
        assert!(window.0.len() <= 62, "{}", window.0.len());
    }

    #[test]
    fn falling_counts_start_again() {
        let (start, mut window) = (Instant::now(), CoverageWindow::default());
        let mut add =
            |second, seen, allocated| window.add(start + Duration::from_secs(second), seen, allocated);
        assert_eq!(add(0, 0, 100_000), None);
        assert_eq!(add(5, 0, 200_000), Some(0));
        assert_eq!(add(10, 0, 90_000), None);
        assert_eq!(add(15, 30_000, 150_000), Some(500));
    }
}

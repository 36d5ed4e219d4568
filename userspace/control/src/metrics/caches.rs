//! Metrics of resctrl classes, and of the use of L3 caches and memory bandwidth by workloads.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
};

use numaward_enforce::resctrl::CacheCounters;
use parking_lot::Mutex;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::{StateGauge, create_series, set};

/// The labels of a workload: `namespace`, `pod` and `container`, or `workload`.
pub(crate) type CacheLabels = Vec<(&'static str, String)>;

/// Metrics since the start of the daemon. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct CacheMetrics {
    workloads: StateGauge,
    groups: Family<[(&'static str, &'static str); 1], Gauge>,
    moved: Counter,
    occupancy: Family<CacheLabels, Gauge>,
    bandwidth: Family<CacheLabels, Counter>,
    /// The existing series of `occupancy` and `bandwidth`.
    series: Arc<Mutex<[BTreeSet<CacheLabels>; 2]>>,
}

impl CacheMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        create_series(&self.workloads, "state", &["held", "refused"]);
        create_series(&self.groups, "kind", &["class", "monitor"]);
        registry.register(
            "resctrl_workloads",
            "Workloads with a resctrl class, by whether it is applied (held) or not (refused)",
            self.workloads.clone(),
        );
        registry.register(
            "resctrl_groups",
            "resctrl groups created by numaward, by kind: class, or monitor for counting",
            self.groups.clone(),
        );
        registry.register(
            "resctrl_threads_moved",
            "Threads that were moved into a resctrl group of numaward, or back into the default group",
            self.moved.clone(),
        );
        registry.register_with_unit(
            "resctrl_llc_occupancy",
            "Use of the L3 cache with this id by the workload, as the processor counts it; only with resctrl.monitor",
            Unit::Bytes,
            self.occupancy.clone(),
        );
        registry.register_with_unit(
            "resctrl_memory_bandwidth",
            "Memory traffic of the L3 cache with this id for the workload since the creation of its group, as the processor counts it: total, and with memory of the same node (local); only with resctrl.monitor",
            Unit::Bytes,
            self.bandwidth.clone(),
        );
    }

    /// Sets the numbers of workloads with and without their class and of groups (classes, monitors), and adds moved threads.
    pub(crate) fn set_classes(
        &self,
        held: usize,
        refused: usize,
        [classes, counting]: [usize; 2],
        moved: u64,
    ) {
        set(&self.workloads, [("held", held), ("refused", refused)]);
        for (kind, count) in [("class", classes), ("monitor", counting)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.groups.get_or_create(&[("kind", kind)]).set(count);
        }
        self.moved.inc_by(moved);
    }

    /// Exports the counters of workloads, and removes the series of all other workloads.
    pub(crate) fn set_readings<'a>(
        &self,
        readings: impl Iterator<Item = (&'a CacheLabels, u32, CacheCounters)>,
    ) {
        let mut now: [BTreeSet<CacheLabels>; 2] = [BTreeSet::new(), BTreeSet::new()];
        for (of, cache, CacheCounters { occupancy, total, local }) in readings {
            let mut labels = of.clone();
            labels.push(("cache", cache.to_string()));
            for (scope, bytes) in [("total", total), ("local", local)] {
                let mut labels = labels.clone();
                labels.push(("scope", scope.to_owned()));
                if let Some(bytes) = bytes {
                    // The processor counts from the creation of the group.
                    self.bandwidth.get_or_create(&labels).inner().store(bytes, Ordering::Relaxed);
                }
                // If the counter is unavailable now, the last value stays.
                now[1].insert(labels);
            }
            if let Some(bytes) = occupancy {
                self.occupancy.get_or_create(&labels).set(i64::try_from(bytes).unwrap_or(i64::MAX));
                now[0].insert(labels);
            }
        }
        let mut series = self.series.lock();
        let before = std::mem::replace(&mut *series, now.clone());
        drop(series);
        for gone in before[0].difference(&now[0]) {
            self.occupancy.remove(gone);
        }
        for gone in before[1].difference(&now[1]) {
            self.bandwidth.remove(gone);
        }
    }
}

//! Classes of L3 caches and memory bandwidth, and what workloads have of both.

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

use super::{ControlMetrics, StateGauge, set, start};

/// The labels of a workload: `namespace`, `pod` and `container`, or `workload`.
pub(crate) type CacheLabels = Vec<(&'static str, String)>;

/// Since the daemon started. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct CacheMetrics {
    workloads: StateGauge,
    groups: Family<[(&'static str, &'static str); 1], Gauge>,
    moved: Counter,
    occupancy: Family<CacheLabels, Gauge>,
    bandwidth: Family<CacheLabels, Counter>,
    /// Which series of the last two there are.
    shown: Arc<Mutex<[BTreeSet<CacheLabels>; 2]>>,
}

impl CacheMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        start(&self.workloads, "state", &["held", "refused"]);
        start(&self.groups, "kind", &["class", "monitor"]);
        registry.register(
            "resctrl_workloads",
            "Workloads with a class of L3 caches and memory bandwidth that have it, and those that do not",
            self.workloads.clone(),
        );
        registry.register(
            "resctrl_groups",
            "Groups that numaward has made in the kernel's tree: of classes, and for counting (monitor)",
            self.groups.clone(),
        );
        registry.register(
            "resctrl_threads_moved",
            "Threads that were put into a group of a class or for counting, or back into the default one",
            self.moved.clone(),
        );
        registry.register_with_unit(
            "resctrl_llc_occupancy",
            "How much of the L3 cache with this id the workload has, as the processor counts it; only with resctrl.monitor",
            Unit::Bytes,
            self.occupancy.clone(),
        );
        registry.register_with_unit(
            "resctrl_memory_bandwidth",
            "What went between the L3 cache with this id and memory for the workload since its group was made, as the \
             processor counts it: in total, and the part of that with memory of the same node (local); only with \
             resctrl.monitor",
            Unit::Bytes,
            self.bandwidth.clone(),
        );
    }

    fn classes(&self, held: usize, refused: usize, [classes, counting]: [usize; 2], moved: u64) {
        set(&self.workloads, [("held", held), ("refused", refused)]);
        for (kind, count) in [("class", classes), ("monitor", counting)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.groups.get_or_create(&[("kind", kind)]).set(count);
        }
        self.moved.inc_by(moved);
    }

    fn readings<'a>(&self, readings: impl Iterator<Item = (&'a CacheLabels, u32, CacheCounters)>) {
        let mut now: [BTreeSet<CacheLabels>; 2] = [BTreeSet::new(), BTreeSet::new()];
        for (of, cache, CacheCounters { occupancy, total, local }) in readings {
            let mut labels = of.clone();
            labels.push(("cache", cache.to_string()));
            for (scope, bytes) in [("total", total), ("local", local)] {
                let mut labels = labels.clone();
                labels.push(("scope", scope.to_owned()));
                if let Some(bytes) = bytes {
                    // The processor adds up, and begins anew with each group.
                    self.bandwidth.get_or_create(&labels).inner().store(bytes, Ordering::Relaxed);
                }
                // Where there is no figure for once, the last one stays.
                now[1].insert(labels);
            }
            if let Some(bytes) = occupancy {
                self.occupancy.get_or_create(&labels).set(i64::try_from(bytes).unwrap_or(i64::MAX));
                now[0].insert(labels);
            }
        }
        let mut shown = self.shown.lock();
        let before = std::mem::replace(&mut *shown, now.clone());
        drop(shown);
        for gone in before[0].difference(&now[0]) {
            self.occupancy.remove(gone);
        }
        for gone in before[1].difference(&now[1]) {
            self.bandwidth.remove(gone);
        }
    }
}

impl ControlMetrics {
    /// So many workloads have their class and do not have it, so many groups there are, and so many threads were moved.
    pub(crate) fn cache_classes(&self, held: usize, refused: usize, groups: [usize; 2], moved: u64) {
        self.caches.classes(held, refused, groups, moved);
    }

    /// What workloads have now; those that are not among them have no figures any more.
    pub(crate) fn cache_readings<'a>(
        &self,
        readings: impl Iterator<Item = (&'a CacheLabels, u32, CacheCounters)>,
    ) {
        self.caches.readings(readings);
    }

    /// Figures of a container and of another workload, for the page that lists all metrics with their labels.
    #[cfg(any(test, feature = "testing"))]
    pub fn show_caches(&self) {
        let of = |labels: &[(&'static str, &str)]| -> CacheLabels {
            labels.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
        };
        let workloads = [
            of(&[("workload", "web.service")]),
            of(&[("namespace", "shop"), ("pod", "web-0"), ("container", "main")]),
        ];
        let counted = CacheCounters { occupancy: Some(1), total: Some(2), local: Some(1) };
        self.cache_readings(workloads.iter().map(|labels| (labels, 0, counted)));
    }
}

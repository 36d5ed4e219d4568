//! The guard's first step (`guardReclaim`): what is promised and not used yet is kept free.
//!
//! Problem: page cache counts as available, as the kernel drops it when somebody needs memory. But who was promised that
//! memory then waits until it is dropped, or gets memory of another node.
//!
//! Algorithm: while a node is tight, each look that has read page cache drops some of the workload without a guarantee that has
//! most of it there, in the thread `page_cache`. The kernel counts how much of what was dropped is read again (refaults). A
//! workload that reads most of it again uses it: it is left alone for a while, and for twice as long each further time.
//!
//! Invariants: nobody is touched who may not be steered. No more is dropped than is needed, and at most `rate` in a second. Anonymous
//! memory is not touched.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    mem,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_model::{
    Report,
    headroom::{Headroom, NodeHeadroom, OtherWorkload},
};
use numaward_topology::{Bytes, NodeId};
use tokio_util::sync::CancellationToken;

use super::{
    cache_worker::{self, CacheDrop, CacheWorker, Dropped, Outcome},
    may_be_steered,
};
use crate::{core::Core, page_worker::LEAST};

/// For how many seconds one order drops cache at the rate: about as often is page cache read.
const ORDER: u64 = 5;
/// For how long a workload that uses its page cache is left alone, the first time and at most.
const PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_mins(16);

/// Drops page cache.
#[derive(Debug, Default)]
pub(super) struct Reclaim {
    worker: Option<CacheWorker>,
    stop: CancellationToken,
    /// Those for which something was done or said since they became tight.
    tight: BTreeMap<NodeId, Tight>,
    /// What is known of workloads of which some was dropped.
    known: BTreeMap<(CgroupPath, CgroupId), Known>,
    /// Whether the kernel refused it: then it is not tried again.
    is_refused: bool,
}

/// A node that is tight.
#[derive(Debug, Default)]
struct Tight {
    dropped: Bytes,
    is_begun: bool,
    is_nobody: bool,
}

/// A workload of which some was to be dropped.
#[derive(Debug, Default)]
struct Known {
    last: Option<Dropped>,
    pause: Duration,
    /// It is left alone before.
    until: Option<Instant>,
}

impl Known {
    fn leave_alone(&mut self, now: Instant) {
        self.pause = (self.pause * 2).clamp(PAUSE, LONGEST_PAUSE);
        (self.until, self.last) = (Some(now + self.pause), None);
    }
}

impl Reclaim {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { stop, ..Self::default() }
    }

    /// Takes note of what was dropped, and has more dropped where a node is tight.
    pub(super) fn turn(&mut self, core: &Core, seen: &Headroom, now: Instant) {
        if let Some((order, outcome)) = self.worker.as_mut().and_then(CacheWorker::take) {
            self.take(core, seen, order, outcome, now);
        }
        let is_tight = |node: NodeId| seen.node(node).is_some_and(|of| of.is_tight);
        for (node, of) in self.tight.extract_if(.., |node, _| !is_tight(*node)).filter(|(_, of)| of.is_begun)
        {
            let message = format!(
                "What is promised on node {node} is free again: {} of page cache were dropped there.",
                mib(of.dropped)
            );
            report(core, None, node, Severity::Info, message);
        }
        // Where reading page cache takes long, not every look has it.
        let is_known = seen.others.iter().any(|other| !other.cache.is_empty());
        let is_busy = self.worker.as_ref().is_some_and(CacheWorker::is_busy);
        if !is_known || is_busy || self.is_refused {
            return;
        }
        self.known.retain(|(cgroup, id), _| {
            seen.others.iter().any(|other| other.cgroup == *cgroup && other.id == *id)
        });
        // The node that needs most comes first.
        let mut tight: Vec<&NodeHeadroom> = seen.nodes.iter().filter(|of| of.is_tight).collect();
        tight.sort_by_key(|of| Reverse(of.not_free()));
        if let Some(order) = tight.into_iter().find_map(|of| self.next(core, seen, of, now)) {
            self.give(core, order);
        }
    }

    /// What to drop for a node.
    fn next(&mut self, core: &Core, seen: &Headroom, of: &NodeHeadroom, now: Instant) -> Option<CacheDrop> {
        let node = of.node;
        let known = |other: &OtherWorkload| self.known.get(&(other.cgroup.clone(), other.id));
        let may_be_dropped = |other: &&OtherWorkload| {
            let is_due = known(other).and_then(|known| known.until).is_none_or(|until| now >= until);
            is_due && other.cache_on(node) >= LEAST && may_be_steered(core, other)
        };
        let most = seen.others.iter().filter(may_be_dropped).max_by_key(|other| other.cache_on(node));
        let Some(other) = most else {
            let tight = self.tight.entry(node).or_default();
            if !mem::replace(&mut tight.is_nobody, true) {
                let message = format!(
                    "{} more are to be free on node {node} for what is promised there, and no workload without a guarantee \
                     has page cache there that it does not use.",
                    mib(of.not_free())
                );
                report(core, None, node, Severity::Info, message);
            }
            return None;
        };
        let rate = Bytes(core.config.guard_reclaim.rate.0.0.saturating_mul(ORDER));
        Some(CacheDrop {
            cgroup: other.cgroup.clone(),
            id: other.id,
            dir: core.hierarchy.dir(&other.cgroup),
            node,
            bytes: of.not_free().min(rate).max(LEAST).min(other.cache_on(node)),
            last: known(other).and_then(|known| known.last),
        })
    }

    /// Gives the thread an order; it is started when it is needed first.
    fn give(&mut self, core: &Core, order: CacheDrop) {
        if self.worker.is_none() {
            match cache_worker::start(&core.config.host_root, &core.ports.heartbeats, &self.stop) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => tracing::error!(%error, "no page cache is dropped: no thread can be started"),
            }
        }
        if let Some(worker) = &mut self.worker {
            worker.give(order);
        }
    }

    fn take(&mut self, core: &Core, seen: &Headroom, order: CacheDrop, outcome: Outcome, now: Instant) {
        let CacheDrop { cgroup, id, dir, node, .. } = order;
        let known = self.known.entry((cgroup.clone(), id)).or_default();
        match outcome {
            // Where nothing of it can be dropped now, the next one has its turn.
            Ok(Some(dropped)) if dropped.bytes < LEAST => known.leave_alone(now),
            Ok(Some(dropped)) => {
                *known = Known { last: Some(dropped), pause: known.pause / 2, until: None };
                core.metrics.reclaimed(node, dropped.bytes);
                tracing::debug!(%cgroup, %node, bytes = %dropped.bytes, "page cache was dropped");
                let tight = self.tight.entry(node).or_default();
                tight.dropped.0 = tight.dropped.0.saturating_add(dropped.bytes.0);
                if !mem::replace(&mut tight.is_begun, true) {
                    let lacks = seen.node(node).map_or(Bytes(0), NodeHeadroom::not_free);
                    let message = format!(
                        "{} more are to be free on node {node} for what is promised there: page cache of workloads without a \
                         guarantee is dropped, first {} of {cgroup}.",
                        mib(Bytes(lacks.0.saturating_add(dropped.bytes.0))),
                        mib(dropped.bytes)
                    );
                    report(core, Some(&cgroup), node, Severity::Info, message);
                }
            }
            Ok(None) => {
                known.leave_alone(now);
                tracing::debug!(%cgroup, %node, seconds = known.pause.as_secs(), "uses its page cache, and is left alone");
            }
            // It is gone.
            Err(_) if !dir.exists() => {}
            Err(error) => {
                self.is_refused = true;
                let message =
                    format!("Page cache cannot be dropped, so what is promised is not kept free: {error}.");
                report(core, Some(&cgroup), node, Severity::Warning, message);
            }
        }
    }
}

fn mib(bytes: Bytes) -> String {
    format!("{} MiB", bytes.0 >> 20)
}

fn report(core: &Core, cgroup: Option<&CgroupPath>, node: NodeId, severity: Severity, message: String) {
    core.report(cgroup, Report::new(EventKind::Reclaimed, message).severity(severity).node(node));
}

#[cfg(test)]
mod tests {
    use std::{fs, io, thread};

    use super::*;
    use crate::reconciler::guard::tests::Bench;

    const NODE: NodeId = NodeId(1);

    /// What is promised on node 1 and not used is 100 MiB; so much is free there.
    fn node(free: u64) -> NodeHeadroom {
        let of = NodeHeadroom {
            node: NODE,
            obtainable: Bytes::gib(1),
            free: Bytes::mib(free),
            unused: Bytes::mib(100),
            margin: Bytes::mib(50),
            is_low: false,
            is_tight: false,
        };
        NodeHeadroom { is_tight: of.seems_tight(false), ..of }
    }

    fn other(bench: &Bench, path: &str, cache: u64) -> OtherWorkload {
        OtherWorkload { cache: vec![(NODE, Bytes::mib(cache))], ..bench.other(path) }
    }

    fn seen(bench: &Bench, free: u64, caches: &[(&str, u64)]) -> Headroom {
        let others = caches.iter().map(|(path, cache)| other(bench, path, *cache)).collect();
        Headroom { look: 1, nodes: vec![node(free)], others, ..Headroom::default() }
    }

    /// What is ordered at such a look: of whom, and how much.
    fn next(bench: &mut Bench, seen: &Headroom, now: Instant) -> Option<(String, u64)> {
        let (core, guard) = bench.core_and_guard();
        let order = guard.reclaim.next(core, seen, &seen.nodes[0], now)?;
        Some((order.cgroup.as_str().to_owned(), order.bytes.0 >> 20))
    }

    /// What came of an order.
    fn take(bench: &mut Bench, seen: &Headroom, path: &str, outcome: Outcome, now: Instant) {
        let order = order_of(bench, path);
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.take(core, seen, order, outcome, now);
    }

    fn order_of(bench: &Bench, path: &str) -> CacheDrop {
        let OtherWorkload { cgroup, id, .. } = bench.other(path);
        CacheDrop { cgroup, id, dir: bench.root().join(path), node: NODE, bytes: Bytes::mib(50), last: None }
    }

    fn dropped(mib: u64) -> Outcome {
        let bytes = Bytes::mib(mib);
        Ok(Some(Dropped { bytes, asked: bytes, refaulted: Bytes(0) }))
    }

    #[test]
    fn the_one_with_most_page_cache_gives_up_what_lacks() {
        let mut bench = Bench::new(&["small", "large", "exempt"]);
        let now = Instant::now();
        let caches = [("small", 70), ("kept", 900), ("large", 500), ("exempt", 800)];
        let order = |bench: &mut Bench, free, caches: &[(&str, u64)]| {
            let seen = seen(bench, free, caches);
            next(bench, &seen, now)
        };
        assert_eq!(order(&mut bench, 110, &caches), Some(("/large".to_owned(), 90)));
        assert_eq!(
            order(&mut bench, 0, &caches[..2]),
            Some(("/small".to_owned(), 70)),
            "no more than it has"
        );
        let (core, _) = bench.core_and_guard();
        assert_eq!(core.config.guard_reclaim.rate.0, Bytes::mib(64));
        let all = [("large", 5000)];
        let seen = Headroom {
            nodes: vec![NodeHeadroom { unused: Bytes::gib(9), ..node(0) }],
            ..seen(&bench, 0, &all)
        };
        assert_eq!(next(&mut bench, &seen, now), Some(("/large".to_owned(), 5 * 64)), "at the rate");
        assert!(bench.reported().is_empty());
        assert_eq!(order(&mut bench, 110, &[("kept", 900), ("exempt", 800), ("small", 1)]), None);
        assert_eq!(order(&mut bench, 110, &[("kept", 900)]), None);
        let reported = bench.reported();
        assert_eq!(reported.matches("90 MiB more are to be free on node 1").count(), 1, "{reported}");
        assert!(
            reported.contains("no workload without a guarantee has page cache there that it does not use")
        );
    }

    #[test]
    fn who_uses_page_cache_is_left_alone_for_longer_each_time() {
        let mut bench = Bench::new(&["used", "large"]);
        let start = Instant::now();
        let seen = seen(&bench, 0, &[("used", 500), ("large", 400)]);
        let (mut now, mut after) = (start, Vec::new());
        for _ in 0..7 {
            take(&mut bench, &seen, "used", Ok(None), now);
            assert_eq!(next(&mut bench, &seen, now).unwrap().0, "/large");
            let paused = (0..).find(|seconds| {
                next(&mut bench, &seen, now + Duration::from_secs(*seconds)).unwrap().0 == "/used"
            });
            after.push(paused.unwrap());
            now += Duration::from_secs(paused.unwrap());
        }
        assert_eq!(after, [30, 60, 120, 240, 480, 960, 960]);
        take(&mut bench, &seen, "used", dropped(50), now);
        assert_eq!(next(&mut bench, &seen, now).unwrap().0, "/used", "it did not use that");
        take(&mut bench, &seen, "used", dropped(1), now);
        assert_eq!(next(&mut bench, &seen, now).unwrap().0, "/large", "nothing of it can be dropped now");
        assert!(bench.reported().contains("is dropped, first 50 MiB of /used"), "{}", bench.reported());
    }

    #[test]
    fn the_end_is_reported_with_what_was_dropped() {
        let mut bench = Bench::new(&["hog"]);
        let tight = seen(&bench, 0, &[("hog", 500)]);
        for mib in [50, 30] {
            take(&mut bench, &tight, "hog", dropped(mib), Instant::now());
        }
        bench.show(vec![node(199)], Vec::new());
        assert!(bench.reported().contains("What is promised on node 1 is free again: 80 MiB of page cache"));
        assert!(bench.guard().reclaim.tight.is_empty());
    }

    #[test]
    fn a_kernel_that_refuses_is_reported_and_not_asked_again() {
        let mut bench = Bench::new(&["hog", "gone"]);
        let tight = seen(&bench, 0, &[("hog", 500)]);
        fs::rename(bench.root().join("gone"), bench.root().join("hog/gone")).unwrap();
        let order = CacheDrop { dir: bench.root().join("gone"), ..order_of(&bench, "hog") };
        let refused = || Err(io::Error::other("no"));
        {
            let (core, guard) = bench.core_and_guard();
            guard.reclaim.take(core, &tight, order, refused(), Instant::now());
        }
        assert!(bench.reported().is_empty(), "it is gone");
        take(&mut bench, &tight, "hog", refused(), Instant::now());
        assert!(
            bench
                .reported()
                .contains("Page cache cannot be dropped, so what is promised is not kept free: no.")
        );
        bench.show(vec![node(0)], vec![other(&bench, "hog", 500)]);
        assert!(bench.guard().reclaim.worker.is_none());
    }

    #[test]
    fn a_look_that_knows_page_cache_has_some_dropped() {
        let mut bench = Bench::new(&["hog"]);
        let dir = bench.root().join("hog");
        let stat = format!("anon N0=0 N1=0\nfile N0=0 N1={}\n", Bytes::mib(500).0);
        for (file, text) in [
            ("memory.numa_stat", &*stat),
            ("memory.stat", "workingset_refault_file 0\n"),
            ("memory.reclaim", ""),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
        bench.show(vec![node(0)], Vec::new());
        assert!(bench.guard().reclaim.worker.is_none());
        bench.show(vec![node(0)], vec![other(&bench, "hog", 500)]);
        let began = Instant::now();
        let asked = loop {
            let asked = fs::read_to_string(dir.join("memory.reclaim")).unwrap();
            if !asked.is_empty() || began.elapsed() > Duration::from_secs(30) {
                break asked;
            }
            thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(asked, format!("{} swappiness=0", Bytes::mib(200).0));
    }
}

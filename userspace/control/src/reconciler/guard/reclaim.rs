//! First measure of the headroom guard (`guardReclaim`): keeps memory free for guarantees that are not used yet.
//!
//! # Problem
//! Page cache counts as available memory, because the kernel drops it on demand. But the workload that then needs its
//! guaranteed memory waits until the page cache is dropped, or gets memory of another node.
//!
//! # Algorithm
//! While a node is tight, each check that has read page cache drops some of it: from the workload without a guarantee that
//! has most on the node. The thread `page_cache` writes `memory.reclaim`. The kernel counts how much dropped page cache is read
//! again (refaults). A workload that reads most of it again uses its page cache: it is skipped for a time that doubles with
//! each repetition.
//!
//! # Invariants
//! - Page cache is dropped only from workloads that may be steered.
//! - No more is dropped than the node needs, and on all nodes together at most `rate` per second.
//! - Anonymous memory is not reclaimed.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    io, mem,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_model::{
    EventReport,
    headroom::{Headroom, NodeHeadroom, UnguaranteedWorkload},
};
use numaward_topology::{Bytes, NodeId};
use tokio_util::sync::CancellationToken;

use super::{
    cache_worker::{self, CacheDropOrder, CacheWorker, DropError, DropResult, DroppedCache},
    guaranteed_pods, is_same_cgroup, is_steerable,
};
use crate::{core::Core, page_worker::MIN_MOVE_SIZE};

/// Duration of one order at the configured rate, in seconds: about the interval at which page cache is read.
const ORDER_SECONDS: u64 = 5;
/// An order was in vain if it dropped less than the requested bytes divided by this.
const MIN_DROPPED_DIVISOR: u64 = 8;
/// First time for which a workload is skipped.
const FIRST_PAUSE: Duration = Duration::from_secs(30);
/// Maximum time for which a workload is skipped.
const MAX_PAUSE: Duration = Duration::from_mins(16);

/// Controller that drops page cache on tight nodes.
#[derive(Debug, Default)]
pub(super) struct Reclaim {
    worker: Option<CacheWorker>,
    stop: CancellationToken,
    /// Node of the order in progress.
    busy_for: Option<NodeId>,
    /// Time of the last order for each node. Tight nodes take turns.
    served: BTreeMap<NodeId, Instant>,
    /// Tight nodes with an order or a report since they became tight.
    tight: BTreeMap<NodeId, TightNode>,
    /// Workloads with an order so far.
    history: BTreeMap<(CgroupPath, CgroupId), ReclaimHistory>,
    /// Time at which the kernel refused the write for every cgroup. No order follows for [`MAX_PAUSE`].
    refused_at: Option<Instant>,
    /// The last reported message about that.
    refusal: String,
}

/// State of a tight node.
#[derive(Debug, Default)]
struct TightNode {
    dropped: Bytes,
    is_begin_reported: bool,
    /// True if a report said that no workload has page cache to drop.
    is_lack_reported: bool,
}

/// Results of earlier orders for a workload.
#[derive(Debug)]
struct ReclaimHistory {
    last: Option<DroppedCache>,
    pause: Duration,
    /// The workload is skipped until then.
    skip_until: Option<Instant>,
    updated: Instant,
}

impl ReclaimHistory {
    fn new(now: Instant) -> Self {
        Self { last: None, pause: Duration::ZERO, skip_until: None, updated: now }
    }

    /// Returns false if the history is too old: refaults much later do not show that the dropped page cache was needed.
    fn is_valid(&self, now: Instant) -> bool {
        now.duration_since(self.updated) < self.pause.max(FIRST_PAUSE) * 2
    }

    /// Skips a workload that uses its page cache, twice as long each time.
    fn skip_longer(&mut self, now: Instant) {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, MAX_PAUSE);
        (self.skip_until, self.last) = (Some(now + self.pause), None);
    }

    /// Skips a workload because its page cache cannot be dropped now.
    fn skip(&mut self, now: Instant) {
        (self.skip_until, self.last) = (Some(now + FIRST_PAUSE), None);
    }

    /// Records dropped page cache. `is_unused`: the workload did not read the previously dropped page cache again, which
    /// halves the next pause.
    fn record(&mut self, dropped: DroppedCache, is_unused: bool) {
        if is_unused {
            self.pause /= 2;
        }
        (self.skip_until, self.last) = (None, Some(dropped));
    }
}

impl Reclaim {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { stop, ..Self::default() }
    }

    /// Processes the result of the last order and sends the next one if a node is tight.
    pub(super) fn tick(&mut self, core: &Core, headroom: &Headroom, now: Instant) {
        if let Some((order, result)) = self.worker.as_mut().and_then(CacheWorker::take) {
            self.busy_for = None;
            self.process_result(core, headroom, order, result, now);
        }
        if core.config.drops_page_cache() {
            for of in &headroom.nodes {
                core.metrics.reclaimed(of.node, Bytes(0));
            }
        }
        let (busy_for, is_over) =
            (self.busy_for, |node: NodeId| !headroom.node(node).is_some_and(|of| of.is_tight));
        let over = self.tight.extract_if(.., |node, _| busy_for != Some(*node) && is_over(*node));
        for (node, of) in over.filter(|(_, of)| of.is_begin_reported) {
            let is_free = headroom.node(node).is_some_and(|of| of.unused.0 > 0);
            let state = if is_free {
                format!("The guaranteed memory on node {node} is free again")
            } else {
                format!("No guaranteed memory on node {node} must be kept free any more")
            };
            let message = format!("{state}: {} of page cache were dropped there.", mib(of.dropped));
            report(core, None, node, Severity::Info, message);
        }
        let is_refused = self.refused_at.is_some_and(|refused| now.duration_since(refused) < MAX_PAUSE);
        if !headroom.is_cache_read || self.busy_for.is_some() || is_refused {
            return;
        }
        self.history.retain(|(cgroup, id), of| of.is_valid(now) && is_same_cgroup(core, cgroup, *id));
        // Nodes without an order come first, sorted by the bytes that they need; then the longest unserved one.
        let mut tight: Vec<&NodeHeadroom> = headroom.nodes.iter().filter(|of| of.is_tight).collect();
        tight.sort_by_key(|of| (self.served.get(&of.node).copied(), Reverse(of.bytes_to_free())));
        if let Some(order) = tight.into_iter().find_map(|of| self.next_order(core, headroom, of, now)) {
            self.send(core, order, now);
        }
    }

    /// Returns the next order for a tight node. Reports once if no workload has page cache to drop.
    fn next_order(
        &mut self,
        core: &Core,
        headroom: &Headroom,
        of: &NodeHeadroom,
        now: Instant,
    ) -> Option<CacheDropOrder> {
        let node = of.node;
        let max_total =
            Bytes(core.config.guard_reclaim.rate.0.0.saturating_mul(ORDER_SECONDS)).max(MIN_MOVE_SIZE);
        let history =
            |workload: &UnguaranteedWorkload| self.history.get(&(workload.cgroup.clone(), workload.id));
        let guaranteed_pods = guaranteed_pods(core);
        let is_candidate = |workload: &&UnguaranteedWorkload| {
            let until = history(workload).and_then(|history| history.skip_until);
            until.is_none_or(|until| now >= until)
                && droppable(workload, node, max_total) >= MIN_MOVE_SIZE
                && is_steerable(core, &guaranteed_pods, workload)
        };
        let candidates = headroom.others.iter().filter(is_candidate);
        let Some(workload) =
            candidates.max_by_key(|workload| (droppable(workload, node, max_total), workload.cache_on(node)))
        else {
            let tight = self.tight.entry(node).or_default();
            if !mem::replace(&mut tight.is_lack_reported, true) {
                let message = format!(
                    "{} more must become free on node {node} for the guarantees there, but no workload without a guarantee \
                     has unused page cache there that can be dropped now.",
                    mib(of.bytes_to_free())
                );
                report(core, None, node, Severity::Info, message);
            }
            return None;
        };
        Some(CacheDropOrder {
            cgroup: workload.cgroup.clone(),
            id: workload.id,
            dir: core.hierarchy.dir(&workload.cgroup),
            node,
            bytes: of.bytes_to_free().max(MIN_MOVE_SIZE).min(droppable(workload, node, max_total)),
            max_total,
            previous: history(workload).and_then(|history| history.last),
        })
    }

    /// Sends an order to the thread, which is started with the first order.
    fn send(&mut self, core: &Core, order: CacheDropOrder, now: Instant) {
        if self.worker.is_none() {
            match cache_worker::start(&core.config.host_root, &core.ports.heartbeats, &self.stop) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => {
                    tracing::error!(%error, "page cache is not dropped: the thread cannot be started");
                }
            }
        }
        let node = order.node;
        if self.worker.as_mut().is_some_and(|worker| worker.give(order)) {
            self.busy_for = Some(node);
            self.served.insert(node, now);
        }
    }

    fn process_result(
        &mut self,
        core: &Core,
        headroom: &Headroom,
        order: CacheDropOrder,
        result: DropResult,
        now: Instant,
    ) {
        let CacheDropOrder { cgroup, id, node, .. } = order;
        let history = self.history.entry((cgroup.clone(), id)).or_insert_with(|| ReclaimHistory::new(now));
        history.updated = now;
        match result {
            Ok(Some(dropped)) => {
                // If the kernel can drop hardly any page cache of this workload now, the next order is for another one.
                if dropped.on_node.0 < order.bytes.0 / MIN_DROPPED_DIVISOR {
                    history.skip(now);
                } else {
                    history.record(dropped, order.previous.is_some());
                }
                core.metrics.reclaimed(node, dropped.on_node);
                tracing::debug!(%cgroup, %node, bytes = %dropped.on_node, all = %dropped.total, "page cache was dropped");
                let tight = self.tight.entry(node).or_default();
                tight.dropped.0 = tight.dropped.0.saturating_add(dropped.on_node.0);
                if tight.dropped >= MIN_MOVE_SIZE && !mem::replace(&mut tight.is_begin_reported, true) {
                    let rest = headroom.node(node).map_or(Bytes(0), NodeHeadroom::bytes_to_free);
                    let message = format!(
                        "The guaranteed memory on node {node} is not free: page cache of workloads without a guarantee is \
                         dropped, {} of {cgroup} first. {} more must become free.",
                        mib(tight.dropped),
                        mib(rest)
                    );
                    report(core, Some(&cgroup), node, Severity::Info, message);
                }
            }
            Ok(None) => {
                history.skip_longer(now);
                tracing::debug!(%cgroup, %node, seconds = history.pause.as_secs(), "the workload uses its page cache and is skipped");
            }
            Err(DropError::Refused(error)) if is_permanent(core, &cgroup, id, &error) => {
                self.refused_at = Some(now);
                let hint = match error.kind() {
                    io::ErrorKind::InvalidInput => "; before Linux 6.13, this requires a host without swap",
                    _ => "",
                };
                let message = format!(
                    "Page cache cannot be dropped, so guaranteed memory is not kept free: memory.reclaim: {error}{hint}."
                );
                if self.refusal != message {
                    report(core, Some(&cgroup), node, Severity::Warning, message.clone());
                    self.refusal = message;
                }
            }
            Err(error) => {
                history.skip(now);
                tracing::debug!(%cgroup, %error, "page cache of the cgroup cannot be dropped");
            }
        }
    }
}

/// Returns true if the kernel would refuse the write for every cgroup: it has no `memory.reclaim`, or not this syntax.
fn is_permanent(core: &Core, cgroup: &CgroupPath, id: CgroupId, error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NotFound, Unsupported};
    is_same_cgroup(core, cgroup, id) && matches!(error.kind(), NotFound | InvalidInput | Unsupported)
}

/// Returns the page cache of a workload on a node that can be dropped if at most `max_total` is dropped on all nodes.
fn droppable(workload: &UnguaranteedWorkload, node: NodeId, max_total: Bytes) -> Bytes {
    let total = workload.cache.iter().map(|(_, bytes)| bytes.0).fold(0, u64::saturating_add);
    let on_node = workload.cache_on(node);
    let share = u128::from(max_total.0) * u128::from(on_node.0) / u128::from(total.max(1));
    Bytes(u64::try_from(share).unwrap_or(u64::MAX)).min(on_node)
}

fn mib(bytes: Bytes) -> String {
    format!("{} MiB", bytes.0.div_ceil(1 << 20))
}

fn report(core: &Core, cgroup: Option<&CgroupPath>, node: NodeId, severity: Severity, message: String) {
    core.report(cgroup, EventReport::new(EventKind::Reclaimed, message).severity(severity).node(node));
}

#[cfg(test)]
mod tests {
    use std::{fs, io, thread};

    use super::*;
    use crate::reconciler::guard::tests::{GuardBench, guarantee, pod_container};

    const NODE: NodeId = NodeId(1);

    /// Returns node 1 with 100 MiB of unused guarantees and this free memory, in MiB.
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
        NodeHeadroom { is_tight: of.becomes_tight(false), ..of }
    }

    /// Returns a headroom with this node and the page cache of workloads there, in MiB.
    fn headroom(bench: &GuardBench, node: NodeHeadroom, caches: &[(&str, u64)]) -> Headroom {
        let workload = |(path, cache): &(&str, u64)| UnguaranteedWorkload {
            cache: vec![(NODE, Bytes::mib(*cache))],
            ..bench.workload(path)
        };
        let others = caches.iter().map(workload).collect();
        Headroom { nodes: vec![node], others, is_cache_read: true, ..Headroom::default() }
    }

    fn order(bench: &mut GuardBench, headroom: &Headroom, now: Instant) -> Option<CacheDropOrder> {
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.next_order(core, headroom, &headroom.nodes[0], now)
    }

    /// Returns the cgroup and the MiB of the next order.
    fn next(bench: &mut GuardBench, headroom: &Headroom, now: Instant) -> Option<(String, u64)> {
        let order = order(bench, headroom, now)?;
        Some((order.cgroup.as_str().to_owned(), order.bytes.0 >> 20))
    }

    fn process(
        bench: &mut GuardBench,
        headroom: &Headroom,
        order: CacheDropOrder,
        result: DropResult,
        now: Instant,
    ) {
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.process_result(core, headroom, order, result, now);
    }

    fn dropped(mib: u64) -> DroppedCache {
        let bytes = Bytes::mib(mib);
        DroppedCache { on_node: bytes, total: bytes, refaulted: Bytes(0) }
    }

    #[test]
    fn spares_pods_with_guarantees() {
        let (shares, bare) = (pod_container("podp", 'a'), pod_container("podp", 'b'));
        let other = pod_container("podq", 'c');
        let above = ["kubepods", "kubepods/podp", "kubepods/podq"];
        for is_whole in [false, true] {
            let mut bench = GuardBench::new(&[&above[..], &[&shares, &bare, &other]].concat());
            let usage = headroom(&bench, node(0), &[(&bare, 900), (&other, 200)]);
            let now = Instant::now();
            assert_eq!(next(&mut bench, &usage, now).unwrap().0, format!("/{bare}"), "no guarantee yet");
            if is_whole {
                bench.admit_pod("p");
            } else {
                guarantee(&mut bench, "p", &format!("/{shares}"));
            }
            assert_eq!(next(&mut bench, &usage, now).unwrap().0, format!("/{other}"), "{is_whole}");
        }
    }

    #[test]
    fn drops_needed_bytes_of_largest() {
        let mut bench = GuardBench::new(&["small", "large", "spread", "exempt"]);
        let now = Instant::now();
        let caches = [("small", 70), ("kept", 900), ("large", 500), ("exempt", 800)];
        let usage = headroom(&bench, node(110), &caches);
        assert_eq!(next(&mut bench, &usage, now), Some(("/large".to_owned(), 90)));
        let usage = headroom(&bench, node(0), &caches[..2]);
        assert_eq!(next(&mut bench, &usage, now), Some(("/small".to_owned(), 70)), "no more than it has");
        let empty = NodeHeadroom { unused: Bytes::gib(9), margin: Bytes(0), ..node(0) };
        let mut usage = headroom(&bench, empty, &[("large", 5000), ("spread", 6000)]);
        usage.others[1].cache.push((NodeId(0), Bytes::gib(60)));
        assert_eq!(next(&mut bench, &usage, now), Some(("/large".to_owned(), 5 * 64)), "at the rate");
        usage.others.remove(0);
        assert_eq!(
            next(&mut bench, &usage, now),
            Some(("/spread".to_owned(), 28)),
            "the rate limits all nodes together"
        );
        usage.others[0].cache[0].1 = Bytes::mib(300);
        assert_eq!(next(&mut bench, &usage, now), None, "less than the minimum on this node");
        bench.forget_reports();
        bench.core_and_guard().1.reclaim.tight.clear();

        for caches in [&[("kept", 900), ("exempt", 800), ("small", 1)][..], &[("kept", 900)]] {
            let usage = headroom(&bench, node(110), caches);
            assert_eq!(next(&mut bench, &usage, now), None);
        }
        let reported = bench.reported();
        assert_eq!(reported.matches("90 MiB more must become free on node 1").count(), 1, "{reported}");
        assert!(reported.contains("no workload without a guarantee has unused page cache there"));
    }

    #[test]
    fn pause_doubles_with_each_refault() {
        let mut bench = GuardBench::new(&["used", "large"]);
        let usage = headroom(&bench, node(0), &[("used", 500), ("large", 400)]);
        let (mut now, mut pauses) = (Instant::now(), Vec::new());
        for _ in 0..7 {
            // The second order finds that the dropped page cache was read again.
            let first = order(&mut bench, &usage, now).unwrap();
            assert_eq!((first.cgroup.as_str(), first.previous), ("/used", None));
            process(&mut bench, &usage, first, Ok(Some(dropped(50))), now);
            let second = order(&mut bench, &usage, now).unwrap();
            assert!(second.cgroup.as_str() == "/used" && second.previous.is_some());
            process(&mut bench, &usage, second, Ok(None), now);
            let is_its_turn = |seconds: &u64| {
                next(&mut bench, &usage, now + Duration::from_secs(*seconds)).unwrap().0 == "/used"
            };
            let seconds = (0..2000).find(is_its_turn).unwrap();
            pauses.push(seconds);
            now += Duration::from_secs(seconds);
        }
        assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960]);
        // The workload no longer uses its page cache.
        for _ in 0..3 {
            let order = order(&mut bench, &usage, now).unwrap();
            process(&mut bench, &usage, order, Ok(Some(dropped(50))), now);
        }
        let last = order(&mut bench, &usage, now).unwrap();
        process(&mut bench, &usage, last, Ok(None), now);
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(next(&mut bench, &usage, after(479)).unwrap().0, "/large");
        assert_eq!(
            next(&mut bench, &usage, after(480)).unwrap().0,
            "/used",
            "two unused drops halve the pause twice, a refault doubles it"
        );
        assert!(bench.reported().contains("is dropped, 50 MiB of /used first"), "{}", bench.reported());
    }

    #[test]
    fn skips_undroppable_cache() {
        let mut bench = GuardBench::new(&["dirty", "large"]);
        let (usage, now) = (headroom(&bench, node(0), &[("dirty", 500), ("large", 400)]), Instant::now());
        let first = order(&mut bench, &usage, now).unwrap();
        process(&mut bench, &usage, first, Ok(Some(dropped(20))), now);
        assert_eq!(next(&mut bench, &usage, now).unwrap().0, "/large", "of 200 MiB");
        assert_eq!(bench.guard().reclaim.tight[&NODE].dropped, Bytes::mib(20), "counted nevertheless");
    }

    #[test]
    fn forgets_old_history() {
        let mut bench = GuardBench::new(&["hog"]);
        let (usage, now) = (headroom(&bench, node(0), &[("hog", 500)]), Instant::now());
        let first = order(&mut bench, &usage, now).unwrap();
        process(&mut bench, &usage, first, Ok(Some(dropped(50))), now);
        for (seconds, is_known) in [(59, true), (60, false)] {
            let (core, guard) = bench.core_and_guard();
            guard.reclaim.tick(core, &usage, now + Duration::from_secs(seconds));
            assert_eq!(guard.reclaim.history.is_empty(), !is_known, "after {seconds} s");
            (guard.reclaim.busy_for, guard.reclaim.worker) = (None, None);
        }
    }

    #[test]
    fn tight_nodes_take_turns() {
        let mut bench = GuardBench::new(&["hog"]);
        let mut usage = headroom(&bench, node(0), &[("hog", 500)]);
        usage.nodes.push(NodeHeadroom { node: NodeId(0), ..node(50) });
        usage.others[0].cache.push((NodeId(0), Bytes::mib(500)));
        let mut now = Instant::now();
        let mut turns = Vec::new();
        for _ in 0..4 {
            let (core, guard) = bench.core_and_guard();
            guard.reclaim.tick(core, &usage, now);
            turns.extend(guard.reclaim.busy_for.take().map(|node| node.0));
            guard.reclaim.worker = None;
            now += Duration::from_secs(5);
        }
        assert_eq!(turns, [1, 0, 1, 0]);
    }

    #[test]
    fn reports_total_at_the_end() {
        for (last, expected) in [
            (node(199), "The guaranteed memory on node 1 is free again: 80 MiB of page cache"),
            (
                NodeHeadroom { unused: Bytes(0), is_tight: false, ..node(0) },
                "No guaranteed memory on node 1 must be kept free any more: 80 MiB",
            ),
        ] {
            let mut bench = GuardBench::new(&["hog"]);
            let (usage, now) = (headroom(&bench, node(0), &[("hog", 500)]), Instant::now());
            for mib in [50, 30] {
                let order = order(&mut bench, &usage, now).unwrap();
                process(&mut bench, &usage, order, Ok(Some(dropped(mib))), now);
            }
            bench.core_and_guard().1.reclaim.busy_for = Some(NODE);
            bench.publish(vec![last], Vec::new());
            assert!(!bench.reported().contains(expected), "an order is in progress");
            bench.core_and_guard().1.reclaim.busy_for = None;
            bench.publish(vec![last], Vec::new());
            assert!(bench.reported().contains(expected), "{}", bench.reported());
            assert!(bench.guard().reclaim.tight.is_empty());
        }
    }

    #[test]
    fn permanent_refusal_stops_orders() {
        let mut bench = GuardBench::new(&["hog", "gone"]);
        let now = Instant::now();
        let usage = headroom(&bench, node(0), &[("gone", 600), ("hog", 500)]);
        let refused = |kind: io::ErrorKind| Err(DropError::Refused(kind.into()));
        let gone = order(&mut bench, &usage, now).unwrap();
        assert_eq!(gone.cgroup.as_str(), "/gone");
        fs::remove_dir_all(bench.root().join("gone")).unwrap();
        process(&mut bench, &usage, gone, refused(io::ErrorKind::NotFound), now);
        let hog = order(&mut bench, &usage, now).unwrap();
        process(&mut bench, &usage, hog, refused(io::ErrorKind::OutOfMemory), now);
        assert!(
            bench.reported().is_empty() && bench.guard().reclaim.refused_at.is_none(),
            "{}",
            bench.reported()
        );
        let hog = order(&mut bench, &usage, now + FIRST_PAUSE).unwrap();
        process(&mut bench, &usage, hog, refused(io::ErrorKind::InvalidInput), now);
        assert!(
            bench.reported().contains("before Linux 6.13, this requires a host without swap."),
            "{}",
            bench.reported()
        );
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.tick(core, &usage, now + MAX_PAUSE / 2);
        assert!(guard.reclaim.busy_for.is_none());
        guard.reclaim.tick(core, &usage, now + MAX_PAUSE);
        assert!(guard.reclaim.busy_for.is_some(), "orders resume after MAX_PAUSE");
    }

    #[test]
    fn check_with_page_cache_sends_order() {
        let mut bench = GuardBench::new(&["hog"]);
        let dir = bench.root().join("hog");
        let stat = format!("anon N0=0 N1=0\nfile N0=0 N1={}\n", Bytes::mib(500).0);
        for (file, text) in [
            ("memory.numa_stat", &*stat),
            ("memory.current", "1073741824\n"),
            ("memory.stat", "workingset_refault_file 0\n"),
            ("memory.reclaim", ""),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
        let now = Instant::now();
        let usage = headroom(&bench, node(0), &[("hog", 500)]);
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.tick(core, &Headroom { is_cache_read: false, ..usage.clone() }, now);
        assert!(guard.reclaim.worker.is_none());
        guard.reclaim.tick(core, &usage, now);
        assert_eq!(guard.reclaim.busy_for, Some(NODE));
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

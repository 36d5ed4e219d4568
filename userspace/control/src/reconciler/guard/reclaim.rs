//! The guard's first step (`guardReclaim`): what is promised and not used yet is kept free.
//!
//! Problem: page cache counts as available, as the kernel drops it when somebody needs memory. But who was promised that
//! memory then waits until it is dropped, or gets memory of another node.
//!
//! Algorithm: while a node is tight, each look that has read page cache drops some of the workload without a guarantee that has
//! most of it there, in the thread `page_cache`. The kernel counts how much of what was dropped is read again (refaults). A
//! workload that reads most of it again uses it: it is left alone for a while, and for twice as long each further time.
//!
//! Invariants: nobody is touched who may not be steered. On the node, no more is dropped than is needed, and of all nodes at most
//! `rate` in a second. Anonymous memory is not touched.

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
    cache_worker::{self, CacheDrop, CacheWorker, DropError, Dropped, Outcome},
    may_be_steered, pods_with_promise,
};
use crate::{core::Core, page_worker::LEAST};

/// For how many seconds one order drops cache at the rate: about as often is page cache read.
const ORDER: u64 = 5;
/// Where less than one in so many parts of what was to go went, the rest cannot be dropped now.
const FEW: u64 = 8;
/// For how long a workload that uses its page cache is left alone, the first time and at most.
const PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_mins(16);

/// Drops page cache.
#[derive(Debug, Default)]
pub(super) struct Reclaim {
    worker: Option<CacheWorker>,
    stop: CancellationToken,
    /// The node for which the thread is at work.
    busy_for: Option<NodeId>,
    /// When something was dropped for each node last: all have their turn.
    served: BTreeMap<NodeId, Instant>,
    /// Nodes for which something was done or said since they became tight.
    tight: BTreeMap<NodeId, Tight>,
    /// What is known of workloads of which some was to be dropped.
    known: BTreeMap<(CgroupPath, CgroupId), Known>,
    /// When the kernel refused it, for each cgroup as for the last one: it is tried again much later.
    refused: Option<Instant>,
    /// What it said then.
    refusal: String,
}

/// A node that is tight.
#[derive(Debug, Default)]
struct Tight {
    dropped: Bytes,
    is_begun: bool,
    /// Whether it was said that nobody has page cache to drop.
    is_said: bool,
}

/// A workload of which some was to be dropped.
#[derive(Debug)]
struct Known {
    last: Option<Dropped>,
    pause: Duration,
    /// It is left alone before.
    until: Option<Instant>,
    /// When this was learnt.
    since: Instant,
}

impl Known {
    fn new(now: Instant) -> Self {
        Self { last: None, pause: Duration::ZERO, until: None, since: now }
    }

    /// Whether it still says something: what a workload reads much later is another matter.
    fn is_valid(&self, now: Instant) -> bool {
        now.duration_since(self.since) < self.pause.max(PAUSE) * 2
    }

    /// It uses its page cache.
    fn leave_alone(&mut self, now: Instant) {
        self.pause = (self.pause * 2).clamp(PAUSE, LONGEST_PAUSE);
        (self.until, self.last) = (Some(now + self.pause), None);
    }

    /// Nothing of it can be dropped now.
    fn pass_over(&mut self, now: Instant) {
        (self.until, self.last) = (Some(now + PAUSE), None);
    }

    /// Takes note of what was dropped; `is_judged` if it did not use what was dropped before.
    fn took(&mut self, dropped: Dropped, is_judged: bool) {
        if is_judged {
            self.pause /= 2;
        }
        (self.until, self.last) = (None, Some(dropped));
    }
}

impl Reclaim {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { stop, ..Self::default() }
    }

    /// Takes note of what was dropped, and has more dropped where a node is tight.
    pub(super) fn turn(&mut self, core: &Core, seen: &Headroom, now: Instant) {
        if let Some((order, outcome)) = self.worker.as_mut().and_then(CacheWorker::take) {
            self.busy_for = None;
            self.take(core, seen, order, outcome, now);
        }
        if core.config.drops_page_cache() {
            for of in &seen.nodes {
                core.metrics.reclaimed(of.node, Bytes(0));
            }
        }
        let (busy_for, is_over) =
            (self.busy_for, |node: NodeId| !seen.node(node).is_some_and(|of| of.is_tight));
        let over = self.tight.extract_if(.., |node, _| busy_for != Some(*node) && is_over(*node));
        for (node, of) in over.filter(|(_, of)| of.is_begun) {
            let is_free = seen.node(node).is_some_and(|of| of.unused.0 > 0);
            let what = if is_free {
                format!("What is promised on node {node} is free again")
            } else {
                format!("Nothing has to be kept free on node {node} any more")
            };
            let message = format!("{what}: {} of page cache were dropped there.", mib(of.dropped));
            report(core, None, node, Severity::Info, message);
        }
        let is_refused = self.refused.is_some_and(|refused| now.duration_since(refused) < LONGEST_PAUSE);
        if !seen.is_cache_read || self.busy_for.is_some() || is_refused {
            return;
        }
        let is_there = |cgroup: &CgroupPath, id: CgroupId| {
            core.hierarchy.id_of(cgroup).is_ok_and(|found| found == Some(id))
        };
        self.known.retain(|(cgroup, id), of| of.is_valid(now) && is_there(cgroup, *id));
        // The node comes first that had its turn the longest time ago; of those that had none, the one that needs most.
        let mut tight: Vec<&NodeHeadroom> = seen.nodes.iter().filter(|of| of.is_tight).collect();
        tight.sort_by_key(|of| (self.served.get(&of.node).copied(), Reverse(of.bytes_to_free())));
        if let Some(order) = tight.into_iter().find_map(|of| self.next(core, seen, of, now)) {
            self.give(core, order, now);
        }
    }

    /// What to drop for a node.
    fn next(&mut self, core: &Core, seen: &Headroom, of: &NodeHeadroom, now: Instant) -> Option<CacheDrop> {
        let node = of.node;
        let most = Bytes(core.config.guard_reclaim.rate.0.0.saturating_mul(ORDER)).max(LEAST);
        let known = |other: &UnguaranteedWorkload| self.known.get(&(other.cgroup.clone(), other.id));
        let pods = pods_with_promise(core);
        let may_be_dropped = |other: &&UnguaranteedWorkload| {
            let is_due = known(other).and_then(|known| known.until).is_none_or(|until| now >= until);
            is_due && within(other, node, most) >= LEAST && may_be_steered(core, &pods, other)
        };
        let candidates = seen.others.iter().filter(may_be_dropped);
        let Some(other) = candidates.max_by_key(|other| (within(other, node, most), other.cache_on(node)))
        else {
            let tight = self.tight.entry(node).or_default();
            if !mem::replace(&mut tight.is_said, true) {
                let message = format!(
                    "{} more must become free on node {node} for what is promised there, and no workload without a guarantee \
                     has page cache there that it does not use and that can be dropped now.",
                    mib(of.bytes_to_free())
                );
                report(core, None, node, Severity::Info, message);
            }
            return None;
        };
        Some(CacheDrop {
            cgroup: other.cgroup.clone(),
            id: other.id,
            dir: core.hierarchy.dir(&other.cgroup),
            node,
            bytes: of.bytes_to_free().max(LEAST).min(within(other, node, most)),
            most,
            last: known(other).and_then(|known| known.last),
        })
    }

    /// Gives the thread an order; it is started when it is needed first.
    fn give(&mut self, core: &Core, order: CacheDrop, now: Instant) {
        if self.worker.is_none() {
            match cache_worker::start(&core.config.host_root, &core.ports.heartbeats, &self.stop) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => tracing::error!(%error, "no page cache is dropped: no thread can be started"),
            }
        }
        let node = order.node;
        if self.worker.as_mut().is_some_and(|worker| worker.give(order)) {
            self.busy_for = Some(node);
            self.served.insert(node, now);
        }
    }

    fn take(&mut self, core: &Core, seen: &Headroom, order: CacheDrop, outcome: Outcome, now: Instant) {
        let CacheDrop { cgroup, id, node, .. } = order;
        let known = self.known.entry((cgroup.clone(), id)).or_insert_with(|| Known::new(now));
        known.since = now;
        match outcome {
            Ok(Some(dropped)) => {
                // Where hardly any of it can be dropped now, the next one has its turn.
                if dropped.bytes.0 < order.bytes.0 / FEW {
                    known.pass_over(now);
                } else {
                    known.took(dropped, order.last.is_some());
                }
                core.metrics.reclaimed(node, dropped.bytes);
                tracing::debug!(%cgroup, %node, bytes = %dropped.bytes, all = %dropped.all, "page cache was dropped");
                let tight = self.tight.entry(node).or_default();
                tight.dropped.0 = tight.dropped.0.saturating_add(dropped.bytes.0);
                if tight.dropped >= LEAST && !mem::replace(&mut tight.is_begun, true) {
                    let rest = seen.node(node).map_or(Bytes(0), NodeHeadroom::bytes_to_free);
                    let message = format!(
                        "What is promised on node {node} is not free there: page cache of workloads without a guarantee is \
                         dropped, {} of {cgroup} first. {} more must become free.",
                        mib(tight.dropped),
                        mib(rest)
                    );
                    report(core, Some(&cgroup), node, Severity::Info, message);
                }
            }
            Ok(None) => {
                known.leave_alone(now);
                tracing::debug!(%cgroup, %node, seconds = known.pause.as_secs(), "uses its page cache, and is left alone");
            }
            Err(DropError::Refused(error)) if is_final(core, &cgroup, id, &error) => {
                self.refused = Some(now);
                let hint = match error.kind() {
                    io::ErrorKind::InvalidInput => "; before Linux 6.13, that takes a host without swap",
                    _ => "",
                };
                let message = format!(
                    "Page cache cannot be dropped, so what is promised is not kept free: memory.reclaim: {error}{hint}."
                );
                if self.refusal != message {
                    report(core, Some(&cgroup), node, Severity::Warning, message.clone());
                    self.refusal = message;
                }
            }
            Err(error) => {
                known.pass_over(now);
                tracing::debug!(%cgroup, %error, "its page cache cannot be dropped");
            }
        }
    }
}

/// Whether the kernel would answer so for each cgroup: it does not have the file, or not what is written to it.
fn is_final(core: &Core, cgroup: &CgroupPath, id: CgroupId, error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NotFound, Unsupported};
    let is_there = core.hierarchy.id_of(cgroup).is_ok_and(|found| found == Some(id));
    is_there && matches!(error.kind(), NotFound | InvalidInput | Unsupported)
}

/// How much of a node goes where so much is dropped of all.
fn within(other: &UnguaranteedWorkload, node: NodeId, most: Bytes) -> Bytes {
    let all = other.cache.iter().map(|(_, bytes)| bytes.0).fold(0, u64::saturating_add);
    let on = other.cache_on(node);
    let share = u128::from(most.0) * u128::from(on.0) / u128::from(all.max(1));
    Bytes(u64::try_from(share).unwrap_or(u64::MAX)).min(on)
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
    use crate::reconciler::guard::tests::{Bench, guarantee, pod_container};

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
        NodeHeadroom { is_tight: of.becomes_tight(false), ..of }
    }

    /// A look at this node, and at others with so much page cache there, in MiB.
    fn seen(bench: &Bench, node: NodeHeadroom, caches: &[(&str, u64)]) -> Headroom {
        let other = |(path, cache): &(&str, u64)| UnguaranteedWorkload {
            cache: vec![(NODE, Bytes::mib(*cache))],
            ..bench.other(path)
        };
        let others = caches.iter().map(other).collect();
        Headroom { nodes: vec![node], others, is_cache_read: true, ..Headroom::default() }
    }

    /// What is ordered at such a look.
    fn order(bench: &mut Bench, seen: &Headroom, now: Instant) -> Option<CacheDrop> {
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.next(core, seen, &seen.nodes[0], now)
    }

    /// Of whom, and how much.
    fn next(bench: &mut Bench, seen: &Headroom, now: Instant) -> Option<(String, u64)> {
        let order = order(bench, seen, now)?;
        Some((order.cgroup.as_str().to_owned(), order.bytes.0 >> 20))
    }

    fn take(bench: &mut Bench, seen: &Headroom, order: CacheDrop, outcome: Outcome, now: Instant) {
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.take(core, seen, order, outcome, now);
    }

    fn dropped(mib: u64) -> Dropped {
        let bytes = Bytes::mib(mib);
        Dropped { bytes, all: bytes, refaulted: Bytes(0) }
    }

    #[test]
    fn a_container_whose_pod_has_a_promise_keeps_its_page_cache() {
        let (shares, bare) = (pod_container("podp", 'a'), pod_container("podp", 'b'));
        let other = pod_container("podq", 'c');
        let above = ["kubepods", "kubepods/podp", "kubepods/podq"];
        for is_whole in [false, true] {
            let mut bench = Bench::new(&[&above[..], &[&shares, &bare, &other]].concat());
            let look = seen(&bench, node(0), &[(&bare, 900), (&other, 200)]);
            let now = Instant::now();
            assert_eq!(next(&mut bench, &look, now).unwrap().0, format!("/{bare}"), "nothing is promised");
            if is_whole {
                bench.admit_pod("p");
            } else {
                guarantee(&mut bench, "p", &format!("/{shares}"));
            }
            assert_eq!(next(&mut bench, &look, now).unwrap().0, format!("/{other}"), "{is_whole}");
        }
    }

    #[test]
    fn the_one_with_most_page_cache_gives_up_what_is_needed() {
        let mut bench = Bench::new(&["small", "large", "spread", "exempt"]);
        let now = Instant::now();
        let caches = [("small", 70), ("kept", 900), ("large", 500), ("exempt", 800)];
        let look = seen(&bench, node(110), &caches);
        assert_eq!(next(&mut bench, &look, now), Some(("/large".to_owned(), 90)));
        let look = seen(&bench, node(0), &caches[..2]);
        assert_eq!(next(&mut bench, &look, now), Some(("/small".to_owned(), 70)), "no more than it has");
        let empty = NodeHeadroom { unused: Bytes::gib(9), margin: Bytes(0), ..node(0) };
        let mut look = seen(&bench, empty, &[("large", 5000), ("spread", 6000)]);
        look.others[1].cache.push((NodeId(0), Bytes::gib(60)));
        assert_eq!(next(&mut bench, &look, now), Some(("/large".to_owned(), 5 * 64)), "at the rate");
        look.others.remove(0);
        assert_eq!(
            next(&mut bench, &look, now),
            Some(("/spread".to_owned(), 28)),
            "of all nodes at the rate"
        );
        look.others[0].cache[0].1 = Bytes::mib(300);
        assert_eq!(next(&mut bench, &look, now), None, "far more would go on other nodes");
        bench.forget_reports();
        bench.core_and_guard().1.reclaim.tight.clear();

        for caches in [&[("kept", 900), ("exempt", 800), ("small", 1)][..], &[("kept", 900)]] {
            let look = seen(&bench, node(110), caches);
            assert_eq!(next(&mut bench, &look, now), None);
        }
        let reported = bench.reported();
        assert_eq!(reported.matches("90 MiB more must become free on node 1").count(), 1, "{reported}");
        assert!(
            reported.contains("no workload without a guarantee has page cache there that it does not use")
        );
    }

    #[test]
    fn who_uses_page_cache_is_left_alone_for_longer_each_time() {
        let mut bench = Bench::new(&["used", "large"]);
        let look = seen(&bench, node(0), &[("used", 500), ("large", 400)]);
        let (mut now, mut pauses) = (Instant::now(), Vec::new());
        for _ in 0..7 {
            // What was dropped is read again, which the next order finds.
            let first = order(&mut bench, &look, now).unwrap();
            assert_eq!((first.cgroup.as_str(), first.last), ("/used", None));
            take(&mut bench, &look, first, Ok(Some(dropped(50))), now);
            let second = order(&mut bench, &look, now).unwrap();
            assert!(second.cgroup.as_str() == "/used" && second.last.is_some());
            take(&mut bench, &look, second, Ok(None), now);
            let is_its_turn = |seconds: &u64| {
                next(&mut bench, &look, now + Duration::from_secs(*seconds)).unwrap().0 == "/used"
            };
            let seconds = (0..2000).find(is_its_turn).unwrap();
            pauses.push(seconds);
            now += Duration::from_secs(seconds);
        }
        assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960]);
        // Now it does not use it any more.
        for _ in 0..3 {
            let order = order(&mut bench, &look, now).unwrap();
            take(&mut bench, &look, order, Ok(Some(dropped(50))), now);
        }
        let last = order(&mut bench, &look, now).unwrap();
        take(&mut bench, &look, last, Ok(None), now);
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(next(&mut bench, &look, after(479)).unwrap().0, "/large");
        assert_eq!(
            next(&mut bench, &look, after(480)).unwrap().0,
            "/used",
            "half of it twice, and then twice"
        );
        assert!(bench.reported().contains("is dropped, 50 MiB of /used first"), "{}", bench.reported());
    }

    #[test]
    fn where_hardly_anything_can_be_dropped_the_next_one_has_its_turn() {
        let mut bench = Bench::new(&["dirty", "large"]);
        let (look, now) = (seen(&bench, node(0), &[("dirty", 500), ("large", 400)]), Instant::now());
        let first = order(&mut bench, &look, now).unwrap();
        take(&mut bench, &look, first, Ok(Some(dropped(20))), now);
        assert_eq!(next(&mut bench, &look, now).unwrap().0, "/large", "of 200 MiB");
        assert_eq!(bench.guard().reclaim.tight[&NODE].dropped, Bytes::mib(20), "it counts all the same");
    }

    #[test]
    fn what_a_workload_did_long_ago_says_nothing() {
        let mut bench = Bench::new(&["hog"]);
        let (look, now) = (seen(&bench, node(0), &[("hog", 500)]), Instant::now());
        let first = order(&mut bench, &look, now).unwrap();
        take(&mut bench, &look, first, Ok(Some(dropped(50))), now);
        for (seconds, is_known) in [(59, true), (60, false)] {
            let (core, guard) = bench.core_and_guard();
            guard.reclaim.turn(core, &look, now + Duration::from_secs(seconds));
            assert_eq!(guard.reclaim.known.is_empty(), !is_known, "after {seconds} s");
            (guard.reclaim.busy_for, guard.reclaim.worker) = (None, None);
        }
    }

    #[test]
    fn each_tight_node_has_its_turn() {
        let mut bench = Bench::new(&["hog"]);
        let mut look = seen(&bench, node(0), &[("hog", 500)]);
        look.nodes.push(NodeHeadroom { node: NodeId(0), ..node(50) });
        look.others[0].cache.push((NodeId(0), Bytes::mib(500)));
        let mut now = Instant::now();
        let mut turns = Vec::new();
        for _ in 0..4 {
            let (core, guard) = bench.core_and_guard();
            guard.reclaim.turn(core, &look, now);
            turns.extend(guard.reclaim.busy_for.take().map(|node| node.0));
            guard.reclaim.worker = None;
            now += Duration::from_secs(5);
        }
        assert_eq!(turns, [1, 0, 1, 0]);
    }

    #[test]
    fn the_end_is_reported_with_what_was_dropped() {
        for (last, expected) in [
            (node(199), "What is promised on node 1 is free again: 80 MiB of page cache"),
            (
                NodeHeadroom { unused: Bytes(0), is_tight: false, ..node(0) },
                "Nothing has to be kept free on node 1 any more: 80 MiB",
            ),
        ] {
            let mut bench = Bench::new(&["hog"]);
            let (look, now) = (seen(&bench, node(0), &[("hog", 500)]), Instant::now());
            for mib in [50, 30] {
                let order = order(&mut bench, &look, now).unwrap();
                take(&mut bench, &look, order, Ok(Some(dropped(mib))), now);
            }
            bench.core_and_guard().1.reclaim.busy_for = Some(NODE);
            bench.show(vec![last], Vec::new());
            assert!(!bench.reported().contains(expected), "more of it is on its way");
            bench.core_and_guard().1.reclaim.busy_for = None;
            bench.show(vec![last], Vec::new());
            assert!(bench.reported().contains(expected), "{}", bench.reported());
            assert!(bench.guard().reclaim.tight.is_empty());
        }
    }

    #[test]
    fn only_a_kernel_that_refuses_is_not_asked_again() {
        let mut bench = Bench::new(&["hog", "gone"]);
        let now = Instant::now();
        let look = seen(&bench, node(0), &[("gone", 600), ("hog", 500)]);
        let refused = |kind: io::ErrorKind| Err(DropError::Refused(kind.into()));
        let gone = order(&mut bench, &look, now).unwrap();
        assert_eq!(gone.cgroup.as_str(), "/gone");
        fs::remove_dir_all(bench.root().join("gone")).unwrap();
        take(&mut bench, &look, gone, refused(io::ErrorKind::NotFound), now);
        let hog = order(&mut bench, &look, now).unwrap();
        take(&mut bench, &look, hog, refused(io::ErrorKind::OutOfMemory), now);
        assert!(
            bench.reported().is_empty() && bench.guard().reclaim.refused.is_none(),
            "{}",
            bench.reported()
        );
        let hog = order(&mut bench, &look, now + PAUSE).unwrap();
        take(&mut bench, &look, hog, refused(io::ErrorKind::InvalidInput), now);
        assert!(
            bench.reported().contains("before Linux 6.13, that takes a host without swap."),
            "{}",
            bench.reported()
        );
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.turn(core, &look, now + LONGEST_PAUSE / 2);
        assert!(guard.reclaim.busy_for.is_none());
        guard.reclaim.turn(core, &look, now + LONGEST_PAUSE);
        assert!(guard.reclaim.busy_for.is_some(), "much later it is tried again");
    }

    #[test]
    fn a_look_that_knows_page_cache_has_some_dropped() {
        let mut bench = Bench::new(&["hog"]);
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
        let look = seen(&bench, node(0), &[("hog", 500)]);
        let (core, guard) = bench.core_and_guard();
        guard.reclaim.turn(core, &Headroom { is_cache_read: false, ..look.clone() }, now);
        assert!(guard.reclaim.worker.is_none());
        guard.reclaim.turn(core, &look, now);
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

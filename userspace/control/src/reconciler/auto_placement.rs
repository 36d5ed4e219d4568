//! Homes for workloads that asked for none (`home` in the configuration).
//!
//! Problem: a workload without a guarantee runs and allocates wherever the scheduler has put it. Where its threads
//! and its memory are on different nodes, it waits for memory more than it has to. But some workloads do use several
//! nodes, and then a home helps nobody: whether it helps is known only afterwards.
//!
//! Terms: a workload *has a home* while it is held to CPUs of one node. It is *on trial* until it is known whether that helps.
//! A *window* is the time between two looks at it.
//!
//! Algorithm: every window the thread `homes` reads what workloads have used. Who has enough memory, CPU time and
//! remote accesses, and no memory policy that names nodes (another thread reads that, for the next look), is given a
//! home, the one with the most remote accesses first: its CPUs are narrowed, and its pages moved, some at a time.
//! When they are there, a window is counted. If the share of remote accesses has fallen, it keeps the home; else it
//! is put back, its pages too, and left alone for a time that doubles. One that keeps its home is still watched: it
//! is put back when its share is as before, or it uses all CPUs of its home.
//!
//! Invariants: this thread reads no figures and waits for no page. Nobody with a guarantee is touched, nor what is above or
//! below one, nor one whose cpuset somebody else set. No workload is placed, or keeps its home, unless accesses were counted.

mod choose;
mod measure;
#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant, SystemTime},
};

use numaward_api::{EnforcementMode, EventKind};
use numaward_cgroup::CgroupPath;
use numaward_config::home::HomeMode;
use numaward_enforce::pages::{PageMove, PageOutcome, PagesMoved};
use numaward_guarantee::narrowing::{PlacementBackoff, PreferredNode};
use numaward_model::EventReport;
use numaward_topology::{Bytes, NodeId};
use strum::VariantArray as _;
use tokio_util::sync::CancellationToken;

use self::{
    choose::{Place, choose},
    measure::{Measured, has_fallen},
};
use crate::{
    auto_placement_worker::{self, AutoPlacementWorker, Job, JobOutcome, Reading, Sources, Survey},
    core::Core,
    metrics::homes::HomeRefusal,
    page_worker::{ByNode, MIN_MOVE_SIZE},
    policy_worker::PolicyReader,
};

/// Looking takes no more than this share of the time: one of so many parts.
const COST: u32 = 100;
/// For how long one order moves pages, at most: then it is looked whether anything else is due.
const ORDER: u64 = 5;
/// So many windows are waited for enough accesses.
const WINDOWS: u32 = 10;
/// Who uses so many percent of the CPUs of its home is put back.
const OUTGROWN: u64 = 95;
/// The time for which one is left alone doubles so often at most.
const DOUBLINGS: u32 = 6;

/// Gives homes.
#[derive(Debug)]
pub(super) struct AutoPlacement {
    worker: Option<AutoPlacementWorker>,
    /// Memory policies of those that would get a home.
    policies: PolicyReader,
    /// From which reading on each workload is counted, and for how many windows.
    watched: BTreeMap<CgroupPath, (Reading, u32)>,
    /// Those that have a home.
    at_home: BTreeMap<CgroupPath, AtHome>,
    /// Pages of those that were put back.
    back: VecDeque<(CgroupPath, PageMove)>,
    next_look: Option<Instant>,
    /// Whether nodes may have other CPUs by now.
    pub(super) is_outdated: bool,
    /// What was reported of those that have none.
    reported: BTreeSet<(CgroupPath, String)>,
    stop: CancellationToken,
}

/// How far a workload with a home is.
#[derive(Debug)]
struct AtHome {
    stage: Stage,
    /// What it used of the CPUs in the last window, in thousandths.
    cpu: u64,
    /// How many looks in turn saw nothing of it.
    unseen: u32,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// So much of its memory is still to be moved; not known after a start.
    Moving(Option<ByNode>),
    /// It is counted whether that helps.
    Trial,
    /// It helped.
    Kept(Instant),
}

impl AutoPlacement {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            worker: None,
            policies: PolicyReader::new("home_policies", stop.clone()),
            watched: BTreeMap::new(),
            at_home: BTreeMap::new(),
            back: VecDeque::new(),
            next_look: None,
            is_outdated: true,
            reported: BTreeSet::new(),
            stop,
        }
    }

    /// Takes back the homes that an earlier run gave, where none are to be given, or these are not.
    pub(super) fn adopt(core: &mut Core) {
        let (is_on, config) = (core.config.places_workloads(), &core.config.home);
        let ended = core.store.state.preferred_nodes().keys().filter(|path| !is_on || !config.admits(path));
        let ended: Vec<CgroupPath> = ended.cloned().collect();
        for path in ended {
            match core.narrow(&path, |narrowing| narrowing.home = None) {
                Ok(()) => report(core, &path, "ended", format!("{path} has no home any more.")),
                Err(error) => tracing::error!(cgroup = %path, %error, "its home cannot be taken back"),
            }
        }
    }

    pub(super) fn turn(&mut self, core: &mut Core, now: Instant) {
        if core.config.home.mode == HomeMode::Off || core.mode() == EnforcementMode::Off {
            return;
        }
        self.follow(core, now);
        self.policies.take();
        match self.worker.as_mut().and_then(AutoPlacementWorker::take) {
            Some(JobOutcome::Surveyed(look)) => {
                let pause = core.config.home.window.0.max(look.took * COST);
                self.looked(core, look, now);
                self.next_look = Some(now + pause);
            }
            Some(JobOutcome::Moved { cgroup, order, moved }) => self.moved(core, &cgroup, &order, &moved),
            None => {}
        }
        self.go_on(core, now);
    }

    /// Takes note of who has a home, and lets their CPUs follow what others have for themselves.
    fn follow(&mut self, core: &mut Core, now: Instant) {
        self.forget_ended(core);
        let homes = core.store.state.preferred_nodes();
        for (path, home) in homes {
            self.at_home.entry(path.clone()).or_insert_with(|| AtHome {
                stage: if home.is_kept { Stage::Kept(now) } else { Stage::Moving(None) },
                cpu: 0,
                unseen: 0,
            });
        }
        if !std::mem::take(&mut self.is_outdated) {
            return;
        }
        let homes: Vec<(CgroupPath, PreferredNode)> =
            homes.iter().map(|(path, home)| (path.clone(), home.clone())).collect();
        for (path, home) in homes {
            match core.cpus_at_home(&path, home.node) {
                Ok(cpus) if cpus.is_empty() => {
                    let why = format!("node {} has no CPU left for it", home.node);
                    self.put_back(core, &path, "no_cpus", &why);
                }
                Ok(cpus) if core.home_cpus(&path) != Some(&cpus) => {
                    if let Err(error) = core.assign_home(&path, home) {
                        tracing::warn!(cgroup = %path, %error, "its CPUs at home cannot follow");
                    }
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(cgroup = %path, error, "its home is not known"),
            }
        }
    }

    /// Gives the thread its next job.
    fn go_on(&mut self, core: &mut Core, now: Instant) {
        if self.worker.as_ref().is_some_and(AutoPlacementWorker::is_busy) {
            return;
        }
        let job = if self.next_look.is_none_or(|next| now >= next) {
            Job::Survey(core.policy.machine.nodes.keys().copied().collect())
        } else if let Some((path, order)) = self.next_order(core) {
            Job::Move(path, order)
        } else {
            return;
        };
        match self.worker(core) {
            Some(worker) => {
                worker.give(job);
            }
            None => self.next_look = Some(now + core.config.home.window.0),
        }
    }

    /// The thread, which is started when it is needed first.
    fn worker(&mut self, core: &Core) -> Option<&mut AutoPlacementWorker> {
        if self.worker.is_none() {
            let sources = Sources {
                host_root: core.config.host_root.clone(),
                hierarchy: core.hierarchy.clone(),
                accesses: core.ports.accesses.clone(),
                config: core.config.home.clone(),
            };
            match auto_placement_worker::start(sources, &core.ports.heartbeats, &self.stop) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => tracing::error!(%error, "nobody gets a home: no thread can be started"),
            }
        }
        self.worker.as_mut()
    }

    /// What to move next.
    fn next_order(&mut self, core: &Core) -> Option<(CgroupPath, PageMove)> {
        let (homes, rate) = (core.store.state.preferred_nodes(), core.config.home.rate.0);
        let most = Bytes(rate.0.saturating_mul(ORDER)).max(MIN_MOVE_SIZE);
        for (path, of) in &self.at_home {
            let (Stage::Moving(Some(left)), Some(home)) = (&of.stage, homes.get(path)) else { continue };
            if let Some((from, bytes)) = left.iter().max_by_key(|(_, bytes)| bytes.0) {
                let bytes = (*bytes).min(most);
                let order = page_move(core, path, (*from, home.node), bytes);
                return Some((path.clone(), order));
            }
        }
        let (path, order) = self.back.pop_front()?;
        let rest = Bytes(order.bytes.0.saturating_sub(most.0));
        if rest >= MIN_MOVE_SIZE {
            self.back.push_front((path.clone(), PageMove { bytes: rest, ..order.clone() }));
        }
        Some((path, PageMove { bytes: order.bytes.min(most), ..order }))
    }

    fn moved(&mut self, core: &mut Core, path: &CgroupPath, order: &PageMove, moved: &PagesMoved) {
        let done = moved.bytes(PageOutcome::Moved);
        core.metrics.home_moved(done);
        tracing::info!(
            cgroup = %path, from = %order.from, to = %order.to, moved = %done,
            obstacle = moved.obstacle().map(PageOutcome::as_str), "pages of a workload with a home"
        );
        let Some(of) = self.at_home.get_mut(path) else { return };
        let Stage::Moving(Some(left)) = &mut of.stage else { return };
        if done.0 > 0 {
            core.note_home(path, |home| {
                let sum = home.moved.entry(order.from).or_default();
                sum.0 = sum.0.saturating_add(done.0);
            });
        }
        let rest = left.remove(&order.from).map_or(0, |had| had.0.saturating_sub(done.0));
        // What did not move this time does not move the next.
        if rest >= MIN_MOVE_SIZE.0 && done.0 >= order.bytes.0 / 2 {
            left.insert(order.from, Bytes(rest));
        }
        self.begin_trial(path);
    }

    /// Begins to count, if all pages are where they can be.
    fn begin_trial(&mut self, path: &CgroupPath) {
        let Some(of) = self.at_home.get_mut(path) else { return };
        if matches!(&of.stage, Stage::Moving(Some(left)) if left.is_empty()) {
            of.stage = Stage::Trial;
            // What was counted while they moved says nothing.
            self.watched.remove(path);
        }
    }

    fn looked(&mut self, core: &mut Core, look: Survey, now: Instant) {
        let Survey { workloads, room, .. } = look;
        let there: BTreeSet<CgroupPath> = workloads.iter().map(|of| of.cgroup.clone()).collect();
        self.watched.retain(|path, _| there.contains(path));
        self.policies.known.retain(|path, _| there.contains(path));
        self.reported.retain(|(path, _)| there.contains(path));
        core.forget_gone();
        self.forget_ended(core);
        self.give_up_unseen(core, &there);
        let mut candidates = Vec::new();
        for reading in workloads {
            let path = reading.cgroup.clone();
            if let Some(AtHome { stage: Stage::Moving(left), .. }) = self.at_home.get_mut(&path) {
                if left.is_none() {
                    let home = core.store.state.preferred_nodes().get(&path).map(|home| home.node);
                    *left = Some(elsewhere(&reading.resident, home));
                    self.begin_trial(&path);
                }
                continue;
            }
            let Some(measured) = self.measure(reading) else { continue };
            if self.at_home.contains_key(&path) {
                self.judge(core, &path, &measured, now);
            } else if measured.is_enough() && is_candidate(core, &measured) {
                candidates.push((path, measured));
            }
        }
        self.place(core, candidates, &room);
        Self::count(core);
    }

    /// Puts back those on their way or on trial of which nothing can be read any more: their accesses are no longer counted.
    fn give_up_unseen(&mut self, core: &mut Core, there: &BTreeSet<CgroupPath>) {
        let mut unseen = Vec::new();
        for (path, of) in &mut self.at_home {
            of.unseen = if there.contains(path) { 0 } else { of.unseen + 1 };
            if of.unseen >= WINDOWS && !matches!(of.stage, Stage::Kept(_)) {
                unseen.push(path.clone());
            }
        }
        for path in unseen {
            self.put_back(core, &path, "not_measured", "its accesses are not counted any more");
        }
    }

    /// What was counted of a workload since it was watched. Until that is enough, it goes on being counted for some windows.
    fn measure(&mut self, reading: Reading) -> Option<Measured> {
        let path = reading.cgroup.clone();
        let Some((start, windows)) = self.watched.get_mut(&path) else {
            self.watched.insert(path, (reading, 0));
            return None;
        };
        let measured = Measured::between(start, &reading);
        *windows += 1;
        let is_over = measured.as_ref().is_none_or(|of| of.is_enough() || *windows >= WINDOWS);
        if is_over {
            self.watched.insert(path, (reading, 0));
        }
        measured.filter(|_| is_over)
    }

    /// Whether a workload keeps its home.
    fn judge(&mut self, core: &mut Core, path: &CgroupPath, of: &Measured, now: Instant) {
        let (Some(home), Some(known)) =
            (core.store.state.preferred_nodes().get(path).cloned(), self.at_home.get_mut(path))
        else {
            return;
        };
        known.cpu = of.cpu;
        let cpus = core.home_cpus(path).map_or(0, |cpus| cpus.len() as u64 * 1000);
        if of.cpu * 100 >= cpus * OUTGROWN {
            self.put_back(core, path, "outgrown", &format!("it uses all CPUs of node {}", home.node));
            return;
        }
        let has_gained = has_fallen(home.remote_before, of.remote, core.config.home.min_gain_percent);
        let shares = format!(
            "{} of its accesses were remote before, {} are now",
            percent(home.remote_before),
            percent(of.remote)
        );
        match known.stage {
            Stage::Moving(_) => {}
            _ if !of.is_enough() => {
                // One that is idle now, and gained before, keeps its home.
                if known.stage == Stage::Trial {
                    self.put_back(core, path, "not_measured", "too few of its accesses were counted");
                }
            }
            Stage::Trial if has_gained => {
                known.stage = Stage::Kept(now);
                core.store.state.left_alone.remove(path);
                core.note_home(path, |home| home.is_kept = true);
                core.metrics.home_outcome("kept");
                report(core, path, "kept", format!("{path} keeps its home on node {}: {shares}.", home.node));
            }
            Stage::Kept(since) if now.duration_since(since) < core.config.home.cool_down.0 || has_gained => {}
            Stage::Trial | Stage::Kept(_) => self.put_back(core, path, "no_gain", &shares),
        }
    }

    /// Takes a home back, and the pages that were moved for it; the workload is left alone for a while.
    fn put_back(&mut self, core: &mut Core, path: &CgroupPath, outcome: &'static str, why: &str) {
        let Some(home) = core.store.state.preferred_nodes().get(path).cloned() else { return };
        let id = core.store.state.applied.get(path).map(|record| record.id);
        if let Err(error) = core.narrow(path, |narrowing| narrowing.home = None) {
            tracing::error!(cgroup = %path, %error, "its home cannot be taken back: it is tried again");
            self.is_outdated = true;
            return;
        }
        self.at_home.remove(path);
        self.watched.remove(path);
        for (node, bytes) in &home.moved {
            self.back.push_back((path.clone(), page_move(core, path, (home.node, *node), *bytes)));
        }
        if let Some(id) = id {
            let before =
                core.store.state.left_alone.get(path).filter(|of| of.id == id).map_or(0, |of| of.times);
            let pause = core.config.home.back_off.0.as_secs() << before.min(DOUBLINGS);
            let left_alone = PlacementBackoff {
                id,
                times: before.saturating_add(1),
                until: seconds_now().saturating_add(pause),
            };
            core.leave_alone(path, left_alone);
        }
        core.metrics.home_outcome(outcome);
        report(
            core,
            path,
            outcome,
            format!("{path} was put back from its home on node {}: {why}.", home.node),
        );
    }

    /// Gives homes to those that can have one now.
    fn place(&mut self, core: &mut Core, mut candidates: Vec<(CgroupPath, Measured)>, room: &ByNode) {
        let mut places = self.places(core, room);
        let mut refused: BTreeMap<HomeRefusal, usize> = BTreeMap::new();
        candidates.sort_by_key(|(path, of)| {
            (Reverse(u128::from(of.accesses) * u128::from(of.remote)), path.clone())
        });
        for (path, of) in candidates {
            if core.is_near_guarantee(&path) {
                continue;
            }
            let on_trial = self.at_home.values().filter(|of| !matches!(of.stage, Stage::Kept(_))).count();
            if on_trial >= core.config.home.max_at_once as usize {
                break;
            }
            let found = if is_left_alone(core, &path) {
                Err((HomeRefusal::LeftAlone, String::new()))
            } else {
                self.place_one(core, &path, &of, &mut places)
            };
            if let Err((refusal, why)) = found {
                *refused.entry(refusal).or_default() += 1;
                if refusal != HomeRefusal::LeftAlone
                    && self.reported.insert((path.clone(), <&str>::from(refusal).to_owned()))
                {
                    report(core, &path, "refused", format!("{path} gets no home: {why}."));
                }
            }
        }
        for &refusal in HomeRefusal::VARIANTS {
            core.metrics.homes_refused(refusal, refused.get(&refusal).copied().unwrap_or(0));
        }
    }

    fn place_one(
        &mut self,
        core: &mut Core,
        path: &CgroupPath,
        of: &Measured,
        places: &mut [Place],
    ) -> Result<(), (HomeRefusal, String)> {
        let off = core.store.state.narrowing(path).off;
        let open: Vec<Place> = places.iter().filter(|place| !off.contains(place.node)).copied().collect();
        let (node, bytes) = choose(of, &open).map_err(|refusal| {
            let why = match refusal {
                HomeRefusal::Memory => format!("no node has room for the rest of its {}", of.total()),
                _ => format!("it uses {} CPUs, and no node has so many left", thousandths(of.cpu)),
            };
            (refusal, why)
        })?;
        let cpus = core.cpus_at_home(path, node).map_err(|why| (HomeRefusal::Cpuset, why))?;
        if (cpus.len() as u64 * 1000) < of.cpu {
            return Err((HomeRefusal::Cpus, format!("it may use only CPUs {cpus} of node {node}")));
        }
        if let Some(place) = places.iter_mut().find(|place| place.node == node) {
            place.take(of.cpu, bytes);
        }
        let what = format!(
            "{} of its accesses are remote, and {bytes} of its {} are on other nodes",
            percent(of.remote),
            of.total()
        );
        if !core.config.places_workloads() {
            if self.reported.insert((path.clone(), format!("would {node}"))) {
                report(core, path, "would", format!("{path} would get a home on node {node}: {what}."));
            }
            return Ok(());
        }
        let Ok(Some(id)) = core.hierarchy.id_of(path) else { return Ok(()) };
        let Some(finding) = self.policies.result_for(core, path, id) else { return Ok(()) };
        if let Err(why) = finding.policies {
            // For the next look.
            self.policies.read(core, path, id);
            return Err((HomeRefusal::MemoryPolicy, why));
        }
        core.assign_home(path, PreferredNode::new(node, of.remote))
            .map_err(|error| (HomeRefusal::Write, error.to_string()))?;
        let stage = Stage::Moving(Some(elsewhere(&of.resident, Some(node))));
        self.at_home.insert(path.clone(), AtHome { stage, cpu: of.cpu, unseen: 0 });
        self.begin_trial(path);
        core.metrics.home_outcome("placed");
        report(core, path, "placed", format!("{path} gets a home on node {node}, CPUs {cpus}: {what}."));
        Ok(())
    }

    /// The nodes that may be homes, and what they have left.
    fn places(&self, core: &Core, room: &ByNode) -> Vec<Place> {
        let headroom = core.ports.headroom.headroom();
        let nodes = core.policy.machine.nodes.iter().filter(|(_, node)| node.memory.0 > 0);
        nodes
            .map(|(&node, _)| {
                // Of what is promised and not used yet, nothing is taken.
                let beyond =
                    headroom.node(node).map(|of| of.headroom_bytes().saturating_sub_unsigned(of.margin.0));
                let beyond = beyond.map_or(u64::MAX, |bytes| bytes.max(0).cast_unsigned());
                let room = Bytes(room.get(&node).copied().unwrap_or_default().0.min(beyond));
                let cpus = core.shared_cpus_of(node).len() as u64 * 1000;
                let mut place = Place { node, cpus, used: 0, room };
                for (path, of) in &self.at_home {
                    if core.store.state.preferred_nodes().get(path).is_some_and(|home| home.node == node) {
                        let coming = match &of.stage {
                            Stage::Moving(Some(left)) => {
                                left.values().fold(0, |sum, of| of.0.saturating_add(sum))
                            }
                            _ => 0,
                        };
                        place.take(of.cpu, Bytes(coming));
                    }
                }
                place
            })
            .collect()
    }

    /// Forgets workloads whose homes have ended: their cgroup is gone, say.
    fn forget_ended(&mut self, core: &Core) {
        let homes = core.store.state.preferred_nodes();
        for (path, _) in self.at_home.extract_if(.., |path, _| !homes.contains_key(path)) {
            self.watched.remove(&path);
        }
    }

    /// How many have a home on each node.
    fn count(core: &Core) {
        for node in core.policy.machine.nodes.keys() {
            let homes = core.store.state.preferred_nodes().values().filter(|home| home.node == *node).count();
            core.metrics.homes(*node, homes);
        }
    }
}

/// Memory on other nodes than the home, as far as it is worth moving.
fn elsewhere(resident: &ByNode, home: Option<NodeId>) -> ByNode {
    let others = resident.iter().filter(|(node, bytes)| Some(**node) != home && **bytes >= MIN_MOVE_SIZE);
    others.map(|(node, bytes)| (*node, *bytes)).collect()
}

fn page_move(core: &Core, path: &CgroupPath, (from, to): (NodeId, NodeId), bytes: Bytes) -> PageMove {
    let dirs = vec![core.hierarchy.dir(path)];
    PageMove { dirs, from, to, bytes, rate: core.config.home.rate.0, heeds_policy: true }
}

/// Whether a workload is large and busy enough, and far enough from its memory.
fn is_candidate(core: &Core, of: &Measured) -> bool {
    let config = &core.config.home;
    of.total() >= config.min_memory.0
        && of.cpu >= u64::from(config.min_cpu_percent) * 10
        && of.remote >= config.min_remote_percent * 10
}

fn is_left_alone(core: &Core, path: &CgroupPath) -> bool {
    core.store.state.left_alone.get(path).is_some_and(|of| of.until > seconds_now())
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).as_ref().map_or(0, Duration::as_secs)
}

fn percent(permille: u32) -> String {
    format!("{} %", permille / 10)
}

fn thousandths(of: u64) -> String {
    format!("{}.{}", of / 1000, of % 1000 / 100)
}

fn report(core: &Core, cgroup: &CgroupPath, step: &str, message: String) {
    core.report(Some(cgroup), EventReport::new(EventKind::Home, message).detail("step", step));
}

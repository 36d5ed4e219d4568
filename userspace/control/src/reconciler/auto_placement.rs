//! Automatic placement: gives preferred nodes to workloads without a guarantee (`home` in the configuration).
//!
//! # Problem
//! A workload without a guarantee runs and allocates memory wherever the scheduler has put it. If its threads and its memory
//! are on different nodes, each access is slow. Other workloads really need several nodes and do not gain from a preferred
//! node; only a measurement afterwards shows which kind a workload is.
//!
//! # Terms
//! - *preferred node*: the workload is confined to the CPUs of this node.
//! - *trial*: the time in which the placement is measured and may be reverted.
//! - *survey*: one reading of the counters of all workloads. A *window* is the time between two surveys.
//!
//! # Algorithm
//! 1. In every window the thread `homes` surveys the workloads. Candidates have enough memory, CPU time and remote accesses. The
//!    candidate with the most remote accesses is placed first.
//! 2. A workload with a memory policy that names nodes is not placed. Another thread reads the policies, for the next survey.
//! 3. Placing confines the CPUs of the workload to the node and moves its pages there in small orders.
//! 4. After the pages have moved, one window is measured. If the share of remote accesses has fallen, the workload keeps its
//!    preferred node. Otherwise CPUs and pages are restored, and the workload is not placed again for a time that doubles.
//! 5. A workload with a kept preferred node is still measured. The placement ends if the share of remote accesses rises again,
//!    or if the workload uses all CPUs of the node.
//!
//! # Invariants
//! - The reconciler's thread reads no counters and waits for no page.
//! - Workloads with a guarantee, their ancestors and descendants, and cgroups whose cpuset another program set are not changed.
//! - A workload is placed, or keeps its preferred node, only on the basis of counted accesses.

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
    choose::{CandidateNode, choose},
    measure::{WindowUsage, has_fallen},
};
use super::{Controller, ControllerEvent};
use crate::{
    auto_placement_worker::{self, AutoPlacementWorker, Job, JobOutcome, Reading, Sources, Survey},
    core::{Core, narrowing, preferred_node},
    metrics::auto_placement::PlacementRefusal,
    page_worker::{ByNode, MIN_MOVE_SIZE},
    policy_worker::PolicyReader,
};

/// The pause between two surveys is at least the duration of a survey times this factor.
const SURVEY_PAUSE_FACTOR: u32 = 100;
/// Seconds for which one order may move pages at the configured rate.
const MAX_ORDER_SECONDS: u64 = 5;
/// Maximum number of windows to wait for enough accesses.
const MAX_WINDOWS: u32 = 10;
/// CPU use of a workload, in percent of the CPUs of its preferred node, from which on the placement ends.
const OUTGROWN_PERCENT: u64 = 95;
/// Maximum number of times that the back-off doubles.
const MAX_BACKOFF_DOUBLINGS: u32 = 6;

/// Controller that gives preferred nodes to workloads without a guarantee.
#[derive(Debug)]
pub(super) struct AutoPlacement {
    worker: Option<AutoPlacementWorker>,
    /// Memory policies of the candidates.
    policies: PolicyReader,
    /// First reading of the current measurement of each workload, and the number of windows since then.
    watched: BTreeMap<CgroupPath, (Reading, u32)>,
    /// The workloads with a preferred node.
    placed: BTreeMap<CgroupPath, PlacedWorkload>,
    /// Page moves that revert ended placements.
    page_restores: VecDeque<(CgroupPath, PageMove)>,
    next_survey: Option<Instant>,
    /// True if the CPUs of the nodes may have changed.
    pub(super) is_outdated: bool,
    /// Refused and simulated placements that were reported already.
    reported: BTreeSet<(CgroupPath, String)>,
    stop: CancellationToken,
}

/// State of a workload with a preferred node.
#[derive(Debug)]
struct PlacedWorkload {
    stage: PlacementStage,
    /// CPU use in the last window, in thousandths of one CPU.
    cpu: u64,
    /// Number of successive surveys without this workload.
    unseen: u32,
}

#[derive(Debug, PartialEq, Eq)]
enum PlacementStage {
    /// Memory that has to be moved, by node; `None` after a restart, until the next survey.
    Moving(Option<ByNode>),
    /// The pages have moved, and the accesses are being counted.
    Trial,
    /// The placement has reduced remote accesses. The time is the end of the trial, or the restart.
    Kept(Instant),
}

impl AutoPlacement {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            worker: None,
            policies: PolicyReader::new("home_policies", stop.clone()),
            watched: BTreeMap::new(),
            placed: BTreeMap::new(),
            page_restores: VecDeque::new(),
            next_survey: None,
            is_outdated: true,
            reported: BTreeSet::new(),
            stop,
        }
    }

    /// Ends the placements of the previous run that the configuration no longer allows.
    pub(super) fn adopt(core: &mut Core) {
        let (is_on, config) = (core.config.places_workloads(), &core.config.home);
        let ended = core.store.state.preferred_nodes().keys().filter(|path| !is_on || !config.admits(path));
        let ended: Vec<CgroupPath> = ended.cloned().collect();
        for path in ended {
            narrowing::widen(core, &path, |narrowing| narrowing.home = None);
            report(core, &path, "ended", format!("{path} no longer has a preferred node."));
        }
    }

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        if core.config.home.mode == HomeMode::Off || core.mode() == EnforcementMode::Off {
            return;
        }
        self.follow(core, now);
        self.policies.take();
        match self.worker.as_mut().and_then(AutoPlacementWorker::take) {
            Some(JobOutcome::Surveyed(survey)) => {
                let pause = core.config.home.window.0.max(survey.took * SURVEY_PAUSE_FACTOR);
                self.evaluate(core, survey, now);
                self.next_survey = Some(now + pause);
            }
            Some(JobOutcome::Moved { cgroup, order, moved }) => {
                self.record_move(core, &cgroup, &order, &moved);
            }
            None => {}
        }
        self.start_next_job(core, now);
    }

    /// Updates the list of placed workloads, and their CPUs after changes of the shared pool.
    fn follow(&mut self, core: &mut Core, now: Instant) {
        self.forget_ended(core);
        let homes = core.store.state.preferred_nodes();
        for (path, home) in homes {
            self.placed.entry(path.clone()).or_insert_with(|| PlacedWorkload {
                stage: if home.is_kept { PlacementStage::Kept(now) } else { PlacementStage::Moving(None) },
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
            match narrowing::cpus_on_preferred_node(core, &path, home.node) {
                Ok(cpus) if cpus.is_empty() => {
                    let why = format!("node {} has no CPU left for it", home.node);
                    self.end_placement(core, &path, "no_cpus", &why);
                }
                Ok(cpus) if narrowing::preferred_node_cpus(core, &path) != Some(&cpus) => {
                    if let Err(error) = preferred_node::assign(core, &path, home) {
                        tracing::warn!(cgroup = %path, %error, "cannot update the CPUs of the placed workload");
                    }
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(cgroup = %path, error, "cannot determine the CPUs of the placed workload");
                }
            }
        }
    }

    /// Gives the thread its next job, if one is due.
    fn start_next_job(&mut self, core: &mut Core, now: Instant) {
        if self.worker.as_ref().is_some_and(AutoPlacementWorker::is_busy) {
            return;
        }
        let job = if self.next_survey.is_none_or(|next| now >= next) {
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
            None => self.next_survey = Some(now + core.config.home.window.0),
        }
    }

    /// Returns the thread, and starts it before its first use.
    fn worker(&mut self, core: &Core) -> Option<&mut AutoPlacementWorker> {
        if self.worker.is_none() {
            let sources = Sources {
                host_root: core.config.host_root.clone(),
                hierarchy: core.hierarchy.clone(),
                host: core.ports.host.clone(),
                config: core.config.home.clone(),
            };
            match auto_placement_worker::start(sources, &core.ports.heartbeats, &self.stop) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => {
                    tracing::error!(%error, "no workload is placed automatically: cannot start the thread");
                }
            }
        }
        self.worker.as_mut()
    }

    /// Returns the next pages to move: first to preferred nodes, then back from them.
    fn next_order(&mut self, core: &Core) -> Option<(CgroupPath, PageMove)> {
        let (homes, rate) = (core.store.state.preferred_nodes(), core.config.home.rate.0);
        let most = Bytes(rate.0.saturating_mul(MAX_ORDER_SECONDS)).max(MIN_MOVE_SIZE);
        for (path, workload) in &self.placed {
            let (PlacementStage::Moving(Some(left)), Some(home)) = (&workload.stage, homes.get(path)) else {
                continue;
            };
            if let Some((from, bytes)) = left.iter().max_by_key(|(_, bytes)| bytes.0) {
                let bytes = (*bytes).min(most);
                let order = page_move(core, path, (*from, home.node), bytes);
                return Some((path.clone(), order));
            }
        }
        let (path, order) = self.page_restores.pop_front()?;
        let rest = Bytes(order.bytes.0.saturating_sub(most.0));
        if rest >= MIN_MOVE_SIZE {
            self.page_restores.push_front((path.clone(), PageMove { bytes: rest, ..order.clone() }));
        }
        Some((path, PageMove { bytes: order.bytes.min(most), ..order }))
    }

    fn record_move(&mut self, core: &mut Core, path: &CgroupPath, order: &PageMove, moved: &PagesMoved) {
        let done = moved.bytes(PageOutcome::Moved);
        core.metrics.placement_moved(done);
        tracing::info!(
            cgroup = %path, from = %order.from, to = %order.to, moved = %done,
            obstacle = moved.obstacle().map(PageOutcome::as_str), "moved pages of a workload with a preferred node"
        );
        let Some(workload) = self.placed.get_mut(path) else { return };
        let PlacementStage::Moving(Some(left)) = &mut workload.stage else { return };
        if done.0 > 0 {
            preferred_node::update(core, path, |home| {
                let sum = home.moved.entry(order.from).or_default();
                sum.0 = sum.0.saturating_add(done.0);
            });
        }
        let rest = left.remove(&order.from).map_or(0, |had| had.0.saturating_sub(done.0));
        // If less than half of the order moved, the rest is assumed to be unmovable.
        if rest >= MIN_MOVE_SIZE.0 && done.0 >= order.bytes.0 / 2 {
            left.insert(order.from, Bytes(rest));
        }
        self.begin_trial(path);
    }

    /// Begins the trial if no pages are left to move.
    fn begin_trial(&mut self, path: &CgroupPath) {
        let Some(workload) = self.placed.get_mut(path) else { return };
        if matches!(&workload.stage, PlacementStage::Moving(Some(left)) if left.is_empty()) {
            workload.stage = PlacementStage::Trial;
            // Accesses during the move do not count.
            self.watched.remove(path);
        }
    }

    fn evaluate(&mut self, core: &mut Core, survey: Survey, now: Instant) {
        let Survey { workloads, room, .. } = survey;
        let surveyed: BTreeSet<CgroupPath> = workloads.iter().map(|of| of.cgroup.clone()).collect();
        self.watched.retain(|path, _| surveyed.contains(path));
        self.policies.known.retain(|path, _| surveyed.contains(path));
        self.reported.retain(|(path, _)| surveyed.contains(path));
        narrowing::forget_gone(core);
        self.forget_ended(core);
        self.end_unseen(core, &surveyed);
        let mut candidates = Vec::new();
        for reading in workloads {
            let path = reading.cgroup.clone();
            if let Some(PlacedWorkload { stage: PlacementStage::Moving(left), .. }) =
                self.placed.get_mut(&path)
            {
                if left.is_none() {
                    let home = core.store.state.preferred_nodes().get(&path).map(|home| home.node);
                    *left = Some(memory_to_move(&reading.resident, home));
                    self.begin_trial(&path);
                }
                continue;
            }
            let Some(usage) = self.measure(reading) else { continue };
            if self.placed.contains_key(&path) {
                self.review_placement(core, &path, &usage, now);
            } else if usage.has_enough_accesses() && is_candidate(core, &usage) {
                candidates.push((path, usage));
            }
        }
        self.place(core, candidates, &room);
        Self::export_counts(core);
    }

    /// Ends placements that are not kept yet if the workload was missing in many surveys, because it can no longer be measured.
    fn end_unseen(&mut self, core: &mut Core, surveyed: &BTreeSet<CgroupPath>) {
        let mut unseen = Vec::new();
        for (path, workload) in &mut self.placed {
            workload.unseen = if surveyed.contains(path) { 0 } else { workload.unseen + 1 };
            if workload.unseen >= MAX_WINDOWS && !matches!(workload.stage, PlacementStage::Kept(_)) {
                unseen.push(path.clone());
            }
        }
        for path in unseen {
            self.end_placement(core, &path, "not_measured", "its accesses are no longer counted");
        }
    }

    /// Returns the usage of a workload since the start of its measurement, and starts the next measurement. Returns `None` while
    /// too few accesses are counted and fewer than [`MAX_WINDOWS`] windows have passed.
    fn measure(&mut self, reading: Reading) -> Option<WindowUsage> {
        let path = reading.cgroup.clone();
        let Some((start, windows)) = self.watched.get_mut(&path) else {
            self.watched.insert(path, (reading, 0));
            return None;
        };
        let usage = WindowUsage::from_readings(start, &reading);
        *windows += 1;
        let is_complete = usage.as_ref().is_none_or(|of| of.has_enough_accesses() || *windows >= MAX_WINDOWS);
        if is_complete {
            self.watched.insert(path, (reading, 0));
        }
        usage.filter(|_| is_complete)
    }

    /// Keeps or ends a placement after a measurement.
    fn review_placement(&mut self, core: &mut Core, path: &CgroupPath, usage: &WindowUsage, now: Instant) {
        let (Some(home), Some(workload)) =
            (core.store.state.preferred_nodes().get(path).cloned(), self.placed.get_mut(path))
        else {
            return;
        };
        workload.cpu = usage.cpu;
        let cpus = narrowing::preferred_node_cpus(core, path).map_or(0, |cpus| cpus.len() as u64 * 1000);
        if usage.cpu * 100 >= cpus * OUTGROWN_PERCENT {
            self.end_placement(core, path, "outgrown", &format!("it uses all CPUs of node {}", home.node));
            return;
        }
        let has_gained = has_fallen(home.remote_before, usage.remote, core.config.home.min_gain_percent);
        let shares = format!(
            "{} of {} were remote before, {} are now",
            format_permille(home.remote_before),
            usage.by.describe(),
            format_permille(usage.remote)
        );
        match workload.stage {
            PlacementStage::Moving(_) => {}
            _ if !usage.has_enough_accesses() => {
                // An idle workload keeps the preferred node if it has passed the trial before.
                if workload.stage == PlacementStage::Trial {
                    self.end_placement(core, path, "not_measured", "too few of its accesses were counted");
                }
            }
            PlacementStage::Trial if has_gained => {
                workload.stage = PlacementStage::Kept(now);
                core.store.state.left_alone.remove(path);
                preferred_node::update(core, path, |home| home.is_kept = true);
                core.metrics.placement_outcome("kept");
                report(core, path, "kept", format!("{path} keeps preferred node {}: {shares}.", home.node));
            }
            PlacementStage::Kept(since)
                if now.duration_since(since) < core.config.home.cool_down.0 || has_gained => {}
            PlacementStage::Trial | PlacementStage::Kept(_) => {
                self.end_placement(core, path, "no_gain", &shares);
            }
        }
    }

    /// Ends a placement: restores the CPUs, queues the return of the moved pages, and starts the back-off. If the CPUs cannot be
    /// restored, the placement stays and is tried again.
    fn end_placement(&mut self, core: &mut Core, path: &CgroupPath, outcome: &'static str, why: &str) {
        let Some(home) = core.store.state.preferred_nodes().get(path).cloned() else { return };
        let id = core.store.state.applied.get(path).map(|record| record.id);
        if let Err(error) = narrowing::narrow(core, path, |narrowing| narrowing.home = None) {
            tracing::error!(cgroup = %path, %error, "cannot end the automatic placement of the workload; trying again");
            self.is_outdated = true;
            return;
        }
        self.placed.remove(path);
        self.watched.remove(path);
        for (node, bytes) in &home.moved {
            self.page_restores.push_back((path.clone(), page_move(core, path, (home.node, *node), *bytes)));
        }
        if let Some(id) = id {
            let before =
                core.store.state.left_alone.get(path).filter(|of| of.id == id).map_or(0, |of| of.times);
            let pause = core.config.home.back_off.0.as_secs() << before.min(MAX_BACKOFF_DOUBLINGS);
            let left_alone = PlacementBackoff {
                id,
                times: before.saturating_add(1),
                until: seconds_now().saturating_add(pause),
            };
            preferred_node::exclude(core, path, left_alone);
        }
        core.metrics.placement_outcome(outcome);
        report(core, path, outcome, format!("{path} no longer has preferred node {}: {why}.", home.node));
    }

    /// Places candidates, those with the most remote accesses first.
    fn place(&mut self, core: &mut Core, mut candidates: Vec<(CgroupPath, WindowUsage)>, room: &ByNode) {
        let mut nodes = self.candidate_nodes(core, room);
        let mut refused: BTreeMap<PlacementRefusal, usize> = BTreeMap::new();
        candidates.sort_by_key(|(path, of)| {
            (Reverse(u128::from(of.accesses) * u128::from(of.remote)), path.clone())
        });
        for (path, usage) in candidates {
            if preferred_node::is_near_guarantee(core, &path) {
                continue;
            }
            let on_trial = self
                .placed
                .values()
                .filter(|workload| !matches!(workload.stage, PlacementStage::Kept(_)))
                .count();
            if on_trial >= core.config.home.max_at_once as usize {
                break;
            }
            let result = if is_in_backoff(core, &path) {
                Err((PlacementRefusal::BackOff, String::new()))
            } else {
                self.place_workload(core, &path, &usage, &mut nodes)
            };
            if let Err((refusal, why)) = result {
                *refused.entry(refusal).or_default() += 1;
                if refusal != PlacementRefusal::BackOff
                    && self.reported.insert((path.clone(), <&str>::from(refusal).to_owned()))
                {
                    report(core, &path, "refused", format!("{path} gets no preferred node: {why}."));
                }
            }
        }
        for &refusal in PlacementRefusal::VARIANTS {
            core.metrics.refused_placements(refusal, refused.get(&refusal).copied().unwrap_or(0));
        }
    }

    fn place_workload(
        &mut self,
        core: &mut Core,
        path: &CgroupPath,
        usage: &WindowUsage,
        nodes: &mut [CandidateNode],
    ) -> Result<(), (PlacementRefusal, String)> {
        let off = core.store.state.narrowing(path).off;
        let allowed: Vec<CandidateNode> = nodes.iter().filter(|of| !off.contains(of.node)).copied().collect();
        let (node, bytes) = choose(usage, &allowed).map_err(|refusal| {
            let why = match refusal {
                PlacementRefusal::Memory => format!("no node has room for the rest of its {}", usage.total()),
                _ => format!("it uses {} CPUs, and no node has so many left", format_cpus(usage.cpu)),
            };
            (refusal, why)
        })?;
        let cpus = narrowing::cpus_on_preferred_node(core, path, node)
            .map_err(|why| (PlacementRefusal::Cpuset, why))?;
        if (cpus.len() as u64 * 1000) < usage.cpu {
            return Err((PlacementRefusal::Cpus, format!("it may use only CPUs {cpus} of node {node}")));
        }
        if let Some(candidate) = nodes.iter_mut().find(|candidate| candidate.node == node) {
            candidate.charge(usage.cpu, bytes);
        }
        let reason = format!(
            "{} of {} are remote, and {bytes} of its {} are on other nodes",
            format_permille(usage.remote),
            usage.by.describe(),
            usage.total()
        );
        if !core.config.places_workloads() {
            if self.reported.insert((path.clone(), format!("would {node}"))) {
                report(core, path, "would", format!("{path} would get preferred node {node}: {reason}."));
            }
            return Ok(());
        }
        let Ok(Some(id)) = core.hierarchy.id_of(path) else { return Ok(()) };
        let Some(finding) = self.policies.result_for(core, path, id) else { return Ok(()) };
        if let Err(why) = finding.policies {
            // The policies may have changed by the next survey.
            self.policies.read(core, path, id);
            return Err((PlacementRefusal::MemoryPolicy, why));
        }
        preferred_node::assign(core, path, PreferredNode::new(node, usage.remote))
            .map_err(|error| (PlacementRefusal::Write, error.to_string()))?;
        let stage = PlacementStage::Moving(Some(memory_to_move(&usage.resident, Some(node))));
        self.placed.insert(path.clone(), PlacedWorkload { stage, cpu: usage.cpu, unseen: 0 });
        self.begin_trial(path);
        core.metrics.placement_outcome("placed");
        report(core, path, "placed", format!("{path} gets preferred node {node}, CPUs {cpus}: {reason}."));
        Ok(())
    }

    /// Returns the nodes with memory, and their free capacity.
    fn candidate_nodes(&self, core: &Core, room: &ByNode) -> Vec<CandidateNode> {
        let headroom = core.ports.host.headroom();
        let nodes = core.policy.machine.nodes.iter().filter(|(_, node)| node.memory.0 > 0);
        nodes
            .map(|(&node, _)| {
                // Memory that is guaranteed but not used yet is not available.
                let beyond =
                    headroom.node(node).map(|of| of.headroom_bytes().saturating_sub_unsigned(of.margin.0));
                let beyond = beyond.map_or(u64::MAX, |bytes| bytes.max(0).cast_unsigned());
                let room = Bytes(room.get(&node).copied().unwrap_or_default().0.min(beyond));
                let cpus = core.shared_cpus_of(node).len() as u64 * 1000;
                let mut candidate = CandidateNode { node, cpus, used: 0, room };
                for (path, workload) in &self.placed {
                    if core.store.state.preferred_nodes().get(path).is_some_and(|home| home.node == node) {
                        let arriving = match &workload.stage {
                            PlacementStage::Moving(Some(left)) => {
                                left.values().fold(0, |sum, of| of.0.saturating_add(sum))
                            }
                            _ => 0,
                        };
                        candidate.charge(workload.cpu, Bytes(arriving));
                    }
                }
                candidate
            })
            .collect()
    }

    /// Forgets workloads that no longer have a preferred node, for example because their cgroup was removed.
    fn forget_ended(&mut self, core: &Core) {
        let homes = core.store.state.preferred_nodes();
        for (path, _) in self.placed.extract_if(.., |path, _| !homes.contains_key(path)) {
            self.watched.remove(&path);
        }
    }

    /// Exports the number of placed workloads of each node.
    fn export_counts(core: &Core) {
        for node in core.policy.machine.nodes.keys() {
            let homes = core.store.state.preferred_nodes().values().filter(|home| home.node == *node).count();
            core.metrics.placed_workloads(*node, homes);
        }
    }
}

impl Controller for AutoPlacement {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.tick(core, now),
            ControllerEvent::MachineChanged(_) | ControllerEvent::StateChanged => self.is_outdated = true,
            _ => {}
        }
    }
}

/// Returns the memory on other nodes than the preferred one, without amounts below [`MIN_MOVE_SIZE`].
fn memory_to_move(resident: &ByNode, home: Option<NodeId>) -> ByNode {
    let others = resident.iter().filter(|(node, bytes)| Some(**node) != home && **bytes >= MIN_MOVE_SIZE);
    others.map(|(node, bytes)| (*node, *bytes)).collect()
}

fn page_move(core: &Core, path: &CgroupPath, (from, to): (NodeId, NodeId), bytes: Bytes) -> PageMove {
    let dirs = vec![core.hierarchy.dir(path)];
    PageMove { dirs, from, to, bytes, rate: core.config.home.rate.0, heeds_policy: true }
}

/// Returns true if a workload has the configured minimum of memory, CPU use and remote accesses.
fn is_candidate(core: &Core, usage: &WindowUsage) -> bool {
    let config = &core.config.home;
    usage.total() >= config.min_memory.0
        && usage.cpu >= u64::from(config.min_cpu_percent) * 10
        && usage.remote >= config.min_remote_percent * 10
}

fn is_in_backoff(core: &Core, path: &CgroupPath) -> bool {
    core.store.state.left_alone.get(path).is_some_and(|of| of.until > seconds_now())
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).as_ref().map_or(0, Duration::as_secs)
}

fn format_permille(permille: u32) -> String {
    format!("{} %", permille / 10)
}

fn format_cpus(millicpus: u64) -> String {
    format!("{}.{}", millicpus / 1000, millicpus % 1000 / 100)
}

fn report(core: &Core, cgroup: &CgroupPath, step: &str, message: String) {
    core.report(Some(cgroup), EventReport::new(EventKind::Home, message).detail("step", step));
}

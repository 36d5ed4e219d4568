//! Weights of nodes for the memory policy weighted-interleave: `enforcement.interleaveWeights`.
//!
//! # Algorithm
//! Every few seconds, while weights are configured or have to be restored, the files are read, and those with other
//! values are written, see [`numaward_enforce::weights`].
//!
//! # Invariants
//! - The original value is stored before a file is written.
//! - A value that another program has written since is kept.
//! - A failed write is reported once, and retried every five minutes and when the nodes with weights change. Restores
//!   are retried at each check.
//! - While the wanted weights cannot be determined, the present ones stay.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_config::interleave_weights::WeightSource;
use numaward_enforce::{
    records::revert,
    weights::{NodeWeights, WeightError, WeightPlan, WeightRecords, WeightWrite, Weights, plan},
};
use numaward_guarantee::{error::AdmissionError, weights::interleave_weights};
use numaward_model::EventReport;
use numaward_topology::NodeId;

use crate::core::Core;

/// Interval for reading the weights.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Delay before a failed write is retried.
const RETRY_INTERVAL: Duration = Duration::from_mins(5);

/// Controller of the nodes' weights.
#[derive(Debug)]
pub(super) struct InterleaveWeights {
    weights: Weights,
    last_check: Option<Instant>,
    /// Nodes that had weights at the last check.
    nodes: BTreeSet<NodeId>,
    failed: BTreeMap<NodeId, FailedWrite>,
    /// Problems as reported last.
    problems: BTreeSet<String>,
    /// Weights in the metrics.
    exported: NodeWeights,
}

/// A failed write.
#[derive(Debug)]
struct FailedWrite {
    weight: u8,
    reason: String,
    at: Instant,
}

/// Result of one round of writes.
#[derive(Debug, Default)]
struct WriteOutcome {
    is_set: bool,
    restored: NodeWeights,
    is_auto: bool,
    is_refused: bool,
    failed: BTreeMap<NodeId, (u8, String)>,
    /// Problems of this round.
    problems: Vec<String>,
}

impl InterleaveWeights {
    pub(super) fn new(root: &Path) -> Self {
        Self {
            weights: Weights::new(root),
            last_check: None,
            nodes: BTreeSet::new(),
            failed: BTreeMap::new(),
            problems: BTreeSet::new(),
            exported: NodeWeights::new(),
        }
    }

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        let is_idle = core.config.enforcement.set_weights().is_none() && core.store.state.weights.is_empty();
        let is_due = self.last_check.is_none_or(|last_check| now.duration_since(last_check) >= POLL_INTERVAL);
        if is_idle || !is_due {
            return;
        }
        self.last_check = Some(now);
        if let Err(error) = self.reconcile(core, now) {
            tracing::error!(%error, "the weights of nodes are not changed: their originals cannot be stored");
        }
    }

    fn reconcile(&mut self, core: &mut Core, now: Instant) -> Result<(), AdmissionError> {
        let before = core.store.state.weights.clone();
        let configured = core.config.enforcement.set_weights();
        let source = configured.map(|of| of.source).unwrap_or_default();
        let known = configured.map(|of| interleave_weights(of, &self.weights));
        let is_known = !matches!(known, Some(Err(_)));
        let (wanted, problems) = match known {
            None => (None, Vec::new()),
            Some(Ok((wanted, problems))) => (Some(wanted), problems),
            Some(Err(problem)) => (Some(before.written()), vec![problem]),
        };
        let mut outcome = WriteOutcome { problems, ..WriteOutcome::default() };
        let wanted_nodes: BTreeSet<NodeId> = wanted.iter().flatten().map(|(node, _)| *node).collect();
        let concerned: BTreeSet<NodeId> = wanted_nodes.iter().chain(before.nodes.keys()).copied().collect();
        let seen = self.weights.read_weights(concerned.iter().copied());
        let unreadable = seen.unreadable.iter();
        let unreadable = unreadable.filter(|(node, _)| concerned.contains(node) || before.auto.is_some());
        outcome.problems.extend(unreadable.map(|(_, reason)| reason.clone()));
        let nodes: BTreeSet<NodeId> = seen.weights.keys().chain(seen.unreadable.keys()).copied().collect();
        let missing = wanted_nodes.difference(&nodes).filter(|_| is_known);
        outcome.problems.extend(missing.map(|node| format!("there is no /{}", Weights::file(*node))));
        self.failed.retain(|_, failed| now.duration_since(failed.at) < RETRY_INTERVAL && nodes == self.nodes);
        self.nodes = nodes;
        let WeightPlan { mut writes, mut held, foreign } = plan(&seen, wanted.as_ref(), &before);
        writes.retain(|write| {
            let WeightWrite::Weight { node, weight, is_back: false } = write else { return true };
            let failed = self.failed.get(node).filter(|failed| failed.weight == *weight);
            if let Some(FailedWrite { reason, .. }) = failed {
                outcome.problems.push(reason.clone());
                revert(&mut held.nodes, &before.nodes, node);
            }
            failed.is_none()
        });
        forget_if_none(&mut held, &before);
        core.save_part(|state| &mut state.weights, held.clone())?;
        for write in writes {
            self.write(write, &before, &mut held, &mut outcome);
        }
        for (node, (weight, reason)) in std::mem::take(&mut outcome.failed) {
            self.failed.insert(node, FailedWrite { weight, reason, at: now });
        }
        forget_if_none(&mut held, &before);
        let held_now = held.current(&seen);
        core.metrics.interleave_weights(&held_now, &self.exported);
        self.exported.clone_from(&held_now);
        core.save_part(|state| &mut state.weights, held)?;
        if !foreign.is_empty() {
            let message = format!(
                "Another program set weights for weighted-interleave, and they are kept: {}.",
                join_weights(&foreign)
            );
            report(core, Severity::Warning, message, &foreign);
        }
        if outcome.is_set {
            report(core, Severity::Info, describe_new(&held_now, &seen.weights, source), &held_now);
        }
        if let Some(message) = describe_restored(&outcome) {
            report(core, Severity::Info, message, &outcome.restored);
        }
        let problems: BTreeSet<String> = outcome.problems.iter().cloned().collect();
        if !problems.is_empty() && problems != self.problems {
            let problems = outcome.problems.join("; ");
            let message = format!("Weights for weighted-interleave are not as configured: {problems}.");
            report(core, Severity::Warning, message, &NodeWeights::new());
        }
        self.problems = problems;
        Ok(())
    }

    fn write(
        &self,
        write: WeightWrite,
        before: &WeightRecords,
        held: &mut WeightRecords,
        outcome: &mut WriteOutcome,
    ) {
        // The kernel can choose the weights again only after all of them were restored.
        if write == WeightWrite::Auto && outcome.is_refused {
            return;
        }
        let result = self.weights.write(write);
        held.record_result(write, &result, before);
        outcome.record(write, result);
    }
}

impl WriteOutcome {
    fn record(&mut self, write: WeightWrite, result: Result<(), WeightError>) {
        match (result, write) {
            (Ok(()), WeightWrite::Weight { node, weight, is_back: true }) => {
                self.restored.insert(node, weight);
            }
            (Ok(()), WeightWrite::Weight { .. }) => self.is_set = true,
            (Ok(()), WeightWrite::Auto) => self.is_auto = true,
            // The kernel had no information for choosing weights before either.
            (Err(WeightError::NoChoice), _) => {}
            (Err(error), write) => {
                let reason = error.to_string();
                self.problems.push(reason.clone());
                self.is_refused = true;
                if let WeightWrite::Weight { node, weight, is_back: false } = write {
                    self.failed.insert(node, (weight, reason));
                }
            }
        }
    }
}

fn report(core: &Core, severity: Severity, message: String, weights: &NodeWeights) {
    let mut report = EventReport::new(EventKind::InterleaveWeights, message).severity(severity);
    for (node, weight) in weights {
        report = report.detail(&format!("node{node}"), weight);
    }
    core.report(None, report);
}

/// Without written weights, the kernel's choice is still active.
fn forget_if_none(held: &mut WeightRecords, before: &WeightRecords) {
    if held.nodes.is_empty() && before.is_empty() {
        held.auto = None;
    }
}

/// Joins the parts as a list in a sentence.
fn join_parts(parts: &[String]) -> String {
    match parts {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => parts.concat(),
    }
}

fn join_weights(weights: &NodeWeights) -> String {
    let parts: Vec<String> =
        weights.iter().map(|(node, weight)| format!("{weight} on node {node}")).collect();
    join_parts(&parts)
}

fn describe_new(now: &NodeWeights, were: &NodeWeights, source: WeightSource) -> String {
    let (weights, they) =
        if now.len() == 1 { ("weight for weighted-interleave is", "it was") } else { WEIGHTS_ARE };
    let source = if source == WeightSource::Bandwidth { "by bandwidth" } else { "as configured" };
    let were: Vec<String> = now.keys().filter_map(|node| were.get(node)).map(ToString::to_string).collect();
    format!("The {weights} {}, {source}; {they} {}.", join_weights(now), join_parts(&were))
}

const WEIGHTS_ARE: (&str, &str) = ("weights for weighted-interleave are", "they were");

fn describe_restored(outcome: &WriteOutcome) -> Option<String> {
    let auto = if outcome.is_auto { ", and the kernel chooses all weights by itself again" } else { "" };
    if outcome.restored.is_empty() {
        let message = "The kernel chooses all weights for weighted-interleave by itself again.";
        return outcome.is_auto.then(|| message.to_owned());
    }
    let weights =
        if outcome.restored.len() == 1 { "weight for weighted-interleave is" } else { WEIGHTS_ARE.0 };
    Some(format!("The {weights} restored: {}{auto}.", join_weights(&outcome.restored)))
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use numaward_api as api;
    use numaward_config::Config;
    use numaward_guarantee::reconciler::ReconcilerHandle;

    use super::*;
    use crate::{
        reconciler::{ReconcilerLoop, tests::reconciler_loop},
        restore::is_all_restored,
        testing::{self as fixture, TestHost},
    };

    const WEIGHTS: &str = "sys/kernel/mm/mempolicy/weighted_interleave";
    const NODES: &str = "sys/devices/system/node";

    /// Host with weights of two nodes, 0 and 2.
    struct WeightsBench {
        dir: tempfile::TempDir,
        host: Arc<TestHost>,
        config: Config,
    }

    impl WeightsBench {
        fn new(weights: &str) -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
            fixture::cgroup(&dir.path().join("cgroup"), &host.machine.lock().unwrap());
            let config = Config {
                state_directory: dir.path().join("state"),
                host_root: dir.path().to_owned(),
                ..Config::default()
            };
            let mut bench = Self { dir, host, config };
            bench.configure(weights);
            bench.write(&format!("{NODES}/has_memory"), "0,2");
            for node in [0, 2] {
                bench.set(node, 1);
            }
            bench
        }

        fn configure(&mut self, weights: &str) {
            self.config.enforcement.interleave_weights = serde_json::from_str(weights).unwrap();
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn set(&self, node: u32, weight: u8) {
            self.write(&format!("{WEIGHTS}/node{node}"), &weight.to_string());
        }

        fn bandwidth(&self, node: u32, bandwidth: u64) {
            for what in ["read", "write"] {
                let file = format!("{NODES}/node{node}/access0/initiators/{what}_bandwidth");
                self.write(&file, &bandwidth.to_string());
            }
        }

        fn start(&self) -> ReconcilerLoop {
            reconciler_loop(&self.config, &self.dir.path().join("cgroup"), &self.host)
        }

        fn line(&self, file: &str) -> String {
            fixture::line(&self.dir.path().join(WEIGHTS).join(file))
        }

        fn now(&self) -> [String; 2] {
            ["node0", "node2"].map(|file| self.line(file))
        }

        fn happened(&self) -> Vec<String> {
            let happened = std::mem::take(&mut *self.host.happened.lock().unwrap());
            let of = happened.into_iter().filter(|(_, report)| report.kind == EventKind::InterleaveWeights);
            of.map(|(_, report)| report.message).collect()
        }
    }

    /// Runs the next periodic check.
    fn check_again(reconciler: &mut ReconcilerLoop) {
        let ReconcilerLoop { controllers, core, .. } = reconciler;
        let weights = &mut controllers.host.weights;
        let later = weights.last_check.map_or_else(Instant::now, |last_check| last_check + POLL_INTERVAL);
        weights.tick(core, later);
    }

    const GIVEN: &str = r#"{"source": "given", "weights": {"0": 3, "2": 2}}"#;
    const BANDWIDTH: &str = r#"{"source": "bandwidth"}"#;

    #[test]
    fn restores_weights_after_crash() {
        let mut bench = WeightsBench::new(BANDWIDTH);
        bench.bandwidth(0, 100_000);
        bench.bandwidth(2, 30_000);
        let mut reconciler = bench.start();
        assert_eq!(bench.now(), ["25", "7"]);
        let set = "The weights for weighted-interleave are 25 on node 0 and 7 on node 2, by bandwidth; they were 1 and 1.";
        assert_eq!(bench.happened(), [set]);
        check_again(&mut reconciler);
        assert!(bench.happened().is_empty(), "reported once");
        drop(reconciler);
        bench.configure(GIVEN);
        drop(bench.start());
        let set = "The weights for weighted-interleave are 3 on node 0 and 2 on node 2, as configured; they were 25 and 7.";
        assert_eq!((bench.now(), bench.happened()), (["3", "2"].map(str::to_owned), vec![set.to_owned()]));
        // A dry run restores the weights.
        bench.config.enforcement.mode = api::EnforcementMode::DryRun;
        let reconciler = bench.start();
        assert!(reconciler.core.store.state.weights.is_empty());
        let back = "The weights for weighted-interleave are restored: 1 on node 0 and 1 on node 2.";
        assert_eq!((bench.now(), bench.happened()), (["1", "1"].map(str::to_owned), vec![back.to_owned()]));
    }

    #[test]
    fn crash_before_write_is_recovered() {
        let mut bench = WeightsBench::new(GIVEN);
        let mut reconciler = bench.start();
        let stored = serde_json::json!({"nodes": {
            "0": {"found": 1, "written": 3, "before": 1},
            "2": {"found": 1, "written": 2, "before": 1},
        }});
        let stored: WeightRecords = serde_json::from_value(stored).unwrap();
        reconciler.core.save_part(|state| &mut state.weights, stored.clone()).unwrap();
        drop(reconciler);
        // The daemon died between the two writes.
        bench.set(2, 1);
        let mut reconciler = bench.start();
        assert_eq!(bench.now(), ["3", "2"]);
        reconciler.core.save_part(|state| &mut state.weights, stored).unwrap();
        drop(reconciler);
        bench.set(0, 1);
        bench.configure("{}");
        assert!(bench.start().core.store.state.weights.is_empty());
        assert_eq!(bench.now(), ["1", "1"]);
    }

    #[test]
    fn failed_restore_is_pending() {
        let mut bench = WeightsBench::new(GIVEN);
        drop(bench.start());
        bench.config.enforcement.mode = api::EnforcementMode::Off;
        let client = |reconciler: &ReconcilerLoop| {
            ReconcilerHandle::new(std::sync::mpsc::channel().0, reconciler.status())
        };
        let file = bench.dir.path().join(WEIGHTS).join("node2");
        let refused = fixture::refuse(&file);
        let mut reconciler = bench.start();
        assert_eq!(bench.now(), ["1", "2"]);
        assert!(!is_all_restored(&client(&reconciler)));
        check_again(&mut reconciler);
        reconciler.run_maintenance();
        assert!(!is_all_restored(&client(&reconciler)), "the file cannot be written yet");
        drop(refused);
        fs::remove_file(&file).unwrap();
        bench.set(2, 2);
        check_again(&mut reconciler);
        reconciler.run_maintenance();
        assert!(is_all_restored(&client(&reconciler)));
        assert_eq!(bench.now(), ["1", "1"]);
        drop(reconciler);

        // A missing node is no pending restore.
        bench.config.enforcement.mode = api::EnforcementMode::On;
        drop(bench.start());
        fs::remove_file(&file).unwrap();
        bench.config.enforcement.mode = api::EnforcementMode::Off;
        let reconciler = bench.start();
        assert!(is_all_restored(&client(&reconciler)) && !reconciler.core.store.state.weights.is_empty());
        drop(reconciler);
        // While enforcement is on, nothing is pending.
        bench.config.enforcement.mode = api::EnforcementMode::On;
        bench.set(2, 2);
        assert!(is_all_restored(&client(&bench.start())));
    }

    #[test]
    fn foreign_weight_is_kept() {
        let mut bench = WeightsBench::new(GIVEN);
        let mut reconciler = bench.start();
        bench.happened();
        bench.set(2, 9);
        check_again(&mut reconciler);
        let foreign = "Another program set weights for weighted-interleave, and they are kept: 9 on node 2.";
        assert_eq!(bench.happened(), [foreign]);
        check_again(&mut reconciler);
        drop(reconciler);
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        assert!(bench.happened().is_empty(), "not reported again after a restart");
        drop(reconciler);
        bench.configure("{}");
        let reconciler = bench.start();
        assert_eq!((bench.now(), bench.happened().len()), (["1", "9"].map(str::to_owned), 1));
        assert!(reconciler.core.store.state.weights.is_empty());
    }

    #[test]
    fn problem_is_reported_once() {
        let mut bench = WeightsBench::new(BANDWIDTH);
        bench.bandwidth(0, 100_000);
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        let problem = "Weights for weighted-interleave are not as configured: the firmware reports no bandwidth for the \
            memory of node 2.";
        assert_eq!(bench.happened(), [problem]);
        assert_eq!(bench.now(), ["1", "1"]);
        drop(reconciler);
        bench.configure(r#"{"source": "given", "weights": {"0": 3, "1": 2}}"#);
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        let happened = bench.happened();
        assert_eq!(happened.len(), 2, "{happened:?}");
        assert_eq!(
            happened[0],
            "The weight for weighted-interleave is 3 on node 0, as configured; it was 1."
        );
        let problem = "there is no node 1 with memory here; nodes with memory are 0,2.";
        assert!(happened[1].ends_with(problem), "{happened:?}");
        drop(reconciler);
        // The kernel does not support weights.
        fs::remove_dir_all(bench.dir.path().join(WEIGHTS)).unwrap();
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        let happened = bench.happened();
        assert!(happened.len() == 1 && happened[0].contains("Linux 6.9"), "{happened:?}");
        assert!(
            reconciler.core.store.state.weights.nodes.keys().eq([&NodeId(0)]),
            "the record stays for the return of the node"
        );
    }

    #[test]
    fn failed_write_is_retried() {
        let bench = WeightsBench::new(GIVEN);
        bench.write(&format!("{WEIGHTS}/auto"), "true");
        let files = ["node0", "node2"].map(|file| bench.dir.path().join(WEIGHTS).join(file));
        let sealed = files.each_ref().map(|file| fixture::refuse(file));
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        let happened = bench.happened();
        assert!(happened.len() == 1 && happened[0].contains("node0 cannot be written: "), "{happened:?}");
        assert!(reconciler.core.store.state.weights.is_empty());
        drop(sealed);
        // The file can be written now, but the retry is not due.
        for (node, file) in [0, 2].into_iter().zip(&files) {
            fs::remove_file(file).unwrap();
            bench.set(node, 1);
        }
        check_again(&mut reconciler);
        assert_eq!((bench.now(), bench.happened().len()), (["1", "1"].map(str::to_owned), 0));
        let ReconcilerLoop { controllers, core, .. } = &mut reconciler;
        let later = controllers.host.weights.last_check.unwrap() + RETRY_INTERVAL;
        controllers.host.weights.tick(core, later);
        assert_eq!((bench.now(), bench.happened().len()), (["3", "2"].map(str::to_owned), 1));
    }

    #[test]
    fn new_node_retries_failed_write() {
        let bench = WeightsBench::new(GIVEN);
        let file = bench.dir.path().join(WEIGHTS).join("node0");
        let sealed = fixture::refuse(&file);
        let mut reconciler = bench.start();
        assert_eq!(bench.happened().len(), 2);
        drop(sealed);
        fs::remove_file(&file).unwrap();
        bench.set(0, 1);
        check_again(&mut reconciler);
        assert_eq!(bench.now(), ["1", "2"]);
        bench.set(5, 1);
        check_again(&mut reconciler);
        assert_eq!(bench.now(), ["3", "2"]);
    }

    #[test]
    fn unknown_bandwidth_keeps_weights() {
        let mut bench = WeightsBench::new(BANDWIDTH);
        bench.bandwidth(0, 100_000);
        bench.bandwidth(2, 30_000);
        let mut reconciler = bench.start();
        bench.set(2, 9);
        check_again(&mut reconciler);
        assert_eq!(bench.happened().len(), 2);
        // A node without bandwidth in the firmware is added.
        bench.write(&format!("{NODES}/has_memory"), "0,2-3");
        bench.set(3, 1);
        check_again(&mut reconciler);
        let problem = "Weights for weighted-interleave are not as configured: the firmware reports no bandwidth for the \
            memory of node 3.";
        assert_eq!(
            (bench.now(), bench.happened()),
            (["25", "9"].map(str::to_owned), vec![problem.to_owned()])
        );
        fs::remove_file(bench.dir.path().join(NODES).join("has_memory")).unwrap();
        check_again(&mut reconciler);
        let happened = bench.happened();
        assert!(happened.len() == 1 && happened[0].contains("has_memory cannot be read"), "{happened:?}");
        // The record of the other program's value was kept.
        bench.write(&format!("{NODES}/has_memory"), "0,2");
        check_again(&mut reconciler);
        assert_eq!((bench.now(), bench.happened().len()), (["25", "9"].map(str::to_owned), 0));
        bench.configure("{}");
        drop(reconciler);
        drop(bench.start());
        assert_eq!(bench.now(), ["1", "9"]);
    }

    #[test]
    fn missing_choice_is_no_problem() {
        let (mut outcome, path) = (WriteOutcome::default(), Path::new(WEIGHTS));
        outcome.record(WeightWrite::Auto, Err(WeightError::NoChoice));
        assert!(outcome.problems.is_empty() && describe_restored(&outcome).is_none());
        let source = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        outcome.record(WeightWrite::Auto, Err(WeightError::Refused { path: path.to_owned(), source }));
        assert_eq!(outcome.problems.len(), 1);
    }

    #[test]
    fn refused_auto_is_pending() {
        let mut bench = WeightsBench::new(GIVEN);
        bench.write(&format!("{WEIGHTS}/auto"), "true");
        drop(bench.start());
        bench.write(&format!("{WEIGHTS}/auto"), "false");
        bench.configure("{}");
        bench.happened();
        let auto = bench.dir.path().join(WEIGHTS).join("auto");
        let sealed = fixture::refuse(&auto);
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        let happened = bench.happened();
        assert!(happened.len() == 2 && happened[1].contains("auto cannot be written: "), "{happened:?}");
        let held = &reconciler.core.store.state.weights;
        assert!(held.nodes.is_empty() && held.auto.is_some());
        drop(sealed);
        fs::remove_file(&auto).unwrap();
        bench.write(&format!("{WEIGHTS}/auto"), "false");
        check_again(&mut reconciler);
        let again = "The kernel chooses all weights for weighted-interleave by itself again.";
        assert_eq!((bench.line("auto"), bench.happened()), ("true".to_owned(), vec![again.to_owned()]));
        assert!(reconciler.core.store.state.weights.is_empty());
    }

    #[test]
    fn reports_only_weights_read() {
        let mut bench = WeightsBench::new(GIVEN);
        drop(bench.start());
        bench.happened();
        bench.write(&format!("{WEIGHTS}/node2"), "?");
        bench.configure(r#"{"source": "given", "weights": {"0": 4, "2": 2}}"#);
        drop(bench.start());
        let set = "The weight for weighted-interleave is 4 on node 0, as configured; it was 3.";
        assert_eq!(bench.happened()[0], set);
    }

    #[test]
    fn restores_automatic_weights() {
        let mut bench = WeightsBench::new(GIVEN);
        bench.write(&format!("{WEIGHTS}/auto"), "true");
        drop(bench.start());
        // The kernel turns `auto` off when a weight is written.
        bench.write(&format!("{WEIGHTS}/auto"), "false");
        drop(bench.start());
        bench.happened();
        bench.configure("{}");
        drop(bench.start());
        assert_eq!((bench.now(), bench.line("auto")), (["1", "1"].map(str::to_owned), "true".to_owned()));
        assert!(bench.happened()[0].ends_with(", and the kernel chooses all weights by itself again."));
    }

    #[test]
    fn is_inactive_by_default() {
        let bench = WeightsBench::new("{}");
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        assert_eq!(reconciler.controllers.host.weights.last_check, None);
        assert!(bench.happened().is_empty());
        let ledger = bench.dir.path().join("state/ledger.json");
        assert!(!ledger.exists() || !fs::read_to_string(ledger).unwrap().contains("weights"));
    }
}

//! Tests of the reconciler's loop, and of its traces: each admission and repair is a tree of spans.

mod batch;
mod clients;
mod conditions;
mod interleaving;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use numaward_guarantee::error::AdmissionError;
use numaward_model::{SPAN_TARGET, port::ObservedHost as _};
use tracing::{
    Subscriber,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
};

use super::*;
use crate::{
    core::release,
    testing::{self as fixture, TestHost},
};

/// A recorded span.
#[derive(Clone, Debug, Default)]
struct SpanRecord {
    /// The names from the root on: `a>b` is the span b inside of a.
    path: String,
    /// Number of the tree to which it belongs.
    tree: usize,
    fields: BTreeMap<String, String>,
}

impl Visit for SpanRecord {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields.insert(field.name().to_owned(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

/// Layer that records all spans.
#[derive(Clone, Default)]
struct SpanRecorder(Arc<Mutex<RecordedSpans>>);

#[derive(Default)]
struct RecordedSpans {
    /// The spans that have not ended, by id. The ids of ended spans are used again.
    open: BTreeMap<u64, SpanRecord>,
    ended: Vec<SpanRecord>,
    trees: usize,
}

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for SpanRecorder {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        let names: Vec<&str> = span.scope().from_root().map(|span| span.name()).collect();
        let mut spans = self.0.lock().unwrap();
        let tree = match span.parent() {
            Some(parent) => spans.open[&parent.id().into_u64()].tree,
            None => spans.trees,
        };
        spans.trees = spans.trees.max(tree + 1);
        let mut record = SpanRecord { path: names.join(">"), tree, fields: BTreeMap::new() };
        attributes.record(&mut record);
        spans.open.insert(id.into_u64(), record);
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, _: Context<'_, S>) {
        values.record(self.0.lock().unwrap().open.get_mut(&id.into_u64()).unwrap());
    }

    fn on_close(&self, id: span::Id, _: Context<'_, S>) {
        let mut spans = self.0.lock().unwrap();
        let record = spans.open.remove(&id.into_u64()).unwrap();
        spans.ended.push(record);
    }
}

fn request(name: &str, cpus: u32) -> Request {
    let request = Request::new(&api::AllocationRequest {
        cpus: Some(api::Cpus::whole(cpus)),
        ..api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{name}")), "256Mi")
    });
    request.unwrap()
}

/// Returns a reconciler without its thread.
pub(super) fn reconciler_loop(config: &Config, root: &Path, host: &Arc<TestHost>) -> ReconcilerLoop {
    let enforcer = fixture::enforcer(config, root, &host.machine(), None);
    let core = Core::open(
        config,
        Hierarchy::at(root),
        enforcer,
        Ports::new(host.clone()),
        ControlMetrics::default(),
    );
    let mut reconciler = ReconcilerLoop::new(core.unwrap(), None, CancellationToken::new());
    reconciler.adopt();
    reconciler
}

/// A reconciler that the test steps, and a client.
struct SteppedReconciler {
    reconciler: ReconcilerLoop,
    client: ReconcilerHandle,
    /// The channel of the client.
    commands: mpsc::Sender<Message>,
    root: PathBuf,
    dir: tempfile::TempDir,
}

impl SteppedReconciler {
    fn new(cgroups: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (root, host) = (dir.path().join("cgroup"), Arc::new(TestHost::small()));
        for cgroup in [""].iter().chain(cgroups) {
            fixture::cgroup(&root.join(cgroup), &host.machine());
        }
        let config = Config { state_directory: dir.path().join("state"), ..Config::default() };
        let mut reconciler = reconciler_loop(&config, &root, &host);
        let (commands, queue) = mpsc::channel();
        reconciler.core.execution.inbox = Some(Inbox::new(queue));
        let client = ReconcilerHandle::new(commands.clone(), reconciler.status());
        Self { reconciler, client, commands, root, dir }
    }
}

/// Admits one request, refuses one, repairs a drift, and releases the guarantee.
fn admit_repair_and_release(dir: &Path) {
    let (root, host) = (dir.join("cgroup"), Arc::new(TestHost::small()));
    for cgroup in ["", "a", "b"] {
        fixture::cgroup(&root.join(cgroup), &host.machine());
    }
    let config = Config { state_directory: dir.join("state"), ..Config::default() };
    let mut reconciler = reconciler_loop(&config, &root, &host);
    assert!(matches!(reconciler.admit(&request("a", 3), false), Ok(AdmissionOutcome::Admitted(_))));
    assert!(matches!(reconciler.admit(&request("b", 8), false), Err(AdmissionError::Rejected(..))));
    fs::write(root.join("a/memory.min"), "0\n").unwrap();
    reconciler.dispatch(&ControllerEvent::MachineChanged(Instant::now()));
    assert_eq!(fixture::line(&root.join("a/memory.min")), (256_u64 << 20).to_string());
    release::release(&mut reconciler.core, "a").unwrap();
}

#[test]
fn admission_and_repair_are_span_trees() {
    let (dir, recorder) = (tempfile::tempdir().unwrap(), SpanRecorder::default());
    let layer = recorder.clone().with_filter(Targets::new().with_target(SPAN_TARGET, tracing::Level::INFO));
    // With a single subscriber, `tracing` would use the one of the first thread that reaches a span, which may belong to another
    // test.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
        admit_repair_and_release(dir.path());
    });
    let all = recorder.0.lock().unwrap().ended.clone();
    let tree = |tree: usize| -> Vec<SpanRecord> {
        all.iter().filter(|record| record.tree == tree).cloned().collect()
    };
    let paths = |spans: &[SpanRecord]| {
        let mut paths: Vec<String> = spans.iter().map(|record| record.path.clone()).collect();
        paths.sort();
        paths
    };
    let of = |workload: &str| {
        let is_it = |record: &&SpanRecord| {
            record.path == "admit"
                && record.fields.get("numaward.workload").is_some_and(|name| name == workload)
        };
        tree(all.iter().find(is_it).unwrap().tree)
    };
    let admitted = paths(&of("a"));
    for path in [
        "admit",
        "admit>decide",
        "admit>decide>allocate",
        "admit>decide>hints",
        "admit>decide>merge",
        "admit>knobs",
        "admit>ledger",
    ] {
        assert!(admitted.iter().any(|other| other == path), "{path}: {admitted:?}");
    }
    let refused = of("b");
    assert_eq!(paths(&refused), ["admit", "admit>decide", "admit>decide>hints", "admit>decide>merge"]);
    let decide = refused.iter().find(|record| record.path.ends_with("decide")).unwrap();
    assert_eq!(decide.fields["numaward.outcome"], "rejected");
    let repair = all.iter().filter(|record| record.path == "reconcile").map(|root| paths(&tree(root.tree)));
    assert!(repair.into_iter().any(|paths| paths == ["reconcile", "reconcile>knobs"]), "{:?}", paths(&all));
    let released = paths(&tree(all.iter().find(|record| record.path == "release").unwrap().tree));
    assert!(released.contains(&"release>knobs".to_owned()), "{released:?}");
}

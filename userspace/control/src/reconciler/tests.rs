//! What traces show of the reconciler: each admission and repair is a tree of spans.

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
use numaward_model::{SPAN_TARGET, port::MachineSource as _};
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
use crate::testing::{self as fixture, Host};

/// A span: its path from the root (`a>b`: b is part of a), which tree it is of, and its fields.
#[derive(Clone, Debug, Default)]
struct Seen {
    path: String,
    tree: usize,
    fields: BTreeMap<String, String>,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields.insert(field.name().to_owned(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

/// Keeps all spans.
#[derive(Clone, Default)]
struct Keep(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    /// Those that go on. Ids are given again when a span has ended.
    open: BTreeMap<u64, Seen>,
    ended: Vec<Seen>,
    trees: usize,
}

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for Keep {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        let names: Vec<&str> = span.scope().from_root().map(|span| span.name()).collect();
        let mut kept = self.0.lock().unwrap();
        let tree = match span.parent() {
            Some(parent) => kept.open[&parent.id().into_u64()].tree,
            None => kept.trees,
        };
        kept.trees = kept.trees.max(tree + 1);
        let mut seen = Seen { path: names.join(">"), tree, fields: BTreeMap::new() };
        attributes.record(&mut seen);
        kept.open.insert(id.into_u64(), seen);
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, _: Context<'_, S>) {
        values.record(self.0.lock().unwrap().open.get_mut(&id.into_u64()).unwrap());
    }

    fn on_close(&self, id: span::Id, _: Context<'_, S>) {
        let mut kept = self.0.lock().unwrap();
        let seen = kept.open.remove(&id.into_u64()).unwrap();
        kept.ended.push(seen);
    }
}

fn request(name: &str, cpus: u32) -> Request {
    let request = Request::new(&api::AllocationRequest {
        cpus: Some(api::Cpus::whole(cpus)),
        ..api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{name}")), "256Mi")
    });
    request.unwrap()
}

/// Without its thread.
pub(super) fn reconciler_loop(config: &Config, root: &Path, host: &Arc<Host>) -> ReconcilerLoop {
    let enforcer = fixture::enforcer(root, &host.machine(), None);
    let core =
        Core::open(config, Hierarchy::at(root), enforcer, Ports::from_part(host), ControlMetrics::default());
    let mut reconciler = ReconcilerLoop::new(core.unwrap(), None, CancellationToken::new());
    reconciler.adopt();
    reconciler
}

/// A reconciler that is stepped, and a client that asks it.
struct Served {
    held: ReconcilerLoop,
    client: ReconcilerHandle,
    /// What the client sends.
    commands: mpsc::Sender<Message>,
    root: PathBuf,
    dir: tempfile::TempDir,
}

impl Served {
    fn new(cgroups: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (root, host) = (dir.path().join("cgroup"), Arc::new(Host::small()));
        for cgroup in [""].iter().chain(cgroups) {
            fixture::cgroup(&root.join(cgroup), &host.machine());
        }
        let config = Config { state_directory: dir.path().join("state"), ..Config::default() };
        let mut held = reconciler_loop(&config, &root, &host);
        let (commands, queue) = mpsc::channel();
        held.core.execution.inbox = Some(Inbox::new(queue));
        let client = ReconcilerHandle::new(commands.clone(), held.shown());
        Self { held, client, commands, root, dir }
    }
}

/// One allocation that is given, one that is refused, a knob that drifts, a release.
fn work(dir: &Path) {
    let (root, host) = (dir.join("cgroup"), Arc::new(Host::small()));
    for cgroup in ["", "a", "b"] {
        fixture::cgroup(&root.join(cgroup), &host.machine());
    }
    let config = Config { state_directory: dir.join("state"), ..Config::default() };
    let mut reconciler = reconciler_loop(&config, &root, &host);
    assert!(matches!(reconciler.admit(&request("a", 3), false), Ok(Answer::Admitted(_))));
    assert!(matches!(reconciler.admit(&request("b", 8), false), Err(AdmissionError::Rejected(..))));
    fs::write(root.join("a/memory.min"), "0\n").unwrap();
    reconciler.dispatch(&Event::MachineChanged(Instant::now()));
    assert_eq!(fixture::line(&root.join("a/memory.min")), (256_u64 << 20).to_string());
    reconciler.core.release("a").unwrap();
}

#[test]
fn each_admission_and_repair_is_a_tree() {
    let (dir, keep) = (tempfile::tempdir().unwrap(), Keep::default());
    let layer = keep.clone().with_filter(Targets::new().with_target(SPAN_TARGET, tracing::Level::INFO));
    // With only one subscriber, `tracing` asks the thread that comes upon a span first, which may be another test's.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || work(dir.path()));
    let all = keep.0.lock().unwrap().ended.clone();
    let tree = |tree: usize| -> Vec<Seen> { all.iter().filter(|seen| seen.tree == tree).cloned().collect() };
    let paths = |spans: &[Seen]| {
        let mut paths: Vec<String> = spans.iter().map(|seen| seen.path.clone()).collect();
        paths.sort();
        paths
    };
    let of = |workload: &str| {
        let is_it = |seen: &&Seen| {
            seen.path == "admit" && seen.fields.get("numaward.workload").is_some_and(|name| name == workload)
        };
        tree(all.iter().find(is_it).unwrap().tree)
    };
    let given = paths(&of("a"));
    for path in [
        "admit",
        "admit>decide",
        "admit>decide>allocate",
        "admit>decide>hints",
        "admit>decide>merge",
        "admit>knobs",
        "admit>ledger",
    ] {
        assert!(given.iter().any(|other| other == path), "{path}: {given:?}");
    }
    let refused = of("b");
    assert_eq!(paths(&refused), ["admit", "admit>decide", "admit>decide>hints", "admit>decide>merge"]);
    let decide = refused.iter().find(|seen| seen.path.ends_with("decide")).unwrap();
    assert_eq!(decide.fields["numaward.outcome"], "rejected");
    let repair = all.iter().filter(|seen| seen.path == "reconcile").map(|root| paths(&tree(root.tree)));
    assert!(repair.into_iter().any(|paths| paths == ["reconcile", "reconcile>knobs"]), "{:?}", paths(&all));
    let released = paths(&tree(all.iter().find(|seen| seen.path == "release").unwrap().tree));
    assert!(released.contains(&"release>knobs".to_owned()), "{released:?}");
}

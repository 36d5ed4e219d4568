//! What traces show of the keeper, as a receiver gets them.

use std::{collections::BTreeMap, fs};

use opentelemetry_proto::tonic::{collector::trace::v1::ExportTraceServiceRequest, trace::v1::Span};
use prost::Message as _;

use super::*;
use crate::{
    fixture::{self, Host},
    metrics::Metrics,
    otlp::{
        self,
        tests::{Fixed, config, texts, with_traces},
    },
    post::tests::{Posted, Receiver},
};

fn spans(posted: &[Posted]) -> Vec<Span> {
    let mut spans = Vec::new();
    for (_, _, body) in posted.iter().filter(|(path, _, _)| path == "/v1/traces") {
        for resource in ExportTraceServiceRequest::decode(body.clone()).unwrap().resource_spans {
            assert_eq!(texts(&resource.resource.unwrap().attributes)["service.name"], "numaward");
            spans.extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }
    spans
}

/// `a>b`: b is part of a.
fn paths(spans: &[Span]) -> Vec<String> {
    let mut paths: Vec<_> = spans
        .iter()
        .map(|span| {
            let (mut path, mut parent) = (span.name.clone(), &span.parent_span_id);
            while let Some(above) = spans.iter().find(|above| &above.span_id == parent) {
                assert_eq!(above.trace_id, span.trace_id);
                assert!(above.start_time_unix_nano <= span.start_time_unix_nano);
                assert!(above.end_time_unix_nano >= span.end_time_unix_nano);
                (path, parent) = (format!("{}>{path}", above.name), &above.parent_span_id);
            }
            path
        })
        .collect();
    paths.sort();
    paths
}

fn request(name: &str, cpus: u32) -> Request {
    let request = Request::new(&api::AllocationRequest {
        name: name.to_owned(),
        target: api::Target::Cgroup(format!("/{name}")),
        cpus,
        memory: "256Mi".to_owned(),
        memory_limit: None,
        hugepages: BTreeMap::new(),
        policy: None,
        partition: None,
    });
    request.unwrap()
}

/// One allocation that is given, one that is refused, a knob that drifts, a release.
fn work(dir: &std::path::Path) {
    let (root, host) = (dir.join("cgroup"), Arc::new(Host::small()));
    for cgroup in ["", "a", "b"] {
        fixture::cgroup(&root.join(cgroup), &host.machine());
    }
    let config = Config { state_directory: dir.join("state"), ..Config::default() };
    let (hierarchy, enforcer) = (Hierarchy::at(&root), fixture::enforcer(&root, &host.machine()));
    let mut owner =
        Owner::open(&config, hierarchy, enforcer, host, Figures::default(), None, Arc::default()).unwrap();
    owner.adopt();
    assert!(matches!(owner.admit(&request("a", 3), false), Ok(Answer::Admitted(_))));
    assert!(matches!(owner.admit(&request("b", 8), false), Err(Refused::Rejected(..))));
    fs::write(root.join("a/memory.min"), "0\n").unwrap();
    owner.patrol_all(Instant::now());
    assert_eq!(fixture::line(&root.join("a/memory.min")), (256_u64 << 20).to_string());
    owner.release("a").unwrap();
}

#[tokio::test]
async fn each_admission_and_repair_is_a_tree() {
    let receiver = Receiver::start([]).await;
    let config = config(&receiver.url);
    let traces = spans::Traces::new(&config.otlp);
    let (dir, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    with_traces(&traces, || work(dir.path()));
    let (metrics, figures) = (Arc::new(Metrics::new(Arc::new(Fixed(0)))), traces.figures());
    otlp::start(&config, "host", &metrics, traces, &figures, &stop).unwrap();
    let has_release = |posted: &[Posted]| spans(posted).iter().any(|span| span.name == "release");
    let all = spans(&receiver.until(has_release).await);
    stop.cancel();
    let attribute = |span: &Span, name: &str| texts(&span.attributes).get(name).cloned();
    let tree = |root: &Span| -> Vec<Span> {
        all.iter().filter(|span| span.trace_id == root.trace_id).cloned().collect()
    };
    let of = |workload: &str| {
        let is_it = |span: &&Span| {
            span.name == "admit" && attribute(span, "numaward.workload").as_deref() == Some(workload)
        };
        tree(all.iter().find(is_it).unwrap())
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
    let decide = refused.iter().find(|span| span.name == "decide").unwrap();
    assert_eq!(attribute(decide, "numaward.outcome").as_deref(), Some("rejected"));
    let repair = all.iter().filter(|span| span.name == "reconcile").map(|root| paths(&tree(root)));
    assert!(repair.into_iter().any(|paths| paths == ["reconcile", "reconcile>knobs"]), "{:?}", paths(&all));
    let released = paths(&tree(all.iter().find(|span| span.name == "release").unwrap()));
    assert!(released.contains(&"release>knobs".to_owned()), "{released:?}");
}

//! Resources that other programs use are not guaranteed.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api as api;
use numaward_config::{Config, policy::StrategyKind};
use numaward_engine::{HostConditions, policy::TopologyManagerPolicy};
use numaward_guarantee::{
    command::AdmissionOutcome,
    error::{AdmissionError, describe_rejection},
    request::Request,
};
use numaward_model::headroom::Headroom;
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId, ZoneKind};

use super::reconciler_loop;
use crate::{
    core::release,
    reconciler::ReconcilerLoop,
    testing::{self as fixture, TestHost},
};

const SIZE: HugepageSize = HugepageSize(Bytes::mib(2));

/// A host with the cgroups `/a` and `/b`, and 1 GiB of huge pages on each of two nodes.
struct ConditionsBench {
    dir: tempfile::TempDir,
    host: Arc<TestHost>,
    reconciler: ReconcilerLoop,
}

impl ConditionsBench {
    fn new(strategy: StrategyKind) -> Self {
        Self::with(Config { strategy, ..Config::default() })
    }

    fn with(config: Config) -> Self {
        let builder = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
        let host = Arc::new(TestHost::new(builder.hugepages(SIZE, 512).build().unwrap()));
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cgroup");
        for cgroup in ["", "a", "b"] {
            fixture::cgroup(&root.join(cgroup), &host.machine.lock().unwrap());
            fs::write(root.join(cgroup).join("hugetlb.2MB.max"), "max\n").unwrap();
        }
        let state_directory = dir.path().join("state");
        let mut config = Config { state_directory, ..config };
        config.enforcement.home_dwell_time = numaward_config::Interval(Duration::ZERO);
        let reconciler = reconciler_loop(&config, &root, &host);
        Self { dir, host, reconciler }
    }

    /// Sets the use of other programs on each node, in MiB.
    fn set_foreign_use(&mut self, kind: ZoneKind, [a, b]: [u64; 2]) {
        let nodes = [(NodeId(0), Bytes::mib(a)), (NodeId(1), Bytes::mib(b))];
        let conditions =
            HostConditions { withheld: [(kind, nodes.into())].into(), ..HostConditions::default() };
        *self.host.headroom.lock().unwrap() =
            Arc::new(Headroom { conditions: conditions.into(), ..Headroom::default() });
        self.reconciler.run_maintenance();
        self.reconciler.process_effects();
    }

    fn admit(&mut self, name: &str, [memory, huge]: [u64; 2]) -> Result<AdmissionOutcome, AdmissionError> {
        let huge = (huge > 0).then(|| (SIZE.0.to_string(), format!("{huge}Mi")));
        let request = Request::new(&api::AllocationRequest {
            name: name.to_owned(),
            target: api::Target::Cgroup(format!("/{name}")),
            cpus: Some(api::Cpus::whole(1)),
            memory: Some(format!("{memory}Mi")),
            memory_limit: None,
            hugepages: huge.into_iter().collect(),
            policy: Some(TopologyManagerPolicy::SingleNumaNode),
            partition: None,
            placement: api::Placement::default(),
        });
        self.reconciler.admit(&request.unwrap(), false)
    }

    fn published_foreign_use(&self) -> Vec<u64> {
        let view = self.reconciler.view.read().clone();
        let kinds = view.nodes.iter().flat_map(|node| node.memory.clone());
        kinds.filter(|of| of.kind == "hugepages-2Mi").map(|of| of.withheld_bytes >> 20).collect()
    }
}

#[test]
fn cpus_of_foreign_partitions_are_not_free() {
    let mut bench = ConditionsBench::new(StrategyKind::Native);
    fs::write(bench.dir.path().join("cgroup/cpuset.cpus.effective"), "0,4,6-7").unwrap();
    bench.reconciler.run_maintenance();
    bench.reconciler.process_effects();
    let free = |bench: &ConditionsBench| bench.host.assigned.lock().unwrap().free_cpus.to_string();
    assert_eq!(free(&bench), "4,6-7");
    let published: Vec<_> =
        bench.reconciler.view.read().nodes.iter().map(|node| node.free_cpus.clone()).collect();
    assert_eq!(published, ["", "4,6-7"]);
    let Ok(AdmissionOutcome::Admitted(held)) = bench.admit("a", [64, 0]) else { panic!("it was refused") };
    assert_eq!(held.cpus, "4");
    let notes = held.explanation.unwrap().notes;
    let expected = "CPUs 1-3,5 are in cpuset partitions of other programs, and were not offered";
    assert!(notes.contains(&expected.to_owned()), "{notes:?}");
}

#[test]
fn used_huge_pages_are_not_guaranteed() {
    let mut bench = ConditionsBench::new(StrategyKind::Native);
    bench.set_foreign_use(ZoneKind::Hugepages(SIZE), [512, 600]);
    assert_eq!(bench.published_foreign_use(), [512, 600]);
    let Err(AdmissionError::Rejected(rejection, explanation)) = bench.admit("a", [64, 1024]) else {
        panic!("it was admitted");
    };
    let message = describe_rejection(&rejection);
    let expected = "node 1: hugepages-2Mi requested 1.0 GiB, free 424.0 MiB (600.0 MiB more are used by \
                    workloads without a guarantee)";
    assert!(message.contains(expected), "{message}");
    assert_eq!(rejection.shortfalls.iter().map(|of| of.withheld >> 20).max(), Some(600));
    let expected =
        "node 0: 512Mi of hugepages-2Mi are used by workloads without a guarantee, and were not offered";
    assert!(explanation.notes.contains(&expected.to_owned()), "{:?}", explanation.notes);

    bench.set_foreign_use(ZoneKind::Hugepages(SIZE), [512, 0]);
    let Ok(AdmissionOutcome::Admitted(held)) = bench.admit("a", [64, 1024]) else { panic!("it was refused") };
    assert_eq!(held.nodes, "1");
    assert_eq!(bench.published_foreign_use(), [512, 0]);
    // An existing guarantee is kept.
    bench.set_foreign_use(ZoneKind::Hugepages(SIZE), [1024, 1024]);
    let ledger = &bench.reconciler.core.store.state.ledger;
    assert_eq!(ledger.owners().count(), 1);
    assert_eq!(bench.published_foreign_use(), [1024, 0], "nothing is free on node 1");
}

#[test]
fn dry_run_report_waits_after_costly_one() {
    let mut bench = ConditionsBench::new(StrategyKind::Native);
    let reported = |bench: &ConditionsBench| bench.reconciler.view.read().enforcement.herding.cgroups.len();
    bench.admit("a", [64, 0]).unwrap();
    assert_eq!(reported(&bench), 1, "b would be confined");
    bench.reconciler.core.isolation.next_report = Some(Instant::now() + Duration::from_hours(1));
    release::release(&mut bench.reconciler.core, "a").unwrap();
    for _ in 0..2 {
        bench.reconciler.process_effects();
        assert_eq!(reported(&bench), 1);
        bench.reconciler.run_maintenance();
    }
    bench.reconciler.core.isolation.next_report = Some(Instant::now());
    bench.reconciler.run_maintenance();
    bench.reconciler.process_effects();
    assert_eq!(reported(&bench), 0);
}

#[test]
fn own_use_is_available_to_workload() {
    let mut bench = ConditionsBench::new(StrategyKind::Native);
    let a = bench.dir.path().join("cgroup/a");
    let numa_stat = |mib: u64| format!("anon N0=0 N1={}\nfile N0=0 N1=0\n", mib << 20);
    fs::write(a.join("memory.numa_stat"), numa_stat(2000)).unwrap();
    bench.set_foreign_use(ZoneKind::Memory, [4096, 2000]);
    assert!(matches!(bench.admit("b", [2000, 0]), Err(AdmissionError::Rejected(..))));
    assert!(matches!(bench.admit("a", [2000, 0]), Ok(AdmissionOutcome::Admitted(_))));
    // Until the next reading, the use of "a" does not count twice.
    assert!(matches!(bench.admit("b", [512, 0]), Ok(AdmissionOutcome::Admitted(_))));
    // The next reading applies, even with unchanged values.
    let withheld = |bench: &ConditionsBench| {
        let conditions = bench.reconciler.core.store.state.ledger.conditions();
        conditions.withheld_on(ZoneKind::Memory, NodeId(1)).0 >> 20
    };
    assert_eq!(withheld(&bench), 0);
    let seen = (**bench.host.headroom.lock().unwrap()).clone();
    *bench.host.headroom.lock().unwrap() = Arc::new(Headroom { look: seen.look + 1, ..seen });
    bench.reconciler.run_maintenance();
    assert_eq!(withheld(&bench), 2000);
}

#[test]
fn preferred_node_follows_memory() {
    let mut bench = ConditionsBench::new(StrategyKind::Native);
    let numa_stat = bench.dir.path().join("cgroup/a/memory.numa_stat");
    let set_memory = |[first, second]: [u64; 2]| {
        let text = format!("anon N0={} N1={}\nfile N0=0 N1=0\n", first << 20, second << 20);
        fs::write(&numa_stat, text).unwrap();
    };
    set_memory([0, 1024]);
    let mut request = Request::new(&api::AllocationRequest {
        placement: api::Placement { burstable: true, ..api::Placement::default() },
        ..api::AllocationRequest::new("a".to_owned(), api::Target::Cgroup("/a".to_owned()), "1Gi".to_owned())
    })
    .unwrap();
    request.limit = None;
    let Ok(AdmissionOutcome::Admitted(held)) = bench.reconciler.admit(&request, false) else {
        panic!("it was refused")
    };
    assert_eq!(held.nodes, "1");
    // Use beyond the guarantee counts as use of other programs, which leaves no room on node 0.
    bench.set_foreign_use(ZoneKind::Memory, [3500, 0]);
    set_memory([3500, 0]);
    bench.reconciler.run_maintenance();
    let blocks =
        &bench.reconciler.core.store.state.ledger.allocation(&"a".into(), &"a".into()).unwrap().blocks;
    assert_eq!(blocks[0].affinity.to_string(), "0");
}

#[test]
fn kubelet_strategy_ignores_foreign_use() {
    let mut bench = ConditionsBench::new(StrategyKind::Kubelet);
    bench.set_foreign_use(ZoneKind::Hugepages(SIZE), [1024, 1024]);
    assert!(matches!(bench.admit("a", [64, 1024]), Ok(AdmissionOutcome::Admitted(_))));
}

#[test]
fn changed_use_does_not_repeat_refusal() {
    let config = r#"{"strategy": "native", "guarantees": [
        {"cgroup": "/a", "memory": "6Gi", "policy": "single-numa-node"}
    ]}"#;
    let mut bench = ConditionsBench::with(serde_json::from_str(config).unwrap());
    let mut reasons = Vec::new();
    for mib in [0, 100, 200] {
        bench.set_foreign_use(ZoneKind::Memory, [mib, 0]);
        reasons.push(bench.reconciler.view.read().waiting[0].reason.clone());
    }
    assert!(reasons.windows(2).all(|two| two[0] != two[1]), "each published reason is new: {reasons:?}");
    let happened = bench.host.happened.lock().unwrap();
    assert_eq!(
        happened.iter().filter(|(_, report)| report.message.contains("cannot be admitted")).count(),
        1
    );
    // The retries do not count as requests.
    assert_eq!(bench.reconciler.core.metrics.requests(), 1);
}

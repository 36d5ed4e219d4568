//! Tests with a fake resctrl tree, see [`numaward_enforce::resctrl::fake`].

use std::{fs, thread};

use numaward_api as api;
use numaward_config::{Config, resctrl};
use numaward_enforce::resctrl::fake::FakeResctrl;
use numaward_guarantee::{
    error::AdmissionError,
    request::{FieldError, Request},
};
use prometheus_client::{encoding::text::encode, registry::Registry};

use super::*;
use crate::{
    core::release,
    reconciler::{AdmissionOutcome, ReconcilerLoop, tests::reconciler_loop},
    testing::{self as fixture, TestHost as Machine},
};

/// A host with two cgroups of one thread each, and a fake resctrl tree.
struct CacheBench {
    dir: tempfile::TempDir,
    host: Arc<Machine>,
    fake: Arc<FakeResctrl>,
    config: Config,
}

const CLASSES: &str = r#"{"batch": {"l3Ways": 4, "memoryBandwidthPercent": 20}, "db": {"l3Percent": 50}}"#;

impl CacheBench {
    fn new(classes: &str, monitor: Monitor) -> Self {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(Machine::small()));
        let fake = FakeResctrl::new(&dir.path().join("sys/fs/resctrl"));
        for (cgroup, thread) in [("", 1), ("a", 10), ("b", 20)] {
            let path = dir.path().join("cgroup").join(cgroup);
            fixture::cgroup(&path, &host.machine.lock().unwrap());
            fs::write(path.join("cgroup.threads"), format!("{thread}\n")).unwrap();
            fake.begin(thread);
        }
        let mut config = Config {
            state_directory: dir.path().join("state"),
            host_root: dir.path().to_owned(),
            ..Config::default()
        };
        config.resctrl = resctrl::Resctrl {
            classes: serde_json::from_str(classes).unwrap(),
            monitor,
            ..Default::default()
        };
        Self { dir, host, fake, config }
    }

    fn start(&self) -> ReconcilerLoop {
        let mut reconciler = reconciler_loop(&self.config, &self.dir.path().join("cgroup"), &self.host);
        reconciler.controllers.caches.kernel = self.fake.clone();
        reconciler
    }

    fn happened(&self) -> Vec<String> {
        let happened = std::mem::take(&mut *self.host.happened.lock().unwrap());
        let resctrl = happened.into_iter().filter(|(_, report)| report.kind == EventKind::Resctrl);
        resctrl.map(|(_, report)| report.message).collect()
    }
}

fn admit(
    reconciler: &mut ReconcilerLoop,
    name: &str,
    class: Option<&str>,
) -> Result<AdmissionOutcome, AdmissionError> {
    let mut request = api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{name}")), "256Mi");
    request.placement.resctrl_class = class.map(str::to_owned);
    reconciler.admit(&Request::new(&request).unwrap(), false)
}

fn release(reconciler: &mut ReconcilerLoop, name: &str) {
    release::release(&mut reconciler.core, name).unwrap();
    reconciler.process_effects();
}

/// Starts an update at once and waits until its outcome is processed.
fn update(reconciler: &mut ReconcilerLoop) {
    let ReconcilerLoop { controllers, core, .. } = reconciler;
    let caches = &mut controllers.caches;
    caches.next_update = None;
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        caches.tick(core, Instant::now());
        if !caches.worker.as_ref().is_some_and(CacheWorker::is_busy) {
            break;
        }
        assert!(Instant::now() < until, "the thread does not end its job");
        thread::sleep(Duration::from_millis(1));
    }
}

fn metrics(reconciler: &ReconcilerLoop) -> Vec<String> {
    let (mut registry, mut text) = (Registry::default(), String::new());
    reconciler.core.metrics.register(&mut registry);
    encode(&mut text, &registry).unwrap();
    text.lines().filter(|line| line.starts_with("resctrl_")).map(str::to_owned).collect()
}

#[test]
fn class_lasts_until_release() {
    let bench = CacheBench::new(CLASSES, Monitor::Off);
    let mut reconciler = bench.start();
    update(&mut reconciler);
    assert!(bench.fake.groups().is_empty() && bench.happened().is_empty());
    let Ok(AdmissionOutcome::Admitted(admitted)) = admit(&mut reconciler, "a", Some("db")) else {
        panic!("refused")
    };
    assert_eq!(admitted.placement.resctrl_class.as_deref(), Some("db"), "it is shown");
    admit(&mut reconciler, "b", None).unwrap();
    assert!(bench.fake.commands().is_empty(), "an answer does not wait for the tree");
    update(&mut reconciler);
    assert_eq!(bench.fake.groups(), ["numaward-db"]);
    assert_eq!(bench.fake.tasks("numaward-db"), [10].into());
    let made =
        "The shares of classes were set in a fake tree, which is not the kernel's: db (L3:0=3f0;1=3f0).";
    assert_eq!(bench.happened(), [made]);
    let figures = metrics(&reconciler);
    for line in [
        "resctrl_workloads{state=\"held\"} 1",
        "resctrl_workloads{state=\"refused\"} 0",
        "resctrl_groups{kind=\"class\"} 1",
        "resctrl_threads_moved_total 1",
    ] {
        assert!(figures.iter().any(|of| of == line), "{line}: {figures:?}");
    }
    update(&mut reconciler);
    assert!(bench.happened().is_empty(), "reported once");
    // The daemon crashes and is restarted.
    drop(reconciler);
    bench.fake.commands();
    let mut reconciler = bench.start();
    update(&mut reconciler);
    assert_eq!(
        (bench.fake.commands(), bench.fake.groups().len()),
        (Vec::new(), 1),
        "the class is in the ledger"
    );
    release(&mut reconciler, "a");
    update(&mut reconciler);
    assert_eq!((bench.fake.groups().len(), bench.fake.tasks("")), (0, [1, 10, 20].into()));
    let removed = "Unused classes were removed in a fake tree, which is not the kernel's: db.";
    assert_eq!(bench.happened(), [removed]);
}

#[test]
fn refusal_lists_known_classes() {
    let bench = CacheBench::new(CLASSES, Monitor::Off);
    let mut reconciler = bench.start();
    let Err(AdmissionError::Field(FieldError { field, problem, .. })) =
        admit(&mut reconciler, "a", Some("dp"))
    else {
        panic!("admitted")
    };
    assert_eq!(field, "placement.resctrlClass");
    assert!(problem.contains("there is no class \"dp\"") && problem.ends_with("batch, db"), "{problem}");
    assert!(reconciler.core.store.state.guarantees.is_empty());
}

#[test]
fn metrics_end_with_guarantee() {
    let mut bench = CacheBench::new("{}", Monitor::Guaranteed);
    let mut reconciler = bench.start();
    admit(&mut reconciler, "a", None).unwrap();
    admit(&mut reconciler, "b", None).unwrap();
    update(&mut reconciler);
    let counted = |workload: &str, file: &str, text: &str| {
        bench.fake.write_file(&format!("mon_groups/numaward-{workload}/mon_data/mon_L3_01/{file}"), text);
    };
    counted("a", "llc_occupancy", "4096");
    counted("a", "mbm_total_bytes", "7000");
    counted("a", "mbm_local_bytes", "6000");
    counted("b", "llc_occupancy", "Unavailable");
    update(&mut reconciler);
    let bandwidth = |scope: &str, bytes: u64| {
        format!(
            "resctrl_memory_bandwidth_bytes_total{{workload=\"a\",cache=\"1\",scope=\"{scope}\"}} {bytes}"
        )
    };
    let occupancy = "resctrl_llc_occupancy_bytes{workload=\"a\",cache=\"1\"} 4096".to_owned();
    let figures = metrics(&reconciler);
    for line in [&occupancy, &bandwidth("total", 7000), &bandwidth("local", 6000)] {
        assert!(figures.contains(line), "{line}: {figures:?}");
    }
    let none = "resctrl_llc_occupancy_bytes{workload=\"b\",cache=\"1\"}";
    assert!(
        !figures.iter().any(|line| line.starts_with(none)),
        "unavailable counters are not exported: {figures:?}"
    );
    // The counter is unavailable once: the last value stays.
    counted("a", "mbm_total_bytes", "Unavailable");
    update(&mut reconciler);
    assert!(metrics(&reconciler).contains(&bandwidth("total", 7000)));
    release(&mut reconciler, "a");
    update(&mut reconciler);
    let figures = metrics(&reconciler);
    assert!(!figures.iter().any(|line| line.contains("workload=\"a\"")), "{figures:?}");
    // Workloads that the configuration denies are not exported.
    bench.config.metrics.workloads.deny = serde_json::from_str(r#"["b"]"#).unwrap();
    drop(reconciler);
    let mut reconciler = bench.start();
    update(&mut reconciler);
    assert!(!metrics(&reconciler).iter().any(|line| line.contains("workload=\"b\"")));
}

#[test]
fn failed_class_is_reported_once() {
    let bench = CacheBench::new(CLASSES, Monitor::Off);
    bench.fake.write_file("info/L3/num_closids", "2");
    let mut reconciler = bench.start();
    admit(&mut reconciler, "a", Some("batch")).unwrap();
    admit(&mut reconciler, "b", Some("db")).unwrap();
    update(&mut reconciler);
    let happened = bench.happened();
    assert!(happened[1].ends_with("(the kernel says: Out of CLOSIDs)."), "{happened:?}");
    update(&mut reconciler);
    assert!(bench.happened().is_empty());
    assert!(metrics(&reconciler).contains(&"resctrl_workloads{state=\"refused\"} 1".to_owned()));
    release(&mut reconciler, "a");
    update(&mut reconciler);
    assert_eq!(bench.fake.tasks("numaward-db"), [20].into(), "it is tried again");
}

#[test]
fn start_removes_unconfigured_classes() {
    let mut bench = CacheBench::new(CLASSES, Monitor::Guaranteed);
    let mut reconciler = bench.start();
    admit(&mut reconciler, "a", Some("db")).unwrap();
    update(&mut reconciler);
    drop(reconciler);
    // The class is no longer configured: its group is removed, and the guarantee stays.
    bench.config.resctrl.classes = serde_json::from_str(r#"{"batch": {"l3Ways": 4}}"#).unwrap();
    let mut reconciler = bench.start();
    bench.happened();
    update(&mut reconciler);
    assert_eq!(bench.fake.groups(), ["mon_groups/numaward-a"]);
    let happened = bench.happened();
    assert!(
        happened[1].contains("class db, which a has, is not in the configuration any more"),
        "{happened:?}"
    );
    drop(reconciler);
    for (config, mode) in [
        (resctrl::Resctrl::default(), api::EnforcementMode::On),
        (bench.config.resctrl.clone(), api::EnforcementMode::DryRun),
    ] {
        bench.fake.make(&bench.dir.path().join("sys/fs/resctrl/numaward-old")).unwrap();
        (bench.config.resctrl, bench.config.enforcement.mode) = (config, mode);
        let mut reconciler = bench.start();
        bench.happened();
        let ReconcilerLoop { controllers, core, .. } = &mut reconciler;
        controllers.caches.adopt(core);
        assert_eq!((bench.fake.groups().len(), bench.fake.tasks("")), (0, [1, 10, 20].into()));
        assert_eq!(bench.happened().len(), 1);
        update(&mut reconciler);
        assert!(reconciler.controllers.caches.worker.is_none(), "no thread was started");
    }
}

#[test]
fn exclusive_ways_are_restored() {
    let exclusive = r#"{"batch": {"l3Ways": 4}, "db": {"l3Percent": 50, "exclusive": true}}"#;
    let bench = CacheBench::new(exclusive, Monitor::Off);
    let default = |bench: &CacheBench| bench.fake.text("schemata").lines().next().unwrap().trim().to_owned();
    bench.fake.write_file("schemata", "     L3:0=fff;1=3ff\n     MB:0=100;1=100");
    let mut reconciler = bench.start();
    admit(&mut reconciler, "a", Some("db")).unwrap();
    update(&mut reconciler);
    assert_eq!(
        (default(&bench), bench.fake.tasks("numaward-db")),
        ("L3:0=fc0;1=3c0".to_owned(), [10].into())
    );
    let made = "The shares of classes were set in a fake tree, which is not the kernel's: db (L3:0=3f;1=3f); the \
        default group (L3:0=fc0;1=3c0).";
    assert_eq!(bench.happened(), [made]);
    // The daemon crashes and is restarted.
    drop(reconciler);
    bench.fake.commands();
    let mut reconciler = bench.start();
    assert!(!reconciler.core.store.state.cache_ways.is_empty(), "the originals are in the ledger");
    update(&mut reconciler);
    assert!(bench.fake.commands().is_empty() && bench.happened().is_empty());
    // A start without resctrl in the configuration.
    let ReconcilerLoop { controllers, core, .. } = &mut reconciler;
    core.config.resctrl = resctrl::Resctrl::default();
    controllers.caches.adopt(core);
    assert_eq!((default(&bench), bench.fake.groups().len()), ("L3:0=fff;1=3ff".to_owned(), 0));
    assert!(reconciler.core.store.state.cache_ways.is_empty());
}

//! Restore of containers when guarantees are no longer enforced.

use numaward_api::EnforcementMode;
use numaward_config::kubernetes::PinnedPolicy;

use super::*;

impl NriBench {
    /// Returns CPUs, nodes, `memory.min`, `memory.low` and `memory.high` of a container.
    fn all_knobs(&self, spec: &ContainerSpec) -> [String; 5] {
        ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.low", "memory.high"]
            .map(|knob| self.knob(&format!("{}/{knob}", path_of(spec))))
    }

    /// Returns the CPUs and nodes that the runtime knows.
    fn runtime_sets(&self, spec: &ContainerSpec) -> [String; 2] {
        let resources = self.runtime.container(&spec.id).unwrap().resources;
        [resources.cpus.unwrap_or_default().to_string(), resources.mems.unwrap_or_default().to_string()]
    }
}

const DEFAULT_KNOBS: [&str; 5] = ["", "", "0", "0", "max"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restores_settings_of_the_runtime() {
    type Runtime = fn(Online) -> fake::FakeRuntimeConfig;
    // The older runtime does not report settings by files of cgroup v2 (`unified`).
    let older: (Runtime, _) = (fake::FakeRuntimeConfig::containerd_2_1, "0");
    let newer: (Runtime, _) = (fake::FakeRuntimeConfig::containerd_2_3, "4096");
    for (mode, (runtime, low)) in
        [(EnforcementMode::Off, older), (EnforcementMode::Off, newer), (EnforcementMode::DryRun, older)]
    {
        let mut bench = NriBench::new(Arc::new(NoPods), runtime);
        bench.config.kubernetes.nri.when_pinned = PinnedPolicy::Override;
        let daemon = bench.start().await;
        let pod = bench.pod("db", "", &[]).await.unwrap();
        let plain = container(&pod, "plain", 2, Bytes::gib(1));
        let asked = ContainerSpec {
            cpus: "40-47".to_owned(),
            mems: "1".to_owned(),
            unified: [("memory.low".to_owned(), "4096".to_owned())].into(),
            ..container(&pod, "asked", 2, Bytes::gib(1))
        };
        let burst = bench.pod("burst", "/burstable", &[]).await.unwrap();
        let shared = container(&burst, "web", 1, Bytes(0));
        for spec in [&plain, &asked, &shared] {
            bench.run(spec).await.unwrap();
        }
        // The guarantees outlive a restart. One container is created, but not started, when the daemon is killed.
        daemon.stop(&bench.runtime).await;
        let daemon = bench.start().await;
        let created = container(&pod, "created", 3, Bytes::gib(1));
        bench.create(&created).await.unwrap();
        assert_eq!([&plain, &asked, &created].map(|spec| bench.cpus(spec).len()), [2, 2, 3]);
        until("the shared container is confined", || bench.cpus(&shared).len() == 57).await;
        daemon.stop(&bench.runtime).await;

        bench.config.enforcement.mode = mode;
        let expected = ["40-47", "1", "0", low, "max"];
        for start in 0..3 {
            let daemon = bench.start().await;
            for spec in [&plain, &shared, &created] {
                assert_eq!(bench.all_knobs(spec), DEFAULT_KNOBS, "{mode:?} {start} {}", spec.name);
            }
            assert_eq!(bench.all_knobs(&asked), expected, "{mode:?} {start}");
            assert_eq!(bench.knob("kubepods/memory.min"), "0");
            // NRI cannot express an empty set, so the runtime gets all CPUs and nodes.
            assert_eq!([&plain, &created].map(|spec| bench.runtime_sets(spec)), [["0-63", "0-3"]; 2]);
            assert_eq!(
                [&asked, &shared].map(|spec| bench.runtime_sets(spec)),
                [["40-47", "1"], ["0-63", ""]]
            );
            let unified = bench.runtime.container(&plain.id).unwrap().resources.unified;
            assert_eq!((unified["memory.min"].as_str(), unified["memory.low"].as_str()), ("0", "0"));
            daemon.stop(&bench.runtime).await;
        }

        // Guarantees are enforced again, and restored again.
        bench.config.enforcement.mode = EnforcementMode::On;
        let daemon = bench.start().await;
        until("the containers are pinned again", || {
            [&plain, &asked, &created].map(|spec| bench.cpus(spec).len()) == [2, 2, 3]
                && bench.cpus(&shared).len() == 57
        })
        .await;
        daemon.stop(&bench.runtime).await;
        bench.config.enforcement.mode = mode;
        let _daemon = bench.start().await;
        assert_eq!([&plain, &shared].map(|spec| bench.all_knobs(spec)), [DEFAULT_KNOBS; 2]);
        assert_eq!(bench.all_knobs(&asked), expected);
    }
}

/// A dry run has written nothing, so that there is nothing to restore.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_untouched_containers() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.enforcement.mode = EnforcementMode::DryRun;
    let daemon = bench.start().await;
    let pod = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    daemon.stop(&bench.runtime).await;
    // Another program writes the CPUs.
    fs::write(bench.dir.path().join("cgroup").join(path_of(&db)).join("cpuset.cpus"), "7").unwrap();
    bench.config.enforcement.mode = EnforcementMode::Off;
    let _daemon = bench.start().await;
    assert_eq!((bench.cpus(&db), bench.runtime.updates_received()), ("7".parse().unwrap(), 0));
}

//! Pods of runtimes that run the containers in the sandbox.

use numaward_config::kubernetes::HandlerPin;

use super::*;

fn guaranteed(name: &str, cpus: &str, memory: &str) -> ContainerRequest {
    let amounts = Resources::none().with_cpu(cpus.parse().unwrap()).with_memory(memory.parse().unwrap());
    ContainerRequest::guaranteed(name, amounts)
}

impl NriBench {
    /// Runs the sandbox of a pod with this runtime handler.
    async fn sandbox(&self, uid: &str, handler: &str) -> PodSpec {
        let pod = PodSpec { runtime_handler: handler.to_owned(), ..self.spec(uid, "", &[]) };
        self.runtime.run_pod(&pod).await.unwrap();
        pod
    }

    /// Returns the CPUs and nodes of a pod's cgroup.
    fn pod_cpuset(&self, uid: &str) -> [String; 2] {
        ["cpuset.cpus", "cpuset.mems"].map(|knob| self.knob(&format!("kubepods/pod{uid}/{knob}")))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_gets_no_guarantee() {
    let known = Arc::new(FakePods::default());
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    known.add_pod("vm", vec![guaranteed("db", "2", "1Gi"), guaranteed("log", "1", "1Gi")], None);
    let vm = bench.sandbox("vm", "kata-qemu").await;
    let [db, log] = [("db", 2), ("log", 1)].map(|(name, cpus)| container(&vm, name, cpus, Bytes::gib(1)));
    for spec in [&db, &log] {
        bench.run(spec).await.unwrap();
        assert_eq!((bench.cpus(spec), bench.mems(spec).as_str()), (CpuSet::new(), ""), "{}", spec.name);
        let resources = bench.runtime.container(&spec.id).unwrap().resources;
        assert_eq!((resources.cpus, resources.mems), (None, None));
    }
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    let notices = known.notices.lock().unwrap().clone();
    let [notice] = &notices[..] else { panic!("{notices:?}") };
    assert!(notice.is_warning && notice.reason == "NumaRuntimeNotPlaced", "{notice:?}");
    assert!(notice.message.contains("kata-qemu") && notice.message.contains("kubernetes.runtimeHandlers"));

    // The machine does not run on the exclusive CPUs of another pod.
    known.add_pod("plain", vec![guaranteed("db", "2", "1Gi")], None);
    let plain = bench.sandbox("plain", "runc").await;
    let plain_db = container(&plain, "db", 2, Bytes::gib(1));
    bench.run(&plain_db).await.unwrap();
    assert_eq!(bench.cpus(&plain_db), "1-2".parse().unwrap());
    assert_eq!(bench.pod_cpuset("vm"), ["0,3-63", ""]);
    assert_eq!(known.notices.lock().unwrap().len(), 1);

    // Updates are for containers that the runtime knows.
    bench.runtime.stop();
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    assert_eq!(bench.pod_cpuset("vm"), ["0,3-63", ""]);
    assert_eq!(known.notices.lock().unwrap().len(), 1);
    bench.runtime.remove_pod(&vm.id).await.unwrap();
    assert_eq!(daemon.figures.refused.get(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandbox_gets_sum_of_containers() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.kubernetes.runtime_handlers.insert("kata".to_owned(), HandlerPin::Sandbox);
    let daemon = bench.start().await;
    known.add_pod("vm", vec![guaranteed("db", "2", "1Gi"), guaranteed("log", "1", "1Gi")], None);
    let vm = bench.sandbox("vm", "kata").await;
    let [db, log] = [("db", 2), ("log", 1)].map(|(name, cpus)| container(&vm, name, cpus, Bytes::gib(1)));
    for spec in [&db, &log] {
        bench.run(spec).await.unwrap();
        assert_eq!(bench.cpus(spec), CpuSet::new(), "{}", spec.name);
    }
    let check = |daemon: &NriDaemon| {
        assert_eq!(bench.pod_cpuset("vm"), ["1-3", "0"]);
        let held = daemon.reconciler.allocations();
        let [held] = &held.allocations[..] else { panic!("{held:?}") };
        assert_eq!((held.cpus.as_str(), held.memory[0].bytes), ("1-3", Bytes::gib(2).0));
        assert_eq!(held.cgroup, "/kubepods/podvm");
    };
    check(&daemon);
    let memory = bench.knob("kubepods/podvm/memory.low");
    assert_eq!(memory, Bytes::gib(2).0.to_string());
    // A container that is created again changes nothing.
    bench.runtime.stop_container(&log.id).await.unwrap();
    bench.runtime.remove_container(&log.id).await.unwrap();
    bench.run(&log).await.unwrap();
    check(&daemon);
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("the guarantee is published", || daemon.reconciler.allocations().allocations.len() == 1).await;
    check(&daemon);
    assert_eq!(known.notices.lock().unwrap().len(), 0);

    known.add_pod("large", vec![guaranteed("db", "62", "1Gi")], None);
    let large = bench.sandbox("large", "kata").await;
    let error = bench.run(&container(&large, "db", 62, Bytes::gib(1))).await.unwrap_err();
    assert!(error.contains("numaward cannot place pod default/pod-large"), "{error}");

    bench.runtime.remove_pod(&vm.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
    assert_eq!(daemon.figures.unpinned_for("enforcement"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handler_is_pinned_as_configured() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.kubernetes.runtime_handlers.insert("kata".to_owned(), HandlerPin::Container);
    let daemon = bench.start().await;
    for (uid, handler, cpus) in
        [("a", "kata", "1-2"), ("b", "crun", "3-4"), ("c", "", "5-6"), ("d", "runsc", "")]
    {
        let pod = bench.sandbox(uid, handler).await;
        let db = container(&pod, "db", 2, Bytes::gib(1));
        bench.run(&db).await.unwrap();
        assert_eq!(bench.cpus(&db), cpus.parse().unwrap_or_default(), "{handler}");
    }
    assert_eq!(daemon.reconciler.allocations().allocations.len(), 3);
}

/// A pod with annotations by which CRI-O changes the settings of its CPUs gets one warning, and its guarantee.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_is_warned_of_annotations_of_crio() {
    let annotations = [("cpu-load-balancing.crio.io", "disable"), ("irq-load-balancing.crio.io", "disable")];
    for (name, warnings) in [("cri-o", 1), ("containerd", 0)] {
        let known = Arc::new(FakePods::default());
        let bench = NriBench::new(known.clone(), |online| fake::FakeRuntimeConfig {
            name: name.to_owned(),
            version: "1.36.3".to_owned(),
            ..fake::FakeRuntimeConfig::containerd_2_1(online)
        });
        let daemon = bench.start().await;
        let shared = bench.pod("shared", "/burstable", &annotations).await.unwrap();
        bench.run(&container(&shared, "web", 1, Bytes(0))).await.unwrap();
        let pod = bench.pod("db", "", &annotations).await.unwrap();
        let db = container(&pod, "db", 2, Bytes::gib(1));
        bench.run(&db).await.unwrap();
        assert_eq!(bench.cpus(&db), "1-2".parse().unwrap());
        bench.runtime.stop();
        bench.runtime.start();
        assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
        assert_eq!(daemon.figures.refused.get(), 0);
        let notices = known.notices.lock().unwrap().clone();
        assert_eq!(notices.len(), warnings, "{name}: {notices:?}");
        for notice in notices {
            assert!(notice.is_warning && notice.reason == "NumaRuntimeChangesCpus", "{notice:?}");
            assert_eq!(notice.pod.uid, "db");
            for (key, _) in annotations {
                assert!(notice.message.contains(key), "{notice:?}");
            }
        }
    }
}

//! Memory policies that pods request.

use super::*;

const POLICY_ANNOTATION: (&str, &str) = ("numaward.io/memory-policy", "interleave");

impl NriBench {
    /// Sets the memory policy that the kernel shows for the first process of every container.
    fn set_shown_policy(&self, policy: &str) {
        let proc = self.dir.path().join("proc/1000");
        fs::create_dir_all(&proc).unwrap();
        fs::write(proc.join("numa_maps"), format!("55d0 {policy} file=/usr/bin/runc mapped=1 N0=1\n"))
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_policy_on_all_nodes() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_3);
    bench.config.topology_manager_policy = Some(TopologyManagerPolicy::BestEffort);
    let daemon = bench.start().await;
    bench.set_shown_policy("interleave:0-1");

    // More memory than one node has.
    let pod = bench.pod("db", "", &[POLICY_ANNOTATION]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(80));
    bench.run(&db).await.unwrap();
    // The request names all nodes: the kernel reduces them to those of the cpuset.
    assert_eq!(bench.runtime.memory_policy(&db.id).as_deref(), Some("Interleave:0-3"));
    assert!(bench.mems(&db).parse::<numaward_topology::NodeSet>().unwrap().len() == 2, "{}", bench.mems(&db));
    let held = daemon.reconciler.allocations().allocations[0].clone();
    assert_eq!(held.placement.memory_policy, Some(numaward_api::MemoryPolicy::Interleave));

    // A container without a guarantee gets the policy too.
    let pod = bench.pod("web", "/burstable", &[POLICY_ANNOTATION]).await.unwrap();
    let web = container(&pod, "web", 1, Bytes(0));
    bench.run(&web).await.unwrap();
    assert_eq!(bench.runtime.memory_policy(&web.id).as_deref(), Some("Interleave:0-3"));
    let pod = bench.pod("other", "", &[]).await.unwrap();
    let other = container(&pod, "other", 2, Bytes::gib(1));
    bench.run(&other).await.unwrap();
    assert_eq!(bench.runtime.memory_policy(&other.id), None);
    assert_eq!(daemon.figures.memory_policies_missing.get(), 0);

    // The OCI runtime has ignored the request.
    bench.set_shown_policy("default");
    let pod = bench.pod("late", "", &[POLICY_ANNOTATION]).await.unwrap();
    bench.run(&container(&pod, "late", 2, Bytes::gib(1))).await.unwrap();
    assert_eq!(daemon.figures.memory_policies_missing.get(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_runtime_without_policies() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    // `/proc` is not read in this case.
    bench.set_shown_policy("interleave:0-1");
    let pod = bench.pod("db", "", &[POLICY_ANNOTATION]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.cpus(&db).len(), 2, "the container is placed without it");
    assert_eq!(bench.runtime.memory_policy(&db.id), None);
    assert_eq!(daemon.figures.memory_policies_missing.get(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_policy_without_enforcement() {
    for mode in [EnforcementMode::DryRun, EnforcementMode::Off] {
        let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_3);
        bench.config.enforcement.mode = mode;
        let daemon = bench.start().await;
        bench.set_shown_policy("default");
        let pod = bench.pod("db", "", &[POLICY_ANNOTATION]).await.unwrap();
        let db = container(&pod, "db", 2, Bytes::gib(1));
        bench.run(&db).await.unwrap();
        assert_eq!(bench.runtime.memory_policy(&db.id), None, "{mode:?}");
        assert_eq!(daemon.figures.memory_policies_missing.get(), 0, "{mode:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_only_missing_policies() {
    let known = Arc::new(FakePods::default());
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_3);
    let daemon = bench.start().await;
    // `numa_maps` does not exist.
    let pod = bench.pod("db", "", &[POLICY_ANNOTATION]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.runtime.memory_policy(&db.id).as_deref(), Some("Interleave:0-3"));

    bench.set_shown_policy("default");
    let pod = bench.pod("other", "", &[POLICY_ANNOTATION]).await.unwrap();
    let pinned = ContainerSpec { cpus: "3".to_owned(), ..container(&pod, "pinned", 2, Bytes::gib(1)) };
    bench.run(&pinned).await.unwrap();
    let burstable = ("numaward.io/guarantee", "burstable");
    let resources = Resources::none().with_cpu("1".parse().unwrap()).with_memory("1Gi".parse().unwrap());
    let request =
        ContainerRequest { limits: Resources::none(), ..ContainerRequest::guaranteed("burst", resources) };
    known.add_pod("burst", vec![request], None);
    let pod = bench.pod("burst", "/burstable", &[POLICY_ANNOTATION, burstable]).await.unwrap();
    let burst = container(&pod, "burst", 1, Bytes::gib(1));
    bench.run(&burst).await.unwrap();
    for spec in [&pinned, &burst] {
        assert_eq!(bench.runtime.memory_policy(&spec.id), None, "{}", spec.name);
    }
    assert_eq!(daemon.figures.memory_policies_missing.get(), 0);
    assert!(known.notices.lock().unwrap().is_empty());

    let pod = bench.pod("late", "", &[POLICY_ANNOTATION]).await.unwrap();
    bench.run(&container(&pod, "late", 2, Bytes::gib(1))).await.unwrap();
    assert_eq!(daemon.figures.memory_policies_missing.get(), 1);
    let notices = known.notices.lock().unwrap().clone();
    assert!(
        matches!(&notices[..], [notice] if notice.reason == "NumaMemoryPolicyMissing" && notice.is_warning),
        "{notices:?}"
    );
}

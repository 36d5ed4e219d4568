//! Memory policies that pods ask for.

use super::*;

const ASKED: (&str, &str) = ("numaward.io/memory-policy", "interleave");

impl Bench {
    /// What the kernel shows of the first process of every container that the runtime starts.
    fn has_policy(&self, policy: &str) {
        let proc = self.dir.path().join("proc/1000");
        fs::create_dir_all(&proc).unwrap();
        fs::write(proc.join("numa_maps"), format!("55d0 {policy} file=/usr/bin/runc mapped=1 N0=1\n"))
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_gets_its_policy_over_its_nodes() {
    let mut bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_3);
    bench.config.topology_manager_policy = Some(TopologyManagerPolicy::BestEffort);
    let daemon = bench.start().await;
    bench.has_policy("interleave:0-1");

    // More memory than one node has.
    let pod = bench.pod("db", "", &[ASKED]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(80));
    bench.run(&db).await.unwrap();
    // Of all nodes, the kernel takes those of the cpuset.
    assert_eq!(bench.runtime.memory_policy(&db.id).as_deref(), Some("Interleave:0-3"));
    assert!(bench.mems(&db).parse::<numaward_topology::NodeSet>().unwrap().len() == 2, "{}", bench.mems(&db));
    let held = daemon.reconciler.allocations().allocations[0].clone();
    assert_eq!(held.placement.memory_policy, Some(numaward_api::MemoryPolicy::Interleave));

    // Without a promise, over all nodes that it may use.
    let pod = bench.pod("web", "/burstable", &[ASKED]).await.unwrap();
    let web = container(&pod, "web", 1, Bytes(0));
    bench.run(&web).await.unwrap();
    assert_eq!(bench.runtime.memory_policy(&web.id).as_deref(), Some("Interleave:0-3"));
    let pod = bench.pod("other", "", &[]).await.unwrap();
    let other = container(&pod, "other", 2, Bytes::gib(1));
    bench.run(&other).await.unwrap();
    assert_eq!(bench.runtime.memory_policy(&other.id), None);
    assert_eq!(daemon.figures.memory_policies_missing.get(), 0);

    // The OCI runtime has ignored it.
    bench.has_policy("default");
    let pod = bench.pod("late", "", &[ASKED]).await.unwrap();
    bench.run(&container(&pod, "late", 2, Bytes::gib(1))).await.unwrap();
    assert_eq!(daemon.figures.memory_policies_missing.get(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_knows_no_policies_is_reported() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    // What is in `/proc` does not matter.
    bench.has_policy("interleave:0-1");
    let pod = bench.pod("db", "", &[ASKED]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.cpus(&db).len(), 2, "it is placed all the same");
    assert_eq!(bench.runtime.memory_policy(&db.id), None);
    assert_eq!(daemon.figures.memory_policies_missing.get(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nothing_is_enforced_no_policy_is_asked_for_or_missed() {
    for mode in [EnforcementMode::DryRun, EnforcementMode::Off] {
        let mut bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_3);
        bench.config.enforcement.mode = mode;
        let daemon = bench.start().await;
        bench.has_policy("default");
        let pod = bench.pod("db", "", &[ASKED]).await.unwrap();
        let db = container(&pod, "db", 2, Bytes::gib(1));
        bench.run(&db).await.unwrap();
        assert_eq!(bench.runtime.memory_policy(&db.id), None, "{mode:?}");
        assert_eq!(daemon.figures.memory_policies_missing.get(), 0, "{mode:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_not_asked_for_or_cannot_be_seen_is_not_missed() {
    let known = Arc::new(Known::default());
    let bench = Bench::new(known.clone(), fake::Config::containerd_2_3);
    let daemon = bench.start().await;
    // There is no `numa_maps`.
    let pod = bench.pod("db", "", &[ASKED]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!(bench.runtime.memory_policy(&db.id).as_deref(), Some("Interleave:0-3"));

    bench.has_policy("default");
    let pod = bench.pod("other", "", &[ASKED]).await.unwrap();
    let pinned = ContainerSpec { cpus: "3".to_owned(), ..container(&pod, "pinned", 2, Bytes::gib(1)) };
    bench.run(&pinned).await.unwrap();
    let burstable = ("numaward.io/guarantee", "burstable");
    let resources = Resources::none().with_cpu("1".parse().unwrap()).with_memory("1Gi".parse().unwrap());
    let asked =
        ContainerRequest { limits: Resources::none(), ..ContainerRequest::guaranteed("burst", resources) };
    known.tell("burst", vec![asked], None);
    let pod = bench.pod("burst", "/burstable", &[ASKED, burstable]).await.unwrap();
    let burst = container(&pod, "burst", 1, Bytes::gib(1));
    bench.run(&burst).await.unwrap();
    for spec in [&pinned, &burst] {
        assert_eq!(bench.runtime.memory_policy(&spec.id), None, "{}", spec.name);
    }
    assert_eq!(daemon.figures.memory_policies_missing.get(), 0);
    assert!(known.notices.lock().unwrap().is_empty());

    let pod = bench.pod("late", "", &[ASKED]).await.unwrap();
    bench.run(&container(&pod, "late", 2, Bytes::gib(1))).await.unwrap();
    assert_eq!(daemon.figures.memory_policies_missing.get(), 1);
    let notices = known.notices.lock().unwrap().clone();
    assert!(
        matches!(&notices[..], [of] if of.reason == "NumaMemoryPolicyMissing" && of.is_warning),
        "{notices:?}"
    );
}

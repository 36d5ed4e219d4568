//! Refused pods: their retries and evictions.

use numaward_config::{Interval, kubernetes::RefusedPolicy};

use super::*;

fn guaranteed(name: &str, cpus: u64) -> ContainerRequest {
    let amounts = Resources::none().with_cpu(cpus.to_string().parse().unwrap());
    ContainerRequest::guaranteed(name, amounts.with_memory("1Gi".parse().unwrap()))
}

/// Adds and runs a pod that has one container with `cpus` CPUs.
async fn pod(bench: &NriBench, known: &FakePods, uid: &str, cpus: u64) -> (PodSpec, ContainerSpec) {
    known.add_pod(uid, vec![guaranteed("db", cpus)], None);
    let pod = bench.pod(uid, "", &[]).await.unwrap();
    let db = container(&pod, "db", cpus, Bytes::gib(1));
    (pod, db)
}

impl NriDaemon {
    fn to_evict(&self) -> Vec<String> {
        self.refusals.to_evict().into_iter().map(|(id, _)| id.uid).collect()
    }
}

fn evicting(known: &Arc<FakePods>) -> NriBench {
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.kubernetes.refused = RefusedPolicy::Evict;
    bench.config.kubernetes.node_name = Some("node".to_owned());
    bench.config.kubernetes.refused_after = Interval(Duration::from_secs(90));
    bench
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_pods_are_named_until_gone() {
    let known = Arc::new(FakePods::default());
    let bench = evicting(&known);
    let daemon = bench.start().await;
    let (first_pod, first) = pod(&bench, &known, "first", 40).await;
    bench.run(&first).await.unwrap();
    let (_, second) = pod(&bench, &known, "second", 40).await;
    assert_eq!(daemon.to_evict(), [""; 0], "no container was refused yet");
    let (third_pod, third) = pod(&bench, &known, "third", 41).await;
    for spec in [&third, &second, &third] {
        bench.run(spec).await.unwrap_err();
    }
    assert_eq!(daemon.to_evict(), ["third", "second"], "in the order of their refusals");
    let after = daemon.refusals.to_evict()[0].1;
    assert_eq!(after, Duration::from_secs(90));
    let notice = known.notices.lock().unwrap()[0].clone();
    let words = "If that is refused for 1m30s, the pod is evicted, unless it belongs to a Job or has no controller that would create it elsewhere.";
    assert!(notice.message.contains(words), "{notice:?}");

    assert_eq!(daemon.figures.refused_pods.get(), 2, "one pod runs, and two wait");
    // A change of the setting concerns the pods that are refused already, too.
    let shorter = Interval(Duration::from_secs(7));
    daemon.kubernetes.send_modify(|kubernetes| kubernetes.refused_after = shorter);
    assert_eq!(daemon.refusals.to_evict()[0].1, shorter.0);

    // Resources become free, and one of the pods starts; the other is removed.
    bench.remove(&first).await;
    bench.runtime.remove_pod(&first_pod.id).await.unwrap();
    bench.run(&second).await.unwrap();
    assert_eq!(daemon.to_evict(), ["third"]);
    assert_eq!(daemon.figures.refused_pods.get(), 1);
    bench.runtime.remove_pod(&third_pod.id).await.unwrap();
    assert_eq!(daemon.to_evict(), [""; 0]);
    assert_eq!(daemon.figures.refused_pods.get(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_with_a_container_is_not_evicted() {
    // The API server does not report the pod: each container is decided separately.
    let known = Arc::new(FakePods::default());
    let bench = evicting(&known);
    let daemon = bench.start().await;
    let two = bench.pod("two", "", &[]).await.unwrap();
    let (one, other) =
        (container(&two, "one", 40, Bytes::gib(1)), container(&two, "other", 40, Bytes::gib(1)));
    bench.run(&one).await.unwrap();
    bench.run(&other).await.unwrap_err();
    assert_eq!(daemon.to_evict(), [""; 0]);

    // A restarted daemon does not evict the pod either.
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    bench.run(&other).await.unwrap_err();
    assert_eq!(daemon.to_evict(), [""; 0]);

    // The pod is not evicted if it starts while the runtime is disconnected.
    let none = bench.pod("none", "", &[]).await.unwrap();
    let none = container(&none, "none", 40, Bytes::gib(1));
    bench.run(&none).await.unwrap_err();
    assert_eq!(daemon.to_evict(), ["none"]);
    bench.runtime.stop();
    bench.runtime.add_running(&bench.spec("none", "", &[]), &none);
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    until("the running pod is known", || daemon.to_evict().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_refusals_for_room_are_evicted() {
    let whole_cores: BTreeMap<_, _> = [("full-pcpus-only".to_owned(), "true".to_owned())].into();
    let none = BTreeMap::new();
    for (setting, options, cpus, expected) in [
        (RefusedPolicy::Evict, whole_cores, 3, None),
        (RefusedPolicy::Evict, none.clone(), 80, Some("bad")),
        (RefusedPolicy::Wait, none, 80, None),
    ] {
        let known = Arc::new(FakePods::default());
        let mut bench = evicting(&known);
        let machine = Machine::builder().nodes(4).sockets(4).cores_per_node(8).smt(2).memory(Bytes::gib(64));
        bench.host = Arc::new(TestHost::new(machine.build().unwrap()));
        bench.config.kubernetes.refused = setting;
        bench.config.cpu_manager_policy_options = options;
        let daemon = bench.start().await;
        let (_, db) = pod(&bench, &known, "bad", cpus).await;
        bench.run(&db).await.unwrap_err();
        assert_eq!(daemon.to_evict(), Vec::from_iter(expected), "{setting:?} {cpus}");
        let message = known.notices.lock().unwrap()[0].message.clone();
        assert_eq!(message.contains("the pod is evicted"), expected.is_some(), "{message}");
        assert_eq!(message.contains("the scheduler does not move the pod"), expected.is_none(), "{message}");
    }
}

//! CPU quotas: a container with exclusive CPUs has none.

use numaward_api::EnforcementMode;
use numaward_config::kubernetes::CpuQuota;

use super::*;

fn resources(cpus: &str) -> Resources {
    Resources::none().with_cpu(cpus.parse().unwrap()).with_memory("1Gi".parse().unwrap())
}

/// Runs a pod of a kubelet with the policy `none`: one container has 2 CPUs, and one has 500m. `pod_level` are its pod-level resources.
async fn pod(bench: &NriBench, known: &FakePods, pod_level: Option<Resources>) -> [ContainerSpec; 2] {
    let containers = [("db", "2"), ("log", "500m")]
        .map(|(name, cpus)| ContainerRequest::guaranteed(name, resources(cpus)));
    known.add_pod("a", containers.into(), pod_level);
    let pod = bench.pod("a", "", &[]).await.unwrap();
    fs::write(bench.dir.path().join("cgroup/kubepods/poda/cpu.max"), "250000 100000").unwrap();
    let specs = [("db", 200_000), ("log", 50_000)].map(|(name, quota)| ContainerSpec {
        cpu_shares: Some(quota * 1024 / 100_000),
        cpu_quota: Some(quota.cast_signed()),
        ..container(&pod, name, 0, Bytes::gib(1))
    });
    for spec in &specs {
        bench.run(spec).await.unwrap();
    }
    specs
}

impl NriBench {
    fn quota(&self, path: &str) -> String {
        let text = self.knob(&format!("{path}/cpu.max"));
        text.strip_suffix(" 100000").unwrap_or(&text).to_owned()
    }

    /// Returns the quotas of the pod and of its containers.
    fn quotas(&self, [db, log]: &[ContainerSpec; 2]) -> [String; 3] {
        [self.quota("kubepods/poda"), self.quota(&path_of(db)), self.quota(&path_of(log))]
    }

    /// Returns the quota that the runtime knows, in microseconds; `None` without a limit.
    fn runtime_quota(&self, spec: &ContainerSpec) -> Option<u128> {
        match self.runtime.container(&spec.id).unwrap().resources.cpu_quota {
            Some(types::Limit::At(quota)) => Some(quota.as_micros()),
            _ => None,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lifts_and_restores_quota() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let specs = pod(&bench, &known, None).await;
    let [db, log] = &specs;
    assert_eq!(bench.cpus(db).len(), 2);
    assert_eq!(bench.quotas(&specs), ["max", "max", "50000"]);
    assert_eq!([db, log].map(|spec| bench.runtime_quota(spec)), [None, Some(50_000)]);

    // The kubelet resizes the container, and writes the new quota of the pod.
    let more = ContainerSpec { cpu_shares: Some(3072), cpu_quota: Some(300_000), ..db.clone() };
    bench.runtime.update_container(&db.id, &more).await.unwrap();
    assert_eq!((bench.cpus(db).len(), bench.runtime_quota(db)), (3, None));
    fs::write(bench.dir.path().join("cgroup/kubepods/poda/cpu.max"), "350000 100000").unwrap();
    until("the quota is removed again", || bench.quotas(&specs) == ["max", "max", "50000"]).await;
    daemon.stop(&bench.runtime).await;

    bench.config.enforcement.mode = EnforcementMode::Off;
    let daemon = bench.start().await;
    assert_eq!(bench.quotas(&specs), ["350000", "300000", "50000"]);
    assert_eq!([db, log].map(|spec| bench.runtime_quota(spec)), [Some(300_000), Some(50_000)]);
    daemon.stop(&bench.runtime).await;

    bench.config.enforcement.mode = EnforcementMode::On;
    let _daemon = bench.start().await;
    until("the quota is removed", || bench.quotas(&specs) == ["max", "max", "50000"]).await;
    assert_eq!(bench.runtime_quota(db), None);
    // Without a container with exclusive CPUs, the quota of the pod is restored.
    bench.remove(db).await;
    assert_eq!(bench.quota("kubepods/poda"), "350000");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_quota_if_still_needed() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let _daemon = bench.start().await;
    let specs = pod(&bench, &known, Some(resources("3"))).await;
    assert_eq!(
        bench.quotas(&specs),
        ["250000", "max", "50000"],
        "the quota of the pod-level resources stays"
    );

    bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.kubernetes.cpu_quota = CpuQuota::Keep;
    let _daemon = bench.start().await;
    let specs = pod(&bench, &known, None).await;
    assert_eq!(bench.quotas(&specs), ["250000", "200000", "50000"]);
    assert_eq!(bench.runtime_quota(&specs[0]), Some(200_000));
}

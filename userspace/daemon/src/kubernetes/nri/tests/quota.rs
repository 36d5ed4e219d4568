//! Quotas of CPU time: none where a container has CPUs of its own.

use numaward_api::EnforcementMode;
use numaward_config::kubernetes::CpuQuota;

use super::*;

fn resources(cpus: &str) -> Resources {
    Resources::none().with_cpu(cpus.parse().unwrap()).with_memory("1Gi".parse().unwrap())
}

/// A pod that the API server knows and a kubelet with policy `none` runs: 2 CPUs and half a one.
async fn pod(bench: &Bench, known: &Known, of_pod: Option<Resources>) -> [ContainerSpec; 2] {
    let containers = [("db", "2"), ("log", "500m")]
        .map(|(name, cpus)| ContainerRequest::guaranteed(name, resources(cpus)));
    known.tell("a", containers.into(), of_pod);
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

impl Bench {
    fn quota(&self, path: &str) -> String {
        let text = self.knob(&format!("{path}/cpu.max"));
        text.strip_suffix(" 100000").unwrap_or(&text).to_owned()
    }

    /// Of the pod, and of these containers.
    fn quotas(&self, [db, log]: &[ContainerSpec; 2]) -> [String; 3] {
        [self.quota("kubepods/poda"), self.quota(&path_of(db)), self.quota(&path_of(log))]
    }

    /// That which the runtime repeats, in microseconds; none: no limit.
    fn repeated_quota(&self, spec: &ContainerSpec) -> Option<u128> {
        match self.runtime.container(&spec.id).unwrap().resources.cpu_quota {
            Some(types::Limit::At(quota)) => Some(quota.as_micros()),
            _ => None,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_cpus_of_its_own_is_not_throttled_on_them_and_gets_its_quota_back() {
    let known = Arc::new(Known::default());
    let mut bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    let specs = pod(&bench, &known, None).await;
    let [db, log] = &specs;
    assert_eq!(bench.cpus(db).len(), 2);
    assert_eq!(bench.quotas(&specs), ["max", "max", "50000"]);
    assert_eq!([db, log].map(|spec| bench.repeated_quota(spec)), [None, Some(50_000)]);

    // The kubelet resizes it, and follows the new limits in the pod.
    let more = ContainerSpec { cpu_shares: Some(3072), cpu_quota: Some(300_000), ..db.clone() };
    bench.runtime.update_container(&db.id, &more).await.unwrap();
    assert_eq!((bench.cpus(db).len(), bench.repeated_quota(db)), (3, None));
    fs::write(bench.dir.path().join("cgroup/kubepods/poda/cpu.max"), "350000 100000").unwrap();
    until("it is lifted again", || bench.quotas(&specs) == ["max", "max", "50000"]).await;
    daemon.stop(&bench.runtime).await;

    bench.config.enforcement.mode = EnforcementMode::Off;
    let daemon = bench.start().await;
    assert_eq!(bench.quotas(&specs), ["350000", "300000", "50000"]);
    assert_eq!([db, log].map(|spec| bench.repeated_quota(spec)), [Some(300_000), Some(50_000)]);
    daemon.stop(&bench.runtime).await;

    bench.config.enforcement.mode = EnforcementMode::On;
    let _daemon = bench.start().await;
    until("it is lifted", || bench.quotas(&specs) == ["max", "max", "50000"]).await;
    assert_eq!(bench.repeated_quota(db), None);
    // The pod has its own again when nobody in it has CPUs.
    bench.remove(db).await;
    assert_eq!(bench.quota("kubepods/poda"), "350000");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_stays_where_it_is_to_stay_and_where_others_have_no_other() {
    let known = Arc::new(Known::default());
    let mut bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    let _daemon = bench.start().await;
    let specs = pod(&bench, &known, Some(resources("3"))).await;
    assert_eq!(bench.quotas(&specs), ["250000", "max", "50000"], "of the pod as a whole");

    bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    bench.config.kubernetes.cpu_quota = CpuQuota::Keep;
    let _daemon = bench.start().await;
    let specs = pod(&bench, &known, None).await;
    assert_eq!(bench.quotas(&specs), ["250000", "200000", "50000"]);
    assert_eq!(bench.repeated_quota(&specs[0]), Some(200_000));
}

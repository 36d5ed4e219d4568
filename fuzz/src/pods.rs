//! Targets for pods: their annotations, and their descriptions by the API server and the container runtime.

use std::{collections::BTreeMap, sync::Arc};

use numaward_config::{Config, policy::StrategyKind};
use numaward_daemon::kubernetes::nri::testing::PodRequestBuilder;
use numaward_engine::{
    KubeletStrategy, NativeOptions, NativeStrategy, PolicyConfig, Quantity, Strategy,
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy},
};
use numaward_guarantee::pod::PodClaim;
use numaward_kube::{
    api,
    nri::types::{Container, Limit, Online, Pod, Resources},
    pod::{self, NoPods, Notice, PodId, PodSource},
};
use numaward_simulation::replay::faults;
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId, ZoneKind};

/// Converters of pods to requests, one for each strategy, with the strategy that decides on them.
pub(crate) struct Builders(Vec<(PodRequestBuilder, Box<dyn Strategy>)>);

impl Builders {
    /// Creates converters that know pods only from the container runtime.
    pub(crate) fn without_api_server() -> Self {
        Self::with_pods(&(Arc::new(NoPods) as _))
    }

    fn with_pods(pods: &Arc<dyn PodSource>) -> Self {
        let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
        let machine = machine.hugepages(HugepageSize(Bytes::mib(2)), 64).build().unwrap();
        let policy = PolicyConfig {
            cpu_manager_policy: CpuManagerPolicy::Static,
            cpu_reservation: Some(Quantity::whole(1)),
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![MemoryReservation {
                numa_node: NodeId(0),
                limits: BTreeMap::from([(ZoneKind::Memory, Quantity::whole(1 << 20))]),
            }],
            topology_manager_policy: TopologyManagerPolicy::BestEffort,
            ..PolicyConfig::default()
        };
        let native = NativeStrategy::new(&machine, &policy, &NativeOptions::default()).unwrap();
        let kubelet = KubeletStrategy::new(&machine, &policy).unwrap();
        let strategies: [(StrategyKind, Box<dyn Strategy>); 2] =
            [(StrategyKind::Native, Box::new(native)), (StrategyKind::Kubelet, Box::new(kubelet))];
        let of = |(strategy, decides)| {
            // No file of this host is read.
            let mut config = Config { strategy, host_root: "/nonexistent".into(), ..Config::default() };
            config.kubernetes.placement_off_namespaces.insert("off".to_owned());
            (PodRequestBuilder::new(Arc::clone(pods), &config), decides)
        };
        Self(strategies.into_iter().map(of).collect())
    }

    /// Converts a container and its pod to requests, and checks the decisions on them.
    pub(crate) fn ask(&self, pod: &Pod, container: &Container, change: &Resources, online: &Online) {
        for (builder, strategy) in &self.0 {
            let asked = builder.build(pod, container, change, online);
            let of_container = asked.container.into_iter().flatten().map(|ask| ask.pod);
            for ask in of_container.chain([asked.pod]) {
                assert!(ask.notes.iter().all(|note| !note.is_empty()));
                let (PodClaim::Pod(request) | PodClaim::Container(request)) = ask.asked else { continue };
                let _ = strategy.check_terms(&ask.terms);
                let idle = strategy.idle();
                let decision = strategy.admit_watched(&idle, &request, &ask.terms, &|_| {});
                let faults = faults(&decision.ledger, &strategy.allocatable());
                assert!(faults.is_empty(), "{faults:?} of {request:?}");
                let name = container.name.as_str().into();
                if decision.outcome.is_ok() {
                    let _ = strategy.resize(&decision.ledger, &request.owner, &name, &asked.resized.0);
                }
            }
        }
    }
}

/// Decides on a pod with these annotations, one per line.
pub(crate) fn annotations(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let annotations = text.lines().filter_map(|line| line.split_once(": "));
    let pod = Pod {
        id: "sandbox".to_owned(),
        name: "pod".to_owned(),
        namespace: if text.len() % 2 == 0 { "off" } else { "prod" }.to_owned(),
        uid: "uid".to_owned(),
        annotations: annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).collect(),
        ..Pod::default()
    };
    let resources = Resources {
        cpu_quota: Some(Limit::At(std::time::Duration::from_millis(200))),
        cpu_period: Some(std::time::Duration::from_millis(100)),
        memory_limit: Some(Limit::At(Bytes::mib(64))),
        ..Resources::default()
    };
    let container = Container {
        id: "id".to_owned(),
        pod_id: "sandbox".to_owned(),
        name: "main".to_owned(),
        cgroup: Some("/kubepods/poduid/id".to_owned()),
        resources,
        ..Container::default()
    };
    let builders = Builders::without_api_server();
    builders.ask(&pod, &container, &Resources::default(), &online());
}

fn online() -> Online {
    let machine = Machine::builder().nodes(2).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap();
    Online::from(&machine)
}

/// Source with a single pod.
#[derive(Debug)]
struct OnePod(Arc<pod::Pod>);

impl PodSource for OnePod {
    fn pod(&self, id: &PodId) -> Option<Arc<pod::Pod>> {
        (self.0.id == *id).then(|| Arc::clone(&self.0))
    }

    fn is_synced(&self) -> bool {
        true
    }

    fn notify(&self, _: Notice) {}
}

/// Returns the annotations of an object in JSON, with which the runtime reports the pod.
fn metadata_annotations(json: &[u8]) -> BTreeMap<String, String> {
    let object: serde_json::Value = serde_json::from_slice(json).unwrap_or_default();
    serde_json::from_value(object["metadata"]["annotations"].clone()).unwrap_or_default()
}

/// Decides on a pod from the API server's description in JSON.
pub(crate) fn pod(data: &[u8]) {
    let Ok(stored) = api::read_pod(data) else { return };
    let known = stored.pod;
    let builders = Builders::with_pods(&(Arc::new(OnePod(Arc::clone(&known))) as _));
    let pod = Pod {
        id: "sandbox".to_owned(),
        name: known.id.name.clone(),
        namespace: known.id.namespace.clone(),
        uid: known.id.uid.clone(),
        annotations: metadata_annotations(data),
        ..Pod::default()
    };
    let change = Resources {
        cpu_shares: Some(2048),
        memory_limit: Some(Limit::At(Bytes::mib(128))),
        ..Resources::default()
    };
    for container in known.request().all_containers().take(4) {
        let container = Container {
            id: "id".to_owned(),
            pod_id: "sandbox".to_owned(),
            name: container.name.to_string(),
            cgroup: Some("/kubepods/burstable/poduid/id".to_owned()),
            ..Container::default()
        };
        builders.ask(&pod, &container, &change, &online());
    }
}

//! Devices of the kubelet: their containers, and their number on each node.
//!
//! The kubelet, its device plugins and the drivers of resource claims assign devices. numaward passes on the kubelet's report of them, so
//! that a client of numaward does not have to call the kubelet too.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use numaward_engine::PodId;
use numaward_kube::{
    api::Pods,
    node_topology::{NodeTopology, Resource},
    pod_resources::{
        Client, PodResourcesError,
        messages::{
            AssignedPodResources, ContainerDevices, ContainerResources, DynamicResource, TopologyInfo,
        },
    },
};
use numaward_topology::{NodeId, NodeSet};
use parking_lot::RwLock;
use tokio::time::{interval, sleep};

/// The interval of calls to the kubelet.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// The minimum time between two calls, if pods change.
const MIN_CALL_DISTANCE: Duration = Duration::from_secs(1);

/// Namespace, pod and name of a container.
type ContainerKey = (String, String, String);

/// Devices that the kubelet reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// Devices of device plugins by container.
    pub held: BTreeMap<ContainerKey, Vec<ContainerDevices>>,
    /// Devices of resource claims by container.
    pub claimed: BTreeMap<ContainerKey, Vec<DynamicResource>>,
    /// All devices of the host.
    pub all: Vec<ContainerDevices>,
    /// The pods in the report by namespace and name, with the UID that the pod of this name had at the time of the report, if it was known.
    pub pods: BTreeMap<(String, String), Option<String>>,
}

impl Devices {
    /// Calls the kubelet, which reports no UIDs. They are those of `known` pods before the call: a pod of the same name may replace one
    /// in the report.
    async fn from_kubelet(socket: &Path, known: Option<&Pods>) -> Result<Self, PodResourcesError> {
        let known = known.map(Pods::all).unwrap_or_default().into_iter().map(|stored| {
            let PodId { namespace, name, uid } = stored.pod.id.clone();
            ((namespace, name), uid)
        });
        let mut uids: BTreeMap<_, _> = known.collect();
        let client = Client::connect(socket).await?;
        let (pods, allocatable) = (client.list().await?, client.allocatable().await?);
        let keys = pods.iter().map(|pod| (pod.namespace.clone(), pod.name.clone()));
        let reported = keys
            .map(|key| {
                let uid = uids.remove(&key);
                (key, uid)
            })
            .collect();
        let (mut held, mut claimed) = (BTreeMap::new(), BTreeMap::new());
        for AssignedPodResources { namespace, name, containers, .. } in pods {
            for ContainerResources { name: container, devices, dynamic_resources, .. } in containers {
                let key = (namespace.clone(), name.clone(), container);
                if !dynamic_resources.is_empty() {
                    claimed.insert(key.clone(), dynamic_resources);
                }
                if !devices.is_empty() {
                    held.insert(key, devices);
                }
            }
        }
        Ok(Self { held, claimed, all: allocatable.devices, pods: reported })
    }

    /// Returns true if the devices of this pod are known: the report has it, or the host has no devices.
    pub fn include(&self, pod: &PodId) -> bool {
        let reported = self.pods.get(&(pod.namespace.clone(), pod.name.clone()));
        self.all.is_empty() || reported.is_some_and(|uid| uid.as_ref().is_none_or(|uid| *uid == pod.uid))
    }

    /// Returns the names of the resources that [`add_to`](Self::add_to) adds.
    pub fn resources_on_nodes(&self) -> BTreeSet<&str> {
        let on_nodes = self.all.iter().filter(|device| !nodes_of(device).is_empty());
        on_nodes.map(|device| device.resource_name.as_str()).collect()
    }

    /// Adds the devices to their nodes. A device on several nodes counts on each of them. A device without a known node counts on none:
    /// the scheduler counts it for the host.
    pub fn add_to(&self, topology: &mut NodeTopology) {
        let held = self.held.values().flatten();
        let held: BTreeSet<(&str, &str)> = held.flat_map(ids).collect();
        let mut counts: BTreeMap<&str, BTreeMap<NodeId, [u64; 2]>> = BTreeMap::new();
        for device in &self.all {
            for node in nodes_of(device).iter() {
                let nodes = counts.entry(&device.resource_name).or_default();
                let [all, free] = nodes.entry(node).or_default();
                *all += device.device_ids.len() as u64;
                *free += ids(device).filter(|id| !held.contains(id)).count() as u64;
            }
        }
        for zone in &mut topology.zones {
            zone.resources.extend(counts.iter().map(|(name, nodes)| {
                let [all, available] = nodes.get(&zone.node).copied().unwrap_or_default();
                Resource { name: (*name).to_owned(), capacity: all, allocatable: all, available }
            }));
        }
    }
}

/// Returns the nodes of devices; empty if they are unknown.
pub fn nodes_of(devices: &ContainerDevices) -> NodeSet {
    devices.topology.as_ref().map(TopologyInfo::node_set).unwrap_or_default()
}

/// Returns the names of the resource and the ids of devices.
fn ids(devices: &ContainerDevices) -> impl Iterator<Item = (&str, &str)> {
    devices.device_ids.iter().map(|id| (devices.resource_name.as_str(), id.as_str()))
}

/// The devices in the latest report of the kubelet. Clones are handles to the same report.
#[derive(Clone, Debug, Default)]
pub struct LatestDevices(Arc<RwLock<Arc<Devices>>>);

impl LatestDevices {
    pub fn get(&self) -> Arc<Devices> {
        self.0.read().clone()
    }

    /// Calls the kubelet every [`POLL_INTERVAL`], and after each change of a pod, which gets its devices before it runs.
    pub fn follow(&self, socket: PathBuf, pods: Option<&Pods>) -> impl Future<Output = ()> + use<> {
        let (latest, mut changes, pods) = (self.0.clone(), pods.map(Pods::changes), pods.cloned());
        async move {
            let mut ticks = interval(POLL_INTERVAL);
            loop {
                let next_change = async {
                    let has_changed = match &mut changes {
                        Some(changes) => changes.changed().await.is_ok(),
                        None => false,
                    };
                    if !has_changed {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    _ = ticks.tick() => {}
                    () = next_change => {}
                }
                match Devices::from_kubelet(&socket, pods.as_ref()).await {
                    Ok(now) => *latest.write() = Arc::new(now),
                    Err(error) => tracing::debug!(%error, "the kubelet does not report its devices"),
                }
                sleep(MIN_CALL_DISTANCE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
    use numaward_kube::{
        node_topology::Zone,
        pod_resources::{
            AssignmentSource,
            messages::{AllocatableResponse, ClaimResource},
            serve,
        },
    };
    use numaward_topology::CpuSet;
    use tokio::net::UnixListener;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::kubernetes::export::{
        AssignedResources, Source,
        assigned::{CallMetrics, PodReporter},
    };

    fn devices(name: &str, ids: &[&str], nodes: &[i64]) -> ContainerDevices {
        let topology =
            Some(TopologyInfo { nodes: nodes.to_vec() }).filter(|topology| !topology.nodes.is_empty());
        let device_ids = ids.iter().map(|&id| id.to_owned()).collect();
        ContainerDevices { resource_name: name.to_owned(), device_ids, topology }
    }

    #[test]
    fn counts_devices_by_node() {
        let zone =
            |node| Zone { node: NodeId(node), distances: vec![], resources: vec![], attributes: vec![] };
        let mut topology = NodeTopology {
            policy: TopologyManagerPolicy::SingleNumaNode,
            scope: TopologyManagerScope::Container,
            zones: vec![zone(0), zone(1)],
            fingerprint: None,
            placement: None,
        };
        let devices = Devices {
            claimed: BTreeMap::new(),
            held: [
                (["n", "p", "c"], vec![devices("nic", &["b"], &[1]), devices("fpga", &["a"], &[])]),
                (["n", "q", "c"], vec![devices("nic", &["gone"], &[1])]),
            ]
            .map(|(container, held)| (container.map(str::to_owned).into(), held))
            .into(),
            all: vec![
                devices("nic", &["a"], &[1]),
                devices("nic", &["b", "c"], &[1]),
                devices("bridge", &["x"], &[0, 1]),
                devices("fpga", &["a"], &[]),
                devices("far", &["y"], &[9]),
            ],
            pods: [("p", None), ("q", Some("uid-q"))]
                .map(|(name, uid)| (("n".to_owned(), name.to_owned()), uid.map(str::to_owned)))
                .into(),
        };
        let pod = |name: &str, uid: &str| PodId {
            namespace: "n".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        };
        assert_eq!(devices.resources_on_nodes(), ["bridge", "far", "nic"].into());
        assert!(devices.include(&pod("p", "any")) && devices.include(&pod("q", "uid-q")));
        assert!(!devices.include(&pod("q", "another")), "the report is of an earlier pod of this name");
        assert!(!devices.include(&pod("new", "any")));
        assert!(Devices::default().include(&pod("new", "any")), "the host has no devices");
        devices.add_to(&mut topology);
        let resources = |zone: &Zone| -> Vec<(String, [u64; 3])> {
            let all = zone.resources.iter();
            all.map(|resource| {
                (resource.name.clone(), [resource.capacity, resource.allocatable, resource.available])
            })
            .collect()
        };
        let expected = |all: [(&str, [u64; 3]); 3]| all.map(|(name, counts)| (name.to_owned(), counts));
        assert_eq!(
            resources(&topology.zones[0]),
            expected([("bridge", [1, 1, 1]), ("far", [0; 3]), ("nic", [0; 3])])
        );
        assert_eq!(
            resources(&topology.zones[1]),
            expected([("bridge", [1, 1, 1]), ("far", [0; 3]), ("nic", [3, 3, 2])])
        );
    }

    /// A kubelet with one container that has a device of a plugin, and one of a resource claim.
    struct Kubelet;

    impl AssignmentSource for Kubelet {
        fn pods(&self) -> Vec<AssignedPodResources> {
            let claim = DynamicResource {
                claim_name: "gpu".to_owned(),
                claim_namespace: "n".to_owned(),
                claim_resources: vec![ClaimResource {
                    cdi_devices: vec!["gpu.example/claim=1".to_owned()],
                    driver_name: "gpu.example".to_owned(),
                    pool_name: "node".to_owned(),
                    device_name: "gpu-0".to_owned(),
                }],
            };
            let container = ContainerResources {
                name: "c".to_owned(),
                devices: vec![devices("nic", &["a"], &[1])],
                dynamic_resources: vec![claim],
                ..ContainerResources::default()
            };
            let [namespace, name] = ["n", "p"].map(str::to_owned);
            vec![AssignedPodResources {
                namespace,
                name,
                containers: vec![container],
                ..AssignedPodResources::default()
            }]
        }

        fn allocatable(&self) -> AllocatableResponse {
            AllocatableResponse::default()
        }
    }

    #[tokio::test]
    async fn passes_on_devices_of_the_kubelet() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("kubelet.sock");
        let stop = CancellationToken::new();
        let _stopped = stop.clone().drop_guard();
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(serve(listener, Arc::new(Kubelet), stop));
        let found = Devices::from_kubelet(&socket, None).await.unwrap();
        let latest = LatestDevices(Arc::new(RwLock::new(Arc::new(found))));
        let source: Source = Arc::new(|| AssignedResources {
            held: Vec::new(),
            free_cpus: CpuSet::new(),
            pod_cpus: CpuSet::new(),
            memory: BTreeMap::new(),
            charged: BTreeMap::new(),
            charged_to_host: BTreeMap::new(),
        });
        let reporter = PodReporter::new(source, None, latest, CallMetrics::default());
        assert_eq!(reporter.pods(), Kubelet.pods());
    }
}

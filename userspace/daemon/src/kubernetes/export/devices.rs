//! The kubelet's devices: who has which, and how many each node has.
//!
//! They are the kubelet's, by its device plugins. numaward passes on what it reports of them, so that a reader of what
//! numaward publishes need not ask the kubelet too.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use numaward_kube::{
    api::Pods,
    node_topology::{NodeTopology, Resource},
    pod_resources::{
        CallError, Client,
        messages::{ContainerDevices, ContainerResources, PodResources, TopologyInfo},
    },
};
use numaward_topology::NodeId;
use parking_lot::RwLock;
use tokio::time::{interval, sleep};

/// How often the kubelet is asked.
const ASK: Duration = Duration::from_secs(10);
/// How long it is not asked again after a pod has changed.
const PAUSE: Duration = Duration::from_secs(1);

/// The kubelet's devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// By namespace, pod and container.
    pub held: BTreeMap<(String, String, String), Vec<ContainerDevices>>,
    /// All there are.
    pub all: Vec<ContainerDevices>,
}

impl Devices {
    async fn ask(socket: &Path) -> Result<Self, CallError> {
        let client = Client::connect(socket).await?;
        let (pods, allocatable) = (client.list().await?, client.allocatable().await?);
        let held = pods.into_iter().flat_map(|PodResources { namespace, name, containers, .. }| {
            let named =
                move |of: ContainerResources| ((namespace.clone(), name.clone(), of.name), of.devices);
            containers.into_iter().map(named)
        });
        let held = held.filter(|(_, devices)| !devices.is_empty()).collect();
        Ok(Self { held, all: allocatable.devices })
    }

    /// Adds them to the nodes they are on. One that is on several counts on each; one whose node is not known is on none,
    /// and the scheduler counts it for the host.
    pub fn add_to(&self, topology: &mut NodeTopology) {
        let held = self.held.values().flatten();
        let held: BTreeSet<(&str, &str)> = held.flat_map(ids).collect();
        let mut counts: BTreeMap<&str, BTreeMap<NodeId, [u64; 2]>> = BTreeMap::new();
        for of in &self.all {
            let nodes = of.topology.as_ref().map(TopologyInfo::node_set).unwrap_or_default();
            for node in nodes.iter() {
                let nodes = counts.entry(&of.resource_name).or_default();
                let [all, free] = nodes.entry(node).or_default();
                *all += of.device_ids.len() as u64;
                *free += ids(of).filter(|id| !held.contains(id)).count() as u64;
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

/// Devices by resource and id.
fn ids(of: &ContainerDevices) -> impl Iterator<Item = (&str, &str)> {
    of.device_ids.iter().map(|id| (of.resource_name.as_str(), id.as_str()))
}

/// The devices as the kubelet reported them last. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct LastReported(Arc<RwLock<Arc<Devices>>>);

impl LastReported {
    /// What was reported last.
    pub fn get(&self) -> Arc<Devices> {
        self.0.read().clone()
    }

    /// Keeps asking the kubelet: now and then, and when a pod has changed, as it has devices before it runs.
    pub fn follow(&self, socket: PathBuf, pods: Option<&Pods>) -> impl Future<Output = ()> + use<> {
        let (known, mut changes) = (self.0.clone(), pods.map(Pods::changes));
        async move {
            let mut ticks = interval(ASK);
            loop {
                let next_change = async {
                    let is_there = match &mut changes {
                        Some(changes) => changes.changed().await.is_ok(),
                        None => false,
                    };
                    if !is_there {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    _ = ticks.tick() => {}
                    () = next_change => {}
                }
                match Devices::ask(&socket).await {
                    Ok(now) => *known.write() = Arc::new(now),
                    Err(error) => tracing::debug!(%error, "the kubelet does not report its devices"),
                }
                sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
    use numaward_kube::node_topology::Zone;

    use super::*;

    fn devices(name: &str, ids: &[&str], nodes: &[i64]) -> ContainerDevices {
        let topology = Some(TopologyInfo { nodes: nodes.to_vec() }).filter(|of| !of.nodes.is_empty());
        let device_ids = ids.iter().map(|&id| id.to_owned()).collect();
        ContainerDevices { resource_name: name.to_owned(), device_ids, topology }
    }

    #[test]
    fn each_node_has_its_devices() {
        let zone =
            |node| Zone { node: NodeId(node), distances: vec![], resources: vec![], attributes: vec![] };
        let mut topology = NodeTopology {
            policy: TopologyManagerPolicy::SingleNumaNode,
            scope: TopologyManagerScope::Container,
            zones: vec![zone(0), zone(1)],
            fingerprint: None,
        };
        let devices = Devices {
            held: [
                (["n", "p", "c"], vec![devices("nic", &["b"], &[1]), devices("fpga", &["a"], &[])]),
                (["n", "q", "c"], vec![devices("nic", &["gone"], &[1])]),
            ]
            .map(|(of, held)| (of.map(str::to_owned).into(), held))
            .into(),
            all: vec![
                devices("nic", &["a"], &[1]),
                devices("nic", &["b", "c"], &[1]),
                devices("bridge", &["x"], &[0, 1]),
                devices("fpga", &["a"], &[]),
                devices("far", &["y"], &[9]),
            ],
        };
        devices.add_to(&mut topology);
        let of = |zone: &Zone| -> Vec<(String, [u64; 3])> {
            let of = zone.resources.iter();
            of.map(|of| (of.name.clone(), [of.capacity, of.allocatable, of.available])).collect()
        };
        let named = |all: [(&str, [u64; 3]); 3]| all.map(|(name, of)| (name.to_owned(), of));
        assert_eq!(of(&topology.zones[0]), named([("bridge", [1, 1, 1]), ("far", [0; 3]), ("nic", [0; 3])]));
        assert_eq!(
            of(&topology.zones[1]),
            named([("bridge", [1, 1, 1]), ("far", [0; 3]), ("nic", [3, 3, 2])])
        );
    }
}

//! CPUs and memory that the kubelet reserves for the system, where the configuration of numaward reserves none.
//!
//! # Problem
//! The scheduler binds pods to a Kubernetes node by the node's *allocatable* resources: the capacity without the kubelet's reservations. If
//! numaward reserves more, it refuses pods that fit the node.
//!
//! # Algorithm
//! The reservations are those of the kubelet's configuration or, if it cannot be read, the difference between the capacity and the
//! allocatable resources of the Kubernetes node. Unless `reservedMemory` says on which nodes memory is reserved, each node gets a part in
//! proportion to its memory. Only keys that are not set are filled in; if a key of memory is set, all of them count as set, because the
//! kubelet requires that they agree with each other. If the kubelet reserves no CPUs, the default stays: the shared pool needs some.

use std::collections::BTreeMap;

use numaward_config::{
    Config,
    policy::{
        Amount, CpuList, CpuManagerPolicy, MEMORY_AVAILABLE, MemoryManagerPolicy, Reservation,
        ReservedMemory, Threshold, Thresholds,
    },
};
use numaward_engine::Quantity;
use numaward_guarantee::policy;
use numaward_kube::api::{NodeAmounts, NodeResources};
use numaward_topology::{Bytes, Machine, NodeId, NumaNode, ZoneKind};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// The kubelet's default threshold of `memory.available`.
const DEFAULT_THRESHOLD: Bytes = Bytes::mib(100);
/// Unit in which memory is divided among nodes.
const MEMORY_UNIT: u64 = 1 << 20;
/// Names of resources.
const CPU: &str = "cpu";
const MEMORY: &str = "memory";

/// Reservations of the kubelet. They are serialized with the keys of a `KubeletConfiguration`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KubeletReservations {
    #[serde(rename = "reservedSystemCPUs")]
    system_cpus: Option<CpuList>,
    #[serde(rename = "kubeReserved")]
    kube: Reservation,
    #[serde(rename = "systemReserved")]
    system: Reservation,
    /// Not omitted if it is empty: a missing key stands for the kubelet's default.
    #[serde(rename = "evictionHard")]
    eviction: Thresholds,
    #[serde(rename = "reservedMemory")]
    memory: Option<Vec<ReservedMemory>>,
}

impl KubeletReservations {
    /// Reads the reservations of a `KubeletConfiguration`. Returns a message with the key if a value is invalid.
    pub fn from_configuration(kubelet: &Value) -> Result<Self, String> {
        let default = || Threshold::Amount(Quantity::whole(DEFAULT_THRESHOLD.0));
        let mut eviction: Option<Thresholds> = field(kubelet, "evictionHard")?;
        let merges = kubelet["mergeDefaultEvictionSettings"].as_bool() == Some(true);
        if eviction.is_none() || merges {
            let thresholds = eviction.get_or_insert_default();
            thresholds.entry(MEMORY_AVAILABLE.to_owned()).or_insert_with(default);
        }
        let memory: Option<Vec<ReservedMemory>> = field(kubelet, "reservedMemory")?;
        let system_cpus: Option<CpuList> = field(kubelet, "reservedSystemCPUs")?;
        Ok(Self {
            system_cpus: system_cpus.filter(|cpus| !cpus.0.is_empty()),
            kube: field(kubelet, "kubeReserved")?.unwrap_or_default(),
            system: field(kubelet, "systemReserved")?.unwrap_or_default(),
            eviction: eviction.unwrap_or_default(),
            memory: memory.filter(|memory| !memory.is_empty()),
        })
    }

    /// Computes the reservations from the resources of a Kubernetes node. Returns a message if a resource is missing.
    pub fn from_node(node: &NodeResources) -> Result<Self, String> {
        let reserved = node.reserved()?;
        let system = [
            (CPU.to_owned(), Amount(Quantity::milli(reserved.cpu_millis))),
            (MEMORY.to_owned(), Amount(Quantity::whole(reserved.memory.0))),
        ];
        Ok(Self { system: system.into(), ..Self::default() })
    }

    /// Returns the configuration with these reservations for the keys that are not set. Returns a message if they do not fit the machine.
    pub fn fill_in(&self, config: &Config, machine: &Machine) -> Result<Config, String> {
        let mut filled = config.clone();
        let has_cpus = |reserved: &Option<Reservation>| {
            reserved.as_ref().is_some_and(|reserved| reserved.contains_key(CPU))
        };
        let sets_memory = config.reserved_memory.is_some()
            || config.kube_reserved.is_some()
            || config.system_reserved.is_some()
            || config.eviction_hard.is_some();
        let sets_cpus = config.reserved_system_cpus.is_some()
            || has_cpus(&config.kube_reserved)
            || has_cpus(&config.system_reserved);
        let fills_cpus = !sets_cpus && config.cpu_policy() == CpuManagerPolicy::Static;
        if fills_cpus {
            filled.reserved_system_cpus.clone_from(&self.system_cpus);
        }
        if !sets_memory {
            let needs_cpus = fills_cpus && self.system_cpus.is_none() && self.reserves_cpus();
            let reservation = |reserved: &Reservation| {
                let mut reserved = reserved.clone();
                reserved.retain(|name, _| *name != CPU || needs_cpus);
                Some(reserved)
            };
            filled.kube_reserved = reservation(&self.kube);
            filled.system_reserved = reservation(&self.system);
            filled.eviction_hard = Some(self.eviction.clone());
            if config.memory_policy() == MemoryManagerPolicy::Static {
                let shares = || self.shares(machine);
                filled.reserved_memory = self.memory.clone().map_or_else(shares, Some);
                if filled.reserved_memory.is_none() {
                    // The kubelet reserves no memory: the default stays.
                    filled.kube_reserved = None;
                    filled.system_reserved = None;
                    filled.eviction_hard = None;
                }
            }
        }
        match policy::strategy(&filled, machine) {
            Ok(_) => Ok(filled),
            Err(problems) => Err(policy::join_problems(&problems)),
        }
    }

    /// Returns the CPUs and memory that a kubelet with these reservations offers to pods.
    pub fn allocatable(&self, machine: &Machine) -> NodeAmounts {
        let reservations = [&self.kube, &self.system];
        let sum = |name: &str, read: fn(Quantity) -> Option<u64>| {
            let amounts = reservations.iter().filter_map(|reserved| reserved.get(name));
            amounts.fold(0, |sum: u64, Amount(amount)| sum.saturating_add(read(*amount).unwrap_or(u64::MAX)))
        };
        let cpus = machine.cpus.len() as u64 * 1000;
        let reserved_cpus = match &self.system_cpus {
            Some(list) => list.0.len() as u64 * 1000,
            None => sum(CPU, Quantity::millis),
        };
        let capacity = machine.nodes.values().fold(0, |sum: u64, node| sum.saturating_add(node.memory.0));
        let pools = machine.nodes.values().flat_map(|node| &node.hugepages);
        let pools =
            pools.fold(0, |sum: u64, (size, pool)| sum.saturating_add(pool.total.saturating_mul(size.0.0)));
        let threshold = self.eviction.get(MEMORY_AVAILABLE);
        let threshold =
            threshold.map_or(0, |threshold| threshold.resolve(Bytes(capacity)).units().unwrap_or(u64::MAX));
        let reserved = sum(MEMORY, Quantity::units).saturating_add(threshold).saturating_add(pools);
        NodeAmounts {
            cpu_millis: cpus.saturating_sub(reserved_cpus),
            memory: Bytes(capacity.saturating_sub(reserved)),
        }
    }

    fn reserves_cpus(&self) -> bool {
        [&self.kube, &self.system]
            .iter()
            .any(|reserved| reserved.get(CPU).is_some_and(|Amount(amount)| !amount.is_zero()))
    }

    /// Divides the reserved memory among the nodes of the machine; `None` if no memory is reserved.
    fn shares(&self, machine: &Machine) -> Option<Vec<ReservedMemory>> {
        let capacity = machine.nodes.values().fold(0, |sum: u64, node| sum.saturating_add(node.memory.0));
        let mut sums: BTreeMap<ZoneKind, u64> = BTreeMap::new();
        let mut add = |kind, amount: Quantity| {
            let sum = sums.entry(kind).or_default();
            *sum = sum.saturating_add(amount.units().unwrap_or(0));
        };
        for (name, Amount(amount)) in self.kube.iter().chain(&self.system) {
            if let Ok(kind) = name.parse() {
                add(kind, *amount);
            }
        }
        if let Some(threshold) = self.eviction.get(MEMORY_AVAILABLE) {
            add(ZoneKind::Memory, threshold.resolve(Bytes(capacity)));
        }
        let mut limits: BTreeMap<NodeId, BTreeMap<ZoneKind, Amount>> = BTreeMap::new();
        for (kind, sum) in sums {
            for (node, bytes) in divide(sum, kind, machine) {
                limits.entry(node).or_default().insert(kind, Amount(Quantity::whole(bytes)));
            }
        }
        let reserved = limits.into_iter().map(|(node, limits)| ReservedMemory { numa_node: node.0, limits });
        Some(reserved.collect::<Vec<_>>()).filter(|reserved| !reserved.is_empty())
    }
}

/// Returns the parts of an amount of memory or hugepages on the nodes, in proportion to the sizes of their zones of this kind. The parts
/// add up to the amount.
fn divide(amount: u64, kind: ZoneKind, machine: &Machine) -> Vec<(NodeId, u64)> {
    let unit = match kind {
        ZoneKind::Memory => MEMORY_UNIT,
        ZoneKind::Hugepages(size) => size.0.0.max(1),
    };
    let has = |node: &NumaNode| match kind {
        ZoneKind::Memory => node.memory.0,
        ZoneKind::Hugepages(size) => {
            node.hugepages.get(&size).map_or(0, |pool| pool.total.saturating_mul(size.0.0))
        }
    };
    let total: u128 = machine.nodes.values().map(|node| u128::from(has(node))).sum();
    if amount == 0 || total == 0 {
        return Vec::new();
    }
    let mut left = amount;
    let mut parts: Vec<_> = machine
        .nodes
        .iter()
        .filter(|(_, node)| has(node) > 0)
        .map(|(&id, node)| {
            let part = u128::from(amount) * u128::from(has(node)) / total;
            let part = u64::try_from(part).unwrap_or(u64::MAX) / unit * unit;
            left = left.saturating_sub(part);
            (id, part)
        })
        .collect();
    // The first node gets the remainder of the division.
    if let Some((_, part)) = parts.first_mut() {
        *part += left;
    }
    parts.retain(|(_, part)| *part > 0);
    parts
}

/// Returns a field of the configuration; `None` if it is missing or null.
fn field<T: DeserializeOwned>(kubelet: &Value, key: &str) -> Result<Option<T>, String> {
    match &kubelet[key] {
        Value::Null => Ok(None),
        value => T::deserialize(value).map(Some).map_err(|error| format!("{key}: {error}")),
    }
}

/// Returns a message if a Kubernetes node offers more CPUs or memory to pods than this configuration can allocate; `None` otherwise.
pub fn excess_of_node(node: &NodeResources, config: &Config, machine: &Machine) -> Option<String> {
    excess(node.allocatable_amounts().ok()?, config, machine)
}

/// Returns what a kubelet offers to pods but this configuration cannot allocate, as a message; `None` if there is no such amount.
pub fn excess(offered: NodeAmounts, config: &Config, machine: &Machine) -> Option<String> {
    let allocatable = policy::strategy(config, machine).ok()?.allocatable();
    let mut excess = Vec::new();
    if config.cpu_policy() == CpuManagerPolicy::Static {
        let ours = allocatable.cpus.len() as u64;
        if offered.cpu_millis / 1000 > ours {
            excess.push(format!("{} CPUs, and numaward {ours}", offered.cpu_millis / 1000));
        }
    }
    if config.memory_policy() == MemoryManagerPolicy::Static {
        let ours: u64 = allocatable
            .memory
            .get(&ZoneKind::Memory)
            .into_iter()
            .flat_map(BTreeMap::values)
            .fold(0, |sum, bytes| sum.saturating_add(bytes.0));
        // The kubelet and the kernel's files of nodes count a few pages differently.
        let tolerance = MEMORY_UNIT * machine.nodes.len() as u64;
        if offered.memory.0 > ours.saturating_add(tolerance) {
            let mib = |bytes: u64| bytes / MEMORY_UNIT;
            excess.push(format!("{} MiB of memory, and numaward {} MiB", mib(offered.memory.0), mib(ours)));
        }
    }
    (!excess.is_empty()).then(|| {
        format!(
            "the Kubernetes node offers pods {}: numaward refuses pods that need the difference",
            excess.join("; ")
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Two nodes with 4 GiB and 4 CPUs each.
    fn machine() -> Machine {
        Machine::builder().nodes(2).sockets(2).cores_per_node(2).smt(2).memory(Bytes::gib(4)).build().unwrap()
    }

    fn fill(ours: Value, kubelet: &Value) -> (String, Vec<u64>) {
        let config: Config = serde_json::from_value(ours).unwrap();
        let reserved = KubeletReservations::from_configuration(kubelet).unwrap();
        reserved_by(&reserved.fill_in(&config, &machine()).unwrap())
    }

    /// Returns the reserved CPUs, and the reserved memory of each node in MiB.
    fn reserved_by(config: &Config) -> (String, Vec<u64>) {
        let allocatable = policy::strategy(config, &machine()).unwrap().allocatable();
        let cpus = &machine().cpu_ids() - &allocatable.cpus;
        let memory = allocatable.memory[&ZoneKind::Memory].values();
        (cpus.to_string(), memory.map(|bytes| (Bytes::gib(4).0 - bytes.0) >> 20).collect())
    }

    #[test]
    fn takes_reservations_of_kubelet() {
        // Only the kubelet's default threshold: 100 MiB. No CPUs are reserved, so the default stays: the first core.
        assert_eq!(fill(json!({}), &json!({})), ("0,4".to_owned(), vec![50, 50]));
        let kubelet = json!({"kubeReserved": {"cpu": "500m", "memory": "300Mi", "pid": "100"},
            "systemReserved": {"cpu": "500m", "memory": "212Mi"}, "evictionHard": {"memory.available": "0.0%"}});
        assert_eq!(fill(json!({}), &kubelet), ("0".to_owned(), vec![256, 256]));
        let list = json!({"reservedSystemCPUs": "1,5", "kubeReserved": {"cpu": "1"},
            "reservedMemory": [{"numaNode": 1, "limits": {"memory": "300Mi"}}],
            "systemReserved": {"memory": "200Mi"}});
        assert_eq!(fill(json!({}), &list), ("1,5".to_owned(), vec![0, 300]));
        for strategy in ["native", "kubelet"] {
            let config = json!({"strategy": strategy});
            assert_eq!(fill(config.clone(), &kubelet), ("0".to_owned(), vec![256, 256]));
            assert_eq!(fill(config, &list), ("1,5".to_owned(), vec![0, 300]));
        }
    }

    #[test]
    fn keeps_configured_reservations() {
        let kubelet = json!({"reservedSystemCPUs": "1,5", "kubeReserved": {"cpu": "2", "memory": "412Mi"}});
        let ours = json!({"reservedSystemCPUs": "2"});
        assert_eq!(fill(ours, &kubelet), ("2".to_owned(), vec![256, 256]));
        let ours = json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}]});
        assert_eq!(fill(ours, &kubelet), ("1,5".to_owned(), vec![1024, 0]));
        let ours = json!({"kubeReserved": {"cpu": "1", "memory": "156Mi"},
            "reservedMemory": [{"numaNode": 0, "limits": {"memory": "256Mi"}}]});
        assert_eq!(fill(ours, &kubelet), ("0".to_owned(), vec![256, 0]));
    }

    #[test]
    fn follows_default_thresholds() {
        let threshold = |kubelet: Value| {
            let reserved = KubeletReservations::from_configuration(&kubelet).unwrap();
            reserved.eviction.get(MEMORY_AVAILABLE).map(ToString::to_string)
        };
        let other = json!({"evictionHard": {"nodefs.available": "5%"}});
        assert_eq!(threshold(other.clone()), None);
        let mut merged = other;
        merged["mergeDefaultEvictionSettings"] = json!(true);
        assert_eq!(threshold(merged), threshold(json!({})));
        assert!(threshold(json!({})).is_some());
    }

    #[test]
    fn invalid_key_is_named() {
        for (kubelet, key) in [
            (json!({"kubeReserved": {"cpu": "x"}}), "kubeReserved"),
            (json!({"reservedSystemCPUs": 3}), "reservedSystemCPUs"),
            (json!({"evictionHard": {"memory.available": "101%"}}), "evictionHard"),
            (json!({"reservedMemory": {}}), "reservedMemory"),
        ] {
            let error = KubeletReservations::from_configuration(&kubelet).unwrap_err();
            assert!(error.starts_with(key), "{error}");
        }
    }

    #[test]
    fn unfit_reservation_is_refused() {
        let kubelet = json!({"reservedMemory": [{"numaNode": 7, "limits": {"memory": "100Mi"}}]});
        let reserved = KubeletReservations::from_configuration(&kubelet).unwrap();
        let error = reserved.fill_in(&Config::default(), &machine()).unwrap_err();
        assert!(error.contains("NUMA node 7"), "{error}");
    }

    fn node(cpu: &str, memory: &str) -> NodeResources {
        NodeResources::from_status(&json!({
            "capacity": {"cpu": "8", "memory": "8388608Ki", "hugepages-2Mi": "512Mi", "pods": "110"},
            "allocatable": {"cpu": cpu, "memory": memory, "hugepages-2Mi": "512Mi", "pods": "110"},
        }))
    }

    #[test]
    fn takes_difference_of_node() {
        // 8 GiB without 512 MiB of hugepages and 612 MiB that are reserved.
        let reserved = KubeletReservations::from_node(&node("7500m", "7068Mi")).unwrap();
        let filled = reserved.fill_in(&Config::default(), &machine()).unwrap();
        assert_eq!(reserved_by(&filled), ("0".to_owned(), vec![306, 306]));
        let incomplete = NodeResources::from_status(&json!({"capacity": {"cpu": "8"}}));
        assert!(KubeletReservations::from_node(&incomplete).unwrap_err().contains("memory"));
    }

    #[test]
    fn computes_offer_of_kubelet() {
        let offer = |kubelet: Value| {
            let reserved = KubeletReservations::from_configuration(&kubelet).unwrap().allocatable(&machine());
            (reserved.cpu_millis, reserved.memory.0 >> 20)
        };
        assert_eq!(offer(json!({})), (8000, 8192 - 100));
        let kubelet =
            json!({"kubeReserved": {"cpu": "500m", "memory": "92Mi"}, "systemReserved": {"cpu": "1"}});
        assert_eq!(offer(kubelet.clone()), (6500, 8000));
        let mut listed = kubelet;
        listed["reservedSystemCPUs"] = json!("0-2");
        assert_eq!(offer(listed), (5000, 8000));
    }

    #[test]
    fn names_excess_of_node() {
        let excess = |node: &NodeResources| excess_of_node(node, &Config::default(), &machine());
        let found = excess(&node("8", "7900Mi")).unwrap();
        assert!(found.contains("8 CPUs, and numaward 6"), "{found}");
        assert!(found.contains("7900 MiB of memory, and numaward 7782 MiB"), "{found}");
        assert_eq!(excess(&node("6500m", "7783Mi")), None);
    }
}

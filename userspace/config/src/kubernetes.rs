//! Kubernetes: placement and observation of this host's pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use educe::Educe;
use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    cluster::{Dra, Kubelet, NodeResourceTopology, PodResources},
    types::Interval,
};

/// Kubernetes: placement and observation of this host's pods.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubernetes {
    /// Placement of containers while the container runtime creates them.
    pub nri: Nri,
    /// The name of this host in Kubernetes. If given, the pods of this host are read from the API server.
    pub node_name: Option<String>,
    /// The UID of the pod that numaward runs in, which it does not evict. The manifests set it.
    pub pod_uid: Option<String>,
    /// The kubeconfig with the address of the API server and the credentials. Default: the service account of the pod
    /// that numaward runs in.
    pub kubeconfig: Option<PathBuf>,
    /// The kubelet of this host.
    pub kubelet: Kubelet,
    /// Reports of the assigned resources to other programs, in the kubelet's format.
    pub pod_resources: PodResources,
    /// Reports of the free resources of each node to the cluster's scheduler.
    pub node_resource_topology: NodeResourceTopology,
    /// Experimental: the NUMA nodes of this host as devices of resource claims (Dynamic Resource Allocation).
    pub dra: Dra,
    /// The key of a taint that this Kubernetes node has from its registration until numaward is ready, such as
    /// `numaward.io/not-ready`. numaward then removes it, with every effect, so that no pod without a toleration of it
    /// starts unpinned on a new node. Needs `kubernetes.nodeName`, and permission to patch `nodes`. Default: no taint is
    /// removed.
    #[schemars(with = "Option<String>", example = &"numaward.io/not-ready")]
    pub startup_taint: Option<TaintKey>,
    /// The namespaces whose pods are placed. In other namespaces, all pods count as `numaward.io/placement: shared`: they
    /// get no exclusive CPUs and no guaranteed memory. Default: the pods of all namespaces are placed.
    pub placement_namespaces: Option<BTreeSet<String>>,
    /// Namespaces in which pods may opt out with the annotation `numaward.io/placement: off`. A container that opts out
    /// may run on all CPUs, even on exclusive CPUs of other workloads. In other namespaces, `off` counts as `shared`.
    #[educe(Default(expression = ["kube-system".to_owned()].into()))]
    pub placement_off_namespaces: BTreeSet<String>,
    /// Namespaces in which pods may use annotations that take more than a resource quota counts:
    /// `numaward.io/hide-siblings` takes up to twice the requested CPUs, and `numaward.io/resctrl-class` joins a class
    /// of caches and memory bandwidth. In other namespaces, these annotations are ignored. Resource claims may have more CPUs
    /// and memory here than their pods request.
    pub beyond_quota_namespaces: BTreeSet<String>,
    /// Experimental: the cgroup that is pinned for the pods of a runtime handler: by the name of the handler in the configuration of
    /// the container runtime (`handler` of a `RuntimeClass`). Default: `none` for handlers with `kata`, `runsc`,
    /// `gvisor`, `firecracker` or `krun` in their names, otherwise `container`.
    pub runtime_handlers: BTreeMap<String, HandlerPin>,
    /// The handling of the CPU quota of a container with exclusive CPUs, and of its pod.
    pub cpu_quota: CpuQuota,
    /// The handling of a pod that started without numaward if its CPUs or memory are not available.
    pub unpinned: UnpinnedPolicy,
    /// The handling of a pod that this host refuses.
    pub refused: RefusedPolicy,
    /// With `kubernetes.refused: evict` or `make-room`: for how long a pod must have been refused before it is evicted.
    #[educe(Default(expression = Interval(Duration::from_secs(30))))]
    pub refused_after: Interval,
}

/// The cgroup that is pinned for the pods of a runtime handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HandlerPin {
    /// The cgroup of each container. Right for runtimes that start the processes of a container in it, such as runc and
    /// crun.
    Container,
    /// The cgroup of the pod, which contains the sandbox with the processes of all containers, and a virtual machine.
    /// Guaranteed pods get the sum of the requests of their containers. Needs `kubernetes.nodeName`. Kata needs
    /// `sandbox_cgroup_only = true`.
    Sandbox,
    /// No guarantee. The cgroup of the pod is kept on the shared pool.
    None,
}

impl HandlerPin {
    /// Returns the default for a runtime handler.
    fn default_for(handler: &str) -> Self {
        let name = handler.to_ascii_lowercase();
        let runs_elsewhere =
            ["kata", "runsc", "gvisor", "firecracker", "krun"].iter().any(|part| name.contains(part));
        if runs_elsewhere { Self::None } else { Self::Container }
    }
}

impl Kubernetes {
    /// The keys that take effect while the daemon runs, for decisions from then on.
    pub const LIVE_KEYS: [&str; 4] = [
        "kubernetes.placementNamespaces",
        "kubernetes.placementOffNamespaces",
        "kubernetes.beyondQuotaNamespaces",
        "kubernetes.refusedAfter",
    ];

    /// Returns these settings with the values of [`Self::LIVE_KEYS`] from others.
    #[must_use]
    pub fn with_live_keys(&self, from: &Self) -> Self {
        Self {
            placement_namespaces: from.placement_namespaces.clone(),
            placement_off_namespaces: from.placement_off_namespaces.clone(),
            beyond_quota_namespaces: from.beyond_quota_namespaces.clone(),
            refused_after: from.refused_after,
            ..self.clone()
        }
    }

    /// Returns the cgroup to pin for the pods of a runtime handler; an empty name is the default handler of the runtime.
    pub fn handler_pin(&self, handler: &str) -> HandlerPin {
        self.runtime_handlers.get(handler).copied().unwrap_or_else(|| HandlerPin::default_for(handler))
    }
}

/// The handling of a pod that this host refuses: its policy cannot be kept, or too little of a resource is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RefusedPolicy {
    /// The pod stays bound to this host, where its requests stay reserved. The kubelet tries again, and starts it as
    /// soon as there is room.
    Wait,
    /// After `kubernetes.refusedAfter`, the pod is also evicted, so that its controller creates a new one, and the
    /// scheduler chooses a host again. One pod at a time, with 30 seconds between two. Pods with a container that was
    /// ever created, pods of a `Job` (which counts them as failed) or a `DaemonSet`, static pods, pods without a
    /// controller, pods in `kubernetes.placementOffNamespaces`, and pods that every host would refuse stay. Without
    /// `kubernetes.nodeName`, all pods stay. Needs permission to create `pods/eviction`.
    #[default]
    Evict,
    /// Running workloads, also containers of pods, are moved to other nodes of this host if the pod fits then, within the
    /// limits of `rebalance`, whose `mode` does not matter here. The room is reserved for the pod, which starts at the
    /// next attempt of the kubelet. A pod for which no moves make room is evicted as with `evict`. Needs `strategy:
    /// native` and `enforcement.mode: on`; otherwise no workload is moved.
    MakeRoom,
}

/// The handling of a pod that started without numaward if its CPUs or memory are not available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnpinnedPolicy {
    /// The pod is reported, uses the shared pool, and is pinned when there is room.
    #[default]
    Report,
    /// The pod is also evicted after 30 seconds, so that its controller creates a new one. One pod at a time, with 30
    /// seconds between two, and as each `PodDisruptionBudget` allows. Pods of a `DaemonSet`, static pods, pods without
    /// a controller, and pods in `kubernetes.placementOffNamespaces` stay. Needs `kubernetes.nodeName`, and permission
    /// to create `pods/eviction`.
    Evict,
}

/// The handling of the CPU quota of a container with exclusive CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CpuQuota {
    /// The quota of the container and of its pod is removed, as in Kubernetes since 1.33
    /// (`DisableCPUQuotaWithExclusiveCPUs`). The exclusive CPUs are a sufficient limit, and a quota would throttle the
    /// container on them. Other containers keep their quota.
    #[default]
    Remove,
    /// The quota stays.
    Keep,
}

/// The default socket of containerd and CRI-O for plugins.
const DEFAULT_SOCKET: &str = "/var/run/nri/nri.sock";

/// The Node Resource Interface, by which containerd and CRI-O ask for the placement of a container.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Nri {
    /// Places containers. Needs a writable directory of the control socket, like every guarantee.
    pub enabled: bool,
    /// The socket of the container runtime.
    #[educe(Default(expression = PathBuf::from(DEFAULT_SOCKET)))]
    pub socket: PathBuf,
    /// The plugin's name.
    #[schemars(with = "String", regex(pattern = r"^[a-zA-Z0-9_.+-]+$"), example = &"numaward")]
    #[educe(Default(expression = PluginName("numaward".to_owned())))]
    pub plugin_name: PluginName,
    /// The position of the plugin in the order of calls: two digits, called in ascending order.
    #[schemars(with = "String", regex(pattern = r"^\d\d$"), example = &"90")]
    #[educe(Default(expression = PluginIndex(90)))]
    pub plugin_index: PluginIndex,
    /// The handling of containers that another plugin or the kubelet has pinned already: when they are created, and if
    /// they run already when the runtime connects.
    pub when_pinned: PinnedPolicy,
}

/// The key of a taint: a name of at most 63 characters, with an optional prefix that ends with `/`.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub struct TaintKey(String);

impl FromStr for TaintKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
        let is_part = |part: &str, most: usize, others: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || others.contains(c);
            let is_inner = |end: Option<char>| end.is_some_and(|c| c.is_ascii_alphanumeric());
            part.len() <= most
                && part.chars().all(allowed)
                && is_inner(part.chars().next())
                && is_inner(part.chars().next_back())
        };
        if !is_part(name, 63, "-_.") || !prefix.is_none_or(|prefix| is_part(prefix, 253, "-.")) {
            return Err(format!(
                "{text:?} cannot be the key of a taint (expected such as `numaward.io/not-ready`)"
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

serde_as_text!(TaintKey);

/// The name of a plugin: letters, digits and `_.+-`.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub struct PluginName(String);

impl FromStr for PluginName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c);
        if text.is_empty() || !text.chars().all(allowed) {
            let expected = "expected letters, digits and `_.+-`, at least one";
            return Err(format!("{text:?} cannot name an NRI plugin ({expected})"));
        }
        Ok(Self(text.to_owned()))
    }
}

serde_as_text!(PluginName);

/// The position of a plugin in the order of calls: two digits. The runtime calls plugins in ascending order, and each
/// sees the changes of the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
#[display("{_0:02}")]
pub struct PluginIndex(u8);

impl FromStr for PluginIndex {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.as_bytes() {
            [tens @ b'0'..=b'9', ones @ b'0'..=b'9'] => Ok(Self((tens - b'0') * 10 + (ones - b'0'))),
            _ => Err(format!(
                "{text:?} cannot be the index of an NRI plugin (expected two digits, such as `90`)"
            )),
        }
    }
}

serde_as_text!(PluginIndex);

/// The handling of containers that another program has pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PinnedPolicy {
    /// They are not changed.
    #[default]
    Yield,
    /// They are placed anyway. If a plugin has pinned them, the runtime then fails to create them.
    Override,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_invalid_plugin_names() {
        for name in ["numaward", "a", "A_b.c+d-9"] {
            assert_eq!(name.parse::<PluginName>().unwrap().to_string(), name);
        }
        for name in ["", "a b", "ä", "a/b", "a\n"] {
            assert!(name.parse::<PluginName>().is_err(), "{name:?}");
        }
        for index in ["00", "07", "90"] {
            assert_eq!(index.parse::<PluginIndex>().unwrap().to_string(), index);
        }
        for index in ["", "9", "100", "-1", "+1", "1a", "٠١"] {
            assert!(index.parse::<PluginIndex>().is_err(), "{index:?}");
        }
    }

    #[test]
    fn handlers_of_machines_are_not_pinned() {
        let read: Kubernetes =
            serde_json::from_str(r#"{"runtimeHandlers": {"kata-qemu": "sandbox", "odd": "none"}}"#).unwrap();
        for (handler, pin) in [
            ("", HandlerPin::Container),
            ("runc", HandlerPin::Container),
            ("crun", HandlerPin::Container),
            ("nvidia", HandlerPin::Container),
            ("kata-clh", HandlerPin::None),
            ("Kata", HandlerPin::None),
            ("runsc", HandlerPin::None),
            ("my-gvisor", HandlerPin::None),
            ("krun", HandlerPin::None),
            ("kata-qemu", HandlerPin::Sandbox),
            ("odd", HandlerPin::None),
        ] {
            assert_eq!(read.handler_pin(handler), pin, "{handler}");
        }
    }

    #[test]
    fn refuses_invalid_taint_keys() {
        for key in ["numaward.io/not-ready", "a", "A_b.c-9", "a.b/c"] {
            assert_eq!(key.parse::<TaintKey>().unwrap().to_string(), key);
        }
        let long = "a".repeat(64);
        for key in ["", "/", "a/", "/a", "a/b/c", "-a", "a:NoSchedule", "a_b/c", "ä", long.as_str()] {
            assert!(key.parse::<TaintKey>().is_err(), "{key:?}");
        }
    }

    #[test]
    fn plugin_defaults_survive_round_trip() {
        let nri = Nri::default();
        assert!(!nri.enabled);
        assert_eq!(nri.socket, PathBuf::from("/var/run/nri/nri.sock"));
        let text = serde_json::to_string(&nri).unwrap();
        assert!(
            text.contains(r#""pluginName":"numaward","pluginIndex":"90","whenPinned":"yield""#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Nri>(&text).unwrap(), nri);
        for (text, problem) in [
            (r#"{"pluginName":"a b"}"#, "cannot name an NRI plugin"),
            (r#"{"pluginIndex":"9"}"#, "two digits"),
            (r#"{"whenPinned":"maybe"}"#, "expected `yield` or `override`"),
        ] {
            let error = serde_json::from_str::<Nri>(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}

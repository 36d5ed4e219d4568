//! Kubernetes: how this host's pods are placed and watched.

use std::{collections::BTreeSet, path::PathBuf, str::FromStr};

use educe::Educe;
use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cluster::{Kubelet, NodeResourceTopology, PodResources};

/// Kubernetes.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubernetes {
    /// Placing containers while the container runtime creates them.
    pub nri: Nri,
    /// The name of this host in Kubernetes. With it, the pods of this host are read from the API server.
    pub node_name: Option<String>,
    /// How to reach the API server, and as whom. Default: as the service account of the pod that numaward runs in.
    pub kubeconfig: Option<PathBuf>,
    /// The kubelet of this host.
    pub kubelet: Kubelet,
    /// Reports to others what was assigned, in the kubelet's words.
    pub pod_resources: PodResources,
    /// Reports to the cluster's scheduler what is free on each node.
    pub node_resource_topology: NodeResourceTopology,
    /// The namespaces whose pods may opt out with the annotation `numaward.io/placement: off`. A container that does may
    /// run on all CPUs, also on those that are exclusive to others. In other namespaces `off` counts as `shared`.
    #[educe(Default(expression = ["kube-system".to_owned()].into()))]
    pub placement_off_namespaces: BTreeSet<String>,
    /// The namespaces whose pods may use annotations that take more from others than a quota counts: `numaward.io/hide-siblings` takes up
    /// to twice the CPUs that are requested, and `numaward.io/resctrl-class` joins a class of caches and memory bandwidth. In other
    /// namespaces they count as not given.
    pub beyond_quota_namespaces: BTreeSet<String>,
    /// What becomes of the quota of CPU time of a container that has CPUs of its own, and of its pod.
    pub cpu_quota: CpuQuota,
    /// What becomes of a pod that was started without numaward, and whose CPUs or memory are not there.
    pub unpinned: UnpinnedPolicy,
}

/// What becomes of a pod that was started without numaward, and whose CPUs or memory are not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnpinnedPolicy {
    /// It is reported, shares what is nobody's, and is pinned when there is room.
    #[default]
    Report,
    /// After 30 seconds it is also evicted, so that its controller makes it anew. One at a time, with 30 seconds in
    /// between, and as each `PodDisruptionBudget` allows. Pods of a `DaemonSet`, static pods, pods without a controller,
    /// and those in `kubernetes.placementOffNamespaces` stay. Needs `kubernetes.nodeName`, and the right to create `pods/eviction`.
    Evict,
}

/// What becomes of the quota of CPU time of a container that has CPUs of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CpuQuota {
    /// There is none, nor one of its pod, as in Kubernetes since 1.33 (`DisableCPUQuotaWithExclusiveCPUs`). Its CPUs are
    /// limit enough, and a quota throttles it on them. Other containers keep theirs.
    #[default]
    Remove,
    /// It stays.
    Keep,
}

/// Where containerd and CRI-O listen for plugins, unless configured otherwise.
const DEFAULT_SOCKET: &str = "/var/run/nri/nri.sock";

/// The Node Resource Interface, by which containerd and CRI-O ask where a container is to run.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Nri {
    /// Whether containers are placed. Needs the control socket's directory to be writable, like every guarantee.
    pub enabled: bool,
    /// The runtime's socket.
    #[educe(Default(expression = PathBuf::from(DEFAULT_SOCKET)))]
    pub socket: PathBuf,
    /// The plugin's name.
    #[schemars(with = "String", regex(pattern = r"^[a-zA-Z0-9_.+-]+$"), example = &"numaward")]
    #[educe(Default(expression = PluginName("numaward".to_owned())))]
    pub plugin_name: PluginName,
    /// The plugin's place among others: two digits, asked in ascending order.
    #[schemars(with = "String", regex(pattern = r"^\d\d$"), example = &"90")]
    #[educe(Default(expression = PluginIndex(90)))]
    pub plugin_index: PluginIndex,
    /// What to do with containers that another plugin or the kubelet has pinned already: when they are created, and when
    /// they run already as the runtime is connected.
    pub when_pinned: PinnedPolicy,
}

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

/// A plugin's place among the others: two digits. They are asked in ascending order, and each sees what the
/// ones before have set.
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

/// What to do with containers that somebody else has pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PinnedPolicy {
    /// Leave them alone.
    #[default]
    Yield,
    /// Place them all the same. Where a plugin has pinned them, the runtime then fails their creation.
    Override,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_indices_are_checked() {
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
    fn the_defaults_of_the_plugin_are_read_back() {
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

//! Kubernetes: how this host's pods are placed and watched.

use std::path::PathBuf;

use numaward_kube::nri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cluster::{Kubelet, NodeResourceTopology, PodResources};

/// Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
}

/// The Node Resource Interface, by which containerd and CRI-O ask where a container shall run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Nri {
    /// Whether containers are placed. Needs the control socket's directory to be writable, like every guarantee.
    pub enabled: bool,
    /// The runtime's socket.
    pub socket: PathBuf,
    /// The plugin's name.
    #[schemars(with = "String", regex(pattern = r"^[a-zA-Z0-9_.+-]+$"), example = &"numaward")]
    pub plugin_name: nri::PluginName,
    /// The plugin's place among others: two digits, asked in ascending order.
    #[schemars(with = "String", regex(pattern = r"^\d\d$"), example = &"90")]
    pub plugin_index: nri::PluginIndex,
    /// What to do with containers that another plugin or the kubelet has pinned already.
    pub when_pinned: WhenPinned,
}

impl Default for Nri {
    fn default() -> Self {
        let nri::Options { socket, name, index, .. } = nri::Options::default();
        Self {
            enabled: false,
            socket,
            plugin_name: name,
            plugin_index: index,
            when_pinned: WhenPinned::default(),
        }
    }
}

/// What to do with containers that somebody else has pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WhenPinned {
    /// Leave them alone.
    #[default]
    Yield,
    /// Place them all the same. Where a plugin has pinned them, the runtime then fails their creation.
    Override,
}

impl Nri {
    /// The plugin's options.
    pub fn options(&self) -> nri::Options {
        nri::Options {
            socket: self.socket.clone(),
            name: self.plugin_name.clone(),
            index: self.plugin_index,
            when_pinned: match self.when_pinned {
                WhenPinned::Yield => nri::WhenPinned::Yield,
                WhenPinned::Override => nri::WhenPinned::Override,
            },
            ..nri::Options::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_the_plugins_and_read_back() {
        let nri = Nri::default();
        assert!(!nri.enabled);
        assert_eq!(nri.options().socket, PathBuf::from(nri::DEFAULT_SOCKET));
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

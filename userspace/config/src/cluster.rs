//! Kubernetes: the operating mode, the kubelet of this host, and reports to other programs.

use std::{path::PathBuf, time::Duration};

use educe::Educe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Interval;

/// The operating mode, which determines whether numaward places workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OperatingMode {
    /// numaward gives guarantees and enforces them.
    Enforce,
    /// numaward only observes, and checks the guarantees of the kubelet. Nothing is written.
    Observe,
}

/// The kubelet of this host.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubelet {
    /// The directory of the kubelet, with its configuration and its state files; a path of the host.
    #[educe(Default(expression = PathBuf::from("/var/lib/kubelet")))]
    pub directory: PathBuf,
    /// The socket of the kubelet's PodResources API; a path of the host. Default: in its directory.
    pub pod_resources_socket: Option<PathBuf>,
}

/// Reports of the assigned resources to other programs, in the kubelet's format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodResources {
    /// The socket on which the PodResources API is served, in another directory than `controlSocket`, as agents mount it. Default: it is
    /// not served.
    pub socket: Option<PathBuf>,
}

/// Reports of the free resources of each node to the cluster's scheduler, as a NodeResourceTopology.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NodeResourceTopology {
    /// Publishes the reports. Needs `kubernetes.nodeName`.
    pub enabled: bool,
    /// The minimum time between two updates.
    #[educe(Default(expression = Interval(Duration::from_secs(5))))]
    pub interval: Interval,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in docs/kubernetes.md is computed from this interval.
    #[test]
    fn update_interval_matches_docs() {
        let page = include_str!("../../../docs/kubernetes.md");
        let line = page.lines().find(|line| line.starts_with("| NodeResourceTopologies: patch")).unwrap();
        let seconds = NodeResourceTopology::default().interval.0.as_secs();
        let (each, all) = (format!("at most once in {seconds} s"), format!("| {},000 requests", 5 / seconds));
        assert!(line.contains(&each) && line.contains(&all), "{line}");
    }
}

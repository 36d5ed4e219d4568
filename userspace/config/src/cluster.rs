//! Kubernetes: the API server, the kubelet beside us, and what is reported to others.

use std::{path::PathBuf, time::Duration};

use educe::Educe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Interval;

/// Whether numaward places workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OperatingMode {
    /// It gives guarantees and enforces them.
    Enforce,
    /// It only looks, and holds the kubelet to the kubelet's own promises. Nothing is written.
    Observe,
}

/// The kubelet of this host.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubelet {
    /// Its directory, with its configuration and its state files; a path of the host.
    #[educe(Default(expression = PathBuf::from("/var/lib/kubelet")))]
    pub directory: PathBuf,
    /// The socket on which it reports what it assigned, a path of the host. Default: in its directory.
    pub pod_resources_socket: Option<PathBuf>,
}

/// Reports to others what was assigned, in the kubelet's words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodResources {
    /// The socket on which the PodResources API is served. Default: it is not served.
    pub socket: Option<PathBuf>,
}

/// Reports to the cluster's scheduler what is free on each node, as a NodeResourceTopology.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NodeResourceTopology {
    /// Whether it is published. Needs `kubernetes.nodeName`.
    pub enabled: bool,
    /// The least time between two updates.
    #[educe(Default(expression = Interval(Duration::from_secs(5))))]
    pub interval: Interval,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of docs/kubernetes.md is derived from it.
    #[test]
    fn updates_are_as_rare_as_the_book_says() {
        let page = include_str!("../../../docs/kubernetes.md");
        let line = page.lines().find(|line| line.starts_with("| NodeResourceTopologies: patch")).unwrap();
        let seconds = NodeResourceTopology::default().interval.0.as_secs();
        let (each, all) = (format!("at most once in {seconds} s"), format!("| {},000 requests", 5 / seconds));
        assert!(line.contains(&each) && line.contains(&all), "{line}");
    }
}

//! The kubelet of this host: its policies, and the observation of the guarantees that it gives itself.
//!
//! A kubelet with the `static` CPU manager or the `Static` memory manager pins containers itself. If numaward pinned the same containers,
//! both would overwrite each other's values. On such a host, numaward therefore *observes* ([`OperatingMode`]): it reads the guarantees
//! of the kubelet ([`follow()`]), finds the cgroups of their containers, and gives the probes the guaranteed nodes. Memory on another
//! node counts as a miss. The kubelet itself cannot report misses: it knows the assigned nodes, not the nodes of the pages.
//!
//! In this mode, numaward writes no cgroup, no ledger and no file of the kubelet.

pub mod configuration;
mod follow;
pub mod names;
pub mod policies;
pub mod reservations;
mod stored_reservations;
mod version;
pub mod view;
mod watch;

use std::path::{Path, PathBuf};

use numaward_config::{Config, OperatingMode};
use numaward_kube::pod_resources::KUBELET_SOCKET;

pub use self::{
    follow::follow,
    policies::Policies,
    version::with_kubelet_version,
    watch::{KubeletTiming, find_memory_qos, prepare, start_watching, watch, with_kubelet_reservations},
};

/// Error: the kubelet pins containers itself, and numaward is configured to do so too.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the kubelet of this host pins containers itself ({}), and mode is \"enforce\": both would write the same cgroups. \
     Set mode: observe to check the guarantees of the kubelet, or switch off its managers: {}",
    .found.join(", "),
    .fix.join(" and ")
)]
pub struct KubeletConflict {
    /// The policies of the kubelet that pin containers, each with its file.
    pub found: Vec<String>,
    /// The fields to change and their values.
    pub fix: Vec<String>,
}

/// Returns the directory of the kubelet as this process sees it.
pub fn directory(config: &Config) -> PathBuf {
    below(&config.host_root, &config.kubernetes.kubelet.directory)
}

/// Returns the kubelet's socket of the PodResources API as this process sees it.
pub fn pod_resources_socket(config: &Config) -> PathBuf {
    match &config.kubernetes.kubelet.pod_resources_socket {
        Some(socket) => below(&config.host_root, socket),
        None => directory(config).join(KUBELET_SOCKET),
    }
}

/// Returns a path of the host as this process sees it, if `root` is the root of the host.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the mode of the daemon. The default is `observe` if the kubelet pins containers itself, and `enforce` otherwise.
pub fn mode(config: &Config, policies: &Policies) -> Result<OperatingMode, KubeletConflict> {
    match (config.mode, policies.pins()) {
        (Some(OperatingMode::Enforce), Some(conflict)) => Err(conflict),
        (Some(mode), _) => Ok(mode),
        (None, Some(_)) => Ok(OperatingMode::Observe),
        (None, None) => Ok(OperatingMode::Enforce),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_follows_kubelet_policies() {
        let pins = Policies {
            cpu: Some(policies::FoundPolicy::new("static", "/x", "cpuManagerPolicy")),
            ..Policies::default()
        };
        let none = Policies::default();
        let config = |mode| Config { mode, ..Config::default() };
        assert_eq!(mode(&config(None), &none), Ok(OperatingMode::Enforce));
        assert_eq!(mode(&config(None), &pins), Ok(OperatingMode::Observe));
        assert_eq!(mode(&config(Some(OperatingMode::Observe)), &none), Ok(OperatingMode::Observe));
        assert_eq!(mode(&config(Some(OperatingMode::Observe)), &pins), Ok(OperatingMode::Observe));
        assert_eq!(mode(&config(Some(OperatingMode::Enforce)), &none), Ok(OperatingMode::Enforce));
        let refused = mode(&config(Some(OperatingMode::Enforce)), &pins).unwrap_err().to_string();
        for words in ["mode: observe", "cpuManagerPolicy: static", "/x", "cpuManagerPolicy: none"] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
    }

    #[test]
    fn joins_host_paths_to_root() {
        assert_eq!(
            below(Path::new("/host"), Path::new("/var/lib/kubelet")),
            Path::new("/host/var/lib/kubelet")
        );
        assert_eq!(below(Path::new("/"), Path::new("/var")), Path::new("/var"));
    }
}

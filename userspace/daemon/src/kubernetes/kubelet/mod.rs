//! The kubelet beside us: what it places itself, and whether that is kept.
//!
//! A kubelet with the `static` CPU manager or the `Static` memory manager pins containers itself. Two that pin the same
//! containers fight; so where it does, numaward does not ([`OperatingMode`]). It *observes*: it takes the kubelet's promises for
//! its own ([`follow()`]), finds the cgroups of the containers they are for, and gives the probes the nodes on which their
//! memory is to be. What lies elsewhere is a miss against the kubelet's own promise. The kubelet cannot know that: it
//! knows what it assigned, not what happened.
//!
//! In this mode nothing is written: no cgroup, no ledger, no file of the kubelet.

mod follow;
pub mod names;
pub mod policies;
mod version;
pub mod view;

use std::path::{Path, PathBuf};

use numaward_config::{Config, OperatingMode};
use numaward_kube::pod_resources::KUBELET_SOCKET;

pub use self::{follow::follow, policies::Policies, version::with_version};

/// A kubelet places containers itself, and numaward was configured to do so too.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the kubelet of this host pins containers itself ({}), and mode is \"enforce\": both would write the same cgroups. \
     Set mode: observe to hold the kubelet to its promises, or let the kubelet leave it to numaward: {}",
    .found.join(", "),
    .fix.join(" and ")
)]
pub struct KubeletConflict {
    /// What was found, and where.
    pub found: Vec<String>,
    /// Which fields to change, to what.
    pub fix: Vec<String>,
}

/// The directory of the kubelet as this process sees it.
pub fn directory(config: &Config) -> PathBuf {
    below(&config.host_root, &config.kubernetes.kubelet.directory)
}

/// The kubelet's socket of the PodResources API as this process sees it.
pub fn pod_resources_socket(config: &Config) -> PathBuf {
    match &config.kubernetes.kubelet.pod_resources_socket {
        Some(socket) => below(&config.host_root, socket),
        None => directory(config).join(KUBELET_SOCKET),
    }
}

/// A path of the host as this process sees it.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The mode to run in. By default, it is `observe` where the kubelet pins containers itself, else `enforce`.
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
    fn two_masters_are_refused_and_the_default_is_what_fits() {
        let pins = Policies {
            cpu: Some(policies::Found::new("static", "/x", "cpuManagerPolicy")),
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
    fn paths_of_the_host_are_below_its_root() {
        assert_eq!(
            below(Path::new("/host"), Path::new("/var/lib/kubelet")),
            Path::new("/host/var/lib/kubelet")
        );
        assert_eq!(below(Path::new("/"), Path::new("/var")), Path::new("/var"));
    }
}

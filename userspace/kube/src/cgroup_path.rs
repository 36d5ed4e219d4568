//! Cgroup paths of pods and containers.
//!
//! The kubelet and the runtime name a cgroup in one of two ways, depending on the *cgroup driver*:
//!
//! | driver | container | pod |
//! |---|---|---|
//! | cgroupfs | `/kubepods/burstable/podUID/ID` | `/kubepods/burstable/podUID` |
//! | systemd | `kubepods-burstable-podUID.slice:cri-containerd:ID` | `kubepods-burstable-podUID.slice`, also with its parents before it |
//!
//! With systemd, the dashes in the name of a slice determine its parent slices, dashes within the pod's UID become
//! underscores, and the container is the scope `cri-containerd-ID.scope`. All paths here are absolute below the root
//! of the cgroup hierarchy, without a `/` at the end.
//!
//! Sources: OCI runtime specification (`cgroupsPath`), systemd.slice(5), the kubelet's cgroup names
//! (`kubepods`, `burstable`, `besteffort`, `podUID`).

use std::path::{Component, Path};

use numaward_engine::QosClass;

/// Suffix of the names of slices.
const SLICE_SUFFIX: &str = ".slice";

/// Returns the cgroup of a container, from `linux.cgroupsPath` of its OCI specification.
///
/// If the kubelet and the runtime use different drivers, the runtime derives another path, and this cgroup does not exist.
///
/// # Errors
///
/// The problem with a text that is not the path of a cgroup.
pub fn container_path(cgroups_path: &str) -> Result<String, &'static str> {
    let parts: Vec<&str> = cgroups_path.split(':').collect();
    match parts[..] {
        [path] => normalize(path),
        [slice, prefix, name] => {
            // Runtimes use this slice if none is given.
            let slice = if slice.is_empty() { "system.slice" } else { slice };
            let parent = expand_slice(slice)?;
            if prefix.is_empty() || name.is_empty() || [prefix, name].iter().any(|part| part.contains('/')) {
                return Err("the scope's prefix or name is empty, or has a `/`");
            }
            Ok(format!("{parent}/{prefix}-{name}.scope"))
        }
        _ => Err("it has colons, but not two"),
    }
}

/// Returns the cgroup of a pod, from the `cgroup_parent` that the kubelet gave the runtime.
///
/// # Errors
///
/// The problem with a text that is not the path of a cgroup.
pub fn pod_path(cgroup_parent: &str) -> Result<String, &'static str> {
    let name = cgroup_parent.rsplit('/').next().unwrap_or(cgroup_parent);
    if name.ends_with(SLICE_SUFFIX) { expand_slice(name) } else { normalize(cgroup_parent) }
}

/// Normalizes a path in the notation of the cgroupfs driver.
fn normalize(path: &str) -> Result<String, &'static str> {
    if !path.starts_with('/') {
        return Err("it is not absolute");
    }
    let mut clean = String::new();
    for component in Path::new(path).components() {
        match component {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => {
                clean.push('/');
                clean.push_str(&name.to_string_lossy());
            }
            Component::ParentDir | Component::Prefix(_) => return Err("it goes up with `..`"),
        }
    }
    if clean.is_empty() { Err("it is the root") } else { Ok(clean) }
}

/// Returns the path of a slice: `/a.slice/a-b.slice` for `a-b.slice`.
fn expand_slice(slice: &str) -> Result<String, &'static str> {
    let name = slice.strip_suffix(SLICE_SUFFIX).ok_or("the parent is not a slice")?;
    if name == "-" {
        return Ok(String::new());
    }
    if name.contains('/') || name.split('-').any(str::is_empty) {
        return Err("the slice's name has an empty part or a `/`");
    }
    let mut path = String::new();
    for end in name.match_indices('-').map(|(at, _)| at).chain([name.len()]) {
        path.push('/');
        path.push_str(&name[..end]);
        path.push_str(SLICE_SUFFIX);
    }
    Ok(path)
}

/// Position of a pod among the kubelet's cgroups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLevels {
    /// The pod's `QoS` class, which determines its parent cgroup.
    pub qos: QosClass,
    /// The cgroups from the kubelet's own (`/kubepods`) down to the pod's, outermost first. A memory
    /// protection is effective only up to the smallest value among them.
    pub cgroups: Vec<String>,
}

/// Returns the position of the pod whose cgroup, or a cgroup below it, has this path. `None` if the path is not within a pod.
///
/// The kubelet's own cgroup may be below the root (`--cgroup-root`, Kubernetes nodes in containers).
pub fn pod_levels(path: &str) -> Option<PodLevels> {
    let names: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
    let (pod, qos) = names.iter().enumerate().find_map(|(at, name)| {
        let qos = match name.strip_suffix(SLICE_SUFFIX) {
            Some(slice) => systemd_class(slice)?,
            None => cgroupfs_class(&names[..at], name)?,
        };
        Some((at, qos))
    })?;
    let kubepods = names[..pod].iter().rposition(|name| {
        let name = name.strip_suffix(SLICE_SUFFIX).unwrap_or(name);
        name == "kubepods" || name.ends_with("-kubepods")
    })?;
    let cgroups = (kubepods..=pod).map(|end| format!("/{}", names[..=end].join("/"))).collect();
    Some(PodLevels { qos, cgroups })
}

/// Returns the class of a cgroup `podUID` from the names of its parents; `None` if it is not a pod.
fn cgroupfs_class(parents: &[&str], name: &str) -> Option<QosClass> {
    name.strip_prefix("pod").filter(|uid| !uid.is_empty())?;
    class_below(parents)
}

/// Returns the class of a pod's slice from its name without `.slice`; `None` if it is not a pod.
fn systemd_class(slice: &str) -> Option<QosClass> {
    let (parents, uid) = slice.rsplit_once("-pod")?;
    if uid.is_empty() || uid.contains('-') {
        return None;
    }
    class_below(&parents.split('-').collect::<Vec<_>>())
}

/// Returns the class of pods below these cgroups, outermost first; `None` if they do not end with cgroups of the kubelet.
fn class_below(parents: &[&str]) -> Option<QosClass> {
    match parents {
        [.., "kubepods"] => Some(QosClass::Guaranteed),
        [.., "kubepods", "burstable"] => Some(QosClass::Burstable),
        [.., "kubepods", "besteffort"] => Some(QosClass::BestEffort),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0f2bd7cf-3ba1-4f26-a0a6-3b8a6d5c6b55";
    const UID_UNIT: &str = "0f2bd7cf_3ba1_4f26_a0a6_3b8a6d5c6b55";

    #[test]
    fn finds_containers_of_both_drivers() {
        for (text, path) in [
            (format!("/kubepods/burstable/pod{UID}/abc"), format!("/kubepods/burstable/pod{UID}/abc")),
            (format!("/kubepods//pod{UID}/./abc/"), format!("/kubepods/pod{UID}/abc")),
            (
                format!("kubepods-burstable-pod{UID_UNIT}.slice:cri-containerd:abc"),
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_UNIT}.slice/\
                     cri-containerd-abc.scope"
                ),
            ),
            (
                format!("kubepods-pod{UID_UNIT}.slice:crio:abc"),
                format!("/kubepods.slice/kubepods-pod{UID_UNIT}.slice/crio-abc.scope"),
            ),
            (":runc:abc".to_owned(), "/system.slice/runc-abc.scope".to_owned()),
            ("-.slice:runc:abc".to_owned(), "/runc-abc.scope".to_owned()),
        ] {
            assert_eq!(container_path(&text), Ok(path), "{text}");
        }
        for (text, problem) in [
            ("", "not absolute"),
            ("kubepods/abc", "not absolute"),
            ("/", "the root"),
            ("/kubepods/../../etc", "`..`"),
            ("a.slice:b", "colons"),
            ("a.slice:b:c:d", "colons"),
            ("a:b:c", "not a slice"),
            ("a--b.slice:b:c", "empty part"),
            (".slice:b:c", "empty part"),
            ("../a.slice:b:c", "a `/`"),
            ("a.slice::c", "prefix or name"),
            ("a.slice:b:../c", "prefix or name"),
        ] {
            let error = container_path(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{text:?}: {error}");
        }
    }

    #[test]
    fn finds_pods_of_both_drivers() {
        let slices =
            format!("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_UNIT}.slice");
        for (text, path) in [
            (format!("/kubepods/pod{UID}"), format!("/kubepods/pod{UID}")),
            (slices.clone(), slices.clone()),
            (format!("kubepods-besteffort-pod{UID_UNIT}.slice"), slices),
        ] {
            assert_eq!(pod_path(&text), Ok(path), "{text}");
        }
        for text in ["", "kubepods", "/a/../b", "/x/-a.slice"] {
            assert!(pod_path(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn finds_levels_of_pod() {
        use QosClass::{BestEffort, Burstable, Guaranteed};
        let uid = UID;
        let unit = UID_UNIT;
        for (path, qos, levels) in [
            (
                format!("/kubepods/pod{uid}"),
                Guaranteed,
                vec!["/kubepods".into(), format!("/kubepods/pod{uid}")],
            ),
            (
                format!("/kubepods/burstable/pod{uid}/abc"),
                Burstable,
                vec![
                    "/kubepods".into(),
                    "/kubepods/burstable".into(),
                    format!("/kubepods/burstable/pod{uid}"),
                ],
            ),
            (
                format!("/kubelet/kubepods/besteffort/pod{uid}/crio-abc/inner"),
                BestEffort,
                vec![
                    "/kubelet/kubepods".into(),
                    "/kubelet/kubepods/besteffort".into(),
                    format!("/kubelet/kubepods/besteffort/pod{uid}"),
                ],
            ),
            (
                format!("/kubepods.slice/kubepods-pod{unit}.slice/cri-containerd-abc.scope"),
                Guaranteed,
                vec!["/kubepods.slice".into(), format!("/kubepods.slice/kubepods-pod{unit}.slice")],
            ),
            (
                format!(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/\
                     kubelet-kubepods-burstable-pod{unit}.slice"
                ),
                Burstable,
                vec![
                    "/kubelet.slice/kubelet-kubepods.slice".into(),
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice".into(),
                    format!(
                        "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/\
                         kubelet-kubepods-burstable-pod{unit}.slice"
                    ),
                ],
            ),
        ] {
            assert_eq!(pod_levels(&path), Some(PodLevels { qos, cgroups: levels }), "{path}");
        }
        for path in [
            "",
            "/",
            "/kubepods",
            "/kubepods/burstable",
            "/kubepods.slice/kubepods-burstable.slice",
            "/kubepods/pod",
            "/kubepods.slice/kubepods-pod.slice",
            "/system.slice/podman.service",
            "/machine.slice/libpod-abc.scope",
            "/podcasts",
            "/mykubepods.slice/mykubepods-podx.slice",
        ] {
            assert_eq!(pod_levels(path), None, "{path}");
        }
    }
}

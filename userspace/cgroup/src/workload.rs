//! Assigns cgroups to workloads, by their paths alone.
//!
//! Each cgroup belongs to exactly one workload, which owns a subtree. The first matching rule determines the workload
//! of a cgroup:
//!
//! 1. The deepest cgroup on its path that has a guarantee, because a guarantee covers the whole subtree. If one of the
//!    following rules also yields that cgroup, the workload keeps the name of that rule.
//! 2. A command started by `numaward exec`: a child of the top-level cgroup [`EXEC_PARENT`].
//! 3. The outermost container. The cgroups that a container creates belong to it, even if it is a whole Kubernetes
//!    node, as with kind. A container belongs to a pod only if its cgroup is where the kubelet creates pods: a user, a
//!    service or a container with its own subtree can choose any names. Cgroups of pods and quality-of-service classes
//!    are not workloads.
//! 4. A systemd unit, service or scope, directly in slices. Units and containers inside a unit belong to it: otherwise a
//!    user could create workloads of any name and number in `user@1000.service`. Only the units of container runtimes have
//!    containers in them.
//! 5. The top-level cgroup below the root, or the root itself.
//!
//! Sources: systemd.slice(5), systemd.unit(5) (escaping), Kubernetes' `pkg/kubelet/cm` (cgroup names of both drivers),
//! and the names that containerd, CRI-O, Docker and Podman give to containers.

use std::{os::unix::fs::MetadataExt as _, path::Path};

use crate::{CgroupPath, files::is_trusted_user, unescape::unescape};

/// The top-level cgroup whose children are commands started by `numaward exec`.
pub const EXEC_PARENT: &str = "numaward";

/// The prefixes of known container runtimes before the container's id in the names of cgroups.
pub const RUNTIMES: [&str; 5] = ["cri-containerd", "crio", "docker", "libpod", "nerdctl"];

/// The length of a container's id: SHA-256 in hexadecimal digits.
const ID_LENGTH: usize = 64;

/// The workload that owns a cgroup subtree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupWorkload {
    pub kind: WorkloadKind,
    /// The displayed name: unit, command, cgroup, or the first twelve digits of a container's id.
    pub name: String,
    /// The root of its subtree. Descendants belong to it, unless they are workloads themselves.
    pub root: CgroupPath,
    /// The container, if the workload is one.
    pub container: Option<ContainerIdentity>,
}

/// The kind of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    /// The root cgroup: kernel threads and all processes that were never moved to another cgroup.
    Root,
    Container,
    /// A systemd service or scope.
    Unit,
    /// A command started by `numaward exec`.
    Exec,
    /// Any other cgroup with a guarantee; its name is the path.
    Guarantee,
    /// A top-level cgroup, for all cgroups in it to which no other rule applies.
    TopLevel,
}

impl WorkloadKind {
    /// Returns the name for metric labels and the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Container => "container",
            Self::Unit => "unit",
            Self::Exec => "exec",
            Self::Guarantee => "allocation",
            Self::TopLevel => "cgroup",
        }
    }
}

/// A container, as far as its cgroup's path identifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerIdentity {
    /// The runtime's id.
    pub id: String,
    /// The Kubernetes pod of the container: `metadata.uid`, or the hash of a static pod's file.
    pub pod_uid: Option<String>,
    /// The runtime's prefix in the cgroup's name: `cri-containerd`, `crio`, `docker`, `libpod`.
    pub runtime: Option<String>,
    /// The runtime that keeps the name of the container, if only root can create a cgroup at this place.
    pub name_keeper: Option<NameKeeper>,
}

/// A container runtime that keeps the names of root's containers in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NameKeeper {
    Docker,
    Podman,
}

impl NameKeeper {
    /// Returns the runtime's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// Returns the runtime of a container whose cgroup has these ancestors, if they are not delegated: slices, or the
    /// top-level cgroups in which the runtimes create containers without systemd.
    fn of_container(ancestors: &[&str], name: &str, id: &str) -> Option<Self> {
        let prefix = name.strip_suffix(".scope").unwrap_or(name).strip_suffix(id)?;
        let is_scope = is_unit(name) && ancestors.iter().all(|name| has_suffix(name, ".slice"));
        match (prefix, ancestors) {
            _ if id.len() != ID_LENGTH => None,
            ("docker-", _) if is_scope => Some(Self::Docker),
            ("libpod-", _) if is_scope => Some(Self::Podman),
            ("", ["docker"]) => Some(Self::Docker),
            ("libpod-", ["libpod_parent"]) => Some(Self::Podman),
            _ => None,
        }
    }
}

/// Returns the workload of the cgroup at `path`. `has_guarantee` returns true for cgroups that have a guarantee in the
/// ledger.
pub fn classify(path: &CgroupPath, has_guarantee: impl Fn(&CgroupPath) -> bool) -> CgroupWorkload {
    let natural = classify_by_path(path);
    match path.ancestors().find(has_guarantee) {
        None => natural,
        Some(guaranteed) => {
            let natural = classify_by_path(&guaranteed);
            if natural.root == guaranteed {
                natural
            } else {
                let name = guaranteed.to_string();
                CgroupWorkload { kind: WorkloadKind::Guarantee, name, root: guaranteed, container: None }
            }
        }
    }
}

/// Returns the UID and the cgroup of the pod to which this cgroup of a container, or below one, belongs. A container that is not in the cgroup
/// of its pod stands for it.
pub fn pod_cgroup(path: &CgroupPath) -> Option<(String, CgroupPath)> {
    let names: Vec<&str> = path.components().collect();
    let (index, container) = pod_container(&names)?;
    let is_joined = names.get(index).is_some_and(|name| name.contains(':'));
    let below = names.len() - index - usize::from(is_joined);
    Some((container.pod_uid?, path.ancestors().nth(below)?))
}

/// Returns the name of the owner that chooses the number of cgroups at this place, so that limits can count them together: the pod, the
/// user (`user-1000.slice`), the top of the delegation, the container, or else the cgroup itself. `dir` is its directory.
pub fn owner_of(path: &CgroupPath, dir: &Path) -> String {
    let names: Vec<&str> = path.components().collect();
    if let Some(uid) = pod_uid(&names) {
        return format!("pod {uid}");
    }
    if let ["user.slice", user, ..] = names[..]
        && user.starts_with("user-")
        && has_suffix(user, ".slice")
    {
        return format!("/user.slice/{user}");
    }
    let is_delegated =
        |dir: &Path| std::fs::symlink_metadata(dir).is_ok_and(|found| !is_trusted_user(found.uid()));
    let delegated = path.ancestors().zip(dir.ancestors()).filter(|(_, dir)| is_delegated(dir));
    if let Some((top, _)) = delegated.last() {
        return top.to_string();
    }
    let workload = classify_by_path(path);
    let owner = if workload.container.is_some() { &workload.root } else { path };
    owner.to_string()
}

/// Returns the UID of the pod of this cgroup or of a cgroup around it.
fn pod_uid(names: &[&str]) -> Option<String> {
    let slices = names.iter().take_while(|name| has_suffix(name, ".slice")).count();
    let of_container = || pod_container(names)?.1.pod_uid;
    let of_slice = || names[..slices].iter().rev().find_map(|name| pod_of_slice(name));
    of_container().or_else(of_slice).or_else(|| pod_of_cgroupfs(&names[slices..]).map(|(uid, _)| uid))
}

fn classify_by_path(path: &CgroupPath) -> CgroupWorkload {
    let names: Vec<&str> = path.components().collect();
    // The workload is the cgroup of the first `depth` components.
    let workload = |kind, depth: usize, name: String, container| {
        let below = path.components().count() - depth;
        let root = path.ancestors().nth(below).unwrap_or_else(CgroupPath::root);
        CgroupWorkload { kind, name, root, container }
    };
    let Some(&top) = names.first() else {
        return workload(WorkloadKind::Root, 0, "/".into(), None);
    };
    if let [EXEC_PARENT, command, ..] = names[..] {
        return workload(WorkloadKind::Exec, 2, command.into(), None);
    }
    let first = names.iter().position(|name| !has_suffix(name, ".slice"));
    let unit = first.filter(|&index| is_unit(names[index]));
    let outside = match unit {
        Some(index) if !is_runtimes_unit(names[index]) => index + 1,
        _ => names.len(),
    };
    let container = pod_container(&names).or_else(|| {
        names[..outside].iter().enumerate().find_map(|(index, name)| {
            let mut container = plain_container(name)?;
            container.name_keeper = NameKeeper::of_container(&names[..index], name, &container.id);
            Some((index, container))
        })
    });
    if let Some((index, container)) = container {
        let name = container.id.chars().take(12).collect();
        return workload(WorkloadKind::Container, index + 1, name, Some(container));
    }
    if let Some(index) = unit {
        return workload(WorkloadKind::Unit, index + 1, display_name(names[index]), None);
    }
    workload(WorkloadKind::TopLevel, 1, display_name(top), None)
}

/// Returns true if a name has this suffix and something before it.
fn has_suffix(name: &str, suffix: &str) -> bool {
    name.len() > suffix.len() && name.ends_with(suffix)
}

fn is_unit(name: &str) -> bool {
    has_suffix(name, ".service") || has_suffix(name, ".scope")
}

/// Returns the container on this path that is directly in the cgroup of a pod, and its index. The pod's ancestors must
/// be slices, which only the system's service manager can create, or cgroups of the kubelet's driver cgroupfs.
fn pod_container(names: &[&str]) -> Option<(usize, ContainerIdentity)> {
    let slices = names.iter().take_while(|name| has_suffix(name, ".slice")).count();
    let below = &names[slices..];
    // With systemd's cgroup notation but without systemd, runc joins slice, runtime and id in one cgroup, in or next to
    // the runtime's unit.
    let joined = usize::from(below.first().is_some_and(|name| is_runtimes_unit(name)));
    if let Some((slice, rest)) = below.get(joined).and_then(|name| name.split_once(':')) {
        let (runtime, id) = rest.split_once(':')?;
        let pod_uid = Some(pod_of_slice(slice)?);
        let runtime = Some(runtime.into());
        let container = ContainerIdentity { id: id.into(), pod_uid, runtime, name_keeper: None };
        return Some((slices + joined, container));
    }
    let (pod_uid, index) = match pod_of_slice(names[..slices].last().unwrap_or(&"")) {
        Some(pod) => (pod, slices),
        None => pod_of_cgroupfs(below).map(|(pod, index)| (pod, slices + index))?,
    };
    let name = *names.get(index)?;
    let mut container = plain_container(name).or_else(|| {
        // An id of any form, except for the monitors next to the containers and CRI-O's cgroup of the pod itself.
        let other = name.contains("conmon") || is_unit(name) || has_suffix(name, ".slice");
        (!other).then(|| ContainerIdentity {
            id: name.into(),
            pod_uid: None,
            runtime: None,
            name_keeper: None,
        })
    })?;
    container.pod_uid = Some(pod_uid);
    Some((index, container))
}

/// Returns true for the unit of a container runtime, directly in slices.
fn is_runtimes_unit(name: &str) -> bool {
    let name = name.strip_suffix(".service").unwrap_or_default();
    // For example `snap.microk8s.daemon-containerd`.
    name == "crio" || name.ends_with("containerd") || name.starts_with("k3s") || name.starts_with("rke2")
}

/// Returns the pod of `kubepods[/QOS]/podUID`, and the number of components. The path may begin with `kubelet`, the
/// cgroup root that kind gives to the kubelet.
fn pod_of_cgroupfs(names: &[&str]) -> Option<(String, usize)> {
    let (above, names) = match names {
        ["kubelet", "kubepods", below @ ..] => (2, below),
        ["kubepods", below @ ..] => (1, below),
        _ => return None,
    };
    let of_class = usize::from(names.first().is_some_and(|name| ["burstable", "besteffort"].contains(name)));
    let uid = names.get(of_class)?.strip_prefix("pod").filter(|uid| !uid.is_empty())?;
    Some((uid.into(), above + of_class + 1))
}

/// Returns the pod of `kubepods[-QOS]-podUID.slice`, which may be below another slice (`kubelet-kubepods-…`). The
/// systemd driver replaces the dashes of a uid by underscores.
fn pod_of_slice(name: &str) -> Option<String> {
    let (parents, uid) = name.strip_suffix(".slice")?.rsplit_once("-pod")?;
    let of_kubelet = parents.split('-').any(|part| part == "kubepods");
    (of_kubelet && !uid.is_empty()).then(|| uid.replace('_', "-"))
}

/// Returns the container that a name identifies by itself: an id of 64 hexadecimal digits, with or without a runtime,
/// or a shorter id with a known runtime.
fn plain_container(name: &str) -> Option<ContainerIdentity> {
    let is_hex = |id: &str| id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_id = |id: &str| id.len() == ID_LENGTH && is_hex(id);
    let container = |id: &str, runtime: Option<&str>| ContainerIdentity {
        id: id.into(),
        pod_uid: None,
        runtime: runtime.map(Into::into),
        name_keeper: None,
    };
    if is_id(name) {
        return Some(container(name, None));
    }
    let (runtime, id) = name.strip_suffix(".scope").unwrap_or(name).rsplit_once('-')?;
    let known = RUNTIMES.contains(&runtime) && id.len() >= 12 && is_hex(id);
    let is_container = known || (is_id(id) && !runtime.contains("conmon"));
    is_container.then(|| container(id, Some(runtime)))
}

/// Returns the displayed name of a unit: systemd escapes characters, such as separators, as `\x2d`.
fn display_name(name: &str) -> String {
    // The escapes may encode bytes that are not UTF-8: the name is then kept.
    String::from_utf8(unescape(name.as_bytes(), br"\x", 2, 16)).unwrap_or_else(|_| name.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use WorkloadKind::{Container as Ctr, Exec, Guarantee, Root, TopLevel, Unit};

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const ID2: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";
    const POD: &str = "11111111-2222-3333-4444-555555555555";
    const POD_: &str = "11111111_2222_3333_4444_555555555555";

    fn classify_text(path: &str) -> CgroupWorkload {
        let path =
            path.replace("{ID}", ID).replace("{ID2}", ID2).replace("{POD}", POD).replace("{POD_}", POD_);
        classify(&path.parse().unwrap(), |_| false)
    }

    fn root(path: &str) -> String {
        classify_text(path)
            .root
            .to_string()
            .replace(ID, "{ID}")
            .replace(ID2, "{ID2}")
            .replace(POD, "{POD}")
            .replace(POD_, "{POD_}")
    }

    #[test]
    fn each_cgroup_has_its_workload() {
        for (path, kind, name, workload_root) in [
            ("/", Root, "/", "/"),
            // systemd
            ("/init.scope", Unit, "init.scope", "/init.scope"),
            ("/system.slice/nginx.service", Unit, "nginx.service", "/system.slice/nginx.service"),
            ("/system.slice/nginx.service/worker/1", Unit, "nginx.service", "/system.slice/nginx.service"),
            (
                r"/system.slice/systemd-fsck@dev-disk-by\x2duuid-1.service",
                Unit,
                "systemd-fsck@dev-disk-by-uuid-1.service",
                r"/system.slice/systemd-fsck@dev-disk-by\x2duuid-1.service",
            ),
            (
                "/user.slice/user-1000.slice/session-2.scope",
                Unit,
                "session-2.scope",
                "/user.slice/user-1000.slice/session-2.scope",
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/firefox.service",
                Unit,
                "user@1000.service",
                "/user.slice/user-1000.slice/user@1000.service",
            ),
            ("/system.slice", TopLevel, "system.slice", "/system.slice"),
            ("/user.slice/user-1000.slice", TopLevel, "user.slice", "/user.slice"),
            ("/system.slice/dev-hugepages.mount", TopLevel, "system.slice", "/system.slice"),
            ("/system.slice/made-by-hand/a.service", TopLevel, "system.slice", "/system.slice"),
            // Malformed escapes
            (r"/a\x2", TopLevel, r"a\x2", r"/a\x2"),
            (r"/a\xff", TopLevel, r"a\xff", r"/a\xff"),
            ("/.service", TopLevel, ".service", "/.service"),
            // other cgroups
            ("/batch/job1/step2", TopLevel, "batch", "/batch"),
            ("/lxc.payload.web/system.slice/a.service", TopLevel, "lxc.payload.web", "/lxc.payload.web"),
            // numaward exec
            ("/numaward", TopLevel, "numaward", "/numaward"),
            ("/numaward/bench-1", Exec, "bench-1", "/numaward/bench-1"),
            ("/numaward/bench-1/child", Exec, "bench-1", "/numaward/bench-1"),
            ("/system.slice/numaward.service", Unit, "numaward.service", "/system.slice/numaward.service"),
            ("/batch/numaward/x", TopLevel, "batch", "/batch"),
            // cgroups of pods and of quality-of-service classes are not workloads
            ("/kubepods/burstable", TopLevel, "kubepods", "/kubepods"),
            ("/kubepods/burstable/pod{POD}", TopLevel, "kubepods", "/kubepods"),
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice",
                TopLevel,
                "kubepods.slice",
                "/kubepods.slice",
            ),
            (
                "/kubepods.slice/kubepods-pod{POD_}.slice/crio-conmon-{ID}.scope",
                Unit,
                "crio-conmon-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef.scope",
                "/kubepods.slice/kubepods-pod{POD_}.slice/crio-conmon-{ID}.scope",
            ),
        ] {
            let found = classify_text(path);
            assert_eq!((found.kind, found.name.as_str()), (kind, name), "{path}");
            assert_eq!(root(path), workload_root, "{path}");
            assert_eq!(found.container, None, "{path}");
        }
    }

    #[test]
    fn cgroups_of_one_owner_belong_together() {
        let root = tempfile::tempdir().unwrap();
        for (path, owner) in [
            ("/user.slice/user-1000.slice/session-2.scope", "/user.slice/user-1000.slice"),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/a.scope",
                "/user.slice/user-1000.slice",
            ),
            ("/user.slice/user-1000.slice", "/user.slice/user-1000.slice"),
            ("/user.slice", "/user.slice"),
            (
                "/system.slice/a.service/user.slice/user-1.slice/b",
                "/system.slice/a.service/user.slice/user-1.slice/b",
            ),
            ("/batch/job-1", "/batch/job-1"),
            ("/numaward/bench-1/child", "/numaward/bench-1/child"),
            ("/kubepods/burstable/pod{POD}/{ID}/below", "pod {POD}"),
            ("/kubepods/burstable/pod{POD}", "pod {POD}"),
            ("/kubepods.slice/kubepods-pod{POD_}.slice/cri-containerd-{ID}.scope", "pod {POD}"),
            ("/kubepods.slice/kubepods-pod{POD_}.slice", "pod {POD}"),
            ("/system.slice/containerd.service/kubepods-pod{POD_}.slice:cri-containerd:{ID}", "pod {POD}"),
            ("/system.slice/docker-{ID}.scope/a", "/system.slice/docker-{ID}.scope"),
            ("/", "/"),
        ] {
            let filled = |text: &str| text.replace("{ID}", ID).replace("{POD}", POD).replace("{POD_}", POD_);
            let path: CgroupPath = filled(path).parse().unwrap();
            let dir = path.dir(root.path());
            assert_eq!(owner_of(&path, &dir), filled(owner), "{path}");
        }
    }

    #[test]
    fn delegation_is_one_owner() {
        if !rustix::process::geteuid().is_root() {
            return numaward_tests_support::skip_outside_ci("only root gives a directory to another user");
        }
        let root = tempfile::tempdir().unwrap();
        // The user chooses the names.
        let path = format!("/system.slice/batch.service/jobs/docker-{ID}.scope");
        let path: CgroupPath = path.parse().unwrap();
        let dir = path.dir(root.path());
        std::fs::create_dir_all(&dir).unwrap();
        let owner = || owner_of(&path, &dir);
        assert_eq!(owner(), path.as_str(), "a container of root");
        for (dir, user) in [(dir.as_path(), 1001), (dir.parent().unwrap(), 1000)] {
            std::os::unix::fs::chown(dir, Some(user), None).unwrap();
        }
        assert_eq!(owner(), "/system.slice/batch.service/jobs");
    }

    #[test]
    fn recognizes_containers_of_runtimes() {
        let pod = Some(POD);
        for (path, runtime, pod_uid, workload_root) in [
            // cgroupfs driver
            ("/kubepods/burstable/pod{POD}/{ID}", None, pod, "/kubepods/burstable/pod{POD}/{ID}"),
            ("/kubepods/pod{POD}/{ID}/init.scope", None, pod, "/kubepods/pod{POD}/{ID}"),
            // systemd driver
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
                Some("cri-containerd"),
                pod,
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
            ),
            (
                "/kubepods.slice/kubepods-pod{POD_}.slice/crio-{ID}.scope/container",
                Some("crio"),
                pod,
                "/kubepods.slice/kubepods-pod{POD_}.slice/crio-{ID}.scope",
            ),
            (
                "/system.slice/containerd.service/kubepods-besteffort-pod{POD_}.slice:cri-containerd:{ID}",
                Some("cri-containerd"),
                pod,
                "/system.slice/containerd.service/kubepods-besteffort-pod{POD_}.slice:cri-containerd:{ID}",
            ),
            // kind, seen from inside the container that is the Kubernetes node: a kubelet with a cgroup root
            (
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{POD_}.slice/cri-containerd-{ID}.scope",
                Some("cri-containerd"),
                pod,
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{POD_}.slice/cri-containerd-{ID}.scope",
            ),
            (
                "/kubelet/kubepods/burstable/pod{POD}/{ID}",
                None,
                pod,
                "/kubelet/kubepods/burstable/pod{POD}/{ID}",
            ),
            // the same path, seen from the host: the outermost container owns it
            (
                "/system.slice/docker-{ID}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{POD_}.slice/cri-containerd-{ID2}.scope",
                Some("docker"),
                None,
                "/system.slice/docker-{ID}.scope",
            ),
            // Docker in a pod
            ("/kubepods/pod{POD}/{ID}/docker/{ID2}", None, pod, "/kubepods/pod{POD}/{ID}"),
            // without Kubernetes
            ("/system.slice/docker-{ID}.scope", Some("docker"), None, "/system.slice/docker-{ID}.scope"),
            ("/docker/{ID}/docker/{ID2}", None, None, "/docker/{ID}"),
            (
                "/machine.slice/libpod-{ID}.scope/container",
                Some("libpod"),
                None,
                "/machine.slice/libpod-{ID}.scope",
            ),
            (
                "/system.slice/containerd.service/cri-containerd-{ID}",
                Some("cri-containerd"),
                None,
                "/system.slice/containerd.service/cri-containerd-{ID}",
            ),
            ("/libpod_parent/libpod-{ID}", Some("libpod"), None, "/libpod_parent/libpod-{ID}"),
        ] {
            let found = classify_text(path);
            assert_eq!((found.kind, found.name.as_str()), (Ctr, "0123456789ab"), "{path}");
            assert_eq!(root(path), workload_root, "{path}");
            let container = found.container.unwrap();
            assert_eq!(container.id, ID, "{path}");
            assert_eq!(container.runtime.as_deref(), runtime, "{path}");
            assert_eq!(container.pod_uid.as_deref(), pod_uid, "{path}");
        }
    }

    #[test]
    fn runtimes_of_root_keep_names() {
        use NameKeeper::{Docker, Podman};
        const USER: &str = "/user.slice/user-1000.slice/user@1000.service/user.slice";
        for (path, expected) in [
            ("/system.slice/docker-{ID}.scope", Some(Docker)),
            ("/system.slice/docker-{ID}.scope/init", Some(Docker)),
            ("/shop.slice/shop-web.slice/docker-{ID}.scope", Some(Docker)),
            ("/docker/{ID}", Some(Docker)),
            ("/docker/{ID}/docker/{ID2}", Some(Docker)),
            ("/machine.slice/libpod-{ID}.scope/container", Some(Podman)),
            ("/machine.slice/machine-libpod_pod_{ID2}.slice/libpod-{ID}.scope", Some(Podman)),
            ("/libpod_parent/libpod-{ID}", Some(Podman)),
            // Delegated subtrees: their owner can choose any names.
            ("/batch/docker-{ID}.scope", None),
            ("/batch/docker/{ID}", None),
            ("/batch/{ID}", None),
            ("/{ID}", None),
            (&format!("{USER}/libpod-{{ID}}.scope/container"), None),
            (&format!("{USER}/docker-{{ID}}.scope"), None),
            // Pods
            ("/kubepods/podu1/{ID}", None),
            ("/kubepods.slice/kubepods-podu1.slice/docker-{ID}.scope", None),
            // Other runtimes, short ids, cgroups without systemd's suffix
            ("/system.slice/nerdctl-{ID}.scope", None),
            ("/system.slice/docker-0123456789ab.scope", None),
            ("/system.slice/docker-{ID}", None),
            ("/docker/docker-{ID}", None),
            ("/docker/0123456789ab", None),
        ] {
            let container = classify_text(path).container;
            assert_eq!(container.and_then(|container| container.name_keeper), expected, "{path}");
        }
    }

    #[test]
    fn accepts_any_id_in_a_pod() {
        let workload = classify_text("/kubepods/burstable/podabc/web-1");
        assert_eq!((workload.kind, workload.name.as_str()), (Ctr, "web-1"));
        assert_eq!(workload.container.unwrap().pod_uid.as_deref(), Some("abc"));
        assert_eq!(classify_text("/batch/podabc/web-1").kind, TopLevel, "only below kubepods");
        assert_eq!(classify_text("/system.slice/docker-proxy.service").kind, Unit);
        assert_eq!(classify_text("/machine.slice/libpod-conmon-{ID}.scope").kind, Unit);
    }

    /// The owner of a delegated subtree, such as a user or a container that can create cgroups, can choose any names.
    #[test]
    fn ignores_pods_outside_the_kubelets_tree() {
        const USER: &str = "/user.slice/user-1000.slice/user@1000.service";
        for (above, kind, name) in [
            (USER, Unit, "user@1000.service"),
            ("/system.slice/postgres.service", Unit, "postgres.service"),
            ("/user.slice/user-1000.slice/session-1.scope", Unit, "session-1.scope"),
            ("/batch/job", TopLevel, "batch"),
            ("/kubepods-like", TopLevel, "kubepods-like"),
            // Paths without a pod.
            ("/kubepods/other", TopLevel, "kubepods"),
            ("/kubepods/burstable/other", TopLevel, "kubepods"),
            ("/kubepods.slice/x.service", Unit, "x.service"),
        ] {
            for pods in [
                "kubepods/burstable/pod{POD}/web",
                "kubelet/kubepods/pod{POD}/web",
                "kubepods.slice/kubepods-pod{POD_}.slice/web",
                "kubepods-pod{POD_}.slice/web",
                "kubepods-burstable-pod{POD_}.slice:cri-containerd:{ID}",
            ] {
                let found = classify_text(&format!("{above}/{pods}"));
                assert_eq!((found.kind, found.name.as_str()), (kind, name), "{above}/{pods}");
            }
            // The name identifies a container, but the container does not belong to a pod; in a unit, it belongs to the unit.
            for pods in [
                "kubepods/pod{POD}/{ID}",
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
                "user.slice/libpod-{ID}.scope/container",
            ] {
                let found = classify_text(&format!("{above}/{pods}"));
                let expected = (kind != Unit).then(|| (ID.to_owned(), None));
                assert_eq!(
                    found.container.map(|container| (container.id, container.pod_uid)),
                    expected,
                    "{above}/{pods}"
                );
                assert_eq!(found.kind, if kind == Unit { Unit } else { Ctr }, "{above}/{pods}");
                if kind == Unit {
                    assert_eq!(found.name, name, "{above}/{pods}");
                }
            }
        }
        let inner = classify_text("/docker/{ID}/kubepods/pod{POD}/{ID2}");
        assert_eq!(
            inner.container.map(|container| (container.id, container.pod_uid)),
            Some((ID.to_owned(), None))
        );
    }

    #[test]
    fn deepest_guarantee_owns_the_subtree() {
        let guaranteed = |path: &CgroupPath| {
            ["/batch/job1", "/batch/job1/deep", "/system.slice", "/system.slice/nginx.service"]
                .contains(&path.as_str())
        };
        for (path, kind, name) in [
            ("/batch", TopLevel, "batch"),
            ("/batch/job1", Guarantee, "/batch/job1"),
            ("/batch/job1/step", Guarantee, "/batch/job1"),
            ("/batch/job1/deep/step", Guarantee, "/batch/job1/deep"),
            ("/batch/job2", TopLevel, "batch"),
            ("/system.slice", TopLevel, "system.slice"),
            ("/system.slice/redis.service", TopLevel, "system.slice"),
            ("/system.slice/nginx.service/worker", Unit, "nginx.service"),
        ] {
            let found = classify(&path.parse().unwrap(), guaranteed);
            assert_eq!((found.kind, found.name.as_str()), (kind, name), "{path}");
        }
    }
}

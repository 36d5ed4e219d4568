//! Which workload a cgroup belongs to. Pure: it looks at the path alone.
//!
//! Each cgroup belongs to exactly one workload, which owns a subtree. The workload of a cgroup is, in this order:
//!
//! 1. the deepest cgroup on its path that holds an allocation: what is promised to a subtree is used by all of
//!    it. Where that cgroup is also one of the following, it keeps that name;
//! 2. a command started by `numaward exec`: a child of the top-level cgroup [`EXEC_PARENT`];
//! 3. a container. The outermost of several: what a container starts is its own affair, also where it is a whole
//!    Kubernetes node, as with kind. It is one of a pod only where the kubelet makes pods: a user, a service or a container
//!    with a subtree of its own may give cgroups any name. Pod and quality-of-service cgroups are no workloads;
//! 4. a systemd unit, service or scope, directly in slices. What is inside a unit is its own affair too: units and containers
//!    in `user@1000.service` fold into it, or a user could make workloads of any name and number. Only the units of container
//!    runtimes have containers in them;
//! 5. the top-level cgroup below the root; the root itself for the root.
//!
//! Sources: systemd.slice(5), systemd.unit(5) (escaping), Kubernetes' `pkg/kubelet/cm` (cgroup names of both
//! drivers), and the names that containerd, CRI-O, Docker and Podman give to containers.

use crate::{CgroupPath, unescape::unescape};

/// The top-level cgroup whose children are commands started by `numaward exec`.
pub const EXEC_PARENT: &str = "numaward";

/// What known container runtimes put before the id, in the names of cgroups.
pub const RUNTIMES: [&str; 5] = ["cri-containerd", "crio", "docker", "libpod", "nerdctl"];

/// What owns a cgroup subtree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupWorkload {
    /// What it is.
    pub kind: WorkloadKind,
    /// Its name for people: unit, command, cgroup, or the first twelve digits of a container's id.
    pub name: String,
    /// Its cgroup. Those below belong to it, unless they are workloads of their own.
    pub root: CgroupPath,
    /// Which container it is.
    pub container: Option<ContainerIdentity>,
}

/// What a workload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    /// The root cgroup: kernel threads and what nobody put elsewhere.
    Root,
    /// A container.
    Container,
    /// A systemd service or scope.
    Unit,
    /// A command started by `numaward exec`.
    Exec,
    /// Another cgroup that has an allocation; named by its path.
    Guarantee,
    /// A top-level cgroup, for all in it that is none of these.
    TopLevel,
}

impl WorkloadKind {
    /// The word for labels and the API.
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

/// A container, as far as its cgroup's path shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerIdentity {
    /// The runtime's id.
    pub id: String,
    /// The Kubernetes pod it belongs to: `metadata.uid`, or the hash of a static pod's file.
    pub pod_uid: Option<String>,
    /// The prefix that the runtime gave to the cgroup: `cri-containerd`, `crio`, `docker`, `libpod`.
    pub runtime: Option<String>,
}

/// The workload of the cgroup at `path`. `has_allocation` says whether the ledger has a cgroup
/// for it.
pub fn classify(path: &CgroupPath, has_allocation: impl Fn(&CgroupPath) -> bool) -> CgroupWorkload {
    let natural = by_path(path);
    match path.ancestors().find(has_allocation) {
        None => natural,
        Some(promised) => {
            let natural = by_path(&promised);
            if natural.root == promised {
                natural
            } else {
                let name = promised.to_string();
                CgroupWorkload { kind: WorkloadKind::Guarantee, name, root: promised, container: None }
            }
        }
    }
}

fn by_path(path: &CgroupPath) -> CgroupWorkload {
    let names: Vec<&str> = path.components().collect();
    // The workload is the cgroup of the first `depth` names.
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
        names[..outside].iter().enumerate().find_map(|(index, name)| Some((index, plain_container(name)?)))
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

/// Whether a name ends so and is more than that.
fn has_suffix(name: &str, suffix: &str) -> bool {
    name.len() > suffix.len() && name.ends_with(suffix)
}

fn is_unit(name: &str) -> bool {
    has_suffix(name, ".service") || has_suffix(name, ".scope")
}

/// The container on this path that is directly in the cgroup of a pod, and its index. Above the pod are slices, which nobody
/// but the system's manager makes, or what the kubelet makes with the driver cgroupfs.
fn pod_container(names: &[&str]) -> Option<(usize, ContainerIdentity)> {
    let slices = names.iter().take_while(|name| has_suffix(name, ".slice")).count();
    let below = &names[slices..];
    // runc given systemd's notation without using systemd makes one cgroup of it, in or beside the runtime's own unit.
    let joined = usize::from(below.first().is_some_and(|name| is_runtimes_unit(name)));
    if let Some((slice, rest)) = below.get(joined).and_then(|name| name.split_once(':')) {
        let (runtime, id) = rest.split_once(':')?;
        let pod_uid = Some(pod_of_slice(slice)?);
        let container = ContainerIdentity { id: id.into(), pod_uid, runtime: Some(runtime.into()) };
        return Some((slices + joined, container));
    }
    let (pod_uid, index) = match pod_of_slice(names[..slices].last().unwrap_or(&"")) {
        Some(pod) => (pod, slices),
        None => pod_of_cgroupfs(below).map(|(pod, index)| (pod, slices + index))?,
    };
    let name = *names.get(index)?;
    let mut container = plain_container(name).or_else(|| {
        // An id of any shape, but for the monitors beside the containers and CRI-O's cgroup of the pod itself.
        let other = name.contains("conmon") || is_unit(name) || has_suffix(name, ".slice");
        (!other).then(|| ContainerIdentity { id: name.into(), pod_uid: None, runtime: None })
    })?;
    container.pod_uid = Some(pod_uid);
    Some((index, container))
}

/// Whether this is the unit of a container runtime, directly in slices.
fn is_runtimes_unit(name: &str) -> bool {
    let name = name.strip_suffix(".service").unwrap_or_default();
    // As microk8s' `snap.microk8s.daemon-containerd`.
    name == "crio" || name.ends_with("containerd") || name.starts_with("k3s") || name.starts_with("rke2")
}

/// The pod of `kubepods[/QOS]/podUID`, and how many names that is; maybe below `kubelet`, the cgroup root that kind gives the
/// kubelet.
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

/// The pod of `kubepods[-QOS]-podUID.slice`, maybe below another slice (`kubelet-kubepods-…`). The systemd
/// driver writes the dashes of a uid as underscores.
fn pod_of_slice(name: &str) -> Option<String> {
    let (parents, uid) = name.strip_suffix(".slice")?.rsplit_once("-pod")?;
    let of_kubelet = parents.split('-').any(|part| part == "kubepods");
    (of_kubelet && !uid.is_empty()).then(|| uid.replace('_', "-"))
}

/// The container that a name shows by itself: an id of 64 hexadecimal digits, alone or with its runtime, or a
/// shorter one with a runtime that is known.
fn plain_container(name: &str) -> Option<ContainerIdentity> {
    let is_hex = |id: &str| id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_id = |id: &str| id.len() == 64 && is_hex(id);
    if is_id(name) {
        return Some(ContainerIdentity { id: name.into(), pod_uid: None, runtime: None });
    }
    let (runtime, id) = name.strip_suffix(".scope").unwrap_or(name).rsplit_once('-')?;
    let known = RUNTIMES.contains(&runtime) && id.len() >= 12 && is_hex(id);
    let is_container = known || (is_id(id) && !runtime.contains("conmon"));
    is_container.then(|| ContainerIdentity { id: id.into(), pod_uid: None, runtime: Some(runtime.into()) })
}

/// The name of a unit as people write it: systemd escapes with `\x2d` what would be a separator.
fn display_name(name: &str) -> String {
    // An escape may make bytes that are no text: then the name is better as it was.
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

    fn of(path: &str) -> CgroupWorkload {
        let path =
            path.replace("{ID}", ID).replace("{ID2}", ID2).replace("{POD}", POD).replace("{POD_}", POD_);
        classify(&path.parse().unwrap(), |_| false)
    }

    fn root(path: &str) -> String {
        of(path)
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
            // what looks like an escape but is none
            (r"/a\x2", TopLevel, r"a\x2", r"/a\x2"),
            (r"/a\xff", TopLevel, r"a\xff", r"/a\xff"),
            ("/.service", TopLevel, ".service", "/.service"),
            // others
            ("/batch/job1/step2", TopLevel, "batch", "/batch"),
            ("/lxc.payload.web/system.slice/a.service", TopLevel, "lxc.payload.web", "/lxc.payload.web"),
            // numaward exec
            ("/numaward", TopLevel, "numaward", "/numaward"),
            ("/numaward/bench-1", Exec, "bench-1", "/numaward/bench-1"),
            ("/numaward/bench-1/child", Exec, "bench-1", "/numaward/bench-1"),
            ("/system.slice/numaward.service", Unit, "numaward.service", "/system.slice/numaward.service"),
            ("/batch/numaward/x", TopLevel, "batch", "/batch"),
            // pods and quality of service are no workloads
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
            let found = of(path);
            assert_eq!((found.kind, found.name.as_str()), (kind, name), "{path}");
            assert_eq!(root(path), workload_root, "{path}");
            assert_eq!(found.container, None, "{path}");
        }
    }

    #[test]
    fn containers_are_known_by_the_names_of_their_runtimes() {
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
            // kind, seen from within the container that the whole Kubernetes node is: a kubelet with a cgroup root
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
            // the same seen from the host: what a container starts is its own affair
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
            let found = of(path);
            assert_eq!((found.kind, found.name.as_str()), (Ctr, "0123456789ab"), "{path}");
            assert_eq!(root(path), workload_root, "{path}");
            let container = found.container.unwrap();
            assert_eq!(container.id, ID, "{path}");
            assert_eq!(container.runtime.as_deref(), runtime, "{path}");
            assert_eq!(container.pod_uid.as_deref(), pod_uid, "{path}");
        }
    }

    #[test]
    fn in_a_pod_an_id_may_have_any_shape() {
        let workload = of("/kubepods/burstable/podabc/web-1");
        assert_eq!((workload.kind, workload.name.as_str()), (Ctr, "web-1"));
        assert_eq!(workload.container.unwrap().pod_uid.as_deref(), Some("abc"));
        assert_eq!(of("/batch/podabc/web-1").kind, TopLevel, "only below kubepods");
        assert_eq!(of("/system.slice/docker-proxy.service").kind, Unit);
        assert_eq!(of("/machine.slice/libpod-conmon-{ID}.scope").kind, Unit);
    }

    /// One who has a delegated subtree, such as a user or a container that may write cgroups, gives cgroups any name.
    #[test]
    fn a_pods_container_is_only_where_the_kubelet_makes_it() {
        const USER: &str = "/user.slice/user-1000.slice/user@1000.service";
        for (above, kind, name) in [
            (USER, Unit, "user@1000.service"),
            ("/system.slice/postgres.service", Unit, "postgres.service"),
            ("/user.slice/user-1000.slice/session-1.scope", Unit, "session-1.scope"),
            ("/batch/job", TopLevel, "batch"),
            ("/kubepods-like", TopLevel, "kubepods-like"),
            // Where no pod is.
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
                let found = of(&format!("{above}/{pods}"));
                assert_eq!((found.kind, found.name.as_str()), (kind, name), "{above}/{pods}");
            }
            // It looks like a container, but it is none of a pod; in a unit, it is part of the unit.
            for pods in [
                "kubepods/pod{POD}/{ID}",
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
                "user.slice/libpod-{ID}.scope/container",
            ] {
                let found = of(&format!("{above}/{pods}"));
                let expected = (kind != Unit).then(|| (ID.to_owned(), None));
                assert_eq!(found.container.map(|of| (of.id, of.pod_uid)), expected, "{above}/{pods}");
                assert_eq!(found.kind, if kind == Unit { Unit } else { Ctr }, "{above}/{pods}");
                if kind == Unit {
                    assert_eq!(found.name, name, "{above}/{pods}");
                }
            }
        }
        let inner = of("/docker/{ID}/kubepods/pod{POD}/{ID2}");
        assert_eq!(inner.container.map(|of| (of.id, of.pod_uid)), Some((ID.to_owned(), None)));
    }

    #[test]
    fn the_deepest_allocation_owns_what_is_below_it() {
        let promised = |path: &CgroupPath| {
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
            let found = classify(&path.parse().unwrap(), promised);
            assert_eq!((found.kind, found.name.as_str()), (kind, name), "{path}");
        }
    }
}

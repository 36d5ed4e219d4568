//! Names of workloads: the values of the metric label `workload`.
//!
//! Each name becomes a time series in Prometheus, so a host must not produce more and more of them. Therefore names
//! contain no sequence numbers, and no ids if there is a name:
//!
//! - A systemd unit has its own name. Numbers assigned by systemd become `*` (`session-12.scope` becomes
//!   `session-*.scope`, `run-u34.service` becomes `run-*.service`), and so do the numbers that libvirt assigns to guests
//!   at each start (`machine-qemu-3-web.scope` becomes `machine-qemu-*-web.scope`), and the ids of containers in the names
//!   of their monitors (`libpod-conmon-ID.scope` becomes `libpod-conmon-*.scope`).
//! - A container of a pod is `NAMESPACE/POD/CONTAINER` once these are known (see [`crate::state`]), and `pods` until
//!   then.
//! - A container of root's Docker or Podman is `docker/NAME` or `podman/NAME` (see [`crate::container_names`]). The prefix
//!   keeps it apart from a unit of its name. Without a name, it is the only workload with an id: the first twelve digits.
//! - Another container has the name of its runtime (`docker`, `libpod`) if the runtime is known, else `containers`, because
//!   users choose the names of their cgroups.
//! - A command of `numaward exec` is `numaward/NAME`.
//! - Any other workload has the name of its cgroup.
//!
//! Only names of pods' containers have two slashes; the metrics recognize them by that.
//!
//! The name `other` stands for all counts outside of these workloads. A cgroup called `other` becomes `/other`.

use std::sync::Arc;

use numaward_cgroup::{CgroupWorkload, ContainerIdentity, NameKeeper, RUNTIMES, WorkloadKind};

/// Name for the counts of all processes outside of the workloads that have counters.
pub(crate) const OTHER: &str = "other";

/// Returns the value of the label for a workload. Containers of pods get their final name from their pod later.
pub(crate) fn name(workload: &CgroupWorkload) -> String {
    let name = match workload.kind {
        WorkloadKind::Unit => unit(&workload.name),
        WorkloadKind::Exec => format!("numaward/{}", workload.name),
        WorkloadKind::Container => match &workload.container {
            Some(container) if container.pod_uid.is_some() => "pods".to_owned(),
            Some(ContainerIdentity { runtime: Some(runtime), .. })
                if RUNTIMES.contains(&runtime.as_str()) =>
            {
                runtime.clone()
            }
            _ => "containers".to_owned(),
        },
        WorkloadKind::Root | WorkloadKind::Guarantee | WorkloadKind::TopLevel => workload.name.clone(),
    };
    if name == OTHER { format!("/{OTHER}") } else { name }
}

/// Returns the name of a container of Docker or Podman.
pub(crate) fn runtime_container(runtime: NameKeeper, id: &str, name: Option<&Arc<str>>) -> String {
    let name = name.map_or_else(|| id.get(..12).unwrap_or(id), |name| &**name);
    format!("{}/{name}", runtime.as_str())
}

/// Returns a unit's name with `*` instead of the number of a transient unit. The numbers come from logind
/// (`session-12.scope`, `session-c1.scope`) and from `systemd-run` (`run-u34.service`, `run-p7-i9.scope`, `run-r` and
/// 32 hexadecimal digits). Ids of containers come from their monitors (`libpod-conmon-ID.scope`).
fn unit(name: &str) -> String {
    for prefix in ["session-", "run-"] {
        let number = name.strip_prefix(prefix).and_then(|rest| rest.rsplit_once('.'));
        if let Some((number, kind)) = number
            && number.contains(|c: char| c.is_ascii_digit())
            && number.chars().all(|c| c.is_ascii_hexdigit() || "uipr-".contains(c))
        {
            return format!("{prefix}*.{kind}");
        }
    }
    for prefix in ["machine-qemu-", "machine-lxc-"] {
        let guest = name.strip_prefix(prefix).and_then(|rest| rest.split_once('-'));
        if let Some((number, guest)) = guest
            && number.parse::<u32>().is_ok()
        {
            return format!("{prefix}*-{guest}");
        }
    }
    let monitor = name.strip_suffix(".scope").and_then(|name| name.rsplit_once("-conmon-"));
    if let Some((runtime, id)) = monitor
        && id.len() == 64
        && id.chars().all(|c| c.is_ascii_hexdigit())
    {
        return format!("{runtime}-conmon-*.scope");
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use numaward_cgroup::classify;

    use super::*;

    #[test]
    fn names_are_readable_and_few() {
        const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for (path, expected) in [
            ("/system.slice/nginx.service", "nginx.service"),
            ("/system.slice", "system.slice"),
            ("/user.slice/user-1000.slice/user@1000.service/app.slice/a.service", "user@1000.service"),
            ("/user.slice/user-1000.slice/session-12.scope", "session-*.scope"),
            ("/user.slice/user-1000.slice/session-c3.scope", "session-*.scope"),
            ("/system.slice/run-u34.service", "run-*.service"),
            ("/system.slice/run-p71-i72.scope", "run-*.scope"),
            ("/system.slice/run-r0123456789abcdef0123456789abcdef.scope", "run-*.scope"),
            ("/system.slice/run-backup.service", "run-backup.service"),
            ("/system.slice/session-store.service", "session-store.service"),
            (
                r"/machine.slice/machine-qemu\x2d3\x2dweb\x2dprod.scope/libvirt/vcpu0",
                "machine-qemu-*-web-prod.scope",
            ),
            (r"/machine.slice/machine-lxc\x2d12345\x2dweb.scope", "machine-lxc-*-web.scope"),
            (r"/machine.slice/machine-web\x2d3.scope", "machine-web-3.scope"),
            ("/machine.slice/libpod-conmon-{ID}.scope", "libpod-conmon-*.scope"),
            ("/machine.slice/crio-conmon-web.scope", "crio-conmon-web.scope"),
            ("/system.slice/docker-{ID}.scope", "docker"),
            ("/docker/{ID}", "containers"),
            ("/batch/\x1b[2J-{ID}.scope", "containers"),
            ("/kubepods/burstable/pod1-2-3/{ID}", "pods"),
            ("/kubepods/burstable", "kubepods"),
            ("/numaward/bench", "numaward/bench"),
            ("/batch/job/step", "batch"),
            ("/other/x", "/other"),
        ] {
            let workload = classify(&path.replace("{ID}", ID).parse().unwrap(), |_| false);
            assert_eq!(name(&workload), expected, "{path}");
        }
    }
}

//! Check for threads that run on fewer CPUs than their cgroup has.

use std::cmp::Reverse;

use numaward_api::doctor::HostCheck;
use numaward_cgroup::{CgroupPath, Hierarchy, affinity::narrow_threads};

use super::{DoctorHost, check, ok};

/// The maximum number of cgroups in the finding.
const MAX_CGROUPS: usize = 5;

/// Lists the threads that run on fewer CPUs than their cgroup has; `None` if there are none. The root cgroup is skipped: its threads
/// belong to the kernel.
pub(super) fn examine_threads(host: &DoctorHost<'_>) -> Option<HostCheck> {
    let (mount, _) = host.mount("cgroup2")?;
    let (proc, root) = (host.root.join("proc"), host.root.join(mount));
    let paths = Hierarchy::at(&root).walk().ok()?.into_iter().map(|cgroup| cgroup.path);
    let narrow = |path: CgroupPath| Some((narrow_threads(&proc, &path.dir(&root)).ok()??, path));
    let mut found: Vec<_> = paths.filter(|path| !path.is_root()).filter_map(narrow).collect();
    if found.is_empty() {
        return None;
    }
    found.sort_by_key(|(narrow, path)| (Reverse(narrow.threads), path.clone()));
    let threads: usize = found.iter().map(|(narrow, _)| narrow.threads).sum();
    let listed = found.iter().take(MAX_CGROUPS);
    let named: Vec<String> = listed
        .map(|(narrow, path)| {
            format!("{path} ({} on CPUs {} of {})", narrow.threads, narrow.cpus, narrow.available)
        })
        .collect();
    let more = found.len().saturating_sub(MAX_CGROUPS);
    let more = if more > 0 { format!(" and {more} more cgroups") } else { String::new() };
    let finding = format!(
        "{threads} threads run on fewer CPUs than their cgroup has: they were bound to some CPUs (CPUAffinity=, taskset, the \
         program itself), or read their affinity and set it again while their cgroup was confined: {}{more}",
        named.join(", ")
    );
    Some(check("thread affinities", ok(finding)))
}

#[cfg(test)]
mod tests {
    use super::{super::tests::tree, *};

    #[test]
    fn lists_threads_on_fewer_cpus() {
        let mounts = ("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        let wide = ("proc/8/status", "Cpus_allowed_list:\t0-7\n");
        let cgroup = [
            ("sys/fs/cgroup/cgroup.threads", "2\n"),
            ("proc/2/status", "Cpus_allowed_list:\t0\n"),
            ("sys/fs/cgroup/cpuset.cpus.effective", "0-7\n"),
            ("sys/fs/cgroup/a/cgroup.threads", "7\n8\n"),
        ];
        let found = |narrow: &str| {
            let root = tree(&[&[mounts, wide, ("proc/7/status", narrow)], &cgroup[..]].concat());
            examine_threads(&DoctorHost { root: root.path() }).map(|check| check.finding)
        };
        assert_eq!(found("Cpus_allowed_list:\t0-15\n"), None);
        let finding = found("Cpus_allowed_list:\t0-4\n").unwrap();
        assert!(finding.starts_with("1 threads run on fewer CPUs"), "{finding}");
        assert!(finding.ends_with(": /a (1 on CPUs 0-4 of 0-7)"), "{finding}");
    }
}

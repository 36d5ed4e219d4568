//! Kernel features for cgroups that not every supported kernel has.
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst and its history, `fanotify_mark(2)`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use numaward_topology::{KernelFeature, KernelRelease};

use crate::{CgroupPath, KnobWatch, knob::Knob, mounts::mount_points};

/// A write to `cpuset.mems` moves the pages of the cgroup's processes.
pub const MOVES_PAGES: KernelFeature = KernelFeature {
    name: "pages follow cpuset.mems",
    since: KernelRelease::new(5, 15),
    fallback: "the daemon moves them, process by process; it keeps CAP_SYS_PTRACE for that",
    is_degraded: false,
};

/// The nodes of a cgroup's hugepages can be read.
pub const HUGETLB_NUMA_STAT: KernelFeature = KernelFeature {
    name: "hugetlb.SIZE.numa_stat",
    since: KernelRelease::new(5, 17),
    fallback: "a workload counts as using all of its guaranteed hugepages; their nodes are not shown",
    is_degraded: true,
};

/// The page cache of a cgroup can be dropped.
pub const RECLAIM: KernelFeature = KernelFeature {
    name: "memory.reclaim",
    since: KernelRelease::new(5, 19),
    fallback: "page cache is not dropped, neither for a budget nor for the headroom guard",
    is_degraded: true,
};

/// fanotify marks that do not keep a removed cgroup in memory.
pub const EVICTABLE_MARKS: KernelFeature = KernelFeature {
    name: "evictable marks of fanotify",
    since: KernelRelease::new(5, 19),
    fallback: "knobs are checked every second, and the process that wrote one stays unknown",
    is_degraded: true,
};

/// Partitions in which the scheduler does not balance load.
pub const ISOLATED: KernelFeature = KernelFeature {
    name: "cpuset.cpus.partition: isolated",
    since: KernelRelease::new(6, 1),
    fallback: "only root: the scheduler still balances load among such CPUs",
    is_degraded: true,
};

/// The kernel reports the relative speed of memory.
pub const MEMORY_TIERS: KernelFeature = KernelFeature {
    name: "memory tiers",
    since: KernelRelease::new(6, 1),
    fallback: "a node with CPUs counts as dram, and one without serves no request for a tier",
    is_degraded: true,
};

/// Partitions below the first level of the hierarchy.
pub const EXCLUSIVE: KernelFeature = KernelFeature {
    name: "cpuset.cpus.exclusive",
    since: KernelRelease::new(6, 7),
    fallback: "only cgroups at the top become partitions; a partition for any other cgroup is refused",
    is_degraded: true,
};

pub const ALL: [KernelFeature; 7] =
    [MOVES_PAGES, HUGETLB_NUMA_STAT, RECLAIM, EVICTABLE_MARKS, ISOLATED, MEMORY_TIERS, EXCLUSIVE];

/// Returns each feature of [`ALL`], with true if the kernel of the host at `root` has it. Features that leave a trace
/// in the file system are detected by it, and the rest by the kernel's release. `None` if neither is conclusive.
pub fn detect(root: &Path) -> Vec<(KernelFeature, Option<bool>)> {
    let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
    let release = KernelRelease::parse(&release);
    let numbered = |need: KernelFeature| (need, release.map(|release| release >= need.since));
    let below = |mount: &Path| root.join(mount.strip_prefix("/").unwrap_or(mount));
    let mount = mount_points(root).ok().and_then(|mounts| mounts.first().map(|mount| below(mount)));
    let cgroups = mount.as_deref();
    vec![
        numbered(MOVES_PAGES),
        (HUGETLB_NUMA_STAT, cgroups.and_then(has_numa_stat)),
        (RECLAIM, cgroups.and_then(|cgroups| has_file_next_to(cgroups, "memory.current", "memory.reclaim"))),
        (EVICTABLE_MARKS, cgroups.filter(|_| root == Path::new("/")).and_then(accepts_marks)),
        numbered(ISOLATED),
        (MEMORY_TIERS, Some(root.join("sys/devices/virtual/memory_tiering").exists())),
        (
            EXCLUSIVE,
            cgroups.and_then(|cgroups| has_file_next_to(cgroups, "cpuset.mems", "cpuset.cpus.exclusive")),
        ),
    ]
}

/// Returns the children of the root cgroup, in no particular order.
fn top_level(cgroups: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(cgroups).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// Returns true if the first cgroup with the file `known` also has the file `wanted`; `None` if no cgroup has `known`.
fn has_file_next_to(cgroups: &Path, known: &str, wanted: &str) -> Option<bool> {
    let cgroup = top_level(cgroups).find(|cgroup| cgroup.join(known).exists())?;
    Some(cgroup.join(wanted).exists())
}

fn has_numa_stat(cgroups: &Path) -> Option<bool> {
    top_level(cgroups).find_map(|cgroup| {
        let files = fs::read_dir(cgroup).ok()?.flatten().map(|file| file.file_name());
        let names: Vec<_> = files.filter_map(|name| name.into_string().ok()).collect();
        let of_pools =
            |end: &str| names.iter().any(|name| name.starts_with("hugetlb.") && name.ends_with(end));
        of_pools(".current").then(|| of_pools(".numa_stat"))
    })
}

fn accepts_marks(cgroups: &Path) -> Option<bool> {
    let watch = KnobWatch::new(cgroups).ok()?;
    match watch.add(&CgroupPath::root(), Knob::CpusetCpusEffective) {
        Ok(true) => Some(true),
        // The controller is not in this hierarchy.
        Ok(false) => None,
        Err(_) => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<(&'static str, Option<bool>)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        detect(root.path()).into_iter().map(|(need, here)| (need.name, here)).collect()
    }

    #[test]
    fn detects_by_files_or_by_release() {
        const MOUNT: (&str, &str) =
            ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        let old = [
            MOUNT,
            ("proc/sys/kernel/osrelease", "5.10.0-32-cloud-amd64\n"),
            ("sys/fs/cgroup/a/cgroup.procs", ""),
            ("sys/fs/cgroup/b/memory.current", ""),
            ("sys/fs/cgroup/b/cpuset.mems", ""),
            ("sys/fs/cgroup/b/hugetlb.2MB.current", ""),
        ];
        let new = [
            ("proc/sys/kernel/osrelease", "6.12.1\n"),
            ("sys/fs/cgroup/b/memory.reclaim", ""),
            ("sys/fs/cgroup/b/cpuset.cpus.exclusive", ""),
            ("sys/fs/cgroup/b/hugetlb.2MB.numa_stat", ""),
            ("sys/devices/virtual/memory_tiering/x", ""),
        ];
        let only = |here| ALL.map(|need| (need.name, if need == EVICTABLE_MARKS { None } else { here }));
        assert_eq!(found(&old), only(Some(false)));
        assert_eq!(found(&[&old[..], &new].concat()), only(Some(true)));
        let nothing = found(&[]);
        assert!(
            nothing.iter().all(|(name, here)| here.is_none() || *name == MEMORY_TIERS.name),
            "{nothing:?}"
        );
    }
}

//! A mounted cgroup v2 hierarchy: discovery, walks, ids and paths.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use numaward_topology::CpuSet;

use crate::{
    CgroupId, CgroupPath,
    gone::is_gone,
    knob::{Knob, KnobValue},
    mounts::{MountsError, mount_points},
    read::visit_processes,
    tracking_limits::{Delegation, TrackedCounts},
};

/// `CGROUP2_SUPER_MAGIC` of linux/magic.h.
const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;

/// The remedy in error messages about a missing hierarchy.
const REMEDY: &str = "boot with `systemd.unified_cgroup_hierarchy=1` (without systemd: `cgroup_no_v1=all`), \
                    or mount it: `mount -t cgroup2 none /sys/fs/cgroup`";

/// A mounted cgroup v2 hierarchy.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    root: PathBuf,
}

/// A cgroup, identified by its id and its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    pub id: CgroupId,
    /// The path below the root of the hierarchy.
    pub path: CgroupPath,
}

/// There is no usable cgroup v2 hierarchy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The mounts of this process cannot be read.
    #[error(transparent)]
    Mounts(#[from] MountsError),
    /// No hierarchy is mounted.
    #[error("no cgroup v2 hierarchy is mounted: {REMEDY}")]
    NotMounted,
    /// The given directory cannot be used.
    #[error("cannot open {path} as a cgroup v2 hierarchy: {source}", path = path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// The given directory is on another file system.
    #[error("{path} is not a cgroup v2 hierarchy (file system type {magic:#x}, expected {CGROUP2_SUPER_MAGIC:#x}): {REMEDY}", path = path.display())]
    NotCgroup2 {
        path: PathBuf,
        /// The magic number of its file system.
        magic: u64,
    },
}

/// The hierarchy cannot be walked.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the cgroups in {path}: {source}", path = path.display())]
pub struct WalkError {
    /// The directory that cannot be read. A directory that vanished is an error only if it is the root.
    pub path: PathBuf,
    pub source: io::Error,
}

impl Hierarchy {
    /// Opens the cgroup v2 hierarchy of this host, wherever it is mounted: alone or, as `unified`, next to v1.
    ///
    /// If there are several mounts, the one that shows the largest part of the hierarchy is used: in a container, the
    /// host's before its own.
    pub fn open() -> Result<Self, OpenError> {
        Self::open_at(mount_points(Path::new("/"))?.first().ok_or(OpenError::NotMounted)?)
    }

    /// Opens the cgroup v2 hierarchy that is mounted at `root`.
    pub fn open_at(root: &Path) -> Result<Self, OpenError> {
        let status = rustix::fs::statfs(root)
            .map_err(|errno| OpenError::Unreadable { path: root.into(), source: errno.into() })?;
        // The type of the field depends on the architecture.
        match u64::try_from(status.f_type).unwrap_or(0) {
            CGROUP2_SUPER_MAGIC => Ok(Self::at(root)),
            magic => Err(OpenError::NotCgroup2 { path: root.into(), magic }),
        }
    }

    /// Uses the directory `root` as a hierarchy without a check of its file system: for tests and recorded trees.
    pub fn at(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// Returns the directory of the root cgroup.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of a cgroup.
    pub fn dir(&self, path: &CgroupPath) -> PathBuf {
        path.dir(&self.root)
    }

    /// Returns the CPUs of `pool` that are not available to the root cgroup: they are in cpuset partitions, or offline.
    /// Some kernels have no `cpuset.cpus.effective` in the root cgroup; the result is empty then.
    pub fn partition_cpus(&self, pool: &CpuSet) -> CpuSet {
        match Knob::CpusetCpusEffective.read(&self.root) {
            Ok(KnobValue::Cpus(effective)) if !effective.is_empty() => pool - &effective,
            _ => CpuSet::new(),
        }
    }

    /// Returns the cgroup of this process. In a separate cgroup namespace, `/proc/self/cgroup` does not show its place
    /// in the hierarchy: then all cgroups are searched.
    pub fn own_cgroup(&self) -> Option<CgroupPath> {
        let own = std::process::id();
        let is_in = |path: &CgroupPath| {
            let mut is_found = false;
            let _gone = visit_processes(&self.dir(path), |process| {
                is_found = process == own;
                !is_found
            });
            is_found
        };
        let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let listed = text.lines().find_map(|line| line.strip_prefix("0::")?.parse::<CgroupPath>().ok());
        listed.filter(is_in).or_else(|| self.walk().ok()?.into_iter().map(|cgroup| cgroup.path).find(is_in))
    }

    /// Returns all cgroups, the root first and each one before its descendants.
    ///
    /// A cgroup that vanishes meanwhile may be missing. A cgroup with a name that is not UTF-8 is skipped with its
    /// descendants: they count as part of its parent, as in the probes. Cgroups beyond the limits are also skipped.
    pub fn walk(&self) -> Result<Vec<Cgroup>, WalkError> {
        self.walk_with_counts(&mut TrackedCounts::default())
    }

    pub(crate) fn walk_with_counts(&self, counts: &mut TrackedCounts) -> Result<Vec<Cgroup>, WalkError> {
        let root =
            DirStat::read(&self.root).map_err(|source| WalkError { path: self.root.clone(), source })?;
        let path = CgroupPath::root();
        let delegation = counts.delegation(&path, root.owner, &None);
        let mut found: Vec<(Cgroup, bool, Delegation)> =
            vec![(Cgroup { id: root.id, path }, root.is_leaf, delegation)];
        let mut next = 0;
        while let Some((Cgroup { path: parent, .. }, is_leaf, delegation)) = found.get(next).cloned() {
            next += 1;
            if is_leaf {
                continue;
            }
            // One more than allowed, to detect that the limit is exceeded.
            let children = match self.children(&parent, counts.remaining(&delegation) + 1) {
                Ok(children) => children,
                Err(error) if is_gone(&error) && !parent.is_root() => continue,
                Err(source) => return Err(WalkError { path: self.dir(&parent), source }),
            };
            for (path, stat) in children {
                let delegation = counts.delegation(&path, stat.owner, &delegation);
                if counts.add(&path, &delegation) {
                    found.push((Cgroup { id: stat.id, path }, stat.is_leaf, delegation));
                }
            }
        }
        Ok(found.into_iter().map(|(cgroup, ..)| cgroup).collect())
    }

    /// Returns at most `most` of the children of a cgroup. Children that vanish meanwhile are skipped.
    pub(crate) fn children(
        &self,
        parent: &CgroupPath,
        most: usize,
    ) -> io::Result<Vec<(CgroupPath, DirStat)>> {
        let dir = self.dir(parent);
        let mut children = Vec::new();
        for entry in fs::read_dir(&dir)? {
            if children.len() == most {
                break;
            }
            let entry = entry?;
            if !entry.file_type()?.is_dir() {
                continue;
            }
            let Some(path) = entry.file_name().to_str().and_then(|name| parent.child(name).ok()) else {
                continue;
            };
            match DirStat::read(&entry.path()) {
                Ok(stat) => children.push((path, stat)),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(children)
    }

    /// Returns the id of a cgroup; `None` if it does not exist.
    pub fn id_of(&self, path: &CgroupPath) -> Result<Option<CgroupId>, WalkError> {
        let dir = self.dir(path);
        match DirStat::read(&dir) {
            Ok(stat) => Ok(Some(stat.id)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(source) => Err(WalkError { path: dir, source }),
        }
    }
}

/// Metadata of a cgroup's directory.
pub(crate) struct DirStat {
    pub(crate) id: CgroupId,
    /// The user id of the owner.
    pub(crate) owner: u32,
    /// True if the directory has no subdirectories. It then has two links; each subdirectory adds one for its parent
    /// entry. Listing a directory without subdirectories would return only some eighty files. (Some file systems always
    /// report 1.)
    pub(crate) is_leaf: bool,
}

impl DirStat {
    pub(crate) fn read(dir: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(dir)?;
        if !metadata.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { id: CgroupId(metadata.ino()), owner: metadata.uid(), is_leaf: metadata.nlink() == 2 })
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    use super::*;

    fn tree(dirs: &[&str]) -> (tempfile::TempDir, Hierarchy) {
        let root = tempfile::tempdir().unwrap();
        for dir in dirs {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let hierarchy = Hierarchy::at(root.path());
        (root, hierarchy)
    }

    #[test]
    fn finds_cgroup_of_this_process() {
        let (root, hierarchy) = tree(&["a/b", "c"]);
        fs::write(root.path().join("c/cgroup.procs"), "1\n0\n").unwrap();
        assert_eq!(hierarchy.own_cgroup(), None);
        fs::write(root.path().join("a/b/cgroup.procs"), format!("1\n{}\n", std::process::id())).unwrap();
        assert_eq!(hierarchy.own_cgroup().unwrap().as_str(), "/a/b");
    }

    #[test]
    fn partitions_have_unavailable_cpus() {
        let (root, hierarchy) = tree(&["a"]);
        let pool = "0-3".parse().unwrap();
        for (effective, expected) in
            [(None, ""), (Some("0-1,3\n"), "2"), (Some("0-7\n"), ""), (Some("\n"), "")]
        {
            if let Some(effective) = effective {
                fs::write(root.path().join("cpuset.cpus.effective"), effective).unwrap();
            }
            assert_eq!(hierarchy.partition_cpus(&pool).to_string(), expected, "{effective:?}");
        }
    }

    #[test]
    fn a_walk_finds_each_cgroup_after_its_parent() {
        let (root, hierarchy) = tree(&["a/b/c", "a/d", "e"]);
        fs::write(root.path().join("a/cgroup.procs"), "").unwrap();
        fs::create_dir_all(root.path().join(OsStr::from_bytes(b"no\xfftext/below"))).unwrap();
        let found = hierarchy.walk().unwrap();
        let mut paths: Vec<&str> = found.iter().map(|cgroup| cgroup.path.as_str()).collect();
        for (index, cgroup) in found.iter().enumerate().skip(1) {
            let parent = cgroup.path.parent().unwrap();
            assert!(
                found[..index].iter().any(|cgroup| cgroup.path == parent),
                "{cgroup:?} before its parent"
            );
        }
        paths.sort_unstable();
        assert_eq!(paths, ["/", "/a", "/a/b", "/a/b/c", "/a/d", "/e"]);
    }

    #[test]
    fn a_path_leads_to_its_id() {
        let (root, hierarchy) = tree(&["a/b"]);
        let path: CgroupPath = "/a/b".parse().unwrap();
        let id = hierarchy.id_of(&path).unwrap().unwrap();
        assert_eq!(id.0, fs::metadata(root.path().join("a/b")).unwrap().ino());
        fs::remove_dir(root.path().join("a/b")).unwrap();
        assert_eq!(hierarchy.id_of(&path).unwrap(), None);
        fs::write(root.path().join("file"), "").unwrap();
        assert_eq!(hierarchy.id_of(&"/file".parse().unwrap()).unwrap(), None);
    }

    #[test]
    fn refuses_other_file_systems() {
        let (root, hierarchy) = tree(&[]);
        let error = Hierarchy::open_at(root.path()).unwrap_err();
        assert!(matches!(error, OpenError::NotCgroup2 { .. }), "{error}");
        assert!(error.to_string().contains("mount -t cgroup2"), "{error}");
        assert!(OpenError::NotMounted.to_string().contains("systemd.unified_cgroup_hierarchy=1"));
        drop(root);
        let error = Hierarchy::open_at(hierarchy.root()).unwrap_err();
        assert!(matches!(error, OpenError::Unreadable { .. }), "{error}");
        let error = hierarchy.walk().unwrap_err();
        assert_eq!(error.path, hierarchy.root());
    }
}

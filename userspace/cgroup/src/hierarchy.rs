//! A mounted cgroup v2 hierarchy: finding it, walking it, ids and paths.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    CgroupId, CgroupPath,
    census::{Census, Delegation},
    gone::is_gone,
    mounts::{MountsError, mount_points},
    read::processes,
};

/// `CGROUP2_SUPER_MAGIC` of linux/magic.h.
const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;

/// How to get a cgroup v2 hierarchy, for messages.
const REMEDY: &str = "boot with `systemd.unified_cgroup_hierarchy=1` (without systemd: `cgroup_no_v1=all`), \
                    or mount it: `mount -t cgroup2 none /sys/fs/cgroup`";

/// A mounted cgroup v2 hierarchy.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    root: PathBuf,
}

/// A cgroup: its id and its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// The kernel's id.
    pub id: CgroupId,
    /// The path below the root of the hierarchy.
    pub path: CgroupPath,
}

/// There is no cgroup v2 hierarchy to work with.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The mounts of this process cannot be read.
    #[error(transparent)]
    Mounts(#[from] MountsError),
    /// None is mounted.
    #[error("no cgroup v2 hierarchy is mounted: {REMEDY}")]
    NotMounted,
    /// The directory given cannot be used.
    #[error("cannot open {path} as a cgroup v2 hierarchy: {source}", path = path.display())]
    Unreadable {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory given is on another file system.
    #[error("{path} is not a cgroup v2 hierarchy (file system type {magic:#x}, expected {CGROUP2_SUPER_MAGIC:#x}): {REMEDY}", path = path.display())]
    NotCgroup2 {
        /// The directory.
        path: PathBuf,
        /// The magic number of its file system.
        magic: u64,
    },
}

/// The hierarchy cannot be walked.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the cgroups in {path}: {source}", path = path.display())]
pub struct WalkError {
    /// The directory that cannot be read. One that vanished is no error, unless it is the root.
    pub path: PathBuf,
    /// The system's error.
    pub source: io::Error,
}

impl Hierarchy {
    /// The cgroup v2 hierarchy of this host, wherever it is mounted: alone or, as `unified`, beside v1.
    ///
    /// Where several are mounted, the one that shows the most: in a container, the host's before its own.
    pub fn open() -> Result<Self, OpenError> {
        Self::open_at(mount_points(Path::new("/"))?.first().ok_or(OpenError::NotMounted)?)
    }

    /// The cgroup v2 hierarchy mounted at `root`.
    pub fn open_at(root: &Path) -> Result<Self, OpenError> {
        let status = rustix::fs::statfs(root)
            .map_err(|errno| OpenError::Unreadable { path: root.into(), source: errno.into() })?;
        // The type of the field differs by architecture.
        match u64::try_from(status.f_type).unwrap_or(0) {
            CGROUP2_SUPER_MAGIC => Ok(Self::at(root)),
            magic => Err(OpenError::NotCgroup2 { path: root.into(), magic }),
        }
    }

    /// The directory `root` taken for a hierarchy, whatever its file system: for tests and recorded trees.
    pub fn at(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// The directory of the root cgroup.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of a cgroup.
    pub fn dir(&self, path: &CgroupPath) -> PathBuf {
        path.dir(&self.root)
    }

    /// The cgroup of this process. In a cgroup namespace of its own, `/proc/self/cgroup` does not say where that is: then all are
    /// searched.
    pub fn own_cgroup(&self) -> Option<CgroupPath> {
        let own = std::process::id();
        let is_in = |path: &CgroupPath| processes(&self.dir(path)).is_ok_and(|there| there.contains(&own));
        let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let said = text.lines().find_map(|line| line.strip_prefix("0::")?.parse::<CgroupPath>().ok());
        said.filter(is_in).or_else(|| self.walk().ok()?.into_iter().map(|of| of.path).find(is_in))
    }

    /// Every cgroup, the root first and each one before those below it.
    ///
    /// One that vanishes meanwhile may be in the list or not. One whose name is not UTF-8 is skipped, with
    /// all below it: it belongs to its parent then, as for the probes. So are those for which there are too many.
    pub fn walk(&self) -> Result<Vec<Cgroup>, WalkError> {
        self.walk_counting(&mut Census::default())
    }

    pub(crate) fn walk_counting(&self, census: &mut Census) -> Result<Vec<Cgroup>, WalkError> {
        let root = Stat::of(&self.root).map_err(|source| WalkError { path: self.root.clone(), source })?;
        let path = CgroupPath::root();
        let delegation = census.delegation(&path, root.owner, &None);
        let mut found: Vec<(Cgroup, bool, Delegation)> =
            vec![(Cgroup { id: root.id, path }, root.is_leaf, delegation)];
        let mut next = 0;
        while let Some((Cgroup { path: parent, .. }, is_leaf, delegation)) = found.get(next).cloned() {
            next += 1;
            if is_leaf {
                continue;
            }
            // One more, to know that there are more.
            let children = match self.children(&parent, census.room(&delegation) + 1) {
                Ok(children) => children,
                Err(error) if is_gone(&error) && !parent.is_root() => continue,
                Err(source) => return Err(WalkError { path: self.dir(&parent), source }),
            };
            for (path, stat) in children {
                let delegation = census.delegation(&path, stat.owner, &delegation);
                if census.take(&delegation) {
                    found.push((Cgroup { id: stat.id, path }, stat.is_leaf, delegation));
                }
            }
        }
        Ok(found.into_iter().map(|(cgroup, ..)| cgroup).collect())
    }

    /// At most so many of the cgroups directly below one. Those that vanish meanwhile are skipped.
    pub(crate) fn children(&self, parent: &CgroupPath, most: usize) -> io::Result<Vec<(CgroupPath, Stat)>> {
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
            match Stat::of(&entry.path()) {
                Ok(stat) => children.push((path, stat)),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(children)
    }

    /// The id of a cgroup; `None` where there is none (any more).
    pub fn id_of(&self, path: &CgroupPath) -> Result<Option<CgroupId>, WalkError> {
        let dir = self.dir(path);
        match Stat::of(&dir) {
            Ok(stat) => Ok(Some(stat.id)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(source) => Err(WalkError { path: dir, source }),
        }
    }
}

/// What is asked of a directory.
pub(crate) struct Stat {
    pub(crate) id: CgroupId,
    /// The id of a user.
    pub(crate) owner: u32,
    /// A directory has a link for itself and two names, and one for the parent entry of each directory in it.
    /// Reading one without any would list some eighty files in vain. (Some file systems say 1 always.)
    pub(crate) is_leaf: bool,
}

impl Stat {
    pub(crate) fn of(dir: &Path) -> io::Result<Self> {
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
    fn the_cgroup_of_this_process_is_found() {
        let (root, hierarchy) = tree(&["a/b", "c"]);
        fs::write(root.path().join("c/cgroup.procs"), "1\n0\n").unwrap();
        assert_eq!(hierarchy.own_cgroup(), None);
        fs::write(root.path().join("a/b/cgroup.procs"), format!("1\n{}\n", std::process::id())).unwrap();
        assert_eq!(hierarchy.own_cgroup().unwrap().as_str(), "/a/b");
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
    fn what_is_no_hierarchy_is_refused() {
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

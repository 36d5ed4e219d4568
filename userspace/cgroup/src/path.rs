//! The two names of a cgroup: the kernel's id and the path.

use std::{
    fs,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use numaward_topology::serde_as_text;
use serde::{Deserialize, Serialize};

/// The id of a cgroup: the inode number of its directory, which the probes also use.
///
/// It is not reused while the machine runs (on 64-bit kernels).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, derive_more::Display,
)]
#[serde(transparent)]
pub struct CgroupId(pub u64);

impl CgroupId {
    /// An id that no cgroup has: the kernel starts with one.
    pub const NONE: Self = Self(0);
}

/// The path of a cgroup below the root of the hierarchy, as in `/proc/PID/cgroup`: `/system.slice/a.service`.
///
/// It is cheap to clone. Paths are ordered by their components, so that a cgroup is directly followed by its
/// descendants.
#[derive(Clone, Debug, PartialEq, Eq, Hash, derive_more::Display)]
pub struct CgroupPath(Arc<str>);

impl CgroupPath {
    /// Returns the root of the hierarchy: `/`.
    pub fn root() -> Self {
        Self("/".into())
    }

    /// Returns true for the root of the hierarchy.
    pub fn is_root(&self) -> bool {
        &*self.0 == "/"
    }

    /// Returns the path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the names from the root down; none for the root itself.
    pub fn components(&self) -> impl Iterator<Item = &str> {
        self.0.split('/').filter(|name| !name.is_empty())
    }

    /// Returns the parent; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        let (parent, _) = self.0.rsplit_once('/').filter(|_| !self.is_root())?;
        Some(Self(if parent.is_empty() { "/" } else { parent }.into()))
    }

    /// Returns the child with this name.
    pub fn child(&self, name: &str) -> Result<Self, PathError> {
        format!("{}/{name}", self.below_root()).parse()
    }

    /// Returns the children in the hierarchy that is mounted at `root`. They are read lazily; there are none if the
    /// cgroup is gone.
    pub fn children(&self, root: &Path) -> impl Iterator<Item = Self> + use<> {
        let entries = fs::read_dir(self.dir(root)).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let parent = self.clone();
        dirs.filter_map(move |entry| parent.child(entry.file_name().to_str()?).ok())
    }

    /// Returns true if `other` is this cgroup or a descendant.
    pub fn contains(&self, other: &Self) -> bool {
        other.0.strip_prefix(self.below_root()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Returns true if one of the two contains the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.contains(other) || other.contains(self)
    }

    /// Returns true if `other` is a child of this cgroup.
    pub fn is_parent_of(&self, other: &Self) -> bool {
        let name = other.0.strip_prefix(self.below_root()).and_then(|rest| rest.strip_prefix('/'));
        name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
    }

    /// Returns this cgroup, its parent, and so on up to the root.
    pub fn ancestors(&self) -> impl Iterator<Item = Self> {
        std::iter::successors(Some(self.clone()), Self::parent)
    }

    /// Returns the directory of the cgroup in a hierarchy mounted at `root`.
    pub fn dir(&self, root: &Path) -> PathBuf {
        match self.below_root() {
            "" => root.to_owned(),
            path => root.join(&path[1..]),
        }
    }

    /// Returns the cgroup with this directory in a hierarchy mounted at `root`; `None` if its path is not UTF-8.
    pub fn from_dir(root: &Path, dir: &Path) -> Option<Self> {
        format!("/{}", dir.strip_prefix(root).ok()?.to_str()?).parse().ok()
    }

    /// Returns the path, but an empty string for the root.
    fn below_root(&self) -> &str {
        if self.is_root() { "" } else { &self.0 }
    }
}

impl Ord for CgroupPath {
    /// Orders by components: the separator comes before all characters of a name.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let rank = |byte: u8| if byte == b'/' { 0 } else { byte };
        let (ours, theirs) = (self.0.as_bytes(), other.0.as_bytes());
        match ours.iter().zip(theirs).find(|(our, their)| our != their) {
            Some((&our, &their)) => rank(our).cmp(&rank(their)),
            None => ours.len().cmp(&theirs.len()),
        }
    }
}

impl PartialOrd for CgroupPath {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// An error in the text of a cgroup's path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the path of a cgroup (expected one such as `/system.slice/nginx.service`)")]
pub struct PathError(pub String);

impl FromStr for CgroupPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        // The kernel refuses line ends in names, because of /proc/PID/cgroup.
        let is_valid = |name: &str| !matches!(name, "" | "." | "..") && !name.contains(['\0', '\n']);
        match text.strip_prefix('/') {
            Some("") => Ok(Self::root()),
            Some(names) if names.split('/').all(is_valid) => Ok(Self(text.into())),
            _ => Err(PathError(text.to_owned())),
        }
    }
}

serde_as_text!(CgroupPath);

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> CgroupPath {
        text.parse().unwrap()
    }

    #[test]
    fn path_has_parent_and_directory() {
        for (text, parent, dir) in [
            ("/", None, "/cg"),
            ("/a", Some("/"), "/cg/a"),
            ("/a.slice/b c.service", Some("/a.slice"), "/cg/a.slice/b c.service"),
        ] {
            let path = path(text);
            assert_eq!(path.to_string(), text);
            assert_eq!(path.parent().map(|parent| parent.to_string()).as_deref(), parent);
            assert_eq!(path.dir(Path::new("/cg")), Path::new(dir));
            assert_eq!(CgroupPath::from_dir(Path::new("/cg"), Path::new(dir)), Some(path));
        }
        assert_eq!(path("/").child("a").unwrap().child("b").unwrap(), path("/a/b"));
        assert_eq!(
            path("/a/b").ancestors().map(|path| path.to_string()).collect::<Vec<_>>(),
            ["/a/b", "/a", "/"]
        );
    }

    #[test]
    fn refuses_malformed_paths() {
        for text in ["", "a", "//", "/a/", "/a//b", "/a/../b", "/.", "/a\n", "/a\0"] {
            assert!(text.parse::<CgroupPath>().is_err(), "{text:?}");
        }
        assert!(path("/a").child("b/..").is_err());
        assert!(path("/a").child("").is_err());
    }

    #[test]
    fn contains_itself_and_descendants() {
        assert!(path("/").contains(&path("/")) && path("/").contains(&path("/a")));
        assert!(path("/a").contains(&path("/a")) && path("/a").contains(&path("/a/b")));
        assert!(!path("/a").contains(&path("/ab")) && !path("/a/b").contains(&path("/a")));
        for (parent, child) in [("/", "/a"), ("/a", "/a/b")] {
            assert!(path(parent).is_parent_of(&path(child)));
        }
        for (other, child) in [("/", "/"), ("/", "/a/b"), ("/a", "/a"), ("/a", "/ab/c"), ("/a/b", "/a")] {
            assert!(!path(other).is_parent_of(&path(child)), "{other} {child}");
        }
    }

    #[test]
    fn descendants_follow_directly() {
        let mut paths = ["/a/b", "/a-1", "/a", "/b", "/", "/a.slice/c"].map(path);
        paths.sort();
        assert_eq!(paths.map(|path| path.to_string()), ["/", "/a", "/a/b", "/a-1", "/a.slice/c", "/b"]);
    }
}

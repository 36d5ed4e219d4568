//! What a cgroup is called: by the kernel a number, by us a path.

use std::{
    fs,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use numaward_topology::serde_as_text;
use serde::{Deserialize, Serialize};

/// The id of a cgroup: the inode number of its directory, and what the kernel's probes call it.
///
/// Not reused while the machine runs (on 64-bit kernels).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, derive_more::Display,
)]
#[serde(transparent)]
pub struct CgroupId(pub u64);

impl CgroupId {
    /// Of no cgroup: the kernel begins with one.
    pub const NONE: Self = Self(0);
}

/// The path of a cgroup below the root of the hierarchy, as in `/proc/PID/cgroup`: `/system.slice/a.service`.
///
/// Cheap to clone. Ordered by its names from the root down, so that a cgroup is directly followed by all that is below it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, derive_more::Display)]
pub struct CgroupPath(Arc<str>);

impl CgroupPath {
    /// The root of the hierarchy: `/`.
    pub fn root() -> Self {
        Self("/".into())
    }

    /// Whether this is the root of the hierarchy.
    pub fn is_root(&self) -> bool {
        &*self.0 == "/"
    }

    /// The path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The names from the root down; none for the root itself.
    pub fn components(&self) -> impl Iterator<Item = &str> {
        self.0.split('/').filter(|name| !name.is_empty())
    }

    /// The parent; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        let (parent, _) = self.0.rsplit_once('/').filter(|_| !self.is_root())?;
        Some(Self(if parent.is_empty() { "/" } else { parent }.into()))
    }

    /// The cgroup called `name` directly below.
    pub fn child(&self, name: &str) -> Result<Self, PathError> {
        format!("{}/{name}", self.below_root()).parse()
    }

    /// Its children in the hierarchy that is mounted at `root`, read as the iterator goes on; none if it is gone.
    pub fn children(&self, root: &Path) -> impl Iterator<Item = Self> + use<> {
        let entries = fs::read_dir(self.dir(root)).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let parent = self.clone();
        dirs.filter_map(move |entry| parent.child(entry.file_name().to_str()?).ok())
    }

    /// Whether `other` is this cgroup or below it.
    pub fn contains(&self, other: &Self) -> bool {
        other.0.strip_prefix(self.below_root()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Whether one of the two contains the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.contains(other) || other.contains(self)
    }

    /// Whether `other` is directly below this cgroup.
    pub fn is_parent_of(&self, other: &Self) -> bool {
        let name = other.0.strip_prefix(self.below_root()).and_then(|rest| rest.strip_prefix('/'));
        name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
    }

    /// This cgroup, its parent, and so on up to the root.
    pub fn ancestors(&self) -> impl Iterator<Item = Self> {
        std::iter::successors(Some(self.clone()), Self::parent)
    }

    /// The directory of the cgroup in a hierarchy mounted at `root`.
    pub fn dir(&self, root: &Path) -> PathBuf {
        match self.below_root() {
            "" => root.to_owned(),
            path => root.join(&path[1..]),
        }
    }

    /// Empty for the root, else as it is.
    fn below_root(&self) -> &str {
        if self.is_root() { "" } else { &self.0 }
    }
}

impl Ord for CgroupPath {
    /// As by components: the separator comes before all that a name may hold.
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

/// A text is no path of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the path of a cgroup (expected one such as `/system.slice/nginx.service`)")]
pub struct PathError(pub String);

impl FromStr for CgroupPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        // The kernel refuses line ends in names, because of /proc/PID/cgroup.
        let sound = |name: &str| !matches!(name, "" | "." | "..") && !name.contains(['\0', '\n']);
        match text.strip_prefix('/') {
            Some("") => Ok(Self::root()),
            Some(names) if names.split('/').all(sound) => Ok(Self(text.into())),
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
    fn a_path_is_names_below_the_root() {
        for (text, parent, dir) in [
            ("/", None, "/cg"),
            ("/a", Some("/"), "/cg/a"),
            ("/a.slice/b c.service", Some("/a.slice"), "/cg/a.slice/b c.service"),
        ] {
            let path = path(text);
            assert_eq!(path.to_string(), text);
            assert_eq!(path.parent().map(|parent| parent.to_string()).as_deref(), parent);
            assert_eq!(path.dir(Path::new("/cg")), Path::new(dir));
        }
        assert_eq!(path("/").child("a").unwrap().child("b").unwrap(), path("/a/b"));
        assert_eq!(
            path("/a/b").ancestors().map(|path| path.to_string()).collect::<Vec<_>>(),
            ["/a/b", "/a", "/"]
        );
    }

    #[test]
    fn what_is_no_path_is_refused() {
        for text in ["", "a", "//", "/a/", "/a//b", "/a/../b", "/.", "/a\n", "/a\0"] {
            assert!(text.parse::<CgroupPath>().is_err(), "{text:?}");
        }
        assert!(path("/a").child("b/..").is_err());
        assert!(path("/a").child("").is_err());
    }

    #[test]
    fn a_cgroup_contains_itself_and_what_is_below() {
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
    fn what_is_below_follows_directly() {
        let mut paths = ["/a/b", "/a-1", "/a", "/b", "/", "/a.slice/c"].map(path);
        paths.sort();
        assert_eq!(paths.map(|path| path.to_string()), ["/", "/a", "/a/b", "/a-1", "/a.slice/c", "/b"]);
    }
}

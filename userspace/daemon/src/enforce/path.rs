//! The name of a cgroup.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// The id of a cgroup: the inode number of its directory. Never reused while the machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CgroupId(pub u64);

/// The path of a cgroup below the root of the hierarchy, as in `/proc/PID/cgroup`: `/system.slice/a.service`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupPath(String);

impl CgroupPath {
    /// The names from the root down; none for the root itself.
    pub fn components(&self) -> impl Iterator<Item = &str> {
        self.0.split('/').filter(|name| !name.is_empty())
    }

    /// The parent; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        let (parent, _) = self.0.rsplit_once('/').filter(|_| self.0 != "/")?;
        Some(Self(if parent.is_empty() { "/" } else { parent }.to_owned()))
    }

    /// The directory of the cgroup in a hierarchy mounted at `root`.
    pub fn dir(&self, root: &Path) -> PathBuf {
        root.join(self.0.trim_start_matches('/'))
    }
}

/// A text is no path of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the path of a cgroup (expected one such as `/system.slice/nginx.service`)")]
pub struct PathError(pub String);

impl FromStr for CgroupPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        let sound = |name: &str| !name.is_empty() && name != "." && name != "..";
        match text.strip_prefix('/') {
            Some("") => Ok(Self(text.to_owned())),
            Some(names) if names.split('/').all(sound) && !names.contains('\0') => Ok(Self(text.to_owned())),
            _ => Err(PathError(text.to_owned())),
        }
    }
}

impl fmt::Display for CgroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for CgroupPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for CgroupPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(D::Error::custom)
    }
}

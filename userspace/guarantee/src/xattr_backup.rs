//! Marks: a copy of the guarantees in extended attributes of cgroups, for recovery if the ledger cannot be read.
//!
//! # Problem
//! Knobs show the settings of a cgroup, but neither the workload nor the original values. If the ledger is damaged,
//! it is rebuilt from the cgroups, and no other user may forge a guarantee.
//!
//! # Algorithm
//! The record of the applied settings and the guarantee of a cgroup are stored in the extended attribute
//! `user.numaward.ID` with the cgroup ID. The owner of a directory can write such an attribute. So marks are only
//! written to and read from directories that belong to the daemon's user and that no other user can write: the mark
//! of a cgroup that is delegated to another user is on its nearest such ancestor. A mark is written after the ledger,
//! and is removed with the cgroup.
//!
//! Attributes `trusted.*` would need no such rule, but require `CAP_SYS_ADMIN`, which the daemon drops. cgroup v2 has
//! user attributes since Linux 5.7, at most 128 per cgroup.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::Arc,
};

use numaward_cgroup::{CgroupId, CgroupPath, Hierarchy};
use numaward_enforce::Record;
use numaward_engine::{OwnerAccount, OwnerId};
use rustix::{
    fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use crate::state::{Guarantee, State};

const PREFIX: &str = "user.numaward.";
/// Version of the format. Marks of other versions are ignored.
const VERSION: u32 = 1;
/// Maximum size of a value and of the list of names in the kernel (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MAX_XATTR_BYTES: usize = 65_536;

/// Content of the attribute of one cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Mark {
    version: u32,
    pub(crate) cgroup: CgroupPath,
    /// Settings that were written to the cgroup.
    pub(crate) record: Arc<Record>,
    /// Guarantee of the cgroup; `None` for an ancestor of one, and for a cgroup without a guarantee.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) held: Option<HeldGuarantee>,
}

/// A guarantee and its account in the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HeldGuarantee {
    /// Name of the guarantee.
    pub(crate) name: String,
    pub(crate) guarantee: Arc<Guarantee>,
    pub(crate) account: Arc<OwnerAccount>,
}

/// Result of reading the marks of a hierarchy.
#[derive(Debug, Default)]
pub struct FoundMarks {
    /// The trusted marks.
    pub(crate) marks: Vec<Mark>,
    /// All attributes of this program on directories that only the daemon can write: directory and attribute name.
    places: Vec<(CgroupPath, String)>,
    /// True if cgroups support user attributes.
    pub(crate) is_supported: bool,
}

impl FoundMarks {
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }
}

/// Keeps the marks equal to the state.
#[derive(Debug)]
pub struct XattrBackup {
    hierarchy: Hierarchy,
    /// Marks by cgroup, with the directory that has the attribute.
    written: BTreeMap<CgroupPath, (CgroupPath, Mark)>,
    /// True if a write failure was logged; it is logged once.
    failure_logged: bool,
}

/// Returns true if no user but the daemon's can write attributes of this directory.
fn is_only_writable_by_daemon(dir: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(dir).is_ok_and(|dir| dir.uid() == own && dir.mode() & 0o022 == 0)
}

fn attribute(id: CgroupId) -> String {
    format!("{PREFIX}{}", id.0)
}

/// Reads the marks of a hierarchy. Directories in which another user can write attributes are left out: their attributes may be many.
pub fn read(hierarchy: &Hierarchy) -> FoundMarks {
    let mut found = FoundMarks { is_supported: true, ..FoundMarks::default() };
    let cgroups = hierarchy.walk().unwrap_or_else(|error| {
        tracing::error!(%error, "marks on cgroups cannot be read: a damaged ledger could not be rebuilt in full");
        Vec::new()
    });
    let mut names = vec![0_u8; MAX_XATTR_BYTES];
    let mut foreign = 0;
    for cgroup in cgroups {
        let dir = hierarchy.dir(&cgroup.path);
        if !is_only_writable_by_daemon(&dir) {
            foreign += 1;
            continue;
        }
        let length = match listxattr(&dir, &mut names[..]) {
            Ok(length) => length,
            Err(Errno::OPNOTSUPP) if cgroup.path.is_root() => {
                return FoundMarks::default();
            }
            Err(_) => continue,
        };
        for name in names[..length].split(|byte| *byte == 0).filter_map(|name| str::from_utf8(name).ok()) {
            let Some(id) = name.strip_prefix(PREFIX) else { continue };
            found.places.push((cgroup.path.clone(), name.to_owned()));
            let mark =
                id.parse().ok().and_then(|id| read_sound_mark(hierarchy, &cgroup.path, name, CgroupId(id)));
            if mark.is_none() {
                tracing::warn!(cgroup = %cgroup.path, name, "a mark on a cgroup is ignored: it is damaged or outdated");
            }
            found.marks.extend(mark);
        }
    }
    if foreign > 0 {
        tracing::info!(
            cgroups = foreign,
            "cgroups on which another user can set attributes are not searched for marks"
        );
    }
    found.marks.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
    found
}

/// Returns a mark on a directory that only the daemon can write, if it is sound: of an existing cgroup at or below it.
fn read_sound_mark(hierarchy: &Hierarchy, place: &CgroupPath, name: &str, id: CgroupId) -> Option<Mark> {
    let mut text = vec![0_u8; MAX_XATTR_BYTES];
    let length = getxattr(hierarchy.dir(place), name, &mut text[..]).ok()?;
    let mark: Mark = serde_json::from_slice(&text[..length]).ok()?;
    let is_sound = mark.version == VERSION
        && mark.record.id == id
        && place.contains(&mark.cgroup)
        && hierarchy.id_of(&mark.cgroup).is_ok_and(|found| found == Some(id))
        && mark
            .held
            .as_ref()
            .is_none_or(|held| held.guarantee.cgroup == mark.cgroup && held.guarantee.id == id);
    is_sound.then_some(mark)
}

impl Mark {
    pub(crate) fn new(cgroup: CgroupPath, record: Arc<Record>, held: Option<HeldGuarantee>) -> Self {
        Self { version: VERSION, cgroup, record, held }
    }

    /// Returns true if the mark has this record and guarantee.
    fn is_equal_to(
        &self,
        record: &Arc<Record>,
        held: Option<(&String, &Arc<Guarantee>, &Arc<OwnerAccount>)>,
    ) -> bool {
        // Most values are the same object, which needs no comparison.
        (Arc::ptr_eq(&self.record, record) || self.record.is_equal_when_written(record))
            && match (&self.held, held) {
                (Some(old), Some((name, guarantee, account))) => {
                    let is_same = || {
                        old.name == *name
                            && old.guarantee.id == guarantee.id
                            && old.guarantee.target == guarantee.target
                    };
                    (Arc::ptr_eq(&old.guarantee, guarantee) || is_same()) && old.account == *account
                }
                (None, None) => true,
                _ => false,
            }
    }
}

impl XattrBackup {
    /// Removes outdated marks and writes those of the state.
    pub fn new(hierarchy: Hierarchy, found: FoundMarks, state: &State) -> Self {
        let mut marks = Self { hierarchy, written: BTreeMap::new(), failure_logged: false };
        let wanted: BTreeSet<_> =
            state.applied.iter().map(|(path, record)| (marks.place(path), attribute(record.id))).collect();
        for (place, name) in found.places {
            if !wanted.contains(&(Some(place.clone()), name.clone())) {
                marks.remove(&place, &name);
            }
        }
        marks.update(state);
        marks
    }

    /// Updates the marks after a change of the state.
    pub fn update(&mut self, state: &State) {
        let held: HashMap<&CgroupPath, (&String, &Arc<Guarantee>)> =
            state.guarantees.iter().map(|(name, held)| (&held.cgroup, (name, held))).collect();
        let outdated: Vec<CgroupPath> =
            self.written.keys().filter(|path| state.applied.get(path).is_none()).cloned().collect();
        for (path, record) in state.applied.iter() {
            let held = held.get(path).and_then(|&(name, guarantee)| {
                Some((name, guarantee, state.ledger.owner(&OwnerId::from(guarantee.owner(name)))?))
            });
            if self.written.get(path).is_some_and(|(_, mark)| mark.is_equal_to(record, held)) {
                continue;
            }
            if let Some((place, mark)) = self.written.remove(path)
                && mark.record.id != record.id
            {
                self.remove(&place, &attribute(mark.record.id));
            }
            let held = held.map(|(name, guarantee, account)| HeldGuarantee {
                name: name.clone(),
                guarantee: guarantee.clone(),
                account: account.clone(),
            });
            self.write(path, Mark::new(path.clone(), record.clone(), held));
        }
        for path in outdated {
            if let Some((place, mark)) = self.written.remove(&path) {
                self.remove(&place, &attribute(mark.record.id));
            }
        }
    }

    /// Returns the nearest directory that only the daemon can write.
    fn place(&self, path: &CgroupPath) -> Option<CgroupPath> {
        path.ancestors().find(|place| is_only_writable_by_daemon(&self.hierarchy.dir(place)))
    }

    fn write(&mut self, path: &CgroupPath, mark: Mark) {
        // A unit that is not running has no cgroup.
        if !matches!(self.hierarchy.id_of(path), Ok(id) if id == Some(mark.record.id)) {
            return;
        }
        let Some(place) = self.place(path) else { return };
        let written = serde_json::to_vec(&mark).map_err(|error| error.to_string()).and_then(|text| {
            let (dir, name) = (self.hierarchy.dir(&place), attribute(mark.record.id));
            setxattr(&dir, name, &text, XattrFlags::empty()).map_err(|errno| errno.to_string())
        });
        match written {
            Ok(()) => drop(self.written.insert(path.clone(), (place, mark))),
            Err(_) if self.failure_logged => {}
            Err(error) => {
                self.failure_logged = true;
                tracing::warn!(cgroup = %place, error, "cgroups cannot be marked: a damaged ledger could not be rebuilt in full");
            }
        }
    }

    fn remove(&self, place: &CgroupPath, name: &str) {
        match removexattr(self.hierarchy.dir(place), name) {
            Ok(()) | Err(Errno::NODATA | Errno::NOENT | Errno::OPNOTSUPP | Errno::NODEV) => {}
            Err(error) => {
                tracing::warn!(cgroup = %place, name, %error, "a mark that is outdated cannot be removed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use numaward_tests_support::skip_outside_ci;
    use rustix::fs::{XattrFlags, setxattr};

    use super::*;

    #[test]
    fn attributes_of_another_user_are_not_collected() {
        if !rustix::process::geteuid().is_root() {
            return skip_outside_ci("only root can change the owner of a directory");
        }
        let root = tempfile::tempdir().unwrap();
        for dir in ["own", "foreign"] {
            let dir = root.path().join(dir);
            fs::create_dir(&dir).unwrap();
            for number in 0..64 {
                setxattr(&dir, format!("{PREFIX}{number}"), b"{}", XattrFlags::empty()).unwrap();
            }
        }
        chown(root.path().join("foreign"), Some(65_534), Some(65_534)).unwrap();
        let found = read(&Hierarchy::at(root.path()));
        let places: BTreeSet<_> = found.places.iter().map(|(place, _)| place.as_str()).collect();
        assert_eq!((places, found.places.len()), (["/own"].into(), 64));
    }
}

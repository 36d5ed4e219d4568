//! Marks: what is held, noted on the cgroups themselves, for the day on which the ledger cannot be read.
//!
//! Problem: knobs say what a cgroup has, but not for whom, nor who wrote them, nor what was there before. A ledger that
//! is damaged is to be rebuilt from what lives, and nobody else may talk us into a promise that was never given.
//!
//! Answer: the record of what was applied to a cgroup and what its workload holds is an extended attribute `user.numaward.ID` of the
//! cgroup ID. Such an attribute can be written by anybody who may write the directory, so it is put on, and believed of,
//! only directories that belong to the user we run as: of a cgroup that was delegated to somebody else, the mark is on
//! the nearest ancestor that is ours. It is written after the ledger, which it repeats, and dies with the cgroup.
//!
//! `trusted.*` would do without the detour, but takes `CAP_SYS_ADMIN`, which the daemon gives up. cgroup v2 has user
//! attributes since Linux 5.7, at most 128 on a cgroup.

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
/// The version of the format that is written. Others are not read.
const VERSION: u32 = 1;
/// The longest value that the kernel takes, and the longest list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const LIMIT: usize = 65_536;

/// What is noted of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Mark {
    version: u32,
    /// The cgroup.
    pub(crate) cgroup: CgroupPath,
    /// What was written there.
    pub(crate) record: Arc<Record>,
    /// For whom; absent for a mere ancestor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) held: Option<Held>,
}

/// Who holds a cgroup, and what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Held {
    /// The name of the allocation.
    pub(crate) name: String,
    /// Who holds it.
    pub(crate) guarantee: Arc<Guarantee>,
    /// What the engine promised.
    pub(crate) account: Arc<OwnerAccount>,
}

/// What the cgroups say.
#[derive(Debug, Default)]
pub struct Found {
    /// The marks that can be believed.
    pub(crate) marks: Vec<Mark>,
    /// Every attribute of ours: its directory and name.
    places: Vec<(CgroupPath, String)>,
    /// Whether cgroups can have marks at all.
    pub(crate) is_supported: bool,
}

impl Found {
    /// Whether there is no mark that can be believed.
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }
}

/// Keeps the marks as the state is.
#[derive(Debug)]
pub struct XattrBackup {
    hierarchy: Hierarchy,
    /// What was written, with the directory it is on.
    written: BTreeMap<CgroupPath, (CgroupPath, Mark)>,
    /// A failure was reported.
    reported: bool,
}

/// Whether only the user we run as writes the attributes of this directory.
fn is_ours(dir: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(dir).is_ok_and(|dir| dir.uid() == own && dir.mode() & 0o022 == 0)
}

fn attribute(id: CgroupId) -> String {
    format!("{PREFIX}{}", id.0)
}

/// Reads what the cgroups of this hierarchy say.
pub fn read(hierarchy: &Hierarchy) -> Found {
    let mut found = Found { is_supported: true, ..Found::default() };
    let cgroups = hierarchy.walk().unwrap_or_else(|error| {
        tracing::error!(%error, "marks on cgroups cannot be read");
        Vec::new()
    });
    let mut names = vec![0_u8; LIMIT];
    for cgroup in cgroups {
        let dir = hierarchy.dir(&cgroup.path);
        let length = match listxattr(&dir, &mut names[..]) {
            Ok(length) => length,
            Err(Errno::OPNOTSUPP) if cgroup.path.is_root() => {
                return Found::default();
            }
            Err(_) => continue,
        };
        for name in names[..length].split(|byte| *byte == 0).filter_map(|name| str::from_utf8(name).ok()) {
            let Some(id) = name.strip_prefix(PREFIX) else { continue };
            found.places.push((cgroup.path.clone(), name.to_owned()));
            let mark = id.parse().ok().and_then(|id| read_one(hierarchy, &cgroup.path, name, CgroupId(id)));
            if mark.is_none() {
                tracing::warn!(cgroup = %cgroup.path, name, "a mark is not believed");
            }
            found.marks.extend(mark);
        }
    }
    found.marks.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
    found
}

/// A mark that can be believed: on a directory of ours, of a cgroup that is there, at or below it.
fn read_one(hierarchy: &Hierarchy, place: &CgroupPath, name: &str, id: CgroupId) -> Option<Mark> {
    let dir = hierarchy.dir(place);
    let mut text = vec![0_u8; LIMIT];
    let length = getxattr(&dir, name, &mut text[..]).ok()?;
    let mark: Mark = serde_json::from_slice(&text[..length]).ok()?;
    let is_sound = mark.version == VERSION
        && mark.record.id == id
        && place.contains(&mark.cgroup)
        && hierarchy.id_of(&mark.cgroup).is_ok_and(|found| found == Some(id))
        && mark
            .held
            .as_ref()
            .is_none_or(|held| held.guarantee.cgroup == mark.cgroup && held.guarantee.id == id);
    (is_sound && is_ours(&dir)).then_some(mark)
}

impl Mark {
    pub(crate) fn new(cgroup: CgroupPath, record: Arc<Record>, held: Option<Held>) -> Self {
        Self { version: VERSION, cgroup, record, held }
    }

    /// Whether it says just this.
    fn says(
        &self,
        record: &Arc<Record>,
        held: Option<(&String, &Arc<Guarantee>, &Arc<OwnerAccount>)>,
    ) -> bool {
        // Most are the very same, so that nothing has to be compared.
        self.record == *record
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
    /// Keeps them in this hierarchy, in which these were found.
    pub fn new(hierarchy: Hierarchy, found: Found, state: &State) -> Self {
        let mut marks = Self { hierarchy, written: BTreeMap::new(), reported: false };
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

    /// Marks the cgroups as the state is.
    pub fn update(&mut self, state: &State) {
        let held: HashMap<&CgroupPath, (&String, &Arc<Guarantee>)> =
            state.guarantees.iter().map(|(name, held)| (&held.cgroup, (name, held))).collect();
        let over: Vec<CgroupPath> =
            self.written.keys().filter(|path| state.applied.get(path).is_none()).cloned().collect();
        for (path, record) in state.applied.iter() {
            let held = held.get(path).and_then(|&(name, guarantee)| {
                Some((name, guarantee, state.ledger.owner(&OwnerId::from(guarantee.owner(name)))?))
            });
            if self.written.get(path).is_some_and(|(_, mark)| mark.says(record, held)) {
                continue;
            }
            if let Some((place, mark)) = self.written.remove(path)
                && mark.record.id != record.id
            {
                self.remove(&place, &attribute(mark.record.id));
            }
            let held = held.map(|(name, guarantee, account)| Held {
                name: name.clone(),
                guarantee: guarantee.clone(),
                account: account.clone(),
            });
            self.write(path, Mark::new(path.clone(), record.clone(), held));
        }
        for path in over {
            if let Some((place, mark)) = self.written.remove(&path) {
                self.remove(&place, &attribute(mark.record.id));
            }
        }
    }

    /// The nearest directory of ours.
    fn place(&self, path: &CgroupPath) -> Option<CgroupPath> {
        path.ancestors().find(|place| is_ours(&self.hierarchy.dir(place)))
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
            Err(_) if self.reported => {}
            Err(error) => {
                self.reported = true;
                tracing::warn!(cgroup = %place, error, "cgroups cannot be marked: a damaged ledger could not be rebuilt in full");
            }
        }
    }

    fn remove(&self, place: &CgroupPath, name: &str) {
        match removexattr(self.hierarchy.dir(place), name) {
            Ok(()) | Err(Errno::NODATA | Errno::NOENT | Errno::OPNOTSUPP | Errno::NODEV) => {}
            Err(error) => {
                tracing::warn!(cgroup = %place, name, %error, "a mark that is over cannot be removed");
            }
        }
    }
}

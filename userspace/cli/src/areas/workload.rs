//! The processes of a workload.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::{Context as _, anyhow};
use numaward_api::Workloads;
use numaward_cgroup::{CgroupPath, Hierarchy, read};
use procfs::process::Process;

use crate::{client::Server, text::clean};

/// Processes of a cgroup that are looked at, at most.
const CANDIDATES: usize = 10_000;

/// A workload of the daemon on this host.
#[derive(Debug)]
pub(super) struct Workload {
    name: String,
    /// Its cgroups: several can have one name.
    dirs: Vec<PathBuf>,
}

impl Workload {
    /// Asks the daemon for its cgroups.
    pub(super) async fn find(server: &Server, name: &str) -> anyhow::Result<Self> {
        let Workloads { workloads } = server.get("/api/v1/workloads").await?;
        let mut named = workloads.iter().filter(|workload| workload.workload == name).peekable();
        named.peek().with_context(|| format!("there is no workload named {name:?}"))?;
        let hierarchy = Hierarchy::open()?;
        let mut dirs = Vec::new();
        for cgroup in named.filter_map(|workload| workload.cgroup.as_deref()) {
            let path: CgroupPath = cgroup.parse()?;
            dirs.push(hierarchy.dir(&path));
        }
        Ok(Self { name: name.to_owned(), dirs })
    }

    /// The ids of its processes now, and a note if there are too many. A process of nested workloads of one name is there
    /// once.
    pub(super) fn ids(&self, notes: &mut BTreeSet<String>) -> BTreeSet<u32> {
        let mut found = BTreeSet::new();
        for dir in &self.dirs {
            // One more says that there are more.
            let mut ids = read::processes_below(dir, CANDIDATES + 1);
            if ids.len() > CANDIDATES {
                ids.truncate(CANDIDATES);
                notes.insert(format!(
                    "{}: only {CANDIDATES} of the processes there were looked at: there are more",
                    clean(&dir.to_string_lossy())
                ));
            }
            found.extend(ids);
        }
        found
    }

    /// That it has none.
    pub(super) fn no_process(&self) -> anyhow::Error {
        anyhow!("{}: no process with memory was found in a cgroup of that name", self.name)
    }

    /// Its processes with memory and their commands, those with the most memory first; one at least.
    pub(super) fn processes(&self, notes: &mut BTreeSet<String>) -> anyhow::Result<Vec<(u32, String)>> {
        let mut found = BTreeMap::new();
        for pid in self.ids(notes) {
            // One that ended is none.
            let about = i32::try_from(pid).ok().and_then(|pid| {
                let process = Process::new(pid).ok()?;
                Some((process.statm().ok()?.resident, process.stat().ok()?.comm))
            });
            // Threads of the kernel have no memory.
            found.extend(about.filter(|(pages, _)| *pages > 0).map(|about| (pid, about)));
        }
        if found.is_empty() {
            return Err(self.no_process());
        }
        let mut found: Vec<(u32, (u64, String))> = found.into_iter().collect();
        found.sort_by_key(|(_, (pages, _))| Reverse(*pages));
        Ok(found.into_iter().map(|(pid, (_, command))| (pid, command)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, ops::RangeInclusive};

    use super::*;

    #[test]
    fn processes_that_are_too_many_are_cut_with_a_note() {
        let cgroup = tempfile::tempdir().unwrap();
        let workload = Workload { name: "many".to_owned(), dirs: vec![cgroup.path().to_owned()] };
        let ids = |pids: RangeInclusive<usize>| {
            let lines: Vec<String> = pids.map(|pid| pid.to_string()).collect();
            fs::write(cgroup.path().join("cgroup.procs"), lines.join("\n")).unwrap();
            let mut notes = BTreeSet::new();
            (workload.ids(&mut notes).len(), notes.into_iter().collect::<String>())
        };
        assert_eq!(ids(1..=CANDIDATES), (CANDIDATES, String::new()));
        let (count, note) = ids(1..=CANDIDATES + 1);
        assert_eq!(count, CANDIDATES);
        assert!(note.contains("only 10000 of the processes"), "{note}");
    }
}

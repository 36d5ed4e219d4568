//! Processes of a workload.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::{Context as _, anyhow};
use numaward_api::Workloads;
use numaward_cgroup::{
    CgroupPath, Hierarchy,
    read::{self, FoundProcesses},
};
use procfs::process::Process;

use crate::{client::Server, text::clean};

/// Maximum number of processes per cgroup.
const MAX_PROCESSES: usize = 10_000;

/// Cgroups of a workload on this host, and their processes.
#[derive(Debug)]
pub(super) struct WorkloadProcesses {
    name: String,
    /// Directories of its cgroups; several cgroups can have the same name.
    dirs: Vec<PathBuf>,
}

impl WorkloadProcesses {
    /// Looks up the cgroups of a workload in the daemon's API.
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

    /// Returns the ids of its current processes, each of them once even if cgroups of the same name are nested. Adds a
    /// note if there are too many processes.
    pub(super) fn process_ids(&self, notes: &mut BTreeSet<String>) -> BTreeSet<u32> {
        let mut found = BTreeSet::new();
        for dir in &self.dirs {
            // One more than the limit, to detect that there are more.
            let FoundProcesses { mut ids, is_partial } = read::processes_below(dir, MAX_PROCESSES + 1);
            if ids.len() > MAX_PROCESSES || is_partial {
                ids.truncate(MAX_PROCESSES);
                notes.insert(format!(
                    "{}: only {} of its processes are included: there are more, or cgroups that cannot be searched",
                    clean(&dir.to_string_lossy()),
                    ids.len()
                ));
            }
            found.extend(ids);
        }
        found
    }

    /// Returns the error for a workload without processes.
    pub(super) fn no_process_error(&self) -> anyhow::Error {
        anyhow!("{}: no process with memory was found in a cgroup of that name", self.name)
    }

    /// Returns its processes with memory and their commands, those with the most memory first. Fails if there are none.
    pub(super) fn processes(&self, notes: &mut BTreeSet<String>) -> anyhow::Result<Vec<(u32, String)>> {
        let mut found = BTreeMap::new();
        for pid in self.process_ids(notes) {
            // The process may have ended.
            let about = i32::try_from(pid).ok().and_then(|pid| {
                let process = Process::new(pid).ok()?;
                Some((process.statm().ok()?.resident, process.stat().ok()?.comm))
            });
            // Kernel threads have no memory.
            found.extend(about.filter(|(pages, _)| *pages > 0).map(|about| (pid, about)));
        }
        if found.is_empty() {
            return Err(self.no_process_error());
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
    fn limits_processes_with_a_note() {
        let cgroup = tempfile::tempdir().unwrap();
        let workload = WorkloadProcesses { name: "many".to_owned(), dirs: vec![cgroup.path().to_owned()] };
        let ids = |pids: RangeInclusive<usize>| {
            let lines: Vec<String> = pids.map(|pid| pid.to_string()).collect();
            fs::write(cgroup.path().join("cgroup.procs"), lines.join("\n")).unwrap();
            let mut notes = BTreeSet::new();
            (workload.process_ids(&mut notes).len(), notes.into_iter().collect::<String>())
        };
        assert_eq!(ids(1..=MAX_PROCESSES), (MAX_PROCESSES, String::new()));
        let (count, note) = ids(1..=MAX_PROCESSES + 1);
        assert_eq!(count, MAX_PROCESSES);
        assert!(note.contains("only 10000 of its processes"), "{note}");
    }
}

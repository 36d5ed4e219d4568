//! Processes of a workload.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::anyhow;
use numaward_api::safe_text::clean;
use numaward_cgroup::read::{self, FoundProcesses};
use procfs::process::Process;

/// Maximum number of processes per cgroup.
const MAX_PROCESSES: usize = 10_000;

/// Cgroups of a workload on this host, and their processes.
#[derive(Debug)]
pub struct WorkloadProcesses {
    name: String,
    /// Directories of its cgroups; several cgroups can have the same name.
    dirs: Vec<PathBuf>,
}

impl WorkloadProcesses {
    /// Creates the set of the processes in these directories of cgroups.
    pub fn new(name: impl Into<String>, dirs: Vec<PathBuf>) -> Self {
        Self { name: name.into(), dirs }
    }

    /// Returns the ids of its current processes, each of them once even if cgroups of the same name are nested. Adds a
    /// note if there are too many processes.
    pub(crate) fn process_ids(&self, notes: &mut BTreeSet<String>) -> BTreeSet<u32> {
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
    pub(crate) fn no_process_error(&self) -> anyhow::Error {
        anyhow!("{}: no process with memory was found in a cgroup of that name", self.name)
    }

    /// Returns its processes with memory and their commands, those with the most memory first. Fails if there are none.
    pub(crate) fn processes(&self, notes: &mut BTreeSet<String>) -> anyhow::Result<Vec<(u32, String)>> {
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
        let workload = WorkloadProcesses::new("many", vec![cgroup.path().to_owned()]);
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

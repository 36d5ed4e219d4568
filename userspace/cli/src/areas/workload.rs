//! The processes of a workload.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use numaward_api::Workloads;
use numaward_cgroup::{CgroupPath, Hierarchy, read};
use procfs::process::Process;

use crate::client::Server;

/// Processes of a cgroup that are looked at.
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

    /// The ids of its processes now. A process of nested workloads of one name is there once.
    pub(super) fn ids(&self) -> BTreeSet<u32> {
        self.dirs.iter().flat_map(|dir| read::processes_below(dir, CANDIDATES)).collect()
    }

    /// Its processes with memory and their commands, those with the most memory first; one at least.
    pub(super) fn processes(&self) -> anyhow::Result<Vec<(u32, String)>> {
        let mut found = BTreeMap::new();
        for pid in self.ids() {
            // One that ended is none.
            let about = i32::try_from(pid).ok().and_then(|pid| {
                let process = Process::new(pid).ok()?;
                Some((process.statm().ok()?.resident, process.stat().ok()?.comm))
            });
            // Threads of the kernel have no memory.
            found.extend(about.filter(|(pages, _)| *pages > 0).map(|about| (pid, about)));
        }
        if found.is_empty() {
            bail!("{}: no process with memory was found in a cgroup of that name", self.name);
        }
        let mut found: Vec<(u32, (u64, String))> = found.into_iter().collect();
        found.sort_by_key(|(_, (pages, _))| Reverse(*pages));
        Ok(found.into_iter().map(|(pid, (_, command))| (pid, command)).collect())
    }
}

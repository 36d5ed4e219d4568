//! Threads with a guarantee that are bound to fewer CPUs than their cgroup has, on this host.

use std::path::Path;

use numaward_api as api;
use numaward_cgroup::{
    affinity::{NarrowThreads, narrow_threads},
    read,
};
use serde::Serialize;

use crate::text;

/// Threads of a workload that are bound to fewer CPUs than their cgroup has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BoundThreads {
    pub(crate) workload: String,
    /// Number of threads.
    pub(crate) threads: usize,
    /// CPUs that at least one of the threads may use.
    pub(crate) cpus: String,
    /// CPUs of the cgroup.
    pub(crate) available: String,
}

/// Returns the bound threads in the cgroup of a workload and below it; `None` if there are none, or if the cgroup is
/// not on this host.
pub(crate) fn bound_threads(proc: &Path, allocation: &api::Allocation) -> Option<BoundThreads> {
    if !allocation.enforced {
        return None;
    }
    let mut sum: Option<NarrowThreads> = None;
    let mut dirs = read::subtree(Path::new(&allocation.directory));
    for found in dirs.by_ref().filter_map(|dir| narrow_threads(proc, &dir).ok()?) {
        sum = Some(match sum {
            Some(sum) => NarrowThreads {
                threads: sum.threads + found.threads,
                cpus: &sum.cpus | &found.cpus,
                available: &sum.available | &found.available,
            },
            None => found,
        });
    }
    if !dirs.is_complete() {
        let name = text::clean(&allocation.name);
        eprintln!(
            "numaward: not all threads of {name} were checked: some of its cgroups cannot be read, or there are too many"
        );
    }
    sum.map(|threads| BoundThreads {
        workload: allocation.name.clone(),
        threads: threads.threads,
        cpus: threads.cpus.to_string(),
        available: threads.available.to_string(),
    })
}

/// Warns about the bound threads of a workload.
pub(crate) fn warn_about_bound_threads(allocation: &api::Allocation) {
    if let Some(threads) = bound_threads(Path::new("/proc"), allocation) {
        eprintln!("numaward: {}", text::clean(&warning(&threads)));
    }
}

fn warning(BoundThreads { workload, threads, cpus, available }: &BoundThreads) -> String {
    format!(
        "{threads} threads of {workload} run on CPUs {cpus} of {available} only, as they were bound to CPUs before (CPUAffinity= of a \
         unit, taskset, or the program itself)"
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn finds_threads_bound_to_fewer_cpus() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        file("db/cgroup.threads", "7\n");
        file("db/cpuset.cpus.effective", "6-9\n");
        file("db/below/cgroup.threads", "8\n");
        for thread in [7, 8] {
            file(&format!("proc/{thread}/status"), "Cpus_allowed_list:\t6-7\n");
        }
        let allocation = |enforced| api::Allocation {
            name: "db.service".to_owned(),
            directory: root.path().join("db").display().to_string(),
            enforced,
            ..api::Allocation::default()
        };
        let proc = root.path().join("proc");
        let found = bound_threads(&proc, &allocation(true)).unwrap();
        assert!(
            warning(&found).starts_with("2 threads of db.service run on CPUs 6-7 of 6-9 only"),
            "{found:?}"
        );
        assert_eq!(bound_threads(&proc, &allocation(false)), None);
        file("db/cpuset.cpus.effective", "6-7\n");
        assert_eq!(bound_threads(&proc, &allocation(true)), None);
    }
}

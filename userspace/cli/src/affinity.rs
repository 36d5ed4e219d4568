//! Threads of workloads with a guarantee that run on fewer CPUs than they are given, on this host.

use std::{fs, path::Path};

use numaward_api as api;
use numaward_cgroup::affinity::{NarrowThreads, narrow_threads};
use serde::Serialize;

use crate::text;

/// Threads of a workload that run on fewer CPUs than their cgroup has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Narrow {
    pub(crate) workload: String,
    /// How many.
    pub(crate) threads: usize,
    /// The CPUs that any of them may use.
    pub(crate) cpus: String,
    /// The CPUs that its cgroup has.
    pub(crate) available: String,
}

/// Such threads in the cgroup of a workload and below it; `None` if there are none, or if the cgroup is not on this host.
pub(crate) fn narrow(proc: &Path, allocation: &api::Allocation) -> Option<Narrow> {
    if !allocation.enforced {
        return None;
    }
    let mut sum: Option<NarrowThreads> = None;
    let mut open = vec![Path::new(&allocation.directory).to_owned()];
    while let Some(dir) = open.pop() {
        if let Ok(Some(found)) = narrow_threads(proc, &dir) {
            sum = Some(match sum {
                Some(sum) => NarrowThreads {
                    threads: sum.threads + found.threads,
                    cpus: &sum.cpus | &found.cpus,
                    available: &sum.available | &found.available,
                },
                None => found,
            });
        }
        let below = fs::read_dir(&dir).into_iter().flatten().flatten();
        let is_dir = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        open.extend(below.filter(is_dir).map(|entry| entry.path()));
    }
    sum.map(|of| Narrow {
        workload: allocation.name.clone(),
        threads: of.threads,
        cpus: of.cpus.to_string(),
        available: of.available.to_string(),
    })
}

/// Reports them in a line.
pub(crate) fn report(allocation: &api::Allocation) {
    if let Some(narrow) = narrow(Path::new("/proc"), allocation) {
        eprintln!("numaward: {}", text::clean(&sentence(&narrow)));
    }
}

fn sentence(Narrow { workload, threads, cpus, available }: &Narrow) -> String {
    format!(
        "{threads} threads of {workload} run on CPUs {cpus} of {available} only, as they were bound to CPUs before (CPUAffinity= of a \
         unit, taskset, or the program itself)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_workload_that_are_bound_to_fewer_cpus_are_reported() {
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
        let found = narrow(&proc, &allocation(true)).unwrap();
        assert!(
            sentence(&found).starts_with("2 threads of db.service run on CPUs 6-7 of 6-9 only"),
            "{found:?}"
        );
        assert_eq!(narrow(&proc, &allocation(false)), None);
        file("db/cpuset.cpus.effective", "6-7\n");
        assert_eq!(narrow(&proc, &allocation(true)), None);
    }
}

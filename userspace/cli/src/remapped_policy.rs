//! Memory policies of a workload that the nodes of its guarantee restrict, on this host.

use std::{
    fs,
    path::{Path, PathBuf},
};

use numaward_api as api;
use numaward_cgroup::{knob::Knob, memory_policy::policy_of_thread, read};

use crate::text;

/// Maximum number of threads that are read.
const MAX_THREADS: usize = 4096;

/// Warns about a process of the workload with a memory policy that names nodes, as the kernel remaps these.
pub(crate) fn warn_about_remapped_policy(allocation: &api::Allocation) {
    if let Some(line) = remapped_policy_warning(Path::new("/proc"), allocation) {
        eprintln!("numaward: {}", text::clean(&line));
    }
}

fn remapped_policy_warning(proc: &Path, allocation: &api::Allocation) -> Option<String> {
    let nodes = allocation.settings.get(&Knob::CpusetMems.to_string()).filter(|_| allocation.enforced)?;
    let processes = read::processes_below(Path::new(&allocation.directory), MAX_THREADS).ids;
    let threads = processes.into_iter().flat_map(|process| {
        let threads = fs::read_dir(proc.join(format!("{process}/task"))).into_iter().flatten().flatten();
        threads.map(move |thread| (process, thread.path()))
    });
    // Threads that have ended, and those of other users, are skipped.
    let policy = |(process, thread): (u32, PathBuf)| Some((process, policy_of_thread(&thread).ok()??));
    let (process, policy) = threads.take(MAX_THREADS).find_map(policy)?;
    let name = &allocation.name;
    Some(format!(
        "process {process} of {name} has the memory policy {policy}: the kernel restricts it to nodes {nodes} and may not undo that \
         after a release; then start the process again"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warns_about_remapped_policy() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        file("db/below/cgroup.procs", "7\n8\n");
        file("proc/8/task/8/numa_maps", "55d0 default file=/bin/a\n");
        file("proc/8/task/9/numa_maps", "55d0 interleave:1 file=/bin/a\n");
        let allocation = |enforced, nodes: &[&str]| api::Allocation {
            name: "db.service".to_owned(),
            directory: root.path().join("db").display().to_string(),
            enforced,
            settings: nodes.iter().map(|of| ("cpuset.mems".to_owned(), (*of).to_owned())).collect(),
            ..api::Allocation::default()
        };
        let warning = |allocation| remapped_policy_warning(&root.path().join("proc"), &allocation);
        let line = warning(allocation(true, &["1"])).unwrap();
        assert!(line.starts_with("process 8 of db.service has the memory policy interleave:1: "), "{line}");
        assert!(line.contains("restricts it to nodes 1"), "{line}");
        assert_eq!([allocation(false, &["1"]), allocation(true, &[])].map(warning), [None, None]);
        file("proc/8/task/9/numa_maps", "55d0 default file=/bin/a\n");
        assert_eq!(warning(allocation(true, &["1"])), None);
    }
}

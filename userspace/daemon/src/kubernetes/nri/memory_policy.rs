//! Memory policies of containers: which kernels have them, and whether a container got the one that the runtime was asked for.
//!
//! Only a process itself can set its memory policy, so the OCI runtime does it in the container's first process, before the
//! program runs. Runtimes that do not know memory policies ignore them without a word. So whether there is one is looked
//! up when the container is about to start: its first process exists, and waits.
//!
//! Sources: `set_mempolicy(2)`, `numa(7)` on `numa_maps`, the OCI runtime specification 1.3 (`linux.memoryPolicy`).

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use numaward_config::policy::MemoryPolicy;
use numaward_kube::nri::Status;
use numaward_topology::KernelRelease;
use parking_lot::Mutex;
use tokio::sync::watch;

/// What runtimes are asked for. Clones are the same.
#[derive(Clone)]
pub(super) struct Asked {
    /// Whether what is decided is carried out.
    pub(super) is_on: bool,
    /// The connection that the answers go to; none before there is a plugin.
    pub(super) runtime: Arc<OnceLock<watch::Receiver<Status>>>,
    pub(super) host_root: PathBuf,
    /// Which policy the runtime was asked for, by container, until that is about to start.
    pub(super) waiting: Arc<Mutex<BTreeMap<String, MemoryPolicy>>>,
}

/// Enough of a line of `numa_maps`: the policy comes second.
const LINE: u64 = 4096;

/// The first kernel that has it.
pub(super) const fn since(policy: MemoryPolicy) -> KernelRelease {
    match policy {
        MemoryPolicy::Bind | MemoryPolicy::Interleave => KernelRelease::new(2, 6),
        MemoryPolicy::PreferredMany => KernelRelease::new(5, 15),
        MemoryPolicy::WeightedInterleave => KernelRelease::new(6, 9),
    }
}

/// Whether the process has it, by the first of its mappings: one without a policy of its own has the process's.
///
/// # Errors
///
/// `numa_maps` cannot be read: the process is gone, or the daemon may not trace it (`CAP_SYS_PTRACE`).
pub(super) fn is_set(host_root: &Path, pid: u32, policy: MemoryPolicy) -> io::Result<bool> {
    let file = File::open(host_root.join(format!("proc/{pid}/numa_maps")))?;
    // It has the name of a file, which may be any bytes.
    let mut line = Vec::new();
    BufReader::new(file.take(LINE)).read_until(b'\n', &mut line)?;
    // What ends has no mappings any more.
    let start = line.iter().position(|&byte| byte == b' ').ok_or(io::ErrorKind::UnexpectedEof)? + 1;
    let rest = line.get(start..).and_then(|found| found.strip_prefix(shown_as(policy).as_bytes()));
    Ok(rest.is_some_and(|rest| matches!(rest.first(), Some(b':' | b'='))))
}

/// The kernel's word for it in `numa_maps` (`mpol_to_str`).
const fn shown_as(policy: MemoryPolicy) -> &'static str {
    match policy {
        MemoryPolicy::Bind => "bind",
        MemoryPolicy::PreferredMany => "prefer (many)",
        MemoryPolicy::Interleave => "interleave",
        MemoryPolicy::WeightedInterleave => "weighted interleave",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_policy_of_a_process_is_the_one_of_its_first_mapping() {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("proc/7")).unwrap();
        let found = |line: &str| {
            fs::write(host.path().join("proc/7/numa_maps"), line).unwrap();
            MemoryPolicy::ALL
                .iter()
                .copied()
                .filter(|&of| is_set(host.path(), 7, of).unwrap())
                .collect::<Vec<_>>()
        };
        let all: [(_, Vec<MemoryPolicy>); 7] = [
            ("55d0 default file=/usr/bin/runc mapped=1 N0=1\n", vec![]),
            ("55d0 bind:1 file=/usr/bin/runc\n", vec![MemoryPolicy::Bind]),
            ("55d0 bind=static:1 file=/usr/bin/runc\n", vec![MemoryPolicy::Bind]),
            ("55d0 prefer:1 anon=1\n", vec![]),
            ("55d0 prefer (many):0-1 anon=1\n", vec![MemoryPolicy::PreferredMany]),
            ("55d0 interleave:0-1 anon=1\n55d1 bind:1\n", vec![MemoryPolicy::Interleave]),
            ("55d0 weighted interleave:0-1 anon=1\n", vec![MemoryPolicy::WeightedInterleave]),
        ];
        for (line, policies) in all {
            assert_eq!(found(line), policies, "{line}");
        }
        fs::write(host.path().join("proc/7/numa_maps"), b"55d0 bind=static:1 file=/\xff\n").unwrap();
        assert!(is_set(host.path(), 7, MemoryPolicy::Bind).unwrap());
        fs::write(host.path().join("proc/7/numa_maps"), "").unwrap();
        let ended = is_set(host.path(), 7, MemoryPolicy::Bind).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        let gone = is_set(host.path(), 8, MemoryPolicy::Bind).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }
}

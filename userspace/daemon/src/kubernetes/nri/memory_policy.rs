//! Memory policies of containers: the kernels that have them, and the check that a container got the requested one.
//!
//! Only a process itself can set its memory policy, so the OCI runtime sets it in the first process of the container, before the program
//! runs. Runtimes that do not know memory policies ignore them silently. The policy is therefore read when the container is about to
//! start: its first process exists, and waits.
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

/// Memory policies that the runtime is requested to set. Clones share the state.
#[derive(Clone)]
pub(super) struct MemoryPolicyRequests {
    /// True if decisions are applied (`enforcement.mode: on`).
    pub(super) is_on: bool,
    /// Status of the connection to the runtime; unset until the plugin exists.
    pub(super) runtime: Arc<OnceLock<watch::Receiver<Status>>>,
    pub(super) host_root: PathBuf,
    /// Requested policies by container, from the creation of the container until its start.
    pub(super) waiting: Arc<Mutex<BTreeMap<String, MemoryPolicy>>>,
}

/// The number of bytes to read of a line of `numa_maps`, in which the policy is the second field.
const MAX_LINE_BYTES: u64 = 4096;

/// Returns the first kernel that has the policy.
pub(super) const fn since(policy: MemoryPolicy) -> KernelRelease {
    match policy {
        MemoryPolicy::Bind | MemoryPolicy::Interleave => KernelRelease::new(2, 6),
        MemoryPolicy::PreferredMany => KernelRelease::new(5, 15),
        MemoryPolicy::WeightedInterleave => KernelRelease::new(6, 9),
    }
}

/// Returns true if the process has the policy, according to its first mapping: a mapping without a policy of its own shows that of the
/// process.
///
/// # Errors
///
/// Fails if `numa_maps` cannot be read: the process has ended, or the daemon may not trace it (`CAP_SYS_PTRACE`).
pub(super) fn is_set(host_root: &Path, pid: u32, policy: MemoryPolicy) -> io::Result<bool> {
    let file = File::open(host_root.join(format!("proc/{pid}/numa_maps")))?;
    // The line may have the name of a file, which need not be UTF-8.
    let mut line = Vec::new();
    BufReader::new(file.take(MAX_LINE_BYTES)).read_until(b'\n', &mut line)?;
    // A process that is ending has no mappings.
    let start = line.iter().position(|&byte| byte == b' ').ok_or(io::ErrorKind::UnexpectedEof)? + 1;
    let rest = line.get(start..).and_then(|found| found.strip_prefix(kernel_name(policy).as_bytes()));
    Ok(rest.is_some_and(|rest| matches!(rest.first(), Some(b':' | b'='))))
}

/// Returns the name of the policy in `numa_maps` (`mpol_to_str` of the kernel).
const fn kernel_name(policy: MemoryPolicy) -> &'static str {
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
    fn reads_policy_of_first_mapping() {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("proc/7")).unwrap();
        let found = |line: &str| {
            fs::write(host.path().join("proc/7/numa_maps"), line).unwrap();
            MemoryPolicy::ALL
                .iter()
                .copied()
                .filter(|&policy| is_set(host.path(), 7, policy).unwrap())
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

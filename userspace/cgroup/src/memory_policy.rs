//! Memory policies that name nodes, as `/proc/PID/numa_maps` shows them.
//!
//! When `cpuset.mems` changes, the kernel remaps the nodes of each policy (`mpol_rebind_task`, `mpol_rebind_mm`), and a
//! wider set does not undo the effect of a narrow one: `interleave:0-1` becomes `interleave:1` in `cpuset.mems=1`, and
//! stays so.
//!
//! Source: `numa(7)`, `mm/mempolicy.c` (`mpol_to_str`).

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader},
    path::Path,
};

use numaward_topology::NodeSet;

/// Bytes that are read of a line: enough for the text before the name of a file. The kernel generates no more lines
/// than are read.
const LINE_LENGTH: usize = 128;

/// Returns the nodes that a policy names: `default`, `local`, `bind:0-1`, `prefer (many):1`, `interleave=static:0,2`.
pub fn nodes_of(policy: &str) -> Option<NodeSet> {
    policy.rsplit_once(':')?.1.parse().ok()
}

/// Returns the policy in a line of `numa_maps` if it names nodes. The policy follows the address and contains at most
/// one space.
pub fn policy_of(line: &str) -> Option<String> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let first = words.next()?;
    if nodes_of(first).is_some() {
        return Some(first.to_owned());
    }
    let second = words.next().filter(|word| !word.contains('=') && nodes_of(word).is_some())?;
    Some(format!("{first} {second}"))
}

/// Returns the policy of a thread if it names nodes, from its directory in procfs. A mapping without a policy of its own
/// has that of the thread, so one line is enough. The policies of other mappings are not read.
///
/// # Errors
///
/// The thread has ended, or may not be traced.
pub fn policy_of_thread(thread: &Path) -> io::Result<Option<String>> {
    let mut lines = BufReader::with_capacity(LINE_LENGTH, File::open(thread.join("numa_maps"))?);
    Ok(policy_of(&String::from_utf8_lossy(lines.fill_buf()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_policies_with_nodes() {
        for (line, expected) in [
            ("55d0 default file=/bin/a:0 mapped=1 N0=1", None),
            ("55d0 local anon=1 N0=1", None),
            ("55d0 interleave:0-1 anon=1 N0=1", Some("interleave:0-1")),
            ("55d0 bind=static:1 file=/bin/a", Some("bind=static:1")),
            ("55d0 prefer (many):0,2 heap", Some("prefer (many):0,2")),
            ("55d0 weighted interleave:0-1", Some("weighted interleave:0-1")),
            ("55d0 bind=static|balancing:1 stack", Some("bind=static|balancing:1")),
            ("55d0 default", None),
            ("", None),
        ] {
            assert_eq!(policy_of(line).as_deref(), expected, "{line}");
        }
    }
}

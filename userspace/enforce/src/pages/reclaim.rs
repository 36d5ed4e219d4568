//! Dropping of a cgroup's page cache by `memory.reclaim`.
//!
//! Unmapped pages of files cannot be moved from outside. Clean ones can be dropped; when they are read again, they are
//! allocated on a node with free memory. The kernel takes no node for this: it reclaims from all nodes of the cgroup.
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::Path,
};

use numaward_topology::Bytes;
use rustix::io::Errno;

/// Drops page cache of a cgroup, including mapped files that were not used lately; no anonymous memory goes to swap.
/// `proc` is the mount point of procfs. It is no error if the kernel reclaims less.
///
/// On kernels before 6.13 `memory.reclaim` cannot exclude anonymous memory; there it is used only if the host has no
/// swap.
pub fn reclaim(proc: &Path, dir: &Path, bytes: Bytes) -> io::Result<()> {
    match write(dir, &format!("{} swappiness=0", bytes.0)) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) && !has_swap(proc)? => {
            write(dir, &bytes.0.to_string())
        }
        written => written,
    }
}

fn write(dir: &Path, text: &str) -> io::Result<()> {
    let written = OpenOptions::new().write(true).open(dir.join("memory.reclaim"))?.write_all(text.as_bytes());
    match written {
        // The kernel reclaimed less than was requested.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => Ok(()),
        written => written,
    }
}

/// Returns whether there is swap: a line below the heading.
fn has_swap(proc: &Path) -> io::Result<bool> {
    Ok(fs::read_to_string(proc.join("swaps"))?.lines().count() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_file_is_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = reclaim(dir.path(), dir.path(), Bytes::mib(1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn swap_needs_a_line_below_heading() {
        let dir = tempfile::tempdir().unwrap();
        for (text, expected) in [
            ("Filename\tType\tSize\tUsed\tPriority\n", false),
            ("Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 1 0 -2\n", true),
        ] {
            fs::write(dir.path().join("swaps"), text).unwrap();
            assert_eq!(has_swap(dir.path()).unwrap(), expected);
        }
    }
}

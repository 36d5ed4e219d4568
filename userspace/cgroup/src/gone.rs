//! What the kernel says of a cgroup that has vanished.

use std::io;

/// Whether an error means that the cgroup vanished.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
        || error.kind() == io::ErrorKind::NotADirectory
}

//! Recognizes the kernel's errors about a cgroup that has vanished.

use std::io;

use rustix::io::Errno;

/// Returns true if the error means that the cgroup has vanished.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || Errno::from_io_error(error) == Some(Errno::NODEV)
}

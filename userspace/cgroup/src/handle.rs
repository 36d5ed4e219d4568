//! Opens a cgroup by its id, as a file handle.
//!
//! The handle of a cgroup's directory is its 64-bit id, so that it can be made up from the id alone.
//! Needs `CAP_DAC_READ_SEARCH`.
//!
//! Source: `open_by_handle_at(2)`; `kernfs_encode_fh` and `FILEID_KERNFS` of the kernel.

use std::{
    fs::File,
    io,
    mem::offset_of,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use crate::CgroupId;

const FILEID_KERNFS: libc::c_int = 0xfe;

/// `struct file_handle` with room for a kernfs handle.
#[repr(C)]
struct Handle {
    bytes: libc::c_uint,
    kind: libc::c_int,
    id: [u8; 8],
}

const _: () = assert!(offset_of!(Handle, id) == size_of::<libc::file_handle>());

/// The directory of the cgroup with this id. `ESTALE` where there is none.
///
/// `hierarchy` is any open directory of the same file system.
#[expect(unsafe_code, reason = "no safe binding of open_by_handle_at is known")]
pub(crate) fn open(hierarchy: &File, id: CgroupId) -> io::Result<OwnedFd> {
    let mut handle = Handle { bytes: 8, kind: FILEID_KERNFS, id: id.0.to_ne_bytes() };
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: `handle` is laid out as `struct file_handle` followed by the eight bytes that `bytes` announces,
    // and lives until the call returns; the kernel only reads it.
    let fd = unsafe {
        libc::open_by_handle_at(hierarchy.as_raw_fd(), (&raw mut handle).cast::<libc::file_handle>(), flags)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The path that a descriptor was opened at.
pub(crate) fn path_of(fd: BorrowedFd<'_>) -> io::Result<std::path::PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

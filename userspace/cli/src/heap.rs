//! How the C library's allocator works for a process that stays.

#![cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "no crate here offers mallopt"))]

/// Makes all threads share one heap (mallopt(3), `M_ARENA_MAX`). Otherwise glibc keeps one for nearly each, and each
/// keeps the room of the largest scrape that it ever served. The daemon's threads allocate little at the same time. Has to
/// come before the first thread. Another C library has one heap anyway.
pub(crate) fn share() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number, and no other thread is there yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

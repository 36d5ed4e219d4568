//! Settings of the C library's allocator for a long-running process.

#![cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "no crate here offers mallopt"))]

/// Makes all threads share one heap (mallopt(3), `M_ARENA_MAX`). Otherwise, glibc creates one for almost each thread,
/// and each heap keeps the memory of the largest scrape that it ever served. The daemon's threads rarely allocate at
/// the same time. Must be called before the first thread starts. Other C libraries have a single heap anyway.
pub(crate) fn share_among_threads() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call sets a number, and no other thread exists yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

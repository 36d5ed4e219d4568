//! The CPUs on which threads may run, of any number: C libraries and most crates have masks for 1,024.

#![expect(unsafe_code, reason = "raw system calls that no crate here offers for more than 1,024 CPUs")]

use std::io;

use crate::CpuSet;

/// The fewest CPUs that a mask is read for. The kernel refuses a mask with fewer bits than it may have CPUs.
const FIRST_CPUS: usize = 1024;
/// The most: more than any kernel has.
const MAX_CPUS: usize = 1 << 16;

/// The CPUs on which a thread, or this one, may run now.
pub fn affinity(thread: Option<i32>) -> io::Result<CpuSet> {
    let thread = thread.unwrap_or(0);
    let mut cpus = FIRST_CPUS;
    loop {
        let mut words = vec![0_u64; cpus / 64];
        let bytes = size_of_val(words.as_slice());
        // SAFETY: the kernel writes at most as many bytes as the mask has.
        let result = unsafe { libc::syscall(libc::SYS_sched_getaffinity, thread, bytes, words.as_mut_ptr()) };
        if result >= 0 {
            return Ok(CpuSet::from_words(words));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) || cpus >= MAX_CPUS {
            return Err(error);
        }
        cpus *= 2;
    }
}

/// Binds a thread, or this one, to CPUs. Those that its cgroup does not have do not count.
pub fn set_affinity(thread: Option<i32>, cpus: &CpuSet) -> io::Result<()> {
    let words = cpus.words();
    let (thread, bytes) = (thread.unwrap_or(0), size_of_val(words));
    // SAFETY: the kernel reads as many bytes as the mask has.
    let result = unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, bytes, words.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Lets a thread, or this one, run on all CPUs of its cgroup. The kernel (since Linux 6.2) remembers the CPUs that a thread has asked
/// for, and goes by them whenever those of the cgroup change.
pub fn reset_affinity(thread: Option<i32>) -> io::Result<()> {
    set_affinity(thread, &CpuSet::from_words(vec![u64::MAX; MAX_CPUS / 64]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuId;

    #[test]
    fn masks_have_any_number_of_cpus() {
        let test = || {
            let before = affinity(None).unwrap();
            let first = CpuSet::single(before.first().unwrap());
            let mut wide = first.clone();
            wide.insert(CpuId(5000));
            set_affinity(None, &wide).unwrap();
            assert_eq!(affinity(None).unwrap(), first, "the kernel has no such CPU");
            set_affinity(None, &before).unwrap();
            assert_eq!(affinity(None).unwrap(), before);
            assert!(set_affinity(None, &CpuSet::new()).is_err());
            set_affinity(None, &first).unwrap();
            reset_affinity(None).unwrap();
            assert!(before.is_subset(&affinity(None).unwrap()));
            let gone = set_affinity(Some(i32::MAX), &before).unwrap_err();
            assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
        };
        std::thread::spawn(test).join().unwrap();
    }
}

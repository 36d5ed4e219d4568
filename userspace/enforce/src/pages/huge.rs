//! Huge pages that the processes of a cgroup have mapped and not touched yet.
//!
//! # Problem
//! A mapping of huge pages reserves pages of all nodes together. If its process may use only nodes without free ones,
//! the kernel ends the process at the next touch (`SIGBUS`).
//!
//! # Algorithm
//! `maps` has the sizes of mappings, and `status` (`HugetlbPages`) the amount that a process has touched; the kernel
//! walks no page tables for either. Of processes that map the same file, only the largest amounts count. The size of
//! the pages is not known.
//!
//! Source: `Documentation/mm/hugetlbfs_reserv.rst`, `proc_pid_maps(5)`, `proc_pid_status(5)`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
    time::Instant,
};

use numaward_cgroup::{TruncatedLines, read_lossy};
use numaward_topology::Bytes;

use super::{has_ended, policies::visible_processes};

/// Maximum number of mounted hugetlbfs.
const MAX_MOUNTS: usize = 1024;

/// The device and inode of a file.
type FileId = (String, String);

/// Returns the huge pages that the processes of a cgroup and of its descendants have mapped and not touched. Processes
/// that end meanwhile do not count.
///
/// # Errors
///
/// A process cannot be read: the daemon may not trace it (`CAP_SYS_PTRACE`), it belongs to another PID namespace, or
/// the processes have more mappings or mounts than can be read until the deadline.
pub fn untouched_huge_pages(proc: &Path, dir: &Path, deadline: Instant) -> io::Result<Bytes> {
    let mut files: BTreeMap<FileId, (u64, u64)> = BTreeMap::new();
    for process in visible_processes(dir, || in_time(deadline))? {
        match mapped(&proc.join(process.to_string()), deadline) {
            Ok(Some((file, mapped, touched))) => {
                let of = files.entry(file).or_default();
                *of = (of.0.max(mapped), of.1.max(touched));
            }
            Err(error) if !has_ended(&error) => return Err(error),
            Ok(None) | Err(_) => {}
        }
    }
    Ok(Bytes(
        files.values().fold(0, |sum, (mapped, touched)| sum.saturating_add(mapped.saturating_sub(*touched))),
    ))
}

/// Returns the first file of huge pages that a process has mapped, and the mapped and touched bytes of all.
fn mapped(process: &Path, deadline: Instant) -> io::Result<Option<(FileId, u64, u64)>> {
    // A process can make `maps` and `mountinfo` arbitrarily long, so they are read line by line.
    let lines = |file: &str| File::open(process.join(file)).map(BufReader::new).map(TruncatedLines::new);
    let mut maps = lines("maps")?;
    let status = read_lossy(&process.join("status"))?;
    let mounts = lines("mountinfo").map_or(Ok(BTreeSet::new()), |lines| hugetlbfs(lines, deadline))?;
    let (mut first, mut bytes) = (None, 0_u64);
    while let Some(line) = maps.next_line()? {
        in_time(deadline)?;
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(device), Some(inode)) = (words.next(), words.nth(2), words.next()) else {
            continue;
        };
        let is_anonymous = words.next().is_some_and(|path| path.starts_with("/anon_hugepage"));
        if !is_anonymous && !mounts.contains(device) {
            continue;
        }
        let file = (device.to_owned(), inode.to_owned());
        first = Some(first.map_or(file.clone(), |first| file.min(first)));
        bytes = bytes.saturating_add(length(range).unwrap_or(0));
    }
    let touched =
        status.lines().find_map(|line| line.strip_prefix("HugetlbPages:")?.trim().strip_suffix(" kB"));
    let touched: u64 = touched.and_then(|kib| kib.parse().ok()).unwrap_or(0);
    Ok(first.map(|file| (file, bytes, touched.saturating_mul(1024))))
}

/// Returns the devices of mounted hugetlbfs in the notation of `maps`, from the lines of `mountinfo`.
fn hugetlbfs(mut mountinfo: TruncatedLines<impl BufRead>, deadline: Instant) -> io::Result<BTreeSet<String>> {
    let of_line = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
        let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
        (file_system.split(' ').next()? == "hugetlbfs").then(|| format!("{major:02x}:{minor:02x}"))
    };
    let mut devices = BTreeSet::new();
    while let Some(line) = mountinfo.next_line()? {
        in_time(deadline)?;
        devices.extend(of_line(&String::from_utf8_lossy(line)));
        if devices.len() > MAX_MOUNTS {
            let message = format!("there are more than {MAX_MOUNTS} mounts of huge pages");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
    }
    Ok(devices)
}

/// Returns an error after the deadline.
fn in_time(deadline: Instant) -> io::Result<()> {
    if Instant::now() < deadline {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "its processes have too many mappings or mounts"))
}

fn length(range: &str) -> Option<u64> {
    let (start, end) = range.split_once('-')?;
    u64::from_str_radix(end, 16).ok()?.checked_sub(u64::from_str_radix(start, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
31 22 0:30 / /dev/hugepages rw,relatime shared:16 - hugetlbfs hugetlbfs rw,pagesize=2M
";

    #[test]
    fn counts_untouched_pages_once() {
        let (dir, proc) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let process = |pid: u32, maps: &str, touched: u64| {
            let of = proc.path().join(pid.to_string());
            fs::create_dir_all(&of).unwrap();
            fs::write(of.join("mountinfo"), MOUNTS).unwrap();
            fs::write(of.join("maps"), maps).unwrap();
            fs::write(of.join("status"), format!("Name:\ta\nHugetlbPages:\t   {} kB\n", touched << 10))
                .unwrap();
        };
        let until = |deadline| untouched_huge_pages(proc.path(), dir.path(), deadline);
        let untouched = || until(Instant::now() + Duration::from_mins(1)).map(|bytes| bytes.0 >> 20);
        fs::write(dir.path().join("cgroup.procs"), "7\n8\n9\n10\n").unwrap();
        assert_eq!(untouched().unwrap(), 0, "they have ended");
        // 64 MiB of shared buffers; the first process has touched the most.
        let shared = "7f0000000000-7f0004000000 rw-s 00000000 00:0f 77 /anon_hugepage (deleted)\n";
        process(7, &format!("55d0-55d1 r-xp 00000000 08:01 1 /bin/db\n{shared}"), 40);
        process(8, shared, 2);
        // 4 MiB of a file that only one process maps.
        process(9, "7f0000000000-7f0000400000 rw-s 00000000 00:1e 5 /dev/hugepages/rte map\n", 0);
        process(10, "7f0000000000-7f0000400000 rw-p 00000000 00:00 0\nnonsense\n", 0);
        assert_eq!(untouched().unwrap(), 64 - 40 + 4);
        process(7, shared, 64);
        assert_eq!(untouched().unwrap(), 4);
        let late = until(Instant::now()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        // A process also chooses the number of its mounts.
        process(7, "", 0);
        assert_eq!(until(Instant::now()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let mount = |minor| format!("31 22 0:{minor} / /a rw - hugetlbfs hugetlbfs rw\n");
        let mounts: String = (0..=MAX_MOUNTS).map(mount).collect();
        fs::write(proc.path().join("7/mountinfo"), mounts).unwrap();
        assert!(untouched().unwrap_err().to_string().contains("more than 1024 mounts"));
    }
}

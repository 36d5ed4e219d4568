//! Where cgroups are mounted, from `/proc/self/mountinfo`.
//!
//! Source: `proc_pid_mountinfo(5)`, `cgroup_namespaces(7)`.

use std::{
    cmp::Reverse,
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use crate::unescape::unescape;

/// The mounts of this process cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MountsError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source} (it lists the mounts; is procfs mounted?)", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A line of the file is not what the kernel documents.
    #[error("{path}:{line}: {content:?} is not a mount (expected the fields of proc_pid_mountinfo(5))", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What it holds.
        content: String,
    },
}

/// The mount points of cgroup v2 that this process sees: the one that shows the most of the hierarchy first. Its `proc` is
/// found below `root` (`/` in production).
pub(crate) fn mount_points(root: &Path) -> Result<Vec<PathBuf>, MountsError> {
    let path = root.join("proc/self/mountinfo");
    // Mount points are bytes.
    let bytes = fs::read(&path).map_err(|source| MountsError::Unreadable { path: path.clone(), source })?;
    parse(&bytes).map_err(|(line, content)| MountsError::Malformed { path, line, content })
}

fn parse(text: &[u8]) -> Result<Vec<PathBuf>, (usize, String)> {
    let mut mounts: Vec<(usize, PathBuf)> = Vec::new();
    let lines = text.split(|&byte| byte == b'\n').zip(1..).filter(|(line, _)| !line.is_empty());
    for (line, number) in lines {
        let malformed = || (number, String::from_utf8_lossy(line).into_owned());
        // ID PARENT MAJOR:MINOR ROOT MOUNT-POINT OPTIONS [TAG…] - TYPE SOURCE SUPER-OPTIONS
        let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        let dash = fields.iter().skip(6).position(|&field| field == b"-").ok_or_else(malformed)? + 6;
        if fields.len() < dash + 4 {
            return Err(malformed());
        }
        if fields[dash + 1] == b"cgroup2" {
            mounts.push((levels_above(fields[3]), mount_point(fields[4])));
        }
    }
    mounts.sort_by_key(|&(levels, _)| Reverse(levels));
    Ok(mounts.into_iter().map(|(_, path)| path).collect())
}

/// How far above this process's cgroup namespace the root of a mount is; 0 for one that is not.
///
/// In a container that has the host's hierarchy mounted beside its own, the host's root is `/../../…`.
fn levels_above(root: &[u8]) -> usize {
    let up = root.split(|&byte| byte == b'/').filter(|name| *name == b"..").count();
    // Between mounts at the same level, one of the root (`/`) beats one of a cgroup below it.
    2 * up + usize::from(root == b"/")
}

/// The kernel writes white space and backslashes as `\040`.
fn mount_point(field: &[u8]) -> PathBuf {
    OsString::from_vec(unescape(field, br"\", 3, 8)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<String>, (usize, String)> {
        let mounts = super::parse(text.as_bytes())?;
        Ok(mounts.iter().map(|path| path.display().to_string()).collect())
    }

    #[test]
    fn mounts_are_found() {
        let unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let beside_v1 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
                         32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                         33 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
                         34 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let container = "500 400 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                         501 400 0:26 /../../.. /host/sys/fs/cgroup ro master:4 propagate_from:2 - cgroup2 cgroup rw\n";
        let bound = "501 400 0:26 /system.slice /mnt/my\\040slice ro - cgroup2 cgroup rw\n\
                     500 400 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        for (text, expected) in [
            ("", vec![]),
            (unified, vec!["/sys/fs/cgroup"]),
            (beside_v1, vec!["/sys/fs/cgroup/unified"]),
            (container, vec!["/host/sys/fs/cgroup", "/sys/fs/cgroup"]),
            (bound, vec!["/sys/fs/cgroup", "/mnt/my slice"]),
        ] {
            assert_eq!(parse(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_mount_is_named() {
        for text in ["x", "30 23 0:26 / /sys/fs/cgroup rw cgroup2 cgroup2 rw", "1 2 3:4 / /a rw - cgroup2"] {
            let (line, content) = parse(&format!("1 2 3:4 / /a rw - tmpfs tmpfs rw\n{text}\n")).unwrap_err();
            assert_eq!((line, content.as_str()), (2, text));
        }
        let root = tempfile::tempdir().unwrap();
        let error = mount_points(root.path()).unwrap_err().to_string();
        assert!(error.contains("proc/self/mountinfo: No such file"), "{error}");
    }

    #[test]
    fn the_mounts_of_this_process_are_read() {
        mount_points(Path::new("/")).unwrap();
    }
}

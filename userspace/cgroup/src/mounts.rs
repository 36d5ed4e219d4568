//! Finds the mounts of cgroup v2 in `/proc/self/mountinfo`, which any user can make long by mounts of its own, for example of FUSE.
//!
//! Source: `proc_pid_mountinfo(5)`, `cgroup_namespaces(7)`.

use std::{
    cmp::Reverse,
    ffi::OsString,
    fs::{self, File},
    io::{self, BufRead, BufReader},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use crate::{TruncatedLines, unescape::unescape};

/// The mounts of this process cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MountsError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source} (it lists the mounts; is procfs mounted?)", path = path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// A line is not in the documented format.
    #[error("{path}:{line}: {content:?} is not a mount (expected the fields of proc_pid_mountinfo(5))", path = path.display())]
    Malformed {
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        content: String,
    },
}

/// Returns the mount points of cgroup v2 in this process's namespace; the one that shows the largest part of the
/// hierarchy is first. procfs is expected at `proc` below `root` (`/` in production).
pub(crate) fn mount_points(root: &Path) -> Result<Vec<PathBuf>, MountsError> {
    let path = root.join("proc/self/mountinfo");
    let fail = |source| MountsError::Unreadable { path: path.clone(), source };
    let text = BufReader::new(File::open(&path).map_err(fail)?);
    let mounts = parse(text).map_err(fail)?;
    mounts.map_err(|(line, content)| MountsError::Malformed { path, line, content })
}

/// Returns true if a mounted hierarchy of cgroup v2 has this controller, as its root's `cgroup.controllers` lists: otherwise it is
/// disabled, not built, or on a hierarchy of v1. `None` if that cannot be read.
pub fn has_controller(root: &Path, controller: &str) -> Option<bool> {
    let mut is_known = true;
    for mount in mount_points(root).ok()? {
        let file = root.join(mount.strip_prefix("/").unwrap_or(&mount)).join("cgroup.controllers");
        match fs::read_to_string(file) {
            Ok(controllers) if controllers.split_whitespace().any(|name| name == controller) => {
                return Some(true);
            }
            Ok(_) => {}
            Err(_) => is_known = false,
        }
    }
    is_known.then_some(false)
}

fn parse(text: impl BufRead) -> io::Result<Result<Vec<PathBuf>, (usize, String)>> {
    let mut mounts: Vec<(usize, PathBuf)> = Vec::new();
    let (mut lines, mut number) = (TruncatedLines::new(text), 0);
    // Mount points need not be UTF-8.
    while let Some(line) = lines.next_line()? {
        number += 1;
        if line.is_empty() {
            continue;
        }
        match cgroup2_mount(line) {
            Ok(mount) => mounts.extend(mount),
            Err(MalformedLine) => return Ok(Err((number, String::from_utf8_lossy(line).into_owned()))),
        }
    }
    mounts.sort_by_key(|&(levels, _)| Reverse(levels));
    Ok(Ok(mounts.into_iter().map(|(_, path)| path).collect()))
}

/// A line that is not in the documented format.
struct MalformedLine;

/// Returns the rank and the mount point if the line is a mount of cgroup v2.
fn cgroup2_mount(line: &[u8]) -> Result<Option<(usize, PathBuf)>, MalformedLine> {
    // ID PARENT MAJOR:MINOR ROOT MOUNT-POINT OPTIONS [TAG…] - TYPE SOURCE SUPER-OPTIONS
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let dash = fields.iter().skip(6).position(|&field| field == b"-").ok_or(MalformedLine)? + 6;
    if fields.len() < dash + 4 {
        return Err(MalformedLine);
    }
    Ok((fields[dash + 1] == b"cgroup2").then(|| (root_rank(fields[3]), mount_point(fields[4]))))
}

/// Returns a rank for the root of a mount: the higher it is above this process's cgroup namespace, the higher the rank.
///
/// In a container that has the host's hierarchy mounted next to its own, the host's root is `/../../…`.
fn root_rank(root: &[u8]) -> usize {
    let up = root.split(|&byte| byte == b'/').filter(|name| *name == b"..").count();
    // At the same level, the root (`/`) has a higher rank than a cgroup below it.
    2 * up + usize::from(root == b"/")
}

/// Decodes a mount point, in which the kernel writes white space and backslashes as `\040`.
fn mount_point(field: &[u8]) -> PathBuf {
    OsString::from_vec(unescape(field, br"\", 3, 8)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<String>, (usize, String)> {
        let mounts = super::parse(text.as_bytes()).unwrap()?;
        Ok(mounts.iter().map(|path| path.display().to_string()).collect())
    }

    #[test]
    fn finds_mounts() {
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
    fn refuses_malformed_mounts() {
        for text in ["x", "30 23 0:26 / /sys/fs/cgroup rw cgroup2 cgroup2 rw", "1 2 3:4 / /a rw - cgroup2"] {
            let (line, content) = parse(&format!("1 2 3:4 / /a rw - tmpfs tmpfs rw\n{text}\n")).unwrap_err();
            assert_eq!((line, content.as_str()), (2, text));
        }
        let root = tempfile::tempdir().unwrap();
        let error = mount_points(root.path()).unwrap_err().to_string();
        assert!(error.contains("proc/self/mountinfo: No such file"), "{error}");
    }

    #[test]
    fn finds_controllers_of_all_mounts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(has_controller(root.path(), "memory"), None, "mounts are unknown");
        write("proc/self/mountinfo", "1 2 3:4 / /a rw - tmpfs tmpfs rw\n");
        assert_eq!(has_controller(root.path(), "memory"), Some(false), "no cgroup v2");
        let mounts = "30 23 0:26 / /one rw - cgroup2 cgroup2 rw\n31 23 0:26 / /two rw - cgroup2 cgroup2 rw\n";
        write("proc/self/mountinfo", mounts);
        write("two/cgroup.controllers", "cpuset memoryless\n");
        assert_eq!(has_controller(root.path(), "memory"), None, "that of the other mount is unknown");
        write("one/cgroup.controllers", "");
        assert_eq!(has_controller(root.path(), "memory"), Some(false));
        write("two/cgroup.controllers", "cpuset memory pids\n");
        assert_eq!(has_controller(root.path(), "memory"), Some(true));
    }

    #[test]
    fn long_mounts_are_truncated() {
        let own = format!("1 2 3:4 / /{} rw - fuse {} rw\n", "a\\040".repeat(20_000), "b".repeat(1 << 20));
        let unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(parse(&[&own, unified, &own].concat()).unwrap(), ["/sys/fs/cgroup"]);
        let (line, content) = parse(&[unified, &"c".repeat(1 << 20)].concat()).unwrap_err();
        assert_eq!(line, 2);
        assert!(content.len() <= 32 << 10, "{} bytes are kept of a line", content.len());
    }

    #[test]
    fn reads_mounts_of_this_process() {
        mount_points(Path::new("/")).unwrap();
    }
}

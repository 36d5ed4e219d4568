//! The directories of the ledger and the sockets.
//!
//! # Problem
//! systemd creates them with mode 0700 (`StateDirectoryMode`, `RuntimeDirectoryMode`), Kubernetes'
//! `DirectoryOrCreate` with 0755, and `emptyDir` with 0777. A user with write permission could replace the ledger or a
//! socket of the daemon.
//!
//! # Algorithm
//! A missing directory is made with mode 0700, its missing parents with 0755: other programs may use them. An existing one must belong to
//! root or the daemon's user, and no other user may write to it. If it has the name `numaward`, or is empty, it is the
//! daemon's alone and gets mode 0700. Any other keeps its mode, because it may be `/run`. An `emptyDir` belongs to the daemon's user, has no
//! sticky bit, unlike `/tmp`, and is empty before and after its mode is set: no other user has put anything into it.
//!
//! The owner of a directory above could rename the daemon's away. So each directory and link on the way must belong to root or the daemon's
//! user, and no other user may write to it, except with the sticky bit. Members of the group root may: images have such directories.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{self, Path, PathBuf},
};

use numaward_cgroup::make_private_dir;

/// Mode of a directory that only the daemon uses.
const PRIVATE_MODE: u32 = 0o700;
/// Mode bit of directories such as `/tmp`, which many users share.
const STICKY: u32 = 0o1000;
/// Maximum number of links on the way to a directory, as in the kernel.
const MAX_LINKS: usize = 40;
/// Default name of such a directory.
const OWN_NAME: &str = "numaward";

/// Reason why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory cannot be created or read.
    #[error("{path}: cannot {1}: {2}", path = .0.display())]
    Io(PathBuf, &'static str, #[source] io::Error),
    /// Another user can write to the directory.
    #[error(
        "{path}: user {uid} owns this directory (mode {mode:04o}), so that other users can replace what is in it; \
         run chown root:root and chmod 0700 once it is known to have nothing of other users",
        path = path.display()
    )]
    Insecure { path: PathBuf, uid: u32, mode: u32 },
    /// Another user can write to a directory above, or owns it.
    #[error(
        "{path}: user {uid} owns {part} (mode {mode:04o}), so that other users can replace what is below it; \
         choose a directory below ones that only root may write, or run chown root:root and chmod go-w on {part}",
        path = path.display(), part = part.display()
    )]
    InsecureWay { path: PathBuf, part: PathBuf, uid: u32, mode: u32 },
}

/// Creates the directory and its missing parents, or checks an existing one.
pub fn prepare(path: &Path) -> Result<(), DirectoryError> {
    let fail = |action| move |error| DirectoryError::Io(path.to_owned(), action, error);
    let way = path::absolute(path).map_err(fail("find this directory"))?;
    check_way(path, &way, false, MAX_LINKS)?;
    make_private_dir(path).map_err(fail("create this directory"))?;
    // In a directory with the sticky bit, another user may have made one meanwhile.
    check_way(path, &way, false, MAX_LINKS)?;
    let found = fs::metadata(path).map_err(fail("read its metadata"))?;
    let (uid, mode) = (found.uid(), found.mode() & 0o7777);
    let own = rustix::process::geteuid().as_raw();
    let is_empty = || fs::read_dir(path).map(|mut names| names.next().is_none()).map_err(fail("list it"));
    let insecure = || Err(DirectoryError::Insecure { path: path.to_owned(), uid, mode });
    let is_shared = mode & 0o022 != 0;
    if uid != own {
        return if uid == 0 && !is_shared { Ok(()) } else { insecure() };
    }
    if is_shared && (mode & STICKY != 0 || !is_empty()?) {
        return insecure();
    }
    let is_own = is_shared || path.file_name().is_some_and(|name| name == OWN_NAME);
    if mode != PRIVATE_MODE && (is_own || is_empty()?) {
        match fs::set_permissions(path, Permissions::from_mode(PRIVATE_MODE)) {
            // No user can write there; the first file that the daemon writes reports it.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => return Ok(()),
            done => done.map_err(fail("set its mode"))?,
        }
        if is_shared && !is_empty()? {
            return insecure();
        }
    }
    Ok(())
}

/// Checks the existing directories and links that lead to `way`, and `way` itself if `with_last` is true. `path` is the configured one.
fn check_way(path: &Path, way: &Path, with_last: bool, links: usize) -> Result<(), DirectoryError> {
    let own = rustix::process::geteuid().as_raw();
    let mut parts: Vec<&Path> = way.ancestors().collect();
    parts.reverse();
    for part in parts {
        let fail = |action| move |error| DirectoryError::Io(part.to_owned(), action, error);
        let found = match fs::symlink_metadata(part) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.map_err(fail("read its metadata"))?,
        };
        let (uid, mode, is_link) = (found.uid(), found.mode() & 0o7777, found.is_symlink());
        if part == way && !with_last && !is_link {
            return Ok(());
        }
        let writers = if found.gid() == 0 { 0o002 } else { 0o022 };
        let is_shared = mode & writers != 0 && mode & STICKY == 0 && !is_link;
        if uid != 0 && uid != own || is_shared {
            return Err(DirectoryError::InsecureWay {
                path: path.to_owned(),
                part: part.to_owned(),
                uid,
                mode,
            });
        }
        if is_link {
            let too_many = || fail("follow it")(io::Error::other("there are too many links"));
            let links = links.checked_sub(1).ok_or_else(too_many)?;
            let target = fs::read_link(part).map_err(fail("read this link"))?;
            let target = part.parent().unwrap_or(part).join(target);
            check_way(path, &target, with_last || part != way, links)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, lchown, symlink};

    use numaward_tests_support::skip_outside_ci;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    /// Returns the bits that are removed from the mode of a new directory.
    fn umask() -> u32 {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        0o777 & !mode(&dir.path().join("a"))
    }

    #[test]
    fn private_directory_gets_mode_0700() {
        let root = tempfile::tempdir().unwrap();
        let made = root.path().join("a/b");
        prepare(&made).unwrap();
        let parent = root.path().join("a");
        assert_eq!(mode(&made), 0o700);
        assert_eq!(mode(&parent) & 0o055, 0o055 & !umask(), "other programs may use the parent");
        assert_eq!(mode(&parent) & 0o022, 0, "other users cannot replace the directory");

        // Kubernetes' `DirectoryOrCreate` uses mode 0755, `emptyDir` 0777; the second directory has a ledger.
        let (fresh, used) = (root.path().join("fresh"), root.path().join("numaward"));
        let (empty, shared) = (root.path().join("empty"), root.path().join("shared"));
        for (path, mode) in [(&fresh, 0o755), (&used, 0o755), (&empty, 0o777), (&shared, 0o755)] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        fs::write(used.join("ledger.json"), "").unwrap();
        fs::write(shared.join("other.pid"), "").unwrap();
        for (path, expected) in [(fresh, 0o700), (used, 0o700), (empty, 0o700), (shared, 0o755)] {
            prepare(&path).unwrap();
            assert_eq!(mode(&path), expected, "{}", path.display());
        }
    }

    #[test]
    fn private_directory_needs_secure_way() {
        let root = tempfile::tempdir().unwrap();
        let (parent, safe) = (root.path().join("parent"), root.path().join("safe"));
        let (path, linked) = (parent.join("a/numaward"), root.path().join("link/numaward"));
        fs::create_dir(&parent).unwrap();
        fs::create_dir(&safe).unwrap();
        fs::set_permissions(&safe, Permissions::from_mode(0o755)).unwrap();
        symlink("parent/a", root.path().join("link")).unwrap();
        let refused = |expected: &Path| {
            for path in [&path, &linked] {
                let error = prepare(path).unwrap_err();
                let is_way = matches!(&error, DirectoryError::InsecureWay { part, .. } if part == expected);
                assert!(is_way && error.to_string().contains("/parent"), "{error}");
            }
        };
        fs::set_permissions(&parent, Permissions::from_mode(0o777)).unwrap();
        refused(&parent);
        assert!(!parent.join("a").exists(), "nothing is made there");
        fs::set_permissions(&parent, Permissions::from_mode(0o1777)).unwrap();
        prepare(&path).unwrap();
        prepare(&linked).unwrap();
        symlink(&path, safe.join("last")).unwrap();
        prepare(&safe.join("last")).unwrap();
        symlink("loop", root.path().join("loop")).unwrap();
        let error = prepare(&root.path().join("loop/numaward")).unwrap_err();
        assert!(error.to_string().contains("links"), "{error}");
        if !rustix::process::geteuid().is_root() {
            return skip_outside_ci("in part: only root can change the owner of a directory");
        }
        lchown(safe.join("last"), Some(65534), None).unwrap();
        assert!(matches!(prepare(&safe.join("last")), Err(DirectoryError::InsecureWay { uid: 65534, .. })));
        for owned in [&parent, &parent.join("a")] {
            chown(owned, Some(65534), None).unwrap();
            refused(owned);
            chown(owned, Some(0), None).unwrap();
        }
        prepare(&linked).unwrap();
        fs::set_permissions(&parent, Permissions::from_mode(0o775)).unwrap();
        chown(&parent, None, Some(0)).unwrap();
        prepare(&path).unwrap();
        chown(&parent, None, Some(65534)).unwrap();
        refused(&parent);
    }

    #[test]
    fn private_directory_refuses_writable() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("numaward");
        fs::create_dir(&path).unwrap();
        let file = path.join("control.sock");
        for (refused, is_empty) in [(0o777, false), (0o1777, false), (0o770, false), (0o1777, true)] {
            if is_empty {
                fs::remove_file(&file).unwrap();
            } else {
                fs::write(&file, "").unwrap();
            }
            fs::set_permissions(&path, Permissions::from_mode(refused)).unwrap();
            let error = prepare(&path).unwrap_err();
            assert!(matches!(error, DirectoryError::Insecure { mode, .. } if mode == refused), "{error}");
            assert_eq!(mode(&path), refused);
        }
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        if rustix::process::geteuid().is_root() {
            chown(&path, Some(65534), None).unwrap();
            assert!(matches!(prepare(&path), Err(DirectoryError::Insecure { uid: 65534, .. })));
        } else {
            skip_outside_ci("in part: only root can change the owner of a directory");
        }
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(prepare(&file), Err(DirectoryError::Io(..))));
    }
}

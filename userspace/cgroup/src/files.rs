//! Files beside cgroups: limited reads, because another program can make a file long, also while it is read, or fill it with bytes that are
//! not UTF-8; and private files and directories.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use rustix::fs::{CWD, Mode, OFlags};

/// Number of bytes after which [`read_lossy`] stops. `/proc/PID/status` has some 740 KiB for a process in as many groups as the kernel
/// permits.
const MAX_LOSSY_BYTES: u64 = 1 << 20;

/// Returns the text of a file in which another program chooses a part, such as its name in `/proc/PID/stat`. Bytes that are not UTF-8
/// are replaced. A text of more than 1 MiB is cut.
///
/// # Errors
///
/// The file cannot be read.
pub fn read_lossy(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_LOSSY_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the text of a file of at most `most` bytes.
///
/// # Errors
///
/// The file cannot be read, is longer, or is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    read_open_text(File::open(path)?, most)
}

/// Returns the text of an open file of at most `most` bytes.
///
/// # Errors
///
/// The file cannot be read, is longer, or is not UTF-8.
pub fn read_open_text(file: File, most: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    let read = file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if read as u64 > most {
        let message = format!("it has more than the maximum of {most} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

/// Opens a file or a directory that only root and the user of this process can change. A pipe is opened without waiting for its writer.
///
/// # Errors
///
/// The file cannot be opened, or another user can change it.
pub fn open_protected(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // On amd64, the filter of the unit and of the pods refuses open(2).
    let file = File::from(rustix::fs::openat(CWD, path, flags, Mode::empty())?);
    let found = file.metadata()?;
    let (uid, mode) = (found.uid(), found.mode() & 0o7777);
    if !is_trusted_user(uid) {
        return Err(io::Error::other(format!("user {uid} owns it, and could change it: chown it to root")));
    }
    if mode & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "its mode is {mode:04o}, so that other users can change it: chmod go-w"
        )));
    }
    Ok(file)
}

/// Returns true for root and the user of this process.
pub fn is_trusted_user(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Replaces a file by one with these bytes and mode 0600: a new file is written, synced and renamed over the old one, so that a reader and a
/// crash find one of the two.
///
/// # Errors
///
/// The file cannot be written; the old one is unchanged.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_added_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)
}

/// Creates a directory with mode 0700, unless it exists, and its missing parents with mode 0755: other programs may use them.
///
/// # Errors
///
/// A directory cannot be created, or the path belongs to a file of another kind.
pub fn make_private_dir(path: &Path) -> io::Result<()> {
    if let Some(parents) = path.parent().filter(|parents| !parents.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o755).create(parents)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt as _,
    };

    use super::*;

    #[test]
    fn private_dir_is_only_for_its_owner() {
        let root = tempfile::tempdir().unwrap();
        let (private, parent, file) =
            (root.path().join("a/b"), root.path().join("a"), root.path().join("a/c"));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        make_private_dir(&private).unwrap();
        assert_eq!((mode(&private), mode(&parent) & 0o722), (0o700, 0o700));
        fs::set_permissions(&private, Permissions::from_mode(0o750)).unwrap();
        make_private_dir(&private).unwrap();
        assert_eq!(mode(&private), 0o750, "an existing one is kept");
        fs::write(&file, "").unwrap();
        assert_eq!(make_private_dir(&file).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn protected_file_is_changed_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(open_protected(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, "text").unwrap();
        for (mode, fits) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let opened = open_protected(&path).and_then(|file| read_open_text(file, 4));
            assert_eq!(opened.is_ok(), fits, "{mode:o}: {opened:?}");
        }
        let error = open_protected(&path).unwrap_err().to_string();
        assert!(error.contains("mode is 0646"), "{error}");
        open_protected(dir.path()).unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(open_protected(dir.path()).unwrap_err().to_string().contains("0777"));
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(!open_protected(&pipe).unwrap().metadata().unwrap().is_file());
        if rustix::process::geteuid().is_root() {
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(&path, Some(1234), None).unwrap();
            assert!(open_protected(&path).unwrap_err().to_string().contains("user 1234 owns it"));
        }
    }

    #[test]
    fn reads_are_limited() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read_lossy(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(read_text(&path, 4).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, b"a\xffb\n").unwrap();
        assert_eq!(read_lossy(&path).unwrap(), "a\u{fffd}b\n");
        assert!(read_text(&path, 4).unwrap_err().to_string().contains("utf-8"));
        fs::write(&path, "abcd").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "abcd");
        assert!(read_text(&path, 3).unwrap_err().to_string().contains("maximum of 3 bytes"));
        // The size of `/dev/zero` is 0, and it has no end.
        let endless = Path::new("/dev/zero");
        assert_eq!(read_lossy(endless).unwrap().len(), 1 << 20);
        assert!(read_text(endless, 4).unwrap_err().to_string().contains("maximum of 4 bytes"));
    }
}

//! Detection of a changed file.

use std::{fs::Metadata, os::unix::fs::MetadataExt as _};

/// Identity, size and change time of one version of a file.
///
/// The kernel updates the change time with each write and rename, at a resolution of some milliseconds. No program can
/// set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    /// In bytes.
    size: u64,
    /// Seconds and nanoseconds since the epoch.
    changed: (i64, i64),
}

impl FileStamp {
    /// Takes the stamp from the metadata of a file.
    pub fn new(file: &Metadata) -> Self {
        let changed = (file.ctime(), file.ctime_nsec());
        Self { device: file.dev(), inode: file.ino(), size: file.size(), changed }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn changed_file_has_another_stamp() {
        let dir = tempfile::tempdir().unwrap();
        let (file, other) = (dir.path().join("a"), dir.path().join("b"));
        let stamp = || FileStamp::new(&fs::metadata(&file).unwrap());
        fs::write(&file, "a").unwrap();
        fs::write(&other, "b").unwrap();
        let before = stamp();
        assert_eq!(stamp(), before);
        fs::rename(&other, &file).unwrap();
        let replaced = stamp();
        assert_ne!(replaced, before);
        fs::write(&file, "longer").unwrap();
        assert_ne!(stamp(), replaced);
    }
}

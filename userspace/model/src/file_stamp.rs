//! Whether a file is the one that was read.

use std::{fs::Metadata, os::unix::fs::MetadataExt as _};

/// What distinguishes one version of a file from another: where it is, how long, and when it was changed last.
///
/// The kernel's time of change goes on with each write and rename, at a resolution of some milliseconds. Nobody can set it.
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
    /// Of a file that was looked at.
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
    fn a_file_that_is_replaced_or_grows_has_another_stamp() {
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

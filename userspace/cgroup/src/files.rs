//! Text of files that another program can make long, also while they are read, or fill with bytes that are not UTF-8.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

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
    let mut bytes = Vec::new();
    let read = File::open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if read as u64 > most {
        let message = format!("it has more than the maximum of {most} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

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

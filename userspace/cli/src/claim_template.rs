//! Input of `numaward claim-template`.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use anyhow::{Context as _, bail};

/// Maximum size of a manifest in bytes; an object of Kubernetes has at most 1.5 MiB.
const MAX_BYTES: u64 = 4 << 20;

/// Reads a file, or standard input for `-`.
pub(crate) fn read(file: &Path) -> anyhow::Result<String> {
    let (mut text, place) = (String::new(), file.display());
    let input: &mut dyn Read = if file == Path::new("-") {
        &mut io::stdin().lock()
    } else {
        &mut File::open(file).with_context(|| format!("{place}: cannot be opened"))?
    };
    input
        .take(MAX_BYTES + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("{place}: cannot be read as text"))?;
    if text.len() as u64 > MAX_BYTES {
        bail!("{place}: it has more than {} MiB: give fewer documents", MAX_BYTES >> 20);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_limited() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pod.yaml");
        std::fs::write(&file, "kind: Pod\n").unwrap();
        assert_eq!(read(&file).unwrap(), "kind: Pod\n");
        let error = read(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(error.to_string(), "/dev/zero: it has more than 4 MiB: give fewer documents");
        std::fs::write(&file, b"\xff").unwrap();
        assert!(format!("{:#}", read(&file).unwrap_err()).contains("cannot be read as text"));
    }
}

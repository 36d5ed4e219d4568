//! Kernel images without compression: QEMU starts such an image by PVH. The kernel's loader would decompress it on an
//! emulated CPU, which takes a fifth of the boot.

use std::{
    fs::{self, File},
    io,
    path::Path,
    process::{Command, Stdio},
};

use crate::Error;

/// Beginnings of a frame of zstd, and of a program.
const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd";
const ELF: &[u8] = b"\x7fELF";
/// Offsets in the header of an image (The Linux/x86 Boot Protocol).
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD: usize = 0x248;
const SECTOR: usize = 512;
/// The payload's last bytes are its size after decompression.
const SIZE_BYTES: usize = 4;

/// Writes the program in the image to `to`. Returns false if its compression is not zstd: the other formats take little time.
pub(crate) fn unpack(image: &Path, to: &Path) -> Result<bool, Error> {
    let bytes = fs::read(image).map_err(Error::io("reading", image))?;
    let Some(payload) = payload(&bytes).filter(|payload| payload.starts_with(ZSTD)) else { return Ok(false) };
    let packed = to.with_extension("zst");
    fs::write(&packed, payload).map_err(Error::io("writing", &packed))?;
    let unpacked = File::open(&packed).and_then(|packed| {
        let mut zstd = Command::new("zstd");
        zstd.args(["--decompress", "--stdout", "--quiet"]).stdin(packed).stdout(File::create(to)?);
        zstd.stderr(Stdio::null()).status()
    });
    let status = unpacked.map_err(Error::io("decompressing", image))?;
    fs::remove_file(&packed).map_err(Error::io("removing", &packed))?;
    if !status.success() {
        let source = io::Error::other(format!("zstd failed ({status})"));
        return Err(Error::io("decompressing", image)(source));
    }
    let mut start = [0; ELF.len()];
    let read = File::open(to).and_then(|mut file| io::Read::read_exact(&mut file, &mut start));
    read.map_err(Error::io("reading", to))?;
    Ok(start == ELF)
}

fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..)?.first_chunk()?;
        usize::try_from(u32::from_le_bytes(*bytes)).ok()
    };
    let start = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * SECTOR + word(PAYLOAD)?;
    let end = (start + word(PAYLOAD + 4)?).checked_sub(SIZE_BYTES)?;
    image.get(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an image with this payload.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * SECTOR];
        image[SETUP_SECTORS] = 1;
        let words = [16, u32::try_from(payload.len() + SIZE_BYTES).unwrap()];
        image.splice(PAYLOAD..PAYLOAD + 8, words.into_iter().flat_map(u32::to_le_bytes));
        image.extend([[9; 16].as_slice(), payload, &[7; SIZE_BYTES], b"more"].concat());
        image
    }

    #[test]
    fn unpacks_programs_in_images() {
        let folder = tempfile::tempdir().unwrap();
        let [source, from, to] = ["source", "vmlinuz", "vmlinux"].map(|name| folder.path().join(name));
        let zstd = |content: &[u8]| {
            fs::write(&source, content).unwrap();
            Command::new("zstd").args(["--stdout", "--quiet"]).arg(&source).output().unwrap().stdout
        };
        let program = [ELF, &[3; 100]].concat();
        for (payload, expected) in [
            (zstd(&program), Some(true)),
            (zstd(b"no program"), Some(false)),
            (b"\x02\x21\x4c\x18 by lz4".to_vec(), Some(false)),
            (ZSTD.to_vec(), None),
        ] {
            fs::write(&from, image(&payload)).unwrap();
            assert_eq!(unpack(&from, &to).ok(), expected);
        }
        fs::write(&from, image(&zstd(&program))).unwrap();
        assert!(unpack(&from, &to).unwrap());
        assert_eq!(fs::read(&to).unwrap(), program);
        fs::write(&from, &image(&zstd(&program))[..PAYLOAD + 6]).unwrap();
        assert!(!unpack(&from, &to).unwrap(), "it has no payload");
    }
}

//! Log of a guest's writes to a disk, and the possible content of the disk after a loss of power.
//!
//! QEMU's `blklogwrites` logs each request when the disk has answered it, in the format of the kernel's dm-log-writes
//! (Documentation/admin-guide/device-mapper/log-writes.rst, linux/drivers/md/dm-log-writes.c): a sector with the number
//! of entries, then for each entry a sector that describes it, and the data.
//!
//! Model of a disk: writes that were answered before a flush began are durable once the flush was answered. Each sector
//! that was written since then may or may not be on the disk, independently of the other sectors.

use std::{fs, ops::Range, path::Path};

use crate::Error;

/// Size of a sector, in bytes.
pub const SECTOR: usize = 512;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FORCED: u64 = 2;
const DISCARD: u64 = 4;

const TRUNCATED: &str = "it ends within an entry";

/// A request that the disk has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogEntry {
    /// All earlier writes are durable.
    Flush,
    /// Bytes were written.
    Write {
        /// Offset on the disk, in bytes.
        offset: usize,
        /// Range of the data in the log.
        data: Range<usize>,
    },
}

/// The log of a disk.
#[derive(Debug)]
pub struct WriteLog {
    bytes: Vec<u8>,
    entries: Vec<LogEntry>,
}

impl WriteLog {
    /// Reads the log of a guest that has ended.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(Error::io("reading", path))?;
        let entries = entries(&bytes)
            .map_err(|reason| Error::WriteLog { path: path.to_owned(), reason: reason.to_owned() })?;
        Ok(Self { bytes, entries })
    }

    /// Returns the requests in the order of their answers.
    pub fn entries(&self) -> &[LogEntry] {
        &self.entries
    }

    /// Returns the data of a write.
    pub fn data(&self, data: &Range<usize>) -> &[u8] {
        &self.bytes[data.clone()]
    }

    /// Returns the index of the last flush before this entry; 0 if there is none.
    pub fn last_flush(&self, before: usize) -> usize {
        self.entries[..before].iter().rposition(|entry| *entry == LogEntry::Flush).unwrap_or(0)
    }

    /// Applies these entries to the disk; `keeps` decides for each sector if it is written.
    pub fn replay(&self, disk: &mut [u8], entries: Range<usize>, mut keeps: impl FnMut() -> bool) {
        for entry in &self.entries[entries] {
            let LogEntry::Write { offset, data } = entry else { continue };
            let sectors = self.data(data).chunks(SECTOR);
            for (number, sector) in sectors.enumerate() {
                let at = offset + number * SECTOR;
                if keeps()
                    && let Some(place) = disk.get_mut(at..at + sector.len())
                {
                    place.copy_from_slice(sector);
                }
            }
        }
    }
}

fn entries(bytes: &[u8]) -> Result<Vec<LogEntry>, &'static str> {
    let number = |at: usize| {
        let bytes = bytes.get(at..at + 8)?;
        bytes.try_into().ok().map(u64::from_le_bytes)
    };
    let size = |at: usize| usize::try_from(number(at)?).ok();
    if number(0) != Some(MAGIC) || number(8) != Some(1) {
        return Err("it does not begin as a log");
    }
    let count = number(16).ok_or(TRUNCATED)?;
    // The size of a sector has 4 bytes, which are followed by unused bytes.
    if number(24).map(|size| size & 0xffff_ffff) != Some(SECTOR as u64) {
        return Err("its sectors do not have 512 bytes");
    }
    let mut found = Vec::new();
    let mut at = SECTOR;
    for _ in 0..count {
        let (Some(sector), Some(sectors), Some(flags)) = (size(at), size(at + 8), number(at + 16)) else {
            return Err(TRUNCATED);
        };
        at += SECTOR;
        // Discarded data may have any value, including the present one.
        if flags & DISCARD != 0 {
            continue;
        }
        if flags & FLUSH != 0 {
            found.push(LogEntry::Flush);
        }
        let data = at..at + sectors * SECTOR;
        if data.end > bytes.len() {
            return Err(TRUNCATED);
        }
        at = data.end;
        if !data.is_empty() {
            found.push(LogEntry::Write { offset: sector * SECTOR, data });
            if flags & FORCED != 0 {
                return Err("a write was forced to the disk, which no virtio disk is asked for");
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a log of these requests: sector, flags, data.
    fn log(requests: &[(u64, u64, &[u8])]) -> Vec<u8> {
        let sector = |numbers: &[u64]| {
            let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            bytes.resize(SECTOR, 0);
            bytes
        };
        let mut log = sector(&[MAGIC, 1, requests.len() as u64, 512]);
        for (at, flags, data) in requests {
            log.extend(sector(&[*at, (data.len() / SECTOR) as u64, *flags, 0]));
            log.extend(*data);
        }
        log
    }

    #[test]
    fn flushed_writes_are_durable() {
        let [one, two, three] = [1, 2, 3].map(|byte| [byte; 2 * SECTOR]);
        let bytes =
            log(&[(1, 0, &one), (0, FLUSH, &[]), (2, 0, &two), (7, DISCARD, &[]), (3, FLUSH, &three)]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, &bytes).unwrap();
        let log = WriteLog::read(&path).unwrap();
        assert_eq!(log.entries().len(), 5, "{:?}", log.entries());
        assert_eq!([0, 1, 2, 4, 5].map(|before| log.last_flush(before)), [0, 0, 1, 3, 3]);
        let disk = |entries, keeps: fn() -> bool| {
            let mut disk = [0; 4 * SECTOR];
            log.replay(&mut disk, entries, keeps);
            [0, 1, 2, 3].map(|sector| disk[sector * SECTOR])
        };
        assert_eq!(disk(0..1, || true), [0, 1, 1, 0]);
        assert_eq!(disk(0..3, || true), [0, 1, 2, 2]);
        assert_eq!(disk(0..3, || false), [0; 4]);
        // Data behind the end of the disk is ignored.
        assert_eq!(disk(0..5, || true), [0, 1, 2, 3]);
    }

    #[test]
    fn refuses_malformed_logs() {
        let good = log(&[(1, 0, &[1; SECTOR])]);
        assert!(entries(&good).is_ok());
        assert!(entries(&[]).is_err());
        assert!(entries(&good[..good.len() - 1]).is_err());
        assert!(entries(&good[..SECTOR + 4]).is_err());
        assert!(entries(&log(&[(1, FORCED, &[1; SECTOR])])).is_err());
    }
}

//! Mappings of a process, from `/proc/PID/maps` (`proc_pid_maps(5)`).
//!
//! The file names come from the workload and can contain any bytes.

use std::{
    fs::File,
    io::{self, BufReader},
    path::Path,
};

use numaward_cgroup::{TruncatedLines, unescape};

/// Maximum size of all names of a process, in bytes. It can map tens of thousands of files under names of 4 KiB.
const MAX_NAME_BYTES: usize = 16 << 20;
/// Name of a file for which there is no room.
const FOLDED_NAME: &str = "[others]";

/// A mapped range of addresses.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MappedRegion {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Name as in the daemon's API: `[heap]`, `[stack]`, `[anonymous]`, a file, or `[others]`.
    pub(super) region: String,
}

/// Reads the mappings of a process, in the order of addresses.
pub(super) fn read(proc: &Path, pid: u32) -> io::Result<Vec<MappedRegion>> {
    let maps = File::open(proc.join(pid.to_string()).join("maps"))?;
    let (mut lines, mut found) = (TruncatedLines::new(BufReader::new(maps)), Vec::new());
    let mut room = MAX_NAME_BYTES;
    while let Some(line) = lines.next_line()? {
        let Some(mut mapping) = parse_mapping(&String::from_utf8_lossy(line)) else { continue };
        match room.checked_sub(mapping.region.len()) {
            Some(rest) => room = rest,
            None => FOLDED_NAME.clone_into(&mut mapping.region),
        }
        // The name was cut out of a longer line.
        mapping.region.shrink_to_fit();
        found.push(mapping);
    }
    Ok(found)
}

/// Returns the mappings that overlap a range of addresses. `maps` must be in the order of addresses.
pub(super) fn overlapping(
    maps: &[MappedRegion],
    start: u64,
    end: u64,
) -> impl Iterator<Item = &MappedRegion> {
    let first = maps.partition_point(|map| map.end <= start);
    maps.get(first..).unwrap_or_default().iter().take_while(move |map| map.start < end)
}

fn parse_mapping(line: &str) -> Option<MappedRegion> {
    // 7f0000001000-7f0000002000 r-xp 00001000 fd:00 123   /usr/lib/a file
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
    let region = match words.nth(4).unwrap_or_default().trim_start() {
        "" => "[anonymous]".to_owned(),
        named if named.starts_with("[anon") => "[anonymous]".to_owned(),
        // The kernel writes a line break as `\012`.
        name => String::from_utf8_lossy(&unescape(name.as_bytes(), b"\\", 3, 8)).into_owned(),
    };
    Some(MappedRegion { start: start?, end: end?, region })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn mappings_have_names_of_regions() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("7")).unwrap();
        let text = b"5000-6000 r-xp 00001000 fd:00 123                    /usr/bin/a \\012 file\n\
            6000-7000 rw-p 00000000 00:00 0                        [heap]\n\
            7000-8000 rw-p 00000000 00:00 0 \n\
            8000-9000 rw-p 00000000 00:00 0                        [anon:arena]\n\
            9000-a000 rw-s 00000000 fd:00 9                        /SYSV\n\
            a000-b000 rw-s 00000000 fd:00 9                        /\xff (deleted)\n\
            nonsense\n\
            b000-c000 rw-p 00000000 00:00 0                        [stack]\n";
        fs::write(proc.path().join("7/maps"), text).unwrap();
        let found = read(proc.path(), 7).unwrap();
        let names: Vec<&str> = found.iter().map(|mapping| mapping.region.as_str()).collect();
        assert_eq!(
            names,
            [
                "/usr/bin/a \n file",
                "[heap]",
                "[anonymous]",
                "[anonymous]",
                "/SYSV",
                "/\u{fffd} (deleted)",
                "[stack]"
            ]
        );
        assert_eq!((found[0].start, found[0].end), (0x5000, 0x6000));
        assert!(read(proc.path(), 8).is_err());
    }

    #[test]
    fn long_names_are_folded() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("7")).unwrap();
        let name = "x".repeat(8000);
        let lines =
            (0..6000).map(|number| format!("{number:x}000-{number:x}fff r--s 0 fd:00 9 /{number}{name}\n"));
        fs::write(proc.path().join("7/maps"), lines.collect::<String>()).unwrap();
        let found = read(proc.path(), 7).unwrap();
        let bytes: usize = found.iter().map(|mapping| mapping.region.len()).sum();
        assert_eq!(found.len(), 6000);
        assert!(bytes <= MAX_NAME_BYTES + 6000 * FOLDED_NAME.len(), "{bytes}");
        assert!(found[0].region.starts_with("/0x") && found[5999].region == FOLDED_NAME);
    }
}

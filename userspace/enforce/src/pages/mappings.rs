//! The mappings of a process that have pages on a node, coldest first: `/proc/PID/maps` and `numa_maps`.
//!
//! The supported kernels (6.1, 6.12) have no idle page tracking built in, and `clear_refs` would take information from
//! the kernel's own reclaim. The temperature of a mapping is therefore that of the kernel's LRU lists: the share of its
//! pages on the active list (`active=` of `numa_maps`). This is coarse, because pages within a mapping are not
//! distinguished.
//!
//! A process controls the length of both files and the names of files in them. They are therefore read line by line,
//! each line is [cut](TruncatedLines), and at most [`MAX_MAPPINGS`] mappings are kept. Lines that cannot be read and surplus
//! mappings are counted.
//!
//! Source: `proc_pid_numa_maps(5)`, `proc_pid_maps(5)`, `fs/proc/task_mmu.c`.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    ops::Range,
    path::Path,
};

use numaward_cgroup::{TruncatedLines, memory_policy::nodes_of};
use numaward_topology::NodeId;

/// Maximum number of mappings of a process: the kernel's default limit (`vm.max_map_count`), and some more.
const MAX_MAPPINGS: usize = 1 << 16;

/// A mapping with pages on the requested node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeMapping {
    pub(super) addresses: Range<usize>,
    /// Number of its pages on the node.
    pub(super) pages: u64,
    /// Share of its pages that are on the active list: 0 to 1000.
    pub(super) active: u32,
    /// True if its memory policy names nodes.
    pub(super) is_bound: bool,
}

/// Mappings of a process with pages on a node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeMappings {
    /// The mappings, coldest first.
    pub(super) mappings: Vec<NodeMapping>,
    /// Number of lines that could not be read, and of mappings beyond [`MAX_MAPPINGS`].
    pub(super) skipped: u64,
    /// True if the time was over before all mappings were read.
    pub(super) is_partial: bool,
}

/// Returns the mappings of the process in the directory `process` that have pages on `node`, as far as they are read before `is_over`
/// returns true. Pools of huge pages are not among them: they are preallocated and never move. `is_over` is called for each line.
///
/// # Errors
///
/// The process has ended, or the daemon may not trace it.
pub(super) fn on_node(process: &Path, node: NodeId, is_over: &impl Fn() -> bool) -> io::Result<NodeMappings> {
    let mut lines = open_lines(&process.join("numa_maps"))?;
    let mut ranges = MappingRanges { lines: open_lines(&process.join("maps"))?, last: None };
    let mut found = NodeMappings::default();
    // Both files are read together, so that mappings have an end although the time is over before the last one.
    while let Some(line) = lines.next_line()? {
        if is_over() {
            found.is_partial = true;
            break;
        }
        match mapping(&String::from_utf8_lossy(line), node) {
            Ok(Some(mut mapping)) if found.mappings.len() < MAX_MAPPINGS => {
                match ranges.end_of(mapping.addresses.start, is_over)? {
                    Some(end) => {
                        mapping.addresses.end = end;
                        found.mappings.push(mapping);
                    }
                    None if is_over() => found.is_partial = true,
                    // The mapping has gone meanwhile.
                    None => {}
                }
            }
            Ok(None) => {}
            Ok(Some(_)) | Err(MalformedLine) => found.skipped += 1,
        }
    }
    found.mappings.sort_by_key(|mapping| (mapping.active, mapping.addresses.start));
    Ok(found)
}

/// The addresses of [`on_node`], for fuzzing.
#[cfg(feature = "testing")]
pub fn mappings_on_node(
    process: &Path,
    node: NodeId,
    is_over: impl Fn() -> bool,
) -> io::Result<Vec<Range<usize>>> {
    Ok(on_node(process, node, &is_over)?.mappings.into_iter().map(|mapping| mapping.addresses).collect())
}

fn open_lines(path: &Path) -> io::Result<TruncatedLines<BufReader<File>>> {
    Ok(TruncatedLines::new(BufReader::with_capacity(1 << 16, File::open(path)?)))
}

/// The address ranges of `maps`, read in ascending order.
struct MappingRanges<R> {
    lines: TruncatedLines<R>,
    last: Option<(usize, usize)>,
}

impl<R: BufRead> MappingRanges<R> {
    /// Returns the end of the mapping that begins at an address, which is not lower than those of earlier calls. `None` if there is no
    /// such mapping, or if `is_over` returns true.
    fn end_of(&mut self, start: usize, is_over: &impl Fn() -> bool) -> io::Result<Option<usize>> {
        while self.last.is_none_or(|(last, _)| last < start) {
            match self.lines.next_line()? {
                Some(line) if !is_over() => self.last = range(&String::from_utf8_lossy(line)).or(self.last),
                _ => return Ok(None),
            }
        }
        Ok(self.last.filter(|(last, end)| *last == start && *end > start).map(|(_, end)| end))
    }
}

/// Parses the addresses of a line of `maps`.
fn range(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

/// Error for a line of `numa_maps` that is not in the kernel's format.
#[derive(Debug, PartialEq, Eq)]
struct MalformedLine;

/// Parses a line of `numa_maps` into a mapping without an end; `None` if it has no page on `node`.
fn mapping(line: &str, node: NodeId) -> Result<Option<NodeMapping>, MalformedLine> {
    let mut words = line.split_ascii_whitespace();
    let start = words.next().and_then(|start| usize::from_str_radix(start, 16).ok()).ok_or(MalformedLine)?;
    let (mut here, mut active, mut pages) = (0_u64, None, 0_u64);
    // The policy comes first. That of several preferred nodes contains a space.
    let mut is_bound = false;
    for word in words {
        is_bound |= !word.contains("file=") && nodes_of(word).is_some();
        match word.split_once('=') {
            None if word == "huge" => return Ok(None),
            Some(("active", count)) => active = count.parse().ok(),
            Some((key, count)) => {
                let Some(of) = key.strip_prefix('N').and_then(|of| of.parse().ok()) else { continue };
                let count: u64 = count.parse().map_err(|_| MalformedLine)?;
                pages = pages.saturating_add(count);
                if NodeId(of) == node {
                    here = count;
                }
            }
            None => {}
        }
    }
    if here == 0 {
        return Ok(None);
    }
    // If all pages are active, the kernel omits their number.
    let active: u64 = active.unwrap_or(pages);
    let share = active.saturating_mul(1000).checked_div(pages).unwrap_or(0).min(1000);
    let active = u32::try_from(share).unwrap_or(1000);
    Ok(Some(NodeMapping { addresses: start..start, pages: here, active, is_bound }))
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, fs};

    use super::*;

    const MAPS: &str = "\
00400000-00500000 r-xp 00000000 08:01 1 /bin/db
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
7f0001000000-7f0001800000 rw-p 00000000 00:00 0
7f0002000000-7f0002200000 rw-p 00000000 00:0f 9 /anon_hugepage (deleted)
7f0003000000-7f0003200000 rw-s 00000000 00:01 7 /memfd:a b (deleted)
nonsense
";
    const NUMA_MAPS: &str = "\
00400000 default file=/bin/db mapped=256 active=200 N0=256 kernelpagesize_kB=4
7f0000000000 default anon=2048 dirty=2048 N0=1024 N1=1024 kernelpagesize_kB=4
7f0001000000 bind:0-1 anon=2048 dirty=2048 active=512 N0=2048 kernelpagesize_kB=4
7f0002000000 default file=/anon_hugepage\\040(deleted) huge anon=1 dirty=1 N0=1 kernelpagesize_kB=2048
7f0003000000 default file=/memfd:a\\040b\\040(deleted) dirty=512 active=0 N1=512 kernelpagesize_kB=4
7f0004000000 default
zzz default N0=1
";

    #[test]
    fn lists_coldest_mappings_first() {
        let process = tempfile::tempdir().unwrap();
        let write = |maps: &str| {
            fs::write(process.path().join("maps"), maps).unwrap();
            fs::write(process.path().join("numa_maps"), NUMA_MAPS).unwrap();
        };
        let read = |node| on_node(process.path(), NodeId(node), &|| false).unwrap();
        write(MAPS);
        let NodeMappings { mappings: found, skipped, .. } = read(0);
        let starts: Vec<_> = found.iter().map(|of| (of.addresses.start, of.active)).collect();
        assert_eq!(starts, [(0x7f00_0100_0000, 250), (0x40_0000, 781), (0x7f00_0000_0000, 1000)]);
        assert_eq!((found[0].addresses.end, found[0].pages), (0x7f00_0180_0000, 2048));
        assert_eq!(skipped, 1, "one is no line of the kernel's");
        let bound = found.iter().map(|of| of.is_bound).collect::<Vec<_>>();
        assert_eq!(bound, [true, false, false], "one is bound to nodes 0-1");
        let starts: Vec<_> = read(1).mappings.iter().map(|of| (of.addresses.start, of.active)).collect();
        assert_eq!(starts, [(0x7f00_0300_0000, 0), (0x7f00_0000_0000, 1000)]);
        assert!(read(7).mappings.is_empty());
        write("");
        assert!(read(0).mappings.is_empty(), "a mapping that is gone meanwhile");
        write(MAPS);
        for (lines, mappings) in [(0_usize, 0), (1, 0), (2, 1), (5, 2), (9, 3), (10, 3)] {
            let left = Cell::new(lines);
            let is_over = || left.replace(left.get().saturating_sub(1)) == 0;
            let found = on_node(process.path(), NodeId(0), &is_over).unwrap();
            assert_eq!(found.mappings.len(), mappings, "found in {lines} lines of both files");
            assert_eq!(found.is_partial, lines < 10, "{lines}");
        }
    }

    #[test]
    fn counts_mappings_beyond_limit() {
        let process = tempfile::tempdir().unwrap();
        let lines = |line: fn(usize) -> String| (1..=MAX_MAPPINGS + 3).map(line).collect::<String>();
        fs::write(process.path().join("maps"), lines(|at| format!("{at:x}000-{at:x}800 r--p 0 0:0 0\n")))
            .unwrap();
        fs::write(process.path().join("numa_maps"), lines(|at| format!("{at:x}000 default N0=1\n"))).unwrap();
        let found = on_node(process.path(), NodeId(0), &|| false).unwrap();
        assert_eq!((found.mappings.len(), found.skipped), (MAX_MAPPINGS, 3));
    }
}

//! Memory of a workload by region of the address space and by node, from `/proc/PID/numa_maps` (`numa(7)`).
//!
//! The kernel walks the page tables of the process for this, mapping by mapping: 10 to 23 ms per GiB of small pages.
//! Therefore the file is read only on request and for [`READ_TIMEOUT`] at most; the result says if it is incomplete.
//!
//! A program controls the number and the names of the files that it maps. Lines are therefore [cut](TruncatedLines)
//! while they are read, at most [`MAX_NAME_BYTES`] bytes of a name are kept, and at most [`MAX_NAMES`] names at a time: the
//! smallest regions are folded into one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, BufReader},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use numaward_api::{MAX_REGIONS, Region, RegionNode, Regions};
use numaward_cgroup::{TruncatedLines, unescape};
use numaward_topology::{NodeId, NodeSet};

use crate::stacks::processes_below;

/// Longest time for reading.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Most named regions while reading.
const MAX_NAMES: usize = 2 * MAX_REGIONS;
/// Maximum length of a name in bytes. Files with equal names up to this length count as one region.
const MAX_NAME_BYTES: usize = 1 << 10;
/// Number of nodes that the kernel supports. Pages on a node with a higher id are ignored.
const MAX_NODES: u32 = 1024;
/// Name of the region into which smaller ones are folded.
const FOLDED_NAME: &str = "[others]";

/// Intended placement of a workload's memory.
#[derive(Clone, Debug)]
pub(crate) enum IntendedNodes {
    /// On the guaranteed nodes.
    Guaranteed(NodeSet),
    /// On the preferred node.
    Preferred(NodeId),
}

impl IntendedNodes {
    fn has(&self, node: NodeId) -> bool {
        match self {
            Self::Guaranteed(nodes) => nodes.contains(node),
            Self::Preferred(home) => *home == node,
        }
    }
}

/// Bytes of a region, and how many of them are off the intended nodes.
#[derive(Debug, Default)]
struct RegionSum {
    nodes: BTreeMap<NodeId, u64>,
    off: u64,
}

impl RegionSum {
    fn add(&mut self, node: NodeId, bytes: u64) {
        let of_node = self.nodes.entry(node).or_default();
        *of_node = of_node.saturating_add(bytes);
    }

    fn bytes(&self) -> u64 {
        self.nodes.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    fn fold(&mut self, other: Self) {
        self.off = self.off.saturating_add(other.off);
        for (node, bytes) in other.nodes {
            self.add(node, bytes);
        }
    }
}

/// Regions by name, and the sum of the folded ones.
#[derive(Debug, Default)]
struct RegionSums {
    named: BTreeMap<String, RegionSum>,
    folded: Option<RegionSum>,
}

impl RegionSums {
    /// Returns the sum of a region, which is added if necessary. Folds smaller regions if there are too many.
    fn sum_of(&mut self, name: String) -> &mut RegionSum {
        if self.named.len() >= MAX_NAMES && !self.named.contains_key(&name) {
            self.keep_largest(MAX_REGIONS);
        }
        self.named.entry(name).or_default()
    }

    /// Folds all regions except the `most` largest.
    fn keep_largest(&mut self, most: usize) {
        let mut sizes: Vec<u64> = self.named.values().map(RegionSum::bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let Some(&limit) = sizes.get(most) else { return };
        // Among regions of equal size, as many as there is room for.
        let mut room = most - sizes.iter().take_while(|size| **size > limit).count();
        let others = self.folded.get_or_insert_default();
        for (_, sum) in self.named.extract_if(.., |_, sum| {
            let bytes = sum.bytes();
            let stays = bytes > limit || (bytes == limit && room > 0);
            room -= usize::from(stays && bytes == limit);
            !stays
        }) {
            others.fold(sum);
        }
    }

    /// Returns the regions, largest first, followed by the folded ones if there are any.
    fn into_regions(mut self, belongs: bool) -> Vec<Region> {
        if self.folded.is_some() || self.named.len() > MAX_REGIONS {
            self.keep_largest(MAX_REGIONS - 1);
        }
        let region = |(name, sum): (String, RegionSum)| Region {
            name,
            nodes: sum.nodes.into_iter().map(|(node, bytes)| RegionNode { node: node.0, bytes }).collect(),
            off_bytes: belongs.then_some(sum.off),
        };
        let mut regions: Vec<Region> = self.named.into_iter().map(region).collect();
        regions.sort_by(|one, other| other.bytes().cmp(&one.bytes()).then_with(|| one.name.cmp(&other.name)));
        regions.extend(self.folded.map(|others| region((FOLDED_NAME.to_owned(), others))));
        regions
    }
}

/// Reads the regions of processes in cgroups; each cgroup comes with the intended placement of its memory. `proc` is
/// the mount point of procfs.
pub(crate) fn read(
    proc: &Path,
    dirs: impl Iterator<Item = (PathBuf, Option<IntendedNodes>)>,
    deadline: Instant,
) -> Regions {
    let (mut sums, mut notes) = (RegionSums::default(), BTreeSet::new());
    let late = || format!("not all was read within {} s", READ_TIMEOUT.as_secs());
    let (mut processes, mut guaranteed, mut homes) = (0, NodeSet::new(), NodeSet::new());
    for (dir, belongs) in dirs {
        match &belongs {
            Some(IntendedNodes::Guaranteed(on)) => guaranteed.extend(on.iter()),
            Some(IntendedNodes::Preferred(on)) => homes.extend([*on]),
            None => {}
        }
        // The user of a workload chooses the number of its cgroups.
        if Instant::now() >= deadline {
            notes.insert(late());
            break;
        }
        for pid in processes_below(&dir, &mut notes) {
            match read_process(&proc.join(pid.to_string()), belongs.as_ref(), deadline, &mut sums) {
                Ok(is_complete) => {
                    processes += u32::from(is_complete);
                    if !is_complete {
                        notes.insert(late());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    notes.insert(format!("some processes cannot be read without CAP_SYS_PTRACE: {error}"));
                }
                // The process has ended.
                Err(_) => {}
            }
        }
    }
    let list = |nodes: &NodeSet| (!nodes.is_empty()).then(|| nodes.to_string());
    let (guaranteed, home) = (list(&guaranteed), list(&homes));
    let belongs = guaranteed.is_some() || home.is_some();
    if sums.folded.is_some() {
        let note = format!("more than {MAX_NAMES} names: some pages of small regions count as {FOLDED_NAME}");
        notes.insert(note);
    }
    let regions = sums.into_regions(belongs);
    Regions { processes, notes: notes.into_iter().collect(), guaranteed, home, regions }
}

/// Reads the regions of the process in the directory `process`, for fuzzing.
#[cfg(feature = "testing")]
pub fn regions_of(process: &Path, deadline: Instant) -> io::Result<Vec<Region>> {
    let mut sums = RegionSums::default();
    read_process(process, None, deadline, &mut sums)?;
    Ok(sums.into_regions(false))
}

/// Adds the regions of a process; returns `false` if time ran out.
fn read_process(
    dir: &Path,
    belongs: Option<&IntendedNodes>,
    deadline: Instant,
    sums: &mut RegionSums,
) -> io::Result<bool> {
    if Instant::now() >= deadline {
        return Ok(false);
    }
    let mut lines =
        TruncatedLines::new(BufReader::with_capacity(1 << 16, File::open(dir.join("numa_maps"))?));
    while let Some(line) = lines.next_line()? {
        if let Some((name, pages)) = mapping(&String::from_utf8_lossy(line)) {
            let sum = sums.sum_of(name);
            for (node, bytes) in pages {
                sum.add(node, bytes);
                if belongs.is_some_and(|belongs| !belongs.has(node)) {
                    sum.off = sum.off.saturating_add(bytes);
                }
            }
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the region of a line of `numa_maps` and its bytes by node; `None` if the line has none.
fn mapping(line: &str) -> Option<(String, Vec<(NodeId, u64)>)> {
    // 7f0000000000 default file=/usr/lib/a\040file mapped=9 N0=5 N1=4 kernelpagesize_kB=4
    let (mut name, mut page, mut pages) = ("[anonymous]".to_owned(), 4, Vec::new());
    for word in line.split_ascii_whitespace() {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "heap" | "stack" => name = format!("[{key}]"),
            // Some characters are escaped, for example as `\040`.
            "file" => {
                name = String::from_utf8_lossy(&unescape(value.as_bytes(), b"\\", 3, 8)).into_owned();
                name.truncate(name.floor_char_boundary(MAX_NAME_BYTES));
            }
            "kernelpagesize_kB" => page = value.parse().ok()?,
            _ => {
                if let Some(Ok(node)) = key.strip_prefix('N').map(str::parse)
                    && node < MAX_NODES
                    && let Ok(count) = value.parse::<u64>()
                {
                    pages.push((NodeId(node), count));
                }
            }
        }
    }
    if pages.is_empty() {
        return None;
    }
    let bytes = |count: u64| count.saturating_mul(page).saturating_mul(1024);
    Some((name, pages.into_iter().map(|(node, count)| (node, bytes(count))).collect()))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{BufWriter, Write as _},
    };

    use numaward_tests_support::{is_alone, resident};
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    const MAPS: &str = "00400000 default file=/usr/bin/a\\040server mapped=9 N0=9 kernelpagesize_kB=4\n\
        00800000 default heap anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n\
        7f0000000000 bind:1 anon=2 dirty=2 N1=2 kernelpagesize_kB=2048\n\
        7f1000000000 default stack anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n\
        7f2000000000 default\n\
        nonsense\n";

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    fn host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("cgroup")).unwrap();
        fs::write(host.path().join("cgroup/cgroup.procs"), "10\n11\n12\n").unwrap();
        for pid in [10, 11] {
            fs::create_dir_all(host.path().join(format!("proc/{pid}"))).unwrap();
            fs::write(host.path().join(format!("proc/{pid}/numa_maps")), MAPS).unwrap();
        }
        host
    }

    fn regions(host: &Path, belongs: Option<IntendedNodes>, deadline: Instant) -> Regions {
        read(&host.join("proc"), [(host.join("cgroup"), belongs)].into_iter(), deadline)
    }

    #[test]
    fn sums_regions_of_all_processes() {
        let host = host();
        let found = regions(host.path(), Some(IntendedNodes::Guaranteed("1".parse().unwrap())), soon());
        let kib = |node, kib: u64| RegionNode { node, bytes: kib << 10 };
        let region = |name: &str, nodes: &[RegionNode], off: u64| Region {
            name: name.to_owned(),
            nodes: nodes.to_vec(),
            off_bytes: Some(off << 10),
        };
        assert_eq!(
            (found.processes, found.guaranteed.as_deref(), found.home.as_deref()),
            (2, Some("1"), None)
        );
        assert!(found.notes.is_empty(), "{found:?}");
        assert_eq!(
            found.regions,
            [
                region("[anonymous]", &[kib(1, 8192)], 0),
                region("/usr/bin/a server", &[kib(0, 72)], 72),
                region("[heap]", &[kib(0, 8), kib(1, 16)], 8),
                region("[stack]", &[kib(0, 8)], 8),
            ]
        );
        assert_eq!(regions(host.path(), None, soon()).regions[0].off_bytes, None);
        let home = regions(host.path(), Some(IntendedNodes::Preferred(NodeId(1))), soon());
        assert_eq!((home.guaranteed.as_deref(), home.home.as_deref()), (None, Some("1")));
        assert_eq!(home.regions, found.regions);
    }

    /// A `numa_maps` that any local user can cause: more than 100 MB of long names, with one page each.
    #[test]
    fn memory_is_bounded_for_any_names() {
        const NAMES: u64 = 30_000;
        const CEILING: u64 = 16 << 20;
        if !is_alone() {
            return;
        }
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("cgroup")).unwrap();
        fs::create_dir_all(host.path().join("proc/10")).unwrap();
        fs::write(host.path().join("cgroup/cgroup.procs"), "10\n").unwrap();
        let pipe = host.path().join("proc/10/numa_maps");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let start = resident();
        let writer = std::thread::spawn(move || {
            let mut pipe = BufWriter::new(File::options().write(true).open(pipe).unwrap());
            let (folder, mut most) = ("x\\012".repeat(800), 0);
            for number in 0..NAMES {
                let page = 0x7f00_0000_0000 + (number << 12);
                writeln!(pipe, "{page:x} default file=/{number}/{folder} mapped=1 N0=1 kernelpagesize_kB=4")
                    .unwrap();
                if number % 100 == 0 {
                    most = resident().max(most);
                }
            }
            writeln!(pipe, "7fff00000000 default file=/{} N0=1000", "y".repeat(32 << 20)).unwrap();
            writeln!(pipe, "7fffffff0000 default heap anon=2 N1=2 kernelpagesize_kB=4").unwrap();
            pipe.flush().unwrap();
            resident().max(most)
        });
        let found = regions(host.path(), None, Instant::now() + Duration::from_mins(5));
        let most = writer.join().unwrap();
        assert!(most < start + CEILING, "{} KiB became {} KiB", start >> 10, most >> 10);
        assert_eq!((found.processes, found.regions.len()), (1, MAX_REGIONS));
        let bytes: u64 = found.regions.iter().map(Region::bytes).sum();
        assert_eq!(bytes, (NAMES + 1000 + 2) << 12, "all pages count");
        assert!(found.regions[0].name.starts_with("/yyy"), "the largest comes first");
        assert!(found.regions.iter().any(|region| region.name == "[heap]"));
        assert!(found.regions.iter().all(|region| region.name.len() <= MAX_NAME_BYTES));
        assert!(found.notes[0].contains("names"), "{:?}", found.notes);
    }

    #[test]
    fn nodes_are_limited() {
        let host = host();
        let nodes = |line| (0..2000).map(move |node| format!("N{}=1", line * 1000 + node));
        let line = |line: u32| format!("{line}000 default {}\n", nodes(line).collect::<Vec<_>>().join(" "));
        let lines = (0..9).map(line).collect::<Vec<_>>().concat();
        fs::write(host.path().join("proc/10/numa_maps"), lines).unwrap();
        let found = regions(host.path(), None, soon()).regions;
        let nodes: BTreeSet<u32> = found.iter().flat_map(|region| &region.nodes).map(|of| of.node).collect();
        assert_eq!((nodes.len(), nodes.last()), (1024, Some(&1023)));
    }

    #[test]
    fn notes_incomplete_reading() {
        let host = host();
        let found = regions(host.path(), None, Instant::now());
        assert_eq!(found.notes, ["not all was read within 5 s"]);
        assert!(found.regions.is_empty());
    }

    #[test]
    fn excess_regions_are_folded() {
        let sum = |bytes| RegionSum { nodes: BTreeMap::from([(NodeId(0), bytes)]), off: 1 };
        let named = (1..=MAX_REGIONS as u64 + 1).map(|number| (format!("/{number}"), sum(number))).collect();
        let found = RegionSums { named, folded: None }.into_regions(true);
        assert_eq!(found.len(), MAX_REGIONS);
        let last = found.last().unwrap();
        assert_eq!((last.name.as_str(), last.bytes(), last.off_bytes), ("[others]", 1 + 2, Some(2)));
    }
}

//! Where which part of the memory of a workload lies, from `/proc/PID/numa_maps` (`numa(7)`).
//!
//! The kernel goes through the page tables of a process for that, mapping by mapping, 10 to 23 ms for each GiB of small
//! pages. So it is read only when somebody asks, and for [`PATIENCE`] at most: what was not read by then is missing, and said
//! to be.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, BufRead as _, BufReader},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use numaward_api::{MAX_REGIONS, Region, RegionNode, Regions};
use numaward_cgroup::unescape;
use numaward_topology::{NodeId, NodeSet};

use crate::stacks::processes_below;

/// Time to read.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Where memory of a workload is to be.
#[derive(Clone, Debug)]
pub(crate) enum Belongs {
    /// On the nodes that are promised.
    Promised(NodeSet),
    /// On the node of its home.
    Home(NodeId),
}

impl Belongs {
    fn has(&self, node: NodeId) -> bool {
        match self {
            Self::Promised(nodes) => nodes.contains(node),
            Self::Home(home) => *home == node,
        }
    }
}

/// Bytes of a region, and those of them that are off the nodes where they are to be.
#[derive(Debug, Default)]
struct Sum {
    nodes: BTreeMap<NodeId, u64>,
    off: u64,
}

/// Reads the regions of processes in cgroups; with each, where its memory is to be. `proc` is where processes are.
pub(crate) fn read(
    proc: &Path,
    dirs: impl Iterator<Item = (PathBuf, Option<Belongs>)>,
    deadline: Instant,
) -> Regions {
    let (mut sums, mut notes) = (BTreeMap::new(), BTreeSet::new());
    let (mut processes, mut promised, mut homes) = (0, NodeSet::new(), NodeSet::new());
    for (dir, belongs) in dirs {
        match &belongs {
            Some(Belongs::Promised(on)) => promised.extend(on.iter()),
            Some(Belongs::Home(on)) => homes.extend([*on]),
            None => {}
        }
        for pid in processes_below(&dir) {
            match read_one(&proc.join(pid.to_string()), belongs.as_ref(), deadline, &mut sums) {
                Ok(is_complete) => {
                    processes += u32::from(is_complete);
                    if !is_complete {
                        let note = format!("not all was read within {} s", PATIENCE.as_secs());
                        notes.insert(note);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    notes.insert(format!("some processes cannot be read without CAP_SYS_PTRACE: {error}"));
                }
                // It has ended.
                Err(_) => {}
            }
        }
    }
    let list = |nodes: &NodeSet| (!nodes.is_empty()).then(|| nodes.to_string());
    let (promised, home) = (list(&promised), list(&homes));
    let belongs = promised.is_some() || home.is_some();
    Regions { processes, notes: notes.into_iter().collect(), promised, home, regions: most(sums, belongs) }
}

/// Adds the regions of a process; `false` where time ran out.
fn read_one(
    dir: &Path,
    belongs: Option<&Belongs>,
    deadline: Instant,
    sums: &mut BTreeMap<String, Sum>,
) -> io::Result<bool> {
    if Instant::now() >= deadline {
        return Ok(false);
    }
    let mut file = BufReader::new(File::open(dir.join("numa_maps"))?);
    let mut line = Vec::new();
    while file.read_until(b'\n', &mut line)? > 0 {
        if let Some((name, pages)) = mapping(&String::from_utf8_lossy(&line)) {
            let sum = sums.entry(name).or_default();
            for (node, bytes) in pages {
                let of_node = sum.nodes.entry(node).or_default();
                *of_node = of_node.saturating_add(bytes);
                if belongs.is_some_and(|belongs| !belongs.has(node)) {
                    sum.off = sum.off.saturating_add(bytes);
                }
            }
        }
        line.clear();
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The region that a line of `numa_maps` is of, and its bytes by node; `None` where it has none.
fn mapping(line: &str) -> Option<(String, Vec<(NodeId, u64)>)> {
    // 7f0000000000 default file=/usr/lib/a\040file mapped=9 N0=5 N1=4 kernelpagesize_kB=4
    let (mut name, mut page, mut pages) = ("[anonymous]".to_owned(), 4, Vec::new());
    for word in line.split_ascii_whitespace() {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "heap" | "stack" => name = format!("[{key}]"),
            // Some characters are written as `\040`.
            "file" => {
                name = String::from_utf8_lossy(&unescape(value.as_bytes(), b"\\", 3, 8)).into_owned();
            }
            "kernelpagesize_kB" => page = value.parse().ok()?,
            _ => {
                if let Some(Ok(node)) = key.strip_prefix('N').map(str::parse)
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

/// Those with the most bytes first; what is too much is added up.
fn most(sums: BTreeMap<String, Sum>, belongs: bool) -> Vec<Region> {
    let region = |name, sum: Sum| Region {
        name,
        nodes: sum.nodes.into_iter().map(|(node, bytes)| RegionNode { node: node.0, bytes }).collect(),
        off_bytes: belongs.then_some(sum.off),
    };
    let bytes = |sum: &Sum| sum.nodes.values().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
    let mut sums: Vec<(String, Sum)> = sums.into_iter().collect();
    sums.sort_by(|(name, sum), (other_name, other)| {
        bytes(other).cmp(&bytes(sum)).then_with(|| name.cmp(other_name))
    });
    if sums.len() > MAX_REGIONS {
        let mut rest = Sum::default();
        for (_, sum) in sums.split_off(MAX_REGIONS - 1) {
            rest.off = rest.off.saturating_add(sum.off);
            for (node, bytes) in sum.nodes {
                let of_node = rest.nodes.entry(node).or_default();
                *of_node = of_node.saturating_add(bytes);
            }
        }
        sums.push(("[others]".to_owned(), rest));
    }
    sums.into_iter().map(|(name, sum)| region(name, sum)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

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

    fn regions(host: &Path, belongs: Option<Belongs>, deadline: Instant) -> Regions {
        read(&host.join("proc"), [(host.join("cgroup"), belongs)].into_iter(), deadline)
    }

    #[test]
    fn regions_of_all_processes_are_added_up() {
        let host = host();
        let found = regions(host.path(), Some(Belongs::Promised("1".parse().unwrap())), soon());
        let kib = |node, kib: u64| RegionNode { node, bytes: kib << 10 };
        let region = |name: &str, nodes: &[RegionNode], off: u64| Region {
            name: name.to_owned(),
            nodes: nodes.to_vec(),
            off_bytes: Some(off << 10),
        };
        assert_eq!((found.processes, found.promised.as_deref(), found.home.as_deref()), (2, Some("1"), None));
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
        let home = regions(host.path(), Some(Belongs::Home(NodeId(1))), soon());
        assert_eq!((home.promised.as_deref(), home.home.as_deref()), (None, Some("1")));
        assert_eq!(home.regions, found.regions);
    }

    #[test]
    fn it_ends_in_time_and_says_what_is_missing() {
        let host = host();
        let found = regions(host.path(), None, Instant::now());
        assert_eq!(found.notes, ["not all was read within 5 s"]);
        assert!(found.regions.is_empty());
    }

    #[test]
    fn what_is_too_much_is_added_up() {
        let sum = |bytes| Sum { nodes: BTreeMap::from([(NodeId(0), bytes)]), off: 1 };
        let sums = (1..=MAX_REGIONS as u64 + 1).map(|number| (format!("/{number}"), sum(number))).collect();
        let found = most(sums, true);
        assert_eq!(found.len(), MAX_REGIONS);
        let last = found.last().unwrap();
        assert_eq!((last.name.as_str(), last.bytes(), last.off_bytes), ("[others]", 1 + 2, Some(2)));
    }
}

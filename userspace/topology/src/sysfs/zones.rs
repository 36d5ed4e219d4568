//! The reader of the memory that the kernel reserves on each node: the watermarks of its zones (`/proc/zoneinfo`).

use std::{collections::BTreeMap, path::Path};

use super::{
    memory::NodeMeminfo,
    source::{ReadError, SysfsRoot},
};
use crate::{set::NodeId, units::Bytes};

/// The memory that the kernel reserves on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Memory that programs never get: the high watermarks of the zones, and the protection of lower zones for requests
    /// that only these can serve.
    pub reserve: Bytes,
    /// The sum of the low watermarks. If less memory is free, the kernel reclaims.
    pub low: Bytes,
}

impl Watermarks {
    /// Returns the memory that programs could get without swapping: free or reclaimable, as in the kernel's estimate
    /// `MemAvailable`. The estimate assumes that half of the page cache and the slab cannot be reclaimed, but at most
    /// as much as the low watermark.
    pub fn obtainable(&self, memory: &NodeMeminfo) -> Bytes {
        let file = memory.active_file.0.saturating_add(memory.inactive_file.0);
        let rest = |bytes: u64| bytes - (bytes / 2).min(self.low.0);
        let sum = memory.free.0.saturating_add(rest(file)).saturating_add(rest(memory.kernel_reclaimable.0));
        Bytes(sum.saturating_sub(self.reserve.0))
    }

    /// Returns the memory that programs can get without any reclaim.
    pub fn free(&self, memory: &NodeMeminfo) -> Bytes {
        Bytes(memory.free.0.saturating_sub(self.reserve.0))
    }
}

/// Reads the watermarks of all nodes. `page` is the size of a page. Nodes that are not in the file have none.
pub fn watermarks(root: &Path, page: Bytes) -> Result<BTreeMap<NodeId, Watermarks>, ReadError> {
    const FILE: &str = "proc/zoneinfo";
    let source = SysfsRoot { root };
    let text = source.text(FILE, "the watermarks of the nodes' memory")?;
    let page = page.0;
    let mut nodes: BTreeMap<NodeId, Watermarks> = BTreeMap::new();
    let (mut node, mut high, mut managed) = (None, 0, 0);
    for (line, number) in text.lines().zip(1..) {
        let malformed = |expected: &str| source.malformed(FILE, Some(number), line, expected);
        if let Some(rest) = line.strip_prefix("Node ") {
            let id = rest.split(',').next().and_then(|id| id.trim().parse().ok());
            node = Some(NodeId(id.ok_or_else(|| malformed("`Node NUMBER, zone NAME`"))?));
            (high, managed) = (0, 0);
            continue;
        }
        let Some(node) = node else { continue };
        let mut words = line.split_ascii_whitespace();
        let key = words.next().unwrap_or_default();
        match key {
            // The per-CPU lists also have a `high`, but with a colon.
            "low" | "high" | "managed" => {
                let pages: u64 = words
                    .next()
                    .and_then(|word| word.parse().ok())
                    .ok_or_else(|| malformed("`KEY NUMBER`"))?;
                match key {
                    "low" => {
                        let low = &mut nodes.entry(node).or_default().low.0;
                        *low = low.saturating_add(pages.saturating_mul(page));
                    }
                    "high" => high = pages,
                    _ => managed = pages,
                }
            }
            "protection:" => {
                let numbers = line.trim_matches(|c: char| !c.is_ascii_digit()).split(", ");
                let kept: Option<u64> = numbers
                    .map(|number| number.parse::<u64>().ok())
                    .try_fold(0, |most, of| Some(most.max(of?)));
                let kept = kept.ok_or_else(|| malformed("`protection: (NUMBER, …)`"))?;
                let reserve = &mut nodes.entry(node).or_default().reserve.0;
                // The same rule as in the kernel's `calculate_totalreserve_pages`.
                let pages = kept.saturating_add(high).min(managed);
                *reserve = reserve.saturating_add(pages.saturating_mul(page));
            }
            _ => {}
        }
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ZONEINFO: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 12
  pages free     2816
        boost    0
        min      68
        low      85
        high     102
        spanned  4095
        present  3998
        managed  3840
        protection: (0, 100, 200, 200)
  pagesets
    cpu: 0
              count: 0
              high:  7
Node 0, zone   Normal
  pages free     100
        min      5
        low      15
        high     20
        managed  50
        protection: (0, 0, 0, 0)
Node 1, zone  Movable
  pages free     0
        min      0
        low      0
        high     0
        managed  0
        protection: (0, 0, 0, 0)
";

    fn read(text: &str) -> Result<BTreeMap<NodeId, Watermarks>, ReadError> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/zoneinfo"), text).unwrap();
        watermarks(root.path(), Bytes(4096))
    }

    #[test]
    fn reserve_is_the_sum_over_zones() {
        let page = 4096;
        let found = read(ZONEINFO).unwrap();
        let expected = Watermarks { reserve: Bytes((302 + 20) * page), low: Bytes(100 * page) };
        assert_eq!(found[&NodeId(0)], expected);
        assert_eq!(found[&NodeId(1)], Watermarks::default());
        assert_eq!(read("").unwrap(), BTreeMap::new());
    }

    #[test]
    fn a_corrupt_or_missing_file_is_named() {
        for (text, words) in [
            ("Node x, zone DMA\n", "zoneinfo:1"),
            ("Node 0, zone DMA\n  low many\n", "zoneinfo:2"),
            ("Node 0, zone DMA\n protection: (a, b)\n", "zoneinfo:2"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let nothing = tempfile::tempdir().unwrap();
        assert!(watermarks(nothing.path(), Bytes(4096)).unwrap_err().to_string().contains("proc/zoneinfo"));
    }

    #[test]
    fn obtainable_memory_excludes_reserve() {
        let marks = Watermarks { reserve: Bytes(100), low: Bytes(30) };
        let memory = NodeMeminfo {
            free: Bytes(1000),
            active_file: Bytes(40),
            inactive_file: Bytes(160),
            kernel_reclaimable: Bytes(10),
            ..NodeMeminfo::default()
        };
        assert_eq!(marks.obtainable(&memory), Bytes(1000 - 100 + 170 + 5));
        assert_eq!(marks.free(&memory), Bytes(1000 - 100));
        assert_eq!(marks.obtainable(&NodeMeminfo::default()), Bytes(0));
        assert_eq!(marks.free(&NodeMeminfo::default()), Bytes(0));
    }
}

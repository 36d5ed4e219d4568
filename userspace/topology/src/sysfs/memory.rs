//! What a node's memory holds now: `meminfo` and `numastat`.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    ReadError,
    machine::{NODES, hugepage_pools},
    source::Source,
};
use crate::{
    machine::HugepagePool,
    set::NodeId,
    units::{Bytes, HugepageSize},
};

/// The node that a kernel without NUMA consists of.
pub(super) const NO_NUMA_NODE: NodeId = NodeId(0);

/// The use of a node's memory at one moment, from its `meminfo` and hugepage pools.
///
/// Names are the kernel's (`proc_meminfo(5)`). What the kernel does not report is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// `MemTotal`: usable memory, pages in hugepage pools included.
    pub total: Bytes,
    /// `MemFree`: not in use at all. Pages in hugepage pools are in use.
    pub free: Bytes,
    /// `FilePages`: page cache, tmpfs and shared memory included.
    pub file_pages: Bytes,
    /// `Active(file)`: page cache used lately, without tmpfs.
    pub active_file: Bytes,
    /// `Inactive(file)`: page cache that is reclaimed first, without tmpfs.
    pub inactive_file: Bytes,
    /// `AnonPages`: mapped anonymous memory.
    pub anon_pages: Bytes,
    /// `AnonHugePages`: the part of it in transparent huge pages.
    pub anon_huge_pages: Bytes,
    /// `Shmem`: tmpfs and shared memory.
    pub shmem: Bytes,
    /// `Unevictable`: memory that reclaim leaves alone.
    pub unevictable: Bytes,
    /// `Dirty`: file pages that wait to be written.
    pub dirty: Bytes,
    /// `Writeback`: file pages that are being written.
    pub writeback: Bytes,
    /// `KReclaimable`: kernel memory that is given back under pressure.
    pub kernel_reclaimable: Bytes,
    /// `SUnreclaim`: slab memory that is not.
    pub slab_unreclaimable: Bytes,
    /// The node's hugepage pools.
    pub hugepages: BTreeMap<HugepageSize, HugepagePool>,
}

impl NodeMemory {
    /// Memory in use: `total` less `free`, as the kernel's `MemUsed`.
    pub fn used(&self) -> Bytes {
        Bytes(self.total.0.saturating_sub(self.free.0))
    }
}

/// A node's allocation counters since boot, in allocations of any order.
///
/// Source: Documentation/admin-guide/numastat.rst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaStat {
    /// Wanted on this node and got here.
    pub numa_hit: u64,
    /// Wanted on another node, got here.
    pub numa_miss: u64,
    /// Wanted here, got on another node.
    pub numa_foreign: u64,
    /// Interleaved allocations wanted and got here.
    pub interleave_hit: u64,
    /// Got here by a process that ran here.
    pub local_node: u64,
    /// Got here by a process that ran on another node.
    pub other_node: u64,
}

/// Reads what the memory of `node` holds.
pub fn node_memory(root: &Path, node: NodeId) -> Result<NodeMemory, ReadError> {
    let source = Source { root };
    let meminfo = Meminfo::read(source, node)?;
    let dir = if source.exists(NODES) {
        format!("{NODES}/node{node}/hugepages")
    } else {
        "sys/kernel/mm/hugepages".into()
    };
    let known = |key| meminfo.bytes(key).map(Option::unwrap_or_default);
    let cached = || -> Result<Bytes, ReadError> {
        // /proc/meminfo splits what a node's file sums up.
        Ok(Bytes(
            [known("Cached")?, known("Buffers")?, known("SwapCached")?]
                .iter()
                .fold(0, |sum, part| part.0.saturating_add(sum)),
        ))
    };
    Ok(NodeMemory {
        total: meminfo.required("MemTotal")?,
        free: meminfo.required("MemFree")?,
        file_pages: match meminfo.bytes("FilePages")? {
            Some(bytes) => bytes,
            None => cached()?,
        },
        active_file: known("Active(file)")?,
        inactive_file: known("Inactive(file)")?,
        anon_pages: known("AnonPages")?,
        anon_huge_pages: known("AnonHugePages")?,
        shmem: known("Shmem")?,
        unevictable: known("Unevictable")?,
        dirty: known("Dirty")?,
        writeback: known("Writeback")?,
        kernel_reclaimable: known("KReclaimable")?,
        slab_unreclaimable: known("SUnreclaim")?,
        hugepages: hugepage_pools(source, &dir)?,
    })
}

/// Reads the allocation counters of `node`. None on a kernel without NUMA.
pub fn numastat(root: &Path, node: NodeId) -> Result<Option<NumaStat>, ReadError> {
    let source = Source { root };
    let file = format!("{NODES}/node{node}/numastat");
    let holds = "the node's allocation counters";
    let text = if source.exists(NODES) {
        source.text(&file, holds)?
    } else {
        return Ok(None);
    };
    let path = source.path(&file);
    let count = |name: &str| {
        let line = text.lines().zip(1..).find(|(line, _)| line.split(' ').next() == Some(name));
        let Some((line, number)) = line else {
            return Err(ReadError::malformed(&path, None, &text, format!("a numastat file with `{name}`")));
        };
        line[name.len()..]
            .trim()
            .parse()
            .map_err(|_| ReadError::malformed(&path, Some(number), line, format!("`{name} COUNT`")))
    };
    Ok(Some(NumaStat {
        numa_hit: count("numa_hit")?,
        numa_miss: count("numa_miss")?,
        numa_foreign: count("numa_foreign")?,
        interleave_hit: count("interleave_hit")?,
        local_node: count("local_node")?,
        other_node: count("other_node")?,
    }))
}

/// `MemTotal` of a node.
pub(super) fn mem_total(source: Source<'_>, node: NodeId) -> Result<Bytes, ReadError> {
    Meminfo::read(source, node)?.required("MemTotal")
}

/// The text of a `meminfo` file: lines `[Node N ]KEY: VALUE[ kB]`.
struct Meminfo<'a> {
    source: Source<'a>,
    file: String,
    text: String,
}

impl<'a> Meminfo<'a> {
    fn read(source: Source<'a>, node: NodeId) -> Result<Self, ReadError> {
        let file = if source.exists(NODES) {
            format!("{NODES}/node{node}/meminfo")
        } else if node == NO_NUMA_NODE {
            "proc/meminfo".into()
        } else {
            let path = source.path(NODES);
            let problem =
                format!("is missing, so the machine is node {NO_NUMA_NODE} alone: there is no node {node}");
            return Err(ReadError::Inconsistent { path, problem });
        };
        let text = source.text(&file, "the use of memory")?;
        Ok(Self { source, file, text })
    }

    fn required(&self, key: &'static str) -> Result<Bytes, ReadError> {
        self.bytes(key)?.ok_or_else(|| {
            ReadError::malformed(
                &self.source.path(&self.file),
                None,
                &self.text,
                format!("a meminfo file with `{key}:`"),
            )
        })
    }

    fn bytes(&self, key: &str) -> Result<Option<Bytes>, ReadError> {
        for (line, number) in self.text.lines().zip(1..) {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.rsplit(' ').next() != Some(key) {
                continue;
            }
            let kib = value.trim().strip_suffix("kB").and_then(|kib| kib.trim_end().parse::<u64>().ok());
            return kib.and_then(|kib| kib.checked_mul(1024)).map(|bytes| Some(Bytes(bytes))).ok_or_else(
                || {
                    ReadError::malformed(
                        &self.source.path(&self.file),
                        Some(number),
                        line,
                        format!("`{key}: NUMBER kB`"),
                    )
                },
            );
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const NODE1: &str = "sys/devices/system/node/node1";
    const MEMINFO: &str = "Node 1 MemTotal:        7039192 kB
Node 1 MemFree:         5473696 kB
Node 1 MemUsed:         1565496 kB
Node 1 SwapCached:            4 kB
Node 1 Active:           639284 kB
Node 1 Inactive:         554552 kB
Node 1 Active(file):     637720 kB
Node 1 Inactive(file):   544232 kB
Node 1 Unevictable:       19216 kB
Node 1 Dirty:               160 kB
Node 1 Writeback:             8 kB
Node 1 FilePages:       1190652 kB
Node 1 AnonPages:         22412 kB
Node 1 Shmem:              8788 kB
Node 1 KReclaimable:     251300 kB
Node 1 SUnreclaim:        30988 kB
Node 1 AnonHugePages:      2048 kB
Node 1 HugePages_Total:     3
Node 1 HugePages_Free:      2
Node 1 HugePages_Surp:      0
";
    const NUMASTAT: &str = "numa_hit 9180071\nnuma_miss 1\nnuma_foreign 2\ninterleave_hit 1128\nlocal_node 9180070\nother_node 3\n";

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn a_nodes_meminfo_is_read() {
        let root = tree(&[(&format!("{NODE1}/meminfo"), MEMINFO)]);
        let memory = node_memory(root.path(), NodeId(1)).unwrap();
        let expected = NodeMemory {
            total: Bytes::kib(7_039_192),
            free: Bytes::kib(5_473_696),
            file_pages: Bytes::kib(1_190_652),
            active_file: Bytes::kib(637_720),
            inactive_file: Bytes::kib(544_232),
            anon_pages: Bytes::kib(22_412),
            anon_huge_pages: Bytes::kib(2048),
            shmem: Bytes::kib(8788),
            unevictable: Bytes::kib(19_216),
            dirty: Bytes::kib(160),
            writeback: Bytes::kib(8),
            kernel_reclaimable: Bytes::kib(251_300),
            slab_unreclaimable: Bytes::kib(30_988),
            hugepages: BTreeMap::new(),
        };
        assert_eq!(memory, expected);
        assert_eq!(memory.used(), Bytes::kib(1_565_496));
    }

    #[test]
    fn without_numa_the_machines_meminfo_serves() {
        let meminfo = "MemTotal: 100 kB\nMemFree: 40 kB\nBuffers: 1 kB\nCached: 20 kB\nSwapCached: 2 kB\n";
        let root = tree(&[("proc/meminfo", meminfo)]);
        let memory = node_memory(root.path(), NodeId(0)).unwrap();
        assert_eq!((memory.total, memory.file_pages), (Bytes::kib(100), Bytes::kib(23)));
        assert_eq!(numastat(root.path(), NodeId(0)).unwrap(), None);
        let error = node_memory(root.path(), NodeId(1)).unwrap_err().to_string();
        assert!(error.contains("there is no node 1"), "{error}");
    }

    #[test]
    fn numastat_is_read() {
        let root = tree(&[(&format!("{NODE1}/numastat"), NUMASTAT)]);
        let expected = NumaStat {
            numa_hit: 9_180_071,
            numa_miss: 1,
            numa_foreign: 2,
            interleave_hit: 1128,
            local_node: 9_180_070,
            other_node: 3,
        };
        assert_eq!(numastat(root.path(), NodeId(1)).unwrap(), Some(expected));
    }

    #[test]
    fn what_is_missing_or_corrupt_is_named() {
        for (meminfo, message) in [
            ("", "is not a meminfo file with `MemTotal:`"),
            ("Node 1 MemTotal: 5 kB\n", "is not a meminfo file with `MemFree:`"),
            ("Node 1 MemTotal: 5 kB\nNode 1 MemFree: x kB\n", "meminfo:2: \"Node 1 MemFree: x kB\" is not"),
            ("Node 1 MemTotal: 5\n", "is not `MemTotal: NUMBER kB`"),
            ("Node 1 MemTotal: 99999999999999999999 kB\n", "is not `MemTotal: NUMBER kB`"),
            ("Node 1 MemTotal: 18446744073709551615 kB\n", "is not `MemTotal: NUMBER kB`"),
        ] {
            let root = tree(&[(&format!("{NODE1}/meminfo"), meminfo)]);
            let error = node_memory(root.path(), NodeId(1)).unwrap_err().to_string();
            assert!(error.contains(message), "{meminfo:?}: {error}");
        }
        for (stat, message) in [
            ("numa_hit 1\nnuma_miss -1\n", "numastat:2: \"numa_miss -1\" is not `numa_miss COUNT`"),
            ("numa_hit", "numastat:1"),
            ("numa_hit 1\n", "is not a numastat file with `numa_miss`"),
        ] {
            let root = tree(&[(&format!("{NODE1}/numastat"), stat)]);
            let error = numastat(root.path(), NodeId(1)).unwrap_err().to_string();
            assert!(error.contains(message), "{stat:?}: {error}");
        }
        let root = tree(&[(&format!("{NODE1}/cpulist"), "")]);
        assert!(
            node_memory(root.path(), NodeId(1)).unwrap_err().to_string().contains("meminfo: No such file")
        );
        assert!(numastat(root.path(), NodeId(1)).unwrap_err().to_string().contains("numastat: No such file"));
    }
}

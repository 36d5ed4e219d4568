//! The reader of a node's current memory use: `meminfo` and hugepage pools.

use std::{collections::BTreeMap, path::Path};

use super::{
    ReadError,
    machine::{HUGEPAGES, NODES, hugepage_pools},
    source::SysfsRoot,
};
use crate::{
    machine::HugepagePool,
    set::NodeId,
    units::{Bytes, HugepageSize},
};

/// The only node of a kernel without NUMA.
pub(super) const NO_NUMA_NODE: NodeId = NodeId(0);

/// A node's memory use, from its `meminfo` and hugepage pools.
///
/// The fields are named like the kernel's (`proc_meminfo(5)`). Values that the kernel does not report are zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeMeminfo {
    /// `MemTotal`: usable memory, including pages in hugepage pools.
    pub total: Bytes,
    /// `MemFree`: unused memory. Pages in hugepage pools count as used.
    pub free: Bytes,
    /// `Active(file)`: recently used page cache, without tmpfs.
    pub active_file: Bytes,
    /// `Inactive(file)`: page cache that is reclaimed first, without tmpfs.
    pub inactive_file: Bytes,
    /// `KReclaimable`: kernel memory that is released under pressure.
    pub kernel_reclaimable: Bytes,
    pub hugepages: BTreeMap<HugepageSize, HugepagePool>,
}

impl NodeMeminfo {
    /// Returns the memory outside hugepage pools.
    pub fn base(&self) -> Bytes {
        let pools = self.hugepages.iter().map(|(size, pool)| pool.total.saturating_mul(size.0.0));
        Bytes(pools.fold(self.total.0, u64::saturating_sub))
    }
}

/// Reads the memory use of `node`.
pub fn node_memory(root: &Path, node: NodeId) -> Result<NodeMeminfo, ReadError> {
    let source = SysfsRoot { root };
    let meminfo = Meminfo::read(source, node)?;
    let dir = if source.exists(NODES) { format!("{NODES}/node{node}/hugepages") } else { HUGEPAGES.into() };
    let known = |key| meminfo.bytes(key).map(Option::unwrap_or_default);
    Ok(NodeMeminfo {
        total: meminfo.required("MemTotal")?,
        free: meminfo.required("MemFree")?,
        active_file: known("Active(file)")?,
        inactive_file: known("Inactive(file)")?,
        kernel_reclaimable: known("KReclaimable")?,
        // This runs every second, and most pools are empty.
        hugepages: hugepage_pools(source, &dir, false)?,
    })
}

/// Reads the number of a node's pages with memory errors that could not be taken out of use. `None` if the kernel does not count them
/// (before Linux 6.3, or without `CONFIG_MEMORY_FAILURE`).
pub fn failed_pages(root: &Path, node: NodeId) -> Option<u64> {
    let source = SysfsRoot { root };
    let count = |file: &str| -> Option<u64> {
        source.number(&format!("{NODES}/node{node}/memory_failure/{file}"), "a number of pages").ok()
    };
    Some(count("failed")?.saturating_add(count("ignored")?))
}

/// Reads `MemTotal` of a node.
pub(super) fn mem_total(source: SysfsRoot<'_>, node: NodeId) -> Result<Bytes, ReadError> {
    Meminfo::read(source, node)?.required("MemTotal")
}

/// The text of a `meminfo` file: lines `[Node N ]KEY: VALUE[ kB]`.
struct Meminfo<'a> {
    source: SysfsRoot<'a>,
    file: String,
    text: String,
}

impl<'a> Meminfo<'a> {
    fn read(source: SysfsRoot<'a>, node: NodeId) -> Result<Self, ReadError> {
        let file = if source.exists(NODES) {
            format!("{NODES}/node{node}/meminfo")
        } else if node == NO_NUMA_NODE {
            "proc/meminfo".into()
        } else {
            let path = source.path(NODES);
            let problem =
                format!("is missing, so node {NO_NUMA_NODE} is the only node: there is no node {node}");
            return Err(ReadError::Inconsistent { path, problem });
        };
        let text = source.text(&file, "the use of memory")?;
        Ok(Self { source, file, text })
    }

    fn required(&self, key: &'static str) -> Result<Bytes, ReadError> {
        let missing = || self.malformed(None, &self.text, format!("a meminfo file with `{key}:`"));
        self.bytes(key)?.ok_or_else(missing)
    }

    fn bytes(&self, key: &str) -> Result<Option<Bytes>, ReadError> {
        for (line, number) in self.text.lines().zip(1..) {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.rsplit(' ').next() != Some(key) {
                continue;
            }
            let kib = value.trim().strip_suffix("kB").and_then(|kib| kib.trim_end().parse::<u64>().ok());
            let bytes = kib.and_then(|kib| kib.checked_mul(1024)).map(|bytes| Some(Bytes(bytes)));
            let malformed = || self.malformed(Some(number), line, format!("`{key}: NUMBER kB`"));
            return bytes.ok_or_else(malformed);
        }
        Ok(None)
    }

    fn malformed(&self, line: Option<usize>, content: &str, expected: String) -> ReadError {
        self.source.malformed(&self.file, line, content, expected)
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
    fn free_pages_of_empty_pools_are_not_read() {
        let pool = format!("{NODE1}/hugepages/hugepages-2048kB");
        let files = |total| [(format!("{NODE1}/meminfo"), MEMINFO), (format!("{pool}/nr_hugepages"), total)];
        let read = |total| {
            let files = files(total);
            node_memory(tree(&files.each_ref().map(|(path, text)| (path.as_str(), *text))).path(), NodeId(1))
        };
        let empty = HugepagePool { total: 0, free: 0, surplus: 0 };
        assert_eq!(read("0\n").unwrap().hugepages, [(HugepageSize(Bytes::mib(2)), empty)].into());
        assert!(read("1\n").unwrap_err().to_string().contains("free_hugepages"));
    }

    #[test]
    fn a_nodes_meminfo_is_read() {
        let root = tree(&[(&format!("{NODE1}/meminfo"), MEMINFO)]);
        let memory = node_memory(root.path(), NodeId(1)).unwrap();
        let expected = NodeMeminfo {
            total: Bytes::kib(7_039_192),
            free: Bytes::kib(5_473_696),
            active_file: Bytes::kib(637_720),
            inactive_file: Bytes::kib(544_232),
            kernel_reclaimable: Bytes::kib(251_300),
            hugepages: BTreeMap::new(),
        };
        assert_eq!(memory, expected);
    }

    #[test]
    fn base_memory_excludes_pools() {
        let size = HugepageSize(Bytes::mib(2));
        let with = |total| NodeMeminfo {
            total: Bytes::mib(100),
            hugepages: [(size, HugepagePool { total, free: 1, surplus: 0 })].into(),
            ..NodeMeminfo::default()
        };
        assert_eq!([0, 40, 60].map(|pages| with(pages).base()), [100, 20, 0].map(Bytes::mib));
    }

    #[test]
    fn without_numa_reads_proc_meminfo() {
        let meminfo = "MemTotal: 100 kB\nMemFree: 40 kB\n";
        let root = tree(&[("proc/meminfo", meminfo)]);
        let memory = node_memory(root.path(), NodeId(0)).unwrap();
        assert_eq!((memory.total, memory.free), (Bytes::kib(100), Bytes::kib(40)));
        let error = node_memory(root.path(), NodeId(1)).unwrap_err().to_string();
        assert!(error.contains("there is no node 1"), "{error}");
    }

    #[test]
    fn error_names_missing_or_corrupt_file() {
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
        let root = tree(&[(&format!("{NODE1}/cpulist"), "")]);
        assert!(
            node_memory(root.path(), NodeId(1)).unwrap_err().to_string().contains("meminfo: No such file")
        );
    }
}

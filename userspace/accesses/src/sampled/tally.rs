//! Samples by area of memory, and by whether their CPU is on the node of the page.
//!
//! Mappings are divided into aligned blocks of [`BLOCK_BYTES`] bytes. Samples are pending until they are *folded*, once
//! a second: the mappings of each process and the node of each page are then looked up once for all its samples. The
//! node of a page is therefore known to within one second. In the end, adjacent blocks with similar numbers of samples
//! become one area.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    io,
    sync::Arc,
};

use numaward_topology::{CpuId, Machine};

use super::{
    super::{NodeShare, maps, maps::MappedRegion, percent_of},
    SampledArea, SampledProcess,
    rings::SampledAccess,
    source::{AccessSource, SourceCounts},
};

/// Size of a block: a huge page of most machines.
const BLOCK_BYTES: u64 = 2 << 20;
/// Maximum number of blocks: about 100 MB for 512 GiB of accessed memory on two nodes.
const MAX_BLOCKS: usize = 256 << 10;
/// Maximum number of pending samples, after which they have to be folded.
const MAX_PENDING_SAMPLES: usize = 64 << 10;

/// Samples of a workload's processes.
#[derive(Debug)]
pub(super) struct Tally {
    /// Node of each CPU.
    cpus: BTreeMap<CpuId, u32>,
    page: u64,
    pending: Vec<PendingSample>,
    /// Blocks by process, region, and number of the block in the address space.
    blocks: BTreeMap<(u32, Arc<str>, u64), BlockTally>,
    /// Names of the blocks' regions, so that each is stored once.
    regions: BTreeSet<Arc<str>>,
    max_blocks: usize,
    /// Numbers of samples by process and node of the CPU.
    from: BTreeMap<u32, BTreeMap<u32, u64>>,
    /// Number of samples outside of all mappings.
    unmapped: u64,
    /// Number of samples in blocks beyond the maximum number.
    beyond_max_blocks: u64,
    /// Number of samples that the kernel refused to look up, with the first error.
    refusal: Option<LookupRefusal>,
}

#[derive(Debug)]
struct LookupRefusal {
    samples: u64,
    pid: u32,
    subject: &'static str,
    error: io::Error,
}

#[derive(Clone, Copy, Debug)]
struct PendingSample {
    pid: u32,
    /// Address of the page.
    page: u64,
    from: Option<u32>,
    source: AccessSource,
}

/// Samples of one block, or of several.
#[derive(Clone, Debug, Default)]
struct BlockTally {
    /// Mapped part of the block.
    start: u64,
    end: u64,
    samples: u64,
    sources: SourceCounts,
    /// Number of samples for which the nodes of CPU and page are known.
    placed: u64,
    /// Number of placed samples for which these nodes differ.
    remote: u64,
    /// Number of samples by the node of the page.
    nodes: BTreeMap<u32, u64>,
}

impl Tally {
    /// Creates an empty tally for a machine with these CPUs.
    pub(super) fn new(machine: &Machine) -> Self {
        Self {
            cpus: machine.cpus.iter().map(|(id, cpu)| (*id, cpu.node.0)).collect(),
            page: rustix::param::page_size() as u64,
            pending: Vec::new(),
            blocks: BTreeMap::new(),
            regions: BTreeSet::new(),
            max_blocks: MAX_BLOCKS,
            from: BTreeMap::new(),
            unmapped: 0,
            beyond_max_blocks: 0,
            refusal: None,
        }
    }

    /// Adds a pending sample.
    pub(super) fn add(&mut self, access: &SampledAccess) {
        self.pending.push(PendingSample {
            pid: access.pid,
            page: access.address / self.page * self.page,
            from: self.cpus.get(&access.cpu).copied(),
            source: access.source,
        });
    }

    /// Returns whether the pending samples have to be folded now.
    pub(super) fn is_full(&self) -> bool {
        self.pending.len() >= MAX_PENDING_SAMPLES
    }

    /// Adds the pending samples to the blocks. `mappings` looks up the mappings of a process, and `nodes` the nodes of
    /// its pages.
    pub(super) fn fold(
        &mut self,
        mut mappings: impl FnMut(u32) -> io::Result<Vec<MappedRegion>>,
        mut nodes: impl FnMut(u32, &[usize]) -> io::Result<Vec<Option<u32>>>,
    ) {
        let mut pending = std::mem::take(&mut self.pending);
        pending.sort_unstable_by_key(|sample| (sample.pid, sample.page));
        for process_samples in pending.chunk_by(|one, other| one.pid == other.pid) {
            let Some(PendingSample { pid, .. }) = process_samples.first().copied() else { continue };
            let by_page = process_samples.chunk_by(|one, other| one.page == other.page);
            let count = process_samples.len() as u64;
            let maps = match mappings(pid) {
                Ok(maps) => maps,
                Err(error) if is_process_gone(&error) => Vec::new(),
                Err(error) => {
                    self.add_refusal(count, pid, "mappings", error);
                    continue;
                }
            };
            // A process that has ended has no mappings.
            if maps.is_empty() {
                self.unmapped += count;
                continue;
            }
            let page = |page_samples: &[PendingSample]| {
                page_samples.first().and_then(|first| usize::try_from(first.page).ok())
            };
            let pages: Vec<usize> = by_page.clone().filter_map(page).collect();
            let on = nodes(pid, &pages).unwrap_or_else(|error| {
                // For a process that is ending, the kernel reports an invalid argument.
                if !is_process_gone(&error) && error.kind() != io::ErrorKind::InvalidInput {
                    self.add_refusal(count, pid, "nodes of the pages", error);
                }
                Vec::new()
            });
            let mut on = on.into_iter();
            for page_samples in by_page {
                self.add_page(pid, page_samples, &maps, on.next().flatten());
            }
        }
        // Keeps the capacity for the next samples.
        pending.clear();
        self.pending = pending;
    }

    /// Counts samples that the kernel refused to look up.
    fn add_refusal(&mut self, samples: u64, pid: u32, subject: &'static str, error: io::Error) {
        let refusal = self.refusal.get_or_insert(LookupRefusal { samples: 0, pid, subject, error });
        refusal.samples += samples;
    }

    /// Adds the samples of one page.
    fn add_page(&mut self, pid: u32, samples: &[PendingSample], maps: &[MappedRegion], node: Option<u32>) {
        let Some(PendingSample { page, .. }) = samples.first().copied() else { return };
        let count = samples.len() as u64;
        let Some(map) = maps::overlapping(maps, page, page.saturating_add(1)).next() else {
            self.unmapped += count;
            return;
        };
        let has_room = self.blocks.len() < self.max_blocks;
        let region = match self.regions.get(map.region.as_str()) {
            Some(region) => Arc::clone(region),
            None => Arc::from(map.region.as_str()),
        };
        if has_room {
            self.regions.insert(Arc::clone(&region));
        }
        let block = match self.blocks.entry((pid, region, page / BLOCK_BYTES)) {
            Entry::Occupied(block) => block.into_mut(),
            Entry::Vacant(vacant) if has_room => {
                vacant.insert(BlockTally { start: u64::MAX, ..BlockTally::default() })
            }
            Entry::Vacant(_) => {
                self.beyond_max_blocks += count;
                return;
            }
        };
        let first = page / BLOCK_BYTES * BLOCK_BYTES;
        block.start = block.start.min(map.start.max(first));
        block.end = block.end.max(map.end.min(first.saturating_add(BLOCK_BYTES)));
        block.samples += count;
        if let Some(node) = node {
            *block.nodes.entry(node).or_default() += count;
        }
        for sample in samples {
            block.sources.count(sample.source);
            if let Some(from) = sample.from {
                *self.from.entry(pid).or_default().entry(from).or_default() += 1;
                block.placed += u64::from(node.is_some());
                block.remote += u64::from(node.is_some_and(|node| node != from));
            }
        }
    }

    /// Returns notes about samples that are in no area.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.unmapped > 0 {
            notes.push(format!(
                "{} samples are in no area: their mapping or their process ended within a second",
                self.unmapped
            ));
        }
        if self.beyond_max_blocks > 0 {
            notes.push(format!(
                "{} samples are in no area: more than {} blocks of 2 MiB were accessed",
                self.beyond_max_blocks, self.max_blocks
            ));
        }
        if let Some(LookupRefusal { samples, pid, subject, error }) = &self.refusal {
            notes.push(format!(
                "{samples} samples are in no area, or their node is not known: the {subject} of process {pid}: {error}; this \
                 requires root or CAP_SYS_PTRACE"
            ));
        }
        notes
    }

    /// Returns the sums over all blocks.
    pub(super) fn total(&self) -> TallyTotal {
        let mut all = BlockTally::default();
        for block in self.blocks.values() {
            all.join(block);
        }
        let remote_percent = all.remote_percent();
        TallyTotal { samples: all.samples, placed: all.placed, sources: all.sources, remote_percent }
    }

    /// Returns the processes with the nodes that they accessed memory from, most samples first.
    pub(super) fn processes(&self, command: impl Fn(u32) -> String) -> Vec<SampledProcess> {
        let mut processes: Vec<SampledProcess> = self
            .from
            .iter()
            .map(|(pid, nodes)| {
                let samples = nodes.values().sum();
                SampledProcess { pid: *pid, command: command(*pid), samples, from: shares(nodes, samples) }
            })
            .collect();
        processes.sort_by_key(|process| Reverse(process.samples));
        processes
    }

    /// Returns the areas, most samples first.
    pub(super) fn areas(&self) -> Vec<SampledArea> {
        let mut joined: Vec<(u32, &Arc<str>, BlockTally, u64)> = Vec::new();
        for ((pid, region, _), block) in &self.blocks {
            match joined.last_mut() {
                Some((last_pid, last_region, area, count))
                    if last_pid == pid && *last_region == region && area.can_extend_to(block, *count) =>
                {
                    area.join(block);
                    *count += 1;
                }
                _ => joined.push((*pid, region, block.clone(), 1)),
            }
        }
        joined.sort_by_key(|(_, _, area, _)| Reverse(area.samples));
        joined.into_iter().map(|(pid, region, area, _)| area.to_area(pid, region)).collect()
    }
}

/// Sums over all areas.
pub(super) struct TallyTotal {
    pub(super) samples: u64,
    pub(super) placed: u64,
    pub(super) sources: SourceCounts,
    pub(super) remote_percent: Option<f64>,
}

impl BlockTally {
    /// Returns whether the next block belongs to this area of `count` blocks: it is adjacent, has the same main node,
    /// and a similar number of samples, within a factor of 4. Small differences are random and do not count.
    fn can_extend_to(&self, next: &Self, count: u64) -> bool {
        let (of_each, of_next) = (self.samples / count.max(1), next.samples);
        let is_less = |one: u64, other: u64| one <= other.saturating_mul(4).saturating_add(8);
        self.end == next.start
            && self.main_node() == next.main_node()
            && is_less(of_each, of_next)
            && is_less(of_next, of_each)
    }

    fn main_node(&self) -> Option<u32> {
        self.nodes.iter().max_by_key(|(_, samples)| **samples).map(|(node, _)| *node)
    }

    fn join(&mut self, next: &Self) {
        self.end = next.end;
        self.samples += next.samples;
        self.sources.add(&next.sources);
        self.placed += next.placed;
        self.remote += next.remote;
        for (node, samples) in &next.nodes {
            *self.nodes.entry(*node).or_default() += samples;
        }
    }

    fn remote_percent(&self) -> Option<f64> {
        (self.placed > 0).then(|| percent_of(self.remote, self.placed))
    }

    fn to_area(&self, pid: u32, region: &str) -> SampledArea {
        let known = self.sources.known();
        SampledArea {
            pid,
            region: region.to_owned(),
            start: format!("{:#x}", self.start),
            end: format!("{:#x}", self.end),
            bytes: self.end.saturating_sub(self.start),
            samples: self.samples,
            placed_samples: self.placed,
            remote_percent: self.remote_percent(),
            dram_percent: (known > 0).then(|| percent_of(self.sources.memory(), known)),
            nodes: shares(&self.nodes, self.nodes.values().sum()),
            sources: self.sources,
        }
    }
}

fn shares(nodes: &BTreeMap<u32, u64>, all: u64) -> Vec<NodeShare> {
    nodes.iter().map(|(node, count)| NodeShare { node: *node, percent: percent_of(*count, all) }).collect()
}

/// Returns whether an error means that the process has ended.
fn is_process_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn tally() -> Tally {
        let mut tally = Tally::new(&Machine::default());
        tally.page = 4096;
        tally.cpus = [(CpuId(0), 0), (CpuId(1), 1)].into();
        tally
    }

    fn sample(tally: &mut Tally, address: u64, cpu: u32, source: AccessSource, times: u32) {
        for _ in 0..times {
            tally.add(&SampledAccess { pid: 7, address, cpu: CpuId(cpu), source });
        }
    }

    fn map(start: u64, end: u64, region: &str) -> MappedRegion {
        MappedRegion { start, end, region: region.to_owned() }
    }

    /// Folds with a heap from 1 MiB on, followed by an anonymous mapping. Pages below 8 MiB are on node 0, those from
    /// 64 MiB on are not in memory, and those between are on node 1.
    fn fold(tally: &mut Tally) {
        tally.fold(
            |pid| {
                assert_eq!(pid, 7);
                Ok(vec![map(MIB, 33 * MIB, "[heap]"), map(33 * MIB, 80 * MIB, "[anonymous]")])
            },
            |_, pages| {
                assert!(pages.is_sorted_by(|one, other| one < other), "each page once: {pages:?}");
                let node = |page: &usize| match *page as u64 / MIB {
                    0..8 => Some(0),
                    8..64 => Some(1),
                    _ => None,
                };
                Ok(pages.iter().map(node).collect())
            },
        );
    }

    #[test]
    fn counts_by_block_source_and_node() {
        let mut tally = tally();
        sample(&mut tally, MIB + 5, 0, AccessSource::Cache, 2);
        sample(&mut tally, MIB + 9, 1, AccessSource::RemoteMemory, 1);
        sample(&mut tally, MIB + 5000, 9, AccessSource::Unknown, 1);
        sample(&mut tally, 70 * MIB, 0, AccessSource::LocalMemory, 2);
        sample(&mut tally, 90 * MIB, 0, AccessSource::LocalMemory, 1);
        fold(&mut tally);
        // Another sample in the same block.
        sample(&mut tally, MIB + 5, 0, AccessSource::LocalMemory, 1);
        fold(&mut tally);
        let areas = tally.areas();
        let [heap, other] = areas.as_slice() else { panic!("{areas:?}") };
        assert_eq!((heap.start.as_str(), heap.end.as_str(), heap.bytes), ("0x100000", "0x200000", MIB));
        assert_eq!((heap.region.as_str(), heap.samples), ("[heap]", 5));
        assert_eq!(heap.placed_samples, 4);
        assert_eq!(heap.remote_percent, Some(25.0), "the node of an unknown CPU is not known");
        assert_eq!(heap.dram_percent, Some(50.0));
        assert_eq!(heap.nodes, [NodeShare { node: 0, percent: 100.0 }]);
        assert_eq!((other.samples, other.remote_percent, other.nodes.as_slice()), (2, None, [].as_slice()));
        let total = tally.total();
        assert_eq!((total.samples, total.placed, total.sources.local_memory), (7, 4, 3));
        assert!(
            tally.notes()[0].starts_with("1 samples are in no area: their mapping"),
            "{:?}",
            tally.notes()
        );
        let processes = tally.processes(|pid| pid.to_string());
        assert_eq!((processes[0].samples, processes[0].command.as_str()), (6, "7"));
        assert!((processes[0].from[0].percent - 500.0 / 6.0).abs() < 1e-6, "{processes:?}");
    }

    #[test]
    fn joins_similar_adjacent_blocks() {
        let mut tally = tally();
        // Two similar blocks, one on the other node, a gap, one with many samples, two with few.
        for (block, times) in [(1, 100), (2, 60), (4, 80), (6, 1000), (7, 10), (8, 1)] {
            sample(&mut tally, block * BLOCK_BYTES, 0, AccessSource::Cache, times);
        }
        fold(&mut tally);
        let areas: Vec<_> = tally
            .areas()
            .iter()
            .map(|area| (area.start.clone(), area.bytes / BLOCK_BYTES, area.samples))
            .collect();
        let at = |block: u64| format!("{:#x}", block * BLOCK_BYTES);
        assert_eq!(areas, [(at(6), 1, 1000), (at(1), 2, 160), (at(4), 1, 80), (at(7), 2, 11)]);
    }

    #[test]
    fn limits_blocks() {
        let mut tally = tally();
        tally.max_blocks = 1;
        for block in [2, 3, 2] {
            sample(&mut tally, block * BLOCK_BYTES, 0, AccessSource::Cache, 1);
        }
        fold(&mut tally);
        assert_eq!((tally.total().samples, tally.areas().len()), (2, 1));
        assert!(tally.notes()[0].contains("more than 1 blocks"), "{:?}", tally.notes());
        assert!(!tally.is_full());
        sample(&mut tally, 0, 0, AccessSource::Cache, u32::try_from(MAX_PENDING_SAMPLES).unwrap());
        assert!(tally.is_full());
    }

    #[test]
    fn ended_process_is_no_refusal() {
        for gone in [libc::ENOENT, libc::ESRCH] {
            let mut tally = tally();
            sample(&mut tally, MIB, 0, AccessSource::Cache, 3);
            tally.fold(
                |_| Err(io::Error::from_raw_os_error(gone)),
                |_, _| panic!("an ended process has no pages"),
            );
            assert_eq!((tally.unmapped, tally.areas().len()), (3, 0));
            assert!(tally.refusal.is_none(), "{:?}", tally.refusal);
        }
        // The process ends between the two lookups.
        for gone in [libc::ESRCH, libc::EINVAL] {
            let mut tally = tally();
            sample(&mut tally, MIB, 0, AccessSource::Cache, 3);
            tally.fold(
                |_| Ok(vec![map(0, 2 * MIB, "[heap]")]),
                |_, _| Err(io::Error::from_raw_os_error(gone)),
            );
            assert_eq!((tally.areas()[0].samples, tally.areas()[0].placed_samples), (3, 0));
            assert!(tally.notes().is_empty(), "{:?}", tally.notes());
        }
    }

    #[test]
    fn notes_refusal_of_kernel() {
        let refuse = |error| io::Error::from_raw_os_error(error);
        let mut tally = tally();
        sample(&mut tally, MIB, 0, AccessSource::Cache, 3);
        tally.fold(|_| Err(refuse(libc::EACCES)), |_, _| Ok(Vec::new()));
        sample(&mut tally, MIB, 0, AccessSource::Cache, 2);
        tally.fold(|_| Ok(vec![map(0, 2 * MIB, "[heap]")]), |_, _| Err(refuse(libc::EPERM)));
        assert_eq!((tally.unmapped, tally.areas()[0].samples, tally.areas()[0].placed_samples), (0, 2, 0));
        let notes = tally.notes();
        let [note] = notes.as_slice() else { panic!("{notes:?}") };
        for expected in ["5 samples", "mappings of process 7", "Permission denied", "CAP_SYS_PTRACE"] {
            assert!(note.contains(expected), "{note}");
        }
    }
}

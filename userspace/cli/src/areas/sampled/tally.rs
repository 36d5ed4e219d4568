//! Samples by area: what of a process's memory they were of, and whether they came from the node where the page is.
//!
//! Mappings are cut into blocks of [`BLOCK`] bytes, at addresses that are multiples of it. Samples wait until they are
//! *folded*, once a second: then the kernel is asked for the mappings of each process and for the node of each page, one
//! time for all samples of it. What a page's node was is known to within that second. In the end, adjacent blocks that
//! are alike become one area.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    io,
    sync::Arc,
};

use numaward_topology::{CpuId, Machine};

use super::{
    super::{Share, maps, maps::Mapping, percent_of},
    Area, Process,
    rings::Access,
    source::{Source, Sources},
};

/// Bytes of a block: a huge page of most machines.
const BLOCK: u64 = 2 << 20;
/// Blocks that are kept, at most: some 100 MB for 512 GiB that are accessed all over, on two nodes.
const BLOCKS: usize = 256 << 10;
/// Samples that wait, at most; then they are to be folded.
const WAITING: usize = 64 << 10;

/// The samples of processes.
#[derive(Debug)]
pub(super) struct Tally {
    /// The node of each CPU.
    cpus: BTreeMap<CpuId, u32>,
    page: u64,
    waiting: Vec<Waiting>,
    /// By process, region, and number of the block in the address space.
    blocks: BTreeMap<(u32, Arc<str>, u64), Block>,
    /// The regions of the blocks, each of them once in memory.
    regions: BTreeSet<Arc<str>>,
    most_blocks: usize,
    /// By process and node of the CPU.
    from: BTreeMap<u32, BTreeMap<u32, u64>>,
    /// Samples that are of no mapping.
    unmapped: u64,
    /// Samples of blocks for which there was no room.
    beyond: u64,
    /// Samples of which the kernel refused to say something, and what it was the first time.
    refused: Option<Refused>,
}

#[derive(Debug)]
struct Refused {
    samples: u64,
    pid: u32,
    what: &'static str,
    error: io::Error,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    pid: u32,
    /// The address of the page.
    page: u64,
    from: Option<u32>,
    source: Source,
}

/// The samples of a block, or of several.
#[derive(Clone, Debug, Default)]
struct Block {
    /// The part of it that is mapped.
    start: u64,
    end: u64,
    samples: u64,
    sources: Sources,
    /// Samples of which the nodes of CPU and page are known, and those of them where these differ.
    placed: u64,
    remote: u64,
    /// Samples by the node of the page.
    nodes: BTreeMap<u32, u64>,
}

impl Tally {
    /// On a machine with these CPUs.
    pub(super) fn new(machine: &Machine) -> Self {
        Self {
            cpus: machine.cpus.iter().map(|(id, cpu)| (*id, cpu.node.0)).collect(),
            page: rustix::param::page_size() as u64,
            waiting: Vec::new(),
            blocks: BTreeMap::new(),
            regions: BTreeSet::new(),
            most_blocks: BLOCKS,
            from: BTreeMap::new(),
            unmapped: 0,
            beyond: 0,
            refused: None,
        }
    }

    /// Takes a sample.
    pub(super) fn add(&mut self, access: &Access) {
        self.waiting.push(Waiting {
            pid: access.pid,
            page: access.address / self.page * self.page,
            from: self.cpus.get(&access.cpu).copied(),
            source: access.source,
        });
    }

    /// Whether so many samples wait that they are to be folded now.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= WAITING
    }

    /// Adds what waits to the blocks, by the mappings of a process, and the nodes of its pages by address.
    pub(super) fn fold(
        &mut self,
        mut mappings: impl FnMut(u32) -> io::Result<Vec<Mapping>>,
        mut nodes: impl FnMut(u32, &[usize]) -> io::Result<Vec<Option<u32>>>,
    ) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.sort_unstable_by_key(|sample| (sample.pid, sample.page));
        for of_process in waiting.chunk_by(|one, other| one.pid == other.pid) {
            let Some(Waiting { pid, .. }) = of_process.first().copied() else { continue };
            let by_page = of_process.chunk_by(|one, other| one.page == other.page);
            let count = of_process.len() as u64;
            let maps = match mappings(pid) {
                Ok(maps) => maps,
                Err(error) if is_gone(&error) => Vec::new(),
                Err(error) => {
                    self.refuse(count, pid, "mappings", error);
                    continue;
                }
            };
            // A process that has ended has no mappings.
            if maps.is_empty() {
                self.unmapped += count;
                continue;
            }
            let page =
                |of_page: &[Waiting]| of_page.first().and_then(|first| usize::try_from(first.page).ok());
            let pages: Vec<usize> = by_page.clone().filter_map(page).collect();
            let on = nodes(pid, &pages).unwrap_or_else(|error| {
                // Of a process that ends meanwhile, the kernel says that the argument is invalid.
                if !is_gone(&error) && error.kind() != io::ErrorKind::InvalidInput {
                    self.refuse(count, pid, "nodes of the pages", error);
                }
                Vec::new()
            });
            let mut on = on.into_iter();
            for of_page in by_page {
                self.page(pid, of_page, &maps, on.next().flatten());
            }
        }
        // The room is used again.
        waiting.clear();
        self.waiting = waiting;
    }

    /// Counts samples of a process of which the kernel refused to say something.
    fn refuse(&mut self, samples: u64, pid: u32, what: &'static str, error: io::Error) {
        let refused = self.refused.get_or_insert(Refused { samples: 0, pid, what, error });
        refused.samples += samples;
    }

    /// Adds the samples of one page.
    fn page(&mut self, pid: u32, samples: &[Waiting], maps: &[Mapping], node: Option<u32>) {
        let Some(Waiting { page, .. }) = samples.first().copied() else { return };
        let count = samples.len() as u64;
        let Some(map) = maps::within(maps, page, page.saturating_add(1)).next() else {
            self.unmapped += count;
            return;
        };
        let has_room = self.blocks.len() < self.most_blocks;
        let region = match self.regions.get(map.region.as_str()) {
            Some(region) => Arc::clone(region),
            None => Arc::from(map.region.as_str()),
        };
        if has_room {
            self.regions.insert(Arc::clone(&region));
        }
        let block = match self.blocks.entry((pid, region, page / BLOCK)) {
            Entry::Occupied(block) => block.into_mut(),
            Entry::Vacant(vacant) if has_room => vacant.insert(Block { start: u64::MAX, ..Block::default() }),
            Entry::Vacant(_) => {
                self.beyond += count;
                return;
            }
        };
        let first = page / BLOCK * BLOCK;
        block.start = block.start.min(map.start.max(first));
        block.end = block.end.max(map.end.min(first.saturating_add(BLOCK)));
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

    /// Samples that are in no area, and why.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.unmapped > 0 {
            notes.push(format!(
                "{} samples are in no area: their mapping or their process had gone within a second",
                self.unmapped
            ));
        }
        if self.beyond > 0 {
            notes.push(format!(
                "{} samples are in no area: more than {} blocks of 2 MiB were accessed",
                self.beyond, self.most_blocks
            ));
        }
        if let Some(Refused { samples, pid, what, error }) = &self.refused {
            notes.push(format!(
                "{samples} samples are in no area, or their node is not known: the {what} of process {pid}: {error}; that \
                 takes root, or CAP_SYS_PTRACE"
            ));
        }
        notes
    }

    /// All that was folded.
    pub(super) fn total(&self) -> Total {
        let mut all = Block::default();
        for block in self.blocks.values() {
            all.join(block);
        }
        let remote_percent = all.remote_percent();
        Total { samples: all.samples, placed: all.placed, sources: all.sources, remote_percent }
    }

    /// From which nodes the processes accessed memory, those with the most samples first.
    pub(super) fn processes(&self, command: impl Fn(u32) -> String) -> Vec<Process> {
        let mut processes: Vec<Process> = self
            .from
            .iter()
            .map(|(pid, nodes)| {
                let samples = nodes.values().sum();
                Process { pid: *pid, command: command(*pid), samples, from: shares(nodes, samples) }
            })
            .collect();
        processes.sort_by_key(|process| Reverse(process.samples));
        processes
    }

    /// The areas, those with the most samples first.
    pub(super) fn areas(&self) -> Vec<Area> {
        let mut joined: Vec<(u32, &Arc<str>, Block, u64)> = Vec::new();
        for ((pid, region, _), block) in &self.blocks {
            match joined.last_mut() {
                Some((of, named, area, count))
                    if of == pid && *named == region && area.takes(block, *count) =>
                {
                    area.join(block);
                    *count += 1;
                }
                _ => joined.push((*pid, region, block.clone(), 1)),
            }
        }
        joined.sort_by_key(|(_, _, area, _)| Reverse(area.samples));
        joined.into_iter().map(|(pid, region, area, _)| area.shown(pid, region)).collect()
    }
}

/// What all areas come to.
pub(super) struct Total {
    pub(super) samples: u64,
    pub(super) placed: u64,
    pub(super) sources: Sources,
    pub(super) remote_percent: Option<f64>,
}

impl Block {
    /// Whether the next block belongs to this area of so many blocks: it begins where this ends, is on the same node for
    /// the most part, and has about as many samples, to a factor of 4. A few samples more or less are by chance.
    fn takes(&self, next: &Self, count: u64) -> bool {
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

    fn shown(&self, pid: u32, region: &str) -> Area {
        let known = self.sources.known();
        Area {
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

fn shares(nodes: &BTreeMap<u32, u64>, all: u64) -> Vec<Share> {
    nodes.iter().map(|(node, count)| Share { node: *node, percent: percent_of(*count, all) }).collect()
}

/// Whether an error says that the process has ended.
fn is_gone(error: &io::Error) -> bool {
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

    fn sample(tally: &mut Tally, address: u64, cpu: u32, source: Source, times: u32) {
        for _ in 0..times {
            tally.add(&Access { pid: 7, address, cpu: CpuId(cpu), source });
        }
    }

    fn map(start: u64, end: u64, region: &str) -> Mapping {
        Mapping { start, end, region: region.to_owned() }
    }

    /// Folds with a heap from 1 MiB on, and a mapping behind it. The pages below 8 MiB are on node 0, and those above 64 MiB
    /// not in memory.
    fn fold(tally: &mut Tally) {
        tally.fold(
            |pid| {
                assert_eq!(pid, 7);
                Ok(vec![map(MIB, 33 * MIB, "[heap]"), map(33 * MIB, 80 * MIB, "[anonymous]")])
            },
            |_, pages| {
                assert!(pages.is_sorted_by(|one, other| one < other), "each once: {pages:?}");
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
    fn samples_are_counted_by_block_source_and_node() {
        let mut tally = tally();
        sample(&mut tally, MIB + 5, 0, Source::Cache, 2);
        sample(&mut tally, MIB + 9, 1, Source::RemoteMemory, 1);
        sample(&mut tally, MIB + 5000, 9, Source::Unknown, 1);
        sample(&mut tally, 70 * MIB, 0, Source::LocalMemory, 2);
        sample(&mut tally, 90 * MIB, 0, Source::LocalMemory, 1);
        fold(&mut tally);
        // The same block again.
        sample(&mut tally, MIB + 5, 0, Source::LocalMemory, 1);
        fold(&mut tally);
        let areas = tally.areas();
        let [heap, other] = areas.as_slice() else { panic!("{areas:?}") };
        assert_eq!((heap.start.as_str(), heap.end.as_str(), heap.bytes), ("0x100000", "0x200000", MIB));
        assert_eq!((heap.region.as_str(), heap.samples), ("[heap]", 5));
        assert_eq!(heap.placed_samples, 4);
        assert_eq!(heap.remote_percent, Some(25.0), "a CPU that nobody knows is on no node");
        assert_eq!(heap.dram_percent, Some(50.0));
        assert_eq!(heap.nodes, [Share { node: 0, percent: 100.0 }]);
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
    fn adjacent_blocks_that_are_alike_become_one_area() {
        let mut tally = tally();
        // Two like each other, one on the other node, a gap, one that is hot, two that are not.
        for (block, times) in [(1, 100), (2, 60), (4, 80), (6, 1000), (7, 10), (8, 1)] {
            sample(&mut tally, block * BLOCK, 0, Source::Cache, times);
        }
        fold(&mut tally);
        let areas: Vec<_> =
            tally.areas().iter().map(|area| (area.start.clone(), area.bytes / BLOCK, area.samples)).collect();
        let at = |block: u64| format!("{:#x}", block * BLOCK);
        assert_eq!(areas, [(at(6), 1, 1000), (at(1), 2, 160), (at(4), 1, 80), (at(7), 2, 11)]);
    }

    #[test]
    fn blocks_are_limited() {
        let mut tally = tally();
        tally.most_blocks = 1;
        for block in [2, 3, 2] {
            sample(&mut tally, block * BLOCK, 0, Source::Cache, 1);
        }
        fold(&mut tally);
        assert_eq!((tally.total().samples, tally.areas().len()), (2, 1));
        assert!(tally.notes()[0].contains("more than 1 blocks"), "{:?}", tally.notes());
        assert!(!tally.is_full());
        sample(&mut tally, 0, 0, Source::Cache, u32::try_from(WAITING).unwrap());
        assert!(tally.is_full());
    }

    #[test]
    fn a_process_that_has_ended_is_no_fault() {
        for gone in [libc::ENOENT, libc::ESRCH] {
            let mut tally = tally();
            sample(&mut tally, MIB, 0, Source::Cache, 3);
            tally.fold(|_| Err(io::Error::from_raw_os_error(gone)), |_, _| panic!("it has no pages"));
            assert_eq!((tally.unmapped, tally.areas().len()), (3, 0));
            assert!(tally.refused.is_none(), "{:?}", tally.refused);
        }
        // It ends between the two questions.
        for gone in [libc::ESRCH, libc::EINVAL] {
            let mut tally = tally();
            sample(&mut tally, MIB, 0, Source::Cache, 3);
            tally.fold(
                |_| Ok(vec![map(0, 2 * MIB, "[heap]")]),
                |_, _| Err(io::Error::from_raw_os_error(gone)),
            );
            assert_eq!((tally.areas()[0].samples, tally.areas()[0].placed_samples), (3, 0));
            assert!(tally.notes().is_empty(), "{:?}", tally.notes());
        }
    }

    #[test]
    fn what_the_kernel_refuses_is_said() {
        let refuse = |error| io::Error::from_raw_os_error(error);
        let mut tally = tally();
        sample(&mut tally, MIB, 0, Source::Cache, 3);
        tally.fold(|_| Err(refuse(libc::EACCES)), |_, _| Ok(Vec::new()));
        sample(&mut tally, MIB, 0, Source::Cache, 2);
        tally.fold(|_| Ok(vec![map(0, 2 * MIB, "[heap]")]), |_, _| Err(refuse(libc::EPERM)));
        assert_eq!((tally.unmapped, tally.areas()[0].samples, tally.areas()[0].placed_samples), (0, 2, 0));
        let notes = tally.notes();
        let [note] = notes.as_slice() else { panic!("{notes:?}") };
        for expected in ["5 samples", "mappings of process 7", "Permission denied", "CAP_SYS_PTRACE"] {
            assert!(note.contains(expected), "{note}");
        }
    }
}

//! Where the data of an access came from, in the processor's own words: `union perf_mem_data_src` (`linux/perf_event.h`).
//!
//! Kernels and processors fill in different parts of it. Bits of `mem_lvl` say most where they name memory: Intel's number
//! of the level is that of the L3 cache for some accesses to remote memory. Older kernels have no number for AMD.
//! Both call another cache of the same node remote, with a distance that says so or without any.

use perf_event::data::{DataSource, MemLevel, MemLevelNum};
use serde::Serialize;

/// Numbers of levels that the crate does not name: `PERF_MEM_LVLNUM_L2_MHB`, `_MSC`, `_L0`, `_CXL`.
const L2_BUFFER: MemLevelNum = MemLevelNum::new(5);
const MEMORY_SIDE_CACHE: MemLevelNum = MemLevelNum::new(6);
const L0: MemLevelNum = MemLevelNum::new(7);
const CXL: MemLevelNum = MemLevelNum::new(9);
/// `PERF_MEM_HOPS_0`: another core of the same node.
const SAME_NODE: u8 = 1;

/// Where data came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// A cache of this node, or a buffer of the core.
    Cache,
    LocalMemory,
    RemoteMemory,
    /// A cache of another node.
    RemoteCache,
    /// Memory or a cache of another chip, which the processor does not distinguish.
    Elsewhere,
    Unknown,
}

impl Source {
    pub(super) fn of(data: DataSource) -> Self {
        let (levels, number) = (data.mem_lvl(), data.mem_lvl_num());
        let is_elsewhere = data.mem_remote() && data.mem_hops() != SAME_NODE;
        if levels.intersects(MemLevel::REM_RAM1 | MemLevel::REM_RAM2) {
            return Self::RemoteMemory;
        }
        if levels.contains(MemLevel::LOC_RAM)
            || [MemLevelNum::RAM, MemLevelNum::PMEM, CXL, MEMORY_SIDE_CACHE].contains(&number)
        {
            return if is_elsewhere { Self::RemoteMemory } else { Self::LocalMemory };
        }
        let caches = MemLevel::L1 | MemLevel::LFB | MemLevel::L2 | MemLevel::L3;
        let is_cache = levels.intersects(caches | MemLevel::REM_CCE1 | MemLevel::REM_CCE2)
            || [
                L0,
                MemLevelNum::L1,
                MemLevelNum::L2,
                MemLevelNum::L3,
                MemLevelNum::L4,
                MemLevelNum::ANY_CACHE,
                MemLevelNum::LFB,
                L2_BUFFER,
            ]
            .contains(&number);
        // A miss without a hit says where the data was not.
        if !is_cache || levels.contains(MemLevel::MISS) && !levels.contains(MemLevel::HIT) {
            Self::Unknown
        } else if is_elsewhere || levels.contains(MemLevel::REM_CCE2) {
            Self::RemoteCache
        } else {
            Self::Cache
        }
    }
}

/// How many accesses got their data from where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sources {
    pub(super) cache: u64,
    pub(super) local_memory: u64,
    pub(super) remote_memory: u64,
    pub(super) remote_cache: u64,
    /// Memory or caches of another chip, which the processor does not distinguish.
    pub(super) elsewhere: u64,
    pub(super) unknown: u64,
}

impl Sources {
    pub(super) fn count(&mut self, source: Source) {
        *match source {
            Source::Cache => &mut self.cache,
            Source::LocalMemory => &mut self.local_memory,
            Source::RemoteMemory => &mut self.remote_memory,
            Source::RemoteCache => &mut self.remote_cache,
            Source::Elsewhere => &mut self.elsewhere,
            Source::Unknown => &mut self.unknown,
        } += 1;
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.cache += other.cache;
        self.local_memory += other.local_memory;
        self.remote_memory += other.remote_memory;
        self.remote_cache += other.remote_cache;
        self.elsewhere += other.elsewhere;
        self.unknown += other.unknown;
    }

    /// Those of which is known whether a cache had the data.
    pub(super) fn known(&self) -> u64 {
        self.cache + self.memory() + self.remote_cache
    }

    /// Those from memory, of this node or of another one.
    pub(super) fn memory(&self) -> u64 {
        self.local_memory + self.remote_memory
    }
}

#[cfg(test)]
mod tests {
    use perf_event::{
        Builder,
        data::parse::{ParseConfig, Parser},
        events::Software,
    };

    use super::*;

    // Positions of the fields, and their values, from linux/perf_event.h.
    const HIT: u64 = 0x02;
    const MISS: u64 = 0x04;
    const L1: u64 = 0x08;
    const LFB: u64 = 0x10;
    const L3: u64 = 0x40;
    const LOC_RAM: u64 = 0x80;
    const REM_RAM1: u64 = 0x100;
    const REM_CCE1: u64 = 0x400;
    const REM_CCE2: u64 = 0x800;
    const UNC: u64 = 0x2000;

    /// From `mem_lvl`, `mem_lvl_num`, `mem_remote` and `mem_hops`.
    fn of(levels: u64, number: u64, remote: u64, hops: u64) -> Source {
        let value = 0x2 | levels << 5 | number << 33 | remote << 37 | hops << 43;
        let config: ParseConfig<perf_event::data::endian::Native> =
            (*Builder::new(Software::DUMMY).attrs()).into();
        let bytes = value.to_ne_bytes();
        Source::of(Parser::new(bytes.as_slice(), config).parse().unwrap())
    }

    #[test]
    fn intel_words_are_understood() {
        // arch/x86/events/intel/ds.c, pebs_data_source.
        assert_eq!(of(MISS, 3, 0, 0), Source::Unknown, "no L3 hit");
        assert_eq!(of(L1 | HIT, 1, 0, 0), Source::Cache);
        assert_eq!(of(LFB | HIT, 0xc, 0, 0), Source::Cache);
        assert_eq!(of(REM_CCE1 | HIT, 3, 1, 0), Source::RemoteCache);
        assert_eq!(of(LOC_RAM | HIT, 0xd, 0, 0), Source::LocalMemory);
        assert_eq!(of(REM_RAM1 | HIT, 3, 1, 0), Source::RemoteMemory, "shared, with the number of the L3");
        assert_eq!(of(REM_RAM1 | HIT, 0xd, 1, 0), Source::RemoteMemory);
        assert_eq!(of(UNC | HIT, 0xf, 0, 0), Source::Unknown);
        assert_eq!(of(HIT, 5, 0, 0), Source::Cache);
        assert_eq!(of(HIT, 6, 0, 0), Source::LocalMemory);
        assert_eq!(of(HIT, 7, 0, 0), Source::Cache, "L0");
    }

    #[test]
    fn amd_words_are_understood() {
        // arch/x86/events/amd/ibs.c: older kernels write no number, newer ones a number and a distance.
        for (number, remote, hops) in [(0xf, 0, 0), (0xb, 1, 1)] {
            assert_eq!(of(REM_CCE1 | HIT, number, remote, hops), Source::Cache, "another cache of the node");
            assert_eq!(of(L3 | REM_CCE1 | HIT, number, remote, hops), Source::Cache);
        }
        assert_eq!(of(REM_CCE2 | HIT, 0xf, 0, 0), Source::RemoteCache);
        assert_eq!(of(REM_CCE2 | HIT, 0xb, 1, 2), Source::RemoteCache);
        assert_eq!(of(LOC_RAM | HIT, 0xf, 0, 0), Source::LocalMemory);
        assert_eq!(of(LOC_RAM | HIT, 0xd, 0, 0), Source::LocalMemory);
        assert_eq!(of(REM_RAM1 | HIT, 0xd, 1, 2), Source::RemoteMemory);
        assert_eq!(of(0, 0x9, 0, 0), Source::LocalMemory, "CXL");
        assert_eq!(of(0, 0x9, 1, 2), Source::RemoteMemory);
        assert_eq!(of(1, 0xf, 0, 0), Source::Unknown, "a store that missed");
        assert_eq!(of(0, 0, 0, 0), Source::Unknown);
    }

    #[test]
    fn accesses_are_counted_by_source() {
        let mut sources = Sources::default();
        for source in [
            Source::Cache,
            Source::LocalMemory,
            Source::RemoteMemory,
            Source::RemoteCache,
            Source::Elsewhere,
            Source::Unknown,
        ] {
            sources.count(source);
        }
        sources.add(&Sources { remote_memory: 2, unknown: 1, ..Sources::default() });
        assert_eq!((sources.known(), sources.memory()), (6, 4));
        assert_eq!((sources.elsewhere, sources.unknown), (1, 2));
    }
}

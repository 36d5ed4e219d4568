//! Source of the data of an access: `union perf_mem_data_src` (`linux/perf_event.h`).
//!
//! Kernels and processors fill in different fields. If bits of `mem_lvl` name memory, they are the most reliable: for
//! some accesses to remote memory, Intel's `mem_lvl_num` is that of the L3 cache, and older kernels set no number for
//! AMD. Both vendors report another cache of the same node as remote, with a distance (`mem_hops`) that shows this, or
//! without any.

use perf_event::data::{DataSource, MemLevel, MemLevelNum};
use serde::Serialize;

// Levels that the perf_event crate does not name: `PERF_MEM_LVLNUM_L2_MHB`, `_MSC`, `_L0`, `_CXL`.
const L2_BUFFER: MemLevelNum = MemLevelNum::new(5);
const MEMORY_SIDE_CACHE: MemLevelNum = MemLevelNum::new(6);
const L0: MemLevelNum = MemLevelNum::new(7);
const CXL: MemLevelNum = MemLevelNum::new(9);
/// `PERF_MEM_HOPS_0`: another core of the same node.
const SAME_NODE: u8 = 1;

/// Source of the data of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AccessSource {
    /// A cache of this node, or a buffer of the core.
    Cache,
    LocalMemory,
    RemoteMemory,
    /// A cache of another node.
    RemoteCache,
    /// Memory or a cache of another chip; the processor does not distinguish them.
    Elsewhere,
    Unknown,
}

impl AccessSource {
    pub(super) fn from_data_source(data: DataSource) -> Self {
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
        // A miss without a hit does not show the source.
        if !is_cache || levels.contains(MemLevel::MISS) && !levels.contains(MemLevel::HIT) {
            Self::Unknown
        } else if is_elsewhere || levels.contains(MemLevel::REM_CCE2) {
            Self::RemoteCache
        } else {
            Self::Cache
        }
    }
}

/// Number of accesses by their source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceCounts {
    pub cache: u64,
    pub local_memory: u64,
    pub remote_memory: u64,
    pub remote_cache: u64,
    /// Memory or caches of another chip; the processor does not distinguish them.
    pub elsewhere: u64,
    pub unknown: u64,
}

impl SourceCounts {
    pub(super) fn count(&mut self, source: AccessSource) {
        *match source {
            AccessSource::Cache => &mut self.cache,
            AccessSource::LocalMemory => &mut self.local_memory,
            AccessSource::RemoteMemory => &mut self.remote_memory,
            AccessSource::RemoteCache => &mut self.remote_cache,
            AccessSource::Elsewhere => &mut self.elsewhere,
            AccessSource::Unknown => &mut self.unknown,
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

    /// Returns the number of accesses with a source that is known to be a cache or memory.
    pub(super) fn known(&self) -> u64 {
        self.cache + self.memory() + self.remote_cache
    }

    /// Returns the number of accesses to memory of any node.
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

    // Values of the fields from linux/perf_event.h.
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

    /// Returns the source for values of `mem_lvl`, `mem_lvl_num`, `mem_remote` and `mem_hops`.
    fn source_of(levels: u64, number: u64, remote: u64, hops: u64) -> AccessSource {
        let value = 0x2 | levels << 5 | number << 33 | remote << 37 | hops << 43;
        let config: ParseConfig<perf_event::data::endian::Native> =
            (*Builder::new(Software::DUMMY).attrs()).into();
        let bytes = value.to_ne_bytes();
        AccessSource::from_data_source(Parser::new(bytes.as_slice(), config).parse().unwrap())
    }

    #[test]
    fn decodes_sources_of_intel() {
        // arch/x86/events/intel/ds.c, pebs_data_source.
        assert_eq!(source_of(MISS, 3, 0, 0), AccessSource::Unknown, "no L3 hit");
        assert_eq!(source_of(L1 | HIT, 1, 0, 0), AccessSource::Cache);
        assert_eq!(source_of(LFB | HIT, 0xc, 0, 0), AccessSource::Cache);
        assert_eq!(source_of(REM_CCE1 | HIT, 3, 1, 0), AccessSource::RemoteCache);
        assert_eq!(source_of(LOC_RAM | HIT, 0xd, 0, 0), AccessSource::LocalMemory);
        assert_eq!(
            source_of(REM_RAM1 | HIT, 3, 1, 0),
            AccessSource::RemoteMemory,
            "shared, with the number of the L3"
        );
        assert_eq!(source_of(REM_RAM1 | HIT, 0xd, 1, 0), AccessSource::RemoteMemory);
        assert_eq!(source_of(UNC | HIT, 0xf, 0, 0), AccessSource::Unknown);
        assert_eq!(source_of(HIT, 5, 0, 0), AccessSource::Cache);
        assert_eq!(source_of(HIT, 6, 0, 0), AccessSource::LocalMemory);
        assert_eq!(source_of(HIT, 7, 0, 0), AccessSource::Cache, "L0");
    }

    #[test]
    fn decodes_sources_of_amd() {
        // arch/x86/events/amd/ibs.c: older kernels set no number, newer ones set a number and a distance.
        for (number, remote, hops) in [(0xf, 0, 0), (0xb, 1, 1)] {
            assert_eq!(
                source_of(REM_CCE1 | HIT, number, remote, hops),
                AccessSource::Cache,
                "another cache of the node"
            );
            assert_eq!(source_of(L3 | REM_CCE1 | HIT, number, remote, hops), AccessSource::Cache);
        }
        assert_eq!(source_of(REM_CCE2 | HIT, 0xf, 0, 0), AccessSource::RemoteCache);
        assert_eq!(source_of(REM_CCE2 | HIT, 0xb, 1, 2), AccessSource::RemoteCache);
        assert_eq!(source_of(LOC_RAM | HIT, 0xf, 0, 0), AccessSource::LocalMemory);
        assert_eq!(source_of(LOC_RAM | HIT, 0xd, 0, 0), AccessSource::LocalMemory);
        assert_eq!(source_of(REM_RAM1 | HIT, 0xd, 1, 2), AccessSource::RemoteMemory);
        assert_eq!(source_of(0, 0x9, 0, 0), AccessSource::LocalMemory, "CXL");
        assert_eq!(source_of(0, 0x9, 1, 2), AccessSource::RemoteMemory);
        assert_eq!(source_of(1, 0xf, 0, 0), AccessSource::Unknown, "a store that missed");
        assert_eq!(source_of(0, 0, 0, 0), AccessSource::Unknown);
    }

    #[test]
    fn counts_accesses_by_source() {
        let mut sources = SourceCounts::default();
        for source in [
            AccessSource::Cache,
            AccessSource::LocalMemory,
            AccessSource::RemoteMemory,
            AccessSource::RemoteCache,
            AccessSource::Elsewhere,
            AccessSource::Unknown,
        ] {
            sources.count(source);
        }
        sources.add(&SourceCounts { remote_memory: 2, unknown: 1, ..SourceCounts::default() });
        assert_eq!((sources.known(), sources.memory()), (6, 4));
        assert_eq!((sources.elsewhere, sources.unknown), (1, 2));
    }
}

//! The counters' map: its size and its reader.
//!
//! A *row* holds the counters of one slot on one node. A *shard* holds all rows. Each CPU has its own shard (without
//! atomics in the probe) if all shards fit into [`MAX_PER_CPU_BYTES`]. Otherwise the CPUs of one memory node share a shard,
//! or those of several. The reader adds up the shards.

use std::{os::fd::AsFd as _, sync::Arc};

use aya::maps::MapData;
use numaward_abi::AllocCounters;

use crate::{MapAccessError, sys};

/// The name of the map.
pub(crate) const MAP: &str = "CTR";

/// The name of the map with misses by slot and node, of the probe of charges.
pub(crate) const MISSES: &str = "MISSES";

/// The maximum size in bytes of the shards with misses.
const MAX_MISS_BYTES: u64 = 2 << 20;

/// The maximum size in bytes of counters with a shard for each CPU.
pub(crate) const MAX_PER_CPU_BYTES: u64 = 64 << 20;

const ROW_SIZE: usize = size_of::<AllocCounters>();
/// The number of 64-bit words of a row.
pub(crate) const ROW_WORDS: usize = ROW_SIZE / size_of::<u64>();
/// The number of rows in the pair of cache lines that a CPU fetches at once: shards begin at multiples of it.
const ROWS_AT_ONCE: u32 = 4;
const _: () = assert!(ROWS_AT_ONCE as usize * ROW_SIZE == 128, "two cache lines");

/// The layout of the counters in their map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLayout {
    /// The number of nodes, which is the number of rows per slot.
    pub(crate) nodes: u32,
    pub(crate) rows: u32,
    /// The number of shards: one for each possible CPU, or one for one or several memory nodes.
    pub(crate) shards: u32,
    /// True if each CPU has its own shard.
    pub(crate) per_cpu: bool,
}

impl RowLayout {
    /// Computes the layout. `cpus` is one more than the highest possible CPU. `None` if no map can hold so many rows.
    pub(crate) fn new(slots: u32, nodes: u32, memory_nodes: u32, cpus: u32) -> Option<Self> {
        let rows = slots.checked_mul(nodes)?.checked_next_multiple_of(ROWS_AT_ONCE)?;
        let within_limit = MAX_PER_CPU_BYTES / (u64::from(rows) * ROW_SIZE as u64).max(1);
        if u64::from(cpus) <= within_limit {
            return Some(Self { nodes, rows, shards: cpus, per_cpu: true });
        }
        let shards = u32::try_from(within_limit).unwrap_or(u32::MAX).min(memory_nodes).max(1);
        Some(Self { nodes, rows, shards, per_cpu: false })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.rows * self.shards
    }

    /// Returns the number of 64-bit words of a slot in the result of [`CounterRows::read`].
    pub(crate) fn words_of_slot(&self) -> usize {
        self.nodes as usize * ROW_WORDS
    }

    /// Returns the number of entries of a slot.
    pub(crate) fn entries_of_slot(&self) -> u64 {
        u64::from(self.nodes) * u64::from(self.shards)
    }
}

/// Returns the number of pages in rows, each of which is counted once, modulo 2^64.
pub(crate) fn pages(words: &[u64]) -> u64 {
    let rows = words.as_chunks::<ROW_WORDS>().0.iter();
    // Pages outside the guaranteed nodes are local or remote, too.
    rows.flat_map(|&[local, remote, _outside, kernel]| [local, remote, kernel]).fold(0, u64::wrapping_add)
}

/// The counters' map, open for reading.
pub(crate) struct CounterRows {
    pub(crate) layout: RowLayout,
    pub(crate) map: MapData,
    /// The misses by slot and node that another probe counts.
    pub(crate) misses: Option<Arc<MissCounters>>,
}

impl CounterRows {
    /// Reads the rows of `count` slots from `first` on, as [`AllocCounters`] by node index. Misses are those of
    /// both probes that count them: for each slot, only one of them does at a time.
    pub(crate) fn read(&self, first: u32, count: u32) -> Result<Vec<u64>, MapAccessError> {
        let RowLayout { nodes, rows, shards, .. } = self.layout;
        let mut sums = vec![0; count as usize * self.layout.words_of_slot()];
        for shard in 0..shards {
            let row = (shard * rows + first * nodes) as usize;
            // Modulo 2^64, like the shards: only the growth is used.
            sys::add_array(self.map.fd().as_fd(), row * ROW_WORDS, &mut sums)
                .map_err(|source| MapAccessError { map: MAP, action: "read", source })?;
        }
        if let Some(counters) = &self.misses {
            let mut misses = vec![0; sums.len() / ROW_WORDS];
            counters.add_to(first * nodes, &mut misses)?;
            add_column(&mut sums, &misses);
        }
        Ok(sums)
    }
}

/// The shards of a map with a number by slot and node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MissLayout {
    pub(crate) shards: u32,
    pub(crate) rows: u32,
}

impl MissLayout {
    /// Computes the layout: a shard for each CPU, or as many as fit into [`MAX_MISS_BYTES`]. `None` if no map can hold one.
    pub(crate) fn new(slots: u32, nodes: u32, cpus: u32) -> Option<Self> {
        // Shards begin at multiples of two cache lines.
        let rows = slots.checked_mul(nodes)?.checked_next_multiple_of(128 / 8)?;
        let within_limit = MAX_MISS_BYTES / (u64::from(rows) * 8).max(1);
        Some(Self { shards: u32::try_from(within_limit).unwrap_or(u32::MAX).min(cpus).max(1), rows })
    }

    pub(crate) fn entries(self) -> u32 {
        self.rows * self.shards
    }
}

/// The misses by slot and node, open for reading.
pub(crate) struct MissCounters {
    pub(crate) map: MapData,
    pub(crate) layout: MissLayout,
}

impl MissCounters {
    /// Adds the misses of the rows from `first` on, over all shards.
    pub(crate) fn add_to(&self, first: u32, sums: &mut [u64]) -> Result<(), MapAccessError> {
        let MissLayout { shards, rows } = self.layout;
        for shard in 0..shards {
            sys::add_array(self.map.fd().as_fd(), (shard * rows + first) as usize, sums)
                .map_err(|source| MapAccessError { map: MISSES, action: "read", source })?;
        }
        Ok(())
    }
}

/// Adds misses by row to the rows' own.
fn add_column(rows: &mut [u64], misses: &[u64]) {
    for ([_, _, outside, _], missed) in rows.as_chunks_mut::<ROW_WORDS>().0.iter_mut().zip(misses) {
        *outside = outside.wrapping_add(*missed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misses_of_other_probe_are_added() {
        let mut rows = [1, 2, 0, 4, 5, 6, 1, 8];
        add_column(&mut rows, &[30, 70]);
        assert_eq!(rows, [1, 2, 30, 4, 5, 6, 71, 8]);
    }

    #[test]
    fn misses_have_as_many_shards_as_fit() {
        let layout = |slots, nodes, cpus| MissLayout::new(slots, nodes, cpus).unwrap();
        assert_eq!(layout(513, 2, 128), MissLayout { shards: 128, rows: 1040 });
        // 80,016 rows * 8 bytes: three shards fit.
        assert_eq!(layout(10_001, 8, 128), MissLayout { shards: 3, rows: 80_016 });
        assert_eq!(layout(1_000_001, 8, 128).shards, 1);
        assert_eq!(layout(1, 1, 1).entries(), 16);
        assert_eq!(MissLayout::new(u32::MAX, 2, 1), None);
    }

    #[test]
    fn pages_outside_are_counted_once() {
        assert_eq!(pages(&[]), 0);
        assert_eq!(pages(&[1, 20, 20, 300, u64::MAX, 5, 0, 2000]), 2325);
    }

    #[test]
    fn counters_are_per_cpu_if_they_fit() {
        let layout = |slots, nodes, homes, cpus| {
            let layout = RowLayout::new(slots, nodes, homes, cpus).unwrap();
            (layout.per_cpu, layout.shards, layout.entries())
        };
        assert_eq!(layout(513, 2, 2, 128), (true, 128, 128 * 1028));
        assert_eq!(layout(1, 1, 1, 1), (true, 1, 4));
        // 10,001 slots * 8 nodes * 32 bytes = 2.4 MiB for each CPU: 26 of them fit.
        assert_eq!(layout(10_001, 8, 8, 26), (true, 26, 26 * 80_008));
        assert_eq!(layout(10_001, 8, 8, 27), (false, 8, 640_064));
        assert_eq!(layout(10_001, 8, 1, 256), (false, 1, 80_008), "one node has all CPUs");
        // 61 MiB per shard: only one fits.
        assert_eq!(layout(10_001, 200, 200, 256), (false, 1, 2_000_200));
        assert_eq!(layout(1_000_000, 8, 8, 256), (false, 1, 8_000_000), "one in any case");
        assert_eq!(RowLayout::new(u32::MAX, 2, 2, 1), None);
    }
}

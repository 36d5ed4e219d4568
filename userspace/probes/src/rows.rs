//! The counters' map: how large it is, and how it is read.
//!
//! A *row* holds the counters of one slot on one node. A *shard* holds all rows. Each CPU has its own (no atomics in
//! the probe) while all of them stay within [`PER_CPU_LIMIT`]; beyond, the CPUs of a node share one, and if that is
//! still too much those of several. Reading sums over shards.

use std::os::fd::AsFd as _;

use aya::maps::MapData;
use numaward_abi::AllocCounters;

use crate::{MapAccessError, sys};

/// The map that holds them.
pub(crate) const MAP: &str = "CTR";

/// Memory that counters may take before CPUs share them.
pub(crate) const PER_CPU_LIMIT: u64 = 64 << 20;

const ROW_SIZE: usize = size_of::<AllocCounters>();
/// 64-bit numbers of a row.
pub(crate) const ROW_WORDS: usize = ROW_SIZE / size_of::<u64>();
/// Rows in the pair of cache lines that a CPU fetches at once: shards begin at multiples of it.
const ROWS_AT_ONCE: u32 = 4;
const _: () = assert!(ROWS_AT_ONCE as usize * ROW_SIZE == 128, "two cache lines");

/// How the counters lie in their map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Nodes, hence rows of a slot.
    pub(crate) nodes: u32,
    pub(crate) rows: u32,
    /// One for each possible CPU, or for one home node or several.
    pub(crate) shards: u32,
    /// Whether each CPU has its own.
    pub(crate) per_cpu: bool,
}

impl Layout {
    /// `cpus` is one more than the highest possible CPU. `None` where no map can hold so many rows.
    pub(crate) fn new(slots: u32, nodes: u32, home_nodes: u32, cpus: u32) -> Option<Self> {
        let rows = slots.checked_mul(nodes)?.checked_next_multiple_of(ROWS_AT_ONCE)?;
        let within_limit = PER_CPU_LIMIT / (u64::from(rows) * ROW_SIZE as u64).max(1);
        if u64::from(cpus) <= within_limit {
            return Some(Self { nodes, rows, shards: cpus, per_cpu: true });
        }
        let shards = u32::try_from(within_limit).unwrap_or(u32::MAX).min(home_nodes).max(1);
        Some(Self { nodes, rows, shards, per_cpu: false })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.rows * self.shards
    }

    /// 64-bit numbers that [`Rows::read`] gives of one slot.
    pub(crate) fn words_of_slot(&self) -> usize {
        self.nodes as usize * ROW_WORDS
    }

    /// Entries that belong to one slot.
    pub(crate) fn entries_of_slot(&self) -> u64 {
        u64::from(self.nodes) * u64::from(self.shards)
    }
}

/// The counters' map, open for reading.
pub(crate) struct Rows {
    pub(crate) layout: Layout,
    pub(crate) map: MapData,
}

impl Rows {
    /// The rows of `count` slots from `first` on: those of each slot by node index, each as [`AllocCounters`].
    pub(crate) fn read(&self, first: u32, count: u32) -> Result<Vec<u64>, MapAccessError> {
        let Layout { nodes, rows, shards, .. } = self.layout;
        let mut sums = vec![0; count as usize * self.layout.words_of_slot()];
        for shard in 0..shards {
            let row = (shard * rows + first * nodes) as usize;
            // Modulo 2^64, like the shards: what counts is the growth.
            sys::add_array(self.map.fd().as_fd(), row * ROW_WORDS, &mut sums)
                .map_err(|source| MapAccessError { map: MAP, action: "read", source })?;
        }
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_per_cpu_until_they_are_too_large() {
        let layout = |slots, nodes, homes, cpus| {
            let layout = Layout::new(slots, nodes, homes, cpus).unwrap();
            (layout.per_cpu, layout.shards, layout.entries())
        };
        assert_eq!(layout(513, 2, 2, 128), (true, 128, 128 * 1028));
        assert_eq!(layout(1, 1, 1, 1), (true, 1, 4));
        // 10,001 slots * 8 nodes * 32 bytes = 2.4 MiB for each CPU: 26 of them fit.
        assert_eq!(layout(10_001, 8, 8, 26), (true, 26, 26 * 80_008));
        assert_eq!(layout(10_001, 8, 8, 27), (false, 8, 640_064));
        assert_eq!(layout(10_001, 8, 1, 256), (false, 1, 80_008), "one node has all CPUs");
        // 61 MiB a shard: room for one.
        assert_eq!(layout(10_001, 200, 200, 256), (false, 1, 2_000_200));
        assert_eq!(layout(1_000_000, 8, 8, 256), (false, 1, 8_000_000), "one in any case");
        assert_eq!(Layout::new(u32::MAX, 2, 2, 1), None);
    }
}

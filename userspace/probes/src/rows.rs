//! The counters' map: how large it is, and how it is read.
//!
//! A *row* holds the counters of one slot on one node. Rows are per CPU (no atomics in the probe) while
//! this stays within [`PER_CPU_LIMIT`]; beyond, they are shared by the CPUs of a node, and if that is still
//! too much by those of several: a *shard*. Reading sums over CPUs or shards.

use std::{io, os::fd::AsFd};

use aya::maps::MapData;
use numaward_abi::AllocCounters;

use crate::{MapAccessError, sys};

/// Memory that counters may take before CPUs share them.
pub(crate) const PER_CPU_LIMIT: u64 = 64 << 20;

/// Buffer for one system call.
const CHUNK: usize = 1 << 20;

const ROW_SIZE: usize = size_of::<AllocCounters>();
const ROW_WORDS: usize = ROW_SIZE / size_of::<u64>();

/// How the counters lie in their map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Nodes, hence rows of a slot.
    pub(crate) nodes: u32,
    /// Rows of all slots.
    pub(crate) rows: u32,
    /// How many values each row has: one per possible CPU, or one per shard.
    pub(crate) copies: u32,
    /// Whether the copies are those of CPUs.
    pub(crate) per_cpu: bool,
}

impl Layout {
    /// `None` where no map can hold so many rows.
    pub(crate) fn new(slots: u32, nodes: u32, home_nodes: u32, cpus: u32) -> Option<Self> {
        let rows = slots.checked_mul(nodes)?;
        let copies_within_limit = PER_CPU_LIMIT / (u64::from(rows) * ROW_SIZE as u64).max(1);
        if u64::from(cpus) <= copies_within_limit {
            return Some(Self { nodes, rows, copies: cpus, per_cpu: true });
        }
        let shards = u32::try_from(copies_within_limit).unwrap_or(u32::MAX).min(home_nodes).max(1);
        Some(Self { nodes, rows, copies: shards, per_cpu: false })
    }

    /// The map that holds them.
    pub(crate) fn map(&self) -> &'static str {
        if self.per_cpu { "CTR" } else { "CTR_SHARED" }
    }

    /// Entries of the maps `CTR` and `CTR_SHARED`; the one not used has the least that is allowed.
    pub(crate) fn entries(&self) -> (u32, u32) {
        if self.per_cpu { (self.rows, 1) } else { (1, self.rows * self.copies) }
    }
}

/// The counters' map, open for reading.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) layout: Layout,
    pub(crate) map: MapData,
}

impl Rows {
    /// The rows of `count` slots from `first` on: those of each slot by node index.
    pub(crate) fn read(&self, first: u32, count: u32) -> Result<Vec<AllocCounters>, MapAccessError> {
        let (first, count) = (first * self.layout.nodes, count * self.layout.nodes);
        let mut sums = vec![AllocCounters::default(); count as usize];
        if self.layout.per_cpu {
            self.add(first, self.layout.copies, &mut sums)?;
        } else {
            for shard in 0..self.layout.copies {
                self.add(shard * self.layout.rows + first, 1, &mut sums)?;
            }
        }
        Ok(sums)
    }

    /// Adds the map's values from the key `first` on, each made of `copies`, to `sums`.
    fn add(&self, first: u32, copies: u32, sums: &mut [AllocCounters]) -> Result<(), MapAccessError> {
        let error = |source| MapAccessError { map: self.layout.map(), action: "read", source };
        let words = ROW_WORDS * copies as usize;
        let chunk = (CHUNK / (words * size_of::<u64>())).clamp(1, sums.len().max(1));
        let mut values = vec![0u64; chunk * words];
        let mut key = first;
        for sums in sums.chunks_mut(chunk) {
            let wanted = u32::try_from(sums.len()).unwrap_or(u32::MAX);
            self.copy(key, wanted, words, &mut values).map_err(error)?;
            for (sum, value) in sums.iter_mut().zip(values.chunks_exact(words)) {
                for copy in value.as_chunks::<ROW_WORDS>().0 {
                    let &[user_local, user_remote, user_outside, kernel] = copy;
                    // Modulo 2^64, like the copies: what counts is the growth.
                    sum.user_local = sum.user_local.wrapping_add(user_local);
                    sum.user_remote = sum.user_remote.wrapping_add(user_remote);
                    sum.user_outside = sum.user_outside.wrapping_add(user_outside);
                    sum.kernel = sum.kernel.wrapping_add(kernel);
                }
            }
            key += wanted;
        }
        Ok(())
    }

    /// Copies `wanted` values of so many words from `key` on.
    fn copy(&self, key: u32, wanted: u32, words: usize, values: &mut [u64]) -> io::Result<()> {
        let map = self.map.fd().as_fd();
        if !self.layout.per_cpu {
            return sys::read_array(map, key as usize * words, &mut values[..wanted as usize * words]);
        }
        let read = sys::lookup_batch(map, key.checked_sub(1), wanted, words * size_of::<u64>(), values)?;
        if read != wanted {
            return Err(io::Error::other(format!("{read} values instead of {wanted} after key {key}")));
        }
        Ok(())
    }
}

/// What rows grew by since `base`, modulo 2^64 as the kernel's additions. An empty `base` is all zero.
pub(crate) fn growth(base: &[AllocCounters], now: &[AllocCounters]) -> impl Iterator<Item = AllocCounters> {
    let base = base.iter().copied().chain(std::iter::repeat(AllocCounters::default()));
    now.iter().zip(base).map(|(now, base)| AllocCounters {
        user_local: now.user_local.wrapping_sub(base.user_local),
        user_remote: now.user_remote.wrapping_sub(base.user_remote),
        user_outside: now.user_outside.wrapping_sub(base.user_outside),
        kernel: now.kernel.wrapping_sub(base.kernel),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_grow_also_past_the_largest_number() {
        let row = |local, remote, outside, kernel| AllocCounters {
            user_local: local,
            user_remote: remote,
            user_outside: outside,
            kernel,
        };
        let (base, now) = (row(1, u64::MAX - 1, u64::MAX, 7), row(3, 5, u64::MAX, 6));
        assert!(growth(&[base], &[now]).eq([row(2, 7, 0, u64::MAX)]));
        assert!(growth(&[], &[now, base]).eq([now, base]));
    }

    #[test]
    fn counters_are_per_cpu_until_they_are_too_large() {
        let layout = |slots, nodes, homes, cpus| {
            let layout = Layout::new(slots, nodes, homes, cpus).unwrap();
            (layout.map(), layout.copies, layout.entries())
        };
        assert_eq!(layout(513, 2, 2, 128), ("CTR", 128, (1026, 1)));
        assert_eq!(layout(1, 1, 1, 1), ("CTR", 1, (1, 1)));
        // 10,001 slots * 8 nodes * 32 bytes = 2.4 MiB for each CPU: 26 of them fit.
        assert_eq!(layout(10_001, 8, 8, 26), ("CTR", 26, (80_008, 1)));
        assert_eq!(layout(10_001, 8, 8, 27), ("CTR_SHARED", 8, (1, 640_064)));
        assert_eq!(layout(10_001, 8, 1, 256), ("CTR_SHARED", 1, (1, 80_008)), "one node has all CPUs");
        // 61 MiB a shard: room for one.
        assert_eq!(layout(10_001, 200, 200, 256), ("CTR_SHARED", 1, (1, 2_000_200)));
        assert_eq!(layout(1_000_000, 8, 8, 256), ("CTR_SHARED", 1, (1, 8_000_000)), "one in any case");
        assert_eq!(Layout::new(u32::MAX, 2, 2, 1), None);
    }
}

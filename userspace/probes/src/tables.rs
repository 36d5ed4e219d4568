//! The maps with counters of the secondary probes, and the meaning of their words.

use std::{borrow::Cow, os::fd::AsFd as _, time::Duration};

use aya::maps::MapData;
use numaward_topology::{HugepageSize, NodeId};

use crate::{
    Activity, MapAccessError, Pages, ScannedPages, Stalls,
    activity::{MatrixColumns, migrated_pages},
    error::ProbeError,
    family::Family,
    hardware, hugepages, sys,
};

/// A map with the counters of a probe.
pub(crate) struct CounterMap {
    name: &'static str,
    map: MapData,
    /// The number of 64-bit words per slot.
    pub(crate) words: usize,
}

impl CounterMap {
    pub(crate) fn new(family: &mut Family, name: &'static str, words: usize) -> Result<Self, ProbeError> {
        Ok(Self { name, map: family.take_data(name)?, words })
    }

    /// Reads the counters of `count` slots from `first` on.
    pub(crate) fn read(&self, first: u32, count: u32) -> Result<Vec<u64>, MapAccessError> {
        let mut values = vec![0; count as usize * self.words];
        sys::add_array(self.map.fd().as_fd(), first as usize * self.words, &mut values)
            .map_err(|source| MapAccessError { map: self.name, action: "read", source })?;
        Ok(values)
    }
}

/// The maps with counters. A map is absent if its probe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CounterTable {
    Access,
    Scan,
    Migrated,
    Stalls,
    OomKills,
    Dram,
    Hugepages,
}

/// The meaning of the words in the maps.
#[derive(Clone, Debug, Default)]
pub(crate) struct CounterLayout {
    pub(crate) nodes: Vec<NodeId>,
    /// The number of nodes for which the maps have room.
    pub(crate) node_capacity: u32,
    pub(crate) columns: MatrixColumns,
    /// True if accesses to local DRAM are counted; `None` without that probe.
    pub(crate) has_local_dram: Option<bool>,
    /// The counted page sizes; `None` without the probe of hugepages.
    pub(crate) hugepage_sizes: Option<Vec<HugepageSize>>,
}

impl CounterLayout {
    pub(crate) fn decode<'a>(
        &self,
        counters: impl Iterator<Item = (CounterTable, Cow<'a, [u64]>)>,
    ) -> Activity {
        let mut activity = Activity::default();
        for (table, words) in counters {
            let words = &*words;
            match table {
                CounterTable::Access => activity.accesses = self.columns.read(&self.nodes, words),
                CounterTable::Scan => {
                    if let &[sampled, excluded] = words {
                        activity.scanned =
                            ScannedPages { sampled: Pages(sampled), excluded: Pages(excluded) };
                    }
                }
                CounterTable::Migrated => {
                    activity.migrated = migrated_pages(&self.nodes, self.node_capacity, words);
                }
                CounterTable::Stalls => {
                    if let Some((&buckets, &[nanoseconds])) = words.split_first_chunk() {
                        activity.stalls = Stalls { buckets, total: Duration::from_nanos(nanoseconds) };
                    }
                }
                CounterTable::Dram => {
                    let read = |has_local| hardware::counters(&self.nodes, has_local, words);
                    activity.dram = self.has_local_dram.map(read).unwrap_or_default();
                }
                CounterTable::Hugepages => {
                    let read = |sizes: &Vec<_>| hugepages::counters(&self.nodes, sizes, words);
                    activity.hugepages = self.hugepage_sizes.as_ref().map(read).unwrap_or_default();
                }
                CounterTable::OomKills => {
                    activity.oom_kills = words.first_chunk().copied().unwrap_or_default();
                }
            }
        }
        activity
    }
}

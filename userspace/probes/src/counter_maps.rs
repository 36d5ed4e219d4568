//! Reads the maps with counters without access to [`Probes`](crate::Probes).
//!
//! # Problem
//! Reading the counters of thousands of workloads takes milliseconds, and far longer on a thread that waits for a CPU.
//! Registering or releasing a workload must not wait for that.
//!
//! # Algorithm
//! Counters only grow, so they can be read at any time. [`CounterMaps`] contains handles of the maps and the holders of
//! the slots at one instant. The counters are decoded with the holders of a later instant: a slot that has another
//! holder by then is ignored. [`Probes::release`](crate::Probes::release) has returned the last counts of its former
//! holder, and its new one has hardly counted anything.

use std::{collections::BTreeMap, sync::Arc};

use aya::maps::{MapData, PerCpuArray};
use numaward_abi::{AllocTotals, OTHER_SLOT, UnattributedCounters};
use numaward_topology::NodeId;

use crate::{
    Activity, AllocationSnapshot, Counters, DutyCycle, MapAccessError, NodeCounters, Pages, SlotMap,
    UnattributedPages,
    activity::growth,
    maps::access_error,
    rows::{self, CounterRows, ROW_WORDS},
    slots::{BaseCounters, SlotHolders},
    tables::{CounterLayout, CounterMap, CounterTable},
};

/// The maps of the allocation probe with counters, and the meaning of their rows.
#[derive(Clone)]
pub(crate) struct AllocMaps {
    pub(crate) rows: Arc<CounterRows>,
    pub(crate) unattributed: Arc<PerCpuArray<MapData, UnattributedCounters>>,
    pub(crate) totals: Arc<PerCpuArray<MapData, AllocTotals>>,
    /// Node ids by node index.
    pub(crate) nodes: Arc<[NodeId]>,
    pub(crate) duty_cycle: Option<DutyCycle>,
}

impl AllocMaps {
    /// Returns the number of all pages: with a duty cycle, an estimate from the counted ones.
    fn scale_by_duty_cycle(&self, counted: u64) -> Pages {
        Pages(self.duty_cycle.map_or(counted, |cycle| cycle.scale(counted)))
    }

    /// Returns the growth since `base`, by node. An empty `base` stands for zeros.
    pub(crate) fn growth_since(&self, base: &[u64], now: &[u64]) -> NodeCounters {
        let grown = growth(base, now);
        let counters = grown.as_chunks::<ROW_WORDS>().0.iter().map(|row| {
            let [user_local, user_remote, user_outside, kernel] =
                row.map(|counted| self.scale_by_duty_cycle(counted));
            Counters { user_local, user_remote, user_outside, kernel }
        });
        self.nodes.iter().copied().zip(counters).collect()
    }

    /// Returns the pages that are booked to no workload, by node.
    fn unattributed(&self) -> Result<Vec<(NodeId, UnattributedPages)>, MapAccessError> {
        let of_node = |(index, &node): (u32, &NodeId)| {
            let per_cpu = self.unattributed.get(&index, 0).map_err(access_error("UNATTRIBUTED", "read"))?;
            let sum = |of: fn(&UnattributedCounters) -> u64| {
                self.scale_by_duty_cycle(per_cpu.iter().map(of).fold(0, u64::wrapping_add))
            };
            Ok((node, UnattributedPages { atomic: sum(|cpu| cpu.atomic), reclaim: sum(|cpu| cpu.reclaim) }))
        };
        (0..).zip(self.nodes.iter()).map(of_node).collect()
    }

    pub(crate) fn totals(&self) -> Result<AllocTotals, MapAccessError> {
        let per_cpu = self.totals.get(&0, 0).map_err(access_error("TOTALS", "read"))?;
        Ok(per_cpu.iter().fold(AllocTotals::default(), |sum, cpu| AllocTotals {
            unknown_node: sum.unknown_node.wrapping_add(cpu.unknown_node),
            resolved: sum.resolved.wrapping_add(cpu.resolved),
            preemptible: sum.preemptible.wrapping_add(cpu.preemptible),
        }))
    }
}

/// Handles of the maps with counters, and the holders of the slots at the time of
/// [`Probes::counter_maps`](crate::Probes::counter_maps).
pub struct CounterMaps {
    pub(crate) alloc: Option<AllocMaps>,
    pub(crate) tables: BTreeMap<CounterTable, Arc<CounterMap>>,
    pub(crate) layout: CounterLayout,
    pub(crate) holders: SlotHolders,
    /// Pages that former holders of slots allocated.
    pub(crate) released: u64,
}

impl CounterMaps {
    /// Reads the counters of allocations; `None` without that probe.
    pub fn allocations(&self) -> Result<Option<AllocationCounters>, MapAccessError> {
        let read = |maps: &AllocMaps| {
            let words = maps.rows.read(OTHER_SLOT, self.holders.used_slots())?;
            Ok(AllocationCounters {
                maps: maps.clone(),
                holders: self.holders.clone(),
                released: self.released,
                words,
                unattributed: maps.unattributed()?,
                unknown_node: maps.totals()?.unknown_node,
            })
        };
        self.alloc.as_ref().map(read).transpose()
    }

    /// Reads the counters of the secondary probes.
    pub fn activity(&self) -> Result<ActivityCounters, MapAccessError> {
        let read = |(&table, map): (&CounterTable, &Arc<CounterMap>)| {
            Ok((table, (map.words, map.read(OTHER_SLOT, self.holders.used_slots())?)))
        };
        let tables = self.tables.iter().map(read).collect::<Result<_, _>>()?;
        Ok(ActivityCounters { layout: self.layout.clone(), holders: self.holders.clone(), tables })
    }
}

/// The undecoded counters of allocations.
pub struct AllocationCounters {
    maps: AllocMaps,
    holders: SlotHolders,
    released: u64,
    words: Vec<u64>,
    unattributed: Vec<(NodeId, UnattributedPages)>,
    unknown_node: u64,
}

impl AllocationCounters {
    /// Returns the pages of each workload that has held its slot since before the counters were read, counted since it
    /// was registered, and those of all other tasks.
    pub fn decode(&self, now: &SlotHolders) -> AllocationSnapshot {
        let held = self.holders.unchanged_in(now);
        let slots =
            held.map(|(slot, base)| (slot, self.maps.growth_since(&base.rows, self.words_of_slot(slot))));
        AllocationSnapshot {
            slots: SlotMap::new(self.holders.used_slots(), slots),
            other: self.maps.growth_since(&[], self.words_of_slot(OTHER_SLOT)),
            unattributed: self.unattributed.clone(),
            unknown_node: self.maps.scale_by_duty_cycle(self.unknown_node),
            total: self.total(),
        }
    }

    fn words_of_slot(&self, slot: u32) -> &[u64] {
        let words = self.maps.rows.layout.words_of_slot();
        let start = slot as usize * words;
        self.words.get(start..start + words).unwrap_or_default()
    }

    /// Returns all pages that the probe has seen; `None` if it is attached for a part of the time only.
    fn total(&self) -> Option<Pages> {
        if self.maps.duty_cycle.is_some() {
            return None;
        }
        let held = self.holders.unchanged_in(&self.holders);
        let slots = held
            .map(|(slot, base)| rows::pages(self.words_of_slot(slot)).wrapping_sub(rows::pages(&base.rows)));
        let unattributed =
            self.unattributed.iter().map(|(_, pages)| pages.atomic.0.wrapping_add(pages.reclaim.0));
        let others = [self.released, self.unknown_node, rows::pages(self.words_of_slot(OTHER_SLOT))];
        Some(Pages(slots.chain(unattributed).chain(others).fold(0, u64::wrapping_add)))
    }
}

/// The undecoded counters of the secondary probes. Decoding takes ten times as long as reading.
#[derive(Debug, Default)]
pub struct ActivityCounters {
    layout: CounterLayout,
    holders: SlotHolders,
    /// The number of 64-bit words per slot, and the counters of all slots.
    tables: BTreeMap<CounterTable, (usize, Vec<u64>)>,
}

impl ActivityCounters {
    /// Returns the activity of each workload that has held its slot since before the counters were read, counted since
    /// it was registered, and that of all other tasks.
    pub fn decode(&self, now: &SlotHolders) -> (SlotMap<Activity>, Activity) {
        let activity = |slot: u32, base: &BaseCounters| {
            let words = self.tables.iter().filter_map(|(&table, (words, counters))| {
                let start = slot as usize * words;
                Some((table, counters.get(start..start + words)?))
            });
            base.decode_activity(&self.layout, words)
        };
        let slots = self.holders.unchanged_in(now).map(|(slot, base)| (slot, activity(slot, base)));
        (SlotMap::new(self.holders.used_slots(), slots), activity(OTHER_SLOT, &BaseCounters::default()))
    }
}

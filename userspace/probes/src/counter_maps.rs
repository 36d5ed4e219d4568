//! The maps that count, read without access to [`Probes`](crate::Probes).
//!
//! # Problem
//! To read the counters of thousands of workloads takes milliseconds, and far longer on a thread that waits for a CPU. A workload that
//! is registered or released must not wait for that.
//!
//! # Algorithm
//! Counters in the maps only grow, so they can be read at any time. [`CounterMaps`] has handles of the maps and the holders of the slots
//! at one instant. Counters that were read are decoded with the holders of a later instant: a slot that changed hands meanwhile is
//! ignored. [`Probes::release`](crate::Probes::release) returned the last counts of its former holder, and its new one has counted next to
//! nothing.

use std::{collections::BTreeMap, sync::Arc};

use aya::maps::{MapData, PerCpuArray};
use numaward_abi::{AllocTotals, OTHER_SLOT};
use numaward_topology::NodeId;

use crate::{
    Activity, AllocationSnapshot, Counters, DutyCycle, MapAccessError, NodeCounters, Pages, SlotMap,
    activity::growth,
    maps::access,
    rows::{ROW_WORDS, Rows},
    slots::{Base, SlotHolders},
    tables::{CounterTable, Layout, Table},
};

/// The maps of the probe of allocations that count, and the meaning of their rows.
#[derive(Clone)]
pub(crate) struct AllocMaps {
    pub(crate) rows: Arc<Rows>,
    pub(crate) totals: Arc<PerCpuArray<MapData, AllocTotals>>,
    /// By node index.
    pub(crate) nodes: Arc<[NodeId]>,
    pub(crate) duty_cycle: Option<DutyCycle>,
}

impl AllocMaps {
    /// All pages, by those that were counted: on a duty cycle, an estimate.
    fn all_of(&self, counted: u64) -> Pages {
        Pages(self.duty_cycle.map_or(counted, |cycle| cycle.scale(counted)))
    }

    /// What was counted since `base`, by node. An empty `base` is all zero.
    pub(crate) fn since(&self, base: &[u64], now: &[u64]) -> NodeCounters {
        let grown = growth(base, now);
        let counters = grown.as_chunks::<ROW_WORDS>().0.iter().map(|row| {
            let [user_local, user_remote, user_outside, kernel] = row.map(|counted| self.all_of(counted));
            Counters { user_local, user_remote, user_outside, kernel }
        });
        self.nodes.iter().copied().zip(counters).collect()
    }

    pub(crate) fn totals(&self) -> Result<AllocTotals, MapAccessError> {
        let per_cpu = self.totals.get(&0, 0).map_err(access("TOTALS", "read"))?;
        Ok(per_cpu.iter().fold(AllocTotals::default(), |sum, cpu| AllocTotals {
            unknown_node: sum.unknown_node.wrapping_add(cpu.unknown_node),
            resolved: sum.resolved.wrapping_add(cpu.resolved),
            preemptible: sum.preemptible.wrapping_add(cpu.preemptible),
        }))
    }
}

/// Handles of the maps that count, and the holders of the slots when [`Probes::counter_maps`](crate::Probes::counter_maps) was called.
pub struct CounterMaps {
    pub(crate) alloc: Option<AllocMaps>,
    pub(crate) tables: BTreeMap<CounterTable, Arc<Table>>,
    pub(crate) layout: Layout,
    pub(crate) holders: SlotHolders,
}

impl CounterMaps {
    /// Reads the counters of allocations; `None` without that probe.
    pub fn allocations(&self) -> Result<Option<AllocationCounters>, MapAccessError> {
        let read = |maps: &AllocMaps| {
            let words = maps.rows.read(OTHER_SLOT, self.holders.in_use_up_to())?;
            let unknown_node = maps.totals()?.unknown_node;
            Ok(AllocationCounters { maps: maps.clone(), holders: self.holders.clone(), words, unknown_node })
        };
        self.alloc.as_ref().map(read).transpose()
    }

    /// Reads the counters of all other probes.
    pub fn activity(&self) -> Result<ActivityCounters, MapAccessError> {
        let read = |(&of, table): (&CounterTable, &Arc<Table>)| {
            Ok((of, (table.words, table.read(OTHER_SLOT, self.holders.in_use_up_to())?)))
        };
        let tables = self.tables.iter().map(read).collect::<Result<_, _>>()?;
        Ok(ActivityCounters { layout: self.layout.clone(), holders: self.holders.clone(), tables })
    }
}

/// The counters of allocations, as the kernel has them.
pub struct AllocationCounters {
    maps: AllocMaps,
    holders: SlotHolders,
    words: Vec<u64>,
    unknown_node: u64,
}

impl AllocationCounters {
    /// The pages of each workload that held its slot before they were read and still does, since it was registered, and of all else.
    pub fn decode(&self, now: &SlotHolders) -> AllocationSnapshot {
        let of = |slot: u32| {
            let words = self.maps.rows.layout.words_of_slot();
            let start = slot as usize * words;
            self.words.get(start..start + words).unwrap_or_default()
        };
        let held = self.holders.also_in(now);
        let slots = held.map(|(slot, base)| (slot, self.maps.since(&base.rows, of(slot))));
        AllocationSnapshot {
            slots: SlotMap::new(self.holders.in_use_up_to(), slots),
            other: self.maps.since(&[], of(OTHER_SLOT)),
            unknown_node: self.maps.all_of(self.unknown_node),
        }
    }
}

/// The counters of all probes but that of allocations, as the kernel has them. To decode them takes ten times as long as to read them.
#[derive(Debug, Default)]
pub struct ActivityCounters {
    layout: Layout,
    holders: SlotHolders,
    /// 64-bit numbers of a slot, and the counters of all slots.
    tables: BTreeMap<CounterTable, (usize, Vec<u64>)>,
}

impl ActivityCounters {
    /// The activity of each workload that held its slot before they were read and still does, since it was registered, and of all else.
    pub fn decode(&self, now: &SlotHolders) -> (SlotMap<Activity>, Activity) {
        let of = |slot: u32, base: &Base| {
            let words = self.tables.iter().filter_map(|(&of, (words, counters))| {
                let start = slot as usize * words;
                Some((of, counters.get(start..start + words)?))
            });
            base.decode_activity(&self.layout, words)
        };
        let slots = self.holders.also_in(now).map(|(slot, base)| (slot, of(slot, base)));
        (SlotMap::new(self.holders.in_use_up_to(), slots), of(OTHER_SLOT, &Base::default()))
    }
}

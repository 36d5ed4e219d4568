//! Table of workloads and their counters.
//!
//! # Problem
//! Probes count per slot. Slots are fewer than workloads and are reused, and cgroups are created and removed.
//! Nevertheless, a counter that is served must never decrease, and the sum of all counters must never lose a page.
//!
//! # Terms
//! - *member*: a workload, identified by its cgroup. It holds a *slot* or waits for one.
//! - *name*: label under which members are served as one series (see [`crate::naming`]), for example all containers
//!   of Docker.
//! - *base*: counts that former members of a name had when they released their slots.
//! - *gone*: counts of names that are no longer listed.
//! - `other`: counts of the probes outside all slots.
//!
//! # Algorithm
//! Slots are assigned in the order in which members were found, parents before children. A member without a slot
//! waits, and the one that has waited longest gets the next free slot, unless another is preferred (see
//! [`crate::slot_policy`]). A member waits again after its slot is revoked. The counter of a name is its base plus the
//! slots of its members. After the last member is removed, the name is listed for a while so that its last values are
//! scraped. Then its base is added to *gone*, which counts in the totals but is served under no name. It is not added
//! to `other`, which must not jump when a name is removed.
//!
//! # Invariants
//! - While a name is listed, its counters do not decrease.
//! - The sum of all names, `other` and *gone* never decreases.
//! - Counters saturate at 64 bits.
//!
//! This module does no I/O and reads no clock: the caller passes counts and times.

use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    iter,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use numaward_cgroup::{CgroupId, CgroupPath, ContainerIdentity, WorkloadKind};
use numaward_model::snapshot::{PressureFigures, ResidentFigures, ResidentHugepages, TieringFigures};
use numaward_probes::{Activity, NodeCounters};
use numaward_topology::Bytes;

use crate::small_map::SmallMap;

/// All workloads, with slots of type `S`.
#[derive(Clone, Debug)]
pub(crate) struct Table<S> {
    /// Shared with copies of the table that are being read.
    series: BTreeMap<Arc<str>, Arc<Series<S>>>,
    /// Name under which each cgroup is served.
    names: BTreeMap<CgroupId, Arc<str>>,
    waiting: VecDeque<CgroupId>,
    /// Allocations counted under names that are no longer listed.
    gone: NodeCounters,
    /// Other activity counted under these names.
    pub(crate) gone_activity: Activity,
}

/// Counters and members of a name.
#[derive(Clone, Debug)]
pub(crate) struct Series<S> {
    pub(crate) members: SmallMap<CgroupId, Member<S>>,
    /// Kind of the member that was added last.
    pub(crate) kind: WorkloadKind,
    base: NodeCounters,
    /// Other activity of former members. Absent for most names.
    pub(crate) base_activity: Option<Box<Activity>>,
    base_pressure_stats: PressureStats,
    /// Time at which the counters of this name started at zero.
    pub(crate) start: SystemTime,
    /// True if a member ever held a slot; otherwise there are no counters to serve.
    counted: bool,
    removed: Option<Instant>,
}

/// A workload.
#[derive(Clone, Debug)]
pub(crate) struct Member<S> {
    pub(crate) path: CgroupPath,
    pub(crate) kind: WorkloadKind,
    pub(crate) container: Option<ContainerIdentity>,
    pub(crate) slot: Option<S>,
    pub(crate) resident: Option<Arc<[ResidentFigures]>>,
    pub(crate) hugepages: Arc<ResidentHugepages>,
    pub(crate) pressure_stats: PressureStats,
}

/// Readings of a cgroup's files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Readings {
    pub(crate) resident: Option<Arc<[ResidentFigures]>>,
    pub(crate) hugepages: Arc<ResidentHugepages>,
    pub(crate) pressure_stats: PressureStats,
}

/// Memory pressure, kills and tiering of a cgroup; unreadable parts are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PressureStats {
    pub(crate) pressure: Option<PressureFigures>,
    pub(crate) oom_kills: Option<u64>,
    /// Absent unless the machine has several memory tiers.
    pub(crate) tiering: Option<TieringFigures>,
}

impl<S> Default for Table<S> {
    fn default() -> Self {
        let (series, names) = (BTreeMap::new(), BTreeMap::new());
        let (gone, gone_activity) = (NodeCounters::new(), Activity::default());
        Self { series, names, waiting: VecDeque::new(), gone, gone_activity }
    }
}

impl<S> Member<S> {
    /// Creates a member without a slot or readings.
    pub(crate) fn new(path: CgroupPath, kind: WorkloadKind, container: Option<ContainerIdentity>) -> Self {
        let (resident, hugepages, pressure_stats) = Default::default();
        Self { path, kind, container, slot: None, resident, hugepages, pressure_stats }
    }

    /// Returns the resident memory on all nodes, hugepages included; `None` if it was not read.
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        let resident =
            self.resident.as_deref().map(|nodes| nodes.iter().flat_map(|of| [of.anon, of.file, of.kernel]));
        let hugepages = self.hugepages.values().flatten().copied();
        let sum = |bytes: u64, more: Bytes| bytes.saturating_add(more.0);
        Some(resident?.chain(hugepages).fold(0, sum))
    }
}

impl<S: Copy + Eq> Table<S> {
    fn series_mut(&mut self, id: CgroupId) -> Option<&mut Series<S>> {
        self.series.get_mut(self.names.get(&id)?).map(Arc::make_mut)
    }

    /// Adds a workload, which then waits for a slot. Does nothing if it is already known.
    pub(crate) fn add(&mut self, id: CgroupId, name: &str, member: Member<S>) {
        if self.names.contains_key(&id) {
            return;
        }
        let known = self.series.get_key_value(name);
        let name = known.map_or_else(|| Arc::from(name), |(name, _)| name.clone());
        let kind = member.kind;
        let series = self.series.entry(name.clone()).or_insert_with(|| {
            Arc::new(Series {
                members: SmallMap::new(),
                kind,
                base: NodeCounters::new(),
                base_activity: None,
                base_pressure_stats: PressureStats::default(),
                start: SystemTime::now(),
                counted: false,
                removed: None,
            })
        });
        let series = Arc::make_mut(series);
        series.kind = member.kind;
        series.removed = None;
        series.members.insert(id, member);
        self.names.insert(id, name);
        self.waiting.push_back(id);
    }

    /// Returns the cgroup that gets the next slot.
    pub(crate) fn next_waiting(&self) -> Option<CgroupId> {
        self.waiting.front().copied()
    }

    /// Returns the waiting cgroups in the order in which they get slots.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = CgroupId> {
        self.waiting.iter().copied()
    }

    /// Moves a waiting cgroup to the front of the queue.
    pub(crate) fn prefer(&mut self, id: CgroupId) {
        if let Some(place) = self.waiting.iter().position(|&waiting| waiting == id) {
            self.waiting.remove(place);
            self.waiting.push_front(id);
        }
    }

    /// Keeps the activity that was counted in a slot which its cgroup is about to release.
    pub(crate) fn keep_activity(&mut self, id: CgroupId, last: &Activity) {
        if let Some(series) = self.series_mut(id) {
            series.base_activity.get_or_insert_default().add(last);
        }
    }

    /// Keeps the allocations counted in a revoked slot; its cgroup waits for another one.
    pub(crate) fn suspend(&mut self, id: CgroupId, counted: &NodeCounters) {
        let Some(series) = self.series_mut(id) else { return };
        let Some(member) = series.members.get_mut(&id) else { return };
        if member.slot.take().is_some() {
            series.base.add(counted);
            self.waiting.push_back(id);
        }
    }

    /// Assigns the slot to the first waiting cgroup. `None` removes it from the queue without a slot.
    pub(crate) fn assign_slot(&mut self, slot: Option<S>) {
        let Some(id) = self.waiting.pop_front() else { return };
        if let (Some(series), Some(slot)) = (self.series_mut(id), slot)
            && let Some(member) = series.members.get_mut(&id)
        {
            member.slot = Some(slot);
            series.counted = true;
        }
    }

    pub(crate) fn name(&self, id: CgroupId) -> Option<&Arc<str>> {
        self.names.get(&id)
    }

    /// Returns true if a name is listed.
    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.series.contains_key(name)
    }

    /// Returns the name of the workload with this slot.
    pub(crate) fn name_of_slot(&self, slot: S) -> Option<&Arc<str>> {
        let (id, _) = self.members().find(|(_, member)| member.slot == Some(slot))?;
        self.name(id)
    }

    pub(crate) fn member(&self, id: CgroupId) -> Option<&Member<S>> {
        self.series.get(self.names.get(&id)?)?.members.get(&id)
    }

    pub(crate) fn slot(&self, id: CgroupId) -> Option<S> {
        self.member(id)?.slot
    }

    /// Removes a cgroup; `counted` are the allocations that its released slot had counted.
    pub(crate) fn remove(&mut self, id: CgroupId, counted: &NodeCounters, now: Instant) {
        let Some(name) = self.names.remove(&id) else { return };
        self.waiting.retain(|&waiting| waiting != id);
        let Some(series) = self.series.get_mut(&name).map(Arc::make_mut) else { return };
        series.base.add(counted);
        if let Some(member) = series.members.remove(&id) {
            series.base_pressure_stats = series.base_pressure_stats.plus(member.pressure_stats);
        }
        if series.members.is_empty() {
            series.removed = Some(now);
        }
    }

    /// Removes names without a member for `keep`.
    pub(crate) fn expire(&mut self, now: Instant, keep: Duration) {
        let (gone, gone_activity) = (&mut self.gone, &mut self.gone_activity);
        self.series.retain(|_, series| {
            let expired = series.has_expired(now, keep);
            if expired {
                gone.add(&series.base);
                series.base_activity.iter().for_each(|base| gone_activity.add(base));
            }
            !expired
        });
    }

    /// Returns whether a name has expired.
    pub(crate) fn has_expired(&self, now: Instant, keep: Duration) -> bool {
        self.series.values().any(|series| series.has_expired(now, keep))
    }

    /// Returns all series by name.
    pub(crate) fn series(&self) -> impl Iterator<Item = (&Arc<str>, &Series<S>)> {
        self.series.iter().map(|(name, series)| (name, &**series))
    }

    /// Returns all existing workloads.
    pub(crate) fn members(&self) -> impl Iterator<Item = (CgroupId, &Member<S>)> {
        self.series.values().flat_map(|series| series.members.iter()).map(|(&id, member)| (id, member))
    }

    /// Stores the readings of a cgroup, unless it has been removed meanwhile.
    pub(crate) fn store_readings(&mut self, id: CgroupId, read: Readings) {
        if let Some(member) = self.series_mut(id).and_then(|series| series.members.get_mut(&id)) {
            let pressure_stats = read.pressure_stats;
            (member.resident, member.hugepages) = (read.resident, read.hugepages);
            // A failed reading does not reset the previous value.
            member.pressure_stats = PressureStats {
                pressure: pressure_stats.pressure.or(member.pressure_stats.pressure),
                oom_kills: pressure_stats.oom_kills.or(member.pressure_stats.oom_kills),
                tiering: pressure_stats.tiering.or(member.pressure_stats.tiering),
            };
        }
    }

    /// Clears the resident memory of each workload until it is read again.
    pub(crate) fn clear_resident(&mut self) {
        for member in self.series.values_mut().flat_map(|series| Arc::make_mut(series).members.values_mut()) {
            (member.resident, member.hugepages) = Default::default();
        }
    }

    /// Returns the allocations of all workloads since the start, including removed ones: in these slots, and outside
    /// of all slots.
    pub(crate) fn sum<'a>(
        &'a self,
        of_slot: impl Fn(S) -> Option<&'a NodeCounters>,
        unslotted: &NodeCounters,
    ) -> NodeCounters {
        let mut sum = unslotted.clone();
        sum.add(&self.gone);
        self.series.values().flat_map(|series| series.counted_parts(&of_slot)).for_each(|part| sum.add(part));
        sum
    }

    /// Returns the numbers of workloads with and without a slot.
    pub(crate) fn slots(&self) -> (u64, u64) {
        self.members().fold((0, 0), |(with, without), (_, member)| match member.slot {
            Some(_) => (with + 1, without),
            None => (with, without + 1),
        })
    }
}

impl<S> Series<S> {
    /// Returns whether all members have been gone for `keep`.
    fn has_expired(&self, now: Instant, keep: Duration) -> bool {
        self.removed.is_some_and(|removed| now.duration_since(removed) >= keep)
    }
}

/// Returns the sum of the parts. It borrows a part if the other parts are empty, as for workloads with a single
/// member.
fn sum<'a, T: Clone + Default>(
    parts: impl Iterator<Item = &'a T>,
    is_empty: impl Fn(&T) -> bool,
    add: impl Fn(&mut T, &T),
) -> Cow<'a, T> {
    let mut parts = parts.filter(|part| !is_empty(part));
    let Some(first) = parts.next() else { return Cow::Owned(T::default()) };
    parts.fold(Cow::Borrowed(first), |mut sum, part| {
        add(sum.to_mut(), part);
        sum
    })
}

impl<S: Copy> Series<S> {
    /// Returns the allocations counted under this name; `None` if no member ever had a slot.
    pub(crate) fn counters<'a>(
        &'a self,
        of_slot: impl Fn(S) -> Option<&'a NodeCounters>,
    ) -> Option<Cow<'a, NodeCounters>> {
        self.counted.then(|| sum(self.counted_parts(of_slot), NodeCounters::is_empty, NodeCounters::add))
    }

    /// Returns the summands of the allocations counted under this name.
    fn counted_parts<'a>(
        &'a self,
        of_slot: impl Fn(S) -> Option<&'a NodeCounters>,
    ) -> impl Iterator<Item = &'a NodeCounters> {
        let held = self.members.values().filter_map(move |member| of_slot(member.slot?));
        iter::once(&self.base).chain(held)
    }

    /// Returns the activity other than allocations counted under this name.
    pub(crate) fn activity<'a>(&'a self, of_slot: impl Fn(S) -> Option<&'a Activity>) -> Cow<'a, Activity> {
        let held = self.members.values().filter_map(|member| of_slot(member.slot?));
        let parts = self.base_activity.as_deref().into_iter().chain(held);
        sum(parts, |_| false, Activity::add)
    }

    /// Returns the resident memory by node; `None` if no member could be read.
    pub(crate) fn resident(&self) -> Option<Arc<[ResidentFigures]>> {
        let mut read = self.members.values().filter_map(|member| member.resident.as_ref());
        let first = read.next()?;
        let Some(second) = read.next() else { return Some(first.clone()) };
        let mut sum = first.to_vec();
        for other in iter::once(second).chain(read) {
            for (sum, other) in sum.iter_mut().zip(other.iter()) {
                *sum = sum.plus(*other);
            }
        }
        Some(sum.into())
    }

    /// Returns the memory pressure and kills since the name was first seen.
    pub(crate) fn pressure_stats(&self) -> PressureStats {
        self.members.values().fold(self.base_pressure_stats, |sum, member| sum.plus(member.pressure_stats))
    }
}

impl PressureStats {
    fn plus(self, other: Self) -> Self {
        let pressure = self.pressure.zip(other.pressure).map(|(a, b)| PressureFigures {
            waiting: a.waiting.saturating_add(b.waiting),
            stalled: a.stalled.saturating_add(b.stalled),
        });
        let oom_kills = self.oom_kills.zip(other.oom_kills).map(|(a, b)| a.saturating_add(b));
        let tiering = self.tiering.zip(other.tiering).map(|(a, b)| a.plus(b));
        Self {
            pressure: pressure.or(self.pressure).or(other.pressure),
            oom_kills: oom_kills.or(self.oom_kills).or(other.oom_kills),
            tiering: tiering.or(self.tiering).or(other.tiering),
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_probes::{Counters, Pages};
    use numaward_topology::{Bytes, HugepageSize, NodeId};

    use super::*;

    const HUGE: HugepageSize = HugepageSize(Bytes::mib(2));

    const KEEP: Duration = Duration::from_mins(1);

    /// A table with simulated probes: slots are numbers, counters are pages on node 0.
    struct TableBench {
        table: Table<u32>,
        slots: BTreeMap<u32, NodeCounters>,
        unslotted: NodeCounters,
        start: Instant,
        /// Latest total of all counters.
        served: u64,
    }

    fn pages(count: u64) -> NodeCounters {
        NodeCounters::from_iter([(NodeId(0), Counters { user_local: Pages(count), ..Counters::default() })])
    }

    fn count(counters: &NodeCounters) -> u64 {
        counters.get(NodeId(0)).map_or(0, |counters| counters.user_local.0)
    }

    impl TableBench {
        fn new() -> Self {
            let (slots, unslotted) = (BTreeMap::new(), pages(0));
            Self { table: Table::default(), slots, unslotted, start: Instant::now(), served: 0 }
        }

        fn add(&mut self, id: u64, name: &str) {
            let path = format!("/{name}-{id}").parse().unwrap();
            self.table.add(CgroupId(id), name, Member::new(path, WorkloadKind::Unit, None));
        }

        /// Assigns a slot with a new counter to the first waiting cgroup.
        fn give(&mut self, slot: u32) -> u64 {
            let id = self.table.next_waiting().unwrap();
            self.slots.insert(slot, pages(0));
            self.table.assign_slot(Some(slot));
            id.0
        }

        fn allocate(&mut self, slot: u32, more: u64) {
            self.slots.get_mut(&slot).unwrap().add(&pages(more));
        }

        fn remove(&mut self, id: u64, after_seconds: u64) {
            let counted = self.table.slot(CgroupId(id)).and_then(|slot| self.slots.remove(&slot));
            let now = self.start + Duration::from_secs(after_seconds);
            self.table.remove(CgroupId(id), &counted.unwrap_or_default(), now);
        }

        fn expire(&mut self, after_seconds: u64) {
            self.table.expire(self.start + Duration::from_secs(after_seconds), KEEP);
        }

        /// Returns all series and `other`. Checks that the total did not decrease.
        fn served(&mut self) -> Vec<(String, Option<u64>)> {
            let mut served: Vec<_> = self
                .table
                .series()
                .map(|(name, series)| {
                    (name.to_string(), series.counters(|slot| self.slots.get(&slot)).as_deref().map(count))
                })
                .collect();
            served.push(("other".to_owned(), Some(count(&self.unslotted))));
            let sum = count(&self.table.sum(|slot| self.slots.get(&slot), &self.unslotted));
            assert!(sum >= self.served, "{sum} < {}: {served:?}", self.served);
            self.served = sum;
            served
        }

        fn expect(&mut self, expected: &[(&str, Option<u64>)]) {
            let expected: Vec<_> = expected.iter().map(|&(name, count)| (name.to_owned(), count)).collect();
            assert_eq!(self.served(), expected);
        }
    }

    #[test]
    fn returning_workload_continues_counting() {
        let mut host = TableBench::new();
        host.add(1, "a");
        host.expect(&[("a", None), ("other", Some(0))]);
        host.give(7);
        host.allocate(7, 10);
        host.expect(&[("a", Some(10)), ("other", Some(0))]);
        host.remove(1, 0);
        host.expect(&[("a", Some(10)), ("other", Some(0))]);
        // Another cgroup of the same name, with the same slot.
        host.add(2, "a");
        host.give(7);
        host.allocate(7, 5);
        host.expire(1000);
        host.expect(&[("a", Some(15)), ("other", Some(0))]);
    }

    #[test]
    fn expired_workload_counts_in_total() {
        let mut host = TableBench::new();
        host.add(1, "a");
        host.give(0);
        host.allocate(0, 10);
        host.remove(1, 100);
        host.expire(159);
        host.expect(&[("a", Some(10)), ("other", Some(0))]);
        host.expire(160);
        host.expect(&[("other", Some(0))]);
        host.unslotted = pages(3);
        host.expect(&[("other", Some(3))]);
    }

    #[test]
    fn slots_go_to_longest_waiting() {
        let mut host = TableBench::new();
        for (id, name) in [(1, "a"), (2, "b"), (3, "c"), (4, "d")] {
            host.add(id, name);
        }
        assert_eq!(host.give(0), 1);
        assert_eq!(host.table.slots(), (1, 3));
        host.remove(2, 0);
        host.remove(1, 0);
        assert_eq!(host.give(0), 3, "2 is gone");
        host.table.assign_slot(None);
        assert_eq!(host.table.next_waiting(), None);
        assert_eq!(host.table.slots(), (1, 1), "4 never gets one");
        host.allocate(0, 1);
        host.expect(&[("a", Some(0)), ("b", None), ("c", Some(1)), ("d", None), ("other", Some(0))]);
    }

    #[test]
    fn revoked_slot_keeps_its_counts() {
        let mut host = TableBench::new();
        for (id, name) in [(1, "a"), (2, "b"), (3, "c")] {
            host.add(id, name);
        }
        host.give(0);
        host.allocate(0, 10);
        let counted = host.slots.remove(&0).unwrap();
        host.table.suspend(CgroupId(1), &counted);
        host.table.suspend(CgroupId(1), &counted);
        host.table.prefer(CgroupId(3));
        host.table.prefer(CgroupId(7));
        assert_eq!(host.table.waiting().map(|id| id.0).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(host.give(0), 3);
        host.allocate(0, 5);
        host.unslotted = pages(2);
        host.expect(&[("a", Some(10)), ("b", None), ("c", Some(5)), ("other", Some(2))]);
        assert_eq!(host.table.slots(), (1, 2));
        // It gets one again, and goes on.
        host.give(1);
        assert_eq!(host.give(2), 1);
        host.allocate(2, 1);
        host.expect(&[("a", Some(11)), ("b", Some(0)), ("c", Some(5)), ("other", Some(2))]);
    }

    #[test]
    fn members_of_a_name_are_summed() {
        let mut host = TableBench::new();
        host.add(1, "docker");
        host.add(2, "docker");
        host.give(0);
        host.give(1);
        host.allocate(0, 10);
        host.allocate(1, 20);
        host.expect(&[("docker", Some(30)), ("other", Some(0))]);
        host.remove(1, 0);
        host.expire(1000);
        host.expect(&[("docker", Some(30)), ("other", Some(0))]);
        let lies = |anon| Some([ResidentFigures { anon: Bytes(anon), ..ResidentFigures::default() }].into());
        let read = |figure| Readings {
            resident: lies(figure),
            hugepages: Arc::new([(HUGE, vec![Bytes(figure)])].into()),
            pressure_stats: PressureStats {
                oom_kills: Some(figure),
                tiering: Some(TieringFigures { demoted: Bytes(figure), promoted: Bytes(0) }),
                pressure: None,
            },
        };
        host.add(3, "docker");
        host.table.store_readings(CgroupId(2), read(1));
        host.table.store_readings(CgroupId(3), read(2));
        host.table.store_readings(CgroupId(1), read(4));
        let (_, series) = host.table.series().next().unwrap();
        assert_eq!(series.resident(), lies(3), "1 is gone");
        assert_eq!(series.hugepages()[&HUGE], [Bytes(3)]);
        assert_eq!(series.pressure_stats().oom_kills, Some(3));
        assert_eq!(series.pressure_stats().tiering.map(|of| of.demoted), Some(Bytes(3)));
        host.remove(3, 0);
        let (_, series) = host.table.series().next().unwrap();
        assert_eq!(series.resident(), lies(1));
        assert_eq!(series.pressure_stats().oom_kills, Some(3), "what was counted stays counted");
    }

    #[test]
    fn add_and_remove_are_idempotent() {
        let mut host = TableBench::new();
        host.add(1, "a");
        host.give(0);
        host.add(1, "a");
        assert_eq!(host.table.next_waiting(), None);
        host.allocate(0, 10);
        host.remove(1, 0);
        host.remove(1, 0);
        host.expect(&[("a", Some(10)), ("other", Some(0))]);
    }

    #[test]
    fn total_never_decreases() {
        // A fixed sequence of pseudo-random steps over few workloads and fewer slots.
        let mut host = TableBench::new();
        let mut free: Vec<u32> = (0..3).collect();
        let mut seed = 1_u64;
        for step in 0..5000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (action, id) = (seed >> 60, seed >> 33 & 7);
            match action {
                0..4 => host.add(id, ["a", "b", "c"][(id % 3) as usize]),
                4..7 => {
                    free.extend(host.table.slot(CgroupId(id)));
                    host.remove(id, step);
                }
                7..12 => {
                    if let Some(&slot) = host.slots.keys().nth((id % 3) as usize) {
                        host.allocate(slot, id);
                    }
                }
                12 => host.unslotted = pages(count(&host.unslotted) + id),
                13 => {
                    let slot = host.table.slot(CgroupId(id));
                    if let Some(counted) = slot.and_then(|slot| host.slots.remove(&slot)) {
                        host.table.suspend(CgroupId(id), &counted);
                        free.extend(slot);
                    }
                }
                _ => host.expire(step),
            }
            while host.table.next_waiting().is_some()
                && let Some(slot) = free.pop()
            {
                host.give(slot);
            }
            host.served();
        }
        assert!(host.served > 0);
    }
}

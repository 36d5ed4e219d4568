//! CPU time of workloads by the node of the CPU.
//!
//! # Source
//! The kernel's own account by cgroup and CPU (`numaward_probes::CpuTimeReader`). It is read when a client asks for it, and
//! once more when a cgroup is removed. Nothing runs in between.
//!
//! # Algorithm
//! The account of a cgroup excludes its descendants, so each cgroup is read by itself. Its growth since its last
//! reading is added to the workload to which its nearest ancestor (or itself) belongs at that time. A cgroup that exists
//! when the daemon starts begins at its present account, and one that is created later at zero.
//!
//! The reader has room for a limited number of cgroups. Further ones wait for room, and begin at their account of that
//! time. The limits of the followed hierarchy bound their number.
//!
//! A cgroup that is removed before its directory could be opened is not counted.
//!
//! # Invariants
//! - While a name is listed, its time does not decrease.
//! - Threads of the root cgroup, such as kernel threads, count for no workload: the kernel keeps no account of it.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::Arc,
    time::Duration,
};

use numaward_cgroup::{Cgroup, CgroupEvent, CgroupId, CgroupPath, Hierarchy};
use numaward_model::error_chain;
use numaward_probes::{CgroupPlace, CpuTimeError, CpuTimeReader, SlotId};
use numaward_topology::{CpuSet, Machine, NodeId};
use parking_lot::Mutex;

use crate::{
    part::{DaemonPart, Health},
    table::Table,
};

/// Nanoseconds by node, in the order of [`CpuNodes::nodes`]. Missing nodes have none.
type NodeTimes = Vec<u64>;

/// A reader of the kernel's account.
pub(crate) trait AccountReader {
    type Place;
    fn locate(&mut self, cpus: &CpuSet);
    fn add(&mut self, directory: &File) -> Result<Self::Place, CpuTimeError>;
    fn read(&mut self, place: &Self::Place) -> Result<Vec<u64>, CpuTimeError>;
    fn remove(&mut self, place: Self::Place) -> Result<(), CpuTimeError>;
}

/// The CPU time of all workloads.
pub(crate) struct CpuTimes<R: AccountReader = CpuTimeReader>(Mutex<CpuTimeState<R>>);

struct CpuTimeState<R: AccountReader> {
    /// Absent if the kernel's account cannot be read.
    reader: Option<R>,
    places: BTreeMap<CgroupId, R::Place>,
    /// Cgroups that wait for room.
    unread: BTreeMap<CgroupId, CgroupPath>,
    nodes: CpuNodes,
    account: CpuAccount,
    /// True once the cgroups that existed at the start are known.
    has_listed: bool,
    /// The reason why some cgroups are not read.
    failure: Option<String>,
}

/// The CPU time of all workloads at one time.
#[derive(Debug, Default)]
pub(crate) struct CpuTimeReading {
    nodes: Vec<NodeId>,
    members: BTreeMap<CgroupId, NodeTimes>,
    names: BTreeMap<Arc<str>, NodeTimes>,
}

/// The nodes of CPUs, including those that went offline.
#[derive(Debug, Default)]
struct CpuNodes {
    cpus: CpuSet,
    nodes: Vec<NodeId>,
    /// Index of the node by CPU.
    index: Vec<Option<usize>>,
}

/// Workloads by the path of their cgroup.
struct Members<'a>(HashMap<&'a CgroupPath, (CgroupId, &'a Arc<str>)>);

/// The account of all cgroups and workloads.
#[derive(Debug, Default)]
struct CpuAccount {
    /// The path and the last reading of each cgroup.
    cgroups: BTreeMap<CgroupId, (CgroupPath, NodeTimes)>,
    /// The name of each workload, and its time under this name.
    members: BTreeMap<CgroupId, (Arc<str>, NodeTimes)>,
    /// The time of former workloads by name.
    former: BTreeMap<Arc<str>, NodeTimes>,
}

impl AccountReader for CpuTimeReader {
    type Place = CgroupPlace;

    fn locate(&mut self, cpus: &CpuSet) {
        self.locate(cpus);
    }

    fn add(&mut self, directory: &File) -> Result<CgroupPlace, CpuTimeError> {
        self.add(directory)
    }

    fn read(&mut self, place: &CgroupPlace) -> Result<Vec<u64>, CpuTimeError> {
        self.read(place)
    }

    fn remove(&mut self, place: CgroupPlace) -> Result<(), CpuTimeError> {
        self.remove(place)
    }
}

impl<R: AccountReader> CpuTimes<R> {
    pub(crate) fn new(reader: Option<R>, machine: &Machine) -> Self {
        Self(Mutex::new(CpuTimeState::new(reader, machine)))
    }

    /// Handles new and removed cgroups, before the removed ones leave the table.
    pub(crate) fn follow(&self, events: &[CgroupEvent], hierarchy: &Hierarchy, table: &Table<SlotId>) {
        if self.0.lock().reader.is_none() {
            return;
        }
        let members = Members::new(table);
        for event in events {
            match event {
                CgroupEvent::Added(cgroup) if cgroup.path.is_root() => {}
                CgroupEvent::Added(cgroup) => {
                    if let Some(directory) = open(&hierarchy.dir(&cgroup.path), cgroup.id) {
                        let mut state = self.0.lock();
                        let is_new = state.has_listed;
                        state.add(cgroup, &directory, is_new);
                    }
                }
                CgroupEvent::Removed(cgroup) => self.0.lock().remove(cgroup.id, &members),
            }
        }
        self.add_unread(hierarchy);
        self.0.lock().has_listed = true;
    }

    /// Adds the cgroups that wait, as far as there is room.
    fn add_unread(&self, hierarchy: &Hierarchy) {
        loop {
            let cgroup = {
                let mut state = self.0.lock();
                let Some((id, path)) = state.unread.pop_first() else {
                    state.failure = None;
                    return;
                };
                Cgroup { id, path }
            };
            if let Some(directory) = open(&hierarchy.dir(&cgroup.path), cgroup.id)
                && !self.0.lock().add(&cgroup, &directory, false)
            {
                return;
            }
        }
    }

    /// Reads the CPU time of all workloads; `None` if the kernel's account cannot be read.
    pub(crate) fn read(
        &self,
        table: &Table<SlotId>,
        machine: &Machine,
        health: &Health,
    ) -> Option<CpuTimeReading> {
        let (reading, failure) = {
            let mut state = self.0.lock();
            state.reader.as_ref()?;
            (state.read(table, machine), state.failure.clone())
        };
        let (reading, noted) = match (reading, failure) {
            (Ok(reading), None) => (Some(reading), Ok(())),
            (Ok(reading), Some(failure)) => (Some(reading), Err(failure)),
            (Err(error), _) => (None, Err(error_chain(&error))),
        };
        health.note(DaemonPart::CpuTimes, noted);
        reading
    }
}

impl<R: AccountReader> CpuTimeState<R> {
    fn new(reader: Option<R>, machine: &Machine) -> Self {
        let mut nodes = CpuNodes::default();
        nodes.follow(machine);
        Self {
            reader,
            places: BTreeMap::new(),
            unread: BTreeMap::new(),
            nodes,
            account: CpuAccount::default(),
            has_listed: false,
            failure: None,
        }
    }

    /// Adds a cgroup. A new one begins at zero, another one at its present account. Returns false if it has to wait for room.
    fn add(&mut self, cgroup: &Cgroup, directory: &File, is_new: bool) -> bool {
        let Some(reader) = &mut self.reader else { return true };
        if self.places.contains_key(&cgroup.id) {
            return true;
        }
        match reader.add(directory) {
            Ok(place) => {
                let known = if is_new { Ok(Vec::new()) } else { reader.read(&place) };
                let known = known.unwrap_or_default();
                self.account.cgroups.insert(cgroup.id, (cgroup.path.clone(), self.nodes.sum(&known)));
                self.places.insert(cgroup.id, place);
            }
            Err(error @ CpuTimeError::TooMany(_)) => {
                self.failure = Some(error.to_string());
                self.unread.insert(cgroup.id, cgroup.path.clone());
                return false;
            }
            // It was removed meanwhile.
            Err(error) => {
                tracing::debug!(cgroup = %cgroup.path, %error, "the CPU time of a cgroup is not read");
            }
        }
        true
    }

    fn remove(&mut self, id: CgroupId, members: &Members<'_>) {
        self.unread.remove(&id);
        let (Some(reader), Some(place)) = (&mut self.reader, self.places.remove(&id)) else { return };
        if let Ok(times) = reader.read(&place) {
            self.account.record(id, self.nodes.sum(&times), members);
        }
        self.account.cgroups.remove(&id);
        if let Err(error) = reader.remove(place) {
            tracing::warn!(
                cgroup = id.0,
                error = error_chain(&error),
                "a removed cgroup is kept by the kernel"
            );
        }
    }

    /// Reads all cgroups. Returns the first error.
    fn read_all(
        &mut self,
        mut record: impl FnMut(&mut CpuAccount, CgroupId, NodeTimes),
    ) -> Result<(), CpuTimeError> {
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let mut result = Ok(());
        for (id, place) in &self.places {
            match reader.read(place) {
                Ok(times) => record(&mut self.account, *id, self.nodes.sum(&times)),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    fn read(&mut self, table: &Table<SlotId>, machine: &Machine) -> Result<CpuTimeReading, CpuTimeError> {
        let members = Members::new(table);
        let result = self.read_all(|account, id, times| account.record(id, times, &members));
        if self.nodes.cpus != machine.cpu_ids() {
            self.nodes.follow(machine);
            if let Some(reader) = &mut self.reader {
                reader.locate(&self.nodes.cpus);
            }
            // The account of a CPU begins when the CPU comes online for the first time.
            self.read_all(CpuAccount::start)?;
        }
        self.account.retire_members(table);
        let nodes = self.nodes.nodes.clone();
        let (members, names) = self.account.totals();
        result.map(|()| CpuTimeReading { nodes, members, names })
    }
}

/// Opens the directory of a cgroup; `None` if it is gone, or belongs to another cgroup by now.
fn open(directory: &Path, id: CgroupId) -> Option<File> {
    let file = File::open(directory).ok()?;
    (file.metadata().ok()?.ino() == id.0).then_some(file)
}

impl CpuTimeReading {
    /// Returns the time of all workloads of a name on a node.
    pub(crate) fn of_name(&self, name: &str, node: NodeId) -> Duration {
        self.on_node(self.names.get(name), node)
    }

    /// Returns the time of a workload on a node.
    pub(crate) fn of_member(&self, id: CgroupId, node: NodeId) -> Duration {
        self.on_node(self.members.get(&id), node)
    }

    fn on_node(&self, times: Option<&NodeTimes>, node: NodeId) -> Duration {
        let index = self.nodes.iter().position(|of| *of == node);
        let found = times.zip(index).and_then(|(times, index)| times.get(index));
        Duration::from_nanos(found.copied().unwrap_or(0))
    }
}

impl CpuNodes {
    fn follow(&mut self, machine: &Machine) {
        self.cpus = machine.cpu_ids();
        for (node, of) in &machine.nodes {
            for cpu in of.cpus.iter() {
                let known = self.nodes.iter().position(|known| known == node);
                let node = known.unwrap_or_else(|| {
                    self.nodes.push(*node);
                    self.nodes.len() - 1
                });
                let cpu = cpu.0 as usize;
                if self.index.len() <= cpu {
                    self.index.resize(cpu + 1, None);
                }
                self.index[cpu] = Some(node);
            }
        }
    }

    /// Sums the times by CPU up.
    fn sum(&self, times: &[u64]) -> NodeTimes {
        let mut sums = vec![0; self.nodes.len()];
        for (time, node) in times.iter().zip(&self.index) {
            if let Some(sum) = node.and_then(|node| sums.get_mut(node)) {
                *sum += time;
            }
        }
        sums
    }
}

impl<'a> Members<'a> {
    fn new(table: &'a Table<SlotId>) -> Self {
        let members = table.members();
        Self(members.filter_map(|(id, member)| Some((&member.path, (id, table.name(id)?)))).collect())
    }

    /// Returns the workload of a cgroup.
    fn member_of(&self, cgroup: &CgroupPath) -> Option<(CgroupId, &'a Arc<str>)> {
        cgroup.ancestors().find_map(|path| self.0.get(&path).copied())
    }
}

impl CpuAccount {
    /// Sets the time from which a cgroup is counted.
    fn start(&mut self, id: CgroupId, times: NodeTimes) {
        if let Some((_, last)) = self.cgroups.get_mut(&id) {
            *last = times;
        }
    }

    /// Adds the time of a cgroup since its last reading to its workload.
    fn record(&mut self, id: CgroupId, times: NodeTimes, members: &Members<'_>) {
        let Some((path, last)) = self.cgroups.get_mut(&id) else { return };
        let before = std::mem::replace(last, times);
        let growth = last.iter().enumerate();
        let growth: NodeTimes =
            growth.map(|(index, now)| now.saturating_sub(before.get(index).copied().unwrap_or(0))).collect();
        if growth.iter().all(|&time| time == 0) {
            return;
        }
        let Some((member, name)) = members.member_of(path) else { return };
        let (held, times) = self.members.entry(member).or_insert_with(|| (name.clone(), Vec::new()));
        if held != name {
            add(self.former.entry(std::mem::replace(held, name.clone())).or_default(), times);
            times.clear();
        }
        add(times, &growth);
    }

    /// Books the time of workloads that are gone, or have another name, to their former name; drops names that are not
    /// listed any more.
    fn retire_members(&mut self, table: &Table<SlotId>) {
        let former = &mut self.former;
        self.members.retain(|id, (name, times)| {
            let is_same = table.name(*id) == Some(name);
            if !is_same {
                add(former.entry(name.clone()).or_default(), times);
            }
            is_same
        });
        self.former.retain(|name, _| table.has_name(name));
    }

    /// Returns the time of each workload and of each name.
    fn totals(&self) -> (BTreeMap<CgroupId, NodeTimes>, BTreeMap<Arc<str>, NodeTimes>) {
        let mut names = self.former.clone();
        for (name, times) in self.members.values() {
            add(names.entry(name.clone()).or_default(), times);
        }
        (self.members.iter().map(|(id, (_, times))| (*id, times.clone())).collect(), names)
    }
}

/// Adds times by node.
fn add(sums: &mut NodeTimes, times: &NodeTimes) {
    if sums.len() < times.len() {
        sums.resize(times.len(), 0);
    }
    for (sum, time) in sums.iter_mut().zip(times) {
        *sum = sum.saturating_add(*time);
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, fs, rc::Rc, time::Instant};

    use numaward_cgroup::WorkloadKind;
    use numaward_probes::NodeCounters;

    use super::*;
    use crate::table::Member;

    struct AccountBench {
        table: Table<SlotId>,
        account: CpuAccount,
    }

    impl AccountBench {
        /// Creates workloads with these names, paths and ids.
        fn new(workloads: &[(&str, &str, u64)]) -> Self {
            let mut bench = Self { table: Table::default(), account: CpuAccount::default() };
            for (name, path, id) in workloads {
                bench.add(name, path, *id);
            }
            bench
        }

        fn add(&mut self, name: &str, path: &str, id: u64) {
            let member = Member::new(path.parse().unwrap(), WorkloadKind::Unit, None);
            self.table.add(CgroupId(id), name, member);
            self.follow(path, id, &[]);
        }

        fn follow(&mut self, path: &str, id: u64, times: &[u64]) {
            self.account.cgroups.insert(CgroupId(id), (path.parse().unwrap(), times.to_vec()));
        }

        fn record(&mut self, id: u64, times: &[u64]) {
            self.account.record(CgroupId(id), times.to_vec(), &Members::new(&self.table));
        }

        /// Returns the time by name.
        fn names(&mut self) -> Vec<(String, Vec<u64>)> {
            self.account.retire_members(&self.table);
            let (_, names) = self.account.totals();
            names.into_iter().map(|(name, times)| (name.to_string(), times)).collect()
        }
    }

    fn entry(name: &str, times: &[u64]) -> (String, Vec<u64>) {
        (name.to_owned(), times.to_vec())
    }

    /// Reader with room for two cgroups, each with the same time on CPU 0.
    #[derive(Default)]
    struct SmallReader {
        used: u32,
        time: Rc<Cell<u64>>,
    }

    impl AccountReader for SmallReader {
        type Place = ();

        fn locate(&mut self, _: &CpuSet) {}

        fn add(&mut self, _: &File) -> Result<(), CpuTimeError> {
            if self.used == 2 {
                return Err(CpuTimeError::TooMany(2));
            }
            self.used += 1;
            Ok(())
        }

        fn read(&mut self, (): &()) -> Result<Vec<u64>, CpuTimeError> {
            Ok(vec![self.time.get()])
        }

        fn remove(&mut self, (): ()) -> Result<(), CpuTimeError> {
            self.used -= 1;
            Ok(())
        }
    }

    #[test]
    fn cgroups_wait_for_room() {
        let (dir, machine) = (tempfile::tempdir().unwrap(), Machine::builder().build().unwrap());
        let (reader, mut table, health) = (SmallReader::default(), Table::default(), Health::default());
        let time = reader.time.clone();
        let times = CpuTimes::new(Some(reader), &machine);
        let hierarchy = Hierarchy::at(dir.path());
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| {
            let directory = dir.path().join(name);
            fs::create_dir(&directory).unwrap();
            let path: CgroupPath = format!("/{name}").parse().unwrap();
            let id = CgroupId(fs::metadata(directory).unwrap().ino());
            table.add(id, name, Member::new(path.clone(), WorkloadKind::Unit, None));
            Cgroup { id, path }
        });
        let names = |events: &[CgroupEvent]| {
            times.follow(events, &hierarchy, &table);
            let reading = times.read(&table, &machine, &health).unwrap();
            let of_name = |name| u64::try_from(reading.of_name(name, NodeId(0)).as_nanos()).unwrap();
            (["a", "b", "c", "d"].map(of_name), !health.degraded().is_empty())
        };
        time.set(100);
        assert_eq!(names(&[&a, &b, &c].map(|of| CgroupEvent::Added(of.clone()))), ([0; 4], true));
        time.set(110);
        assert_eq!(names(&[CgroupEvent::Added(d.clone())]), ([10, 10, 0, 0], true));

        // One of those that wait gets the room, and the other one is gone.
        let gone = if c.id < d.id { &d } else { &c };
        names(&[&a, gone].map(|of| CgroupEvent::Removed(of.clone())));
        time.set(115);
        let (found, is_degraded) = names(&[]);
        assert_eq!((found[1], found[2] + found[3], is_degraded), (15, 5, false), "{found:?}");

        fs::remove_dir_all(dir.path().join("d")).unwrap();
        assert!(names(&[CgroupEvent::Added(a.clone())]).1);
        assert!(!names(&[CgroupEvent::Removed(a)]).1);
    }

    #[test]
    fn nested_cgroups_count_for_nearest_workload() {
        let mut bench = AccountBench::new(&[("outer", "/a", 1), ("inner", "/a/b", 2)]);
        bench.follow("/a/c/d", 3, &[1000, 0]);
        bench.follow("/a/b/c", 4, &[]);
        bench.follow("/elsewhere", 5, &[]);
        for (id, times) in [(1, [1, 2]), (2, [10, 20]), (3, [1300, 400]), (4, [5, 0]), (5, [7, 7])] {
            bench.record(id, &times);
        }
        assert_eq!(bench.names(), [entry("inner", &[15, 20]), entry("outer", &[301, 402])]);
        bench.record(2, &[11, 20]);
        // A node is added.
        bench.record(1, &[1, 2, 3]);
        assert_eq!(bench.names(), [entry("inner", &[16, 20]), entry("outer", &[301, 402, 3])]);
        let (members, _) = bench.account.totals();
        assert_eq!(members[&CgroupId(2)], [16, 20]);
    }

    #[test]
    fn time_of_former_workloads_stays() {
        let mut bench = AccountBench::new(&[("web", "/a", 1), ("web", "/b", 2)]);
        bench.record(1, &[10]);
        bench.record(2, &[20]);
        bench.table.remove(CgroupId(1), &NodeCounters::new(), Instant::now());
        assert_eq!(bench.names(), [entry("web", &[30])]);
        bench.table.remove(CgroupId(2), &NodeCounters::new(), Instant::now());
        assert_eq!(bench.names(), [entry("web", &[30])]);
        bench.table.expire(Instant::now() + Duration::from_secs(2), Duration::from_secs(1));
        assert_eq!(bench.names(), []);
        bench.add("web", "/a", 3);
        bench.record(3, &[1]);
        assert_eq!(bench.names(), [entry("web", &[1])], "its counters start again");
    }

    #[test]
    fn renamed_workload_leaves_its_time() {
        let mut bench = AccountBench::new(&[("old", "/a", 1)]);
        bench.record(1, &[10]);
        bench.table.remove(CgroupId(1), &NodeCounters::new(), Instant::now());
        bench.table.add(CgroupId(1), "new", Member::new("/a".parse().unwrap(), WorkloadKind::Unit, None));
        bench.record(1, &[15]);
        assert_eq!(bench.names(), [entry("new", &[5]), entry("old", &[10])]);
    }

    #[test]
    fn times_are_summed_by_node() {
        let nodes = CpuNodes {
            nodes: vec![NodeId(0), NodeId(4)],
            index: vec![Some(0), Some(1), None, Some(1)],
            ..CpuNodes::default()
        };
        assert_eq!(nodes.sum(&[1, 20, 300, 4000, 50_000]), [1, 4020]);
        assert_eq!(nodes.sum(&[]), [0, 0]);
        let reading = CpuTimeReading {
            nodes: nodes.nodes,
            names: [("a".into(), vec![1, 4020])].into(),
            ..CpuTimeReading::default()
        };
        for (name, node, expected) in [("a", 4, 4020), ("a", 7, 0), ("a", 0, 1), ("b", 0, 0)] {
            let found = reading.of_name(name, NodeId(node));
            assert_eq!(found, Duration::from_nanos(expected), "{name} on node {node}");
        }
    }
}

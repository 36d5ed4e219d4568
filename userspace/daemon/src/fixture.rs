//! A host of plain files, for tests.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use numaward_cgroup::{CgroupPath, Hierarchy};
use numaward_topology::{Bytes, Machine};
use tokio_util::sync::CancellationToken;

use crate::{
    enforce::Enforcer, enforce::Options, events::Report, guarantee::Figures, guarantee::Keeper,
    guarantee::keeper::CgroupEvents, guarantee::keeper::Listener, guarantee::keeper::Promises,
};
use numaward_cgroup::KnobWatch;
use numaward_config::Config;

/// A machine, and all that was told of it.
pub(crate) struct Host {
    pub(crate) machine: Mutex<Arc<Machine>>,
    pub(crate) told: Mutex<Promises>,
    pub(crate) happened: Mutex<Vec<(Option<CgroupPath>, Report)>>,
    pub(crate) tell_cgroups: Mutex<Option<CgroupEvents>>,
}

impl Host {
    /// Four CPUs on each of two nodes; CPU 0 is kept for the system.
    pub(crate) fn small() -> Self {
        let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build();
        Self {
            machine: Mutex::new(Arc::new(machine.unwrap())),
            told: Mutex::default(),
            happened: Mutex::default(),
            tell_cgroups: Mutex::default(),
        }
    }
}

impl Listener for Host {
    fn machine(&self) -> Arc<Machine> {
        self.machine.lock().unwrap().clone()
    }

    fn happened(&self, cgroup: Option<&CgroupPath>, report: Report) {
        self.happened.lock().unwrap().push((cgroup.cloned(), report));
    }

    fn promised(&self, promises: Promises) {
        *self.told.lock().unwrap() = promises;
    }

    fn tell_cgroups(&self, tell: CgroupEvents) {
        *self.tell_cgroups.lock().unwrap() = Some(tell);
    }
}

/// Makes a cgroup with the files that guarantees need; somebody runs in it.
pub(crate) fn cgroup(dir: &Path, machine: &Machine) {
    fs::create_dir_all(dir).unwrap();
    let (cpus, nodes) = (machine.possible_cpus.to_string(), machine.node_ids().to_string());
    for (file, text) in [
        ("cgroup.controllers", "cpuset memory hugetlb"),
        ("cgroup.subtree_control", "cpuset memory hugetlb"),
        ("cgroup.procs", ""),
        ("cgroup.events", "populated 1"),
        ("cpuset.cpus", ""),
        ("cpuset.cpus.effective", &cpus),
        ("cpuset.mems", ""),
        ("cpuset.mems.effective", &nodes),
        ("memory.current", "4096"),
        ("memory.min", "0"),
        ("memory.low", "0"),
        ("memory.high", "max"),
        ("memory.max", "max"),
    ] {
        fs::write(dir.join(file), format!("{text}\n")).unwrap();
    }
}

/// The first line of a file.
pub(crate) fn line(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Writes knobs in the hierarchy at `root`.
pub(crate) fn enforcer(root: &Path, machine: &Machine) -> Enforcer {
    let options = Options::new(machine.possible_cpus.clone(), machine.node_ids());
    Enforcer::new(root.to_owned(), None, options)
}

/// Gives guarantees in the hierarchy at `root`.
pub(crate) fn keeper(
    config: &Config,
    root: &Path,
    listener: Arc<dyn Listener>,
    watch: Option<KnobWatch>,
) -> (Keeper, JoinHandle<()>, CancellationToken) {
    let (hierarchy, stop) = (Hierarchy::at(root), CancellationToken::new());
    let enforcer = enforcer(root, &listener.machine());
    let (keeper, thread) =
        Keeper::start(config, hierarchy, enforcer, listener, Figures::default(), watch, stop.clone())
            .unwrap();
    (keeper, thread, stop)
}

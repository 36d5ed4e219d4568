//! A simulated host of plain files, for tests.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use numaward_cgroup::{CgroupPath, Hierarchy, KnobWatch};
use numaward_config::Config;
use numaward_enforce::{Enforcer, EnforcerOptions, Systemd};
use numaward_guarantee::{ports::Ports, reconciler::ReconcilerHandle, state::State};
use numaward_model::{
    EventReport, Guarantees,
    accesses::WorkloadAccesses,
    headroom::Headroom,
    port::{CgroupListener, ObservedHost},
};
use numaward_store::Store;
use numaward_topology::{Bytes, Machine};
use tokio_util::sync::CancellationToken;

use crate::ControlMetrics;
pub use crate::reconciler::start;

/// Implementation of the ports: a machine, inputs that tests set, and outputs that tests check.
pub struct TestHost {
    pub machine: Mutex<Arc<Machine>>,
    /// The guarantees that were published last.
    pub assigned: Mutex<Guarantees>,
    /// The reported events.
    pub happened: Mutex<Vec<(Option<CgroupPath>, EventReport)>>,
    /// The subscriber for created and removed cgroups.
    pub cgroup_listener: Mutex<Option<CgroupListener>>,
    pub headroom: Mutex<Arc<Headroom>>,
    pub accesses: Mutex<Vec<WorkloadAccesses>>,
}

impl TestHost {
    pub fn new(machine: Machine) -> Self {
        Self {
            machine: Mutex::new(Arc::new(machine)),
            assigned: Mutex::default(),
            happened: Mutex::default(),
            cgroup_listener: Mutex::default(),
            headroom: Mutex::default(),
            accesses: Mutex::default(),
        }
    }

    /// Returns a host with two nodes of four CPUs and 4 GiB each.
    pub fn small() -> Self {
        let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
        Self::new(machine.build().unwrap())
    }
}

impl ObservedHost for TestHost {
    fn machine(&self) -> Arc<Machine> {
        self.machine.lock().unwrap().clone()
    }

    fn headroom(&self) -> Arc<Headroom> {
        self.headroom.lock().unwrap().clone()
    }

    fn accesses(&self) -> Vec<WorkloadAccesses> {
        self.accesses.lock().unwrap().clone()
    }

    fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport) {
        self.happened.lock().unwrap().push((cgroup.cloned(), report));
    }

    fn publish_guarantees(&self, guarantees: Guarantees) {
        *self.assigned.lock().unwrap() = guarantees;
    }

    fn subscribe(&self, listener: CgroupListener) {
        *self.cgroup_listener.lock().unwrap() = Some(listener);
    }

    fn update_containers(&self, _: Vec<(String, String)>, _: bool) {}

    fn remove_container(&self, _: &str) {}
}

/// Creates a populated cgroup with the files that guarantees require.
pub fn cgroup(dir: &Path, machine: &Machine) {
    fs::create_dir_all(dir).unwrap();
    let (cpus, nodes) = (machine.possible_cpus.to_string(), machine.node_ids().to_string());
    for (file, text) in [
        ("cgroup.controllers", "cpu cpuset memory hugetlb"),
        ("cgroup.subtree_control", "cpu cpuset memory hugetlb"),
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
        ("cpu.max", "max 100000"),
    ] {
        fs::write(dir.join(file), format!("{text}\n")).unwrap();
    }
}

/// Makes a knob refuse writes, and keeps its value, until the returned descriptor is dropped.
#[cfg(test)]
pub(crate) fn refuse(knob: &Path) -> std::os::fd::OwnedFd {
    use std::os::fd::AsRawFd as _;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let sealed = memfd_create("knob", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::io::write(&sealed, &fs::read(knob).unwrap()).unwrap();
    fcntl_add_seals(&sealed, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW).unwrap();
    fs::remove_file(knob).unwrap();
    std::os::unix::fs::symlink(format!("/proc/self/fd/{}", sealed.as_raw_fd()), knob).unwrap();
    sealed
}

/// Returns the first line of a file.
pub fn line(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Changes the stored state of a daemon that does not run.
pub fn change_stored_state(state_directory: &Path, change: impl FnOnce(State) -> State) {
    let (mut store, loaded) = Store::open(state_directory).unwrap();
    store.save(&change(loaded.ledger().unwrap())).unwrap();
}

/// Returns an enforcer for the hierarchy at `root`. With `systemd`, the cgroups of units are written through systemd.
pub fn enforcer(config: &Config, root: &Path, machine: &Machine, systemd: Option<Systemd>) -> Enforcer {
    let mut options = EnforcerOptions::new(machine.possible_cpus.clone(), machine.possible_nodes.clone());
    // A busy host does not decide which threads are read.
    options.thread_time = Duration::from_mins(1);
    options.proc = config.host_root.join("proc");
    Enforcer::new(root.to_owned(), systemd, options)
}

/// Starts a reconciler for the hierarchy at `root`.
pub fn reconciler(
    config: &Config,
    root: &Path,
    ports: Ports,
    watch: Option<KnobWatch>,
    systemd: Option<Systemd>,
) -> (ReconcilerHandle, JoinHandle<()>, CancellationToken) {
    let (hierarchy, stop) = (Hierarchy::at(root), CancellationToken::new());
    let enforcer = enforcer(config, root, &ports.host.machine(), systemd);
    let (reconciler, thread) =
        start(config, hierarchy, enforcer, ports, ControlMetrics::default(), watch, stop.clone()).unwrap();
    (reconciler, thread, stop)
}

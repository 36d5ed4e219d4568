//! A host of plain files, for tests.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use numaward_cgroup::{CgroupPath, Hierarchy, KnobWatch};
use numaward_config::Config;
use numaward_enforce::{Enforcer, EnforcerOptions, Systemd};
use numaward_guarantee::{ports::Ports, reconciler::ReconcilerHandle};
use numaward_model::{
    EventReport, Guarantees,
    accesses::WorkloadAccesses,
    headroom::Headroom,
    port::{
        AccessSource, AssignmentSink, CgroupEvents, CgroupListener, ContainerNames, EventSink,
        HeadroomSource, MachineSource,
    },
};
use numaward_topology::{Bytes, Machine};
use tokio_util::sync::CancellationToken;

use crate::ControlMetrics;
pub use crate::reconciler::start;

/// A machine, and all that is reported of it.
pub struct Host {
    /// The machine as it is now.
    pub machine: Mutex<Arc<Machine>>,
    /// What is assigned.
    pub assigned: Mutex<Guarantees>,
    /// What happened.
    pub happened: Mutex<Vec<(Option<CgroupPath>, EventReport)>>,
    /// Who wants to hear of cgroups.
    pub cgroup_listener: Mutex<Option<CgroupListener>>,
    /// What the guard saw last.
    pub headroom: Mutex<Arc<Headroom>>,
    /// What was counted of accesses.
    pub accesses: Mutex<Vec<WorkloadAccesses>>,
}

impl Host {
    /// This machine.
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

    /// Four CPUs on each of two nodes; CPU 0 is kept for the system.
    pub fn small() -> Self {
        let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
        Self::new(machine.build().unwrap())
    }
}

impl MachineSource for Host {
    fn machine(&self) -> Arc<Machine> {
        self.machine.lock().unwrap().clone()
    }
}

impl HeadroomSource for Host {
    fn headroom(&self) -> Arc<Headroom> {
        self.headroom.lock().unwrap().clone()
    }
}

impl AccessSource for Host {
    fn accesses(&self) -> Vec<WorkloadAccesses> {
        self.accesses.lock().unwrap().clone()
    }
}

impl EventSink for Host {
    fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport) {
        self.happened.lock().unwrap().push((cgroup.cloned(), report));
    }
}

impl AssignmentSink for Host {
    fn publish_guarantees(&self, promises: Guarantees) {
        *self.assigned.lock().unwrap() = promises;
    }
}

impl CgroupEvents for Host {
    fn subscribe(&self, listener: CgroupListener) {
        *self.cgroup_listener.lock().unwrap() = Some(listener);
    }
}

impl ContainerNames for Host {
    fn update_containers(&self, _: Vec<(String, String)>, _: bool) {}

    fn remove_container(&self, _: &str) {}
}

/// Makes a cgroup with the files that guarantees need; somebody runs in it.
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

/// Makes a knob refuse what is written, for as long as this is kept. It goes on holding what it holds.
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

/// The first line of a file.
pub fn line(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Writes knobs in the hierarchy at `root`; with `systemd` for its units' cgroups.
pub fn enforcer(root: &Path, machine: &Machine, systemd: Option<Systemd>) -> Enforcer {
    let options = EnforcerOptions::new(machine.possible_cpus.clone(), machine.possible_nodes.clone());
    Enforcer::new(root.to_owned(), systemd, options)
}

/// Gives guarantees in the hierarchy at `root`.
pub fn reconciler(
    config: &Config,
    root: &Path,
    ports: Ports,
    watch: Option<KnobWatch>,
    systemd: Option<Systemd>,
) -> (ReconcilerHandle, JoinHandle<()>, CancellationToken) {
    let (hierarchy, stop) = (Hierarchy::at(root), CancellationToken::new());
    let enforcer = enforcer(root, &ports.machine.machine(), systemd);
    let (reconciler, thread) =
        start(config, hierarchy, enforcer, ports, ControlMetrics::default(), watch, stop.clone()).unwrap();
    (reconciler, thread, stop)
}

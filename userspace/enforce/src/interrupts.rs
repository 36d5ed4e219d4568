//! Work of the kernel that is kept off exclusive CPUs: interrupts, packets, unbound workqueues.
//!
//! Problem: a CPU of which no other process may have a part still handles the interrupts that are routed to it, the packets
//! that the kernel distributes to it (RPS), and what drivers put into workqueues.
//!
//! Terms: an *affinity* is a file with the CPUs on which the kernel does such work. It is *fixed* if the kernel lets nobody
//! change it: interrupts of timers, and *managed* ones, which the kernel spreads over all CPUs by itself, as it does with
//! the queues of `NVMe` and virtio-blk. [`MovedAffinity`] is what was found in one and what was written instead.
//!
//! Algorithm: [`Affinities::read_all`] reads them, [`plan`] decides, and [`Affinities::write`] writes. An affinity becomes what was
//! found without the CPUs to be avoided; of that, as far as possible, the CPUs of the node that its device is on. If
//! nothing is left of what was found, it becomes the node's other CPUs, else any other.
//!
//! Invariants: what holds something else than was written is somebody else's: it counts as found, and is never overwritten by
//! what was found before. No affinity becomes empty but those of packets (RPS, XPS), where that is a word of the kernel's for
//! no CPU in particular. A file that is missing is no error: kernels and devices differ.
//!
//! Sources: Documentation/core-api/irq/irq-affinity.rst, Documentation/core-api/workqueue.rst,
//! Documentation/networking/scaling.rst, Documentation/ABI/testing/sysfs-kernel-irq, `kernel/irq/proc.c`.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use numaward_topology::{CpuSet, Machine, NodeId, NodeSet};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

const INTERRUPTS: &str = "proc/irq";
const NEW_INTERRUPTS: &str = "proc/irq/default_smp_affinity";
const WORKQUEUES: &str = "sys/devices/virtual/workqueue/cpumask";
/// What was written there, where the kernel keeps it apart from what isolated partitions leave of it (since Linux 6.8).
const WORKQUEUES_REQUESTED: &str = "sys/devices/virtual/workqueue/cpumask_requested";
const NETWORK: &str = "sys/class/net";

/// A file with the CPUs on which the kernel does some work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelAffinity {
    /// The file, from the host's root.
    pub path: String,
    /// What it is of, for people: `interrupt 24 (virtio0-input.0)`.
    pub name: String,
    /// What it holds.
    pub cpus: CpuSet,
    /// The node of the device, if the kernel knows it.
    node: Option<NodeId>,
    /// Whether it may be empty.
    may_be_empty: bool,
    /// Whether the kernel lets nobody write it, as far as the file says so.
    pub is_fixed: bool,
}

/// What was found in an affinity, and what was written instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedAffinity {
    /// What it is of: numbers of interrupts recur.
    pub name: String,
    /// What was found.
    pub found: CpuSet,
    /// What was written.
    pub written: CpuSet,
    /// What was written before that, which it still holds if the daemon died in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<CpuSet>,
}

impl MovedAffinity {
    fn holds(&self, cpus: &CpuSet) -> bool {
        self.written == *cpus || self.before.as_ref() == Some(cpus)
    }
}

/// All that was moved on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedAffinities {
    /// What was written, by file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub affinities: BTreeMap<String, MovedAffinity>,
    /// The CPUs that irqbalance was configured to keep interrupts off, if it was asked to keep them off others as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub banned: Option<CpuSet>,
}

impl MovedAffinities {
    /// Whether all is as it was found.
    pub fn is_empty(&self) -> bool {
        self.affinities.is_empty() && self.banned.is_none()
    }
}

/// What is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AffinityWrite {
    /// The file, from the host's root.
    pub path: String,
    /// What it is of.
    pub name: String,
    /// What it is to hold.
    pub cpus: CpuSet,
    /// Why.
    pub way: AffinityChange,
}

/// Why an affinity is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AffinityChange {
    /// It is to leave the CPUs that are avoided.
    Away,
    /// Somebody brought it back to them.
    AwayAgain,
    /// It is to have what was found.
    Back,
}

/// What is to be done to keep off some CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinityPlan {
    /// What is to be written.
    pub writes: Vec<AffinityWrite>,
    /// What is to be known of it before.
    pub moved: BTreeMap<String, MovedAffinity>,
    /// What has to stay on the CPUs, and is there: the file, and what it is of.
    pub stay: BTreeMap<String, String>,
}

/// An affinity was not written.
#[derive(Debug, thiserror::Error)]
pub enum AffinityError {
    /// The kernel lets nobody change it.
    #[error("the kernel lets nobody move it")]
    Fixed,
    /// The kernel refuses, or the daemon may not.
    #[error("{path}: {source}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel took something else.
    #[error("{path}: it holds {found} after {wanted} was written")]
    Different {
        /// The file.
        path: PathBuf,
        /// What was written.
        wanted: CpuSet,
        /// What it holds.
        found: CpuSet,
    },
}

/// The affinities of a host.
#[derive(Clone, Debug)]
pub struct Affinities {
    root: PathBuf,
}

impl Affinities {
    /// Those of the host with this root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Reads those of interrupts that a driver uses, of interrupts to come, of unbound workqueues, and of the queues of
    /// network interfaces; and of all that was moved and is still there.
    pub fn read_all(&self, moved: &BTreeMap<String, MovedAffinity>) -> Vec<KernelAffinity> {
        let mut found = Vec::new();
        found.extend(self.read(NEW_INTERRUPTS.to_owned(), "new interrupts".to_owned()));
        found.extend(self.read(WORKQUEUES.to_owned(), "unbound workqueues".to_owned()));
        for number in self.names(INTERRUPTS).iter().filter_map(|name| name.parse::<u32>().ok()) {
            found.extend(self.interrupt(number, moved));
        }
        for interface in self.names(NETWORK) {
            let queues = format!("{NETWORK}/{interface}/queues");
            for queue in self.names(&queues) {
                let kind = if queue.starts_with("rx-") { "rps" } else { "xps" };
                let name = format!("{} of {interface} {queue}", kind.to_uppercase());
                let affinity = self.read(format!("{queues}/{queue}/{kind}_cpus"), name);
                found.extend(affinity.map(|affinity| KernelAffinity { may_be_empty: true, ..affinity }));
            }
        }
        found
    }

    fn interrupt(&self, number: u32, moved: &BTreeMap<String, MovedAffinity>) -> Option<KernelAffinity> {
        let path = format!("{INTERRUPTS}/{number}/smp_affinity_list");
        let actions = self.text(&format!("sys/kernel/irq/{number}/actions")).unwrap_or_default();
        let name = match actions.trim() {
            "" => moved.get(&path)?.name.clone(),
            actions => format!("interrupt {number} ({actions})"),
        };
        let node = self.text(&format!("{INTERRUPTS}/{number}/node"));
        let node = node.and_then(|text| text.trim().parse().ok()).map(NodeId);
        Some(KernelAffinity { node, ..self.read(path, name)? })
    }

    /// None where there is no such file. Queues that stand alone have one that cannot be read.
    fn read(&self, path: String, name: String) -> Option<KernelAffinity> {
        let cpus = self.held(&path)?;
        let mode = fs::metadata(self.root.join(&path)).ok()?.permissions().mode();
        Some(KernelAffinity {
            path,
            name,
            cpus,
            node: None,
            may_be_empty: false,
            is_fixed: mode & 0o200 == 0,
        })
    }

    /// What an affinity was last set to.
    fn held(&self, path: &str) -> Option<CpuSet> {
        let requested = if path == WORKQUEUES { self.text(WORKQUEUES_REQUESTED) } else { None };
        parse(path, &requested.or_else(|| self.text(path))?)
    }

    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok()
    }

    /// The CPUs that an interrupt goes to, of those that it may go to; these for all else.
    pub fn effective(&self, affinity: &KernelAffinity) -> CpuSet {
        let path = affinity.path.replace("/smp_affinity_list", "/effective_affinity_list");
        let cpus = self.text(&path).and_then(|text| parse(&path, &text));
        // It is empty until the interrupt is used, and not every architecture has it.
        cpus.filter(|cpus| !cpus.is_empty()).unwrap_or_else(|| affinity.cpus.clone())
    }

    /// Writes an affinity, and reads it back.
    pub fn write(&self, write: &AffinityWrite) -> Result<(), AffinityError> {
        let path = self.root.join(&write.path);
        let text = text(&write.path, &write.cpus);
        let file = OpenOptions::new().write(true).truncate(true).open(&path);
        if let Err(source) = file.and_then(|mut file| file.write_all(text.as_bytes())) {
            return Err(match Errno::from_io_error(&source) {
                // Newer kernels say the latter.
                Some(Errno::IO | Errno::PERM) if write.path.starts_with(INTERRUPTS) => AffinityError::Fixed,
                _ => AffinityError::Refused { path, source },
            });
        }
        let found = self.held(&write.path);
        if found.as_ref() == Some(&write.cpus) {
            return Ok(());
        }
        Err(AffinityError::Different { path, wanted: write.cpus.clone(), found: found.unwrap_or_default() })
    }

    fn names(&self, dir: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(dir)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

/// Plans what is to be written so that none of what was seen is on the CPUs to be avoided, and all that need not be moved is
/// where it was found. `moved` is what was written before.
pub fn plan(
    seen: &[KernelAffinity],
    moved: &BTreeMap<String, MovedAffinity>,
    avoid: &CpuSet,
    machine: &Machine,
) -> AffinityPlan {
    let mut plan = AffinityPlan::default();
    for affinity in seen {
        let known = moved.get(&affinity.path);
        let known = known.filter(|known| known.name == affinity.name && known.holds(&affinity.cpus));
        let found = known.map_or(&affinity.cpus, |known| &known.found);
        let KernelAffinity { path, name, .. } = affinity;
        let target = target(affinity, found, avoid, machine);
        let written = target.clone().unwrap_or_else(|| found.clone());
        if written != *found {
            let before = known.map(|known| known.written.clone()).filter(|before| *before != written);
            let before = before.or_else(|| known.and_then(|known| known.before.clone()));
            let record =
                MovedAffinity { name: name.clone(), found: found.clone(), written: written.clone(), before };
            plan.moved.insert(path.clone(), record);
        } else if known.is_some() && affinity.cpus != *found {
            plan.moved.extend(known.map(|known| (path.clone(), known.clone())));
        }
        if target.is_none() || affinity.is_fixed && written != affinity.cpus {
            plan.moved.remove(path);
            plan.stay.insert(path.clone(), name.clone());
        } else if written != affinity.cpus {
            let was_moved = moved.get(path).is_some_and(|of| of.name == *name);
            let way = match known {
                Some(_) if written == *found => AffinityChange::Back,
                None if was_moved => AffinityChange::AwayAgain,
                _ => AffinityChange::Away,
            };
            plan.writes.push(AffinityWrite { path: path.clone(), name: name.clone(), cpus: written, way });
        }
    }
    plan
}

/// What an affinity is to be; none if it has to stay.
fn target(affinity: &KernelAffinity, found: &CpuSet, avoid: &CpuSet, machine: &Machine) -> Option<CpuSet> {
    let online = machine.cpu_ids();
    if !(found & &online).intersects(avoid) {
        return Some(found.clone());
    }
    let rest = found - avoid;
    if affinity.may_be_empty {
        return Some(rest);
    }
    let near = match affinity.node.filter(|node| machine.nodes.contains_key(node)) {
        Some(node) => NodeSet::single(node),
        None => machine.nodes.iter().filter(|(_, of)| of.cpus.intersects(found)).map(|(id, _)| *id).collect(),
    };
    let near = machine.cpus_of(&near);
    let choices = [&rest & &near, rest, &near - avoid, &online - avoid];
    choices.into_iter().find(|cpus| cpus.intersects(&online))
}

/// Reads what a file of this name holds: a list of CPUs, or a mask.
fn parse(path: &str, text: &str) -> Option<CpuSet> {
    if path.ends_with("_list") { text.parse().ok() } else { parse_mask(text) }
}

/// What to write into a file of this name.
fn text(path: &str, cpus: &CpuSet) -> String {
    if path.ends_with("_list") { cpus.to_string() } else { mask(cpus) }
}

/// Reads a mask of CPUs as the kernel writes one: 32 bits a part, the highest part first.
pub(crate) fn parse_mask(text: &str) -> Option<CpuSet> {
    let parts = text.trim().rsplit(',').map(|part| u32::from_str_radix(part, 16).map(u64::from));
    let parts = parts.collect::<Result<Vec<u64>, _>>().ok()?;
    let words = parts.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 32));
    Some(CpuSet::from_words(words.collect::<Vec<_>>()))
}

/// Without parts of zeros in front: the kernel takes no more parts than its CPUs have.
fn mask(cpus: &CpuSet) -> String {
    let parts = cpus.words().iter().rev().flat_map(|word| [word >> 32, word & u64::from(u32::MAX)]);
    let parts: Vec<String> = parts.skip_while(|part| *part == 0).map(|part| format!("{part:08x}")).collect();
    if parts.is_empty() { "0".to_owned() } else { parts.join(",") }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use numaward_topology::Bytes;

    use super::*;

    /// A host of files, with four CPUs on each of two nodes.
    struct Host {
        dir: tempfile::TempDir,
        machine: Machine,
        moved: BTreeMap<String, MovedAffinity>,
    }

    impl Host {
        fn new() -> Self {
            let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
            let (dir, moved) = (tempfile::tempdir().unwrap(), BTreeMap::new());
            let host = Self { dir, machine: machine.build().unwrap(), moved };
            host.put(NEW_INTERRUPTS, "ff");
            host.put(WORKQUEUES, "00000000,000000ff");
            host
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn interrupt(&self, number: u32, actions: &str, cpus: &str, node: &str) {
            self.put(&format!("proc/irq/{number}/smp_affinity_list"), cpus);
            self.put(&format!("proc/irq/{number}/effective_affinity_list"), cpus);
            self.put(&format!("proc/irq/{number}/node"), node);
            self.put(&format!("sys/kernel/irq/{number}/actions"), actions);
        }

        fn of(&self, number: u32) -> String {
            self.read(&format!("proc/irq/{number}/smp_affinity_list"))
        }

        fn read(&self, path: &str) -> String {
            fs::read_to_string(self.dir.path().join(path)).unwrap().trim().to_owned()
        }

        /// Keeps the kernel off these CPUs, as the controller does; what has to stay.
        fn avoid(&mut self, cpus: &str) -> Vec<String> {
            let affinities = Affinities::new(self.dir.path());
            let seen = affinities.read_all(&self.moved);
            let plan = plan(&seen, &self.moved, &cpus.parse().unwrap(), &self.machine);
            self.moved = plan.moved;
            for write in plan.writes {
                affinities.write(&write).unwrap();
                if write.way == AffinityChange::Back {
                    self.moved.remove(&write.path);
                }
            }
            plan.stay.into_values().collect()
        }
    }

    #[test]
    fn all_leave_and_come_back() {
        let mut host = Host::new();
        host.interrupt(24, "nvme0q0", "0-7", "1");
        host.interrupt(25, "eth0-rx-0", "6", "1");
        host.interrupt(26, "near", "4-7", "-1");
        host.interrupt(27, "other", "0-3", "0");
        host.interrupt(3, "", "0-7", "0");
        let (rps, xps) =
            ("sys/class/net/eth0/queues/rx-0/rps_cpus", "sys/class/net/eth0/queues/tx-0/xps_cpus");
        host.put(rps, "f0");
        host.put(xps, "40");
        assert!(host.avoid("6-7").is_empty());
        let cpus = [24, 25, 26, 27, 3].map(|number| host.of(number));
        assert_eq!(cpus, ["4-5", "4-5", "4-5", "0-3", "0-7"], "near their devices; an unused one stays");
        assert_eq!(
            [NEW_INTERRUPTS, WORKQUEUES, rps, xps].map(|path| host.read(path)),
            ["0000003f", "0000003f", "00000030", "0"]
        );
        // All of a node.
        assert!(host.avoid("4-7").is_empty());
        assert_eq!([24, 25, 26].map(|number| host.of(number)), ["0-3", "0-3", "0-3"]);
        assert!(host.avoid("").is_empty());
        assert_eq!([24, 25, 26, 27].map(|number| host.of(number)), ["0-7", "6", "4-7", "0-3"]);
        assert_eq!([rps, xps].map(|path| host.read(path)), ["000000f0", "00000040"]);
        assert!(host.moved.is_empty());
    }

    #[test]
    fn what_others_write_is_theirs() {
        let mut host = Host::new();
        for number in 24..28 {
            host.interrupt(number, "eth0", "0-7", "0");
        }
        host.avoid("2");
        // An administrator, elsewhere; somebody, back; a device that came, with the number of one that went.
        host.put("proc/irq/24/smp_affinity_list", "5");
        host.put("proc/irq/25/smp_affinity_list", "2-3");
        host.interrupt(26, "nvme0q1", "0-1,3", "0");
        host.put("sys/kernel/irq/27/actions", "");
        host.avoid("2-3");
        assert_eq!([24, 25, 26, 27].map(|number| host.of(number)), ["5", "0-1", "0-1", "0-1"]);
        host.avoid("");
        assert_eq!([24, 25, 26, 27].map(|number| host.of(number)), ["5", "2-3", "0-1,3", "0-7"]);
        assert!(host.moved.is_empty());
    }

    #[test]
    fn a_daemon_that_died_between_the_record_and_the_file_forgets_nothing() {
        let mut host = Host::new();
        host.interrupt(24, "eth0", "0-7", "0");
        host.avoid("2");
        let affinities = Affinities::new(host.dir.path());
        let seen = affinities.read_all(&host.moved);
        host.moved = plan(&seen, &host.moved, &"2-3".parse().unwrap(), &host.machine).moved;
        host.avoid("");
        assert_eq!((host.of(24).as_str(), host.moved.len()), ("0-7", 0));
    }

    #[test]
    fn what_cannot_go_elsewhere_stays_and_is_named() {
        let mut host = Host::new();
        host.interrupt(24, "virtio1-req.3", "3", "0");
        let file = host.dir.path().join("proc/irq/24/smp_affinity_list");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
        assert_eq!(host.avoid("2-3"), ["interrupt 24 (virtio1-req.3)"]);
        assert!(host.avoid("2").is_empty(), "it is not there");
        host.interrupt(25, "eth0", "0-7", "0");
        let all = host.avoid("0-7");
        assert!(all.contains(&"interrupt 25 (eth0)".to_owned()), "no CPU is left: {all:?}");
        assert_eq!(host.of(25), "0-7");
    }

    #[test]
    fn a_write_that_the_kernel_does_not_take_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let affinities = Affinities::new(dir.path());
        let path = "proc/irq/24/smp_affinity_list".to_owned();
        let write = AffinityWrite {
            path,
            name: String::new(),
            cpus: "1".parse().unwrap(),
            way: AffinityChange::Away,
        };
        let error = affinities.write(&write).unwrap_err().to_string();
        assert!(error.contains("proc/irq/24/smp_affinity_list: No such file"), "{error}");
    }

    #[test]
    fn masks_are_read_and_written_as_the_kernel_does() {
        for (text, list, again) in [
            ("ff\n", "0-7", "000000ff"),
            ("00000001,00000000,80000001", "0,31,64", "00000001,00000000,80000001"),
            ("0", "", "0"),
        ] {
            let cpus = parse_mask(text).unwrap();
            assert_eq!((cpus.to_string().as_str(), mask(&cpus).as_str()), (list, again), "{text}");
        }
        for text in ["", "xyz", "1,,2", "100000000"] {
            assert_eq!(parse_mask(text), None, "{text:?}");
        }
    }
}

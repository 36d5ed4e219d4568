//! Affinities: keeps the kernel's own work (interrupts, packets, unbound workqueues) off exclusive CPUs.
//!
//! # Problem
//! A CPU that no other process may use still handles the interrupts that are routed to it, the packets that the kernel
//! distributes to it (RPS), and the work items that drivers queue.
//!
//! # Terms
//! An *affinity* is a file with the CPUs on which the kernel does such work. It is *fixed* if the kernel does not let
//! it be changed: interrupts of timers, and *managed* interrupts, which the kernel spreads over all CPUs by itself,
//! such as those of the queues of `NVMe` and virtio-blk. [`MovedAffinity`] has the original and the written CPUs.
//!
//! # Algorithm
//! [`Affinities::read_all`] reads the affinities, [`plan`] decides, and [`Affinities::write`] writes. An affinity
//! becomes its original set without the CPUs to avoid, limited to the CPUs of the device's node if possible. If no CPU
//! of the original set remains, it becomes the other CPUs of the node, or else all other CPUs.
//!
//! # Invariants
//! - A value other than the written one belongs to another program: it becomes the original value, and is never
//!   overwritten by an earlier one.
//! - No affinity becomes empty, except those of packets (RPS, XPS), for which the kernel takes the empty set as no CPU
//!   in particular.
//! - A missing file is no error: kernels and devices differ.
//!
//! Sources: Documentation/core-api/irq/irq-affinity.rst, Documentation/core-api/workqueue.rst,
//! Documentation/networking/scaling.rst, Documentation/ABI/testing/sysfs-kernel-irq, `kernel/irq/proc.c`.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use numaward_topology::{CpuSet, Machine, NodeId, NodeSet};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::records::{WrittenValue, overwrite};

const INTERRUPTS: &str = "proc/irq";
const NEW_INTERRUPTS: &str = "proc/irq/default_smp_affinity";
const WORKQUEUES: &str = "sys/devices/virtual/workqueue/cpumask";
/// The CPUs that were written to `cpumask`, which since Linux 6.8 does not include those of isolated partitions.
const WORKQUEUES_REQUESTED: &str = "sys/devices/virtual/workqueue/cpumask_requested";
const NETWORK: &str = "sys/class/net";

/// A file with the CPUs on which the kernel does some work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelAffinity {
    /// Path of the file from the host's root.
    pub path: String,
    /// Description for messages: `interrupt 24 (virtio0-input.0)`.
    pub name: String,
    /// CPUs in the file.
    pub cpus: CpuSet,
    /// Node of the device, if the kernel knows it.
    node: Option<NodeId>,
    /// True if the file may be empty.
    may_be_empty: bool,
    /// True if the mode of the file forbids writes.
    pub is_fixed: bool,
}

/// Original and written value of an affinity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedAffinity {
    /// Description of the affinity, because numbers of interrupts are reused.
    pub name: String,
    #[serde(flatten)]
    pub value: WrittenValue<CpuSet>,
}

/// All affinities that were moved on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedAffinities {
    /// Moved affinities by file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub affinities: BTreeMap<String, MovedAffinity>,
    /// CPUs that irqbalance's configuration bans, if the daemon has asked it to ban further ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub banned: Option<CpuSet>,
}

impl MovedAffinities {
    /// Returns whether everything has its original value.
    pub fn is_empty(&self) -> bool {
        self.affinities.is_empty() && self.banned.is_none()
    }
}

/// A write to an affinity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AffinityWrite {
    /// Path of the file from the host's root.
    pub path: String,
    pub name: String,
    pub cpus: CpuSet,
    /// Reason of the write.
    pub way: AffinityChange,
}

/// Reasons why an affinity is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AffinityChange {
    /// The affinity has to leave the CPUs to avoid.
    Away,
    /// Another program moved the affinity back to the CPUs to avoid.
    AwayAgain,
    /// The original value is restored.
    Back,
}

/// Writes that keep the kernel off some CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinityPlan {
    pub writes: Vec<AffinityWrite>,
    /// Records to store before the writes.
    pub moved: BTreeMap<String, MovedAffinity>,
    /// Affinities that stay on the CPUs to avoid: description by file.
    pub stay: BTreeMap<String, String>,
}

/// Error of a write to an affinity.
#[derive(Debug, thiserror::Error)]
pub enum AffinityError {
    /// The affinity is fixed.
    #[error("the kernel does not let it be moved")]
    Fixed,
    /// The kernel refuses, or the daemon has no permission.
    #[error("{path}: {source}")]
    Refused { path: PathBuf, source: io::Error },
    /// The kernel took another value.
    #[error("{path}: it holds {found} after {wanted} was written")]
    Different { path: PathBuf, wanted: CpuSet, found: CpuSet },
}

/// Access to the affinities of a host.
#[derive(Clone, Debug)]
pub struct Affinities {
    root: PathBuf,
}

impl Affinities {
    /// Creates the access to the host with this root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Reads the affinities of interrupts that a driver uses, of future interrupts, of unbound workqueues, and of the
    /// queues of network interfaces; and those in `moved` that still exist.
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

    /// Reads an affinity; `None` if the file does not exist or cannot be read, as that of a single queue.
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

    /// Returns the CPUs that were last written to an affinity.
    fn held(&self, path: &str) -> Option<CpuSet> {
        let requested = if path == WORKQUEUES { self.text(WORKQUEUES_REQUESTED) } else { None };
        parse(path, &requested.or_else(|| self.text(path))?)
    }

    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok()
    }

    /// Returns the CPUs to which the kernel routes an interrupt. For other affinities, returns their CPUs.
    pub fn effective(&self, affinity: &KernelAffinity) -> CpuSet {
        let path = affinity.path.replace("/smp_affinity_list", "/effective_affinity_list");
        let cpus = self.text(&path).and_then(|text| parse(&path, &text));
        // The file is empty until the interrupt is used, and does not exist on every architecture.
        cpus.filter(|cpus| !cpus.is_empty()).unwrap_or_else(|| affinity.cpus.clone())
    }

    /// Writes an affinity, and reads it back.
    pub fn write(&self, write: &AffinityWrite) -> Result<(), AffinityError> {
        let path = self.root.join(&write.path);
        let text = text(&write.path, &write.cpus);
        if let Err(source) = overwrite(&path, &text) {
            return Err(match Errno::from_io_error(&source) {
                // Newer kernels return `EPERM`.
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

/// Plans the writes after which no affinity is on the CPUs to avoid, and every other one has its original value.
/// `moved` has the earlier writes.
pub fn plan(
    seen: &[KernelAffinity],
    moved: &BTreeMap<String, MovedAffinity>,
    avoid: &CpuSet,
    machine: &Machine,
) -> AffinityPlan {
    let mut plan = AffinityPlan::default();
    for affinity in seen {
        let known = moved.get(&affinity.path);
        let known = known.filter(|known| known.name == affinity.name && known.value.holds(&affinity.cpus));
        let found = known.map_or(&affinity.cpus, |known| &known.value.found);
        let KernelAffinity { path, name, .. } = affinity;
        let target = target(affinity, found, avoid, machine);
        let written = target.clone().unwrap_or_else(|| found.clone());
        if written != *found {
            let before = known.map(|known| known.value.written.clone()).filter(|before| *before != written);
            let before = before.or_else(|| known.and_then(|known| known.value.before.clone()));
            let (found, written) = (found.clone(), written.clone());
            let value = WrittenValue { found, written, before, is_given_up: false };
            plan.moved.insert(path.clone(), MovedAffinity { name: name.clone(), value });
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

/// Returns the CPUs that an affinity should have; `None` if it has to stay.
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

/// Parses the content of a file with this name: a list of CPUs, or a mask.
fn parse(path: &str, text: &str) -> Option<CpuSet> {
    if path.ends_with("_list") { text.parse().ok() } else { parse_mask(text) }
}

/// Formats CPUs for a file with this name.
fn text(path: &str, cpus: &CpuSet) -> String {
    if path.ends_with("_list") { cpus.to_string() } else { mask(cpus) }
}

/// Parses a mask of CPUs in the kernel's format: 32 bits per part, the highest part first.
pub(crate) fn parse_mask(text: &str) -> Option<CpuSet> {
    let parts = text.trim().rsplit(',').map(|part| u32::from_str_radix(part, 16).map(u64::from));
    let parts = parts.collect::<Result<Vec<u64>, _>>().ok()?;
    let words = parts.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 32));
    Some(CpuSet::from_words(words.collect::<Vec<_>>()))
}

/// Formats a mask without leading parts of zeros, because the kernel refuses more parts than it has CPUs.
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

    /// A host made of files, with four CPUs on each of two nodes.
    struct FakeHost {
        dir: tempfile::TempDir,
        machine: Machine,
        moved: BTreeMap<String, MovedAffinity>,
    }

    impl FakeHost {
        fn new() -> Self {
            let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4));
            let (dir, moved) = (tempfile::tempdir().unwrap(), BTreeMap::new());
            let host = Self { dir, machine: machine.build().unwrap(), moved };
            host.write_file(NEW_INTERRUPTS, "ff");
            host.write_file(WORKQUEUES, "00000000,000000ff");
            host
        }

        fn write_file(&self, path: &str, text: &str) {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn interrupt(&self, number: u32, actions: &str, cpus: &str, node: &str) {
            self.write_file(&format!("proc/irq/{number}/smp_affinity_list"), cpus);
            self.write_file(&format!("proc/irq/{number}/effective_affinity_list"), cpus);
            self.write_file(&format!("proc/irq/{number}/node"), node);
            self.write_file(&format!("sys/kernel/irq/{number}/actions"), actions);
        }

        fn affinity_of(&self, number: u32) -> String {
            self.read(&format!("proc/irq/{number}/smp_affinity_list"))
        }

        fn read(&self, path: &str) -> String {
            fs::read_to_string(self.dir.path().join(path)).unwrap().trim().to_owned()
        }

        /// Keeps the kernel off these CPUs, as the controller does. Returns the affinities that stay.
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
    fn moves_and_restores_affinities() {
        let mut host = FakeHost::new();
        host.interrupt(24, "nvme0q0", "0-7", "1");
        host.interrupt(25, "eth0-rx-0", "6", "1");
        host.interrupt(26, "near", "4-7", "-1");
        host.interrupt(27, "other", "0-3", "0");
        host.interrupt(3, "", "0-7", "0");
        let (rps, xps) =
            ("sys/class/net/eth0/queues/rx-0/rps_cpus", "sys/class/net/eth0/queues/tx-0/xps_cpus");
        host.write_file(rps, "f0");
        host.write_file(xps, "40");
        assert!(host.avoid("6-7").is_empty());
        let cpus = [24, 25, 26, 27, 3].map(|number| host.affinity_of(number));
        assert_eq!(cpus, ["4-5", "4-5", "4-5", "0-3", "0-7"], "near their devices; an unused one stays");
        assert_eq!(
            [NEW_INTERRUPTS, WORKQUEUES, rps, xps].map(|path| host.read(path)),
            ["0000003f", "0000003f", "00000030", "0"]
        );
        // All CPUs of a node.
        assert!(host.avoid("4-7").is_empty());
        assert_eq!([24, 25, 26].map(|number| host.affinity_of(number)), ["0-3", "0-3", "0-3"]);
        assert!(host.avoid("").is_empty());
        assert_eq!([24, 25, 26, 27].map(|number| host.affinity_of(number)), ["0-7", "6", "4-7", "0-3"]);
        assert_eq!([rps, xps].map(|path| host.read(path)), ["000000f0", "00000040"]);
        assert!(host.moved.is_empty());
    }

    #[test]
    fn keeps_values_of_other_programs() {
        let mut host = FakeHost::new();
        for number in 24..28 {
            host.interrupt(number, "eth0", "0-7", "0");
        }
        host.avoid("2");
        // The administrator moves one elsewhere, another program moves one back, and a new device gets the number of
        // an old one.
        host.write_file("proc/irq/24/smp_affinity_list", "5");
        host.write_file("proc/irq/25/smp_affinity_list", "2-3");
        host.interrupt(26, "nvme0q1", "0-1,3", "0");
        host.write_file("sys/kernel/irq/27/actions", "");
        host.avoid("2-3");
        assert_eq!([24, 25, 26, 27].map(|number| host.affinity_of(number)), ["5", "0-1", "0-1", "0-1"]);
        host.avoid("");
        assert_eq!([24, 25, 26, 27].map(|number| host.affinity_of(number)), ["5", "2-3", "0-1,3", "0-7"]);
        assert!(host.moved.is_empty());
    }

    #[test]
    fn crash_before_write_keeps_original() {
        let mut host = FakeHost::new();
        host.interrupt(24, "eth0", "0-7", "0");
        host.avoid("2");
        let affinities = Affinities::new(host.dir.path());
        let seen = affinities.read_all(&host.moved);
        host.moved = plan(&seen, &host.moved, &"2-3".parse().unwrap(), &host.machine).moved;
        host.avoid("");
        assert_eq!((host.affinity_of(24).as_str(), host.moved.len()), ("0-7", 0));
    }

    #[test]
    fn reports_affinities_that_stay() {
        let mut host = FakeHost::new();
        host.interrupt(24, "virtio1-req.3", "3", "0");
        let file = host.dir.path().join("proc/irq/24/smp_affinity_list");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
        assert_eq!(host.avoid("2-3"), ["interrupt 24 (virtio1-req.3)"]);
        assert!(host.avoid("2").is_empty(), "it is not there");
        host.interrupt(25, "eth0", "0-7", "0");
        let all = host.avoid("0-7");
        assert!(all.contains(&"interrupt 25 (eth0)".to_owned()), "no CPU is left: {all:?}");
        assert_eq!(host.affinity_of(25), "0-7");
    }

    #[test]
    fn untaken_write_is_error() {
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
    fn masks_round_trip() {
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

//! The nodes of a guest: parsing of their description, and QEMU's arguments for them.

use std::fmt::Write as _;

/// A NUMA node of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestNode {
    /// Number of CPUs; 0 makes a node with memory only.
    pub cpus: u32,
    /// Memory in MiB; 0 makes a node without memory.
    pub memory_mib: u64,
}

/// The nodes of a guest, and their distances if given (`distances[from][to]`, as in the ACPI SLIT).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestTopology {
    nodes: Vec<GuestNode>,
    distances: Option<Vec<Vec<u8>>>,
    /// Memory that can be plugged in while the guest is running, in MiB.
    room_mib: u64,
    /// CPUs per core.
    threads: u32,
    /// Nodes with slow memory, as the firmware reports in the HMAT.
    slow: Vec<usize>,
}

/// Error in the description of a machine.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpecError {
    /// A list does not have one entry per node.
    #[error("{option} has {given} entries, but there are {nodes} nodes: give one per node")]
    Count {
        option: &'static str,
        /// Number of entries in the list.
        given: usize,
        /// Number of nodes.
        nodes: usize,
    },
    /// An entry cannot be parsed.
    #[error("{option}: `{value}` is not {expected}")]
    Value {
        option: &'static str,
        value: String,
        /// Description of valid entries.
        expected: &'static str,
    },
    /// The machine exceeds the limits of QEMU or of a guest.
    #[error("{0}")]
    Impossible(String),
}

/// Node without a description.
const DEFAULT_NODE: GuestNode = GuestNode { cpus: 2, memory_mib: 512 };
const DEFAULT_NODES: usize = 2;
/// Limits of QEMU's q35 machine.
const MAX_NODES: usize = 128;
const MAX_CPUS: u32 = 255;
/// Minimum memory in total: with less, a kernel with an initramfs does not boot.
const MIN_TOTAL_MIB: u64 = 192;
const LOCAL_DISTANCE: u8 = 10;
/// Latency in nanoseconds and bandwidth in bytes per second of ordinary memory, and of memory behind CXL.
const FAST_MEMORY: (u32, &str) = (100, "20G");
const SLOW_MEMORY: (u32, &str) = (400, "5G");
/// Maximum number of memory modules that can be plugged into a running machine.
pub const MEMORY_SLOTS: u32 = 4;

impl GuestTopology {
    /// Parses the options of `cargo xtask vm run`: the number of nodes (by default, the length of the longest list, or
    /// 2), CPUs per node (`2,2,0`), memory per node (`512M,1G,256M`) and distances row by row (`10,21;21,10`).
    pub fn parse(
        nodes: Option<usize>,
        cpus: Option<&str>,
        memory: Option<&str>,
        distances: Option<&str>,
    ) -> Result<Self, SpecError> {
        let cpus =
            cpus.map(|text| list(text, "--cpus", "a number of CPUs", |v| v.parse().ok())).transpose()?;
        let memory = memory.map(|text| list(text, "--memory", SIZE_FORMAT, mebibytes)).transpose()?;
        let distances = distances
            .map(|text| {
                text.split(';')
                    .map(|row| list(row, "--distances", "a distance from 10 to 254", distance))
                    .collect::<Result<Vec<_>, _>>()
            })
            .transpose()?;
        let count = nodes
            .or(cpus.as_ref().map(Vec::len))
            .or(memory.as_ref().map(Vec::len))
            .or(distances.as_ref().map(Vec::len))
            .unwrap_or(DEFAULT_NODES);
        let cpus = cpus.unwrap_or_else(|| vec![DEFAULT_NODE.cpus; count]);
        let memory = memory.unwrap_or_else(|| vec![DEFAULT_NODE.memory_mib; count]);
        for (option, given) in [("--cpus", cpus.len()), ("--memory", memory.len())] {
            if given != count {
                return Err(SpecError::Count { option, given, nodes: count });
            }
        }
        let nodes =
            cpus.into_iter().zip(memory).map(|(cpus, memory_mib)| GuestNode { cpus, memory_mib }).collect();
        Self::new(nodes, distances)
    }

    /// Creates a topology from values, with the same checks as [`GuestTopology::parse`].
    pub fn new(nodes: Vec<GuestNode>, distances: Option<Vec<Vec<u8>>>) -> Result<Self, SpecError> {
        Self::with_room(nodes, distances, 0)
    }

    /// Creates a topology into which up to `room_mib` of memory can be plugged at run time, in up to [`MEMORY_SLOTS`]
    /// modules. Its last node may have neither CPUs nor memory at first.
    pub fn with_room(
        nodes: Vec<GuestNode>,
        distances: Option<Vec<Vec<u8>>>,
        room_mib: u64,
    ) -> Result<Self, SpecError> {
        let impossible = |text: String| Err(SpecError::Impossible(text));
        if nodes.is_empty() || nodes.len() > MAX_NODES {
            return impossible(format!("{} nodes: a machine has 1 to {MAX_NODES}", nodes.len()));
        }
        // QEMU reports to the kernel that memory to plug in belongs to the last node.
        let complete = if room_mib > 0 { nodes.len() - 1 } else { nodes.len() };
        let is_empty = |node: &GuestNode| node.cpus == 0 && node.memory_mib == 0;
        if let Some(empty) = nodes[..complete].iter().position(is_empty) {
            return impossible(format!("node {empty} has neither CPUs nor memory: give it one of them"));
        }
        let cpus = nodes.iter().fold(0, |sum: u32, node| sum.saturating_add(node.cpus));
        if cpus == 0 || cpus > MAX_CPUS {
            return impossible(format!("{cpus} CPUs in all: a machine has 1 to {MAX_CPUS}"));
        }
        let total = nodes.iter().fold(0, |sum: u64, node| sum.saturating_add(node.memory_mib));
        if total < MIN_TOTAL_MIB {
            return impossible(format!(
                "{total} MiB of memory in all: a kernel needs {MIN_TOTAL_MIB} MiB to come up"
            ));
        }
        if let Some(rows) = &distances {
            if rows.len() != nodes.len() {
                return Err(SpecError::Count {
                    option: "--distances",
                    given: rows.len(),
                    nodes: nodes.len(),
                });
            }
            for (from, row) in rows.iter().enumerate() {
                if row.len() != nodes.len() {
                    return impossible(format!(
                        "--distances: row {from} has {} entries, but there are {} nodes",
                        row.len(),
                        nodes.len()
                    ));
                }
                for (to, &value) in row.iter().enumerate() {
                    if (from == to) != (value == LOCAL_DISTANCE) {
                        return impossible(format!(
                            "--distances: from node {from} to node {to} it is {value}; {LOCAL_DISTANCE} is the distance of a node to itself, all others are 11 to 254"
                        ));
                    }
                }
            }
        }
        Ok(Self { nodes, distances, room_mib, threads: 1, slow: Vec::new() })
    }

    /// Groups consecutive CPUs into cores of this number of threads.
    pub fn with_threads(mut self, threads: u32) -> Result<Self, SpecError> {
        if let Some(node) = self.nodes.iter().position(|node| !node.cpus.is_multiple_of(threads.max(1))) {
            return Err(SpecError::Impossible(format!(
                "node {node} has {} CPUs, which are no whole cores of {threads} CPUs",
                self.nodes[node].cpus
            )));
        }
        self.threads = threads.max(1);
        Ok(self)
    }

    /// Makes the firmware report the memory of these nodes as slow, like memory behind CXL. They must have no CPUs: the
    /// kernel takes memory of a node with CPUs for ordinary memory.
    pub fn with_slow(mut self, slow: &[usize]) -> Result<Self, SpecError> {
        let is_only_memory = |&id: &usize| self.nodes.get(id).is_some_and(|node| node.cpus == 0);
        if let Some(id) = slow.iter().find(|id| !is_only_memory(id)) {
            return Err(SpecError::Impossible(format!(
                "node {id} is no node with memory alone: it cannot be slow"
            )));
        }
        self.slow = slow.to_vec();
        Ok(self)
    }

    /// Returns the nodes, indexed by their id.
    pub fn nodes(&self) -> &[GuestNode] {
        &self.nodes
    }

    /// Returns whether memory can be plugged in.
    pub(crate) fn has_room(&self) -> bool {
        self.room_mib > 0
    }

    /// Returns QEMU's arguments for CPUs, memory and nodes.
    pub(crate) fn qemu_args(&self) -> Vec<String> {
        let total_cpus: u32 = self.nodes.iter().map(|node| node.cpus).sum();
        let total_memory: u64 = self.nodes.iter().map(|node| node.memory_mib).sum();
        let mut args = Vec::new();
        let mut push = |name: &str, value: String| args.extend([name.to_owned(), value]);

        // A socket must not span nodes (the kernel would complain about its caches). Each node with CPUs is therefore
        // a socket if
        // all have the same number of CPUs, and otherwise each core is one.
        let sizes: Vec<u32> = self.nodes.iter().map(|node| node.cpus).filter(|&cpus| cpus > 0).collect();
        let per_socket =
            if sizes.windows(2).all(|pair| pair[0] == pair[1]) { sizes[0] } else { self.threads };
        let threads = if self.threads > 1 { format!(",threads={}", self.threads) } else { String::new() };
        let (sockets, cores) = (total_cpus / per_socket, per_socket / self.threads);
        push("-smp", format!("{total_cpus},sockets={sockets},cores={cores}{threads}"));
        let room = match self.room_mib {
            0 => String::new(),
            room => format!(",slots={MEMORY_SLOTS},maxmem={}M", total_memory + room),
        };
        push("-m", format!("{total_memory}M{room}"));

        let mut first_cpu = 0;
        for (id, node) in self.nodes.iter().enumerate() {
            let mut numa = format!("node,nodeid={id}");
            if node.cpus > 0 {
                // Writing to a String cannot fail.
                let _ = write!(numa, ",cpus={first_cpu}-{}", first_cpu + node.cpus - 1);
                first_cpu += node.cpus;
            }
            if node.memory_mib > 0 {
                push("-object", format!("memory-backend-ram,id=m{id},size={}M", node.memory_mib));
                let _ = write!(numa, ",memdev=m{id}");
            }
            if !self.slow.is_empty() {
                let _ = write!(numa, ",initiator={}", self.initiator(id));
            }
            push("-numa", numa);
        }
        if !self.slow.is_empty() {
            push("-machine", "hmat=on".to_owned());
            for performance in self.performance() {
                push("-numa", performance);
            }
        }
        for (from, row) in self.distances.iter().flatten().enumerate() {
            for (to, value) in row.iter().enumerate() {
                push("-numa", format!("dist,src={from},dst={to},val={value}"));
            }
        }
        args
    }

    /// Returns the node with the CPUs nearest to a node's memory.
    fn initiator(&self, id: usize) -> usize {
        let has_cpus = |id: &usize| self.nodes[*id].cpus > 0;
        let distance = |from: &usize| self.distances.as_ref().map_or(0, |rows| rows[*from][id]);
        if has_cpus(&id) {
            id
        } else {
            (0..self.nodes.len()).filter(has_cpus).min_by_key(distance).unwrap_or(0)
        }
    }

    /// Returns the entries of the HMAT for each pair of CPUs and memory.
    fn performance(&self) -> Vec<String> {
        let ids = || self.nodes.iter().enumerate();
        let mut all = Vec::new();
        for (from, _) in ids().filter(|(_, node)| node.cpus > 0) {
            for (to, _) in ids().filter(|(_, node)| node.memory_mib > 0) {
                let (latency, bandwidth) = if self.slow.contains(&to) { SLOW_MEMORY } else { FAST_MEMORY };
                let pair = format!("hmat-lb,initiator={from},target={to},hierarchy=memory");
                all.push(format!("{pair},data-type=access-latency,latency={latency}"));
                all.push(format!("{pair},data-type=access-bandwidth,bandwidth={bandwidth}"));
            }
        }
        all
    }
}

fn list<T>(
    text: &str,
    option: &'static str,
    expected: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>, SpecError> {
    text.split(',')
        .map(|entry| {
            let entry = entry.trim();
            parse(entry).ok_or_else(|| SpecError::Value { option, value: entry.to_owned(), expected })
        })
        .collect()
}

const SIZE_FORMAT: &str = "a size such as 512M or 2G";

fn mebibytes(text: &str) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    let (number, factor) = match text.strip_suffix(['M', 'm']) {
        Some(number) => (number, 1),
        None => (text.strip_suffix(['G', 'g'])?, 1024),
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

fn distance(text: &str) -> Option<u8> {
    text.parse().ok().filter(|value| (LOCAL_DISTANCE..=254).contains(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(machine: &GuestTopology) -> String {
        machine.qemu_args().join(" ")
    }

    #[test]
    fn firmware_reports_slow_memory() {
        let machine = |slow: &[usize]| {
            GuestTopology::parse(None, Some("2,0"), Some("512M,1G"), None).unwrap().with_slow(slow)
        };
        let slow = args(&machine(&[1]).unwrap());
        for words in [
            "-numa node,nodeid=0,cpus=0-1,memdev=m0,initiator=0",
            "-numa node,nodeid=1,memdev=m1,initiator=0 -machine hmat=on",
            "initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=400",
            "initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=20G",
        ] {
            assert!(slow.contains(words), "{words}: {slow}");
        }
        assert!(!args(&machine(&[]).unwrap()).contains("hmat"));
        for wrong in [0, 2] {
            assert!(machine(&[wrong]).unwrap_err().to_string().contains("cannot be slow"), "{wrong}");
        }
    }

    #[test]
    fn default_has_two_nodes() {
        let machine = GuestTopology::parse(None, None, None, None).unwrap();
        assert_eq!(machine.nodes(), [DEFAULT_NODE; 2]);
        assert_eq!(
            args(&machine),
            "-smp 4,sockets=2,cores=2 -m 1024M \
             -object memory-backend-ram,id=m0,size=512M -numa node,nodeid=0,cpus=0-1,memdev=m0 \
             -object memory-backend-ram,id=m1,size=512M -numa node,nodeid=1,cpus=2-3,memdev=m1"
        );
    }

    #[test]
    fn nodes_may_lack_cpus_or_memory() {
        let machine = GuestTopology::parse(Some(3), Some("2,1,0"), Some("512M,0,1G"), None).unwrap();
        assert_eq!(
            args(&machine),
            "-smp 3,sockets=3,cores=1 -m 1536M \
             -object memory-backend-ram,id=m0,size=512M -numa node,nodeid=0,cpus=0-1,memdev=m0 \
             -numa node,nodeid=1,cpus=2-2 \
             -object memory-backend-ram,id=m2,size=1024M -numa node,nodeid=2,memdev=m2"
        );
    }

    #[test]
    fn cores_may_have_siblings() {
        let machine = |cpus, threads| {
            GuestTopology::parse(None, Some(cpus), Some("512M,512M"), None).unwrap().with_threads(threads)
        };
        let start = |cpus| args(&machine(cpus, 2).unwrap()).split(" -m ").next().unwrap().to_owned();
        assert_eq!(start("4,4"), "-smp 8,sockets=2,cores=2,threads=2");
        assert_eq!(start("2,4"), "-smp 6,sockets=3,cores=1,threads=2");
        let error = machine("4,3", 2).unwrap_err().to_string();
        assert_eq!(error, "node 1 has 3 CPUs, which are no whole cores of 2 CPUs");
    }

    #[test]
    fn topology_with_room_has_slots() {
        let node = |cpus, memory_mib| GuestNode { cpus, memory_mib };
        let machine = GuestTopology::with_room(vec![node(1, 512), node(0, 0)], None, 256).unwrap();
        assert!(machine.has_room());
        assert_eq!(
            args(&machine),
            "-smp 1,sockets=1,cores=1 -m 512M,slots=4,maxmem=768M \
             -object memory-backend-ram,id=m0,size=512M -numa node,nodeid=0,cpus=0-0,memdev=m0 \
             -numa node,nodeid=1"
        );
        let error = GuestTopology::with_room(vec![node(0, 0), node(1, 512)], None, 256).unwrap_err();
        assert!(error.to_string().contains("node 0 has neither CPUs nor memory"), "{error}");
    }

    #[test]
    fn distances_set_every_pair() {
        let machine = GuestTopology::parse(None, None, None, Some("10,21;31,10")).unwrap();
        assert!(args(&machine).ends_with(
            "-numa dist,src=0,dst=0,val=10 -numa dist,src=0,dst=1,val=21 \
             -numa dist,src=1,dst=0,val=31 -numa dist,src=1,dst=1,val=10"
        ));
    }

    #[test]
    fn refuses_invalid_descriptions() {
        type ListOptions = (Option<usize>, Option<&'static str>, Option<&'static str>, Option<&'static str>);
        let table: &[(ListOptions, &str)] = &[
            ((Some(0), None, None, None), "0 nodes: a machine has 1 to 128"),
            ((Some(2), Some("2,2,0"), None, None), "--cpus has 3 entries, but there are 2 nodes"),
            ((None, Some("2,2"), Some("1G"), None), "--memory has 1 entries, but there are 2 nodes"),
            ((None, Some("2,x"), None, None), "--cpus: `x` is not a number of CPUs"),
            ((None, None, Some("512,1G"), None), "--memory: `512` is not a size such as 512M or 2G"),
            ((None, None, Some("99999999999999999999G"), None), "is not a size"),
            ((None, Some("0,0"), None, None), "0 CPUs in all"),
            ((None, Some("200,200"), None, None), "400 CPUs in all: a machine has 1 to 255"),
            ((None, Some("2,0"), Some("1G,0"), None), "node 1 has neither CPUs nor memory"),
            ((None, None, Some("64M"), None), "64 MiB of memory in all"),
            ((None, None, None, Some("10,21;21")), "row 1 has 1 entries"),
            ((Some(3), None, None, Some("10,21;21,10")), "--distances has 2 entries, but there are 3 nodes"),
            ((None, None, None, Some("10,10;21,10")), "from node 0 to node 1 it is 10"),
            ((None, None, None, Some("11,21;21,10")), "from node 0 to node 0 it is 11"),
            ((None, None, None, Some("10,255;21,10")), "`255` is not a distance from 10 to 254"),
        ];
        for ((nodes, cpus, memory, distances), message) in table {
            let error = GuestTopology::parse(*nodes, *cpus, *memory, *distances).unwrap_err().to_string();
            assert!(error.contains(message), "{error:?} should contain {message:?}");
        }
    }
}

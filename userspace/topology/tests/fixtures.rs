//! Reads the machines of `fixtures/`: complete, with missing files, and with corrupt files.

#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

mod tree;

use std::{fs, path::Path};

use numaward_topology::{
    Bytes, CacheId, CoreId, CpuId, HugepageSize, Machine, NodeId, SocketId,
    sysfs::{ReadError, node_memory, read},
};

const INTEL: &str = include_str!("fixtures/intel-2s.txt");
const AMD: &str = include_str!("fixtures/amd-nps4.txt");
const ARM: &str = include_str!("fixtures/arm-2s.txt");
const GRACE: &str = include_str!("fixtures/grace.txt");
const CXL: &str = include_str!("fixtures/cxl.txt");
const ODD: &str = include_str!("fixtures/odd.txt");

const TWO_MIB: HugepageSize = HugepageSize(Bytes::mib(2));
const ONE_GIB: HugepageSize = HugepageSize(Bytes::gib(1));

fn read_fixture(fixture: &str) -> Machine {
    read(tree::unpack(fixture).path()).unwrap()
}

/// Removes the memory blocks. They depend on the holes in the address space, which the builder does not know.
fn without_blocks(mut machine: Machine) -> Machine {
    for node in machine.nodes.values_mut() {
        node.memory_blocks.clear();
    }
    machine.memory_block_size = Bytes(0);
    machine
}

fn blocks(machine: &Machine, node: u32) -> (Option<u64>, Option<u64>, usize) {
    let blocks = &machine.nodes[&NodeId(node)].memory_blocks;
    (blocks.first().copied(), blocks.last().copied(), blocks.len())
}

#[test]
fn reads_intel_with_two_sockets() {
    let root = tree::unpack(INTEL);
    let machine = read(root.path()).unwrap();
    let mut expected = Machine::builder()
        .nodes(2)
        .sockets(2)
        .cores_per_node(8)
        .smt(2)
        .distances([[10, 21], [21, 10]])
        .hugepages(ONE_GIB, 4)
        .node(NodeId(0), |node| node.memory(Bytes::kib(98_537_472)).hugepages(TWO_MIB, 512))
        .node(NodeId(1), |node| node.memory(Bytes::kib(99_090_432)))
        .isolated_cpus("6-7,22-23".parse().unwrap())
        .build()
        .unwrap();
    expected.possible_cpus = "0-63".parse().unwrap();
    let pool = expected.nodes.get_mut(&NodeId(0)).unwrap().hugepages.get_mut(&TWO_MIB).unwrap();
    (pool.free, pool.surplus) = (500, 2);
    assert_eq!(without_blocks(machine.clone()), without_blocks(expected));

    assert_eq!(machine.memory_block_size, Bytes::gib(2));
    assert_eq!(blocks(&machine, 0), (Some(0), Some(48), 48));
    assert_eq!(blocks(&machine, 1), (Some(49), Some(96), 48));
    let sections: Vec<(u64, NodeId)> = machine.memory_sections().collect();
    assert_eq!(sections.len(), 96 * 16);
    assert_eq!(sections[15..17], [(15, NodeId(0)), (32, NodeId(0))]);
    assert!(sections.contains(&(49 * 16 - 1, NodeId(0))) && sections.contains(&(49 * 16, NodeId(1))));

    let memory = node_memory(root.path(), NodeId(0)).unwrap();
    assert_eq!(memory.total, Bytes::kib(98_537_472));
    assert_eq!(memory.free, Bytes::kib(90_177_536));
    assert_eq!(memory.hugepages[&TWO_MIB].free, 500);
}

#[test]
fn reads_amd_with_eight_nodes() {
    let machine = read_fixture(AMD);
    let mut expected = Machine::builder()
        .nodes(8)
        .sockets(2)
        .cores_per_node(8)
        .smt(2)
        .caches_per_node(2)
        .memory(Bytes::gib(32))
        .hugepages(TWO_MIB, 0)
        .node(NodeId(5), |node| node.memory(Bytes(0)))
        .socket_distances(12, 32)
        .build()
        .unwrap();
    expected.possible_nodes = "0-31".parse().unwrap();
    assert_eq!(machine, expected);
}

#[test]
fn reads_arm_with_two_sockets() {
    let machine = read_fixture(ARM);
    assert_eq!(machine.node_ids().to_string(), "0-1");
    assert_eq!(machine.cpu_ids().to_string(), "0-4,6-31");
    assert_eq!(machine.possible_cpus.to_string(), "0-31");
    assert_eq!(machine.nodes[&NodeId(0)].cpus.to_string(), "0-4,6-15");
    let cpu = machine.cpus[&CpuId(17)];
    assert_eq!((cpu.node, cpu.core, cpu.socket), (NodeId(1), CoreId(17), SocketId(3180)));
    assert_eq!(cpu.last_level_cache, Some(CacheId(16)));
    assert_eq!(machine.cpus[&CpuId(6)].socket, SocketId(36));
    assert_eq!(machine.distance(NodeId(1), NodeId(0)), Some(20));
    assert_eq!(machine.distance(NodeId(1), NodeId(1)), Some(10), "the kernel's default fills a short file");
    let sizes: Vec<String> = machine.nodes[&NodeId(0)].hugepages.keys().map(ToString::to_string).collect();
    assert_eq!(sizes, ["512Mi"]);
    assert_eq!(machine.memory_block_size, Bytes::mib(512));
    let sections: Vec<(u64, NodeId)> = machine.memory_sections().collect();
    assert_eq!(sections[0], (16, NodeId(0)));
    assert_eq!(sections[64], (80, NodeId(1)));
}

#[test]
fn reads_memory_only_node() {
    let machine = read_fixture(CXL);
    assert_eq!(
        (machine.node_ids().to_string(), machine.possible_nodes.to_string()),
        ("0,2".into(), "0-2".into())
    );
    let expander = &machine.nodes[&NodeId(2)];
    assert!(expander.cpus.is_empty());
    assert_eq!(expander.memory, Bytes::gib(64));
    assert_eq!(machine.distance(NodeId(0), NodeId(2)), Some(14));
    assert_eq!(machine.distance(NodeId(0), NodeId(1)), None, "node 1 is possible, not online");
    assert_eq!(blocks(&machine, 2), (Some(64), Some(95), 32));
    assert_eq!(machine.cpus[&CpuId(9)].core, CoreId(1));
    assert!(machine.isolated_cpus.is_empty());
    let tiers: Vec<_> = machine.nodes.values().map(|node| node.memory_tier).collect();
    assert_eq!(tiers, [Some(4), Some(22)]);

    // Older kernels have no tiers, and a tier may disappear during the read. A malformed list is an error.
    let root = tree::unpack(CXL);
    let tiers = "sys/devices/virtual/memory_tiering";
    let tier = format!("{tiers}/memory_tier22/nodelist");
    let of_expander = |machine: Machine| machine.nodes[&NodeId(2)].memory_tier;
    assert_eq!(of_expander(read_changed(root.path(), tiers, &PathChange::Missing).unwrap()), None);
    assert_eq!(of_expander(read_changed(root.path(), &tier, &PathChange::Missing).unwrap()), None);
    let error = read_changed(root.path(), &tier, &PathChange::Text(b"two")).unwrap_err().to_string();
    assert!(error.contains("memory_tier22/nodelist") && error.contains("two"), "{error}");
}

#[test]
fn reads_arm_with_gpu_memory() {
    let machine = read_fixture(GRACE);
    assert_eq!(machine.node_ids().to_string(), "0-8");
    let size = |id: u32| machine.nodes[&NodeId(id)].memory;
    assert_eq!((size(0), size(1), size(8)), (Bytes::gib(480), Bytes::gib(96), Bytes(0)));
    let with_cpus: Vec<_> = machine.nodes.iter().filter(|(_, node)| !node.cpus.is_empty()).collect();
    assert!(matches!(with_cpus[..], [(NodeId(0), node)] if node.cpus.to_string() == "0-71"));
    // The machine has no SMT, and its caches have no `id` file.
    let cpu = machine.cpus[&CpuId(71)];
    assert_eq!((cpu.core, cpu.socket, cpu.last_level_cache), (CoreId(71), SocketId(0), Some(CacheId(0))));
    assert_eq!(machine.distance(NodeId(0), NodeId(1)), Some(80));
    assert_eq!(machine.distance(NodeId(1), NodeId(2)), Some(255), "no path between them");
    for node in machine.nodes.values() {
        let sizes: Vec<String> = node.hugepages.keys().map(ToString::to_string).collect();
        assert_eq!(sizes, ["2Mi", "512Mi"], "a node without memory has empty pools");
    }
    assert_eq!(blocks(&machine, 1), (Some(65_280), Some(65_471), 192));
    let sections: Vec<(u64, NodeId)> = machine.memory_sections().collect();
    assert_eq!(sections.first(), Some(&(16, NodeId(0))));
    assert_eq!(sections.last(), Some(&(65_471 * 4 + 3, NodeId(1))));
    assert_eq!(sections.len(), (960 + 192) * 4);
}

#[test]
fn machine_without_node_0_and_with_memory_on_few_nodes() {
    let machine = read_fixture(ODD);
    assert_eq!(machine.node_ids().to_string(), "4-7");
    let shown: Vec<_> = machine
        .nodes
        .values()
        .map(|node| (node.cpus.to_string(), node.memory, node.hugepages[&TWO_MIB].total))
        .collect();
    let expected = [("0-3", 16, 12), ("4-7", 16, 8), ("8-11", 0, 0), ("", 0, 0)]
        .map(|(cpus, memory, pages)| (cpus.to_owned(), Bytes::gib(memory), pages));
    assert_eq!(shown, expected);
    assert_eq!(machine.distance(NodeId(4), NodeId(7)), Some(12));
    assert_eq!(machine.distance(NodeId(0), NodeId(4)), None);
}

/// A change to one path of a machine.
enum PathChange {
    Missing,
    Text(&'static [u8]),
    /// A directory in place of a file, which even root cannot read.
    Unreadable,
}

/// Reads a machine with one path changed, and restores the path.
fn read_changed(root: &Path, path: &str, change: &PathChange) -> Result<Machine, ReadError> {
    let (file, aside) = (root.join(path), root.join("aside"));
    let was_there = fs::rename(&file, &aside).is_ok();
    match change {
        PathChange::Missing => assert!(was_there, "{path} is missing anyway"),
        PathChange::Text(text) => fs::write(&file, text).unwrap(),
        PathChange::Unreadable => fs::create_dir(&file).unwrap(),
    }
    let result = read(root);
    match change {
        PathChange::Missing => {}
        PathChange::Text(_) => fs::remove_file(&file).unwrap(),
        PathChange::Unreadable => fs::remove_dir(&file).unwrap(),
    }
    if was_there {
        fs::rename(&aside, &file).unwrap();
    }
    result
}

#[test]
fn optional_files_may_be_missing() {
    use PathChange::{Missing, Text};
    type Expect = fn(&mut Machine);
    let root = tree::unpack(INTEL);
    fs::write(root.path().join("sys/devices/system/node/possible"), "0-3\n").unwrap();
    let whole = read(root.path()).unwrap();
    let cases: [(&str, PathChange, Expect); 10] = [
        ("sys/devices/system/node/possible", Missing, |m| m.possible_nodes = "0-1".parse().unwrap()),
        ("sys/devices/system/cpu/possible", Missing, |m| m.possible_cpus = "0-31".parse().unwrap()),
        ("sys/devices/system/cpu/isolated", Missing, |m| m.isolated_cpus = "".parse().unwrap()),
        ("sys/devices/system/cpu/cpu9/cache", Missing, |m| {
            m.cpus.get_mut(&CpuId(9)).unwrap().last_level_cache = None;
        }),
        ("sys/devices/system/cpu/cpu9/cache/index3/type", Missing, |m| {
            m.cpus.get_mut(&CpuId(9)).unwrap().last_level_cache = Some(CacheId(9));
        }),
        ("sys/devices/system/cpu/cpu9/topology", Missing, |m| {
            m.cpus.get_mut(&CpuId(9)).unwrap().socket = SocketId(0);
        }),
        ("sys/devices/system/node/node0/distance", Missing, |m| {
            m.nodes.get_mut(&NodeId(0)).unwrap().distances = [(NodeId(0), 10), (NodeId(1), 20)].into();
        }),
        ("sys/devices/system/node/node1/hugepages", Missing, |m| {
            for pool in m.nodes.get_mut(&NodeId(1)).unwrap().hugepages.values_mut() {
                *pool = numaward_topology::HugepagePool::default();
            }
        }),
        ("sys/devices/system/memory/block_size_bytes", Missing, |m| m.memory_block_size = Bytes(0)),
        ("sys/devices/system/cpu/cpu9/topology/physical_package_id", Text(b"-1\n"), |m| {
            m.cpus.get_mut(&CpuId(9)).unwrap().socket = SocketId(0);
        }),
    ];
    for (path, change, expect) in cases {
        let mut expected = whole.clone();
        expect(&mut expected);
        assert_eq!(read_changed(root.path(), path, &change).unwrap(), expected, "{path}");
        assert_ne!(expected, whole, "{path}");
    }
}

#[test]
fn error_names_missing_or_corrupt_file() {
    use PathChange::{Missing, Text, Unreadable};
    let root = tree::unpack(INTEL);
    let cases = [
        ("sys/devices/system/cpu/online", Missing, "No such file"),
        ("sys/devices/system/cpu/online", Text(b"\n"), "at least one CPU"),
        (
            "sys/devices/system/cpu/online",
            Text(b"0-x\n"),
            "is not a CPU list such as `0-3,8`: \"x\" is not an id",
        ),
        ("sys/devices/system/cpu/online", Text(b"0-32\n"), "lists CPU 32, which no online node has"),
        ("sys/devices/system/cpu/online", Unreadable, "Is a directory"),
        ("sys/devices/system/cpu/possible", Text(b"0-99999999\n"), "above 65535"),
        ("sys/devices/system/node/possible", Text(b"0..3\n"), "is not a node list"),
        ("sys/devices/system/cpu/isolated", Text(b"3-2\n"), "the range \"3-2\" is reversed"),
        ("sys/devices/system/cpu/isolated", Unreadable, "Is a directory"),
        (
            "sys/devices/system/cpu/cpu9/topology/physical_package_id",
            Text(b"one\n"),
            "\"one\" is not a number",
        ),
        (
            "sys/devices/system/cpu/cpu9/topology/physical_package_id",
            Text(b"-7\n"),
            "\"-7\" is not a package id",
        ),
        (
            "sys/devices/system/cpu/cpu9/topology/core_cpus_list",
            Text(b"8,24\n"),
            "does not list CPU 9 itself",
        ),
        (
            "sys/devices/system/cpu/cpu9/cache/index3/shared_cpu_list",
            Text(b"0-7\n"),
            "does not list CPU 9 itself",
        ),
        (
            "sys/devices/system/cpu/cpu9/cache/index3/type",
            Text(b"Trace\n"),
            "\"Trace\" is not a kind of cache",
        ),
        (
            "sys/devices/system/cpu/cpu9/cache/index3/level",
            Text(b"\n"),
            "\"\" is not a number (the cache level)",
        ),
        ("sys/devices/system/node/online", Text(b"\xff\xfe"), "is not UTF-8 text"),
        ("sys/devices/system/node/online", Missing, "No such file"),
        ("sys/devices/system/node/online", Text(b"\n"), "at least one node"),
        (
            "sys/devices/system/node/online",
            Text(b"0-2\n"),
            "sys/devices/system/node/node2/cpulist: No such file",
        ),
        ("sys/devices/system/node/node1/cpulist", Missing, "No such file"),
        ("sys/devices/system/node/node1/cpulist", Text(b"7-15\n"), "lists CPU 7, which node 0 lists too"),
        ("sys/devices/system/node/node1/meminfo", Missing, "No such file"),
        ("sys/devices/system/node/node1/meminfo", Text(b"Node 1 MemFree: 1 kB\n"), "`MemTotal:`"),
        ("sys/devices/system/node/node1/meminfo", Text(b"Node 1 MemTotal: -1 kB\n"), "meminfo:1: "),
        (
            "sys/devices/system/node/node1/distance",
            Text(b"21 ten\n"),
            "\"21 ten\" is not one distance for each of the 2",
        ),
        (
            "sys/devices/system/node/node1/distance",
            Text(b"21 10 21\n"),
            "is not one distance for each of the 2",
        ),
        ("sys/devices/system/node/node1/distance", Text(b"21 0\n"), "is not one distance for each of the 2"),
        ("sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", Missing, "No such file"),
        (
            "sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages",
            Text(b"many"),
            "\"many\" is not a number",
        ),
        ("sys/devices/system/node/node1/memory99999999999999999999", Text(b""), "is not memoryNUMBER"),
        ("sys/devices/system/memory/block_size_bytes", Text(b"0x8000000\n"), "hexadecimal"),
        ("sys/devices/system/memory/block_size_bytes", Text(b"8000001\n"), "a power of two"),
        ("sys/devices/system/memory/block_size_bytes", Text(b"8000000000000000\n"), "at most 1 TiB"),
    ];
    for (path, change, message) in cases {
        let error = read_changed(root.path(), path, &change).expect_err(path).to_string();
        assert!(error.contains(message), "{path}: {error:?} does not say {message:?}");
        let named = path.rsplit_once('/').unwrap().0;
        assert!(error.contains(named) || message.contains("node"), "{path}: {error:?} does not name it");
    }
}

#[test]
fn reads_the_host() {
    let root = Path::new("/");
    let machine = read(root).unwrap();
    let usable = std::thread::available_parallelism().unwrap().get();
    assert!(machine.cpus.len() >= usable, "{machine:?} has {usable} CPUs");
    assert_eq!(machine.cpus_of(&machine.node_ids()), machine.cpu_ids());
    for (&id, node) in &machine.nodes {
        assert_eq!(machine.distance(id, id), Some(10));
        assert_eq!(node.distances.len(), machine.nodes.len());
        let memory = node_memory(root, id).unwrap();
        assert!(memory.free <= memory.total, "{memory:?}");
    }
}

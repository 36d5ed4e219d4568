//! The reader of nodes and CPUs: [`read`].

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{
    ReadError,
    memory::{NO_NUMA_NODE, mem_total},
    source::{SysfsRoot, if_present},
};
use crate::{
    machine::{
        CacheId, CoreId, Cpu, HugepagePool, LOCAL_DISTANCE, Machine, NumaNode, REMOTE_DISTANCE, SocketId,
    },
    set::{CpuId, CpuSet, NodeId, NodeSet},
    units::{Bytes, HugepageSize},
};

pub(super) const NODES: &str = "sys/devices/system/node";
const CPUS: &str = "sys/devices/system/cpu";
/// The CPUs of efficiency cores on an Intel hybrid processor, listed by its PMU.
const ATOM_CPUS: &str = "sys/devices/cpu_atom/cpus";
const MEMORY: &str = "sys/devices/system/memory";
const MEMORY_TIERS: &str = "sys/devices/virtual/memory_tiering";
pub(super) const HUGEPAGES: &str = "sys/kernel/mm/hugepages";

/// The upper limit for a memory block: far above the 2 GiB of current kernels, and low enough for section numbers.
const LARGEST_MEMORY_BLOCK: u64 = 1 << 40;

/// Returns the CPUs that are present and offline; empty if the kernel does not list the present ones.
pub fn offline_cpus(root: &Path) -> Result<CpuSet, ReadError> {
    let source = SysfsRoot { root };
    let there: Option<CpuSet> = if_present(source.ids(&format!("{CPUS}/present"), "the present CPUs"))?;
    let online: CpuSet = source.ids(&format!("{CPUS}/online"), "the online CPUs; is sysfs mounted?")?;
    Ok(&there.unwrap_or_default() - &online)
}

/// Reads the machine below `root` (see [the module](super)).
///
/// Offline CPUs and nodes are skipped. A CPU without a known package (`-1`, as on Arm boards without ACPI) is on socket
/// 0. The last-level cache of a CPU is its unified cache of the highest level.
pub fn read(root: &Path) -> Result<Machine, ReadError> {
    read_with_known(root, None)
}

/// Reads the machine again. Known frequencies of CPUs are reused while the same CPUs are online, because the kernel may
/// interrupt a CPU to determine its base frequency.
pub fn read_again(root: &Path, known: &Machine) -> Result<Machine, ReadError> {
    read_with_known(root, Some(known))
}

fn read_with_known(root: &Path, known: Option<&Machine>) -> Result<Machine, ReadError> {
    let source = SysfsRoot { root };
    let list = format!("{CPUS}/online");
    let online: CpuSet = source.ids(&list, "the online CPUs; is sysfs mounted?")?;
    if online.is_empty() {
        return Err(source.malformed(&list, None, "", "a CPU list with at least one CPU"));
    }
    let possible: Option<CpuSet> = if_present(source.ids(&format!("{CPUS}/possible"), "the possible CPUs"))?;
    let isolated: Option<CpuSet> = if_present(source.ids(&format!("{CPUS}/isolated"), "the isolated CPUs"))?;

    let mut nodes = if source.exists(NODES) {
        numa_nodes(source, &online)?
    } else {
        BTreeMap::from([(NO_NUMA_NODE, single_node(source, &online)?)])
    };
    let possible_nodes: Option<NodeSet> =
        if_present(source.ids(&format!("{NODES}/possible"), "the possible NUMA nodes"))?;
    let sizes: BTreeSet<HugepageSize> = hugepage_sizes(source, HUGEPAGES)?
        .into_iter()
        .chain(nodes.values().flat_map(|node| node.hugepages.keys().copied()))
        .collect();
    for node in nodes.values_mut() {
        for &size in &sizes {
            // Nodes without memory have no pool directories.
            node.hugepages.entry(size).or_default();
        }
    }

    let cpus = cpus(source, &online, &nodes)?;
    Ok(Machine {
        memory_block_size: memory_block_size(source)?,
        possible_nodes: &possible_nodes.unwrap_or_default() | &nodes.keys().copied().collect(),
        possible_cpus: &possible.unwrap_or_default() | &online,
        isolated_cpus: &isolated.unwrap_or_default() & &online,
        nohz_full_cpus: &nohz_full(source)? & &online,
        efficiency_cpus: &efficiency_cpus(source, &online)? & &online,
        lower_frequency_cpus: match known {
            Some(known) if known.cpu_ids() == online && known.lower_frequency_cpus.is_some() => {
                known.lower_frequency_cpus.clone()
            }
            _ => lower_frequency_cpus(source, &online)?,
        },
        nodes,
        cpus,
    })
}

/// Reads the CPUs that stop their tick. The file contains `(null)` if the kernel supports this but was started without
/// `nohz_full=`.
fn nohz_full(source: SysfsRoot<'_>) -> Result<CpuSet, ReadError> {
    let file = format!("{CPUS}/nohz_full");
    match if_present(source.text(&file, "the CPUs whose tick stops"))? {
        Some(text) if text.trim() != "(null)" => source.ids(&file, "the CPUs whose tick stops"),
        _ => Ok(CpuSet::new()),
    }
}

/// Reads the CPUs of slower cores: those that the PMU of an Intel hybrid processor lists, else those whose capacity is
/// below the highest.
///
/// Source: `cpu_capacity` in Documentation/ABI/testing/sysfs-devices-system-cpu.
fn efficiency_cpus(source: SysfsRoot<'_>, online: &CpuSet) -> Result<CpuSet, ReadError> {
    if let Some(cpus) = if_present(source.ids(ATOM_CPUS, "the CPUs of efficiency cores"))? {
        return Ok(cpus);
    }
    Ok(cpus_below_highest(source, online, "cpu_capacity", "the CPU's capacity")?.unwrap_or_default())
}

/// Reads the CPUs that do not reach the highest frequency: by the base frequency, which firmware raises for some CPUs
/// (Intel Speed Select); if that is equal for all or missing, by the maximum frequency (favoured cores of Intel).
///
/// Returns `None` if a file cannot be read: `EBUSY` during a change of the driver must not prevent reading the rest of
/// the machine.
///
/// Sources: `base_frequency` in Documentation/admin-guide/pm/intel_pstate.rst, `cpuinfo_max_freq` in
/// Documentation/admin-guide/pm/cpufreq.rst.
fn lower_frequency_cpus(source: SysfsRoot<'_>, online: &CpuSet) -> Result<Option<CpuSet>, ReadError> {
    for (file, what) in [
        ("cpufreq/base_frequency", "the CPU's base frequency"),
        ("cpufreq/cpuinfo_max_freq", "the CPU's maximum frequency"),
    ] {
        match cpus_below_highest(source, online, file, what) {
            Ok(Some(cpus)) if !cpus.is_empty() => return Ok(Some(cpus)),
            Ok(_) => {}
            Err(ReadError::Unreadable { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(Some(CpuSet::new()))
}

/// Returns the CPUs with a number below the highest in this file; `None` unless every CPU has the file.
fn cpus_below_highest(
    source: SysfsRoot<'_>,
    online: &CpuSet,
    file: &str,
    what: &'static str,
) -> Result<Option<CpuSet>, ReadError> {
    let mut numbers: BTreeMap<u64, CpuSet> = BTreeMap::new();
    for cpu in online.iter() {
        let file = format!("{CPUS}/cpu{cpu}/{file}");
        let Some(number) = if_present(source.number(&file, what))? else { return Ok(None) };
        numbers.entry(number).or_default().insert(cpu);
    }
    numbers.pop_last();
    Ok(Some(numbers.into_values().fold(CpuSet::new(), |all, cpus| &all | &cpus)))
}

fn numa_nodes(source: SysfsRoot<'_>, online_cpus: &CpuSet) -> Result<BTreeMap<NodeId, NumaNode>, ReadError> {
    let list = format!("{NODES}/online");
    let ids = source.ids(&list, "the online NUMA nodes")?;
    if ids.is_empty() {
        return Err(source.malformed(&list, None, "", "a node list with at least one node"));
    }
    let ids: Vec<NodeId> = ids.iter().collect();
    let tiers = memory_tiers(source.root)?;
    let mut nodes = BTreeMap::new();
    for &id in &ids {
        let dir = format!("{NODES}/node{id}");
        let cpus: CpuSet = source.ids(&format!("{dir}/cpulist"), "the node's CPUs")?;
        let node = NumaNode {
            // Some architectures also list offline CPUs.
            cpus: &cpus & online_cpus,
            memory: mem_total(source, id)?,
            hugepages: hugepage_pools(source, &format!("{dir}/hugepages"), true)?,
            distances: distances(source, id, &ids)?,
            memory_blocks: source.numbered_entries(&dir, "memory", "", "the node's memory blocks")?,
            memory_tier: tiers.get(&id).copied(),
        };
        nodes.insert(id, node);
    }
    Ok(nodes)
}

/// Reads the only node of a kernel without NUMA.
fn single_node(source: SysfsRoot<'_>, online_cpus: &CpuSet) -> Result<NumaNode, ReadError> {
    Ok(NumaNode {
        cpus: online_cpus.clone(),
        memory: mem_total(source, NO_NUMA_NODE)?,
        hugepages: hugepage_pools(source, HUGEPAGES, true)?,
        distances: BTreeMap::from([(NO_NUMA_NODE, LOCAL_DISTANCE)]),
        memory_blocks: source.numbered_entries(MEMORY, "memory", "", "the memory blocks")?,
        memory_tier: None,
    })
}

/// Reads the memory tier of each node that has one: N of `memory_tierN`; lower is faster. Kernels before 6.1 report
/// none.
pub fn memory_tiers(root: &Path) -> Result<BTreeMap<NodeId, u32>, ReadError> {
    let source = SysfsRoot { root };
    let mut tiers = BTreeMap::new();
    if !source.exists(MEMORY_TIERS) {
        return Ok(tiers);
    }
    for tier in source.numbered_entries(MEMORY_TIERS, "memory_tier", "", "the memory tiers")? {
        let file = format!("{MEMORY_TIERS}/memory_tier{tier}/nodelist");
        // A tier disappears with its last node.
        let nodes: Option<NodeSet> = if_present(source.ids(&file, "the nodes of a memory tier"))?;
        let Ok(tier) = u32::try_from(tier) else { continue };
        tiers.extend(nodes.unwrap_or_default().iter().map(|node| (node, tier)));
    }
    Ok(tiers)
}

/// Reads the distance to each online node, in id order. If the file is missing or short, the kernel's defaults are
/// used.
fn distances(
    source: SysfsRoot<'_>,
    from: NodeId,
    nodes: &[NodeId],
) -> Result<BTreeMap<NodeId, u32>, ReadError> {
    let file = format!("{NODES}/node{from}/distance");
    let text = if_present(source.text(&file, "the node's distances"))?.unwrap_or_default();
    let values = text
        .split_whitespace()
        .map(|value| value.parse().ok().filter(|&distance: &u32| distance > 0))
        .collect::<Option<Vec<u32>>>();
    let Some(values) = values.filter(|values| values.len() <= nodes.len()) else {
        let expected = format!("one distance for each of the {} online nodes", nodes.len());
        return Err(source.malformed(&file, None, &text, expected));
    };
    let default = |to| if to == from { LOCAL_DISTANCE } else { REMOTE_DISTANCE };
    let rest = nodes.iter().skip(values.len()).map(|&to| default(to));
    Ok(nodes.iter().copied().zip(values.iter().copied().chain(rest)).collect())
}

fn hugepage_sizes(source: SysfsRoot<'_>, dir: &str) -> Result<Vec<HugepageSize>, ReadError> {
    let kib = source.numbered_entries(dir, "hugepages-", "kB", "the hugepage pools")?;
    Ok(kib.into_iter().map(|kib| HugepageSize(Bytes::kib(kib))).collect())
}

/// Reads the hugepage pools. The total of a pool includes free and surplus pages, so an empty pool has none of these:
/// their files are read only with `reads_empty_pools`, to check that they can be read.
pub(super) fn hugepage_pools(
    source: SysfsRoot<'_>,
    dir: &str,
    reads_empty_pools: bool,
) -> Result<BTreeMap<HugepageSize, HugepagePool>, ReadError> {
    let mut pools = BTreeMap::new();
    for size in hugepage_sizes(source, dir)? {
        let pool = format!("{dir}/hugepages-{}kB", size.0.0 >> 10);
        let total = source.number(&format!("{pool}/nr_hugepages"), "pages in the pool")?;
        let (free, surplus) = if total > 0 || reads_empty_pools {
            (
                source.number(&format!("{pool}/free_hugepages"), "free pages in the pool")?,
                source.number(&format!("{pool}/surplus_hugepages"), "surplus pages in the pool")?,
            )
        } else {
            (0, 0)
        };
        pools.insert(size, HugepagePool { total, free, surplus });
    }
    Ok(pools)
}

/// Reads the size of memory blocks. The file contains a hexadecimal number without a prefix.
fn memory_block_size(source: SysfsRoot<'_>) -> Result<Bytes, ReadError> {
    let file = format!("{MEMORY}/block_size_bytes");
    let Some(text) = if_present(source.text(&file, "the size of memory blocks"))? else {
        return Ok(Bytes(0));
    };
    u64::from_str_radix(text.trim(), 16)
        .ok()
        .filter(|size| size.is_power_of_two() && *size <= LARGEST_MEMORY_BLOCK)
        .map(Bytes)
        .ok_or_else(|| {
            let expected = "a block size in hexadecimal bytes (a power of two, at most 1 TiB)";
            source.malformed(&file, None, &text, expected)
        })
}

fn cpus(
    source: SysfsRoot<'_>,
    online: &CpuSet,
    nodes: &BTreeMap<NodeId, NumaNode>,
) -> Result<BTreeMap<CpuId, Cpu>, ReadError> {
    let mut node_of = BTreeMap::new();
    for (&id, node) in nodes {
        for cpu in node.cpus.iter() {
            if let Some(other) = node_of.insert(cpu, id) {
                return Err(ReadError::Inconsistent {
                    path: source.path(&format!("{NODES}/node{id}/cpulist")),
                    problem: format!("lists CPU {cpu}, which node {other} lists too"),
                });
            }
        }
    }
    online
        .iter()
        .map(|id| {
            let &node = node_of.get(&id).ok_or_else(|| ReadError::Inconsistent {
                path: source.path(&format!("{CPUS}/online")),
                problem: format!("lists CPU {id}, which no online node has"),
            })?;
            let cpu = Cpu {
                node,
                core: core(source, id, online)?,
                socket: socket(source, id)?,
                last_level_cache: last_level_cache(source, id, online)?,
            };
            Ok((id, cpu))
        })
        .collect()
}

/// Returns the core, identified by its lowest CPU. Without topology files, each CPU is a core.
fn core(source: SysfsRoot<'_>, cpu: CpuId, online: &CpuSet) -> Result<CoreId, ReadError> {
    // Kernels before 5.3 have only the second name.
    for file in ["core_cpus_list", "thread_siblings_list"] {
        if let Some(lowest) = lowest_of_shared(source, &format!("topology/{file}"), cpu, online)? {
            return Ok(CoreId(lowest.0));
        }
    }
    Ok(CoreId(cpu.0))
}

fn socket(source: SysfsRoot<'_>, cpu: CpuId) -> Result<SocketId, ReadError> {
    let file = format!("{CPUS}/cpu{cpu}/topology/physical_package_id");
    match if_present(source.number::<i64>(&file, "the package id"))? {
        None | Some(-1) => Ok(SocketId(0)),
        Some(id) => u32::try_from(id).map(SocketId).map_err(|_| {
            let expected = "a package id (-1 where it is unknown)";
            source.malformed(&file, None, &id.to_string(), expected)
        }),
    }
}

fn last_level_cache(
    source: SysfsRoot<'_>,
    cpu: CpuId,
    online: &CpuSet,
) -> Result<Option<CacheId>, ReadError> {
    let dir = format!("{CPUS}/cpu{cpu}/cache");
    let mut last = None;
    for index in source.numbered_entries(&dir, "index", "", "the CPU's caches")? {
        let dir = format!("{dir}/index{index}");
        let level = if_present(source.number::<u32>(&format!("{dir}/level"), "the cache level"))?;
        let kind = if_present(source.text(&format!("{dir}/type"), "the kind of cache"))?;
        // Firmware may describe only some of the caches.
        let (Some(level), Some(kind)) = (level, kind) else { continue };
        match kind.trim() {
            "Unified" => last = last.max(Some((level, index))),
            "Data" | "Instruction" => {}
            _ => {
                let expected = "a kind of cache (Unified, Data or Instruction)";
                return Err(source.malformed(&format!("{dir}/type"), None, &kind, expected));
            }
        }
    }
    let Some((_, index)) = last else { return Ok(None) };
    let lowest = lowest_of_shared(source, &format!("cache/index{index}/shared_cpu_list"), cpu, online)?;
    Ok(lowest.map(|lowest| CacheId(lowest.0)))
}

/// Returns the lowest online CPU in the list of sharing CPUs, if the file exists.
fn lowest_of_shared(
    source: SysfsRoot<'_>,
    file: &str,
    cpu: CpuId,
    online: &CpuSet,
) -> Result<Option<CpuId>, ReadError> {
    let file = format!("{CPUS}/cpu{cpu}/{file}");
    let shared: Option<CpuSet> = if_present(source.ids(&file, "the CPUs that share it"))?;
    let Some(shared) = shared else { return Ok(None) };
    if !shared.contains(cpu) {
        let problem = format!("{:?} does not list CPU {cpu} itself", shared.to_string());
        return Err(ReadError::Inconsistent { path: source.path(&file), problem });
    }
    Ok((&shared & online).first())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The files that every kernel has: two CPUs, no NUMA, no caches, no topology, no hugepages, no memory blocks.
    const BARE: [(&str, &str); 2] = [
        ("sys/devices/system/cpu/online", "0-1\n"),
        ("proc/meminfo", "MemTotal: 1024 kB\nMemFree: 512 kB\n"),
    ];

    fn read_with(files: &[(&str, &str)]) -> Result<Machine, ReadError> {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in BARE.iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        read(root.path())
    }

    #[test]
    fn a_bare_kernel_is_one_node() {
        let machine = read_with(&[]).unwrap();
        let node = NumaNode {
            cpus: "0-1".parse().unwrap(),
            memory: Bytes::mib(1),
            distances: BTreeMap::from([(NodeId(0), 10)]),
            ..NumaNode::default()
        };
        assert_eq!(machine.nodes, BTreeMap::from([(NodeId(0), node)]));
        assert_eq!(machine.possible_cpus.to_string(), "0-1");
        assert_eq!(machine.cpus[&CpuId(1)].core, CoreId(1));
        assert_eq!(machine.cpus[&CpuId(1)].socket, SocketId(0));
        assert_eq!(machine.cpus[&CpuId(1)].last_level_cache, None);
        assert_eq!(machine.memory_block_size, Bytes(0));
    }

    #[test]
    fn reads_slower_cores_by_pmu_or_capacity() {
        let slower = |files: &[(&str, &str)]| read_with(files).unwrap().efficiency_cpus.to_string();
        let capacities = |second: &'static str| {
            let (zero, one) =
                ("sys/devices/system/cpu/cpu0/cpu_capacity", "sys/devices/system/cpu/cpu1/cpu_capacity");
            [(zero, "1024\n"), (one, second)]
        };
        assert_eq!(slower(&[]), "");
        assert_eq!(slower(&capacities("1024\n")), "", "all are alike");
        assert_eq!(slower(&capacities("446\n")), "1");
        assert_eq!(slower(&[("sys/devices/cpu_atom/cpus", "1-3\n")]), "1", "only online CPUs");
        let wrong = read_with(&capacities("fast\n")).unwrap_err().to_string();
        assert!(wrong.contains("cpu1/cpu_capacity") && wrong.contains("fast"), "{wrong}");
    }

    #[test]
    fn reads_frequency_by_base_or_maximum() {
        let lower = |files: &[(&str, [&'static str; 2])]| {
            let files: Vec<_> = files
                .iter()
                .flat_map(|(name, numbers)| {
                    let path = |cpu| format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/{name}");
                    [(path(0), numbers[0]), (path(1), numbers[1])]
                })
                .filter(|(_, number)| !number.is_empty())
                .collect();
            let files: Vec<_> = files.iter().map(|(path, number)| (path.as_str(), *number)).collect();
            read_with(&files).map(|machine| machine.lower_frequency_cpus.unwrap().to_string())
        };
        let (base, highest) = ("base_frequency", "cpuinfo_max_freq");
        assert_eq!(lower(&[]).unwrap(), "", "no frequency scaling");
        assert_eq!(lower(&[(base, ["2100000\n", "2700000\n"]), (highest, ["5\n", "4\n"])]).unwrap(), "0");
        assert_eq!(lower(&[(base, ["2100000\n", "2100000\n"]), (highest, ["5\n", "4\n"])]).unwrap(), "1");
        assert_eq!(lower(&[(highest, ["3900000\n", "3900000\n"])]).unwrap(), "", "all are alike");
        assert_eq!(lower(&[(highest, ["3900000\n", ""])]).unwrap(), "", "one CPU has no such file");
        let wrong = lower(&[(highest, ["fast\n", "1\n"])]).unwrap_err().to_string();
        assert!(wrong.contains("cpu0/cpufreq/cpuinfo_max_freq") && wrong.contains("fast"), "{wrong}");
    }

    #[test]
    fn frequencies_are_read_once() {
        let host = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = host.path().join("sys/devices/system/cpu").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let maximum = |cpu: u32, text: &str| write(&format!("cpu{cpu}/cpufreq/cpuinfo_max_freq"), text);
        for cpu in 0..3 {
            write(&format!("cpu{cpu}/topology/physical_package_id"), "0\n");
            write(&format!("cpu{cpu}/topology/core_id"), "0\n");
        }
        fs::create_dir_all(host.path().join("proc")).unwrap();
        fs::write(host.path().join("proc/meminfo"), "MemTotal: 1024 kB\n").unwrap();
        write("online", "0-1\n");
        maximum(0, "2\n");
        maximum(1, "1\n");
        let lower = |machine: Machine| machine.lower_frequency_cpus.map(|cpus| cpus.to_string());
        let known = read(host.path()).unwrap();
        assert_eq!(lower(known.clone()).unwrap(), "1");
        maximum(0, "0\n");
        assert_eq!(read_again(host.path(), &known).unwrap(), known);
        maximum(2, "1\n");
        write("online", "0-2\n");
        assert_eq!(lower(read_again(host.path(), &known).unwrap()).unwrap(), "0");

        // Frequencies that cannot be read are unknown and read again the next time.
        let busy = host.path().join("sys/devices/system/cpu/cpu2/cpufreq/cpuinfo_max_freq");
        fs::remove_file(&busy).unwrap();
        fs::create_dir(&busy).unwrap();
        let unknown = read(host.path()).unwrap();
        assert_eq!(lower(unknown.clone()), None);
        fs::remove_dir(&busy).unwrap();
        maximum(2, "1\n");
        assert_eq!(lower(read_again(host.path(), &unknown).unwrap()).unwrap(), "0");
    }

    #[test]
    fn cpus_whose_tick_stops_are_read() {
        let nohz_full = |text: &str| {
            read_with(&[("sys/devices/system/cpu/nohz_full", text)]).map(|machine| machine.nohz_full_cpus)
        };
        assert_eq!(nohz_full("1-3\n").unwrap().to_string(), "1");
        assert_eq!(nohz_full("  (null)\n").unwrap().to_string(), "", "started without nohz_full=");
        assert_eq!(nohz_full("\n").unwrap().to_string(), "");
        assert!(nohz_full("x\n").is_err());
    }

    #[test]
    fn without_numa_node_0_has_all_memory() {
        let machine = read_with(&[
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "5\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "4\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages", "1\n"),
            ("sys/devices/system/memory/block_size_bytes", "8000000\n"),
            ("sys/devices/system/memory/memory0/state", "online\n"),
            ("sys/devices/system/memory/memory32/state", "online\n"),
        ])
        .unwrap();
        let node = &machine.nodes[&NodeId(0)];
        let pool = HugepagePool { total: 5, free: 4, surplus: 1 };
        assert_eq!(node.hugepages, BTreeMap::from([(HugepageSize(Bytes::mib(2)), pool)]));
        assert_eq!(node.memory_blocks, [0, 32]);
        assert_eq!(machine.memory_block_size, Bytes::mib(128));
        assert_eq!(machine.memory_sections().collect::<Vec<_>>(), [(0, NodeId(0)), (32, NodeId(0))]);
    }

    #[test]
    fn reads_old_name_of_sibling_lists() {
        let machine =
            read_with(&[("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n")]).unwrap();
        assert_eq!(machine.cpus[&CpuId(1)].core, CoreId(0));
    }

    #[test]
    fn offline_cpu_does_not_name_its_core() {
        let machine = read_with(&[
            ("sys/devices/system/cpu/online", "1-2\n"),
            ("sys/devices/system/cpu/cpu1/topology/core_cpus_list", "0-2\n"),
        ])
        .unwrap();
        assert_eq!(machine.cpus[&CpuId(1)].core, CoreId(1));
    }

    #[test]
    fn refuses_missing_online_cpus() {
        let root = tempfile::tempdir().unwrap();
        let error = read(root.path()).unwrap_err().to_string();
        assert!(error.contains("sys/devices/system/cpu/online: No such file"), "{error}");
        assert!(error.contains("is sysfs mounted?"), "{error}");
    }
}

//! The allocation probe: loads one of its programs, fills its maps, and checks that it counts right.
//!
//! See `ebpf/src/alloc.rs` for what the maps mean.

use std::{
    collections::BTreeMap,
    error::Error,
    fs, io,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    time::Duration,
};

use aya::{
    Btf, Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray},
    programs::{Program, ProgramError},
};
use aya_log::{EbpfLogger, Level};
use numaward_abi::{
    AllocCounters, AllocTotals, MAX_NODE_IDS, MAX_NODES, NodeTable, OTHER_SLOT, Slot, UNKNOWN_NODE,
};
use numaward_topology::{Machine, NodeId, NodeSet, machine::SECTION_SIZE};

use crate::{
    CgroupId, Counters, MapAccessError, Mode, NodeCounters, Options, Pages, Probe, ProbeStats, SelfCheck,
    btf::{BtfError, KernelLayout},
    explain::explain,
    rows::{Layout, Rows},
    self_check, sys, tracefs,
};

/// Sections that `SECTION_NODE` holds at most: 512 TiB of physical address space.
const MAX_SECTIONS: u64 = 1 << 22;

/// The object, where the build had a toolchain for it.
#[cfg(numaward_ebpf)]
static OBJECT: Result<&[u8], &str> =
    Ok(aya::include_bytes_aligned!(concat!(env!("NUMAWARD_EBPF_DIR"), "/alloc")));
#[cfg(not(numaward_ebpf))]
static OBJECT: Result<&[u8], &str> = Err(env!("NUMAWARD_EBPF_MISSING"));

/// Why the probe does not run in one mode.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("this binary has no probes: {0}")]
    NotBuilt(&'static str),
    #[error("the kernel has no BTF (/sys/kernel/btf/vmlinux: {0}); it needs CONFIG_DEBUG_INFO_BTF")]
    NoBtf(io::Error),
    #[error(transparent)]
    Btf(#[from] BtfError),
    #[error(transparent)]
    Tracepoint(#[from] tracefs::FormatError),
    #[error("the machine's memory blocks are not known (CONFIG_MEMORY_HOTPLUG), and it has several nodes")]
    NoSections,
    #[error("no map holds {slots} slots for {nodes} nodes; fewer slots need less")]
    TooManySlots { slots: u32, nodes: u32 },
    #[error("cannot tell the number of CPUs: {0}")]
    Cpus(io::Error),
    #[error("the object has no {0}; rebuild it")]
    Incomplete(&'static str),
    #[error("{0}")]
    Kernel(String),
    #[error(transparent)]
    Map(#[from] MapAccessError),
    #[error(transparent)]
    SelfCheck(#[from] self_check::Mismatch),
    #[error("switched off")]
    Unwanted,
}

impl Refusal {
    fn kernel(error: &(dyn Error + 'static)) -> Self {
        Self::Kernel(explain(error))
    }
}

/// The attached probe. Dropping it detaches.
pub(crate) struct Alloc {
    pub(crate) mode: Mode,
    pub(crate) self_check: SelfCheck,
    /// Whether tasks are preempted inside the program, and events of other tasks lost meanwhile.
    pub(crate) preemptible: bool,
    /// By node index.
    nodes: Vec<NodeId>,
    rows: Rows,
    generation: (Array<MapData, u64>, u64),
    roots: HashMap<MapData, u64, u32>,
    slots: Array<MapData, Slot>,
    totals: PerCpuArray<MapData, AllocTotals>,
    logger: Option<EbpfLogger<&'static dyn log::Log>>,
    /// Holds the program and its link.
    ebpf: Ebpf,
}

impl std::fmt::Debug for Alloc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Alloc")
            .field("mode", &self.mode)
            .field("rows", &self.rows.layout)
            .finish_non_exhaustive()
    }
}

impl Alloc {
    /// Loads and attaches the probe in one mode.
    pub(crate) fn load(options: &Options<'_>, mode: Mode) -> Result<Self, Refusal> {
        let object = OBJECT.map_err(Refusal::NotBuilt)?;
        let kernel = fs::read("/sys/kernel/btf/vmlinux").map_err(Refusal::NoBtf);
        let kernel = kernel.and_then(|data| Ok(KernelLayout::from_btf(&data)?));
        let kernel = match (mode, kernel) {
            (Mode::TpBtf, kernel) => {
                let kernel = kernel?;
                KernelLayout { node_shift: options.fakes.node_shift.unwrap_or(kernel.node_shift), ..kernel }
            }
            // Works without, only slower.
            (_, kernel) => kernel.unwrap_or(KernelLayout::unknown()),
        };
        Self::load_with(object, options, mode, kernel).or_else(|refusal| {
            match (&refusal, kernel.cgroup_path) {
                // Perhaps this kernel's verifier does not let the probe follow the path to the cgroup.
                (Refusal::Kernel(reason), Some(_)) => {
                    log::debug!("alloc by {mode} without a direct path to the cgroup's id: {reason}");
                    Self::load_with(
                        object,
                        options,
                        mode,
                        KernelLayout { node_shift: kernel.node_shift, ..KernelLayout::unknown() },
                    )
                    .map_err(|_| refusal)
                }
                _ => Err(refusal),
            }
        })
    }

    fn load_with(
        object: &[u8],
        options: &Options<'_>,
        mode: Mode,
        kernel: KernelLayout,
    ) -> Result<Self, Refusal> {
        let machine = options.machine;
        let nodes: Vec<NodeId> = machine
            .nodes
            .keys()
            .copied()
            .filter(|node| (node.0 as usize) < MAX_NODE_IDS)
            .take(MAX_NODES)
            .collect();
        let node_count = u32::try_from(nodes.len()).unwrap_or(u32::MAX).max(1);
        let sections = match mode {
            Mode::TpBtf => Sections::none(),
            Mode::Tracepoint => {
                tracefs::check_format(Path::new("/"), "kmem/mm_page_alloc", &tracefs::MM_PAGE_ALLOC)?;
                Sections::new(machine, &nodes)?
            }
            Mode::Absent => return Err(Refusal::Unwanted),
        };

        let cpus = aya::util::nr_cpus().map_err(|(_, error)| Refusal::Cpus(error))?;
        let slots = options.slots.saturating_add(1);
        let homes = homes(machine, &nodes, options.fakes.cpu_node);
        let home_nodes = homes.values().copied().collect::<std::collections::BTreeSet<_>>().len();
        let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let layout = Layout::new(slots, node_count, to_u32(home_nodes), to_u32(cpus))
            .ok_or(Refusal::TooManySlots { slots, nodes: node_count })?;

        let cgroup_path = kernel.cgroup_path.unwrap_or_default();
        // Around programs of classic tracepoints, the kernel disables preemption and migration.
        let migration_disabled =
            kernel.migration_disabled.filter(|_| mode == Mode::TpBtf).unwrap_or_default();
        let btf = Btf::from_sys_fs().ok();
        let (ctr, ctr_shared) = layout.entries();
        let shards = if layout.per_cpu { 0 } else { layout.copies };
        let log_level = if options.debug_log { Level::Debug as u8 } else { 0 };
        let log_size = if options.debug_log { 1 << 17 } else { to_u32(sys::page_size()) };
        let mut ebpf = EbpfLoader::new()
            .btf(btf.as_ref())
            .override_global("NODE_SHIFT", &kernel.node_shift, true)
            .override_global("CGROUP_PATH", &cgroup_path, true)
            .override_global("MIGRATION_DISABLED", &migration_disabled, true)
            .override_global("NODES", &node_count, true)
            .override_global("SHARDS", &shards, true)
            .override_global("SHARD_ROWS", &layout.rows, true)
            .override_global("SECTION_SHIFT", &sections.shift, true)
            .override_global(aya_log::LEVEL, &log_level, true)
            .map_max_entries("AYA_LOGS", log_size)
            .map_max_entries("ROOTS", options.slots.max(1))
            .map_max_entries("SLOTS", slots)
            .map_max_entries("CTR", ctr)
            .map_max_entries("CTR_SHARED", ctr_shared)
            .map_max_entries("SECTION_NODE", to_u32(sections.node_index.len()))
            .load(object)
            .map_err(|error| Refusal::kernel(&error))?;

        let mut take = |name| ebpf.take_map(name).ok_or(Refusal::Incomplete(name));
        let rows = Rows {
            layout,
            map: match take(layout.map())? {
                Map::PerCpuArray(map) | Map::Array(map) => map,
                _ => return Err(Refusal::Incomplete(layout.map())),
            },
        };
        let mut node_table: Array<_, NodeTable> = typed(take("NODE_TABLE")?, "NODE_TABLE")?;
        let mut section_node: Array<_, u16> = typed(take("SECTION_NODE")?, "SECTION_NODE")?;
        let mut alloc = Self {
            mode,
            self_check: SelfCheck::Unchecked("not asked for".to_owned()),
            preemptible: false,
            rows,
            generation: (typed(take("GENERATION")?, "GENERATION")?, 0),
            roots: typed(take("ROOTS")?, "ROOTS")?,
            slots: typed(take("SLOTS")?, "SLOTS")?,
            totals: typed(take("TOTALS")?, "TOTALS")?,
            logger: None,
            ebpf,
            nodes,
        };
        if options.debug_log {
            alloc.logger = Some(EbpfLogger::init(&mut alloc.ebpf).map_err(|error| Refusal::kernel(&error))?);
        }

        set(&mut node_table, "NODE_TABLE", 0, &node_table_of(&alloc.nodes, &homes))?;
        for (section, index) in (0..).zip(&sections.node_index) {
            set(&mut section_node, "SECTION_NODE", section, index)?;
        }
        alloc.set_allowed(OTHER_SLOT, None)?;

        alloc.attach(btf.as_ref()).map_err(|error| Refusal::kernel(&error))?;
        // Also shows early whether the kernel lets us read.
        let before = alloc.read(OTHER_SLOT)?;
        if options.self_check {
            let touched = self_check::touch(&alloc.nodes);
            // Each CPU searches its first slot now, the one of this thread at least.
            let totals = alloc.totals()?;
            alloc.preemptible = 2 * totals.preemptible > totals.resolved;
            alloc.self_check = self_check::compare(&alloc.nodes, touched, &before, &alloc.read(OTHER_SLOT)?)?;
        }
        Ok(alloc)
    }

    fn attach(&mut self, btf: Option<&Btf>) -> Result<(), ProgramError> {
        let name = program_name(self.mode);
        match (self.ebpf.program_mut(name), btf) {
            (Some(Program::BtfTracePoint(program)), Some(btf)) => {
                program.load("mm_page_alloc", btf)?;
                program.attach()?;
            }
            (Some(Program::TracePoint(program)), _) => {
                program.load()?;
                program.attach("kmem", "mm_page_alloc")?;
            }
            _ => return Err(ProgramError::UnexpectedProgramType),
        }
        Ok(())
    }

    /// Books what `cgroup` and those below it allocate to `slot`, from now on.
    pub(crate) fn add_root(
        &mut self,
        cgroup: CgroupId,
        slot: u32,
        allowed: Option<&NodeSet>,
    ) -> Result<(), MapAccessError> {
        self.write_allowed(slot, allowed)?;
        self.roots.insert(cgroup.0, slot, 0).map_err(access("ROOTS", "write"))?;
        self.new_generation().inspect_err(|_| {
            // Else some CPUs would count the cgroup and others not.
            let _best_effort = self.roots.remove(&cgroup.0);
        })
    }

    /// Undoes [`Alloc::add_root`].
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId) -> Result<(), MapAccessError> {
        self.roots.remove(&cgroup.0).map_err(access("ROOTS", "write"))?;
        self.new_generation()
    }

    pub(crate) fn set_allowed(&mut self, slot: u32, allowed: Option<&NodeSet>) -> Result<(), MapAccessError> {
        self.write_allowed(slot, allowed)?;
        self.new_generation()
    }

    fn write_allowed(&mut self, slot: u32, allowed: Option<&NodeSet>) -> Result<(), MapAccessError> {
        let value = Slot { allowed: mask_of(&self.nodes, allowed) };
        set(&mut self.slots, "SLOTS", slot, &value)
    }

    /// Makes every CPU search slots and masks anew.
    fn new_generation(&mut self) -> Result<(), MapAccessError> {
        let (map, generation) = &mut self.generation;
        *generation += 1;
        set(map, "GENERATION", 0, generation)
    }

    /// The counters of one slot, by node index.
    pub(crate) fn read(&self, slot: u32) -> Result<Vec<AllocCounters>, MapAccessError> {
        self.rows.read(slot, 1)
    }

    /// The counters of the slots `0..end`: those of each slot by node index.
    pub(crate) fn read_up_to(&self, end: u32) -> Result<Vec<AllocCounters>, MapAccessError> {
        self.rows.read(OTHER_SLOT, end)
    }

    /// How many counters a slot has.
    pub(crate) fn nodes_per_slot(&self) -> usize {
        self.rows.layout.nodes as usize
    }

    /// What was counted since `base`, by node. An empty `base` is all zero.
    pub(crate) fn since(&self, base: &[AllocCounters], now: &[AllocCounters]) -> NodeCounters {
        let base = base.iter().copied().chain(std::iter::repeat(AllocCounters::default()));
        let growth = now.iter().zip(base).map(|(now, base)| Counters {
            user_local: Pages(now.user_local.saturating_sub(base.user_local)),
            user_remote: Pages(now.user_remote.saturating_sub(base.user_remote)),
            user_outside: Pages(now.user_outside.saturating_sub(base.user_outside)),
            kernel: Pages(now.kernel.saturating_sub(base.kernel)),
        });
        self.nodes.iter().copied().zip(growth).collect()
    }

    pub(crate) fn totals(&self) -> Result<AllocTotals, MapAccessError> {
        let per_cpu = self.totals.get(&0, 0).map_err(access("TOTALS", "read"))?;
        Ok(per_cpu.iter().fold(AllocTotals::default(), |sum, cpu| AllocTotals {
            unknown_node: sum.unknown_node + cpu.unknown_node,
            resolved: sum.resolved + cpu.resolved,
            preemptible: sum.preemptible + cpu.preemptible,
        }))
    }

    /// The name of the counters' map, and how many of its entries belong to one slot.
    pub(crate) fn counter_map(&self) -> (&'static str, u64) {
        let layout = self.rows.layout;
        (layout.map(), u64::from(layout.nodes) * if layout.per_cpu { 1 } else { u64::from(layout.copies) })
    }

    pub(crate) fn stats(&self) -> io::Result<ProbeStats> {
        let fd = match self.ebpf.program(program_name(self.mode)) {
            Some(Program::BtfTracePoint(program)) => program.fd(),
            Some(Program::TracePoint(program)) => program.fd(),
            _ => Err(ProgramError::NotLoaded),
        };
        let fd = fd.map_err(io::Error::other)?.as_fd().as_raw_fd();
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{fd}"))?;
        // Kernels that do not count something do not write its line.
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        Ok(ProbeStats {
            probe: Probe::Alloc,
            run_time: Duration::from_nanos(field("run_time_ns")),
            run_count: field("run_cnt"),
            events_lost: field("recursion_misses"),
        })
    }

    pub(crate) fn logger(&self) -> Option<&EbpfLogger<&'static dyn log::Log>> {
        self.logger.as_ref()
    }

    pub(crate) fn flush_log(&mut self) {
        if let Some(logger) = &mut self.logger {
            logger.flush();
        }
    }
}

/// The program of the object for a mode.
fn program_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Tracepoint => "alloc_tracepoint",
        Mode::TpBtf | Mode::Absent => "alloc_tp_btf",
    }
}

/// The table of memory sections.
#[derive(Debug, PartialEq, Eq)]
struct Sections {
    shift: u32,
    /// By section number.
    node_index: Vec<u16>,
}

impl Sections {
    /// For a probe that does not use it.
    fn none() -> Self {
        Self { shift: 0, node_index: vec![UNKNOWN_NODE] }
    }

    fn new(machine: &Machine, nodes: &[NodeId]) -> Result<Self, Refusal> {
        let index_of: BTreeMap<NodeId, u16> = nodes.iter().copied().zip(0..).collect();
        let sections: BTreeMap<u64, u16> = machine
            .memory_sections()
            .filter(|&(section, _)| section < MAX_SECTIONS)
            .filter_map(|(section, node)| Some((section, *index_of.get(&node)?)))
            .collect();
        match sections.last_key_value() {
            Some((&last, _)) => Ok(Self {
                shift: SECTION_SIZE.0.ilog2() - sys::page_size().ilog2(),
                node_index: (0..=last)
                    .map(|section| sections.get(&section).copied().unwrap_or(UNKNOWN_NODE))
                    .collect(),
            }),
            // With one node there is nothing to tell apart: all is one section.
            None if nodes.len() <= 1 => Ok(Self { shift: 63, node_index: vec![0] }),
            None => Err(Refusal::NoSections),
        }
    }
}

/// The index of the home node of each node's CPUs: the node itself or, where it has no memory, the
/// nearest that has; the lowest of several. In tests, `fake` for all.
fn homes(machine: &Machine, nodes: &[NodeId], fake: Option<NodeId>) -> BTreeMap<NodeId, u16> {
    let index_of: BTreeMap<NodeId, u16> = nodes.iter().copied().zip(0..).collect();
    let has_memory = |id: &NodeId| machine.nodes.get(id).is_some_and(|node| node.memory.0 > 0);
    let distance = |from, to| (machine.distance(from, to).unwrap_or(u32::MAX), to);
    let home_of = |&id: &NodeId| {
        let nearest = || nodes.iter().copied().filter(has_memory).min_by_key(|&to| distance(id, to));
        let home = if has_memory(&id) { id } else { nearest().unwrap_or(id) };
        // A fake that the machine does not have gets an index of no row: all pages are remote to it.
        let index = index_of.get(&fake.unwrap_or(home)).copied().unwrap_or(UNKNOWN_NODE - 1);
        (id, index)
    };
    nodes.iter().map(home_of).collect()
}

fn node_table_of(nodes: &[NodeId], homes: &BTreeMap<NodeId, u16>) -> NodeTable {
    let mut table = NodeTable { index: [UNKNOWN_NODE; MAX_NODE_IDS], home: [UNKNOWN_NODE; MAX_NODE_IDS] };
    for (&node, index) in nodes.iter().zip(0..) {
        table.index[node.0 as usize] = index;
        table.home[node.0 as usize] = homes.get(&node).copied().unwrap_or(index);
    }
    table
}

/// A bit for each node index. Nodes that the machine does not have cannot be told to the probe; no
/// page is on them.
fn mask_of(nodes: &[NodeId], allowed: Option<&NodeSet>) -> [u64; MAX_NODES / 64] {
    let Some(allowed) = allowed else { return [u64::MAX; MAX_NODES / 64] };
    let mut mask = [0; MAX_NODES / 64];
    for (index, _) in nodes.iter().enumerate().filter(|&(_, &node)| allowed.contains(node)) {
        mask[index / 64] |= 1 << (index % 64);
    }
    mask
}

fn typed<T: TryFrom<Map, Error = MapError>>(map: Map, name: &'static str) -> Result<T, Refusal> {
    T::try_from(map).map_err(|_| Refusal::Incomplete(name))
}

fn set<V: Pod>(
    map: &mut Array<MapData, V>,
    name: &'static str,
    index: u32,
    value: &V,
) -> Result<(), MapAccessError> {
    map.set(index, value, 0).map_err(access(name, "write"))
}

fn access(map: &'static str, action: &'static str) -> impl Fn(MapError) -> MapAccessError {
    move |error| MapAccessError {
        map,
        action,
        source: match error {
            MapError::SyscallError(error) => error.io_error,
            error => io::Error::other(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::{Bytes, CpuSet, machine::Node};

    use super::*;

    /// Nodes with their memory in MiB, memory blocks of 128 MiB, and distances to the others in order.
    fn machine(nodes: &[(u32, u64, &[u64], &[u32])]) -> Machine {
        let ids: Vec<NodeId> = nodes.iter().map(|&(id, ..)| NodeId(id)).collect();
        let node = |&(id, memory, blocks, distances): &(u32, u64, &[u64], &[u32])| {
            let node = Node {
                cpus: CpuSet::new(),
                memory: Bytes::mib(memory),
                memory_blocks: blocks.to_vec(),
                distances: ids.iter().copied().zip(distances.iter().copied()).collect(),
                ..Node::default()
            };
            (NodeId(id), node)
        };
        let nodes = nodes.iter().map(node).collect();
        Machine { nodes, memory_block_size: Bytes::mib(128), ..Machine::default() }
    }

    fn ids(machine: &Machine) -> Vec<NodeId> {
        machine.nodes.keys().copied().collect()
    }

    #[test]
    fn cpus_without_memory_are_at_home_on_the_nearest_node_that_has_some() {
        let machine = machine(&[
            (0, 0, &[], &[10, 30, 20, 20]),
            (1, 512, &[0], &[30, 10, 40, 40]),
            (4, 512, &[1], &[20, 40, 10, 20]),
            (7, 512, &[2], &[20, 40, 20, 10]),
        ]);
        let homes_of = |fake| homes(&machine, &ids(&machine), fake).into_values().collect::<Vec<_>>();
        assert_eq!(homes_of(None), [2, 1, 2, 3], "node 4, index 2, is as near to node 0 as node 7");
        assert_eq!(homes_of(Some(NodeId(7))), [3; 4]);
        assert!(homes_of(Some(NodeId(9))).iter().all(|&home| home as usize > machine.nodes.len()));
    }

    #[test]
    fn node_ids_with_gaps_get_dense_indices() {
        let machine = machine(&[(0, 1, &[], &[]), (8, 1, &[], &[]), (252, 1, &[], &[])]);
        let nodes = ids(&machine);
        let table = node_table_of(&nodes, &homes(&machine, &nodes, None));
        assert_eq!([table.index[0], table.index[8], table.index[252]], [0, 1, 2]);
        assert_eq!((table.index[1], table.home[1]), (UNKNOWN_NODE, UNKNOWN_NODE));
        let allowed: NodeSet = "8,9".parse().unwrap();
        assert_eq!(mask_of(&nodes, Some(&allowed)), [0b010, 0, 0, 0]);
        assert_eq!(mask_of(&nodes, None), [u64::MAX; 4]);
    }

    #[test]
    fn sections_that_no_node_has_are_unknown() {
        let two_nodes = machine(&[(0, 1, &[0, 1], &[]), (3, 1, &[3], &[])]);
        let sections = Sections::new(&two_nodes, &ids(&two_nodes)).unwrap();
        assert_eq!(sections.node_index, [0, 0, UNKNOWN_NODE, 1]);
        assert_eq!(1u64 << sections.shift, SECTION_SIZE.0 / sys::page_size() as u64);

        let one_node = machine(&[(0, 1, &[], &[])]);
        assert_eq!(
            Sections::new(&one_node, &ids(&one_node)).unwrap(),
            Sections { shift: 63, node_index: vec![0] }
        );
        let blind = machine(&[(0, 1, &[], &[]), (1, 1, &[], &[])]);
        assert!(matches!(Sections::new(&blind, &ids(&blind)), Err(Refusal::NoSections)));
    }
}

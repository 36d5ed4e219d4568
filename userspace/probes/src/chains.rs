//! Reads the call chains of remote allocations and accesses: see `ebpf/src/chains.rs`.
//!
//! The programs are loaded only with [`ProbeOptions::call_chains`](crate::ProbeOptions::call_chains), and the maps are
//! read only on request.
//!
//! Chains are kept by slot. The chains of freed slots are removed, all at once, before one of these slots is taken
//! again. User stacks that no chain refers to any more are removed as well. Kernel stacks stay: they are few, and
//! workloads share them.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use aya::maps::{HashMap, MapData, MapError, StackTraceMap};
use numaward_abi::{ChainKey, ChainKind, ChainPages, NO_ROOM};
use numaward_topology::NodeId;

use crate::{
    ChainOptions, MapAccessError, Mode, Pages, Probe, ProbeOptions, ProbeReport,
    alloc::AllocProbe,
    btf::BtfError,
    error::ProbeError,
    family::{Family, Hook, attach_by_first_method, report},
    kernel::KernelInfo,
    maps::access_error,
    nodes::NodeNumbering,
    objects::CHAINS,
};

/// The program that the allocation probe runs.
const TAIL_PROGRAM: &str = "alloc_chain_tail";
const CHAINS_MAP: &str = "CHAINS";
const STACKS_MAP: &str = "STACKS";
/// The maximum number of freed slots that still have chains in the maps.
const MAX_ENDED_SLOTS: usize = 64;

/// A call chain and the pages that it led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallChain {
    /// The kind of event.
    pub kind: ChainKind,
    /// The node of the memory, if known.
    pub node: Option<NodeId>,
    /// Pages: those of the sampled events, and those for which they stand.
    pub pages: Pages,
    /// The process id of the first sample, in the host's PID namespace.
    pub pid: u32,
    /// The user part.
    pub user: Stack,
    /// The kernel part.
    pub kernel: Stack,
}

/// A part of a call chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stack {
    /// There is no stack.
    Empty,
    /// The stack did not fit into the map.
    NoRoom,
    /// Code addresses, the innermost one first. The rest are return addresses.
    Addresses(Vec<u64>),
}

/// The programs and maps of call chains.
pub(crate) struct ChainProbes {
    pub(crate) family: Family,
    counted: HashMap<MapData, ChainKey, ChainPages>,
    stacks: StackTraceMap<MapData>,
    /// Freed slots that still have chains in the maps.
    ended: BTreeSet<u32>,
}

impl ChainProbes {
    /// Loads and attaches both programs independently.
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        wanted: ChainOptions,
        kernel: &KernelInfo<'_>,
        numbering: &NodeNumbering,
        alloc: Option<&mut AllocProbe>,
    ) -> (Option<Self>, Vec<ProbeReport>) {
        match Self::try_load(options, wanted, kernel, numbering, alloc) {
            Ok((chains, reports)) => {
                let is_attached = reports.iter().any(|report| report.mode != Mode::Absent);
                (is_attached.then_some(chains), reports)
            }
            Err(refusal) => {
                let reason = [(refusal.obstacle(), refusal.to_string())];
                let absent = |probe| report(probe, Mode::Absent, &reason);
                (None, [Probe::AllocChains, Probe::AccessChains].map(absent).into())
            }
        }
    }

    fn try_load(
        options: &ProbeOptions<'_>,
        wanted: ChainOptions,
        kernel: &KernelInfo<'_>,
        numbering: &NodeNumbering,
        alloc: Option<&mut AllocProbe>,
    ) -> Result<(Self, Vec<ProbeReport>), ProbeError> {
        let object = CHAINS.map_err(ProbeError::NotBuilt)?;
        let node_shift = || kernel.get(|structures| &structures.node_shift);
        let shift = options.fakes.node_shift.or(node_shift().ok()).unwrap_or(64);
        let nodes = numbering.capacity();
        let two_nodes = u32::from(numbering.ids().len() == 2);
        let slot_path = kernel.slot_path()?;
        let settings = slot_path
            .settings()
            .global("NODES", nodes)
            .global("NODE_SHIFT", shift)
            .global("TWO_NODES", two_nodes)
            .global("SAMPLE_EVERY", wanted.sample_every)
            .entries(CHAINS_MAP, wanted.max_stacks.max(1))
            .entries(STACKS_MAP, wanted.max_stacks.max(1));
        let mut family = Family::load(kernel, "chains", object, options.slots, settings)?;
        family.set_nodes(&numbering.table(options.machine))?;
        let as_expected = || kernel.get(|structures| &structures.hint);
        // If the allocation probe does not run the program, it is attached to the tracepoint as a second one.
        let alloc = alloc.filter(|alloc| alloc.runs_chains());
        let program = match alloc {
            Some(_) => (TAIL_PROGRAM, Hook::TailCall("mm_page_alloc")),
            None => ("alloc_chain_tp_btf", Hook::TpBtf("mm_page_alloc")),
        };
        let allocations = vec![(Mode::TpBtf, node_shift().map(|_| vec![program]))];
        let accesses = vec![
            (
                Mode::Fentry,
                as_expected().map(|()| vec![("access_chain_fentry", Hook::Fentry("task_numa_fault"))]),
            ),
            (
                Mode::Kprobe,
                match as_expected() {
                    Err(ProbeError::Btf(error @ BtfError::Arguments { .. })) => Err(ProbeError::Btf(error)),
                    _ => Ok(vec![("access_chain_kprobe", Hook::Kprobe("task_numa_fault"))]),
                },
            ),
        ];
        let reports = vec![
            attach_by_first_method(&mut family, Probe::AllocChains, allocations, kernel.btf()),
            attach_by_first_method(&mut family, Probe::AccessChains, accesses, kernel.btf()),
        ];
        if let (Some(alloc), Some(program)) = (alloc, family.program(TAIL_PROGRAM)) {
            alloc.set_chain_program(program)?;
        }
        let chains = Self {
            counted: family.take(CHAINS_MAP)?,
            stacks: family.take(STACKS_MAP)?,
            ended: BTreeSet::new(),
            family,
        };
        Ok((chains, reports))
    }

    /// Prepares a slot for a new holder: it must have no chains.
    pub(crate) fn begin_slot(&mut self, slot: u32) -> Result<(), MapAccessError> {
        if self.ended.contains(&slot) || self.ended.len() > MAX_ENDED_SLOTS { self.purge() } else { Ok(()) }
    }

    /// Notes that a slot was freed.
    pub(crate) fn end_slot(&mut self, slot: u32) {
        self.ended.insert(slot);
    }

    /// Removes the chains of freed slots.
    fn purge(&mut self) -> Result<(), MapAccessError> {
        let keys: Result<Vec<ChainKey>, MapError> = self.counted.keys().collect();
        let keys = keys.map_err(access_error(CHAINS_MAP, "read"))?;
        let (gone, kept): (Vec<_>, Vec<_>) = keys.into_iter().partition(|key| self.ended.contains(&key.slot));
        let used: BTreeSet<i32> = kept.iter().map(|key| key.user).collect();
        let unused: BTreeSet<u32> = gone
            .iter()
            .filter(|key| !used.contains(&key.user))
            .filter_map(|key| u32::try_from(key.user).ok())
            .collect();
        for key in gone {
            self.counted.remove(&key).or_else(ignore_missing).map_err(access_error(CHAINS_MAP, "write"))?;
        }
        for id in unused {
            self.stacks.remove(&id).or_else(ignore_missing).map_err(access_error(STACKS_MAP, "write"))?;
        }
        self.ended.clear();
        Ok(())
    }

    /// Returns the chains of one slot.
    pub(crate) fn read(&mut self, slot: u32, nodes: &[NodeId]) -> Result<Vec<CallChain>, MapAccessError> {
        let mut stacks: BTreeMap<i32, Stack> = BTreeMap::new();
        let mut found = Vec::new();
        let keys: Result<Vec<ChainKey>, MapError> = self.counted.keys().collect();
        for key in keys.map_err(access_error(CHAINS_MAP, "read"))?.into_iter().filter(|key| key.slot == slot)
        {
            let counted = match self.counted.get(&key, 0) {
                Ok(counted) => counted,
                Err(MapError::KeyNotFound) => continue,
                Err(error) => return Err(access_error(CHAINS_MAP, "read")(error)),
            };
            for id in [key.user, key.kernel] {
                if let Entry::Vacant(place) = stacks.entry(id) {
                    place.insert(self.stack(id)?);
                }
            }
            let stack_of = |id| stacks.get(&id).cloned().unwrap_or(Stack::Empty);
            found.extend(decode_chain(&key, counted, nodes, stack_of));
        }
        Ok(found)
    }

    fn stack(&self, id: i32) -> Result<Stack, MapAccessError> {
        let Ok(place) = u32::try_from(id) else {
            return Ok(if id == NO_ROOM { Stack::NoRoom } else { Stack::Empty });
        };
        match self.stacks.get(&place, 0) {
            Ok(stack) => Ok(Stack::Addresses(stack.frames().iter().map(|frame| frame.ip).collect())),
            Err(MapError::KeyNotFound) => Ok(Stack::Empty),
            Err(error) => Err(access_error(STACKS_MAP, "read")(error)),
        }
    }
}

/// Ignores the error that an entry does not exist.
fn ignore_missing(error: MapError) -> Result<(), MapError> {
    match error {
        MapError::KeyNotFound => Ok(()),
        MapError::SyscallError(error) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        error => Err(error),
    }
}

fn decode_chain(
    key: &ChainKey,
    counted: ChainPages,
    nodes: &[NodeId],
    stack: impl Fn(i32) -> Stack,
) -> Option<CallChain> {
    let kinds = [ChainKind::Allocations, ChainKind::Accesses];
    Some(CallChain {
        kind: kinds.into_iter().find(|kind| *kind as u32 == key.kind)?,
        node: nodes.get(key.node as usize).copied(),
        pages: Pages(counted.pages),
        pid: counted.pid,
        user: stack(key.user),
        kernel: stack(key.kernel),
    })
}

#[cfg(test)]
mod tests {
    use numaward_abi::{NO_NODE, NO_STACK};

    use super::*;

    #[test]
    fn decodes_chains() {
        let nodes = [NodeId(0), NodeId(4)];
        let counted = ChainPages { pages: 64, pid: 7, padding: 0 };
        let key = ChainKey { slot: 3, kind: ChainKind::Accesses as u32, node: 1, user: 12, kernel: NO_STACK };
        let stack = |id| if id == 12 { Stack::Addresses(vec![0x1000]) } else { Stack::Empty };
        let found = decode_chain(&key, counted, &nodes, stack).unwrap();
        assert_eq!((found.kind, found.node, found.pages), (ChainKind::Accesses, Some(NodeId(4)), Pages(64)));
        assert_eq!((found.user, found.kernel), (Stack::Addresses(vec![0x1000]), Stack::Empty));
        let nowhere = ChainKey { node: NO_NODE, ..key };
        assert_eq!(decode_chain(&nowhere, counted, &nodes, stack).unwrap().node, None);
        assert_eq!(decode_chain(&ChainKey { kind: 9, ..key }, counted, &nodes, stack), None);
    }
}

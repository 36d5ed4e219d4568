//! An object with the programs of a family of probes, each of which is loaded and attached independently.

use std::{collections::BTreeMap, io, os::fd::AsFd as _, path::Path, sync::Arc};

use aya::{
    Btf, Ebpf,
    maps::{Array, HashMap, Map, MapData, MapError},
    programs::{Program, ProgramError, ProgramFd, tp_btf::BtfTracePointLinkId},
};
use numaward_abi::{MAX_NODE_IDS, NodeTable};

use crate::{
    CgroupId, MapAccessError, Mode, Obstacle, Probe, ProbeReport,
    costs::FamilyCosts,
    error::ProbeError,
    kernel::KernelInfo,
    loader::ObjectSettings,
    maps::{access_error, set},
    sys,
};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Hook {
    TpBtf(&'static str),
    /// A BTF tracepoint at which another program runs this one by a tail call.
    TailCall(&'static str),
    Fentry(&'static str),
    Fexit(&'static str),
    Kprobe(&'static str),
    Tracepoint(&'static str, &'static str),
}

impl Hook {
    fn needs_btf(self) -> bool {
        matches!(self, Self::TpBtf(_) | Self::TailCall(_) | Self::Fentry(_) | Self::Fexit(_))
    }
}

/// The programs of a family and their common maps.
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) ebpf: Ebpf,
    roots: HashMap<MapData, CgroupId, u32>,
    /// The generation that invalidates the caches of slots, in objects with such caches.
    generation: Option<(Array<MapData, u64>, u64)>,
    /// The node table and a copy of its contents, in objects that need nodes.
    node_table: Option<(Array<MapData, NodeTable>, NodeTable)>,
    lost: Option<Arc<Array<MapData, u64>>>,
    /// The attached programs of each probe.
    programs: Vec<(Probe, &'static str)>,
    /// The links of programs that are attached to BTF tracepoints.
    links: BTreeMap<&'static str, BtfTracePointLinkId>,
    /// The kernel memory of the maps, in bytes.
    pub(crate) map_bytes: u64,
}

impl Family {
    /// Creates the maps of the object. Programs are loaded later.
    pub(crate) fn load(
        kernel: &KernelInfo<'_>,
        name: &'static str,
        object: &[u8],
        slots: u32,
        settings: ObjectSettings,
    ) -> Result<Self, ProbeError> {
        let mut ebpf = kernel.load(object, &settings.entries("ROOTS", slots.max(1)))?;
        // The kernel initializes the map with zeros.
        let unwritten = NodeTable { index: [0; MAX_NODE_IDS], memory_node: [0; MAX_NODE_IDS] };
        let mut family = Self {
            name,
            map_bytes: map_bytes(&ebpf),
            roots: take(&mut ebpf, "ROOTS")?.ok_or(ProbeError::Incomplete("ROOTS"))?,
            generation: take(&mut ebpf, "GENERATION")?.map(|map| (map, 0)),
            node_table: take(&mut ebpf, "NODE_TABLE")?.map(|map| (map, unwritten)),
            lost: take(&mut ebpf, "LOST")?.map(Arc::new),
            ebpf,
            programs: Vec::new(),
            links: BTreeMap::new(),
        };
        family.new_generation()?;
        Ok(family)
    }

    pub(crate) fn take<T: TryFrom<Map, Error = MapError>>(
        &mut self,
        name: &'static str,
    ) -> Result<T, ProbeError> {
        take(&mut self.ebpf, name)?.ok_or(ProbeError::Incomplete(name))
    }

    /// Takes an untyped map out of the object: for [`sys::add_array`], or for its descriptor.
    pub(crate) fn take_data(&mut self, name: &'static str) -> Result<MapData, ProbeError> {
        match self.ebpf.take_map(name) {
            Some(Map::Array(map) | Map::PerfEventArray(map)) => Ok(map),
            _ => Err(ProbeError::Incomplete(name)),
        }
    }

    /// Loads and attaches the programs of a probe; all or none.
    pub(crate) fn attach(
        &mut self,
        probe: Probe,
        programs: &[(&'static str, Hook)],
        btf: Option<&Btf>,
    ) -> Result<(), ProbeError> {
        for &(name, hook) in programs {
            if btf.is_none() && hook.needs_btf() {
                return Err(ProbeError::NoBtf);
            }
            if let Err(error) = self.attach_one(name, hook, btf) {
                for (name, _) in programs {
                    self.unload(name);
                }
                return Err(ProbeError::kernel(&error));
            }
        }
        for &(name, _) in programs {
            if !self.programs.contains(&(probe, name)) {
                self.programs.push((probe, name));
            }
        }
        Ok(())
    }

    fn attach_one(&mut self, name: &'static str, hook: Hook, btf: Option<&Btf>) -> Result<(), ProgramError> {
        let program = self.ebpf.program_mut(name).ok_or(ProgramError::UnexpectedProgramType)?;
        // A tracepoint's program may be attached to several tracepoints.
        let loaded = program.fd().is_ok();
        match (program, hook, btf) {
            (Program::BtfTracePoint(program), Hook::TpBtf(event), Some(btf)) => {
                program.load(event, btf)?;
                self.links.insert(name, program.attach()?);
            }
            (Program::BtfTracePoint(program), Hook::TailCall(event), Some(btf)) => {
                program.load(event, btf)?;
            }
            (Program::FEntry(program), Hook::Fentry(function), Some(btf)) => {
                program.load(function, btf)?;
                program.attach()?;
            }
            (Program::FExit(program), Hook::Fexit(function), Some(btf)) => {
                program.load(function, btf)?;
                program.attach()?;
            }
            (Program::KProbe(program), Hook::Kprobe(function), _) => {
                program.load()?;
                program.attach(function, 0)?;
            }
            (Program::TracePoint(program), Hook::Tracepoint(category, event), _) => {
                if !loaded {
                    program.load()?;
                }
                program.attach(category, event)?;
            }
            _ => return Err(ProgramError::UnexpectedProgramType),
        }
        Ok(())
    }

    /// Returns a program if it is loaded.
    pub(crate) fn program(&self, name: &str) -> Option<&ProgramFd> {
        self.ebpf.program(name)?.fd().ok()
    }

    fn unload(&mut self, name: &str) {
        let unloaded = match self.ebpf.program_mut(name) {
            Some(Program::BtfTracePoint(program)) => program.unload(),
            Some(Program::FEntry(program)) => program.unload(),
            Some(Program::FExit(program)) => program.unload(),
            Some(Program::KProbe(program)) => program.unload(),
            Some(Program::TracePoint(program)) => program.unload(),
            _ => Ok(()),
        };
        // Programs that were not loaded cannot be unloaded.
        if let Err(error) = unloaded
            && !matches!(error, ProgramError::NotLoaded)
        {
            log::debug!("cannot unload the program {name}: {error}");
        }
        self.programs.retain(|(_, program)| *program != name);
        self.links.remove(name);
    }

    /// Attaches or detaches a loaded program of a BTF tracepoint, which needs no privileges. Ignores programs of any
    /// other type.
    pub(crate) fn set_attached(&mut self, name: &'static str, is_wanted: bool) -> Result<(), ProgramError> {
        let Some(Program::BtfTracePoint(program)) = self.ebpf.program_mut(name) else { return Ok(()) };
        if !is_wanted {
            return self.links.remove(name).map_or(Ok(()), |link| program.detach(link));
        }
        if !self.links.contains_key(name) {
            self.links.insert(name, program.attach()?);
        }
        Ok(())
    }

    /// Returns true if a program is attached to a BTF tracepoint.
    pub(crate) fn is_attached(&self, name: &str) -> bool {
        self.links.contains_key(name)
    }

    /// Returns true if the maps can be read.
    pub(crate) fn is_readable(&self) -> bool {
        matches!(self.roots.get(&CgroupId(0), 0), Ok(_) | Err(MapError::KeyNotFound))
    }

    /// Books events of `cgroup` and its descendants to `slot`.
    pub(crate) fn add_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        self.roots.insert(cgroup, slot, 0).map_err(access_error("ROOTS", "write"))?;
        self.new_generation().inspect_err(|_| {
            // Otherwise only some of the CPUs would count the cgroup.
            let _best_effort = self.roots.remove(&cgroup);
        })
    }

    /// Reverts [`Family::add_root`].
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId) -> Result<(), MapAccessError> {
        self.roots.remove(&cgroup).map_err(access_error("ROOTS", "write"))?;
        self.new_generation()
    }

    /// Returns true if the node table differs from this one.
    pub(crate) fn differs_from_nodes(&self, nodes: &NodeTable) -> bool {
        self.node_table.as_ref().is_some_and(|(_, held)| held != nodes)
    }

    /// Writes the node table if it has changed.
    pub(crate) fn set_nodes(&mut self, nodes: &NodeTable) -> Result<(), MapAccessError> {
        if let Some((map, held)) = &mut self.node_table
            && held != nodes
        {
            set(map, "NODE_TABLE", 0, nodes)?;
            *held = *nodes;
        }
        Ok(())
    }

    /// Invalidates the caches of slots on all CPUs.
    pub(crate) fn new_generation(&mut self) -> Result<(), MapAccessError> {
        let Some((map, generation)) = &mut self.generation else { return Ok(()) };
        *generation += 1;
        set(map, "GENERATION", 0, generation)
    }

    /// Returns the number of events that did not fit into a map.
    pub(crate) fn lost(&self) -> Result<u64, MapAccessError> {
        self.lost.as_ref().map_or(Ok(0), |lost| lost.get(&0, 0).map_err(access_error("LOST", "read")))
    }

    /// Returns handles of the family's programs, and of the map that counts lost events.
    pub(crate) fn costs(&self) -> io::Result<FamilyCosts> {
        let program = |&(probe, name): &(Probe, &'static str)| {
            let fd = self.ebpf.program(name)?.fd().ok()?;
            Some(fd.as_fd().try_clone_to_owned().map(|fd| (probe, fd)))
        };
        let programs = self.programs.iter().filter_map(program).collect::<io::Result<_>>()?;
        Ok(FamilyCosts { programs, lost: self.lost.clone() })
    }
}

pub(crate) fn take<T: TryFrom<Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<Option<T>, ProbeError> {
    ebpf.take_map(name).map(T::try_from).transpose().map_err(|_| ProbeError::Incomplete(name))
}

/// Returns the kernel memory of the maps in bytes, without maps for which the kernel does not report it.
pub(crate) fn map_bytes(ebpf: &Ebpf) -> u64 {
    let bytes_of = |map: &Map| match map {
        Map::Array(map)
        | Map::PerCpuArray(map)
        | Map::HashMap(map)
        | Map::CgroupArray(map)
        | Map::PerfEventArray(map)
        | Map::StackTraceMap(map)
        | Map::RingBuf(map) => sys::fdinfo(map.fd().as_fd()).ok()?("memlock"),
        _ => None,
    };
    ebpf.maps().filter_map(|(_, map)| bytes_of(map)).fold(0, u64::saturating_add)
}

/// A method to attach a probe: its mode and its programs, or the reason why it cannot be tried.
pub(crate) type AttachMethod = (Mode, Result<Vec<(&'static str, Hook)>, ProbeError>);

/// Attaches a probe by the first method that the kernel accepts.
pub(crate) fn attach_by_first_method(
    family: &mut Family,
    probe: Probe,
    methods: Vec<AttachMethod>,
    btf: Option<&Btf>,
) -> ProbeReport {
    if let Some(reason) = missing_feature(probe, Path::new("/")) {
        return report(probe, Mode::Absent, &[(Obstacle::Unsupported, reason)]);
    }
    let mut reasons = Vec::new();
    for (mode, programs) in methods {
        match programs.and_then(|programs| family.attach(probe, &programs, btf)) {
            Ok(()) => return report(probe, mode, &reasons),
            Err(refusal) => reasons.push((refusal.obstacle(), format!("{mode}: {refusal}"))),
        }
    }
    report(probe, Mode::Absent, &reasons)
}

/// Returns the reason why the kernel has nothing that a probe could observe. `root` is `/` in production.
///
/// Source: `sched_core_sysctls` of kernel/sched/core.c, which has `numa_balancing` with `CONFIG_NUMA_BALANCING` only.
fn missing_feature(probe: Probe, root: &Path) -> Option<String> {
    let needs_balancing = matches!(probe, Probe::Hint | Probe::Scan | Probe::AccessChains);
    let is_missing = needs_balancing && !root.join("proc/sys/kernel/numa_balancing").exists();
    is_missing.then(|| "the kernel was built without NUMA balancing (CONFIG_NUMA_BALANCING)".to_owned())
}

/// Creates the report of a probe. The errors of the methods that were tried before are the reason.
pub(crate) fn report(probe: Probe, mode: Mode, reasons: &[(Obstacle, String)]) -> ProbeReport {
    let texts: Vec<&str> = reasons.iter().map(|(_, text)| text.as_str()).collect();
    let reason = (!texts.is_empty()).then(|| texts.join("; "));
    let obstacle = reasons.first().map(|(obstacle, _)| *obstacle);
    ProbeReport { probe, mode, reason, obstacle, self_check: None }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn needs_numa_balancing() {
        let root = tempfile::tempdir().unwrap();
        let reason = missing_feature(Probe::Hint, root.path()).unwrap();
        assert!(reason.contains("CONFIG_NUMA_BALANCING"), "{reason}");
        assert_eq!(missing_feature(Probe::Stall, root.path()), None);
        fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        fs::write(root.path().join("proc/sys/kernel/numa_balancing"), "0\n").unwrap();
        assert_eq!(missing_feature(Probe::Hint, root.path()), None);
    }
}

//! One object with the programs of a family, loaded and attached each on its own.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use aya::{
    Btf, Ebpf, EbpfLoader,
    maps::{Array, HashMap, Map, MapData},
    programs::{Program, ProgramError, ProgramFd},
};

use crate::{
    CgroupId, MapAccessError, Mode, Probe, ProbeStats,
    error::Refusal,
    maps::{access, set, typed},
    sys,
};

/// What a program is attached to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hook {
    TpBtf(&'static str),
    Fentry(&'static str),
    Fexit(&'static str),
    Kprobe(&'static str),
    Tracepoint(&'static str, &'static str),
}

impl Hook {
    fn needs_btf(self) -> bool {
        matches!(self, Self::TpBtf(_) | Self::Fentry(_) | Self::Fexit(_))
    }
}

/// The programs of a family and what they share.
pub(crate) struct Family {
    /// That of the object.
    pub(crate) name: &'static str,
    ebpf: Ebpf,
    roots: HashMap<MapData, CgroupId, u32>,
    /// In objects that remember slots: what makes them search anew.
    generation: Option<(Array<MapData, u64>, u64)>,
    lost: Option<Array<MapData, u64>>,
    /// Which programs serve a probe.
    attached: Vec<(Probe, &'static str)>,
    /// Bytes that the maps take of the kernel's memory.
    pub(crate) map_bytes: u64,
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Family").field("attached", &self.attached).finish_non_exhaustive()
    }
}

impl Family {
    /// Creates the maps of the object; no program is loaded yet.
    pub(crate) fn load(
        loader: &mut EbpfLoader<'_>,
        name: &'static str,
        object: &[u8],
        slots: u32,
    ) -> Result<Self, Refusal> {
        loader.map_max_entries("ROOTS", slots.max(1));
        let mut ebpf = loader.load(object).map_err(|error| Refusal::kernel(&error))?;
        let map_bytes = map_bytes(&ebpf);
        let roots = ebpf.take_map("ROOTS").ok_or(Refusal::Incomplete("ROOTS"))?;
        let lost = ebpf.take_map("LOST").map(|map| typed(map, "LOST")).transpose()?;
        let generation = ebpf.take_map("GENERATION").map(|map| typed(map, "GENERATION")).transpose()?;
        let mut family = Self {
            name,
            roots: typed(roots, "ROOTS")?,
            generation: generation.map(|map| (map, 0)),
            lost,
            ebpf,
            attached: Vec::new(),
            map_bytes,
        };
        family.new_generation()?;
        Ok(family)
    }

    /// A map of the object.
    pub(crate) fn take(&mut self, name: &'static str) -> Result<Map, Refusal> {
        self.ebpf.take_map(name).ok_or(Refusal::Incomplete(name))
    }

    /// A map without a type: for [`read_values`], or for descriptors.
    pub(crate) fn take_data(&mut self, name: &'static str) -> Result<MapData, Refusal> {
        match self.take(name)? {
            Map::Array(map) | Map::PerfEventArray(map) => Ok(map),
            _ => Err(Refusal::Incomplete(name)),
        }
    }

    /// Loads and attaches the programs of a probe; all or none.
    pub(crate) fn attach(
        &mut self,
        probe: Probe,
        programs: &[(&'static str, Hook)],
        btf: Option<&Btf>,
    ) -> Result<(), Refusal> {
        for &(name, hook) in programs {
            if btf.is_none() && hook.needs_btf() {
                return Err(Refusal::Kernel("the kernel has no BTF".to_owned()));
            }
            if let Err(error) = self.attach_one(name, hook, btf) {
                for (name, _) in programs {
                    self.unload(name);
                }
                return Err(Refusal::kernel(&error));
            }
        }
        for &(name, _) in programs {
            if !self.attached.contains(&(probe, name)) {
                self.attached.push((probe, name));
            }
        }
        Ok(())
    }

    fn attach_one(&mut self, name: &str, hook: Hook, btf: Option<&Btf>) -> Result<(), ProgramError> {
        let program = self.ebpf.program_mut(name).ok_or(ProgramError::UnexpectedProgramType)?;
        // A tracepoint's program may be attached to several.
        let loaded = program.fd().is_ok();
        match (program, hook, btf) {
            (Program::BtfTracePoint(program), Hook::TpBtf(event), Some(btf)) => {
                program.load(event, btf)?;
                program.attach()?;
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

    /// Detaches a program, if it is attached.
    pub(crate) fn unload(&mut self, name: &str) {
        let unloaded = match self.ebpf.program_mut(name) {
            Some(Program::BtfTracePoint(program)) => program.unload(),
            Some(Program::FEntry(program)) => program.unload(),
            Some(Program::FExit(program)) => program.unload(),
            Some(Program::KProbe(program)) => program.unload(),
            Some(Program::TracePoint(program)) => program.unload(),
            _ => Ok(()),
        };
        // What was not loaded cannot be unloaded.
        if let Err(error) = unloaded
            && !matches!(error, ProgramError::NotLoaded)
        {
            log::debug!("{name}: {error}");
        }
        self.attached.retain(|(_, attached)| *attached != name);
    }

    /// The program itself, for what this module does not do.
    pub(crate) fn program(&mut self, name: &str) -> Option<&mut Program> {
        self.ebpf.program_mut(name)
    }

    /// Books `cgroup` and those below it to `slot`.
    pub(crate) fn add_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        self.roots.insert(cgroup, slot, 0).map_err(access("ROOTS", "write"))?;
        self.new_generation()
    }

    /// Undoes [`Family::add_root`].
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId) -> Result<(), MapAccessError> {
        self.roots.remove(&cgroup).map_err(access("ROOTS", "write"))?;
        self.new_generation()
    }

    /// Makes every CPU search slots anew, where the programs remember them.
    fn new_generation(&mut self) -> Result<(), MapAccessError> {
        let Some((map, generation)) = &mut self.generation else { return Ok(()) };
        *generation += 1;
        set(map, "GENERATION", 0, generation)
    }

    /// What one program has cost, whether or not it is attached now.
    pub(crate) fn stats_of(&self, probe: Probe, name: &str) -> io::Result<Vec<ProbeStats>> {
        let Some(Ok(fd)) = self.ebpf.program(name).map(Program::fd) else { return Ok(Vec::new()) };
        let mut stats = program_stats(probe, fd)?;
        stats.events_lost += self.lost()?;
        Ok(vec![stats])
    }

    fn lost(&self) -> io::Result<u64> {
        self.lost.as_ref().map_or(Ok(0), |lost| lost.get(&0, 0).map_err(io::Error::other))
    }

    /// What each probe of the family has cost. What found no room in a map is booked to the first.
    pub(crate) fn stats(&self) -> io::Result<Vec<ProbeStats>> {
        let mut all: Vec<ProbeStats> = Vec::new();
        for &(probe, name) in &self.attached {
            let Some(Ok(fd)) = self.ebpf.program(name).map(Program::fd) else { continue };
            let stats = program_stats(probe, fd)?;
            match all.iter_mut().find(|sum| sum.probe == probe) {
                Some(sum) => {
                    sum.run_time += stats.run_time;
                    sum.run_count += stats.run_count;
                    sum.events_lost += stats.events_lost;
                }
                None => all.push(stats),
            }
        }
        if let Some(first) = all.first_mut() {
            first.events_lost += self.lost()?;
        }
        Ok(all)
    }
}

/// What the kernel counts of a program.
pub(crate) fn program_stats(probe: Probe, program: &ProgramFd) -> io::Result<ProbeStats> {
    let fd = program.as_fd().as_raw_fd();
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{fd}"))?;
    // Kernels that do not count something do not write its line.
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    };
    Ok(ProbeStats {
        probe,
        run_time: Duration::from_nanos(field("run_time_ns")),
        run_count: field("run_cnt"),
        events_lost: field("recursion_misses"),
    })
}

/// Bytes that the maps of an object take of the kernel's memory; 0 for those of which the kernel reports none.
pub(crate) fn map_bytes(ebpf: &Ebpf) -> u64 {
    let of = |map: &Map| match map {
        Map::Array(map)
        | Map::PerCpuArray(map)
        | Map::HashMap(map)
        | Map::PerfEventArray(map)
        | Map::RingBuf(map) => sys::map_bytes(map.fd().as_fd()),
        _ => None,
    };
    ebpf.maps().filter_map(|(_, map)| of(map)).fold(0, u64::saturating_add)
}

/// A probe's way to be attached: its programs, or why it cannot be tried.
pub(crate) type Way = (Mode, Result<Vec<(&'static str, Hook)>, Refusal>);

/// How the programs of a probe are attached, best first: by the first way that the kernel takes.
pub(crate) fn attach_by_first(
    family: &mut Family,
    probe: Probe,
    ways: Vec<Way>,
    btf: Option<&Btf>,
) -> crate::ProbeReport {
    let mut reasons = Vec::new();
    for (mode, programs) in ways {
        match programs.and_then(|programs| family.attach(probe, &programs, btf)) {
            Ok(()) => return report(probe, mode, &reasons),
            Err(refusal) => reasons.push(format!("{mode}: {refusal}")),
        }
    }
    report(probe, Mode::Absent, &reasons)
}

/// The report of a probe; what was tried before, and why it failed, is the reason.
pub(crate) fn report(probe: Probe, mode: Mode, reasons: &[String]) -> crate::ProbeReport {
    let reason = (!reasons.is_empty()).then(|| reasons.join("; "));
    crate::ProbeReport { probe, mode, reason, self_check: None }
}

/// The values of `count` entries of an array from `first` on, each of `words` 64-bit numbers.
pub(crate) fn read_values(
    map: &MapData,
    name: &'static str,
    first: u32,
    count: u32,
    words: usize,
) -> Result<Vec<u64>, MapAccessError> {
    let mut values = vec![0u64; count as usize * words];
    match sys::add_array(map.fd().as_fd(), first as usize * words, &mut values) {
        Ok(()) => Ok(values),
        Err(source) => Err(MapAccessError { map: name, action: "read", source }),
    }
}

//! Reads the CPU time of cgroups by CPU: see `ebpf/src/cpu_time.rs`.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd as _, AsRawFd},
};

use aya::{
    Ebpf,
    maps::{CgroupArray, Map, MapData},
    programs::{Program, RawTracePoint, RawTracePointRunOptions, TestRun as _},
};
use numaward_abi::{CPU_TIME_BATCH, CpuTime};
use numaward_topology::{CpuId, CpuSet};

use crate::{
    Mode, Probe, ProbeOptions, ProbeReport,
    costs::FamilyCosts,
    error::{CpuTimeError, ProbeError},
    explain::explain,
    family::{map_bytes, report, take},
    kernel::{KernelInfo, is_confidential},
    loader::ObjectSettings,
    maps::access_error,
    nodes::count_cpus,
    objects::CPU_TIME,
    sys::MappedArray,
};

const LOCATE: &str = "cpu_time_locate";
const READ: &str = "cpu_time_read";

/// The number of 64-bit words of a CPU's entry in the map: its offset and its time.
const WORDS: usize = size_of::<CpuTime>() / size_of::<u64>();

/// The maximum number of cgroups of which the CPU time is read.
const MAX_CGROUPS: u32 = 16_384;

/// The place of a cgroup whose CPU time can be read.
#[derive(Debug, PartialEq, Eq)]
pub struct CgroupPlace(u32);

/// Reader of the CPU time of cgroups.
pub struct CpuTimeReader {
    ebpf: Ebpf,
    cgroups: CgroupArray<MapData>,
    /// The words of [`CpuTime`] by CPU.
    times: MappedArray,
    /// The number of entries in `times`.
    cpus: u32,
    /// The CPUs that can be read.
    located: BTreeSet<CpuId>,
    /// Places below `used` that are free again.
    free: Vec<u32>,
    used: u32,
    pub(crate) map_bytes: u64,
}

impl CpuTimeReader {
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
    ) -> Result<(Self, ProbeReport), ProbeError> {
        let object = CPU_TIME.map_err(ProbeError::NotBuilt)?;
        // Reads of the kernel's memory return zeros without an error.
        if is_confidential() {
            return Err(ProbeError::Confidential);
        }
        let [pointers, counters, run_time] = kernel.get(|structures| &structures.cpu_time)?;
        let cpus = count_cpus(options.machine).map_err(ProbeError::Cpus)?;
        let settings = ObjectSettings::default()
            .global("POINTERS", pointers)
            .global("COUNTERS", counters)
            .global("RUN_TIME", run_time)
            .entries("CGROUPS", MAX_CGROUPS)
            .entries("TIMES", cpus);
        let mut ebpf = kernel.load(object, &settings)?;
        let map_bytes = map_bytes(&ebpf);
        for name in [LOCATE, READ] {
            match ebpf.program_mut(name) {
                Some(Program::RawTracePoint(program)) => program.load(),
                _ => return Err(ProbeError::Incomplete(name)),
            }
            .map_err(|error| ProbeError::kernel(&error))?;
        }
        let Some(Map::Array(times)) = ebpf.map("TIMES") else { return Err(ProbeError::Incomplete("TIMES")) };
        let times = MappedArray::new(times.fd().as_fd(), cpus as usize * WORDS);
        let mut reader = Self {
            cgroups: take(&mut ebpf, "CGROUPS")?.ok_or(ProbeError::Incomplete("CGROUPS"))?,
            ebpf,
            times: times.map_err(|error| ProbeError::kernel(&error))?,
            cpus,
            located: BTreeSet::new(),
            free: Vec::new(),
            used: 0,
            map_bytes,
        };
        reader.locate(&options.machine.cpu_ids());
        if reader.located.is_empty() {
            return Err(ProbeError::NoCpuOffsets);
        }
        Ok((reader, report(Probe::CpuTime, Mode::OnDemand, &[])))
    }

    /// Returns handles of the programs.
    pub(crate) fn costs(&self) -> io::Result<FamilyCosts> {
        let fds = [LOCATE, READ].into_iter().filter_map(|name| self.ebpf.program(name)?.fd().ok());
        let programs = fds.map(|fd| Ok((Probe::CpuTime, fd.as_fd().try_clone_to_owned()?)));
        Ok(FamilyCosts { programs: programs.collect::<io::Result<_>>()?, lost: None })
    }

    /// Finds the counters of CPUs that were offline before. A CPU that is still offline is tried again by the next call.
    pub fn locate(&mut self, cpus: &CpuSet) {
        let new: Vec<CpuId> = cpus.iter().filter(|cpu| !self.located.contains(cpu)).collect();
        if new.is_empty() {
            return;
        }
        for &cpu in &new {
            let found = self.run(LOCATE, RawTracePointRunOptions { cpu: Some(cpu.0), ..Default::default() });
            if let Err(error) = found {
                log::debug!("the CPU time on CPU {cpu} cannot be read: {error}");
            }
        }
        let offsets: Vec<u64> = self.times.read().step_by(WORDS).collect();
        let is_known = |cpu: &CpuId| offsets.get(cpu.0 as usize).is_some_and(|&offset| offset != 0);
        self.located.extend(new.into_iter().filter(is_known));
    }

    /// Adds a cgroup by a descriptor of its directory. From then on, it can be read until [`CpuTimeReader::remove`], even if
    /// its directory is removed.
    pub fn add(&mut self, directory: &impl AsRawFd) -> Result<CgroupPlace, CpuTimeError> {
        let place = self.free.last().copied().unwrap_or(self.used);
        if place >= MAX_CGROUPS {
            return Err(CpuTimeError::TooMany(MAX_CGROUPS));
        }
        self.cgroups.set(place, directory.as_raw_fd(), 0).map_err(access_error("CGROUPS", "write"))?;
        if self.free.pop().is_none() {
            self.used += 1;
        }
        Ok(CgroupPlace(place))
    }

    /// Returns the time in nanoseconds that tasks in a cgroup, without its descendants, have run on each CPU since the
    /// cgroup was created.
    pub fn read(&mut self, place: &CgroupPlace) -> Result<Vec<u64>, CpuTimeError> {
        for first in (0..self.cpus).step_by(CPU_TIME_BATCH as usize) {
            let mut options = RawTracePointRunOptions::new();
            options.args[..2].copy_from_slice(&[place.0, first].map(u64::from));
            self.run(READ, options)?;
        }
        let times: Vec<u64> = self.times.read().skip(1).step_by(WORDS).collect();
        if times.contains(&CpuTime::UNREADABLE) { Err(CpuTimeError::Unreadable) } else { Ok(times) }
    }

    /// Removes a cgroup.
    pub fn remove(&mut self, CgroupPlace(place): CgroupPlace) -> Result<(), CpuTimeError> {
        self.cgroups.unset(place).map_err(access_error("CGROUPS", "write"))?;
        self.free.push(place);
        Ok(())
    }

    fn run(&self, name: &'static str, options: RawTracePointRunOptions) -> Result<(), CpuTimeError> {
        let program: &RawTracePoint = match self.ebpf.program(name) {
            Some(Program::RawTracePoint(program)) => program,
            _ => return Err(CpuTimeError::Unreadable),
        };
        let ran = program.test_run(options);
        ran.map(drop).map_err(|error| CpuTimeError::Run(explain(&error).1))
    }
}

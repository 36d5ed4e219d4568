//! Who runs on exclusive CPUs: see `ebpf/src/switch.rs`.
//!
//! The program is loaded at the start, while the daemon has the privileges for that, and attached only while a CPU is
//! exclusive: attaching a loaded program takes none. Where only the classic tracepoint can be had, which takes
//! privileges to attach, it stays attached.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    time::Duration,
};

use aya::{
    EbpfLoader,
    maps::{Array, HashMap, MapData, PerCpuArray},
    programs::{Program, ProgramError, tp_btf::BtfTracePointLinkId},
};
use numaward_abi::{CpuTimes, IntruderKey, IntruderTime, OTHER_SLOT, RunClass};
use numaward_topology::CpuId;

use crate::{
    CgroupId, MapAccessError, Mode, Options, Probe, ProbeReport, ProbeStats, SlotId,
    error::Refusal,
    event::command_name,
    family::{Family, Hook, report},
    kernel::Kernel,
    maps::{access, set, typed},
    objects::SWITCH,
    sys,
};

const PROGRAM: &str = "switch_tp_btf";
const FALLBACK: &str = "switch_tracepoint";

/// What sort of task runs on a CPU that is exclusive to another workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IntruderClass {
    /// A kernel thread.
    KernelThread,
    /// A process of no registered workload.
    Host,
    /// A process of another workload.
    Workload,
}

impl IntruderClass {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::KernelThread, Self::Host, Self::Workload];

    /// The metric label `class`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::KernelThread => "kernel_thread",
            Self::Host => "host",
            Self::Workload => "workload",
        }
    }
}

/// Who used a CPU while it was exclusive, since the daemon started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuUse {
    /// The workload that it is exclusive to.
    pub own: Duration,
    /// Kernel threads.
    pub kernel_threads: Duration,
    /// Processes of no registered workload.
    pub host: Duration,
    /// Processes of other workloads.
    pub workloads: Duration,
}

impl CpuUse {
    /// The time of a class of intruders.
    pub const fn of(&self, class: IntruderClass) -> Duration {
        match class {
            IntruderClass::KernelThread => self.kernel_threads,
            IntruderClass::Host => self.host,
            IntruderClass::Workload => self.workloads,
        }
    }

    /// All intruders.
    pub fn intruders(&self) -> Duration {
        self.kernel_threads + self.host + self.workloads
    }

    /// No less than before in any part: a reading may catch the kernel between two writes.
    fn at_least(self, before: Self) -> Self {
        Self {
            own: self.own.max(before.own),
            kernel_threads: self.kernel_threads.max(before.kernel_threads),
            host: self.host.max(before.host),
            workloads: self.workloads.max(before.workloads),
        }
    }
}

/// Tasks of one name that ran on CPUs exclusive to another workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intruder {
    /// The workload that the CPUs are exclusive to.
    pub owner: SlotId,
    /// What sort of task it is.
    pub class: IntruderClass,
    /// Its workload, if it is of one that is registered.
    pub workload: Option<SlotId>,
    /// Its name, at most 15 bytes.
    pub command: String,
    /// How long it ran there, since the CPUs are exclusive.
    pub time: Duration,
    /// How often it was switched in.
    pub runs: u64,
}

/// The scheduler's probe. Loaded, and attached while a CPU is exclusive.
pub(crate) struct Switch {
    family: Family,
    /// Which of its programs serves.
    program: &'static str,
    owner: Array<MapData, u32>,
    times: PerCpuArray<MapData, CpuTimes>,
    intruders: HashMap<MapData, IntruderKey, IntruderTime>,
    link: Option<BtfTracePointLinkId>,
    exclusive: BTreeMap<CpuId, SlotId>,
    /// CPUs that are or were exclusive, and what was read of them last.
    read: BTreeMap<CpuId, CpuUse>,
}

impl fmt::Debug for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Switch").field("exclusive", &self.exclusive).finish_non_exhaustive()
    }
}

impl Switch {
    pub(crate) fn load(options: &Options<'_>, kernel: &Kernel) -> Result<(Self, ProbeReport), Refusal> {
        let object = SWITCH.map_err(Refusal::NotBuilt)?;
        let (path, parent) = kernel.get(|structures| &structures.cgroup_path).unwrap_or_default();
        let task = kernel.get(|structures| &structures.task).unwrap_or_default();
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| Refusal::Cpus(error))?;
        let mut loader = EbpfLoader::new();
        loader
            .btf(kernel.btf.as_ref())
            .override_global("CGROUP_PATH", &path, true)
            .override_global("KERNFS_PARENT", &parent, true)
            .override_global("TASK", &task, true)
            .map_max_entries("OWNER", u32::try_from(cpus).unwrap_or(u32::MAX));
        let mut family = Family::load(&mut loader, "switch", object, options.slots)?;
        let (program, report) = match load_tp_btf(&mut family, kernel) {
            Ok(()) => (PROGRAM, report(Probe::Switch, Mode::TpBtf, &[])),
            Err(refusal) => {
                let reason = format!("{}: {refusal}", Mode::TpBtf);
                let hook = Hook::Tracepoint("sched", "sched_switch");
                let attached = family.attach(Probe::Switch, &[(FALLBACK, hook)], None);
                attached.map_err(|refusal| {
                    Refusal::Kernel(format!("{reason}; {}: {refusal}", Mode::Tracepoint))
                })?;
                let lacks = format!(
                    "{}: kernel threads are taken for processes of the host; it is attached all the time",
                    Mode::Tracepoint
                );
                (FALLBACK, report(Probe::Switch, Mode::Tracepoint, &[reason, lacks]))
            }
        };
        let switch = Self {
            owner: typed(family.take("OWNER")?, "OWNER")?,
            times: typed(family.take("TIMES")?, "TIMES")?,
            intruders: typed(family.take("INTRUDERS")?, "INTRUDERS")?,
            link: None,
            exclusive: BTreeMap::new(),
            read: BTreeMap::new(),
            program,
            family,
        };
        Ok((switch, report))
    }

    pub(crate) fn add_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        self.family.add_root(cgroup, slot)
    }

    pub(crate) fn remove_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        self.family.remove_root(cgroup)?;
        // The slot will be another's.
        self.forget(|key| key.owner == slot || key.slot == slot)
    }

    fn forget(&mut self, which: impl Fn(&IntruderKey) -> bool) -> Result<(), MapAccessError> {
        // Nobody ever intruded while nothing was exclusive.
        if self.read.is_empty() {
            return Ok(());
        }
        let keys: Result<BTreeSet<IntruderKey>, _> = self.intruders.keys().collect();
        for key in keys.map_err(access("INTRUDERS", "read"))?.into_iter().filter(|key| which(key)) {
            self.intruders.remove(&key).map_err(access("INTRUDERS", "write"))?;
        }
        Ok(())
    }

    /// Whether it measures now.
    pub(crate) fn is_attached(&self) -> bool {
        self.link.is_some() || self.program == FALLBACK && !self.exclusive.is_empty()
    }

    pub(crate) fn family(&self) -> &Family {
        &self.family
    }

    /// Tells which CPUs are exclusive to whom; attaches or detaches as that demands.
    pub(crate) fn set_exclusive(&mut self, now: &BTreeMap<CpuId, SlotId>) -> Result<(), MapAccessError> {
        let ended: Vec<CpuId> = self.exclusive.keys().filter(|cpu| !now.contains_key(cpu)).copied().collect();
        if !ended.is_empty() {
            // What runs there now counts up to now.
            self.read_cpus()?;
        }
        for cpu in ended {
            set(&mut self.owner, "OWNER", cpu.0, &OTHER_SLOT)?;
            self.exclusive.remove(&cpu);
        }
        for (&cpu, &slot) in now {
            if self.exclusive.get(&cpu) != Some(&slot) {
                set(&mut self.owner, "OWNER", cpu.0, &slot.0)?;
                self.exclusive.insert(cpu, slot);
                self.read.entry(cpu).or_default();
            }
        }
        let Some(Program::BtfTracePoint(program)) = self.family.program(self.program) else { return Ok(()) };
        let failed = |error: ProgramError| MapAccessError {
            map: "OWNER",
            action: "follow",
            source: io::Error::other(error),
        };
        match self.link.take() {
            None if !now.is_empty() => self.link = Some(program.attach().map_err(failed)?),
            Some(link) if now.is_empty() => program.detach(link).map_err(failed)?,
            link => self.link = link,
        }
        Ok(())
    }

    /// Who used the CPUs that are exclusive or were, while they were.
    pub(crate) fn read_cpus(&mut self) -> Result<BTreeMap<CpuId, CpuUse>, MapAccessError> {
        if self.read.is_empty() {
            return Ok(BTreeMap::new());
        }
        let times = self.times.get(&0, 0).map_err(access("TIMES", "read"))?;
        let now = sys::monotonic_nanoseconds();
        for (cpu, read) in &mut self.read {
            let Some(times) = times.get(cpu.0 as usize) else { continue };
            let owner = self.exclusive.get(cpu).map(|slot| slot.0);
            *read = use_of(times, owner, now).at_least(*read);
        }
        Ok(self.read.clone())
    }

    pub(crate) fn intruders(&self) -> Result<Vec<Intruder>, MapAccessError> {
        if self.read.is_empty() {
            return Ok(Vec::new());
        }
        let mut intruders = Vec::new();
        for entry in &self.intruders {
            let (key, time) = entry.map_err(access("INTRUDERS", "read"))?;
            intruders.extend(intruder(&key, &time));
        }
        Ok(intruders)
    }

    pub(crate) fn stats(&self) -> io::Result<Vec<ProbeStats>> {
        self.family.stats_of(Probe::Switch, self.program)
    }
}

/// Loads the program, and shows whether it can be attached, while that can be told.
fn load_tp_btf(family: &mut Family, kernel: &Kernel) -> Result<(), Refusal> {
    kernel.get(|structures| &structures.cgroup_path)?;
    kernel.get(|structures| &structures.task)?;
    let btf = kernel.btf.as_ref().ok_or(Refusal::Kernel("the kernel has no BTF".to_owned()))?;
    let Some(Program::BtfTracePoint(program)) = family.program(PROGRAM) else {
        return Err(Refusal::Incomplete(PROGRAM));
    };
    program.load("sched_switch", btf).map_err(|error| Refusal::kernel(&error))?;
    let link = program.attach().map_err(|error| Refusal::kernel(&error))?;
    program.detach(link).map_err(|error| Refusal::kernel(&error))
}

/// The time of each class, with that of the task that runs now.
fn use_of(times: &CpuTimes, owner: Option<u32>, now: u64) -> CpuUse {
    let mut nanoseconds = times.nanoseconds;
    if times.since != 0
        && owner == Some(times.owner)
        && let Some(running) = nanoseconds.get_mut(times.class as usize)
    {
        *running = running.saturating_add(now.saturating_sub(times.since));
    }
    let [own, kernel_threads, host, workloads] = nanoseconds.map(Duration::from_nanos);
    CpuUse { own, kernel_threads, host, workloads }
}

fn intruder(key: &IntruderKey, time: &IntruderTime) -> Option<Intruder> {
    let is = |class: RunClass| key.class == class as u32;
    let class = if is(RunClass::KernelThread) {
        IntruderClass::KernelThread
    } else if is(RunClass::Host) {
        IntruderClass::Host
    } else if is(RunClass::Workload) {
        IntruderClass::Workload
    } else {
        return None;
    };
    Some(Intruder {
        owner: SlotId(key.owner),
        class,
        workload: (key.slot != OTHER_SLOT).then_some(SlotId(key.slot)),
        command: command_name(&key.comm),
        time: Duration::from_nanos(time.nanoseconds),
        runs: time.runs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_runs_now_is_counted_up_to_now() {
        let times = CpuTimes {
            since: 100,
            owner: 7,
            slot: 0,
            class: RunClass::Host as u32,
            padding: 0,
            nanoseconds: [1, 2, 3, 4],
        };
        let host = |times: &CpuTimes, owner, now| use_of(times, owner, now).host.as_nanos();
        assert_eq!(host(&times, Some(7), 150), 53);
        assert_eq!(host(&times, Some(7), 50), 3, "clocks of CPUs may differ a little");
        assert_eq!(host(&times, Some(8), 150), 3, "it was switched in under another owner");
        assert_eq!(host(&times, None, 150), 3);
        assert_eq!(host(&CpuTimes { since: 0, ..times }, Some(7), 150), 3);
        let idle = CpuTimes { class: RunClass::Idle as u32, ..times };
        assert_eq!(use_of(&idle, Some(7), 150).intruders(), Duration::from_nanos(9));
        let full = CpuTimes { nanoseconds: [u64::MAX; 4], ..times };
        assert_eq!(host(&full, Some(7), u64::MAX), u128::from(u64::MAX));
    }

    #[test]
    fn intruders_have_a_class_or_are_none() {
        let key =
            |class, slot| IntruderKey { owner: 1, slot, class, padding: 0, comm: *b"kworker/0:1\0\0\0\0\0" };
        let time = IntruderTime { nanoseconds: 5, runs: 2 };
        let found = intruder(&key(RunClass::KernelThread as u32, 0), &time).unwrap();
        assert_eq!((found.class, found.workload), (IntruderClass::KernelThread, None));
        assert_eq!((found.command.as_str(), found.runs), ("kworker/0:1", 2));
        let found = intruder(&key(RunClass::Workload as u32, 3), &time).unwrap();
        assert_eq!((found.class, found.workload), (IntruderClass::Workload, Some(SlotId(3))));
        assert_eq!(intruder(&key(RunClass::Own as u32, 3), &time), None);
        assert_eq!(intruder(&key(99, 3), &time), None);
    }
}

//! Who runs on exclusive CPUs: see `ebpf/src/switch.rs`.
//!
//! The program is loaded at the start, while the daemon has the privileges for that, and attached only while a CPU is
//! exclusive: attaching a loaded program takes none. Where only the classic tracepoint is available, which takes
//! privileges to attach, it stays attached.

use std::{
    array,
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};

use aya::{
    EbpfLoader,
    maps::{Array, HashMap, MapData, PerCpuArray},
};
use numaward_abi::{CpuTimes, IntruderKey, IntruderTime, OTHER_SLOT, RunClass};
use numaward_topology::CpuId;

use crate::{
    MapAccessError, Mode, Probe, ProbeOptions, ProbeReport, SlotId,
    error::Refusal,
    event::command_name,
    family::{Family, Hook, attach_by_first},
    kernel::Kernel,
    maps::{access, set},
    objects::SWITCH,
    sys,
};

const PROGRAM: &str = "switch_tp_btf";
const FALLBACK: &str = "switch_tracepoint";

/// What sort of task runs on a CPU that is exclusive to another workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum IntruderClass {
    /// A kernel thread.
    KernelThread = RunClass::KernelThread as isize,
    /// A process of no registered workload.
    Host = RunClass::Host as isize,
    /// A process of another workload.
    Workload = RunClass::Workload as isize,
}

impl IntruderClass {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::KernelThread, Self::Host, Self::Workload];

    /// The metric label `class`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Who used a CPU while it was exclusive, since the daemon started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuUsage {
    /// The workload that it is exclusive to.
    pub own: Duration,
    /// Intruders, by [`IntruderClass`].
    pub intruders: [Duration; IntruderClass::ALL.len()],
}

impl CpuUsage {
    /// The time of a class of intruders.
    pub const fn time_of(&self, class: IntruderClass) -> Duration {
        self.intruders[class as usize - 1]
    }

    /// No less than before in any part: a reading may catch the kernel between two writes.
    fn at_least(self, before: Self) -> Self {
        Self {
            own: self.own.max(before.own),
            intruders: array::from_fn(|class| self.intruders[class].max(before.intruders[class])),
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
    pub(crate) family: Family,
    owner: Array<MapData, u32>,
    times: PerCpuArray<MapData, CpuTimes>,
    intruders: HashMap<MapData, IntruderKey, IntruderTime>,
    /// Which of the programs serves.
    program: &'static str,
    exclusive: BTreeMap<CpuId, SlotId>,
    /// CPUs that are or were exclusive, and what was read of them last.
    read: BTreeMap<CpuId, CpuUsage>,
}

impl Switch {
    pub(crate) fn load(options: &ProbeOptions<'_>, kernel: &Kernel) -> Result<(Self, ProbeReport), Refusal> {
        let object = SWITCH.map_err(Refusal::NotBuilt)?;
        let layout = || {
            kernel.ancestors()?;
            kernel.get(|structures| &structures.task)
        };
        let task = layout().unwrap_or_default();
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| Refusal::Cpus(error))?;
        let to_slot = kernel.to_slot()?;
        let mut loader = EbpfLoader::new();
        to_slot.show(&mut loader);
        loader
            .btf(kernel.btf())
            .override_global("TASK", &task, true)
            .map_max_entries("OWNER", u32::try_from(cpus).unwrap_or(u32::MAX));
        let mut family = Family::load(&mut loader, "switch", object, options.slots)?;
        let ways = vec![
            (Mode::TpBtf, layout().map(|_| vec![(PROGRAM, Hook::TpBtf("sched_switch"))])),
            (Mode::Tracepoint, Ok(vec![(FALLBACK, Hook::Tracepoint("sched", "sched_switch"))])),
        ];
        let mut report = attach_by_first(&mut family, Probe::Switch, ways, kernel.btf());
        if report.mode == Mode::Tracepoint
            && let Some(reason) = &mut report.reason
        {
            reason.push_str(
                "; tracepoint: kernel threads are taken for processes of the host; it is attached all the time",
            );
        }
        // That it can be attached is known now.
        family.set_attached(PROGRAM, false).map_err(|error| Refusal::kernel(&error))?;
        let switch = Self {
            owner: family.take("OWNER")?,
            times: family.take("TIMES")?,
            intruders: family.take("INTRUDERS")?,
            exclusive: BTreeMap::new(),
            read: BTreeMap::new(),
            program: if report.mode == Mode::Tracepoint { FALLBACK } else { PROGRAM },
            family,
        };
        Ok((switch, report))
    }

    /// Forgets the intruders of a slot, and upon it: it will be another's.
    pub(crate) fn forget(&mut self, slot: u32) -> Result<(), MapAccessError> {
        // Nobody ever intruded while nothing was exclusive.
        if self.read.is_empty() {
            return Ok(());
        }
        let keys: Result<BTreeSet<IntruderKey>, _> = self.intruders.keys().collect();
        let keys = keys.map_err(access("INTRUDERS", "read"))?;
        for key in keys.into_iter().filter(|key| key.owner == slot || key.slot == slot) {
            self.intruders.remove(&key).map_err(access("INTRUDERS", "write"))?;
        }
        Ok(())
    }

    /// Whether it measures now.
    pub(crate) fn is_attached(&self) -> bool {
        self.family.is_attached(self.program) || self.program == FALLBACK && !self.exclusive.is_empty()
    }

    /// Sets which CPUs are exclusive to whom; attaches or detaches as that demands.
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
        self.family.set_attached(self.program, !now.is_empty()).map_err(|error| MapAccessError {
            map: "OWNER",
            action: "follow",
            source: io::Error::other(error),
        })
    }

    /// Who used the CPUs that are exclusive or were, while they were.
    pub(crate) fn read_cpus(&mut self) -> Result<BTreeMap<CpuId, CpuUsage>, MapAccessError> {
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
}

/// The time of each class, with that of the task that runs now.
fn use_of(times: &CpuTimes, owner: Option<u32>, now: u64) -> CpuUsage {
    let mut nanoseconds = times.nanoseconds;
    if times.since != 0
        && owner == Some(times.owner)
        && let Some(running) = nanoseconds.get_mut(times.class as usize)
    {
        *running = running.saturating_add(now.saturating_sub(times.since));
    }
    let [own, intruders @ ..] = nanoseconds.map(Duration::from_nanos);
    CpuUsage { own, intruders }
}

fn intruder(key: &IntruderKey, time: &IntruderTime) -> Option<Intruder> {
    Some(Intruder {
        owner: SlotId(key.owner),
        class: IntruderClass::ALL.into_iter().find(|class| *class as u32 == key.class)?,
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
        let host =
            |times: &CpuTimes, owner, now| use_of(times, owner, now).time_of(IntruderClass::Host).as_nanos();
        assert_eq!(host(&times, Some(7), 150), 53);
        assert_eq!(host(&times, Some(7), 50), 3, "clocks of CPUs may differ a little");
        assert_eq!(host(&times, Some(8), 150), 3, "it was switched in under another owner");
        assert_eq!(host(&times, None, 150), 3);
        assert_eq!(host(&CpuTimes { since: 0, ..times }, Some(7), 150), 3);
        let idle = CpuTimes { class: RunClass::Idle as u32, ..times };
        assert_eq!(use_of(&idle, Some(7), 150).intruders, [2, 3, 4].map(Duration::from_nanos));
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

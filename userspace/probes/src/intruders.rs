//! Measures the tasks that run on exclusive CPUs: see `ebpf/src/switch.rs`.
//!
//! The program is loaded at the start, when the daemon has the necessary privileges, and attached only while a CPU is
//! exclusive: attaching a loaded program needs no privileges. Attaching the classic tracepoint does, so as a fallback
//! it stays attached.

use std::{
    array,
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};

use aya::maps::{Array, HashMap, MapData, PerCpuArray};
use numaward_abi::{CpuTimes, IntruderKey, IntruderTime, OTHER_SLOT, RunClass};
use numaward_topology::CpuId;

use crate::{
    MapAccessError, Mode, Probe, ProbeOptions, ProbeReport, SlotId,
    error::ProbeError,
    event::command_name,
    family::{Family, Hook, attach_by_first_method},
    kernel::KernelInfo,
    maps::{access_error, set},
    objects::SWITCH,
    sys,
};

const PROGRAM: &str = "switch_tp_btf";
const FALLBACK_PROGRAM: &str = "switch_tracepoint";

/// The class of a task on a CPU that is exclusive to another workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum IntruderClass {
    KernelThread = RunClass::KernelThread as isize,
    /// A process that belongs to no registered workload.
    Host = RunClass::Host as isize,
    /// A process of another workload.
    Workload = RunClass::Workload as isize,
}

impl IntruderClass {
    pub const ALL: [Self; 3] = [Self::KernelThread, Self::Host, Self::Workload];

    /// Returns the value of the metric label `class`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The running time on a CPU while it was exclusive, since the daemon started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuUsage {
    /// Time of the workload that owns the CPU.
    pub own: Duration,
    /// Time of intruders, by [`IntruderClass`].
    pub intruders: [Duration; IntruderClass::ALL.len()],
}

impl CpuUsage {
    /// Returns the time of a class of intruders.
    pub const fn time_of(&self, class: IntruderClass) -> Duration {
        self.intruders[class as usize - 1]
    }

    /// Returns the maximum of each part: a reading may fall between two writes of the kernel.
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
    /// The workload that owns the CPUs.
    pub owner: SlotId,
    pub class: IntruderClass,
    /// The intruder's workload, if it is registered.
    pub workload: Option<SlotId>,
    /// The task's name, at most 15 bytes.
    pub command: String,
    /// The running time since the CPUs became exclusive.
    pub time: Duration,
    /// The number of times that a task was switched in.
    pub runs: u64,
}

/// The scheduler's probe: loaded, and attached while a CPU is exclusive.
pub(crate) struct SwitchProbe {
    pub(crate) family: Family,
    owner: Array<MapData, u32>,
    times: PerCpuArray<MapData, CpuTimes>,
    intruders: HashMap<MapData, IntruderKey, IntruderTime>,
    /// The program in use.
    program: &'static str,
    exclusive: BTreeMap<CpuId, SlotId>,
    /// CPUs that are or were exclusive, with their last reading.
    read: BTreeMap<CpuId, CpuUsage>,
}

impl SwitchProbe {
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
    ) -> Result<(Self, ProbeReport), ProbeError> {
        let object = SWITCH.map_err(ProbeError::NotBuilt)?;
        let layout = || {
            kernel.ancestors()?;
            kernel.get(|structures| &structures.task)
        };
        let task = layout().unwrap_or_default();
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| ProbeError::Cpus(error))?;
        let slot_path = kernel.slot_path()?;
        let settings = slot_path
            .settings()
            .global("TASK", task)
            .entries("OWNER", u32::try_from(cpus).unwrap_or(u32::MAX));
        let mut family = Family::load(kernel, "switch", object, options.slots, settings)?;
        let methods = vec![
            (Mode::TpBtf, layout().map(|_| vec![(PROGRAM, Hook::TpBtf("sched_switch"))])),
            (Mode::Tracepoint, Ok(vec![(FALLBACK_PROGRAM, Hook::Tracepoint("sched", "sched_switch"))])),
        ];
        let mut report = attach_by_first_method(&mut family, Probe::Switch, methods, kernel.btf());
        if report.mode == Mode::Tracepoint
            && let Some(reason) = &mut report.reason
        {
            reason.push_str(
                "; tracepoint: kernel threads are taken for processes of the host; it is attached all the time",
            );
        }
        // Attaching has succeeded once, so it will succeed again.
        family.set_attached(PROGRAM, false).map_err(|error| ProbeError::kernel(&error))?;
        let switch = Self {
            owner: family.take("OWNER")?,
            times: family.take("TIMES")?,
            intruders: family.take("INTRUDERS")?,
            exclusive: BTreeMap::new(),
            read: BTreeMap::new(),
            program: if report.mode == Mode::Tracepoint { FALLBACK_PROGRAM } else { PROGRAM },
            family,
        };
        Ok((switch, report))
    }

    /// Removes the intruders on and of a slot, which is about to get another holder.
    pub(crate) fn forget(&mut self, slot: u32) -> Result<(), MapAccessError> {
        // There are no intruders as long as no CPU was exclusive.
        if self.read.is_empty() {
            return Ok(());
        }
        let keys: Result<BTreeSet<IntruderKey>, _> = self.intruders.keys().collect();
        let keys = keys.map_err(access_error("INTRUDERS", "read"))?;
        for key in keys.into_iter().filter(|key| key.owner == slot || key.slot == slot) {
            self.intruders.remove(&key).map_err(access_error("INTRUDERS", "write"))?;
        }
        Ok(())
    }

    /// Returns true if the probe measures now.
    pub(crate) fn is_attached(&self) -> bool {
        self.family.is_attached(self.program)
            || self.program == FALLBACK_PROGRAM && !self.exclusive.is_empty()
    }

    /// Sets the owners of exclusive CPUs, and attaches or detaches the program accordingly.
    pub(crate) fn set_exclusive(&mut self, now: &BTreeMap<CpuId, SlotId>) -> Result<(), MapAccessError> {
        let ended: Vec<CpuId> = self.exclusive.keys().filter(|cpu| !now.contains_key(cpu)).copied().collect();
        if !ended.is_empty() {
            // The time of the current tasks counts up to now.
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

    /// Returns the running times on CPUs that are or were exclusive.
    pub(crate) fn read_cpus(&mut self) -> Result<BTreeMap<CpuId, CpuUsage>, MapAccessError> {
        if self.read.is_empty() {
            return Ok(BTreeMap::new());
        }
        let times = self.times.get(&0, 0).map_err(access_error("TIMES", "read"))?;
        let now = sys::monotonic_nanoseconds();
        for (cpu, read) in &mut self.read {
            let Some(times) = times.get(cpu.0 as usize) else { continue };
            let owner = self.exclusive.get(cpu).map(|slot| slot.0);
            *read = usage_from_times(times, owner, now).at_least(*read);
        }
        Ok(self.read.clone())
    }

    pub(crate) fn intruders(&self) -> Result<Vec<Intruder>, MapAccessError> {
        if self.read.is_empty() {
            return Ok(Vec::new());
        }
        let mut intruders = Vec::new();
        for entry in &self.intruders {
            let (key, time) = entry.map_err(access_error("INTRUDERS", "read"))?;
            intruders.extend(decode_intruder(&key, &time));
        }
        Ok(intruders)
    }
}

/// Returns the time of each class, including that of the current task.
fn usage_from_times(times: &CpuTimes, owner: Option<u32>, now: u64) -> CpuUsage {
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

fn decode_intruder(key: &IntruderKey, time: &IntruderTime) -> Option<Intruder> {
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
    fn current_task_counts_up_to_now() {
        let times = CpuTimes {
            since: 100,
            owner: 7,
            slot: 0,
            class: RunClass::Host as u32,
            padding: 0,
            nanoseconds: [1, 2, 3, 4],
        };
        let host = |times: &CpuTimes, owner, now| {
            usage_from_times(times, owner, now).time_of(IntruderClass::Host).as_nanos()
        };
        assert_eq!(host(&times, Some(7), 150), 53);
        assert_eq!(host(&times, Some(7), 50), 3, "clocks of CPUs may differ a little");
        assert_eq!(host(&times, Some(8), 150), 3, "it was switched in under another owner");
        assert_eq!(host(&times, None, 150), 3);
        assert_eq!(host(&CpuTimes { since: 0, ..times }, Some(7), 150), 3);
        let idle = CpuTimes { class: RunClass::Idle as u32, ..times };
        assert_eq!(usage_from_times(&idle, Some(7), 150).intruders, [2, 3, 4].map(Duration::from_nanos));
        let full = CpuTimes { nanoseconds: [u64::MAX; 4], ..times };
        assert_eq!(host(&full, Some(7), u64::MAX), u128::from(u64::MAX));
    }

    #[test]
    fn decodes_intruders() {
        let key =
            |class, slot| IntruderKey { owner: 1, slot, class, padding: 0, comm: *b"kworker/0:1\0\0\0\0\0" };
        let time = IntruderTime { nanoseconds: 5, runs: 2 };
        let found = decode_intruder(&key(RunClass::KernelThread as u32, 0), &time).unwrap();
        assert_eq!((found.class, found.workload), (IntruderClass::KernelThread, None));
        assert_eq!((found.command.as_str(), found.runs), ("kworker/0:1", 2));
        let found = decode_intruder(&key(RunClass::Workload as u32, 3), &time).unwrap();
        assert_eq!((found.class, found.workload), (IntruderClass::Workload, Some(SlotId(3))));
        assert_eq!(decode_intruder(&key(RunClass::Own as u32, 3), &time), None);
        assert_eq!(decode_intruder(&key(99, 3), &time), None);
    }
}

//! Exclusive CPUs: who else runs on them, and which interrupts they take.
//!
//! The scheduler's probe measures tasks. Interrupts are counted by the kernel; what a CPU counted while it was
//! exclusive is the growth between two readings of `/proc/interrupts` and `/proc/softirqs`.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use numaward_api as api;
use numaward_model::snapshot::{CpuFigures, Interrupts};
use numaward_probes::{CpuUse, IntruderClass, SlotId};
use numaward_topology::CpuId;

use super::{Observer, Part, State, activity::micros, chain};
use crate::affinity::Affinity;

/// The CPUs that are exclusive, or were since the daemon started.
#[derive(Debug, Default)]
pub(super) struct Exclusive {
    owners: BTreeMap<CpuId, SlotId>,
    interrupts: BTreeMap<CpuId, Book>,
}

/// Interrupts on a CPU.
#[derive(Clone, Copy, Debug, Default)]
struct Book {
    /// Those of earlier times in which it was exclusive.
    sum: Interrupts,
    /// What the kernel had counted when it became so; `None` while it is not.
    base: Option<Interrupts>,
}

impl Book {
    fn total(self, now: Option<Interrupts>) -> Interrupts {
        let grown = |now: u64, base: u64| now.saturating_sub(base);
        let (Some(base), Some(now)) = (self.base, now) else { return self.sum };
        Interrupts {
            hard: self.sum.hard.saturating_add(grown(now.hard, base.hard)),
            soft: self.sum.soft.saturating_add(grown(now.soft, base.soft)),
        }
    }
}

impl Exclusive {
    /// To whom each CPU is exclusive.
    pub(super) fn owners(&self) -> &BTreeMap<CpuId, SlotId> {
        &self.owners
    }

    fn change(&mut self, owners: &BTreeMap<CpuId, SlotId>, now: &BTreeMap<CpuId, Interrupts>) {
        for cpu in self.owners.keys().filter(|cpu| !owners.contains_key(cpu)) {
            if let Some(book) = self.interrupts.get_mut(cpu) {
                book.sum = book.total(now.get(cpu).copied());
                book.base = None;
            }
        }
        for cpu in owners.keys() {
            let book = self.interrupts.entry(*cpu).or_default();
            book.base = book.base.or(now.get(cpu).copied());
        }
        self.owners.clone_from(owners);
    }
}

/// Reads both files; a CPU that one of them lacks is absent.
pub(super) fn read_interrupts(root: &Path) -> Result<BTreeMap<CpuId, Interrupts>, String> {
    let read = |file: &str| {
        let path = root.join("proc").join(file);
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        sums(&text).ok_or_else(|| format!("{}: expected a line of CPUs and lines of numbers", path.display()))
    };
    let (hard, soft) = (read("interrupts")?, read("softirqs")?);
    let both =
        hard.into_iter().filter_map(|(cpu, hard)| Some((cpu, Interrupts { hard, soft: *soft.get(&cpu)? })));
    Ok(both.collect())
}

/// The sum of each column. The first line names the CPUs (those online); each line below has a name, a number for
/// each CPU (or one for all, in `ERR` and `MIS`), and a description.
fn sums(text: &str) -> Option<BTreeMap<CpuId, u64>> {
    let mut lines = text.lines();
    let cpus: Vec<CpuId> = lines
        .next()?
        .split_ascii_whitespace()
        .map(|name| Some(CpuId(name.strip_prefix("CPU")?.parse().ok()?)))
        .collect::<Option<_>>()?;
    let mut sums = vec![0_u64; cpus.len()];
    for line in lines {
        let (_, counts) = line.split_once(':')?;
        let counts: Vec<u64> =
            counts.split_ascii_whitespace().take(cpus.len()).map_while(|word| word.parse().ok()).collect();
        if counts.len() == cpus.len() {
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(count));
        }
    }
    Some(cpus.into_iter().zip(sums).collect())
}

impl State {
    /// Tells the probe which CPUs are exclusive to whom, if that changed.
    pub(super) fn follow_exclusive_cpus(&mut self, root: &Path) {
        let mut owners = BTreeMap::new();
        for promise in self.promises.workloads() {
            if let Some(slot) = self.table.slot(promise.id) {
                owners.extend(promise.cpus.iter().map(|cpu| (cpu, slot)));
            }
        }
        if owners == self.exclusive.owners {
            return;
        }
        let interrupts = read_interrupts(root);
        self.note(Part::Interrupts, interrupts.as_ref().map(|_| ()).map_err(Clone::clone));
        self.exclusive.change(&owners, &interrupts.unwrap_or_default());
        let told = self.probes.set_exclusive(&owners).map_err(|error| chain(&error));
        self.note(Part::Intruders, told);
    }

    /// Keeps our own threads off exclusive CPUs.
    pub(super) fn step_aside(&mut self) {
        let Some(affinity) = &mut self.affinity else { return };
        let exclusive = self.promises.workloads().iter().flat_map(|promise| promise.cpus.iter()).collect();
        if let Err(error) = affinity.keep_off(&exclusive) {
            tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs");
            self.affinity = None;
        }
    }

    /// Who used the CPUs that are exclusive, or were.
    fn cpu_use(&mut self, root: &Path) -> Vec<(CpuId, CpuUse, Option<Interrupts>)> {
        if self.exclusive.interrupts.is_empty() {
            return Vec::new();
        }
        let interrupts = read_interrupts(root);
        self.note(Part::Interrupts, interrupts.as_ref().map(|_| ()).map_err(Clone::clone));
        let used = self.probes.cpu_use().map_err(|error| chain(&error));
        self.note(Part::Intruders, used.as_ref().map(|_| ()).map_err(Clone::clone));
        let (interrupts, used) = (interrupts.ok(), used.unwrap_or_default());
        let figures = |(&cpu, book): (&CpuId, &Book)| {
            let used = used.get(&cpu).copied()?;
            let now = interrupts.as_ref().map(|now| book.total(now.get(&cpu).copied()));
            Some((cpu, used, now))
        };
        self.exclusive.interrupts.iter().filter_map(figures).collect()
    }

    /// The same, as metrics serve it.
    pub(super) fn cpu_figures(&mut self, root: &Path) -> Vec<(CpuId, CpuFigures)> {
        let figures = |(cpu, used, interrupts): (CpuId, CpuUse, _)| {
            let intruders = IntruderClass::ALL.map(|class| (class.as_str(), used.of(class)));
            (cpu, CpuFigures { intruders, interrupts })
        };
        self.cpu_use(root).into_iter().map(figures).collect()
    }

    pub(super) fn name_of_slot(&self, slot: SlotId) -> Option<Arc<str>> {
        let (id, _) = self.table.members().find(|(_, member)| member.slot == Some(slot))?;
        self.table.name(id).cloned()
    }

    /// The exclusive CPUs and how clean each was.
    pub(super) fn exclusive_cpus(&mut self, root: &Path) -> Vec<api::ExclusiveCpu> {
        let used = self.cpu_use(root);
        let known = used.into_iter().filter_map(|(cpu, used, interrupts)| {
            let owner = *self.exclusive.owners.get(&cpu)?;
            let of = |class| micros(used.of(class));
            Some(api::ExclusiveCpu {
                cpu: cpu.0,
                workload: self.name_of_slot(owner)?.to_string(),
                own_micros: micros(used.own),
                kernel_thread_micros: of(IntruderClass::KernelThread),
                host_micros: of(IntruderClass::Host),
                workload_micros: of(IntruderClass::Workload),
                hard_interrupts: interrupts.map(|interrupts| interrupts.hard),
                soft_interrupts: interrupts.map(|interrupts| interrupts.soft),
            })
        });
        known.collect()
    }
}

impl Observer {
    /// From now on, all threads of this process keep off exclusive CPUs.
    pub fn keep_off_exclusive_cpus(&self) {
        match Affinity::of_this_thread() {
            Ok(affinity) => self.lock().affinity = Some(affinity),
            Err(error) => tracing::warn!(%error, "the daemon's own threads may run on exclusive CPUs"),
        }
    }

    /// Who ran on the exclusive CPUs of the workloads of a name, the longest first; `None` where there is no such
    /// workload.
    pub fn intruders(&self, name: &str) -> Option<api::Intruders> {
        let mut state = self.lock();
        let slots: Vec<SlotId> = {
            let (_, series) = state.table.series().find(|(found, _)| &***found == name)?;
            series.members.values().filter_map(|member| member.slot).collect()
        };
        let cpus = state.exclusive_cpus(&self.config.host_root);
        let cpus = cpus.into_iter().filter(|cpu| cpu.workload == name).collect();
        let found = state.probes.intruders().map_err(|error| chain(&error));
        state.note(Part::Intruders, found.as_ref().map(|_| ()).map_err(Clone::clone));
        let mut intruders: Vec<api::Intruder> = found
            .unwrap_or_default()
            .into_iter()
            .filter(|intruder| slots.contains(&intruder.owner))
            .map(|intruder| api::Intruder {
                class: intruder.class.as_str().to_owned(),
                workload: intruder
                    .workload
                    .and_then(|slot| state.name_of_slot(slot))
                    .map(|name| name.to_string()),
                command: intruder.command,
                micros: micros(intruder.time),
                runs: intruder.runs,
            })
            .collect();
        intruders.sort_by(|a, b| b.micros.cmp(&a.micros).then_with(|| a.command.cmp(&b.command)));
        intruders.truncate(api::MAX_INTRUDERS);
        Some(api::Intruders { watching: state.probes.is_watching_cpus(), cpus, intruders })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const INTERRUPTS: &str = "           CPU0       CPU2       \n\
         \x20  0:         20          1   IO-APIC   2-edge      timer\n\
         \x20 24:          3          0   PCI-MSI 65536-edge      virtio0-config 7 8\n\
         NMI:          0          5   Non-maskable interrupts\n\
         ERR:          9\nMIS:          0\n";
    const SOFTIRQS: &str = "                    CPU0       CPU2       \n          HI:          1          0\n       TIMER:        100         50\n";

    fn root(interrupts: Option<&str>, softirqs: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        if let Some(interrupts) = interrupts {
            fs::write(root.path().join("proc/interrupts"), interrupts).unwrap();
        }
        fs::write(root.path().join("proc/softirqs"), softirqs).unwrap();
        root
    }

    #[test]
    fn interrupts_are_read_from_good_missing_and_corrupt_files() {
        let good = read_interrupts(root(Some(INTERRUPTS), SOFTIRQS).path()).unwrap();
        let expected =
            [(CpuId(0), Interrupts { hard: 23, soft: 101 }), (CpuId(2), Interrupts { hard: 6, soft: 50 })];
        assert_eq!(good, BTreeMap::from(expected));
        for (interrupts, softirqs, part) in [
            (None, SOFTIRQS, "proc/interrupts: No such file"),
            (Some(""), SOFTIRQS, "proc/interrupts: expected a line of CPUs"),
            (Some("CPU0 CPUx\n"), SOFTIRQS, "proc/interrupts: expected a line of CPUs"),
            (Some(INTERRUPTS), "CPU0\nwords\n", "proc/softirqs: expected a line of CPUs"),
        ] {
            let error = read_interrupts(root(interrupts, softirqs).path()).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn interrupts_count_while_a_cpu_is_exclusive() {
        let (one, none) = (BTreeMap::from([(CpuId(1), slot())]), BTreeMap::new());
        let at = |hard| BTreeMap::from([(CpuId(1), Interrupts { hard, soft: 0 })]);
        let mut exclusive = Exclusive::default();
        let total = |exclusive: &Exclusive, hard| {
            exclusive.interrupts[&CpuId(1)].total(at(hard).get(&CpuId(1)).copied()).hard
        };
        exclusive.change(&one, &at(100));
        assert_eq!(total(&exclusive, 107), 7);
        exclusive.change(&none, &at(110));
        assert_eq!(total(&exclusive, 500), 10, "it is not exclusive any more");
        exclusive.change(&one, &at(1000));
        assert_eq!(total(&exclusive, 1002), 12);
        assert_eq!(total(&exclusive, 3), 10, "the CPU was offline and counts anew");
    }

    /// Some slot, always the same.
    pub(in super::super) fn slot() -> SlotId {
        let machine = numaward_topology::Machine::default();
        let options = numaward_probes::Options {
            alloc_modes: &[],
            others: Vec::new(),
            ..numaward_probes::Options::new(&machine)
        };
        numaward_probes::Probes::load(&options).register(numaward_probes::CgroupId(1), None).unwrap()
    }
}

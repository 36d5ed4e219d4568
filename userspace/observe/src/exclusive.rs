//! Owners of exclusive CPUs, and the interrupts that these CPUs handle.
//!
//! The kernel counts interrupts. The interrupts of a CPU while it was exclusive are the growth between two readings
//! of `/proc/interrupts`, `/proc/softirqs` and `/proc/stat`.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use numaward_model::snapshot::InterruptFigures;
use numaward_probes::SlotId;
use numaward_topology::CpuId;

/// CPUs that are exclusive or have been since the daemon started.
#[derive(Debug, Default)]
pub(crate) struct ExclusiveCpus {
    pub(crate) owners: BTreeMap<CpuId, SlotId>,
    pub(crate) interrupts: BTreeMap<CpuId, InterruptAccount>,
    /// True if the owners changed since the interrupts were last read.
    must_read: bool,
}

/// Interrupts of a CPU while it was exclusive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InterruptAccount {
    /// Interrupts of former periods in which the CPU was exclusive.
    sum: InterruptFigures,
    /// The kernel's counts when the current period began; `None` while the CPU is not exclusive.
    base: Option<InterruptFigures>,
    /// Largest total so far. Readings may be processed out of order, and a counter must not decrease.
    total: InterruptFigures,
}

impl InterruptAccount {
    pub(crate) fn total(&mut self, now: Option<InterruptFigures>) -> InterruptFigures {
        if let (Some(base), Some(now)) = (self.base, now) {
            let total = |sum: u64, base: u64, now: u64| sum.saturating_add(now.saturating_sub(base));
            self.total.hard = self.total.hard.max(total(self.sum.hard, base.hard, now.hard));
            self.total.soft = self.total.soft.max(total(self.sum.soft, base.soft, now.soft));
            let time = |sum: Duration, base, now: Duration| sum.saturating_add(now.saturating_sub(base));
            self.total.hard_time =
                self.total.hard_time.max(time(self.sum.hard_time, base.hard_time, now.hard_time));
            self.total.soft_time =
                self.total.soft_time.max(time(self.sum.soft_time, base.soft_time, now.soft_time));
        }
        self.total
    }
}

impl ExclusiveCpus {
    /// Sets the owners of exclusive CPUs. Interrupts are counted from the next reading on.
    pub(crate) fn set_owners(&mut self, owners: BTreeMap<CpuId, SlotId>) {
        for cpu in owners.keys() {
            self.interrupts.entry(*cpu).or_default();
        }
        self.owners = owners;
        self.must_read = true;
    }

    /// Returns once per change whether the interrupts must be read for [`ExclusiveCpus::count`].
    pub(crate) fn is_due(&mut self) -> bool {
        std::mem::take(&mut self.must_read)
    }

    /// Requests another reading after a failed one.
    pub(crate) fn retry(&mut self) {
        self.must_read = true;
    }

    /// Starts or ends the counting of interrupts with the kernel's current counts.
    pub(crate) fn count(&mut self, now: &BTreeMap<CpuId, InterruptFigures>) {
        for (cpu, account) in &mut self.interrupts {
            let now = now.get(cpu).copied();
            if self.owners.contains_key(cpu) {
                account.base = account.base.or(now);
            } else {
                account.sum = account.total(now);
                account.base = None;
            }
        }
    }
}

/// Reads the files; a CPU that is missing in one of them is absent.
pub(crate) fn read_interrupts(
    root: &Path,
    ticks_per_second: u64,
) -> Result<BTreeMap<CpuId, InterruptFigures>, String> {
    let read = |file: &str| {
        let path = root.join("proc").join(file);
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok::<_, String>((path, text))
    };
    let sums = |file: &str| {
        let (path, text) = read(file)?;
        sums(&text).ok_or_else(|| {
            let reason = if text.is_empty() {
                // Container runtimes mask a path with /dev/null. The kubelet masks this one since 2025.
                "the file is empty, because the container runtime masks it"
            } else {
                "expected a line of CPUs and lines of numbers"
            };
            format!("{}: {reason}", path.display())
        })
    };
    let (hard, soft) = (sums("interrupts")?, sums("softirqs")?);
    let (path, text) = read("stat")?;
    let times = interrupt_times(&text, ticks_per_second)
        .ok_or_else(|| format!("{}: expected lines of CPUs with at least seven times", path.display()))?;
    let all = hard.into_iter().filter_map(|(cpu, hard)| {
        let (soft, [hard_time, soft_time]) = (*soft.get(&cpu)?, *times.get(&cpu)?);
        Some((cpu, InterruptFigures { hard, soft, hard_time, soft_time }))
    });
    Ok(all.collect())
}

/// Returns the time that each CPU spent on interrupts and on their deferred work: the sixth and the seventh number of the
/// lines `cpuN` of `/proc/stat`, in ticks.
fn interrupt_times(text: &str, ticks_per_second: u64) -> Option<BTreeMap<CpuId, [Duration; 2]>> {
    let time = |ticks: &str| {
        let ticks: u64 = ticks.parse().ok()?;
        let millis = u128::from(ticks) * 1000 / u128::from(ticks_per_second.max(1));
        Some(Duration::from_millis(u64::try_from(millis).ok()?))
    };
    let mut times = BTreeMap::new();
    // The lines of the CPUs come first, after the sum of all.
    for line in text.lines().take_while(|line| line.starts_with("cpu")).skip(1) {
        let mut words = line.split_ascii_whitespace();
        let cpu = CpuId(words.next()?.strip_prefix("cpu")?.parse().ok()?);
        let mut words = words.skip(5);
        times.insert(cpu, [time(words.next()?)?, time(words.next()?)?]);
    }
    (!times.is_empty()).then_some(times)
}

/// Returns the sum of each column. The first line names the online CPUs; each further line has a name, a number per
/// CPU (or a single number, in `ERR` and `MIS`), and a description.
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const INTERRUPTS: &str = "           CPU0       CPU2       \n\
         \x20  0:         20          1   IO-APIC   2-edge      timer\n\
         \x20 24:          3          0   PCI-MSI 65536-edge      virtio0-config 7 8\n\
         NMI:          0          5   Non-maskable interrupts\n\
         ERR:          9\nMIS:          0\n";
    const SOFTIRQS: &str = "                    CPU0       CPU2       \n          HI:          1          0\n       TIMER:        100         50\n";

    const STAT: &str =
        "cpu  9 0 9 90 0 7 9 0 0 0\ncpu0 5 0 5 50 0 150 20 0 0 0\ncpu2 4 0 4 40 0 0 5 0 0 0\nintr 29 20 3\n";

    fn root(interrupts: Option<&str>, softirqs: &str, stat: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        if let Some(interrupts) = interrupts {
            fs::write(root.path().join("proc/interrupts"), interrupts).unwrap();
        }
        fs::write(root.path().join("proc/softirqs"), softirqs).unwrap();
        fs::write(root.path().join("proc/stat"), stat).unwrap();
        root
    }

    #[test]
    fn reads_or_rejects_interrupt_files() {
        let good = read_interrupts(root(Some(INTERRUPTS), SOFTIRQS, STAT).path(), 100).unwrap();
        let figures = |hard, soft, hard_time, soft_time| {
            let [hard_time, soft_time] = [hard_time, soft_time].map(Duration::from_millis);
            InterruptFigures { hard, soft, hard_time, soft_time }
        };
        let expected = [(CpuId(0), figures(23, 101, 1500, 200)), (CpuId(2), figures(6, 50, 0, 50))];
        assert_eq!(good, BTreeMap::from(expected));
        for (interrupts, softirqs, stat, part) in [
            (None, SOFTIRQS, STAT, "proc/interrupts: No such file"),
            (
                Some(""),
                SOFTIRQS,
                STAT,
                "proc/interrupts: the file is empty, because the container runtime masks it",
            ),
            (Some("CPU0 CPUx\n"), SOFTIRQS, STAT, "proc/interrupts: expected a line of CPUs"),
            (Some(INTERRUPTS), "CPU0\nwords\n", STAT, "proc/softirqs: expected a line of CPUs"),
            (Some(INTERRUPTS), SOFTIRQS, "", "proc/stat: expected lines of CPUs"),
            (Some(INTERRUPTS), SOFTIRQS, "cpu 1\ncpu0 1 2 3 4 5 6\n", "proc/stat: expected lines of CPUs"),
            (Some(INTERRUPTS), SOFTIRQS, "cpu 1\ncpu0 1 2 3 4 5 6 x\n", "proc/stat: expected lines of CPUs"),
        ] {
            let error = read_interrupts(root(interrupts, softirqs, stat).path(), 100).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn interrupts_count_while_exclusive() {
        let (one, none) = (BTreeMap::from([(CpuId(1), slot())]), BTreeMap::new());
        let change = |exclusive: &mut ExclusiveCpus, owners: &BTreeMap<_, _>, now: &BTreeMap<_, _>| {
            exclusive.set_owners(owners.clone());
            assert!(exclusive.is_due() && !exclusive.is_due());
            exclusive.count(now);
        };
        let at = |hard| {
            let hard_time = Duration::from_secs(hard);
            BTreeMap::from([(CpuId(1), InterruptFigures { hard, hard_time, ..InterruptFigures::default() })])
        };
        let mut exclusive = ExclusiveCpus::default();
        let total = |exclusive: &mut ExclusiveCpus, hard| {
            let account = exclusive.interrupts.get_mut(&CpuId(1)).unwrap();
            let total = account.total(at(hard).get(&CpuId(1)).copied());
            assert_eq!(total.hard_time, Duration::from_secs(total.hard));
            total.hard
        };
        change(&mut exclusive, &one, &at(100));
        assert_eq!(total(&mut exclusive, 107), 7);
        change(&mut exclusive, &none, &at(110));
        assert_eq!(total(&mut exclusive, 500), 10, "it is not exclusive any more");
        change(&mut exclusive, &one, &at(1000));
        assert_eq!(total(&mut exclusive, 1002), 12);
        assert_eq!(
            total(&mut exclusive, 3),
            12,
            "the CPU was offline and counts anew: a counter never falls"
        );

        // A scrape that read 1007 after the final reading was processed first.
        assert_eq!(total(&mut exclusive, 1007), 17);
        change(&mut exclusive, &none, &at(1005));
        assert_eq!(total(&mut exclusive, 2000), 17);

        // While the interrupts cannot be read, counting continues.
        change(&mut exclusive, &one, &at(3000));
        exclusive.set_owners(none.clone());
        assert!(exclusive.is_due());
        exclusive.retry();
        assert_eq!(total(&mut exclusive, 3004), 21);
        assert!(exclusive.is_due(), "it is tried again");
    }

    /// Returns an arbitrary slot, always the same.
    pub(crate) fn slot() -> SlotId {
        let machine = numaward_topology::Machine::default();
        let options = numaward_probes::ProbeOptions {
            alloc_modes: &[],
            secondary: Vec::new(),
            ..numaward_probes::ProbeOptions::new(&machine)
        };
        numaward_probes::Probes::load(&options).register(numaward_probes::CgroupId(1), None).unwrap()
    }
}

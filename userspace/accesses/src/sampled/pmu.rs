//! Units of this host's processors that sample addresses, from `/sys/bus/event_source/devices`
//! (`Documentation/ABI/testing/sysfs-bus-event_source-devices-format` and `-events`).
//!
//! A *unit* (PMU) has a type. Its directory `format` contains the bits of each event parameter, and its directory
//! `events` has named events that are written with these parameters. The reader of the `perf_event` crate (`Dynamic`)
//! supports neither parameters with several ranges of bits nor events that set only some parameters, so this module has
//! its own.

use std::{collections::BTreeMap, fs, path::Path};

use numaward_topology::{CpuId, CpuSet};
use perf_event::SampleSkid;

use super::SampledError;

/// Directory of the units, below the root.
const DEVICES_DIR: &str = "sys/bus/event_source/devices";
/// AMD's unit for instruction-based sampling (IBS) of micro-ops.
const IBS_UNIT: &str = "ibs_op";
/// Parameter that counts micro-ops instead of cycles: a period in cycles would favor instructions that wait.
const MICRO_OPS: &str = "cnt_ctl";
/// Parameter that makes the unit respect `exclude_kernel`. Older kernels do not have it, and refuse `exclude_kernel`.
const FILTER: &str = "swfilt";
/// Sampling period in micro-ops: the maximum for processors without `OpCntExt`. The hardware ignores the lowest four
/// bits, so they must be 0.
const IBS_PERIOD: u64 = 0xffff << 4;
/// Intel's units; the second and the third one exist on processors with two kinds of cores.
const INTEL: [&str; 3] = ["cpu", "cpu_core", "cpu_atom"];
/// Event that samples loads (PEBS).
const LOADS: &str = "mem-loads";
/// Event that must lead the group of [`LOADS`] on Sapphire Rapids and newer processors.
const LOADS_LEADER: &str = "mem-loads-aux";
/// Parameter for the minimum latency of a load, and the value of `perf mem`, in cycles.
const LATENCY: (&str, u64) = ("ldlat", 30);
/// Sampling period in such loads. A prime, so that it does not resonate with loops.
const PEBS_PERIOD: u64 = 10_007;
/// Prefix of Arm's units, one for each kind of cores.
const SPE_PREFIX: &str = "arm_spe_";
/// Parameters that limit the samples to loads and stores, and vary the period so that it does not resonate with loops.
const LOADS_AND_STORES: [&str; 3] = ["load_filter", "store_filter", "jitter"];
/// Sampling period in operations of all kinds. The hardware ignores the lowest eight bits, so they must be 0.
const SPE_PERIOD: u64 = 1 << 20;
/// Mask of the register `MIDR_EL1` for the kind of a core.
const MIDR_MASK: u64 = 0xff00_fff0;
/// Kinds of cores that number the sources of data in the same way: Arm's Neoverse N1, N2, V1 and V2.
const NEOVERSE: [u64; 4] = [0x4100_d0c0, 0x4100_d490, 0x4100_d400, 0x4100_d4f0];

/// A perf event: `type`, `config`, `config1` and `config2` of `struct perf_event_attr` (`linux/perf_event.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PerfEvent {
    pub(super) kind: u32,
    pub(super) config: [u64; 3],
}

/// A unit that samples addresses, with its settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SamplingUnit {
    pub(super) name: String,
    /// CPUs with this unit.
    pub(super) cpus: CpuSet,
    pub(super) event: PerfEvent,
    /// Event that must lead the group.
    pub(super) leader: Option<PerfEvent>,
    pub(super) period: u64,
    /// Kind of the counted operations, which follows "1 in 1000" in the output.
    pub(super) counts: String,
    pub(super) skid: SampleSkid,
    /// True if the unit supports `exclude_kernel`. Otherwise, the reader skips samples of the kernel.
    pub(super) takes_exclude_kernel: bool,
    /// True if the unit supports `exclude_guest`.
    pub(super) takes_exclude_guest: bool,
    pub(super) form: OutputForm,
}

/// Form of a unit's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutputForm {
    /// Samples that the kernel writes, of all processes on a CPU.
    Samples,
    /// Packets that the unit writes, of one thread. `says_source`: whether this processor's numbers for sources of data
    /// are known.
    Packets { says_source: bool },
}

/// Finds the units of this host for some CPUs, at least one. `root` is `/` except in tests.
pub(super) fn find(root: &Path, online: &CpuSet) -> Result<Vec<SamplingUnit>, SampledError> {
    let devices = root.join(DEVICES_DIR);
    let ibs = devices.join(IBS_UNIT);
    if ibs.exists() {
        return Ok(vec![amd_unit(&ibs, online)?]);
    }
    let loads = INTEL.iter().filter(|name| devices.join(name).join("events").join(LOADS).exists());
    let units = loads.map(|name| intel_unit(&devices, name, online)).collect::<Result<Vec<_>, _>>()?;
    if !units.is_empty() {
        return Ok(units);
    }
    let entries = fs::read_dir(&devices).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(SPE_PREFIX)).collect();
    names.sort();
    if names.is_empty() {
        return Err(SampledError::Absent(devices));
    }
    names.iter().map(|name| arm_unit(root, &devices.join(name), name, online)).collect()
}

fn arm_unit(root: &Path, dir: &Path, name: &str, online: &CpuSet) -> Result<SamplingUnit, SampledError> {
    let cpus = own_cpus(&dir.join("cpumask"), online)?;
    let core = cpus.iter().next().and_then(|cpu| midr(root, cpu));
    Ok(SamplingUnit {
        name: name.to_owned(),
        cpus,
        event: EventFormat::read(dir)?.event(dir, LOADS_AND_STORES.iter().map(|name| (*name, 1)))?,
        leader: None,
        period: SPE_PERIOD,
        counts: "operations".to_owned(),
        skid: SampleSkid::Arbitrary,
        takes_exclude_kernel: true,
        takes_exclude_guest: false,
        form: OutputForm::Packets {
            says_source: core.is_some_and(|core| NEOVERSE.contains(&(core & MIDR_MASK))),
        },
    })
}

/// Returns the kind of a CPU's core: the register `MIDR_EL1`.
fn midr(root: &Path, cpu: CpuId) -> Option<u64> {
    let cpus = root.join("sys/devices/system/cpu");
    let text = fs::read_to_string(cpus.join(format!("cpu{}/regs/identification/midr_el1", cpu.0))).ok()?;
    u64::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

/// Returns the online CPUs that a unit's file lists; all online CPUs if the file does not exist.
fn own_cpus(path: &Path, online: &CpuSet) -> Result<CpuSet, SampledError> {
    if !path.exists() {
        return Ok(online.clone());
    }
    let text = read(path)?;
    let own: CpuSet = text.trim().parse().map_err(|_| malformed(path, &text, "a list of CPUs"))?;
    Ok(online.iter().filter(|cpu| own.contains(*cpu)).collect())
}

fn amd_unit(dir: &Path, online: &CpuSet) -> Result<SamplingUnit, SampledError> {
    let format = EventFormat::read(dir)?;
    let (counts_ops, takes_filter) = (format.has(MICRO_OPS), format.has(FILTER));
    let parameters = [(MICRO_OPS, counts_ops), (FILTER, takes_filter)];
    let set = parameters.iter().filter(|(_, is_there)| *is_there).map(|(name, _)| (*name, 1));
    Ok(SamplingUnit {
        name: IBS_UNIT.to_owned(),
        cpus: online.clone(),
        event: format.event(dir, set)?,
        leader: None,
        period: IBS_PERIOD,
        counts: if counts_ops { "micro-ops" } else { "cycles" }.to_owned(),
        // The unit is always precise, and refuses a request for precision.
        skid: SampleSkid::Arbitrary,
        takes_exclude_kernel: takes_filter,
        takes_exclude_guest: false,
        form: OutputForm::Samples,
    })
}

fn intel_unit(devices: &Path, name: &str, online: &CpuSet) -> Result<SamplingUnit, SampledError> {
    let dir = &devices.join(name);
    let format = EventFormat::read(dir)?;
    let event_in_file = |path: &Path, change: Option<(&'static str, u64)>| {
        let text = read(path)?;
        let mut parameters = parse_parameters(&text).ok_or_else(|| malformed(path, &text, "an event"))?;
        if let Some((name, value)) = change {
            parameters.insert(name, value);
        }
        format.event(path, parameters.into_iter())
    };
    let latency = Some(LATENCY).filter(|(name, _)| format.has(name));
    let leader = dir.join("events").join(LOADS_LEADER);
    let condition = latency.map_or_else(String::new, |(_, cycles)| format!(" of {cycles} cycles or more"));
    Ok(SamplingUnit {
        name: format!("{name}/{LOADS}"),
        cpus: own_cpus(&dir.join("cpus"), online)?,
        event: event_in_file(&dir.join("events").join(LOADS), latency)?,
        leader: leader.exists().then(|| event_in_file(&leader, None)).transpose()?,
        period: PEBS_PERIOD,
        counts: format!("loads{condition}"),
        skid: SampleSkid::RequestZero,
        takes_exclude_kernel: true,
        // Precise events support it, and `perf` sets it, too.
        takes_exclude_guest: true,
        form: OutputForm::Samples,
    })
}

/// Type of a unit, and the bits of its event parameters.
#[derive(Debug)]
struct EventFormat {
    kind: u32,
    fields: BTreeMap<String, FormatField>,
}

/// Bits of `config`, `config1` or `config2`, from the value's lowest bit upwards, as inclusive ranges.
#[derive(Debug, PartialEq, Eq)]
struct FormatField {
    word: usize,
    ranges: Vec<(u32, u32)>,
}

impl EventFormat {
    fn read(unit: &Path) -> Result<Self, SampledError> {
        let path = unit.join("type");
        let text = read(&path)?;
        let kind = text.trim().parse().map_err(|_| malformed(&path, &text, "a type"))?;
        let dir = unit.join("format");
        let failed = |source| SampledError::File { path: dir.clone(), source };
        let mut fields = BTreeMap::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // Fields in other words are not supported, and not needed.
            if let (Some(field), Ok(name)) =
                (parse_field(&read(&entry.path())?), entry.file_name().into_string())
            {
                fields.insert(name, field);
            }
        }
        Ok(Self { kind, fields })
    }

    fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// Returns the event with these parameters. `path` is the file that requests them.
    fn event<'a>(
        &self,
        path: &Path,
        parameters: impl Iterator<Item = (&'a str, u64)>,
    ) -> Result<PerfEvent, SampledError> {
        let mut config = [0; 3];
        for (name, value) in parameters {
            let field = self.fields.get(name);
            field.and_then(|field| field.write_value(&mut config, value)).ok_or_else(|| {
                SampledError::Parameter { path: path.to_owned(), parameter: format!("{name}={value:#x}") }
            })?;
        }
        Ok(PerfEvent { kind: self.kind, config })
    }
}

impl FormatField {
    /// Writes a value; returns `None` if it has more bits than the field.
    fn write_value(&self, words: &mut [u64; 3], mut value: u64) -> Option<()> {
        let word = words.get_mut(self.word)?;
        for &(first, last) in &self.ranges {
            let width = last - first + 1;
            let mask = u64::MAX >> (64 - width);
            *word = *word & !(mask << first) | (value & mask) << first;
            value = value.checked_shr(width).unwrap_or(0);
        }
        (value == 0).then_some(())
    }
}

/// Parses a field: `config:0-7,32-35`, `config1:3`.
fn parse_field(text: &str) -> Option<FormatField> {
    let (word, bits) = text.trim().split_once(':')?;
    let word = ["config", "config1", "config2"].iter().position(|known| *known == word)?;
    let range = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last && last < 64).then_some((first, last))
    };
    Some(FormatField { word, ranges: bits.split(',').map(range).collect::<Option<_>>()? })
}

/// Parses an event: `event=0xcd,umask=0x1,ldlat=3`. A name without a value means 1.
fn parse_parameters(text: &str) -> Option<BTreeMap<&str, u64>> {
    let parameter = |text| match str::split_once(text, '=') {
        None => Some((text, 1)),
        Some((name, value)) => {
            let hexadecimal = value.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
            Some((name, hexadecimal.unwrap_or_else(|| value.parse()).ok()?))
        }
    };
    text.trim().split(',').map(parameter).collect()
}

fn read(path: &Path) -> Result<String, SampledError> {
    fs::read_to_string(path).map_err(|source| SampledError::File { path: path.to_owned(), source })
}

fn malformed(path: &Path, text: &str, expected: &'static str) -> SampledError {
    SampledError::Malformed { path: path.to_owned(), text: text.trim().to_owned(), expected }
}

/// Returns the processor's model name from `/proc/cpuinfo`.
pub(super) fn processor(root: &Path) -> String {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let name = text.lines().find_map(|line| {
        let (key, name) = line.split_once(':')?;
        (key.trim() == "model name").then(|| name.trim().to_owned())
    });
    name.unwrap_or_else(|| "this processor".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a directory tree with these files below the units' directory.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join(DEVICES_DIR)).unwrap();
        for (name, text) in files {
            let path = root.path().join(DEVICES_DIR).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn found(files: &[(&str, &str)]) -> Result<Vec<SamplingUnit>, SampledError> {
        find(tree(files).path(), &"0-3".parse().unwrap())
    }

    /// Files of an Ice Lake processor.
    const CPU: [(&str, &str); 6] = [
        ("cpu/type", "4\n"),
        ("cpu/format/event", "config:0-7\n"),
        ("cpu/format/umask", "config:8-15,40-47\n"),
        ("cpu/format/ldlat", "config1:0-15\n"),
        ("cpu/format/acr_mask", "config3:0-63\n"),
        ("cpu/events/mem-loads", "event=0xcd,umask=0x1,ldlat=3\n"),
    ];

    #[test]
    fn amd_counts_micro_ops() {
        let base = [("ibs_op/type", "11\n"), ("ibs_op/format/cnt_ctl", "config:19\n")];
        let units = found(&base).unwrap();
        let [unit] = units.as_slice() else { panic!("{units:?}") };
        assert_eq!(unit.event, PerfEvent { kind: 11, config: [1 << 19, 0, 0] });
        assert_eq!((unit.counts.as_str(), unit.period, unit.cpus.len()), ("micro-ops", 1_048_560, 4));
        assert!(!unit.takes_exclude_kernel && !unit.takes_exclude_guest);
        let newer = found(&[base.as_slice(), &[("ibs_op/format/swfilt", "config2:0\n")]].concat()).unwrap();
        assert_eq!(newer[0].event.config, [1 << 19, 0, 1]);
        assert!(newer[0].takes_exclude_kernel);
        let older = found(&[("ibs_op/type", "11\n"), ("ibs_op/format/rand_en", "config:57\n")]).unwrap();
        assert_eq!((older[0].event.config[0], older[0].counts.as_str()), (0, "cycles"));
    }

    #[test]
    fn intel_samples_slow_loads() {
        let units = found(&CPU).unwrap();
        let [unit] = units.as_slice() else { panic!("{units:?}") };
        assert_eq!(unit.event, PerfEvent { kind: 4, config: [0x1cd, 30, 0] });
        assert_eq!((unit.leader, unit.skid), (None, SampleSkid::RequestZero));
        assert_eq!(
            (unit.name.as_str(), unit.counts.as_str()),
            ("cpu/mem-loads", "loads of 30 cycles or more")
        );
        let leader = [("cpu/events/mem-loads-aux", "event=0x03,umask=0x82\n")];
        let newer = found(&[CPU.as_slice(), &leader].concat()).unwrap();
        assert_eq!(newer[0].leader, Some(PerfEvent { kind: 4, config: [0x8203, 0, 0] }));
    }

    #[test]
    fn each_kind_of_cores_has_a_unit() {
        let units = found(&[
            ("cpu_core/type", "4\n"),
            ("cpu_core/cpus", "0-1\n"),
            ("cpu_core/format/event", "config:0-7\n"),
            ("cpu_core/format/umask", "config:8-15\n"),
            ("cpu_core/format/ldlat", "config1:0-15\n"),
            ("cpu_core/events/mem-loads", "event=0xcd,umask=0x1,ldlat=3\n"),
            ("cpu_core/events/mem-loads-aux", "event=0x03,umask=0x82\n"),
            ("cpu_atom/type", "10\n"),
            ("cpu_atom/cpus", "2-7\n"),
            ("cpu_atom/format/event", "config:0-7\n"),
            ("cpu_atom/format/umask", "config:8-15\n"),
            ("cpu_atom/format/ldlat", "config1:0-15\n"),
            ("cpu_atom/events/mem-loads", "event=0xd0,umask=0x5,ldlat=3\n"),
        ])
        .unwrap();
        let about: Vec<_> = units
            .iter()
            .map(|unit| (unit.event.kind, unit.cpus.to_string(), unit.leader.is_some()))
            .collect();
        assert_eq!(about, [(4, "0-1".to_owned(), true), (10, "2-3".to_owned(), false)]);
        assert_eq!(units[1].event.config, [0x5d0, 30, 0]);
    }

    #[test]
    fn error_lists_supported_units() {
        let none =
            found(&[("cpu/type", "4\n"), ("cpu/events/cycles", "event=0x76\n")]).unwrap_err().to_string();
        for name in ["ibs_op", "mem-loads", "arm_spe_0", "--hot", DEVICES_DIR] {
            assert!(none.contains(name), "{none}");
        }
    }

    /// Finds the units of a tree like that of the driver, with a core of this kind as CPU 2.
    fn arm_tree_units(midr: &str) -> Vec<SamplingUnit> {
        let root = tree(&[
            ("arm_spe_0/type", "9\n"),
            ("arm_spe_0/cpumask", "2-5\n"),
            ("arm_spe_0/caps/min_interval", "1024\n"),
            ("arm_spe_0/format/ts_enable", "config:0\n"),
            ("arm_spe_0/format/jitter", "config:16\n"),
            ("arm_spe_0/format/load_filter", "config:33\n"),
            ("arm_spe_0/format/store_filter", "config:34\n"),
            ("arm_spe_0/format/min_latency", "config2:0-11\n"),
        ]);
        let dir = root.path().join("sys/devices/system/cpu/cpu2/regs/identification");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("midr_el1"), midr).unwrap();
        find(root.path(), &"0-3".parse().unwrap()).unwrap()
    }

    #[test]
    fn arm_samples_loads_and_stores() {
        let units = arm_tree_units("0x00000000413fd0c1\n");
        let [unit] = units.as_slice() else { panic!("{units:?}") };
        assert_eq!(unit.event, PerfEvent { kind: 9, config: [1 << 16 | 3 << 33, 0, 0] });
        assert_eq!((unit.name.as_str(), unit.cpus.to_string().as_str()), ("arm_spe_0", "2-3"));
        assert_eq!((unit.period, unit.counts.as_str()), (1_048_576, "operations"));
        assert!(unit.takes_exclude_kernel && !unit.takes_exclude_guest && unit.leader.is_none());
        assert_eq!(unit.form, OutputForm::Packets { says_source: true });
        for other in ["0x00000000c00fac30\n", "0x00000000413fd0b1\n", "nonsense"] {
            assert_eq!(arm_tree_units(other)[0].form, OutputForm::Packets { says_source: false }, "{other}");
        }
    }

    #[test]
    fn values_fill_ranges_from_lowest_bit() {
        let umask = parse_field("config:8-15,40-47\n").unwrap();
        let mut words = [0xff, 0, 0];
        umask.write_value(&mut words, 0x1234).unwrap();
        assert_eq!(words[0], 0x1200_0000_34ff);
        assert_eq!(umask.write_value(&mut words, 0x1_0000), None, "more bits than the field has");
        let mut whole = [0; 3];
        parse_field("config2:0-63").unwrap().write_value(&mut whole, u64::MAX).unwrap();
        assert_eq!(whole, [0, 0, u64::MAX]);
        for text in
            ["", "config", "config:", "config:7-3", "config:64", "config:a", "config3:0-63", "other:0"]
        {
            assert_eq!(parse_field(text), None, "{text}");
        }
    }

    #[test]
    fn names_malformed_event() {
        for text in ["event=0xyz\n", "event=0xcd,colour=1\n", "event=0x1cd\n", ""] {
            let mut files = CPU;
            files[5].1 = text;
            let error = found(&files).unwrap_err().to_string();
            assert!(error.contains("cpu/events/mem-loads"), "{text}: {error}");
        }
        assert_eq!(parse_parameters("a=0x10,b=10,c\n"), Some([("a", 16), ("b", 10), ("c", 1)].into()));
    }

    #[test]
    fn reads_processor_name() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(processor(root.path()), "this processor");
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/cpuinfo"), "processor\t: 0\nmodel name\t: AMD EPYC: 9\n").unwrap();
        assert_eq!(processor(root.path()), "AMD EPYC: 9");
    }
}

//! The processor's events that distinguish local from remote memory, and their counters.
//!
//! The events are from the kernel's tables, tools/perf/pmu-events, in the encoding of `PERF_TYPE_RAW` (umask in bits 8
//! to 15 on x86). They are opened once on each CPU and pinned: they count always or not at all.
//!
//! On Arm the event is architectural: it is the same on all processors that have it. The kernel lists it in sysfs if
//! the processor reports it; a hypervisor may hide it. If it were opened although it is not listed, it would count
//! nothing, without an error.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use numaward_topology::{CpuId, CpuSet};
use perf_event::{Builder, Counter, ReadFormat, events::Raw};

/// A perf event: `type` and `config` of `struct perf_event_attr` (`linux/perf_event.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerfEvent {
    pub kind: u32,
    pub config: u64,
}

const PERF_TYPE_RAW: u32 = 4;

const fn raw(config: u64) -> PerfEvent {
    PerfEvent { kind: PERF_TYPE_RAW, config }
}

/// The events for accesses to DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DramEvents {
    /// Accesses to memory of the CPU's own node; `None` if the processor does not count them separately.
    pub local: Option<PerfEvent>,
    pub remote: PerfEvent,
}

/// The events of a group of processors.
struct ProcessorEvents {
    /// `vendor_id` in /proc/cpuinfo.
    vendor: &'static str,
    /// `cpu family` in /proc/cpuinfo.
    families: &'static [u32],
    /// Inclusive ranges of `model` in /proc/cpuinfo.
    models: &'static [(u32, u32)],
    events: DramEvents,
}

/// The events by processor.
///
/// Intel: `MEM_LOAD_L3_MISS_RETIRED.LOCAL_DRAM` and `.REMOTE_DRAM`, retired loads. (With sub-NUMA clusters, another
/// cluster of the same socket counts as local.) AMD: `ls_dmnd_fills_from_sys.dram_io_near` and `.dram_io_far`, cache
/// lines filled on demand.
const PROCESSOR_EVENTS: &[ProcessorEvents] = &[
    // skylakex and cascadelakex, icelakex, sapphirerapids, emeraldrapids, graniterapids.
    ProcessorEvents {
        vendor: "GenuineIntel",
        families: &[6],
        models: &[(0x55, 0x55), (0x6a, 0x6a), (0x6c, 0x6c), (0x8f, 0x8f), (0xcf, 0xcf), (0xad, 0xae)],
        events: DramEvents { local: Some(raw(0x01d3)), remote: raw(0x02d3) },
    },
    // amdzen3 and amdzen4, amdzen5.
    ProcessorEvents {
        vendor: "AuthenticAMD",
        families: &[0x19, 0x1a],
        models: &[(0x00, 0xff)],
        events: DramEvents { local: Some(raw(0x0843)), remote: raw(0x4043) },
    },
];

/// The directory with the kernel's PMUs. On Arm, each PMU that counts `REMOTE_ACCESS` (accesses that another chip
/// answered) lists it there. Neoverse N1, V1, N2 and V2 have it.
const ARM_PMUS: &str = "sys/bus/event_source/devices";
const ARM_EVENT: &str = "events/remote_access";

/// Returns the events of Arm's PMUs; `None` if none lists the event.
fn arm_events(root: &Path) -> Option<DramEvents> {
    let pmus = fs::read_dir(root.join(ARM_PMUS)).ok()?;
    // The file contains, for example, `event=0x031`.
    let event = |pmu: PathBuf| {
        let text = fs::read_to_string(pmu.join(ARM_EVENT)).ok()?;
        u64::from_str_radix(text.trim().strip_prefix("event=0x")?, 16).ok()
    };
    let remote = pmus.flatten().find_map(|pmu| event(pmu.path()))?;
    Some(DramEvents { local: None, remote: raw(remote) })
}

/// A processor, as identified by /proc/cpuinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Processor {
    vendor: String,
    family: Option<u32>,
    model: u32,
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.family {
            Some(family) => write!(f, "{} family {family:#x} model {:#x}", self.vendor, self.model),
            None => write!(f, "implementer {} part {:#x}", self.vendor, self.model),
        }
    }
}

impl Processor {
    /// Parses the first listed processor.
    fn parse(cpuinfo: &str) -> Option<Self> {
        let field = |name: &str| {
            let line =
                cpuinfo.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
            line.map(str::trim)
        };
        if let (Some(vendor), Some(family), Some(model)) =
            (field("vendor_id"), field("cpu family"), field("model"))
        {
            return Some(Self {
                vendor: vendor.into(),
                family: family.parse().ok(),
                model: model.parse().ok()?,
            });
        }
        let part = field("CPU part")?.strip_prefix("0x")?;
        Some(Self {
            vendor: field("CPU implementer")?.to_owned(),
            family: None,
            model: u32::from_str_radix(part, 16).ok()?,
        })
    }

    /// Returns the events of an x86 processor from the table.
    fn events(&self) -> Option<DramEvents> {
        let fits = |known: &&ProcessorEvents| {
            known.vendor == self.vendor
                && self.family.is_some_and(|family| known.families.contains(&family))
                && known.models.iter().any(|&(from, to)| (from..=to).contains(&self.model))
        };
        PROCESSOR_EVENTS.iter().find(fits).map(|known| known.events)
    }
}

/// The processor cannot count accesses to DRAM.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PmuError {
    #[error("cannot read {}: {source}", path.display())]
    CpuInfo { path: PathBuf, source: io::Error },
    #[error("{} does not identify the processor", path.display())]
    NoProcessor { path: PathBuf },
    #[error("no events are known that distinguish local from remote memory on this processor ({0})")]
    UnknownProcessor(String),
    #[error(
        "absent: the kernel lists no event remote_access in {}/*/events for this processor ({processor}); most virtual \
         machines have none", pmus.display()
    )]
    NoRemoteAccess { processor: String, pmus: PathBuf },
    #[error("absent: the processor's counters are not available ({0}); most virtual machines have none")]
    Absent(io::Error),
    #[error(
        "denied: perf_event_open was refused ({0}): missing CAP_PERFMON (CAP_SYS_ADMIN where \
         kernel.perf_event_paranoid is above 2), lockdown, or an LSM"
    )]
    Denied(io::Error),
    #[error(
        "fd limit: {needed} descriptors are needed, and CPU {cpu} got none ({source}); raise LimitNOFILE"
    )]
    FdLimit { cpu: u32, needed: usize, source: io::Error },
    #[error("busy: other programs use the counters of CPU {0} (the NMI watchdog, perf); stop them")]
    Busy(u32),
    #[error("perf_event_open failed on CPU {cpu}: {source}")]
    Other { cpu: u32, source: io::Error },
}

/// Returns the events of this host's processor. `root` is `/` in production.
pub(crate) fn events(root: &Path) -> Result<DramEvents, PmuError> {
    let path = root.join("proc/cpuinfo");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(source) => return Err(PmuError::CpuInfo { path, source }),
    };
    let Some(processor) = Processor::parse(&text) else { return Err(PmuError::NoProcessor { path }) };
    if processor.family.is_none() {
        let missing =
            || PmuError::NoRemoteAccess { processor: processor.to_string(), pmus: root.join(ARM_PMUS) };
        return arm_events(root).ok_or_else(missing);
    }
    processor.events().ok_or_else(|| PmuError::UnknownProcessor(processor.to_string()))
}

/// Counts an event of all tasks on a CPU, in user and kernel mode. The event is pinned: without a free counter, reading
/// it fails with [`io::ErrorKind::UnexpectedEof`].
pub(crate) fn count(event: PerfEvent, cpu: CpuId) -> io::Result<Counter> {
    let mut builder = Builder::new(Raw::new(event.config));
    builder.attrs_mut().type_ = event.kind;
    builder.any_pid().one_cpu(cpu.0 as usize).include_kernel().include_hv();
    let mut counter = builder.pinned(true).enabled(true).read_format(ReadFormat::empty()).build()?;
    counter.read()?;
    Ok(counter)
}

/// The open counters of one event.
pub(crate) type OpenCounters<C> = Vec<(CpuId, C)>;

/// Opens the local and remote events on all of `cpus` or on none, each by `count`.
pub(crate) fn open<C>(
    events: DramEvents,
    cpus: &CpuSet,
    mut count: impl FnMut(PerfEvent, CpuId) -> io::Result<C>,
) -> Result<(OpenCounters<C>, OpenCounters<C>), PmuError> {
    let needed = cpus.len() * (1 + usize::from(events.local.is_some()));
    let mut open = |event: PerfEvent, cpu: CpuId| match count(event, cpu) {
        Ok(counter) => Ok((cpu, counter)),
        Err(source) => Err(open_error(cpu, needed, source)),
    };
    let mut all = |event: Option<PerfEvent>| {
        let Some(event) = event else { return Ok(Vec::new()) };
        cpus.iter().map(|cpu| open(event, cpu)).collect::<Result<OpenCounters<C>, _>>()
    };
    Ok((all(events.local)?, all(Some(events.remote))?))
}

fn open_error(cpu: CpuId, needed: usize, source: io::Error) -> PmuError {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS) => {
            PmuError::Absent(source)
        }
        Some(libc::EACCES | libc::EPERM) => PmuError::Denied(source),
        Some(libc::EMFILE | libc::ENFILE) => PmuError::FdLimit { cpu: cpu.0, needed, source },
        Some(libc::EBUSY) => PmuError::Busy(cpu.0),
        None if source.kind() == io::ErrorKind::UnexpectedEof => PmuError::Busy(cpu.0),
        _ => PmuError::Other { cpu: cpu.0, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEL: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n\
                         model name\t: Intel(R) Xeon(R) Platinum 8480+\nstepping\t: 8\n";
    const ARM: &str = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU architecture: 8\n\
                       CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n";

    fn host(cpuinfo: Option<&str>) -> Result<DramEvents, String> {
        host_with(cpuinfo, &[])
    }

    /// Creates a host with these PMUs and the contents of their files `remote_access`.
    fn host_with(cpuinfo: Option<&str>, pmus: &[(&str, Option<&str>)]) -> Result<DramEvents, String> {
        let root = tempfile::tempdir().unwrap();
        for (pmu, event) in pmus {
            let events = root.path().join(ARM_PMUS).join(pmu).join("events");
            fs::create_dir_all(&events).unwrap();
            fs::write(events.join("cpu_cycles"), "event=0x011\n").unwrap();
            if let Some(event) = event {
                fs::write(events.join("remote_access"), event).unwrap();
            }
        }
        fs::create_dir(root.path().join("proc")).unwrap();
        if let Some(cpuinfo) = cpuinfo {
            fs::write(root.path().join("proc/cpuinfo"), cpuinfo).unwrap();
        }
        events(root.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn finds_events_of_processors() {
        let amd = |family, model| {
            let text = INTEL.replace("GenuineIntel", "AuthenticAMD");
            text.replace(": 6\n", &format!(": {family}\n")).replace("143", &format!("{model}"))
        };
        let both = |local, remote| Ok(DramEvents { local: Some(raw(local)), remote: raw(remote) });
        assert_eq!(host(Some(INTEL)), both(0x01d3, 0x02d3));
        assert_eq!(host(Some(&INTEL.replace("143", "85"))), both(0x01d3, 0x02d3), "Skylake");
        assert_eq!(host(Some(&amd(25, 17))), both(0x0843, 0x4043), "Zen 4");
        assert_eq!(host(Some(&amd(26, 2))), both(0x0843, 0x4043), "Zen 5");
        let arm_events = Ok(DramEvents { local: None, remote: raw(0x31) });
        // The PMU's names with ACPI and with a device tree.
        for name in ["armv8_pmuv3_0", "armv8_neoverse_n1"] {
            let pmus = [("arm_cmn_0", None), (name, Some("event=0x031\n")), ("software", None)];
            assert_eq!(host_with(Some(ARM), &pmus), arm_events, "{name}");
        }
        for pmus in [&[][..], &[("armv8_pmuv3_0", None)], &[("armv8_pmuv3_0", Some("event=many"))]] {
            let found = host_with(Some(ARM), pmus).unwrap_err();
            assert!(found.contains("no event remote_access in") && found.contains("part 0xd0c"), "{found}");
        }

        for (cpuinfo, error) in [
            (None, "proc/cpuinfo: No such file"),
            (Some(""), "does not identify the processor"),
            (Some("vendor_id\t: x\ncpu family\t: 6\nmodel\t\t: many\n"), "does not identify the processor"),
            (Some(&*INTEL.replace("143", "151")), "on this processor (GenuineIntel family 0x6 model 0x97)"),
            (Some(&amd(23, 49)), "AuthenticAMD family 0x17 model 0x31"),
            (Some(&ARM.replace("0xd0c", "d0c")), "does not identify the processor"),
        ] {
            let found = host(cpuinfo).unwrap_err();
            assert!(found.contains(error), "{found}");
        }
    }

    #[test]
    fn opens_all_events_or_none() {
        let cpus: CpuSet = "0-1,5".parse().unwrap();
        let events = DramEvents { local: Some(raw(1)), remote: raw(2) };
        let (local, remote) = open(events, &cpus, |event, _| Ok(event)).unwrap();
        assert_eq!((local.len(), remote.len()), (3, 3));
        assert_eq!(remote[1], (CpuId(1), raw(2)));
        let remote_only = DramEvents { local: None, ..events };
        let (local, remote) = open(remote_only, &cpus, |event, _| Ok(event)).unwrap();
        assert_eq!((local.len(), remote.len()), (0, 3));

        for (error, reason) in [
            (libc::ENOENT, "absent: the processor's counters are not available (No such file"),
            (libc::ENODEV, "absent: "),
            (libc::EOPNOTSUPP, "absent: "),
            (libc::EINVAL, "absent: "),
            (libc::EACCES, "denied: perf_event_open was refused (Permission denied"),
            (libc::EPERM, "denied: "),
            (libc::EMFILE, "fd limit: 6 descriptors are needed, and CPU 5 got none"),
            (libc::ENFILE, "fd limit: "),
            (libc::EBUSY, "busy: other programs use the counters of CPU 5"),
            (libc::EIO, "perf_event_open failed on CPU 5: "),
        ]
        .map(|(number, reason)| (io::Error::from_raw_os_error(number), reason))
        .into_iter()
        .chain([(io::ErrorKind::UnexpectedEof.into(), "busy: other programs use the counters of CPU 5")])
        {
            let (mut error, mut tried) = (Some(error), 0);
            let refused = open(events, &cpus, |_, cpu| {
                tried += 1;
                if cpu == CpuId(5) { Err(error.take().unwrap()) } else { Ok(()) }
            });
            let refused = refused.unwrap_err().to_string();
            assert!(refused.starts_with(reason), "{refused}");
            assert_eq!(tried, 3, "none is tried again");
        }
    }
}

//! The features of the running kernel, and the expected state of each probe because of them.
//!
//! The features are read from procfs, sysfs and tracefs, not by the crate under test, whose defects must not hide
//! themselves.

use std::{
    collections::BTreeSet,
    env::consts::ARCH,
    fs,
    io::{self, BufRead as _, BufReader},
    path::Path,
};

use numaward_probes::{Mode, Obstacle, Probe, ProbeReport};

/// Traced functions of the kernel, some of which have other names in other releases.
const TRACED: [&str; 9] = [
    "alloc_hugetlb_folio",
    "alloc_huge_page",
    "task_numa_fault",
    "vma_policy_mof",
    "oom_kill_process",
    MOVE,
    CHARGE[0],
    CHARGE[1],
    CHARGE[2],
];
/// The functions that charge pages to memory cgroups.
const CHARGE: [&str; 3] = ["charge_memcg", "__mem_cgroup_charge", "mem_cgroup_charge"];
/// The function that moves a folio, since Linux 6.0. The probe also counts without it, but not the nodes.
const MOVE: &str = "move_to_new_folio";
/// The first release in which programs can be attached to functions on 64-bit Arm. On x86-64, all supported releases
/// can do so.
const TRAMPOLINES_ON_ARM: (u32, u32) = (6, 4);

/// A feature that a kernel may not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Feature {
    Btf,
    /// Programs can be attached to functions.
    Trampolines,
    Kprobes,
    /// The processor has counters that the kernel supports.
    Counters,
    /// The kernel shows the nodes of memory blocks.
    MemoryBlocks,
    /// The kernel was built with NUMA balancing.
    Balancing,
    /// The memory controller is on no hierarchy of cgroup v1.
    UnifiedMemory,
}

const ALL: [Feature; 7] = [
    Feature::Btf,
    Feature::Trampolines,
    Feature::Kprobes,
    Feature::Counters,
    Feature::MemoryBlocks,
    Feature::Balancing,
    Feature::UnifiedMemory,
];

/// The features of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Features {
    there: BTreeSet<Feature>,
    /// The functions of [`TRACED`] that can be traced; `None` if a security module or lockdown prevents reading the
    /// kernel's list.
    traceable: Option<BTreeSet<String>>,
}

/// The expected states of a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ExpectedState {
    modes: Vec<Mode>,
    /// The permitted reasons for its absence.
    obstacles: Vec<Obstacle>,
}

impl Features {
    pub(crate) fn of_this_kernel() -> Self {
        let exists = |path: &str| Path::new(path).exists();
        let sources = fs::read_dir("/sys/bus/event_source/devices").unwrap();
        let mut sources = sources.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let is_of_processor = |name: &str| name == "cpu" || name == "cpu_core" || name.starts_with("armv8");
        let is_there = |feature: &Feature| match feature {
            Feature::Btf => exists("/sys/kernel/btf/vmlinux"),
            Feature::Trampolines => ARCH != "aarch64" || release() >= TRAMPOLINES_ON_ARM,
            Feature::Kprobes => exists("/sys/bus/event_source/devices/kprobe"),
            Feature::Counters => sources.any(|name| is_of_processor(&name)),
            Feature::MemoryBlocks => exists("/sys/devices/system/memory/block_size_bytes"),
            Feature::Balancing => exists("/proc/sys/kernel/numa_balancing"),
            Feature::UnifiedMemory => {
                let controllers = fs::read_to_string("/proc/cgroups").unwrap();
                let hierarchy = controllers.lines().find_map(|line| line.strip_prefix("memory\t"));
                hierarchy.is_none_or(|numbers| numbers.starts_with("0\t"))
            }
        };
        Self {
            there: ALL.into_iter().filter(is_there).collect(),
            traceable: traceable(Path::new("/sys/kernel/tracing/available_filter_functions")),
        }
    }

    fn has(&self, feature: Feature) -> bool {
        self.there.contains(&feature)
    }

    fn expected(&self, probe: Probe) -> ExpectedState {
        if matches!(probe, Probe::Hint | Probe::Scan) && !self.has(Feature::Balancing) {
            return ExpectedState::absent(&[Obstacle::Unsupported]);
        }
        match probe {
            // On kernels that preempt tasks inside the probe, the tracepoint is better.
            Probe::Alloc if self.has(Feature::Btf) => {
                ExpectedState::attached(&[Mode::TpBtf, Mode::Tracepoint])
            }
            Probe::Migrate if self.has(Feature::Btf) => {
                let mut expected = self.at_function(&[MOVE], Mode::Fexit);
                if expected.modes.is_empty() || self.traceable.is_none() {
                    expected.modes.push(Mode::TpBtf);
                }
                expected.obstacles.clear();
                expected
            }
            Probe::Stall | Probe::Switch if self.has(Feature::Btf) => ExpectedState::attached(&[Mode::TpBtf]),
            Probe::Alloc | Probe::Migrate | Probe::Stall | Probe::Switch => {
                ExpectedState::attached(&[Mode::Tracepoint])
            }
            Probe::Charge if !self.has(Feature::UnifiedMemory) => {
                ExpectedState::absent(&[Obstacle::Unsupported])
            }
            Probe::Charge => self.at_function(&CHARGE, Mode::Fexit),
            Probe::Hugepages => {
                let mut expected = self.at_function(&["alloc_hugetlb_folio", "alloc_huge_page"], Mode::Fexit);
                if !self.has(Feature::MemoryBlocks) {
                    expected.obstacles.push(Obstacle::MemoryBlocks);
                }
                expected
            }
            Probe::Scan => self.at_function(&["vma_policy_mof"], Mode::Fexit),
            Probe::OomKill => self.at_function(&["oom_kill_process"], Mode::Fentry),
            Probe::Hint => {
                let mut expected = self.at_function(&["task_numa_fault"], Mode::Fentry);
                if self.has(Feature::Kprobes) && !expected.modes.contains(&Mode::Fentry) {
                    expected = ExpectedState::attached(&[Mode::Kprobe]);
                } else if self.has(Feature::Kprobes) && self.traceable.is_none() {
                    expected.modes.push(Mode::Kprobe);
                }
                expected
            }
            // Some processors have no events for accesses to DRAM.
            Probe::Hardware if self.has(Feature::Counters) => {
                ExpectedState { modes: vec![Mode::TpBtf], obstacles: vec![Obstacle::HardwareCounters] }
            }
            Probe::Hardware => ExpectedState::absent(&[Obstacle::HardwareCounters]),
            Probe::CpuTime if self.has(Feature::Btf) => ExpectedState::attached(&[Mode::OnDemand]),
            Probe::CpuTime => ExpectedState::absent(&[Obstacle::Btf]),
            Probe::AllocChains | Probe::AccessChains => ExpectedState::default(),
        }
    }

    /// Returns the expected states of a probe at the entry or the exit of one of these functions.
    fn at_function(&self, functions: &[&str], mode: Mode) -> ExpectedState {
        match &self.traceable {
            _ if !self.has(Feature::Btf) => ExpectedState::absent(&[Obstacle::Btf]),
            _ if !self.has(Feature::Trampolines) => ExpectedState::absent(&[Obstacle::Kernel]),
            None => ExpectedState { modes: vec![mode], obstacles: vec![Obstacle::Permission] },
            Some(traceable) if functions.iter().any(|function| traceable.contains(*function)) => {
                ExpectedState::attached(&[mode])
            }
            Some(_) => ExpectedState::absent(&[Obstacle::Btf, Obstacle::Kernel]),
        }
    }

    /// Returns one line for each probe in an unexpected state.
    pub(crate) fn problems(&self, reports: &[ProbeReport]) -> Vec<String> {
        let is_wrong = |report: &&ProbeReport| {
            let expected = self.expected(report.probe);
            !match (report.mode, report.obstacle) {
                (Mode::Absent, Some(obstacle)) => expected.obstacles.contains(&obstacle),
                (mode, _) => expected.modes.contains(&mode),
            }
        };
        let wrong = reports.iter().filter(is_wrong);
        wrong
            .map(|report| format!("{report:?}, expected {:?} with {self:?}", self.expected(report.probe)))
            .collect()
    }
}

impl ExpectedState {
    fn attached(modes: &[Mode]) -> Self {
        Self { modes: modes.to_vec(), ..Self::default() }
    }

    fn absent(obstacles: &[Obstacle]) -> Self {
        Self { obstacles: obstacles.to_vec(), ..Self::default() }
    }
}

/// Returns the functions of [`TRACED`] in the kernel's list.
fn traceable(list: &Path) -> Option<BTreeSet<String>> {
    let file = match fs::File::open(list) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return None,
        // Without tracefs, the list does not exist.
        file => file.unwrap(),
    };
    // Functions of modules are followed by the module's name.
    let names = BufReader::new(file)
        .lines()
        .map(|line| line.unwrap().split(' ').next().unwrap_or_default().to_owned());
    Some(names.filter(|name| TRACED.contains(&name.as_str())).collect())
}

/// Returns the major and minor number of the running kernel's release.
fn release() -> (u32, u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// An absent probe is a problem unless the kernel does not have its feature, and only with the reason for that.
pub(crate) fn only_missing_features_excuse() {
    let report = |probe, mode, obstacle: Option<Obstacle>| ProbeReport {
        probe,
        mode,
        reason: obstacle.map(|obstacle| format!("{obstacle:?}")),
        obstacle,
        self_check: None,
    };
    let all =
        Features { there: ALL.into(), traceable: Some(TRACED.iter().map(|&name| name.to_owned()).collect()) };
    let without = |features: &[Feature]| {
        let there = ALL.into_iter().filter(|feature| !features.contains(feature)).collect();
        Features { there, ..all.clone() }
    };
    let none_listed = Features { traceable: Some(BTreeSet::new()), ..without(&[Feature::Kprobes]) };
    let list_refused = Features { traceable: None, ..without(&[Feature::Kprobes]) };
    let no_trampolines = without(&[Feature::Trampolines]);
    let no_btf = without(&[Feature::Btf]);
    let no_counters = without(&[Feature::Counters]);
    let no_balancing = without(&[Feature::Balancing]);
    let memory_on_v1 = without(&[Feature::UnifiedMemory]);
    let is_right = |features: &Features, probe, mode, obstacle| {
        features.problems(&[report(probe, mode, obstacle)]).is_empty()
    };
    for obstacle in
        [Obstacle::NotBuilt, Obstacle::Btf, Obstacle::Permission, Obstacle::Kernel, Obstacle::Setup]
    {
        for probe in [Probe::Alloc].into_iter().chain(Probe::SECONDARY) {
            assert!(!is_right(&all, probe, Mode::Absent, Some(obstacle)), "{probe:?} {obstacle:?}");
        }
    }
    for (probe, mode) in [
        (Probe::Charge, Mode::Fexit),
        (Probe::Hugepages, Mode::Fexit),
        (Probe::Hint, Mode::Fentry),
        (Probe::Scan, Mode::Fexit),
        (Probe::OomKill, Mode::Fentry),
    ] {
        assert!(is_right(&all, probe, mode, None));
        assert!(!is_right(&none_listed, probe, mode, None), "{probe:?} at a function that is not there");
        assert!(is_right(&none_listed, probe, Mode::Absent, Some(Obstacle::Btf)));
        assert!(!is_right(&none_listed, probe, Mode::Absent, Some(Obstacle::Permission)));
        assert!(is_right(&list_refused, probe, Mode::Absent, Some(Obstacle::Permission)));
        assert!(!is_right(&list_refused, probe, Mode::Absent, Some(Obstacle::Kernel)));
    }
    assert!(!is_right(&all, Probe::Hint, Mode::Kprobe, None), "fentry is cheaper");
    assert!(is_right(&no_trampolines, Probe::Hint, Mode::Kprobe, None));
    assert!(!is_right(&no_trampolines, Probe::Hint, Mode::Absent, Some(Obstacle::Kernel)));
    assert!(is_right(&no_trampolines, Probe::Scan, Mode::Absent, Some(Obstacle::Kernel)));
    assert!(is_right(&no_btf, Probe::Stall, Mode::Tracepoint, None));
    assert!(is_right(&no_balancing, Probe::Hint, Mode::Absent, Some(Obstacle::Unsupported)));
    assert!(is_right(&memory_on_v1, Probe::Charge, Mode::Absent, Some(Obstacle::Unsupported)));
    assert!(!is_right(&memory_on_v1, Probe::Charge, Mode::Fexit, None));
    assert!(!is_right(&all, Probe::Hint, Mode::Absent, Some(Obstacle::Unsupported)));
    assert!(!is_right(&no_btf, Probe::Stall, Mode::Absent, Some(Obstacle::Btf)));
    assert!(!is_right(&all, Probe::Stall, Mode::Tracepoint, None));
    for (features, mode, right) in [
        (&all, Mode::Fexit, true),
        (&all, Mode::TpBtf, false),
        (&none_listed, Mode::TpBtf, true),
        (&none_listed, Mode::Fexit, false),
        (&no_trampolines, Mode::TpBtf, true),
        (&list_refused, Mode::TpBtf, true),
        (&no_btf, Mode::Tracepoint, true),
    ] {
        assert_eq!(is_right(features, Probe::Migrate, mode, None), right, "{mode} with {features:?}");
    }
    assert!(!is_right(&list_refused, Probe::Migrate, Mode::Absent, Some(Obstacle::Permission)));
    assert!(is_right(&no_counters, Probe::Hardware, Mode::Absent, Some(Obstacle::HardwareCounters)));
    assert!(!is_right(&no_counters, Probe::Hardware, Mode::TpBtf, None));
}

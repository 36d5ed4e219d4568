//! What each probe is, how it runs, and why not better.

use std::time::Duration;

use numaward_topology::NodeSet;

/// A family of eBPF programs that answers one question. Its text is the metric label `probe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Probe {
    /// Where pages are allocated: the tracepoint `kmem:mm_page_alloc`.
    Alloc,
    /// Where hugepages are taken from the pools: the function `alloc_hugetlb_folio`, or `alloc_huge_page`.
    Hugepages,
    /// Sampled accesses to local and remote memory: the function `task_numa_fault`.
    Hint,
    /// Which mappings are sampled at all: the function `vma_policy_mof`.
    Scan,
    /// Pages that move between nodes: the tracepoint `migrate:mm_migrate_pages`.
    Migrate,
    /// Time lost in reclaim: the tracepoints `vmscan:mm_vmscan_{direct,memcg}_reclaim_{begin,end}`.
    Stall,
    /// Processes that the OOM killer takes: the function `oom_kill_process`.
    OomKill,
    /// Who runs on exclusive CPUs: the tracepoint `sched:sched_switch`.
    Switch,
    /// Accesses to local and remote DRAM: the processor's own counters, split at the same tracepoint.
    Hardware,
    /// Which code allocates pages on other nodes: the tracepoint `kmem:mm_page_alloc`.
    AllocChains,
    /// Which code accesses remote memory: the function `task_numa_fault`.
    AccessChains,
}

impl Probe {
    /// All probes but that of allocations, and those of [`ProbeOptions::call_chains`](crate::ProbeOptions::call_chains).
    pub const SECONDARY: [Self; 8] = [
        Self::Hugepages,
        Self::Hint,
        Self::Scan,
        Self::Migrate,
        Self::Stall,
        Self::OomKill,
        Self::Switch,
        Self::Hardware,
    ];
}

/// How a probe is attached. Its text is the metric label `mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Mode {
    /// A BTF-typed raw tracepoint: the cheapest hook, reads kernel structures directly.
    TpBtf,
    /// At a function's entry, through its own call site for tracing.
    Fentry,
    /// The same, at its exit.
    Fexit,
    /// A classic tracepoint through perf: dearer, needs tracefs.
    Tracepoint,
    /// A breakpoint at a function's entry.
    Kprobe,
    /// Not attached.
    Absent,
}

/// Why a probe is absent, or not attached in a better mode. Its text is the metric label `reason`: what to do about it is in
/// [`ProbeReport::reason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Obstacle {
    /// The binary was built without probes.
    NotBuilt,
    /// The kernel has no BTF, or BTF that says nothing of what the probe reads.
    Btf,
    /// The tracepoint's record is not as the probe knows it, or tracefs cannot be read.
    Tracepoint,
    /// Privileges are missing, or a lockdown or an LSM refuses.
    Permission,
    /// The kernel refused for another reason.
    Kernel,
    /// The processor has no such counters, or others use them.
    HardwareCounters,
    /// It is not known which memory is of which node.
    MemoryBlocks,
    /// Too many slots, nodes or file descriptors.
    Limit,
    /// The probe did not count what it was to count.
    SelfCheck,
    /// This kernel preempts tasks inside the probe, which loses events.
    Preemption,
    /// The duty cycle cannot be kept.
    DutyCycle,
    /// The configuration has switched the probe off.
    SwitchedOff,
    /// The probe could not be set up.
    Setup,
}

impl Obstacle {
    /// All values of the label.
    pub const LABELS: &[&str] = <Self as strum::VariantNames>::VARIANTS;
}

/// Whether a probe's counts were compared with known allocations after it was attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelfCheck {
    /// Pages touched on these nodes were counted on them.
    Passed(NodeSet),
    /// Not compared, and why. The probe counts nevertheless.
    Unchecked(String),
}

/// The state of one probe. Every known probe has one report, also where it could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeReport {
    /// Which probe.
    pub probe: Probe,
    /// How it is attached.
    pub mode: Mode,
    /// Why it is not attached by a better mode, or what is wrong with this one; `None` where all is well.
    pub reason: Option<String>,
    /// The same in a word: of the best mode that was tried.
    pub obstacle: Option<Obstacle>,
    /// The comparison with known allocations; `None` where the probe is absent.
    pub self_check: Option<SelfCheck>,
}

/// What a probe costs, as the kernel counts it.
///
/// The kernel counts runs and their time only while somebody asks for statistics
/// ([`crate::stats_window`]); both then include some 30–40 ns a run for reading the clock twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeStats {
    /// Which probe.
    pub probe: Probe,
    /// Time spent in it while statistics were on, over all CPUs, since it was attached.
    pub run_time: Duration,
    /// Runs while statistics were on, since it was attached.
    pub run_count: u64,
    /// Events that the kernel did not hand to the probe, because a run of the probe was under way on the
    /// same CPU: it was interrupted or, where [`crate::ProbeReport::reason`] says so, preempted. Since it was
    /// attached; counted whether or not statistics are on.
    pub events_lost: u64,
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapUsage {
    /// The map's name; the metric label `map`.
    pub map: &'static str,
    /// Entries in use.
    pub entries: u64,
    /// Entries it can hold.
    pub capacity: u64,
}

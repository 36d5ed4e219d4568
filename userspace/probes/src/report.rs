//! The probes, their modes, and the reasons for worse modes.

use std::time::Duration;

use numaward_topology::NodeSet;

/// A family of eBPF programs that measures one thing. Its text is the value of the metric label `probe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Probe {
    /// Page allocations: the tracepoint `kmem:mm_page_alloc`.
    Alloc,
    /// Pages charged outside guaranteed nodes: the function `charge_memcg`, `__mem_cgroup_charge` or `mem_cgroup_charge`.
    /// If it is absent, [`Probe::Alloc`] counts misses instead.
    Charge,
    /// Hugepages taken from the pools: the function `alloc_hugetlb_folio`, or `alloc_huge_page`.
    Hugepages,
    /// Sampled accesses to local and remote memory: the function `task_numa_fault`.
    Hint,
    /// Mappings that can be sampled: the function `vma_policy_mof`.
    Scan,
    /// Pages that move between nodes: the function `move_to_new_folio`, or the tracepoint `migrate:mm_migrate_pages`.
    Migrate,
    /// Time lost in reclaim: the tracepoints `vmscan:mm_vmscan_{direct,memcg}_reclaim_{begin,end}`.
    Stall,
    /// Processes that the OOM killer kills: the function `oom_kill_process`.
    OomKill,
    /// Tasks on exclusive CPUs: the tracepoint `sched:sched_switch`.
    Switch,
    /// Accesses to local and remote DRAM: the processor's counters, read at the same tracepoint.
    Hardware,
    /// CPU time of cgroups by CPU: the kernel's own account, which is read without a hook.
    CpuTime,
    /// Call chains of allocations on other nodes: the tracepoint `kmem:mm_page_alloc`.
    AllocChains,
    /// Call chains of accesses to remote memory: the function `task_numa_fault`.
    AccessChains,
}

impl Probe {
    /// All probes except those of allocations and of [`ProbeOptions::call_chains`](crate::ProbeOptions::call_chains).
    pub const SECONDARY: [Self; 10] = [
        Self::Charge,
        Self::Hugepages,
        Self::Hint,
        Self::Scan,
        Self::Migrate,
        Self::Stall,
        Self::OomKill,
        Self::Switch,
        Self::Hardware,
        Self::CpuTime,
    ];
}

/// The method by which a probe is attached. Its text is the value of the metric label `mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Mode {
    /// A BTF-typed raw tracepoint: the cheapest hook, which reads kernel structures directly.
    TpBtf,
    /// The entry of a function, through its call site for tracing.
    Fentry,
    /// The exit of a function, through its call site for tracing.
    Fexit,
    /// A classic tracepoint through perf: more expensive, and needs tracefs.
    Tracepoint,
    /// A breakpoint at the entry of a function.
    Kprobe,
    /// No hook: the program runs only when its figures are read.
    OnDemand,
    /// The probe is not attached.
    Absent,
}

/// The kind of reason why a probe is absent, or not attached in a better mode. Its text is the value of the metric
/// label `reason`. [`ProbeReport::reason`] contains the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Obstacle {
    /// The binary was built without probes.
    NotBuilt,
    /// The kernel has no BTF, or its BTF does not describe the data that the probe reads.
    Btf,
    /// The tracepoint's record has an unknown format, or tracefs cannot be read.
    Tracepoint,
    /// Privileges are missing, or lockdown or an LSM refuses the probe.
    Permission,
    /// The kernel refused the probe for another reason.
    Kernel,
    /// The processor has no such counters, or other programs use them.
    HardwareCounters,
    /// The nodes of the memory blocks are unknown.
    MemoryBlocks,
    Limit,
    /// The probe's counts differ from known allocations.
    SelfCheck,
    /// This kernel preempts tasks inside the probe, which loses events.
    Preemption,
    /// The duty cycle cannot be applied.
    DutyCycle,
    /// The configuration disables the probe.
    SwitchedOff,
    /// The kernel was built without the feature that the probe observes.
    Unsupported,
    /// The probe cannot be set up.
    Setup,
}

impl Obstacle {
    /// All values of the metric label.
    pub const LABELS: &[&str] = <Self as strum::VariantNames>::VARIANTS;
}

/// The result of the comparison with known allocations after attaching.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelfCheck {
    /// Pages that were touched on these nodes were counted on them.
    Passed(NodeSet),
    /// The reason why the counts were not compared. The probe counts nevertheless.
    Unchecked(String),
}

/// The state of one probe. Every known probe has a report, even if it cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeReport {
    pub probe: Probe,
    pub mode: Mode,
    /// The reason why it is not attached by a better mode, or the problem of this one; `None` if there is none.
    pub reason: Option<String>,
    /// The kind of that reason, for the best mode that was tried.
    pub obstacle: Option<Obstacle>,
    /// The comparison with known allocations; `None` if the probe is absent.
    pub self_check: Option<SelfCheck>,
}

/// The cost of a probe, measured by the kernel.
///
/// The kernel counts runs and their time only while a [`crate::stats_window`] is open. The time then includes some
/// 30–40 ns per run for reading the clock twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeStats {
    pub probe: Probe,
    /// The total time over all CPUs while statistics were enabled, since the probe was attached.
    pub run_time: Duration,
    /// The number of runs while statistics were enabled, since the probe was attached.
    pub run_count: u64,
    /// The number of events that the kernel did not pass to the probe because the probe was already running on the same
    /// CPU: it was interrupted or, if [`crate::ProbeReport::reason`] says so, preempted. Counted since the probe was
    /// attached, also while statistics are disabled.
    pub events_lost: u64,
}

/// The usage of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapUsage {
    /// The map's name, which is the value of the metric label `map`.
    pub map: &'static str,
    /// Used entries.
    pub entries: u64,
    /// The maximum number of entries.
    pub capacity: u64,
}

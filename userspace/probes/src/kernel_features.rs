//! Kernel features for eBPF that not every supported kernel has.
//!
//! Source: the history of kernel/bpf and `kernel/trace/bpf_trace.c`.

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use numaward_topology::{KernelFeature, KernelRelease};

/// Programs can get the current task as a structure.
pub const TASK: KernelFeature = KernelFeature {
    name: "programs read the current task",
    since: KernelRelease::new(5, 11),
    fallback: "the allocation probe calls a helper for the cgroup's id, which costs more",
    is_degraded: false,
};

/// The memory of maps is charged to the cgroup of the process that creates them.
pub const CHARGED_MAPS: KernelFeature = KernelFeature {
    name: "maps are booked to cgroups",
    since: KernelRelease::new(5, 11),
    fallback: "RLIMIT_MEMLOCK limits them, and the daemon raises it: without LimitMEMLOCK=infinity this needs CAP_SYS_RESOURCE",
    is_degraded: false,
};

/// Programs can call a helper for the ancestors of the current task's cgroup.
pub const ANCESTORS: KernelFeature = KernelFeature {
    name: "programs ask for ancestors of a cgroup",
    since: KernelRelease::new(5, 14),
    fallback: "programs read the ancestors by BTF: without BTF, or under lockdown=confidentiality, no probe attaches",
    is_degraded: false,
};

/// A process with the descriptor of a map can read it.
pub const UNPRIVILEGED_MAP_READS: KernelFeature = KernelFeature {
    name: "maps are read without CAP_BPF",
    since: KernelRelease::new(5, 19),
    fallback: "the daemon keeps CAP_BPF if kernel.unprivileged_bpf_disabled is not 0",
    is_degraded: false,
};

pub const ALL: [KernelFeature; 4] = [TASK, CHARGED_MAPS, ANCESTORS, UNPRIVILEGED_MAP_READS];

/// Returns true if the running kernel has a helper for programs of the types that are loaded here, which all have the
/// same helpers; `None` if it does not answer.
pub(crate) fn has(helper: BpfHelper) -> Option<bool> {
    is_helper_supported(ProgramType::KProbe, helper).ok()
}

/// Returns the features that can be detected by helpers. The last one cannot, see
/// [`Probes::needs_cap_bpf`](crate::Probes::needs_cap_bpf).
pub(crate) fn detect_by_helpers() -> [(KernelFeature, Option<bool>); 3] {
    // This helper is of the same release, which has no other trace. Since Linux 5.16, programs for tracing cannot call
    // it.
    let coarse = is_helper_supported(ProgramType::SocketFilter, BpfHelper::BPF_FUNC_ktime_get_coarse_ns);
    [
        (TASK, has(BpfHelper::BPF_FUNC_get_current_task_btf)),
        (CHARGED_MAPS, coarse.ok()),
        (ANCESTORS, has(BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id)),
    ]
}

//! What the probes use of the kernel where it has it, since when that is, and what takes its place.
//!
//! Source: the history of kernel/bpf and `kernel/trace/bpf_trace.c`.

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use numaward_topology::{KernelFeature, KernelRelease};

/// Programs may have the current task as a structure.
pub const TASK: KernelFeature = KernelFeature {
    name: "programs read the current task",
    since: KernelRelease::new(5, 11),
    fallback: "the probe of allocations asks for the id of the cgroup, which costs more",
    is_degraded: false,
};

/// Maps are booked to the memory of the cgroup that makes them.
pub const BOOKED_MAPS: KernelFeature = KernelFeature {
    name: "maps are booked to cgroups",
    since: KernelRelease::new(5, 11),
    fallback: "RLIMIT_MEMLOCK limits them, and is raised: without LimitMEMLOCK=infinity that takes CAP_SYS_RESOURCE",
    is_degraded: false,
};

/// A helper for the ancestors of the current task's cgroup.
pub const ANCESTORS: KernelFeature = KernelFeature {
    name: "programs ask for ancestors of a cgroup",
    since: KernelRelease::new(5, 14),
    fallback: "they read them, by BTF: without BTF, or under lockdown=confidentiality, no probe attaches",
    is_degraded: false,
};

/// A process that holds the descriptor of a map may read it.
pub const OPEN_MAPS: KernelFeature = KernelFeature {
    name: "maps are read without CAP_BPF",
    since: KernelRelease::new(5, 19),
    fallback: "the daemon keeps CAP_BPF, where kernel.unprivileged_bpf_disabled is not 0",
    is_degraded: false,
};

/// All of them.
pub const ALL: [KernelFeature; 4] = [TASK, BOOKED_MAPS, ANCESTORS, OPEN_MAPS];

/// Whether the running kernel has a helper for programs of the kinds that are loaded here, which all have the same; `None`
/// where it does not answer.
pub(crate) fn has(helper: BpfHelper) -> Option<bool> {
    is_helper_supported(ProgramType::KProbe, helper).ok()
}

/// Whether the running kernel has each of them, as far as its helpers say; the last one is not among them, see
/// [`Probes::needs_cap_bpf`](crate::Probes::needs_cap_bpf).
pub(crate) fn of_helpers() -> [(KernelFeature, Option<bool>); 3] {
    // Came with the same release, and nothing else shows it. Since Linux 5.16 it is not for kinds that trace.
    let coarse = is_helper_supported(ProgramType::SocketFilter, BpfHelper::BPF_FUNC_ktime_get_coarse_ns);
    [
        (TASK, has(BpfHelper::BPF_FUNC_get_current_task_btf)),
        (BOOKED_MAPS, coarse.ok()),
        (ANCESTORS, has(BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id)),
    ]
}

//! What the probes use of the kernel where it has it, since when that is, and what takes its place.
//!
//! Source: the history of kernel/bpf and `kernel/trace/bpf_trace.c`.

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use numaward_topology::{Need, Release};

/// Programs may have the current task as a structure.
pub const TASK: Need = Need {
    name: "programs read the current task",
    since: Release::new(5, 11),
    instead: "the probe of allocations asks for the id of the cgroup, which costs more",
    loses: false,
};

/// Maps are booked to the memory of the cgroup that makes them.
pub const BOOKED_MAPS: Need = Need {
    name: "maps are booked to cgroups",
    since: Release::new(5, 11),
    instead: "RLIMIT_MEMLOCK limits them, and is raised: without LimitMEMLOCK=infinity that takes CAP_SYS_RESOURCE",
    loses: false,
};

/// A helper for the ancestors of the current task's cgroup.
pub const ANCESTORS: Need = Need {
    name: "programs ask for ancestors of a cgroup",
    since: Release::new(5, 14),
    instead: "they read them, by BTF: without BTF, or under lockdown=confidentiality, no probe attaches",
    loses: false,
};

/// A process that holds the descriptor of a map may read it.
pub const OPEN_MAPS: Need = Need {
    name: "maps are read without CAP_BPF",
    since: Release::new(5, 19),
    instead: "the daemon keeps CAP_BPF, where kernel.unprivileged_bpf_disabled is not 0",
    loses: false,
};

/// All of them.
pub const ALL: [Need; 4] = [TASK, BOOKED_MAPS, ANCESTORS, OPEN_MAPS];

/// Whether the running kernel has a helper for programs of the kinds that are loaded here, which all have the same; `None`
/// where it does not answer.
pub(crate) fn has(helper: BpfHelper) -> Option<bool> {
    is_helper_supported(ProgramType::KProbe, helper).ok()
}

/// Whether the running kernel has each of them, as far as its helpers say; the last one is not among them, see
/// [`Probes::needs_cap_bpf`](crate::Probes::needs_cap_bpf).
pub(crate) fn of_helpers() -> [(Need, Option<bool>); 3] {
    // Came with the same release, and nothing else shows it. Since Linux 5.16 it is not for kinds that trace.
    let coarse = is_helper_supported(ProgramType::SocketFilter, BpfHelper::BPF_FUNC_ktime_get_coarse_ns);
    [
        (TASK, has(BpfHelper::BPF_FUNC_get_current_task_btf)),
        (BOOKED_MAPS, coarse.ok()),
        (ANCESTORS, has(BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id)),
    ]
}

//! Offsets that lead from a task to its cgroup and its ancestors. Userspace sets them.

use aya_ebpf::Global;

/// Offsets of the members in the path from a task to its cgroup's kernfs node, which has the id: `task_struct.cgroups`,
/// `css_set.dfl_cgrp`, `cgroup.kn`, `kernfs_node.id`. The first one is 0 if they are unknown.
#[unsafe(no_mangle)]
pub(crate) static CGROUP_PATH: Global<[u32; 4]> = Global::new([0; 4]);

/// The offset of the pointer to the parent in `kernfs_node`.
#[unsafe(no_mangle)]
pub(crate) static KERNFS_PARENT: Global<u32> = Global::new(0);

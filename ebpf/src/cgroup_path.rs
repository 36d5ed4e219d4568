//! Where the kernel's structures have the way from a task to its cgroup, and from there upwards. Userspace sets it.

use aya_ebpf::Global;

/// Offsets of the members in the path from a task to its cgroup's node in kernfs, which has the id:
/// `task_struct.cgroups`, `css_set.dfl_cgrp`, `cgroup.kn`, `kernfs_node.id`. The first is 0 where they are not known.
#[unsafe(no_mangle)]
pub(crate) static CGROUP_PATH: Global<[u32; 4]> = Global::new([0; 4]);

/// The offset of the pointer to the parent in `kernfs_node`.
#[unsafe(no_mangle)]
pub(crate) static KERNFS_PARENT: Global<u32> = Global::new(0);

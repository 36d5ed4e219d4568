//! From any task to the slot of its workload, by the kernel's structures.
//!
//! Loads are typed, not `bpf_probe_read_kernel`, so that the programs load under `lockdown=confidentiality`.

use aya_ebpf::Global;
use numaward_abi::OTHER_SLOT;

use crate::roots::{MAX_LEVELS, slot_of_root};

/// Offsets of the members in the path from a task to its cgroup's node in kernfs, which has the id:
/// `task_struct.cgroups`, `css_set.dfl_cgrp`, `cgroup.kn`, `kernfs_node.id`.
#[unsafe(no_mangle)]
static CGROUP_PATH: Global<[u32; 4]> = Global::new([0; 4]);
/// The offset of the pointer to the parent in `kernfs_node`.
#[unsafe(no_mangle)]
static KERNFS_PARENT: Global<u32> = Global::new(0);

/// A cgroup's node in kernfs.
#[derive(Clone, Copy)]
pub(crate) struct CgroupNode(*const u8);

impl CgroupNode {
    /// That of a task's cgroup.
    ///
    /// # Safety
    ///
    /// `task` is a `struct task_struct` as the verifier knows it, and the offsets are set.
    #[inline(always)]
    pub(crate) unsafe fn of_task(task: *const u8) -> Self {
        let [cgroups, dfl_cgrp, kn, _] = CGROUP_PATH.load();
        // SAFETY: each offset is of a member of the struct that is pointed to. The verifier makes these loads
        // such that cannot fault, and the program runs under RCU, which keeps the structs alive.
        unsafe {
            let css_set = *task.add(cgroups as usize).cast::<*const u8>();
            let cgroup = *css_set.add(dfl_cgrp as usize).cast::<*const u8>();
            Self(*cgroup.add(kn as usize).cast::<*const u8>())
        }
    }

    /// The id of the cgroup; 0 where there is none.
    #[inline(always)]
    pub(crate) fn id(self) -> u64 {
        if self.0.is_null() {
            return 0;
        }
        let [.., id] = CGROUP_PATH.load();
        // SAFETY: not null; else as in `of_task`.
        unsafe { *self.0.add(id as usize).cast() }
    }

    /// The slot of the deepest registered cgroup at or above this one.
    #[inline(always)]
    pub(crate) fn slot(self) -> u32 {
        let mut node = self;
        for _ in 0..MAX_LEVELS {
            let id = node.id();
            if id == 0 {
                break;
            }
            if let Some(found) = slot_of_root(id) {
                return found;
            }
            // SAFETY: not null, as its id is not 0; else as in `of_task`.
            node = Self(unsafe { *node.0.add(KERNFS_PARENT.load() as usize).cast() });
        }
        OTHER_SLOT
    }
}

//! Finds the cgroup of any task through the kernel's structures.
//!
//! Typed loads replace `bpf_probe_read_kernel`, so that the programs load under `lockdown=confidentiality`.

use numaward_abi::CgroupId;

/// The kernfs node of a cgroup.
#[derive(Clone, Copy)]
pub(crate) struct CgroupNode {
    pub(crate) address: *const u8,
    /// The last offset of the path.
    pub(crate) id_offset: u32,
}

impl CgroupNode {
    /// Returns the kernfs node of a task's cgroup.
    ///
    /// # Safety
    ///
    /// `path` is the value of `CGROUP_PATH` and known, and the verifier knows `task` as a `struct task_struct`.
    #[inline(always)]
    pub(crate) unsafe fn of_task(path: [u32; 4], task: *const u8) -> Self {
        let [cgroups, dfl_cgrp, ..] = path;
        // SAFETY: each offset is of a member of the struct that is pointed to. The verifier turns these loads into ones
        // that cannot fault, and the program runs under RCU, which keeps the structs alive.
        unsafe {
            let css_set = *task.add(cgroups as usize).cast::<*const u8>();
            Self::of_pointer(path, css_set.add(dfl_cgrp as usize))
        }
    }

    /// Returns the kernfs node of the cgroup to which a member of a kernel structure points.
    ///
    /// # Safety
    ///
    /// As for `of_task`; `pointer` is the address of the member.
    #[inline(always)]
    pub(crate) unsafe fn of_pointer(path: [u32; 4], pointer: *const u8) -> Self {
        let [_, _, kn, id_offset] = path;
        // SAFETY: as in `of_task`.
        unsafe {
            let cgroup = *pointer.cast::<*const u8>();
            Self { address: *cgroup.add(kn as usize).cast(), id_offset }
        }
    }

    #[inline(always)]
    pub(crate) fn id(self) -> CgroupId {
        // SAFETY: as in `of_task`.
        unsafe { *self.address.add(self.id_offset as usize).cast() }
    }
}

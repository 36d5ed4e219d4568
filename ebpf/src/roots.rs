//! The registered cgroups. Tasks belong to the deepest of them among their own cgroup and its ancestors; to
//! [`numaward_abi::OTHER_SLOT`] where there is none.

use aya_ebpf::{macros::map, maps::HashMap};
use numaward_abi::CgroupId;

/// Levels of the cgroup tree that are searched.
pub(crate) const MAX_LEVELS: i32 = 24;

/// The slot of each registered cgroup. Its size is set by userspace.
#[map]
static ROOTS: HashMap<CgroupId, u32> = HashMap::with_max_entries(1, 0);

/// The slot of a cgroup, if that is registered itself.
#[inline(always)]
pub(crate) fn slot_of_root(cgroup: CgroupId) -> Option<u32> {
    // SAFETY: the value is copied at once; userspace replaces an entry, it never changes one.
    unsafe { ROOTS.get(cgroup) }.copied()
}

//! The registered cgroups. A task belongs to the deepest of them among its own cgroup and its ancestors, or to
//! [`numaward_abi::OTHER_SLOT`] if none is registered.

use aya_ebpf::{macros::map, maps::HashMap};
use numaward_abi::CgroupId;

/// The number of levels of the cgroup tree that are searched.
pub(crate) const MAX_LEVELS: i32 = 24;

/// The slot of each registered cgroup. Userspace sets the map's size.
#[map]
static ROOTS: HashMap<CgroupId, u32> = HashMap::with_max_entries(1, 0);

/// Returns the slot of a cgroup if it is registered itself.
#[inline(always)]
pub(crate) fn slot_of_root(cgroup: CgroupId) -> Option<u32> {
    // SAFETY: the value is copied at once; userspace replaces entries and never changes one in place.
    unsafe { ROOTS.get(cgroup) }.copied()
}

//! What found no room in a map or a ring buffer.

use aya_ebpf::{macros::map, maps::Array};

use crate::counters::add_shared;

/// How often that was so.
#[map]
static LOST: Array<u64> = Array::with_max_entries(1, 0);

/// Counts one more.
#[inline(always)]
pub(crate) fn count_lost() {
    if let Some(counter) = LOST.get_ptr_mut(0) {
        // SAFETY: the pointer is of the map's value.
        unsafe { add_shared(counter, 1) };
    }
}

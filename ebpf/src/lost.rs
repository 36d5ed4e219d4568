//! What found no room in a map or a ring buffer.

use aya_ebpf::{macros::map, maps::Array};

use crate::counters::add_at;

/// How often that was so.
#[map]
static LOST: Array<u64> = Array::with_max_entries(1, 0);

/// Counts one more.
#[inline(always)]
pub(crate) fn count_lost() {
    add_at(&LOST, 0, 1);
}

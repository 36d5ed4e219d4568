//! Counts events that did not fit into a map or a ring buffer.

use aya_ebpf::{macros::map, maps::Array};

use crate::counters::add_at;

/// The number of lost events.
#[map]
static LOST: Array<u64> = Array::with_max_entries(1, 0);

/// Counts one lost event.
#[inline(always)]
pub(crate) fn count_lost() {
    add_at(&LOST, 0, 1);
}

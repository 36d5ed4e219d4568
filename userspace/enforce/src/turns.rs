//! The order of writes to `cpuset.mems` of a cgroup.
//!
//! # Problem
//! A write returns when the kernel has moved the pages, so the caller continues before and may write the knob again.
//! The steps that follow the first write (see [`migration`](super::migration)) must not undo the second write.
//!
//! # Algorithm
//! Each write takes the next turn of its cgroup. A step of an earlier turn is not written. If a later turn begins while
//! a step is being written, the value of the later turn is written afterwards.

use std::{collections::BTreeMap, sync::Arc};

use numaward_cgroup::CgroupPath;
use parking_lot::Mutex;

use super::WriteStep;

/// The last turn of each cgroup with a pending write.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns(Arc<Mutex<BTreeMap<CgroupPath, LastTurn>>>);

#[derive(Debug)]
struct LastTurn {
    generation: u64,
    step: WriteStep,
    /// Number of turns that have not ended.
    running: usize,
}

impl Turns {
    /// Takes the next turn of a cgroup, for this step.
    pub(super) fn begin(&self, step: &WriteStep) -> Turn {
        let mut turns = self.0.lock();
        let last = turns.entry(step.cgroup.clone()).or_insert_with(|| LastTurn {
            generation: 0,
            step: step.clone(),
            running: 0,
        });
        last.generation += 1;
        last.running += 1;
        last.step = step.clone();
        Turn { turns: self.clone(), cgroup: step.cgroup.clone(), generation: last.generation }
    }
}

/// One write with all its steps. The turn ends on drop.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Turns,
    cgroup: CgroupPath,
    generation: u64,
}

impl Turn {
    /// Returns the step of the last turn; `None` if this is the last one.
    pub(super) fn later(&self) -> Option<WriteStep> {
        let turns = self.turns.0.lock();
        let last = turns.get(&self.cgroup)?;
        (last.generation != self.generation).then(|| last.step.clone())
    }

    /// Returns whether there is no later turn.
    pub(super) fn is_last(&self) -> bool {
        self.later().is_none()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = self.turns.0.lock();
        if let Some(last) = turns.get_mut(&self.cgroup) {
            last.running -= 1;
            if last.running == 0 {
                turns.remove(&self.cgroup);
            }
        }
    }
}

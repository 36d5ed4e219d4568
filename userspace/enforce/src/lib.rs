//! Enforcement: writes the settings of guarantees to the kernel, and restores the original values.
//!
//! # Problem
//! A guarantee consists of several knobs in one cgroup and, because protection is hierarchical, in each of its
//! ancestors. Other programs own some of these cgroups or write their knobs, and the daemon may die between any two
//! writes. When the guarantee ends, the original values have to be restored.
//!
//! # Terms
//! - [`Settings`](numaward_model::Settings) are the values that a cgroup should hold.
//! - [`AppliedSettings`] have the written and the original values. They are stored with the ledger.
//! - An [`EnforcementPlan`] has the writes of a change.
//! - [`Cgroupfs`] writes knobs directly, [`Systemd`] as properties of its units.
//! - [`Drift`] is a knob that does not hold its value.
//!
//! # Algorithm
//! [`Enforcer::plan`] reads the kernel and decides. The caller stores [`EnforcementPlan::intent`].
//! [`Enforcer::execute`] then writes the knobs in the order of [`order`] and reads each back, and the caller stores
//! [`EnforcementPlan::outcome`] later. If a write fails, a plan that applies settings is undone, and one that restores
//! values continues. After a crash, [`SettingsChange::Upkeep`] plans the remaining writes, if there are any.
//!
//! `memory.min` and `memory.low` of an ancestor are raised to the sum of its children's claims, because the kernel
//! scales claims down if their sum exceeds the parent's value. They never become lower than the original values. An
//! ancestor that holds more than it needs has not drifted.
//!
//! The controllers of the knobs are enabled in the ancestors, which is recorded too: see [`controllers`].
//!
//! All calls block: for file I/O, migration of pages, or the system bus. They must run on a thread that may block, one
//! plan at a time.

// Except for system calls, see `pages/sys.rs`.
#![deny(unsafe_code)]

mod applied;
mod backend;
mod batch;
pub mod controllers;
mod detached_reads;
mod drift;
mod enforcer;
mod error;
pub mod interrupts;
pub mod irqbalance;
mod map_locks;
mod migration;
pub mod order;
pub mod pages;
mod plan;
mod planner;
pub mod power;
pub mod records;
pub mod resctrl;
pub mod systemd;
mod thread_masks;
mod turns;
pub mod weights;
mod writers;

#[cfg(test)]
mod tests;

pub use applied::{AppliedSettings, Owner, Record};
pub use backend::{Cgroupfs, EnforcerOptions, StepError};
pub use controllers::EnabledControllers;
pub use detached_reads::DetachedReads;
pub use drift::{ConflictBackoff, ConflictPolicy, Drift, DriftCause, DriftKind, DriftVerdict};
pub use enforcer::{EnforcementFailure, Enforcer};
pub use error::EnforceError;
pub use map_locks::LockHolder;
pub use migration::{MemoryByNode, Migration, MigrationState};
pub use order::WriteStep;
pub use plan::{EnforcementPlan, EnforcementReport, SettingsChange};
pub use systemd::Systemd;
pub use thread_masks::{PendingReset, ResetThreads, ThreadMasks};

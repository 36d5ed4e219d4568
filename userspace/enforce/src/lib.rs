//! Enforcement: from settings to what the kernel does, and back.
//!
//! Problem: a promise is a handful of knobs in one cgroup and, because protection is hierarchical, some in
//! each of its ancestors. Others own some of these cgroups, others write them, and the daemon may die between
//! any two writes. What was there before has to come back when the promise ends.
//!
//! Terms: [`Settings`](numaward_model::Settings) are what a cgroup is to hold. [`AppliedSettings`] are what was written
//! where and what was found there; they are stored with the ledger. A [`EnforcementPlan`] is the way from what is to what is
//! wanted. [`Cgroupfs`] writes knobs directly, [`Systemd`] as properties of its units. [`Drift`] is a knob that holds
//! something else.
//!
//! Algorithm: [`Enforcer::plan`] reads the kernel and decides, [`EnforcementPlan::intent`] is stored, then
//! [`Enforcer::execute`] writes, in the order of [`order`], reads each knob back, and [`EnforcementPlan::outcome`] is
//! stored at leisure. A plan that gives settings is undone if any write fails; one that takes them back goes on
//! with the rest. After a crash, [`SettingsChange::Upkeep`] plans what is left to do; where nothing is, nothing is written.
//!
//! `memory.min` and `memory.low` of an ancestor are raised to the sum of what its children claim, as the kernel
//! scales claims down when they sum up to more than the parent has, and never below what was found. An ancestor
//! that holds more than needed is no drift.
//!
//! Controllers that the knobs need are enabled above, and noted as well: see [`controllers`].
//!
//! Everything here blocks: file I/O, page migration, the bus. It runs on a thread that may block, one plan at a
//! time.

// But for one system call, see `pages/sys.rs`.
#![deny(unsafe_code)]

mod applied;
mod backend;
mod batch;
pub mod controllers;
mod drift;
mod enforcer;
mod error;
pub mod interrupts;
pub mod irqbalance;
mod migration;
pub mod order;
pub mod pages;
mod plan;
mod planner;
pub mod power;
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
pub use drift::{ConflictBackoff, ConflictPolicy, Drift, DriftCause, DriftKind, DriftVerdict};
pub use enforcer::{EnforcementFailure, Enforcer};
pub use error::EnforceError;
pub use migration::{MemoryByNode, Migration, MigrationState};
pub use order::WriteStep;
pub use plan::{EnforcementPlan, EnforcementReport, SettingsChange};
pub use systemd::Systemd;
pub use thread_masks::{ResetThreads, ThreadMasks};

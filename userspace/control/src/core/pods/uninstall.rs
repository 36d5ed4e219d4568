//! Settings that containers would have without the daemon, and their restore.
//!
//! # Problem
//! The cgroup of a container is created with our values, so its original values cannot be read from it. The runtime writes these values
//! again whenever it changes the container.
//!
//! # Algorithm
//! The original values are those that the runtime was asked to set when the container was created. They are stored with its placement. When
//! enforcement ends, the next start restores them in the cgroup, and the runtime is informed at the next synchronization. NRI cannot remove
//! a set of CPUs or nodes: the set of all that the machine can ever have stands for none.

use std::{collections::BTreeSet, mem};

use numaward_api::EnforcementMode;
use numaward_cgroup::knob::{Knob, Limit, Quota};
use numaward_config::kubernetes::PinnedPolicy;
use numaward_guarantee::pod::{ContainerPlacementRequest, PlacedContainer, Update};
use numaward_model::Settings;
use numaward_topology::{Bytes, CpuSet, NodeSet};

use crate::core::{Core, settings};

/// Returns the settings that a container would have without the daemon, from those that the runtime was asked to set; `None` if nothing
/// is enforced.
pub(crate) fn original_settings(core: &Core, has: &Settings) -> Option<Settings> {
    if core.mode() != EnforcementMode::On {
        return None;
    }
    // Containers that a rebuilt ledger does not contain may have values of an earlier run.
    let mut has = if core.store.is_rebuilt { Settings::default() } else { has.clone() };
    let (cpus, mems) = all_cpus_and_nodes(core);
    has.cpus = has.cpus.filter(|has| !cpus.is_subset(has));
    has.mems = has.mems.filter(|has| !mems.is_subset(has));
    Some(has)
}

/// Like [`original_settings`], for a container that was placed while nothing was enforced: one that another program had
/// pinned was not placed then, unless it had to be pinned nevertheless.
pub(crate) fn original_settings_of_known(core: &Core, has: &Settings) -> Option<Settings> {
    let mut without_us = original_settings(core, has)?;
    if core.config.kubernetes.nri.when_pinned == PinnedPolicy::Yield {
        (without_us.cpus, without_us.mems) = (None, None);
    }
    Some(without_us)
}

/// Returns all CPUs, and all nodes with memory.
fn all_cpus_and_nodes(core: &Core) -> (CpuSet, NodeSet) {
    let machine = &core.policy.machine;
    let with_memory = machine.nodes.iter().filter(|(_, node)| node.memory > Bytes(0));
    (machine.cpu_ids(), with_memory.map(|(&id, _)| id).collect())
}

/// Records the original values of containers without a record, which are on the shared pool or not bound yet.
pub(crate) fn record_original_settings(core: &mut Core) {
    let placed: Vec<_> = core.store.state.containers.values().cloned().collect();
    for placed in placed {
        let Some(without_us) = &placed.without_us else { continue };
        let mut knobs: BTreeSet<Knob> =
            settings::container_settings(core, &placed).values().0.into_keys().collect();
        knobs.insert(Knob::CpusetCpus);
        let enforcer = core.enforcer().clone();
        enforcer.record_created(&mut core.store.state.applied, &placed.cgroup, without_us, knobs);
    }
}

/// Returns the changes that the runtime must make after enforcement has ended, so that it does not write our values again. Original
/// values that the runtime has restored are removed from the state.
pub(crate) fn request_restores(core: &mut Core, containers: &[ContainerPlacementRequest]) -> Vec<Update> {
    // Nodes and CPUs that are added later are available to the container, too.
    let machine = &core.policy.machine;
    let (cpus, mems) = (machine.possible_cpus.clone(), machine.possible_nodes.clone());
    let (none, max) = (Some(Limit::Bytes(Bytes(0))), Some(Limit::Max));
    let mut updates = Vec::new();
    let mut restore_requested = mem::take(&mut core.pods.restore_requested);
    let mut change = core.begin();
    for ContainerPlacementRequest { id, has, .. } in containers {
        let Some(placed) = change.store.state.containers.get(id) else { continue };
        let Some(without_us) = placed.without_us.clone() else { continue };
        // Only values that the runtime reports.
        let mut settings = Settings {
            cpus: has.cpus.as_ref().and(without_us.cpus.or_else(|| Some(cpus.clone()))),
            mems: has.mems.as_ref().and(without_us.mems.or_else(|| Some(mems.clone()))),
            memory_min: has.memory_min.and(without_us.memory_min.or(none)),
            memory_low: has.memory_low.and(without_us.memory_low.or(none)),
            memory_high: has.memory_high.and(without_us.memory_high.or(max)),
            cpu_max: has.cpu_max.and(without_us.cpu_max.or(Some(Quota::Max))),
            ..Settings::default()
        };
        let is_back = settings == *has;
        // A runtime with NRI before 0.10 does not report these values.
        let is_unreported = has.memory_min.or(has.memory_low).or(has.memory_high).is_none();
        if is_unreported && placed.memory.request.is_some() {
            settings.memory_min = without_us.memory_min.or(none);
            settings.memory_low = without_us.memory_low.or(none);
            settings.memory_high = without_us.memory_high.or(max);
        }
        let is_asked = settings == *has || !restore_requested.insert(id.clone());
        if is_back && is_asked {
            restore_requested.remove(id);
            let placed = PlacedContainer { without_us: None, ..PlacedContainer::clone(placed) };
            change.state().containers.insert(id.clone(), placed);
        } else {
            updates.push(Update { id: id.clone(), settings });
        }
    }
    if let Err(error) = change.store() {
        tracing::error!(%error, "the ledger cannot be stored");
    }
    restore_requested.retain(|id| core.store.state.containers.contains_key(id));
    core.pods.restore_requested = restore_requested;
    updates
}

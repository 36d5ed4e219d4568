//! Assigns preferred nodes to workloads without a guarantee, and ends them.
//!
//! # Terms
//! A cgroup *has a preferred node* while its `cpuset.cpus` is confined to CPUs of one node for this reason.
//!
//! # Algorithm
//! `cpuset.cpus` becomes the node's CPUs that are not exclusive. `cpuset.mems` stays unchanged, so that new memory
//! comes from the node while it has some. When the preferred node ends, the original set is restored.
//!
//! # Invariants
//! - The ledger stores the original and the new set before the knob is written.
//! - A cgroup whose cpuset another program set gets no preferred node.
//! - A cgroup that is also confined or steered keeps these settings.

use std::collections::BTreeMap;

use numaward_api as api;
use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue},
};
use numaward_enforce::{Drift, DriftKind, EnforcementPlan, SettingsChange};
use numaward_guarantee::{
    error::AdmissionError,
    narrowing::{Narrowing, PlacementBackoff, PreferredNode},
};
use numaward_model::EventReport;
use numaward_topology::{CpuSet, NodeId};

use super::{Core, narrowing};

/// Returns true if this cgroup, an ancestor or a descendant has a guarantee.
pub(crate) fn is_near_guarantee(core: &Core, path: &CgroupPath) -> bool {
    core.guaranteed_cgroups().iter().any(|other| other.overlaps(path))
}

/// Returns the cgroups with a preferred node, for the API.
pub(crate) fn describe(core: &Core) -> Vec<api::AutoPlacedWorkload> {
    let of = |(path, home): (&CgroupPath, &PreferredNode)| api::AutoPlacedWorkload {
        cgroup: path.to_string(),
        node: home.node.0,
        cpus: narrowing::preferred_node_cpus(core, path).map(ToString::to_string).unwrap_or_default(),
        kept: home.is_kept,
        remote_percent_before: home.remote_before / 10,
    };
    core.store.state.preferred_nodes().iter().map(of).collect()
}

/// Returns the preferred node of each cgroup that has one.
pub(crate) fn nodes_by_cgroup(core: &Core) -> BTreeMap<CgroupPath, NodeId> {
    core.store.state.preferred_nodes().iter().map(|(path, home)| (path.clone(), home.node)).collect()
}

/// Assigns this preferred node to a cgroup.
pub(crate) fn assign(core: &mut Core, path: &CgroupPath, home: PreferredNode) -> Result<(), AdmissionError> {
    let cpus_before = narrowing::preferred_node_cpus(core, path).cloned();
    narrowing::narrow(core, path, |narrowing| narrowing.home = Some(PreferredNode { cpus_before, ..home }))?;
    // From now on, a set with the CPUs from before counts as written by another program.
    update(core, path, |home| home.cpus_before = None);
    Ok(())
}

/// Changes the stored state of a preferred node.
pub(crate) fn update(core: &mut Core, path: &CgroupPath, note: impl FnOnce(&mut PreferredNode)) {
    if let Some(home) = core.store.state.preferred_node_mut(path) {
        note(home);
        core.effects.view = true;
        core.store_outcome();
    }
}

/// Excludes a cgroup from automatic placement after its preferred node was removed.
pub(crate) fn exclude(core: &mut Core, path: &CgroupPath, left_alone: PlacementBackoff) {
    core.store.state.left_alone.insert(path.clone(), left_alone);
    core.store_outcome();
}

/// Ends the preferred nodes of cgroups if another program set their CPUs while no daemon ran.
pub(crate) fn end_all_overridden(core: &mut Core) {
    let homes: Vec<(CgroupPath, Option<CpuSet>)> = core
        .store
        .state
        .preferred_nodes()
        .iter()
        .map(|(path, home)| (path.clone(), home.cpus_before.clone()))
        .collect();
    for (path, before) in homes {
        match core.enforcer().drift(&core.store.state.applied, &path) {
            Ok(drifts) => {
                let before = before.map(KnobValue::Cpus);
                // The set before is ours as well: an earlier run died before it wrote the new one.
                let is_theirs = |drift: &&Drift| drift.found != before;
                for drift in drifts.iter().filter(is_theirs) {
                    end_overridden(core, drift);
                }
            }
            Err(error) if error.is_gone() => {}
            Err(error) => {
                tracing::warn!(cgroup = %path, %error, "the cgroup cannot be checked for drift");
            }
        }
    }
}

/// Ends the preferred node of a cgroup after another program set its CPUs, and keeps that program's set. Returns true if it ended; it
/// does not if the cgroup is confined for another reason as well.
pub(crate) fn end_overridden(core: &mut Core, drift: &Drift) -> bool {
    let (path, state) = (&drift.cgroup, &core.store.state);
    let Some(KnobValue::Cpus(found)) = drift.found.as_ref().filter(|_| drift.kind == DriftKind::Rewritten)
    else {
        return false;
    };
    let Narrowing { is_isolated, home, off } = state.narrowing(path);
    if drift.knob != Knob::CpusetCpus
        || found.is_empty()
        || (is_isolated || !off.is_empty())
        || home.is_none()
    {
        return false;
    }
    let plan = core.plan(SettingsChange::Release(path.clone())).map_err(AdmissionError::from);
    let is_written = |plan: &EnforcementPlan| {
        plan.steps().iter().any(|step| step.cgroup == *path && step.knob == drift.knob)
    };
    let ended = match plan {
        // The property of the unit still has the CPUs of the preferred node.
        Ok(plan) if is_written(&plan) => return false,
        plan => plan.and_then(|plan| {
            narrowing::execute_narrowings(core, [(path.clone(), Narrowing::default())], plan)
        }),
    };
    if let Err(error) = ended {
        tracing::warn!(cgroup = %path, %error, "the preferred node cannot be ended, although another program set the CPUs");
        return false;
    }
    let message = format!("The preferred node of {path} ended: another program set its CPUs to {found}.");
    core.report(Some(path), EventReport::new(api::EventKind::Home, message).detail("step", "ended"));
    true
}

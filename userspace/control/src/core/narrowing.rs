//! Narrowing of cgroups without a guarantee: limits them to some CPUs, or keeps them off some nodes.
//!
//! # Problem
//! CPU isolation, automatic placement and the memory guard narrow cgroups without a guarantee, and may narrow the same cgroup. Each of them
//! must preserve what another one requires, and their settings must not contradict each other.
//!
//! # Algorithm
//! The state stores the requirements of all three for each cgroup, its [`Narrowing`]; this module derives the settings:
//! - `cpuset.cpus` is the set of CPUs of the preferred node that are not exclusive; without a preferred node, the intersection of the
//!   original set and the shared pool.
//! - `cpuset.mems` is the original set, or all nodes of the parent, without the nodes that the cgroup is kept off. The kernel then moves
//!   the pages that its processes have mapped there, and allocates no new ones. A preferred node among them ends.
//!
//! When there is no requirement any more, the original values are restored, as for every knob.
//!
//! # Invariants
//! - The ledger stores the original and the new value before the knob is written.
//! - A set is never widened beyond the original set, and is never empty.

use std::collections::BTreeSet;

use numaward_api as api;
use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue},
};
use numaward_enforce::{EnforceError, EnforcementPlan, SettingsChange};
use numaward_guarantee::{error::AdmissionError, narrowing::Narrowing};
use numaward_model::{EventReport, Settings};
use numaward_topology::{CpuSet, NodeId, NodeSet};

use super::{Core, HeldChange};

/// Changes the requirements on a cgroup and writes the resulting settings. If no requirement remains, the change holds even if the
/// write fails: the original values are restored later.
pub(crate) fn narrow(
    core: &mut Core,
    path: &CgroupPath,
    change: impl FnOnce(&mut Narrowing),
) -> Result<(), AdmissionError> {
    let mut narrowing = core.store.state.narrowing(path);
    change(&mut narrowing);
    let cpus = narrowed_cpus(core, path, &narrowing)?;
    let settings = narrowed_settings(core, path, &narrowing, cpus);
    let is_over = settings.is_none();
    let plan = core.plan(match settings {
        Some(settings) => SettingsChange::Hold(path.clone(), settings),
        None => SettingsChange::Each(vec![(path.clone(), None)]),
    })?;
    match execute_narrowings(core, [(path.clone(), narrowing)], plan) {
        Err(AdmissionError::Failed(failure)) if is_over => {
            tracing::warn!(cgroup = %path, error = %failure, "the original values cannot be restored yet; it is retried");
            Ok(())
        }
        done => done,
    }
}

/// Stores these narrowings and executes the plan that follows from them.
pub(crate) fn execute_narrowings(
    core: &mut Core,
    narrowings: impl IntoIterator<Item = (CgroupPath, Narrowing)>,
    plan: EnforcementPlan,
) -> Result<(), AdmissionError> {
    let mut change = core.begin();
    for (path, narrowing) in narrowings {
        change.state().set_narrowing(&path, narrowing);
        change.core().effects.held.push(HeldChange::Rewritten(path));
    }
    change.execute_plan(plan)
}

/// Removes requirements on a cgroup. If this cannot be planned or stored, the original values become pending restores.
pub(crate) fn widen(core: &mut Core, path: &CgroupPath, change: impl Fn(&mut Narrowing)) {
    if let Err(error) = narrow(core, path, &change) {
        tracing::warn!(cgroup = %path, %error, "the original values of this cgroup cannot be restored yet; it is retried");
        let mut narrowing = core.store.state.narrowing(path);
        change(&mut narrowing);
        let mut settings = core.applied_settings(path).cloned().unwrap_or_default();
        settings.cpus.take_if(|_| !narrowing.is_isolated && narrowing.home.is_none());
        settings.mems.take_if(|_| narrowing.off.is_empty());
        core.store.state.applied.replace_settings(path, settings);
        core.store.state.set_narrowing(path, narrowing);
        core.store_outcome();
    }
}

/// Keeps a cgroup off exactly these nodes from now on. Its preferred node ends if it is one of them.
pub(crate) fn keep_off(core: &mut Core, path: &CgroupPath, off: &NodeSet) -> Result<(), AdmissionError> {
    let home =
        core.store.state.preferred_nodes().get(path).map(|home| home.node).filter(|home| off.contains(*home));
    narrow(core, path, |narrowing| {
        narrowing.off = off.clone();
        narrowing.home.take_if(|home| off.contains(home.node));
    })?;
    if let Some(home) = home {
        let message = format!("The preferred node of {path} ended: the cgroup is kept off node {home}.");
        core.report(Some(path), EventReport::new(api::EventKind::Home, message).detail("step", "ended"));
    }
    Ok(())
}

/// Returns the CPUs of a cgroup with this narrowing; `None` if they are not limited.
pub(crate) fn narrowed_cpus(
    core: &mut Core,
    path: &CgroupPath,
    narrowing: &Narrowing,
) -> Result<Option<CpuSet>, EnforceError> {
    let pool = if narrowing.is_isolated {
        core.policy.isolation(core.mode(), &core.store.state.ledger).1
    } else {
        None
    };
    let found = if pool.is_some() { core.cpus_found(path)? } else { CpuSet::new() };
    Ok(narrowed_cpus_within(core, path, narrowing, &found, pool.as_ref()))
}

/// Like [`narrowed_cpus`], for this original set and this shared pool.
pub(crate) fn narrowed_cpus_within(
    core: &mut Core,
    path: &CgroupPath,
    narrowing: &Narrowing,
    found: &CpuSet,
    pool: Option<&CpuSet>,
) -> Option<CpuSet> {
    let pool = pool.filter(|_| narrowing.is_isolated);
    if let Some(home) = &narrowing.home {
        // If the CPUs of the node cannot be read, the cgroup keeps its present set.
        let at_home = cpus_on_preferred_node(core, path, home.node)
            .ok()
            .or_else(|| preferred_node_cpus(core, path).cloned());
        let at_home = at_home.map(|cpus| pool.map_or_else(|| cpus.clone(), |pool| &cpus & pool));
        if let Some(cpus) = at_home.filter(|cpus| !cpus.is_empty()) {
            return Some(cpus);
        }
    }
    let share = pool.map(|pool| if found.is_empty() { pool.clone() } else { found & pool });
    share.filter(|share| !share.is_empty())
}

/// Returns the settings of a cgroup with this narrowing and these CPUs; `None` if it needs none.
pub(crate) fn narrowed_settings(
    core: &mut Core,
    path: &CgroupPath,
    narrowing: &Narrowing,
    cpus: Option<CpuSet>,
) -> Option<Settings> {
    let mems = (!narrowing.off.is_empty()).then(|| {
        let left = nodes_without_steering(core, path).map(|nodes| &nodes - &narrowing.off);
        // If the nodes cannot be read, or none remains, the cgroup keeps its present set.
        left.ok().filter(|left| !left.is_empty()).or_else(|| core.applied_settings(path)?.mems.clone())
    });
    let settings = Settings { cpus, mems: mems.flatten(), ..Settings::default() };
    (!settings.is_empty()).then_some(settings)
}

/// Returns the nodes that a cgroup may use if the guard keeps it off none.
pub(crate) fn nodes_without_steering(core: &mut Core, path: &CgroupPath) -> Result<NodeSet, String> {
    let found = core.nodes_found(path).map_err(|error| error.to_string())?;
    if !found.is_empty() {
        // The set may contain absent nodes.
        return Ok(&found & &core.policy.machine.node_ids());
    }
    let parent = path.parent().unwrap_or_else(CgroupPath::root);
    match Knob::CpusetMemsEffective.read(&core.hierarchy.dir(&parent)) {
        Ok(KnobValue::Nodes(nodes)) if !nodes.is_empty() => Ok(nodes),
        // The root cgroup has all nodes, and not every kernel provides this file for it.
        _ => Ok(core.policy.machine.node_ids()),
    }
}

/// Removes the preferred node and the steering of ancestors and descendants of a cgroup that is about to get a guarantee. The cgroup
/// itself gets the settings of the guarantee in place of its own.
pub(crate) fn widen_around(core: &mut Core, path: &CgroupPath) {
    widen_matching(core, |_, other| *other != *path && other.overlaps(path));
}

/// Removes the state of cgroups that no longer exist: a new cgroup at the same path has no preferred node and is not steered, and may
/// get a preferred node at once.
pub(crate) fn forget_gone(core: &mut Core) {
    widen_matching(core, |core, path| {
        let known = core.store.state.applied.get(path).map(|record| record.id);
        core.hierarchy.id_of(path).is_ok_and(|id| id.is_none() || id != known)
    });
    let Core { hierarchy, store, .. } = core;
    store.state.left_alone.retain(|path, of| hierarchy.id_of(path).map_or(true, |id| id == Some(of.id)));
}

fn widen_matching(core: &mut Core, is_one: impl Fn(&Core, &CgroupPath) -> bool) {
    let placed = core.store.state.preferred_nodes().keys().chain(core.store.state.steered().keys());
    let these: BTreeSet<CgroupPath> = placed.filter(|path| is_one(core, path)).cloned().collect();
    for path in these {
        widen(core, &path, |narrowing| (narrowing.home, narrowing.off) = (None, NodeSet::new()));
    }
}

/// Returns the CPUs that a cgroup would get on this preferred node. Fails if the guard
/// keeps it off the node, if its cpuset is set, or if its parent may not use the node.
pub(crate) fn cpus_on_preferred_node(
    core: &mut Core,
    path: &CgroupPath,
    node: NodeId,
) -> Result<CpuSet, String> {
    if core.store.state.steered().get(path).is_some_and(|off| off.contains(node)) {
        return Err(format!("it is kept off node {node}"));
    }
    let cpus = core.cpus_found(path).map_err(|error| error.to_string())?;
    let nodes = core.nodes_found(path).map_err(|error| error.to_string())?;
    if !cpus.is_empty() || !nodes.is_empty() {
        return Err("its cpuset is set already".to_owned());
    }
    let above = core.hierarchy.dir(&path.parent().unwrap_or_else(CgroupPath::root));
    // The root cgroup has all, and not every kernel gives it these files.
    if let Ok(KnobValue::Nodes(nodes)) = Knob::CpusetMemsEffective.read(&above)
        && !nodes.is_empty()
        && !nodes.contains(node)
    {
        return Err(format!("its parent may use memory of nodes {nodes} only"));
    }
    let shared = core.shared_cpus_of(node);
    match Knob::CpusetCpusEffective.read(&above) {
        Ok(KnobValue::Cpus(cpus)) if !cpus.is_empty() => Ok(&cpus & &shared),
        _ => Ok(shared),
    }
}

/// Returns the CPUs to which a cgroup is confined because of its preferred node.
pub(crate) fn preferred_node_cpus<'a>(core: &'a Core, path: &CgroupPath) -> Option<&'a CpuSet> {
    core.store
        .state
        .preferred_nodes()
        .contains_key(path)
        .then(|| core.applied_settings(path)?.cpus.as_ref())?
}

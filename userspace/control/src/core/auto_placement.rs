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

use super::Core;

impl Core {
    /// Returns the CPUs of a node that are not exclusive.
    pub(crate) fn shared_cpus_of(&self, node: NodeId) -> CpuSet {
        let of = self.policy.machine.nodes.get(&node).map(|node| node.cpus.clone()).unwrap_or_default();
        &of & self.store.state.ledger.shared_pool()
    }

    /// Returns true if this cgroup, an ancestor or a descendant has a guarantee.
    pub(crate) fn is_near_guarantee(&self, path: &CgroupPath) -> bool {
        self.guaranteed_cgroups().iter().any(|other| other.overlaps(path))
    }

    /// Returns the CPUs that a cgroup would get on this preferred node. Fails if the guard
    /// keeps it off the node, if its cpuset is set, or if its parent may not use the node.
    pub(crate) fn cpus_at_home(&mut self, path: &CgroupPath, node: NodeId) -> Result<CpuSet, String> {
        if self.store.state.steered().get(path).is_some_and(|off| off.contains(node)) {
            return Err(format!("it is kept off node {node}"));
        }
        let cpus = self.cpus_found(path).map_err(|error| error.to_string())?;
        let nodes = self.nodes_found(path).map_err(|error| error.to_string())?;
        if !cpus.is_empty() || !nodes.is_empty() {
            return Err("its cpuset is set already".to_owned());
        }
        let above = self.hierarchy.dir(&path.parent().unwrap_or_else(CgroupPath::root));
        // The root cgroup has all, and not every kernel gives it these files.
        if let Ok(KnobValue::Nodes(nodes)) = Knob::CpusetMemsEffective.read(&above)
            && !nodes.is_empty()
            && !nodes.contains(node)
        {
            return Err(format!("the cgroup above it may use memory of nodes {nodes} only"));
        }
        let shared = self.shared_cpus_of(node);
        match Knob::CpusetCpusEffective.read(&above) {
            Ok(KnobValue::Cpus(cpus)) if !cpus.is_empty() => Ok(&cpus & &shared),
            _ => Ok(shared),
        }
    }

    /// Returns the CPUs to which a cgroup is confined because of its preferred node.
    pub(crate) fn home_cpus(&self, path: &CgroupPath) -> Option<&CpuSet> {
        self.store
            .state
            .preferred_nodes()
            .contains_key(path)
            .then(|| self.applied_settings(path)?.cpus.as_ref())?
    }

    /// Returns the cgroups with a preferred node, for the API.
    pub(crate) fn preferred_nodes(&self) -> Vec<api::AutoPlacedWorkload> {
        let of = |(path, home): (&CgroupPath, &PreferredNode)| api::AutoPlacedWorkload {
            cgroup: path.to_string(),
            node: home.node.0,
            cpus: self.home_cpus(path).map(ToString::to_string).unwrap_or_default(),
            kept: home.is_kept,
            remote_percent_before: home.remote_before / 10,
        };
        self.store.state.preferred_nodes().iter().map(of).collect()
    }

    /// Returns the preferred node of each cgroup that has one.
    pub(crate) fn home_nodes(&self) -> BTreeMap<CgroupPath, NodeId> {
        self.store.state.preferred_nodes().iter().map(|(path, home)| (path.clone(), home.node)).collect()
    }

    /// Assigns this preferred node to a cgroup.
    pub(crate) fn assign_home(
        &mut self,
        path: &CgroupPath,
        home: PreferredNode,
    ) -> Result<(), AdmissionError> {
        let cpus_before = self.home_cpus(path).cloned();
        self.narrow(path, |narrowing| narrowing.home = Some(PreferredNode { cpus_before, ..home }))?;
        // From now on, these CPUs are another program's as well.
        self.note_home(path, |home| home.cpus_before = None);
        Ok(())
    }

    /// Changes the stored state of a preferred node.
    pub(crate) fn note_home(&mut self, path: &CgroupPath, note: impl FnOnce(&mut PreferredNode)) {
        if let Some(home) = self.store.state.preferred_node_mut(path) {
            note(home);
            self.effects.view = true;
            self.store_outcome();
        }
    }

    /// A cgroup that was put back is left alone.
    pub(crate) fn leave_alone(&mut self, path: &CgroupPath, left_alone: PlacementBackoff) {
        self.store.state.left_alone.insert(path.clone(), left_alone);
        self.store_outcome();
    }

    /// Ends the preferred nodes of cgroups whose CPUs another program set while no daemon ran.
    pub(crate) fn end_overridden_homes(&mut self) {
        let homes: Vec<(CgroupPath, Option<CpuSet>)> = self
            .store
            .state
            .preferred_nodes()
            .iter()
            .map(|(path, home)| (path.clone(), home.cpus_before.clone()))
            .collect();
        for (path, before) in homes {
            match self.enforcer().drift(&self.store.state.applied, &path) {
                Ok(drifts) => {
                    let before = before.map(KnobValue::Cpus);
                    // Ours as well: an earlier run died before it wrote the others.
                    let is_theirs = |drift: &&Drift| drift.found != before;
                    for drift in drifts.iter().filter(is_theirs) {
                        self.end_overridden_home(drift);
                    }
                }
                Err(error) if error.is_gone() => {}
                Err(error) => tracing::warn!(cgroup = %path, %error, "cannot be checked for drift"),
            }
        }
    }

    /// Ends the preferred node of a cgroup whose CPUs another program set, and keeps that program's set. Returns true if
    /// it ended; it does not if the cgroup is confined for another reason as well.
    pub(crate) fn end_overridden_home(&mut self, drift: &Drift) -> bool {
        let (path, state) = (&drift.cgroup, &self.store.state);
        let Some(KnobValue::Cpus(found)) =
            drift.found.as_ref().filter(|_| drift.kind == DriftKind::Rewritten)
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
        let plan = self.plan(SettingsChange::Release(path.clone())).map_err(AdmissionError::from);
        let is_written = |plan: &EnforcementPlan| {
            plan.steps().iter().any(|step| step.cgroup == *path && step.knob == drift.knob)
        };
        let ended = match plan {
            // The property of a unit still has the home's.
            Ok(plan) if is_written(&plan) => return false,
            plan => {
                plan.and_then(|plan| self.carry_out_narrowings([(path.clone(), Narrowing::default())], plan))
            }
        };
        if let Err(error) = ended {
            tracing::warn!(cgroup = %path, %error, "its home cannot be taken back, although somebody set its CPUs");
            return false;
        }
        let message = format!("{path} has no home any more: somebody else set its CPUs to {found}.");
        self.report(Some(path), EventReport::new(api::EventKind::Home, message).detail("step", "ended"));
        true
    }
}

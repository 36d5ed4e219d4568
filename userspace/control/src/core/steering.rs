//! Steering: keeping workloads without a guarantee off nodes that may run short of what is promised.
//!
//! Terms: a cgroup is *steered* while its `cpuset.mems` excludes nodes because of that.
//!
//! Algorithm: `cpuset.mems` becomes what it was set to before (all that the parent has, if it was set to nothing) without
//! those nodes. The kernel then moves what its processes have mapped there, and gives it no more. What was found comes
//! back, as for every knob, when the last node is given back.
//!
//! Invariants: what is to be applied and what was found is stored before the knob is written; a set is never widened
//! beyond what was found, and never emptied. A cgroup that is herded as well keeps its CPUs, and the other way round.

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, Value},
};
use numaward_enforce::Change;
use numaward_guarantee::error::AdmissionError;
use numaward_model::Settings;
use numaward_topology::{CpuSet, NodeSet};

use super::{Core, HeldChange};

impl Core {
    /// What a cgroup without a guarantee is to hold with these CPUs: they, or those of its home, and the nodes that it is
    /// steered to. Nothing if that is nothing.
    pub(super) fn beside_promises(&self, path: &CgroupPath, cpus: Option<&CpuSet>) -> Option<Settings> {
        let cpus = cpus.or_else(|| self.home_cpus(path)).cloned();
        let settings = Settings { cpus, mems: self.steered_mems(path), ..Settings::default() };
        (!settings.is_empty()).then_some(settings)
    }

    /// What is applied to a cgroup.
    pub(super) fn applied_settings(&self, path: &CgroupPath) -> Option<&Settings> {
        self.kept.state.applied.get(path).map(|record| &record.settings)
    }

    /// The nodes that a cgroup is steered to.
    pub(super) fn steered_mems(&self, path: &CgroupPath) -> Option<NodeSet> {
        self.kept.state.steered.contains_key(path).then(|| self.applied_settings(path)?.mems.clone())?
    }

    /// The nodes that a cgroup may use when it is steered nowhere.
    pub(crate) fn nodes_without_steering(&mut self, path: &CgroupPath) -> Result<NodeSet, String> {
        let found = self.nodes_found(path).map_err(|error| error.to_string())?;
        if !found.is_empty() {
            // It may name nodes that are not there.
            return Ok(&found & &self.policy.machine.node_ids());
        }
        let parent = path.parent().unwrap_or_else(CgroupPath::root);
        match Knob::CpusetMemsEffective.read(&self.hierarchy.dir(&parent)) {
            Ok(Value::Nodes(nodes)) if !nodes.is_empty() => Ok(nodes),
            // The root cgroup has all of them, and not every kernel gives it the file.
            _ => Ok(self.policy.machine.node_ids()),
        }
    }

    /// Keeps a cgroup off these nodes from now on, and off no others: `mems` is what is left to it. Without `mems`, it is
    /// no longer steered, also where the write fails: it gets back later what was found.
    pub(crate) fn steer(
        &mut self,
        path: &CgroupPath,
        to: Option<(NodeSet, NodeSet)>,
    ) -> Result<(), AdmissionError> {
        let cpus = self.applied_settings(path).and_then(|settings| settings.cpus.clone());
        let (off, mems) = to.unzip();
        let settings = Settings { cpus, mems, ..Settings::default() };
        let plan = self.plan(if off.is_some() {
            Change::Hold(path.clone(), settings)
        } else {
            Change::Each(vec![(path.clone(), (!settings.is_empty()).then_some(settings))])
        })?;
        let mut change = self.begin();
        match off {
            Some(off) => drop(change.kept.state.steered.insert(path.clone(), off)),
            None => drop(change.kept.state.steered.remove(path)),
        }
        let done = change.carry_out(plan);
        self.effects.held.push(HeldChange::Rewritten(path.clone()));
        done
    }

    /// Lets go of what is steered or has a home, and is about to have a guarantee, or to be above or below one. What gets one
    /// itself is given its new settings in place of these.
    pub(super) fn let_go_around(&mut self, path: &CgroupPath) {
        let is_around = |other: &&CgroupPath| *other != path && other.overlaps(path);
        let around: Vec<CgroupPath> = self.kept.state.steered.keys().filter(is_around).cloned().collect();
        for other in around {
            if let Err(error) = self.steer(&other, None) {
                tracing::warn!(cgroup = %other, %error, "cannot be given back the nodes that it was kept off");
            }
        }
        let around: Vec<CgroupPath> = self.kept.state.homes.keys().filter(is_around).cloned().collect();
        for other in around {
            if let Err(error) = self.take_home(&other) {
                tracing::warn!(cgroup = %other, %error, "its home cannot be taken back");
            }
        }
    }
}

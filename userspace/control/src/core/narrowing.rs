//! Narrowing: keeping cgroups without a guarantee to some CPUs, or off some nodes.
//!
//! Problem: CPU isolation, automatic placement and the headroom guard narrow cgroups that asked for nothing, and may
//! choose the same ones: each has to leave alone what another asks for, and two of them must not contradict each
//! other.
//!
//! Algorithm: the state has what each of them asks for in a cgroup, its [`Narrowing`]; what follows is decided here.
//! `cpuset.cpus` becomes the CPUs of its home that are exclusive to no workload; without a home, what is in the
//! shared pool of what it was set to before. `cpuset.mems` becomes what it was set to before, or all that its parent
//! has, without the nodes that it is kept off: the kernel then moves what its processes have mapped there, and gives
//! it no more. A home on such a node ends. What was found comes back, as for every knob, when nothing is asked for
//! any more.
//!
//! Invariants: what is to be applied and what was found is stored before the knob is written; a set is never widened
//! beyond what was found, and never emptied.

use std::collections::BTreeSet;

use numaward_api as api;
use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue},
};
use numaward_enforce::{EnforceError, EnforcementPlan, SettingsChange};
use numaward_guarantee::{error::AdmissionError, narrowing::Narrowing};
use numaward_model::{EventReport, Settings};
use numaward_topology::{CpuSet, NodeSet};

use super::{Core, HeldChange};

impl Core {
    /// Changes what is asked for in a cgroup, and writes what follows. Where nothing is asked for any more, that
    /// holds also if the write fails: the cgroup gets back later what was found.
    pub(crate) fn narrow(
        &mut self,
        path: &CgroupPath,
        change: impl FnOnce(&mut Narrowing),
    ) -> Result<(), AdmissionError> {
        let mut narrowing = self.store.state.narrowing(path);
        change(&mut narrowing);
        let cpus = self.narrowed_cpus(path, &narrowing)?;
        let settings = self.narrowed_settings(path, &narrowing, cpus);
        let is_over = settings.is_none();
        let plan = self.plan(match settings {
            Some(settings) => SettingsChange::Hold(path.clone(), settings),
            None => SettingsChange::Each(vec![(path.clone(), None)]),
        })?;
        match self.carry_out_narrowings([(path.clone(), narrowing)], plan) {
            Err(AdmissionError::Failed(failure)) if is_over => {
                tracing::warn!(cgroup = %path, error = %failure, "the cgroup gets back later what it had");
                Ok(())
            }
            done => done,
        }
    }

    /// Changes the narrowings of these cgroups, with a plan for what follows.
    pub(super) fn carry_out_narrowings(
        &mut self,
        narrowings: impl IntoIterator<Item = (CgroupPath, Narrowing)>,
        plan: EnforcementPlan,
    ) -> Result<(), AdmissionError> {
        let mut change = self.begin();
        for (path, narrowing) in narrowings {
            change.store.state.set_narrowing(&path, narrowing);
            change.effects.held.push(HeldChange::Rewritten(path));
        }
        change.carry_out(plan)
    }

    /// Asks for less in a cgroup, also where that cannot be planned or stored.
    pub(super) fn widen(&mut self, path: &CgroupPath, change: impl Fn(&mut Narrowing)) {
        if let Err(error) = self.narrow(path, &change) {
            tracing::warn!(cgroup = %path, %error, "the cgroup cannot be given back what it had");
            let mut narrowing = self.store.state.narrowing(path);
            change(&mut narrowing);
            self.store.state.set_narrowing(path, narrowing);
        }
    }

    /// Keeps a cgroup off these nodes from now on, and off no others; its home ends if it is on one of them.
    pub(crate) fn keep_off(&mut self, path: &CgroupPath, off: &NodeSet) -> Result<(), AdmissionError> {
        let home = self
            .store
            .state
            .preferred_nodes()
            .get(path)
            .map(|home| home.node)
            .filter(|home| off.contains(*home));
        self.narrow(path, |narrowing| {
            narrowing.off = off.clone();
            narrowing.home.take_if(|home| off.contains(home.node));
        })?;
        if let Some(home) = home {
            let message = format!("{path} has no home any more: it is kept off node {home}.");
            self.report(Some(path), EventReport::new(api::EventKind::Home, message).detail("step", "ended"));
        }
        Ok(())
    }

    /// The CPUs to which a cgroup with this narrowing is kept; `None` if to none in particular.
    pub(super) fn narrowed_cpus(
        &mut self,
        path: &CgroupPath,
        narrowing: &Narrowing,
    ) -> Result<Option<CpuSet>, EnforceError> {
        let pool = if narrowing.is_isolated { self.pool_of_isolated() } else { None };
        let found = if pool.is_some() { self.cpus_found(path)? } else { CpuSet::new() };
        Ok(self.narrowed_cpus_within(path, narrowing, &found, pool.as_ref()))
    }

    /// Likewise, for a cgroup that was found with these CPUs, where CPU isolation leaves these to it.
    pub(super) fn narrowed_cpus_within(
        &mut self,
        path: &CgroupPath,
        narrowing: &Narrowing,
        found: &CpuSet,
        pool: Option<&CpuSet>,
    ) -> Option<CpuSet> {
        let pool = pool.filter(|_| narrowing.is_isolated);
        if let Some(home) = &narrowing.home {
            // Where they cannot be found out, those that it has.
            let at_home = self.cpus_at_home(path, home.node).ok().or_else(|| self.home_cpus(path).cloned());
            let at_home = at_home.map(|cpus| pool.map_or_else(|| cpus.clone(), |pool| &cpus & pool));
            if let Some(cpus) = at_home.filter(|cpus| !cpus.is_empty()) {
                return Some(cpus);
            }
        }
        let share = pool.map(|pool| if found.is_empty() { pool.clone() } else { found & pool });
        share.filter(|share| !share.is_empty())
    }

    /// What a cgroup with this narrowing is to hold, with these CPUs; `None` if nothing.
    pub(super) fn narrowed_settings(
        &mut self,
        path: &CgroupPath,
        narrowing: &Narrowing,
        cpus: Option<CpuSet>,
    ) -> Option<Settings> {
        let mems = (!narrowing.off.is_empty()).then(|| {
            let left = self.nodes_without_steering(path).map(|nodes| &nodes - &narrowing.off);
            // Where they cannot be found out, or none is left, those that it has.
            left.ok().filter(|left| !left.is_empty()).or_else(|| self.applied_settings(path)?.mems.clone())
        });
        let settings = Settings { cpus, mems: mems.flatten(), ..Settings::default() };
        (!settings.is_empty()).then_some(settings)
    }

    /// What is applied to a cgroup.
    pub(super) fn applied_settings(&self, path: &CgroupPath) -> Option<&Settings> {
        self.store.state.applied.get(path).map(|record| &record.settings)
    }

    /// The nodes that a cgroup may use when the guard keeps it off none.
    pub(crate) fn nodes_without_steering(&mut self, path: &CgroupPath) -> Result<NodeSet, String> {
        let found = self.nodes_found(path).map_err(|error| error.to_string())?;
        if !found.is_empty() {
            // It may name nodes that are not there.
            return Ok(&found & &self.policy.machine.node_ids());
        }
        let parent = path.parent().unwrap_or_else(CgroupPath::root);
        match Knob::CpusetMemsEffective.read(&self.hierarchy.dir(&parent)) {
            Ok(KnobValue::Nodes(nodes)) if !nodes.is_empty() => Ok(nodes),
            // The root cgroup has all of them, and not every kernel gives it the file.
            _ => Ok(self.policy.machine.node_ids()),
        }
    }

    /// Lets go of what has a home or is kept off nodes, and is about to have a guarantee, or to be above or below
    /// one. What gets one itself is given its new settings in place of these.
    pub(super) fn widen_around(&mut self, path: &CgroupPath) {
        self.widen_matching(|_, other| *other != *path && other.overlaps(path));
    }

    /// Lets go of cgroups that are gone: a new one of the same path has neither a home nor nodes that it is kept off,
    /// and may get a home at once.
    pub(crate) fn forget_gone(&mut self) {
        self.widen_matching(|core, path| {
            let known = core.store.state.applied.get(path).map(|record| record.id);
            core.hierarchy.id_of(path).is_ok_and(|id| id.is_none() || id != known)
        });
        let Self { hierarchy, store, .. } = self;
        store.state.left_alone.retain(|path, of| hierarchy.id_of(path).map_or(true, |id| id == Some(of.id)));
    }

    fn widen_matching(&mut self, is_one: impl Fn(&Self, &CgroupPath) -> bool) {
        let placed = self.store.state.preferred_nodes().keys().chain(self.store.state.steered().keys());
        let these: BTreeSet<CgroupPath> = placed.filter(|path| is_one(self, path)).cloned().collect();
        for path in these {
            self.widen(&path, |narrowing| (narrowing.home, narrowing.off) = (None, NodeSet::new()));
        }
    }
}

//! Guarantees that the configuration declares for workloads that do not exist yet.
//!
//! # Problem
//! A workload gets its declared guarantee when its cgroup appears, without a request. It may fit only later, and the
//! declaration may be different after a restart or a reload.
//!
//! # Terms
//! - *rule*: one declared guarantee.
//! - *waiting* cgroup: a rule matches it, but it has no guarantee, because the engine refused it or a cgroup above or below has
//!   one.
//!
//! # Algorithm
//! A new cgroup gets the guarantee of the first rule that matches, or waits. Waiting cgroups are retried when
//! resources were freed or the machine changed; after a rule was rejected, its other waiting cgroups are skipped in
//! this round.
//!
//! On start, and when the rules are replaced, guarantees without a rule are released. Guarantees with a changed rule are changed before any other
//! cgroup is served; one that cannot be changed stays as it is and is retried.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use numaward_api as api;
use numaward_api::EventKind;
use numaward_cgroup::{self as cgroup, CgroupPath, EXEC_PARENT};
use numaward_config::enforcement::DeclaredGuarantee;
use numaward_enforce as enforce;
use numaward_guarantee::{error::AdmissionError, request::Request, state::Guarantee};
use numaward_model::EventReport;

use super::{Controller, ControllerEvent};
use crate::core::{Attempt, Core, admission, release, resize};

/// The rules and the waiting cgroups.
#[derive(Debug, Default)]
pub(super) struct Declarations {
    rules: Vec<DeclaredGuarantee>,
    waiting: BTreeMap<CgroupPath, WaitingCgroup>,
}

#[derive(Debug)]
struct WaitingCgroup {
    rule: usize,
    /// Reason of the refusal; `None` if a guarantee of another cgroup is in the way.
    refused: Option<Refusal>,
}

#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    text: String,
    rejection: Option<api::Rejection>,
}

impl Refusal {
    /// Returns true if the reasons are equal except for the amount of free resources, which changes often.
    fn is_same_except_free(&self, other: &Self) -> bool {
        let (Some(ours), Some(theirs)) = (&self.rejection, &other.rejection) else {
            return self == other;
        };
        let what = |of: &api::Shortfall| (of.node, of.resource.clone(), of.requested);
        ours.reason == theirs.reason
            && ours.shortfalls.iter().map(what).eq(theirs.shortfalls.iter().map(what))
    }
}

impl Declarations {
    pub(super) fn new(rules: &[DeclaredGuarantee]) -> Self {
        Self { rules: rules.to_vec(), waiting: BTreeMap::new() }
    }

    /// Replaces the rules. Waiting cgroups with the same rule keep the reason of their refusal.
    pub(super) fn replace(&mut self, rules: Vec<DeclaredGuarantee>) {
        let old = mem::replace(&mut self.rules, rules);
        for (path, mut waiting) in mem::take(&mut self.waiting) {
            if let Some((rule, _)) = self.rule_of(&path)
                && old.get(waiting.rule) == self.rules.get(rule)
            {
                waiting.rule = rule;
                self.waiting.insert(path, waiting);
            }
        }
    }

    /// Returns the first rule that matches a cgroup, with the target for the request.
    fn rule_of(&self, path: &CgroupPath) -> Option<(usize, api::Target)> {
        // Commands have the guarantee that they were started with.
        if path.components().next() == Some(EXEC_PARENT) {
            return None;
        }
        let unit = match enforce::Owner::under_systemd(path) {
            enforce::Owner::Systemd(unit) => Some(unit),
            enforce::Owner::Cgroupfs => None,
        };
        self.rules.iter().enumerate().find_map(|(index, rule)| {
            if rule.cgroup.as_ref().is_some_and(|pattern| pattern.matches(path)) {
                return Some((index, api::Target::Cgroup(path.to_string())));
            }
            let unit =
                unit.as_ref().filter(|unit| rule.unit.as_ref().is_some_and(|pattern| pattern.matches(unit)));
            Some((index, api::Target::Unit(unit?.clone())))
        })
    }

    /// Returns the waiting cgroups that were refused.
    pub(super) fn waiting(&self) -> Vec<api::PendingGuarantee> {
        let refused = self.waiting.iter().filter_map(|(path, waiting)| {
            let reason = waiting.refused.as_ref()?;
            Some(api::PendingGuarantee {
                cgroup: path.to_string(),
                declared: self.rules.get(waiting.rule)?.pattern().to_owned(),
                reason: reason.text.clone(),
                rejection: reason.rejection.clone(),
            })
        });
        refused.collect()
    }
}

impl Controller for Declarations {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Cgroups(events) => self.follow(core, events),
            ControllerEvent::CapacityFreed => self.retry_waiting(core),
            _ => {}
        }
    }
}

impl Declarations {
    /// Releases guarantees without a rule and serves the cgroups with one. Returns the first error after which the caller has to try
    /// again; all are logged.
    pub(super) fn reconcile(&mut self, core: &mut Core) -> Result<(), AdmissionError> {
        let mut result = Ok(());
        let is_gone = |held: &Guarantee| held.declared.is_some() && self.rule_of(&held.cgroup).is_none();
        let gone = core.store.state.guarantees.iter().filter(|(_, held)| is_gone(held));
        let gone: Vec<String> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            tracing::info!(name, "the guarantee is no longer declared and is released");
            if let Err(error) = release::release(core, &name) {
                tracing::error!(name, %error, "the guarantee cannot be released");
                // A release that has begun is retried.
                if !matches!(error, AdmissionError::Releasing(_)) {
                    let problem = format!("the guarantee {name:?} cannot be released: {error}");
                    result = result.and(Err(AdmissionError::Declared(problem)));
                }
            }
        }
        let cgroups = if self.rules.is_empty() { Ok(Vec::new()) } else { core.hierarchy.walk() };
        match cgroups {
            Ok(cgroups) => {
                let there: BTreeSet<CgroupPath> = cgroups.into_iter().map(|cgroup| cgroup.path).collect();
                self.waiting.retain(|path, _| there.contains(path));
                for path in &there {
                    self.note_declared(path);
                }
            }
            Err(error) => {
                tracing::error!(%error, "the cgroup hierarchy cannot be read: running workloads do not get their declared guarantees");
                let problem = format!("the cgroup hierarchy cannot be read: {error}");
                result = result.and(Err(AdmissionError::Declared(problem)));
            }
        }
        self.retry_waiting(core);
        result
    }

    /// Handles created and removed cgroups.
    pub(super) fn follow(&mut self, core: &mut Core, events: &[cgroup::CgroupEvent]) {
        let mut is_new = false;
        for event in events {
            core.effects.isolate |= core.isolation.concerns(event);
            match event {
                cgroup::CgroupEvent::Added(cgroup) => is_new |= self.note_declared(&cgroup.path),
                cgroup::CgroupEvent::Removed(cgroup) => {
                    if self.waiting.remove(&cgroup.path).is_some() {
                        core.effects.view = true;
                    }
                }
            }
        }
        core.effects.declared |= is_new;
    }

    /// Adds a cgroup if a rule matches it. Returns true in that case.
    fn note_declared(&mut self, path: &CgroupPath) -> bool {
        let Some((rule, _)) = self.rule_of(path) else { return false };
        self.waiting.entry(path.clone()).or_insert(WaitingCgroup { rule, refused: None });
        true
    }

    /// Returns the names of the guarantees with a changed rule, by cgroup.
    fn changed(&self, core: &Core) -> BTreeMap<CgroupPath, String> {
        let state = &core.store.state;
        let is_changed = |name: &str, held: &Guarantee| {
            let rule = || self.rule_of(&held.cgroup).and_then(|(rule, _)| self.rules.get(rule));
            held.declared.is_some() && !state.releasing.contains(name) && rule() != held.declared.as_ref()
        };
        let changed = state.guarantees.iter().filter(|(name, held)| is_changed(name, held));
        changed.map(|(name, held)| (held.cgroup.clone(), name.clone())).collect()
    }

    /// Tries to admit the waiting cgroups.
    pub(super) fn retry_waiting(&mut self, core: &mut Core) {
        core.effects.refused_declared.clear();
        let changed = self.changed(core);
        let (first, rest): (Vec<_>, Vec<_>) =
            self.waiting.keys().cloned().partition(|path| changed.contains_key(path));
        let mut rejected = BTreeSet::new();
        for path in first.into_iter().chain(rest) {
            let Some((rule, target)) = self.rule_of(&path) else { continue };
            let Some(declared) = self.rules.get(rule) else { continue };
            let changed = changed.get(&path);
            if changed.is_none() && core.store.state.has_guarantee_around(&path) {
                self.waiting.insert(path, WaitingCgroup { rule, refused: None });
                continue;
            }
            if rejected.contains(&rule) && self.waiting.get(&path).is_some_and(|it| it.refused.is_some()) {
                continue;
            }
            let request = Request::declared(declared, target).map_err(AdmissionError::from);
            if let Some(name) = changed {
                let followed =
                    request.and_then(|request| resize::update_declared(core, name, &request, &path));
                if matches!(followed, Err(AdmissionError::Rejected(..))) {
                    rejected.insert(rule);
                }
                self.note_result(core, &path, rule, followed.err());
                continue;
            }
            let is_known = self.waiting.get(&path).is_some_and(|waiting| waiting.refused.is_some());
            let attempt = if is_known { Attempt::Again } else { Attempt::First };
            let result = request.and_then(|request| {
                let result = admission::admit_at(core, &request, &path, false, attempt).map(drop);
                if matches!(result, Err(AdmissionError::Rejected(..))) {
                    core.effects.refused_declared.push(request);
                }
                result
            });
            if matches!(result, Err(AdmissionError::Rejected(..))) {
                rejected.insert(rule);
            }
            self.note_result(core, &path, rule, result.err());
        }
        core.metrics.declared(
            core.store.state.guarantees.values().filter(|held| held.declared.is_some()).count(),
            self.waiting.values().filter(|waiting| waiting.refused.is_some()).count(),
        );
    }

    fn note_result(
        &mut self,
        core: &mut Core,
        path: &CgroupPath,
        rule: usize,
        refused: Option<AdmissionError>,
    ) {
        let Some(refused) = refused.filter(|_| matches!(core.hierarchy.id_of(path), Ok(Some(_)))) else {
            self.waiting.remove(path);
            return;
        };
        let rejection = match &refused {
            AdmissionError::Rejected(rejection, _) => Some(rejection.clone()),
            _ => None,
        };
        let mut text = refused.to_string();
        if core.store.state.guarantees.values().any(|held| held.cgroup == *path) {
            text += "; it keeps its present guarantee";
        }
        let reason = Refusal { text, rejection };
        let before = self.waiting.get(path).and_then(|waiting| waiting.refused.as_ref());
        if !before.is_some_and(|before| before.is_same_except_free(&reason)) {
            let pattern = self.rules.get(rule).map_or("", DeclaredGuarantee::pattern);
            let message =
                format!("{path}: the guarantee declared for {pattern} cannot be admitted: {}", reason.text);
            let report = EventReport::new(EventKind::GuaranteeRefused, message);
            core.report(Some(path), report.detail("declared", pattern));
        }
        let has_changed = before != Some(&reason);
        self.waiting.insert(path.clone(), WaitingCgroup { rule, refused: Some(reason) });
        if has_changed {
            core.effects.view = true;
        }
    }
}

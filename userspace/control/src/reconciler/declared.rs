//! Guarantees that are declared in the configuration, for workloads yet to come.
//!
//! Problem: a workload is to have its guarantee from the moment its cgroup appears, without anybody asking; it
//! may not fit now and fit later; and the configuration may say something else after a restart.
//!
//! Terms: a *rule* is one declared guarantee. A cgroup *waits* if a rule matches and it does not hold an
//! allocation: because it was refused, or because one above or below it holds one.
//!
//! Algorithm: a cgroup that appears is given what the first rule that matches says, or waits. One that waits is tried
//! again when something is freed or the machine changed; within one such round, a rule that the engine rejected
//! once is not asked for again. At the start, allocations whose rule is gone are released. Those whose rule says something else
//! follow it before any other cgroup is given anything; one that cannot keeps what it holds, and is tried again.

use std::collections::{BTreeMap, BTreeSet};

use numaward_api as api;
use numaward_api::EventKind;
use numaward_cgroup::{self as cgroup, CgroupPath, EXEC_PARENT};
use numaward_config::enforcement::DeclaredGuarantee;
use numaward_enforce as enforce;
use numaward_guarantee::{error::AdmissionError, request::Request, state::Guarantee};
use numaward_model::EventReport;

use crate::core::{Attempt, Core};

/// What is declared, and who waits for it.
#[derive(Debug, Default)]
pub(super) struct Declarations {
    rules: Vec<DeclaredGuarantee>,
    waiting: BTreeMap<CgroupPath, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    rule: usize,
    /// Why it was refused; `None` if another allocation is in the way.
    refused: Option<Reason>,
}

#[derive(Debug, PartialEq, Eq)]
struct Reason {
    text: String,
    rejection: Option<api::Rejection>,
}

impl Reason {
    /// Whether it is the same but for how much is free, which may change at any time.
    fn is_as(&self, other: &Self) -> bool {
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

    /// Whether anything is declared.
    pub(super) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The first rule that matches a cgroup, and the target that it makes.
    fn rule_of(&self, path: &CgroupPath) -> Option<(usize, api::Target)> {
        // Commands have what they were started with.
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

    /// Those that were refused.
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

impl Declarations {
    /// Releases what is not declared any more, and gives what is.
    pub(super) fn reconcile(&mut self, core: &mut Core) {
        let is_gone = |held: &Guarantee| held.declared.is_some() && self.rule_of(&held.cgroup).is_none();
        let gone = core.store.state.guarantees.iter().filter(|(_, held)| is_gone(held));
        let gone: Vec<String> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            tracing::info!(name, "no longer declared: to be released");
            if let Err(error) = core.release(&name) {
                tracing::error!(name, %error, "cannot be released");
            }
        }
        if self.is_empty() {
            return;
        }
        match core.hierarchy.walk() {
            Ok(cgroups) => {
                let there: BTreeSet<CgroupPath> = cgroups.into_iter().map(|cgroup| cgroup.path).collect();
                self.waiting.retain(|path, _| there.contains(path));
                for path in &there {
                    self.note_declared(path);
                }
            }
            Err(error) => tracing::error!(%error, "declared guarantees cannot be given to what runs"),
        }
        self.try_waiting(core);
    }

    /// Takes note of cgroups that came or went.
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

    /// A cgroup is there; `true` if a guarantee is declared for it.
    fn note_declared(&mut self, path: &CgroupPath) -> bool {
        let Some((rule, _)) = self.rule_of(path) else { return false };
        self.waiting.entry(path.clone()).or_insert(Waiting { rule, refused: None });
        true
    }

    /// The cgroups whose guarantee was declared in another way, and its name.
    fn changed(&self, core: &Core) -> BTreeMap<CgroupPath, String> {
        let state = &core.store.state;
        let is_changed = |name: &str, held: &Guarantee| {
            let rule = || self.rule_of(&held.cgroup).and_then(|(rule, _)| self.rules.get(rule));
            held.declared.is_some() && !state.releasing.contains(name) && rule() != held.declared.as_ref()
        };
        let changed = state.guarantees.iter().filter(|(name, held)| is_changed(name, held));
        changed.map(|(name, held)| (held.cgroup.clone(), name.clone())).collect()
    }

    /// Tries to give those that wait what is declared for them.
    pub(super) fn try_waiting(&mut self, core: &mut Core) {
        core.effects.no_room.clear();
        let changed = self.changed(core);
        let (first, rest): (Vec<_>, Vec<_>) =
            self.waiting.keys().cloned().partition(|path| changed.contains_key(path));
        let mut rejected = BTreeSet::new();
        for path in first.into_iter().chain(rest) {
            let Some((rule, target)) = self.rule_of(&path) else { continue };
            let Some(declared) = self.rules.get(rule) else { continue };
            let changed = changed.get(&path);
            if changed.is_none() && core.store.state.has_guarantee_around(&path) {
                self.waiting.insert(path, Waiting { rule, refused: None });
                continue;
            }
            if rejected.contains(&rule) && self.waiting.get(&path).is_some_and(|it| it.refused.is_some()) {
                continue;
            }
            let request = Request::declared(declared, target).map_err(AdmissionError::from);
            if let Some(name) = changed {
                let followed = request.and_then(|request| core.follow_rule(name, &request, &path));
                if matches!(followed, Err(AdmissionError::Rejected(..))) {
                    rejected.insert(rule);
                }
                self.note_result(core, &path, rule, followed.err());
                continue;
            }
            let is_known = self.waiting.get(&path).is_some_and(|waiting| waiting.refused.is_some());
            let attempt = if is_known { Attempt::Again } else { Attempt::First };
            let result = request.and_then(|request| {
                let result = core.admit_at(&request, &path, false, attempt).map(drop);
                if matches!(result, Err(AdmissionError::Rejected(..))) {
                    core.effects.no_room.push(request);
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
            text += "; it keeps what it holds";
        }
        let reason = Reason { text, rejection };
        let before = self.waiting.get(path).and_then(|waiting| waiting.refused.as_ref());
        if !before.is_some_and(|before| before.is_as(&reason)) {
            let pattern = self.rules.get(rule).map_or("", DeclaredGuarantee::pattern);
            let message =
                format!("{path}: the guarantee declared for {pattern} cannot be given: {}", reason.text);
            let report = EventReport::new(EventKind::GuaranteeRefused, message);
            core.report(Some(path), report.detail("declared", pattern));
        }
        let is_news = before != Some(&reason);
        self.waiting.insert(path.clone(), Waiting { rule, refused: Some(reason) });
        if is_news {
            core.effects.view = true;
        }
    }
}

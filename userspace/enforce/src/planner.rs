//! Planning: from a change, the applied settings and the state of the kernel to the writes.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    os::unix::fs::MetadataExt as _,
    sync::Arc,
    time::Instant,
};

use numaward_cgroup::{
    CgroupPath, is_trusted_user,
    knob::{Knob, KnobError, KnobValue, Limit, Partition, Quota},
    read,
};
use numaward_model::{Settings, Values};
use numaward_topology::{Bytes, CpuSet, NodeSet};

use super::{
    applied::{AppliedSettings, Owner, Record, id_of},
    backend::{covers, unset},
    controllers::EnabledControllers,
    drift::{Drift, DriftKind},
    enforcer::Enforcer,
    error::EnforceError,
    order::{WriteStep, ordered},
    plan::{EnforcementPlan, SettingsChange},
    systemd::property,
    thread_masks::{ThreadMasks, fair_share},
};

const PROTECTIONS: [Knob; 2] = [Knob::MemoryMin, Knob::MemoryLow];
const NO_PROTECTION: Limit = Limit::Bytes(Bytes(0));

fn limit(values: &Values, knob: Knob) -> Option<Limit> {
    match values.0.get(&knob) {
        Some(KnobValue::Limit(limit)) => Some(*limit),
        _ => None,
    }
}

impl Enforcer {
    /// Plans a change. Reads the kernel and writes nothing.
    pub fn plan(
        &self,
        applied: &AppliedSettings,
        change: &SettingsChange,
    ) -> Result<EnforcementPlan, EnforceError> {
        let mut next = applied.clone();
        let mut affected: BTreeSet<CgroupPath> =
            change.cgroups(applied).iter().flat_map(CgroupPath::ancestors).collect();
        affected.remove(&CgroupPath::root());
        for path in &affected {
            self.forget_if_gone(&mut next, path);
        }
        match change {
            SettingsChange::Hold(path, settings) => {
                self.hold(&mut next, path, settings)?;
                self.check_available(path, settings)?;
            }
            SettingsChange::HoldAll(holds) => {
                for (path, settings) in holds {
                    self.hold(&mut next, path, settings)?;
                    self.check_available(path, settings)?;
                }
            }
            SettingsChange::Release(path) => next.replace_settings(path, Settings::default()),
            SettingsChange::Each(changes) => {
                for (path, settings) in changes {
                    match settings {
                        Some(settings) => self.hold(&mut next, path, settings)?,
                        None => next.replace_settings(path, Settings::default()),
                    }
                }
            }
            SettingsChange::Upkeep => {}
        }

        let wanted = self.wanted(&next, &affected)?;
        self.note_claims(&next, &wanted);
        let mut plan = EnforcementPlan {
            base: applied.clone(),
            intent: next.clone(),
            outcome: next,
            enable: EnabledControllers::default(),
            steps: Vec::new(),
            kept: Vec::new(),
            drop_ins: Vec::new(),
            owed: change.pending_cpus_beside(applied),
            holds: match change {
                SettingsChange::Hold(path, settings) => vec![(path.clone(), settings.clone())],
                SettingsChange::HoldAll(holds) => holds.clone(),
                SettingsChange::Release(_) | SettingsChange::Each(_) | SettingsChange::Upkeep => Vec::new(),
            },
            is_undone: matches!(change, SettingsChange::Hold(..)),
            thread_time: self.cgroupfs.options.thread_time,
            unread_cgroups: 0,
        };
        let has_cpus = |values: &Values| values.0.contains_key(&Knob::CpusetCpus);
        let is_narrowed = |path| plan.outcome.get(path).is_some_and(|record| has_cpus(&record.written));
        plan.unread_cgroups =
            wanted.iter().filter(|(path, values)| has_cpus(values) && !is_narrowed(path)).count();
        for (path, values) in wanted {
            match self.enter(&mut plan, path, values) {
                // The CPUs stay pending.
                Err(_) if plan.owed.contains(path) => {}
                // The cgroup vanished since it was found.
                Err(error) if error.is_gone() && plan.holds.iter().all(|(held, _)| held != path) => {}
                entered => entered?,
            }
        }
        let held = &plan.outcome;
        let is_ancestor = |path: &CgroupPath| held.get(path).is_none_or(|record| record.settings.is_empty());
        // Not before the partitions of siblings have ended.
        let is_owed = |step: &WriteStep| {
            let asks = held.get(&step.cgroup).is_some_and(|record| record.settings.cpus.is_some());
            let is_owed = || applied.get(&step.cgroup).is_some_and(|record| record.has_pending_cpus());
            step.knob == Knob::CpusetCpus && !asks && is_owed()
        };
        let (owed, steps) = std::mem::take(&mut plan.steps).into_iter().partition(is_owed);
        plan.steps = ordered(steps, is_ancestor);
        plan.steps.extend(ordered(owed, is_ancestor));
        Ok(plan)
    }

    /// Removes the values of a cgroup that is gone: a new one at the same path has none of them. The properties of a
    /// unit outlive its cgroup.
    fn forget_if_gone(&self, applied: &mut AppliedSettings, path: &CgroupPath) {
        let id = id_of(&path.dir(self.root()));
        let known = applied.records.get(path).map(|record| record.id);
        if id.is_none() || known.is_some_and(|known| id != Some(known)) {
            self.forget_claims(path);
        }
        let Some(record) = applied.records.get(path).filter(|record| id != Some(record.id)) else { return };
        match (&record.owner, id) {
            (Owner::Cgroupfs, _) => applied.records.remove(path),
            (Owner::Systemd(_), Some(id)) => {
                let Some(record) = applied.records.get_mut(path) else { return };
                record.id = id;
                let lasting = |knob: &Knob| property(*knob).is_some();
                for values in [&mut record.written, &mut record.found, &mut record.replaced] {
                    values.0.retain(|knob, _| lasting(knob));
                }
            }
            (Owner::Systemd(_), None) => {}
        }
    }

    /// Removes the cached claims of a cgroup that is gone.
    fn forget_claims(&self, path: &CgroupPath) {
        let Some(parent) = path.parent() else { return };
        let mut claims = self.claims.lock();
        for knob in PROTECTIONS {
            if let Some(seen) = claims.get_mut(&(parent.clone(), knob)) {
                seen.remove(path);
            }
        }
    }

    fn hold(
        &self,
        applied: &mut AppliedSettings,
        path: &CgroupPath,
        settings: &Settings,
    ) -> Result<(), EnforceError> {
        settings.check()?;
        if path.is_root() {
            return Err(EnforceError::Root);
        }
        let id = self.id_of(path)?;
        let owner = self.owner(path);
        if let (Some(systemd), Owner::Systemd(unit)) = (&self.systemd, &owner) {
            systemd.check_owns(unit, path)?;
        }
        let mut record = match applied.get(path) {
            Some(record) => Record::clone(record),
            None => Record::new(id, owner),
        };
        if self.is_given_up(&record, path, Knob::CpusetCpus) {
            record.remove(Knob::CpusetCpus);
        }
        applied.update(path, Record { settings: settings.clone(), ..record });
        Ok(())
    }

    /// Returns the values that each of these cgroups is to hold.
    fn wanted<'a>(
        &self,
        applied: &AppliedSettings,
        affected: &'a BTreeSet<CgroupPath>,
    ) -> Result<BTreeMap<&'a CgroupPath, Values>, EnforceError> {
        let mut deepest_first: Vec<_> = affected.iter().collect();
        deepest_first.sort_by_key(|path| Reverse(path.components().count()));
        let mut wanted: BTreeMap<&CgroupPath, Values> = BTreeMap::new();
        for path in deepest_first {
            let below =
                || applied.records.range(path.clone()..).skip(usize::from(applied.get(path).is_some()));
            let below = || below().take_while(|(other, _)| path.contains(other));
            let settings = applied.get(path).map(|record| &record.settings);
            let mut values = settings.map(Settings::values).unwrap_or_default();
            if let Some(Settings { cpus: Some(cpus), .. }) =
                settings.filter(|settings| settings.has_partition())
                && self.needs_exclusive(path)?
            {
                values.0.insert(Knob::CpusetCpusExclusive, KnobValue::Cpus(cpus.clone()));
            }
            let mut children = below().filter(|(other, _)| path.is_parent_of(other));
            if children.any(|(_, record)| record.settings.lifts_parent_quota()) {
                values.0.insert(Knob::CpuMax, KnobValue::Quota(Quota::Max));
            }
            for knob in PROTECTIONS {
                if !below().any(|(_, record)| {
                    record.settings.protection(knob).is_some_and(|claim| claim > NO_PROTECTION)
                }) {
                    continue;
                }
                let KnobValue::Limit(found) = self.found(applied, path, knob)? else { continue };
                let floor = limit(&values, knob);
                let children = below().filter(|(other, _)| other.parent().as_ref() == Some(path));
                let beside = children.filter_map(|(_, record)| record.settings.sibling_claim(knob)).max();
                let claimed = if self.is_delegated(path)? {
                    let claim =
                        |settings: &Settings| [settings.protection(knob), settings.sibling_claim(knob)];
                    let claims = below().flat_map(|(_, record)| claim(&record.settings)).flatten();
                    claims.fold(NO_PROTECTION, Limit::saturating_add)
                } else {
                    self.claimed(applied, &wanted, path, knob)?
                        .saturating_add(beside.unwrap_or(NO_PROTECTION))
                };
                let needed = claimed.max(floor.unwrap_or(found));
                if floor.is_some() || needed > found {
                    values.0.insert(knob, KnobValue::Limit(needed));
                }
            }
            let exclusive = below()
                .filter(|(_, record)| record.settings.has_partition())
                .filter_map(|(other, record)| {
                    let values = wanted.get(other).unwrap_or(&record.written);
                    values.0.get(&Knob::CpusetCpusExclusive)
                })
                .fold(CpuSet::new(), |all, value| match value {
                    KnobValue::Cpus(cpus) => &all | cpus,
                    _ => all,
                });
            if !exclusive.is_empty()
                && let KnobValue::Cpus(found) = self.found(applied, path, Knob::CpusetCpusExclusive)?
            {
                values.0.insert(Knob::CpusetCpusExclusive, KnobValue::Cpus(&found | &exclusive));
            }
            wanted.insert(path, values);
        }
        Ok(wanted)
    }

    /// Returns true if the children of a cgroup belong to a user without privileges: only the claims of guarantees count there, because the
    /// owner could claim all memory of the host.
    fn is_delegated(&self, path: &CgroupPath) -> Result<bool, EnforceError> {
        let found = std::fs::metadata(path.dir(self.root()));
        let found = found.map_err(|source| EnforceError::List { cgroup: path.clone(), source })?;
        Ok(!is_trusted_user(found.uid()))
    }

    /// Returns the sum of the claims of a cgroup's children.
    fn claimed(
        &self,
        applied: &AppliedSettings,
        wanted: &BTreeMap<&CgroupPath, Values>,
        parent: &CgroupPath,
        knob: Knob,
    ) -> Result<Limit, EnforceError> {
        let mut claims = self.claims.lock();
        let seen = match claims.entry((parent.clone(), knob)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.read_claims(parent, knob)?),
        };
        let mut ours: HashMap<&CgroupPath, Limit> = HashMap::new();
        let held = applied.records.range(parent.clone()..).take_while(|(path, _)| parent.contains(path));
        let planned = wanted.iter().map(|(path, values)| (*path, values));
        for (child, values) in held.map(|(path, record)| (path, &record.written)).chain(planned) {
            if !parent.is_parent_of(child) {
                continue;
            }
            // A claim without settings is restored to its original value.
            let found = || limit(&applied.get(child)?.found, knob);
            if let Some(claim) = limit(values, knob).or_else(found) {
                ours.insert(child, claim);
            }
        }
        let others = seen.iter().filter(|(child, _)| !ours.contains_key(child));
        // The kernel counts a claim only up to the memory in use. A claim of all memory must not protect all of the
        // parent's.
        let counted = |(child, claim): (&CgroupPath, &Limit)| match *claim {
            Limit::Max => Limit::Bytes(read::memory_current(&child.dir(self.root())).unwrap_or_default()),
            claim @ Limit::Bytes(_) => claim,
        };
        let claims = others.chain(ours.iter().map(|(child, claim)| (*child, claim)));
        Ok(claims.map(counted).fold(NO_PROTECTION, Limit::saturating_add))
    }

    /// Reads the claims of a cgroup's children from their knobs. Those without a claim are left out.
    fn read_claims(
        &self,
        parent: &CgroupPath,
        knob: Knob,
    ) -> Result<BTreeMap<CgroupPath, Limit>, EnforceError> {
        let dir = parent.dir(self.root());
        let gone = |source| EnforceError::List { cgroup: parent.clone(), source };
        let mut claims = BTreeMap::new();
        for entry in std::fs::read_dir(&dir).map_err(gone)? {
            let entry = entry.map_err(gone)?;
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let Some(child) = entry.file_name().to_str().and_then(|name| parent.child(name).ok()) else {
                continue;
            };
            match knob.read(&entry.path()) {
                Ok(KnobValue::Limit(claim)) if claim > NO_PROTECTION => drop(claims.insert(child, claim)),
                Ok(_) | Err(KnobError::Missing { .. } | KnobError::Gone { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(claims)
    }

    /// Updates the cached claims with the values about to be written.
    fn note_claims(&self, applied: &AppliedSettings, wanted: &BTreeMap<&CgroupPath, Values>) {
        let mut claims = self.claims.lock();
        for (path, values) in wanted {
            let Some(parent) = path.parent() else { continue };
            for knob in PROTECTIONS {
                let left = applied.get(path).and_then(|record| limit(&record.found, knob));
                if let Some(claim) = limit(values, knob).or(left)
                    && let Some(seen) = claims.get_mut(&(parent.clone(), knob))
                {
                    seen.insert((*path).clone(), claim);
                }
            }
        }
    }

    /// Returns the original CPUs of a cgroup; empty if it had all that its parent has.
    pub fn cpus_found(&self, applied: &AppliedSettings, path: &CgroupPath) -> Result<CpuSet, EnforceError> {
        match self.found(applied, path, Knob::CpusetCpus)? {
            KnobValue::Cpus(cpus) => Ok(cpus),
            _ => Ok(CpuSet::new()),
        }
    }

    /// Returns the original nodes of a cgroup; empty if it had those of its parent.
    pub fn nodes_found(&self, applied: &AppliedSettings, path: &CgroupPath) -> Result<NodeSet, EnforceError> {
        match self.found(applied, path, Knob::CpusetMems)? {
            KnobValue::Nodes(nodes) => Ok(nodes),
            _ => Ok(NodeSet::new()),
        }
    }

    /// Returns the original value of a knob.
    fn found(
        &self,
        applied: &AppliedSettings,
        path: &CgroupPath,
        knob: Knob,
    ) -> Result<KnobValue, EnforceError> {
        let record = self.record_now(applied, path);
        let record = record.filter(|record| !self.is_given_up(record, path, knob));
        match record.and_then(|record| record.found.0.get(&knob)) {
            Some(found) => Ok(found.clone()),
            None => self.found_by(&self.owner(path), path, knob),
        }
    }

    /// Returns whether another program has set the CPUs of a cgroup with pending CPUs, so that these are not restored
    /// any more.
    fn is_given_up(&self, record: &Record, path: &CgroupPath, knob: Knob) -> bool {
        if knob != Knob::CpusetCpus || !record.has_pending_cpus() {
            return false;
        }
        let found = record.found.0.get(&knob);
        self.cgroupfs.read(path, knob).is_ok_and(|held| {
            !self.is_written(record, path, knob, &held)
                && !found.is_some_and(|found| self.cgroupfs.is_reduced(path, found, &held))
        })
    }

    /// Returns whether a knob holds a value that the daemon wrote, also if its last write was not finished, or without
    /// the CPUs that partitions had.
    fn is_written(&self, record: &Record, path: &CgroupPath, knob: Knob, held: &KnobValue) -> bool {
        let values = [&record.written, &record.replaced].into_iter().filter_map(|values| values.0.get(&knob));
        values.into_iter().any(|value| {
            self.cgroupfs.holds(knob, value, held)
                || knob == Knob::CpusetCpus && self.cgroupfs.is_reduced(path, value, held)
        })
    }

    /// Returns the value of a knob. If the unit's property differs from the kernel's value, the inner `Err` has the
    /// kernel's value.
    fn current(
        &self,
        path: &CgroupPath,
        owner: &Owner,
        knob: Knob,
    ) -> Result<Result<KnobValue, KnobValue>, EnforceError> {
        let is_systemds = self.is_systemds(owner, knob);
        let property = is_systemds.then(|| self.found_by(owner, path, knob)).transpose()?;
        let held = match self.cgroupfs.read(path, knob) {
            Ok(held) => held,
            Err(KnobError::Missing { .. }) => unset(knob),
            Err(error) if error.is_gone() && property.is_some() => property.clone().unwrap_or(unset(knob)),
            Err(error) => return Err(error.into()),
        };
        let agree = property.is_none_or(|property| self.cgroupfs.holds(knob, &property, &held));
        Ok(if agree { Ok(held) } else { Err(held) })
    }

    /// Adds the values of a cgroup to the plan: the records to store, controllers and steps.
    fn enter(
        &self,
        plan: &mut EnforcementPlan,
        path: &CgroupPath,
        values: Values,
    ) -> Result<(), EnforceError> {
        let old = match plan.outcome.get(path).cloned() {
            Some(record) => record,
            None if values.0.is_empty() => return Ok(()),
            None => Arc::new(Record::new(self.id_of(path)?, self.owner(path))),
        };
        let asked = old.settings.values();
        let step =
            |knob, from, to| WriteStep { cgroup: path.clone(), owner: old.owner.clone(), knob, from, to };
        let (found, replaced, own_drop_ins) = Default::default();
        let mut record = Record { written: values, found, replaced, own_drop_ins, ..Record::clone(&old) };
        let mut replaced = Values::default();
        for (&knob, to) in &record.written.0 {
            let found = self.found(&plan.intent, path, knob)?;
            record.found.0.insert(knob, found);
            if self.owns_drop_in(&old, knob) {
                record.own_drop_ins.insert(knob);
            }
            let current = self.current(path, &old.owner, knob)?;
            let is_ours = |held: &KnobValue| {
                !old.written.0.contains_key(&knob) || self.is_written(&old, path, knob, held)
            };
            if let Ok(held) | Err(held) = &current
                && !self.cgroupfs.holds(knob, to, held)
                && self.is_written(&old, path, knob, held)
            {
                replaced.0.insert(knob, held.clone());
            }
            match current {
                Ok(held) if self.cgroupfs.holds(knob, to, &held) => {}
                // Another program gave an ancestor more than it needs.
                Ok(held) if !asked.0.contains_key(&knob) && covers(&held, to) && !is_ours(&held) => {}
                Ok(held) | Err(held) => plan.steps.push(step(knob, held, to.clone())),
            }
        }
        record.thread_masks = self.thread_masks(plan, path, &old, &record);
        let mut intent = Record { replaced, ..record.clone() };
        // An ancestor holds its former value until it is lowered. The intent keeps that value, so that it is known as
        // the
        // daemon's after a crash.
        for (knob, to) in &record.written.0 {
            if let Some(ours) = old.written.0.get(knob)
                && !asked.0.contains_key(knob)
                && covers(ours, to)
            {
                intent.written.0.insert(*knob, ours.clone());
            }
        }
        for (&knob, ours) in old.written.0.iter().filter(|(knob, _)| !record.written.0.contains_key(knob)) {
            let Some(found) = old.found.0.get(&knob) else { continue };
            let current = match self.current(path, &old.owner, knob) {
                Err(error) if error.is_gone() => continue,
                current => current?,
            };
            intent.written.0.insert(knob, ours.clone());
            intent.found.0.insert(knob, found.clone());
            intent
                .replaced
                .0
                .extend(old.replaced.0.get_key_value(&knob).map(|(knob, value)| (*knob, value.clone())));
            intent.own_drop_ins.extend(old.own_drop_ins.get(&knob));
            if knob == Knob::CpusetCpus {
                intent.thread_masks.clone_from(&old.thread_masks);
            }
            let (mut is_back, steps) = (false, plan.steps.len());
            match current {
                Ok(held) if self.cgroupfs.is_restored(knob, found, &held) => is_back = true,
                // A unit of the same name that is installed later must not get the value.
                Ok(_) | Err(_) if old.own_drop_ins.contains(&knob) && self.is_unit_gone(path, &old.owner) => {
                    is_back = true;
                }
                // The original value equals the written one: there is nothing to restore, whatever the knob holds now.
                _ if found == ours => {}
                // A crash may have kept the pending CPUs from being stored; partitions have the missing ones.
                Ok(held) if knob == Knob::CpusetCpus && self.cgroupfs.is_reduced(path, found, &held) => {
                    plan.steps.push(step(knob, held, found.clone()));
                }
                Ok(held) if !self.is_written(&old, path, knob, &held) => plan.kept.push(Drift {
                    cgroup: path.clone(),
                    knob,
                    wanted: found.clone(),
                    found: Some(held),
                    kind: DriftKind::Rewritten,
                }),
                Ok(held) | Err(held) => plan.steps.push(step(knob, held, found.clone())),
            }
            if old.own_drop_ins.contains(&knob) && (is_back || plan.steps.len() > steps) {
                plan.drop_ins.push((path.clone(), knob));
            }
        }
        self.note_controllers(plan, path, &record)?;
        for (applied, record) in [(&mut plan.intent, intent), (&mut plan.outcome, record)] {
            if record.written.0.is_empty() && record.settings.is_empty() {
                applied.records.remove(path);
            } else {
                applied.update(path, record);
            }
        }
        Ok(())
    }

    /// Returns the record of thread affinities for a cgroup that is to hold CPUs.
    fn thread_masks(
        &self,
        plan: &mut EnforcementPlan,
        path: &CgroupPath,
        old: &Record,
        record: &Record,
    ) -> Option<Arc<ThreadMasks>> {
        let KnobValue::Cpus(cpus) = record.written.0.get(&Knob::CpusetCpus)? else { return None };
        if old.written.0.get(&Knob::CpusetCpus) == record.written.0.get(&Knob::CpusetCpus) {
            return old.thread_masks.clone();
        }
        let mut masks = if old.written.0.contains_key(&Knob::CpusetCpus) {
            ThreadMasks::clone(old.thread_masks.as_deref()?)
        } else {
            let (around, start) = (plan.base.thread_masks_around(path), Instant::now());
            let share = fair_share(plan.thread_time, plan.unread_cgroups);
            let masks = ThreadMasks::read(self.root(), path, around, start + share);
            plan.thread_time = plan.thread_time.saturating_sub(start.elapsed());
            plan.unread_cgroups = plan.unread_cgroups.saturating_sub(1);
            masks
        };
        masks.give(cpus);
        Some(Arc::new(masks))
    }

    /// Returns whether a cgroup belonged to a unit that does not exist any more.
    fn is_unit_gone(&self, path: &CgroupPath, owner: &Owner) -> bool {
        let Owner::Systemd(unit) = owner else { return false };
        id_of(&path.dir(self.root())).is_none() && matches!(self.is_unit_loaded(unit), Ok(false))
    }

    /// Returns whether the drop-in of a knob's property belongs to the daemon.
    fn owns_drop_in(&self, old: &Record, knob: Knob) -> bool {
        if old.found.0.contains_key(&knob) {
            return old.own_drop_ins.contains(&knob);
        }
        match (&self.systemd, &old.owner) {
            (Some(systemd), Owner::Systemd(unit)) => {
                property(knob).is_some() && !systemd.has_drop_in(unit, knob)
            }
            _ => false,
        }
    }

    /// Adds the controllers for the knobs that the daemon writes directly.
    fn note_controllers(
        &self,
        plan: &mut EnforcementPlan,
        path: &CgroupPath,
        record: &Record,
    ) -> Result<(), EnforceError> {
        let direct = record.written.0.keys().filter(|knob| !self.is_systemds(&record.owner, **knob));
        let needed = direct.filter_map(|knob| knob.controller()).collect();
        self.add_missing_above(&mut plan.enable, path, &needed)
    }

    /// Returns whether a partition of this cgroup requires `cpuset.cpus.exclusive` in it and its ancestors.
    fn needs_exclusive(&self, path: &CgroupPath) -> Result<bool, EnforceError> {
        let Some(parent) = path.parent().filter(|parent| !parent.is_root()) else { return Ok(false) };
        match self.cgroupfs.read(&parent, Knob::CpusetPartition) {
            Ok(KnobValue::Partition(state))
                if state.partition != Partition::Member && state.invalid.is_none() =>
            {
                return Ok(false);
            }
            Ok(_) | Err(KnobError::Missing { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        // This file came with the same release as `cpuset.cpus.exclusive`, and exists before the controller is
        // enabled.
        if self.root().join("cpuset.cpus.isolated").exists() {
            return Ok(true);
        }
        Err(EnforceError::NestedPartition { cgroup: path.clone() })
    }
}

//! Containers and pods whose resources change while they run: within their promise, or not at all.

use std::collections::BTreeMap;

use numaward_api::EnforcementMode;
use numaward_cgroup::CgroupPath;
use numaward_enforce::SettingsChange;
use numaward_engine::{ContainerName, OwnerId, Quantity, Resources};
use numaward_guarantee::{
    error::AdmissionError,
    pod::{MemoryClaim, PlacedContainer, Update},
};
use numaward_model::{Settings, pod::POD_SHARE};

use crate::core::Core;

impl Core {
    /// A container's requests are to change to these amounts: within its promise, or not at all. `has` is what the runtime
    /// is asked to set for it, of what we may set as well. What it is to hold then; none if it is not known.
    pub(crate) fn resize(
        &mut self,
        id: &str,
        to: &Resources,
        memory: Option<MemoryClaim>,
        has: Settings,
    ) -> Result<Option<Settings>, AdmissionError> {
        let placed = self.store.state.containers.get(id).filter(|_| !self.pods.ended.contains(id));
        let Some(placed) = placed else { return Ok(None) };
        let mut placed = PlacedContainer::clone(placed);
        let to = &match (self.terms_of(&placed.of), memory.and_then(|memory| memory.request)) {
            // What is promised is what it requests, and the runtime knows its limits.
            (Some(terms), request) if terms.burstable => {
                let request = request.filter(|request| request.0 > 0);
                request.map_or_else(Resources::none, |request| {
                    Resources::none().with_memory(Quantity::whole(request.0))
                })
            }
            _ => to.clone(),
        };
        let mut change = self.begin();
        // What the pod holds as a whole does not change with one of its containers.
        if !placed.of.shares_pod() {
            let (owner, container) = (OwnerId::from(placed.of.owner.as_str()), placed.of.ledger_name());
            let held = change.store.state.ledger.allocation(&owner, &container);
            let ledger = change.ledger_for(Some(&placed.cgroup), held);
            change.store.state.ledger = change.policy.strategy.resize(&ledger, &owner, &container, to)?;
        }
        placed.memory = memory.unwrap_or(placed.memory);
        if let Some(without_us) = placed.without_us.take() {
            change.store.state.applied.note_found(&placed.cgroup, &has.values());
            placed.without_us = Some(Settings {
                cpus: has.cpus.or(without_us.cpus),
                mems: has.mems.or(without_us.mems),
                memory_min: has.memory_min.or(without_us.memory_min),
                memory_low: has.memory_low.or(without_us.memory_low),
                memory_high: has.memory_high.or(without_us.memory_high),
                cpu_max: has.cpu_max.or(without_us.cpu_max),
                ..Settings::default()
            });
        }
        if change.store.state.containers.get(id).is_none_or(|known| **known != placed) {
            change.store.state.containers.insert(id.to_owned(), placed.clone());
        }
        let settings = change.settings_of(&placed);
        if !change.is_change() {
            return Ok(Some(settings));
        }
        if change.note_settings(&placed.cgroup, &settings) {
            change.change_held(SettingsChange::Hold(placed.cgroup.clone(), settings.clone()))?;
        } else {
            change.store()?;
            if self.is_promised(&placed) && self.pods.bound.remove(id) {
                self.pods.to_bind.push_back(id.to_owned());
            }
        }
        let cpus = settings.cpus.clone().unwrap_or_default();
        tracing::info!(name = placed.of.full_name(), %cpus, "resized");
        self.note_guarantees_changed();
        Ok(Some(settings))
    }

    /// Notes what a cgroup is to hold from now on; `false` if it is not held.
    pub(in crate::core) fn note_settings(&mut self, cgroup: &CgroupPath, settings: &Settings) -> bool {
        let held = self.store.state.guarantees.iter().find(|(_, held)| held.cgroup == *cgroup);
        let Some(name) = held.map(|(name, _)| name.clone()) else { return false };
        if let Some(held) = self.store.state.guarantees.get_mut(&name) {
            held.settings = settings.clone();
        }
        true
    }

    /// What a pod's containers share is to change to these amounts: within its promise, or not at all.
    pub(crate) fn resize_pod(&mut self, uid: &str, to: &Resources) -> Result<(), AdmissionError> {
        let (owner, slice) = (OwnerId::from(uid), ContainerName::from(POD_SHARE));
        let mut change = self.begin();
        change.store.state.ledger =
            change.policy.strategy.resize(&change.store.state.ledger, &owner, &slice, to)?;
        if !change.is_change() {
            return Ok(());
        }
        let containers = change.store.state.containers.values();
        let sharing = containers.filter(|placed| placed.of.owner == uid && placed.of.shares_pod());
        let sharing: BTreeMap<_, _> = sharing.map(|placed| (placed.cgroup.clone(), placed.clone())).collect();
        let (mut changes, mut updates) = (Vec::new(), Vec::new());
        for (path, placed) in &sharing {
            let settings = change.settings_of(placed);
            updates.push(Update { id: placed.of.id.clone(), settings: settings.clone() });
            if change.note_settings(path, &settings) {
                changes.push((path.clone(), Some(settings)));
            }
        }
        change.change_held(SettingsChange::Each(changes))?;
        tracing::info!(pod = uid, containers = updates.len(), "what they share was resized");
        self.note_guarantees_changed();
        if self.mode() == EnforcementMode::On {
            self.pods.send(updates);
        }
        Ok(())
    }
}

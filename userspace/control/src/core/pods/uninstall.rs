//! What containers would hold without us, and how they get it back.
//!
//! Problem: a container's cgroup is made with our values, so what was there before cannot be read from it. The runtime
//! repeats these values whenever it changes the container.
//!
//! Answer: what a container would hold without us is what the runtime was asked to set when it was created, and nothing
//! else. That is stored with its placement. Where nothing is enforced any more, its cgroup gets it back at the start, and
//! the runtime is informed at the next comparison with what runs. NRI cannot take a set of CPUs or nodes back: all of them
//! stand for none.

use std::{collections::BTreeSet, mem};

use numaward_api::EnforcementMode;
use numaward_cgroup::knob::{Knob, Limit, Quota};
use numaward_config::kubernetes::PinnedPolicy;
use numaward_guarantee::pod::{ContainerPlacementRequest, PlacedContainer, Update};
use numaward_model::Settings;
use numaward_topology::{Bytes, CpuSet, NodeSet};

use crate::core::Core;

impl Core {
    /// What a container would hold without us, the runtime having been asked for this; none where nothing is enforced.
    pub(super) fn without_us(&self, has: &Settings) -> Option<Settings> {
        if self.mode() != EnforcementMode::On {
            return None;
        }
        // What a rebuilt ledger does not know may have its values from us.
        let mut has = if self.store.is_rebuilt { Settings::default() } else { has.clone() };
        let (cpus, mems) = self.everything();
        has.cpus = has.cpus.filter(|has| !cpus.is_subset(has));
        has.mems = has.mems.filter(|has| !mems.is_subset(has));
        Some(has)
    }

    /// The same of a container that was placed when nothing was enforced. One that others had pinned was not placed then,
    /// unless it was to be pinned all the same.
    pub(super) fn known_without_us(&self, has: &Settings) -> Option<Settings> {
        let mut without_us = self.without_us(has)?;
        if self.config.kubernetes.nri.when_pinned == PinnedPolicy::Yield {
            (without_us.cpus, without_us.mems) = (None, None);
        }
        Some(without_us)
    }

    /// All CPUs, and all nodes that have memory.
    fn everything(&self) -> (CpuSet, NodeSet) {
        let machine = &self.policy.machine;
        let with_memory = machine.nodes.iter().filter(|(_, node)| node.memory > Bytes(0));
        (machine.cpu_ids(), with_memory.map(|(&id, _)| id).collect())
    }

    /// Takes note of what the cgroups of containers are to get back, where no record says so: they hold CPUs of the shared
    /// pool, or were not bound yet.
    pub(in crate::core) fn note_unrecorded(&mut self) {
        let placed: Vec<_> = self.store.state.containers.values().cloned().collect();
        for placed in placed {
            let Some(without_us) = &placed.without_us else { continue };
            let mut knobs: BTreeSet<Knob> = self.settings_of(&placed).values().0.into_keys().collect();
            knobs.insert(Knob::CpusetCpus);
            let enforcer = self.enforcer().clone();
            enforcer.record_created(&mut self.store.state.applied, &placed.cgroup, without_us, knobs);
        }
    }

    /// What the runtime has to change, where nothing is enforced any more, so that it no longer repeats what we said. What
    /// it has changed is over.
    pub(super) fn take_back(&mut self, containers: &[ContainerPlacementRequest]) -> Vec<Update> {
        let (cpus, mems) = self.everything();
        let (none, max) = (Some(Limit::Bytes(Bytes(0))), Some(Limit::Max));
        let mut updates = Vec::new();
        let mut taken_back = mem::take(&mut self.pods.taken_back);
        let mut change = self.begin();
        for ContainerPlacementRequest { id, has, .. } in containers {
            let Some(placed) = change.store.state.containers.get(id) else { continue };
            let Some(without_us) = placed.without_us.clone() else { continue };
            // Only what the runtime has on its books.
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
            // Before NRI 0.10, a runtime does not report what it has of these.
            let is_unreported = has.memory_min.or(has.memory_low).or(has.memory_high).is_none();
            if is_unreported && placed.memory.request.is_some() {
                settings.memory_min = without_us.memory_min.or(none);
                settings.memory_low = without_us.memory_low.or(none);
                settings.memory_high = without_us.memory_high.or(max);
            }
            let is_asked = settings == *has || !taken_back.insert(id.clone());
            if is_back && is_asked {
                taken_back.remove(id);
                let placed = PlacedContainer { without_us: None, ..PlacedContainer::clone(placed) };
                change.store.state.containers.insert(id.clone(), placed);
            } else {
                updates.push(Update { id: id.clone(), settings });
            }
        }
        if let Err(error) = change.store() {
            tracing::error!(%error, "the ledger cannot be stored");
        }
        taken_back.retain(|id| self.store.state.containers.contains_key(id));
        self.pods.taken_back = taken_back;
        updates
    }
}

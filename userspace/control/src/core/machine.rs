//! Changes of the machine at run time: memory, CPUs and nodes that are added or removed.
//!
//! A guarantee survives such a change. If a CPU of a workload goes offline or (since another boot) is no longer of the requested kind, or
//! if its node loses memory, the workload *misses* that part: this is reported, and no new guarantee includes the part. When it returns,
//! the kernel gives it to the same workload again, because the knobs still name it. A machine that the configured policy does not fit is
//! reported too, also at the start: present guarantees remain, and no new ones are admitted until the policy fits again.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api as api;
use numaward_api::{EnforcementMode, EventKind, Severity};
use numaward_config::Config;
use numaward_engine::{Ledger, MemoryBlock, Strategy, UncoveredMemory, policy::CpuKind};
use numaward_guarantee::{
    error::{AdmissionError, StartError},
    policy,
    state::State,
};
use numaward_model::{EventReport, port::ObservedHost};
use numaward_topology::{CpuSet, Machine};

/// The machine, and the strategy that decides on its resources.
pub(crate) struct Policy {
    pub(crate) machine: Arc<Machine>,
    pub(crate) strategy: Box<dyn Strategy>,
    /// Reason why the policy does not fit the machine; `None` if it fits.
    pub(crate) unfit: Option<String>,
    /// Guaranteed resources that are absent, by the name of the owner.
    pub(crate) missing: BTreeMap<String, MissingCapacity>,
    /// The configured mode of CPU isolation.
    isolation: EnforcementMode,
}

impl Policy {
    pub(super) fn new(config: &Config, machine: Arc<Machine>) -> Result<Self, StartError> {
        let (strategy, unfit) = match policy::strategy(config, &machine) {
            Ok(strategy) => (strategy, None),
            Err(problems) => {
                let unfit = policy::join_problems(&problems);
                (policy::fallback(config, &machine).ok_or(StartError::Policy(problems))?, Some(unfit))
            }
        };
        let unknown = policy::nodes_of_unknown_tier(config, &machine);
        if !unknown.is_empty() {
            tracing::info!(
                nodes = %unknown,
                "the kernel reports no memory tier of these nodes: requests that name a tier get no memory of them; \
                 set their tiers with memoryTiers in the configuration"
            );
        }
        Ok(Self {
            machine,
            strategy,
            unfit,
            missing: BTreeMap::new(),
            isolation: config.enforcement.isolation_mode(),
        })
    }

    /// Returns the CPUs of workloads without exclusive CPUs: the shared pool without the CPUs that partitions of other programs have, if
    /// any remain. With `strict-cpu-reservation`, all of the pool can become exclusive; the reserved CPUs remain then. Empty only if no
    /// CPUs are managed.
    pub(super) fn shared_pool(&self, ledger: &Ledger) -> CpuSet {
        let pool = ledger.shared_pool();
        if !pool.is_empty() || !has_exclusive_cpus(ledger) {
            let available = pool - &ledger.conditions().partition_cpus;
            return if available.is_empty() { pool.clone() } else { available };
        }
        let held = ledger.allocations().fold(CpuSet::new(), |held, (.., of)| &held | &of.held_cpus());
        &(&self.machine.cpu_ids() - &self.strategy.allocatable().cpus) - &held
    }

    /// Returns the mode of CPU isolation and the shared pool with the guarantees of this ledger; no pool if no CPU is exclusive.
    pub(super) fn isolation(
        &self,
        enforcement: EnforcementMode,
        ledger: &Ledger,
    ) -> (EnforcementMode, Option<CpuSet>) {
        let (mode, pool) = (self.isolation, self.shared_pool(ledger));
        let asked = cpus_outside_isolated_workloads(ledger, pool.clone())
            .filter(|_| mode != EnforcementMode::On && enforcement == EnforcementMode::On);
        match asked {
            Some(pool) => (EnforcementMode::On, Some(pool)),
            None => (mode, Some(pool).filter(|_| has_exclusive_cpus(ledger))),
        }
    }
}

/// Returns true if a workload has exclusive CPUs.
fn has_exclusive_cpus(ledger: &Ledger) -> bool {
    ledger.allocations().any(|(_, _, held)| held.cpus.as_ref().is_some_and(|cpus| !cpus.is_empty()))
}

/// Guaranteed resources of a workload that are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingCapacity {
    /// Offline CPUs.
    pub(crate) cpus: CpuSet,
    /// Online CPUs that are not of a requested kind.
    pub(crate) kinds: BTreeMap<CpuKind, CpuSet>,
    pub(crate) memory: Vec<MemoryBlock>,
}

impl MissingCapacity {
    fn in_words(&self) -> String {
        let cpus = (!self.cpus.is_empty()).then(|| format!("CPUs {}", self.cpus));
        let kinds = self.kinds.iter().map(|(kind, cpus)| format!("the kind {kind} of CPUs {cpus}"));
        let memory = self.memory.iter().map(|block| {
            let MemoryBlock { kind, affinity, bytes } = block;
            format!("{bytes} of {kind} on nodes {affinity}")
        });
        cpus.into_iter().chain(kinds).chain(memory).collect::<Vec<_>>().join(", ")
    }
}

impl From<&MissingCapacity> for api::MissingCapacity {
    fn from(missing: &MissingCapacity) -> Self {
        let kind =
            |(kind, cpus): (&CpuKind, &CpuSet)| api::MissingKind { kind: *kind, cpus: cpus.to_string() };
        Self {
            cpus: missing.cpus.to_string(),
            kinds: missing.kinds.iter().map(kind).collect(),
            memory: missing.memory.iter().map(api::MemoryBlock::from).collect(),
        }
    }
}

impl Policy {
    /// Takes over a changed machine, and charges it with all guarantees again; returns true if it changed.
    pub(crate) fn follow(
        &mut self,
        config: &Config,
        machine: Arc<Machine>,
        state: &mut State,
        events: &dyn ObservedHost,
    ) -> bool {
        if Arc::ptr_eq(&machine, &self.machine) {
            return false;
        }
        self.machine = machine;
        match policy::strategy(config, &self.machine) {
            Ok(strategy) => {
                self.strategy = strategy;
                if self.unfit.take().is_some() {
                    let fits = "The policy fits the machine again: new guarantees can be given.";
                    events.report(None, EventReport::new(EventKind::MachineChange, fits));
                }
            }
            Err(problems) => {
                let unfit = Some(policy::join_problems(&problems));
                if self.unfit != unfit {
                    self.unfit = unfit;
                    self.report_unfit(events);
                }
            }
        }
        self.recharge(state, events);
        true
    }

    /// Reports a policy that does not fit the machine.
    pub(super) fn report_unfit(&self, events: &dyn ObservedHost) {
        let Some(problems) = &self.unfit else { return };
        let unfit = format!(
            "The policy does not fit the machine ({problems}): present guarantees remain and can be released, but no new ones \
             are given. Change the configuration and restart the daemon, or restore the resources that the policy \
             names."
        );
        events.report(None, EventReport::new(EventKind::MachineChange, unfit).severity(Severity::Warning));
    }

    /// Charges the present machine with all guarantees, and records absent resources.
    pub(super) fn recharge(&mut self, state: &mut State, events: &dyn ObservedHost) {
        let (ledger, uncovered) = self.strategy.rebase(&state.ledger);
        state.ledger = ledger;
        self.note_missing(state, events, uncovered);
    }

    /// Charges the machine again after a release, if guaranteed resources are missing: the released ones may replace them.
    pub(super) fn replace_missing(&mut self, state: &mut State, events: &dyn ObservedHost) {
        if !self.missing.is_empty() {
            self.recharge(state, events);
        }
    }

    /// Records absent resources of guarantees, and reports changes.
    fn note_missing(&mut self, state: &State, events: &dyn ObservedHost, uncovered: Vec<UncoveredMemory>) {
        let mut missing: BTreeMap<String, MissingCapacity> = BTreeMap::new();
        for (owner, _, held) in state.ledger.allocations() {
            let Some(cpus) = &held.cpus else { continue };
            let offline = offline(cpus, &self.machine);
            if !offline.is_empty() {
                let missing = missing.entry(owner.as_str().to_owned()).or_default();
                missing.cpus = &missing.cpus | &offline;
            }
            let account = state.ledger.owner(owner);
            for kind in account.iter().flat_map(|account| &account.terms.cpu_kinds) {
                let Some(of_kind) = kind.cpus_of(&self.machine) else { continue };
                let others = &(cpus - &offline) - &of_kind;
                if !others.is_empty() {
                    let missing = missing.entry(owner.as_str().to_owned()).or_default();
                    let known = missing.kinds.entry(*kind).or_default();
                    *known = &*known | &others;
                }
            }
        }
        for UncoveredMemory { owner, block } in uncovered {
            missing.entry(owner.as_str().to_owned()).or_default().memory.push(block);
        }
        let before = std::mem::take(&mut self.missing);
        for (name, guarantee) in &state.guarantees {
            let owner = guarantee.owner(name);
            let report = match (before.get(owner), missing.get(owner)) {
                (before, Some(now)) if before != Some(now) => {
                    let what = now.in_words();
                    let message = format!("Guaranteed resources of {name} are missing: {what}.");
                    EventReport::new(EventKind::MachineChange, message)
                        .severity(Severity::Warning)
                        .detail("missing", what)
                }
                (Some(_), None) => {
                    let message = format!("All guaranteed resources of {name} are available again.");
                    EventReport::new(EventKind::MachineChange, message)
                }
                _ => continue,
            };
            events.report(Some(&guarantee.cgroup), report.detail("allocation", name));
        }
        self.missing = missing;
    }

    /// Refuses new guarantees on a machine that the policy does not fit.
    pub(super) fn check_fit(&self) -> Result<(), AdmissionError> {
        self.unfit.clone().map_or(Ok(()), |problems| Err(AdmissionError::Unfit(problems)))
    }
}

/// Returns the CPUs of this set that are offline.
fn offline(cpus: &CpuSet, machine: &Machine) -> CpuSet {
    cpus - &machine.cpu_ids()
}

/// Returns all CPUs except those of workloads that request isolation; `None` if no workload does.
fn cpus_outside_isolated_workloads(ledger: &Ledger, shared_pool: CpuSet) -> Option<CpuSet> {
    let (mut isolated, mut others) = (CpuSet::new(), shared_pool);
    for (_, account) in ledger.owners() {
        let of = if account.terms.isolate { &mut isolated } else { &mut others };
        account.containers.values().for_each(|held| of.extend(held.held_cpus().iter()));
    }
    (!isolated.is_empty()).then_some(others)
}

#[cfg(test)]
mod tests {
    use numaward_engine::{ContainerRequest, Quantity, Request, Resources, Terms};
    use numaward_topology::Bytes;

    use super::*;

    #[test]
    fn isolation_covers_hidden_siblings() {
        let config: Config = serde_json::from_str(r#"{"strategy": "native"}"#).unwrap();
        let machine = Machine::builder().cores_per_node(4).smt(2).memory(Bytes::gib(4)).build().unwrap();
        let strategy = policy::strategy(&config, &machine).unwrap();
        let admit = |ledger: &Ledger, name: &str, terms: &Terms| {
            let resources = Resources::none().with_cpu(Quantity::whole(1));
            let resources = resources.with_memory(Quantity::whole(Bytes::gib(1).0));
            let request = Request {
                owner: name.into(),
                init_containers: Vec::new(),
                containers: vec![ContainerRequest::guaranteed(name, resources)],
                resources: None,
            };
            let decision = strategy.admit_watched(ledger, &request, terms, &|_| {});
            (decision.outcome.unwrap()[0].allocation.clone(), decision.ledger)
        };
        let hidden = Terms { hide_siblings: true, ..Terms::default() };
        let isolated = Terms { isolate: true, ..hidden.clone() };
        let (other, ledger) = admit(&strategy.idle(), "other", &hidden);
        let beside = |ledger: &Ledger| cpus_outside_isolated_workloads(ledger, ledger.shared_pool().clone());
        assert_eq!(beside(&ledger), None);
        let (alone, ledger) = admit(&ledger, "alone", &isolated);
        assert_eq!((other.hidden_cpus.len(), alone.hidden_cpus.len()), (1, 1));
        assert_eq!(beside(&ledger), Some(&machine.cpu_ids() - &alone.held_cpus()));
    }
}

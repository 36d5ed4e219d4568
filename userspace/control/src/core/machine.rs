//! A machine that changes while it runs: memory, CPUs and nodes that come and go.
//!
//! What is promised stays promised. A workload whose CPU went offline or, since another boot, is no longer of its kind, or
//! whose node lost memory, *misses* that part: it is reported, and nothing new is promised of it. When the part comes back,
//! the kernel gives it to the same workload again, as the knobs still hold. A machine that the configured policy does not fit
//! is reported too, also at the start; what runs is kept, and nothing new is promised until it fits again.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api as api;
use numaward_api::{EventKind, Severity};
use numaward_config::Config;
use numaward_engine::{Ledger, MemoryBlock, Strategy, UncoveredMemory, policy::CpuKind};
use numaward_guarantee::{
    error::{AdmissionError, StartError},
    policy,
};
use numaward_model::EventReport;
use numaward_topology::{CpuSet, Machine};

use super::Core;

/// The machine, and how it is shared out.
pub(crate) struct Policy {
    pub(crate) machine: Arc<Machine>,
    pub(crate) strategy: Box<dyn Strategy>,
    /// Why the policy does not fit the machine, if so.
    pub(crate) unfit: Option<String>,
    /// What is promised and not there, by the owner's name.
    pub(crate) missing: BTreeMap<String, MissingCapacity>,
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
                "the kernel reports no memory tier of these nodes: requests that name one get none of their memory; \
                 memoryTiers in the configuration says what they have"
            );
        }
        Ok(Self { machine, strategy, unfit, missing: BTreeMap::new() })
    }

    /// The CPUs of workloads that hold none: the shared pool. With `strict-cpu-reservation` all of it can become exclusive; the
    /// reserved CPUs are left then. Empty only where no CPUs are managed.
    pub(super) fn shared_pool(&self, ledger: &Ledger) -> CpuSet {
        let pool = ledger.shared_pool();
        if !pool.is_empty() || !has_exclusive_cpus(ledger) {
            return pool.clone();
        }
        let held = ledger.allocations().fold(CpuSet::new(), |held, (.., of)| &held | &of.held_cpus());
        &(&self.machine.cpu_ids() - &self.strategy.allocatable().cpus) - &held
    }
}

/// Whether a workload holds CPUs of its own.
pub(super) fn has_exclusive_cpus(ledger: &Ledger) -> bool {
    ledger.allocations().any(|(_, _, held)| held.cpus.as_ref().is_some_and(|cpus| !cpus.is_empty()))
}

/// What is promised to a workload and not there (any more).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingCapacity {
    /// CPUs that are offline.
    pub(crate) cpus: CpuSet,
    /// CPUs that are online, and not of a kind that was asked for.
    pub(crate) kinds: BTreeMap<CpuKind, CpuSet>,
    /// Memory.
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

impl Core {
    /// A machine that changed is charged anew with what is promised; whether it did.
    pub(super) fn follow_machine(&mut self) -> bool {
        let machine = self.ports.machine.machine();
        if Arc::ptr_eq(&machine, &self.policy.machine) {
            return false;
        }
        self.policy.machine = machine;
        match policy::strategy(&self.config, &self.policy.machine) {
            Ok(strategy) => {
                self.policy.strategy = strategy;
                if self.policy.unfit.take().is_some() {
                    let fits = "The policy fits the machine again: new promises can be given.";
                    self.report(None, EventReport::new(EventKind::MachineChange, fits));
                }
            }
            Err(problems) => {
                let unfit = Some(policy::join_problems(&problems));
                if self.policy.unfit != unfit {
                    self.policy.unfit = unfit;
                    self.report_unfit();
                }
            }
        }
        self.recharge();
        self.note_guarantees_changed();
        true
    }

    /// Reports that the policy does not fit the machine, if so.
    pub(super) fn report_unfit(&self) {
        let Some(problems) = &self.policy.unfit else { return };
        let unfit = format!(
            "The policy does not fit the machine ({problems}): guarantees are kept and can be released, and no new ones \
             are given. Change the configuration and restart the daemon, or give back to the machine what the policy \
             names."
        );
        self.report(None, EventReport::new(EventKind::MachineChange, unfit).severity(Severity::Warning));
    }

    /// Charges the machine, as it is, with what is promised, and returns what of it is not there.
    pub(super) fn recharge(&mut self) {
        let (ledger, uncovered) = self.policy.strategy.rebase(&self.store.state.ledger);
        self.store.state.ledger = ledger;
        self.note_missing(uncovered);
    }

    /// Takes note of what is promised and not there.
    pub(super) fn note_missing(&mut self, uncovered: Vec<UncoveredMemory>) {
        let mut missing: BTreeMap<String, MissingCapacity> = BTreeMap::new();
        for (owner, _, held) in self.store.state.ledger.allocations() {
            let Some(cpus) = &held.cpus else { continue };
            let offline = offline(cpus, &self.policy.machine);
            if !offline.is_empty() {
                let missing = missing.entry(owner.as_str().to_owned()).or_default();
                missing.cpus = &missing.cpus | &offline;
            }
            let account = self.store.state.ledger.owner(owner);
            for kind in account.iter().flat_map(|account| &account.terms.cpu_kinds) {
                let Some(of_kind) = kind.cpus_of(&self.policy.machine) else { continue };
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
        let before = std::mem::take(&mut self.policy.missing);
        for (name, guarantee) in &self.store.state.guarantees {
            let owner = guarantee.owner(name);
            let report = match (before.get(owner), missing.get(owner)) {
                (before, Some(now)) if before != Some(now) => {
                    let what = now.in_words();
                    let message =
                        format!("What is promised to {name} is not all there any more: {what} is missing.");
                    EventReport::new(EventKind::MachineChange, message)
                        .severity(Severity::Warning)
                        .detail("missing", what)
                }
                (Some(_), None) => {
                    let message = format!("All that is promised to {name} is there again.");
                    EventReport::new(EventKind::MachineChange, message)
                }
                _ => continue,
            };
            self.ports.events.report(Some(&guarantee.cgroup), report.detail("allocation", name));
        }
        self.policy.missing = missing;
    }

    /// Refuses new promises on a machine that the policy does not fit.
    pub(super) fn check_fit(&self) -> Result<(), AdmissionError> {
        self.policy.unfit.clone().map_or(Ok(()), |problems| Err(AdmissionError::Unfit(problems)))
    }
}

/// Those of these CPUs that are not online.
fn offline(cpus: &CpuSet, machine: &Machine) -> CpuSet {
    cpus - &machine.cpu_ids()
}

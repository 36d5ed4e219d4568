//! The durable state.

use std::collections::{BTreeMap, BTreeSet};

use numaward_api as api;
use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_config::enforcement::Declared;
use numaward_enforce::AppliedSettings;
use numaward_engine::Ledger;
use numaward_model::{Settings, Shared};
use serde::{Deserialize, Serialize};

use super::{
    keeper::pods::{Admitted, Placed},
    request::Target,
};

/// All that survives a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// What is promised.
    pub ledger: Ledger,
    /// For whom, by the name of the workload.
    pub guarantees: Shared<String, Guarantee>,
    /// What was written where for it.
    pub book: AppliedSettings,
    /// Cgroups that hold settings because they are herded.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub herded: BTreeSet<CgroupPath>,
    /// Guarantees whose release was begun: their knobs are being given back, and a start goes on with that.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub releasing: BTreeSet<String>,
    /// Pods, or containers of pods, that the engine has admitted, by the name of the owner in the ledger.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pods: BTreeMap<String, Admitted>,
    /// Containers that were placed, by the runtime's id.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub containers: BTreeMap<String, Placed>,
}

/// A workload that holds an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Guarantee {
    /// What the allocation is for.
    pub target: Target,
    /// The cgroup.
    pub cgroup: CgroupPath,
    /// Which cgroup of that path.
    pub id: CgroupId,
    /// What its cgroup is to hold. In a dry run, the book knows nothing of it.
    #[serde(default)]
    pub settings: Settings,
    /// What it was declared as in the configuration, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<Declared>,
    /// Why it was placed there: kept elsewhere.
    #[serde(skip)]
    pub explanation: api::Explanation,
}

impl Guarantee {
    /// The owner in the ledger of a guarantee of this name.
    pub fn owner<'a>(&'a self, name: &'a str) -> &'a str {
        match &self.target {
            Target::Container(of) => &of.owner,
            _ => name,
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::{Kubelet, Quantity, Request, Resources, Strategy, kubelet::Checkpoints};
    use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

    use super::*;
    use crate::policy;
    use numaward_config::Config;

    fn idle(machine: &Machine) -> (Kubelet, Ledger) {
        let strategy = policy::strategy(&Config::default(), machine).unwrap();
        let ledger = strategy.restore(Checkpoints::default(), "").ledger.unwrap();
        let ledger = strategy.ready(&ledger);
        (strategy, ledger)
    }

    fn machine(memory: Bytes) -> Machine {
        Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(memory).build().unwrap()
    }

    fn state() -> (Ledger, State) {
        let (strategy, idle) = idle(&machine(Bytes::gib(4)));
        let resources =
            Resources::none().with_cpu(Quantity::whole(2)).with_memory(Quantity::whole(Bytes::gib(3).0));
        let decision = strategy.admit(&idle, &Request::workload("a", resources));
        decision.outcome.unwrap();
        (idle, State { ledger: decision.ledger, ..State::default() })
    }

    #[test]
    fn on_the_same_machine_nothing_changes_and_the_file_keeps_all() {
        let (idle, state) = state();
        let text = serde_json::to_string(&state).unwrap();
        let mut read: State = serde_json::from_str(&text).unwrap();
        assert_eq!(read, state);
        assert_eq!(read.ledger.rebase(&idle), []);
        assert_eq!(read, state);
    }

    #[test]
    fn a_machine_that_lost_memory_keeps_its_promises() {
        let (_, mut state) = state();
        let held: Vec<_> = state.ledger.allocations().map(|(_, _, held)| held.clone()).collect();
        let (_, smaller) = idle(&machine(Bytes::gib(2)));
        let uncovered = state.ledger.rebase(&smaller);
        assert!(state.ledger.allocations().map(|(_, _, held)| held).eq(&held));
        let node = held[0].memory_nodes().first().unwrap();
        let account = state.ledger.nodes()[&node].kinds[&ZoneKind::Memory];
        assert_eq!((account.free, account.promised), (Bytes(0), account.allocatable));
        let missing = Bytes(Bytes::gib(3).0 - account.allocatable.0);
        assert!(uncovered.iter().map(|part| (part.owner.as_str(), part.block.bytes)).eq([("a", missing)]));
        let other = NodeId(1 - node.0);
        assert!(state.ledger.nodes()[&other].kinds[&ZoneKind::Memory].free.0 > 0);
    }
}

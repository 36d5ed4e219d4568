//! The state that is stored in the ledger file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, mem,
    path::Path,
};

use numaward_api as api;
use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_config::enforcement::DeclaredGuarantee;
use numaward_enforce::{
    AppliedSettings, EnabledControllers, PendingReset, interrupts::MovedAffinities, power::PowerRecords,
    resctrl::ReducedWays, weights::WeightRecords,
};
use numaward_engine::{Ledger, OwnerId, Strategy};
use numaward_model::{Settings, SharedMap, pod::PodContainer};
use numaward_topology::NodeSet;
use serde::{Deserialize, Serialize};

use crate::{
    claim::ReservedClaim,
    moving::MoveLog,
    narrowing::{Narrowing, PlacementBackoff, PreferredNode},
    pod::{AdmittedPod, MemoryClaim, PlacedContainer},
    request::Target,
};

/// Everything that survives a restart of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// Boot ID of the host (`/proc/sys/kernel/random/boot_id`). The cgroup IDs in the state are valid only in this boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// The engine's ledger: allocations and free resources.
    pub ledger: Ledger,
    /// Guarantees by name of the workload.
    pub guarantees: SharedMap<String, Guarantee>,
    /// Settings that were written to cgroups, with the original values.
    #[serde(rename = "book")]
    pub applied: AppliedSettings,
    /// Cgroups that got other CPUs, whose threads may still have the affinity of before.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub resets: SharedMap<CgroupPath, PendingReset>,
    /// cgroup controllers that were enabled.
    #[serde(default, skip_serializing_if = "EnabledControllers::is_empty")]
    pub enabled: EnabledControllers,
    /// Cgroups that CPU isolation confines. This and the next two fields are the columns of one table, see [`Narrowing`].
    #[serde(default, rename = "herded", skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) isolated: BTreeSet<CgroupPath>,
    /// Nodes on which the headroom guard forbids new pages, by cgroup.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) steered: BTreeMap<CgroupPath, NodeSet>,
    /// Preferred nodes of cgroups without a guarantee.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) homes: BTreeMap<CgroupPath, PreferredNode>,
    /// Pauses of automatic placement after it was reverted, by cgroup.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_alone: BTreeMap<CgroupPath, PlacementBackoff>,
    /// CPU affinities of interrupts and kernel threads that were moved off exclusive CPUs.
    #[serde(default, skip_serializing_if = "MovedAffinities::is_empty")]
    pub interrupts: MovedAffinities,
    /// Original and written power settings of exclusive CPUs.
    #[serde(default, skip_serializing_if = "PowerRecords::is_empty")]
    pub power: PowerRecords,
    /// Original and written weights of nodes for weighted-interleave.
    #[serde(default, skip_serializing_if = "WeightRecords::is_empty")]
    pub weights: WeightRecords,
    /// Original and written L3 cache ways of resctrl's default group.
    #[serde(default, skip_serializing_if = "ReducedWays::is_empty")]
    pub cache_ways: ReducedWays,
    /// Guarantees with an unfinished release. It is continued after a restart.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub releasing: BTreeSet<String>,
    /// Owners in the ledger with an unfinished admission. It is undone after a restart.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub admitting: BTreeSet<String>,
    /// Admitted pods, and containers that were admitted on their own, by owner in the ledger.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub pods: SharedMap<String, AdmittedPod>,
    /// Containers to which settings were assigned, by the runtime's ID.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub containers: SharedMap<String, PlacedContainer>,
    /// Moves in progress and recent moves of containers.
    #[serde(default, skip_serializing_if = "MoveLog::is_empty")]
    pub moving: MoveLog,
    /// Reserved resource claims by UID.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub claims: SharedMap<String, ReservedClaim>,
}

impl State {
    /// Returns a state with this ledger and no applied settings.
    pub fn with_ledger(ledger: Ledger) -> Self {
        Self { ledger, ..Self::default() }
    }

    /// Returns true if there is neither a guarantee nor a changed setting of the host.
    pub fn holds_nothing(&self) -> bool {
        let Self {
            boot: _,
            ledger: _,
            guarantees,
            applied,
            resets: _,
            enabled: _,
            isolated,
            steered,
            homes,
            left_alone: _,
            interrupts,
            power,
            weights,
            cache_ways,
            releasing,
            admitting,
            pods,
            containers,
            moving,
            claims,
        } = self;
        guarantees.is_empty()
            && applied.is_empty()
            && isolated.is_empty()
            && steered.is_empty()
            && homes.is_empty()
            && interrupts.is_empty()
            && power.is_empty()
            && weights.is_empty()
            && cache_ways.is_empty()
            && releasing.is_empty()
            && admitting.is_empty()
            && pods.is_empty()
            && containers.is_empty()
            && moving.is_empty()
            && claims.is_empty()
    }
}

/// Narrowings: rows of a table that is stored as columns.
impl State {
    /// Returns the narrowing of a cgroup.
    pub fn narrowing(&self, path: &CgroupPath) -> Narrowing {
        Narrowing {
            is_isolated: self.isolated.contains(path),
            home: self.homes.get(path).cloned(),
            off: self.steered.get(path).cloned().unwrap_or_default(),
        }
    }

    /// Returns the cgroups that are narrowed.
    pub fn narrowed(&self) -> BTreeSet<&CgroupPath> {
        self.isolated.iter().chain(self.homes.keys()).chain(self.steered.keys()).collect()
    }

    /// Returns the cgroups that CPU isolation confines.
    pub fn isolated(&self) -> &BTreeSet<CgroupPath> {
        &self.isolated
    }

    /// Returns the preferred nodes, by cgroup.
    pub fn preferred_nodes(&self) -> &BTreeMap<CgroupPath, PreferredNode> {
        &self.homes
    }

    pub fn preferred_node_mut(&mut self, path: &CgroupPath) -> Option<&mut PreferredNode> {
        self.homes.get_mut(path)
    }

    /// Returns the nodes on which the headroom guard forbids new pages, by cgroup.
    pub fn steered(&self) -> &BTreeMap<CgroupPath, NodeSet> {
        &self.steered
    }

    pub fn set_narrowing(&mut self, path: &CgroupPath, narrowing: Narrowing) {
        fn set<V>(column: &mut BTreeMap<CgroupPath, V>, path: &CgroupPath, value: Option<V>) {
            match value {
                Some(value) => drop(column.insert(path.clone(), value)),
                None => drop(column.remove(path)),
            }
        }
        let Narrowing { is_isolated, home, off } = narrowing;
        if is_isolated {
            self.isolated.insert(path.clone());
        } else {
            self.isolated.remove(path);
        }
        set(&mut self.homes, path, home);
        set(&mut self.steered, path, Some(off).filter(|off| !off.is_empty()));
    }

    /// Removes all narrowings. Returns true if there were any.
    pub fn clear_narrowings(&mut self) -> bool {
        let isolated = mem::take(&mut self.isolated);
        let (homes, steered) = (mem::take(&mut self.homes), mem::take(&mut self.steered));
        !(isolated.is_empty() && homes.is_empty() && steered.is_empty())
    }
}

fn is_empty<K: Ord, V>(map: &SharedMap<K, V>) -> bool {
    map.is_empty()
}

impl State {
    /// Returns true if the path equals, contains or is below the cgroup of a guarantee.
    pub fn has_guarantee_around(&self, path: &CgroupPath) -> bool {
        self.guarantees.values().any(|held| held.cgroup.overlaps(path))
    }

    /// Continues in this boot of the host. After a reboot, no stored cgroup ID is valid, because paths and IDs are used again.
    pub fn continue_in(&mut self, boot: Option<String>) {
        let Some(now) = boot else { return };
        let was = self.boot.replace(now.clone());
        if was.is_some_and(|was| was != now) {
            tracing::info!(
                "the host was rebooted after the ledger was saved: the cgroup IDs in it are not valid any more"
            );
            self.guarantees.values_mut().for_each(|guarantee| guarantee.id = CgroupId::NONE);
            self.applied.forget_boot();
            self.resets = SharedMap::default();
            // A reboot also resets the settings of the kernel and of irqbalance.
            self.interrupts = MovedAffinities::default();
            self.power = PowerRecords::default();
            self.weights = WeightRecords::default();
            self.cache_ways = ReducedWays::default();
            self.enabled = EnabledControllers::default();
        }
    }

    /// Adds a container after its guarantee was recovered from its cgroup.
    pub(crate) fn take_over_container(&mut self, of: &PodContainer, cgroup: &CgroupPath) {
        let is_alone = of.owner != of.pod.uid;
        if !self.pods.contains_key(&of.owner) {
            let admitted = AdmittedPod {
                pod: of.pod.clone(),
                sandbox: of.sandbox.clone(),
                container: is_alone.then(|| of.container.clone()),
                explanation: api::Explanation::default(),
            };
            self.pods.insert(of.owner.clone(), admitted);
        }
        // The runtime reports the container again when it is connected.
        let placed = PlacedContainer {
            of: of.clone(),
            cgroup: cgroup.clone(),
            memory: MemoryClaim::default(),
            keeps_pod_quota: false,
            without_us: None,
        };
        self.containers.insert(of.id.clone(), placed);
    }

    /// Removes an owner from the ledger.
    pub fn release_owner(&mut self, owner: &OwnerId, strategy: &dyn Strategy) {
        let request = self.ledger.owner(owner).and_then(|account| account.request.clone());
        // Containers that were never started are released too.
        for container in request.iter().flat_map(|request| request.all_containers()) {
            self.ledger = strategy.note_started(&self.ledger, owner, &container.name);
        }
        self.ledger = strategy.release(&self.ledger, owner);
    }

    /// Undoes admissions that were begun and not finished.
    pub fn undo_admitting(&mut self, strategy: &dyn Strategy) {
        for owner in mem::take(&mut self.admitting) {
            if !self.guarantees.contains_key(&owner) {
                tracing::info!(owner, "an unfinished admission was undone");
                self.release_owner(&owner.as_str().into(), strategy);
            }
        }
    }

    /// Applies the changes between `from` and `to` to this state, which may differ from both. Changes of `enabled`
    /// are excluded: they are made in every copy at once.
    pub fn patch(&mut self, from: &Self, to: &Self, strategy: &dyn Strategy) {
        fn set<T: Ord + Clone>(set: &mut BTreeSet<T>, from: &BTreeSet<T>, to: &BTreeSet<T>) {
            set.extend(to.difference(from).cloned());
            set.retain(|item| to.contains(item) || !from.contains(item));
        }
        fn map<K: Ord + Clone, V: PartialEq + Clone>(
            map: &mut BTreeMap<K, V>,
            from: &BTreeMap<K, V>,
            to: &BTreeMap<K, V>,
        ) {
            let changed = to.iter().filter(|(key, value)| from.get(*key) != Some(*value));
            map.extend(changed.map(|(key, value)| (key.clone(), value.clone())));
            map.retain(|key, _| to.contains_key(key) || !from.contains_key(key));
        }
        // A change of a guarantee that is still being admitted is applied with its admission.
        let is_open =
            |name: &&String| to.guarantees.contains_key(*name) && !self.guarantees.contains_key(*name);
        let open: Vec<String> = from.guarantees.keys().filter(is_open).cloned().collect();
        self.guarantees.patch(&from.guarantees, &to.guarantees);
        for name in open {
            self.guarantees.remove(&name);
        }
        self.pods.patch(&from.pods, &to.pods);
        self.containers.patch(&from.containers, &to.containers);
        self.claims.patch(&from.claims, &to.claims);
        set(&mut self.isolated, &from.isolated, &to.isolated);
        map(&mut self.steered, &from.steered, &to.steered);
        map(&mut self.homes, &from.homes, &to.homes);
        map(&mut self.left_alone, &from.left_alone, &to.left_alone);
        set(&mut self.releasing, &from.releasing, &to.releasing);
        set(&mut self.admitting, &from.admitting, &to.admitting);
        self.applied.patch(&from.applied, &to.applied);
        self.resets.patch(&from.resets, &to.resets);
        if from.moving != to.moving {
            self.moving.clone_from(&to.moving);
        }
        if from.interrupts != to.interrupts {
            self.interrupts.clone_from(&to.interrupts);
        }
        if from.power != to.power {
            self.power.clone_from(&to.power);
        }
        if from.weights != to.weights {
            self.weights.clone_from(&to.weights);
        }
        if from.cache_ways != to.cache_ways {
            self.cache_ways.clone_from(&to.cache_ways);
        }
        if from.ledger == to.ledger {
            return;
        }
        if self.ledger == from.ledger {
            self.ledger = to.ledger.clone();
            return;
        }
        self.ledger.copy_changed_owners(&from.ledger, &to.ledger);
        self.ledger = strategy.rebase(&self.ledger).0;
    }
}

/// Returns the boot ID, or `None` if it cannot be read. Source: `Documentation/admin-guide/sysctl/kernel.rst`.
pub fn boot_id(host_root: &Path) -> Option<String> {
    let path = host_root.join("proc/sys/kernel/random/boot_id");
    match fs::read_to_string(&path) {
        Ok(text) => Some(text.trim().to_owned()),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the boot ID cannot be read: after a reboot, a cgroup may be mistaken for another one");
            None
        }
    }
}

/// Guarantee of a workload: its cgroup and settings. The CPUs and memory are in the engine's ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Guarantee {
    pub target: Target,
    pub cgroup: CgroupPath,
    /// ID of the cgroup, because a path can be used again.
    pub id: CgroupId,
    /// Settings of the cgroup. A dry run does not apply them.
    #[serde(default)]
    pub settings: Settings,
    /// The entry of the configuration, if the guarantee is declared there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<DeclaredGuarantee>,
    /// Explanation of the placement; stored in `decisions.jsonl`, not in the ledger.
    #[serde(skip)]
    pub explanation: api::Explanation,
}

impl Guarantee {
    /// Returns true if the workload only has a name, without CPUs and memory.
    pub fn has_no_guarantee(&self) -> bool {
        self.settings == Settings::default()
    }

    /// Returns the owner in the ledger; `name` is the name of this guarantee.
    pub fn owner<'a>(&'a self, name: &'a str) -> &'a str {
        match &self.target {
            Target::Container(of) => &of.owner,
            _ => name,
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::{Quantity, Request, Resources, Strategy};
    use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

    use super::*;
    use crate::policy;
    use numaward_config::Config;

    fn strategy(machine: &Machine) -> Box<dyn Strategy> {
        policy::strategy(&Config::default(), machine).unwrap()
    }

    fn machine(memory: Bytes) -> Machine {
        Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(memory).build().unwrap()
    }

    #[test]
    fn fresh_state_holds_nothing() {
        assert!(State::default().holds_nothing());
        assert!(state().1.holds_nothing(), "the ledger alone is nothing to keep up");
        let path: CgroupPath = "/a".parse().unwrap();
        let isolated = State { isolated: BTreeSet::from([path.clone()]), ..State::default() };
        let steered = State { steered: BTreeMap::from([(path, NodeSet::new())]), ..State::default() };
        let releasing = State { releasing: BTreeSet::from(["a".to_owned()]), ..State::default() };
        for held in [isolated, steered, releasing] {
            assert!(!held.holds_nothing(), "{held:?}");
        }
    }

    fn state() -> (Box<dyn Strategy>, State) {
        let strategy = strategy(&machine(Bytes::gib(4)));
        let resources =
            Resources::none().with_cpu(Quantity::whole(2)).with_memory(Quantity::whole(Bytes::gib(3).0));
        let decision = strategy.admit(&strategy.idle(), &Request::workload("a", resources));
        decision.outcome.unwrap();
        (strategy, State { ledger: decision.ledger, ..State::default() })
    }

    #[test]
    fn same_machine_changes_nothing() {
        let (strategy, state) = state();
        let text = serde_json::to_string(&state).unwrap();
        let read: State = serde_json::from_str(&text).unwrap();
        assert_eq!(read, state);
        assert_eq!(strategy.rebase(&read.ledger), (state.ledger, Vec::new()));
    }

    #[test]
    fn lost_memory_keeps_guarantees() {
        let (_, mut state) = state();
        let held: Vec<_> = state.ledger.allocations().map(|(_, _, held)| held.clone()).collect();
        let (ledger, uncovered) = strategy(&machine(Bytes::gib(2))).rebase(&state.ledger);
        state.ledger = ledger;
        assert!(state.ledger.allocations().map(|(_, _, held)| held).eq(&held));
        let node = held[0].memory_nodes().first().unwrap();
        let account = state.ledger.nodes()[&node].kinds[&ZoneKind::Memory];
        assert_eq!((account.free, account.guaranteed), (Bytes(0), Bytes::gib(3)), "more than there is");
        let missing = Bytes(Bytes::gib(3).0 - account.allocatable.0);
        assert!(uncovered.iter().map(|part| (part.owner.as_str(), part.block.bytes)).eq([("a", missing)]));
        let other = NodeId(1 - node.0);
        assert!(state.ledger.nodes()[&other].kinds[&ZoneKind::Memory].free.0 > 0);
    }

    /// Returns the state after admitting a further workload.
    fn with(strategy: &dyn Strategy, state: &State, name: &str, cpus: u64) -> State {
        let resources = Resources::none().with_cpu(Quantity::whole(cpus));
        let resources = resources.with_memory(Quantity::whole(Bytes::mib(64).0));
        let decision = strategy.admit(&state.ledger, &Request::workload(name, resources));
        decision.outcome.unwrap();
        State { ledger: decision.ledger, ..state.clone() }
    }

    #[test]
    fn set_narrowing_replaces_narrowing() {
        let (mut state, path): (State, CgroupPath) = (State::default(), "/a".parse().unwrap());
        let home = Some(PreferredNode::new(NodeId(1), 500));
        let all = Narrowing { is_isolated: true, home, off: "0".parse().unwrap() };
        let some = Narrowing { home: None, ..all.clone() };
        for narrowing in [Narrowing::default(), all.clone(), some.clone(), Narrowing::default()] {
            state.set_narrowing(&path, narrowing.clone());
            assert_eq!(state.narrowing(&path), narrowing);
            assert_eq!(state.narrowed().is_empty(), narrowing.is_empty());
        }
        assert_eq!(state, State::default());
        state.set_narrowing(&path, all);
        assert!(state.clear_narrowings() && !state.clear_narrowings());
    }

    #[test]
    fn patch_keeps_concurrent_admission() {
        let (strategy, before) = state();
        let mut open = with(&*strategy, &before, "open", 1);
        open.admitting.insert("open".to_owned());
        let mut answered = with(&*strategy, &open, "answered", 2);
        answered.isolated.insert("/isolated".parse().unwrap());
        answered.steered.insert("/steered".parse().unwrap(), "1".parse().unwrap());
        answered.homes.insert("/home".parse().unwrap(), PreferredNode::new(NodeId(1), 500));
        let left_alone = PlacementBackoff { id: CgroupId(7), times: 1, until: 9 };
        answered.left_alone.insert("/back".parse().unwrap(), left_alone);
        let power =
            serde_json::json!({"/f": {"knob": "wakeUpLatency", "cpus": "1", "found": "0", "written": "20"}});
        answered.power = serde_json::from_value(power).unwrap();
        let ways = serde_json::json!({"L3": {"0": {"found": 255, "written": [240]}}});
        answered.cache_ways = serde_json::from_value(ways).unwrap();
        let weights = serde_json::json!({"nodes": {"0": {"found": 1, "written": 3}}});
        answered.weights = serde_json::from_value(weights).unwrap();
        let expected = answered.ledger.allocation(&"answered".into(), &"answered".into()).unwrap();

        let mut after = before.clone();
        after.patch(&open, &answered, &*strategy);
        assert_eq!(after.ledger.allocation(&"answered".into(), &"answered".into()), Some(expected));
        assert!(after.ledger.owner(&"open".into()).is_none() && after.admitting.is_empty());
        assert_eq!((after.isolated.clone(), after.steered.clone()), (answered.isolated, answered.steered));
        assert_eq!((after.homes.clone(), after.left_alone.clone()), (answered.homes, answered.left_alone));
        assert_eq!((&after.power, &after.cache_ways), (&answered.power, &answered.cache_ways));
        assert!(after.weights == answered.weights && !after.weights.is_empty());
        let (with, without) = (after.clone(), State { steered: BTreeMap::new(), ..after.clone() });
        after.patch(&with, &without, &*strategy);
        assert!(after.steered.is_empty(), "what went in between is gone");
        let mut free = after.ledger.shared_pool().clone();
        free = &free | expected.cpus.as_ref().unwrap();
        assert_eq!(free, *before.ledger.shared_pool(), "what was open is in the pool again");
        after.release_owner(&"answered".into(), &*strategy);
        assert_eq!(after.ledger.shared_pool(), before.ledger.shared_pool());
    }

    #[test]
    fn reboot_clears_host_settings() {
        let moved = MovedAffinities { banned: Some("3".parse().unwrap()), ..MovedAffinities::default() };
        let enabled = serde_json::json!({"/a": {"id": 7, "controllers": ["cpuset"]}});
        let enabled: EnabledControllers = serde_json::from_value(enabled).unwrap();
        let power =
            serde_json::json!({"/f": {"knob": "governor", "cpus": "1", "found": "a", "written": "b"}});
        let power: PowerRecords = serde_json::from_value(power).unwrap();
        let ways = serde_json::json!({"L3": {"0": {"found": 255, "written": [240]}}});
        let ways: ReducedWays = serde_json::from_value(ways).unwrap();
        let weights = serde_json::json!({"nodes": {"0": {"found": 1, "written": 3}}, "auto": {"0": 1}});
        let weights: WeightRecords = serde_json::from_value(weights).unwrap();
        let mut state = State {
            interrupts: moved.clone(),
            power: power.clone(),
            cache_ways: ways.clone(),
            weights: weights.clone(),
            enabled: enabled.clone(),
            ..State::default()
        };
        state.continue_in(Some("one".to_owned()));
        state.continue_in(Some("one".to_owned()));
        assert_eq!((&state.interrupts, &state.power, &state.enabled), (&moved, &power, &enabled));
        assert_eq!((&state.cache_ways, &state.weights), (&ways, &weights));
        state.continue_in(Some("two".to_owned()));
        assert!(state.interrupts.is_empty() && state.power.is_empty() && state.enabled.is_empty());
        assert!(state.cache_ways.is_empty() && state.weights.is_empty());
    }

    #[test]
    fn ledger_without_weights_is_unchanged() {
        let (_, mut state) = state();
        let old = serde_json::to_string(&state).unwrap();
        assert!(!old.contains("weights"), "{old}");
        let read: State = serde_json::from_str(&old).unwrap();
        assert!(read.weights.is_empty());
        assert_eq!(serde_json::to_string(&read).unwrap(), old);
        let weights =
            serde_json::json!({"nodes": {"2": {"found": 1, "written": 3, "before": 1}}, "auto": {"2": 1}});
        state.weights = serde_json::from_value(weights.clone()).unwrap();
        let new = serde_json::to_value(&state).unwrap();
        assert_eq!(new["weights"], weights);
        assert_eq!(serde_json::from_value::<State>(new).unwrap(), state);
    }

    #[test]
    fn patch_ignores_unfinished_admission() {
        let (strategy, before) = state();
        let guarantee = Guarantee {
            target: Target::Exec,
            cgroup: "/open".parse().unwrap(),
            id: CgroupId::NONE,
            settings: Settings::default(),
            declared: None,
            explanation: api::Explanation::default(),
        };
        let mut open = before.clone();
        open.guarantees.insert("open".to_owned(), guarantee.clone());
        let settings = Settings { cpus: Some("1".parse().unwrap()), ..Settings::default() };
        let mut noted = open.clone();
        noted.guarantees.insert("open".to_owned(), Guarantee { settings, ..guarantee });
        let mut after = before.clone();
        after.patch(&open, &noted, &*strategy);
        assert_eq!(after, before);
        // A change of an admitted guarantee is applied.
        let mut held = open.clone();
        held.patch(&open, &noted, &*strategy);
        assert_eq!(held, noted);
    }

    #[test]
    fn start_undoes_unfinished_admission() {
        let (strategy, before) = state();
        let mut open = with(&*strategy, &before, "open", 1);
        open.admitting.insert("open".to_owned());
        let text = serde_json::to_string(&open).unwrap();
        let mut read: State = serde_json::from_str(&text).unwrap();
        assert_eq!(read, open);
        read.undo_admitting(&*strategy);
        assert!(read.ledger.allocations().eq(before.ledger.allocations()));
        assert_eq!(read.ledger.nodes(), before.ledger.nodes());
        assert_eq!(
            (read.ledger.shared_pool(), read.admitting),
            (before.ledger.shared_pool(), before.admitting)
        );
    }
}

//! Serialization of the state that reuses the text of unchanged parts.
//!
//! # Problem
//! The ledger file is replaced at each change, and serializing a thousand workloads takes far longer than writing the file.
//!
//! # Algorithm
//! The JSON text of each account, guarantee and record is cached with a reference to its value. It is used again as
//! long as the state has a reference to the same value.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use numaward_cgroup::CgroupPath;
use numaward_enforce::{
    EnabledControllers, PendingReset, Record, interrupts::MovedAffinities, power::PowerRecords,
    resctrl::ReducedWays, weights::WeightRecords,
};
use numaward_engine::{OwnerAccount, OwnerId, ledger::NodeAccount};
use numaward_model::SharedMap;
use numaward_topology::{CpuSet, NodeId, NodeSet};
use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use serde_with_macros::skip_serializing_none;

use crate::{
    claim::ReservedClaim,
    moving::MoveLog,
    narrowing::{PlacementBackoff, PreferredNode},
    pod::{AdmittedPod, PlacedContainer},
    state::{Guarantee, State},
};

/// Cached JSON texts of the state's largest maps.
#[derive(Debug, Default)]
pub struct SerializationCache {
    owners: CachedTexts<OwnerId, OwnerAccount>,
    guarantees: CachedTexts<String, Guarantee>,
    records: CachedTexts<CgroupPath, Record>,
}

/// Values with their JSON text, ordered by key.
#[derive(Debug)]
struct CachedTexts<K, V>(Vec<(K, Arc<V>, Box<RawValue>)>);

/// Serialized form of [`State`] with cached parts. A test compares the two.
#[skip_serializing_none]
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StoredState<'a> {
    boot: Option<&'a str>,
    ledger: StoredLedger<'a>,
    guarantees: &'a CachedTexts<String, Guarantee>,
    #[serde(rename = "book")]
    applied: &'a CachedTexts<CgroupPath, Record>,
    resets: Option<&'a SharedMap<CgroupPath, PendingReset>>,
    enabled: Option<&'a EnabledControllers>,
    #[serde(rename = "herded")]
    isolated: Option<&'a BTreeSet<CgroupPath>>,
    steered: Option<&'a BTreeMap<CgroupPath, NodeSet>>,
    homes: Option<&'a BTreeMap<CgroupPath, PreferredNode>>,
    left_alone: Option<&'a BTreeMap<CgroupPath, PlacementBackoff>>,
    interrupts: Option<&'a MovedAffinities>,
    power: Option<&'a PowerRecords>,
    weights: Option<&'a WeightRecords>,
    cache_ways: Option<&'a ReducedWays>,
    releasing: Option<&'a BTreeSet<String>>,
    admitting: Option<&'a BTreeSet<String>>,
    pods: Option<&'a SharedMap<String, AdmittedPod>>,
    containers: Option<&'a SharedMap<String, PlacedContainer>>,
    moving: Option<&'a MoveLog>,
    claims: Option<&'a SharedMap<String, ReservedClaim>>,
}

/// Serialized form of the engine's ledger with cached accounts.
#[derive(Serialize)]
struct StoredLedger<'a> {
    nodes: &'a BTreeMap<NodeId, NodeAccount>,
    shared_pool: &'a CpuSet,
    owners: &'a CachedTexts<OwnerId, OwnerAccount>,
}

impl<K, V> Default for CachedTexts<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Ord + Clone, V: Serialize> CachedTexts<K, V> {
    /// Serializes the new and the changed values. `now` is ordered by key.
    fn update<'a>(&mut self, now: impl Iterator<Item = (&'a K, &'a Arc<V>)>) -> Result<(), serde_json::Error>
    where
        K: 'a,
        V: 'a,
    {
        let before = std::mem::take(&mut self.0);
        self.0.reserve(before.len() + 1);
        let mut before = before.into_iter().peekable();
        for (key, value) in now {
            while before.next_if(|(old, ..)| old < key).is_some() {}
            let cached = match before.next_if(|(old, of, _)| old == key && Arc::ptr_eq(of, value)) {
                Some(cached) => cached,
                None => (key.clone(), value.clone(), to_raw_value(value)?),
            };
            self.0.push(cached);
        }
        Ok(())
    }
}

impl<K: Serialize, V> Serialize for CachedTexts<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, _, text)| (key, text)))
    }
}

impl SerializationCache {
    /// Returns the JSON text of a state.
    pub fn serialize(&mut self, state: &State) -> Result<Box<RawValue>, serde_json::Error> {
        let State {
            boot,
            ledger,
            guarantees,
            applied,
            resets,
            enabled,
            isolated,
            steered,
            homes,
            left_alone,
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
        } = state;
        self.owners.update(ledger.owners())?;
        self.guarantees.update(guarantees.iter())?;
        self.records.update(applied.iter())?;
        to_raw_value(&StoredState {
            boot: boot.as_deref(),
            ledger: StoredLedger {
                nodes: ledger.nodes(),
                shared_pool: ledger.shared_pool(),
                owners: &self.owners,
            },
            guarantees: &self.guarantees,
            applied: &self.records,
            resets: Some(resets).filter(|resets| !resets.is_empty()),
            enabled: Some(enabled).filter(|enabled| !enabled.is_empty()),
            isolated: Some(isolated).filter(|isolated| !isolated.is_empty()),
            steered: Some(steered).filter(|steered| !steered.is_empty()),
            homes: Some(homes).filter(|homes| !homes.is_empty()),
            left_alone: Some(left_alone).filter(|left_alone| !left_alone.is_empty()),
            interrupts: Some(interrupts).filter(|interrupts| !interrupts.is_empty()),
            power: Some(power).filter(|power| !power.is_empty()),
            weights: Some(weights).filter(|weights| !weights.is_empty()),
            cache_ways: Some(cache_ways).filter(|ways| !ways.is_empty()),
            releasing: Some(releasing).filter(|releasing| !releasing.is_empty()),
            admitting: Some(admitting).filter(|admitting| !admitting.is_empty()),
            pods: Some(pods).filter(|pods| !pods.is_empty()),
            containers: Some(containers).filter(|containers| !containers.is_empty()),
            moving: Some(moving).filter(|moving| !moving.is_empty()),
            claims: Some(claims).filter(|claims| !claims.is_empty()),
        })
    }
}

#[cfg(test)]
mod tests {
    use numaward_cgroup::CgroupId;
    use numaward_engine::{Quantity, Request, Resources};
    use numaward_topology::{Bytes, Machine};

    use super::*;
    use crate::{policy, request::Target};
    use numaward_api as api;
    use numaward_config::Config;
    use numaward_enforce::Owner;
    use numaward_model::{Settings, Values};

    fn path(name: &str) -> CgroupPath {
        format!("/{name}").parse().unwrap()
    }

    fn hold(state: &mut State, name: &str, id: u64) {
        let settings = Settings { mems: Some("0".parse().unwrap()), ..Settings::default() };
        let written = settings.values();
        let guarantee = Guarantee {
            target: Target::Exec,
            cgroup: path(name),
            id: CgroupId(id),
            settings: settings.clone(),
            declared: None,
            explanation: api::Explanation::default(),
        };
        state.guarantees.insert(name.to_owned(), guarantee);
        let (id, owner, found) = (CgroupId(id), Owner::Cgroupfs, Values::default());
        state
            .applied
            .insert(path(name), Arc::new(Record { settings, written, found, ..Record::new(id, owner) }));
    }

    /// Compares the text with that of serde, and the state that is read from it.
    fn assert_same_text(texts: &mut SerializationCache, state: &State) {
        let text = texts.serialize(state).unwrap();
        assert_eq!(text.get(), serde_json::to_string(state).unwrap());
        assert_eq!(serde_json::from_str::<State>(text.get()).unwrap(), *state);
    }

    #[test]
    fn text_equals_uncached_text() {
        let machine = Machine::builder().nodes(2).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap();
        let strategy = policy::strategy(&Config::default(), &machine).unwrap();
        let idle = strategy.idle();
        let (mut texts, mut state) =
            (SerializationCache::default(), State { ledger: idle, ..State::default() });
        assert_same_text(&mut texts, &state);
        let resources =
            || Resources::none().with_cpu(Quantity::whole(1)).with_memory(Quantity::whole(Bytes::mib(64).0));
        for (id, name) in ["m", "a", "z", "c"].into_iter().enumerate() {
            hold(&mut state, name, id as u64);
            state.ledger = strategy.admit(&state.ledger, &Request::workload(name, resources())).ledger;
            assert_same_text(&mut texts, &state);
        }
        let before = state.clone();
        let enabled = serde_json::json!({"/a": {"id": 7, "controllers": ["cpuset", "memory"]}});
        state.enabled = serde_json::from_value(enabled).unwrap();
        state.isolated.insert(path("other"));
        let reset = serde_json::json!({"id": 7, "masks": {"given": ["0", "0-1"]}});
        state.resets.insert(path("other"), serde_json::from_value::<PendingReset>(reset).unwrap());
        state.steered.insert(path("other"), "1".parse().unwrap());
        let home = serde_json::json!({"node": 1, "remoteBefore": 500, "isKept": true, "moved": {"0": 4096}});
        state.homes.insert(path("other"), serde_json::from_value(home).unwrap());
        let left_alone = serde_json::json!({"id": 7, "times": 2, "until": 99});
        state.left_alone.insert(path("z"), serde_json::from_value(left_alone).unwrap());
        state.interrupts.banned = Some("3".parse().unwrap());
        let power =
            serde_json::json!({"/f": {"knob": "governor", "cpus": "1", "found": "a", "written": "b"}});
        state.power = serde_json::from_value(power).unwrap();
        let ways = serde_json::json!({"L3": {"0": {"found": 255, "written": [240]}}});
        state.cache_ways = serde_json::from_value(ways).unwrap();
        let weights = serde_json::json!({"nodes": {"0": {"found": 1, "written": 3, "isGivenUp": true}}});
        state.weights = serde_json::from_value(weights).unwrap();
        state.boot = Some("d1bfa0b5".to_owned());
        state.releasing.insert("a".to_owned());
        state.admitting.insert("b".to_owned());
        state.guarantees.get_mut("m").unwrap().id = CgroupId(77);
        assert_same_text(&mut texts, &state);
        state.guarantees.remove("a");
        state.ledger = strategy.release(&state.ledger, &OwnerId::from("a"));
        assert_same_text(&mut texts, &state);
        let pod = serde_json::json!({"pod": {"namespace": "n", "name": "p", "uid": "u"}, "sandbox": "s"});
        state.pods.insert("u".to_owned(), serde_json::from_value::<AdmittedPod>(pod).unwrap());
        assert_same_text(&mut texts, &state);
        let recent = serde_json::json!({"recent": [{"owner": "m", "at": 7, "bytes": 4096}], "running": {"moves": [], "begun": 0}});
        state.moving = serde_json::from_value(recent).unwrap();
        assert_same_text(&mut texts, &state);
        let part = serde_json::json!({"node": 1, "consumed": {"cpu": "2", "memory": "1073741824"}});
        let claim = serde_json::json!({"namespace": "n", "name": "c", "pod": "p", "parts": [part]});
        state.claims.insert("u".to_owned(), serde_json::from_value::<ReservedClaim>(claim).unwrap());
        assert_same_text(&mut texts, &state);
        // Changes that were undone.
        assert_same_text(&mut texts, &before);
        assert_same_text(&mut texts, &State::default());
    }
}

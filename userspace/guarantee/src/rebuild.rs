//! Rebuilding the state where the ledger is damaged or gone.
//!
//! Problem: what runs must keep what it has, under the same name, and nothing may be promised twice, although the only
//! durable record of it cannot be read.
//!
//! Sources, in this order: the marks on cgroups ([`crate::xattr_backup`]), which repeat the ledger as it was last; the ledger
//! before the last, for units that have no cgroup just now, for what was changed of the host as a whole, and for why cgroups
//! without a guarantee hold settings; and the knobs of the cgroups made for commands, which are
//! ours whatever else is known. What contradicts an earlier source is not taken over, and is reported.

use std::collections::BTreeMap;

use numaward_api as api;
use numaward_cgroup::{
    CgroupPath, EXEC_PARENT, Hierarchy,
    knob::{Knob, KnobValue, Limit},
    read,
};
use numaward_enforce::{Owner, Record};
use numaward_engine::{self as engine, Allocation, MemoryBlock, OwnerAccount, OwnerId, Quantity, Resources};
use numaward_model::{Settings, Values};
use numaward_store::{LoadedLedger, SetAsideFile};
use numaward_topology::{Bytes, NodeId, ZoneKind};

use crate::{
    request::Target,
    state::{Guarantee, State},
    xattr_backup::{Found, Held, Mark},
};

/// The state to go on with in this boot: the ledger, or what is known without its last version; and what was set aside.
pub fn take_over_ledger(
    loaded: LoadedLedger<State>,
    found: &Found,
    hierarchy: &Hierarchy,
    boot: Option<String>,
) -> (State, Vec<SetAsideFile>) {
    let (mut state, set_aside) = match loaded {
        LoadedLedger::Current { ledger, set_aside } => (ledger, set_aside),
        // Also if the file was removed: what is held is held.
        LoadedLedger::Fresh => (rebuild(None, found, hierarchy), Vec::new()),
        LoadedLedger::Previous { ledger: mut previous, set_aside } => {
            previous.continue_in(boot.clone());
            (rebuild(Some(previous), found, hierarchy), set_aside)
        }
        LoadedLedger::Rebuild { set_aside } => (rebuild(None, found, hierarchy), set_aside),
    };
    state.continue_in(boot);
    (state, set_aside)
}

/// What can be known without the ledger. `previous` is the one before the last, if it can be read, as it is in this boot.
fn rebuild(previous: Option<State>, found: &Found, hierarchy: &Hierarchy) -> State {
    let mut state = State::default();
    for mark in &found.marks {
        take_over(&mut state, mark);
    }
    if let Some(previous) = previous {
        state.boot.clone_from(&previous.boot);
        // What is not enabled any more is forgotten as always.
        state.enabled = previous.enabled.clone();
        state.interrupts = previous.interrupts.clone();
        state.power = previous.power.clone();
        state.weights = previous.weights.clone();
        state.cache_ways = previous.cache_ways.clone();
        state.left_alone = previous.left_alone.clone();
        let holds = |path: &CgroupPath| hierarchy.id_of(path).ok().flatten().is_some();
        for (name, guarantee) in &previous.guarantees {
            // A cgroup that is there and has no mark was released since.
            let is_to_keep = !found.is_supported || !holds(&guarantee.cgroup);
            let account = previous.ledger.owner(&OwnerId::from(guarantee.owner(name)));
            let record = previous.applied.get(&guarantee.cgroup);
            let (Some(account), Some(record), true) = (account, record, is_to_keep) else { continue };
            if state.guarantees.contains_key(name) {
                continue;
            }
            let held = Held { name: name.clone(), guarantee: guarantee.clone(), account: account.clone() };
            take_over(&mut state, &Mark::new(guarantee.cgroup.clone(), record.clone(), Some(held)));
        }
        for (path, record) in previous.applied.iter() {
            let is_above = state.guarantees.values().any(|held| path.contains(&held.cgroup));
            // A cgroup without a guarantee has a mark as well, if it can.
            let is_unmarked = !found.is_supported;
            if state.applied.get(path).is_none() && (is_above && record.settings.is_empty() || is_unmarked) {
                state.applied.insert(path.clone(), record.clone());
            }
        }
        let settings = |path: &CgroupPath| state.applied.get(path).map(|record| &record.settings);
        let has_cpus = |path: &CgroupPath| settings(path).is_some_and(|settings| settings.cpus.is_some());
        let has_mems = |path: &CgroupPath| settings(path).is_some_and(|settings| settings.mems.is_some());
        let is_other = |path: &CgroupPath| !state.has_guarantee_around(path);
        let (mut isolated, mut steered, mut homes) = (previous.isolated, previous.steered, previous.homes);
        isolated.retain(|path| has_cpus(path) && is_other(path));
        steered.retain(|path, _| has_mems(path) && is_other(path));
        homes.retain(|path, _| has_cpus(path) && is_other(path));
        (state.isolated, state.steered, state.homes) = (isolated, steered, homes);
    }
    take_over_commands(&mut state, hierarchy);
    state
}

fn take_over(state: &mut State, mark: &Mark) {
    if let Some(held) = &mark.held {
        let Held { name, guarantee, account } = held;
        let owner = OwnerId::from(guarantee.owner(name));
        // The containers of a pod are held by one owner.
        let adopted = match (&guarantee.target, state.ledger.owner(&owner)) {
            (Target::Container(_), Some(known)) if known == account => Ok(()),
            _ => state.ledger.adopt(owner, OwnerAccount::clone(account)),
        };
        if let Err(error) = adopted {
            tracing::error!(name, cgroup = %mark.cgroup, %error, "not taken over again: nothing is promised twice");
            return;
        }
        tracing::warn!(name, cgroup = %mark.cgroup, "taken over again from its cgroup");
        state.guarantees.insert(name.clone(), guarantee.clone());
        if let Target::Container(of) = &guarantee.target {
            state.take_over_container(of, &guarantee.cgroup);
        }
    }
    state.applied.insert(mark.cgroup.clone(), mark.record.clone());
}

/// Commands whose cgroups have no marks: the knobs are all that is known.
fn take_over_commands(state: &mut State, hierarchy: &Hierarchy) {
    let Ok(parent) = CgroupPath::root().child(EXEC_PARENT) else { return };
    for path in parent.children(hierarchy.root()) {
        let is_running = read::populated(&hierarchy.dir(&path)).unwrap_or(false);
        if state.applied.get(&path).is_some() || !is_running {
            continue;
        }
        match of_knobs(hierarchy, &path) {
            Some(mark) => take_over(state, &mark),
            None => {
                tracing::error!(cgroup = %path, "a command runs in a cgroup of ours whose knobs promise nothing: it is left alone");
            }
        }
    }
    let holds_commands = state.guarantees.values().any(|held| parent.contains(&held.cgroup));
    if holds_commands && state.applied.get(&parent).is_none() {
        let dir = hierarchy.dir(&parent);
        // Our own cgroup has nothing but what we wrote.
        let unset = |knob: Knob| Some((knob, knob.parse("0").ok()?));
        let written = [Knob::MemoryMin, Knob::MemoryLow]
            .into_iter()
            .filter_map(|knob| Some((knob, knob.read(&dir).ok()?)))
            .collect::<BTreeMap<_, _>>();
        let found = written.keys().filter_map(|knob| unset(*knob)).collect();
        if let Ok(Some(id)) = hierarchy.id_of(&parent) {
            let (written, found) = (Values(written), Values(found));
            let record = Record { written, found, ..Record::new(id, Owner::Cgroupfs) };
            state.applied.insert(parent, record.into());
        }
    }
}

/// What a cgroup of a command holds by its knobs.
fn of_knobs(hierarchy: &Hierarchy, path: &CgroupPath) -> Option<Mark> {
    let dir = hierarchy.dir(path);
    let name = path.components().last()?.to_owned();
    let Ok(KnobValue::Cpus(cpus)) = Knob::CpusetCpus.read(&dir) else { return None };
    let Ok(KnobValue::Nodes(nodes)) = Knob::CpusetMems.read(&dir) else { return None };
    let Ok(KnobValue::Limit(max)) = Knob::MemoryMax.read(&dir) else { return None };
    let Ok(KnobValue::Limit(min)) = Knob::MemoryMin.read(&dir) else { return None };
    let Limit::Bytes(memory) = (if min == Limit::Bytes(Bytes(0)) { max } else { min }) else { return None };
    let node = nodes.first()?;
    if cpus.is_empty() || memory.0 == 0 {
        return None;
    }
    let settings = Settings {
        cpus: Some(cpus.clone()),
        mems: Some(nodes.clone()),
        memory_min: Some(min),
        memory_max: Some(max),
        ..Settings::default()
    };
    let written = settings.values();
    let found = written.0.keys().filter_map(|knob| {
        let text = match knob {
            Knob::MemoryMin => "0",
            Knob::MemoryMax => "max",
            _ => "",
        };
        Some((*knob, knob.parse(text).ok()?))
    });
    let id = hierarchy.id_of(path).ok().flatten()?;
    let found = Values(found.collect());
    let record = Record { settings, found, written, ..Record::new(id, Owner::Cgroupfs) };
    let resources =
        Resources::none().with_cpu(Quantity::whole(cpus.len() as u64)).with_memory(Quantity::whole(memory.0));
    let request = engine::Request::workload(name.as_str(), resources);
    let container = engine::ContainerName::from(name.as_str());
    let allocation = Allocation {
        cpus: Some(cpus),
        blocks: vec![MemoryBlock { kind: ZoneKind::Memory, affinity: nodes, bytes: memory }],
        // What the first node cannot have is charged to the others.
        placed: [(ZoneKind::Memory, BTreeMap::<NodeId, Bytes>::from([(node, memory)]))].into(),
        ..Allocation::default()
    };
    let account = OwnerAccount {
        request: Some(request.into()),
        started: [container.clone()].into(),
        containers: [(container, allocation)].into(),
        ..OwnerAccount::default()
    };
    let guarantee = Guarantee {
        target: Target::Exec,
        cgroup: path.clone(),
        id,
        settings: record.settings.clone(),
        declared: None,
        explanation: api::Explanation::default(),
    };
    let held = Held { name, guarantee: guarantee.into(), account: account.into() };
    Some(Mark::new(path.clone(), record.into(), Some(held)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_cgroup::CgroupId;

    use super::*;
    use crate::narrowing::{PlacementBackoff, PreferredNode};

    /// A state of a boot in which the host and cgroups without a guarantee were changed.
    fn changed(hierarchy: &Hierarchy) -> State {
        let weights = serde_json::json!({"nodes": {"0": {"found": 1, "written": 3}}});
        let power =
            serde_json::json!({"/f": {"knob": "governor", "cpus": "1", "found": "a", "written": "b"}});
        let ways = serde_json::json!({"L3": {"0": {"found": 255, "written": [240]}}});
        let mut state = State { boot: Some("one".to_owned()), ..State::default() };
        state.interrupts.banned = Some("3".parse().unwrap());
        state.weights = serde_json::from_value(weights).unwrap();
        state.power = serde_json::from_value(power).unwrap();
        state.cache_ways = serde_json::from_value(ways).unwrap();
        let cpus = || Settings { cpus: Some("1".parse().unwrap()), ..Settings::default() };
        let mems = Settings { mems: Some("1".parse().unwrap()), ..Settings::default() };
        for (name, settings) in
            [("isolated", cpus()), ("home", cpus()), ("steered", mems), ("pending", Settings::default())]
        {
            let path: CgroupPath = format!("/{name}").parse().unwrap();
            fs::create_dir_all(hierarchy.dir(&path)).unwrap();
            let id = hierarchy.id_of(&path).unwrap().unwrap();
            let written = Values([(Knob::CpusetCpus, Knob::CpusetCpus.parse("1").unwrap())].into());
            let record = Record { settings, written, ..Record::new(id, Owner::Cgroupfs) };
            state.applied.insert(path, record.into());
        }
        state.isolated.insert("/isolated".parse().unwrap());
        state.steered.insert("/steered".parse().unwrap(), "0".parse().unwrap());
        state.homes.insert("/home".parse().unwrap(), PreferredNode::new(NodeId(1), 500));
        state
            .left_alone
            .insert("/b".parse().unwrap(), PlacementBackoff { id: CgroupId(7), times: 1, until: 9 });
        state
    }

    #[test]
    fn what_the_previous_ledger_has_of_the_host_and_of_other_cgroups_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(dir.path());
        let previous = changed(&hierarchy);
        // Without marks, what the previous ledger says is all that is known of cgroups.
        let rebuilt = rebuild(Some(previous.clone()), &Found::default(), &hierarchy);
        assert_eq!(rebuilt, previous);

        // Where cgroups can have marks, those without one were given back since.
        let marks = |names: &[&str]| {
            let mark = |name: &&str| {
                let path: CgroupPath = format!("/{name}").parse().unwrap();
                let record = previous.applied.get(&path).unwrap().clone();
                Mark::new(path, record, None)
            };
            let mut found = Found::default();
            (found.marks, found.is_supported) = (names.iter().map(mark).collect(), true);
            found
        };
        let rebuilt =
            rebuild(Some(previous.clone()), &marks(&["isolated", "home", "steered", "pending"]), &hierarchy);
        assert_eq!(rebuilt, previous);
        let rebuilt = rebuild(Some(previous.clone()), &marks(&["home"]), &hierarchy);
        assert!(rebuilt.isolated.is_empty() && rebuilt.steered.is_empty() && rebuilt.homes.len() == 1);
        assert_eq!((rebuilt.applied.iter().count(), &rebuilt.weights), (1, &previous.weights));
    }

    #[test]
    fn what_the_previous_ledger_has_of_an_earlier_boot_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(dir.path());
        let mut previous = changed(&hierarchy);
        previous.continue_in(Some("two".to_owned()));
        let rebuilt = rebuild(Some(previous), &Found::default(), &hierarchy);
        assert!(rebuilt.interrupts.is_empty() && rebuilt.power.is_empty());
        assert!(rebuilt.weights.is_empty() && rebuilt.cache_ways.is_empty());
        assert!(rebuilt.applied.iter().all(|(_, record)| record.id == CgroupId::NONE));
    }
}

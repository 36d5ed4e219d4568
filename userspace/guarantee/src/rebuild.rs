//! Reconstruction of the state if the ledger is damaged or missing.
//!
//! # Problem
//! Running workloads must keep their guarantees under the same names, and no CPU or memory may be given twice,
//! although the ledger cannot be read.
//!
//! # Algorithm
//! Three sources are read in this order. An entry that contradicts an earlier source is not used, and is logged.
//!
//! 1. The marks on cgroups ([`crate::xattr_backup`]), which repeat the last ledger.
//! 2. The previous version of the ledger: for units without a cgroup at the moment, for settings of the host, and for
//!    the features that changed cgroups without a guarantee.
//! 3. The knobs of cgroups that numaward created for commands.

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
    xattr_backup::{FoundMarks, HeldGuarantee, Mark},
};

/// Returns the state for this boot, from the ledger or reconstructed, and the files that were set aside.
pub fn take_over_ledger(
    loaded: LoadedLedger<State>,
    found: &FoundMarks,
    hierarchy: &Hierarchy,
    boot: Option<String>,
) -> (State, Vec<SetAsideFile>) {
    let (mut state, set_aside) = match loaded {
        LoadedLedger::Current { ledger, set_aside } => (ledger, set_aside),
        // The file may have been removed while workloads have guarantees.
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

/// Reconstructs the state. `previous` is the previous version of the ledger, if it can be read, converted to this boot.
fn rebuild(previous: Option<State>, found: &FoundMarks, hierarchy: &Hierarchy) -> State {
    let mut state = State::default();
    for mark in &found.marks {
        take_over(&mut state, mark);
    }
    if let Some(previous) = previous {
        state.boot.clone_from(&previous.boot);
        // Controllers that are no longer enabled are removed later, as on every start.
        state.enabled = previous.enabled.clone();
        state.resets = previous.resets.clone();
        state.interrupts = previous.interrupts.clone();
        state.power = previous.power.clone();
        state.weights = previous.weights.clone();
        state.cache_ways = previous.cache_ways.clone();
        state.left_alone = previous.left_alone.clone();
        let holds = |path: &CgroupPath| hierarchy.id_of(path).ok().flatten().is_some();
        for (name, guarantee) in &previous.guarantees {
            // A cgroup that exists without a mark was released after this version was stored.
            let is_to_keep = !found.is_supported || !holds(&guarantee.cgroup);
            let account = previous.ledger.owner(&OwnerId::from(guarantee.owner(name)));
            let record = previous.applied.get(&guarantee.cgroup);
            let (Some(account), Some(record), true) = (account, record, is_to_keep) else { continue };
            if state.guarantees.contains_key(name) {
                continue;
            }
            let held =
                HeldGuarantee { name: name.clone(), guarantee: guarantee.clone(), account: account.clone() };
            take_over(&mut state, &Mark::new(guarantee.cgroup.clone(), record.clone(), Some(held)));
        }
        for (path, record) in previous.applied.iter() {
            let is_above = state.guarantees.values().any(|held| path.contains(&held.cgroup));
            // A cgroup without a guarantee has a mark too, if marks are supported.
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
        let HeldGuarantee { name, guarantee, account } = held;
        let owner = OwnerId::from(guarantee.owner(name));
        // All containers of a pod share one owner.
        let adopted = match (&guarantee.target, state.ledger.owner(&owner)) {
            (Target::Container(_), Some(known)) if known == account => Ok(()),
            _ => state.ledger.adopt(owner, OwnerAccount::clone(account)),
        };
        if let Err(error) = adopted {
            tracing::error!(name, cgroup = %mark.cgroup, %error, "the guarantee of this cgroup was not recovered: it conflicts with another guarantee");
            return;
        }
        tracing::warn!(name, cgroup = %mark.cgroup, "guarantee recovered from the mark on its cgroup");
        state.guarantees.insert(name.clone(), guarantee.clone());
        if let Target::Container(of) = &guarantee.target {
            state.take_over_container(of, &guarantee.cgroup);
        }
    }
    state.applied.insert(mark.cgroup.clone(), mark.record.clone());
}

/// Recovers running commands without marks from the knobs of their cgroups.
fn take_over_commands(state: &mut State, hierarchy: &Hierarchy) {
    let Ok(parent) = CgroupPath::root().child(EXEC_PARENT) else { return };
    for path in parent.children(hierarchy.root()) {
        let is_running = read::populated(&hierarchy.dir(&path)).unwrap_or(false);
        if state.applied.get(&path).is_some() || !is_running {
            continue;
        }
        match mark_from_knobs(hierarchy, &path) {
            Some(mark) => take_over(state, &mark),
            None => {
                tracing::error!(cgroup = %path, "a command runs in a numaward cgroup without CPU and memory settings: no guarantee was recovered");
            }
        }
    }
    let holds_commands = state.guarantees.values().any(|held| parent.contains(&held.cgroup));
    if holds_commands && state.applied.get(&parent).is_none() {
        let dir = hierarchy.dir(&parent);
        // This cgroup has only settings that numaward wrote.
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

/// Reconstructs the guarantee of a command from the knobs of its cgroup.
fn mark_from_knobs(hierarchy: &Hierarchy, path: &CgroupPath) -> Option<Mark> {
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
        // The ledger charges the part that does not fit on the first node to the other nodes.
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
    let held = HeldGuarantee { name, guarantee: guarantee.into(), account: account.into() };
    Some(Mark::new(path.clone(), record.into(), Some(held)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_cgroup::CgroupId;

    use super::*;
    use crate::narrowing::{PlacementBackoff, PreferredNode};

    /// Returns a state in which settings of the host and of cgroups without a guarantee were changed.
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
    fn previous_ledger_keeps_host_settings() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(dir.path());
        let previous = changed(&hierarchy);
        // Without marks, the previous ledger is the only source for cgroups.
        let rebuilt = rebuild(Some(previous.clone()), &FoundMarks::default(), &hierarchy);
        assert_eq!(rebuilt, previous);

        // If marks are supported, a cgroup without one was restored later.
        let marks = |names: &[&str]| {
            let mark = |name: &&str| {
                let path: CgroupPath = format!("/{name}").parse().unwrap();
                let record = previous.applied.get(&path).unwrap().clone();
                Mark::new(path, record, None)
            };
            let mut found = FoundMarks::default();
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
    fn drops_host_settings_of_old_boot() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(dir.path());
        let mut previous = changed(&hierarchy);
        previous.continue_in(Some("two".to_owned()));
        let rebuilt = rebuild(Some(previous), &FoundMarks::default(), &hierarchy);
        assert!(rebuilt.interrupts.is_empty() && rebuilt.power.is_empty());
        assert!(rebuilt.weights.is_empty() && rebuilt.cache_ways.is_empty());
        assert!(rebuilt.applied.iter().all(|(_, record)| record.id == CgroupId::NONE));
    }
}

//! Export of the guarantees as state files of a kubelet with the same policies.
//!
//! # Problem
//! Some programs read only the kubelet's state files, and a kubelet that is to manage the host again can start from
//! them. A kubelet does not know some guarantees (workloads that are no pods), and with the same policies it might
//! have placed the pods elsewhere.
//!
//! # Algorithm
//! A container is listed under the UID of its pod. Every other workload is listed under its own name, so that its
//! CPUs are not in the shared pool and its memory is not free. The node accounts are computed as a kubelet does. Then
//! the strategy `kubelet` starts with the files and admits each pod again; each difference is reported as a problem.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use numaward_api::{EnforcementMode, KubeletState};
use numaward_config::Config;
use numaward_engine::{
    Allocation, CheckpointError, KubeletStrategy, Ledger, Request, Strategy as _,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    claims::devices,
    in_flight::RESERVE_OWNER,
    kubelet::Checkpoints,
};
use numaward_model::pod::POD_SHARE;
use numaward_topology::{Machine, NodeSet};

use crate::{
    error::{AdmissionError, list_problems},
    policy,
    state::State,
};

/// Returns the state files, with the problems that a kubelet would have with them.
pub fn export(config: &Config, machine: &Machine, state: &State) -> Result<KubeletState, AdmissionError> {
    let kubelet = policy::kubelet(config, machine)
        .map_err(|problems| AdmissionError::NoKubelet(list_problems(&problems)))?;
    let (mut held, mut pod_level, mut other_workloads) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut pods: BTreeMap<String, (String, Request)> = BTreeMap::new();
    for (owner, account) in state.ledger.owners() {
        let pod = state.pods.get(owner.as_str()).map(|admitted| &admitted.pod);
        let is_workload = pod.is_none()
            && (owner.as_str() == RESERVE_OWNER
                || devices::is_part(owner)
                || state.guarantees.contains_key(owner.as_str()));
        // An imported pod that does not run yet already has its UID as owner.
        let uid = pod.map_or_else(|| owner.clone(), |pod| pod.uid.as_str().into());
        let name = pod.map_or_else(|| owner.to_string(), |pod| format!("{}/{}", pod.namespace, pod.name));
        for (container, allocation) in &account.containers {
            if is_workload || container.as_str() == POD_SHARE {
                other_workloads.insert(name.clone());
            }
            let mut allocation = allocation.clone();
            let hidden = mem::take(&mut allocation.hidden_cpus);
            if !hidden.is_empty() {
                // A kubelet refuses a container with other CPUs than it requests. An entry of a container that does not exist keeps
                // the hidden
                // siblings out of the shared pool until the kubelet removes it.
                let placeholder = format!("{container}-hidden").as_str().into();
                held.push((
                    uid.clone(),
                    placeholder,
                    Allocation { cpus: Some(hidden), ..Allocation::default() },
                ));
            }
            held.push((uid.clone(), container.clone(), allocation));
        }
        if !account.pod_level.is_empty() {
            pod_level.push((uid.clone(), account.pod_level.clone()));
        }
        if let Some(request) = account.request.as_ref().filter(|_| !is_workload) {
            let empty = Request {
                owner: uid.clone(),
                init_containers: Vec::new(),
                containers: Vec::new(),
                resources: None,
            };
            let (_, pod) = pods.entry(uid.to_string()).or_insert((name, empty));
            pod.init_containers.extend_from_slice(&request.init_containers);
            pod.containers.extend_from_slice(&request.containers);
        }
    }
    let files = kubelet
        .checkpoints_for(held, pod_level)
        .map_err(|error| AdmissionError::NoKubelet(error.to_string()))?;
    let write = |file: Option<Result<String, CheckpointError>>| {
        file.transpose()
            .map(Option::unwrap_or_default)
            .map_err(|error| AdmissionError::NoKubelet(error.to_string()))
    };
    let mut problems = problems(&kubelet, &files, &pods);
    if config.enforcement.mode == EnforcementMode::DryRun {
        problems.insert(
            0,
            "enforcement.mode is dry-run: these guarantees are not applied in the kernel".to_owned(),
        );
    }
    Ok(KubeletState {
        cpu_manager_state: write(files.cpus.as_ref().map(CpuCheckpoint::write))?,
        memory_manager_state: write(files.memory.as_ref().map(MemoryCheckpoint::write))?,
        others: other_workloads.into_iter().collect(),
        problems,
    })
}

/// Returns the problem of overlapping memory node sets, if two containers have them. A kubelet rebuilds its accounts
/// in undefined order, and with such sets the result depends on the order.
fn overlaps(ledger: &Ledger) -> Option<String> {
    let blocks = ledger.allocations().flat_map(|(_, _, allocation)| &allocation.blocks);
    let sets: BTreeSet<&NodeSet> = blocks.map(|block| &block.affinity).collect();
    let pairs = sets.iter().flat_map(|a| sets.range::<NodeSet, _>(..*a).map(move |b| (b, a)));
    let (a, b) = pairs.into_iter().find(|(a, b)| a.intersects(b))?;
    Some(format!(
        "a kubelet may fail to start with these files: memory is guaranteed on nodes {a} and on nodes {b}, and a kubelet \
         never lets different sets of nodes overlap"
    ))
}

/// Returns the problems of a kubelet that starts with these files while these pods run.
fn problems(
    kubelet: &KubeletStrategy,
    files: &Checkpoints,
    pods: &BTreeMap<String, (String, Request)>,
) -> Vec<String> {
    let mut ledger = match kubelet.restore(files.clone(), "DIR").ledger {
        Ok(ledger) => ledger,
        Err(error) => return vec![format!("a kubelet does not start with these files: {error}")],
    };
    let mut problems = overlaps(&ledger).into_iter().collect::<Vec<_>>();
    for (name, request) in pods.values() {
        let decision = kubelet.admit(&ledger, request);
        if let Err(rejection) = decision.outcome {
            let (reason, message) = (rejection.reason, &rejection.message);
            problems.push(format!("a kubelet refuses the pod {name} when it starts: {reason}: {message}"));
            continue;
        }
        let before = ledger.owner(&request.owner).map(|account| &account.containers);
        let after = decision.ledger.owner(&request.owner).map(|account| &account.containers);
        if before.is_some_and(|before| after != Some(before)) {
            problems.push(format!("a kubelet places the pod {name} differently when it starts"));
        }
        ledger = decision.ledger;
    }
    problems
}

#[cfg(test)]
mod tests {
    use numaward_engine::PodId;
    use numaward_engine::{ContainerRequest, OwnerId, Quantity, Resources, Terms, policy::KubeletVersion};
    use numaward_topology::{Bytes, NodeId, ZoneKind};

    use super::*;
    use crate::pod::AdmittedPod;

    fn machine() -> Machine {
        Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap()
    }

    fn resources(cpus: u64, gib: u64) -> Resources {
        Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(Bytes::gib(gib).0))
    }

    /// Admits a request. An owner `UID/CONTAINER` is a container that is admitted on its own.
    fn admit(state: &mut State, config: &Config, request: &Request, container: Option<&str>) {
        let strategy = policy::strategy(config, &machine()).unwrap();
        let ledger = if state.ledger == Ledger::default() { strategy.idle() } else { state.ledger.clone() };
        let decision = strategy.admit(&ledger, request);
        decision.outcome.unwrap();
        state.ledger = decision.ledger;
        let owner = request.owner.to_string();
        let Some(uid) = owner.split('/').next().filter(|uid| uid.starts_with("uid")) else { return };
        let pod = PodId { namespace: "default".to_owned(), name: format!("pod-{uid}"), uid: uid.to_owned() };
        let admitted = AdmittedPod {
            pod,
            sandbox: String::new(),
            container: container.map(str::to_owned),
            explanation: numaward_api::Explanation::default(),
        };
        state.pods.insert(owner, admitted);
    }

    fn pod(owner: &str, containers: &[(&str, u64, u64)]) -> Request {
        let container =
            |&(name, cpus, gib): &(&str, u64, u64)| ContainerRequest::guaranteed(name, resources(cpus, gib));
        Request {
            owner: owner.into(),
            init_containers: Vec::new(),
            containers: containers.iter().map(container).collect(),
            resources: None,
        }
    }

    fn read(exported: &KubeletState) -> Checkpoints {
        let (cpus, memory) = (&exported.cpu_manager_state, &exported.memory_manager_state);
        Checkpoints::read(Some(cpus), Some(memory), "DIR", KubeletVersion::V1_36).unwrap()
    }

    #[test]
    fn lists_containers_by_pod_uid() {
        let config = Config::default();
        let mut state = State::default();
        admit(&mut state, &config, &pod("uid-1", &[("a", 1, 1), ("b", 1, 1)]), None);
        admit(&mut state, &config, &pod("uid-2/c", &[("c", 2, 1)]), Some("c"));
        let exported = export(&config, &machine(), &state).unwrap();
        assert_eq!((&exported.others, &exported.problems), (&vec![], &vec![]), "{exported:?}");
        let files = read(&exported);
        let cpus = files.cpus.as_ref().unwrap();
        let names = |owner: &str| -> Vec<String> {
            cpus.entries[&OwnerId::from(owner)].keys().map(ToString::to_string).collect()
        };
        assert_eq!(
            (names("uid-1"), names("uid-2")),
            (vec!["a".to_owned(), "b".to_owned()], vec!["c".to_owned()])
        );
        // The project's own reader finds the same guarantees.
        let ledger = files.ledger();
        for (owner, container, allocation) in state.ledger.allocations() {
            let owner: OwnerId = owner.as_str().split('/').next().unwrap().into();
            assert_eq!(ledger.allocation(&owner, container), Some(allocation));
        }
        assert_eq!(ledger.shared_pool(), state.ledger.shared_pool());
    }

    #[test]
    fn exports_workloads_without_pod() {
        let config = Config::default();
        let mut state = State::default();
        let request = Request::workload(RESERVE_OWNER, resources(2, 1));
        admit(&mut state, &config, &request, None);
        let exported = export(&config, &machine(), &state).unwrap();
        assert_eq!(exported.others, [RESERVE_OWNER]);
        let ledger = read(&exported).ledger();
        let held = state.ledger.allocation(&RESERVE_OWNER.into(), &RESERVE_OWNER.into()).unwrap();
        assert!(!held.cpus.as_ref().unwrap().intersects(ledger.shared_pool()));
        let node = held.memory_nodes().first().unwrap();
        assert_eq!(ledger.nodes()[&node].kinds[&ZoneKind::Memory].guaranteed, Bytes::gib(1));
        assert_eq!(ledger.nodes()[&NodeId(1 - node.0)].kinds[&ZoneKind::Memory].guaranteed, Bytes(0));
    }

    #[test]
    fn hidden_cpus_stay_out_of_shared_pool() {
        let config: Config = serde_json::from_str(r#"{"strategy": "native"}"#).unwrap();
        let machine = Machine::builder().nodes(2).cores_per_node(4).smt(2).memory(Bytes::gib(4));
        let machine = machine.build().unwrap();
        let strategy = policy::strategy(&config, &machine).unwrap();
        let hide = Terms { hide_siblings: true, ..Terms::default() };
        let decision =
            strategy.admit_watched(&strategy.idle(), &pod("uid-1", &[("a", 2, 1)]), &hide, &|_| {});
        let granted = decision.outcome.unwrap()[0].allocation.clone();
        assert_eq!((granted.cpus.as_ref().unwrap().len(), granted.hidden_cpus.len()), (2, 2));
        let state = State { ledger: decision.ledger, ..State::default() };
        let exported = export(&config, &machine, &state).unwrap();
        assert_eq!(exported.problems, Vec::<String>::new(), "a kubelet starts with them");
        let ledger = read(&exported).ledger();
        let held = ledger.allocation(&"uid-1".into(), &"a".into()).unwrap();
        assert_eq!(held.cpus, granted.cpus);
        assert!(!ledger.shared_pool().intersects(&granted.held_cpus()));
    }

    #[test]
    fn reports_problems_of_kubelet() {
        // The first pod has a part of node 0, the second needs more than node 1 has.
        let config: Config = serde_json::from_str(r#"{"topologyManagerPolicy": "best-effort"}"#).unwrap();
        let mut state = State::default();
        admit(&mut state, &config, &pod("uid-1", &[("a", 1, 1)]), None);
        admit(&mut state, &config, &pod("uid-2", &[("b", 1, 5)]), None);
        let exported = export(&config, &machine(), &state).unwrap();
        let [problem] = &exported.problems[..] else { panic!("{exported:?}") };
        assert!(problem.contains("on nodes 0 and on nodes 0-1"), "{problem}");

        let dry: Config = serde_json::from_str(r#"{"enforcement": {"mode": "dry-run"}}"#).unwrap();
        let exported = export(&dry, &machine(), &State::default()).unwrap();
        assert!(exported.problems[0].contains("dry-run"), "{exported:?}");
    }
}

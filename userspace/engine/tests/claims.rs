//! The allocator of resource claims against allocations that a real scheduler made. `tests/claims/record.py` records them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{collections::BTreeMap, fs::File, path::Path, sync::Arc};

use numaward_engine::{
    NativeOptions, NativeStrategy, OwnerId, PolicyConfig, Quantity, Strategy as _,
    claims::{
        allocator::{
            AllocatedDevice, Alternatives, Amounts, Attribute, Claim, Slice, allocate, consume, release,
            sort_slices,
        },
        devices::{DRIVER, NUMA_NODE, NodeAmounts, NodeDevices, placement_request},
    },
    policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy},
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::json;

#[derive(Deserialize)]
struct Scenario {
    slices: Vec<Slice>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Step {
    Pod { pod: usize, claims: Vec<Claim>, allocated: Option<Vec<Vec<Recorded>>> },
    Remove { remove: usize },
}

/// Request, driver, device and consumed amounts.
type Recorded = (String, Arc<str>, Arc<str>, Amounts);

/// Returns a result in the words of the API.
fn recorded(slices: &[Slice], claim: &Claim, of: &AllocatedDevice) -> Recorded {
    let request = &claim.requests[of.request];
    let name = match (&request.alternatives, of.alternative) {
        (Alternatives::FirstAvailable(all), Some(number)) => format!("{}/{}", request.name, all[number].0),
        _ => request.name.to_string(),
    };
    let slice = &slices[of.device.0];
    (name, slice.driver.clone(), slice.devices[of.device.1].name.clone(), of.consumed.clone())
}

#[test]
fn allocations_are_those_of_the_scheduler() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/claims/kube-scheduler-1.36.json.gz");
    let scenarios: Vec<Scenario> =
        serde_json::from_reader(flate2::read::GzDecoder::new(File::open(path).unwrap())).unwrap();
    let (mut claim_count, mut refused_count, mut differences) = (0, 0, Vec::new());
    for (number, Scenario { mut slices, steps }) in scenarios.into_iter().enumerate() {
        sort_slices(&mut slices);
        let mut bound: BTreeMap<usize, Vec<Vec<AllocatedDevice>>> = BTreeMap::new();
        for step in steps {
            let (pod, claims, expected) = match step {
                Step::Remove { remove } => {
                    for claim in bound.remove(&remove).unwrap() {
                        release(&mut slices, &claim);
                    }
                    continue;
                }
                Step::Pod { pod, claims, allocated } => (pod, claims, allocated),
            };
            let result = allocate(&slices, &claims);
            let words = result.as_ref().map(|result| {
                let of_claim = |(claim, devices): (&Claim, &Vec<AllocatedDevice>)| {
                    devices.iter().map(|device| recorded(&slices, claim, device)).collect::<Vec<_>>()
                };
                claims.iter().zip(result).map(of_claim).collect::<Vec<_>>()
            });
            if words != expected {
                differences.push(format!("scenario {number}, pod {pod}: {words:?}, recorded {expected:?}"));
                // The later steps depend on this one.
                break;
            }
            match result {
                Some(result) => {
                    claim_count += claims.len();
                    for claim in &result {
                        consume(&mut slices, claim);
                    }
                    bound.insert(pod, result);
                }
                None => refused_count += 1,
            }
        }
    }
    assert!(differences.is_empty(), "{} differences: {:#?}", differences.len(), differences.first());
    assert!(claim_count >= 300 && refused_count >= 100, "{claim_count} claims, {refused_count} refused pods");
}

#[test]
fn released_amounts_are_free_again() {
    let mut slices: Vec<Slice> = serde_json::from_value(serde_json::json!([
        {"name": "a", "driver": "numaward.io", "pool": "h", "devices": [
            {"name": "n", "allowMultipleAllocations": true,
             "capacity": {"cpu": {"value": "4", "requestPolicy": {"default": "0"}}}}]}
    ]))
    .unwrap();
    let claim: Claim = serde_json::from_value(serde_json::json!(
        {"requests": [{"name": "r", "exactly": {"capacity": {"cpu": "3"}}}]}
    ))
    .unwrap();
    let claims = [claim];
    let before = slices.clone();
    let allocated = allocate(&slices, &claims).unwrap();
    consume(&mut slices, &allocated[0]);
    assert_eq!(slices[0].devices[0].consumed["cpu"], Quantity::whole(3));
    assert_eq!(allocate(&slices, &claims), None);
    release(&mut slices, &allocated[0]);
    assert_eq!(allocate(&slices, &claims), allocate(&before, &claims));
}

/// Returns the policy of a host with whole cores and a reserved CPU.
fn policy(has_whole_cores: bool) -> PolicyConfig {
    let options = has_whole_cores.then(|| ("full-pcpus-only".to_owned(), "true".to_owned()));
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation {
            numa_node: NodeId(0),
            limits: BTreeMap::from([(ZoneKind::Memory, "1Gi".parse().unwrap())]),
        }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_manager_policy_options: options.into_iter().collect(),
        reserved_system_cpus: "0".parse().unwrap(),
        topology_manager_policy: TopologyManagerPolicy::SingleNumaNode,
        ..PolicyConfig::default()
    }
}

#[derive(Clone, Debug)]
enum Action {
    /// Number of devices, CPUs and MiB of each.
    Claim(usize, u64, u64),
    /// Releases one of the claims.
    Release(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (1..3_usize, 0..5_u64, 0..3000_u64).prop_map(|(count, cpus, mib)| Action::Claim(count, cpus, mib)),
        1 => (0..10_usize).prop_map(Action::Release),
    ]
}

proptest! {
    /// A host has room for each claim that the scheduler allocates, and the published values do not change by claims.
    #[test]
    fn host_has_room_for_allocated_claims(
        actions in prop::collection::vec(action(), 1..40),
        has_whole_cores in any::<bool>(),
    ) {
        let machine =
            Machine::builder().nodes(3).cores_per_node(4).smt(2).memory(Bytes::gib(8)).build().unwrap();
        let strategy = NativeStrategy::new(&machine, &policy(has_whole_cores), &NativeOptions::default()).unwrap();
        let devices = NodeDevices::new(&machine, &BTreeMap::new(), has_whole_cores);
        let allocatable = strategy.allocatable();
        let mut ledger = strategy.idle();
        let mut claims: Vec<(OwnerId, Vec<(NodeId, Amounts)>)> = Vec::new();
        let mut values = None;
        for (number, action) in actions.into_iter().enumerate() {
            let mut charged: BTreeMap<NodeId, Amounts> = BTreeMap::new();
            for (node, amounts) in claims.iter().flat_map(|(_, parts)| parts) {
                for (name, &amount) in amounts {
                    let sum = charged.entry(*node).or_default().entry(name.clone()).or_default();
                    *sum = sum.checked_add(amount).unwrap();
                }
            }
            let free = machine.nodes.iter().map(|(&node, of)| {
                let cpus = &(ledger.shared_pool() & &allocatable.cpus) & &of.cpus;
                let memory = ledger.nodes()[&node].kinds.iter().map(|(&kind, account)| (kind, account.free.0));
                (node, NodeAmounts { cpus: devices.usable_cpus(node, &cpus), memory: memory.collect() })
            });
            let mut published = devices.publish(&free.collect(), &charged);
            let mut now: Vec<_> =
                published.iter().map(|device| (device.name.clone(), device.capacity.clone())).collect();
            now.sort_by(|a, b| a.0.cmp(&b.0));
            prop_assert_eq!(values.get_or_insert_with(|| now.clone()), &now);
            let node_of = |attributes: &BTreeMap<Arc<str>, Attribute>| match attributes[NUMA_NODE] {
                Attribute::Int(node) => NodeId(u32::try_from(node).unwrap()),
                _ => panic!("not a number"),
            };
            for device in &mut published {
                device.consumed = charged.get(&node_of(&device.attributes)).cloned().unwrap_or_default();
            }
            match action {
                Action::Release(which) if which < claims.len() => {
                    let (owner, parts) = claims.swap_remove(which);
                    for part in 0..parts.len() {
                        ledger = strategy.release(&ledger, &format!("{owner}.{part}").into());
                    }
                }
                Action::Release(_) => {}
                Action::Claim(count, cpus, mib) => {
                    let capacity = json!({"cpu": cpus.to_string(), "memory": format!("{mib}Mi")});
                    let exactly = json!({"selectors": [{"driver": DRIVER}], "count": count, "capacity": capacity});
                    let claim = json!({"requests": [{"name": "r", "exactly": exactly}]});
                    let claim: Claim = serde_json::from_value(claim).unwrap();
                    let slices = [Slice {
                        name: "s".into(),
                        driver: DRIVER.into(),
                        pool: "h".into(),
                        devices: published,
                    }];
                    let Some(mut results) = allocate(&slices, &[claim]) else { continue };
                    let owner: OwnerId = format!("c{number}").into();
                    let mut parts = Vec::new();
                    for (part, result) in results.remove(0).into_iter().enumerate() {
                        let node = node_of(&slices[0].devices[result.device.1].attributes);
                        let name = format!("{owner}.{part}").into();
                        let (request, terms) = placement_request(name, Some(node), &result.consumed);
                        let decision = strategy.admit_watched(&ledger, &request, &terms, &|_| {});
                        prop_assert!(decision.outcome.is_ok(), "{:?}: {:?}", decision.outcome, result);
                        ledger = decision.ledger;
                        parts.push((node, result.consumed));
                    }
                    claims.push((owner, parts));
                }
            }
        }
    }
}

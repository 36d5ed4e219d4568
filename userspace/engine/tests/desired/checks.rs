//! Members of a check: conditions after a step.

use std::collections::BTreeSet;

use numaward_engine::{Allocation, ContainerName, OwnerId, Request, ledger::NodeAccount};
use numaward_topology::{CpuSet, NodeId, ZoneKind};
use serde_json::{Map, Value};

use super::scenario::{Outcome, World};

type Nodes = BTreeSet<u32>;

/// Success, or the actual value.
type Verdict = Result<(), String>;

fn expect(holds: bool, instead: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(instead()) }
}

/// Checks one member.
pub(super) fn holds(
    world: &World,
    outcome: &Outcome,
    member: &str,
    expected: &Value,
    only_admitted: bool,
) -> Verdict {
    let text = || expected.as_str().unwrap_or_default();
    let reason = outcome.rejection.as_ref().map(|rejection| rejection.reason.to_string());
    match member {
        "admitted" => expect(outcome.admitted == expected.as_bool(), || {
            let message = outcome.rejection.as_ref().map(|rejection| rejection.message.clone());
            format!("{:?}, {}", outcome.admitted, message.unwrap_or_default())
        }),
        "reason" => expect(reason.as_deref() == Some(text()), || format!("{reason:?}")),
        "reason_is_not" => expect(reason.as_deref() != Some(text()), || format!("{reason:?}")),
        "message_must_name" => {
            let message = message(outcome);
            let lower = message.to_lowercase();
            let mut words = strings(expected).into_iter();
            expect(words.all(|word| lower.contains(&word.to_lowercase())), || message.clone())
        }
        "start" => {
            expect((text() == "ok") == outcome.start_error.is_none(), || format!("{:?}", outcome.start_error))
        }
        "restart" => kept(world, outcome, only_admitted),
        "readmitted" => {
            let missing: Vec<String> =
                strings(expected).into_iter().filter(|name| !world.admitted.contains_key(name)).collect();
            expect(missing.is_empty(), || format!("not {missing:?}"))
        }
        "memory_kept" => strings(expected).iter().try_for_each(|name| same(world, name, false)),
        "holds_nothing" => {
            let holds = |name: &String| {
                let account = world.ledger.owner(&OwnerId::from(name.as_str()));
                account.is_some_and(|account| account.containers.values().any(|held| !held.is_empty()))
            };
            let holding: Vec<String> = strings(expected).into_iter().filter(holds).collect();
            expect(holding.is_empty(), || format!("{holding:?} hold something"))
        }
        "shared_pool" => {
            let pool = world.ledger.shared_pool().to_string();
            expect(pool == text(), || pool.clone())
        }
        "shared_pool_not_empty" => {
            expect(!world.ledger.shared_pool().is_empty(), || "it is empty".to_owned())
        }
        "free_bytes" => free_bytes(world, expected),
        "free_sum_bytes" => free_sums(world, expected),
        "max_ms" => {
            let most = u128::from(expected.as_u64().unwrap_or(0));
            expect(outcome.took.as_millis() < most, || format!("{:?}", outcome.took))
        }
        "one_of" => {
            let groups = expected.as_array().map_or(&[][..], Vec::as_slice);
            let group_holds = |group: &Value| {
                let members = group.as_object();
                members.is_some_and(|members| {
                    members
                        .iter()
                        .all(|(member, of)| holds(world, outcome, member, of, only_admitted).is_ok())
                })
            };
            expect(groups.iter().any(group_holds), || "none of them".to_owned())
        }
        "cpus_exclude" => {
            let excluded: CpuSet = text().parse().map_err(|error| format!("{error}"))?;
            let taken = |held: &Allocation| held.cpus.as_ref().is_some_and(|cpus| cpus.intersects(&excluded));
            let owner = outcome.pod.as_ref().and_then(|pod| world.ledger.owner(&pod.owner));
            let any = owner.is_some_and(|account| account.containers.values().any(taken));
            expect(!any, || "one of them has".to_owned())
        }
        "one_node" => strings(expected).iter().try_for_each(|container| {
            let places = Places::new(world, outcome, container)?;
            let all: Nodes = places.cpus.union(&places.memory).copied().collect();
            expect(all.len() == 1, || format!("{container}: {places:?}"))
        }),
        _ => of_containers(world, outcome, member, expected),
    }
}

/// Checks a member with alternatives for each container.
fn of_containers(world: &World, outcome: &Outcome, member: &str, expected: &Value) -> Verdict {
    let containers = expected.as_object().ok_or_else(|| format!("unknown member {member}"))?;
    for (container, alternatives) in containers {
        let places = Places::new(world, outcome, container)?;
        let fits = |test: &dyn Fn(&Nodes) -> bool| {
            expect(sets(alternatives).iter().any(test), || format!("{container}: {places:?}"))
        };
        match member {
            "container_nodes" => {
                fits(&|of| (places.memory.is_empty() || places.memory == *of) && places.cpus.is_subset(of))?;
            }
            "cpu_nodes" => fits(&|of| places.cpus == *of)?,
            "memory_nodes" => fits(&|of| places.memory == *of)?,
            "cpu_nodes_within" => fits(&|of| places.memory == *of && places.cpus.is_subset(of))?,
            "kind_nodes" => {
                for (kind, alternatives) in alternatives.as_object().unwrap_or(&Map::new()) {
                    let kind: ZoneKind = kind.parse().map_err(|error| format!("{error}"))?;
                    let on = places.of_kind(kind);
                    expect(sets(alternatives).contains(&on), || format!("{container}: {kind} on {on:?}"))?;
                }
            }
            other => return Err(format!("unknown member {other}")),
        }
    }
    Ok(())
}

/// Nodes of a container of the step's pod.
#[derive(Debug)]
struct Places {
    cpus: Nodes,
    memory: Nodes,
    held: Allocation,
}

impl Places {
    fn new(world: &World, outcome: &Outcome, container: &str) -> Result<Self, String> {
        let pod = outcome.pod.as_ref().ok_or("the step has no pod")?;
        let held =
            world.ledger.allocation(&pod.owner, &ContainerName::from(container)).cloned().unwrap_or_default();
        let cpus = held.cpus.iter().flat_map(CpuSet::iter);
        let cpus = cpus.filter_map(|cpu| world.machine.cpus.get(&cpu)).map(|cpu| cpu.node.0).collect();
        let memory = held.placed.values().flat_map(|nodes| nodes.keys()).map(|node| node.0).collect();
        Ok(Self { cpus, memory, held })
    }

    fn of_kind(&self, kind: ZoneKind) -> Nodes {
        self.held.placed.get(&kind).into_iter().flat_map(|nodes| nodes.keys()).map(|node| node.0).collect()
    }
}

fn strings(value: &Value) -> Vec<String> {
    let values = value.as_array().map_or(&[][..], Vec::as_slice);
    values.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect()
}

fn sets(value: &Value) -> Vec<Nodes> {
    let node = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let set = |value: &Value| value.as_array().into_iter().flatten().filter_map(node).collect();
    value.as_array().into_iter().flatten().map(set).collect()
}

/// Returns all texts of a rejection or a refused start.
fn message(outcome: &Outcome) -> String {
    let mut message = outcome.start_error.clone().unwrap_or_default();
    if let Some(rejection) = &outcome.rejection {
        message.push_str(&rejection.message);
        for shortfall in &rejection.shortfalls {
            message.push_str("; ");
            message.push_str(&shortfall.to_string());
        }
    }
    message
}

/// Checks that all running pods hold the same as at their admission.
fn kept(world: &World, outcome: &Outcome, only_admitted: bool) -> Verdict {
    expect(outcome.start_error.is_none(), || format!("{:?}", outcome.start_error))?;
    for name in &outcome.order {
        if !world.admitted.contains_key(name) {
            expect(only_admitted, || format!("{name} does not run"))?;
            continue;
        }
        same(world, name, true)?;
    }
    Ok(())
}

/// Checks that the running containers of a pod have the same node sets and bytes and, with `cpus`, the same CPUs.
fn same(world: &World, name: &str, cpus: bool) -> Verdict {
    let (request, before) = world.admitted.get(name).ok_or_else(|| format!("{name} does not run"))?;
    for container in request.all_containers().filter(|of| !is_over(request, &of.name)) {
        let none = Allocation::default();
        let before = before.get(&container.name).unwrap_or(&none);
        let now = world.ledger.allocation(&request.owner, &container.name).unwrap_or(&none);
        expect(!cpus || before.cpus == now.cpus, || {
            format!("{name}: CPUs {:?}, were {:?}", now.cpus, before.cpus)
        })?;
        expect(before.blocks == now.blocks, || format!("{name}: {:?}, was {:?}", now.blocks, before.blocks))?;
        let sum = |of: &Allocation| -> u64 {
            of.placed.values().flat_map(|nodes| nodes.values()).map(|of| of.0).sum()
        };
        expect(sum(before) == sum(now), || format!("{name}: {:?}, was {:?}", now.placed, before.placed))?;
    }
    Ok(())
}

fn is_over(request: &Request, name: &ContainerName) -> bool {
    request.is_regular_init(name)
}

fn free_bytes(world: &World, expected: &Value) -> Verdict {
    for (node, kinds) in expected.as_object().unwrap_or(&Map::new()) {
        let node: u32 = node.parse().map_err(|error| format!("{node}: {error}"))?;
        for (kind, bytes) in kinds.as_object().unwrap_or(&Map::new()) {
            let kind: ZoneKind = kind.parse().map_err(|error| format!("{error}"))?;
            let account =
                world.ledger.nodes().get(&NodeId(node)).and_then(|account| account.kinds.get(&kind));
            let free = account.map_or(0, |account| account.free.0);
            expect(Some(free) == bytes.as_u64(), || format!("node {node}: {free}"))?;
        }
    }
    Ok(())
}

fn free_sums(world: &World, expected: &Value) -> Verdict {
    for (kind, bytes) in expected.as_object().unwrap_or(&Map::new()) {
        let kind: ZoneKind = kind.parse().map_err(|error| format!("{error}"))?;
        let free = |account: &NodeAccount| account.kinds.get(&kind).map_or(0, |of| of.free.0);
        let sum: u64 = world.ledger.nodes().values().map(free).sum();
        expect(Some(sum) == bytes.as_u64(), || format!("{kind}: {sum}"))?;
    }
    Ok(())
}

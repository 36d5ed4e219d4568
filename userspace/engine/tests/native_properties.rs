//! Properties of `native` for arbitrary machines and sequences of requests.

#![expect(clippy::unwrap_used, reason = "what makes random cases fails the test if it fails")]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use numaward_engine::{
    Allocation, ContainerName, ContainerRequest, HostConditions, KubeletStrategy, Ledger, NativeOptions,
    NativeStrategy, OwnerId, PolicyConfig, Quantity, RebalanceLimits, Request, Resources, Strategy as _,
    Terms,
    hint::Resource,
    in_flight,
    native::MAX_WORK,
    placement_search::Rank,
    policy::{
        CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, Tiers, TopologyManagerPolicy,
        TopologyManagerScope,
    },
};
use numaward_simulation::replay::faults;
use numaward_topology::{Bytes, CpuSet, HugepageSize, Machine, NodeId, ZoneKind};
use proptest::{collection, option, prelude::*, sample};

const PAGE: HugepageSize = HugepageSize(Bytes::mib(2));

/// Makes nodes of different sizes and distances, some without CPUs.
fn machine(most: usize) -> impl Strategy<Value = Machine> {
    let node = (0u32..=4, 1u64..=8, 0u64..=2);
    let nodes = collection::vec(node, 1..=most);
    (nodes, collection::vec(11u32..=14, 32), 1u32..=2).prop_map(|(nodes, distances, smt)| {
        let count = u32::try_from(nodes.len()).unwrap();
        let mut builder =
            Machine::builder().nodes(count).sockets(1).smt(smt).cores_per_node(1).memory(Bytes::gib(1));
        for (id, &(cores, gib, _)) in nodes.iter().enumerate() {
            // The first node has the reserved CPUs.
            let cores = if id == 0 { cores + 1 } else { cores };
            builder = builder
                .node(NodeId(u32::try_from(id).unwrap()), |node| node.cores(cores).memory(Bytes::gib(gib)));
        }
        let between = |a: usize, b: usize| match a.cmp(&b) {
            std::cmp::Ordering::Equal => 10,
            std::cmp::Ordering::Less => distances[(a * 5 + b) % 32],
            std::cmp::Ordering::Greater => distances[(b * 5 + a) % 32],
        };
        let rows: Vec<Vec<u32>> =
            (0..nodes.len()).map(|a| (0..nodes.len()).map(|b| between(a, b)).collect()).collect();
        let mut machine = builder.distances(rows).build().unwrap();
        for (node, (_, _, pages)) in machine.nodes.values_mut().zip(nodes) {
            let total = pages * 64;
            node.hugepages.insert(PAGE, numaward_topology::HugepagePool { total, free: total, surplus: 0 });
        }
        machine
    })
}

fn config(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> PolicyConfig {
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation {
            numa_node: NodeId(0),
            limits: BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::mib(64).0))]),
        }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(1)),
        topology_manager_policy: policy,
        topology_manager_scope: scope,
        ..PolicyConfig::default()
    }
}

fn native(machine: &Machine, config: &PolicyConfig, tiers: Tiers) -> NativeStrategy {
    NativeStrategy::new(machine, config, &NativeOptions { tiers, ..NativeOptions::default() }).unwrap()
}

fn policy() -> impl Strategy<Value = TopologyManagerPolicy> {
    sample::select(TopologyManagerPolicy::ALL)
}

fn scope() -> impl Strategy<Value = TopologyManagerScope> {
    sample::select(TopologyManagerScope::ALL)
}

fn container() -> impl Strategy<Value = ContainerRequest> {
    (1u64..=12, 1u64..=48, option::weighted(0.2, 1u64..=64)).prop_map(|(half_cpus, memory, pages)| {
        let mut resources = Resources::none()
            .with_cpu(Quantity::milli(half_cpus * 500))
            .with_memory(Quantity::whole(memory << 28));
        if let Some(pages) = pages {
            resources = resources.with_hugepages(PAGE, Quantity::whole(pages << 21));
        }
        ContainerRequest::guaranteed("", resources)
    })
}

/// Makes a request; the caller sets the owner.
fn request(init: usize, apps: usize) -> impl Strategy<Value = Request> {
    let init = collection::vec((container(), any::<bool>()), 0..=init);
    (init, collection::vec(container(), 1..=apps)).prop_map(|(init, apps)| {
        let named = |prefix: &str, index: usize, container: ContainerRequest| ContainerRequest {
            name: format!("{prefix}{index}").into(),
            ..container
        };
        let init = init.into_iter().enumerate().map(|(index, (container, restartable))| ContainerRequest {
            restartable,
            ..named("i", index, container)
        });
        let apps = apps.into_iter().enumerate().map(|(index, container)| named("c", index, container));
        Request {
            owner: "".into(),
            init_containers: init.collect(),
            containers: apps.collect(),
            resources: None,
        }
    })
}

/// Selects some of the nodes, mostly none.
fn nodes(most: usize) -> impl Strategy<Value = BTreeSet<usize>> {
    option::weighted(0.3, collection::btree_set(0..most, 1..=2)).prop_map(Option::unwrap_or_default)
}

fn admit(native: &NativeStrategy, ledger: &Ledger, request: &Request) -> Option<Ledger> {
    let decision = native.admit(ledger, request);
    decision.outcome.ok()?;
    Some(start(native, decision.ledger, request))
}

/// Returns the containers with a number of exclusive or hidden CPUs that differs from the request.
fn wrong_counts(machine: &Machine, ledger: &Ledger) -> Vec<String> {
    let cores: BTreeSet<_> = machine.cpus.values().map(|cpu| cpu.core).collect();
    let siblings = machine.cpus.len() / cores.len() - 1;
    let is_wrong = |owner: &OwnerId, container: &ContainerName, held: &Allocation| {
        let account = ledger.owner(owner).unwrap();
        let mut asked = account.request.as_ref().unwrap().all_containers();
        let asked = asked.find(|of| of.name == *container).unwrap().requests.cpu.unwrap();
        let count = held.cpus.as_ref().map_or(0, CpuSet::len);
        let hidden = if account.terms.hide_siblings { count * siblings } else { 0 };
        count > 0 && asked.whole_cpus() != Some(count as u64) || held.hidden_cpus.len() != hidden
    };
    let wrong = ledger.allocations().filter(|(owner, container, held)| is_wrong(owner, container, held));
    wrong.map(|(owner, container, held)| format!("{owner}: {container}: {held:?}")).collect()
}

fn start(native: &NativeStrategy, ledger: Ledger, request: &Request) -> Ledger {
    let start =
        |ledger: Ledger, of: &ContainerRequest| native.note_started(&ledger, &request.owner, &of.name);
    request.all_containers().fold(ledger, start)
}

// ---------------------------------------------------------------------------------------------------------
// Brute force

/// Input of the enumeration: free, offered and allocatable amounts by node, and the need. Independent of the search.
struct PlacementProblem {
    free: Vec<Vec<u64>>,
    offered: Vec<Vec<u64>>,
    capacity: Vec<Vec<u64>>,
    need: Vec<u64>,
    memory: usize,
    /// Nodes of the devices, and preferred nodes; all nodes if none is named.
    devices: Vec<usize>,
    wished: Vec<usize>,
}

impl PlacementProblem {
    fn with(self, devices: &BTreeSet<usize>, wished: &BTreeSet<usize>) -> Self {
        let count = self.free[0].len();
        let known = |of: &BTreeSet<usize>| of.iter().copied().filter(|&at| at < count).collect();
        Self { devices: known(devices), wished: known(wished), ..self }
    }
}

/// Returns terms with these preferences.
fn terms(container: &str, question: &PlacementProblem) -> Terms {
    let nodes = |of: &[usize]| of.iter().map(|&at| NodeId(u32::try_from(at).unwrap())).collect();
    let mut terms = Terms::default();
    if !question.devices.is_empty() {
        terms.preferences.devices.insert(container.into(), nodes(&question.devices));
    }
    if !question.wished.is_empty() {
        terms.preferences.preferred.insert(container.into(), nodes(&question.wished));
    }
    terms
}

fn members(mask: u32) -> Vec<usize> {
    (0..32).filter(|at| mask >> at & 1 == 1).collect()
}

/// Returns the best placement over all sets of nodes for each resource: its rank and its sets.
fn best(
    machine: &Machine,
    question: &PlacementProblem,
    policy: TopologyManagerPolicy,
) -> Option<(Rank, Vec<Vec<usize>>)> {
    let count = question.free[0].len();
    let enough = |columns: &[Vec<u64>], of: usize, mask: u32| {
        members(mask).iter().map(|&at| columns[of][at]).sum::<u64>() >= question.need[of]
    };
    let needed: Vec<usize> = (0..question.need.len()).filter(|&of| question.need[of] > 0).collect();
    let least: Vec<u32> = (0..question.need.len())
        .map(|of| {
            let fitting = (0..1u32 << count).filter(|&mask| enough(&question.capacity, of, mask));
            fitting.map(u32::count_ones).min().unwrap_or(u32::MAX)
        })
        .collect();
    let devices = question.devices.iter().fold(0u32, |mask, at| mask | 1 << at);
    let mut best: Option<(Rank, Vec<usize>, Vec<Vec<usize>>)> = None;
    let mut masks = vec![0u32; question.need.len()];
    loop {
        let allowed = needed.iter().all(|&of| enough(&question.offered, of, masks[of]))
            && (0..masks.len()).all(|of| (masks[of] == 0) == (question.need[of] == 0))
            && match policy {
                TopologyManagerPolicy::SingleNumaNode => {
                    masks.iter().fold(0, |all, mask| all | mask).is_power_of_two()
                }
                TopologyManagerPolicy::Restricted => needed.iter().all(|&a| {
                    masks[a].count_ones() == least[a]
                        && needed.iter().all(|&b| least[a] > least[b] || masks[a] & !masks[b] == 0)
                }),
                _ => true,
            }
            && (matches!(policy, TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort) || {
                let all = masks.iter().fold(0, |all, mask| all | mask);
                let with_devices =
                    if devices.count_ones() < all.count_ones() { devices & !all } else { all & !devices };
                devices == 0 || with_devices == 0
            });
        if allowed {
            let sets: Vec<Vec<usize>> = masks.iter().map(|&mask| members(mask)).collect();
            let nodes = members(masks.iter().fold(0, |all, mask| all | mask));
            let candidate = (rank(machine, question, &sets), nodes, sets);
            if best.as_ref().is_none_or(|best| candidate < *best) {
                best = Some(candidate);
            }
        }
        // Next combination of sets.
        let Some(of) = needed.iter().copied().find(|&of| masks[of] + 1 < 1 << count) else { break };
        masks[of] += 1;
        for &before in needed.iter().take_while(|&&before| before != of) {
            masks[before] = 0;
        }
    }
    best.map(|(rank, _, sets)| (rank, sets))
}

/// Returns the subsets of this size.
fn choose(of: &[usize], count: usize) -> Vec<Vec<usize>> {
    let Some((&first, rest)) = of.split_first() else {
        return if count == 0 { vec![Vec::new()] } else { Vec::new() };
    };
    let with = if count == 0 { Vec::new() } else { choose(rest, count - 1) };
    let with = with.into_iter().map(|set| [vec![first], set].concat());
    with.chain(choose(rest, count)).collect()
}

/// Returns the best combination of sets for each resource, in the order of [`Rank`].
fn best_of(
    machine: &Machine,
    question: &PlacementProblem,
    options: &[Vec<Vec<usize>>],
) -> Option<(Rank, Vec<Vec<usize>>)> {
    let mut all: Vec<Vec<Vec<usize>>> = vec![Vec::new()];
    for of in options {
        all = all
            .iter()
            .flat_map(|sets| of.iter().map(move |set| [sets.clone(), vec![set.clone()]].concat()))
            .collect();
    }
    all.into_iter().map(|sets| (rank(machine, question, &sets), sets)).min()
}

fn sum(question: &PlacementProblem, of: usize, set: &[usize]) -> u64 {
    set.iter().map(|&at| question.offered[of][at]).sum()
}

/// Returns the best placement on the smallest number of nodes, including those of devices.
fn best_of_smallest(machine: &Machine, question: &PlacementProblem) -> Option<(Rank, Vec<Vec<usize>>)> {
    let count = question.free[0].len();
    let enough =
        |set: &[usize]| (0..question.need.len()).all(|of| sum(question, of, set) >= question.need[of]);
    let with_devices = |set: &[usize]| set.iter().chain(&question.devices).collect::<BTreeSet<_>>().len();
    let fitting: Vec<Vec<usize>> = (1..1u32 << count).map(members).filter(|set| enough(set)).collect();
    let fewest = fitting.iter().map(|set| with_devices(set)).min()?;
    let smallest = |set: &Vec<usize>| {
        let options: Vec<Vec<Vec<usize>>> = (0..question.need.len())
            .map(|of| {
                let fits = |count: &usize| {
                    let sets = choose(set, *count).into_iter();
                    sets.filter(|set| sum(question, of, set) >= question.need[of]).collect::<Vec<_>>()
                };
                (0..=set.len()).map(|count| fits(&count)).find(|sets| !sets.is_empty()).unwrap()
            })
            .collect();
        best_of(machine, question, &options)
    };
    let smallest = fitting.iter().filter(|set| with_devices(set) == fewest).filter_map(smallest);
    smallest.min()
}

/// Returns the best placement on the smallest number of nodes for each resource, with smaller sets within larger
/// ones.
fn best_sized(machine: &Machine, question: &PlacementProblem) -> Option<(Rank, Vec<Vec<usize>>)> {
    let count = question.free[0].len();
    let all: Vec<usize> = (0..count).collect();
    let least = |of: usize| {
        let mut capacity = question.capacity[of].clone();
        capacity.sort_unstable_by(|a, b| b.cmp(a));
        (0..=count).find(|&size| capacity[..size].iter().sum::<u64>() >= question.need[of])
    };
    let sizes: Vec<usize> = (0..question.need.len()).map(least).collect::<Option<_>>()?;
    let largest = sizes.iter().copied().max()?;
    let allowed = |outer: &Vec<usize>| {
        let (few, many) = if question.devices.len() < outer.len() {
            (&question.devices, outer)
        } else {
            (outer, &question.devices)
        };
        question.devices.is_empty() || few.iter().all(|at| many.contains(at))
    };
    let of_outer = |outer: Vec<usize>| {
        let options: Vec<Vec<Vec<usize>>> = (0..sizes.len())
            .map(|of| {
                choose(&outer, sizes[of])
                    .into_iter()
                    .filter(|set| sum(question, of, set) >= question.need[of])
                    .collect()
            })
            .collect();
        best_of(machine, question, &options)
    };
    choose(&all, largest).into_iter().filter(allowed).filter_map(of_outer).min()
}

fn rank(machine: &Machine, question: &PlacementProblem, sets: &[Vec<usize>]) -> Rank {
    let ids: Vec<NodeId> = machine.nodes.keys().copied().collect();
    let distance = |a: usize, b: usize| u64::from(machine.distance(ids[a], ids[b]).unwrap());
    let mut memory: Vec<usize> = sets[1..].iter().flatten().copied().collect();
    memory.sort_unstable();
    memory.dedup();
    let mut nodes = memory.clone();
    nodes.extend(&sets[0]);
    nodes.sort_unstable();
    nodes.dedup();
    let with_cpus: Vec<usize> = (0..ids.len())
        .filter(|&at| machine.nodes.get(&ids[at]).is_some_and(|node| !node.cpus.is_empty()))
        .collect();
    let from_cpus = |at: usize| with_cpus.iter().map(|&cpu| distance(cpu, at)).min().unwrap_or(0);
    let pairs = |set: &[usize]| -> u64 {
        set.iter().flat_map(|&a| set.iter().filter(move |&&b| a < b).map(move |&b| distance(a, b))).sum()
    };
    let taken = |of: usize| {
        let mut left = question.need[of];
        let mut order = sets[of].clone();
        order.sort_by_key(|&at| (question.free[of][at], at));
        let mut taken = vec![0; ids.len()];
        for at in order {
            taken[at] = left.min(question.free[of][at]);
            left -= taken[at];
        }
        taken
    };
    let (cpus, bytes) = (taken(0), taken(question.memory));
    let product = |cpus: u64, bytes: u64| u128::from(cpus) * u128::from(bytes);
    let stranded = (0..ids.len())
        .map(|at| {
            let (free_cpus, free_bytes) = (question.free[0][at], question.free[question.memory][at]);
            product(free_cpus, free_bytes) - product(free_cpus - cpus[at], free_bytes - bytes[at])
        })
        .sum();
    let without = question.devices.iter().filter(|at| !nodes.contains(at)).count();
    let not_preferred =
        nodes.iter().filter(|at| !question.wished.is_empty() && !question.wished.contains(at));
    let from_device = |&device: &usize| nodes.iter().map(|&at| distance(device, at)).sum::<u64>();
    Rank {
        nodes: (nodes.len() + without) as u64,
        not_preferred: not_preferred.count() as u64,
        from_devices: question.devices.iter().map(from_device).sum(),
        nodes_per_resource: sets.iter().map(|set| set.len() as u64).sum(),
        cpu_to_cpu: pairs(&sets[0]),
        cpu_to_memory: match sets[0].as_slice() {
            [] => memory.iter().map(|&at| from_cpus(at)).sum(),
            cpus => cpus.iter().flat_map(|&a| memory.iter().map(move |&b| distance(a, b))).sum(),
        },
        memory_to_memory: pairs(&memory),
        stranded,
        ..Rank::default()
    }
}

/// Makes a request of one container.
fn question(
    machine: &Machine,
    native: &NativeStrategy,
    ledger: &Ledger,
    container: &ContainerRequest,
) -> PlacementProblem {
    let kinds: Vec<ZoneKind> = vec![ZoneKind::Hugepages(PAGE), ZoneKind::Memory];
    let allocatable = native.allocatable();
    let cpus = |of: &CpuSet| -> Vec<u64> {
        machine.nodes.values().map(|node| (&(of & &allocatable.cpus) & &node.cpus).len() as u64).collect()
    };
    let column = |kind: ZoneKind, capacity: bool| -> Vec<u64> {
        let of = |account: &numaward_engine::ledger::NodeAccount| {
            account.kinds.get(&kind).map_or(0, |of| if capacity { of.allocatable.0 } else { of.free.0 })
        };
        ledger.nodes().values().map(of).collect()
    };
    let mut question = PlacementProblem {
        free: vec![cpus(ledger.shared_pool())],
        offered: vec![cpus(ledger.shared_pool())],
        capacity: vec![cpus(&machine.cpu_ids())],
        need: vec![container.requests.cpu.and_then(Quantity::whole_cpus).unwrap_or(0)],
        memory: 2,
        devices: Vec::new(),
        wished: Vec::new(),
    };
    for kind in kinds {
        let free = column(kind, false);
        let offered = ledger.nodes().keys().zip(&free);
        let offered =
            offered.map(|(&node, free)| free.saturating_sub(ledger.conditions().withheld_on(kind, node).0));
        question.offered.push(offered.collect());
        question.free.push(free);
        question.capacity.push(column(kind, true));
        question.need.push(container.requests.memory.get(&kind).and_then(|of| of.units()).unwrap_or(0));
    }
    question
}

/// Makes withheld amounts: GiB and huge pages by node.
fn conditions(machine: &Machine, in_use: &[(u64, u64)]) -> Arc<HostConditions> {
    let kinds = [ZoneKind::Memory, ZoneKind::Hugepages(PAGE)];
    let of_kind = |kind: ZoneKind| {
        machine.nodes.keys().zip(in_use).map(move |(&node, &(gib, pages))| {
            (node, if kind == ZoneKind::Memory { Bytes::gib(gib) } else { Bytes(pages << 21) })
        })
    };
    let withheld = kinds.map(|kind| (kind, of_kind(kind).collect())).into();
    Arc::new(HostConditions { withheld, ..HostConditions::default() })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn finds_best_placement(
        machine in machine(5),
        policy in policy(),
        before in collection::vec(request(0, 1), 0..6),
        newcomer in request(0, 1),
        in_use in option::of(collection::vec((0u64..=4, 0u64..=64), 5)),
        (devices, wished) in (nodes(5), nodes(5)),
    ) {
        let native = native(&machine, &config(policy, TopologyManagerScope::Container), Tiers::Strict);
        let mut ledger = native.idle();
        let best_effort = Terms { policy: Some(TopologyManagerPolicy::BestEffort), ..Terms::default() };
        for (number, request) in before.into_iter().enumerate() {
            let request = Request { owner: format!("o{number}").as_str().into(), ..request };
            ledger = native.admit_watched(&ledger, &request, &best_effort, &|_| {}).ledger;
        }
        let newcomer = Request { owner: "new".into(), ..newcomer };
        if let Some(in_use) = in_use {
            ledger.set_conditions(conditions(&machine, &in_use));
        }
        let question = question(&machine, &native, &ledger, &newcomer.containers[0]).with(&devices, &wished);
        let best = best(&machine, &question, policy);
        let terms = terms(newcomer.containers[0].name.as_str(), &question);
        let decision = native.admit_watched(&ledger, &newcomer, &terms, &|_| {});
        prop_assert_eq!(decision.outcome.is_ok(), best.is_some(), "{:?}", decision.outcome);
        if let Some((rank, sets)) = best {
            let search = &decision.explanation.searches[0];
            let chosen = &search.candidates[search.chosen.unwrap()];
            prop_assert_eq!(chosen.rank, rank, "{:?} {:?}", chosen, sets);
            prop_assert!(!search.is_incomplete);
            // The allocation matches the chosen candidate.
            let held = &decision.outcome.unwrap()[0].allocation;
            for (resource, nodes) in &chosen.by_resource {
                if let &Resource::Memory(kind) = resource {
                    let placed = &held.placed[&kind];
                    prop_assert_eq!(&placed.keys().copied().collect::<numaward_topology::NodeSet>(), nodes);
                }
            }
        }
    }

    #[test]
    fn finds_best_on_larger_machines(
        used in collection::vec((0u64..=15, 0u64..=15), 9..=16),
        (cpus, gib) in (1u64..=44, 1u64..=44),
        sockets in option::of(1u32..=3),
        distances in collection::vec(11u32..=14, 64),
        (devices, wished) in (nodes(16), nodes(16)),
        is_sized in any::<bool>(),
    ) {
        let count = u32::try_from(used.len()).unwrap();
        let builder = Machine::builder().nodes(count).cores_per_node(16).memory(Bytes::gib(16));
        let builder = if let Some(sockets) = sockets {
                let sockets = if count.is_multiple_of(sockets) { sockets } else { 1 };
                builder.sockets(sockets).socket_distances(12, 32)
            } else {
                let between = |a: u32, b: u32| {
                    if a == b { 10 } else { distances[usize::try_from((a.min(b) * 7 + a.max(b)) % 64).unwrap()] }
                };
                let rows = (0..count).map(|a| (0..count).map(|b| between(a, b)).collect::<Vec<_>>());
                builder.sockets(1).distances(rows.collect::<Vec<_>>())
        };
        let machine = builder.build().unwrap();
        let policy = if is_sized { TopologyManagerPolicy::Restricted } else { TopologyManagerPolicy::BestEffort };
        let native = native(&machine, &config(policy, TopologyManagerScope::Container), Tiers::Strict);
        let mut ledger = native.idle();
        for (node, &(cpus, gib)) in (0..count).zip(&used) {
            let resources = Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(Bytes::gib(gib).0));
            let owner = format!("o{node:02}");
            let request = Request::workload(owner.as_str(), resources);
            let terms = Terms {
                policy: Some(TopologyManagerPolicy::SingleNumaNode),
                nodes: [NodeId(node)].into_iter().collect(),
                ..Terms::default()
            };
            ledger = native.admit_watched(&ledger, &request, &terms, &|_| {}).ledger;
        }
        let resources = Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(Bytes::gib(gib).0));
        let newcomer = Request::workload("new", resources);
        let question = question(&machine, &native, &ledger, &newcomer.containers[0]).with(&devices, &wished);
        let best = if is_sized { best_sized(&machine, &question) } else { best_of_smallest(&machine, &question) };
        let decision = native.admit_watched(&ledger, &newcomer, &terms("new", &question), &|_| {});
        let search = decision.explanation.searches.first();
        if search.is_some_and(|search| search.is_incomplete) {
            prop_assert!(decision.explanation.work >= MAX_WORK / 8, "cut off before its share was spent");
            let of_best = best.iter().flat_map(|(_, sets)| sets.iter().flatten());
            let nodes = of_best.chain(&question.devices).collect::<BTreeSet<_>>();
            prop_assert!(best.is_none() || nodes.len() > 3, "few nodes are not too much to look at: {:?}", nodes);
            return Ok(());
        }
        prop_assert_eq!(decision.outcome.is_ok(), best.is_some(), "{:?}", decision.outcome);
        if let Some((rank, sets)) = best {
            let search = search.unwrap();
            let chosen = &search.candidates[search.chosen.unwrap()];
            prop_assert_eq!(chosen.rank, rank, "{:?} {:?}", chosen, sets);
        }
    }

    #[test]
    fn no_overlap_and_full_release(
        machine in machine(4),
        (policy, scope) in (policy(), scope()),
        steps in collection::vec((request(2, 3), any::<sample::Index>(), 0u8..8, 1u64..=12, any::<bool>()), 1..14),
    ) {
        let native = native(&machine, &config(policy, scope), Tiers::Attached);
        let mut ledger = native.idle();
        let mut running: Vec<Request> = Vec::new();
        for (number, (request, index, kind, amount, hide_siblings)) in steps.into_iter().enumerate() {
            let terms = Terms { hide_siblings, ..Terms::default() };
            match kind {
                0 | 1 if !running.is_empty() => {
                    let request = running.remove(index.index(running.len()));
                    ledger = native.release(&ledger, &request.owner);
                }
                2 if !running.is_empty() => {
                    let request = &running[index.index(running.len())];
                    let to = Resources::none()
                        .with_cpu(Quantity::whole(amount))
                        .with_memory(Quantity::whole(amount << 28));
                    let resized = native.resize(&ledger, &request.owner, &request.containers[0].name, &to);
                    ledger = resized.unwrap_or(ledger);
                }
                3 => {
                    let request = Request { owner: format!("o{number}").as_str().into(), ..request };
                    let limits = RebalanceLimits { moves: 2, bytes: Bytes::gib(8), ..RebalanceLimits::default() };
                    if let Some(plan) = native.plan(&ledger, &request, &terms, &limits) {
                        prop_assert!(plan.moves.len() <= 2 * 5 && plan.bytes <= limits.bytes);
                        ledger = start(&native, plan.decision.ledger, &request);
                        running.push(request);
                    }
                }
                _ => {
                    let request = Request { owner: format!("o{number}").as_str().into(), ..request };
                    let decision = native.admit_watched(&ledger, &request, &terms, &|_| {});
                    if decision.outcome.is_ok() {
                        ledger = start(&native, decision.ledger, &request);
                        running.push(request);
                    } else {
                        prop_assert_eq!(&decision.ledger, &ledger, "a refusal changes nothing");
                    }
                }
            }
            let faults = faults(&ledger, &native.allocatable());
            prop_assert!(faults.is_empty(), "{:?}", faults);
            let wrong = wrong_counts(&machine, &ledger);
            prop_assert!(wrong.is_empty(), "{:?}", wrong);
            let text = serde_json::to_string(&ledger).unwrap();
            let read: Ledger = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(native.rebase(&read), (ledger.clone(), Vec::new()), "a restart changes nothing");
        }
        for request in running {
            ledger = native.release(&ledger, &request.owner);
        }
        prop_assert_eq!(ledger, native.idle());
    }

    #[test]
    fn every_plan_can_be_executed(
        cores in 2u32..=4,
        policy in sample::select(&TopologyManagerPolicy::ALL[1..]),
        is_strict in any::<bool>(),
        requests in collection::vec((1u64..=5, 1u64..=3, option::weighted(0.5, 0u32..3)), 4..12),
        (half_cpus, gib, bound) in (4u64..=8, 1u64..=8, option::of(0u32..3)),
    ) {
        let machine = Machine::builder().nodes(3).sockets(1).cores_per_node(cores).memory(Bytes::gib(8)).build().unwrap();
        let request = |owner: &str, half_cpus, gib| {
            let cpus = Resources::none().with_cpu(Quantity::milli(half_cpus * 500));
            Request::workload(owner, cpus.with_memory(Quantity::whole(Bytes::gib(gib).0)))
        };
        let mut config = config(policy, TopologyManagerScope::Container);
        if is_strict {
            config.cpu_manager_policy_options.insert("strict-cpu-reservation".to_owned(), "true".to_owned());
        }
        let native = native(&machine, &config, Tiers::Attached);
        let there = |node: Option<u32>| Terms { nodes: node.into_iter().map(NodeId).collect(), ..Terms::default() };
        let mut ledger = native.idle();
        for (number, (half_cpus, gib, node)) in requests.into_iter().enumerate() {
            let request = request(&format!("o{number}"), half_cpus, gib);
            let wish = there(node).nodes;
            let mut terms = Terms::default();
            terms.preferences.preferred.insert(request.owner.as_str().into(), wish);
            let decision = native.admit_watched(&ledger, &request, &terms, &|_| {});
            ledger = start(&native, decision.ledger, &request);
        }
        let (newcomer, terms) = (request("new", half_cpus, gib), there(bound));
        let limits = RebalanceLimits { moves: 2, in_order: true, ..RebalanceLimits::default() };
        if let Some(plan) = native.plan(&ledger, &newcomer, &terms, &limits) {
            let checked = in_flight::check_plan(&native, &ledger, &plan.moves, 0, (&newcomer, &terms));
            prop_assert_eq!(checked, Ok(()), "{:?}", plan.moves);
        }
    }

    #[test]
    fn machine_change_is_reversible(
        machine in machine(4),
        policy in policy(),
        requests in collection::vec(request(1, 2), 1..8),
        sizes in collection::vec(1u64..=8, 4),
    ) {
        let config = config(policy, TopologyManagerScope::Container);
        let native = native(&machine, &config, Tiers::Attached);
        let mut ledger = native.idle();
        for (number, request) in requests.iter().enumerate() {
            let request = Request { owner: format!("o{number}").as_str().into(), ..request.clone() };
            ledger = admit(&native, &ledger, &request).unwrap_or(ledger);
        }
        let mut changed = machine.clone();
        for (node, gib) in changed.nodes.values_mut().zip(&sizes) {
            node.memory = Bytes::gib(*gib);
        }
        let other = self::native(&changed, &config, Tiers::Attached);
        let (mut moved, uncovered) = other.rebase(&ledger);
        let held = |ledger: &Ledger| -> u64 {
            ledger.allocations().flat_map(|(_, _, held)| held.placed.values()).flat_map(|of| of.values()).map(|of| of.0).sum()
        };
        prop_assert_eq!(held(&ledger), held(&moved), "nobody loses anything");
        let missing: u64 = uncovered.iter().map(|part| part.block.bytes.0).sum();
        let over: u64 = moved.nodes().values().flat_map(|node| node.kinds.values())
            .map(|of| of.guaranteed.0.saturating_sub(of.allocatable.0)).sum();
        prop_assert_eq!(missing, over);
        for account in moved.nodes().values().flat_map(|node| node.kinds.values()) {
            prop_assert_eq!(account.free.0, account.allocatable.0.saturating_sub(account.guaranteed.0));
        }
        let owners: Vec<_> = moved.owners().map(|(owner, _)| owner.clone()).collect();
        for owner in owners {
            moved = other.release(&moved, &owner);
        }
        prop_assert_eq!(moved, other.idle());
    }

    #[test]
    fn withheld_memory_is_never_granted(
        machine in machine(5),
        (policy, scope) in (policy(), scope()),
        requests in collection::vec(request(2, 3), 1..10),
        in_use in collection::vec((0u64..=4, 0u64..=64), 5),
    ) {
        let native = native(&machine, &config(policy, scope), Tiers::Attached);
        let conditions = conditions(&machine, &in_use);
        let mut ledger = native.idle();
        let mut plain = native.idle();
        plain.set_conditions(self::conditions(&machine, &[(0, 0); 5]));
        let mut without = native.idle();
        for (number, request) in requests.iter().enumerate() {
            let request = Request { owner: format!("o{number}").as_str().into(), ..request.clone() };
            prop_assert_eq!(admit(&native, &plain, &request), admit(&native, &without, &request));
            without = admit(&native, &without, &request).unwrap_or(without);
            plain = admit(&native, &plain, &request).unwrap_or(plain);
            let before = ledger.clone();
            ledger.set_conditions(conditions.clone());
            let decision = native.admit(&ledger, &request);
            if let Err(rejection) = decision.outcome {
                prop_assert_eq!(&decision.ledger, &before);
                for of in rejection.shortfalls.iter().filter(|of| of.withheld > 0) {
                    let said = format!("({} more are used by workloads without a guarantee)", Bytes(of.withheld).rounded());
                    prop_assert!(of.to_string().contains(&said), "{}", of);
                    let Resource::Memory(kind) = of.resource else { panic!("{of}") };
                    let account = ledger.nodes()[&of.node].kinds[&kind];
                    prop_assert!(of.withheld <= conditions.withheld_on(kind, of.node).0.min(account.free.0));
                }
                continue;
            }
            for (node, account) in decision.ledger.nodes() {
                for (&kind, after) in &account.kinds {
                    let free = before.nodes()[node].kinds[&kind].free;
                    if after.free < free {
                        prop_assert!(after.free >= conditions.withheld_on(kind, *node), "{} {}", node, kind);
                    }
                }
            }
            ledger = decision.ledger;
        }
    }

    #[test]
    fn best_effort_depends_on_totals_only(
        machine in machine(5),
        scope in scope(),
        requests in collection::vec(request(2, 3), 1..10),
    ) {
        let native = native(&machine, &config(TopologyManagerPolicy::BestEffort, scope), Tiers::Attached);
        let mut ledger = native.idle();
        for (number, request) in requests.iter().enumerate() {
            let request = Request { owner: format!("o{number}").as_str().into(), ..request.clone() };
            let kinds = [ZoneKind::Hugepages(PAGE), ZoneKind::Memory];
            let amounts = |of: &ContainerRequest| -> Vec<u64> {
                let cpus = of.requests.cpu.and_then(Quantity::whole_cpus).unwrap_or(0);
                let memory = kinds.iter().map(|kind| of.requests.memory.get(kind).and_then(|of| of.units()).unwrap_or(0));
                std::iter::once(cpus).chain(memory).collect()
            };
            let mut free = vec![(ledger.shared_pool() & &native.allocatable().cpus).len() as u64];
            free.extend(kinds.iter().map(|kind| {
                ledger.nodes().values().map(|node| node.kinds.get(kind).map_or(0, |of| of.free.0)).sum::<u64>()
            }));
            let add = |sum: &[u64], more: &[u64]| -> Vec<u64> { sum.iter().zip(more).map(|(a, b)| a + b).collect() };
            let (mut peak, mut running) = (vec![0; 3], vec![0; 3]);
            for init in &request.init_containers {
                let with = add(&running, &amounts(init));
                if init.restartable {
                    running = with;
                } else {
                    peak = peak.iter().zip(&with).map(|(a, b)| *a.max(b)).collect();
                }
            }
            for app in &request.containers {
                running = add(&running, &amounts(app));
            }
            let fits = free.iter().zip(peak.iter().zip(&running)).all(|(free, (peak, sum))| free >= peak.max(sum));
            let next = admit(&native, &ledger, &request);
            prop_assert_eq!(next.is_some(), fits, "{:?}: {:?}", request, native.admit(&ledger, &request).outcome);
            ledger = next.unwrap_or(ledger);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Distances

/// Returns the mean distance between nodes over containers with memory on several nodes.
fn mean_distance(machine: &Machine, strategy: &dyn numaward_engine::Strategy) -> (u64, u64) {
    let mut ledger = strategy.idle();
    let (mut sum, mut pairs) = (0, 0);
    let mut state = 12_345u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for number in 0..400 {
        let owner = format!("o{number:03}");
        let gib = [2, 3, 5, 9, 12, 14, 18][usize::try_from(next(7)).unwrap()];
        let resources = Resources::none()
            .with_cpu(Quantity::whole(1 + next(6)))
            .with_memory(Quantity::whole(Bytes::gib(gib).0));
        let decision = strategy.admit(&ledger, &Request::workload(owner.as_str(), resources));
        if let Ok(grants) = &decision.outcome {
            let nodes: Vec<NodeId> = grants[0].allocation.placed[&ZoneKind::Memory].keys().copied().collect();
            for (index, &from) in nodes.iter().enumerate() {
                for &to in &nodes[index + 1..] {
                    sum += u64::from(machine.distance(from, to).unwrap());
                    pairs += 1;
                }
            }
            ledger = strategy.note_started(&decision.ledger, &owner.as_str().into(), &owner.as_str().into());
        } else {
            ledger = decision.ledger;
        }
        if number > 3 {
            let gone = format!("o{:03}", number - 4);
            ledger = strategy.release(&ledger, &gone.as_str().into());
        }
    }
    (sum, pairs)
}

#[test]
fn node_sets_are_nearer_than_kubelets() {
    for nodes in [4, 8] {
        let machine = Machine::builder()
            .nodes(nodes)
            .sockets(2)
            .cores_per_node(4)
            .smt(2)
            .memory(Bytes::gib(8))
            .socket_distances(12, 32)
            .build()
            .unwrap();
        for policy in [TopologyManagerPolicy::BestEffort, TopologyManagerPolicy::None] {
            let config = config(policy, TopologyManagerScope::Container);
            let kubelet = mean_distance(&machine, &KubeletStrategy::new(&machine, &config).unwrap());
            let native = mean_distance(&machine, &native(&machine, &config, Tiers::Attached));
            assert!(native.1 > 20 && kubelet.1 > 5, "{native:?} {kubelet:?}");
            assert!(
                native.0 * kubelet.1 <= kubelet.0 * native.1,
                "{nodes} nodes, {policy}: {native:?}, kubelet {kubelet:?}"
            );
        }
    }
}

//! Target for the engine: a machine, a policy and a sequence of requests, on which both strategies decide.
//!
//! # Invariants
//! - The work of each decision stays within its limit.
//! - After each step, no resource is guaranteed twice, the sums of the accounts are right, and the serialized ledger loads to the
//!   same ledger.
//! - After all releases, the ledger is as in the beginning. This does not hold for the strategy `kubelet` once the nodes of a
//!   group disagree about the group, because it reproduces a defect of the kubelet.

use std::{collections::BTreeMap, sync::Arc};

use arbitrary::{Arbitrary, Result, Unstructured};
use numaward_engine::{
    ContainerRequest, HostConditions, KubeletStrategy, Ledger, NativeOptions, NativeStrategy, PodResources,
    PolicyConfig, Quantity, RebalanceLimits, Request, Resources, Strategy, Terms,
    native::MAX_WORK,
    policy::{
        CPU_OPTIONS, CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, MemoryTier, Tiers,
        TopologyManagerPolicy, TopologyManagerScope,
    },
};
use numaward_simulation::replay::faults;
use numaward_topology::{Bytes, CpuSet, HugepagePool, HugepageSize, Machine, NodeId, NodeSet, ZoneKind};

const PAGE: HugepageSize = HugepageSize(Bytes::mib(2));
const MAX_STEPS: usize = 24;

/// A node: cores, memory in units of 128 MiB, hugepages, and the distances to all previous nodes.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct NodeInput(u8, u8, u8, [u8; 5]);

#[derive(Arbitrary, Debug)]
struct HostInput {
    nodes: [NodeInput; 6],
    count: u8,
    has_smt: bool,
    caches: u8,
    sockets: u8,
}

#[derive(Arbitrary, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice by itself")]
struct PolicyInput {
    topology: u8,
    is_pod_scope: bool,
    is_strict: bool,
    closest: bool,
    cpu_options: u8,
    has_no_cpus: bool,
    has_no_memory: bool,
    reserved: u8,
}

/// A container: CPUs in halves, memory in units of 32 MiB, hugepages, the ratio of requests and limits, and whether an init
/// container is a sidecar.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct ContainerInput(u8, u8, Option<u8>, RequestRatio, bool);

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq)]
enum RequestRatio {
    No,
    Half,
    NoLimit,
    /// An amount near the largest 64-bit number.
    Huge,
}

#[derive(Arbitrary, Debug, Default)]
struct TermsInput {
    policy: Option<u8>,
    is_pod_scope: Option<bool>,
    is_strict: Option<bool>,
    nodes: Option<u8>,
    devices: Option<u8>,
    tier: Option<u8>,
    with: Option<u8>,
    apart: Option<u8>,
    same_cache: bool,
    immovable: bool,
    burstable: bool,
}

#[derive(Arbitrary, Debug)]
enum StepInput {
    Admit {
        init: Option<[ContainerInput; 2]>,
        apps: [Option<ContainerInput>; 3],
        whole: Option<ContainerInput>,
        terms_input: TermsInput,
    },
    Remove(u8),
    Resize(u8, ContainerInput),
    Plan(ContainerInput, u8),
    Conditions([u8; 6]),
    /// Changes the memory of a node.
    Change(u8, u8),
}

fn topology(number: u8) -> TopologyManagerPolicy {
    TopologyManagerPolicy::ALL[usize::from(number) % TopologyManagerPolicy::ALL.len()]
}

fn scope(is_pod: bool) -> TopologyManagerScope {
    if is_pod { TopologyManagerScope::Pod } else { TopologyManagerScope::Container }
}

impl HostInput {
    fn machine(&self) -> Option<Machine> {
        let count = u32::from(self.count % 6) + 1;
        let sockets = u32::from(self.sockets % 3) + 1;
        let caches = u32::from(self.caches % 3);
        let mut builder = Machine::builder()
            .nodes(count)
            .sockets(if count % sockets == 0 { sockets } else { 1 })
            .smt(if self.has_smt { 2 } else { 1 })
            .cores_per_node(2)
            .memory(Bytes::gib(1));
        if caches > 0 {
            builder = builder.caches_per_node(caches);
        }
        for (id, NodeInput(cores, memory, ..)) in (0..count).zip(self.nodes) {
            let cores = u32::from(cores % 9);
            // The first node has at least one core, because a CPU is reserved.
            let cores = if id == 0 { cores + 1 } else { cores };
            let memory = Bytes(u64::from(memory) << 27);
            builder = builder.node(NodeId(id), |node| node.cores(cores).memory(memory));
        }
        let between = |a: usize, b: usize| match (a.min(b), a.max(b)) {
            (low, high) if low == high => 10,
            (low, high) => 11 + u32::from(self.nodes[high].3[low] % 32),
        };
        let ids = || 0..usize::from(self.count % 6) + 1;
        let rows: Vec<Vec<u32>> = ids().map(|a| ids().map(|b| between(a, b)).collect()).collect();
        let mut machine = builder.distances(rows).build().ok()?;
        for (node, NodeInput(_, _, pages, _)) in machine.nodes.values_mut().zip(self.nodes) {
            let total = u64::from(pages);
            node.hugepages.insert(PAGE, HugepagePool { total, free: total, surplus: 0 });
        }
        Some(machine)
    }
}

impl PolicyInput {
    fn config(&self) -> PolicyConfig {
        let on = |name: &str| (name.to_owned(), "true".to_owned());
        let mut config = PolicyConfig {
            topology_manager_policy: topology(self.topology),
            topology_manager_scope: scope(self.is_pod_scope),
            ..PolicyConfig::default()
        };
        if self.closest {
            config.topology_manager_policy_options = BTreeMap::from([on("prefer-closest-numa-nodes")]);
        }
        if !self.has_no_cpus {
            config.cpu_manager_policy = CpuManagerPolicy::Static;
            let chosen = CPU_OPTIONS.iter().zip(0..).filter(|(_, bit)| self.cpu_options >> bit & 1 == 1);
            config.cpu_manager_policy_options = chosen.map(|(name, _)| on(name)).collect();
            config.cpu_reservation = Some(Quantity::whole(1));
        }
        if !self.has_no_memory || self.has_no_cpus {
            config.memory_manager_policy = MemoryManagerPolicy::Static;
            let reserved = Quantity::whole(u64::from(self.reserved.max(1)) << 20);
            let limits = BTreeMap::from([(ZoneKind::Memory, reserved)]);
            config.reserved_memory = vec![MemoryReservation { numa_node: NodeId(0), limits }];
        }
        config
    }
}

impl ContainerInput {
    fn resources(self) -> Resources {
        let Self(half_cpus, memory, pages, below, _) = self;
        let memory =
            if below == RequestRatio::Huge { u64::MAX - u64::from(memory) } else { u64::from(memory) << 25 };
        let mut resources = Resources::none()
            .with_cpu(Quantity::milli(u64::from(half_cpus) * 500))
            .with_memory(Quantity::whole(memory));
        if let Some(pages) = pages {
            resources = resources.with_hugepages(PAGE, Quantity::whole(u64::from(pages) << 21));
        }
        resources
    }

    fn request(self, name: &str) -> ContainerRequest {
        let mut container = ContainerRequest::guaranteed(name, self.resources());
        container.restartable = self.4;
        match self.3 {
            RequestRatio::No | RequestRatio::Huge => {}
            RequestRatio::Half => {
                container.requests =
                    Self(self.0 / 2, self.1 / 2, self.2, RequestRatio::No, self.4).resources();
            }
            RequestRatio::NoLimit => container.limits = Resources::none(),
        }
        container
    }
}

fn nodes(bits: u8) -> NodeSet {
    (0..6).filter(|bit| bits >> bit & 1 == 1).map(NodeId).collect()
}

impl TermsInput {
    fn terms(&self, is_native: bool) -> Terms {
        let name = |number: u8| [format!("o{}", number % 8)].into();
        let mut terms = Terms {
            policy: self.policy.map(topology),
            scope: self.is_pod_scope.map(scope),
            ..Terms::default()
        };
        if let Some(bits) = self.nodes {
            terms.preferences.preferred.insert("c0".into(), nodes(bits));
        }
        if let Some(bits) = self.devices {
            terms.preferences.devices.insert("c0".into(), nodes(bits));
        }
        if is_native {
            terms.tiers =
                self.is_strict.map(|is_strict| if is_strict { Tiers::Strict } else { Tiers::Attached });
            let tier =
                |number: u8| [MemoryTier::Dram, MemoryTier::Hbm, MemoryTier::Cxl][usize::from(number % 3)];
            terms.memory_tiers = self.tier.map(tier).into_iter().collect();
            terms.with = self.with.map(name).unwrap_or_default();
            terms.apart = self.apart.map(name).unwrap_or_default();
            terms.same_cache = self.same_cache;
            terms.immovable = self.immovable;
            terms.burstable = self.burstable;
        }
        terms
    }
}

/// A strategy with its ledger and its admitted requests.
struct StrategyRun {
    strategy: Box<dyn Strategy>,
    is_native: bool,
    ledger: Ledger,
    running: Vec<Request>,
    /// True if all nodes of each group have agreed about the group so far.
    is_intact: bool,
    conditions: Arc<HostConditions>,
    /// True if the machine has not changed.
    is_same: bool,
}

impl StrategyRun {
    fn new(strategy: Box<dyn Strategy>, is_native: bool) -> Self {
        let (ledger, running, conditions) = (strategy.idle(), Vec::new(), Arc::default());
        Self { strategy, is_native, ledger, running, is_intact: true, conditions, is_same: true }
    }

    fn some(&self, number: u8) -> Option<usize> {
        usize::from(number).checked_rem(self.running.len())
    }

    fn admitted(&mut self, ledger: Ledger, request: Request) {
        self.ledger = ledger;
        for container in request.all_containers() {
            self.ledger = self.strategy.note_started(&self.ledger, &request.owner, &container.name);
        }
        self.running.push(request);
    }

    fn step(&mut self, number: usize, step: &StepInput) {
        let owner = format!("o{number}");
        match step {
            StepInput::Admit { init, apps, whole, terms_input } => {
                let named = |prefix: &str, containers: Vec<ContainerInput>| -> Vec<ContainerRequest> {
                    let named = |(number, container): (usize, ContainerInput)| {
                        container.request(&format!("{prefix}{number}"))
                    };
                    containers.into_iter().enumerate().map(named).collect()
                };
                let of_pod = whole.map(|whole| whole.request(""));
                let request = Request {
                    owner: owner.into(),
                    init_containers: named("i", init.map(Vec::from).unwrap_or_default()),
                    containers: named("c", apps.iter().flatten().copied().collect()),
                    resources: of_pod.map(|of| PodResources { requests: of.requests, limits: of.limits }),
                };
                let terms = terms_input.terms(self.is_native);
                if self.strategy.check_terms(&terms).is_err() {
                    return;
                }
                let decision = self.strategy.admit_watched(&self.ledger, &request, &terms, &|_| {});
                assert!(decision.explanation.work < MAX_WORK / 4 * 5, "{}", decision.explanation.work);
                match decision.outcome {
                    Ok(_) => self.admitted(decision.ledger, request),
                    Err(rejection) => {
                        assert!(!rejection.message.is_empty());
                        if self.is_native {
                            assert_eq!(decision.ledger, self.ledger, "a refusal changes nothing");
                        }
                        self.ledger = decision.ledger;
                    }
                }
            }
            StepInput::Remove(number) => {
                let Some(index) = self.some(*number) else { return };
                let request = self.running.remove(index);
                self.ledger = self.strategy.release(&self.ledger, &request.owner);
            }
            StepInput::Resize(number, to) => {
                let Some(index) = self.some(*number) else { return };
                let request = &self.running[index];
                let Some(container) = request.containers.first() else { return };
                let to = to.resources();
                if let Ok(ledger) = self.strategy.resize(&self.ledger, &request.owner, &container.name, &to) {
                    self.ledger = ledger;
                }
            }
            StepInput::Plan(container, moves) => {
                let request = Request::workload(owner, container.resources());
                let limits = RebalanceLimits {
                    moves: u32::from(moves % 4).try_into().unwrap(),
                    ..RebalanceLimits::default()
                };
                if let Ok(plan) = self.strategy.plan(&self.ledger, &request, &Terms::default(), &limits)
                    && plan.decision.outcome.is_ok()
                {
                    self.admitted(plan.decision.ledger, request);
                }
            }
            StepInput::Conditions(used) => {
                let of = (0..6).map(NodeId).zip(used.iter().map(|&used| Bytes(u64::from(used) << 25)));
                let withheld = BTreeMap::from([(ZoneKind::Memory, of.collect())]);
                self.conditions = Arc::new(HostConditions { withheld, ..HostConditions::default() });
            }
            StepInput::Change(..) => {}
        }
    }

    /// Checks the invariants that hold after each step.
    fn check(&mut self) {
        for (node, account) in self.ledger.nodes() {
            let agree =
                |other| self.ledger.nodes().get(&other).is_some_and(|other| other.group == account.group);
            self.is_intact &= self.is_native || account.group.iter().all(agree);
            for (kind, of) in &account.kinds {
                let sum = of.guaranteed.0.checked_add(of.free.0);
                assert!(!self.is_same || sum == Some(of.allocatable.0), "node {node}, {kind}: {of:?}");
            }
        }
        if self.is_native && self.is_same {
            let faults = faults(&self.ledger, &self.strategy.allocatable());
            assert!(faults.is_empty(), "{faults:?}");
        }
        let mut taken = CpuSet::new();
        for request in &self.running {
            let mut of_owner = CpuSet::new();
            for (owner, container, held) in
                self.ledger.allocations().filter(|(owner, ..)| **owner == request.owner)
            {
                let Some(cpus) = &held.cpus else { continue };
                assert!(!cpus.intersects(self.ledger.shared_pool()), "{owner} {container} shares {cpus}");
                of_owner = &of_owner | cpus;
            }
            assert!(!of_owner.intersects(&taken), "{}: {of_owner} is taken twice", request.owner);
            taken = &taken | &of_owner;
        }
        let text = serde_json::to_string(&self.ledger).unwrap();
        let read: Ledger = serde_json::from_str(&text).unwrap();
        let mut plain = self.ledger.clone();
        plain.set_conditions(Arc::default());
        assert_eq!(read, plain, "{text}");
        if self.is_native && self.is_same {
            assert_eq!(self.strategy.rebase(&read), (plain, Vec::new()), "a restart changes nothing");
        }
    }

    /// Releases all requests, and checks that the ledger is as in the beginning.
    fn end(mut self) {
        for request in std::mem::take(&mut self.running) {
            self.ledger = self.strategy.release(&self.ledger, &request.owner);
        }
        if !self.is_native {
            // The kubelet removes state of rejected pods at its next decision.
            let sweeper = Request::workload("sweeper", Resources::none());
            self.ledger = self.strategy.admit(&self.ledger, &sweeper).ledger;
            self.ledger = self.strategy.release(&self.ledger, &sweeper.owner);
        }
        self.ledger.set_conditions(Arc::default());
        if self.is_intact {
            assert_eq!(self.ledger, self.strategy.idle(), "all resources are free");
        }
    }
}

/// Returns both strategies for a machine and a policy; `None` for one that refuses them.
fn strategies(machine: &Machine, config: &PolicyConfig, is_strict: bool) -> [Option<Box<dyn Strategy>>; 2] {
    let tiers = if is_strict { Tiers::Strict } else { Tiers::Attached };
    let native = NativeStrategy::new(machine, config, &NativeOptions { tiers, ..NativeOptions::default() });
    let kubelet = KubeletStrategy::new(machine, config);
    [native.ok().map(|it| Box::new(it) as _), kubelet.ok().map(|it| Box::new(it) as _)]
}

pub(crate) fn run(data: &[u8]) {
    let _ = derived(&mut Unstructured::new(data));
}

fn derived(input: &mut Unstructured<'_>) -> Result<()> {
    let (host, policy) = (HostInput::arbitrary(input)?, PolicyInput::arbitrary(input)?);
    let Some(mut machine) = host.machine() else { return Ok(()) };
    let config = policy.config();
    let mut runs: Vec<StrategyRun> = Vec::new();
    for (strategy, is_native) in
        strategies(&machine, &config, policy.is_strict).into_iter().zip([true, false])
    {
        runs.extend(strategy.map(|strategy| StrategyRun::new(strategy, is_native)));
    }
    for number in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let step = StepInput::arbitrary(input)?;
        if let StepInput::Change(node, memory) = step
            && let Some(node) = machine.nodes.get_mut(&NodeId(u32::from(node % 6)))
        {
            node.memory = Bytes(u64::from(memory) << 27);
            for run in &mut runs {
                // If the policy does not fit the changed machine, the previous strategy stays.
                let [native, kubelet] = strategies(&machine, &config, policy.is_strict);
                if let Some(strategy) = if run.is_native { native } else { kubelet } {
                    run.ledger = strategy.rebase(&run.ledger).0;
                    run.strategy = strategy;
                    run.is_same = false;
                }
            }
        }
        for run in &mut runs {
            run.ledger.set_conditions(Arc::clone(&run.conditions));
            run.step(number, &step);
            run.check();
        }
    }
    runs.into_iter().for_each(StrategyRun::end);
    Ok(())
}

//! Clients, the reconciler, the thread that writes knobs, and crashes, in random orders.
//!
//! # Problem
//! The threads interact at few points: the inbox, the jobs of the thread `enforcement` and their results, the published state,
//! and, across a crash, the disk and the knobs. A fault there shows itself in one order of a million.
//!
//! # Algorithm
//! One thread simulates all of them; a random number decides which is next. The reconciler is the daemon's own, on a hierarchy of
//! plain files. The test steps it. Where it would wait for its inbox, the rest of the world makes a step: clients admit, resize,
//! release and disconnect; a container runtime creates, starts and stops containers and restarts; cgroups are created and
//! removed; the thread `enforcement` does its job. Several clients may call at once, so that their requests form a batch. At each
//! of these points, and at those of `numaward_store::fault`, the daemon may crash. The next daemon starts with the files.
//!
//! # Checks
//! - The history is linearizable ([`checker`]) against a sequential model ([`model`]). So an answer from before a crash is valid
//!   after it.
//! - After each step, no exclusive CPU is guaranteed twice in the ledger or in the knobs, and the guarantees on each node do not
//!   exceed its memory.
//!
//! `NUMAWARD_SEED=N` runs one order, `NUMAWARD_SEEDS=N` runs that number of orders.

mod calls;
mod checker;
mod model;
mod world;

use std::{
    panic::{self, AssertUnwindSafe},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use numaward_api::EnforcementMode;
use numaward_cgroup::knob::{Knob, KnobValue};
use numaward_config::policy::StrategyKind;
use numaward_guarantee::{policy, request::Target};
use numaward_store::fault;
use numaward_topology::{Bytes, CpuSet};

use self::{
    checker::{CallRecord, Deadline, Model as _, linearize},
    model::{Call, SequentialModel, inspected},
    world::{Crash, NAMES, World},
};
use super::*;
use crate::core::disorder::{self, Disorder};

/// Default number of orders.
const ORDERS: u64 = 300;
/// Minimum number of crashes in that many orders: about half of the first starts and of up to three later starts end in one.
const MIN_CRASHES: u32 = 200;
/// Prefixes of the crash points that must occur: writes of knobs, the steps of a save, a release, and the two points between
/// steps of the reconciler.
const CRASH_PLACES: [&str; 7] = ["enforce.", "file.", "guarantee.", "journal.", "ledger.", "step", "wait"];

type SharedWorld = Arc<Mutex<World>>;

fn lock(world: &SharedWorld) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the configuration for a seed.
fn config(seed: u64, dir: &Path) -> Config {
    let mut config = Config { state_directory: dir.join("state"), ..Config::default() };
    if seed.is_multiple_of(2) {
        config.strategy = StrategyKind::Native;
    }
    if seed.is_multiple_of(3) {
        config.enforcement.herding.mode = EnforcementMode::On;
    }
    config
}

/// Runs the daemon until it crashes or no more calls are to come.
fn run_daemon(config: &Config, root: &Path, host: &Arc<TestHost>, shared: &SharedWorld) {
    lock(shared).begin();
    let watched = shared.clone();
    fault::watch(Some(Box::new(move |name| lock(&watched).reach_crash_point(name))));
    let enforcer = fixture::enforcer(config, root, &host.machine(), None);
    let core = Core::open(
        config,
        Hierarchy::at(root),
        enforcer,
        Ports::new(host.clone()),
        ControlMetrics::default(),
    )
    .unwrap();
    let mut reconciler = ReconcilerLoop::new(core, None, CancellationToken::new());
    reconciler.adopt();
    let (commands, queue) = mpsc::channel();
    let (worker, mut work) = EnforcementWorker::stepped(reconciler.core.enforcer().clone(), commands.clone());
    let mut inbox = Inbox::new(queue);
    let meanwhile = shared.clone();
    inbox.run_other_threads = Some(Box::new(move |timeout| {
        let mut world = lock(&meanwhile);
        world.reach_crash_point("wait");
        let steps = if timeout.is_zero() { world.rng.u32(0..2) } else { 1 };
        (0..steps).for_each(|_| world.step());
        let has_worker_turn = world.rng.u32(0..3) == 0;
        drop(world);
        if has_worker_turn {
            work();
        }
    }));
    reconciler.core.serve(worker, inbox);
    {
        let mut world = lock(shared);
        world.serve(commands, reconciler.view.clone());
        world.record_instant(Call::Inspect, inspected(&reconciler.core.store.state));
    }
    let mut idle_steps = 0;
    while idle_steps < 12 {
        let mut next = Instant::now();
        if idle_steps > 0 || lock(shared).rng.u32(0..4) == 0 {
            lock(shared).update_effective_files();
        } else {
            next += Duration::from_hours(1);
        }
        reconciler.step(&mut next);
        let mut world = lock(shared);
        world.batched_steps += u32::from(world.poll() > 1);
        check(&reconciler.core, &world, root);
        world.reach_crash_point("step");
        idle_steps = if world.is_over() { idle_steps + 1 } else { 0 };
    }
    let mut world = lock(shared);
    world.finish();
    world.record_instant(Call::Inspect, inspected(&reconciler.core.store.state));
    for guarantee in reconciler.core.store.state.guarantees.values() {
        let is_there = root.join(guarantee.cgroup.as_str().trim_start_matches('/')).exists();
        assert!(is_there || matches!(guarantee.target, Target::Container(_)), "{} is gone", guarantee.cgroup);
    }
}

/// Checks the invariants after a step.
fn check(core: &Core, world: &World, root: &Path) {
    let (state, allocatable) = (&core.store.state, core.policy.strategy.allocatable());
    let mut taken = CpuSet::new();
    let mut placed: BTreeMap<_, Bytes> = BTreeMap::new();
    for (owner, _, held) in state.ledger.allocations() {
        let cpus = held.cpus.clone().unwrap_or_default();
        assert!((&taken & &cpus).is_empty(), "{owner} holds {cpus}, and other owners hold {taken}");
        assert!((state.ledger.shared_pool() & &cpus).is_empty(), "{owner} holds {cpus} of the shared pool");
        assert!(cpus.is_subset(&allocatable.cpus), "{owner} holds {cpus}");
        taken = &taken | &cpus;
        for (kind, nodes) in &held.placed {
            for (node, bytes) in nodes {
                placed.entry((*kind, *node)).or_default().0 += bytes.0;
            }
        }
    }
    for ((kind, node), bytes) in placed {
        let most =
            allocatable.memory.get(&kind).and_then(|nodes| nodes.get(&node)).copied().unwrap_or_default();
        assert!(bytes <= most, "{bytes} of {kind} are guaranteed on node {node}, which has {most}");
    }
    let cpus_of = |dir: &Path| match Knob::CpusetCpus.read(dir) {
        Ok(KnobValue::Cpus(cpus)) => cpus,
        // The cgroup may have been removed.
        _ => CpuSet::new(),
    };
    let commands = NAMES
        .iter()
        .filter(|name| state.guarantees.contains_key(**name))
        .map(|name| (*name, root.join(name)));
    let knobs: Vec<_> = commands.chain(world.running()).map(|(name, dir)| (name, cpus_of(&dir))).collect();
    for (name, guarantee) in state.guarantees.iter().filter(|(name, _)| !state.releasing.contains(*name)) {
        let owner = numaward_engine::OwnerId::from(guarantee.owner(name));
        assert!(state.ledger.owner(&owner).is_some(), "{name} holds nothing");
        let held = state.ledger.owner(&owner).into_iter().flat_map(|account| account.containers.values());
        let exclusive =
            held.filter_map(|held| held.cpus.clone()).fold(CpuSet::new(), |all, cpus| &all | &cpus);
        let own = match &guarantee.target {
            Target::Container(of) => of.id.as_str(),
            _ => name.as_str(),
        };
        for (other, cpus) in knobs.iter().filter(|(other, _)| *other != own) {
            assert!((cpus & &exclusive).is_empty(), "{other} runs on {cpus}, and {own} holds {exclusive}");
        }
    }
}

/// Statistics of the orders that passed.
#[derive(Debug, Default)]
struct OrderStats {
    orders: u64,
    /// Number of crashes at each point.
    crashes: BTreeMap<&'static str, u32>,
    /// Number of steps in which several clients were answered.
    batched_steps: u32,
}

impl OrderStats {
    fn add(mut self, other: Self) -> Self {
        for (place, count) in other.crashes {
            *self.crashes.entry(place).or_default() += count;
        }
        self.orders += other.orders;
        self.batched_steps += other.batched_steps;
        self
    }

    fn all_crashes(&self) -> u32 {
        self.crashes.values().sum()
    }
}

/// Runs one order. The error describes the failure.
fn run_order(seed: u64) -> Result<OrderStats, String> {
    // Memory is faster than a disk.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let (config, host) = (config(seed, dir.path()), Arc::new(TestHost::small()));
    let root = dir.path().join("cgroup");
    let shared: SharedWorld = Arc::new(Mutex::new(World::new(seed, root.clone(), host.machine())));
    let failed = loop {
        match panic::catch_unwind(AssertUnwindSafe(|| run_daemon(&config, &root, &host, &shared))) {
            Ok(()) => break None,
            Err(payload) if payload.is::<Crash>() => {
                fault::watch(None);
                lock(&shared).record_crash();
            }
            Err(payload) => {
                let text = payload.downcast_ref::<String>().cloned();
                break Some(text.or_else(|| payload.downcast_ref::<&str>().map(|&text| text.to_owned())));
            }
        }
    };
    fault::watch(None);
    let world = lock(&shared);
    let listed = |order: &[usize]| {
        world.history.iter().enumerate().fold(String::new(), |text, (index, entry)| {
            let place = order.iter().position(|ordered| *ordered == index);
            let place = place.map_or_else(|| "-".to_owned(), |place| place.to_string());
            let (call, from, until, answer) = (&entry.call, entry.from, entry.until, &entry.answer);
            text + &format!("\n{index:3} at {place:>3}: {from} to {until:?}: {call:?} -> {answer:?}")
        })
    };
    if let Some(failed) = failed {
        return Err(format!("{}{}", failed.unwrap_or_default(), listed(&[])));
    }
    let strategy = Arc::from(policy::strategy(&config, &host.machine()).unwrap());
    match linearize(&SequentialModel::new(strategy, &NAMES), &world.history) {
        Ok(_) => {
            let died = world.injected.len();
            assert_eq!(usize::try_from(world.crashes), Ok(died), "a crash at {:?} was lost", world.injected);
            assert_eq!(world.starts, world.crashes + 1, "each crash is followed by a start");
            let mut stats =
                OrderStats { orders: 1, batched_steps: world.batched_steps, ..OrderStats::default() };
            world.injected.iter().for_each(|place| *stats.crashes.entry(place).or_default() += 1);
            Ok(stats)
        }
        Err(longest) => {
            Err(format!("no order of these operations explains the answers:{}", listed(&longest)))
        }
    }
}

/// Runs a function on parts of the seeds, one part per CPU.
fn on_all_cpus<T: Send>(seeds: &[u64], run: impl Fn(&[u64]) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let run = &run;
        let parts: Vec<_> =
            seeds.chunks(seeds.len().div_ceil(threads)).map(|part| scope.spawn(move || run(part))).collect();
        let results = parts.into_iter().map(std::thread::ScopedJoinHandle::join);
        results.map(|result| result.unwrap_or_else(|payload| panic::resume_unwind(payload))).collect()
    })
}

#[test]
fn random_orders_are_linearizable() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if number("NUMAWARD_SEED").is_some() {
        // Another test may have installed a subscriber already.
        let _ = tracing_subscriber::fmt().with_writer(std::io::stderr).try_init();
    }
    let seeds: Vec<u64> = match number("NUMAWARD_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("NUMAWARD_SEEDS").unwrap_or(ORDERS)).collect(),
    };
    let parts = on_all_cpus(&seeds, |part| {
        let stats = part
            .iter()
            .map(|&seed| run_order(seed).unwrap_or_else(|error| panic!("NUMAWARD_SEED={seed}: {error}")));
        stats.fold(OrderStats::default(), OrderStats::add)
    });
    let stats = parts.into_iter().fold(OrderStats::default(), OrderStats::add);
    let (orders, crashes, batched) = (stats.orders, stats.all_crashes(), stats.batched_steps);
    println!("{orders} orders, {crashes} crashes, several clients answered in {batched} steps: {stats:?}");
    assert_eq!(usize::try_from(orders), Ok(seeds.len()));
    if orders < ORDERS {
        return;
    }
    assert!(batched > 0, "no clients were answered in one step");
    assert!(crashes >= MIN_CRASHES, "only {crashes} crashes");
    for place in CRASH_PLACES {
        let has_crashed = stats.crashes.keys().any(|name| name.starts_with(place));
        assert!(has_crashed, "no crash at {place}: {:?}", stats.crashes);
    }
}

/// Returns the first order that fails with an injected ordering fault, and the failure.
fn first_failure(disorder: Disorder) -> Option<(u64, String)> {
    let seeds: Vec<u64> = (0..ORDERS).collect();
    let found = on_all_cpus(&seeds, |part| {
        disorder::inject(Some(disorder));
        let found = part.iter().find_map(|&seed| Some((seed, run_order(seed).err()?)));
        disorder::inject(None);
        found
    });
    found.into_iter().flatten().min()
}

#[test]
fn finds_injected_ordering_faults() {
    for disorder in [Disorder::StaleDecision, Disorder::AnswerBeforeSave, Disorder::OvertakenList] {
        let found = first_failure(disorder);
        let (seed, failure) = found.unwrap_or_else(|| panic!("{disorder:?} is not found in {ORDERS} orders"));
        println!("{disorder:?} is found with NUMAWARD_SEED={seed}: {}", failure.lines().next().unwrap());
    }
}

/// Returns true if the admissions of three concurrent clients are linearizable. The simulated server decides when it stores, or,
/// as a fault, when the request arrives.
fn is_linearizable(seed: u64, decides_early: bool) -> bool {
    let config = Config { strategy: StrategyKind::Native, ..Config::default() };
    let strategy = Arc::from(policy::strategy(&config, &TestHost::small().machine()).unwrap());
    let model = SequentialModel::new(strategy, &NAMES);
    let (mut rng, mut server) = (fastrand::Rng::with_seed(seed), model.clone());
    let (mut history, mut early) = (Vec::new(), BTreeMap::new());
    let mut events = [0, 1, 2, 0, 1, 2];
    rng.shuffle(&mut events);
    for (now, client) in (0..).zip(events) {
        let Some(entry) = history
            .iter_mut()
            .find(|entry: &&mut CallRecord<SequentialModel>| entry.is_admission_of(NAMES[client]))
        else {
            let call = calls::admission(NAMES[client], api::Cpus::whole(2), "1Gi");
            let answer = None;
            early.insert(client, server.apply(0, &call).unwrap().0);
            history.push(CallRecord {
                call,
                from: now,
                until: Deadline::Maybe(now),
                answer,
                after: None,
                before: None,
            });
            continue;
        };
        let (answer, next) = server.apply(0, &entry.call).unwrap();
        let answer = if decides_early { early[&client].clone() } else { answer };
        (entry.answer, entry.until, server) = (Some(answer), Deadline::Answered(now), next);
    }
    linearize(&model, &history).is_ok()
}

#[test]
fn finds_decision_before_store() {
    assert!((0..100).all(|seed| is_linearizable(seed, false)));
    let found = (0..100).filter(|seed| !is_linearizable(*seed, true)).count();
    assert!(found > 50, "only {found} of 100");
}

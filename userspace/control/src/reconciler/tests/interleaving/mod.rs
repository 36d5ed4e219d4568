//! Those who ask, the reconciler, the thread that writes knobs, and crashes, in made-up orders.
//!
//! Problem: the threads meet at few points: the inbox, the work of the thread `enforcement` and its result, what is
//! published, and, over a crash, the disk and the knobs. What goes wrong there goes wrong in one order of a million.
//!
//! Algorithm: one thread plays all of them; a number decides who goes next. The reconciler is the daemon's own, on a
//! hierarchy of plain files. It is stepped; where it would wait for its inbox, others go on: clients admit, resize,
//! release and give up, a container runtime creates, starts, stops and starts anew itself, cgroups go and come, the
//! thread `enforcement` does its work. Clients also ask several at a time, so that what they ask for is handled
//! together. At any of these points, and at those of `numaward_store::fault`, the daemon may die; the next one starts
//! with the files.
//!
//! What is checked: the history has to be linearizable ([`checker`]) against a model that does one thing after the other
//! ([`model`]), so what was answered before a crash holds after it; after each step no exclusive CPU is promised twice, in
//! the ledger and in the knobs, and no node has more promised than it has.
//!
//! `NUMAWARD_SEED=N` runs one order, `NUMAWARD_SEEDS=N` so many.

mod asks;
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
    checker::{Entry, Model as _, Until, linearize},
    model::{Call, Promises, inspected},
    world::{Crash, NAMES, World},
};
use super::*;
use crate::core::disorder::{self, Disorder};

/// Orders that are tried.
const ORDERS: u64 = 300;
/// Crashes in so many orders, at least: half of the first starts end in one, and as many of each of three later starts.
const MIN_CRASHES: u32 = 200;
/// How the places begin at which some of these crashes must be: writes of knobs, the steps of a save, a release, and
/// both places between two steps of the reconciler.
const CRASH_PLACES: [&str; 7] = ["enforce.", "file.", "guarantee.", "journal.", "ledger.", "step", "wait"];

type Others = Arc<Mutex<World>>;

fn lock(others: &Others) -> MutexGuard<'_, World> {
    others.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In which configuration.
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

/// The daemon lives, until it dies or nobody asks any more.
fn live(config: &Config, root: &Path, host: &Arc<Host>, others: &Others) {
    lock(others).begin();
    let watched = others.clone();
    fault::watch(Some(Box::new(move |name| lock(&watched).point(name))));
    let enforcer = fixture::enforcer(root, &host.machine(), None);
    let core =
        Core::open(config, Hierarchy::at(root), enforcer, Ports::from_part(host), ControlMetrics::default())
            .unwrap();
    let mut reconciler = ReconcilerLoop::new(core, None, CancellationToken::new());
    reconciler.adopt();
    let (commands, queue) = mpsc::channel();
    let (worker, mut work) = Worker::stepped(reconciler.core.enforcer().clone(), commands.clone());
    let mut inbox = Inbox::new(queue);
    let meanwhile = others.clone();
    inbox.others_run = Some(Box::new(move |patience| {
        let mut world = lock(&meanwhile);
        world.point("wait");
        let others = if patience.is_zero() { world.rng.u32(0..2) } else { 1 };
        (0..others).for_each(|_| world.step());
        let works = world.rng.u32(0..3) == 0;
        drop(world);
        if works {
            work();
        }
    }));
    reconciler.core.serve(worker, inbox);
    {
        let mut world = lock(others);
        world.serve(commands, reconciler.view.clone());
        world.happens(Call::Inspect, inspected(&reconciler.core.store.state));
    }
    let mut still = 0;
    while still < 12 {
        let mut next = Instant::now();
        if still > 0 || lock(others).rng.u32(0..4) == 0 {
            lock(others).follow_kernel();
        } else {
            next += Duration::from_hours(1);
        }
        reconciler.step(&mut next);
        let mut world = lock(others);
        world.together += u32::from(world.poll() > 1);
        check(&reconciler.core, &world, root);
        world.point("step");
        still = if world.is_over() { still + 1 } else { 0 };
    }
    let mut world = lock(others);
    world.settled();
    world.happens(Call::Inspect, inspected(&reconciler.core.store.state));
    for guarantee in reconciler.core.store.state.guarantees.values() {
        let is_there = root.join(guarantee.cgroup.as_str().trim_start_matches('/')).exists();
        assert!(is_there || matches!(guarantee.target, Target::Container(_)), "{} is gone", guarantee.cgroup);
    }
}

/// What holds after each step.
fn check(core: &Core, world: &World, root: &Path) {
    let (state, allocatable) = (&core.store.state, core.policy.strategy.allocatable());
    let mut taken = CpuSet::new();
    let mut placed: BTreeMap<_, Bytes> = BTreeMap::new();
    for (owner, _, held) in state.ledger.allocations() {
        let cpus = held.cpus.clone().unwrap_or_default();
        assert!((&taken & &cpus).is_empty(), "{owner} holds {cpus}, of which others hold {taken}");
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
        assert!(bytes <= most, "{bytes} of {kind} are promised on node {node}, which has {most}");
    }
    let cpus_of = |dir: &Path| match Knob::CpusetCpus.read(dir) {
        Ok(KnobValue::Cpus(cpus)) => cpus,
        // It may have gone.
        _ => CpuSet::new(),
    };
    let others = NAMES
        .iter()
        .filter(|name| state.guarantees.contains_key(**name))
        .map(|name| (*name, root.join(name)));
    let knobs: Vec<_> = others.chain(world.running()).map(|(name, dir)| (name, cpus_of(&dir))).collect();
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

/// Figures of orders that hold.
#[derive(Debug, Default)]
struct Tried {
    orders: u64,
    /// How often the daemon died at each place.
    crashes: BTreeMap<&'static str, u32>,
    /// Steps in which several clients were answered.
    together: u32,
}

impl Tried {
    fn add(mut self, other: Self) -> Self {
        for (place, count) in other.crashes {
            *self.crashes.entry(place).or_default() += count;
        }
        self.orders += other.orders;
        self.together += other.together;
        self
    }

    fn all_crashes(&self) -> u32 {
        self.crashes.values().sum()
    }
}

/// Tries one order; says what is wrong with it.
fn try_order(seed: u64) -> Result<Tried, String> {
    // Nothing has to outlive the machine.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let (config, host) = (config(seed, dir.path()), Arc::new(Host::small()));
    let root = dir.path().join("cgroup");
    let others: Others = Arc::new(Mutex::new(World::new(seed, root.clone(), host.machine())));
    let failed = loop {
        match panic::catch_unwind(AssertUnwindSafe(|| live(&config, &root, &host, &others))) {
            Ok(()) => break None,
            Err(payload) if payload.is::<Crash>() => {
                fault::watch(None);
                lock(&others).crashed();
            }
            Err(payload) => {
                let text = payload.downcast_ref::<String>().cloned();
                break Some(text.or_else(|| payload.downcast_ref::<&str>().map(|&text| text.to_owned())));
            }
        }
    };
    fault::watch(None);
    let world = lock(&others);
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
    match linearize(&Promises::new(strategy, &NAMES), &world.history) {
        Ok(_) => {
            let died = world.injected.len();
            assert_eq!(usize::try_from(world.crashes), Ok(died), "a crash at {:?} was lost", world.injected);
            assert_eq!(world.starts, world.crashes + 1, "each crash is followed by a start");
            let mut tried = Tried { orders: 1, together: world.together, ..Tried::default() };
            world.injected.iter().for_each(|place| *tried.crashes.entry(place).or_default() += 1);
            Ok(tried)
        }
        Err(longest) => {
            Err(format!("no order of these operations explains the answers:{}", listed(&longest)))
        }
    }
}

/// Divides seeds among as many threads as there are CPUs.
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
fn what_is_asked_in_any_order_is_answered_as_if_one_after_the_other() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if number("NUMAWARD_SEED").is_some() {
        // Another test may have done so.
        let _ = tracing_subscriber::fmt().with_writer(std::io::stderr).try_init();
    }
    let seeds: Vec<u64> = match number("NUMAWARD_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("NUMAWARD_SEEDS").unwrap_or(ORDERS)).collect(),
    };
    let parts = on_all_cpus(&seeds, |part| {
        let tried = part
            .iter()
            .map(|&seed| try_order(seed).unwrap_or_else(|wrong| panic!("NUMAWARD_SEED={seed}: {wrong}")));
        tried.fold(Tried::default(), Tried::add)
    });
    let tried = parts.into_iter().fold(Tried::default(), Tried::add);
    let (orders, crashes, together) = (tried.orders, tried.all_crashes(), tried.together);
    println!("{orders} orders, {crashes} crashes, several clients answered in {together} steps: {tried:?}");
    assert_eq!(usize::try_from(orders), Ok(seeds.len()));
    if orders < ORDERS {
        return;
    }
    assert!(together > 0, "no clients were answered together");
    assert!(crashes >= MIN_CRASHES, "only {crashes} crashes");
    for place in CRASH_PLACES {
        let has_died = tried.crashes.keys().any(|name| name.starts_with(place));
        assert!(has_died, "no crash at {place}: {:?}", tried.crashes);
    }
}

/// The first order that fails with an ordering fault in the daemon, and how.
fn first_failure(disorder: Disorder) -> Option<(u64, String)> {
    let seeds: Vec<u64> = (0..ORDERS).collect();
    let found = on_all_cpus(&seeds, |part| {
        disorder::inject(Some(disorder));
        let found = part.iter().find_map(|&seed| Some((seed, try_order(seed).err()?)));
        disorder::inject(None);
        found
    });
    found.into_iter().flatten().min()
}

#[test]
fn ordering_faults_are_found() {
    for disorder in [Disorder::StaleDecision, Disorder::AnswerBeforeSave, Disorder::OvertakenList] {
        let found = first_failure(disorder);
        let (seed, failure) = found.unwrap_or_else(|| panic!("{disorder:?} is not found in {ORDERS} orders"));
        println!("{disorder:?} is found with NUMAWARD_SEED={seed}: {}", failure.lines().next().unwrap());
    }
}

/// Three clients are admitted one through the other by a server that decides when it stores, or, with the fault, before.
fn served(seed: u64, decides_before: bool) -> bool {
    let config = Config { strategy: StrategyKind::Native, ..Config::default() };
    let strategy = Arc::from(policy::strategy(&config, &Host::small().machine()).unwrap());
    let model = Promises::new(strategy, &NAMES);
    let (mut rng, mut server) = (fastrand::Rng::with_seed(seed), model.clone());
    let (mut history, mut early) = (Vec::new(), BTreeMap::new());
    let mut events = [0, 1, 2, 0, 1, 2];
    rng.shuffle(&mut events);
    for (now, client) in (0..).zip(events) {
        let Some(entry) = history.iter_mut().find(|entry: &&mut Entry<Promises>| entry.is_of(NAMES[client]))
        else {
            let call = asks::admission(NAMES[client], api::Cpus::whole(2), "1Gi");
            let answer = None;
            early.insert(client, server.apply(0, &call).unwrap().0);
            history.push(Entry {
                call,
                from: now,
                until: Until::Maybe(now),
                answer,
                after: None,
                before: None,
            });
            continue;
        };
        let (answer, next) = server.apply(0, &entry.call).unwrap();
        let answer = if decides_before { early[&client].clone() } else { answer };
        (entry.answer, entry.until, server) = (Some(answer), Until::Answered(now), next);
    }
    linearize(&model, &history).is_ok()
}

#[test]
fn a_server_that_decides_before_it_stores_is_found_out() {
    assert!((0..100).all(|seed| served(seed, false)));
    let found = (0..100).filter(|seed| !served(*seed, true)).count();
    assert!(found > 50, "only {found} of 100");
}

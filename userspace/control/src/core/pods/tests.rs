//! Containers that cannot be bound, and what they hold.

use std::{fs, time::Duration};

use numaward_guarantee::command::PodCommand;

use super::*;
use crate::core::execution::tests::{Bench, container};

/// The CPUs that nobody holds.
fn pool(bench: &Bench) -> String {
    bench.core.store.state.ledger.shared_pool().to_string()
}

/// A container that runs and cannot be bound: a knob of its cgroup is in the way.
fn unbound(bench: &mut Bench) -> ContainerPlacementRequest {
    let ask = container("a", 2000);
    drop(bench.create(&ask));
    bench.handle();
    let mut bound = bench.bind(&ask);
    in_the_way(bench, &ask, true);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(Some(UnpinnedReason::Enforcement)));
    assert!(bench.core.store.state.guarantees.is_empty());
    ask
}

fn in_the_way(bench: &Bench, ask: &ContainerPlacementRequest, is_there: bool) {
    let knob = bench.dir_of(ask).join("cpuset.cpus");
    if is_there {
        fs::remove_file(&knob).unwrap();
        fs::create_dir(&knob).unwrap();
    } else {
        fs::remove_dir(&knob).unwrap();
        fs::write(&knob, "\n").unwrap();
    }
}

/// What happens when nothing has been asked for until then.
fn turn(bench: &mut Bench, now: Instant) {
    bench.core.maintain_pods(now);
    while bench.core.has_to_bind() {
        bench.core.bind_next();
    }
}

#[test]
fn a_container_that_could_not_be_bound_is_tried_again() {
    let mut bench = Bench::new();
    let ask = unbound(&mut bench);
    let now = Instant::now();
    turn(&mut bench, now);
    assert!(bench.core.store.state.guarantees.is_empty(), "not at once");
    in_the_way(&bench, &ask, false);
    turn(&mut bench, now + Duration::from_secs(2));
    assert!(bench.core.store.state.guarantees.contains_key("default/a/c"));
    assert_eq!(crate::testing::line(&bench.dir_of(&ask).join("cpuset.cpus")), "1-2");
    let much_later = now + Duration::from_hours(1);
    turn(&mut bench, much_later);
    assert_eq!(pool(&bench), "0,3-7");
}

#[test]
fn what_a_container_holds_that_cannot_be_bound_stays_its_own_while_somebody_runs_in_it() {
    let mut bench = Bench::new();
    let ask = unbound(&mut bench);
    let now = Instant::now();
    for minutes in [1, 9, 11, 60] {
        turn(&mut bench, now + Duration::from_mins(minutes));
        assert_eq!(pool(&bench), "0,3-7", "after {minutes} minutes");
    }
    fs::write(bench.dir_of(&ask).join("cgroup.events"), "populated 0\n").unwrap();
    turn(&mut bench, now + Duration::from_mins(62));
    assert_eq!(pool(&bench), "0-7");
    assert!(bench.core.store.state.containers.is_empty() && bench.core.pods.unbound.is_empty());
}

#[test]
fn a_container_that_was_never_started_is_given_up() {
    let mut bench = Bench::new();
    drop(bench.create(&container("a", 2000)));
    bench.handle();
    let now = Instant::now();
    turn(&mut bench, now + Duration::from_mins(9));
    assert_eq!(pool(&bench), "0,3-7");
    turn(&mut bench, now + Duration::from_mins(11));
    assert_eq!(pool(&bench), "0-7");
}

#[test]
fn what_a_container_held_stays_promised_until_it_is_given_back() {
    let mut bench = Bench::new();
    let ask = container("a", 2000);
    drop(bench.create(&ask));
    let mut bound = bench.bind(&ask);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    in_the_way(&bench, &ask, true);
    let (id, uid, sandbox) = (ask.id.clone(), ask.pod.pod.uid.clone(), ask.pod.sandbox.clone());
    let mut stopped = bench.ask(|answer| PodCommand::Stopped { id, answer });
    let mut over = bench.ask(|answer| PodCommand::PodStopped { uid, sandbox, answer });
    bench.handle();
    assert_eq!((stopped.try_recv(), over.try_recv()), (Ok(()), Ok(())), "the runtime does not wait");
    let now = Instant::now();
    turn(&mut bench, now);
    assert_eq!(pool(&bench), "0,3-7");
    assert!(bench.core.store.state.releasing.contains("default/a/c"));

    in_the_way(&bench, &ask, false);
    bench.core.release("default/a/c").unwrap();
    turn(&mut bench, now);
    assert_eq!(pool(&bench), "0-7");
    let state = &bench.core.store.state;
    assert!(state.containers.is_empty() && state.pods.is_empty() && state.releasing.is_empty());
}

#[test]
fn controllers_stay_enabled_until_the_runtime_has_taken_back_what_containers_hold() {
    let mut bench = Bench::new();
    let mut ask = container("a", 2000);
    drop(bench.create(&ask));
    let mut bound = bench.bind(&ask);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    let root = bench.core.hierarchy.root().to_owned();
    crate::testing::cgroup(&root.join("other/inner"), &bench.core.policy.machine);
    fs::write(root.join("other/inner/cgroup.subtree_control"), "").unwrap();
    fs::remove_file(root.join("other/inner/cpuset.cpus")).unwrap();
    fs::write(root.join("other/cgroup.subtree_control"), "memory").unwrap();
    bench.core.enable_above(&"/other/inner".parse().unwrap(), Knob::CpusetCpus).unwrap();
    // In the words of the kernel.
    fs::write(root.join("other/cgroup.subtree_control"), "cpuset memory").unwrap();

    bench.core.config.enforcement.mode = EnforcementMode::Off;
    bench.core.follow_mode();
    assert!(bench.core.store.state.applied.is_empty() && bench.core.store.state.guarantees.is_empty());
    // What the runtime has on its books, before and after it was asked to change that.
    ask.has.cpus = Some("1-2".parse().unwrap());
    for has_asked in [false, true] {
        bench.core.refresh();
        assert_eq!(crate::testing::line(&root.join("other/cgroup.subtree_control")), "cpuset memory");
        let sandboxes = [(ask.pod.sandbox.clone(), ask.pod.pod.uid.clone())].into();
        let containers = vec![ask.clone()];
        let mut listed =
            bench.ask(|answer| PodCommand::Synchronize { containers, sandboxes, complete: true, answer });
        bench.handle();
        let updates = listed.try_recv().unwrap().updates;
        assert_eq!(updates.is_empty(), has_asked, "{updates:?}");
        for update in updates {
            ask.has = update.settings;
        }
    }
    bench.core.refresh();
    assert_eq!(crate::testing::line(&root.join("other/cgroup.subtree_control")), "-cpuset");
    assert!(bench.core.store.state.enabled.is_empty());
}

/// A container of the class `BestEffort`.
fn best_effort(name: &str) -> ContainerPlacementRequest {
    let ask = container(name, 1000);
    ContainerPlacementRequest { pod: PodPlacementRequest { asked: PodClaim::Nothing, ..ask.pod }, ..ask }
}

#[test]
fn containers_without_cpus_have_the_reserved_ones_where_the_shared_pool_is_empty() {
    let config = serde_json::json!({
        "cpuManagerPolicyOptions": {"strict-cpu-reservation": "true"},
        "topologyManagerPolicy": "best-effort",
        "enforcement": {"herding": {"mode": "on"}},
    });
    let mut bench = Bench::with(serde_json::from_value(config).unwrap());
    let create = |bench: &mut Bench, ask: &ContainerPlacementRequest| {
        drop(bench.create(ask));
        let mut bound = bench.bind(ask);
        bench.handle();
        assert_eq!(bound.try_recv(), Ok(None));
    };
    create(&mut bench, &best_effort("before"));
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "1-7");
    create(&mut bench, &container("all", 7000));
    assert_eq!((bench.cpus("kubepods/pod-all/all").as_str(), pool(&bench).as_str()), ("1-7", ""));
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "0");
    let (settings, _) = bench.core.create(&best_effort("after"), Attempt::First).unwrap();
    assert_eq!(settings.cpus.unwrap().to_string(), "0");
    bench.core.update_confinement(true);
    assert_eq!(bench.cpus("other"), "0");
    // The daemon starts anew, and the runtime lists what runs.
    turn(&mut bench, Instant::now());
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "0");

    let (uid, sandbox) = ("uid-all".to_owned(), "sandbox-all".to_owned());
    drop(bench.ask(|answer| PodCommand::PodStopped { uid, sandbox, answer }));
    bench.handle();
    assert_eq!(bench.cpus("kubepods/pod-before/before"), "1-7");
}

/// The ledger has to fit in the memory of the daemon, whatever pods ask for.
#[test]
fn account_that_is_too_large_is_refused() {
    let mut bench = Bench::new();
    let mut ask = container("a", 2000);
    ask.pod.terms.labels = [("key".to_owned(), "x".repeat(1 << 20))].into();
    let error = bench.core.create(&ask, Attempt::First).unwrap_err();
    assert!(error.to_string().starts_with("AccountTooLarge: the request of uid-a/c has 1048"), "{error}");
    assert_eq!(pool(&bench), "0-7");
    assert!(bench.core.store.state.pods.is_empty());
    ask.pod.terms.labels = [("key".to_owned(), "x".repeat(8 << 10))].into();
    bench.core.create(&ask, Attempt::First).unwrap();
    assert_eq!(pool(&bench), "0,3-7");
}

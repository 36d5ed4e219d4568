//! Admissions that wait together, and releases.

use std::{
    cell::Cell,
    pin::Pin,
    rc::Rc,
    task::{Context as Task, Poll, Waker},
};

use numaward_guarantee::command::PodCommand;
use numaward_store::fault;
use tokio::sync::oneshot;

use super::*;

type Asking<'a, T> = Pin<Box<dyn Future<Output = Result<T, AdmissionError>> + 'a>>;

fn poll<T>(asking: &mut Asking<'_, T>) -> Poll<Result<T, AdmissionError>> {
    asking.as_mut().poll(&mut Task::from_waker(Waker::noop()))
}

/// What was answered.
fn answer<T>(asking: &mut Asking<'_, T>) -> Result<T, AdmissionError> {
    match poll(asking) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("there is no answer"),
    }
}

/// The CPUs that were given.
fn given(asking: &mut Asking<'_, Answer>) -> String {
    match answer(asking) {
        Ok(Answer::Admitted(held)) => held.cpus,
        other => panic!("{other:?}"),
    }
}

/// Asks for so many CPUs, and waits.
fn admit<'a>(client: &'a ReconcilerHandle, name: &str, cpus: u32) -> Asking<'a, Answer> {
    let mut asking: Asking<'a, Answer> = Box::pin(client.admit(request(name, cpus), false));
    assert!(poll(&mut asking).is_pending());
    asking
}

fn release<'a>(client: &'a ReconcilerHandle, name: &str) -> Asking<'a, ()> {
    let mut asking: Asking<'a, ()> = Box::pin(client.release(name.to_owned()));
    assert!(poll(&mut asking).is_pending());
    asking
}

/// Steps once, without a turn; gives how often the ledger was saved.
fn step(held: &mut ReconcilerLoop) -> u32 {
    let saves = Rc::new(Cell::new(0));
    let seen = saves.clone();
    fault::watch(Some(Box::new(move |point| seen.set(seen.get() + u32::from(point == "ledger.saved")))));
    held.step(&mut (Instant::now() + Duration::from_hours(1)));
    fault::watch(None);
    saves.get()
}

fn held_by(client: &ReconcilerHandle) -> Vec<(String, String)> {
    let held = client.allocations();
    held.allocations.iter().map(|held| (held.name.clone(), held.cpus.clone())).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|&(name, cpus)| (name.to_owned(), cpus.to_owned())).collect()
}

#[test]
fn admissions_that_wait_together_are_stored_once_and_releases_twice() {
    let names = ["a", "b", "c", "d", "e", "f"];
    let Served { mut held, client, root, dir: _dir, .. } = Served::new(&names);
    let knob = |name: &str| fixture::line(&root.join(name).join("cpuset.cpus"));
    let mut asking: Vec<_> =
        names.iter().map(|name| admit(&client, name, if *name == "c" { 8 } else { 1 })).collect();
    // Nobody waits for one of them any more.
    drop(asking.remove(3));
    assert_eq!(step(&mut held), 1);
    let mut asking = asking.into_iter();
    let mut next = || asking.next().unwrap();
    assert_eq!((given(&mut next()), given(&mut next())), ("1".to_owned(), "2".to_owned()));
    let refused = answer(&mut next()).unwrap_err();
    assert!(matches!(refused, AdmissionError::Rejected(..)), "{refused}");
    assert_eq!((given(&mut next()), given(&mut next())), ("3".to_owned(), "4".to_owned()));
    assert_eq!(names.map(knob), ["1", "2", "", "", "3", "4"].map(str::to_owned));
    assert_eq!(held_by(&client), pairs(&[("a", "1"), ("b", "2"), ("e", "3"), ("f", "4")]));

    // One alone.
    let mut asking = release(&client, "b");
    assert_eq!(step(&mut held), 2);
    answer(&mut asking).unwrap();
    let mut asking: Vec<_> = ["a", "c", "e", "f"].map(|name| release(&client, name)).into();
    assert_eq!(step(&mut held), 2);
    let answers: Vec<_> = asking.iter_mut().map(answer).collect();
    assert!(
        matches!(&answers[..], [Ok(()), Err(AdmissionError::Unknown(name)), Ok(()), Ok(())] if name == "c")
    );
    assert_eq!(names.map(knob), ["", "", "", "", "", ""].map(str::to_owned));
    assert_eq!(held_by(&client), []);
    assert_eq!(held.core.store.state.ledger.shared_pool().to_string(), "0-7");
}

#[test]
fn those_who_share_the_pool_leave_what_was_given_to_others_at_the_same_time() {
    let Served { mut held, client, root, dir: _dir, .. } = Served::new(&["a", "b", "c"]);
    let asked = api::AllocationRequest {
        cpus: Some("500m".parse().unwrap()),
        ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "256Mi")
    };
    let mut shares: Asking<'_, Answer> = Box::pin(client.admit(Request::new(&asked).unwrap(), false));
    assert!(poll(&mut shares).is_pending());
    let (mut b, mut c) = (admit(&client, "b", 2), admit(&client, "c", 1));
    assert_eq!(step(&mut held), 1);
    assert_eq!((given(&mut b), given(&mut c)), ("1-2".to_owned(), "3".to_owned()));
    assert!(answer(&mut shares).is_ok());
    // Its memory is on node 0.
    assert_eq!(fixture::line(&root.join("a/cpuset.cpus")), "0");
}

#[test]
fn what_cannot_be_written_fails_for_its_workload_alone() {
    let Served { mut held, client, root, dir: _dir, .. } = Served::new(&["a", "b", "c", "d"]);
    let line = |file: &str| fixture::line(&root.join(file));
    // Written after others.
    fs::remove_file(root.join("b/cpuset.mems")).unwrap();
    let mut asking = ["a", "b", "c"].map(|name| admit(&client, name, 2));
    step(&mut held);
    let [a, b, c] = &mut asking;
    let refused = answer(b).unwrap_err();
    assert!(matches!(refused, AdmissionError::Failed(_)), "{refused}");
    assert!(refused.to_string().contains("/b/cpuset.mems: no such knob"), "{refused}");
    assert_eq!((given(a), given(c)), ("1-2".to_owned(), "6-7".to_owned()));
    assert_eq!((line("a/cpuset.cpus"), line("c/cpuset.cpus")), ("1-2".to_owned(), "6-7".to_owned()));
    assert_eq!((line("b/cpuset.cpus"), line("b/memory.min")), (String::new(), "0".to_owned()));
    assert_eq!(held_by(&client), pairs(&[("a", "1-2"), ("c", "6-7")]));
    assert_eq!(held.core.store.state.ledger.shared_pool().to_string(), "0,3-5");
    assert!(held.core.store.state.releasing.is_empty() && held.core.store.state.admitting.is_empty());

    // Likewise of releases: what is not given back is not promised to others.
    let mut again = admit(&client, "d", 2);
    step(&mut held);
    assert_eq!(given(&mut again), "4-5");
    let sealed = fixture::refuse(&root.join("c/memory.min"));
    let mut asking = ["a", "c", "d"].map(|name| release(&client, name));
    step(&mut held);
    let [a, c, d] = &mut asking;
    assert!(answer(a).is_ok() && answer(d).is_ok());
    let refused = answer(c).unwrap_err();
    assert!(matches!(refused, AdmissionError::Releasing(_)), "{refused}");
    assert!(refused.to_string().contains("/c/memory.min"), "{refused}");
    assert_eq!(held_by(&client), pairs(&[("c", "6-7")]));
    assert_eq!(held.core.store.state.ledger.shared_pool().to_string(), "0-5");
    assert!(held.core.store.state.releasing.iter().eq(["c"]));
    drop(sealed);
}

#[test]
fn what_cannot_be_stored_fails_for_each() {
    let Served { mut held, client, root, dir, .. } = Served::new(&["a", "b"]);
    let in_the_way = dir.path().join("state/ledger.journal.new");
    fs::remove_file(dir.path().join("state/ledger.journal")).ok();
    fs::create_dir_all(&in_the_way).unwrap();
    let mut asking = ["a", "b"].map(|name| admit(&client, name, 2));
    assert_eq!(step(&mut held), 0);
    for asking in &mut asking {
        let refused = answer(asking).unwrap_err();
        assert!(matches!(refused, AdmissionError::Store(_)), "{refused}");
    }
    assert_eq!(held_by(&client), []);
    assert_eq!(held.core.store.state.ledger.shared_pool().to_string(), "0-7");
    assert_eq!(fixture::line(&root.join("a/cpuset.cpus")), "");
}

#[test]
fn who_is_refused_before_what_was_asked_for_earlier_is_asked_for_again() {
    let Served { mut held, client, root: _root, dir: _dir, .. } = Served::new(&["a", "b", "c", "d", "e"]);
    let mut first = ["a", "b"].map(|name| admit(&client, name, 3));
    step(&mut held);
    assert_eq!(first.each_mut().map(given), ["1-3", "4-6"].map(str::to_owned));
    let (mut c, mut over, mut d) = (admit(&client, "c", 1), release(&client, "a"), admit(&client, "d", 3));
    step(&mut held);
    assert_eq!(given(&mut c), "7");
    assert!(poll(&mut over).is_pending() && poll(&mut d).is_pending());
    step(&mut held);
    assert!(answer(&mut over).is_ok() && poll(&mut d).is_pending());
    step(&mut held);
    assert_eq!(given(&mut d), "1-3");

    // One that does not fit afterwards either is answered then.
    let mut over = release(&client, "d");
    step(&mut held);
    assert!(answer(&mut over).is_ok());
    let (mut a, mut over) = (admit(&client, "a", 3), release(&client, "c"));
    let (mut c, mut d) = (admit(&client, "e", 8), admit(&client, "d", 1));
    step(&mut held);
    assert_eq!(given(&mut a), "1-3");
    assert!(poll(&mut c).is_pending() && poll(&mut d).is_pending());
    step(&mut held);
    assert!(answer(&mut over).is_ok());
    step(&mut held);
    assert!(matches!(answer(&mut c), Err(AdmissionError::Rejected(..))));
    assert_eq!(given(&mut d), "7");
}

#[test]
fn what_is_asked_for_the_same_name_stays_in_its_order() {
    let Served { mut held, client, root: _root, dir: _dir, .. } = Served::new(&["a", "b"]);
    let (mut first, mut over) = (admit(&client, "a", 1), release(&client, "a"));
    let (mut again, mut b) = (admit(&client, "a", 2), admit(&client, "b", 1));
    step(&mut held);
    assert_eq!((given(&mut first), given(&mut b)), ("1".to_owned(), "2".to_owned()));
    assert!(poll(&mut over).is_pending() && poll(&mut again).is_pending());
    step(&mut held);
    assert!(answer(&mut over).is_ok() && poll(&mut again).is_pending());
    step(&mut held);
    assert_eq!(held_by(&client).len(), 2);
    assert!(answer(&mut again).is_ok());
}

#[test]
fn a_container_runtime_goes_before_the_rest_of_those_that_wait_together() {
    let Served { mut held, client, root: _root, dir: _dir, commands } = Served::new(&["a", "b", "c"]);
    let mut asking = ["a", "b", "c"].map(|name| admit(&client, name, 1));
    let (sender, mut listed) = oneshot::channel();
    let (containers, sandboxes) = (Vec::new(), BTreeMap::new());
    let list = PodCommand::Synchronize { containers, sandboxes, complete: true, answer: sender };
    let mut message = Some(Message::Runtime(Box::new(list)));
    let mut receives = 0;
    held.core.execution.inbox.as_mut().unwrap().others_run = Some(Box::new(move |_| {
        receives += 1;
        // It asks while the first is decided on.
        if receives == 2
            && let Some(message) = message.take()
        {
            commands.send(message).unwrap();
        }
    }));
    let [a, b, c] = &mut asking;
    step(&mut held);
    assert_eq!(given(a), "1");
    assert!(listed.try_recv().is_err() && poll(b).is_pending() && poll(c).is_pending());
    step(&mut held);
    assert!(listed.try_recv().is_ok() && poll(b).is_pending());
    step(&mut held);
    assert_eq!((given(b), given(c)), ("2".to_owned(), "3".to_owned()));
}

#[test]
fn a_report_of_confined_cgroups_gives_way_to_a_container_runtime() {
    let Served { mut held, client: _client, root: _root, dir: _dir, commands } =
        Served::new(&["a", "b", "c"]);
    let confined = |held: &ReconcilerLoop| held.core.cpu_isolation_status(|_| Vec::new()).cgroups.len();
    held.admit(&request("a", 1), false).unwrap();
    assert_eq!(confined(&held), 2, "b and c");

    let (sender, mut listed) = oneshot::channel();
    let (containers, sandboxes) = (Vec::new(), BTreeMap::new());
    let list = PodCommand::Synchronize { containers, sandboxes, complete: true, answer: sender };
    commands.send(Message::Runtime(Box::new(list))).unwrap();
    held.core.admit(&request("b", 1), false).unwrap();
    held.core.update_confinement(false);
    assert_eq!(confined(&held), 2, "the report was given up");
    step(&mut held);
    assert!(listed.try_recv().is_ok());

    let start = Instant::now();
    while confined(&held) != 1 {
        assert!(start.elapsed() < Duration::from_mins(1), "the report was forgotten");
        held.process_effects();
    }
}

//! Batches of admissions and releases.

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
use crate::core::{admission, cpu_isolation};

type PendingCall<'a, T> = Pin<Box<dyn Future<Output = Result<T, AdmissionError>> + 'a>>;

fn poll<T>(call: &mut PendingCall<'_, T>) -> Poll<Result<T, AdmissionError>> {
    call.as_mut().poll(&mut Task::from_waker(Waker::noop()))
}

/// Returns the answer of a call, which must be there.
fn answer<T>(call: &mut PendingCall<'_, T>) -> Result<T, AdmissionError> {
    match poll(call) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("there is no answer"),
    }
}

/// Returns the CPUs of an admitted request.
fn cpus(call: &mut PendingCall<'_, AdmissionOutcome>) -> String {
    match answer(call) {
        Ok(AdmissionOutcome::Admitted(held)) => held.cpus,
        other => panic!("{other:?}"),
    }
}

/// Requests a number of CPUs without waiting for the answer.
fn admit<'a>(client: &'a ReconcilerHandle, name: &str, cpus: u32) -> PendingCall<'a, AdmissionOutcome> {
    let mut call: PendingCall<'a, AdmissionOutcome> = Box::pin(client.admit(request(name, cpus), false));
    assert!(poll(&mut call).is_pending());
    call
}

fn release<'a>(client: &'a ReconcilerHandle, name: &str) -> PendingCall<'a, ()> {
    let mut call: PendingCall<'a, ()> = Box::pin(client.release(name.to_owned()));
    assert!(poll(&mut call).is_pending());
    call
}

/// Steps once, without periodic work. Returns how many times the ledger was saved.
fn step(reconciler: &mut ReconcilerLoop) -> u32 {
    let saves = Rc::new(Cell::new(0));
    let seen = saves.clone();
    fault::watch(Some(Box::new(move |point| seen.set(seen.get() + u32::from(point == "ledger.saved")))));
    reconciler.step(&mut (Instant::now() + Duration::from_hours(1)));
    fault::watch(None);
    saves.get()
}

fn published(client: &ReconcilerHandle) -> Vec<(String, String)> {
    let held = client.allocations();
    held.allocations.iter().map(|held| (held.name.clone(), held.cpus.clone())).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|&(name, cpus)| (name.to_owned(), cpus.to_owned())).collect()
}

#[test]
fn batch_is_stored_at_once() {
    let names = ["a", "b", "c", "d", "e", "f"];
    let SteppedReconciler { mut reconciler, client, root, dir: _dir, .. } = SteppedReconciler::new(&names);
    let knob = |name: &str| fixture::line(&root.join(name).join("cpuset.cpus"));
    let mut calls: Vec<_> =
        names.iter().map(|name| admit(&client, name, if *name == "c" { 8 } else { 1 })).collect();
    // The client of "d" disconnects.
    drop(calls.remove(3));
    assert_eq!(step(&mut reconciler), 1);
    let mut calls = calls.into_iter();
    let mut next = || calls.next().unwrap();
    assert_eq!((cpus(&mut next()), cpus(&mut next())), ("1".to_owned(), "2".to_owned()));
    let refused = answer(&mut next()).unwrap_err();
    assert!(matches!(refused, AdmissionError::Rejected(..)), "{refused}");
    assert_eq!((cpus(&mut next()), cpus(&mut next())), ("3".to_owned(), "4".to_owned()));
    assert_eq!(names.map(knob), ["1", "2", "", "", "3", "4"].map(str::to_owned));
    assert_eq!(published(&client), pairs(&[("a", "1"), ("b", "2"), ("e", "3"), ("f", "4")]));

    // A single release.
    let mut call = release(&client, "b");
    assert_eq!(step(&mut reconciler), 2);
    answer(&mut call).unwrap();
    let mut calls: Vec<_> = ["a", "c", "e", "f"].map(|name| release(&client, name)).into();
    assert_eq!(step(&mut reconciler), 2);
    let answers: Vec<_> = calls.iter_mut().map(answer).collect();
    assert!(
        matches!(&answers[..], [Ok(()), Err(AdmissionError::Unknown(name)), Ok(()), Ok(())] if name == "c")
    );
    assert_eq!(names.map(knob), ["", "", "", "", "", ""].map(str::to_owned));
    assert_eq!(published(&client), []);
    assert_eq!(reconciler.core.store.state.ledger.shared_pool().to_string(), "0-7");
}

#[test]
fn shared_pool_excludes_whole_batch() {
    let SteppedReconciler { mut reconciler, client, root, dir: _dir, .. } =
        SteppedReconciler::new(&["a", "b", "c"]);
    let shared = api::AllocationRequest {
        cpus: Some("500m".parse().unwrap()),
        ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "256Mi")
    };
    let mut pending: PendingCall<'_, AdmissionOutcome> =
        Box::pin(client.admit(Request::new(&shared).unwrap(), false));
    assert!(poll(&mut pending).is_pending());
    let (mut b, mut c) = (admit(&client, "b", 2), admit(&client, "c", 1));
    assert_eq!(step(&mut reconciler), 1);
    assert_eq!((cpus(&mut b), cpus(&mut c)), ("1-2".to_owned(), "3".to_owned()));
    assert!(answer(&mut pending).is_ok());
    // Its memory is on node 0, where only CPU 0 is shared.
    assert_eq!(fixture::line(&root.join("a/cpuset.cpus")), "0");
}

#[test]
fn failed_write_affects_one_workload() {
    let SteppedReconciler { mut reconciler, client, root, dir: _dir, .. } =
        SteppedReconciler::new(&["a", "b", "c", "d"]);
    let line = |file: &str| fixture::line(&root.join(file));
    // This knob is written after other knobs of the cgroup.
    fs::remove_file(root.join("b/cpuset.mems")).unwrap();
    let mut calls = ["a", "b", "c"].map(|name| admit(&client, name, 2));
    step(&mut reconciler);
    let [a, b, c] = &mut calls;
    let refused = answer(b).unwrap_err();
    assert!(matches!(refused, AdmissionError::Failed(_)), "{refused}");
    assert!(refused.to_string().contains("/b/cpuset.mems: no such knob"), "{refused}");
    assert_eq!((cpus(a), cpus(c)), ("1-2".to_owned(), "6-7".to_owned()));
    assert_eq!((line("a/cpuset.cpus"), line("c/cpuset.cpus")), ("1-2".to_owned(), "6-7".to_owned()));
    assert_eq!((line("b/cpuset.cpus"), line("b/memory.min")), (String::new(), "0".to_owned()));
    assert_eq!(published(&client), pairs(&[("a", "1-2"), ("c", "6-7")]));
    assert_eq!(reconciler.core.store.state.ledger.shared_pool().to_string(), "0,3-5");
    assert!(
        reconciler.core.store.state.releasing.is_empty() && reconciler.core.store.state.admitting.is_empty()
    );

    // The same for releases: CPUs of a failed release stay reserved.
    let mut again = admit(&client, "d", 2);
    step(&mut reconciler);
    assert_eq!(cpus(&mut again), "4-5");
    let sealed = fixture::refuse(&root.join("c/memory.min"));
    let mut calls = ["a", "c", "d"].map(|name| release(&client, name));
    step(&mut reconciler);
    let [a, c, d] = &mut calls;
    assert!(answer(a).is_ok() && answer(d).is_ok());
    let refused = answer(c).unwrap_err();
    assert!(matches!(refused, AdmissionError::Releasing(_)), "{refused}");
    assert!(refused.to_string().contains("/c/memory.min"), "{refused}");
    assert_eq!(published(&client), pairs(&[("c", "6-7")]));
    assert_eq!(reconciler.core.store.state.ledger.shared_pool().to_string(), "0-5");
    assert!(reconciler.core.store.state.releasing.iter().eq(["c"]));
    drop(sealed);
}

#[test]
fn failed_save_fails_whole_batch() {
    let SteppedReconciler { mut reconciler, client, root, dir, .. } = SteppedReconciler::new(&["a", "b"]);
    let obstacle = dir.path().join("state/ledger.journal.new");
    fs::remove_file(dir.path().join("state/ledger.journal")).ok();
    fs::create_dir_all(&obstacle).unwrap();
    let mut calls = ["a", "b"].map(|name| admit(&client, name, 2));
    assert_eq!(step(&mut reconciler), 0);
    for call in &mut calls {
        let refused = answer(call).unwrap_err();
        assert!(matches!(refused, AdmissionError::Store(_)), "{refused}");
    }
    assert_eq!(published(&client), []);
    assert_eq!(reconciler.core.store.state.ledger.shared_pool().to_string(), "0-7");
    assert_eq!(fixture::line(&root.join("a/cpuset.cpus")), "");
}

#[test]
fn retries_refused_after_earlier_release() {
    let SteppedReconciler { mut reconciler, client, root: _root, dir: _dir, .. } =
        SteppedReconciler::new(&["a", "b", "c", "d", "e"]);
    let mut first = ["a", "b"].map(|name| admit(&client, name, 3));
    step(&mut reconciler);
    assert_eq!(first.each_mut().map(cpus), ["1-3", "4-6"].map(str::to_owned));
    let (mut c, mut released, mut d) =
        (admit(&client, "c", 1), release(&client, "a"), admit(&client, "d", 3));
    step(&mut reconciler);
    assert_eq!(cpus(&mut c), "7");
    assert!(poll(&mut released).is_pending() && poll(&mut d).is_pending());
    step(&mut reconciler);
    assert!(answer(&mut released).is_ok() && poll(&mut d).is_pending());
    step(&mut reconciler);
    assert_eq!(cpus(&mut d), "1-3");

    // A request that does not fit after the release either is refused then.
    let mut released = release(&client, "d");
    step(&mut reconciler);
    assert!(answer(&mut released).is_ok());
    let (mut a, mut released) = (admit(&client, "a", 3), release(&client, "c"));
    let (mut c, mut d) = (admit(&client, "e", 8), admit(&client, "d", 1));
    step(&mut reconciler);
    assert_eq!(cpus(&mut a), "1-3");
    assert!(poll(&mut c).is_pending() && poll(&mut d).is_pending());
    step(&mut reconciler);
    assert!(answer(&mut released).is_ok());
    step(&mut reconciler);
    assert!(matches!(answer(&mut c), Err(AdmissionError::Rejected(..))));
    assert_eq!(cpus(&mut d), "7");
}

#[test]
fn keeps_order_of_same_name() {
    let SteppedReconciler { mut reconciler, client, root: _root, dir: _dir, .. } =
        SteppedReconciler::new(&["a", "b"]);
    let (mut first, mut released) = (admit(&client, "a", 1), release(&client, "a"));
    let (mut again, mut b) = (admit(&client, "a", 2), admit(&client, "b", 1));
    step(&mut reconciler);
    assert_eq!((cpus(&mut first), cpus(&mut b)), ("1".to_owned(), "2".to_owned()));
    assert!(poll(&mut released).is_pending() && poll(&mut again).is_pending());
    step(&mut reconciler);
    assert!(answer(&mut released).is_ok() && poll(&mut again).is_pending());
    step(&mut reconciler);
    assert_eq!(published(&client).len(), 2);
    assert!(answer(&mut again).is_ok());
}

#[test]
fn runtime_interrupts_batch() {
    let SteppedReconciler { mut reconciler, client, root: _root, dir: _dir, commands } =
        SteppedReconciler::new(&["a", "b", "c"]);
    let mut calls = ["a", "b", "c"].map(|name| admit(&client, name, 1));
    let (sender, mut listed) = oneshot::channel();
    let (containers, sandboxes) = (Vec::new(), BTreeMap::new());
    let list = PodCommand::Synchronize { containers, sandboxes, complete: true, answer: sender };
    let mut message = Some(Message::Runtime(Box::new(list)));
    let mut receives = 0;
    reconciler.core.execution.inbox.as_mut().unwrap().run_other_threads = Some(Box::new(move |_| {
        receives += 1;
        // The runtime sends its command while the first request is decided.
        if receives == 2
            && let Some(message) = message.take()
        {
            commands.send(message).unwrap();
        }
    }));
    let [a, b, c] = &mut calls;
    step(&mut reconciler);
    assert_eq!(cpus(a), "1");
    assert!(listed.try_recv().is_err() && poll(b).is_pending() && poll(c).is_pending());
    step(&mut reconciler);
    assert!(listed.try_recv().is_ok() && poll(b).is_pending());
    step(&mut reconciler);
    assert_eq!((cpus(b), cpus(c)), ("2".to_owned(), "3".to_owned()));
}

#[test]
fn runtime_interrupts_dry_run_report() {
    let SteppedReconciler { mut reconciler, client: _client, root: _root, dir: _dir, commands } =
        SteppedReconciler::new(&["a", "b", "c"]);
    let confined = |ReconcilerLoop { core, .. }: &ReconcilerLoop| {
        core.isolation.status(&core.store.state, |_| Vec::new()).cgroups.len()
    };
    reconciler.admit(&request("a", 1), false).unwrap();
    assert_eq!(confined(&reconciler), 2, "b and c");

    let (sender, mut listed) = oneshot::channel();
    let (containers, sandboxes) = (Vec::new(), BTreeMap::new());
    let list = PodCommand::Synchronize { containers, sandboxes, complete: true, answer: sender };
    commands.send(Message::Runtime(Box::new(list))).unwrap();
    admission::admit(&mut reconciler.core, &request("b", 1), false).unwrap();
    cpu_isolation::update(&mut reconciler.core, false);
    assert_eq!(confined(&reconciler), 2, "the report was abandoned");
    step(&mut reconciler);
    assert!(listed.try_recv().is_ok());

    let start = Instant::now();
    while confined(&reconciler) != 1 {
        assert!(start.elapsed() < Duration::from_mins(1), "the report was forgotten");
        reconciler.process_effects();
    }
}

//! Requests of clients while the thread is busy.

use std::{
    future::Future,
    pin::Pin,
    task::{self, Poll, Waker},
};

use numaward_guarantee::reconciler::MAX_WAITING;

use super::*;

type PendingCall<'a> = Pin<Box<dyn Future<Output = Result<AdmissionOutcome, AdmissionError>> + 'a>>;

fn poll(call: &mut PendingCall) -> Poll<Result<AdmissionOutcome, AdmissionError>> {
    call.as_mut().poll(&mut task::Context::from_waker(Waker::noop()))
}

#[test]
fn first_guarantee_shortens_interval() {
    let SteppedReconciler { mut reconciler, client, dir: _dir, .. } = SteppedReconciler::new(&["a"]);
    let left = |next: Instant| next.saturating_duration_since(Instant::now());
    let mut next = Instant::now();
    reconciler.step(&mut next);
    assert!(left(next) > MAINTENANCE_INTERVAL && left(next) <= IDLE_MAINTENANCE_INTERVAL, "{:?}", left(next));
    let mut call: PendingCall = Box::pin(client.admit(request("a", 1), false));
    assert!(poll(&mut call).is_pending());
    reconciler.step(&mut next);
    assert!(matches!(poll(&mut call), Poll::Ready(Ok(AdmissionOutcome::Admitted(_)))));
    assert!(left(next) <= MAINTENANCE_INTERVAL, "{:?}", left(next));
}

#[test]
fn limits_waiting_requests() {
    let SteppedReconciler { mut reconciler, client, root, dir: _dir, .. } =
        SteppedReconciler::new(&["a", "b", "c"]);
    // No periodic work is due.
    let mut next = Instant::now() + Duration::from_hours(1);
    let written =
        |cgroup: &str| fs::metadata(root.join(cgroup).join("cpuset.cpus")).unwrap().modified().unwrap();
    let before = written("a");
    let ask = |name: &str, cpus| -> PendingCall<'_> { Box::pin(client.admit(request(name, cpus), false)) };

    let mut kept = ask("b", 1);
    assert!(poll(&mut kept).is_pending());
    let mut waiting: Vec<_> = (1..MAX_WAITING).map(|_| ask("a", 1)).collect();
    assert!(waiting.iter_mut().all(|call| poll(call).is_pending()));
    let Poll::Ready(Err(refused @ AdmissionError::Busy)) = poll(&mut ask("c", 1)) else {
        panic!("the queue was not full")
    };
    assert!(refused.to_string().contains("retry in a few seconds"), "{refused}");
    // Received requests still count until they are handled.
    reconciler.core.execution.inbox.as_mut().unwrap().receive(Duration::ZERO);
    assert!(matches!(poll(&mut ask("c", 1)), Poll::Ready(Err(AdmissionError::Busy))));

    drop(waiting);
    reconciler.step(&mut next);
    assert!(matches!(poll(&mut kept), Poll::Ready(Ok(AdmissionOutcome::Admitted(_)))));
    let cpus = |cgroup: &str| fixture::line(&root.join(cgroup).join("cpuset.cpus"));
    assert_eq!((cpus("a").as_str(), cpus("b").as_str()), ("", "1"));
    assert_eq!(written("a"), before, "the disconnected clients' requests were not tried");
    let fill = || {
        let mut calls: Vec<_> = (0..MAX_WAITING).map(|_| ask("a", 1)).collect();
        assert!(calls.iter_mut().all(|call| poll(call).is_pending()), "the queue is not empty again");
    };
    fill();
    reconciler.step(&mut next);

    // A release is executed although its client has disconnected.
    let mut release: Pin<Box<dyn Future<Output = _>>> = Box::pin(client.release("b".to_owned()));
    assert!(release.as_mut().poll(&mut task::Context::from_waker(Waker::noop())).is_pending());
    drop(release);
    reconciler.step(&mut next);
    assert_eq!(cpus("b"), "");
    let mut again = ask("c", 1);
    assert!(poll(&mut again).is_pending());
    reconciler.step(&mut next);
    assert!(matches!(poll(&mut again), Poll::Ready(Ok(AdmissionOutcome::Admitted(_)))));
    fill();
}

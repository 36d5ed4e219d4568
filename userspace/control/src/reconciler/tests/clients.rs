//! What clients ask while the thread is busy.

use std::{
    future::Future,
    pin::Pin,
    task::{self, Poll, Waker},
};

use numaward_guarantee::reconciler::MAX_WAITING;

use super::*;

type Asking<'a> = Pin<Box<dyn Future<Output = Result<Answer, AdmissionError>> + 'a>>;

fn poll(asking: &mut Asking) -> Poll<Result<Answer, AdmissionError>> {
    asking.as_mut().poll(&mut task::Context::from_waker(Waker::noop()))
}

#[test]
fn turns_are_rare_while_nothing_is_held_and_the_first_guarantee_shortens_the_wait() {
    let Served { mut held, client, dir: _dir, .. } = Served::new(&["a"]);
    let left = |next: Instant| next.saturating_duration_since(Instant::now());
    let mut next = Instant::now();
    held.step(&mut next);
    assert!(left(next) > MAINTENANCE_INTERVAL && left(next) <= IDLE_MAINTENANCE_INTERVAL, "{:?}", left(next));
    let mut asking: Asking = Box::pin(client.admit(request("a", 1), false));
    assert!(poll(&mut asking).is_pending());
    held.step(&mut next);
    assert!(matches!(poll(&mut asking), Poll::Ready(Ok(Answer::Admitted(_)))));
    assert!(left(next) <= MAINTENANCE_INTERVAL, "{:?}", left(next));
}

#[test]
fn only_so_many_wait_and_those_that_wait_no_longer_get_nothing() {
    let Served { mut held, client, root, dir: _dir, .. } = Served::new(&["a", "b", "c"]);
    // Nothing is handled until then.
    let mut next = Instant::now() + Duration::from_hours(1);
    let written =
        |cgroup: &str| fs::metadata(root.join(cgroup).join("cpuset.cpus")).unwrap().modified().unwrap();
    let before = written("a");
    let ask = |name: &str, cpus| -> Asking<'_> { Box::pin(client.admit(request(name, cpus), false)) };

    let mut kept = ask("b", 1);
    assert!(poll(&mut kept).is_pending());
    let mut waiting: Vec<_> = (1..MAX_WAITING).map(|_| ask("a", 1)).collect();
    assert!(waiting.iter_mut().all(|asking| poll(asking).is_pending()));
    let Poll::Ready(Err(refused @ AdmissionError::Busy)) = poll(&mut ask("c", 1)) else {
        panic!("there was a place")
    };
    assert!(refused.to_string().contains("retry in a few seconds"), "{refused}");
    // Received is not handled.
    held.core.execution.inbox.as_mut().unwrap().receive(Duration::ZERO);
    assert!(matches!(poll(&mut ask("c", 1)), Poll::Ready(Err(AdmissionError::Busy))));

    drop(waiting);
    held.step(&mut next);
    assert!(matches!(poll(&mut kept), Poll::Ready(Ok(Answer::Admitted(_)))));
    let cpus = |cgroup: &str| fixture::line(&root.join(cgroup).join("cpuset.cpus"));
    assert_eq!((cpus("a").as_str(), cpus("b").as_str()), ("", "1"));
    assert_eq!(written("a"), before, "it was not even tried");
    let fill = || {
        let mut as_many: Vec<_> = (0..MAX_WAITING).map(|_| ask("a", 1)).collect();
        assert!(as_many.iter_mut().all(|asking| poll(asking).is_pending()), "not all places are free again");
    };
    fill();
    held.step(&mut next);

    // What gives something back is done although nobody waits for it.
    let mut release: Pin<Box<dyn Future<Output = _>>> = Box::pin(client.release("b".to_owned()));
    assert!(release.as_mut().poll(&mut task::Context::from_waker(Waker::noop())).is_pending());
    drop(release);
    held.step(&mut next);
    assert_eq!(cpus("b"), "");
    let mut again = ask("c", 1);
    assert!(poll(&mut again).is_pending());
    held.step(&mut next);
    assert!(matches!(poll(&mut again), Poll::Ready(Ok(Answer::Admitted(_)))));
    fill();
}

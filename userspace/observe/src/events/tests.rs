use super::*;

fn miss(workload: &str) -> EventReport {
    EventReport::new(EventKind::Miss, "a page lies elsewhere").workload(workload).detail("command", "load")
}

fn all() -> EventFilter {
    EventFilter { limit: MAX_EVENTS, ..EventFilter::default() }
}

#[test]
fn suppresses_and_counts_repeated_events() {
    let events = Events::default();
    let (start, time) = (Instant::now(), SystemTime::UNIX_EPOCH);
    let report = |workload: &str, seconds| {
        events.report_at(miss(workload), start + Duration::from_secs(seconds), time);
    };
    report("a", 0);
    report("a", 1);
    report("a", 59);
    report("b", 59);
    report("a", 60);
    let reported: Vec<_> = events
        .page(&all())
        .events
        .into_iter()
        .map(|event| (event.workload.unwrap(), event.suppressed))
        .collect();
    assert_eq!(reported, [("a".to_owned(), 0), ("b".to_owned(), 0), ("a".to_owned(), 2)]);
    // Another kind of the same workload has a rate of its own.
    let kill = EventReport::new(EventKind::OomKill, "killed").workload("a");
    events.report_at(kill, start + Duration::from_mins(1), time);
    assert_eq!(events.page(&all()).events.len(), 4);
}

#[test]
fn more_severe_event_is_not_suppressed() {
    let events = Events::default();
    let (start, time) = (Instant::now(), SystemTime::UNIX_EPOCH);
    let severities =
        || events.page(&all()).events.into_iter().map(|event| event.severity).collect::<Vec<_>>();
    for severity in [Severity::Warning, Severity::Warning, Severity::Critical, Severity::Critical] {
        events.report_at(miss("a").severity(severity), start, time);
    }
    assert_eq!(severities(), [Severity::Warning, Severity::Critical]);
    // The next minute begins anew.
    let later = start + RATE_WINDOW;
    for severity in [Severity::Info, Severity::Warning, Severity::Info] {
        events.report_at(miss("a").severity(severity), later, time);
    }
    assert_eq!(severities()[2..], [Severity::Info, Severity::Warning]);
}

/// The probes report a long reclaim, and then the reconciler reports that the workload makes no progress.
#[test]
fn stall_window_admits_two_events() {
    let events = Events::default();
    for message in ["had to reclaim memory", "makes no progress"] {
        events.report_at(
            EventReport::new(EventKind::Stall, message).workload("a"),
            Instant::now(),
            SystemTime::UNIX_EPOCH,
        );
    }
    assert_eq!(events.page(&all()).events.len(), 2);
}

#[test]
fn memory_stays_bounded_in_a_storm() {
    let events = Events::default();
    let (start, time) = (Instant::now(), SystemTime::UNIX_EPOCH);
    for i in 0..2 * MAX_WINDOWS {
        events.report_at(miss(&format!("w{i}")), start, time);
    }
    assert_eq!(events.0.log.lock().windows.len(), MAX_WINDOWS);
    assert_eq!(events.0.log.lock().history.len(), MAX_EVENTS);
    events.report_at(miss("later"), start + RATE_WINDOW, time);
    assert_eq!(events.0.log.lock().windows.len(), 1, "old windows make room");
}

#[test]
fn page_starts_at_since_or_ends_at_latest() {
    let events = Events::default();
    for i in 0..5 {
        events.report(miss(&format!("w{i}")));
    }
    let page = events.page(&all());
    let (oldest, latest) = (page.oldest.unwrap(), page.latest.unwrap());
    assert_eq!(latest, oldest + 4);
    let ids = |filter: EventFilter| -> Vec<u64> {
        events.page(&filter).events.iter().map(|event| event.id - oldest).collect()
    };
    assert_eq!(ids(EventFilter { limit: 2, ..all() }), [3, 4]);
    assert_eq!(ids(EventFilter { since: Some(oldest), limit: 2, ..all() }), [1, 2]);
    assert_eq!(ids(EventFilter { since: Some(latest), ..all() }), [] as [u64; 0]);
    assert_eq!(ids(EventFilter { workload: Some("w3".to_owned()), ..all() }), [3]);
    assert_eq!(ids(EventFilter { kind: Some(EventKind::Drift), ..all() }), [] as [u64; 0]);
}

#[tokio::test]
async fn subscriber_receives_backlog_and_losses() {
    let events = Events::default();
    events.report(miss("w0"));
    let first = events.page(&all()).latest.unwrap();
    events.report(miss("w1"));
    let mut late = events.subscribe(Some(first));
    let mut new = events.subscribe(None);
    events.report(miss("w2"));
    let name = |next: StreamItem| match next {
        StreamItem::Event(event) => event.workload.clone().unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(name(late.next().await), "w1");
    assert_eq!(name(late.next().await), "w2");
    assert_eq!(name(new.next().await), "w2");
    for i in 0..QUEUE_CAPACITY + 7 {
        events.report(miss(&format!("x{i}")));
    }
    assert_eq!(new.next().await, StreamItem::Missed(7));
    assert_eq!(name(new.next().await), "x7");
    events.close();
    assert_eq!(events.subscribe(None).next().await, StreamItem::Closed);
}

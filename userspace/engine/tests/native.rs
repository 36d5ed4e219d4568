//! The strategy `native` with the scenarios and traces of this repository.

use numaward_simulation::{
    trace::{RecordedOutcome, Trace},
    variant::Variant,
};

use self::compare::Comparison;

mod compare;
mod desired;
mod folder;

#[test]
fn scenarios_pass_their_checks() {
    let desired = desired::run(&folder::own("faults")).unwrap();
    assert!(desired.failed.is_empty(), "\n{desired}");
    assert!(desired.passed > 10, "{desired}");
}

#[test]
fn traces_replay_without_failures() {
    let mut comparison = Comparison::new();
    for (_, traces) in folder::read::<Trace>(&folder::own("traces")).unwrap() {
        // Debug builds are slow: one load for each machine and policy.
        for trace in traces.iter().step_by(2) {
            comparison.add(trace);
        }
    }
    assert!(comparison.failures().is_empty(), "\n{comparison}");
    assert_eq!(comparison.traces, 9);
}

/// Change of a record.
type RecordEdit = (&'static str, fn(&mut RecordedOutcome));

/// No trace of this repository has a record of the kubelet, so this test makes one.
#[test]
fn reports_deviation_from_the_record() {
    let (_, traces) = folder::read::<Trace>(&folder::own("traces")).unwrap().remove(0);
    let mut trace = traces.into_iter().next().unwrap();
    let (machine, config, requests) = trace.parts().unwrap();
    let replay = Variant::Kubelet.replay(&trace, (&machine, &requests), &config).unwrap();
    let recorded = RecordedOutcome { sums: replay.sums, outcome: replay.outcome };
    let mut failures = |recorded: RecordedOutcome| {
        trace.kubelet = Some(recorded);
        let mut comparison = Comparison::new();
        comparison.add(&trace);
        comparison.failures().join("\n")
    };
    assert_eq!(failures(recorded.clone()), "");
    let changes: [RecordEdit; 8] = [
        ("Guaranteed pods recorded", |recorded| recorded.sums.guaranteed += 1),
        ("recorded sums", |recorded| recorded.sums.admitted_first_try += 1),
        ("recorded sums", |recorded| recorded.sums.admitted_on_retry += 1),
        ("recorded sums", |recorded| recorded.sums.dropped += 1),
        ("recorded sums", |recorded| recorded.sums.cpu_milli_ticks += 1),
        ("recorded sums", |recorded| recorded.sums.memory_mib_ticks += 1),
        ("recorded sums", |recorded| recorded.sums.hugepages_mib_ticks += 1),
        ("recorded X, got A", |recorded| recorded.outcome = recorded.outcome.replacen('A', "X", 1)),
    ];
    for (expected, change) in changes {
        let mut recorded = recorded.clone();
        change(&mut recorded);
        let failures = failures(recorded);
        assert!(failures.contains(expected), "{expected}: {failures}");
    }
}

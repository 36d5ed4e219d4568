//! The strategy `native` on the scenarios and traces that come with the sources.

use numaward_engine::simulation::trace::Trace;

use self::compare::Comparison;

mod compare;
mod desired;
mod folder;

#[test]
fn all_scenarios_are_as_desired() {
    let desired = desired::run(&folder::own("faults")).unwrap();
    assert!(desired.failed.is_empty(), "\n{desired}");
    assert!(desired.passed > 10, "{desired}");
}

#[test]
fn traces_replay_without_failures() {
    let mut comparison = Comparison::new();
    for (_, traces) in folder::read::<Trace>(&folder::own("traces")).unwrap() {
        // Debug builds are slow: of each machine and policy one load.
        for trace in traces.iter().step_by(2) {
            comparison.add(trace);
        }
    }
    assert!(comparison.failures().is_empty(), "\n{comparison}");
    assert_eq!(comparison.traces, 9);
}

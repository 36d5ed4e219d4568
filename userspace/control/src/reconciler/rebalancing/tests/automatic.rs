//! Automatic rebalances: for declared guarantees and refused requests.

use super::*;
use crate::core::{rebalance, release};

#[test]
fn unplaceable_guarantee_delays_no_other() {
    let mut bench = RebalanceBench::new(RebalanceMode::Auto);
    bench.declare(&[("d", "3Gi"), ("new", "2Gi")]);
    let over = bench.until_over();
    assert_eq!((over.state, over.request.as_deref()), (RebalanceState::Done, Some("new")));
    assert!(over.automatic);
    assert_eq!(bench.nodes().last().unwrap(), &("new".to_owned(), "0".to_owned()));
}

#[test]
fn failed_attempt_is_not_repeated_at_once() {
    let mut bench = RebalanceBench::new(RebalanceMode::Auto);
    bench.declare(&[("d", "3Gi"), ("new", "2Gi")]);
    let attempt = |bench: &RebalanceBench| {
        let attempt = bench.reconciler.rebalancing.failed_attempts.get("d");
        attempt.map(|attempt| (attempt.retry_at, attempt.ledger.is_some()))
    };
    assert!(attempt(&bench).is_some_and(|(_, has_ledger)| has_ledger));
    // Cancelled before the first move, because moved workloads stay for the dwell time.
    assert!(bench.status().automatic);
    bench.cancel();
    assert_eq!(bench.until_over().state, RebalanceState::Cancelled);
    for used in [100, 200] {
        bench.withhold([used, 0]);
        assert!(bench.reconciler.rebalancing.run.is_none(), "within the dwell time");
    }
    assert_eq!(bench.status().state, RebalanceState::Cancelled);
    assert_eq!(bench.steps(), ["started", "cancelled"]);
    // The ledger is the same as in the failed attempt.
    let before = attempt(&bench);
    bench.withhold([300, 0]);
    assert_eq!(attempt(&bench), before);

    // The request of a client is planned nevertheless.
    let (answer, _result) = oneshot::channel();
    let request = Box::new(request("new", "2Gi"));
    bench.withhold([0, 0]);
    bench.reconciler.command(Command::Admit { request, dry_run: false, answer });
    assert!(bench.reconciler.rebalancing.run.is_some());
}

#[test]
fn auto_mode_keeps_its_limits() {
    let ask = |bench: &mut RebalanceBench, name: &str, memory: &str| {
        let (answer, mut result) = oneshot::channel();
        let request = Box::new(request(name, memory));
        bench.reconciler.command(Command::Admit { request, dry_run: false, answer });
        for _ in 0..100 {
            bench.reconciler.rebalance();
        }
        result.try_recv().unwrap()
    };
    let mut off = RebalanceBench::new(RebalanceMode::Off);
    assert!(matches!(ask(&mut off, "new", "2Gi"), Err(AdmissionError::Rejected(..))));
    assert_eq!(off.steps(), [""; 0]);

    let mut auto = RebalanceBench::new(RebalanceMode::Auto);
    let Ok(AdmissionOutcome::Admitted(held)) = ask(&mut auto, "new", "2Gi") else {
        panic!("{:?}", auto.steps())
    };
    assert_eq!(held.nodes, "0");
    assert!(auto.status().automatic && auto.status().state == RebalanceState::Done);
    // A workload that was just moved automatically is not moved again within the dwell time.
    release::release(&mut auto.reconciler.core, "new").unwrap();
    release::release(&mut auto.reconciler.core, "b").unwrap();
    let room = RoomRequest::Workload(Box::new(request("new", "2Gi")), true);
    let limits = rebalance::automatic_limits(&auto.reconciler.core, &room).unwrap();
    assert!(limits.kept.contains(&"a".into()), "{limits:?}");
    assert_eq!(limits.bytes, Bytes::gib(15));
    auto.config.rebalance.max_bytes_per_hour = Size(Bytes::mib(512));
    auto.restart();
    let limits = rebalance::automatic_limits(&auto.reconciler.core, &room).unwrap();
    assert!(
        limits.bytes == Bytes(0) && limits.kept.contains(&"a".into()),
        "both limits persist over a restart: {limits:?}"
    );
}

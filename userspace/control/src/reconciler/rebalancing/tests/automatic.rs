//! Room that is made without anybody asking for it: for what is declared, and for what is refused.

use super::*;

#[test]
fn what_is_declared_gets_room_also_behind_what_can_have_none() {
    let mut bench = Bench::new(RebalanceMode::Auto);
    bench.declare(&[("d", "3Gi"), ("new", "2Gi")]);
    let over = bench.until_over();
    assert_eq!((over.state, over.request.as_deref()), (RebalanceState::Done, Some("new")));
    assert!(over.automatic);
    assert_eq!(bench.nodes().last().unwrap(), &("new".to_owned(), "0".to_owned()));
}

#[test]
fn what_is_declared_is_not_planned_for_again_and_again() {
    let mut bench = Bench::new(RebalanceMode::Auto);
    bench.declare(&[("d", "3Gi"), ("new", "2Gi")]);
    let until = |bench: &Bench| {
        let tried = bench.reconciler.rebalancing.tried.get("d");
        tried.map(|tried| (tried.until, tried.promised.is_some()))
    };
    let hopeless = until(&bench);
    assert!(hopeless.is_some_and(|(_, unless_other)| unless_other));
    // Before anything is moved: what was moved stays for the dwell time anyway.
    assert!(bench.shown().automatic);
    bench.cancel();
    assert_eq!(bench.until_over().state, RebalanceState::Cancelled);
    for used in [100, 200] {
        bench.see([used, 0]);
        assert!(bench.reconciler.rebalancing.run.is_none(), "not for a while");
    }
    assert_eq!(bench.shown().state, RebalanceState::Cancelled);
    assert_eq!(bench.said(), ["started", "cancelled"]);
    // Nothing else is promised than when there was no plan.
    let before = until(&bench);
    bench.see([300, 0]);
    assert_eq!(until(&bench), before);

    // A client that asks is last_headroom all the same.
    let (answer, _result) = oneshot::channel();
    let request = Box::new(request("new", "2Gi"));
    bench.see([0, 0]);
    bench.reconciler.command(Command::Admit { request, dry_run: false, answer });
    assert!(bench.reconciler.rebalancing.run.is_some());
}

#[test]
fn it_is_done_by_itself_only_where_configured_within_its_limits() {
    let ask = |bench: &mut Bench, name: &str, memory: &str| {
        let (answer, mut result) = oneshot::channel();
        let request = Box::new(request(name, memory));
        bench.reconciler.command(Command::Admit { request, dry_run: false, answer });
        for _ in 0..100 {
            bench.reconciler.rebalance();
        }
        result.try_recv().unwrap()
    };
    let mut off = Bench::new(RebalanceMode::Off);
    assert!(matches!(ask(&mut off, "new", "2Gi"), Err(AdmissionError::Rejected(..))));
    assert_eq!(off.said(), [""; 0]);

    let mut auto = Bench::new(RebalanceMode::Auto);
    let Ok(Answer::Admitted(held)) = ask(&mut auto, "new", "2Gi") else { panic!("{:?}", auto.said()) };
    assert_eq!(held.nodes, "0");
    assert!(auto.shown().automatic && auto.shown().state == RebalanceState::Done);
    // Who was just moved stays for a while, unless somebody asks for it.
    auto.reconciler.core.release("new").unwrap();
    auto.reconciler.core.release("b").unwrap();
    let limits = auto.reconciler.core.automatic_limits().unwrap();
    assert!(limits.kept.contains(&"a".into()), "{limits:?}");
    assert_eq!(limits.bytes, Bytes::gib(15));
    auto.config.rebalance.max_bytes_per_hour = Size(Bytes::mib(512));
    auto.restart();
    let limits = auto.reconciler.core.automatic_limits().unwrap();
    assert!(
        limits.bytes == Bytes(0) && limits.kept.contains(&"a".into()),
        "both outlive the daemon: {limits:?}"
    );
}

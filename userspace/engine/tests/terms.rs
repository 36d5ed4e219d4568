//! Terms of requests: a request with its own policy is decided as if that policy were configured, and the ledger
//! stores the terms with the owner.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use numaward_engine::{
    Cause, ContainerRequest, KubeletStrategy, Ledger, PlacementPreferences, PolicyConfig, Quantity, Reason,
    Request, Resources, Strategy, Terms,
    policy::{
        Component, CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy,
        TopologyManagerScope,
    },
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

/// Makes four nodes with four CPUs and 4 GiB each.
fn machine() -> Machine {
    Machine::builder().nodes(4).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap()
}

fn config(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> PolicyConfig {
    let limits = BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]);
    PolicyConfig {
        memory_manager_policy: MemoryManagerPolicy::Static,
        reserved_memory: vec![MemoryReservation { numa_node: NodeId(0), limits }],
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_reservation: Some(Quantity::whole(1)),
        topology_manager_policy: policy,
        topology_manager_scope: scope,
        ..PolicyConfig::default()
    }
}

fn strategy(config: &PolicyConfig) -> Box<dyn Strategy> {
    Box::new(KubeletStrategy::new(&machine(), config).unwrap())
}

/// Makes a request of containers with these CPUs and GiB.
fn request(owner: &str, amounts: &[(u64, u64)]) -> Request {
    let container = |(number, &(cpus, memory)): (usize, &(u64, u64))| {
        let resources = Resources::none()
            .with_cpu(Quantity::whole(cpus))
            .with_memory(Quantity::whole(Bytes::gib(memory).0));
        ContainerRequest::guaranteed(format!("c{number}"), resources)
    };
    let containers = amounts.iter().enumerate().map(container).collect();
    Request { owner: owner.into(), init_containers: Vec::new(), containers, resources: None }
}

fn terms(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> Terms {
    Terms { policy: Some(policy), scope: Some(scope), ..Terms::default() }
}

#[test]
fn own_policy_acts_as_configured() {
    let requests = [
        request("a", &[(2, 3)]),
        request("b", &[(3, 2), (2, 2)]),
        request("c", &[(4, 2)]),
        request("d", &[(1, 4), (1, 1)]),
        request("e", &[(2, 1)]),
    ];
    for &configured in TopologyManagerPolicy::ALL {
        let with_terms = strategy(&config(configured, TopologyManagerScope::Container));
        for (&policy, &scope) in TopologyManagerPolicy::ALL
            .iter()
            .flat_map(|policy| TopologyManagerScope::ALL.iter().map(move |scope| (policy, scope)))
        {
            let expected = strategy(&config(policy, scope));
            let mut ledger = with_terms.idle();
            for request in &requests {
                let got = with_terms.admit_watched(&ledger, request, &terms(policy, scope), &|_| {});
                let wanted = expected.admit(&ledger, request);
                assert_eq!(got.outcome, wanted.outcome, "{configured}: {policy}, {scope}: {request:?}");
                assert!(got.ledger.allocations().eq(wanted.ledger.allocations()));
                ledger = got.ledger;
            }
        }
    }
}

#[test]
fn refuses_incompatible_terms() {
    let options = BTreeMap::from([("align-by-socket".to_owned(), "true".to_owned())]);
    let base = config(TopologyManagerPolicy::None, TopologyManagerScope::Container);
    let strategy = strategy(&PolicyConfig { cpu_manager_policy_options: options, ..base });
    let fits = terms(TopologyManagerPolicy::Restricted, TopologyManagerScope::Pod);
    strategy.check_terms(&Terms::default()).unwrap();
    strategy.check_terms(&fits).unwrap();
    let terms = terms(TopologyManagerPolicy::SingleNumaNode, TopologyManagerScope::Pod);
    let problem = strategy.check_terms(&terms).unwrap_err();
    assert_eq!(problem.component, Component::CpuManager);
    assert!(problem.to_string().contains("single-numa-node policy is incompatible"), "{problem}");
    let decision = strategy.admit_watched(&strategy.idle(), &request("a", &[(1, 1)]), &terms, &|_| {});
    let rejection = decision.outcome.unwrap_err();
    assert_eq!((rejection.reason, &rejection.message), (Reason::InvalidRequest, &problem.to_string()));
    assert!(matches!(rejection.cause, Cause::Terms(_)));
    assert_eq!(decision.ledger, strategy.idle());
}

#[test]
fn kubelet_refuses_native_only_terms() {
    let strategy = strategy(&config(TopologyManagerPolicy::Restricted, TopologyManagerScope::Container));
    let native = Terms {
        with: ["web".to_owned()].into(),
        immovable: true,
        ..terms(TopologyManagerPolicy::Restricted, TopologyManagerScope::Pod)
    };
    let problem = strategy.check_terms(&native).unwrap_err().to_string();
    assert_eq!(problem, "with, immovable are known only to the strategy native");
    let decision = strategy.admit_watched(&strategy.idle(), &request("a", &[(1, 1)]), &native, &|_| {});
    assert_eq!(decision.outcome.unwrap_err().message, problem);
    let native = Terms { burstable: true, ..Terms::default() };
    assert!(strategy.check_terms(&native).unwrap_err().to_string().starts_with("burstable is known"));
}

#[test]
fn terms_are_stored_with_their_owner() {
    let strategy = strategy(&config(TopologyManagerPolicy::Restricted, TopologyManagerScope::Container));
    let mut terms = terms(TopologyManagerPolicy::SingleNumaNode, TopologyManagerScope::Pod);
    terms.preferences = PlacementPreferences {
        preferred: [("c0".into(), "2".parse().unwrap())].into(),
        ..PlacementPreferences::default()
    };
    let ledger = strategy.admit(&strategy.idle(), &request("plain", &[(1, 1)])).ledger;
    let ledger = strategy.admit_watched(&ledger, &request("own", &[(1, 1)]), &terms, &|_| {}).ledger;
    let kept = |ledger: &Ledger| ledger.owner(&"own".into()).unwrap().terms.clone();
    assert_eq!(kept(&ledger), terms);

    let text = serde_json::to_string(&ledger).unwrap();
    let written =
        r#""terms":{"policy":"single-numa-node","scope":"pod","preferences":{"preferred":{"c0":"2"}}}"#;
    assert_eq!((text.matches("\"terms\"").count(), text.matches(written).count()), (1, 1), "{text}");
    let read: Ledger = serde_json::from_str(&text).unwrap();
    assert_eq!(read, ledger);
    // The format of an older version.
    let older: Ledger = serde_json::from_str(&text.replace(&format!("{written},"), "")).unwrap();
    assert!(older.allocations().eq(ledger.allocations()));
    assert!(kept(&older).is_default());

    // Terms survive a restart and a resize, and end with their owner.
    let (restarted, uncovered) = strategy.rebase(&read);
    assert_eq!((kept(&restarted), uncovered.len()), (terms.clone(), 0));
    let to = Resources::none().with_cpu(Quantity::whole(2));
    let resized = strategy.resize(&restarted, &"own".into(), &"c0".into(), &to).unwrap();
    assert_eq!(kept(&resized), terms);
    let removed = strategy.release(&resized, &"own".into());
    assert!(removed.owner(&"own".into()).is_none_or(|account| account.terms.is_default()));
}

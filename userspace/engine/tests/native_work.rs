//! However a pod is made, a decision on it ends at the stated amount of work.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::{Duration, Instant};

use numaward_engine::{Strategy as _, native::WORK};

mod adversarial;

#[test]
fn no_pod_takes_longer_than_the_bound() {
    let mut gave_up = 0;
    for nodes in [8, 16, 64, 128] {
        for case in adversarial::cases(nodes) {
            let start = Instant::now();
            let decision = case.native.admit(&case.ledger, &case.pod);
            let (took, explanation) = (start.elapsed(), &decision.explanation);
            let what = format!("{nodes} nodes, {}: {took:?}, {}", case.name, explanation.work);
            // The container runtime waits two seconds; in a debug build everything takes many times longer than for users.
            assert!(took < Duration::from_secs(2), "{what}");
            assert!(explanation.work < WORK / 20 * 21, "{what}");
            if explanation.gave_up {
                let rejection = decision.outcome.unwrap_err();
                gave_up += 1;
                assert!(
                    rejection.message.contains("the search ended before everything was tried"),
                    "{what}: {rejection}"
                );
            }
        }
    }
    assert!(gave_up > 0, "none of them is hard");
}

#[test]
fn many_containers_that_have_room_are_placed() {
    for (nodes, name) in [
        (64, "all wide beside a sidecar"),
        (64, "500 init containers, the first too large beside a sidecar"),
        (128, "many wide containers"),
    ] {
        let case = adversarial::cases(nodes).into_iter().find(|case| case.name == name).unwrap();
        let decision = case.native.admit(&case.ledger, &case.pod);
        assert!(decision.outcome.is_ok(), "{nodes} nodes, {name}: {:?}", decision.outcome);
    }
}

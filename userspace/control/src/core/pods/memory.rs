//! How the memory of a pod's container is protected from reclaim, and where it is slowed down.
//!
//! Problem: Kubernetes' rules (KEP-2570) protect the whole request of a Guaranteed container with `memory.min`. Its
//! limit is the same, and its pod's limit is that of its containers: page cache fills the container, the sandbox takes
//! a little of the pod's limit, the pod is at its limit first, and nothing below it may be reclaimed. The kernel then
//! kills instead of dropping cache.
//!
//! Answer: of what a container may use, a little is protected by `memory.low` only, which the kernel overrides rather
//! than kill. From others, outside of the pod, all of it is protected as before.
//!
//! Where `memoryReservationPolicy` is not set, containers are protected to which memory is promised; where it is
//! `TieredReservation`, every container that requests some, as in Kubernetes. The cgroups above, of the pod and of its
//! class, are raised to the sums by the enforcer.

use numaward_config::{Config, memory_qos::MemoryReservationPolicy};
use numaward_engine::memory_qos::MemorySettings;
use numaward_guarantee::{
    pod::{MemoryClaim, PlacedContainer},
    policy,
};
use numaward_topology::{Bytes, ZoneKind};

use super::{Core, MemoryKnobs};

/// What at least, and at most, is left to reclaim within a pod: more than a sandbox and the kernel's books of some
/// cgroups take.
const UNPROTECTED_RANGE: (Bytes, Bytes) = (Bytes::mib(16), Bytes::mib(64));

/// What is left to reclaim of this much.
fn unprotected_part(of: Bytes) -> Bytes {
    Bytes((of.0 / 32).clamp(UNPROTECTED_RANGE.0.0, UNPROTECTED_RANGE.1.0).min(of.0 / 2))
}

/// The knobs of a container. `ceiling` stands for the limit of who has none.
fn knobs(config: &Config, ask: &MemoryClaim, is_promised: bool, ceiling: Bytes) -> MemoryKnobs {
    let (Some(class), Some(request)) = (ask.class, ask.request) else { return MemoryKnobs::default() };
    let default =
        if is_promised { MemoryReservationPolicy::TieredReservation } else { MemoryReservationPolicy::None };
    let qos = policy::memory_qos(config, default, ceiling);
    let MemorySettings { min, low, high } =
        qos.container_settings(class, request, ask.limit.unwrap_or_default());
    match (min, ask.limit) {
        (Some(all), Some(limit)) if limit <= all => {
            MemoryKnobs { min: Some(Bytes(all.0 - unprotected_part(all).0)), low: Some(all), high }
        }
        _ => MemoryKnobs { min, low, high },
    }
}

impl Core {
    /// The knobs of a container's memory.
    pub(super) fn memory_knobs(&self, placed: &PlacedContainer) -> MemoryKnobs {
        let is_promised = self.allocation_for(&placed.of).is_some_and(|held| {
            held.blocks.iter().any(|block| block.kind == ZoneKind::Memory && block.bytes.0 > 0)
        });
        let allocatable = self.policy.strategy.allocatable();
        let ceiling: u64 = match allocatable.memory.get(&ZoneKind::Memory) {
            Some(nodes) => nodes.values().map(|bytes| bytes.0).sum(),
            // No memory is managed.
            None => self.policy.machine.nodes.values().map(|node| node.memory.0).sum(),
        };
        knobs(&self.config, &placed.memory, is_promised, Bytes(ceiling))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mib(bytes: Option<Bytes>) -> Option<u64> {
        bytes.map(|bytes| bytes.0 >> 20)
    }

    #[test]
    fn containers_are_protected_by_class() {
        use numaward_engine::QosClass::{BestEffort, Burstable, Guaranteed};
        const TIERED: &str = r#"{"memoryReservationPolicy": "TieredReservation"}"#;
        const OFF: &str = r#"{"memoryReservationPolicy": "None"}"#;
        const SLOWED: &str = r#"{"memoryThrottlingFactor": 0.5}"#;
        for (config, class, request, limit, is_promised, expected) in [
            // What may be reclaimed within the pod grows with the container, within bounds.
            ("{}", Guaranteed, Some(1024), 1024, true, [Some(992), Some(1024), None]),
            ("{}", Guaranteed, Some(100), 100, true, [Some(84), Some(100), None]),
            ("{}", Guaranteed, Some(8), 8, true, [Some(4), Some(8), None]),
            ("{}", Guaranteed, Some(65536), 65536, true, [Some(65472), Some(65536), None]),
            ("{}", Guaranteed, Some(100), 100, false, [None; 3]),
            (TIERED, Guaranteed, Some(100), 100, false, [Some(84), Some(100), None]),
            (OFF, Guaranteed, Some(100), 100, true, [None; 3]),
            (SLOWED, Guaranteed, Some(100), 100, true, [Some(84), Some(100), None]),
            // Another container of the pod gives the class; this one has room above.
            ("{}", Guaranteed, Some(100), 200, true, [Some(100), None, None]),
            ("{}", Burstable, Some(100), 200, true, [None, Some(100), None]),
            ("{}", Burstable, Some(100), 200, false, [None; 3]),
            (TIERED, Burstable, Some(100), 200, false, [None, Some(100), None]),
            (SLOWED, Burstable, Some(100), 200, false, [None, None, Some(150)]),
            (SLOWED, Burstable, Some(100), 0, true, [None, Some(100), Some(550)]),
            (SLOWED, BestEffort, Some(0), 0, false, [None, None, Some(500)]),
            // What it requests is not known.
            (SLOWED, Burstable, None, 200, false, [None; 3]),
        ] {
            let read: Config = serde_json::from_str(config).unwrap();
            let ask = MemoryClaim {
                class: Some(class),
                request: request.map(Bytes::mib),
                limit: (limit > 0).then_some(Bytes::mib(limit)),
                overhead: None,
            };
            let found = knobs(&read, &ask, is_promised, Bytes::mib(1000));
            let found = [found.min, found.low, found.high].map(mib);
            assert_eq!(found, expected, "{config} {class} {request:?} of {limit}, promised: {is_promised}");
        }
        assert_eq!(
            knobs(&Config::default(), &MemoryClaim::default(), true, Bytes(0)),
            MemoryKnobs::default()
        );
    }
}

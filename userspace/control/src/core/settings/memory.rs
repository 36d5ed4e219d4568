//! Protection of a container's memory from reclaim, and its throttling.
//!
//! # Problem
//! Kubernetes (KEP-2570) protects the whole request of a Guaranteed container by `memory.min`. Its limit is equal to its
//! request, and the limit of its pod is the sum over its containers. Page cache fills the container, the sandbox uses a part of the pod's
//! limit, so the pod reaches its limit first, and nothing below it may be reclaimed. The kernel then kills a process instead of dropping
//! page cache.
//!
//! # Algorithm
//! A small part of such a container's memory is protected by `memory.low` only, which the kernel may ignore rather than kill a process.
//! Against memory pressure from outside of the pod, all of it is protected as before.
//!
//! If `memoryReservationPolicy` is not set, containers with guaranteed memory are protected; with `TieredReservation`, every container that
//! requests memory, as in Kubernetes. The enforcer raises the cgroups of the pod and of its class to the sums.
//!
//! The memory of a resource claim is protected whatever the class of the pod. The containers that share a claim have equal parts of it.

use numaward_config::{Config, memory_qos::MemoryReservationPolicy};
use numaward_engine::memory_qos::{self, MemorySettings};
use numaward_guarantee::{
    pod::{MemoryClaim, PlacedContainer},
    policy,
};
use numaward_model::pod::GuaranteeSource;
use numaward_topology::{Bytes, ZoneKind};

use crate::core::Core;

/// `memory.min`, `memory.low` and `memory.high`; `None` if not managed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryKnobs {
    pub(super) min: Option<Bytes>,
    pub(super) low: Option<Bytes>,
    pub(super) high: Option<Bytes>,
}

/// Minimum and maximum of the memory that can be reclaimed within a pod: more than a sandbox and the kernel's accounting of a few cgroups
/// use.
const UNPROTECTED_RANGE: (Bytes, Bytes) = (Bytes::mib(16), Bytes::mib(64));

/// Returns the part of this memory that is not protected by `memory.min`.
fn unprotected_part(of: Bytes) -> Bytes {
    Bytes((of.0 / 32).clamp(UNPROTECTED_RANGE.0.0, UNPROTECTED_RANGE.1.0).min(of.0 / 2))
}

/// Returns the knobs of a container. `ceiling` replaces the limit of a container without one.
fn knobs(config: &Config, ask: &MemoryClaim, has_guaranteed_memory: bool, ceiling: Bytes) -> MemoryKnobs {
    let (Some(class), Some(request)) = (ask.class, ask.request) else { return MemoryKnobs::default() };
    let default = if has_guaranteed_memory {
        MemoryReservationPolicy::TieredReservation
    } else {
        MemoryReservationPolicy::None
    };
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

/// Returns the knobs of a container for its part of the memory of a claim.
fn claim_knobs(config: &Config, ask: &MemoryClaim, part: Bytes, ceiling: Bytes) -> MemoryKnobs {
    let own = knobs(config, ask, false, ceiling);
    let part = part.min(ask.limit.unwrap_or(part));
    let qos = policy::memory_qos(config, MemoryReservationPolicy::TieredReservation, ceiling);
    if part == Bytes(0) || qos.reservation == memory_qos::MemoryReservationPolicy::None {
        return own;
    }
    MemoryKnobs {
        // The limit is that of the pod, which may have nothing but its claims.
        min: own.min.max(Some(Bytes(part.0 - unprotected_part(part).0))),
        low: own.low.max(Some(part)),
        high: own.high.filter(|high| *high > part),
    }
}

/// Returns the memory knobs of a container.
pub(super) fn memory_knobs(core: &Core, placed: &PlacedContainer) -> MemoryKnobs {
    let blocks = core.allocation_for(&placed.of).into_iter().flat_map(|held| &held.blocks);
    let guaranteed = blocks.filter(|block| block.kind == ZoneKind::Memory);
    let guaranteed = guaranteed.fold(0_u64, |sum, block| sum.saturating_add(block.bytes.0));
    let allocatable = core.policy.strategy.allocatable();
    let ceiling: u64 = match allocatable.memory.get(&ZoneKind::Memory) {
        Some(nodes) => nodes.values().map(|bytes| bytes.0).sum(),
        // Without managed memory, this is the memory of the machine.
        None => core.policy.machine.nodes.values().map(|node| node.memory.0).sum(),
    };
    if placed.of.slice != GuaranteeSource::Claim {
        return knobs(&core.config, &placed.memory, guaranteed > 0, Bytes(ceiling));
    }
    let containers = core.store.state.containers.values();
    let users = containers.filter(|other| other.of.owner == placed.of.owner).count() as u64;
    claim_knobs(&core.config, &placed.memory, Bytes(guaranteed / users.max(1)), Bytes(ceiling))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mib(bytes: Option<Bytes>) -> Option<u64> {
        bytes.map(|bytes| bytes.0 >> 20)
    }

    #[test]
    fn memory_is_protected_by_class() {
        use numaward_engine::QosClass::{BestEffort, Burstable, Guaranteed};
        const TIERED: &str = r#"{"memoryReservationPolicy": "TieredReservation"}"#;
        const OFF: &str = r#"{"memoryReservationPolicy": "None"}"#;
        const SLOWED: &str = r#"{"memoryThrottlingFactor": 0.5}"#;
        for (config, class, request, limit, has_guaranteed_memory, expected) in [
            // The reclaimable part grows with the container, within bounds.
            ("{}", Guaranteed, Some(1024), 1024, true, [Some(992), Some(1024), None]),
            ("{}", Guaranteed, Some(100), 100, true, [Some(84), Some(100), None]),
            ("{}", Guaranteed, Some(8), 8, true, [Some(4), Some(8), None]),
            ("{}", Guaranteed, Some(65536), 65536, true, [Some(65472), Some(65536), None]),
            ("{}", Guaranteed, Some(100), 100, false, [None; 3]),
            (TIERED, Guaranteed, Some(100), 100, false, [Some(84), Some(100), None]),
            (OFF, Guaranteed, Some(100), 100, true, [None; 3]),
            (SLOWED, Guaranteed, Some(100), 100, true, [Some(84), Some(100), None]),
            // Another container determines the class of the pod; the limit of this one is above its request.
            ("{}", Guaranteed, Some(100), 200, true, [Some(100), None, None]),
            ("{}", Burstable, Some(100), 200, true, [None, Some(100), None]),
            ("{}", Burstable, Some(100), 200, false, [None; 3]),
            (TIERED, Burstable, Some(100), 200, false, [None, Some(100), None]),
            (SLOWED, Burstable, Some(100), 200, false, [None, None, Some(150)]),
            (SLOWED, Burstable, Some(100), 0, true, [None, Some(100), Some(550)]),
            (SLOWED, BestEffort, Some(0), 0, false, [None, None, Some(500)]),
            // The request is unknown.
            (SLOWED, Burstable, None, 200, false, [None; 3]),
        ] {
            let read: Config = serde_json::from_str(config).unwrap();
            let ask = MemoryClaim {
                class: Some(class),
                request: request.map(Bytes::mib),
                limit: (limit > 0).then_some(Bytes::mib(limit)),
                overhead: None,
            };
            let found = knobs(&read, &ask, has_guaranteed_memory, Bytes::mib(1000));
            let found = [found.min, found.low, found.high].map(mib);
            assert_eq!(
                found, expected,
                "{config} {class} {request:?} of {limit}, guaranteed: {has_guaranteed_memory}"
            );
        }
        assert_eq!(
            knobs(&Config::default(), &MemoryClaim::default(), true, Bytes(0)),
            MemoryKnobs::default()
        );
    }

    #[test]
    fn claim_is_protected_in_every_class() {
        use numaward_engine::QosClass::{BestEffort, Burstable, Guaranteed};
        const OFF: &str = r#"{"memoryReservationPolicy": "None"}"#;
        const TIERED: &str = r#"{"memoryReservationPolicy": "TieredReservation"}"#;
        const SLOWED: &str = r#"{"memoryThrottlingFactor": 0.5}"#;
        for (config, class, request, limit, part, expected) in [
            ("{}", Some(Guaranteed), 0, 0, 1024, [Some(992), Some(1024), None]),
            ("{}", Some(Burstable), 0, 0, 1024, [Some(992), Some(1024), None]),
            ("{}", Some(BestEffort), 0, 0, 100, [Some(84), Some(100), None]),
            // The API server has not reported the pod.
            ("{}", None, 0, 0, 100, [Some(84), Some(100), None]),
            ("{}", Some(Guaranteed), 0, 0, 0, [None; 3]),
            (OFF, Some(Guaranteed), 0, 0, 100, [None; 3]),
            // No more than the limit of the container, and no less than the configuration protects without the claim.
            ("{}", Some(Burstable), 10, 60, 100, [Some(44), Some(60), None]),
            ("{}", Some(Guaranteed), 300, 300, 100, [Some(84), Some(100), None]),
            (TIERED, Some(Guaranteed), 300, 300, 100, [Some(284), Some(300), None]),
            // Protected memory is not throttled.
            (SLOWED, Some(Burstable), 0, 100, 60, [Some(44), Some(60), None]),
            (SLOWED, Some(Burstable), 0, 100, 40, [Some(24), Some(40), Some(50)]),
        ] {
            let read: Config = serde_json::from_str(config).unwrap();
            let ask = MemoryClaim {
                class,
                request: Some(Bytes::mib(request)),
                limit: (limit > 0).then_some(Bytes::mib(limit)),
                overhead: None,
            };
            let found = claim_knobs(&read, &ask, Bytes::mib(part), Bytes::mib(1000));
            let found = [found.min, found.low, found.high].map(mib);
            assert_eq!(found, expected, "{config} {class:?} {request} of {limit}, part {part}");
        }
    }
}

//! Metrics of the communication with the API server.

use std::time::Duration;

use educe::Educe;
use numaward_topology::{Bytes, NodeId};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use strum::VariantArray as _;

use super::{Cause, EvictionReason, RequestError};

/// Kind of a request to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr, strum::VariantArray)]
pub(crate) enum Operation {
    #[strum(serialize = "list_pods")]
    List,
    #[strum(serialize = "watch_pods")]
    Watch,
    #[strum(serialize = "create_event")]
    Event,
    #[strum(serialize = "evict_pod")]
    Evict,
    #[strum(serialize = "apply_node_resource_topology")]
    Topology,
    #[strum(serialize = "get_resource_claim")]
    Claim,
    #[strum(serialize = "patch_resource_claim_status")]
    ClaimStatus,
    #[strum(serialize = "list_resource_slices")]
    Slices,
    #[strum(serialize = "write_resource_slice")]
    Slice,
    #[strum(serialize = "remove_taint")]
    Taint,
}

/// Result of a request for an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Eviction {
    Evicted,
    /// Blocked by a `PodDisruptionBudget` or a rate limit of the API server. The request is repeated.
    Blocked,
    /// The pod does not exist any more.
    Gone,
    Forbidden,
    Failed,
}

type Labels = [(&'static str, &'static str); 2];

/// Metrics since the start of the daemon. Clones share them.
#[derive(Clone, Debug, Educe)]
#[educe(Default)]
pub struct ApiMetrics {
    pub(crate) synced: Gauge,
    pub(crate) pods: Gauge,
    /// Pods that could not be parsed, or were over the maximum number.
    pub(crate) ignored: Counter,
    #[educe(Default(expression = zero_errors()))]
    errors: Family<Labels, Counter>,
    pub(crate) events: Counter,
    pub(crate) events_dropped: Counter,
    #[educe(Default(expression = zero_evictions()))]
    evictions: Family<Labels, Counter>,
    pub(crate) topology_updates: Counter,
    pub(crate) slice_updates: Counter,
}

fn zero_errors() -> Family<Labels, Counter> {
    let errors = Family::default();
    for &operation in Operation::VARIANTS {
        for &cause in Cause::VARIANTS {
            drop(errors.get_or_create(&labels(operation, cause)));
        }
    }
    errors
}

fn zero_evictions() -> Family<Labels, Counter> {
    let evictions = Family::default();
    let refused = EvictionReason::Refused { after: Duration::ZERO };
    for why in
        [EvictionReason::Unplaced, EvictionReason::NodeShort { node: NodeId(0), has: Bytes(0) }, refused]
    {
        for &result in Eviction::VARIANTS {
            drop(evictions.get_or_create(&eviction_labels(why, result)));
        }
    }
    evictions
}

fn eviction_labels(why: EvictionReason, result: Eviction) -> Labels {
    [("reason", why.label()), ("result", result.into())]
}

fn labels(operation: Operation, cause: Cause) -> Labels {
    [("operation", operation.into()), ("reason", cause.into())]
}

impl ApiMetrics {
    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubernetes_pods_synced",
            "1 if all pods of this Kubernetes node are known from the API server, else 0",
            self.synced.clone(),
        );
        registry.register(
            "kubernetes_pods",
            "Pods of this Kubernetes node that are known from the API server",
            self.pods.clone(),
        );
        registry.register(
            "kubernetes_pods_ignored",
            "Times that a pod from the API server was ignored: it could not be read, or there were too many",
            self.ignored.clone(),
        );
        registry.register(
            "kubernetes_api_errors",
            "Requests to the API server that failed",
            self.errors.clone(),
        );
        registry.register(
            "kubernetes_events",
            "Kubernetes Events that were created or, for repetitions, updated",
            self.events.clone(),
        );
        registry.register(
            "kubernetes_events_dropped",
            "Kubernetes Events that could not be created: too many at once, or the request failed",
            self.events_dropped.clone(),
        );
        registry.register(
            "kubernetes_evictions",
            "Requests for the eviction of a pod, by result and reason: it runs without its claim, it has no guarantee and uses \
             memory of a node that may soon not have enough for its guarantees, or it is refused",
            self.evictions.clone(),
        );
        registry.register(
            "node_resource_topology_updates",
            "Times that this node's NodeResourceTopology was written",
            self.topology_updates.clone(),
        );
        registry.register(
            "resource_slice_updates",
            "Times that this node's ResourceSlice was written",
            self.slice_updates.clone(),
        );
    }

    pub(crate) fn evicted(&self, why: EvictionReason, result: Eviction) {
        self.evictions.get_or_create(&eviction_labels(why, result)).inc();
    }

    pub(crate) fn failed(&self, operation: Operation, error: &RequestError) {
        self.errors.get_or_create(&labels(operation, error.cause)).inc();
    }
}

//! What the talk with the API server comes to, counted.

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::{Cause, RequestError};

/// What is done with the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    List,
    Watch,
    Event,
    Topology,
}

impl Operation {
    const ALL: [Self; 4] = [Self::List, Self::Watch, Self::Event, Self::Topology];

    const fn as_str(self) -> &'static str {
        match self {
            Self::List => "list_pods",
            Self::Watch => "watch_pods",
            Self::Event => "create_event",
            Self::Topology => "apply_node_resource_topology",
        }
    }
}

type Labels = [(&'static str, &'static str); 2];

/// Counts since the start. Clones share them.
#[derive(Clone, Debug)]
pub struct Figures {
    pub(crate) synced: Gauge,
    pub(crate) pods: Gauge,
    /// Pods that could not be read, or that were too many.
    pub(crate) left_out: Counter,
    errors: Family<Labels, Counter>,
    pub(crate) events: Counter,
    pub(crate) events_dropped: Counter,
    pub(crate) topology_updates: Counter,
}

impl Default for Figures {
    /// All at zero.
    fn default() -> Self {
        let errors: Family<Labels, Counter> = Family::default();
        for operation in Operation::ALL {
            for cause in Cause::ALL {
                drop(errors.get_or_create(&labels(operation, cause)));
            }
        }
        Self {
            synced: Gauge::default(),
            pods: Gauge::default(),
            left_out: Counter::default(),
            errors,
            events: Counter::default(),
            events_dropped: Counter::default(),
            topology_updates: Counter::default(),
        }
    }
}

fn labels(operation: Operation, cause: Cause) -> Labels {
    [("operation", operation.as_str()), ("reason", cause.as_str())]
}

impl Figures {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubernetes_pods_synced",
            "Whether all pods of this Kubernetes node are known from the API server",
            self.synced.clone(),
        );
        registry.register(
            "kubernetes_pods",
            "Pods of this Kubernetes node that are known from the API server",
            self.pods.clone(),
        );
        registry.register(
            "kubernetes_pods_left_out",
            "Times that a pod from the API server was left out: it could not be read, or there were too many",
            self.left_out.clone(),
        );
        registry.register(
            "kubernetes_api_errors",
            "Requests to the API server that failed",
            self.errors.clone(),
        );
        registry.register(
            "kubernetes_events",
            "Kubernetes Events that were made, or counted on because of a repetition",
            self.events.clone(),
        );
        registry.register(
            "kubernetes_events_dropped",
            "Kubernetes Events that were not made: too many at once, or refused",
            self.events_dropped.clone(),
        );
        registry.register(
            "node_resource_topology_updates",
            "Times that this node's NodeResourceTopology was written",
            self.topology_updates.clone(),
        );
    }

    pub(crate) fn failed(&self, operation: Operation, error: &RequestError) {
        self.errors.get_or_create(&labels(operation, error.cause)).inc();
    }
}

//! NRI plugin: containers get their CPUs and nodes while the runtime creates them.
//!
//! # Problem
//! A container allocates memory on the node of its CPUs from its first instruction on. Its CPUs and nodes must therefore be decided before
//! it exists. Only the container runtime knows of it then, and the runtime continues without an answer after a timeout.
//!
//! # Algorithm
//! The runtime calls [`handler`] over NRI. [`request`] builds a request from the runtime's and the API server's descriptions of the pod.
//! The reconciler (`numaward_control`) decides, stores and answers. The runtime gets later writes of the reconciler with later answers, see
//! [`updates`].
//!
//! # Invariants
//! - No answer to the runtime waits for the runtime.
//! - In a dry run, every answer is empty.

mod annotations;
mod cdi;
mod claims;
mod crio;
mod devices;
mod handler;
mod memory_policy;
mod metrics;
mod own_pins;
mod pod_level_resources;
mod refusals;
mod request;
mod room_events;
mod sandbox;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(test)]
mod tests;
mod updates;

use std::sync::Arc;

use futures_util::FutureExt as _;
use numaward_api::{self as api, EnforcementMode};
use numaward_config::{Config, kubernetes::Kubernetes};
use numaward_guarantee::reconciler::ReconcilerHandle;
use numaward_kube::{
    api::ClaimReader,
    nri::{Handler, Options, Phase, Plugin, RuntimeFault, Status},
    pod::PodSource,
};
use numaward_model::port::ObservedHost;
use numaward_observe::Observer;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

pub(super) use self::pod_level_resources::{PodGuarantee, guarantees};
pub use self::{devices::DeviceTimeouts, metrics::NriMetrics, refusals::Refusals, room_events::report_moves};
use self::{handler::NriHandler, request::RequestBuilder, updates::PendingUpdates};

/// Creates the plugin, which places containers when it runs, and starts its background tasks, which end with `stop`. `kubernetes` has the
/// present settings. Must be called within a runtime of tokio.
pub fn plugin(
    options: Options,
    (config, kubernetes): (&Config, watch::Receiver<Kubernetes>),
    reconciler: ReconcilerHandle,
    host: Arc<dyn ObservedHost>,
    (pods, claims, timeouts): (Arc<dyn PodSource>, ClaimReader, DeviceTimeouts),
    (figures, refusals): (NriMetrics, Refusals),
    stop: &CancellationToken,
) -> Plugin<impl Handler> {
    let (updates, queue) = mpsc::unbounded_channel();
    reconciler.send_updates(updates);
    let mut builder = RequestBuilder::new(pods, config);
    (builder.claims, builder.timeouts, builder.config) = (claims, timeouts, kubernetes);
    let is_dry_run = config.enforcement.mode == EnforcementMode::DryRun;
    let refusals = refusals.counted_by(figures.refused_pods.clone());
    let (counted, warned) = (figures.clone(), Arc::default());
    let pending = PendingUpdates::default();
    tokio::spawn(stop.clone().run_until_cancelled_owned(pending.clone().follow(queue)).boxed());
    let policies = memory_policy::MemoryPolicyRequests {
        is_on: config.enforcement.mode == EnforcementMode::On,
        runtime: Arc::default(),
        host_root: config.host_root.clone(),
        waiting: Arc::default(),
    };
    let runtime = Arc::clone(&policies.runtime);
    let handler = NriHandler {
        reconciler,
        host,
        builder,
        figures: counted,
        is_dry_run,
        warned,
        refusals,
        pending,
        policies,
        own_pins: own_pins::OwnPins::default(),
    };
    let plugin = Plugin::new(options, Arc::new(handler));
    // The cell is new, so it cannot be set yet.
    let _ = runtime.set(plugin.status());
    tokio::spawn(stop.clone().run_until_cancelled_owned(count_connections(plugin.status(), figures)).boxed());
    plugin
}

/// Notes the connected runtime and its known faults for the status, until the plugin ends.
pub async fn note_runtime(mut status: watch::Receiver<Status>, observer: Arc<Observer>) {
    loop {
        let runtime = status.borrow_and_update().runtime.clone();
        if let Some(runtime) = runtime {
            let fault = |RuntimeFault { finding, fix, is_repaired }| api::RuntimeFault {
                finding: finding.to_owned(),
                fix: fix.to_owned(),
                repaired: is_repaired,
            };
            let faults = runtime.faults().into_iter().map(fault).collect();
            let (name, version) = (runtime.name, runtime.version);
            observer.note_container_runtime(api::ContainerRuntime { name, version, faults });
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

/// Updates the metrics after each change of the connection.
async fn count_connections(mut status: watch::Receiver<Status>, figures: NriMetrics) {
    let mut disconnects = 0;
    loop {
        let now = status.borrow_and_update().clone();
        figures.connected.set(u64::from(now.phase == Phase::Connected));
        figures.disconnects.inc_by(now.disconnects.saturating_sub(disconnects));
        disconnects = now.disconnects;
        if status.changed().await.is_err() {
            return;
        }
    }
}

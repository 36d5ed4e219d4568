//! Kubernetes: containers get their CPUs and nodes while the runtime creates them.
//!
//! Problem: a container runs where it runs from its first instruction, and its memory lies where it was first
//! touched. So what it gets must be decided before it exists, which only the container runtime knows of, in the
//! time that the runtime grants; and the runtime goes on without us when we are late.
//!
//! Ways: the runtime asks [`handler`] over NRI; [`request`] makes of what it and the API server know of a pod a request;
//! the reconciler (`numaward_control`) decides, stores and answers. What the reconciler later writes itself, later answers
//! report to the runtime, see [`updates`].
//!
//! Invariants: no answer to the runtime waits for the runtime; in a dry run every answer is an empty one, whatever was decided.

mod annotations;
mod devices;
mod handler;
mod memory_policy;
mod metrics;
mod pod_level_resources;
mod refusals;
mod request;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(test)]
mod tests;
mod updates;

use std::sync::Arc;

use futures_util::FutureExt as _;
use numaward_api::EnforcementMode;
use numaward_config::Config;
use numaward_guarantee::reconciler::ReconcilerHandle;
use numaward_kube::{
    nri::{Handler, Options, Phase, Plugin, Status},
    pod::PodSource,
};
use numaward_model::port::{ContainerNames, EventSink, MachineSource};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::{handler::NriHandler, request::RequestBuilder, updates::PendingUpdates};
pub use self::{metrics::NriMetrics, refusals::Refusals};

/// What placing containers asks of the parts around it.
pub trait Ports: MachineSource + EventSink + ContainerNames {}
impl<P: MachineSource + EventSink + ContainerNames> Ports for P {}

/// Places containers once it runs; what accompanies it runs from now on, until `stop`. To be called within a runtime of
/// tokio.
pub fn plugin(
    config: &Config,
    reconciler: ReconcilerHandle,
    ports: Arc<dyn Ports>,
    pods: Arc<dyn PodSource>,
    (figures, refusals): (NriMetrics, Refusals),
    stop: &CancellationToken,
) -> Plugin<impl Handler> {
    let (updates, queue) = mpsc::unbounded_channel();
    reconciler.send_updates(updates);
    let builder = RequestBuilder::new(pods, config);
    let is_dry_run = config.enforcement.mode == EnforcementMode::DryRun;
    let (counted, warned) = (figures.clone(), Arc::default());
    let pending = PendingUpdates::default();
    tokio::spawn(stop.clone().run_until_cancelled_owned(pending.clone().follow(queue)).boxed());
    let policies = memory_policy::Asked {
        is_on: config.enforcement.mode == EnforcementMode::On,
        runtime: Arc::default(),
        host_root: config.host_root.clone(),
        waiting: Arc::default(),
    };
    let runtime = Arc::clone(&policies.runtime);
    let handler = NriHandler {
        reconciler,
        ports,
        builder,
        figures: counted,
        is_dry_run,
        warned,
        refusals,
        pending,
        policies,
    };
    let options = Options { plugin: config.kubernetes.nri.clone(), ..Options::default() };
    let plugin = Plugin::new(options, Arc::new(handler));
    // It is new, so this is the first.
    let _ = runtime.set(plugin.status());
    tokio::spawn(stop.clone().run_until_cancelled_owned(follow(plugin.status(), figures)).boxed());
    plugin
}

/// Keeps the metrics of the connection up to date.
async fn follow(mut status: watch::Receiver<Status>, figures: NriMetrics) {
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

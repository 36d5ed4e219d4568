//! Kubernetes: containers get their CPUs and nodes while the runtime creates them.
//!
//! Problem: a container runs where it runs from its first instruction, and its memory lies where it was first
//! touched. So what it gets must be decided before it exists, which only the container runtime knows of, in the
//! time that the runtime grants; and the runtime goes on without us when we are late.
//!
//! Ways: the runtime asks [`handler`] over NRI; [`request`] makes of what it and the API server know of a pod a request;
//! the reconciler (`numaward_control`) decides, stores and answers. What the reconciler later writes itself is reported to
//! the runtime, so that it repeats it.
//!
//! Invariants: no answer to the runtime waits for the runtime; in a dry run every answer is an empty one, whatever was decided.

mod annotations;
mod devices;
mod handler;
mod metrics;
mod request;
#[cfg(test)]
mod tests;
mod whole;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use numaward_api::EnforcementMode;
use numaward_config::Config;
use numaward_control::{Reconciler, pod::Update};
use numaward_kube::{
    nri::{Handle, Handler, Phase, Plugin, types},
    pod::PodSource,
};
use numaward_model::{
    Settings,
    port::{ContainerNames, EventSink, MachineSource},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;

pub use self::metrics::NriMetrics;
use self::{handler::NriHandler, request::RequestBuilder};

/// Changes that follow each other so closely are sent to the runtime together.
const GATHER: Duration = Duration::from_millis(200);

/// What placing containers asks of the parts around it.
pub trait Ports: MachineSource + EventSink + ContainerNames {}
impl<P: MachineSource + EventSink + ContainerNames> Ports for P {}

/// Places containers once it runs; what accompanies it runs from now on, until `stop`. To be called within a runtime of
/// tokio.
pub fn plugin(
    config: &Config,
    reconciler: Reconciler,
    ports: Arc<dyn Ports>,
    pods: Arc<dyn PodSource>,
    figures: NriMetrics,
    stop: &CancellationToken,
) -> Plugin<impl Handler> {
    let (updates, queue) = mpsc::unbounded_channel();
    reconciler.tell_runtime(updates);
    let builder = RequestBuilder::new(pods, config);
    let is_dry_run = config.enforcement.mode == EnforcementMode::DryRun;
    let (counted, warned) = (figures.clone(), Arc::default());
    let handler = NriHandler { reconciler, ports, builder, figures: counted, is_dry_run, warned };
    let plugin = Plugin::new(config.kubernetes.nri.options(), Arc::new(handler));
    tokio::spawn(stop.clone().run_until_cancelled_owned(update_runtime(plugin.handle(), queue)));
    tokio::spawn(stop.clone().run_until_cancelled_owned(follow(plugin.handle(), figures)));
    plugin
}

/// Keeps the metrics of the connection up to date.
async fn follow(handle: Handle, figures: NriMetrics) {
    let mut status = handle.status();
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

/// Sends the runtime what was written without it, the latest of each container.
async fn update_runtime(handle: Handle, mut queue: mpsc::UnboundedReceiver<Vec<Update>>) {
    while let Some(mut updates) = queue.recv().await {
        while let Ok(Some(more)) = timeout(GATHER, queue.recv()).await {
            updates.extend(more);
        }
        // A runtime that connects gets everything.
        if handle.status().borrow().phase != Phase::Connected {
            continue;
        }
        let latest: BTreeMap<String, Settings> =
            updates.into_iter().map(|update| (update.id, update.settings)).collect();
        let updates: Vec<types::Update> =
            latest.into_iter().map(|(id, settings)| handler::update(id, &settings)).collect();
        match handle.update_containers(&updates).await {
            Ok(failed) if failed.is_empty() => {
                tracing::debug!(containers = updates.len(), "the runtime follows");
            }
            Ok(failed) => tracing::warn!(?failed, "the runtime cannot change these containers"),
            Err(error) => tracing::warn!(%error, "changed containers cannot be reported to the runtime"),
        }
    }
}

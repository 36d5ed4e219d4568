//! Kubernetes: containers get their CPUs and nodes while the runtime creates them.
//!
//! Problem: a container runs where it runs from its first instruction, and its memory lies where it was first
//! touched. So what it gets must be decided before it exists, which only the container runtime knows of, in the
//! time that the runtime grants; and the runtime goes on without us when we are late.
//!
//! Ways: the runtime asks [`handler`] over NRI; [`request`] makes of what it tells, of [`annotations`] and of what the
//! API server tells a request; the reconciler (`numaward_control`) decides, stores and answers. When a process exists
//! but not its program yet, the reconciler holds its cgroup and tells the probes. What the reconciler later writes itself
//! the runtime is told, so that it repeats it.
//!
//! Invariant: no answer to the runtime waits for the runtime.

mod annotations;
mod devices;
mod handler;
mod metrics;
mod request;
#[cfg(test)]
mod tests;
mod whole;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use numaward_config::Config;
use numaward_control::{Reconciler, pod::Update};
use numaward_kube::{
    nri::{Handle, Phase, Plugin, types},
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

/// Changes that follow each other so closely are told to the runtime together.
const GATHER: Duration = Duration::from_millis(200);

/// The parts of the daemon that containers are placed with.
#[derive(Clone)]
pub struct Ports {
    /// Knows which CPUs and nodes there are.
    pub machine: Arc<dyn MachineSource>,
    /// Takes events.
    pub events: Arc<dyn EventSink>,
    /// Takes the names of containers.
    pub names: Arc<dyn ContainerNames>,
}

impl Ports {
    /// Where all of them are one part.
    pub fn of<P: MachineSource + EventSink + ContainerNames + 'static>(part: &Arc<P>) -> Self {
        Self { machine: part.clone(), events: part.clone(), names: part.clone() }
    }
}

/// Places containers until `stop`. To be called within a runtime of tokio.
pub fn start(
    config: &Config,
    reconciler: Reconciler,
    ports: Ports,
    pods: Arc<dyn PodSource>,
    figures: NriMetrics,
    stop: &CancellationToken,
) {
    let plugin = plugin(config, reconciler, ports, pods, figures, stop);
    tokio::spawn(plugin.run(stop.clone()));
}

/// The plugin, and what accompanies it.
fn plugin(
    config: &Config,
    reconciler: Reconciler,
    ports: Ports,
    pods: Arc<dyn PodSource>,
    figures: NriMetrics,
    stop: &CancellationToken,
) -> Plugin<NriHandler> {
    let (tell, told) = mpsc::unbounded_channel();
    reconciler.tell_runtime(tell);
    let handler = NriHandler::new(reconciler, ports, RequestBuilder::new(pods, config), figures.clone());
    let plugin = Plugin::new(config.kubernetes.nri.options(), Arc::new(handler));
    tokio::spawn(stop.clone().run_until_cancelled_owned(tell_runtime(plugin.handle(), told)));
    tokio::spawn(stop.clone().run_until_cancelled_owned(follow(plugin.handle(), figures)));
    plugin
}

/// Keeps the metrics of the connection up to date.
async fn follow(handle: Handle, figures: NriMetrics) {
    let mut status = handle.status();
    let mut disconnects = 0;
    loop {
        {
            let now = status.borrow_and_update();
            figures.connected.set(u64::from(now.phase == Phase::Connected));
            figures.disconnects.inc_by(now.disconnects.saturating_sub(disconnects));
            disconnects = now.disconnects;
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

/// Tells the runtime of what was written without it, the latest of each container.
async fn tell_runtime(handle: Handle, mut told: mpsc::UnboundedReceiver<Vec<Update>>) {
    while let Some(first) = told.recv().await {
        let mut latest: BTreeMap<String, Settings> = BTreeMap::new();
        let mut take = |updates: Vec<Update>| {
            latest.extend(updates.into_iter().map(|update| (update.id, update.settings)));
        };
        take(first);
        while let Ok(Some(more)) = timeout(GATHER, told.recv()).await {
            take(more);
        }
        // Who connects is told everything.
        if handle.status().borrow().phase != Phase::Connected {
            continue;
        }
        let updates: Vec<types::Update> =
            latest.into_iter().map(|(id, settings)| handler::update(id, &settings)).collect();
        match handle.update_containers(&updates).await {
            Ok(failed) if failed.is_empty() => {
                tracing::debug!(containers = updates.len(), "the runtime follows");
            }
            Ok(failed) => tracing::warn!(?failed, "the runtime cannot change these containers"),
            Err(error) => tracing::warn!(%error, "the runtime cannot be told of changed containers"),
        }
    }
}

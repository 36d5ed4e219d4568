//! Checks beside a kubelet while the daemon enforces guarantees: whether the kubelet has begun to pin containers itself, and whether its
//! Kubernetes node offers more than the daemon allocates.
//!
//! # Problem
//! The policies of a kubelet can change at each of its restarts. Then both write the same cgroups. The files with the policies may be
//! mounted singly into the container of the daemon: a mount keeps the file that existed at the start, and the kubelet replaces its state
//! files.
//!
//! # Algorithm
//! At an interval ([`KubeletTiming`]), three sources are read. If one says that the kubelet pins containers, that is reported:
//!
//! - the files, as far as they are visible;
//! - the PodResources API, whose socket is in a mounted directory: a kubelet reports allocatable CPUs or memory only if its managers assign
//!   them;
//! - the configuration from the kubelet's own API, if its address is configured.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_api::ReservationOrigin;
use numaward_config::{Config, OperatingMode};
use numaward_kube::{
    api,
    pod_resources::{Client, PodResourcesError},
};
use numaward_observe::{DaemonPart, Observer};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    KubeletConflict, Policies,
    configuration::{KubeletConfiguration, KubeletMemoryQos, REQUEST_TIMEOUT, has_memory_qos_by_default},
    pod_resources_socket,
    policies::FoundPolicy,
    reservations::{KubeletReservations, excess_of_node},
    stored_reservations::{self, SourcedReservations},
    with_kubelet_version,
};

/// Intervals of the checks.
#[derive(Clone, Copy, Debug)]
pub struct KubeletTiming {
    /// Interval of the checks of the kubelet's policies.
    pub check_interval: Duration,
    /// Interval of the comparisons with the Kubernetes node, each of which is a request to the API server.
    pub comparison_interval: Duration,
    /// Time after a comparison that failed.
    pub retry_delay: Duration,
}

impl Default for KubeletTiming {
    fn default() -> Self {
        Self {
            check_interval: Duration::from_secs(15),
            comparison_interval: Duration::from_hours(1),
            retry_delay: Duration::from_mins(1),
        }
    }
}

/// Returns the configuration with what follows from the kubelet of this host at the start of the daemon: its version and its reservations.
/// Also returns the origin of the reservations, which is noted for the status.
pub async fn prepare(
    config: &Config,
    mode: OperatingMode,
    observer: &Observer,
) -> (Config, Option<ReservationOrigin>) {
    let config = with_kubelet_version(config, observer).await;
    if mode == OperatingMode::Observe {
        return (config, None);
    }
    let (config, origin) = with_kubelet_reservations(&config, observer).await;
    if let Some(origin) = &origin {
        observer.note_reservations(origin.clone());
    }
    (config, origin)
}

/// Starts to watch the kubelet as this mode needs it. Must be called within a runtime of tokio.
pub fn start_watching(
    config: &Config,
    mode: OperatingMode,
    origin: Option<ReservationOrigin>,
    observer: &Arc<Observer>,
    stop: &CancellationToken,
) {
    tokio::spawn(report_memory_qos(config.clone(), mode).boxed());
    if mode == OperatingMode::Enforce {
        let timing = KubeletTiming::default();
        tokio::spawn(watch(config.clone(), origin, observer.clone(), timing, stop.clone()).boxed());
    }
}

/// Returns the configuration with the kubelet's reservations for those that are not set, and the origin of the reservations; no origin if
/// there is no kubelet. `config.kubernetes.node_name` is the name of the Kubernetes node.
pub async fn with_kubelet_reservations(
    config: &Config,
    observer: &Observer,
) -> (Config, Option<ReservationOrigin>) {
    let mut problems = Vec::new();
    let mut is_stored = false;
    let mut found = read_configured_reservations(config, &mut problems).await;
    if found.is_none() {
        let stored = stored_reservations::load(&config.state_directory);
        // They name CPUs and nodes, which the Kubernetes node does not.
        let is_better = !problems.is_empty() && matches!(&stored, Ok(Some(stored)) if stored.is_exact);
        if !is_better {
            found = read_node_reservations(config, &mut problems).await;
        }
        if found.is_none() && !problems.is_empty() {
            found = stored.unwrap_or_else(|problem| {
                problems.push(problem);
                None
            });
            is_stored = found.is_some();
        }
    }
    for problem in &problems {
        tracing::warn!(problem, "the reservations of the kubelet cannot be read from this source");
    }
    let Some(found) = found else {
        if problems.is_empty() {
            return (config.clone(), None);
        }
        let source = format!("numaward's configuration and defaults ({})", problems.join("; "));
        return (config.clone(), Some(ReservationOrigin { source, excess: None }));
    };
    let filled = found.reservations.fill_in(config, &observer.machine());
    if filled.is_ok() && !is_stored {
        stored_reservations::store(&config.state_directory, &found);
    }
    let mut source = found.source;
    if is_stored {
        source = format!("{source}, as stored at an earlier start ({})", problems.join("; "));
    }
    let (config, source) = match filled {
        Ok(filled) if filled == *config => (filled, "numaward's configuration".to_owned()),
        Ok(filled) => {
            tracing::info!(
                source,
                "CPUs and memory are reserved as by the kubelet, where the configuration reserves none"
            );
            (filled, source)
        }
        Err(problem) => {
            tracing::warn!(
                source,
                problem,
                "the reservations of the kubelet do not fit: those of the configuration and the defaults count"
            );
            (config.clone(), format!("numaward's configuration and defaults (not {source}: {problem})"))
        }
    };
    (config, Some(ReservationOrigin { source, excess: None }))
}

/// Reads the reservations of the kubelet's configuration: by its API, or its file.
async fn read_configured_reservations(
    config: &Config,
    problems: &mut Vec<String>,
) -> Option<SourcedReservations> {
    let mut read = |KubeletConfiguration { fields, source, .. }: KubeletConfiguration| {
        match KubeletReservations::from_configuration(&fields) {
            Ok(reservations) => Some(SourcedReservations { reservations, source, is_exact: true }),
            Err(problem) => {
                problems.push(format!("{source}: {problem}"));
                None
            }
        }
    };
    let mut failed = Vec::new();
    match KubeletConfiguration::from_api(config).await {
        Ok(found) => {
            if let Some(found) = found.and_then(&mut read) {
                return Some(found);
            }
        }
        Err(problem) => failed.push(problem),
    }
    match KubeletConfiguration::read_file(&config.host_root, &config.kubernetes.kubelet.directory) {
        Ok(found) => {
            if let Some(found) = found.and_then(&mut read) {
                return Some(found);
            }
        }
        Err(found) => failed.extend(found),
    }
    problems.extend(failed);
    None
}

/// Reads the reservations of the Kubernetes node: its capacity that is not allocatable.
async fn read_node_reservations(config: &Config, problems: &mut Vec<String>) -> Option<SourcedReservations> {
    let node = config.kubernetes.node_name.as_deref()?;
    match read_node(config, node).await.and_then(|node| KubeletReservations::from_node(&node)) {
        Ok(reservations) => {
            let source = format!("the Kubernetes node {node}: its capacity that is not allocatable");
            Some(SourcedReservations { reservations, source, is_exact: false })
        }
        Err(problem) => {
            problems.push(format!("Kubernetes node {node}: {problem}"));
            None
        }
    }
}

async fn read_node(config: &Config, node: &str) -> Result<api::NodeResources, String> {
    let request = async {
        let client = api::connect(config.kubernetes.kubeconfig.as_deref()).await;
        api::node_resources(client.map_err(|error| error.to_string())?, node).await
    };
    let answer = timeout(REQUEST_TIMEOUT, request).await;
    answer.unwrap_or_else(|_| Err(format!("no answer within {REQUEST_TIMEOUT:?}")))
}

/// Returns the kubelet's Memory `QoS`; `None` if it is off, or if neither the configuration of the kubelet nor its version can be read.
pub async fn find_memory_qos(config: &Config) -> Option<KubeletMemoryQos> {
    let from_file =
        || KubeletConfiguration::read_file(&config.host_root, &config.kubernetes.kubelet.directory);
    let configuration = match KubeletConfiguration::from_api(config).await {
        Ok(Some(configuration)) => Some(configuration),
        _ => from_file().ok().flatten(),
    };
    let reserves = configuration.as_ref().is_some_and(KubeletConfiguration::reserves_memory);
    if let Some(configuration) = configuration {
        let found = configuration.memory_qos();
        if found.is_some() || configuration.sets_memory_qos() {
            return found;
        }
    }
    let node = config.kubernetes.node_name.as_deref()?;
    let request = async {
        let client = api::connect(config.kubernetes.kubeconfig.as_deref()).await.ok()?;
        api::kubelet_version(client, node).await.ok()
    };
    let version = timeout(REQUEST_TIMEOUT, request).await.ok()??;
    has_memory_qos_by_default(&version)
        .then(|| KubeletMemoryQos { setting: format!("on by default in the kubelet {version}"), reserves })
}

/// Logs whether the kubelet writes the memory protection and throttling of pods, and what follows in this mode.
async fn report_memory_qos(config: Config, mode: OperatingMode) {
    let Some(found) = find_memory_qos(&config).await else { return };
    let memory_qos = &found.setting;
    match mode {
        OperatingMode::Enforce => tracing::warn!(memory_qos, "{}", found.effect()),
        OperatingMode::Observe => tracing::info!(
            memory_qos,
            "the kubelet's Memory QoS is on; numaward writes no memory protection of pods in this mode"
        ),
    }
}

/// Checks the kubelet and its Kubernetes node until the token is cancelled. `config` has the kubelet's reservations, from `origin`.
pub async fn watch(
    config: Config,
    origin: Option<ReservationOrigin>,
    observer: Arc<Observer>,
    timing: KubeletTiming,
    stop: CancellationToken,
) {
    let watching = async {
        let mut ticks = interval(timing.check_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut next_comparison = Instant::now();
        let mut origin = origin.unwrap_or_else(|| ReservationOrigin {
            source: "numaward's configuration and defaults".to_owned(),
            excess: None,
        });
        loop {
            ticks.tick().await;
            let conflict = find_conflict(&config, &observer).await;
            observer
                .note(DaemonPart::Kubelet, conflict.map_or(Ok(()), |found| Err(describe(&config, &found))));
            if let Some(node) = config.kubernetes.node_name.as_deref()
                && Instant::now() >= next_comparison
            {
                let distance = match read_node(&config, node).await {
                    Ok(resources) => {
                        let excess = excess_of_node(&resources, &config, &observer.machine());
                        if let Some(excess) = excess.as_ref().filter(|_| excess != origin.excess) {
                            tracing::warn!(
                                node,
                                excess,
                                "the Kubernetes node offers more than numaward allocates"
                            );
                        }
                        origin.excess = excess;
                        observer.note_reservations(origin.clone());
                        timing.comparison_interval
                    }
                    Err(error) => {
                        tracing::debug!(node, error, "the resources of the Kubernetes node cannot be read");
                        timing.retry_delay
                    }
                };
                next_comparison = Instant::now() + distance;
            }
        }
    };
    stop.run_until_cancelled(watching).await;
}

/// Returns the policies with which the kubelet pins containers; `None` if no source has any.
async fn find_conflict(config: &Config, observer: &Observer) -> Option<KubeletConflict> {
    let files = Policies::read(&config.host_root, &config.kubernetes.kubelet.directory);
    if let Some(conflict) = files.pins() {
        return Some(conflict);
    }
    match policies_of_managers(config).await {
        Ok(policies) => {
            if let Some(conflict) = policies.pins() {
                return Some(conflict);
            }
        }
        Err(error) => tracing::debug!(%error, "the kubelet does not report its allocatable resources"),
    }
    match KubeletConfiguration::from_api(config).await {
        Ok(None) => None,
        Ok(Some(configuration)) => {
            observer.note(DaemonPart::KubeletConfiguration, Ok(()));
            Policies::from_configuration(&configuration).pins()
        }
        Err(problem) => {
            observer.note(DaemonPart::KubeletConfiguration, Err(problem));
            None
        }
    }
}

/// Returns the policies that follow from what the kubelet can assign.
async fn policies_of_managers(config: &Config) -> Result<Policies, PodResourcesError> {
    let socket = pod_resources_socket(config);
    let allocatable = Client::connect(&socket).await?.allocatable().await?;
    let found = |has_any: bool, policy: &str, field| {
        has_any.then(|| FoundPolicy::new(policy, socket.display().to_string(), field))
    };
    Ok(Policies {
        cpu: found(!allocatable.cpu_ids.is_empty(), "static", "cpuManagerPolicy"),
        memory: found(!allocatable.memory.is_empty(), "Static", "memoryManagerPolicy"),
        ..Policies::default()
    })
}

/// Returns the report of a conflict, with what to do.
fn describe(config: &Config, conflict: &KubeletConflict) -> String {
    let KubeletConflict { found, fix } = conflict;
    let other = match config.mode {
        Some(OperatingMode::Enforce) => "set mode: observe and restart numaward",
        _ => "restart numaward, which then only observes",
    };
    format!(
        "the kubelet pins containers itself since numaward started ({}): both write the same cgroups. Either {}, or {other}",
        found.join(", "),
        fix.join(" and ")
    )
}

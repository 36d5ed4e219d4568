//! Handler of the calls of the container runtime.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_api::{Allocation, EventKind};
use numaward_cgroup::{CgroupPath, knob};
use numaward_config::{kubernetes::HandlerPin, policy::MemoryPolicy};
use numaward_guarantee::{
    error::AdmissionError,
    pod::{ContainerPlacementRequest, PodClaim},
    reconciler::ReconcilerHandle,
};
use numaward_kube::{
    nri::{
        Handler, RuntimeInfo,
        types::{
            Call, Container, ContainerEvent, ContainerState, Creation, Event, Limit, NoAnswer,
            NoAnswerReason, Online, Pod, PodEvent, Refusal, Resources, Settings, Snapshot, Update,
        },
    },
    pod::Notice,
};
use numaward_model::{EventReport, Settings as HeldSettings, pod, port::ObservedHost};
use numaward_topology::{Bytes, NodeSet};
use parking_lot::Mutex;

use super::{
    NriMetrics,
    annotations::OFF_IGNORED,
    crio, memory_policy,
    own_pins::OwnPins,
    refusals::Refusals,
    request::{NotPlacedReason, RequestBuilder, id_of, settings_in},
    sandbox,
    updates::PendingUpdates,
};

/// The maximum time to wait for the API server to report a new pod, if pods are synced.
const POD_TIMEOUT: Duration = Duration::from_millis(300);
/// The interval of checks for the pod.
const POD_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Reasons of the Kubernetes events of a dry run.
const PLACEMENT_DRY_RUN: &str = "NumaPlacementDryRun";
const REFUSAL_DRY_RUN: &str = "NumaRefusalDryRun";

/// Handler that passes the calls of the runtime to the reconciler.
#[derive(Clone)]
pub(super) struct NriHandler {
    pub(super) reconciler: ReconcilerHandle,
    pub(super) host: Arc<dyn ObservedHost>,
    pub(super) builder: RequestBuilder,
    pub(super) figures: NriMetrics,
    /// True if decisions are only reported.
    pub(super) is_dry_run: bool,
    /// UIDs of pods with a warning about `placement: off`, `UID/HANDLER` of those with one about their runtime, and `UID/crio.io` of
    /// those with one about annotations of CRI-O.
    pub(super) warned: Arc<Mutex<BTreeSet<String>>>,
    pub(super) refusals: Refusals,
    /// Settings that the runtime does not know yet.
    pub(super) pending: PendingUpdates,
    pub(super) policies: memory_policy::MemoryPolicyRequests,
    pub(super) own_pins: OwnPins,
}

/// Converts settings to the types of NRI.
fn settings(held: &HeldSettings) -> Settings {
    let limit = |limit: Option<knob::Limit>| {
        limit.map(|limit| match limit {
            knob::Limit::Max => Limit::Unlimited,
            knob::Limit::Bytes(bytes) => Limit::At(bytes),
        })
    };
    Settings {
        cpus: held.cpus.clone(),
        mems: held.mems.clone(),
        memory_min: limit(held.memory_min),
        memory_low: limit(held.memory_low),
        memory_high: limit(held.memory_high),
        cpu_quota: held.cpu_max.map(|quota| match quota {
            knob::Quota::Max => Limit::Unlimited,
            knob::Quota::Limited { quota, .. } => Limit::At(Duration::from_micros(quota)),
        }),
    }
}

fn cgroup_of(container: &Container) -> Option<CgroupPath> {
    container.cgroup.as_ref().and_then(|path| path.parse().ok())
}

/// Returns the possible fixes for a refusal with this reason, which is one of the kubelet's.
fn fixes(reason: &str) -> String {
    let other = match reason {
        "TopologyAffinityError" => "request less, or another policy (numaward.io/topology-policy)",
        "SMTAlignmentError" => "request CPUs in whole cores",
        "EmptyPodSharedPoolError" => "request more for the pod, or less for its containers",
        "UnexpectedAdmissionError" => "request less",
        _ => "correct the requests of the pod",
    };
    format!(
        "Fixes: wait for free resources; delete the pod, so that it is scheduled again (with kubernetes.nodeResourceTopology: by \
         the free resources of the nodes); {other}"
    )
}

/// Describes a pod for messages.
fn describe_pod(pod: &Pod) -> String {
    format!("pod {}/{}", pod.namespace, pod.name)
}

/// Returns the key of the warning about annotations of CRI-O.
fn crio_key(pod: &Pod) -> String {
    format!("{}/crio.io", pod.uid)
}

/// Describes a container for messages.
fn describe_container(pod: &Pod, container: &Container) -> String {
    format!("container {} of pod {}/{}", container.name, pod.namespace, pod.name)
}

/// Returns the label of a container in metrics and the API.
fn full_name(pod: &Pod, container: &Container) -> String {
    pod::container_name(&pod.namespace, &pod.name, &container.name)
}

/// Describes the CPUs and memory of a guarantee; `None` without any.
fn describe_guarantee(allocation: &Allocation) -> Option<String> {
    let cpus = (!allocation.cpus.is_empty()).then(|| format!("CPUs {}", allocation.cpus));
    let memory = allocation.memory.iter().map(|block| {
        let nodes = if block.nodes.contains([',', '-']) { "nodes" } else { "node" };
        format!("{} of {} on {nodes} {}", Bytes(block.bytes), block.kind, block.nodes)
    });
    let all: Vec<_> = cpus.into_iter().chain(memory).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Converts a change of settings to the type of NRI. If it fails, the other changes of the same answer are still made.
pub(super) fn update(container: String, held: &HeldSettings) -> Update {
    Update { container, settings: settings(held), ignore_failure: true }
}

impl NriHandler {
    /// Counts and reports a container that started without the CPUs and nodes of a guarantee.
    fn unpinned(&self, pod: &Pod, container: &Container, reason: &'static str) {
        if self.is_dry_run {
            return;
        }
        self.figures.unpinned(reason);
        let (Pod { namespace, name, .. }, container_name) = (pod, &container.name);
        let message = format!(
            "Container {container_name} of pod {namespace}/{name} started unpinned, without the CPUs and nodes of a guarantee: {reason}."
        );
        let report = EventReport::new(EventKind::UnpinnedStart, message)
            .detail("reason", reason)
            .detail("pod", format_args!("{namespace}/{name}"))
            .detail("container", container_name);
        self.host.report(cgroup_of(container).as_ref(), report);
    }

    /// Creates a Kubernetes event for a pod.
    fn notify(&self, pod: &Pod, reason: &str, message: String, is_warning: bool) {
        self.builder.pods.notify(Notice { pod: id_of(pod), reason: reason.to_owned(), message, is_warning });
    }

    /// Reports a decision of a dry run as an event of numaward and as a Kubernetes event.
    fn report_dry_run(&self, pod: &Pod, cgroup: Option<&CgroupPath>, reason: &str, message: String) {
        let full_name = format!("{}/{}", pod.namespace, pod.name);
        let report = EventReport::new(EventKind::Decided, message.clone()).detail("pod", full_name);
        self.host.report(cgroup, report.detail("reason", reason));
        self.notify(pod, reason, message, false);
    }

    /// Reports the guarantee that a container would have, if any.
    fn report_dry_placement(&self, pod: &Pod, container: &Container) {
        let Some(cgroup) = cgroup_of(container) else { return };
        let held = self.reconciler.allocations();
        let path = cgroup.to_string();
        let held = held
            .allocations
            .iter()
            .find(|held| held.cgroup == path)
            .and_then(|held| describe_guarantee(held));
        if let Some(held) = held {
            let what = describe_container(pod, container);
            self.report_dry_run(
                pod,
                Some(&cgroup),
                PLACEMENT_DRY_RUN,
                format!("Dry run: {what} would have had {held}."),
            );
        }
    }

    fn runtime(&self) -> Option<RuntimeInfo> {
        self.policies.runtime.get().and_then(|status| status.borrow().runtime.clone())
    }

    /// Returns the memory policy to request from the runtime. Its nodes are all online ones: the kernel reduces them to those of the
    /// cpuset.
    fn memory_policy(
        &self,
        pod: &Pod,
        container: &Container,
        policy: MemoryPolicy,
    ) -> Option<(MemoryPolicy, NodeSet)> {
        if let Some(runtime) = self.runtime().filter(|runtime| !runtime.sets_memory_policies()) {
            let reason = format!(
                "{} {} ignores memory policies, which need NRI 0.12 or newer (containerd 2.3)",
                runtime.name, runtime.version
            );
            self.report_missing_policy(pod, container, policy, &reason);
            return None;
        }
        self.policies.waiting.lock().insert(container.id.clone(), policy);
        Some((policy, self.online().mems))
    }

    /// Reports a container that is about to start without the requested memory policy.
    async fn check_memory_policy(&self, pod: &Pod, container: &Container) {
        let policy = self.policies.waiting.lock().remove(&container.id);
        let (Some(policy), Some(pid)) = (policy, container.pid) else { return };
        let host_root = self.policies.host_root.clone();
        let checked =
            tokio::task::spawn_blocking(move || memory_policy::is_set(&host_root, pid, policy)).await;
        match checked {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => {
                let reason = "its first process does not have it: the OCI runtime may be too old (runc sets it from 1.4 on)";
                self.report_missing_policy(pod, container, policy, reason);
            }
            Ok(Err(error)) => tracing::warn!(
                namespace = pod.namespace,
                pod = pod.name,
                container = container.name,
                %error,
                "cannot check that the memory policy {policy} is set: this needs SYS_PTRACE and the process ids of the host"
            ),
            Err(error) => tracing::error!(%error, "the check of a memory policy failed"),
        }
    }

    /// Counts and reports a container without the memory policy that its pod requests.
    fn report_missing_policy(&self, pod: &Pod, container: &Container, policy: MemoryPolicy, reason: &str) {
        self.figures.memory_policies_missing.inc();
        let what = describe_container(pod, container);
        tracing::warn!("{what} starts without the memory policy {policy}: {reason}");
        let message =
            format!("Container {} starts without the memory policy {policy}: {reason}.", container.name);
        self.notify(pod, "NumaMemoryPolicyMissing", message, true);
    }

    /// Admits all containers of a pod together, with the devices that the kubelet has assigned to them.
    async fn admit_pod(&self, pod: &Pod) -> Result<(), AdmissionError> {
        let mut request = self.builder.pod(pod);
        if !matches!(request.asked, PodClaim::Pod(_)) {
            return Ok(());
        }
        self.builder.add_devices(pod, None, &mut request).await;
        self.reconciler.run_pod(request).await
    }

    /// Waits until the API server reports a pod, for at most [`POD_TIMEOUT`].
    async fn await_pod(&self, pod: &Pod) {
        if self.builder.pods.is_synced() {
            let known = async {
                while self.builder.known(pod).is_none() {
                    tokio::time::sleep(POD_POLL_INTERVAL).await;
                }
            };
            // Static pods may never be reported.
            let _ = tokio::time::timeout(POD_TIMEOUT, known).await;
        }
    }

    /// Warns once of each pod with `placement: off` that may not opt out.
    fn warn_of_ignored_off(&self, pod: &Pod) {
        let mut warned = self.warned.lock();
        if self.builder.annotations(pod).wants_off && warned.insert(pod.uid.clone()) {
            // The log has the warning also on hosts without an API server.
            tracing::warn!(namespace = pod.namespace, pod = pod.name, "{OFF_IGNORED}");
            self.notify(pod, "NumaPlacementOffIgnored", OFF_IGNORED.to_owned(), true);
        }
    }

    /// Warns once of each pod with a guarantee and annotations that let CRI-O change its CPUs too.
    fn warn_of_crio(&self, pod: &Pod) {
        let Some(warning) = crio::warning(pod) else { return };
        let is_crio = self.runtime().is_some_and(|runtime| runtime.is_crio());
        if is_crio && self.builder.has_claim(pod) && self.warned.lock().insert(crio_key(pod)) {
            tracing::warn!(namespace = pod.namespace, pod = pod.name, "{warning}");
            self.notify(pod, "NumaRuntimeChangesCpus", warning, true);
        }
    }

    /// Returns the answer to a request that failed. Only a refusal of the engine is passed to the runtime.
    fn refused(&self, pod: &Pod, what: &str, refused: &AdmissionError) -> Result<(), Refusal> {
        let AdmissionError::Rejected(rejection, explanation) = refused else {
            tracing::error!(pod = pod.name, error = %refused, "the pod or one of its containers cannot be placed");
            return Ok(());
        };
        let notes: Vec<_> = explanation.notes.iter().map(|note| format!("; {note}")).collect();
        let notes = notes.concat();
        if self.is_dry_run {
            let message = format!("Dry run: {what} would have been refused: {refused}{notes}");
            self.report_dry_run(pod, None, REFUSAL_DRY_RUN, message);
            return Ok(());
        }
        self.figures.refused.inc();
        self.refusals.refused(pod, &rejection.reason);
        let text = format!("numaward cannot place {what}: {refused}");
        // The API server accepts 1024 bytes, and the list of free resources by node may be long: it comes last.
        let reason = &rejection.reason;
        let outlook = self.refusals.outlook(reason);
        let mut message =
            format!("{} ({reason}). {outlook} {}. Details: {text}.", rejection.message, fixes(reason));
        for note in &explanation.notes {
            message = format!("{message} Note: {note}.");
        }
        self.notify(pod, "NumaPlacementRefused", message, true);
        Err(Refusal(text))
    }

    /// Returns the answer to a resize that failed. Errors other than these are logged, and the runtime makes the change.
    fn not_resized(&self, pod: &Pod, what: &str, refused: &AdmissionError) -> Result<(), Refusal> {
        let (AdmissionError::Resize(_) | AdmissionError::Failed(_) | AdmissionError::Enforce(_)) = refused
        else {
            tracing::error!(%what, error = %refused, "the resize cannot be applied as requested");
            return Ok(());
        };
        if self.is_dry_run {
            let message = format!("Dry run: the resize of {what} would have been refused: {refused}");
            self.report_dry_run(pod, None, REFUSAL_DRY_RUN, message);
            return Ok(());
        }
        self.figures.refused.inc();
        Err(Refusal(format!("numaward cannot resize {what}: {refused}")))
    }

    /// Decides on a container that is to be created.
    async fn create(&self, pod: Pod, container: Container) -> Result<Creation, Refusal> {
        self.host.update_containers(vec![(container.id.clone(), full_name(&pod, &container))], false);
        if self.refusals.is_not_admitted(&pod.uid) {
            // Resources may have become free.
            if let Err(refused) = self.admit_pod(&pod).await {
                self.refused(&pod, &describe_pod(&pod), &refused)?;
            }
            self.refusals.admitted(&pod.uid);
        }
        if self.builder.pin(&pod) != HandlerPin::Container {
            self.place_sandbox(&pod, &container).await?;
            return Ok(Creation { updates: self.pending(&container.id), ..Creation::default() });
        }
        let mut request = match self.builder.container(&pod, &container) {
            Ok(request) => request,
            Err(NotPlacedReason::OptedOut) => return Ok(Creation::default()),
            Err(NotPlacedReason::NoCgroup) => {
                let problem = container.malformed.first().map(ToString::to_string);
                tracing::warn!(
                    pod = pod.name,
                    container = container.name,
                    problem,
                    "the cgroup of the container is unknown"
                );
                self.unpinned(&pod, &container, NoAnswerReason::Unreadable(String::new()).label());
                return Ok(Creation::default());
            }
        };
        let is_of_pod = matches!(request.pod.asked, PodClaim::Pod(_));
        if matches!(request.pod.asked, PodClaim::Container(_)) {
            // Otherwise, the pod was admitted with its devices.
            self.builder.add_devices(&pod, Some(&container), &mut request.pod).await;
        }
        let id = container.id.clone();
        let (policy, has) = (request.pod.terms.memory_policy, request.has.clone());
        match self.reconciler.create(request).await {
            Ok((wanted, unpinned)) => {
                match unpinned {
                    Some(reason) => self.unpinned(&pod, &container, reason.label()),
                    None if self.is_dry_run => {}
                    None => drop(self.figures.placed.inc()),
                }
                let settings = settings(&wanted);
                if settings.cpus.is_some() || settings.mems.is_some() {
                    self.own_pins.add(id.clone(), has);
                }
                let policy = policy.filter(|_| self.policies.is_on);
                let memory_policy = policy.and_then(|policy| self.memory_policy(&pod, &container, policy));
                Ok(Creation { settings, memory_policy, updates: self.pending(&id) })
            }
            // The pod would have been refused earlier, and that was reported.
            Err(AdmissionError::Rejected(..)) if self.is_dry_run && is_of_pod => Ok(Creation::default()),
            Err(refused) => self
                .refused(&pod, &describe_container(&pod, &container), &refused)
                .map(|()| Creation::default()),
        }
    }

    /// Builds the request for a container that starts and may be unknown to the reconciler, unless another plugin has pinned the container.
    fn started(&self, pod: &Pod, container: &Container) -> Option<ContainerPlacementRequest> {
        let is_pinned = container.resources.is_pinned();
        let original = self.own_pins.original(&container.id).filter(|_| is_pinned);
        if is_pinned && original.is_none() {
            return None;
        }
        let request = self.builder.container(pod, container).ok()?;
        // The settings of an earlier start are not those that the container would have without numaward.
        Some(ContainerPlacementRequest { has: original.unwrap_or(request.has), ..request })
    }

    /// Places the cgroup of a pod with all its containers in the sandbox.
    async fn place_sandbox(&self, pod: &Pod, container: &Container) -> Result<(), Refusal> {
        if self.builder.pin(pod) == HandlerPin::None {
            self.report_no_guarantee(pod);
        }
        let request = match self.builder.sandbox(pod) {
            Ok(request) => request,
            Err(NotPlacedReason::OptedOut) => return Ok(()),
            Err(NotPlacedReason::NoCgroup) => {
                tracing::warn!(
                    pod = pod.name,
                    "the cgroup of the pod is unknown, and its sandbox is not placed"
                );
                self.unpinned(pod, container, NoAnswerReason::Unreadable(String::new()).label());
                return Ok(());
            }
        };
        let id = request.id.clone();
        match self.reconciler.create(request).await {
            Ok((_, unpinned)) => {
                // The sandbox runs already, so its cgroup exists.
                let bound = self.reconciler.bind(id, None).await.ok().flatten();
                match unpinned.or(bound) {
                    Some(reason) => self.unpinned(pod, container, reason.label()),
                    None if self.is_dry_run => {}
                    None => drop(self.figures.placed.inc()),
                }
                Ok(())
            }
            Err(refused) => self.refused(pod, &describe_pod(pod), &refused),
        }
    }

    /// Reports once that a pod gets no guarantee because of its runtime.
    fn report_no_guarantee(&self, pod: &Pod) {
        let key = format!("{}/{}", pod.uid, pod.runtime_handler);
        if !self.builder.has_claim(pod) || !self.warned.lock().insert(key) {
            return;
        }
        let message = format!(
            "The pod gets no CPUs and nodes of its own: with the runtime handler {}, its containers run in the sandbox. \
             kubernetes.runtimeHandlers in numaward's configuration can pin the sandbox.",
            pod.runtime_handler
        );
        tracing::warn!(namespace = pod.namespace, pod = pod.name, "{message}");
        self.notify(pod, "NumaRuntimeNotPlaced", message, true);
    }

    /// Returns pending changes of other containers, to send with the answer about this one.
    fn pending(&self, about: &str) -> Vec<Update> {
        if self.is_dry_run { Vec::new() } else { self.pending.take(about, &self.online()) }
    }

    /// Compares the running containers with the guarantees. Returns the changes that the runtime has to make.
    async fn compare(&self, snapshot: Snapshot) -> Vec<Update> {
        self.pending.clear();
        let (online, mut placed_pods) = (self.online(), BTreeSet::new());
        let requests: Vec<_> = snapshot
            .containers
            .iter()
            .filter(|container| container.state != ContainerState::Stopped)
            .filter_map(|container| {
                let pod = snapshot.pods.get(&container.pod_id)?;
                if self.builder.pin(pod) != HandlerPin::Container {
                    return placed_pods
                        .insert(pod.id.clone())
                        .then(|| self.builder.sandbox(pod).ok())
                        .flatten();
                }
                self.builder.running(pod, container, &online).ok()
            })
            .collect();
        let named = snapshot.containers.iter().filter_map(|container| {
            Some((container.id.clone(), full_name(snapshot.pods.get(&container.pod_id)?, container)))
        });
        self.refusals.compare(&snapshot);
        let is_complete = snapshot.unreadable == 0;
        self.host.update_containers(named.collect(), is_complete);
        for pod in snapshot.pods.values() {
            self.warn_of_ignored_off(pod);
            self.warn_of_crio(pod);
        }
        let sandboxes = snapshot.pods.iter().map(|(id, pod)| (id.clone(), pod.uid.clone())).collect();
        let count = requests.len();
        match self.reconciler.synchronize(requests, sandboxes, is_complete).await {
            Ok(synchronized) => {
                tracing::info!(
                    containers = count,
                    updates = synchronized.updates.len(),
                    unpinned = synchronized.unpinned.len(),
                    "compared the guarantees with the containers of the runtime"
                );
                // A container that has ended before the connection may have been pinned by another program.
                let listed = snapshot.containers.iter().filter(|container| {
                    container.state != ContainerState::Stopped
                        || self.own_pins.original(&container.id).is_some()
                });
                let own = listed.map(|container| container.id.clone());
                let foreign: BTreeSet<_> = synchronized.foreign.into_iter().collect();
                self.own_pins.compare(own.filter(|id| !foreign.contains(id)), is_complete);
                for container in &snapshot.containers {
                    let found = synchronized.unpinned.iter().find(|(id, _)| *id == container.id);
                    if let (Some((_, reason)), Some(pod)) = (found, snapshot.pods.get(&container.pod_id)) {
                        self.unpinned(pod, container, reason.label());
                    }
                }
                let of_containers =
                    synchronized.updates.into_iter().filter(|found| !sandbox::is_id(&found.id));
                of_containers.map(|found| update(found.id, &found.settings)).collect()
            }
            Err(error) => {
                tracing::error!(%error, "the guarantees cannot be compared with the containers of the runtime");
                Vec::new()
            }
        }
    }
}

impl Handler for NriHandler {
    fn online(&self) -> Online {
        Online::from(&*self.host.machine())
    }

    async fn synchronize(&self, snapshot: Snapshot) -> Vec<Update> {
        let handler = self.clone();
        // The task continues after a timeout of the runtime, so that adopted containers are counted and reported in any case.
        let compared = tokio::spawn(async move { handler.compare(snapshot).await }.boxed());
        compared.await.unwrap_or_else(|error| {
            tracing::error!(%error, "the comparison of the guarantees with the containers of the runtime failed");
            Vec::new()
        })
    }

    async fn run_pod(&self, pod: Pod) -> Result<(), Refusal> {
        self.await_pod(&pod).await;
        self.warn_of_ignored_off(&pod);
        self.warn_of_crio(&pod);
        match self.admit_pod(&pod).await {
            Ok(()) => Ok(()),
            Err(AdmissionError::Rejected(..)) if !self.is_dry_run => {
                self.refusals.not_admitted(pod.uid);
                Ok(())
            }
            Err(refused) => self.refused(&pod, &describe_pod(&pod), &refused),
        }
    }

    async fn update_pod(&self, pod: Pod, resources: Resources) -> Result<(), Refusal> {
        let Some(to) = self.builder.pod_resized(&pod, &resources) else { return Ok(()) };
        let what = describe_pod(&pod);
        let resized = self.reconciler.resize_pod(pod.uid.clone(), to).await;
        resized.or_else(|refused| self.not_resized(&pod, &what, &refused))
    }

    async fn create_container(&self, pod: Pod, container: Container) -> Result<Creation, Refusal> {
        let uid = pod.uid.clone();
        let created = self.create(pod, container).await;
        if created.is_ok() {
            self.refusals.created(uid);
        }
        created
    }

    async fn update_container(
        &self,
        pod: Pod,
        container: Container,
        requested: Resources,
    ) -> Result<Vec<Update>, Refusal> {
        let id = container.id.clone();
        let (to, memory) = self.builder.resized(&pod, &container, &requested);
        let has = settings_in(&Resources {
            cpu_period: requested.cpu_period.or(container.resources.cpu_period),
            ..requested
        });
        match self.reconciler.resize(id, to, memory, has).await {
            // In a dry run, the runtime makes no change for the decision.
            Ok(_) if self.is_dry_run => Ok(Vec::new()),
            // The CPUs and nodes have to be set, so a failure of this change is not ignored.
            Ok(Some(held)) => Ok(vec![Update { ignore_failure: false, ..update(container.id, &held) }]),
            Ok(None) => Ok(Vec::new()),
            Err(refused) => {
                self.not_resized(&pod, &describe_container(&pod, &container), &refused).map(|()| Vec::new())
            }
        }
    }

    async fn stop_container(&self, _pod: Pod, container: Container) -> Vec<Update> {
        let id = container.id.clone();
        log_stop_error(self.reconciler.stopped(container.id).await);
        self.pending(&id)
    }

    async fn event(&self, event: Event) {
        match event {
            Event::Container(ContainerEvent::Starting, pod, container) => {
                // The runtime may have created the container without an answer.
                self.refusals.created(pod.uid.clone());
                if self.builder.pin(&pod) != HandlerPin::Container {
                    let request = self.builder.sandbox(&pod).ok();
                    // An error means that the daemon ends.
                    let _ = self.reconciler.bind(sandbox::id(&pod.id), request.map(Box::new)).await;
                    return;
                }
                let request = self.started(&pod, &container);
                let bound = self.reconciler.bind(container.id.clone(), request.map(Box::new)).await;
                if let Ok(Some(reason)) = bound {
                    self.unpinned(&pod, &container, reason.label());
                }
                if self.is_dry_run {
                    self.report_dry_placement(&pod, &container);
                }
                self.check_memory_policy(&pod, &container).await;
            }
            Event::Container(ContainerEvent::Removed, _, container) => {
                self.host.remove_container(&container.id);
                self.pending.forget(&container.id);
                self.own_pins.forget(&container.id);
                self.policies.waiting.lock().remove(&container.id);
                log_stop_error(self.reconciler.stopped(container.id).await);
            }
            Event::Pod(event @ (PodEvent::Stopped | PodEvent::Removed), pod) => {
                if event == PodEvent::Removed {
                    let mut warned = self.warned.lock();
                    warned.remove(&pod.uid);
                    warned.remove(&format!("{}/{}", pod.uid, pod.runtime_handler));
                    warned.remove(&crio_key(&pod));
                }
                self.refusals.gone(&pod.uid);
                log_stop_error(self.reconciler.pod_stopped(pod.uid, pod.id).await);
            }
            Event::Container(
                ContainerEvent::Created | ContainerEvent::Started | ContainerEvent::Updated,
                ..,
            )
            | Event::Pod(PodEvent::Updated, _) => {}
        }
    }

    fn no_answer(&self, call: NoAnswer) {
        let NoAnswer { call: Call::CreateContainer, pod, container, reason } = call else { return };
        if let Some(container) = &container {
            self.own_pins.forget(&container.id);
            self.policies.waiting.lock().remove(&container.id);
        }
        if let Some(pod) = &pod {
            self.refusals.created(pod.uid.clone());
        }
        match (pod, container) {
            // A placement by another plugin may be intended.
            (Some(pod), Some(container)) if reason != NoAnswerReason::PinnedByOther => {
                self.unpinned(&pod, &container, reason.label());
            }
            _ if self.is_dry_run => {}
            _ => self.figures.unpinned(reason.label()),
        }
    }
}

/// Logs an error of the reconciler, which occurs if the daemon ends. The next start compares the running containers anyway.
fn log_stop_error(result: Result<(), AdmissionError>) {
    if let Err(error) = result {
        tracing::debug!(%error, "the reconciler did not record the end of a container or pod");
    }
}

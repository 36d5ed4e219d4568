//! Answers the container runtime.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_api::{Allocation, EventKind};
use numaward_cgroup::{CgroupPath, knob};
use numaward_config::policy::MemoryPolicy;
use numaward_guarantee::{error::AdmissionError, pod::PodClaim, reconciler::ReconcilerHandle};
use numaward_kube::{
    nri::{
        Handler,
        types::{
            Call, Container, ContainerEvent, ContainerState, Creation, Event, Limit, NoAnswer,
            NoAnswerReason, Online, Pod, PodEvent, Refusal, Resources, Settings, Snapshot, Update,
        },
    },
    pod::Notice,
};
use numaward_model::{EventReport, Settings as Held, pod};
use numaward_topology::{Bytes, NodeSet};
use parking_lot::Mutex;

use super::{
    NriMetrics, Ports,
    annotations::OFF_IGNORED,
    memory_policy,
    refusals::Refusals,
    request::{LeftAlone, RequestBuilder, id_of, settings_in},
    updates::PendingUpdates,
};

/// How long a pod is waited for that the API server has not reported yet, although pods are synced.
const POD_PATIENCE: Duration = Duration::from_millis(300);
const POD_PACE: Duration = Duration::from_millis(10);
/// Reasons of a dry run.
const WOULD_PLACE: &str = "NumaPlacementDryRun";
const WOULD_REFUSE: &str = "NumaRefusalDryRun";

/// Asks the reconciler on behalf of the runtime.
#[derive(Clone)]
pub(super) struct NriHandler {
    pub(super) reconciler: ReconcilerHandle,
    pub(super) ports: Arc<dyn Ports>,
    pub(super) builder: RequestBuilder,
    pub(super) figures: NriMetrics,
    /// What is decided is reported, and nobody is held to it.
    pub(super) is_dry_run: bool,
    /// The UIDs of pods that were warned of `placement: off`.
    pub(super) warned: Arc<Mutex<BTreeSet<String>>>,
    pub(super) refusals: Refusals,
    /// What the runtime does not know yet.
    pub(super) pending: PendingUpdates,
    pub(super) policies: memory_policy::Asked,
}

/// Settings as the runtime takes them.
fn settings(of: &Held) -> Settings {
    let limit = |limit: Option<knob::Limit>| {
        limit.map(|limit| match limit {
            knob::Limit::Max => Limit::Unlimited,
            knob::Limit::Bytes(bytes) => Limit::At(bytes),
        })
    };
    Settings {
        cpus: of.cpus.clone(),
        mems: of.mems.clone(),
        memory_min: limit(of.memory_min),
        memory_low: limit(of.memory_low),
        memory_high: limit(of.memory_high),
        cpu_quota: of.cpu_max.map(|quota| match quota {
            knob::Quota::Max => Limit::Unlimited,
            knob::Quota::Limited { quota, .. } => Limit::At(Duration::from_micros(quota)),
        }),
    }
}

fn cgroup_of(container: &Container) -> Option<CgroupPath> {
    container.cgroup.as_ref().and_then(|path| path.parse().ok())
}

/// What can be done about a refusal for this reason, one of the kubelet's.
fn ways_out(reason: &str) -> String {
    let other = match reason {
        "TopologyAffinityError" => "ask for less, or for another policy (numaward.io/topology-policy)",
        "SMTAlignmentError" => "ask for CPUs in whole cores",
        "EmptyPodSharedPoolError" => "ask for more for the pod as a whole, or for less for its containers",
        "UnexpectedAdmissionError" => "ask for less",
        _ => "correct what the pod asks for",
    };
    format!(
        "Ways out: wait for room; delete the pod, so that it is scheduled anew (by what is free on the nodes: \
         kubernetes.nodeResourceTopology); {other}"
    )
}

/// A pod in sentences.
fn pod_of(pod: &Pod) -> String {
    format!("pod {}/{}", pod.namespace, pod.name)
}

/// A container in sentences.
fn container_of(pod: &Pod, container: &Container) -> String {
    format!("container {} of pod {}/{}", container.name, pod.namespace, pod.name)
}

/// The name of a container, as it is served.
fn full_name(pod: &Pod, container: &Container) -> String {
    pod::container_name(&pod.namespace, &pod.name, &container.name)
}

/// What is held, in words; none if that is nothing.
fn held_by(allocation: &Allocation) -> Option<String> {
    let cpus = (!allocation.cpus.is_empty()).then(|| format!("CPUs {}", allocation.cpus));
    let memory = allocation.memory.iter().map(|block| {
        let nodes = if block.nodes.contains([',', '-']) { "nodes" } else { "node" };
        format!("{} of {} on {nodes} {}", Bytes(block.bytes), block.kind, block.nodes)
    });
    let all: Vec<_> = cpus.into_iter().chain(memory).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// A change as the runtime takes it. One that fails must not keep others from being made.
pub(super) fn update(container: String, of: &Held) -> Update {
    Update { container, settings: settings(of), ignore_failure: true }
}

impl NriHandler {
    /// Counts and reports a container that was started without what it should have had.
    fn unpinned(&self, pod: &Pod, container: &Container, reason: &'static str) {
        if self.is_dry_run {
            return;
        }
        self.figures.unpinned(reason);
        let (Pod { namespace, name, .. }, of) = (pod, &container.name);
        let what = format!("Container {of} of pod {namespace}/{name}");
        let message = format!("{what} started without what it should have had: {reason}.");
        let report = EventReport::new(EventKind::UnpinnedStart, message)
            .detail("reason", reason)
            .detail("pod", format_args!("{namespace}/{name}"))
            .detail("container", of);
        self.ports.report(cgroup_of(container).as_ref(), report);
    }

    /// Has those who look at the pod in the API server know something.
    fn notify(&self, pod: &Pod, reason: &str, message: String, is_warning: bool) {
        self.builder.pods.notify(Notice { pod: id_of(pod), reason: reason.to_owned(), message, is_warning });
    }

    /// Reports what was decided in a dry run, here and to those who look at the pod.
    fn would(&self, pod: &Pod, cgroup: Option<&CgroupPath>, reason: &str, message: String) {
        let of = format!("{}/{}", pod.namespace, pod.name);
        let report = EventReport::new(EventKind::Decided, message.clone()).detail("pod", of);
        self.ports.report(cgroup, report.detail("reason", reason));
        self.notify(pod, reason, message, false);
    }

    /// Reports where a container would be, unless nothing would be promised to it.
    fn would_place(&self, pod: &Pod, container: &Container) {
        let Some(cgroup) = cgroup_of(container) else { return };
        let held = self.reconciler.allocations();
        let path = cgroup.to_string();
        let held = held.allocations.iter().find(|held| held.cgroup == path).and_then(|held| held_by(held));
        if let Some(held) = held {
            let what = container_of(pod, container);
            self.would(pod, Some(&cgroup), WOULD_PLACE, format!("Dry run: {what} would have had {held}."));
        }
    }

    /// The memory policy to ask the runtime for: over any node, of which the kernel takes those of the cpuset.
    fn memory_policy(
        &self,
        pod: &Pod,
        container: &Container,
        policy: MemoryPolicy,
    ) -> Option<(MemoryPolicy, NodeSet)> {
        let runtime = self.policies.runtime.get().and_then(|status| status.borrow().runtime.clone());
        if let Some(runtime) = runtime.filter(|runtime| !runtime.sets_memory_policies()) {
            let why = format!(
                "{} {} ignores memory policies, which need NRI 0.12 or newer (containerd 2.3)",
                runtime.name, runtime.version
            );
            self.without_policy(pod, container, policy, &why);
            return None;
        }
        self.policies.waiting.lock().insert(container.id.clone(), policy);
        Some((policy, self.online().mems))
    }

    /// Reports a container that is about to start without the memory policy that the runtime was asked for.
    async fn check_memory_policy(&self, pod: &Pod, container: &Container) {
        let policy = self.policies.waiting.lock().remove(&container.id);
        let (Some(policy), Some(pid)) = (policy, container.pid) else { return };
        let host_root = self.policies.host_root.clone();
        let looked =
            tokio::task::spawn_blocking(move || memory_policy::is_set(&host_root, pid, policy)).await;
        match looked {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => {
                let why = "its first process does not have it: the OCI runtime may be too old (runc sets it from 1.4 on)";
                self.without_policy(pod, container, policy, why);
            }
            Ok(Err(error)) => tracing::warn!(
                namespace = pod.namespace,
                pod = pod.name,
                container = container.name,
                %error,
                "whether the memory policy {policy} is set cannot be seen, which needs SYS_PTRACE and the host's process ids"
            ),
            Err(error) => tracing::error!(%error, "whether a memory policy is set was not looked up"),
        }
    }

    /// Counts and reports a container without the memory policy that its pod asks for.
    fn without_policy(&self, pod: &Pod, container: &Container, policy: MemoryPolicy, why: &str) {
        self.figures.memory_policies_missing.inc();
        let what = container_of(pod, container);
        tracing::warn!("{what} starts without the memory policy {policy}: {why}");
        let message =
            format!("Container {} starts without the memory policy {policy}: {why}.", container.name);
        self.notify(pod, "NumaMemoryPolicyMissing", message, true);
    }

    /// Admits a pod as a whole, with the devices that the kubelet has assigned to it.
    async fn admit_pod(&self, pod: &Pod) -> Result<(), AdmissionError> {
        let mut ask = self.builder.pod(pod);
        if !matches!(ask.asked, PodClaim::Pod(_)) {
            return Ok(());
        }
        self.builder.add_devices(pod, &mut ask).await;
        self.reconciler.run_pod(ask).await
    }

    /// Waits a moment for the API server to report a pod.
    async fn await_pod(&self, pod: &Pod) {
        if self.builder.pods.is_synced() {
            let known = async {
                while self.builder.known(pod).is_none() {
                    tokio::time::sleep(POD_PACE).await;
                }
            };
            // Static pods may never be reported.
            let _ = tokio::time::timeout(POD_PATIENCE, known).await;
        }
    }

    /// Warns once of `placement: off` where a pod may not opt out.
    fn warn_of_off(&self, pod: &Pod) {
        let mut warned = self.warned.lock();
        if self.builder.annotations(pod).wants_off && warned.insert(pod.uid.clone()) {
            // For hosts without an API server, too.
            tracing::warn!(namespace = pod.namespace, pod = pod.name, "{OFF_IGNORED}");
            self.notify(pod, "NumaPlacementOffIgnored", OFF_IGNORED.to_owned(), true);
        }
    }

    /// What to say to a request that was not granted: only the engine's refusals fail anything.
    fn refused(&self, pod: &Pod, what: &str, refused: &AdmissionError) -> Result<(), Refusal> {
        let AdmissionError::Rejected(rejection, explanation) = refused else {
            tracing::error!(pod = pod.name, error = %refused, "cannot be placed");
            return Ok(());
        };
        let notes: Vec<_> = explanation.notes.iter().map(|note| format!("; {note}")).collect();
        let notes = notes.concat();
        if self.is_dry_run {
            let message = format!("Dry run: {what} would have been refused: {refused}{notes}");
            self.would(pod, None, WOULD_REFUSE, message);
            return Ok(());
        }
        self.figures.refused.inc();
        self.refusals.refused(pod, &rejection.reason);
        let text = format!("numaward cannot place {what}: {refused}");
        // The API server takes no more than 1024 bytes, and what each node has free may be long.
        let reason = &rejection.reason;
        let outlook = self.refusals.outlook(reason);
        let mut message = format!("{reason}. {outlook} {}. In full: {text}.", ways_out(reason));
        for note in &explanation.notes {
            message = format!("{message} Note: {note}.");
        }
        self.notify(pod, "NumaPlacementRefused", message, true);
        Err(Refusal(text))
    }

    /// What to say to a change that was not made: what is not in anybody's way goes on without us.
    fn not_resized(&self, pod: &Pod, what: &str, refused: &AdmissionError) -> Result<(), Refusal> {
        let (AdmissionError::Resize(_) | AdmissionError::Failed(_) | AdmissionError::Enforce(_)) = refused
        else {
            tracing::error!(%what, error = %refused, "cannot be resized as asked");
            return Ok(());
        };
        if self.is_dry_run {
            let message = format!("Dry run: the resize of {what} would have been refused: {refused}");
            self.would(pod, None, WOULD_REFUSE, message);
            return Ok(());
        }
        self.figures.refused.inc();
        Err(Refusal(format!("numaward cannot resize {what}: {refused}")))
    }

    /// Decides on a container that is to be created.
    async fn create(&self, pod: Pod, container: Container) -> Result<Creation, Refusal> {
        self.ports.update_containers(vec![(container.id.clone(), full_name(&pod, &container))], false);
        if self.refusals.is_not_admitted(&pod.uid) {
            // There may be room by now.
            if let Err(refused) = self.admit_pod(&pod).await {
                self.refused(&pod, &pod_of(&pod), &refused)?;
            }
            self.refusals.admitted(&pod.uid);
        }
        let ask = match self.builder.container(&pod, &container) {
            Ok(ask) => ask,
            Err(LeftAlone::OptedOut) => return Ok(Creation::default()),
            Err(LeftAlone::NoCgroup) => {
                let problem = container.malformed.first().map(ToString::to_string);
                tracing::warn!(
                    pod = pod.name,
                    container = container.name,
                    problem,
                    "has no cgroup that we know"
                );
                self.unpinned(&pod, &container, NoAnswerReason::Unreadable(String::new()).label());
                return Ok(Creation::default());
            }
        };
        let is_whole = matches!(ask.pod.asked, PodClaim::Pod(_));
        let id = container.id.clone();
        let policy = ask.pod.terms.memory_policy;
        match self.reconciler.create(ask).await {
            Ok((wanted, unpinned)) => {
                match unpinned {
                    Some(reason) => self.unpinned(&pod, &container, reason.label()),
                    None if self.is_dry_run => {}
                    None => drop(self.figures.placed.inc()),
                }
                let settings = settings(&wanted);
                let policy = policy.filter(|_| self.policies.is_on);
                let memory_policy = policy.and_then(|policy| self.memory_policy(&pod, &container, policy));
                Ok(Creation { settings, memory_policy, updates: self.pending(&id) })
            }
            // Its pod would not have come so far, and that was reported.
            Err(AdmissionError::Rejected(..)) if self.is_dry_run && is_whole => Ok(Creation::default()),
            Err(refused) => {
                self.refused(&pod, &container_of(&pod, &container), &refused).map(|()| Creation::default())
            }
        }
    }

    /// What an answer about this container changes besides.
    fn pending(&self, about: &str) -> Vec<Update> {
        if self.is_dry_run { Vec::new() } else { self.pending.take(about, &self.online()) }
    }

    /// Compares what runs with what is promised: what the runtime is to change.
    async fn compare(&self, snapshot: Snapshot) -> Vec<Update> {
        self.pending.clear();
        let online = self.online();
        let asks: Vec<_> = snapshot
            .containers
            .iter()
            .filter(|container| container.state != ContainerState::Stopped)
            .filter_map(|container| {
                let pod = snapshot.pods.get(&container.pod_id)?;
                self.builder.running(pod, container, &online).ok()
            })
            .collect();
        let named = snapshot.containers.iter().filter_map(|container| {
            Some((container.id.clone(), full_name(snapshot.pods.get(&container.pod_id)?, container)))
        });
        self.refusals.compare(&snapshot);
        let is_complete = snapshot.unreadable == 0;
        self.ports.update_containers(named.collect(), is_complete);
        snapshot.pods.values().for_each(|pod| self.warn_of_off(pod));
        let sandboxes = snapshot.pods.iter().map(|(id, pod)| (id.clone(), pod.uid.clone())).collect();
        let count = asks.len();
        match self.reconciler.synchronize(asks, sandboxes, is_complete).await {
            Ok(synchronized) => {
                tracing::info!(
                    containers = count,
                    updates = synchronized.updates.len(),
                    unpinned = synchronized.unpinned.len(),
                    "compared with what the container runtime runs"
                );
                for container in &snapshot.containers {
                    let found = synchronized.unpinned.iter().find(|(id, _)| *id == container.id);
                    if let (Some((_, reason)), Some(pod)) = (found, snapshot.pods.get(&container.pod_id)) {
                        self.unpinned(pod, container, reason.label());
                    }
                }
                synchronized.updates.into_iter().map(|found| update(found.id, &found.settings)).collect()
            }
            Err(error) => {
                tracing::error!(%error, "what runs cannot be compared with what is promised");
                Vec::new()
            }
        }
    }
}

impl Handler for NriHandler {
    fn online(&self) -> Online {
        Online::from(&*self.ports.machine())
    }

    async fn synchronize(&self, snapshot: Snapshot) -> Vec<Update> {
        let handler = self.clone();
        // Goes on when the runtime waits no longer: what is adopted is counted and reported in any case.
        let compared = tokio::spawn(async move { handler.compare(snapshot).await }.boxed());
        compared.await.unwrap_or_else(|error| {
            tracing::error!(%error, "what runs was not compared with what is promised");
            Vec::new()
        })
    }

    async fn run_pod(&self, pod: Pod) -> Result<(), Refusal> {
        self.await_pod(&pod).await;
        self.warn_of_off(&pod);
        match self.admit_pod(&pod).await {
            Ok(()) => Ok(()),
            Err(AdmissionError::Rejected(..)) if !self.is_dry_run => {
                self.refusals.not_admitted(pod.uid);
                Ok(())
            }
            Err(refused) => self.refused(&pod, &pod_of(&pod), &refused),
        }
    }

    async fn update_pod(&self, pod: Pod, resources: Resources) -> Result<(), Refusal> {
        let Some(to) = self.builder.pod_resized(&pod, &resources) else { return Ok(()) };
        let what = pod_of(&pod);
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
            // Whatever is decided, the container stays where the runtime has it.
            Ok(_) if self.is_dry_run => Ok(Vec::new()),
            // Everything else is done as requested, but this decides where the container runs.
            Ok(Some(held)) => Ok(vec![Update { ignore_failure: false, ..update(container.id, &held) }]),
            Ok(None) => Ok(Vec::new()),
            Err(refused) => {
                self.not_resized(&pod, &container_of(&pod, &container), &refused).map(|()| Vec::new())
            }
        }
    }

    async fn stop_container(&self, _pod: Pod, container: Container) -> Vec<Update> {
        let id = container.id.clone();
        note_stopping(self.reconciler.stopped(container.id).await);
        self.pending(&id)
    }

    async fn event(&self, event: Event) {
        match event {
            Event::Container(ContainerEvent::Starting, pod, container) => {
                // It may have been created without an answer of ours.
                self.refusals.created(pod.uid.clone());
                // One that somebody else has pinned may have been yielded to.
                let is_ours = !container.resources.is_pinned();
                let ask = is_ours.then(|| self.builder.container(&pod, &container).ok()).flatten();
                let bound = self.reconciler.bind(container.id.clone(), ask.map(Box::new)).await;
                if let Ok(Some(reason)) = bound {
                    self.unpinned(&pod, &container, reason.label());
                }
                if self.is_dry_run {
                    self.would_place(&pod, &container);
                }
                self.check_memory_policy(&pod, &container).await;
            }
            Event::Container(ContainerEvent::Removed, _, container) => {
                self.ports.remove_container(&container.id);
                self.pending.forget(&container.id);
                self.policies.waiting.lock().remove(&container.id);
                note_stopping(self.reconciler.stopped(container.id).await);
            }
            Event::Pod(event @ (PodEvent::Stopped | PodEvent::Removed), pod) => {
                if event == PodEvent::Removed {
                    self.warned.lock().remove(&pod.uid);
                }
                self.refusals.gone(&pod.uid);
                note_stopping(self.reconciler.pod_stopped(pod.uid, pod.id).await);
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
            self.policies.waiting.lock().remove(&container.id);
        }
        if let Some(pod) = &pod {
            self.refusals.created(pod.uid.clone());
        }
        match (pod, container) {
            // That somebody else places it may be intended.
            (Some(pod), Some(container)) if reason != NoAnswerReason::PinnedByOther => {
                self.unpinned(&pod, &container, reason.label());
            }
            _ if self.is_dry_run => {}
            _ => self.figures.unpinned(reason.label()),
        }
    }
}

/// A daemon that ends compares with what runs when it is back.
fn note_stopping(done: Result<(), AdmissionError>) {
    if let Err(error) = done {
        tracing::debug!(%error, "not taken note of");
    }
}

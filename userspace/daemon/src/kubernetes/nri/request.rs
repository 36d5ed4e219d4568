//! Builder of requests to the reconciler from the descriptions of a pod.
//!
//! There are two descriptions. The API server has the requests of all containers at once, including init and sidecar containers. The
//! runtime has one container at a time: its limits, the CPU shares that the kubelet computes from the request, and the `QoS` class by the
//! path of the cgroup. The description of the API server is used if it exists; the explanation of a decision without it has a note.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue, Quota},
};
use numaward_config::{
    Config,
    kubernetes::{HandlerPin, Kubernetes, PinnedPolicy},
    policy::{KubeletVersion, StrategyKind},
};
use numaward_engine::{
    ContainerName, ContainerRequest, QosClass, Quantity, Request, Resources, policy::PodLevelSupport,
};
use numaward_guarantee::pod::{
    ClaimUses, ContainerPlacementRequest, MemoryClaim, PodClaim, PodPlacementRequest,
};
use numaward_kube::{
    api::ClaimReader,
    cgroup_path::pod_levels,
    nri::types::{self as nri, Limit},
    pod::{self, PodId, PodSource},
};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, POD_SHARE},
};
use numaward_topology::{Bytes, KernelRelease, NodeSet};
use tokio::sync::watch;

use super::{
    annotations::{Annotations, ExtraGuarantee, PlacementAnnotation},
    claims,
    devices::{self, AssignedDevices, DeviceTimeouts},
    pod_level_resources, sandbox,
};
use crate::kubernetes::dra;

/// The CPU shares that the kubelet sets for one CPU.
const SHARES_PER_CPU: u64 = 1024;

/// The maximum number of CDI names of a container that are looked up.
const MAX_CDI_NAMES: usize = 64;

/// The maximum number of labels of a pod in the ledger.
const MAX_LABELS: usize = 64;
/// The maximum total size of their keys and values.
const MAX_LABEL_BYTES: usize = 4 << 10;

/// Reason why a container is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotPlacedReason {
    /// The annotation `placement: off`.
    OptedOut,
    /// The path of the cgroup is unknown.
    NoCgroup,
}

/// Builder of requests to the reconciler.
#[derive(Clone)]
pub(super) struct RequestBuilder {
    /// Pods that the API server has reported.
    pub(super) pods: Arc<dyn PodSource>,
    host_root: PathBuf,
    /// `None` if the release cannot be parsed.
    kernel: Option<KernelRelease>,
    kubelet: Arc<devices::DeviceClient>,
    /// Reader of resource claims; not connected without an API server.
    pub(super) claims: ClaimReader,
    pub(super) timeouts: DeviceTimeouts,
    strategy: StrategyKind,
    version: KubeletVersion,
    pod_level_support: PodLevelSupport,
    /// The present settings.
    pub(super) config: watch::Receiver<Kubernetes>,
}

impl RequestBuilder {
    pub(super) fn new(pods: Arc<dyn PodSource>, config: &Config) -> Self {
        let kubelet = Arc::new(devices::DeviceClient::new(config));
        let kernel = rustix::system::uname();
        Self {
            pods,
            host_root: config.host_root.clone(),
            kernel: KernelRelease::parse(&kernel.release().to_string_lossy()),
            kubelet,
            claims: ClaimReader::default(),
            timeouts: DeviceTimeouts::default(),
            strategy: config.strategy,
            version: config.kubelet_version.unwrap_or_default(),
            pod_level_support: config.gates().pod_level_support(),
            config: watch::Sender::new(config.kubernetes.clone()).subscribe(),
        }
    }

    /// Returns the API server's description of a pod.
    pub(super) fn known(&self, pod: &nri::Pod) -> Option<Arc<pod::Pod>> {
        self.pods.pod(&id_of(pod))
    }

    /// Reads the annotations of a pod, and ignores those that the strategy, the kernel or the namespace does not allow.
    pub(super) fn annotations(&self, pod: &nri::Pod) -> Annotations {
        let read = Annotations::read(&pod.annotations);
        let config = self.config.borrow();
        let read =
            if config.placement_off_namespaces.contains(&pod.namespace) { read } else { read.without_off() };
        let placed = config.placement_namespaces.as_ref();
        let is_placed = placed.is_none_or(|placed| placed.contains(&pod.namespace));
        let read = if is_placed { read } else { read.without_placement() };
        let may_have_more = config.beyond_quota_namespaces.contains(&pod.namespace);
        let read = if may_have_more { read } else { read.without_beyond_quota() };
        let read = read.for_kernel(self.kernel);
        if self.strategy == StrategyKind::Native { read } else { read.without_burstable() }
    }

    /// Returns the cgroup to pin for a pod, by the handler of its `RuntimeClass`.
    pub(super) fn pin(&self, pod: &nri::Pod) -> HandlerPin {
        self.config.borrow().handler_pin(&pod.runtime_handler)
    }

    /// Returns true if the pod would have a guarantee if its containers were pinned.
    pub(super) fn has_claim(&self, pod: &nri::Pod) -> bool {
        let annotations = self.annotations(pod);
        let claim =
            |known: Arc<pod::Pod>| self.claim(HandlerPin::Container, &known, &annotations, &mut Vec::new());
        self.known(pod).map_or_else(
            || {
                pod.cgroup
                    .as_ref()
                    .and_then(|path| pod_levels(path))
                    .is_some_and(|at| at.qos == QosClass::Guaranteed)
            },
            |known| claim(known) != PodClaim::Nothing,
        )
    }

    /// Builds the request for the cgroup of a pod with all its processes in the sandbox.
    pub(super) fn sandbox(&self, pod: &nri::Pod) -> Result<ContainerPlacementRequest, NotPlacedReason> {
        if self.annotations(pod).for_container(POD_SHARE).placement == PlacementAnnotation::Off {
            return Err(NotPlacedReason::OptedOut);
        }
        let cgroup: Option<CgroupPath> = pod.cgroup.as_ref().and_then(|path| path.parse().ok());
        let cgroup = cgroup.filter(|path| !path.is_root()).ok_or(NotPlacedReason::NoCgroup)?;
        let request = self.pod(pod);
        let memory = match &request.asked {
            PodClaim::Pod(claim) => sandbox::memory(claim),
            PodClaim::Container(_) | PodClaim::Nothing => MemoryClaim::default(),
        };
        Ok(ContainerPlacementRequest {
            pod: request,
            id: sandbox::id(&pod.id),
            name: POD_SHARE.to_owned(),
            cgroup,
            slice: GuaranteeSource::Pod,
            memory,
            keeps_pod_quota: true,
            has: Settings::default(),
            claims: ClaimUses::default(),
            is_placed_by_other_program: false,
        })
    }

    /// Builds the request for a pod: for nothing if the API server has not reported the pod.
    pub(super) fn pod(&self, pod: &nri::Pod) -> PodPlacementRequest {
        let annotations = self.annotations(pod);
        let mut notes = Vec::new();
        let pin = self.pin(pod);
        let claim = self.known(pod).map(|known| self.claim(pin, &known, &annotations, &mut notes));
        let mut request = self.request(pod, claim.unwrap_or(PodClaim::Nothing), &annotations);
        request.notes.append(&mut notes);
        request
    }

    /// Returns the claim of a pod that the API server has reported. With the strategy `kubelet`, the version decides on pod-level
    /// resources: the managers of 1.32 ignore them, and those of 1.36 do not place such a pod, unless a feature gate enables it.
    fn claim(
        &self,
        pin: HandlerPin,
        known: &pod::Pod,
        annotations: &Annotations,
        notes: &mut Vec<String>,
    ) -> PodClaim {
        match pin {
            HandlerPin::Container => {}
            HandlerPin::Sandbox => return sandbox::claim(known, annotations),
            HandlerPin::None => return PodClaim::Nothing,
        }
        if self.strategy == StrategyKind::Native || known.resources.is_none() {
            return pod_level_resources::claim(known, annotations);
        }
        match self.pod_level_support {
            PodLevelSupport::Ignored => {
                return pod_level_resources::claim(
                    &pod::Pod { resources: None, ..known.clone() },
                    annotations,
                );
            }
            PodLevelSupport::Placed => return pod_level_resources::pod_level_claim(known, annotations),
            PodLevelSupport::Unmanaged => {}
        }
        notes.push(format!(
            "not placed: the pod has pod-level resources, with which the managers of the kubelet {} place no container \
             (the strategy native and the feature gate PodLevelResourceManagers do)",
            self.version
        ));
        PodClaim::Nothing
    }

    /// Builds a request with the terms of the annotations and labels of the pod.
    fn request(&self, pod: &nri::Pod, claim: PodClaim, annotations: &Annotations) -> PodPlacementRequest {
        let mut terms = annotations.terms.clone();
        let mut notes = annotations.ignored.clone();
        if pod.ignored > 0 {
            notes.push(format!(
                "{} of its labels and annotations are ignored (the first ones by key are read: 32 KiB of labels, and 32 KiB of the \
                 annotations of numaward.io)",
                pod.ignored
            ));
        }
        if let PodClaim::Pod(request) | PodClaim::Container(request) = &claim {
            for container in request.all_containers() {
                let wishes = annotations.for_container(container.name.as_str());
                if let Some(nodes) = wishes.preferred_nodes {
                    terms.preferences.preferred.insert(container.name.clone(), nodes);
                }
                terms.burstable |=
                    wishes.extra == ExtraGuarantee::Burstable && request.qos() != QosClass::Guaranteed;
            }
            let bound = |name: &ContainerName| {
                annotations.for_container(name.as_str()).extra == ExtraGuarantee::Memory
            };
            let names = request.all_containers().map(|container| &container.name);
            for name in names.filter(|name| terms.burstable && bound(name)) {
                notes.push(format!(
                    "numaward.io/guarantee: memory is ignored for {name} (another container has burstable, which applies to \
                     the whole pod)"
                ));
            }
        }
        if terms.burstable && terms.memory_policy.take().is_some() {
            notes.push(
                "numaward.io/memory-policy is ignored (the policy would not follow the home node of a Burstable \
                 workload)"
                    .to_owned(),
            );
        }
        // Other pods can refer to the pod by its name and labels, with the strategy `native` only.
        if self.strategy == StrategyKind::Native && claim != PodClaim::Nothing {
            terms.name = Some(format!("{}/{}", pod.namespace, pod.name));
            terms.labels = labels(pod, &mut notes);
        }
        PodPlacementRequest { pod: id_of(pod), sandbox: pod.id.clone(), asked: claim, terms, notes }
    }

    /// Adds the nodes of the devices that the pod has by device plugins and resource claims. With `container`, only those of this
    /// container are added.
    pub(super) async fn add_devices(
        &self,
        pod: &nri::Pod,
        container: Option<&nri::Container>,
        request: &mut PodPlacementRequest,
    ) {
        let timeouts = &self.timeouts;
        let AssignedDevices { mut nodes, mut claimed } =
            self.kubelet.assigned(&pod.namespace, &pod.name, timeouts.kubelet).await;
        if claimed.is_empty()
            && let Some(known) = self.known(pod)
        {
            claimed = claims::devices(&self.claims, &known, timeouts.api_server).await;
        }
        if let Some(container) = container {
            let is_wanted = |name: &ContainerName| name.as_str() == container.name;
            nodes.retain(|name, _| is_wanted(name));
            claimed.retain(|name, _| is_wanted(name));
        }
        if !claimed.is_empty() {
            let (of_claims, mut notes) =
                claims::nodes(&self.claims, &self.host_root, &claimed, timeouts).await;
            request.notes.append(&mut notes);
            for (container, more) in of_claims {
                nodes.entry(container).or_default().extend(more.iter());
            }
        }
        if let Some(container) = container {
            let names = container.cdi_devices.iter().take(MAX_CDI_NAMES).cloned().collect();
            let found = claims::cdi_nodes(&self.host_root, names, timeouts.files).await;
            let of_container = nodes.entry(container.name.as_str().into()).or_default();
            of_container.extend(found.into_values().flatten());
        }
        for (container, nodes) in nodes {
            let has_own = match &request.asked {
                PodClaim::Pod(claim) | PodClaim::Container(claim) => claim.has_container(&container),
                PodClaim::Nothing => false,
            };
            add_device_nodes(request, if has_own { container } else { POD_SHARE.into() }, &nodes);
        }
    }

    /// Builds the request for a container that is being created.
    pub(super) fn container(
        &self,
        pod: &nri::Pod,
        container: &nri::Container,
    ) -> Result<ContainerPlacementRequest, NotPlacedReason> {
        let annotations = self.annotations(pod);
        if annotations.for_container(&container.name).placement == PlacementAnnotation::Off {
            return Err(NotPlacedReason::OptedOut);
        }
        let cgroup: Option<CgroupPath> = container.cgroup.as_ref().and_then(|path| path.parse().ok());
        let cgroup = cgroup.filter(|path| !path.is_root()).ok_or(NotPlacedReason::NoCgroup)?;
        let mut notes = Vec::new();
        // The description is read once, because the API server may report the pod meanwhile.
        let known = self.known(pod);
        let (claim, source) = match &known {
            Some(known) => {
                let claim = self.claim(HandlerPin::Container, known, &annotations, &mut notes);
                let source =
                    pod_level_resources::guarantee_source(known, &claim, &annotations, &container.name);
                (claim, source)
            }
            None => (container_claim(pod, container, &annotations, &mut notes), GuaranteeSource::Own),
        };
        let claims = claim_uses(known.as_deref(), container);
        let memory = memory(known.as_deref(), pod, container, &container.resources);
        let keeps_pod_quota = known.is_some_and(|known| pod_level_resources::keeps_quota(&known, &claim));
        let mut pod = self.request(pod, claim, &annotations);
        pod.notes.append(&mut notes);
        let devices = devices::nodes(&self.host_root, &container.devices);
        let holder = match source {
            GuaranteeSource::Own | GuaranteeSource::Part => container.name.as_str(),
            GuaranteeSource::Pod | GuaranteeSource::PodInit | GuaranteeSource::Claim => POD_SHARE,
        };
        add_device_nodes(&mut pod, holder.into(), &devices);
        Ok(ContainerPlacementRequest {
            pod,
            id: container.id.clone(),
            name: container.name.clone(),
            cgroup,
            slice: source,
            memory,
            keeps_pod_quota,
            has: settings_in(&container.resources),
            claims,
            is_placed_by_other_program: false,
        })
    }

    /// Builds the request for a running container.
    pub(super) fn running(
        &self,
        pod: &nri::Pod,
        container: &nri::Container,
        online: &nri::Online,
    ) -> Result<ContainerPlacementRequest, NotPlacedReason> {
        let is_placed_by_other_program = self.config.borrow().nri.when_pinned == PinnedPolicy::Yield
            && container.resources.is_confined(online);
        Ok(ContainerPlacementRequest { is_placed_by_other_program, ..self.container(pod, container)? })
    }

    /// Returns the amounts after a change of a container's resources and, if the memory limit changes, the amounts that decide its memory
    /// protection.
    pub(super) fn resized(
        &self,
        pod: &nri::Pod,
        container: &nri::Container,
        requested: &nri::Resources,
    ) -> (Resources, Option<MemoryClaim>) {
        let now = &container.resources;
        let merged = nri::Resources {
            cpu_shares: requested.cpu_shares.or(now.cpu_shares),
            cpu_quota: requested.cpu_quota.or(now.cpu_quota),
            cpu_period: requested.cpu_period.or(now.cpu_period),
            ..nri::Resources::default()
        };
        let has_cpu = requested.cpu_shares.is_some() || requested.cpu_quota.is_some();
        let mut to = Resources { cpu: cpus(&merged).filter(|_| has_cpu), ..Resources::none() };
        let Some(Limit::At(limit)) = requested.memory_limit else { return (to, None) };
        to = to.with_memory(Quantity::whole(limit.0));
        let mut memory = memory(self.known(pod).as_deref(), pod, container, requested);
        // The API server may report the new limit later than the runtime.
        memory.limit = Some(limit);
        if memory.class == Some(QosClass::Guaranteed) && memory.request > Some(Bytes(0)) {
            memory.request = Some(limit);
        }
        (to, Some(memory))
    }

    /// Returns the amounts that the containers of a pod share after a change of its pod-level resources; `None` if they share nothing.
    pub(super) fn pod_resized(&self, pod: &nri::Pod, requested: &nri::Resources) -> Option<Resources> {
        let is_shared = self.strategy == StrategyKind::Native && self.pin(pod) == HandlerPin::Container;
        let known = self.known(pod).filter(|_| is_shared)?;
        let mut amounts = known.resources.as_ref()?.requests.clone();
        let has_cpu = requested.cpu_shares.is_some() || requested.cpu_quota.is_some();
        amounts.cpu = cpus(requested).filter(|_| has_cpu).or(amounts.cpu);
        if let Some(Limit::At(limit)) = requested.memory_limit {
            amounts = amounts.with_memory(Quantity::whole(limit.0));
        }
        pod_level_resources::share_of(&known, &self.annotations(pod), amounts)
    }
}

/// Returns the amounts that decide the memory protection of a container with the resources `has`.
fn memory(
    known: Option<&pod::Pod>,
    pod: &nri::Pod,
    container: &nri::Container,
    has: &nri::Resources,
) -> MemoryClaim {
    if let Some(known) = known {
        return pod_level_resources::memory(known, &container.name);
    }
    let bytes = |resources: &nri::Resources| match resources.memory_limit {
        Some(Limit::At(limit)) if limit.0 > 0 => Some(limit),
        _ => None,
    };
    let limit = bytes(has);
    let class = class_of(pod, container);
    // For other classes, the runtime does not receive the memory request.
    let request = limit.filter(|_| class == Some(QosClass::Guaranteed));
    MemoryClaim { class, request, limit, overhead: pod.overhead.as_ref().and_then(bytes) }
}

/// Returns the labels by which other pods can refer to the pod: the first ones by key, up to the limits.
fn labels(pod: &nri::Pod, notes: &mut Vec<String>) -> BTreeMap<String, String> {
    let own = || pod.labels.iter().filter(|(key, _)| !key.starts_with("io.kubernetes."));
    let mut bytes = 0;
    let has_room = |(key, value): &(&String, &String)| {
        let size = key.len() + value.len();
        let fits = bytes + size <= MAX_LABEL_BYTES;
        bytes += if fits { size } else { 0 };
        fits
    };
    let kept: BTreeMap<_, _> =
        own().filter(has_room).take(MAX_LABELS).map(|(key, value)| (key.clone(), value.clone())).collect();
    let all = own().count();
    if kept.len() < all {
        notes.push(format!(
            "{} of its {all} labels cannot be used in numaward.io/with and numaward.io/apart of other pods (only the first {MAX_LABELS} \
             labels by key are stored, with at most {MAX_LABEL_BYTES} bytes)",
            all - kept.len()
        ));
    }
    kept
}

pub(super) fn id_of(pod: &nri::Pod) -> PodId {
    PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
}

/// Returns the settings in these resources that numaward may set too.
pub(super) fn settings_in(resources: &nri::Resources) -> Settings {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let limit = |knob: Knob| match knob.parse(resources.unified.get(&knob.to_string())?) {
        Ok(KnobValue::Limit(limit)) => Some(limit),
        _ => None,
    };
    Settings {
        cpus: resources.cpus.clone(),
        mems: resources.mems.clone(),
        memory_min: limit(Knob::MemoryMin),
        memory_low: limit(Knob::MemoryLow),
        memory_high: limit(Knob::MemoryHigh),
        cpu_max: match (resources.cpu_quota, resources.cpu_period) {
            (Some(Limit::At(quota)), Some(period)) => {
                Some(Quota::Limited { quota: micros(quota), period: micros(period) })
            }
            (Some(Limit::Unlimited), _) => Some(Quota::Max),
            _ => None,
        },
        ..Settings::default()
    }
}

/// Returns the `QoS` class of a pod from the path of its cgroup.
fn class_of(pod: &nri::Pod, container: &nri::Container) -> Option<QosClass> {
    let path = container.cgroup.as_ref().or(pod.cgroup.as_ref());
    path.and_then(|path| pod_levels(path)).map(|levels| levels.qos)
}

/// Adds nodes of devices to the preferences of the container that has them.
fn add_device_nodes(request: &mut PodPlacementRequest, container: ContainerName, nodes: &NodeSet) {
    if !nodes.is_empty() {
        let known = request.terms.preferences.devices.entry(container).or_default();
        *known = &*known | nodes;
    }
}

/// Returns the claim of a container that only the runtime has reported.
fn container_claim(
    pod: &nri::Pod,
    container: &nri::Container,
    annotations: &Annotations,
    notes: &mut Vec<String>,
) -> PodClaim {
    let class = class_of(pod, container);
    let wishes = annotations.for_container(&container.name);
    if wishes.placement != PlacementAnnotation::Auto {
        return PodClaim::Nothing;
    }
    if class != Some(QosClass::Guaranteed) {
        if wishes.extra != ExtraGuarantee::None {
            let note =
                "memory is not guaranteed: the API server, which has the requests, has not reported this pod";
            notes.push(note.to_owned());
        }
        return PodClaim::Nothing;
    }
    notes.push(
        "decided from the description of the container runtime, one container at a time: the API server has not reported \
         this pod, so that its init containers are unknown and the scope pod has no effect"
            .to_owned(),
    );
    let (Some(cpu), Some(Limit::At(memory))) = (cpus(&container.resources), container.resources.memory_limit)
    else {
        return PodClaim::Nothing;
    };
    let mut resources = Resources::none().with_cpu(cpu).with_memory(Quantity::whole(memory.0));
    for (&size, &bytes) in container.resources.hugepage_limits.iter().filter(|(_, bytes)| bytes.0 > 0) {
        resources = resources.with_hugepages(size, Quantity::whole(bytes.0));
    }
    PodClaim::Container(Request {
        owner: format!("{}/{}", pod.uid, container.name).into(),
        init_containers: Vec::new(),
        containers: vec![ContainerRequest::guaranteed(container.name.as_str(), resources)],
        resources: None,
    })
}

/// Returns the CPUs of a Guaranteed container: from its quota or, without one, from its shares.
fn cpus(resources: &nri::Resources) -> Option<Quantity> {
    if let (Some(Limit::At(quota)), Some(period)) = (resources.cpu_quota, resources.cpu_period) {
        let millis = (quota.as_nanos() * 1000).checked_div(period.as_nanos())?;
        return u64::try_from(millis).ok().map(Quantity::milli);
    }
    // The kubelet rounds down: only the shares of whole CPUs are multiples of [`SHARES_PER_CPU`].
    let shares = resources.cpu_shares?;
    let millis = match shares % SHARES_PER_CPU {
        0 => shares / SHARES_PER_CPU * 1000,
        _ => shares.saturating_mul(1000).div_ceil(SHARES_PER_CPU),
    };
    Some(Quantity::milli(millis))
}

/// Returns the resource claims that a container uses.
fn claim_uses(known: Option<&pod::Pod>, container: &nri::Container) -> ClaimUses {
    let of_pod = known.into_iter().flat_map(|known| &known.claims);
    let names = of_pod.filter(|used| used.container == container.name).map(|used| used.claim.clone());
    let uids = container.cdi_devices.iter().take(MAX_CDI_NAMES).filter_map(|name| dra::claim_uid(name));
    ClaimUses { names: names.collect(), uids: uids.map(str::to_owned).collect() }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::atomic::{AtomicBool, Ordering},
    };

    use numaward_engine::{PodResources, Terms};
    use numaward_kube::pod::{NoPods, Notice};
    use numaward_topology::HugepageSize;

    use super::*;

    fn resources(cpu: &str, memory: &str) -> Resources {
        Resources::none().with_cpu(cpu.parse().unwrap()).with_memory(memory.parse().unwrap())
    }

    fn burstable(name: &str, cpu: &str, memory: &str) -> ContainerRequest {
        ContainerRequest {
            name: name.into(),
            restartable: false,
            requests: resources(cpu, memory),
            limits: Resources::none(),
        }
    }

    /// Source of one pod.
    struct OnePod(pod::Pod);

    impl PodSource for OnePod {
        fn pod(&self, id: &PodId) -> Option<Arc<pod::Pod>> {
            (*id == self.0.id).then(|| Arc::new(self.0.clone()))
        }
        fn is_synced(&self) -> bool {
            true
        }
        fn notify(&self, _: Notice) {}
    }

    /// Source that reports a pod from the second call on.
    struct LatePod(OnePod, AtomicBool);

    impl PodSource for LatePod {
        fn pod(&self, id: &PodId) -> Option<Arc<pod::Pod>> {
            if self.1.swap(true, Ordering::Relaxed) { self.0.pod(id) } else { None }
        }
        fn is_synced(&self) -> bool {
            true
        }
        fn notify(&self, _: Notice) {}
    }

    #[test]
    fn reads_description_of_pod_once() {
        let web = container("web", "/burstable", nri::Resources::default());
        let request_with =
            |builder: &RequestBuilder| format!("{:?}", builder.container(&pod(&[]), &web).unwrap());
        let one = || {
            let id = PodId { namespace: "ns".to_owned(), name: "web".to_owned(), uid: "u1".to_owned() };
            let containers = vec![burstable("web", "1", "1Gi")];
            OnePod(pod::Pod { id, containers, ..pod::Pod::default() })
        };
        let [unknown, known] =
            [request_with(&builder(Arc::new(NoPods))), request_with(&builder(Arc::new(one())))];
        assert_ne!(unknown, known);
        let late = builder(Arc::new(LatePod(one(), AtomicBool::new(false))));
        assert_eq!([request_with(&late), request_with(&late)], [unknown, known]);
    }

    fn builder(pods: Arc<dyn PodSource>) -> RequestBuilder {
        RequestBuilder::new(pods, &Config { host_root: "/nowhere".into(), ..Config::default() })
    }

    fn known(containers: Vec<ContainerRequest>) -> RequestBuilder {
        let id = PodId { namespace: "ns".to_owned(), name: "web".to_owned(), uid: "u1".to_owned() };
        builder(Arc::new(OnePod(pod::Pod { id, containers, ..pod::Pod::default() })))
    }

    fn pod(annotations: &[(&str, &str)]) -> nri::Pod {
        nri::Pod {
            id: "sandbox".to_owned(),
            name: "web".to_owned(),
            namespace: "ns".to_owned(),
            uid: "u1".to_owned(),
            annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            ..nri::Pod::default()
        }
    }

    fn container(name: &str, class: &str, resources: nri::Resources) -> nri::Container {
        nri::Container {
            id: format!("{name}-id"),
            pod_id: "sandbox".to_owned(),
            name: name.to_owned(),
            cgroup: Some(format!("/kubepods{class}/podu1/{name}-id")),
            resources,
            ..nri::Container::default()
        }
    }

    fn limits(millis: u64, memory: Bytes) -> nri::Resources {
        nri::Resources {
            cpu_shares: Some(millis * 1024 / 1000),
            cpu_quota: Some(Limit::At(Duration::from_micros(millis * 100))),
            cpu_period: Some(Duration::from_millis(100)),
            memory_limit: Some(Limit::At(memory)),
            ..nri::Resources::default()
        }
    }

    #[test]
    fn requests_guaranteed_pod_as_a_whole() {
        let builder = known(vec![
            ContainerRequest::guaranteed("db", resources("2", "1Gi")),
            ContainerRequest::guaranteed("log", resources("1", "64Mi")),
        ]);
        let names = |asked: &PodClaim| match asked {
            PodClaim::Pod(request) => {
                assert_eq!((request.owner.as_str(), request.qos()), ("u1", QosClass::Guaranteed));
                request.containers.iter().map(|c| c.name.to_string()).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(names(&builder.pod(&pod(&[])).asked), ["db", "log"]);
        let opted = pod(&[("log.numaward.io/placement", "shared")]);
        assert_eq!(names(&builder.pod(&opted).asked), ["db"]);
        let all = pod(&[("numaward.io/placement", "shared"), ("numaward.io/guarantee", "cpu")]);
        let built = builder.pod(&all);
        assert_eq!(built.asked, PodClaim::Nothing);
        assert!(
            matches!(&built.notes[..], [note] if note.contains("expected auto, memory or burstable")),
            "{:?}",
            built.notes
        );
        let off = pod(&[("db.numaward.io/placement", "off")]);
        let off = nri::Pod { namespace: "kube-system".to_owned(), ..off };
        let db = container("db", "", limits(2000, Bytes::gib(1)));
        assert_eq!(builder.container(&off, &db).unwrap_err(), NotPlacedReason::OptedOut);
    }

    #[test]
    fn guarantees_memory_of_burstable() {
        let builder = known(vec![burstable("db", "2", "1Gi"), burstable("log", "1", "64Mi")]);
        assert_eq!(builder.pod(&pod(&[])).asked, PodClaim::Nothing);
        let PodClaim::Pod(request) = builder.pod(&pod(&[("db.numaward.io/guarantee", "memory")])).asked
        else {
            panic!("the pod requests nothing");
        };
        assert_eq!((request.containers.len(), request.qos()), (1, QosClass::Guaranteed));
        let cpu = request.containers[0].requests.cpu.unwrap();
        assert_eq!((cpu.whole_cpus(), request.containers[0].name.as_str()), (None, "db"));
    }

    #[test]
    fn burstable_guarantee_needs_native() {
        let db = ContainerRequest::guaranteed("db", resources("2", "1Gi"));
        let mut builder = known(vec![db, burstable("log", "1", "64Mi")]);
        let wished = [("db.numaward.io/guarantee", "burstable"), ("log.numaward.io/guarantee", "memory")];
        builder.strategy = StrategyKind::Kubelet;
        let built = builder.pod(&pod(&wished));
        assert!(
            matches!(&built.asked, PodClaim::Pod(request) if request.containers.len() == 1)
                && !built.terms.burstable
        );
        assert!(matches!(&built.notes[..], [note] if note.contains("strategy native")), "{:?}", built.notes);
        builder.strategy = StrategyKind::Native;
        let built = builder.pod(&pod(&wished));
        assert!(matches!(&built.notes[..], [note] if note.contains("ignored for log")), "{:?}", built.notes);
        let built = builder.pod(&pod(&wished[..1]));
        let PodClaim::Pod(request) = &built.asked else { panic!("the pod requests nothing") };
        assert_eq!((request.containers.len(), request.qos()), (1, QosClass::Burstable));
        assert!(built.terms.burstable);
        let all = builder.pod(&pod(&[("numaward.io/guarantee", "burstable")]));
        let PodClaim::Pod(request) = &all.asked else { panic!("the pod requests nothing") };
        assert_eq!((request.containers.len(), all.terms.burstable), (2, true));
        let mut guaranteed = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        guaranteed.strategy = StrategyKind::Native;
        assert!(!guaranteed.pod(&pod(&[("numaward.io/guarantee", "burstable")])).terms.burstable);
    }

    /// The pod is Guaranteed by its pod-level resources. The strategy `native` divides them among its containers.
    #[test]
    fn kubelet_version_decides_on_pod_level() {
        let all = resources("4", "8Gi");
        let pod_level = PodResources { requests: all.clone(), limits: all };
        let containers = vec![ContainerRequest::guaranteed("db", resources("2", "4Gi"))];
        let mut builder = known(Vec::new());
        let id = PodId { namespace: "ns".to_owned(), name: "web".to_owned(), uid: "u1".to_owned() };
        let known = pod::Pod { id, containers, resources: Some(pod_level), ..pod::Pod::default() };
        builder.pods = Arc::new(OnePod(known.clone()));
        let db = container("db", "", limits(2000, Bytes::gib(4)));
        let held = |asked: &PodClaim| match asked {
            PodClaim::Pod(request) => {
                request.containers.iter().map(|container| container.name.to_string()).collect()
            }
            _ => Vec::new(),
        };
        let more = limits(6000, Bytes::gib(12));
        builder.strategy = StrategyKind::Kubelet;
        for (version, support, expected) in [
            (KubeletVersion::V1_32, PodLevelSupport::Ignored, ["db"].as_slice()),
            (KubeletVersion::V1_36, PodLevelSupport::Unmanaged, &[]),
        ] {
            (builder.version, builder.pod_level_support) = (version, support);
            let built = builder.pod(&pod(&[]));
            assert_eq!(held(&built.asked), expected, "{version}");
            let of_container = builder.container(&pod(&[]), &db).unwrap();
            assert_eq!(
                (of_container.pod.asked, of_container.slice),
                (built.asked, GuaranteeSource::Own),
                "{version}"
            );
            assert_eq!(of_container.pod.notes, built.notes);
            assert_eq!(built.notes.iter().any(|note| note.contains("kubelet 1.36")), expected.is_empty());
            assert_eq!(builder.pod_resized(&pod(&[]), &more), None);
        }
        builder.pod_level_support = PodLevelSupport::Placed;
        let mut with_log = known;
        with_log.containers.push(burstable("log", "100m", "64Mi"));
        builder.pods = Arc::new(OnePod(with_log));
        let built = builder.pod(&pod(&[]));
        assert!(
            matches!(&built.asked, PodClaim::Pod(request) if request.resources.is_some()),
            "{:?}",
            built.asked
        );
        assert_eq!((held(&built.asked), built.notes.len()), (vec!["db".to_owned(), "log".to_owned()], 0));
        let slice = |name: &str| {
            builder.container(&pod(&[]), &container(name, "", limits(2000, Bytes::gib(4)))).unwrap().slice
        };
        assert_eq!([slice("db"), slice("log")], [GuaranteeSource::Own, GuaranteeSource::Part]);
        assert_eq!(builder.pod_resized(&pod(&[]), &more), None);
        builder.strategy = StrategyKind::Native;
        assert_eq!(held(&builder.pod(&pod(&[])).asked), ["db", POD_SHARE]);
        assert_eq!(builder.pod(&pod(&[])).notes, [""; 0]);
    }

    #[test]
    fn native_stores_name_and_labels() {
        let mut builder = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        let labels = [("app", "db"), ("io.kubernetes.pod.uid", "u1")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let pod = nri::Pod { labels: labels.into(), ..pod(&[("numaward.io/apart", "app=batch")]) };
        builder.strategy = StrategyKind::Kubelet;
        let terms = builder.pod(&pod).terms;
        assert_eq!((terms.name, terms.labels.len(), terms.apart.len()), (None, 0, 1));
        builder.strategy = StrategyKind::Native;
        let terms = builder.pod(&pod).terms;
        assert_eq!(terms.name.as_deref(), Some("ns/web"));
        assert_eq!(terms.labels, [("app".to_owned(), "db".to_owned())].into());
    }

    /// The ledger stores labels, and a pod may have 1 MB of them.
    #[test]
    fn labels_are_limited_with_a_note() {
        let builder = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        let request_with = |labels: BTreeMap<String, String>| builder.pod(&nri::Pod { labels, ..pod(&[]) });
        let many = |count: usize, bytes: usize| {
            (0..count).map(move |number| (format!("l{number:05}"), "x".repeat(bytes)))
        };
        let own =
            [("zone".to_owned(), "a".to_owned()), ("io.kubernetes.pod.uid".to_owned(), "u1".to_owned())];

        let few = request_with(many(20, 60).chain(own.clone()).collect());
        assert_eq!((few.terms.labels.len(), few.notes), (21, vec![]));
        for (count, bytes) in [(10_000, 63), (70, 1), (3, 1 << 20)] {
            let built = request_with(many(count, bytes).chain(own.clone()).collect());
            let kept = &built.terms.labels;
            let size: usize = kept.iter().map(|(key, value)| key.len() + value.len()).sum();
            assert!(
                kept.len() <= MAX_LABELS && size <= MAX_LABEL_BYTES,
                "{} labels, {size} bytes",
                kept.len()
            );
            let note = format!("{} of its {} labels", count + 1 - kept.len(), count + 1);
            assert!(built.notes.iter().any(|found| found.contains(&note)), "{note}: {:?}", built.notes);
        }
    }

    #[test]
    fn ignored_texts_are_noted() {
        let builder = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        let notes = |ignored| builder.pod(&nri::Pod { ignored, ..pod(&[]) }).notes;
        assert_eq!(notes(0), [""; 0]);
        assert!(matches!(&notes(3)[..], [note] if note.starts_with("3 of its labels and annotations")));
    }

    /// A quota counts requests, not the siblings of CPUs or the resctrl class.
    #[test]
    fn beyond_quota_needs_listed_namespace() {
        let asked = [("numaward.io/hide-siblings", "true"), ("numaward.io/resctrl-class", "db")];
        let settings = watch::Sender::new(Kubernetes::default());
        let builder = RequestBuilder { config: settings.subscribe(), ..builder(Arc::new(NoPods)) };
        // The list may change while the daemon runs.
        let with = |namespaces: &[&str]| {
            settings.send_modify(|settings| {
                settings.beyond_quota_namespaces = namespaces.iter().map(|&name| name.to_owned()).collect();
            });
            builder.annotations(&pod(&asked))
        };
        for namespaces in [&[][..], &["other"]] {
            let read = with(namespaces);
            assert_eq!(read.terms, Terms::default(), "{namespaces:?}");
            let notes = read.ignored.join("\n");
            for part in ["hide-siblings", "resctrl-class", "kubernetes.beyondQuotaNamespaces"] {
                assert!(notes.contains(part), "{notes}");
            }
        }
        let read = with(&["ns"]);
        assert!(read.terms.hide_siblings && read.terms.resctrl_class.as_deref() == Some("db"), "{read:?}");
        assert_eq!(read.ignored, [""; 0]);
    }

    #[test]
    fn memory_claim_uses_both_descriptions() {
        let memory = |builder: &RequestBuilder, class: &str, resources: nri::Resources| {
            builder.container(&pod(&[]), &container("db", class, resources)).unwrap().memory
        };
        let (two, gib) = (limits(2000, Bytes::gib(1)), Some(Bytes::gib(1)));
        let builder = builder(Arc::new(NoPods));
        let expected =
            |class, request, limit| MemoryClaim { class: Some(class), request, limit, overhead: None };
        assert_eq!(memory(&builder, "", two.clone()), expected(QosClass::Guaranteed, gib, gib));
        assert_eq!(memory(&builder, "/burstable", two.clone()), expected(QosClass::Burstable, None, gib));
        assert_eq!(
            memory(&builder, "/besteffort", nri::Resources::default()),
            expected(QosClass::BestEffort, None, None)
        );
        let known = known(vec![burstable("db", "2", "256Mi")]);
        let requested = Some(Bytes::mib(256));
        assert_eq!(memory(&known, "/burstable", two.clone()), expected(QosClass::Burstable, requested, None));
        // A new limit, that the API server has not reported yet.
        let more = limits(2000, Bytes::gib(2));
        let resized = |builder: &RequestBuilder, class| {
            builder.resized(&pod(&[]), &container("db", class, two.clone()), &more).1.unwrap()
        };
        let two_gib = Some(Bytes::gib(2));
        assert_eq!(resized(&builder, ""), expected(QosClass::Guaranteed, two_gib, two_gib));
        assert_eq!(resized(&known, "/burstable"), expected(QosClass::Burstable, requested, two_gib));
    }

    #[test]
    fn passes_preferred_nodes() {
        let mut builder = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        builder.strategy = StrategyKind::Kubelet;
        let wish = pod(&[("numaward.io/preferred-nodes", "1")]);
        let terms = builder.pod(&wish).terms;
        assert_eq!(terms.preferences.preferred, [("db".into(), "1".parse().unwrap())].into());
        assert_eq!((terms.preferences.devices.len(), builder.pod(&pod(&[])).terms), (0, Terms::default()));
    }

    #[test]
    fn builds_request_from_runtime_alone() {
        let builder = builder(Arc::new(NoPods));
        let mut two = limits(2000, Bytes::gib(1));
        two.hugepage_limits =
            [(HugepageSize(Bytes::mib(2)), Bytes::mib(8)), (HugepageSize(Bytes::gib(1)), Bytes(0))].into();
        let built = builder.container(&pod(&[]), &container("db", "", two.clone())).unwrap();
        let PodClaim::Container(request) = &built.pod.asked else { panic!("{:?}", built.pod.asked) };
        assert_eq!((request.owner.as_str(), request.qos()), ("u1/db", QosClass::Guaranteed));
        let wanted = &request.containers[0].requests;
        assert_eq!(wanted.cpu.unwrap().whole_cpus(), Some(2));
        let memory: BTreeMap<_, _> =
            wanted.memory.iter().map(|(kind, q)| (kind.to_string(), q.units())).collect();
        let expected =
            [("memory".to_owned(), Some(1 << 30)), ("hugepages-2Mi".to_owned(), Some(8 << 20))].into();
        assert_eq!(memory, expected);
        assert!(built.pod.notes.iter().any(|note| note.contains("one container at a time")));

        // Without a quota, the shares decide, which are exact for whole CPUs.
        let shares =
            |shares| nri::Resources { cpu_shares: Some(shares), cpu_quota: None, ..limits(0, Bytes::gib(1)) };
        for (shares_given, whole) in [(2048, Some(2)), (1536, None), (2, None)] {
            let built = builder.container(&pod(&[]), &container("db", "", shares(shares_given))).unwrap();
            let PodClaim::Container(request) = &built.pod.asked else { panic!("{:?}", built.pod.asked) };
            assert_eq!(request.containers[0].requests.cpu.unwrap().whole_cpus(), whole, "{shares_given}");
        }

        // Other classes, `placement: shared` and an unlimited container: the shared pool.
        let unlimited = nri::Resources { memory_limit: Some(Limit::Unlimited), ..two.clone() };
        for (class, annotations, resources) in [
            ("/burstable", vec![], two.clone()),
            ("/besteffort", vec![], nri::Resources::default()),
            ("", vec![("numaward.io/placement", "shared")], two.clone()),
            ("/burstable", vec![("numaward.io/guarantee", "memory")], two.clone()),
            ("", vec![], unlimited),
        ] {
            let built = builder.container(&pod(&annotations), &container("db", class, resources)).unwrap();
            assert_eq!(built.pod.asked, PodClaim::Nothing, "{class} {annotations:?}");
        }
        let lost = nri::Container { cgroup: None, ..container("db", "", two) };
        assert_eq!(builder.container(&pod(&[]), &lost).unwrap_err(), NotPlacedReason::NoCgroup);
    }
}

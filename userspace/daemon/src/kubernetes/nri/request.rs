//! From what is known of a pod to what the reconciler is asked.
//!
//! What is known comes from two sources. The API server's description of a pod has requests, init and sidecar
//! containers, and all containers at once. What the runtime says has, of one container at a time: limits, the
//! CPU shares that the kubelet makes of a request, and the pod's class of service by its place among the
//! kubelet's cgroups. The first is used where it is there; decisions from the second say so.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue, Quota},
};
use numaward_config::{
    Config,
    kubernetes::PinnedPolicy,
    policy::{KubeletVersion, StrategyKind},
};
use numaward_engine::{
    ContainerName, ContainerRequest, QosClass, Quantity, Request, Resources, policy::PodLevelSupport,
};
use numaward_guarantee::pod::{ContainerPlacementRequest, MemoryClaim, PodClaim, PodPlacementRequest};
use numaward_kube::{
    cgroup_path::pod_levels,
    nri::types::{self as nri, Limit},
    pod::{self, PodId, PodSource},
};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, POD_SHARE, PodName},
};
use numaward_topology::{Bytes, KernelRelease, NodeSet};

use super::{
    annotations::{Annotations, Extra, Placement},
    devices, pod_level_resources,
};

/// CPU shares that the kubelet gives for one CPU.
const SHARES_PER_CPU: u64 = 1024;

/// Labels of a pod that are kept in the ledger, at most.
const MAX_LABELS: usize = 64;
/// Bytes that their keys and values have together, at most.
const MAX_LABEL_BYTES: usize = 4 << 10;

/// Why a container is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeftAlone {
    /// Its annotations say so.
    OptedOut,
    /// Where its cgroup will be is not known.
    NoCgroup,
}

/// Makes requests of what is known.
#[derive(Clone)]
pub(super) struct RequestBuilder {
    /// The API server's pods, as far as it reported them.
    pub(super) pods: Arc<dyn PodSource>,
    host_root: PathBuf,
    /// None where it is not named by numbers.
    kernel: Option<KernelRelease>,
    kubelet: Arc<devices::Kubelet>,
    strategy: StrategyKind,
    version: KubeletVersion,
    whole_pods: PodLevelSupport,
    when_pinned: PinnedPolicy,
    /// Where pods may opt out.
    off_namespaces: BTreeSet<String>,
    /// Where pods may have more than a quota counts.
    beyond_quota_namespaces: BTreeSet<String>,
}

impl RequestBuilder {
    pub(super) fn new(pods: Arc<dyn PodSource>, config: &Config) -> Self {
        let kubelet = Arc::new(devices::Kubelet::new(config));
        let kernel = rustix::system::uname();
        Self {
            pods,
            host_root: config.host_root.clone(),
            kernel: KernelRelease::parse(&kernel.release().to_string_lossy()),
            kubelet,
            strategy: config.strategy,
            version: config.kubelet_version.unwrap_or_default(),
            whole_pods: config.gates().pod_level_support(),
            when_pinned: config.kubernetes.nri.when_pinned,
            off_namespaces: config.kubernetes.placement_off_namespaces.clone(),
            beyond_quota_namespaces: config.kubernetes.beyond_quota_namespaces.clone(),
        }
    }

    /// What the API server says about a pod.
    pub(super) fn known(&self, pod: &nri::Pod) -> Option<Arc<pod::Pod>> {
        self.pods.pod(&id_of(pod))
    }

    /// What a pod's annotations say, as far as the strategy knows it and the pod's namespace is allowed it.
    pub(super) fn annotations(&self, pod: &nri::Pod) -> Annotations {
        let read = Annotations::read(&pod.annotations);
        let read = if self.off_namespaces.contains(&pod.namespace) { read } else { read.without_off() };
        let may_have_more = self.beyond_quota_namespaces.contains(&pod.namespace);
        let read = if may_have_more { read } else { read.without_beyond_quota() };
        let read = read.for_kernel(self.kernel);
        if self.strategy == StrategyKind::Native { read } else { read.without_burstable() }
    }

    /// A pod as a whole, as far as it is known.
    pub(super) fn pod(&self, pod: &nri::Pod) -> PodPlacementRequest {
        let annotations = self.annotations(pod);
        let mut notes = Vec::new();
        let asked = self.known(pod).map(|known| self.asked(&known, &annotations, &mut notes));
        let mut ask = self.ask(pod, asked.unwrap_or(PodClaim::Nothing), &annotations);
        ask.notes.append(&mut notes);
        ask
    }

    /// What is asked for with a pod that the API server has reported. What a pod has as a whole, the kubelet's managers
    /// do not look at in 1.32; in 1.36 they leave such a pod alone, unless a gate has them place it.
    fn asked(&self, known: &pod::Pod, annotations: &Annotations, notes: &mut Vec<String>) -> PodClaim {
        if self.strategy == StrategyKind::Native || known.resources.is_none() {
            return pod_level_resources::asked(known, annotations);
        }
        match self.whole_pods {
            PodLevelSupport::Ignored => {
                return pod_level_resources::asked(
                    &pod::Pod { resources: None, ..known.clone() },
                    annotations,
                );
            }
            PodLevelSupport::Placed => return pod_level_resources::asked_as_whole(known, annotations),
            PodLevelSupport::Unmanaged => {}
        }
        notes.push(format!(
            "not placed: the pod has resources as a whole, with which the managers of the kubelet {} place no \
             container (the strategy native does, and the feature gate PodLevelResourceManagers has them do it)",
            self.version
        ));
        PodClaim::Nothing
    }

    /// What is asked for with a pod, on the terms of its annotations and labels.
    fn ask(&self, pod: &nri::Pod, asked: PodClaim, annotations: &Annotations) -> PodPlacementRequest {
        let mut terms = annotations.terms.clone();
        let mut notes = annotations.ignored.clone();
        if let PodClaim::Pod(request) | PodClaim::Container(request) = &asked {
            for container in request.all_containers() {
                let wishes = annotations.of(container.name.as_str());
                if let Some(nodes) = wishes.preferred_nodes {
                    terms.preferences.preferred.insert(container.name.clone(), nodes);
                }
                terms.burstable |= wishes.extra == Extra::Burstable && request.qos() != QosClass::Guaranteed;
            }
            let bound = |name: &ContainerName| annotations.of(name.as_str()).extra == Extra::Memory;
            for name in
                request.all_containers().map(|of| &of.name).filter(|name| terms.burstable && bound(name))
            {
                notes.push(format!(
                    "numaward.io/guarantee: memory is ignored for {name} (burstable, which another container has, holds for \
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
        // By these others can name it, which only `native` knows.
        if self.strategy == StrategyKind::Native && asked != PodClaim::Nothing {
            terms.name = Some(format!("{}/{}", pod.namespace, pod.name));
            terms.labels = labels(pod, &mut notes);
        }
        PodPlacementRequest {
            pod: PodName { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() },
            sandbox: pod.id.clone(),
            asked,
            terms,
            notes,
        }
    }

    /// Adds the nodes of the devices that the kubelet has assigned to the pod.
    pub(super) async fn add_devices(&self, pod: &nri::Pod, ask: &mut PodPlacementRequest) {
        for (container, nodes) in self.kubelet.nodes(&pod.namespace, &pod.name).await {
            let has_slice = matches!(&ask.asked, PodClaim::Pod(request) if request.has_container(&container));
            add_device_nodes(ask, if has_slice { container } else { POD_SHARE.into() }, &nodes);
        }
    }

    /// A container.
    pub(super) fn container(
        &self,
        pod: &nri::Pod,
        container: &nri::Container,
    ) -> Result<ContainerPlacementRequest, LeftAlone> {
        let annotations = self.annotations(pod);
        if annotations.of(&container.name).placement == Placement::Off {
            return Err(LeftAlone::OptedOut);
        }
        let cgroup: Option<CgroupPath> = container.cgroup.as_ref().and_then(|path| path.parse().ok());
        let cgroup = cgroup.filter(|path| !path.is_root()).ok_or(LeftAlone::NoCgroup)?;
        let mut notes = Vec::new();
        // Once: the API server may report the pod meanwhile.
        let known = self.known(pod);
        let (asked, slice) = match &known {
            Some(known) => {
                let asked = self.asked(known, &annotations, &mut notes);
                let slice = pod_level_resources::slice(known, &asked, &annotations, &container.name);
                (asked, slice)
            }
            None => (alone(pod, container, &annotations, &mut notes), GuaranteeSource::Own),
        };
        let memory = memory(known.as_deref(), pod, container, &container.resources);
        let keeps_pod_quota = known.is_some_and(|known| pod_level_resources::keeps_quota(&known, &asked));
        let mut pod = self.ask(pod, asked, &annotations);
        pod.notes.append(&mut notes);
        let devices = devices::nodes(&self.host_root, &container.devices);
        let holder = match slice {
            GuaranteeSource::Own | GuaranteeSource::Part => container.name.as_str(),
            GuaranteeSource::Pod | GuaranteeSource::PodInit => POD_SHARE,
        };
        add_device_nodes(&mut pod, holder.into(), &devices);
        Ok(ContainerPlacementRequest {
            pod,
            id: container.id.clone(),
            name: container.name.clone(),
            cgroup,
            slice,
            memory,
            keeps_pod_quota,
            has: settings_in(&container.resources),
            is_placed_by_other_program: false,
        })
    }

    /// A container that runs.
    pub(super) fn running(
        &self,
        pod: &nri::Pod,
        container: &nri::Container,
        online: &nri::Online,
    ) -> Result<ContainerPlacementRequest, LeftAlone> {
        let is_placed_by_other_program =
            self.when_pinned == PinnedPolicy::Yield && container.resources.is_confined(online);
        Ok(ContainerPlacementRequest { is_placed_by_other_program, ..self.container(pod, container)? })
    }

    /// What a change of a container's resources asks for, and what the protection of its memory follows from then, if
    /// that changes.
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
        // The API server may report it later than the runtime.
        memory.limit = Some(limit);
        if memory.class == Some(QosClass::Guaranteed) && memory.request > Some(Bytes(0)) {
            memory.request = Some(limit);
        }
        (to, Some(memory))
    }

    /// What is left for those that share it when the amounts of a pod as a whole change to these; none if nothing is
    /// shared in it.
    pub(super) fn pod_resized(&self, pod: &nri::Pod, requested: &nri::Resources) -> Option<Resources> {
        let known = self.known(pod).filter(|_| self.strategy == StrategyKind::Native)?;
        let mut amounts = known.resources.as_ref()?.requests.clone();
        let has_cpu = requested.cpu_shares.is_some() || requested.cpu_quota.is_some();
        amounts.cpu = cpus(requested).filter(|_| has_cpu).or(amounts.cpu);
        if let Some(Limit::At(limit)) = requested.memory_limit {
            amounts = amounts.with_memory(Quantity::whole(limit.0));
        }
        pod_level_resources::share_of(&known, &self.annotations(pod), amounts)
    }
}

/// The amounts from which the protection of a container's memory follows, if it has these resources.
fn memory(
    known: Option<&pod::Pod>,
    pod: &nri::Pod,
    container: &nri::Container,
    has: &nri::Resources,
) -> MemoryClaim {
    if let Some(known) = known {
        return pod_level_resources::memory(known, &container.name);
    }
    let bytes = |of: &nri::Resources| match of.memory_limit {
        Some(Limit::At(limit)) if limit.0 > 0 => Some(limit),
        _ => None,
    };
    let limit = bytes(has);
    let class = class_of(pod, container);
    // For other classes, the runtime does not receive the memory request.
    let request = limit.filter(|_| class == Some(QosClass::Guaranteed));
    MemoryClaim { class, request, limit, overhead: pod.overhead.as_ref().and_then(bytes) }
}

/// The labels of a pod that others can name it by, as far as they are kept: the first ones, by key.
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
            "{} of its {all} labels cannot be named by numaward.io/with and numaward.io/apart of other pods ({MAX_LABELS} labels with \
             {MAX_LABEL_BYTES} bytes are kept, the first ones by key)",
            all - kept.len()
        ));
    }
    kept
}

/// Which pod it is.
pub(super) fn id_of(pod: &nri::Pod) -> PodId {
    PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
}

/// What is set with these resources, of what we may set as well.
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

/// The class of service of a pod, by its place among the kubelet's cgroups.
fn class_of(pod: &nri::Pod, container: &nri::Container) -> Option<QosClass> {
    let path = container.cgroup.as_ref().or(pod.cgroup.as_ref());
    path.and_then(|path| pod_levels(path)).map(|levels| levels.qos)
}

/// Adds nodes of devices to those of the container that holds them.
fn add_device_nodes(ask: &mut PodPlacementRequest, container: ContainerName, nodes: &NodeSet) {
    if !nodes.is_empty() {
        let known = ask.terms.preferences.devices.entry(container).or_default();
        *known = &*known | nodes;
    }
}

/// What is asked for with a container that only the runtime has reported.
fn alone(
    pod: &nri::Pod,
    container: &nri::Container,
    annotations: &Annotations,
    notes: &mut Vec<String>,
) -> PodClaim {
    let class = class_of(pod, container);
    let wishes = annotations.of(&container.name);
    if wishes.placement != Placement::Auto {
        return PodClaim::Nothing;
    }
    if class != Some(QosClass::Guaranteed) {
        if wishes.extra != Extra::None {
            let note =
                "memory is not promised: the API server, which has its requests, has not reported this pod";
            notes.push(note.to_owned());
        }
        return PodClaim::Nothing;
    }
    notes.push(
        "decided from what the container runtime reports, one container at a time: the API server has not reported \
         this pod, so that its init containers and the scope of a pod are not known"
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

/// The CPUs that a Guaranteed container may use: its quota, else what its shares were made of.
fn cpus(resources: &nri::Resources) -> Option<Quantity> {
    if let (Some(Limit::At(quota)), Some(period)) = (resources.cpu_quota, resources.cpu_period) {
        let millis = (quota.as_nanos() * 1000).checked_div(period.as_nanos())?;
        return u64::try_from(millis).ok().map(Quantity::milli);
    }
    // The kubelet rounds down, so that whole CPUs are exact and nothing else is.
    let shares = resources.cpu_shares?;
    let millis = match shares % SHARES_PER_CPU {
        0 => shares / SHARES_PER_CPU * 1000,
        _ => shares.saturating_mul(1000).div_ceil(SHARES_PER_CPU),
    };
    Some(Quantity::milli(millis))
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

    struct One(pod::Pod);

    impl PodSource for One {
        fn pod(&self, id: &PodId) -> Option<Arc<pod::Pod>> {
            (*id == self.0.id).then(|| Arc::new(self.0.clone()))
        }
        fn is_synced(&self) -> bool {
            true
        }
        fn notify(&self, _: Notice) {}
    }

    /// Reports a pod from the second question on.
    struct Late(One, AtomicBool);

    impl PodSource for Late {
        fn pod(&self, id: &PodId) -> Option<Arc<pod::Pod>> {
            if self.1.swap(true, Ordering::Relaxed) { self.0.pod(id) } else { None }
        }
        fn is_synced(&self) -> bool {
            true
        }
        fn notify(&self, _: Notice) {}
    }

    #[test]
    fn request_is_built_from_one_answer_of_the_api_server() {
        let web = container("web", "/burstable", nri::Resources::default());
        let ask = |builder: &RequestBuilder| format!("{:?}", builder.container(&pod(&[]), &web).unwrap());
        let one = || {
            let id = PodId { namespace: "ns".to_owned(), name: "web".to_owned(), uid: "u1".to_owned() };
            let containers = vec![burstable("web", "1", "1Gi")];
            One(pod::Pod { id, containers, ..pod::Pod::default() })
        };
        let [unknown, known] = [ask(&builder(Arc::new(NoPods))), ask(&builder(Arc::new(one())))];
        assert_ne!(unknown, known);
        let late = builder(Arc::new(Late(one(), AtomicBool::new(false))));
        assert_eq!([ask(&late), ask(&late)], [unknown, known]);
    }

    fn builder(pods: Arc<dyn PodSource>) -> RequestBuilder {
        RequestBuilder::new(pods, &Config { host_root: "/nowhere".into(), ..Config::default() })
    }

    fn known(containers: Vec<ContainerRequest>) -> RequestBuilder {
        let id = PodId { namespace: "ns".to_owned(), name: "web".to_owned(), uid: "u1".to_owned() };
        builder(Arc::new(One(pod::Pod { id, containers, ..pod::Pod::default() })))
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
    fn a_known_guaranteed_pod_is_asked_for_as_a_whole() {
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
        let ask = builder.pod(&all);
        assert_eq!(ask.asked, PodClaim::Nothing);
        assert!(
            matches!(&ask.notes[..], [note] if note.contains("expected auto, memory or burstable")),
            "{:?}",
            ask.notes
        );
        let off = pod(&[("db.numaward.io/placement", "off")]);
        let off = nri::Pod { namespace: "kube-system".to_owned(), ..off };
        let db = container("db", "", limits(2000, Bytes::gib(1)));
        assert_eq!(builder.container(&off, &db).unwrap_err(), LeftAlone::OptedOut);
    }

    #[test]
    fn a_burstable_container_can_have_its_memory_promised() {
        let builder = known(vec![burstable("db", "2", "1Gi"), burstable("log", "1", "64Mi")]);
        assert_eq!(builder.pod(&pod(&[])).asked, PodClaim::Nothing);
        let PodClaim::Pod(request) = builder.pod(&pod(&[("db.numaward.io/guarantee", "memory")])).asked
        else {
            panic!("nothing is asked for");
        };
        assert_eq!((request.containers.len(), request.qos()), (1, QosClass::Guaranteed));
        let cpu = request.containers[0].requests.cpu.unwrap();
        assert_eq!((cpu.whole_cpus(), request.containers[0].name.as_str()), (None, "db"));
    }

    #[test]
    fn a_burstable_container_can_have_a_home() {
        let db = ContainerRequest::guaranteed("db", resources("2", "1Gi"));
        let mut builder = known(vec![db, burstable("log", "1", "64Mi")]);
        let wished = [("db.numaward.io/guarantee", "burstable"), ("log.numaward.io/guarantee", "memory")];
        builder.strategy = StrategyKind::Kubelet;
        let ask = builder.pod(&pod(&wished));
        assert!(
            matches!(&ask.asked, PodClaim::Pod(request) if request.containers.len() == 1)
                && !ask.terms.burstable
        );
        assert!(matches!(&ask.notes[..], [note] if note.contains("strategy native")), "{:?}", ask.notes);
        builder.strategy = StrategyKind::Native;
        let ask = builder.pod(&pod(&wished));
        assert!(matches!(&ask.notes[..], [note] if note.contains("ignored for log")), "{:?}", ask.notes);
        let ask = builder.pod(&pod(&wished[..1]));
        let PodClaim::Pod(request) = &ask.asked else { panic!("nothing is asked for") };
        assert_eq!((request.containers.len(), request.qos()), (1, QosClass::Burstable));
        assert!(ask.terms.burstable);
        let all = builder.pod(&pod(&[("numaward.io/guarantee", "burstable")]));
        let PodClaim::Pod(request) = &all.asked else { panic!("nothing is asked for") };
        assert_eq!((request.containers.len(), all.terms.burstable), (2, true));
        let mut guaranteed = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        guaranteed.strategy = StrategyKind::Native;
        assert!(!guaranteed.pod(&pod(&[("numaward.io/guarantee", "burstable")])).terms.burstable);
    }

    /// Guaranteed by what it has as a whole. `native` gives its containers slices of that.
    #[test]
    fn the_kubelets_managers_leave_a_pod_with_resources_as_a_whole_alone() {
        let all = resources("4", "8Gi");
        let of_pod = PodResources { requests: all.clone(), limits: all };
        let containers = vec![ContainerRequest::guaranteed("db", resources("2", "4Gi"))];
        let mut builder = known(Vec::new());
        let id = PodId { namespace: "ns".to_owned(), name: "web".to_owned(), uid: "u1".to_owned() };
        let known = pod::Pod { id, containers, resources: Some(of_pod), ..pod::Pod::default() };
        builder.pods = Arc::new(One(known.clone()));
        let db = container("db", "", limits(2000, Bytes::gib(4)));
        let held = |asked: &PodClaim| match asked {
            PodClaim::Pod(request) => request.containers.iter().map(|of| of.name.to_string()).collect(),
            _ => Vec::new(),
        };
        let more = limits(6000, Bytes::gib(12));
        builder.strategy = StrategyKind::Kubelet;
        for (version, whole_pods, expected) in [
            (KubeletVersion::V1_32, PodLevelSupport::Ignored, ["db"].as_slice()),
            (KubeletVersion::V1_36, PodLevelSupport::Unmanaged, &[]),
        ] {
            (builder.version, builder.whole_pods) = (version, whole_pods);
            let ask = builder.pod(&pod(&[]));
            assert_eq!(held(&ask.asked), expected, "{version}");
            let of_container = builder.container(&pod(&[]), &db).unwrap();
            assert_eq!(
                (of_container.pod.asked, of_container.slice),
                (ask.asked, GuaranteeSource::Own),
                "{version}"
            );
            assert_eq!(of_container.pod.notes, ask.notes);
            assert_eq!(ask.notes.iter().any(|note| note.contains("kubelet 1.36")), expected.is_empty());
            assert_eq!(builder.pod_resized(&pod(&[]), &more), None);
        }
        builder.whole_pods = PodLevelSupport::Placed;
        let mut with_log = known;
        with_log.containers.push(burstable("log", "100m", "64Mi"));
        builder.pods = Arc::new(One(with_log));
        let ask = builder.pod(&pod(&[]));
        assert!(
            matches!(&ask.asked, PodClaim::Pod(request) if request.resources.is_some()),
            "{:?}",
            ask.asked
        );
        assert_eq!((held(&ask.asked), ask.notes.len()), (vec!["db".to_owned(), "log".to_owned()], 0));
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
    fn native_knows_pods_by_name_and_labels() {
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

    /// The ledger keeps them, and a pod may have 1 MB of them.
    #[test]
    fn labels_are_kept_up_to_a_limit_and_a_note_says_so() {
        let builder = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        let ask = |labels: BTreeMap<String, String>| builder.pod(&nri::Pod { labels, ..pod(&[]) });
        let many = |count: usize, bytes: usize| {
            (0..count).map(move |number| (format!("l{number:05}"), "x".repeat(bytes)))
        };
        let own =
            [("zone".to_owned(), "a".to_owned()), ("io.kubernetes.pod.uid".to_owned(), "u1".to_owned())];

        let few = ask(many(20, 60).chain(own.clone()).collect());
        assert_eq!((few.terms.labels.len(), few.notes), (21, vec![]));
        for (count, bytes) in [(10_000, 63), (70, 1), (3, 1 << 20)] {
            let ask = ask(many(count, bytes).chain(own.clone()).collect());
            let kept = &ask.terms.labels;
            let size: usize = kept.iter().map(|(key, value)| key.len() + value.len()).sum();
            assert!(
                kept.len() <= MAX_LABELS && size <= MAX_LABEL_BYTES,
                "{} labels, {size} bytes",
                kept.len()
            );
            let note = format!("{} of its {} labels", count + 1 - kept.len(), count + 1);
            assert!(ask.notes.iter().any(|of| of.contains(&note)), "{note}: {:?}", ask.notes);
        }
    }

    /// A quota counts what a pod requests, and not the siblings of its CPUs or the class that it joins.
    #[test]
    fn annotations_that_give_more_than_a_quota_counts_are_for_listed_namespaces() {
        let asked = [("numaward.io/hide-siblings", "true"), ("numaward.io/resctrl-class", "db")];
        let with = |namespaces: &[&str]| {
            let mut config = Config { host_root: "/nowhere".into(), ..Config::default() };
            config.kubernetes.beyond_quota_namespaces = namespaces.iter().map(|&of| of.to_owned()).collect();
            RequestBuilder::new(Arc::new(NoPods), &config).annotations(&pod(&asked))
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
    fn what_is_known_of_memory_is_told() {
        let memory = |builder: &RequestBuilder, class: &str, resources: nri::Resources| {
            builder.container(&pod(&[]), &container("db", class, resources)).unwrap().memory
        };
        let (two, gib) = (limits(2000, Bytes::gib(1)), Some(Bytes::gib(1)));
        let builder = builder(Arc::new(NoPods));
        let ask = |class, request, limit| MemoryClaim { class: Some(class), request, limit, overhead: None };
        assert_eq!(memory(&builder, "", two.clone()), ask(QosClass::Guaranteed, gib, gib));
        assert_eq!(memory(&builder, "/burstable", two.clone()), ask(QosClass::Burstable, None, gib));
        assert_eq!(
            memory(&builder, "/besteffort", nri::Resources::default()),
            ask(QosClass::BestEffort, None, None)
        );
        let known = known(vec![burstable("db", "2", "256Mi")]);
        let requested = Some(Bytes::mib(256));
        assert_eq!(memory(&known, "/burstable", two.clone()), ask(QosClass::Burstable, requested, None));
        // A new limit, that the API server has not reported yet.
        let more = limits(2000, Bytes::gib(2));
        let resized = |builder: &RequestBuilder, class| {
            builder.resized(&pod(&[]), &container("db", class, two.clone()), &more).1.unwrap()
        };
        let two_gib = Some(Bytes::gib(2));
        assert_eq!(resized(&builder, ""), ask(QosClass::Guaranteed, two_gib, two_gib));
        assert_eq!(resized(&known, "/burstable"), ask(QosClass::Burstable, requested, two_gib));
    }

    #[test]
    fn wishes_and_devices_are_told() {
        let mut builder = known(vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))]);
        builder.strategy = StrategyKind::Kubelet;
        let wish = pod(&[("numaward.io/preferred-nodes", "1")]);
        let terms = builder.pod(&wish).terms;
        assert_eq!(terms.preferences.preferred, [("db".into(), "1".parse().unwrap())].into());
        assert_eq!((terms.preferences.devices.len(), builder.pod(&pod(&[])).terms), (0, Terms::default()));
    }

    #[test]
    fn without_an_api_server_the_runtime_tells() {
        let builder = builder(Arc::new(NoPods));
        let mut two = limits(2000, Bytes::gib(1));
        two.hugepage_limits =
            [(HugepageSize(Bytes::mib(2)), Bytes::mib(8)), (HugepageSize(Bytes::gib(1)), Bytes(0))].into();
        let ask = builder.container(&pod(&[]), &container("db", "", two.clone())).unwrap();
        let PodClaim::Container(request) = &ask.pod.asked else { panic!("{:?}", ask.pod.asked) };
        assert_eq!((request.owner.as_str(), request.qos()), ("u1/db", QosClass::Guaranteed));
        let wanted = &request.containers[0].requests;
        assert_eq!(wanted.cpu.unwrap().whole_cpus(), Some(2));
        let memory: BTreeMap<_, _> =
            wanted.memory.iter().map(|(kind, q)| (kind.to_string(), q.units())).collect();
        let expected =
            [("memory".to_owned(), Some(1 << 30)), ("hugepages-2Mi".to_owned(), Some(8 << 20))].into();
        assert_eq!(memory, expected);
        assert!(ask.pod.notes.iter().any(|note| note.contains("one container at a time")));

        // Without a quota the shares say: whole CPUs exactly.
        let shares =
            |shares| nri::Resources { cpu_shares: Some(shares), cpu_quota: None, ..limits(0, Bytes::gib(1)) };
        for (shares_given, whole) in [(2048, Some(2)), (1536, None), (2, None)] {
            let ask = builder.container(&pod(&[]), &container("db", "", shares(shares_given))).unwrap();
            let PodClaim::Container(request) = &ask.pod.asked else { panic!("{:?}", ask.pod.asked) };
            assert_eq!(request.containers[0].requests.cpu.unwrap().whole_cpus(), whole, "{shares_given}");
        }

        // Other classes, wishes and what is not known: a share of what is nobody's.
        let unlimited = nri::Resources { memory_limit: Some(Limit::Unlimited), ..two.clone() };
        for (class, annotations, resources) in [
            ("/burstable", vec![], two.clone()),
            ("/besteffort", vec![], nri::Resources::default()),
            ("", vec![("numaward.io/placement", "shared")], two.clone()),
            ("/burstable", vec![("numaward.io/guarantee", "memory")], two.clone()),
            ("", vec![], unlimited),
        ] {
            let ask = builder.container(&pod(&annotations), &container("db", class, resources)).unwrap();
            assert_eq!(ask.pod.asked, PodClaim::Nothing, "{class} {annotations:?}");
        }
        let lost = nri::Container { cgroup: None, ..container("db", "", two) };
        assert_eq!(builder.container(&pod(&[]), &lost).unwrap_err(), LeftAlone::NoCgroup);
    }
}

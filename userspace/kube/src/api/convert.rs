//! Conversion of the API server's pods to [`StoredPod`].
//!
//! Only the fields that placement needs are deserialized, so changes of other fields in newer API servers have no effect. A needed
//! field that cannot be parsed is an error that names the field.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use numaward_engine::{ContainerRequest, PodResources, Quantity, Resources};
use numaward_topology::ZoneKind;
use serde::{
    Deserialize, Deserializer,
    de::{self, IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::{
    Controller,
    object::{ApiObject, AtMost, Fields, ShortText},
};
use crate::pod::{ClaimUse, Pod, PodId};

/// A pod as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPod {
    pub pod: Arc<Pod>,
    /// True if the phase is `Running`: all containers have been created, and at least one of them runs, starts or restarts.
    pub is_running: bool,
    /// Names of the containers by the runtime's ids, as far as the kubelet has reported them.
    pub container_ids: BTreeMap<String, String>,
    /// Controller that creates the pod again after its end.
    pub controller: Option<Controller>,
    /// Names of the resource claims of the pod, as far as the claims exist.
    pub claims: BTreeSet<String>,
    /// True if the pod is being deleted.
    pub is_leaving: bool,
    /// True if the priority is that of `system-cluster-critical` or higher.
    pub is_critical: bool,
}

/// Minimum priority of critical pods, which the kubelet never evicts: `SystemCriticalPriority` in `pkg/apis/scheduling`. The
/// classes `system-cluster-critical` and `system-node-critical` have this priority or a higher one; user-defined classes are lower.
const MIN_CRITICAL_PRIORITY: i64 = 2_000_000_000;

/// Maximum number of containers of a pod, with init containers. A pod of a megabyte could have thousands. A pod with more
/// is ignored, since its request is the sum of all.
const MAX_CONTAINERS: usize = 1024;
/// Maximum number of stored ids of containers of a pod: those of [`MAX_CONTAINERS`], and as many ephemeral ones.
const MAX_CONTAINER_IDS: usize = 2 * MAX_CONTAINERS;
/// Maximum number of claims of all containers of a pod. A pod has at most 64 claims.
const MAX_CLAIM_USES: usize = 256;
/// Maximum number of stored names of claims of a pod. A pod has at most as many.
const MAX_CLAIMS: usize = 64;
/// Maximum number of claims that a pod names. Further ones are ignored.
const MAX_CLAIM_REFERENCES: usize = 1024;
/// Maximum number of amounts of CPU, memory and sizes of huge pages in one place. A pod with more is ignored.
const MAX_AMOUNTS: usize = 64;
/// Maximum length of an amount.
const MAX_AMOUNT_BYTES: usize = 64;
/// Maximum number of owners of a pod. Further ones are ignored.
const MAX_OWNERS: usize = 64;

/// A pod, apart from the name of its Kubernetes node.
#[derive(Clone, Debug)]
pub(super) struct PodFields {
    stored: StoredPod,
    mirrored: Option<MirroredPod>,
}

/// The static pod that a mirror pod claims to show.
#[derive(Clone, Debug)]
struct MirroredPod {
    node: String,
    /// The UID that the runtime uses.
    uid: String,
}

#[derive(Deserialize)]
struct Body {
    metadata: Metadata,
    spec: Spec,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    deletion_timestamp: Option<IgnoredAny>,
    annotations: Option<Annotations>,
    #[serde(default)]
    owner_references: AtMost<Owner, MAX_OWNERS>,
}

#[derive(Deserialize)]
struct Annotations {
    #[serde(rename = "kubernetes.io/config.hash")]
    hash: Option<ShortText>,
    #[serde(rename = "kubernetes.io/config.mirror")]
    mirror: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Owner {
    kind: ShortText,
    name: ShortText,
    controller: Option<bool>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    #[serde(default)]
    init_containers: AtMost<ContainerFields, MAX_CONTAINERS>,
    containers: AtMost<ContainerFields, MAX_CONTAINERS>,
    resources: Option<Requirements>,
    #[serde(default)]
    overhead: Amounts,
    priority: Option<i64>,
    #[serde(default)]
    resource_claims: AtMost<ClaimReference, MAX_CLAIM_REFERENCES>,
}

/// A claim of a pod, in its specification or status: its name within the pod, and the name of the object if it is known.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClaimReference {
    name: ShortText,
    resource_claim_name: Option<ShortText>,
}

/// The claim that the scheduler has made for extended resources (`example.com/nic: 1`) of DRA drivers.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExtendedResourceClaim {
    resource_claim_name: ShortText,
    #[serde(default)]
    request_mappings: AtMost<RequestMapping, MAX_CLAIM_USES>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RequestMapping {
    container_name: ShortText,
    request_name: ShortText,
}

#[derive(Deserialize)]
#[serde(rename = "Container", rename_all = "camelCase")]
struct ContainerFields {
    name: String,
    resources: Option<Requirements>,
    restart_policy: Option<String>,
}

#[derive(Default, Deserialize)]
struct Requirements {
    #[serde(default)]
    requests: Amounts,
    #[serde(default)]
    limits: Amounts,
    #[serde(default)]
    claims: AtMost<RequestedClaim, MAX_CLAIM_USES>,
}

/// A claim of a pod that a container uses.
#[derive(Deserialize)]
struct RequestedClaim {
    name: ShortText,
    request: Option<ShortText>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    phase: Option<String>,
    #[serde(default)]
    init_container_statuses: AtMost<ContainerStatus, MAX_CONTAINER_IDS>,
    #[serde(default)]
    container_statuses: AtMost<ContainerStatus, MAX_CONTAINER_IDS>,
    #[serde(default)]
    ephemeral_container_statuses: AtMost<ContainerStatus, MAX_CONTAINER_IDS>,
    #[serde(default)]
    resource_claim_statuses: AtMost<ClaimReference, MAX_CLAIM_REFERENCES>,
    #[serde(rename = "extendedResourceClaimStatus")]
    extended_resources: Option<ExtendedResourceClaim>,
}

#[derive(Deserialize)]
struct ContainerStatus {
    name: ShortText,
    #[serde(rename = "containerID")]
    container_id: Option<ShortText>,
}

/// Amounts of CPU, memory and huge pages by name, as text. Other resources are skipped.
#[derive(Default)]
struct Amounts(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Amounts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AmountsVisitor)
    }
}

struct AmountsVisitor;

impl<'de> Visitor<'de> for AmountsVisitor {
    type Value = Amounts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("amounts by name")
    }

    fn visit_unit<E>(self) -> Result<Amounts, E> {
        Ok(Amounts::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Amounts, A::Error> {
        let mut amounts = Vec::new();
        while let Some(name) = fields.next_key::<String>()? {
            if name != "cpu" && name.parse::<ZoneKind>().is_err() {
                fields.next_value::<IgnoredAny>()?;
                continue;
            }
            if amounts.len() == MAX_AMOUNTS {
                return Err(de::Error::custom(format!("more than {MAX_AMOUNTS} amounts in one place")));
            }
            let text = fields.next_value::<&RawValue>()?.get();
            let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
            if text.len() > MAX_AMOUNT_BYTES {
                return Err(de::Error::custom(format!("{name}: more than {MAX_AMOUNT_BYTES} bytes")));
            }
            amounts.push((name, text.to_owned()));
        }
        Ok(Amounts(amounts))
    }
}

/// Parses amounts. An error is the field and the problem.
fn resources(Amounts(amounts): Amounts, place: &str) -> Result<Resources, String> {
    let mut resources = Resources::none();
    for (name, text) in amounts {
        let amount: Quantity = text.parse().map_err(|error| format!("{place}.{name}: {error}"))?;
        match name.parse::<ZoneKind>() {
            Ok(kind) => drop(resources.memory.insert(kind, amount)),
            Err(_) => resources.cpu = Some(amount),
        }
    }
    Ok(resources)
}

fn requests_and_limits(requirements: Option<Requirements>, place: &str) -> Result<PodResources, String> {
    let Requirements { requests, limits, .. } = requirements.unwrap_or_default();
    Ok(PodResources {
        requests: resources(requests, &format!("{place}.requests"))?,
        limits: resources(limits, &format!("{place}.limits"))?,
    })
}

fn containers(
    list: impl IntoIterator<Item = ContainerFields>,
    place: &str,
) -> Result<Vec<ContainerRequest>, String> {
    let container = |ContainerFields { name, resources, restart_policy }: ContainerFields| {
        let place = format!("{place}[{name:?}].resources");
        let PodResources { requests, limits } = requests_and_limits(resources, &place)?;
        let restartable = restart_policy.is_some_and(|policy| policy == "Always");
        Ok(ContainerRequest { name: name.into(), restartable, requests, limits })
    };
    list.into_iter().map(container).collect()
}

/// Returns the names of all claims, up to [`MAX_CLAIMS`].
fn claim_names(spec: &Spec, status: &Status) -> BTreeSet<String> {
    let references = spec.resource_claims.items.iter().chain(&status.resource_claim_statuses.items);
    let names = references.filter_map(|claim| claim.resource_claim_name.as_ref());
    names.map(|name| name.0.clone()).take(MAX_CLAIMS).collect()
}

/// Returns the claims that the containers use: the first ones, up to [`MAX_CLAIM_USES`]. Claims that do not exist yet are not included.
fn claims(spec: &Spec, status: &Status) -> Vec<ClaimUse> {
    let references = spec.resource_claims.items.iter().chain(&status.resource_claim_statuses.items);
    let objects: BTreeMap<&str, &str> = references
        .filter_map(|claim| Some((claim.name.0.as_str(), claim.resource_claim_name.as_ref()?.0.as_str())))
        .collect();
    let containers = spec.init_containers.items.iter().chain(&spec.containers.items);
    let requested = containers.flat_map(|container| {
        let claims = container.resources.iter().flat_map(|resources| &resources.claims.items);
        claims.map(move |claim| (container.name.as_str(), claim))
    });
    let requested = requested.filter_map(|(container, claim)| {
        let object = objects.get(claim.name.0.as_str())?;
        Some((container, *object, claim.request.as_ref().map(|request| request.0.clone())))
    });
    let extended = status.extended_resources.iter().flat_map(|claim| {
        claim.request_mappings.items.iter().map(|mapping| {
            let object = claim.resource_claim_name.0.as_str();
            (mapping.container_name.0.as_str(), object, Some(mapping.request_name.0.clone()))
        })
    });
    let uses = requested.chain(extended).take(MAX_CLAIM_USES);
    uses.map(|(container, claim, request)| {
        let (container, claim) = (container.to_owned(), claim.to_owned());
        ClaimUse { container, claim, request }
    })
    .collect()
}

/// Returns the static pod of which the kubelet of a Kubernetes node could have created this mirror pod.
fn mirrored_pod(annotations: Option<Annotations>, owners: &[Owner]) -> Option<MirroredPod> {
    let Annotations { hash, mirror } = annotations?;
    let node = owners.iter().find(|owner| owner.kind.0 == "Node")?.name.0.clone();
    let uid = hash.map(|hash| hash.0).filter(|hash| !hash.is_empty() && mirror.is_some())?;
    Some(MirroredPod { node, uid })
}

impl Fields for PodFields {
    type Kind = k8s_openapi::api::core::v1::Pod;

    fn parse(text: &str) -> Result<Self, String> {
        let Body { metadata, spec, status } =
            serde_json::from_str(text).map_err(|error| format!("metadata, spec or status: {error}"))?;
        let missing = || "metadata.uid: it is missing".to_owned();
        let api_uid = metadata.uid.filter(|uid| !uid.is_empty()).ok_or_else(missing)?;
        let owners = metadata.owner_references.items;
        let controller = owners.iter().find(|owner| owner.controller == Some(true));
        let controller =
            controller.map(|owner| Controller { kind: owner.kind.0.clone(), name: owner.name.0.clone() });
        let mirrored = mirrored_pod(metadata.annotations, &owners);
        let count = spec.containers.count + spec.init_containers.count;
        if count > MAX_CONTAINERS {
            return Err(format!(
                "spec.containers: {count} containers are more than the maximum of {MAX_CONTAINERS}"
            ));
        }
        let status = status.unwrap_or_default();
        let (claims, names) = (claims(&spec, &status), claim_names(&spec, &status));
        let resources_of_pod =
            spec.resources.map(|of_pod| requests_and_limits(Some(of_pod), "spec.resources"));
        let phase = status.phase.as_deref().unwrap_or_default();
        let pod = Pod {
            id: PodId {
                namespace: metadata.namespace.unwrap_or_default(),
                name: metadata.name.unwrap_or_default(),
                uid: api_uid.clone(),
            },
            api_uid,
            init_containers: containers(spec.init_containers, "spec.initContainers")?,
            containers: containers(spec.containers, "spec.containers")?,
            resources: resources_of_pod.transpose()?,
            overhead: resources(spec.overhead, "spec.overhead")?,
            claims,
            is_terminal: matches!(phase, "Succeeded" | "Failed"),
        };
        let is_running = phase == "Running";
        let is_critical = spec.priority.is_some_and(|priority| priority >= MIN_CRITICAL_PRIORITY);
        let statuses =
            [status.init_container_statuses, status.container_statuses, status.ephemeral_container_statuses];
        let container_ids = statuses
            .into_iter()
            .flatten()
            .filter_map(|status| {
                // The format is RUNTIME://ID.
                let id = status.container_id?.0.split_once("://")?.1.to_owned();
                Some((id, status.name.0))
            })
            .take(MAX_CONTAINER_IDS)
            .collect();
        let is_leaving = metadata.deletion_timestamp.is_some();
        let pod = Arc::new(pod);
        let stored =
            StoredPod { pod, is_running, container_ids, controller, claims: names, is_leaving, is_critical };
        Ok(Self { stored, mirrored })
    }
}

/// Converts the JSON text of a pod's manifest, with any `metadata.uid`. Absent requests are those that the API server sets: the limits and,
/// for the whole pod, the sum over its containers. An error names the field.
pub fn pod_of_manifest(text: &str) -> Result<Pod, String> {
    let mut pod = Arc::unwrap_or_clone(PodFields::parse(text)?.stored.pod);
    for container in pod.init_containers.iter_mut().chain(&mut pod.containers) {
        set_defaults(&mut container.requests, &container.limits);
    }
    let request = pod.request();
    if let Some(of_pod) = &mut pod.resources {
        let mut defaults = of_pod.limits.clone();
        let sum = |of: &dyn Fn(&Resources) -> Option<u64>| {
            let amount = |container: &ContainerRequest| vec![of(&container.requests).unwrap_or(0)];
            let is_given = request.all_containers().any(|container| of(&container.requests).is_some());
            is_given
                .then(|| request.effective_amounts(1, amount))
                .and_then(|amounts| amounts.first().copied())
        };
        if let Some(millis) = sum(&|requests| requests.cpu?.millis()) {
            defaults.cpu = defaults.cpu.map(|_| Quantity::milli(millis));
        }
        for (kind, amount) in &mut defaults.memory {
            let bytes = sum(&|requests| requests.memory.get(kind)?.units());
            *amount = bytes.map_or(*amount, Quantity::whole);
        }
        set_defaults(&mut of_pod.requests, &defaults);
    }
    Ok(pod)
}

fn set_defaults(requests: &mut Resources, defaults: &Resources) {
    requests.cpu = requests.cpu.or(defaults.cpu);
    for (&kind, &amount) in &defaults.memory {
        requests.memory.entry(kind).or_insert(amount);
    }
}

/// Converts a pod of the Kubernetes node `node`. An error names the pod and the field.
pub(super) fn pod(object: ApiObject<PodFields>, node: &str) -> Result<StoredPod, String> {
    let ApiObject { identity, fields } = object;
    let PodFields { mut stored, mirrored } = fields.map_err(|problem| {
        let text = |part: Option<String>| part.unwrap_or_default();
        format!("pod {}/{}: {problem}", text(identity.namespace), text(identity.name))
    })?;
    if let Some(mirrored) = mirrored.filter(|mirrored| mirrored.node == node) {
        Arc::make_mut(&mut stored.pod).id.uid = mirrored.uid;
    }
    Ok(stored)
}

#[cfg(test)]
mod tests {
    use numaward_engine::QosClass;
    use numaward_tests_support::{is_alone, peak, reset_peak};
    use numaward_topology::Bytes;
    use serde_json::{Value, json};

    use super::*;
    use crate::pod::{CONFIG_HASH, CONFIG_MIRROR};

    fn read(pod: &Value) -> Result<StoredPod, String> {
        super::pod(serde_json::from_str(&pod.to_string()).unwrap(), "n")
    }

    fn full() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "db", "namespace": "prod", "uid": "u1", "resourceVersion": "7",
                "labels": {"app": "db"}, "annotations": {"numaward.io/policy": "restricted"}},
            "spec": {
                "nodeName": "n",
                "overhead": {"cpu": "250m", "memory": 1024},
                "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "1Gi"}},
                "initContainers": [
                    {"name": "prepare", "image": "x"},
                    {"name": "proxy", "restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}}],
                "containers": [{"name": "main", "resources": {
                    "requests": {"cpu": 2, "memory": "1e3", "hugepages-2Mi": "4Mi", "vendor.example/nic": "one?"},
                    "limits": {"cpu": "2", "memory": "1k", "hugepages-2Mi": "4Mi", "ephemeral-storage": "x"}}}]
            },
            "status": {"phase": "Running",
                "initContainerStatuses": [{"name": "proxy", "containerID": "containerd://a1"}],
                "containerStatuses": [{"name": "main", "containerID": "cri-o://b2", "ready": true},
                    {"name": "late"}],
                "somethingNew": {"x": []}}
        })
    }

    #[test]
    fn containers_of_a_pod_are_limited() {
        let mut pod = full();
        let mut counted = |containers: usize, ephemeral: usize| {
            let named =
                |number| json!({"name": format!("c{number}"), "containerID": format!("r://{number}")});
            pod["spec"]["containers"] = (2..containers).map(named).collect();
            pod["status"]["ephemeralContainerStatuses"] = (0..ephemeral).map(named).collect();
            read(&pod)
        };
        let largest = counted(MAX_CONTAINERS, 5000).unwrap();
        assert_eq!(largest.pod.containers.len() + largest.pod.init_containers.len(), MAX_CONTAINERS);
        assert_eq!(largest.container_ids.len(), MAX_CONTAINER_IDS);
        let error = counted(MAX_CONTAINERS + 1, 0).unwrap_err();
        assert_eq!(error, "pod prod/db: spec.containers: 1025 containers are more than the maximum of 1024");
    }

    /// Kubernetes limits neither the kind nor the name of an owner, nor the hash of a mirror pod.
    #[test]
    fn pods_with_long_texts_take_little_memory() {
        const PODS: usize = 200;
        const CEILING: u64 = 32 << 20;
        if !is_alone() {
            return;
        }
        let (long, mut pod) = ("x".repeat(1 << 20), full());
        pod["metadata"]["ownerReferences"] = json!([{"kind": long, "name": "y".repeat(1000), "controller": true}, {"kind": "Node", "name": "n"}]);
        pod["metadata"]["annotations"] = json!({CONFIG_HASH: long, CONFIG_MIRROR: "m"});
        pod["status"]["containerStatuses"][0] =
            json!({"name": "z".repeat(1000), "containerID": format!("r://{long}")});
        let text = pod.to_string();
        reset_peak();
        let before = peak();
        let store = |_| super::pod(serde_json::from_str(&text).unwrap(), "n").unwrap();
        let stored: Vec<_> = (0..PODS).map(store).collect();
        let most = peak();
        let StoredPod { pod, controller, container_ids, .. } = &stored[0];
        assert_eq!(*controller, Some(Controller { kind: "x".repeat(253), name: "y".repeat(253) }));
        assert_eq!(pod.id.uid, "x".repeat(253));
        assert!(container_ids.iter().all(|(id, name)| id.len().max(name.len()) <= 253));
        assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
    }

    #[test]
    fn reads_fields_needed_for_placement() {
        let StoredPod { pod, is_running, container_ids, .. } = read(&full()).unwrap();
        assert_eq!((pod.id.to_string().as_str(), pod.id.uid.as_str()), ("prod/db", "u1"));
        assert!(is_running && !pod.is_terminal);
        let names: Vec<_> = pod.init_containers.iter().map(|c| (c.name.as_str(), c.restartable)).collect();
        assert_eq!(names, [("prepare", false), ("proxy", true)]);
        let main = &pod.containers[0];
        assert_eq!(main.requests.cpu, Some(Quantity::whole(2)));
        assert_eq!(main.requests.memory[&ZoneKind::Memory], main.limits.memory[&ZoneKind::Memory]);
        assert_eq!(main.requests.memory[&"hugepages-2Mi".parse().unwrap()], Quantity::whole(Bytes::mib(4).0));
        let of_pod = pod.resources.as_ref().unwrap();
        assert_eq!(of_pod.requests.cpu, Some(Quantity::whole(4)));
        assert_eq!(of_pod.limits.memory[&ZoneKind::Memory], Quantity::whole(Bytes::gib(1).0));
        assert_eq!(pod.overhead.cpu, Some(Quantity::milli(250)));
        assert_eq!(pod.request().qos(), QosClass::Burstable);
        assert_eq!(container_ids.get("b2").map(String::as_str), Some("main"));
        assert_eq!(container_ids.len(), 2);
    }

    #[test]
    fn mirror_pod_has_uid_of_runtime() {
        type Edit = fn(&mut Value);
        let mut object = full();
        object["metadata"]["annotations"] = json!({CONFIG_HASH: "abcdef", CONFIG_MIRROR: "abcdef"});
        object["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "n1", "controller": true}]);
        object["status"]["phase"] = json!("Failed");
        let stored = read(&object).unwrap();
        assert_eq!((stored.pod.id.uid.as_str(), stored.pod.api_uid.as_str()), ("abcdef", "u1"));
        assert!(stored.pod.is_terminal && !stored.is_running);

        // Any author of a pod can set the annotation.
        let forgeries: [Edit; 4] = [
            |metadata| metadata["annotations"] = json!({CONFIG_HASH: "abcdef"}),
            |metadata| metadata["ownerReferences"] = json!(null),
            |metadata| metadata["ownerReferences"][0]["kind"] = json!("ReplicaSet"),
            |metadata| metadata["ownerReferences"][0]["name"] = json!("another"),
        ];
        for edit in forgeries {
            let mut object = object.clone();
            edit(&mut object["metadata"]);
            assert_eq!(read(&object).unwrap().pod.id.uid, "u1");
        }
    }

    #[test]
    fn reads_claims_of_containers() {
        let mut object = full();
        assert_eq!(read(&object).unwrap().pod.claims, []);
        object["spec"]["resourceClaims"] = json!([
            {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
            {"name": "nic", "resourceClaimName": "shared-nic"},
            {"name": "late", "resourceClaimTemplateName": "x"}]);
        object["spec"]["initContainers"][1]["resources"]["claims"] =
            json!([{"name": "nic", "request": "port"}]);
        object["spec"]["containers"][0]["resources"]["claims"] =
            json!([{"name": "gpu"}, {"name": "late"}, {"name": "unknown"}]);
        object["status"]["resourceClaimStatuses"] =
            json!([{"name": "gpu", "resourceClaimName": "db-gpu-x7k"}, {"name": "late"}]);
        object["status"]["extendedResourceClaimStatus"] = json!({"resourceClaimName": "db-extended", "requestMappings":
            [{"containerName": "main", "resourceName": "vendor.example/nic", "requestName": "container-0-request-0"}]});
        let uses = |object: &Value| -> Vec<(String, String, Option<String>)> {
            let claims = read(object).unwrap().pod.claims.clone();
            claims.into_iter().map(|used| (used.container, used.claim, used.request)).collect()
        };
        let entry = |container: &str, claim: &str, request: Option<&str>| {
            (container.to_owned(), claim.to_owned(), request.map(str::to_owned))
        };
        assert_eq!(
            uses(&object),
            [
                entry("proxy", "shared-nic", Some("port")),
                entry("main", "db-gpu-x7k", None),
                entry("main", "db-extended", Some("container-0-request-0"))
            ]
        );
        let many: Vec<_> = (0..1000).map(|_| json!({"name": "gpu"})).collect();
        object["spec"]["containers"][0]["resources"]["claims"] = json!(many);
        assert_eq!(uses(&object).len(), MAX_CLAIM_USES);
    }

    #[test]
    fn detects_system_critical_priority() {
        for (priority, is_critical) in [
            (json!(null), false),
            (json!(1_000_000_000), false),
            (json!(2_000_000_000), true),
            (json!(2_000_001_000), true),
        ] {
            let mut object = full();
            object["spec"]["priority"] = priority.clone();
            assert_eq!(read(&object).unwrap().is_critical, is_critical, "{priority}");
        }
    }

    #[test]
    fn accepts_pod_without_status() {
        let mut object = full();
        object.as_object_mut().unwrap().remove("status");
        let stored = read(&object).unwrap();
        assert!(!stored.is_running && stored.container_ids.is_empty());
    }

    #[test]
    fn parse_error_names_field() {
        type Edit = fn(&mut Value);
        let faults: [(Edit, &str); 5] = [
            (|pod| pod["metadata"]["uid"] = json!(null), "metadata.uid: it is missing"),
            (
                |pod| pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("2 cores"),
                "spec.containers[\"main\"].resources.limits.cpu: ",
            ),
            (|pod| pod["spec"]["overhead"]["memory"] = json!([1]), "spec.overhead.memory: "),
            (|pod| pod["spec"]["containers"] = json!("none"), "metadata, spec or status: "),
            (|pod| pod["spec"] = json!(null), "metadata, spec or status: "),
        ];
        for (edit, message) in faults {
            let mut object = full();
            edit(&mut object);
            let error = read(&object).unwrap_err();
            assert!(error.starts_with("pod prod/db: ") && error.contains(message), "{error}");
        }
    }
}

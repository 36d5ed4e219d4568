//! Conversion of the API server's pods to [`StoredPod`].
//!
//! Only the fields that placement needs are deserialized, so changes of other fields in newer API servers have no effect. A needed
//! field that cannot be parsed is an error that names the field.

use std::{collections::BTreeMap, sync::Arc};

use kube::{api::DynamicObject, core::ObjectMeta};
use numaward_engine::{ContainerRequest, PodResources, Quantity, Resources};
use numaward_topology::ZoneKind;
use serde::Deserialize;
use serde_json::Value;

use super::Controller;
use crate::pod::{CONFIG_HASH, CONFIG_MIRROR, ClaimUse, Pod, PodId};

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

type Amounts = Option<BTreeMap<String, Value>>;

#[derive(Deserialize)]
struct Body {
    spec: Spec,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    init_containers: Option<Vec<ContainerFields>>,
    containers: Vec<ContainerFields>,
    resources: Option<Requirements>,
    overhead: Amounts,
    priority: Option<i64>,
    resource_claims: Option<Vec<ClaimReference>>,
}

/// A claim of a pod, in its specification or status: its name within the pod, and the name of the object if it is known.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClaimReference {
    name: String,
    resource_claim_name: Option<String>,
}

/// The claim that the scheduler has made for extended resources (`example.com/nic: 1`) of DRA drivers.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExtendedResourceClaim {
    resource_claim_name: String,
    request_mappings: Option<Vec<RequestMapping>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RequestMapping {
    container_name: String,
    request_name: String,
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
    requests: Amounts,
    limits: Amounts,
    claims: Option<Vec<RequestedClaim>>,
}

/// A claim of a pod that a container uses.
#[derive(Deserialize)]
struct RequestedClaim {
    name: String,
    request: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    phase: Option<String>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
    container_statuses: Option<Vec<ContainerStatus>>,
    ephemeral_container_statuses: Option<Vec<ContainerStatus>>,
    resource_claim_statuses: Option<Vec<ClaimReference>>,
    #[serde(rename = "extendedResourceClaimStatus")]
    extended_resources: Option<ExtendedResourceClaim>,
}

#[derive(Deserialize)]
struct ContainerStatus {
    name: String,
    #[serde(rename = "containerID")]
    container_id: Option<String>,
}

/// Parses the amounts of CPU, memory and huge pages. Other resources are ignored. An error is the field and the problem.
fn resources(amounts: Amounts, place: &str) -> Result<Resources, (String, String)> {
    let mut resources = Resources::none();
    for (name, amount) in amounts.into_iter().flatten() {
        let kind = name.parse::<ZoneKind>().ok();
        if name != "cpu" && kind.is_none() {
            continue;
        }
        let text = match &amount {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            other => return Err((format!("{place}.{name}"), format!("{other} is not an amount"))),
        };
        let amount: Quantity =
            text.parse().map_err(|error| (format!("{place}.{name}"), format!("{error}")))?;
        match kind {
            Some(kind) => drop(resources.memory.insert(kind, amount)),
            None => resources.cpu = Some(amount),
        }
    }
    Ok(resources)
}

fn requests_and_limits(
    requirements: Option<Requirements>,
    place: &str,
) -> Result<PodResources, (String, String)> {
    let Requirements { requests, limits, .. } = requirements.unwrap_or_default();
    Ok(PodResources {
        requests: resources(requests, &format!("{place}.requests"))?,
        limits: resources(limits, &format!("{place}.limits"))?,
    })
}

fn containers(list: Vec<ContainerFields>, place: &str) -> Result<Vec<ContainerRequest>, (String, String)> {
    let container = |ContainerFields { name, resources, restart_policy }: ContainerFields| {
        let place = format!("{place}[{name:?}].resources");
        let PodResources { requests, limits } = requests_and_limits(resources, &place)?;
        let restartable = restart_policy.is_some_and(|policy| policy == "Always");
        Ok(ContainerRequest { name: name.into(), restartable, requests, limits })
    };
    list.into_iter().map(container).collect()
}

/// Returns the claims that the containers use: the first ones, up to [`MAX_CLAIM_USES`]. Claims that do not exist yet are not included.
fn claims(spec: &Spec, status: &Status) -> Vec<ClaimUse> {
    let references = spec.resource_claims.iter().chain(&status.resource_claim_statuses).flatten();
    let objects: BTreeMap<&str, &str> = references
        .filter_map(|claim| Some((claim.name.as_str(), claim.resource_claim_name.as_deref()?)))
        .collect();
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let requested = containers.flat_map(|container| {
        let claims = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
        claims.map(move |claim| (container.name.as_str(), claim))
    });
    let requested = requested.filter_map(|(container, claim)| {
        let object = objects.get(claim.name.as_str())?;
        Some((container, *object, claim.request.clone()))
    });
    let extended = status.extended_resources.iter().flat_map(|claim| {
        let mappings = claim.request_mappings.iter().flatten();
        mappings.map(|mapping| {
            let object = claim.resource_claim_name.as_str();
            (mapping.container_name.as_str(), object, Some(mapping.request_name.clone()))
        })
    });
    let uses = requested.chain(extended).take(MAX_CLAIM_USES);
    uses.map(|(container, claim, request)| {
        let (container, claim) = (container.to_owned(), claim.to_owned());
        ClaimUse { container, claim, request }
    })
    .collect()
}

/// Returns the UID that the runtime uses for a static pod, if this is its mirror pod, created by the kubelet of `node`.
fn uid_of_static_pod(metadata: &ObjectMeta, node: &str) -> Option<String> {
    let annotations = metadata.annotations.as_ref()?;
    let mut owners = metadata.owner_references.iter().flatten();
    let is_owned_by_node = owners.any(|owner| owner.kind == "Node" && owner.name == node);
    let hash = annotations.get(CONFIG_HASH).filter(|hash| !hash.is_empty())?;
    (is_owned_by_node && annotations.contains_key(CONFIG_MIRROR)).then(|| hash.clone())
}

/// Converts a pod of the Kubernetes node `node`. An error names the pod and the field.
pub(super) fn pod(object: DynamicObject, node: &str) -> Result<StoredPod, String> {
    let DynamicObject { metadata, data, .. } = object;
    let runtime_uid = uid_of_static_pod(&metadata, node);
    let controller = metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    let controller =
        controller.map(|owner| Controller { kind: owner.kind.clone(), name: owner.name.clone() });
    let is_leaving = metadata.deletion_timestamp.is_some();
    let (namespace, name) = (metadata.namespace.unwrap_or_default(), metadata.name.unwrap_or_default());
    let pod_name = format!("{namespace}/{name}");
    let fail = |(place, problem): (String, String)| format!("pod {pod_name}: {place}: {problem}");
    let api_uid = metadata
        .uid
        .filter(|uid| !uid.is_empty())
        .ok_or_else(|| fail(("metadata.uid".to_owned(), "it is missing".to_owned())))?;
    let Body { spec, status } = serde_json::from_value(data)
        .map_err(|error| fail(("spec or status".to_owned(), error.to_string())))?;
    let count = spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len);
    if count > MAX_CONTAINERS {
        let problem = format!("{count} containers are more than the maximum of {MAX_CONTAINERS}");
        return Err(fail(("spec.containers".to_owned(), problem)));
    }
    let uid = runtime_uid.unwrap_or_else(|| api_uid.clone());
    let status = status.unwrap_or_default();
    let claims = claims(&spec, &status);
    let resources_of_pod = spec.resources.map(|of_pod| requests_and_limits(Some(of_pod), "spec.resources"));
    let phase = status.phase.as_deref().unwrap_or_default();
    let pod = Pod {
        id: PodId { namespace, name, uid },
        api_uid,
        init_containers: containers(spec.init_containers.unwrap_or_default(), "spec.initContainers")
            .map_err(fail)?,
        containers: containers(spec.containers, "spec.containers").map_err(fail)?,
        resources: resources_of_pod.transpose().map_err(fail)?,
        overhead: resources(spec.overhead, "spec.overhead").map_err(fail)?,
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
        .flatten()
        .filter_map(|status| {
            // The format is RUNTIME://ID.
            let id = status.container_id?.split_once("://")?.1.to_owned();
            Some((id, status.name))
        })
        .take(MAX_CONTAINER_IDS)
        .collect();
    Ok(StoredPod { pod: Arc::new(pod), is_running, container_ids, controller, is_leaving, is_critical })
}

#[cfg(test)]
mod tests {
    use numaward_engine::QosClass;
    use numaward_topology::Bytes;
    use serde_json::json;

    use super::*;

    fn read(pod: Value) -> Result<StoredPod, String> {
        super::pod(serde_json::from_value(pod).unwrap(), "n")
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
            read(pod.clone())
        };
        let largest = counted(MAX_CONTAINERS, 5000).unwrap();
        assert_eq!(largest.pod.containers.len() + largest.pod.init_containers.len(), MAX_CONTAINERS);
        assert_eq!(largest.container_ids.len(), MAX_CONTAINER_IDS);
        let error = counted(MAX_CONTAINERS + 1, 0).unwrap_err();
        assert_eq!(error, "pod prod/db: spec.containers: 1025 containers are more than the maximum of 1024");
    }

    #[test]
    fn reads_fields_needed_for_placement() {
        let StoredPod { pod, is_running, container_ids, .. } = read(full()).unwrap();
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
        let stored = read(object.clone()).unwrap();
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
            assert_eq!(read(object).unwrap().pod.id.uid, "u1");
        }
    }

    #[test]
    fn reads_claims_of_containers() {
        let mut object = full();
        assert_eq!(read(object.clone()).unwrap().pod.claims, []);
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
            let claims = read(object.clone()).unwrap().pod.claims.clone();
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
            assert_eq!(read(object).unwrap().is_critical, is_critical, "{priority}");
        }
    }

    #[test]
    fn accepts_pod_without_status() {
        let mut object = full();
        object.as_object_mut().unwrap().remove("status");
        let stored = read(object).unwrap();
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
            (
                |pod| pod["spec"]["overhead"]["memory"] = json!([1]),
                "spec.overhead.memory: [1] is not an amount",
            ),
            (|pod| pod["spec"]["containers"] = json!("none"), "spec or status: "),
            (|pod| pod["spec"] = json!(null), "spec or status: "),
        ];
        for (edit, message) in faults {
            let mut object = full();
            edit(&mut object);
            let error = read(object).unwrap_err();
            assert!(error.starts_with("pod prod/db: ") && error.contains(message), "{error}");
        }
    }
}

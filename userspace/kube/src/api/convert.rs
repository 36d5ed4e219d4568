//! From the API server's pod to ours. What is not needed is not looked at, so what newer servers say about it cannot
//! be misread; what is needed and cannot be read is an error that says where.

use std::{collections::BTreeMap, sync::Arc};

use kube::{api::DynamicObject, core::ObjectMeta};
use numaward_engine::{ContainerRequest, PodResources, Quantity, Resources};
use numaward_topology::ZoneKind;
use serde::Deserialize;
use serde_json::Value;

use super::Controller;
use crate::pod::{CONFIG_HASH, CONFIG_MIRROR, Pod, PodId};

/// A pod as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPod {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Whether its containers have been started.
    pub is_running: bool,
    /// The names of its containers by the runtime's ids, as far as the kubelet has reported.
    pub container_ids: BTreeMap<String, String>,
    /// Who makes it again when it is gone.
    pub controller: Option<Controller>,
    /// Whether it is being deleted.
    pub is_leaving: bool,
    /// Whether it has the priority of what the cluster or its node needs.
    pub is_critical: bool,
}

/// The least priority of pods that the kubelet evicts for nobody: `SystemCriticalPriority` in `pkg/apis/scheduling`. The
/// classes `system-cluster-critical` and `system-node-critical` have it or more, and users' own classes less.
const CRITICAL: i64 = 2_000_000_000;

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
    init_containers: Option<Vec<Container>>,
    containers: Vec<Container>,
    resources: Option<Requirements>,
    overhead: Amounts,
    priority: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    name: String,
    resources: Option<Requirements>,
    restart_policy: Option<String>,
}

#[derive(Default, Deserialize)]
struct Requirements {
    requests: Amounts,
    limits: Amounts,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    phase: Option<String>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
    container_statuses: Option<Vec<ContainerStatus>>,
    ephemeral_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Deserialize)]
struct ContainerStatus {
    name: String,
    #[serde(rename = "containerID")]
    container_id: Option<String>,
}

/// The amounts of the resources that the engine knows; others are none of its business.
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
            other => return Err((format!("{place}.{name}"), format!("{other} is no amount"))),
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

fn both(requirements: Option<Requirements>, place: &str) -> Result<PodResources, (String, String)> {
    let Requirements { requests, limits } = requirements.unwrap_or_default();
    Ok(PodResources {
        requests: resources(requests, &format!("{place}.requests"))?,
        limits: resources(limits, &format!("{place}.limits"))?,
    })
}

fn containers(list: Vec<Container>, place: &str) -> Result<Vec<ContainerRequest>, (String, String)> {
    let container = |Container { name, resources, restart_policy }: Container| {
        let place = format!("{place}[{name:?}].resources");
        let PodResources { requests, limits } = both(resources, &place)?;
        let restartable = restart_policy.is_some_and(|policy| policy == "Always");
        Ok(ContainerRequest { name: name.into(), restartable, requests, limits })
    };
    list.into_iter().map(container).collect()
}

/// The UID by which the runtime knows a static pod, if this is its mirror: made by the kubelet of this node.
fn uid_of_static_pod(metadata: &ObjectMeta, node: &str) -> Option<String> {
    let annotations = metadata.annotations.as_ref()?;
    let mut owners = metadata.owner_references.iter().flatten();
    let is_ours = owners.any(|of| of.kind == "Node" && of.name == node);
    let hash = annotations.get(CONFIG_HASH).filter(|hash| !hash.is_empty())?;
    (is_ours && annotations.contains_key(CONFIG_MIRROR)).then(|| hash.clone())
}

/// Reads a pod of this node; the error says which, and which field is wrong.
pub(super) fn pod(object: DynamicObject, node: &str) -> Result<StoredPod, String> {
    let DynamicObject { metadata, data, .. } = object;
    let of_static_pod = uid_of_static_pod(&metadata, node);
    let controller = metadata.owner_references.iter().flatten().find(|of| of.controller == Some(true));
    let controller = controller.map(|of| Controller { kind: of.kind.clone(), name: of.name.clone() });
    let is_leaving = metadata.deletion_timestamp.is_some();
    let (namespace, name) = (metadata.namespace.unwrap_or_default(), metadata.name.unwrap_or_default());
    let called = format!("{namespace}/{name}");
    let fail = |(place, problem): (String, String)| format!("pod {called}: {place}: {problem}");
    let api_uid = metadata
        .uid
        .filter(|uid| !uid.is_empty())
        .ok_or_else(|| fail(("metadata.uid".to_owned(), "it is missing".to_owned())))?;
    let Body { spec, status } = serde_json::from_value(data)
        .map_err(|error| fail(("spec or status".to_owned(), error.to_string())))?;
    let annotations = metadata.annotations.unwrap_or_default();
    let uid = of_static_pod.unwrap_or_else(|| api_uid.clone());
    let resources_of_pod = spec.resources.map(|of_pod| both(Some(of_pod), "spec.resources"));
    let status = status.unwrap_or_default();
    let phase = status.phase.as_deref().unwrap_or_default();
    let pod = Pod {
        id: PodId { namespace, name, uid },
        api_uid,
        annotations,
        init_containers: containers(spec.init_containers.unwrap_or_default(), "spec.initContainers")
            .map_err(fail)?,
        containers: containers(spec.containers, "spec.containers").map_err(fail)?,
        resources: resources_of_pod.transpose().map_err(fail)?,
        overhead: resources(spec.overhead, "spec.overhead").map_err(fail)?,
        is_terminal: matches!(phase, "Succeeded" | "Failed"),
    };
    let is_running = phase == "Running";
    let is_critical = spec.priority.is_some_and(|priority| priority >= CRITICAL);
    let statuses =
        [status.init_container_statuses, status.container_statuses, status.ephemeral_container_statuses];
    let container_ids = statuses
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|status| {
            // RUNTIME://ID
            let id = status.container_id?.split_once("://")?.1.to_owned();
            Some((id, status.name))
        })
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
    fn a_pod_is_read_with_all_that_placement_needs() {
        let StoredPod { pod, is_running, container_ids, .. } = read(full()).unwrap();
        assert_eq!((pod.id.to_string().as_str(), pod.id.uid.as_str()), ("prod/db", "u1"));
        assert!(is_running && !pod.is_terminal);
        assert_eq!(pod.annotations["numaward.io/policy"], "restricted");
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
    fn the_mirror_of_a_static_pod_goes_by_the_uid_of_the_runtime() {
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
    fn the_priority_of_what_the_cluster_needs_is_known() {
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
    fn a_pod_that_was_just_created_has_no_status() {
        let mut object = full();
        object.as_object_mut().unwrap().remove("status");
        let stored = read(object).unwrap();
        assert!(!stored.is_running && stored.container_ids.is_empty());
    }

    #[test]
    fn what_cannot_be_read_says_where() {
        type Edit = fn(&mut Value);
        let faults: [(Edit, &str); 5] = [
            (|pod| pod["metadata"]["uid"] = json!(null), "metadata.uid: it is missing"),
            (
                |pod| pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("2 cores"),
                "spec.containers[\"main\"].resources.limits.cpu: ",
            ),
            (|pod| pod["spec"]["overhead"]["memory"] = json!([1]), "spec.overhead.memory: [1] is no amount"),
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

//! The scheduler's allocation of a resource claim, as the API server reports it.
//!
//! The kubelet names the claims that it wants prepared, but not their devices. A claim of the host device is read before that, when the scheduler
//! waits for its condition.
//!
//! # Rights
//! `resourceclaims` of `resource.k8s.io`: get.

use futures_util::{FutureExt as _, future::BoxFuture};
use kube::{Api, Client};
use numaward_engine::{
    Terms,
    claims::{
        allocator::Amounts,
        devices::{self, DRIVER, HOST},
    },
    quantity::Quantity,
};
use numaward_topology::NodeId;

use super::{
    messages::{ClaimId, Device},
    parameters::{self, ParameterError},
};
use crate::api::{
    ApiMetrics, Cause, Operation, RequestError,
    claims::{AllocationResult, ClaimBody, ClaimStatus, DeviceConfiguration, MAX_RESULTS},
    object::ApiObject,
};

/// Source of parameters of a device class.
const FROM_CLASS: &str = "FromClass";

/// An allocated claim of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// UID of the pod, as the API server has it.
    pub pod: String,
    /// Parts of this host's devices.
    pub parts: Vec<ClaimPart>,
}

/// A part of a device that a claim consumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimPart {
    /// The request that the device serves, without the name of an alternative.
    pub request: String,
    pub device: String,
    pub share_id: Option<String>,
    /// `None` for the device of the whole host.
    pub node: Option<NodeId>,
    pub consumed: Amounts,
    /// Terms by the parameters of the claim and its class.
    pub terms: Terms,
    /// Terms by the parameters of the class alone, which an administrator writes.
    pub class_terms: Terms,
}

impl ClaimPart {
    /// Checks that the claim itself asks for nothing that a quota does not count.
    ///
    /// # Errors
    ///
    /// The claim hides siblings, or names a class of L3 caches and memory bandwidth, that its device class does not have.
    pub fn check_quota(&self) -> Result<(), ClaimError> {
        let Self { terms, class_terms, .. } = self;
        if terms.hide_siblings && !class_terms.hide_siblings {
            return Err(ClaimError::BeyondQuota("hideSiblings"));
        }
        if terms.resctrl_class != class_terms.resctrl_class {
            return Err(ClaimError::BeyondQuota("resctrlClass"));
        }
        Ok(())
    }

    /// Returns the answer for the kubelet.
    pub fn prepared(&self, node: &str, cdi_name: &str) -> Device {
        let pool_name = if self.node.is_none() { devices::host_pool(node) } else { node.to_owned() };
        Device {
            request_names: vec![self.request.clone()],
            pool_name,
            device_name: self.device.clone(),
            cdi_device_ids: vec![cdi_name.to_owned()],
            share_id: self.share_id.clone(),
        }
    }
}

/// A claim that is allocated to the device of this whole host.
#[derive(Debug)]
pub struct HostClaim {
    pub id: ClaimId,
    pub share_id: Option<String>,
    /// Condition of this allocation for which the scheduler waits: true if it is [`devices::PLACED`], false if it is [`devices::NO_ROOM`].
    pub outcome: Option<bool>,
    pub allocated: Result<AllocatedClaim, ClaimError>,
}

/// Reason why a claim cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("the API server does not return the resource claim: {0}")]
    Request(String),
    #[error("the resource claim was deleted")]
    Deleted,
    #[error("the resource claim cannot be read: {0}")]
    Unreadable(String),
    #[error(
        "the resource claim has the UID {found}, and the kubelet asks for {asked}: it was deleted and created again"
    )]
    OtherUid { asked: String, found: String },
    #[error("the resource claim is not allocated")]
    NotAllocated,
    #[error(
        "the resource claim is reserved for {0} consumers; {DRIVER} gives a claim to the containers of one pod: use a \
         resourceClaimTemplate"
    )]
    Shared(usize),
    #[error("the resource claim has no device of {DRIVER}")]
    NoDevice,
    #[error(
        "the requests of the resource claim have different opaque parameters for {DRIVER}, which has one reservation for all: write the \
         parameters for all requests, or several resource claims"
    )]
    DifferentParameters,
    #[error(
        "the resource claim has other devices of {DRIVER} beside the one of the whole host: use several resource claims"
    )]
    BesideHost,
    #[error("the resource claim has more than {MAX_RESULTS} devices")]
    TooManyDevices,
    #[error("the device {0} of the resource claim is of the pool {1}, and this host has the pool {2}")]
    OtherPool(String, String, String),
    #[error(
        "the device {0} of the resource claim is not one of this host: {DRIVER} has node-N, memory-N and {HOST}"
    )]
    UnknownDevice(String),
    #[error("the resource claim has the device {0} with adminAccess, which {DRIVER} does not support")]
    AdminAccess(String),
    #[error(
        "the resource claim has no consumedCapacity of the device {0}: enable the feature gate DRAConsumableCapacity of the \
         API server and the scheduler"
    )]
    NoAmounts(String),
    #[error("the resource claim consumes {1:?} of {0} of the device {2}: {3}")]
    Amount(String, String, String, String),
    #[error("the resource claim requests neither CPUs nor memory of the device {0}")]
    Nothing(String),
    #[error("the opaque parameters of the {0} for {DRIVER} are refused: {1}")]
    Parameters(ParameterSource, ParameterError),
    #[error(
        "the opaque parameters of the resource claim have {0}, which takes more than a quota counts: only a device class may have it, or \
         claims in the namespaces of kubernetes.beyondQuotaNamespaces"
    )]
    BeyondQuota(&'static str),
}

/// Origin of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum ParameterSource {
    #[display("device class of the resource claim")]
    Class,
    #[display("resource claim")]
    Claim,
}

/// Reader of the allocations of claims.
pub struct AllocationReader {
    pub client: Client,
    /// Name of this Kubernetes node, and of the pool of its devices.
    pub node: String,
    pub metrics: ApiMetrics,
}

impl AllocationReader {
    /// Returns the allocation of a claim.
    ///
    /// # Errors
    ///
    /// The claim is not allocated to devices of this host, or not to one pod.
    pub fn read<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<AllocatedClaim, ClaimError>> {
        async move {
            let found = self.get(&claim.namespace, &claim.name).await?;
            allocation(found, &self.node, claim)
        }
        .boxed()
    }

    /// Returns a claim if it is allocated to the device of this whole host.
    ///
    /// # Errors
    ///
    /// The claim cannot be read.
    pub fn read_of_host<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<HostClaim>, ClaimError>> {
        async move {
            match self.get(namespace, name).await {
                Ok(found) => Ok(host_claim(found, &self.node, namespace, name)),
                Err(ClaimError::Deleted) => Ok(None),
                Err(error) => Err(error),
            }
        }
        .boxed()
    }

    async fn get(&self, namespace: &str, name: &str) -> Result<ApiObject<ClaimBody>, ClaimError> {
        let api: Api<ApiObject<ClaimBody>> = Api::namespaced(self.client.clone(), namespace);
        api.get(name).await.map_err(|error| {
            let error = RequestError::from(error);
            self.metrics.failed(Operation::Claim, &error);
            match error.cause {
                Cause::NotFound => ClaimError::Deleted,
                _ => ClaimError::Request(error.to_string()),
            }
        })
    }
}

/// Returns the claim in an object of the API server if it is allocated to the device of the whole host.
fn host_claim(found: ApiObject<ClaimBody>, node: &str, namespace: &str, name: &str) -> Option<HostClaim> {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    let id = ClaimId { namespace, name, uid: found.identity.uid.clone()? };
    let (pool, status) = (devices::host_pool(node), found.fields.as_ref().ok()?.status.as_ref()?);
    let results = &status.allocation.as_ref()?.devices.as_ref()?.results.items;
    let is_host = |driver: &str, of: &str, device: &str| driver == DRIVER && of == pool && device == HOST;
    let of_host = results.iter().find(|result| is_host(&result.driver, &result.pool, &result.device))?;
    let share_id = of_host.share_id.clone();
    let entry = status.devices.items.iter().find(|of| {
        // The state of an earlier allocation has another share.
        let is_share = of.share_id.as_ref().map(|id| &id.0) == share_id.as_ref();
        is_share && is_host(&of.driver.0, &of.pool.0, &of.device.0)
    });
    let conditions = entry.and_then(|entry| entry.conditions.as_ref());
    let is_true = |name: &str| {
        let mut conditions = conditions.into_iter().flat_map(|conditions| &conditions.items);
        conditions.any(|condition| condition.name.0 == name && condition.status.0 == "True")
    };
    let outcome = match (is_true(devices::PLACED), is_true(devices::NO_ROOM)) {
        (_, true) => Some(false),
        (true, false) => Some(true),
        (false, false) => None,
    };
    let allocated = allocation(found, node, &id);
    Some(HostClaim { id, share_id, outcome, allocated })
}

/// Returns the allocation in an object of the API server.
fn allocation(
    found: ApiObject<ClaimBody>,
    node: &str,
    claim: &ClaimId,
) -> Result<AllocatedClaim, ClaimError> {
    let uid = found.identity.uid.unwrap_or_default();
    if uid != claim.uid {
        return Err(ClaimError::OtherUid { asked: claim.uid.clone(), found: uid });
    }
    let body = found.fields.map_err(ClaimError::Unreadable)?;
    let ClaimStatus { allocation, reserved_for, .. } = body.status.ok_or(ClaimError::NotAllocated)?;
    let devices = allocation.and_then(|allocation| allocation.devices).ok_or(ClaimError::NotAllocated)?;
    let pod = match reserved_for.items.as_slice() {
        [pod] => pod.uid.clone(),
        _ => return Err(ClaimError::Shared(reserved_for.count)),
    };
    if devices.results.count > MAX_RESULTS || devices.config.count > MAX_RESULTS {
        return Err(ClaimError::TooManyDevices);
    }
    let own = devices.results.into_iter().filter(|result| result.driver == DRIVER);
    let config = &devices.config.items;
    let parts = own.map(|result| part(result, node, config)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = parts.first() else { return Err(ClaimError::NoDevice) };
    if parts.len() > 1 && parts.iter().any(|part| part.node.is_none()) {
        return Err(ClaimError::BesideHost);
    }
    if parts.iter().any(|part| (&part.terms, &part.class_terms) != (&first.terms, &first.class_terms)) {
        return Err(ClaimError::DifferentParameters);
    }
    Ok(AllocatedClaim { pod, parts })
}

/// Adds the parameters for a request to these terms: those of the class, then those of the claim.
fn add_parameters(
    config: &[DeviceConfiguration],
    request: &str,
    of: ParameterSource,
    mut terms: Terms,
) -> Result<Terms, ClaimError> {
    for config in config {
        let Some(opaque) = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        let source =
            if config.source.0 == FROM_CLASS { ParameterSource::Class } else { ParameterSource::Claim };
        let names = &config.requests;
        let main = request.split('/').next();
        let is_for =
            names.count == 0 || names.items.iter().any(|name| name == request || Some(name.as_str()) == main);
        if source == of && is_for {
            let text = opaque.parameters.as_ref().map_or("", |text| text.get());
            parameters::apply(text, &mut terms).map_err(|error| ClaimError::Parameters(source, error))?;
        }
    }
    Ok(terms)
}

fn part(
    result: AllocationResult,
    host: &str,
    config: &[DeviceConfiguration],
) -> Result<ClaimPart, ClaimError> {
    let device = result.device;
    let is_host = device == HOST;
    let pool = if is_host { devices::host_pool(host) } else { host.to_owned() };
    if result.pool != pool {
        return Err(ClaimError::OtherPool(device, result.pool, pool));
    }
    if result.admin_access == Some(true) {
        return Err(ClaimError::AdminAccess(device));
    }
    let node = devices::node_of_device(&device);
    if node.is_none() && !is_host {
        return Err(ClaimError::UnknownDevice(device));
    }
    let Some(consumed) = result.consumed_capacity else { return Err(ClaimError::NoAmounts(device)) };
    let mut amounts = Amounts::new();
    for (name, text) in consumed {
        let key = name.strip_prefix(DRIVER).and_then(|name| name.strip_prefix('/')).unwrap_or(&name);
        let quantity: Result<Quantity, _> = text.parse();
        let problem = match &quantity {
            Ok(_) if !devices::is_capacity(key) => "the devices have no such capacity".to_owned(),
            Ok(quantity) if quantity.units().is_none_or(|units| Quantity::whole(units) != *quantity) => {
                "it is not a whole number".to_owned()
            }
            Ok(quantity) => {
                amounts.insert(key.into(), *quantity);
                continue;
            }
            Err(error) => error.to_string(),
        };
        return Err(ClaimError::Amount(name, text, device, problem));
    }
    if amounts.values().all(|amount| amount.is_zero()) {
        return Err(ClaimError::Nothing(device));
    }
    let class_terms = add_parameters(config, &result.request, ParameterSource::Class, Terms::default())?;
    let terms = add_parameters(config, &result.request, ParameterSource::Claim, class_terms.clone())?;
    let request = result.request.split('/').next().unwrap_or_default().to_owned();
    Ok(ClaimPart { request, device, share_id: result.share_id, node, consumed: amounts, terms, class_terms })
}

/// Returns the allocation in the JSON text of a claim, for the fuzz target.
#[cfg(feature = "testing")]
pub fn read_text(text: &[u8], node: &str, claim: &ClaimId) -> Result<AllocatedClaim, ClaimError> {
    allocation(
        serde_json::from_slice(text).map_err(|error| ClaimError::Unreadable(error.to_string()))?,
        node,
        claim,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim_id() -> ClaimId {
        ClaimId { namespace: "ns".to_owned(), uid: "u1".to_owned(), name: "db".to_owned() }
    }

    fn result(device: &str, consumed: &Value) -> Value {
        json!({"request": "numa/one", "driver": DRIVER, "pool": "n1", "device": device, "shareID": "s1",
            "consumedCapacity": consumed})
    }

    /// Returns the allocation of a claim with these results, after a change.
    fn read(results: &[Value], change: impl FnOnce(&mut Value)) -> Result<AllocatedClaim, String> {
        let mut claim = json!({"metadata": {"name": "db", "namespace": "ns", "uid": "u1"},
            "status": {"allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod-1"}]}});
        change(&mut claim);
        let found = serde_json::from_str(&claim.to_string()).unwrap();
        allocation(found, "n1", &claim_id()).map_err(|error| error.to_string())
    }

    #[test]
    fn reads_parts_of_devices() {
        let other = json!({"request": "gpu", "driver": "gpu.example", "pool": "x", "device": "g"});
        let amounts = json!({"cpu": "2", "memory": "3Gi", "hugepages2Mi": "0"});
        let read = read(&[other, result("node-1", &amounts)], |_| {}).unwrap();
        assert_eq!(read.pod, "pod-1");
        let [part] = &read.parts[..] else { panic!("{read:?}") };
        assert_eq!(
            (part.request.as_str(), part.node, part.share_id.as_deref()),
            ("numa", Some(NodeId(1)), Some("s1"))
        );
        assert_eq!(
            (part.consumed["cpu"], part.consumed["memory"]),
            (Quantity::whole(2), Quantity::whole(3 << 30))
        );
        let answer = part.prepared("n1", "numaward.io/claim=u1");
        assert_eq!(
            (answer.request_names, answer.cdi_device_ids),
            (vec!["numa".to_owned()], vec!["numaward.io/claim=u1".to_owned()])
        );
    }

    fn of_host(change: impl FnOnce(&mut Value)) -> Option<HostClaim> {
        let mut result = result("host", &json!({"cpu": "6", "memory": "3Gi"}));
        result["pool"] = json!("n1/host");
        let gpu = json!({"driver": "gpu.example", "pool": "x", "device": "g", "conditions": [{"type": "Ready", "status": "True"}]});
        let mut claim = json!({"metadata": {"name": "db", "namespace": "ns", "uid": "u1", "resourceVersion": "7"},
            "status": {"allocation": {"devices": {"results": [result]}}, "devices": [gpu],
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod-1"}]}});
        change(&mut claim);
        host_claim(serde_json::from_str(&claim.to_string()).unwrap(), "n1", "ns", "db")
    }

    #[test]
    fn host_claim_has_progress_of_its_allocation() {
        let claim = of_host(|_| {}).unwrap();
        let allocated = claim.allocated.unwrap();
        assert_eq!((allocated.parts.len(), allocated.parts[0].node), (1, None));
        assert_eq!(allocated.parts[0].prepared("n1", "x").pool_name, "n1/host");
        assert_eq!((claim.id, claim.share_id.as_deref(), claim.outcome), (claim_id(), Some("s1"), None));
        let with = |share: &str, conditions: Value| {
            of_host(|claim| {
                let state = json!({"driver": DRIVER, "pool": "n1/host", "device": "host", "shareID": share, "conditions": conditions});
                claim["status"]["devices"].as_array_mut().unwrap().push(state);
            })
            .unwrap()
        };
        let condition = |name: &str, status: &str| json!({"type": name, "status": status});
        let outcome = |share: &str, conditions: Value| with(share, conditions).outcome;
        assert_eq!(outcome("s1", json!([condition(devices::PLACED, "True")])), Some(true));
        assert_eq!(outcome("s1", json!([condition(devices::PLACED, "False")])), None);
        assert_eq!(outcome("s1", json!([condition(devices::NO_ROOM, "True")])), Some(false));
        assert_eq!(outcome("s1", Value::Null), None);
        // The scheduler has allocated the claim again.
        assert_eq!(outcome("s0", json!([condition(devices::PLACED, "True")])), None);
    }

    #[test]
    fn other_claims_are_not_of_the_host() {
        let result = |claim: &mut Value, key: &str, value: &str| {
            claim["status"]["allocation"]["devices"]["results"][0][key] = json!(value);
        };
        assert!(of_host(|claim| result(claim, "pool", "n2/host")).is_none());
        assert!(of_host(|claim| result(claim, "driver", "gpu.example")).is_none());
        assert!(of_host(|claim| claim["status"]["allocation"] = Value::Null).is_none());
        let beside = of_host(|claim| {
            let results = claim["status"]["allocation"]["devices"]["results"].as_array_mut().unwrap();
            let mut node = results[0].clone();
            (node["device"], node["pool"]) = (json!("node-0"), json!("n1"));
            results.push(node);
        });
        let error = beside.unwrap().allocated.unwrap_err().to_string();
        assert!(error.contains("beside the one of the whole host"), "{error}");
    }

    #[test]
    fn refuses_other_claims() {
        let two = json!({"cpu": "2"});
        let of_node = || vec![result("node-1", &two)];
        let error = |results: &[Value], change: fn(&mut Value)| read(results, change).unwrap_err();
        for (results, change, expected) in [
            (of_node(), (|claim| claim["metadata"]["uid"] = json!("u2")) as fn(&mut Value), "the UID u2"),
            (of_node(), |claim| claim["status"] = Value::Null, "not allocated"),
            (of_node(), |claim| claim["status"]["allocation"] = Value::Null, "not allocated"),
            (
                of_node(),
                |claim| claim["status"]["reservedFor"] = json!([{"uid": "a"}, {"uid": "b"}]),
                "2 consumers",
            ),
            (of_node(), |claim| claim["status"]["reservedFor"] = Value::Null, "0 consumers"),
            (of_node(), |claim| claim["status"] = json!([]), "cannot be read"),
            (
                vec![json!({"request": "g", "driver": "gpu.example", "pool": "n1", "device": "node-0"})],
                |_| {},
                "no device of numaward.io",
            ),
            (Vec::new(), |_| {}, "no device of numaward.io"),
            (
                of_node(),
                |claim| claim["status"]["allocation"]["devices"]["results"][0]["pool"] = json!("n2"),
                "the pool n2",
            ),
            (
                of_node(),
                |claim| claim["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = json!(true),
                "adminAccess",
            ),
            (
                of_node(),
                |claim| {
                    claim["status"]["allocation"]["devices"]["config"] =
                        json!([{"source": "FromClaim", "opaque": {"driver": DRIVER}}]);
                },
                "the opaque parameters of the resource claim for numaward.io are refused: parameters: they are not an object",
            ),
            (
                of_node(),
                |claim| {
                    let parameters =
                        json!({"apiVersion": "numaward.io/v1alpha1", "kind": "Placement", "nodes": "0"});
                    claim["status"]["allocation"]["devices"]["config"] = json!([{"source": "FromClass", "opaque": {"driver": DRIVER, "parameters": parameters}}]);
                },
                "the opaque parameters of the device class of the resource claim for numaward.io are refused: nodes:",
            ),
            (vec![result("gpu-1", &two)], |_| {}, "device gpu-1"),
            (vec![result("node-1", &Value::Null)], |_| {}, "DRAConsumableCapacity"),
            (vec![result("node-1", &json!({"cpu": "1500m"}))], |_| {}, "whole"),
            (vec![result("node-1", &json!({"cpu": "-1"}))], |_| {}, "negative"),
            (vec![result("node-1", &json!({"watts": "1"}))], |_| {}, "no such capacity"),
            (vec![result("node-1", &json!({"cpu": "0"}))], |_| {}, "neither CPUs nor memory"),
            (vec![result("node-1", &two); 300], |_| {}, "more than 256"),
        ] {
            let error = error(&results, change);
            assert!(error.contains(expected), "{expected}: {error}");
        }
        // Parameters for another driver, and the amounts of its devices, are of no concern.
        let other = |claim: &mut Value| {
            claim["status"]["allocation"]["devices"]["config"] =
                json!([{"opaque": {"driver": "gpu.example"}}, {}]);
        };
        assert!(read(&of_node(), other).is_ok());
    }

    #[test]
    fn requests_of_a_claim_have_the_same_parameters() {
        let results = [result("node-0", &json!({"cpu": "2"})), result("node-1", &json!({"memory": "1Gi"}))];
        let parts = read(&results, |_| {}).unwrap().parts;
        assert_eq!(
            parts.iter().map(|part| part.node).collect::<Vec<_>>(),
            [0, 1].map(|node| Some(NodeId(node)))
        );
        let with = |requests: &[&str]| {
            let mut other = result("node-1", &json!({"cpu": "1"}));
            other["request"] = json!("other");
            let parameters =
                json!({"apiVersion": "numaward.io/v1alpha1", "kind": "Placement", "sameCache": true});
            let config =
                json!([{"requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}}]);
            read(&[results[0].clone(), other], |claim| {
                claim["status"]["allocation"]["devices"]["config"] = config;
            })
        };
        assert!(with(&[]).unwrap().parts.iter().all(|part| part.terms.same_cache));
        let error = with(&["other"]).unwrap_err();
        assert!(error.contains("different opaque parameters"), "{error}");
    }

    #[test]
    fn claim_wins_over_its_class() {
        let parameters = |source: &str, requests: &[&str], fields: Value| {
            let mut parameters = json!({"apiVersion": "numaward.io/v1alpha1", "kind": "Placement"});
            parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            json!({"source": source, "requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}})
        };
        let read = |config: Value| {
            let results = [result("node-1", &json!({"cpu": "2"}))];
            let claim = read(&results, |claim| claim["status"]["allocation"]["devices"]["config"] = config);
            claim.unwrap().parts.remove(0)
        };
        // The order of the list does not matter.
        let part = read(json!([
            parameters("FromClaim", &["numa"], json!({"sameCache": false, "isolate": true})),
            parameters("FromClaim", &["other"], json!({"resctrlClass": "other"})),
            parameters("FromClaim", &["numa/one"], json!({"cpuKinds": ["isolated"]})),
            parameters("FromClaim", &["numa/two"], json!({"cpuKinds": ["efficiency"]})),
            parameters(
                "FromClass",
                &[],
                json!({"sameCache": true, "hideSiblings": true, "resctrlClass": "db"})
            ),
        ]));
        let class = Terms {
            same_cache: true,
            hide_siblings: true,
            resctrl_class: Some("db".to_owned()),
            ..Terms::default()
        };
        assert_eq!(part.class_terms, class);
        let kinds = [numaward_engine::policy::CpuKind::Isolated].into();
        assert_eq!(part.terms, Terms { same_cache: false, isolate: true, cpu_kinds: kinds, ..class });
        part.check_quota().unwrap();
        for (fields, expected) in
            [(json!({"hideSiblings": true}), "hideSiblings"), (json!({"resctrlClass": "db"}), "resctrlClass")]
        {
            let error = read(json!([parameters("FromClaim", &[], fields)])).check_quota().unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

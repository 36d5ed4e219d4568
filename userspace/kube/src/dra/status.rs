//! Status of the devices of an allocated claim, which the driver writes into the claim.
//!
//! The list `status.devices` has the devices of all drivers. A patch contains the whole list, and the version of the claim that was
//! read, so it is refused if another client has changed the claim meanwhile. Then it is made again. What other drivers and other parts of
//! this driver have written stays.
//!
//! # Rights
//! `resourceclaims`: get. `resourceclaims/status`: patch. `resourceclaims/driver` with the name of the driver: `associated-node:patch`
//! (since Kubernetes 1.36).
//!
//! Source: KEP-4817.

use std::collections::BTreeMap;

use futures_util::{FutureExt as _, future::BoxFuture};
use k8s_openapi::{api::resource::v1::ResourceClaim, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use numaward_engine::claims::devices::DRIVER;
use serde_json::{Value, json};

use super::messages::ClaimId;
use crate::api::{ApiMetrics, Cause, Operation, RequestError};

/// Number of attempts while other clients change the claim.
const MAX_ATTEMPTS: usize = 4;

/// A condition of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCondition {
    pub name: &'static str,
    pub is_true: bool,
    /// A word in CamelCase.
    pub reason: &'static str,
    pub message: String,
}

/// Conditions and data of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceStatus {
    /// Replace conditions of the same names.
    pub conditions: Vec<DeviceCondition>,
    /// A JSON object of at most 10 KiB.
    pub data: Value,
}

/// Error of a request for a status.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error(
        "the API server refuses the status of resource claims: {0} (apply deploy/components/dra again: it has the rights for it)"
    )]
    Forbidden(String),
    #[error("the status of a resource claim cannot be written: {0}")]
    Request(String),
}

/// Writer of the status of devices of this host.
pub struct StatusWriter {
    pub client: Client,
    /// Name of this Kubernetes node, and of the pool of its devices.
    pub node: String,
    pub metrics: ApiMetrics,
}

impl StatusWriter {
    /// Writes the status of devices of a claim, by name. Devices that the claim does not have are ignored, and so is a claim that is
    /// gone. Nothing is written if the claim has all of it.
    ///
    /// # Errors
    ///
    /// The API server refuses it, or other clients change the claim again and again.
    pub fn write<'a>(
        &'a self,
        claim: &'a ClaimId,
        devices: &'a BTreeMap<String, DeviceStatus>,
    ) -> BoxFuture<'a, Result<(), StatusError>> {
        async move {
            let resource = ApiResource::erase::<ResourceClaim>(&());
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.clone(), &claim.namespace, &resource);
            let mut attempts = 1;
            loop {
                match self.try_write(&api, claim, devices).await.map_err(RequestError::from) {
                    Ok(()) => return Ok(()),
                    Err(error) if error.cause == Cause::NotFound => return Ok(()),
                    Err(error) if error.cause == Cause::Conflict && attempts < MAX_ATTEMPTS => attempts += 1,
                    Err(error) => {
                        self.metrics.failed(Operation::ClaimStatus, &error);
                        let is_forbidden = error.cause == Cause::Forbidden;
                        let error = error.to_string();
                        return Err(if is_forbidden {
                            StatusError::Forbidden(error)
                        } else {
                            StatusError::Request(error)
                        });
                    }
                }
            }
        }
        .boxed()
    }

    async fn try_write(
        &self,
        api: &Api<DynamicObject>,
        claim: &ClaimId,
        devices: &BTreeMap<String, DeviceStatus>,
    ) -> Result<(), kube::Error> {
        let found = api.get(&claim.name).await?;
        if found.metadata.uid.as_ref() != Some(&claim.uid) {
            return Ok(());
        }
        let time = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let Some(list) = changed(&found.data["status"], &self.node, devices, &time) else { return Ok(()) };
        let patch = json!({
            "metadata": { "uid": claim.uid, "resourceVersion": found.metadata.resource_version },
            "status": { "devices": list },
        });
        api.patch_status(&claim.name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    }
}

/// Returns the list of devices with the status of these; `None` if the claim has it already.
fn changed(
    status: &Value,
    pool: &str,
    devices: &BTreeMap<String, DeviceStatus>,
    time: &str,
) -> Option<Vec<Value>> {
    const IDENTITY: [&str; 4] = ["driver", "pool", "device", "shareID"];
    let before = status["devices"].as_array().cloned().unwrap_or_default();
    let mut list = before.clone();
    let results = status["allocation"]["devices"]["results"].as_array().into_iter().flatten();
    for result in results.filter(|result| result["driver"] == DRIVER && result["pool"] == pool) {
        let Some(wanted) = result["device"].as_str().and_then(|device| devices.get(device)) else { continue };
        let is_same = |entry: &Value| IDENTITY.iter().all(|field| entry[field] == result[field]);
        let index = list.iter().position(is_same).unwrap_or_else(|| {
            let mut entry = json!({});
            for field in IDENTITY.into_iter().filter(|field| !result[field].is_null()) {
                entry[field] = result[field].clone();
            }
            list.push(entry);
            list.len() - 1
        });
        let entry = &mut list[index];
        let mut conditions = entry["conditions"].as_array().cloned().unwrap_or_default();
        for wanted in &wanted.conditions {
            set_condition(&mut conditions, wanted, time);
        }
        entry["conditions"] = conditions.into();
        entry["data"] = wanted.data.clone();
    }
    (list != before).then_some(list)
}

fn set_condition(conditions: &mut Vec<Value>, wanted: &DeviceCondition, time: &str) {
    let status = if wanted.is_true { "True" } else { "False" };
    let index = conditions.iter().position(|condition| condition["type"] == wanted.name);
    let before = index.map(|index| &conditions[index]);
    // The time of the last change of the status.
    let since =
        before.filter(|before| before["status"] == status).map(|before| before["lastTransitionTime"].clone());
    let condition = json!({
        "type": wanted.name,
        "status": status,
        "reason": wanted.reason,
        "message": wanted.message,
        "lastTransitionTime": since.unwrap_or_else(|| json!(time)),
    });
    match index {
        Some(index) => conditions[index] = condition,
        None => conditions.push(condition),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;
    use crate::api::{self, fake::FakeApiServer};

    const CLAIM: &str = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/db";

    fn condition(is_true: bool, message: &str) -> DeviceCondition {
        DeviceCondition { name: "numaward.io/kept", is_true, reason: "Misses", message: message.to_owned() }
    }

    fn device(conditions: Vec<DeviceCondition>, cpus: &str) -> BTreeMap<String, DeviceStatus> {
        [("node-1".to_owned(), DeviceStatus { conditions, data: json!({ "cpus": cpus }) })].into()
    }

    fn allocated() -> Value {
        json!({ "allocation": { "devices": { "results": [
            { "request": "gpu", "driver": "gpu.example", "pool": "n1", "device": "node-1" },
            { "request": "numa", "driver": "numaward.io", "pool": "n1", "device": "node-1", "shareID": "s1" },
            { "request": "numa", "driver": "numaward.io", "pool": "n2", "device": "node-1" },
        ] } } })
    }

    #[test]
    fn other_entries_and_conditions_stay() {
        let mut status = allocated();
        let gpu = json!({ "driver": "gpu.example", "pool": "n1", "device": "node-1", "data": { "a": 1 } });
        let placed = json!({ "type": "numaward.io/placed", "status": "True", "reason": "Placed", "message": "",
            "lastTransitionTime": "t0" });
        status["devices"] = json!([
            gpu,
            { "driver": "numaward.io", "pool": "n1", "device": "node-1", "shareID": "s1", "conditions": [placed] },
        ]);
        let written = changed(&status, "n1", &device(vec![condition(true, "")], "2-3"), "t1").unwrap();
        let kept = json!({ "type": "numaward.io/kept", "status": "True", "reason": "Misses", "message": "",
            "lastTransitionTime": "t1" });
        let entry = json!({ "driver": "numaward.io", "pool": "n1", "device": "node-1", "shareID": "s1",
            "conditions": [placed, kept], "data": { "cpus": "2-3" } });
        assert_eq!(written, [gpu, entry]);

        status["devices"] = written.into();
        assert_eq!(changed(&status, "n1", &device(vec![condition(true, "")], "2-3"), "t2"), None);
        // The time is that of the last change of the status, not of the message.
        let told = changed(&status, "n1", &device(vec![condition(true, "more")], "2-3"), "t2").unwrap();
        assert_eq!(told[1]["conditions"][1]["lastTransitionTime"], "t1");
        let broken = changed(&status, "n1", &device(vec![condition(false, "")], "2-3"), "t2").unwrap();
        assert_eq!(broken[1]["conditions"][1]["lastTransitionTime"], "t2");
        assert_eq!(changed(&json!({}), "n1", &device(vec![], "2"), "t2"), None, "not allocated");
    }

    #[tokio::test]
    async fn status_is_written_again_after_conflict() {
        let server = FakeApiServer::start().await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, server.kubeconfig()).unwrap();
        let client = api::connect(Some(&kubeconfig)).await.unwrap();
        let writer = StatusWriter { client, node: "n1".to_owned(), metrics: ApiMetrics::default() };
        let id = ClaimId { namespace: "ns".to_owned(), uid: "u1".to_owned(), name: "db".to_owned() };
        let wanted = device(vec![condition(true, "")], "2-3");
        writer.write(&id, &wanted).await.unwrap();
        server.put_claim(
            json!({ "metadata": { "name": "db", "namespace": "ns", "uid": "u1" }, "status": allocated() }),
        );
        server.refuse_next(&format!("{CLAIM}/status"), StatusCode::CONFLICT);
        writer.write(&id, &wanted).await.unwrap();
        let devices = server.claim("ns", "db").unwrap()["status"]["devices"].take();
        assert_eq!((&devices[0]["data"], devices.as_array().unwrap().len()), (&json!({ "cpus": "2-3" }), 1));
        let count = server.requests().len();
        writer.write(&id, &wanted).await.unwrap();
        assert_eq!(server.requests().len(), count + 1, "read, and not written");

        // The claim was created again.
        let other = ClaimId { uid: "u0".to_owned(), ..id.clone() };
        writer.write(&other, &device(vec![], "0")).await.unwrap();
        assert_eq!(server.claim("ns", "db").unwrap()["status"]["devices"], devices);
        server.refuse_next(&format!("{CLAIM}/status"), StatusCode::FORBIDDEN);
        let error = writer.write(&id, &device(vec![], "0")).await.unwrap_err();
        assert!(error.to_string().contains("deploy/components/dra"), "{error}");
    }
}

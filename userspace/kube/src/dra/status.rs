//! Status of the devices of an allocated claim, which the driver writes into the claim.
//!
//! The list `status.devices` has the devices of all drivers. A patch contains the whole list, and the version of the claim that was
//! read, so it is refused if another client has changed the claim meanwhile. Then it is made again. Entries of other drivers and other
//! conditions stay.
//!
//! # Rights
//! `resourceclaims`: get. `resourceclaims/status`: patch. `resourceclaims/driver` with the name of the driver: `associated-node:patch`
//! (since Kubernetes 1.36).
//!
//! Source: KEP-4817.

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
/// Maximum length of the reason of a condition; the maximum of the API is 1024.
const MAX_REASON_BYTES: usize = 256;
/// Maximum length of the message of a condition; the maximum of the API is 32768. The scheduler copies it into an event.
const MAX_MESSAGE_BYTES: usize = 768;

/// A device that is allocated to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatedDevice<'a> {
    pub pool: &'a str,
    pub device: &'a str,
    /// Differs between allocations.
    pub share_id: Option<&'a str>,
}

/// A condition of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCondition {
    pub name: &'static str,
    pub is_true: bool,
    /// A word in CamelCase; another text is replaced.
    pub reason: String,
    /// Truncated if it is too long.
    pub message: String,
}

/// Conditions and data of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceStatus {
    /// Replace conditions of the same names.
    pub conditions: Vec<DeviceCondition>,
    /// A JSON object of at most 10 KiB; `None` keeps the present one.
    pub data: Option<Value>,
}

/// Returns the status of a device; `None` to leave it as it is.
pub type StatusOf<'a> = &'a (dyn Fn(AllocatedDevice<'_>) -> Option<DeviceStatus> + Sync);

/// Error of a request for a status.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error(
        "the API server refuses the status of resource claims: {0} (apply deploy/components/dra again: it has the rights for it)"
    )]
    Forbidden(String),
    #[error("the status of a resource claim cannot be written: {0}")]
    Request(String),
    #[error("the resource claim is no longer allocated to the device")]
    NotAllocated,
}

/// Writer of the status of devices of this driver.
#[derive(Clone)]
pub struct StatusWriter {
    pub client: Client,
    pub metrics: ApiMetrics,
}

impl StatusWriter {
    /// Writes the status of the devices of a claim, unless the claim has it already.
    ///
    /// # Errors
    ///
    /// The claim is gone or has no device with a status; the API server refuses it; or other clients change the claim again and again.
    pub fn write<'a>(
        &'a self,
        claim: &'a ClaimId,
        status_of: StatusOf<'a>,
    ) -> BoxFuture<'a, Result<(), StatusError>> {
        async move {
            let resource = ApiResource::erase::<ResourceClaim>(&());
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.clone(), &claim.namespace, &resource);
            let mut attempts = 1;
            loop {
                match self.try_write(&api, claim, status_of).await.map_err(RequestError::from) {
                    Ok(true) => return Ok(()),
                    Ok(false) => return Err(StatusError::NotAllocated),
                    Err(error) if error.cause == Cause::NotFound => return Err(StatusError::NotAllocated),
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

    /// Writes once. Returns false if the claim has no device with a status.
    async fn try_write(
        &self,
        api: &Api<DynamicObject>,
        claim: &ClaimId,
        status_of: StatusOf<'_>,
    ) -> Result<bool, kube::Error> {
        let found = api.get(&claim.name).await?;
        if found.metadata.uid.as_ref() != Some(&claim.uid) {
            return Ok(false);
        }
        let time = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let change = changed(&found.data["status"], status_of, &time);
        let Change::Devices(list) = change else { return Ok(change == Change::None) };
        let patch = json!({
            "metadata": { "uid": claim.uid, "resourceVersion": found.metadata.resource_version },
            "status": { "devices": list },
        });
        api.patch_status(&claim.name, &PatchParams::default(), &Patch::Merge(patch)).await.map(|_| true)
    }
}

/// A change of the list of devices.
#[derive(Debug, PartialEq)]
enum Change {
    /// The claim has no device with a status.
    NoDevice,
    /// The claim has the status already.
    None,
    Devices(Vec<Value>),
}

/// Returns the change that gives the devices of a claim their status.
fn changed(status: &Value, status_of: StatusOf<'_>, time: &str) -> Change {
    const IDENTITY: [&str; 4] = ["driver", "pool", "device", "shareID"];
    let before = status["devices"].as_array().cloned().unwrap_or_default();
    let (mut list, mut is_found) = (before.clone(), false);
    let results = status["allocation"]["devices"]["results"].as_array().into_iter().flatten();
    for result in results.filter(|result| result["driver"] == DRIVER) {
        let text = |field: &str| result[field].as_str();
        let (Some(pool), Some(device)) = (text("pool"), text("device")) else { continue };
        let device = AllocatedDevice { pool, device, share_id: text("shareID") };
        let Some(wanted) = status_of(device) else { continue };
        is_found = true;
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
        if let Some(data) = wanted.data {
            entry["data"] = data;
        }
    }
    match is_found {
        false => Change::NoDevice,
        true if list == before => Change::None,
        true => Change::Devices(list),
    }
}

fn set_condition(conditions: &mut Vec<Value>, wanted: &DeviceCondition, time: &str) {
    let status = if wanted.is_true { "True" } else { "False" };
    let index = conditions.iter().position(|condition| condition["type"] == wanted.name);
    let before = index.map(|index| &conditions[index]);
    // The time of the last change of the status.
    let since =
        before.filter(|before| before["status"] == status).map(|before| before["lastTransitionTime"].clone());
    let cut =
        |text: &str, most: usize| text.get(..text.floor_char_boundary(most)).unwrap_or_default().to_owned();
    let reason = &wanted.reason;
    let is_word = reason.starts_with(|c: char| c.is_ascii_alphabetic())
        && reason.chars().all(|c| c.is_ascii_alphanumeric());
    let condition = json!({
        "type": wanted.name,
        "status": status,
        "reason": if is_word { cut(reason, MAX_REASON_BYTES) } else { "Other".to_owned() },
        "message": cut(&wanted.message, MAX_MESSAGE_BYTES),
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

    const STATUS: &str = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/db/status";

    fn condition(is_true: bool, message: &str) -> DeviceCondition {
        let (reason, message) = ("Misses".to_owned(), message.to_owned());
        DeviceCondition { name: "numaward.io/kept", is_true, reason, message }
    }

    /// Returns the status of `node-1` of the present allocation.
    fn device(
        conditions: Vec<DeviceCondition>,
        cpus: &str,
    ) -> impl Fn(AllocatedDevice<'_>) -> Option<DeviceStatus> + Sync {
        let status = DeviceStatus { conditions, data: Some(json!({ "cpus": cpus })) };
        let wanted = AllocatedDevice { pool: "n1", device: "node-1", share_id: Some("s1") };
        move |device| (device == wanted).then(|| status.clone())
    }

    fn allocated() -> Value {
        json!({ "allocation": { "devices": { "results": [
            { "request": "gpu", "driver": "gpu.example", "pool": "n1", "device": "node-1", "shareID": "s1" },
            { "request": "numa", "driver": "numaward.io", "pool": "n1", "device": "node-1", "shareID": "s1" },
            { "request": "numa", "driver": "numaward.io", "pool": "n2", "device": "node-1" },
        ] } } })
    }

    fn devices(change: Change) -> Vec<Value> {
        let Change::Devices(devices) = change else { panic!("{change:?}") };
        devices
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
        let kept = device(vec![condition(true, "")], "2-3");
        let written = devices(changed(&status, &kept, "t1"));
        let condition_kept = json!({ "type": "numaward.io/kept", "status": "True", "reason": "Misses",
            "message": "", "lastTransitionTime": "t1" });
        let entry = json!({ "driver": "numaward.io", "pool": "n1", "device": "node-1", "shareID": "s1",
            "conditions": [placed, condition_kept], "data": { "cpus": "2-3" } });
        assert_eq!(written, [gpu, entry]);

        status["devices"] = written.into();
        assert_eq!(changed(&status, &kept, "t2"), Change::None);
        // The time is that of the last change of the status, not of the message.
        let told = devices(changed(&status, &device(vec![condition(true, "more")], "2-3"), "t2"));
        assert_eq!(told[1]["conditions"][1]["lastTransitionTime"], "t1");
        let broken = devices(changed(&status, &device(vec![condition(false, "")], "2-3"), "t2"));
        assert_eq!(broken[1]["conditions"][1]["lastTransitionTime"], "t2");
        assert_eq!(changed(&json!({}), &kept, "t2"), Change::NoDevice);
        let without_data = |_: AllocatedDevice<'_>| Some(DeviceStatus { conditions: Vec::new(), data: None });
        assert_eq!(devices(changed(&status, &without_data, "t2"))[1]["data"], json!({ "cpus": "2-3" }));
    }

    #[test]
    fn reason_and_message_are_limited() {
        let set = |reason: &str, message: &str| {
            let mut conditions = Vec::new();
            let wanted = DeviceCondition { reason: reason.to_owned(), ..condition(true, message) };
            set_condition(&mut conditions, &wanted, "t");
            let text = |field: &str| conditions[0][field].as_str().unwrap().to_owned();
            (text("reason"), text("message"))
        };
        assert_eq!(set("TopologyAffinityError", "a").0, "TopologyAffinityError");
        for reason in ["", "two words", "1"] {
            assert_eq!(set(reason, "a").0, "Other");
        }
        let (reason, message) = set(&"R".repeat(2000), &"ä".repeat(2000));
        assert_eq!((reason.len(), message.len()), (MAX_REASON_BYTES, MAX_MESSAGE_BYTES));
    }

    #[tokio::test]
    async fn status_is_written_again_after_conflict() {
        let server = FakeApiServer::start().await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, server.kubeconfig()).unwrap();
        let client = api::connect(Some(&kubeconfig)).await.unwrap();
        let writer = StatusWriter { client, metrics: ApiMetrics::default() };
        let id = ClaimId { namespace: "ns".to_owned(), uid: "u1".to_owned(), name: "db".to_owned() };
        let wanted = device(vec![condition(true, "")], "2-3");
        let gone = writer.write(&id, &wanted).await;
        assert!(matches!(gone, Err(StatusError::NotAllocated)), "{gone:?}");
        let metadata = json!({ "name": "db", "namespace": "ns", "uid": "u1" });
        server.put_claim(json!({ "metadata": metadata, "status": allocated() }));
        server.refuse_next(STATUS, StatusCode::CONFLICT);
        writer.write(&id, &wanted).await.unwrap();
        let devices = server.claim("ns", "db").unwrap()["status"]["devices"].take();
        assert_eq!((&devices[0]["data"], devices.as_array().unwrap().len()), (&json!({ "cpus": "2-3" }), 1));
        let count = server.requests().len();
        writer.write(&id, &wanted).await.unwrap();
        assert_eq!(server.requests().len(), count + 1, "read, and not written");

        // The claim was created again.
        let other = ClaimId { uid: "u0".to_owned(), ..id.clone() };
        let changed = writer.write(&other, &device(vec![], "0")).await;
        assert!(matches!(changed, Err(StatusError::NotAllocated)), "{changed:?}");
        assert_eq!(server.claim("ns", "db").unwrap()["status"]["devices"], devices);
        server.refuse_next(STATUS, StatusCode::FORBIDDEN);
        let error = writer.write(&id, &device(vec![], "0")).await.unwrap_err();
        assert!(error.to_string().contains("deploy/components/dra"), "{error}");
    }
}

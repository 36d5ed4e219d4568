//! Devices of resource claims, and their places, as DRA drivers publish them.
//!
//! # Problem
//! A device of a claim has no NUMA node in the pod. The claim's status names the device, and a `ResourceSlice` of the driver has the
//! attributes of the device.
//!
//! # Algorithm
//! The claims of a pod are read when the pod starts: the scheduler has allocated them, and the kubelet has prepared them. The slices of this
//! Kubernetes node are listed when a device is not known yet, or the last list is old. Nothing is watched, so pods without claims
//! cause no request.
//!
//! Only `resource.k8s.io/v1` is read, which Kubernetes has served by default since 1.34.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::{Api, Client, api::ListParams};
use numaward_topology::NodeId;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::{
    sync::Mutex as Lock,
    time::{Instant, timeout},
};

use super::{
    ApiMetrics, Cause, Operation, RequestError,
    object::{ApiObject, AtMost, Fields, ShortText},
};
use crate::pod::Pod;

/// Attributes of devices with names and meanings that Kubernetes defines.
const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
const PCI_ROOT: &str = "resource.kubernetes.io/pcieRoot";

/// Time for which a list of slices counts. Drivers rarely change the place of a device.
const LIST_VALIDITY: Duration = Duration::from_mins(1);
/// Minimum time between two lists, also if a device is not in the last one.
const MIN_LIST_DISTANCE: Duration = Duration::from_secs(5);
/// Number of slices in one page of a list. A slice has at most 128 devices.
const PAGE_SIZE: u32 = 16;
/// Maximum number of pages of a list. Further slices are ignored.
const MAX_PAGES: usize = 32;
/// Maximum number of claims of a pod that are read; Kubernetes allows as many.
const MAX_CLAIMS: usize = 64;
/// Maximum number of devices of a claim, and of parameters for them, that are read: more than Kubernetes allows.
pub(crate) const MAX_RESULTS: usize = 256;
/// Maximum number of conditions of a device that are read; Kubernetes allows 8.
const MAX_CONDITIONS: usize = 16;
/// Maximum number of consumers of a claim that are read; Kubernetes allows as many.
const MAX_CONSUMERS: usize = 256;

/// A device of a DRA driver. The names are unique within the cluster together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
#[display("{driver}/{pool}/{device}")]
pub struct ClaimedDevice {
    pub driver: String,
    pub pool: String,
    pub device: String,
}

/// Place of a device, as its driver publishes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DevicePlace {
    Node(NodeId),
    /// Address of a PCI device, such as `0000:81:00.0`. Not checked.
    PciDevice(String),
    /// A root complex of PCI Express, such as `pci0000:80`. Not checked.
    PciRoot(String),
}

/// Devices by container.
pub type DevicesByContainer = BTreeMap<String, BTreeSet<ClaimedDevice>>;

/// Reader of claims and slices. It reads nothing before it is connected. Clones share the state.
#[derive(Clone, Default)]
pub struct ClaimReader(Arc<ReaderState>);

#[derive(Default)]
struct ReaderState {
    connection: Mutex<Option<Connection>>,
    /// Time of the last attempt to list the slices. Locked while a list is in progress.
    listed: Lock<Option<Instant>>,
    /// The devices in the last list.
    places: Mutex<BTreeMap<ClaimedDevice, Option<DevicePlace>>>,
    /// Problems that the log has already.
    reported: Mutex<BTreeSet<(&'static str, &'static str)>>,
}

#[derive(Clone)]
struct Connection {
    client: Client,
    node: String,
    metrics: ApiMetrics,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ClaimBody {
    pub(crate) status: Option<ClaimStatus>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimStatus {
    pub(crate) allocation: Option<ClaimAllocation>,
    #[serde(default)]
    pub(crate) reserved_for: AtMost<Consumer, MAX_CONSUMERS>,
    /// States of allocated devices, as their drivers report them.
    #[serde(default)]
    pub(crate) devices: AtMost<DeviceStatus, MAX_RESULTS>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct DeviceStatus {
    pub(crate) driver: ShortText,
    pub(crate) pool: ShortText,
    pub(crate) device: ShortText,
    #[serde(rename = "shareID")]
    pub(crate) share_id: Option<ShortText>,
    pub(crate) conditions: Option<AtMost<DeviceCondition, MAX_CONDITIONS>>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct DeviceCondition {
    #[serde(rename = "type")]
    pub(crate) name: ShortText,
    pub(crate) status: ShortText,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Consumer {
    pub(crate) uid: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ClaimAllocation {
    pub(crate) devices: Option<AllocatedDevices>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct AllocatedDevices {
    #[serde(default)]
    pub(crate) results: AtMost<AllocationResult, MAX_RESULTS>,
    #[serde(default)]
    pub(crate) config: AtMost<DeviceConfiguration, MAX_RESULTS>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AllocationResult {
    /// `REQUEST`, or `REQUEST/SUBREQUEST` of a request with alternatives.
    pub(crate) request: String,
    pub(crate) driver: String,
    pub(crate) pool: String,
    pub(crate) device: String,
    /// True for a program that manages the device, and does not use it.
    pub(crate) admin_access: Option<bool>,
    #[serde(rename = "shareID")]
    pub(crate) share_id: Option<String>,
    /// Amounts of a device of which several claims have parts.
    pub(crate) consumed_capacity: Option<BTreeMap<String, String>>,
}

/// Parameters for drivers.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct DeviceConfiguration {
    /// `FromClass` or `FromClaim`.
    #[serde(default)]
    pub(crate) source: ShortText,
    /// The requests for which the parameters count; all if empty.
    #[serde(default)]
    pub(crate) requests: AtMost<String, MAX_RESULTS>,
    pub(crate) opaque: Option<OpaqueConfiguration>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct OpaqueConfiguration {
    pub(crate) driver: String,
    /// JSON text in a form that the driver defines.
    pub(crate) parameters: Option<Box<RawValue>>,
}

#[derive(Clone, Debug, Deserialize)]
struct SliceBody {
    spec: SliceSpec,
}

#[derive(Clone, Debug, Deserialize)]
struct SliceSpec {
    driver: String,
    pool: Pool,
    devices: Option<Vec<Device>>,
}

#[derive(Clone, Debug, Deserialize)]
struct Pool {
    name: String,
    generation: i64,
}

#[derive(Clone, Debug, Deserialize)]
struct Device {
    name: String,
    attributes: Option<BTreeMap<String, Attribute>>,
}

/// A value of an attribute. Values of other types are not read.
#[derive(Clone, Debug, Deserialize)]
struct Attribute {
    int: Option<i64>,
    string: Option<String>,
}

impl Device {
    fn place(&self) -> Option<DevicePlace> {
        let attribute = |name| self.attributes.as_ref()?.get(name);
        let text = |name| attribute(name)?.string.clone();
        let node = attribute(NUMA_NODE).and_then(|found| u32::try_from(found.int?).ok());
        node.map(|node| DevicePlace::Node(NodeId(node)))
            .or_else(|| text(PCI_BUS_ID).map(DevicePlace::PciDevice))
            .or_else(|| text(PCI_ROOT).map(DevicePlace::PciRoot))
    }
}

impl AllocationResult {
    /// Returns true if a container that uses this request of the claim, or all of them, uses the device.
    fn is_used_by(&self, request: Option<&str>) -> bool {
        let own = self.request.split('/').next();
        self.admin_access != Some(true) && request.is_none_or(|request| own == Some(request))
    }
}

impl ClaimReader {
    /// Starts to use this client. `node` is the name of this Kubernetes node.
    pub fn connect(&self, client: Client, node: String, metrics: ApiMetrics) {
        *self.0.connection.lock() = Some(Connection { client, node, metrics });
    }

    /// Returns the devices of a pod's claims by container. Claims that are not allocated, or not to this pod, have none.
    pub fn devices<'a>(&'a self, pod: &'a Pod) -> BoxFuture<'a, DevicesByContainer> {
        async move {
            let mut devices = DevicesByContainer::new();
            let Some(connection) = self.connection().filter(|_| !pod.claims.is_empty()) else {
                return devices;
            };
            let names: BTreeSet<&str> = pod.claims.iter().map(|used| used.claim.as_str()).collect();
            let claims: Api<ApiObject<ClaimBody>> =
                Api::namespaced(connection.client.clone(), &pod.id.namespace);
            for name in names.into_iter().take(MAX_CLAIMS) {
                let results = match claims.get(name).await {
                    Ok(claim) => results(claim, &pod.api_uid),
                    Err(error) => {
                        self.failed(&connection, Operation::Claim, &error.into());
                        continue;
                    }
                };
                for used in pod.claims.iter().filter(|used| used.claim == name) {
                    let of_container = devices.entry(used.container.clone()).or_default();
                    let results = results.iter().filter(|result| result.is_used_by(used.request.as_deref()));
                    of_container.extend(results.map(|AllocationResult { driver, pool, device, .. }| {
                        let (driver, pool, device) = (driver.clone(), pool.clone(), device.clone());
                        ClaimedDevice { driver, pool, device }
                    }));
                }
            }
            devices.retain(|_, devices| !devices.is_empty());
            devices
        }
        .boxed()
    }

    /// Returns the places of those devices that their driver publishes. Waits for a list of slices for at most this time; the list is
    /// completed nevertheless, for the next call.
    pub fn places<'a>(
        &'a self,
        devices: &'a BTreeSet<ClaimedDevice>,
        wait: Duration,
    ) -> BoxFuture<'a, BTreeMap<ClaimedDevice, DevicePlace>> {
        async move {
            let Some(connection) = self.connection().filter(|_| !devices.is_empty()) else {
                return BTreeMap::new();
            };
            let (reader, wanted) = (self.clone(), devices.clone());
            let listing = tokio::spawn(async move { reader.refresh(&connection, &wanted).await }.boxed());
            if timeout(wait, listing).await.is_err() {
                tracing::debug!("the API server does not list the resource slices in time");
            }
            let known = self.0.places.lock();
            let place = |device: &ClaimedDevice| Some((device.clone(), known.get(device)?.clone()?));
            devices.iter().filter_map(place).collect()
        }
        .boxed()
    }

    /// Lists the slices unless the last list is recent.
    async fn refresh(&self, connection: &Connection, wanted: &BTreeSet<ClaimedDevice>) {
        let mut listed = self.0.listed.lock().await;
        let age = listed.map_or(Duration::MAX, |listed| listed.elapsed());
        let is_complete = {
            let known = self.0.places.lock();
            wanted.iter().all(|device| known.contains_key(device))
        };
        if age >= LIST_VALIDITY || (age >= MIN_LIST_DISTANCE && !is_complete) {
            match list(connection).await {
                Ok(places) => *self.0.places.lock() = places,
                // The known places stay.
                Err(error) => self.failed(connection, Operation::Slices, &error),
            }
            // Calls that waited for this list do not repeat it.
            *listed = Some(Instant::now());
        }
    }

    fn connection(&self) -> Option<Connection> {
        self.0.connection.lock().clone()
    }

    /// Counts an error, and reports the first of its kind.
    fn failed(&self, connection: &Connection, operation: Operation, error: &RequestError) {
        connection.metrics.failed(operation, error);
        if !self.0.reported.lock().insert((operation.into(), error.cause.into())) {
            tracing::debug!(%error, "resource claims cannot be read");
            return;
        }
        // A claim that is deleted meanwhile is missing, too.
        if error.cause == Cause::NotFound && operation == Operation::Slices {
            tracing::warn!(
                "the API server does not serve resource.k8s.io/v1 (Kubernetes 1.34 or newer), and its older versions are not supported: the \
                 NUMA nodes of devices of resource claims are known only from the kubelet and from CDI files"
            );
            return;
        }
        tracing::warn!(
            %error,
            "resource claims and slices cannot be read from the API server: the NUMA nodes of their devices are known only from \
             the kubelet and from CDI files"
        );
    }
}

impl Fields for ClaimBody {
    type Kind = ResourceClaim;

    fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}

impl Fields for SliceBody {
    type Kind = ResourceSlice;

    fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}

/// Returns the devices of a claim that is reserved for this pod.
fn results(claim: ApiObject<ClaimBody>, pod_uid: &str) -> Vec<AllocationResult> {
    let body = match claim.fields {
        Ok(body) => body,
        Err(error) => {
            tracing::warn!(claim = claim.identity.name, %error, "a resource claim cannot be read, and is ignored");
            return Vec::new();
        }
    };
    let Some(ClaimStatus { allocation, reserved_for, .. }) = body.status else { return Vec::new() };
    if !reserved_for.into_iter().any(|consumer| consumer.uid == pod_uid) {
        return Vec::new();
    }
    let devices = allocation.and_then(|allocation| allocation.devices);
    devices.map(|devices| devices.results.items).unwrap_or_default()
}

/// Lists the slices of a Kubernetes node.
async fn list(connection: &Connection) -> Result<BTreeMap<ClaimedDevice, Option<DevicePlace>>, RequestError> {
    let slices: Api<ApiObject<SliceBody>> = Api::all(connection.client.clone());
    let mut page =
        ListParams::default().fields(&format!("spec.nodeName={}", connection.node)).limit(PAGE_SIZE);
    // A driver replaces the slices of a pool one by one: those of an older generation do not count.
    let mut pools: BTreeMap<(String, String), (i64, Vec<Device>)> = BTreeMap::new();
    for _ in 0..MAX_PAGES {
        let found = slices.list(&page).await?;
        for slice in found.items {
            let SliceSpec { driver, pool, devices } = match slice.fields {
                Ok(slice) => slice.spec,
                Err(error) => {
                    tracing::warn!(slice = slice.identity.name, %error, "a resource slice cannot be read, and is ignored");
                    continue;
                }
            };
            let known = pools.entry((driver, pool.name)).or_insert_with(|| (pool.generation, Vec::new()));
            if pool.generation > known.0 {
                *known = (pool.generation, Vec::new());
            }
            if pool.generation == known.0 {
                known.1.extend(devices.unwrap_or_default());
            }
        }
        match found.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    let devices = pools.into_iter().flat_map(|((driver, pool), (_, devices))| {
        devices.into_iter().map(move |device| {
            let place = device.place();
            (ClaimedDevice { driver: driver.clone(), pool: pool.clone(), device: device.name }, place)
        })
    });
    Ok(devices.collect())
}

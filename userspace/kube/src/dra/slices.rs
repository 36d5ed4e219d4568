//! Publishes the devices of this host as `ResourceSlice`s: one with the nodes, and one with the whole host. The scheduler tries the pool of the
//! host last, as its device has binding conditions.
//!
//! # Algorithm
//! The latest devices are in a [`watch`] channel. They are written when they differ from those written last, but at most once per
//! [`SlicePublisher::interval`], unless a [`Publication`] is awaited. The slices of this driver on this Kubernetes node are watched: if another client changes or deletes the
//! slice, it is written again. The kubelet deletes the slices of a driver that is not registered, and all slices when it starts.
//!
//! A write replaces the object, so that the answer has no fields of earlier writes: without an error, the API server drops fields with a
//! disabled feature gate. Each write has a new generation of the pool.
//!
//! # Dropped fields
//! Without `allowMultipleAllocations` and `requestPolicy` (`DRAConsumableCapacity`), the scheduler would give a device as a whole to one
//! pod. The slice is then deleted. So is that of the host without its binding conditions (`DRADeviceBindingConditions`). The mapping to the allocatable resources of the node (`DRANodeAllocatableResources`) is optional; it
//! has other names in Kubernetes 1.36 than in later versions, and none in earlier ones.
//!
//! # Taints
//! A device of a node without enough memory for unused guarantees has the taint [`SHORT_TAINT`] with the effect `NoSchedule`: the scheduler
//! gives it to no further claim without a toleration. The effect `NoExecute` would end all pods with the device, and is never used. An API
//! server without `DRADeviceTaints` drops the taint.
//!
//! # Rights
//! `resourceslices` of `resource.k8s.io`: get, list, watch, create, update, delete. `nodes`: get, so that the slice is deleted together
//! with the node.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::BoxStream};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams},
    runtime::{
        WatchStreamExt as _,
        utils::Backoff as _,
        watcher::{self, DefaultBackoff, Event, watcher},
    },
};
use numaward_engine::claims::{
    allocator::{Attribute, Capacity, Device},
    devices::{self, DRIVER, HOST},
};
use serde_json::{Map, Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::api::{ApiMetrics, Cause, Operation, Report, RequestError, node_uid};

/// Key of the taint of a device that is short of a resource, which is the value.
pub const SHORT_TAINT: &str = "numaward.io/short";

/// Field with the conditions for which the scheduler waits.
const CONDITIONS: &str = "bindingConditions";
/// Time after which a slice is written again if the API server dropped fields of it.
const DROPPED_RETRY_INTERVAL: Duration = Duration::from_mins(5);

/// Resources of a Kubernetes node, with the capacities of devices that are parts of them.
const NODE_RESOURCES: [(&str, &str); 4] = [
    ("cpu", "cpu"),
    ("memory", "memory"),
    ("hugepages-2Mi", "hugepages2Mi"),
    ("hugepages-1Gi", "hugepages1Gi"),
];

/// Field that declares capacities to be parts of the allocatable resources of the Kubernetes node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeAllocatableField {
    /// Kubernetes 1.36.
    Mappings,
    /// Kubernetes 1.37 and later.
    Resources,
}

impl NodeAllocatableField {
    /// Returns the field of a version; `None` if it has none.
    fn for_version(minor: u32) -> Option<Self> {
        match minor {
            ..36 => None,
            36 => Some(Self::Mappings),
            37.. => Some(Self::Resources),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Mappings => "nodeAllocatableResourceMappings",
            Self::Resources => "nodeAllocatableResources",
        }
    }

    fn value(self) -> Value {
        let of_resource = |(resource, capacity): (&str, &str)| {
            let key = json!({"capacityKey": capacity});
            let value = match self {
                Self::Mappings => key,
                Self::Resources => json!({"mapping": key}),
            };
            (resource.to_owned(), value)
        };
        NODE_RESOURCES.map(of_resource).into_iter().collect::<Map<_, _>>().into()
    }
}

/// Reason why the slice is not published.
#[derive(Debug, thiserror::Error)]
enum SliceError {
    #[error("the ResourceSlice cannot be written: {0}{hint}", hint = hint(.0))]
    Request(RequestError),
    #[error(
        "the API server dropped {0} from the ResourceSlice, so a device would be given to one pod as a whole: the slice is deleted. \
         Enable the feature gate DRAConsumableCapacity of the API server and the scheduler (by default on from Kubernetes 1.36 on)"
    )]
    Dropped(&'static str),
    #[error(
        "the API server dropped the binding conditions of the device {HOST} from the ResourceSlice, so the scheduler would not wait for \
         numaward: the slice is deleted. Enable the feature gate DRADeviceBindingConditions of the API server and the scheduler (by default \
         on from Kubernetes 1.36 on), or set kubernetes.dra.hostDevice to off"
    )]
    NoBinding,
}

impl From<kube::Error> for SliceError {
    fn from(error: kube::Error) -> Self {
        Self::Request(error.into())
    }
}

fn hint(error: &RequestError) -> &'static str {
    match error.cause {
        Cause::NotFound => "; resource.k8s.io/v1 is served from Kubernetes 1.34 on",
        _ => "",
    }
}

/// A pool of devices of this host, with one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pool {
    Nodes,
    Host,
}

impl Pool {
    /// Returns the name of the slice. The scheduler tries slices in the order of their names.
    fn slice_name(self, node: &str) -> String {
        let place = match self {
            Self::Nodes => 0,
            Self::Host => 1,
        };
        format!("{place:05}-{DRIVER}-{node}")
    }

    fn name(self, node: &str) -> String {
        match self {
            Self::Nodes => node.to_owned(),
            Self::Host => devices::host_pool(node),
        }
    }

    /// Returns the devices of the pool; `None` if it has no slice.
    fn devices(self, published: &PublishedDevices) -> Option<&[Device]> {
        match self {
            Self::Nodes => Some(&published.devices),
            Self::Host => published.host.as_ref().map(std::slice::from_ref),
        }
    }

    /// Returns true if the slice of the pool is the same with both.
    fn is_same(self, one: &PublishedDevices, other: &PublishedDevices) -> bool {
        let is_short = |of: &PublishedDevices| (self == Self::Nodes).then(|| of.short_of_memory.clone());
        self.devices(one) == self.devices(other) && is_short(one) == is_short(other)
    }
}

/// Devices to publish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishedDevices {
    /// Devices in the order in which the scheduler tries them.
    pub devices: Vec<Device>,
    /// The device of the whole host.
    pub host: Option<Device>,
    /// Names of the devices that are short of memory.
    pub short_of_memory: BTreeSet<String>,
    /// Number of the latest request for a publication that these devices include.
    pub number: u64,
}

/// Requests to publish the present devices at once. Clones share them.
#[derive(Clone, Debug)]
pub struct Publication {
    wanted: watch::Sender<u64>,
    published: watch::Sender<u64>,
}

impl Default for Publication {
    fn default() -> Self {
        Self { wanted: watch::Sender::new(0), published: watch::Sender::new(0) }
    }
}

impl Publication {
    /// Requests that the devices as of now are published, and waits until the API server has them.
    pub async fn publish(&self) {
        let mut published = self.published.subscribe();
        let mut number = 0;
        self.wanted.send_modify(|wanted| {
            *wanted += 1;
            number = *wanted;
        });
        // The sender is in this value.
        let _ = published.wait_for(|published| *published >= number).await;
    }

    /// Returns the number of the latest request, with notifications of new ones.
    pub fn requests(&self) -> watch::Receiver<u64> {
        self.wanted.subscribe()
    }

    /// Completes the requests up to this number.
    pub fn complete(&self, number: u64) {
        self.published.send_if_modified(|published| {
            let is_later = number > *published;
            *published = number.max(*published);
            is_later
        });
    }

    fn is_complete(&self, number: u64) -> bool {
        *self.published.borrow() >= number
    }
}

/// Publisher of this host's `ResourceSlice`s.
pub struct SlicePublisher {
    pub client: Client,
    /// Name of this Kubernetes node.
    pub node: String,
    /// Minimum time between two writes of a slice.
    pub interval: Duration,
    /// True to declare the capacities to be parts of the allocatable resources of the Kubernetes node.
    pub has_node_allocatable: bool,
    pub metrics: ApiMetrics,
    /// Called with the result of each write.
    pub report: Report,
    pub publication: Publication,
}

/// The slice as it was written last.
struct WrittenSlice {
    devices: Arc<PublishedDevices>,
    /// `spec` in the answer.
    spec: Value,
}

/// Progress of the writes of a pool.
struct PoolState {
    pool: Pool,
    written: Option<WrittenSlice>,
    /// True if the API server has a slice of the pool.
    exists: bool,
    /// True if the slice was written before the list of the slices in progress, which has not had it yet.
    is_missing: bool,
    /// Time before which nothing is written again unless a publication is awaited.
    next_write: Instant,
    /// Time before which nothing is written after an error.
    retry_at: Instant,
    backoff: DefaultBackoff,
    error: Option<String>,
}

impl PoolState {
    fn new(pool: Pool) -> Self {
        let now = Instant::now();
        Self {
            pool,
            written: None,
            exists: false,
            is_missing: false,
            next_write: now,
            retry_at: now,
            backoff: DefaultBackoff::default(),
            error: None,
        }
    }

    /// Returns true if the API server has these devices.
    fn is_written(&self, now: &PublishedDevices) -> bool {
        match (&self.written, self.pool.devices(now)) {
            (_, None) => !self.exists,
            (Some(written), _) => self.pool.is_same(&written.devices, now),
            (None, _) => false,
        }
    }

    /// Returns the time of the next write.
    fn due(&self, is_urgent: bool) -> Instant {
        if is_urgent { self.retry_at } else { self.retry_at.max(self.next_write) }
    }

    fn observe(&mut self, event: &Event<DynamicObject>, node: &str) {
        let name = self.pool.slice_name(node);
        let is_own = |slice: &DynamicObject| slice.metadata.name.as_ref() == Some(&name);
        match event {
            Event::Init => self.is_missing = self.exists,
            Event::InitDone if self.is_missing => (self.written, self.exists) = (None, false),
            Event::Delete(slice) if is_own(slice) => (self.written, self.exists) = (None, false),
            Event::Apply(slice) | Event::InitApply(slice) if is_own(slice) => {
                (self.is_missing, self.exists) = (false, true);
                let changed = |written: &WrittenSlice| !is_changed(&slice.data["spec"], &written.spec);
                self.written = self.written.take().filter(changed);
            }
            _ => {}
        }
    }
}

/// Facts about the cluster for the writes.
struct ClusterFacts {
    /// UID of the Kubernetes node.
    uid: Option<String>,
    field: Option<NodeAllocatableField>,
}

impl SlicePublisher {
    /// Publishes the devices in `latest` until the token is cancelled or the sender is dropped. `None` is not published.
    pub fn run(
        self,
        latest: watch::Receiver<Option<Arc<PublishedDevices>>>,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()> {
        async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.publish(latest) => {}
            }
        }
        .boxed()
    }

    fn api(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<ResourceSlice>(&()))
    }

    async fn publish(self, mut latest: watch::Receiver<Option<Arc<PublishedDevices>>>) {
        let mut facts = None;
        let mut pools = [Pool::Nodes, Pool::Host].map(PoolState::new);
        let mut events = self.events();
        loop {
            let now = latest.borrow_and_update().clone();
            let mut due = None;
            if let Some(now) = &now {
                let is_urgent = !self.publication.is_complete(now.number);
                let waiting = pools.iter().filter(|state| !state.is_written(now));
                due = waiting.map(|state| state.due(is_urgent)).min();
                if due.is_none() {
                    self.publication.complete(now.number);
                }
            }
            tokio::select! {
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
                changed = latest.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
                event = events.next() => {
                    match event {
                        Some(Ok(event)) => {
                            for state in &mut pools {
                        state.observe(&event, &self.node);
                    }
                        }
                        Some(Err(error)) => tracing::debug!(%error, "the resource slices cannot be watched"),
                        None => events = self.events(),
                    }
                    continue;
                }
            }
            let Some(now) = latest.borrow_and_update().clone() else { continue };
            let is_urgent = !self.publication.is_complete(now.number);
            let is_due =
                |state: &&mut PoolState| !state.is_written(&now) && state.due(is_urgent) <= Instant::now();
            if let Some(state) = pools.iter_mut().find(is_due) {
                self.update(state, &now, &mut facts).await;
                (self.report)(pools_error(&pools).map_or(Ok(()), Err));
            }
        }
    }

    /// Writes or deletes the slice of a pool, and notes the result.
    async fn update(
        &self,
        state: &mut PoolState,
        now: &Arc<PublishedDevices>,
        facts: &mut Option<ClusterFacts>,
    ) {
        let result = match state.pool.devices(now) {
            Some(devices) => self.write(state.pool, devices, &now.short_of_memory, facts).await.map(Some),
            None => self.delete(state.pool).await.map(|()| None),
        };
        match result {
            Ok(spec) => {
                self.metrics.slice_updates.inc();
                state.exists = spec.is_some();
                state.written = spec.map(|spec| WrittenSlice { devices: now.clone(), spec });
                state.next_write = Instant::now() + self.interval;
                state.error = None;
                state.backoff.reset();
            }
            Err(error) => {
                let delay = match &error {
                    SliceError::Request(error) => {
                        self.metrics.failed(Operation::Slice, error);
                        state.backoff.next().unwrap_or_default()
                    }
                    SliceError::Dropped(_) | SliceError::NoBinding => DROPPED_RETRY_INTERVAL,
                };
                state.error = Some(error.to_string());
                state.retry_at = Instant::now() + delay;
            }
        }
    }

    /// Returns the changes of this driver's slices on this node.
    fn events(&self) -> BoxStream<'static, watcher::Result<Event<DynamicObject>>> {
        let fields = format!("spec.nodeName={},spec.driver={DRIVER}", self.node);
        watcher(self.api(), watcher::Config::default().fields(&fields)).default_backoff().boxed()
    }

    async fn delete(&self, pool: Pool) -> Result<(), SliceError> {
        let deleted = self.api().delete(&pool.slice_name(&self.node), &DeleteParams::default()).await;
        match deleted.map_err(RequestError::from) {
            Err(error) if error.cause != Cause::NotFound => Err(SliceError::Request(error)),
            _ => Ok(()),
        }
    }

    /// Writes a slice, and returns its `spec` as the API server stored it.
    async fn write(
        &self,
        pool: Pool,
        devices: &[Device],
        short_of_memory: &BTreeSet<String>,
        facts: &mut Option<ClusterFacts>,
    ) -> Result<Value, SliceError> {
        let facts = match facts {
            Some(facts) => facts,
            None => facts.insert(self.facts().await?),
        };
        let (api, name) = (self.api(), pool.slice_name(&self.node));
        let before = match api.get(&name).await.map_err(RequestError::from) {
            Ok(slice) => Some(slice),
            Err(error) if error.cause == Cause::NotFound => None,
            Err(error) => return Err(SliceError::Request(error)),
        };
        let generation = before.as_ref().and_then(|slice| slice.data["spec"]["pool"]["generation"].as_i64());
        let device = |device: &Device| {
            let mut json = device_json(device, facts.field);
            if short_of_memory.contains(&*device.name) {
                json["taints"] = json!([{"key": SHORT_TAINT, "value": "memory", "effect": "NoSchedule"}]);
            }
            json
        };
        let has_conditions = devices.iter().any(|device| device.has_binding_conditions);
        let devices = devices.iter().map(device).collect::<Value>();
        let mut slice = DynamicObject::new(&name, &ApiResource::erase::<ResourceSlice>(&()));
        slice.data = json!({"spec": {
            "driver": DRIVER,
            "nodeName": self.node,
            "pool": {
                "name": pool.name(&self.node),
                "generation": generation.map_or(1, |generation| generation.saturating_add(1)),
                "resourceSliceCount": 1,
            },
            "devices": devices,
        }});
        if let Some(uid) = &facts.uid {
            let owner = json!({"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": uid});
            slice.metadata.owner_references = serde_json::from_value(json!([owner])).ok();
        }
        let stored = match before {
            Some(before) => {
                slice.metadata.resource_version = before.metadata.resource_version;
                api.replace(&name, &PostParams::default(), &slice).await
            }
            None => api.create(&PostParams::default(), &slice).await,
        };
        let mut stored = stored?;
        let spec = stored.data["spec"].take();
        if let Some(dropped) = dropped_field(&spec["devices"]) {
            self.delete(pool).await?;
            return Err(SliceError::Dropped(dropped));
        }
        if has_conditions && lacks(&spec["devices"], CONDITIONS) {
            self.delete(pool).await?;
            return Err(SliceError::NoBinding);
        }
        if let Some(field) = facts.field
            && lacks(&spec["devices"], field.name())
        {
            facts.field = None;
            tracing::info!(
                field = field.name(),
                "the API server dropped a field of the ResourceSlice (feature gate DRANodeAllocatableResources): the scheduler does \
                 not count claims as requests of the Kubernetes node, and spec.resources of pods has to contain them"
            );
        }
        Ok(spec)
    }

    async fn facts(&self) -> Result<ClusterFacts, SliceError> {
        let version = self.client.apiserver_version().await?;
        let digits: String = version.minor.chars().take_while(char::is_ascii_digit).collect();
        let minor = digits.parse().unwrap_or(0);
        let field = NodeAllocatableField::for_version(minor).filter(|_| self.has_node_allocatable);
        Ok(ClusterFacts { uid: node_uid(&self.client, &self.node).await, field })
    }
}

/// Returns the problems of all pools.
fn pools_error(pools: &[PoolState]) -> Option<String> {
    let errors: Vec<&str> = pools.iter().filter_map(|state| state.error.as_deref()).collect();
    (!errors.is_empty()).then(|| errors.join("; "))
}

/// Returns true if a slice is not the written one, nor an older one.
fn is_changed(observed: &Value, written: &Value) -> bool {
    let generation = |spec: &Value| spec["pool"]["generation"].as_i64();
    observed != written && generation(observed) >= generation(written)
}

fn device_json(device: &Device, field: Option<NodeAllocatableField>) -> Value {
    let attribute = |value: &Attribute| match value {
        Attribute::Bool(value) => json!({"bool": value}),
        Attribute::Int(value) => json!({"int": value}),
        Attribute::Text(value) => json!({"string": value}),
    };
    let attributes: Map<String, Value> =
        device.attributes.iter().map(|(name, value)| (name.to_string(), attribute(value))).collect();
    let capacity: Map<String, Value> =
        device.capacity.iter().map(|(name, capacity)| (name.to_string(), capacity_json(capacity))).collect();
    let mut json = json!({
        "name": &*device.name,
        "allowMultipleAllocations": device.allow_multiple_allocations,
        "attributes": attributes,
        "capacity": capacity,
    });
    if let Some(field) = field {
        json[field.name()] = field.value();
    }
    if device.has_binding_conditions {
        json["bindsToNode"] = json!(true);
        json[CONDITIONS] = json!([devices::PLACED]);
        json["bindingFailureConditions"] = json!([devices::NO_ROOM]);
    }
    json
}

fn capacity_json(capacity: &Capacity) -> Value {
    let mut json = json!({"value": capacity.value.to_string()});
    if let Some(policy) = &capacity.request_policy {
        let mut request_policy = json!({"default": policy.default.to_string()});
        if let Some(range) = &policy.valid_range {
            let limits = [("min", Some(range.min)), ("max", range.max), ("step", range.step)];
            let limits = limits.into_iter().filter_map(|(name, limit)| Some((name, limit?.to_string())));
            request_policy["validRange"] =
                limits.map(|(name, limit)| (name.to_owned(), json!(limit))).collect::<Map<_, _>>().into();
        }
        json["requestPolicy"] = request_policy;
    }
    json
}

/// Returns true if a device has no such field.
fn lacks(devices: &Value, field: &str) -> bool {
    devices.as_array().into_iter().flatten().any(|device| device.get(field).is_none())
}

/// Returns the field that the API server has dropped, and without which a device is given as a whole.
fn dropped_field(devices: &Value) -> Option<&'static str> {
    let mut capacities = devices
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|device| device["capacity"].as_object().into_iter().flat_map(Map::values));
    if lacks(devices, "allowMultipleAllocations") {
        Some("allowMultipleAllocations")
    } else if capacities.any(|capacity| capacity.get("requestPolicy").is_none()) {
        Some("requestPolicy")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_depends_on_version() {
        let field = |minor| {
            let field = NodeAllocatableField::for_version(minor)?;
            Some((field.name(), field.value()["hugepages-2Mi"].clone()))
        };
        assert_eq!(field(35), None);
        let key = json!({"capacityKey": "hugepages2Mi"});
        assert_eq!(field(36), Some(("nodeAllocatableResourceMappings", key.clone())));
        assert_eq!(field(37), Some(("nodeAllocatableResources", json!({"mapping": key}))));
    }

    #[test]
    fn slice_of_older_generation_is_no_change() {
        let spec =
            |generation: i64, device: &str| json!({"pool": {"generation": generation}, "device": device});
        assert!(!is_changed(&spec(2, "a"), &spec(2, "a")));
        assert!(!is_changed(&spec(1, "b"), &spec(2, "a")));
        assert!(is_changed(&spec(2, "b"), &spec(2, "a")));
        assert!(is_changed(&spec(3, "a"), &spec(2, "a")));
    }
}

//! What a pod, or a workload outside Kubernetes, asks for.
//!
//! A request has containers of three sorts: *init* containers run one after another before the others and
//! end; *restartable* init containers (sidecars) start in the same order but stay; *app* containers run
//! together. A workload outside Kubernetes is a request with one app container.
//!
//! Each container states requests (what it is promised) and limits (what it may use) of CPU, memory and
//! hugepages. Its class of service follows from them (module `qos`).

use std::{collections::BTreeMap, sync::Arc};

use numaward_topology::{HugepageSize, ZoneKind};
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, derive_more::Display,
            derive_more::From,
        )]
        #[from(&str, String)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

    };
}

name!(
    /// Whom a request is for: the UID of a pod, or the name of a workload outside Kubernetes.
    OwnerId
);
name!(
    /// The name of a container; unique within its owner.
    ContainerName
);

/// Amounts by kind of resource. What is absent is not set, which is not the same as zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// CPUs.
    pub cpu: Option<Quantity>,
    /// Bytes of base pages (`memory`) and of huge pages by their size.
    pub memory: BTreeMap<ZoneKind, Quantity>,
}

impl Resources {
    /// No resource is set.
    pub const fn none() -> Self {
        Self { cpu: None, memory: BTreeMap::new() }
    }

    /// Adds an amount of CPUs.
    #[must_use]
    pub fn with_cpu(mut self, cpu: Quantity) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// Adds an amount of base pages, in bytes.
    #[must_use]
    pub fn with_memory(mut self, bytes: Quantity) -> Self {
        self.memory.insert(ZoneKind::Memory, bytes);
        self
    }

    /// Adds an amount of huge pages of one size, in bytes.
    #[must_use]
    pub fn with_hugepages(mut self, size: HugepageSize, bytes: Quantity) -> Self {
        self.memory.insert(ZoneKind::Hugepages(size), bytes);
        self
    }
}

/// What one container asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerRequest {
    /// Its name.
    pub name: ContainerName,
    /// For an init container: it stays when the next one starts (`restartPolicy: Always`).
    #[serde(default)]
    pub restartable: bool,
    /// What it is promised.
    #[serde(default)]
    pub requests: Resources,
    /// What it may use.
    #[serde(default)]
    pub limits: Resources,
}

impl ContainerRequest {
    /// A container whose requests equal its limits.
    pub fn guaranteed(name: impl Into<ContainerName>, resources: Resources) -> Self {
        Self { name: name.into(), restartable: false, requests: resources.clone(), limits: resources }
    }
}

/// What a pod as a whole asks for (`spec.resources`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResources {
    /// What it is promised.
    pub requests: Resources,
    /// What it may use.
    pub limits: Resources,
}

/// What an owner asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Whom it is for.
    pub owner: OwnerId,
    /// Init containers in the order in which they start.
    #[serde(default)]
    pub init_containers: Vec<ContainerRequest>,
    /// The containers that run together.
    pub containers: Vec<ContainerRequest>,
    /// What it asks for as a whole, where it does: that alone decides its class of service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<PodResources>,
}

impl Request {
    /// The request of a workload with one container whose requests equal its limits.
    pub fn workload(owner: impl Into<OwnerId>, resources: Resources) -> Self {
        let owner = owner.into();
        let container = ContainerRequest::guaranteed(owner.as_str(), resources);
        Self { owner, init_containers: Vec::new(), containers: vec![container], resources: None }
    }

    /// All containers in the order in which they start.
    pub fn all_containers(&self) -> impl Iterator<Item = &ContainerRequest> {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Whether there is a container of this name.
    pub fn has_container(&self, name: &ContainerName) -> bool {
        self.all_containers().any(|container| &container.name == name)
    }

    /// Whether this is an init container that ends before the next container starts.
    pub fn is_regular_init(&self, name: &ContainerName) -> bool {
        self.init_containers.iter().find(|init| &init.name == name).is_some_and(|init| !init.restartable)
    }
}

//! Requests of pods and of workloads outside Kubernetes.
//!
//! A request has three types of containers. *Init* containers run one after another and end before the app containers
//! start. *Restartable* init containers (sidecars) start in the same order but keep running. *App* containers run
//! together. A workload outside Kubernetes is a request with one app container.
//!
//! Each container has requests (guaranteed amounts) and limits (maximum amounts) of CPU, memory and huge pages, which
//! determine the `QoS` class (module `qos`).

use std::{collections::BTreeMap, sync::Arc};

use numaward_topology::{HugepageSize, ZoneKind};
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

/// Identity of a Kubernetes pod.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, derive_more::Display,
)]
#[display("{namespace}/{name}")]
pub struct PodId {
    pub namespace: String,
    pub name: String,
    /// UID as the runtime reports it: for a static pod the hash of its manifest.
    pub uid: String,
}

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
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

    };
}

name!(
    /// Owner of a request: the UID of a pod, or the name of a workload outside Kubernetes.
    OwnerId
);
name!(
    /// Name of a container, unique within its owner.
    ContainerName
);

/// Amounts by resource. An absent amount is not set, which differs from zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    pub cpu: Option<Quantity>,
    /// Bytes of base pages (`memory`) and of huge pages by size.
    pub memory: BTreeMap<ZoneKind, Quantity>,
}

impl Resources {
    /// Makes an empty set of amounts.
    pub const fn none() -> Self {
        Self { cpu: None, memory: BTreeMap::new() }
    }

    /// Sets the CPUs.
    #[must_use]
    pub fn with_cpu(mut self, cpu: Quantity) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// Sets the bytes of base pages.
    #[must_use]
    pub fn with_memory(mut self, bytes: Quantity) -> Self {
        self.memory.insert(ZoneKind::Memory, bytes);
        self
    }

    /// Sets the bytes of huge pages of one size.
    #[must_use]
    pub fn with_hugepages(mut self, size: HugepageSize, bytes: Quantity) -> Self {
        self.memory.insert(ZoneKind::Hugepages(size), bytes);
        self
    }
}

/// Request of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerRequest {
    pub name: ContainerName,
    /// For an init container: whether it keeps running when the next one starts (`restartPolicy: Always`).
    #[serde(default)]
    pub restartable: bool,
    /// Guaranteed amounts.
    #[serde(default)]
    pub requests: Resources,
    /// Maximum amounts.
    #[serde(default)]
    pub limits: Resources,
}

impl ContainerRequest {
    /// Makes a container with equal requests and limits.
    pub fn guaranteed(name: impl Into<ContainerName>, resources: Resources) -> Self {
        Self { name: name.into(), restartable: false, requests: resources.clone(), limits: resources }
    }
}

/// Pod-level resources (`spec.resources`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResources {
    /// Guaranteed amounts.
    pub requests: Resources,
    /// Maximum amounts.
    pub limits: Resources,
}

/// Request of an owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub owner: OwnerId,
    /// Init containers in the order in which they start.
    #[serde(default)]
    pub init_containers: Vec<ContainerRequest>,
    /// App containers, which run together.
    pub containers: Vec<ContainerRequest>,
    /// Pod-level resources. If set, they alone determine the `QoS` class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<PodResources>,
}

impl Request {
    /// Makes the request of a workload with one container, with equal requests and limits.
    pub fn workload(owner: impl Into<OwnerId>, resources: Resources) -> Self {
        let owner = owner.into();
        let container = ContainerRequest::guaranteed(owner.as_str(), resources);
        Self { owner, init_containers: Vec::new(), containers: vec![container], resources: None }
    }

    /// Returns all containers in the order in which they start.
    pub fn all_containers(&self) -> impl Iterator<Item = &ContainerRequest> {
        self.init_containers.iter().chain(&self.containers)
    }

    pub fn has_container(&self, name: &ContainerName) -> bool {
        self.all_containers().any(|container| &container.name == name)
    }

    /// Returns whether this is an init container that ends before the next container starts.
    pub fn is_regular_init(&self, name: &ContainerName) -> bool {
        self.init_containers.iter().find(|init| &init.name == name).is_some_and(|init| !init.restartable)
    }

    /// Returns the effective amounts of a pod in Kubernetes: the larger of the sum over its app containers and sidecars, and the maximum
    /// while its init containers run. `of` returns `width` amounts of a container.
    pub fn effective_amounts(&self, width: usize, of: impl Fn(&ContainerRequest) -> Vec<u64>) -> Vec<u64> {
        let (mut all, mut sidecars, mut starting) = (vec![0; width], vec![0; width], vec![0; width]);
        for container in &self.init_containers {
            let mut now = of(container);
            add(&mut now, &sidecars);
            raise(&mut starting, &now);
            if container.restartable {
                sidecars = now;
            }
        }
        for container in &self.containers {
            add(&mut all, &of(container));
        }
        add(&mut all, &sidecars);
        raise(&mut all, &starting);
        all
    }
}

/// Adds amounts to sums.
pub fn add(sums: &mut [u64], amounts: &[u64]) {
    sums.iter_mut().zip(amounts).for_each(|(sum, amount)| *sum = sum.saturating_add(*amount));
}

/// Raises maxima to amounts.
pub fn raise(most: &mut [u64], amounts: &[u64]) {
    most.iter_mut().zip(amounts).for_each(|(most, amount)| *most = (*most).max(*amount));
}

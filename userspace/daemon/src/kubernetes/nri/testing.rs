//! What is asked for of a pod, without a reconciler that decides: for the fuzz targets.

use std::sync::Arc;

use numaward_config::Config;
use numaward_engine::Resources;
use numaward_guarantee::pod::{ContainerPlacementRequest, MemoryClaim, PodPlacementRequest};
use numaward_kube::{
    nri::types::{self as nri, Online},
    pod::PodSource,
};

use super::request::RequestBuilder;

/// All that is asked for of a container and its pod.
#[derive(Debug)]
pub struct PodAsks {
    /// With the pod as a whole.
    pub pod: PodPlacementRequest,
    /// With the container, where it is not left alone: when it is created, and when it already runs.
    pub container: Option<[ContainerPlacementRequest; 2]>,
    /// With a change of the container's resources.
    pub resized: (Resources, Option<MemoryClaim>),
    /// With a change of the pod's resources.
    pub pod_resized: Option<Resources>,
}

/// Makes requests of what is known.
#[derive(Clone)]
pub struct AskBuilder(RequestBuilder);

impl AskBuilder {
    /// With this configuration, of these pods and those that the runtime reports.
    pub fn new(pods: Arc<dyn PodSource>, config: &Config) -> Self {
        Self(RequestBuilder::new(pods, config))
    }

    /// What is asked for.
    pub fn build(
        &self,
        pod: &nri::Pod,
        container: &nri::Container,
        change: &nri::Resources,
        online: &Online,
    ) -> PodAsks {
        let created = self.0.container(pod, container).ok();
        let running = self.0.running(pod, container, online).ok();
        PodAsks {
            pod: self.0.pod(pod),
            container: created.zip(running).map(|(created, running)| [created, running]),
            resized: self.0.resized(pod, container, change),
            pod_resized: self.0.pod_resized(pod, change),
        }
    }
}

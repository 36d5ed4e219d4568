//! Requests for pods and containers without a reconciler, for the fuzz targets.

use std::sync::Arc;

use numaward_config::Config;
use numaward_engine::Resources;
use numaward_guarantee::pod::{ContainerPlacementRequest, MemoryClaim, PodPlacementRequest};
use numaward_kube::{
    nri::types::{self as nri, Online},
    pod::PodSource,
};

use super::request::RequestBuilder;

/// All requests for a container and its pod.
#[derive(Debug)]
pub struct PodRequests {
    /// The request at the creation of the pod.
    pub pod: PodPlacementRequest,
    /// The requests at the creation of the container, and for a running container; `None` if numaward does not place it.
    pub container: Option<[ContainerPlacementRequest; 2]>,
    /// The request at a change of the container's resources.
    pub resized: (Resources, Option<MemoryClaim>),
    /// The request at a change of the pod's resources.
    pub pod_resized: Option<Resources>,
}

/// Builder of the requests.
#[derive(Clone)]
pub struct PodRequestBuilder(RequestBuilder);

impl PodRequestBuilder {
    pub fn new(pods: Arc<dyn PodSource>, config: &Config) -> Self {
        Self(RequestBuilder::new(pods, config))
    }

    pub fn build(
        &self,
        pod: &nri::Pod,
        container: &nri::Container,
        change: &nri::Resources,
        online: &Online,
    ) -> PodRequests {
        let created = self.0.container(pod, container).ok();
        let running = self.0.running(pod, container, online).ok();
        PodRequests {
            pod: self.0.pod(pod),
            container: created.zip(running).map(|(created, running)| [created, running]),
            resized: self.0.resized(pod, container, change),
            pod_resized: self.0.pod_resized(pod, change),
        }
    }
}

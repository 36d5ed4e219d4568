//! Server of the PodResources API.

use std::{
    future::{Ready, ready},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, body::Body, transport::Server};
use tower::Service;

use super::{
    ALLOCATABLE, GET, LIST, SERVICE,
    messages::{AllocatableResponse, AssignedPodResources, GetRequest, GetResponse, ListResponse},
};
use crate::{
    grpc_service::{GrpcMethods, GrpcService, grpc, unknown_method},
    local_http2::connections,
};

/// Time after which a call fails.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent calls of one connection.
const MAX_CALLS: usize = 8;
/// Maximum size of a request. A namespace and a name have some hundred bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;

/// Source of the assigned resources. All methods answer from memory.
pub trait AssignmentSource: Send + Sync + 'static {
    /// Returns the pods with the resources of their containers.
    fn pods(&self) -> Vec<AssignedPodResources>;

    /// Returns all resources that can be assigned to pods.
    fn allocatable(&self) -> AllocatableResponse;

    /// Counts a call by its method. `is_ok` is false if the requested pod is unknown.
    fn record_call(&self, method: &'static str, is_ok: bool) {
        let _ = (method, is_ok);
    }
}

/// Serves until the token is cancelled.
///
/// # Errors
///
/// The error of tonic if it cannot serve.
pub fn serve(
    listener: UnixListener,
    assigned: Arc<dyn AssignmentSource>,
    stop: CancellationToken,
) -> BoxFuture<'static, Result<(), tonic::transport::Error>> {
    async move {
        Server::builder()
            .timeout(CALL_TIMEOUT)
            .concurrency_limit_per_connection(MAX_CALLS)
            .add_service(GrpcService(Lister(assigned)))
            .serve_with_incoming_shutdown(connections(listener), stop.cancelled_owned())
            .await
    }
    .boxed()
}

#[derive(Clone)]
struct Lister(Arc<dyn AssignmentSource>);

/// Wraps a function that returns the response of a request as a service.
fn unary_method<Q, A>(
    mut answer: impl FnMut(Q) -> Result<A, Status>,
) -> impl Service<Request<Q>, Response = Response<A>, Error = Status, Future = Ready<Result<Response<A>, Status>>>
{
    tower::service_fn(move |request: Request<Q>| ready(answer(request.into_inner()).map(Response::new)))
}

impl Lister {
    fn list(&self) -> ListResponse {
        self.0.record_call("List", true);
        ListResponse { pod_resources: self.0.pods() }
    }

    fn get(&self, GetRequest { pod_name, pod_namespace }: GetRequest) -> Result<GetResponse, Status> {
        let is_requested =
            |pod: &AssignedPodResources| pod.name == pod_name && pod.namespace == pod_namespace;
        let found = self.0.pods().into_iter().find(is_requested);
        self.0.record_call("Get", found.is_some());
        match found {
            Some(pod) => Ok(GetResponse { pod_resources: Some(pod) }),
            None => Err(Status::not_found(format!("pod {pod_name} in namespace {pod_namespace} not found"))),
        }
    }

    fn allocatable(&self) -> AllocatableResponse {
        self.0.record_call("GetAllocatableResources", true);
        self.0.allocatable()
    }
}

impl GrpcMethods for Lister {
    const SERVICE: &'static str = SERVICE;

    fn answer(self, request: http::Request<Body>) -> BoxFuture<'static, http::Response<Body>> {
        async move {
            match request.uri().path() {
                LIST => grpc(MAX_REQUEST_BYTES).unary(unary_method(|()| Ok(self.list())), request).await,
                GET => {
                    grpc(MAX_REQUEST_BYTES).unary(unary_method(|request| self.get(request)), request).await
                }
                ALLOCATABLE => {
                    grpc(MAX_REQUEST_BYTES).unary(unary_method(|()| Ok(self.allocatable())), request).await
                }
                path => unknown_method(path),
            }
        }
        .boxed()
    }
}

//! Server of the PodResources API.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status,
    body::Body,
    server::{Grpc, NamedService},
    transport::Server,
};
use tonic_prost::ProstCodec;
use tower::Service;

use super::{
    ALLOCATABLE, GET, LIST, SERVICE,
    messages::{AllocatableResponse, AssignedPodResources, GetRequest, GetResponse, ListResponse},
};
use crate::local_http2::connections;

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
            .add_service(Lister(assigned))
            .serve_with_incoming_shutdown(connections(listener), stop.cancelled_owned())
            .await
    }
    .boxed()
}

#[derive(Clone)]
struct Lister(Arc<dyn AssignmentSource>);

impl NamedService for Lister {
    const NAME: &'static str = SERVICE;
}

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

impl Service<http::Request<Body>> for Lister {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        fn grpc<A, Q>() -> Grpc<ProstCodec<A, Q>>
        where
            A: prost::Message + 'static,
            Q: prost::Message + Default + 'static,
        {
            Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_REQUEST_BYTES)
        }
        let lister = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                LIST => grpc().unary(unary_method(|()| Ok(lister.list())), request).await,
                GET => grpc().unary(unary_method(|request| lister.get(request)), request).await,
                ALLOCATABLE => grpc().unary(unary_method(|()| Ok(lister.allocatable())), request).await,
                path => Status::unimplemented(format!("{path} is not a method of this service")).into_http(),
            })
        })
    }
}

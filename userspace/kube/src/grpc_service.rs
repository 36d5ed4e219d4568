//! gRPC services with a few methods, without generated code.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use futures_util::{FutureExt as _, future::BoxFuture};
use tonic::{
    Status,
    body::Body,
    server::{Grpc, NamedService},
};
use tonic_prost::ProstCodec;
use tower::Service;

/// Methods of a service.
pub(crate) trait GrpcMethods: Clone + Send + Sync + 'static {
    /// Name of the service with its package.
    const SERVICE: &'static str;

    /// Answers a request for the method with this path.
    fn answer(self, request: http::Request<Body>) -> BoxFuture<'static, http::Response<Body>>;
}

/// A service for a server of tonic.
#[derive(Clone)]
pub(crate) struct GrpcService<M>(pub(crate) M);

impl<M: GrpcMethods> NamedService for GrpcService<M> {
    const NAME: &'static str = M::SERVICE;
}

impl<M: GrpcMethods> Service<http::Request<Body>> for GrpcService<M> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.0.clone().answer(request).map(Ok).boxed()
    }
}

/// Returns the codec of a method; a request has at most `max_bytes`.
pub(crate) fn grpc<A, Q>(max_bytes: usize) -> Grpc<ProstCodec<A, Q>>
where
    A: prost::Message + 'static,
    Q: prost::Message + Default + 'static,
{
    Grpc::new(ProstCodec::default()).max_decoding_message_size(max_bytes)
}

/// Returns the answer to a request for an unknown method.
pub(crate) fn unknown_method(path: &str) -> http::Response<Body> {
    Status::unimplemented(format!("{path} is not a method of this service")).into_http()
}

//! gRPC over unix sockets: a client with one call at a time, and parts of servers.

use std::{
    error::Error,
    fs,
    future::{Ready, ready},
    io,
    path::{Path, PathBuf},
};

use http::uri::{InvalidUri, PathAndQuery};
use prost::Message;
use tokio::net::UnixListener;
use tonic::{
    Request, Response, Status,
    client::Grpc,
    transport::{self, Channel, Endpoint},
};
use tonic_prost::ProstCodec;
use tower::Service;

const RUNTIME: &str = "runtime.v1.RuntimeService";
/// Maximum size of a response, as in the kubelet.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The connection to the socket was refused.
    #[error("cannot connect to {}: {}", socket.display(), root_cause(source))]
    Connect { socket: PathBuf, source: transport::Error },
    /// The socket cannot be created.
    #[error("cannot serve at {}: {source}", socket.display())]
    Socket { socket: PathBuf, source: io::Error },
    /// The request cannot be read.
    #[error("{0}")]
    Manifest(String),
    /// The connection failed.
    #[error("the connection failed: {}", root_cause(.0))]
    Connection(#[from] transport::Error),
    /// The request cannot be sent.
    #[error("the call cannot be made: {0}")]
    Request(#[from] InvalidUri),
    /// The runtime refuses.
    #[error("{method}: {message} (code {code})", code = i32::from(status.code()), message = status.message())]
    Status {
        /// Name of the method.
        method: &'static str,
        /// The runtime's error.
        status: Box<Status>,
    },
}

/// Returns the root cause of an error: tonic's own errors only name the layer.
fn root_cause(error: &transport::Error) -> String {
    let mut cause: &dyn Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// Listens at a socket, in place of a previous one.
pub(crate) fn listen(socket: PathBuf) -> Result<UnixListener, CallError> {
    let listener = match fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => UnixListener::bind(&socket),
    };
    listener.map_err(|source| CallError::Socket { socket, source })
}

pub(crate) type MethodFuture<A> = Ready<Result<Response<A>, Status>>;

/// Creates a method that computes its response immediately.
pub(crate) fn method<Q, A>(
    mut answer: impl FnMut(Q) -> A,
) -> impl Service<Request<Q>, Response = Response<A>, Error = Status, Future = MethodFuture<A>> {
    tower::service_fn(move |request: Request<Q>| ready(Ok(Response::new(answer(request.into_inner())))))
}

/// A connection to a server.
pub(crate) struct GrpcClient {
    grpc: Grpc<Channel>,
}

impl GrpcClient {
    /// Connects to a socket.
    pub(crate) async fn connect(socket: &Path) -> Result<Self, CallError> {
        let connected = match Endpoint::from_shared(format!("unix://{}", socket.display())) {
            Ok(endpoint) => endpoint.connect().await,
            Err(error) => Err(error),
        };
        let channel = connected.map_err(|source| CallError::Connect { socket: socket.to_owned(), source })?;
        Ok(Self { grpc: Grpc::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES) })
    }

    /// Calls a method of the runtime.
    pub(crate) async fn call<Q, A>(&mut self, method: &'static str, request: Q) -> Result<A, CallError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.call_of(RUNTIME, method, request).await
    }

    /// Calls a method of a service.
    pub(crate) async fn call_of<Q, A>(
        &mut self,
        service: &str,
        method: &'static str,
        request: Q,
    ) -> Result<A, CallError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = PathAndQuery::try_from(format!("/{service}/{method}"))?;
        self.grpc.ready().await?;
        let answer = self.grpc.unary(Request::new(request), path, ProstCodec::default()).await;
        answer
            .map(Response::into_inner)
            .map_err(|status| CallError::Status { method, status: Box::new(status) })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        future::{Ready, ready},
        pin::Pin,
        task::{Context, Poll},
    };

    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{
        body::Body,
        server::{self, NamedService, UnaryService},
        transport::Server,
    };
    use tower::Service;

    use super::*;
    use crate::messages::{ContainerId, Empty, Sandbox, SandboxConfig, SandboxId, SandboxMetadata};

    /// A runtime that runs every sandbox, and refuses to start a container.
    #[derive(Clone)]
    struct FakeRuntime;

    impl NamedService for FakeRuntime {
        const NAME: &'static str = RUNTIME;
    }

    struct RunPodSandbox;

    impl UnaryService<Sandbox> for RunPodSandbox {
        type Response = SandboxId;
        type Future = Ready<Result<Response<SandboxId>, Status>>;

        fn call(&mut self, request: Request<Sandbox>) -> Self::Future {
            let metadata = request.into_inner().config.unwrap().metadata.unwrap();
            ready(Ok(Response::new(SandboxId { pod_sandbox_id: metadata.name })))
        }
    }

    struct StartContainer;

    impl UnaryService<ContainerId> for StartContainer {
        type Response = Empty;
        type Future = Ready<Result<Response<Empty>, Status>>;

        fn call(&mut self, request: Request<ContainerId>) -> Self::Future {
            let id = request.into_inner().container_id;
            ready(Err(Status::failed_precondition(format!("{id}: no room,\n100 % full: Größe"))))
        }
    }

    impl Service<http::Request<Body>> for FakeRuntime {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: http::Request<Body>) -> Self::Future {
            Box::pin(async move {
                Ok(match request.uri().path() {
                    "/runtime.v1.RuntimeService/RunPodSandbox" => {
                        server::Grpc::new(ProstCodec::default()).unary(RunPodSandbox, request).await
                    }
                    "/runtime.v1.RuntimeService/StartContainer" => {
                        server::Grpc::new(ProstCodec::default()).unary(StartContainer, request).await
                    }
                    path => Status::unimplemented(path).into_http(),
                })
            })
        }
    }

    #[tokio::test]
    async fn returns_answers_and_refusals() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let away = GrpcClient::connect(&socket).await.err().unwrap().to_string();
        assert_eq!(
            away,
            format!("cannot connect to {}: No such file or directory (os error 2)", socket.display())
        );

        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let server = tokio::spawn(Server::builder().add_service(FakeRuntime).serve_with_incoming(incoming));
        let mut client = GrpcClient::connect(&socket).await.unwrap();
        let metadata = Some(SandboxMetadata { name: "web".to_owned(), ..SandboxMetadata::default() });
        let sandbox = Sandbox { config: Some(SandboxConfig { metadata, ..SandboxConfig::default() }) };
        let made: SandboxId = client.call("RunPodSandbox", sandbox).await.unwrap();
        assert_eq!(made.pod_sandbox_id, "web");

        let id = ContainerId { container_id: "main".to_owned() };
        let refused = client.call::<_, Empty>("StartContainer", id).await.unwrap_err();
        assert_eq!(refused.to_string(), "StartContainer: main: no room,\n100 % full: Größe (code 9)");
        let unknown = client.call::<_, Empty>("Version", Empty {}).await.unwrap_err();
        assert_eq!(unknown.to_string(), "Version: /runtime.v1.RuntimeService/Version (code 12)");
        server.abort();
    }
}

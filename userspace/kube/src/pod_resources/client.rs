//! Client of the kubelet's PodResources API.

use std::{path::Path, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::timeout};
use tonic::{
    Code, Request, Status,
    client::Grpc,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{
    ALLOCATABLE, GET, LIST,
    messages::{AllocatableResponse, AssignedPodResources, GetRequest, GetResponse, ListResponse},
};

/// Time limit of a connection attempt and of a call. The kubelet answers from memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response: some hundred pods with some hundred CPUs and devices each.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// Error of a call. The first field is the path of the socket.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    #[error("{0}: cannot connect: {1}")]
    Connect(String, #[source] tonic::transport::Error),
    #[error("{0}: no answer within {CALL_TIMEOUT:?}")]
    TimedOut(String),
    /// The server returned an error.
    #[error("{0}: {code}: {message}", code = .1.code(), message = .1.message())]
    Refused(String, Box<Status>),
}

/// A connection to the API. Clones share it.
#[derive(Clone, Debug)]
pub struct Client {
    socket: String,
    channel: Channel,
}

impl Client {
    pub fn connect(socket: &Path) -> BoxFuture<'_, Result<Self, PodResourcesError>> {
        async move {
            let name = socket.display().to_string();
            let path = socket.to_owned();
            let connector = tower::service_fn(move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            // Tonic requires an address, but the connector opens the socket instead.
            let endpoint = Endpoint::from_static("http://localhost").connect_timeout(CALL_TIMEOUT);
            let connected = timeout(CALL_TIMEOUT, endpoint.connect_with_connector(connector)).await;
            match connected {
                Err(_) => Err(PodResourcesError::TimedOut(name)),
                Ok(Err(source)) => Err(PodResourcesError::Connect(name, source)),
                Ok(Ok(channel)) => Ok(Self { socket: name, channel }),
            }
        }
        .boxed()
    }

    /// Returns all pods.
    pub fn list(&self) -> BoxFuture<'_, Result<Vec<AssignedPodResources>, PodResourcesError>> {
        async move {
            let response: ListResponse = self.call(LIST, ()).await?;
            Ok(response.pod_resources)
        }
        .boxed()
    }

    /// Returns one pod; `None` if the server does not know it.
    pub fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<AssignedPodResources>, PodResourcesError>> {
        async move {
            let request = GetRequest { pod_name: name.to_owned(), pod_namespace: namespace.to_owned() };
            match self.call::<_, GetResponse>(GET, request).await {
                Ok(response) => Ok(response.pod_resources),
                Err(PodResourcesError::Refused(_, status)) if status.code() == Code::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        }
        .boxed()
    }

    /// Returns all resources that can be assigned.
    pub fn allocatable(&self) -> BoxFuture<'_, Result<AllocatableResponse, PodResourcesError>> {
        async move { self.call(ALLOCATABLE, ()).await }.boxed()
    }

    async fn call<Q, A>(&self, method: &'static str, request: Q) -> Result<A, PodResourcesError>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let refused = |status| PodResourcesError::Refused(self.socket.clone(), Box::new(status));
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES);
        let call = async {
            grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let path = PathAndQuery::from_static(method);
            grpc.unary(Request::new(request), path, ProstCodec::default()).await
        };
        match timeout(CALL_TIMEOUT, call).await {
            Err(_) => Err(PodResourcesError::TimedOut(self.socket.clone())),
            Ok(result) => result.map(tonic::Response::into_inner).map_err(refused),
        }
    }
}

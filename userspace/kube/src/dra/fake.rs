//! The kubelet's side of the plugin for resource claims, for tests.

use std::path::Path;

use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Request, Response, Status, Streaming,
    client::Grpc,
    transport::{Channel, Endpoint, Error},
};
use tonic_prost::ProstCodec;

use super::messages::{
    ClaimId, ClaimsRequest, HealthList, PluginInfo, PrepareResponse, RegistrationStatus, UnprepareResponse,
};

/// Version of the service for claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum Version {
    #[display("v1")]
    V1,
    #[display("v1beta1")]
    V1Beta1,
}

/// A connection of a kubelet to a socket of the plugin.
#[derive(Clone, Debug)]
pub struct FakeKubelet(Channel);

impl FakeKubelet {
    /// Connects to a socket.
    pub async fn connect(socket: &Path) -> Result<Self, Error> {
        let socket = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        Endpoint::from_static("http://localhost").connect_with_connector(connector).await.map(Self)
    }

    /// Calls a method.
    pub async fn call<Q, A>(&self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.0.clone());
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let path =
            PathAndQuery::try_from(method).map_err(|error| Status::invalid_argument(error.to_string()))?;
        grpc.unary(Request::new(request), path, ProstCodec::<Q, A>::default()).await.map(Response::into_inner)
    }

    /// Watches the health of the devices.
    pub async fn watch_health(&self) -> Result<Streaming<HealthList>, Status> {
        let mut grpc = Grpc::new(self.0.clone());
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let path = PathAndQuery::from_static("/v1alpha1.DRAResourceHealth/NodeWatchResources");
        let codec = ProstCodec::<(), HealthList>::default();
        grpc.server_streaming(Request::new(()), path, codec).await.map(Response::into_inner)
    }

    /// Asks for the description of the plugin, and reports its registration.
    pub async fn register(&self, error: &str) -> Result<PluginInfo, Status> {
        let info = self.call("/pluginregistration.Registration/GetInfo", ()).await?;
        let status = RegistrationStatus { is_registered: error.is_empty(), error: error.to_owned() };
        self.call::<_, ()>("/pluginregistration.Registration/NotifyRegistrationStatus", status).await?;
        Ok(info)
    }

    pub async fn prepare(&self, version: Version, claims: Vec<ClaimId>) -> Result<PrepareResponse, Status> {
        let method = format!("/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources");
        self.call(&method, ClaimsRequest { claims }).await
    }

    pub async fn unprepare(
        &self,
        version: Version,
        claims: Vec<ClaimId>,
    ) -> Result<UnprepareResponse, Status> {
        let method = format!("/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodeUnprepareResources");
        self.call(&method, ClaimsRequest { claims }).await
    }
}

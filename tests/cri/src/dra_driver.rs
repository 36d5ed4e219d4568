//! A fake DRA driver of the kubelet: it prepares resource claims with devices that do not exist.
//!
//! The scheduler allocates the devices by a `ResourceSlice`, which the test creates. The driver does not read the claims: the test names
//! the device of each.
//!
//! Source: the descriptors of `k8s.io/kubelet`, `pkg/apis/dra/v1` and `pkg/apis/pluginregistration/v1`, in the kubelet of 1.36: the
//! fields' numbers.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use clap::Args;
use numaward_kube::local_http2::connections;
use prost::Message;
use tonic::{
    Status,
    body::Body,
    server::{Grpc, NamedService},
    transport::Server,
};
use tonic_prost::ProstCodec;
use tower::Service;

use crate::{
    grpc::{CallError, listen, method},
    messages::Empty,
};

/// Kind of plugin, and version of its service, as the kubelet names them.
const KIND: &str = "DRAPlugin";
const VERSION: &str = "v1.DRAPlugin";

#[derive(Args)]
pub(crate) struct DraDriver {
    /// Name of the driver in slices and device classes
    name: String,
    /// A claim and its device, `CLAIM=DEVICE`
    #[arg(required = true, value_parser = claim)]
    claims: Vec<(String, String)>,
    /// Name of the pool with the devices
    #[arg(long)]
    pool: String,
    /// The kubelet's folder
    #[arg(long, default_value = "/var/lib/kubelet")]
    folder: PathBuf,
}

fn claim(text: &str) -> Result<(String, String), String> {
    let (claim, device) = text.split_once('=').ok_or_else(|| format!("{text:?} is not CLAIM=DEVICE"))?;
    Ok((claim.to_owned(), device.to_owned()))
}

#[derive(Clone, PartialEq, Message)]
struct PluginInfo {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    endpoint: String,
    #[prost(string, repeated, tag = "4")]
    versions: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    is_registered: bool,
    #[prost(string, tag = "2")]
    error: String,
}

/// The request of both calls.
#[derive(Clone, PartialEq, Message)]
struct Claims {
    #[prost(message, repeated, tag = "1")]
    claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, Message)]
struct Claim {
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct PreparedClaims {
    /// Prepared claims by UID.
    #[prost(btree_map = "string, message", tag = "1")]
    claims: BTreeMap<String, PreparedClaim>,
}

#[derive(Clone, PartialEq, Message)]
struct PreparedClaim {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<PreparedDevice>,
    #[prost(string, tag = "2")]
    error: String,
}

#[derive(Clone, PartialEq, Message)]
struct PreparedDevice {
    #[prost(string, tag = "2")]
    pool: String,
    #[prost(string, tag = "3")]
    device: String,
}

#[derive(Clone, PartialEq, Message)]
struct UnpreparedClaims {
    /// Unprepared claims by UID.
    #[prost(btree_map = "string, message", tag = "1")]
    claims: BTreeMap<String, UnpreparedClaim>,
}

#[derive(Clone, PartialEq, Message)]
struct UnpreparedClaim {
    #[prost(string, tag = "1")]
    error: String,
}

/// Registers and serves until it is killed.
pub(crate) async fn run(driver: &DraDriver) -> Result<(), CallError> {
    let home = driver.folder.join("plugins").join(&driver.name);
    let endpoint = home.join("dra.sock");
    let registration = driver.folder.join("plugins_registry").join(format!("{}-reg.sock", driver.name));
    fs::create_dir_all(&home).map_err(|source| CallError::Socket { socket: home, source })?;
    let state = Arc::new(DriverState {
        name: driver.name.clone(),
        endpoint: endpoint.display().to_string(),
        pool: driver.pool.clone(),
        devices: driver.claims.iter().cloned().collect(),
    });
    // The kubelet connects as soon as it sees the second socket.
    let prepares = connections(listen(endpoint)?);
    let registers = connections(listen(registration)?);
    let preparing = Server::builder().add_service(ClaimService(state.clone())).serve_with_incoming(prepares);
    let registering =
        Server::builder().add_service(RegistrationService(state)).serve_with_incoming(registers);
    tokio::try_join!(preparing, registering)?;
    Ok(())
}

struct DriverState {
    name: String,
    endpoint: String,
    pool: String,
    /// Devices by name of the claim.
    devices: BTreeMap<String, String>,
}

impl DriverState {
    fn info(&self) -> PluginInfo {
        PluginInfo {
            kind: KIND.to_owned(),
            name: self.name.clone(),
            endpoint: self.endpoint.clone(),
            versions: vec![VERSION.to_owned()],
        }
    }

    fn prepare(&self, claims: Claims) -> PreparedClaims {
        let prepared = claims.claims.into_iter().map(|Claim { uid, name }| {
            println!("prepare {name}");
            let prepared = match self.devices.get(&name) {
                Some(device) => {
                    let device = PreparedDevice { pool: self.pool.clone(), device: device.clone() };
                    PreparedClaim { devices: vec![device], error: String::new() }
                }
                None => PreparedClaim { devices: Vec::new(), error: format!("{name} has no device") },
            };
            (uid, prepared)
        });
        PreparedClaims { claims: prepared.collect() }
    }
}

/// The service at the socket that the kubelet looks for.
#[derive(Clone)]
struct RegistrationService(Arc<DriverState>);

impl NamedService for RegistrationService {
    const NAME: &'static str = "pluginregistration.Registration";
}

/// The service for claims.
#[derive(Clone)]
struct ClaimService(Arc<DriverState>);

impl NamedService for ClaimService {
    const NAME: &'static str = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin";
}

type AnswerFuture = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl Service<http::Request<Body>> for RegistrationService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self(state) = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/pluginregistration.Registration/GetInfo" => {
                    let info = method(|_: Empty| state.info());
                    Grpc::new(ProstCodec::default()).unary(info, request).await
                }
                "/pluginregistration.Registration/NotifyRegistrationStatus" => {
                    let note = method(|RegistrationStatus { is_registered, error }| {
                        println!("registered: {is_registered} {error}");
                        Empty {}
                    });
                    Grpc::new(ProstCodec::default()).unary(note, request).await
                }
                path => Status::unimplemented(path).into_http(),
            })
        })
    }
}

impl Service<http::Request<Body>> for ClaimService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self(state) = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources" => {
                    let prepare = method(|claims| state.prepare(claims));
                    Grpc::new(ProstCodec::default()).unary(prepare, request).await
                }
                "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources" => {
                    let nothing = method(|Claims { claims }| UnpreparedClaims {
                        claims: claims
                            .into_iter()
                            .map(|claim| (claim.uid, UnpreparedClaim::default()))
                            .collect(),
                    });
                    Grpc::new(ProstCodec::default()).unary(nothing, request).await
                }
                path => Status::unimplemented(path).into_http(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Duration, sleep};

    use super::*;
    use crate::grpc::GrpcClient;

    #[tokio::test]
    async fn kubelet_can_register_and_prepare() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("plugins_registry")).unwrap();
        let driver = DraDriver {
            name: "d.example".to_owned(),
            claims: vec![claim("mine=near").unwrap()],
            pool: "n1".to_owned(),
            folder: folder.path().to_owned(),
        };
        let registration = folder.path().join("plugins_registry/d.example-reg.sock");
        let serving = tokio::spawn(async move { run(&driver).await });
        while !registration.exists() {
            assert!(!serving.is_finished(), "{:?}", serving.await);
            sleep(Duration::from_millis(10)).await;
        }
        let mut kubelet = GrpcClient::connect(&registration).await.unwrap();
        let info: PluginInfo = kubelet.call_of(RegistrationService::NAME, "GetInfo", Empty {}).await.unwrap();
        assert_eq!((info.kind.as_str(), info.name.as_str()), (KIND, "d.example"));
        let mut kubelet = GrpcClient::connect(info.endpoint.as_ref()).await.unwrap();
        let of = |name: &str| Claim { uid: format!("uid-{name}"), name: name.to_owned() };
        let claims = Claims { claims: vec![of("mine"), of("other")] };
        let prepared: PreparedClaims =
            kubelet.call_of(ClaimService::NAME, "NodePrepareResources", claims.clone()).await.unwrap();
        let device = PreparedDevice { pool: "n1".to_owned(), device: "near".to_owned() };
        assert_eq!(prepared.claims["uid-mine"].devices, [device]);
        assert_eq!(prepared.claims["uid-other"].error, "other has no device");
        let unprepared: UnpreparedClaims =
            kubelet.call_of(ClaimService::NAME, "NodeUnprepareResources", claims).await.unwrap();
        assert!(unprepared.claims.keys().eq(["uid-mine", "uid-other"]));
        serving.abort();
    }

    /// The numbers are those of the kubelet's own descriptors.
    #[test]
    fn claims_have_published_numbers() {
        let claim = Claim { uid: "u".to_owned(), name: "n".to_owned() };
        assert_eq!(claim.encode_to_vec(), b"\x12\x01u\x1a\x01n");
        let device = PreparedDevice { pool: "p".to_owned(), device: "d".to_owned() };
        assert_eq!(device.encode_to_vec(), b"\x12\x01p\x1a\x01d");
    }
}

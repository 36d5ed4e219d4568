//! The plugin for resource claims, called as the kubelet does.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{path::Path, sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use numaward_kube::dra::{
    messages::{
        ClaimId, ClaimsRequest, Device, PluginInfo, PrepareResponse, RegistrationStatus, UnprepareResponse,
    },
    plugin::{ClaimHandler, Plugin},
};
use parking_lot::Mutex;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

const V1: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin";
const V1BETA1: &str = "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin";

/// Handler that prepares the claims with the name `good`.
#[derive(Default)]
struct NamedClaims(Mutex<Vec<String>>);

impl ClaimHandler for NamedClaims {
    fn prepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<Vec<Device>, String>> {
        self.0.lock().push(format!("prepare {}/{} {}", claim.namespace, claim.name, claim.uid));
        let device = Device { device_name: "node-1".to_owned(), ..Device::default() };
        let result =
            if claim.name == "good" { Ok(vec![device]) } else { Err("no room on node 1".to_owned()) };
        async move { result }.boxed()
    }

    fn unprepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<(), String>> {
        self.0.lock().push(format!("unprepare {}", claim.uid));
        async { Ok(()) }.boxed()
    }
}

async fn connect(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap()
}

async fn call<Q, A>(channel: &Channel, path: String, request: Q) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    let path = PathAndQuery::try_from(path).unwrap();
    grpc.unary(Request::new(request), path, ProstCodec::<Q, A>::default())
        .await
        .map(tonic::Response::into_inner)
}

/// A running plugin, and connections to its sockets.
struct RunningPlugin {
    handler: Arc<NamedClaims>,
    registrations: Arc<Mutex<Vec<Result<(), String>>>>,
    registration: Channel,
    claims: Channel,
    _dir: tempfile::TempDir,
    _stop: tokio_util::sync::DropGuard,
}

async fn start() -> RunningPlugin {
    let dir = tempfile::tempdir().unwrap();
    let (registration, claims) = (dir.path().join("reg.sock"), dir.path().join("dra.sock"));
    let (handler, registrations) = (Arc::new(NamedClaims::default()), Arc::new(Mutex::new(Vec::new())));
    let reported = Arc::clone(&registrations);
    let plugin = Plugin {
        endpoint: "/host/dra.sock".to_owned(),
        handler: handler.clone(),
        report: Arc::new(move |result| reported.lock().push(result)),
    };
    let stop = CancellationToken::new();
    let listeners = [&registration, &claims].map(|path| UnixListener::bind(path).unwrap());
    let [first, second] = listeners;
    tokio::spawn(plugin.serve(first, second, stop.clone()));
    let (registration, claims) = (connect(&registration).await, connect(&claims).await);
    RunningPlugin { handler, registrations, registration, claims, _dir: dir, _stop: stop.drop_guard() }
}

fn claim(name: &str) -> ClaimId {
    ClaimId { namespace: "ns".to_owned(), uid: format!("uid-{name}"), name: name.to_owned() }
}

#[tokio::test]
async fn kubelet_registers_plugin() {
    let plugin = start().await;
    let service = "/pluginregistration.Registration";
    let info: PluginInfo = call(&plugin.registration, format!("{service}/GetInfo"), ()).await.unwrap();
    assert_eq!((&*info.kind, &*info.name, &*info.endpoint), ("DRAPlugin", "numaward.io", "/host/dra.sock"));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    for (is_registered, error) in [(true, ""), (false, "version")] {
        let status = RegistrationStatus { is_registered, error: error.to_owned() };
        let () =
            call(&plugin.registration, format!("{service}/NotifyRegistrationStatus"), status).await.unwrap();
    }
    let registrations = plugin.registrations.lock().clone();
    assert_eq!(registrations[0], Ok(()));
    assert!(registrations[1].as_ref().unwrap_err().contains("version"));
}

#[tokio::test]
async fn error_is_of_one_claim() {
    let plugin = start().await;
    for service in [V1, V1BETA1] {
        let request = || ClaimsRequest { claims: vec![claim("good"), claim("other")] };
        let prepared: PrepareResponse =
            call(&plugin.claims, format!("{service}/NodePrepareResources"), request()).await.unwrap();
        let [good, other] = ["uid-good", "uid-other"].map(|uid| &prepared.claims[uid]);
        assert_eq!((good.devices[0].device_name.as_str(), good.error.as_str()), ("node-1", ""));
        assert_eq!((other.devices.len(), other.error.as_str()), (0, "no room on node 1"));
        let unprepared: UnprepareResponse =
            call(&plugin.claims, format!("{service}/NodeUnprepareResources"), request()).await.unwrap();
        assert_eq!(
            unprepared.claims.values().map(|result| result.error.as_str()).collect::<Vec<_>>(),
            ["", ""]
        );
    }
    let unknown = call::<_, ()>(&plugin.claims, format!("{V1}/NodeWatchResources"), ()).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);
}

#[tokio::test]
async fn refuses_invalid_claims() {
    let plugin = start().await;
    let path = format!("{V1}/NodePrepareResources");
    let long = "x".repeat(100);
    for uid in ["", "../../etc/cron.d/x", ".", "a/b", "a\nb", &long] {
        let request = ClaimsRequest { claims: vec![ClaimId { uid: uid.to_owned(), ..claim("good") }] };
        let prepared: PrepareResponse = call(&plugin.claims, path.clone(), request.clone()).await.unwrap();
        assert!(prepared.claims[uid].error.contains("UID"), "{uid:?}: {prepared:?}");
        let path = format!("{V1}/NodeUnprepareResources");
        let unprepared: UnprepareResponse = call(&plugin.claims, path, request).await.unwrap();
        assert!(unprepared.claims[uid].error.contains("UID"), "{uid:?}: {unprepared:?}");
    }
    for name in ["", "../pods/x", &"x".repeat(254)] {
        let request = ClaimsRequest { claims: vec![ClaimId { name: name.to_owned(), ..claim("good") }] };
        let prepared: PrepareResponse = call(&plugin.claims, path.clone(), request).await.unwrap();
        assert!(prepared.claims["uid-good"].error.contains("name"), "{name:?}: {prepared:?}");
    }
    assert!(plugin.handler.0.lock().is_empty(), "the handler gets valid claims only");
    let many = ClaimsRequest { claims: vec![claim("good"); 129] };
    let refused = call::<_, PrepareResponse>(&plugin.claims, path.clone(), many).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let large = ClaimsRequest { claims: vec![claim(&"x".repeat(70_000))] };
    let refused = call::<_, PrepareResponse>(&plugin.claims, path, large).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange);
    tokio::time::timeout(
        Duration::from_secs(5),
        call::<_, PrepareResponse>(
            &plugin.claims,
            format!("{V1}/NodePrepareResources"),
            ClaimsRequest { claims: vec![claim("good")] },
        ),
    )
    .await
    .unwrap()
    .unwrap();
}

//! The plugin for resource claims, called as the kubelet does.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_kube::dra::{
    fake::{FakeKubelet, Version},
    messages::{ClaimId, Device},
    plugin::{ClaimHandler, Plugin},
};
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Code;

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

/// A running plugin, and connections to its sockets.
struct RunningPlugin {
    handler: Arc<NamedClaims>,
    registrations: Arc<Mutex<Vec<Result<(), String>>>>,
    registration: FakeKubelet,
    claims: FakeKubelet,
    _dir: tempfile::TempDir,
    _stop: DropGuard,
}

async fn start() -> RunningPlugin {
    let dir = tempfile::tempdir().unwrap();
    let sockets = ["reg.sock", "dra.sock"].map(|name| dir.path().join(name));
    let (handler, registrations) = (Arc::new(NamedClaims::default()), Arc::new(Mutex::new(Vec::new())));
    let reported = Arc::clone(&registrations);
    let plugin = Plugin {
        driver: "numaward.io".to_owned(),
        endpoint: "/host/dra.sock".to_owned(),
        handler: handler.clone(),
        report: Arc::new(move |result| reported.lock().push(result)),
    };
    let stop = CancellationToken::new();
    let [registration, claims] = sockets.each_ref().map(|path| UnixListener::bind(path).unwrap());
    tokio::spawn(plugin.serve(registration, claims, stop.clone()));
    let registration = FakeKubelet::connect(&sockets[0]).await.unwrap();
    let claims = FakeKubelet::connect(&sockets[1]).await.unwrap();
    RunningPlugin { handler, registrations, registration, claims, _dir: dir, _stop: stop.drop_guard() }
}

fn claim(name: &str) -> ClaimId {
    ClaimId { namespace: "ns".to_owned(), uid: format!("uid-{name}"), name: name.to_owned() }
}

#[tokio::test]
async fn kubelet_registers_plugin() {
    let plugin = start().await;
    let info = plugin.registration.register("").await.unwrap();
    assert_eq!((&*info.kind, &*info.name, &*info.endpoint), ("DRAPlugin", "numaward.io", "/host/dra.sock"));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    plugin.registration.register("another version").await.unwrap();
    let registrations = plugin.registrations.lock().clone();
    assert_eq!(registrations[0], Ok(()));
    assert!(registrations[1].as_ref().unwrap_err().contains("another version"));
}

#[tokio::test]
async fn error_is_of_one_claim() {
    let plugin = start().await;
    for version in [Version::V1, Version::V1Beta1] {
        let claims = || vec![claim("good"), claim("other")];
        let prepared = plugin.claims.prepare(version, claims()).await.unwrap().claims;
        let [good, other] = ["uid-good", "uid-other"].map(|uid| &prepared[uid]);
        assert_eq!((good.devices[0].device_name.as_str(), good.error.as_str()), ("node-1", ""));
        assert_eq!((other.devices.len(), other.error.as_str()), (0, "no room on node 1"));
        let unprepared = plugin.claims.unprepare(version, claims()).await.unwrap().claims;
        assert_eq!(unprepared.values().map(|result| result.error.as_str()).collect::<Vec<_>>(), ["", ""]);
    }
    let method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeWatchResources";
    let unknown = plugin.claims.call::<_, ()>(method, ()).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);
}

#[tokio::test]
async fn refuses_invalid_claims() {
    let (plugin, version) = (start().await, Version::V1);
    let long = "x".repeat(100);
    for uid in ["", "../../etc/cron.d/x", ".", "a/b", "a\nb", &long] {
        let claims = || vec![ClaimId { uid: uid.to_owned(), ..claim("good") }];
        let prepared = plugin.claims.prepare(version, claims()).await.unwrap();
        assert!(prepared.claims[uid].error.contains("UID"), "{uid:?}: {prepared:?}");
        let unprepared = plugin.claims.unprepare(version, claims()).await.unwrap();
        assert!(unprepared.claims[uid].error.contains("UID"), "{uid:?}: {unprepared:?}");
    }
    for name in ["", "../pods/x", &"x".repeat(254)] {
        let claims = vec![ClaimId { name: name.to_owned(), ..claim("good") }];
        let prepared = plugin.claims.prepare(version, claims).await.unwrap();
        assert!(prepared.claims["uid-good"].error.contains("name"), "{name:?}: {prepared:?}");
    }
    assert!(plugin.handler.0.lock().is_empty(), "the handler gets valid claims only");
    let many = plugin.claims.prepare(version, vec![claim("good"); 129]).await.unwrap_err();
    assert_eq!(many.code(), Code::InvalidArgument);
    let large = plugin.claims.prepare(version, vec![claim(&"x".repeat(70_000))]).await.unwrap_err();
    assert_eq!(large.code(), Code::OutOfRange);
    let prepared = plugin.claims.prepare(version, vec![claim("good")]).await.unwrap();
    assert_eq!(prepared.claims["uid-good"].error, "");
}

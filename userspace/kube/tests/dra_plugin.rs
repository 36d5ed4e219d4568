//! The plugin for resource claims, called as the kubelet does.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_kube::dra::{
    fake::{FakeKubelet, Version},
    health::{DeviceState, HealthReporter, HealthSource},
    messages::{ClaimId, Device, DeviceId, HealthStatus},
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

/// Two devices; node 1 has a problem while this is true.
#[derive(Default)]
struct TwoNodes(Mutex<bool>);

impl HealthSource for TwoNodes {
    fn states(&self) -> BoxFuture<'_, Vec<DeviceState>> {
        let problem = self.0.lock().then(|| "CPUs 4-7 are offline".to_owned());
        let state = |device: &str, problem| DeviceState { device: device.to_owned(), problem };
        async move { vec![state("node-0", None), state("node-1", problem)] }.boxed()
    }
}

/// A running plugin, and connections to its sockets.
struct RunningPlugin {
    handler: Arc<NamedClaims>,
    registrations: Arc<Mutex<Vec<Result<(), String>>>>,
    registration: FakeKubelet,
    claims: FakeKubelet,
    health: Arc<TwoNodes>,
    _dir: tempfile::TempDir,
    stop: DropGuard,
}

async fn start() -> RunningPlugin {
    let dir = tempfile::tempdir().unwrap();
    let sockets = ["reg.sock", "dra.sock"].map(|name| dir.path().join(name));
    let (handler, registrations) = (Arc::new(NamedClaims::default()), Arc::new(Mutex::new(Vec::new())));
    let reported = Arc::clone(&registrations);
    let health = Arc::new(TwoNodes::default());
    let plugin = Plugin {
        driver: "numaward.io".to_owned(),
        endpoint: "/host/dra.sock".to_owned(),
        handler: handler.clone(),
        health: HealthReporter {
            source: health.clone(),
            pool: "n1".to_owned(),
            interval: Duration::from_millis(20),
        },
        report: Arc::new(move |result| reported.lock().push(result)),
    };
    let stop = CancellationToken::new();
    let [registration, claims] = sockets.each_ref().map(|path| UnixListener::bind(path).unwrap());
    tokio::spawn(plugin.serve(registration, claims, stop.clone()));
    let registration = FakeKubelet::connect(&sockets[0]).await.unwrap();
    let claims = FakeKubelet::connect(&sockets[1]).await.unwrap();
    RunningPlugin { handler, registrations, registration, claims, health, _dir: dir, stop: stop.drop_guard() }
}

fn claim(name: &str) -> ClaimId {
    ClaimId { namespace: "ns".to_owned(), uid: format!("uid-{name}"), name: name.to_owned() }
}

#[tokio::test]
async fn kubelet_registers_plugin() {
    let plugin = start().await;
    let info = plugin.registration.register("").await.unwrap();
    assert_eq!((&*info.kind, &*info.name, &*info.endpoint), ("DRAPlugin", "numaward.io", "/host/dra.sock"));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"]);
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

#[tokio::test]
async fn kubelet_watches_health() {
    let plugin = start().await;
    let mut lists = plugin.claims.watch_health().await.unwrap();
    let mut next = async |expected: HealthStatus, message: &str| {
        for _ in 0..100 {
            let list = lists.message().await.unwrap().unwrap().devices;
            let [zero, one] = &list[..] else { panic!("each list has all devices: {list:?}") };
            let id = |name: &str| DeviceId { pool_name: "n1".to_owned(), device_name: name.to_owned() };
            assert_eq!([&zero.device, &one.device], [&Some(id("node-0")), &Some(id("node-1"))]);
            assert_eq!((zero.health(), zero.message.as_str()), (HealthStatus::Healthy, ""));
            assert!(one.last_updated_time > 1_600_000_000, "{one:?}");
            if (one.health(), one.message.as_str()) == (expected, message) {
                return;
            }
        }
        panic!("never {expected:?}");
    };
    next(HealthStatus::Healthy, "").await;
    *plugin.health.0.lock() = true;
    next(HealthStatus::Unhealthy, "CPUs 4-7 are offline").await;
    *plugin.health.0.lock() = false;
    next(HealthStatus::Healthy, "").await;
    // Claims are prepared meanwhile, and an open watch does not keep the plugin from its end.
    let prepared = plugin.claims.prepare(Version::V1, vec![claim("good")]).await.unwrap();
    assert_eq!(prepared.claims["uid-good"].error, "");
    drop(plugin.stop);
    while let Ok(Some(_)) = lists.message().await {}
}

//! The kubelet's watch of the health of devices.
//!
//! The kubelet keeps a stream of lists open, and writes the health of a claimed device into the status of the pods that use it. It takes a
//! device as unknown if no list has come for 30 s, so each list has all devices and is sent again.
//!
//! Source: `pkg/kubelet/cm/dra` and `k8s.io/kubelet/pkg/apis/dra-health/v1alpha1` of Kubernetes 1.36.

use std::{
    future::ready,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::{
    FutureExt as _, StreamExt as _,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, body::Body};

use super::messages::{DeviceHealth, DeviceId, HealthList, HealthStatus};
use crate::grpc_service::{GrpcMethods, grpc, unknown_method};

/// Name of the service for the registration.
pub const VERSION: &str = "v1alpha1.DRAResourceHealth";
/// Interval of the lists.
pub const INTERVAL: Duration = Duration::from_secs(10);

const WATCH: &str = "NodeWatchResources";
/// Maximum size of a request, which is empty.
const MAX_REQUEST_BYTES: usize = 1 << 10;

/// State of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    pub device: String,
    /// Reason why the device is unhealthy; `None` if it is healthy.
    pub problem: Option<String>,
}

/// Source of the present states of all devices of this host.
pub trait HealthSource: Send + Sync + 'static {
    fn states(&self) -> BoxFuture<'_, Vec<DeviceState>>;
}

/// Sender of the health of devices. Clones share the source.
#[derive(Clone)]
pub struct HealthReporter {
    pub source: Arc<dyn HealthSource>,
    /// Pool of the devices.
    pub pool: String,
    /// Interval of the lists: less than the kubelet waits.
    pub interval: Duration,
}

impl HealthReporter {
    async fn list(self) -> HealthList {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let states = self.source.states().await.into_iter();
        let devices = states.map(|DeviceState { device, problem }| {
            let health =
                if problem.is_some() { HealthStatus::Unhealthy } else { HealthStatus::Healthy } as i32;
            DeviceHealth {
                device: Some(DeviceId { pool_name: self.pool.clone(), device_name: device }),
                health,
                last_updated_time: i64::try_from(now).unwrap_or_default(),
                health_check_timeout_seconds: 0,
                message: problem.unwrap_or_default(),
            }
        });
        HealthList { devices: devices.collect() }
    }

    /// Returns the lists until the token is cancelled.
    fn lists(self, stop: CancellationToken) -> BoxStream<'static, Result<HealthList, Status>> {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let next = move |mut ticks: tokio::time::Interval| {
            let reporter = self.clone();
            async move {
                ticks.tick().await;
                Some((Ok(reporter.list().await), ticks))
            }
        };
        stream::unfold(ticks, next).take_until(stop.cancelled_owned()).boxed()
    }
}

/// The service that the kubelet watches.
#[derive(Clone)]
pub(super) struct Health {
    pub(super) reporter: HealthReporter,
    pub(super) stop: CancellationToken,
}

impl GrpcMethods for Health {
    const SERVICE: &'static str = VERSION;

    fn answer(self, request: http::Request<Body>) -> BoxFuture<'static, http::Response<Body>> {
        let Self { reporter, stop } = self;
        async move {
            match request.uri().path().rsplit('/').next().unwrap_or_default() {
                WATCH => {
                    let method = |_: Request<()>| {
                        ready(Ok::<_, Status>(Response::new(reporter.clone().lists(stop.clone()))))
                    };
                    grpc(MAX_REQUEST_BYTES).server_streaming(tower::service_fn(method), request).await
                }
                _ => unknown_method(request.uri().path()),
            }
        }
        .boxed()
    }
}

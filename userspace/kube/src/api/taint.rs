//! Removal of the taint that a new Kubernetes node has until the daemon is ready.
//!
//! The kubelet registers its node with the taint (`--register-with-taints`), so that no pod without a toleration of it is scheduled to the
//! node. The taint is removed once per start of the daemon: a node gets it again only when it is registered again, and then the daemon's
//! pod is another one.
//!
//! Taints are a list without a merge key. So the patch first tests that the list is still the one that was read, and is repeated if
//! another client has changed the list meanwhile.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{ApiMetrics, Cause, Operation, Report, RequestError};

/// Times of the removal of a taint.
#[derive(Clone, Copy, Debug)]
pub struct TaintTiming {
    /// Interval of the checks whether the daemon is ready.
    pub poll_interval: Duration,
    /// Time after which it is reported that the daemon is not ready yet.
    pub report_after: Duration,
    /// Time after the first failed request. It doubles with each further one.
    pub retry_delay: Duration,
    pub max_retry_delay: Duration,
}

impl Default for TaintTiming {
    fn default() -> Self {
        Self {
            poll_interval: Duration::from_secs(1),
            report_after: Duration::from_mins(1),
            retry_delay: Duration::from_secs(1),
            max_retry_delay: Duration::from_secs(30),
        }
    }
}

/// Remover of the startup taint of this Kubernetes node.
pub struct TaintRemover {
    pub client: Client,
    /// The name of this Kubernetes node.
    pub node: String,
    /// The key of the taint. It is removed with every effect.
    pub key: String,
    /// Returns true once pods that start on this node are placed.
    pub is_ready: Arc<dyn Fn() -> bool + Send + Sync>,
    pub timing: TaintTiming,
    pub metrics: ApiMetrics,
    /// Called with the result of each attempt.
    pub report: Report,
}

impl TaintRemover {
    /// Waits until the daemon is ready, and removes the taint. Failed requests are repeated until the token is cancelled.
    pub fn run(self, stop: CancellationToken) -> BoxFuture<'static, ()> {
        async move {
            stop.run_until_cancelled(self.remove()).await;
        }
        .boxed()
    }

    async fn remove(self) {
        let mut delay = self.timing.retry_delay;
        loop {
            let (begin, mut is_reported) = (Instant::now(), false);
            while !(self.is_ready)() {
                if begin.elapsed() >= self.timing.report_after && !is_reported {
                    is_reported = true;
                    (self.report)(Err(format!(
                        "the taint {} stays: numaward has not started completely, or the container runtime is not connected",
                        self.key
                    )));
                }
                sleep(self.timing.poll_interval).await;
            }
            match self.try_remove().await {
                Ok(removed) => {
                    (self.report)(Ok(()));
                    if removed {
                        tracing::info!(
                            node = self.node,
                            taint = self.key,
                            "numaward is ready, and has removed the startup taint"
                        );
                    }
                    return;
                }
                Err(error) => {
                    self.metrics.failed(Operation::Taint, &error);
                    let hint = match error.cause {
                        Cause::Forbidden => {
                            "; the service account needs the verbs get and patch of the resource nodes"
                        }
                        _ => "",
                    };
                    (self.report)(Err(format!("the taint {} cannot be removed: {error}{hint}", self.key)));
                    sleep(delay).await;
                    delay = (delay * 2).min(self.timing.max_retry_delay);
                }
            }
        }
    }

    /// Removes the taint if the node has it. Returns true if it had it.
    async fn try_remove(&self) -> Result<bool, RequestError> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &ApiResource::erase::<Node>(&()));
        let node = api.get(&self.node).await?;
        let taints = node.data["spec"]["taints"].as_array().cloned().unwrap_or_default();
        let is_other = |taint: &&Value| taint["key"] != *self.key;
        let rest: Vec<&Value> = taints.iter().filter(is_other).collect();
        if rest.len() == taints.len() {
            return Ok(false);
        }
        let patch = json!([
            {"op": "test", "path": "/spec/taints", "value": taints},
            {"op": "replace", "path": "/spec/taints", "value": rest},
        ]);
        let request = http::Request::patch(format!("/api/v1/nodes/{}", self.node))
            .header(http::header::CONTENT_TYPE, "application/json-patch+json")
            .body(patch.to_string().into_bytes())
            .map_err(kube::Error::HttpError)?;
        self.client.request::<Value>(request).await?;
        Ok(true)
    }
}

//! Publishes the NodeResourceTopology of this host by server-side apply.
//!
//! # Algorithm
//! The latest topology is in a [`watch`] channel. It is written when it differs from the one written last, but at
//! most once per [`Publisher::interval`]. An unchanged one is written again after [`REWRITE_INTERVAL`], in case that
//! another client has changed or deleted the object. A failed write is repeated with the topology of that time, after
//! a growing delay.
//!
//! # Rights
//! `noderesourcetopologies`: create and patch. `nodes`: get, so that the object is deleted together with the node.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{GROUP, KIND, NodeTopology, PLURAL, VERSION};
use crate::api::{ApiMetrics, Cause, Operation, Report, RequestError, node_uid};

/// The field manager of server-side apply.
const MANAGER: &str = "numaward";
/// Time after which an unchanged topology is written again.
const REWRITE_INTERVAL: Duration = Duration::from_mins(5);

/// Publisher of this host's NodeResourceTopology.
pub struct Publisher {
    pub client: Client,
    /// The name of this Kubernetes node.
    pub node: String,
    /// Minimum time between two writes.
    pub interval: Duration,
    pub metrics: ApiMetrics,
    /// Called with the result of each write.
    pub report: Report,
}

impl Publisher {
    /// Publishes the topology in `latest` until the token is cancelled or the sender is dropped. `None` is not published.
    pub fn run(
        self,
        latest: watch::Receiver<Option<Arc<NodeTopology>>>,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()> {
        async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.publish(latest) => {}
            }
        }
        .boxed()
    }

    async fn publish(self, mut latest: watch::Receiver<Option<Arc<NodeTopology>>>) {
        let mut backoff = DefaultBackoff::default();
        let mut uid = None;
        let mut written: Option<(Arc<NodeTopology>, Instant)> = None;
        loop {
            let now = latest.borrow_and_update().clone();
            let due = match (&now, &written) {
                (None, _) => None,
                (Some(_), None) => Some(Instant::now()),
                (Some(now), Some((before, at))) if now == before => Some(*at + REWRITE_INTERVAL),
                (Some(_), Some((_, at))) => Some(*at + self.interval),
            };
            let Some(due) = due else {
                if latest.changed().await.is_err() {
                    return;
                }
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                changed = latest.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
            }
            let Some(now) = latest.borrow_and_update().clone() else { continue };
            match self.write(&now, &mut uid).await {
                Ok(()) => {
                    self.metrics.topology_updates.inc();
                    (self.report)(Ok(()));
                    backoff.reset();
                    written = Some((now, Instant::now()));
                }
                Err(error) => {
                    self.metrics.failed(Operation::Topology, &error);
                    (self.report)(Err(error_text(&error)));
                    tokio::time::sleep(backoff.next().unwrap_or_default()).await;
                }
            }
        }
    }

    async fn write(&self, topology: &NodeTopology, uid: &mut Option<String>) -> Result<(), RequestError> {
        if uid.is_none() {
            *uid = node_uid(&self.client, &self.node).await;
        }
        let gvk = GroupVersionKind::gvk(GROUP, VERSION, KIND);
        let resource = ApiResource::from_gvk_with_plural(&gvk, PLURAL);
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        // These fields belong to this manager, whatever another one has set.
        let params = PatchParams::apply(MANAGER).force();
        let object = topology.object(&self.node, uid.as_deref());
        api.patch(&self.node, &params, &Patch::Apply(&object)).await?;
        Ok(())
    }
}

fn error_text(error: &RequestError) -> String {
    let hint = match error.cause {
        Cause::NotFound => {
            format!("; is the resource definition {PLURAL}.{GROUP} with version {VERSION} installed?")
        }
        _ => String::new(),
    };
    format!("the NodeResourceTopology cannot be written: {error}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docs_name_rewrite_interval() {
        let page = include_str!("../../../../docs/kubernetes.md");
        let line = page.lines().find(|line| line.starts_with("| NodeResourceTopologies: patch")).unwrap();
        let seconds = REWRITE_INTERVAL.as_secs();
        let expected = format!("unchanged once in {seconds} s | {} requests", (5000 + seconds / 2) / seconds);
        assert!(line.contains(&expected), "{expected}: {line}");
    }
}

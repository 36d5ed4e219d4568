//! Writes the object by server-side apply.
//!
//! Algorithm: the latest that is to be published waits in a [`watch`]; it is written when it differs from what was
//! written, but not sooner after the last write than the least interval; and once in a while all the same, so that one
//! that somebody changed or deleted comes back. A write that fails is tried again after a growing pause, with what is
//! the latest then.
//!
//! It takes these rights: `noderesourcetopologies` create and patch; `nodes` get, to be deleted with the node.

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
use crate::api::{ApiMetrics, Cause, Operation, Report, RequestError};

/// The field manager.
const MANAGER: &str = "numaward";
/// What did not change is written again after this time.
const REPEAT: Duration = Duration::from_mins(5);

/// Publishes this host's NodeResourceTopology.
pub struct Publisher {
    /// The client.
    pub client: Client,
    /// The name of this Kubernetes node.
    pub node: String,
    /// The least time between two writes.
    pub interval: Duration,
    /// What is counted.
    pub metrics: ApiMetrics,
    /// Called with how it goes.
    pub report: Report,
}

impl Publisher {
    /// Publishes what `latest` holds, from the first there is, until the token is cancelled or nobody will give
    /// anything more.
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
                (Some(now), Some((before, at))) if now == before => Some(*at + REPEAT),
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
                    (self.report)(Err(explained(&error)));
                    tokio::time::sleep(backoff.next().unwrap_or_default()).await;
                }
            }
        }
    }

    async fn write(&self, topology: &NodeTopology, uid: &mut Option<String>) -> Result<(), RequestError> {
        if uid.is_none() {
            *uid = self.uid().await;
        }
        let gvk = GroupVersionKind::gvk(GROUP, VERSION, KIND);
        let resource = ApiResource::from_gvk_with_plural(&gvk, PLURAL);
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        // What others have set in these fields was never theirs to set.
        let params = PatchParams::apply(MANAGER).force();
        let object = topology.object(&self.node, uid.as_deref());
        api.patch(&self.node, &params, &Patch::Apply(&object)).await?;
        Ok(())
    }

    /// The UID of the Kubernetes node. Without it the object outlives its node, which is no reason not to write it.
    async fn uid(&self) -> Option<String> {
        let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Node>(&());
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        match api.get(&self.node).await.map_err(RequestError::from) {
            Ok(node) => node.metadata.uid,
            Err(error) => {
                tracing::debug!(%error, node = self.node, "the UID of the Kubernetes node is not known");
                None
            }
        }
    }
}

fn explained(error: &RequestError) -> String {
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
    fn what_did_not_change_is_written_as_often_as_the_book_says() {
        let page = include_str!("../../../../docs/kubernetes.md");
        let line = page.lines().find(|line| line.starts_with("| NodeResourceTopologies: patch")).unwrap();
        let seconds = REPEAT.as_secs();
        let expected = format!("unchanged once in {seconds} s | {} requests", (5000 + seconds / 2) / seconds);
        assert!(line.contains(&expected), "{expected}: {line}");
    }
}

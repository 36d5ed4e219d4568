//! Kubernetes events about moves that make room: on the moved pods, and on the refused pod for which they are made.
//!
//! The reconciler reports each step as an event of numaward, with the pod in its details. The messages on a pod name no other pod: users
//! of one namespace may not see those of another.

use std::sync::Arc;

use numaward_api::{Event, EventKind};
use numaward_kube::pod::{Notice, PodId, PodSource};
use numaward_observe::events::{StreamItem, Subscription};

/// Creates Kubernetes events until the daemon stops.
pub async fn report_moves(mut events: Subscription, pods: Arc<dyn PodSource>) {
    loop {
        match events.next().await {
            StreamItem::Event(event) => {
                if let Some(notice) = notice(&event) {
                    pods.notify(notice);
                }
            }
            StreamItem::Missed(count) => {
                tracing::warn!(count, "Kubernetes events about moved pods may be missing: events were lost");
            }
            StreamItem::Closed => return,
        }
    }
}

/// Returns the Kubernetes event for a step of a rebalance that concerns a pod.
fn notice(event: &Event) -> Option<Notice> {
    if event.kind != EventKind::Rebalance {
        return None;
    }
    let detail = |name: &str| event.details.get(name).map(String::as_str);
    let (namespace, name) = detail("pod")?.split_once('/')?;
    let pod =
        PodId { namespace: namespace.to_owned(), name: name.to_owned(), uid: detail("uid")?.to_owned() };
    let (reason, is_warning, message) = match detail("step")? {
        "moved" => ("NumaMoved", false, event.message.as_str()),
        "taken_back" => ("NumaMovedBack", false, event.message.as_str()),
        "done" => (
            "NumaRoomMade",
            false,
            "There is room for the pod on this node: running workloads were moved where necessary. It starts at the next attempt of \
             the kubelet.",
        ),
        "failed" => (
            "NumaRoomNotMade",
            true,
            "Moves of running workloads on this node made no room for the pod. The events of numaward have the reason.",
        ),
        _ => return None,
    };
    Some(Notice { pod, reason: reason.to_owned(), message: message.to_owned(), is_warning })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use numaward_model::EventReport;
    use numaward_observe::events::Events;

    use super::*;
    use crate::kubernetes::nri::tests::FakePods;

    #[tokio::test]
    async fn pods_get_events_of_moves() {
        let (events, pods) = (Events::default(), Arc::new(FakePods::default()));
        let reporting = tokio::spawn(report_moves(events.subscribe(None), pods.clone()));
        let report = |kind, step: &str, message: &str| {
            EventReport::new(kind, message).detail("step", step).detail("pod", "shop/db").detail("uid", "u1")
        };
        events.report(report(EventKind::Rebalance, "moved", "shop/db/main was moved to make room."));
        events.report(report(EventKind::Rebalance, "done", "There is room for shop/db."));
        events.report(report(EventKind::Rebalance, "failed", "No room could be made: other/pod stays."));
        events.report(report(EventKind::Rebalance, "started", "not for the pod"));
        events.report(report(EventKind::Drift, "moved", "of another kind"));
        events.report(EventReport::new(EventKind::Rebalance, "without a pod").detail("step", "moved"));
        tokio::time::timeout(Duration::from_secs(10), async {
            while pods.notices.lock().unwrap().len() < 3 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .unwrap();
        events.close();
        reporting.await.unwrap();
        let notices = pods.notices.lock().unwrap();
        let id = PodId { namespace: "shop".to_owned(), name: "db".to_owned(), uid: "u1".to_owned() };
        assert!(notices.iter().all(|notice| notice.pod == id), "{notices:?}");
        let reasons: Vec<_> = notices.iter().map(|notice| notice.reason.as_str()).collect();
        assert_eq!(reasons, ["NumaMoved", "NumaRoomMade", "NumaRoomNotMade"]);
        assert_eq!(notices[0].message, "shop/db/main was moved to make room.");
        assert!(!notices[2].message.contains("other/pod"), "another namespace");
    }
}

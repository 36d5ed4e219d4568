//! Claims of the whole host, and a scheduler that is simulated.

use axum::http::StatusCode;
use numaward_kube::dra::slices::Publication;

use super::*;

/// Returns the names of the conditions of a claim's devices.
fn conditions(claim: &Value) -> Vec<String> {
    let states = claim["status"]["devices"].as_array().into_iter().flatten();
    let conditions = states.flat_map(|state| state["conditions"].as_array().into_iter().flatten());
    conditions.filter_map(|condition| condition["type"].as_str().map(str::to_owned)).collect()
}

/// Returns a pod that is nominated for this host.
fn nominated(name: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("pod-{name}")},
        "spec": {"resourceClaims": [{"name": "main", "resourceClaimName": name}],
            "containers": [{"name": "main", "resources": {"claims": [{"name": "main"}]}}]},
        "status": {"nominatedNodeName": "n1"}})
}

impl DraBench {
    /// Places claims of the whole host. Publications are recorded and completed.
    pub(super) fn place(
        &self,
        preparer: ClaimPreparer,
        (writer, nominated): (StatusWriter, Pods),
        refused: RefusedRequests,
        stop: &CancellationToken,
    ) {
        let (following, until, of) = (nominated.clone(), stop.clone(), writer.client.clone());
        tokio::spawn(async move {
            following.follow_nominated(of, "n1".to_owned(), Arc::new(|_| ()), until).await;
        });
        let publication = Publication::default();
        let (publisher, host, server, recorded) =
            (publication.clone(), self.host.clone(), Arc::downgrade(&self.server), self.publications.clone());
        let publishing = async move {
            let mut requests = publisher.requests();
            while requests.changed().await.is_ok() {
                let number = *requests.borrow_and_update();
                let Some(server) = server.upgrade() else { return };
                let pool = host.assigned.lock().unwrap().ledger.shared_pool().to_string();
                let claims = ["a", "b"].into_iter().filter_map(|name| server.claim("ns", name));
                let conditions = claims.flat_map(|claim| conditions(&claim)).collect();
                recorded.lock().unwrap().push((pool, conditions));
                publisher.complete(number);
            }
        };
        tokio::spawn(stop.clone().run_until_cancelled_owned(publishing));
        let placer = HostPlacer { preparer, nominated, writer, publication, refused };
        tokio::spawn(stop.clone().run_until_cancelled_owned(placer.run()));
    }

    /// Allocates a claim of the whole host, and nominates its pod.
    fn nominate(&self, name: &str, cpus: u32) -> ClaimId {
        let claim = self.allocate_host(name, cpus, |_| {});
        self.server.put_pod(nominated(name));
        claim
    }

    fn allocate_host(&self, name: &str, cpus: u32, change: impl FnOnce(&mut Value)) -> ClaimId {
        self.allocate_with(name, 0, cpus, |claim| {
            let result = &mut claim["status"]["allocation"]["devices"]["results"][0];
            (result["pool"], result["device"]) = (json!("n1/host"), json!("host"));
            change(claim);
        })
    }

    fn bind(&self, name: &str) {
        let mut pod = nominated(name);
        (pod["spec"]["nodeName"], pod["status"]) = (json!("n1"), json!({}));
        self.server.put_pod(pod);
    }

    /// Clears the allocation of a claim, as the scheduler does.
    fn deallocate(&self, name: &str) {
        let mut claim = self.server.claim("ns", name).unwrap();
        claim["status"] = json!({});
        self.server.put_claim(claim);
    }

    fn conditions(&self, name: &str) -> Vec<String> {
        self.server.claim("ns", name).map(|claim| conditions(&claim)).unwrap_or_default()
    }

    async fn until_decided(&self, name: &str, expected: &str) {
        until(|| !self.conditions(name).is_empty(), name).await;
        assert_eq!(self.conditions(name), [expected], "{:#}", self.server.claim("ns", name).unwrap());
    }

    /// Returns the number of writes of the status of claims.
    fn status_writes(&self) -> usize {
        self.server
            .requests()
            .iter()
            .filter(|request| request.starts_with("PATCH") && request.contains("/status"))
            .count()
    }
}

const PLACED: &str = "numaward.io/placed";
const NO_ROOM: &str = "numaward.io/no-room";

#[tokio::test]
async fn host_claim_is_placed_before_its_pod_is_bound() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    let claim = bench.nominate("a", 6);
    bench.until_decided("a", PLACED).await;
    let state = &bench.server.claim("ns", "a").unwrap()["status"]["devices"][0];
    assert_eq!(
        [&state["driver"], &state["pool"], &state["device"], &state["shareID"]],
        ["numaward.io", "n1/host", "host", "s1"]
    );
    let condition = &state["conditions"][0];
    assert_eq!((&condition["status"], &condition["reason"]), (&json!("True"), &json!("Placed")));
    assert!(condition["lastTransitionTime"].as_str().unwrap().ends_with('Z'));
    let pool = bench.shared_pool();
    assert_eq!(pool.matches(|c: char| c.is_ascii_digit()).count(), 2, "{pool}");
    // The devices are published after the reservation and before the condition.
    assert_eq!(*bench.publications.lock().unwrap(), [(pool.clone(), Vec::<String>::new())]);
    assert!(bench.specifications().is_empty(), "it is not prepared yet");
    bench.bind("a");
    for _ in 0..2 {
        let prepared = prepare(&kubelet, &claim).await;
        let [device] = &prepared.devices[..] else { panic!("{prepared:?}") };
        assert_eq!((device.pool_name.as_str(), device.device_name.as_str()), ("n1/host", "host"));
    }
    assert_eq!((bench.shared_pool(), bench.specifications().len()), (pool, 1));
    // A prepared claim stays until the kubelet ends it, also if its pod was deleted by force.
    bench.deallocate("a");
    bench.server.delete_pod("ns", "a");
    let other = bench.nominate("b", 1);
    bench.until_decided("b", PLACED).await;
    assert_eq!(daemon.reserved().await, ["uid-a", "uid-b"]);
    assert_eq!(unprepare(&kubelet, &claim).await, "");
    assert_eq!(daemon.reserved().await, [other.uid]);
    assert_eq!(bench.status_writes(), 2);
    drop(kubelet);
    daemon.stop().await;
}

#[tokio::test]
async fn host_claim_without_room_is_refused() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    bench.nominate("a", 8);
    bench.until_decided("a", NO_ROOM).await;
    let condition = bench.server.claim("ns", "a").unwrap()["status"]["devices"][0]["conditions"][0].take();
    let message = condition["message"].as_str().unwrap();
    assert!(message.contains("cpu requested 8, free 3 on node 0, 4 on node 1"), "{message}");
    assert!(condition["reason"].as_str().unwrap().chars().all(|c| c.is_ascii_alphanumeric()), "{condition}");
    // Less is published before the scheduler may try again.
    assert_eq!(*bench.publications.lock().unwrap(), [("0-7".to_owned(), Vec::<String>::new())]);
    let [request] = &daemon.refused.with(&BTreeMap::new())[..] else { panic!() };
    assert_eq!(request["cpu"].units(), Some(8));
    assert!(daemon.reserved().await.is_empty());
    // The scheduler tries again, with another claim of the same pod.
    bench.deallocate("a");
    bench.allocate_host("a", 7, |claim| {
        claim["status"]["allocation"]["devices"]["results"][0]["shareID"] = json!("s2");
    });
    bench.until_decided("a", PLACED).await;
    daemon.stop().await;
}

#[tokio::test]
async fn unused_host_claims_are_given_back() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    bench.nominate("a", 3);
    bench.nominate("b", 2);
    bench.until_decided("a", PLACED).await;
    bench.until_decided("b", PLACED).await;
    // The scheduler starts again: the allocation is still there.
    bench.server.delete_pod("ns", "b");
    bench.deallocate("a");
    bench.server.delete_pod("ns", "a");
    until(|| bench.shared_pool().len() > "0,1,2,3,4".len() || bench.shared_pool().contains('-'), "a is free")
        .await;
    while daemon.reserved().await != ["uid-b"] {
        sleep(Duration::from_millis(20)).await;
    }
    bench.server.delete_claim("ns", "b");
    bench.server.put_pod(nominated("c"));
    while !daemon.reserved().await.is_empty() {
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(bench.shared_pool(), "0-7");
    daemon.stop().await;
}

#[tokio::test]
async fn restarted_daemon_continues_with_host_claims() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    bench.nominate("a", 3);
    bench.nominate("b", 2);
    bench.until_decided("a", PLACED).await;
    bench.until_decided("b", PLACED).await;
    daemon.stop().await;
    // Meanwhile, one pod ends, one is bound, and one is nominated.
    bench.deallocate("a");
    bench.server.delete_pod("ns", "a");
    bench.bind("b");
    let late = bench.nominate("late", 5);
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    bench.until_decided("late", PLACED).await;
    assert_eq!(daemon.reserved().await, ["uid-b", "uid-late"]);
    assert!(bench.specifications().is_empty());
    bench.bind("late");
    assert_eq!(prepare(&kubelet, &late).await.error, "");
    assert_eq!((bench.status_writes(), bench.specifications().len()), (3, 1));
    drop(kubelet);
    daemon.stop().await;
}

#[tokio::test]
async fn condition_of_earlier_allocation_does_not_count() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let state = |share: &str, name: &str| {
        json!({"driver": "numaward.io", "pool": "n1/host", "device": "host", "shareID": share,
            "conditions": [{"type": name, "status": "True"}]})
    };
    bench.allocate_host("a", 3, |claim| claim["status"]["devices"] = json!([state("before", PLACED)]));
    bench.server.put_pod(nominated("a"));
    until(|| bench.conditions("a").len() == 2, "a").await;
    assert_eq!(bench.server.claim("ns", "a").unwrap()["status"]["devices"][1]["shareID"], "s1");
    assert_eq!(daemon.reserved().await, ["uid-a"]);
    daemon.stop().await;
}

#[tokio::test]
async fn pods_nominated_at_once_get_no_cpu_twice() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    // The scheduler nominates a pod before it allocates the claims.
    for name in ["a", "b"] {
        bench.server.put_pod(nominated(name));
    }
    sleep(Duration::from_millis(300)).await;
    for name in ["a", "b"] {
        bench.allocate_host(name, 4, |_| {});
    }
    until(|| ["a", "b"].iter().all(|name| !bench.conditions(name).is_empty()), "both").await;
    let mut both = [bench.conditions("a"), bench.conditions("b")].concat();
    both.sort();
    assert_eq!(both, [NO_ROOM, PLACED]);
    assert_eq!(daemon.reserved().await.len(), 1);
    daemon.stop().await;
}

#[tokio::test]
async fn failed_write_is_repeated() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    for status in [StatusCode::SERVICE_UNAVAILABLE, StatusCode::CONFLICT] {
        bench.server.refuse_next("/status", status);
    }
    bench.nominate("a", 6);
    bench.until_decided("a", PLACED).await;
    assert_eq!((bench.status_writes(), daemon.reserved().await), (3, vec!["uid-a".to_owned()]));
    let publications = bench.publications.lock().unwrap().clone();
    assert!(publications.iter().all(|of| *of == publications[0]), "{publications:?}");
    daemon.stop().await;
}

/// A claim that numaward cannot read or give does not keep its pod waiting.
#[tokio::test]
async fn invalid_host_claim_is_refused() {
    let mut bench = DraBench::new().await;
    bench.config.kubernetes.beyond_quota_namespaces.clear();
    let daemon = bench.start().await;
    bench.nominate("a", 6);
    bench.until_decided("a", NO_ROOM).await;
    let message = |name: &str| {
        bench.server.claim("ns", name).unwrap()["status"]["devices"][0]["conditions"][0]["message"]
            .to_string()
    };
    assert!(message("a").contains("the resource claims of the pod have 6 of cpu"), "{}", message("a"));
    bench.allocate_host("b", 1, |claim| set_parameters(claim, "FromClaim", &json!({"nodes": "0"})));
    bench.server.put_pod(nominated("b"));
    bench.until_decided("b", NO_ROOM).await;
    assert!(message("b").contains("are refused: nodes"), "{}", message("b"));
    assert!(bench.publications.lock().unwrap().is_empty(), "the host has room");
    daemon.stop().await;
}

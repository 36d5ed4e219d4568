//! The PodResources API: numaward's server and client, over a Unix socket.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{sync::Arc, time::Duration};

use numaward_kube::pod_resources::{
    AssignmentSource, Client, PodResourcesError,
    messages::{AllocatableResponse, AssignedPodResources, ContainerMemory, ContainerResources},
    serve,
};
use numaward_topology::Bytes;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

struct FixedAssignments;

impl AssignmentSource for FixedAssignments {
    fn pods(&self) -> Vec<AssignedPodResources> {
        let container = ContainerResources {
            name: "main".to_owned(),
            cpu_ids: vec![2, 3],
            memory: vec![ContainerMemory::new("memory", Bytes::gib(1), &"1".parse().unwrap())],
            ..ContainerResources::default()
        };
        vec![AssignedPodResources {
            name: "db".to_owned(),
            namespace: "prod".to_owned(),
            containers: vec![container],
            ..AssignedPodResources::default()
        }]
    }

    fn allocatable(&self) -> AllocatableResponse {
        AllocatableResponse { cpu_ids: (1..1000).collect(), ..AllocatableResponse::default() }
    }
}

#[tokio::test]
async fn serves_assignments() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let stop = CancellationToken::new();
    let server =
        tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), Arc::new(FixedAssignments), stop.clone()));
    let client = Client::connect(&socket).await.unwrap();
    assert_eq!(client.list().await.unwrap(), FixedAssignments.pods());
    assert_eq!(client.get("prod", "db").await.unwrap().as_ref(), FixedAssignments.pods().first());
    assert_eq!(client.get("prod", "other").await.unwrap(), None);
    assert_eq!(client.get("db", "prod").await.unwrap(), None);
    assert_eq!(client.allocatable().await.unwrap(), FixedAssignments.allocatable());
    let many = (0..20).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { client.list().await.unwrap().len() })
    });
    for answer in many.collect::<Vec<_>>() {
        assert_eq!(answer.await.unwrap(), 1);
    }
    drop(client);
    stop.cancel();
    server.await.unwrap().unwrap();
    assert!(matches!(Client::connect(&socket).await, Err(PodResourcesError::Connect { .. })));
}

/// Requests that no client of this API sends.
#[tokio::test]
async fn refuses_invalid_requests() {
    use tokio::{io::AsyncWriteExt as _, net::UnixStream};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let stop = CancellationToken::new();
    tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), Arc::new(FixedAssignments), stop.clone()));
    let mut garbage = UnixStream::connect(&socket).await.unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let client = Client::connect(&socket).await.unwrap();
    let long = "x".repeat(1 << 20);
    let refused = client.get(&long, "db").await.unwrap_err();
    assert!(refused.to_string().contains("message length too large"), "{refused}");
    assert_eq!(client.list().await.unwrap().len(), 1);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn absent_kubelet_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let away = Client::connect(&socket).await.unwrap_err().to_string();
    assert!(away.contains("socket: cannot connect"), "{away}");
    let _silent = UnixListener::bind(&socket).unwrap();
    let client = tokio::time::timeout(Duration::from_mins(10), Client::connect(&socket)).await.unwrap();
    let silent = match client {
        Err(error) => error,
        Ok(client) => client.list().await.unwrap_err(),
    };
    assert!(matches!(silent, PodResourcesError::TimedOut { .. }), "{silent}");
}

//! The PodResources API: our server against our client, over a unix socket.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{sync::Arc, time::Duration};

use numaward_kube::pod_resources::{
    AssignmentSource, CallError, Client,
    messages::{AllocatableResponse, ContainerMemory, ContainerResources, PodResources},
    serve,
};
use numaward_topology::Bytes;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

struct Fixed;

impl AssignmentSource for Fixed {
    fn pods(&self) -> Vec<PodResources> {
        let container = ContainerResources {
            name: "main".to_owned(),
            cpu_ids: vec![2, 3],
            memory: vec![ContainerMemory::new("memory", Bytes::gib(1), &"1".parse().unwrap())],
            ..ContainerResources::default()
        };
        vec![PodResources {
            name: "db".to_owned(),
            namespace: "prod".to_owned(),
            containers: vec![container],
            ..PodResources::default()
        }]
    }

    fn allocatable(&self) -> AllocatableResponse {
        AllocatableResponse { cpu_ids: (1..1000).collect(), ..AllocatableResponse::default() }
    }
}

#[tokio::test]
async fn what_is_assigned_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let stop = CancellationToken::new();
    let server = tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), Arc::new(Fixed), stop.clone()));
    let client = Client::connect(&socket).await.unwrap();
    assert_eq!(client.list().await.unwrap(), Fixed.pods());
    assert_eq!(client.get("prod", "db").await.unwrap().as_ref(), Fixed.pods().first());
    assert_eq!(client.get("prod", "other").await.unwrap(), None);
    assert_eq!(client.get("db", "prod").await.unwrap(), None);
    assert_eq!(client.allocatable().await.unwrap(), Fixed.allocatable());
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
    assert!(matches!(Client::connect(&socket).await, Err(CallError::Connect { .. })));
}

/// What no client of this API sends.
#[tokio::test]
async fn what_is_not_understood_is_refused_and_the_next_call_works() {
    use tokio::{io::AsyncWriteExt as _, net::UnixStream};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let stop = CancellationToken::new();
    tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), Arc::new(Fixed), stop.clone()));
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
async fn a_kubelet_that_is_away_or_does_not_answer_is_an_error() {
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
    assert!(matches!(silent, CallError::TimedOut { .. }), "{silent}");
}

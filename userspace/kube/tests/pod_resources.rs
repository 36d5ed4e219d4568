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

/// The path of the socket as the authority, as clients send it that name no other.
#[tokio::test]
async fn answers_clients_without_authority() {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixStream,
    };
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    fn literal(field: u8, value: &str) -> Vec<u8> {
        [&[field, u8::try_from(value.len()).unwrap()], value.as_bytes()].concat()
    }
    fn frame(kind: u8, flags: u8, stream: u8, content: &[u8]) -> Vec<u8> {
        [&[0, 0, u8::try_from(content.len()).unwrap(), kind, flags, 0, 0, 0, stream], content].concat()
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let stop = CancellationToken::new();
    tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), Arc::new(FixedAssignments), stop.clone()));
    for authority in ["%2Frun%2Fnumaward%2Fpod-resources%2Fkubelet.sock", "/run/kubelet.sock", "localhost"] {
        let mut client = UnixStream::connect(&socket).await.unwrap();
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        client.write_all(&frame(4, 0, 0, &[])).await.unwrap();
        // POST, http, the path, the authority, the type of the content (index 31).
        let block = [
            vec![0x83, 0x86],
            literal(0x44, "/v1.PodResourcesLister/List"),
            literal(0x41, authority),
            literal(0x5f, "application/grpc"),
        ];
        client.write_all(&frame(HEADERS, 4, 1, &block.concat())).await.unwrap();
        client.write_all(&frame(DATA, 1, 1, &[0; 5])).await.unwrap();
        let kind = loop {
            let mut header = [0; 9];
            client.read_exact(&mut header).await.unwrap();
            let length = header[..3].iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
            let mut content = vec![0; length];
            client.read_exact(&mut content).await.unwrap();
            // The first frame of the request's stream.
            if header[8] == 1 {
                break header[3];
            }
        };
        assert_eq!(kind, HEADERS, "{authority}: not the beginning of an answer");
    }
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

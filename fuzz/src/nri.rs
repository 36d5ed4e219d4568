//! Target for the NRI protocol: frames, calls and their messages from a container runtime.
//!
//! The NRI plugin runs on a stream of derived bytes. Its handler converts pods and containers to requests and decides on them,
//! as the daemon does.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use arbitrary::{Arbitrary, Unstructured};
use numaward_config::kubernetes::{Nri, PinnedPolicy};
use numaward_kube::nri::{
    Handler, Options, Plugin,
    types::{
        Container, Creation, Event, Limit, NoAnswer, Online, Pod, Refusal, Resources, Settings, Snapshot,
        Update,
    },
};
use numaward_topology::{Bytes, CpuId, NodeId};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    runtime,
};
use tokio_util::sync::CancellationToken;

use crate::pods::Builders;

const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";
const METHODS: [&str; 12] = [
    "Configure",
    "Synchronize",
    "CreateContainer",
    "UpdateContainer",
    "StopContainer",
    "UpdatePodSandbox",
    "StateChange",
    "RunPodSandbox",
    "RemovePodSandbox",
    "PostCreateContainer",
    "ValidateContainerAdjustment",
    "Shutdown",
];

/// A part of the runtime's stream.
#[derive(Arbitrary, Debug)]
enum StreamPart<'a> {
    /// Arbitrary bytes.
    Bytes(&'a [u8]),
    /// A call in a single frame.
    Call { method: u8, timeout: i64, payload: &'a [u8] },
    /// The response to the plugin's registration.
    Registered,
}

/// Appends a number as a protobuf field.
fn varint(tag: u8, mut value: u64, to: &mut Vec<u8>) {
    to.push(tag << 3);
    while value >= 0x80 {
        to.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    to.push(value.to_le_bytes()[0]);
}

/// Appends bytes as a protobuf field.
fn bytes(tag: u8, value: &[u8], to: &mut Vec<u8>) {
    let at = to.len();
    varint(tag, value.len() as u64, to);
    to[at] |= 2;
    to.extend(value);
}

/// Appends a message in a frame of the multiplexed connection.
fn frame(connection: u32, stream: u32, kind: u8, payload: &[u8], to: &mut Vec<u8>) {
    let length = u32::try_from(payload.len()).unwrap();
    to.extend(connection.to_be_bytes());
    to.extend((length + 10).to_be_bytes());
    to.extend(length.to_be_bytes());
    to.extend(stream.to_be_bytes());
    to.extend([kind, 0]);
    to.extend(payload);
}

impl StreamPart<'_> {
    fn write(&self, number: u32, to: &mut Vec<u8>) {
        match *self {
            Self::Bytes(bytes) => to.extend(bytes),
            Self::Call { method, timeout, payload } => {
                let mut request = Vec::new();
                bytes(1, PLUGIN.as_bytes(), &mut request);
                bytes(2, METHODS[usize::from(method) % METHODS.len()].as_bytes(), &mut request);
                bytes(3, payload, &mut request);
                varint(4, timeout.cast_unsigned(), &mut request);
                frame(1, 2 * number + 1, 1, &request, to);
            }
            Self::Registered => frame(2, 1, 2, &[], to),
        }
    }
}

/// Stream that returns these bytes, and discards all written bytes.
struct Stream(io::Cursor<Vec<u8>>);

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(context, to)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

struct DecidingHandler(Builders);

impl DecidingHandler {
    fn ask(&self, pod: &Pod, container: &Container, change: &Resources) -> Update {
        self.0.ask(pod, container, change, &self.online());
        let settings = Settings {
            cpus: container.resources.cpus.clone().or_else(|| change.cpus.clone()),
            mems: container.resources.mems.clone(),
            memory_min: container.resources.memory_limit,
            memory_high: Some(Limit::At(Bytes(4096))),
            cpu_quota: container.resources.cpu_quota,
            ..Settings::default()
        };
        Update { container: container.id.clone(), settings, ignore_failure: true }
    }
}

impl Handler for DecidingHandler {
    fn online(&self) -> Online {
        Online { cpus: (0..8).map(CpuId).collect(), mems: (0..2).map(NodeId).collect() }
    }

    async fn synchronize(&self, snapshot: Snapshot) -> Vec<Update> {
        let of = |container: &Container| {
            let pod = snapshot.pods.get(&container.pod_id)?;
            Some(self.ask(pod, container, &Resources::default()))
        };
        snapshot.containers.iter().filter_map(of).collect()
    }

    async fn run_pod(&self, _: Pod) -> Result<(), Refusal> {
        Ok(())
    }

    async fn update_pod(&self, pod: Pod, resources: Resources) -> Result<(), Refusal> {
        self.ask(&pod, &Container::default(), &resources);
        Ok(())
    }

    async fn create_container(&self, pod: Pod, container: Container) -> Result<Creation, Refusal> {
        let Update { settings, .. } = self.ask(&pod, &container, &Resources::default());
        Ok(Creation { settings, ..Creation::default() })
    }

    async fn update_container(
        &self,
        pod: Pod,
        container: Container,
        requested: Resources,
    ) -> Result<Vec<Update>, Refusal> {
        Ok(vec![self.ask(&pod, &container, &requested)])
    }

    async fn stop_container(&self, _: Pod, _: Container) -> Vec<Update> {
        Vec::new()
    }

    async fn event(&self, _: Event) {}

    fn no_answer(&self, call: NoAnswer) {
        assert_ne!(call.reason, numaward_kube::nri::types::NoAnswerReason::HandlerPanicked);
    }
}

/// Runs the plugin on a connection with this input.
pub(crate) fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let mut stream = Vec::new();
    for number in 0..16 {
        if input.is_empty() {
            break;
        }
        let Ok(piece) = StreamPart::arbitrary(&mut input) else { break };
        piece.write(number, &mut stream);
    }
    let runtime = runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let plugin = Nri { when_pinned: PinnedPolicy::Override, ..Nri::default() };
        let options = Options { plugin, ..Options::default() };
        let plugin = Plugin::new(options, Arc::new(DecidingHandler(Builders::without_api_server())));
        let shutdown = CancellationToken::new();
        let mut status = plugin.status();
        let stop = shutdown.clone();
        // There is only one connection, so the plugin is stopped when it ends.
        tokio::spawn(async move {
            let ended = status.wait_for(|status| status.last_disconnect.is_some()).await;
            assert!(ended.is_ok());
            stop.cancel();
        });
        let mut streams = Some(Stream(io::Cursor::new(stream)));
        let connect = || {
            let stream = streams.take().ok_or_else(|| io::Error::other("no more"));
            async { stream }
        };
        plugin.run_with(connect, shutdown).await;
    });
}

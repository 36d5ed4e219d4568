//! The plugin side of NRI, the Node Resource Interface of containerd and CRI-O.
//!
//! The runtime calls its plugins before it creates a container and adds their answers to the container's OCI
//! specification, so the container is pinned from its first instruction. An answer may also change running
//! containers.
//!
//! NRI also lets plugins change containers at any time (`UpdateContainers`). This plugin never does: if the runtime
//! handles an event at the same time, it takes two locks in opposite orders and can no longer create or stop
//! containers (containerd's issue 13733, in every version before NRI's pull request 301).
//!
//! NRI fails open. If a plugin answers late, dies or is absent, the container starts unpinned; a plugin that answers
//! late is also disconnected. Therefore:
//!
//! - a call is answered half a second before [`Options::answer_within`] has passed, if necessary with "no change",
//!   and [`Handler::no_answer`] reports this so that the unpinned container can be repaired;
//! - a lost connection is made again, and every connection starts with [`Handler::synchronize`], whose answer pins
//!   all unpinned containers;
//! - an answer that would fail in the kernel or in the runtime is not sent: [`types::Settings::check`].
//!
//! Only a [`Refusal`] makes a creation fail.
//!
//! Layers, from the outside in: [`Plugin`] (reconnects), a session (handshake, one task per call, deadlines), a link
//! (calls and answers), the wire (frames). Everything above the wire uses the types of [`types`].
//!
//! Sources: NRI's protocol `nri.pkg.api.v1alpha1` and its adaptation in containerd 1.7 and 2.1.

mod convert;
#[cfg(feature = "testing")]
pub mod fake;
mod link;
mod messages;
mod session;
pub mod types;
mod version;
mod wire;

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use backon::{BackoffBuilder as _, ExponentialBuilder};
use educe::Educe;
use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_config::kubernetes::Nri;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixStream,
    sync::{RwLock, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::Code;

pub use self::{
    link::CallError,
    version::{EventMask, NriVersion, RuntimeFault},
    wire::{TooLong, WireError},
};
use self::{
    messages::{RpcStatus, TtrpcResponse},
    types::{Container, Creation, Event, NoAnswer, Online, Pod, Refusal, Resources, Snapshot, Update},
};

/// Duration after which a connection counts as stable.
const STABLE_CONNECTION: Duration = Duration::from_secs(5);
/// Delay after the runtime has not finished a handshake. It may still have the registration, and is busy.
const HANDSHAKE_RETRY_DELAY: Duration = Duration::from_mins(1);

fn status(code: Code, message: &str) -> TtrpcResponse {
    let status = RpcStatus { code: code as i32, message: message.to_owned() };
    TtrpcResponse { status: Some(status), payload: Vec::new() }
}

/// Handler of the runtime's calls.
///
/// Answers must not wait for I/O: the runtime serialises its calls, so the time of each call is added to the start of
/// every pod. A future that does not complete in time is dropped, and [`no_answer`](Self::no_answer) reports it; its
/// state must be consistent at each await. A future that is running on another thread continues to its next await,
/// possibly after that report; its effects are reconciled with the state of the runtime.
///
/// Changes to other containers are part of the answer.
pub trait Handler: Send + Sync + 'static {
    /// Returns the CPUs and nodes to which containers may be pinned.
    fn online(&self) -> Online;

    /// Handles a new connection; `snapshot` lists all running pods and containers. The answer pins the unpinned ones.
    ///
    /// Not dropped if it is late, because the runtime reports its containers only once. Later calls wait for its end.
    fn synchronize(&self, snapshot: Snapshot) -> impl Future<Output = Vec<Update>> + Send;

    /// Handles the start of a pod's sandbox. A refusal fails the pod. No settings can be returned.
    fn run_pod(&self, pod: Pod) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Handles a change of a pod's resources to `resources`. A refusal fails the change. Only called from NRI 0.10
    /// on.
    fn update_pod(&self, pod: Pod, resources: Resources) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Handles the creation of a container. A refusal fails the creation.
    ///
    /// Not called for containers that are already pinned, unless [`Options::when_pinned`] says so.
    fn create_container(
        &self,
        pod: Pod,
        container: Container,
    ) -> impl Future<Output = Result<Creation, Refusal>> + Send;

    /// Handles a change of a container's resources to `requested`. The answer's update for the same container takes
    /// precedence. A refusal fails the change.
    fn update_container(
        &self,
        pod: Pod,
        container: Container,
        requested: Resources,
    ) -> impl Future<Output = Result<Vec<Update>, Refusal>> + Send;

    /// Handles a container that has ended, was stopped, or failed to be created. The answer may assign its resources
    /// to other containers.
    fn stop_container(&self, pod: Pod, container: Container) -> impl Future<Output = Vec<Update>> + Send;

    /// Handles any other event. The runtime waits until this returns.
    fn event(&self, event: Event) -> impl Future<Output = ()> + Send;

    /// Reports a call that got no answer from the handler. Must not block.
    fn no_answer(&self, call: NoAnswer);
}

/// Options of the plugin.
#[derive(Clone, Debug, Educe)]
#[educe(Default)]
pub struct Options {
    /// Socket of the runtime, name of the plugin, and behaviour for containers that another program has pinned. The
    /// caller evaluates whether the plugin is enabled.
    pub plugin: Nri,
    /// Time that the runtime allows for an answer, unless it reports a shorter one.
    #[educe(Default(expression = Duration::from_secs(2)))]
    pub answer_within: Duration,
    /// Delays between connection attempts. They start again after a connection of 5 seconds.
    #[educe(Default(expression = reconnection()))]
    pub backoff: ExponentialBuilder,
}

fn reconnection() -> ExponentialBuilder {
    // With jitter, up to twice as long.
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(Duration::from_millis(2500))
        .with_jitter()
        .without_max_times()
}

/// Phase of the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Not connected.
    #[default]
    Disconnected,
    /// The stream is open; the plugin has asked to be registered.
    Registering,
    /// The runtime has configured the plugin, and will report running containers.
    Synchronizing,
    /// Containers are placed as they are created.
    Connected,
}

/// Runtime information from the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// Name, for example `containerd`.
    pub name: String,
    pub version: String,
    /// Version of NRI as reported, or derived from name and version of the runtime; `None` if neither is possible.
    pub nri_version: Option<NriVersion>,
    /// Events to which the plugin subscribed.
    pub events: EventMask,
    /// Time for which the runtime waits for answers.
    pub request_timeout: Duration,
}

impl RuntimeInfo {
    /// Returns whether the runtime applies memory policies of plugins, as far as known: from NRI 0.12 on (containerd
    /// 2.3). Its OCI runtime must support them, too (runc does from 1.4 on).
    pub fn sets_memory_policies(&self) -> bool {
        self.nri_version.is_some_and(|version| version >= NriVersion::new(0, 12, 0))
    }

    /// Returns true for CRI-O.
    pub fn is_crio(&self) -> bool {
        matches!(self.name.to_ascii_lowercase().as_str(), "cri-o" | "crio")
    }

    /// Returns the known faults of this version.
    pub fn faults(&self) -> Vec<RuntimeFault> {
        RuntimeFault::of_runtime(&self.name, &self.version)
    }
}

/// The state of the connection.
#[derive(Clone, Debug, Default)]
pub struct Status {
    pub phase: Phase,
    /// Runtime of the current connection, or else of the previous one.
    pub runtime: Option<RuntimeInfo>,
    /// Error that ended the last connection or prevented it.
    pub last_disconnect: Option<Arc<Disconnect>>,
    /// Number of times that [`Phase::Connected`] was reached.
    pub connections: u64,
    /// Number of times that [`Phase::Connected`] was left.
    pub disconnects: u64,
}

/// Reason why a connection ended or could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Disconnect {
    /// No process listens on the socket.
    #[error(
        "cannot connect to the container runtime's NRI socket {}: {source} (is the runtime running, with NRI \
         enabled? containerd 1.7 needs `disable = false` under [plugins.'io.containerd.nri.v1.nri'])",
        socket.display()
    )]
    Connect {
        socket: PathBuf,
        /// Error of the connection attempt.
        source: io::Error,
    },
    /// The runtime rejected the registration, or did not answer it.
    #[error("the runtime did not register the plugin: {0}")]
    Register(CallError),
    /// The runtime did not continue the handshake.
    #[error("the runtime did not call {awaited} within {within:?}")]
    Handshake {
        /// Call that did not arrive.
        awaited: &'static str,
        /// Time after which the wait ended.
        within: Duration,
    },
    /// The runtime closed the connection while it was in this phase.
    #[error("the runtime closed the connection {}", closed_text(*.0))]
    Closed(Phase),
    /// The connection ended within a message.
    #[error("the runtime closed the connection within a message: it was stopped, or is broken")]
    CutShort,
    /// Reading or writing failed.
    #[error("the connection to the runtime failed: {0}")]
    Io(#[source] io::Error),
    /// The runtime sent data that is not NRI.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The plugin was asked to stop.
    #[error("stopped on request")]
    Stopped,
}

/// Describes the phase in which the connection was closed, and the possible cause.
fn closed_text(phase: Phase) -> &'static str {
    match phase {
        Phase::Disconnected | Phase::Registering => {
            "(while registering): it refuses external plugins (`disable_connections`), or was stopped"
        }
        Phase::Synchronizing => {
            "(while synchronizing): it knows fewer events than its version says, or was stopped"
        }
        Phase::Connected => "(connected): it was stopped, or an answer was late; its log says which",
    }
}

/// State shared by all sessions of a plugin.
struct PluginState<H> {
    options: Options,
    handler: Arc<H>,
    status: watch::Sender<Status>,
    /// Name and version of the runtime that closed the connection after a subscription to more than the basic events.
    knows_only_basic_events: Mutex<Option<(String, String)>>,
    /// Held for writing while the handler compares a snapshot with its state. The handler gets no other call meanwhile: to a call of
    /// a later moment, the snapshot would be outdated.
    comparison: Arc<RwLock<()>>,
}

/// NRI plugin that reconnects automatically.
pub struct Plugin<H> {
    shared: Arc<PluginState<H>>,
}

impl<H: Handler> Plugin<H> {
    /// Creates a plugin that is not connected yet.
    pub fn new(options: Options, handler: Arc<H>) -> Self {
        Self {
            shared: Arc::new(PluginState {
                options,
                handler,
                status: watch::Sender::default(),
                knows_only_basic_events: Mutex::default(),
                comparison: Arc::default(),
            }),
        }
    }

    /// Returns the state of the connection; the receiver can also wait for changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.shared.status.subscribe()
    }

    /// Connects to the runtime's socket, and again whenever the connection is lost, until `shutdown`. Calls in
    /// progress at that time are still answered.
    pub fn run(self, shutdown: CancellationToken) -> BoxFuture<'static, ()> {
        async move {
            let socket = self.shared.options.plugin.socket.clone();
            self.run_with(move || UnixStream::connect(socket.clone()), shutdown).await;
        }
        .boxed()
    }

    /// Like [`run`](Self::run), over any stream.
    pub async fn run_with<C, F, S>(self, mut connect: C, shutdown: CancellationToken)
    where
        C: FnMut() -> F,
        F: Future<Output = io::Result<S>>,
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let Options { plugin: Nri { socket, .. }, backoff, .. } = &self.shared.options;
        let mut waits = backoff.build();
        let mut logged = String::new();
        loop {
            let began = Instant::now();
            let connected = tokio::select! {
                stream = connect() => stream,
                () = shutdown.cancelled() => return,
            };
            let end = match connected {
                Ok(stream) => session::run(stream, Arc::clone(&self.shared), &shutdown).await,
                Err(source) => Disconnect::Connect { socket: socket.clone(), source },
            };
            if matches!(end, Disconnect::Stopped) {
                tracing::info!("NRI: stopped");
                return self.disconnected(end);
            }
            let is_stable = self.shared.status.borrow().phase == Phase::Connected;
            if is_stable && began.elapsed() >= STABLE_CONNECTION {
                waits = backoff.build();
            }
            let wait = match end {
                Disconnect::Handshake { .. } | Disconnect::Register(CallError::Timeout(_)) => {
                    HANDSHAKE_RETRY_DELAY
                }
                _ => waits.next().unwrap_or_default(),
            };
            // A repeated failure is logged once.
            let text = end.to_string();
            if text == logged {
                tracing::debug!(?wait, "NRI: {text}");
            } else {
                tracing::warn!(?wait, "NRI: {text}");
                logged = text;
            }
            self.disconnected(end);
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    fn disconnected(&self, end: Disconnect) {
        self.shared.status.send_modify(|status| {
            if status.phase == Phase::Connected {
                status.disconnects += 1;
            }
            status.phase = Phase::Disconnected;
            status.last_disconnect = Some(Arc::new(end));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnects_forever() {
        let waits: Vec<_> = Options::default().backoff.build().take(10).collect();
        assert!(waits.len() == 10 && waits[9] >= Duration::from_millis(2500), "{waits:?}");
    }
}

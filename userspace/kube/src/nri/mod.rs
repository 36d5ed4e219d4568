//! The plugin side of NRI, the Node Resource Interface of containerd and CRI-O.
//!
//! The runtime asks its plugins before it creates a container; what they answer goes into the container's
//! OCI specification, so the container is pinned from its first instruction. An answer may also change
//! containers that run.
//!
//! NRI lets plugins change containers unasked, too (`UpdateContainers`). We never do: where the runtime handles an event
//! at the same time, its two locks are taken in opposite orders, and it creates and stops no container any more
//! (containerd's issue 13733, in every version before NRI's pull request 301).
//!
//! NRI fails open. A plugin that answers late, dies or is not there loses its say, and the container starts
//! unpinned; late, it is also thrown out. Therefore:
//!
//! - a call is answered half a second before [`Options::answer_within`] is over, if need be with "no change", and the
//!   owner learns of it by [`Handler::no_answer`], so that it can repair what started unpinned;
//! - the connection is made again whenever it is lost, and every connection starts with
//!   [`Handler::synchronize`], whose answer pins whatever runs without its pin;
//! - an answer that would fail in the kernel or in the runtime is not sent: [`types::Settings::check`].
//!
//! Only a [`Refusal`] makes a creation fail.
//!
//! Layers, from the outside in: [`Plugin`] (reconnects), a session (handshake, one task per call, deadlines),
//! a link (calls and answers), the wire (frames). Everything above the wire speaks in the types of [`types`].
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
    sync::watch,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::Code;

pub use self::{
    link::CallError,
    version::{EventMask, NriVersion},
    wire::{TooLong, WireError},
};
use self::{
    messages::{Response, RpcStatus},
    types::{Container, Creation, Event, NoAnswer, Online, Pod, Refusal, Resources, Snapshot, Update},
};

/// A connection that was kept for so long was a good one.
const GOOD_CONNECTION: Duration = Duration::from_secs(5);

fn status(code: Code, message: &str) -> Response {
    let status = RpcStatus { code: code as i32, message: message.to_owned() };
    Response { status: Some(status), payload: Vec::new() }
}

/// Who answers the runtime.
///
/// All answers must come from memory: the runtime serialises its calls, so what is spent here is added to the
/// start of every pod. A future that is not done in time is dropped, and [`no_answer`](Self::no_answer) says
/// so; it must leave nothing half done wherever it awaits. One that is just running on another thread runs on
/// to its next await, maybe beyond that notice: what it did is settled by comparing with what the runtime has.
///
/// Changes to other containers go into the answer.
pub trait Handler: Send + Sync + 'static {
    /// The CPUs and nodes that containers may be pinned to.
    fn online(&self) -> Online;

    /// A connection was made: all that runs. The answer pins what is not pinned yet.
    fn synchronize(&self, snapshot: Snapshot) -> impl Future<Output = Vec<Update>> + Send;

    /// A pod's sandbox is to run. A refusal fails the pod. Nothing can be set for it.
    fn run_pod(&self, pod: Pod) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// A pod's resources are to change to `resources`. A refusal fails the change. Only from NRI 0.10 on.
    fn update_pod(&self, pod: Pod, resources: Resources) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// A container is to be created. A refusal fails the creation.
    ///
    /// Not called for containers that are already pinned, unless [`Options::when_pinned`] says so.
    fn create_container(
        &self,
        pod: Pod,
        container: Container,
    ) -> impl Future<Output = Result<Creation, Refusal>> + Send;

    /// A container's resources are to change to `requested`; the update for the same container in the answer is
    /// laid over that. A refusal fails the change.
    fn update_container(
        &self,
        pod: Pod,
        container: Container,
        requested: Resources,
    ) -> impl Future<Output = Result<Vec<Update>, Refusal>> + Send;

    /// A container has ended, was stopped, or failed to be created. The answer may give others what it had.
    fn stop_container(&self, pod: Pod, container: Container) -> impl Future<Output = Vec<Update>> + Send;

    /// Something else happened. The runtime waits until this returns.
    fn event(&self, event: Event) -> impl Future<Output = ()> + Send;

    /// A call got no answer of ours. Must not block.
    fn no_answer(&self, call: NoAnswer);
}

/// How to be a plugin.
#[derive(Clone, Debug, Educe)]
#[educe(Default)]
pub struct Options {
    /// Where the runtime listens, what the plugin is called, and what it does with containers that somebody else has pinned.
    /// That it is enabled is for others to heed.
    pub plugin: Nri,
    /// The time that the runtime gives us for an answer, unless it reports a shorter one.
    #[educe(Default(expression = Duration::from_secs(2)))]
    pub answer_within: Duration,
    /// How long to wait before connecting again. After a connection of 5 seconds it begins again.
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

/// How far the connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// There is none.
    #[default]
    Disconnected,
    /// The stream is open; we have asked to be registered.
    Registering,
    /// The runtime has configured us, and will report what runs.
    Synchronizing,
    /// Containers are placed as they are created.
    Connected,
}

/// The runtime, as it introduced itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// Its name, such as `containerd`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The version of NRI that it reported, or that follows from its name and version; none where neither does.
    pub nri_version: Option<NriVersion>,
    /// The events that we subscribed to.
    pub events: EventMask,
    /// How long it waits for answers.
    pub request_timeout: Duration,
}

impl RuntimeInfo {
    /// Whether it gives containers the memory policies that plugins ask for, as far as it is known: from NRI 0.12 on
    /// (containerd 2.3). Its OCI runtime has to set them, too (runc does from 1.4 on).
    pub fn sets_memory_policies(&self) -> bool {
        self.nri_version.is_some_and(|version| version >= NriVersion::new(0, 12, 0))
    }
}

/// The state of the connection.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// How far it is.
    pub phase: Phase,
    /// The runtime of the present connection, or else of the last.
    pub runtime: Option<RuntimeInfo>,
    /// Why the last connection ended, or could not be made.
    pub last_disconnect: Option<Arc<Disconnect>>,
    /// How often [`Phase::Connected`] was reached.
    pub connections: u64,
    /// How often it was left.
    pub disconnects: u64,
}

/// Why a connection ended, or could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Disconnect {
    /// There is nobody at the socket.
    #[error(
        "cannot connect to the container runtime's NRI socket {}: {source} (is the runtime running, with NRI \
         enabled? containerd 1.7 needs `disable = false` under [plugins.'io.containerd.nri.v1.nri'])",
        socket.display()
    )]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The runtime would not have us.
    #[error("the runtime did not register the plugin: {0}")]
    Register(CallError),
    /// The runtime did not go on.
    #[error("the runtime did not call {awaited} within {within:?}")]
    Handshake {
        /// The call that was waited for.
        awaited: &'static str,
        /// How long it was waited for.
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
    /// What the runtime sent is not NRI.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// We were asked to stop.
    #[error("stopped on request")]
    Stopped,
}

/// When the connection was closed, and what that may mean.
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

/// What all sessions of a plugin share.
struct Shared<H> {
    options: Options,
    handler: Arc<H>,
    status: watch::Sender<Status>,
    /// The runtime that closed the connection when it was asked for more than the basic events.
    knows_only_basic_events: Mutex<Option<(String, String)>>,
}

/// An NRI plugin that keeps itself connected.
pub struct Plugin<H> {
    shared: Arc<Shared<H>>,
}

impl<H: Handler> Plugin<H> {
    /// A plugin that is not connected yet.
    pub fn new(options: Options, handler: Arc<H>) -> Self {
        Self {
            shared: Arc::new(Shared {
                options,
                handler,
                status: watch::Sender::default(),
                knows_only_basic_events: Mutex::default(),
            }),
        }
    }

    /// How the connection is; the receiver can also wait for changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.shared.status.subscribe()
    }

    /// Connects to the runtime's socket, and again whenever the connection is lost, until `shutdown`. Calls
    /// that are being answered then are still answered.
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
            if began.elapsed() >= GOOD_CONNECTION {
                waits = backoff.build();
            }
            let wait = waits.next().unwrap_or_default();
            // The same trouble again and again is logged once.
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
    fn it_is_tried_again_without_end() {
        let waits: Vec<_> = Options::default().backoff.build().take(10).collect();
        assert!(waits.len() == 10 && waits[9] >= Duration::from_millis(2500), "{waits:?}");
    }
}

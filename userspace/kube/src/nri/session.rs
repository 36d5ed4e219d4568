//! A connection to the runtime, from the handshake to its end.
//!
//! Order of the handshake: the plugin first serves the runtime's calls, then asks to be registered. The runtime calls
//! `Configure` (before or after it answers the registration) and, when pending creations are finished, `Synchronize`,
//! in several parts if there is much to report. Regular calls follow.
//!
//! Each call is served by its own task, and its handler runs in a further task, so that a handler that blocks or
//! panics does not prevent a timely answer.

use std::{collections::HashSet, mem, pin::pin, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_config::kubernetes::PinnedPolicy;
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite},
    sync::{Semaphore, watch},
    time::Instant,
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};
use tonic::Code;

use super::{
    Disconnect, Handler, Phase, PluginState, RuntimeInfo,
    convert::{self, Trim},
    link::{CallError, Link},
    messages::{self, PLUGIN_SERVICE, RUNTIME_SERVICE, TtrpcRequest, TtrpcResponse},
    status,
    types::{
        Call, Container, ContainerEvent, Creation, Event, InvalidSettings, NoAnswer, NoAnswerReason, Online,
        Pod, PodEvent, Refusal, Snapshot, Update,
    },
    version::{EventKind, EventMask, NriVersion, RuntimeFault},
    wire::{self, Connection, Decoder, Message},
};

/// Size of the read buffer in bytes.
const READ_BUFFER: usize = 16 << 10;
/// Maximum number of calls that are served concurrently. The runtime makes one at a time; the bound protects against a faulty one.
const MAX_CALLS: usize = 64;
/// Maximum number of stored pods and containers of a runtime's report: a hundred times the limit of a kubelet. Further ones are skipped.
const MAX_OBJECTS: usize = 1 << 16;
/// Maximum size of the stored pods and containers, in encoded bytes. Further ones are skipped.
const MAX_SNAPSHOT_BYTES: usize = 64 << 20;
/// Longest time from the answer to the registration until the runtime has configured the plugin. The runtime disconnects after it.
const CONFIGURE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time until the runtime answers the registration, and from `Configure` until all running pods are reported. The runtime
/// accepts one connection after the other and first finishes pending calls; in containerd this may be the stop of a container with
/// a long grace period. Another attempt would wait behind this one.
const BUSY_RUNTIME_TIMEOUT: Duration = Duration::from_hours(2);
/// Time in each of these steps after which the log says that the runtime is late.
const LATE_STEP: Duration = Duration::from_secs(10);
/// Time before the deadline at which an answer must be sent; at most half of the time allowed.
const ANSWER_MARGIN: Duration = Duration::from_millis(500);
/// The runtime's default timeout for an answer, which it reports as zero.
const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves one connection until it ends.
pub(super) async fn run<S, H>(
    stream: S,
    shared: Arc<PluginState<H>>,
    shutdown: &CancellationToken,
) -> Disconnect
where
    S: AsyncRead + AsyncWrite + Send + 'static,
    H: Handler,
{
    shared.status.send_modify(|status| status.phase = Phase::Registering);
    let (reader, writer) = tokio::io::split(stream);
    let (link, writing) = Link::new(Connection::Runtime, wire::encode, writer);
    let mut writing = AbortOnDropHandle::new(tokio::spawn(writing.boxed()));
    let session = Arc::new(Session {
        link: Arc::new(link),
        shared,
        stage: watch::Sender::default(),
        reported: Mutex::default(),
        calls: Arc::new(Semaphore::new(MAX_CALLS)),
    });
    let tasks = TaskTracker::new();
    let end = tokio::select! {
        end = session.read(reader, &tasks) => end,
        end = session.shake_hands() => end,
        written = &mut writing => match written {
            Ok(Err(error)) => Disconnect::Io(error),
            // Not reached: the link keeps the queue open, and the task is aborted only at the end of this function.
            Ok(Ok(())) | Err(_) => Disconnect::CutShort,
        },
        () = shutdown.cancelled() => Disconnect::Stopped,
    };
    tasks.close();
    if matches!(end, Disconnect::Stopped) {
        // Calls in progress are still answered. Each ends at its deadline, if the runtime reads the answers.
        let _given_up = tokio::time::timeout(session.shared.options.answer_within, tasks.wait()).await;
    }
    session.link.close();
    tasks.wait().await;
    if matches!(end, Disconnect::Closed(_) | Disconnect::Io(_)) {
        session.note_refused_events();
    }
    end
}

/// Phase of the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum HandshakeStage {
    #[default]
    Registering,
    Configured,
    Synchronizing,
    Synchronized,
}

/// The parts of a `Synchronize` received so far.
#[derive(Default)]
struct PartialSnapshot {
    snapshot: Snapshot,
    /// Number of pods and containers kept.
    objects: usize,
    /// Encoded bytes of the objects without skipped fields, because tenants control the size of an environment.
    bytes: usize,
    /// Arrival of the first part, from which the time for an answer counts.
    since: Option<Instant>,
}

struct Session<H> {
    link: Arc<Link>,
    shared: Arc<PluginState<H>>,
    stage: watch::Sender<HandshakeStage>,
    reported: Mutex<PartialSnapshot>,
    calls: Arc<Semaphore>,
}

/// An answer, and the actions for the cases that it was sent or could not be sent.
struct OutgoingAnswer {
    response: TtrpcResponse,
    sent: Option<HandshakeStage>,
    lost: Option<NoAnswer>,
}

impl From<TtrpcResponse> for OutgoingAnswer {
    fn from(response: TtrpcResponse) -> Self {
        Self { response, sent: None, lost: None }
    }
}

fn ok<M: prost::Message>(message: &M) -> OutgoingAnswer {
    TtrpcResponse { status: None, payload: message.encode_to_vec() }.into()
}

fn not_understood(error: &prost::DecodeError) -> OutgoingAnswer {
    status(Code::InvalidArgument, &format!("the request could not be read: {error}")).into()
}

/// Creates the report for a call without an answer. The default reason is that the answer could not be sent.
fn unanswered(call: Call, pod: &Pod, container: Option<&Container>) -> NoAnswer {
    let reason = NoAnswerReason::ConnectionLost;
    NoAnswer { call, pod: Some(pod.clone()), container: container.cloned(), reason }
}

/// An invalid call and its error.
struct Unreadable(Call, String);

fn read<M: prost::Message + Default>(call: Call, payload: &[u8]) -> Result<M, Unreadable> {
    M::decode(payload).map_err(|error| Unreadable(call, error.to_string()))
}

fn read_pod(call: Call, pod: Option<messages::PodSandbox>) -> Result<Pod, Unreadable> {
    let trimmed = |mut pod: messages::PodSandbox| {
        let ignored = pod.trim();
        let pod = convert::pod(pod, ignored);
        // Once for each pod.
        if call == Call::RunPod {
            warn_about_ignored(&pod);
        }
        pod
    };
    let pod = pod.filter(|pod| !pod.id.is_empty()).map(trimmed);
    pod.ok_or_else(|| Unreadable(call, "the pod or its id is missing".to_owned()))
}

fn warn_about_ignored(Pod { namespace, name, ignored, .. }: &Pod) {
    if *ignored > 0 {
        tracing::warn!(
            pod = format!("{namespace}/{name}"),
            "NRI: {ignored} labels and annotations of the pod are ignored: they have more than {} KiB",
            convert::MAX_MAP_BYTES >> 10
        );
    }
}

fn read_both(
    call: Call,
    pod: Option<messages::PodSandbox>,
    container: Option<messages::Container>,
) -> Result<(Pod, Container), Unreadable> {
    let trimmed = |mut container: messages::Container| {
        container.trim();
        convert::container(container)
    };
    let container = container
        .filter(|container| !container.id.is_empty())
        .map(trimmed)
        .ok_or_else(|| Unreadable(call, "the container or its id is missing".to_owned()))?;
    Ok((read_pod(call, pod)?, container))
}

/// Waits for a step of the handshake. Logs `problem` if the runtime is late.
async fn warn_if_late<T>(problem: &str, step: impl Future<Output = T>) -> T {
    let mut step = pin!(step);
    if let Ok(done) = tokio::time::timeout(LATE_STEP, &mut step).await {
        return done;
    }
    tracing::warn!(
        "NRI: the runtime {problem} yet. containerd first finishes the stops of containers, and starts no container meanwhile \
         (containerd/containerd#14083)"
    );
    step.await
}

impl<H: Handler> Session<H> {
    async fn shake_hands(&self) -> Disconnect {
        let options = &self.shared.options;
        let request = messages::RegisterPluginRequest {
            plugin_name: options.plugin.plugin_name.to_string(),
            plugin_idx: options.plugin.plugin_index.to_string(),
        };
        let within = BUSY_RUNTIME_TIMEOUT;
        let registration = self.link.call::<_, ()>(RUNTIME_SERVICE, "RegisterPlugin", &request, within);
        match warn_if_late("does not answer the registration", registration).await {
            Ok(()) => {}
            // The task that closed the link returns the cause.
            Err(CallError::Closed) => return std::future::pending().await,
            Err(error) => return Disconnect::Register(error),
        }
        let mut stage = self.stage.subscribe();
        let within = CONFIGURE_TIMEOUT;
        let configured = stage.wait_for(|&stage| stage >= HandshakeStage::Configured);
        if tokio::time::timeout(within, configured).await.is_err() {
            return Disconnect::Handshake { awaited: "Configure", within };
        }
        let within = BUSY_RUNTIME_TIMEOUT;
        let synchronized = async {
            let started =
                async { stage.wait_for(|&stage| stage >= HandshakeStage::Synchronizing).await.is_ok() };
            let started = warn_if_late("does not report its containers", started).await;
            started && stage.wait_for(|&stage| stage == HandshakeStage::Synchronized).await.is_ok()
        };
        if tokio::time::timeout(within, synchronized).await.is_err() {
            return Disconnect::Handshake { awaited: "Synchronize", within };
        }
        self.shared.status.send_modify(|status| {
            status.phase = Phase::Connected;
            status.connections += 1;
        });
        tracing::info!("NRI: connected");
        std::future::pending().await
    }

    async fn read<R: AsyncRead>(self: &Arc<Self>, reader: R, tasks: &TaskTracker) -> Disconnect {
        let mut reader = pin!(reader);
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; READ_BUFFER];
        loop {
            let mut input = match reader.read(&mut buffer).await {
                Ok(0) if decoder.is_at_boundary() => {
                    return Disconnect::Closed(self.shared.status.borrow().phase);
                }
                Ok(0) => return Disconnect::CutShort,
                Ok(length) => &buffer[..length],
                Err(error) => return Disconnect::Io(error),
            };
            loop {
                match decoder.next(&mut input) {
                    Ok(None) => break,
                    Ok(Some((Connection::Runtime, message))) => self.link.answered(message),
                    Ok(Some((Connection::Plugin, message))) if message.kind == wire::REQUEST => {
                        // The semaphore is never closed. If too many calls are served, this waits until one is answered.
                        let Ok(permit) = Arc::clone(&self.calls).acquire_owned().await else { continue };
                        let session = Arc::clone(self);
                        let received = Instant::now();
                        let serving = async move {
                            session.serve(message, received).await;
                            drop(permit);
                        };
                        tasks.spawn(serving.boxed());
                    }
                    Ok(Some((Connection::Plugin, message))) => {
                        tracing::debug!(kind = message.kind, "a message that is not a call is ignored");
                    }
                    Err(error) => return Disconnect::Wire(error),
                }
            }
        }
    }

    async fn serve(&self, message: Message, received: Instant) {
        let answer = match TtrpcRequest::decode(&*message.payload) {
            Ok(request) => self.dispatch(&request, received).await,
            Err(error) => not_understood(&error),
        };
        match self.link.answer(Connection::Plugin, message.stream, &answer.response).await {
            Ok(()) => {
                if let Some(stage) = answer.sent {
                    self.stage.send_replace(stage);
                }
            }
            Err(_closed) => {
                if let Some(lost) = answer.lost {
                    self.no_answer(lost);
                }
            }
        }
    }

    async fn dispatch(&self, request: &TtrpcRequest, received: Instant) -> OutgoingAnswer {
        let payload = request.payload.as_slice();
        let deadline = received + self.time_to_answer(request.timeout_nano);
        if request.service != PLUGIN_SERVICE {
            return status(Code::Unimplemented, &format!("no service {:?}", request.service)).into();
        }
        let method = request.method.as_str();
        let answer = match (method, method.parse()) {
            ("Configure", _) => return self.configure(payload),
            ("Synchronize", _) => return self.synchronize(payload, received, deadline).await,
            ("Shutdown", _) => {
                tracing::info!("NRI: the runtime is shutting down");
                return ok(&());
            }
            ("StateChange", _) => self.state_change(payload, deadline).await,
            (_, Ok(EventKind::CreateContainer)) => self.create_container(payload, deadline).await,
            (_, Ok(EventKind::UpdateContainer)) => self.update_container(payload, deadline).await,
            (_, Ok(EventKind::StopContainer)) => self.stop_container(payload, deadline).await,
            (_, Ok(EventKind::UpdatePodSandbox)) => self.update_pod(payload, deadline).await,
            // Not subscribed to; settings of other plugins are accepted.
            (_, Ok(EventKind::ValidateContainerAdjustment)) => return ok(&()),
            (_, Ok(kind)) => match read::<messages::ContainerRequest>(Call::Event, payload) {
                Ok(request) => self.event(kind, request.pod, request.container, deadline).await,
                Err(unreadable) => Err(unreadable),
            },
            (_, Err(_)) => return status(Code::Unimplemented, &format!("no method {method:?}")).into(),
        };
        // An invalid call is not refused, so that a runtime with an unexpected protocol can still create containers.
        answer.unwrap_or_else(|Unreadable(call, problem)| {
            let reason = NoAnswerReason::Unreadable(problem);
            self.no_answer(NoAnswer { call, pod: None, container: None, reason });
            ok(&())
        })
    }

    /// Returns the time allowed for an answer, from the timeout that the runtime reports (nanoseconds, zero: not
    /// reported).
    fn time_to_answer(&self, timeout_nano: i64) -> Duration {
        let reported = u64::try_from(timeout_nano).ok().filter(|&nanos| nanos > 0).map(Duration::from_nanos);
        let within = self.shared.options.answer_within.min(reported.unwrap_or(Duration::MAX));
        within.saturating_sub(ANSWER_MARGIN.min(within / 2))
    }

    /// Returns the handler's answer, or the reason why there is none.
    async fn ask<T: Send + 'static>(
        &self,
        deadline: Instant,
        answer: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, NoAnswerReason> {
        let asked = Instant::now();
        let comparison = Arc::clone(&self.shared.comparison);
        let in_turn = async move {
            drop(comparison.read().await);
            answer.await
        };
        let mut task = AbortOnDropHandle::new(tokio::spawn(in_turn.boxed()));
        tokio::select! {
            biased;
            answer = &mut task => answer.map_err(|_| NoAnswerReason::HandlerPanicked),
            () = tokio::time::sleep_until(deadline) => {
                Err(NoAnswerReason::Late(deadline.saturating_duration_since(asked)))
            }
            () = self.link.closed.cancelled() => Err(NoAnswerReason::ConnectionLost),
        }
    }

    fn no_answer(&self, call: NoAnswer) {
        let pod = call.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name));
        let container = call.container.as_ref().map(|container| container.name.as_str());
        let reason = &call.reason;
        if *reason == NoAnswerReason::PinnedByOther {
            tracing::info!(pod, container, "NRI: {reason}");
        } else {
            tracing::warn!(pod, container, "NRI: {} continues without a placement: {reason}", call.call);
        }
        self.shared.handler.no_answer(call);
    }

    /// Calls the handler and encodes its answer. Sends nothing if the handler has no answer, misses the deadline, or
    /// returns an answer that would fail.
    async fn answer<T, M>(
        &self,
        lost: NoAnswer,
        deadline: Instant,
        says: impl Future<Output = Result<T, Refusal>> + Send + 'static,
        message: impl FnOnce(T) -> Result<M, InvalidSettings>,
    ) -> OutgoingAnswer
    where
        T: Send + 'static,
        M: prost::Message + Default + PartialEq,
    {
        let said = match self.ask(deadline, says).await {
            Ok(Ok(said)) => message(said).map(Ok).map_err(NoAnswerReason::from),
            Ok(Err(refusal)) => Ok(Err(refusal)),
            Err(reason) => Err(reason),
        };
        let answer = match said {
            Ok(Ok(message)) if message == M::default() => return ok(&()),
            Ok(Ok(message)) => ok(&message),
            Ok(Err(refusal)) => status(Code::FailedPrecondition, &refusal.0).into(),
            Err(reason) => {
                self.no_answer(NoAnswer { reason, ..lost });
                return ok(&());
            }
        };
        OutgoingAnswer { lost: Some(lost), ..answer }
    }

    fn configure(&self, payload: &[u8]) -> OutgoingAnswer {
        let request = match messages::ConfigureRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => return not_understood(&error),
        };
        if *self.stage.borrow() != HandshakeStage::Registering {
            return status(Code::FailedPrecondition, "this plugin is configured already").into();
        }
        let nri_version = request
            .nri_version
            .parse()
            .ok()
            .or_else(|| NriVersion::from_runtime(&request.runtime_name, &request.runtime_version));
        let events = if self.shared.knows_only_basic_events.lock().as_ref().is_some_and(|(name, version)| {
            *name == request.runtime_name && *version == request.runtime_version
        }) {
            EventMask::BASIC
        } else {
            EventMask::for_version(nri_version)
        };
        let request_timeout = u64::try_from(request.request_timeout)
            .ok()
            .filter(|&millis| millis > 0)
            .map_or(DEFAULT_REQUEST_TIMEOUT, Duration::from_millis);
        let runtime = RuntimeInfo {
            name: request.runtime_name,
            version: request.runtime_version,
            nri_version,
            events,
            request_timeout,
        };
        tracing::info!(
            runtime = runtime.name,
            version = runtime.version,
            nri = nri_version.map(|version| version.to_string()),
            %events,
            ?request_timeout,
            "NRI: configured"
        );
        for RuntimeFault { finding, fix, is_repaired } in runtime.faults() {
            let (runtime, version) = (&runtime.name, &runtime.version);
            if is_repaired {
                tracing::warn!(runtime, version, fix, "NRI: the runtime has a known fault: {finding}");
            } else {
                tracing::info!(runtime, version, fix, "NRI: the runtime has a known fault: {finding}");
            }
        }
        self.shared.status.send_modify(|status| {
            status.phase = Phase::Synchronizing;
            status.runtime = Some(runtime);
        });
        let response = ok(&messages::ConfigureResponse { events: events.0 });
        OutgoingAnswer { sent: Some(HandshakeStage::Configured), ..response }
    }

    /// Handles a disconnection on the answer to `Configure`, which may mean that the runtime supports fewer events
    /// than its version implies. From then on the plugin subscribes only to the basic events of that runtime and
    /// version. If the runtime had merely been stopped, only reports about changes of pods are lost.
    fn note_refused_events(&self) {
        let status = self.shared.status.borrow();
        let Some(runtime) = &status.runtime else { return };
        if *self.stage.borrow() == HandshakeStage::Configured && runtime.events != EventMask::BASIC {
            *self.shared.knows_only_basic_events.lock() =
                Some((runtime.name.clone(), runtime.version.clone()));
        }
    }

    async fn synchronize(&self, payload: &[u8], received: Instant, deadline: Instant) -> OutgoingAnswer {
        let request = match messages::SynchronizeRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => {
                *self.reported.lock() = PartialSnapshot::default();
                return not_understood(&error);
            }
        };
        self.stage.send_replace(HandshakeStage::Synchronizing);
        let more = request.more;
        let (snapshot, since) = {
            let mut reported = self.reported.lock();
            let since = *reported.since.get_or_insert(received);
            reported.add(request);
            if more {
                return ok(&messages::SynchronizeResponse { update: Vec::new(), more: true });
            }
            (mem::take(&mut *reported).snapshot, since)
        };
        // All parts together have the time of one call.
        let deadline = deadline.min(since + self.time_to_answer(0));
        let lost = NoAnswer {
            call: Call::Synchronize,
            pod: None,
            container: None,
            reason: NoAnswerReason::ConnectionLost,
        };
        let handler = Arc::clone(&self.shared.handler);
        let turn = Arc::clone(&self.shared.comparison).write_owned().await;
        // Without a deadline: the task continues if its answer is late.
        let comparing = tokio::spawn(async move {
            let updates = handler.synchronize(snapshot).await;
            drop(turn);
            updates
        });
        let says = async move {
            comparing.await.or_else(|error| match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_stopped) => Ok(Vec::new()),
            })
        };
        let answer = self.answer(lost, deadline, says, |updates| self.updates(&updates)).await;
        OutgoingAnswer { sent: Some(HandshakeStage::Synchronized), ..answer }
    }

    fn updates(&self, updates: &[Update]) -> Result<messages::Updates, InvalidSettings> {
        Ok(messages::Updates { update: check_updates(updates, None, &self.shared.handler.online())? })
    }

    async fn create_container(
        &self,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<OutgoingAnswer, Unreadable> {
        let call = Call::CreateContainer;
        let request: messages::ContainerRequest = read(call, payload)?;
        let (pod, container) = read_both(call, request.pod, request.container)?;
        let lost = unanswered(call, &pod, Some(&container));
        // The handler is not asked about a container that stays as it is, but is notified.
        if container.resources.is_pinned() && self.shared.options.plugin.when_pinned == PinnedPolicy::Yield {
            self.no_answer(NoAnswer { reason: NoAnswerReason::PinnedByOther, ..lost });
            return Ok(ok(&()));
        }
        let id = container.id.clone();
        let handler = Arc::clone(&self.shared.handler);
        let says = async move { handler.create_container(pod, container).await };
        let answer = self.answer(lost, deadline, says, |creation: Creation| {
            let online = self.shared.handler.online();
            creation.check(&online)?;
            let update = check_updates(&creation.updates, Some(&id), &online)?;
            Ok(messages::CreateContainerResponse { adjust: convert::adjustment(&creation), update })
        });
        Ok(answer.await)
    }

    async fn update_container(
        &self,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<OutgoingAnswer, Unreadable> {
        let call = Call::UpdateContainer;
        let request: messages::UpdateContainerRequest = read(call, payload)?;
        let (pod, container) = read_both(call, request.pod, request.container)?;
        let requested = request.linux_resources.map(convert::resources).unwrap_or_default();
        let lost = unanswered(call, &pod, Some(&container));
        let handler = Arc::clone(&self.shared.handler);
        let says = async move { handler.update_container(pod, container, requested).await };
        Ok(self.answer(lost, deadline, says, |updates| self.updates(&updates)).await)
    }

    async fn stop_container(&self, payload: &[u8], deadline: Instant) -> Result<OutgoingAnswer, Unreadable> {
        let call = Call::StopContainer;
        let request: messages::ContainerRequest = read(call, payload)?;
        let (pod, container) = read_both(call, request.pod, request.container)?;
        let lost = unanswered(call, &pod, Some(&container));
        let handler = Arc::clone(&self.shared.handler);
        let says = async move { Ok(handler.stop_container(pod, container).await) };
        Ok(self.answer(lost, deadline, says, |updates| self.updates(&updates)).await)
    }

    async fn update_pod(&self, payload: &[u8], deadline: Instant) -> Result<OutgoingAnswer, Unreadable> {
        let call = Call::UpdatePod;
        let request: messages::UpdatePodSandboxRequest = read(call, payload)?;
        let pod = read_pod(call, request.pod)?;
        let resources = request.linux_resources.map(convert::resources).unwrap_or_default();
        let overhead = request.overhead_linux_resources.map(convert::resources).or(pod.overhead);
        let pod = Pod { overhead, ..pod };
        let lost = unanswered(call, &pod, None);
        let handler = Arc::clone(&self.shared.handler);
        let says = async move { handler.update_pod(pod, resources).await };
        Ok(self.answer(lost, deadline, says, Ok).await)
    }

    async fn state_change(&self, payload: &[u8], deadline: Instant) -> Result<OutgoingAnswer, Unreadable> {
        let change: messages::StateChangeEvent = read(Call::Event, payload)?;
        let Some(kind) = EventKind::from_repr(change.event) else {
            tracing::debug!(event = change.event, "an unknown event is ignored");
            return Ok(ok(&()));
        };
        self.event(kind, change.pod, change.container, deadline).await
    }

    /// Handles an event that arrived as a separate call or as a change of state.
    async fn event(
        &self,
        kind: EventKind,
        pod: Option<messages::PodSandbox>,
        container: Option<messages::Container>,
        deadline: Instant,
    ) -> Result<OutgoingAnswer, Unreadable> {
        let handler = Arc::clone(&self.shared.handler);
        if kind == EventKind::RunPodSandbox {
            let pod = read_pod(Call::RunPod, pod)?;
            let lost = unanswered(Call::RunPod, &pod, None);
            return Ok(self.answer(lost, deadline, async move { handler.run_pod(pod).await }, Ok).await);
        }
        let event = read_event(kind, pod, container)?;
        let lost = match &event {
            Event::Pod(_, pod) => unanswered(Call::Event, pod, None),
            Event::Container(_, pod, container) => unanswered(Call::Event, pod, Some(container)),
        };
        let says = async move {
            handler.event(event).await;
            Ok(())
        };
        Ok(self.answer(lost, deadline, says, Ok).await)
    }
}

impl PartialSnapshot {
    fn add(&mut self, request: messages::SynchronizeRequest) {
        let pods = self.read_each(request.pods, "pods");
        let pods = pods.into_iter().map(|(pod, ignored)| convert::pod(pod, ignored));
        let pods = pods.inspect(warn_about_ignored);
        self.snapshot.pods.extend(pods.map(|pod| (pod.id.clone(), pod)));
        let containers = self.read_each(request.containers, "containers");
        self.snapshot.containers.extend(containers.into_iter().map(|(of, _)| convert::container(of)));
    }

    /// Decodes the valid objects for which there is space, with the number of their ignored labels and annotations; counts the remaining
    /// objects.
    fn read_each<M: prost::Message + Default + Trim>(
        &mut self,
        encoded: Vec<Vec<u8>>,
        what: &str,
    ) -> Vec<(M, usize)> {
        let (mut read, mut skipped, mut problem) = (Vec::new(), 0, None);
        for bytes in encoded {
            let mut message = match M::decode(&*bytes) {
                Ok(message) => message,
                Err(error) => {
                    skipped += 1;
                    problem.get_or_insert_with(|| error.to_string());
                    continue;
                }
            };
            let ignored = message.trim();
            let size = message.encoded_len();
            if self.objects >= MAX_OBJECTS || self.bytes + size > MAX_SNAPSHOT_BYTES {
                skipped += 1;
                problem.get_or_insert_with(|| {
                    format!(
                        "more than {MAX_OBJECTS} pods and containers, or more than {MAX_SNAPSHOT_BYTES} bytes"
                    )
                });
                continue;
            }
            (self.objects, self.bytes) = (self.objects + 1, self.bytes + size);
            read.push((message, ignored));
        }
        if let Some(problem) = problem {
            tracing::warn!(
                "NRI: {skipped} running {what} are skipped; the problem with the first one: {problem}"
            );
        }
        self.snapshot.unreadable += skipped;
        read
    }
}

fn read_event(
    kind: EventKind,
    pod: Option<messages::PodSandbox>,
    container: Option<messages::Container>,
) -> Result<Event, Unreadable> {
    let call = Call::Event;
    let of_pod = |what, pod| read_pod(call, pod).map(|pod| Event::Pod(what, pod));
    let of_container = |what, pod| {
        read_both(call, pod, container)
            .map(|(pod, container)| Event::Container(what, pod, Box::new(container)))
    };
    match kind {
        EventKind::StopPodSandbox => of_pod(PodEvent::Stopped, pod),
        EventKind::RemovePodSandbox => of_pod(PodEvent::Removed, pod),
        EventKind::PostUpdatePodSandbox => of_pod(PodEvent::Updated, pod),
        EventKind::PostCreateContainer => of_container(ContainerEvent::Created, pod),
        EventKind::StartContainer => of_container(ContainerEvent::Starting, pod),
        EventKind::PostStartContainer => of_container(ContainerEvent::Started, pod),
        EventKind::PostUpdateContainer => of_container(ContainerEvent::Updated, pod),
        EventKind::RemoveContainer => of_container(ContainerEvent::Removed, pod),
        // These have calls of their own in every version.
        EventKind::RunPodSandbox
        | EventKind::CreateContainer
        | EventKind::UpdateContainer
        | EventKind::StopContainer
        | EventKind::UpdatePodSandbox
        | EventKind::ValidateContainerAdjustment => {
            Err(Unreadable(call, "a call of its own for this event is missing".to_owned()))
        }
    }
}

/// Encodes updates if the kernel and the runtime would accept them. Updates without a change are skipped.
fn check_updates(
    updates: &[Update],
    creating: Option<&str>,
    online: &Online,
) -> Result<Vec<messages::ContainerUpdate>, InvalidSettings> {
    let mut seen = HashSet::new();
    for Update { container, settings, .. } in updates {
        if creating == Some(container) {
            return Err(InvalidSettings::BeingCreated(container.clone()));
        }
        if !seen.insert(container) {
            return Err(InvalidSettings::Twice(container.clone()));
        }
        settings.check(online)?;
    }
    Ok(updates.iter().filter(|update| !update.settings.is_empty()).map(convert::update).collect())
}

#[cfg(test)]
mod tests {
    use super::{super::types::*, *};
    use crate::nri::{CallError, Options, Plugin};

    struct Idle;

    impl Handler for Idle {
        fn online(&self) -> Online {
            Online { cpus: "0".parse().unwrap(), mems: "0".parse().unwrap() }
        }
        async fn synchronize(&self, _: Snapshot) -> Vec<Update> {
            Vec::new()
        }
        async fn run_pod(&self, _: Pod) -> Result<(), Refusal> {
            Ok(())
        }
        async fn update_pod(&self, _: Pod, _: Resources) -> Result<(), Refusal> {
            Ok(())
        }
        async fn create_container(&self, _: Pod, _: Container) -> Result<Creation, Refusal> {
            Ok(Creation::default())
        }
        async fn update_container(&self, _: Pod, _: Container, _: Resources) -> Result<Vec<Update>, Refusal> {
            Ok(Vec::new())
        }
        async fn stop_container(&self, _: Pod, _: Container) -> Vec<Update> {
            Vec::new()
        }
        async fn event(&self, _: Event) {}
        fn no_answer(&self, _: NoAnswer) {}
    }

    /// A runtime that answers every call with nothing, and never calls.
    async fn answer_only<S: AsyncRead + AsyncWrite>(stream: S) {
        let (mut reader, writer) = tokio::io::split(stream);
        let (link, writing) = Link::new(Connection::Plugin, wire::encode, writer);
        let answers = async {
            let mut decoder = Decoder::default();
            let mut buffer = [0; 1000];
            while let Ok(length @ 1..) = reader.read(&mut buffer).await {
                let mut input = &buffer[..length];
                while let Some((connection, call)) = decoder.next(&mut input).unwrap() {
                    link.answer(connection, call.stream, &TtrpcResponse::default()).await.unwrap();
                }
            }
        };
        tokio::join!(answers, async { writing.await.unwrap() });
    }

    #[tokio::test(start_paused = true)]
    async fn disconnects_without_configure() {
        let shared = Plugin::new(Options::default(), Arc::new(Idle)).shared;
        let (ours, theirs) = tokio::io::duplex(1000);
        tokio::spawn(answer_only(theirs));
        let shutdown = CancellationToken::new();
        let end = tokio::time::timeout(Duration::from_mins(1), run(ours, shared, &shutdown)).await;
        assert_eq!(end.unwrap().to_string(), "the runtime did not call Configure within 5s");
    }

    #[tokio::test(start_paused = true)]
    async fn failed_handshakes_are_rare() {
        let connects = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = connects.clone();
        let connect = move || {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let (ours, theirs) = tokio::io::duplex(1000);
            tokio::spawn(answer_only(theirs));
            std::future::ready(Ok(ours))
        };
        let plugin =
            Plugin::new(Options::default(), Arc::new(Idle)).run_with(connect, CancellationToken::new());
        tokio::time::timeout(Duration::from_hours(1), plugin).await.unwrap_err();
        let connects = connects.load(std::sync::atomic::Ordering::Relaxed);
        assert!((50..=60).contains(&connects), "{connects} in an hour");
    }

    #[tokio::test(start_paused = true)]
    async fn timed_out_call_is_forgotten() {
        let (ours, _silent) = tokio::io::duplex(1000);
        let (link, writing) = Link::new(Connection::Runtime, wire::encode, ours);
        let writing = tokio::spawn(writing);
        let called = link.call::<_, ()>("service", "method", &(), Duration::from_secs(1)).await;
        assert_eq!(called, Err(CallError::Timeout(Duration::from_secs(1))));
        assert_eq!(link.pending(), 0);
        link.close();
        let called = link.call::<_, ()>("service", "method", &(), Duration::from_secs(1)).await;
        assert_eq!(called, Err(CallError::Closed));
        writing.abort();
    }
}

//! One connection to the runtime, from the handshake to its end.
//!
//! Order of the handshake: we serve the runtime's calls first, then ask to be registered. The runtime then
//! calls `Configure` (before or after it answers the registration) and, once its creations under way are
//! done, `Synchronize`, in several parts if there is much to tell. From then on calls come, and we may ask for
//! updates.
//!
//! Each call is served by its own task, and the handler's part of it by another, so that a handler that blocks
//! or panics does not keep the answer from being sent in time.

use std::{
    collections::HashSet,
    mem,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

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

use super::{
    Disconnect, FAILED_PRECONDITION, Handler, INVALID_ARGUMENT, Phase, RESOURCE_EXHAUSTED, RuntimeInfo,
    Shared, UNIMPLEMENTED, WhenPinned, convert,
    link::{CallError, Link},
    messages::{self, Empty, PLUGIN_SERVICE, RUNTIME_SERVICE, Request, Response},
    status,
    types::{
        Call, Container, ContainerEvent, Event, InvalidSettings, NoAnswer, NoAnswerReason, Online, Pod,
        PodEvent, Refusal, Snapshot, Update,
    },
    version::{EventKind, EventMask, NriVersion},
    wire::{self, Connection, Decoder, Message},
};

/// What is read at once, in bytes.
const READ: usize = 16 << 10;
/// Calls that are served at once. The runtime makes one at a time; the bound is against a broken one.
const CALLS: usize = 64;
/// The most pods and containers that a runtime may tell, and their encoded bytes. A hundred times what a
/// kubelet allows.
const MAX_OBJECTS: usize = 1 << 16;
const MAX_SNAPSHOT: usize = 64 << 20;
/// The runtime's default for an answer, which it tells as zero.
const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

tokio::task_local! {
    static IN_HANDLER: ();
}

/// Whether the present task is a handler's.
pub(super) fn in_handler() -> bool {
    IN_HANDLER.try_with(|()| ()).is_ok()
}

/// Serves one connection until it ends.
pub(super) async fn run<S, H>(stream: S, shared: Arc<Shared<H>>, shutdown: &CancellationToken) -> Disconnect
where
    S: AsyncRead + AsyncWrite + Send + 'static,
    H: Handler,
{
    shared.status.send_modify(|status| status.phase = Phase::Registering);
    let (reader, writer) = tokio::io::split(stream);
    let (link, writing) = Link::new(Connection::Runtime, wire::encode, writer);
    let mut writing = AbortOnDropHandle::new(tokio::spawn(writing));
    let session = Arc::new(Session {
        link: Arc::new(link),
        shared,
        stage: watch::Sender::default(),
        told: Mutex::default(),
        calls: Arc::new(Semaphore::new(CALLS)),
    });
    let tasks = TaskTracker::new();
    let end = tokio::select! {
        end = session.read(reader, &tasks) => end,
        end = session.shake_hands() => end,
        written = &mut writing => match written {
            Ok(Err(error)) => Disconnect::Io(error),
            // The link holds the queue open, and the task is not aborted before the end.
            Ok(Ok(())) | Err(_) => Disconnect::CutShort,
        },
        () = shutdown.cancelled() => Disconnect::Stopped,
    };
    tasks.close();
    session.shared.link.send_replace(None);
    if matches!(end, Disconnect::Stopped) {
        // What was asked is still answered. Each call ends at its deadline, if the runtime reads the answers.
        let _given_up = tokio::time::timeout(session.shared.options.answer_within, tasks.wait()).await;
    }
    session.link.close();
    tasks.wait().await;
    if matches!(end, Disconnect::Closed(_) | Disconnect::Io(_)) {
        session.note_refused_events();
    }
    end
}

/// How far the handshake is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    #[default]
    Registering,
    Configured,
    Synchronizing,
    Synchronized,
}

/// The parts of a `Synchronize` that have come so far.
#[derive(Default)]
struct Told {
    snapshot: Snapshot,
    bytes: usize,
    /// When the first part came: the time for an answer counts from there.
    since: Option<Instant>,
}

struct Session<H> {
    link: Arc<Link>,
    shared: Arc<Shared<H>>,
    stage: watch::Sender<Stage>,
    told: Mutex<Told>,
    calls: Arc<Semaphore>,
}

/// An answer, and what is to be done when it was sent, or could not be.
struct Answer {
    response: Response,
    sent: Option<Stage>,
    lost: Option<NoAnswer>,
}

impl From<Response> for Answer {
    fn from(response: Response) -> Self {
        Self { response, sent: None, lost: None }
    }
}

fn ok<M: prost::Message>(message: &M) -> Answer {
    Response { status: None, payload: message.encode_to_vec() }.into()
}

impl<H: Handler> Session<H> {
    async fn shake_hands(&self) -> Disconnect {
        let options = &self.shared.options;
        let within = options.registration_timeout;
        let deadline = Instant::now() + within;
        let request = messages::RegisterPluginRequest {
            plugin_name: options.name.to_string(),
            plugin_idx: options.index.to_string(),
        };
        match self.link.call::<_, Empty>(RUNTIME_SERVICE, "RegisterPlugin", &request, within).await {
            Ok(Empty {}) => {}
            // Whoever closed the link knows more.
            Err(CallError::Closed) => return std::future::pending().await,
            Err(error) => return Disconnect::Register(error),
        }
        let mut stage = self.stage.subscribe();
        let configured = stage.wait_for(|&stage| stage >= Stage::Configured);
        if tokio::time::timeout_at(deadline, configured).await.is_err() {
            return Disconnect::Handshake { awaited: "Configure", within };
        }
        let within = options.synchronize_timeout;
        let synchronized = stage.wait_for(|&stage| stage == Stage::Synchronized);
        if tokio::time::timeout(within, synchronized).await.is_err() {
            return Disconnect::Handshake { awaited: "Synchronize", within };
        }
        self.shared.link.send_replace(Some(Arc::clone(&self.link)));
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
        let mut buffer = vec![0; READ];
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
                        // Never closed; waits for a call to be answered where there are too many.
                        let Ok(permit) = Arc::clone(&self.calls).acquire_owned().await else { continue };
                        let session = Arc::clone(self);
                        let received = Instant::now();
                        tasks.spawn(async move {
                            session.serve(message, received).await;
                            drop(permit);
                        });
                    }
                    Ok(Some((Connection::Plugin, message))) => {
                        tracing::debug!(kind = message.kind, "a message that is no call is ignored");
                    }
                    Err(error) => return Disconnect::Wire(error),
                }
            }
        }
    }

    async fn serve(&self, message: Message, received: Instant) {
        let answer = match Request::decode(&*message.payload) {
            Ok(request) => self.dispatch(&request, received).await,
            Err(error) => status(INVALID_ARGUMENT, &format!("the request could not be read: {error}")).into(),
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

    async fn dispatch(&self, request: &Request, received: Instant) -> Answer {
        let payload = request.payload.as_slice();
        let deadline = received + self.time_to_answer(request.timeout_nano);
        if request.service != PLUGIN_SERVICE {
            return status(UNIMPLEMENTED, &format!("no service {:?}", request.service)).into();
        }
        match request.method.as_str() {
            "Configure" => self.configure(payload),
            "Synchronize" => self.synchronize(payload, received, deadline).await,
            "Shutdown" => {
                tracing::info!("NRI: the runtime is shutting down");
                ok(&Empty {})
            }
            "StateChange" => match messages::StateChangeEvent::decode(payload) {
                Ok(change) => {
                    if let Some(kind) = EventKind::of_number(change.event) {
                        self.event(kind, change.pod, change.container, deadline).await
                    } else {
                        tracing::debug!(event = change.event, "an unknown event is ignored");
                        ok(&Empty {})
                    }
                }
                Err(error) => self.unreadable(Call::Event, &error),
            },
            method => match EventKind::of_method(method) {
                Some(EventKind::CreateContainer) => self.create_container(payload, deadline).await,
                Some(EventKind::UpdateContainer) => self.update_container(payload, deadline).await,
                Some(EventKind::StopContainer) => self.stop_container(payload, deadline).await,
                Some(EventKind::UpdatePodSandbox) => self.update_pod(payload, deadline).await,
                // Not subscribed to; whatever others set is fine.
                Some(EventKind::ValidateContainerAdjustment) => ok(&Empty {}),
                Some(kind) => match messages::ContainerRequest::decode(payload) {
                    Ok(request) => self.event(kind, request.pod, request.container, deadline).await,
                    Err(error) => self.unreadable(Call::Event, &error),
                },
                None => status(UNIMPLEMENTED, &format!("no method {method:?}")).into(),
            },
        }
    }

    /// How long an answer may take, from the time that the runtime tells it will wait (nanoseconds, zero: not
    /// told).
    fn time_to_answer(&self, timeout_nano: i64) -> Duration {
        let options = &self.shared.options;
        let told = u64::try_from(timeout_nano).ok().filter(|&nanos| nanos > 0).map(Duration::from_nanos);
        let within = options.answer_within.min(told.unwrap_or(Duration::MAX));
        within.saturating_sub(options.answer_margin.min(within / 2))
    }

    /// The handler's answer, or why there is none.
    async fn ask<T: Send + 'static>(
        &self,
        deadline: Instant,
        answer: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, NoAnswerReason> {
        let asked = Instant::now();
        let mut task = AbortOnDropHandle::new(tokio::spawn(IN_HANDLER.scope((), answer)));
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
            tracing::warn!(pod, container, "NRI: {} goes on without us: {reason}", call.call);
        }
        self.shared.handler.no_answer(call);
    }

    /// What to say to a call that makes no sense: nothing, so that a runtime that speaks differently than
    /// expected can still create containers.
    fn unreadable(&self, call: Call, error: &dyn std::error::Error) -> Answer {
        let reason = NoAnswerReason::Unreadable(error.to_string());
        self.no_answer(NoAnswer { call, pod: None, container: None, reason });
        ok(&Empty {})
    }

    fn configure(&self, payload: &[u8]) -> Answer {
        let request = match messages::ConfigureRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => {
                return status(INVALID_ARGUMENT, &format!("the request could not be read: {error}")).into();
            }
        };
        if *self.stage.borrow() != Stage::Registering {
            return status(FAILED_PRECONDITION, "this plugin is configured already").into();
        }
        let nri_version = request
            .nri_version
            .parse()
            .ok()
            .or_else(|| NriVersion::of_runtime(&request.runtime_name, &request.runtime_version));
        let events = if self.refused_events().as_ref().is_some_and(|(name, version)| {
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
        self.shared.status.send_modify(|status| {
            status.phase = Phase::Synchronizing;
            status.runtime = Some(runtime);
        });
        let response = ok(&messages::ConfigureResponse { events: events.0 });
        Answer { sent: Some(Stage::Configured), ..response }
    }

    fn refused_events(&self) -> MutexGuard<'_, Option<(String, String)>> {
        self.shared.knows_only_basic_events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A runtime that hangs up on the answer to `Configure` may know fewer events than its version tells: from
    /// then on that runtime and version is asked for the basic ones only. Where it had just been stopped, no
    /// more is lost than what it would tell about changes of pods.
    fn note_refused_events(&self) {
        let status = self.shared.status.borrow();
        let Some(runtime) = &status.runtime else { return };
        if *self.stage.borrow() == Stage::Configured && runtime.events != EventMask::BASIC {
            *self.refused_events() = Some((runtime.name.clone(), runtime.version.clone()));
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn synchronize(&self, payload: &[u8], received: Instant, deadline: Instant) -> Answer {
        let request = match messages::SynchronizeRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => {
                *self.told() = Told::default();
                return status(INVALID_ARGUMENT, &format!("the request could not be read: {error}")).into();
            }
        };
        self.stage.send_replace(Stage::Synchronizing);
        let more = request.more;
        let (snapshot, since) = {
            let mut told = self.told();
            let since = *told.since.get_or_insert(received);
            if let Err(problem) = told.add(request, payload.len()) {
                *told = Told::default();
                return status(RESOURCE_EXHAUSTED, &problem).into();
            }
            if more {
                return ok(&messages::SynchronizeResponse { update: Vec::new(), more: true });
            }
            (mem::take(&mut *told).snapshot, since)
        };
        // All parts together have the time of one call.
        let deadline = deadline.min(since + self.time_to_answer(0));
        let no_answer = |reason| NoAnswer { call: Call::Synchronize, pod: None, container: None, reason };
        let handler = Arc::clone(&self.shared.handler);
        let answer = self.ask(deadline, async move { handler.synchronize(snapshot).await }).await;
        let update = answer.and_then(|updates| self.check(&updates, None)).unwrap_or_else(|reason| {
            self.no_answer(no_answer(reason));
            Vec::new()
        });
        Answer {
            sent: Some(Stage::Synchronized),
            lost: (!update.is_empty()).then(|| no_answer(NoAnswerReason::ConnectionLost)),
            ..ok(&messages::SynchronizeResponse { update, more: false })
        }
    }

    fn check(
        &self,
        updates: &[Update],
        creating: Option<&str>,
    ) -> Result<Vec<messages::ContainerUpdate>, NoAnswerReason> {
        Ok(check_updates(updates, creating, &self.shared.handler.online())?)
    }

    async fn create_container(&self, payload: &[u8], deadline: Instant) -> Answer {
        let (pod, container) = match read_pair(payload) {
            Ok(pair) => pair,
            Err(error) => return self.unreadable(Call::CreateContainer, &error),
        };
        let no_answer = {
            let (pod, container) = (Some(pod.clone()), Some(container.clone()));
            |reason| NoAnswer { call: Call::CreateContainer, pod, container, reason }
        };
        if container.resources.is_pinned() && self.shared.options.when_pinned == WhenPinned::Yield {
            self.no_answer(no_answer(NoAnswerReason::PinnedByOther));
            return ok(&Empty {});
        }
        let id = container.id.clone();
        let handler = Arc::clone(&self.shared.handler);
        let answer = self.ask(deadline, async move { handler.create_container(pod, container).await }).await;
        let checked = answer.and_then(|answer| match answer {
            Ok(creation) => {
                creation.settings.check(&self.shared.handler.online())?;
                let update = self.check(&creation.updates, Some(&id))?;
                let resources = convert::settings(&creation.settings);
                Ok(Ok((resources, update)))
            }
            Err(refusal) => Ok(Err(refusal)),
        });
        match checked {
            Ok(Ok((None, update))) if update.is_empty() => ok(&Empty {}),
            Ok(Ok((resources, update))) => {
                let linux = messages::LinuxContainerAdjustment { resources };
                let adjust = Some(messages::ContainerAdjustment { linux: Some(linux) });
                let response = ok(&messages::CreateContainerResponse { adjust, update });
                Answer { lost: Some(no_answer(NoAnswerReason::ConnectionLost)), ..response }
            }
            Ok(Err(refusal)) => {
                Answer { lost: Some(no_answer(NoAnswerReason::ConnectionLost)), ..refused(&refusal) }
            }
            Err(reason) => {
                self.no_answer(no_answer(reason));
                ok(&Empty {})
            }
        }
    }

    async fn update_container(&self, payload: &[u8], deadline: Instant) -> Answer {
        let call = Call::UpdateContainer;
        let request = match messages::UpdateContainerRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => return self.unreadable(call, &error),
        };
        let (pod, container) = match pair(request.pod, request.container) {
            Ok(pair) => pair,
            Err(error) => return self.unreadable(call, &error),
        };
        let requested = request.linux_resources.map(convert::resources).unwrap_or_default();
        let told = (Some(pod.clone()), Some(container.clone()));
        let handler = Arc::clone(&self.shared.handler);
        let answer =
            self.ask(deadline, async move { handler.update_container(pod, container, requested).await });
        self.updates(call, told, answer.await)
    }

    async fn stop_container(&self, payload: &[u8], deadline: Instant) -> Answer {
        let call = Call::StopContainer;
        let (pod, container) = match read_pair(payload) {
            Ok(pair) => pair,
            Err(error) => return self.unreadable(call, &error),
        };
        let told = (Some(pod.clone()), Some(container.clone()));
        let handler = Arc::clone(&self.shared.handler);
        let answer = self.ask(deadline, async move { handler.stop_container(pod, container).await });
        self.updates(call, told, answer.await.map(Ok))
    }

    /// The answer to a call that is answered by updates.
    fn updates(
        &self,
        call: Call,
        (pod, container): (Option<Pod>, Option<Container>),
        answer: Result<Result<Vec<Update>, Refusal>, NoAnswerReason>,
    ) -> Answer {
        let checked = answer.and_then(|answer| match answer {
            Ok(updates) => self.check(&updates, None).map(Ok),
            Err(refusal) => Ok(Err(refusal)),
        });
        let lost = |reason| NoAnswer { call, pod, container, reason };
        match checked {
            Ok(Ok(update)) if update.is_empty() => ok(&Empty {}),
            Ok(Ok(update)) => Answer {
                lost: Some(lost(NoAnswerReason::ConnectionLost)),
                ..ok(&messages::UpdatesResponse { update })
            },
            Ok(Err(refusal)) => {
                Answer { lost: Some(lost(NoAnswerReason::ConnectionLost)), ..refused(&refusal) }
            }
            Err(reason) => {
                self.no_answer(lost(reason));
                ok(&Empty {})
            }
        }
    }

    async fn update_pod(&self, payload: &[u8], deadline: Instant) -> Answer {
        let call = Call::UpdatePod;
        let request = match messages::UpdatePodSandboxRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => return self.unreadable(call, &error),
        };
        let pod = match read_pod(request.pod) {
            Ok(pod) => pod,
            Err(error) => return self.unreadable(call, &error),
        };
        let resources = request.linux_resources.map(convert::resources).unwrap_or_default();
        let pod = Pod {
            overhead: request.overhead_linux_resources.map(convert::resources).or(pod.overhead),
            ..pod
        };
        let told = pod.clone();
        let handler = Arc::clone(&self.shared.handler);
        let answer = self.ask(deadline, async move { handler.update_pod(pod, resources).await }).await;
        self.consent(call, told, answer)
    }

    /// The answer to a call about a pod, that can only be refused.
    fn consent(&self, call: Call, pod: Pod, answer: Result<Result<(), Refusal>, NoAnswerReason>) -> Answer {
        let lost = |reason| NoAnswer { call, pod: Some(pod), container: None, reason };
        match answer {
            Ok(Ok(())) => ok(&Empty {}),
            Ok(Err(refusal)) => {
                Answer { lost: Some(lost(NoAnswerReason::ConnectionLost)), ..refused(&refusal) }
            }
            Err(reason) => {
                self.no_answer(lost(reason));
                ok(&Empty {})
            }
        }
    }

    /// An event without an answer of its own, told by its own call or as a change of state.
    async fn event(
        &self,
        kind: EventKind,
        pod: Option<messages::PodSandbox>,
        container: Option<messages::Container>,
        deadline: Instant,
    ) -> Answer {
        if kind == EventKind::RunPodSandbox {
            let pod = match read_pod(pod) {
                Ok(pod) => pod,
                Err(error) => return self.unreadable(Call::RunPod, &error),
            };
            let told = pod.clone();
            let handler = Arc::clone(&self.shared.handler);
            let answer = self.ask(deadline, async move { handler.run_pod(pod).await }).await;
            return self.consent(Call::RunPod, told, answer);
        }
        let event = match read_event(kind, pod, container) {
            Ok(event) => event,
            Err(error) => return self.unreadable(Call::Event, &error),
        };
        let (pod, container) = match &event {
            Event::Pod(_, pod) => (pod.clone(), None),
            Event::Container(_, pod, container) => (pod.clone(), Some((**container).clone())),
        };
        let handler = Arc::clone(&self.shared.handler);
        if let Err(reason) = self.ask(deadline, async move { handler.event(event).await }).await {
            self.no_answer(NoAnswer { call: Call::Event, pod: Some(pod), container, reason });
        }
        ok(&Empty {})
    }
}

impl Told {
    fn add(&mut self, request: messages::SynchronizeRequest, bytes: usize) -> Result<(), String> {
        self.bytes += bytes;
        let snapshot = &mut self.snapshot;
        let objects = [
            snapshot.pods.len(),
            snapshot.containers.len(),
            snapshot.unreadable,
            request.pods.len(),
            request.containers.len(),
        ];
        if objects.iter().sum::<usize>() > MAX_OBJECTS || self.bytes > MAX_SNAPSHOT {
            return Err(format!(
                "more than {MAX_OBJECTS} pods and containers, or {MAX_SNAPSHOT} bytes, cannot be handled"
            ));
        }
        for encoded in request.pods {
            match messages::PodSandbox::decode(&*encoded) {
                Ok(pod) => {
                    let pod = convert::pod(pod);
                    snapshot.pods.insert(pod.id.clone(), pod);
                }
                Err(error) => {
                    tracing::warn!("NRI: a pod could not be read: {error}");
                    snapshot.unreadable += 1;
                }
            }
        }
        for encoded in request.containers {
            match messages::Container::decode(&*encoded) {
                Ok(container) => snapshot.containers.push(convert::container(container)),
                Err(error) => {
                    tracing::warn!("NRI: a container could not be read: {error}");
                    snapshot.unreadable += 1;
                }
            }
        }
        Ok(())
    }
}

fn refused(refusal: &Refusal) -> Answer {
    status(FAILED_PRECONDITION, &refusal.0).into()
}

/// A request lacks something.
#[derive(Debug, thiserror::Error)]
#[error("{0} is missing")]
struct Missing(&'static str);

fn read_pod(pod: Option<messages::PodSandbox>) -> Result<Pod, Missing> {
    pod.filter(|pod| !pod.id.is_empty()).map(convert::pod).ok_or(Missing("the pod or its id"))
}

fn pair(
    pod: Option<messages::PodSandbox>,
    container: Option<messages::Container>,
) -> Result<(Pod, Container), Missing> {
    let container = container
        .filter(|container| !container.id.is_empty())
        .map(convert::container)
        .ok_or(Missing("the container or its id"))?;
    Ok((read_pod(pod)?, container))
}

fn read_event(
    kind: EventKind,
    pod: Option<messages::PodSandbox>,
    container: Option<messages::Container>,
) -> Result<Event, Missing> {
    let of_pod = |what, pod| read_pod(pod).map(|pod| Event::Pod(what, pod));
    let of_container = |what, pod| {
        pair(pod, container).map(|(pod, container)| Event::Container(what, pod, Box::new(container)))
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
        | EventKind::ValidateContainerAdjustment => Err(Missing("a call of its own for this event")),
    }
}

/// A request that has a pod and a container could not be read.
#[derive(Debug, thiserror::Error)]
enum PairError {
    #[error(transparent)]
    Decode(#[from] prost::DecodeError),
    #[error(transparent)]
    Missing(#[from] Missing),
}

fn read_pair(payload: &[u8]) -> Result<(Pod, Container), PairError> {
    let request = messages::ContainerRequest::decode(payload)?;
    Ok(pair(request.pod, request.container)?)
}

/// Updates as messages, if the kernel and the runtime would take them. Those that change nothing are left out.
pub(super) fn check_updates(
    updates: &[Update],
    creating: Option<&str>,
    online: &Online,
) -> Result<Vec<messages::ContainerUpdate>, InvalidSettings> {
    let mut seen = HashSet::new();
    for Update { container, settings, .. } in updates {
        if creating == Some(container) {
            return Err(InvalidSettings::BeingCreated { container: container.clone() });
        }
        if !seen.insert(container) {
            return Err(InvalidSettings::Twice { container: container.clone() });
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
                    link.answer(connection, call.stream, &Response::default()).await.unwrap();
                }
            }
        };
        tokio::join!(answers, async { writing.await.unwrap() });
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_does_not_configure_us_is_given_up() {
        let shared = Plugin::new(Options::default(), Arc::new(Idle)).shared;
        let (ours, theirs) = tokio::io::duplex(1000);
        tokio::spawn(answer_only(theirs));
        let shutdown = CancellationToken::new();
        let end = tokio::time::timeout(Duration::from_mins(1), run(ours, shared, &shutdown)).await;
        assert_eq!(end.unwrap().to_string(), "the runtime did not call Configure within 5s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_given_up_is_forgotten() {
        let (ours, _silent) = tokio::io::duplex(1000);
        let (link, writing) = Link::new(Connection::Runtime, wire::encode, ours);
        let writing = tokio::spawn(writing);
        let called = link.call::<_, Empty>("service", "method", &Empty {}, Duration::from_secs(1)).await;
        assert_eq!(called, Err(CallError::Timeout(Duration::from_secs(1))));
        assert_eq!(link.waiting(), 0);
        link.close();
        let called = link.call::<_, Empty>("service", "method", &Empty {}, Duration::from_secs(1)).await;
        assert_eq!(called, Err(CallError::Closed));
        writing.abort();
    }
}

//! Life cycle of the daemon: build the parts, listen, drop privileges, serve, stop.

use std::{
    fs::File,
    io,
    net::SocketAddr,
    os::unix::net::UnixListener,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use axum::Router;
use futures_util::FutureExt as _;
use listenfd::ListenFd;
use numaward_config::{Config, LoadedConfig, OperatingMode, Sources};
use numaward_guarantee::{
    error::StartError,
    ports::{Ports, ReconcilerFactory},
    reconciler::{ReconcilerHandle, View},
};
use numaward_http::{
    self as http, App, ControlListener, CredentialError, Gate, HostNames, ListenError, RemoteListener,
};
use numaward_kube::{
    api::Pods,
    nri::Options,
    pod::{NoPods, PodSource},
};
use numaward_model::health::{EndedThread, Heartbeat, Heartbeats, Readiness};
use numaward_observe::{self as observe, CgroupSource, Observer, events::Events};
use numaward_telemetry::{
    alerts,
    metrics::Metrics,
    otlp::{self, spans::Traces},
};
use rustix::io::fcntl_dupfd_cloexec;
use sd_notify::NotifyState;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    time::interval,
};
use tokio_util::sync::CancellationToken;

use crate::{
    allocations::{self, ReloadHandle},
    kubernetes::{
        cluster::{self, Cluster},
        export,
        kubelet::{self, Policies},
        nri,
    },
    logging,
    node_configuration::{LoadError, NodeConfiguration},
    privileges::{self, KernelNeeds},
    socket::{self, SocketError},
};

/// Settings of the read-only address, for error messages.
const LISTEN: &str = "--listen, NUMAWARD_LISTEN or \"listen\" in the configuration";
/// Settings of the control address, for error messages.
const CONTROL_LISTEN: &str = "NUMAWARD_CONTROL_LISTEN or \"control.listen\" in the configuration";

/// The age of the last heartbeat of the tokio runtime after which it counts as hanging.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(30);
/// The time to wait for the other threads after one has ended unexpectedly: they may hang as well.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The highest file descriptor that a process can have by default.
const LAST_DESCRIPTOR: i32 = 1023;
/// Interval of the attempts to listen on an address that another program uses.
const LISTEN_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Reason why the daemon cannot run or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The control socket cannot be created, for example because another daemon runs on this host.
    #[error(transparent)]
    Control(#[from] SocketError),
    /// The credentials of an address cannot be used.
    #[error("the daemon cannot check the credentials of clients: {0}")]
    Credentials(#[from] CredentialError),
    /// The kubelet pins containers on this host, and the mode `enforce` is configured.
    #[error(transparent)]
    Kubelet(#[from] kubelet::KubeletConflict),
    /// The configuration of this host's Kubernetes node cannot be loaded.
    #[error(transparent)]
    Configuration(#[from] LoadError),
    #[error("the daemon cannot give guarantees: {0}")]
    Guarantee(#[from] StartError),
    /// A core thread ended unexpectedly. The daemon ends, so that the service manager restarts it.
    #[error("the daemon ends, so that the service manager restarts it: {0}")]
    EndedThread(#[from] EndedThread),
    /// Threads, signals or timers are not available.
    #[error("the daemon cannot start: {0}")]
    Runtime(#[from] io::Error),
}

/// Runs the daemon until SIGTERM or SIGINT, and logs as configured. Must be called while the process has one thread.
///
/// An error while observing degrades the daemon and does not end it. In the mode `observe`, a read-only address on which the daemon
/// cannot listen is an error: without it, the daemon has no way to show its results.
pub fn run(
    sources: &Sources,
    loaded: LoadedConfig,
    mut guarantor: Box<dyn ReconcilerFactory>,
) -> Result<(), RunError> {
    let traces = Traces::new(&loaded.config.otlp);
    let log = logging::start(&loaded.config.log, &traces);
    reserve_descriptors();
    let configuration = NodeConfiguration::load(sources.clone(), loaded, log)?;
    let config = configuration.config();
    let policies = Policies::read(&config.host_root, &config.kubernetes.kubelet.directory);
    let mode = kubelet::mode(config, &policies)?;
    if mode == OperatingMode::Observe {
        let kubelet = policies.pins().map(|pins| pins.found.join(", "));
        let message = "mode observe: the daemon writes nothing, and checks the guarantees of the kubelet";
        tracing::info!(kubelet, "{message}");
    }
    let mut readiness = Readiness::default();
    let latches = observe::Latches::new(&mut readiness);
    let heartbeats = Heartbeats::default();
    let observer = Arc::new(Observer::new(config));
    let (placing, sharing) = (nri::NriMetrics::default(), cluster::ClusterMetrics::default());
    let alerts = alerts::AlertMetrics::default();
    let metrics =
        all_metrics((config, mode), &observer, &*guarantor, &placing, &sharing, &alerts, &traces.metrics());
    let cluster = Cluster::prepare(config, mode, policies, &observer, sharing)?;
    let mut cluster = cluster.with_settings(configuration.kubernetes());
    let app = App::new(&observer, &metrics, &readiness, &heartbeats, allocations::open_api());
    let (address, listener) = listen_for_reads(config, mode, take_activated_listener())?;
    let read_gate = config.read_access();
    let read_gate = read_gate.is_configured().then(|| Gate::open(read_gate)).transpose()?;
    let remote = control_address(config, mode)?;
    let control = control_socket(config, mode)?;
    if mode == OperatingMode::Enforce && (control.is_some() || remote.is_some()) {
        guarantor.prepare(config);
    }
    let needs = KernelNeeds::of_this_kernel(observer.needs_cap_bpf());
    drop_privileges(config, mode, needs);
    observer.keep_off_exclusive_cpus();
    // Requests are few and short; blocking calls have threads of their own, started as needed.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let readers = http::low_priority_runtime()?;
    let (config, origin) = &runtime.block_on(kubelet::prepare(config, mode, &observer));
    log_configuration(config);
    let stop = CancellationToken::new();
    let cgroups = match &config.cgroup_mount {
        Some(path) => CgroupSource::Mount(path.as_path().into()),
        None => CgroupSource::MountTable,
    };
    let mut threads = observe::spawn(&observer, cgroups, latches, &heartbeats, &stop)?;
    let ports = Ports { heartbeats: heartbeats.clone(), ..Ports::new(observer.clone()) };
    let started = guarantor.start(config, ports, runtime.handle(), &stop)?;
    let (reconciler, thread) = started.unzip();
    threads.extend(thread);
    let served = runtime.block_on(async {
        let stop = stop.clone();
        // The threads end with this block, also on an error.
        let _stop_all = stop.clone().drop_guard();
        stop_on_signals(stop.clone())?;
        tokio::spawn(close_events(observer.events().clone(), stop.clone()).boxed());
        let heartbeat = heartbeats.register("tokio-rt-worker", RUNTIME_TIMEOUT);
        let is_ready = placing_check(config, reconciler.is_some(), &readiness, &placing);
        let notifying = notify_service_manager(readiness, heartbeats.clone(), heartbeat, stop.clone());
        tokio::spawn(notifying.boxed());
        start_sending((config, address), &metrics, &alerts, traces, &stop);
        let names = HostNames::new(&config.listen_names);
        let controlled = reconciler.clone();
        cluster.reserve_claims(reconciler.as_ref());
        let refusals = cluster.evict(reconciler.as_ref());
        if config.kubernetes.nri.enabled {
            let (place, watched) = ((config, mode), (&heartbeats, &stop));
            start_placing(place, reconciler.clone(), &observer, &cluster, (placing, refusals), watched);
        }
        if let Some(remote) = remote {
            serve_remote(&app, reconciler.as_ref(), (remote, names.clone()), (&heartbeats, &stop));
        }
        kubelet::start_watching(config, mode, origin.clone(), &observer, &stop);
        let (reload, reloads) = ReloadHandle::new();
        configuration.start_following(&observer, reconciler.clone(), reloads, &stop);
        let assigned = match mode {
            OperatingMode::Enforce => {
                reconciler.map(|reconciler| (reconciler.view(), export::engine_source(observer.clone())))
            }
            OperatingMode::Observe => Some(follow_kubelet(config, &observer, cluster.pods(), &stop)),
        };
        let (view, source) = assigned.unzip();
        cluster.start(source, is_ready, &stop);
        if let Some(control) = control {
            let router = controlled.map_or_else(
                || allocations::observing_router(app.clone(), view.clone(), reload.clone()),
                |reconciler| allocations::control_router(app.clone(), reconciler, reload.clone()),
            );
            serve_control(router, (config, control), (&heartbeats, &stop))?;
        }
        let router = allocations::router(app, view, read_gate.clone(), names);
        let serving = serve_reads((address, listener), read_gate, router, heartbeats.clone(), stop);
        readers.spawn(serving).await.map_err(io::Error::from).flatten()
    });
    join(threads, &heartbeats);
    // A scrape with a hanging client must not delay the end.
    readers.shutdown_timeout(Duration::from_secs(1));
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let Some(ended) = heartbeats.ended_thread() {
        return Err(ended.into());
    }
    served?;
    tracing::info!("stopped");
    Ok(())
}

fn drop_privileges(config: &Config, mode: OperatingMode, needs: KernelNeeds) {
    match privileges::drop_unneeded(config, mode, needs) {
        Ok(kept) => tracing::debug!(?kept, "the daemon dropped all other capabilities"),
        Err(error) => tracing::warn!(%error, "the daemon cannot drop capabilities and keeps them all"),
    }
}

fn serve_control(
    router: Router,
    (config, socket): (&Config, UnixListener),
    (heartbeats, stop): (&Heartbeats, &CancellationToken),
) -> io::Result<()> {
    tracing::info!(socket = %config.control_socket.display(), "serving the control socket");
    let serve = http::serve(ControlListener::new(socket)?, router, stop.clone());
    tokio::spawn(heartbeats.watch("http (control socket)", stop, serve).boxed());
    Ok(())
}

/// Makes the kernel grow the process's table of file descriptors to its default maximum. Must be called while the process has one thread.
///
/// With several threads, the kernel waits for an RCU grace period each time it doubles the table, and so does the thread that opens a
/// file: 150 ms were measured while pages were being moved on the same CPU. A table never shrinks. Source: `fs/file.c`
/// (`expand_fdtable`).
fn reserve_descriptors() {
    let reserved = File::open("/dev/null")
        .and_then(|file| fcntl_dupfd_cloexec(file, LAST_DESCRIPTOR).map_err(io::Error::from));
    if let Err(error) = reserved {
        tracing::debug!(%error, "the table of file descriptors cannot be grown in advance and will grow later");
    }
}

/// Takes the socket on which systemd listens for the daemon (`numaward.socket`, `sd_listen_fds(3)`). It exists before the daemon and
/// during restarts, so that no other program can take the port.
fn take_activated_listener() -> Option<std::net::TcpListener> {
    let listener = ListenFd::from_env().take_tcp_listener(0);
    let listener = listener.and_then(|listener| {
        listener.as_ref().map_or(Ok(()), |listener| listener.set_nonblocking(true)).map(|()| listener)
    });
    listener.unwrap_or_else(|error| {
        tracing::warn!(%error, "the socket of systemd cannot be used: it has to be a TCP socket");
        None
    })
}

/// Listens on the read-only address, or takes the socket of systemd. In the mode `enforce`, an address that another program uses is no
/// error, as guarantees have to be enforced in any case: the result has no listener, and the daemon tries again later.
fn listen_for_reads(
    config: &Config,
    mode: OperatingMode,
    activated: Option<std::net::TcpListener>,
) -> Result<(SocketAddr, Option<std::net::TcpListener>), ListenError> {
    let address = config.listen.0;
    if let Some(listener) = activated {
        match listener.local_addr() {
            Ok(found) if found == address => return Ok((address, Some(listener))),
            // The required credentials depend on the configured address.
            found => {
                let found = found.map_or_else(|error| error.to_string(), |found| found.to_string());
                tracing::warn!(%address, found, "the socket of systemd is not used: its address differs from `listen` in the configuration");
            }
        }
    }
    match mode {
        OperatingMode::Enforce => Ok(listen_or_report(address, LISTEN)),
        OperatingMode::Observe => {
            let listener = http::listen(address, LISTEN)?;
            Ok((listener.local_addr().unwrap_or(address), Some(listener)))
        }
    }
}

/// Listens on an address. If that fails, reports it, and returns no listener. `setting` is where the address comes from.
fn listen_or_report(
    address: SocketAddr,
    setting: &'static str,
) -> (SocketAddr, Option<std::net::TcpListener>) {
    match http::listen(address, setting) {
        Ok(listener) => (listener.local_addr().unwrap_or(address), Some(listener)),
        Err(error) => {
            let every = LISTEN_RETRY_INTERVAL;
            tracing::error!(%error, ?every, "the daemon cannot listen and tries again; it enforces guarantees meanwhile");
            (address, None)
        }
    }
}

/// Returns the listener of [`listen_or_report`], after retries if there is none yet; `None` once the daemon stops.
async fn retry_listen(
    (address, listener): (SocketAddr, Option<std::net::TcpListener>),
    setting: &'static str,
    stop: &CancellationToken,
) -> Option<std::net::TcpListener> {
    if listener.is_some() {
        return listener;
    }
    let retrying = async {
        let mut ticks = interval(LISTEN_RETRY_INTERVAL);
        loop {
            ticks.tick().await;
            match http::listen(address, setting) {
                Ok(listener) => return listener,
                Err(error) => tracing::debug!(%error, "the daemon still cannot listen"),
            }
        }
    };
    stop.run_until_cancelled(retrying).await
}

/// Serves the read-only address until the daemon stops. A `gate` checks the credentials of clients.
async fn serve_reads(
    address: (SocketAddr, Option<std::net::TcpListener>),
    gate: Option<Arc<Gate>>,
    router: Router,
    heartbeats: Heartbeats,
    stop: CancellationToken,
) -> io::Result<()> {
    let Some(listener) = retry_listen(address, LISTEN, &stop).await else { return Ok(()) };
    tracing::info!(version = numaward_api::VERSION, address = %listener.local_addr()?, "serving");
    let serve = match gate {
        Some(gate) => http::serve(RemoteListener::new(listener, gate)?, router, stop.clone()),
        None => http::serve(TcpListener::from_std(listener)?, router, stop.clone()),
    };
    heartbeats.watch("http", &stop, serve).await;
    Ok(())
}

/// Waits for the threads to end, for at most [`JOIN_TIMEOUT`] if one has ended unexpectedly.
fn join(threads: Vec<JoinHandle<()>>, heartbeats: &Heartbeats) {
    let deadline = heartbeats.ended_thread().map(|_| Instant::now() + JOIN_TIMEOUT);
    for thread in threads {
        thread.thread().unpark();
        while deadline.is_some_and(|end| Instant::now() < end) && !thread.is_finished() {
            thread::sleep(Duration::from_millis(10));
        }
        // The heartbeats have already recorded an unexpected end.
        if deadline.is_none() || thread.is_finished() {
            let _ = thread.join();
        }
    }
}

/// Logs the configuration as `numaward config view` shows it, and its differences from the defaults.
fn log_configuration(config: &Config) {
    match config.view().and_then(|view| Ok((view, config.differences()?))) {
        Ok((view, differences)) => {
            tracing::info!(configuration = %view, "the configuration in effect");
            if differences.is_empty() {
                tracing::info!("the configuration has only defaults");
            } else {
                tracing::info!(
                    differences = differences.join(", "),
                    "the configuration differs from the defaults"
                );
            }
        }
        Err(error) => tracing::warn!(%error, "the configuration cannot be shown"),
    }
}

fn all_metrics(
    (config, mode): (&Config, OperatingMode),
    observer: &Arc<Observer>,
    guarantor: &dyn ReconcilerFactory,
    placing: &nri::NriMetrics,
    sharing: &cluster::ClusterMetrics,
    alerts: &alerts::AlertMetrics,
    traces: &otlp::OtlpMetrics,
) -> Arc<Metrics> {
    let metrics = Metrics::new(observer.clone()).exporting(config.metrics.clone());
    let metrics = metrics.with(|registry| {
        guarantor.register(registry);
        observer.events().register(registry);
        if config.kubernetes.nri.enabled && mode == OperatingMode::Enforce {
            placing.register(registry);
        }
        sharing.register(registry);
        alerts.register(registry);
        traces.register(registry);
    });
    if config.export_kubelet_names {
        return Arc::new(metrics.with_kubelet_names(|registry| {
            // In the mode `observe`, the kubelet itself counts its decisions.
            if mode == OperatingMode::Enforce {
                guarantor.register_kubelet(registry);
            }
        }));
    }
    Arc::new(metrics)
}

/// Starts alerts and the export to OpenTelemetry as configured. An error is logged and does not stop the daemon.
fn start_sending(
    (config, address): (&Config, SocketAddr),
    metrics: &Arc<Metrics>,
    alerts: &alerts::AlertMetrics,
    traces: Traces,
    stop: &CancellationToken,
) {
    // The receivers may get data from several hosts.
    let host = config.kubernetes.node_name.clone();
    let host = host.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let scheme = if config.listen_tls.cert_file.is_some() { "https" } else { "http" };
    if let Err(error) = alerts::start(&config.alerts, (&host, scheme, address), metrics, alerts, stop) {
        tracing::error!(%error, "alerts.webhook cannot be used: the daemon neither evaluates nor sends alerts");
    }
    let counted = traces.metrics();
    if let Err(error) = otlp::start(config, &host, metrics, traces, &counted, stop) {
        tracing::error!(%error, "otlp.endpoint cannot be used: the export to OpenTelemetry is incomplete");
    }
}

/// Starts the NRI plugin, which places containers when they are created, unless this host can have no guarantees.
fn start_placing(
    (config, mode): (&Config, OperatingMode),
    reconciler: Option<ReconcilerHandle>,
    observer: &Arc<Observer>,
    cluster: &Cluster,
    counted: (nri::NriMetrics, nri::Refusals),
    (heartbeats, stop): (&Heartbeats, &CancellationToken),
) {
    if mode == OperatingMode::Observe {
        return tracing::warn!("mode observe: kubernetes.nri.enabled has no effect, no container is placed");
    }
    let Some(reconciler) = reconciler else {
        return tracing::error!("the daemon places no container: this host can have no guarantees");
    };
    let pods = cluster.pods().map_or_else(|| Arc::new(NoPods) as Arc<dyn PodSource>, |pods| Arc::new(pods));
    let reporting = nri::report_moves(observer.events().subscribe(None), pods.clone());
    tokio::spawn(stop.clone().run_until_cancelled_owned(reporting).boxed());
    let described = (pods, cluster.claims(), nri::DeviceTimeouts::default());
    let settings = (config, cluster.settings());
    let options = Options { plugin: config.kubernetes.nri.clone(), ..Options::default() };
    let plugin = nri::plugin(options, settings, reconciler, observer.clone(), described, counted, stop);
    let noting = nri::note_runtime(plugin.status(), observer.clone());
    tokio::spawn(stop.clone().run_until_cancelled_owned(noting).boxed());
    tokio::spawn(heartbeats.watch("nri", stop, plugin.run(stop.clone())).boxed());
    let socket = config.kubernetes.nri.socket.display();
    tracing::info!(%socket, "the daemon places containers when they are created");
}

/// Returns a check whether containers that start on this host are placed: each part has started and, where the daemon places containers, the
/// container runtime is connected.
fn placing_check(
    config: &Config,
    can_guarantee: bool,
    readiness: &Readiness,
    placing: &nri::NriMetrics,
) -> cluster::IsReady {
    let places = config.kubernetes.nri.enabled && can_guarantee;
    let (readiness, placing) = (readiness.clone(), placing.clone());
    Arc::new(move || readiness.is_ready() && (!places || placing.is_connected()))
}

/// Starts to follow the guarantees of the kubelet. Returns them as the source for the HTTP API and for the exports.
fn follow_kubelet(
    config: &Config,
    observer: &Arc<Observer>,
    pods: Option<Pods>,
    stop: &CancellationToken,
) -> (View, export::Source) {
    let latest = kubelet::view::LatestGuarantees::default();
    tokio::spawn(
        kubelet::follow(config.clone(), observer.clone(), pods, latest.clone(), stop.clone()).boxed(),
    );
    (latest.clone().view(observer.clone()), latest.source(observer.clone()))
}

/// Ends the connections of clients that stream events when the daemon stops.
async fn close_events(events: Events, stop: CancellationToken) {
    stop.cancelled().await;
    events.close();
}

/// The control address, with the check of credentials.
struct ControlAddress {
    address: (SocketAddr, Option<std::net::TcpListener>),
    gate: Arc<Gate>,
}

/// Listens on the control address, if one is configured; `None` in the mode `observe`. As with the read-only address, an address that
/// another program uses is no error.
fn control_address(config: &Config, mode: OperatingMode) -> Result<Option<ControlAddress>, RunError> {
    let configured = config.control.listen.filter(|_| mode == OperatingMode::Enforce);
    let Some(address) = configured else { return Ok(None) };
    let gate = Gate::open(&config.control)?;
    Ok(Some(ControlAddress { address: listen_or_report(address.0, CONTROL_LISTEN), gate }))
}

/// Starts to serve the control address until the daemon stops.
fn serve_remote(
    app: &Arc<App>,
    reconciler: Option<&ReconcilerHandle>,
    (ControlAddress { address, gate }, names): (ControlAddress, HostNames),
    (heartbeats, stop): (&Heartbeats, &CancellationToken),
) {
    let Some(reconciler) = reconciler else {
        tracing::warn!("the daemon does not serve control.listen: this host can have no guarantees");
        return;
    };
    let router = allocations::remote_router(app.clone(), reconciler.clone(), gate.clone(), names);
    let (heartbeats, stop) = (heartbeats.clone(), stop.clone());
    let serving = async move {
        let Some(listener) = retry_listen(address, CONTROL_LISTEN, &stop).await else { return };
        let listening = RemoteListener::new(listener, gate);
        match listening.and_then(|listener| Ok((listener.local_addr()?, listener))) {
            Ok((address, listener)) => {
                tracing::info!(%address, "serving the control address");
                let serve = http::serve(listener, router, stop.clone());
                heartbeats.watch("http (control address)", &stop, serve).await;
            }
            Err(error) => tracing::error!(%error, "the daemon cannot serve the control address"),
        }
    };
    tokio::spawn(serving.boxed());
}

/// Listens on the control socket. A socket that cannot be created is no error: the daemon takes no requests then. In the mode `observe`,
/// root gets no more than other users without it.
fn control_socket(config: &Config, mode: OperatingMode) -> Result<Option<UnixListener>, SocketError> {
    match (socket::listen(&config.control_socket, "controlSocket"), mode) {
        (Ok(listener), _) => Ok(Some(listener)),
        (Err(error @ (SocketError::Io(..) | SocketError::Directory(_))), OperatingMode::Enforce) => {
            tracing::warn!(%error, "the daemon takes no requests for guarantees on the control socket");
            Ok(None)
        }
        (Err(error), OperatingMode::Enforce) => Err(error),
        (Err(error), OperatingMode::Observe) => {
            tracing::info!(%error, "the daemon has no control socket: it shows regions and call chains only to clients with credentials");
            Ok(None)
        }
    }
}

fn stop_on_signals(stop: CancellationToken) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(signal = name, "stopping");
        stop.cancel();
    });
    Ok(())
}

/// Notifies systemd that the daemon is ready, alive or stopping (`sd_notify(3)`). Without systemd, it only logs that the daemon is ready.
/// `heartbeat` is that of the tokio runtime, which this task shows to be alive.
async fn notify_service_manager(
    readiness: Readiness,
    heartbeats: Heartbeats,
    heartbeat: Heartbeat,
    stop: CancellationToken,
) {
    let notify = |state: NotifyState<'_>| {
        if let Err(error) = sd_notify::notify(&[state]) {
            tracing::warn!(%error, "the service manager cannot be notified");
        }
    };
    // Half the timeout of the watchdog allows for one delayed tick.
    let watchdog = sd_notify::watchdog_enabled().map(|time| time / 2);
    let tick = watchdog.unwrap_or(Duration::from_secs(1)).min(Duration::from_secs(1));
    let mut ticks = interval(tick);
    let notifying = async {
        let (mut notified, mut has_trimmed, mut is_late) = (false, false, false);
        loop {
            ticks.tick().await;
            heartbeat.beat();
            if notified && !has_trimmed {
                has_trimmed = true;
                // One tick after it is ready, the daemon has built all routes. The start needs several times the memory of the time after
                // it.
                numaward_probes::trim_heap();
            }
            if !notified && readiness.is_ready() {
                notified = true;
                tracing::info!("ready");
                notify(NotifyState::Ready);
            }
            let late = heartbeats.late_thread();
            if let Some(late) = late.filter(|_| !is_late) {
                tracing::error!(%late, "a thread of the daemon hangs: /livez fails, and the daemon does not notify the watchdog");
            }
            is_late = late.is_some();
            if watchdog.is_some() && !is_late {
                notify(NotifyState::Watchdog);
            }
        }
    };
    stop.run_until_cancelled(notifying).await;
    stop.cancelled().await;
    notify(NotifyState::Stopping);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_table_has_its_maximum() {
        reserve_descriptors();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        assert!(size.trim().parse::<i32>().unwrap() > LAST_DESCRIPTOR, "{size}");
    }

    #[test]
    fn uses_systemd_socket_of_same_address() {
        let listen = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (own, other) = (listen(), listen());
        let mut config = Config::default();
        config.listen.0 = own.local_addr().unwrap();
        // While systemd listens on an address, the daemon itself cannot.
        assert!(listen_for_reads(&config, OperatingMode::Observe, Some(other)).is_err());
        let (address, listener) = listen_for_reads(&config, OperatingMode::Observe, Some(own)).unwrap();
        assert_eq!(listener.unwrap().local_addr().unwrap(), address);
    }

    /// Any user can listen on a port that the daemon had before a restart.
    #[tokio::test]
    async fn retries_used_address_in_mode_enforce() {
        let squatter = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = squatter.local_addr().unwrap();
        let mut config = Config::default();
        config.listen.0 = address;
        assert!(listen_for_reads(&config, OperatingMode::Observe, None).is_err());
        let (tried, listener) = listen_for_reads(&config, OperatingMode::Enforce, None).unwrap();
        assert!(tried == address && listener.is_none());
        config.control.listen = Some(config.listen);
        let control = control_address(&config, OperatingMode::Enforce).unwrap().unwrap();
        assert!(control.address.0 == address && control.address.1.is_none());

        let (stop, heartbeats) = (CancellationToken::new(), Heartbeats::default());
        let router = Router::new().route("/", axum::routing::get(async || "figures"));
        let serving = serve_reads((address, listener), None, router, heartbeats.clone(), stop.clone());
        let serving = tokio::spawn(serving);
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(squatter);
        let begun = Instant::now();
        while std::net::TcpStream::connect(address).is_err() {
            assert!(begun.elapsed() < 4 * LISTEN_RETRY_INTERVAL);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(heartbeats.ended_thread().is_none());
        stop.cancel();
        serving.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn stops_while_waiting_for_its_address() {
        let squatter = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stop = CancellationToken::new();
        let address = (squatter.local_addr().unwrap(), None);
        let serving = serve_reads(address, None, Router::new(), Heartbeats::default(), stop.clone());
        stop.cancel();
        serving.await.unwrap();
    }
}

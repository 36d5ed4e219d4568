//! The life of the daemon: build the parts, listen, give up privileges, serve, stop.

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
use numaward_config::{Config, OperatingMode};
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
    allocations,
    kubernetes::{
        cluster::{self, Cluster},
        export,
        kubelet::{self, Policies},
        nri,
    },
    logging,
    privileges::{self, Demands},
    socket::{self, SocketError},
};

/// What sets the read-only address.
const LISTEN: &str = "--listen, NUMAWARD_LISTEN or \"listen\" in the configuration";
/// What sets the control address.
const CONTROL_LISTEN: &str = "NUMAWARD_CONTROL_LISTEN or \"control.listen\" in the configuration";

/// How long the thread that the tasks run on may take to respond.
const RUNTIME_LIMIT: Duration = Duration::from_secs(30);
/// How long the other threads are waited for where one ended unasked: they may hang as well.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// The last file descriptor that a process may have by default.
const LAST_DESCRIPTOR: i32 = 1023;
/// How often an address that another program has is tried again.
const LISTEN_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The daemon cannot run at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Nothing could be served.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Another daemon promises on this host.
    #[error(transparent)]
    Control(#[from] SocketError),
    /// An address would be open to nobody, or to everybody.
    #[error("who may reach an address over TCP is not known: {0}")]
    Credentials(#[from] CredentialError),
    /// The kubelet promises on this host.
    #[error(transparent)]
    Kubelet(#[from] kubelet::KubeletConflict),
    /// What can be promised is not known.
    #[error("guarantees cannot be given: {0}")]
    Guarantee(#[from] StartError),
    /// A core thread ended unasked. The daemon ends as well, to be started again.
    #[error("the daemon ends, to be started again: {0}")]
    EndedThread(#[from] EndedThread),
    /// Threads, signals or timers are not available.
    #[error("the daemon cannot start: {0}")]
    Runtime(#[from] io::Error),
}

/// Runs the daemon until SIGTERM or SIGINT, and logs as configured. Call it while the process has one thread.
///
/// What fails while observing degrades the daemon and does not end it. An address that cannot be
/// listened on does, where it only observes: nobody could see what it does.
pub fn run(config: &Config, mut guarantor: Box<dyn ReconcilerFactory>) -> Result<(), RunError> {
    let traces = Traces::new(&config.otlp);
    logging::start(&config.log, &traces);
    reserve_descriptors();
    let policies = Policies::read(&config.host_root, &config.kubernetes.kubelet.directory);
    let mode = kubelet::mode(config, &policies)?;
    if mode == OperatingMode::Observe {
        let kubelet = policies.pins().map(|pins| pins.found.join(", "));
        let message = "mode observe: nothing is placed or written; the kubelet is held to its promises";
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
    let metrics = Arc::new(metrics);
    let mut cluster = Cluster::prepare(config, mode, policies, &observer, sharing)?;
    let app = App::new(&observer, &metrics, &readiness, &heartbeats, allocations::open_api());
    let (address, listener) = reading_address(config, mode, activated())?;
    let reading = config.read_access();
    let reading = reading.is_configured().then(|| Gate::open(reading)).transpose()?;
    let remote = control_address(config, mode)?;
    let control = control_socket(config, mode)?;
    if mode == OperatingMode::Enforce && (control.is_some() || remote.is_some()) {
        guarantor.prepare(config);
    }
    let demands = Demands::of_this_kernel(observer.needs_cap_bpf());
    match privileges::drop_unneeded(config, mode, demands) {
        Ok(kept) => tracing::debug!(?kept, "privileges given up"),
        Err(error) => tracing::warn!(%error, "privileges cannot be given up; the daemon keeps them"),
    }
    observer.keep_off_exclusive_cpus();
    // Requests are few and short; what may block has threads of its own, started as needed.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let readers = http::low_priority_runtime()?;
    let config = &runtime.block_on(kubelet::with_version(config));
    log_configuration(config);
    let stop = CancellationToken::new();
    let cgroups = match &config.cgroup_mount {
        Some(path) => CgroupSource::Mount(path.as_path().into()),
        None => CgroupSource::MountTable,
    };
    let mut threads = observe::spawn(&observer, cgroups, latches, &heartbeats, &stop)?;
    let ports = Ports { heartbeats: heartbeats.clone(), ..Ports::from_part(&observer) };
    let started = guarantor.start(config, ports, runtime.handle(), &stop)?;
    let (reconciler, thread) = started.unzip();
    threads.extend(thread);
    let served = runtime.block_on(async {
        let stop = stop.clone();
        // Whatever ends this block ends the threads too.
        let _stop_all = stop.clone().drop_guard();
        stop_on_signals(stop.clone())?;
        tokio::spawn(close_events(observer.events().clone(), stop.clone()).boxed());
        let heartbeat = heartbeats.register("tokio-rt-worker", RUNTIME_LIMIT);
        let notifying = notify_service_manager(readiness, heartbeats.clone(), heartbeat, stop.clone());
        tokio::spawn(notifying.boxed());
        start_sending((config, address), &metrics, &alerts, traces, &stop);
        let names = HostNames::new(&config.listen_names);
        let controlled = reconciler.clone();
        let refusals = cluster.evict(reconciler.as_ref());
        if config.kubernetes.nri.enabled && mode == OperatingMode::Observe {
            tracing::warn!("mode observe: no container is placed, although kubernetes.nri.enabled is set");
        } else if config.kubernetes.nri.enabled {
            let watched = (&heartbeats, &stop);
            start_placing(config, reconciler.clone(), &observer, &cluster, (placing, refusals), watched);
        }
        if let Some((listener, gate)) = remote {
            let served = (listener, gate, names.clone());
            serve_remote(&app, reconciler.as_ref(), served, (&heartbeats, &stop))?;
        }
        let assigned = match mode {
            OperatingMode::Enforce => {
                reconciler.map(|reconciler| (reconciler.view(), export::promised(observer.clone())))
            }
            OperatingMode::Observe => Some(follow_kubelet(config, &observer, cluster.pods(), &stop)),
        };
        let (view, source) = assigned.unzip();
        cluster.start(source, &stop);
        if let Some(control) = control {
            let router = controlled.map_or_else(
                || allocations::observing_router(app.clone(), view.clone()),
                |reconciler| allocations::control_router(app.clone(), reconciler),
            );
            serve_control(router, (config, control), (&heartbeats, &stop))?;
        }
        let router = allocations::router(app, view, reading.clone(), names);
        let listener = (address, listener);
        let served = readers.spawn(serve_reading(listener, reading, router, heartbeats.clone(), stop));
        served.await.map_err(io::Error::from).flatten()
    });
    end(threads, &heartbeats);
    // A scrape whose client hangs must not hold up the end.
    readers.shutdown_timeout(Duration::from_secs(1));
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let Some(ended) = heartbeats.ended_thread() {
        return Err(ended.into());
    }
    served?;
    tracing::info!("stopped");
    Ok(())
}

/// Serves the control socket.
fn serve_control(
    router: Router,
    (config, socket): (&Config, UnixListener),
    (heartbeats, stop): (&Heartbeats, &CancellationToken),
) -> io::Result<()> {
    tracing::info!(socket = %config.control_socket.display(), "serving root");
    let serve = http::serve(ControlListener::new(socket)?, router, stop.clone());
    tokio::spawn(heartbeats.watch("http (control socket)", stop, serve).boxed());
    Ok(())
}

/// Lets the kernel make the process's table of file descriptors as large as it gets by default, before there are threads.
///
/// Later, the kernel waits for an RCU grace period each time it doubles the table, and whatever opens a file waits with it: 150 ms were seen
/// where pages were being moved on the same CPU. A table never shrinks. Source: `fs/file.c` (`expand_fdtable`).
fn reserve_descriptors() {
    let reserved = File::open("/dev/null")
        .and_then(|file| fcntl_dupfd_cloexec(file, LAST_DESCRIPTOR).map_err(io::Error::from));
    if let Err(error) = reserved {
        tracing::debug!(%error, "the table of file descriptors grows later");
    }
}

/// The socket that systemd listens on for the daemon (`numaward.socket`, `sd_listen_fds(3)`). It is there before the daemon, and stays while
/// the daemon is restarted, so that no other program takes the port.
fn activated() -> Option<std::net::TcpListener> {
    let listener = ListenFd::from_env().take_tcp_listener(0);
    let listener = listener.and_then(|listener| {
        listener.as_ref().map_or(Ok(()), |listener| listener.set_nonblocking(true)).map(|()| listener)
    });
    listener.unwrap_or_else(|error| {
        tracing::warn!(%error, "the socket of systemd cannot be used: is it one of TCP?");
        None
    })
}

/// Listens on the read-only address, if systemd does not. Another program that has it keeps no guarantee from being kept: where
/// guarantees are enforced, that is tried again later.
fn reading_address(
    config: &Config,
    mode: OperatingMode,
    activated: Option<std::net::TcpListener>,
) -> Result<(SocketAddr, Option<std::net::TcpListener>), ListenError> {
    let address = config.listen.0;
    if let Some(listener) = activated {
        match listener.local_addr() {
            Ok(found) if found == address => return Ok((address, Some(listener))),
            // Who may read is decided by the address of the configuration.
            found => {
                let found = found.map_or_else(|error| error.to_string(), |found| found.to_string());
                tracing::warn!(%address, found, "the socket of systemd has another address than `listen`, and is not used");
            }
        }
    }
    match (http::listen(address, LISTEN), mode) {
        (Err(error), OperatingMode::Enforce) => {
            let every = LISTEN_RETRY_INTERVAL;
            tracing::error!(%error, ?every, "no figures are served; that is tried again, and guarantees are kept meanwhile");
            Ok((address, None))
        }
        (listening, _) => {
            let listener = listening?;
            Ok((listener.local_addr().unwrap_or(address), Some(listener)))
        }
    }
}

/// Tries again to listen, until that works.
async fn listen_later(address: SocketAddr) -> std::net::TcpListener {
    let mut ticks = interval(LISTEN_RETRY_INTERVAL);
    loop {
        ticks.tick().await;
        match http::listen(address, LISTEN) {
            Ok(listener) => return listener,
            Err(error) => tracing::debug!(%error, "no figures are served yet"),
        }
    }
}

/// Serves the read-only address, to those whom the gate lets through if there is one, until the daemon stops.
async fn serve_reading(
    (address, listener): (SocketAddr, Option<std::net::TcpListener>),
    gate: Option<Arc<Gate>>,
    router: Router,
    heartbeats: Heartbeats,
    stop: CancellationToken,
) -> io::Result<()> {
    let listener = match listener {
        Some(listener) => listener,
        None => match stop.run_until_cancelled(listen_later(address)).await {
            Some(listener) => listener,
            None => return Ok(()),
        },
    };
    tracing::info!(version = numaward_api::VERSION, %address, "serving");
    let serve = match gate {
        Some(gate) => http::serve(RemoteListener::new(listener, gate)?, router, stop.clone()),
        None => http::serve(TcpListener::from_std(listener)?, router, stop.clone()),
    };
    heartbeats.watch("http", &stop, serve).await;
    Ok(())
}

/// Waits for the threads, but not for long where one ended unasked.
fn end(threads: Vec<JoinHandle<()>>, heartbeats: &Heartbeats) {
    let patience = heartbeats.ended_thread().map(|_| Instant::now() + LAST_WAIT);
    for thread in threads {
        thread.thread().unpark();
        while patience.is_some_and(|end| Instant::now() < end) && !thread.is_finished() {
            thread::sleep(Duration::from_millis(10));
        }
        // How it ended is known.
        if patience.is_none() || thread.is_finished() {
            let _ = thread.join();
        }
    }
}

/// What counts, as `numaward config view` shows it, and what of it was configured: a line each.
fn log_configuration(config: &Config) {
    match config.view().and_then(|view| Ok((view, config.differences()?))) {
        Ok((view, differences)) => {
            tracing::info!(configuration = %view, "the configuration that applies");
            if differences.is_empty() {
                tracing::info!("the configuration is the default one");
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
) -> Metrics {
    let metrics = Metrics::new(observer.clone()).exporting(config.metrics.clone());
    let metrics = metrics.with(|registry| {
        guarantor.register(registry);
        observer.events().register(registry);
        placing.register(registry);
        sharing.register(registry);
        alerts.register(registry);
        traces.register(registry);
    });
    if config.export_kubelet_names {
        return metrics.with_kubelet_names(|registry| {
            // The decisions of a kubelet that is observed are its own to count.
            if mode == OperatingMode::Enforce {
                guarantor.register_kubelet(registry);
            }
        });
    }
    metrics
}

/// Alerts and OpenTelemetry, as configured. What cannot be sent is no reason not to run.
fn start_sending(
    (config, address): (&Config, SocketAddr),
    metrics: &Arc<Metrics>,
    alerts: &alerts::AlertMetrics,
    traces: Traces,
    stop: &CancellationToken,
) {
    // This host, for those who hear of several.
    let host = config.kubernetes.node_name.clone();
    let host = host.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let scheme = if config.listen_tls.cert_file.is_some() { "https" } else { "http" };
    if let Err(error) = alerts::start(&config.alerts, (&host, scheme, address), metrics, alerts, stop) {
        tracing::error!(%error, "alerts.webhook cannot be used: alerts are neither watched nor posted");
    }
    let counted = traces.metrics();
    if let Err(error) = otlp::start(config, &host, metrics, traces, &counted, stop) {
        tracing::error!(%error, "otlp.endpoint cannot be used: not everything is sent");
    }
}

/// Places containers when they are created, where anything can be promised to them.
fn start_placing(
    config: &Config,
    reconciler: Option<ReconcilerHandle>,
    observer: &Arc<Observer>,
    cluster: &Cluster,
    counted: (nri::NriMetrics, nri::Refusals),
    (heartbeats, stop): (&Heartbeats, &CancellationToken),
) {
    let Some(reconciler) = reconciler else {
        return tracing::error!("no container is placed: guarantees cannot be given");
    };
    let pods = cluster.pods().map_or_else(|| Arc::new(NoPods) as Arc<dyn PodSource>, |pods| Arc::new(pods));
    let plugin = nri::plugin(config, reconciler, observer.clone(), pods, counted, stop);
    tokio::spawn(heartbeats.watch("nri", stop, plugin.run(stop.clone())).boxed());
    let socket = config.kubernetes.nri.socket.display();
    tracing::info!(%socket, "containers are placed when they are created");
}

/// Follows what the kubelet promises, and gives it as it is served and as it is exported.
fn follow_kubelet(
    config: &Config,
    observer: &Arc<Observer>,
    pods: Option<Pods>,
    stop: &CancellationToken,
) -> (View, export::Source) {
    let last = kubelet::view::LastRead::default();
    tokio::spawn(kubelet::follow(config.clone(), observer.clone(), pods, last.clone(), stop.clone()).boxed());
    (last.clone().view(observer.clone()), last.source(observer.clone()))
}

/// Those who read events are let go when the daemon stops.
async fn close_events(events: Events, stop: CancellationToken) {
    stop.cancelled().await;
    events.close();
}

/// The control address, and who may use it; none where nothing can be asked for.
fn control_address(
    config: &Config,
    mode: OperatingMode,
) -> Result<Option<(std::net::TcpListener, Arc<Gate>)>, RunError> {
    match config.control.listen.filter(|_| mode == OperatingMode::Enforce) {
        Some(address) => Ok(Some((http::listen(address.0, CONTROL_LISTEN)?, Gate::open(&config.control)?))),
        None => Ok(None),
    }
}

/// Takes changes over TCP.
fn serve_remote(
    app: &Arc<App>,
    reconciler: Option<&ReconcilerHandle>,
    (listener, gate, names): (std::net::TcpListener, Arc<Gate>, HostNames),
    (heartbeats, stop): (&Heartbeats, &CancellationToken),
) -> io::Result<()> {
    let Some(reconciler) = reconciler else {
        tracing::warn!("control.listen is not served: nothing can be promised");
        return Ok(());
    };
    let listener = RemoteListener::new(listener, gate.clone())?;
    let address = listener.local_addr()?;
    let router = allocations::remote_router(app.clone(), reconciler.clone(), gate, names);
    let serve = http::serve(listener, router, stop.clone());
    tokio::spawn(heartbeats.watch("http (control address)", stop, serve).boxed());
    tracing::info!(%address, "guarantees can be asked for over TCP");
    Ok(())
}

/// The control socket. Without the rights to make it, the daemon only observes; without it, a daemon that only observes shows root no
/// more than others.
fn control_socket(config: &Config, mode: OperatingMode) -> Result<Option<UnixListener>, SocketError> {
    match (socket::listen(&config.control_socket, "controlSocket"), mode) {
        (Ok(listener), _) => Ok(Some(listener)),
        (Err(error @ (SocketError::Io(..) | SocketError::Directory(_))), OperatingMode::Enforce) => {
            tracing::warn!(%error, "guarantees cannot be asked for");
            Ok(None)
        }
        (Err(error), OperatingMode::Enforce) => Err(error),
        (Err(error), OperatingMode::Observe) => {
            tracing::info!(%error, "regions and call chains are shown with credentials only");
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

/// Notifies systemd when the daemon is ready, that it is alive, and when it stops (`sd_notify(3)`).
/// Without systemd, only the log says that it is ready. The heartbeat shows that tasks run.
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
    // Half the watchdog's time leaves room for one late turn.
    let watchdog = sd_notify::watchdog_enabled().map(|time| time / 2);
    let turn = watchdog.unwrap_or(Duration::from_secs(1)).min(Duration::from_secs(1));
    let mut ticks = interval(turn);
    let notifying = async {
        let (mut notified, mut has_trimmed, mut is_late) = (false, false, false);
        loop {
            ticks.tick().await;
            heartbeat.beat();
            if notified && !has_trimmed {
                has_trimmed = true;
                // A turn later, all routes are made. The start takes several times the memory that is needed afterwards.
                numaward_probes::trim_heap();
            }
            if !notified && readiness.is_ready() {
                notified = true;
                tracing::info!("ready");
                notify(NotifyState::Ready);
            }
            let late = heartbeats.late_thread();
            if let Some(late) = late.filter(|_| !is_late) {
                tracing::error!(%late, "the daemon is not alive: /livez fails, and the watchdog hears nothing");
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
    fn table_of_descriptors_has_room_for_all_by_default() {
        reserve_descriptors();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        assert!(size.trim().parse::<i32>().unwrap() > LAST_DESCRIPTOR, "{size}");
    }

    #[test]
    fn socket_of_systemd_is_used_if_it_has_the_address_of_the_configuration() {
        let listen = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (own, other) = (listen(), listen());
        let mut config = Config::default();
        config.listen.0 = own.local_addr().unwrap();
        // While systemd listens, no other program can, nor the daemon by itself.
        assert!(reading_address(&config, OperatingMode::Observe, Some(other)).is_err());
        let (address, listener) = reading_address(&config, OperatingMode::Observe, Some(own)).unwrap();
        assert_eq!(listener.unwrap().local_addr().unwrap(), address);
    }

    /// Any user can listen on a port that the daemon had before a restart.
    #[tokio::test]
    async fn address_of_another_program_is_tried_again_where_guarantees_are_enforced() {
        let squatter = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = squatter.local_addr().unwrap();
        let mut config = Config::default();
        config.listen.0 = address;
        assert!(reading_address(&config, OperatingMode::Observe, None).is_err());
        let (tried, listener) = reading_address(&config, OperatingMode::Enforce, None).unwrap();
        assert!(tried == address && listener.is_none());

        let (stop, heartbeats) = (CancellationToken::new(), Heartbeats::default());
        let router = Router::new().route("/", axum::routing::get(async || "figures"));
        let serving = serve_reading((address, listener), None, router, heartbeats.clone(), stop.clone());
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
    async fn daemon_that_waits_for_its_address_stops_at_once() {
        let squatter = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stop = CancellationToken::new();
        let address = (squatter.local_addr().unwrap(), None);
        let serving = serve_reading(address, None, Router::new(), Heartbeats::default(), stop.clone());
        stop.cancel();
        serving.await.unwrap();
    }
}

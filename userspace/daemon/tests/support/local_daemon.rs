//! A daemon without probes on a host of plain files: the observer, the reconciler, the control socket, the read-only address and,
//! with the socket of a container runtime, the NRI plugin.

use std::{
    fs,
    io::{self, BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_cgroup::{Hierarchy, KnobWatch};
use numaward_config::{
    Config, Interval,
    policy::{CpuList, StrategyKind},
};
use numaward_control::{ControlMetrics, testing};
use numaward_daemon::{
    allocations::{self, ReloadHandle},
    kubernetes::nri,
    socket,
};
use numaward_guarantee::ports::Ports;
use numaward_http::{Accept, App, ControlListener, HostNames, IncomingConnection, serve};
use numaward_kube::{api::ClaimReader, nri::Options, pod::NoPods};
use numaward_model::health::{Heartbeats, Readiness};
use numaward_observe::{CgroupSource, Latches, Observer, spawn};
use numaward_telemetry::metrics::Metrics;
use numaward_topology::Machine;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

const NODE_COUNT: u32 = 8;
const CPUS_PER_NODE: u32 = 64;

/// Listener on the loopback that reports the peer 127.x.y.z as 10.x.y.z, so that each address is a peer of its own.
struct RemotePeerListener(TcpListener);

fn remote_address(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) => {
            let [_, x, y, z] = ip.octets();
            (Ipv4Addr::new(10, x, y, z), address.port()).into()
        }
        IpAddr::V6(_) => address,
    }
}

impl Accept for RemotePeerListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<IncomingConnection>> {
        async {
            let (stream, address) = self.0.accept().await?;
            Ok(IncomingConnection::plain(stream, remote_address(address)))
        }
        .boxed()
    }
}

/// A host as files below a directory.
pub(crate) struct HostDirectory {
    pub(crate) dir: PathBuf,
    pub(crate) machine: Machine,
}

impl HostDirectory {
    /// Creates the files of a host with 8 nodes of 64 CPUs each, and the cgroups that a kubelet creates.
    pub(crate) fn new(dir: &Path) -> io::Result<Self> {
        let write = |path: &str, text: &str| {
            let path = dir.join(path);
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(path, text)
        };
        write("sys/devices/system/cpu/online", &format!("0-{}\n", NODE_COUNT * CPUS_PER_NODE - 1))?;
        write("sys/devices/system/cpu/possible", &format!("0-{}\n", NODE_COUNT * CPUS_PER_NODE - 1))?;
        write("sys/devices/system/node/online", &format!("0-{}\n", NODE_COUNT - 1))?;
        for node in 0..NODE_COUNT {
            let at = format!("sys/devices/system/node/node{node}");
            let (first, last) = (node * CPUS_PER_NODE, (node + 1) * CPUS_PER_NODE - 1);
            write(&format!("{at}/cpulist"), &format!("{first}-{last}\n"))?;
            let memory = format!("Node {node} MemTotal: 67108864 kB\nNode {node} MemFree: 60000000 kB\n");
            write(&format!("{at}/meminfo"), &memory)?;
        }
        write("proc/sys/kernel/random/boot_id", "0\n")?;
        let machine = numaward_topology::sysfs::read(dir).map_err(io::Error::other)?;
        let host = Self { dir: dir.to_owned(), machine };
        for path in ["", "kubepods", "kubepods/burstable", "kubepods/besteffort"] {
            host.cgroup(path)?;
        }
        Ok(host)
    }

    pub(crate) fn cgroup_dir(&self, path: &str) -> PathBuf {
        self.dir.join("cgroup").join(path.trim_start_matches('/'))
    }

    /// Creates a cgroup that uses some memory.
    pub(crate) fn cgroup(&self, path: &str) -> io::Result<()> {
        let dir = self.cgroup_dir(path);
        testing::cgroup(&dir, &self.machine);
        fs::write(dir.join("memory.numa_stat"), "anon N0=4096\nfile N0=4096\nkernel_stack N0=4096\n")?;
        fs::write(dir.join("memory.events"), "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")
    }

    /// Updates the effective sets of a cgroup as the kernel does after a write.
    pub(crate) fn apply_cpuset(&self, path: &str) -> io::Result<()> {
        let dir = self.cgroup_dir(path);
        for knob in ["cpuset.cpus", "cpuset.mems"] {
            if fs::read_to_string(dir.join(knob))?.trim().is_empty() {
                continue;
            }
            fs::copy(dir.join(knob), dir.join(format!("{knob}.effective")))?;
        }
        Ok(())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("run/control.sock")
    }

    /// Starts a daemon on this host. `runtime` is the socket of a container runtime.
    pub(crate) async fn start(&self, runtime: Option<&Path>) -> io::Result<LocalDaemon> {
        let mut config = Config {
            host_root: self.dir.clone(),
            state_directory: self.dir.join("state"),
            ..Config::default()
        };
        config.probes.allocation.enabled = false;
        // The CPUs on which this process runs are reserved: the daemon leaves the CPUs that it guarantees.
        let own = std::thread::available_parallelism().map_or(1, usize::from);
        let own = format!("0-{}", own - 1).parse().map_err(io::Error::other)?;
        config.reserved_system_cpus = Some(CpuList(own));
        if runtime.is_some() {
            // Pods start and end as fast as possible.
            config.observe.keep_removed = Interval(Duration::from_secs(5));
        }
        let (stop, heartbeats) = (CancellationToken::new(), Heartbeats::default());
        let mut readiness = Readiness::default();
        let latches = Latches::new(&mut readiness);
        let observer = Arc::new(Observer::new(&config));
        let (figures, placing) = (ControlMetrics::default(), nri::NriMetrics::default());
        let metrics = Metrics::new(observer.clone()).with(|registry| {
            figures.register(registry);
            observer.events().register(registry);
            placing.register(registry);
        });
        let app = App::new(&observer, &Arc::new(metrics), &readiness, &heartbeats, allocations::open_api());
        let root = self.dir.join("cgroup");
        let source = CgroupSource::Directory(root.clone().into());
        let mut threads = spawn(&observer, source, latches, &heartbeats, &stop)?;
        let ports = Ports { heartbeats: heartbeats.clone(), ..Ports::new(observer.clone()) };
        let enforcer = testing::enforcer(&config, &root, &observer.machine(), None);
        // Without the privilege for fanotify, knobs are polled.
        let watch = KnobWatch::new(&root).ok();
        let hierarchy = Hierarchy::at(&root);
        let started = testing::start(&config, hierarchy, enforcer, ports, figures, watch, stop.clone());
        let (reconciler, thread) = started.map_err(io::Error::other)?;
        threads.push(thread);
        let control = socket::listen(&self.socket(), "controlSocket").map_err(io::Error::other)?;
        let router = allocations::control_router(app.clone(), reconciler.clone(), ReloadHandle::new().0);
        tokio::spawn(serve(ControlListener::new(control)?, router, stop.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let names = HostNames::new(&[]);
        let router = allocations::router(app, Some(reconciler.view()), None, names);
        tokio::spawn(serve(RemotePeerListener(listener), router, stop.clone()));
        if let Some(runtime) = runtime {
            config.kubernetes.nri.enabled = true;
            config.kubernetes.nri.socket = runtime.to_owned();
            let ports = observer.clone();
            let kubernetes = watch::Sender::new(config.kubernetes.clone()).subscribe();
            let is_native = config.strategy == StrategyKind::Native;
            let counted = (placing, nri::Refusals::new(kubernetes.clone(), is_native));
            let pods = (Arc::new(NoPods) as _, ClaimReader::default(), nri::DeviceTimeouts::default());
            let options = Options { plugin: config.kubernetes.nri.clone(), ..Options::default() };
            let plugin = nri::plugin(options, (&config, kubernetes), reconciler, ports, pods, counted, &stop);
            tokio::spawn(plugin.run(stop.clone()));
        }
        Ok(LocalDaemon { address, stop, threads })
    }
}

/// A running daemon, which stops on drop.
pub(crate) struct LocalDaemon {
    pub(crate) address: SocketAddr,
    stop: CancellationToken,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for LocalDaemon {
    fn drop(&mut self) {
        self.stop.cancel();
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // The output has the message of a panic.
            let _ = thread.join();
        }
    }
}

/// A daemon in a process of its own: a second process of this program.
pub(crate) struct DaemonProcess {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl DaemonProcess {
    /// Starts a daemon on the host in `dir`. `runtime` is the socket of a container runtime.
    pub(crate) fn start(dir: &Path, runtime: Option<&Path>) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(SERVE_ARGUMENT).arg(dir).args(runtime).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        if let Some(output) = child.stdout.as_mut() {
            BufReader::new(output).read_line(&mut line)?;
        }
        let address = line.trim().parse().map_err(|_| io::Error::other("the daemon did not start"))?;
        Ok(Self { child, address })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The argument that makes this program a daemon.
const SERVE_ARGUMENT: &str = "--serve";

/// Runs the daemon until the input ends, if the arguments of this process request it. Returns false otherwise.
pub(crate) fn serve_if_requested() -> bool {
    let mut arguments = std::env::args_os().skip_while(|argument| argument != SERVE_ARGUMENT).skip(1);
    let Some(dir) = arguments.next() else { return false };
    let runtime = arguments.next().map(PathBuf::from);
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    tokio.block_on(async {
        let machine = numaward_topology::sysfs::read(Path::new(&dir)).unwrap();
        let host = HostDirectory { dir: dir.into(), machine };
        let daemon = host.start(runtime.as_deref()).await.unwrap();
        println!("{}", daemon.address);
        let input = tokio::task::spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink()));
        // The end of the input is the end of the benchmark.
        let _ = input.await;
    });
    true
}

//! All of the daemon but the probes, on a host of plain files: what watches cgroups, what gives guarantees, both
//! addresses and, where a socket is given, what places containers of pods.

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
use numaward_config::{Config, Interval, policy::CpuList};
use numaward_control::{ControlMetrics, testing};
use numaward_daemon::{allocations, kubernetes::nri, socket};
use numaward_guarantee::ports::Ports;
use numaward_http::{Accept, App, ControlListener, HostNames, IncomingConnection, serve};
use numaward_kube::pod::NoPods;
use numaward_model::health::{Heartbeats, Readiness};
use numaward_observe::{CgroupSource, Latches, Observer, spawn};
use numaward_telemetry::metrics::Metrics;
use numaward_topology::Machine;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const NODES: u32 = 8;
const CPUS_OF_NODE: u32 = 64;

/// Connections over the loopback, of which each address is a peer: as if 127.x.y.z were 10.x.y.z.
struct FromAnywhere(TcpListener);

fn elsewhere(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) => {
            let [_, x, y, z] = ip.octets();
            (Ipv4Addr::new(10, x, y, z), address.port()).into()
        }
        IpAddr::V6(_) => address,
    }
}

impl Accept for FromAnywhere {
    fn accept(&self) -> BoxFuture<'_, io::Result<IncomingConnection>> {
        async {
            let (stream, address) = self.0.accept().await?;
            Ok(IncomingConnection::plain(stream, elsewhere(address)))
        }
        .boxed()
    }
}

/// A host below a directory.
pub(crate) struct Place {
    pub(crate) dir: PathBuf,
    pub(crate) machine: Machine,
}

impl Place {
    /// Makes it: 8 nodes with 64 CPUs each, and the cgroups that a kubelet makes.
    pub(crate) fn new(dir: &Path) -> io::Result<Self> {
        let write = |path: &str, text: &str| {
            let path = dir.join(path);
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(path, text)
        };
        write("sys/devices/system/cpu/online", &format!("0-{}\n", NODES * CPUS_OF_NODE - 1))?;
        write("sys/devices/system/cpu/possible", &format!("0-{}\n", NODES * CPUS_OF_NODE - 1))?;
        write("sys/devices/system/node/online", &format!("0-{}\n", NODES - 1))?;
        for node in 0..NODES {
            let at = format!("sys/devices/system/node/node{node}");
            let (first, last) = (node * CPUS_OF_NODE, (node + 1) * CPUS_OF_NODE - 1);
            write(&format!("{at}/cpulist"), &format!("{first}-{last}\n"))?;
            let memory = format!("Node {node} MemTotal: 67108864 kB\nNode {node} MemFree: 60000000 kB\n");
            write(&format!("{at}/meminfo"), &memory)?;
        }
        write("proc/sys/kernel/random/boot_id", "0\n")?;
        let machine = numaward_topology::sysfs::read(dir).map_err(io::Error::other)?;
        let place = Self { dir: dir.to_owned(), machine };
        for path in ["", "kubepods", "kubepods/burstable", "kubepods/besteffort"] {
            place.cgroup(path)?;
        }
        Ok(place)
    }

    pub(crate) fn cgroup_dir(&self, path: &str) -> PathBuf {
        self.dir.join("cgroup").join(path.trim_start_matches('/'))
    }

    /// Makes a cgroup that has a little memory.
    pub(crate) fn cgroup(&self, path: &str) -> io::Result<()> {
        let dir = self.cgroup_dir(path);
        testing::cgroup(&dir, &self.machine);
        fs::write(dir.join("memory.numa_stat"), "anon N0=4096\nfile N0=4096\nkernel_stack N0=4096\n")?;
        fs::write(dir.join("memory.events"), "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")
    }

    /// What the kernel does when a knob was written.
    pub(crate) fn obey(&self, path: &str) -> io::Result<()> {
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

    /// Starts a daemon here.
    pub(crate) async fn start(&self, runtime: Option<&Path>) -> io::Result<Whole> {
        let mut config = Config {
            host_root: self.dir.clone(),
            state_directory: self.dir.join("state"),
            ..Config::default()
        };
        config.probes.allocation.enabled = false;
        // The CPUs of the host that this runs on: the daemon keeps off those that it promises.
        let own = std::thread::available_parallelism().map_or(1, usize::from);
        let own = format!("0-{}", own - 1).parse().map_err(io::Error::other)?;
        config.reserved_system_cpus = Some(CpuList(own));
        if runtime.is_some() {
            // Pods come and go as fast as they can.
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
        let ports = Ports { heartbeats: heartbeats.clone(), ..Ports::from_part(&observer) };
        let enforcer = testing::enforcer(&root, &observer.machine(), None);
        // Without the privilege, knobs are looked at all the time.
        let watch = KnobWatch::new(&root).ok();
        let hierarchy = Hierarchy::at(&root);
        let started = testing::start(&config, hierarchy, enforcer, ports, figures, watch, stop.clone());
        let (reconciler, thread) = started.map_err(io::Error::other)?;
        threads.push(thread);
        let control = socket::listen(&self.socket(), "controlSocket").map_err(io::Error::other)?;
        let router = allocations::control_router(app.clone(), reconciler.clone());
        tokio::spawn(serve(ControlListener::new(control)?, router, stop.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let names = HostNames::new(&[]);
        let router = allocations::router(app, Some(reconciler.view()), None, names);
        tokio::spawn(serve(FromAnywhere(listener), router, stop.clone()));
        if let Some(runtime) = runtime {
            config.kubernetes.nri.enabled = true;
            config.kubernetes.nri.socket = runtime.to_owned();
            let ports = observer.clone();
            let counted = (placing, nri::Refusals::new(&config.kubernetes));
            let plugin = nri::plugin(&config, reconciler, ports, Arc::new(NoPods), counted, &stop);
            tokio::spawn(plugin.run(stop.clone()));
        }
        Ok(Whole { address, stop, threads })
    }
}

/// A daemon that runs. Dropped, it ends.
pub(crate) struct Whole {
    pub(crate) address: SocketAddr,
    stop: CancellationToken,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Whole {
    fn drop(&mut self) {
        self.stop.cancel();
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // What it panicked of is in the output.
            let _ = thread.join();
        }
    }
}

/// A daemon in a process of its own: this program, started again.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Process {
    /// Starts it at a place that is made, with the socket of a container runtime if it has one.
    pub(crate) fn start(dir: &Path, runtime: Option<&Path>) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(SERVE).arg(dir).args(runtime).stdin(Stdio::piped()).stdout(Stdio::piped());
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

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SERVE: &str = "--serve";

/// Is the daemon, where this program was started as one, until its input ends.
pub(crate) fn serve_if_asked() -> bool {
    let mut arguments = std::env::args_os().skip_while(|argument| argument != SERVE).skip(1);
    let Some(dir) = arguments.next() else { return false };
    let runtime = arguments.next().map(PathBuf::from);
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    tokio.block_on(async {
        let machine = numaward_topology::sysfs::read(Path::new(&dir)).unwrap();
        let place = Place { dir: dir.into(), machine };
        let daemon = place.start(runtime.as_deref()).await.unwrap();
        println!("{}", daemon.address);
        let input = tokio::task::spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink()));
        // The benchmark has ended.
        let _ = input.await;
    });
    true
}

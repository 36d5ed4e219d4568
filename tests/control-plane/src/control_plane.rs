//! The control plane runs as processes of this host, because emulation would take minutes. All its ports are on the loopback
//! interface, and its processes end with the test, even if the test is killed.

use std::{
    cell::RefCell,
    ffi::OsStr,
    fs::{self, File},
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::authority::{Authority, CA, certificate, key, kubeconfig};

/// Address of the API server for pods and the kubelet: the first address of the service network.
pub const SERVICE_ADDRESS: &str = "10.0.2.1";
/// The service network is the network of the machine, so neither kube-proxy nor iptables is needed.
const SERVICES: &str = "10.0.2.0/24";
/// An unused address: the API server requires one.
const ADVERTISED: &str = "10.0.2.99";

/// A running program with its output in a file. Dropping the value kills the program.
struct Process {
    name: String,
    child: RefCell<Child>,
}

impl Process {
    fn start<A: AsRef<OsStr>>(program: &Path, arguments: &[A], log: &Path) -> Self {
        let log = File::options().create(true).append(true).open(log).unwrap();
        // The kernel kills the program when the thread of this process that started it ends.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        let child = child.unwrap_or_else(|error| panic!("setpriv (Debian package util-linux): {error}"));
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { name, child: RefCell::new(child) }
    }

    fn has_ended(&self) -> bool {
        !matches!(self.child.borrow_mut().try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let child = self.child.get_mut();
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// etcd, the API server, the controller manager and the scheduler.
pub struct ControlPlane {
    folder: PathBuf,
    /// Folder of the programs.
    programs: PathBuf,
    port: u16,
    etcd_url: String,
    api_server: Option<Process>,
    others: Vec<Process>,
}

/// The programs of the control plane.
pub const PROGRAMS: [&str; 3] = ["kube-apiserver", "kube-controller-manager", "kube-scheduler"];
/// The program of a node.
pub const KUBELET: &str = "kubelet";

/// Links or unpacks programs of a release; each is a plain file or has the suffix `.xz`.
pub fn unpack<'a>(release: &Path, into: &Path, programs: impl IntoIterator<Item = &'a str>) {
    for name in programs {
        let (plain, packed) = (release.join(name), release.join(format!("{name}.xz")));
        let made = into.join(name);
        if plain.is_file() {
            std::os::unix::fs::symlink(fs::canonicalize(plain).unwrap(), made).unwrap();
            continue;
        }
        assert!(packed.is_file(), "{} has neither {name} nor {name}.xz", release.display());
        let out = File::create(&made).unwrap();
        let status = Command::new("xz").args(["--decompress", "--stdout"]).arg(&packed).stdout(out).status();
        let status = status.unwrap_or_else(|error| panic!("xz (Debian package xz-utils): {error}"));
        assert!(status.success(), "{}: xz: {status}", packed.display());
        fs::set_permissions(&made, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
}

/// Returns ports of this host that are free at the moment.
pub fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

impl ControlPlane {
    /// Starts etcd, and the API server from the folder `programs`. All files go into `folder`, with the certificates.
    pub fn start(programs: &Path, etcd: &Path, folder: &Path, authority: &Authority) -> Self {
        let hosts = ["kubernetes.default.svc", "localhost", "127.0.0.1", SERVICE_ADDRESS];
        authority.sign("apiserver", "kube-apiserver", None, &hosts);
        authority.sign("admin", "admin", Some("system:masters"), &[]);
        authority.sign("controller-manager", "system:kube-controller-manager", None, &[]);
        authority.sign("scheduler", "system:kube-scheduler", None, &[]);
        authority.key_pair("service-accounts");

        let [port, etcd_port, etcd_peers] = free_ports();
        let [etcd_url, peers_url] = [etcd_port, etcd_peers].map(|port| format!("http://127.0.0.1:{port}"));
        let etcd = Process::start(
            etcd,
            &[
                // The data need not outlive the host.
                "--unsafe-no-fsync".to_owned(),
                format!("--data-dir={}", folder.join("etcd").display()),
                format!("--listen-client-urls={etcd_url}"),
                format!("--advertise-client-urls={etcd_url}"),
                format!("--listen-peer-urls={peers_url}"),
                format!("--initial-advertise-peer-urls={peers_url}"),
                format!("--initial-cluster=default={peers_url}"),
            ],
            &folder.join("etcd.log"),
        );
        let mut plane = Self {
            folder: folder.to_owned(),
            programs: programs.to_owned(),
            port,
            etcd_url,
            api_server: None,
            others: vec![etcd],
        };
        for user in ["admin", "controller-manager", "scheduler"] {
            let config = kubeconfig(&plane.url(), &folder.display().to_string(), user);
            fs::write(plane.kubeconfig(user), config.to_string()).unwrap();
        }
        plane.start_api_server();
        plane
    }

    /// Starts the controller manager and the scheduler. The API server has to be ready.
    pub fn complete(&mut self) {
        self.complete_with(&[], &[]);
    }

    /// Starts both with additional arguments, of which the last one of each name counts.
    pub fn complete_with(&mut self, of_manager: &[String], of_scheduler: &[String]) {
        let arguments = [
            format!("--root-ca-file={}", self.file(CA)),
            format!("--service-account-private-key-file={}", self.file(&key("service-accounts"))),
            "--use-service-account-credentials".to_owned(),
            // A node under emulation, or with a restarting kubelet, is slow, but it is not lost.
            "--node-monitor-grace-period=10m".to_owned(),
        ];
        let manager = self.start_client("controller-manager", &[&arguments, of_manager].concat());
        let scheduler = self.start_client("scheduler", of_scheduler);
        self.others.extend([manager, scheduler]);
    }

    /// Returns the name of a part that ended unexpectedly.
    pub fn ended(&self) -> Option<&str> {
        let mut parts = self.others.iter().chain(&self.api_server);
        parts.find(|part| part.has_ended()).map(|part| part.name.as_str())
    }

    /// Returns the port of the API server on the loopback interface.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the path of a user's kubeconfig.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.folder.join(format!("{user}.kubeconfig"))
    }

    /// Starts the API server: the first time, or again after [`Self::stop_api_server`].
    pub fn start_api_server(&mut self) {
        let [public, private] = [certificate, key].map(|half| self.file(&half("service-accounts")));
        let arguments = [
            format!("--secure-port={}", self.port),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--advertise-address={ADVERTISED}"),
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--service-cluster-ip-range={SERVICES}"),
            format!("--etcd-servers={}", self.etcd_url),
            format!("--cert-dir={}", self.file("apiserver-certificates")),
            format!("--client-ca-file={}", self.file(CA)),
            format!("--tls-cert-file={}", self.file(&certificate("apiserver"))),
            format!("--tls-private-key-file={}", self.file(&key("apiserver"))),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={public}"),
            format!("--service-account-signing-key-file={private}"),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
        ];
        let log = self.folder.join("apiserver.log");
        self.api_server = Some(Process::start(&self.programs.join("kube-apiserver"), &arguments, &log));
    }

    /// Kills the API server.
    pub fn stop_api_server(&mut self) {
        self.api_server = None;
    }

    fn start_client(&self, user: &str, more: &[String]) -> Process {
        let mut arguments = vec![
            format!("--kubeconfig={}", self.kubeconfig(user).display()),
            "--leader-elect=false".to_owned(),
            // The port is not used.
            "--secure-port=0".to_owned(),
        ];
        arguments.extend_from_slice(more);
        let log = self.folder.join(format!("{user}.log"));
        Process::start(&self.programs.join(format!("kube-{user}")), &arguments, &log)
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn file(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

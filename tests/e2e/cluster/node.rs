//! The only node of the cluster: a machine with two NUMA nodes that runs containerd and the kubelet, and executes scripts that it
//! receives over a port.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    thread::{self, JoinHandle},
    time::Duration,
};

use numaward_control_plane::{
    authority::{Authority, CA, certificate, key, kubeconfig},
    control_plane::{KUBELET, SERVICE_ADDRESS, free_ports},
};
use numaward_tests::{TestEnvironment, with_prelude};
use numaward_vm::{Error, Forward, Stopper, Vm};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    containerd::{self, Driver, V2, full},
    deploy::VERSION,
};

/// Name of the node in the cluster.
pub(super) const NAME: &str = "node-1";
const ADDRESS: &str = "10.0.2.15";
/// Kernel modules for the pod network, in loading order.
const MODULES: [&str; 4] = ["llc", "stp", "bridge", "veth"];
/// CNI plugins of the pod network.
const PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];
/// Port in the machine that receives scripts.
const COMMANDS: u16 = 7000;
/// Read timeout of a script. Most take a second or two.
const SCRIPT_TIMEOUT: Duration = Duration::from_mins(5);
/// Run time limit of the machine, for all steps under emulation on a busy host.
const RUN_TIMEOUT: Duration = Duration::from_hours(2);
/// Folder in the machine.
const CONFIGURATION: &str = "/etc/kubernetes";

/// File name of the sparse disk image.
pub(super) const DISK: &str = "disk";
const DISK_BYTES: u64 = 6 << 30;

/// A server of the PodResources API.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reader {
    Numaward,
    Kubelet,
}

impl Reader {
    /// Returns the relay's port in the machine.
    pub(super) fn port(self) -> u16 {
        match self {
            Self::Numaward => COMMANDS + 1,
            Self::Kubelet => COMMANDS + 2,
        }
    }
}

/// A running node. Dropping the value stops its machine.
pub(super) struct Node {
    vm: Vm,
    script: String,
    log: File,
    port: u16,
    /// Ports on this host, one for each [`Reader`].
    relays: [u16; 2],
    machine: Option<Machine>,
    _files: TempDir,
}

/// A running machine, and the thread that reads the output of its script.
struct Machine {
    stopper: Stopper,
    output: JoinHandle<Result<u8, Error>>,
}

/// Files of this host that are copied into the machine.
pub(super) struct NodeFiles<'a> {
    pub(super) kubelet: &'a Path,
    /// Folder of the CNI plugins.
    pub(super) cni: &'a Path,
    /// Other files, with their paths in the machine.
    pub(super) more: Vec<(PathBuf, &'static str)>,
}

impl Node {
    /// Starts this machine with these files, connected to the API server on a port of this host. Writes `node.log` into `folder`, in which the authority puts the certificates. If containerd is missing, prints
    /// the reason and returns `None`.
    pub(super) fn start(
        bench: &TestEnvironment,
        machine: numaward_vm::GuestTopology,
        files: NodeFiles<'_>,
        folder: &Path,
        authority: &Authority,
        api_server: u16,
    ) -> Option<Self> {
        let (vm, runtime_files) = containerd::machine(bench, machine, &V2, Driver::Cgroupfs)?;
        let [port, relays @ ..] = free_ports::<3>();
        let user = format!("system:node:{NAME}");
        authority.sign(KUBELET, &user, Some("system:nodes"), &[NAME, ADDRESS]);
        let mut vm = vm
            .limit(RUN_TIMEOUT)
            .file(bench.made(&format!("numaward-{VERSION}-oci.tar")), "/numaward.tar")
            .file(files.kubelet, "/usr/bin/kubelet")
            .forward(Forward { host: port, guest: COMMANDS })
            .reach_at(SERVICE_ADDRESS, Forward { host: api_server, guest: 443 });
        for (host, reader) in relays.into_iter().zip([Reader::Numaward, Reader::Kubelet]) {
            vm = vm.forward(Forward { host, guest: reader.port() });
        }
        for module in MODULES {
            vm = vm.module(module);
        }
        for plugin in PLUGINS {
            vm = vm.file(files.cni.join(plugin), format!("/usr/lib/cni/{plugin}"));
        }
        for (file, path) in files.more {
            vm = vm.file(file, path);
        }
        let disk = folder.join(DISK);
        File::create(&disk).and_then(|disk| disk.set_len(DISK_BYTES)).unwrap();
        let vm = configured(vm, folder).disk(disk);
        let node = format!("COMMANDS={COMMANDS}\n{}", include_str!("node.sh"));
        let script = format!("{}\n{}", include_str!("disk.sh"), full(&V2, Driver::Cgroupfs, &node));
        let log = File::create(folder.join("node.log")).unwrap();
        let script = with_prelude(&script);
        let mut node = Self { vm, script, log, port, relays, machine: None, _files: runtime_files };
        node.boot();
        Some(node)
    }

    fn boot(&mut self) {
        let running = self.vm.start(&self.script).unwrap_or_else(|error| panic!("{error}"));
        let mut log = self.log.try_clone().unwrap();
        let stopper = running.stopper();
        let output = thread::spawn(move || running.finish(&mut log));
        self.machine = Some(Machine { stopper, output });
    }

    fn stop(&mut self) {
        if let Some(machine) = self.machine.take() {
            machine.stopper.stop();
            let _ = machine.output.join();
        }
    }

    /// Remounts the disk read-only, cuts the power of the machine, and starts it again.
    pub(super) fn reboot(&mut self) {
        let is_done = "grep -q '^/dev/vda .* ext4 ro' /proc/mounts";
        let halt = format!("sync; echo u >/proc/sysrq-trigger; until {is_done}; do sleep 0.1; done");
        self.run(&halt).unwrap();
        self.stop();
        self.boot();
    }

    /// Runs a script in the machine and returns its output. Returns an error also if the machine has not started far enough.
    pub(super) fn run(&self, script: &str) -> Result<String, String> {
        const END: &str = "\n=== exit ";
        let error = |error: std::io::Error| format!("the node does not answer: {error}");
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).map_err(error)?;
        stream.set_read_timeout(Some(SCRIPT_TIMEOUT)).map_err(error)?;
        let script = format!("(\n{script}\n) </dev/null 2>&1\nprintf '\\n=== exit %s\\n' $?\nexit\n");
        stream.write_all(script.as_bytes()).map_err(error)?;
        let mut output = String::new();
        stream.read_to_string(&mut output).map_err(error)?;
        match output.rsplit_once(END) {
            Some((text, "0\n")) => Ok(text.trim_end().to_owned()),
            Some((text, code)) => {
                Err(format!("{}: the script ended with {}", text.trim_end(), code.trim_end()))
            }
            None => Err(format!("the node does not answer: {output:?}")),
        }
    }

    /// Returns the relay's address on this host.
    pub(super) fn address(&self, reader: Reader) -> String {
        format!("127.0.0.1:{}", self.relays[reader as usize])
    }

    /// Returns the CPU time that the machine has used so far.
    pub(super) fn cpu_time(&self) -> Duration {
        let ticks = || -> Option<u64> {
            let supervisor = self.machine.as_ref()?.stopper.pid();
            let children =
                fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
            let stat = fs::read_to_string(format!("/proc/{}/stat", children.split(' ').next()?)).ok()?;
            // The name before the parenthesis may contain spaces (proc(5)).
            let (_, fields) = stat.rsplit_once(") ")?;
            fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().ok()).sum()
        };
        Duration::from_millis(ticks().unwrap_or(0) * 10)
    }

    /// Returns true if the machine or its script has ended.
    pub(super) fn ended(&self) -> bool {
        self.machine.as_ref().is_none_or(|machine| machine.output.is_finished())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}

fn inside(name: &str) -> String {
    format!("{CONFIGURATION}/{name}")
}

/// Returns the kubelet's configuration with these changes.
pub(super) fn kubelet_configuration(change: &Value) -> Value {
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": inside(CA) },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": inside(&certificate(KUBELET)),
        "tlsPrivateKeyFile": inside(&key(KUBELET)),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "failSwapOn": false,
        // The root file system is in memory.
        "localStorageCapacityIsolation": false,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": { "memory.available": "64Mi" },
        "makeIPTablesUtilChains": false,
        "hairpinMode": "none",
        "resolvConf": "",
        // The emulated machine is slow.
        "runtimeRequestTimeout": "10m",
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "maxPods": 130,
    });
    for (field, value) in change.as_object().into_iter().flatten() {
        config[field] = value.clone();
    }
    config
}

/// Adds the kubelet's configuration and certificates to the machine.
fn configured(vm: Vm, folder: &Path) -> Vm {
    let kubelet = kubeconfig(&format!("https://{SERVICE_ADDRESS}"), CONFIGURATION, KUBELET);
    let write = |name: &str, text: String| -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    // JSON is valid YAML.
    let mut vm = vm
        .file(write("kubelet.yaml", kubelet_configuration(&Value::Null).to_string()), inside("kubelet.yaml"))
        .file(write("kubelet.conf", kubelet.to_string()), inside("kubelet.conf"));
    for name in [CA, &certificate(KUBELET), &key(KUBELET)] {
        vm = vm.file(folder.join(name), inside(name));
    }
    vm
}

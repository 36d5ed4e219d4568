//! The one node: a machine with two NUMA nodes that runs containerd and the kubelet, and whatever script it is sent.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    thread::{self, JoinHandle},
    time::Duration,
};

use numaward_tests::{TestEnvironment, with_prelude};
use numaward_vm::{Error, Forward, Stopper, Vm};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    authority::{Authority, CA, certificate, key, kubeconfig},
    control_plane::{KUBELET, SERVICE_ADDRESS, free_ports},
};
use crate::{
    containerd::{self, Driver, V2, full},
    deploy::VERSION,
};

/// The name that it has in the cluster.
pub(super) const NAME: &str = "node-1";
const ADDRESS: &str = "10.0.2.15";
/// For the network of its pods, in the order in which they are loaded.
const MODULES: [&str; 4] = ["llc", "stp", "bridge", "veth"];
/// Plugins for the network of its pods.
const PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];
/// Where commands arrive inside.
const COMMANDS: u16 = 7000;
/// A command takes a second or two.
const PATIENCE: Duration = Duration::from_mins(5);
/// All steps together, under emulation on a host with other things to do.
const LIMIT: Duration = Duration::from_hours(2);
/// In the machine.
const CONFIGURATION: &str = "/etc/kubernetes";

/// The file of its disk, which takes of this host what is written.
pub(super) const DISK: &str = "disk";
const DISK_BYTES: u64 = 6 << 30;

/// Whose PodResources API is read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reader {
    Numaward,
    Kubelet,
}

impl Reader {
    /// Where a relay inside is reached.
    pub(super) fn port(self) -> u16 {
        match self {
            Self::Numaward => COMMANDS + 1,
            Self::Kubelet => COMMANDS + 2,
        }
    }
}

/// A node that runs; its machine is stopped when the value is dropped.
pub(super) struct Node {
    vm: Vm,
    script: String,
    log: File,
    port: u16,
    /// Of this host, for each [`Reader`].
    relays: [u16; 2],
    machine: Option<Machine>,
    _files: TempDir,
}

/// A machine that runs, and the thread that takes what its script prints.
struct Machine {
    stopper: Stopper,
    output: JoinHandle<Result<u8, Error>>,
}

impl Node {
    /// This machine with the kubelet and with the plugins `cni`, for the API server on a port of this host; it writes `node.log` into the folder, where the authority signs. None, after saying why, where there is no containerd.
    pub(super) fn start(
        bench: &TestEnvironment,
        machine: numaward_vm::GuestTopology,
        kubelet: &Path,
        cni: &Path,
        folder: &Path,
        authority: &Authority,
        api_server: u16,
    ) -> Option<Self> {
        let (vm, files) = containerd::machine(bench, machine, &V2, Driver::Cgroupfs)?;
        let [port, relays @ ..] = free_ports::<3>();
        let user = format!("system:node:{NAME}");
        authority.sign(KUBELET, &user, Some("system:nodes"), &[NAME, ADDRESS]);
        let mut vm = vm
            .limit(LIMIT)
            .file(bench.made(&format!("numaward-{VERSION}-oci.tar")), "/numaward.tar")
            .file(kubelet, "/usr/bin/kubelet")
            .forward(Forward { host: port, guest: COMMANDS })
            .reach_at(SERVICE_ADDRESS, Forward { host: api_server, guest: 443 });
        for (host, reader) in relays.into_iter().zip([Reader::Numaward, Reader::Kubelet]) {
            vm = vm.forward(Forward { host, guest: reader.port() });
        }
        for module in MODULES {
            vm = vm.module(module);
        }
        for plugin in PLUGINS {
            vm = vm.file(cni.join(plugin), format!("/usr/lib/cni/{plugin}"));
        }
        let disk = folder.join(DISK);
        File::create(&disk).and_then(|disk| disk.set_len(DISK_BYTES)).unwrap();
        let vm = configured(vm, folder).disk(disk);
        let node = format!("COMMANDS={COMMANDS}\n{}", include_str!("node.sh"));
        let script = format!("{}\n{}", include_str!("disk.sh"), full(&V2, Driver::Cgroupfs, &node));
        let log = File::create(folder.join("node.log")).unwrap();
        let script = with_prelude(&script);
        let mut node = Self { vm, script, log, port, relays, machine: None, _files: files };
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

    /// Cuts the power of the machine once its disk is written, and starts it again.
    pub(super) fn reboot(&mut self) {
        let is_done = "grep -q '^/dev/vda .* ext4 ro' /proc/mounts";
        let halt = format!("sync; echo u >/proc/sysrq-trigger; until {is_done}; do sleep 0.1; done");
        self.run(&halt).unwrap();
        self.stop();
        self.boot();
    }

    /// What a script prints inside; an error also where the machine has not come so far.
    pub(super) fn run(&self, script: &str) -> Result<String, String> {
        const END: &str = "\n=== exit ";
        let error = |error: std::io::Error| format!("the node does not answer: {error}");
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).map_err(error)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(error)?;
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

    /// Where a client on this host reaches a relay inside.
    pub(super) fn address(&self, reader: Reader) -> String {
        format!("127.0.0.1:{}", self.relays[reader as usize])
    }

    /// Whether the machine, or its script, has come to an end.
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

/// What the kubelet is started with, but for these fields.
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
        // The root file system is memory.
        "localStorageCapacityIsolation": false,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": { "memory.available": "64Mi" },
        "makeIPTablesUtilChains": false,
        "hairpinMode": "none",
        "resolvConf": "",
        // As slow as the machine is.
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

/// A machine with the files of a kubelet, of which some are in this folder.
fn configured(vm: Vm, folder: &Path) -> Vm {
    let kubelet = kubeconfig(&format!("https://{SERVICE_ADDRESS}"), CONFIGURATION, KUBELET);
    let write = |name: &str, text: String| -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    // YAML holds JSON.
    let mut vm = vm
        .file(write("kubelet.yaml", kubelet_configuration(&Value::Null).to_string()), inside("kubelet.yaml"))
        .file(write("kubelet.conf", kubelet.to_string()), inside("kubelet.conf"));
    for name in [CA, &certificate(KUBELET), &key(KUBELET)] {
        vm = vm.file(folder.join(name), inside(name));
    }
    vm
}

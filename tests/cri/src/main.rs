//! numaward-cri: asks a container runtime for pods and containers as the kubelet does.
//!
//! Whether containers are placed can only be seen with a real runtime, and only the kubelet and the like speak CRI.
//! This speaks the little of it that the end-to-end tests need: it runs, changes, stops and removes pods and
//! containers with the resources that the kubelet would make of their requests and limits. What it made it prints:
//! ids. What the runtime says to a request that it refuses goes to standard error. It also reads the PodResources API, gives
//! the kubelet devices, plays the API server, and lets clients outside the machine reach unix sockets in it.

#![forbid(unsafe_code)]

mod api_server;
mod daemon_set;
mod device_plugin;
mod grpc;
mod messages;
mod pod_resources;
mod relay;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand, ValueEnum};

use self::{
    grpc::{CallError, Client},
    messages::{
        ContainerConfig, ContainerCreated, ContainerId, ContainerMetadata, ContainerResources,
        CreateContainer, Empty, ImageSpec, LinuxContainer, LinuxSandbox, NamespaceOptions, Sandbox,
        SandboxConfig, SandboxId, SandboxMetadata, SandboxSecurity, StopContainer, UpdateResources,
    },
};

/// The period in which CPU quotas count, in microseconds.
const PERIOD: i64 = 100_000;
/// CPU shares that stand for one CPU.
const SHARES_PER_CPU: i64 = 1024;
/// The least shares there are.
const LEAST_SHARES: i64 = 2;

#[derive(Parser)]
#[command(
    name = "numaward-cri",
    about = "Asks a container runtime for pods and containers as the kubelet does"
)]
struct Arguments {
    /// The runtime's socket
    #[arg(long, default_value = "/run/containerd/containerd.sock")]
    socket: PathBuf,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs a pod's sandbox; prints its id
    Pod(Pod),
    /// Creates a container in a pod; prints its id
    Create(Create),
    /// Runs a pod of a `DaemonSet`, as its manifest demands; prints the ids of sandbox and container
    RunDaemonSet(daemon_set::Run),
    /// Starts a container
    Start {
        /// The container's id
        id: String,
    },
    /// Stops a container and removes it
    Remove {
        /// The container's id
        id: String,
    },
    /// Stops a pod and removes it
    RemovePod {
        /// The sandbox's id
        id: String,
    },
    /// Lists, as JSON, what containers are assigned: asks the PodResources API at the socket
    Assigned,
    /// Plays the API server
    ApiServer(api_server::Server),
    /// Gives the kubelet devices
    DevicePlugin(device_plugin::Plugin),
    /// Leads a TCP port to a unix socket
    Relay(relay::Relay),
    /// Changes a container's resources
    Resize {
        /// The container's id
        id: String,
        #[command(flatten)]
        resources: Resources,
    },
}

/// A pod's class of service, which decides where its cgroup is.
#[derive(Clone, Copy, ValueEnum)]
enum Class {
    Guaranteed,
    Burstable,
    Besteffort,
}

/// Who makes cgroups, which decides how they are named.
#[derive(Clone, Copy, ValueEnum)]
enum Driver {
    Cgroupfs,
    Systemd,
}

#[derive(Args)]
struct Pod {
    /// Its name, which is its UID too
    name: String,
    /// Its namespace
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Its class of service
    #[arg(long, value_enum, default_value = "guaranteed")]
    class: Class,
    /// The cgroup driver
    #[arg(long, value_enum, default_value = "cgroupfs")]
    driver: Driver,
    /// An annotation, `KEY=VALUE`
    #[arg(long, value_parser = annotation)]
    annotation: Vec<(String, String)>,
}

#[derive(Args)]
struct Create {
    /// Its pod's sandbox
    sandbox: String,
    #[command(flatten)]
    pod: Pod,
    /// The container's name
    #[arg(long, default_value = "main")]
    container: String,
    #[command(flatten)]
    resources: Resources,
    /// The image
    #[arg(long, default_value = "localhost/test:1")]
    image: String,
    /// What it runs
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

#[derive(Args)]
struct Resources {
    /// CPUs, in thousandths
    #[arg(long, default_value_t = 0)]
    millicpus: i64,
    /// Whether the CPUs are only requested, not a limit
    #[arg(long)]
    unlimited: bool,
    /// The memory limit in MiB; 0: none
    #[arg(long, default_value_t = 0)]
    mebibytes: i64,
}

fn annotation(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

impl Pod {
    fn config(&self) -> SandboxConfig {
        let class = match self.class {
            Class::Guaranteed => None,
            Class::Burstable => Some("burstable"),
            Class::Besteffort => Some("besteffort"),
        };
        let cgroup_parent = match (self.driver, class) {
            (Driver::Cgroupfs, None) => format!("/kubepods/pod{}", self.name),
            (Driver::Cgroupfs, Some(class)) => format!("/kubepods/{class}/pod{}", self.name),
            (Driver::Systemd, None) => format!("/kubepods.slice/kubepods-pod{}.slice", self.name),
            (Driver::Systemd, Some(class)) => {
                let slice = format!("kubepods-{class}");
                format!("/kubepods.slice/{slice}.slice/{slice}-pod{}.slice", self.name)
            }
        };
        SandboxConfig {
            metadata: Some(SandboxMetadata {
                name: self.name.clone(),
                uid: self.name.clone(),
                namespace: self.namespace.clone(),
                attempt: 0,
            }),
            log_directory: format!("/var/log/pods/{}", self.name),
            annotations: self.annotation.iter().cloned().collect(),
            linux: Some(LinuxSandbox {
                cgroup_parent,
                // With the host's network no network plugin is needed.
                security_context: Some(SandboxSecurity {
                    namespace_options: Some(NamespaceOptions {
                        network: messages::NODE,
                        pid: messages::CONTAINER,
                        ipc: messages::POD,
                    }),
                }),
            }),
        }
    }
}

impl Resources {
    fn message(&self) -> ContainerResources {
        ContainerResources {
            cpu_period: if self.unlimited { 0 } else { PERIOD },
            cpu_quota: if self.unlimited { 0 } else { self.millicpus * PERIOD / 1000 },
            cpu_shares: (self.millicpus * SHARES_PER_CPU / 1000).max(LEAST_SHARES),
            memory_limit_in_bytes: self.mebibytes << 20,
            oom_score_adj: 0,
        }
    }
}

impl Create {
    fn request(&self) -> CreateContainer {
        CreateContainer {
            pod_sandbox_id: self.sandbox.clone(),
            config: Some(ContainerConfig {
                metadata: Some(ContainerMetadata { name: self.container.clone(), attempt: 0 }),
                image: Some(ImageSpec { image: self.image.clone() }),
                command: self.command.clone(),
                args: Vec::new(),
                envs: Vec::new(),
                mounts: Vec::new(),
                log_path: format!("{}.log", self.container),
                linux: Some(LinuxContainer {
                    resources: Some(self.resources.message()),
                    security_context: None,
                }),
            }),
            sandbox_config: Some(self.pod.config()),
        }
    }
}

async fn run(arguments: Arguments) -> Result<(), CallError> {
    match &arguments.task {
        Task::ApiServer(server) => return api_server::run(server).await,
        Task::DevicePlugin(plugin) => return device_plugin::run(plugin).await,
        Task::Relay(relay) => return relay::run(relay).await,
        _ => {}
    }
    let mut client = Client::connect(&arguments.socket).await?;
    match arguments.task {
        // None of them asks the runtime.
        Task::ApiServer(_) | Task::DevicePlugin(_) | Task::Relay(_) => {}
        Task::Pod(pod) => {
            let request = Sandbox { config: Some(pod.config()) };
            let made: SandboxId = client.call("RunPodSandbox", request).await?;
            println!("{}", made.pod_sandbox_id);
        }
        Task::Create(create) => {
            let made: ContainerCreated = client.call("CreateContainer", create.request()).await?;
            println!("{}", made.container_id);
        }
        Task::RunDaemonSet(run) => {
            let (pod, container) = run.configs().map_err(CallError::Manifest)?;
            let request = Sandbox { config: Some(pod.clone()) };
            let made: SandboxId = client.call("RunPodSandbox", request).await?;
            let sandbox = made.pod_sandbox_id;
            let request = CreateContainer {
                pod_sandbox_id: sandbox.clone(),
                config: Some(container),
                sandbox_config: Some(pod),
            };
            let made: ContainerCreated = client.call("CreateContainer", request).await?;
            let id = made.container_id;
            let _: Empty = client.call("StartContainer", ContainerId { container_id: id.clone() }).await?;
            println!("{sandbox} {id}");
        }
        Task::Start { id } => {
            let _: Empty = client.call("StartContainer", ContainerId { container_id: id }).await?;
        }
        Task::Remove { id } => {
            let stop = StopContainer { container_id: id.clone(), timeout: 0 };
            let _: Empty = client.call("StopContainer", stop).await?;
            let _: Empty = client.call("RemoveContainer", ContainerId { container_id: id }).await?;
        }
        Task::RemovePod { id } => {
            let sandbox = SandboxId { pod_sandbox_id: id };
            let _: Empty = client.call("StopPodSandbox", sandbox.clone()).await?;
            let _: Empty = client.call("RemovePodSandbox", sandbox).await?;
        }
        Task::Assigned => println!("{}", pod_resources::list(&mut client).await?),
        Task::Resize { id, resources } => {
            let request = UpdateResources { container_id: id, linux: Some(resources.message()) };
            let _: Empty = client.call("UpdateContainerResources", request).await?;
        }
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_those_of_the_kubelet() {
        let resources = |line: &str| match Arguments::parse_from(line.split(' ')).task {
            Task::Resize { resources, .. } => resources.message(),
            _ => panic!("{line}"),
        };
        let guaranteed = resources("cri resize id --millicpus 1500 --mebibytes 64");
        assert_eq!(
            (guaranteed.cpu_quota, guaranteed.cpu_period, guaranteed.cpu_shares),
            (150_000, 100_000, 1536)
        );
        assert_eq!(guaranteed.memory_limit_in_bytes, 64 << 20);
        let burstable = resources("cri resize id --millicpus 250 --unlimited");
        assert_eq!((burstable.cpu_quota, burstable.cpu_period, burstable.cpu_shares), (0, 0, 256));
        assert_eq!(resources("cri resize id --unlimited").cpu_shares, 2);
    }

    #[test]
    fn a_pods_cgroup_tells_its_class() {
        let line = "cri create sandbox web --class burstable --annotation a/b=c --container x -- sleep 1";
        let Task::Create(create) = Arguments::parse_from(line.split(' ')).task else { panic!("{line}") };
        assert_eq!(create.request().config.unwrap().command, ["sleep", "1"]);
        let sandbox = create.pod.config();
        assert_eq!(sandbox.linux.unwrap().cgroup_parent, "/kubepods/burstable/podweb");
        assert_eq!(sandbox.annotations["a/b"], "c");
        for (line, parent) in [
            ("cri pod web --driver systemd", "/kubepods.slice/kubepods-podweb.slice"),
            (
                "cri pod web --class besteffort --driver systemd",
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podweb.slice",
            ),
            ("cri pod web", "/kubepods/podweb"),
        ] {
            let Task::Pod(pod) = Arguments::parse_from(line.split(' ')).task else { panic!("{line}") };
            assert_eq!(pod.config().linux.unwrap().cgroup_parent, parent);
        }
        assert!(Arguments::try_parse_from(["cri", "pod", "web", "--annotation", "x"]).is_err());
    }
}

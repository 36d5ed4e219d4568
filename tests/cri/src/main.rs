//! `numaward-cri` requests pods and containers from a container runtime as the kubelet does.
//!
//! The placement of containers can only be tested with a real runtime, and CRI is spoken only by the kubelet and similar programs. This
//! program implements the part of CRI that the end-to-end tests need: it runs, changes, stops and removes pods and containers with the
//! resources that the kubelet would compute from requests and limits. It prints the ids of created objects, and writes the runtime's refusals
//! to standard error. It also reads the PodResources API, offers fake devices to the kubelet (by a device plugin, or by a DRA driver), serves
//! as a fake API server, and forwards TCP connections to unix sockets.

#![forbid(unsafe_code)]

mod api_server;
mod daemon_set;
mod device_plugin;
mod dra_driver;
mod grpc;
mod messages;
mod pod_resources;
mod relay;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand, ValueEnum};

use self::{
    grpc::{CallError, GrpcClient},
    messages::{
        ContainerConfig, ContainerCreated, ContainerId, ContainerMetadata, ContainerResources,
        ContainerSecurity, CreateContainer, Empty, ImagePulled, ImageSpec, LinuxContainer, LinuxSandbox,
        NamespaceOptions, PullImage, RuntimeVersion, Sandbox, SandboxConfig, SandboxId, SandboxMetadata,
        SandboxSecurity, StopContainer, UpdateResources, VersionQuery,
    },
};

const IMAGES: &str = "runtime.v1.ImageService";
/// Namespaces of pods and containers. With the host's network, no network plugin is needed.
const NAMESPACES: NamespaceOptions =
    NamespaceOptions { network: messages::NODE, pid: messages::CONTAINER, ipc: messages::POD };
/// Period of CPU quotas, in microseconds.
const PERIOD: i64 = 100_000;
/// CPU shares of one CPU.
const SHARES_PER_CPU: i64 = 1024;
/// Minimum of CPU shares.
const MIN_SHARES: i64 = 2;

#[derive(Parser)]
#[command(
    name = "numaward-cri",
    about = "Asks a container runtime for pods and containers as the kubelet does"
)]
struct CriArguments {
    /// The runtime's socket
    #[arg(long, env = "CONTAINER_RUNTIME_ENDPOINT", default_value = "/run/containerd/containerd.sock")]
    socket: PathBuf,
    #[command(subcommand)]
    task: CriCommand,
}

#[derive(Subcommand)]
enum CriCommand {
    /// Prints the runtime's name and version
    Version,
    /// Pulls an image
    Pull {
        /// The image's name
        image: String,
    },
    /// Runs a pod's sandbox; prints its id
    Pod(PodArgs),
    /// Creates a container in a pod; prints its id
    Create(Create),
    /// Runs a pod of a `DaemonSet` by its manifest; prints the ids of sandbox and container
    RunDaemonSet(daemon_set::RunDaemonSet),
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
    /// Lists the resources of containers as JSON, from the PodResources API at the socket
    Assigned,
    /// Serves as a fake API server
    ApiServer(api_server::ApiServer),
    /// Offers fake devices to the kubelet
    DevicePlugin(device_plugin::Plugin),
    /// Prepares resource claims with fake devices
    DraDriver(dra_driver::DraDriver),
    /// Forwards a TCP port to a unix socket
    Relay(relay::Relay),
    /// Changes a container's resources
    Resize {
        /// The container's id
        id: String,
        #[command(flatten)]
        resources: ResourceArguments,
    },
}

/// A pod's class of service, which determines the parent of its cgroup.
#[derive(Clone, Copy, ValueEnum)]
enum Class {
    Guaranteed,
    Burstable,
    Besteffort,
}

/// Cgroup driver, which determines the names of cgroups.
#[derive(Clone, Copy, ValueEnum)]
enum Driver {
    Cgroupfs,
    Systemd,
}

#[derive(Args)]
struct PodArgs {
    /// Name and UID
    name: String,
    /// Namespace
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Class of service
    #[arg(long, value_enum, default_value = "guaranteed")]
    class: Class,
    /// Cgroup driver
    #[arg(long, value_enum, default_value = "cgroupfs")]
    driver: Driver,
    /// Annotation, `KEY=VALUE`
    #[arg(long, value_parser = annotation)]
    annotation: Vec<(String, String)>,
}

#[derive(Args)]
struct Create {
    /// Sandbox of its pod
    sandbox: String,
    #[command(flatten)]
    pod: PodArgs,
    /// Name of the container
    #[arg(long, default_value = "main")]
    container: String,
    #[command(flatten)]
    resources: ResourceArguments,
    /// Image
    #[arg(long, default_value = "localhost/test:1")]
    image: String,
    /// Command to run
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

#[derive(Args)]
struct ResourceArguments {
    /// CPUs, in thousandths
    #[arg(long, default_value_t = 0)]
    millicpus: i64,
    /// Only requests the CPUs, without a limit
    #[arg(long)]
    unlimited: bool,
    /// Memory limit in MiB; 0 for none
    #[arg(long, default_value_t = 0)]
    mebibytes: i64,
}

fn annotation(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

impl PodArgs {
    fn metadata(&self) -> SandboxMetadata {
        SandboxMetadata {
            name: self.name.clone(),
            uid: self.name.clone(),
            namespace: self.namespace.clone(),
            attempt: 0,
        }
    }

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
        let metadata = self.metadata();
        SandboxConfig {
            labels: metadata.labels(None),
            metadata: Some(metadata),
            log_directory: format!("/var/log/pods/{}", self.name),
            annotations: self.annotation.iter().cloned().collect(),
            linux: Some(LinuxSandbox {
                cgroup_parent,
                security_context: Some(SandboxSecurity { namespace_options: Some(NAMESPACES) }),
            }),
        }
    }
}

impl ResourceArguments {
    fn message(&self) -> ContainerResources {
        ContainerResources {
            cpu_period: if self.unlimited { 0 } else { PERIOD },
            cpu_quota: if self.unlimited { 0 } else { self.millicpus * PERIOD / 1000 },
            cpu_shares: (self.millicpus * SHARES_PER_CPU / 1000).max(MIN_SHARES),
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
                labels: self.pod.metadata().labels(Some(&self.container)),
                log_path: format!("{}.log", self.container),
                linux: Some(LinuxContainer {
                    resources: Some(self.resources.message()),
                    security_context: Some(ContainerSecurity {
                        namespace_options: Some(NAMESPACES),
                        ..ContainerSecurity::default()
                    }),
                }),
            }),
            sandbox_config: Some(self.pod.config()),
        }
    }
}

async fn run(arguments: CriArguments) -> Result<(), CallError> {
    match &arguments.task {
        CriCommand::ApiServer(server) => return api_server::run(server).await,
        CriCommand::DevicePlugin(plugin) => return device_plugin::run(plugin).await,
        CriCommand::DraDriver(driver) => return dra_driver::run(driver).await,
        CriCommand::Relay(relay) => return relay::run(relay).await,
        _ => {}
    }
    let mut client = GrpcClient::connect(&arguments.socket).await?;
    match arguments.task {
        // These commands make no call to the runtime.
        CriCommand::ApiServer(_)
        | CriCommand::DevicePlugin(_)
        | CriCommand::DraDriver(_)
        | CriCommand::Relay(_) => {}
        CriCommand::Version => {
            let version: RuntimeVersion =
                client.call("Version", VersionQuery { version: String::new() }).await?;
            println!("{} {}", version.runtime_name, version.runtime_version);
        }
        CriCommand::Pull { image } => {
            let request = PullImage { image: Some(ImageSpec { image }) };
            let _: ImagePulled = client.call_of(IMAGES, "PullImage", request).await?;
        }
        CriCommand::Pod(pod) => {
            let request = Sandbox { config: Some(pod.config()) };
            let made: SandboxId = client.call("RunPodSandbox", request).await?;
            println!("{}", made.pod_sandbox_id);
        }
        CriCommand::Create(create) => {
            let made: ContainerCreated = client.call("CreateContainer", create.request()).await?;
            println!("{}", made.container_id);
        }
        CriCommand::RunDaemonSet(run) => {
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
        CriCommand::Start { id } => {
            let _: Empty = client.call("StartContainer", ContainerId { container_id: id }).await?;
        }
        CriCommand::Remove { id } => {
            let stop = StopContainer { container_id: id.clone(), timeout: 0 };
            let _: Empty = client.call("StopContainer", stop).await?;
            let _: Empty = client.call("RemoveContainer", ContainerId { container_id: id }).await?;
        }
        CriCommand::RemovePod { id } => {
            let sandbox = SandboxId { pod_sandbox_id: id };
            let _: Empty = client.call("StopPodSandbox", sandbox.clone()).await?;
            let _: Empty = client.call("RemovePodSandbox", sandbox).await?;
        }
        CriCommand::Assigned => println!("{}", pod_resources::list(&mut client).await?),
        CriCommand::Resize { id, resources } => {
            let request = UpdateResources { container_id: id, linux: Some(resources.message()) };
            let _: Empty = client.call("UpdateContainerResources", request).await?;
        }
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(CriArguments::parse()).await {
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
    fn computes_kubelet_resources() {
        let resources = |line: &str| match CriArguments::parse_from(line.split(' ')).task {
            CriCommand::Resize { resources, .. } => resources.message(),
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
    fn cgroup_depends_on_class() {
        let line = "cri create sandbox web --class burstable --annotation a/b=c --container x -- sleep 1";
        let CriCommand::Create(create) = CriArguments::parse_from(line.split(' ')).task else {
            panic!("{line}")
        };
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
            let CriCommand::Pod(pod) = CriArguments::parse_from(line.split(' ')).task else {
                panic!("{line}")
            };
            assert_eq!(pod.config().linux.unwrap().cgroup_parent, parent);
        }
        assert!(CriArguments::try_parse_from(["cri", "pod", "web", "--annotation", "x"]).is_err());
    }
}

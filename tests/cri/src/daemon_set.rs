//! A pod of a `DaemonSet`: from its manifest to the kubelet's requests to the runtime.
//!
//! Only the fields in the project's own manifests are supported. Any other field is an error, so that no test runs with
//! less than the manifest contains.

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
};

use clap::Args;
use serde::Deserialize;

use crate::messages::{
    CONTAINER, Capabilities, ContainerConfig, ContainerMetadata, ContainerSecurity, ImageSpec, Int64Value,
    KeyValue, LinuxContainer, LinuxSandbox, Mount, NODE, NamespaceOptions, POD, SandboxConfig,
    SandboxMetadata, SandboxSecurity, SecurityProfile,
};

/// Paths that the kubelet hides or protects in every unprivileged container.
const MASKED_PATHS: [&str; 8] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/scsi",
    "/sys/firmware",
];
const READ_ONLY_PATHS: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
const HOST_TO_CONTAINER: i32 = 1;
/// Type of a seccomp profile that is a file of the node.
const LOCALHOST_PROFILE: i32 = 2;
/// Parent folder of empty volumes.
const EMPTY_DIRS: &str = "/var/lib/empty-dirs";

#[derive(Args)]
pub(crate) struct RunDaemonSet {
    /// The `DaemonSet` as JSON
    manifest: PathBuf,
    /// Name of this Kubernetes node
    #[arg(long)]
    node: String,
    /// Folder with the content of the `ConfigMap`
    #[arg(long)]
    config: String,
}

#[derive(Deserialize)]
struct DaemonSet {
    metadata: Metadata,
    spec: SetSpec,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    namespace: String,
}

#[derive(Deserialize)]
struct SetSpec {
    template: Template,
}

#[derive(Deserialize)]
struct Template {
    spec: PodSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    containers: Vec<ManifestContainer>,
    #[serde(default)]
    host_network: bool,
    #[serde(default, rename = "hostPID")]
    host_pid: bool,
    #[serde(default)]
    volumes: Vec<Volume>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Volume {
    name: String,
    host_path: Option<HostPath>,
    config_map: Option<serde::de::IgnoredAny>,
    empty_dir: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct HostPath {
    path: String,
    #[serde(default)]
    r#type: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ManifestContainer {
    name: String,
    image: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<Env>,
    security_context: SecurityContext,
    #[serde(default)]
    volume_mounts: Vec<VolumeMount>,
    // Only the kubelet uses it.
    #[serde(rename = "imagePullPolicy")]
    _image_pull_policy: serde::de::IgnoredAny,
    #[serde(rename = "ports")]
    _ports: serde::de::IgnoredAny,
    #[serde(rename = "startupProbe")]
    _startup_probe: serde::de::IgnoredAny,
    #[serde(rename = "readinessProbe")]
    _readiness_probe: serde::de::IgnoredAny,
    #[serde(rename = "livenessProbe")]
    _liveness_probe: serde::de::IgnoredAny,
    #[serde(rename = "resources")]
    _resources: serde::de::IgnoredAny,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Env {
    name: String,
    value: Option<String>,
    value_from: Option<ValueFrom>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ValueFrom {
    field_ref: FieldRef,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FieldRef {
    field_path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SecurityContext {
    capabilities: AddAndDrop,
    read_only_root_filesystem: bool,
    run_as_user: i64,
    seccomp_profile: Profile,
}

#[derive(Deserialize)]
struct AddAndDrop {
    #[serde(default)]
    add: Vec<String>,
    #[serde(default)]
    drop: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Profile {
    r#type: String,
    localhost_profile: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct VolumeMount {
    name: String,
    mount_path: String,
    #[serde(default)]
    read_only: bool,
    mount_propagation: Option<String>,
}

impl RunDaemonSet {
    /// Returns the requests for the pod and for its container.
    pub(crate) fn configs(&self) -> Result<(SandboxConfig, ContainerConfig), String> {
        let place = self.manifest.display();
        let text = fs::read_to_string(&self.manifest).map_err(|error| format!("{place}: {error}"))?;
        let set: DaemonSet = serde_json::from_str(&text).map_err(|error| format!("{place}: {error}"))?;
        let pod = set.spec.template.spec;
        let namespaces = NamespaceOptions {
            // There is no network plugin, so the pod uses the host's network.
            network: NODE,
            pid: if pod.host_pid { NODE } else { CONTAINER },
            ipc: POD,
        };
        if pod.host_network {
            return Err(format!("{place}: hostNetwork is not expected"));
        }
        let [container] = <[ManifestContainer; 1]>::try_from(pod.containers)
            .map_err(|all| format!("{place}: {} containers, not one", all.len()))?;
        let metadata = SandboxMetadata {
            name: set.metadata.name.clone(),
            uid: set.metadata.name.clone(),
            namespace: set.metadata.namespace,
            attempt: 0,
        };
        let labels = metadata.labels(Some(&container.name));
        let sandbox = SandboxConfig {
            labels: metadata.labels(None),
            metadata: Some(metadata),
            log_directory: format!("/var/log/pods/{}", set.metadata.name),
            annotations: BTreeMap::new(),
            linux: Some(LinuxSandbox {
                cgroup_parent: format!("/kubepods/burstable/pod{}", set.metadata.name),
                security_context: Some(SandboxSecurity { namespace_options: Some(namespaces) }),
            }),
        };
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: container.name.clone(), attempt: 0 }),
            image: Some(ImageSpec { image: container.image }),
            command: Vec::new(),
            args: container.args,
            envs: container.env.into_iter().map(|env| self.variable(env)).collect::<Result<_, _>>()?,
            mounts: self.mounts(&pod.volumes, container.volume_mounts)?,
            labels,
            log_path: format!("{}.log", container.name),
            linux: Some(LinuxContainer {
                resources: None,
                security_context: Some(security(container.security_context, namespaces)),
            }),
        };
        Ok((sandbox, config))
    }

    fn variable(&self, env: Env) -> Result<KeyValue, String> {
        let value = match (env.value, env.value_from) {
            (Some(value), None) => value,
            (None, Some(from)) if from.field_ref.field_path == "spec.nodeName" => self.node.clone(),
            _ => return Err(format!("variable {}: its value is not understood", env.name)),
        };
        Ok(KeyValue { key: env.name, value })
    }

    fn mounts(&self, volumes: &[Volume], mounts: Vec<VolumeMount>) -> Result<Vec<Mount>, String> {
        let mount = |mount: VolumeMount| {
            let volume = volumes.iter().find(|volume| volume.name == mount.name);
            let host_path = match volume {
                Some(Volume { host_path: Some(path), .. }) => {
                    if path.r#type == "DirectoryOrCreate" {
                        fs::create_dir_all(&path.path).map_err(|error| format!("{}: {error}", path.path))?;
                    }
                    path.path.clone()
                }
                Some(Volume { config_map: Some(_), .. }) => self.config.clone(),
                Some(Volume { empty_dir: Some(_), name, .. }) => {
                    let path = format!("{EMPTY_DIRS}/{name}");
                    // The mode that the kubelet sets.
                    fs::create_dir_all(&path)
                        .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o777)))
                        .map_err(|error| format!("{path}: {error}"))?;
                    path
                }
                _ => return Err(format!("volume {}: it is not understood", mount.name)),
            };
            let propagation = match mount.mount_propagation.as_deref() {
                None => 0,
                Some("HostToContainer") => HOST_TO_CONTAINER,
                Some(other) => return Err(format!("volume {}: propagation {other}", mount.name)),
            };
            Ok(Mount { container_path: mount.mount_path, host_path, readonly: mount.read_only, propagation })
        };
        mounts.into_iter().map(mount).collect()
    }
}

/// Converts a profile as the kubelet does, which knows the node's folder of profiles.
fn seccomp(profile: Profile) -> SecurityProfile {
    match profile.localhost_profile {
        Some(name) => SecurityProfile {
            profile_type: LOCALHOST_PROFILE,
            localhost_ref: format!("/var/lib/kubelet/seccomp/{name}"),
        },
        None => SecurityProfile {
            profile_type: i32::from(profile.r#type != "RuntimeDefault"),
            localhost_ref: String::new(),
        },
    }
}

fn security(context: SecurityContext, namespaces: NamespaceOptions) -> ContainerSecurity {
    let strings = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect();
    ContainerSecurity {
        capabilities: Some(Capabilities { add: context.capabilities.add, drop: context.capabilities.drop }),
        namespace_options: Some(namespaces),
        run_as_user: Some(Int64Value { value: context.run_as_user }),
        readonly_rootfs: context.read_only_root_filesystem,
        masked_paths: strings(&MASKED_PATHS),
        readonly_paths: strings(&READ_ONLY_PATHS),
        seccomp: Some(seccomp(context.seccomp_profile)),
    }
}

//! Messages of CRI `runtime.v1`: only those that are needed, with the needed fields. Missing fields have their
//! defaults.
//!
//! Source: k8s.io/cri-api, `pkg/apis/runtime/v1`.

use std::collections::BTreeMap;

use prost::Message;

/// A namespace of the pod.
pub(crate) const POD: i32 = 0;
/// A namespace of the container.
pub(crate) const CONTAINER: i32 = 1;
/// The host's namespace.
pub(crate) const NODE: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct VersionQuery {
    #[prost(string, tag = "1")]
    pub(crate) version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RuntimeVersion {
    #[prost(string, tag = "2")]
    pub(crate) runtime_name: String,
    #[prost(string, tag = "3")]
    pub(crate) runtime_version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PullImage {
    #[prost(message, optional, tag = "1")]
    pub(crate) image: Option<ImageSpec>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImagePulled {
    #[prost(string, tag = "1")]
    pub(crate) image_ref: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Sandbox {
    #[prost(message, optional, tag = "1")]
    pub(crate) config: Option<SandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<SandboxMetadata>,
    #[prost(string, tag = "3")]
    pub(crate) log_directory: String,
    #[prost(btree_map = "string, string", tag = "6")]
    pub(crate) labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "7")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[prost(message, optional, tag = "8")]
    pub(crate) linux: Option<LinuxSandbox>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SandboxMetadata {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) uid: String,
    #[prost(string, tag = "3")]
    pub(crate) namespace: String,
    #[prost(uint32, tag = "4")]
    pub(crate) attempt: u32,
}

impl SandboxMetadata {
    /// Returns the kubelet's labels of the pod, or of one of its containers. CRI-O has the name of a container from them.
    pub(crate) fn labels(&self, container: Option<&str>) -> BTreeMap<String, String> {
        let pod = [("pod.name", &*self.name), ("pod.namespace", &*self.namespace), ("pod.uid", &*self.uid)];
        let container = container.map(|name| ("container.name", name));
        let labels = pod.into_iter().chain(container);
        labels.map(|(label, value)| (format!("io.kubernetes.{label}"), value.to_owned())).collect()
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxSandbox {
    #[prost(string, tag = "1")]
    pub(crate) cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) security_context: Option<SandboxSecurity>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct SandboxSecurity {
    #[prost(message, optional, tag = "1")]
    pub(crate) namespace_options: Option<NamespaceOptions>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct NamespaceOptions {
    #[prost(int32, tag = "1")]
    pub(crate) network: i32,
    #[prost(int32, tag = "2")]
    pub(crate) pid: i32,
    #[prost(int32, tag = "3")]
    pub(crate) ipc: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SandboxId {
    #[prost(string, tag = "1")]
    pub(crate) pod_sandbox_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CreateContainer {
    #[prost(string, tag = "1")]
    pub(crate) pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    pub(crate) sandbox_config: Option<SandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    pub(crate) image: Option<ImageSpec>,
    #[prost(string, repeated, tag = "3")]
    pub(crate) command: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub(crate) args: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    pub(crate) envs: Vec<KeyValue>,
    #[prost(message, repeated, tag = "7")]
    pub(crate) mounts: Vec<Mount>,
    #[prost(btree_map = "string, string", tag = "9")]
    pub(crate) labels: BTreeMap<String, String>,
    #[prost(string, tag = "11")]
    pub(crate) log_path: String,
    #[prost(message, optional, tag = "15")]
    pub(crate) linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(uint32, tag = "2")]
    pub(crate) attempt: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImageSpec {
    #[prost(string, tag = "1")]
    pub(crate) image: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Mount {
    #[prost(string, tag = "1")]
    pub(crate) container_path: String,
    #[prost(string, tag = "2")]
    pub(crate) host_path: String,
    #[prost(bool, tag = "3")]
    pub(crate) readonly: bool,
    #[prost(int32, tag = "5")]
    pub(crate) propagation: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxContainer {
    #[prost(message, optional, tag = "1")]
    pub(crate) resources: Option<ContainerResources>,
    #[prost(message, optional, tag = "2")]
    pub(crate) security_context: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerSecurity {
    #[prost(message, optional, tag = "1")]
    pub(crate) capabilities: Option<Capabilities>,
    #[prost(message, optional, tag = "3")]
    pub(crate) namespace_options: Option<NamespaceOptions>,
    #[prost(message, optional, tag = "5")]
    pub(crate) run_as_user: Option<Int64Value>,
    #[prost(bool, tag = "7")]
    pub(crate) readonly_rootfs: bool,
    #[prost(string, repeated, tag = "13")]
    pub(crate) masked_paths: Vec<String>,
    #[prost(string, repeated, tag = "14")]
    pub(crate) readonly_paths: Vec<String>,
    #[prost(message, optional, tag = "15")]
    pub(crate) seccomp: Option<SecurityProfile>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Capabilities {
    #[prost(string, repeated, tag = "1")]
    pub(crate) add: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) drop: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Int64Value {
    #[prost(int64, tag = "1")]
    pub(crate) value: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SecurityProfile {
    /// 0: the runtime's default profile; 1: none; 2: a file of the node.
    #[prost(int32, tag = "1")]
    pub(crate) profile_type: i32,
    #[prost(string, tag = "2")]
    pub(crate) localhost_ref: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ContainerResources {
    #[prost(int64, tag = "1")]
    pub(crate) cpu_period: i64,
    #[prost(int64, tag = "2")]
    pub(crate) cpu_quota: i64,
    #[prost(int64, tag = "3")]
    pub(crate) cpu_shares: i64,
    #[prost(int64, tag = "4")]
    pub(crate) memory_limit_in_bytes: i64,
    #[prost(int64, tag = "5")]
    pub(crate) oom_score_adj: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerCreated {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerId {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StopContainer {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(int64, tag = "2")]
    pub(crate) timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UpdateResources {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) linux: Option<ContainerResources>,
}

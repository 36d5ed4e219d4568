//! The used protobuf messages of ttrpc and of NRI's `nri.pkg.api.v1alpha1`.
//!
//! The protocol defines their field numbers and types. The decoder skips fields that are not listed, so newer runtimes may send more.
//! `OptionalUInt64` and similar types are an `Option` here, because prost encodes a plain number as a message with the number in
//! field 1. `Empty` is `()`.

use std::collections::BTreeMap;

use prost::Message;

use super::types::ContainerState;

/// The service that a plugin serves, on connection 1.
pub(crate) const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
/// The service that the runtime serves, on connection 2.
pub(crate) const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";

/// A call of ttrpc.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TtrpcRequest {
    #[prost(string, tag = "1")]
    pub(crate) service: String,
    #[prost(string, tag = "2")]
    pub(crate) method: String,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) payload: Vec<u8>,
    /// Time left to answer, in nanoseconds. Zero: not reported.
    #[prost(int64, tag = "4")]
    pub(crate) timeout_nano: i64,
}

/// An answer of ttrpc. No status means success.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TtrpcResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<RpcStatus>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) payload: Vec<u8>,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RpcStatus {
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
    #[prost(string, tag = "2")]
    pub(crate) message: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RegisterPluginRequest {
    #[prost(string, tag = "1")]
    pub(crate) plugin_name: String,
    #[prost(string, tag = "2")]
    pub(crate) plugin_idx: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ConfigureRequest {
    #[prost(string, tag = "2")]
    pub(crate) runtime_name: String,
    #[prost(string, tag = "3")]
    pub(crate) runtime_version: String,
    /// Milliseconds. Zero: the default, 5 s.
    #[prost(int64, tag = "4")]
    pub(crate) registration_timeout: i64,
    /// Milliseconds. Zero: the default, 2 s.
    #[prost(int64, tag = "5")]
    pub(crate) request_timeout: i64,
    /// Empty below NRI 0.12.
    #[prost(string, tag = "6")]
    pub(crate) nri_version: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ConfigureResponse {
    /// Subscribed events: bit `event - 1` for each; no bit means all.
    #[prost(int32, tag = "2")]
    pub(crate) events: i32,
}

/// `pods` and `containers` stay encoded. So one invalid element does not make the whole message invalid, and a message of many empty
/// elements is not decoded to a hundred times its size.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SynchronizeRequest {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub(crate) pods: Vec<Vec<u8>>,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub(crate) containers: Vec<Vec<u8>>,
    #[prost(bool, tag = "3")]
    pub(crate) more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SynchronizeResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) update: Vec<ContainerUpdate>,
    #[prost(bool, tag = "2")]
    pub(crate) more: bool,
}

/// `CreateContainerRequest`, and all other requests with a pod, a container or both.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "2")]
    pub(crate) container: Option<Container>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CreateContainerResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) adjust: Option<ContainerAdjustment>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) update: Vec<ContainerUpdate>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UpdateContainerRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "2")]
    pub(crate) container: Option<Container>,
    #[prost(message, optional, tag = "3")]
    pub(crate) linux_resources: Option<LinuxResources>,
}

/// `UpdateContainerResponse` and `StopContainerResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Updates {
    #[prost(message, repeated, tag = "1")]
    pub(crate) update: Vec<ContainerUpdate>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UpdatePodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "2")]
    pub(crate) overhead_linux_resources: Option<LinuxResources>,
    #[prost(message, optional, tag = "3")]
    pub(crate) linux_resources: Option<LinuxResources>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StateChangeEvent {
    #[prost(int32, tag = "1")]
    pub(crate) event: i32,
    #[prost(message, optional, tag = "2")]
    pub(crate) pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "3")]
    pub(crate) container: Option<Container>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerUpdate {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) linux: Option<LinuxContainerUpdate>,
    #[prost(bool, tag = "3")]
    pub(crate) ignore_failure: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxContainerUpdate {
    #[prost(message, optional, tag = "1")]
    pub(crate) resources: Option<LinuxResources>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerAdjustment {
    #[prost(message, optional, tag = "6")]
    pub(crate) linux: Option<LinuxContainerAdjustment>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxContainerAdjustment {
    #[prost(message, optional, tag = "2")]
    pub(crate) resources: Option<LinuxResources>,
    #[prost(message, optional, tag = "12")]
    pub(crate) memory_policy: Option<LinuxMemoryPolicy>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxMemoryPolicy {
    #[prost(enumeration = "MpolMode", tag = "1")]
    pub(crate) mode: i32,
    #[prost(string, tag = "2")]
    pub(crate) nodes: String,
    #[prost(enumeration = "MpolFlag", repeated, tag = "3")]
    pub(crate) flags: Vec<i32>,
}

/// Flags of a memory policy, with NRI's own numbers. Only the used flag is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum MpolFlag {
    StaticNodes = 0,
}

/// Modes of a memory policy, with the numbers of `linux/mempolicy.h`: the default, and the used modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum MpolMode {
    Default = 0,
    Bind = 2,
    Interleave = 3,
    PreferredMany = 5,
    WeightedInterleave = 6,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxResources {
    #[prost(message, optional, tag = "1")]
    pub(crate) memory: Option<LinuxMemory>,
    #[prost(message, optional, tag = "2")]
    pub(crate) cpu: Option<LinuxCpu>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) hugepage_limits: Vec<HugepageLimit>,
    #[prost(btree_map = "string, string", tag = "6")]
    pub(crate) unified: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxCpu {
    #[prost(message, optional, tag = "1")]
    pub(crate) shares: Option<u64>,
    #[prost(message, optional, tag = "2")]
    pub(crate) quota: Option<i64>,
    #[prost(message, optional, tag = "3")]
    pub(crate) period: Option<u64>,
    #[prost(string, tag = "6")]
    pub(crate) cpus: String,
    #[prost(string, tag = "7")]
    pub(crate) mems: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LinuxMemory {
    #[prost(message, optional, tag = "1")]
    pub(crate) limit: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HugepageLimit {
    /// The size in the kernel's notation, such as `2MB`.
    #[prost(string, tag = "1")]
    pub(crate) page_size: String,
    #[prost(uint64, tag = "2")]
    pub(crate) limit: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PodSandbox {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(string, tag = "3")]
    pub(crate) uid: String,
    #[prost(string, tag = "4")]
    pub(crate) namespace: String,
    #[prost(btree_map = "string, string", tag = "5")]
    pub(crate) labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "6")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[prost(string, tag = "7")]
    pub(crate) runtime_handler: String,
    #[prost(message, optional, tag = "8")]
    pub(crate) linux: Option<LinuxPodSandbox>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxPodSandbox {
    #[prost(message, optional, tag = "1")]
    pub(crate) pod_overhead: Option<LinuxResources>,
    #[prost(string, tag = "3")]
    pub(crate) cgroup_parent: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Container {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(string, tag = "2")]
    pub(crate) pod_sandbox_id: String,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
    #[prost(enumeration = "ContainerState", tag = "4")]
    pub(crate) state: i32,
    #[prost(btree_map = "string, string", tag = "6")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[prost(message, optional, tag = "11")]
    pub(crate) linux: Option<LinuxContainer>,
    #[prost(uint32, tag = "12")]
    pub(crate) pid: u32,
    /// Each is a message with the name in field 1. Reported from NRI 0.10 on.
    #[prost(message, repeated, tag = "20")]
    pub(crate) cdi_devices: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxContainer {
    #[prost(message, repeated, tag = "2")]
    pub(crate) devices: Vec<LinuxDevice>,
    #[prost(message, optional, tag = "3")]
    pub(crate) resources: Option<LinuxResources>,
    #[prost(string, tag = "5")]
    pub(crate) cgroups_path: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxDevice {
    #[prost(string, tag = "1")]
    pub(crate) path: String,
    /// `c`, `b`, `p` or `u`, as in the OCI runtime specification.
    #[prost(string, tag = "2")]
    pub(crate) kind: String,
    #[prost(int64, tag = "3")]
    pub(crate) major: i64,
    #[prost(int64, tag = "4")]
    pub(crate) minor: i64,
}

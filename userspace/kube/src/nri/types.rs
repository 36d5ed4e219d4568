//! Types for pods and containers as reported by the runtime, and for the changes that a plugin may request.

use std::{collections::BTreeMap, time::Duration};

use numaward_config::policy::MemoryPolicy;
use numaward_topology::{Bytes, CpuSet, HugepageSize, Machine, NodeSet};

/// A limit that may be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit<T> {
    /// No limit: `-1` in NRI, `max` in cgroup v2.
    Unlimited,
    At(T),
}

/// A pod as reported by the runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// Id of the sandbox. A pod whose sandbox is replaced gets a new one.
    pub id: String,
    pub name: String,
    pub namespace: String,
    /// UID in the API server. For a static pod, the hash of its manifest.
    pub uid: String,
    /// Labels, including those of the kubelet (`io.kubernetes.*`): the first ones, up to 32 KiB.
    pub labels: BTreeMap<String, String>,
    /// Annotations of `kubernetes.io` and `crio.io`, and of `numaward.io`: the first ones of each group, up to 32 KiB.
    pub annotations: BTreeMap<String, String>,
    /// Number of labels and annotations of these kinds beyond the limits.
    pub ignored: usize,
    /// Cgroup relative to the root of the hierarchy, if the runtime reported a path that can be resolved.
    pub cgroup: Option<String>,
    /// Handler of the pod's `RuntimeClass` in the runtime's configuration, such as `runc`; empty: the runtime's default.
    pub runtime_handler: String,
    /// Resources of the pod itself, if reported.
    pub overhead: Option<Resources>,
}

/// A container as reported by the runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Container {
    pub id: String,
    /// Id of the pod's sandbox.
    pub pod_id: String,
    /// Name within the pod.
    pub name: String,
    pub state: ContainerState,
    /// Annotations of `kubernetes.io` and `crio.io`, and of `numaward.io`: the first ones of each group, up to 32 KiB.
    pub annotations: BTreeMap<String, String>,
    /// Resources. In a creation, settings of plugins with a lower index are included.
    pub resources: Resources,
    /// Cgroup relative to the root of the hierarchy, if the runtime reported a path that can be resolved. Known
    /// before the cgroup exists.
    pub cgroup: Option<String>,
    pub devices: Vec<Device>,
    /// Names of devices by the Container Device Interface.
    pub cdi_devices: Vec<String>,
    /// Process id of the first process; `None` before the runtime has started it.
    pub pid: Option<u32>,
    /// Values that could not be parsed and were ignored.
    pub malformed: Vec<MalformedField>,
}

/// State in the lifecycle of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum ContainerState {
    /// Not reported, as during creation.
    Unknown = 0,
    /// Created, not started.
    Created = 1,
    /// Frozen.
    Paused = 2,
    /// Running.
    Running = 3,
    /// Ended.
    Stopped = 4,
}

/// A device file of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Path in the container.
    pub path: String,
    pub kind: DeviceKind,
    pub major: u32,
    pub minor: u32,
}

/// Kind of a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Block,
    Character,
}

/// Limits and placement of a container or pod from its OCI specification. `None` means not set; in an update request,
/// unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    /// Weight of the CPU time.
    pub cpu_shares: Option<u64>,
    /// Maximum CPU time in each period.
    pub cpu_quota: Option<Limit<Duration>>,
    pub cpu_period: Option<Duration>,
    /// `cpuset.cpus`.
    pub cpus: Option<CpuSet>,
    /// `cpuset.mems`.
    pub mems: Option<NodeSet>,
    /// `memory.max`.
    pub memory_limit: Option<Limit<Bytes>>,
    /// Limits on hugepages in bytes, by page size.
    pub hugepage_limits: BTreeMap<HugepageSize, Bytes>,
    /// Files of cgroup v2 and their contents.
    pub unified: BTreeMap<String, String>,
    /// Values that could not be parsed and were ignored.
    pub malformed: Vec<MalformedField>,
}

impl Resources {
    /// Returns true if the CPUs or nodes are set, even to a value that could not be parsed.
    pub fn is_pinned(&self) -> bool {
        self.cpus.is_some() || self.mems.is_some() || self.has_malformed_pin()
    }

    /// Returns true if the CPUs or nodes are fewer than those of the whole machine. A container cannot be unpinned, but pinned to the
    /// whole machine.
    pub fn is_confined(&self, online: &Online) -> bool {
        self.cpus.as_ref().is_some_and(|cpus| !online.cpus.is_subset(cpus))
            || self.mems.as_ref().is_some_and(|mems| !online.mems.is_subset(mems))
            || self.has_malformed_pin()
    }

    fn has_malformed_pin(&self) -> bool {
        self.malformed.iter().any(|field| matches!(field.field, "cpu.cpus" | "cpu.mems"))
    }
}

/// A value from the runtime that could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value:?}: {problem}")]
pub struct MalformedField {
    /// Field of the message, such as `cpu.cpus`.
    pub field: &'static str,
    pub value: String,
    /// Parse error.
    pub problem: String,
}

/// All running pods and containers, as reported after connecting.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Pods by sandbox id.
    pub pods: BTreeMap<String, Pod>,
    /// Containers that have not ended. The pod of a container may be missing.
    pub containers: Vec<Container>,
    /// Number of pods and containers that could not be decoded, or were over the maximum number or size.
    pub unreadable: usize,
}

/// Settings of a container. `None` means unchanged.
///
/// An empty CPU set cannot be expressed and a pin cannot be removed: [`Settings::unpinned`] unpins a container.
/// Hugepage limits cannot be set, because the runtime would append them at each update.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `cpuset.cpus`: not empty, online CPUs only.
    pub cpus: Option<CpuSet>,
    /// `cpuset.mems`: not empty, online nodes with memory only.
    pub mems: Option<NodeSet>,
    /// `memory.min`. Limited in effect by the ancestors' values.
    pub memory_min: Option<Limit<Bytes>>,
    /// `memory.low`. Limited in effect by the ancestors' values.
    pub memory_low: Option<Limit<Bytes>>,
    /// `memory.high`.
    pub memory_high: Option<Limit<Bytes>>,
    /// Maximum CPU time in each period. The period is not changed.
    pub cpu_quota: Option<Limit<Duration>>,
}

impl Settings {
    /// Returns settings that give a container the whole machine again.
    pub fn unpinned(online: &Online) -> Self {
        Self { cpus: Some(online.cpus.clone()), mems: Some(online.mems.clone()), ..Self::default() }
    }

    /// Returns true if no setting is changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Checks the settings against the machine. The kernel accepts settings that pass.
    pub fn check(&self, online: &Online) -> Result<(), InvalidSettings> {
        if let Some(cpus) = &self.cpus {
            if cpus.is_empty() {
                return Err(InvalidSettings::Empty("cpuset.cpus"));
            }
            let offline = cpus - &online.cpus;
            if !offline.is_empty() {
                return Err(InvalidSettings::OfflineCpus(offline, online.cpus.clone()));
            }
        }
        if let Some(mems) = &self.mems {
            if mems.is_empty() {
                return Err(InvalidSettings::Empty("cpuset.mems"));
            }
            let missing = mems - &online.mems;
            if !missing.is_empty() {
                return Err(InvalidSettings::NoMemory(missing, online.mems.clone()));
            }
        }
        Ok(())
    }
}

/// Settings that the kernel would refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSettings {
    /// A set is empty, which means "unchanged" for the runtime.
    #[error("{0} is empty, which means \"unchanged\" for the runtime")]
    Empty(&'static str),
    /// Some CPUs are not online: these, and all online ones.
    #[error("cpuset.cpus has CPUs {0} that are not online (online: {1})")]
    OfflineCpus(CpuSet, CpuSet),
    /// Some nodes have no memory or do not exist: these, and all nodes with memory.
    #[error("cpuset.mems has nodes {0} that have no memory or are not online (with memory: {1})")]
    NoMemory(NodeSet, NodeSet),
    /// The container may use none of the memory policy's nodes.
    #[error("the memory policy is over nodes {0}, none of which the container may use")]
    UnusablePolicyNodes(NodeSet),
    /// An answer has two updates of one container, which the runtime reports as a conflict.
    #[error("container {0} is updated twice in one answer")]
    Twice(String),
    /// An update is for the container that is being created.
    #[error("container {0} is updated while it is being created")]
    BeingCreated(String),
}

/// CPUs and nodes to which a container may be pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Online {
    /// Online CPUs.
    pub cpus: CpuSet,
    /// Online nodes with memory.
    pub mems: NodeSet,
}

impl From<&Machine> for Online {
    fn from(machine: &Machine) -> Self {
        let with_memory = machine.nodes.iter().filter(|(_, node)| node.memory > Bytes(0));
        Self { cpus: machine.cpu_ids(), mems: with_memory.map(|(&id, _)| id).collect() }
    }
}

/// New settings for a container that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Id of the container.
    pub container: String,
    pub settings: Settings,
    /// True if a failure of this update does not fail the operation that it belongs to.
    pub ignore_failure: bool,
}

/// The answer to a creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Creation {
    pub settings: Settings,
    /// Initial memory policy of the container's processes, and its nodes. It applies to those nodes that the
    /// container may use, also when that set changes (`MPOL_F_STATIC_NODES`). Runtimes without
    /// [`RuntimeInfo::sets_memory_policies`](super::RuntimeInfo::sets_memory_policies) ignore it.
    pub memory_policy: Option<(MemoryPolicy, NodeSet)>,
    /// Resulting updates of other containers, such as a smaller shared pool.
    pub updates: Vec<Update>,
}

impl Creation {
    /// Checks the new container's settings against the machine. The kernel accepts settings that pass.
    pub fn check(&self, online: &Online) -> Result<(), InvalidSettings> {
        self.settings.check(online)?;
        let Some((_, nodes)) = &self.memory_policy else { return Ok(()) };
        if nodes.is_empty() {
            return Err(InvalidSettings::Empty("the node set of the memory policy"));
        }
        let usable = self.settings.mems.as_ref().unwrap_or(&online.mems);
        if (nodes & usable).is_empty() {
            return Err(InvalidSettings::UnusablePolicyNodes(nodes.clone()));
        }
        Ok(())
    }
}

/// A refusal: the request fails, and the kubelet shows the text to the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

/// An event that can neither be changed nor refused.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Pod(PodEvent, Pod),
    Container(ContainerEvent, Pod, Box<Container>),
}

/// Kind of an event of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// The pod's resources were changed.
    Updated,
    /// The pod's sandbox was stopped.
    Stopped,
    /// The pod's sandbox was removed.
    Removed,
}

/// Kind of an event of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerEvent {
    /// The container was created; its resources are final.
    Created,
    /// The container is about to start: its process exists, but its program does not run yet. The runtime waits.
    Starting,
    Started,
    Updated,
    Removed,
}

/// Reason why a call got no answer from the handler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum NoAnswerReason {
    /// The handler did not answer in time.
    #[error("there was no answer within {0:?}")]
    Late(Duration),
    /// The connection ended before the answer was sent.
    #[error("the connection ended before the answer was sent")]
    ConnectionLost,
    #[error("the handler panicked")]
    HandlerPanicked,
    /// The answer would have failed in the kernel or in the runtime.
    #[error("the answer was not sent: {0}")]
    #[strum(serialize = "invalid_settings")]
    Invalid(#[from] InvalidSettings),
    /// Another plugin or the kubelet has pinned the container already.
    #[error("another plugin or the kubelet has pinned it already")]
    PinnedByOther,
    /// The request could not be decoded.
    #[error("the request could not be read: {0}")]
    Unreadable(String),
}

impl NoAnswerReason {
    /// All values of [`label`](Self::label), so that a metric can start with zeros.
    pub const LABELS: &[&str] = <Self as strum::VariantNames>::VARIANTS;

    /// Returns the value of a metric's label.
    pub fn label(&self) -> &'static str {
        self.into()
    }
}

/// A call of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum Call {
    /// All running pods and containers are reported.
    Synchronize,
    /// A pod's sandbox is being started.
    #[strum(serialize = "RunPodSandbox")]
    RunPod,
    /// A pod's resources are being changed.
    #[strum(serialize = "UpdatePodSandbox")]
    UpdatePod,
    /// A container is being created.
    CreateContainer,
    /// A container's resources are being changed.
    UpdateContainer,
    /// A container was stopped.
    StopContainer,
    /// An [`Event`].
    #[strum(serialize = "an event")]
    Event,
}

/// A call without an answer from the handler: the runtime continued as if there were no plugin.
#[derive(Clone, Debug, PartialEq)]
pub struct NoAnswer {
    /// The call. With [`Call::CreateContainer`] the container starts unpinned.
    pub call: Call,
    /// Pod of the call, if it could be parsed.
    pub pod: Option<Pod>,
    /// Container of the call, if it could be parsed.
    pub container: Option<Container>,
    pub reason: NoAnswerReason,
}

#[cfg(test)]
mod tests {
    use numaward_topology::NodeId;

    use super::*;

    #[test]
    fn checks_settings_against_machine() {
        let machine = Machine::builder()
            .nodes(2)
            .memory(Bytes::gib(1))
            .node(NodeId(1), |node| node.memory(Bytes(0)))
            .build()
            .unwrap();
        let online = Online::from(&machine);
        assert_eq!(online.mems, "0".parse().unwrap(), "a node without memory is no place for memory");
        let settings = |cpus: Option<&str>, mems: Option<&str>| Settings {
            cpus: cpus.map(|cpus| cpus.parse().unwrap()),
            mems: mems.map(|mems| mems.parse().unwrap()),
            ..Settings::default()
        };
        assert_eq!(settings(None, None).check(&online), Ok(()));
        assert_eq!(settings(Some("0"), Some("0")).check(&online), Ok(()));
        assert_eq!(Settings::unpinned(&online).check(&online), Ok(()));
        for (cpus, mems, problem) in [
            (Some(""), None, "cpuset.cpus is empty"),
            (None, Some(""), "cpuset.mems is empty"),
            (Some("0,900-901"), None, "CPUs 900-901 that are not online"),
            (Some("0"), Some("0-1,7"), "nodes 1,7 that have no memory"),
        ] {
            let error = settings(cpus, mems).check(&online).unwrap_err().to_string();
            assert!(error.contains(problem), "{cpus:?} {mems:?}: {error}");
        }
    }

    #[test]
    fn malformed_pin_counts_as_pin() {
        assert!(!Resources::default().is_pinned());
        assert!(Resources { mems: Some("1".parse().unwrap()), ..Resources::default() }.is_pinned());
        let malformed = |field| Resources {
            malformed: vec![MalformedField { field, value: "x".to_owned(), problem: String::new() }],
            ..Resources::default()
        };
        assert!(malformed("cpu.cpus").is_pinned());
        let online = Online { cpus: "0-3".parse().unwrap(), mems: "0".parse().unwrap() };
        let all = Resources { cpus: Some("0-3".parse().unwrap()), ..Resources::default() };
        assert!(malformed("cpu.cpus").is_confined(&online) && !all.is_confined(&online));
        let some = Resources { cpus: Some("0-2".parse().unwrap()), ..Resources::default() };
        assert!(some.is_confined(&online) && !Resources::default().is_confined(&online));
        assert!(!malformed("memory.limit").is_pinned());
    }
}

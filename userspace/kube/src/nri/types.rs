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
    /// Annotations of `kubernetes.io` and `numaward.io`: the first ones of each, up to 32 KiB.
    pub annotations: BTreeMap<String, String>,
    /// Cgroup relative to the root of the hierarchy, if the runtime reported a path that can be resolved.
    pub cgroup: Option<String>,
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
    /// Annotations of `kubernetes.io` and `numaward.io`: the first ones of each, up to 32 KiB.
    pub annotations: BTreeMap<String, String>,
    /// Resources. In a creation, settings of plugins with a lower index are included.
    pub resources: Resources,
    /// Cgroup relative to the root of the hierarchy, if the runtime reported a path that can be resolved. Known
    /// before the cgroup exists.
    pub cgroup: Option<String>,
    /// Its device files.
    pub devices: Vec<Device>,
    /// Process id of the first process; `None` before the runtime has started it.
    pub pid: Option<u32>,
    /// Values that could not be parsed and were ignored.
    pub malformed: Vec<Malformed>,
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
    /// Its path in the container.
    pub path: String,
    /// Block or character device.
    pub kind: DeviceKind,
    /// Its major number.
    pub major: u32,
    /// Its minor number.
    pub minor: u32,
}

/// The kind of a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A block device.
    Block,
    /// A character device.
    Character,
}

/// Limits and placement of a container or pod from its OCI specification. `None` means not set; in an update request,
/// unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    /// The weight of its CPU time.
    pub cpu_shares: Option<u64>,
    /// The CPU time it may use in each period.
    pub cpu_quota: Option<Limit<Duration>>,
    /// The length of the period.
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
    pub malformed: Vec<Malformed>,
}

impl Resources {
    /// Returns whether another program has set the placement, even with values that could not be parsed.
    pub fn is_pinned(&self) -> bool {
        self.cpus.is_some() || self.mems.is_some() || self.has_malformed_pin()
    }

    /// Returns whether the placement is narrower than the whole machine. A pin cannot be removed, only widened to the
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
pub struct Malformed {
    /// The field, such as `cpu.cpus`.
    pub field: &'static str,
    pub value: String,
    /// Parse error.
    pub problem: String,
}

/// All running pods and containers, as reported after connecting.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// All pods by sandbox id.
    pub pods: BTreeMap<String, Pod>,
    /// All containers that have not ended. A container's pod may be missing.
    pub containers: Vec<Container>,
    /// Pods and containers that could not be read at all, or are more than is kept.
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
    /// The CPU time that it may use in each period. The period stays as it is.
    pub cpu_quota: Option<Limit<Duration>>,
}

impl Settings {
    /// Returns settings that give a container the whole machine again.
    pub fn unpinned(online: &Online) -> Self {
        Self { cpus: Some(online.cpus.clone()), mems: Some(online.mems.clone()), ..Self::default() }
    }

    /// Returns whether all settings are unchanged.
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
    /// The runtime takes an empty set for "unchanged".
    #[error("{0} is empty, which the runtime takes for unchanged")]
    Empty(&'static str),
    /// Some CPUs are not online: which, and all that are.
    #[error("cpuset.cpus has CPUs {0} that are not online (online: {1})")]
    OfflineCpus(CpuSet, CpuSet),
    /// Some nodes have no memory or do not exist: which, and all that have some.
    #[error("cpuset.mems has nodes {0} that have no memory or are not online (with memory: {1})")]
    NoMemory(NodeSet, NodeSet),
    /// The memory policy is over nodes of which the container may use none: which.
    #[error("the memory policy is over nodes {0}, none of which the container may use")]
    PolicyOfOthers(NodeSet),
    /// Two updates of one container in one answer: the runtime takes the second for a conflict.
    #[error("container {0} is updated twice in one answer")]
    Twice(String),
    /// A container that is being created is adjusted, not updated.
    #[error("container {0} is updated while it is being created")]
    BeingCreated(String),
}

/// CPUs and nodes to which a container may be pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Online {
    /// The online CPUs.
    pub cpus: CpuSet,
    /// The online nodes with memory.
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
    /// The container's id.
    pub container: String,
    /// What to set.
    pub settings: Settings,
    /// Whether all that the update belongs to goes on when it fails.
    pub ignore_failure: bool,
}

/// The answer to a creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Creation {
    /// Settings of the new container.
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
            return Err(InvalidSettings::PolicyOfOthers(nodes.clone()));
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
    /// Of a pod.
    Pod(PodEvent, Pod),
    /// Of a container.
    Container(ContainerEvent, Pod, Box<Container>),
}

/// Kind of an event of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// Its resources were changed.
    Updated,
    /// Its sandbox was stopped.
    Stopped,
    /// Its sandbox was removed.
    Removed,
}

/// Kind of an event of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerEvent {
    /// It was created; its resources are final.
    Created,
    /// It is about to start: its process exists, its program does not run yet. The runtime waits.
    Starting,
    /// It was started.
    Started,
    /// Its resources were changed.
    Updated,
    /// It was removed.
    Removed,
}

/// Reason why a call got no answer from the handler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum NoAnswerReason {
    /// There was no answer in time.
    #[error("there was no answer within {0:?}")]
    Late(Duration),
    /// The runtime went away before it had the answer.
    #[error("the runtime went away before it had the answer")]
    ConnectionLost,
    /// The handler panicked.
    #[error("the handler panicked")]
    HandlerPanicked,
    /// The answer would have failed in the kernel or in the runtime.
    #[error("the answer was not sent: {0}")]
    #[strum(serialize = "invalid_settings")]
    Invalid(#[from] InvalidSettings),
    /// Another plugin or the kubelet had pinned the container already.
    #[error("another plugin or the kubelet has pinned it already")]
    PinnedByOther,
    /// The request could not be read.
    #[error("the request could not be read: {0}")]
    Unreadable(String),
}

impl NoAnswerReason {
    /// All short names, so that a metric can start with zeros.
    pub const LABELS: &[&str] = <Self as strum::VariantNames>::VARIANTS;

    /// A short name, for a metric's label.
    pub fn label(&self) -> &'static str {
        self.into()
    }
}

/// A call of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum Call {
    /// All that runs is reported.
    Synchronize,
    /// A pod's sandbox is to run.
    #[strum(serialize = "RunPodSandbox")]
    RunPod,
    /// A pod's resources are to change.
    #[strum(serialize = "UpdatePodSandbox")]
    UpdatePod,
    /// A container is to be created.
    CreateContainer,
    /// A container's resources are to change.
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
    fn settings_are_held_against_the_machine() {
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
    fn a_pin_in_words_that_cannot_be_read_is_a_pin() {
        assert!(!Resources::default().is_pinned());
        assert!(Resources { mems: Some("1".parse().unwrap()), ..Resources::default() }.is_pinned());
        let malformed = |field| Resources {
            malformed: vec![Malformed { field, value: "x".to_owned(), problem: String::new() }],
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

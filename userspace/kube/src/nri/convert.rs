//! From messages to types and back.
//!
//! Reading never fails: a field that makes no sense is ignored and reported in `malformed`. A runtime's
//! oddity in one field must not stop a node's pods from being created.

use std::{collections::BTreeMap, time::Duration};

use numaward_config::policy::MemoryPolicy;
use numaward_topology::{Bytes, HugepageSize, NodeSet, ZoneKind};

use super::{
    messages,
    types::{Container, Creation, Device, DeviceKind, Limit, Malformed, Pod, Resources, Settings, Update},
};
use crate::cgroup_path;

/// Bytes of the labels that are kept of a pod, and of the annotations. A tenant may give it a megabyte of them.
const MAX_TEXTS: usize = 32 << 10;
/// Bytes of an annotation. Longer ones are cut: what reads them takes less.
const MAX_VALUE: usize = 8 << 10;

/// A message of which a part is not kept.
pub(crate) trait Trim {
    /// Drops what nothing reads, and what is more than is kept.
    fn trim(&mut self);
}

impl Trim for messages::PodSandbox {
    fn trim(&mut self) {
        trim(&mut self.labels, MAX_TEXTS);
        trim_annotations(&mut self.annotations);
    }
}

impl Trim for messages::Container {
    fn trim(&mut self) {
        trim_annotations(&mut self.annotations);
    }
}

/// Keeps those of Kubernetes, which say what a pod is, and ours.
fn trim_annotations(annotations: &mut BTreeMap<String, String>) {
    annotations.retain(|key, value| {
        value.truncate(value.floor_char_boundary(MAX_VALUE));
        let prefix = key.split_once('/').map_or("", |(prefix, _)| prefix);
        prefix == "kubernetes.io" || prefix.ends_with("numaward.io")
    });
    let mut ours: BTreeMap<_, _> =
        annotations.extract_if(.., |key, _| !key.starts_with("kubernetes.io/")).collect();
    trim(annotations, MAX_TEXTS);
    trim(&mut ours, MAX_TEXTS);
    annotations.append(&mut ours);
}

/// Keeps the first ones that have so many bytes together.
fn trim(texts: &mut BTreeMap<String, String>, mut room: usize) {
    texts.retain(|key, value| {
        let left = room.checked_sub(key.len() + value.len());
        room = left.unwrap_or(room);
        left.is_some()
    });
}

pub(crate) fn pod(message: messages::PodSandbox) -> Pod {
    let linux = message.linux.unwrap_or_default();
    Pod {
        cgroup: cgroup_path::pod_path(&linux.cgroup_parent).ok(),
        id: message.id,
        name: message.name,
        namespace: message.namespace,
        uid: message.uid,
        labels: message.labels,
        annotations: message.annotations,
        overhead: linux.pod_overhead.map(resources),
    }
}

pub(crate) fn container(message: messages::Container) -> Container {
    let mut malformed = Vec::new();
    let state = message.state();
    let linux = message.linux.unwrap_or_default();
    Container {
        state,
        cgroup: cgroup(&linux.cgroups_path, &mut malformed),
        id: message.id,
        pod_id: message.pod_sandbox_id,
        name: message.name,
        annotations: message.annotations,
        resources: linux.resources.map(resources).unwrap_or_default(),
        devices: linux.devices.into_iter().filter_map(|message| device(message, &mut malformed)).collect(),
        pid: (message.pid != 0).then_some(message.pid),
        malformed,
    }
}

fn cgroup(path: &str, malformed: &mut Vec<Malformed>) -> Option<String> {
    if path.is_empty() {
        return None;
    }
    let note = |problem: &str| Malformed {
        field: "linux.cgroups_path",
        value: path.to_owned(),
        problem: problem.to_owned(),
    };
    cgroup_path::container_path(path).map_err(|problem| malformed.push(note(problem))).ok()
}

/// A device; none for named pipes and the like, which have no place.
fn device(message: messages::LinuxDevice, malformed: &mut Vec<Malformed>) -> Option<Device> {
    let kind = match message.kind.as_str() {
        "b" => DeviceKind::Block,
        "c" | "u" => DeviceKind::Character,
        _ => return None,
    };
    if let (Ok(major), Ok(minor)) = (u32::try_from(message.major), u32::try_from(message.minor)) {
        return Some(Device { path: message.path, kind, major, minor });
    }
    malformed.push(Malformed {
        field: "linux.devices",
        value: format!("{}:{}", message.major, message.minor),
        problem: format!("not the numbers of a device ({})", message.path),
    });
    None
}

pub(crate) fn resources(message: messages::LinuxResources) -> Resources {
    let mut malformed = Vec::new();
    let cpu = message.cpu.unwrap_or_default();
    let cpus = list("cpu.cpus", &cpu.cpus, &mut malformed);
    let mems = list("cpu.mems", &cpu.mems, &mut malformed);
    let mut hugepage_limits = BTreeMap::new();
    for limit in message.hugepage_limits {
        match hugepage_size(&limit.page_size) {
            // The runtime keeps all it was ever sent; the kernel has what came last.
            Some(size) => drop(hugepage_limits.insert(size, Bytes(limit.limit))),
            None => malformed.push(Malformed {
                field: "hugepage_limits",
                value: limit.page_size,
                problem: "not the size of a huge page (expected such as `2MB`)".to_owned(),
            }),
        }
    }
    Resources {
        // Zero is "not set" in a container's OCI specification.
        cpu_shares: cpu.shares.filter(|&shares| shares != 0),
        cpu_quota: limit(cpu.quota, Duration::from_micros),
        cpu_period: cpu.period.filter(|&period| period != 0).map(Duration::from_micros),
        cpus,
        mems,
        memory_limit: limit(message.memory.unwrap_or_default().limit, Bytes),
        hugepage_limits,
        unified: message.unified,
        malformed,
    }
}

/// A limit: zero is "not set", a negative number "unlimited".
fn limit<T>(value: Option<i64>, at: impl Fn(u64) -> T) -> Option<Limit<T>> {
    match value? {
        0 => None,
        value => Some(u64::try_from(value).map_or(Limit::Unlimited, |value| Limit::At(at(value)))),
    }
}

fn list<T>(field: &'static str, text: &str, malformed: &mut Vec<Malformed>) -> Option<T>
where
    T: std::str::FromStr<Err = numaward_topology::set::ListError>,
{
    if text.trim().is_empty() {
        return None;
    }
    let note = |error: numaward_topology::set::ListError| Malformed {
        field,
        value: error.text,
        problem: error.problem,
    };
    text.parse().map_err(|error| malformed.push(note(error))).ok()
}

/// `2MB`, `1GB`, `64KB`: powers of 1024 in spite of their names.
fn hugepage_size(text: &str) -> Option<HugepageSize> {
    match format!("hugepages-{}i", text.strip_suffix('B')?).parse() {
        Ok(ZoneKind::Hugepages(size)) => Some(size),
        _ => None,
    }
}

/// Settings as the runtime's message; none where nothing is to be set.
pub(crate) fn settings(settings: &Settings) -> Option<messages::LinuxResources> {
    if settings.is_empty() {
        return None;
    }
    let unified = [
        ("memory.min", settings.memory_min),
        ("memory.low", settings.memory_low),
        ("memory.high", settings.memory_high),
    ];
    Some(messages::LinuxResources {
        cpu: Some(messages::LinuxCpu {
            cpus: settings.cpus.as_ref().map(ToString::to_string).unwrap_or_default(),
            mems: settings.mems.as_ref().map(ToString::to_string).unwrap_or_default(),
            quota: settings.cpu_quota.map(|quota| match quota {
                Limit::Unlimited => -1,
                Limit::At(time) => i64::try_from(time.as_micros()).unwrap_or(i64::MAX),
            }),
            ..messages::LinuxCpu::default()
        }),
        unified: unified
            .into_iter()
            .filter_map(|(knob, value)| {
                let value = match value? {
                    Limit::Unlimited => "max".to_owned(),
                    Limit::At(bytes) => bytes.0.to_string(),
                };
                Some((knob.to_owned(), value))
            })
            .collect(),
        ..messages::LinuxResources::default()
    })
}

/// What a new container gets; none where nothing is to be set.
pub(crate) fn adjustment(creation: &Creation) -> Option<messages::ContainerAdjustment> {
    let resources = settings(&creation.settings);
    let memory_policy = creation.memory_policy.as_ref().map(memory_policy);
    let linux = messages::LinuxContainerAdjustment { resources, memory_policy };
    let is_empty = linux == messages::LinuxContainerAdjustment::default();
    (!is_empty).then_some(messages::ContainerAdjustment { linux: Some(linux) })
}

fn memory_policy((policy, nodes): &(MemoryPolicy, NodeSet)) -> messages::LinuxMemoryPolicy {
    let mode = match policy {
        MemoryPolicy::Bind => messages::MpolMode::Bind,
        MemoryPolicy::PreferredMany => messages::MpolMode::PreferredMany,
        MemoryPolicy::Interleave => messages::MpolMode::Interleave,
        MemoryPolicy::WeightedInterleave => messages::MpolMode::WeightedInterleave,
    };
    // Of these nodes the kernel takes those of the cpuset, also when that changes.
    let flags = vec![messages::MpolFlag::StaticNodes.into()];
    messages::LinuxMemoryPolicy { mode: mode.into(), nodes: nodes.to_string(), flags }
}

pub(crate) fn update(update: &Update) -> messages::ContainerUpdate {
    messages::ContainerUpdate {
        container_id: update.container.clone(),
        linux: Some(messages::LinuxContainerUpdate { resources: settings(&update.settings) }),
        ignore_failure: update.ignore_failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nri::types::ContainerState;

    #[test]
    fn what_cannot_be_read_is_left_out_and_reported() {
        let message = messages::Container {
            id: "c1".to_owned(),
            state: 3,
            linux: Some(messages::LinuxContainer {
                cgroups_path: "kubepods/relative".to_owned(),
                devices: vec![
                    messages::LinuxDevice {
                        path: "/dev/nvme0n1".to_owned(),
                        kind: "b".to_owned(),
                        major: 259,
                        minor: 0,
                    },
                    messages::LinuxDevice {
                        path: "/dev/x".to_owned(),
                        kind: "c".to_owned(),
                        major: -1,
                        minor: 0,
                    },
                    messages::LinuxDevice {
                        path: "/pipe".to_owned(),
                        kind: "p".to_owned(),
                        major: -1,
                        minor: 0,
                    },
                ],
                resources: Some(messages::LinuxResources {
                    cpu: Some(messages::LinuxCpu {
                        shares: Some(512),
                        quota: Some(-1),
                        period: Some(100_000),
                        cpus: "0-3,x".to_owned(),
                        mems: "1".to_owned(),
                    }),
                    memory: Some(messages::LinuxMemory { limit: Some(1 << 30) }),
                    hugepage_limits: vec![
                        messages::HugepageLimit { page_size: "2MB".to_owned(), limit: 1 },
                        messages::HugepageLimit { page_size: "2MB".to_owned(), limit: 4 << 20 },
                        messages::HugepageLimit { page_size: "1PB".to_owned(), limit: 1 },
                    ],
                    ..messages::LinuxResources::default()
                }),
            }),
            ..messages::Container::default()
        };
        let got = container(message);
        assert_eq!(got.state, ContainerState::Running);
        assert_eq!((got.cgroup, got.pid), (None, None));
        assert_eq!(got.devices.len(), 1);
        assert_eq!(got.devices[0].major, 259);
        let reported: Vec<&str> = got.malformed.iter().map(|field| field.field).collect();
        assert_eq!(reported, ["linux.cgroups_path", "linux.devices"]);

        let resources = got.resources;
        assert_eq!(resources.cpu_shares, Some(512));
        assert_eq!(resources.cpu_quota, Some(Limit::Unlimited));
        assert_eq!(resources.cpu_period, Some(Duration::from_millis(100)));
        assert_eq!((resources.cpus, resources.mems), (None, Some("1".parse().unwrap())));
        assert_eq!(resources.memory_limit, Some(Limit::At(Bytes::gib(1))));
        let limits: Vec<_> = resources.hugepage_limits.into_iter().collect();
        assert_eq!(limits, [(HugepageSize(Bytes::mib(2)), Bytes::mib(4))]);
        let reported: Vec<String> = resources.malformed.iter().map(ToString::to_string).collect();
        assert_eq!(reported.len(), 2, "{reported:?}");
        assert_eq!(reported[0], r#"cpu.cpus = "0-3,x": "x" is not an id"#);
        assert!(reported[1].starts_with(r#"hugepage_limits = "1PB""#), "{reported:?}");
    }

    #[test]
    fn settings_become_what_the_runtime_expects() {
        assert_eq!(settings(&Settings::default()), None);
        let message = settings(&Settings {
            cpus: Some("2-3".parse().unwrap()),
            mems: Some("1".parse().unwrap()),
            memory_min: Some(Limit::At(Bytes::mib(1))),
            memory_high: Some(Limit::Unlimited),
            cpu_quota: Some(Limit::Unlimited),
            ..Settings::default()
        })
        .unwrap();
        let cpu = message.cpu.unwrap();
        assert_eq!((cpu.cpus.as_str(), cpu.mems.as_str()), ("2-3", "1"));
        assert_eq!((cpu.quota, cpu.period, cpu.shares), (Some(-1), None, None));
        let quota = Some(Limit::At(Duration::from_millis(150)));
        let only_quota = settings(&Settings { cpu_quota: quota, ..Settings::default() }).unwrap();
        assert_eq!(only_quota.cpu.unwrap().quota, Some(150_000));
        let unified: Vec<_> =
            message.unified.iter().map(|(knob, value)| (knob.as_str(), value.as_str())).collect();
        assert_eq!(unified, [("memory.high", "max"), ("memory.min", "1048576")]);
        assert_eq!((message.memory, message.hugepage_limits.len()), (None, 0));
    }

    #[test]
    fn a_memory_policy_is_encoded_as_in_the_protocol() {
        use prost::Message as _;

        let creation = Creation {
            memory_policy: Some((MemoryPolicy::WeightedInterleave, "0-1".parse().unwrap())),
            ..Creation::default()
        };
        // linux (6) { memory_policy (12) { mode (1): 6, nodes (2): "0-1", flags (3): [0] } }
        let bytes = [0x32, 0x0c, 0x62, 0x0a, 0x08, 6, 0x12, 3, b'0', b'-', b'1', 0x1a, 1, 0];
        assert_eq!(adjustment(&creation).unwrap().encode_to_vec(), bytes);
        assert_eq!(adjustment(&Creation::default()), None);
    }

    #[test]
    fn an_unset_set_is_sent_as_unchanged() {
        let only_mems = Settings { mems: Some("0".parse().unwrap()), ..Settings::default() };
        let cpu = settings(&only_mems).unwrap().cpu.unwrap();
        assert_eq!((cpu.cpus.as_str(), cpu.quota, cpu.period), ("", None, None));
    }
}

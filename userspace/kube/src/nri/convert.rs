//! Conversion between protobuf messages and [`types`](super::types).
//!
//! Conversion from messages never fails: an invalid field is ignored and reported in `malformed`, so that an unexpected value in one
//! field does not prevent the creation of pods.

use std::{collections::BTreeMap, time::Duration};

use numaward_config::policy::MemoryPolicy;
use numaward_topology::{Bytes, HugepageSize, NodeSet, ZoneKind};

use super::{
    messages,
    types::{
        Container, Creation, Device, DeviceKind, Limit, MalformedField, Pod, Resources, Settings, Update,
    },
};
use crate::cgroup_path;

/// Maximum memory of a pod's stored labels, and of its annotations, in bytes. Tenants may set up to a megabyte of annotations.
pub(crate) const MAX_MAP_BYTES: usize = 32 << 10;
/// Memory of an entry besides its text: two strings, their allocations, and a part of a node of the tree.
const ENTRY_BYTES: usize = 96;
/// Maximum size of an annotation's value in bytes. Longer values are cut; their readers accept only shorter ones.
const MAX_VALUE_BYTES: usize = 8 << 10;

/// Maximum size of the name of a runtime handler in bytes; a DNS label has fewer.
const MAX_HANDLER_BYTES: usize = 253;
/// Maximum number of stored names of CDI devices, and maximum size of each in bytes.
const MAX_CDI_DEVICES: (usize, usize) = (256, 512);

/// A message that is stored without unused and oversized parts.
pub(crate) trait Trim {
    /// Removes unused fields and oversized texts. Returns the number of labels and annotations that numaward would use.
    fn trim(&mut self) -> usize;
}

impl Trim for messages::PodSandbox {
    fn trim(&mut self) -> usize {
        self.runtime_handler.truncate(self.runtime_handler.floor_char_boundary(MAX_HANDLER_BYTES));
        trim(&mut self.labels, MAX_MAP_BYTES) + trim_annotations(&mut self.annotations)
    }
}

impl Trim for messages::Container {
    fn trim(&mut self) -> usize {
        let (count, bytes) = MAX_CDI_DEVICES;
        self.cdi_devices.retain(|name| name.len() <= bytes);
        self.cdi_devices.truncate(count);
        trim_annotations(&mut self.annotations)
    }
}

/// Keeps the annotations of `kubernetes.io`, which identify static pods, of `crio.io`, and of `numaward.io`. Returns the number of these
/// that exceed the limit.
fn trim_annotations(annotations: &mut BTreeMap<String, String>) -> usize {
    annotations.retain(|key, value| {
        value.truncate(value.floor_char_boundary(MAX_VALUE_BYTES));
        let prefix = key.split_once('/').map_or("", |(prefix, _)| prefix);
        // The names of CRI-O's annotations are domains; some are followed by the name of a container.
        let is_of_crio = key.split('/').next().is_some_and(|domain| domain.ends_with(".crio.io"));
        prefix == "kubernetes.io" || prefix.ends_with("numaward.io") || is_of_crio
    });
    let is_own = |key: &str| key.split('/').next().is_some_and(|domain| domain.ends_with("numaward.io"));
    let mut own: BTreeMap<_, _> = annotations.extract_if(.., |key, _| is_own(key)).collect();
    let dropped = trim(annotations, MAX_MAP_BYTES) + trim(&mut own, MAX_MAP_BYTES);
    annotations.append(&mut own);
    dropped
}

/// Removes the entries that exceed a total of `max_bytes`, counted in the order of the keys, and returns their number. An entry counts
/// with [`ENTRY_BYTES`] besides its text.
fn trim(texts: &mut BTreeMap<String, String>, max_bytes: usize) -> usize {
    let (mut available, before) = (max_bytes, texts.len());
    texts.retain(|key, value| {
        let rest = available.checked_sub(ENTRY_BYTES + key.len() + value.len());
        available = rest.unwrap_or(available);
        rest.is_some()
    });
    before - texts.len()
}

/// `ignored` is the number of labels and annotations that [`Trim::trim`] has removed.
pub(crate) fn pod(message: messages::PodSandbox, ignored: usize) -> Pod {
    let linux = message.linux.unwrap_or_default();
    Pod {
        cgroup: cgroup_path::pod_path(&linux.cgroup_parent).ok(),
        id: message.id,
        name: message.name,
        namespace: message.namespace,
        uid: message.uid,
        labels: message.labels,
        annotations: message.annotations,
        ignored,
        runtime_handler: message.runtime_handler,
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
        cdi_devices: message.cdi_devices,
        pid: (message.pid != 0).then_some(message.pid),
        malformed,
    }
}

fn cgroup(path: &str, malformed: &mut Vec<MalformedField>) -> Option<String> {
    if path.is_empty() {
        return None;
    }
    let note = |problem: &str| MalformedField {
        field: "linux.cgroups_path",
        value: path.to_owned(),
        problem: problem.to_owned(),
    };
    cgroup_path::container_path(path).map_err(|problem| malformed.push(note(problem))).ok()
}

/// Converts a device. Returns `None` for named pipes and other files without a NUMA node.
fn device(message: messages::LinuxDevice, malformed: &mut Vec<MalformedField>) -> Option<Device> {
    let kind = match message.kind.as_str() {
        "b" => DeviceKind::Block,
        "c" | "u" => DeviceKind::Character,
        _ => return None,
    };
    if let (Ok(major), Ok(minor)) = (u32::try_from(message.major), u32::try_from(message.minor)) {
        return Some(Device { path: message.path, kind, major, minor });
    }
    malformed.push(MalformedField {
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
            // The runtime reports all limits that were ever set; the last one is in effect.
            Some(size) => drop(hugepage_limits.insert(size, Bytes(limit.limit))),
            None => malformed.push(MalformedField {
                field: "hugepage_limits",
                value: limit.page_size,
                problem: "not the size of a huge page (expected for example `2MB`)".to_owned(),
            }),
        }
    }
    Resources {
        // Zero means "not set" in a container's OCI specification.
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

/// Converts a limit: zero means "not set", a negative number "unlimited".
fn limit<T>(value: Option<i64>, at: impl Fn(u64) -> T) -> Option<Limit<T>> {
    match value? {
        0 => None,
        value => Some(u64::try_from(value).map_or(Limit::Unlimited, |value| Limit::At(at(value)))),
    }
}

fn list<T>(field: &'static str, text: &str, malformed: &mut Vec<MalformedField>) -> Option<T>
where
    T: std::str::FromStr<Err = numaward_topology::set::ListError>,
{
    if text.trim().is_empty() {
        return None;
    }
    let note = |error: numaward_topology::set::ListError| MalformedField {
        field,
        value: error.text,
        problem: error.problem,
    };
    text.parse().map_err(|error| malformed.push(note(error))).ok()
}

/// Parses `2MB`, `1GB` or `64KB`: powers of 1024 in spite of their names.
fn hugepage_size(text: &str) -> Option<HugepageSize> {
    match format!("hugepages-{}i", text.strip_suffix('B')?).parse() {
        Ok(ZoneKind::Hugepages(size)) => Some(size),
        _ => None,
    }
}

/// Converts settings. Returns `None` if nothing is set.
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

/// Converts the settings of a new container. Returns `None` if nothing is set.
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
    // With this flag, the kernel uses those of the nodes that are in the cpuset, also after the cpuset changes.
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
    fn malformed_fields_are_reported() {
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
    fn keeps_annotations_of_known_domains() {
        let keys = [
            "cpu-load-balancing.crio.io",
            "cpu-shared.crio.io/main",
            "crio.io",
            "db.numaward.io/placement",
            "example.com/a",
            "kubernetes.io/config.hash",
            "numaward.io/placement",
        ];
        let mut pod = messages::PodSandbox {
            annotations: keys.map(|key| (key.to_owned(), "disable".to_owned())).into(),
            ..messages::PodSandbox::default()
        };
        assert_eq!(pod.trim(), 0);
        let kept: Vec<_> = pod.annotations.keys().map(String::as_str).collect();
        assert_eq!(kept, [keys[0], keys[1], keys[3], keys[5], keys[6]]);

        // Many annotations of CRI-O take no room from those of numaward.
        pod.annotations.extend((0..9).map(|n| (format!("a{n}.crio.io"), "x".repeat(MAX_VALUE_BYTES))));
        assert!(pod.trim() > 0);
        assert!(pod.annotations.contains_key("numaward.io/placement"));
    }

    #[test]
    fn many_small_labels_are_limited() {
        let mut pod = messages::PodSandbox {
            labels: (0..10_000).map(|n| (format!("{n:x}"), String::new())).collect(),
            ..messages::PodSandbox::default()
        };
        let dropped = pod.trim();
        assert_eq!(pod.labels.len() + dropped, 10_000);
        assert!((300..=MAX_MAP_BYTES / ENTRY_BYTES).contains(&pod.labels.len()), "{}", pod.labels.len());
    }

    #[test]
    fn encodes_settings() {
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
    fn encodes_memory_policy() {
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
    fn unset_sets_stay_unchanged() {
        let only_mems = Settings { mems: Some("0".parse().unwrap()), ..Settings::default() };
        let cpu = settings(&only_mems).unwrap().cpu.unwrap();
        assert_eq!((cpu.cpus.as_str(), cpu.quota, cpu.period), ("", None, None));
    }
}

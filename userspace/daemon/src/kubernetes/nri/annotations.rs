//! Annotations of a pod for its placement.
//!
//! | annotation | values |
//! |---|---|
//! | `numaward.io/placement` | `auto` (the guarantee that its `QoS` class gets), `shared` (no exclusive CPUs, no memory on nodes), `off` (numaward changes nothing; only in namespaces that the configuration lists, elsewhere like `shared`) |
//! | `numaward.io/guarantee` | `auto`; `memory`: the memory request of a Burstable container is guaranteed on nodes, and the container is bound to them; `burstable`: the memory request is guaranteed on a home node, which follows the pod, and the container is not bound to it. `burstable` applies to all containers of the pod with a guarantee |
//! | `numaward.io/preferred-nodes` | list of nodes (`0-1`) that are preferred for it |
//! | `numaward.io/topology-policy` | `none`, `best-effort`, `restricted`, `single-numa-node` |
//! | `numaward.io/topology-scope` | `container`, `pod` |
//! | `numaward.io/tiers` | `attached`, `strict`: the use of memory-only nodes |
//! | `numaward.io/memory-tiers` | the kinds of memory that it may get: `dram`, `hbm`, `cxl`, separated by commas |
//! | `numaward.io/cpu-kinds` | the kinds that each of its exclusive CPUs must have: `performance`, `efficiency`, `high-frequency`, `isolated`, `nohz-full`, separated by commas |
//! | `numaward.io/with`, `numaward.io/apart` | workloads on the nodes to prefer or to avoid: pods as `namespace/name`, or labels as `key=value`, separated by commas |
//! | `numaward.io/memory-policy` | the memory policy by which the kernel chooses the node of a new page, within the nodes of the container: `bind`, `preferred-many`, `interleave`, `weighted-interleave` |
//! | `numaward.io/resctrl-class` | the class of L3 caches and memory bandwidth of its containers with a guarantee: a key of `resctrl.classes` of the configuration |
//! | `numaward.io/hide-siblings` | `true`: each of its exclusive CPUs is on a core of its own, and no workload may use the other threads of these cores |
//! | `numaward.io/same-cache` | `true`: its CPUs share a last-level cache if possible |
//! | `numaward.io/immovable` | `true`: it does not move after its first placement |
//!
//! The first three can also be set for one container: `CONTAINER.numaward.io/placement`, which overrides the value for the pod. All other
//! annotations apply to the whole pod. The annotations from `tiers` on need the strategy `native`, except `memory-policy` and
//! `resctrl-class`. `guarantee: burstable` needs it too.
//!
//! `hide-siblings` and `resctrl-class` use resources that no quota counts: they are allowed in namespaces that the configuration lists.
//!
//! An annotation with an invalid value or an unknown name is ignored, and the explanation of the decision reports it: a typing error in an
//! annotation must not keep a pod from running.
//!
//! Any user that may create a pod chooses these texts, up to the 256 KiB that Kubernetes allows. Limits apply to the texts that are parsed,
//! stored in the ledger and repeated in messages: [`MAX_VALUE_BYTES`], [`MAX_IGNORED_NOTES`], [`MAX_SHOWN_CHARS`].

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
};

use numaward_engine::{Terms, policy::MemoryPolicy};
use numaward_topology::{KernelRelease, NodeSet};

use super::memory_policy::since;

/// Message of a pod with `placement: off` in a namespace where that is not allowed.
pub(super) const OFF_IGNORED: &str = "numaward.io/placement: off counts as shared (kubernetes.placementOffNamespaces in \
    numaward's configuration does not list this namespace)";

/// Message of a pod in a namespace outside of `kubernetes.placementNamespaces`.
pub(super) const NAMESPACE_NOT_PLACED: &str = "not placed: kubernetes.placementNamespaces in numaward's configuration does not \
    list this namespace, so the pod counts as numaward.io/placement: shared";

/// The maximum length of a value, enough for about ten names of pods. A longer value is ignored.
const MAX_VALUE_BYTES: usize = 4096;
/// The maximum number of ignored annotations with a message. Of the remaining ones, only the number is reported.
const MAX_IGNORED_NOTES: usize = 16;
/// The number of characters of a key or a value that a message repeats.
const MAX_SHOWN_CHARS: usize = 80;

/// Value of the annotation `placement`, in the order of how little numaward does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub(super) enum PlacementAnnotation {
    /// The guarantee that the `QoS` class gets.
    #[default]
    Auto,
    /// No guarantee: the shared pool.
    Shared,
    /// numaward changes nothing.
    Off,
}

/// Value of the annotation `guarantee`: a guarantee that the `QoS` class alone does not get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub(super) enum ExtraGuarantee {
    #[default]
    #[strum(serialize = "auto")]
    None,
    /// The requested memory on nodes to which the container is bound.
    Memory,
    /// The requested memory on a home node to which the container is not bound.
    Burstable,
}

/// Annotations that apply to one container, with the defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ContainerWishes {
    pub(super) placement: PlacementAnnotation,
    pub(super) extra: ExtraGuarantee,
    pub(super) preferred_nodes: Option<NodeSet>,
}

/// Parsed annotations of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Annotations {
    pod: AnnotationValues,
    containers: BTreeMap<String, AnnotationValues>,
    /// The annotations for the whole pod.
    pub(super) terms: Terms,
    /// Messages about ignored annotations.
    pub(super) ignored: Vec<String>,
    /// True if `placement: off` is set and not allowed.
    pub(super) wants_off: bool,
}

/// Annotations that can be set for a pod and for one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct AnnotationValues {
    placement: Option<PlacementAnnotation>,
    extra: Option<ExtraGuarantee>,
    preferred_nodes: Option<NodeSet>,
}

/// Sets an optional field. Returns false for an invalid value (`None`).
fn set_option<T>(field: &mut Option<T>, value: Option<T>) -> bool {
    *field = value;
    field.is_some()
}

fn nodes(value: &str) -> Option<NodeSet> {
    value.parse().ok().filter(|nodes: &NodeSet| !nodes.is_empty())
}

/// Parses values that are separated by commas; `None` if one is invalid.
fn list<T: FromStr + Ord>(value: &str) -> Option<BTreeSet<T>> {
    value.split(',').map(|part| Some(part.trim()).filter(|part| !part.is_empty())?.parse().ok()).collect()
}

/// Parses names of workloads or labels; `None` for a label without a key.
fn names(value: &str) -> Option<BTreeSet<String>> {
    list(value).filter(|names: &BTreeSet<String>| names.iter().all(|name| !name.starts_with('=')))
}

/// Parses the name of a class, which need not exist.
fn class(value: &str) -> Option<String> {
    (1..=32).contains(&value.len()).then(|| value.to_owned())
}

/// Replaces a default. Returns false for an invalid value (`None`).
fn set<T>(field: &mut T, value: Option<T>) -> bool {
    let Some(value) = value else { return false };
    *field = value;
    true
}

/// Reads an annotation for the whole pod. Returns false for an invalid value, with the expected ones; `None` for an unknown name.
fn read_term(terms: &mut Terms, name: &str, value: &str) -> Option<(bool, &'static str)> {
    let named = "pods as namespace/name, or labels as key=value, separated by commas";
    Some(match name {
        "topology-policy" => (
            set_option(&mut terms.policy, value.parse().ok()),
            "none, best-effort, restricted or single-numa-node",
        ),
        "topology-scope" => (set_option(&mut terms.scope, value.parse().ok()), "container or pod"),
        "tiers" => (set_option(&mut terms.tiers, value.parse().ok()), "attached or strict"),
        "memory-tiers" => {
            (set(&mut terms.memory_tiers, list(value)), "dram, hbm or cxl, separated by commas")
        }
        "cpu-kinds" => (
            set(&mut terms.cpu_kinds, list(value)),
            "performance, efficiency, high-frequency, isolated or nohz-full, separated by commas",
        ),
        "with" => (set(&mut terms.with, names(value)), named),
        "apart" => (set(&mut terms.apart, names(value)), named),
        "memory-policy" => (
            set_option(&mut terms.memory_policy, value.parse().ok()),
            "bind, preferred-many, interleave or weighted-interleave",
        ),
        "resctrl-class" => (set_option(&mut terms.resctrl_class, class(value)), "the name of a class"),
        "hide-siblings" => (set(&mut terms.hide_siblings, value.parse().ok()), "true or false"),
        "same-cache" => (set(&mut terms.same_cache, value.parse().ok()), "true or false"),
        "immovable" => (set(&mut terms.immovable, value.parse().ok()), "true or false"),
        _ => return None,
    })
}

/// Returns the first characters of a text, for a message.
fn shown(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

impl Annotations {
    /// Reads the annotations of a pod. Annotations that are not for numaward are skipped.
    pub(super) fn read(annotations: &BTreeMap<String, String>) -> Self {
        let mut read = Self::default();
        let mut ignored = 0;
        for (key, value) in annotations {
            let Some((prefix, name)) = key.split_once('/') else { continue };
            let (container, target) = match prefix.strip_suffix("numaward.io") {
                Some("") => (None, &mut read.pod),
                Some(prefix) => match prefix.strip_suffix('.') {
                    Some(name) => (Some(name), read.containers.entry(name.to_owned()).or_default()),
                    None => continue,
                },
                None => continue,
            };
            let value = value.trim();
            let mut terms = read.terms.clone();
            let (is_valid, expected) = match (name, container) {
                _ if value.len() > MAX_VALUE_BYTES => (false, "at most 4096 bytes"),
                ("placement", _) => {
                    (set_option(&mut target.placement, value.parse().ok()), "auto, shared or off")
                }
                ("guarantee", _) => {
                    (set_option(&mut target.extra, value.parse().ok()), "auto, memory or burstable")
                }
                ("preferred-nodes", _) => {
                    (set_option(&mut target.preferred_nodes, nodes(value)), "a list of nodes such as 0-1")
                }
                (name, container) => match (container, read_term(&mut terms, name, value)) {
                    (None, Some(result)) => {
                        read.terms = terms;
                        result
                    }
                    (Some(_), Some(_)) => (false, "this annotation for the whole pod only"),
                    (_, None) => (false, "the name of an annotation that numaward has"),
                },
            };
            if is_valid {
                continue;
            }
            ignored += 1;
            if ignored <= MAX_IGNORED_NOTES {
                let (key, value) = (shown(key), shown(value));
                let note = format!("the annotation {key}: {value:?} is ignored (expected {expected})");
                read.ignored.push(note);
            }
        }
        if ignored > MAX_IGNORED_NOTES {
            read.ignored.push(format!("{} more annotations are ignored", ignored - MAX_IGNORED_NOTES));
        }
        let both: Vec<String> = read.terms.with.intersection(&read.terms.apart).cloned().collect();
        if !both.is_empty() {
            read.terms.apart.retain(|name| !both.contains(name));
            let names = both.join(", ");
            read.ignored.push(format!(
                "numaward.io/apart: {:?} is ignored (numaward.io/with names it too)",
                shown(&names)
            ));
        }
        read
    }

    /// Ignores `guarantee: burstable`, which the strategy `kubelet` does not have.
    #[must_use]
    pub(super) fn without_burstable(mut self) -> Self {
        let mut is_given = false;
        for given in self.containers.values_mut().chain([&mut self.pod]) {
            is_given |= given.extra.take_if(|extra| *extra == ExtraGuarantee::Burstable).is_some();
        }
        if is_given {
            self.ignored.push(
                "numaward.io/guarantee: burstable is ignored (it needs the strategy native)".to_owned(),
            );
        }
        self
    }

    /// Ignores a memory policy that a kernel of this release does not have: the container could not start with it. `None` is an unknown
    /// release.
    #[must_use]
    pub(super) fn for_kernel(mut self, kernel: Option<KernelRelease>) -> Self {
        let is_newer = |policy: &mut MemoryPolicy| kernel.is_none_or(|kernel| kernel < since(*policy));
        if let Some(policy) = self.terms.memory_policy.take_if(is_newer) {
            self.ignored.push(format!(
                "numaward.io/memory-policy: {policy} is ignored (it needs Linux {} or newer)",
                since(policy)
            ));
        }
        self
    }

    /// Replaces `placement: off` by `shared`, for a namespace that may not opt out.
    #[must_use]
    pub(super) fn without_off(mut self) -> Self {
        for given in self.containers.values_mut().chain([&mut self.pod]) {
            if given.placement == Some(PlacementAnnotation::Off) {
                given.placement = Some(PlacementAnnotation::Shared);
                self.wants_off = true;
            }
        }
        if self.wants_off {
            self.ignored.push(OFF_IGNORED.to_owned());
        }
        self
    }

    /// Replaces every placement but `off` by `shared`, for a namespace outside of `kubernetes.placementNamespaces`.
    #[must_use]
    pub(super) fn without_placement(mut self) -> Self {
        for given in self.containers.values_mut() {
            given.placement = given.placement.map(|placement| placement.max(PlacementAnnotation::Shared));
        }
        self.pod.placement = self.pod.placement.max(Some(PlacementAnnotation::Shared));
        self.ignored.push(NAMESPACE_NOT_PLACED.to_owned());
        self
    }

    /// Ignores annotations for resources that no quota counts, for a namespace that may not have them.
    #[must_use]
    pub(super) fn without_beyond_quota(mut self) -> Self {
        let given = [
            ("hide-siblings", std::mem::take(&mut self.terms.hide_siblings)),
            ("resctrl-class", self.terms.resctrl_class.take().is_some()),
        ];
        for (name, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
            self.ignored.push(format!(
                "numaward.io/{name} is ignored (kubernetes.beyondQuotaNamespaces in numaward's configuration does not list this namespace)"
            ));
        }
        self
    }

    /// Returns the annotations that apply to a container.
    pub(super) fn for_container(&self, container: &str) -> ContainerWishes {
        let none = AnnotationValues::default();
        let (own, pod) = (self.containers.get(container).unwrap_or(&none), &self.pod);
        ContainerWishes {
            placement: own.placement.or(pod.placement).unwrap_or_default(),
            extra: own.extra.or(pod.extra).unwrap_or_default(),
            preferred_nodes: own.preferred_nodes.as_ref().or(pod.preferred_nodes.as_ref()).cloned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::policy::{
        CpuKind, MemoryPolicy, MemoryTier, Tiers, TopologyManagerPolicy, TopologyManagerScope,
    };

    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Annotations {
        Annotations::read(
            &annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        )
    }

    #[test]
    fn container_overrides_its_pod() {
        let read = read(&[
            ("numaward.io/placement", "shared"),
            ("numaward.io/preferred-nodes", "0-1"),
            ("numaward.io/topology-policy", "single-numa-node"),
            ("db.numaward.io/placement", "auto"),
            ("db.numaward.io/guarantee", "memory"),
            ("log.numaward.io/placement", "off"),
            ("example.org/placement", "off"),
            ("unrelated", "x"),
        ]);
        assert_eq!(read.ignored, [""; 0]);
        assert_eq!(read.terms.policy, Some(TopologyManagerPolicy::SingleNumaNode));
        let (db, log, other) =
            (read.for_container("db"), read.for_container("log"), read.for_container("other"));
        assert_eq!((db.placement, db.extra), (PlacementAnnotation::Auto, ExtraGuarantee::Memory));
        assert_eq!((log.placement, log.extra), (PlacementAnnotation::Off, ExtraGuarantee::None));
        assert_eq!(other.placement, PlacementAnnotation::Shared);
        assert_eq!(other.preferred_nodes, Some("0-1".parse().unwrap()));
    }

    #[test]
    fn reads_annotations_of_the_whole_pod() {
        let read = read(&[
            ("numaward.io/topology-scope", "pod"),
            ("numaward.io/tiers", "strict"),
            ("numaward.io/memory-tiers", "dram, hbm"),
            ("numaward.io/cpu-kinds", "high-frequency, nohz-full"),
            ("numaward.io/with", "shop/db-0"),
            ("numaward.io/apart", "app=batch, shop/cache"),
            ("numaward.io/hide-siblings", "true"),
            ("numaward.io/same-cache", "true"),
            ("numaward.io/immovable", "false"),
            ("numaward.io/guarantee", "burstable"),
            ("numaward.io/resctrl-class", "batch"),
            ("numaward.io/memory-policy", "preferred-many"),
        ]);
        assert_eq!(read.ignored, [""; 0]);
        let expected = Terms {
            memory_policy: Some(MemoryPolicy::PreferredMany),
            resctrl_class: Some("batch".to_owned()),
            scope: Some(TopologyManagerScope::Pod),
            tiers: Some(Tiers::Strict),
            memory_tiers: [MemoryTier::Dram, MemoryTier::Hbm].into(),
            cpu_kinds: [CpuKind::HighFrequency, CpuKind::NohzFull].into(),
            with: ["shop/db-0".to_owned()].into(),
            apart: ["app=batch".to_owned(), "shop/cache".to_owned()].into(),
            hide_siblings: true,
            same_cache: true,
            ..Terms::default()
        };
        assert_eq!(
            (read.terms.clone(), read.for_container("db").extra),
            (expected, ExtraGuarantee::Burstable)
        );
    }

    #[test]
    fn reports_ignored_annotations() {
        for (key, value, expected) in [
            ("numaward.io/placement", "maybe", "auto, shared or off"),
            ("numaward.io/guarantee", "cpu", "auto, memory or burstable"),
            ("numaward.io/topology-scope", "node", "container or pod"),
            ("numaward.io/tiers", "loose", "attached or strict"),
            ("numaward.io/memory-tiers", "dram,tape", "dram, hbm or cxl"),
            (
                "numaward.io/cpu-kinds",
                "fast",
                "performance, efficiency, high-frequency, isolated or nohz-full",
            ),
            ("numaward.io/with", "a,,b", "namespace/name"),
            ("numaward.io/apart", "=x", "namespace/name"),
            ("numaward.io/immovable", "yes", "true or false"),
            ("numaward.io/resctrl-class", "", "the name of a class"),
            ("numaward.io/memory-policy", "MPOL_BIND", "interleave or weighted-interleave"),
            ("db.numaward.io/memory-policy", "bind", "the whole pod only"),
            ("db.numaward.io/with", "a", "the whole pod only"),
            ("numaward.io/preferred-nodes", "", "a list of nodes"),
            ("numaward.io/preferred-nodes", "1-0", "a list of nodes"),
            ("numaward.io/topology-policy", "strict", "single-numa-node"),
            ("db.numaward.io/topology-policy", "none", "the whole pod only"),
            ("numaward.io/place", "off", "the name of an annotation"),
        ] {
            let read = read(&[(key, value)]);
            assert!(matches!(&read.ignored[..], [text] if text.contains(key) && text.contains(expected)));
            assert_eq!(
                (read.for_container("db"), read.terms),
                (ContainerWishes::default(), Terms::default()),
                "{key}: {value}"
            );
        }
    }

    #[test]
    fn annotations_are_bounded() {
        // Each range is short, and expands to many nodes.
        let ranges = "0-65535,".repeat(1 << 15);
        let names = vec!["shop/db"; 1 << 15].join(",");
        let many: Vec<_> = (0..1000).map(|number| (format!("c{number}.numaward.io/place"), "x")).collect();
        let mut given = vec![
            ("numaward.io/preferred-nodes", ranges.as_str()),
            ("numaward.io/with", names.as_str()),
            ("numaward.io/apart", "a\nb"),
        ];
        given.extend(many.iter().map(|(key, value)| (key.as_str(), *value)));
        let read = read(&given);
        let apart = ["a\nb".to_owned()].into();
        assert_eq!(
            (read.for_container("db"), &read.terms),
            (ContainerWishes::default(), &Terms { apart, ..Terms::default() })
        );
        assert_eq!(read.ignored.len(), MAX_IGNORED_NOTES + 1);
        assert_eq!(
            read.ignored.last().unwrap(),
            &format!("{} more annotations are ignored", 1002 - MAX_IGNORED_NOTES)
        );
        assert!(read.ignored.iter().all(|text| text.len() < 400), "{:?}", read.ignored);
    }

    #[test]
    fn with_overrides_apart() {
        let read = read(&[("numaward.io/with", "shop/db"), ("numaward.io/apart", "app=batch,shop/db")]);
        assert_eq!(read.terms.apart, ["app=batch".to_owned()].into());
        assert!(matches!(&read.ignored[..], [text] if text.contains("shop/db")), "{:?}", read.ignored);
    }

    #[test]
    fn off_counts_as_shared_unless_allowed() {
        let given = read(&[("numaward.io/placement", "off"), ("db.numaward.io/placement", "auto")]);
        let read = given.without_off();
        assert_eq!(
            (read.for_container("db").placement, read.for_container("web").placement),
            (PlacementAnnotation::Auto, PlacementAnnotation::Shared)
        );
        assert!(read.wants_off && read.ignored == [OFF_IGNORED], "{:?}", read.ignored);
        let other = Annotations::default().without_off();
        assert!(!other.wants_off && other.ignored.is_empty());
    }

    #[test]
    fn unlisted_namespace_counts_as_shared() {
        let placements = |annotations: &[(&str, &str)]| {
            let read = read(annotations).without_placement();
            assert_eq!(read.ignored, [NAMESPACE_NOT_PLACED]);
            ["db", "web"].map(|name| read.for_container(name).placement)
        };
        assert_eq!(placements(&[]), [PlacementAnnotation::Shared; 2]);
        let both = [("numaward.io/placement", "auto"), ("db.numaward.io/placement", "off")];
        assert_eq!(placements(&both), [PlacementAnnotation::Off, PlacementAnnotation::Shared]);
        // The annotation of the pod counts for a container with another annotation.
        let off = [("numaward.io/placement", "off"), ("db.numaward.io/guarantee", "memory")];
        assert_eq!(placements(&off), [PlacementAnnotation::Off; 2]);
        assert_eq!(placements(&[("db.numaward.io/placement", "auto")]), [PlacementAnnotation::Shared; 2]);
    }

    #[test]
    fn strategy_kubelet_ignores_burstable() {
        let given = read(&[("numaward.io/guarantee", "memory"), ("db.numaward.io/guarantee", "burstable")]);
        let read = given.without_burstable();
        assert_eq!(
            (read.for_container("db").extra, read.for_container("web").extra),
            (ExtraGuarantee::Memory, ExtraGuarantee::Memory)
        );
        assert_eq!(read.ignored.len(), 1);
    }

    #[test]
    fn ignores_policy_of_newer_kernels() {
        for (policy, kernel, is_kept) in [
            ("weighted-interleave", KernelRelease::new(6, 9), true),
            ("weighted-interleave", KernelRelease::new(6, 8), false),
            ("preferred-many", KernelRelease::new(5, 15), true),
            ("preferred-many", KernelRelease::new(5, 10), false),
            ("interleave", KernelRelease::new(2, 6), true),
        ] {
            let read = read(&[("numaward.io/memory-policy", policy)]).for_kernel(Some(kernel));
            assert_eq!(read.terms.memory_policy.is_some(), is_kept, "{policy}, {kernel:?}");
            assert_eq!(read.ignored.len(), usize::from(!is_kept), "{:?}", read.ignored);
        }
    }
}

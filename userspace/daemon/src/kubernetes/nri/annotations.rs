//! What a pod says about its placement: annotations.
//!
//! | annotation | values |
//! |---|---|
//! | `numaward.io/placement` | `auto` (what its class of service deserves), `shared` (no exclusive CPUs, no memory on nodes), `off` (not touched at all; only in namespaces that the configuration lists, else like `shared`) |
//! | `numaward.io/guarantee` | `auto`; `memory`: the memory that a Burstable container requests is promised on nodes, and bound to them; `burstable`: it is promised on a home node, which follows the pod, and not bound to it. That holds for all containers of the pod with a promise |
//! | `numaward.io/preferred-nodes` | nodes as a list (`0-1`) on which it should be if it can |
//! | `numaward.io/topology-policy` | `none`, `best-effort`, `restricted`, `single-numa-node` |
//! | `numaward.io/topology-scope` | `container`, `pod` |
//! | `numaward.io/tiers` | `attached`, `strict`: how memory-only nodes count |
//! | `numaward.io/memory-tiers` | the only sorts of memory that it takes: `dram`, `hbm`, `cxl`, with commas |
//! | `numaward.io/cpu-kinds` | the kinds that each of its exclusive CPUs must be of: `performance`, `efficiency`, `high-frequency`, `isolated`, `nohz-full`, with commas |
//! | `numaward.io/with`, `numaward.io/apart` | workloads on whose nodes it would like to be, or not to be: a pod as `namespace/name`, any by a label as `key=value`, with commas |
//! | `numaward.io/memory-policy` | how the kernel chooses among the nodes of each of its containers for a new page: `bind`, `preferred-many`, `interleave`, `weighted-interleave` |
//! | `numaward.io/resctrl-class` | the class of L3 caches and memory bandwidth of its containers that are promised something: one of `resctrl.classes` of the configuration |
//! | `numaward.io/hide-siblings` | `true`: each of its exclusive CPUs is of a different core, and nobody may use the other threads of these cores |
//! | `numaward.io/same-cache` | `true`: CPUs that share a last-level cache where possible |
//! | `numaward.io/immovable` | `true`: it stays where it is placed first |
//!
//! The first three can be given for one container too, in front: `CONTAINER.numaward.io/placement`. That counts more than
//! the pod's. The others are of the whole pod. Those from `tiers` on need the strategy `native`, all but `memory-policy` and
//! `resctrl-class`. So does `guarantee: burstable`.
//!
//! `hide-siblings` and `resctrl-class` take more from others than a quota counts: they are for namespaces that the configuration lists.
//!
//! A value that cannot be understood, or a name that does not exist, counts as not given, and the explanation of
//! the decision says so: a typing error in an annotation must not keep a pod from running.
//!
//! Who may make a pod chooses these texts, up to the 256 KiB that Kubernetes allows. What is read, kept in the ledger and
//! repeated in messages is bounded: [`LONGEST_VALUE`], [`MOST_IGNORED`], [`SHOWN`].

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
};

use numaward_engine::{Terms, policy::MemoryPolicy};
use numaward_topology::{KernelRelease, NodeSet};

use super::memory_policy::since;

/// What is said where `placement: off` is not allowed.
pub(super) const OFF_IGNORED: &str = "numaward.io/placement: off counts as shared (kubernetes.placementOffNamespaces in \
    numaward's configuration does not list this namespace)";

/// A longer value counts as not understood. It has room for some ten names of pods.
const LONGEST_VALUE: usize = 4096;
/// Of more that is ignored, only the number is said.
const MOST_IGNORED: usize = 16;
/// How many characters of a key or a value are repeated.
const SHOWN: usize = 80;

/// Whether something is promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Placement {
    /// What the class of service deserves.
    #[default]
    Auto,
    /// Only a share of what is nobody's.
    Shared,
    /// Left alone.
    Off,
}

/// What is promised beyond what the class of service deserves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Extra {
    /// Nothing.
    #[default]
    #[strum(serialize = "auto")]
    None,
    /// Memory on nodes, as much as is requested.
    Memory,
    /// The same, on a home node to which it is not bound.
    Burstable,
}

/// What is wished for one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wishes {
    pub(super) placement: Placement,
    pub(super) extra: Extra,
    pub(super) preferred_nodes: Option<NodeSet>,
}

/// What a pod's annotations say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Annotations {
    pod: Given,
    containers: BTreeMap<String, Given>,
    /// What the pod as a whole wants.
    pub(super) terms: Terms,
    /// What could not be understood, in sentences.
    pub(super) ignored: Vec<String>,
    /// Whether `placement: off` is given where it is not allowed.
    pub(super) wants_off: bool,
}

/// What is given for a pod or for one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Given {
    placement: Option<Placement>,
    extra: Option<Extra>,
    preferred_nodes: Option<NodeSet>,
}

/// Takes a value; says whether it is one.
fn take<T>(field: &mut Option<T>, value: Option<T>) -> bool {
    *field = value;
    field.is_some()
}

fn nodes(value: &str) -> Option<NodeSet> {
    value.parse().ok().filter(|nodes: &NodeSet| !nodes.is_empty())
}

/// Values with commas between them; none if one is none.
fn list<T: FromStr + Ord>(value: &str) -> Option<BTreeSet<T>> {
    value.split(',').map(|part| Some(part.trim()).filter(|part| !part.is_empty())?.parse().ok()).collect()
}

/// Names of workloads or labels; a label without a key names nothing.
fn names(value: &str) -> Option<BTreeSet<String>> {
    list(value).filter(|names: &BTreeSet<String>| names.iter().all(|name| !name.starts_with('=')))
}

/// The name of a class, which may be unknown.
fn class(value: &str) -> Option<String> {
    (1..=32).contains(&value.len()).then(|| value.to_owned())
}

/// Takes what replaces a default; says whether it is one.
fn set<T>(field: &mut T, value: Option<T>) -> bool {
    let Some(value) = value else { return false };
    *field = value;
    true
}

/// Takes what a whole pod wants: whether it is understood, and what is expected. `None`: there is no such name.
fn take_term(terms: &mut Terms, name: &str, value: &str) -> Option<(bool, &'static str)> {
    let named = "pods as namespace/name, or labels as key=value, with commas between them";
    Some(match name {
        "topology-policy" => {
            (take(&mut terms.policy, value.parse().ok()), "none, best-effort, restricted or single-numa-node")
        }
        "topology-scope" => (take(&mut terms.scope, value.parse().ok()), "container or pod"),
        "tiers" => (take(&mut terms.tiers, value.parse().ok()), "attached or strict"),
        "memory-tiers" => {
            (set(&mut terms.memory_tiers, list(value)), "dram, hbm or cxl, with commas between")
        }
        "cpu-kinds" => (
            set(&mut terms.cpu_kinds, list(value)),
            "performance, efficiency, high-frequency, isolated or nohz-full, with commas between",
        ),
        "with" => (set(&mut terms.with, names(value)), named),
        "apart" => (set(&mut terms.apart, names(value)), named),
        "memory-policy" => (
            take(&mut terms.memory_policy, value.parse().ok()),
            "bind, preferred-many, interleave or weighted-interleave",
        ),
        "resctrl-class" => (take(&mut terms.resctrl_class, class(value)), "the name of a class"),
        "hide-siblings" => (set(&mut terms.hide_siblings, value.parse().ok()), "true or false"),
        "same-cache" => (set(&mut terms.same_cache, value.parse().ok()), "true or false"),
        "immovable" => (set(&mut terms.immovable, value.parse().ok()), "true or false"),
        _ => return None,
    })
}

/// The beginning of a text of others.
fn shown(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

impl Annotations {
    /// Reads a pod's annotations; those of others are passed over.
    pub(super) fn read(annotations: &BTreeMap<String, String>) -> Self {
        let mut read = Self::default();
        let mut ignored = 0;
        for (key, value) in annotations {
            let Some((prefix, name)) = key.split_once('/') else { continue };
            let (container, target) = match prefix.strip_suffix("numaward.io") {
                Some("") => (None, &mut read.pod),
                Some(prefix) => match prefix.strip_suffix('.') {
                    Some(of) => (Some(of), read.containers.entry(of.to_owned()).or_default()),
                    None => continue,
                },
                None => continue,
            };
            let value = value.trim();
            let mut terms = read.terms.clone();
            let (is_taken, expected) = match (name, container) {
                _ if value.len() > LONGEST_VALUE => (false, "at most 4096 bytes"),
                ("placement", _) => (take(&mut target.placement, value.parse().ok()), "auto, shared or off"),
                ("guarantee", _) => {
                    (take(&mut target.extra, value.parse().ok()), "auto, memory or burstable")
                }
                ("preferred-nodes", _) => {
                    (take(&mut target.preferred_nodes, nodes(value)), "a list of nodes such as 0-1")
                }
                (name, of) => match (of, take_term(&mut terms, name, value)) {
                    (None, Some(taken)) => {
                        read.terms = terms;
                        taken
                    }
                    (Some(_), Some(_)) => (false, "this annotation for the whole pod only"),
                    (_, None) => (false, "the name of an annotation that numaward has"),
                },
            };
            if is_taken {
                continue;
            }
            ignored += 1;
            if ignored <= MOST_IGNORED {
                let (key, value) = (shown(key), shown(value));
                let why = format!("the annotation {key}: {value:?} is ignored (expected {expected})");
                read.ignored.push(why);
            }
        }
        if ignored > MOST_IGNORED {
            read.ignored.push(format!("{} more annotations are ignored", ignored - MOST_IGNORED));
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

    /// Takes `guarantee: burstable` as not given: the strategy `kubelet` does not know it.
    #[must_use]
    pub(super) fn without_burstable(mut self) -> Self {
        let mut is_given = false;
        for given in self.containers.values_mut().chain([&mut self.pod]) {
            is_given |= given.extra.take_if(|extra| *extra == Extra::Burstable).is_some();
        }
        if is_given {
            self.ignored.push(
                "numaward.io/guarantee: burstable is ignored (it needs the strategy native)".to_owned(),
            );
        }
        self
    }

    /// Takes a memory policy as not given that a kernel of this release does not have: the container could not start.
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

    /// Takes `placement: off` for `shared`: this namespace may not opt out.
    #[must_use]
    pub(super) fn without_off(mut self) -> Self {
        for given in self.containers.values_mut().chain([&mut self.pod]) {
            if given.placement == Some(Placement::Off) {
                given.placement = Some(Placement::Shared);
                self.wants_off = true;
            }
        }
        if self.wants_off {
            self.ignored.push(OFF_IGNORED.to_owned());
        }
        self
    }

    /// Takes as not given what gives a pod more than a quota counts: this namespace may not have it.
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

    /// What is wished for a container.
    pub(super) fn of(&self, container: &str) -> Wishes {
        let none = Given::default();
        let (own, pod) = (self.containers.get(container).unwrap_or(&none), &self.pod);
        Wishes {
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
    fn a_container_overrides_its_pod() {
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
        let (db, log, other) = (read.of("db"), read.of("log"), read.of("other"));
        assert_eq!((db.placement, db.extra), (Placement::Auto, Extra::Memory));
        assert_eq!((log.placement, log.extra), (Placement::Off, Extra::None));
        assert_eq!(other.placement, Placement::Shared);
        assert_eq!(other.preferred_nodes, Some("0-1".parse().unwrap()));
    }

    #[test]
    fn a_pod_says_how_it_wants_to_be_placed() {
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
        assert_eq!((read.terms.clone(), read.of("db").extra), (expected, Extra::Burstable));
    }

    #[test]
    fn what_is_not_understood_is_ignored_and_told() {
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
            assert_eq!((read.of("db"), read.terms), (Wishes::default(), Terms::default()), "{key}: {value}");
        }
    }

    #[test]
    fn what_a_pod_says_is_bounded() {
        // Each range is short to write and long to work through.
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
        assert_eq!((read.of("db"), &read.terms), (Wishes::default(), &Terms { apart, ..Terms::default() }));
        assert_eq!(read.ignored.len(), MOST_IGNORED + 1);
        assert_eq!(
            read.ignored.last().unwrap(),
            &format!("{} more annotations are ignored", 1002 - MOST_IGNORED)
        );
        assert!(read.ignored.iter().all(|text| text.len() < 400), "{:?}", read.ignored);
    }

    #[test]
    fn what_it_wants_to_be_with_it_cannot_be_apart_from() {
        let read = read(&[("numaward.io/with", "shop/db"), ("numaward.io/apart", "app=batch,shop/db")]);
        assert_eq!(read.terms.apart, ["app=batch".to_owned()].into());
        assert!(matches!(&read.ignored[..], [text] if text.contains("shop/db")), "{:?}", read.ignored);
    }

    #[test]
    fn off_counts_as_shared_where_it_is_not_allowed() {
        let given = read(&[("numaward.io/placement", "off"), ("db.numaward.io/placement", "auto")]);
        let read = given.without_off();
        assert_eq!((read.of("db").placement, read.of("web").placement), (Placement::Auto, Placement::Shared));
        assert!(read.wants_off && read.ignored == [OFF_IGNORED], "{:?}", read.ignored);
        let other = Annotations::default().without_off();
        assert!(!other.wants_off && other.ignored.is_empty());
    }

    #[test]
    fn burstable_is_as_if_not_given_where_the_strategy_does_not_know_it() {
        let given = read(&[("numaward.io/guarantee", "memory"), ("db.numaward.io/guarantee", "burstable")]);
        let read = given.without_burstable();
        assert_eq!((read.of("db").extra, read.of("web").extra), (Extra::Memory, Extra::Memory));
        assert_eq!(read.ignored.len(), 1);
    }

    #[test]
    fn a_policy_of_newer_kernels_is_as_if_not_given() {
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

//! What a pod says about its placement: annotations.
//!
//! | annotation | values |
//! |---|---|
//! | `numaward.io/placement` | `auto` (what its class of service deserves), `shared` (no exclusive CPUs, no memory on nodes), `off` (not touched at all) |
//! | `numaward.io/guarantee` | `auto`, `memory`: the memory that a Burstable container requests is promised on nodes |
//! | `numaward.io/preferred-nodes` | nodes as a list (`0-1`) on which it should be if it can |
//! | `numaward.io/topology-policy` | `none`, `best-effort`, `restricted`, `single-numa-node`; of the whole pod |
//!
//! Each but the last can be given for one container too, in front: `CONTAINER.numaward.io/placement`. That
//! counts more than the pod's.
//!
//! A value that cannot be understood, or a name that does not exist, counts as not given, and the explanation of
//! the decision says so: a typing error in an annotation must not keep a pod from running.

use std::collections::BTreeMap;

use numaward_engine::policy::TopologyManagerPolicy;
use numaward_topology::NodeSet;

/// Whether something is promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Extra {
    /// Nothing.
    #[default]
    None,
    /// Memory on nodes, as much as is requested.
    Memory,
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
    pub(super) policy: Option<TopologyManagerPolicy>,
    /// What could not be understood, in sentences.
    pub(super) ignored: Vec<String>,
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

fn placement(value: &str) -> Option<Placement> {
    match value {
        "auto" => Some(Placement::Auto),
        "shared" => Some(Placement::Shared),
        "off" => Some(Placement::Off),
        _ => None,
    }
}

fn extra(value: &str) -> Option<Extra> {
    match value {
        "auto" => Some(Extra::None),
        "memory" => Some(Extra::Memory),
        _ => None,
    }
}

fn nodes(value: &str) -> Option<NodeSet> {
    value.parse().ok().filter(|nodes: &NodeSet| !nodes.is_empty())
}

impl Annotations {
    /// Reads a pod's annotations; those of others are passed over.
    pub(super) fn read(annotations: &BTreeMap<String, String>) -> Self {
        let mut read = Self::default();
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
            let (is_taken, expected) = match (name, container) {
                ("placement", _) => (take(&mut target.placement, placement(value)), "auto, shared or off"),
                ("guarantee", _) => (take(&mut target.extra, extra(value)), "auto or memory"),
                ("preferred-nodes", _) => {
                    (take(&mut target.preferred_nodes, nodes(value)), "a list of nodes such as 0-1")
                }
                ("topology-policy", None) => (
                    take(&mut read.policy, value.parse().ok()),
                    "none, best-effort, restricted or single-numa-node",
                ),
                ("topology-policy", Some(_)) => (false, "this annotation for the whole pod only"),
                _ => (false, "placement, guarantee, preferred-nodes or topology-policy as its name"),
            };
            if !is_taken {
                let ignored = format!("the annotation {key}: {value:?} is ignored (expected {expected})");
                read.ignored.push(ignored);
            }
        }
        read
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
        assert_eq!(read.policy, Some(TopologyManagerPolicy::SingleNumaNode));
        let (db, log, other) = (read.of("db"), read.of("log"), read.of("other"));
        assert_eq!((db.placement, db.extra), (Placement::Auto, Extra::Memory));
        assert_eq!((log.placement, log.extra), (Placement::Off, Extra::None));
        assert_eq!(other.placement, Placement::Shared);
        assert_eq!(other.preferred_nodes, Some("0-1".parse().unwrap()));
    }

    #[test]
    fn what_is_not_understood_is_ignored_and_told() {
        for (key, value, expected) in [
            ("numaward.io/placement", "maybe", "auto, shared or off"),
            ("numaward.io/guarantee", "cpu", "auto or memory"),
            ("numaward.io/preferred-nodes", "", "a list of nodes"),
            ("numaward.io/preferred-nodes", "1-0", "a list of nodes"),
            ("numaward.io/topology-policy", "strict", "single-numa-node"),
            ("db.numaward.io/topology-policy", "none", "the whole pod only"),
            ("numaward.io/place", "off", "as its name"),
        ] {
            let read = read(&[(key, value)]);
            assert!(matches!(&read.ignored[..], [text] if text.contains(key) && text.contains(expected)));
            assert_eq!((read.of("db"), read.policy), (Wishes::default(), None), "{key}: {value}");
        }
    }
}

//! Weights of nodes for the memory policy weighted-interleave.
//!
//! Problem: on a machine whose nodes have memory of different bandwidth, pages that are spread evenly are as slow as the
//! slowest node. The kernel spreads them by weights, which are those of the host and 1 each unless somebody sets them.
//!
//! Terms: the *weight* of a node is how many pages in turn are put there, 1 to 255. `auto` is the kernel's own choice of all
//! weights (since Linux 6.16), which ends as soon as somebody writes one. [`Held`] is what was found of a node and what was
//! written instead. A node is *given up* where somebody else wrote its weight since.
//!
//! Algorithm: [`Weights::look`] reads the files, [`by_bandwidth`] computes weights, [`plan`] decides, and
//! [`Weights::write`] writes and reads back.
//!
//! Invariants: what holds neither what was written nor what was found before the write is somebody else's, and is not written
//! any more: neither anew nor back. Where somebody else switched `auto` on, all weights are theirs. `auto` is switched on
//! again only where it was on and nothing was given up.
//!
//! Sources: Documentation/ABI/testing/sysfs-kernel-mm-mempolicy-weighted-interleave, Documentation/admin-guide/mm/numaperf.rst,
//! `mm/mempolicy.c`.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs::{self, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use numaward_topology::{NodeId, NodeSet};
use serde::{Deserialize, Serialize};

/// Where the weights are, from the host's root.
pub const WEIGHTS: &str = "sys/kernel/mm/mempolicy/weighted_interleave";
/// Where nodes are, from the host's root.
const NODES: &str = "sys/devices/system/node";
/// About what weights by bandwidth sum up to before they are made smaller: what the kernel takes for its own, too.
const SUM: u64 = 32;

/// The weights that nodes are to have.
pub type Wanted = BTreeMap<NodeId, u8>;

/// What was found of a node's weight, and what was written instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Held {
    /// What was found.
    pub found: u8,
    /// What was written.
    pub written: u8,
    /// What it was before the write, which it still is if the daemon died before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<u8>,
    /// Whether somebody else wrote it since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_given_up: bool,
}

impl Held {
    /// Whether this is what we left there.
    fn is(self, weight: u8) -> bool {
        self.written == weight || self.before == Some(weight)
    }
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldWeights {
    /// By node.
    #[serde(default)]
    pub nodes: BTreeMap<NodeId, Held>,
    /// Whether the kernel chose all weights by itself before, and may do so again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_auto: bool,
}

impl HeldWeights {
    /// Whether nothing was written that is still to be known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The weights that are as configured, by node.
    pub fn now(&self) -> Wanted {
        let held = self.nodes.iter().filter(|(_, of)| !of.is_given_up);
        held.map(|(node, of)| (*node, of.written)).collect()
    }
}

/// What the files hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The weights, by node.
    pub weights: Wanted,
    /// Those that cannot be read, and why.
    pub unreadable: BTreeMap<NodeId, String>,
    /// Whether the kernel chooses them by itself. No kernel before Linux 6.16 does.
    pub is_auto: bool,
}

/// What is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// The weight of a node.
    Weight {
        /// The node.
        node: NodeId,
        /// Its weight.
        weight: u8,
        /// Whether that is what was found.
        is_back: bool,
    },
    /// The kernel is to choose all weights by itself again.
    Auto,
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What is to be written, in this order.
    pub writes: Vec<Write>,
    /// What is to be known of it before.
    pub held: HeldWeights,
    /// What somebody else wrote: the weights that these nodes have now.
    pub foreign: Wanted,
}

/// A weight was not written.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// The kernel refuses, or the daemon may not.
    #[error("{path} cannot be written: {source}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel took something else.
    #[error("{path}: it holds {found:?} after {wanted:?} was written")]
    Different {
        /// The file.
        path: PathBuf,
        /// What was written.
        wanted: String,
        /// What it holds.
        found: String,
    },
}

/// The weights of a host.
#[derive(Clone, Debug)]
pub struct Weights {
    root: PathBuf,
}

impl Weights {
    /// Those of the host with this root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Whether this kernel has such weights.
    pub fn is_here(&self) -> bool {
        self.root.join(WEIGHTS).is_dir()
    }

    /// The file with the weight of a node, from the host's root.
    pub fn file(node: NodeId) -> String {
        format!("{WEIGHTS}/node{node}")
    }

    /// The nodes that have memory; else why it is not known.
    pub fn nodes(&self) -> Result<NodeSet, String> {
        let path = self.root.join(NODES).join("has_memory");
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        text.trim().parse().map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Reads the weights of these nodes.
    pub fn look(&self, nodes: impl Iterator<Item = NodeId>) -> Seen {
        let mut seen = Seen::default();
        for node in nodes {
            let path = self.root.join(Self::file(node));
            let reason = match fs::read_to_string(&path) {
                Ok(text) => {
                    if let Ok(weight) = text.trim().parse() {
                        seen.weights.insert(node, weight);
                        continue;
                    }
                    format!("{} holds no weight: {:?}", path.display(), text.trim())
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => format!("{} cannot be read: {error}", path.display()),
            };
            seen.unreadable.insert(node, reason);
        }
        let auto = fs::read_to_string(self.root.join(WEIGHTS).join("auto"));
        seen.is_auto = auto.is_ok_and(|text| text.trim() == "true");
        seen
    }

    /// The bandwidth of each of these nodes' memory in MB/s: the lesser of reading and writing, from the CPUs that are nearest.
    /// Else the nodes of which the firmware reports none.
    pub fn bandwidths(&self, nodes: &NodeSet) -> Result<BTreeMap<NodeId, u64>, NodeSet> {
        let (mut known, mut unknown) = (BTreeMap::new(), NodeSet::new());
        for node in nodes.iter() {
            let of = |what: &str| {
                let path = format!("{NODES}/node{node}/access0/initiators/{what}_bandwidth");
                let text = fs::read_to_string(self.root.join(path)).ok()?;
                text.trim().parse::<u64>().ok().filter(|bandwidth| *bandwidth > 0)
            };
            match (of("read"), of("write")) {
                (Some(read), Some(write)) => drop(known.insert(node, read.min(write))),
                _ => unknown.extend([node]),
            }
        }
        if unknown.is_empty() { Ok(known) } else { Err(unknown) }
    }

    /// Writes, and reads back.
    pub fn write(&self, write: Write) -> Result<(), WeightError> {
        let (path, wanted) = match write {
            Write::Weight { node, weight, .. } => (Self::file(node), weight.to_string()),
            Write::Auto => (format!("{WEIGHTS}/auto"), "true".to_owned()),
        };
        let path = self.root.join(path);
        let file = OpenOptions::new().write(true).truncate(true).open(&path);
        if let Err(source) = file.and_then(|mut file| file.write_all(wanted.as_bytes())) {
            return Err(WeightError::Refused { path, source });
        }
        match fs::read_to_string(&path) {
            Ok(found) if found.trim() == wanted => Ok(()),
            Ok(found) => Err(WeightError::Different { path, wanted, found: found.trim().to_owned() }),
            Err(source) => Err(WeightError::Refused { path, source }),
        }
    }
}

/// Weights in the ratio of bandwidths (in MB/s), as small as possible: they sum up to about 32 before, and each is 1 at least.
pub fn by_bandwidth(bandwidths: &BTreeMap<NodeId, u64>) -> Wanted {
    let sum: u128 = bandwidths.values().map(|of| u128::from(*of)).sum();
    // Rounded: no share is above 32.
    let share = |of: u64| (u128::from(SUM) * u128::from(of) * 2 + sum).checked_div(sum * 2).unwrap_or(1);
    let share = |of: u64| u8::try_from(share(of)).unwrap_or(u8::MAX).max(1);
    let weights: Wanted = bandwidths.iter().map(|(node, of)| (*node, share(*of))).collect();
    let divisor = weights.values().copied().fold(0, gcd).max(1);
    weights.into_iter().map(|(node, weight)| (node, weight / divisor)).collect()
}

fn gcd(a: u8, b: u8) -> u8 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Plans what is to be written so that nodes have the weights that are wanted, and all others what was found there. `held` is
/// what was written before.
pub fn plan(seen: &Seen, wanted: &Wanted, held: &HeldWeights) -> Plan {
    let mut plan = Plan::default();
    plan.held.was_auto = held.was_auto;
    // Our first write switched it off.
    let is_ours = |of: &Held| of.before.is_some() && !of.is_given_up;
    let is_auto_theirs = seen.is_auto && held.nodes.values().any(|of| !is_ours(of));
    for (node, target) in wanted {
        let known = held.nodes.get(node);
        let Some(weight) = seen.weights.get(node).copied() else {
            // It may be readable again.
            let known = known.filter(|_| seen.unreadable.contains_key(node));
            plan.held.nodes.extend(known.map(|known| (*node, *known)));
            continue;
        };
        match known {
            Some(known) if known.is_given_up => drop(plan.held.nodes.insert(*node, *known)),
            Some(known) if is_auto_theirs || !known.is(weight) => {
                plan.held.nodes.insert(*node, Held { is_given_up: true, ..*known });
                plan.foreign.insert(*node, weight);
            }
            None if is_auto_theirs => {}
            _ => {
                let is_due = weight != *target || seen.is_auto;
                let record = Held {
                    found: known.map_or(weight, |known| known.found),
                    written: *target,
                    before: is_due.then_some(weight),
                    is_given_up: false,
                };
                plan.held.nodes.insert(*node, record);
                if is_due {
                    plan.held.was_auto |= seen.is_auto;
                    plan.writes.push(Write::Weight { node: *node, weight: *target, is_back: false });
                }
            }
        }
    }
    for (node, known) in &held.nodes {
        let Entry::Vacant(entry) = plan.held.nodes.entry(*node) else { continue };
        match seen.weights.get(node).copied() {
            _ if known.is_given_up => plan.held.was_auto = false,
            None if seen.unreadable.contains_key(node) => drop(entry.insert(*known)),
            Some(weight) if is_auto_theirs || !(known.is(weight) || weight == known.found) => {
                plan.held.was_auto = false;
                plan.foreign.insert(*node, weight);
            }
            Some(weight) if weight != known.found => {
                entry.insert(*known);
                plan.writes.push(Write::Weight { node: *node, weight: known.found, is_back: true });
            }
            // It is as it was found, or gone.
            _ => {}
        }
    }
    // A weight that cannot be read may still be ours to give back.
    let is_back = |node| plan.writes.contains(&back(node, held));
    if plan.held.was_auto && wanted.is_empty() && plan.held.nodes.keys().all(|node| is_back(*node)) {
        if seen.is_auto {
            plan.held.was_auto = false;
        } else {
            plan.writes.push(Write::Auto);
        }
    }
    plan
}

/// Giving back the weight of a node.
fn back(node: NodeId, held: &HeldWeights) -> Write {
    let weight = held.nodes.get(&node).map_or(0, |of| of.found);
    Write::Weight { node, weight, is_back: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host of files.
    struct Host {
        dir: tempfile::TempDir,
        held: HeldWeights,
    }

    impl Host {
        /// Two nodes with memory, 0 and 2, and one without.
        fn new() -> Self {
            let host = Self { dir: tempfile::tempdir().unwrap(), held: HeldWeights::default() };
            host.put(&format!("{NODES}/has_memory"), "0,2");
            for node in 0..3 {
                host.set(node, 1);
            }
            host
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn set(&self, node: u32, weight: u8) {
            self.put(&format!("{WEIGHTS}/node{node}"), &weight.to_string());
        }

        fn auto(&self, is_on: bool) {
            self.put(&format!("{WEIGHTS}/auto"), &is_on.to_string());
        }

        fn bandwidth(&self, node: u32, read: u64, write: u64) {
            let at = format!("{NODES}/node{node}/access0/initiators");
            self.put(&format!("{at}/read_bandwidth"), &read.to_string());
            self.put(&format!("{at}/write_bandwidth"), &write.to_string());
        }

        fn weights(&self) -> Weights {
            Weights::new(self.dir.path())
        }

        fn all(&self) -> Seen {
            self.weights().look((0..3).map(NodeId))
        }

        fn now(&self) -> [u8; 3] {
            let seen = self.all();
            [0, 1, 2].map(|node| seen.weights[&NodeId(node)])
        }

        fn plan(&self, wanted: &[(u32, u8)]) -> Plan {
            plan(&self.all(), &of(wanted), &self.held)
        }

        /// Does what is planned, as the kernel would; what others wrote.
        fn follow(&mut self, wanted: &[(u32, u8)]) -> Vec<(u32, u8)> {
            let plan = self.plan(wanted);
            self.held = plan.held;
            for write in plan.writes {
                self.weights().write(write).unwrap();
                match write {
                    Write::Weight { node, is_back: true, .. } => drop(self.held.nodes.remove(&node)),
                    Write::Weight { node, .. } => {
                        self.held.nodes.get_mut(&node).unwrap().before = None;
                        if self.dir.path().join(WEIGHTS).join("auto").exists() {
                            self.auto(false);
                        }
                    }
                    Write::Auto => self.held.was_auto = false,
                }
            }
            plan.foreign.into_iter().map(|(node, weight)| (node.0, weight)).collect()
        }
    }

    fn of(weights: &[(u32, u8)]) -> Wanted {
        weights.iter().map(|(node, weight)| (NodeId(*node), *weight)).collect()
    }

    #[test]
    fn weights_are_in_the_ratio_of_bandwidths_and_small() {
        for (bandwidths, expected) in [
            (&[100_000, 30_000][..], &[25, 7][..]),
            (&[300, 100], &[3, 1]),
            (&[20_480, 5_120], &[13, 3]),
            (&[7, 7, 7, 7], &[1, 1, 1, 1]),
            (&[1_000_000, 1], &[32, 1]),
            (&[u64::MAX, u64::MAX], &[1, 1]),
            (&[5], &[1]),
            (&[], &[]),
        ] {
            let bandwidths = (0..).map(NodeId).zip(bandwidths.iter().copied()).collect();
            let weights: Vec<u8> = by_bandwidth(&bandwidths).into_values().collect();
            assert_eq!(weights, expected, "{bandwidths:?}");
        }
    }

    #[test]
    fn a_bandwidth_is_the_lesser_of_both_and_all_or_none_are_known() {
        let host = Host::new();
        let nodes = host.weights().nodes().unwrap();
        assert_eq!(nodes.to_string(), "0,2");
        host.bandwidth(0, 100_000, 90_000);
        assert_eq!(host.weights().bandwidths(&nodes).unwrap_err().to_string(), "2");
        host.bandwidth(2, 30_000, 0);
        assert_eq!(host.weights().bandwidths(&nodes).unwrap_err().to_string(), "2");
        host.bandwidth(2, 30_000, 40_000);
        let expected = BTreeMap::from([(NodeId(0), 90_000), (NodeId(2), 30_000)]);
        assert_eq!(host.weights().bandwidths(&nodes).unwrap(), expected);
    }

    #[test]
    fn what_was_found_comes_back_and_others_are_never_touched() {
        let mut host = Host::new();
        host.set(1, 9);
        assert!(host.follow(&[(0, 3), (2, 1)]).is_empty());
        assert_eq!(host.now(), [3, 9, 1]);
        assert!(host.plan(&[(0, 3), (2, 1)]).writes.is_empty(), "nothing is left to do");
        let text = serde_json::to_string(&host.held).unwrap();
        let expected = r#"{"nodes":{"0":{"found":1,"written":3},"2":{"found":1,"written":1}}}"#;
        assert_eq!(text, expected);
        assert_eq!(serde_json::from_str::<HeldWeights>(&text).unwrap(), host.held);
        // Another configuration: the first value comes back in the end.
        host.follow(&[(0, 5), (2, 2)]);
        assert_eq!(host.now(), [5, 9, 2]);
        host.follow(&[(0, 5)]);
        assert_eq!(host.now(), [5, 9, 1]);
        host.follow(&[]);
        assert_eq!((host.now(), host.held.is_empty()), ([1, 9, 1], true));
    }

    #[test]
    fn what_somebody_else_wrote_stays() {
        let mut host = Host::new();
        let wanted = [(0, 3), (2, 2)];
        host.follow(&wanted);
        host.set(2, 7);
        assert_eq!(host.follow(&wanted), [(2, 7)]);
        assert!(host.follow(&wanted).is_empty(), "it is said once");
        assert_eq!(host.held.now(), of(&[(0, 3)]));
        // Even where it is by now what was written.
        host.set(2, 2);
        host.follow(&[]);
        assert_eq!((host.now(), host.held.is_empty()), ([1, 1, 2], true));
        // Noticed at the end only.
        host.follow(&wanted);
        host.set(0, 9);
        assert_eq!(host.follow(&[]), [(0, 9)]);
        assert_eq!((host.now(), host.held.is_empty()), ([9, 1, 2], true));
    }

    #[test]
    fn a_crash_before_or_after_any_write_changes_nothing() {
        for written in 0..=2 {
            for is_auto in [false, true] {
                let mut host = Host::new();
                let wanted = [(0, 3), (2, 2)];
                host.auto(is_auto);
                let plan = host.plan(&wanted);
                host.held = plan.held;
                for write in &plan.writes[..written] {
                    host.weights().write(*write).unwrap();
                    host.auto(false);
                }
                assert!(host.follow(&wanted).is_empty());
                assert_eq!((host.now(), host.held.was_auto), ([3, 1, 2], is_auto));
                // And while it is given back.
                let plan = host.plan(&[]);
                host.held = plan.held;
                for write in &plan.writes[..written] {
                    host.weights().write(*write).unwrap();
                }
                assert!(host.follow(&[]).is_empty());
                assert_eq!((host.now(), host.held.is_empty()), ([1, 1, 1], true));
                assert_eq!(host.all().is_auto, is_auto);
            }
        }
    }

    #[test]
    fn the_kernel_chooses_again_where_it_did_and_nothing_was_given_up() {
        let mut host = Host::new();
        host.auto(true);
        // Also where it has chosen the same: it may choose another one.
        host.follow(&[(0, 1), (2, 1)]);
        assert!(host.held.was_auto && !host.all().is_auto);
        host.follow(&[]);
        assert!(host.all().is_auto && host.held.is_empty());
        // A weight is somebody else's.
        host.follow(&[(0, 3), (2, 1)]);
        host.set(2, 5);
        host.follow(&[(0, 3), (2, 1)]);
        host.follow(&[(0, 3)]);
        host.follow(&[]);
        assert_eq!((host.now(), host.all().is_auto, host.held.is_empty()), ([1, 1, 5], false, true));
    }

    #[test]
    fn where_somebody_switches_auto_on_all_weights_are_theirs() {
        let mut host = Host::new();
        host.auto(false);
        host.follow(&[(0, 3)]);
        host.auto(true);
        assert_eq!(host.follow(&[(0, 3), (2, 1)]), [(0, 3)]);
        assert!(host.follow(&[(0, 3), (2, 1)]).is_empty());
        assert!(host.all().is_auto && host.held.now().is_empty());
        host.follow(&[]);
        assert!(host.all().is_auto && host.held.is_empty());
        // At the end only.
        host.auto(false);
        host.follow(&[(0, 4)]);
        host.auto(true);
        assert_eq!(host.follow(&[]), [(0, 4)]);
        assert_eq!((host.now()[0], host.all().is_auto, host.held.is_empty()), (4, true, true));
    }

    #[test]
    fn what_cannot_be_read_is_kept_and_what_is_gone_is_forgotten() {
        let mut host = Host::new();
        host.auto(true);
        host.follow(&[(0, 3), (2, 2)]);
        host.put(&format!("{WEIGHTS}/node0"), "?");
        let plan = host.plan(&[]);
        assert_eq!(plan.writes.len(), 1, "{plan:?}");
        assert!(plan.held.nodes.contains_key(&NodeId(0)) && plan.held.was_auto);
        fs::remove_file(host.dir.path().join(WEIGHTS).join("node0")).unwrap();
        assert!(host.plan(&[(0, 3), (2, 2)]).held.nodes.keys().eq(&[NodeId(2)]));
        let refused = host.weights().write(back(NodeId(0), &host.held)).unwrap_err();
        assert!(refused.to_string().contains("node0 cannot be written: No such file"), "{refused}");
    }

    #[test]
    fn a_file_that_keeps_what_it_holds_is_an_error() {
        let host = Host::new();
        let file = host.dir.path().join(Weights::file(NodeId(0)));
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/null", &file).unwrap();
        let write = Write::Weight { node: NodeId(0), weight: 3, is_back: false };
        let error = host.weights().write(write).unwrap_err();
        assert!(error.to_string().ends_with("it holds \"\" after \"3\" was written"), "{error}");
    }
}

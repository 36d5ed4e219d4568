//! Weights of nodes for the memory policy weighted-interleave.
//!
//! Problem: on a machine whose nodes have memory of different bandwidth, pages that are spread evenly are as slow as the
//! slowest node. The kernel spreads them by weights, which are those of the host and 1 each unless somebody sets them.
//!
//! Terms: the *weight* of a node is how many pages in turn are put there, 1 to 255. `auto` is the kernel's own choice of all
//! weights (since Linux 6.16), which ends as soon as somebody writes one. [`WeightRecord`] is what was found of a node and what was
//! written instead. A node is *given up* where somebody else wrote its weight since, and *absent* where its file is gone.
//!
//! Algorithm: [`Weights::read_weights`] reads the files, [`by_bandwidth`] computes weights, [`plan`] decides, and
//! [`Weights::write`] writes and reads back, and [`WeightRecords::record_result`] takes note of what came of it.
//!
//! Invariants: what holds neither what was written nor what was found before the write is somebody else's, and is not written
//! any more: neither anew nor back. Where somebody else switched `auto` on, all weights are theirs. The kernel keeps the weight
//! of a node that is absent, so its record stays until the next boot, or until `auto` is on again.
//!
//! `auto` is switched on again only where it was on, nothing was given up, and every node has what it had when our first write
//! ended it: the kernel would overwrite the others. A node that came since has the weight 1 unless somebody wrote it. If that
//! write fails, it stays to be done, under the same condition, also after all weights are back. A kernel without any bandwidth
//! to choose from shows `auto` as on until somebody writes a weight, and never takes it (`ENODEV`): nothing is to be done then.
//!
//! Sources: Documentation/ABI/testing/sysfs-kernel-mm-mempolicy-weighted-interleave, Documentation/admin-guide/mm/numaperf.rst,
//! `mm/mempolicy.c`.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
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
pub type NodeWeights = BTreeMap<NodeId, u8>;

/// What was found of a node's weight, and what was written instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeightRecord {
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

impl WeightRecord {
    /// Whether this is what we left there.
    fn is(self, weight: u8) -> bool {
        self.written == weight || self.before == Some(weight)
    }

    /// Whether it holds what was found, if nobody else wrote it.
    fn is_as_found(self) -> bool {
        self.written == self.found && self.before.is_none_or(|before| before == self.found)
    }
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeightRecords {
    /// By node.
    #[serde(default)]
    pub nodes: BTreeMap<NodeId, WeightRecord>,
    /// Where the kernel chose all weights by itself before, and is to do so again: those of all nodes then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<NodeWeights>,
}

impl WeightRecords {
    /// Whether nothing was written that is still to be known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The weights that were written and are known to be there, by node.
    pub fn current(&self, seen: &WeightSnapshot) -> NodeWeights {
        let is_there = |node, of: &WeightRecord| {
            !of.is_given_up && of.before.is_none() && seen.weights.contains_key(node)
        };
        let held = self.nodes.iter().filter(|(node, of)| is_there(node, of));
        held.map(|(node, of)| (*node, of.written)).collect()
    }

    /// What was written, by node, also where somebody else wrote it since.
    pub fn written(&self) -> NodeWeights {
        self.nodes.iter().map(|(node, of)| (*node, of.written)).collect()
    }

    /// Takes note of what came of a write; `before` is what was held before all of them.
    pub fn record_result(&mut self, write: WeightWrite, result: &Result<(), WeightError>, before: &Self) {
        match (write, result) {
            (WeightWrite::Weight { node, is_back: true, .. }, Ok(())) => drop(self.nodes.remove(&node)),
            (WeightWrite::Weight { node, .. }, Ok(())) => {
                self.nodes.entry(node).and_modify(|of| of.before = None);
            }
            // Nothing was written: what was known before is true.
            (WeightWrite::Weight { node, is_back: false, .. }, Err(WeightError::Refused { .. })) => {
                self.revert_node(node, before);
            }
            // Absent nodes have what the kernel chooses, too.
            (WeightWrite::Auto, Ok(())) => *self = Self::default(),
            (WeightWrite::Auto, Err(WeightError::NoChoice)) => self.auto = None,
            // Something may have been written: the next look says which.
            (_, Err(_)) => {}
        }
    }

    /// What was known of a node before is true.
    pub fn revert_node(&mut self, node: NodeId, before: &Self) {
        match before.nodes.get(&node) {
            Some(of) => drop(self.nodes.insert(node, *of)),
            None => drop(self.nodes.remove(&node)),
        }
    }
}

/// What the files hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightSnapshot {
    /// The weights, by node: of all nodes that have any.
    pub weights: NodeWeights,
    /// Those that cannot be read, and why.
    pub unreadable: BTreeMap<NodeId, String>,
    /// Whether the kernel chooses them by itself. No kernel before Linux 6.16 does.
    pub is_auto: bool,
}

/// What is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightWrite {
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
pub struct WeightPlan {
    /// What is to be written, in this order.
    pub writes: Vec<WeightWrite>,
    /// What is to be known of it before.
    pub held: WeightRecords,
    /// What somebody else wrote: the weights that these nodes have now.
    pub foreign: NodeWeights,
}

/// A weight was not written.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// The kernel refuses, or the daemon may not: nothing was written.
    #[error("{path} cannot be written: {source}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel has no bandwidths from which it could choose weights by itself.
    #[error("the kernel has no bandwidths to choose weights from")]
    NoChoice,
    /// What was written cannot be read back.
    #[error("{path} cannot be read after {wanted:?} was written: {source}")]
    Unread {
        /// The file.
        path: PathBuf,
        /// What was written.
        wanted: String,
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

impl WeightError {
    /// A write was refused.
    fn refused(write: WeightWrite, path: PathBuf, source: io::Error) -> Self {
        let is_no_choice = write == WeightWrite::Auto && source.raw_os_error() == Some(libc::ENODEV);
        if is_no_choice { Self::NoChoice } else { Self::Refused { path, source } }
    }
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

    /// Reads the weights of these nodes, and of all others that have one.
    pub fn read_weights(&self, nodes: impl Iterator<Item = NodeId>) -> WeightSnapshot {
        let mut seen = WeightSnapshot::default();
        let files = fs::read_dir(self.root.join(WEIGHTS)).into_iter().flatten().flatten();
        let others = files.filter_map(|file| file.file_name().to_str()?.strip_prefix("node")?.parse().ok());
        for node in nodes.chain(others.map(NodeId)).collect::<BTreeSet<_>>() {
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
    pub fn write(&self, write: WeightWrite) -> Result<(), WeightError> {
        let (path, wanted) = match write {
            WeightWrite::Weight { node, weight, .. } => (Self::file(node), weight.to_string()),
            WeightWrite::Auto => (format!("{WEIGHTS}/auto"), "true".to_owned()),
        };
        let path = self.root.join(path);
        let file = OpenOptions::new().write(true).truncate(true).open(&path);
        if let Err(source) = file.and_then(|mut file| file.write_all(wanted.as_bytes())) {
            return Err(WeightError::refused(write, path, source));
        }
        match fs::read_to_string(&path) {
            Ok(found) if found.trim() == wanted => Ok(()),
            Ok(found) => Err(WeightError::Different { path, wanted, found: found.trim().to_owned() }),
            Err(source) => Err(WeightError::Unread { path, wanted, source }),
        }
    }

    /// What was not given back, and why where that is known.
    pub fn unrestored(&self, held: &WeightRecords) -> Vec<(String, Option<String>)> {
        let nodes = held.nodes.iter().filter(|(_, of)| !of.is_given_up).map(|(node, of)| {
            let file = Self::file(*node);
            let is_absent = matches!(self.root.join(&file).try_exists(), Ok(false));
            let reason = is_absent.then(|| {
                let (found, written) = (of.found, of.written);
                format!("the node is not there; if it comes back before the next boot, it has {written}, not {found}")
            });
            (format!("weight of node {node} for weighted-interleave (/{file})"), reason)
        });
        let auto =
            held.auto.iter().map(|_| (format!("the kernel's own choice of weights (/{WEIGHTS}/auto)"), None));
        nodes.chain(auto).collect()
    }
}

/// Weights in the ratio of bandwidths (in MB/s), as small as possible: they sum up to about 32 before, and each is 1 at least.
pub fn by_bandwidth(bandwidths: &BTreeMap<NodeId, u64>) -> NodeWeights {
    let sum: u128 = bandwidths.values().map(|of| u128::from(*of)).sum();
    // Rounded: no share is above 32.
    let share = |of: u64| (u128::from(SUM) * u128::from(of) * 2 + sum).checked_div(sum * 2).unwrap_or(1);
    let share = |of: u64| u8::try_from(share(of)).unwrap_or(u8::MAX).max(1);
    let weights: NodeWeights = bandwidths.iter().map(|(node, of)| (*node, share(*of))).collect();
    let divisor = weights.values().copied().fold(0, gcd).max(1);
    weights.into_iter().map(|(node, weight)| (node, weight / divisor)).collect()
}

fn gcd(a: u8, b: u8) -> u8 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Plans what is to be written so that nodes have the weights that are wanted, and all others what was found there; without
/// any that could be wanted, all is given back. `held` is what was written before.
pub fn plan(seen: &WeightSnapshot, wanted: Option<&NodeWeights>, held: &WeightRecords) -> WeightPlan {
    let (mut plan, is_end, nothing) = (WeightPlan::default(), wanted.is_none(), NodeWeights::new());
    // Whatever was written, the kernel chooses by itself as it did.
    if is_end && seen.is_auto && held.auto.is_some() {
        return plan;
    }
    plan.held.auto.clone_from(&held.auto);
    // Our first write switched it off.
    let is_ours = |of: &WeightRecord| of.before.is_some() && !of.is_given_up;
    let is_auto_theirs = seen.is_auto && held.nodes.values().any(|of| !is_ours(of));
    for (node, target) in wanted.unwrap_or(&nothing) {
        let known = held.nodes.get(node);
        let Some(weight) = seen.weights.get(node).copied() else {
            // It may be readable again, or come back.
            plan.held.nodes.extend(known.map(|known| (*node, *known)));
            continue;
        };
        match known {
            Some(known) if known.is_given_up => drop(plan.held.nodes.insert(*node, *known)),
            Some(known) if is_auto_theirs || !known.is(weight) => {
                plan.held.nodes.insert(*node, WeightRecord { is_given_up: true, ..*known });
                plan.foreign.insert(*node, weight);
            }
            None if is_auto_theirs => {}
            _ => {
                let is_due = weight != *target || seen.is_auto;
                let record = WeightRecord {
                    found: known.map_or(weight, |known| known.found),
                    written: *target,
                    before: is_due.then_some(weight),
                    is_given_up: false,
                };
                plan.held.nodes.insert(*node, record);
                if is_due {
                    if seen.is_auto {
                        plan.held.auto = Some(seen.weights.clone());
                    }
                    plan.writes.push(WeightWrite::Weight { node: *node, weight: *target, is_back: false });
                }
            }
        }
    }
    for (node, known) in &held.nodes {
        let Entry::Vacant(entry) = plan.held.nodes.entry(*node) else { continue };
        let is_unreadable = seen.unreadable.contains_key(node);
        match seen.weights.get(node).copied() {
            None if !is_end => drop(entry.insert(*known)),
            _ if known.is_given_up => plan.held.auto = None,
            None if is_unreadable || !(is_auto_theirs || known.is_as_found()) => drop(entry.insert(*known)),
            Some(weight) if is_auto_theirs || !(known.is(weight) || weight == known.found) => {
                plan.held.auto = None;
                plan.foreign.insert(*node, weight);
            }
            Some(weight) if weight != known.found => {
                entry.insert(*known);
                plan.writes.push(WeightWrite::Weight { node: *node, weight: known.found, is_back: true });
            }
            // It is as it was found.
            _ => {}
        }
    }
    // What cannot be read may still be ours to give back, or somebody else's.
    if is_end && seen.unreadable.is_empty() {
        choose_again(&mut plan, seen);
    }
    plan
}

/// Lets the kernel choose again where it did, if that takes nothing from anybody.
fn choose_again(plan: &mut WeightPlan, seen: &WeightSnapshot) {
    let Some(were) = &plan.held.auto else { return };
    let mut others = seen.weights.clone();
    for write in &plan.writes {
        if let WeightWrite::Weight { node, weight, .. } = write {
            others.insert(*node, *weight);
        }
    }
    others.retain(|node, weight| *weight != were.get(node).copied().unwrap_or(1));
    if others.is_empty() {
        plan.writes.push(WeightWrite::Auto);
    } else {
        plan.held.auto = None;
        plan.foreign.extend(others);
    }
}

#[cfg(test)]
mod tests;

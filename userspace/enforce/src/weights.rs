//! Weights of nodes for the memory policy weighted-interleave.
//!
//! # Problem
//! If the nodes of a machine have memory of different bandwidth, pages that are spread evenly are as slow as the slowest
//! node. The kernel spreads them by weights. These apply to the whole host, and are 1 by default.
//!
//! # Terms
//! - The *weight* of a node is the number of pages in turn that are allocated there, 1 to 255.
//! - `auto` is the kernel's own choice of all weights (since Linux 6.16), which ends as soon as a weight is written.
//! - [`WeightRecord`] has the original and the written weight of a node.
//! - A node is *given up* if another program wrote its weight since, and *absent* if its file is gone.
//!
//! # Algorithm
//! [`Weights::read_weights`] reads the files, [`by_bandwidth`] computes weights, [`plan`] decides, [`Weights::write`]
//! writes and reads back, and [`WeightRecords::record_result`] records the result.
//!
//! # Invariants
//! - A weight that is neither the written one nor the one before the write belongs to another program, and is not
//!   written any more, neither set nor restored. If another program enables `auto`, all weights belong to it.
//! - The kernel keeps the weight of an absent node, so its record stays until the next boot, or until `auto` is enabled
//!   again.
//! - `auto` is enabled again only if it was enabled, no node was given up, and every node has the weight that it had
//!   when the daemon's first write ended `auto`: the kernel would overwrite other weights. A node that appeared since
//!   has the weight 1 unless another program wrote it. If the write of `auto` fails, it stays pending under the same
//!   condition, even after all weights are restored.
//! - A kernel that knows no bandwidths shows `auto` as enabled until a weight is written, and refuses to enable it
//!   again (`ENODEV`): nothing is pending then.
//!
//! Sources: Documentation/ABI/testing/sysfs-kernel-mm-mempolicy-weighted-interleave,
//! Documentation/admin-guide/mm/numaperf.rst, `mm/mempolicy.c`.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs, io,
    path::{Path, PathBuf},
};

use numaward_topology::{NodeId, NodeSet};
use serde::{Deserialize, Serialize};

use crate::records::{WrittenValue, overwrite, revert};

/// Directory of the weights, from the host's root.
pub const WEIGHTS: &str = "sys/kernel/mm/mempolicy/weighted_interleave";
/// Directory of the nodes, from the host's root.
const NODES: &str = "sys/devices/system/node";
/// Approximate sum of weights by bandwidth before they are reduced, which is also the kernel's choice.
const WEIGHT_SUM: u64 = 32;

/// Weights by node.
pub type NodeWeights = BTreeMap<NodeId, u8>;

/// Original and written weight of a node.
pub type WeightRecord = WrittenValue<u8>;

/// Weights that the daemon has written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeightRecords {
    #[serde(default)]
    pub nodes: BTreeMap<NodeId, WeightRecord>,
    /// Weights of all nodes at the time when the first write ended `auto`, if `auto` is to be enabled again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<NodeWeights>,
}

impl WeightRecords {
    /// Returns whether there is nothing to restore or to remember.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the weights that were written and are in effect, by node.
    pub fn current(&self, seen: &WeightSnapshot) -> NodeWeights {
        let is_there = |node, of: &WeightRecord| {
            !of.is_given_up && of.before.is_none() && seen.weights.contains_key(node)
        };
        let held = self.nodes.iter().filter(|(node, of)| is_there(node, of));
        held.map(|(node, of)| (*node, of.written)).collect()
    }

    /// Returns the written weights by node, including those of given up nodes.
    pub fn written(&self) -> NodeWeights {
        self.nodes.iter().map(|(node, of)| (*node, of.written)).collect()
    }

    /// Records the result of a write; `before` has the records before all writes.
    pub fn record_result(&mut self, write: WeightWrite, result: &Result<(), WeightError>, before: &Self) {
        match (write, result) {
            (WeightWrite::Weight { node, is_back: true, .. }, Ok(())) => drop(self.nodes.remove(&node)),
            (WeightWrite::Weight { node, .. }, Ok(())) => {
                self.nodes.entry(node).and_modify(|of| of.before = None);
            }
            // Nothing was written, so the earlier record is still right.
            (WeightWrite::Weight { node, is_back: false, .. }, Err(WeightError::Refused { .. })) => {
                revert(&mut self.nodes, &before.nodes, &node);
            }
            // The kernel chooses the weights of absent nodes too.
            (WeightWrite::Auto, Ok(())) => *self = Self::default(),
            (WeightWrite::Auto, Err(WeightError::NoChoice)) => self.auto = None,
            // Something may have been written; the next read shows it.
            (_, Err(_)) => {}
        }
    }
}

/// Content of the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightSnapshot {
    pub weights: NodeWeights,
    /// Nodes with an unreadable weight, and the reason.
    pub unreadable: BTreeMap<NodeId, String>,
    /// State of `auto`. Always false before Linux 6.16.
    pub is_auto: bool,
}

/// A write to a file of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightWrite {
    /// Sets the weight of a node.
    Weight {
        node: NodeId,
        weight: u8,
        /// True if this is the original weight.
        is_back: bool,
    },
    /// Lets the kernel choose all weights again.
    Auto,
}

/// Writes that set and restore weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightPlan {
    /// Writes, in this order.
    pub writes: Vec<WeightWrite>,
    /// Records to store before the writes.
    pub held: WeightRecords,
    /// Present weights of nodes that another program wrote.
    pub foreign: NodeWeights,
}

/// Error of a write of a weight.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// The kernel refuses, or the daemon has no permission; nothing was written.
    #[error("{path} cannot be written: {source}")]
    Refused { path: PathBuf, source: io::Error },
    /// The kernel knows no bandwidths by which it could choose weights.
    #[error("the kernel has no bandwidths to choose weights from")]
    NoChoice,
    /// The written value cannot be read back.
    #[error("{path} cannot be read after {wanted:?} was written: {source}")]
    Unread { path: PathBuf, wanted: String, source: io::Error },
    /// The kernel took another value.
    #[error("{path}: it holds {found:?} after {wanted:?} was written")]
    Different { path: PathBuf, wanted: String, found: String },
}

impl WeightError {
    /// Converts the error of a refused write.
    fn refused(write: WeightWrite, path: PathBuf, source: io::Error) -> Self {
        let is_no_choice = write == WeightWrite::Auto && source.raw_os_error() == Some(libc::ENODEV);
        if is_no_choice { Self::NoChoice } else { Self::Refused { path, source } }
    }
}

/// Access to the weights of a host.
#[derive(Clone, Debug)]
pub struct Weights {
    root: PathBuf,
}

impl Weights {
    /// Creates the access to the host with this root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Returns whether the kernel supports weights.
    pub fn is_here(&self) -> bool {
        self.root.join(WEIGHTS).is_dir()
    }

    /// Returns the path of the file with a node's weight, from the host's root.
    pub fn file(node: NodeId) -> String {
        format!("{WEIGHTS}/node{node}")
    }

    /// Returns the nodes with memory.
    pub fn nodes(&self) -> Result<NodeSet, String> {
        let path = self.root.join(NODES).join("has_memory");
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        text.trim().parse().map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Reads the weights of these nodes and of all other nodes that have one.
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

    /// Returns the bandwidth of each node's memory in MB/s: the lesser of reading and writing, from the nearest CPUs.
    /// The error has the nodes of which the firmware reports none.
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

    /// Writes a weight, and reads it back.
    pub fn write(&self, write: WeightWrite) -> Result<(), WeightError> {
        let (path, wanted) = match write {
            WeightWrite::Weight { node, weight, .. } => (Self::file(node), weight.to_string()),
            WeightWrite::Auto => (format!("{WEIGHTS}/auto"), "true".to_owned()),
        };
        let path = self.root.join(path);
        if let Err(source) = overwrite(&path, &wanted) {
            return Err(WeightError::refused(write, path, source));
        }
        match fs::read_to_string(&path) {
            Ok(found) if found.trim() == wanted => Ok(()),
            Ok(found) => Err(WeightError::Different { path, wanted, found: found.trim().to_owned() }),
            Err(source) => Err(WeightError::Unread { path, wanted, source }),
        }
    }

    /// Describes the weights that were not restored, with the reason if it is known.
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

/// Computes weights in the ratio of bandwidths (in MB/s), as small as possible: each is at least 1, and their sum is
/// about 32 before they are divided by their greatest common divisor.
pub fn by_bandwidth(bandwidths: &BTreeMap<NodeId, u64>) -> NodeWeights {
    let sum: u128 = bandwidths.values().map(|of| u128::from(*of)).sum();
    // Rounded, and never above 32.
    let share =
        |of: u64| (u128::from(WEIGHT_SUM) * u128::from(of) * 2 + sum).checked_div(sum * 2).unwrap_or(1);
    let share = |of: u64| u8::try_from(share(of)).unwrap_or(u8::MAX).max(1);
    let weights: NodeWeights = bandwidths.iter().map(|(node, of)| (*node, share(*of))).collect();
    let divisor = weights.values().copied().fold(0, gcd).max(1);
    weights.into_iter().map(|(node, weight)| (node, weight / divisor)).collect()
}

fn gcd(a: u8, b: u8) -> u8 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns whether the node has its original weight, unless another program wrote it.
fn is_as_found(record: WeightRecord) -> bool {
    record.written == record.found && record.before.is_none_or(|before| before == record.found)
}

/// Plans the writes after which nodes have the wanted weights, and all others their original ones. Without wanted
/// weights (`None`), everything is restored. `held` has the records of earlier writes.
pub fn plan(seen: &WeightSnapshot, wanted: Option<&NodeWeights>, held: &WeightRecords) -> WeightPlan {
    let (mut plan, is_end, nothing) = (WeightPlan::default(), wanted.is_none(), NodeWeights::new());
    // The kernel chooses by itself, as it did originally.
    if is_end && seen.is_auto && held.auto.is_some() {
        return plan;
    }
    plan.held.auto.clone_from(&held.auto);
    // The daemon's first write ended `auto`.
    let is_ours = |of: &WeightRecord| of.before.is_some() && !of.is_given_up;
    let is_auto_theirs = seen.is_auto && held.nodes.values().any(|of| !is_ours(of));
    for (node, target) in wanted.unwrap_or(&nothing) {
        let known = held.nodes.get(node);
        let Some(weight) = seen.weights.get(node).copied() else {
            // The file may become readable again, or the node may come back.
            plan.held.nodes.extend(known.map(|known| (*node, *known)));
            continue;
        };
        match known {
            Some(known) if known.is_given_up => drop(plan.held.nodes.insert(*node, *known)),
            Some(known) if is_auto_theirs || !known.holds(&weight) => {
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
            None if is_unreadable || !(is_auto_theirs || is_as_found(*known)) => drop(entry.insert(*known)),
            Some(weight) if is_auto_theirs || !(known.holds(&weight) || weight == known.found) => {
                plan.held.auto = None;
                plan.foreign.insert(*node, weight);
            }
            Some(weight) if weight != known.found => {
                entry.insert(*known);
                plan.writes.push(WeightWrite::Weight { node: *node, weight: known.found, is_back: true });
            }
            // The node has its original weight.
            _ => {}
        }
    }
    // An unreadable weight may be one to restore, or that of another program.
    if is_end && seen.unreadable.is_empty() {
        enable_auto_again(&mut plan, seen);
    }
    plan
}

/// Enables `auto` again if it was enabled and this overwrites no other program's weight.
fn enable_auto_again(plan: &mut WeightPlan, seen: &WeightSnapshot) {
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

//! Output of `--show` and `--hardware` in numactl's format.

use std::{fmt::Write as _, fs};

use numaward_topology::{
    Machine, NodeSet,
    set::{Id, IdSet},
};

use super::HostResources;
use crate::mempolicy::sys;

fn join_ids<T: Id>(ids: &IdSet<T>) -> String {
    ids.iter().fold(String::new(), |text, id| format!("{text}{} ", id.as_u32()))
}

/// Renders the policy of this process.
pub(super) fn policy(host: &HostResources) -> anyhow::Result<String> {
    use sys::Mode;
    let (mode, nodes) = sys::mempolicy()?;
    let (name, preferred) = match mode {
        Some(Mode::Default) => ("default", "current".to_owned()),
        Some(Mode::Preferred) => ("preferred", join_ids(&nodes)),
        // numactl shows only the first node of several.
        Some(Mode::Bind) => ("bind", first(&nodes)),
        Some(Mode::Interleave) => ("interleave", format!("{} (interleave next)", next_node())),
        Some(Mode::WeightedInterleave) => {
            ("weighted interleave", format!("{} (interleave next)", next_node()))
        }
        Some(Mode::Local) => ("local", "current".to_owned()),
        Some(Mode::PreferredMany) => ("preferred-many", format!("{} (preferred-many)", first(&nodes))),
        None => ("unknown", String::new()),
    };
    let mut text = format!("policy: {name}\npreferred node: {}\n", preferred.trim_end());
    if matches!(mode, Some(Mode::Interleave | Mode::WeightedInterleave)) {
        let _ = writeln!(text, "interleavemask: {}\ninterleavenode: {}", join_ids(&nodes), next_node());
    }
    let cpu_nodes: NodeSet = host
        .machine
        .nodes
        .iter()
        .filter(|(_, node)| node.cpus.intersects(&host.cpus))
        .map(|(id, _)| *id)
        .collect();
    let bound = if mode == Some(Mode::Bind) { &nodes } else { &host.nodes };
    let (cpus, cpu_nodes, bound) = (join_ids(&host.cpus), join_ids(&cpu_nodes), join_ids(bound));
    let _ =
        writeln!(text, "physcpubind: {cpus}\ncpubind: {cpu_nodes}\nnodebind: {cpu_nodes}\nmembind: {bound}");
    // numactl prints this line since version 2.0.19 at the latest; 2.0.16 does not.
    let _ = writeln!(text, "preferred: {}", join_ids(&nodes));
    Ok(text)
}

fn first(nodes: &NodeSet) -> String {
    nodes.iter().next().map_or_else(String::new, |node| node.to_string())
}

/// Returns the next node of interleaving.
fn next_node() -> String {
    sys::next_interleaved().map_or_else(String::new, |node| node.to_string())
}

/// Renders the nodes of this host: CPUs, memory and distances.
pub(crate) fn hardware(machine: &Machine) -> String {
    let nodes: NodeSet = machine.nodes.keys().copied().collect();
    let mut text = format!("available: {} nodes ({nodes})\n", nodes.len());
    for (id, node) in &machine.nodes {
        let meminfo =
            fs::read_to_string(format!("/sys/devices/system/node/node{id}/meminfo")).unwrap_or_default();
        let free = meminfo.lines().find_map(|line| line.split_once("MemFree:")?.1.trim().strip_suffix(" kB"));
        let free = free.and_then(|free| free.parse::<u64>().ok());
        let free = free.map_or_else(|| "<not available>".to_owned(), |kib| format!("{} MB", kib >> 10));
        let mut cpus = String::new();
        let _ = node.cpus.iter().try_for_each(|cpu| write!(cpus, " {cpu}"));
        let _ = write!(
            text,
            "node {id} cpus:{cpus}\nnode {id} size: {} MB\nnode {id} free: {free}\n",
            node.memory.0 >> 20
        );
    }
    let _ = write!(text, "node distances:\nnode ");
    let _ = nodes.iter().try_for_each(|node| write!(text, "{node:>3} "));
    text.push('\n');
    for (id, node) in &machine.nodes {
        let _ = write!(text, "{id:>3}: ");
        for other in nodes.iter() {
            let distance = node.distances.get(&other).map_or_else(|| "?".to_owned(), ToString::to_string);
            let _ = write!(text, "{distance:>3} ");
        }
        text.push('\n');
    }
    text
}

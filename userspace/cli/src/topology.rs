//! `numaward topology`: the machine as tables.

use std::path::Path;

use anyhow::Context;
use numaward_api::{NodeCapacity, Topology};
use numaward_topology::Machine;
use serde::Serialize;

use crate::table::{columns, or_dash, row, size, table};

/// Reads the machine with its root file system at `root`.
pub(crate) fn machine(root: &Path) -> anyhow::Result<Machine> {
    numaward_topology::sysfs::read(root).context("the machine cannot be read")
}

/// The machine, with the guarantees on its nodes if they are known.
#[derive(Serialize)]
pub(crate) struct TopologyReport {
    #[serde(flatten)]
    pub(crate) topology: Topology,
    #[serde(rename = "promised", skip_serializing_if = "Option::is_none")]
    pub(crate) guarantees: Option<Vec<NodeCapacity>>,
}

/// Renders the guarantees on each node, and the resources that are available for new ones.
fn guarantee_table(nodes: &[NodeCapacity]) -> String {
    let mut rows = Vec::new();
    for node in nodes {
        for (number, memory) in node.memory.iter().enumerate() {
            let free_cpus = if number > 0 {
                ""
            } else if node.free_cpus.is_empty() {
                "none"
            } else {
                &node.free_cpus
            };
            let [allocatable, guaranteed, free] = [
                memory.allocatable_bytes,
                memory.guaranteed_bytes,
                memory.free_bytes - memory.withheld_bytes.min(memory.free_bytes),
            ]
            .map(size);
            rows.push(row([
                &node.node.to_string(),
                &memory.kind,
                &allocatable,
                &guaranteed,
                &free,
                free_cpus,
            ]));
        }
    }
    table(["NODE", "KIND", "ALLOCATABLE", "GUARANTEED", "FREE", "FREE CPUS"], rows)
}

/// Renders the machine.
pub(crate) fn render(report: &TopologyReport) -> String {
    let topology = &report.topology;
    let special = [
        ("Isolated CPUs", &topology.isolated_cpus),
        ("CPUs without a tick", &topology.nohz_full_cpus),
        ("CPUs of slower cores", &topology.efficiency_cpus),
        ("CPUs of a lower frequency", &topology.lower_frequency_cpus),
    ];
    let special: String = special
        .into_iter()
        .filter(|(_, cpus)| !cpus.is_empty())
        .fold(String::new(), |text, (title, cpus)| text + title + ": " + cpus + "\n");
    let parts = [
        Some(summary(topology)),
        Some(nodes(topology)),
        report.guarantees.as_ref().filter(|nodes| !nodes.is_empty()).map(|nodes| guarantee_table(nodes)),
        (topology.nodes.len() > 1).then(|| distances(topology)),
        Some(sockets(topology)),
        caches(topology),
        (!special.is_empty()).then_some(special),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

fn summary(topology: &Topology) -> String {
    let memory = topology.nodes.iter().map(|node| node.memory_bytes).sum();
    let cores: u32 = topology.sockets.iter().map(|socket| socket.cores).sum();
    let counts = [
        count(topology.nodes.len(), "node"),
        count(topology.sockets.len(), "socket"),
        count(cores as usize, "core"),
        count(list_len(&topology.online_cpus), "CPU"),
        size(memory),
    ];
    counts.join(", ") + "\n"
}

/// Returns the number of ids in a list of the kernel's format.
fn list_len(list: &str) -> usize {
    list.parse::<numaward_topology::CpuSet>().map_or(0, |cpus| cpus.len())
}

fn nodes(topology: &Topology) -> String {
    let pools = topology.nodes.first().map_or(&[][..], |node| &node.hugepages);
    let sizes: Vec<&str> = pools.iter().map(|pool| pool.size.as_str()).collect();
    let mut header = row(["NODE", "CPUS", "MEMORY"]);
    header.extend(sizes.iter().map(|size| format!("HUGEPAGES {size}")));
    let mut rows = vec![header];
    for node in &topology.nodes {
        let cpus = match (node.memory_only, node.memory_tier) {
            (true, Some(tier)) => format!("none: memory only ({tier})"),
            (true, None) => "none: memory only".to_owned(),
            (false, _) => node.cpus.clone(),
        };
        let mut cells = row([&node.node.to_string(), &cpus, &size(node.memory_bytes)]);
        cells.extend(sizes.iter().map(|size| {
            let pool = node.hugepages.iter().find(|pool| pool.size == *size && pool.total_pages > 0);
            or_dash(pool.map(|pool| format!("{} ({} free)", pool.total_pages, pool.free_pages)))
        }));
        rows.push(cells);
    }
    columns(&rows)
}

fn distances(topology: &Topology) -> String {
    let mut header = row(["DISTANCE"]);
    header.extend(topology.nodes.iter().map(|node| node.node.to_string()));
    let mut rows = vec![header];
    for from in &topology.nodes {
        let distance = |node| from.distances.get(node).map_or_else(|| "?".to_owned(), u32::to_string);
        let mut cells = row([&from.node.to_string()]);
        cells.extend(topology.nodes.iter().map(|to| distance(&to.node)));
        rows.push(cells);
    }
    columns(&rows)
}

fn sockets(topology: &Topology) -> String {
    let rows = topology.sockets.iter().map(|socket| {
        row([&socket.socket.to_string(), &socket.nodes, &socket.cores.to_string(), &socket.cpus])
    });
    table(["SOCKET", "NODES", "CORES", "CPUS"], rows)
}

fn caches(topology: &Topology) -> Option<String> {
    let sharers: Vec<usize> = topology.last_level_caches.iter().map(|cache| list_len(&cache.cpus)).collect();
    let (least, most) = (*sharers.iter().min()?, *sharers.iter().max()?);
    let each = if least == most {
        format!("each of {}", count(least, "CPU"))
    } else {
        format!("of {least} to {most} CPUs each")
    };
    Some(format!("Last-level caches: {}, {each}\n", sharers.len()))
}

#[cfg(test)]
mod tests {
    use numaward_topology::{Bytes, HugepageSize, Machine, NodeId};

    use super::*;

    #[test]
    fn renders_memory_only_node() {
        let machine = Machine::builder()
            .nodes(2)
            .sockets(2)
            .cores_per_node(2)
            .smt(2)
            .memory(Bytes::mib(1536))
            .hugepages(HugepageSize(Bytes::mib(2)), 4)
            .node(NodeId(4), |node| node.cores(0).memory(Bytes::gib(16)))
            .build()
            .unwrap();
        let expected = "\
3 nodes, 2 sockets, 4 cores, 8 CPUs, 19.0 GiB

NODE  CPUS               MEMORY    HUGEPAGES 2Mi
0     0-1,4-5            1.5 GiB   4 (4 free)
1     2-3,6-7            1.5 GiB   4 (4 free)
4     none: memory only  16.0 GiB  4 (4 free)

DISTANCE  0   1   4
0         10  20  20
1         20  10  20
4         20  20  10

SOCKET  NODES  CORES  CPUS
0       0      2      0-1,4-5
1       1      2      2-3,6-7

Last-level caches: 2, each of 4 CPUs
";
        assert_eq!(
            render(&TopologyReport { topology: Topology::from(&machine), guarantees: None }),
            expected
        );
    }

    #[test]
    fn machine_with_sparse_nodes_of_which_some_have_no_memory_or_nothing() {
        let pages = HugepageSize(Bytes::mib(2));
        let machine = Machine::builder()
            .node_ids([4, 5, 6, 31].map(NodeId))
            .cores_per_node(2)
            .memory(Bytes::gib(1))
            .node(NodeId(4), |node| node.hugepages(pages, 12))
            .node(NodeId(5), |node| node.hugepages(pages, 8))
            .node(NodeId(6), |node| node.memory(Bytes(0)))
            .node(NodeId(31), |node| node.cores(0).memory(Bytes(0)))
            .build()
            .unwrap();
        let expected = "\
4 nodes, 1 socket, 6 cores, 6 CPUs, 2.0 GiB

NODE  CPUS  MEMORY   HUGEPAGES 2Mi
4     0-1   1.0 GiB  12 (12 free)
5     2-3   1.0 GiB  8 (8 free)
6     4-5   0 B      -
31          0 B      -

DISTANCE  4   5   6   31
4         10  20  20  20
5         20  10  20  20
6         20  20  10  20
31        20  20  20  10

SOCKET  NODES  CORES  CPUS
0       4-6    6      0-5

Last-level caches: 3, each of 2 CPUs
";
        assert_eq!(
            render(&TopologyReport { topology: Topology::from(&machine), guarantees: None }),
            expected
        );
    }
}

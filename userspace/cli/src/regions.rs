//! `numaward regions`: the nodes of each region of a workload's memory.

use std::{collections::BTreeSet, fmt::Write as _};

use numaward_api::{Region, Regions};

use crate::{
    client::{ClientError, Server},
    control::percent_encode,
    table::{columns, row, size},
};

/// Fetches the regions of a workload.
pub(crate) async fn fetch(server: &Server, name: &str) -> Result<Regions, ClientError> {
    // A name is one segment of the path.
    let name = percent_encode(name).replace('/', "%2F");
    server.get(&format!("/api/v1/workloads/{name}/regions")).await
}

/// Renders the regions: a column for each node that has memory of one of them.
pub(crate) fn render(regions: &Regions) -> String {
    let mut text = String::new();
    if regions.regions.is_empty() {
        text.push_str("no memory was found in the processes of the workload\n");
    } else {
        let nodes: BTreeSet<u32> =
            regions.regions.iter().flat_map(|region| region.nodes.iter().map(|part| part.node)).collect();
        let mut titles = row(["REGION"]);
        titles.extend(nodes.iter().map(|node| format!("NODE {node}")));
        if regions.guaranteed.is_some() || regions.home.is_some() {
            titles.push("OFF".to_owned());
        }
        let cells = |region: &Region| {
            let mut cells = row([&region.name]);
            let bytes_on =
                |node: &u32| region.nodes.iter().find(|part| part.node == *node).map_or(0, |part| part.bytes);
            cells.extend(nodes.iter().map(|node| size(bytes_on(node))));
            cells.extend(region.off_bytes.map(size));
            cells
        };
        let rows = regions.regions.iter().map(cells);
        text.push_str(&columns(&std::iter::once(titles).chain(rows).collect::<Vec<_>>()));
    }
    if let Some(nodes) = &regions.guaranteed {
        let _ = writeln!(text, "guaranteed: nodes {nodes}");
    }
    if let Some(nodes) = &regions.home {
        let _ = writeln!(text, "automatic placement: nodes {nodes}");
    }
    for note in &regions.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

#[cfg(test)]
mod tests {
    use numaward_api::RegionNode;

    use super::*;

    #[test]
    fn each_node_has_a_column() {
        let region = |name: &str, node, off| Region {
            name: name.to_owned(),
            nodes: vec![RegionNode { node, bytes: 1 << 20 }],
            off_bytes: off,
        };
        let regions = Regions {
            processes: 1,
            notes: vec!["not all was read within 5 s".to_owned()],
            guaranteed: Some("0".to_owned()),
            home: None,
            regions: vec![region("[heap]", 0, Some(0)), region("/a\nb", 2, Some(1 << 20))],
        };
        let text = render(&regions);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["REGION", "NODE", "0", "NODE", "2", "OFF"]);
        assert_eq!(lines[2].len(), lines[1].len(), "a line break in a name is escaped");
        assert!(text.ends_with("guaranteed: nodes 0\nnot all was read within 5 s\n"), "{text}");
        let home = render(&Regions { guaranteed: None, home: Some("0".to_owned()), ..regions.clone() });
        assert!(home.contains("OFF") && home.contains("\nautomatic placement: nodes 0\n"), "{home}");
        assert!(!render(&Regions { guaranteed: None, ..regions }).contains("OFF"));
        assert_eq!(render(&Regions::default()), "no memory was found in the processes of the workload\n");
    }
}

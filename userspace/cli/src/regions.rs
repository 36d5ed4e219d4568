//! `numaward regions`: where which part of a workload's memory lies.

use std::{collections::BTreeSet, fmt::Write as _};

use numaward_api::{Region, Regions};

use crate::{
    client::{ClientError, Server},
    control::encoded,
    table::{columns, row, size},
};

/// Asks for the regions of a workload.
pub(crate) async fn fetch(server: &Server, name: &str) -> Result<Regions, ClientError> {
    // A name is one step of the path.
    let name = encoded(name).replace('/', "%2F");
    server.get(&format!("/api/v1/workloads/{name}/regions")).await
}

/// The regions for people: a column for each node that has some of them.
pub(crate) fn render(of: &Regions) -> String {
    let mut text = String::new();
    if of.regions.is_empty() {
        text.push_str("no memory was found in its processes\n");
    } else {
        let nodes: BTreeSet<u32> =
            of.regions.iter().flat_map(|region| region.nodes.iter().map(|on| on.node)).collect();
        let mut titles = row(["REGION"]);
        titles.extend(nodes.iter().map(|node| format!("NODE {node}")));
        if of.promised.is_some() || of.home.is_some() {
            titles.push("OFF".to_owned());
        }
        let cells = |region: &Region| {
            let mut cells = row([&region.name]);
            let on = |node: &u32| region.nodes.iter().find(|on| on.node == *node).map_or(0, |on| on.bytes);
            cells.extend(nodes.iter().map(|node| size(on(node))));
            cells.extend(region.off_bytes.map(size));
            cells
        };
        let rows = of.regions.iter().map(cells);
        text.push_str(&columns(&std::iter::once(titles).chain(rows).collect::<Vec<_>>()));
    }
    if let Some(promised) = &of.promised {
        let _ = writeln!(text, "promised: nodes {promised}");
    }
    if let Some(home) = &of.home {
        let _ = writeln!(text, "home: nodes {home}");
    }
    for note in &of.notes {
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
        let of = Regions {
            processes: 1,
            notes: vec!["not all was read within 5 s".to_owned()],
            promised: Some("0".to_owned()),
            home: None,
            regions: vec![region("[heap]", 0, Some(0)), region("/a\nb", 2, Some(1 << 20))],
        };
        let text = render(&of);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["REGION", "NODE", "0", "NODE", "2", "OFF"]);
        assert_eq!(lines[2].len(), lines[1].len(), "names are what somebody else chose");
        assert!(text.ends_with("promised: nodes 0\nnot all was read within 5 s\n"), "{text}");
        let home = render(&Regions { promised: None, home: Some("0".to_owned()), ..of.clone() });
        assert!(home.contains("OFF") && home.contains("\nhome: nodes 0\n"), "{home}");
        assert!(!render(&Regions { promised: None, ..of }).contains("OFF"));
        assert_eq!(render(&Regions::default()), "no memory was found in its processes\n");
    }
}

//! Another machine than that of a trace.

use std::path::Path;

use anyhow::{Context, bail};
use numaward_engine::Quantity;
use numaward_topology::{Bytes, HugepageSize, Machine, NodeId};

use crate::topology;

/// The machine that `--machine` means.
pub(super) fn find(text: &str) -> anyhow::Result<Machine> {
    if text == "here" {
        return topology::machine(Path::new("/"));
    }
    if Path::new(text).is_dir() {
        return topology::machine(Path::new(text));
    }
    described(text).with_context(|| {
        format!(
            "--machine {text:?} is neither \"here\", nor a directory, nor a description such as \
             4x32,128Gi,smt=2,sockets=2,distances=12/32,hugepages-1Gi=4,memory-only=256Gi"
        )
    })
}

fn described(text: &str) -> anyhow::Result<Machine> {
    let mut parts = text.split(',');
    let (nodes, cpus) =
        parts.next().and_then(|size| size.split_once('x')).context("no NODESxCPUS at the start")?;
    let (nodes, cpus) = (number("NODES", nodes)?, number("CPUS", cpus)?);
    let memory = bytes("MEMORY", parts.next().context("no memory after NODESxCPUS")?)?;
    let (mut smt, mut sockets, mut distances) = (1, 1, None);
    let mut builder = Machine::builder().nodes(nodes).memory(memory);
    for part in parts {
        let (key, value) = part.split_once('=').with_context(|| format!("{part:?} is not KEY=VALUE"))?;
        match key {
            "smt" => smt = number(key, value)?,
            "sockets" => sockets = number(key, value)?,
            "distances" => {
                let (within, between) =
                    value.split_once('/').context("distances: expected WITHIN/BETWEEN")?;
                distances = Some((number(key, within)?, number(key, between)?));
            }
            "hugepages-2Mi" => {
                builder = builder.hugepages(HugepageSize(Bytes::mib(2)), number(key, value)?.into());
            }
            "hugepages-1Gi" => {
                builder = builder.hugepages(HugepageSize(Bytes::gib(1)), number(key, value)?.into());
            }
            "memory-only" => {
                let memory = bytes(key, value)?;
                builder = builder.node(NodeId(nodes), |node| node.cores(0).memory(memory));
            }
            _ => bail!("{key:?} is unknown"),
        }
    }
    if smt == 0 || cpus % smt != 0 {
        bail!("{cpus} CPUs of a node are no whole cores of {smt} threads");
    }
    builder = builder.cores_per_node(cpus / smt).smt(smt).sockets(sockets);
    if let Some((within, between)) = distances {
        builder = builder.socket_distances(within, between);
    }
    Ok(builder.build()?)
}

fn number(what: &str, text: &str) -> anyhow::Result<u32> {
    text.parse().ok().with_context(|| format!("{what}: {text:?} is not a number"))
}

fn bytes(what: &str, text: &str) -> anyhow::Result<Bytes> {
    let quantity: Option<Quantity> = text.parse().ok();
    let bytes = quantity.and_then(Quantity::units);
    bytes.map(Bytes).with_context(|| format!("{what}: {text:?} is not a size such as 128Gi"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_a_machine() {
        let machine =
            find("2x8,4Gi,smt=2,sockets=2,distances=10/21,hugepages-1Gi=1,memory-only=16Gi").unwrap();
        assert_eq!(machine.nodes.len(), 3);
        assert_eq!(machine.nodes[&NodeId(0)].cpus.to_string(), "0-3,8-11");
        assert_eq!(machine.distance(NodeId(0), NodeId(1)), Some(21));
        assert_eq!(machine.nodes[&NodeId(2)].memory, Bytes::gib(16));
        assert!(machine.nodes[&NodeId(2)].cpus.is_empty());
    }

    #[test]
    fn what_is_none_is_refused_with_the_reason() {
        for (text, reason) in [
            ("fast", "no NODESxCPUS"),
            ("2x8", "no memory"),
            ("2x8,much", "\"much\" is not a size"),
            ("2xmany,1Gi", "\"many\" is not a number"),
            ("2x9,1Gi,smt=2", "9 CPUs"),
            ("2x8,1Gi,smt=0", "0 threads"),
            ("2x8,1Gi,colour=red", "\"colour\" is unknown"),
            ("2x8,1Gi,red", "not KEY=VALUE"),
            ("0x8,1Gi", "node"),
            ("4294967295x8,1Gi", "node"),
        ] {
            let error = format!("{:#}", find(text).expect_err(text));
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}

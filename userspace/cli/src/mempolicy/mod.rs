//! Memory policies of a process: rules for the node of each new page.
//!
//! Source: `Documentation/admin-guide/mm/numa_memory_policy.rst`, `set_mempolicy(2)`.

pub(crate) mod sys;

use std::str::FromStr;

use anyhow::Context as _;
use numaward_api as api;
use numaward_topology::NodeSet;

use self::sys::Mode;

/// A memory policy with its nodes: `interleave:0-1`.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{policy}:{nodes}")]
pub(crate) struct NodeMemoryPolicy {
    policy: api::MemoryPolicy,
    nodes: NodeSet,
}

impl NodeMemoryPolicy {
    /// Returns the policy for the nodes of guaranteed memory. Huge pages of pools may be on other nodes.
    pub(crate) fn from_blocks(policy: api::MemoryPolicy, memory: &[api::MemoryBlock]) -> Self {
        let blocks = memory.iter().filter(|block| block.kind == "memory");
        let nodes = blocks.filter_map(|block| block.nodes.parse::<NodeSet>().ok());
        Self { policy, nodes: nodes.fold(NodeSet::new(), |all, nodes| &all | &nodes) }
    }

    /// Sets the policy of this process.
    pub(crate) fn apply(&self) -> anyhow::Result<()> {
        let mode = match self.policy {
            api::MemoryPolicy::Bind => Mode::Bind,
            api::MemoryPolicy::PreferredMany => Mode::PreferredMany,
            api::MemoryPolicy::Interleave => Mode::Interleave,
            api::MemoryPolicy::WeightedInterleave => Mode::WeightedInterleave,
        };
        set_policy(mode, false, &self.nodes)
    }
}

impl FromStr for NodeMemoryPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (policy, nodes) = text.split_once(':').ok_or("the nodes are missing, as in interleave:0-1")?;
        let policy = policy.parse().map_err(|error: api::UnknownName| error.to_string())?;
        let nodes = nodes.parse().map_err(|error| format!("{nodes:?}: {error}"))?;
        Ok(Self { policy, nodes })
    }
}

/// Sets the memory policy of this process.
pub(crate) fn set_policy(mode: Mode, balancing: bool, nodes: &NodeSet) -> anyhow::Result<()> {
    sys::set_mempolicy(mode, balancing, nodes).with_context(|| match mode {
        Mode::WeightedInterleave => {
            "the kernel refuses weighted-interleave, which requires Linux 6.9 or newer".to_owned()
        }
        Mode::PreferredMany => {
            "the kernel refuses preferred-many, which requires Linux 5.15 or newer".to_owned()
        }
        _ if balancing => "the kernel refuses --balancing, which requires Linux 5.12 or newer".to_owned(),
        _ => format!("the kernel refuses this memory policy on the nodes {nodes}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_uses_nodes_of_memory_blocks() {
        let block =
            |kind: &str, nodes: &str| api::MemoryBlock { kind: kind.into(), nodes: nodes.into(), bytes: 1 };
        let memory = [block("memory", "0,2"), block("memory", "3"), block("hugepages-2Mi", "1")];
        let policy = NodeMemoryPolicy::from_blocks(api::MemoryPolicy::Interleave, &memory);
        assert_eq!(policy.to_string(), "interleave:0,2-3");
        let policy: NodeMemoryPolicy = "weighted-interleave:0-1".parse().unwrap();
        assert_eq!(policy.to_string(), "weighted-interleave:0-1");
        for (wrong, words) in
            [("interleave", "nodes are missing"), ("spread:0", "memory policy"), ("bind:x", "x")]
        {
            let error = wrong.parse::<NodeMemoryPolicy>().unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
    }
}

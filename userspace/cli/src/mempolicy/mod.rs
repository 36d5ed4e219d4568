//! Memory policies of a process: which of its nodes each new page is taken from.
//!
//! Source: `Documentation/admin-guide/mm/numa_memory_policy.rst`, `set_mempolicy(2)`.

pub(crate) mod sys;

use std::str::FromStr;

use anyhow::Context as _;
use numaward_api as api;
use numaward_topology::NodeSet;

use self::sys::Mode;

/// A memory policy, and the nodes that it chooses from: `interleave:0-1`.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{policy}:{nodes}")]
pub(crate) struct Spread {
    policy: api::MemoryPolicy,
    nodes: NodeSet,
}

impl Spread {
    /// Over the nodes on which memory is promised. Huge pages of pools may be on others.
    pub(crate) fn over(policy: api::MemoryPolicy, memory: &[api::MemoryBlock]) -> Self {
        let blocks = memory.iter().filter(|block| block.kind == "memory");
        let nodes = blocks.filter_map(|block| block.nodes.parse::<NodeSet>().ok());
        Self { policy, nodes: nodes.fold(NodeSet::new(), |all, nodes| &all | &nodes) }
    }

    /// Makes it the policy of this process.
    pub(crate) fn set(&self) -> anyhow::Result<()> {
        let mode = match self.policy {
            api::MemoryPolicy::Bind => Mode::Bind,
            api::MemoryPolicy::PreferredMany => Mode::PreferredMany,
            api::MemoryPolicy::Interleave => Mode::Interleave,
            api::MemoryPolicy::WeightedInterleave => Mode::WeightedInterleave,
        };
        set(mode, false, &self.nodes)
    }
}

impl FromStr for Spread {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (policy, nodes) = text.split_once(':').ok_or("it has no nodes, such as interleave:0-1")?;
        let policy = policy.parse().map_err(|error: api::UnknownName| error.to_string())?;
        let nodes = nodes.parse().map_err(|error| format!("{nodes:?}: {error}"))?;
        Ok(Self { policy, nodes })
    }
}

/// Gives a memory policy to this process.
pub(crate) fn set(mode: Mode, balancing: bool, nodes: &NodeSet) -> anyhow::Result<()> {
    sys::set_mempolicy(mode, balancing, nodes).with_context(|| match mode {
        Mode::WeightedInterleave => {
            "the kernel refuses weighted-interleave: it takes Linux 6.9 or newer".to_owned()
        }
        Mode::PreferredMany => "the kernel refuses preferred-many: it takes Linux 5.15 or newer".to_owned(),
        _ if balancing => "the kernel refuses --balancing: it takes Linux 5.12 or newer".to_owned(),
        _ => format!("the kernel refuses this memory policy on the nodes {nodes}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_over_the_nodes_of_the_memory() {
        let block =
            |kind: &str, nodes: &str| api::MemoryBlock { kind: kind.into(), nodes: nodes.into(), bytes: 1 };
        let memory = [block("memory", "0,2"), block("memory", "3"), block("hugepages-2Mi", "1")];
        let spread = Spread::over(api::MemoryPolicy::Interleave, &memory);
        assert_eq!(spread.to_string(), "interleave:0,2-3");
        let spread: Spread = "weighted-interleave:0-1".parse().unwrap();
        assert_eq!(spread.to_string(), "weighted-interleave:0-1");
        for (wrong, words) in [("interleave", "no nodes"), ("spread:0", "memory policy"), ("bind:x", "x")] {
            let error = wrong.parse::<Spread>().unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
    }
}

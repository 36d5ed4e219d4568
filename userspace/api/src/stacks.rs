//! Call chains: the code of a workload that allocates or accesses memory of other nodes.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

use crate::safe_text::is_unsafe;

/// The maximum number of call chains in a list.
pub const MAX_STACKS: usize = 2000;

/// The call chains of the remote allocations and accesses of a workload since it was first seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stacks {
    /// The number of remote pages for which one chain is recorded (`observe.callChains.sampleEvery`).
    pub sample_every: u32,
    /// The number of chains, of all workloads, that were lost because the map was full
    /// (`observe.callChains.maxStacks`).
    pub lost: u64,
    /// The reasons for which some functions have no name.
    pub notes: Vec<String>,
    /// The chains, largest first; at most 2,000. Further chains are added up by kind and node.
    pub stacks: Vec<CallStack>,
}

/// A call chain and its bytes.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CallStack {
    /// The operation at the end of the chain.
    pub kind: StackKind,
    /// The node of the memory; absent if unknown.
    pub node: Option<u32>,
    /// Allocated bytes, or accessed bytes as sampled by the kernel, including the pages for which no chain was
    /// recorded.
    pub bytes: u64,
    /// The name of the process, then its functions, outermost first. Names of kernel functions end in `_[k]`.
    #[schema(examples(json!(["server", "main", "fill", "asm_exc_page_fault_[k]"])))]
    pub frames: Vec<String>,
}

/// The operation at the end of a call chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum StackKind {
    /// An allocation on another node than that of the CPU.
    Allocations,
    /// An access to memory of another node.
    Accesses,
}

impl Stacks {
    /// Returns the chains of a kind as folded stacks for `flamegraph.pl`: one line per chain with its frames and bytes.
    pub fn folded(&self, kind: StackKind, node: Option<u32>) -> String {
        let wanted = |stack: &&CallStack| stack.kind == kind && (node.is_none() || stack.node == node);
        let mut lines: Vec<String> = self.stacks.iter().filter(wanted).map(CallStack::folded).collect();
        lines.sort_unstable();
        lines.concat()
    }
}

impl CallStack {
    fn folded(&self) -> String {
        // Function names are chosen by other programs; these characters would end a frame or a line.
        let safe = |frame: &String| frame.replace(';', ":").replace(is_unsafe, "?");
        let frames: Vec<String> = self.frames.iter().map(safe).collect();
        format!("{} {}\n", frames.join(";"), self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folded_stacks_are_one_line_each() {
        let stack = |kind, node, bytes, frames: &[&str]| CallStack {
            kind,
            node,
            bytes,
            frames: frames.iter().map(ToString::to_string).collect(),
        };
        let stacks = Stacks {
            stacks: vec![
                stack(StackKind::Allocations, Some(1), 4096, &["server", "main", "a;b\n"]),
                stack(StackKind::Allocations, Some(2), 8192, &["server", "main", "fill"]),
                stack(StackKind::Accesses, None, 1, &["server"]),
            ],
            ..Stacks::default()
        };
        assert_eq!(
            stacks.folded(StackKind::Allocations, None),
            "server;main;a:b? 4096\nserver;main;fill 8192\n"
        );
        assert_eq!(stacks.folded(StackKind::Allocations, Some(2)), "server;main;fill 8192\n");
        assert_eq!(stacks.folded(StackKind::Accesses, None), "server 1\n");
        assert_eq!(stacks.folded(StackKind::Accesses, Some(0)), "");
    }
}

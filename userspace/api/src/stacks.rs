//! Which code of a workload allocates and accesses memory of other nodes.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

use crate::safe_text::is_unsafe;

/// Call chains that are listed, at most.
pub const MAX_STACKS: usize = 2000;

/// The call chains of a workload's remote allocations and accesses since it was seen first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stacks {
    /// For how many remote pages one chain was taken (`observe.callChains.sampleEvery`).
    pub sample_every: u32,
    /// How often a chain of any workload found no room (`observe.callChains.maxStacks`).
    pub lost: u64,
    /// Why some functions have no name.
    pub notes: Vec<String>,
    /// The chains, the 2,000 with the most bytes first. All others are added up by kind and node.
    pub stacks: Vec<CallStack>,
}

/// What one way through the code did.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CallStack {
    /// What it led to.
    pub kind: StackKind,
    /// The node of the memory; absent where that is not known.
    pub node: Option<u32>,
    /// Bytes that were allocated or, as the kernel samples them, accessed, with those for which this chain stands.
    pub bytes: u64,
    /// The name of the process, then its functions, the outermost first. Those of the kernel end in `_[k]`.
    #[schema(examples(json!(["server", "main", "fill", "asm_exc_page_fault_[k]"])))]
    pub frames: Vec<String>,
}

/// What a call chain led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum StackKind {
    /// Memory was allocated on another node than that of the CPU.
    Allocations,
    /// Memory of another node was accessed.
    Accesses,
}

impl Stacks {
    /// The chains of a kind as folded stacks, which `flamegraph.pl` takes: frames and bytes, a line for each.
    pub fn folded(&self, kind: StackKind, node: Option<u32>) -> String {
        let wanted = |stack: &&CallStack| stack.kind == kind && (node.is_none() || stack.node == node);
        let mut lines: Vec<String> = self.stacks.iter().filter(wanted).map(CallStack::folded).collect();
        lines.sort_unstable();
        lines.concat()
    }
}

impl CallStack {
    fn folded(&self) -> String {
        // Names are of outside origin; a semicolon ends a frame, a line break a line.
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

//! `numaward stacks`: which code of a workload reaches across nodes.

use numaward_api::{StackKind, Stacks};

use crate::{
    client::{ClientError, Server},
    control::encoded,
    text::clean,
};

/// Asks for the call chains of a workload: those of a kind, and of a node where one is named.
pub(crate) async fn fetch(
    server: &Server,
    name: &str,
    kind: StackKind,
    node: Option<u32>,
) -> Result<Stacks, ClientError> {
    // A name is one step of the path.
    let name = encoded(name).replace('/', "%2F");
    let mut stacks: Stacks = server.get(&format!("/api/v1/workloads/{name}/stacks")).await?;
    stacks.stacks.retain(|stack| stack.kind == kind && (node.is_none() || stack.node == node));
    Ok(stacks)
}

/// Says what is missing in them, beside them.
pub(crate) fn warn(stacks: &Stacks) {
    for note in &stacks.notes {
        eprintln!("{}", clean(note));
    }
    if stacks.lost > 0 {
        eprintln!(
            "call chains found no room {} times, of all workloads; observe.callChains.maxStacks makes more",
            stacks.lost
        );
    }
    if stacks.stacks.is_empty() {
        eprintln!("nothing that was sampled reached across nodes");
    }
}

//! `numaward stacks`: the code of a workload that allocates or accesses memory of other nodes.

pub(crate) mod pprof;

use numaward_api::{StackKind, Stacks};

use crate::{
    client::{ClientError, Server},
    control::percent_encode,
    text::clean,
};

/// Fetches the call chains of a workload, of one kind and, if `node` is given, of one node.
pub(crate) async fn fetch(
    server: &Server,
    name: &str,
    kind: StackKind,
    node: Option<u32>,
) -> Result<Stacks, ClientError> {
    // A name is one segment of the path.
    let name = percent_encode(name).replace('/', "%2F");
    let mut stacks: Stacks = server.get(&format!("/api/v1/workloads/{name}/stacks")).await?;
    stacks.stacks.retain(|stack| stack.kind == kind && (node.is_none() || stack.node == node));
    Ok(stacks)
}

/// Prints on standard error which call chains are missing.
pub(crate) fn warn(stacks: &Stacks) {
    for note in &stacks.notes {
        eprintln!("{}", clean(note));
    }
    if stacks.lost > 0 {
        eprintln!(
            "{} call chains of all workloads were dropped because the table was full: raise observe.callChains.maxStacks",
            stacks.lost
        );
    }
    if stacks.stacks.is_empty() {
        eprintln!("no sampled call chain reached across nodes");
    }
}

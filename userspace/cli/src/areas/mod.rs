//! Areas of a workload's memory that are accessed: `numaward regions` with `--hot`, from the kernel's monitor, and with
//! `--sampled`, from addresses that the processor samples.

pub(crate) mod hot;
pub(crate) mod sampled;

use std::time::Duration;

use anyhow::Context as _;
use numaward_accesses::{
    NodeShare,
    hot::HotAreas,
    processes::WorkloadProcesses,
    sampled::{SampledAreas, Sampler},
};
use numaward_api::Workloads;
use numaward_cgroup::{CgroupPath, Hierarchy};

use crate::{client::Server, exit_signals::ExitSignals};

/// Maximum number of areas in a table.
const MAX_TABLE_ROWS: usize = 20;

/// Monitors the processes of a workload for some time, or until the user ends it.
pub(crate) async fn watch_hot(server: &Server, name: &str, span: Duration) -> anyhow::Result<HotAreas> {
    let workload = find(server, name).await?;
    numaward_accesses::hot::watch(&workload, over(ExitSignals::new()?, span)).await
}

/// Samples the accesses of a workload for some time, or until the user ends it.
pub(crate) async fn watch_sampled(
    server: &Server,
    name: &str,
    span: Duration,
) -> anyhow::Result<SampledAreas> {
    let sampler = Sampler::find()?;
    let workload = find(server, name).await?;
    sampler.watch(&workload, over(ExitSignals::new()?, span)).await
}

async fn over(mut exit_signals: ExitSignals, span: Duration) {
    tokio::select! {
        () = tokio::time::sleep(span) => {}
        () = exit_signals.next() => {}
    }
}

/// Looks up the cgroups of a workload in the daemon's API.
async fn find(server: &Server, name: &str) -> anyhow::Result<WorkloadProcesses> {
    let Workloads { workloads } = server.get("/api/v1/workloads").await?;
    let mut named = workloads.iter().filter(|workload| workload.workload == name).peekable();
    named.peek().with_context(|| format!("there is no workload named {name:?}"))?;
    let hierarchy = Hierarchy::open()?;
    let mut dirs = Vec::new();
    for cgroup in named.filter_map(|workload| workload.cgroup.as_deref()) {
        let path: CgroupPath = cgroup.parse()?;
        dirs.push(hierarchy.dir(&path));
    }
    Ok(WorkloadProcesses::new(name, dirs))
}

fn format_percent(share: f64) -> String {
    format!("{share:.0} %")
}

/// Formats shares by node: `node 0 75 %, node 1 25 %`.
fn format_shares(shares: &[NodeShare]) -> String {
    let shares = shares.iter().map(|share| format!("node {} {}", share.node, format_percent(share.percent)));
    shares.collect::<Vec<_>>().join(", ")
}

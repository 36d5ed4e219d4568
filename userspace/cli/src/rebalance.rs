//! `numaward plan` and `numaward rebalance`: moves that make a request fit.

use std::{fmt::Write as _, time::Duration};

use anyhow::Context;
use numaward_api::{
    BytesSource, Move, MovePlan, MoveState, PlanRequest, RateSource, Rebalance, RebalanceRequest,
    RebalanceState,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

use crate::{
    client::Server,
    explain,
    table::{row, size, table},
    text::clean_lines,
};

/// Interval between two requests for the progress of a rebalance.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Renders a plan.
pub(crate) fn render_plan(plan: &MovePlan) -> String {
    let mut text = explain::render_planned(&plan.allocation);
    if plan.moves.is_empty() {
        return text + "\nNo workload has to move.\n";
    }
    let moves = plan.moves.iter().map(|step| {
        let source = match step.bytes_source {
            BytesSource::Resident => "resident",
            BytesSource::Guaranteed => "guaranteed",
        };
        let (bytes, pause) =
            (format!("{} ({source})", size(step.bytes)), milliseconds(step.pause_milliseconds));
        let nodes = format!("{} -> {}", step.from_nodes, step.to_nodes);
        let cpus = format!("{} -> {}", step.from_cpus, step.to_cpus);
        row([&step.workload, &nodes, &cpus, &bytes, &pause])
    });
    let _ = write!(text, "\n{}", table(["MOVES", "NODES", "CPUS", "BYTES", "PAUSE, AT MOST"], moves));
    let rate = format!("{} a second", size(plan.rate.bytes_per_second));
    let source = match plan.rate.source {
        RateSource::Measured => "which this daemon has measured while moving pages",
        RateSource::Assumed => "which is assumed: this daemon has not moved enough pages yet to measure it",
    };
    let (bytes, pause) = (size(plan.bytes), milliseconds(plan.pause_milliseconds));
    let _ = writeln!(text, "\nIn all {bytes}, {pause} at {rate}, {source}.\nPlan {}", plan.id);
    text
}

fn milliseconds(millis: u64) -> String {
    if millis < 1000 {
        format!("{millis} ms")
    } else {
        format!("{}.{} s", millis / 1000, millis % 1000 / 100)
    }
}

/// Renders the outcome of a rebalance.
pub(crate) fn render_outcome(outcome: &Rebalance) -> String {
    let reason = outcome.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
    let mut text = match outcome.state {
        RebalanceState::Done => "The request fits now.\n".to_owned(),
        RebalanceState::Cancelled => format!("Cancelled{reason}\n"),
        _ => format!("Failed{reason}\n"),
    };
    for step in outcome.moves.iter().filter(|step| step.state == Some(MoveState::Stays)) {
        let _ = writeln!(text, "{} could not be moved back, and is on node {}", step.workload, step.to_nodes);
    }
    if let Some(allocation) = &outcome.allocation {
        text += &explain::render_summary(allocation);
    }
    text
}

/// Renders a move in a line.
fn progress(step: &Move) -> String {
    let Move { workload, from_nodes, to_nodes, .. } = step;
    let moved = step
        .moved_bytes
        .map_or_else(String::new, |moved| format!(", {} of {}", size(moved), size(step.bytes)));
    let state = match step.state {
        None | Some(MoveState::Planned) => "is next".to_owned(),
        Some(MoveState::Moving) => format!("moves from node {from_nodes} to {to_nodes}{moved}"),
        Some(MoveState::Moved) => format!("was moved from node {from_nodes} to {to_nodes}{moved}"),
        Some(MoveState::MovingBack) => format!("moves back to node {from_nodes}"),
        Some(MoveState::TakenBack) => format!("is on node {from_nodes} again"),
        Some(MoveState::Stays) => format!("could not be moved back, and is on node {to_nodes}"),
        Some(MoveState::Gone) => "ended".to_owned(),
    };
    format!("{workload} {state}")
}

/// Executes a plan, and prints each change on standard error. An interrupt cancels the plan.
pub(crate) async fn apply(
    control: &Server,
    planned: PlanRequest,
    plan: &MovePlan,
    admit: bool,
) -> anyhow::Result<Rebalance> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut end = signal(SignalKind::terminate())?;
    let PlanRequest { request, max_moves, max_bytes } = planned;
    let apply_request =
        RebalanceRequest { request, max_moves, max_bytes, plan: Some(plan.id.clone()), admit };
    let started = control.rebalance(&apply_request).await?;
    let mut printed: Vec<String> = started.moves.iter().map(progress).collect();
    loop {
        tokio::select! {
            () = sleep(POLL_INTERVAL) => {}
            _ = interrupt.recv() => cancel(control).await,
            _ = end.recv() => cancel(control).await,
        }
        let now = control.rebalance_progress().await?;
        if now.id != started.id {
            anyhow::bail!(
                "another rebalance has started meanwhile: the daemon's events have the outcome of this one"
            );
        }
        let lines: Vec<String> = now.moves.iter().map(progress).collect();
        for line in lines.iter().filter(|line| !printed.contains(line)) {
            eprintln!("{}", clean_lines(line));
        }
        printed = lines;
        if now.state.is_over() {
            return Ok(now);
        }
    }
}

/// Cancels the rebalance, unless it has ended.
async fn cancel(control: &Server) {
    match control.cancel_rebalance().await.context("the rebalance cannot be cancelled") {
        Ok(_) => eprintln!("cancelled: the moves that were made are undone"),
        Err(error) => eprintln!("numaward: {}", clean_lines(&format!("{error:#}"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plan() -> MovePlan {
        serde_json::from_value(json!({
            "id": "8d2f6c01a3e45b79", "bytes": 268_435_456, "pauseMilliseconds": 1500,
            "rate": {"bytesPerSecond": 178_956_970, "source": "measured"},
            "moves": [{"workload": "redis", "fromNodes": "0", "toNodes": "1", "fromCpus": "2-3", "toCpus": "6-7",
                       "bytes": 268_435_456, "bytesSource": "resident", "pauseMilliseconds": 999}],
            "allocation": {"name": "new", "target": "exec", "cgroup": "/numaward/new", "directory": "/x", "cpus": "2-3",
                           "nodes": "0", "memory": [], "enforced": true, "settings": {}, "drift": []},
        }))
        .unwrap()
    }

    #[test]
    fn plan_names_source_of_figures() {
        let expected = "\
would hold CPUs 2-3 and memory on node 0

MOVES  NODES   CPUS        BYTES                 PAUSE, AT MOST
redis  0 -> 1  2-3 -> 6-7  256.0 MiB (resident)  999 ms

In all 256.0 MiB, 1.5 s at 170.7 MiB a second, which this daemon has measured while moving pages.
Plan 8d2f6c01a3e45b79
";
        assert_eq!(render_plan(&plan()), expected);
        let none = MovePlan { moves: Vec::new(), ..plan() };
        assert!(render_plan(&none).ends_with("\nNo workload has to move.\n"));
    }

    #[test]
    fn renders_each_move_state() {
        let step = |state| Move { state: Some(state), moved_bytes: Some(1 << 20), ..plan().moves.remove(0) };
        assert_eq!(progress(&step(MoveState::Moving)), "redis moves from node 0 to 1, 1.0 MiB of 256.0 MiB");
        assert_eq!(progress(&step(MoveState::TakenBack)), "redis is on node 0 again");
        let outcome = Rebalance {
            id: String::new(),
            request: None,
            automatic: false,
            state: RebalanceState::Failed,
            moves: vec![step(MoveState::Stays)],
            reason: Some("no room".to_owned()),
            allocation: None,
        };
        assert_eq!(
            render_outcome(&outcome),
            "Failed: no room\nredis could not be moved back, and is on node 1\n"
        );
    }
}

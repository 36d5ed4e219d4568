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

/// How often it is asked how far a rebalance is.
const PACE: Duration = Duration::from_millis(250);

/// A plan for people.
pub(crate) fn render_plan(plan: &MovePlan) -> String {
    let mut text = explain::placed(&plan.allocation, "would hold");
    if plan.moves.is_empty() {
        return text + "\nNobody has to move.\n";
    }
    let moves = plan.moves.iter().map(|of| {
        let source = match of.bytes_source {
            BytesSource::Resident => "resident",
            BytesSource::Promised => "promised",
        };
        let (bytes, pause) = (format!("{} ({source})", size(of.bytes)), milliseconds(of.pause_milliseconds));
        let nodes = format!("{} -> {}", of.from_nodes, of.to_nodes);
        let cpus = format!("{} -> {}", of.from_cpus, of.to_cpus);
        row([&of.workload, &nodes, &cpus, &bytes, &pause])
    });
    let _ = write!(text, "\n{}", table(["MOVES", "NODES", "CPUS", "BYTES", "PAUSE, AT MOST"], moves));
    let rate = format!("{} a second", size(plan.rate.bytes_per_second));
    let source = match plan.rate.source {
        RateSource::Measured => "as this daemon has moved pages so far",
        RateSource::Assumed => "which is assumed: this daemon has not moved enough yet to know",
    };
    let (bytes, pause) = (size(plan.bytes), milliseconds(plan.pause_milliseconds));
    let _ = writeln!(text, "\nIn all {bytes}, {pause} at {rate}, {source}.\nPlan {}", plan.id);
    text
}

fn milliseconds(of: u64) -> String {
    if of < 1000 { format!("{of} ms") } else { format!("{}.{} s", of / 1000, of % 1000 / 100) }
}

/// What came of a rebalance, for people.
pub(crate) fn render_over(over: &Rebalance) -> String {
    let reason = over.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
    let mut text = match over.state {
        RebalanceState::Done => "There is room.\n".to_owned(),
        RebalanceState::Cancelled => format!("Cancelled{reason}\n"),
        _ => format!("Failed{reason}\n"),
    };
    for of in over.moves.iter().filter(|of| of.state == Some(MoveState::Stays)) {
        let _ = writeln!(text, "{} could not be moved back, and is on node {}", of.workload, of.to_nodes);
    }
    if let Some(allocation) = &over.allocation {
        text += &explain::placed(allocation, "holds");
    }
    text
}

/// A move in a line.
fn progress(of: &Move) -> String {
    let Move { workload, from_nodes, to_nodes, .. } = of;
    let moved =
        of.moved_bytes.map_or_else(String::new, |moved| format!(", {} of {}", size(moved), size(of.bytes)));
    let state = match of.state {
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

/// Carries a plan out, with a line on standard error for whatever changes. An interrupt cancels it.
pub(crate) async fn apply(
    control: &Server,
    planned: PlanRequest,
    plan: &MovePlan,
    admit: bool,
) -> anyhow::Result<Rebalance> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut end = signal(SignalKind::terminate())?;
    let PlanRequest { request, max_moves, max_bytes } = planned;
    let asked = RebalanceRequest { request, max_moves, max_bytes, plan: Some(plan.id.clone()), admit };
    let begun = control.rebalance(&asked).await?;
    let mut said: Vec<String> = begun.moves.iter().map(progress).collect();
    loop {
        tokio::select! {
            () = sleep(PACE) => {}
            _ = interrupt.recv() => cancel(control).await,
            _ = end.recv() => cancel(control).await,
        }
        let now = control.rebalance_progress().await?;
        if now.id != begun.id {
            anyhow::bail!(
                "another rebalance was begun meanwhile: the daemon's events say what became of this one"
            );
        }
        let lines: Vec<String> = now.moves.iter().map(progress).collect();
        for line in lines.iter().filter(|line| !said.contains(line)) {
            eprintln!("{}", clean_lines(line));
        }
        said = lines;
        if now.state.is_over() {
            return Ok(now);
        }
    }
}

/// Cancels a rebalance, unless it is over.
async fn cancel(control: &Server) {
    match control.cancel_rebalance().await.context("it cannot be cancelled") {
        Ok(_) => eprintln!("cancelled: what was moved is moved back"),
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
    fn a_plan_names_moves_bytes_and_where_its_figures_come_from() {
        let expected = "\
new would hold CPUs 2-3 and memory on node 0 (cgroup /numaward/new)

MOVES  NODES   CPUS        BYTES                 PAUSE, AT MOST
redis  0 -> 1  2-3 -> 6-7  256.0 MiB (resident)  999 ms

In all 256.0 MiB, 1.5 s at 170.7 MiB a second, as this daemon has moved pages so far.
Plan 8d2f6c01a3e45b79
";
        assert_eq!(render_plan(&plan()), expected);
        let none = MovePlan { moves: Vec::new(), ..plan() };
        assert!(render_plan(&none).ends_with("\nNobody has to move.\n"));
    }

    #[test]
    fn each_state_of_a_move_is_a_line() {
        let of = |state| Move { state: Some(state), moved_bytes: Some(1 << 20), ..plan().moves.remove(0) };
        assert_eq!(progress(&of(MoveState::Moving)), "redis moves from node 0 to 1, 1.0 MiB of 256.0 MiB");
        assert_eq!(progress(&of(MoveState::TakenBack)), "redis is on node 0 again");
        let over = Rebalance {
            id: String::new(),
            request: None,
            automatic: false,
            state: RebalanceState::Failed,
            moves: vec![of(MoveState::Stays)],
            reason: Some("no room".to_owned()),
            allocation: None,
        };
        assert_eq!(render_over(&over), "Failed: no room\nredis could not be moved back, and is on node 1\n");
    }
}

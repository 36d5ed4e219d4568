//! `numaward guarantee` and `numaward explain`: allocations and decisions as text.

use std::fmt::Write;

use numaward_api::{Allocation, Drift, DriftState, DryRun, Explanation, Noticed, Writer};

use crate::{
    refusal::rejection,
    table::{columns, row, size},
};

/// An allocation for people, with why it is as it is.
pub(crate) fn render_allocation(allocation: &Allocation) -> String {
    let mut text = placed(allocation, "holds");
    if let Some(explanation) = &allocation.explanation {
        text.push_str(&render_explanation(explanation));
    }
    text
}

/// An allocation for people, in a line or two.
pub(crate) fn placed(allocation: &Allocation, verb: &str) -> String {
    let Allocation { name, cgroup, cpus, nodes, .. } = allocation;
    let mut text = format!("{name} {verb} CPUs {cpus} and memory on node {nodes} (cgroup {cgroup})\n");
    for block in &allocation.memory {
        let _ = writeln!(text, "  {} {} on node {}", block.kind, size(block.bytes), block.nodes);
    }
    if !allocation.enforced {
        text.push_str("  not enforced: enforcement.mode is not on in the daemon's configuration\n");
    }
    if allocation.stalled {
        text.push_str("  is slowed down at memory.high and does not get on\n");
    }
    if let Some(moved) = &allocation.moved {
        let (done, left) = (size(moved.moved_bytes), size(moved.left_bytes));
        let more = if moved.running { ", and more is being moved" } else { "" };
        let _ = writeln!(text, "  {done} moved to its nodes, {left} could not be{more}");
    }
    if let Some(lack) = &allocation.lack {
        let cpus = if lack.cpus.is_empty() { "no CPU" } else { lack.cpus.as_str() };
        let bytes = lack.memory.iter().map(|block| block.bytes).sum();
        let _ = writeln!(text, "  of this the machine lacks CPUs: {cpus}, memory: {}", size(bytes));
    }
    for line in allocation.drift.iter().map(drifted) {
        let _ = writeln!(text, "  {line}");
    }
    text
}

/// A knob that drifted, in a line.
fn drifted(drift: &Drift) -> String {
    let Drift { knob, cgroup, wanted, .. } = drift;
    let found = match drift.found.as_deref() {
        Some("") => "empty",
        found => found.unwrap_or("not there"),
    };
    let what = match drift.state {
        DriftState::Repaired => format!("was {found}, holds again {wanted}"),
        DriftState::Waiting => format!("is {found}, will be set to {wanted} again"),
        DriftState::Left => format!("is {found}, should be {wanted}: left to whoever keeps writing it"),
        DriftState::Ineffective => format!("is {wanted}, of which the kernel gives only {found}"),
    };
    let who = match (&drift.writer, drift.noticed) {
        (Some(Writer { pid, command, cgroup }), _) => {
            let command = command.as_deref().unwrap_or("a process that has ended");
            let cgroup = cgroup.as_ref().map_or(String::new(), |cgroup| format!(", cgroup {cgroup}"));
            format!("by {command} (process {pid}{cgroup})")
        }
        (None, Noticed::Write) => "by a process of another PID namespace".to_owned(),
        (None, Noticed::Look) => "by whom is not known".to_owned(),
    };
    let times = if drift.count == 1 { "once".to_owned() } else { format!("{} times", drift.count) };
    format!("{knob} of {cgroup} {what} (drifted {times}, last {who})")
}

/// A dry run for people.
pub(crate) fn render_dry_run(dry: &DryRun) -> String {
    let mut text = match (&dry.allocation, &dry.rejection) {
        (Some(allocation), _) => placed(allocation, "would hold"),
        (None, Some(rejected)) => format!("would be refused: {}\n", rejection(rejected)),
        (None, None) => String::new(),
    };
    text.push_str(&render_explanation(&dry.explanation));
    text
}

fn render_explanation(explanation: &Explanation) -> String {
    let mut text = String::new();
    for merge in &explanation.merges {
        text.push('\n');
        let mut rows = vec![row(["RESOURCE", "NODES", "PREFERRED"])];
        for hints in &merge.hints {
            match &hints.sets {
                None => rows.push(row([&hints.resource, "any", "-"])),
                Some(sets) if sets.is_empty() => rows.push(row([&hints.resource, "none", "-"])),
                Some(sets) => rows.extend(sets.iter().map(|hint| {
                    row([&hints.resource, &hint.nodes, if hint.preferred { "yes" } else { "no" }])
                })),
            }
            if hints.omitted > 0 {
                rows.push(row([&hints.resource, &format!("and {} more", hints.omitted), ""]));
            }
        }
        text.push_str(&columns(&rows));
        if !merge.candidates.is_empty() {
            let mut rows = vec![row(["CANDIDATE", "PREFERRED", "VERDICT"])];
            rows.extend(merge.candidates.iter().map(|candidate| {
                row([&candidate.nodes, if candidate.preferred { "yes" } else { "no" }, &candidate.verdict])
            }));
            if merge.candidates_omitted > 0 {
                rows.push(row([&format!("and {} more", merge.candidates_omitted), "", ""]));
            }
            let _ = write!(text, "\n{}", columns(&rows));
        }
        let result = merge.nodes.as_deref().unwrap_or("any");
        let verdict = if merge.accepted { "accepted" } else { "not accepted" };
        let _ = writeln!(text, "\nResult: nodes {result}, {verdict} by the topology policy");
    }
    text
}

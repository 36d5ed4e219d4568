//! `numaward guarantee` and `numaward explain`: guarantees and decisions as text.

use std::{
    collections::BTreeMap,
    fmt::{Display, Write},
};

use numaward_api::{
    Allocation, Drift, DriftDetection, DriftState, DryRun, Explanation, GuaranteeRefusal, KnobWriter,
    MissingKind, Placement, Rejection, Shortfall,
};

use crate::{
    args,
    table::{row, size, table},
};

/// Renders a guarantee with the explanation of its placement.
pub(crate) fn render_allocation(allocation: &Allocation) -> String {
    render_summary(allocation) + &allocation.explanation.as_ref().map_or_else(String::new, render_explanation)
}

/// Renders a guarantee in a few lines.
pub(crate) fn render_summary(allocation: &Allocation) -> String {
    let Allocation { name, cgroup, .. } = allocation;
    format!("{name} holds {} (cgroup {cgroup})\n{}", resources(allocation), details(allocation))
}

/// Renders the guarantee that a request would get.
pub(crate) fn render_planned(allocation: &Allocation) -> String {
    format!("would hold {}\n{}", resources(allocation), details(allocation))
}

fn resources(Allocation { cpus, nodes, .. }: &Allocation) -> String {
    let cpus = if cpus.is_empty() { "shared CPUs".to_owned() } else { format!("CPUs {cpus}") };
    let memory = if nodes.is_empty() { "no memory".to_owned() } else { format!("memory on node {nodes}") };
    format!("{cpus} and {memory}")
}

fn details(allocation: &Allocation) -> String {
    let mut text = String::new();
    for block in &allocation.memory {
        let _ = writeln!(text, "  {} {} on node {}", block.kind, size(block.bytes), block.nodes);
    }
    if !allocation.hidden_cpus.is_empty() {
        let _ =
            writeln!(text, "  the other threads of its cores stay unused: CPUs {}", allocation.hidden_cpus);
    }
    text.extend(terms(allocation).map(|terms| format!("  {terms}\n")));
    if !allocation.enforced {
        text.push_str("  not enforced: enforcement.mode is not on in the daemon's configuration\n");
    }
    if allocation.releasing {
        text.push_str("  is being released: some settings could not be restored yet, which is retried\n");
    }
    if allocation.stopped {
        text.push_str(
            "  its unit does not run: the guarantee is kept for a day, or until `numaward release`\n",
        );
    }
    if allocation.stalled {
        text.push_str("  is slowed down at memory.high and makes no progress\n");
    }
    if let Some(moved) = &allocation.moved {
        let (done, left) = (size(moved.moved_bytes), size(moved.left_bytes));
        let more = if moved.running { ", and more is being moved" } else { "" };
        let _ = writeln!(text, "  {done} moved to its nodes, {left} could not be{more}");
    }
    if let Some(missing) = &allocation.missing {
        let cpus = if missing.cpus.is_empty() { "none" } else { missing.cpus.as_str() };
        let bytes = missing.memory.iter().map(|block| block.bytes).sum();
        let _ = writeln!(text, "  missing of these: CPUs: {cpus}, memory: {}", size(bytes));
        for MissingKind { kind, cpus } in &missing.kinds {
            let _ = writeln!(text, "  not {kind} any more: CPUs {cpus}");
        }
    }
    text.extend(allocation.drift.iter().map(render_drift));
    text
}

/// Renders the terms of the placement in a line; `None` if the request had none.
fn terms(allocation: &Allocation) -> Option<String> {
    let Placement {
        preferred_nodes,
        nodes,
        tiers,
        memory_tiers,
        cpu_kinds,
        hide_siblings,
        labels,
        with,
        apart,
        same_cache,
        isolate,
        memory_policy,
        resctrl_class,
        immovable,
        burstable,
    } = &allocation.placement;
    let text = |what: &str, value: &dyn Display| format!("{what} {value}");
    let mut terms: Vec<String> = Vec::new();
    terms.extend(allocation.policy.map(|policy| text("policy", &policy)));
    terms.extend(preferred_nodes.as_ref().map(|nodes| text("preferred nodes", nodes)));
    terms.extend(nodes.as_ref().map(|nodes| text("only nodes", nodes)));
    terms.extend(tiers.map(|tiers| text("tiers", &tiers)));
    terms.extend(memory_tiers.iter().map(|tier| text("memory tier", tier)));
    terms.extend(cpu_kinds.iter().map(|kind| text("CPUs", kind)));
    terms.extend(labels.iter().map(|(key, value)| format!("label {key}={value}")));
    terms.extend(with.iter().map(|name| text("with", name)));
    terms.extend(apart.iter().map(|name| text("apart from", name)));
    terms.extend(memory_policy.map(|policy| text("memory policy", &policy)));
    terms.extend(resctrl_class.as_ref().map(|class| text("cache and bandwidth class", class)));
    let flags = [
        (hide_siblings, "hidden siblings"),
        (same_cache, "same cache"),
        (isolate, "isolated"),
        (immovable, "immovable"),
        (burstable, "burstable"),
    ];
    terms.extend(flags.into_iter().filter(|(is_set, _)| **is_set).map(|(_, name)| name.to_owned()));
    (!terms.is_empty()).then(|| format!("terms: {}", terms.join(", ")))
}

/// Renders a drifted knob in a line.
fn render_drift(drift: &Drift) -> String {
    let Drift { knob, cgroup, wanted, .. } = drift;
    let found = match drift.found.as_deref() {
        Some("") => "empty",
        found => found.unwrap_or("not there"),
    };
    let change = match drift.state {
        DriftState::Repaired => format!("was {found}, holds again {wanted}"),
        DriftState::Waiting => format!("is {found}, will be set to {wanted} again"),
        DriftState::Left => {
            format!("is {found}, should be {wanted}: not repaired, as another program keeps writing it")
        }
        DriftState::Ineffective => format!("is {wanted}, of which the kernel gives only {found}"),
    };
    let writer = match (&drift.writer, drift.noticed) {
        (Some(KnobWriter { pid, command, cgroup }), _) => {
            let command = command.as_deref().unwrap_or("a process that has ended");
            let cgroup = cgroup.as_ref().map_or(String::new(), |cgroup| format!(", cgroup {cgroup}"));
            format!("by {command} (process {pid}{cgroup})")
        }
        (None, DriftDetection::Write) => "by a process of another PID namespace".to_owned(),
        (None, DriftDetection::Check) => "by an unknown process".to_owned(),
    };
    let times = if drift.count == 1 { "once".to_owned() } else { format!("{} times", drift.count) };
    format!("  {knob} of {cgroup} {change} (drifted {times}, last {writer})\n")
}

/// Renders a dry run.
pub(crate) fn render_dry_run(dry: &DryRun) -> String {
    let outcome = match (&dry.allocation, &dry.rejection) {
        (Some(allocation), _) => render_planned(allocation),
        (None, Some(rejected)) => format!("would be refused: {}\n", render_rejection(rejected)),
        (None, None) => String::new(),
    };
    outcome + &render_explanation(&dry.explanation)
}

fn render_explanation(explanation: &Explanation) -> String {
    let yes = |is_so: bool| if is_so { "yes" } else { "no" };
    let more = |omitted: u64| (omitted > 0).then(|| format!("and {omitted} more"));
    let mut text = String::new();
    for merge in explanation.merges.iter() {
        let mut rows = Vec::new();
        for hints in &merge.hints {
            match hints.sets.as_deref() {
                None => rows.push(row([&hints.resource, "any", "-"])),
                Some([]) => rows.push(row([&hints.resource, "none", "-"])),
                Some(sets) => rows
                    .extend(sets.iter().map(|hint| row([&hints.resource, &hint.nodes, yes(hint.preferred)]))),
            }
            rows.extend(more(hints.omitted).map(|more| row([&hints.resource, &more, ""])));
        }
        if !rows.is_empty() {
            let _ = write!(text, "\n{}", table(["RESOURCE", "NODES", "PREFERRED"], rows));
        }
        if !merge.candidates.is_empty() {
            let rows = merge
                .candidates
                .iter()
                .map(|candidate| row([&candidate.nodes, yes(candidate.preferred), &candidate.verdict]));
            let rows = rows.chain(more(merge.candidates_omitted).map(|more| row([&more, "", ""])));
            let _ = write!(text, "\n{}", table(["CANDIDATE", "PREFERRED", "VERDICT"], rows));
        }
        let result = match merge.nodes.as_deref() {
            None => "any",
            Some("") => "none",
            Some(nodes) => nodes,
        };
        let verdict = if merge.accepted { "accepted" } else { "not accepted" };
        let _ = writeln!(text, "\nResult: nodes {result}, {verdict} by the topology policy");
    }
    let absent = explanation.absent_nodes_note();
    let notes: Vec<&String> = absent.iter().chain(&explanation.notes).collect();
    if !notes.is_empty() {
        text.push('\n');
    }
    text.extend(notes.iter().map(|note| format!("Note: {note}\n")));
    text
}

/// Renders the reason of a refusal.
pub(crate) fn render_refusal(refusal: &GuaranteeRefusal) -> String {
    match &refusal.rejection {
        Some(rejected) => format!("refused: {}", render_rejection(rejected)),
        None => detail_with_option(refusal),
    }
}

/// Returns the detail of a refusal. An invalid field has the name of its option; the target of a request needs none.
fn detail_with_option(GuaranteeRefusal { detail, field, .. }: &GuaranteeRefusal) -> String {
    let Some(field) = field else { return detail.clone() };
    let problem = detail.strip_prefix(field.as_str()).and_then(|rest| rest.strip_prefix(": "));
    match (problem, args::option_of_field(field)) {
        (Some(problem), Some(option)) => format!("{option}: {problem}"),
        (Some(problem), None) if field.starts_with("target") => problem.to_owned(),
        _ => detail.clone(),
    }
}

/// Renders the reasons for a rejection: the cause in the first line, then the engine's message and the nodes.
fn render_rejection(rejection: &Rejection) -> String {
    let mut text = format!("{} ({})", rejection.message, rejection.reason);
    let is_resize = rejection.reason == "Deferred";
    if let Some(cause) = missing_resources(&rejection.shortfalls, is_resize) {
        text = format!("{cause}\n  {text}");
    }
    for Shortfall { node, resource, requested, free, withheld } in &rejection.shortfalls {
        let enough = if free >= requested { "" } else { ", too little" };
        let (requested, free) = (amount(resource, *requested), amount(resource, *free));
        let _ = write!(text, "\n  node {node}: {resource} requested {requested}, free {free}{enough}");
        if *withheld > 0 {
            let _ = write!(
                text,
                "; {} more are used by workloads without a guarantee",
                amount(resource, *withheld)
            );
        }
    }
    text
}

/// Formats an amount of a resource.
fn amount(resource: &str, amount: u64) -> String {
    if resource == "cpu" { amount.to_string() } else { size(amount) }
}

/// Returns the resources of which no node has enough; `None` if there are none. The shortfalls of a resize are additional amounts on
/// the nodes of the workload.
fn missing_resources(shortfalls: &[Shortfall], is_resize: bool) -> Option<String> {
    let mut resources = BTreeMap::<&str, (u64, u64, u64)>::new();
    for Shortfall { resource, requested, free, .. } in shortfalls {
        let (most_requested, most, total) = resources.entry(resource).or_default();
        *most_requested = (*most_requested).max(*requested);
        *most = (*most).max(*free);
        *total = total.saturating_add(*free);
    }
    let missing = resources.into_iter().filter(|(_, (requested, most, _))| most < requested);
    let missing = missing.map(|(resource, (requested, most, total))| {
        let amount = |of| amount(resource, of);
        let name = if resource == "cpu" { "CPUs" } else { resource };
        let requested_amount = amount(requested);
        if is_resize {
            format!("{name}: {requested_amount} more requested, {} free on its nodes", amount(total))
        } else if total < requested {
            format!("{name}: {requested_amount} requested, {} free on all nodes together", amount(total))
        } else {
            format!("{name}: {requested_amount} requested, at most {} free on one node", amount(most))
        }
    });
    let missing: Vec<_> = missing.collect();
    (!missing.is_empty()).then(|| missing.join("; "))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn allocation(more: Value) -> Value {
        let mut allocation = json!({
            "name": "redis", "target": "exec", "cgroup": "/redis", "directory": "/sys/fs/cgroup/redis", "cpus": "2-3",
            "nodes": "0", "memory": [{"kind": "memory", "nodes": "0", "bytes": 8_u64 << 30}], "enforced": true,
            "settings": {}, "drift": [],
        });
        let (all, Value::Object(more)) = (allocation.as_object_mut().unwrap(), more) else { unreachable!() };
        all.extend(more);
        allocation
    }

    #[test]
    fn rejection_names_shortfalls() {
        let shortfall =
            |node, free| Shortfall { node, resource: "cpu".to_owned(), requested: 2, free, withheld: 0 };
        let text = render_rejection(&Rejection {
            reason: "TopologyAffinityError".to_owned(),
            message: "no".to_owned(),
            shortfalls: vec![
                shortfall(0, 1),
                shortfall(1, 2),
                Shortfall { resource: "memory".to_owned(), withheld: 1 << 30, ..shortfall(2, 1) },
            ],
        });
        assert_eq!(
            text,
            "memory: 2 B requested, 1 B free on all nodes together\n  no (TopologyAffinityError)\n  \
             node 0: cpu requested 2, free 1, too little\n  node 1: cpu requested 2, free 2\n  node 2: memory requested 2 B, free 1 B, too little; 1.0 GiB more are used by workloads without a guarantee"
        );
    }

    #[test]
    fn invalid_field_is_named_as_option() {
        let named = |field: &str| {
            let detail = format!("{field}: it is 0; allowed: 1");
            let refusal =
                json!({"title": "", "status": 422, "detail": detail, "instance": "", "field": field});
            render_refusal(&serde_json::from_value(refusal).unwrap())
        };
        assert_eq!(named("memoryLimit"), "--memory-limit: it is 0; allowed: 1");
        assert_eq!(named("placement.cpuKinds"), "--cpu-kind: it is 0; allowed: 1");
        assert_eq!(named("target.cgroup"), "it is 0; allowed: 1");
        assert_eq!(named("maxMoves"), "maxMoves: it is 0; allowed: 1");
    }

    #[test]
    fn renders_problems_of_a_guarantee() {
        let drift = |found: Option<&str>, state: &str, count: u64, writer: Value, noticed: &str| {
            json!({"cgroup": "/redis", "knob": "cpuset.cpus", "wanted": "2-3", "found": found, "state": state,
                   "count": count, "noticed": noticed, "writer": writer})
        };
        let shell = json!({"pid": 7, "command": "sh", "cgroup": "/user.slice"});
        let allocation = allocation(json!({
            "enforced": false,
            "stalled": true,
            "moved": {"running": true, "movedBytes": 1 << 20, "leftBytes": 0},
            "missing": {
                "cpus": "",
                "kinds": [{"kind": "isolated", "cpus": "2-3"}],
                "memory": [{"kind": "memory", "nodes": "0", "bytes": 1 << 30}],
            },
            "drift": [
                drift(Some(""), "repaired", 1, shell, "write"),
                drift(None, "waiting", 2, json!({"pid": 8}), "write"),
                drift(Some("0-3"), "left", 3, Value::Null, "write"),
                drift(Some("2"), "ineffective", 4, Value::Null, "look"),
            ],
            "explanation": {"merges": []},
        }));
        let expected = "\
redis holds CPUs 2-3 and memory on node 0 (cgroup /redis)
  memory 8.0 GiB on node 0
  not enforced: enforcement.mode is not on in the daemon's configuration
  is slowed down at memory.high and makes no progress
  1.0 MiB moved to its nodes, 0 B could not be, and more is being moved
  missing of these: CPUs: none, memory: 1.0 GiB
  not isolated any more: CPUs 2-3
  cpuset.cpus of /redis was empty, holds again 2-3 (drifted once, last by sh (process 7, cgroup /user.slice))
  cpuset.cpus of /redis is not there, will be set to 2-3 again (drifted 2 times, last by a process that has ended (process 8))
  cpuset.cpus of /redis is 0-3, should be 2-3: not repaired, as another program keeps writing it (drifted 3 times, last by a process of another PID namespace)
  cpuset.cpus of /redis is 2-3, of which the kernel gives only 2 (drifted 4 times, last by an unknown process)
";
        assert_eq!(render_allocation(&serde_json::from_value(allocation).unwrap()), expected);
    }

    #[test]
    fn dry_run_shows_hints_and_candidates() {
        let explanation = json!({"merges": [
            {
                "hints": [
                    {"resource": "cpu", "omitted": 3,
                     "sets": [{"nodes": "0", "preferred": true}, {"nodes": "0-1", "preferred": false}]},
                    {"resource": "memory", "sets": []},
                    {"resource": "isolation"},
                ],
                "candidates": [{"nodes": "0", "preferred": true, "verdict": "best of all"},
                               {"nodes": "0-1", "preferred": false, "verdict": "wider"}],
                "candidatesOmitted": 2, "nodes": "0", "accepted": true,
            },
            {"hints": [], "candidates": [], "accepted": false},
            {"hints": [], "candidates": [], "nodes": "", "accepted": false},
        ], "notes": ["CPUs 7 are offline", "the search ended"]});
        let merges = "
RESOURCE   NODES       PREFERRED
cpu        0           yes
cpu        0-1         no
cpu        and 3 more
memory     none        -
isolation  any         -

CANDIDATE   PREFERRED  VERDICT
0           yes        best of all
0-1         no         wider
and 2 more

Result: nodes 0, accepted by the topology policy

Result: nodes any, not accepted by the topology policy

Result: nodes none, not accepted by the topology policy

Note: CPUs 7 are offline
Note: the search ended
";
        let shortfalls = json!([
            {"node": 0, "resource": "memory", "requested": 2 << 20, "free": 1 << 20},
            {"node": 1, "resource": "cpu", "requested": 2, "free": 2},
        ]);
        let rejection = json!({"reason": "TopologyAffinityError", "message": "no", "shortfalls": shortfalls});
        for (outcome, head) in [
            (
                json!({"admitted": true, "allocation": allocation(json!({})), "explanation": explanation}),
                "would hold CPUs 2-3 and memory on node 0\n  memory 8.0 GiB on node 0\n",
            ),
            (
                json!({"admitted": false, "rejection": rejection, "explanation": explanation}),
                "would be refused: memory: 2.0 MiB requested, 1.0 MiB free on all nodes together\n  \
                 no (TopologyAffinityError)\n  node 0: memory requested 2.0 MiB, free 1.0 MiB, too little\n  node 1: cpu requested 2, free 2\n",
            ),
        ] {
            assert_eq!(render_dry_run(&serde_json::from_value(outcome).unwrap()), format!("{head}{merges}"));
        }
    }
}

//! `numaward simulate`: replays traces of pods with several strategies.

mod fleet;
mod machine;
mod reserved;
mod traces;

use std::fmt::Write as _;

use numaward_api::simulation::{PodTotals, Simulation, StrategyOutcome, TraceOutcome};
use numaward_config::Config;
use numaward_engine::{PolicyConfig, Request};
use numaward_simulation::{
    fleet::Member,
    quality::per_mille,
    replay::Replay,
    trace::{Sums, Trace},
    variant::Variant,
};
use numaward_topology::Machine;

pub(crate) use self::{
    fleet::{render as render_fleet, simulate as fleet},
    reserved::{render as render_suggested, suggest as suggested},
};
use crate::{
    args::{Simulate, StrategyName},
    table::{or_dash, table},
};

/// Returns the strategies to replay.
fn variants(args: &Simulate, config: Option<&Config>) -> Vec<Variant> {
    let tiers = args.tiers.or(config.map(|config| config.tiers)).unwrap_or_default();
    let wanted = |name| args.strategy.is_empty() || args.strategy.contains(&name);
    let mut variants = Vec::new();
    variants.extend(wanted(StrategyName::Kubelet).then_some(Variant::Kubelet));
    variants.extend(wanted(StrategyName::Native).then_some(Variant::Native { tiers }));
    variants
}

/// Converts a configuration to the policy of the engine for a machine.
type PolicyConversion = fn(&Config, &Machine) -> anyhow::Result<PolicyConfig>;

/// Returns the traces in the arguments, each with its machine and policy.
fn members<'a>(
    traces: &'a [Trace],
    args: &Simulate,
    config: Option<&Config>,
    to_policy: PolicyConversion,
) -> anyhow::Result<Vec<Member<'a>>> {
    let other = args.machine.as_deref().map(machine::find).transpose()?;
    let member = |trace: &'a Trace| {
        let wrong = |problem: String| anyhow::anyhow!("trace {:?}: {problem}", trace.name);
        let (own_machine, own_policy, requests) = trace.parts().map_err(wrong)?;
        let machine = other.clone().unwrap_or(own_machine);
        let mut policy = match config {
            Some(config) => to_policy(config, &machine)?,
            // Another machine has other reservations; the policies of the trace stay.
            None if other.is_some() => PolicyConfig {
                topology_manager_policy: own_policy.topology_manager_policy,
                topology_manager_scope: own_policy.topology_manager_scope,
                topology_manager_policy_options: own_policy.topology_manager_policy_options,
                cpu_manager_policy_options: own_policy.cpu_manager_policy_options,
                ..to_policy(&Config::default(), &machine)?
            },
            None => own_policy,
        };
        if let Some(wanted) = args.policy {
            policy.topology_manager_policy = wanted;
        }
        Ok(Member { trace, machine, policy, requests })
    };
    traces.iter().map(member).collect()
}

/// Replays the traces in the arguments.
pub(crate) fn simulate(
    args: &Simulate,
    config: Option<&Config>,
    to_policy: PolicyConversion,
) -> anyhow::Result<Simulation> {
    let traces = traces::read(&args.traces)?;
    let variants = variants(args, config);
    let mut total: Vec<StrategyTotals> = variants.iter().map(|_| StrategyTotals::default()).collect();
    let mut all = Sums::default();
    let mut simulated = Vec::with_capacity(traces.len());
    for Member { trace, machine, policy, requests } in members(&traces, args, config, to_policy)? {
        let offered = trace.offered();
        all.add(&offered);
        let mut strategies = Vec::with_capacity(variants.len());
        for (variant, total) in variants.iter().zip(&mut total) {
            let sum = StrategyTotals::from_replay(*variant, trace, (&machine, &requests), &policy)?;
            total.add(&sum);
            strategies.push(sum.document(*variant));
        }
        let policy = policy.topology_manager_policy.to_string();
        simulated.push(TraceOutcome {
            name: trace.name.clone(),
            policy,
            offered: amounts(&offered),
            strategies,
        });
    }
    let strategies = variants.iter().zip(&total).map(|(variant, sum)| sum.document(*variant)).collect();
    Ok(Simulation { machine: args.machine.clone(), offered: amounts(&all), strategies, traces: simulated })
}

/// The outcome of a strategy for one or several traces.
#[derive(Default)]
struct StrategyTotals {
    replay: Replay,
    not_started: u64,
    reason: Option<String>,
}

impl StrategyTotals {
    /// Replays a trace with a strategy. A fault in a replay of `native` is a bug of numaward and an error. The faults of the kubelet's
    /// accounts of memory on several nodes are known and ignored.
    fn from_replay(
        variant: Variant,
        trace: &Trace,
        on: (&Machine, &[Request]),
        policy: &PolicyConfig,
    ) -> anyhow::Result<Self> {
        match variant.replay(trace, on, policy) {
            Ok(replay) => {
                let fault = replay.faults.first().filter(|_| variant != Variant::Kubelet);
                if let Some(fault) = fault {
                    anyhow::bail!("trace {:?}, {variant}: {fault}; please report it as a bug", trace.name);
                }
                Ok(Self { replay, ..Self::default() })
            }
            Err(error) => Ok(Self { not_started: 1, reason: Some(error.to_string()), ..Self::default() }),
        }
    }

    fn add(&mut self, other: &Self) {
        self.replay.sums.add(&other.replay.sums);
        self.replay.quality.add(&other.replay.quality);
        self.not_started += other.not_started;
        if self.reason.is_none() {
            self.reason.clone_from(&other.reason);
        }
    }

    fn document(&self, variant: Variant) -> StrategyOutcome {
        let Replay { sums, quality, .. } = &self.replay;
        let (strategy, tiers) = named(variant);
        StrategyOutcome {
            strategy: strategy.to_owned(),
            tiers,
            not_started: self.not_started,
            reason: self.reason.clone(),
            admitted: PodTotals { pods: sums.admitted(), ..amounts(sums) },
            on_several_nodes: quality.on_several_nodes,
            distance_in_hundredths: quality.distance_in_hundredths(),
            unusable_cpus_per_mille: quality.unusable_cpus_per_mille(),
            unusable_memory_per_mille: quality.unusable_memory_per_mille(),
        }
    }
}

/// Returns the strategy and the tiers of a variant, as in the JSON document.
fn named(variant: Variant) -> (&'static str, Option<String>) {
    match variant {
        Variant::Kubelet => ("kubelet", None),
        Variant::Native { tiers } => ("native", Some(tiers.to_string())),
    }
}

/// Describes a variant for the text output.
fn title(strategy: &str, tiers: Option<&str>) -> String {
    tiers.map_or_else(|| strategy.to_owned(), |tiers| format!("{strategy}, {tiers}"))
}

fn percent(per_mille: u64) -> String {
    format!("{}.{} %", per_mille / 10, per_mille % 10)
}

fn share(part: u64, whole: u64) -> String {
    percent(per_mille(part, whole))
}

fn amounts(sums: &Sums) -> PodTotals {
    PodTotals {
        pods: sums.guaranteed,
        cpu_milli_ticks: sums.cpu_milli_ticks,
        memory_mib_ticks: sums.memory_mib_ticks,
    }
}

/// Formats the outcomes as text.
pub(crate) fn render(simulation: &Simulation, each: bool) -> String {
    let mut text = String::new();
    for trace in simulation.traces.iter().filter(|_| each) {
        let _ = writeln!(text, "{}: {}, {} pods", trace.name, trace.policy, trace.offered.pods);
        text += &strategies(&trace.offered, &trace.strategies);
        text.push('\n');
    }
    let (traces, pods) = (simulation.traces.len(), simulation.offered.pods);
    let on = simulation.machine.as_ref().map_or_else(String::new, |machine| format!(" on {machine}"));
    let _ = writeln!(text, "{traces} traces, {pods} Guaranteed pods{on}");
    text += &strategies(&simulation.offered, &simulation.strategies);
    for simulated in &simulation.strategies {
        if let Some(reason) = &simulated.reason {
            let (strategy, not_started) = (&simulated.strategy, simulated.not_started);
            let _ = writeln!(text, "\n{strategy} does not start in {not_started} traces: {reason}");
        }
    }
    text + "\nPODS, CPU TIME and MEMORY TIME: admitted, of what was asked for. DISTANCE: from exclusive CPUs to memory, 10 \
            is local.\nUNUSABLE: free on a node on which the average pod does not fit.\nAt each tick pods leave, then those are tried \
            again that were refused, then pods arrive. A pod that is refused holds nothing, and is\ntried once more, after its \
            trace's retry_after. There is no scheduler.\n"
}

fn strategies(offered: &PodTotals, strategies: &[StrategyOutcome]) -> String {
    let rows = strategies.iter().map(|simulated| {
        let StrategyOutcome { strategy, tiers, admitted, .. } = simulated;
        vec![
            title(strategy, tiers.as_deref()),
            share(admitted.pods, offered.pods),
            share(admitted.cpu_milli_ticks, offered.cpu_milli_ticks),
            share(admitted.memory_mib_ticks, offered.memory_mib_ticks),
            simulated.on_several_nodes.to_string(),
            or_dash(simulated.distance_in_hundredths.map(|of| format!("{}.{:02}", of / 100, of % 100))),
            or_dash(simulated.unusable_cpus_per_mille.map(percent)),
            or_dash(simulated.unusable_memory_per_mille.map(percent)),
        ]
    });
    table(
        [
            "STRATEGY",
            "PODS",
            "CPU TIME",
            "MEMORY TIME",
            "ON SEVERAL NODES",
            "DISTANCE",
            "UNUSABLE CPUS",
            "UNUSABLE MEMORY",
        ],
        rows,
    )
}

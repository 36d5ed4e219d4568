//! Scenarios with the desired behaviour, run with the strategy `native`.
//!
//! A scenario has a machine, a configuration and steps (`admit`, `start`, `remove`, `restart`). In addition to the
//! kubelet's record it has the desired outcomes, as checks. A check refers to a step and the state directly after it;
//! all its members must hold. After every step, no capacity may be allocated twice, and neither a rejected pod nor a
//! completed init container may hold anything.
//!
//! A restart writes the ledger as text, reads it, carries it over to the new machine and configuration, and releases
//! the pods that are gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use numaward_engine::{
    Allocation, ContainerName, Ledger, NativeOptions, NativeStrategy, OwnerId, Rejection, Request, Strategy,
};
use numaward_simulation::{
    format::{ConfigVector, MachineVector, PodVector},
    replay,
};
use numaward_topology::{Machine, NodeId, ZoneKind};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::checks;

/// Scenario with the desired outcomes.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    machine: MachineVector,
    config: ConfigVector,
    steps: Vec<ScenarioStep>,
    desired: DesiredChecks,
}

#[derive(Clone, Debug, Deserialize)]
struct ScenarioStep {
    op: String,
    pod: Option<PodVector>,
    pod_name: Option<String>,
    container: Option<String>,
    /// With `"none"`, the containers of an admitted pod are not started.
    start: Option<String>,
    #[serde(default)]
    order: Vec<String>,
    machine: Option<MachineVector>,
    config: Option<ConfigVector>,
}

#[derive(Clone, Debug, Deserialize)]
struct DesiredChecks {
    checks: Vec<Map<String, Value>>,
}

/// Number of repetitions for measuring an admission.
const ADMISSION_REPETITIONS: usize = 5;

/// Outcome of a step.
#[derive(Default)]
pub(super) struct Outcome {
    /// Pod of the step.
    pub(super) pod: Option<Request>,
    pub(super) admitted: Option<bool>,
    pub(super) rejection: Option<Rejection>,
    pub(super) start_error: Option<String>,
    /// Pods of a restart.
    pub(super) order: Vec<String>,
    /// Median duration of the admission.
    pub(super) took: Duration,
}

/// State for the checks.
pub(super) struct World {
    pub(super) machine: Machine,
    pub(super) native: Option<NativeStrategy>,
    pub(super) ledger: Ledger,
    /// Running pods, with the allocations of their containers at the admission.
    pub(super) admitted: BTreeMap<String, (Request, BTreeMap<ContainerName, Allocation>)>,
    /// Nodes and kinds with less memory than guaranteed.
    short: BTreeSet<(NodeId, ZoneKind)>,
}

impl Scenario {
    /// Runs the scenario with `native` and returns the differences. `clock` returns the time since a fixed moment.
    pub(crate) fn run_native(&self, options: &NativeOptions, clock: &dyn Fn() -> Duration) -> Vec<String> {
        self.run(options, clock).unwrap_or_else(|error| vec![format!("not a scenario: {error}")])
    }

    fn run(&self, options: &NativeOptions, clock: &dyn Fn() -> Duration) -> Result<Vec<String>, String> {
        let mut failures = Vec::new();
        let machine = self.machine.machine()?;
        let mut config = self.config.clone();
        let mut world = World {
            machine,
            native: None,
            ledger: Ledger::default(),
            admitted: BTreeMap::new(),
            short: BTreeSet::new(),
        };
        let started = world.start(&config, options)?;
        let outcome = Outcome { start_error: started.err(), ..Outcome::default() };
        self.check(-1, &world, &outcome, &mut failures);
        for (number, step) in (0i64..).zip(&self.steps) {
            if world.native.is_none() && step.op != "restart" {
                continue;
            }
            let outcome = match step.op.as_str() {
                "admit" => world.admit(step, clock)?,
                "start" => world.start_containers(step)?,
                "remove" => world.remove(step)?,
                "restart" => {
                    if let Some(machine) = &step.machine {
                        world.machine = machine.machine()?;
                    }
                    config = step.config.clone().unwrap_or(config);
                    world.restart(step, &config, options)?
                }
                other => return Err(format!("unknown step {other:?}")),
            };
            failures.extend(
                world.invariants(&outcome).into_iter().map(|fault| format!("step {number}: {fault}")),
            );
            self.check(number, &world, &outcome, &mut failures);
        }
        Ok(failures)
    }

    fn check(&self, step: i64, world: &World, outcome: &Outcome, failures: &mut Vec<String>) {
        let of_step = |check: &&Map<String, Value>| check.get("step").and_then(Value::as_i64) == Some(step);
        for check in self.desired.checks.iter().filter(of_step) {
            for (member, expected) in
                check.iter().filter(|(member, _)| !["step", "of"].contains(&member.as_str()))
            {
                let only_admitted = check.get("of").and_then(Value::as_str) == Some("admitted");
                if let Err(problem) = checks::holds(world, outcome, member, expected, only_admitted) {
                    failures.push(format!("step {step}: {member} {expected}: {problem}"));
                }
            }
        }
    }
}

impl World {
    /// Makes the strategy. The inner error is its refusal.
    fn start(
        &mut self,
        config: &ConfigVector,
        options: &NativeOptions,
    ) -> Result<Result<(), String>, String> {
        self.native = None;
        let config = match config.config()? {
            Ok(config) => config,
            Err((_, unknown)) => return Ok(Err(unknown.to_string())),
        };
        match NativeStrategy::new(&self.machine, &config, options) {
            Ok(native) => {
                self.ledger = native.idle();
                self.native = Some(native);
                Ok(Ok(()))
            }
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    fn running(&self) -> Result<&NativeStrategy, String> {
        self.native.as_ref().ok_or_else(|| "the strategy does not run".to_owned())
    }

    fn admit(&mut self, step: &ScenarioStep, clock: &dyn Fn() -> Duration) -> Result<Outcome, String> {
        let request = step.pod.as_ref().ok_or("no pod")?.request()?;
        let native = self.running()?;
        let mut times = Vec::with_capacity(ADMISSION_REPETITIONS);
        let mut decide = || {
            let before = clock();
            let decision = native.admit(&self.ledger, &request);
            times.push(clock().saturating_sub(before));
            decision
        };
        let decision = decide();
        for _ in 1..ADMISSION_REPETITIONS {
            drop(decide());
        }
        times.sort_unstable();
        let mut outcome = Outcome {
            pod: Some(request.clone()),
            admitted: Some(decision.outcome.is_ok()),
            took: times.get(ADMISSION_REPETITIONS / 2).copied().unwrap_or_default(),
            ..Outcome::default()
        };
        let mut ledger = decision.ledger;
        match decision.outcome {
            Ok(_) => {
                if step.start.as_deref() != Some("none") {
                    for container in request.all_containers() {
                        ledger = native.note_started(&ledger, &request.owner, &container.name);
                    }
                }
                let held = ledger.owner(&request.owner).map(|account| account.containers.clone());
                self.admitted.insert(request.owner.to_string(), (request, held.unwrap_or_default()));
            }
            Err(rejection) => outcome.rejection = Some(*rejection),
        }
        self.ledger = ledger;
        Ok(outcome)
    }

    fn start_containers(&mut self, step: &ScenarioStep) -> Result<Outcome, String> {
        let name = step.pod_name.as_ref().ok_or("no pod")?;
        let Some((request, _)) = self.admitted.get(name) else { return Ok(Outcome::default()) };
        let native = self.running()?;
        let mut ledger = self.ledger.clone();
        for container in request.all_containers() {
            if step.container.as_ref().is_none_or(|wanted| wanted == container.name.as_str()) {
                ledger = native.note_started(&ledger, &request.owner, &container.name);
            }
        }
        self.ledger = ledger;
        Ok(Outcome::default())
    }

    fn remove(&mut self, step: &ScenarioStep) -> Result<Outcome, String> {
        let name = step.pod_name.as_ref().ok_or("no pod")?;
        if self.admitted.remove(name).is_some() {
            self.ledger = self.running()?.release(&self.ledger, &OwnerId::from(name.as_str()));
        }
        Ok(Outcome::default())
    }

    fn restart(
        &mut self,
        step: &ScenarioStep,
        config: &ConfigVector,
        options: &NativeOptions,
    ) -> Result<Outcome, String> {
        let text = serde_json::to_string(&self.ledger).map_err(|error| error.to_string())?;
        let before: Ledger = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let mut outcome = Outcome { order: step.order.clone(), ..Outcome::default() };
        if let Err(error) = self.start(config, options)? {
            outcome.start_error = Some(error);
            return Ok(outcome);
        }
        let native = self.running()?;
        let (mut ledger, uncovered) = native.rebase(&before);
        let gone: Vec<OwnerId> = before
            .owners()
            .map(|(owner, _)| owner.clone())
            .filter(|of| !step.order.contains(&of.to_string()))
            .collect();
        for owner in &gone {
            ledger = native.release(&ledger, owner);
        }
        self.ledger = ledger;
        self.admitted.retain(|name, _| step.order.contains(name));
        let short = uncovered.iter().flat_map(|part| {
            let kind = part.block.kind;
            part.block.affinity.iter().map(move |node| (node, kind))
        });
        self.short = short.collect();
        Ok(outcome)
    }

    /// Returns the violated invariants.
    fn invariants(&self, outcome: &Outcome) -> Vec<String> {
        let Some(native) = &self.native else { return Vec::new() };
        let mut allocatable = native.allocatable();
        // CPUs that are reserved later stay with running containers.
        allocatable.cpus = self.machine.cpu_ids();
        for (node, kind) in &self.short {
            let account = self.ledger.nodes().get(node).and_then(|node| node.kinds.get(kind));
            if let Some(account) = account.filter(|of| of.guaranteed > of.allocatable && of.free.0 == 0) {
                allocatable.memory.entry(*kind).or_default().insert(*node, account.guaranteed);
            }
        }
        let mut faults = replay::faults(&self.ledger, &allocatable);
        if let (Some(false), Some(request)) = (outcome.admitted, &outcome.pod)
            && let Some(account) = self.ledger.owner(&request.owner)
            && !account.containers.is_empty()
        {
            faults.push("the rejected pod holds something".to_owned());
        }
        for (request, _) in self.admitted.values() {
            let started =
                self.ledger.owner(&request.owner).map(|account| account.started.clone()).unwrap_or_default();
            let all = request.all_containers().all(|of| started.contains(&of.name));
            for init in request.init_containers.iter().filter(|init| !init.restartable && all) {
                if self.ledger.allocation(&request.owner, &init.name).is_some() {
                    faults.push(format!(
                        "init container {} of {} has ended and holds something",
                        init.name, request.owner
                    ));
                }
            }
        }
        faults
    }
}

//! Runs one scenario.
//!
//! The answers of the strategy are converted to the format of the vectors and compared as JSON, so that every member
//! of a vector is compared.

use std::collections::{BTreeMap, BTreeSet};

use numaward_engine::{
    Allocation, ContainerName, Decision, Grant, KubeletStrategy, Ledger, MemoryBlock, OwnerId, Request,
    Strategy as _,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    explain::Merge,
    hint::{Hint, HintList, Provider, ProviderHints},
    kubelet::Checkpoints,
    policy::{Component, KubeletVersion, StartError, StartPhase, UnknownName},
};
use numaward_simulation::format::ParsedConfig;
use numaward_topology::{CpuSet, Machine, NodeSet};
use serde_json::{Map, Value, json};

use super::vectors::{Scenario, VectorStep};

/// Members that a record omits or leaves empty if a container has none.
const MAY_BE_EMPTY: [&str; 4] = ["cpus", "cpuset_cpus", "cpuset_mems", "blocks"];

/// Placeholder for the directory of state files in messages.
const STATE_DIR: &str = "<state-dir>";

impl Scenario {
    /// Returns whether the first start is refused.
    pub(super) fn is_refused(&self) -> bool {
        let parts = self.machine.machine().and_then(|machine| Ok((machine, self.config.config()?)));
        matches!(parts, Ok((machine, Ok(config))) if KubeletStrategy::new(&machine, &config).is_err())
    }

    /// Runs the scenario and returns the differences from the record.
    pub(super) fn run(&self) -> Vec<String> {
        let world = self
            .machine
            .machine()
            .and_then(|machine| Ok(World::new(machine, self.config.config()?, self.compared.clone())));
        let mut world = match world {
            Ok(world) => world,
            Err(error) => return vec![format!("not a vector: {error}")],
        };
        let start_error = world.start(&[]).map(|_| ()).err();
        let initial = world.initial(start_error, &self.initial);
        world.compare("initial", &self.initial, &initial);
        for (index, step) in self.steps.iter().enumerate() {
            let Some(expect) = &step.expect else { break };
            if expect.get("skipped").is_some() {
                continue;
            }
            let title = format!("step {index} ({})", step.op);
            match world.step(step, expect) {
                Ok(got) => world.compare(&title, expect, &got),
                Err(error) => world.differences.push(format!("{title}: {error}")),
            }
            if !world.differences.is_empty() {
                break;
            }
        }
        world.differences
    }
}

struct World {
    machine: Machine,
    config: ParsedConfig,
    /// Running strategy.
    kubelet: Option<KubeletStrategy>,
    ledger: Ledger,
    files: Checkpoints,
    /// Running pods with their started containers.
    running: BTreeMap<String, (Request, BTreeSet<ContainerName>)>,
    differences: Vec<String>,
    /// Recorded members of each step; all if absent.
    compared: Option<BTreeSet<String>>,
}

impl World {
    fn new(machine: Machine, config: ParsedConfig, compared: Option<BTreeSet<String>>) -> Self {
        Self {
            machine,
            config,
            kubelet: None,
            ledger: Ledger::default(),
            files: Checkpoints::default(),
            running: BTreeMap::new(),
            differences: Vec::new(),
            compared,
        }
    }

    fn compare(&mut self, place: &str, expected: &Value, got: &Value) {
        let mut got = got.clone();
        if let (Some(compared), Some(members)) = (&self.compared, got.as_object_mut()) {
            members.retain(|name, _| compared.contains(name));
        }
        compare(&mut self.differences, place, expected, &got);
    }

    /// Starts the strategy with the state files and admits pods again.
    fn start(&mut self, order: &[String]) -> Result<Vec<Value>, Value> {
        if let Some(before) = self.kubelet.take() {
            self.files = before.checkpoints(&self.ledger);
        }
        self.ledger = Ledger::default();
        let unknown = |(component, name): &(_, UnknownName)| refused(*component, StartPhase::New, name);
        let config = self.config.as_ref().map_err(unknown)?;
        let kubelet = KubeletStrategy::new(&self.machine, config).map_err(|error| start_error(&error))?;
        let restored = kubelet.restore(std::mem::take(&mut self.files), STATE_DIR);
        self.files = restored.checkpoints;
        self.ledger = restored.ledger.map_err(|error| start_error(&error))?;
        let before = std::mem::take(&mut self.running);
        let mut answers = Vec::new();
        for name in order {
            let Some((request, started)) = before.get(name) else { continue };
            let decision = kubelet.admit(&self.ledger, request);
            let mut answer = admission(request, &decision, true);
            answer.insert("pod".to_owned(), json!(name));
            answers.push(Value::Object(answer));
            self.ledger = decision.ledger;
            if decision.outcome.is_ok() {
                for container in started {
                    self.ledger.set_started(&request.owner, container);
                }
                self.running.insert(name.clone(), (request.clone(), started.clone()));
            }
        }
        self.ledger = kubelet.finish_restore(&self.ledger);
        self.kubelet = Some(kubelet);
        Ok(answers)
    }

    /// Returns the result of the first start, limited to the members of the record.
    fn initial(&self, error: Option<Value>, expect: &Value) -> Value {
        if let Some(error) = error {
            return json!({ "start_error": error });
        }
        let mut initial = Map::new();
        if expect.get("machine_state").is_some() {
            let written =
                self.files.memory.as_ref().and_then(|memory| memory.write().ok()).unwrap_or_default();
            let file: Value = serde_json::from_str(&written).unwrap_or_default();
            initial.insert("machine_state".to_owned(), file["machineState"].clone());
        }
        initial.insert("default_cpuset".to_owned(), json!(self.ledger.shared_pool().to_string()));
        let allocatable = self.kubelet.as_ref().map(KubeletStrategy::allocatable);
        if let Some(allocatable) = allocatable {
            let mut memory = Vec::new();
            for (kind, nodes) in &allocatable.memory {
                for (node, bytes) in nodes {
                    memory.push((kind.to_string(), [node.0], bytes.0));
                }
            }
            memory.sort();
            let allocatable = json!({ "cpus": allocatable.cpus.to_string(), "memory": memory });
            initial.insert("allocatable".to_owned(), allocatable);
        }
        Value::Object(initial)
    }

    fn step(&mut self, step: &VectorStep, expect: &Value) -> Result<Value, String> {
        let mut got = match step.op.as_str() {
            "admit" => self.admit(step, expect)?,
            "start" => self.start_containers(step)?,
            "remove" => self.remove(step)?,
            "restart" => self.restart(step)?,
            other => return Err(format!("unknown step {other:?}")),
        };
        if let Some(state) = expect.get("state") {
            let with_reserved = state
                .pointer("/memory/numa")
                .and_then(Value::as_object)
                .is_none_or(|nodes| nodes.values().any(|node| node.get("reserved").is_some()));
            got.insert("state".to_owned(), self.state(with_reserved));
        }
        if let Some(files) = expect.get("files") {
            got.insert("files".to_owned(), self.files_like(files));
        }
        Ok(Value::Object(got))
    }

    fn admit(&mut self, step: &VectorStep, expect: &Value) -> Result<Map<String, Value>, String> {
        let kubelet = self.kubelet.as_ref().ok_or("the strategy does not run")?;
        let pod = step.pod.as_ref().ok_or("no pod")?;
        let request = pod.request()?;
        let decision = kubelet.admit(&self.ledger, &request);
        let with_hints = expect.pointer("/merge/0/hints").is_some();
        let answer = admission(&request, &decision, with_hints);
        self.ledger = decision.ledger;
        // The files must equal those computed from the allocations alone. No record of v1.36 starts with a
        // contradictory state, as some of v1.32 do.
        if self.config.as_ref().is_ok_and(|config| config.kubelet_version == KubeletVersion::V1_36) {
            let allocations = self.ledger.allocations();
            let held =
                allocations.map(|(owner, container, of)| (owner.clone(), container.clone(), of.clone()));
            let wholes = self.ledger.owners().map(|(owner, of)| (owner.clone(), of.pod_level.clone()));
            let wholes = wholes.filter(|(_, whole)| !whole.is_empty());
            let anew = kubelet.checkpoints_for(held, wholes).map_err(|error| error.to_string())?;
            if anew != kubelet.checkpoints(&self.ledger) {
                return Err(format!("made anew of the allocations, the state files are others: {anew:?}"));
            }
        }
        if decision.outcome.is_ok() {
            let mut started = BTreeSet::new();
            if step.start.as_deref() != Some("none") {
                for container in request.all_containers() {
                    self.ledger = kubelet.note_started(&self.ledger, &request.owner, &container.name);
                    started.insert(container.name.clone());
                }
            }
            self.running.insert(pod.name.clone(), (request, started));
        }
        Ok(answer)
    }

    fn start_containers(&mut self, step: &VectorStep) -> Result<Map<String, Value>, String> {
        let kubelet = self.kubelet.as_ref().ok_or("the strategy does not run")?;
        let name = step.pod_name.as_ref().ok_or("no pod")?;
        let (request, started) = self.running.get_mut(name).ok_or("no such pod runs")?;
        for container in request.all_containers() {
            let wanted = step.container.as_ref().is_none_or(|wanted| wanted == container.name.as_str());
            if wanted && started.insert(container.name.clone()) {
                self.ledger = kubelet.note_started(&self.ledger, &request.owner, &container.name);
            }
        }
        Ok(Map::new())
    }

    fn remove(&mut self, step: &VectorStep) -> Result<Map<String, Value>, String> {
        let kubelet = self.kubelet.as_ref().ok_or("the strategy does not run")?;
        let name = step.pod_name.as_ref().ok_or("no pod")?;
        self.running.remove(name);
        self.ledger = kubelet.release(&self.ledger, &OwnerId::from(name.as_str()));
        Ok(Map::new())
    }

    fn restart(&mut self, step: &VectorStep) -> Result<Map<String, Value>, String> {
        if let Some(machine) = &step.machine {
            self.machine = machine.machine()?;
        }
        if let Some(config) = &step.config {
            self.config = config.config()?;
        }
        let mut got = Map::new();
        match self.start(&step.order) {
            // The records omit an empty list of admissions.
            Ok(answers) if answers.is_empty() && step.order.is_empty() => {}
            Ok(answers) => {
                got.insert("readmit".to_owned(), Value::Array(answers));
            }
            Err(error) => {
                got.insert("start_error".to_owned(), error);
            }
        }
        Ok(got)
    }

    fn state(&self, with_reserved: bool) -> Value {
        let mut numa = Map::new();
        for (node, account) in self.ledger.nodes() {
            let of_kinds = |value: fn(&numaward_engine::ledger::KindAccount) -> u64| -> Map<String, Value> {
                account.kinds.iter().map(|(kind, of)| (kind.to_string(), json!(value(of)))).collect()
            };
            let mut state = Map::new();
            state.insert("n".to_owned(), json!(account.assignments));
            state.insert("cells".to_owned(), json!(ids(&account.group)));
            state.insert("free".to_owned(), Value::Object(of_kinds(|of| of.free.0)));
            if with_reserved {
                state.insert("reserved".to_owned(), Value::Object(of_kinds(|of| of.guaranteed.0)));
            }
            numa.insert(node.to_string(), Value::Object(state));
        }
        let entries = |value: &dyn Fn(&Allocation) -> Option<Value>| {
            let mut entries: BTreeMap<String, Map<String, Value>> = BTreeMap::new();
            for (owner, container, allocation) in self.ledger.allocations() {
                if let Some(value) = value(allocation) {
                    entries.entry(owner.to_string()).or_default().insert(container.to_string(), value);
                }
            }
            entries
        };
        let memory = entries(&|held| {
            (!held.blocks.is_empty() || held.without_memory).then(|| json!(blocks(&held.blocks)))
        });
        let cpus = entries(&|allocation| allocation.cpus.as_ref().map(|cpus| json!(cpus.to_string())));
        let mut state = json!({
            "memory": { "numa": numa, "entries": memory },
            "cpu": { "default": self.ledger.shared_pool().to_string(), "entries": cpus },
        });
        for (owner, account) in self.ledger.owners() {
            if let Some(cpus) = &account.pod_level.cpus {
                state["cpu"]["pods"][owner.as_str()] = json!(cpus.to_string());
            }
            if !account.pod_level.blocks.is_empty() {
                state["memory"]["pods"][owner.as_str()] = json!(blocks(&account.pod_level.blocks));
            }
        }
        state
    }

    /// Returns the state files. The order of a container's blocks is undefined: if nothing else differs, the expected
    /// file is returned.
    fn files_like(&self, expect: &Value) -> Value {
        let checkpoints = match &self.kubelet {
            Some(kubelet) => kubelet.checkpoints(&self.ledger),
            None => self.files.clone(),
        };
        let cpus = checkpoints.cpus.map(|cpus| cpus.write()).transpose();
        let memory = checkpoints.memory.map(|memory| memory.write()).transpose();
        let (Ok(cpus), Ok(memory)) = (cpus, memory) else { return json!("cannot be written") };
        let mut files = Map::new();
        if let Some(text) = cpus {
            files.insert(CpuCheckpoint::FILE.to_owned(), json!(text));
        }
        if let Some(text) = memory {
            let expected = expect[MemoryCheckpoint::FILE].as_str().unwrap_or_default();
            let sorted = MemoryCheckpoint::read(expected, KubeletVersion::V1_32).and_then(|mut state| {
                let rewritten = state.write()?;
                for blocks in state.entries.values_mut().flat_map(BTreeMap::values_mut) {
                    blocks.sort();
                }
                Ok((rewritten, state.write()?))
            });
            let same = sorted.is_ok_and(|(rewritten, sorted)| rewritten == expected && sorted == text);
            files.insert(MemoryCheckpoint::FILE.to_owned(), json!(if same { expected } else { &text }));
        }
        Value::Object(files)
    }
}

fn start_error(error: &StartError) -> Value {
    refused(error.component, error.phase, error)
}

fn refused(component: Component, phase: StartPhase, message: &dyn std::fmt::Display) -> Value {
    json!({ "component": component, "phase": phase, "message": message.to_string() })
}

fn ids(nodes: &NodeSet) -> Vec<u32> {
    nodes.iter().map(|node| node.0).collect()
}

fn comma_joined(nodes: &NodeSet) -> String {
    nodes.iter().map(|node| node.to_string()).collect::<Vec<_>>().join(",")
}

fn blocks(blocks: &[MemoryBlock]) -> Vec<Value> {
    let mut blocks: Vec<_> =
        blocks.iter().map(|block| (block.kind.to_string(), ids(&block.affinity), block.bytes.0)).collect();
    blocks.sort();
    blocks.into_iter().map(|block| json!(block)).collect()
}

/// Returns the answer to an admission.
fn admission(request: &Request, decision: &Decision, with_hints: bool) -> Map<String, Value> {
    let mut answer = Map::new();
    answer.insert("qos".to_owned(), json!(request.qos().to_string()));
    answer.insert("admitted".to_owned(), json!(decision.outcome.is_ok()));
    match &decision.outcome {
        Ok(grants) => {
            let containers = grants.iter().map(|of| grant(request, of, &decision.ledger)).collect();
            answer.insert("containers".to_owned(), Value::Array(containers));
        }
        Err(rejection) => {
            answer.insert("reason".to_owned(), json!(rejection.reason.to_string()));
            answer.insert("message".to_owned(), json!(rejection.message));
        }
    }
    if !decision.explanation.merges.is_empty() {
        let merges = decision.explanation.merges.iter().map(|of| merge(of, with_hints)).collect();
        answer.insert("merge".to_owned(), Value::Array(merges));
    }
    answer
}

fn grant(request: &Request, grant: &Grant, ledger: &Ledger) -> Value {
    let mut container = Map::new();
    container.insert("name".to_owned(), json!(grant.container.as_str()));
    let exclusive = grant.allocation.cpus.as_ref();
    if let Some(cpus) = exclusive {
        container.insert("cpus".to_owned(), json!(cpus.to_string()));
    }
    let allowed: &CpuSet = ledger.cpus_of(&request.owner, &grant.container);
    if !allowed.is_empty() && Some(allowed) != exclusive {
        container.insert("cpuset_cpus".to_owned(), json!(allowed.to_string()));
    }
    let nodes = grant.allocation.memory_nodes();
    if !nodes.is_empty() {
        container.insert("cpuset_mems".to_owned(), json!(comma_joined(&nodes)));
    }
    if !grant.allocation.blocks.is_empty() {
        container.insert("blocks".to_owned(), json!(blocks(&grant.allocation.blocks)));
    }
    Value::Object(container)
}

fn merge(merge: &Merge, with_hints: bool) -> Value {
    let Hint { affinity, preferred } = &merge.best;
    let mut value = Map::new();
    value.insert("container".to_owned(), json!(merge.container.as_ref().map(ContainerName::as_str)));
    let best = json!({ "affinity": affinity.as_ref().map(ids), "preferred": preferred });
    value.insert("best".to_owned(), best);
    value.insert("admit".to_owned(), json!(merge.accepted));
    if with_hints {
        let hints: Map<String, Value> = merge
            .hints
            .iter()
            .map(|(provider, hints)| {
                let name = match provider {
                    Provider::Cpus => "cpumanager",
                    Provider::Memory => "memorymanager",
                    Provider::Devices => "devicemanager",
                    Provider::PreferredNodes => "wishes",
                };
                (name.to_owned(), provider_hints(hints))
            })
            .collect();
        value.insert("hints".to_owned(), Value::Object(hints));
    }
    Value::Object(value)
}

fn provider_hints(hints: &ProviderHints) -> Value {
    let list = |hints: &HintList| -> Vec<String> {
        let hint = |hint: Hint| {
            let nodes = hint.affinity.as_ref().map(comma_joined).unwrap_or_default();
            format!("{nodes}{}", if hint.preferred { "*" } else { "" })
        };
        hints.iter().map(hint).collect()
    };
    match hints {
        ProviderHints::NoPreference => Value::Null,
        ProviderHints::NothingFeasible => json!({}),
        ProviderHints::ByResource(resources) => Value::Object(
            resources.iter().map(|(resource, hints)| (resource.to_string(), json!(list(hints)))).collect(),
        ),
    }
}

/// Collects the differences of two values.
fn compare(differences: &mut Vec<String>, place: &str, expected: &Value, got: &Value) {
    match (expected, got) {
        (Value::Object(expected), Value::Object(got)) => {
            let keys: BTreeSet<_> = expected.keys().chain(got.keys()).collect();
            for key in keys {
                let absent = Value::String("(absent)".to_owned());
                let [expected, got] = [expected, got].map(|of| of.get(key).unwrap_or(&absent));
                // A record without hints does not imply that there are none; an empty set may be absent.
                let not_recorded = key == "hints" && *expected == absent;
                let both_empty = MAY_BE_EMPTY.contains(&key.as_str())
                    && (*expected == json!("") || *expected == json!([]))
                    && *got == absent;
                if !not_recorded && !both_empty {
                    compare(differences, &format!("{place}: {key}"), expected, got);
                }
            }
        }
        (Value::Array(expected), Value::Array(got)) if expected.len() == got.len() => {
            for (index, (expected, got)) in expected.iter().zip(got).enumerate() {
                compare(differences, &format!("{place}[{index}]"), expected, got);
            }
        }
        _ if expected == got => {}
        _ => differences.push(format!("{place}: expected {expected}, got {got}")),
    }
}

//! Validation of API requests and their conversion to requests of the engine.

use std::{collections::BTreeMap, fmt};

use numaward_api as api;
use numaward_cgroup::{CgroupPath, knob::Partition};
use numaward_config::enforcement::{DeclaredGuarantee, Size};
use numaward_engine::{self as engine, Quantity, RebalanceLimits, Resources, Terms};
use numaward_model::pod::PodContainer;
use numaward_topology::{Bytes, HugepageSize, ZoneKind};
use serde::{Deserialize, Serialize};

/// Maximum number of CPUs in a request; no machine has more.
const MAX_CPUS: u64 = 65_536;
/// Maximum number of workloads that may be moved for a request.
const MAX_MOVES: u32 = 16;
/// Maximum length of a workload's name; it must fit a directory name.
const MAX_NAME: usize = 200;

/// An invalid field of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}; allowed: {allowed}")]
pub struct FieldError {
    /// Path of the field, with dots.
    pub field: String,
    pub problem: String,
    /// The allowed values.
    pub allowed: String,
}

impl FieldError {
    pub fn new(field: impl Into<String>, problem: impl Into<String>, allowed: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into(), allowed: allowed.into() }
    }
}

/// The kind of workload that a guarantee is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Target {
    /// A command in a cgroup that numaward creates.
    Exec,
    /// An existing cgroup.
    Cgroup(CgroupPath),
    /// A systemd unit.
    Unit(String),
    Container(PodContainer),
}

impl From<&Target> for api::Target {
    fn from(target: &Target) -> Self {
        match target {
            Target::Exec => Self::Exec,
            Target::Cgroup(path) => Self::Cgroup(path.to_string()),
            Target::Unit(unit) => Self::Unit(unit.clone()),
            Target::Container(of) => Self::Container(of.into()),
        }
    }
}

/// A validated request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub name: String,
    pub target: Target,
    /// The request for the engine.
    pub engine: engine::Request,
    /// Memory limit, at least the guaranteed memory. `None` only for a Burstable workload or a guarantee of CPUs alone.
    pub limit: Option<Bytes>,
    /// Placement terms.
    pub terms: Terms,
    /// Type of the cpuset partition for the exclusive CPUs.
    pub partition: Partition,
    /// The entry of the configuration, if the guarantee is declared there.
    pub declared: Option<DeclaredGuarantee>,
}

impl Request {
    /// Validates each field of an API request.
    pub fn new(asked: &api::AllocationRequest) -> Result<Self, FieldError> {
        check_name(&asked.name, asked.target == api::Target::Exec)?;
        let target = match &asked.target {
            api::Target::Exec => Target::Exec,
            api::Target::Cgroup(path) => {
                let allowed = "the path of a cgroup below the root, such as /system.slice/nginx.service";
                let wrong = |problem: String| FieldError::new("target.cgroup", problem, allowed);
                let path: CgroupPath =
                    path.parse().map_err(|_| wrong(format!("{path:?} is not a path of a cgroup")))?;
                if path.is_root() {
                    return Err(wrong("the root cgroup is the whole host".to_owned()));
                }
                Target::Cgroup(path)
            }
            api::Target::Unit(unit) => Target::Unit(check_unit(unit)?),
            api::Target::Container(_) => return Err(runtime_owned_error()),
        };
        let terms = terms(asked)?;
        let cpus = asked.cpus.map(cpus).transpose()?;
        let shares = terms.burstable || cpus.is_none_or(|cpus| cpus.whole_cpus().is_none());
        if terms.burstable && cpus.is_some_and(|cpus| cpus.whole_cpus().is_some()) {
            let problem = "the CPUs of a Burstable workload are shared";
            return Err(FieldError::new("cpus", problem, "nothing, or a part of a CPU such as 500m"));
        }
        let partition = asked.partition.map_or(Partition::Member, partition);
        if shares && partition != Partition::Member {
            let problem = "a partition is made of exclusive CPUs, and none are asked for";
            return Err(FieldError::new("partition", problem, "nothing, or whole CPUs in cpus"));
        }
        if terms.isolate && shares {
            let problem = "it isolates exclusive CPUs, and none are asked for";
            return Err(FieldError::new("placement.isolate", problem, "false, or whole CPUs in cpus"));
        }
        for (field, is_set) in
            [("cpuKinds", !terms.cpu_kinds.is_empty()), ("hideSiblings", terms.hide_siblings)]
        {
            if is_set && shares {
                let problem = "it is about exclusive CPUs, and none are asked for";
                let field = format!("placement.{field}");
                return Err(FieldError::new(field, problem, "nothing, or whole CPUs in cpus"));
            }
        }
        if terms.memory_policy.is_some() {
            let wrong = |problem| {
                FieldError::new("placement.memoryPolicy", problem, "nothing, or a command to start")
            };
            match &target {
                Target::Exec => {}
                Target::Unit(_) => {
                    return Err(wrong(
                        "systemd sets the memory policy of a unit when it starts (set NUMAPolicy= and NUMAMask=all in its file)",
                    ));
                }
                Target::Cgroup(_) | Target::Container(_) => {
                    return Err(wrong("a process sets its memory policy itself, and this one runs already"));
                }
            }
            if asked.memory.is_none() {
                return Err(wrong("it is over the nodes of the memory, and none is asked for"));
            }
            if terms.burstable {
                return Err(wrong("the policy would not follow a Burstable workload to another home node"));
            }
        }
        let memory = asked.memory.as_ref().map(|memory| bytes("memory", memory)).transpose()?;
        let has_no_guarantee = target == Target::Exec
            && cpus.is_none()
            && (&asked.memory_limit, asked.hugepages.is_empty(), terms.burstable) == (&None, true, false);
        if memory.is_none() && shares && !has_no_guarantee {
            let allowed = "an amount such as 8Gi, or nothing with a whole number of CPUs such as 1";
            let problem = match cpus {
                Some(cpus) => format!(
                    "{} is not a whole number of CPUs: the CPUs are shared, and without memory nothing is guaranteed",
                    cpus.decimal()
                ),
                None => "neither memory nor a whole number of CPUs is requested, so nothing is guaranteed"
                    .to_owned(),
            };
            return Err(FieldError::new("memory", problem, allowed));
        }
        let limit = asked.memory_limit.as_ref().map(|limit| bytes("memoryLimit", limit)).transpose()?;
        check_limit(memory.unwrap_or(Bytes(0)), limit)?;
        let mut resources = Resources::none();
        if let Some(memory) = memory {
            resources = resources.with_memory(Quantity::whole(memory.0));
        }
        for (size, amount) in hugepages(&asked.hugepages)? {
            resources = resources.with_hugepages(size, Quantity::whole(amount.0));
        }
        let limit = limit.or(memory.filter(|_| !terms.burstable));
        let engine = engine_request(&asked.name, resources, cpus, terms.burstable);
        Ok(Self { name: asked.name.clone(), target, engine, limit, terms, partition, declared: None })
    }

    /// Converts a guarantee that the configuration declares for a unit or cgroup.
    pub fn declared(declared: &DeclaredGuarantee, target: api::Target) -> Result<Self, FieldError> {
        let name = match &target {
            api::Target::Unit(name) => name.clone(),
            api::Target::Cgroup(path) => path.trim_start_matches('/').to_owned(),
            api::Target::Exec | api::Target::Container(_) => String::new(),
        };
        let hugepages = declared.hugepages.iter();
        let request = Self::new(&api::AllocationRequest {
            cpus: declared.cpus,
            memory_limit: declared.memory_limit.map(|limit| limit.0.0.to_string()),
            hugepages: hugepages.map(|(size, bytes)| (size.to_string(), bytes.0.0.to_string())).collect(),
            policy: declared.policy,
            partition: declared.partition,
            placement: declared.placement.clone(),
            memory: declared.memory.map(|memory| memory.0.0.to_string()),
            ..api::AllocationRequest::without_guarantee(name, target)
        })?;
        Ok(Self { declared: Some(declared.clone()), ..request })
    }

    /// Returns the engine request with the memory limit, from which the `QoS` class follows. Placement does not use the limit.
    pub fn limited(&self) -> engine::Request {
        let mut request = self.engine.clone();
        for (container, limit) in request.containers.iter_mut().zip(self.limit) {
            container.limits.memory.insert(ZoneKind::Memory, Quantity::whole(limit.0));
        }
        request
    }

    /// Returns true if the request has neither memory nor exclusive CPUs, so that the workload only gets a name.
    pub fn has_no_guarantee(&self) -> bool {
        let asks = |container: &engine::ContainerRequest| {
            !container.requests.memory.is_empty()
                || container.requests.cpu.is_some_and(|cpu| cpu.whole_cpus().is_some())
        };
        !self.engine.containers.iter().any(asks)
    }

    /// Returns the requested huge pages.
    pub fn hugepages(&self) -> impl Iterator<Item = (HugepageSize, Bytes)> {
        self.engine.containers.iter().flat_map(|container| &container.requests.memory).filter_map(
            |(kind, amount)| match kind {
                ZoneKind::Hugepages(size) => Some((*size, Bytes(amount.units()?))),
                ZoneKind::Memory => None,
            },
        )
    }
}

/// Change of an existing guarantee. `None` keeps the present value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resize {
    pub name: String,
    pub cpus: Option<Quantity>,
    /// Guaranteed memory.
    pub memory: Option<Bytes>,
    /// Memory limit.
    pub limit: Option<Bytes>,
    pub hugepages: BTreeMap<HugepageSize, Bytes>,
}

impl Resize {
    /// Validates each field of an API request.
    pub fn new(name: String, asked: &api::Resize) -> Result<Self, FieldError> {
        if *asked == api::Resize::default() {
            let allowed = "at least one of cpus, memory, memoryLimit and hugepages";
            return Err(FieldError::new("cpus", "nothing is to be changed", allowed));
        }
        Ok(Self {
            name,
            cpus: asked.cpus.map(cpus).transpose()?,
            memory: asked.memory.as_ref().map(|memory| bytes("memory", memory)).transpose()?,
            limit: asked.memory_limit.as_ref().map(|limit| bytes("memoryLimit", limit)).transpose()?,
            hugepages: hugepages(&asked.hugepages)?,
        })
    }
}

/// Returns the engine request for a workload with one container.
///
/// Without `cpus`, a thousandth of a CPU is requested: a fraction is never exclusive, and the `QoS` class Guaranteed
/// requires CPUs and memory.
fn engine_request(
    name: &str,
    resources: Resources,
    cpus: Option<Quantity>,
    burstable: bool,
) -> engine::Request {
    let cpu = cpus.or((!burstable).then(|| Quantity::milli(1)));
    let mut request = engine::Request::workload(name, Resources { cpu, ..resources });
    for container in request.containers.iter_mut().filter(|_| burstable) {
        // Without limits, the QoS class remains Burstable after a resize.
        container.limits = Resources::none();
    }
    request
}

/// Checks that the limit is not below the guaranteed memory.
pub fn check_limit(memory: Bytes, limit: Option<Bytes>) -> Result<(), FieldError> {
    let Some(limit) = limit.filter(|limit| *limit < memory) else { return Ok(()) };
    let problem = format!("{limit} is less than the guaranteed memory");
    Err(FieldError::new("memoryLimit", problem, format!("at least {memory}, or nothing")))
}

fn cpus(asked: api::Cpus) -> Result<Quantity, FieldError> {
    let allowed = "a number of CPUs above 0 such as 2, or a part of a CPU such as 500m, which stays shared";
    let problem = match asked.0.units() {
        Some(0) => "it is 0",
        Some(units) if units <= MAX_CPUS => return Ok(asked.0),
        _ => "that is more than any machine has",
    };
    Err(FieldError::new("cpus", problem, allowed))
}

fn hugepages(asked: &BTreeMap<String, String>) -> Result<BTreeMap<HugepageSize, Bytes>, FieldError> {
    let read = |(size, amount): (&String, &String)| {
        let field = format!("hugepages.{size}");
        let kind: Result<ZoneKind, _> = format!("hugepages-{size}").parse();
        let Ok(ZoneKind::Hugepages(size)) = kind else {
            return Err(FieldError::new(field, "not a page size", "a size such as 2Mi or 1Gi"));
        };
        let amount = bytes(&field, amount)?;
        if !amount.0.is_multiple_of(size.0.0) {
            let problem = format!("{amount} is not a whole number of pages");
            return Err(FieldError::new(field, problem, format!("a multiple of {size}")));
        }
        Ok((size, amount))
    };
    asked.iter().map(read).collect()
}

/// Converts the placement fields of a request.
fn terms(asked: &api::AllocationRequest) -> Result<Terms, FieldError> {
    let placement = &asked.placement;
    for (key, value) in &placement.labels {
        if key.is_empty() || key.contains('=') {
            let problem = format!("{key:?}: {value:?} cannot be named as key=value");
            return Err(FieldError::new(
                "placement.labels",
                problem,
                "keys that are not empty and have no =",
            ));
        }
    }
    for (field, named) in [("placement.with", &placement.with), ("placement.apart", &placement.apart)] {
        if let Some(wrong) = named.iter().find(|name| name.is_empty() || name.starts_with('=')) {
            let problem = format!("{wrong:?} is not the name of a workload");
            return Err(FieldError::new(field, problem, "names of workloads, and labels as key=value"));
        }
    }
    if let Some(both) = placement.with.intersection(&placement.apart).next() {
        let problem = format!("{both:?} is in placement.with as well");
        return Err(FieldError::new("placement.apart", problem, "each workload or label in one of the two"));
    }
    let mut terms = Terms {
        policy: asked.policy,
        isolate: placement.isolate,
        memory_policy: placement.memory_policy,
        resctrl_class: placement.resctrl_class.clone(),
        nodes: placement.nodes.clone().unwrap_or_default(),
        without_memory: asked.memory.is_none() && asked.cpus.is_some(),
        tiers: placement.tiers,
        memory_tiers: placement.memory_tiers.clone(),
        cpu_kinds: placement.cpu_kinds.clone(),
        hide_siblings: placement.hide_siblings,
        labels: placement.labels.clone(),
        with: placement.with.clone(),
        apart: placement.apart.clone(),
        same_cache: placement.same_cache,
        immovable: placement.immovable,
        burstable: placement.burstable,
        ..Terms::default()
    };
    if let Some(nodes) = placement.preferred_nodes.clone().filter(|nodes| !nodes.is_empty()) {
        terms.preferences.preferred.insert(asked.name.as_str().into(), nodes);
    }
    Ok(terms)
}

/// Returns the limits of a rebalance. By default, three workloads and any amount of memory may be moved.
pub fn limits(moves: Option<u32>, bytes: Option<&str>) -> Result<RebalanceLimits, FieldError> {
    let default = RebalanceLimits::default();
    let moves = match moves {
        None => default.moves,
        Some(moves) if (1..=MAX_MOVES).contains(&moves) => moves as usize,
        Some(moves) => {
            return Err(FieldError::new("maxMoves", format!("it is {moves}"), format!("1 to {MAX_MOVES}")));
        }
    };
    let bytes = bytes.map_or(Ok(default.bytes), |text| self::bytes("maxBytes", text))?;
    Ok(RebalanceLimits { moves, bytes, ..default })
}

/// Checks a name. It is used as a label of metrics, in URLs and, for a command, as a directory name.
fn check_name(name: &str, is_directory: bool) -> Result<(), FieldError> {
    let special = if is_directory { "_.@:-" } else { "_.@:-\\/" };
    let fits = |c: char| c.is_ascii_alphanumeric() || special.contains(c);
    if !name.is_empty()
        && name.len() <= MAX_NAME
        && name.chars().all(fits)
        && !name.starts_with(['.', '-', '/'])
    {
        return Ok(());
    }
    Err(FieldError::new(
        "name",
        format!("{name:?} is not a valid name for {}", if is_directory { "a command" } else { "a workload" }),
        format!("1 to {MAX_NAME} letters, digits and {special}, of which . - and / not at the start"),
    ))
}

fn check_unit(unit: &str) -> Result<String, FieldError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    match unit.rsplit_once('.') {
        Some((name, "service" | "scope" | "slice" | "socket" | "mount" | "swap"))
            if !name.is_empty() && unit.chars().all(fits) =>
        {
            Ok(unit.to_owned())
        }
        _ => {
            let problem = format!("{unit:?} is not the name of a unit that has a cgroup");
            let allowed = "a name such as nginx.service, or the path of a cgroup, which `numaward describe` prints for a container";
            Err(FieldError::new("target.unit", problem, allowed))
        }
    }
}

fn bytes(field: &str, text: &str) -> Result<Bytes, FieldError> {
    let allowed = "a number of bytes above 0, such as 256Mi or 8Gi";
    let wrong = |problem: &dyn fmt::Display| FieldError::new(field, problem.to_string(), allowed);
    let quantity: Quantity = text.parse().map_err(|error: engine::quantity::QuantityError| {
        wrong(&format_args!("{:?} is not a quantity: {}", error.text, error.problem))
    })?;
    Size::new(quantity).map(|size| size.0).map_err(|problem| wrong(&problem))
}

fn partition(kind: api::PartitionKind) -> Partition {
    match kind {
        api::PartitionKind::Member => Partition::Member,
        api::PartitionKind::Root => Partition::Root,
        api::PartitionKind::Isolated => Partition::Isolated,
    }
}

/// Returns the error for a client that admits or releases a container of a pod.
pub fn runtime_owned_error() -> FieldError {
    let problem = "a container of a pod is placed when the runtime creates it, and released with its pod";
    FieldError::new("target", problem, "a cgroup, a unit or a command")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> api::AllocationRequest {
        api::AllocationRequest {
            cpus: Some(api::Cpus::whole(2)),
            hugepages: [("2Mi".to_owned(), "4Mi".to_owned())].into(),
            ..api::AllocationRequest::new("a", api::Target::Exec, "256Mi")
        }
    }

    #[test]
    fn default_qos_class_is_guaranteed() {
        let request = Request::new(&asked()).unwrap();
        assert_eq!(request.engine.qos(), engine::QosClass::Guaranteed);
        assert_eq!(request.limit, Some(Bytes::mib(256)));
        assert_eq!(request.hugepages().collect::<Vec<_>>(), [(HugepageSize(Bytes::mib(2)), Bytes::mib(4))]);
    }

    #[test]
    fn accepts_shared_cpus_and_burstable() {
        use engine::QosClass::{Burstable, Guaranteed};
        for (cpus, limit, is_burstable, class, limited, expected) in [
            (None, None, false, Guaranteed, Guaranteed, Some(256)),
            (Some("500m"), None, false, Guaranteed, Guaranteed, Some(256)),
            (Some("1.5"), Some("1Gi"), false, Guaranteed, Burstable, Some(1024)),
            (None, None, true, Burstable, Burstable, None),
            (Some("500m"), Some("256Mi"), true, Burstable, Burstable, Some(256)),
        ] {
            let mut asked = asked();
            asked.cpus = cpus.map(|cpus: &str| cpus.parse().unwrap());
            asked.memory_limit = limit.map(str::to_owned);
            asked.placement.burstable = is_burstable;
            let request = Request::new(&asked).unwrap();
            let whole = request.engine.containers[0].requests.cpu.and_then(Quantity::whole_cpus);
            assert_eq!(whole, None, "{asked:?}");
            assert_eq!((request.engine.qos(), request.limited().qos()), (class, limited), "{asked:?}");
            assert_eq!(request.limit.map(|limit| limit.0 >> 20), expected, "{asked:?}");
        }
    }

    #[test]
    fn memory_policy_needs_exec_and_memory() {
        type RequestEdit = fn(&mut api::AllocationRequest);
        let table: &[(RequestEdit, Option<&str>)] = &[
            (|_| {}, None),
            (|asked| asked.target = api::Target::Cgroup("/a".to_owned()), Some("runs already")),
            (|asked| asked.target = api::Target::Unit("db.service".to_owned()), Some("NUMAPolicy=")),
            (|asked| asked.memory = None, Some("none is asked for")),
            (|asked| (asked.cpus, asked.placement.burstable) = (None, true), Some("home node")),
        ];
        for (change, problem) in table {
            let mut asked = asked();
            asked.target = api::Target::Exec;
            asked.placement.memory_policy = Some(api::MemoryPolicy::Interleave);
            change(&mut asked);
            let found = Request::new(&asked).map(|request| request.terms.memory_policy);
            match (found, problem) {
                (Ok(policy), None) => assert_eq!(policy, asked.placement.memory_policy),
                (Err(error), Some(problem)) => {
                    let text = error.to_string();
                    assert!(text.contains("placement.memoryPolicy") && text.contains(problem), "{text}");
                }
                (found, problem) => panic!("{found:?} instead of {problem:?}"),
            }
        }
    }

    #[test]
    fn error_names_field_and_allowed() {
        type RequestEdit = fn(&mut api::AllocationRequest);
        let table: &[(RequestEdit, &str, &str)] = &[
            (|asked| asked.name.clear(), "name", "not a valid name"),
            (|asked| asked.name = "a/b".to_owned(), "name", "not a valid name for a command"),
            (|asked| asked.name = "..".to_owned(), "name", "not at the start"),
            (|asked| asked.name = "a".repeat(201), "name", "1 to 200"),
            (|asked| asked.cpus = Some(api::Cpus::whole(0)), "cpus", "it is 0"),
            (|asked| asked.cpus = Some(api::Cpus::whole(70_000)), "cpus", "more than any machine"),
            (|asked| asked.placement.burstable = true, "cpus", "Burstable workload are shared"),
            (
                |asked| (asked.cpus, asked.partition) = (None, Some(api::PartitionKind::Root)),
                "partition",
                "made of exclusive CPUs",
            ),
            (
                |asked| drop(asked.placement.labels.insert("a=b".to_owned(), String::new())),
                "placement.labels",
                "cannot be named",
            ),
            (
                |asked| asked.placement.with.extend([String::new()]),
                "placement.with",
                "is not the name of a workload",
            ),
            (
                |asked| {
                    asked.placement.with.insert("app=db".to_owned());
                    asked.placement.apart.insert("app=db".to_owned());
                },
                "placement.apart",
                "in placement.with as well",
            ),
            (|asked| asked.memory = Some("0".to_owned()), "memory", "it is 0"),
            (|asked| asked.memory = Some("1gb".to_owned()), "memory", "unknown suffix"),
            (|asked| asked.memory = Some("-1".to_owned()), "memory", "negative"),
            (
                |asked| {
                    (asked.memory, asked.cpus) = (None, None);
                    asked.target = api::Target::Cgroup("/a".to_owned());
                },
                "memory",
                "nothing is guaranteed",
            ),
            (
                |asked| (asked.memory, asked.cpus) = (None, "1500m".parse().ok()),
                "memory",
                "nothing is guaranteed",
            ),
            (
                |asked| (asked.placement.hide_siblings, asked.cpus) = (true, None),
                "placement.hideSiblings",
                "none are asked for",
            ),
            (
                |asked| (asked.placement.isolate, asked.cpus) = (true, None),
                "placement.isolate",
                "none are asked for",
            ),
            (|asked| asked.memory_limit = Some("1Mi".to_owned()), "memoryLimit", "less than"),
            (|asked| asked.memory = Some("16E".to_owned()), "memory", "is too large"),
            (
                |asked| asked.target = api::Target::Cgroup("a".to_owned()),
                "target.cgroup",
                "not a path of a cgroup",
            ),
            (
                |asked| asked.target = api::Target::Cgroup("/a/../b".to_owned()),
                "target.cgroup",
                "not a path of a cgroup",
            ),
            (|asked| asked.target = api::Target::Cgroup("/".to_owned()), "target.cgroup", "the whole host"),
            (|asked| asked.target = api::Target::Unit("a".to_owned()), "target.unit", "nginx.service"),
            (
                |asked| asked.target = api::Target::Unit("docker/web".to_owned()),
                "target.unit",
                "numaward describe",
            ),
            (|asked| asked.target = api::Target::Unit("a.timer".to_owned()), "target.unit", "has a cgroup"),
            (
                |asked| drop(asked.hugepages.insert("2M".to_owned(), "2Mi".to_owned())),
                "hugepages.2M",
                "2Mi or 1Gi",
            ),
            (
                |asked| drop(asked.hugepages.insert("2Mi".to_owned(), "3Mi".to_owned())),
                "hugepages.2Mi",
                "multiple of 2Mi",
            ),
        ];
        for (change, field, words) in table {
            let mut asked = asked();
            change(&mut asked);
            let error = Request::new(&asked).unwrap_err();
            assert_eq!(error.field, *field, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn validates_rebalance_limits() {
        assert_eq!(limits(None, None).unwrap(), RebalanceLimits::default());
        let found = limits(Some(2), Some("1Gi")).unwrap();
        assert_eq!((found.moves, found.bytes), (2, Bytes::gib(1)));
        for (moves, bytes, field) in
            [(Some(0), None, "maxMoves"), (Some(17), None, "maxMoves"), (None, Some("1gb"), "maxBytes")]
        {
            assert_eq!(limits(moves, bytes).unwrap_err().field, field);
        }
    }

    #[test]
    fn accepts_path_as_name() {
        let mut asked = asked();
        asked.name = "system.slice/nginx.service".to_owned();
        asked.target = api::Target::Cgroup("/system.slice/nginx.service".to_owned());
        Request::new(&asked).unwrap();
    }
}

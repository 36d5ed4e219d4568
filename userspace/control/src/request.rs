//! From what a client asks for to what the engine decides on.

use std::fmt;

use numaward_api as api;
use numaward_cgroup::{CgroupPath, knob::Partition};
use numaward_config::enforcement::{Declared, Size};
use numaward_engine::{self as engine, Quantity, Resources, policy::TopologyManagerPolicy};
use numaward_model::pod::PodContainer;
use numaward_topology::{Bytes, HugepageSize, ZoneKind};
use serde::{Deserialize, Serialize};

/// The longest name of a workload; also fits the name of a directory.
const MAX_NAME: usize = 200;

/// A field of a request is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}; allowed: {allowed}")]
pub struct FieldError {
    /// The field, with dots.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
    /// What is allowed.
    pub allowed: String,
}

impl FieldError {
    /// Names the field, the problem and what is allowed.
    pub fn new(field: impl Into<String>, problem: impl Into<String>, allowed: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into(), allowed: allowed.into() }
    }
}

/// What an allocation is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Target {
    /// A cgroup of ours.
    Exec,
    /// A cgroup that exists.
    Cgroup(CgroupPath),
    /// A unit of systemd.
    Unit(String),
    /// A container of a pod.
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

/// A request that is sound in itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The name of the workload.
    pub name: String,
    /// What the allocation is for.
    pub target: Target,
    /// What the engine is asked.
    pub engine: engine::Request,
    /// The memory that is promised.
    pub memory: Bytes,
    /// The most that the workload may use; no less.
    pub limit: Bytes,
    /// How the nodes have to agree, if not as the configuration has it.
    pub policy: Option<TopologyManagerPolicy>,
    /// Whether its CPUs become a scheduling domain of their own.
    pub partition: Partition,
    /// What it was declared as, if it was.
    pub declared: Option<Declared>,
}

impl Request {
    /// Checks each field by itself.
    pub fn new(asked: &api::AllocationRequest) -> Result<Self, FieldError> {
        check_name(&asked.name, asked.target == api::Target::Exec)?;
        let target = match &asked.target {
            api::Target::Exec => Target::Exec,
            api::Target::Cgroup(path) => {
                let allowed = "the path of a cgroup below the root, such as /system.slice/nginx.service";
                let wrong = |problem: String| FieldError::new("target.cgroup", problem, allowed);
                let path: CgroupPath =
                    path.parse().map_err(|_| wrong(format!("{path:?} is no such path")))?;
                if path.is_root() {
                    return Err(wrong("the root cgroup is the whole host".to_owned()));
                }
                Target::Cgroup(path)
            }
            api::Target::Unit(unit) => Target::Unit(check_unit(unit)?),
            api::Target::Container(_) => return Err(is_the_runtimes()),
        };
        if asked.cpus == 0 {
            return Err(FieldError::new("cpus", "it is 0", "a whole number of CPUs, at least 1"));
        }
        let memory = bytes("memory", &asked.memory)?;
        let limit = asked.memory_limit.as_ref().map(|limit| bytes("memoryLimit", limit)).transpose()?;
        if let Some(limit) = limit.filter(|limit| *limit < memory) {
            let problem = format!("{limit} is less than what is promised");
            return Err(FieldError::new("memoryLimit", problem, format!("at least {memory}, or nothing")));
        }
        let mut resources = Resources::none()
            .with_cpu(Quantity::whole(asked.cpus.into()))
            .with_memory(Quantity::whole(memory.0));
        for (size, amount) in &asked.hugepages {
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
            resources = resources.with_hugepages(size, Quantity::whole(amount.0));
        }
        let engine = engine::Request::workload(asked.name.as_str(), resources);
        Ok(Self {
            name: asked.name.clone(),
            target,
            engine,
            memory,
            limit: limit.unwrap_or(memory),
            policy: asked.policy,
            partition: asked.partition.map_or(Partition::Member, partition),
            declared: None,
        })
    }

    /// The request that is declared for a unit or cgroup.
    pub fn declared(declared: &Declared, target: api::Target) -> Result<Self, FieldError> {
        let name = match &target {
            api::Target::Unit(name) => name.clone(),
            api::Target::Cgroup(path) => path.trim_start_matches('/').to_owned(),
            api::Target::Exec | api::Target::Container(_) => String::new(),
        };
        let hugepages = declared.hugepages.iter();
        let request = Self::new(&api::AllocationRequest {
            name,
            target,
            cpus: declared.cpus,
            memory: declared.memory.0.0.to_string(),
            memory_limit: declared.memory_limit.map(|limit| limit.0.0.to_string()),
            hugepages: hugepages.map(|(size, bytes)| (size.to_string(), bytes.0.0.to_string())).collect(),
            policy: declared.policy,
            partition: declared.partition,
        })?;
        Ok(Self { declared: Some(declared.clone()), ..request })
    }

    /// The request by which its class of service goes: with the limit that the placement knows nothing of.
    pub fn limited(&self) -> engine::Request {
        let mut request = self.engine.clone();
        for container in &mut request.containers {
            container.limits.memory.insert(ZoneKind::Memory, Quantity::whole(self.limit.0));
        }
        request
    }

    /// The huge pages that are asked for.
    pub fn hugepages(&self) -> impl Iterator<Item = (HugepageSize, Bytes)> {
        self.engine.containers.iter().flat_map(|container| &container.requests.memory).filter_map(
            |(kind, amount)| match kind {
                ZoneKind::Hugepages(size) => Some((*size, Bytes(amount.units()?))),
                ZoneKind::Memory => None,
            },
        )
    }
}

/// Names are labels of metrics, parts of addresses and, for commands, names of directories.
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
        format!("{name:?} is no name for {}", if is_directory { "a command" } else { "a workload" }),
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
            Err(FieldError::new("target.unit", problem, "a name such as nginx.service"))
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

/// Why nobody else may promise to a container, or take it back.
pub(crate) fn is_the_runtimes() -> FieldError {
    let problem = "a container of a pod is placed when the runtime creates it, and released with its pod";
    FieldError::new("target", problem, "a cgroup, a unit or a command")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> api::AllocationRequest {
        api::AllocationRequest {
            name: "a".to_owned(),
            target: api::Target::Exec,
            cpus: 2,
            memory: "256Mi".to_owned(),
            memory_limit: None,
            hugepages: [("2Mi".to_owned(), "4Mi".to_owned())].into(),
            policy: None,
            partition: None,
        }
    }

    #[test]
    fn a_sound_request_is_a_guaranteed_one() {
        let request = Request::new(&asked()).unwrap();
        assert_eq!(request.engine.qos(), engine::QosClass::Guaranteed);
        assert_eq!(request.memory, Bytes::mib(256));
        assert_eq!(request.hugepages().collect::<Vec<_>>(), [(HugepageSize(Bytes::mib(2)), Bytes::mib(4))]);
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_allowed() {
        type Change = fn(&mut api::AllocationRequest);
        let table: &[(Change, &str, &str)] = &[
            (|asked| asked.name.clear(), "name", "no name"),
            (|asked| asked.name = "a/b".to_owned(), "name", "no name for a command"),
            (|asked| asked.name = "..".to_owned(), "name", "not at the start"),
            (|asked| asked.name = "a".repeat(201), "name", "1 to 200"),
            (|asked| asked.cpus = 0, "cpus", "at least 1"),
            (|asked| asked.memory = "0".to_owned(), "memory", "it is 0"),
            (|asked| asked.memory = "1gb".to_owned(), "memory", "unknown suffix"),
            (|asked| asked.memory = "-1".to_owned(), "memory", "negative"),
            (|asked| asked.memory_limit = Some("1Mi".to_owned()), "memoryLimit", "less than"),
            (|asked| asked.memory = "16E".to_owned(), "memory", "more than any machine"),
            (|asked| asked.target = api::Target::Cgroup("a".to_owned()), "target.cgroup", "no such path"),
            (
                |asked| asked.target = api::Target::Cgroup("/a/../b".to_owned()),
                "target.cgroup",
                "no such path",
            ),
            (|asked| asked.target = api::Target::Cgroup("/".to_owned()), "target.cgroup", "the whole host"),
            (|asked| asked.target = api::Target::Unit("a".to_owned()), "target.unit", "nginx.service"),
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
    fn names_of_existing_workloads_may_be_paths() {
        let mut asked = asked();
        asked.name = "system.slice/nginx.service".to_owned();
        asked.target = api::Target::Cgroup("/system.slice/nginx.service".to_owned());
        Request::new(&asked).unwrap();
    }
}

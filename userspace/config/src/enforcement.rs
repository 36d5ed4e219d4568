//! Enforcement: the mode, CPU isolation, and guarantees that are declared in the configuration.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    str::FromStr,
    time::Duration,
};

use educe::Educe;
use numaward_api::{Cpus, EnforcementMode, PartitionKind, Placement};
use numaward_cgroup::CgroupPath;
use numaward_engine::{Quantity, policy::TopologyManagerPolicy};
use numaward_topology::{Bytes, HugepageSize, ZoneKind, serde_as_text};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use serde_with_macros::skip_serializing_none;

use super::{
    cpu_power::CpuPower,
    inline_schema::inline_schema,
    interleave_weights::{InterleaveWeights, WeightSource},
    policy::Amount,
    problem::Origin,
    types::Interval,
};

/// The key of declared guarantees.
pub const GUARANTEES_KEY: &str = "guarantees";

/// Settings for writing to the kernel.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Enforcement {
    /// The mode: `off`, `dry-run` (guarantees are decided and reported, but not written) or `on`.
    pub mode: EnforcementMode,
    /// CPU isolation: keeps workloads without exclusive CPUs on the shared pool.
    pub herding: IsolationSettings,
    /// The handling of interrupts and other kernel work on exclusive CPUs: `leave` or `move-away`. Only if guarantees
    /// are enforced.
    pub interrupts: Interrupts,
    /// Experimental: power settings of exclusive CPUs. Default: unchanged.
    pub cpu_power: CpuPower,
    /// Experimental: node weights of the memory policy `weighted-interleave`. Default: unchanged.
    pub interleave_weights: InterleaveWeights,
    /// The time for which most of the memory of a Burstable workload must be on another node than its preferred node
    /// before the guarantee follows it there.
    #[educe(Default(expression = Interval(Duration::from_mins(5))))]
    pub home_dwell_time: Interval,
}

impl Enforcement {
    /// Returns the mode of CPU isolation, which never does more than the mode of enforcement.
    pub fn isolation_mode(&self) -> EnforcementMode {
        self.mode.min(self.herding.mode)
    }

    /// Returns true if kernel work is moved off exclusive CPUs.
    pub fn moves_interrupts(&self) -> bool {
        self.mode == EnforcementMode::On && self.interrupts == Interrupts::MoveAway
    }

    /// Returns the power settings of exclusive CPUs, if there are any to write.
    pub fn power_settings(&self) -> Option<&CpuPower> {
        Some(&self.cpu_power).filter(|power| self.mode == EnforcementMode::On && power.is_configured())
    }

    /// Returns the node weights for weighted-interleave, if there are any to write.
    pub fn set_weights(&self) -> Option<&InterleaveWeights> {
        let of = &self.interleave_weights;
        Some(of).filter(|of| self.mode == EnforcementMode::On && of.source != WeightSource::Keep)
    }
}

/// The handling of interrupts on exclusive CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Interrupts {
    /// Interrupts stay where they are.
    #[default]
    Leave,
    /// Interrupts move to other CPUs, and back when the CPUs are no longer exclusive. So do packets that the kernel
    /// distributes to CPUs (RPS, XPS), and workqueues that are not bound to a CPU. Interrupts that the kernel does not
    /// allow to move are reported.
    MoveAway,
}

/// CPU isolation: confines workloads without exclusive CPUs to the shared pool, as long as any CPU is exclusive.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct IsolationSettings {
    /// Isolation of exclusive CPUs from other workloads: `off`, `dry-run` (reported, not written) or `on`. `enforcement.mode` is the
    /// upper limit. `isolate` of a workload applies in each of the three modes.
    #[educe(Default(expression = EnforcementMode::DryRun))]
    pub mode: EnforcementMode,
    /// Patterns of cgroups that keep all CPUs: `*` matches any text without a slash, `**` any number of levels. All other cgroups are
    /// limited to the shared pool; kernel threads and processes in the root cgroup cannot be. Default: the init process, `/init.scope`.
    #[educe(Default(expression = CgroupPattern::new("/init.scope").into_iter().collect()))]
    pub system_slices: Vec<CgroupPattern>,
}

/// A guarantee for each workload with a matching unit or cgroup. It holds from the creation of the cgroup until its
/// removal.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeclaredGuarantee {
    /// The systemd unit, as a pattern. Either this or `cgroup`.
    pub unit: Option<UnitPattern>,
    /// The cgroup, as a pattern: `*` matches any text without a slash, `**` any number of levels.
    pub cgroup: Option<CgroupPattern>,
    /// CPUs for each workload: whole CPUs are exclusive, a fraction (`500m`, `1.5`) uses the shared pool. Default: the
    /// shared pool.
    pub cpus: Option<Cpus>,
    /// Memory to guarantee to each workload. Default: none, which requires whole CPUs.
    pub memory: Option<Size>,
    /// The maximum memory of each workload. Default: `memory`.
    pub memory_limit: Option<Size>,
    /// Hugepages for each workload, in bytes by page size.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hugepages: BTreeMap<PageSize, Size>,
    /// The topology policy: how CPUs and memory must be aligned to nodes. Default: `topologyManagerPolicy`.
    pub policy: Option<TopologyManagerPolicy>,
    /// The partition type of the CPUs (`cpuset.cpus.partition`), which can make them a separate scheduling domain.
    /// Default: `member`.
    pub partition: Option<PartitionKind>,
    /// Further conditions for the placement of each workload.
    #[serde(default, skip_serializing_if = "Placement::is_default")]
    pub placement: Placement,
}

impl DeclaredGuarantee {
    /// Returns the pattern of the unit or cgroup.
    pub fn pattern(&self) -> &str {
        match (&self.unit, &self.cgroup) {
            (Some(unit), _) => unit.0.as_str(),
            (None, Some(cgroup)) => cgroup.whole.as_str(),
            (None, None) => "",
        }
    }
}

/// An amount of memory above 0: `256Mi`, `8Gi`, or a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Amount")]
pub struct Size(pub Bytes);

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl Size {
    /// Converts a quantity to a number of bytes.
    pub fn new(quantity: Quantity) -> Result<Self, String> {
        // Fractions of a byte are rounded up, as in Kubernetes.
        match quantity.units() {
            Some(0) => Err("it is 0".to_owned()),
            Some(bytes) if i64::try_from(bytes).is_ok() => Ok(Self(Bytes(bytes))),
            _ => Err(format!("{quantity} is too large")),
        }
    }
}

impl TryFrom<Amount> for Size {
    type Error = String;

    fn try_from(Amount(quantity): Amount) -> Result<Self, String> {
        let expected = "expected a number of bytes above 0, such as 256Mi or 8Gi";
        Self::new(quantity).map_err(|problem| format!("{problem}; {expected}"))
    }
}

inline_schema!(Size, { "type": ["string", "integer"], "examples": ["8Gi", 1_073_741_824] });

/// The size of a hugepage: `2Mi`, `1Gi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
pub struct PageSize(pub HugepageSize);

impl FromStr for PageSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match format!("hugepages-{text}").parse() {
            Ok(ZoneKind::Hugepages(size)) => Ok(Self(size)),
            _ => Err(format!("{text:?} is not a page size (expected one such as 2Mi or 1Gi)")),
        }
    }
}

/// A pattern for paths of cgroups.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{whole}")]
pub struct CgroupPattern {
    whole: glob::Pattern,
    /// The patterns of the names between slashes; `None` for a part that is not a valid pattern by itself.
    names: Vec<Option<glob::Pattern>>,
}

/// A pattern for names of systemd units.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub struct UnitPattern(glob::Pattern);

const MATCH_OPTIONS: glob::MatchOptions = glob::MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: false,
};

fn parse_pattern(text: &str) -> Result<glob::Pattern, String> {
    glob::Pattern::new(text)
        .map_err(|error| format!("{text:?} is not a pattern: {} (at character {})", error.msg, error.pos + 1))
}

impl CgroupPattern {
    /// Parses a pattern.
    pub fn new(text: &str) -> Result<Self, String> {
        let expected = "expected the path of a cgroup below the root, such as /batch/*";
        match text.parse::<CgroupPath>() {
            Ok(path) if !path.is_root() => {
                let names = path.components().map(|name| glob::Pattern::new(name).ok()).collect();
                Ok(Self { whole: parse_pattern(text)?, names })
            }
            _ => Err(format!("{text:?} is not the path of a cgroup; {expected}")),
        }
    }

    /// Returns the patterns that match a cgroup and all cgroups below it; none for the root.
    pub fn subtree(path: &CgroupPath) -> Vec<Self> {
        let name = glob::Pattern::escape(path.as_str());
        [name.clone(), format!("{name}/**")].iter().filter_map(|text| Self::new(text).ok()).collect()
    }

    /// Returns true if the pattern matches a cgroup.
    pub fn matches(&self, path: &CgroupPath) -> bool {
        self.whole.matches_with(path.as_str(), MATCH_OPTIONS)
    }

    /// Returns true if the pattern could match an existing or future cgroup below this one.
    pub fn may_match_below(&self, path: &CgroupPath) -> bool {
        let mut names = path.components();
        for pattern in &self.names {
            let Some(name) = names.next() else { return true };
            let Some(pattern) = pattern else { return false };
            if pattern.as_str() == "**" {
                return true;
            }
            if !pattern.matches_with(name, MATCH_OPTIONS) {
                return false;
            }
        }
        false
    }
}

impl FromStr for CgroupPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::new(text)
    }
}

impl FromStr for UnitPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ends = [".service", ".scope", ".slice", ".socket", ".mount", ".swap"];
        let is_unit = ends.iter().any(|end| text.strip_suffix(end).is_some_and(|name| !name.is_empty()));
        if !is_unit || text.contains('/') {
            return Err(format!(
                "{text:?} is not the name of a unit with a cgroup; expected a name such as nginx.service or db@*.service"
            ));
        }
        parse_pattern(text).map(Self)
    }
}

impl UnitPattern {
    /// Returns true if the pattern matches a unit.
    pub fn matches(&self, unit: &str) -> bool {
        self.0.matches_with(unit, MATCH_OPTIONS)
    }
}

serde_as_text!(CgroupPattern);
serde_as_text!(UnitPattern);
serde_as_text!(PageSize);

inline_schema!(CgroupPattern, { "type": "string", "examples": ["/batch/*"] });
inline_schema!(UnitPattern, { "type": "string", "examples": ["db@*.service"] });
inline_schema!(PageSize, { "type": "string", "examples": ["2Mi"] });

/// Returns the problems of declared guarantees (each with its number) that go beyond single values: the path of the
/// key, and the problem. `origin` returns the source of the value at a path, valid or not.
pub(super) fn problems<'a>(
    declared: &[(usize, &DeclaredGuarantee)],
    origin: impl Fn(&[String]) -> Option<&'a Origin>,
) -> Vec<(Vec<String>, String)> {
    let mut problems = Vec::new();
    let item = |number: usize| vec![GUARANTEES_KEY.to_owned(), number.to_string()];
    let at = |number, key: &str| [item(number), vec![key.to_owned()]].concat();
    let is_given = |path: &[String]| origin(path).is_some();
    for number in (0..).take_while(|number| is_given(&item(*number))) {
        match ["unit", "cgroup"].map(|key| is_given(&at(number, key))) {
            [true, true] => {
                let problem = "a unit is given as well: give only one of the two".to_owned();
                problems.push((at(number, "cgroup"), problem));
            }
            [false, false] => problems.push((item(number), "give unit or cgroup".to_owned())),
            _ => {}
        }
    }
    let mut first = BTreeMap::new();
    for (number, this) in declared {
        // An invalid number of CPUs is a problem of its own.
        let has_whole_cpus = match this.cpus {
            Some(cpus) => cpus.0.whole_cpus().is_some(),
            None => is_given(&at(*number, "cpus")),
        };
        if !has_whole_cpus && !is_given(&at(*number, "memory")) {
            problems.push((item(*number), "give memory, or whole CPUs in cpus".to_owned()));
        }
        for (size, amount) in &this.hugepages {
            if !amount.0.0.is_multiple_of(size.0.0.0) {
                let path = [at(*number, "hugepages"), vec![size.to_string()]].concat();
                problems.push((path, format!("{} is not a whole number of pages of {size}", amount.0)));
            }
        }
        let pattern = this.pattern();
        if pattern.is_empty() {
            continue;
        }
        match first.entry((this.unit.is_some(), pattern)) {
            Entry::Vacant(entry) => {
                entry.insert(*number);
            }
            Entry::Occupied(entry) => {
                let key = if this.unit.is_some() { "unit" } else { "cgroup" };
                let first = origin(&at(*entry.get(), key)).map(ToString::to_string).unwrap_or_default();
                let problem = format!("{pattern:?} already has a guarantee, at {first}");
                problems.push((at(*number, key), problem));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_by_levels() {
        for (pattern, path, matches, below) in [
            ("/batch", "/batch", true, false),
            ("/batch/*", "/batch", false, true),
            ("/batch/*", "/batch/a", true, false),
            ("/batch/*", "/batch/a/b", false, false),
            ("/batch/**", "/batch/a/b", true, true),
            ("/a/**/x", "/a/b/c/x", true, true),
            ("/a/*/x", "/b/c", false, false),
            ("/*.slice/db@[12].service", "/system.slice", false, true),
            ("/*.slice/db@[12].service", "/system.slice/db@2.service", true, false),
            ("/*.slice/db@[12].service", "/system.slice/db@3.service", false, false),
        ] {
            let (pattern, path) = (CgroupPattern::new(pattern).unwrap(), path.parse().unwrap());
            assert_eq!(pattern.matches(&path), matches, "{pattern:?} {path}");
            assert_eq!(pattern.may_match_below(&path), below, "{pattern:?} {path}");
        }
        assert!(UnitPattern::from_str("db@*.service").unwrap().matches("db@main.service"));
    }

    #[test]
    fn isolation_is_limited_by_enforcement() {
        use EnforcementMode::{DryRun, Off, On};
        for (mode, herding, both) in
            [(On, On, On), (On, Off, Off), (DryRun, On, DryRun), (Off, On, Off), (On, DryRun, DryRun)]
        {
            let herding = IsolationSettings { mode: herding, ..IsolationSettings::default() };
            assert_eq!(Enforcement { mode, herding, ..Enforcement::default() }.isolation_mode(), both);
        }
        let default = Enforcement::default();
        assert_eq!((default.mode, default.isolation_mode()), (On, DryRun));
    }
}

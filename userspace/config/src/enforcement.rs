//! What is enforced: the mode, the herding of others, and guarantees that are declared.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use educe::Educe;
use numaward_api::{Cpus, EnforcementMode, PartitionKind, Placement};
use numaward_cgroup::CgroupPath;
use numaward_engine::{Quantity, policy::TopologyManagerPolicy};
use numaward_topology::{Bytes, HugepageSize, ZoneKind, serde_as_text};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

use super::{
    cpu_power::CpuPower,
    inline_schema::inline_schema,
    interleave_weights::{InterleaveWeights, WeightSource},
    policy::Amount,
    types::Interval,
};

/// What is written to the kernel.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Enforcement {
    /// Whether guarantees are given: `off`, `dry-run` (decided and reported, not written) or `on`.
    pub mode: EnforcementMode,
    /// Whether workloads without exclusive CPUs are kept off those of others.
    pub herding: IsolationSettings,
    /// Whether interrupts, and other work that the kernel does by itself, are kept off exclusive CPUs: `leave` or
    /// `move-away`. Only where guarantees are enforced.
    pub interrupts: Interrupts,
    /// Power settings of CPUs that are exclusive. Default: they stay as they are.
    pub cpu_power: CpuPower,
    /// Weights of nodes for the memory policy `weighted-interleave`. Default: they stay as they are.
    pub interleave_weights: InterleaveWeights,
    /// How long most of the memory of a Burstable workload has to be on another node than its home until the promise
    /// follows it there.
    #[educe(Default(expression = Interval(Duration::from_mins(5))))]
    pub home_dwell_time: Interval,
}

impl Enforcement {
    /// How far others are herded: never further than guarantees are enforced.
    pub fn isolation_mode(&self) -> EnforcementMode {
        self.mode.min(self.herding.mode)
    }

    /// Whether the kernel's own work is kept off exclusive CPUs.
    pub fn moves_interrupts(&self) -> bool {
        self.mode == EnforcementMode::On && self.interrupts == Interrupts::MoveAway
    }

    /// The power settings of exclusive CPUs, if there are any to be made.
    pub fn power_settings(&self) -> Option<&CpuPower> {
        Some(&self.cpu_power).filter(|power| self.mode == EnforcementMode::On && power.is_configured())
    }

    /// The weights of nodes for weighted-interleave, if any are to be set.
    pub fn set_weights(&self) -> Option<&InterleaveWeights> {
        let of = &self.interleave_weights;
        Some(of).filter(|of| self.mode == EnforcementMode::On && of.source != WeightSource::Keep)
    }
}

/// What is done about the interrupts on exclusive CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Interrupts {
    /// They are left where they are.
    #[default]
    Leave,
    /// They go to other CPUs, and back when the CPUs are no longer exclusive; so do the packets that the kernel distributes
    /// to CPUs (RPS, XPS), and workqueues that are bound to none. Those that the kernel lets nobody move are reported.
    MoveAway,
}

/// Keeps workloads without exclusive CPUs on the shared pool, as long as any CPU is exclusive.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct IsolationSettings {
    /// `off`, `dry-run` (reported, not written) or `on`. Never does more than `enforcement.mode`. A workload that asks
    /// for it (`isolate`) has others kept off its CPUs in each of the three.
    #[educe(Default(expression = EnforcementMode::DryRun))]
    pub mode: EnforcementMode,
    /// Cgroups that keep all CPUs, as patterns: `*` stands for any text without a slash, `**` for any number
    /// of levels. All else is herded, by the highest cgroup possible; if one further down is exempt here, those
    /// beside it are herded one by one. Default: the init process, `/init.scope`. Kernel threads, and
    /// anything that runs in the root cgroup, cannot be herded.
    #[educe(Default(expression = CgroupPattern::new("/init.scope").into_iter().collect()))]
    pub system_slices: Vec<CgroupPattern>,
}

/// A guarantee that every workload gets whose unit or cgroup matches. It holds from the moment the cgroup
/// appears until it is gone.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeclaredGuarantee {
    /// The unit of systemd, as a pattern. Either this or `cgroup`.
    pub unit: Option<UnitPattern>,
    /// The cgroup, as a pattern: `*` stands for any text without a slash, `**` for any number of levels.
    pub cgroup: Option<CgroupPattern>,
    /// CPUs for each: whole ones are exclusive, a part of a CPU (`500m`, `1.5`) stays shared. Default: shared.
    pub cpus: Option<Cpus>,
    /// Memory for each: promised on the nodes.
    pub memory: Size,
    /// The most memory that each may use. Default: `memory`.
    pub memory_limit: Option<Size>,
    /// Huge pages for each: bytes by page size.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hugepages: BTreeMap<PageSize, Size>,
    /// How the nodes of CPUs and memory have to agree. Default: `topologyManagerPolicy`.
    pub policy: Option<TopologyManagerPolicy>,
    /// Whether its CPUs are a scheduling domain of their own (`cpuset.cpus.partition`). Default: `member`.
    pub partition: Option<PartitionKind>,
    /// How each wants to be placed besides.
    #[serde(default, skip_serializing_if = "Placement::is_default")]
    pub placement: Placement,
}

impl DeclaredGuarantee {
    /// For which unit or cgroup, in words.
    pub fn pattern(&self) -> &str {
        match (&self.unit, &self.cgroup) {
            (Some(unit), _) => unit.0.as_str(),
            (None, Some(cgroup)) => cgroup.whole.as_str(),
            (None, None) => "",
        }
    }
}

/// An amount of memory above 0: `256Mi`, `8Gi`, a plain number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Amount")]
pub struct Size(pub Bytes);

impl Size {
    /// Reads a quantity as a number of bytes.
    pub fn new(quantity: Quantity) -> Result<Self, String> {
        // Fractions of a byte are rounded up, as Kubernetes does.
        match quantity.units() {
            Some(0) => Err("it is 0".to_owned()),
            Some(bytes) if i64::try_from(bytes).is_ok() => Ok(Self(Bytes(bytes))),
            _ => Err(format!("{quantity} is more than any machine has")),
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

/// The size of a huge page: `2Mi`, `1Gi`.
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
    /// Those of the names between slashes; `None` for a part that is no pattern by itself.
    names: Vec<Option<glob::Pattern>>,
}

/// A pattern for names of systemd's units.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub struct UnitPattern(glob::Pattern);

const MATCHING: glob::MatchOptions = glob::MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: false,
};

fn pattern(text: &str) -> Result<glob::Pattern, String> {
    glob::Pattern::new(text)
        .map_err(|error| format!("{text:?} is not a pattern: {} (at character {})", error.msg, error.pos + 1))
}

impl CgroupPattern {
    /// Reads a pattern.
    pub fn new(text: &str) -> Result<Self, String> {
        let expected = "expected the path of a cgroup below the root, such as /batch/*";
        match text.parse::<CgroupPath>() {
            Ok(path) if !path.is_root() => {
                let names = path.components().map(|name| glob::Pattern::new(name).ok()).collect();
                Ok(Self { whole: pattern(text)?, names })
            }
            _ => Err(format!("{text:?} is no such path; {expected}")),
        }
    }

    /// The patterns that a cgroup and all below it match. None for the root.
    pub fn subtree(path: &CgroupPath) -> Vec<Self> {
        let name = glob::Pattern::escape(path.as_str());
        [name.clone(), format!("{name}/**")].iter().filter_map(|text| Self::new(text).ok()).collect()
    }

    /// Whether a cgroup matches.
    pub fn matches(&self, path: &CgroupPath) -> bool {
        self.whole.matches_with(path.as_str(), MATCHING)
    }

    /// Whether one below this cgroup could match, there or not.
    pub fn may_match_below(&self, path: &CgroupPath) -> bool {
        let mut names = path.components();
        for pattern in &self.names {
            let Some(name) = names.next() else { return true };
            let Some(pattern) = pattern else { return false };
            if pattern.as_str() == "**" {
                return true;
            }
            if !pattern.matches_with(name, MATCHING) {
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
                "{text:?} is not the name of units that have cgroups; expected one such as nginx.service or db@*.service"
            ));
        }
        pattern(text).map(Self)
    }
}

impl UnitPattern {
    /// Whether a unit matches.
    pub fn matches(&self, unit: &str) -> bool {
        self.0.matches_with(unit, MATCHING)
    }
}

serde_as_text!(CgroupPattern);
serde_as_text!(UnitPattern);
serde_as_text!(PageSize);

inline_schema!(CgroupPattern, { "type": "string", "examples": ["/batch/*"] });
inline_schema!(UnitPattern, { "type": "string", "examples": ["db@*.service"] });
inline_schema!(PageSize, { "type": "string", "examples": ["2Mi"] });

/// What is wrong with declared guarantees (each with its number) beyond single values: the path of the key, and
/// the problem. `is_given` says whether there was a value at a path, right or wrong.
pub(super) fn problems(
    declared: &[(usize, &DeclaredGuarantee)],
    is_given: impl Fn(&[String]) -> bool,
) -> Vec<(Vec<String>, String)> {
    let mut problems = Vec::new();
    let item = |number: usize| vec!["guarantees".to_owned(), number.to_string()];
    let at = |number, key: &str| [item(number), vec![key.to_owned()]].concat();
    for number in (0..).take_while(|number| is_given(&item(*number))) {
        match ["unit", "cgroup"].map(|key| is_given(&at(number, key))) {
            [true, true] => {
                let problem = "a unit is given as well: give only one of the two".to_owned();
                problems.push((at(number, "cgroup"), problem));
            }
            [false, false] => problems.push((item(number), "give unit or cgroup: what it is for".to_owned())),
            _ => {}
        }
    }
    for (position, (number, this)) in declared.iter().enumerate() {
        for (size, amount) in &this.hugepages {
            if !amount.0.0.is_multiple_of(size.0.0.0) {
                let path = [at(*number, "hugepages"), vec![size.to_string()]].concat();
                problems.push((path, format!("{} is not a whole number of pages of {size}", amount.0)));
            }
        }
        let is_same = |(_, other): &&(usize, &DeclaredGuarantee)| {
            (&other.unit, &other.cgroup) == (&this.unit, &this.cgroup) && !this.pattern().is_empty()
        };
        if let Some((first, _)) = declared[..position].iter().find(is_same) {
            let key = if this.unit.is_some() { "unit" } else { "cgroup" };
            let problem = format!("{:?} has a guarantee before, at guarantees.{first}", this.pattern());
            problems.push((at(*number, key), problem));
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
    fn herding_goes_no_further_than_enforcement() {
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

//! Automatic placement of workloads without a guarantee on preferred nodes.

use std::time::Duration;

use educe::Educe;
use numaward_cgroup::CgroupPath;
use numaward_topology::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    enforcement::{CgroupPattern, Size},
    guard::essential_services,
    types::Interval,
};

/// The mode of automatic placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HomeMode {
    /// No placement. Placements of an earlier run are reverted.
    #[default]
    Off,
    /// The placement of each workload is reported, but not written.
    Report,
    /// Workloads are placed. Only if guarantees are enforced; otherwise the same as `report`.
    Place,
}

/// Automatic placement of workloads without a guarantee and with many remote accesses: they run on the CPUs of one
/// preferred node, while their memory may be on any node. A placement is reverted if remote accesses do not fall.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Home {
    /// The mode: `off`, `report` or `place`.
    pub mode: HomeMode,
    /// Cgroups that may be placed, as patterns: `*` matches any text without a slash, `**` any number of levels.
    /// Default: all.
    pub include: Vec<CgroupPattern>,
    /// Patterns, as of `include`, of cgroups that are never placed. Default: services that are needed to reach the host and to run
    /// workloads.
    #[educe(Default(expression = essential_services()))]
    pub exclude: Vec<CgroupPattern>,
    /// The minimum memory of a workload to be placed.
    #[educe(Default(expression = Size(Bytes::mib(256))))]
    pub min_memory: Size,
    /// The minimum CPU time of a workload to be placed, in percent of one CPU.
    #[schemars(range(min = 0, max = 10000))]
    #[educe(Default = 10)]
    pub min_cpu_percent: u32,
    /// The minimum share of remote accesses of a workload to be placed, in percent.
    #[schemars(range(min = 1, max = 100))]
    #[educe(Default = 30)]
    pub min_remote_percent: u32,
    /// The time for which accesses are counted before a decision, before and after a placement.
    #[educe(Default(expression = Interval(Duration::from_mins(1))))]
    pub window: Interval,
    /// The minimum reduction of the share of remote accesses, in percent of the old share; otherwise the placement is
    /// reverted.
    #[schemars(range(min = 1, max = 100))]
    #[educe(Default = 30)]
    pub min_gain_percent: u32,
    /// The maximum number of workloads that are being moved or on trial at a time.
    #[schemars(range(min = 1, max = 64))]
    #[educe(Default = 2)]
    pub max_at_once: u32,
    /// The maximum memory that is moved per second.
    #[educe(Default(expression = Size(Bytes::mib(64))))]
    pub rate: Size,
    /// The time for which a successful placement is kept, regardless of accesses.
    #[educe(Default(expression = Interval(Duration::from_mins(30))))]
    pub cool_down: Interval,
    /// The time for which a workload is not placed again after its placement was reverted. It doubles after each further revert, up
    /// to 64 times this value.
    #[educe(Default(expression = Interval(Duration::from_mins(30))))]
    pub back_off: Interval,
}

impl Home {
    /// Returns true if a cgroup may be placed.
    pub fn admits(&self, cgroup: &CgroupPath) -> bool {
        let matches = |patterns: &[CgroupPattern]| patterns.iter().any(|pattern| pattern.matches(cgroup));
        (self.include.is_empty() || matches(&self.include)) && !matches(&self.exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclude_overrides_include() {
        let pattern = |text: &str| CgroupPattern::new(text).unwrap();
        let mut home = Home { exclude: vec![pattern("/a/out")], ..Home::default() };
        let admitted =
            |home: &Home| ["/a/in", "/a/out", "/b"].map(|path| home.admits(&path.parse().unwrap()));
        assert_eq!(admitted(&home), [true, false, true]);
        home.include = vec![pattern("/a/*")];
        assert_eq!(admitted(&home), [true, false, false]);
        assert!(!Home::default().admits(&"/system.slice/sshd.service".parse().unwrap()));
    }
}

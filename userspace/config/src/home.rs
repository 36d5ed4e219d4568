//! Homes: nodes for workloads that asked for none.

use std::time::Duration;

use educe::Educe;
use numaward_cgroup::CgroupPath;
use numaward_topology::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    enforcement::{CgroupPattern, Size},
    guard::essential,
    types::Interval,
};

/// What is done for workloads without a guarantee that use memory of other nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HomeMode {
    /// Nothing. What an earlier run did is undone.
    #[default]
    Off,
    /// It is reported where each would be placed, and nothing is written.
    Report,
    /// They are placed. Only where guarantees are enforced: else this is the same as `report`.
    Place,
}

/// A home node for workloads without a guarantee whose accesses to memory are remote: CPUs of one node, and memory wherever the
/// kernel finds it. It is undone where remote accesses do not fall.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Home {
    /// `off`, `report` or `place`.
    pub mode: HomeMode,
    /// Cgroups that may get a home, as patterns: `*` stands for any text without a slash, `**` for any number of levels. Default:
    /// all.
    pub include: Vec<CgroupPattern>,
    /// Cgroups that get none, likewise. Default: what a host needs to be reached and to run workloads.
    #[educe(Default(expression = essential()))]
    pub exclude: Vec<CgroupPattern>,
    /// How much memory a workload has at least.
    #[educe(Default(expression = Size(Bytes::mib(256))))]
    pub min_memory: Size,
    /// How much CPU time it uses at least, in percent of one CPU.
    #[schemars(range(min = 0, max = 10000))]
    #[educe(Default = 10)]
    pub min_cpu_percent: u32,
    /// How many of its accesses are remote at least, in percent.
    #[schemars(range(min = 1, max = 100))]
    #[educe(Default = 30)]
    pub min_remote_percent: u32,
    /// For how long accesses are counted before they are judged, before a workload is placed and after it.
    #[educe(Default(expression = Interval(Duration::from_mins(1))))]
    pub window: Interval,
    /// By how much the share of remote accesses has to fall, in percent of what it was; else the workload is put back.
    #[schemars(range(min = 1, max = 100))]
    #[educe(Default = 30)]
    pub min_gain_percent: u32,
    /// How many workloads may be on their way or on trial at once.
    #[schemars(range(min = 1, max = 64))]
    #[educe(Default = 2)]
    pub max_at_once: u32,
    /// How much memory is moved in a second, at most.
    #[educe(Default(expression = Size(Bytes::mib(64))))]
    pub rate: Size,
    /// For how long a workload stays at a home that was of use, whatever its accesses are then.
    #[educe(Default(expression = Interval(Duration::from_mins(30))))]
    pub cool_down: Interval,
    /// For how long a workload that was put back is left alone at first. Each further time it is twice as long, up to 64 times.
    #[educe(Default(expression = Interval(Duration::from_mins(30))))]
    pub back_off: Interval,
}

impl Home {
    /// Whether a cgroup may get a home.
    pub fn admits(&self, cgroup: &CgroupPath) -> bool {
        let matches = |patterns: &[CgroupPattern]| patterns.iter().any(|pattern| pattern.matches(cgroup));
        (self.include.is_empty() || matches(&self.include)) && !matches(&self.exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_excluded_gets_no_home_whether_it_is_included_or_not() {
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

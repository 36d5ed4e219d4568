//! Whether the kernel samples a workload's accesses at all, so that silence is never taken for health.
//!
//! Automatic NUMA balancing (`kernel.numa_balancing`) makes pages fault now and then to see who accesses them. It
//! leaves many alone: everybody while it is off or serves tiering only (mode 2); since about Linux 6.18 tasks whose
//! cpuset has one node, whom it could not help; and mappings whose memory policy does not ask for it, such as plain
//! `MPOL_BIND`. The probe `scan` sees which mappings it came across; where that probe is absent, `memory.stat` says
//! from Linux 6.12 on whether anything was sampled.

use std::{
    collections::BTreeMap,
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

use numaward_cgroup::CgroupId;
use numaward_probes::{Mode, Probe, ProbeReport, ScannedPages};

use crate::estimate::Estimates;

/// How long what was seen last holds good: balancing comes back to a task after a minute at the latest.
const HOLDS: Duration = Duration::from_mins(5);

/// Whether a workload's accesses are sampled.
///
/// Its text is the metric label `state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Sampling {
    /// Yes.
    On,
    /// No: NUMA balancing is off, or there is one node.
    Off,
    /// No: NUMA balancing serves tiering of memory only.
    Mode2,
    /// No: its cpuset has one node, and this kernel leaves such tasks alone.
    SkippedCpuset,
    /// Hardly: the memory policy of most of its memory excludes it.
    Bound,
    /// Nothing was seen yet, or nothing can be.
    #[default]
    Unknown,
}

/// What is known of a workload's sampling.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) state: Sampling,
    pub(crate) scanned: Option<ScannedPages>,
    pte_updates: Option<u64>,
    /// What was seen last of mappings or pages, and when.
    verdict: Option<(Sampling, Instant)>,
    /// Pages that balancing moved to the node that accessed them (`memory.stat`): so many remote accesses at least.
    pub(crate) moved: Option<u64>,
}

/// What is known of the accesses of all workloads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sampled {
    /// Whether they are sampled.
    pub(crate) seen: BTreeMap<CgroupId, Seen>,
    /// Where they are not, and that is asked for: how many would be remote.
    pub(crate) estimates: Estimates,
    /// Whether `memory.stat` says something of sampling, where the probes do not.
    pub(crate) memory_stat_serves: bool,
}

impl Sampled {
    /// Whether those of a cgroup are sampled.
    pub(crate) fn state(&self, id: CgroupId) -> Sampling {
        self.seen.get(&id).map(|seen| seen.state).unwrap_or_default()
    }

    /// How a probe is attached, or what serves in its place.
    pub(crate) fn mode(&self, report: &ProbeReport) -> String {
        match (report.probe, report.mode) {
            (Probe::Hint, Mode::Absent) if self.memory_stat_serves => "memory_stat".to_owned(),
            (Probe::OomKill, Mode::Absent) => "memory_events".to_owned(),
            (_, mode) => mode.to_string(),
        }
    }
}

/// What holds for the whole host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// `kernel.numa_balancing`; `None` where it cannot be read.
    pub(crate) balancing: Option<u32>,
    pub(crate) nodes: usize,
    pub(crate) skips_single_node_cpusets: Option<bool>,
}

impl Host {
    /// What can be said without looking at what was sampled. `allowed` is how many nodes the cpuset has.
    pub(crate) fn judge(self, allowed: Option<usize>) -> Option<Sampling> {
        match self.balancing {
            _ if self.nodes < 2 => Some(Sampling::Off),
            None => Some(Sampling::Unknown),
            Some(mode) if mode & 1 == 1 => match (allowed, self.skips_single_node_cpusets) {
                (Some(1), Some(true)) => Some(Sampling::SkippedCpuset),
                (Some(1), None) => Some(Sampling::Unknown),
                _ => None,
            },
            Some(mode) if mode & 2 == 2 => Some(Sampling::Mode2),
            Some(_) => Some(Sampling::Off),
        }
    }
}

/// Reads `kernel.numa_balancing`. A kernel without it does not balance.
pub(crate) fn balancing(root: &Path) -> Option<u32> {
    match fs::read_to_string(root.join("proc/sys/kernel/numa_balancing")) {
        Ok(text) => text.trim().parse().ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(0),
        Err(_) => None,
    }
}

impl Seen {
    /// Takes in what is known now; each part is absent where it is not known.
    pub(crate) fn update(
        &mut self,
        by_host: Option<Sampling>,
        scanned: Option<ScannedPages>,
        pte_updates: Option<u64>,
        now: Instant,
    ) {
        let before = self.scanned.unwrap_or_default();
        if let Some(scanned) = scanned {
            let grown = |now: u64, before: u64| now.saturating_sub(before);
            let sampled = grown(scanned.sampled.0, before.sampled.0);
            let excluded = grown(scanned.excluded.0, before.excluded.0);
            if sampled > 0 || excluded > 0 {
                let verdict = if excluded > sampled { Sampling::Bound } else { Sampling::On };
                self.verdict = Some((verdict, now));
            }
            self.scanned = Some(scanned);
        } else if let Some(updates) = pte_updates {
            if self.pte_updates.is_some_and(|before| updates > before) {
                self.verdict = Some((Sampling::On, now));
            }
            self.pte_updates = Some(updates);
        }
        let held = self.verdict.filter(|(_, at)| now.saturating_duration_since(*at) < HOLDS);
        self.state = by_host.or(held.map(|(verdict, _)| verdict)).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use numaward_probes::Pages;

    use super::*;

    #[test]
    fn the_host_decides_where_it_can() {
        let host = |balancing, nodes, skips_single_node_cpusets| Host {
            balancing,
            nodes,
            skips_single_node_cpusets,
        };
        for (host, allowed, expected) in [
            (host(Some(1), 1, Some(false)), Some(1), Some(Sampling::Off)),
            (host(Some(0), 2, Some(false)), None, Some(Sampling::Off)),
            (host(Some(2), 2, Some(false)), Some(2), Some(Sampling::Mode2)),
            (host(None, 2, Some(false)), Some(2), Some(Sampling::Unknown)),
            (host(Some(1), 2, Some(true)), Some(1), Some(Sampling::SkippedCpuset)),
            (host(Some(1), 2, Some(false)), Some(1), None),
            (host(Some(1), 2, None), Some(1), Some(Sampling::Unknown)),
            (host(Some(3), 2, Some(true)), Some(2), None),
            (host(Some(1), 2, Some(true)), None, None),
        ] {
            assert_eq!(host.judge(allowed), expected, "{host:?} {allowed:?}");
        }
    }

    #[test]
    fn the_setting_is_read_from_good_missing_and_corrupt_files() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(balancing(root.path()), Some(0));
        let file = root.path().join("proc/sys/kernel/numa_balancing");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "3\n").unwrap();
        assert_eq!(balancing(root.path()), Some(3));
        fs::write(&file, "on\n").unwrap();
        assert_eq!(balancing(root.path()), None);
    }

    #[test]
    fn what_was_seen_holds_for_a_while() {
        let start = Instant::now();
        let mut seen = Seen::default();
        let mut look = |sampled, excluded, seconds| {
            let scanned = ScannedPages { sampled: Pages(sampled), excluded: Pages(excluded) };
            seen.update(None, Some(scanned), None, start + Duration::from_secs(seconds));
            seen.state
        };
        assert_eq!(look(0, 0, 0), Sampling::Unknown, "nothing was seen");
        assert_eq!(look(100, 20, 10), Sampling::On);
        assert_eq!(look(110, 520, 20), Sampling::Bound);
        assert_eq!(look(110, 520, 300), Sampling::Bound);
        assert_eq!(look(110, 520, 320), Sampling::Unknown, "too long ago");
        assert_eq!(look(5, 520, 330), Sampling::Unknown, "a counter that went back says nothing");

        let mut seen = Seen::default();
        let mut look = |updates, seconds| {
            seen.update(None, None, updates, start + Duration::from_secs(seconds));
            seen.state
        };
        assert_eq!(look(Some(7), 0), Sampling::Unknown, "that may have been long ago");
        assert_eq!(look(Some(8), 10), Sampling::On);
        assert_eq!(look(None, 20), Sampling::On);
        assert_eq!(look(None, 400), Sampling::Unknown);
        let mut seen = Seen::default();
        seen.update(Some(Sampling::Off), None, Some(1), start);
        assert_eq!(seen.state, Sampling::Off);
    }
}

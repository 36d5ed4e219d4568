//! Detection of workloads that the kernel does not sample, so that missing samples do not look like local
//! accesses.
//!
//! Automatic NUMA balancing (`kernel.numa_balancing`) makes pages fault from time to time to find out which node
//! accesses them. It does not sample all memory:
//! - no memory while it is off or serves tiering only (mode 2);
//! - since about Linux 6.18, no memory of tasks with a single node in their cpuset, because balancing could not move it;
//! - no mapping with a memory policy that excludes balancing, such as plain `MPOL_BIND`.
//!
//! The probe `scan` counts the mappings that balancing visited. Without that probe, `memory.stat` shows from Linux
//! 6.12 on whether any page was sampled.

use std::{
    collections::BTreeMap,
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

use numaward_cgroup::CgroupId;
use numaward_probes::{Mode, Probe, ProbeReport, ScannedPages};

use crate::estimate::Estimates;

/// Duration for which the latest evidence of sampling is valid. Balancing revisits a task after at most a minute.
const EVIDENCE_LIFETIME: Duration = Duration::from_mins(5);

/// Sampling state of a workload's accesses.
///
/// Its text is the metric label `state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Sampling {
    /// The accesses are sampled.
    On,
    /// Not sampled: NUMA balancing is off, or the machine has a single node.
    Off,
    /// Not sampled: NUMA balancing serves memory tiering only.
    Mode2,
    /// Not sampled: the cpuset has a single node, and this kernel skips such tasks.
    SkippedCpuset,
    /// Hardly sampled: the memory policy of most of the memory excludes it.
    Bound,
    /// No evidence yet, or no source of evidence.
    #[default]
    Unknown,
}

/// Sampling state of a workload and the counters from which it is derived.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SamplingEvidence {
    pub(crate) state: Sampling,
    pub(crate) scanned: Option<ScannedPages>,
    pte_updates: Option<u64>,
    /// Latest state derived from scanned mappings or pages, and the time of that evidence.
    verdict: Option<(Sampling, Instant)>,
    /// Pages that balancing moved to the accessing node (`memory.stat`): a lower bound of the remote accesses.
    pub(crate) moved: Option<u64>,
}

/// Sampling states and estimates of all workloads.
#[derive(Clone, Debug, Default)]
pub(crate) struct SamplingStates {
    pub(crate) seen: BTreeMap<CgroupId, SamplingEvidence>,
    /// Estimated remote accesses of workloads that are not sampled, if estimates are enabled.
    pub(crate) estimates: Estimates,
    /// True if `memory.stat` counts sampled pages, in place of an absent probe.
    pub(crate) memory_stat_serves: bool,
}

impl SamplingStates {
    /// Returns the sampling state of a cgroup's accesses.
    pub(crate) fn state(&self, id: CgroupId) -> Sampling {
        self.seen.get(&id).map(|seen| seen.state).unwrap_or_default()
    }

    /// Returns the mode in which a probe is attached, or the name of the source that replaces it.
    pub(crate) fn mode(&self, report: &ProbeReport) -> String {
        match (report.probe, report.mode) {
            (Probe::Hint, Mode::Absent) if self.memory_stat_serves => "memory_stat".to_owned(),
            (Probe::OomKill, Mode::Absent) => "memory_events".to_owned(),
            (_, mode) => mode.to_string(),
        }
    }
}

/// Properties of the host that decide whether accesses are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SamplingConditions {
    /// Value of `kernel.numa_balancing`; `None` if it cannot be read.
    pub(crate) balancing: Option<u32>,
    pub(crate) nodes: usize,
    pub(crate) skips_single_node_cpusets: Option<bool>,
}

impl SamplingConditions {
    /// Derives the state from the host's properties and the number of nodes in the cpuset (`allowed`). Returns `None`
    /// if it depends on the samples.
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

/// Reads `kernel.numa_balancing`. Returns 0 for a kernel without NUMA balancing.
pub(crate) fn balancing(root: &Path) -> Option<u32> {
    match fs::read_to_string(root.join("proc/sys/kernel/numa_balancing")) {
        Ok(text) => text.trim().parse().ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(0),
        Err(_) => None,
    }
}

impl SamplingEvidence {
    /// Updates the state from new readings; a reading that is not available is `None`.
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
        let held = self.verdict.filter(|(_, at)| now.saturating_duration_since(*at) < EVIDENCE_LIFETIME);
        self.state = by_host.or(held.map(|(verdict, _)| verdict)).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use numaward_probes::Pages;

    use super::*;

    #[test]
    fn host_settings_decide_first() {
        let host = |balancing, nodes, skips_single_node_cpusets| SamplingConditions {
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
    fn reads_or_rejects_balancing_file() {
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
    fn evidence_expires() {
        let start = Instant::now();
        let mut seen = SamplingEvidence::default();
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

        let mut seen = SamplingEvidence::default();
        let mut look = |updates, seconds| {
            seen.update(None, None, updates, start + Duration::from_secs(seconds));
            seen.state
        };
        assert_eq!(look(Some(7), 0), Sampling::Unknown, "that may have been long ago");
        assert_eq!(look(Some(8), 10), Sampling::On);
        assert_eq!(look(None, 20), Sampling::On);
        assert_eq!(look(None, 400), Sampling::Unknown);
        let mut seen = SamplingEvidence::default();
        seen.update(Some(Sampling::Off), None, Some(1), start);
        assert_eq!(seen.state, Sampling::Off);
    }
}

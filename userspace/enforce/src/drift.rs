//! Drift: detection of knobs that no longer hold the written value, and the decision when to write them again.
//!
//! A knob that drifts is repaired at once. If it drifts again within the time `quiet`, another program writes it too:
//! a *conflict*, in which each repair waits twice as long as the one before. After `repairs` repairs in a row the
//! daemon gives the knob up: the other program's value stays and is reported. A conflict ends after the time `quiet`
//! without drift. For a knob that was given up, this means that it holds its value or that no program has written it.
//!
//! A reset by the service manager to the value of a new cgroup is not one of these repairs: unless the knob was given
//! up, it is repaired each time, but not more often than once in `reset_wait`.
//!
//! The kubelet's Memory `QoS` writes the protection and throttling of pods, some of it once a minute. It is yielded to after one repair, until
//! it has not written the knob for the time `kubelet_quiet`. A reset by the kubelet is treated like one by the service manager: without
//! reservations, Memory `QoS` resets the protection of all pods once a minute, which would end all protection below.
//!
//! Time is a parameter: a duration since any fixed moment, which never decreases.

use std::{collections::HashMap, fmt, time::Duration};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue},
};

use super::backend::unset;

/// A knob that does not hold its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    pub cgroup: CgroupPath,
    pub knob: Knob,
    /// The value to hold.
    pub wanted: KnobValue,
    /// The value that the knob holds; `None` if the knob does not exist any more (its controller was disabled).
    pub found: Option<KnobValue>,
    pub kind: DriftKind,
}

/// Kinds of drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DriftKind {
    /// The knob holds another value. Writing the knob again restores it.
    Rewritten,
    /// The knob holds the value, but the effective set (`*.effective`) is smaller: an ancestor was narrowed, or a CPU
    /// or node went offline. Writing the knob again does not help.
    Ineffective,
}

impl Drift {
    /// Returns whether the knob holds the value of a new cgroup or does not exist, so that no other program asks for a
    /// value of its own.
    pub fn is_reset(&self) -> bool {
        self.found.as_ref().is_none_or(|found| *found == unset(self.knob))
    }
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cgroup, knob, wanted, found, kind } = self;
        let shown = |value: &KnobValue| match value.to_string() {
            text if text.is_empty() => "empty".to_owned(),
            text => text,
        };
        let (wanted, found) = (shown(wanted), found.as_ref().map(shown));
        match (found, kind) {
            (Some(found), DriftKind::Rewritten) => {
                write!(f, "{cgroup}: {knob} is {found}, should be {wanted}")
            }
            (Some(found), DriftKind::Ineffective) => {
                write!(f, "{cgroup}: of {knob} {wanted} only {found} is effective")
            }
            (None, _) => write!(f, "{cgroup}: {knob} is not there, should be {wanted}"),
        }
    }
}

/// Limits of the repairs in a conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConflictPolicy {
    /// Number of repairs in a row after which a knob is given up.
    pub repairs: u32,
    /// The delay before the second repair; it doubles with each repair.
    pub first_wait: Duration,
    /// The longest delay.
    pub longest_wait: Duration,
    /// The amount of time without drift after which a conflict ends.
    pub quiet: Duration,
    /// The delay between repairs of a knob that the service manager or the kubelet resets.
    pub reset_wait: Duration,
    /// The amount of time without a write of the kubelet after which a conflict with it ends.
    pub kubelet_quiet: Duration,
}

impl Default for ConflictPolicy {
    /// Returns the limits for ten repairs within about 50 seconds.
    fn default() -> Self {
        Self {
            repairs: 10,
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_secs(30),
            quiet: Duration::from_mins(1),
            reset_wait: Duration::from_secs(1),
            kubelet_quiet: Duration::from_mins(10),
        }
    }
}

/// Observed cause of a drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriftCause {
    /// No write was seen since the last check.
    Unseen,
    /// Another program may have written the knob since the last check.
    Written,
    /// The service manager reset the knob to the value of a new cgroup, as `daemon-reload` does.
    Reset,
    /// The kubelet wrote the knob by its Memory `QoS`.
    Kubelet,
    /// The kubelet reset the knob to the value of a new cgroup, as Memory `QoS` without reservations does once a minute.
    KubeletReset,
}

/// Decision about a knob that drifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriftVerdict {
    /// Write the knob again now.
    Repair,
    /// Check again at this time.
    Wait(Duration),
    /// Give the knob up and report it: the last permitted repair has failed.
    GiveUp,
    /// The knob was given up before.
    GivenUp,
}

/// State of a knob that has drifted.
#[derive(Clone, Copy, Debug)]
struct Conflict {
    /// Number of repairs in a row.
    repairs: u32,
    /// Time of the next permitted repair.
    not_before: Duration,
    /// Time of the last drift.
    last_drift: Duration,
    is_given_up: bool,
    /// True if the kubelet is the other program.
    is_with_kubelet: bool,
}

impl Conflict {
    fn begin(now: Duration) -> Self {
        Self { repairs: 0, not_before: now, last_drift: now, is_given_up: false, is_with_kubelet: false }
    }

    /// Returns whether the conflict is over at the time `now`, because the knob did not drift for long enough.
    fn is_over(&self, policy: &ConflictPolicy, now: Duration) -> bool {
        let quiet = if self.is_with_kubelet { policy.kubelet_quiet } else { policy.quiet };
        now.saturating_sub(self.last_drift) >= quiet
    }
}

/// Conflicts over all knobs.
#[derive(Debug)]
pub struct ConflictBackoff {
    policy: ConflictPolicy,
    conflicts: HashMap<(CgroupPath, Knob), Conflict>,
}

impl ConflictBackoff {
    pub fn new(policy: ConflictPolicy) -> Self {
        Self { policy, conflicts: HashMap::new() }
    }

    /// Records a drift at the time `now`, and decides what to do about it.
    pub fn drifted(
        &mut self,
        cgroup: &CgroupPath,
        knob: Knob,
        cause: DriftCause,
        now: Duration,
    ) -> DriftVerdict {
        let policy = self.policy;
        let conflict = self.conflicts.entry((cgroup.clone(), knob)).or_insert(Conflict::begin(now));
        // Without reservations, the kubelet has no value of its own to keep.
        let is_kubelet_over = conflict.is_with_kubelet && cause == DriftCause::KubeletReset;
        if conflict.is_over(&policy, now) || is_kubelet_over {
            *conflict = Conflict::begin(now);
        }
        if conflict.is_given_up {
            if cause != DriftCause::Unseen {
                conflict.last_drift = now;
            }
            return DriftVerdict::GivenUp;
        }
        conflict.last_drift = now;
        if matches!(cause, DriftCause::Reset | DriftCause::KubeletReset) {
            if now < conflict.not_before {
                return DriftVerdict::Wait(conflict.not_before);
            }
            conflict.not_before = now + policy.reset_wait;
            return DriftVerdict::Repair;
        }
        conflict.is_with_kubelet |= cause == DriftCause::Kubelet;
        if conflict.repairs >= if conflict.is_with_kubelet { 1 } else { policy.repairs } {
            conflict.is_given_up = true;
            return DriftVerdict::GiveUp;
        }
        if now < conflict.not_before {
            return DriftVerdict::Wait(conflict.not_before);
        }
        let wait = policy.first_wait.saturating_mul(1u32.checked_shl(conflict.repairs).unwrap_or(u32::MAX));
        conflict.repairs += 1;
        conflict.not_before = now + wait.min(policy.longest_wait);
        DriftVerdict::Repair
    }

    /// Records that a knob holds its value. Returns whether this ends a conflict.
    pub fn holds(&mut self, cgroup: &CgroupPath, knob: Knob, now: Duration) -> bool {
        let key = (cgroup.clone(), knob);
        let is_over = self.conflicts.get(&key).is_some_and(|conflict| conflict.is_over(&self.policy, now));
        is_over && self.conflicts.remove(&key).is_some()
    }

    /// Returns the knobs that were given up.
    pub fn given_up(&self) -> impl Iterator<Item = (&CgroupPath, Knob)> {
        self.conflicts
            .iter()
            .filter(|(_, conflict)| conflict.is_given_up)
            .map(|((cgroup, knob), _)| (cgroup, *knob))
    }

    /// Returns whether there is a conflict over a knob of this cgroup.
    pub fn is_contested(&self, cgroup: &CgroupPath) -> bool {
        self.conflicts.keys().any(|(other, _)| other == cgroup)
    }

    /// Removes conflicts over knobs for which `is_kept` returns false.
    pub fn retain(&mut self, is_kept: impl Fn(&CgroupPath, Knob) -> bool) {
        self.conflicts.retain(|(cgroup, knob), _| is_kept(cgroup, *knob));
    }

    /// Removes the conflicts of a cgroup that is gone, was released or has new settings.
    pub fn forget(&mut self, cgroup: &CgroupPath) {
        self.conflicts.retain(|(other, _), _| other != cgroup);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: ConflictPolicy = ConflictPolicy {
        repairs: 3,
        first_wait: Duration::from_millis(100),
        longest_wait: Duration::from_millis(150),
        quiet: Duration::from_secs(10),
        reset_wait: Duration::from_secs(1),
        kubelet_quiet: Duration::from_secs(100),
    };

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn kubelet_is_yielded_to() {
        let mut conflicts = ConflictBackoff::new(POLICY);
        let path: CgroupPath = "/kubepods".parse().unwrap();
        let mut drifted = |cause, seconds: u64| {
            conflicts.drifted(&path, Knob::MemoryMin, cause, Duration::from_secs(seconds))
        };
        // It writes once a minute, which is more than the time `quiet` after which other conflicts end.
        assert_eq!(drifted(DriftCause::Kubelet, 0), DriftVerdict::Repair);
        assert_eq!(drifted(DriftCause::Kubelet, 60), DriftVerdict::GiveUp);
        assert_eq!(drifted(DriftCause::Kubelet, 120), DriftVerdict::GivenUp);
        assert_eq!(drifted(DriftCause::Unseen, 219), DriftVerdict::GivenUp, "it wrote 99 s ago");
        assert_eq!(drifted(DriftCause::Unseen, 220), DriftVerdict::Repair, "it does not write any more");
        assert_eq!(drifted(DriftCause::Kubelet, 330), DriftVerdict::Repair);
        assert_eq!(drifted(DriftCause::Kubelet, 390), DriftVerdict::GiveUp);
        assert_eq!(
            drifted(DriftCause::KubeletReset, 450),
            DriftVerdict::Repair,
            "a reset is no value to keep"
        );
        assert_eq!(drifted(DriftCause::Kubelet, 510), DriftVerdict::Repair);
    }

    #[test]
    fn resets_by_kubelet_never_end_repairs() {
        let mut conflicts = ConflictBackoff::new(POLICY);
        let path: CgroupPath = "/kubepods".parse().unwrap();
        for minute in 0..100 {
            let now = Duration::from_mins(minute);
            let verdict = conflicts.drifted(&path, Knob::MemoryMin, DriftCause::KubeletReset, now);
            assert_eq!(verdict, DriftVerdict::Repair, "minute {minute}");
        }
        assert_eq!(conflicts.given_up().count(), 0);
    }

    #[test]
    fn kubelet_start_is_repaired() {
        let mut conflicts = ConflictBackoff::new(POLICY);
        let path: CgroupPath = "/kubepods".parse().unwrap();
        for start in [0, 100, 1000] {
            let now = Duration::from_secs(start);
            let verdict = conflicts.drifted(&path, Knob::MemoryMin, DriftCause::Kubelet, now);
            assert_eq!(verdict, DriftVerdict::Repair, "{start}");
        }
        assert!(!conflicts.holds(&path, Knob::MemoryMin, Duration::from_secs(1099)));
        assert!(conflicts.holds(&path, Knob::MemoryMin, Duration::from_secs(1100)));
    }

    #[test]
    fn repairs_back_off_and_end() {
        let mut conflicts = ConflictBackoff::new(POLICY);
        let path: CgroupPath = "/a".parse().unwrap();
        let mut drifted =
            |millis| conflicts.drifted(&path, Knob::CpusetCpus, DriftCause::Written, at(millis));
        assert_eq!(drifted(0), DriftVerdict::Repair, "the first at once");
        assert_eq!(drifted(10), DriftVerdict::Wait(at(100)));
        assert_eq!(drifted(100), DriftVerdict::Repair);
        assert_eq!(drifted(200), DriftVerdict::Wait(at(250)), "100 doubled, but at most 150");
        assert_eq!(drifted(250), DriftVerdict::Repair);
        assert_eq!(drifted(260), DriftVerdict::GiveUp);
        assert_eq!(drifted(9_000), DriftVerdict::GivenUp);
        assert_eq!(drifted(18_000), DriftVerdict::GivenUp, "the other program still writes");
        assert_eq!(conflicts.given_up().count(), 1);
        assert!(!conflicts.holds(&path, Knob::CpusetCpus, at(20_000)));
        assert!(conflicts.holds(&path, Knob::CpusetCpus, at(28_000)), "quiet ends it");
        assert_eq!(conflicts.given_up().count(), 0);
        assert_eq!(
            conflicts.drifted(&path, Knob::CpusetCpus, DriftCause::Written, at(28_001)),
            DriftVerdict::Repair
        );
    }

    #[test]
    fn rare_drift_is_always_repaired() {
        let mut conflicts = ConflictBackoff::new(POLICY);
        let path: CgroupPath = "/a".parse().unwrap();
        for round in 0..20 {
            let now = at(round * 10_000);
            let verdict = conflicts.drifted(&path, Knob::MemoryMin, DriftCause::Written, now);
            assert_eq!(verdict, DriftVerdict::Repair, "{round}");
        }
    }

    #[test]
    fn service_manager_resets_are_repaired() {
        let mut conflicts = ConflictBackoff::new(ConflictPolicy::default());
        let path: CgroupPath = "/a".parse().unwrap();
        let mut drifted = |cause, millis| conflicts.drifted(&path, Knob::CpusetCpus, cause, at(millis));
        for reload in 0..11 {
            assert_eq!(drifted(DriftCause::Reset, reload * 2_000), DriftVerdict::Repair, "{reload}");
        }
        assert_eq!(drifted(DriftCause::Reset, 20_100), DriftVerdict::Wait(at(21_000)), "once a second");
        for write in 0..10 {
            assert_eq!(
                drifted(DriftCause::Written, 30_000 + write * 30_000),
                DriftVerdict::Repair,
                "{write}"
            );
        }
        assert_eq!(drifted(DriftCause::Written, 330_000), DriftVerdict::GiveUp);
    }

    #[test]
    fn given_up_knob_recovers_when_quiet() {
        let mut conflicts = ConflictBackoff::new(ConflictPolicy { repairs: 0, ..POLICY });
        let path: CgroupPath = "/a".parse().unwrap();
        let mut drifted = |cause, millis| conflicts.drifted(&path, Knob::CpusetCpus, cause, at(millis));
        assert_eq!(drifted(DriftCause::Written, 0), DriftVerdict::GiveUp);
        assert_eq!(drifted(DriftCause::Written, 5_000), DriftVerdict::GivenUp);
        assert_eq!(drifted(DriftCause::Unseen, 14_000), DriftVerdict::GivenUp);
        conflicts.policy = POLICY;
        let verdict = conflicts.drifted(&path, Knob::CpusetCpus, DriftCause::Unseen, at(15_000));
        assert_eq!(verdict, DriftVerdict::Repair);
    }

    #[test]
    fn each_knob_has_its_own_conflict() {
        let mut conflicts = ConflictBackoff::new(POLICY);
        let (a, b): (CgroupPath, CgroupPath) = ("/a".parse().unwrap(), "/b".parse().unwrap());
        assert_eq!(conflicts.drifted(&a, Knob::CpusetCpus, DriftCause::Written, at(0)), DriftVerdict::Repair);
        assert_eq!(conflicts.drifted(&a, Knob::CpusetMems, DriftCause::Written, at(1)), DriftVerdict::Repair);
        assert_eq!(conflicts.drifted(&b, Knob::CpusetCpus, DriftCause::Written, at(2)), DriftVerdict::Repair);
        conflicts.forget(&a);
        assert_eq!(conflicts.drifted(&a, Knob::CpusetCpus, DriftCause::Written, at(3)), DriftVerdict::Repair);
        assert_eq!(
            conflicts.drifted(&b, Knob::CpusetCpus, DriftCause::Written, at(3)),
            DriftVerdict::Wait(at(102))
        );
    }
}

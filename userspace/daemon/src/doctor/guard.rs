//! Check of the headroom guard: it can drop page cache to keep guaranteed memory free (`guardReclaim`).

use numaward_cgroup::kernel_features::RECLAIM;
use numaward_config::{Config, OperatingMode};
use numaward_topology::{KernelFeature, KernelRelease};

use super::{DoctorHost, Outcome, ok, warn};

/// The first kernel that can exclude anonymous memory from proactive reclaim (`swappiness=` of `memory.reclaim`).
const RECLAIM_WITHOUT_SWAP: KernelRelease = KernelRelease::new(6, 13);

/// Checks that the guard can drop page cache. `features` are features of the kernel, with false if they are missing.
pub(super) fn examine_reclaim(
    host: &DoctorHost<'_>,
    config: &Config,
    features: &[(KernelFeature, Option<bool>)],
) -> Outcome {
    if !config.drops_page_cache() || config.mode == Some(OperatingMode::Observe) {
        return warn(
            "no page cache is dropped: guardReclaim requires guard: act or evict, enforcement.mode: on, and no mode: observe",
            "guard: act, enforcement.mode: on",
        );
    }
    if features.iter().any(|(feature, found)| feature.name == RECLAIM.name && *found == Some(false)) {
        return warn(
            format!("no page cache is dropped: this kernel has no {}", RECLAIM.name),
            format!("Linux {} or newer", RECLAIM.since),
        );
    }
    let release = host.read("proc/sys/kernel/osrelease").ok().and_then(|text| KernelRelease::parse(&text));
    let has_swap = host.read("proc/swaps").is_ok_and(|text| text.lines().count() > 1);
    if has_swap && release.is_some_and(|release| release < RECLAIM_WITHOUT_SWAP) {
        return warn(
            format!(
                "no page cache is dropped: before Linux {RECLAIM_WITHOUT_SWAP}, this requires a host without swap"
            ),
            "swapoff -a, or a newer kernel",
        );
    }
    ok("page cache of workloads without a guarantee is dropped in advance, to keep guaranteed memory free")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_api::{EnforcementMode, doctor::CheckResult};
    use numaward_config::guard::GuardMode;

    use super::*;

    #[test]
    fn requires_acting_guard_and_reclaim() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        let kernel = |release: &str, swaps: &str| {
            fs::write(root.path().join("proc/sys/kernel/osrelease"), release).unwrap();
            fs::write(root.path().join("proc/swaps"), swaps).unwrap();
        };
        let mut config = Config::default();
        config.guard_reclaim.enabled = true;
        config.enforcement.mode = EnforcementMode::On;
        let host = DoctorHost { root: root.path() };
        let check = |config: &Config, found| examine_reclaim(&host, config, &[(RECLAIM, found)]);
        kernel("6.12.1", "Filename Type Size Used Priority\n");
        assert!(check(&config, Some(true)).1.contains("guardReclaim requires guard: act"));
        config.guard = GuardMode::Evict;
        assert_eq!([Some(true), None].map(|found| check(&config, found).0), [CheckResult::Ok; 2]);
        let (verdict, finding, fix) = check(&config, Some(false));
        assert_eq!(
            (verdict, finding.as_str(), fix.as_deref()),
            (
                CheckResult::Warn,
                "no page cache is dropped: this kernel has no memory.reclaim",
                Some("Linux 5.19 or newer")
            )
        );
        for (release, expected) in [("6.12.1-amd64", CheckResult::Warn), ("6.13.0", CheckResult::Ok)] {
            kernel(release, "Filename Type Size Used Priority\n/dev/zram0 partition 1 0 -2\n");
            assert_eq!(check(&config, Some(true)).0, expected, "{release}");
        }
        config.mode = Some(OperatingMode::Observe);
        assert_eq!(check(&config, Some(true)).0, CheckResult::Warn);
        config.mode = None;
        config.enforcement.mode = EnforcementMode::DryRun;
        assert_eq!(check(&config, Some(true)).0, CheckResult::Warn);
    }
}

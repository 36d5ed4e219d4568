//! Checks of the headroom guard.

use numaward_cgroup::kernel_features::RECLAIM;
use numaward_config::{Config, OperatingMode};
use numaward_topology::{KernelFeature, KernelRelease};

use super::{Host, Outcome, ok, warn};

/// The first kernel that can leave anonymous memory alone when it reclaims.
const LEAVES_ANONYMOUS: KernelRelease = KernelRelease::new(6, 13);

impl Host<'_> {
    /// Whether page cache can be dropped for what is promised.
    pub(super) fn kept_free(&self, config: &Config, needs: &[(KernelFeature, Option<bool>)]) -> Outcome {
        if !config.drops_page_cache() || config.mode == Some(OperatingMode::Observe) {
            return warn(
                "nothing is dropped: guardReclaim needs guard: act or evict, enforcement.mode: on, and no mode: observe",
                "guard: act, enforcement.mode: on",
            );
        }
        if needs.iter().any(|(need, is_here)| need.name == RECLAIM.name && *is_here == Some(false)) {
            return warn(
                format!("nothing is dropped: this kernel has no {}", RECLAIM.name),
                format!("Linux {} or newer", RECLAIM.since),
            );
        }
        let release =
            self.read("proc/sys/kernel/osrelease").ok().and_then(|text| KernelRelease::parse(&text));
        let has_swap = self.read("proc/swaps").is_ok_and(|text| text.lines().count() > 1);
        if has_swap && release.is_some_and(|release| release < LEAVES_ANONYMOUS) {
            return warn(
                format!(
                    "nothing is dropped: before Linux {LEAVES_ANONYMOUS}, that takes a host without swap"
                ),
                "swapoff -a, or a newer kernel",
            );
        }
        ok(
            "page cache of workloads without a guarantee is dropped ahead of time, to keep promised memory free",
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_api::{EnforcementMode, doctor::CheckResult};
    use numaward_config::guard::GuardMode;

    use super::*;

    #[test]
    fn what_is_promised_is_kept_free_where_the_guard_acts_and_the_kernel_can() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        let kernel = |release: &str, swaps: &str| {
            fs::write(root.path().join("proc/sys/kernel/osrelease"), release).unwrap();
            fs::write(root.path().join("proc/swaps"), swaps).unwrap();
        };
        let mut config = Config::default();
        config.guard_reclaim.enabled = true;
        config.enforcement.mode = EnforcementMode::On;
        let host = Host { root: root.path() };
        let of = |config: &Config, is_here| host.kept_free(config, &[(RECLAIM, is_here)]);
        kernel("6.12.1", "Filename Type Size Used Priority\n");
        assert!(of(&config, Some(true)).1.contains("guardReclaim needs guard: act"));
        config.guard = GuardMode::Evict;
        assert_eq!([Some(true), None].map(|is_here| of(&config, is_here).0), [CheckResult::Ok; 2]);
        let (verdict, finding, fix) = of(&config, Some(false));
        assert_eq!(
            (verdict, finding.as_str(), fix.as_deref()),
            (
                CheckResult::Warn,
                "nothing is dropped: this kernel has no memory.reclaim",
                Some("Linux 5.19 or newer")
            )
        );
        for (release, expected) in [("6.12.1-amd64", CheckResult::Warn), ("6.13.0", CheckResult::Ok)] {
            kernel(release, "Filename Type Size Used Priority\n/dev/zram0 partition 1 0 -2\n");
            assert_eq!(of(&config, Some(true)).0, expected, "{release}");
        }
        config.mode = Some(OperatingMode::Observe);
        assert_eq!(of(&config, Some(true)).0, CheckResult::Warn);
        config.mode = None;
        config.enforcement.mode = EnforcementMode::DryRun;
        assert_eq!(of(&config, Some(true)).0, CheckResult::Warn);
    }
}

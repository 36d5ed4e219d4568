//! Checks of the headroom guard.

use numaward_cgroup::needs::RECLAIM;
use numaward_config::Config;
use numaward_topology::Need;

use super::{Outcome, ok, warn};

/// Whether page cache can be dropped for what is promised.
pub(super) fn kept_free(config: &Config, needs: &[(Need, Option<bool>)]) -> Outcome {
    if !config.keeps_free() {
        return warn(
            "nothing is dropped: guardReclaim needs guard: act or evict, and enforcement.mode: on",
            "guard: act, enforcement.mode: on",
        );
    }
    match needs.iter().find(|(need, _)| need.name == RECLAIM.name) {
        Some((_, Some(false))) => {
            warn(format!("nothing is dropped: this kernel has no {}", RECLAIM.name), "Linux 5.19 or newer")
        }
        _ => {
            ok("page cache of workloads without a guarantee is dropped before what is promised is asked for")
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_api::{EnforcementMode, doctor::Verdict};
    use numaward_config::guard::GuardMode;

    use super::*;

    #[test]
    fn what_is_promised_is_kept_free_where_the_guard_acts_and_the_kernel_can() {
        let mut config = Config::default();
        config.guard_reclaim.enabled = true;
        config.enforcement.mode = EnforcementMode::On;
        let of = |config: &Config, is_here| kept_free(config, &[(RECLAIM, is_here)]);
        assert!(of(&config, Some(true)).1.contains("guardReclaim needs guard: act"));
        config.guard = GuardMode::Evict;
        assert_eq!([Some(true), None].map(|is_here| of(&config, is_here).0), [Verdict::Ok; 2]);
        let (verdict, finding, _) = of(&config, Some(false));
        assert_eq!(
            (verdict, finding.as_str()),
            (Verdict::Warn, "nothing is dropped: this kernel has no memory.reclaim")
        );
        config.enforcement.mode = EnforcementMode::DryRun;
        assert_eq!(of(&config, Some(true)).0, Verdict::Warn);
    }
}

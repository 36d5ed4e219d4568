//! What several parts use.

use std::time::Duration;

/// Where cgroups are.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

pub(crate) fn millis(time: Duration) -> serde_json::Value {
    serde_json::json!((time.as_secs_f64() * 10_000.0).round() / 10.0)
}

//! Output of `numaward doctor`.

use serde::{Deserialize, Serialize};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckResult {
    /// The host is set up as it should be.
    Ok,
    /// The check could not find out.
    Unknown,
    /// numaward works with limitations.
    Warn,
    /// numaward cannot work.
    Fail,
}

/// A check of the host and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCheck {
    /// The subject of the check.
    pub check: String,
    /// The result.
    pub verdict: CheckResult,
    /// The finding, and its consequence unless the result is `ok`.
    pub finding: String,
    /// The way to fix the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

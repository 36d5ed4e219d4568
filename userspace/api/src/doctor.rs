//! What `numaward doctor` finds on a host.

use serde::{Deserialize, Serialize};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckResult {
    /// As it should be.
    Ok,
    /// numaward works, less well than it could.
    Warn,
    /// numaward cannot do its work.
    Fail,
}

/// One check and its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCheck {
    /// What was looked at.
    pub check: String,
    /// How it came out.
    pub verdict: CheckResult,
    /// What was found, and what it means unless all is well.
    pub finding: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

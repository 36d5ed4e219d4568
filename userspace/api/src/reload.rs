//! The result of loading the configuration again.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::PendingGuarantee;

/// The result of loading the configuration again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reload {
    /// The files that were read, in order: later ones override earlier ones.
    pub files: Vec<String>,
    /// Changed keys that took effect.
    pub applied: Vec<ChangedKey>,
    /// Changed keys that take effect when the daemon starts again.
    pub needs_restart: Vec<ChangedKey>,
    /// Cgroups that do not hold the guarantee that is declared for them.
    pub waiting: Vec<PendingGuarantee>,
    /// Warnings about settings without effect.
    pub warnings: Vec<String>,
}

/// A key of the configuration with a changed value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChangedKey {
    /// The key, with dots.
    #[schema(examples("log.level"))]
    pub key: String,
    /// The place of the new value, or of the first changed element of a list: a file with line and column, a variable or a flag. Absent
    /// for a default.
    #[schema(examples("/etc/numaward/conf.d/10-log.yaml:2:10"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

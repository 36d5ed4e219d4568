//! Definition of a check.

use anyhow::Result;

/// Name of a check, and its function, which returns its observations.
pub(crate) type Check = (&'static str, fn() -> Result<String>);

//! What a check is.

use anyhow::Result;

/// Its name, and what it saw, or what was wrong.
pub(crate) type Check = (&'static str, fn() -> Result<String>);

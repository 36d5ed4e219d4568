//! What the steps of a setup share.

use numaward_vm::Cache;

/// One run of setup.
pub(crate) struct Steps {
    pub(crate) cache: Cache,
    /// Fetch what the cache has, too.
    pub(crate) update: bool,
    /// Say so even where nothing has to be done.
    pub(crate) verbose: bool,
}

impl Steps {
    /// A part was there already.
    pub(crate) fn found(&self, part: &str, text: &str) {
        if self.verbose {
            say(part, &format!("ready: {text}"));
        }
    }
}

/// One line per step, on standard error: standard output belongs to what runs afterwards.
pub(crate) fn say(part: &str, text: &str) {
    eprintln!("setup: {part}: {text}");
}

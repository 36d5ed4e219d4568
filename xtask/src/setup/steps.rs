//! Options and messages of a setup.

use numaward_vm::Cache;

/// Options of a setup.
pub(crate) struct Steps {
    pub(crate) cache: Cache,
    /// If true, fetches entries that the cache has, too.
    pub(crate) update: bool,
    /// If true, also reports parts that are complete.
    pub(crate) verbose: bool,
}

impl Steps {
    /// Reports a part that is complete.
    pub(crate) fn found(&self, part: &str, text: &str) {
        if self.verbose {
            say(part, &format!("ready: {text}"));
        }
    }
}

/// Prints one line per step to standard error, because standard output belongs to the program that runs afterwards.
pub(crate) fn say(part: &str, text: &str) {
    eprintln!("setup: {part}: {text}");
}

//! Runs fault scenarios with the strategy `native` and checks the desired outcomes.

use std::{fmt, path::Path, time::Instant};

use numaward_engine::NativeOptions;

use self::scenario::Scenario;

mod checks;
mod scenario;

/// Results of a run.
#[derive(Default)]
pub(crate) struct DesiredReport {
    /// Number of scenarios that passed.
    pub(crate) passed: usize,
    /// Failed scenarios with their differences.
    pub(crate) failed: Vec<(String, Vec<String>)>,
}

impl fmt::Display for DesiredReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, differences) in &self.failed {
            writeln!(f, "{name}")?;
            for difference in differences {
                writeln!(f, "  {difference}")?;
            }
        }
        write!(f, "{} passed, {} failed", self.passed, self.failed.len())
    }
}

/// Runs all scenarios of a directory.
pub(crate) fn run(directory: &Path) -> Result<DesiredReport, String> {
    let begin = Instant::now();
    let mut desired = DesiredReport::default();
    for (file, scenarios) in crate::folder::read::<Scenario>(directory)? {
        for scenario in scenarios {
            let differences = scenario.run_native(&NativeOptions::default(), &|| begin.elapsed());
            if differences.is_empty() {
                desired.passed += 1;
            } else {
                desired.failed.push((format!("{file}: {}", scenario.name), differences));
            }
        }
    }
    Ok(desired)
}

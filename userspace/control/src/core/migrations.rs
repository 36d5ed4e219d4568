//! Migrations of pages to other nodes, and their results.

use std::{collections::BTreeMap, sync::mpsc, time::Duration};

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_enforce::{AppliedSettings, MigrationState};
use numaward_topology::Bytes;

use super::Effects;
use crate::ControlMetrics;

/// Assumed migration rate per second until enough bytes have been moved to measure it. Base pages reach it on current machines.
const ASSUMED_RATE: Bytes = Bytes::mib(512);
/// Number of moved bytes from which on the rate is measured.
const MIN_MEASURED: Bytes = Bytes::mib(16);

/// Running migrations, and the results of finished ones.
#[derive(Debug, Default)]
pub(crate) struct Migrations {
    running: Vec<(CgroupPath, MigrationState)>,
    moved: BTreeMap<CgroupPath, api::MovedPages>,
    /// Sum of moved bytes, and of the time that they took.
    measured: (u64, Duration),
}

impl Migrations {
    /// Returns true if pages of a cgroup are being moved.
    pub(crate) fn is_running(&self, cgroup: &CgroupPath) -> bool {
        self.running.iter().any(|(moving, _)| moving == cgroup)
    }

    /// Returns the measured or assumed migration rate.
    pub(super) fn rate(&self) -> api::MigrationRate {
        let (bytes, took) = self.measured;
        let micros = took.as_micros();
        if bytes < MIN_MEASURED.0 || micros == 0 {
            return api::MigrationRate { bytes_per_second: ASSUMED_RATE.0, source: api::RateSource::Assumed };
        }
        let rate = u128::from(bytes) * 1_000_000 / micros;
        let bytes_per_second = u64::try_from(rate).unwrap_or(u64::MAX).max(1);
        api::MigrationRate { bytes_per_second, source: api::RateSource::Measured }
    }

    pub(crate) fn forget(&mut self, cgroup: &CgroupPath) {
        self.moved.remove(cgroup);
    }

    /// Removes results of cgroups without applied settings.
    pub(crate) fn retain_held(&mut self, applied: &AppliedSettings) {
        self.moved.retain(|cgroup, _| applied.get(cgroup).is_some());
    }

    /// Returns the moved pages of a cgroup; `None` if it had no migration.
    pub(crate) fn pages_of(&self, cgroup: &CgroupPath) -> Option<api::MovedPages> {
        let running = self.is_running(cgroup);
        let moved = self.moved.get(cgroup).copied();
        (running || moved.is_some()).then(|| api::MovedPages { running, ..moved.unwrap_or_default() })
    }

    /// Adds migrations that have started.
    pub(crate) fn add(&mut self, moving: Vec<(CgroupPath, MigrationState)>) {
        self.running.extend(moving);
    }

    /// Collects the results of finished migrations.
    pub(crate) fn collect(&mut self, metrics: &ControlMetrics, effects: &mut Effects) {
        let Self { running, moved: noted, measured } = self;
        running.retain(|(cgroup, moving)| {
            let migration = match moving {
                MigrationState::Done(migration) => migration.clone(),
                MigrationState::Running(result) => match result.try_recv() {
                    Ok(Ok(migration)) => migration,
                    Ok(Err(error)) => {
                        tracing::error!(%cgroup, %error, "the pages of a cgroup cannot be moved");
                        return false;
                    }
                    Err(mpsc::TryRecvError::Empty) => return true,
                    Err(mpsc::TryRecvError::Disconnected) => return false,
                },
            };
            effects.view = true;
            let (moved, left) = (migration.moved(), migration.left());
            metrics.migrated(moved);
            if moved.0 > 0 {
                *measured = (measured.0.saturating_add(moved.0), measured.1.saturating_add(migration.took));
            }
            if moved.0 > 0 || left.0 > 0 {
                let noted = noted.entry(cgroup.clone()).or_default();
                (noted.moved_bytes, noted.left_bytes) = (noted.moved_bytes + moved.0, left.0);
                tracing::info!(%cgroup, nodes = %migration.nodes, %moved, %left, took = ?migration.took, "pages were moved");
            }
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use numaward_enforce::Migration;

    use super::*;
    use crate::core::execution::tests::ExecutionBench;
    use crate::reconciler::upkeep;

    #[test]
    fn forgets_migrations_without_settings() {
        let mut bench = ExecutionBench::new();
        bench.share("other");
        let paths = ["/other", "/gone"].map(|path| path.parse::<CgroupPath>().unwrap());
        let migration = Migration {
            nodes: "0".parse().unwrap(),
            before: [(numaward_topology::NodeId(1), Bytes::mib(1))].into(),
            after: [(numaward_topology::NodeId(1), Bytes::mib(1))].into(),
            took: Duration::from_secs(1),
        };
        let moving =
            paths.iter().map(|path| (path.clone(), MigrationState::Done(migration.clone()))).collect();
        bench.core.execution.migrations.add(moving);
        bench.core.execution.migrations.collect(&bench.core.metrics, &mut bench.core.effects);
        assert!(paths.iter().all(|path| bench.core.execution.migrations.pages_of(path).is_some()));
        upkeep::refresh(&mut bench.core);
        assert_eq!(
            paths.each_ref().map(|path| bench.core.execution.migrations.pages_of(path).is_some()),
            [true, false]
        );
    }
}

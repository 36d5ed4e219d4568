//! Pages that move to other nodes, and how far they got.

use std::{collections::BTreeMap, sync::mpsc, time::Duration};

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_enforce::{AppliedSettings, MigrationState};
use numaward_topology::Bytes;

use super::Core;

/// What is assumed of the rate at which pages move, until enough have been moved to know: half a gibibyte a second, which
/// base pages reach on machines of today.
const ASSUMED_RATE: Bytes = Bytes::mib(512);
/// As much has to be moved for the rate to be known.
const MIN_MEASURED: Bytes = Bytes::mib(16);

/// The migrations that go on, and what came of the others.
#[derive(Debug, Default)]
pub(super) struct Migrations {
    running: Vec<(CgroupPath, MigrationState)>,
    moved: BTreeMap<CgroupPath, api::MovedPages>,
    /// All that was moved so far, and the time that it took.
    measured: (u64, Duration),
}

impl Migrations {
    /// Whether pages of a cgroup are being moved.
    fn is_running(&self, cgroup: &CgroupPath) -> bool {
        self.running.iter().any(|(moving, _)| moving == cgroup)
    }

    /// How fast pages move.
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

    /// Forgets what was moved of cgroups that hold nothing any more.
    pub(super) fn retain_held(&mut self, applied: &AppliedSettings) {
        self.moved.retain(|cgroup, _| applied.get(cgroup).is_some());
    }

    /// What was moved of a cgroup, or still is.
    fn pages_of(&self, cgroup: &CgroupPath) -> Option<api::MovedPages> {
        let running = self.is_running(cgroup);
        let moved = self.moved.get(cgroup).copied();
        (running || moved.is_some()).then(|| api::MovedPages { running, ..moved.unwrap_or_default() })
    }
}

impl Core {
    /// Pages begin to move.
    pub(crate) fn migrations_begun(&mut self, moving: Vec<(CgroupPath, MigrationState)>) {
        self.execution.migrations.running.extend(moving);
    }

    /// What was moved of a cgroup, or still is.
    pub(crate) fn moved_of(&self, cgroup: &CgroupPath) -> Option<api::MovedPages> {
        self.execution.migrations.pages_of(cgroup)
    }

    /// Whether pages of a cgroup are being moved.
    pub(crate) fn is_moving(&self, cgroup: &CgroupPath) -> bool {
        self.execution.migrations.is_running(cgroup)
    }

    /// Takes note of migrations that are over.
    pub(super) fn collect_migrations(&mut self) {
        let (metrics, effects) = (&self.metrics, &mut self.effects);
        let Migrations { running, moved: noted, measured } = &mut self.execution.migrations;
        running.retain(|(cgroup, moving)| {
            let migration = match moving {
                MigrationState::Done(migration) => migration.clone(),
                MigrationState::Running(result) => match result.try_recv() {
                    Ok(Ok(migration)) => migration,
                    Ok(Err(error)) => {
                        tracing::error!(%cgroup, %error, "pages cannot be moved");
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
    use crate::core::execution::tests::Bench;

    #[test]
    fn nothing_is_left_of_migrations_of_cgroups_that_hold_nothing() {
        let mut bench = Bench::new();
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
        bench.core.migrations_begun(moving);
        bench.core.collect_migrations();
        assert!(paths.iter().all(|path| bench.core.moved_of(path).is_some()));
        bench.core.refresh();
        assert_eq!(paths.each_ref().map(|path| bench.core.moved_of(path).is_some()), [true, false]);
    }
}

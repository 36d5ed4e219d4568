//! Pages that move to other nodes, and how far they got.

use std::{collections::BTreeMap, sync::mpsc};

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_enforce::Moving;

use super::Core;

/// The migrations that go on, and what came of the others.
#[derive(Debug, Default)]
pub(super) struct Migrations {
    running: Vec<(CgroupPath, Moving)>,
    moved: BTreeMap<CgroupPath, api::Moved>,
}

impl Migrations {
    pub(crate) fn forget(&mut self, cgroup: &CgroupPath) {
        self.moved.remove(cgroup);
    }

    /// What was moved of a cgroup, or still is.
    fn of(&self, cgroup: &CgroupPath) -> Option<api::Moved> {
        let running = self.running.iter().any(|(moving, _)| moving == cgroup);
        let moved = self.moved.get(cgroup).copied();
        (running || moved.is_some()).then(|| api::Moved { running, ..moved.unwrap_or_default() })
    }
}

impl Core {
    /// Pages begin to move.
    pub(crate) fn migrations_begun(&mut self, moving: Vec<(CgroupPath, Moving)>) {
        self.execution.migrations.running.extend(moving);
    }

    /// What was moved of a cgroup, or still is.
    pub(crate) fn moved_of(&self, cgroup: &CgroupPath) -> Option<api::Moved> {
        self.execution.migrations.of(cgroup)
    }

    /// Takes note of migrations that are over.
    pub(super) fn note_moved(&mut self) {
        let (metrics, effects) = (&self.metrics, &mut self.effects);
        let Migrations { running, moved: noted } = &mut self.execution.migrations;
        running.retain(|(cgroup, moving)| {
            let migration = match moving {
                Moving::Done(migration) => migration.clone(),
                Moving::Running(result) => match result.try_recv() {
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
            if moved.0 > 0 || left.0 > 0 {
                let noted = noted.entry(cgroup.clone()).or_default();
                (noted.moved_bytes, noted.left_bytes) = (noted.moved_bytes + moved.0, left.0);
                tracing::info!(%cgroup, nodes = %migration.nodes, %moved, %left, took = ?migration.took, "pages were moved");
            }
            false
        });
    }
}

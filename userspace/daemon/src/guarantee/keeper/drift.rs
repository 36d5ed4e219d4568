//! Knobs that hold something else than was written: found, told and repaired.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::Owner;
use crate::{
    api,
    enforce::{CgroupPath, Drift, DriftKind, Verdict},
};

impl Owner {
    /// Writes knobs again that hold something else.
    pub(super) fn repair(&mut self, now: Instant) {
        let now = now.duration_since(self.start);
        let paths: Vec<CgroupPath> = self.state.book.iter().map(|(path, _)| path.clone()).collect();
        let mut all = Vec::new();
        for path in &paths {
            match self.enforcer.drift(&self.state.book, path) {
                Ok(drifts) => all.extend(drifts),
                Err(error) if error.is_gone() => {}
                Err(error) => tracing::warn!(cgroup = %path, %error, "cannot be checked for drift"),
            }
        }
        let mut seen: BTreeMap<CgroupPath, Vec<api::Drift>> = BTreeMap::new();
        for drift in all {
            let left = match drift.kind {
                DriftKind::Ineffective => false,
                DriftKind::Rewritten => self.repair_one(&drift, now),
            };
            seen.entry(drift.cgroup.clone()).or_default().push(api::Drift {
                cgroup: drift.cgroup.to_string(),
                knob: drift.knob.to_string(),
                wanted: drift.wanted.to_string(),
                found: drift.found.as_ref().map_or_else(String::new, ToString::to_string),
                left,
            });
        }
        let mut changed = false;
        for (name, guarantee) in &self.state.guarantees {
            let Some(watched) = self.watched.get_mut(name) else { continue };
            let drift = seen.remove(&guarantee.cgroup).unwrap_or_default();
            changed |= watched.drift != drift;
            watched.drift = drift;
        }
        if changed {
            self.publish();
        }
    }

    /// Repairs a knob if it is time; `true` if it is left to whoever else writes it.
    fn repair_one(&mut self, drift: &Drift, now: Duration) -> bool {
        match self.fights.drifted(&drift.cgroup, drift.knob, now) {
            Verdict::Repair => {
                self.figures.drifted(drift.knob);
                match self.enforcer.repair(&self.state.book, drift) {
                    Ok(report) => {
                        tracing::warn!(%drift, "drifted; written again");
                        self.figures.enforced(&report);
                        self.figures.repaired(drift.knob);
                        self.moving.extend(report.moving);
                    }
                    Err(error) => tracing::error!(%drift, %error, "drifted, and cannot be written again"),
                }
                false
            }
            Verdict::Wait(_) => false,
            Verdict::GiveUp => {
                tracing::error!(%drift, "somebody else keeps writing this knob: it is left to them");
                true
            }
            Verdict::GivenUp => true,
        }
    }
}

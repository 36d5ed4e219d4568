//! Those who look after what is held, in the order in which they learn of an event.

use std::{sync::Arc, time::Instant};

use tokio_util::sync::CancellationToken;

use super::{
    Event, affinities::Affinities, auto_placement::AutoPlacement, budgets::Budgets, burstable_home::Homes,
    caches::CacheClasses, declared::Declarations, drift::DriftController, guard::Guard,
    interrupts::Interrupts, liveness::Liveness, power::PowerSettings, restores::Restores,
    throttling::Throttling, weights::InterleaveWeights,
};
use crate::{core::Core, write_monitor::WriteMonitor};

/// One for each concern; none knows another.
pub(super) struct Controllers {
    pub(super) liveness: Liveness,
    pub(super) drift: DriftController,
    pub(super) restores: Restores,
    pub(super) affinities: Affinities,
    pub(super) throttling: Throttling,
    pub(super) homes: Homes,
    pub(super) auto_placement: AutoPlacement,
    pub(super) budgets: Budgets,
    pub(super) guard: Guard,
    pub(super) host: HostSettings,
    pub(super) caches: CacheClasses,
    pub(super) declarations: Declarations,
}

/// Those that set something of the host as a whole.
pub(super) struct HostSettings {
    pub(super) interrupts: Interrupts,
    pub(super) power: PowerSettings,
    pub(super) weights: InterleaveWeights,
}

impl HostSettings {
    fn new(core: &Core) -> Self {
        Self {
            interrupts: Interrupts::new(core.config.host_root.clone()),
            power: PowerSettings::new(&core.config.host_root),
            weights: InterleaveWeights::new(&core.config.host_root),
        }
    }

    pub(super) fn turn(&mut self, core: &mut Core, now: Instant) {
        self.interrupts.turn(core, now);
        self.power.turn(core, now);
        self.weights.turn(core, now);
    }
}

impl Controllers {
    pub(super) fn new(
        core: &Core,
        write_monitor: Option<Arc<WriteMonitor>>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            liveness: Liveness::new(core.hierarchy.clone()),
            drift: DriftController::new(write_monitor),
            restores: Restores::default(),
            affinities: Affinities::new(stop.clone()),
            throttling: Throttling::new(core.hierarchy.clone()),
            homes: Homes::new(core.config.enforcement.home_dwell_time.0),
            auto_placement: AutoPlacement::new(stop.clone()),
            caches: CacheClasses::new(stop.clone()),
            budgets: Budgets::new(stop.clone()),
            guard: Guard::new(stop),
            host: HostSettings::new(core),
            declarations: Declarations::new(&core.config.guarantees),
        }
    }

    /// Lets those handle an event whom it concerns.
    pub(super) fn handle(&mut self, core: &mut Core, event: &Event) {
        match *event {
            Event::Turn(now) => self.turn(core, now),
            Event::Written(now) => self.drift.look(core, now, false),
            Event::Machine(now) => {
                self.drift.look_at_all(core, now);
                self.auto_placement.is_outdated = true;
            }
            Event::Cgroups(events) => {
                self.liveness.question_removed(core, events);
                self.declarations.follow(core, events);
            }
            Event::Held(change) => {
                self.liveness.follow_held(core, change);
                self.drift.follow_held(change);
            }
            Event::Changed => {
                self.drift.follow(&core.store.state.applied);
                self.restores.follow(&core.store.state.applied);
                self.throttling.is_outdated = true;
                self.homes.is_outdated = true;
                self.auto_placement.is_outdated = true;
                self.budgets.is_outdated = true;
                self.caches.is_outdated = true;
            }
            Event::Gone(now) => self.liveness.release_gone(core, now, false),
            Event::Free => self.declarations.try_waiting(core),
        }
    }

    fn turn(&mut self, core: &mut Core, now: Instant) {
        self.liveness.release_gone(core, now, true);
        self.restores.turn(core, now);
        self.drift.look(core, now, true);
        self.throttling.look(core, now);
        self.homes.look(core, now);
        self.auto_placement.turn(core, now);
        self.budgets.turn(core, now);
        self.guard.turn(core, now);
        self.host.turn(core, now);
        self.caches.turn(core, now);
        self.affinities.turn(core);
    }
}

//! The controllers, in the order in which they handle an event.

use std::{sync::Arc, time::Instant};

use tokio_util::sync::CancellationToken;

use super::{
    Event, affinities::Affinities, auto_placement::AutoPlacement, budgets::Budgets,
    burstable_home::BurstableHomes, caches::CacheClasses, declared::Declarations, drift::DriftController,
    guard::Guard, interrupts::Interrupts, liveness::Liveness, power::PowerSettings, restores::Restores,
    throttling::Throttling, weights::InterleaveWeights,
};
use crate::{core::Core, write_monitor::WriteMonitor};

/// All controllers. They do not use each other.
pub(super) struct Controllers {
    pub(super) liveness: Liveness,
    pub(super) drift: DriftController,
    pub(super) restores: Restores,
    pub(super) affinities: Affinities,
    pub(super) throttling: Throttling,
    pub(super) homes: BurstableHomes,
    pub(super) auto_placement: AutoPlacement,
    pub(super) budgets: Budgets,
    pub(super) guard: Guard,
    pub(super) host: HostSettings,
    pub(super) caches: CacheClasses,
    pub(super) declarations: Declarations,
}

/// Controllers of host-wide settings.
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

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        self.interrupts.tick(core, now);
        self.power.tick(core, now);
        self.weights.tick(core, now);
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
            homes: BurstableHomes::new(core.config.enforcement.home_dwell_time.0),
            auto_placement: AutoPlacement::new(stop.clone()),
            caches: CacheClasses::new(stop.clone()),
            budgets: Budgets::new(stop.clone()),
            guard: Guard::new(stop),
            host: HostSettings::new(core),
            declarations: Declarations::new(&core.config.guarantees),
        }
    }

    /// Passes an event to the controllers that handle it.
    pub(super) fn handle(&mut self, core: &mut Core, event: &Event) {
        match *event {
            Event::Tick(now) => self.tick(core, now),
            Event::KnobsWritten(now) => self.drift.check(core, now, false),
            Event::MachineChanged(now) => {
                self.drift.check_all(core, now);
                self.auto_placement.is_outdated = true;
            }
            Event::Cgroups(events) => {
                self.liveness.question_removed(core, events);
                self.declarations.follow(core, events);
            }
            Event::SettingsChanged(change) => {
                self.liveness.follow_held(core, change);
                self.drift.follow_held(change);
            }
            Event::StateChanged => {
                self.drift.follow(&core.store.state.applied);
                self.restores.update(&core.store.state.applied);
                self.throttling.is_outdated = true;
                self.homes.is_outdated = true;
                self.auto_placement.is_outdated = true;
                self.budgets.is_outdated = true;
                self.caches.is_outdated = true;
            }
            Event::WorkloadsGone(now) => self.liveness.release_gone(core, now, false),
            Event::CapacityFreed => self.declarations.try_waiting(core),
        }
    }

    fn tick(&mut self, core: &mut Core, now: Instant) {
        self.liveness.release_gone(core, now, true);
        self.restores.tick(core, now);
        self.drift.check(core, now, true);
        self.throttling.sample(core, now);
        self.homes.look(core, now);
        self.auto_placement.turn(core, now);
        self.budgets.turn(core, now);
        self.guard.turn(core, now);
        self.host.tick(core, now);
        self.caches.turn(core, now);
        self.affinities.turn(core);
    }
}

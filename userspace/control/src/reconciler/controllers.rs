//! The controllers, in the order in which they handle an event.

use std::{sync::Arc, time::Instant};

use tokio_util::sync::CancellationToken;

use super::{
    Controller, ControllerEvent, affinities::Affinities, auto_placement::AutoPlacement, budgets::Budgets,
    burstable_home::BurstableHomes, caches::CacheClasses, declared::Declarations, drift::DriftController,
    guard::Guard, interrupts::Interrupts, liveness::Liveness, power::PowerSettings, restores::Restores,
    throttling::Throttling, upkeep::Upkeep, weights::InterleaveWeights,
};
use crate::{core::Core, write_monitor::WriteMonitor};

/// All controllers. They do not use each other.
pub(super) struct Controllers {
    pub(super) upkeep: Upkeep,
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

impl Controller for HostSettings {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        if let ControllerEvent::Tick(now) = *event {
            self.tick(core, now);
        }
    }
}

impl Controllers {
    pub(super) fn new(
        core: &Core,
        write_monitor: Option<Arc<WriteMonitor>>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            upkeep: Upkeep::new(Instant::now()),
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

    /// Returns the controllers in the order in which they handle an event.
    fn list(&mut self) -> [&mut dyn Controller; 13] {
        let Self {
            upkeep,
            liveness,
            restores,
            drift,
            throttling,
            homes,
            auto_placement,
            budgets,
            guard,
            host,
            caches,
            affinities,
            declarations,
        } = self;
        [
            upkeep,
            liveness,
            restores,
            drift,
            throttling,
            homes,
            auto_placement,
            budgets,
            guard,
            host,
            caches,
            affinities,
            declarations,
        ]
    }

    /// Passes an event to all controllers.
    pub(super) fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        for controller in self.list() {
            controller.handle(core, event);
        }
    }
}

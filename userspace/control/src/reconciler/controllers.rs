//! Those who look after what is held, in the order in which they learn of an event.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::{
    Event, budgets::Budgets, caches::CacheClasses, declared::Declarations, drift::DriftController,
    guard::Guard, home::Homes, homing::Homing, interrupts::Interrupts, liveness::Liveness,
    power::PowerSettings, throttling::Throttling,
};
use crate::{core::Core, write_monitor::WriteMonitor};

/// One for each concern; none knows another.
pub(super) struct Controllers {
    pub(super) liveness: Liveness,
    pub(super) drift: DriftController,
    pub(super) throttling: Throttling,
    pub(super) homes: Homes,
    pub(super) homing: Homing,
    pub(super) budgets: Budgets,
    pub(super) guard: Guard,
    pub(super) interrupts: Interrupts,
    pub(super) power: PowerSettings,
    pub(super) caches: CacheClasses,
    pub(super) declarations: Declarations,
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
            throttling: Throttling::new(core.hierarchy.clone()),
            homes: Homes::new(core.config.enforcement.home_dwell_time.0),
            homing: Homing::new(stop.clone()),
            caches: CacheClasses::new(stop.clone()),
            budgets: Budgets::new(stop),
            guard: Guard::default(),
            interrupts: Interrupts::new(core.config.host_root.clone()),
            power: PowerSettings::new(&core.config.host_root),
            declarations: Declarations::new(&core.config.guarantees),
        }
    }

    /// Lets all handle an event.
    pub(super) fn handle(&mut self, core: &mut Core, event: &Event) {
        self.liveness.handle(core, event);
        self.drift.handle(core, event);
        self.throttling.handle(core, event);
        self.homes.handle(core, event);
        self.homing.handle(core, event);
        self.budgets.handle(core, event);
        self.guard.handle(core, event);
        self.interrupts.handle(core, event);
        self.power.handle(core, event);
        self.caches.handle(core, event);
        self.declarations.handle(core, event);
    }
}

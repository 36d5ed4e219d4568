//! Containers for which the runtime stores CPUs and nodes from numaward.
//!
//! The guarantee of a container ends when the container does, and another workload may get its CPUs. The runtime still has them, and writes
//! them if it starts the same container again. Such a container looks pinned by another plugin, but numaward must place it again.

use std::{collections::BTreeMap, sync::Arc};

use numaward_model::Settings;
use parking_lot::Mutex;

/// Original settings by container id, until the runtime removes the container. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnPins(Arc<Mutex<BTreeMap<String, Settings>>>);

impl OwnPins {
    /// Returns the settings that a container would have without numaward; `None` if the container has no own pin.
    pub(super) fn original(&self, id: &str) -> Option<Settings> {
        self.0.lock().get(id).cloned()
    }

    pub(super) fn add(&self, id: String, original: Settings) {
        self.0.lock().insert(id, original);
    }

    pub(super) fn forget(&self, id: &str) {
        self.0.lock().remove(id);
    }

    /// Adds listed containers, with unknown original settings. If the list is complete, all other containers are
    /// removed.
    pub(super) fn compare(&self, ids: impl Iterator<Item = String>, is_complete: bool) {
        let mut known = self.0.lock();
        let mut listed: BTreeMap<_, _> =
            ids.map(|id| (id.clone(), known.remove(&id).unwrap_or_default())).collect();
        if !is_complete {
            listed.append(&mut known);
        }
        *known = listed;
    }
}

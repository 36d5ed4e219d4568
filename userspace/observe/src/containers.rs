//! The names of pods' containers, which their cgroups do not say.
//!
//! They are reported by whoever knows them: the container runtime when it creates them, else the API server, else what the kubelet
//! promises and to whom ([`crate::ForeignPromises`]). A container that was seen before is served under its name from then on;
//! what was counted before stays under the old one. A name is forgotten when its container is.

use std::{collections::HashMap, sync::Arc};

use numaward_cgroup::Container;

/// Names by the runtime's ids of the containers.
#[derive(Debug, Default)]
pub(crate) struct Names(pub(crate) HashMap<String, Arc<str>>);

impl Names {
    pub(crate) fn get(&self, container: &Container) -> Option<&Arc<str>> {
        self.0.get(&container.id)
    }
}

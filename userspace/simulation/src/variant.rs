//! Variants of strategies that are compared in replays.

use std::fmt;

use numaward_topology::Machine;

use super::{
    replay::{Replay, replay},
    trace::Trace,
};
use numaward_engine::{
    kubelet::KubeletStrategy,
    native::{NativeOptions, NativeStrategy},
    policy::{PolicyConfig, StartError, Tiers},
    request::Request,
    strategy::Strategy,
};

/// A strategy with the options that affect admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// The strategy `kubelet`.
    Kubelet,
    /// The strategy `native`.
    Native {
        /// Use of memory-only nodes.
        tiers: Tiers,
    },
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kubelet => f.write_str("kubelet"),
            Self::Native { tiers } => write!(f, "native, {tiers}"),
        }
    }
}

impl Variant {
    /// Replays a trace on a machine. Fails if the strategy refuses the machine or the configuration.
    pub fn replay(
        self,
        trace: &Trace,
        (machine, requests): (&Machine, &[Request]),
        config: &PolicyConfig,
    ) -> Result<Replay, StartError> {
        self.with(machine, config, |strategy| replay(trace, (machine, requests), strategy))
    }

    /// Calls `work` with the strategy. Fails if the strategy refuses the machine or the configuration.
    pub(super) fn with<T>(
        self,
        machine: &Machine,
        config: &PolicyConfig,
        work: impl FnOnce(&dyn Strategy) -> T,
    ) -> Result<T, StartError> {
        match self {
            Self::Kubelet => Ok(work(&KubeletStrategy::new(machine, config)?)),
            Self::Native { tiers } => {
                let options = NativeOptions { tiers, ..NativeOptions::default() };
                Ok(work(&NativeStrategy::new(machine, config, &options)?))
            }
        }
    }
}

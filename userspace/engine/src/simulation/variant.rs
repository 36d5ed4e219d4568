//! A strategy as it is replayed.

use std::fmt;

use numaward_topology::Machine;

use super::{
    replay::{MakeRoom, Moves, Replay, replay},
    trace::Trace,
};
use crate::{
    kubelet::KubeletStrategy,
    moves::RebalanceLimits,
    native::{NativeOptions, NativeStrategy},
    policy::{PolicyConfig, StartError, Tiers},
    request::Request,
    strategy::Strategy,
    terms::Terms,
};

/// A strategy, with what makes a difference to what it admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// What the kubelet does.
    Kubelet,
    /// The strategy `native`.
    Native {
        /// How memory-only nodes count.
        tiers: Tiers,
        /// So many containers are moved for a request, at most.
        moves: usize,
    },
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kubelet => f.write_str("kubelet"),
            Self::Native { tiers, moves: 0 } => write!(f, "native, {tiers}"),
            Self::Native { tiers, moves } => write!(f, "native, {tiers}, {moves} moves"),
        }
    }
}

impl Variant {
    /// Replays a trace on a machine, or says why the strategy does not start there.
    pub fn replay(
        self,
        trace: &Trace,
        (machine, requests): (&Machine, &[Request]),
        config: &PolicyConfig,
    ) -> Result<Replay, StartError> {
        self.with(machine, config, |strategy, make_room| {
            replay(trace, (machine, requests), strategy, make_room)
        })
    }

    /// Does something with the strategy and its moves, or says why the strategy does not start.
    pub(super) fn with<T>(
        self,
        machine: &Machine,
        config: &PolicyConfig,
        work: impl FnOnce(&dyn Strategy, &MakeRoom<'_>) -> T,
    ) -> Result<T, StartError> {
        match self {
            Self::Kubelet => Ok(work(&KubeletStrategy::new(machine, config)?, &|_, _| None)),
            Self::Native { tiers, moves } => {
                let options = NativeOptions { tiers, ..NativeOptions::default() };
                let native = NativeStrategy::new(machine, config, &options)?;
                let limits = RebalanceLimits { moves, ..RebalanceLimits::default() };
                Ok(work(&native, &|ledger, request| {
                    let plan = native.plan(ledger, request, &Terms::default(), &limits)?;
                    let moves = Moves { plans: 1, moves: plan.moves.len() as u64, bytes: plan.bytes };
                    Some((plan.decision.ledger, moves))
                }))
            }
        }
    }
}

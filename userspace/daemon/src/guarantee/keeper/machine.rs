//! A machine that changes while it runs: memory, CPUs and nodes that come and go.

use std::{sync::Arc, time::Instant};

use super::{Owner, idle, policy};

impl Owner {
    /// A machine that changed is charged anew with what is promised.
    pub(super) fn follow_machine(&mut self, now: Instant) {
        let machine = self.listener.machine();
        if Arc::ptr_eq(&machine, &self.machine) {
            return;
        }
        self.machine = machine;
        let strategy = policy::strategy(&self.config, &self.machine);
        let rebased = strategy.and_then(|strategy| {
            let idle = idle(&strategy).map_err(|problem| vec![problem])?;
            Ok((strategy, idle))
        });
        match rebased {
            Ok((strategy, idle)) => {
                self.strategy = strategy;
                let before = self.state.ledger.clone();
                self.state.ledger.rebase(&idle);
                if self.state.ledger != before {
                    tracing::info!("the machine changed: the accounts of its nodes are made anew");
                    self.publish();
                }
            }
            Err(problems) => {
                for problem in problems {
                    tracing::error!(%problem, "the machine changed, and the policy does not fit it any more");
                }
            }
        }
        self.patrol_all(now);
    }
}

//! Inspection of a workload's processes on request: code that accesses other nodes, and memory by region of the
//! address space and by node.

use std::{path::PathBuf, time::Instant};

use numaward_api as api;
use numaward_cgroup::{CgroupId, owner_of};
use numaward_probes::{CallChain, Mode, Probe, SlotId};

use crate::{
    naming::OTHER,
    observer::Observer,
    regions::{self, IntendedNodes},
    stacks::{self, ChainSet},
    table::{Member, Table},
};

/// Reason why a workload cannot be inspected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InspectError {
    UnknownWorkload,
    /// The name is `other`, which stands for everything outside of workloads.
    OtherWorkloads,
    /// Call chains are not sampled, for this reason.
    ChainsOff(String),
}

type Members = Vec<(CgroupId, Member<SlotId>)>;

fn members_of(table: &Table<SlotId>, name: &str) -> Result<Members, InspectError> {
    let none = || if name == OTHER { InspectError::OtherWorkloads } else { InspectError::UnknownWorkload };
    let (_, series) = table.series().find(|(found, _)| &***found == name).ok_or_else(none)?;
    Ok(series.members.iter().map(|(id, member)| (*id, member.clone())).collect())
}

impl Observer {
    /// Returns the owner of the first cgroup of a name ([`owner_of`]).
    pub fn owner(&self, name: &str) -> Result<String, InspectError> {
        let members = members_of(&self.registry.lock().table, name)?;
        let first = members.first().zip(self.dirs(&members).next());
        Ok(first.map(|((_, member), dir)| owner_of(&member.path, &dir)).unwrap_or_default())
    }

    /// Returns the call chains of the workloads of a name. Reads maps of the probes and files of the workload.
    pub fn stacks(&self, name: &str) -> Result<api::Stacks, InspectError> {
        let settings = &self.config.observe.call_chains;
        if !settings.enabled {
            members_of(&self.registry.lock().table, name)?;
            let reason =
                "call chains are not taken: set observe.callChains.enabled to true and restart the daemon";
            return Err(InspectError::ChainsOff(reason.to_owned()));
        }
        let (members, chains, lost, kernel) = {
            let mut probing = self.registry.probing();
            // Slots are only reassigned under both locks.
            let members = members_of(&self.registry.lock().table, name)?;
            let reports = probing.probes.reports().iter();
            let chain_probes =
                reports.filter(|of| matches!(of.probe, Probe::AllocChains | Probe::AccessChains));
            let (absent, attached): (Vec<_>, Vec<_>) = chain_probes.partition(|of| of.mode == Mode::Absent);
            if attached.is_empty() {
                let reasons: Vec<_> = absent.iter().filter_map(|of| of.reason.clone()).collect();
                return Err(InspectError::ChainsOff(format!(
                    "call chains cannot be taken: {}",
                    reasons.join("; ")
                )));
            }
            let slots = members.iter().filter_map(|(_, member)| member.slot);
            let chains = slots.filter_map(|slot| {
                let chains = probing.probes.call_chains(slot);
                chains.inspect_err(|error| tracing::warn!(%error, "call chains cannot be read")).ok()
            });
            let chains: Vec<CallChain> = chains.flatten().collect();
            (
                members,
                chains,
                probing.probes.lost_chains().unwrap_or_default(),
                probing.kernel_symbols.clone(),
            )
        };
        let found = ChainSet { chains, lost, dirs: self.dirs(&members).collect() };
        let proc = self.config.host_root.join("proc");
        let deadline = Instant::now() + stacks::RESOLVE_TIMEOUT;
        let named = stacks::resolve(found, &proc, kernel.as_deref(), self.page_size.0, deadline);
        Ok(api::Stacks { sample_every: settings.sample_every, ..named })
    }

    /// Returns the memory of the workloads of a name by purpose and node. The kernel walks the page tables of their
    /// processes for this.
    pub fn regions(&self, name: &str) -> Result<api::Regions, InspectError> {
        let (members, guarantees) = {
            let state = self.registry.lock();
            (members_of(&state.table, name)?, state.guarantees.clone())
        };
        let proc = self.config.host_root.join("proc");
        let belongs = |(id, member): &(CgroupId, Member<SlotId>)| {
            let home = || guarantees.homes.get(&member.path).copied().map(IntendedNodes::Preferred);
            guarantees.nodes_of(*id).cloned().map(IntendedNodes::Guaranteed).or_else(home)
        };
        let dirs = self.dirs(&members).zip(members.iter().map(belongs));
        Ok(regions::read(&proc, dirs, Instant::now() + regions::READ_TIMEOUT))
    }

    /// Returns the cgroup directories of workloads.
    fn dirs(&self, members: &Members) -> impl Iterator<Item = PathBuf> {
        let hierarchy = self.registry.lock().hierarchy.clone();
        let dirs: Vec<PathBuf> =
            hierarchy.iter().flat_map(|of| members.iter().map(|(_, member)| of.dir(&member.path))).collect();
        dirs.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_is_not_an_unknown_workload() {
        let why = |name: &str| members_of(&Table::default(), name).unwrap_err();
        assert_eq!(why("other"), InspectError::OtherWorkloads);
        assert_eq!(why("others"), InspectError::UnknownWorkload);
    }
}

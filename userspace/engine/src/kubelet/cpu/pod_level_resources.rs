//! CPUs of pods with pod-level resources, and their division among the containers.
//!
//! A container with equal requests and limits gets its own CPUs. The other containers share the rest. An init
//! container that is not a sidecar draws from all CPUs that no earlier sidecar owns.

use numaward_topology::CpuSet;

use super::{Affinity, StaticCpuManager};
use crate::{
    decision::Cause,
    hint::Provider,
    kubelet::pod_level_resources::{self, EmptyShare},
    ledger::Ledger,
    qos::QosClass,
    quantity::Quantity,
    request::{ContainerName, OwnerId, Request},
};

impl StaticCpuManager {
    /// Returns the number of pod-level CPUs; `None` if the request has no pod-level resources.
    pub(super) fn exclusive_cpus_of_pod(request: &Request) -> Option<usize> {
        let of_pod = request.resources.as_ref()?;
        if request.qos() != QosClass::Guaranteed {
            return Some(0);
        }
        let cpus = of_pod.requests.cpu.and_then(Quantity::whole_cpus).unwrap_or(0);
        Some(usize::try_from(cpus).unwrap_or(usize::MAX))
    }

    /// Checks that the containers without CPUs of their own get some.
    pub(super) fn check_shared_part(request: &Request) -> Result<(), Cause> {
        let Some(whole) = Self::exclusive_cpus_of_pod(request) else { return Ok(()) };
        let own = |container: &_| Self::exclusive_cpus(request, container) as u64;
        let words = match pod_level_resources::find_empty_share(request, whole as u64, own, |container| {
            own(container) == 0
        }) {
            None => return Ok(()),
            Some(EmptyShare::InitContainer) => {
                "pod rejected, pod has shared init containers but no cpus available for them"
            }
            Some(EmptyShare::AppContainer) => {
                "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for \
                 shared containers"
            }
        };
        Err(Cause::NothingToShare(Provider::Cpus, words.to_owned()))
    }

    /// Allocates CPUs for a pod and divides them among its containers.
    pub(super) fn divide(
        &self,
        ledger: &mut Ledger,
        request: &Request,
        affinity: Affinity,
    ) -> Result<(), Cause> {
        let needed = Self::exclusive_cpus_of_owner(request);
        if needed == 0 {
            return Ok(());
        }
        Self::check_shared_part(request)?;
        self.check_cores(ledger, needed)?;
        let whole = self.choose(&self.available(ledger), needed, affinity)?;
        let mut parts: Vec<(&ContainerName, Option<CpuSet>)> = Vec::new();
        let mut left = whole.clone();
        let mut free_reserved = self.free_reserved(ledger);
        ledger.notes.note_taken(&whole, &(&self.available(ledger) | &free_reserved));
        free_reserved = &free_reserved - &whole;
        let mut take = |left: &CpuSet, own: usize| -> Result<CpuSet, Cause> {
            let part = self.take(left, own)?;
            ledger.notes.note_taken(&part, &(left | &free_reserved));
            free_reserved = &free_reserved - &part;
            Ok(part)
        };
        for init in &request.init_containers {
            let part = match Self::exclusive_cpus(request, init) {
                0 if init.restartable => None,
                0 => Some(left.clone()),
                own => Some(take(&left, own)?),
            };
            if let Some(part) = part.as_ref().filter(|_| init.restartable) {
                left = &left - part;
            }
            parts.push((&init.name, part));
        }
        for container in &request.containers {
            let part = match Self::exclusive_cpus(request, container) {
                0 => None,
                own => Some(take(&left, own)?),
            };
            if let Some(part) = &part {
                left = &left - part;
            }
            parts.push((&container.name, part));
        }
        let owner = &request.owner;
        ledger.shared_pool = &ledger.shared_pool - &whole;
        ledger.owner_mut(owner).pod_level.cpus = Some(whole);
        for (name, part) in parts {
            ledger.allocation_mut(owner, name).cpus = Some(part.unwrap_or_else(|| left.clone()));
        }
        Ok(())
    }
}

/// Returns whether the containers of an owner have parts of pod-level CPUs.
pub(super) fn is_part(ledger: &Ledger, owner: &OwnerId) -> bool {
    ledger.owner(owner).is_some_and(|account| account.pod_level.cpus.is_some())
}

/// Releases the CPUs of an owner once its last container has released its part.
pub(super) fn release(ledger: &mut Ledger, owner: &OwnerId, container: &ContainerName) {
    let account = ledger.owner_mut(owner);
    if account.containers.values().all(|held| held.cpus.is_none())
        && let Some(whole) = account.pod_level.cpus.take()
    {
        ledger.shared_pool =
            &ledger.shared_pool | &(&whole - &ledger.cpus_of_other_containers(owner, container));
    }
    ledger.drop_empty(owner, Some(container));
}

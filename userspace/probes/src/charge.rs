//! Counts pages outside the guaranteed nodes where the kernel charges them: see `ebpf/src/charge.rs`.

use std::{fs, path::Path, sync::Arc, time::Instant};

use aya::maps::{Array, MapData};
use numaward_abi::{ChargeOwner, MAX_NODES, OTHER_SLOT, Slot};
use numaward_topology::NodeSet;
use rustix::param::page_size;

use crate::{
    CgroupId, Counters, MapAccessError, Mode, NodeCounters, Obstacle, Pages, Probe, ProbeEvent, ProbeOptions,
    ProbeReport,
    btf::charge::{ChargeHook, ChargeLayout},
    error::ProbeError,
    event,
    event_gate::{self, EventGate},
    family::{Family, Hook, report},
    kernel::{KernelInfo, is_confidential},
    maps::set,
    nodes::{NodeNumbering, count_cpus},
    objects::CHARGE,
    rows::{MISSES, MissCounters, MissLayout},
    self_check,
};

const CHARGE_PROGRAM: &str = "charge_fexit";
const SWAPIN_PROGRAM: &str = "charge_swapin_fexit";

/// The attached programs and their maps.
pub(crate) struct ChargeProbe {
    pub(crate) family: Family,
    slots: Array<MapData, Slot>,
    /// The misses of slots with a guarantee.
    misses: EventGate,
    pub(crate) counters: Arc<MissCounters>,
}

impl ChargeProbe {
    /// Attaches the programs to the first function that the kernel accepts. Returns the probe, and its report; no report if
    /// the probe is disabled.
    pub(crate) fn load(
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
    ) -> (Option<Self>, Option<ProbeReport>) {
        if !options.secondary.contains(&Probe::Charge) || options.alloc_modes.is_empty() {
            return (None, None);
        }
        let absent = |reasons: &[_]| (None, Some(report(Probe::Charge, Mode::Absent, reasons)));
        if options.duty_cycle.is_some() {
            let text = "switched off by the duty cycle".to_owned();
            return absent(&[(Obstacle::SwitchedOff, text)]);
        }
        if !options.charges_memory {
            let text = "the hierarchy of cgroup v2 does not have the controller memory".to_owned();
            return absent(&[(Obstacle::Unsupported, text)]);
        }
        let layout = match kernel.get(|structures| &structures.charge) {
            Ok(layout) => layout,
            Err(refusal) => return absent(&[(refusal.obstacle(), refusal.to_string())]),
        };
        let mut reasons = Vec::new();
        for hook in &layout.hooks {
            match Self::attach(options, kernel, &layout, hook) {
                // The functions are equivalent: another one is no worse mode.
                Ok((probe, self_check)) => {
                    log::debug!("misses are counted at the function {}", hook.function);
                    let report = report(Probe::Charge, Mode::Fexit, &[]);
                    return (Some(probe), Some(ProbeReport { self_check, ..report }));
                }
                Err(refusal) => {
                    reasons.push((refusal.obstacle(), format!("{}: {refusal}", hook.function)));
                }
            }
        }
        absent(&reasons)
    }

    fn attach(
        options: &ProbeOptions<'_>,
        kernel: &KernelInfo<'_>,
        layout: &ChargeLayout,
        hook: &ChargeHook,
    ) -> Result<(Self, Option<crate::SelfCheck>), ProbeError> {
        let object = CHARGE.map_err(ProbeError::NotBuilt)?;
        let is_read = matches!(hook.owner, ChargeOwner::MemoryCgroup | ChargeOwner::ObjectCgroup);
        if is_read && is_confidential() {
            return Err(ProbeError::Confidential);
        }
        let (path, parent) = kernel.ancestors()?;
        let node_shift = kernel.get(|structures| &structures.node_shift)?;
        let numbering = NodeNumbering::new(options.machine, options.fakes.cpu_node);
        let nodes = numbering.capacity();
        let slots = options.slots.saturating_add(1);
        let cpus = count_cpus(options.machine).map_err(ProbeError::Cpus)?;
        let rows = MissLayout::new(slots, nodes, cpus).ok_or(ProbeError::TooManySlots { slots, nodes })?;
        let settings = kernel
            .slot_path()?
            .charge_settings(path, parent)
            .global("NODES", nodes)
            .global("NODE_SHIFT", options.fakes.node_shift.unwrap_or(node_shift))
            .global("CHARGE_OWNER", hook.owner as u32)
            .global("MEMCG_DATA", hook.memcg_data)
            .global("OBJCG_MEMCG", layout.objcg_memcg)
            .global("MEMCG", layout.memcg)
            .global("HEAD_BIT", layout.head_bit)
            .global("FOLIO_PAGES", hook.folio_pages)
            .global("COMPOUND_PAGES", hugepage_pages(Path::new("/")))
            .global("CHARGED_BEFORE", hook.charged_before)
            .global("HUGETLB", layout.hugetlb)
            .global("SHARDS", [rows.shards, rows.rows])
            .entries("SLOTS", slots)
            .entries(event_gate::MAP, slots)
            .entries("EVENTS", options.fakes.ring_bytes.unwrap_or(event_gate::EVENTS_BYTES))
            .entries(MISSES, rows.entries());
        let mut family = Family::load(kernel, "charge", object, options.slots, settings)?;
        family.set_nodes(&numbering.table(options.machine))?;
        let mut probe = Self {
            slots: family.take("SLOTS")?,
            misses: EventGate::new(&mut family, "EVENTS")?,
            counters: Arc::new(MissCounters { map: family.take_data(MISSES)?, layout: rows }),
            family,
        };
        // During the check, all pages are outside.
        probe.write_mask(OTHER_SLOT, if options.self_check { [0; _] } else { [u64::MAX; _] })?;
        let mut programs = vec![(CHARGE_PROGRAM, Hook::Fexit(hook.function))];
        programs.extend(hook.swapin.map(|swapin| (SWAPIN_PROGRAM, Hook::Fexit(swapin))));
        probe.family.attach(Probe::Charge, &programs, kernel.btf())?;
        let mut self_check = None;
        if options.self_check {
            let touched = self_check::touch(numbering.ids(), options.machine);
            let mut counted = vec![0; nodes as usize];
            probe.counters.add_to(OTHER_SLOT * nodes, &mut counted)?;
            let by_node =
                numbering.ids().iter().zip(counted).map(|(&node, pages)| {
                    (node, Counters { user_local: Pages(pages), ..Counters::default() })
                });
            let by_node: NodeCounters = by_node.collect();
            self_check = Some(self_check::compare(numbering.ids(), touched, &by_node)?);
            probe.write_mask(OTHER_SLOT, [u64::MAX; _])?;
        }
        Ok((probe, self_check))
    }

    fn write_mask(&mut self, slot: u32, allowed: [u64; MAX_NODES / 64]) -> Result<(), MapAccessError> {
        set(&mut self.slots, "SLOTS", slot, &Slot { allowed, counts_misses: 1 })
    }

    /// Sets the nodes that are guaranteed to the holder of a slot; `None` if it has no guarantee, or if its pages are not
    /// charged to it.
    pub(crate) fn set_allowed(
        &mut self,
        slot: u32,
        allowed: Option<&NodeSet>,
        numbering: &NodeNumbering,
    ) -> Result<(), MapAccessError> {
        self.write_mask(slot, numbering.allowed_mask(allowed))?;
        if allowed.is_some() { self.misses.watch(slot) } else { self.misses.forget(slot) }
    }

    /// Ends the counts of a cgroup.
    pub(crate) fn remove_root(&mut self, cgroup: CgroupId, slot: u32) -> Result<(), MapAccessError> {
        self.family.remove_root(cgroup)?;
        self.misses.forget(slot)
    }

    /// Returns the events since the last call, as `AllocProbe::events`.
    pub(crate) fn events(
        &mut self,
        now: Instant,
        numbering: &NodeNumbering,
    ) -> Result<Vec<ProbeEvent>, MapAccessError> {
        self.misses.events(now, |bytes| event::miss(bytes, numbering.ids()))
    }
}

/// Returns the number of pages of a transparent hugepage, which are the only compound pages that kernels without folios charge.
/// `root` is `/` in production.
fn hugepage_pages(root: &Path) -> u32 {
    let size = fs::read_to_string(root.join("sys/kernel/mm/transparent_hugepage/hpage_pmd_size"));
    let bytes = size.ok().and_then(|size| size.trim().parse::<usize>().ok());
    // Without the file, the kernel has none.
    bytes.map_or(1, |bytes| u32::try_from(bytes / page_size()).unwrap_or(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hugepages_have_size_of_kernel() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(hugepage_pages(root.path()), 1);
        let folder = root.path().join("sys/kernel/mm/transparent_hugepage");
        fs::create_dir_all(&folder).unwrap();
        for (size, expected) in [("2097152\n", 2 << 20), ("x", page_size()), ("0\n", page_size())] {
            fs::write(folder.join("hpage_pmd_size"), size).unwrap();
            assert_eq!(hugepage_pages(root.path()) as usize, expected / page_size());
        }
    }
}

//! Options for loading the probes.

use std::time::Duration;

use numaward_topology::{Machine, NodeId};

use crate::{
    duty::DutyCycle,
    pmu,
    report::{Mode, Probe},
};

/// The default of [`ProbeOptions::slots`].
pub const DEFAULT_SLOTS: u32 = 512;

/// The default of [`ProbeOptions::long_stall`]: a delay that users of a service notice.
const DEFAULT_LONG_STALL: Duration = Duration::from_millis(100);

/// The parameters of [`Probes::load`](crate::Probes::load).
#[derive(Clone, Debug)]
pub struct ProbeOptions<'a> {
    pub machine: &'a Machine,
    /// The maximum number of registered workloads.
    pub slots: u32,
    /// The modes in which the allocation probe may be attached, best first. A mode in which this kernel loses events
    /// (see [`ProbeStats::events_lost`](crate::ProbeStats::events_lost)) is used only if no later one is available.
    pub alloc_modes: &'a [Mode],
    /// The part of the time for which the allocation probe is attached; `None` for all of it. Its counts are then
    /// estimates: see [`Probes::apply_duty_cycle`](crate::Probes::apply_duty_cycle). Only [`Mode::TpBtf`] supports it.
    pub duty_cycle: Option<DutyCycle>,
    /// The secondary probes that are attached.
    pub secondary: Vec<Probe>,
    /// True if the kernel charges pages to cgroups v2: their hierarchy has the controller `memory`.
    pub charges_memory: bool,
    /// The options for call chains; `None` if they are not taken.
    pub call_chains: Option<ChainOptions>,
    /// The duration from which a stall is reported as [`Incident::LongStall`](crate::Incident::LongStall).
    pub long_stall: Duration,
    /// Compares the counts with known allocations at the start.
    pub self_check: bool,
    /// Makes the probes write debug messages, which [`Probes::flush_log`](crate::Probes::flush_log) reads.
    pub debug_log: bool,
    /// Overrides for tests.
    pub fakes: TestOverrides,
}

/// Options for call chains of remote allocations and accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainOptions {
    /// The number of remote pages for which one chain is taken.
    pub sample_every: u32,
    /// The maximum number of chains.
    pub max_stacks: u32,
}

/// Overrides for tests on hosts with one node.
#[derive(Clone, Copy, Debug, Default)]
pub struct TestOverrides {
    /// The memory node of every CPU.
    pub cpu_node: Option<NodeId>,
    /// The shift of the node id in `page->flags`.
    pub node_shift: Option<u32>,
    /// The events that replace accesses to DRAM.
    pub dram_events: Option<pmu::DramEvents>,
    /// The size of the ring buffer of misses in bytes, so that a test can fill it.
    pub ring_bytes: Option<u32>,
}

impl<'a> ProbeOptions<'a> {
    /// Returns the options of a daemon on `machine`.
    pub fn new(machine: &'a Machine) -> Self {
        Self {
            machine,
            slots: DEFAULT_SLOTS,
            alloc_modes: &[Mode::TpBtf, Mode::Tracepoint],
            duty_cycle: None,
            // The processor has few counters, which other programs may need.
            secondary: Probe::SECONDARY.into_iter().filter(|probe| *probe != Probe::Hardware).collect(),
            charges_memory: true,
            call_chains: None,
            long_stall: DEFAULT_LONG_STALL,
            self_check: true,
            debug_log: false,
            fakes: TestOverrides::default(),
        }
    }
}

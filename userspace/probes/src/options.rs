//! What the probes are loaded with.

use std::time::Duration;

use numaward_topology::{Machine, NodeId};

use crate::{
    duty::DutyCycle,
    pmu,
    report::{Mode, Probe},
};

/// Slots where [`ProbeOptions::slots`] is not set otherwise.
pub const DEFAULT_SLOTS: u32 = 512;

/// The default of [`ProbeOptions::long_stall`]: users of a service notice it.
const DEFAULT_LONG_STALL: Duration = Duration::from_millis(100);

/// What [`Probes::load`](crate::Probes::load) needs to know.
#[derive(Clone, Debug)]
pub struct ProbeOptions<'a> {
    /// The machine that the probes run on.
    pub machine: &'a Machine,
    /// Workloads that can be registered at the same time.
    pub slots: u32,
    /// The ways to attach the allocation probe, best first. One in which this kernel loses events (see
    /// [`ProbeStats::events_lost`](crate::ProbeStats::events_lost)) is taken only where no later one is available.
    pub alloc_modes: &'a [Mode],
    /// For which part of the time the allocation probe is attached; `None` for all of it. What it counts is then an
    /// estimate: see [`Probes::apply_duty_cycle`](crate::Probes::apply_duty_cycle). It holds for [`Mode::TpBtf`] only.
    pub duty_cycle: Option<DutyCycle>,
    /// The probes other than that of allocations which are to be attached.
    pub secondary: Vec<Probe>,
    /// How call chains are taken; `None` where they are not.
    pub call_chains: Option<ChainOptions>,
    /// From when on a stall is reported as [`ProbeEvent::LongStall`](crate::ProbeEvent::LongStall).
    pub long_stall: Duration,
    /// Whether to compare the counts with known allocations at the start.
    pub self_check: bool,
    /// Whether the probes write debug messages; they are read by [`Probes::flush_log`](crate::Probes::flush_log).
    pub debug_log: bool,
    /// For tests.
    pub fakes: TestOverrides,
}

/// How call chains of remote allocations and accesses are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainOptions {
    /// For how many remote pages one chain is taken.
    pub sample_every: u32,
    /// How many chains there may be.
    pub max_stacks: u32,
}

/// Untruths for tests on hosts with one node.
#[derive(Clone, Copy, Debug, Default)]
pub struct TestOverrides {
    /// Every CPU is taken to be of this node.
    pub cpu_node: Option<NodeId>,
    /// Where the node id is taken to begin in `page->flags`.
    pub node_shift: Option<u32>,
    /// What is counted for accesses to DRAM.
    pub dram_events: Option<pmu::DramEvents>,
    /// Bytes of the ring buffer of misses, so that it overflows soon.
    pub ring_bytes: Option<u32>,
}

impl<'a> ProbeOptions<'a> {
    /// The options of a daemon on `machine`.
    pub fn new(machine: &'a Machine) -> Self {
        Self {
            machine,
            slots: DEFAULT_SLOTS,
            alloc_modes: &[Mode::TpBtf, Mode::Tracepoint],
            duty_cycle: None,
            // The processor's counters are few, and others may want them.
            secondary: Probe::SECONDARY.into_iter().filter(|probe| *probe != Probe::Hardware).collect(),
            call_chains: None,
            long_stall: DEFAULT_LONG_STALL,
            self_check: true,
            debug_log: false,
            fakes: TestOverrides::default(),
        }
    }
}

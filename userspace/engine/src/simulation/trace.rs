//! Traces of pods that arrive, live and leave.
//!
//! Time is a number of ticks. A pod that is rejected is tried once more a while later; rejected again, it is dropped.

use numaward_topology::Machine;
use serde::Deserialize;

use super::format::{ConfigVector, MachineVector, PodVector};
use crate::{policy::PolicyConfig, request::Request};

/// A trace.
#[derive(Clone, Debug, Deserialize)]
pub struct Trace {
    /// Machine, policy, scope, options, load.
    pub name: String,
    /// The load that was intended, in parts of what the machine has.
    #[serde(default)]
    pub load: f64,
    /// Ticks between a rejection and the only retry.
    pub retry_after: u64,
    /// The machine.
    pub machine: MachineVector,
    /// The kubelet's configuration.
    pub config: ConfigVector,
    /// The pods in the order in which they arrive.
    pub pods: Vec<TracePod>,
    /// The kubelet's outcomes.
    pub kubelet: Option<RecordedOutcome>,
    /// The admissions of a machine without nodes.
    pub totals_only: Option<Sums>,
}

/// A pod of a trace.
#[derive(Clone, Debug, Deserialize)]
pub struct TracePod {
    /// The tick at which it arrives.
    pub at: u64,
    /// Its lifetime in ticks.
    pub life: u64,
    /// True if it counts.
    #[serde(default)]
    pub guaranteed: bool,
    /// Its requests.
    pub pod: PodVector,
    /// Its use while it lives.
    #[serde(default)]
    pub held: PodUsage,
}

/// The use of a pod while it lives.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct PodUsage {
    /// CPUs, in thousandths.
    #[serde(default)]
    pub cpu_milli: u64,
    /// Base memory, in MiB.
    #[serde(default)]
    pub memory_mib: u64,
    /// Hugepages by size, in MiB.
    #[serde(default)]
    pub hugepages_mib: Vec<u64>,
}

/// The outcome of a trace.
#[derive(Clone, Debug, Deserialize)]
pub struct RecordedOutcome {
    /// The sums.
    #[serde(flatten)]
    pub sums: Sums,
    /// A letter a pod: `A` admitted at the first try, `R` on retry, `X` dropped.
    pub outcome: String,
}

/// Sums over the Guaranteed pods of a trace. Time is in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Sums {
    /// Pods.
    pub guaranteed: u64,
    /// Pods admitted at the first try.
    pub admitted_first_try: u64,
    /// Pods admitted on retry.
    pub admitted_on_retry: u64,
    /// Pods dropped.
    pub dropped: u64,
    /// Thousandths of CPUs times ticks, of those admitted.
    pub cpu_milli_ticks: u64,
    /// MiB of base memory times ticks, of those admitted.
    pub memory_mib_ticks: u64,
    /// MiB of hugepages times ticks, of those admitted.
    pub hugepages_mib_ticks: u64,
}

impl Sums {
    /// Pods admitted.
    pub const fn admitted(&self) -> u64 {
        self.admitted_first_try + self.admitted_on_retry
    }

    /// Counts a pod, if it is Guaranteed, by the letter of what became of it.
    pub(super) fn count(&mut self, pod: &TracePod, letter: char) {
        if !pod.guaranteed {
            return;
        }
        self.guaranteed += 1;
        match letter {
            'A' => self.admitted_first_try += 1,
            'R' => self.admitted_on_retry += 1,
            _ => {
                self.dropped += 1;
                return;
            }
        }
        let hugepages = pod.held.hugepages_mib.iter().fold(0u64, |sum, mib| sum.saturating_add(*mib));
        for (sum, held) in [
            (&mut self.cpu_milli_ticks, pod.held.cpu_milli),
            (&mut self.memory_mib_ticks, pod.held.memory_mib),
            (&mut self.hugepages_mib_ticks, hugepages),
        ] {
            *sum = sum.saturating_add(held.saturating_mul(pod.life));
        }
    }

    /// Adds another sum.
    pub const fn add(&mut self, other: &Self) {
        self.guaranteed += other.guaranteed;
        self.admitted_first_try += other.admitted_first_try;
        self.admitted_on_retry += other.admitted_on_retry;
        self.dropped += other.dropped;
        self.cpu_milli_ticks = self.cpu_milli_ticks.saturating_add(other.cpu_milli_ticks);
        self.memory_mib_ticks = self.memory_mib_ticks.saturating_add(other.memory_mib_ticks);
        self.hugepages_mib_ticks = self.hugepages_mib_ticks.saturating_add(other.hugepages_mib_ticks);
    }
}

impl Trace {
    /// The machine, the configuration and the requests, or what is wrong with them.
    pub fn parts(&self) -> Result<(Machine, PolicyConfig, Vec<Request>), String> {
        let machine = self.machine.machine()?;
        let config = self.config.config()?.map_err(|(_, unknown)| unknown.to_string())?;
        let requests = self.pods.iter().map(|pod| pod.pod.request()).collect::<Result<_, _>>()?;
        Ok((machine, config, requests))
    }

    /// The sums if each letter of an outcome is what became of the pod at its place. `O` counts as offered: it is
    /// admitted in any case.
    pub fn sums(&self, outcome: &str) -> Sums {
        let mut sums = Sums::default();
        for (pod, letter) in self.pods.iter().zip(outcome.chars()) {
            sums.count(pod, letter);
        }
        sums
    }

    /// The sums if all are admitted.
    pub fn offered(&self) -> Sums {
        self.sums(&"A".repeat(self.pods.len()))
    }
}

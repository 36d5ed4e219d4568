//! Traces: recorded or generated sequences of pods with their arrival times and lifetimes.
//!
//! Time is counted in ticks. A rejected pod is tried once more after [`Trace::retry_after`] ticks, and dropped if it is rejected
//! again.

use numaward_topology::Machine;
use serde::Deserialize;

use super::format::{ConfigVector, MachineVector, PodVector};
use numaward_engine::{policy::PolicyConfig, request::Request};

#[derive(Clone, Debug, Deserialize)]
pub struct Trace {
    /// Name, composed of the machine, the policy, the scope, the options and the load.
    pub name: String,
    /// Intended load as a fraction of the machine's capacity.
    #[serde(default)]
    pub load: f64,
    /// Ticks between a rejection and the only retry.
    pub retry_after: u64,
    pub machine: MachineVector,
    /// The kubelet's configuration.
    pub config: ConfigVector,
    /// Pods in the order of their arrival.
    pub pods: Vec<TracePod>,
    /// Recorded outcome of the kubelet.
    pub kubelet: Option<RecordedOutcome>,
    /// Sums for the case that only total amounts count, without NUMA nodes.
    pub totals_only: Option<Sums>,
}

/// A pod of a trace.
#[derive(Clone, Debug, Deserialize)]
pub struct TracePod {
    /// Tick of the arrival.
    pub at: u64,
    /// Lifetime in ticks.
    pub life: u64,
    /// True for a Guaranteed pod. Only such pods are counted in [`Sums`].
    #[serde(default)]
    pub guaranteed: bool,
    pub pod: PodVector,
    /// Resources that the pod uses during its lifetime.
    #[serde(default)]
    pub held: PodUsage,
}

/// Resources that a pod uses during its lifetime.
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

/// Recorded outcome of a trace.
#[derive(Clone, Debug, Deserialize)]
pub struct RecordedOutcome {
    #[serde(flatten)]
    pub sums: Sums,
    /// One letter per pod: `A` admitted at the first try, `R` on retry, `X` dropped.
    pub outcome: String,
}

/// Sums over the Guaranteed pods of a trace. Time is in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Sums {
    /// Number of pods.
    pub guaranteed: u64,
    /// Pods admitted at the first try.
    pub admitted_first_try: u64,
    /// Pods admitted on retry.
    pub admitted_on_retry: u64,
    /// Pods dropped.
    pub dropped: u64,
    /// CPU time of the admitted pods: thousandths of CPUs times ticks.
    pub cpu_milli_ticks: u64,
    /// Base memory of the admitted pods: MiB times ticks.
    pub memory_mib_ticks: u64,
    /// Hugepages of the admitted pods: MiB times ticks.
    pub hugepages_mib_ticks: u64,
}

impl Sums {
    /// Returns the number of admitted pods.
    pub const fn admitted(&self) -> u64 {
        self.admitted_first_try + self.admitted_on_retry
    }

    /// Adds a pod with the letter of its outcome. Pods that are not Guaranteed are ignored.
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
    /// Converts the trace to a machine, a configuration and requests. The error names the invalid part.
    pub fn parts(&self) -> Result<(Machine, PolicyConfig, Vec<Request>), String> {
        let machine = self.machine.machine()?;
        let config = self.config.config()?.map_err(|(_, unknown)| unknown.to_string())?;
        let requests = self.pods.iter().map(|pod| pod.pod.request()).collect::<Result<_, _>>()?;
        Ok((machine, config, requests))
    }

    /// Returns the sums for an outcome, which has one letter per pod as in [`RecordedOutcome::outcome`].
    pub fn sums(&self, outcome: &str) -> Sums {
        let mut sums = Sums::default();
        for (pod, letter) in self.pods.iter().zip(outcome.chars()) {
            sums.count(pod, letter);
        }
        sums
    }

    /// Returns the sums for the case that all pods are admitted at the first try.
    pub fn offered(&self) -> Sums {
        self.sums(&"A".repeat(self.pods.len()))
    }
}

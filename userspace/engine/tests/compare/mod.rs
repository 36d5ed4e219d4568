//! Comparison of both strategies with the same traces.
//!
//! The strategy `kubelet` must repeat the recorded outcomes. `native` is replayed in two variants: memory-only nodes
//! as separate or attached nodes. It must violate no invariant and, for each policy and load, admit at least as much
//! memory time as the kubelet.

use std::fmt;

use numaward_engine::{
    PolicyConfig,
    policy::{Tiers, TopologyManagerPolicy},
};
use numaward_simulation::{
    trace::{Sums, Trace},
    variant::Variant,
};

use self::table::Table;

mod table;

const TITLES: [&str; 4] = ["kubelet", "strict", "attached", "totals only"];

/// Results of many traces.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    table: Table,
    failures: Vec<String>,
    /// Number of traces.
    pub(crate) traces: u64,
}

impl Comparison {
    pub(crate) fn new() -> Self {
        Self { table: Table::new(&TITLES), failures: Vec::new(), traces: 0 }
    }

    /// Returns the violated conditions.
    pub(crate) fn failures(&self) -> Vec<String> {
        let mut failures = self.failures.clone();
        for ((policy, load), row) in &self.table.rows {
            let (Some(policy), Some(load)) = (policy, load) else { continue };
            let Some((kubelet, others)) = row.columns.split_first() else { continue };
            for (title, of) in TITLES[1..TITLES.len() - 1].iter().zip(others) {
                if of.memory_mib_ticks < kubelet.memory_mib_ticks {
                    failures.push(format!(
                        "{policy}, load {load} %: {title}: less memory time than the kubelet ({} of {} MiB ticks)",
                        of.memory_mib_ticks, kubelet.memory_mib_ticks
                    ));
                }
            }
        }
        failures
    }

    /// Replays a trace with all variants.
    pub(crate) fn add(&mut self, trace: &Trace) {
        self.traces += 1;
        if let Err(error) = self.try_add(trace) {
            self.failures.push(format!("{}: {error}", trace.name));
        }
    }

    fn try_add(&mut self, trace: &Trace) -> Result<(), String> {
        let (machine, config, requests) = trace.parts()?;
        let policy = config.topology_manager_policy;
        let replay = |variant: Variant| {
            variant.replay(trace, (&machine, &requests), &config).map_err(|error| error.to_string())
        };
        let got = replay(Variant::Kubelet)?;
        if let Some(recorded) = &trace.kubelet {
            let differs = trace.pods.iter().zip(recorded.outcome.chars()).zip(got.outcome.chars());
            let mut differs = differs.filter(|((pod, recorded), got)| pod.guaranteed && recorded != got);
            if let Some(((pod, recorded), got)) = differs.next() {
                let name = &pod.pod.name;
                self.failures
                    .push(format!("{}: kubelet: {name}: recorded {recorded}, got {got}", trace.name));
            }
            if recorded.sums != got.sums {
                let (recorded, got) = (recorded.sums, got.sums);
                self.failures
                    .push(format!("{}: kubelet: recorded sums {recorded:?}, got {got:?}", trace.name));
            }
            // Both sums could omit the same pod.
            let guaranteed = trace.pods.iter().filter(|pod| pod.guaranteed).count();
            if usize::try_from(recorded.sums.guaranteed) != Ok(guaranteed) {
                self.failures.push(format!(
                    "{}: kubelet: {} Guaranteed pods recorded, the trace has {guaranteed}",
                    trace.name, recorded.sums.guaranteed
                ));
            }
        }
        let mut columns = vec![got.sums];
        for (title, tiers) in [(TITLES[1], Tiers::Strict), (TITLES[2], Tiers::Attached)] {
            let got = replay(Variant::Native { tiers })?;
            self.failures.extend(got.faults.iter().map(|fault| format!("{}: {title}: {fault}", trace.name)));
            if let Some(totals) = &trace.totals_only {
                self.check_best_effort(&config, trace, title, &got.sums, totals);
            }
            columns.push(got.sums);
        }
        columns.push(trace.totals_only.unwrap_or_default());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a load is a small number"
        )]
        let load = (trace.load * 100.0).round() as u64;
        self.table.add(policy.as_str(), load, &trace.offered(), &columns);
        Ok(())
    }

    /// Checks that nodes never cause a refusal with `best-effort`.
    fn check_best_effort(
        &mut self,
        config: &PolicyConfig,
        trace: &Trace,
        title: &str,
        got: &Sums,
        totals: &Sums,
    ) {
        let indifferent = [TopologyManagerPolicy::None, TopologyManagerPolicy::BestEffort];
        let admitted = |sums: &Sums| (sums.admitted_first_try, sums.admitted_on_retry, sums.memory_mib_ticks);
        if indifferent.contains(&config.topology_manager_policy) && admitted(got) != admitted(totals) {
            self.failures
                .push(format!("{}: {title}: not the admissions of a machine without nodes", trace.name));
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.table.text())?;
        let failures = self.failures();
        for failure in &failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(f, "{} traces, {} failures", self.traces, failures.len())
    }
}

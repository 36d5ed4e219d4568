//! `numaward trial`: compares a benchmark with and without a guarantee of a workload.
//!
//! # Algorithm
//! A round runs the benchmark once without the guarantee and once with it. The order changes with each round, so that a drift of the host
//! affects both arms alike. Memory that a guarantee has moved stays where it is after a release: a command before each run, which restarts
//! the workload, makes the runs independent. Without one, all runs but the first have the memory as the guarantee left it. The differences of the rounds are evaluated by Wilcoxon's signed-rank statistic: the estimate is the median of
//! their pairwise means (Hodges and Lehmann), and the interval has the order statistics of these means that correspond to 95 %. This assumes
//! only that the differences are independent and distributed symmetrically.
//!
//! # Invariants
//! The workload has no guarantee before the trial, and none after it: also if the benchmark fails, and after a signal.

use std::{ffi::OsString, process::Stdio, time::Duration};

use anyhow::{Context as _, bail};
use numaward_api::{self as api, Workloads};
use serde::Serialize;
use serde_with_macros::skip_serializing_none;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
    time::{Instant, sleep},
};

use crate::{
    client::{ClientError, Server},
    exit_signals::ExitSignals,
    table::{row, size, table},
};

/// Maximum number of bytes of the benchmark's output that are searched for its figure: the last ones.
const MAX_OUTPUT: usize = 1 << 20;

/// Benchmark of a trial.
#[derive(Debug)]
pub(crate) struct Benchmark {
    pub(crate) command: Vec<OsString>,
    /// Text in the output before the figure; without it, the figure is the time in seconds.
    pub(crate) after: Option<String>,
    pub(crate) rounds: u16,
    /// Shell command before each run.
    pub(crate) prepare: Option<String>,
    /// Pause before each run.
    pub(crate) settle: Duration,
}

/// Result of a trial.
#[skip_serializing_none]
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Trial {
    workload: String,
    /// The figure: seconds, or the text before it.
    figure: String,
    rounds: usize,
    with_guarantee: Arm,
    without_guarantee: Arm,
    /// With the guarantee minus without.
    difference: Difference,
}

/// Runs of the benchmark with or without the guarantee.
#[skip_serializing_none]
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Arm {
    figures: Vec<f64>,
    median: f64,
    /// Memory that the workload allocated.
    local_bytes: u64,
    remote_bytes: u64,
    /// Memory outside the guaranteed nodes; absent without the guarantee.
    missed_bytes: Option<u64>,
}

/// Difference of two arms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Difference {
    estimate: f64,
    /// The 95 % interval.
    low: f64,
    high: f64,
}

impl Difference {
    /// Returns true if the interval does not contain zero.
    fn is_significant(self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

/// Returns the decision about the guarantee of the trial. The workload of the request must have none.
pub(crate) async fn dry_run(
    server: &Server,
    request: &api::AllocationRequest,
) -> anyhow::Result<api::DryRun> {
    let held = server.allocations().await?;
    if let Some(held) =
        held.allocations.iter().find(|held| held.name == request.name || held.target == request.target)
    {
        let hint = match &held.declared {
            Some(declared) => format!("remove the declaration of {declared} first"),
            None => "release it first".to_owned(),
        };
        bail!("{} has a guarantee: {hint}", held.name);
    }
    Ok(server.dry_run(request).await?)
}

/// Runs a trial. The workload of the request must have no guarantee.
pub(crate) async fn run(
    server: &Server,
    request: &api::AllocationRequest,
    benchmark: &Benchmark,
) -> anyhow::Result<Trial> {
    let mut exit_signals = ExitSignals::new()?;
    let outcome = tokio::select! {
        outcome = run_rounds(server, request, benchmark) => outcome,
        () = exit_signals.next() => Err(anyhow::anyhow!("interrupted")),
    };
    // A guarantee that was being admitted when a signal came is released by the daemon, because its client is gone.
    match server.release(&request.name).await {
        Ok(()) => {}
        Err(ClientError::Refused(refusal)) if refusal.status == 404 => {}
        Err(error) => {
            let failed = outcome.err().map_or_else(String::new, |error| format!("{error:#}; "));
            let name = &request.name;
            bail!(
                "{failed}the guarantee of {name} could not be released: {error}; run `numaward release {name}`"
            );
        }
    }
    outcome
}

async fn run_rounds(
    server: &Server,
    request: &api::AllocationRequest,
    benchmark: &Benchmark,
) -> anyhow::Result<Trial> {
    let (mut with, mut without) = (Arm::default(), Arm::default());
    let mut cgroup = None;
    let mut unit = None;
    for round in 0..benchmark.rounds {
        let guaranteed_first = round % 2 == 1;
        for is_guaranteed in [guaranteed_first, !guaranteed_first] {
            // The second arm of a round and the first arm of the next one are the same.
            let has_guarantee = with.figures.len() + without.figures.len() > 0
                && is_guaranteed_now(server, &request.name).await?;
            match (is_guaranteed, has_guarantee) {
                (true, false) => cgroup = Some(server.admit(request).await?.cgroup),
                (false, true) => server.release(&request.name).await?,
                _ => {}
            }
            if let Some(prepare) = &benchmark.prepare {
                let mut shell = Command::new("sh");
                shell.args(["-c", prepare]).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
                let status = shell.status().await.context("sh cannot be started")?;
                if !status.success() {
                    bail!("round {}: the command before each run, {prepare:?}, failed: {status}", round + 1);
                }
            }
            sleep(benchmark.settle).await;
            let before = counters(server, &request.target, cgroup.as_deref()).await?;
            let figure = run_benchmark(benchmark).await.with_context(|| format!("round {}", round + 1))?;
            let after = counters(server, &request.target, cgroup.as_deref()).await?;
            let first_unit = unit.get_or_insert_with(|| figure.unit.clone());
            if *first_unit != figure.unit {
                let now = &figure.unit;
                bail!(
                    "the unit of the figure changes from {first_unit:?} to {now:?}: use an output with a fixed unit"
                );
            }
            let arm = if is_guaranteed { &mut with } else { &mut without };
            arm.add(figure.value, before, after);
            eprintln!(
                "round {} of {}, {} the guarantee: {}{}",
                round + 1,
                benchmark.rounds,
                if is_guaranteed { "with" } else { "without" },
                figure.value,
                figure.unit
            );
        }
    }
    without.missed_bytes = None;
    let differences: Vec<f64> =
        with.figures.iter().zip(&without.figures).map(|(with, without)| with - without).collect();
    let difference = signed_rank_interval(&differences).context("too few rounds")?;
    with.median = median(&with.figures).unwrap_or_default();
    without.median = median(&without.figures).unwrap_or_default();
    Ok(Trial {
        workload: request.name.clone(),
        figure: benchmark.after.clone().unwrap_or_else(|| "seconds".to_owned()),
        rounds: differences.len(),
        with_guarantee: with,
        without_guarantee: without,
        difference,
    })
}

async fn is_guaranteed_now(server: &Server, name: &str) -> Result<bool, ClientError> {
    Ok(server.allocations().await?.allocations.iter().any(|held| held.name == name))
}

/// Counters of the workload so far: local, remote and missed bytes. Its cgroup is not known before the first guarantee.
async fn counters(
    server: &Server,
    target: &api::Target,
    cgroup: Option<&str>,
) -> Result<[u64; 3], ClientError> {
    let Workloads { workloads } = server.get("/api/v1/workloads").await?;
    let found = workloads.iter().find(|workload| match (&workload.cgroup, cgroup) {
        (Some(of), Some(cgroup)) => of == cgroup,
        (Some(of), None) => is_of(target, of),
        (None, _) => false,
    });
    let nodes = found.into_iter().flat_map(|workload| &workload.nodes);
    Ok(nodes.fold([0; 3], |[local, remote, missed]: [u64; 3], node| {
        let allocated = node.allocated.unwrap_or_default();
        [
            local.saturating_add(allocated.local_bytes),
            remote.saturating_add(allocated.remote_bytes),
            missed.saturating_add(node.missed_bytes.unwrap_or(0)),
        ]
    }))
}

/// Returns true if the cgroup is that of the target.
fn is_of(target: &api::Target, cgroup: &str) -> bool {
    match target {
        api::Target::Cgroup(path) => path.trim_matches('/') == cgroup.trim_matches('/'),
        api::Target::Unit(unit) => cgroup.rsplit('/').next() == Some(unit),
        api::Target::Exec | api::Target::Container(_) => false,
    }
}

impl Arm {
    fn add(&mut self, figure: f64, before: [u64; 3], after: [u64; 3]) {
        let [local, remote, missed]: [u64; 3] =
            std::array::from_fn(|index| after[index].saturating_sub(before[index]));
        self.figures.push(figure);
        self.local_bytes = self.local_bytes.saturating_add(local);
        self.remote_bytes = self.remote_bytes.saturating_add(remote);
        self.missed_bytes = Some(self.missed_bytes.unwrap_or(0).saturating_add(missed));
    }

    fn remote_share(&self) -> String {
        let whole = self.local_bytes.saturating_add(self.remote_bytes);
        if whole == 0 {
            return "-".to_owned();
        }
        let permille = u128::from(self.remote_bytes) * 1000 / u128::from(whole);
        format!("{}.{} %", permille / 10, permille % 10)
    }
}

/// A figure of the benchmark.
#[derive(Debug, PartialEq)]
struct Figure {
    value: f64,
    /// Text that follows the number without a space.
    unit: String,
}

/// Runs the benchmark once and returns its figure.
async fn run_benchmark(benchmark: &Benchmark) -> anyhow::Result<Figure> {
    let (program, arguments) = benchmark.command.split_first().context("no command")?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    command.stdout(if benchmark.after.is_some() { Stdio::piped() } else { Stdio::null() });
    let start = Instant::now();
    let mut child = command.spawn().with_context(|| format!("{} cannot be started", program.display()))?;
    let output = match child.stdout.take() {
        Some(stdout) => read_end(stdout).await?,
        None => Vec::new(),
    };
    let status = child.wait().await?;
    let elapsed = start.elapsed();
    if !status.success() {
        bail!("{} failed: {status}", program.display());
    }
    match &benchmark.after {
        None => Ok(Figure { value: elapsed.as_secs_f64(), unit: String::new() }),
        Some(text) => figure_after(&String::from_utf8_lossy(&output), text)
            .with_context(|| format!("the output has no plain number, such as 1234.5, after {text:?}")),
    }
}

/// Reads an output to its end, and returns the last bytes.
async fn read_end(mut output: impl AsyncRead + Unpin) -> std::io::Result<Vec<u8>> {
    let mut end = Vec::new();
    let mut chunk = vec![0; 64 << 10];
    loop {
        let read = output.read(&mut chunk).await?;
        if read == 0 {
            return Ok(end);
        }
        end.extend_from_slice(chunk.get(..read).unwrap_or_default());
        if end.len() > 2 * MAX_OUTPUT {
            end.drain(..end.len() - MAX_OUTPUT);
        }
    }
}

/// Returns the number that follows the last occurrence of a text, unless it has separators of thousands.
fn figure_after(output: &str, text: &str) -> Option<Figure> {
    let (_, rest) = output.rsplit_once(text)?;
    let rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ':' || c == '=');
    let end = rest.find(|c: char| !(c.is_ascii_digit() || "+-.eE".contains(c))).unwrap_or(rest.len());
    let (digits, behind) = rest.split_at_checked(end)?;
    let unit: String = behind.chars().take_while(|c| !c.is_whitespace()).take(16).collect();
    if unit.strip_prefix([',', '\'', '_']).is_some_and(|more| more.starts_with(|c: char| c.is_ascii_digit()))
    {
        return None;
    }
    let value = digits.parse().ok().filter(|figure: &f64| figure.is_finite())?;
    Some(Figure { value, unit: unit.trim_end_matches([',', ';', '.', ')']).to_owned() })
}

fn median(figures: &[f64]) -> Option<f64> {
    let mut figures = figures.to_vec();
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    let upper = *figures.get(middle)?;
    Some(if figures.len() % 2 == 1 { upper } else { f64::midpoint(*figures.get(middle - 1)?, upper) })
}

/// Returns the estimate of Hodges and Lehmann, and the 95 % interval of Wilcoxon's signed ranks; `None` with fewer than six
/// differences.
fn signed_rank_interval(differences: &[f64]) -> Option<Difference> {
    let mut means = Vec::new();
    for (index, first) in differences.iter().enumerate() {
        means.extend(differences.iter().skip(index).map(|second| f64::midpoint(*first, *second)));
    }
    means.sort_by(f64::total_cmp);
    let outside = means_outside(differences.len());
    if outside == 0 {
        return None;
    }
    Some(Difference {
        estimate: median(&means)?,
        low: *means.get(outside - 1)?,
        high: *means.get(means.len().checked_sub(outside)?)?,
    })
}

/// Returns the largest number `c` for which the statistic of so many signed ranks is less than `c` with a probability of at most 2.5 %.
fn means_outside(count: usize) -> usize {
    // Probability of each sum of ranks, if the signs are random.
    let mut probabilities = vec![1.0_f64];
    for rank in 1..=count {
        let mut next = vec![0.0; probabilities.len() + rank];
        for (sum, probability) in probabilities.iter().enumerate() {
            next[sum] += probability / 2.0;
            next[sum + rank] += probability / 2.0;
        }
        probabilities = next;
    }
    let mut below = 0.0;
    probabilities
        .iter()
        .take_while(|probability| {
            below += **probability;
            below <= 0.025
        })
        .count()
}

/// Renders a trial for people.
pub(crate) fn render(trial: &Trial) -> String {
    let Trial { workload, figure, rounds, with_guarantee, without_guarantee, difference } = trial;
    let arm = |name: &str, arm: &Arm| {
        let missed = arm.missed_bytes.map_or_else(|| "-".to_owned(), size);
        row([name, &number(arm.median), &arm.remote_share(), &missed])
    };
    let rows = [arm("with", with_guarantee), arm("without", without_guarantee)];
    let Difference { estimate, low, high } = *difference;
    let share = |figure: f64| {
        let percent = figure / without_guarantee.median.abs() * 100.0;
        if percent.is_finite() { format!(" ({percent:+.1} %)") } else { String::new() }
    };
    let verdict = if difference.is_significant() {
        format!("the guarantee changes it by {}{}", number(estimate), share(estimate))
    } else {
        "no difference is shown: the interval contains 0".to_owned()
    };
    format!(
        "{}\n{workload}, {figure}, {rounds} rounds: {verdict}\n95 % interval: {}{} to {}{}, by signed ranks of the rounds\n",
        table(["GUARANTEE", "MEDIAN", "REMOTE", "MISSED"], rows),
        number(low),
        share(low),
        number(high),
        share(high)
    )
}

/// Formats a figure with four significant digits.
fn number(figure: f64) -> String {
    let digits = if figure == 0.0 { 0.0 } else { figure.abs().log10().floor() };
    let decimals = (3.0 - digits).clamp(0.0, 9.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is between 0 and 9")]
    let decimals = decimals as usize;
    format!("{figure:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_has_the_order_statistics_of_the_tables() {
        // The critical values of the signed-rank test at 5 %, two-sided, plus one.
        for (count, outside) in [(5, 0), (6, 1), (7, 3), (8, 4), (10, 9), (12, 14), (20, 53), (100, 1956)] {
            assert_eq!(means_outside(count), outside, "{count}");
        }
        assert_eq!(signed_rank_interval(&[1.0; 5]), None);
        let found = signed_rank_interval(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!(found, Difference { estimate: 3.5, low: 1.0, high: 6.0 });
        assert!(found.is_significant());
        let around = signed_rank_interval(&[-2.0, 1.0, -1.0, 2.0, 0.5, -0.5]).unwrap();
        assert!(!around.is_significant() && around.estimate.abs() < 1e-9, "{around:?}");
    }

    #[test]
    fn finds_the_figure_in_the_output() {
        let output = "tps = 12.5 (including)\nlatency average: 3.25 ms\ntps = 1.5e3 (excluding)\nnone\n";
        let of = |value, unit: &str| Some(Figure { value, unit: unit.to_owned() });
        assert_eq!(figure_after(output, "tps"), of(1500.0, ""));
        assert_eq!(figure_after(output, "latency average"), of(3.25, ""));
        assert_eq!(figure_after(output, "none"), None);
        assert_eq!(figure_after(output, "missing"), None);
        assert_eq!(figure_after("x: -4", "x"), of(-4.0, ""));
        assert_eq!(figure_after("IOPS=1.2k, BW=3MiB/s", "IOPS"), of(1.2, "k"));
        assert_eq!(figure_after("took 12.5s.", "took"), of(12.5, "s"));
        assert_eq!(figure_after("Throughput: 1,234.5", "Throughput"), None);
        assert_eq!(figure_after("x: 1e999", "x"), None);
    }

    #[test]
    fn says_if_there_is_no_difference() {
        let arm = |median, missed_bytes| Arm {
            figures: Vec::new(),
            median,
            local_bytes: 3 << 20,
            remote_bytes: 1 << 20,
            missed_bytes,
        };
        let mut trial = Trial {
            workload: "db.service".to_owned(),
            figure: "tps".to_owned(),
            rounds: 10,
            with_guarantee: arm(1200.0, Some(0)),
            without_guarantee: arm(1000.0, None),
            difference: Difference { estimate: 190.0, low: 120.0, high: 260.4 },
        };
        assert_eq!(
            render(&trial),
            "GUARANTEE  MEDIAN  REMOTE  MISSED\nwith       1200    25.0 %  0 B\nwithout    1000    25.0 %  -\n\n\
             db.service, tps, 10 rounds: the guarantee changes it by 190.0 (+19.0 %)\n\
             95 % interval: 120.0 (+12.0 %) to 260.4 (+26.0 %), by signed ranks of the rounds\n"
        );
        trial.difference.low = -3.0;
        assert!(
            render(&trial).contains("no difference is shown: the interval contains 0"),
            "{}",
            render(&trial)
        );
    }
}

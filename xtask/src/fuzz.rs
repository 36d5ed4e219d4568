//! `cargo xtask fuzz`: runs the targets of `fuzz/` on inputs from libFuzzer.
//!
//! libFuzzer searches for inputs that take branches which no input has taken before, so all crates of this workspace
//! are built with counters of branches (`fuzz/rustc.sh`). Their dependencies are built as usual. It starts from the
//! inputs in `fuzz/corpus/TARGET`, which are kept small, and stores new ones in `target/fuzz`.
//!
//! The unit tests of `fuzz` run the inputs in `fuzz/corpus` only. Each run here prints its seed. `--seed` repeats a run
//! of the stage `fuzz`: it starts from the same inputs and derives the same ones, unless the time limit of a target
//! ends it earlier.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

use crate::setup::{self, Part};
use crate::{build, command};

const PACKAGE: &str = "numaward-fuzz";
/// Limits of each target in the stage: a number of runs, and an amount of time.
const RUNS_OF_TEST: u64 = 100_000;
const TIME_OF_TEST: Duration = Duration::from_secs(6);
/// Limits of the time for one input, and of the memory of the process.
const INPUT_LIMITS: [&str; 2] = ["-timeout=10", "-rss_limit_mb=1024"];
/// Number of last lines of a failed target's output that are printed.
const TAIL_LINES: usize = 60;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these targets [default: all, one after the other]
    targets: Vec<String>,
    /// Duration of each target: 30s, 10m, 8h [default: 1m, without --runs]
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    time: Option<Duration>,
    /// Number of inputs of each target
    #[arg(long)]
    runs: Option<u64>,
    /// Repeats a run of the stage `fuzz` with this seed: starts from the inputs in the checkout only [default: a new
    /// seed, and also the inputs that earlier runs have stored]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    seed: Option<u32>,
    /// Runs one target on the input in this file alone, such as a finding
    #[arg(long, value_name = "FILE", conflicts_with_all = ["time", "runs", "seed"])]
    input: Option<PathBuf>,
}

fn time(text: &str) -> Result<Duration> {
    let unit = text.trim_start_matches(|char: char| char.is_ascii_digit());
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => bail!("{text:?} is not a time: expected 30s, 10m or 8h"),
    };
    let count: u32 =
        text.trim_end_matches(unit).parse().with_context(|| format!("{text:?} is not a time"))?;
    Ok(Duration::from_secs(u64::from(count) * seconds))
}

/// Amount of fuzzing.
struct Effort {
    runs: Option<u64>,
    time: Option<Duration>,
    /// Seed, which is not 0: libFuzzer takes 0 for no seed.
    seed: u32,
    /// If true, starts also from the inputs of earlier runs, and stores new ones.
    uses_kept: bool,
}

pub(crate) fn main(arguments: &Arguments) -> Result<ExitCode> {
    let all = targets()?;
    for target in &arguments.targets {
        ensure!(all.contains(target), "there is no target {target:?}, but {}", all.join(", "));
    }
    let chosen = if arguments.targets.is_empty() { &all } else { &arguments.targets };
    let program = built()?;
    if let Some(input) = &arguments.input {
        let [target] = &arguments.targets[..] else { bail!("--input needs the one target that it is for") };
        let scratch = scratch()?;
        command::run(run(&program, target, scratch.path()).arg(input))?;
        return Ok(ExitCode::SUCCESS);
    }
    let effort = match (arguments.runs, arguments.time, arguments.seed) {
        (None, None, Some(seed)) => Effort::of_stage(seed),
        (runs, time, seed) => {
            let is_unbounded = runs.is_none() && time.is_none();
            let time = if is_unbounded { Some(Duration::from_mins(1)) } else { time };
            Effort { runs, time, seed: seed.unwrap_or_else(command::new_seed), uses_kept: seed.is_none() }
        }
    };
    fuzz(&program, chosen, &effort)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the stage of `cargo xtask test`.
pub(crate) fn test(seed: u32) -> Result<()> {
    fuzz(&built()?, &targets()?, &Effort::of_stage(seed))
}

impl Effort {
    fn of_stage(seed: u32) -> Self {
        Self { runs: Some(RUNS_OF_TEST), time: Some(TIME_OF_TEST), seed, uses_kept: false }
    }
}

/// Returns the names of the folders with inputs. A test of the targets checks that each has one.
fn targets() -> Result<Vec<String>> {
    let corpus = corpus();
    let entries = fs::read_dir(&corpus).with_context(|| format!("cannot read {}", corpus.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn corpus() -> PathBuf {
    command::root().join("fuzz/corpus")
}

fn built() -> Result<PathBuf> {
    setup::ensure(&[Part::Cpp])?;
    let mut cargo = command::cargo();
    cargo
        .args(["build", "--package", PACKAGE, "--features", "libfuzzer", "--bin", PACKAGE])
        .env("RUSTC_WORKSPACE_WRAPPER", command::root().join("fuzz/rustc.sh"))
        // No probe is attached.
        .env("NUMAWARD_EBPF", "skip")
        // The counters of an incremental build cannot be compared with those of the next build.
        .env("CARGO_INCREMENTAL", "0");
    command::run(&mut cargo)?;
    Ok(build::target_directory()?.join("debug").join(PACKAGE))
}

/// Creates a folder for the files that targets write, in memory if possible.
fn scratch() -> Result<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    Ok(if memory.is_dir() { tempfile::tempdir_in(memory)? } else { tempfile::tempdir()? })
}

fn run(program: &Path, target: &str, scratch: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(INPUT_LIMITS).env("NUMAWARD_FUZZ", target).env("TMPDIR", scratch);
    command
}

/// Runs all of these targets, even after one has failed.
fn fuzz(program: &Path, targets: &[String], effort: &Effort) -> Result<()> {
    let kept = build::target_directory()?.join("fuzz");
    fs::create_dir_all(&kept)?;
    println!("seed {}", effort.seed);
    let (mut failed, mut executions) = (Vec::new(), 0_u64);
    for target in targets {
        let scratch = scratch()?;
        let log = kept.join(format!("{target}.log"));
        let found = if effort.uses_kept { kept.join(target) } else { scratch.path().join("found") };
        fs::create_dir_all(&found)?;
        let mut command = run(program, target, scratch.path());
        command.arg(format!("-artifact_prefix={}/{target}-", kept.display())).arg("-print_final_stats=1");
        command.args(effort.runs.map(|runs| format!("-runs={runs}")));
        command.args(effort.time.map(|time| format!("-max_total_time={}", time.as_secs())));
        command.arg(format!("-seed={}", effort.seed));
        command.arg(found).arg(corpus().join(target)).stderr(File::create(&log)?);
        let status = command.status().with_context(|| format!("cannot run {}", program.display()))?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let stat = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix("stat::")?.strip_prefix(name));
            line.map_or("?", |value| value.trim_start_matches(':').trim())
        };
        if status.success() {
            let (runs, rate) = (stat("number_of_executed_units"), stat("average_exec_per_sec"));
            executions += runs.parse().unwrap_or(0);
            println!("{target:<12} {runs:>10} runs, {rate:>6} a second, {} MiB at most", stat("peak_rss_mb"));
        } else {
            let lines: Vec<_> = text.lines().collect();
            eprintln!("{}", lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"));
            failed.push(target.as_str());
        }
    }
    println!("{executions} executions in all");
    if failed.is_empty() {
        return Ok(());
    }
    bail!(
        "targets with findings: {}. The inputs are in {}, with all output; `cargo xtask fuzz TARGET --input FILE` runs one. \
         The seed was {}",
        failed.join(", "),
        kept.display(),
        effort.seed
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        for (text, seconds) in [("30s", 30), ("10m", 600), ("2h", 7200)] {
            assert_eq!(time(text).unwrap(), Duration::from_secs(seconds));
        }
        for text in ["", "10", "m", "-1s", "1.5h", "99999999999s", "ms"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}

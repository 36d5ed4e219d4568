//! `cargo xtask bench budgets`: runs every benchmark with a budget, and fails if one is exceeded.
//!
//! A benchmark prints a line for each figure with a budget: `budget: NAME FIGURE UNIT LIMIT`. [`BENCHES`] lists the
//! expected lines: a missing, unknown or malformed line is an error. The last figures of all benchmarks are stored in
//! `target/budgets.json`; the table shows the previous figures beside the new ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::{env, fs, io};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::build;

/// Benchmarks with a budget, and the figures of each.
const BENCHES: [(&str, &[&str]); 5] = [
    ("probes", &["probes/tp_btf", "probes/tracepoint", "probes/chains"]),
    ("scrape", &["scrape/time", "scrape/memory", "scrape/start"]),
    (
        "engine",
        &[
            "native/8",
            "native/any-8",
            "native/16",
            "native/any-16",
            "native/64",
            "native/any-64",
            "native/128",
            "native/any-128",
            "kubelet/8-idle",
            "kubelet/12-idle",
            "kubelet/16-idle",
        ],
    ),
    ("enforce", &["enforce/memory", "enforce/disk"]),
    ("idle", &["idle/cpu", "idle/memory"]),
];
const PREFIX: &str = "budget: ";

/// A measured figure with its budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct BudgetFigure {
    value: f64,
    unit: String,
    limit: f64,
}

impl BudgetFigure {
    fn is_kept(&self) -> bool {
        self.value <= self.limit
    }
}

type Figures = BTreeMap<String, BudgetFigure>;

/// Prints the line of a figure with a budget.
pub(crate) fn print(name: &str, figure: f64, unit: &str, limit: f64) {
    println!("{PREFIX}{name} {figure:.4} {unit} {limit}");
}

/// Runs the named benchmarks, or all.
pub(crate) fn run(names: &[String]) -> Result<ExitCode> {
    for name in names {
        ensure!(
            BENCHES.iter().any(|(bench, _)| bench == name),
            "{name} is no benchmark with a budget: {}",
            BENCHES.map(|(bench, _)| bench).join(", ")
        );
    }
    let path = build::target_directory()?.join("budgets.json");
    let mut last = read(&path)?;
    let (mut measured, mut failures) = (Figures::new(), Vec::new());
    for (bench, expected) in
        BENCHES.iter().filter(|(bench, _)| names.is_empty() || names.iter().any(|name| name == bench))
    {
        println!("== bench {bench}");
        let (output, succeeded) = execute(bench)?;
        match figures(&output, expected) {
            Ok(found) => {
                if !succeeded && found.values().all(BudgetFigure::is_kept) {
                    failures.push(format!("bench {bench} failed, but not for one of its figures: see above"));
                }
                measured.extend(found);
            }
            Err(error) => failures.push(format!("bench {bench}: {error:#}")),
        }
    }
    println!("\n{}", table(&measured, &last));
    last.extend(measured.clone());
    let text = serde_json::to_string_pretty(&last).context("cannot write the figures as JSON")?;
    fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    println!("the last figures are in {}", path.display());
    for failure in &failures {
        eprintln!("error: {failure}");
    }
    let kept = failures.is_empty() && measured.values().all(BudgetFigure::is_kept);
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a benchmark as a separate program and prints its output. Returns the output, and whether the benchmark
/// succeeded.
fn execute(bench: &str) -> Result<(String, bool)> {
    let program = env::current_exe().context("the path of this program is unknown")?;
    let mut child = Command::new(program)
        .args(["bench", bench])
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run bench {bench}"))?;
    let stdout = child.stdout.take().context("the benchmark has no output")?;
    let mut output = String::new();
    for line in BufReader::new(stdout).lines() {
        let line = line.with_context(|| format!("cannot read the output of bench {bench}"))?;
        println!("{line}");
        output += &line;
        output.push('\n');
    }
    let status = child.wait().with_context(|| format!("cannot wait for bench {bench}"))?;
    Ok((output, status.success()))
}

/// Parses the figures in the output of a benchmark.
fn figures(output: &str, expected: &[&str]) -> Result<Figures> {
    let mut found = Figures::new();
    for line in output.lines().filter_map(|line| line.strip_prefix(PREFIX)) {
        let (name, figure) = parse(line).with_context(|| format!("malformed line `{PREFIX}{line}`"))?;
        ensure!(expected.contains(&name), "unexpected figure {name}");
        ensure!(found.insert(name.to_owned(), figure).is_none(), "{name} is printed twice");
    }
    let missing: Vec<&str> = expected.iter().copied().filter(|name| !found.contains_key(*name)).collect();
    ensure!(missing.is_empty(), "no figure of {}", missing.join(", "));
    Ok(found)
}

fn parse(line: &str) -> Result<(&str, BudgetFigure)> {
    let [name, figure, unit, limit] = line.split(' ').collect::<Vec<_>>()[..] else {
        bail!("expected NAME FIGURE UNIT LIMIT");
    };
    let number = |text: &str| {
        let number: f64 = text.parse().with_context(|| format!("{text} is no number"))?;
        ensure!(number.is_finite(), "{text} is no figure");
        Ok(number)
    };
    Ok((name, BudgetFigure { value: number(figure)?, unit: unit.to_owned(), limit: number(limit)? }))
}

/// Reads the figures of the previous runs; none before the first.
fn read(path: &Path) -> Result<Figures> {
    match fs::read_to_string(path) {
        Ok(text) => {
            serde_json::from_str(&text).with_context(|| format!("{} is damaged: delete it", path.display()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Figures::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn table(measured: &Figures, previous: &Figures) -> String {
    let mut text = format!(
        "{:<20} {:>12} {:>12} {:>10} {:<6} result\n",
        "figure", "measured", "previous", "budget", "unit"
    );
    for (name, BudgetFigure { value: figure, unit, limit }) in measured {
        let before =
            previous.get(name).map_or_else(|| "-".to_owned(), |before| format!("{:.3}", before.value));
        let result = if figure <= limit { "kept" } else { "EXCEEDED" };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<20} {figure:>12.3} {before:>12} {limit:>10} {unit:<6} {result}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64, limit: f64) -> BudgetFigure {
        BudgetFigure { value, unit: "ms".to_owned(), limit }
    }

    #[test]
    fn finds_figures_among_other_lines() {
        let output = "p99 3 ms\nbudget: a/time 3.25 ms 10\n  budget: b 1\nbudget: a/size 7 MiB 5\n";
        let found = figures(output, &["a/size", "a/time"]).unwrap();
        assert_eq!(found["a/time"], figure(3.25, 10.0));
        assert!(found["a/time"].is_kept());
        assert!(!found["a/size"].is_kept());
        assert!(figure(5.0, 5.0).is_kept());
    }

    #[test]
    fn refuses_unexpected_figures() {
        let fails = |output: &str| format!("{:#}", figures(output, &["a"]).unwrap_err());
        assert_eq!(fails("all is well\n"), "no figure of a");
        assert_eq!(fails("budget: b 1 ms 2\n"), "unexpected figure b");
        assert_eq!(fails("budget: a 1 ms 2\nbudget: a 1 ms 2\n"), "a is printed twice");
        for line in ["a 1 ms", "a 1 ms 2 kept", "a fast ms 2", "a NaN ms 2", "a 1 ms inf", "kept"] {
            let error = fails(&format!("budget: {line}\n"));
            assert!(error.starts_with(&format!("malformed line `budget: {line}`: ")), "{error}");
        }
    }

    #[test]
    fn table_shows_previous_figures() {
        let measured =
            Figures::from([("a".to_owned(), figure(3.0, 4.0)), ("b".to_owned(), figure(5.0, 4.0))]);
        let previous =
            Figures::from([("b".to_owned(), figure(2.5, 4.0)), ("c".to_owned(), figure(1.0, 4.0))]);
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let table = table(&measured, &previous);
        let rows: Vec<_> = table.lines().skip(1).map(words).collect();
        assert_eq!(rows[0], ["a", "3.000", "-", "4", "ms", "kept"]);
        assert_eq!(rows[1], ["b", "5.000", "2.500", "4", "ms", "EXCEEDED"]);
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn keeps_figures_of_other_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budgets.json");
        assert_eq!(read(&path).unwrap(), Figures::new());
        let figures = Figures::from([("a".to_owned(), figure(0.1, 4.0))]);
        fs::write(&path, serde_json::to_string(&figures).unwrap()).unwrap();
        assert_eq!(read(&path).unwrap(), figures);
        fs::write(&path, "{").unwrap();
        assert!(read(&path).unwrap_err().to_string().ends_with("is damaged: delete it"));
    }
}

//! Progress and results of tests: the times of the last run, the remaining time, and excerpts of logs that explain a
//! failure.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Maximum number of lines in each part of an excerpt.
const MAX_LINES: usize = 8;
const MAX_LINE_LENGTH: usize = 240;

/// Seconds that stages and tests took when they last passed, stored in the target folder.
pub(crate) struct Times {
    file: PathBuf,
    seconds: BTreeMap<String, f64>,
}

impl Times {
    /// Reads the times of the last run; none if the file is missing or damaged.
    pub(crate) fn read(target: &Path) -> Self {
        let file = target.join("test-times.json");
        let text = fs::read_to_string(&file).unwrap_or_default();
        Self { file, seconds: serde_json::from_str(&text).unwrap_or_default() }
    }

    pub(crate) fn get(&self, key: &str) -> Option<Duration> {
        self.seconds.get(key).and_then(|&seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    pub(crate) fn set(&mut self, key: String, took: Duration) {
        self.seconds.insert(key, took.as_secs_f64());
    }

    pub(crate) fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.seconds)?;
        fs::write(&self.file, text).with_context(|| format!("cannot write {}", self.file.display()))
    }
}

/// Returns a remark such as `, about 4 min left by the last run`, or nothing if no time is known. Unknown times count
/// as the mean of the known ones.
pub(crate) fn time_left(times: impl Iterator<Item = Option<Duration>>, at_once: usize) -> String {
    let times: Vec<_> = times.collect();
    let known: Vec<_> = times.iter().flatten().copied().collect();
    let Some(count) = u32::try_from(known.len()).ok().filter(|&count| count > 0) else {
        return String::new();
    };
    let sum: Duration = known.iter().sum();
    let missing = u32::try_from(times.len() - known.len()).unwrap_or(u32::MAX);
    let left = (sum + sum / count * missing) / u32::try_from(at_once.max(1)).unwrap_or(u32::MAX);
    format!(", about {} left by the last run", spell(left))
}

/// Formats a time in seconds or minutes.
pub(crate) fn spell(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds => format!("{} min", (seconds + 30) / 60),
    }
}

/// Returns the lines of a log that explain a failure: the first panic, error messages, and the last lines.
pub(crate) fn excerpt(log: &str) -> String {
    let lines: Vec<_> = log.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let is_frame = |line: &&str| {
        line.starts_with("test ")
            || line.starts_with("failures:")
            || line.starts_with("note: run with")
            || line.starts_with("running ")
    };
    let mut shown = Vec::new();
    let mut show = |wanted: &mut dyn Iterator<Item = usize>| {
        let mut count = 0;
        for index in wanted {
            if count == MAX_LINES {
                break;
            }
            if !shown.contains(&index) {
                shown.push(index);
                count += 1;
            }
        }
    };
    if let Some(panic) = lines.iter().position(|line| line.contains(" panicked at ")) {
        show(&mut (panic..(panic + MAX_LINES).min(lines.len())));
    }
    let complains = |line: &str| {
        let line = line.to_lowercase();
        ["failed: ", "error: ", "error[", "never came true", "assertion"]
            .iter()
            .any(|word| line.contains(word))
    };
    show(&mut (0..lines.len()).filter(|&index| complains(lines[index])));
    let mut last: Vec<_> =
        (0..lines.len()).rev().filter(|&index| !is_frame(&lines[index])).take(MAX_LINES).collect();
    last.reverse();
    show(&mut last.into_iter());
    shown.sort_unstable();
    let cut = |line: &str| match line.char_indices().nth(MAX_LINE_LENGTH) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    };
    let mut text = Vec::new();
    let mut previous = None;
    for index in shown {
        if previous.is_some_and(|previous| index > previous + 1) {
            text.push("  | …".to_owned());
        }
        text.push(format!("  | {}", cut(lines[index])));
        previous = Some(index);
    }
    text.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpt_has_panic_complaint_and_end() {
        let filler = |name: &str| format!("{name}\n").repeat(3000);
        let log = format!(
            "running 1 test\n{}thread 'x' panicked at a.rs:1:2:\nthe script ended with 1; it printed:\n{}FAILED: it never\n{}last words\ntest x ... FAILED\n",
            filler("before"),
            filler("a"),
            filler("b"),
        );
        let excerpt = excerpt(&log);
        for words in ["panicked at a.rs:1:2", "the script ended with 1", "FAILED: it never", "last words"] {
            assert!(excerpt.contains(words), "{words}: {excerpt}");
        }
        assert!(excerpt.lines().count() < 30, "{excerpt}");
        assert!(!excerpt.contains("before"), "{excerpt}");
    }

    #[test]
    fn long_lines_are_cut() {
        assert!(excerpt(&format!("error: {}", "x".repeat(100_000))).len() < 300);
        assert_eq!(excerpt(""), "");
    }

    #[test]
    fn estimates_unknown_times_by_mean() {
        let seconds = |number| Some(Duration::from_secs(number));
        assert_eq!(time_left([].into_iter(), 2), "");
        assert_eq!(time_left([None].into_iter(), 2), "");
        assert_eq!(
            time_left([seconds(60), seconds(120), None].into_iter(), 2),
            ", about 2 min left by the last run"
        );
    }

    #[test]
    fn times_outlive_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut times = Times::read(folder.path());
        assert_eq!(times.get("x"), None);
        times.set("x".to_owned(), Duration::from_millis(1500));
        times.write().unwrap();
        assert_eq!(Times::read(folder.path()).get("x"), Some(Duration::from_millis(1500)));
        fs::write(folder.path().join("test-times.json"), "{").unwrap();
        assert_eq!(Times::read(folder.path()).get("x"), None);
    }
}

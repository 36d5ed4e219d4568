//! Comparison of generated text with the file that is checked in.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{CI, is_ci, is_on, report};

/// Name of the variable that makes [`assert_golden`] write files instead of comparing them.
pub const UPDATE: &str = "UPDATE";

/// Compares `text` with the checked-in file.
///
/// If the variable `UPDATE` is set and the texts differ, writes the file and reports that on stderr. Then nothing is compared:
/// `cargo xtask generate --check` finds the difference with git.
///
/// # Panics
///
/// If the texts differ; in CI also if `UPDATE` is set.
#[track_caller]
pub fn assert_golden(path: &Path, text: &str) {
    match compare(path, text, is_on(env::var_os(UPDATE).as_deref()), is_ci()) {
        Ok(None) => {}
        Ok(Some(line)) => report(&line),
        Err(problem) => panic!("{problem}"),
    }
}

/// Returns the line to report, or the reason why the test fails.
fn compare(path: &Path, text: &str, may_write: bool, is_ci: bool) -> Result<Option<String>, String> {
    let file = path.display();
    if may_write && is_ci {
        return Err(format!(
            "{UPDATE} is set in CI ({CI} is set too): a test that writes {file} would not compare it"
        ));
    }
    let checked_in = fs::read_to_string(path);
    let difference = match &checked_in {
        Ok(checked_in) if checked_in == text => return Ok(None),
        Ok(checked_in) => first_difference(checked_in, text),
        Err(error) => format!("cannot read it: {error}"),
    };
    if !may_write {
        return Err(format!("{file} is out of date ({UPDATE}=1 writes it): {difference}"));
    }
    fs::write(path, text).map_err(|error| format!("cannot write {file}: {error}"))?;
    Ok(Some(format!("{UPDATE}: wrote {file}: {difference}")))
}

/// Describes the first line that differs, under the last section heading above it.
fn first_difference(old: &str, new: &str) -> String {
    let mut heading = String::new();
    let (mut old, mut new) = (old.lines(), new.lines());
    for number in 1.. {
        let (old, new) = (old.next(), new.next());
        if old != new {
            let [old, new] =
                [old, new].map(|line| line.map_or("no line".to_owned(), |line| format!("{line:?}")));
            return format!("line {number}{heading} is {old}, generated is {new}");
        }
        match new {
            Some(line) if line.starts_with(HEADING) => heading = format!(" (below {line:?})"),
            Some(_) => {}
            None => break,
        }
    }
    "only the ends of lines differ".to_owned()
}

/// Prefix of a line with the name of a section.
const HEADING: &str = "== ";

/// A checked-in file with several named texts of one test, each of which ends with a line feed.
///
/// [`Sections::finish`] compares the file as a whole, so a text that the test no longer produces is a difference too.
#[derive(Debug)]
pub struct Sections {
    path: PathBuf,
    checked_in: String,
    generated: String,
    is_finished: bool,
}

impl Sections {
    /// Reads the file. A file that cannot be read has no texts.
    pub fn read(path: PathBuf) -> Self {
        let checked_in = fs::read_to_string(&path).unwrap_or_default();
        Self { path, checked_in, generated: String::new(), is_finished: false }
    }

    /// Returns true if the file is written and not compared.
    pub fn is_update() -> bool {
        is_on(env::var_os(UPDATE).as_deref())
    }

    /// Returns the checked-in text with this name; empty if there is none.
    pub fn checked_in(&self, name: &str) -> &str {
        let start = format!("{HEADING}{name}\n");
        let is_first = self.checked_in.starts_with(&start);
        let found =
            if is_first { Some(0) } else { self.checked_in.find(&format!("\n{start}")).map(|at| at + 1) };
        let Some(begin) = found else { return "" };
        let text = &self.checked_in[begin + start.len()..];
        &text[..text.find(&format!("\n{HEADING}")).map_or(text.len(), |end| end + 1)]
    }

    /// Adds a generated text, and compares it with the checked-in one unless the file is written.
    ///
    /// # Panics
    ///
    /// If the texts differ.
    #[track_caller]
    pub fn add(&mut self, name: &str, text: &str) {
        if !Self::is_update() {
            let file = self.path.display();
            assert_eq!(text, self.checked_in(name), "{name} in {file} ({UPDATE}=1 writes it)");
        }
        self.generated.extend([HEADING, name, "\n", text]);
    }

    /// Compares the whole file, or writes it, as [`assert_golden`].
    ///
    /// # Panics
    ///
    /// As [`assert_golden`].
    #[track_caller]
    pub fn finish(mut self) {
        self.is_finished = true;
        assert_golden(&self.path, &self.generated);
    }
}

impl Drop for Sections {
    fn drop(&mut self) {
        let is_compared = self.is_finished || std::thread::panicking();
        assert!(is_compared, "the texts for {} were never compared", self.path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_fails_or_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page.md");
        let missing = compare(&path, "a\nb\n", false, false).unwrap_err();
        assert!(missing.contains("page.md is out of date") && missing.contains("cannot read"), "{missing}");
        assert!(!path.exists());

        let line = compare(&path, "a\nb\n", true, false).unwrap().unwrap();
        assert!(line.starts_with("UPDATE: wrote ") && line.contains("page.md"), "{line}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\nb\n");
        for (may_write, is_ci) in [(false, false), (false, true), (true, false)] {
            assert_eq!(compare(&path, "a\nb\n", may_write, is_ci), Ok(None));
        }

        for is_ci in [false, true] {
            let different = compare(&path, "a\nc\n", false, is_ci).unwrap_err();
            assert!(different.contains("line 2 is \"b\", generated is \"c\""), "{different}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\nb\n");
    }

    #[test]
    fn refuses_update_in_ci() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page.md");
        fs::write(&path, "a\n").unwrap();
        for text in ["a\n", "b\n"] {
            let refused = compare(&path, text, true, true).unwrap_err();
            assert!(refused.contains("UPDATE is set in CI"), "{refused}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\n");
    }

    #[test]
    fn difference_names_its_section() {
        let old = "== a\n1\n== b\n2\n";
        for (new, expected) in [
            ("== a\n1\n== b\n3\n", "line 4 (below \"== b\") is \"2\", generated is \"3\""),
            ("== a\n1\n", "line 3 (below \"== a\") is \"== b\", generated is no line"),
            ("== a\n1\n== b\n2\n3\n", "line 5 (below \"== b\") is no line, generated is \"3\""),
            ("== a\n1\n== b\n2", "only the ends of lines differ"),
        ] {
            assert_eq!(first_difference(old, new), expected);
        }
    }

    #[test]
    fn compares_each_section_and_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("printed.txt");
        fs::write(&path, "== a\n1\n== b a\n2\n").unwrap();
        let sections = |texts: &[(&str, &str)]| {
            let mut sections = Sections::read(path.clone());
            for (name, text) in texts {
                sections.add(name, text);
            }
            sections
        };
        let panics = |run: &(dyn Fn() + std::panic::RefUnwindSafe)| std::panic::catch_unwind(run).is_err();
        sections(&[("a", "1\n"), ("b a", "2\n")]).finish();
        assert!(panics(&|| drop(sections(&[("a", "2\n")]))), "a text differs");
        assert!(panics(&|| drop(sections(&[("b", "2\n")]))), "a name is not there");
        assert!(panics(&|| sections(&[("a", "1\n")]).finish()), "a text is no longer produced");
        assert!(panics(&|| sections(&[("b a", "2\n"), ("a", "1\n")]).finish()), "another order");
        assert!(panics(&|| drop(sections(&[("a", "1\n"), ("b a", "2\n")]))), "never compared as a whole");
    }
}

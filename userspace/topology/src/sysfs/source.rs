//! Access to the files under a root directory, and its errors.

use std::{
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::set::{Id, IdSet, ListError};

/// An error while reading the machine.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A required file or directory is missing, or an existing one cannot be read.
    #[error("cannot read {path}: {source} (it holds {holds})", path = path.display())]
    Unreadable {
        path: PathBuf,
        /// The expected contents.
        holds: &'static str,
        source: io::Error,
    },
    /// The content of a file is not in the documented format.
    #[error("{path}: {content:?} is not {expected}", path = at(path, *line))]
    Malformed {
        path: PathBuf,
        /// The line, from 1, in files with several lines.
        line: Option<usize>,
        /// The content or line, shortened.
        content: String,
        /// The expected format, and the problem if it is not obvious.
        expected: String,
    },
    /// A file contradicts another one. The machine may have changed meanwhile; the caller may read it again.
    #[error("{path}: {problem} (if CPUs or nodes are being plugged, read again)", path = path.display())]
    Inconsistent { path: PathBuf, problem: String },
}

fn at(path: &Path, line: Option<usize>) -> String {
    match line {
        Some(line) => format!("{}:{line}", path.display()),
        None => path.display().to_string(),
    }
}

/// The trees `sys` and `proc` below a root directory. Paths are relative to it.
#[derive(Clone, Copy)]
pub(super) struct SysfsRoot<'a> {
    pub(super) root: &'a Path,
}

impl SysfsRoot<'_> {
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Returns an error about malformed content, which is shortened.
    pub(super) fn malformed(
        &self,
        path: &str,
        line: Option<usize>,
        content: &str,
        expected: impl Display,
    ) -> ReadError {
        const MAX_CHARS: usize = 120;
        let mut shown: String = content.trim().chars().take(MAX_CHARS).collect();
        if content.trim().chars().nth(MAX_CHARS).is_some() {
            shown.push('…');
        }
        ReadError::Malformed { path: self.path(path), line, content: shown, expected: expected.to_string() }
    }

    /// Reads the text of a file.
    pub(super) fn text(&self, path: &str, holds: &'static str) -> Result<String, ReadError> {
        let bytes = fs::read(self.path(path)).map_err(|source| self.unreadable(path, holds, source))?;
        String::from_utf8(bytes).map_err(|error| {
            self.malformed(path, None, &String::from_utf8_lossy(error.as_bytes()), "UTF-8 text")
        })
    }

    /// Reads a list of ids.
    pub(super) fn ids<T: Id>(&self, path: &str, holds: &'static str) -> Result<IdSet<T>, ReadError> {
        let text = self.text(path, holds)?;
        text.parse().map_err(|error: ListError| {
            let expected = format!("a {} such as `0-3,8`: {}", error.list_name, error.problem);
            self.malformed(path, None, &text, expected)
        })
    }

    /// Reads a number.
    pub(super) fn number<T: FromStr>(&self, path: &str, holds: &'static str) -> Result<T, ReadError> {
        let text = self.text(path, holds)?;
        text.trim().parse().map_err(|_| self.malformed(path, None, &text, format_args!("a number ({holds})")))
    }

    /// Returns the numbers `n` of the entries `PREFIXnSUFFIX` of a directory, in ascending order; none if the directory
    /// is missing.
    pub(super) fn numbered_entries(
        &self,
        path: &str,
        prefix: &str,
        suffix: &str,
        holds: &'static str,
    ) -> Result<Vec<u64>, ReadError> {
        let names = fs::read_dir(self.path(path))
            .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>());
        let names = if_present(names.map_err(|source| self.unreadable(path, holds, source)))?;
        let mut numbers = Vec::new();
        for name in names.unwrap_or_default() {
            let digits = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_suffix(suffix));
            // Other entries have the same prefix: `memory_side_cache` is next to `memory32`.
            let Some(digits) = digits.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) else {
                continue;
            };
            let number = digits.parse().map_err(|_| {
                let expected = format!("{prefix}NUMBER{suffix}");
                self.malformed(path, None, &name.to_string_lossy(), expected)
            })?;
            numbers.push(number);
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn unreadable(&self, path: &str, holds: &'static str, source: io::Error) -> ReadError {
        ReadError::Unreadable { path: self.path(path), holds, source }
    }
}

/// Returns `None` if the file is missing.
pub(super) fn if_present<T>(result: Result<T, ReadError>) -> Result<Option<T>, ReadError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ReadError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

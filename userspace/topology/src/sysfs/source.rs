//! Files under a root directory, and what can be wrong with them.

use std::{
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::set::{Id, IdSet, ListError};

/// The machine cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A file or directory that must be there is missing, or one that is there cannot be read.
    #[error("cannot read {path}: {source} (it holds {holds})", path = path.display())]
    Unreadable {
        /// The file or directory.
        path: PathBuf,
        /// What it holds.
        holds: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A file's content is not what the kernel documents.
    #[error("{path}: {content:?} is not {expected}", path = at(path, *line))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1, in files that have several.
        line: Option<usize>,
        /// The content or line, shortened.
        content: String,
        /// What was expected, and what is wrong where that is not obvious.
        expected: String,
    },
    /// A file contradicts another. The machine may have changed while it was read: read again.
    #[error("{path}: {problem} (if CPUs or nodes are being plugged, read again)", path = path.display())]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// The contradiction.
        problem: String,
    },
}

fn at(path: &Path, line: Option<usize>) -> String {
    match line {
        Some(line) => format!("{}:{line}", path.display()),
        None => path.display().to_string(),
    }
}

/// The trees `sys` and `proc` below a root directory. Paths are relative to it.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) root: &'a Path,
}

impl Source<'_> {
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// A content that is not what was expected. It is shown shortened.
    pub(super) fn malformed(
        &self,
        path: &str,
        line: Option<usize>,
        content: &str,
        expected: impl Display,
    ) -> ReadError {
        const SHOWN: usize = 120;
        let mut shown: String = content.trim().chars().take(SHOWN).collect();
        if content.trim().chars().nth(SHOWN).is_some() {
            shown.push('…');
        }
        ReadError::Malformed { path: self.path(path), line, content: shown, expected: expected.to_string() }
    }

    /// The text of a file.
    pub(super) fn text(&self, path: &str, holds: &'static str) -> Result<String, ReadError> {
        let bytes = fs::read(self.path(path)).map_err(|source| self.unreadable(path, holds, source))?;
        String::from_utf8(bytes).map_err(|error| {
            self.malformed(path, None, &String::from_utf8_lossy(error.as_bytes()), "UTF-8 text")
        })
    }

    /// A list of ids.
    pub(super) fn ids<T: Id>(&self, path: &str, holds: &'static str) -> Result<IdSet<T>, ReadError> {
        let text = self.text(path, holds)?;
        text.parse().map_err(|error: ListError| {
            let expected = format!("a {} such as `0-3,8`: {}", error.list_name, error.problem);
            self.malformed(path, None, &text, expected)
        })
    }

    /// A number.
    pub(super) fn number<T: FromStr>(&self, path: &str, holds: &'static str) -> Result<T, ReadError> {
        let text = self.text(path, holds)?;
        text.trim().parse().map_err(|_| self.malformed(path, None, &text, format_args!("a number ({holds})")))
    }

    /// The numbers `n` of the entries `PREFIXnSUFFIX` of a directory that may be missing, ascending.
    pub(super) fn numbered_entries(
        &self,
        path: &str,
        prefix: &str,
        suffix: &str,
        holds: &'static str,
    ) -> Result<Vec<u64>, ReadError> {
        let names = fs::read_dir(self.path(path))
            .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>());
        let names = present(names.map_err(|source| self.unreadable(path, holds, source)))?;
        let mut numbers = Vec::new();
        for name in names.unwrap_or_default() {
            let digits = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_suffix(suffix));
            // Others have the same prefix: `memory_side_cache` is beside `memory32`.
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

/// `None` where the file is missing.
pub(super) fn present<T>(result: Result<T, ReadError>) -> Result<Option<T>, ReadError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ReadError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

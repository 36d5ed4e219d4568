//! Files under a root directory, and what can be wrong with them.

use std::{
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::set::{Id, IdSet};

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

impl ReadError {
    pub(super) fn malformed(path: &Path, line: Option<usize>, content: &str, expected: impl Display) -> Self {
        const SHOWN: usize = 120;
        let mut shown: String = content.trim().chars().take(SHOWN).collect();
        if content.trim().chars().nth(SHOWN).is_some() {
            shown.push('…');
        }
        Self::Malformed { path: path.into(), line, content: shown, expected: expected.to_string() }
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

    /// The text of a file that must be there.
    pub(super) fn text(&self, path: &str, holds: &'static str) -> Result<String, ReadError> {
        let path = self.path(path);
        match fs::read(&path) {
            Ok(bytes) => String::from_utf8(bytes).map_err(|error| {
                ReadError::malformed(&path, None, &String::from_utf8_lossy(error.as_bytes()), "UTF-8 text")
            }),
            Err(source) => Err(ReadError::Unreadable { path, holds, source }),
        }
    }

    /// The text of a file that may be missing.
    pub(super) fn optional_text(&self, path: &str, holds: &'static str) -> Result<Option<String>, ReadError> {
        present(self.text(path, holds))
    }

    /// A list of ids that must be there.
    pub(super) fn ids<T: Id>(&self, path: &str, holds: &'static str) -> Result<IdSet<T>, ReadError> {
        self.parse_ids(path, &self.text(path, holds)?)
    }

    /// A list of ids that may be missing.
    pub(super) fn optional_ids<T: Id>(
        &self,
        path: &str,
        holds: &'static str,
    ) -> Result<Option<IdSet<T>>, ReadError> {
        self.optional_text(path, holds)?.map(|text| self.parse_ids(path, &text)).transpose()
    }

    /// A number that must be there.
    pub(super) fn number<T: FromStr>(&self, path: &str, holds: &'static str) -> Result<T, ReadError> {
        self.parse_number(path, &self.text(path, holds)?, holds)
    }

    /// A number that may be missing.
    pub(super) fn optional_number<T: FromStr>(
        &self,
        path: &str,
        holds: &'static str,
    ) -> Result<Option<T>, ReadError> {
        self.optional_text(path, holds)?.map(|text| self.parse_number(path, &text, holds)).transpose()
    }

    /// The numbers `n` of the entries `PREFIXnSUFFIX` of a directory that may be missing, ascending.
    pub(super) fn numbered_entries(
        &self,
        path: &str,
        prefix: &str,
        suffix: &str,
        holds: &'static str,
    ) -> Result<Vec<u64>, ReadError> {
        let path = self.path(path);
        let names = fs::read_dir(&path)
            .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>());
        let names =
            present(names.map_err(|source| ReadError::Unreadable { path: path.clone(), holds, source }))?;
        let mut numbers = Vec::new();
        for name in names.unwrap_or_default() {
            let digits = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_suffix(suffix));
            // Others have the same prefix: `memory_side_cache` is beside `memory32`.
            let Some(digits) = digits.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) else {
                continue;
            };
            let number = digits.parse().map_err(|_| {
                let expected = format!("{prefix}NUMBER{suffix}");
                ReadError::malformed(&path, None, &name.to_string_lossy(), expected)
            })?;
            numbers.push(number);
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn parse_ids<T: Id>(&self, path: &str, text: &str) -> Result<IdSet<T>, ReadError> {
        text.parse().map_err(|error: crate::set::ListError| {
            let expected = format!("a {} such as `0-3,8`: {}", error.list_name, error.problem);
            ReadError::malformed(&self.path(path), None, text, expected)
        })
    }

    fn parse_number<T: FromStr>(&self, path: &str, text: &str, holds: &'static str) -> Result<T, ReadError> {
        let expected = || format!("a number ({holds})");
        text.trim().parse().map_err(|_| ReadError::malformed(&self.path(path), None, text, expected()))
    }
}

/// Nothing where the file is missing.
fn present<T>(result: Result<T, ReadError>) -> Result<Option<T>, ReadError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ReadError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

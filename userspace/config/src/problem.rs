//! Problems of a configuration, with the place of the value.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use serde::Serialize;

/// The source of a value, ordered by precedence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, derive_more::Display)]
#[serde(rename_all = "camelCase", tag = "source")]
pub enum Origin {
    /// The configuration file.
    #[display("{}{}", file.display(), position.map_or_else(String::new, |at| format!(":{at}")))]
    #[serde(rename_all = "camelCase")]
    File {
        file: PathBuf,
        /// The position; `None` for the whole file.
        #[serde(flatten)]
        position: Option<Position>,
    },
    /// An environment variable.
    #[display("variable {variable}")]
    Variable {
        /// The name of the variable.
        variable: String,
    },
    /// A command-line flag.
    #[display("flag {flag}")]
    Flag {
        /// The flag, including dashes.
        flag: String,
    },
}

/// A position in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, derive_more::Display)]
#[display("{line}:{column}")]
pub struct Position {
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
}

/// A problem of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, derive_more::Display)]
#[display("{origin}: {message}")]
pub struct Problem {
    /// The source of the value.
    #[serde(flatten)]
    pub origin: Origin,
    /// The key, with dots; empty if the problem concerns no single key.
    pub path: String,
    /// The problem, and what to do.
    pub message: String,
}

impl Problem {
    /// Returns the problem of a file or a folder that cannot be read.
    pub(super) fn unreadable(path: &Path, error: &io::Error) -> Self {
        let origin = Origin::File { file: path.to_owned(), position: None };
        Self { origin, path: String::new(), message: format!("cannot be read: {error}") }
    }
}

/// All problems of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => write!(f, "the configuration has a problem:")?,
            count => write!(f, "the configuration has {count} problems:")?,
        }
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

//! What is wrong with a configuration, and where it was given.

use std::{fmt, path::PathBuf};

use serde::Serialize;

/// Where a value was given. Ordered as the sources are read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, derive_more::Display)]
#[serde(rename_all = "camelCase", tag = "source")]
pub enum Origin {
    /// In the configuration file.
    #[display("{}{}", file.display(), position.map_or_else(String::new, |at| format!(":{at}")))]
    #[serde(rename_all = "camelCase")]
    File {
        /// The file.
        file: PathBuf,
        /// Line, from 1; none if the whole file is meant.
        #[serde(flatten)]
        position: Option<Position>,
    },
    /// In a variable of the environment.
    #[display("variable {variable}")]
    Variable {
        /// Its name.
        variable: String,
    },
    /// In a flag of the command line.
    #[display("flag {flag}")]
    Flag {
        /// The flag, dashes included.
        flag: String,
    },
}

/// A place in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, derive_more::Display)]
#[display("{line}:{column}")]
pub struct Position {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

/// One thing that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, derive_more::Display)]
#[display("{origin}: {message}")]
pub struct Problem {
    /// Where it was given.
    #[serde(flatten)]
    pub origin: Origin,
    /// The key, with dots; empty if none is concerned.
    pub path: String,
    /// What is wrong and what to do.
    pub message: String,
}

/// Everything that is wrong with the configuration.
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

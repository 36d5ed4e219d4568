//! The command line.

use std::{fmt, path::PathBuf};

use clap::{Parser, ValueEnum, builder::TypedValueParser as _};
use numaward_topology::CpuSet;
use serde::Serialize;

use crate::policy::MemoryPolicy;

/// Touches memory from given CPUs under a given memory policy, reports its nodes, and holds it
#[derive(Parser)]
#[command(name = "numaward-load", version)]
pub(crate) struct Arguments {
    /// CPUs to touch from, such as 0-1,4: each thread is bound to one of them in turn
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<CpuSet>,
    /// Threads, each with an equal share of the memory [default: one per CPU, else 1]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024).map(usize::from))]
    pub(crate) threads: Option<usize>,
    /// default (that of the process), bind:NODES, sampled:NODES (bind, and NUMA balancing samples it), preferred:NODE
    /// or interleave:NODES
    #[arg(long, default_value = "default")]
    pub(crate) policy: MemoryPolicy,
    /// Bytes to touch, such as 64M
    #[arg(long, default_value = "64M", value_parser = size)]
    pub(crate) size: u64,
    /// Kind of memory
    #[arg(long, value_enum, default_value_t = MemoryKind::Anon)]
    pub(crate) kind: MemoryKind,
    /// With --kind hugetlb, the size of a page: 2M or 1G
    #[arg(long, value_name = "SIZE", default_value = "2M", value_parser = huge_page)]
    pub(crate) huge_page: u64,
    /// The file that --kind file creates, and removes at its end; its file system must support mmap
    #[arg(long, required_if_eq("kind", "file"))]
    pub(crate) path: Option<PathBuf>,
    /// Touches nothing, so that another process can: the report has the address
    #[arg(long, conflicts_with = "walk")]
    pub(crate) untouched: bool,
    /// Keeps writing to every page in turn while holding
    #[arg(long)]
    pub(crate) walk: bool,
    /// With --walk, only to the first bytes [default: all]
    #[arg(long, requires = "walk", value_name = "BYTES", value_parser = size)]
    pub(crate) walk_size: Option<u64>,
    /// With --walk, each thread writes to all pages, not only to its own share
    #[arg(long, requires = "walk")]
    pub(crate) shared: bool,
    /// Ends after this number of seconds [default: at SIGTERM or SIGINT]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) hold: Option<f64>,
    /// The folder of a cgroup to enter before memory is touched
    #[arg(long, value_name = "PATH")]
    pub(crate) cgroup: Option<PathBuf>,
    /// Format of the report about the pages' nodes
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    pub(crate) report: ReportFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MemoryKind {
    /// Private anonymous base pages
    Anon,
    /// Private anonymous memory in transparent huge pages
    Thp,
    /// Hugepages from the pool
    Hugetlb,
    /// Shared memory (a memfd)
    Tmpfs,
    /// Page cache of a file
    File,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anon => "anon",
            Self::Thp => "thp",
            Self::Hugetlb => "hugetlb",
            Self::Tmpfs => "tmpfs",
            Self::File => "file",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReportFormat {
    Text,
    Json,
}

/// Parses a size other than zero: `4096`, `64K`, `64M`, `2G`.
fn size(text: &str) -> Result<u64, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit {
        "" => Some(0),
        "K" => Some(10),
        "M" => Some(20),
        "G" => Some(30),
        _ => None,
    };
    let bytes = shift.and_then(|shift| number.parse::<u64>().ok()?.checked_mul(1 << shift));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| "give a size such as 64M or 2G".to_owned())
}

fn huge_page(text: &str) -> Result<u64, String> {
    match text {
        "2M" => Ok(2 << 20),
        "1G" => Ok(1 << 30),
        _ => Err("hugepages are 2M or 1G".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
    seconds.ok_or_else(|| "give a number of seconds".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn command_line_is_valid() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn reads_sizes_and_seconds() {
        let table =
            [("4096", Some(4096)), ("64K", Some(65536)), ("64M", Some(64 << 20)), ("2G", Some(2 << 30))];
        for (text, bytes) in table {
            assert_eq!(size(text).ok(), bytes, "{text}");
        }
        for wrong in ["", "0", "M", "1T", "-1", "1.5M", "99999999999999999999", "18446744073709551615G"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(seconds("1.5"), Ok(1.5));
        for wrong in ["", "-1", "inf", "NaN", "x"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn file_requires_path() {
        let error = Arguments::try_parse_from(["numaward-load", "--kind", "file"]).err().unwrap().to_string();
        assert!(error.contains("--path"), "{error}");
    }
}

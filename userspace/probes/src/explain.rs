//! Describes in one line why the kernel refused a probe, and the remedy.

use std::{error::Error, io};

use aya::{maps::MapError, programs::ProgramError, sys::SyscallError};

use crate::report::Obstacle;

/// Returns the reason for an error of aya or of the system.
pub(crate) fn explain(error: &(dyn Error + 'static)) -> (Obstacle, String) {
    let chain = std::iter::successors(Some(error), |&error| error.source());
    chain
        .into_iter()
        .find_map(explain_one)
        .unwrap_or_else(|| (Obstacle::Kernel, one_line(&error.to_string())))
}

/// Describes one error of the chain, if it contains the kernel's answer.
fn explain_one(error: &(dyn Error + 'static)) -> Option<(Obstacle, String)> {
    // aya's wrappers are transparent: the source of a wrapper is the source of the wrapped error.
    if let Some(error) = error.downcast_ref::<ProgramError>() {
        return match error {
            // The only refusal before the verifier.
            ProgramError::LoadError { io_error, .. } if io_error.raw_os_error() == Some(libc::EPERM) => {
                Some(explain_io("BPF_PROG_LOAD", io_error))
            }
            ProgramError::LoadError { io_error, verifier_log } => {
                let (number, words) = (number(io_error), verifier_complaint(&verifier_log.to_string()));
                let text = format!("{number}: the kernel's verifier refused the program: {words}");
                Some((Obstacle::Kernel, text))
            }
            ProgramError::SyscallError(error) => explain_one(error),
            ProgramError::MapError(error) => explain_one(error),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<MapError>() {
        return match error {
            MapError::CreateError { name, io_error } => {
                Some(explain_io(&format!("creating the map {name}"), io_error))
            }
            MapError::SyscallError(error) => explain_one(error),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<SyscallError>() {
        return Some(explain_io(error.call, &error.io_error));
    }
    let error = error.downcast_ref::<io::Error>()?;
    error.raw_os_error().map(|_| explain_io("a system call", error))
}

fn explain_io(call: &str, error: &io::Error) -> (Obstacle, String) {
    let number = number(error);
    let text = match (error.raw_os_error(), call) {
        (Some(libc::EACCES | libc::EPERM), "perf_event_open_trace_point") => format!(
            "{number}: perf_event_open was refused (missing CAP_PERFMON; CAP_SYS_ADMIN where \
             kernel.perf_event_paranoid is above 2; or lockdown)"
        ),
        (Some(libc::EPERM), _) => {
            format!("{number}: refused by the kernel (missing CAP_BPF or CAP_PERFMON, lockdown, or an LSM)")
        }
        (Some(libc::EACCES), _) => format!("{number}: {call} was refused"),
        (Some(libc::ENOSYS), _) => format!("{number}: the kernel has no BPF"),
        (Some(libc::ENOMEM), _) => {
            format!("{number}: no memory for {call}; configure fewer slots")
        }
        _ => format!("{number}: {call} failed"),
    };
    let is_refused = matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM));
    let obstacle = if is_refused { Obstacle::Permission } else { Obstacle::Kernel };
    (obstacle, text)
}

fn number(error: &io::Error) -> String {
    let name = match error.raw_os_error() {
        Some(libc::EPERM) => "EPERM",
        Some(libc::EACCES) => "EACCES",
        Some(libc::EINVAL) => "EINVAL",
        Some(libc::ENOENT) => "ENOENT",
        Some(libc::ENOMEM) => "ENOMEM",
        Some(libc::ENOSYS) => "ENOSYS",
        Some(libc::E2BIG) => "E2BIG",
        Some(libc::EOPNOTSUPP) => "EOPNOTSUPP",
        _ => return one_line(&error.to_string()),
    };
    name.to_owned()
}

/// Returns the verifier's complaint: the line before its statistics.
fn verifier_complaint(log: &str) -> String {
    let words = log.lines().rev().map(str::trim).find(|line| {
        let statistics = ["processed ", "verification time ", "stack depth "];
        !line.is_empty() && !statistics.iter().any(|prefix| line.starts_with(prefix))
    });
    one_line(words.unwrap_or("it gave no reason"))
}

/// Joins a text into one line of at most 200 characters.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use aya::EbpfError;

    use super::*;

    #[test]
    fn explains_missing_privileges() {
        let call = |call, number| SyscallError { call, io_error: io::Error::from_raw_os_error(number) };
        let create = |number| MapError::CreateError {
            name: "CTR".to_owned(),
            io_error: io::Error::from_raw_os_error(number),
        };
        let cases: [(Box<dyn Error>, &str); 6] = [
            (
                Box::new(EbpfError::MapError(create(libc::EPERM))),
                "EPERM: refused by the kernel (missing CAP_BPF",
            ),
            (Box::new(create(libc::ENOMEM)), "ENOMEM: no memory for creating the map CTR; configure fewer"),
            (
                Box::new(ProgramError::SyscallError(call("perf_event_open_trace_point", libc::EACCES))),
                "EACCES: perf_event_open was refused (missing CAP_PERFMON; CAP_SYS_ADMIN where",
            ),
            (Box::new(MapError::SyscallError(call("bpf_map_update_elem", libc::E2BIG))), "E2BIG: bpf_map"),
            (Box::new(call("bpf_map_create", libc::ENOSYS)), "ENOSYS: the kernel has no BPF"),
            (Box::new(ProgramError::IOError(io::Error::other("tracefs not found"))), "tracefs not found"),
        ];
        for (error, expected) in cases {
            let (obstacle, text) = explain(error.as_ref());
            assert!(text.starts_with(expected), "{error:?}: {text}");
            let is_refused = expected.starts_with("EPERM") || expected.starts_with("EACCES");
            assert_eq!(obstacle == Obstacle::Permission, is_refused, "{error:?}: {obstacle:?}");
        }
    }

    #[test]
    fn finds_verifier_complaint() {
        let log =
            "0: (79) r2 = *(u64 *)(r1 +0)\nunknown func bpf_foo#999\nprocessed 12 insns (limit 1000000)\n\n";
        assert_eq!(verifier_complaint(log), "unknown func bpf_foo#999");
        assert_eq!(verifier_complaint(""), "it gave no reason");
    }
}

use std::{io, path::PathBuf, process::ExitStatus, time::Duration};

use crate::{Arch, SpecError};

/// Reasons why a script has no exit code. If the guest failed, the message ends with the last lines of its console.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The description of the machine is invalid.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// No folder is known for the cache.
    #[error("neither XDG_CACHE_HOME nor HOME holds an absolute path: set one, numaward's cache lives there")]
    NoCacheHome,
    /// The kernel is not in the cache.
    #[error("kernel {name} is not in the cache ({} is missing): run `cargo xtask setup`", path.display())]
    NoKernel {
        /// Name as in `--kernel`.
        name: String,
        /// The missing file.
        path: PathBuf,
    },
    /// A file for guests with this processor is not in the cache.
    #[error("guests with the processor {arch} need {}, which is missing: run `cargo xtask setup --arch {arch}`", path.display())]
    NoGuestFile {
        arch: Arch,
        /// The missing file.
        path: PathBuf,
    },
    /// The root file system is for another processor.
    #[error("the root file system is for another processor than {0}; images are only made for amd64")]
    NoDebianFor(Arch),
    /// The root file system with systemd is not in the cache.
    #[error("Debian with systemd is not in the cache ({} is missing): run `cargo xtask setup`", .0.display())]
    NoDebian(PathBuf),
    /// A program is not installed.
    #[error(
        "a program needed to boot virtual machines is missing: {tool} (Debian package {package}); run `cargo xtask setup`"
    )]
    NoTool {
        tool: &'static str,
        /// Debian package of the program.
        package: &'static str,
    },
    /// A file cannot be copied into the guest.
    #[error("cannot copy {} into the machine: {reason}", path.display())]
    Copy {
        /// Path on the host.
        path: PathBuf,
        reason: String,
    },
    /// An operation on the host failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// Description of the operation.
        what: &'static str,
        /// Path that it concerned.
        path: PathBuf,
        source: io::Error,
    },
    /// The log of writes to a disk cannot be read.
    #[error("{} is not the log of a disk: {reason}", path.display())]
    WriteLog {
        /// Path of the log.
        path: PathBuf,
        reason: String,
    },
    /// cpio failed.
    #[error("cpio could not pack the machine's initramfs ({status}): {stderr}")]
    Pack { status: ExitStatus, stderr: String },
    /// QEMU failed.
    #[error("QEMU failed ({status}): {stderr}")]
    Qemu { status: ExitStatus, stderr: String },
    /// QEMU's monitor refused a command.
    #[error("QEMU's monitor: {command}: {reason}")]
    Monitor { command: &'static str, reason: String },
    /// The guest's kernel panicked.
    #[error("the machine's kernel panicked: {reason}\n{console}")]
    Panic {
        /// The line of the console with the panic.
        reason: String,
        /// Last lines of the console.
        console: String,
    },
    /// The guest was stopped at its time limit.
    #[error(
        "the machine was still running after {} s and was stopped: the script hangs, or needs a larger --timeout\n{console}",
        limit.as_secs()
    )]
    Timeout {
        limit: Duration,
        /// Last lines of the console.
        console: String,
    },
    /// The guest ended without an exit code.
    #[error("the machine ended without reporting the script's exit code\n{console}")]
    NoExitCode {
        /// Last lines of the console.
        console: String,
    },
}

impl Error {
    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }
}

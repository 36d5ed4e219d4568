use std::{io, path::PathBuf, process::ExitStatus, time::Duration};

use crate::{Arch, SpecError};

/// Why a script's exit code is not known. Where the guest went wrong, the message ends with its console's tail.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine asked for cannot be.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Nowhere to look for kernels.
    #[error("neither XDG_CACHE_HOME nor HOME holds an absolute path: set one, numaward's cache lives there")]
    NoCacheHome,
    /// Setup has not put this kernel there.
    #[error("kernel {name} is not in the cache ({} is missing): run `cargo xtask setup`", path.display())]
    NoKernel {
        /// As in `--kernel`.
        name: String,
        /// The file looked for.
        path: PathBuf,
    },
    /// Setup has not fetched what guests with this processor need.
    #[error("guests with the processor {arch} need {}, which is missing: run `cargo xtask setup --arch {arch}`", path.display())]
    NoGuestFile {
        /// The processor.
        arch: Arch,
        /// The file looked for.
        path: PathBuf,
    },
    /// The root file system is one for another processor.
    #[error("the root file system is for another processor than {0}; images are only made for amd64")]
    NoDebianFor(Arch),
    /// Setup has not made the root file system with systemd.
    #[error("Debian with systemd is not in the cache ({} is missing): run `cargo xtask setup`", .0.display())]
    NoDebian(PathBuf),
    /// Setup has not installed a program.
    #[error(
        "a program needed to boot virtual machines is missing: {tool} (Debian package {package}); run `cargo xtask setup`"
    )]
    NoTool {
        /// The program.
        tool: &'static str,
        /// Its Debian package.
        package: &'static str,
    },
    /// A file to be copied into the guest.
    #[error("cannot copy {} into the machine: {reason}", path.display())]
    Copy {
        /// On the host.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The host failed us.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// What is written of a disk cannot be read.
    #[error("{} is not the log of a disk: {reason}", path.display())]
    WriteLog {
        /// The log.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// cpio failed.
    #[error("cpio could not pack the machine's initramfs ({status}): {stderr}")]
    Pack {
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        stderr: String,
    },
    /// QEMU itself failed.
    #[error("QEMU failed ({status}): {stderr}")]
    Qemu {
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        stderr: String,
    },
    /// QEMU's monitor refused.
    #[error("QEMU's monitor: {command}: {reason}")]
    Monitor {
        /// What was asked for.
        command: &'static str,
        /// What it said.
        reason: String,
    },
    /// The guest's kernel panicked.
    #[error("the machine's kernel panicked: {reason}\n{console}")]
    Panic {
        /// The line of the console.
        reason: String,
        /// The console's tail.
        console: String,
    },
    /// The guest was stopped at its time limit.
    #[error(
        "the machine was still running after {} s and was stopped: the script hangs, or needs a larger --timeout\n{console}",
        limit.as_secs()
    )]
    Timeout {
        /// The limit.
        limit: Duration,
        /// The console's tail.
        console: String,
    },
    /// The guest ended and no exit code came.
    #[error("the machine ended without reporting the script's exit code\n{console}")]
    NoExitCode {
        /// The console's tail.
        console: String,
    },
}

impl Error {
    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }
}

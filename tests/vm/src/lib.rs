//! Virtual machines with several NUMA nodes.
//!
//! # Problem
//! The effect of a guarantee can only be proven on machines with several nodes, on several kernels, as root, and
//! without a change to the host. Each test therefore boots a machine under QEMU (software emulation, without
//! `/dev/kvm`), runs one shell script in it as root, and returns its exit code.
//!
//! # Terms
//! - The *host* runs QEMU; the *guest* is the system in the virtual machine.
//! - A [`GuestTopology`] describes the nodes of the guest.
//! - A [`Kernel`] was unpacked by `cargo xtask setup`.
//! - A [`Vm`] has both, and the files to copy into the guest.
//!
//! # Algorithm
//! The guest has three serial ports, so that output of a script cannot be mistaken for anything else: the first is the
//! kernel's console (its last lines are part of errors), the second carries the script's output, and the third the line
//! `begun` before the script and the line `exit CODE` after it.
//!
//! A guest has the processor of its kernel ([`Arch`]). The kernel learns the nodes from ACPI's tables or, on Arm, from
//! a device tree ([`Vm::device_tree`]).
//!
//! The first process is a script of this crate, or systemd. With systemd, the root file system is Debian's, and the
//! copied files override it.
//!
//! # Invariants
//! - A guest outlives neither the process that started it nor its time limit.
//! - A run ends with the script's exit code or with an [`Error`].

#![forbid(unsafe_code)]

mod arch;
mod cache;
mod counter;
mod error;
mod image;
mod initramfs;
mod machine;
mod monitor;
mod vm;
mod write_log;

pub use arch::Arch;
pub use cache::{
    Cache, DEBIAN, DEBIAN_ARCHIVE, Debian, GUEST_BUSYBOX, GUEST_FIRMWARE, Kernel, NEW_SOFTWARE,
    PACKAGE_MANAGERS, SOFTWARE, SOFTWARE_IMAGE,
};
pub use error::Error;
pub use machine::{GuestNode, GuestTopology, MEMORY_SLOTS, SpecError};
pub use monitor::Monitor;
pub use vm::{Clock, Forward, HOST_ADDRESS, RESTARTED, RunningVm, Stopper, Vm, find_tool};
pub use write_log::{LogEntry, SECTOR, WriteLog};

/// Programs on the host's PATH (or in `/usr/sbin`, `/sbin`) that are necessary to boot a guest, with their Debian
/// packages. [`Arch::emulator`] is necessary too.
pub const TOOLS: &[(&str, &str)] = &[
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("mkfs.ext4", "e2fsprogs"),
    ("timeout", "coreutils"),
    ("prlimit", "util-linux"),
    ("setpriv", "util-linux"),
    ("zstd", "zstd"),
];

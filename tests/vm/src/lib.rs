//! Virtual machines with several NUMA nodes.
//!
//! The problem: what numaward promises can only be proven on machines with several nodes, on several kernels, as
//! root, and without leaving a trace on the host. So each proof boots a machine under QEMU (software emulation: no
//! `/dev/kvm` is needed), runs one shell script in it as root and takes the exit code home.
//!
//! Terms: the *host* runs QEMU, the *guest* is inside. A [`GuestTopology`] says which nodes the guest has, a [`Kernel`] is
//! one unpacked by `cargo xtask setup`, a [`Vm`] is both with what is copied in.
//!
//! The guest has three serial ports, so that nothing a script prints can be taken for something else: one is the kernel's
//! console (kept, its tail is shown in errors), one carries the script's output, and one the lines `begun` before the
//! script and `exit CODE` after it.
//!
//! A guest has the processor that its kernel is for ([`Arch`]). Nodes come from ACPI's tables or, on Arm, from a device tree
//! where that is wanted ([`Vm::device_tree`]).
//!
//! The first process is a script of ours, or systemd: then the root file system is Debian's, with our files laid over it.
//!
//! Invariants: a guest never outlives the process that started it nor its time limit; the only ways out are the
//! script's exit code and an [`Error`].

#![forbid(unsafe_code)]

mod arch;
mod cache;
mod error;
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
pub use vm::{Forward, HOST_ADDRESS, RESTARTED, RunningVm, Stopper, Vm, find_tool};
pub use write_log::{LogEntry, SECTOR, WriteLog};

/// What must be on the host's PATH (or in `/usr/sbin`, `/sbin`) to boot a guest, with the Debian package of each, and
/// what [`Arch::emulator`] names.
pub const TOOLS: &[(&str, &str)] = &[
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("mkfs.ext4", "e2fsprogs"),
    ("timeout", "coreutils"),
    ("prlimit", "util-linux"),
    ("setpriv", "util-linux"),
];

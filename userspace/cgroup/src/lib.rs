//! cgroup v2: finds the hierarchy, walks and watches it, assigns cgroups to workloads, reads usage, and reads and
//! writes settings.
//!
//! - [`Hierarchy`] is a mounted tree: [`Hierarchy::open`] finds it, [`Hierarchy::walk`] lists its cgroups, and the
//!   readers in [`read`] return the usage of a cgroup.
//! - [`Watcher`] reports new and removed cgroups; [`Notifier`] reports changes of selected ones.
//! - [`classify`] returns the workload of a cgroup.
//! - [`memory_policy`] reads memory policies of threads.
//! - [`knob`] reads and writes settings; [`kernel_features`] lists the features that older kernels do not have.
//!
//! All functions are synchronous. A cgroup may vanish at any moment. This is never an error of a walk or a watch, and a
//! separate variant in the readers' errors ([`ReadError::is_gone`]).
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst.

#![forbid(unsafe_code)]

pub mod affinity;
mod files;
mod gone;
mod hierarchy;
mod inotify;
pub mod kernel_features;
pub mod knob;
mod knob_watch;
mod lock;
pub mod memory_policy;
mod mounts;
mod notify;
mod path;
pub mod read;
mod subtree;
mod tracking_limits;
mod truncated_lines;
mod unescape;
mod watch;
mod workload;

pub use files::{
    is_trusted_user, make_private_dir, open_protected, read_lossy, read_open_text, read_text, replace_file,
};
pub use hierarchy::{Cgroup, Hierarchy, OpenError, WalkError};
pub use knob_watch::{KnobEvent, KnobWatch, KnobWatchError, KnobWriter};
pub use lock::{HierarchyLock, LockError};
pub use mounts::{MountsError, has_controller};
pub use notify::{Notice, Notifier, NotifyError, WatchSubject};
pub use path::{CgroupId, CgroupPath, PathError};
pub use read::ReadError;
pub use truncated_lines::TruncatedLines;
pub use unescape::unescape;
pub use watch::{CgroupEvent, WatchMode, WatchOptions, Watcher};
pub use workload::{
    CgroupWorkload, ContainerIdentity, EXEC_PARENT, NameKeeper, RUNTIMES, WorkloadKind, classify, owner_of,
    pod_cgroup,
};

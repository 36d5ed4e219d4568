//! cgroup v2: find the hierarchy, walk and watch it, distinguish workloads, read and write.
//!
//! - [`Hierarchy`] is a mounted tree: [`Hierarchy::open`] finds it, [`Hierarchy::walk`] lists its cgroups, and the
//!   readers ([`read`]) give what a cgroup uses.
//! - [`Watcher`] reports which cgroups came and went; [`Notifier`] what changes in chosen ones.
//! - [`classify`] says to which workload a cgroup belongs.
//! - [`knob`] reads and writes settings; [`kernel_features`] says which of them older kernels do not have.
//!
//! Everything is synchronous. A cgroup may vanish at any moment: that is never a failure of a walk or a
//! watch, and a variant of its own in the readers' errors ([`ReadError::is_gone`]).
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst.

#![forbid(unsafe_code)]

pub mod affinity;
mod census;
mod gone;
mod hierarchy;
mod inotify;
pub mod kernel_features;
pub mod knob;
mod knob_watch;
mod lock;
mod mounts;
mod notify;
mod path;
pub mod read;
mod truncated_lines;
mod unescape;
mod watch;
mod workload;

pub use hierarchy::{Cgroup, Hierarchy, OpenError, WalkError};
pub use knob_watch::{KnobEvent, KnobWatch, KnobWatchError, KnobWriter};
pub use lock::{HierarchyLock, LockError};
pub use mounts::MountsError;
pub use notify::{Notice, Notifier, NotifyError, WatchSubject};
pub use path::{CgroupId, CgroupPath, PathError};
pub use read::ReadError;
pub use truncated_lines::TruncatedLines;
pub use unescape::unescape;
pub use watch::{CgroupEvent, WatchMode, WatchOptions, Watcher};
pub use workload::{CgroupWorkload, ContainerIdentity, EXEC_PARENT, RUNTIMES, WorkloadKind, classify};

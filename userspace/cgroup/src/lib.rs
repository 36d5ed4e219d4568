//! cgroup v2: find the hierarchy, walk and watch it, distinguish workloads, read and write.
//!
//! - [`Hierarchy`] is a mounted tree: [`Hierarchy::open`] finds it, [`Hierarchy::walk`] lists its cgroups, and the
//!   readers ([`read`]) give what a cgroup uses.
//! - [`Watcher`] reports which cgroups came and went; [`Notifier`] what changes in chosen ones.
//! - [`classify`] says to which workload a cgroup belongs.
//! - [`knob`] reads and writes settings; [`needs`] says which of them older kernels do not have.
//!
//! Everything is synchronous. A cgroup may vanish at any moment: that is never a failure of a walk or a
//! watch, and a variant of its own in the readers' errors ([`ReadError::is_gone`]).
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst.

#![forbid(unsafe_code)]

pub mod affinity;
mod census;
mod cut_lines;
mod gone;
mod hierarchy;
mod inotify;
pub mod knob;
mod knob_watch;
mod lock;
mod mounts;
pub mod needs;
mod notify;
mod path;
pub mod read;
mod unescape;
mod watch;
mod workload;

pub use cut_lines::CutLines;
pub use hierarchy::{Cgroup, Hierarchy, OpenError, WalkError};
pub use knob_watch::{KnobWatch, KnobWatchError, Touched, Writer};
pub use lock::{HierarchyLock, LockError};
pub use mounts::MountsError;
pub use notify::{Notice, Notifier, NotifyError, Subject};
pub use path::{CgroupId, CgroupPath, PathError};
pub use read::ReadError;
pub use unescape::unescape;
pub use watch::{Event, WatchMode, WatchOptions, Watcher};
pub use workload::{Container, EXEC_PARENT, RUNTIMES, Workload, WorkloadKind, classify};

//! Reads the machine from sysfs and procfs.
//!
//! Every function takes the root directory that contains `sys` and `proc`: `/` in production, a directory of fixtures
//! in tests, `/host` in a container with the host's trees.
//!
//! # Required and optional files
//! - Required: the list of online CPUs; on a kernel with NUMA also the list of online nodes, and the CPUs and the
//!   memory of each.
//! - Optional, because a platform or kernel may not have them: caches (in virtual machines), distances, hugepages,
//!   memory blocks, isolated CPUs, package ids. They are absent in the result or get the kernel's default.
//! - A file with malformed content is always an error: [`ReadError`] has its path, its content and the expected format.
//!
//! A kernel without `CONFIG_NUMA` has no node directory; the whole machine then is node 0.
//!
//! Sources: Documentation/ABI/stable/sysfs-devices-node, Documentation/ABI/stable/sysfs-devices-system-cpu,
//! Documentation/ABI/testing/sysfs-devices-memory, Documentation/admin-guide/cputopology.rst,
//! Documentation/admin-guide/mm/hugetlbpage.rst, `proc_meminfo(5)`.

mod device;
mod events;
mod machine;
mod memory;
mod source;
mod zones;

pub use device::device_node;
pub use events::allocated_pages;
pub use machine::{memory_tiers, offline_cpus, read, read_again};
pub use memory::{NodeMeminfo, failed_pages, node_memory};
pub use source::ReadError;
pub use zones::{Watermarks, watermarks};

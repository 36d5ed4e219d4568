//! Reads the machine from sysfs and procfs.
//!
//! Every function takes the root directory under which `sys` and `proc` are found: `/` in production, a
//! directory of fixtures in tests, `/host` in a container that has the host's trees mounted there.
//!
//! What must be there: the list of online CPUs, and on a kernel with NUMA the list of online nodes with the
//! CPUs and the memory of each. What a platform or kernel may not have (caches in virtual machines, distances,
//! hugepages, memory blocks, isolated CPUs, package ids) is absent or gets the kernel's own default. A file
//! that is there but makes no sense is always an error: [`ReadError`] names it, shows its content and says
//! what was expected.
//!
//! A kernel without `CONFIG_NUMA` has no node directory; the machine then is node 0.
//!
//! Sources: Documentation/ABI/stable/sysfs-devices-node, Documentation/ABI/stable/sysfs-devices-system-cpu,
//! Documentation/ABI/testing/sysfs-devices-memory, Documentation/admin-guide/cputopology.rst,
//! Documentation/admin-guide/mm/hugetlbpage.rst, `proc_meminfo(5)`.

mod machine;
mod memory;
mod source;
mod zones;

pub use machine::{memory_tiers, offline_cpus, read, read_again};
pub use memory::{NodeMeminfo, node_memory};
pub use source::ReadError;
pub use zones::{Watermarks, watermarks};

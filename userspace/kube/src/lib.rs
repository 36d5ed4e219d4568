//! Kubernetes: containers are placed at their creation.
//!
//! - [`nri`]: the Node Resource Interface plugin, through which the container runtime asks where a container
//!   shall run, and through which running containers are moved.
//! - [`pod`]: pods as the API server describes them.
//! - [`cgroup_path`]: where the cgroups of pods and containers are, for both cgroup drivers.

#![forbid(unsafe_code)]

pub mod cgroup_path;
pub mod nri;
pub mod pod;

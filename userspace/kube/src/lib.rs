//! Kubernetes: containers are placed at their creation.
//!
//! - [`node_topology`]: what is free on each NUMA node, published for the scheduler.
//! - [`nri`]: the Node Resource Interface plugin, through which the container runtime asks where a container
//!   are to run, and through which running containers are moved.
//! - [`api`]: the API server: pods, events.
//! - [`pod`]: pods as the API server describes them.
//! - [`pod_resources`]: the API over which the kubelet reports what it assigned, and numaward what it did.
//! - [`cgroup_path`]: where the cgroups of pods and containers are, for both cgroup drivers.

#![forbid(unsafe_code)]

pub mod api;
pub mod cgroup_path;
pub mod node_topology;
pub mod nri;
pub mod pod;
pub mod pod_resources;

//! Integration with Kubernetes: containers are placed when they are created.
//!
//! - [`dra`]: NUMA nodes as devices of resource claims.
//! - [`node_topology`]: free resources of each NUMA node, published for the scheduler.
//! - [`nri`]: the Node Resource Interface plugin, through which the container runtime asks for the placement of new
//!   containers, and through which running containers are moved.
//! - [`api`]: client of the API server: pods, events.
//! - [`pod`]: pods as the API server describes them.
//! - [`pod_resources`]: the API through which the kubelet, and likewise numaward, reports assigned resources.
//! - [`local_http2`]: Unix sockets for gRPC clients that send no valid authority.
//! - [`cgroup_path`]: cgroup paths of pods and containers, for both cgroup drivers.

#![forbid(unsafe_code)]

pub mod api;
pub mod cgroup_path;
pub mod dra;
mod grpc_service;
pub mod local_http2;
pub mod node_topology;
pub mod nri;
pub mod pod;
pub mod pod_resources;

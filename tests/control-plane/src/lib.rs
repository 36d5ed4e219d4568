//! A control plane of Kubernetes that runs on this host, for tests and benchmarks.
//!
//! It depends on no crate of the workspace. The programs come from a folder that the user names: they are not part of the repository.

#![forbid(unsafe_code)]
#![expect(clippy::panic, clippy::unwrap_used, clippy::missing_panics_doc, reason = "a library of tests")]

pub mod authority;
pub mod control_plane;

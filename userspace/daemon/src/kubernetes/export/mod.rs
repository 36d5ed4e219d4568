//! What is assigned, told to others in their own words.
//!
//! Others are agents on this host, by the PodResources API, and the cluster's scheduler, by a NodeResourceTopology.
//! Both are made of one source: the [`api::Allocations`] that `status` prints. So all of them tell the same.

pub mod assigned;
pub mod free;

pub use numaward_control::View;

/// A list as the API writes it; one that cannot be read is empty.
fn list<T: std::str::FromStr + Default>(text: &str) -> T {
    text.parse().unwrap_or_default()
}

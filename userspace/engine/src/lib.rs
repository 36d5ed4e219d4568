//! The engine: decides which containers get which CPUs and which memory, on which NUMA nodes.
//!
//! Everything in this crate is a pure function of its arguments: no files, no clock, no threads, no logging. A
//! strategy is made for one machine and one configuration. It takes a ledger and a request, and returns a decision
//! together with the next ledger.
//!
//! | module | contents |
//! |---|---|
//! | [`quantity`], [`request`], [`qos`], [`terms`], [`preferences`] | requests |
//! | [`policy`] | the configuration and its errors |
//! | [`ledger`] | the guarantees of all workloads |
//! | [`conditions`] | the state of the host outside the ledger |
//! | [`moves`], [`in_flight`] | plans of container moves, and the accounting while they are executed |
//! | [`strategy`], [`decision`] | the interface of a strategy, and its answers |
//! | [`hint`], [`explain`], [`placement_search`] | explanations of decisions |
//! | [`kubelet`] | the strategy that repeats the kubelet's decisions |
//! | [`native`] | the strategy with the same policies but without the kubelet's defects |
//! | [`claims`] | devices for resource claims, and their allocation by the scheduler |
//! | [`memory_qos`] | memory settings of cgroups |
//! | [`checkpoint`] | the kubelet's state files |
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use numaward_engine::{
//!     KubeletStrategy, PolicyConfig, Request, Resources, Strategy,
//!     policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation, TopologyManagerPolicy},
//! };
//! use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};
//!
//! let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).smt(2).memory(Bytes::gib(8)).build()?;
//! let config = PolicyConfig {
//!     memory_manager_policy: MemoryManagerPolicy::Static,
//!     reserved_memory: vec![MemoryReservation {
//!         numa_node: NodeId(0),
//!         limits: BTreeMap::from([(ZoneKind::Memory, "1Gi".parse()?)]),
//!     }],
//!     cpu_manager_policy: CpuManagerPolicy::Static,
//!     cpu_reservation: Some("500m".parse()?),
//!     topology_manager_policy: TopologyManagerPolicy::SingleNumaNode,
//!     ..PolicyConfig::default()
//! };
//! let strategy = KubeletStrategy::new(&machine, &config)?;
//! let ledger = strategy.idle();
//!
//! // Node 0 has 7 GiB free, node 1 has 8 GiB.
//! let resources = Resources::none().with_cpu("2".parse()?).with_memory("8Gi".parse()?);
//! let decision = strategy.admit(&ledger, &Request::workload("database", resources));
//! let grants = decision.outcome?;
//! assert_eq!(grants[0].allocation.memory_nodes().to_string(), "1");
//! assert_eq!(grants[0].allocation.cpus.as_ref().map(ToString::to_string), Some("4,12".to_owned()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod claims;
pub mod conditions;
mod cores;
pub mod decision;
pub mod explain;
pub mod hint;
pub mod in_flight;
pub mod kubelet;
pub mod ledger;
pub mod memory_qos;
pub mod moves;
pub mod native;
pub mod placement_search;
pub mod policy;
mod policy_names;
pub mod preferences;
pub mod qos;
pub mod quantity;
mod rebase;
pub mod request;
pub mod strategy;
pub mod terms;

pub use checkpoint::CheckpointError;
pub use conditions::HostConditions;
pub use decision::{Cause, Decision, Grant, Reason, Rejection, ResizeError, Shortfall};
pub use kubelet::KubeletStrategy;
pub use ledger::{Allocation, Ledger, MemoryBlock, OwnerAccount, PodAllocation};
pub use moves::{ContainerMove, PlanError, RebalanceLimits, RebalancePlan};
pub use native::{NativeOptions, NativeStrategy};
pub use policy::{PolicyConfig, StartError};
pub use preferences::PlacementPreferences;
pub use qos::QosClass;
pub use quantity::Quantity;
pub use rebase::{AdoptError, UncoveredMemory};
pub use request::{ContainerName, ContainerRequest, OwnerId, PodId, PodResources, Request, Resources};
pub use strategy::{Allocatable, DecisionStage, Strategy};
pub use terms::Terms;

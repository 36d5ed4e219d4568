//! The engine: who gets which CPUs and memory on which NUMA nodes.
//!
//! Everything here is a pure function of values: no files, no clock, no threads, no logging. A strategy is made
//! of a machine and a configuration; it reads a ledger and a request and gives a decision with the ledger
//! afterwards.
//!
//! | module | what |
//! |---|---|
//! | [`quantity`], [`request`], [`qos`], [`terms`], [`preferences`] | what is asked for |
//! | [`policy`] | the configuration and its faults |
//! | [`ledger`] | what is promised |
//! | [`conditions`] | what the host says now, beside what is promised |
//! | [`moves`], [`in_flight`] | moves that make room, and what is charged for while they are made |
//! | [`strategy`], [`decision`] | the interface of a strategy, and its answers |
//! | [`hint`], [`explain`], [`placement_search`] | why an answer came out as it did |
//! | [`kubelet`] | the strategy that decides as the kubelet does |
//! | [`native`] | the strategy that keeps the same promises without the kubelet's faults |
//! | [`simulation`] | replays of recorded traces and fault scenarios |
//! | [`memory_qos`] | the cgroup settings that follow for memory |
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
//! // Seven gibibytes are left on node 0 and eight on node 1.
//! let resources = Resources::none().with_cpu("2".parse()?).with_memory("8Gi".parse()?);
//! let decision = strategy.admit(&ledger, &Request::workload("database", resources));
//! let grants = decision.outcome?;
//! assert_eq!(grants[0].allocation.memory_nodes().to_string(), "1");
//! assert_eq!(grants[0].allocation.cpus.as_ref().map(ToString::to_string), Some("4,12".to_owned()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod checkpoint;
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
pub mod simulation;
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
pub use request::{ContainerName, ContainerRequest, OwnerId, PodResources, Request, Resources};
pub use strategy::{Allocatable, DecisionStage, Strategy};
pub use terms::Terms;

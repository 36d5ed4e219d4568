//! End-to-end tests: `cargo xtask vm test [NAME…]` runs them on one kernel after the other.

#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, which clippy does not take for tests"
)]

mod answers;
mod book;
mod budgets;
mod cgroup_v1;
mod chaos;
mod cluster;
mod containerd;
mod cpu_kinds;
mod cpu_power;
mod crash;
mod daemon;
mod deploy;
mod doors;
mod enforce;
mod faults;
mod guarantee;
mod guard;
mod guides;
mod harm;
mod herd;
mod home;
mod host;
mod hot;
mod hotplug;
mod hugepages;
mod interrupts;
mod kernels;
mod load;
mod machine;
mod memory_policy;
mod numactl;
mod observe;
mod package;
mod packages;
mod power;
mod probes;
mod rebalance;
mod reconcile;
mod resize;
mod soak;
mod stacks;
mod systemd;
mod tiers;
mod uninstall;
mod weights;

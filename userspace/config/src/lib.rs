//! The configuration: a YAML file, overridden by those of the Kubernetes node's group and of the node, by `NUMAWARD_*` variables, and by
//! flags.
//!
//! All of them are merged into one tree with the source of each value (`tree.rs`). The tree is checked against the JSON
//! schema of [`Config`] for unknown keys and ranges. Then serde deserializes it: each invalid value is reported and
//! removed until the rest is valid. So one run reports every error, each with its line, variable or flag.
//!
//! This crate does not read the environment or the command line: the caller passes both in [`Sources`].

pub mod cluster;
mod config;
mod control;
pub mod cpu_power;
mod drop_ins;
pub mod enforcement;
pub mod exported;
mod flag_forms;
pub mod guard;
pub mod home;
mod inline_schema;
pub mod interleave_weights;
mod kubelet_keys;
pub mod kubernetes;
mod load;
pub mod memory_qos;
mod node_scope;
mod origins;
pub mod outgoing;
pub mod policy;
mod problem;
pub mod rebalance;
pub mod resctrl;
mod schema;
mod tree;
mod types;
mod view;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use self::{
    cluster::OperatingMode,
    config::{
        AllocationProbe, CallChains, Config, HardwareProbe, Log, Observe, ProbeSwitch, Probes,
        RemoteEstimate, StallProbe,
    },
    control::{AccessCredentials, Control, Tls},
    kubelet_keys::gate_problems,
    load::{
        CLIENT_VARIABLES, CheckedFiles, DEFAULT_FILE, FILE_VARIABLE, Flag, LoadedConfig, Sources,
        VARIABLE_PREFIX, check, key_variables, load, read_yaml,
    },
    node_scope::NodeScope,
    origins::{ChangedKey, SourcedValue},
    problem::{Origin, Position, Problem, Problems},
    schema::json_schema,
    tree::Origins,
    types::{DutyCycle, HttpUrl, Interval, ListenAddress, LogFormat, LogLevel},
    view::yaml,
};

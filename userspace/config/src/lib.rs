//! The configuration: a YAML file, then `NUMAWARD_*` variables, then flags; later ones win.
//!
//! All three become one tree that knows where each value was given (`tree.rs`). The tree is held
//! against the JSON schema that is generated from [`Config`] (unknown keys, ranges), then read by
//! serde as often as it takes: each value that does not fit is reported and taken out, until the rest
//! fits. So one run reports every error, each with its line, variable or flag.
//!
//! Nothing here reads the environment or the command line: the caller passes both in [`Sources`].

pub mod cluster;
mod config;
mod control;
pub mod cpu_power;
pub mod enforcement;
pub mod exported;
mod flag_forms;
pub mod guard;
pub mod home;
mod inline_schema;
pub mod interleave_weights;
pub mod kubernetes;
mod load;
pub mod memory_qos;
pub mod outgoing;
mod pasted;
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
    load::{
        CLIENT_VARIABLES, DEFAULT_FILE, FILE_VARIABLE, Flag, LoadedConfig, Sources, VARIABLE_PREFIX, load,
        read_yaml,
    },
    pasted::gate_problems,
    problem::{Origin, Position, Problem, Problems},
    schema::json_schema,
    types::{DutyCycle, HttpUrl, Interval, ListenAddress, LogFormat, LogLevel},
    view::yaml,
};

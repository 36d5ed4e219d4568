//! Simulation: replays of pod traces, to compare the admissions and placements of strategies.
//!
//! Everything here is a pure function of its arguments, as in the engine. The caller passes parsed traces.
//!
//! | module | content |
//! |---|---|
//! | [`mod@format`] | formats of machines, configurations and pods |
//! | [`trace`] | traces of pods, and the recorded outcomes of the kubelet |
//! | [`replay`] | replay of a trace with a strategy on one machine |
//! | [`quality`] | quality of the placements, and fragmentation |
//! | [`variant`] | strategies with the options that are compared |
//! | [`fleet`] | many equal hosts, and a scheduler that selects one for each pod |

#![forbid(unsafe_code)]

pub mod fleet;
pub mod format;
pub mod quality;
pub mod replay;
pub mod trace;
pub mod variant;

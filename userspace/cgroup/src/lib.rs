//! cgroup v2: knobs.

#![forbid(unsafe_code)]

pub mod knob;

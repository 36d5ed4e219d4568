//! What the kernel gives, read from any bytes: for the fuzz targets.

use numaward_topology::NodeId;

use crate::{ProbeEvent, btf::Structures, event};

/// What the records of a ring buffer say: an OOM kill, a miss or a long stall, as far as the bytes have its size.
pub fn parse_events(bytes: &[u8]) -> [Option<ProbeEvent>; 3] {
    let nodes = [NodeId(0), NodeId(4)];
    [event::oom_kill(bytes), event::miss(bytes, &nodes), event::long_stall(bytes)]
}

/// Reads a description of the kernel's types; the error says what is wrong with it.
pub fn parse_btf(btf: &[u8]) -> Result<(), String> {
    Structures::from_btf(btf).map(drop).map_err(|error| error.to_string())
}

//! Parsers of the kernel's data, for the fuzz targets.

use numaward_topology::NodeId;

use crate::{ProbeEvent, btf::Structures, event};

/// Decodes a record of a ring buffer as OOM kill, miss and long stall. `None` if the size does not match.
pub fn parse_events(bytes: &[u8]) -> [Option<ProbeEvent>; 3] {
    let nodes = [NodeId(0), NodeId(4)];
    [event::oom_kill(bytes), event::miss(bytes, &nodes), event::long_stall(bytes)]
}

/// Parses the kernel's BTF.
pub fn parse_btf(btf: &[u8]) -> Result<(), String> {
    Structures::from_btf(btf).map(drop).map_err(|error| error.to_string())
}

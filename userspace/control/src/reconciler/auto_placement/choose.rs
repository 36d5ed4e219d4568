//! Which node a workload is to be at home on.
//!
//! Algorithm: a node will do if its CPUs that are exclusive to nobody suffice for what the workload uses, beside what those
//! use that have their home there, and if its memory has room for what is elsewhere. Of those that will do, the best are those
//! where most of its memory is and most of its accesses go, in steps of a twentieth; then the one to which the least has to be
//! moved; then the one with the most CPUs left, and the most memory.

use std::cmp::Reverse;

use numaward_topology::{Bytes, NodeId};

use super::measure::Measured;
use crate::metrics::homes::HomeRefusal;

/// Of a node's CPUs, so many percent may be in use by those at home there.
const FULL: u64 = 80;
/// Scores of 2000 at most that differ by less are the same.
const STEP: u32 = 100;

/// A node that may be a home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The node.
    pub(super) node: NodeId,
    /// Its CPUs that are exclusive to nobody, in thousandths.
    pub(super) cpus: u64,
    /// What those use that are at home there, likewise.
    pub(super) used: u64,
    /// How much memory it has room for.
    pub(super) room: Bytes,
}

impl Place {
    fn cpus_left(&self) -> u64 {
        (self.cpus * FULL / 100).saturating_sub(self.used)
    }

    /// Somebody who uses so much is at home there.
    pub(super) fn take(&mut self, cpu: u64, bytes: Bytes) {
        self.used = self.used.saturating_add(cpu);
        self.room.0 = self.room.0.saturating_sub(bytes.0);
    }
}

/// The best node for a workload, and how much of its memory is elsewhere.
pub(super) fn choose(of: &Measured, places: &[Place]) -> Result<(NodeId, Bytes), HomeRefusal> {
    let elsewhere = |place: &Place| Bytes(of.total().0.saturating_sub(of.on(place.node).0));
    let with_cpus: Vec<&Place> = places.iter().filter(|place| place.cpus_left() >= of.cpu).collect();
    if with_cpus.is_empty() {
        return Err(HomeRefusal::Cpus);
    }
    let fitting = with_cpus.into_iter().filter(|place| elsewhere(place) <= place.room);
    let best = fitting.min_by_key(|place| {
        let left = (Reverse(place.cpus_left()), Reverse(place.room));
        (Reverse(of.score(place.node) / STEP), elsewhere(place), left, place.node)
    });
    best.map(|place| (place.node, elsewhere(place))).ok_or(HomeRefusal::Memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(node: u32, cpus: u64, room: u64) -> Place {
        Place { node: NodeId(node), cpus: cpus * 1000, used: 0, room: Bytes::mib(room) }
    }

    /// A workload with this memory in MiB on nodes 0 and 1, so many accesses to each, and so much CPU time.
    fn workload(mib: [u64; 2], memory: [u64; 2], cpu: u64) -> Measured {
        let nodes = || [0, 1].map(NodeId).into_iter();
        Measured {
            accesses: 1000,
            remote: 500,
            memory: nodes().zip(memory).collect(),
            cpu,
            resident: nodes().zip(mib.map(Bytes::mib)).collect(),
        }
    }

    #[test]
    fn the_home_is_where_most_of_the_memory_is_and_is_used() {
        let places = [place(0, 4, 1000), place(1, 4, 1000)];
        let of = |mib, memory| choose(&workload(mib, memory, 500), &places).unwrap();
        assert_eq!(of([100, 300], [5, 5]), (NodeId(1), Bytes::mib(100)));
        assert_eq!(of([300, 100], [5, 5]), (NodeId(0), Bytes::mib(100)));
        assert_eq!(of([200, 200], [9, 1]), (NodeId(0), Bytes::mib(200)), "accesses decide");
        assert_eq!(of([220, 180], [0, 1000]), (NodeId(1), Bytes::mib(220)), "they outweigh some memory");
        assert_eq!(of([204, 200], [0, 0]), (NodeId(0), Bytes::mib(200)), "the least has to be moved");
        let uneven = [place(0, 4, 1000), place(1, 8, 1000)];
        assert_eq!(
            choose(&workload([200, 200], [5, 5], 500), &uneven).unwrap().0,
            NodeId(1),
            "more CPUs are left"
        );
        let uneven = [place(0, 4, 1000), place(1, 4, 1001)];
        assert_eq!(
            choose(&workload([200, 200], [5, 5], 500), &uneven).unwrap().0,
            NodeId(1),
            "more memory is left"
        );
    }

    #[test]
    fn a_node_has_to_have_the_cpus_and_the_room() {
        let of = workload([100, 300], [1, 9], 1600);
        assert_eq!(choose(&of, &[place(0, 2, 1000), place(1, 2, 1000)]).unwrap().0, NodeId(1));
        assert_eq!(
            choose(&of, &[place(0, 2, 1000), place(1, 1, 1000)]).unwrap().0,
            NodeId(0),
            "the second best"
        );
        assert_eq!(choose(&of, &[place(0, 1, 1000), place(1, 1, 1000)]), Err(HomeRefusal::Cpus));
        assert_eq!(choose(&of, &[place(0, 2, 299), place(1, 1, 1000)]), Err(HomeRefusal::Memory));
        assert_eq!(choose(&of, &[]), Err(HomeRefusal::Cpus));
        let more = Measured { cpu: 1601, ..of };
        assert_eq!(choose(&more, &[place(1, 2, 1000)]), Err(HomeRefusal::Cpus), "some CPUs stay free");
    }

    #[test]
    fn two_are_not_both_placed_where_one_fits() {
        let mut places = [place(0, 2, 1000), place(1, 2, 150)];
        let of = workload([100, 300], [1, 9], 900);
        let (node, bytes) = choose(&of, &places).unwrap();
        assert_eq!(node, NodeId(1));
        places[1].take(of.cpu, bytes);
        assert_eq!(choose(&of, &places).unwrap().0, NodeId(0));
        let light = Measured { cpu: 100, ..of };
        assert_eq!(choose(&light, &places).unwrap().0, NodeId(0), "it has the CPUs, but not the memory");
    }
}

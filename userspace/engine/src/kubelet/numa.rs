//! Distances between the NUMA nodes of a machine, by position.

use numaward_topology::Machine;

use crate::{
    hint::{Mask, NodeIndex, positions},
    policy::StartProblem,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Distances {
    rows: Vec<Vec<u32>>,
}

impl Distances {
    /// Reads the distances of a machine. Fails if one is unknown.
    pub(crate) fn new(machine: &Machine, nodes: &NodeIndex) -> Result<Self, StartProblem> {
        let row = |&from| {
            nodes
                .ids()
                .iter()
                .map(|&to| machine.distance(from, to).ok_or(StartProblem::NoDistances { from, to }))
                .collect()
        };
        Ok(Self { rows: nodes.ids().iter().map(row).collect::<Result<_, _>>()? })
    }

    /// Returns the sum of the distances over all ordered pairs of nodes, including each node to itself.
    pub(crate) fn sum(&self, mask: Mask) -> u64 {
        positions(mask)
            .filter_map(|from| self.rows.get(from))
            .flat_map(|row| positions(mask).filter_map(|to| row.get(to)))
            .map(|&distance| u64::from(distance))
            .sum()
    }
}

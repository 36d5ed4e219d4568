//! Reads the costs of the probes without access to [`Probes`](crate::Probes), from `/proc/self/fdinfo` of their
//! programs.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
    time::Duration,
};

use aya::maps::{Array, MapData};

use crate::{Probe, ProbeStats, sys};

/// The programs of a family by probe, and the map that counts lost events.
pub(crate) struct FamilyCosts {
    pub(crate) programs: Vec<(Probe, OwnedFd)>,
    pub(crate) lost: Option<Arc<Array<MapData, u64>>>,
}

/// Handles of all loaded programs.
#[derive(Default)]
pub struct CostReader(pub(crate) Vec<FamilyCosts>);

impl CostReader {
    /// Returns the cost of each probe so far, attached or not. Lost events are booked to the first probe of their
    /// family.
    pub fn read(&self) -> io::Result<Vec<ProbeStats>> {
        let stats = self.0.iter().map(FamilyCosts::read).collect::<io::Result<Vec<_>>>()?;
        Ok(stats.concat())
    }
}

impl FamilyCosts {
    fn read(&self) -> io::Result<Vec<ProbeStats>> {
        let mut all: Vec<ProbeStats> = Vec::new();
        for (probe, program) in &self.programs {
            let field = sys::fdinfo(program.as_fd())?;
            let stats = ProbeStats {
                probe: *probe,
                run_time: Duration::from_nanos(field("run_time_ns").unwrap_or(0)),
                run_count: field("run_cnt").unwrap_or(0),
                events_lost: field("recursion_misses").unwrap_or(0),
            };
            match all.iter_mut().find(|sum| sum.probe == *probe) {
                Some(sum) => {
                    sum.run_time += stats.run_time;
                    sum.run_count += stats.run_count;
                    sum.events_lost += stats.events_lost;
                }
                None => all.push(stats),
            }
        }
        if let (Some(first), Some(lost)) = (all.first_mut(), &self.lost) {
            first.events_lost += lost.get(&0, 0).map_err(io::Error::other)?;
        }
        Ok(all)
    }
}

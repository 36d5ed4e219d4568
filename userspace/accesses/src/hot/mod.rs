//! Areas of a workload's memory by how often they are accessed, with the nodes of their pages.
//!
//! The kernel's monitor (DAMON) checks one page of each area of a process 200 times a second, and splits and joins
//! areas by the results. It does not report the CPU of an access, so the remote share is an estimate: it assumes that
//! each area is accessed from the nodes on which the threads of its process run, in proportion to their CPU time.

mod damon;
mod node_cpu_time;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    path::Path,
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::bail;
use numaward_api::{RegionNode, safe_text::clean};
use serde::Serialize;
use serde_with_macros::skip_serializing_none;
use tokio::time::interval;

use self::{
    damon::{AGGREGATION_MICROS, CHECKS_PER_AGGREGATION, MonitoredArea, Monitors},
    node_cpu_time::NodeCpuTime,
};
use crate::{
    NodeShare,
    maps::{self, MappedRegion},
    processes::WorkloadProcesses,
    sys,
};

/// Maximum number of monitored processes, as each one costs a kernel thread. Those with the most memory are chosen.
const MAX_PROCESSES: usize = 16;
/// Number of pages of an area for which the node is looked up.
const SAMPLED_PAGES: u64 = 64;
/// Number of pages that are looked up if none of the first ones is in memory, but some were accessed.
const MAX_SAMPLED_PAGES: u64 = 4096;

/// Areas of a workload's memory, with how often they were accessed.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HotAreas {
    /// Duration of the monitoring in seconds.
    pub seconds: f64,
    pub processes: Vec<MonitoredProcess>,
    /// Missing parts, with the reasons.
    pub notes: Vec<String>,
    /// Areas with memory, most accessed first.
    pub areas: Vec<HotArea>,
}

/// A process that was monitored.
#[skip_serializing_none]
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MonitoredProcess {
    pub pid: u32,
    pub command: String,
    /// Nodes where its threads ran; empty if they used too little CPU time.
    pub ran_on: Vec<NodeShare>,
    /// CPU time of its monitor's kernel thread; absent if the kernel does not provide it.
    pub monitor_millis: Option<u64>,
}

/// Pages of a mapping that are accessed about equally often.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HotArea {
    pub pid: u32,
    /// Name as in the regions: `[heap]`, `[stack]`, `[anonymous]`, or a file.
    pub region: String,
    /// First address, and the one after the last, in hexadecimal.
    pub start: String,
    pub end: String,
    /// Share of the checks, which are 5 ms apart, that found a page accessed since the previous check.
    pub accessed_percent: f64,
    /// Time for which the accesses have been stable.
    pub age_seconds: f64,
    /// Memory by node, estimated from some of the pages; empty if none of these is in memory.
    pub nodes: Vec<RegionNode>,
    /// Estimated share of accesses across nodes; absent if the nodes of the threads are not known.
    pub remote_percent: Option<f64>,
}

impl HotArea {
    /// Returns the bytes in memory.
    pub fn bytes(&self) -> u64 {
        self.nodes.iter().map(|part| part.bytes).sum()
    }

    /// Returns the value that areas are sorted by: bytes weighted with the frequency of accesses.
    #[expect(clippy::cast_precision_loss, reason = "only for sorting")]
    fn weight(&self) -> f64 {
        self.accessed_percent * self.bytes() as f64
    }
}

/// Monitors the processes of a workload until `over` ends.
pub async fn watch(workload: &WorkloadProcesses, over: impl Future<Output = ()>) -> anyhow::Result<HotAreas> {
    let mut notes = BTreeSet::new();
    let processes = largest(workload.processes(&mut notes)?, &mut notes);
    let pids: Vec<u32> = processes.iter().map(|(pid, _)| *pid).collect();
    let mut cpu_time = NodeCpuTime::new(&numaward_topology::sysfs::read(Path::new("/"))?);
    let began = Instant::now();
    let mut monitors = Monitors::start(Path::new("/"), &pids)?;
    let mut over = pin!(over);
    let mut seconds = interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = seconds.tick() => cpu_time.sample(&pids),
            () = &mut over => break,
        }
    }
    cpu_time.sample(&pids);
    let mut hot = HotAreas { seconds: began.elapsed().as_secs_f64(), ..HotAreas::default() };
    for (at, (pid, command)) in processes.into_iter().enumerate() {
        let monitor_millis = monitors.thread(at).and_then(node_cpu_time::cpu_millis);
        let ran_on = cpu_time.shares(pid);
        match monitors.areas(at).map_err(anyhow::Error::from).and_then(|found| areas(pid, &found, &ran_on)) {
            Ok(areas) => hot.areas.extend(areas),
            Err(error) => {
                notes.insert(format!("process {pid} ({}) is not included: {error:#}", clean(&command)));
                continue;
            }
        }
        hot.processes.push(MonitoredProcess { pid, command, ran_on, monitor_millis });
    }
    drop(monitors);
    if hot.processes.is_empty() {
        bail!("{}", notes.into_iter().collect::<Vec<_>>().join("; "));
    }
    hot.areas.sort_by(|one, other| other.weight().total_cmp(&one.weight()));
    hot.notes = notes.into_iter().collect();
    Ok(hot)
}

/// Returns the processes with the most memory, and adds a note if there are more.
fn largest(mut processes: Vec<(u32, String)>, notes: &mut BTreeSet<String>) -> Vec<(u32, String)> {
    if let Some(rest) = processes.len().checked_sub(MAX_PROCESSES).filter(|rest| *rest > 0) {
        notes.insert(format!(
            "only the {MAX_PROCESSES} processes with the most memory are included: there are {rest} more"
        ));
        processes.truncate(MAX_PROCESSES);
    }
    processes
}

/// Returns the areas of a process that have memory, split at the ends of its mappings.
fn areas(pid: u32, found: &[MonitoredArea], ran_on: &[NodeShare]) -> anyhow::Result<Vec<HotArea>> {
    let maps = maps::read(Path::new("/proc"), pid)?;
    let pieces = split_by_mapping(found, &maps);
    let look_up = |pieces: &[&AreaPiece<'_>], max_pages| {
        nodes_of(pieces, max_pages, |addresses| sys::nodes_of_pages(pid, addresses))
    };
    let all: Vec<&AreaPiece<'_>> = pieces.iter().collect();
    let mut nodes = look_up(&all, SAMPLED_PAGES)?;
    for (piece, nodes) in pieces.iter().zip(&mut nodes) {
        // An accessed area has pages in memory.
        if nodes.is_empty() && piece.accesses > 0 {
            *nodes = look_up(&[piece], MAX_SAMPLED_PAGES)?.pop().unwrap_or_default();
        }
    }
    let there = pieces.iter().zip(nodes).filter(|(piece, nodes)| piece.accesses > 0 || !nodes.is_empty());
    let area = |(piece, nodes): (&AreaPiece<'_>, Vec<RegionNode>)| HotArea {
        pid,
        region: piece.region.to_owned(),
        start: format!("{:#x}", piece.start),
        end: format!("{:#x}", piece.end),
        accessed_percent: f64::from(piece.accesses.min(CHECKS_PER_AGGREGATION))
            / f64::from(CHECKS_PER_AGGREGATION)
            * 100.0,
        age_seconds: f64::from(piece.age) * f64::from(AGGREGATION_MICROS) / 1e6,
        remote_percent: remote_percent(&nodes, ran_on),
        nodes,
    };
    Ok(there.map(area).collect())
}

/// Looks up the nodes of at most `max_pages` pages of each piece, and returns the bytes of each piece by node.
fn nodes_of(
    pieces: &[&AreaPiece<'_>],
    max_pages: u64,
    look_up: impl FnOnce(&[usize]) -> io::Result<Vec<Option<u32>>>,
) -> io::Result<Vec<Vec<RegionNode>>> {
    let page = rustix::param::page_size();
    let addresses: Vec<Vec<usize>> =
        pieces.iter().map(|piece| sample_addresses(piece.start, piece.end, page, max_pages)).collect();
    let mut nodes = look_up(&addresses.concat())?.into_iter();
    let bytes = pieces.iter().zip(&addresses).map(|(piece, addresses)| {
        let sampled = addresses.len();
        by_node(piece.end.saturating_sub(piece.start), sampled, nodes.by_ref().take(sampled))
    });
    Ok(bytes.collect())
}

/// The part of an area that is in one mapping.
#[derive(Debug, PartialEq, Eq)]
struct AreaPiece<'a> {
    start: u64,
    end: u64,
    region: &'a str,
    accesses: u32,
    age: u32,
}

/// Splits areas at the ends of mappings; both are in the order of addresses.
fn split_by_mapping<'a>(areas: &[MonitoredArea], maps: &'a [MappedRegion]) -> Vec<AreaPiece<'a>> {
    let mut pieces = Vec::new();
    for area in areas {
        pieces.extend(maps::overlapping(maps, area.start, area.end).map(|map| AreaPiece {
            start: area.start.max(map.start),
            end: area.end.min(map.end),
            region: &map.region,
            accesses: area.accesses,
            age: area.age,
        }));
    }
    pieces
}

/// Returns the addresses of pages of an area: all of them, or one in each of `max_pages` equal parts. The position in a
/// part is pseudo-random but reproducible: at equal distances, the chosen pages of an interleaved area would all be on
/// one node.
fn sample_addresses(start: u64, end: u64, page: usize, max_pages: u64) -> Vec<usize> {
    let pages = end.saturating_sub(start).div_ceil(page as u64);
    let count = pages.min(max_pages);
    // There are fewer than 2^52 pages and 2^12 parts, so the product fits.
    let bound = |part: u64| pages * part / count;
    let address = |part: u64| {
        let (first, behind) = (bound(part), bound(part + 1));
        let mut hasher = DefaultHasher::new();
        (start, part).hash(&mut hasher);
        let chosen = first + hasher.finish() % (behind - first);
        usize::try_from(start + chosen * page as u64).ok()
    };
    (0..count).filter_map(address).collect()
}

/// Returns the bytes of an area by node, extrapolated from the nodes of the sampled pages.
fn by_node(bytes: u64, sampled: usize, nodes: impl Iterator<Item = Option<u32>>) -> Vec<RegionNode> {
    let mut counts = BTreeMap::<u32, u64>::new();
    for node in nodes.flatten() {
        *counts.entry(node).or_default() += 1;
    }
    let share = |count: u64| u128::from(bytes) * u128::from(count) / (sampled.max(1) as u128);
    let on = |(node, count)| RegionNode { node, bytes: u64::try_from(share(count)).unwrap_or(u64::MAX) };
    counts.into_iter().map(on).collect()
}

/// Returns the estimated share of accesses across nodes, if threads access all of the area in proportion to their CPU
/// time.
#[expect(clippy::cast_precision_loss, reason = "a share needs few digits")]
fn remote_percent(nodes: &[RegionNode], ran_on: &[NodeShare]) -> Option<f64> {
    let bytes: u64 = nodes.iter().map(|on| on.bytes).sum();
    if bytes == 0 || ran_on.is_empty() {
        return None;
    }
    let local = |on: &RegionNode| {
        let share = ran_on.iter().find(|share| share.node == on.node).map_or(0.0, |share| share.percent);
        share * on.bytes as f64 / bytes as f64
    };
    Some((100.0 - nodes.iter().map(local).sum::<f64>()).clamp(0.0, 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn on(node: u32, bytes: u64) -> RegionNode {
        RegionNode { node, bytes }
    }

    #[test]
    fn splits_areas_at_ends_of_mappings() {
        let areas = [(100, 300, 20), (300, 500, 0)].map(|(start, end, accesses)| MonitoredArea {
            start,
            end,
            accesses,
            age: 1,
        });
        let maps = [(0, 50, "[heap]"), (120, 200, "/a"), (200, 400, "[anonymous]"), (450, 600, "[stack]")]
            .map(|(start, end, name)| MappedRegion { start, end, region: name.to_owned() });
        let pieces = split_by_mapping(&areas, &maps);
        let found: Vec<_> =
            pieces.iter().map(|piece| (piece.start, piece.end, piece.region, piece.accesses)).collect();
        let expected = [
            (120, 200, "/a", 20),
            (200, 300, "[anonymous]", 20),
            (300, 400, "[anonymous]", 0),
            (450, 500, "[stack]", 0),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn sampled_pages_represent_interleaving() {
        const PAGE: u64 = 0x1000;
        assert_eq!(sample_addresses(0x1000, 0x4000, 0x1000, SAMPLED_PAGES), [0x1000, 0x2000, 0x3000]);
        assert!(sample_addresses(5, 5, 0x1000, SAMPLED_PAGES).is_empty());
        let all = sample_addresses(0, 1 << 30, 0x1000, SAMPLED_PAGES);
        assert!(
            all.iter().zip(0..).all(|(address, part)| address >> 24 == part),
            "one in each part: {all:?}"
        );
        // Interleaved by small and by huge pages.
        for (pages, every) in [(16 << 10, 1), (256 << 10, 512)] {
            let piece = AreaPiece { start: 0, end: pages * PAGE, region: "", accesses: 0, age: 0 };
            let look_up = |addresses: &[usize]| {
                let node = |address: &usize| u32::try_from(*address as u64 / PAGE / every % 2).ok();
                Ok(addresses.iter().map(node).collect())
            };
            let nodes = nodes_of(&[&piece], SAMPLED_PAGES, look_up).unwrap().remove(0);
            let share = nodes[0].bytes * 100 / (pages * PAGE);
            assert!((35..=65).contains(&share), "{every}: {nodes:?}");
        }
    }

    #[test]
    fn absent_page_has_no_bytes() {
        let nodes = [Some(0), Some(1), Some(1), None];
        assert_eq!(by_node(4 * MIB, 4, nodes.into_iter()), [on(0, MIB), on(1, 2 * MIB)]);
        assert!(by_node(MIB, 1, [None].into_iter()).is_empty());
    }

    #[test]
    fn remote_share_follows_cpu_time() {
        let ran_on = [NodeShare { node: 0, percent: 75.0 }, NodeShare { node: 1, percent: 25.0 }];
        assert_eq!(remote_percent(&[on(0, MIB)], &ran_on), Some(25.0));
        assert_eq!(remote_percent(&[on(0, MIB), on(1, MIB)], &ran_on), Some(50.0));
        assert_eq!(remote_percent(&[on(2, MIB)], &ran_on), Some(100.0));
        assert_eq!(remote_percent(&[on(0, MIB)], &[]), None);
        assert_eq!(remote_percent(&[], &ran_on), None);
    }
}

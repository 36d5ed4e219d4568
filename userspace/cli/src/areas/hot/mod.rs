//! `numaward regions --hot`: which areas of a workload's memory are accessed, and on which node those lie.
//!
//! The kernel's monitor (DAMON) looks at one page of each area of a process 200 times a second, and splits and joins areas by
//! what it sees. It does not see which CPU accessed a page, so what is remote is an estimate: as if each area were
//! accessed from the nodes on which the threads of its process spend their time, in proportion.

mod damon;
mod running;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    path::Path,
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::bail;
use numaward_api::RegionNode;
use serde::Serialize;
use serde_with_macros::skip_serializing_none;
use tokio::time::{interval, sleep};

use self::{
    damon::{AGGREGATE, Accessed, LOOKS, Monitors},
    running::Running,
};
use super::{
    ROWS, Share,
    ends::Ends,
    maps::{self, Mapping},
    percent, sys,
    workload::Workload,
};
use crate::{
    client::Server,
    table::{columns, or_dash, row, size},
    text::clean,
};

/// Processes that are monitored at most, those with the most memory: each costs a thread of the kernel.
const PROCESSES: usize = 16;
/// Pages of an area of which the node is asked; more where none of these is in memory, but some were accessed.
const PAGES: u64 = 64;
const MORE_PAGES: u64 = 4096;

/// Which areas of a workload's memory were accessed.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Hot {
    /// For how long it was looked at.
    seconds: f64,
    processes: Vec<Watched>,
    /// What is missing, and why.
    notes: Vec<String>,
    /// The areas with memory, those that are accessed most first.
    areas: Vec<Area>,
}

/// A process that was looked at.
#[skip_serializing_none]
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Watched {
    pid: u32,
    command: String,
    /// Where its threads ran; empty if they used too little CPU time to say.
    ran_on: Vec<Share>,
    /// CPU time of the thread that monitored it; absent where the kernel does not say.
    monitor_millis: Option<u64>,
}

/// Pages of a mapping that are accessed about equally often.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Area {
    pid: u32,
    /// As in the regions: `[heap]`, `[stack]`, `[anonymous]`, or a file.
    region: String,
    /// The first address, and the one behind the last, in hexadecimal.
    start: String,
    end: String,
    /// In which share of the looks a page had been accessed since the one before, 5 ms earlier.
    accessed_percent: f64,
    /// For how long that has been so.
    age_seconds: f64,
    /// Its memory by node, estimated by some of its pages; empty if none of these is in memory.
    nodes: Vec<RegionNode>,
    /// The share of accesses that reach across nodes, estimated; absent if it is not known where the threads ran.
    remote_percent: Option<f64>,
}

impl Area {
    fn bytes(&self) -> u64 {
        self.nodes.iter().map(|on| on.bytes).sum()
    }

    /// What it counts for: how much memory is accessed, how often.
    #[expect(clippy::cast_precision_loss, reason = "only to sort by")]
    fn weight(&self) -> f64 {
        self.accessed_percent * self.bytes() as f64
    }
}

/// Watches the processes of a workload for some time, or until the user has enough.
pub(crate) async fn watch(server: &Server, name: &str, span: Duration) -> anyhow::Result<Hot> {
    let mut notes = BTreeSet::new();
    let processes = most(Workload::find(server, name).await?.processes(&mut notes)?, &mut notes);
    let pids: Vec<u32> = processes.iter().map(|(pid, _)| *pid).collect();
    let mut running = Running::new(&numaward_topology::sysfs::read(Path::new("/"))?);
    let mut ends = Ends::new()?;
    let began = Instant::now();
    let mut monitors = Monitors::start(Path::new("/"), &pids)?;
    let mut over = pin!(sleep(span));
    let mut seconds = interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = seconds.tick() => running.sample(&pids),
            () = &mut over => break,
            () = ends.next() => break,
        }
    }
    running.sample(&pids);
    let mut hot = Hot { seconds: began.elapsed().as_secs_f64(), ..Hot::default() };
    for (at, (pid, command)) in processes.into_iter().enumerate() {
        let monitor_millis = monitors.thread(at).and_then(running::cpu_millis);
        let ran_on = running.shares(pid);
        match monitors.areas(at).map_err(anyhow::Error::from).and_then(|found| areas(pid, &found, &ran_on)) {
            Ok(areas) => hot.areas.extend(areas),
            Err(error) => {
                notes.insert(format!("process {pid} ({}) is missing: {error:#}", clean(&command)));
                continue;
            }
        }
        hot.processes.push(Watched { pid, command, ran_on, monitor_millis });
    }
    drop(monitors);
    if hot.processes.is_empty() {
        bail!("{}", notes.into_iter().collect::<Vec<_>>().join("; "));
    }
    hot.areas.sort_by(|one, other| other.weight().total_cmp(&one.weight()));
    hot.notes = notes.into_iter().collect();
    Ok(hot)
}

/// Keeps the processes with the most memory, and notes that there are more.
fn most(mut processes: Vec<(u32, String)>, notes: &mut BTreeSet<String>) -> Vec<(u32, String)> {
    if let Some(rest) = processes.len().checked_sub(PROCESSES).filter(|rest| *rest > 0) {
        notes.insert(format!(
            "only the {PROCESSES} processes with the most memory were looked at: {rest} more are there"
        ));
        processes.truncate(PROCESSES);
    }
    processes
}

/// The areas of a process that have memory, cut where its mappings end.
fn areas(pid: u32, found: &[Accessed], ran_on: &[Share]) -> anyhow::Result<Vec<Area>> {
    let maps = maps::read(Path::new("/proc"), pid)?;
    let pieces = cut(found, &maps);
    let on = |pieces: &[&Piece<'_>], most| nodes_of(pieces, most, |addresses| sys::nodes(pid, addresses));
    let all: Vec<&Piece<'_>> = pieces.iter().collect();
    let mut nodes = on(&all, PAGES)?;
    for (piece, nodes) in pieces.iter().zip(&mut nodes) {
        // What is accessed is somewhere.
        if nodes.is_empty() && piece.looks > 0 {
            *nodes = on(&[piece], MORE_PAGES)?.pop().unwrap_or_default();
        }
    }
    let there = pieces.iter().zip(nodes).filter(|(piece, nodes)| piece.looks > 0 || !nodes.is_empty());
    let area = |(piece, nodes): (&Piece<'_>, Vec<RegionNode>)| Area {
        pid,
        region: piece.region.to_owned(),
        start: format!("{:#x}", piece.start),
        end: format!("{:#x}", piece.end),
        accessed_percent: f64::from(piece.looks.min(LOOKS)) / f64::from(LOOKS) * 100.0,
        age_seconds: f64::from(piece.age) * f64::from(AGGREGATE) / 1e6,
        remote_percent: remote(&nodes, ran_on),
        nodes,
    };
    Ok(there.map(area).collect())
}

/// Where pieces lie, by so many of the pages of each at most: the bytes of each by node.
fn nodes_of(
    pieces: &[&Piece<'_>],
    most: u64,
    ask: impl FnOnce(&[usize]) -> io::Result<Vec<Option<u32>>>,
) -> io::Result<Vec<Vec<RegionNode>>> {
    let page = rustix::param::page_size();
    let addresses: Vec<Vec<usize>> =
        pieces.iter().map(|piece| sample(piece.start, piece.end, page, most)).collect();
    let mut nodes = ask(&addresses.concat())?.into_iter();
    let of = pieces.iter().zip(&addresses).map(|(piece, addresses)| {
        let asked = addresses.len();
        by_node(piece.end.saturating_sub(piece.start), asked, nodes.by_ref().take(asked))
    });
    Ok(of.collect())
}

/// A part of an area that lies in one mapping.
#[derive(Debug, PartialEq, Eq)]
struct Piece<'a> {
    start: u64,
    end: u64,
    region: &'a str,
    looks: u32,
    age: u32,
}

/// Cuts areas where mappings end; both are in the order of addresses.
fn cut<'a>(areas: &[Accessed], maps: &'a [Mapping]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    for area in areas {
        pieces.extend(maps::within(maps, area.start, area.end).map(|map| Piece {
            start: area.start.max(map.start),
            end: area.end.min(map.end),
            region: &map.region,
            looks: area.looks,
            age: area.age,
        }));
    }
    pieces
}

/// Addresses of pages of an area: all, or one in each of so many equal parts. Which one is by chance, but always the same:
/// at equal distances, interleaved pages would all be of one node.
fn sample(start: u64, end: u64, page: usize, most: u64) -> Vec<usize> {
    let pages = end.saturating_sub(start).div_ceil(page as u64);
    let count = pages.min(most);
    // Pages are fewer than 2^52, and parts than 2^12.
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

/// The bytes of an area by node, from the nodes of so many of its pages.
fn by_node(bytes: u64, asked: usize, nodes: impl Iterator<Item = Option<u32>>) -> Vec<RegionNode> {
    let mut counts = BTreeMap::<u32, u64>::new();
    for node in nodes.flatten() {
        *counts.entry(node).or_default() += 1;
    }
    let share = |count: u64| u128::from(bytes) * u128::from(count) / (asked.max(1) as u128);
    let on = |(node, count)| RegionNode { node, bytes: u64::try_from(share(count)).unwrap_or(u64::MAX) };
    counts.into_iter().map(on).collect()
}

/// The share of accesses that reach across nodes if threads access all of it, in proportion to where they ran.
#[expect(clippy::cast_precision_loss, reason = "a share needs no more")]
fn remote(nodes: &[RegionNode], ran_on: &[Share]) -> Option<f64> {
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

/// For people: the areas that are accessed most, and what the others come to.
pub(crate) fn render(hot: &Hot) -> String {
    let nodes: BTreeSet<u32> =
        hot.areas.iter().flat_map(|area| area.nodes.iter().map(|on| on.node)).collect();
    let accessed: Vec<&Area> = hot.areas.iter().filter(|area| area.accessed_percent > 0.0).collect();
    let mut text = String::new();
    if accessed.is_empty() {
        text.push_str("none of the memory that was looked at was accessed\n");
    } else {
        let mut titles = row(["PID", "ADDRESS", "REGION", "ACCESSED", "FOR"]);
        titles.extend(nodes.iter().map(|node| format!("NODE {node}")));
        titles.push("REMOTE".to_owned());
        let cells = |area: &&Area| {
            let mut cells = row([&area.pid.to_string(), &area.start, &area.region]);
            cells.push(percent(area.accessed_percent));
            cells.push(format!("{:.1} s", area.age_seconds));
            let on = |node: &u32| area.nodes.iter().find(|on| on.node == *node).map_or(0, |on| on.bytes);
            cells.extend(nodes.iter().map(|node| size(on(node))));
            cells.push(or_dash(area.remote_percent.map(percent)));
            cells
        };
        let rows = accessed.iter().take(ROWS).map(cells);
        text.push_str(&columns(&std::iter::once(titles).chain(rows).collect::<Vec<_>>()));
        if accessed.len() > ROWS {
            let _ = writeln!(text, "{} more areas are accessed less: -o json has all", accessed.len() - ROWS);
        }
    }
    let all: u64 = hot.areas.iter().map(Area::bytes).sum();
    let of_accessed: u64 = accessed.iter().map(|area| area.bytes()).sum();
    let _ = writeln!(text, "not accessed: {} of {}", size(all - of_accessed), size(all));
    for process in &hot.processes {
        let shares = super::on_nodes(&process.ran_on);
        let ran_on = if shares.is_empty() { "on no node for long enough to say" } else { &shares };
        let _ = writeln!(text, "process {} ({}) ran on: {ran_on}", process.pid, clean(&process.command));
    }
    let cost = hot.processes.iter().map(|process| process.monitor_millis).sum::<Option<u64>>();
    if let Some(millis) = cost {
        let _ = writeln!(text, "looking took {millis} ms of CPU time in {:.1} s", hot.seconds);
    }
    for note in &hot.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn on(node: u32, bytes: u64) -> RegionNode {
        RegionNode { node, bytes }
    }

    fn area(accessed_percent: f64, nodes: Vec<RegionNode>) -> Area {
        Area {
            pid: 7,
            region: "[heap]".to_owned(),
            start: "0x1000".to_owned(),
            end: "0x2000".to_owned(),
            accessed_percent,
            age_seconds: 2.5,
            remote_percent: remote(
                &nodes,
                &[Share { node: 0, percent: 75.0 }, Share { node: 1, percent: 25.0 }],
            ),
            nodes,
        }
    }

    #[test]
    fn areas_are_cut_where_mappings_end() {
        let areas =
            [(100, 300, 20), (300, 500, 0)].map(|(start, end, looks)| Accessed { start, end, looks, age: 1 });
        let maps = [(0, 50, "[heap]"), (120, 200, "/a"), (200, 400, "[anonymous]"), (450, 600, "[stack]")]
            .map(|(start, end, name)| Mapping { start, end, region: name.to_owned() });
        let pieces = cut(&areas, &maps);
        let found: Vec<_> =
            pieces.iter().map(|piece| (piece.start, piece.end, piece.region, piece.looks)).collect();
        let expected = [
            (120, 200, "/a", 20),
            (200, 300, "[anonymous]", 20),
            (300, 400, "[anonymous]", 0),
            (450, 500, "[stack]", 0),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn pages_that_are_asked_for_stand_for_the_others() {
        const PAGE: u64 = 0x1000;
        assert_eq!(sample(0x1000, 0x4000, 0x1000, PAGES), [0x1000, 0x2000, 0x3000]);
        assert!(sample(5, 5, 0x1000, PAGES).is_empty());
        let all = sample(0, 1 << 30, 0x1000, PAGES);
        assert!(
            all.iter().zip(0..).all(|(address, part)| address >> 24 == part),
            "one in each part: {all:?}"
        );
        // Interleaved by small and by huge pages.
        for (pages, every) in [(16 << 10, 1), (256 << 10, 512)] {
            let piece = Piece { start: 0, end: pages * PAGE, region: "", looks: 0, age: 0 };
            let ask = |addresses: &[usize]| {
                let node = |address: &usize| u32::try_from(*address as u64 / PAGE / every % 2).ok();
                Ok(addresses.iter().map(node).collect())
            };
            let nodes = nodes_of(&[&piece], PAGES, ask).unwrap().remove(0);
            let share = nodes[0].bytes * 100 / (pages * PAGE);
            assert!((35..=65).contains(&share), "{every}: {nodes:?}");
        }
    }

    #[test]
    fn a_page_that_is_not_there_has_no_bytes() {
        let nodes = [Some(0), Some(1), Some(1), None];
        assert_eq!(by_node(4 * MIB, 4, nodes.into_iter()), [on(0, MIB), on(1, 2 * MIB)]);
        assert!(by_node(MIB, 1, [None].into_iter()).is_empty());
    }

    #[test]
    fn what_is_remote_goes_by_where_the_threads_ran() {
        let ran_on = [Share { node: 0, percent: 75.0 }, Share { node: 1, percent: 25.0 }];
        assert_eq!(remote(&[on(0, MIB)], &ran_on), Some(25.0));
        assert_eq!(remote(&[on(0, MIB), on(1, MIB)], &ran_on), Some(50.0));
        assert_eq!(remote(&[on(2, MIB)], &ran_on), Some(100.0));
        assert_eq!(remote(&[on(0, MIB)], &[]), None);
        assert_eq!(remote(&[], &ran_on), None);
    }

    #[test]
    fn people_see_what_is_accessed_and_what_is_not() {
        let hot = Hot {
            seconds: 10.0,
            processes: vec![Watched {
                pid: 7,
                command: "db\n".to_owned(),
                ran_on: vec![Share { node: 0, percent: 100.0 }],
                monitor_millis: Some(12),
            }],
            notes: vec!["something is missing".to_owned()],
            areas: vec![area(95.0, vec![on(1, 2 * MIB)]), area(0.0, vec![on(0, 6 * MIB)])],
        };
        let text = render(&hot);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[0],
            ["PID", "ADDRESS", "REGION", "ACCESSED", "FOR", "NODE", "0", "NODE", "1", "REMOTE"]
        );
        assert_eq!(lines[1].join(" "), "7 0x1000 [heap] 95 % 2.5 s 0 B 2.0 MiB 75 %");
        assert!(text.contains("\nnot accessed: 6.0 MiB of 8.0 MiB\n"), "{text}");
        assert!(text.contains("\nprocess 7 (db\\n) ran on: node 0 100 %\n"), "{text}");
        assert!(text.contains("looking took 12 ms of CPU time in 10.0 s\nsomething is missing\n"), "{text}");
        let nothing = render(&Hot::default());
        assert!(nothing.starts_with("none of the memory that was looked at was accessed\n"), "{nothing}");
    }
}

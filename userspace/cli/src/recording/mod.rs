//! Recordings: what a daemon showed over time, in a file.
//!
//! Problem: a recording is read when something went wrong, possibly because the host lost its power while it was written.
//! What is torn or damaged must cost no more than itself, a jump to a time must not read the whole file, and thousands of
//! workloads in which little changes must not fill a disk.
//!
//! ```text
//! file  = "numaward record\n" version:u32 frame*
//! frame = crc:u32 flags:u32 length:u32 plain:u32 at:u64 payload        (little endian)
//! ```
//!
//! A frame holds one [`Moment`] as JSON, compressed (DEFLATE). `length` is that of the payload, `plain` that of the JSON, `at` is in
//! milliseconds since 1970, and the checksum covers what follows it. Frames of a *run* share one stream of DEFLATE,
//! flushed after each: what repeats from second to second costs next to nothing, and yet each frame is whole by itself
//! once it is written. The first frame of a run is *complete*: it knows nothing of what is before it. A run has
//! [`RUN`] frames, so a jump reads that many and those that the history takes, whatever the length of the file.

mod read;
mod when;
mod write;

use numaward_api::{Allocations, Event, Sample, Status, Topology, Trends, Version};
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

pub(crate) use self::{
    read::Recording,
    when::{When, part, time},
    write::Writer,
};

const MAGIC: &[u8; 16] = b"numaward record\n";
/// Grows when older readers could not make sense of a file. Keys that come to the JSON do not count: readers skip them.
const VERSION: u32 = 1;
/// Bytes before the first frame.
const HEAD: usize = MAGIC.len() + 4;
/// Bytes of a frame before its payload.
const FRAME: usize = 24;
/// The most bytes of a moment. What says that it has more would take memory for nothing.
const MOST: u32 = 512 << 20;
/// Frames of a run.
const RUN: usize = 60;

const COMPLETE: u32 = 1;
const EVENTS: u32 = 2;
const CONNECTED: u32 = 4;

/// What sort of moment it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sort {
    /// It begins a run.
    pub(crate) is_complete: bool,
    /// Something happened since the one before.
    pub(crate) has_events: bool,
    /// It is the first of a connection: what is counted may have begun anew.
    pub(crate) is_connected: bool,
}

impl Sort {
    fn flags(self) -> u32 {
        let flags = [(self.is_complete, COMPLETE), (self.has_events, EVENTS), (self.is_connected, CONNECTED)];
        flags.into_iter().filter(|(is_so, _)| *is_so).fold(0, |all, (_, flag)| all | flag)
    }

    fn of(flags: u32) -> Self {
        let has = |flag| flags & flag != 0;
        Self { is_complete: has(COMPLETE), has_events: has(EVENTS), is_connected: has(CONNECTED) }
    }
}

/// What came since the moment before.
#[skip_serializing_none]
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Moment {
    /// In complete ones.
    pub(crate) host: Option<Host>,
    /// Absent where the daemon was not reached.
    pub(crate) sample: Option<Sample>,
    /// What happened; in complete ones also the last of what happened before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) events: Vec<Event>,
    /// Events that came faster than they were read.
    #[serde(default)]
    pub(crate) missed_events: u64,
    /// What is promised, or why that is not known; in complete ones, and where it changed.
    pub(crate) allocations: Option<Result<Box<Allocations>, String>>,
    /// How the daemon is doing, or why that is not known; as for allocations.
    pub(crate) status: Option<Result<Box<Status>, String>>,
    /// Why the daemon is not reached any more.
    pub(crate) lost: Option<String>,
}

/// What seldom changes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Host {
    pub(crate) topology: Topology,
    pub(crate) version: Version,
    /// Seconds from one sample to the next.
    pub(crate) step_seconds: u32,
    /// What was before the first sample of a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) past: Option<Trends>,
}

/// What a frame says about its moment before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// In milliseconds since 1970.
    pub(crate) at_millis: u64,
    pub(crate) sort: Sort,
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    fn host(name: &str) -> Host {
        let topology = Topology::from(&numaward_topology::Machine::default());
        Host { topology, version: Version::on(name), step_seconds: 1, past: None }
    }

    /// A recording of so many moments, each with its number.
    fn recorded(path: &Path, count: u32) -> Vec<u64> {
        let mut writer = Writer::create(path, u64::MAX).unwrap();
        let mut ends = Vec::new();
        for number in 0..count {
            let complete = writer.begins_run();
            let moment = Moment {
                host: complete.then(|| host(&format!("Linux {number}"))),
                lost: Some(format!("number {number}")),
                missed_events: u64::from(number),
                ..Moment::default()
            };
            let sort = Sort { is_complete: complete, ..Sort::default() };
            assert!(writer.add(1_000_000 + u64::from(number) * 1000, &moment, sort).unwrap());
            ends.push(fs::metadata(path).unwrap().len());
        }
        ends
    }

    fn numbers(recording: &mut Recording, from: usize) -> Vec<u64> {
        let all = (from..recording.marks.len()).map(|at| recording.moment(at).unwrap().missed_events);
        all.collect()
    }

    #[test]
    fn what_is_recorded_is_read_from_any_moment_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        recorded(&path, 150);
        let mut recording = Recording::open(&path).unwrap();
        assert_eq!(recording.warnings, [""; 0]);
        for from in [0, 149, 60, 59, 61, 7, 120, 1] {
            assert_eq!(numbers(&mut recording, from), (from as u64..150).collect::<Vec<_>>(), "{from}");
        }
        assert_eq!(recording.run_of(59), 0);
        assert_eq!(recording.run_of(60), 60);
        let marks = &recording.marks;
        assert!(marks[60].sort.is_complete && !marks[59].sort.is_complete && marks[2].at_millis == 1_002_000);
    }

    #[test]
    fn what_is_torn_costs_only_itself() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let ends = recorded(&path, 3);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let kept = ends.iter().filter(|end| **end <= length as u64).count();
            match Recording::open(&path) {
                Ok(mut recording) => {
                    assert_eq!(numbers(&mut recording, 0), (0..kept as u64).collect::<Vec<_>>(), "{length}");
                    let is_torn = !ends.contains(&(length as u64));
                    assert_eq!(recording.warnings.len(), usize::from(is_torn), "{length}");
                }
                Err(error) => assert!(kept == 0, "{length}: {error}"),
            }
        }
    }

    #[test]
    fn what_is_damaged_costs_its_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let ends = recorded(&path, 130);
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        damaged[usize::try_from(ends[9]).unwrap() + FRAME + 3] ^= 0x40;
        fs::write(&path, damaged).unwrap();
        let mut recording = Recording::open(&path).unwrap();
        assert_eq!(numbers(&mut recording, 0), (0..10).chain(60..130).collect::<Vec<_>>());
        let [warning] = recording.warnings.as_slice() else { panic!("{:?}", recording.warnings) };
        assert!(warning.contains("50 moments") && warning.contains("1970-01-01T00:16:50"), "{warning}");
    }

    #[test]
    fn nothing_that_is_changed_makes_it_panic_or_go_unseen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        recorded(&path, 2);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            for bit in [0x01, 0x80] {
                let mut changed = whole.clone();
                changed[at] ^= bit;
                fs::write(&path, changed).unwrap();
                let Ok(mut recording) = Recording::open(&path) else { continue };
                let read = numbers(&mut recording, 0);
                assert!(read.len() < 2 && !recording.warnings.is_empty(), "{at}: {read:?}");
            }
        }
    }

    #[test]
    fn what_is_no_recording_is_said_to_be_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        recorded(&path, 1);
        let mut newer = fs::read(&path).unwrap();
        newer[MAGIC.len()] = 9;
        let head = newer[..HEAD].to_vec();
        let mut only = head.clone();
        only[MAGIC.len()] = 1;
        for (bytes, says) in [
            (Vec::new(), "is empty"),
            (b"{\"some\": \"json\", \"of\": 1}".to_vec(), "is no recording"),
            (b"numaw".to_vec(), "is no recording"),
            (newer, "version 9 of the format, and this numaward reads up to 1"),
            (head, "version 9"),
            (only, "holds nothing"),
        ] {
            fs::write(&path, &bytes).unwrap();
            let error = Recording::open(&path).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(path.to_str().unwrap()), "{error}");
        }
        let error = Recording::open(&dir.path().join("absent")).unwrap_err().to_string();
        assert!(error.contains("absent") && error.contains("No such file"), "{error}");
    }

    #[test]
    fn a_file_grows_no_further_than_it_may() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let mut writer = Writer::create(&path, 2000).unwrap();
        let mut count = 0;
        let sort = |count| Sort { is_complete: count == 0, ..Sort::default() };
        while writer.add(count, &Moment::default(), sort(count)).unwrap() {
            count += 1;
        }
        assert!(count > 10 && fs::metadata(&path).unwrap().len() <= 2000);
        assert_eq!(Recording::open(&path).unwrap().marks.len() as u64, count);
        let again = Writer::create(&path, 2000).unwrap_err();
        assert!(again.to_string().contains("cannot be made"), "{again}");
    }
}

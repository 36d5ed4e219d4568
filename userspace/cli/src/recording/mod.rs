//! Recordings: the data that a daemon provided over time, in a file.
//!
//! # Problem
//! A recording is read when something went wrong, possibly because the host lost power during recording. A torn or
//! damaged part must not make the rest unreadable, a jump to a time must not read the whole file, and thousands of
//! workloads with few changes must not fill a disk.
//!
//! # Format
//! ```text
//! file  = "numaward record\n" version:u32 frame*
//! frame = crc:u32 flags:u32 length:u32 plain:u32 at:u64 payload        (little endian)
//! ```
//!
//! A frame holds one [`Moment`] as JSON, compressed with DEFLATE. `length` is the length of the payload and `plain`
//! that of the JSON, both in bytes; `at` is in milliseconds since 1970; `crc` covers all following bytes of the frame.
//!
//! # Terms
//! - *run*: [`FRAMES_PER_RUN`] frames that share one DEFLATE stream, which is flushed after each frame. Text that
//!   repeats from frame to frame compresses to almost nothing, and yet each frame can be read once it is written.
//! - *complete*: the first moment of a run contains all data and does not depend on earlier moments.
//!
//! # Invariant
//! A jump reads at most one run and the frames of the displayed history, whatever the length of the file.

mod read;
mod when;
mod write;

use numaward_api::{Allocations, Event, Sample, Status, Topology, Trends, Version};
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

pub(crate) use self::{
    read::Recording,
    when::{ReplayTime, format_time, time_range},
    write::RecordingWriter,
};

const MAGIC: &[u8; 16] = b"numaward record\n";
/// Version of the format. It grows when older readers cannot read the new files. New keys in the JSON need no new
/// version, as readers ignore them.
const VERSION: u32 = 1;
/// Size of the file header.
const FILE_HEADER_BYTES: usize = MAGIC.len() + 4;
/// Size of a frame without its payload.
const FRAME_HEADER_BYTES: usize = 24;
/// Maximum size of a moment as JSON. A damaged frame could otherwise make the reader allocate any amount of memory.
const MAX_MOMENT_BYTES: u32 = 512 << 20;
/// Number of frames in a run.
const FRAMES_PER_RUN: usize = 60;

const FLAG_COMPLETE: u32 = 1;
const FLAG_EVENTS: u32 = 2;
const FLAG_CONNECTED: u32 = 4;

/// Properties of a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MomentFlags {
    /// The moment begins a run.
    pub(crate) is_complete: bool,
    /// Events happened since the previous moment.
    pub(crate) has_events: bool,
    /// The moment is the first of a connection: the daemon's counters may have started again at 0.
    pub(crate) is_connected: bool,
}

impl MomentFlags {
    fn to_bits(self) -> u32 {
        let flags = [
            (self.is_complete, FLAG_COMPLETE),
            (self.has_events, FLAG_EVENTS),
            (self.is_connected, FLAG_CONNECTED),
        ];
        flags.into_iter().filter(|(is_so, _)| *is_so).fold(0, |all, (_, flag)| all | flag)
    }

    fn from_bits(flags: u32) -> Self {
        let has = |flag| flags & flag != 0;
        Self {
            is_complete: has(FLAG_COMPLETE),
            has_events: has(FLAG_EVENTS),
            is_connected: has(FLAG_CONNECTED),
        }
    }
}

/// Data that came since the previous moment; in a complete moment, all data.
#[skip_serializing_none]
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Moment {
    /// Present in complete moments.
    pub(crate) host: Option<RecordedHost>,
    /// Absent if the daemon was not reached.
    pub(crate) sample: Option<Sample>,
    /// New events; in complete moments, also the latest earlier ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) events: Vec<Event>,
    /// Number of events that were missed because they came faster than they were read.
    #[serde(default)]
    pub(crate) missed_events: u64,
    /// All guarantees, or the reason why they are not known. Present in complete moments, and after a change.
    pub(crate) allocations: Option<Result<Box<Allocations>, String>>,
    /// Status of the daemon, or the reason why it is not known. Present like the allocations.
    pub(crate) status: Option<Result<Box<Status>, String>>,
    /// Reason why the daemon is no longer reached.
    pub(crate) lost: Option<String>,
}

/// Data that rarely changes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RecordedHost {
    pub(crate) topology: Topology,
    pub(crate) version: Version,
    /// Seconds between two samples.
    pub(crate) step_seconds: u32,
    /// History before the first sample of a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) past: Option<Trends>,
}

/// Header of a frame, which is known before its moment is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MomentHeader {
    /// Time of the moment, in milliseconds since 1970.
    pub(crate) at_millis: u64,
    pub(crate) flags: MomentFlags,
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    fn host(name: &str) -> RecordedHost {
        let topology = Topology::from(&numaward_topology::Machine::default());
        RecordedHost { topology, version: Version::on(name), step_seconds: 1, past: None }
    }

    /// Writes a recording of so many moments, each with its number, and returns the end of each in the file.
    fn write_recording(path: &Path, count: u32) -> Vec<u64> {
        let mut writer = RecordingWriter::create(path, u64::MAX).unwrap();
        let mut ends = Vec::new();
        for number in 0..count {
            let is_complete = writer.begins_run();
            let moment = Moment {
                host: is_complete.then(|| host(&format!("Linux {number}"))),
                lost: Some(format!("number {number}")),
                missed_events: u64::from(number),
                ..Moment::default()
            };
            let flags = MomentFlags { is_complete, ..MomentFlags::default() };
            assert!(writer.add(1_000_000 + u64::from(number) * 1000, &moment, flags).unwrap());
            ends.push(fs::metadata(path).unwrap().len());
        }
        ends
    }

    fn numbers(recording: &mut Recording, from: usize) -> Vec<u64> {
        let all = (from..recording.headers.len()).map(|at| recording.moment(at).unwrap().missed_events);
        all.collect()
    }

    #[test]
    fn reads_from_any_moment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        write_recording(&path, 150);
        let mut recording = Recording::open(&path).unwrap();
        assert_eq!(recording.warnings, [""; 0]);
        for from in [0, 149, 60, 59, 61, 7, 120, 1] {
            assert_eq!(numbers(&mut recording, from), (from as u64..150).collect::<Vec<_>>(), "{from}");
        }
        assert_eq!(recording.run_start(59), 0);
        assert_eq!(recording.run_start(60), 60);
        let headers = &recording.headers;
        assert!(
            headers[60].flags.is_complete
                && !headers[59].flags.is_complete
                && headers[2].at_millis == 1_002_000
        );
    }

    #[test]
    fn torn_frame_loses_only_itself() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let ends = write_recording(&path, 3);
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
    fn damaged_frame_loses_rest_of_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let ends = write_recording(&path, 130);
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        damaged[usize::try_from(ends[9]).unwrap() + FRAME_HEADER_BYTES + 3] ^= 0x40;
        fs::write(&path, damaged).unwrap();
        let mut recording = Recording::open(&path).unwrap();
        assert_eq!(numbers(&mut recording, 0), (0..10).chain(60..130).collect::<Vec<_>>());
        let [warning] = recording.warnings.as_slice() else { panic!("{:?}", recording.warnings) };
        assert!(warning.contains("50 moments") && warning.contains("1970-01-01T00:16:50"), "{warning}");
    }

    #[test]
    fn detects_any_changed_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        write_recording(&path, 2);
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
    fn refuses_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        write_recording(&path, 1);
        let mut newer = fs::read(&path).unwrap();
        newer[MAGIC.len()] = 9;
        let head = newer[..FILE_HEADER_BYTES].to_vec();
        let mut only = head.clone();
        only[MAGIC.len()] = 1;
        for (bytes, says) in [
            (Vec::new(), "is empty"),
            (b"{\"some\": \"json\", \"of\": 1}".to_vec(), "is not a recording"),
            (b"numaw".to_vec(), "is not a recording"),
            (newer, "version 9 of the format, but this numaward reads versions up to 1"),
            (head, "version 9"),
            (only, "has no moment"),
        ] {
            fs::write(&path, &bytes).unwrap();
            let error = Recording::open(&path).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(path.to_str().unwrap()), "{error}");
        }
        let error = Recording::open(&dir.path().join("absent")).unwrap_err().to_string();
        assert!(error.contains("absent") && error.contains("No such file"), "{error}");
    }

    #[test]
    fn file_stays_within_max_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let mut writer = RecordingWriter::create(&path, 2000).unwrap();
        let mut count = 0;
        let flags = |count| MomentFlags { is_complete: count == 0, ..MomentFlags::default() };
        while writer.add(count, &Moment::default(), flags(count)).unwrap() {
            count += 1;
        }
        assert!(count > 10 && fs::metadata(&path).unwrap().len() <= 2000);
        assert_eq!(Recording::open(&path).unwrap().headers.len() as u64, count);
        let again = RecordingWriter::create(&path, 2000).unwrap_err();
        assert!(again.to_string().contains("cannot be created"), "{again}");
    }
}

//! Power loss: `numaward-crash-check` sends requests to a daemon with its ledger on a disk. QEMU logs all writes, and the disk is
//! reconstructed as it could be after a power loss at any of them.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    process::Command,
    time::Duration,
};

use fastrand::Rng;
use numaward_tests::{TestEnvironment, boot, seed};
use numaward_vm::{GuestTopology, LogEntry, WriteLog, find_tool};
use serde::Deserialize;

const MIB: usize = 1 << 20;
/// Size of the disk, and of its file system, in MiB. The marks follow the file system.
const DISK: usize = 16;
const FILE_SYSTEM: usize = 15;

type GuaranteeTexts = BTreeMap<String, String>;

/// A mark that the script writes to the disk, and the result that is read at the end.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mark {
    Begun,
    Done(GuaranteeTexts),
    Lost(String),
}

/// Disks after a power loss, one after the other in a sparse file.
struct Images {
    file: File,
    count: usize,
}

impl Images {
    fn add(&mut self, disk: &[u8]) {
        let start = self.count * DISK * MIB;
        for (number, block) in disk.chunks(4096).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                self.file.write_all_at(block, (start + number * 4096) as u64).unwrap();
            }
        }
        self.count += 1;
        self.file.set_len((self.count * DISK * MIB) as u64).unwrap();
    }
}

/// A moment of a power loss.
struct Cut {
    /// Guarantees that the ledger may contain: the acknowledged ones, or also those of the request in progress.
    allowed: Vec<GuaranteeTexts>,
    /// Position in the write log, for messages.
    entry: usize,
}

#[test]
fn answers_survive_power_loss() {
    let Some(bench) = TestEnvironment::open() else { return };
    let (cuts, steps, minutes): (usize, u32, u64) =
        if bench.is_slow() { (200, 60, 40) } else { (20, 12, 10) };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (disk, log) = (path("disk"), path("log"));
    make_file_system(&disk);
    let before = fs::read(&disk).unwrap();
    File::create(&log).unwrap();
    let machine = GuestTopology::parse(None, Some("2,1"), Some("384M,384M"), None).unwrap();
    let vm = bench.vm(machine.clone()).disk_with_log(&disk, &log).limit(Duration::from_mins(minutes));
    let script = include_str!("power_write.sh");
    let offset = FILE_SYSTEM * MIB;
    let seed = seed();
    let report = boot(&vm, &format!("offset={offset}\nsteps={steps}\nseed={seed}\n{script}"));
    let said = report.section("write");
    assert!(said.starts_with(&format!("ok: {steps} requests")), "seed {seed}: {said}");

    let log = WriteLog::read(&log).unwrap();
    let marks = marks(&log);
    let mut images = Images { file: File::create(path("images")).unwrap(), count: 0 };
    let mut random = Rng::with_seed(seed);
    let mut take = |(disk, cut): (Vec<u8>, Cut)| {
        images.add(&disk);
        cut
    };
    let honest: Vec<_> = (0..cuts).map(|_| take(cut(&log, &before, &marks, &mut random))).collect();
    let lying: Vec<_> = lies(&log, &before, &marks).take(cuts.div_ceil(10)).map(take).collect();
    assert!(!lying.is_empty(), "no guarantee was acknowledged: {marks:?}");
    let count = images.count;
    let vm = bench.vm(machine).disk(&disk).disk(path("images")).limit(Duration::from_mins(minutes));
    let script = include_str!("power_read.sh");
    let report = boot(&vm, &format!("images={count}\nsize={DISK}\n{script}"));
    let found: Vec<Mark> =
        report.section("found").lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(found.len(), count, "{report}");
    for (cut, found) in honest.iter().zip(&found) {
        let is_allowed = matches!(found, Mark::Done(found) if cut.allowed.contains(found));
        assert!(
            is_allowed,
            "seed {seed}, power lost after entry {} of the log: found {found:?}, allowed {:?}",
            cut.entry, cut.allowed
        );
    }
    // The check must find a disk that acknowledges writes without making them durable; otherwise this test proves nothing.
    for (cut, found) in lying.iter().zip(&found[cuts..]) {
        assert!(!matches!(found, Mark::Done(found) if cut.allowed.contains(found)), "seed {seed}: {found:?}");
    }
    let flushes = log.entries().iter().filter(|entry| **entry == LogEntry::Flush).count();
    println!(
        "seed {seed}: {cuts} cuts in {} writes with {flushes} flushes, {} lies",
        log.entries().len(),
        lying.len()
    );
}

fn make_file_system(disk: &Path) {
    File::create(disk).and_then(|file| file.set_len((DISK * MIB) as u64)).unwrap();
    let tool = find_tool("mkfs.ext4").unwrap();
    let mut command = Command::new(tool);
    command.args(["-q", "-F", "-b", "4096", "-J", "size=4"]);
    // The kernel expects a disk to write both sectors of the superblock at once, and refuses one of which half was written.
    command.args(["-O", "^metadata_csum"]);
    // Otherwise the kernel would continue the initialization in the background.
    command.args(["-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"]);
    let made = command.arg(disk).arg(format!("{FILE_SYSTEM}M")).output().unwrap();
    assert!(made.status.success(), "{made:?}");
}

/// Returns the marks of the script, by their position in the log.
fn marks(log: &WriteLog) -> BTreeMap<usize, Mark> {
    let mark = |entry: &LogEntry| match entry {
        LogEntry::Write { offset, data } if *offset == FILE_SYSTEM * MIB => {
            let text = log.data(data).split(|byte| *byte == 0).next()?;
            Some(serde_json::from_slice(text).unwrap())
        }
        _ => None,
    };
    let marks = log.entries().iter().enumerate();
    marks.filter_map(|(place, entry)| Some((place, mark(entry)?))).collect()
}

/// Selects power losses after any entry: of the sectors that were not flushed by then, any subset is on the disk.
fn cut(log: &WriteLog, before: &[u8], marks: &BTreeMap<usize, Mark>, random: &mut Rng) -> (Vec<u8>, Cut) {
    let first = *marks.keys().next().unwrap();
    let entry = random.usize(first + 1..=log.entries().len());
    let flushed = log.last_flush(entry);
    let mut disk = before.to_owned();
    log.replay(&mut disk, 0..flushed, || true);
    let percent = *random.choice(&[0, 20, 80, 100]).unwrap();
    log.replay(&mut disk, flushed..entry, || random.u32(0..100) < percent);
    let done = |mark: &Mark| match mark {
        Mark::Done(guarantees) => Some(guarantees.clone()),
        _ => None,
    };
    let mut allowed: Vec<_> =
        marks.range(..entry).rev().find_map(|(_, mark)| done(mark)).into_iter().collect();
    if marks.range(..entry).next_back().is_some_and(|(_, mark)| *mark == Mark::Begun) {
        allowed.extend(marks.range(entry..).find_map(|(_, mark)| done(mark)));
    }
    (disk, Cut { allowed, entry })
}

/// Returns the acknowledged changes that the disk had not flushed.
fn lies<'a>(
    log: &'a WriteLog,
    before: &'a [u8],
    marks: &'a BTreeMap<usize, Mark>,
) -> impl Iterator<Item = (Vec<u8>, Cut)> + 'a {
    let places: Vec<_> = marks.iter().collect();
    let steps: Vec<_> = places.windows(3).map(|step| [step[0], step[1], step[2]]).collect();
    steps.into_iter().filter_map(move |[(_, earlier), (begun, mark), (entry, now)]| {
        match (earlier, mark, now) {
            (Mark::Done(earlier), Mark::Begun, Mark::Done(now)) if earlier != now => {
                let mut disk = before.to_owned();
                log.replay(&mut disk, 0..log.last_flush(*begun), || true);
                Some((disk, Cut { allowed: vec![now.clone()], entry: *entry }))
            }
            _ => None,
        }
    })
}

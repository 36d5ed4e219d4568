use std::{
    fs::{self, OpenOptions},
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use numaward_tests_support::{is_alone, peak, reset_peak};

use super::*;

mod power_loss;

type Ledger = Vec<u32>;

fn open(dir: &Path) -> LoadedLedger<Ledger> {
    Store::open(dir).unwrap().1
}

/// Returns a directory in which `[1]` and then `[2]` were saved and written out.
fn saved_twice() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
    assert_eq!(loaded, LoadedLedger::Fresh);
    for ledger in [vec![1], vec![2]] {
        store.save(&ledger).unwrap();
        store.write_out().unwrap();
    }
    dir
}

/// Returns such a directory without the journal.
fn without_journal() -> tempfile::TempDir {
    let dir = saved_twice();
    fs::remove_file(dir.path().join("ledger.journal")).unwrap();
    dir
}

fn current(ledger: u32) -> LoadedLedger<Ledger> {
    LoadedLedger::Current { ledger: vec![ledger], set_aside: Vec::new() }
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Overwrites the beginning of a slot of the journal.
fn damage(dir: &Path, slot: u64, bytes: &[u8]) {
    let journal = OpenOptions::new().write(true).open(dir.join("ledger.journal")).unwrap();
    journal.write_all_at(bytes, slot * journal.metadata().unwrap().len() / 2).unwrap();
}

#[test]
fn only_own_directory_is_private() {
    let dir = tempfile::tempdir().unwrap();
    let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o777;
    drop(Store::<Ledger>::open(&dir.path().join("a/b/store")).unwrap());
    fs::create_dir(dir.path().join("usual")).unwrap();
    let parent = mode("usual") & 0o755;
    assert_eq!(["a", "a/b", "a/b/store"].map(mode), [parent, parent, 0o700]);
}

#[test]
fn saved_ledger_is_loaded() {
    let dir = saved_twice();
    assert_eq!(open(dir.path()), current(2));
    assert_eq!(files(dir.path()), ["ledger.journal", "ledger.json", "ledger.json.1", "ledger.lock"]);
    let text = |name| fs::read_to_string(dir.path().join(name)).unwrap();
    let whole = "{\"version\":2,\"generation\":2,\"checksum\":\"crc32:aba8b044\",\"ledger\":[2]}\n";
    assert_eq!(text("ledger.json"), whole);
    assert!(text("ledger.json.1").ends_with("\"ledger\":[1]}\n"));
    let journal = text("ledger.journal");
    let slots: Vec<_> =
        [&journal[..1 << 20], &journal[1 << 20..]].map(|slot| slot.trim_end_matches('\0')).into();
    assert_eq!(slots, [text("ledger.json.1"), text("ledger.json")]);
    for name in ["ledger.json", "ledger.journal"] {
        let mode = fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn journal_alone_is_durable() {
    let dir = saved_twice();
    for ledger in 3..8 {
        let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
        assert_eq!(loaded, current(ledger - 1));
        store.save(&vec![ledger]).unwrap();
    }
    let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
    assert_eq!(store.pending_write_out(), Some(7));
    store.write_out().unwrap();
    assert_eq!(store.pending_write_out(), None);
    drop(store);
    assert!(fs::read_to_string(dir.path().join("ledger.json")).unwrap().contains("\"ledger\":[7]"));
    assert!(fs::read_to_string(dir.path().join("ledger.json.1")).unwrap().contains("\"ledger\":[2]"));
    assert_eq!(open(dir.path()), current(7));
}

#[test]
fn ledger_may_shrink_and_grow() {
    let dir = tempfile::tempdir().unwrap();
    let size = || fs::metadata(dir.path().join("ledger.journal")).unwrap().len();
    let mut sizes = Vec::new();
    for length in [3, 50_000, 7, 60_000, 1, 200_000, 2, 4] {
        let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
        let ledger = vec![123_456_789; length];
        store.save(&ledger).unwrap();
        drop(store);
        assert_eq!(open(dir.path()), LoadedLedger::Current { ledger, set_aside: Vec::new() });
        sizes.push(size() >> 20);
    }
    assert_eq!(sizes, [2, 2, 2, 2, 2, 8, 8, 8], "MiB");
}

#[test]
fn refuses_impossible_generation() {
    let ledger = serde_json::value::to_raw_value(&vec![3]).unwrap();
    for generation in [u64::MAX, u64::MAX - 1] {
        let dir = saved_twice();
        fs::write(dir.path().join("ledger.json"), envelope::encode(generation, &ledger).unwrap()).unwrap();
        let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
        let LoadedLedger::Current { ledger, set_aside } = loaded else { panic!("{loaded:?}") };
        assert!(
            ledger == [2] && set_aside[0].reason.contains("is higher than any store reaches"),
            "{set_aside:?}"
        );
        for ledger in 4..7 {
            store.save(&vec![ledger]).unwrap();
        }
        drop(store);
        assert_eq!(open(dir.path()), current(6));
    }
}

#[test]
fn save_fails_at_highest_generation() {
    let ledger = serde_json::value::to_raw_value(&vec![3]).unwrap();
    let dir = saved_twice();
    let last = u64::MAX / 2 - 1;
    fs::write(dir.path().join("ledger.json"), envelope::encode(last, &ledger).unwrap()).unwrap();
    let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
    assert_eq!(loaded, current(3));
    store.save(&vec![4]).unwrap();
    let error = store.save(&vec![5]).unwrap_err();
    assert!(matches!(error, StoreError::GenerationsExhausted { .. }), "{error}");
    drop(store);
    assert_eq!(open(dir.path()), current(4));
}

#[test]
fn reads_first_format_version() {
    let dir = tempfile::tempdir().unwrap();
    let text = "{\"version\":1,\"checksum\":\"crc32:6702617b\",\"ledger\":[2]}\n";
    fs::write(dir.path().join("ledger.json"), text).unwrap();
    let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
    assert_eq!(loaded, current(2));
    store.save(&vec![3]).unwrap();
    drop(store);
    assert_eq!(open(dir.path()), current(3));
    assert_eq!(fs::read_to_string(dir.path().join("ledger.json")).unwrap(), text, "not yet");
}

#[test]
fn journal_replaces_lost_files() {
    for lost in ["ledger.json", "ledger.json.1"] {
        let dir = saved_twice();
        fs::write(dir.path().join(lost), "x").unwrap();
        let LoadedLedger::Current { ledger, set_aside } = open(dir.path()) else { panic!("{lost}") };
        assert_eq!((ledger, set_aside.len()), (vec![2], 1));
        assert_eq!(open(dir.path()), current(2));
    }
    let dir = saved_twice();
    fs::remove_file(dir.path().join("ledger.json")).unwrap();
    let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
    assert_eq!(loaded, current(2));
    store.write_out().unwrap();
    assert!(fs::read_to_string(dir.path().join("ledger.json")).unwrap().contains("\"ledger\":[2]"));
}

#[test]
fn damaged_slot_is_set_aside() {
    // The last save is in the second slot. The first one contains the save before it, or nothing.
    let cases: [(u64, &[u8], bool, u32); 5] = [
        (1, b"x", false, 1),
        // The generation is unreadable: the save may have been newer than the one in the other slot.
        (0, b"x", false, 2),
        // The generation is older.
        (0, b"{\"version\":2,\"generation\":1,x", true, 2),
        // A save that a crash interrupted.
        (1, b"{\"version\":2,\"generation\":2,x", true, 1),
        (0, b"{\"version\":2,\"generation\":3,x", true, 2),
    ];
    for (slot, bytes, is_certain, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
        store.save(&vec![1]).unwrap();
        store.save(&vec![2]).unwrap();
        drop(store);
        damage(dir.path(), slot, bytes);
        let loaded = open(dir.path());
        let is_kept = dir.path().join("ledger.json.damaged-1").exists();
        let bytes = String::from_utf8_lossy(bytes);
        match loaded {
            LoadedLedger::Current { ledger, set_aside } => {
                assert_eq!((ledger, is_certain), (vec![expected], true), "{slot} {bytes}");
                assert_eq!(set_aside.len(), usize::from(is_kept));
            }
            LoadedLedger::Previous { ledger, set_aside } => {
                assert_eq!((ledger, is_certain), (vec![expected], false), "{slot} {bytes}");
                assert!(set_aside[0].reason.contains("not a ledger"), "{set_aside:?}");
                assert!(fs::read(&set_aside[0].path).unwrap().starts_with(bytes.as_bytes()));
            }
            other => panic!("{other:?}"),
        }
        // An interrupted save loses nothing, and is not kept.
        assert_eq!(is_kept, !bytes.ends_with("n\":2,x") && !bytes.ends_with("n\":3,x"), "{bytes}");
        let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
        store.save(&vec![4]).unwrap();
        drop(store);
        assert_eq!(open(dir.path()), current(4), "{slot} {bytes}");
    }
}

#[test]
fn one_save_repairs_damage() {
    // The slots of the journal: damaged, or empty.
    for slots in [["x", "y"], ["x", "\0"], ["\0", "x"]] {
        let dir = saved_twice();
        damage(dir.path(), 0, slots[0].as_bytes());
        damage(dir.path(), 1, slots[1].as_bytes());
        let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
        assert!(
            matches!(loaded, LoadedLedger::Previous { ref ledger, .. } if *ledger == [2]),
            "{slots:?}: {loaded:?}"
        );
        store.save(&vec![3]).unwrap();
        drop(store);
        assert_eq!(open(dir.path()), current(3), "{slots:?}");
        assert!(!dir.path().join("ledger.json.damaged-2").exists(), "{slots:?}: kept once");
    }
}

#[test]
fn lost_journal_means_previous_ledger() {
    for content in [None, Some(&b"odd"[..]), Some(b""), Some(b"evenly nothing")] {
        let dir = saved_twice();
        let journal = dir.path().join("ledger.journal");
        match content {
            None => fs::remove_file(&journal).unwrap(),
            Some(content) => fs::write(&journal, content).unwrap(),
        }
        let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
        let LoadedLedger::Previous { ledger, set_aside } = loaded else { panic!("{content:?}: {loaded:?}") };
        assert_eq!((ledger, set_aside.is_empty()), (vec![2], content.is_none()));
        store.save(&vec![3]).unwrap();
        drop(store);
        assert_eq!(open(dir.path()), current(3), "{content:?}");
    }
}

#[test]
fn creates_state_directory() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("a/b");
    assert_eq!(open(&dir), LoadedLedger::Fresh);
    assert_eq!(open(&dir), LoadedLedger::Fresh, "nothing was saved");
}

#[test]
fn damaged_file_falls_back_to_previous() {
    for (damage, reason) in [
        (&b""[..], "not a ledger: EOF"),
        (b"\xff\xfe", "not a ledger"),
        (b"{\"version\":1,\"checksum\":\"crc32:6702617b\",\"ledger\":[3]}\n", "the file says crc32:6702617b"),
        (b"{\"version\":1,\"checksum\":\"crc32:6702617b\",\"ledg", "not a ledger: EOF"),
        (b"{\"version\":0,\"checksum\":\"\",\"ledger\":[2]}", "no version 0"),
        (b"{\"checksum\":\"crc32:6702617b\",\"ledger\":[2]}", "missing field `version`"),
    ] {
        let dir = without_journal();
        fs::write(dir.path().join("ledger.json"), damage).unwrap();
        let LoadedLedger::Previous { ledger, set_aside } = open(dir.path()) else { panic!("{reason}") };
        assert_eq!(ledger, [1]);
        let [SetAsideFile { path, reason: said }] = &set_aside[..] else { panic!("{set_aside:?}") };
        assert_eq!(*path, dir.path().join("ledger.json.damaged-1"));
        assert!(said.contains(reason), "{said}");
        assert_eq!(fs::read(path).unwrap(), damage, "kept as it was");
        assert!(
            matches!(open(dir.path()), LoadedLedger::Previous { ledger, set_aside } if ledger == [1] && set_aside.is_empty())
        );
    }
}

#[test]
fn foreign_ledger_is_not_changed() {
    for (dir, file) in [(without_journal(), "ledger.json"), (saved_twice(), "ledger.json")] {
        let before = files(dir.path());
        let error = Store::<Vec<String>>::open(dir.path()).unwrap_err().to_string();
        let words = format!("{file}: intact, but not a ledger of this program: invalid type");
        assert!(error.contains(&words) && error.contains("run the program that wrote it"), "{error}");
        assert_eq!(files(dir.path()), before);
        assert!(!matches!(open(dir.path()), LoadedLedger::Rebuild { .. }));
    }
}

#[test]
fn newer_save_is_not_overwritten() {
    let dir = saved_twice();
    let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
    // The slot of the next save.
    let newer = envelope::encode(9, &serde_json::value::to_raw_value(&[9]).unwrap()).unwrap();
    damage(dir.path(), 0, &newer);
    let error = store.save(&vec![3]).unwrap_err().to_string();
    assert!(error.contains("it contains save 9, but this process last saved 2"), "{error}");
    // An interrupted save.
    damage(dir.path(), 0, &[&newer[..newer.len() - 4], &b"\0"[..]].concat());
    store.save(&vec![3]).unwrap();
    drop(store);
    assert_eq!(open(dir.path()), current(3));
}

#[test]
fn unreadable_ledger_is_rebuilt() {
    let dir = without_journal();
    fs::write(dir.path().join("ledger.json"), "x").unwrap();
    fs::write(dir.path().join("ledger.json.1"), "y").unwrap();
    for _ in 0..2 {
        let LoadedLedger::Rebuild { set_aside } = open(dir.path()) else { panic!() };
        assert_eq!(set_aside.len(), 2);
        assert_eq!(fs::read(&set_aside[0].path).unwrap(), b"x");
        assert_eq!(fs::read(&set_aside[1].path).unwrap(), b"y");
    }
    let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
    store.save(&vec![3]).unwrap();
    drop(store);
    assert_eq!(open(dir.path()), current(3));
    assert!(dir.path().join("ledger.json.damaged-2").exists(), "never deleted");
}

#[test]
fn newer_version_is_not_changed() {
    for newer in ["ledger.json", "ledger.json.1", "ledger.journal"] {
        let dir = saved_twice();
        fs::write(dir.path().join("ledger.json"), "damaged").unwrap();
        let mut text = b"{\"version\":3,\"whatever\":[]}".to_vec();
        if newer == "ledger.journal" {
            text.resize(4096, 0);
        }
        fs::write(dir.path().join(newer), text).unwrap();
        let before = files(dir.path());
        let error = Store::<Ledger>::open(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains(newer) && error.contains("version 3 of the format, this program knows 2"),
            "{error}"
        );
        assert_eq!(files(dir.path()), before);
    }
}

#[test]
fn refuses_shared_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::<Ledger>::open(dir.path()).unwrap();
    let error = Store::<Ledger>::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains(&format!("another process ({}) has the ledger open", std::process::id())),
        "{error}"
    );
    drop(store);
    open(dir.path());
}

/// Creates a directory at the path of a file. Root may write everywhere, so this simulates a disk that refuses writes.
fn block_path(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    let _ = fs::remove_file(&path);
    fs::create_dir(&path).unwrap();
    path
}

#[test]
fn failed_save_keeps_old_ledger() {
    let dir = saved_twice();
    let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
    // Larger than a slot, so that a new journal is necessary.
    let large = vec![123_456_789; 200_000];
    let in_the_way = block_path(dir.path(), "ledger.journal.new");
    let error = store.save(&large).unwrap_err().to_string();
    assert!(error.contains("ledger.journal.new: cannot remove"), "{error}");
    assert_eq!(store.pending_write_out(), None);
    // A ledger that fits is saved in the old journal.
    store.save(&vec![3]).unwrap();
    fs::remove_dir(in_the_way).unwrap();
    drop(store);
    let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
    assert_eq!(loaded, current(3));
    store.save(&large).unwrap();
    drop(store);
    assert_eq!(open(dir.path()), LoadedLedger::Current { ledger: large, set_aside: Vec::new() });

    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Store::<Ledger>::open(&file.path().join("state")).unwrap_err().to_string();
    assert!(error.contains("/state: cannot create it: Not a directory"), "{error}");
}

#[test]
fn removed_journal_is_recreated() {
    let dir = saved_twice();
    let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
    let journal = dir.path().join("ledger.journal");
    fs::remove_file(&journal).unwrap();
    store.save(&vec![3]).unwrap();
    fs::write(&journal, "another program's").unwrap();
    store.save(&vec![4]).unwrap();
    drop(store);
    assert_eq!(open(dir.path()), current(4));
}

#[test]
fn failed_write_out_loses_nothing() {
    for (name, words) in [
        ("ledger.json.new", "ledger.json.new: cannot remove"),
        ("ledger.json.1", "ledger.json.1: cannot replace it"),
    ] {
        let dir = saved_twice();
        let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
        store.save(&vec![3]).unwrap();
        let in_the_way = block_path(dir.path(), name);
        let error = store.write_out().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(!dir.path().join("ledger.json.new").is_file(), "no rest");
        assert_eq!(store.pending_write_out(), Some(3));
        fs::remove_dir(in_the_way).unwrap();
        store.write_out().unwrap();
        assert_eq!(store.pending_write_out(), None);
        drop(store);
        assert_eq!(open(dir.path()), current(3));
    }
}

/// Variables for the process that crashes: its directory, and the value that was saved first.
const DIE_IN: &str = "NUMAWARD_TEST_DIR";
const DIE_AFTER: &str = "NUMAWARD_TEST_FIRST";

/// Saves three ledgers and writes each out. The journal has no room for the last one.
fn save_three(dir: &Path, first: u32) {
    let (mut store, _) = Store::<Ledger>::open(dir).unwrap();
    for (save, length) in [(1, 1), (2, 1), (3, 600_000)] {
        store.save(&vec![first + save; length]).unwrap();
        store.write_out().unwrap();
    }
}

#[test]
fn crash_leaves_old_or_new_ledger() {
    // The test runs itself as the process that crashes.
    if let Some(dir) = std::env::var_os(DIE_IN) {
        save_three(&PathBuf::from(dir), std::env::var(DIE_AFTER).unwrap().parse().unwrap());
        return;
    }
    // The name of a point; the saves in which it is passed in a new store, and in a used one; and true if the save is
    // then complete. Written data survives, because only the process crashes.
    let points: [(&str, &[u32], &[u32], bool); 11] = [
        ("journal.created", &[1, 3], &[3], false),
        ("journal.synced", &[1, 3], &[3], false),
        ("journal.renamed", &[1, 3], &[3], false),
        ("ledger.half-written", &[1, 2, 3], &[1, 2, 3], false),
        ("ledger.written", &[1, 2, 3], &[1, 2, 3], true),
        ("ledger.saved", &[1, 2, 3], &[1, 2, 3], true),
        ("file.created", &[1, 2, 3], &[1, 2, 3], true),
        ("file.synced", &[1, 2, 3], &[1, 2, 3], true),
        ("file.older-removed", &[1, 2, 3], &[1, 2, 3], true),
        ("file.previous-kept", &[1, 2, 3], &[1, 2, 3], true),
        ("file.renamed", &[1, 2, 3], &[1, 2, 3], true),
    ];
    for (point, in_new, in_used, is_done) in points {
        let new = in_new.iter().enumerate().map(|passed| (0, passed));
        let used = in_used.iter().enumerate().map(|passed| (10, passed));
        for (first, (times, save)) in new.chain(used) {
            let dir = tempfile::tempdir().unwrap();
            if first > 0 {
                let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
                store.save(&vec![first]).unwrap();
                store.write_out().unwrap();
            }
            crash_at(&format!("{point}@{}", times + 1), dir.path(), first);

            let expected = first + save - u32::from(!is_done);
            let at = format!("{point}, save {save} after {first}");
            let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
            match loaded {
                LoadedLedger::Fresh => assert_eq!(expected, 0, "{at}"),
                LoadedLedger::Current { ledger, set_aside } => {
                    assert_eq!((ledger[0], &set_aside[..]), (expected, &[][..]), "{at}");
                }
                other => panic!("{at}: {other:?}"),
            }
            store.save(&vec![4]).unwrap();
            store.write_out().unwrap();
            drop(store);
            assert_eq!(open(dir.path()), current(4), "{at}");
            assert!(files(dir.path()).iter().all(|name| !name.contains("new")), "{at}");
        }
    }
}

fn crash_at(point: &str, dir: &Path, first: u32) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::crash_leaves_old_or_new_ledger", "--nocapture"])
        .env(DIE_IN, dir)
        .env(DIE_AFTER, first.to_string())
        .env("NUMAWARD_FAULT", point)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let name = point.split('@').next().unwrap();
    assert!(said.contains(&format!("fault point {name}")), "{point} was not reached: {said}");
}

/// A journal that was enlarged for a large ledger must not cost memory at later starts.
#[test]
fn unused_part_of_slot_is_not_read() {
    const SLOT_SIZE: u64 = 256 << 20;
    if !is_alone() {
        return;
    }
    let dir = saved_twice();
    let path = dir.path().join("ledger.journal");
    let small = fs::read(&path).unwrap();
    let journal = OpenOptions::new().write(true).open(&path).unwrap();
    journal.set_len(0).unwrap();
    journal.set_len(2 * SLOT_SIZE).unwrap();
    for (at, slot) in small.chunks(small.len() / 2).enumerate() {
        journal.write_all_at(slot, at as u64 * SLOT_SIZE).unwrap();
    }
    reset_peak();
    let start = peak();
    assert_eq!(open(dir.path()), current(2));
    let most = peak();
    assert!(most < start + SLOT_SIZE / 4, "{} KiB became {} KiB", start >> 10, most >> 10);
}

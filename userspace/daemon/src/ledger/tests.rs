use std::{os::unix::fs::PermissionsExt as _, process::Command};

use super::*;

type Ledger = Vec<u32>;

fn open(dir: &Path) -> Loaded<Ledger> {
    Store::open(dir).unwrap().1
}

/// A directory in which `[1]` and then `[2]` were saved.
fn saved_twice() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
    assert_eq!(loaded, Loaded::Fresh);
    store.save(&vec![1]).unwrap();
    store.save(&vec![2]).unwrap();
    dir
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_saved_is_loaded() {
    let dir = saved_twice();
    assert_eq!(open(dir.path()), Loaded::Current(vec![2]));
    assert_eq!(files(dir.path()), ["ledger.json", "ledger.json.1", "ledger.lock"]);
    let text = fs::read_to_string(dir.path().join("ledger.json")).unwrap();
    assert_eq!(text, "{\"version\":1,\"checksum\":\"crc32:6702617b\",\"ledger\":[2]}\n");
    let mode = fs::metadata(dir.path().join("ledger.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn the_state_directory_is_made() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("a/b");
    assert_eq!(open(&dir), Loaded::Fresh);
    assert_eq!(open(&dir), Loaded::Fresh, "nothing was saved");
}

#[test]
fn a_damaged_ledger_is_set_aside_and_the_previous_one_used() {
    for (damage, reason) in [
        (&b""[..], "not a ledger: EOF"),
        (b"\xff\xfe", "not a ledger"),
        (b"{\"version\":1,\"checksum\":\"crc32:6702617b\",\"ledger\":[3]}\n", "the file says crc32:6702617b"),
        (b"{\"version\":1,\"checksum\":\"crc32:6702617b\",\"ledg", "not a ledger: EOF"),
        (b"{\"version\":0,\"checksum\":\"\",\"ledger\":[2]}", "no version 0"),
        (b"{\"checksum\":\"crc32:6702617b\",\"ledger\":[2]}", "missing field `version`"),
    ] {
        let dir = saved_twice();
        fs::write(dir.path().join("ledger.json"), damage).unwrap();
        let Loaded::Previous { ledger, set_aside } = open(dir.path()) else { panic!("{reason}") };
        assert_eq!(ledger, [1]);
        let [SetAside { path, reason: said }] = &set_aside[..] else { panic!("{set_aside:?}") };
        assert_eq!(*path, dir.path().join("ledger.json.damaged-1"));
        assert!(said.contains(reason), "{said}");
        assert_eq!(fs::read(path).unwrap(), damage, "kept as it was");
        assert!(
            matches!(open(dir.path()), Loaded::Previous { ledger, set_aside } if ledger == [1] && set_aside.is_empty())
        );
    }
}

#[test]
fn what_is_whole_and_no_ledger_is_set_aside_as_well() {
    let dir = saved_twice();
    let Loaded::Rebuild { set_aside } = Store::<Vec<String>>::open(dir.path()).unwrap().1 else { panic!() };
    assert!(
        set_aside[0].reason.contains("whole, but not a ledger of this program: invalid type"),
        "{set_aside:?}"
    );
    assert_eq!(files(dir.path()), ["ledger.json.damaged-1", "ledger.json.damaged-2", "ledger.lock"]);
}

#[test]
fn with_nothing_to_read_the_ledger_is_to_be_rebuilt_until_the_next_save() {
    let dir = saved_twice();
    fs::write(dir.path().join("ledger.json"), "x").unwrap();
    fs::write(dir.path().join("ledger.json.1"), "y").unwrap();
    for _ in 0..2 {
        let Loaded::Rebuild { set_aside } = open(dir.path()) else { panic!() };
        assert_eq!(set_aside.len(), 2);
        assert_eq!(fs::read(&set_aside[0].path).unwrap(), b"x");
        assert_eq!(fs::read(&set_aside[1].path).unwrap(), b"y");
    }
    let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
    store.save(&vec![3]).unwrap();
    drop(store);
    assert_eq!(open(dir.path()), Loaded::Current(vec![3]));
    assert!(dir.path().join("ledger.json.damaged-2").exists(), "never deleted");
}

#[test]
fn a_newer_version_is_an_error_and_nothing_is_touched() {
    for newer in ["ledger.json", "ledger.json.1"] {
        let dir = saved_twice();
        fs::write(dir.path().join("ledger.json"), "damaged").unwrap();
        fs::write(dir.path().join(newer), "{\"version\":2,\"whatever\":[]}").unwrap();
        let before = files(dir.path());
        let error = Store::<Ledger>::open(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains(newer) && error.contains("version 2 of the format, this program knows 1"),
            "{error}"
        );
        assert_eq!(files(dir.path()), before);
    }
}

#[test]
fn two_stores_cannot_share_a_directory() {
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

#[test]
fn a_save_that_fails_leaves_the_old_state() {
    // Root may write anywhere, so a folder in the way stands for a disk that refuses.
    for (in_the_way, words) in [
        ("ledger.json.new", "ledger.json.new: cannot remove"),
        ("ledger.json.1", "ledger.json.1: cannot replace it"),
    ] {
        let dir = saved_twice();
        let (mut store, _) = Store::<Ledger>::open(dir.path()).unwrap();
        let _ = fs::remove_file(dir.path().join(in_the_way));
        fs::create_dir(dir.path().join(in_the_way)).unwrap();
        let error = store.save(&vec![3]).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(!dir.path().join("ledger.json.new").is_file(), "no rest");

        fs::remove_dir(dir.path().join(in_the_way)).unwrap();
        drop(store);
        let (mut store, loaded) = Store::<Ledger>::open(dir.path()).unwrap();
        assert_eq!(loaded, Loaded::Current(vec![2]));
        store.save(&vec![3]).unwrap();
        drop(store);
        assert_eq!(open(dir.path()), Loaded::Current(vec![3]));
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Store::<Ledger>::open(&file.path().join("state")).unwrap_err().to_string();
    assert!(error.contains("/state: cannot create it: Not a directory"), "{error}");
}

const POINTS: [&str; 8] = [
    "ledger.created",
    "ledger.half-written",
    "ledger.written",
    "ledger.synced",
    "ledger.older-removed",
    "ledger.previous-kept",
    "ledger.renamed",
    "ledger.saved",
];

/// The directory in which the process below is to die.
const DIE_IN: &str = "NUMAWARD_TEST_DIR";

#[test]
fn a_crash_at_any_point_leaves_the_old_or_the_new_ledger_whole() {
    // The test starts itself anew as the process that dies.
    if let Some(dir) = std::env::var_os(DIE_IN) {
        let (mut store, _) = Store::<Ledger>::open(&PathBuf::from(dir)).unwrap();
        store.save(&vec![2]).unwrap();
        store.save(&vec![3]).unwrap();
        return;
    }
    for first_save in [true, false] {
        for point in POINTS {
            let dir = tempfile::tempdir().unwrap();
            if !first_save {
                Store::<Ledger>::open(dir.path()).unwrap().0.save(&vec![1]).unwrap();
            }
            // In an empty store, no ledger is there to be kept when the first save passes.
            let is_second = first_save && ["ledger.older-removed", "ledger.previous-kept"].contains(&point);
            let output = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "ledger::tests::a_crash_at_any_point_leaves_the_old_or_the_new_ledger_whole",
                    "--nocapture",
                ])
                .env(DIE_IN, dir.path())
                .env("NUMAWARD_FAULT", point)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains(&format!("fault point {point}")), "{point} was not reached: {said}");

            let renamed = ["ledger.renamed", "ledger.saved"].contains(&point);
            let expected = match (first_save, is_second, renamed) {
                (_, true, _) | (_, _, true) => Loaded::Current(vec![2]),
                (true, ..) => Loaded::Fresh,
                (false, ..) => Loaded::Current(vec![1]),
            };
            let (mut store, loaded) = Store::open(dir.path()).unwrap();
            assert_eq!(loaded, expected, "{point}, first save: {first_save}");
            store.save(&vec![4]).unwrap();
            drop(store);
            assert_eq!(open(dir.path()), Loaded::Current(vec![4]), "{point}");
        }
    }
}

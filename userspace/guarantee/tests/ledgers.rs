//! Compatibility with the ledgers of releases in `tests/ledgers/RELEASE`: this program keeps all their content, and each release
//! can read the
//! ledger that this program saves.
//!
//! A release ignores unknown fields. So it can read a ledger that has at least the fields it wrote, with the same values and the
//! same format
//! version.

use std::{fs, path::Path};

use numaward_guarantee::state::State;
use numaward_store::{LoadedLedger, Store};
use serde_json::Value;

/// Returns the JSON pointers (RFC 6901) of the parts of `kept` that `now` does not have.
fn missing(kept: &Value, now: &Value, at: &str) -> Vec<String> {
    match (kept, now) {
        (Value::Object(kept), Value::Object(now)) => {
            let part = |(key, kept): (&String, &Value)| {
                let at = format!("{at}/{key}");
                now.get(key).map_or_else(|| vec![at.clone()], |now| missing(kept, now, &at))
            };
            kept.iter().flat_map(part).collect()
        }
        (Value::Array(kept), Value::Array(now)) if kept.len() == now.len() => {
            let parts = kept.iter().zip(now).enumerate();
            parts.flat_map(|(number, (kept, now))| missing(kept, now, &format!("{at}/{number}"))).collect()
        }
        _ if kept == now => Vec::new(),
        _ => vec![at.to_owned()],
    }
}

#[test]
fn keeps_ledgers_of_all_releases() {
    let releases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/ledgers");
    let mut count = 0;
    for release in fs::read_dir(releases).unwrap().map(|entry| entry.unwrap().path()) {
        if !release.is_dir() {
            continue;
        }
        for file in fs::read_dir(&release).unwrap().map(|entry| entry.unwrap().path()) {
            let dir = tempfile::tempdir().unwrap();
            let stored = dir.path().join("ledger.json");
            fs::copy(&file, &stored).unwrap();
            let (mut store, loaded) = Store::<State>::open(dir.path()).unwrap();
            let (LoadedLedger::Current { ledger: state, .. } | LoadedLedger::Previous { ledger: state, .. }) =
                loaded
            else {
                panic!("{}: {loaded:?}", file.display())
            };
            assert!(!state.guarantees.is_empty(), "{} has no guarantee", file.display());
            store.save(&state).unwrap();
            store.write_out().unwrap();
            let read = |path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
            let [kept, now] = [&file, &stored].map(read);
            assert_eq!(
                kept["version"],
                now["version"],
                "{} is not read by its release again",
                file.display()
            );
            assert_eq!(missing(&kept["ledger"], &now["ledger"], ""), [""; 0], "{}", file.display());
            count += 1;
        }
    }
    assert!(count > 0, "no release has a ledger");
}

#[test]
fn finds_missing_and_changed_parts() {
    let kept = serde_json::json!({ "a": { "b": 1 }, "c": [1, { "d": 2 }] });
    let with = |change: fn(&mut Value)| {
        let mut now = kept.clone();
        change(&mut now);
        missing(&kept, &now, "")
    };
    assert_eq!(with(|now| now["new"] = 1.into()), [""; 0]);
    assert_eq!(with(|now| now["a"] = serde_json::json!({})), ["/a/b"]);
    assert_eq!(with(|now| now["c"][1]["d"] = 3.into()), ["/c/1/d"]);
    assert_eq!(with(|now| now["c"] = serde_json::json!([1])), ["/c"]);
}

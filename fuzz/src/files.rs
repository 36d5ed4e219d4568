//! Targets for files: the ledger, the kubelet's state files, the configuration, and the kernel's files about the machine.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Component, Path, PathBuf},
};

use arbitrary::{Arbitrary, Unstructured};
use numaward_config::{Sources, load, yaml};
use numaward_engine::{
    CheckpointError,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    policy::KubeletVersion,
};
use numaward_store::{LoadedLedger, Store, StoreError, encode_save};
use numaward_topology::{Bytes, sysfs};
use serde_json::{Value, value::RawValue};

/// Content of the ledger's directory, and saves to perform in it.
#[derive(Arbitrary, Debug)]
struct LedgerDirectory<'a> {
    current: Option<LedgerFile<'a>>,
    previous: Option<LedgerFile<'a>>,
    /// The two slots of the journal; padded to the size of a slot if the flag is true.
    journal: Option<(LedgerFile<'a>, LedgerFile<'a>, bool)>,
    /// Ledgers that are saved, by their length; written out at once if the flag is true.
    saves: Vec<(u8, bool)>,
}

/// Content of a file with a ledger.
#[derive(Arbitrary, Debug)]
enum LedgerFile<'a> {
    /// A valid save.
    Sealed { generation: u64, ledger: u8 },
    /// Arbitrary bytes.
    Bytes(&'a [u8]),
    /// A valid save with one byte replaced.
    Damaged { generation: u64, at: u8, byte: u8 },
}

impl LedgerFile<'_> {
    fn bytes(&self) -> Vec<u8> {
        match *self {
            Self::Sealed { generation, ledger } => encode_save(generation, &text(ledger)).unwrap(),
            Self::Bytes(bytes) => bytes.to_owned(),
            Self::Damaged { generation, at, byte } => {
                let mut bytes = encode_save(generation, &text(0)).unwrap();
                let at = usize::from(at) % bytes.len();
                bytes[at] = byte;
                bytes
            }
        }
    }
}

/// Returns a ledger with a length that is a multiple of 16.
fn text(ledger: u8) -> Box<RawValue> {
    let value = Value::from("x".repeat(usize::from(ledger) * 16));
    serde_json::value::to_raw_value(&value).unwrap()
}

/// Checks that the store opens any directory or refuses it with one of two known errors, and that it then returns the ledger
/// that was saved last.
pub(crate) fn ledger(data: &[u8]) {
    const SLOT_BYTES: usize = 1 << 10;
    let Ok(LedgerDirectory { current, previous, journal, saves }) =
        LedgerDirectory::arbitrary_take_rest(Unstructured::new(data))
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    // A new store syncs its parent directories. A relative path avoids those on a slow disk.
    env::set_current_dir(dir.path()).unwrap();
    let dir = Path::new(".");
    for (name, file) in [("ledger.json", current), ("ledger.json.1", previous)] {
        if let Some(file) = file {
            fs::write(dir.join(name), file.bytes()).unwrap();
        }
    }
    if let Some((first, second, has_size)) = journal {
        let mut slots = first.bytes();
        if has_size {
            slots.resize(SLOT_BYTES, 0);
        }
        slots.extend(second.bytes());
        if has_size {
            slots.resize(2 * SLOT_BYTES, 0);
        }
        fs::write(dir.join("ledger.journal"), slots).unwrap();
    }
    let (mut store, _) = match Store::<Value>::open_small(dir) {
        Ok(opened) => opened,
        Err(error) => {
            let is_known = matches!(error, StoreError::Newer { .. } | StoreError::Foreign { .. });
            assert!(is_known, "{error}");
            return;
        }
    };
    let mut last = None;
    for (number, is_written_out) in saves.into_iter().take(8) {
        let ledger = Value::from("y".repeat(usize::from(number) * 16));
        let saved = store.save(&ledger);
        if matches!(saved, Err(StoreError::GenerationsExhausted { .. })) {
            break;
        }
        saved.unwrap();
        if is_written_out {
            store.write_out().unwrap();
            assert_eq!(store.pending_write_out(), None);
        }
        last = Some(ledger);
    }
    drop(store);
    let (_, loaded) = Store::<Value>::open_small(dir).unwrap();
    if let Some(last) = last {
        assert_eq!(loaded, LoadedLedger::Current { ledger: last, set_aside: Vec::new() });
    }
}

/// Checks that a state file of the kubelet that can be read is written without loss. The first byte selects the kubelet's
/// version.
pub(crate) fn checkpoint(data: &[u8]) {
    let Some((&version, data)) = data.split_first() else { return };
    let Ok(text) = str::from_utf8(data) else { return };
    let version = if version % 2 == 0 { KubeletVersion::V1_32 } else { KubeletVersion::V1_36 };
    if let Some(state) = read(text, CpuCheckpoint::read) {
        let written = state.write().unwrap();
        assert_eq!(CpuCheckpoint::read(&written).as_ref(), Ok(&state), "{written}");
    }
    if let Some(state) = read(text, |text| MemoryCheckpoint::read(text, version)) {
        let written = state.write().unwrap();
        assert_eq!(MemoryCheckpoint::read(&written, version).as_ref(), Ok(&state), "{written}");
    }
}

/// Reads a state file. A wrong checksum is corrected, because random input never has the right one.
fn read<T>(text: &str, read: impl Fn(&str) -> Result<T, CheckpointError>) -> Option<T> {
    let computed = match read(text) {
        Err(CheckpointError::Checksum { computed, .. }) => computed,
        other => return other.ok(),
    };
    let mut value: Value = serde_json::from_str(text).ok()?;
    *value.get_mut("checksum")? = computed.into();
    read(&value.to_string()).ok()
}

/// Loads a configuration in YAML.
pub(crate) fn config(data: &[u8]) {
    loaded(data, BTreeMap::new());
}

/// Loads a configuration. Checks that a valid one is printed as a configuration that loads to the same value, and that an
/// invalid one is refused with messages.
pub(crate) fn loaded(text: &[u8], variables: BTreeMap<String, String>) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    fs::write(&file, text).unwrap();
    match load(&Sources { file: Some(file.clone()), variables, ..Sources::default() }) {
        Ok(loaded) => {
            let printed = yaml(&serde_json::to_value(&loaded.config).unwrap());
            fs::write(&file, &printed).unwrap();
            let again = load(&Sources { file: Some(file), ..Sources::default() });
            assert!(again.is_ok(), "{printed}\n{:?}", again.err());
            assert_eq!(again.unwrap().config, loaded.config, "{printed}");
            let _ = (loaded.config.view().unwrap(), loaded.config.differences().unwrap());
        }
        Err(problems) => {
            assert!(!problems.0.is_empty());
            for problem in problems.0 {
                assert!(!problem.message.is_empty(), "{problem}");
            }
        }
    }
}

/// Reads a machine from files below `/sys` and `/proc`. Each line of the input is a path, a colon and the content of a file, in
/// which `|` stands for a newline. Checks that the machine is consistent.
pub(crate) fn sysfs(data: &[u8]) {
    const MAX_FILES: usize = 64;
    let Ok(text) = str::from_utf8(data) else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for line in text.lines().take(MAX_FILES) {
        let Some((path, content)) = line.split_once(": ") else { continue };
        let path = Path::new(path);
        if path.components().any(|part| !matches!(part, Component::Normal(_))) {
            continue;
        }
        let path: PathBuf = root.join(path);
        // Skips a path below another file.
        if path.parent().is_some_and(|parent| fs::create_dir_all(parent).is_ok()) {
            let _ = fs::write(path, content.replace('|', "\n"));
        }
    }
    if let Err(error) = sysfs::offline_cpus(root) {
        assert!(!error.to_string().is_empty());
    }
    let Ok(machine) = sysfs::read(root) else { return };
    assert!(!machine.cpus.is_empty() && !machine.nodes.is_empty());
    for (&id, node) in &machine.nodes {
        assert!(node.cpus.is_subset(&machine.cpu_ids()));
        assert!(machine.nodes.keys().all(|&other| machine.distance(id, other).is_some()));
        if let Ok(memory) = sysfs::node_memory(root, id) {
            let _ = memory.base();
            if let Ok(watermarks) = sysfs::watermarks(root, Bytes(4096)) {
                let _ = watermarks.get(&id).map(|of| of.obtainable(&memory));
            }
        }
    }
    for (id, cpu) in &machine.cpus {
        assert!(machine.nodes.get(&cpu.node).is_some_and(|node| node.cpus.contains(*id)));
    }
}

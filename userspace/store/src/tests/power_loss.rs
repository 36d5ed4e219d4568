//! Tests of the store on a model of a disk that loses everything that was not synced.
//!
//! The model keeps the durable content of each file and the writes since. When power is lost, a random number of the
//! pending writes to each sector of 512 bytes is applied, in order; the last one may be torn. Of the pending changes of
//! names, a random selection is applied, which may include later ones without earlier ones. After a failed sync, the
//! pending data is durable or lost, and counts as clean from then on, as on Linux.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use super::{
    super::disk::{DiskFile, FileSystem, Lock, SyncPoint},
    Ledger, LoadedLedger, Store, StoreError,
};

const SECTOR: usize = 512;
const DIR: &str = "/var/lib/numaward";

/// A pseudo-random number generator: splitmix64 (Steele, Lea and Flood 2014).
struct Random(Cell<u64>);

impl Random {
    fn below(&self, end: usize) -> usize {
        self.0.set(self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
        let mut z = self.0.get();
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % end as u64).unwrap()
    }

    fn one_in(&self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// A file, independent of its names.
#[derive(Clone, Debug, Default)]
struct Inode {
    durable: Vec<u8>,
    current: Vec<u8>,
    /// Writes since the last sync: offset and data.
    pending: Vec<(usize, Vec<u8>)>,
}

impl Inode {
    /// Returns the content after a loss of power.
    fn after_loss(&self, chance: &Random) -> Vec<u8> {
        let mut found = self.durable.clone();
        let end = self.pending.iter().map(|(at, bytes)| at + bytes.len()).max().unwrap_or(0);
        for sector in 0..end.div_ceil(SECTOR) {
            let (from, to) = (sector * SECTOR, (sector + 1) * SECTOR);
            let of_sector: Vec<_> = self
                .pending
                .iter()
                .filter_map(|(at, bytes)| {
                    let (begin, end) = (from.max(*at), to.min(at + bytes.len()));
                    (begin < end).then(|| (begin, &bytes[begin - at..end - at]))
                })
                .collect();
            let mut done = if of_sector.is_empty() { 0 } else { chance.below(of_sector.len() + 1) };
            let is_torn = done > 0 && chance.one_in(4);
            for (at, bytes) in of_sector {
                if done == 0 {
                    break;
                }
                done -= 1;
                let length = if done == 0 && is_torn { chance.below(bytes.len() + 1) } else { bytes.len() };
                write_bytes(&mut found, at, &bytes[..length]);
            }
        }
        found
    }
}

fn write_bytes(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    content.resize(content.len().max(at + bytes.len()), 0);
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The target of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
enum PathTarget {
    Dir,
    File(usize),
}

/// A change of names in one directory, applied completely or not at all.
type NameChange = Vec<(PathBuf, Option<PathTarget>)>;

#[derive(Debug, Default)]
struct Platter {
    inodes: Vec<Inode>,
    durable: BTreeMap<PathBuf, PathTarget>,
    current: BTreeMap<PathBuf, PathTarget>,
    pending: Vec<NameChange>,
    /// A sync that is silently skipped.
    ignored: Option<SyncPoint>,
    /// The error of a sync of an ancestor of the store's directory.
    refused_above: Option<io::ErrorKind>,
    /// The number of operations until the process is killed or power is lost.
    steps_left: Option<usize>,
    /// The number of operations until one fails.
    failure: Option<usize>,
    /// The seed for the effects of a failed sync.
    seed: u64,
    /// The syncs that had an effect.
    done: BTreeSet<SyncPoint>,
}

impl Platter {
    /// Counts an operation. Returns an error if it has to fail.
    fn step(&mut self) -> io::Result<()> {
        if let Some(left) = &mut self.steps_left {
            *left = left.checked_sub(1).ok_or_else(|| io::Error::other("no more"))?;
        }
        let fails = self.failure == Some(0);
        self.failure = self.failure.and_then(|left| left.checked_sub(1));
        if fails { Err(io::Error::other("the disk fails")) } else { Ok(()) }
    }

    fn file(&self, path: &Path) -> io::Result<usize> {
        match self.current.get(path) {
            Some(PathTarget::File(inode)) => Ok(*inode),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn change(&mut self, change: NameChange) {
        apply(&mut self.current, &change);
        self.pending.push(change);
    }

    /// Simulates a loss of power.
    fn lose_power(&mut self, chance: &Random) {
        let in_order = chance.one_in(2);
        let until = chance.below(self.pending.len() + 1);
        for (number, change) in std::mem::take(&mut self.pending).iter().enumerate() {
            if if in_order { number < until } else { chance.one_in(2) } {
                apply(&mut self.durable, change);
            }
        }
        // A directory that is lost takes its entries with it.
        let there = self.durable.clone();
        self.durable.retain(|path, _| {
            path.ancestors().skip(1).all(|above| above == Path::new("/") || there.contains_key(above))
        });
        self.current = self.durable.clone();
        for inode in &mut self.inodes {
            inode.current = inode.after_loss(chance);
            (inode.durable, inode.pending) = (inode.current.clone(), Vec::new());
        }
        (self.steps_left, self.failure) = (None, None);
    }
}

fn apply(names: &mut BTreeMap<PathBuf, PathTarget>, change: &NameChange) {
    for (path, now) in change {
        match now {
            Some(of) => names.insert(path.clone(), *of),
            None => names.remove(path),
        };
    }
}

#[derive(Clone, Debug, Default)]
struct DiskModel(Arc<Mutex<Platter>>);

impl DiskModel {
    fn with<T>(&self, run: impl FnOnce(&mut Platter) -> T) -> T {
        run(&mut self.0.lock().unwrap())
    }
}

#[derive(Debug)]
struct DiskModelFile(DiskModel, usize);

impl FileSystem for DiskModel {
    fn make_dir(&self, dir: &Path, _: u32) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            if platter.current.contains_key(dir) || dir == Path::new("/") {
                return Ok(());
            }
            if dir
                .parent()
                .is_some_and(|above| above != Path::new("/") && !platter.current.contains_key(above))
            {
                return Err(io::ErrorKind::NotFound.into());
            }
            platter.change(vec![(dir.to_owned(), Some(PathTarget::Dir))]);
            Ok(())
        })
    }

    fn lock(&self, _: &Path) -> Result<Lock, StoreError> {
        Ok(Box::new(()))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.with(|platter| Ok(platter.inodes[platter.file(path)?].current.clone()))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.with(|platter| {
            platter.step()?;
            if platter.current.contains_key(path) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            let inode = platter.inodes.len();
            platter.inodes.push(Inode::default());
            platter.change(vec![(path.to_owned(), Some(PathTarget::File(inode)))]);
            Ok(Box::new(DiskModelFile(self.clone(), inode)) as Box<dyn DiskFile>)
        })
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let inode = self.with(|platter| platter.file(path))?;
        Ok(Box::new(DiskModelFile(self.clone(), inode)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            let inode = platter.file(from)?;
            platter.change(vec![(from.to_owned(), None), (to.to_owned(), Some(PathTarget::File(inode)))]);
            Ok(())
        })
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            let inode = platter.file(from)?;
            platter.change(vec![(to.to_owned(), Some(PathTarget::File(inode)))]);
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            platter.file(path)?;
            platter.change(vec![(path.to_owned(), None)]);
            Ok(())
        })
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        let is_within = |path: &&PathBuf| path.parent() == Some(dir);
        self.with(|platter| Ok(platter.current.keys().filter(is_within).cloned().collect()))
    }

    fn sync_dir(&self, dir: &Path, reason: SyncPoint) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            if let Some(error) = platter.refused_above.filter(|_| dir != Path::new(DIR)) {
                return Err(error.into());
            }
            if platter.ignored == Some(reason) {
                return Ok(());
            }
            let changes = std::mem::take(&mut platter.pending);
            let (now, later) =
                changes.into_iter().partition(|change: &NameChange| change[0].0.parent() == Some(dir));
            for change in &now {
                apply(&mut platter.durable, change);
                platter.done.insert(reason);
            }
            platter.pending = later;
            Ok(())
        })
    }
}

impl DiskFile for DiskModelFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.with(|platter| platter.inodes[self.1].current.len() as u64))
    }

    fn read_at(&self, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let at = usize::try_from(at).unwrap();
        self.0.with(|platter| Ok(platter.inodes[self.1].current[at..at + bytes].to_owned()))
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let at = usize::try_from(at).unwrap();
        self.0.with(|platter| {
            platter.step()?;
            let inode = &mut platter.inodes[self.1];
            write_bytes(&mut inode.current, at, bytes);
            inode.pending.push((at, bytes.to_owned()));
            Ok(())
        })
    }

    fn sync(&self, reason: SyncPoint) -> io::Result<()> {
        self.0.with(|platter| {
            let step = platter.step();
            if platter.ignored == Some(reason) {
                return Ok(());
            }
            let chance = Random(Cell::new(platter.seed));
            let goes_on = platter.steps_left != Some(0);
            let inode = &mut platter.inodes[self.1];
            if step.is_ok() {
                if !inode.pending.is_empty() {
                    platter.done.insert(reason);
                }
                inode.durable = inode.current.clone();
                inode.pending.clear();
            } else if goes_on {
                inode.durable = inode.after_loss(&chance);
                inode.pending.clear();
            }
            step
        })
    }
}

#[test]
fn starts_if_parent_cannot_be_synced() {
    for (error, opens) in [
        (io::ErrorKind::ReadOnlyFilesystem, true),
        (io::ErrorKind::InvalidInput, true),
        (io::ErrorKind::Unsupported, true),
        (io::ErrorKind::Other, false),
    ] {
        let disk = DiskModel::default();
        disk.with(|platter| platter.refused_above = Some(error));
        let opened = Store::<Ledger>::open_on(Box::new(disk), Path::new(DIR), SLOT);
        assert_eq!(opened.is_ok(), opens, "{error}: {opened:?}");
        if let Ok((mut store, _)) = opened {
            store.save(&vec![1]).unwrap();
        }
    }
}

/// Runs one schedule. Returns the error that it found, and the syncs that had an effect.
fn run(seed: u64, ignored: Option<SyncPoint>) -> (Result<(), String>, BTreeSet<SyncPoint>) {
    let disk = DiskModel::default();
    disk.with(|platter| (platter.ignored, platter.seed) = (ignored, seed));
    let outcome = schedule(&disk, &Random(Cell::new(seed)));
    (outcome, disk.with(|platter| std::mem::take(&mut platter.done)))
}

/// Runs saves, crashes and errors in a random order. After each crash, the ledger must be the last one with a save that
/// returned, or the one that was being saved.
fn schedule(disk: &DiskModel, chance: &Random) -> Result<(), String> {
    let dir = Path::new(DIR);
    // The last saved ledger, and one that may have been saved.
    let (mut last, mut maybe): (Option<Ledger>, Option<Ledger>) = (None, None);
    let (mut value, mut is_removed) = (0, false);
    let mut kept: BTreeSet<(Vec<u8>, PathBuf)> = BTreeSet::new();
    for _ in 0..6 {
        let cut = |platter: &mut Platter| {
            platter.steps_left = chance.one_in(2).then(|| chance.below(20));
            platter.failure = (platter.steps_left.is_none() && chance.one_in(2)).then(|| chance.below(20));
        };
        let open = || Store::<Ledger>::open_on(Box::new(disk.clone()), dir, SLOT);
        if chance.one_in(4) {
            disk.with(|platter| platter.steps_left = Some(chance.below(10)));
            drop(open());
            disk.with(|platter| platter.lose_power(chance));
        }
        let (mut store, loaded) = open().map_err(|error| format!("opening: {error}"))?;
        let (found, set_aside) = match loaded {
            LoadedLedger::Fresh => (None, Vec::new()),
            LoadedLedger::Current { ledger, set_aside } => (Some(ledger), set_aside),
            // A save was torn at its generation, or the journal was removed.
            LoadedLedger::Previous { ledger, set_aside } if !set_aside.is_empty() || is_removed => {
                (Some(ledger), set_aside)
            }
            LoadedLedger::Rebuild { set_aside } if last.is_none() => (None, set_aside),
            other => return Err(format!("{other:?} instead of {last:?}")),
        };
        if found != last && (maybe.is_none() || found != maybe) {
            let what = |ledger: &Option<Ledger>| ledger.as_ref().map(|ledger| (ledger[0], ledger.len()));
            let (found, last, maybe) = (what(&found), what(&last), what(&maybe));
            return Err(format!("{found:?} was found, {last:?} saved, {maybe:?} begun, {set_aside:?}"));
        }
        let now = set_aside.into_iter().map(|aside| (disk.read(&aside.path).unwrap(), aside.path));
        kept.extend(now);
        if let Some((_, path)) = kept.iter().find(|(text, path)| disk.read(path).ok().as_ref() != Some(text))
        {
            return Err(format!("{} was not kept", path.display()));
        }
        (last, maybe) = (found, None);
        disk.with(cut);
        for _ in 0..chance.below(6) {
            value += 1;
            let ledger = vec![value; [1, 1, 1, 1, 300, 2000][chance.below(6)]];
            let saved = store.save(&ledger);
            match saved {
                Ok(()) => (last, maybe, is_removed) = (Some(ledger), None, false),
                // A crash interrupted the save; any other failed save is withdrawn.
                Err(_) if disk.with(|platter| platter.steps_left == Some(0)) => {
                    maybe = Some(ledger);
                    break;
                }
                Err(_) => {}
            }
            if chance.one_in(2) {
                let _ = store.write_out();
            }
        }
        let behind = store.pending_write_out();
        drop(store);
        // The process was killed, or power was lost.
        if chance.one_in(2) {
            disk.with(|platter| platter.lose_power(chance));
        }
        disk.with(|platter| (platter.steps_left, platter.failure) = (None, None));
        // Another program removes the journal.
        if behind.is_none() && maybe.is_none() && last.is_some() && chance.one_in(4) {
            is_removed = true;
            let journal = dir.join("ledger.journal");
            disk.with(|platter| {
                platter.current.remove(&journal);
                platter.durable.remove(&journal);
            });
            match open().map_err(|error| format!("opening: {error}"))?.1 {
                LoadedLedger::Previous { ledger, .. } if Some(&ledger) == last.as_ref() => {}
                other => return Err(format!("without its journal it is {other:?} instead of {last:?}")),
            }
        }
    }
    Ok(())
}

const SLOT: usize = 4096;

#[test]
fn power_loss_keeps_every_save() {
    for seed in 0..10_000 {
        if let (Err(problem), _) = run(seed, None) {
            panic!("seed {seed}: {problem}");
        }
    }
}

#[test]
fn each_sync_is_needed() {
    let all: BTreeSet<SyncPoint> = (0..2_000).flat_map(|seed| run(seed, None).1).collect();
    assert_eq!(all.len(), 11, "{all:?}");
    for sync in all {
        let is_noticed = (0..10_000).any(|seed| run(seed, Some(sync)).0.is_err());
        assert!(is_noticed, "nothing is lost without {sync:?}");
    }
}

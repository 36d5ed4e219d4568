//! The store on a disk that loses what was not made durable.
//!
//! The disk keeps, of each file, what is durable and what was written since. When power is lost, each sector of 512 bytes
//! gets as many of the writes to it as chance wants, in their order, of which the last may be torn; and of the names, as
//! many changes as chance wants, also later ones without earlier ones. An error of a sync leaves what was not durable
//! either durable or lost, and takes it for clean from then on, as Linux does.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use super::{
    super::disk::{Disk, DiskFile, Lock, SyncPoint},
    Ledger, LoadedLedger, Store, StoreError,
};

const SECTOR: usize = 512;
const DIR: &str = "/var/lib/numaward";

/// Numbers that look random. splitmix64 (Steele, Lea and Flood 2014).
struct Chance(Cell<u64>);

impl Chance {
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

/// A file, whatever its name.
#[derive(Clone, Debug, Default)]
struct Inode {
    durable: Vec<u8>,
    current: Vec<u8>,
    /// Written since: where and what.
    pending: Vec<(usize, Vec<u8>)>,
}

impl Inode {
    /// What may be found of it when power is lost now.
    fn after_loss(&self, chance: &Chance) -> Vec<u8> {
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
                put(&mut found, at, &bytes[..length]);
            }
        }
        found
    }
}

fn put(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    content.resize(content.len().max(at + bytes.len()), 0);
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Named {
    Dir,
    File(usize),
}

/// A change of names in one directory, which is done whole or not at all.
type Change = Vec<(PathBuf, Option<Named>)>;

#[derive(Debug, Default)]
struct Platter {
    inodes: Vec<Inode>,
    durable: BTreeMap<PathBuf, Named>,
    current: BTreeMap<PathBuf, Named>,
    pending: Vec<Change>,
    /// What is not done when it is asked for.
    ignored: Option<SyncPoint>,
    /// What a sync of a directory above the store's fails with.
    refused_above: Option<io::ErrorKind>,
    /// How many more operations are done before the process is killed or power is lost.
    steps_left: Option<usize>,
    /// How many more are done before one fails.
    failure: Option<usize>,
    /// By a sync that failed.
    seed: u64,
    /// The syncs that were done.
    done: BTreeSet<SyncPoint>,
}

impl Platter {
    /// One more operation: an error if it is not to be.
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
            Some(Named::File(inode)) => Ok(*inode),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.current, &change);
        self.pending.push(change);
    }

    /// What is there after power was lost.
    fn lose_power(&mut self, chance: &Chance) {
        let in_order = chance.one_in(2);
        let until = chance.below(self.pending.len() + 1);
        for (number, change) in std::mem::take(&mut self.pending).iter().enumerate() {
            if if in_order { number < until } else { chance.one_in(2) } {
                apply(&mut self.durable, change);
            }
        }
        // What was in a directory is gone with it.
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

fn apply(names: &mut BTreeMap<PathBuf, Named>, change: &Change) {
    for (path, now) in change {
        match now {
            Some(of) => names.insert(path.clone(), *of),
            None => names.remove(path),
        };
    }
}

#[derive(Clone, Debug, Default)]
struct Model(Arc<Mutex<Platter>>);

impl Model {
    fn with<T>(&self, run: impl FnOnce(&mut Platter) -> T) -> T {
        run(&mut self.0.lock().unwrap())
    }
}

#[derive(Debug)]
struct ModelFile(Model, usize);

impl Disk for Model {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
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
            platter.change(vec![(dir.to_owned(), Some(Named::Dir))]);
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
            platter.change(vec![(path.to_owned(), Some(Named::File(inode)))]);
            Ok(Box::new(ModelFile(self.clone(), inode)) as Box<dyn DiskFile>)
        })
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let inode = self.with(|platter| platter.file(path))?;
        Ok(Box::new(ModelFile(self.clone(), inode)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            let inode = platter.file(from)?;
            platter.change(vec![(from.to_owned(), None), (to.to_owned(), Some(Named::File(inode)))]);
            Ok(())
        })
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            let inode = platter.file(from)?;
            platter.change(vec![(to.to_owned(), Some(Named::File(inode)))]);
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

    fn sync_dir(&self, dir: &Path, why: SyncPoint) -> io::Result<()> {
        self.with(|platter| {
            platter.step()?;
            if let Some(error) = platter.refused_above.filter(|_| dir != Path::new(DIR)) {
                return Err(error.into());
            }
            if platter.ignored == Some(why) {
                return Ok(());
            }
            let changes = std::mem::take(&mut platter.pending);
            let (now, later) =
                changes.into_iter().partition(|change: &Change| change[0].0.parent() == Some(dir));
            for change in &now {
                apply(&mut platter.durable, change);
                platter.done.insert(why);
            }
            platter.pending = later;
            Ok(())
        })
    }
}

impl DiskFile for ModelFile {
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
            put(&mut inode.current, at, bytes);
            inode.pending.push((at, bytes.to_owned()));
            Ok(())
        })
    }

    fn sync(&self, why: SyncPoint) -> io::Result<()> {
        self.0.with(|platter| {
            let step = platter.step();
            if platter.ignored == Some(why) {
                return Ok(());
            }
            let chance = Chance(Cell::new(platter.seed));
            let goes_on = platter.steps_left != Some(0);
            let inode = &mut platter.inodes[self.1];
            if step.is_ok() {
                if !inode.pending.is_empty() {
                    platter.done.insert(why);
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
fn a_directory_above_that_cannot_be_synced_does_not_stop_the_first_start() {
    for (error, opens) in [
        (io::ErrorKind::ReadOnlyFilesystem, true),
        (io::ErrorKind::InvalidInput, true),
        (io::ErrorKind::Unsupported, true),
        (io::ErrorKind::Other, false),
    ] {
        let disk = Model::default();
        disk.with(|platter| platter.refused_above = Some(error));
        let opened = Store::<Ledger>::open_on(Box::new(disk), Path::new(DIR), SLOT);
        assert_eq!(opened.is_ok(), opens, "{error}: {opened:?}");
        if let Ok((mut store, _)) = opened {
            store.save(&vec![1]).unwrap();
        }
    }
}

/// What was found wrong, and which syncs were done.
fn run(seed: u64, ignored: Option<SyncPoint>) -> (Result<(), String>, BTreeSet<SyncPoint>) {
    let disk = Model::default();
    disk.with(|platter| (platter.ignored, platter.seed) = (ignored, seed));
    let outcome = schedule(&disk, &Chance(Cell::new(seed)));
    (outcome, disk.with(|platter| std::mem::take(&mut platter.done)))
}

/// Saves, crashes and errors in a random order. What is found afterwards has to be the last save that returned, or the one
/// that was being done when it crashed.
fn schedule(disk: &Model, chance: &Chance) -> Result<(), String> {
    let dir = Path::new(DIR);
    // What was saved last, and what may have been.
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
            // A save was torn where its number is, or the journal was removed.
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
                // It was cut off; or it failed, and says that it is none.
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
        // Somebody removes the journal.
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
fn no_save_is_lost_or_invented_when_power_is_lost() {
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

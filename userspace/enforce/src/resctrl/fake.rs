//! A fake of resctrl for tests: a plain directory, with the kernel's reaction to the creation, removal and writing of
//! its files.
//!
//! It imitates the rules of Documentation/filesystems/resctrl.rst on which the code relies: the files of a new group,
//! the maximum number of groups, the accepted masks and shares and their rounding, the group of a thread, and the
//! messages in `info/last_cmd_status`. Counters have the values that a test writes. The fake shows nothing about a real
//! processor. A file [`FAKE_MARKER`] marks the directory as a fake, for people and for the daemon.

#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "this is part of tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use rustix::io::Errno;

use super::{FAKE_MARKER, ResctrlKernel};

/// Ids of the L3 caches.
const CACHES: [u32; 2] = [0, 1];
/// Mask of their ways.
const MASK: u64 = 0xfff;
/// Minimum number of ways of a group.
const MIN_WAYS: u32 = 2;

/// A fake of the file system and of the kernel.
#[derive(Debug)]
pub struct FakeResctrl {
    root: PathBuf,
    commands: Mutex<Vec<String>>,
    /// A mask that the fake refuses.
    refused: Mutex<Option<u64>>,
}

impl FakeResctrl {
    /// Creates a fake with two caches of 12 ways, bandwidth in steps of 10 %, monitoring, four groups of classes and
    /// six monitoring groups, each including the default one.
    pub fn new(root: &Path) -> Arc<Self> {
        let fake = Self { root: root.to_owned(), commands: Mutex::default(), refused: Mutex::default() };
        for (file, text) in [
            (
                FAKE_MARKER,
                "This tree is made up by a test. It is not the kernel's, and nothing is shared out or counted by it.",
            ),
            ("info/last_cmd_status", "ok"),
            ("info/L3/cbm_mask", "fff"),
            ("info/L3/min_cbm_bits", "2"),
            ("info/L3/num_closids", "4"),
            ("info/MB/min_bandwidth", "10"),
            ("info/MB/bandwidth_gran", "10"),
            ("info/MB/num_closids", "8"),
            ("info/L3_MON/mon_features", "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes"),
            ("info/L3_MON/num_rmids", "6"),
        ] {
            fake.write_file(file, text);
        }
        fake.fill(root, true);
        Arc::new(fake)
    }

    /// Writes a file regardless of the kernel's rules.
    pub fn write_file(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    /// Reads a file.
    pub fn text(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap()
    }

    /// Refuses this mask from now on.
    pub fn refuse(&self, mask: u64) {
        *self.refused.lock().unwrap() = Some(mask);
    }

    /// Returns the threads of a group, which is named from the root.
    pub fn tasks(&self, group: &str) -> BTreeSet<u32> {
        tasks(&self.root.join(group))
    }

    /// Adds a thread to the default group.
    pub fn begin(&self, thread: u32) {
        enter(&self.root, thread);
    }

    /// Adds a thread to the group of another one.
    pub fn fork(&self, parent: u32, thread: u32) {
        for group in self.all().into_iter().filter(|group| tasks(group).contains(&parent)) {
            enter(&group, thread);
        }
    }

    /// Removes a thread.
    pub fn end(&self, thread: u32) {
        self.all().iter().for_each(|group| leave(group, thread));
    }

    /// Returns the operations since the last call: `mkdir`, `rmdir`, or the file and the text that was written to it.
    pub fn commands(&self) -> Vec<String> {
        std::mem::take(&mut *self.commands.lock().unwrap())
    }

    /// Returns the groups below the root.
    pub fn groups(&self) -> Vec<String> {
        let all = self.all();
        let below = all.iter().map(|group| group.strip_prefix(&self.root).unwrap().display().to_string());
        below.filter(|name| !name.is_empty()).collect()
    }

    fn all(&self) -> Vec<PathBuf> {
        let mut all = vec![self.root.clone()];
        all.extend(below(&self.root));
        for group in all.clone() {
            all.extend(below(&group.join("mon_groups")));
        }
        all
    }

    /// Creates the files of a new group.
    fn fill(&self, group: &Path, is_class: bool) {
        fs::create_dir_all(group).unwrap();
        fs::write(group.join("tasks"), "").unwrap();
        if is_class {
            fs::create_dir_all(group.join("mon_groups")).unwrap();
            let values = |value: &str| CACHES.map(|cache| format!("{cache}={value}")).join(";");
            let caches = if self.root.join("info/L3").is_dir() { &["L3"][..] } else { &["L3CODE", "L3DATA"] };
            let caches = caches.iter().map(|name| format!("{name:>7}:{}\n", values("fff")));
            let text = caches.collect::<String>() + &format!("     MB:{}\n", values("100"));
            fs::write(group.join("schemata"), text).unwrap();
        }
        for cache in CACHES {
            let dir = group.join(format!("mon_data/mon_L3_{cache:02}"));
            fs::create_dir_all(&dir).unwrap();
            for file in ["llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"] {
                fs::write(dir.join(file), "0\n").unwrap();
            }
        }
    }

    fn fails(&self, errno: Errno, status: &str) -> io::Error {
        self.write_file("info/last_cmd_status", status);
        errno.into()
    }

    fn note(&self, command: String) {
        self.write_file("info/last_cmd_status", "ok");
        self.commands.lock().unwrap().push(command);
    }

    fn name(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap().display().to_string()
    }

    /// Returns the maximum number of groups, from the first of these files that exists.
    fn limit(&self, files: &[&str]) -> usize {
        let file = files.iter().find(|file| self.root.join(file).exists()).unwrap();
        self.text(file).trim().parse().unwrap()
    }

    /// Moves a thread to a group.
    fn add(&self, group: &Path, thread: u32) -> io::Result<()> {
        let all = self.all();
        if !all.iter().any(|group| tasks(group).contains(&thread)) {
            return Err(Errno::SRCH.into());
        }
        let class = group.parent().filter(|dir| dir.ends_with("mon_groups")).and_then(Path::parent);
        if class.is_some_and(|class| !tasks(class).contains(&thread)) {
            return Err(self.fails(Errno::INVAL, "Can't move task to different control group"));
        }
        for other in &all {
            if class != Some(other) {
                leave(other, thread);
            }
        }
        enter(group, thread);
        Ok(())
    }

    /// Applies a line of `schemata`.
    fn share(&self, group: &Path, text: &str) -> io::Result<()> {
        let Some(line) = text.strip_suffix('\n') else { return Err(self.fails(Errno::INVAL, "ok")) };
        let (name, values) = line.split_once(':').unwrap();
        let file = group.join("schemata");
        let before = fs::read_to_string(&file).unwrap();
        let values_of = |line: &str| -> Option<BTreeMap<String, String>> {
            let values = line.trim_start().strip_prefix(&format!("{name}:"))?.split(';');
            Some(
                values.map(|of| of.split_once('=').unwrap()).map(|(of, to)| (of.into(), to.into())).collect(),
            )
        };
        let Some(mut taken) = before.lines().find_map(values_of) else {
            return Err(self.fails(Errno::INVAL, &format!("Unknown or unsupported resource name '{name}'")));
        };
        // Caches that are not named keep their values.
        for value in values.split(';') {
            let (cache, value) = value.split_once('=').unwrap();
            let value = if name == "MB" {
                let percent: u32 = value.parse().unwrap();
                if !(10..=100).contains(&percent) {
                    let status = format!("MB value {percent} out of range [10,100]");
                    return Err(self.fails(Errno::INVAL, &status));
                }
                format!("{:>3}", percent.next_multiple_of(10))
            } else {
                let mask = u64::from_str_radix(value, 16).unwrap();
                if *self.refused.lock().unwrap() == Some(mask) {
                    return Err(self.fails(Errno::INVAL, "Refused by the test"));
                }
                let low = mask >> mask.trailing_zeros().min(63);
                if mask & !MASK != 0 || low & (low + 1) != 0 || mask.count_ones() < MIN_WAYS {
                    return Err(
                        self.fails(Errno::INVAL, &format!("Need at least {MIN_WAYS} bits in the mask"))
                    );
                }
                format!("{mask:03x}")
            };
            taken.insert(cache.to_owned(), value);
        }
        let taken: Vec<String> = taken.iter().map(|(cache, value)| format!("{cache}={value}")).collect();
        let lines = before.lines().map(|line| {
            let (this, _) = line.split_once(':').unwrap();
            if this.trim() == name { format!("{this}:{}\n", taken.join(";")) } else { format!("{line}\n") }
        });
        fs::write(&file, lines.collect::<String>())
    }
}

impl ResctrlKernel for FakeResctrl {
    fn make(&self, dir: &Path) -> io::Result<()> {
        self.note(format!("mkdir {}", self.name(dir)));
        if dir.exists() {
            return Err(Errno::EXIST.into());
        }
        let all = self.all();
        let is_class = dir.parent() == Some(&self.root);
        let classes = all.iter().filter(|group| group.join("schemata").exists()).count();
        if is_class && classes >= self.limit(&["info/L3/num_closids", "info/L3CODE/num_closids"]) {
            return Err(self.fails(Errno::NOSPC, "Out of CLOSIDs"));
        }
        if all.len() >= self.limit(&["info/L3_MON/num_rmids"]) {
            return Err(self.fails(Errno::NOSPC, "Out of RMIDs"));
        }
        self.fill(dir, is_class);
        Ok(())
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        self.note(format!("rmdir {}", self.name(dir)));
        let threads = tasks(dir);
        fs::remove_dir_all(dir)?;
        // Threads of a monitoring group of the default group are there already.
        if dir.parent() == Some(&self.root) {
            for thread in threads {
                enter(&self.root, thread);
            }
        }
        Ok(())
    }

    fn write(&self, file: &Path, text: &str) -> io::Result<()> {
        self.note(format!("{} {}", self.name(file), text.trim()));
        let group = file.parent().unwrap();
        if !file.exists() {
            return Err(Errno::NOENT.into());
        }
        match file.file_name().unwrap().to_str().unwrap() {
            "tasks" => self.add(group, text.trim().parse().unwrap()),
            "schemata" => self.share(group, text),
            _ => Err(Errno::ACCESS.into()),
        }
    }
}

/// Returns the groups in a directory.
fn below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut groups: Vec<PathBuf> = entries.filter(|path| path.join("tasks").exists()).collect();
    groups.sort();
    groups
}

fn tasks(group: &Path) -> BTreeSet<u32> {
    let text = fs::read_to_string(group.join("tasks")).unwrap_or_default();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

/// Formats threads as the kernel lists them.
pub(super) fn list<'a>(threads: impl IntoIterator<Item = &'a u32>) -> String {
    threads.into_iter().fold(String::new(), |text, thread| text + &thread.to_string() + "\n")
}

fn keep(group: &Path, threads: &BTreeSet<u32>) {
    fs::write(group.join("tasks"), list(threads)).unwrap();
}

fn enter(group: &Path, thread: u32) {
    let mut threads = tasks(group);
    threads.insert(thread);
    keep(group, &threads);
}

fn leave(group: &Path, thread: u32) {
    let mut threads = tasks(group);
    if threads.remove(&thread) {
        keep(group, &threads);
    }
}

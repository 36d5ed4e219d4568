//! Executable mappings of a workload's processes, and the mapped files.
//!
//! A file is opened below `/proc/PID/root`, the root directory of the process, component by component. Absolute links and
//! `..` are resolved within that root, so that a container cannot make the daemon read files of the host. Only regular
//! files are opened, and only if their inode number is that of the mapping.

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, BufRead, BufReader},
    ops::Range,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
    path::{Component, Path, PathBuf},
    time::Instant,
};

use numaward_cgroup::{
    TruncatedLines,
    read::{self, FoundProcesses},
    read_lossy,
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, fstat, openat, readlinkat},
    io::Errno,
};

/// Most processes of a workload that are listed.
const MAX_PROCESSES: usize = 4096;
/// Most symbolic links that are followed in a path.
const MAX_LINKS: usize = 40;
/// Most directories and links that are opened for a path, one after the other.
const MAX_OPENS: usize = 512;

/// An executable mapping of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) range: Range<u64>,
    /// Offset of the mapping in the file.
    pub(super) offset: u64,
    pub(super) inode: u64,
    /// Path of the file or a name in brackets; empty if there is none.
    pub(super) name: String,
}

/// A process of which code is searched.
#[derive(Debug)]
pub(super) struct SearchedProcess {
    dir: PathBuf,
    pub(super) command: String,
    /// Mappings that contain searched addresses, by address. Empty if they cannot be read.
    pub(super) code: Vec<Mapping>,
    /// Error that prevented reading the mappings.
    pub(super) read_error: Option<io::Error>,
}

/// Search for mappings of processes.
#[derive(Debug)]
pub(super) struct MappingSearch {
    /// Sorted addresses; their mappings are kept.
    pub(super) addresses: Vec<u64>,
    /// Bytes still available for names of mappings.
    pub(super) room: usize,
    /// True if mappings were dropped because `room` was exhausted.
    pub(super) is_full: bool,
    /// Time at which reading stops.
    pub(super) deadline: Instant,
}

impl SearchedProcess {
    /// Reads a process below `proc`; `None` if it is gone.
    pub(super) fn read(proc: &Path, pid: u32, search: &mut MappingSearch) -> Option<Self> {
        let dir = proc.join(pid.to_string());
        let command = read_lossy(&dir.join("comm")).ok()?.trim_end().to_owned();
        let maps = File::open(dir.join("maps")).map(|file| BufReader::with_capacity(1 << 16, file));
        let (code, read_error) = match maps.and_then(|maps| mappings(maps, search)) {
            Ok(code) => (code, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        Some(Self { dir, command, code, read_error })
    }

    /// Returns the mapping of an address.
    pub(super) fn mapping(&self, address: u64) -> Option<&Mapping> {
        let place = self.code.partition_point(|mapping| mapping.range.end <= address);
        self.code.get(place).filter(|mapping| mapping.range.contains(&address))
    }

    /// Opens the file of a mapping. Fails if the path now belongs to a file with another inode number.
    pub(super) fn open(&self, mapping: &Mapping) -> io::Result<File> {
        let file = open_below(&self.dir.join("root"), Path::new(&mapping.name))?;
        if fstat(&file)?.st_ino == mapping.inode {
            Ok(file)
        } else {
            Err(io::Error::other("the file was replaced since it was mapped"))
        }
    }
}

/// Returns the executable mappings that contain searched addresses, from `/proc/PID/maps`, in the order of addresses. Stops at
/// the deadline, and subtracts the size of the mappings from `search.room`.
pub(super) fn mappings(maps: impl BufRead, search: &mut MappingSearch) -> io::Result<Vec<Mapping>> {
    let (mut lines, mut found) = (TruncatedLines::new(maps), Vec::new());
    while let Some(line) = lines.next_line()? {
        if Instant::now() >= search.deadline {
            break;
        }
        let Some(mapping) = mapping(&String::from_utf8_lossy(line)) else { continue };
        let place = search.addresses.partition_point(|address| *address < mapping.range.start);
        if search.addresses.get(place).is_none_or(|address| *address >= mapping.range.end) {
            continue;
        }
        match search.room.checked_sub(size_of::<Mapping>() + mapping.name.len()) {
            Some(left) => {
                search.room = left;
                found.push(mapping);
            }
            None => search.is_full = true,
        }
    }
    Ok(found)
}

fn mapping(line: &str) -> Option<Mapping> {
    // 7f0000001000-7f0000002000 r-xp 00001000 fd:00 123   /usr/lib/a file
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    words.next().filter(|access| access.contains('x'))?;
    let offset = hex(words.next()?)?;
    let inode = words.nth(1)?.parse().ok()?;
    let name = words.next().unwrap_or_default().trim().to_owned();
    Some(Mapping { range: start..end, offset, inode, name })
}

/// Returns the processes in a cgroup and its descendants, at most [`MAX_PROCESSES`]. Adds a note if cgroups were skipped.
pub(crate) fn processes_below(dir: &Path, notes: &mut BTreeSet<String>) -> Vec<u32> {
    let FoundProcesses { ids, is_partial } = read::processes_below(dir, MAX_PROCESSES);
    if is_partial {
        notes.insert(
            "not all cgroups were searched for processes: they cannot be read, or there are too many"
                .to_owned(),
        );
    }
    ids
}

/// Opens a file as seen by a process with the root directory `root`. At most four files are open meanwhile, and only the file itself when
/// it is opened for reading, which its owner can delay.
fn open_below(root: &Path, path: &Path) -> io::Result<File> {
    let only_look = OFlags::PATH | OFlags::CLOEXEC;
    let root = openat(CWD, root, only_look | OFlags::DIRECTORY, Mode::empty())?;
    // The current directory, and its path from the root.
    let (mut dir, mut names): (Option<OwnedFd>, Vec<OsString>) = (None, Vec::new());
    let mut rest = steps(path);
    let (mut links, mut opens) = (0, 0);
    while let Some(step) = rest.pop() {
        if step == ".." {
            // The directory could have been moved out of the root meanwhile. The parent of the root is the root.
            names.pop();
            while rest.pop_if(|next| next == "..").is_some() {
                names.pop();
            }
            rest.extend(names.drain(..).rev());
            dir = None;
            continue;
        }
        opens += 1;
        if opens > MAX_OPENS || rest.len() > MAX_OPENS {
            return Err(io::Error::other(format!(
                "its path has more than {MAX_OPENS} directories and links"
            )));
        }
        let fd = openat(dir.as_ref().unwrap_or(&root), &*step, only_look | OFlags::NOFOLLOW, Mode::empty())?;
        match FileType::from_raw_mode(fstat(&fd)?.st_mode) {
            FileType::Symlink if links < MAX_LINKS => {
                links += 1;
                let target = OsString::from_vec(readlinkat(&fd, "", Vec::new())?.into_bytes());
                let target = PathBuf::from(target);
                if target.has_root() {
                    (dir, names) = (None, Vec::new());
                }
                rest.extend(steps(&target));
            }
            FileType::Symlink => return Err(Errno::LOOP.into()),
            FileType::Directory => {
                names.push(step);
                dir = Some(fd);
            }
            // Until here the path was opened with `O_PATH` only, because opening a device or a pipe can have side effects.
            FileType::RegularFile if rest.is_empty() => {
                drop((dir, root));
                return File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
            }
            _ => break,
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Returns the components of a path, the last one first.
fn steps(path: &Path) -> Vec<OsString> {
    let step = |component| match component {
        Component::Normal(name) => Some(OsStr::from_bytes(name.as_bytes()).to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().rev().filter_map(step).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::Read as _,
        os::unix::fs::{MetadataExt as _, symlink},
        time::Duration,
    };

    use numaward_tests_support::is_alone;
    use rustix::process::{Resource, Rlimit, setrlimit};

    use super::*;

    fn search(addresses: &[u64]) -> MappingSearch {
        let deadline = Instant::now() + Duration::from_secs(10);
        MappingSearch { addresses: addresses.to_vec(), room: 4096, is_full: false, deadline }
    }

    #[test]
    fn keeps_executable_mappings() {
        let maps = "00400000-00401000 r--p 00000000 fd:00 12     /usr/bin/a program\n\
            00401000-00402000 r-xp 00001000 fd:00 12     /usr/bin/a program\n\
            7f0000000000-7f0000001000 rwxp 00000000 00:00 0 \n\
            7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0                          [vdso]\n\
            nonsense\n";
        let mut search = search(&[0x400_000, 0x401_001, 0x7f00_0000_0001, 0x7ffc_0000_0000]);
        let found = mappings(maps.as_bytes(), &mut search).unwrap();
        let names: Vec<&str> = found.iter().map(|mapping| mapping.name.as_str()).collect();
        assert_eq!(names, ["/usr/bin/a program", "", "[vdso]"]);
        assert_eq!(
            (found[0].range.clone(), found[0].offset, found[0].inode),
            (0x401_000..0x402_000, 0x1000, 12)
        );
        let process =
            SearchedProcess { dir: PathBuf::new(), command: String::new(), code: found, read_error: None };
        assert_eq!(process.mapping(0x401_fff).unwrap().name, "/usr/bin/a program");
        assert_eq!(process.mapping(0x402_000), None);
        assert_eq!(process.mapping(0), None);
        assert!(!search.is_full);
        search.addresses = vec![0, 0x400_fff, 0x402_000];
        assert!(mappings(maps.as_bytes(), &mut search).unwrap().is_empty(), "nothing of it is looked for");
        (search.addresses, search.room) = (vec![0x401_000], 1);
        assert!(mappings(maps.as_bytes(), &mut search).unwrap().is_empty() && search.is_full);
    }

    #[test]
    fn links_stay_below_the_root() {
        let host = tempfile::tempdir().unwrap();
        let root = host.path().join("root");
        fs::create_dir_all(root.join("lib/deep")).unwrap();
        fs::write(host.path().join("secret"), "of the host").unwrap();
        fs::write(root.join("lib/file"), "inside").unwrap();
        fs::write(root.join("secret"), "inside").unwrap();
        symlink("/lib/file", root.join("absolute")).unwrap();
        symlink("../../../../secret", root.join("lib/deep/up")).unwrap();
        symlink(host.path().join("secret"), root.join("out")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let text = |path: &str| {
            let mut text = String::new();
            open_below(&root, Path::new(path)).ok()?.read_to_string(&mut text).ok()?;
            Some(text)
        };
        for path in ["/lib/file", "/absolute", "/lib/deep/up", "/lib/../../secret", "lib/./file"] {
            assert_eq!(text(path).as_deref(), Some("inside"), "{path}");
        }
        for path in ["/out", "/loop", "/lib", "/lib/file/more", "/nowhere", ""] {
            assert_eq!(text(path), None, "{path}");
        }
    }

    /// A user can map a file behind any number of directories, and delay its opening.
    #[test]
    fn long_path_takes_few_descriptors() {
        const FILES: u64 = 8;
        if !is_alone() {
            return;
        }
        let host = tempfile::tempdir().unwrap();
        let create = |directories: usize| {
            let dir = "/d".repeat(directories);
            let created = host.path().join(&dir[1..]);
            fs::create_dir_all(&created).unwrap();
            fs::write(created.join("file"), "x").unwrap();
            PathBuf::from(format!("{dir}/file"))
        };
        let (long, longer) = (create(300), create(600));
        fs::write(host.path().join("d/d/file"), "x").unwrap();
        let (down, up) = ("d/".repeat(200), "../".repeat(200));
        symlink(format!("{down}{up}d/../d/d/file"), host.path().join("link")).unwrap();
        symlink(down + &"../d/".repeat(200) + "file", host.path().join("costly")).unwrap();
        let used = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(used + FILES), maximum: Some(used + FILES) })
            .unwrap();
        open_below(host.path(), &long).unwrap();
        open_below(host.path(), Path::new("/link")).unwrap();
        for path in [&longer, Path::new("/costly")] {
            let error = open_below(host.path(), path).unwrap_err().to_string();
            assert_eq!(error, "its path has more than 512 directories and links");
        }
    }

    #[test]
    fn opens_only_the_mapped_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("7/root")).unwrap();
        let file = dir.path().join("7/root/library");
        fs::write(&file, "code").unwrap();
        fs::write(dir.path().join("7/comm"), "some name\n").unwrap();
        let process = SearchedProcess::read(dir.path(), 7, &mut search(&[0])).unwrap();
        assert_eq!(process.command, "some name");
        assert!(process.read_error.is_some(), "it has no maps");
        let inode = fs::metadata(&file).unwrap().ino();
        let mapping = |inode| Mapping { range: 0..1, offset: 0, inode, name: "/library".to_owned() };
        assert!(process.open(&mapping(inode)).is_ok());
        assert!(process.open(&mapping(inode + 1)).is_err());
        assert!(SearchedProcess::read(dir.path(), 8, &mut search(&[0])).is_none());
    }

    #[test]
    fn lists_processes_of_descendants() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("cgroup.procs"), "10\n0\n").unwrap();
        fs::write(dir.path().join("a/b/cgroup.procs"), "11\n").unwrap();
        let mut notes = BTreeSet::new();
        assert_eq!(processes_below(dir.path(), &mut notes), [10, 11]);
        assert_eq!(notes, BTreeSet::new());
    }
}

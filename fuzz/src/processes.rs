//! Readers of a process's files: its mappings, with names and a number that the process chooses, and its programs.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Write as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use numaward_api::MAX_REGIONS;
use numaward_enforce::pages::{mappings_on_node, named_nodes, untouched_huge_pages};
use numaward_observe::{code_mappings, function_names, regions_of};
use numaward_tests_support::{peak, reset_peak};
use numaward_topology::NodeId;

/// Maximum increase of the peak memory by a reader, for any input: less than the largest files, so that a reader that collects one of
/// them exceeds it.
const CEILING: u64 = 6 << 20;
/// Size from which on a file that is made from an input is not repeated any more.
const MAX_FILE: u64 = 12 << 20;
/// Size of a program that is made from an input. The rest of the file is a hole.
const PROGRAM_SIZE: u64 = 12 << 20;
/// Bytes that are available for the names of mappings with code.
const NAME_ROOM: usize = 1 << 20;

/// Writes a file from an input. The rest of the input is repeated as often as the first byte says, as a power of two (`0` to
/// `?`). In the rest, `#` stands for the number of the repetition.
///
/// The text is not collected: the allocator could reuse its memory for a reader, and the peak would not grow.
fn write_repeated(path: &Path, input: &[u8]) {
    let (times, text) = input.split_first().unwrap_or((&0, &[]));
    let (mut file, mut size) = (BufWriter::new(File::create(path).unwrap()), 0);
    for number in 0..1_u32 << (times % 16) {
        for piece in text.split_inclusive(|byte| *byte == b'#') {
            match piece.strip_suffix(b"#") {
                Some(before) => {
                    file.write_all(before).unwrap();
                    write!(file, "{number:x}").unwrap();
                }
                None => file.write_all(piece).unwrap(),
            }
        }
        size += text.len() as u64;
        if size > MAX_FILE {
            break;
        }
    }
    file.flush().unwrap();
}

/// Runs a reader and checks that its memory does not depend on the input.
fn within_ceiling<T>(read: impl FnOnce() -> T) -> T {
    reset_peak();
    let before = peak();
    let found = read();
    let most = peak();
    assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
    found
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

/// A cgroup with one process, in folders of their own.
struct FakeHost {
    folder: tempfile::TempDir,
}

impl FakeHost {
    /// Creates a process with these files.
    fn new(files: &[(&str, &[u8])]) -> Self {
        let host = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir_all(host.process().join("task")).unwrap();
        fs::write(host.folder.path().join("cgroup.procs"), "7\n").unwrap();
        for (name, input) in files {
            write_repeated(&host.process().join(name), input);
        }
        host
    }

    fn cgroup(&self) -> &Path {
        self.folder.path()
    }

    fn proc(&self) -> PathBuf {
        self.folder.path().join("proc")
    }

    fn process(&self) -> PathBuf {
        self.proc().join("7")
    }
}

/// Checks that the regions of any `numa_maps` are few, and their names and its memory policy short.
pub(crate) fn numa_maps(data: &[u8]) {
    let host = FakeHost::new(&[("numa_maps", data)]);
    let regions = within_ceiling(|| regions_of(&host.process(), deadline())).unwrap();
    assert!(regions.len() <= MAX_REGIONS);
    for region in regions {
        assert!(region.name.len() <= 1 << 10, "{}", region.name);
        let _ = region.bytes();
    }
    let end = deadline();
    let named = within_ceiling(|| named_nodes(&host.proc(), host.cgroup(), || Instant::now() >= end));
    assert!(named.unwrap().is_none_or(|named| named.policy.len() <= 32 << 10));
}

/// Checks that the mappings of a node have addresses and a limited number, and those with code names of a limited length, for any `maps`
/// and, behind zero bytes, `numa_maps`, `mountinfo` and `status`.
pub(crate) fn maps(data: &[u8]) {
    let mut inputs = data.splitn(4, |byte| *byte == 0);
    let files = ["maps", "numa_maps", "mountinfo", "status"];
    let host = FakeHost::new(&files.map(|name| (name, inputs.next().unwrap_or_default())));
    let process = host.process();
    let end = deadline();
    let found = within_ceiling(|| mappings_on_node(&process, NodeId(0), || Instant::now() >= end)).unwrap();
    assert!(found.len() <= 1 << 16 && found.iter().all(|addresses| !addresses.is_empty()));

    let untouched = within_ceiling(|| untouched_huge_pages(&host.proc(), host.cgroup(), deadline()));
    if let Err(error) = untouched {
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::InvalidData), "{error}");
    }

    let addresses: Vec<u64> = (0..64).map(|number| number << 12).collect();
    let code = within_ceiling(|| {
        let maps = BufReader::new(File::open(process.join("maps"))?);
        code_mappings(maps, addresses, NAME_ROOM, deadline())
    });
    let names = |code: Vec<String>| code.iter().map(String::len).sum::<usize>();
    assert!(io::Result::is_ok_and(code, |code| names(code) <= NAME_ROOM));
}

/// Checks that the function names of any program are short.
pub(crate) fn program(data: &[u8]) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(data).unwrap();
    file.set_len(PROGRAM_SIZE).unwrap();
    let last = u64::try_from(data.len()).unwrap();
    let offsets = [0, 1, last / 2, last, u64::MAX];
    let names = within_ceiling(|| function_names(&file, offsets, deadline()));
    assert!(names.into_iter().flatten().all(|(_, name)| name.len() <= 1024));
}

#[cfg(test)]
mod tests {
    use std::io::BufRead as _;

    use numaward_tests_support::is_alone;

    use super::*;

    /// Returns true if a reader that returns all of its file exceeds the ceiling.
    fn is_refused<T>(read: impl FnOnce() -> T + std::panic::UnwindSafe) -> bool {
        std::panic::catch_unwind(|| drop(within_ceiling(read))).is_err()
    }

    /// Creates the file of the first part of a stored input.
    fn stored_file(input: &str) -> FakeHost {
        let data = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(input)).unwrap();
        FakeHost::new(&[("file", data.split(|byte| *byte == 0).next().unwrap())])
    }

    #[test]
    fn reader_of_whole_file_is_refused() {
        if !is_alone() {
            return;
        }
        for input in ["numa_maps/names", "maps/names"] {
            let host = stored_file(input);
            let path = host.process().join("file");
            assert!(!is_refused(|| File::open(&path).unwrap()), "{input}");
            assert!(is_refused(|| fs::read(&path).unwrap()), "{input}");
        }
        let program = tempfile::NamedTempFile::new().unwrap();
        program.as_file().set_len(PROGRAM_SIZE).unwrap();
        assert!(is_refused(|| fs::read(program.path()).unwrap()));
    }

    /// A process of its own for each file: the allocator would use the memory of the lines of the first one again.
    fn refuses_all_lines(input: &str) {
        if !is_alone() {
            return;
        }
        let host = stored_file(input);
        let path = host.process().join("file");
        let lines = || BufReader::new(File::open(&path).unwrap()).lines().map(Result::unwrap);
        assert!(!is_refused(|| lines().map(|line| line.len()).sum::<usize>()));
        assert!(is_refused(|| lines().collect::<Vec<String>>()));
    }

    #[test]
    fn reader_of_all_regions_is_refused() {
        refuses_all_lines("numa_maps/names");
    }

    #[test]
    fn reader_of_all_mappings_is_refused() {
        refuses_all_lines("maps/names");
    }
}

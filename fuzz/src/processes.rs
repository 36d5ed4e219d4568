//! Readers of a process's files: its mappings, with names and a number that the process chooses, and its programs.

use std::{
    fs,
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use numaward_api::MAX_REGIONS;
use numaward_enforce::pages::mappings_on_node;
use numaward_observe::{function_names, regions_of};
use numaward_tests_support::{peak, reset_peak};
use numaward_topology::NodeId;

/// Maximum increase of the peak memory by a reader, for any input.
const CEILING: u64 = 24 << 20;
/// Maximum size of a file that is made from an input.
const MAX_FILE: usize = 8 << 20;

/// Writes a file from an input. The rest of the input is repeated as often as the first byte says, as a power of two (`0` to
/// `?`). In the rest, `#` stands for the number of the repetition.
fn write_repeated(path: &Path, input: &[u8]) {
    let (times, text) = input.split_first().unwrap_or((&0, &[]));
    let mut file = Vec::new();
    for number in 0..1_u32 << (times % 16) {
        for &byte in text {
            match byte {
                b'#' => write!(file, "{number:x}").unwrap(),
                byte => file.push(byte),
            }
        }
        if file.len() > MAX_FILE {
            break;
        }
    }
    fs::write(path, file).unwrap();
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

/// Checks that the regions of any `numa_maps` are few, and their names short.
pub(crate) fn numa_maps(data: &[u8]) {
    let process = tempfile::tempdir().unwrap();
    write_repeated(&process.path().join("numa_maps"), data);
    let regions = within_ceiling(|| regions_of(process.path(), deadline())).unwrap();
    assert!(regions.len() <= MAX_REGIONS);
    for region in regions {
        assert!(region.name.len() <= 1 << 10, "{}", region.name);
        let _ = region.bytes();
    }
}

/// Checks that the mappings of a node have addresses and a limited number, for any `maps` and, behind a zero byte, `numa_maps`.
pub(crate) fn maps(data: &[u8]) {
    let mut files = data.splitn(2, |byte| *byte == 0);
    let process = tempfile::tempdir().unwrap();
    for name in ["maps", "numa_maps"] {
        write_repeated(&process.path().join(name), files.next().unwrap_or_default());
    }
    let end = deadline();
    let found =
        within_ceiling(|| mappings_on_node(process.path(), NodeId(0), || Instant::now() >= end)).unwrap();
    assert!(found.len() <= 1 << 16 && found.iter().all(|addresses| !addresses.is_empty()));
}

/// Checks that the function names of any program are short.
pub(crate) fn program(data: &[u8]) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(data).unwrap();
    let last = u64::try_from(data.len()).unwrap();
    let offsets = [0, 1, last / 2, last, u64::MAX];
    let names = within_ceiling(|| function_names(&file, offsets, deadline()));
    assert!(names.into_iter().flatten().all(|(_, name)| name.len() <= 1024));
}

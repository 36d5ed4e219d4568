//! The reader of the kernel's event counters (`/proc/vmstat`).

use std::path::Path;

use super::source::{ReadError, SysfsRoot};

/// Reads the number of pages that the kernel has allocated since it started (`pgalloc_*`, one for each kind of zone).
///
/// Allocations are added up over the CPUs that are online. The counters of a CPU that goes offline are added to those of
/// another one, so the sum may be too small for an instant.
pub fn allocated_pages(root: &Path) -> Result<u64, ReadError> {
    const FILE: &str = "proc/vmstat";
    let source = SysfsRoot { root };
    let text = source.text(FILE, "the kernel's event counters")?;
    let mut sum = None;
    for (line, number) in text.lines().zip(1..) {
        let Some(counter) = line.strip_prefix("pgalloc_") else { continue };
        let pages = counter.split_once(' ').and_then(|(_zone, pages)| pages.parse::<u64>().ok());
        let pages =
            pages.ok_or_else(|| source.malformed(FILE, Some(number), line, "`pgalloc_ZONE NUMBER`"))?;
        sum = Some(pages.wrapping_add(sum.unwrap_or(0)));
    }
    sum.ok_or_else(|| source.malformed(FILE, None, &text, "a list with `pgalloc_ZONE NUMBER`"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(text: &str) -> Result<u64, String> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/vmstat"), text).unwrap();
        allocated_pages(root.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn sums_zones() {
        let text = "pgpgin 7\npgalloc_dma 0\npgalloc_dma32 20\npgalloc_normal 300\npgalloc_movable 4000\nallocstall_dma 9\n";
        assert_eq!(read(text), Ok(4320));
        assert_eq!(read("pgalloc_normal 18446744073709551615\npgalloc_movable 6\n"), Ok(5), "counters wrap");
    }

    #[test]
    fn malformed_counters_are_refused() {
        for (text, place) in [
            ("", "vmstat: \"\""),
            ("pgfree 3\n", "vmstat: \"pgfree 3\""),
            ("pgfree 3\npgalloc_dma\n", "vmstat:2: \"pgalloc_dma\""),
            ("pgalloc_dma -1\n", "vmstat:1"),
            ("pgalloc_dma 18446744073709551616\n", "vmstat:1"),
            ("pgalloc_dma 1 2\n", "vmstat:1"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(place) && error.contains("pgalloc_ZONE NUMBER"), "{text:?}: {error}");
        }
        let nothing = tempfile::tempdir().unwrap();
        assert!(allocated_pages(nothing.path()).unwrap_err().to_string().contains("proc/vmstat"));
    }
}

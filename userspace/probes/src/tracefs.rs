//! The layout of a classic tracepoint's record, from `events/CATEGORY/NAME/format` in tracefs.
//!
//! Each field has a line such as `field:unsigned long pfn; offset:8; size:8; signed:0;`.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The record is not as the probe reads it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormatError {
    #[error(
        "tracefs is not to be seen at /sys/kernel/tracing; mount it (mount -t tracefs tracefs \
         /sys/kernel/tracing), unless lockdown closes it"
    )]
    NoTracefs,
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: the field {field} is {}; the probe needs offset {}, size {}", path.display(),
        found.map_or("missing".to_owned(), |(offset, size)| format!("at offset {offset}, size {size}")),
        expected.0, expected.1)]
    Moved { path: PathBuf, field: &'static str, expected: (u32, u32), found: Option<(u32, u32)> },
}

/// The fields of `kmem:mm_page_alloc` that the probe reads, with offset and size.
pub(crate) const MM_PAGE_ALLOC: [(&str, (u32, u32)); 3] =
    [("pfn", (8, 8)), ("order", (16, 4)), ("gfp_flags", (24, 8))];

/// Compares a tracepoint's record with what is expected of it. `root` is `/` in production.
pub(crate) fn check_format(
    root: &Path,
    event: &str,
    expected: &[(&'static str, (u32, u32))],
) -> Result<(), FormatError> {
    let events = ["sys/kernel/tracing/events", "sys/kernel/debug/tracing/events"].map(|path| root.join(path));
    let events = events.into_iter().find(|path| path.is_dir()).ok_or(FormatError::NoTracefs)?;
    let path = events.join(event).join("format");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(source) => return Err(FormatError::Read { path, source }),
    };
    for &(field, expected) in expected {
        let found = text.lines().find_map(|line| place_of(line, field));
        if found != Some(expected) {
            return Err(FormatError::Moved { path, field, expected, found });
        }
    }
    Ok(())
}

/// Offset and size, if the line describes this field.
fn place_of(line: &str, field: &str) -> Option<(u32, u32)> {
    let mut parts = line.trim().split(';').map(str::trim);
    let name = parts.next()?.strip_prefix("field:")?.rsplit(' ').next()?;
    let offset = parts.next()?.strip_prefix("offset:")?.parse().ok()?;
    let size = parts.next()?.strip_prefix("size:")?.parse().ok()?;
    (name == field).then_some((offset, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "name: mm_page_alloc\nID: 551\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
        \tfield:unsigned long pfn;\toffset:8;\tsize:8;\tsigned:0;\n\
        \tfield:unsigned int order;\toffset:16;\tsize:4;\tsigned:0;\n\
        \tfield:unsigned long gfp_flags;\toffset:24;\tsize:8;\tsigned:0;\n\n\
        print fmt: \"page=%p\"\n";

    fn check(format: Option<&str>) -> Result<(), String> {
        let root = tempfile::tempdir().unwrap();
        if let Some(format) = format {
            let event = root.path().join("sys/kernel/tracing/events/kmem/mm_page_alloc");
            std::fs::create_dir_all(&event).unwrap();
            std::fs::write(event.join("format"), format).unwrap();
        }
        check_format(root.path(), "kmem/mm_page_alloc", &MM_PAGE_ALLOC).map_err(|error| error.to_string())
    }

    #[test]
    fn good_missing_and_corrupt_formats_are_told_apart() {
        assert_eq!(check(Some(GOOD)), Ok(()));
        for (format, error) in [
            (None, "tracefs is not to be seen"),
            (Some(String::new()), "the field pfn is missing"),
            (
                Some(GOOD.replace("offset:24;\tsize:8", "offset:20;\tsize:4")),
                "gfp_flags is at offset 20, size 4; the probe needs offset 24, size 8",
            ),
            (Some(GOOD.replace("offset:16", "offset:x")), "the field order is missing"),
        ] {
            let found = check(format.as_deref()).unwrap_err();
            assert!(found.contains(error), "{found}");
        }
    }

    #[test]
    fn an_unreadable_format_names_its_path() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("sys/kernel/tracing/events")).unwrap();
        let error = check_format(root.path(), "kmem/mm_page_alloc", &MM_PAGE_ALLOC).unwrap_err().to_string();
        assert!(error.contains("events/kmem/mm_page_alloc/format"), "{error}");
    }
}

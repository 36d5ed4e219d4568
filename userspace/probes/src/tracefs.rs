//! The format of a classic tracepoint's record, from `events/CATEGORY/NAME/format` in tracefs.
//!
//! Each field has a line such as `field:unsigned long pfn; offset:8; size:8; signed:0;`.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The record does not have the format that the probe reads.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormatError {
    #[error(
        "tracefs is not visible at /sys/kernel/tracing; mount it (mount -t tracefs tracefs \
         /sys/kernel/tracing), unless lockdown closes it"
    )]
    NoTracefs,
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: the field {field} is {}; the probe needs offset {}, size {}", path.display(),
        found.map_or("missing".to_owned(), |(offset, size)| format!("at offset {offset}, size {size}")),
        expected.0, expected.1)]
    Moved { path: PathBuf, field: &'static str, expected: (u32, u32), found: Option<(u32, u32)> },
    #[error("{}: the field {field} is {}; the probe expects {known}", path.display(),
        found.map_or("missing".to_owned(), |(offset, size)| format!("at offset {offset}, size {size}")))]
    UnknownPlace { path: PathBuf, field: &'static str, known: &'static str, found: Option<(u32, u32)> },
}

/// The fields of `kmem:mm_page_alloc` with a constant place, with offset and size.
const MM_PAGE_ALLOC: [(&str, (u32, u32)); 2] = [("pfn", (8, 8)), ("order", (16, 4))];

/// The known places of the flags in these records: the original one, and that since Linux 6.0.
const GFP_PLACES: [(u32, u32); 2] = [(20, 4), (24, 8)];

/// The field of `migrate:mm_migrate_pages` with a constant place.
const MM_MIGRATE_PAGES: [(&str, (u32, u32)); 1] = [("succeeded", (8, 8))];

/// The known offsets of the reason in the records of `migrate:mm_migrate_pages`: the original one, since Linux 5.9, and
/// since about 5.19.
const REASON_OFFSETS: [u32; 3] = [28, 52, 60];

/// Returns the offset of the flags in the record of `kmem:mm_page_alloc`, after checking the format. `root` is `/` in
/// production.
pub(crate) fn gfp_offset(root: &Path) -> Result<u32, FormatError> {
    let format = RecordFormat::read(root, "kmem/mm_page_alloc")?;
    format.check(&MM_PAGE_ALLOC)?;
    match format.place_of("gfp_flags") {
        Some(place) if GFP_PLACES.contains(&place) => Ok(place.0),
        found => {
            let known = "offset 20, size 4, or offset 24, size 8";
            Err(FormatError::UnknownPlace { path: format.path, field: "gfp_flags", known, found })
        }
    }
}

/// Returns the offset of the reason in the record of `migrate:mm_migrate_pages`, after checking the format.
pub(crate) fn migrate_reason_offset(root: &Path) -> Result<u32, FormatError> {
    let format = RecordFormat::read(root, "migrate/mm_migrate_pages")?;
    format.check(&MM_MIGRATE_PAGES)?;
    match format.place_of("reason") {
        Some((offset, 4)) if REASON_OFFSETS.contains(&offset) => Ok(offset),
        found => {
            let known = "offset 28, 52 or 60, size 4";
            Err(FormatError::UnknownPlace { path: format.path, field: "reason", known, found })
        }
    }
}

struct RecordFormat {
    path: PathBuf,
    text: String,
}

impl RecordFormat {
    fn read(root: &Path, event: &str) -> Result<Self, FormatError> {
        let events = ["sys/kernel/tracing/events", "sys/kernel/debug/tracing/events"];
        let mut events = events.map(|path| root.join(path)).into_iter();
        let path =
            events.find(|path| path.is_dir()).ok_or(FormatError::NoTracefs)?.join(event).join("format");
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Self { path, text }),
            Err(source) => Err(FormatError::Read { path, source }),
        }
    }

    fn check(&self, expected: &[(&'static str, (u32, u32))]) -> Result<(), FormatError> {
        for &(field, expected) in expected {
            let found = self.place_of(field);
            if found != Some(expected) {
                return Err(FormatError::Moved { path: self.path.clone(), field, expected, found });
            }
        }
        Ok(())
    }

    fn place_of(&self, field: &str) -> Option<(u32, u32)> {
        self.text.lines().find_map(|line| place_of(line, field))
    }
}

/// Returns offset and size if the line describes this field.
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

    fn offset(format: Option<&str>) -> Result<u32, String> {
        let root = tempfile::tempdir().unwrap();
        if let Some(format) = format {
            let event = root.path().join("sys/kernel/tracing/events/kmem/mm_page_alloc");
            std::fs::create_dir_all(&event).unwrap();
            std::fs::write(event.join("format"), format).unwrap();
        }
        gfp_offset(root.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn checks_formats() {
        assert_eq!(offset(Some(GOOD)), Ok(24));
        let before_6_0 = GOOD.replace("unsigned long gfp_flags", "gfp_t gfp_flags");
        let before_6_0 = before_6_0.replace("offset:24;\tsize:8", "offset:20;\tsize:4");
        assert_eq!(offset(Some(&before_6_0)), Ok(20));
        for (format, error) in [
            (None, "tracefs is not visible"),
            (Some(String::new()), "the field pfn is missing"),
            (
                Some(GOOD.replace("offset:24;\tsize:8", "offset:28;\tsize:4")),
                "gfp_flags is at offset 28, size 4; the probe expects offset 20, size 4, or",
            ),
            (Some(GOOD.replace("offset:16", "offset:x")), "the field order is missing"),
        ] {
            let found = offset(format.as_deref()).unwrap_err();
            assert!(found.contains(error), "{found}");
        }
    }

    #[test]
    fn accepts_known_reason_offsets() {
        let format = |reason: &str, mode: u32| {
            format!(
                "\tfield:unsigned long succeeded;\toffset:8;\tsize:8;\tsigned:0;\n\
                 \tfield:enum migrate_mode mode;\toffset:{mode};\tsize:4;\tsigned:1;\n\
                 \tfield:int {reason};\toffset:{};\tsize:4;\tsigned:1;\n",
                mode + 4
            )
        };
        let offset = |text: &str| {
            let root = tempfile::tempdir().unwrap();
            let event = root.path().join("sys/kernel/debug/tracing/events/migrate/mm_migrate_pages");
            std::fs::create_dir_all(&event).unwrap();
            std::fs::write(event.join("format"), text).unwrap();
            migrate_reason_offset(root.path()).map_err(|error| error.to_string())
        };
        for mode in [24, 48, 56] {
            assert_eq!(offset(&format("reason", mode)), Ok(mode + 4));
        }
        let moved = offset(&format("reason", 64)).unwrap_err();
        assert!(moved.contains("the field reason is at offset 68, size 4; the probe expects"), "{moved}");
        let missing = offset(&format("why", 56)).unwrap_err();
        assert!(missing.contains("the field reason is missing"), "{missing}");
        let moved = offset(&format("reason", 56).replace("offset:8", "offset:16")).unwrap_err();
        assert!(moved.contains("the field succeeded is at offset 16"), "{moved}");
    }

    #[test]
    fn error_names_unreadable_format() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("sys/kernel/tracing/events")).unwrap();
        let error = gfp_offset(root.path()).unwrap_err().to_string();
        assert!(error.contains("events/kmem/mm_page_alloc/format"), "{error}");
    }
}

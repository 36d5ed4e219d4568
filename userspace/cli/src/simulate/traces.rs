//! Traces as files.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use numaward_simulation::trace::Trace;

/// The most bytes of a file of traces, decompressed.
const MAX_BYTES: u64 = 1 << 30;

/// The traces of these files, and of the files in these directories, in the order of their names.
pub(super) fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<Trace>> {
    let mut traces = Vec::new();
    for path in paths {
        let files = if path.is_dir() { in_directory(path)? } else { vec![path.clone()] };
        for file in files {
            let text = text(&file).with_context(|| format!("{} cannot be read", file.display()))?;
            let of_file: Vec<Trace> = serde_json::from_str(&text).with_context(|| {
                format!(
                    "{} has no traces: expected a JSON array as docs/strategies.md describes",
                    file.display()
                )
            })?;
            traces.extend(of_file);
        }
    }
    ensure!(!traces.is_empty(), "there is no trace in what was given");
    Ok(traces)
}

fn in_directory(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.with_context(|| format!("{} cannot be read", directory.display()))?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    files.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".json") || name.ends_with(".json.gz")
    });
    ensure!(!files.is_empty(), "{} has no files *.json or *.json.gz", directory.display());
    files.sort();
    Ok(files)
}

fn text(path: &Path) -> anyhow::Result<String> {
    let file = fs::File::open(path)?;
    let mut text = String::new();
    let read = if path.extension().is_some_and(|extension| extension == "gz") {
        flate2::read::GzDecoder::new(file).take(MAX_BYTES).read_to_string(&mut text)?
    } else {
        file.take(MAX_BYTES).read_to_string(&mut text)?
    };
    ensure!((read as u64) < MAX_BYTES, "it is larger than 1 GiB");
    Ok(text)
}

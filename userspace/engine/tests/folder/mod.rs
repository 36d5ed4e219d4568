//! Reads a directory of files `*.json` or `*.json.gz`, each an array.

use std::{
    fmt, fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;

/// Returns a directory of the repository: `conformance`, `faults` or `traces`.
pub(crate) fn own(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(name)
}

/// Returns the names and contents of the files, in the order of names.
pub(crate) fn read<T: DeserializeOwned>(directory: &Path) -> Result<Vec<(String, Vec<T>)>, String> {
    let at = |path: &Path, error: &dyn fmt::Display| format!("{}: {error}", path.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(|error| at(directory, &error))? {
        let path = entry.map_err(|error| at(directory, &error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let plain = name.strip_suffix(".gz").unwrap_or(&name);
        if Path::new(plain).extension().is_some_and(|extension| extension == "json") {
            files.push((name, path));
        }
    }
    if files.is_empty() {
        return Err(at(directory, &"no vectors (files *.json or *.json.gz) in this directory"));
    }
    files.sort();
    let mut contents = Vec::with_capacity(files.len());
    for (name, path) in files {
        let text = text(&path).map_err(|error| at(&path, &error))?;
        contents.push((name, serde_json::from_str(&text).map_err(|error| at(&path, &error))?));
    }
    Ok(contents)
}

fn text(path: &Path) -> std::io::Result<String> {
    let file = fs::File::open(path)?;
    let mut text = String::new();
    if path.extension().is_some_and(|extension| extension == "gz") {
        flate2::read::GzDecoder::new(file).read_to_string(&mut text)?;
    } else {
        std::io::BufReader::new(file).read_to_string(&mut text)?;
    }
    Ok(text)
}

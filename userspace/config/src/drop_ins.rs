//! The folders `conf.d` and `guarantees.d` beside the configuration file, with files that other tools own.
//!
//! # Rules
//! - Files with names in `.yaml` are read in byte order of their names. Hidden files are skipped.
//! - A file of `conf.d` overrides the configuration file and earlier files, key by key. Its lists replace earlier lists.
//! - The guarantees of a file of `guarantees.d` are added to the earlier ones.
//! - A user other than root, or the one that reads the files, must not be able to change a folder or a file: a guarantee gives away CPUs
//!   and memory of the host.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use super::{
    enforcement::GUARANTEES_KEY,
    problem::{Origin, Problem},
    tree::{self, MappingEntry, TreeNode, Value},
};

/// The folder with files of keys, beside the configuration file.
const KEYS: &str = "conf.d";
/// The folder with files of guarantees, beside the configuration file.
const GUARANTEES: &str = "guarantees.d";

/// Maximum number of entries of a folder, read or not.
const MAX_ENTRIES: usize = 10_000;
/// Maximum number of files that are read in a folder.
const MAX_FILES: usize = 256;
/// Maximum size of all files of a folder together.
const MAX_FOLDER_BYTES: u64 = 1 << 20;

/// Problems and warnings of the files.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<String>,
}

/// Merges the files of `conf.d` into a tree. Returns their paths.
pub(super) fn merge_keys(tree: &mut TreeNode, directory: &Path, findings: &mut Findings) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for (file, mut read) in read_folder(&directory.join(KEYS), findings) {
        if let Some(entry) = take_entry(&mut read, GUARANTEES_KEY) {
            let message =
                format!("guarantees: not in {KEYS}: put them into a file of {GUARANTEES} beside it");
            let path = GUARANTEES_KEY.to_owned();
            findings.problems.push(Problem { origin: entry.origin, path, message });
        }
        tree.merge(read);
        files.push(file);
    }
    files
}

/// Adds the guarantees of the files of `guarantees.d` to those of a tree. Returns the paths of the files.
pub(super) fn add_guarantees(tree: &mut TreeNode, directory: &Path, findings: &mut Findings) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for (file, mut read) in read_folder(&directory.join(GUARANTEES), findings) {
        let added = take_entry(&mut read, GUARANTEES_KEY);
        let Value::Mapping(others) = read.value else { continue };
        findings.problems.extend(others.into_iter().map(|MappingEntry { key, origin, .. }| {
            let message = format!(
                "the key {key:?} is not allowed in {GUARANTEES}, whose files have the key {GUARANTEES_KEY:?} only: \
                 put it into a file of {KEYS} beside it"
            );
            Problem { origin, path: key, message }
        }));
        match added.map(|entry| entry.node) {
            None | Some(TreeNode { value: Value::Scalar(serde_json::Value::Null), .. }) => {}
            Some(list @ TreeNode { value: Value::Sequence(_), .. }) => {
                tree.append(GUARANTEES_KEY, list);
            }
            Some(TreeNode { origin, .. }) => {
                let path = GUARANTEES_KEY.to_owned();
                let message = "guarantees: expected a list, such as \"- unit: db.service\"".to_owned();
                findings.problems.push(Problem { origin, path, message });
            }
        }
        files.push(file);
    }
    files
}

/// Replaces the numbers of guarantees in problems, which count those of all files, by numbers within the file of the problem.
pub(super) fn number_within_files(problems: &mut [Problem], given: &TreeNode) {
    let mut starts = BTreeMap::new();
    for index in 0.. {
        let place = given.origin_at(&[GUARANTEES_KEY.to_owned(), index.to_string()]);
        let Ok(Origin::File { file, .. }) = place else { break };
        starts.entry(file).or_insert(index);
    }
    for problem in problems {
        let Origin::File { file, .. } = &problem.origin else { continue };
        let Some(start) = starts.get(file).filter(|start| **start > 0) else { continue };
        let mut keys = problem.path.split('.');
        let number: Option<usize> = match (keys.next(), keys.next()) {
            (Some(GUARANTEES_KEY), Some(number)) => number.parse().ok(),
            _ => None,
        };
        let Some(number) = number else { continue };
        let [old, new] =
            [number, number.saturating_sub(*start)].map(|number| format!("{GUARANTEES_KEY}.{number}"));
        problem.path = problem.path.replacen(&old, &new, 1);
        problem.message = problem.message.replacen(&old, &new, 1);
    }
}

/// Removes a key of a mapping, and returns it.
fn take_entry(tree: &mut TreeNode, key: &str) -> Option<MappingEntry> {
    let Value::Mapping(entries) = &mut tree.value else { return None };
    let index = entries.iter().position(|entry| entry.key == key)?;
    Some(entries.remove(index))
}

/// Returns the files of a folder in byte order of their names; none if the folder does not exist.
fn read_folder(folder: &Path, findings: &mut Findings) -> Vec<(PathBuf, TreeNode)> {
    let names = match list(folder) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            findings.problems.push(Problem::unreadable(folder, &error));
            return Vec::new();
        }
    };
    let (names, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| is_yaml(name));
    let misnamed = others.iter().filter(|name| name.as_bytes().ends_with(b".yml"));
    findings.warnings.extend(
        misnamed.map(|name| {
            format!("{}: has no effect: a name has to end in .yaml", folder.join(name).display())
        }),
    );
    if names.len() > MAX_FILES {
        let message = format!("it has {} files, and may have {MAX_FILES}: put several into one", names.len());
        findings.problems.push(Problem::unreadable(folder, &io::Error::other(message)));
        return Vec::new();
    }
    let mut left = MAX_FOLDER_BYTES;
    let mut files = Vec::new();
    for name in names {
        let path = folder.join(name);
        let text = numaward_cgroup::open_protected(&path).and_then(|file| {
            if !file.metadata()?.is_file() {
                return Err(io::Error::other("it is not a regular file"));
            }
            numaward_cgroup::read_open_text(file, left)
        });
        match text {
            Ok(text) => {
                left = left.saturating_sub(text.len() as u64);
                let read = tree::parse_mapping(&text, &path, &mut findings.problems);
                files.push((path, read));
            }
            // The size of the files before it is part of the message.
            Err(error) if error.kind() == io::ErrorKind::InvalidData && left < MAX_FOLDER_BYTES => {
                let message =
                    format!("{error}; the files of a folder may have {MAX_FOLDER_BYTES} bytes together");
                findings.problems.push(Problem::unreadable(&path, &io::Error::other(message)));
            }
            Err(error) => findings.problems.push(Problem::unreadable(&path, &error)),
        }
    }
    files
}

fn is_yaml(name: &OsStr) -> bool {
    name.as_bytes().ends_with(b".yaml")
}

/// Returns the names of a folder's files that are not hidden, in byte order.
fn list(folder: &Path) -> io::Result<Vec<OsString>> {
    numaward_cgroup::open_protected(folder)?;
    let mut names = Vec::new();
    for (number, entry) in fs::read_dir(folder)?.enumerate() {
        if number == MAX_ENTRIES {
            return Err(io::Error::other(format!("it has more than {MAX_ENTRIES} entries")));
        }
        let name = entry?.file_name();
        if !name.as_bytes().starts_with(b".") {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

//! Entries of the cache: folders with checksums of their files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::command;

const SUMS: &str = "SHA256SUMS";
/// Prefix of incomplete or outdated entries.
const INCOMPLETE_PREFIX: &str = ".partial-";

/// State of an entry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EntryState {
    Whole,
    Missing,
    /// Truncated, changed, or made by an older setup with other files.
    Damaged,
}

/// Returns the state of the entry `folder`; `recipe` describes its sources.
pub(crate) fn state(folder: &Path, recipe: &str) -> EntryState {
    if !folder.exists() {
        return EntryState::Missing;
    }
    let sums_hold = Command::new("sha256sum")
        .args(["--status", "--strict", "--check", SUMS])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let same_recipe = fs::read_to_string(folder.join("recipe")).is_ok_and(|found| found == recipe);
    if sums_hold && same_recipe { EntryState::Whole } else { EntryState::Damaged }
}

/// Makes the entry `folder`: `fill` gets an empty folder beside it, which replaces the entry.
pub(crate) fn replace(folder: &Path, recipe: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let parent = folder.parent().context("an entry of the cache has a parent")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let partial = scratch(parent)?;
    let made = partial.path().join("made");
    fs::create_dir(&made)?;
    fill(&made)?;
    fs::write(made.join("recipe"), recipe)?;
    let mut files = Vec::new();
    list(&made, Path::new(""), &mut files)?;
    let sums = command::read(Command::new("sha256sum").arg("--").args(&files).current_dir(&made))?;
    fs::write(made.join(SUMS), sums)?;
    if folder.exists() {
        fs::rename(folder, partial.path().join("old"))?;
    }
    fs::rename(&made, folder).with_context(|| format!("cannot move {} into place", folder.display()))
}

/// Creates an empty folder in `parent`, which is removed on drop, or at the next setup.
pub(crate) fn scratch(parent: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix(INCOMPLETE_PREFIX)
        .tempdir_in(parent)
        .with_context(|| format!("cannot create a folder in {}", parent.display()))
}

/// Removes incomplete entries of interrupted setups, in the cache's root and one level below.
pub(crate) fn remove_leftovers(root: &Path) -> Result<()> {
    for entry in folders(root)?.into_iter().flat_map(|folder| [Ok(vec![folder.clone()]), folders(&folder)]) {
        for folder in entry? {
            if folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(INCOMPLETE_PREFIX)) {
                match fs::remove_dir_all(&folder) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(error).with_context(|| format!("cannot remove {}", folder.display()));
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

fn folders(path: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

fn list(root: &Path, below: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            list(root, &path, files)?;
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_entries_are_remade() {
        let root = tempfile::tempdir().unwrap();
        let entry = root.path().join("kernels/x");
        let make = |text: &str| {
            replace(&entry, "recipe 1", |folder| {
                fs::create_dir(folder.join("modules"))?;
                Ok(fs::write(folder.join("modules/a.ko"), text)?)
            })
        };
        assert_eq!(state(&entry, "recipe 1"), EntryState::Missing);
        make("one").unwrap();
        assert_eq!(state(&entry, "recipe 1"), EntryState::Whole);
        assert_eq!(state(&entry, "recipe 2"), EntryState::Damaged);

        fs::write(entry.join("modules/a.ko"), "o").unwrap();
        assert_eq!(state(&entry, "recipe 1"), EntryState::Damaged, "truncated");
        make("two").unwrap();
        assert_eq!(state(&entry, "recipe 1"), EntryState::Whole);
        fs::remove_file(entry.join("modules/a.ko")).unwrap();
        assert_eq!(state(&entry, "recipe 1"), EntryState::Damaged, "a file is gone");
        fs::write(entry.join(SUMS), "").unwrap();
        assert_eq!(state(&entry, "recipe 1"), EntryState::Damaged, "no sums");
    }

    #[test]
    fn failed_fill_keeps_old_entry() {
        let root = tempfile::tempdir().unwrap();
        let entry = root.path().join("kernels/x");
        replace(&entry, "", |folder| Ok(fs::write(folder.join("a"), "old")?)).unwrap();
        replace(&entry, "", |_| anyhow::bail!("no disk")).unwrap_err();
        assert_eq!(state(&entry, ""), EntryState::Whole);
        assert_eq!(folders(&root.path().join("kernels")).unwrap(), [entry]);
    }

    #[test]
    fn removes_incomplete_entries() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["kernels/6.1", "kernels/.partial-x/made", ".partial-y"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        remove_leftovers(root.path()).unwrap();
        assert_eq!(folders(root.path()).unwrap(), [root.path().join("kernels")]);
        assert_eq!(folders(&root.path().join("kernels")).unwrap(), [root.path().join("kernels/6.1")]);
    }
}

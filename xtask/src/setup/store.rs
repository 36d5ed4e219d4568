//! Entries of the cache: folders whose files are held against checksums.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::command;

const SUMS: &str = "SHA256SUMS";
/// Begins the name of whatever is not (or no longer) a whole entry.
const LEFTOVER: &str = ".partial-";

/// What an entry is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    Whole,
    Missing,
    /// Truncated, changed, or made by an older setup that kept other files.
    Damaged,
}

/// Looks at the entry `folder`; `recipe` says what it should have been made of.
pub(crate) fn state(folder: &Path, recipe: &str) -> State {
    if !folder.exists() {
        return State::Missing;
    }
    let sums_hold = Command::new("sha256sum")
        .args(["--status", "--strict", "--check", SUMS])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let same_recipe = fs::read_to_string(folder.join("recipe")).is_ok_and(|found| found == recipe);
    if sums_hold && same_recipe { State::Whole } else { State::Damaged }
}

/// Makes the entry `folder`: `fill` gets an empty folder beside it, and its result takes the entry's place.
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

/// An empty folder in `parent` that goes when the value is dropped, or at the next setup.
pub(crate) fn scratch(parent: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix(LEFTOVER)
        .tempdir_in(parent)
        .with_context(|| format!("cannot create a folder in {}", parent.display()))
}

/// Removes what interrupted setups have left, in the cache's root and one level below.
pub(crate) fn remove_leftovers(root: &Path) -> Result<()> {
    for entry in folders(root)?.into_iter().flat_map(|folder| [Ok(vec![folder.clone()]), folders(&folder)]) {
        for folder in entry? {
            if folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(LEFTOVER)) {
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
    fn entries_are_whole_or_made_again() {
        let root = tempfile::tempdir().unwrap();
        let entry = root.path().join("kernels/x");
        let make = |text: &str| {
            replace(&entry, "recipe 1", |folder| {
                fs::create_dir(folder.join("modules"))?;
                Ok(fs::write(folder.join("modules/a.ko"), text)?)
            })
        };
        assert_eq!(state(&entry, "recipe 1"), State::Missing);
        make("one").unwrap();
        assert_eq!(state(&entry, "recipe 1"), State::Whole);
        assert_eq!(state(&entry, "recipe 2"), State::Damaged);

        fs::write(entry.join("modules/a.ko"), "o").unwrap();
        assert_eq!(state(&entry, "recipe 1"), State::Damaged, "truncated");
        make("two").unwrap();
        assert_eq!(state(&entry, "recipe 1"), State::Whole);
        fs::remove_file(entry.join("modules/a.ko")).unwrap();
        assert_eq!(state(&entry, "recipe 1"), State::Damaged, "a file is gone");
        fs::write(entry.join(SUMS), "").unwrap();
        assert_eq!(state(&entry, "recipe 1"), State::Damaged, "no sums");
    }

    #[test]
    fn a_failed_making_leaves_the_old_entry() {
        let root = tempfile::tempdir().unwrap();
        let entry = root.path().join("kernels/x");
        replace(&entry, "", |folder| Ok(fs::write(folder.join("a"), "old")?)).unwrap();
        replace(&entry, "", |_| anyhow::bail!("no disk")).unwrap_err();
        assert_eq!(state(&entry, ""), State::Whole);
        assert_eq!(folders(&root.path().join("kernels")).unwrap(), [entry]);
    }

    #[test]
    fn leftovers_go() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["kernels/6.1", "kernels/.partial-x/made", ".partial-y"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        remove_leftovers(root.path()).unwrap();
        assert_eq!(folders(root.path()).unwrap(), [root.path().join("kernels")]);
        assert_eq!(folders(&root.path().join("kernels")).unwrap(), [root.path().join("kernels/6.1")]);
    }
}

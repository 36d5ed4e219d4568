//! Trees of files, which are packed in a reproducible way.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::command;

const FOLDER: u32 = 0o755;

/// A folder that is filled, then packed.
pub(crate) struct FileTree {
    root: PathBuf,
    epoch: u64,
}

impl FileTree {
    /// Creates an empty tree at `root`, in which all files get the time `epoch`.
    pub(crate) fn new(root: &Path, epoch: u64) -> Result<Self> {
        fs::create_dir(root).with_context(|| format!("cannot create {}", root.display()))?;
        let tree = Self { root: root.to_owned(), epoch };
        set_mode(root, FOLDER)?;
        Ok(tree)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the time of the files in seconds since 1970.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Adds a folder and its parent folders.
    pub(crate) fn folder(&self, path: &Path) -> Result<()> {
        let mut folder = self.root.clone();
        for part in path.components() {
            folder.push(part);
            if !folder.exists() {
                fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
                set_mode(&folder, FOLDER)?;
            }
        }
        Ok(())
    }

    /// Adds a file and its parent folders.
    pub(crate) fn file(&self, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let target = self.root.join(path);
        self.folder(Path::new(path).parent().unwrap_or(Path::new("")))?;
        fs::write(&target, bytes).with_context(|| format!("cannot write {}", target.display()))?;
        set_mode(&target, mode)
    }

    /// Adds the plain files of a folder and of its subfolders; links are replaced by their targets.
    pub(crate) fn copy(&self, from: &Path, to: &str) -> Result<()> {
        let entries = fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))?;
        for entry in entries {
            let entry = entry?;
            let to = format!("{to}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                self.copy(&entry.path(), &to)?;
            } else {
                self.file(&to, &fs::read(entry.path())?, super::PLAIN)?;
            }
        }
        Ok(())
    }

    /// Packs the tree, owned by root.
    pub(crate) fn pack(&self, archive: &Path) -> Result<PathBuf> {
        let mut tar = Command::new("tar");
        tar.args(["--create", "--format=ustar", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
            .arg(format!("--mtime=@{}", self.epoch))
            .arg("--file")
            .arg(archive)
            .arg("--directory")
            .arg(&self.root)
            .arg("--")
            .args(self.names()?);
        command::read(tar.env("LC_ALL", "C"))?;
        Ok(archive.to_owned())
    }

    /// Returns the names in the root.
    fn names(&self) -> Result<Vec<String>> {
        let entries =
            fs::read_dir(&self.root).with_context(|| format!("cannot list {}", self.root.display()))?;
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot change the mode of {}", path.display()))
}

/// Compresses a file into another.
pub(crate) fn gzip(from: &Path, to: &Path) -> Result<()> {
    fs::write(to, compressed(&fs::read(from)?, "-6")?)
        .with_context(|| format!("cannot write {}", to.display()))
}

/// Compresses bytes with gzip's best level, which for large files takes far longer and saves one percent.
pub(crate) fn gzipped(bytes: &[u8]) -> Result<Vec<u8>> {
    compressed(bytes, "-9")
}

fn compressed(bytes: &[u8], level: &str) -> Result<Vec<u8>> {
    let mut input = tempfile::tempfile()?;
    input.write_all(bytes)?;
    std::io::Seek::rewind(&mut input)?;
    run_on(input, Command::new("gzip").args([level, "--no-name", "--stdout"]))
}

fn run_on(input: File, command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(input)
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {name}"))?;
    anyhow::ensure!(output.status.success(), "{name} failed ({})", output.status);
    Ok(output.stdout)
}

/// Returns the SHA-256 digest of a file, in hexadecimal digits.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let line = command::read(Command::new("sha256sum").arg("--").arg(path))?;
    let digest = line.split_whitespace().next().context("sha256sum printed nothing")?;
    // A backslash precedes the digest of a file with a backslash in its name.
    Ok(digest.trim_start_matches('\\').to_owned())
}

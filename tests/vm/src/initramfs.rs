//! Root file system of a guest: a folder of links to files of the host, packed by cpio.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Component, Path, PathBuf},
    process::{Command, Stdio},
};

use crate::Error;

pub(crate) struct Initramfs {
    staging: PathBuf,
    /// Archive that precedes the packed files.
    base: Option<PathBuf>,
}

impl Initramfs {
    /// Creates an empty tree in the folder `staging`, which must not exist. Its files override those of the archive
    /// `base`, a root file system with a link to `/usr/bin` at `/bin`.
    pub(crate) fn new(staging: PathBuf, base: Option<&Path>) -> Result<Self, Error> {
        fs::create_dir(&staging).map_err(Error::io("creating", &staging))?;
        Ok(Self { staging, base: base.map(Path::to_owned) })
    }

    /// Adds the file `host` of the host at the path `guest`.
    pub(crate) fn file(&self, host: &Path, guest: &str) -> Result<(), Error> {
        let refuse = |reason: String| Error::Copy { path: host.to_owned(), reason };
        let path = fs::canonicalize(host).map_err(|error| refuse(error.to_string()))?;
        if !path.is_file() {
            return Err(refuse("it is not a file".to_owned()));
        }
        let target = self.place(guest).map_err(|reason| refuse(format!("`{guest}` {reason}")))?;
        self.parent(&target)?;
        match symlink(&path, &target) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(refuse(format!("`{guest}` is taken by another file")))
            }
            other => other.map_err(Error::io("linking", target)),
        }
    }

    /// Adds an executable file with this content at the path `guest`.
    pub(crate) fn text(&self, contents: &str, guest: &str) -> Result<(), Error> {
        let target = self.target(Path::new(guest.trim_start_matches('/')));
        self.parent(&target)?;
        fs::write(&target, contents).map_err(Error::io("writing", &target))?;
        fs::set_permissions(&target, fs::Permissions::from_mode(0o755))
            .map_err(Error::io("changing the mode of", target))
    }

    /// Packs all files into `archive`, owned by root. The archive is not compressed, because an emulated CPU takes
    /// longer to decompress it than the host to copy it.
    pub(crate) fn pack(&self, archive: &Path) -> Result<(), Error> {
        let mut out = File::create(archive).map_err(Error::io("creating", archive))?;
        if let Some(base) = &self.base {
            let copied = File::open(base).and_then(|mut base| io::copy(&mut base, &mut out));
            copied.map_err(Error::io("copying", base))?;
        }
        let mut names = Vec::new();
        list(&self.staging, Path::new(""), &mut names).map_err(Error::io("listing", &self.staging))?;
        let names_path = archive.with_extension("names");
        fs::write(&names_path, names.join("\n")).map_err(Error::io("writing", &names_path))?;
        let names = File::open(&names_path).map_err(Error::io("opening", &names_path))?;
        let output = Command::new("cpio")
            .args(["--create", "--dereference", "--quiet", "--format=newc", "--owner=0:0"])
            .current_dir(&self.staging)
            .stdin(names)
            .stdout(out)
            .stderr(Stdio::piped())
            .output()
            .map_err(Error::io("running", "cpio"))?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Error::Pack { status: output.status, stderr })
    }

    fn place(&self, guest: &str) -> Result<PathBuf, &'static str> {
        let path = Path::new(guest).strip_prefix("/").map_err(|_| "is not an absolute path")?;
        if guest.contains('\n') || !path.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err("is not a plain path");
        }
        if path.file_name().is_none() || guest.ends_with('/') {
            return Err("does not name a file");
        }
        Ok(self.target(path))
    }

    /// Returns the path of a file in the tree. A folder would replace the link of the same name.
    fn target(&self, path: &Path) -> PathBuf {
        if self.base.is_some() && path.starts_with("bin") {
            self.staging.join("usr").join(path)
        } else {
            self.staging.join(path)
        }
    }

    fn parent(&self, target: &Path) -> Result<(), Error> {
        let parent = target.parent().unwrap_or(&self.staging);
        fs::create_dir_all(parent).map_err(Error::io("creating", parent))
    }
}

/// Returns all paths relative to `root`, folders before their content.
fn list(root: &Path, below: &Path, names: &mut Vec<String>) -> io::Result<()> {
    let mut entries = fs::read_dir(root.join(below))?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = below.join(entry.file_name());
        names.push(path.to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            list(root, &path, names)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_files_that_cannot_be_copied() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Initramfs::new(folder.path().join("tree"), None).unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        let gone = folder.path().join("gone");
        let table: &[(&Path, &str, &str)] = &[
            (&gone, "/x", "No such file"),
            (folder.path(), "/x", "it is not a file"),
            (&file, "x", "not an absolute path"),
            (&file, "/a/../b", "not a plain path"),
            (&file, "/", "does not name a file"),
            (&file, "/a/", "does not name a file"),
        ];
        for (host, guest, message) in table {
            let error = tree.file(host, guest).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        tree.file(&file, "/a/b").unwrap();
        assert!(tree.file(&file, "/a/b").unwrap_err().to_string().contains("taken"));
    }

    #[test]
    fn base_archive_keeps_its_links() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("base"), [7; 512]).unwrap();
        fs::write(path("file"), "x").unwrap();
        let tree = Initramfs::new(path("tree"), Some(&path("base"))).unwrap();
        tree.file(&path("file"), "/bin/file").unwrap();
        tree.text("#!/bin/sh", "/bin/script").unwrap();
        tree.file(&path("file"), "/etc/file").unwrap();
        for file in ["usr/bin/file", "usr/bin/script", "etc/file"] {
            assert!(path("tree").join(file).is_file(), "{file}");
        }
        assert!(!path("tree").join("bin").exists());
        tree.pack(&path("archive")).unwrap();
        let archive = fs::read(path("archive")).unwrap();
        assert_eq!(archive[..512], [7; 512]);
        assert!(archive[512..].starts_with(b"070701"));
    }
}

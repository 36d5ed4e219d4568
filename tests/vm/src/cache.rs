//! What `cargo xtask setup` has left for us: `CACHE/kernels/NAME/{vmlinuz,modules/*.ko,version}`, `CACHE/debian/NAME/root.cpio`.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::Error;

/// The folder that outlives checkouts: `${XDG_CACHE_HOME:-~/.cache}/numaward`.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// From the environment; relative values of `XDG_CACHE_HOME` are ignored, as the XDG base directory
    /// specification demands.
    pub fn locate() -> Result<Self, Error> {
        let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
            .ok_or(Error::NoCacheHome)?;
        Ok(Self { root: base.join("numaward") })
    }

    /// A cache at `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of the kernel called `name`, which may not be there.
    pub fn kernel_dir(&self, name: &str) -> PathBuf {
        self.root.join("kernels").join(name)
    }
}

/// The folder of the root file system with systemd, in the cache; its last part is the Debian release.
pub const DEBIAN: &str = "debian/bookworm";
/// The archive in it.
pub const DEBIAN_ARCHIVE: &str = "root.cpio";

/// The folder of the image with the software of the guides, in the cache; its last part is the Debian release.
pub const SOFTWARE: &str = "software/trixie";
/// The folder of the image with package managers, in the cache; its last part is the Debian release.
pub const PACKAGE_MANAGERS: &str = "package-managers/trixie";
/// The image in each of both, for [`Vm::systemd_on_disk`](crate::Vm::systemd_on_disk).
pub const SOFTWARE_IMAGE: &str = "root.img";

/// A Debian root file system with systemd, for [`Vm::systemd`](crate::Vm::systemd).
#[derive(Debug, Clone)]
pub struct Debian {
    archive: PathBuf,
}

impl Debian {
    /// The one in the cache.
    pub fn find(cache: &Cache) -> Result<Self, Error> {
        let archive = cache.root.join(DEBIAN).join(DEBIAN_ARCHIVE);
        if archive.is_file() { Ok(Self { archive }) } else { Err(Error::NoDebian(archive)) }
    }

    pub(crate) fn archive(&self) -> &Path {
        &self.archive
    }
}

/// A kernel with the few modules that a guest may need.
#[derive(Debug, Clone)]
pub struct Kernel {
    name: String,
    version: String,
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// The kernel called `name` (`6.1`, `6.12`, `latest`).
    pub fn find(cache: &Cache, name: &str) -> Result<Self, Error> {
        let folder = cache.kernel_dir(name);
        let missing = |path: &Path| Error::NoKernel { name: name.to_owned(), path: path.to_owned() };
        let image = folder.join("vmlinuz");
        if !image.is_file() {
            return Err(missing(&image));
        }
        let version = folder.join("version");
        let version = fs::read_to_string(&version).map_err(|_| missing(&version))?.trim().to_owned();
        Ok(Self { name: name.to_owned(), version, image, modules: folder.join("modules") })
    }

    /// What it is called here.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The package it came from, for messages.
    pub fn version(&self) -> &str {
        &self.version
    }

    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// The module's file, if this kernel has it as a module (it may be built in).
    pub(crate) fn module(&self, name: &str) -> Option<PathBuf> {
        let path = self.modules.join(format!("{name}.ko"));
        path.is_file().then_some(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_setup_left_and_names_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let error = Kernel::find(&cache, "6.1").unwrap_err().to_string();
        assert!(error.contains("kernels/6.1/vmlinuz") && error.contains("cargo xtask setup"), "{error}");

        let dir = cache.kernel_dir("6.1");
        fs::create_dir_all(dir.join("modules")).unwrap();
        fs::write(dir.join("vmlinuz"), "").unwrap();
        let error = Kernel::find(&cache, "6.1").unwrap_err().to_string();
        assert!(error.contains("kernels/6.1/version"), "{error}");

        fs::write(dir.join("version"), "linux-image 6.1.0\n").unwrap();
        fs::write(dir.join("modules/virtio.ko"), "").unwrap();
        let kernel = Kernel::find(&cache, "6.1").unwrap();
        assert_eq!(kernel.version(), "linux-image 6.1.0");
        assert!(kernel.module("virtio").is_some());
        assert!(kernel.module("overlay").is_none());

        let error = Debian::find(&cache).unwrap_err().to_string();
        assert!(
            error.contains("debian/bookworm/root.cpio") && error.contains("cargo xtask setup"),
            "{error}"
        );
    }
}

//! Cache of the files that `cargo xtask setup` fetches: `CACHE/kernels/NAME/{vmlinuz,modules/*.ko,version}`,
//! `CACHE/debian/NAME/root.cpio`. Kernels for another processor than x86-64 are in `CACHE/kernels/ARCH-NAME`, and
//! further files for their guests in `CACHE/guests/ARCH`.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{Arch, Error};

/// The folder that outlives checkouts: `${XDG_CACHE_HOME:-~/.cache}/numaward`.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Finds the folder by environment variables; relative values of `XDG_CACHE_HOME` are ignored, as the XDG base
    /// directory specification requires.
    pub fn locate() -> Result<Self, Error> {
        let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
            .ok_or(Error::NoCacheHome)?;
        Ok(Self { root: base.join("numaward") })
    }

    /// Uses the folder `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the folder of the kernel `name`, which may not exist.
    pub fn kernel_dir(&self, arch: Arch, name: &str) -> PathBuf {
        self.root.join("kernels").join(folder_name(arch, name))
    }

    /// Returns the folder with this set of container runtimes' packages, which may not exist.
    pub fn containerd_dir(&self, arch: Arch, set: &str) -> PathBuf {
        self.root.join("containerd").join(folder_name(arch, set))
    }

    /// Returns the folder of the root file system with systemd of this Debian release, which may not exist.
    pub fn debian_dir(&self, arch: Arch, release: &str) -> PathBuf {
        self.root.join("debian").join(folder_name(arch, release))
    }

    /// Returns the folder of files for guests with another processor than this host: [`GUEST_BUSYBOX`] and
    /// [`GUEST_FIRMWARE`].
    pub fn guest_dir(&self, arch: Arch) -> PathBuf {
        self.root.join("guests").join(arch.name())
    }
}

/// Returns the name of a folder that exists for several processors.
fn folder_name(arch: Arch, name: &str) -> String {
    match arch {
        Arch::Amd64 => name.to_owned(),
        Arch::Arm64 => format!("{arch}-{name}"),
    }
}

/// Debian release of the root file system with systemd.
pub const DEBIAN: &str = "bookworm";
/// Name of the archive with the root file system.
pub const DEBIAN_ARCHIVE: &str = "root.cpio";

/// Folder in the cache of the image with the guides' software; its last part is the Debian release.
pub const SOFTWARE: &str = "software/trixie";
/// Folder in the cache of the image with software that no stable Debian release has.
pub const NEW_SOFTWARE: &str = "software/sid";
/// Folder in the cache of the image with package managers; its last part is the Debian release.
pub const PACKAGE_MANAGERS: &str = "package-managers/trixie";
/// Name of the image in each of these folders, for [`Vm::systemd_on_disk`](crate::Vm::systemd_on_disk).
pub const SOFTWARE_IMAGE: &str = "root.img";

/// Shell and tools of a guest.
pub const GUEST_BUSYBOX: &str = "busybox";
/// Firmware that starts the guest's kernel and describes the machine by ACPI.
pub const GUEST_FIRMWARE: &str = "QEMU_EFI.fd";

/// A Debian root file system with systemd, for [`Vm::systemd`](crate::Vm::systemd).
#[derive(Debug, Clone)]
pub struct Debian {
    arch: Arch,
    archive: PathBuf,
}

impl Debian {
    /// Finds the root file system in the cache.
    pub fn find(cache: &Cache, arch: Arch) -> Result<Self, Error> {
        let archive = cache.debian_dir(arch, DEBIAN).join(DEBIAN_ARCHIVE);
        if archive.is_file() { Ok(Self { arch, archive }) } else { Err(Error::NoDebian(archive)) }
    }

    pub(crate) fn arch(&self) -> Arch {
        self.arch
    }

    pub(crate) fn archive(&self) -> &Path {
        &self.archive
    }
}

/// A kernel with the modules for guests.
#[derive(Debug, Clone)]
pub struct Kernel {
    arch: Arch,
    name: String,
    version: String,
    image: PathBuf,
    modules: PathBuf,
    guest: PathBuf,
    page_size: u64,
}

impl Kernel {
    /// Finds the kernel `name` (`6.1`, `6.12`, `latest`) in the cache.
    pub fn find(cache: &Cache, arch: Arch, name: &str) -> Result<Self, Error> {
        let folder = cache.kernel_dir(arch, name);
        let missing = |path: &Path| Error::NoKernel { name: name.to_owned(), path: path.to_owned() };
        let image = folder.join("vmlinuz");
        if !image.is_file() {
            return Err(missing(&image));
        }
        let version = folder.join("version");
        let version = fs::read_to_string(&version).map_err(|_| missing(&version))?.trim().to_owned();
        let (modules, guest) = (folder.join("modules"), cache.guest_dir(arch));
        let page_size = page_size(&fs::read_to_string(folder.join("config")).unwrap_or_default());
        Ok(Self { arch, name: name.to_owned(), version, image, modules, guest, page_size })
    }

    /// Returns the processor of the kernel.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Returns the size of its base pages, in bytes.
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Returns its name in the cache.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its Debian package and version, for messages.
    pub fn version(&self) -> &str {
        &self.version
    }

    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// Returns the path of a file that a guest with another processor than x86-64 needs.
    pub(crate) fn guest_file(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.guest.join(name);
        if path.is_file() { Ok(path) } else { Err(Error::NoGuestFile { arch: self.arch, path }) }
    }

    /// Returns the module's file; `None` if the kernel does not have it as a module (it may be built in).
    pub(crate) fn module(&self, name: &str) -> Option<PathBuf> {
        let path = self.modules.join(format!("{name}.ko"));
        path.is_file().then_some(path)
    }
}

/// Reads the page size from a kernel's configuration; only those for Arm have a choice.
fn page_size(config: &str) -> u64 {
    let has = |size: u64| config.lines().any(|line| line == format!("CONFIG_ARM64_{size}K_PAGES=y"));
    [64, 16].into_iter().find(|&size| has(size)).unwrap_or(4) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_page_sizes() {
        let config = "# CONFIG_ARM64_4K_PAGES is not set\nCONFIG_ARM64_16K_PAGES=y\n# CONFIG_ARM64_64K_PAGES is not set\n";
        assert_eq!(page_size(config), 16 << 10);
        assert_eq!(page_size(&config.replace("16K", "64K")), 64 << 10);
        assert_eq!((page_size("CONFIG_ARM64_4K_PAGES=y\n"), page_size("")), (4 << 10, 4 << 10));
    }

    #[test]
    fn finds_kernels_and_names_missing_files() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let find = |arch| Kernel::find(&cache, arch, "6.1");
        let error = find(Arch::Amd64).unwrap_err().to_string();
        assert!(error.contains("kernels/6.1/vmlinuz") && error.contains("cargo xtask setup"), "{error}");

        let dir = cache.kernel_dir(Arch::Amd64, "6.1");
        fs::create_dir_all(dir.join("modules")).unwrap();
        fs::write(dir.join("vmlinuz"), "").unwrap();
        let error = find(Arch::Amd64).unwrap_err().to_string();
        assert!(error.contains("kernels/6.1/version"), "{error}");

        fs::write(dir.join("version"), "linux-image 6.1.0\n").unwrap();
        fs::write(dir.join("modules/virtio.ko"), "").unwrap();
        let kernel = find(Arch::Amd64).unwrap();
        assert_eq!((kernel.version(), kernel.arch()), ("linux-image 6.1.0", Arch::Amd64));
        assert!(kernel.module("virtio").is_some());
        assert!(kernel.module("overlay").is_none());
        let error = find(Arch::Arm64).unwrap_err().to_string();
        assert!(error.contains("kernels/arm64-6.1/vmlinuz"), "{error}");
        let error = kernel.guest_file(GUEST_BUSYBOX).unwrap_err().to_string();
        assert!(error.contains("guests/amd64/busybox") && error.contains("cargo xtask setup"), "{error}");

        let error = Debian::find(&cache, Arch::Amd64).unwrap_err().to_string();
        assert!(
            error.contains("debian/bookworm/root.cpio") && error.contains("cargo xtask setup"),
            "{error}"
        );
    }
}

//! `cargo xtask dist`: builds the released files, without root and without a container engine.
//!
//! Each contains one static program that runs on any Linux with its processor, x86-64 or 64-bit Arm:
//!
//! - `numaward-VERSION-x86_64-linux.tar.gz` and `…-aarch64-…`: the program with its manual, completions and unit;
//! - `numaward_VERSION_amd64.deb` and `…_arm64.deb`: the same for Debian and its derivatives, and `apt`, a repository
//!   with them;
//! - `numaward-VERSION-1.x86_64.rpm` and `….aarch64.rpm`: the same for Fedora, RHEL and openSUSE;
//! - `numaward-VERSION-oci.tar`: a container image for all processors as an archive in the OCI layout, and
//!   `rootfs-amd64` and `rootfs-arm64`, its content;
//! - `numaward-VERSION-deploy.tar.gz`: the manifests for Kubernetes;
//! - `numaward-VERSION.cdx.json`: the crates in the program (`CycloneDX`);
//! - `numaward-VERSION.intoto.json`: the sources and tools of all these files (in-toto, SLSA);
//! - `SHA256SUMS`; with a key also its signature, `SHA256SUMS.asc`, and the key's public half, `numaward.asc`.
//!
//! Invariant: the same commit and the same tools make the same bytes. Therefore all files have the time of the commit
//! (or `SOURCE_DATE_EPOCH` if it is set), are owned by root, and have modes that do not depend on the umask; names are
//! sorted, and the program contains no path of the building machine. Signatures contain the time of signing, so no file
//! with a digest contains one.
//! are made, so nothing that has a digest holds one.

mod apt;
pub(crate) mod changelog;
mod components;
mod deb;
mod elf;
mod image;
mod provenance;
mod reproducible;
mod rpm;
mod sign;
mod tree;

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use numaward_vm::Arch;

pub(crate) use self::provenance::ProgramOrigin;
pub(crate) use self::sign::Signer;
use self::tree::{FileTree, gzip, sha256};
use crate::setup::{self, Part};
use crate::{build, command};

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// A later version, for dpkg and for rpm.
const NEXT_VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+next");
const PROGRAM: &str = "usr/bin/numaward";
const CONFIGURATION: &str = "etc/numaward/config.yaml";
/// Folders for files of the administrator's tools.
const CONFIGURATION_FOLDERS: [&str; 2] = ["etc/numaward/conf.d", "etc/numaward/guarantees.d"];
/// Both kinds of packages require an address; no mail to this one is read.
const MAINTAINER: &str = "The numaward authors <authors@numaward.invalid>";
const SUMMARY: &str = "keeps memory near the CPUs that use it, and proves it";
const EXECUTABLE: u32 = 0o755;
const PLAIN: u32 = 0o644;

#[derive(Args)]
pub(crate) struct DistArguments {
    #[command(flatten)]
    what: DistOptions,
    #[command(flatten)]
    key: KeyArguments,
    /// Builds the last commit twice, in two folders, and fails if a file differs
    #[arg(long, conflicts_with_all = ["out", "programs", "pool"])]
    check_reproducible: bool,
    /// Builds only the static program of this package of the workspace, without packages
    #[arg(long, value_name = "PACKAGE", conflicts_with_all = ["programs", "pool"])]
    only_program: Option<String>,
}

/// Files to make, and their folder.
#[derive(Args)]
pub(crate) struct DistOptions {
    /// Folder for the files; its content is removed first [default: packages in cargo's target folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Packs this static program, instead of building one; may be repeated, once for each processor
    #[arg(long = "program", value_name = "FILE", requires = "out", conflicts_with = "archs")]
    programs: Vec<PathBuf>,
    /// For this processor; may be repeated [default: that of this host; for a release all]
    #[arg(long = "arch", value_name = "ARCH")]
    archs: Vec<Arch>,
    /// Folder with the Debian packages of earlier versions, which the apt repository keeps
    #[arg(long, value_name = "DIR")]
    pool: Option<PathBuf>,
}

/// Key for signatures.
#[derive(Args)]
pub(crate) struct KeyArguments {
    /// Signs the checksums and the apt repository with this key of your gpg keyring (a fingerprint, for one)
    #[arg(long, value_name = "KEY", env = "NUMAWARD_KEY")]
    key: Option<String>,
}

impl KeyArguments {
    pub(crate) fn get(&self) -> Option<&str> {
        self.key.as_deref()
    }
}

pub(crate) fn main(arguments: &DistArguments) -> Result<()> {
    if arguments.check_reproducible {
        return reproducible::check(&arguments.what.archs, arguments.only_program.as_deref());
    }
    if let Some(package) = &arguments.only_program {
        return arguments.what.build_only(package);
    }
    let signer = match arguments.key.get() {
        Some(key) => {
            setup::ensure(&[Part::Gpg])?;
            Some(Signer::of_keyring(key)?)
        }
        None => None,
    };
    let own: Vec<_> = Arch::of_host().into_iter().collect();
    let (_, made) = arguments.what.make(signer.as_ref(), &own)?;
    for made in made {
        println!("{}", made.display());
    }
    if signer.is_none() {
        println!("not signed: --key KEY signs the checksums and the apt repository");
    }
    Ok(())
}

impl DistOptions {
    /// Returns whether existing programs are packed.
    pub(crate) fn has_programs(&self) -> bool {
        !self.programs.is_empty()
    }

    /// Builds the program of one package into the folder, after removing its content.
    fn build_only(&self, package: &str) -> Result<()> {
        let archs =
            if self.archs.is_empty() { Arch::of_host().into_iter().collect() } else { self.archs.clone() };
        let out = self.out.as_deref().context("--only-program needs --out")?;
        empty(out)?;
        for arch in archs {
            setup::ensure(&[Part::Ebpf, Part::Compiler(arch)])?;
            let (built, made) =
                (build::portable_program(arch, package)?, out.join(format!("{package}-{arch}")));
            fs::copy(&built, &made).with_context(|| format!("cannot copy {}", built.display()))?;
            println!("{}", made.display());
        }
        Ok(())
    }

    /// Makes everything, by default for some processors, and returns the folder and the released files.
    pub(crate) fn make(&self, signer: Option<&Signer>, archs: &[Arch]) -> Result<(PathBuf, Vec<PathBuf>)> {
        let archs = if self.archs.is_empty() { archs } else { &self.archs };
        ensure!(!archs.is_empty(), "for which processor? This host's is none of them: give --arch");
        let (programs, origin) = if self.has_programs() {
            (self.programs.clone(), ProgramOrigin::Given(&self.programs))
        } else {
            let compilers = archs.iter().map(|arch| Part::Compiler(*arch));
            setup::ensure(&[Part::Ebpf].into_iter().chain(compilers).collect::<Vec<_>>())?;
            let programs = archs.iter().map(|arch| build::portable_program(*arch, "numaward"));
            (programs.collect::<Result<_>>()?, ProgramOrigin::Built(archs))
        };
        let out = match &self.out {
            Some(out) => out.clone(),
            // In `dist` beside it, cargo has files of its own.
            None => build::target_directory()?.join("packages"),
        };
        let made = make(&programs, &origin, &out, self.pool.as_deref(), signer)?;
        image::check_size(&out.join(image_name()), programs.len())?;
        Ok((out, made))
    }
}

fn image_name() -> String {
    format!("numaward-{VERSION}-oci.tar")
}

/// Makes all files of these programs in `out`, one program for each processor, and returns the released files. The apt
/// repository also has the packages in `pool`.
pub(crate) fn make(
    paths: &[PathBuf],
    origin: &ProgramOrigin<'_>,
    out: &Path,
    pool: Option<&Path>,
    signer: Option<&Signer>,
) -> Result<Vec<PathBuf>> {
    let programs = paths.iter().map(|path| Program::read(path)).collect::<Result<Vec<_>>>()?;
    let archs: Vec<_> = programs.iter().map(|program| program.arch).collect();
    let contents = if let Some(own) = archs.iter().position(|arch| Some(*arch) == Arch::of_host()) {
        Contents::generate(&paths[own], programs)?
    } else {
        let own = build::programs(&["numaward"], "dev")?.into_iter().next();
        let (_, own) = own.context("cargo has built no program for this host, which prints the manual")?;
        Contents::generate(&own, programs)?
    };
    let epoch = epoch()?;
    empty(out)?;
    let mut made = contents.package(out, epoch)?;
    let packages: Vec<_> = made.iter().map(PathBuf::as_path).filter(|path| is_deb(path)).collect();
    apt::build(&FileTree::new(&out.join("apt"), epoch)?, &packages, pool, signer)?;
    made.push(components::write(&out.join(format!("numaward-{VERSION}.cdx.json")), &archs, epoch)?);
    let statement = out.join(format!("numaward-{VERSION}.intoto.json"));
    made.push(provenance::write(&statement, &made, origin, epoch)?);
    let mut sums = String::new();
    for path in &made {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        writeln!(sums, "{}  {name}", sha256(path)?)?;
    }
    let path = out.join("SHA256SUMS");
    fs::write(&path, sums)?;
    if let Some(signer) = signer {
        signer.detached(&path, "SHA256SUMS.asc")?;
        made.push(path.with_file_name("SHA256SUMS.asc"));
        let public = path.with_file_name("numaward.asc");
        fs::write(&public, signer.public()?)?;
        made.push(public);
    }
    made.push(path);
    Ok(made)
}

/// Makes the packages of the next version in `out`, with a repository that also has those of this version: for tests of
/// upgrades.
pub(crate) fn make_next(program: &Path, out: &Path, pool: &Path, signer: &Signer) -> Result<()> {
    let epoch = epoch()?;
    let scratch = tempfile::Builder::new().prefix("numaward-dist-").tempdir()?;
    empty(out)?;
    let mut contents = Contents::generate(program, Vec::new())?;
    NEXT_VERSION.clone_into(&mut contents.version);
    let program = Program::read(program)?;
    let package = out.join(deb::name(NEXT_VERSION, program.arch));
    deb::build(&contents, &program, &FileTree::new(&scratch.path().join("deb"), epoch)?, &package)?;
    rpm::build(&contents, &program, epoch, &out.join(rpm::name(NEXT_VERSION, program.arch)))?;
    apt::build(&FileTree::new(&out.join("apt"), epoch)?, &[&package], Some(pool), Some(signer))
}

/// Creates a folder, or removes its content.
fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

fn is_deb(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "deb")
}

/// Returns the time of all files, in seconds since 1970.
fn epoch() -> Result<u64> {
    let text = if let Ok(text) = env::var("SOURCE_DATE_EPOCH") {
        text
    } else {
        let mut git = Command::new("git");
        git.args(["log", "-1", "--format=%ct"]).current_dir(command::root());
        command::read(&mut git).context("this is no checkout: set SOURCE_DATE_EPOCH")?
    };
    let text = text.trim();
    text.parse().with_context(|| format!("SOURCE_DATE_EPOCH: {text:?} is no number of seconds"))
}

/// Formats a time as in RFC 3339.
fn rfc3339(epoch: u64) -> Result<String> {
    let mut date = Command::new("date");
    let text = command::read(date.args(["--utc", "+%Y-%m-%dT%H:%M:%SZ", "--date"]).arg(format!("@{epoch}")))?;
    Ok(text.trim().to_owned())
}

/// A file, by its path in the released files.
#[derive(Clone)]
struct PackageFile {
    path: String,
    bytes: Vec<u8>,
    mode: u32,
}

fn entry(path: impl Into<String>, bytes: impl Into<Vec<u8>>) -> PackageFile {
    PackageFile { path: path.into(), bytes: bytes.into(), mode: PLAIN }
}

/// A static program.
struct Program {
    arch: Arch,
    bytes: Vec<u8>,
}

impl Program {
    fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let arch = elf::check_static(&bytes).with_context(|| path.display().to_string())?;
        Ok(Self { arch, bytes })
    }
}

/// Content of packages.
struct Contents {
    version: String,
    programs: Vec<Program>,
    /// Pages of the manual by their file name.
    manual: Vec<PackageFile>,
    /// Completions by the shell's name.
    completions: Vec<PackageFile>,
}

impl Contents {
    /// Runs `program` to generate the manual and the completions of all programs.
    fn generate(program: &Path, programs: Vec<Program>) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("numaward-manual-").tempdir()?;
        command::read(Command::new(program).args(["man", "--dir"]).arg(folder.path()))?;
        let mut manual = Vec::new();
        for page in fs::read_dir(folder.path())? {
            let page = page?;
            manual.push(entry(page.file_name().to_string_lossy(), fs::read(page.path())?));
        }
        manual.sort_by(|a, b| a.path.cmp(&b.path));
        let mut completions = Vec::new();
        for shell in ["bash", "fish", "zsh"] {
            completions
                .push(entry(shell, command::read(Command::new(program).args(["completions", shell]))?));
        }
        Ok(Self { version: VERSION.to_owned(), programs, manual, completions })
    }

    fn package(&self, out: &Path, epoch: u64) -> Result<Vec<PathBuf>> {
        let scratch = tempfile::Builder::new().prefix("numaward-dist-").tempdir()?;
        let tree = |name: &str| FileTree::new(&scratch.path().join(name), epoch);

        let top = format!("numaward-{VERSION}");
        let (mut made, mut images) = (Vec::new(), Vec::new());
        for program in &self.programs {
            let arch = program.arch;
            let archive = out.join(format!("numaward-{VERSION}-{}-linux.tar.gz", arch.kernel_name()));
            let packed = tree(&format!("archive-{arch}"))?;
            for PackageFile { path, bytes, mode } in self.for_archive(program)? {
                packed.file(&format!("{top}/{path}"), &bytes, mode)?;
            }
            gzip(&packed.pack(&scratch.path().join(format!("archive-{arch}.tar")))?, &archive)?;

            let debian = out.join(deb::name(&self.version, arch));
            deb::build(self, program, &tree(&format!("deb-{arch}"))?, &debian)?;
            let fedora = out.join(rpm::name(&self.version, arch));
            rpm::build(self, program, epoch, &fedora)?;
            made.extend([archive, debian, fedora]);

            let rootfs = FileTree::new(&out.join(format!("rootfs-{arch}")), epoch)?;
            rootfs.file(PROGRAM, &program.bytes, EXECUTABLE)?;
            // Without this file, the order depends on the C library.
            rootfs.file("etc/nsswitch.conf", b"hosts: files dns\n", PLAIN)?;
            images.push((arch, rootfs));
        }
        let image = out.join(image_name());
        image::build(&images, &tree("image")?, &image, &rfc3339(epoch)?)?;

        let deploy = out.join(format!("numaward-{VERSION}-deploy.tar.gz"));
        let packed = tree("deploy")?;
        for folder in ["dashboards", "deploy"] {
            packed.copy(&command::root().join(folder), &format!("{top}/{folder}"))?;
        }
        gzip(&packed.pack(&scratch.path().join("deploy.tar"))?, &deploy)?;
        made.extend([image, deploy]);
        Ok(made)
    }

    fn for_archive(&self, program: &Program) -> Result<Vec<PackageFile>> {
        let mut entries =
            vec![PackageFile { mode: EXECUTABLE, ..entry("bin/numaward", program.bytes.clone()) }];
        for file in ["numaward.preset", "numaward.service", "numaward.socket"] {
            entries.push(entry(format!("systemd/{file}"), checkout(&format!("deploy/systemd/{file}"))?));
        }
        entries.extend(self.manual.iter().map(|page| renamed(page, format!("man/man1/{}", page.path))));
        entries.extend(
            self.completions.iter().map(|it| renamed(it, format!("completions/numaward.{}", it.path))),
        );
        for file in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
            entries.push(entry(file, checkout(file)?));
        }
        Ok(entries)
    }

    /// Returns the files that every package installs; the folder of zsh's completions depends on the distribution.
    fn installed(&self, program: &Program, zsh: &str) -> Result<Vec<PackageFile>> {
        let mut entries = vec![PackageFile { mode: EXECUTABLE, ..entry(PROGRAM, program.bytes.clone()) }];
        for (path, file) in [
            ("usr/lib/systemd/system/numaward.service", "numaward.service"),
            ("usr/lib/systemd/system/numaward.socket", "numaward.socket"),
            ("usr/lib/systemd/system-preset/90-numaward.preset", "numaward.preset"),
            (CONFIGURATION, "config.yaml"),
        ] {
            entries.push(entry(path, checkout(&format!("deploy/systemd/{file}"))?));
        }
        for page in &self.manual {
            entries.push(entry(format!("usr/share/man/man1/{}.gz", page.path), tree::gzipped(&page.bytes)?));
        }
        for completion in &self.completions {
            let path = match completion.path.as_str() {
                "bash" => "usr/share/bash-completion/completions/numaward".to_owned(),
                "fish" => "usr/share/fish/vendor_completions.d/numaward.fish".to_owned(),
                _ => format!("{zsh}/_numaward"),
            };
            entries.push(renamed(completion, path));
        }
        Ok(entries)
    }
}

fn renamed(entry: &PackageFile, path: String) -> PackageFile {
    PackageFile { path, ..entry.clone() }
}

/// Reads a file of the checkout.
fn checkout(path: &str) -> Result<Vec<u8>> {
    let path = command::root().join(path);
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(folder: &Path) -> Vec<PathBuf> {
        fs::create_dir_all(folder).unwrap();
        let contents = Contents {
            version: VERSION.to_owned(),
            programs: [(Arch::Amd64, "program"), (Arch::Arm64, "another")]
                .map(|(arch, bytes)| Program { arch, bytes: bytes.into() })
                .into(),
            manual: vec![entry("numaward.1", "manual")],
            completions: ["bash", "fish", "zsh"].map(|shell| entry(shell, shell)).to_vec(),
        };
        contents.package(folder, 1_700_000_000).unwrap()
    }

    fn listing(program: &str, arguments: &[&str], path: &Path) -> String {
        command::read(Command::new(program).args(arguments).arg(path).env("TZ", "UTC")).unwrap()
    }

    #[test]
    fn packages_are_reproducible() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["a", "b"].map(|name| made(&folder.path().join(name)));
        for (first, second) in first.iter().zip(&second) {
            assert_eq!(sha256(first).unwrap(), sha256(second).unwrap(), "{}", first.display());
        }
        let [archive, package, fedora, of_arm, package_of_arm, fedora_of_arm, image, deploy] = &first[..]
        else {
            panic!("{first:?}")
        };
        assert!(of_arm.ends_with(format!("numaward-{VERSION}-aarch64-linux.tar.gz")), "{}", of_arm.display());
        let program_of_arm = listing("tar", &["-xOzf"], of_arm);
        assert!(program_of_arm.contains("another"), "{program_of_arm}");

        let archive = listing("tar", &["-tvzf"], archive);
        let program =
            format!("-rwxr-xr-x 0/0               7 2023-11-14 22:13 numaward-{VERSION}/bin/numaward");
        assert!(archive.contains(&program), "{archive}");
        assert!(archive.contains("/completions/numaward.zsh") && archive.contains("/man/man1/numaward.1"));
        let deploy = listing("tar", &["-tzf"], deploy);
        for file in [
            "base/daemonset.yaml",
            "helm/numaward/files/enforce.yaml",
            "helm/numaward/files/dashboards/host.json",
        ] {
            assert!(deploy.contains(&format!("/deploy/{file}\n")), "{file}:\n{deploy}");
        }
        assert!(deploy.contains("/dashboards/grafana/"));

        let contents = listing("dpkg-deb", &["--contents"], package);
        for line in [
            "-rwxr-xr-x root/root         7 2023-11-14 22:13 ./usr/bin/numaward",
            "./etc/numaward/config.yaml",
            "./etc/numaward/conf.d/",
            "./etc/numaward/guarantees.d/",
            "./usr/lib/systemd/system/numaward.service",
            "./usr/lib/systemd/system/numaward.socket",
            "./usr/lib/systemd/system-preset/90-numaward.preset",
            "./usr/share/bash-completion/completions/numaward",
            "./usr/share/fish/vendor_completions.d/numaward.fish",
            "./usr/share/zsh/vendor-completions/_numaward",
            "./usr/share/doc/numaward/changelog.gz",
            "./usr/share/man/man1/numaward.1.gz",
        ] {
            assert!(contents.contains(line), "{line}:\n{contents}");
        }
        for (arch, package) in [(Arch::Amd64, package), (Arch::Arm64, package_of_arm)] {
            let control = listing("dpkg-deb", &["--field"], package);
            let expected = format!("Version: {VERSION}\nArchitecture: {arch}\n");
            assert!(control.contains(&expected), "{control}");
        }
        for fedora in [fedora, fedora_of_arm] {
            let magic = fs::read(fedora).unwrap();
            assert!(magic.starts_with(b"\xed\xab\xee\xdb"), "{}", fedora.display());
        }

        let layout = folder.path().join("layout");
        fs::create_dir(&layout).unwrap();
        command::read(Command::new("tar").arg("-xf").arg(image).arg("-C").arg(&layout)).unwrap();
        let programs = image::tests::check(&layout, &Arch::ALL, "usr/bin/numaward");
        assert_eq!(programs, ["program", "another"]);
    }

    #[test]
    fn formats_times_as_rfc_3339() {
        assert_eq!(rfc3339(1_700_000_000).unwrap(), "2023-11-14T22:13:20Z");
    }
}

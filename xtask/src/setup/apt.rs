//! Packages of any Debian release, fetched by apt.
//!
//! apt gets a list of sources, a folder for the release's index and an empty list of installed packages, all in the
//! cache. Network, proxy and keys are those of the system, so each index is verified by its signature and each package
//! by the index.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use numaward_vm::{Arch, Cache};

use super::explain;
use super::sources::Mirror;
use super::steps::say;
use crate::command;

/// A release with a fetched index.
pub(crate) struct Suite {
    name: String,
    /// Processor; `None` for that of this system.
    arch: Option<Arch>,
    folder: PathBuf,
}

/// Entry of a package in the index.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DebianPackage {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Names of its dependencies; of alternatives, the first.
    pub(crate) depends: Vec<String>,
}

impl Suite {
    /// Fetches the index of the release `name`.
    pub(crate) fn fetch(cache: &Cache, mirror: &Mirror, name: &str) -> Result<Self> {
        Self::fetch_of(cache, mirror, name, None)
    }

    /// Like [`Suite::fetch`], with the packages for a processor.
    pub(crate) fn fetch_for(cache: &Cache, mirror: &Mirror, name: &str, arch: Arch) -> Result<Self> {
        Self::fetch_of(cache, mirror, name, (Some(arch) != Arch::of_host()).then_some(arch))
    }

    fn fetch_of(cache: &Cache, mirror: &Mirror, name: &str, arch: Option<Arch>) -> Result<Self> {
        let folder = arch.map_or_else(|| name.to_owned(), |arch| format!("{arch}-{name}"));
        let suite = Self { name: name.to_owned(), arch, folder: cache.root().join("apt").join(folder) };
        for folder in ["lists/partial", "archives/partial"] {
            let folder = suite.folder.join(folder);
            fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let options = ["target=Packages"].into_iter().chain(mirror.options.iter().map(String::as_str));
        let options = options.collect::<Vec<_>>().join(" ");
        let source = format!("deb [{options}] {} {name} main\n", mirror.uri);
        fs::write(suite.folder.join("sources.list"), source)?;
        fs::write(suite.folder.join("status"), "")?;
        say("apt", &format!("fetching the index of Debian {name}"));
        let mut update = suite.apt("apt-get");
        update.args(["-o", "APT::Update::Error-Mode=any", "-q", "update"]);
        command::run_slowly("apt", &mut update)
            .map_err(|error| explained(&error, &format!("cannot fetch the index of Debian {name}")))?;
        Ok(suite)
    }

    /// Returns the newest version of a package.
    pub(crate) fn newest(&self, name: &str) -> Result<DebianPackage> {
        let text = command::read(self.apt("apt-cache").args(["--no-all-versions", "show", name]))
            .map_err(|error| explained(&error, &format!("Debian {} has no package {name}", self.name)))?;
        parse(&text).with_context(|| format!("cannot understand what apt says about {name}:\n{text}"))
    }

    /// Returns the package and its direct and indirect dependencies that are `wanted`.
    pub(crate) fn closure(&self, name: &str, wanted: impl Fn(&str) -> bool) -> Result<Vec<DebianPackage>> {
        follow(name, wanted, |name| self.newest(name))
    }

    /// Downloads the package into `folder` and returns its path.
    pub(crate) fn download(&self, package: &DebianPackage, folder: &Path) -> Result<PathBuf> {
        let before = debs(folder)?;
        let mut download = self.apt("apt-get");
        download
            .current_dir(folder)
            .args(["-q", "download"])
            .arg(format!("{}={}", package.name, package.version));
        say("apt", &format!("fetching {} {}", package.name, package.version));
        let what = || format!("cannot fetch {} {} of Debian {}", package.name, package.version, self.name);
        command::run_slowly("apt", &mut download).map_err(|error| explained(&error, &what()))?;
        let new = debs(folder)?.into_iter().find(|path| !before.contains(path));
        new.with_context(|| format!("apt-get has fetched {}, but no file is there", package.name))
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C");
        let path = |name: &str| self.folder.join(name).display().to_string();
        for (option, value) in [
            ("Dir::Etc::SourceList", path("sources.list").as_str()),
            ("Dir::Etc::SourceParts", "-"),
            ("Dir::Etc::Preferences", "/dev/null"),
            ("Dir::Etc::PreferencesParts", "/dev/null"),
            ("Dir::State::Lists", &path("lists")),
            ("Dir::State::Status", &path("status")),
            ("Dir::Cache", &self.folder.display().to_string()),
            // apt's own user may have no access to the cache.
            ("APT::Sandbox::User", ""),
            ("Acquire::Languages", "none"),
            ("Acquire::Retries", "2"),
        ] {
            command.args(["-o", &format!("{option}={value}")]);
        }
        if let Some(arch) = self.arch {
            for option in ["APT::Architecture", "APT::Architectures"] {
                command.args(["-o", &format!("{option}={arch}")]);
            }
        }
        command
    }
}

/// Unpacks a package into `folder`.
pub(crate) fn unpack(deb: &Path, folder: &Path) -> Result<()> {
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.env("LC_ALL", "C").arg("--extract").arg(deb).arg(folder);
    command::read(&mut dpkg)
        .map(drop)
        .map_err(|error| explained(&error, &format!("cannot unpack {}", deb.display())))
}

/// Creates one error from the failed step, advice if there is any, and the output of the program.
pub(crate) fn explained(error: &anyhow::Error, what: &str) -> anyhow::Error {
    let said = format!("{error:#}");
    match explain::advice(&said) {
        Some(advice) => anyhow::anyhow!("{what}: {advice}\n  {said}"),
        None => anyhow::anyhow!("{what}: {said}"),
    }
}

fn debs(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut debs = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            debs.push(path);
        }
    }
    Ok(debs)
}

fn follow(
    name: &str,
    wanted: impl Fn(&str) -> bool,
    show: impl Fn(&str) -> Result<DebianPackage>,
) -> Result<Vec<DebianPackage>> {
    let mut found: Vec<DebianPackage> = Vec::new();
    let mut names = vec![name.to_owned()];
    while let Some(name) = names.pop() {
        if found.iter().any(|package| package.name == name) {
            continue;
        }
        let package = show(&name)?;
        names.extend(package.depends.iter().filter(|name| wanted(name)).cloned());
        found.push(package);
    }
    Ok(found)
}

/// Parses the first stanza.
fn parse(text: &str) -> Option<DebianPackage> {
    let stanza = text.split("\n\n").next()?;
    let field = |name: &str| stanza.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    let needed = ["Pre-Depends", "Depends"].into_iter().filter_map(field).flat_map(|list| list.split(','));
    let name_of = |relation: &str| {
        relation.split('|').next()?.split([' ', ':', '(']).find(|word| !word.is_empty()).map(str::to_owned)
    };
    Some(DebianPackage {
        name: field("Package")?.to_owned(),
        version: field("Version")?.to_owned(),
        depends: needed.filter_map(name_of).collect(),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn reads_a_stanza() {
        let package = parse(
            "Package: linux-image-cloud-amd64\nVersion: 7.2.13-1\nPre-Depends: libc6 (>= 2.3)\n\
             Depends: linux-base (= 1) | other, linux-image-7.2:any (= 7.2.13-1)\nDescription: x\n\nPackage: y\n",
        );
        assert_eq!(
            package,
            Some(DebianPackage {
                name: "linux-image-cloud-amd64".to_owned(),
                version: "7.2.13-1".to_owned(),
                depends: ["libc6", "linux-base", "linux-image-7.2"].map(str::to_owned).to_vec(),
            })
        );
        assert_eq!(parse("Package: x\n"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn follows_what_is_wanted_once() {
        let show = |name: &str| {
            let depends: &[&str] = match name {
                "meta" => &["image", "base"],
                "image" => &["modules", "meta", "initramfs-tools"],
                "modules" => &["image"],
                "base" => bail!("asked for what is not wanted"),
                _ => &[],
            };
            let depends = depends.iter().map(|name| (*name).to_owned()).collect();
            Ok(DebianPackage { name: name.to_owned(), version: String::new(), depends })
        };
        let found = follow("meta", |name| name != "base" && name != "initramfs-tools", show).unwrap();
        let names: Vec<_> = found.iter().map(|package| package.name.as_str()).collect();
        assert_eq!(names, ["meta", "image", "modules"]);
    }

    /// A Debian archive with one package on disk, without a signature.
    struct Archive {
        folder: tempfile::TempDir,
    }

    const PACKAGE: &str = "numaward-setup-test";

    impl Archive {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let tree = folder.path().join("tree");
            let binary = folder.path().join("archive/dists/test/main/binary-amd64");
            for path in [tree.join("DEBIAN"), tree.join("boot"), binary.clone()] {
                fs::create_dir_all(path).unwrap();
            }
            let control = format!(
                "Package: {PACKAGE}\nVersion: 1.0\nArchitecture: amd64\nMaintainer: x\nDescription: x\n"
            );
            fs::write(tree.join("DEBIAN/control"), &control).unwrap();
            fs::write(tree.join("boot/vmlinuz-1"), "kernel".repeat(1000)).unwrap();
            let archive = Self { folder };
            let deb = archive.deb();
            command::read(Command::new("dpkg-deb").arg("--build").arg(&tree).arg(&deb)).unwrap();
            let (size, sum) = size_and_sum(&deb);
            let index = format!("{control}Filename: test.deb\nSize: {size}\nSHA256: {sum}\n");
            fs::write(binary.join("Packages"), index).unwrap();
            let (size, sum) = size_and_sum(&binary.join("Packages"));
            let release = format!(
                "Suite: test\nCodename: test\nArchitectures: amd64\nComponents: main\nDate: {}\nSHA256:\n {sum} {size} main/binary-amd64/Packages\n",
                "Sat, 01 Jan 2022 00:00:00 UTC"
            );
            fs::write(archive.root().join("dists/test/Release"), release).unwrap();
            archive
        }

        fn root(&self) -> PathBuf {
            self.folder.path().join("archive")
        }

        fn deb(&self) -> PathBuf {
            self.root().join("test.deb")
        }

        fn mirror(&self, options: &[&str]) -> Mirror {
            let uri = format!("copy:{}", self.root().display());
            Mirror { uri, options: options.iter().map(|option| (*option).to_owned()).collect() }
        }

        fn cache(&self) -> Cache {
            Cache::at(self.folder.path().join("cache"))
        }
    }

    fn size_and_sum(path: &Path) -> (u64, String) {
        let sum = command::read(Command::new("sha256sum").arg(path)).unwrap();
        (fs::metadata(path).unwrap().len(), sum.split(' ').next().unwrap().to_owned())
    }

    /// Returns false if apt is missing, which is a failure in CI.
    fn has_apt() -> bool {
        let found = command::find("apt-get").is_some() && command::find("dpkg-deb").is_some();
        if !found {
            numaward_tests_support::skip_outside_ci("apt-get or dpkg-deb is missing");
        }
        found
    }

    fn error<T>(result: Result<T>) -> String {
        format!("{:#}", result.err().unwrap())
    }

    #[test]
    fn refuses_truncated_package() {
        if !has_apt() {
            return;
        }
        let archive = Archive::new();
        let suite = Suite::fetch(&archive.cache(), &archive.mirror(&["trusted=yes"]), "test").unwrap();
        let package = suite.newest(PACKAGE).unwrap();
        assert_eq!(package.version, "1.0");
        let folder = tempfile::tempdir().unwrap();
        let deb = suite.download(&package, folder.path()).unwrap();
        let tree = folder.path().join("tree");
        unpack(&deb, &tree).unwrap();
        assert!(tree.join("boot/vmlinuz-1").is_file());

        let missing = error(suite.newest("numaward-no-such-package"));
        assert!(missing.contains("Debian test has no package numaward-no-such-package"), "{missing}");
        assert!(missing.contains("the release has no such package"), "{missing}");

        let whole = fs::read(archive.deb()).unwrap();
        let truncated = &whole[..whole.len() / 2];
        fs::write(archive.deb(), truncated).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let message = error(suite.download(&package, elsewhere.path()));
        assert!(message.contains("truncated or damaged"), "{message}");
        assert_eq!(debs(elsewhere.path()).unwrap(), Vec::<PathBuf>::new());

        fs::write(&deb, truncated).unwrap();
        let message = error(unpack(&deb, &folder.path().join("tree2")));
        assert!(message.contains("cannot unpack") && message.contains("truncated or damaged"), "{message}");
    }

    #[test]
    fn refuses_unsigned_and_missing_releases() {
        if !has_apt() {
            return;
        }
        let archive = Archive::new();
        let message = error(Suite::fetch(&archive.cache(), &archive.mirror(&[]), "test"));
        assert!(message.contains("signature could not be checked"), "{message}");

        let message = error(Suite::fetch(&archive.cache(), &archive.mirror(&[]), "no-such-release"));
        assert!(message.contains("cannot fetch the index of Debian no-such-release"), "{message}");

        // Port 9 (discard) is not served.
        let unserved = Mirror { uri: "http://127.0.0.1:9/debian".to_owned(), options: vec![] };
        let message = error(Suite::fetch(&archive.cache(), &unserved, "test"));
        assert!(message.contains("mirror cannot be reached"), "{message}");
    }
}

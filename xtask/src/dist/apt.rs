//! A repository for apt: a folder for a web server, or for `file:`.
//!
//! `pool` has the packages of this and of earlier versions; `dists/stable` has an index of them for each processor, and
//! `Release` with the digests of the indexes. apt trusts the digests if a key chosen by the user signed `Release`
//! (`InRelease`, or `Release.gpg`), and therefore the packages. Without a key there are no signatures, and apt refuses
//! the repository.
//!
//! Source: Debian wiki, *DebianRepository/Format*.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::PLAIN;
use super::changelog::rfc5322;
use super::sign::Signer;
use super::tree::{FileTree, gzipped, sha256};
use crate::command;

const SUITE: &str = "dists/stable";
const POOL: &str = "pool/main/n/numaward";
/// File for `/etc/apt/sources.list.d`, in which the address has to be filled in.
const SOURCES: &str = "# Copy this to /etc/apt/sources.list.d/numaward.sources, numaward.asc to /etc/apt/keyrings, and write here where
# the repository is: https://HOST/PATH, or file:/PATH
Types: deb
URIs: ADDRESS
Suites: stable
Components: main
Signed-By: /etc/apt/keyrings/numaward.asc
";

/// Fills the empty tree with a repository of these packages and of those in the folder `earlier`.
pub(crate) fn build(
    tree: &FileTree,
    packages: &[&Path],
    earlier: Option<&Path>,
    signer: Option<&Signer>,
) -> Result<()> {
    let earlier = earlier.map(debs).transpose()?.unwrap_or_default();
    let mut stanzas: BTreeMap<String, String> = BTreeMap::new();
    for package in packages.iter().copied().chain(earlier.iter().map(PathBuf::as_path)) {
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        let path = format!("{POOL}/{name}");
        let bytes = fs::read(package).with_context(|| format!("cannot read {}", package.display()))?;
        let there = tree.root().join(&path);
        if there.exists() {
            let is_same = fs::read(&there)? == bytes;
            ensure!(
                is_same,
                "{} is another package than the one made now: give it a new version",
                package.display()
            );
            continue;
        }
        tree.file(&path, &bytes, PLAIN)?;
        let field = |arguments: &[&str]| {
            command::read(Command::new("dpkg-deb").arg("--field").arg(package).args(arguments))
        };
        let stanza = stanzas.entry(field(&["Architecture"])?.trim().to_owned()).or_default();
        writeln!(stanza, "{}", field(&[])?.trim())?;
        writeln!(stanza, "Filename: {path}\nSize: {}\nSHA256: {}\n", bytes.len(), sha256(package)?)?;
    }
    let mut sums = String::new();
    for (architecture, stanzas) in &stanzas {
        let folder = format!("main/binary-{architecture}");
        let about =
            format!("Archive: stable\nComponent: main\nOrigin: numaward\nArchitecture: {architecture}\n");
        for (name, bytes) in [
            ("Packages", stanzas.clone().into_bytes()),
            ("Packages.gz", gzipped(stanzas.as_bytes())?),
            ("Release", about.into_bytes()),
        ] {
            let path = format!("{SUITE}/{folder}/{name}");
            tree.file(&path, &bytes, PLAIN)?;
            writeln!(sums, " {} {} {folder}/{name}", sha256(&tree.root().join(&path))?, bytes.len())?;
        }
    }
    let architectures = stanzas.keys().map(String::as_str).collect::<Vec<_>>().join(" ");
    let release = format!(
        "Origin: numaward\nLabel: numaward\nSuite: stable\nCodename: stable\nDate: {}\nArchitectures: {architectures}\n\
         Components: main\nDescription: Packages of numaward\nSHA256:\n{sums}",
        rfc5322(tree.epoch())?.replace("+0000", "UTC")
    );
    tree.file(&format!("{SUITE}/Release"), release.as_bytes(), PLAIN)?;
    tree.file("numaward.sources", SOURCES.as_bytes(), PLAIN)?;
    if let Some(signer) = signer {
        let release = tree.root().join(SUITE).join("Release");
        signer.clear(&release, "InRelease")?;
        signer.detached(&release, "Release.gpg")?;
        tree.file("numaward.asc", signer.public()?.as_bytes(), PLAIN)?;
    }
    Ok(())
}

/// Returns the packages in a folder, by name.
fn debs(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        found.push(entry?.path());
    }
    found.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
    ensure!(!found.is_empty(), "{} holds no Debian package", folder.display());
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::sign;

    /// Creates a small package.
    fn package(folder: &Path, version: &str, architecture: &str) -> PathBuf {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir(tree.path().join("DEBIAN")).unwrap();
        let control = format!(
            "Package: numaward\nVersion: {version}\nArchitecture: {architecture}\nMaintainer: x\nDescription: x\n"
        );
        fs::write(tree.path().join("DEBIAN/control"), control).unwrap();
        let path = folder.join(format!("numaward_{version}_{architecture}.deb"));
        command::read(
            Command::new("dpkg-deb").args(["--build", "--root-owner-group"]).arg(tree.path()).arg(&path),
        )
        .unwrap();
        path
    }

    #[test]
    fn indexes_list_packages_and_are_signed() {
        let Some(signer) = sign::tests::throw_away() else { return };
        let folder = tempfile::tempdir().unwrap();
        let [new, earlier] = ["new", "earlier"].map(|name| {
            let folder = folder.path().join(name);
            fs::create_dir(&folder).unwrap();
            folder
        });
        let made = package(&new, "0.2.0", "amd64");
        let other = package(&new, "0.2.0", "arm64");
        package(&earlier, "0.1.0", "amd64");
        let tree = FileTree::new(&folder.path().join("apt"), 1_700_000_000).unwrap();
        build(&tree, &[&made, &other], Some(&earlier), Some(&signer)).unwrap();

        let read = |path: &str| fs::read_to_string(tree.root().join(path)).unwrap();
        let index = read("dists/stable/main/binary-amd64/Packages");
        assert_eq!(index.matches("Package: numaward\n").count(), 2, "{index}");
        assert!(
            !index.contains("arm64") && read("dists/stable/main/binary-arm64/Packages").contains("arm64")
        );
        for line in index.lines().filter_map(|line| line.strip_prefix("Filename: ")) {
            let digest = sha256(&tree.root().join(line)).unwrap();
            assert!(index.contains(&format!("SHA256: {digest}\n")), "{line}:\n{index}");
        }
        let release = read("dists/stable/Release");
        assert!(release.contains("\nDate: Tue, 14 Nov 2023 22:13:20 UTC\n"), "{release}");
        assert!(release.contains("\nArchitectures: amd64 arm64\n"), "{release}");
        let sums: Vec<_> = release.lines().filter_map(|line| line.strip_prefix(' ')).collect();
        assert_eq!(sums.len(), 6, "{release}");
        for sum in sums {
            let [digest, size, path] = sum.split(' ').collect::<Vec<_>>()[..] else { panic!("{sum}") };
            let file = tree.root().join("dists/stable").join(path);
            assert_eq!(
                (digest, size),
                (&*sha256(&file).unwrap(), &*fs::metadata(&file).unwrap().len().to_string())
            );
        }
        let public = read("numaward.asc");
        let suite = tree.root().join(SUITE);
        sign::verify(&public, &[&suite.join("InRelease")]).unwrap();
        sign::verify(&public, &[&suite.join("Release.gpg"), &suite.join("Release")]).unwrap();
        assert!(read("dists/stable/InRelease").contains(&release), "it is the same text");
    }

    #[test]
    fn refuses_changed_published_version() {
        let folder = tempfile::tempdir().unwrap();
        let [new, earlier] = ["new", "earlier"].map(|name| {
            let folder = folder.path().join(name);
            fs::create_dir(&folder).unwrap();
            package(&folder, "0.1.0", "amd64")
        });
        let tree = |name: &str| FileTree::new(&folder.path().join(name), 0).unwrap();
        build(&tree("same"), &[&new], Some(new.parent().unwrap()), None).unwrap();
        assert!(!folder.path().join("same").join(SUITE).join("InRelease").exists(), "it is not signed");
        fs::write(&earlier, "another").unwrap();
        let error = build(&tree("other"), &[&new], Some(earlier.parent().unwrap()), None).unwrap_err();
        assert!(error.to_string().contains("give it a new version"), "{error}");
        let empty = folder.path().join("empty");
        fs::create_dir(&empty).unwrap();
        let error = build(&tree("none"), &[&new], Some(&empty), None).unwrap_err();
        assert!(error.to_string().contains("holds no Debian package"), "{error}");
    }
}

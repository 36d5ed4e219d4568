//! A package for Fedora and other distributions that use rpm.
//!
//! Like Debian's: an installation neither starts nor enables the service, unless a preset of the administrator says so,
//! which has precedence over the package's. An upgrade restarts the service if it is running. A removal stops and
//! disables it. rpm keeps a changed configuration as `config.yaml.rpmsave`; the ledger in `/var/lib/numaward` stays,
//! because rpm has no equivalent of Debian's purge.
//!
//! The scriptlets are those of systemd's macros (`%systemd_post`, `%systemd_preun`, `%systemd_postun_with_restart`)
//! until version 249. Newer macros call a helper that only some distributions have, and rely on triggers of the systemd
//! package to reload units. `systemctl` exists everywhere.
//!
//! The package has no signature of its own, so that the same commit makes the same bytes: `SHA256SUMS` has one.
//!
//! Sources: Fedora packaging guidelines, *Scriptlets*; systemd v249, `src/rpm/macros.systemd.in`.

use std::path::Path;

use anyhow::{Context as _, Result};
use numaward_vm::Arch;
use rpm::{BuildConfig, CompressionWithLevel, Dependency, FileOptions, PackageBuilder};

use super::{
    CONFIGURATION, CONFIGURATION_FOLDERS, Contents, MAINTAINER, PackageFile, Program, SUMMARY, changelog,
    checkout, entry,
};

/// Number of the package within the same version.
const RELEASE: &str = "1";
const LICENSE: &str = "MIT OR Apache-2.0";
const DESCRIPTION: &str = "Gives services exclusive CPUs and memory on NUMA nodes, and counts by eBPF
whether their memory is on the guaranteed nodes.

The service is neither enabled nor started: `systemctl enable --now numaward`
begins to watch the host.";
/// Folders that belong to this package only.
const FOLDERS: [&str; 3] = ["etc/numaward", "usr/share/doc/numaward", "usr/share/licenses/numaward"];

// The first argument of a scriptlet is the number of packages of this name after it: 1 at the first installation, 0
// after the
// last removal.

const AFTER_INSTALLING: &str = "if [ -d /run/systemd/system ]; then
    systemctl daemon-reload >/dev/null 2>&1 || :
fi
if [ \"$1\" -eq 1 ]; then
    systemctl --no-reload preset numaward.service numaward.socket >/dev/null 2>&1 || :
fi
";

const BEFORE_REMOVING: &str = "if [ \"$1\" -eq 0 ]; then
    systemctl --no-reload disable --now numaward.socket numaward.service >/dev/null 2>&1 || :
fi
";

const AFTER_REMOVING: &str = "if [ -d /run/systemd/system ]; then
    systemctl daemon-reload >/dev/null 2>&1 || :
    if [ \"$1\" -ge 1 ]; then
        systemctl try-restart numaward.service >/dev/null 2>&1 || :
    fi
fi
";

/// Returns the name of the package.
pub(crate) fn name(version: &str, arch: Arch) -> String {
    format!("numaward-{version}-{RELEASE}.{}.rpm", arch.kernel_name())
}

/// Writes the package.
pub(crate) fn build(contents: &Contents, program: &Program, epoch: u64, package: &Path) -> Result<()> {
    let time = |epoch: u64| u32::try_from(epoch).context("rpm knows no time after 2106");
    let configuration =
        BuildConfig::v4().compression(CompressionWithLevel::Gzip(6)).source_date(time(epoch)?);
    let mut builder =
        PackageBuilder::new("numaward", &contents.version, LICENSE, program.arch.kernel_name(), SUMMARY);
    builder.using_config(configuration).release(RELEASE).description(DESCRIPTION).packager(MAINTAINER);
    builder.build_host("localhost");
    for folder in FOLDERS.iter().chain(&CONFIGURATION_FOLDERS) {
        builder.with_dir_entry(FileOptions::dir(format!("/{folder}")).permissions(0o755))?;
    }
    for PackageFile { path, bytes, mode } in entries(contents, program)? {
        let mut options = FileOptions::new(format!("/{path}")).permissions(u16::try_from(mode)?);
        if path == CONFIGURATION {
            options = options.config().noreplace();
        } else if path.starts_with("usr/share/licenses") {
            options = options.license();
        } else if path.starts_with("usr/share/doc") || path.starts_with("usr/share/man") {
            options = options.doc();
        }
        builder.with_file_contents(bytes, options)?;
    }
    builder.post_install_script(AFTER_INSTALLING);
    builder.pre_uninstall_script(BEFORE_REMOVING);
    builder.post_uninstall_script(AFTER_REMOVING);
    for dependency in [Dependency::script_post, Dependency::script_preun, Dependency::script_postun] {
        builder.requires(dependency("systemd"));
    }
    for release in changelog::read()? {
        let changes: Vec<_> = release.changes().iter().map(|change| format!("- {change}")).collect();
        let author = format!("{MAINTAINER} - {}-{RELEASE}", release.version);
        builder.add_changelog_entry(author, changes.join("\n"), time(release.time(epoch)?)?);
    }
    let built = builder.build().context("cannot make the package for rpm")?;
    built.write_file(package).with_context(|| format!("cannot write {}", package.display()))
}

fn entries(contents: &Contents, program: &Program) -> Result<Vec<PackageFile>> {
    let mut entries = contents.installed(program, "usr/share/zsh/site-functions")?;
    for file in ["LICENSE-APACHE", "LICENSE-MIT"] {
        entries.push(entry(format!("usr/share/licenses/numaward/{file}"), checkout(file)?));
    }
    entries.push(entry("usr/share/doc/numaward/README.md", checkout("README.md")?));
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rpm::{FileFlags, Package};

    use super::*;

    #[test]
    fn package_has_configuration_and_scripts() {
        let contents = Contents {
            version: "1.2.3".to_owned(),
            programs: Vec::new(),
            manual: vec![entry("numaward.1", "manual")],
            completions: ["bash", "fish", "zsh"].map(|shell| entry(shell, shell)).to_vec(),
        };
        let program = Program { arch: Arch::Amd64, bytes: b"program".to_vec() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name("1.2.3", Arch::Amd64));
        build(&contents, &program, 1_700_000_000, &path).unwrap();
        let bytes = fs::read(&path).unwrap();
        build(&contents, &program, 1_700_000_000, &path).unwrap();
        assert_eq!(bytes, fs::read(&path).unwrap(), "the same each time");

        let package = Package::open(&path).unwrap().metadata;
        assert_eq!((package.get_version().unwrap(), package.get_arch().unwrap()), ("1.2.3", "x86_64"));
        let files = package.get_file_entries().unwrap();
        let file = |path: &str| files.iter().find(|file| file.path() == Path::new(path)).unwrap();
        let configuration = file("/etc/numaward/config.yaml").flags();
        assert!(configuration.contains(FileFlags::CONFIG | FileFlags::NOREPLACE), "{configuration:?}");
        assert_eq!(files.iter().filter(|file| file.flags().contains(FileFlags::CONFIG)).count(), 1);
        assert_eq!(file("/usr/bin/numaward").mode().permissions(), 0o755);
        for path in [
            "/usr/lib/systemd/system/numaward.service",
            "/usr/lib/systemd/system/numaward.socket",
            "/usr/lib/systemd/system-preset/90-numaward.preset",
            "/usr/share/bash-completion/completions/numaward",
            "/usr/share/fish/vendor_completions.d/numaward.fish",
            "/usr/share/zsh/site-functions/_numaward",
            "/usr/share/man/man1/numaward.1.gz",
        ] {
            assert_eq!(file(path).mode().permissions(), 0o644, "{path}");
        }
        for path in ["/etc/numaward/conf.d", "/etc/numaward/guarantees.d"] {
            assert_eq!(file(path).mode().permissions(), 0o755, "{path}");
        }
        let removal = package.get_pre_uninstall_script().unwrap().script;
        assert!(removal.contains("disable --now numaward.socket numaward.service"), "{removal}");
    }
}

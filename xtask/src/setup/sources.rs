//! The mirror of this system, from apt's lists of sources in both formats (sources.list(5)).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Debian's archive keys, for systems with a source that does not name them.
const KEYRINGS: [&str; 2] =
    ["usr/share/keyrings/debian-archive-keyring.gpg", "usr/share/keyrings/debian-archive-keyring.pgp"];
/// Names of Debian releases that change their meaning.
const MOVING_SUITES: [&str; 5] = ["oldstable", "stable", "testing", "unstable", "sid"];

/// A Debian archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mirror {
    pub(crate) uri: String,
    /// Options in brackets of a one-line source, for the check of signatures.
    pub(crate) options: Vec<String>,
}

impl Mirror {
    /// Returns the one-line source of a release.
    pub(crate) fn line(&self, release: &str) -> String {
        format!("deb [{}] {} {release} main", self.options.join(" "), self.uri)
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct SourceEntry {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// Returns the release's code name if the system at `root` is Debian itself. Archives of derivatives do not have the
/// kernels.
pub(crate) fn debian_codename(root: &Path) -> Option<String> {
    let text = fs::read_to_string(root.join("etc/os-release")).ok()?;
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        Some(value.trim().trim_matches('"').to_owned())
    };
    (field("ID")? == "debian").then(|| field("VERSION_CODENAME").unwrap_or_else(|| "sid".to_owned()))
}

/// Returns the mirror of the system at `root`.
pub(crate) fn mirror(root: &Path) -> Result<Mirror> {
    archive(root, "")
}

/// Returns the archive of security updates of the system at `root`, and the release's name there.
pub(crate) fn security(root: &Path) -> Result<(Mirror, String)> {
    const SUFFIX: &str = "-security";
    let release = debian_codename(root).unwrap_or_default() + SUFFIX;
    Ok((archive(root, SUFFIX)?, release))
}

/// Returns the archive of the system's release, or of the release with this suffix.
fn archive(root: &Path, suffix: &str) -> Result<Mirror> {
    let Some(codename) = debian_codename(root) else {
        bail!(
            "this system is not Debian, whose archive the kernels and container runtimes come from: \
             run this in a Debian machine or container"
        );
    };
    let mut entries = Vec::new();
    for path in files(root)? {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if path.extension().is_some_and(|extension| extension == "sources") {
            entries.extend(deb822(&text));
        } else {
            entries.extend(text.lines().filter_map(one_line));
        }
    }
    let is_this_release = |suite: &str| suite == codename || MOVING_SUITES.contains(&suite);
    let of_this_system = |entry: &&SourceEntry| {
        entry.components.iter().any(|component| component == "main")
            && entry.suites.iter().filter_map(|suite| suite.strip_suffix(suffix)).any(is_this_release)
    };
    let Some((entry, uri)) =
        entries.iter().filter(of_this_system).find_map(|entry| Some((entry, entry.uris.first()?)))
    else {
        bail!(
            "no source for Debian {codename}{suffix} main in {0}/etc/apt/sources.list or {0}/etc/apt/sources.list.d: \
             add one (sources.list(5)); it is the mirror that kernels are fetched from",
            root.display().to_string().trim_end_matches('/')
        );
    };
    // Keys in the entry itself are those of this release only; the keyring has all.
    let keyring = entry.signed_by.clone().filter(|value| value.starts_with('/')).or_else(|| {
        KEYRINGS
            .iter()
            .map(|path| root.join(path))
            .find(|path| path.is_file())
            .map(|path| path.display().to_string())
    });
    let options = keyring.map(|path| format!("signed-by={path}")).into_iter().collect();
    Ok(Mirror { uri: uri.clone(), options })
}

fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let apt = root.join("etc/apt");
    let mut files = Vec::new();
    if let Ok(entries) = fs::read_dir(apt.join("sources.list.d")) {
        for entry in entries {
            let path = entry.context("cannot list apt's sources")?.path();
            if path.extension().is_some_and(|extension| extension == "list" || extension == "sources") {
                files.push(path);
            }
        }
    }
    files.sort();
    let main = apt.join("sources.list");
    if main.is_file() {
        files.insert(0, main);
    }
    Ok(files)
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Parses `deb [OPTIONS] URI SUITE COMPONENT…`
fn one_line(line: &str) -> Option<SourceEntry> {
    let line = line.split('#').next().unwrap_or_default().trim();
    let mut rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
    let mut entry = SourceEntry::default();
    if let Some(bracket) = rest.strip_prefix('[') {
        let (options, after) = bracket.split_once(']')?;
        entry.signed_by = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned);
        rest = after;
    }
    let mut words = words(rest).into_iter();
    entry.uris = vec![words.next()?];
    entry.suites = vec![words.next()?];
    entry.components = words.collect();
    Some(entry)
}

/// Parses stanzas of `Field: value` with indented continuation lines, separated by empty lines.
fn deb822(text: &str) -> Vec<SourceEntry> {
    let mut entries = Vec::new();
    let lines = text.lines().map(str::trim_end).filter(|line| !line.starts_with('#')).collect::<Vec<_>>();
    for stanza in lines.split(|line| line.is_empty()) {
        let mut fields: Vec<(String, String)> = Vec::new();
        for line in stanza {
            if line.starts_with([' ', '\t']) {
                if let Some((_, value)) = fields.last_mut() {
                    value.push(' ');
                    value.push_str(line.trim());
                }
            } else if let Some((name, value)) = line.split_once(':') {
                fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
        }
        let field =
            |name: &str| fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str());
        let list = |name: &str| field(name).map(words).unwrap_or_default();
        let enabled = !field("enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
        if enabled && list("types").iter().any(|kind| kind == "deb") {
            entries.push(SourceEntry {
                uris: list("uris"),
                suites: list("suites"),
                components: list("components"),
                signed_by: field("signed-by").filter(|value| !value.is_empty()).map(str::to_owned),
            });
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const DEBIAN: (&str, &str) = ("etc/os-release", "ID=debian\nVERSION_CODENAME=bookworm\n");

    #[test]
    fn reads_one_line_sources() {
        let root = system(&[
            DEBIAN,
            (
                "etc/apt/sources.list",
                "# comment\ndeb-src http://mirror.example/debian bookworm main\n\
                 deb http://security.example/ bookworm-security main\n\
                 deb [arch=amd64 signed-by=/keys/a.gpg] http://mirror.example/debian bookworm main # here\n",
            ),
        ]);
        assert_eq!(
            mirror(root.path()).unwrap(),
            Mirror {
                uri: "http://mirror.example/debian".to_owned(),
                options: vec!["signed-by=/keys/a.gpg".to_owned()]
            }
        );
    }

    #[test]
    fn reads_deb822_sources_of_debian() {
        let root = system(&[
            DEBIAN,
            ("etc/apt/sources.list.d/a.list", "deb https://vendor.example/apt tool-bookworm main\n"),
            (
                "etc/apt/sources.list.d/debian.sources",
                "Types: deb\nEnabled: no\nURIs: http://disabled.example\nSuites: bookworm\nComponents: main\n\n\
                 # comment\nTypes: deb deb-src\nURIs: http://mirror.example/debian\n http://second.example\n\
                 Suites:\n bookworm-updates\n bookworm\nComponents: main contrib\nSigned-By:\n \
                 -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n xyz\n",
            ),
            ("usr/share/keyrings/debian-archive-keyring.pgp", ""),
        ]);
        let found = mirror(root.path()).unwrap();
        assert_eq!(found.uri, "http://mirror.example/debian");
        let keyring = root.path().join("usr/share/keyrings/debian-archive-keyring.pgp");
        assert_eq!(found.options, [format!("signed-by={}", keyring.display())]);
    }

    #[test]
    fn finds_security_archive() {
        let root = system(&[
            DEBIAN,
            (
                "etc/apt/sources.list",
                "deb http://mirror.example/debian bookworm main\n\
                 deb http://security.example/debian-security bookworm-security main\n",
            ),
        ]);
        let (found, release) = security(root.path()).unwrap();
        assert_eq!(
            (found.uri.as_str(), release.as_str()),
            ("http://security.example/debian-security", "bookworm-security")
        );
        let without = system(&[DEBIAN, ("etc/apt/sources.list", "deb http://m.example stable main")]);
        let error = security(without.path()).unwrap_err().to_string();
        assert!(error.contains("no source for Debian bookworm-security main"), "{error}");
    }

    #[test]
    fn missing_keyring_sets_no_option() {
        let root = system(&[DEBIAN, ("etc/apt/sources.list", "deb http://m.example stable main")]);
        assert_eq!(
            mirror(root.path()).unwrap(),
            Mirror { uri: "http://m.example".to_owned(), options: vec![] }
        );
    }

    #[test]
    fn error_names_missing_source() {
        let table: &[(&[(&str, &str)], &str)] = &[
            (&[], "not Debian"),
            (&[("etc/os-release", "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble")], "not Debian"),
            (&[DEBIAN], "no source for Debian bookworm main"),
            (&[DEBIAN, ("etc/apt/sources.list", "deb [x http://m\ndebx\ndeb\n")], "no source for Debian"),
            (
                &[DEBIAN, ("etc/apt/sources.list.d/x.sources", "Types: deb\nSuites bookworm\n:\n x\n")],
                "no source",
            ),
        ];
        for (files, message) in table {
            let error = mirror(system(files).path()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}

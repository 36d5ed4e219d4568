//! Signatures by gpg, with which Debian verifies repositories, and which is available on most systems.
//!
//! The key is neither made here nor read from a file: it is in the keyring, or on the card, of the releasing person.
//! Only a dry run makes a key of its own, which is deleted at its end.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::command;

/// Name in the key of a dry run.
const DRY_RUN_NAME: &str = "numaward dry run: do not trust this key";

/// Signs with one key.
pub(crate) struct Signer {
    fingerprint: String,
    /// Keyring of a key that was made for this run; `None` for gpg's own.
    home: Option<TempDir>,
}

impl Signer {
    /// Uses the key of this name in the user's keyring: a fingerprint, or any other name that gpg accepts.
    pub(crate) fn of_keyring(key: &str) -> Result<Self> {
        let fingerprint =
            fingerprint(gpg(None).arg("--list-secret-keys").arg("--").arg(key)).with_context(|| {
                format!("gpg has no secret key {key:?}: `gpg --list-secret-keys` shows those it has")
            })?;
        Ok(Self { fingerprint, home: None })
    }

    /// Makes a temporary key.
    pub(crate) fn throw_away() -> Result<Self> {
        let home = tempfile::Builder::new().prefix("numaward-gpg-").tempdir()?;
        let mut made = gpg(Some(&home));
        made.args(["--passphrase", "", "--quick-generate-key", DRY_RUN_NAME, "ed25519", "sign", "1d"]);
        command::read(&mut made).context("cannot make a key for this run")?;
        let fingerprint = fingerprint(gpg(Some(&home)).arg("--list-secret-keys"))?;
        Ok(Self { fingerprint, home: Some(home) })
    }

    pub(crate) fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Writes the detached signature of a file beside it, as `name`.
    pub(crate) fn detached(&self, file: &Path, name: &str) -> Result<()> {
        self.sign("--detach-sign", file, name)
    }

    /// Writes a text with its embedded signature beside it, as `name`.
    pub(crate) fn clear(&self, file: &Path, name: &str) -> Result<()> {
        self.sign("--clear-sign", file, name)
    }

    /// Returns the public key as text.
    pub(crate) fn public(&self) -> Result<String> {
        command::read(gpg(self.home.as_ref()).args(["--armor", "--export", &self.fingerprint]))
    }

    fn sign(&self, how: &str, file: &Path, name: &str) -> Result<()> {
        let mut gpg = gpg(self.home.as_ref());
        gpg.args(["--yes", "--armor", "--local-user", &self.fingerprint, "--output"]);
        gpg.arg(file.with_file_name(name)).arg(how).arg(file);
        command::read(&mut gpg).map(drop).with_context(|| format!("cannot sign {}", file.display()))
    }
}

impl Drop for Signer {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            // gpg's agent for this keyring would wait for further requests.
            let mut kill = Command::new("gpgconf");
            kill.arg("--homedir").arg(home.path()).args(["--kill", "all"]).stderr(Stdio::null());
            let _ = kill.status();
        }
    }
}

fn gpg(home: Option<&TempDir>) -> Command {
    let mut gpg = Command::new("gpg");
    gpg.args(["--batch", "--quiet", "--no-auto-check-trustdb"]);
    if let Some(home) = home {
        gpg.arg("--homedir").arg(home.path());
    }
    gpg
}

/// Returns the fingerprint of the first key that gpg lists.
fn fingerprint(list: &mut Command) -> Result<String> {
    // Options must precede the other arguments.
    let mut listing = Command::new(list.get_program());
    listing.arg("--with-colons").args(list.get_args());
    let text = command::read(&mut listing)?;
    let fingerprint = text.lines().find_map(|line| line.strip_prefix("fpr:")?.split(':').nth(8));
    fingerprint.map(str::to_owned).with_context(|| format!("gpg lists no key:\n{text}"))
}

/// Verifies a file with the public key beside it, as after a download of both.
#[cfg(test)]
pub(crate) fn verify(public: &str, arguments: &[&Path]) -> Result<String> {
    let home = tempfile::Builder::new().prefix("numaward-gpg-").tempdir()?;
    let key = home.path().join("key.asc");
    std::fs::write(&key, public)?;
    command::read(gpg(Some(&home)).arg("--import").arg(&key))?;
    command::read(gpg(Some(&home)).args(["--status-fd", "1", "--verify"]).args(arguments))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use super::*;

    /// Returns `None` if gpg is missing, which is a failure in CI.
    pub(crate) fn throw_away() -> Option<Signer> {
        let found = command::find("gpg").is_some();
        if !found {
            numaward_tests_support::skip_outside_ci("gpg is missing");
        }
        found.then(|| Signer::throw_away().unwrap())
    }

    #[test]
    fn verifies_signed_files_only() {
        let Some(signer) = throw_away() else { return };
        let folder = tempfile::tempdir().unwrap();
        let [file, signature, clear] = ["file", "file.asc", "clear"].map(|name| folder.path().join(name));
        fs::write(&file, "text\n").unwrap();
        signer.detached(&file, "file.asc").unwrap();
        signer.clear(&file, "clear").unwrap();
        let public = signer.public().unwrap();
        for arguments in [vec![signature.as_path(), &file], vec![&clear]] {
            let said = verify(&public, &arguments).unwrap();
            assert!(said.contains(&format!("VALIDSIG {}", signer.fingerprint())), "{said}");
        }
        fs::write(&file, "changed\n").unwrap();
        verify(&public, &[&signature, &file]).unwrap_err();
        let other = Signer::throw_away().unwrap().public().unwrap();
        verify(&other, &[&clear]).unwrap_err();
    }

    #[test]
    fn missing_key_is_named() {
        if throw_away().is_none() {
            return;
        }
        let error = Signer::of_keyring("nobody@numaward.invalid").err().unwrap();
        assert!(format!("{error:#}").contains("nobody@numaward.invalid"), "{error:#}");
    }
}

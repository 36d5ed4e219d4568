//! Programs of the distribution.

use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::apt::explained;
use super::sources;
use super::steps::{Steps, say};
use crate::command;

/// Ensures that these programs are installed; each has the name of its Debian package.
pub(crate) fn ensure(steps: &Steps, part: &str, programs: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<_> = programs.iter().filter(|(program, _)| command::find(program).is_none()).collect();
    if missing.is_empty() {
        steps.found(part, "installed");
        return Ok(());
    }
    let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
    install(part, &packages)?;
    match missing.iter().find(|(program, _)| command::find(program).is_none()) {
        Some((program, package)) => bail!("{package} is installed, but {program} is not on the PATH"),
        None => Ok(()),
    }
}

/// Installs Debian packages, or prints the command to run if this process cannot do it.
pub(crate) fn install(part: &str, packages: &[&str]) -> Result<()> {
    let names = packages.join(" ");
    if sources::debian_codename("/".as_ref()).is_none() {
        bail!(
            "{part}: install what Debian calls {names} with your system's package manager, then run this again"
        );
    }
    let by_hand = format!("apt-get update && apt-get install --no-install-recommends {names}");
    let root = command::read(Command::new("id").arg("-u"))?.trim() == "0";
    if !root && command::read(Command::new("sudo").args(["-n", "true"])).is_err() {
        bail!(
            "{part}: {names} must be installed and this is not root: run `sudo sh -c '{by_hand}'`, then this again"
        );
    }
    say(part, &format!("installing {names}"));
    let apt_get = |arguments: &[&str]| {
        let mut words = if root { vec![] } else { vec!["sudo", "-n"] };
        words.extend(["env", "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]);
        words.extend(arguments);
        command::run_slowly(part, Command::new(words[0]).args(&words[1..]))
    };
    // An unrelated source may be out of order: only the availability of the packages matters.
    let updated = apt_get(&["update"]);
    let options = ["install", "-y", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0", "--"];
    apt_get(&[&options[..], packages].concat())
        .map_err(|error| {
            let error = match updated {
                Err(update) => anyhow::anyhow!("{error:#}\n  before that: {update:#}"),
                Ok(()) => error,
            };
            explained(&error, &format!("cannot install {names}"))
        })
        .with_context(|| format!("{part} (to install by hand: `{by_hand}`)"))?;
    say(part, &format!("installed {names}"));
    Ok(())
}

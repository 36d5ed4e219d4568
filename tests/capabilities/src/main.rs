//! `numaward-capabilities BPF,PERFMON COMMAND…` starts a command as root with exactly these capabilities. It can also
//! start a command as the unprivileged user, see the usage message.
//!
//! For tests in virtual machines with a busybox that cannot do this. A program of root gets all capabilities of the
//! bounding set (capabilities(7)), so the other ones are removed from the set first.

#![forbid(unsafe_code)]

use std::{env, os::unix::process::CommandExt as _, process::Command};

use anyhow::{Context as _, Result};
use rustix::thread::{CapabilitySet, capability_is_in_bounding_set, remove_capability_from_bounding_set};

/// Conventional id of the unprivileged user and group.
const NOBODY: u32 = 65534;

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let usage = "usage: numaward-capabilities nobody|NAME,… COMMAND…";
    let (privileges, name) = arguments.next().zip(arguments.next()).context(usage)?;
    let mut command = Command::new(&name);
    command.args(arguments);
    if privileges == "nobody" {
        command.uid(NOBODY).gid(NOBODY);
    } else {
        keep(&privileges)?;
    }
    Err(command.exec()).with_context(|| format!("cannot run {name}"))
}

/// Removes all other capabilities from the bounding set.
fn keep(names: &str) -> Result<()> {
    let one = |name: &str| {
        let known = CapabilitySet::from_name(name);
        known.with_context(|| format!("no capability is called {name}; one is called SYS_ADMIN"))
    };
    let kept = names.split(',').map(one).collect::<Result<CapabilitySet>>()?;
    for capability in (CapabilitySet::all() - kept).iter() {
        // A kernel does not know newer capabilities.
        if capability_is_in_bounding_set(capability).unwrap_or(false) {
            remove_capability_from_bounding_set(capability)
                .with_context(|| format!("cannot give up {capability:?}"))?;
        }
    }
    Ok(())
}

//! `numaward-capabilities BPF,PERFMON COMMAND…` starts a command as root with these capabilities and no others;
//! `numaward-capabilities nobody COMMAND…` as a user who has none.
//!
//! For tests in virtual machines, whose busybox cannot do it: a program of root's gets whatever is in the bounding
//! set (capabilities(7)), so all else is taken out of it first.

#![forbid(unsafe_code)]

use std::{env, os::unix::process::CommandExt as _, process::Command};

use anyhow::{Context as _, Result};
use rustix::thread::{CapabilitySet, capability_is_in_bounding_set, remove_capability_from_bounding_set};

/// The user and group `nobody`, by custom.
const NOBODY: u32 = 65534;

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let usage = "usage: numaward-capabilities nobody|NAME,… COMMAND…";
    let (who, name) = arguments.next().zip(arguments.next()).context(usage)?;
    let mut command = Command::new(&name);
    command.args(arguments);
    if who == "nobody" {
        command.uid(NOBODY).gid(NOBODY);
    } else {
        keep(&who)?;
    }
    Err(command.exec()).with_context(|| format!("cannot run {name}"))
}

/// Keeps these capabilities in the bounding set.
fn keep(names: &str) -> Result<()> {
    let one = |name: &str| {
        let known = CapabilitySet::from_name(name);
        known.with_context(|| format!("no capability is called {name}; one is called SYS_ADMIN"))
    };
    let kept = names.split(',').map(one).collect::<Result<CapabilitySet>>()?;
    for capability in (CapabilitySet::all() - kept).iter() {
        // A kernel does not know those that are newer.
        if capability_is_in_bounding_set(capability).unwrap_or(false) {
            remove_capability_from_bounding_set(capability)
                .with_context(|| format!("cannot give up {capability:?}"))?;
        }
    }
    Ok(())
}

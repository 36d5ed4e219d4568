//! The program `numaward`: client commands, and the daemon.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context as _;
use numaward_cli::DaemonHooks;
use numaward_control::{Control, restore};
use numaward_daemon::kubernetes::claim_template;
use numaward_guarantee::{error::StartError, import, policy};

fn main() -> ExitCode {
    numaward_cli::main(&DaemonHooks {
        run: |sources, loaded| Ok(numaward_daemon::run(sources, loaded, Box::<Control>::default())?),
        examine: numaward_daemon::doctor::examine,
        policy: |config, machine| Ok(policy::engine_config(config, machine).map_err(StartError::Policy)?),
        import: |config, machine, directory, dry_run| {
            let hierarchy = numaward_control::hierarchy(config).ok();
            Ok(import::import(config, machine, hierarchy.as_ref(), directory, dry_run)?)
        },
        restore: |config, machine| {
            let restored =
                numaward_daemon::run_one_shot(config, |runtime| restore::restore(config, machine, runtime));
            Ok(restored.context("cannot start")??)
        },
        claim_manifests: claim_template::claim_manifests,
    })
}

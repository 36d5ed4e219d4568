//! The program `numaward`: the commands, and the daemon that some of them need.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use numaward_cli::Daemon;

fn main() -> ExitCode {
    numaward_cli::main(&Daemon {
        run: |config| Ok(numaward_daemon::run(config)?),
        examine: numaward_daemon::doctor::examine,
        policy: |config, machine| Ok(numaward_daemon::engine_policy(config, machine)?),
        import: |config, machine, directory, dry_run| {
            Ok(numaward_daemon::import::import(config, machine, directory, dry_run)?)
        },
        restore: |config, machine| Ok(numaward_daemon::restore(config, machine)?),
    })
}

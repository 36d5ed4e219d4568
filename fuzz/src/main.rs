//! Runs a target with libFuzzer. The environment variable `NUMAWARD_FUZZ` names the target.

#![no_main]

use std::{env, sync::OnceLock};

use libfuzzer_sys::fuzz_target;
use numaward_fuzz::TARGETS;

static RUN: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(|data: &[u8]| {
    let run = RUN.get_or_init(|| {
        let name = env::var("NUMAWARD_FUZZ").unwrap_or_default();
        let target = TARGETS.iter().find(|target| target.name == name);
        let names = TARGETS.map(|target| target.name).join(", ");
        assert!(target.is_some(), "NUMAWARD_FUZZ={name:?} names no target (there are {names})");
        target.map_or(|_| (), |target| target.run)
    });
    run(data);
});

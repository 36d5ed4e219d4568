//! Fuzz targets for all input that the daemon reads from containers, pod authors, files and the network.
//!
//! # Problem
//! Such input is untrusted. No input may make the daemon panic, hang or use unbounded memory, and no sequence of requests may
//! break its guarantees.
//!
//! # Algorithm
//! A target passes bytes to the daemon's own readers, and asserts invariants of the result. Most targets use the bytes
//! unchanged. If random bytes hardly ever have a valid form, a structured input is derived from them (`arbitrary`). The targets
//! do not depend on a fuzzing engine: `main.rs` connects them to libFuzzer, and a test runs them on the inputs stored in
//! `corpus/TARGET`.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a failure of the set-up ends the target")]

mod claims;
mod engine;
mod files;
mod http;
mod nri;
mod pods;
mod processes;
mod requests;
mod text;

/// A fuzz target.
pub struct FuzzTarget {
    /// Name of the target, and of the folder with its stored inputs.
    pub name: &'static str,
    /// Runs the target on an input. A panic is a finding.
    pub run: fn(&[u8]),
}

/// All targets, sorted by name.
pub const TARGETS: [FuzzTarget; 19] = [
    FuzzTarget { name: "annotations", run: pods::annotations },
    FuzzTarget { name: "checkpoint", run: files::checkpoint },
    FuzzTarget { name: "claim", run: claims::run },
    FuzzTarget { name: "config", run: files::config },
    FuzzTarget { name: "engine", run: engine::run },
    FuzzTarget { name: "http", run: http::run },
    FuzzTarget { name: "knob", run: text::knob },
    FuzzTarget { name: "ledger", run: files::ledger },
    FuzzTarget { name: "maps", run: processes::maps },
    FuzzTarget { name: "nri", run: nri::run },
    FuzzTarget { name: "numa_maps", run: processes::numa_maps },
    FuzzTarget { name: "parameters", run: claims::parameters },
    FuzzTarget { name: "pod", run: pods::pod },
    FuzzTarget { name: "program", run: processes::program },
    FuzzTarget { name: "record", run: text::record },
    FuzzTarget { name: "request", run: requests::run },
    FuzzTarget { name: "reserved", run: text::reserved },
    FuzzTarget { name: "sysfs", run: files::sysfs },
    FuzzTarget { name: "text", run: text::lists },
];

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use numaward_tests_support::is_alone;

    use super::TARGETS;

    #[test]
    fn corpus_folders_match_targets() {
        let folders = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")).unwrap();
        let mut folders: Vec<_> =
            folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
        folders.sort();
        assert_eq!(folders, TARGETS.map(|target| target.name));
    }

    #[test]
    fn stored_inputs_cause_no_panic() {
        // Some targets measure the memory of this process.
        if !is_alone() {
            return;
        }
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
        for target in TARGETS {
            (target.run)(b"");
            let inputs = fs::read_dir(corpus.join(target.name)).unwrap();
            let inputs: Vec<_> = inputs.map(|input| input.unwrap().path()).collect();
            assert!(!inputs.is_empty(), "{}", target.name);
            for input in inputs {
                println!("{}", input.display());
                (target.run)(&fs::read(input).unwrap());
            }
        }
    }
}

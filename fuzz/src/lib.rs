//! Fuzz targets: what this daemon reads from containers, pod authors, files and the network, made up.
//!
//! Problem: all of it can be anything. None of it may make the daemon panic, hang or take memory without bound, and what
//! it promises must stay true whatever it is asked for.
//!
//! A target takes bytes, has them read as the daemon would, and asserts what must hold. Most take the bytes as they are; where
//! few bytes would be of the right form, an input is derived from them (`arbitrary`). The targets know nothing of the engine
//! that makes the bytes up: `main.rs` connects them to libFuzzer, and a test runs them on the inputs that are kept in
//! `corpus/TARGET`.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "what must not fail ends a target if it fails")]

mod engine;
mod files;
mod http;
mod nri;
mod pods;
mod processes;
mod requests;
mod text;

/// A target.
pub struct Target {
    /// Its name, also that of the folder with its inputs.
    pub name: &'static str,
    /// Takes an input; a panic is a finding.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 17] = [
    Target { name: "annotations", run: pods::annotations },
    Target { name: "checkpoint", run: files::checkpoint },
    Target { name: "config", run: files::config },
    Target { name: "engine", run: engine::run },
    Target { name: "http", run: http::run },
    Target { name: "knob", run: text::knob },
    Target { name: "ledger", run: files::ledger },
    Target { name: "maps", run: processes::maps },
    Target { name: "nri", run: nri::run },
    Target { name: "numa_maps", run: processes::numa_maps },
    Target { name: "pod", run: pods::pod },
    Target { name: "program", run: processes::program },
    Target { name: "record", run: text::record },
    Target { name: "request", run: requests::run },
    Target { name: "reserved", run: text::reserved },
    Target { name: "sysfs", run: files::sysfs },
    Target { name: "text", run: text::lists },
];

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::TARGETS;

    #[test]
    fn each_folder_of_inputs_is_that_of_a_target() {
        let folders = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")).unwrap();
        let mut folders: Vec<_> =
            folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
        folders.sort();
        assert_eq!(folders, TARGETS.map(|target| target.name));
    }

    #[test]
    fn the_inputs_that_are_kept_find_nothing() {
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

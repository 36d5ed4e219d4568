//! `numaward export-kubelet-state`: writes the guarantees as the kubelet's state files.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::{Context as _, bail};
use numaward_api::KubeletState;
use numaward_cgroup::make_private_dir;
use numaward_engine::checkpoint::{CpuCheckpoint, MemoryCheckpoint};

/// Subdirectories by which the directory of a kubelet is recognized.
const KUBELET_SUBDIRECTORIES: [&str; 2] = ["pods", "plugins_registry"];

fn files(state: &KubeletState) -> [(&'static str, &str); 2] {
    [(CpuCheckpoint::FILE, &*state.cpu_manager_state), (MemoryCheckpoint::FILE, &*state.memory_manager_state)]
}

/// Returns the lines for standard error: workloads that are not pods, and problems.
pub(crate) fn notes(state: &KubeletState) -> Vec<String> {
    let mut notes = Vec::new();
    if !state.others.is_empty() {
        notes.push(format!(
            "not containers of pods, and in the files under their own names: {}. A kubelet that starts with these files \
             releases their resources",
            state.others.join(", ")
        ));
    }
    notes.extend(state.problems.iter().map(|problem| format!("in the files: {problem}")));
    notes
}

/// Returns both files as one JSON object. Their texts are JSON, and are inserted unchanged.
pub(crate) fn json(state: &KubeletState) -> String {
    let members = files(state).map(|(name, text)| format!("\"{name}\":{text}"));
    format!("{{{}}}\n", members.join(",\n"))
}

/// Checks that the files may be written into a directory.
pub(crate) fn check(directory: &Path, replace: bool) -> anyhow::Result<()> {
    let path = directory.display();
    if KUBELET_SUBDIRECTORIES.iter().all(|name| directory.join(name).is_dir()) {
        bail!(
            "--into {path}: this is a kubelet's own directory, and a running kubelet overwrites its files: write into \
             another directory, and copy the files while the kubelet is stopped"
        );
    }
    for name in [CpuCheckpoint::FILE, MemoryCheckpoint::FILE] {
        if !replace && directory.join(name).symlink_metadata().is_ok() {
            bail!("--into {path}: the file {name} exists already: --replace replaces it");
        }
    }
    Ok(())
}

/// Writes both files. Each file is replaced as a whole or stays unchanged.
pub(crate) fn write(directory: &Path, state: &KubeletState) -> anyhow::Result<()> {
    let fail = |name: &str| format!("{}: cannot be written", directory.join(name).display());
    make_private_dir(directory).with_context(|| fail(""))?;
    let temporary = |name: &str| directory.join(format!(".{name}.{}", std::process::id()));
    let written = files(state).into_iter().try_for_each(|(name, text)| {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary(name));
        file.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .with_context(|| fail(name))
    });
    let renamed = written.and_then(|()| {
        files(state).into_iter().try_for_each(|(name, _)| {
            fs::rename(temporary(name), directory.join(name)).with_context(|| fail(name))
        })
    });
    if renamed.is_err() {
        for (name, _) in files(state) {
            // A file may not have been created yet.
            let _: io::Result<()> = fs::remove_file(temporary(name));
        }
    }
    renamed?;
    File::open(directory).and_then(|directory| directory.sync_all()).with_context(|| fail(""))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn state() -> KubeletState {
        KubeletState {
            cpu_manager_state: r#"{"policyName":"none","defaultCpuSet":"","checksum":1}"#.to_owned(),
            memory_manager_state: r#"{"policyName":"None","machineState":{},"checksum":2}"#.to_owned(),
            others: vec!["batch".to_owned(), "db.service".to_owned()],
            problems: vec!["a kubelet refuses the pod a/b".to_owned()],
        }
    }

    #[test]
    fn prints_both_files() {
        let printed: serde_json::Value = serde_json::from_str(&json(&state())).unwrap();
        assert_eq!(printed["cpu_manager_state"]["checksum"], 1);
        assert_eq!(printed["memory_manager_state"]["policyName"], "None");
        let notes = notes(&state());
        assert!(notes[0].contains("batch, db.service") && notes[1].contains("a/b"), "{notes:?}");
        assert_eq!(notes.len(), 2);
    }

    #[test]
    fn writes_whole_files_for_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let into = dir.path().join("a/b");
        check(&into, false).unwrap();
        write(&into, &state()).unwrap();
        let written = |name: &str| fs::read_to_string(into.join(name)).unwrap();
        assert_eq!(written("cpu_manager_state"), state().cpu_manager_state);
        assert_eq!(written("memory_manager_state"), state().memory_manager_state);
        let mode = fs::metadata(into.join("cpu_manager_state")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mode_of = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let usual = dir.path().join("usual");
        fs::create_dir(&usual).unwrap();
        assert_eq!((mode_of(&into), mode_of(&dir.path().join("a"))), (0o700, 0o755 & mode_of(&usual)));
        assert_eq!(fs::read_dir(&into).unwrap().count(), 2, "no temporary file is left");

        let refused = check(&into, false).unwrap_err().to_string();
        assert!(refused.contains("cpu_manager_state") && refused.contains("--replace"), "{refused}");
        check(&into, true).unwrap();
        let later = KubeletState { cpu_manager_state: "{}".to_owned(), ..state() };
        write(&into, &later).unwrap();
        assert_eq!(written("cpu_manager_state"), "{}");

        // One file cannot be replaced: the temporary files are removed.
        fs::remove_file(into.join("memory_manager_state")).unwrap();
        fs::create_dir(into.join("memory_manager_state")).unwrap();
        let failed = format!("{:#}", write(&into, &state()).unwrap_err());
        assert!(failed.contains("memory_manager_state: cannot be written"), "{failed}");
        assert_eq!(fs::read_dir(&into).unwrap().count(), 2);
    }

    #[test]
    fn refuses_directory_of_a_kubelet() {
        let dir = tempfile::tempdir().unwrap();
        for name in KUBELET_SUBDIRECTORIES {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        for replace in [false, true] {
            let refused = check(dir.path(), replace).unwrap_err().to_string();
            assert!(refused.contains("a kubelet's own directory"), "{refused}");
        }
    }
}

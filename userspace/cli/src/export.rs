//! `numaward export-kubelet-state`: the kubelet's state files.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

use anyhow::{Context as _, bail};
use numaward_api::KubeletState;
use numaward_engine::checkpoint::{CpuCheckpoint, MemoryCheckpoint};

/// What only the directory of a kubelet has.
const OF_A_KUBELET: [&str; 2] = ["pods", "plugins_registry"];

fn files(state: &KubeletState) -> [(&'static str, &str); 2] {
    [(CpuCheckpoint::FILE, &*state.cpu_manager_state), (MemoryCheckpoint::FILE, &*state.memory_manager_state)]
}

/// What is to be said besides, a line each.
pub(crate) fn notes(state: &KubeletState) -> Vec<String> {
    let mut notes = Vec::new();
    if !state.others.is_empty() {
        notes.push(format!(
            "not containers of pods, and in the files under their own names: {}. A kubelet that starts with the files gives \
             back what they hold",
            state.others.join(", ")
        ));
    }
    notes.extend(state.problems.iter().map(|problem| format!("the files as they are: {problem}")));
    notes
}

/// Both files as one object. They are JSON themselves, so their text is taken as it is.
pub(crate) fn json(state: &KubeletState) -> String {
    let members = files(state).map(|(name, text)| format!("\"{name}\":{text}"));
    format!("{{{}}}\n", members.join(",\n"))
}

/// Whether files may be written into a directory.
pub(crate) fn check(directory: &Path, replace: bool) -> anyhow::Result<()> {
    let shown = directory.display();
    if OF_A_KUBELET.iter().all(|name| directory.join(name).is_dir()) {
        bail!(
            "--into {shown}: this is a kubelet's own directory, and a kubelet that runs overwrites its files: write into \
             another one, and copy the files while the kubelet is stopped"
        );
    }
    for name in [CpuCheckpoint::FILE, MemoryCheckpoint::FILE] {
        if !replace && directory.join(name).symlink_metadata().is_ok() {
            bail!("--into {shown}: there is a {name} already: --replace replaces it");
        }
    }
    Ok(())
}

/// Writes both files. Each is there as a whole, or as it was before.
pub(crate) fn write(directory: &Path, state: &KubeletState) -> anyhow::Result<()> {
    let fail = |name: &str| format!("{}: cannot be written", directory.join(name).display());
    DirBuilder::new().recursive(true).mode(0o700).create(directory).with_context(|| fail(""))?;
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
            // It may not have come that far.
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
    fn what_is_printed_is_both_files() {
        let printed: serde_json::Value = serde_json::from_str(&json(&state())).unwrap();
        assert_eq!(printed["cpu_manager_state"]["checksum"], 1);
        assert_eq!(printed["memory_manager_state"]["policyName"], "None");
        let notes = notes(&state());
        assert!(notes[0].contains("batch, db.service") && notes[1].contains("a/b"), "{notes:?}");
        assert_eq!(notes.len(), 2);
    }

    #[test]
    fn files_are_written_as_a_whole_for_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let into = dir.path().join("a/b");
        check(&into, false).unwrap();
        write(&into, &state()).unwrap();
        let written = |name: &str| fs::read_to_string(into.join(name)).unwrap();
        assert_eq!(written("cpu_manager_state"), state().cpu_manager_state);
        assert_eq!(written("memory_manager_state"), state().memory_manager_state);
        let mode = fs::metadata(into.join("cpu_manager_state")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(&into).unwrap().count(), 2, "nothing else is left");

        let refused = check(&into, false).unwrap_err().to_string();
        assert!(refused.contains("cpu_manager_state") && refused.contains("--replace"), "{refused}");
        check(&into, true).unwrap();
        let later = KubeletState { cpu_manager_state: "{}".to_owned(), ..state() };
        write(&into, &later).unwrap();
        assert_eq!(written("cpu_manager_state"), "{}");

        // A file that cannot be replaced: what was begun is removed.
        fs::remove_file(into.join("memory_manager_state")).unwrap();
        fs::create_dir(into.join("memory_manager_state")).unwrap();
        let failed = format!("{:#}", write(&into, &state()).unwrap_err());
        assert!(failed.contains("memory_manager_state: cannot be written"), "{failed}");
        assert_eq!(fs::read_dir(&into).unwrap().count(), 2);
    }

    #[test]
    fn the_directory_of_a_kubelet_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for name in OF_A_KUBELET {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        for replace in [false, true] {
            let refused = check(dir.path(), replace).unwrap_err().to_string();
            assert!(refused.contains("a kubelet's own directory"), "{refused}");
        }
    }
}

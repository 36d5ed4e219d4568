//! The last known reservations of the kubelet, stored beside the ledger.
//!
//! # Problem
//! After a reboot, the daemon may start before the kubelet and the API server answer. With its own defaults, it would then reserve other CPUs
//! and memory than before.
//!
//! # Algorithm
//! Reservations from a source are written to `kubelet-reservations.json` if they fit the machine and differ from the stored ones: a new file is
//! synced and renamed over the old one. They are used if there is a kubelet and none of its sources answers. While the kubelet's configuration,
//! which names CPUs and nodes, cannot be read, its stored reservations also take precedence over the amounts of the Kubernetes node, and are
//! not replaced by them. A file that cannot be read is reported and not used.

use std::{io, path::Path};

use numaward_cgroup::{read_text, replace_file};
use numaward_guarantee::private_directory;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::reservations::KubeletReservations;

const FILE_NAME: &str = "kubelet-reservations.json";
/// Maximum size of the file: more than reservations of hundreds of nodes take.
const MAX_BYTES: u64 = 1 << 20;

/// Reservations of the kubelet with their origin.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SourcedReservations {
    pub(super) reservations: KubeletReservations,
    /// Source in words, for people.
    pub(super) source: String,
    /// True if they come from the kubelet's configuration, false if from amounts of the Kubernetes node.
    pub(super) is_exact: bool,
}

#[derive(Serialize)]
struct WrittenReservations<'a> {
    source: &'a str,
    exact: bool,
    configuration: &'a KubeletReservations,
}

#[derive(Deserialize)]
struct ReadReservations {
    source: String,
    exact: bool,
    configuration: Value,
}

/// Returns the stored reservations; `None` if there are none. Returns a message with the file if it cannot be used.
pub(super) fn load(directory: &Path) -> Result<Option<SourcedReservations>, String> {
    let path = directory.join(FILE_NAME);
    let text = match read_text(&path, MAX_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{}: cannot be read: {error}", path.display())),
    };
    let fail =
        |problem: String| format!("{}: not stored reservations of a kubelet: {problem}", path.display());
    let ReadReservations { source, exact, configuration } =
        serde_json::from_str(&text).map_err(|error| fail(error.to_string()))?;
    if !configuration.is_object() {
        return Err(fail("configuration: expected an object".to_owned()));
    }
    let reservations = KubeletReservations::from_configuration(&configuration).map_err(fail)?;
    Ok(Some(SourcedReservations { reservations, source, is_exact: exact }))
}

/// Stores reservations for the next start. An error is logged.
pub(super) fn store(directory: &Path, found: &SourcedReservations) {
    if matches!(load(directory), Ok(Some(stored)) if stored == *found) {
        return;
    }
    let SourcedReservations { reservations, source, is_exact } = found;
    let stored = private_directory::prepare(directory).map_err(io::Error::other).and_then(|()| {
        let written = WrittenReservations { source, exact: *is_exact, configuration: reservations };
        replace_file(&directory.join(FILE_NAME), &serde_json::to_vec(&written)?)
    });
    if let Err(error) = stored {
        tracing::warn!(
            file = %directory.join(FILE_NAME).display(), %error,
            "the reservations of the kubelet cannot be stored: a start at which no source answers uses the defaults"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    #[test]
    fn stored_reservations_survive_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(load(dir.path()), Ok(None));
        for kubelet in [
            json!({}),
            json!({"evictionHard": {}}),
            json!({"reservedSystemCPUs": "1,5-7", "kubeReserved": {"cpu": "500m", "memory": "300Mi"},
                "systemReserved": {"memory": "212Mi"}, "evictionHard": {"memory.available": "2.5%"},
                "reservedMemory": [{"numaNode": 1, "limits": {"memory": "512Mi", "hugepages-2Mi": "4Mi"}}]}),
        ] {
            let reservations = KubeletReservations::from_configuration(&kubelet).unwrap();
            let found = SourcedReservations { reservations, source: "a source".to_owned(), is_exact: true };
            store(dir.path(), &found);
            assert_eq!(load(dir.path()), Ok(Some(found)));
        }
    }

    #[test]
    fn unusable_file_is_reported_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE_NAME);
        let too_large = " ".repeat((1 << 20) + 1);
        for (text, words) in [
            ("nonsense", "expected"),
            (r#"{"source": "x", "exact": true}"#, "configuration"),
            (r#"{"source": "x", "exact": true, "configuration": 7}"#, "expected an object"),
            (
                r#"{"source": "x", "exact": true, "configuration": {"kubeReserved": {"cpu": "?"}}}"#,
                "kubeReserved",
            ),
            (&too_large, "more than the maximum"),
        ] {
            fs::write(&file, text).unwrap();
            let problem = load(dir.path()).unwrap_err();
            assert!(problem.contains(FILE_NAME) && problem.contains(words), "{problem}");
            let reservations = KubeletReservations::default();
            store(
                dir.path(),
                &SourcedReservations { reservations, source: "a source".to_owned(), is_exact: false },
            );
            assert!(load(dir.path()).unwrap().is_some());
        }
    }
}

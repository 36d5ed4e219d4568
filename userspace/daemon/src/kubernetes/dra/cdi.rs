//! Specifications of prepared claims for the container runtime, by the Container Device Interface (CDI).
//!
//! A claim is one CDI device without device files. Containers with the claim get an environment variable with its name: the specification
//! of a device without any change of the container is not valid. The daemon does not read the variable, which pods could forge.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::PathBuf,
};

use numaward_engine::claims::devices::DRIVER;
use serde_json::json;

/// Version of CDI that has all used fields.
const CDI_VERSION: &str = "0.3.0";
/// Class of the devices.
const CLASS: &str = "claim";

/// The folder of the specifications.
#[derive(Clone, Debug)]
pub(super) struct CdiDirectory(pub(super) PathBuf);

/// Error of a specification.
#[derive(Debug, thiserror::Error)]
#[error("{path}: cannot {action}: {source}; check kubernetes.dra.cdiDirectory", path = .path.display())]
pub(super) struct CdiError {
    path: PathBuf,
    action: &'static str,
    source: io::Error,
}

/// Returns the CDI name of a claim. A name that begins with a digit is not valid in every version of CDI.
pub(super) fn device_id(uid: &str) -> String {
    format!("{DRIVER}/{CLASS}={}", device_name(uid))
}

fn device_name(uid: &str) -> String {
    format!("{CLASS}-{uid}")
}

/// Returns the UID of a claim by its CDI name; `None` for another device.
pub(super) fn claim_uid(id: &str) -> Option<&str> {
    let name = id.strip_prefix(DRIVER)?.strip_prefix('/')?.strip_prefix(CLASS)?.strip_prefix('=')?;
    name.strip_prefix(CLASS)?.strip_prefix('-')
}

/// Returns the name of the environment variable of a claim.
fn variable(uid: &str) -> String {
    let uid: String = uid.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    format!("NUMAWARD_CLAIM_{uid}")
}

impl CdiDirectory {
    fn path(&self, uid: &str) -> PathBuf {
        self.0.join(format!("{DRIVER}-{CLASS}_{uid}.json"))
    }

    /// Writes the specification of a claim. The container runtime sees the old or the new file, and never a part.
    pub(super) fn write(&self, uid: &str, claim: &str) -> Result<(), CdiError> {
        let edits = json!({"env": [format!("{}={claim}", variable(uid))]});
        let specification = json!({
            "cdiVersion": CDI_VERSION,
            "kind": format!("{DRIVER}/{CLASS}"),
            "devices": [{"name": device_name(uid), "containerEdits": edits}],
        });
        let path = self.path(uid);
        // The runtime reads files that end with `json` or `yaml`.
        let new = path.with_added_extension("new");
        let fail = |path: &PathBuf, action| {
            let path = path.clone();
            move |source| CdiError { path, action, source }
        };
        fs::create_dir_all(&self.0).map_err(fail(&self.0, "create this directory"))?;
        remove(&new).map_err(fail(&new, "remove it (an interrupted write left it behind)"))?;
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&new)
            .map_err(fail(&new, "create it"))?;
        file.write_all(specification.to_string().as_bytes()).map_err(fail(&new, "write it"))?;
        file.sync_all().map_err(fail(&new, "write it"))?;
        fs::rename(&new, &path).map_err(fail(&path, "replace it"))
    }

    /// Removes the specification of a claim, if there is one.
    pub(super) fn remove(&self, uid: &str) -> Result<(), CdiError> {
        let path = self.path(uid);
        remove(&path).map_err(|source| CdiError { path, action: "remove it", source })
    }
}

fn remove(path: &PathBuf) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn specification_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let cdi = CdiDirectory(dir.path().join("cdi"));
        cdi.write("0-a", "x").unwrap();
        // An interrupted write.
        fs::write(cdi.0.join("numaward.io-claim_0-a.json.new"), "{").unwrap();
        cdi.write("0-a", "ns/db").unwrap();
        let path = cdi.0.join("numaward.io-claim_0-a.json");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        let text: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(text["kind"], "numaward.io/claim");
        assert_eq!(text["devices"][0]["name"], "claim-0-a");
        assert_eq!(claim_uid(&device_id("0-a")), Some("0-a"));
        assert_eq!(["gpu.example/claim=claim-0-a", "numaward.io/claim=0-a", ""].map(claim_uid), [None; 3]);
        assert_eq!(text["devices"][0]["containerEdits"]["env"], json!(["NUMAWARD_CLAIM_0_a=ns/db"]));
        assert_eq!(fs::read_dir(&cdi.0).unwrap().count(), 1);
        for _ in 0..2 {
            cdi.remove("0-a").unwrap();
        }
        assert_eq!(fs::read_dir(&cdi.0).unwrap().count(), 0);
        fs::create_dir(&path).unwrap();
        let error = cdi.write("0-a", "s").unwrap_err().to_string();
        assert!(error.contains("numaward.io-claim_0-a.json: cannot replace it"), "{error}");
    }
}

//! The files of a Kubernetes node and of its group, beside the configuration file.
//!
//! All daemons of a cluster mount the same `ConfigMap`. Beside `config.yaml`, it may have `group.NAME.yaml` for the nodes with the label
//! `numaward.io/group: NAME`, and `node.NAME.yaml` for one node. The label is known to the API server alone, which may not answer when the
//! daemon starts, and not to commands. The daemon therefore stores it in its state directory.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// Name of the file in the state directory.
const FILE_NAME: &str = "node.json";
/// Maximum size of the stored file: names of nodes and values of labels have at most 253 and 63 characters.
const MAX_BYTES: u64 = 4096;
/// Maximum number of entries of the directory that are looked at for files of groups and nodes.
const MAX_ENTRIES: usize = 10_000;

/// The Kubernetes node of this host, and its group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeScope {
    pub name: String,
    /// The value of the label [`Self::GROUP_LABEL`]; `None` if the node has no such label.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl NodeScope {
    /// The label of Kubernetes nodes with the name of their group.
    pub const GROUP_LABEL: &str = "numaward.io/group";

    /// Returns the path of the stored node.
    pub fn path(state_directory: &Path) -> PathBuf {
        state_directory.join(FILE_NAME)
    }

    /// Returns the node that the daemon stored; `None` if it stored none.
    pub fn stored(state_directory: &Path) -> io::Result<Option<Self>> {
        match numaward_cgroup::read_text(&Self::path(state_directory), MAX_BYTES) {
            Ok(text) => serde_json::from_str(&text).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the files of the node in a directory, in ascending precedence. They need not exist.
    pub(super) fn files(&self, directory: &Path) -> impl Iterator<Item = PathBuf> {
        let group = self.group.iter().map(|group| format!("group.{group}.yaml"));
        let names = group.chain([format!("node.{}.yaml", self.name)]);
        let is_name = |name: &String| !name.contains('/');
        names.filter(is_name).map(|name| directory.join(name))
    }

    /// Returns a warning if the node has a group without a file.
    pub(super) fn missing_group_file(&self, directory: &Path) -> Option<String> {
        let group = self.group.as_ref()?;
        let file = directory.join(format!("group.{group}.yaml"));
        (!file.exists()).then(|| {
            let (label, file) = (Self::GROUP_LABEL, file.display());
            format!("the label {label}: {group} has no effect: there is no file {file}")
        })
    }
}

/// Returns true if the directory has files of groups or nodes.
pub(super) fn has_files(directory: &Path) -> bool {
    file_scopes(directory).next().is_some()
}

/// Returns a scope for each file of a group or a node in the directory, with which that file applies.
pub(super) fn file_scopes(directory: &Path) -> impl Iterator<Item = NodeScope> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten().take(MAX_ENTRIES);
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| {
        let stem = name.strip_suffix(".yaml")?;
        let group = stem.strip_prefix("group.").map(str::to_owned);
        let name = stem.strip_prefix("node.").map(str::to_owned);
        (group.is_some() || name.is_some()).then(|| NodeScope { name: name.unwrap_or_default(), group })
    })
}

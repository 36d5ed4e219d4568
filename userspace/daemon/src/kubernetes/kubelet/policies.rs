//! Which policies the kubelet runs with.
//!
//! Its configuration file says, where there is one and it has the key. Else its state files do: each names the policy
//! that wrote it, and the kubelet does not start with a file of another policy.

use std::{fs, io, path::Path};

use numaward_config::read_yaml;
use serde_json::Value;

use super::{KubeletConflict, below};

/// The kubelet's configuration file, in its directory.
const CONFIG: &str = "config.yaml";
/// Its fields that name a policy.
const FIELDS: [&str; 4] =
    ["cpuManagerPolicy", "memoryManagerPolicy", "topologyManagerPolicy", "topologyManagerScope"];
/// Larger files are not what they should be.
const MAX_BYTES: u64 = 64 << 20;

/// A policy and where it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The policy in the kubelet's words.
    pub policy: String,
    /// The file, as a path of the host.
    pub file: String,
    /// The field of the kubelet's configuration that sets it.
    pub field: &'static str,
}

impl Found {
    /// A policy found in a file, and the field of the configuration that sets it.
    pub fn new(policy: &str, file: impl Into<String>, field: &'static str) -> Self {
        Self { policy: policy.to_owned(), file: file.into(), field }
    }
}

/// The kubelet's policies, as far as they are found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Of the CPU manager.
    pub cpu: Option<Found>,
    /// Of the memory manager.
    pub memory: Option<Found>,
    /// Of the topology manager.
    pub topology: Option<Found>,
    /// Of the topology manager too.
    pub scope: Option<Found>,
    /// What could not be read.
    pub problems: Vec<String>,
}

impl Policies {
    /// Reads what there is of the host whose file system is at `root`. `directory` is the kubelet's, as a path of the
    /// host.
    pub fn read(root: &Path, directory: &Path) -> Self {
        let mut found = Self::default();
        let file = directory.join(CONFIG);
        if let Some(text) = found.text(root, &file) {
            match read_yaml(&text, &file) {
                Ok(config) => {
                    for field in FIELDS {
                        if let Some(policy) = config[field].as_str() {
                            found.set(field, policy, &file);
                        }
                    }
                }
                Err(problems) => found.problems.extend(problems.0.iter().map(ToString::to_string)),
            }
        }
        for (name, field) in
            [("cpu_manager_state", "cpuManagerPolicy"), ("memory_manager_state", "memoryManagerPolicy")]
        {
            let file = directory.join(name);
            if found.of(field).is_some() {
                continue;
            }
            let Some(text) = found.text(root, &file) else { continue };
            match serde_json::from_str::<Value>(&text) {
                Ok(state) => match state["policyName"].as_str() {
                    Some(policy) => found.set(field, policy, &file),
                    None => found.problems.push(format!("{}: it names no policyName", file.display())),
                },
                Err(error) => found.problems.push(format!("{}: {error}", file.display())),
            }
        }
        found
    }

    fn of(&mut self, field: &str) -> &mut Option<Found> {
        match field {
            "cpuManagerPolicy" => &mut self.cpu,
            "memoryManagerPolicy" => &mut self.memory,
            "topologyManagerPolicy" => &mut self.topology,
            _ => &mut self.scope,
        }
    }

    fn set(&mut self, field: &'static str, policy: &str, file: &Path) {
        *self.of(field) = Some(Found::new(policy, file.display().to_string(), field));
    }

    fn text(&mut self, root: &Path, file: &Path) -> Option<String> {
        read_text(&below(root, file), file).map_err(|problem| self.problems.push(problem)).ok().flatten()
    }

    /// Whether the kubelet pins containers itself, and what to change if it is not to.
    pub fn pins(&self) -> Option<KubeletConflict> {
        let (mut found, mut fix) = (Vec::new(), Vec::new());
        for (policy, none) in [(&self.cpu, "none"), (&self.memory, "None")] {
            let Some(Found { policy, file, field }) = policy else { continue };
            if policy.eq_ignore_ascii_case("static") {
                let from = if file.ends_with(CONFIG) { " in" } else { ", according to" };
                found.push(format!("{field}: {policy}{from} {file}"));
                fix.push(format!("set {field}: {none} in the kubelet's configuration"));
            }
        }
        (!found.is_empty()).then_some(KubeletConflict { found, fix })
    }
}

/// The text of a file of sensible size, if it is there. `name` is what it is called where it cannot be read.
pub(super) fn read_text(path: &Path, name: &Path) -> Result<Option<String>, String> {
    let text = fs::metadata(path).and_then(|found| {
        let size = found.len();
        if size > MAX_BYTES {
            let message = format!("{size} bytes are more than the {MAX_BYTES} that it may have");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        fs::read_to_string(path)
    });
    match text {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: cannot be read: {error}", name.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Policies {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("var/lib/kubelet");
        fs::create_dir_all(&directory).unwrap();
        for (name, text) in files {
            fs::write(directory.join(name), text).unwrap();
        }
        Policies::read(root.path(), Path::new("/var/lib/kubelet"))
    }

    #[test]
    fn the_policies_are_found_where_they_are_said() {
        let none = read(&[]);
        assert_eq!(none, Policies::default());
        assert_eq!(none.pins(), None);

        let config = "kind: KubeletConfiguration\ncpuManagerPolicy: static\nmemoryManagerPolicy: None\n\
            topologyManagerPolicy: restricted\ntopologyManagerScope: pod\n";
        let found = read(&[("config.yaml", config), ("memory_manager_state", r#"{"policyName":"Static"}"#)]);
        assert_eq!(found.topology.as_ref().map(|found| found.policy.as_str()), Some("restricted"));
        assert_eq!(found.scope.as_ref().map(|found| found.policy.as_str()), Some("pod"));
        let pins = found.pins().unwrap();
        assert_eq!(pins.found, ["cpuManagerPolicy: static in /var/lib/kubelet/config.yaml"]);
        assert_eq!(pins.fix, ["set cpuManagerPolicy: none in the kubelet's configuration"]);
        assert_eq!(found.problems, [""; 0]);

        // Without a word in the configuration, the state files say.
        let found = read(&[
            ("config.yaml", "kind: KubeletConfiguration\n"),
            ("cpu_manager_state", r#"{"policyName":"none","defaultCpuSet":""}"#),
            ("memory_manager_state", r#"{"policyName":"Static"}"#),
        ]);
        let pins = found.pins().unwrap();
        assert_eq!(
            pins.found,
            ["memoryManagerPolicy: Static, according to /var/lib/kubelet/memory_manager_state"]
        );

        // A policy for devices alone is no master of CPUs and memory.
        assert_eq!(read(&[("config.yaml", "topologyManagerPolicy: single-numa-node\n")]).pins(), None);
    }

    #[test]
    fn what_cannot_be_read_says_where() {
        let found =
            read(&[("config.yaml", "a: [\n"), ("cpu_manager_state", "{"), ("memory_manager_state", "{}")]);
        assert_eq!(found.problems.len(), 3, "{:?}", found.problems);
        for (problem, words) in found.problems.iter().zip([
            "/var/lib/kubelet/config.yaml",
            "/var/lib/kubelet/cpu_manager_state: EOF",
            "/var/lib/kubelet/memory_manager_state: it names no policyName",
        ]) {
            assert!(problem.contains(words), "{problem}");
        }
        assert_eq!(found.pins(), None);
    }
}

//! Which policies the kubelet runs with.
//!
//! Its configuration file says, where there is one and it has the key. Else its state files do: each names the policy
//! that wrote it, and the kubelet does not start with a file of another policy.

use std::{fs, io, path::Path};

use numaward_config::read_yaml;
use serde_json::Value;

use super::{TwoMasters, below};

/// The kubelet's configuration file, in its directory.
const CONFIG: &str = "config.yaml";
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

    fn is_static(&self) -> bool {
        self.policy.eq_ignore_ascii_case("static")
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
                Ok(config) => found.take(&config, &file),
                Err(problems) => found.problems.extend(problems.0.iter().map(ToString::to_string)),
            }
        }
        for (name, field) in
            [("cpu_manager_state", "cpuManagerPolicy"), ("memory_manager_state", "memoryManagerPolicy")]
        {
            let known = if field == "cpuManagerPolicy" { &found.cpu } else { &found.memory };
            if known.is_some() {
                continue;
            }
            let file = directory.join(name);
            let Some(text) = found.text(root, &file) else { continue };
            let policy = serde_json::from_str::<Value>(&text)
                .map_err(|error| format!("{}: {error}", file.display()))
                .map(|state| state["policyName"].as_str().map(str::to_owned));
            match policy {
                Ok(Some(policy)) => found.set(field, &policy, &file),
                Ok(None) => found.problems.push(format!("{}: it names no policyName", file.display())),
                Err(problem) => found.problems.push(problem),
            }
        }
        found
    }

    fn take(&mut self, config: &Value, file: &Path) {
        for field in
            ["cpuManagerPolicy", "memoryManagerPolicy", "topologyManagerPolicy", "topologyManagerScope"]
        {
            if let Some(policy) = config[field].as_str() {
                self.set(field, policy, file);
            }
        }
    }

    fn set(&mut self, field: &'static str, policy: &str, file: &Path) {
        let found = Some(Found::new(policy, file.display().to_string(), field));
        match field {
            "cpuManagerPolicy" => self.cpu = found,
            "memoryManagerPolicy" => self.memory = found,
            "topologyManagerPolicy" => self.topology = found,
            _ => self.scope = found,
        }
    }

    fn text(&mut self, root: &Path, file: &Path) -> Option<String> {
        match read_text(&below(root, file)) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                self.problems.push(format!("{}: cannot be read: {error}", file.display()));
                None
            }
        }
    }

    /// Whether the kubelet pins containers itself, and what to change if it is not to.
    pub fn pins(&self) -> Option<TwoMasters> {
        let policies = [(&self.cpu, "none"), (&self.memory, "None")];
        let pinning = policies.iter().filter_map(|(found, none)| {
            let found = found.as_ref().filter(|found| found.is_static())?;
            Some((found, *none))
        });
        let (found, mend): (Vec<_>, Vec<_>) = pinning
            .map(|(Found { policy, file, field }, none)| {
                let name = if file.ends_with(CONFIG) {
                    format!("{field}: {policy} in {file}")
                } else {
                    format!("{field}: {policy}, told by {file}")
                };
                (name, format!("set {field}: {none} in the kubelet's configuration"))
            })
            .unzip();
        (!found.is_empty()).then_some(TwoMasters { found, mend })
    }
}

/// The text of a file of sensible size.
pub(super) fn read_text(path: &Path) -> io::Result<String> {
    let size = fs::metadata(path)?.len();
    if size > MAX_BYTES {
        let message = format!("{size} bytes are more than the {MAX_BYTES} that it may have");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    fs::read_to_string(path)
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
        assert_eq!(pins.mend, ["set cpuManagerPolicy: none in the kubelet's configuration"]);
        assert_eq!(found.problems, [""; 0]);

        // Without a word in the configuration, the state files tell.
        let found = read(&[
            ("config.yaml", "kind: KubeletConfiguration\n"),
            ("cpu_manager_state", r#"{"policyName":"none","defaultCpuSet":""}"#),
            ("memory_manager_state", r#"{"policyName":"Static"}"#),
        ]);
        let pins = found.pins().unwrap();
        assert_eq!(
            pins.found,
            ["memoryManagerPolicy: Static, told by /var/lib/kubelet/memory_manager_state"]
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

//! Policies of the kubelet.
//!
//! They are read from its configuration file. For a key that the file does not have, the state files are read: each has the policy that
//! wrote it, and the kubelet does not start with a state file of another policy.

use std::{io, path::Path};

use serde_json::Value;

use super::{
    KubeletConflict, below,
    configuration::{CONFIG, KubeletConfiguration},
};

/// Fields of the configuration that set a policy.
const POLICY_FIELDS: [&str; 4] =
    ["cpuManagerPolicy", "memoryManagerPolicy", "topologyManagerPolicy", "topologyManagerScope"];
/// The maximum size of a file. A larger file is not a configuration or a state file of the kubelet.
const MAX_BYTES: u64 = 64 << 20;

/// A policy and its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPolicy {
    /// The name of the policy as in the file.
    pub policy: String,
    /// The file, as a path of the host, or another source.
    pub file: String,
    /// The field of the kubelet's configuration that sets the policy.
    pub field: &'static str,
}

impl FoundPolicy {
    pub fn new(policy: &str, file: impl Into<String>, field: &'static str) -> Self {
        Self { policy: policy.to_owned(), file: file.into(), field }
    }
}

/// Policies of the kubelet; `None` for a policy that no file has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Policy of the CPU manager.
    pub cpu: Option<FoundPolicy>,
    /// Policy of the memory manager.
    pub memory: Option<FoundPolicy>,
    /// Policy of the topology manager.
    pub topology: Option<FoundPolicy>,
    /// Scope of the topology manager.
    pub scope: Option<FoundPolicy>,
    /// Errors of files that could not be read.
    pub problems: Vec<String>,
}

impl Policies {
    /// Reads the policies of the host with the file system at `root`. `directory` is the directory of the kubelet, as a path of
    /// the host.
    pub fn read(root: &Path, directory: &Path) -> Self {
        let mut found = Self::default();
        match KubeletConfiguration::read_file(root, directory) {
            Ok(None) => {}
            Ok(Some(configuration)) => found.take(&configuration),
            Err(problems) => found.problems.extend(problems),
        }
        for (name, field) in
            [("cpu_manager_state", "cpuManagerPolicy"), ("memory_manager_state", "memoryManagerPolicy")]
        {
            let file = directory.join(name);
            if found.field_mut(field).is_some() {
                continue;
            }
            let Some(text) = found.text(root, &file) else { continue };
            match serde_json::from_str::<Value>(&text) {
                Ok(state) => match state["policyName"].as_str() {
                    Some(policy) => found.set(field, policy, &file.display().to_string()),
                    None => found.problems.push(format!("{}: policyName is missing", file.display())),
                },
                Err(error) => found.problems.push(format!("{}: {error}", file.display())),
            }
        }
        found
    }

    /// Returns the policies of a configuration.
    pub fn from_configuration(configuration: &KubeletConfiguration) -> Self {
        let mut found = Self::default();
        found.take(configuration);
        found
    }

    fn take(&mut self, configuration: &KubeletConfiguration) {
        for field in POLICY_FIELDS {
            if let Some(policy) = configuration.fields[field].as_str() {
                self.set(field, policy, &configuration.source);
            }
        }
    }

    fn field_mut(&mut self, field: &str) -> &mut Option<FoundPolicy> {
        match field {
            "cpuManagerPolicy" => &mut self.cpu,
            "memoryManagerPolicy" => &mut self.memory,
            "topologyManagerPolicy" => &mut self.topology,
            _ => &mut self.scope,
        }
    }

    fn set(&mut self, field: &'static str, policy: &str, source: &str) {
        *self.field_mut(field) = Some(FoundPolicy::new(policy, source, field));
    }

    fn text(&mut self, root: &Path, file: &Path) -> Option<String> {
        read_text(&below(root, file), file).map_err(|problem| self.problems.push(problem)).ok().flatten()
    }

    /// Returns the policies with which the kubelet pins containers, and the changes that switch them off; `None` if it does not pin.
    pub fn pins(&self) -> Option<KubeletConflict> {
        let (mut found, mut fix) = (Vec::new(), Vec::new());
        for (policy, none) in [(&self.cpu, "none"), (&self.memory, "None")] {
            let Some(FoundPolicy { policy, file, field }) = policy else { continue };
            if policy.eq_ignore_ascii_case("static") {
                let from = if file.ends_with(CONFIG) { " in" } else { ", according to" };
                found.push(format!("{field}: {policy}{from} {file}"));
                fix.push(format!("set {field}: {none} in the kubelet's configuration"));
            }
        }
        (!found.is_empty()).then_some(KubeletConflict { found, fix })
    }
}

/// Reads a file of at most [`MAX_BYTES`]; `None` if it does not exist. `name` is the path in error messages.
pub(super) fn read_text(path: &Path, name: &Path) -> Result<Option<String>, String> {
    match numaward_cgroup::read_text(path, MAX_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: cannot be read: {error}", name.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn size_is_limited_while_reading() {
        // Its size is 0, and it has no end.
        let endless = Path::new("/dev/zero");
        let problem = read_text(endless, endless).unwrap_err();
        assert_eq!(problem, "/dev/zero: cannot be read: it has more than the maximum of 67108864 bytes");
    }

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
    fn reads_configuration_then_state_files() {
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

        // Without the keys in the configuration, the state files decide.
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

        // The topology manager alone pins no CPUs and no memory.
        assert_eq!(read(&[("config.yaml", "topologyManagerPolicy: single-numa-node\n")]).pins(), None);
    }

    #[test]
    fn problems_name_the_file() {
        let found =
            read(&[("config.yaml", "a: [\n"), ("cpu_manager_state", "{"), ("memory_manager_state", "{}")]);
        assert_eq!(found.problems.len(), 3, "{:?}", found.problems);
        for (problem, words) in found.problems.iter().zip([
            "/var/lib/kubelet/config.yaml",
            "/var/lib/kubelet/cpu_manager_state: EOF",
            "/var/lib/kubelet/memory_manager_state: policyName is missing",
        ]) {
            assert!(problem.contains(words), "{problem}");
        }
        assert_eq!(found.pins(), None);
    }
}

//! The generated page `docs/configuration.md` with every key, and a check of the configurations in `deploy/`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::{Path, PathBuf},
};

use numaward_tests_support::assert_golden;
use serde_json::Value;

use super::{flag_forms, load::variable_name, schema::KnownKeys, *};

const PAGE_HEAD: &str = "\
# Configuration

numaward reads a YAML file: `/etc/numaward/config.yaml`, or the one given by `--config` or `NUMAWARD_CONFIG`. The default
file may be absent, and every key is optional. A key can also be set by an environment variable, which overrides the file.
Unknown keys, invalid values and contradictory keys are errors. All errors are reported at once, with their lines, also by
`numaward config check FILE`. `numaward config view` prints the effective configuration: files, variables and defaults
together, and with `--origins` also the source of each value. In Kubernetes, files for [groups of
nodes](kubernetes.md#groups-of-nodes) may be beside the first one. At startup, the daemon logs it in one line at `info`, and its differences from the defaults in another. Tokens and
keys are in separate files, and only their paths are shown. For editors, `numaward config schema` prints the JSON schema
from which this page is generated.

Other tools can own files in two folders beside the configuration file. Files with names in `.yaml` are read in byte order of their names:

| folder | a file has |
|---|---|
| `conf.d` | any keys but `guarantees`. A value, also a list, replaces that of the configuration file and of earlier files |
| `guarantees.d` | the key `guarantees` alone. Its guarantees follow those of the configuration file and of earlier files; a pattern may occur once |

Only root may be able to change a folder and its files (`chmod go-w`). A folder may have 256 files, together 1 MiB. Files of groups and nodes override `conf.d`.

If the files change while the daemon runs, `log.level` takes effect at once, and for pods that start from then on (`refusedAfter` also for
refused ones) `kubernetes.placementNamespaces`, `kubernetes.placementOffNamespaces`, `kubernetes.beyondQuotaNamespaces` and
`kubernetes.refusedAfter`. `numaward reload`, or `systemctl reload numaward`, applies
`guarantees` as well, and lists the other changed keys, which take effect when the daemon starts again; until then, `numaward status` has
them. If a file is invalid, the reload fails, and nothing changes. A workload without a declaration any more loses its exclusive CPUs, and the
protection of its memory and the binding to nodes; it runs on, and its pages stay where they are.

If the kubelet has a name for a setting, numaward uses the same name with the same meaning, so that a block of a
`KubeletConfiguration` can be pasted into the file. Variables of maps and lists have the form of the kubelet's flags:

```
NUMAWARD_RESERVED_MEMORY=\"0:memory=1Gi,hugepages-2Mi=100Mi;1:memory=1Gi\"
NUMAWARD_KUBE_RESERVED=cpu=500m,memory=1Gi
NUMAWARD_EVICTION_HARD=\"memory.available<100Mi,nodefs.available<10%\"
NUMAWARD_CPU_MANAGER_POLICY_OPTIONS=full-pcpus-only=true,align-by-socket=true
NUMAWARD_FEATURE_GATES=CPUManagerPolicyAlphaOptions=true
```

Such a variable replaces the complete key of the file; feature gates are merged one by one.
";

/// Describes the possible values of a key.
fn values(schema: &Value) -> String {
    if let Some(choices) = schema["oneOf"].as_array() {
        let choice = |choice: &Value| {
            let meaning = choice["description"].as_str().unwrap_or_default().replace('\n', " ");
            format!("`{}`: {}", choice["const"].as_str().unwrap_or_default(), meaning.trim_end_matches('.'))
        };
        return choices.iter().map(choice).collect::<Vec<_>>().join("; ");
    }
    if let Some(some) = schema["anyOf"].as_array().and_then(|any| any.iter().find(|it| it["type"] != "null"))
    {
        return values(some);
    }
    if let Some(words) = schema["enum"].as_array() {
        let words = words.iter().filter_map(Value::as_str).map(|word| format!("`{word}`"));
        return words.collect::<Vec<_>>().join(", ");
    }
    let examples = schema["examples"].as_array().map_or(&[][..], Vec::as_slice);
    let examples: Vec<_> = examples.iter().map(|example| format!("`{}`", plain(example))).collect();
    let limits = match (schema["minimum"].as_u64(), schema["maximum"].as_u64()) {
        (Some(least), Some(most)) => format!("{least} to {most}"),
        _ => String::new(),
    };
    let kind = match &schema["type"] {
        Value::Array(types) => types[0].as_str(),
        kind => kind.as_str(),
    };
    match kind {
        _ if !examples.is_empty() => format!("such as {}", examples.join(", ")),
        Some("boolean") => "`true`, `false`".to_owned(),
        Some("array") => match values(&schema["items"]) {
            items if items.is_empty() => "a list".to_owned(),
            items => format!("a list: {items}"),
        },
        Some("object") => match values(&schema["additionalProperties"]) {
            items if items.is_empty() => "keys and values".to_owned(),
            items => format!("keys and values: {items}"),
        },
        Some("integer" | "number") => limits,
        _ => String::new(),
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Escapes a text for a table cell.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

struct Reference {
    variables: BTreeSet<String>,
    tables: String,
    rows: Vec<String>,
}

impl Reference {
    /// Adds the keys below `path`: first those with a value, then each group under its own heading.
    fn add(&mut self, path: &str, schema: &Value, is_listed: bool) {
        let Some(properties) = schema["properties"].as_object() else { return };
        let mut groups = Vec::new();
        for (key, schema) in properties {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            if schema["properties"].is_object() {
                groups.push((path, schema, false));
                continue;
            }
            let path_of: Vec<_> = path.split('.').map(str::to_owned).collect();
            let variable = variable_name(&path_of);
            // A single text cannot represent a list, except for flags of the kubelet.
            let has_parts = ["items", "additionalProperties"].iter().any(|parts| schema[parts].is_object())
                && flag_forms::form(&path_of).is_none();
            let variable = if !is_listed && !has_parts && self.variables.contains(&variable) {
                format!("<br>`{variable}`")
            } else {
                String::new()
            };
            let default = match schema.get("default") {
                None | Some(Value::Null) => String::new(),
                Some(default) => format!("`{}`", plain(default)),
            };
            let values = if schema["items"]["properties"].is_object() {
                groups.push((format!("{path}[]"), &schema["items"], true));
                format!("a list, see `{path}[]`")
            } else if schema["additionalProperties"]["properties"].is_object() {
                groups.push((format!("{path}.NAME"), &schema["additionalProperties"], true));
                format!("names, see `{path}.NAME`")
            } else {
                values(schema)
            };
            let meaning = cell(schema["description"].as_str().unwrap_or_default());
            self.rows.push(format!(
                "| `{path}`{variable} | {meaning} | {} | {} |",
                cell(&values),
                cell(&default)
            ));
        }
        if !self.rows.is_empty() {
            let title = if path.is_empty() { "At the top".to_owned() } else { format!("`{path}`") };
            let about = if path.is_empty() { "" } else { schema["description"].as_str().unwrap_or_default() };
            let about =
                if about.is_empty() { String::new() } else { format!("\n{}\n", about.replace('\n', " ")) };
            let rows: String = self.rows.drain(..).map(|row| row + "\n").collect();
            let _ = write!(
                self.tables,
                "\n## {title}\n{about}\n| key, variable | meaning | values | default |\n|---|---|---|---|\n{rows}"
            );
        }
        for (path, schema, listed) in groups {
            self.add(&path, schema, is_listed || listed);
        }
    }
}

fn checkout(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// `cargo xtask generate` writes the page.
#[test]
fn the_page_has_every_key() {
    // These keys can also be set by a variable.
    let variables = KnownKeys::new().leaves().map(variable_name).collect();
    let mut reference = Reference { variables, tables: String::new(), rows: Vec::new() };
    reference.add("", &json_schema(), false);
    let text = format!("{PAGE_HEAD}{}", reference.tables);
    let path = checkout("docs/configuration.md");
    for leaf in KnownKeys::new().leaves() {
        assert!(text.contains(&format!("`{}`", leaf.join("."))), "{leaf:?}");
    }
    assert_golden(&path, &text);
}

/// Loads the configurations of the manifests, with the variables that the manifests set.
#[test]
fn deployed_files_load_without_warning() {
    let mut variables = BTreeMap::new();
    for file in ["base/daemonset.yaml", "components/node-resource-topology/daemonset.yaml"] {
        let text = std::fs::read_to_string(checkout("deploy").join(file)).unwrap();
        let names = text.lines().filter_map(|line| line.trim().strip_prefix("- name: NUMAWARD_"));
        variables.extend(names.map(|name| (format!("NUMAWARD_{name}"), "true".to_owned())));
    }
    assert_eq!(variables.len(), 3, "{variables:?}");
    let read = |file: &str| {
        let file = Some(checkout("deploy").join(file));
        let loaded = load(&Sources { file, variables: variables.clone(), ..Sources::default() }).unwrap();
        assert_eq!(loaded.warnings, [""; 0]);
        loaded.config
    };
    let [enforce, observe, systemd] =
        ["overlays/enforce/config.yaml", "overlays/observe/config.yaml", "systemd/config.yaml"].map(read);
    assert_eq!(
        (enforce.mode, observe.mode, systemd.mode),
        (Some(OperatingMode::Enforce), Some(OperatingMode::Observe), None)
    );
    assert!(enforce.kubernetes.nri.enabled && !observe.kubernetes.nri.enabled);
    assert_eq!(enforce.kubernetes.node_name.as_deref(), Some("true"));
    assert!(enforce.kubernetes.node_resource_topology.enabled);
    // The port in the manifests.
    assert_eq!((enforce.listen.0.port(), observe.listen.0.port()), (9560, 9560));
    // The directories that the manifests mount.
    let control = enforce.control_socket.parent();
    assert_eq!(
        (control, enforce.state_directory.to_str()),
        (Some(Path::new("/run/numaward")), Some("/var/lib/numaward"))
    );
    assert_eq!(enforce.kubernetes.nri.socket.parent(), Some(Path::new("/var/run/nri")));
    assert_eq!(enforce.kubernetes.kubelet.directory, Path::new("/var/lib/kubelet"));

    // The commented examples in the file for systemd are valid as well.
    let text = std::fs::read_to_string(checkout("deploy/systemd/config.yaml")).unwrap();
    let shown: String = text
        .lines()
        .skip_while(|line| *line != "# guarantees:")
        .filter_map(|line| line.strip_prefix("# "))
        .filter(|line| !line.ends_with(':') || !line.starts_with(char::is_uppercase))
        .flat_map(|line| [line, "\n"])
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("shown.yaml");
    std::fs::write(&file, &shown).unwrap();
    let loaded = load(&Sources { file: Some(file), ..Sources::default() });
    let config = loaded.unwrap_or_else(|problems| panic!("{problems}:\n{shown}")).config;
    assert_eq!(
        (config.guarantees.len(), config.enforcement.herding.mode),
        (1, numaward_api::EnforcementMode::On)
    );
}

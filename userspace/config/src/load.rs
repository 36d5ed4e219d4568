//! Loading: from the sources to a configuration, or to all problems.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use super::{
    config::Config,
    control, cpu_power,
    drop_ins::{self, Findings},
    enforcement::{self, GUARANTEES_KEY},
    exported,
    flag_forms::{self, Form},
    interleave_weights, kubelet_keys,
    node_scope::{self, NodeScope},
    outgoing,
    problem::{Origin, Problem, Problems},
    resctrl,
    schema::{KnownKeys, closest},
    tree::{self, Origins, TreeNode},
};

/// The path of the configuration file if none is given.
pub const DEFAULT_FILE: &str = "/etc/numaward/config.yaml";
/// The environment variable with the path of the configuration file, like the flag `--config`.
pub const FILE_VARIABLE: &str = "NUMAWARD_CONFIG";
/// The prefix of all environment variables.
pub const VARIABLE_PREFIX: &str = "NUMAWARD_";
/// Variables with this prefix that are not part of the configuration: they are for client commands.
pub const CLIENT_VARIABLES: [&str; 5] =
    ["NUMAWARD_SERVER", "NUMAWARD_TOKEN_FILE", "NUMAWARD_CA_FILE", "NUMAWARD_CERT_FILE", "NUMAWARD_KEY_FILE"];

/// The maximum size of the configuration file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The bit of a file's mode by which any user may read it.
const OTHERS_READ: u32 = 0o004;

/// The sources of the configuration.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The path that was given, for example by `--config`. This file must exist, unlike [`DEFAULT_FILE`].
    pub file: Option<PathBuf>,
    /// The Kubernetes node, which selects files; `None` for the one that the daemon stored in its state directory.
    pub node: Option<NodeScope>,
    /// The environment. Only names with [`VARIABLE_PREFIX`] are used.
    pub variables: BTreeMap<String, String>,
    /// Command-line flags.
    pub flags: Vec<Flag>,
}

/// A command-line flag that sets a value.
#[derive(Clone, Debug)]
pub struct Flag {
    /// The flag, including dashes: `--listen`.
    pub name: &'static str,
    /// The key that it sets, with dots: `log.level`.
    pub key: &'static str,
    /// The value as text.
    pub value: String,
}

/// A loaded configuration.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    pub config: Config,
    /// The files that were read, in order: values of later ones replace those of earlier ones.
    pub files: Vec<PathBuf>,
    /// The Kubernetes node that selected the files.
    pub node: Option<NodeScope>,
    /// True if there are files for groups or nodes, whether they apply to this node or not.
    pub has_scoped_files: bool,
    pub origins: Origins,
    /// Warnings about settings without effect.
    pub warnings: Vec<String>,
}

/// Files without problems.
#[derive(Clone, Debug)]
pub struct CheckedFiles {
    pub files: Vec<PathBuf>,
    /// Warnings about settings without effect.
    pub warnings: Vec<String>,
}

/// Checks the configuration of the given Kubernetes node. If none is given, checks that of this host, and those of all groups and nodes
/// with a file.
pub fn check(sources: &Sources) -> Result<CheckedFiles, Problems> {
    let mut scopes = vec![sources.node.clone()];
    if sources.node.is_none() {
        let (path, _) = sources.path();
        let mut others: Vec<_> = node_scope::file_scopes(directory_of(&path)).collect();
        others.sort_by(|a, b| (&a.group, &a.name).cmp(&(&b.group, &b.name)));
        scopes.extend(others.into_iter().map(Some));
    }
    let (mut files, mut warnings, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for node in scopes {
        match load(&Sources { node, ..sources.clone() }) {
            Ok(loaded) => {
                add_new(&mut files, loaded.files);
                add_new(&mut warnings, loaded.warnings);
            }
            Err(found) => add_new(&mut problems, found.0),
        }
    }
    if problems.is_empty() { Ok(CheckedFiles { files, warnings }) } else { Err(Problems(problems)) }
}

fn add_new<T: PartialEq>(known: &mut Vec<T>, found: Vec<T>) {
    for item in found {
        if !known.contains(&item) {
            known.push(item);
        }
    }
}

impl Sources {
    /// Returns the path of the configuration file, and true if it must exist.
    fn path(&self) -> (PathBuf, bool) {
        let named = self.file.clone().or_else(|| self.variables.get(FILE_VARIABLE).map(PathBuf::from));
        let must_exist = named.is_some();
        (named.unwrap_or_else(|| PathBuf::from(DEFAULT_FILE)), must_exist)
    }
}

fn directory_of(path: &Path) -> &Path {
    // The parent of a plain name is empty.
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Reads, merges and checks all sources.
pub fn load(sources: &Sources) -> Result<LoadedConfig, Problems> {
    let known = KnownKeys::new();
    let mut problems = Vec::new();
    let mut warnings = Vec::new();

    let (path, must_exist) = sources.path();
    let mut files = Vec::new();
    let mut tree = if let Some(read) = read_file(&path, &mut problems) {
        files.push(path.clone());
        read
    } else {
        if must_exist {
            problems.push(Problem::unreadable(&path, &io::Error::from(io::ErrorKind::NotFound)));
        }
        tree::empty(&path)
    };
    let directory = directory_of(&path);
    let mut dropped = Findings::default();
    files.extend(drop_ins::merge_keys(&mut tree, directory, &mut dropped));
    let has_scoped_files = node_scope::has_files(directory);
    let stored = || {
        stored_node(&tree, sources, &known).unwrap_or_else(|error| {
            warnings.push(error.to_string());
            None
        })
    };
    let node = has_scoped_files.then(|| sources.node.clone().or_else(stored)).flatten();
    for path in node.iter().flat_map(|node| node.files(directory)) {
        if let Some(read) = read_file(&path, &mut problems) {
            tree.merge(read);
            files.push(path);
        }
    }
    warnings.extend(node.as_ref().and_then(|node| node.missing_group_file(directory)));
    files.extend(drop_ins::add_guarantees(&mut tree, directory, &mut dropped));
    problems.extend(dropped.problems);
    warnings.extend(dropped.warnings);

    overlay(&mut tree, sources, &known, (&mut problems, &mut warnings));
    known.check(&mut tree, &mut problems);
    let given = tree.clone();
    let config = read_values(&mut tree, &mut problems);
    let numbered: Vec<_> =
        tree.remaining_indices(GUARANTEES_KEY).into_iter().zip(&config.guarantees).collect();
    let problem = |path: &[String], message| {
        let (Ok(origin) | Err(origin)) = given.origin_at(path).cloned().map_err(Clone::clone);
        let path = path.join(".");
        Problem { origin, message: format!("{path}: {message}"), path }
    };
    let declared = enforcement::problems(&numbered, |path| given.origin_at(path).ok());
    let kubelet_keys = kubelet_keys::problems(&config);
    problems.extend(declared.into_iter().chain(kubelet_keys).map(|(path, message)| problem(&path, message)));
    // Relations between values are checked only if all values are valid.
    if problems.is_empty() {
        let outgoing = outgoing::problems(&config.alerts, &config.otlp).into_iter();
        let between = control::problems(&config.control, config.listen)
            .into_iter()
            .chain(control::reading_problems(config.listen, &config.read_access()))
            .chain(outgoing.map(|(key, message)| (key.to_owned(), message)))
            .chain(
                cpu_power::problems(&config.enforcement.cpu_power)
                    .map(|(key, message)| (key.to_owned(), message)),
            )
            .chain(
                interleave_weights::problems(&config.enforcement.interleave_weights)
                    .map(|(key, message)| (key.to_owned(), message)),
            )
            .chain(resctrl::problems(&config.resctrl, &config.guarantees));
        problems.extend(between.map(|(key, message)| {
            let path: Vec<String> = key.split('.').map(str::to_owned).collect();
            problem(&path, message)
        }));
    }
    if problems.is_empty() {
        warnings.extend(control::warning(&config.control));
        warnings.extend(outgoing::warnings(&config.alerts, &config.otlp));
        warnings.extend(exported::warnings(&config.metrics));
        warnings.extend(kubelet_keys::warnings(&config));
        warnings.extend(secrets_that_others_read(&config, &given));
        warnings.extend(sockets_in_one_directory(&config));
        let origins = Origins(given);
        return Ok(LoadedConfig { config, files, node, has_scoped_files, origins, warnings });
    }
    drop_ins::number_within_files(&mut problems, &given);
    problems.sort_by(|a, b| a.origin.cmp(&b.origin));
    Err(Problems(problems))
}

/// Returns the tree of a configuration file; `None` if it does not exist.
fn read_file(path: &Path, problems: &mut Vec<Problem>) -> Option<TreeNode> {
    let text = match numaward_cgroup::read_text(path, MAX_FILE_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            problems.push(Problem::unreadable(path, &error));
            return Some(tree::empty(path));
        }
    };
    Some(tree::parse_mapping(&text, path, problems))
}

/// Returns the node that the daemon stored in its state directory, as far as the sources say where that is.
fn stored_node(tree: &TreeNode, sources: &Sources, known: &KnownKeys) -> io::Result<Option<NodeScope>> {
    let mut tree = tree.clone();
    // Their problems and warnings are reported when all files were read.
    overlay(&mut tree, sources, known, (&mut Vec::new(), &mut Vec::new()));
    let given = tree.to_json()["stateDirectory"].as_str().map(PathBuf::from);
    let directory = given.unwrap_or_else(|| Config::default().state_directory);
    NodeScope::stored(&directory).map_err(|error| {
        let message = format!(
            "{}: cannot be read: {error}; files of groups and nodes have no effect",
            NodeScope::path(&directory).display()
        );
        io::Error::new(error.kind(), message)
    })
}

/// Returns a warning if a configuration file has values that may be secrets, and any user may read it.
fn secrets_that_others_read(config: &Config, given: &TreeNode) -> Vec<String> {
    let origin = |key: &'static str| {
        let path: Vec<_> = key.split('.').map(str::to_owned).collect();
        given.origin_at(&path).ok().map(|origin| (key, origin.clone()))
    };
    let in_file = config.secret_keys().filter_map(origin).filter_map(|(key, origin)| match origin {
        Origin::File { file, .. } => Some((file, key)),
        _ => None,
    });
    let warning = |(file, keys): (PathBuf, Vec<&str>)| {
        let mode = std::fs::metadata(&file).ok()?.permissions().mode();
        (mode & OTHERS_READ != 0).then(|| {
            format!(
                "{}: any user may read this file (mode {:04o}), and {} may hold secrets: give it mode 0600, or the secrets in \
                 files of their own (otlp.tokenFile, alerts.tokenFile)",
                file.display(),
                mode & 0o7777,
                keys.join(", ")
            )
        })
    };
    let mut by_file: BTreeMap<PathBuf, Vec<&str>> = BTreeMap::new();
    in_file.for_each(|(file, key)| by_file.entry(file).or_default().push(key));
    by_file.into_iter().filter_map(warning).collect()
}

/// Returns a warning if a mount of the directory of the PodResources socket includes the control socket.
fn sockets_in_one_directory(config: &Config) -> Option<String> {
    let served = config.kubernetes.pod_resources.socket.as_deref()?;
    served.parent().is_some_and(|directory| config.control_socket.starts_with(directory)).then(|| {
        format!(
            "kubernetes.podResources.socket: {} is in the directory of the control socket, or above it: root in a pod that mounts it can \
             change guarantees; give the socket a directory of its own",
            served.display()
        )
    })
}

/// Parses a YAML text that is not numaward's configuration.
pub fn read_yaml(text: &str, file: &Path) -> Result<serde_json::Value, Problems> {
    let mut problems = Vec::new();
    let tree = tree::parse(text, file, &mut problems);
    if problems.is_empty() { Ok(tree.to_json()) } else { Err(Problems(problems)) }
}

/// Overrides the values of the file with those of variables and flags.
fn overlay(
    tree: &mut TreeNode,
    sources: &Sources,
    known: &KnownKeys,
    (problems, warnings): (&mut Vec<Problem>, &mut Vec<String>),
) {
    let keys: BTreeMap<String, &[String]> = known.leaves().map(|path| (variable_name(path), path)).collect();
    let ours = sources.variables.iter().filter(|(name, _)| name.starts_with(VARIABLE_PREFIX));
    let is_value = |name: &str| name != FILE_VARIABLE && !CLIENT_VARIABLES.contains(&name);
    for (name, text) in ours.filter(|(name, _)| is_value(name)) {
        let Some(path) = keys.get(name) else {
            // This is not an error: Kubernetes sets variables in each container that are named after services, and a
            // service may be called numaward.
            let hint =
                closest(name, keys.keys()).map_or(String::new(), |key| format!("; did you mean {key}?"));
            warnings.push(format!("variable {name} has no effect{hint}"));
            continue;
        };
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        let origin = Origin::Variable { variable: name.clone() };
        match flag_forms::form(&path).map(|form| (form, form.parse(text))) {
            None => tree.set(&path, known.scalar(&path, text), &origin),
            // Each gate is set separately, as by the kubelet's flag.
            Some((Form::Gates, Ok(serde_json::Value::Object(gates)))) => {
                for (gate, is_on) in gates {
                    tree.set(&[&path[..], &[gate.as_str()]].concat(), is_on, &origin);
                }
            }
            Some((_, Ok(value))) => tree.set(&path, value, &origin),
            Some((_, Err(problem))) => {
                let path = path.join(".");
                problems.push(Problem { origin, message: format!("{path}: {problem}"), path });
            }
        }
    }
    for flag in &sources.flags {
        let path: Vec<&str> = flag.key.split('.').collect();
        tree.set(&path, known.scalar(&path, &flag.value), &Origin::Flag { flag: flag.name.to_owned() });
    }
}

/// Returns the variables of all keys, each with its key.
pub fn key_variables() -> Vec<(String, String)> {
    let keys = KnownKeys::new();
    let mut variables: Vec<_> = keys.leaves().map(|path| (variable_name(path), path.join("."))).collect();
    variables.sort_unstable();
    variables
}

/// Returns the variable of a key: `NUMAWARD_LOG_LEVEL` for `log.level`, `NUMAWARD_HOST_ROOT` for `hostRoot`,
/// `NUMAWARD_RESERVED_SYSTEM_CPUS` for `reservedSystemCPUs`.
pub(super) fn variable_name(path: &[String]) -> String {
    let mut name = VARIABLE_PREFIX.trim_end_matches('_').to_owned();
    for key in path {
        name.push('_');
        let mut before = 'A';
        for c in key.chars() {
            if c.is_ascii_uppercase() && !before.is_ascii_uppercase() {
                name.push('_');
            }
            name.push(c.to_ascii_uppercase());
            before = c;
        }
    }
    name
}

/// Deserializes the tree, and removes invalid values until the rest is valid.
fn read_values(tree: &mut TreeNode, problems: &mut Vec<Problem>) -> Config {
    let mut taken_out: BTreeSet<String> = problems.iter().map(|problem| problem.path.clone()).collect();
    loop {
        let error = match serde_path_to_error::deserialize::<_, Config>(tree.to_json()) {
            Ok(config) => return config,
            Err(error) => error,
        };
        let mut path: Vec<String> = error
            .path()
            .iter()
            .filter_map(|segment| match segment {
                serde_path_to_error::Segment::Map { key } => Some(key.clone()),
                serde_path_to_error::Segment::Seq { index } => Some(index.to_string()),
                serde_path_to_error::Segment::Enum { .. } | serde_path_to_error::Segment::Unknown => None,
            })
            .collect();
        let removed = tree.remove(&mut path);
        let key = path.join(".");
        let name = if key.is_empty() { String::new() } else { format!("{key}: ") };
        let found = removed.is_some();
        // A field that was removed before is not missing.
        let is_missing = |field: &str| taken_out.contains(&format!("{key}.{field}"));
        let message = error.inner().to_string();
        if found
            && message
                .strip_prefix("missing field `")
                .and_then(|rest| rest.strip_suffix('`'))
                .is_some_and(is_missing)
        {
            continue;
        }
        taken_out.insert(key.clone());
        problems.push(Problem {
            origin: removed.unwrap_or_else(|| tree.origin.clone()),
            path: key,
            message: format!("{name}{message}"),
        });
        if !found {
            return Config::default();
        }
    }
}

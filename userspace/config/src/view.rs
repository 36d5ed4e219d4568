//! The effective configuration for display: file, variables, flags and defaults together.
//!
//! It contains no secrets. Tokens and keys are in separate files, and only their paths are shown. Headers for a
//! collector the path of a webhook and the query of a receiver's URL may contain secrets, and are hidden.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use super::{Config, HttpUrl, tree::resolve};

/// The text shown instead of a hidden value.
const HIDDEN_TEXT: &str = "hidden";

impl Config {
    /// Returns all keys with a value. Keys with a default that depends on the machine have none.
    pub fn view(&self) -> serde_json::Result<Json> {
        let mut view = self.without_secrets();
        view.memory_manager_policy = Some(self.memory_policy());
        view.cpu_manager_policy = Some(self.cpu_policy());
        view.topology_manager_policy = Some(self.topology_policy());
        view.topology_manager_scope = Some(self.topology_scope());
        view.eviction_hard = self.thresholds();
        let mut view = serde_json::to_value(view)?;
        drop_nulls(&mut view);
        Ok(view)
    }

    /// Returns the differences from the defaults, in the form `log.level: debug`.
    pub fn differences(&self) -> serde_json::Result<Vec<String>> {
        let mut differences = Vec::new();
        let (default, shown) =
            (serde_json::to_value(Self::default())?, serde_json::to_value(self.without_secrets())?);
        for_each_difference(&default, &shown, &mut |path, value| {
            let path = path.join(".");
            differences.push(match value {
                Json::String(text) => format!("{path}: {text}"),
                _ => format!("{path}: {value}"),
            });
        });
        Ok(differences)
    }

    fn without_secrets(&self) -> Self {
        let mut shown = self.clone();
        shown.otlp.headers.values_mut().for_each(|value| HIDDEN_TEXT.clone_into(value));
        if let Some(url) = shown.alerts.webhook.as_mut()
            && url.0.path_and_query().is_some_and(|path| path != "/")
        {
            show_instead(url, &format!("/{HIDDEN_TEXT}"));
        }
        if let Some(url) = shown.otlp.endpoint.as_mut()
            && url.0.query().is_some()
        {
            let path = url.0.path().to_owned();
            show_instead(url, &format!("{path}?{HIDDEN_TEXT}"));
        }
        shown
    }

    /// The keys with a value that is a secret, or may be one, such as a header of OTLP.
    pub(super) fn secret_keys(&self) -> impl Iterator<Item = &'static str> {
        let shown = self.without_secrets();
        [
            ("otlp.headers", shown.otlp.headers != self.otlp.headers),
            ("otlp.endpoint", shown.otlp.endpoint != self.otlp.endpoint),
            ("alerts.webhook", shown.alerts.webhook != self.alerts.webhook),
        ]
        .into_iter()
        .filter_map(|(key, is_secret)| is_secret.then_some(key))
    }
}

/// Puts another path and query in place of those of the URL.
fn show_instead(url: &mut HttpUrl, path_and_query: &str) {
    if let (Some(scheme), Some(authority)) = (url.0.scheme_str(), url.0.authority())
        && let Ok(shown) = format!("{scheme}://{authority}{path_and_query}").parse()
    {
        *url = shown;
    }
}

fn drop_nulls(value: &mut Json) {
    match value {
        Json::Object(entries) => {
            entries.retain(|_, value| !value.is_null());
            entries.values_mut().for_each(drop_nulls);
        }
        Json::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Calls a function with the path and the value of each entry of a mapping and of those in it. A list is one value.
pub(super) fn for_each_value(value: &Json, visit: &mut dyn FnMut(&[&str], &Json)) {
    for_each_difference(&Json::Null, value, visit);
}

/// Calls a function with the path and the new value of each entry that differs. A list is one value.
pub(super) fn for_each_difference<'a>(old: &'a Json, new: &'a Json, visit: &mut dyn FnMut(&[&str], &Json)) {
    visit_differences(old, new, &mut Vec::new(), visit);
}

fn visit_differences<'a>(
    old: &'a Json,
    new: &'a Json,
    path: &mut Vec<&'a str>,
    visit: &mut dyn FnMut(&[&str], &Json),
) {
    let entries = |value: &'a Json| value.as_object().filter(|entries| !entries.is_empty());
    match (entries(old), entries(new)) {
        (None, None) if old != new => visit(path, new),
        (None, None) => {}
        (old_entries, new_entries) => {
            let keys = [old_entries, new_entries].into_iter().flatten().flat_map(serde_json::Map::keys);
            for key in keys.collect::<BTreeSet<_>>() {
                path.push(key);
                visit_differences(&old[key], &new[key], path, visit);
                path.pop();
            }
        }
    }
}

/// Formats a value as YAML.
pub fn yaml(value: &Json) -> String {
    lines(value).into_iter().fold(String::new(), |text, line| text + &line + "\n")
}

/// Formats a mapping as YAML, with a comment for each value of it and of the mappings in it, and for each mapping in a list.
pub(super) fn yaml_with_comments(value: &Json, comment: &dyn Fn(&[&str]) -> String) -> String {
    commented_lines(value, &mut Vec::new(), comment)
        .into_iter()
        .fold(String::new(), |text, line| text + &line + "\n")
}

fn commented_lines<'a>(
    value: &'a Json,
    path: &mut Vec<&'a str>,
    comment: &dyn Fn(&[&str]) -> String,
) -> Vec<String> {
    let mut all = Vec::new();
    for (key, value) in value.as_object().into_iter().flatten() {
        path.push(key);
        let name = scalar(key);
        if value.is_object() && is_block(value) {
            all.push(format!("{name}:"));
            all.extend(indented(commented_lines(value, path, comment)));
        } else if is_block(value) {
            all.push(format!("{name}:  # {}", comment(path)));
            all.extend(indented(commented_items(value, path, comment)));
        } else {
            all.push(format!("{name}: {}  # {}", lines(value).concat(), comment(path)));
        }
        path.pop();
    }
    all
}

/// Formats a list. Each mapping in it has a comment, because several files may contribute to the list.
fn commented_items(value: &Json, path: &[&str], comment: &dyn Fn(&[&str]) -> String) -> Vec<String> {
    let Some(items) = value.as_array() else { return lines(value) };
    let mut all = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let start = all.len();
        all.extend(list_item(item));
        let number = number.to_string();
        let place = [path, &[number.as_str()]].concat();
        if let Some(first) = all.get_mut(start).filter(|_| item.is_object()) {
            first.push_str("  # ");
            first.push_str(&comment(&place));
        }
    }
    all
}

/// Formats an item of a list.
fn list_item(item: &Json) -> impl Iterator<Item = String> {
    let lines = lines(item).into_iter().enumerate();
    lines.map(|(number, line)| if number == 0 { format!("- {line}") } else { format!("  {line}") })
}

fn indented(lines: Vec<String>) -> impl Iterator<Item = String> {
    lines.into_iter().map(|line| format!("  {line}"))
}

fn lines(value: &Json) -> Vec<String> {
    match value {
        Json::Object(entries) if !entries.is_empty() => entries
            .iter()
            .flat_map(|(key, value)| {
                let key = scalar(key);
                if is_block(value) {
                    [format!("{key}:")].into_iter().chain(indented(lines(value))).collect()
                } else {
                    vec![format!("{key}: {}", lines(value).concat())]
                }
            })
            .collect(),
        Json::Array(items) if !items.is_empty() => items.iter().flat_map(list_item).collect(),
        Json::String(text) => vec![scalar(text)],
        // YAML and JSON write other values alike.
        other => vec![other.to_string()],
    }
}

/// Returns true if a value needs its own lines.
fn is_block(value: &Json) -> bool {
    match value {
        Json::Object(entries) => !entries.is_empty(),
        Json::Array(items) => !items.is_empty(),
        _ => false,
    }
}

/// Formats a text, quoted if a reader of YAML 1.1 or 1.2 could interpret it as another type.
fn scalar(text: &str) -> String {
    const WORDS: [&str; 6] = ["y", "n", "yes", "no", "on", "off"];
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/')
        && !text.ends_with(':')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./:@".contains(c))
        && !WORDS.contains(&text.to_ascii_lowercase().as_str())
        && resolve(text).is_string();
    if is_plain { text.to_owned() } else { Json::from(text).to_string() }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::{Sources, load};

    fn read(text: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.yaml");
        std::fs::write(&file, text).unwrap();
        load(&Sources { file: Some(file), ..Sources::default() }).unwrap().config
    }

    const FILE: &str = "\
log: {level: debug}
enforcement: {mode: off}
kubeletVersion: '1.32'
strategy: kubelet
kubeReserved: {cpu: 500m, memory: 1Gi}
reservedMemory: [{numaNode: 0, limits: {memory: 1124Mi}}]
memoryTiers: {2: cxl}
featureGates: {MemoryQoS: true}
guarantees:
- {unit: 'db@*.service', cpus: 4, memory: 8Gi, placement: {with: ['a b', \"it's: \\\"x\\\"\", 'on']}}
- {cgroup: /batch/*, memory: 1Gi}
";

    #[test]
    fn view_survives_round_trip() {
        let config = read(FILE);
        for config in [config, Config::default()] {
            let view = config.view().unwrap();
            let text = yaml(&view);
            let again = read(&text);
            assert_eq!(again.view().unwrap(), view, "{text}");
            // Apart from the added defaults, the result equals the configuration.
            let filled = Config {
                memory_manager_policy: again.memory_manager_policy,
                cpu_manager_policy: again.cpu_manager_policy,
                topology_manager_policy: again.topology_manager_policy,
                topology_manager_scope: again.topology_manager_scope,
                eviction_hard: again.eviction_hard.clone(),
                ..config
            };
            assert_eq!(again, filled, "{text}");
        }
    }

    #[test]
    fn view_contains_fixed_defaults() {
        let text = yaml(&read(FILE).view().unwrap());
        for line in [
            "memoryManagerPolicy: Static",
            "cpuManagerPolicy: static",
            "topologyManagerPolicy: restricted",
            "evictionHard:\n  memory.available: 100Mi",
            "kubeletVersion: \"1.32\"",
            "  mode: \"off\"",
            "listen: 127.0.0.1:9560",
            "  - cpus: ",
            "memoryTiers:\n  \"2\": cxl",
            "cpuManagerPolicyOptions: {}",
        ] {
            assert!(text.contains(line), "{line}:\n{text}");
        }
        assert!(!text.contains("null") && !text.contains("reservedSystemCPUs"), "{text}");
    }

    #[test]
    fn lists_differences_from_defaults() {
        assert_eq!(Config::default().differences().unwrap(), [""; 0]);
        let file = "log: {level: debug, format: text}\nstrategy: kubelet\nfeatureGates: {MemoryQoS: true}\n\
            hostRoot: /\nguardExempt: [/a/**]\nprobes: {slots: 7}";
        let expected = [
            "featureGates.MemoryQoS: true",
            "guardExempt: [\"/a/**\"]",
            "log.level: debug",
            "probes.slots: 7",
            "strategy: kubelet",
        ];
        assert_eq!(read(file).differences().unwrap(), expected);
    }

    #[test]
    fn view_hides_secrets() {
        let config = read(
            "otlp: {endpoint: 'http://c:4318/in?key=s3cret', headers: {authorization: Bearer s3cret}, tokenFile: /t}\n\
             alerts: {webhook: 'https://hooks.example:8443/services/s3cret?key=s3cret'}",
        );
        let (view, differences) = (config.view().unwrap(), config.differences().unwrap());
        assert_eq!(view["otlp"]["headers"]["authorization"], HIDDEN_TEXT);
        assert_eq!(view["otlp"]["endpoint"], "http://c:4318/in?hidden");
        assert_eq!(view["otlp"]["tokenFile"], "/t");
        assert_eq!(view["alerts"]["webhook"], "https://hooks.example:8443/hidden");
        let text = format!("{view} {differences:?}");
        assert!(!text.contains("s3cret"), "{text}");
        read(&yaml(&view));
    }
}

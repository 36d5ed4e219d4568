//! Checks of keys and ranges against the JSON schema of [`Config`], so that the published schema and the checks cannot
//! differ.

use serde_json::Value as Json;

use super::{
    config::Config,
    problem::Problem,
    tree::{TreeNode, Value, resolve},
};

/// Returns the JSON schema of the configuration, for editors and for the values of the Helm chart.
pub fn json_schema() -> Json {
    let settings = schemars::generate::SchemaSettings::draft2020_12().with(|settings| {
        // The checks descend through the schema, which is simpler without references.
        settings.inline_subschemas = true;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<Config>().to_value();
    if let Some(schema) = schema.as_object_mut() {
        schema.insert("title".to_owned(), "numaward configuration".into());
    }
    schema
}

/// The keys of the configuration.
pub(super) struct KnownKeys {
    schema: Json,
    leaves: Vec<Vec<String>>,
}

impl KnownKeys {
    pub(super) fn new() -> Self {
        let schema = json_schema();
        let mut leaves = Vec::new();
        collect_leaves(&schema, &mut Vec::new(), &mut leaves);
        Self { schema, leaves }
    }

    /// Returns the path of every key that holds a value.
    pub(super) fn leaves(&self) -> impl Iterator<Item = &[String]> {
        self.leaves.iter().map(Vec::as_slice)
    }

    /// Converts the text of a variable or flag to a value for this key.
    pub(super) fn scalar(&self, path: &[&str], text: &str) -> Json {
        let mut schema = &self.schema;
        for key in path {
            schema = &schema["properties"][*key];
        }
        if has_type(schema, "boolean") || has_type(schema, "integer") || has_type(schema, "number") {
            resolve(text)
        } else {
            text.into()
        }
    }

    /// Removes unknown keys and numbers out of range from the tree, and reports them.
    pub(super) fn check(&self, tree: &mut TreeNode, problems: &mut Vec<Problem>) {
        self.check_below(tree, &self.schema, &mut Vec::new(), problems);
    }

    fn check_below(
        &self,
        node: &mut TreeNode,
        schema: &Json,
        path: &mut Vec<String>,
        problems: &mut Vec<Problem>,
    ) {
        if let Value::Sequence(nodes) = &mut node.value {
            for (index, node) in nodes.iter_mut().enumerate() {
                path.push(index.to_string());
                self.check_below(node, &schema["items"], path, problems);
                path.pop();
            }
            return;
        }
        let Value::Mapping(entries) = &mut node.value else { return };
        if schema["additionalProperties"]["properties"].is_object() {
            for entry in entries {
                path.push(entry.key.clone());
                self.check_below(&mut entry.node, &schema["additionalProperties"], path, problems);
                path.pop();
            }
            return;
        }
        let Some(properties) = schema["properties"].as_object() else { return };
        entries.retain_mut(|entry| {
            path.push(entry.key.clone());
            let problem = match properties.get(&entry.key) {
                None => Some((entry.origin.clone(), self.unknown(path, properties.keys()))),
                Some(schema) => {
                    self.check_below(&mut entry.node, schema, path, problems);
                    out_of_range(&entry.node, schema)
                        .map(|message| (entry.node.origin.clone(), format!("{}: {message}", path.join("."))))
                }
            };
            let keep = problem.is_none();
            if let Some((origin, message)) = problem {
                problems.push(Problem { origin, path: path.join("."), message });
            }
            path.pop();
            keep
        });
    }

    fn unknown<'a>(&self, path: &[String], siblings: impl Iterator<Item = &'a String> + Clone) -> String {
        let Some((key, parents)) = path.split_last() else { return String::new() };
        let place = if parents.is_empty() { String::new() } else { format!(" in {:?}", parents.join(".")) };
        let hint = if let Some(sibling) = closest(key, siblings.clone()) {
            format!("did you mean {sibling:?}?")
        } else if let Some(leaf) = self.leaves.iter().find(|leaf| leaf.last() == Some(key)) {
            format!("did you mean {:?}?", leaf.join("."))
        } else {
            let all: Vec<&str> = siblings.map(String::as_str).collect();
            format!("known keys are {}", all.join(", "))
        };
        format!("unknown key {key:?}{place}; {hint}")
    }
}

fn collect_leaves(schema: &Json, path: &mut Vec<String>, leaves: &mut Vec<Vec<String>>) {
    let Some(properties) = schema["properties"].as_object() else {
        leaves.push(path.clone());
        return;
    };
    for (key, schema) in properties {
        path.push(key.clone());
        collect_leaves(schema, path, leaves);
        path.pop();
    }
}

fn has_type(schema: &Json, name: &str) -> bool {
    match &schema["type"] {
        Json::String(one) => one == name,
        Json::Array(several) => several.iter().any(|one| one == name),
        _ => false,
    }
}

fn out_of_range(node: &TreeNode, schema: &Json) -> Option<String> {
    let Value::Scalar(Json::Number(number)) = &node.value else { return None };
    let value = number.as_f64()?;
    let (min, max) = (schema["minimum"].as_f64()?, schema["maximum"].as_f64()?);
    (value < min || value > max).then(|| format!("{number} is not between {min} and {max}"))
}

/// Returns the candidate that is most similar to a name, if it is similar enough.
pub(super) fn closest<'a>(name: &str, candidates: impl Iterator<Item = &'a String>) -> Option<&'a str> {
    let lower = name.to_ascii_lowercase();
    candidates
        .map(|candidate| {
            (strsim::damerau_levenshtein(&lower, &candidate.to_ascii_lowercase()), candidate.as_str())
        })
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len().min(name.len()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

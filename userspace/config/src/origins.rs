//! The source of each value of a loaded configuration.

use serde_json::Value as Json;

use super::{
    load::LoadedConfig,
    problem::Origin,
    view::{self, yaml_with_comments},
};

/// A value of the configuration with its source.
#[derive(Debug, PartialEq, serde::Serialize)]
pub struct SourcedValue {
    /// The key, with dots.
    pub key: String,
    pub value: Json,
    /// `None` for a default.
    pub origin: Option<Origin>,
    /// Sources of the mappings in a list, in order. Empty for other values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elements: Vec<Origin>,
}

/// A key with different values in two configurations.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{key} ({})", origin.as_ref().map_or_else(|| "default".to_owned(), ToString::to_string))]
pub struct ChangedKey {
    /// The key, with dots.
    pub key: String,
    /// The source of the new value, or of the first different element of a list; `None` for a default.
    pub origin: Option<Origin>,
}

impl LoadedConfig {
    /// Returns all values of the configuration with their sources. A list is one value.
    pub fn sourced_values(&self) -> serde_json::Result<Vec<SourcedValue>> {
        let mut values = Vec::new();
        view::for_each_value(&self.config.view()?, &mut |path, value| {
            let origin = self.origins.origin(path).cloned();
            let elements = value.as_array().into_iter().flatten().enumerate();
            let elements = elements.filter(|(_, element)| element.is_object());
            let elements = elements.filter_map(|(index, _)| self.element_origin(path, index)).collect();
            values.push(SourcedValue { key: path.join("."), value: value.clone(), origin, elements });
        });
        Ok(values)
    }

    /// Formats the configuration as YAML, with the source of each value as a comment.
    pub fn yaml_with_origins(&self) -> serde_json::Result<String> {
        let comment =
            |path: &[&str]| self.origins.origin(path).map_or_else(|| "default".to_owned(), Origin::to_string);
        Ok(yaml_with_comments(&self.config.view()?, &comment))
    }

    /// Returns the keys with other values than in an older configuration.
    pub fn changed_keys(&self, old: &Self) -> serde_json::Result<Vec<ChangedKey>> {
        // Secrets have to be compared, and are not in the result.
        let (old, new) = (serde_json::to_value(&old.config)?, serde_json::to_value(&self.config)?);
        let mut changed = Vec::new();
        view::for_each_difference(&old, &new, &mut |path, value| {
            let old = path.iter().fold(&old, |value, key| &value[*key]);
            let pairs = value.as_array().into_iter().flatten().zip(old.as_array().into_iter().flatten());
            let equal = pairs.take_while(|(new, old)| new == old).count();
            let origin = self.element_origin(path, equal).or_else(|| self.origins.origin(path).cloned());
            changed.push(ChangedKey { key: path.join("."), origin });
        });
        Ok(changed)
    }

    /// Returns the source of an element of a list; `None` if the value is no list, or shorter.
    fn element_origin(&self, path: &[&str], index: usize) -> Option<Origin> {
        self.origins.origin(&[path, &[index.to_string().as_str()]].concat()).cloned()
    }
}

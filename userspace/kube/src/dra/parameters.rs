//! Opaque parameters of a claim or of its device class, in the words of a placement.
//!
//! They are a `Placement` of `numaward.io/v1alpha1`. The scheduler copies them into the status of the claim: first those of the class, then
//! those of the claim, each for some requests or for all. A field in later parameters replaces that of earlier ones.
//!
//! The device decides on the node, so fields that choose nodes are refused.

use std::collections::{BTreeMap, BTreeSet};

use numaward_engine::{Terms, policy::CpuKind};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

/// Version and kind of the parameters.
const API_VERSION: &str = "numaward.io/v1alpha1";
const KIND: &str = "Placement";

/// Maximum size of the parameters; that of Kubernetes.
const MAX_BYTES: usize = 10 << 10;
/// Maximum length of the name of a class.
const MAX_CLASS_LEN: usize = 32;
/// Number of characters of a field's name in an error.
const MAX_SHOWN_CHARS: usize = 64;

/// Fields that parameters can have, for errors.
const FIELDS: &str =
    "apiVersion, kind, cpuKinds, sameCache, hideSiblings, isolate, resctrlClass and immovable";

/// Reason why parameters are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}; possible: {possible}")]
pub struct ParameterError {
    field: String,
    problem: String,
    possible: &'static str,
}

impl ParameterError {
    fn new(field: &str, problem: impl Into<String>, possible: &'static str) -> Self {
        let field = field.chars().take(MAX_SHOWN_CHARS).collect::<String>().escape_debug().to_string();
        Self { field, problem: problem.into(), possible }
    }
}

/// Returns the value of a field.
fn value<T: DeserializeOwned>(
    field: &str,
    text: &RawValue,
    possible: &'static str,
) -> Result<T, ParameterError> {
    serde_json::from_str(text.get()).map_err(|_| ParameterError::new(field, "it has another value", possible))
}

/// Adds parameters to the terms of a part of a claim.
///
/// # Errors
///
/// The parameters are not a placement, or a field is not one of a device on one node.
pub fn apply(text: &str, terms: &mut Terms) -> Result<(), ParameterError> {
    if text.len() > MAX_BYTES {
        let problem = format!("they have {} bytes", text.len());
        return Err(ParameterError::new("parameters", problem, "at most 10 KiB"));
    }
    let fields: BTreeMap<String, &RawValue> = serde_json::from_str(text)
        .map_err(|_| ParameterError::new("parameters", "they are not an object", FIELDS))?;
    for (field, expected) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        let found = fields.get(field).map(|text| value::<String>(field, text, expected)).transpose()?;
        if found.as_deref() != Some(expected) {
            let problem = if found.is_some() { "it has another value" } else { "it is missing" };
            return Err(ParameterError::new(field, problem, expected));
        }
    }
    for (field, text) in &fields {
        let flag = || value::<bool>(field, text, "true or false");
        match field.as_str() {
            "apiVersion" | "kind" => {}
            "cpuKinds" => {
                let possible = "a list of performance, efficiency, high-frequency, isolated and nohz-full";
                terms.cpu_kinds = value::<BTreeSet<CpuKind>>(field, text, possible)?;
            }
            "sameCache" => terms.same_cache = flag()?,
            "hideSiblings" => terms.hide_siblings = flag()?,
            "isolate" => terms.isolate = flag()?,
            "resctrlClass" => {
                let possible = "the name of a class, of 1 to 32 characters";
                let class: String = value(field, text, possible)?;
                if !(1..=MAX_CLASS_LEN).contains(&class.len()) {
                    return Err(ParameterError::new(field, format!("{} bytes", class.len()), possible));
                }
                terms.resctrl_class = Some(class);
            }
            "immovable" => {
                if !flag()? {
                    let problem = "the scheduler chose the node, so that the claim never moves";
                    return Err(ParameterError::new(field, problem, "true"));
                }
            }
            _ => {
                return Err(ParameterError::new(field, "a device on one node has no such parameter", FIELDS));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the terms of parameters with these fields in addition to version and kind.
    fn read(fields: &str, terms: Terms) -> Result<Terms, String> {
        let text = format!(r#"{{"apiVersion": "numaward.io/v1alpha1", "kind": "Placement"{fields}}}"#);
        let mut terms = terms;
        apply(&text, &mut terms).map(|()| terms).map_err(|error| error.to_string())
    }

    #[test]
    fn later_fields_replace_earlier_ones() {
        let class = r#", "cpuKinds": ["performance"], "hideSiblings": true, "sameCache": true, "isolate": true, "resctrlClass": "db""#;
        let of_class = read(class, Terms::default()).unwrap();
        let expected = Terms {
            cpu_kinds: [CpuKind::Performance].into(),
            hide_siblings: true,
            same_cache: true,
            isolate: true,
            resctrl_class: Some("db".to_owned()),
            ..Terms::default()
        };
        assert_eq!(of_class, expected);
        let claim = r#", "cpuKinds": [], "hideSiblings": false, "immovable": true"#;
        let merged = Terms { cpu_kinds: BTreeSet::new(), hide_siblings: false, ..expected };
        assert_eq!(read(claim, of_class), Ok(merged));
        assert_eq!(read("", Terms::default()), Ok(Terms::default()));
    }

    #[test]
    fn other_fields_and_values_are_refused() {
        let long = format!(r#", "resctrlClass": "{}""#, "x".repeat(33));
        let huge = format!(r#", "resctrlClass": "{}""#, "x".repeat(MAX_BYTES));
        for (fields, expected) in [
            (
                r#", "nodes": "0""#,
                "nodes: a device on one node has no such parameter; possible: apiVersion, kind, cpuKinds",
            ),
            (r#", "memoryPolicy": "bind""#, "memoryPolicy: a device on one node has no such parameter"),
            (r#", "sameCache": "yes""#, "sameCache: it has another value; possible: true or false"),
            (
                r#", "cpuKinds": ["fast"]"#,
                "cpuKinds: it has another value; possible: a list of performance, efficiency",
            ),
            (r#", "cpuKinds": "performance""#, "cpuKinds: it has another value"),
            (r#", "immovable": false"#, "immovable: the scheduler chose the node"),
            (r#", "resctrlClass": """#, "resctrlClass: 0 bytes; possible: the name of a class"),
            (&long, "resctrlClass: 33 bytes"),
            (&huge, "parameters: they have 103"),
            (r#", "kind": "Other""#, "kind: it has another value; possible: Placement"),
            (
                r#", "apiVersion": "numaward.io/v2""#,
                "apiVersion: it has another value; possible: numaward.io/v1alpha1",
            ),
            (", ", "parameters: they are not an object"),
        ] {
            let error = read(fields, Terms::default()).unwrap_err();
            assert!(error.starts_with(expected), "{expected}: {error}");
        }
        let error = |text: &str| apply(text, &mut Terms::default()).unwrap_err().to_string();
        assert_eq!(error("{}"), "apiVersion: it is missing; possible: numaward.io/v1alpha1");
        assert!(error("[]").starts_with("parameters: they are not an object"));
        let name = error(&format!(
            r#"{{"apiVersion": "numaward.io/v1alpha1", "kind": "Placement", "{}\n": 1}}"#,
            "x".repeat(100)
        ));
        assert!(name.starts_with(&format!("{}: a device", "x".repeat(MAX_SHOWN_CHARS))), "{name}");
    }
}

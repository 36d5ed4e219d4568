//! Shares of L3 caches and memory bandwidth.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    str::FromStr,
};

use educe::Educe;
use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;

use super::{enforcement::DeclaredGuarantee, inline_schema::inline_schema};

/// Shares of L3 caches and memory bandwidth for workloads with a guarantee (the kernel's resctrl), and metrics of their
/// use. Only if guarantees are enforced. Default: nothing is read or written.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Resctrl {
    /// The mount point of resctrl on the host. numaward does not mount it.
    #[educe(Default(expression = PathBuf::from("/sys/fs/resctrl")))]
    pub root: PathBuf,
    /// Monitoring of the caches and memory bandwidth that workloads with a guarantee use: `off` or `guaranteed`. A
    /// processor can monitor some tens to hundreds of workloads.
    pub monitor: Monitor,
    /// Classes by name: lower-case letters, digits and `-`. A workload joins a class by request (`resctrlClass`).
    pub classes: BTreeMap<ClassName, Class>,
}

impl Resctrl {
    /// Returns true if resctrl is read or written.
    pub fn is_used(&self) -> bool {
        self.monitor != Monitor::Off || !self.classes.is_empty()
    }
}

/// The workloads to monitor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Monitor {
    /// No workloads.
    #[default]
    Off,
    /// All workloads with a guarantee.
    Guaranteed,
}

/// A class: the share that its workloads have together on each cache. At least one of the keys must be given.
#[skip_serializing_none]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Class {
    /// The number of ways of the L3 cache. Classes get different ways, from the lowest free way, in the order of their
    /// names, exclusive classes first. Default: all ways except those of exclusive classes.
    #[schemars(range(min = 1, max = 32))]
    pub l3_ways: Option<u32>,
    /// The percentage of all ways of the L3 cache, rounded down. Either this or `l3Ways`.
    #[schemars(range(min = 1, max = 100))]
    pub l3_percent: Option<u32>,
    /// The maximum percentage of the memory bandwidth, rounded up to a step of the processor. Default: 100.
    #[schemars(range(min = 1, max = 100))]
    pub memory_bandwidth_percent: Option<u32>,
    /// Reserves the ways of the class: they are taken from resctrl's default group while a workload is in the class,
    /// and returned afterwards. Needs `l3Ways` or `l3Percent`. Default: false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub exclusive: bool,
}

/// The name of a class.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
pub struct ClassName(String);

impl ClassName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ClassName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_name = text.bytes().next().is_some_and(is_plain)
            && text.len() <= 32
            && text.bytes().all(|byte| is_plain(byte) || byte == b'-');
        if !is_name {
            return Err(format!(
                "{text:?} is not a class name; expected up to 32 lower-case letters, digits and -, such as batch"
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

serde_as_text!(ClassName);

inline_schema!(ClassName, { "type": "string", "examples": ["batch"] });

/// Returns the problems of classes, and of guarantees with an unknown class: the key, and the problem.
pub(super) fn problems(resctrl: &Resctrl, guarantees: &[DeclaredGuarantee]) -> Vec<(String, String)> {
    let Resctrl { root, classes, .. } = resctrl;
    let mut problems = Vec::new();
    if !root.is_absolute() {
        let problem = format!("{:?} does not begin with a slash", root.display().to_string());
        problems.push(("resctrl.root".to_owned(), problem));
    }
    let (mut ways, mut percent) = (0, 0);
    for (name, class) in classes {
        let at = |key: &str| format!("resctrl.classes.{name}{key}");
        match (class.l3_ways, class.l3_percent) {
            (Some(_), Some(_)) => {
                problems
                    .push((at(".l3Percent"), "l3Ways is given as well: give only one of the two".to_owned()));
            }
            (None, None) if class.memory_bandwidth_percent.is_none() => {
                let problem =
                    "give l3Ways, l3Percent or memoryBandwidthPercent: a class needs at least one of them";
                problems.push((at(""), problem.to_owned()));
            }
            (None, None) if class.exclusive => {
                let problem = "give l3Ways or l3Percent as well: an exclusive class reserves ways";
                problems.push((at(".exclusive"), problem.to_owned()));
            }
            _ => {}
        }
        for (key, value, sum, most, what) in [
            (".l3Ways", class.l3_ways, &mut ways, 32, "ways, more than the maximum of 32"),
            (".l3Percent", class.l3_percent, &mut percent, 100, "% of the ways, more than 100 %"),
        ] {
            let before = *sum;
            *sum += value.unwrap_or_default();
            if value.is_some() && before <= most && *sum > most {
                let problem = format!("with the classes before it, {sum} {what}; classes do not share ways");
                problems.push((at(key), problem));
            }
        }
    }
    let exclusive = classes.iter().filter(|(_, class)| class.exclusive);
    let exclusive: Vec<_> = exclusive.filter_map(|(name, class)| Some((name, class.l3_percent?))).collect();
    if let Some((name, _)) = exclusive.last()
        && exclusive.iter().map(|(_, percent)| percent).sum::<u32>() == 100
    {
        let problem = "exclusive classes use all ways; leave some for workloads without a class";
        problems.push((format!("resctrl.classes.{name}.l3Percent"), problem.to_owned()));
    }
    for (number, declared) in guarantees.iter().enumerate() {
        if let Some(problem) = declared
            .placement
            .resctrl_class
            .as_deref()
            .and_then(|class| unknown_class_problem(resctrl, class))
        {
            problems.push((format!("guarantees.{number}.placement.resctrlClass"), problem));
        }
    }
    problems
}

/// Returns the problem of a requested class that does not exist.
pub fn unknown_class_problem(resctrl: &Resctrl, class: &str) -> Option<String> {
    if resctrl.classes.keys().any(|name| name.as_str() == class) {
        return None;
    }
    let names: BTreeSet<&str> = resctrl.classes.keys().map(ClassName::as_str).collect();
    let class: String = class.chars().take(40).collect();
    Some(if names.is_empty() {
        format!("there is no class {class:?}: resctrl.classes in the daemon's configuration is empty")
    } else {
        let names: Vec<&str> = names.into_iter().collect();
        format!(
            "there is no class {class:?}; resctrl.classes in the daemon's configuration has {}",
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_invalid_class_names() {
        for text in ["batch", "0", "db-1", &"x".repeat(32)] {
            assert_eq!(text.parse::<ClassName>().unwrap().to_string(), text);
        }
        for text in ["", "-a", "Batch", "a/b", "..", "a b", "a.b", "a\n", &"x".repeat(33)] {
            assert!(text.parse::<ClassName>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn refuses_contradictory_classes() {
        for (text, expected) in [
            (r#"{"a": {"l3Ways": 4}, "b": {"l3Percent": 50}, "c": {"memoryBandwidthPercent": 10}}"#, &[][..]),
            (r#"{"a": {"l3Percent": 60}, "b": {"l3Percent": 40}}"#, &[]),
            (r#"{"a": {"l3Ways": 4, "l3Percent": 50}}"#, &["resctrl.classes.a.l3Percent"]),
            (r#"{"a": {}}"#, &["resctrl.classes.a"]),
            (r#"{"a": {"l3Ways": 4, "exclusive": true}}"#, &[]),
            (r#"{"a": {"l3Percent": 60, "exclusive": true}, "b": {"l3Percent": 40}}"#, &[]),
            (
                r#"{"a": {"l3Percent": 60, "exclusive": true}, "b": {"l3Percent": 40, "exclusive": true}}"#,
                &["resctrl.classes.b.l3Percent"],
            ),
            (r#"{"a": {"memoryBandwidthPercent": 10, "exclusive": true}}"#, &["resctrl.classes.a.exclusive"]),
            (
                r#"{"a": {"l3Percent": 60}, "b": {"l3Percent": 41}, "c": {"l3Percent": 1}}"#,
                &["resctrl.classes.b.l3Percent"],
            ),
            (r#"{"a": {"l3Ways": 20}, "b": {"l3Ways": 13}}"#, &["resctrl.classes.b.l3Ways"]),
        ] {
            let classes = serde_json::from_str(text).unwrap();
            let resctrl = Resctrl { classes, ..Resctrl::default() };
            let found: Vec<String> = problems(&resctrl, &[]).into_iter().map(|(key, _)| key).collect();
            assert_eq!(found, expected, "{text}");
        }
        let resctrl = Resctrl { root: "a".into(), ..Resctrl::default() };
        assert_eq!(problems(&resctrl, &[])[0].0, "resctrl.root");
        assert!(!resctrl.is_used(), "nothing is to be done by default");
    }

    #[test]
    fn unknown_class_lists_known_ones() {
        let of = |text: &str| Resctrl { classes: serde_json::from_str(text).unwrap(), ..Resctrl::default() };
        let two = of(r#"{"db": {"l3Ways": 4}, "batch": {"l3Ways": 1}}"#);
        assert_eq!(unknown_class_problem(&two, "db"), None);
        assert!(
            unknown_class_problem(&two, "dp").unwrap().ends_with("has batch, db"),
            "{:?}",
            unknown_class_problem(&two, "dp")
        );
        assert!(unknown_class_problem(&of("{}"), &"x".repeat(1 << 20)).unwrap().len() < 200);
        let declared = r#"[{"unit": "a.service", "memory": "1Gi", "placement": {"resctrlClass": "db"}},
            {"unit": "b.service", "memory": "1Gi", "placement": {"resctrlClass": "dp"}}]"#;
        let declared: Vec<DeclaredGuarantee> = serde_json::from_str(declared).unwrap();
        let found: Vec<String> = problems(&two, &declared).into_iter().map(|(key, _)| key).collect();
        assert_eq!(found, ["guarantees.1.placement.resctrlClass"]);
    }
}

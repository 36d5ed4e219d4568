//! Which metrics are exported: by `/metrics` and by OTLP.

use std::str::FromStr;

use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// Which metrics are exported, by `/metrics` and by OTLP. The API, the page and `alerts` see everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ExportedMetrics {
    /// By name, as in the reference of metrics: `numaward_oom_kills_total`; of a histogram without `_bucket`.
    pub families: MetricFilter,
    /// Series of workloads, by the name of the workload: `NAMESPACE/POD/CONTAINER` of a container of a pod.
    /// They are counted all the same: the API, the page and `alerts` see them.
    pub workloads: MetricFilter,
}

/// What is exported: what a pattern of `allow` matches (everything, if there is none) and no pattern of `deny`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MetricFilter {
    /// Only what one of these patterns matches: `*` stands for any text, `?` for one character, `[ab]` for one of these.
    /// Default: everything.
    pub allow: Vec<NamePattern>,
    /// Not what one of these patterns matches, also where `allow` has it.
    pub deny: Vec<NamePattern>,
}

impl MetricFilter {
    /// Whether what has this name is exported.
    pub fn admits(&self, name: &str) -> bool {
        let any = |patterns: &[NamePattern]| patterns.iter().any(|pattern| pattern.0.matches(name));
        (self.allow.is_empty() || any(&self.allow)) && !any(&self.deny)
    }

    /// Whether it admits everything.
    pub fn is_open(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }
}

/// A pattern (glob) for names of metrics or workloads.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub struct NamePattern(glob::Pattern);

impl FromStr for NamePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err(
                "\"\" is not a pattern: it matches no name; expected one such as numaward_*".to_owned()
            );
        }
        glob::Pattern::new(text).map(Self).map_err(|error| {
            format!("{text:?} is not a pattern: {} (at character {})", error.msg, error.pos + 1)
        })
    }
}

serde_as_text!(NamePattern);

inline_schema!(NamePattern, { "type": "string", "minLength": 1, "examples": ["numaward_dram_*"] });

/// What is odd but no error: a pattern for metrics that matches no name that numaward has for one.
pub(super) fn warnings(exported: &ExportedMetrics) -> Vec<String> {
    let is_possible = |c: char| c.is_ascii_alphanumeric() || "_*?[]!-".contains(c);
    let families = &exported.families;
    let odd =
        families.allow.iter().chain(&families.deny).filter(|of| !of.0.as_str().chars().all(is_possible));
    odd.map(|pattern| format!("metrics.families: no metric has a name that \"{pattern}\" matches")).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::Config, *};

    fn config(text: &str) -> Result<ExportedMetrics, String> {
        let read: Result<Config, _> = serde_json::from_str(text);
        read.map(|config| config.metrics).map_err(|error| error.to_string())
    }

    #[test]
    fn names_are_allowed_and_denied() {
        let filter = |allow: &[&str], deny: &[&str]| {
            let patterns = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
            MetricFilter { allow: patterns(allow), deny: patterns(deny) }
        };
        for (allow, deny, name, admits) in [
            (&[][..], &[][..], "shop/web-0/main", true),
            (&["shop/*"], &[], "shop/web-0/main", true),
            (&["shop/*"], &[], "kube-system/dns/main", false),
            (&["shop/*", "*.service"], &[], "nginx.service", true),
            (&[], &["*/istio-proxy"], "shop/web-0/istio-proxy", false),
            (&["shop/*"], &["*/istio-proxy"], "shop/web-0/istio-proxy", false),
            (&["shop/*"], &["*/istio-proxy"], "shop/web-0/main", true),
            (&["numaward_[mo]*_total"], &[], "numaward_oom_kills_total", true),
            (&["numaward_[mo]*_total"], &[], "numaward_oom_kills", false),
        ] {
            assert_eq!(filter(allow, deny).admits(name), admits, "{allow:?} {deny:?} {name}");
        }
        assert!(MetricFilter::default().is_open() && !filter(&[], &["a"]).is_open());
    }

    #[test]
    fn what_is_no_pattern_is_refused_and_what_matches_nothing_is_warned_of() {
        for (pattern, problem) in
            [("", "it matches no name"), ("a[", "is not a pattern: invalid range pattern (at character 2)")]
        {
            let error =
                config(&format!(r#"{{"metrics": {{"workloads": {{"deny": [{pattern:?}]}}}}}}"#)).unwrap_err();
            assert!(error.contains(problem), "{pattern}: {error}");
        }
        assert!(config(r#"{"metrics": {"families": {"only": ["a"]}}}"#).unwrap_err().contains("only"));
        let odd =
            config(r#"{"metrics": {"families": {"deny": ["numaward.oom", "numaward_dram_*"]}}}"#).unwrap();
        assert_eq!(warnings(&odd), ["metrics.families: no metric has a name that \"numaward.oom\" matches"]);
    }
}

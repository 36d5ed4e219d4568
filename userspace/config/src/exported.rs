//! Selection of the metrics that are exported by `/metrics` and by OTLP.

use std::str::FromStr;

use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// Selection of the metrics that are exported by `/metrics` and by OTLP. The API, the page and `alerts` use all
/// metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ExportedMetrics {
    /// Selection by name, as in the metrics reference: `numaward_oom_kills_total`; for a histogram without `_bucket`.
    pub families: MetricFilter,
    /// Selection of the series of workloads by the name of the workload: `NAMESPACE/POD/CONTAINER` for a container of a
    /// pod. Other workloads are counted as well: the API, the page and `alerts` use them.
    pub workloads: MetricFilter,
}

/// A filter: exports names that match a pattern of `allow` (all names if it is empty) and no pattern of `deny`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MetricFilter {
    /// Patterns of exported names, such as `numaward_dram_*` or `shop/*`: `*` matches any text, `?` one character, `[ab]` one of
    /// these characters. Default: all names.
    pub allow: Vec<NamePattern>,
    /// Patterns of names that are not exported, even if `allow` matches them.
    pub deny: Vec<NamePattern>,
}

impl MetricFilter {
    /// Returns true if a name is exported.
    pub fn admits(&self, name: &str) -> bool {
        let any = |patterns: &[NamePattern]| patterns.iter().any(|pattern| pattern.0.matches(name));
        (self.allow.is_empty() || any(&self.allow)) && !any(&self.deny)
    }

    /// Returns true if all names are exported.
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

inline_schema!(NamePattern, { "type": "string", "minLength": 1 });

/// Returns warnings about patterns that cannot match any metric name.
pub(super) fn warnings(exported: &ExportedMetrics) -> Vec<String> {
    let is_possible = |c: char| c.is_ascii_alphanumeric() || "_*?[]!-".contains(c);
    let families = &exported.families;
    let odd =
        families.allow.iter().chain(&families.deny).filter(|of| !of.0.as_str().chars().all(is_possible));
    odd.map(|pattern| format!("metrics.families: the pattern \"{pattern}\" matches no metric name")).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::Config, *};

    fn config(text: &str) -> Result<ExportedMetrics, String> {
        let read: Result<Config, _> = serde_json::from_str(text);
        read.map(|config| config.metrics).map_err(|error| error.to_string())
    }

    #[test]
    fn filters_names_by_allow_and_deny() {
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
    fn refuses_invalid_patterns() {
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
        assert_eq!(warnings(&odd), ["metrics.families: the pattern \"numaward.oom\" matches no metric name"]);
    }
}

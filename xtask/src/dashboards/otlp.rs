//! Comparison of the metrics sent by OTLP with the scraped ones: the series of a server that scrapes the daemon, and of
//! one that the daemon sends to.
//!
//! Values change, and the two servers do not sample at the same time. A series agrees if the sent value lies between
//! the minimum and the maximum of the values that were scraped shortly before and after. A gauge may have had another
//! value in between, so a series that does not agree is compared again later; a wrong series never agrees.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Seconds before and after the sent value: several scrapes, because the clocks of the machine and of this host may
/// differ.
pub(super) const WINDOW_SECONDS: u64 = 15;
/// Labels that identify the scraper or the sender: those of Prometheus, and the attributes of the daemon's resource.
/// Also the names of containers by the semantic conventions, which stand beside the labels.
const IDENTITY_LABELS: [&str; 13] = [
    "cluster",
    "instance",
    "job",
    "host_arch",
    "host_name",
    "k8s_container_name",
    "k8s_namespace_name",
    "k8s_node_name",
    "k8s_pod_name",
    "os_type",
    "service_instance_id",
    "service_name",
    "service_version",
];

/// Series by name and labels, with values by second. Series without values are absent.
type Series = BTreeMap<String, BTreeMap<u64, f64>>;

/// Series that have agreed so far.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    agreed: BTreeSet<String>,
}

impl Comparison {
    /// Compares at one time: the answers of both servers to a query of a range around it. Returns the series that have
    /// not agreed so far, with the reason.
    pub(super) fn compare(&mut self, time: u64, scraped: &Value, sent: &Value) -> Result<Vec<String>> {
        let (scraped, sent) = (series(scraped)?, series(sent)?);
        let mut open = Vec::new();
        for name in scraped.keys().chain(sent.keys()).collect::<BTreeSet<_>>() {
            let around = scraped.get(name).map(|values| values.values().copied().collect::<Vec<_>>());
            let there = |series: &Series| series.get(name).and_then(|values| values.get(&time)).copied();
            let why = match (around, there(&sent)) {
                // The series, or one with the same name, appeared or disappeared meanwhile.
                _ if there(&scraped).is_none() && there(&sent).is_none() => continue,
                (None, Some(value)) => format!("{name}: {value} is sent, but not scraped"),
                (_, None) => format!("{name}: is scraped, but not sent"),
                (Some(around), Some(value)) => {
                    let least = around.iter().copied().fold(f64::INFINITY, f64::min);
                    let most = around.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    // The sum of a histogram is rounded in the text format.
                    let slack = 1e-9 * most.abs();
                    if value >= least - slack && value <= most + slack {
                        self.agreed.insert(name.clone());
                        continue;
                    }
                    format!("{name}: {value} is sent, {least} to {most} scraped")
                }
            };
            if !self.agreed.contains(name) {
                open.push(why);
            }
        }
        Ok(open)
    }

    /// Returns the number of series that have agreed.
    pub(super) fn count(&self) -> usize {
        self.agreed.len()
    }

    /// Returns the number of their metrics.
    pub(super) fn names(&self) -> usize {
        let names = self.agreed.iter().filter_map(|series| series.split('{').next());
        names.collect::<BTreeSet<_>>().len()
    }
}

/// Parses the answer of `promtool query range --format=json`.
fn series(answer: &Value) -> Result<Series> {
    let mut found = Series::new();
    for one in answer.as_array().context("promtool has answered no list")? {
        let labels = one["metric"].as_object().context("a series without labels")?;
        let mut name = String::new();
        let mut inner = Vec::new();
        for (label, value) in labels {
            let value = value.as_str().context("a label that is no text")?;
            match label.as_str() {
                "__name__" => value.clone_into(&mut name),
                // To Prometheus, an empty label equals a missing one.
                label if IDENTITY_LABELS.contains(&label) || value.is_empty() => {}
                // 1 and 1.0 are the same bound.
                "le" => {
                    let bound =
                        value.parse::<f64>().map_or_else(|_| value.to_owned(), |bound| bound.to_string());
                    inner.push(format!("le={bound:?}"));
                }
                label => inner.push(format!("{label}={value:?}")),
            }
        }
        inner.sort();
        let values = one["values"].as_array().context("a series without values")?;
        let values = values.iter().filter_map(|pair| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "whole seconds since 1970 were asked for"
            )]
            let second = pair[0].as_f64()?.round() as u64;
            Some((second, pair[1].as_str()?.parse().ok()?))
        });
        found.insert(format!("{name}{{{}}}", inner.join(",")), values.collect());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(series: &[(&Value, &[(u64, &str)])]) -> Value {
        let one = |(labels, values): &(&Value, &[(u64, &str)])| json!({ "metric": labels, "values": values });
        Value::Array(series.iter().map(one).collect())
    }

    #[test]
    fn sent_value_lies_between_scraped_ones() {
        let scraped = json!({"__name__": "a_total", "node": "0", "job": "x", "cluster": "demo"});
        let sent = json!({"__name__": "a_total", "node": "0", "service_name": "y", "reason": ""});
        let other = json!({"__name__": "b", "le": "1.0"});
        let whole = json!({"__name__": "b", "le": "1"});
        let mut comparison = Comparison::default();
        let open = comparison
            .compare(
                10,
                &answer(&[(&scraped, &[(9, "4"), (10, "5"), (11, "7")]), (&other, &[(10, "1.5")])]),
                &answer(&[(&sent, &[(9, "1"), (10, "6")]), (&whole, &[(10, "2")])]),
            )
            .unwrap();
        assert_eq!(open, ["b{le=\"1\"}: 2 is sent, 1.5 to 1.5 scraped"]);
        // One agreement is enough.
        let open = comparison
            .compare(
                20,
                &answer(&[(&scraped, &[(20, "5")]), (&other, &[(20, "2.5")])]),
                &answer(&[(&sent, &[(20, "9")]), (&whole, &[(20, "2.5")])]),
            )
            .unwrap();
        assert_eq!(open, [""; 0]);
        assert_eq!((comparison.count(), comparison.names()), (2, 2));
    }

    #[test]
    fn reports_series_of_one_server() {
        let labels = json!({"__name__": "a"});
        let has = answer(&[(&labels, &[(10, "1")])]);
        let mut comparison = Comparison::default();
        assert_eq!(comparison.compare(10, &has, &answer(&[])).unwrap(), ["a{}: is scraped, but not sent"]);
        assert_eq!(comparison.compare(10, &answer(&[]), &has).unwrap(), ["a{}: 1 is sent, but not scraped"]);
        // The series appeared later.
        assert_eq!(comparison.compare(9, &has, &answer(&[])).unwrap(), [""; 0]);
        assert_eq!(comparison.count(), 0);
        assert!(comparison.compare(9, &json!({"status": "error"}), &has).is_err());
    }
}

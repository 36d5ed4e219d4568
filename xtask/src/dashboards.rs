//! `cargo xtask dashboards`: generates Grafana's JSON from the tables in `dashboards/grafana/*.yaml`.
//!
//! Grafana's own format repeats the same forty lines for each panel; the tables contain only the differences. A test
//! compares the JSON, which people import, with the tables.

mod live;
mod otlp;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

/// Selectors that replace `$host` and `$workload` in an expression.
const HOST: &str = r#"cluster=~"$cluster", instance=~"$instance""#;
const WORKLOAD: &str = r#"cluster=~"$cluster", instance=~"$instance", workload=~"$workload", namespace=~"$namespace", pod=~"$pod", container=~"$container""#;
/// Reference to the first match of a regular expression.
const FIRST_MATCH: &str = "$1";
/// Folder of the tables and of the JSON.
const FOLDER: &str = "dashboards/grafana";
/// Number of columns of Grafana's grid.
const COLUMNS: u32 = 24;
const PANEL_HEIGHT: u32 = 8;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dashboard {
    uid: String,
    title: String,
    description: String,
    variables: Vec<Variable>,
    #[serde(default)]
    annotations: Vec<Annotation>,
    rows: Vec<DashboardRow>,
}

/// Marks in all panels.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Annotation {
    title: String,
    expr: String,
    /// Text with labels in braces.
    text: String,
    color: String,
    /// If true, the value is the time of the mark, in milliseconds since 1970.
    #[serde(default)]
    value_is_time: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Variable {
    Cluster,
    Instance,
    Instances,
    Namespace,
    Pod,
    Container,
    Workload,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DashboardRow {
    title: String,
    panels: Vec<Panel>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Panel {
    title: String,
    description: String,
    #[serde(default, rename = "type")]
    kind: PanelKind,
    #[serde(default = "no_unit")]
    unit: String,
    width: u32,
    /// If true, areas are stacked.
    #[serde(default)]
    stack: bool,
    /// A value above this is shown in red.
    bad_above: Option<f64>,
    /// A value above this is shown in orange.
    warn_above: Option<f64>,
    /// A value below this is shown in red.
    bad_below: Option<f64>,
    /// Target of the names in the table.
    link: Option<Link>,
    targets: Vec<QueryTarget>,
}

/// Text of a link to a dashboard.
const OPEN: &str = "Open";
/// Text of a link to the daemon's own page.
const PAGE: &str = "The host's page";
/// Address of a daemon with an `instance` that is the name of a node: a forwarded port, as in the alerts.
const FORWARDED: &str = "localhost:9560";

/// Target of a table's rows: a dashboard, and in the column `page` the daemon's page.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Link {
    /// The dashboard of the label `instance`.
    Host,
    /// The dashboard of the pod or of the workload.
    Workload,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum PanelKind {
    #[default]
    Timeseries,
    Stat,
    Table,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueryTarget {
    expr: String,
    #[serde(default)]
    legend: String,
    /// If true, adds the label `name`: the name of the workload, or NAMESPACE/POD/CONTAINER.
    #[serde(default)]
    named: bool,
    /// Number of series with the largest values over the whole range. `topk` itself chooses anew at each step, so that a line
    /// would change its subject.
    top: Option<u32>,
    /// Number of series with the smallest values at the end of the range.
    bottom: Option<u32>,
    /// In a table, a value above this is shown in red.
    bad_above: Option<f64>,
    /// In a table, a value below this is shown in red.
    bad_below: Option<f64>,
}

impl QueryTarget {
    fn expression(&self, link: Option<Link>) -> String {
        let chosen = match (self.top, self.bottom) {
            (Some(count), _) => format!("{} and topk({count}, {})", self.expr, over_range(&self.expr)),
            (None, Some(count)) => format!("{} and bottomk({count}, {})", self.expr, over_range(&self.expr)),
            (None, None) => self.expr.clone(),
        };
        let expr = &link.map_or_else(|| chosen.clone(), |link| link.with_page(&chosen));
        let named = if self.named {
            format!(
                r#"label_replace(label_join({expr}, "name", "/", "namespace", "pod", "container"), "name", "{FIRST_MATCH}", "workload", "(.+)")"#
            )
        } else {
            expr.clone()
        };
        selected(&named)
    }

    /// Returns the settings of a table's column with colors.
    fn colored_column(&self) -> Option<Value> {
        let steps = steps(self.bad_below, None, self.bad_above);
        (steps.len() > 1).then(|| {
            json!({
                "matcher": { "id": "byName", "options": self.legend },
                "properties": [
                    { "id": "thresholds", "value": { "mode": "absolute", "steps": steps } },
                    { "id": "custom.cellOptions", "value": { "type": "color-text" } },
                ],
            })
        })
    }
}

/// Returns the values at which the color changes.
fn steps(bad_below: Option<f64>, warn_above: Option<f64>, bad_above: Option<f64>) -> Vec<Value> {
    let first = if bad_below.is_some() { "red" } else { "green" };
    let mut steps = vec![json!({ "color": first, "value": null })];
    // A step begins at its value; bad values begin at the next number above the bound.
    let above = |bound: f64| if bound == 0.0 { f64::EPSILON } else { bound };
    steps.extend(bad_below.map(|bound| json!({ "color": "green", "value": bound })));
    steps.extend(warn_above.map(|bound| json!({ "color": "orange", "value": above(bound) })));
    steps.extend(bad_above.map(|bound| json!({ "color": "red", "value": above(bound) })));
    steps
}

/// Returns an expression that has the same value at each step: rates over the whole range, gauges at its end.
fn over_range(expr: &str) -> String {
    let rates = expr.replace("[$__rate_interval]", "[$__range] @ end()");
    let mut fixed = String::new();
    let mut rest = rates.as_str();
    while let Some((before, after)) = rest.split_once('}') {
        fixed.extend([before, "}"]);
        if !after.starts_with('[') {
            fixed.push_str(" @ end()");
        }
        rest = after;
    }
    fixed + rest
}

/// Replaces the selectors in an expression.
fn selected(expr: &str) -> String {
    expr.replace("$workload", WORKLOAD).replace("$host", HOST)
}

impl Link {
    /// Returns the columns with links to a dashboard.
    const fn targets(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Host => &[(
                "instance",
                "/d/numaward-host?${datasource:queryparam}&var-cluster=${__data.fields.cluster}\
                 &var-instance=${__data.fields.instance}&${__url_time_range}",
            )],
            Self::Workload => &[
                (
                    "pod",
                    "/d/numaward-workload?${datasource:queryparam}&${cluster:queryparam}&${instance:queryparam}\
                     &var-namespace=${__data.fields.namespace}&var-pod=${__data.fields.pod}\
                     &var-container=${__data.fields.container}&var-workload=All&${__url_time_range}",
                ),
                (
                    "workload",
                    "/d/numaward-workload?${datasource:queryparam}&${cluster:queryparam}&${instance:queryparam}\
                     &var-namespace=All&var-pod=All&var-container=All&var-workload=${__data.fields.workload}\
                     &${__url_time_range}",
                ),
            ],
        }
    }

    /// Adds the label `page`: the address of the row on the daemon's page.
    fn with_page(self, expr: &str) -> String {
        match self {
            Self::Host => {
                let by_address =
                    format!(r#"label_replace({expr}, "page", "http://$1/", "instance", "(.*)")"#);
                format!(r#"label_replace({by_address}, "page", "http://{FORWARDED}/", "instance", "[^:]*")"#)
            }
            Self::Workload => {
                let name = format!(
                    r#"label_replace(label_join({expr}, "page", "%2F", "namespace", "pod", "container"), "page", "{FIRST_MATCH}", "workload", "(.+)")"#
                );
                let by_address = format!(
                    r#"label_replace({name}, "page", "http://$instance/#/workloads/$1", "page", "(.*)")"#
                );
                format!(
                    r#"label_replace({by_address}, "page", "http://{FORWARDED}/$1", "page", "http://[^/:]*/(.*)")"#
                )
            }
        }
    }

    fn render(self) -> Vec<Value> {
        let one = |(column, title, url, is_other): (&str, &str, &str, bool)| {
            let links = json!([{ "title": title, "url": url, "targetBlank": is_other }]);
            json!({
                "matcher": { "id": "byName", "options": column },
                "properties": [{ "id": "links", "value": links }],
            })
        };
        let dashboards = self.targets().iter().map(|(column, url)| (*column, OPEN, *url, false));
        dashboards.chain([("page", PAGE, "${__value.raw}", true)]).map(one).collect()
    }
}

impl Annotation {
    fn render(&self) -> Value {
        json!({
            "name": self.title,
            "datasource": prometheus(),
            "enable": true,
            "hide": false,
            "iconColor": self.color,
            "expr": selected(&self.expr),
            "step": "30s",
            "titleFormat": self.title,
            "textFormat": self.text,
            "useValueForTime": self.value_is_time,
        })
    }
}

fn no_unit() -> String {
    "short".to_owned()
}

/// Generates all dashboards of a folder.
pub(crate) fn run(root: &Path) -> Result<()> {
    for (path, json) in rendered(&root.join(FOLDER))? {
        fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
        println!("dashboards: {}", path.display());
    }
    Ok(())
}

/// Returns the files that Grafana imports.
pub(crate) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    Ok(rendered(&root.join(FOLDER))?.into_iter().map(|(path, _)| path).collect())
}

/// Tests dashboards and rules with a real Prometheus.
pub(crate) fn test(root: &Path) -> Result<()> {
    live::test(&root.join("dashboards"))
}

/// Returns each JSON file with its content.
fn rendered(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut files = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let table: Dashboard =
            serde_norway::from_str(&text).with_context(|| format!("{}: no dashboard", path.display()))?;
        let dashboard = table.render().with_context(|| path.display().to_string())?;
        let mut json = serde_json::to_string_pretty(&dashboard)?;
        json.push('\n');
        files.push((path.with_extension("json"), json));
    }
    if files.is_empty() {
        bail!("{}: there are no dashboards here", folder.display());
    }
    files.sort();
    Ok(files)
}

impl Dashboard {
    fn render(&self) -> Result<Value> {
        let mut panels = Vec::new();
        let (mut id, mut y) = (1, 0);
        for row in &self.rows {
            let grid = json!({ "h": 1, "w": COLUMNS, "x": 0, "y": y });
            panels.push(json!({ "id": id, "type": "row", "title": row.title, "collapsed": false, "gridPos": grid, "panels": [] }));
            (id, y) = (id + 1, y + 1);
            let mut x = 0;
            for panel in &row.panels {
                if panel.width == 0 || panel.width > COLUMNS {
                    bail!("{}: the width {} is not from 1 to {COLUMNS}", panel.title, panel.width);
                }
                if x + panel.width > COLUMNS {
                    (x, y) = (0, y + PANEL_HEIGHT);
                }
                let grid = json!({ "h": PANEL_HEIGHT, "w": panel.width, "x": x, "y": y });
                panels.push(panel.render(id, &grid));
                (id, x) = (id + 1, x + panel.width);
            }
            y += PANEL_HEIGHT;
        }
        let variables: Vec<Value> = std::iter::once(datasource())
            .chain(self.variables.iter().map(|variable| variable.render(&self.variables)))
            .collect();
        Ok(json!({
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["numaward"],
            "schemaVersion": 39,
            "version": 1,
            "editable": true,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": { "from": "now-1h", "to": "now" },
            "timezone": "utc",
            "links": [{ "type": "dashboards", "tags": ["numaward"], "title": "numaward", "icon": "external link", "tooltip": "", "targetBlank": false, "asDropdown": true, "includeVars": true, "keepTime": true }],
            "templating": { "list": variables },
            "annotations": { "list": self.annotations.iter().map(Annotation::render).collect::<Vec<_>>() },
            "panels": panels,
        }))
    }
}

/// Returns the data source of panels and variables.
fn prometheus() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

fn datasource() -> Value {
    json!({ "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0, "refresh": 1, "regex": "", "multi": false, "includeAll": false })
}

impl Variable {
    /// Returns the label of the variable, and the metric that has the offered values.
    const fn source(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Cluster => ("cluster", "Cluster", "numaward_build_info"),
            Self::Instance | Self::Instances => ("instance", "Host", "numaward_build_info"),
            Self::Namespace => ("namespace", "Namespace", "numaward_memory_allocated_bytes_total"),
            Self::Pod => ("pod", "Pod", "numaward_memory_allocated_bytes_total"),
            Self::Container => ("container", "Container", "numaward_memory_allocated_bytes_total"),
            Self::Workload => ("workload", "Workload", "numaward_memory_allocated_bytes_total"),
        }
    }

    /// Returns the variable. It offers the values that match the variables before it. "All" includes series without the
    /// label.
    fn render(self, all: &[Self]) -> Value {
        let (label, title, metric) = self.source();
        let before: Vec<String> = all
            .iter()
            .take_while(|other| **other != self)
            .map(|other| format!("{0}=~\"${0}\"", other.source().0))
            .collect();
        let query = format!("label_values({metric}{{{}}}, {label})", before.join(", "));
        let one = self == Self::Instance;
        let mut variable = json!({
            "name": label,
            "label": title,
            "type": "query",
            "datasource": prometheus(),
            "definition": query,
            "query": { "query": query, "refId": label },
            "refresh": 2,
            "sort": 1,
            "multi": !one,
            "includeAll": !one,
            "hide": 0,
            "regex": "",
        });
        if !one {
            variable["allValue"] = json!(".*");
            variable["current"] = json!({ "text": "All", "value": "$__all" });
        }
        variable
    }
}

impl Panel {
    /// Returns a table with a column for each target, named by the legends.
    fn table(&self) -> Value {
        if let [_] = self.targets[..] {
            return json!([{ "id": "organize", "options": { "excludeByName": { "Time": true } } }]);
        }
        let names = self.targets.iter().zip('A'..);
        let names: serde_json::Map<_, _> =
            names.map(|(target, query)| (format!("Value #{query}"), json!(target.legend))).collect();
        json!([
            { "id": "merge", "options": {} },
            { "id": "organize", "options": { "excludeByName": { "Time": true }, "renameByName": names } },
        ])
    }

    fn render(&self, id: u32, grid: &Value) -> Value {
        let table = self.kind == PanelKind::Table;
        let targets: Vec<Value> = self
            .targets
            .iter()
            .zip('A'..)
            .map(|(target, name)| {
                json!({
                    "refId": name.to_string(),
                    "datasource": prometheus(),
                    "editorMode": "code",
                    "expr": target.expression(self.link),
                    "legendFormat": if target.legend.is_empty() { "__auto" } else { &target.legend },
                    "range": self.kind == PanelKind::Timeseries,
                    "instant": self.kind != PanelKind::Timeseries,
                    "format": if table { "table" } else { "time_series" },
                })
            })
            .collect();
        let steps = steps(self.bad_below, self.warn_above, self.bad_above);
        let has_thresholds = steps.len() > 1;
        let links = self.link.map(Link::render).unwrap_or_default();
        let colored_column = self.targets.iter().filter_map(QueryTarget::colored_column).filter(|_| table);
        let overrides: Vec<Value> = links.into_iter().chain(colored_column).collect();
        let custom = match self.kind {
            PanelKind::Timeseries => json!({
                "drawStyle": "line", "lineWidth": 1, "fillOpacity": if self.stack { 40 } else { 5 }, "showPoints": "never",
                "stacking": { "mode": if self.stack { "normal" } else { "none" }, "group": "A" },
                "thresholdsStyle": { "mode": if has_thresholds { "dashed" } else { "off" } },
            }),
            PanelKind::Stat | PanelKind::Table => json!({}),
        };
        let options = match self.kind {
            PanelKind::Timeseries => json!({
                "legend": { "displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": [] },
                "tooltip": { "mode": "multi", "sort": "desc" },
            }),
            PanelKind::Stat => json!({
                "reduceOptions": { "calcs": ["lastNotNull"], "fields": "", "values": false },
                "colorMode": "value", "graphMode": "none", "justifyMode": "auto", "textMode": "auto",
            }),
            PanelKind::Table => json!({ "showHeader": true, "cellHeight": "sm" }),
        };
        let transformations = match self.kind {
            PanelKind::Table => self.table(),
            PanelKind::Timeseries | PanelKind::Stat => json!([]),
        };
        json!({
            "id": id,
            "type": match self.kind { PanelKind::Timeseries => "timeseries", PanelKind::Stat => "stat", PanelKind::Table => "table" },
            "title": self.title,
            "description": self.description,
            "datasource": prometheus(),
            "gridPos": grid,
            "targets": targets,
            "fieldConfig": {
                "defaults": { "unit": self.unit, "custom": custom, "thresholds": { "mode": "absolute", "steps": steps } },
                "overrides": overrides,
            },
            "options": options,
            "transformations": transformations,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(FOLDER)
    }

    #[test]
    fn json_matches_tables() {
        for (path, json) in rendered(&folder()).unwrap() {
            let kept = fs::read_to_string(&path).unwrap_or_default();
            assert!(kept == json, "{} is old: run `cargo xtask dashboards`", path.display());
        }
    }

    #[test]
    fn panels_have_description_and_place() {
        for (path, json) in rendered(&folder()).unwrap() {
            let dashboard: Value = serde_json::from_str(&json).unwrap();
            let mut places = Vec::new();
            for panel in dashboard["panels"].as_array().unwrap() {
                let grid = |key: &str| panel["gridPos"][key].as_u64().unwrap();
                let (x, y, w, h) = (grid("x"), grid("y"), grid("w"), grid("h"));
                for &(ox, oy, ow, oh) in &places {
                    let apart = x >= ox + ow || ox >= x + w || y >= oy + oh || oy >= y + h;
                    assert!(apart, "{}: {} overlaps", path.display(), panel["title"]);
                }
                places.push((x, y, w, h));
                if panel["type"] != "row" {
                    assert!(panel["description"].as_str().is_some_and(|text| text.len() > 20), "{panel}");
                    assert!(!panel["targets"].as_array().unwrap().is_empty(), "{panel}");
                }
            }
            assert!(!json.contains("__inputs") && !json.contains("$host"), "{}", path.display());
        }
    }

    #[test]
    fn links_match_variables() {
        let all: Vec<Value> = rendered(&folder())
            .unwrap()
            .iter()
            .map(|(_, json)| serde_json::from_str(json).unwrap())
            .collect();
        let mut count = 0;
        for dashboard in &all {
            for panel in dashboard["panels"].as_array().unwrap() {
                let overrides = panel["fieldConfig"]["overrides"].as_array().into_iter().flatten();
                for of in overrides.filter(|of| of["properties"][0]["id"] == "links") {
                    let [link] = &of["properties"][0]["value"].as_array().unwrap()[..] else {
                        panic!("{}: one link", panel["title"]);
                    };
                    let url = link["url"].as_str().unwrap();
                    let column = of["matcher"]["options"].as_str().unwrap();
                    let has = |target: &Value| target["expr"].as_str().unwrap().contains(column);
                    assert!(panel["targets"].as_array().unwrap().iter().all(has), "{panel}");
                    count += 1;
                    if column == "page" {
                        assert_eq!(url, "${__value.raw}");
                        let expr = panel["targets"][0]["expr"].as_str().unwrap();
                        if expr.contains("$instance/") {
                            let variables = dashboard["templating"]["list"].as_array().unwrap();
                            let of = variables.iter().find(|of| of["name"] == "instance").expect(expr);
                            assert_eq!(of["multi"], false, "{expr}: one host");
                        }
                        continue;
                    }
                    let (uid, parameters) = url.strip_prefix("/d/").unwrap().split_once('?').unwrap();
                    let target = all.iter().find(|of| of["uid"] == uid).expect(url);
                    let variables = target["templating"]["list"].as_array().unwrap();
                    let names = variables.iter().map(|of| of["name"].as_str().unwrap());
                    for name in names {
                        let is_given = [format!("var-{name}="), format!("${{{name}:queryparam}}")]
                            .iter()
                            .any(|text| parameters.contains(text));
                        assert!(is_given, "{}: {url} does not give {name}", panel["title"]);
                    }
                }
            }
        }
        assert!(count >= 8, "only {count} links");
    }

    #[test]
    fn thresholds_increase() {
        let of = |text: &str| {
            let panel: Panel = serde_norway::from_str(&format!(
                "{{title: t, description: d, width: 4, targets: [], {text}}}"
            ))
            .unwrap();
            let steps = panel.render(1, &json!({}))["fieldConfig"]["defaults"]["thresholds"]["steps"].clone();
            let steps = steps.as_array().unwrap().iter();
            steps
                .map(|step| (step["color"].as_str().unwrap().to_owned(), step["value"].as_f64()))
                .collect::<Vec<_>>()
        };
        let step = |color: &str, value| (color.to_owned(), value);
        assert_eq!(of("unit: s"), [step("green", None)]);
        assert_eq!(of("bad_above: 0"), [step("green", None), step("red", Some(f64::EPSILON))]);
        assert_eq!(of("bad_below: 0"), [step("red", None), step("green", Some(0.0))]);
        assert_eq!(
            of("warn_above: 0.8, bad_above: 0.95"),
            [step("green", None), step("orange", Some(0.8)), step("red", Some(0.95))]
        );
    }

    #[test]
    fn colored_columns_exist() {
        let mut count = 0;
        for (_, json) in rendered(&folder()).unwrap() {
            let dashboard: Value = serde_json::from_str(&json).unwrap();
            for panel in dashboard["panels"].as_array().unwrap() {
                let overrides = panel["fieldConfig"]["overrides"].as_array().into_iter().flatten();
                for of in overrides.filter(|of| of["properties"][0]["id"] == "thresholds") {
                    let renamed = &panel["transformations"][1]["options"]["renameByName"];
                    let mut names = renamed.as_object().unwrap().values();
                    assert!(names.any(|name| *name == of["matcher"]["options"]), "{panel}");
                    count += 1;
                }
            }
        }
        assert!(count >= 4, "only {count} columns with colours");
    }

    #[test]
    fn containers_are_named_by_labels() {
        let target =
            serde_norway::from_str::<QueryTarget>("{expr: 'sum by (pod) (a{$host})', named: true}").unwrap();
        let expected = r#"label_replace(label_join(sum by (pod) (a{cluster=~"$cluster", instance=~"$instance"}), "name", "/", "namespace", "pod", "container"), "name", "$1", "workload", "(.+)")"#;
        assert_eq!(target.expression(None), expected);
    }

    #[test]
    fn ranked_series_stay_the_same_over_the_range() {
        let expression = |text: &str| {
            let target = serde_norway::from_str::<QueryTarget>(text).unwrap();
            target.expression(None)
        };
        let selector = r#"{cluster=~"$cluster", instance=~"$instance"}"#;
        assert_eq!(
            expression("{expr: 'sum by (pod) (rate(a{$host}[$__rate_interval]))', top: 3}"),
            format!(
                "sum by (pod) (rate(a{selector}[$__rate_interval])) and topk(3, sum by (pod) \
                 (rate(a{selector}[$__range] @ end())))"
            )
        );
        assert_eq!(
            expression("{expr: 'min by (pod) (a{$host})', bottom: 3}"),
            format!("min by (pod) (a{selector}) and bottomk(3, min by (pod) (a{selector} @ end()))")
        );
        for (path, json) in rendered(&folder()).unwrap() {
            let dashboard: Value = serde_json::from_str(&json).unwrap();
            let panels = dashboard["panels"].as_array().unwrap().iter();
            for panel in panels.filter(|panel| panel["type"] == "timeseries") {
                for target in panel["targets"].as_array().unwrap() {
                    let expr = target["expr"].as_str().unwrap();
                    let is_fixed =
                        !expr.contains("topk(") && !expr.contains("bottomk(") || expr.contains("@ end()");
                    assert!(is_fixed, "{}: {expr}", path.display());
                }
            }
        }
    }

    /// Families in no panel and no rule, with the reason.
    const UNSHOWN: [(&str, &str); 10] = [
        ("numaward_interleave_weight", "a setting, which only changes with the configuration"),
        ("numaward_kubernetes_pods", "for a comparison with the API server, if pods are ignored"),
        (
            "numaward_kubernetes_pods_synced",
            "0 for seconds after a start; failures show as degraded and as API errors",
        ),
        (
            "numaward_nri_refused_pods",
            "the cluster shows the same pods in ContainerCreating; the refusals are shown",
        ),
        ("numaward_probe_sampled_ratio", "a setting, which only changes with the configuration"),
        ("numaward_rebalance_running", "most rebalances end between two scrapes; their outcomes are shown"),
        ("numaward_resctrl_threads_moved_total", "work of numaward itself, without an effect on workloads"),
        ("numaward_resource_slice_updates_total", "work of numaward itself; a failure shows as degraded"),
        (
            "numaward_unattributed_allocated_bytes_total",
            "for a comparison with the kernel's counters; no workload is affected",
        ),
        (
            "numaward_unknown_node_allocated_bytes_total",
            "pages of memory that was added after the start, until it is known",
        ),
    ];

    #[test]
    fn each_family_is_shown_or_excused() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
        let reference = read("docs/reference/metrics.md");
        let families = reference.lines().filter_map(|line| {
            let name = line.strip_prefix("| `")?.split_once('`')?.0;
            name.starts_with("numaward_").then_some(name)
        });
        let families: BTreeSet<&str> = families.collect();
        assert!(families.len() > 80, "{families:?}");
        let mut uses: String =
            ["host", "fleet", "workload"].map(|name| read(&format!("{FOLDER}/{name}.yaml"))).concat();
        uses.push_str(&read("dashboards/prometheus/rules.yaml"));
        let words: BTreeSet<&str> = uses.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
        let is_shown = |family: &str| {
            let of_histogram = ["_bucket", "_sum", "_count"];
            words.contains(family)
                || of_histogram.iter().any(|suffix| words.contains(format!("{family}{suffix}").as_str()))
        };
        let excused: BTreeSet<&str> = UNSHOWN.iter().map(|(family, _)| *family).collect();
        let missing: Vec<_> =
            families.iter().filter(|family| !is_shown(family) && !excused.contains(*family)).collect();
        assert!(missing.is_empty(), "in no panel, no rule, and without a reason: {missing:?}");
        let stale: Vec<_> =
            excused.iter().filter(|family| !families.contains(*family) || is_shown(family)).collect();
        assert!(stale.is_empty(), "excused although shown or unknown: {stale:?}");
        assert!(UNSHOWN.iter().all(|(_, reason)| reason.len() > 10));
    }

    #[test]
    fn page_links_have_address() {
        let host = Link::Host.with_page("up");
        let expected = r#"label_replace(label_replace(up, "page", "http://$1/", "instance", "(.*)"), "page", "http://localhost:9560/", "instance", "[^:]*")"#;
        assert_eq!(host, expected);
        let workload = Link::Workload.with_page("up");
        assert!(workload.contains(r#""http://$instance/#/workloads/$1", "page", "(.*)""#), "{workload}");
        let end = r#""page", "http://localhost:9560/$1", "page", "http://[^/:]*/(.*)")"#;
        assert!(workload.ends_with(end), "{workload}");
    }

    #[test]
    fn error_names_place_in_table() {
        let dir = tempfile::tempdir().unwrap();
        for (text, words) in [("uid: a\n", "no dashboard"), ("uid: [", "no dashboard")] {
            fs::write(dir.path().join("a.yaml"), text).unwrap();
            let error = format!("{:#}", rendered(dir.path()).unwrap_err());
            assert!(error.contains("a.yaml") && error.contains(words), "{error}");
        }
        fs::remove_file(dir.path().join("a.yaml")).unwrap();
        assert!(rendered(dir.path()).unwrap_err().to_string().contains("no dashboards"));
    }
}

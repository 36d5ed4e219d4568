//! `cargo xtask test dashboards`: checks that a real Prometheus answers the queries of dashboards and rules. It scrapes
//! a daemon in a machine with four nodes, in which all relevant events occur.
//!
//! Every panel, variable and recording rule must return a number. An alert's expression returns nothing in a healthy
//! state, so its selectors are queried instead. The alert of misses must be quiet at first, then fire for the workload
//! with a violated guarantee, and never for the other workload. The test shortens the delay of alerts (`for`);
//! `rules_test.yaml` tests the real delays.
//!
//! The daemon also sends its metrics by OTLP to a VictoriaMetrics, which must have the same values as Prometheus.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};
use numaward_vm::{Arch, Cache, Forward, GuestTopology, HOST_ADDRESS, Kernel, Vm};
use serde_json::{Value, json};

use super::otlp::{self, Comparison};
use crate::setup::{DebianTool, kernels};
use crate::{command, vm};

/// Port of the daemon inside the machine.
const DAEMON_PORT: u16 = 9560;
/// Port of the OTLP receiver, as seen from the machine.
const OTLP_PORT: u16 = 4318;
/// The time limit of the whole test, on a busy host.
const TEST_TIMEOUT: Duration = Duration::from_mins(20);
/// The interval of all queries; the alert is checked all the time.
const QUERY_INTERVAL: Duration = Duration::from_secs(15);
/// The alert that is checked, and the two workloads of `live.sh` for which it is checked.
const ALERT: &str = "NumawardNumaMisses";
const GOOD: &str = "numaward/good";
const BAD: &str = "bad";
/// Selectors of faults that cannot occur in a healthy machine, and replacements that check for their labels.
const CANNOT_OCCUR: &[(&str, &str)] = &[(
    r#"numaward_probe_info{mode="absent", reason!~"switched_off|unsupported"}"#,
    r#"numaward_probe_info{mode!=""}"#,
)];

/// A query that must return a number.
#[derive(Debug, PartialEq, Eq)]
struct Query {
    asker: String,
    expression: String,
}

/// Boots the machine, starts Prometheus, and queries until everything was answered.
pub(super) fn test(folder: &Path) -> Result<()> {
    let mut questions = dashboard_queries(&folder.join("grafana"))?;
    let rules = fs::read_to_string(folder.join("prometheus/rules.yaml")).context("cannot read the rules")?;
    let mut rules: Value = serde_norway::from_str(&rules).context("rules.yaml: no YAML")?;
    questions.extend(rule_queries(&rules)?);
    let asked = questions.len();
    shorten_delays(&mut rules);

    let cache = Cache::locate()?;
    let [daemon, prometheus, receiver] = free_ports()?;
    let server = PrometheusServer::prometheus(&cache, prometheus, daemon, &rules)?;
    let otlp = PrometheusServer::receiver(&cache, receiver)?;
    let machine = GuestTopology::parse(Some(4), Some("1,1,1,1"), Some("512M,512M,512M,512M"), None)?;
    let mut vm = Vm::new(Kernel::find(&cache, Arch::Amd64, kernels::DEFAULT)?, machine)
        .forward(Forward { host: daemon, guest: DAEMON_PORT })
        .reach(Forward { host: receiver, guest: OTLP_PORT })
        .limit(TEST_TIMEOUT);
    for (name, path) in vm::programs(Arch::Amd64, true)? {
        vm = vm.file(path, format!("/bin/{name}"));
    }
    let receiver = format!("http://{HOST_ADDRESS}:{OTLP_PORT}/opentelemetry");
    let running =
        vm.start(&format!("port={DAEMON_PORT}\nreceiver={receiver}\n{}", include_str!("live.sh")))?;
    let stopper = running.stopper();
    let mut watch = LiveTest {
        server,
        otlp,
        questions,
        compared: Comparison::default(),
        differ: vec!["not compared yet".to_owned()],
        quiet: false,
        firing: false,
        next: Instant::now(),
    };
    let mut outcome = None;
    let (signalled, ended) = vm::attend(running, || {
        if outcome.is_none() {
            outcome = watch.check_once().transpose();
            if outcome.is_some() {
                stopper.stop();
            }
        }
    })?;
    match outcome {
        Some(result) => result?,
        None if signalled => bail!("ended by a signal"),
        None => bail!(
            "the machine ended ({ended:?}) before everything was seen: the alert quiet: {}, firing: {}, not answered:\n{}\n\
             what is sent by OTLP and what is scraped:\n{}",
            watch.quiet,
            watch.firing,
            watch.questions.iter().map(Query::to_string).collect::<Vec<_>>().join("\n"),
            watch.differ.join("\n")
        ),
    }
    println!("{asked} expressions of dashboards and rules return data");
    println!(
        "{} series of {} metrics are sent by OTLP as they are scraped",
        watch.compared.count(),
        watch.compared.names()
    );
    println!("{ALERT}: quiet at first, then firing for `{BAD}`, never for `{GOOD}`");
    Ok(())
}

/// State of the test.
struct LiveTest {
    server: PrometheusServer,
    /// Receiver of the daemon's metrics.
    otlp: PrometheusServer,
    /// Queries without an answer so far.
    questions: Vec<Query>,
    compared: Comparison,
    /// Series that have not agreed so far, with the reason.
    differ: Vec<String>,
    quiet: bool,
    firing: bool,
    next: Instant,
}

impl LiveTest {
    /// Makes a round of queries. Returns `Some` once everything was observed.
    fn check_once(&mut self) -> Result<Option<()>> {
        let alerts = |workload: &str, state: &str| {
            let selector = format!("ALERTS{{alertname=\"{ALERT}\", workload=\"{workload}\"{state}}}");
            self.server.answers(&selector)
        };
        ensure!(!alerts(GOOD, "")?, "{ALERT} is not quiet for `{GOOD}`, which has its guarantee");
        self.firing = alerts(BAD, ", alertstate=\"firing\"")?;
        if !alerts(BAD, "")? {
            let watched = |workload: &str| {
                self.server
                    .answers(&format!("workload:numaward_numa_miss_bytes:rate5m{{workload=\"{workload}\"}}"))
            };
            self.quiet |= watched(GOOD)? && watched(BAD)?;
        }
        ensure!(self.quiet || !self.firing, "{ALERT} was firing for `{BAD}` from the start");
        if !self.quiet || Instant::now() < self.next {
            return Ok(None);
        }
        let mut open = Vec::new();
        for question in std::mem::take(&mut self.questions) {
            if !self.server.answers(&question.expression)? {
                open.push(question);
            }
        }
        self.questions = open;
        if !self.differ.is_empty() {
            self.compare()?;
        }
        self.next = Instant::now() + QUERY_INTERVAL;
        Ok((self.questions.is_empty() && self.differ.is_empty() && self.firing).then_some(()))
    }

    /// Compares the metrics that were sent recently with the scraped ones.
    fn compare(&mut self) -> Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
        let time = now - otlp::WINDOW_SECONDS;
        let (from, to) = (time - otlp::WINDOW_SECONDS, time + otlp::WINDOW_SECONDS);
        let (scraped, sent) = (self.server.range(from, to)?, self.otlp.range(from, to)?);
        self.differ = self.compared.compare(time, &scraped, &sent)?;
        if self.compared.count() == 0 {
            self.differ.push("nothing is sent".to_owned());
        }
        Ok(())
    }
}

impl std::fmt::Display for Query {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.asker, self.expression)
    }
}

/// Families that the daemon has only with a container runtime, hardware or features that the machine does not have.
const NOT_ON_THE_MACHINE: [&str; 14] = [
    "numaward_containers_started_unpinned_total",
    "numaward_dram_accesses_total",
    "numaward_guard_reclaimed_bytes_total",
    "numaward_home_refused_workloads",
    "numaward_home_workloads",
    "numaward_nri_connected",
    "numaward_nri_containers_placed_total",
    "numaward_nri_disconnects_total",
    "numaward_nri_memory_policies_missing_total",
    "numaward_nri_refusals_total",
    "numaward_remote_access_estimated_ratio",
    "numaward_resctrl_llc_occupancy_bytes",
    "numaward_resctrl_memory_bandwidth_bytes_total",
    "numaward_tiering_bytes_total",
];

/// Returns true if the machine has no series for an expression.
fn is_not_on_the_machine(expression: &str) -> bool {
    NOT_ON_THE_MACHINE.iter().any(|name| expression.contains(name))
}

/// Returns the queries of panels and variables, with everything selected.
fn dashboard_queries(folder: &Path) -> Result<Vec<Query>> {
    let mut questions = Vec::new();
    for (path, json) in super::rendered(folder)? {
        let dashboard: Value = serde_json::from_str(&json)?;
        let title = dashboard["title"].as_str().unwrap_or_default();
        let names: Vec<&str> =
            list(&dashboard["templating"]["list"]).filter_map(|v| v["name"].as_str()).collect();
        let mut ask = |asker: &Value, expression: &str| -> Result<()> {
            let mut expression = expression.replace("$__rate_interval", "1m").replace("$__range", "5m");
            for name in &names {
                expression = expression.replace(&format!("\"${name}\""), "\".*\"");
            }
            // The expression contains the address of a page.
            expression = expression.replace("//$instance/", "//host:9560/");
            let unknown = expression.replace(super::FIRST_MATCH, "").contains('$');
            ensure!(!unknown, "{}: {expression}: an unknown variable", path.display());
            let asker = format!("{title}: {}", asker.as_str().unwrap_or_default());
            questions.push(Query { asker, expression });
            Ok(())
        };
        for variable in list(&dashboard["templating"]["list"]) {
            let query = variable["query"]["query"].as_str();
            if let Some((selector, _)) = query.and_then(|q| q.strip_prefix("label_values(")?.rsplit_once(','))
            {
                ask(&variable["name"], selector)?;
            }
        }
        for mark in list(&dashboard["annotations"]["list"]) {
            ask(&mark["name"], mark["expr"].as_str().context("an annotation without an expression")?)?;
        }
        for panel in list(&dashboard["panels"]) {
            for target in list(&panel["targets"]) {
                let expression = target["expr"].as_str().context("a target without an expression")?;
                if !is_not_on_the_machine(expression) {
                    ask(&panel["title"], expression)?;
                }
            }
        }
    }
    Ok(questions)
}

/// Returns the queries of rules: recorded expressions as they are, and each selector of an alert.
fn rule_queries(rules: &Value) -> Result<Vec<Query>> {
    let mut questions = Vec::new();
    for rule in list(&rules["groups"]).flat_map(|group| list(&group["rules"])) {
        let expression = rule["expr"].as_str().context("a rule without an expression")?;
        if let Some(name) = rule["record"].as_str() {
            questions.push(Query { asker: name.to_owned(), expression: expression.to_owned() });
            questions.push(Query { asker: name.to_owned(), expression: name.to_owned() });
            continue;
        }
        let alert = rule["alert"].as_str().context("a rule that neither records nor alerts")?;
        let selectors = selectors(expression);
        ensure!(!selectors.is_empty(), "{alert}: no selector in {expression}");
        let asked = selectors.into_iter().filter(|selector| !is_not_on_the_machine(selector));
        questions.extend(asked.map(|selector| {
            let instead = CANNOT_OCCUR.iter().find(|(selects, _)| *selects == selector);
            let expression = instead.map_or_else(|| selector.to_owned(), |&(_, instead)| instead.to_owned());
            Query { asker: alert.to_owned(), expression }
        }));
    }
    Ok(questions)
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Returns the vector selectors of an expression: the name of a metric, and the braces after it.
fn selectors(expression: &str) -> Vec<&str> {
    const PROMETHEUS_METRICS: [&str; 3] = ["up", "scrape_duration_seconds", "process_start_time_seconds"];
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = expression[at..].find(is_word).map(|offset| at + offset) {
        let rest = &expression[start..];
        let name = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        at = start + name.len();
        let mut quoted = false;
        let braces = expression[at..].find(|c| {
            quoted ^= c == '"';
            c == '}' && !quoted
        });
        let end =
            if expression[at..].starts_with('{') { braces.map_or(at, |offset| at + offset + 1) } else { at };
        if name.contains("numaward_") || PROMETHEUS_METRICS.contains(&name) {
            found.push(&expression[start..end]);
            at = end;
        }
    }
    found
}

/// Shortens the delays of rules.
fn shorten_delays(rules: &mut Value) {
    for group in rules["groups"].as_array_mut().into_iter().flatten() {
        group["interval"] = json!("5s");
        for rule in group["rules"].as_array_mut().into_iter().flatten() {
            if rule.get("for").is_some() {
                rule["for"] = json!("10s");
            }
        }
    }
}

/// Returns unused ports of this host.
fn free_ports() -> Result<[u16; 3]> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port of 127.0.0.1");
    let listeners = [bind()?, bind()?, bind()?];
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// A server with the API of Prometheus, which ends on drop.
struct PrometheusServer {
    process: Child,
    cache: Cache,
    url: String,
    /// Folder of its configuration, data and log.
    folder: tempfile::TempDir,
}

impl PrometheusServer {
    /// Starts a Prometheus that scrapes the daemon on a port and evaluates rules.
    fn prometheus(cache: &Cache, port: u16, daemon: u16, rules: &Value) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("numaward-prometheus-").tempdir()?;
        let path = |name: &str| folder.path().join(name);
        let configuration = json!({
            // On a busy host the machine answers slowly.
            "global": { "scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "5s" },
            "rule_files": [path("rules.yaml")],
            "scrape_configs": [{
                "job_name": "numaward",
                "static_configs": [{ "targets": [SocketAddr::from((Ipv4Addr::LOCALHOST, daemon))], "labels": { "cluster": "demo" } }],
            }],
        });
        // JSON is YAML.
        fs::write(path("prometheus.yaml"), configuration.to_string())?;
        fs::write(path("rules.yaml"), rules.to_string())?;
        let mut command = DebianTool::PROMETHEUS.command(cache, "prometheus");
        command
            .arg(format!("--config.file={}", path("prometheus.yaml").display()))
            .arg(format!("--storage.tsdb.path={}", path("data").display()));
        Self::start(cache, command, "--web.listen-address", port, folder)
    }

    /// Starts a server that receives metrics by OTLP, below `/opentelemetry`.
    fn receiver(cache: &Cache, port: u16) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("numaward-otlp-").tempdir()?;
        let mut command = DebianTool::VICTORIA_METRICS.command(cache, "victoria-metrics");
        command
            .arg(format!("-storageDataPath={}", folder.path().join("data").display()))
            .arg("-opentelemetry.usePrometheusNaming")
            // Received values must be visible immediately.
            .args(["-search.latencyOffset=0s", "-search.disableCache"]);
        Self::start(cache, command, "-httpListenAddr", port, folder)
    }

    fn start(
        cache: &Cache,
        mut command: Command,
        listen: &str,
        port: u16,
        folder: tempfile::TempDir,
    ) -> Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let log = fs::File::create(folder.path().join("log"))?;
        let process = command
            .arg(format!("{listen}={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let mut server = Self { process, cache: cache.clone(), url: format!("http://{address}"), folder };
        let started = Instant::now();
        while let Err(error) = server.answers("vector(1)") {
            if server.process.try_wait()?.is_some() || started.elapsed() > Duration::from_mins(2) {
                let log = fs::read_to_string(server.folder.path().join("log")).unwrap_or_default();
                let program = command.get_program().display();
                return Err(error.context(format!("{program} does not start: {log}")));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(server)
    }

    fn promtool(&self) -> Command {
        DebianTool::PROMETHEUS.command(&self.cache, "promtool")
    }

    /// Returns the daemon's series between two times, second by second.
    fn range(&self, from: u64, to: u64) -> Result<Value> {
        let mut query = self.promtool();
        query.args(["query", "range", "--format=json", "--step=1s"]);
        query.args([format!("--start={from}"), format!("--end={to}")]);
        query.args([&self.url, r#"{__name__=~"numaward_.+"}"#]);
        Ok(serde_json::from_str(&command::read(&mut query)?)?)
    }

    /// Returns whether an expression returns a number now.
    fn answers(&self, expression: &str) -> Result<bool> {
        let mut query = self.promtool();
        query.args(["query", "instant", "--format=json", &self.url, expression]);
        let answer: Value = serde_json::from_str(&command::read(&mut query)?)?;
        Ok(list(&answer).any(|sample| sample["value"][1].as_str().is_some_and(|number| number != "NaN")))
    }
}

impl Drop for PrometheusServer {
    fn drop(&mut self) {
        // The server may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_selectors() {
        for (expression, expected) in [
            (
                "sum by (numa_node) (rate(numaward_a_total{x=~\"a|b\", y!=\"}\"}[5m])) > 0",
                vec!["numaward_a_total{x=~\"a|b\", y!=\"}\"}"],
            ),
            ("up{job=\"numaward\"} == 0", vec!["up{job=\"numaward\"}"]),
            (
                "numaward_a < on (numa_node) 0.02 * numaward_b{k=\"m\"}",
                vec!["numaward_a", "numaward_b{k=\"m\"}"],
            ),
            ("workload:numaward_a:rate5m > 64 * 1024", vec!["workload:numaward_a:rate5m"]),
            ("vector(1)", vec![]),
        ] {
            assert_eq!(selectors(expression), expected, "{expression}");
        }
    }

    #[test]
    fn alerts_have_positive_and_negative_cases() {
        let read = |name: &str| -> Value {
            let text = fs::read_to_string(command::root().join("dashboards/prometheus").join(name)).unwrap();
            serde_norway::from_str(&text).unwrap()
        };
        let (rules, tests) = (read("rules.yaml"), read("rules_test.yaml"));
        let cases: Vec<&Value> =
            list(&tests["tests"]).flat_map(|test| list(&test["alert_rule_test"])).collect();
        let rules = list(&rules["groups"]).flat_map(|group| list(&group["rules"]));
        let alerts: Vec<&str> = rules.filter_map(|rule| rule["alert"].as_str()).collect();
        assert!(alerts.len() > 10, "{alerts:?}");
        for alert in alerts {
            for fires in [true, false] {
                let has = cases.iter().any(|case| {
                    case["alertname"] == alert && case["exp_alerts"].as_array().unwrap().is_empty() != fires
                });
                assert!(has, "{alert}: no case with firing {fires}");
            }
        }
    }

    #[test]
    fn queries_use_known_metrics() {
        let folder = command::root().join("dashboards");
        let asked = dashboard_queries(&folder.join("grafana")).unwrap();
        assert!(
            asked.len() > 30
                && asked
                    .iter()
                    .all(|asked| !asked.expression.replace(super::super::FIRST_MATCH, "").contains('$')),
            "{asked:?}"
        );
        let rules = fs::read_to_string(folder.join("prometheus/rules.yaml")).unwrap();
        let mut rules: Value = serde_norway::from_str(&rules).unwrap();
        let asked = rule_queries(&rules).unwrap();
        for (selects, instead) in CANNOT_OCCUR {
            assert!(asked.iter().any(|question| question.expression == *instead), "no alert asks {selects}");
        }
        shorten_delays(&mut rules);
        assert!(!rules.to_string().contains("5m\",\"labels"), "{rules}");
    }
}

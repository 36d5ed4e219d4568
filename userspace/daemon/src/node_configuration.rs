//! The configuration of this host's Kubernetes node: its group, and changes of the files while the daemon runs.
//!
//! # Problem
//! A cluster has several kinds of hosts, and one `ConfigMap` for all daemons. Which of its files apply depends on a label of the node,
//! which only the API server knows. The files change while the daemon runs: the kubelet updates the mounted `ConfigMap`.
//!
//! # Algorithm
//! The name and the group of the node are stored in the state directory, from where each load of the configuration takes them. They are
//! asked for before the first start on a node, and while the daemon runs. The files are loaded again at an interval. The level of the log
//! and [`Kubernetes::LIVE_KEYS`], which concern pods that start later, are changed at once. A reload, which a client of the control socket requests, also applies declared guarantees. Any other change is
//! reported, by the part `pending_configuration`, until the daemon starts again or the change is undone: guarantees outlive a restart, but a faulty change of all hosts at once should not reach all daemons at once. The rollout of
//! the `DaemonSet` decides when each daemon starts again.

use std::{collections::BTreeSet, io, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_api as api;
use numaward_config::{
    ChangedKey, Config, LoadedConfig, NodeScope, Problems, Sources, enforcement::GUARANTEES_KEY,
    kubernetes::Kubernetes, load,
};
use numaward_guarantee::{private_directory, reconciler::ReconcilerHandle};
use numaward_kube::api::{connect, node_label};
use numaward_observe::{DaemonPart, Observer};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    allocations::{ReloadError, ReloadRequest},
    logging::LogSwitch,
};

/// Interval at which the files are loaded again.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Interval at which the API server is asked for the group of the node.
const GROUP_INTERVAL: Duration = Duration::from_mins(5);
/// The time limit of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const LOG_LEVEL: &str = "log.level";

/// Intervals at which the configuration is followed.
#[derive(Clone, Copy, Debug)]
struct FollowTiming {
    check_interval: Duration,
    group_interval: Duration,
}

impl Default for FollowTiming {
    fn default() -> Self {
        Self { check_interval: CHECK_INTERVAL, group_interval: GROUP_INTERVAL }
    }
}

/// Reason why the configuration of the node cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file of the node or of its group is invalid.
    #[error(transparent)]
    Invalid(#[from] Problems),
    /// Threads or timers are not available.
    #[error("the API server cannot be asked for the group of the node: {0}")]
    Runtime(#[from] io::Error),
}

/// The configuration with which the daemon started.
#[derive(Clone)]
pub(crate) struct NodeConfiguration {
    sources: Sources,
    loaded: LoadedConfig,
    log: LogSwitch,
    /// The present settings of Kubernetes.
    kubernetes: watch::Sender<Kubernetes>,
}

impl NodeConfiguration {
    /// Loads the configuration of this host's node. If there are files of groups or nodes, and the group of this node is not stored, the
    /// API server is asked first. Must be called outside of an async runtime; its threads end before it returns.
    pub(crate) fn load(
        mut sources: Sources,
        loaded: LoadedConfig,
        log: LogSwitch,
    ) -> Result<Self, LoadError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let loaded = runtime.block_on(load_of_node(&mut sources, loaded))?;
        log.set_level(loaded.config.log.level);
        Ok(Self::new(sources, loaded, log))
    }

    fn new(sources: Sources, loaded: LoadedConfig, log: LogSwitch) -> Self {
        let kubernetes = watch::Sender::new(loaded.config.kubernetes.clone());
        Self { sources, loaded, log, kubernetes }
    }

    /// Returns the settings of Kubernetes, some of which change while the daemon runs.
    pub(crate) fn kubernetes(&self) -> watch::Receiver<Kubernetes> {
        self.kubernetes.subscribe()
    }

    pub(crate) fn config(&self) -> &Config {
        &self.loaded.config
    }

    /// Starts to follow the files and the group of the node until the token is cancelled. Must be called in an async runtime.
    pub(crate) fn start_following(
        &self,
        observer: &Arc<Observer>,
        reconciler: Option<ReconcilerHandle>,
        reloads: mpsc::Receiver<ReloadRequest>,
        stop: &CancellationToken,
    ) {
        let follower = Follower::new(self.clone(), observer.clone(), reconciler);
        let following = follower.run(FollowTiming::default(), reloads);
        tokio::spawn(stop.clone().run_until_cancelled_owned(following.boxed()));
    }
}

/// Loads the configuration of this host's node, and completes its sources. If there are files of groups or nodes, and the group of this
/// node is not stored, the API server is asked first.
async fn load_of_node(sources: &mut Sources, loaded: LoadedConfig) -> Result<LoadedConfig, Problems> {
    let Some(name) = scoped_node(&loaded) else { return Ok(loaded) };
    if loaded.node.as_ref().is_some_and(|node| node.name == name) {
        sources.node.clone_from(&loaded.node);
        return Ok(loaded);
    }
    match find_group(&loaded, &name).await {
        Ok(group) => {
            let node = NodeScope { name, group };
            store(&loaded, &node);
            sources.node = Some(node);
            load(sources)
        }
        Err(error) => {
            tracing::warn!(
                node = name,
                error,
                "the group of the Kubernetes node is not known: files of groups and nodes have no effect"
            );
            Ok(loaded)
        }
    }
}

struct Follower {
    sources: Sources,
    /// The configuration in effect.
    effective: LoadedConfig,
    observer: Arc<Observer>,
    /// `None` if this host can have no guarantees.
    reconciler: Option<ReconcilerHandle>,
    /// True if the reconciler has other rules than those in effect: the last reload could not apply all of them.
    is_incomplete: bool,
    log: LogSwitch,
    kubernetes: watch::Sender<Kubernetes>,
}

/// Changed keys of a configuration, by the way in which they take effect.
#[derive(Debug, Default)]
struct Changes {
    /// Keys that take effect at once.
    live: Vec<ChangedKey>,
    guarantees: Option<ChangedKey>,
    others: Vec<ChangedKey>,
}

impl Follower {
    fn new(
        NodeConfiguration { sources, loaded, log, kubernetes }: NodeConfiguration,
        observer: Arc<Observer>,
        reconciler: Option<ReconcilerHandle>,
    ) -> Self {
        Self { sources, effective: loaded, observer, reconciler, is_incomplete: false, log, kubernetes }
    }

    async fn run(mut self, timing: FollowTiming, mut reloads: mpsc::Receiver<ReloadRequest>) {
        let mut ticks = interval(timing.check_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut next_question = Instant::now();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                Some(answer) = reloads.recv() => {
                    let reloaded = self.reload().await;
                    // If the client has disconnected, the log has the result.
                    let _ = answer.send(reloaded);
                    continue;
                }
            }
            let loaded = self.check();
            if Instant::now() >= next_question
                && let Some(loaded) = loaded
                && let Some(name) = scoped_node(&loaded)
            {
                next_question = Instant::now() + timing.group_interval;
                match find_group(&loaded, &name).await {
                    Ok(group) => {
                        let node = NodeScope { name, group };
                        store(&loaded, &node);
                        self.sources.node = Some(node);
                    }
                    Err(error) => {
                        tracing::debug!(
                            node = name,
                            error,
                            "the group of the Kubernetes node cannot be read"
                        );
                    }
                }
            }
        }
    }

    /// Loads the configuration, applies the keys that take effect at once, and reports other changes. Returns the loaded configuration if it is valid.
    fn check(&mut self) -> Option<LoadedConfig> {
        match load(&self.sources) {
            Err(problems) => {
                self.observer.note(DaemonPart::Configuration, Err(invalid(&problems)));
                None
            }
            Ok(loaded) => {
                match self.changes(&loaded) {
                    Ok(changes) => {
                        self.apply_live(&loaded);
                        self.note_pending(&changes);
                    }
                    Err(error) => {
                        let report = format!("the configuration cannot be compared: {error}");
                        self.observer.note(DaemonPart::Configuration, Err(report));
                    }
                }
                Some(loaded)
            }
        }
    }

    /// Notes that the files are valid, and the changes that are not in effect.
    fn note_pending(&self, changes: &Changes) {
        self.observer.note(DaemonPart::Configuration, Ok(()));
        self.observer.note(DaemonPart::PendingConfiguration, changes.pending().map_or(Ok(()), Err));
    }

    /// Loads the configuration, applies the keys that take effect at once and the declared guarantees, and reports other changes.
    async fn reload(&mut self) -> Result<api::Reload, ReloadError> {
        let result = self.apply().await;
        match &result {
            Ok(answer) => {
                let keys = |changed: &[api::ChangedKey]| {
                    changed.iter().map(|changed| changed.key.clone()).collect::<Vec<_>>().join(", ")
                };
                let (applied, needs_restart) = (keys(&answer.applied), keys(&answer.needs_restart));
                tracing::info!(applied, needs_restart, "the configuration was loaded again");
            }
            Err(ReloadError::Invalid(problems)) => {
                self.observer.note(DaemonPart::Configuration, Err(invalid(problems)));
                tracing::warn!(%problems, "the configuration was not loaded again, and nothing has changed");
            }
            Err(error) => tracing::warn!(%error, "the reload of the configuration failed"),
        }
        result
    }

    async fn apply(&mut self) -> Result<api::Reload, ReloadError> {
        let loaded = load(&self.sources)?;
        let mut changes = self.changes(&loaded)?;
        let mut applied = Vec::new();
        if let Some((reconciler, changed)) = self.reconciler.as_ref().zip(changes.guarantees.take()) {
            let rules = loaded.config.guarantees.clone();
            let declared = reconciler.declare(rules.clone()).await;
            self.is_incomplete |= declared.is_err();
            declared?;
            self.is_incomplete = false;
            self.effective.config.guarantees = rules;
            applied.push(changed);
        }
        applied.append(&mut changes.live);
        self.apply_live(&loaded);
        self.note_pending(&changes);
        let described = |changed: Vec<ChangedKey>| changed.into_iter().map(describe).collect();
        Ok(api::Reload {
            files: loaded.files.iter().map(|file| file.display().to_string()).collect(),
            applied: described(applied),
            needs_restart: described(changes.others),
            waiting: self.reconciler.as_ref().map_or_else(Vec::new, |of| of.allocations().waiting.clone()),
            warnings: loaded.warnings,
        })
    }

    /// Returns the keys with other values than those in effect.
    fn changes(&self, loaded: &LoadedConfig) -> serde_json::Result<Changes> {
        let mut changes = Changes::default();
        for changed in loaded.changed_keys(&self.effective)? {
            match changed.key.as_str() {
                LOG_LEVEL => changes.live.push(changed),
                key if Kubernetes::LIVE_KEYS.contains(&key) => changes.live.push(changed),
                GUARANTEES_KEY if self.reconciler.is_some() => changes.guarantees = Some(changed),
                _ => changes.others.push(changed),
            }
        }
        if self.is_incomplete && changes.guarantees.is_none() {
            changes.guarantees = Some(ChangedKey { key: GUARANTEES_KEY.to_owned(), origin: None });
        }
        Ok(changes)
    }

    fn apply_live(&mut self, loaded: &LoadedConfig) {
        let kubernetes = self.effective.config.kubernetes.with_live_keys(&loaded.config.kubernetes);
        if kubernetes != self.effective.config.kubernetes {
            self.kubernetes.send_replace(kubernetes.clone());
            self.effective.config.kubernetes = kubernetes;
            tracing::info!(keys = ?Kubernetes::LIVE_KEYS, "at least one of these keys has changed, for pods that start from now on");
        }
        let level = loaded.config.log.level;
        if level != self.effective.config.log.level {
            self.log.set_level(level);
            self.effective.config.log.level = level;
            tracing::info!(?level, "the level of the log has changed");
        }
    }
}

impl Changes {
    /// Describes the keys that are not in effect, if there are any.
    fn pending(&self) -> Option<String> {
        let restart: Vec<_> = self.others.iter().map(ToString::to_string).collect();
        let restart = (!restart.is_empty())
            .then(|| format!("these keys take effect when the daemon starts again: {}", restart.join(", ")));
        let reload = self.guarantees.as_ref();
        let reload = reload.map(|changed| format!("`numaward reload` applies {changed}"));
        let pending: Vec<_> = restart.into_iter().chain(reload).collect();
        (!pending.is_empty()).then(|| pending.join("; "))
    }
}

fn describe(ChangedKey { key, origin }: ChangedKey) -> api::ChangedKey {
    api::ChangedKey { key, source: origin.map(|origin| origin.to_string()) }
}

/// Returns the places of the problems. Every user of the host may read this, and messages may contain values, such as tokens.
fn invalid(problems: &Problems) -> String {
    let places: BTreeSet<_> = problems.0.iter().map(|problem| problem.origin.to_string()).collect();
    let places: Vec<_> = places.into_iter().collect();
    format!(
        "the configuration has problems at {}, which `numaward config check` describes; the daemon goes on as before, and cannot start \
         with these files",
        places.join(", ")
    )
}

/// Returns the name of this host's Kubernetes node if there are files that depend on it.
fn scoped_node(loaded: &LoadedConfig) -> Option<String> {
    loaded.config.kubernetes.node_name.clone().filter(|_| loaded.has_scoped_files)
}

/// Asks the API server for the group of a node.
async fn find_group(loaded: &LoadedConfig, node: &str) -> Result<Option<String>, String> {
    let request = async {
        let client = connect(loaded.config.kubernetes.kubeconfig.as_deref()).await;
        node_label(client.map_err(|error| error.to_string())?, node, NodeScope::GROUP_LABEL).await
    };
    let answer = timeout(REQUEST_TIMEOUT, request).await;
    answer.unwrap_or_else(|_| Err(format!("no answer within {REQUEST_TIMEOUT:?}")))
}

/// Stores the node if it differs from the stored one. An error is logged.
fn store(loaded: &LoadedConfig, node: &NodeScope) {
    let directory = &loaded.config.state_directory;
    if NodeScope::stored(directory).is_ok_and(|stored| stored.as_ref() == Some(node)) {
        return;
    }
    let stored = private_directory::prepare(directory).map_err(io::Error::other).and_then(|()| {
        numaward_cgroup::replace_file(&NodeScope::path(directory), &serde_json::to_vec(node)?)
    });
    if let Err(error) = stored {
        tracing::warn!(
            file = %NodeScope::path(directory).display(), %error,
            "the group of the Kubernetes node cannot be stored: files of groups and nodes may have no effect"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
        path::Path,
        sync::Mutex,
        thread::JoinHandle,
    };

    use axum::{Router, body::Body, http::Request};
    use numaward_config::{Interval, LogLevel};
    use numaward_control::testing;
    use numaward_guarantee::ports::Ports;
    use numaward_http::App;
    use numaward_kube::api::fake::FakeApiServer;
    use numaward_model::health::{Heartbeats, Readiness};
    use numaward_telemetry::metrics::Metrics;
    use numaward_topology::{Bytes, Machine};
    use serde_json::json;
    use tower::ServiceExt as _;

    use super::*;
    use crate::allocations::{self, ReloadHandle};

    /// Host with the node "a" of a fake API server.
    struct TestHost {
        directory: tempfile::TempDir,
        server: FakeApiServer,
        sources: Sources,
    }

    impl TestHost {
        async fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let server = FakeApiServer::start().await.unwrap();
            server.put_node("a", "uid", "v1.36.2");
            let sources = Sources { file: Some(directory.path().join("config.yaml")), ..Sources::default() };
            let host = Self { directory, server, sources };
            fs::write(host.path("kubeconfig"), host.server.kubeconfig()).unwrap();
            host.write("config.yaml", "");
            host
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.directory.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            let path = |name: &str| Path::new(self.directory.path()).join(name);
            let common = format!(
                "stateDirectory: {}\nkubernetes: {{nodeName: a, kubeconfig: {}}}\n",
                path("state").display(),
                path("kubeconfig").display()
            );
            fs::write(path(name), if name == "config.yaml" { common + text } else { text.to_owned() })
                .unwrap();
        }

        async fn load(&self) -> Result<(Sources, LoadedConfig), Problems> {
            let mut sources = self.sources.clone();
            let loaded = load(&sources)?;
            let loaded = load_of_node(&mut sources, loaded).await?;
            Ok((sources, loaded))
        }
    }

    #[tokio::test]
    async fn group_is_asked_for_and_stored() {
        let host = TestHost::new().await;
        host.server.put_labels("a", &json!({"numaward.io/group": "gpu", "other": "x"}));
        let slots = |loaded: &LoadedConfig| loaded.config.probes.slots;
        let default = Config::default().probes.slots;
        assert_eq!(slots(&host.load().await.unwrap().1), default);
        assert!(!host.path("state/node.json").exists(), "without files of groups, the node is not asked for");

        host.write("group.gpu.yaml", "probes: {slots: 9}");
        host.server.refuse(Some(("/nodes/a", axum::http::StatusCode::FORBIDDEN)));
        assert_eq!(
            slots(&host.load().await.unwrap().1),
            default,
            "an unknown group is no reason not to start"
        );
        host.server.refuse(None);
        assert_eq!(slots(&host.load().await.unwrap().1), 9);

        host.server.refuse(Some(("/nodes/a", axum::http::StatusCode::FORBIDDEN)));
        let (sources, loaded) = host.load().await.unwrap();
        assert_eq!(
            (slots(&loaded), sources.node.unwrap().group.as_deref()),
            (9, Some("gpu")),
            "it is stored"
        );

        host.write("group.gpu.yaml", "probes: {slots: 0}");
        assert!(host.load().await.unwrap_err().to_string().contains("group.gpu.yaml:1:17"));
    }

    /// Daemon that loads its configuration again on request.
    struct ReloadingDaemon {
        directory: tempfile::TempDir,
        observer: Arc<Observer>,
        router: Router,
        levels: Arc<Mutex<Vec<LogLevel>>>,
        stop: CancellationToken,
        thread: Option<JoinHandle<()>>,
    }

    impl ReloadingDaemon {
        /// Starts the daemon on a host with these cgroups.
        fn start(cgroups: &[&str]) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let machine = Machine::builder().cores_per_node(4).memory(Bytes::gib(4)).build().unwrap();
            for path in [&[""], cgroups].concat() {
                testing::cgroup(&directory.path().join("cgroup").join(path), &machine);
            }
            for folder in ["conf.d", "guarantees.d"] {
                fs::DirBuilder::new().mode(0o755).create(directory.path().join(folder)).unwrap();
            }
            let state = directory.path().join("state").display().to_string();
            let file = directory.path().join("config.yaml");
            fs::write(&file, format!("stateDirectory: {state}\nhostRoot: {}\n", directory.path().display()))
                .unwrap();
            let sources = Sources { file: Some(file), ..Sources::default() };
            let loaded = load(&sources).unwrap();
            let ports = Ports::new(Arc::new(testing::TestHost::new(machine)));
            let root = directory.path().join("cgroup");
            let (reconciler, thread, stop) = testing::reconciler(&loaded.config, &root, ports, None, None);
            let observer = Arc::new(Observer::new(&loaded.config));
            let metrics = Arc::new(Metrics::new(observer.clone()));
            let (readiness, heartbeats) = (Readiness::default(), Heartbeats::default());
            let app = App::new(&observer, &metrics, &readiness, &heartbeats, allocations::open_api());
            let (reload, reloads) = ReloadHandle::new();
            let router = allocations::control_router(app, reconciler.clone(), reload);
            let levels = Arc::new(Mutex::new(Vec::new()));
            let recorded = levels.clone();
            let log = LogSwitch::new(move |level| recorded.lock().unwrap().push(level));
            let configuration = NodeConfiguration::new(sources, loaded, log);
            configuration.start_following(&observer, Some(reconciler), reloads, &stop);
            Self { directory, observer, router, levels, stop, thread: Some(thread) }
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.directory.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        }

        /// Loads the configuration again. Returns the status and the answer with short paths.
        async fn reload(&self) -> (u16, serde_json::Value) {
            let request = Request::post("/api/v1/reload").body(Body::empty()).unwrap();
            let response = self.router.clone().oneshot(request).await.unwrap();
            let status = response.status().as_u16();
            let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
            let text = String::from_utf8(body.to_vec()).unwrap();
            let directory = format!("{}/", self.directory.path().display());
            (status, serde_json::from_str(&text.replace(&directory, "")).unwrap())
        }

        fn cpus(&self, cgroup: &str) -> String {
            let path = self.directory.path().join("cgroup").join(cgroup).join("cpuset.cpus");
            fs::read_to_string(path).unwrap().lines().next().unwrap_or_default().to_owned()
        }

        fn degraded(&self, part: &str) -> Option<String> {
            let degraded = self.observer.status().degraded;
            degraded.into_iter().find(|found| found.part == part).map(|found| found.reason)
        }
    }

    impl Drop for ReloadingDaemon {
        fn drop(&mut self) {
            self.stop.cancel();
            if let Some(thread) = self.thread.take() {
                thread.join().unwrap();
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn reload_applies_guarantees_and_reports_the_rest() {
        let daemon = ReloadingDaemon::start(&["a", "b", "c"]);
        daemon.write("guarantees.d/a.yaml", "guarantees:\n- {cgroup: /a, cpus: 1}\n");
        daemon
            .write("guarantees.d/b.yaml", "guarantees:\n- {cgroup: /b, cpus: 2}\n- {cgroup: /c, cpus: 2}\n");
        daemon.write("conf.d/log.yaml", "log: {level: warn}\nprobes: {slots: 9}\n");
        let (status, answer) = daemon.reload().await;
        assert_eq!(status, 200, "{answer}");
        // The check at the start may have applied the level of the log before.
        let applied = json!({"key": "guarantees", "source": "guarantees.d/a.yaml:2:3"});
        assert_eq!(answer["applied"][0], applied);
        assert_eq!(*daemon.levels.lock().unwrap(), [LogLevel::Warn]);
        let restart = json!([{"key": "probes.slots", "source": "conf.d/log.yaml:2:17"}]);
        assert_eq!(answer["needsRestart"], restart);
        assert_eq!(
            answer["files"],
            json!(["config.yaml", "conf.d/log.yaml", "guarantees.d/a.yaml", "guarantees.d/b.yaml"])
        );
        assert_eq!(["a", "b", "c"].map(|cgroup| daemon.cpus(cgroup)), ["1", "2-3", ""]);
        assert_eq!(answer["waiting"][0]["cgroup"], "/c", "{answer}");
        let pending = daemon.degraded("pending_configuration").unwrap();
        assert!(pending.contains("when the daemon starts again: probes.slots ("), "{pending}");
        assert!(!pending.contains("guarantees ("), "{pending}");
        assert_eq!(daemon.degraded("configuration"), None, "a change that waits is no fault");

        // An invalid file changes nothing, not even with valid ones beside it.
        daemon.write("guarantees.d/a.yaml", "guarantees: []\n");
        daemon.write("conf.d/log.yaml", "log: {level: loud}\n");
        let (status, answer) = daemon.reload().await;
        let detail = answer["detail"].as_str().unwrap_or_default();
        assert_eq!(status, 422, "{answer}");
        assert!(
            detail.contains("nothing has changed") && detail.contains("conf.d/log.yaml:1:14"),
            "{detail}"
        );
        assert_eq!(["a", "b", "c"].map(|cgroup| daemon.cpus(cgroup)), ["1", "2-3", ""]);
        assert!(daemon.degraded("configuration").unwrap().contains("conf.d/log.yaml:1:14"));

        // A removed file releases its guarantee, which makes room.
        daemon.write("conf.d/log.yaml", "");
        fs::remove_file(daemon.directory.path().join("guarantees.d/a.yaml")).unwrap();
        daemon.write("guarantees.d/b.yaml", "guarantees:\n- {cgroup: /c, cpus: 3}\n");
        let (status, answer) = daemon.reload().await;
        assert_eq!((status, &answer["waiting"], &answer["needsRestart"]), (200, &json!([]), &json!([])));
        assert_eq!(["a", "b", "c"].map(|cgroup| daemon.cpus(cgroup)), ["", "", "1-3"]);
        let parts = ["configuration", "pending_configuration"].map(|part| daemon.degraded(part));
        assert_eq!(parts, [None, None]);
        let (_, answer) = daemon.reload().await;
        assert_eq!(answer["applied"], json!([]), "nothing has changed since");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn failed_reload_is_tried_again() {
        let daemon = ReloadingDaemon::start(&["a"]);
        let fails = async |words: &str| {
            let (status, answer) = daemon.reload().await;
            let detail = answer["detail"].as_str().unwrap_or_default();
            assert!(status == 500 && detail.contains(words), "{status} {answer}");
        };
        let applies = async |cpus: &str| {
            let (status, answer) = daemon.reload().await;
            assert_eq!((status, &answer["applied"][0]["key"]), (200, &json!("guarantees")), "{answer}");
            assert_eq!(daemon.cpus("a"), cpus);
            let (_, answer) = daemon.reload().await;
            assert_eq!(answer["applied"], json!([]), "nothing has changed since");
        };
        let path = |name: &str| daemon.directory.path().join(name);
        let rule = "guarantees:\n- {cgroup: /a, cpus: 1}\n";
        daemon.write("guarantees.d/a.yaml", rule);
        fs::rename(path("cgroup"), path("elsewhere")).unwrap();
        fails("the cgroup hierarchy cannot be read").await;
        fs::rename(path("elsewhere"), path("cgroup")).unwrap();
        applies("1").await;

        // The release cannot be stored.
        fs::remove_file(path("guarantees.d/a.yaml")).unwrap();
        fs::remove_file(path("state/ledger.journal")).unwrap();
        fs::create_dir(path("state/ledger.journal.new")).unwrap();
        fails("the guarantee \"a\" cannot be released: the ledger cannot be stored").await;
        assert_eq!(daemon.cpus("a"), "1");
        // The reconciler also learns that the rule is back.
        daemon.write("guarantees.d/a.yaml", rule);
        applies("1").await;
        fs::remove_file(path("guarantees.d/a.yaml")).unwrap();
        fails("the ledger cannot be stored").await;
        fs::remove_dir(path("state/ledger.journal.new")).unwrap();
        applies("").await;
    }

    #[tokio::test]
    async fn changes_take_effect_or_are_reported() {
        let host = TestHost::new().await;
        host.write("group.gpu.yaml", "log: {level: debug}");
        let (sources, loaded) = host.load().await.unwrap();
        let observer = Arc::new(Observer::new(&loaded.config));
        let levels = Arc::new(Mutex::new(Vec::new()));
        let recorded = levels.clone();
        let log = LogSwitch::new(move |level| recorded.lock().unwrap().push(level));
        let timing = FollowTiming {
            check_interval: Duration::from_millis(10),
            group_interval: Duration::from_millis(10),
        };
        let stop = CancellationToken::new();
        let _stop_at_end = stop.clone().drop_guard();
        let configuration = NodeConfiguration::new(sources, loaded, log);
        let kubernetes = configuration.kubernetes();
        let initial = kubernetes.borrow().clone();
        let follower = Follower::new(configuration, observer.clone(), None);
        tokio::spawn(stop.run_until_cancelled_owned(follower.run(timing, ReloadHandle::new().1)));
        let reaches = async |words: &[&str]| {
            for _ in 0..1000 {
                let degraded = observer.status().degraded;
                let is_of_configuration = |part: &&api::DegradedPart| part.part.ends_with("configuration");
                let reason = degraded.iter().find(is_of_configuration).map(|part| &part.reason);
                let has_words = |reason: &String| words.iter().all(|word| reason.contains(word));
                if reason.map_or(words.is_empty(), has_words) && (reason.is_none() || !words.is_empty()) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            panic!("{words:?}: {:?}", observer.status().degraded);
        };

        host.write("config.yaml", "probes: {slots: 9}\nlog: {level: warn}");
        reaches(&["keys take effect when the daemon starts again: probes.slots (", "config.yaml:3:17)"])
            .await;
        assert_eq!(*levels.lock().unwrap(), [LogLevel::Warn]);

        // Lists of namespaces and the delay of evictions take effect at once, and do not wait.
        host.write("config.yaml", "log: {level: warn}");
        reaches(&[]).await;
        host.write(
            "group.gpu.yaml",
            "log: {level: debug}\nkubernetes: {refusedAfter: 17s, placementNamespaces: [db]}",
        );

        // The node gets another group.
        assert_eq!(*kubernetes.borrow(), initial);
        host.server.put_labels("a", &json!({"numaward.io/group": "gpu"}));
        for _ in 0..1000 {
            if levels.lock().unwrap().last() == Some(&LogLevel::Debug) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(*levels.lock().unwrap(), [LogLevel::Warn, LogLevel::Debug]);
        reaches(&[]).await;
        let namespaces = Some(["db".to_owned()].into());
        let expected = Kubernetes {
            placement_namespaces: namespaces,
            refused_after: Interval(Duration::from_secs(17)),
            ..initial.clone()
        };
        assert_eq!(*kubernetes.borrow(), expected);

        host.write("group.gpu.yaml", "strategie: native\notlp: {headers: s3cret}");
        reaches(&["group.gpu.yaml:1:1", "group.gpu.yaml:2:17", "cannot start with these files"]).await;
        assert!(observer.status().degraded.iter().all(|part| !part.reason.contains("s3cret")));
        host.write("group.gpu.yaml", "");
        reaches(&[]).await;
        assert_eq!(*kubernetes.borrow(), initial);
        assert_eq!(levels.lock().unwrap().last(), Some(&LogLevel::Warn));
    }
}

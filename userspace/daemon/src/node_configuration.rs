//! The configuration of this host's Kubernetes node: its group, and changes of the files while the daemon runs.
//!
//! # Problem
//! A cluster has several kinds of hosts, and one `ConfigMap` for all daemons. Which of its files apply depends on a label of the node,
//! which only the API server knows. The files change while the daemon runs: the kubelet updates the mounted `ConfigMap`.
//!
//! # Algorithm
//! The name and the group of the node are stored in the state directory, from where each load of the configuration takes them. They are
//! asked for before the first start on a node, and while the daemon runs. The files are loaded again at an interval. The level of the log
//! is changed at once. Any other change is reported, by the degraded part `configuration`, until the daemon starts again or the change
//! is undone: guarantees outlive a restart, but a faulty change of all hosts at once should not reach all daemons at once. The rollout of
//! the `DaemonSet` decides when each daemon starts again.

use std::{collections::BTreeSet, io, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_config::{Config, LoadedConfig, LogLevel, NodeScope, Problems, Sources, load};
use numaward_guarantee::private_directory;
use numaward_kube::api;
use numaward_observe::{DaemonPart, Observer};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::logging::LogSwitch;

/// Interval at which the files are loaded again.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Interval at which the API server is asked for the group of the node.
const GROUP_INTERVAL: Duration = Duration::from_mins(5);
/// The time limit of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The key that takes effect at once.
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
        Ok(Self { sources, loaded, log })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.loaded.config
    }

    /// Starts to follow the files and the group of the node until the token is cancelled. Must be called in an async runtime.
    pub(crate) fn start_following(&self, observer: &Arc<Observer>, stop: &CancellationToken) {
        let follower = Follower::new(self.clone(), observer.clone());
        let following = follower.run(FollowTiming::default());
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
    /// The configuration in effect, except for the level of the log.
    started: LoadedConfig,
    level: LogLevel,
    observer: Arc<Observer>,
    log: LogSwitch,
}

impl Follower {
    fn new(NodeConfiguration { sources, loaded, log }: NodeConfiguration, observer: Arc<Observer>) -> Self {
        Self { sources, level: loaded.config.log.level, started: loaded, observer, log }
    }

    async fn run(mut self, timing: FollowTiming) {
        let mut ticks = interval(timing.check_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut next_question = Instant::now();
        loop {
            ticks.tick().await;
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

    /// Loads the configuration, applies what can be applied, and reports the rest. Returns the loaded configuration if it is valid.
    fn check(&mut self) -> Option<LoadedConfig> {
        let (report, loaded) = match load(&self.sources) {
            Err(problems) => (Some(invalid(&problems)), None),
            Ok(loaded) => (self.apply(&loaded), Some(loaded)),
        };
        self.observer.note(DaemonPart::Configuration, report.map_or(Ok(()), Err));
        loaded
    }

    /// Applies the level of the log. Returns the keys that need a restart in words, if there are any.
    fn apply(&mut self, loaded: &LoadedConfig) -> Option<String> {
        let changed = match loaded.changed_keys(&self.started) {
            Ok(changed) => changed,
            Err(error) => return Some(format!("the configuration cannot be compared: {error}")),
        };
        let level = loaded.config.log.level;
        if level != self.level {
            self.log.set_level(level);
            self.level = level;
            tracing::info!(?level, "the level of the log has changed");
        }
        let pending: Vec<_> =
            changed.iter().filter(|changed| changed.key != LOG_LEVEL).map(ToString::to_string).collect();
        (!pending.is_empty())
            .then(|| format!("these keys take effect when the daemon starts again: {}", pending.join(", ")))
    }
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
        let client = api::connect(loaded.config.kubernetes.kubeconfig.as_deref()).await;
        api::node_label(client.map_err(|error| error.to_string())?, node, NodeScope::GROUP_LABEL).await
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
    use std::{fs, path::Path, sync::Mutex};

    use numaward_kube::api::fake::FakeApiServer;
    use serde_json::json;

    use super::*;

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
        let follower = Follower::new(NodeConfiguration { sources, loaded, log }, observer.clone());
        tokio::spawn(stop.run_until_cancelled_owned(follower.run(timing)));
        let reaches = async |words: &[&str]| {
            for _ in 0..1000 {
                let degraded = observer.status().degraded;
                let reason =
                    degraded.iter().find(|part| part.part == "configuration").map(|part| &part.reason);
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

        host.write("config.yaml", "log: {level: warn}");
        reaches(&[]).await;

        // The node gets another group.
        host.server.put_labels("a", &json!({"numaward.io/group": "gpu"}));
        for _ in 0..1000 {
            if levels.lock().unwrap().last() == Some(&LogLevel::Debug) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(*levels.lock().unwrap(), [LogLevel::Warn, LogLevel::Debug]);

        host.write("group.gpu.yaml", "strategie: native\notlp: {headers: s3cret}");
        reaches(&["group.gpu.yaml:1:1", "group.gpu.yaml:2:17", "cannot start with these files"]).await;
        assert!(observer.status().degraded.iter().all(|part| !part.reason.contains("s3cret")));
        host.write("group.gpu.yaml", "");
        reaches(&[]).await;
        assert_eq!(levels.lock().unwrap().last(), Some(&LogLevel::Warn));
    }
}

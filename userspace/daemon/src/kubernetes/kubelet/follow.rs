//! Follows the guarantees of the kubelet.
//!
//! The kubelet writes its state files, `cpu_manager_state` and `memory_manager_state`, when it admits a pod, by renaming a new file over
//! the old one. If a file is damaged, the problem is reported and the guarantees that were read before stay. The first container of a pod
//! starts after that write and only holds the namespaces of the pod. The state files are therefore read when a container starts: the
//! probes have the nodes before the containers with the work start. The names of pods arrive later.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use numaward_config::{Config, policy::KubeletVersion};
use numaward_engine::{
    Ledger,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint, unverified_data},
    kubelet::Checkpoints,
};
use numaward_kube::{
    api::Pods,
    pod_resources::{
        Client, PodResourcesError,
        messages::{AssignedPodResources, cpu_set},
    },
};
use numaward_model::FileStamp;
use numaward_observe::{DaemonPart, ForeignGuarantees, Observer};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::{
    directory,
    names::Names,
    pod_resources_socket,
    policies::read_text,
    view::{KubeletGuarantees, LatestGuarantees},
};

/// The interval at which the state files are checked for changes if no container starts.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The minimum time between two calls of the kubelet for the names of pods.
const MIN_CALL_DISTANCE: Duration = Duration::from_secs(10);

/// Follows the guarantees of the kubelet until the token is cancelled.
pub async fn follow(
    config: Config,
    observer: Arc<Observer>,
    pods: Option<Pods>,
    latest: LatestGuarantees,
    stop: CancellationToken,
) {
    let follower = Follower {
        version: config.kubelet_version.unwrap_or_default(),
        directory: directory(&config),
        stamps: None,
        socket: pod_resources_socket(&config),
        observer,
        pods,
        state: Arc::default(),
        latest,
        assigned: Vec::new(),
        has_changed: true,
    };
    stop.run_until_cancelled(follower.run()).await;
}

/// Reads the state files in the directory of the kubelet, and verifies their checksums. Returns their guarantees as a ledger, by the UID
/// of the pod and the name of the container; it is empty without files. Returns a message with the file if one is invalid.
fn read_state(directory: &Path, version: KubeletVersion) -> Result<Ledger, String> {
    let text = |file: &str| {
        let path = directory.join(file);
        read_text(&path, &path)
    };
    let (cpus, memory) = (text(CpuCheckpoint::FILE)?, text(MemoryCheckpoint::FILE)?);
    let location = directory.display().to_string();
    let read = Checkpoints::read(cpus.as_deref(), memory.as_deref(), &location, version);
    let mut read = read.map_err(|error| error.to_string())?;
    if let Some(fault) = [&cpus, &memory].into_iter().find_map(|text| unverified_data(text.as_deref()?)) {
        tracing::warn!(directory = location, %fault, "the part `data` of a state file of the kubelet has a wrong checksum: its older fields are read, which agree with it");
    }
    if let Err(shared) = read.share_within_pods() {
        tracing::warn!(directory = location, %shared, "the kubelet's state file contradicts itself");
    }
    Ok(read.ledger())
}

struct Follower {
    version: KubeletVersion,
    directory: PathBuf,
    /// Stamps of the state files that were last read without an error.
    stamps: Option<[Option<FileStamp>; 2]>,
    socket: PathBuf,
    observer: Arc<Observer>,
    pods: Option<Pods>,
    state: Arc<KubeletGuarantees>,
    latest: LatestGuarantees,
    assigned: Vec<AssignedPodResources>,
    /// True if the state files have changed since the latest call of the kubelet.
    has_changed: bool,
}

impl Follower {
    async fn run(mut self) {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let new_container = self.observer.new_container();
        let mut changes = self.pods.as_ref().map(Pods::changes);
        let mut next_call = Instant::now();
        loop {
            self.read();
            if Instant::now() >= next_call && (self.has_changed || self.has_nameless()) {
                self.call_kubelet().await;
                next_call = Instant::now() + MIN_CALL_DISTANCE;
            }
            self.report();
            let pod_change = async {
                match &mut changes {
                    Some(changes) => changes.changed().await.is_ok(),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = new_container.notified() => {}
                is_open = pod_change => if !is_open { changes = None },
                _ = ticks.tick() => {}
            }
        }
    }

    /// Returns the stamp of a state file; `None` if it does not exist.
    fn stamp(&self, file: &str) -> Option<FileStamp> {
        fs::metadata(self.directory.join(file)).ok().as_ref().map(FileStamp::new)
    }

    /// Reads the state files if they have changed. On an error, the guarantees that were read before stay.
    fn read(&mut self) {
        let stamps = [CpuCheckpoint::FILE, MemoryCheckpoint::FILE].map(|file| self.stamp(file));
        if self.stamps == Some(stamps) {
            return;
        }
        self.stamps = None;
        match read_state(&self.directory, self.version) {
            Ok(ledger) => {
                self.stamps = Some(stamps);
                self.observer.note(DaemonPart::Kubelet, Ok(()));
                if ledger != self.state.ledger {
                    tracing::info!(pods = ledger.owners().count(), "the guarantees of the kubelet changed");
                    Arc::make_mut(&mut self.state).ledger = ledger;
                    self.has_changed = true;
                }
            }
            Err(problem) => self.observer.note(DaemonPart::Kubelet, Err(problem)),
        }
    }

    /// Returns true if the name of a pod with a guarantee is unknown.
    fn has_nameless(&self) -> bool {
        let KubeletGuarantees { ledger, names, .. } = &*self.state;
        ledger.owners().any(|(uid, _)| names.pod(uid.as_str()).is_none())
    }

    async fn call_kubelet(&mut self) {
        let calls = async {
            let client = Client::connect(&self.socket).await?;
            Ok::<_, PodResourcesError>((client.list().await?, client.allocatable().await?))
        };
        match calls.await {
            Ok((assigned, allocatable)) => {
                (self.assigned, self.has_changed) = (assigned, false);
                let allocatable_cpus = cpu_set(&allocatable.cpu_ids);
                if allocatable_cpus != self.state.allocatable_cpus {
                    Arc::make_mut(&mut self.state).allocatable_cpus = allocatable_cpus;
                }
            }
            // The API server may have the names. Without names, the counters of a container are still reported.
            Err(error) => tracing::debug!(%error, "the kubelet does not report the assigned resources"),
        }
    }

    fn report(&mut self) {
        let stored = self.pods.as_ref().map(Pods::all).unwrap_or_default();
        let names = Names::new(stored.iter().map(AsRef::as_ref), &self.assigned, &self.state.ledger);
        if names != self.state.names {
            Arc::make_mut(&mut self.state).names = names;
        }
        self.latest.set(self.state.clone());
        let guarantees: Arc<dyn ForeignGuarantees> = self.state.clone();
        self.observer.adopt_foreign_guarantees(&guarantees);
    }
}

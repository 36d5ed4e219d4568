//! Keeps up with what the kubelet promises.
//!
//! The kubelet writes its state files, `cpu_manager_state` and `memory_manager_state`, when it admits a pod, by renaming
//! a new file over the old; a damaged one is reported, and what was read before stays. Then the pod's first container comes, which only holds the pod's
//! namespaces; so the state is read when a container comes, and the probes know the nodes before those that do the work.
//! Names come later, and may come late.

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
        CallError, Client,
        messages::{PodResources, cpu_set},
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
    view::{Kept, LastRead},
};

/// How often it is looked whether the state changed, if no container comes.
const LOOK: Duration = Duration::from_secs(1);
/// How often the kubelet is asked who is who, while somebody is not known.
const ASK: Duration = Duration::from_secs(10);

/// Follows the kubelet's promises until the token is cancelled.
pub async fn follow(
    config: Config,
    observer: Arc<Observer>,
    pods: Option<Pods>,
    last: LastRead,
    stop: CancellationToken,
) {
    let follower = Follower {
        version: config.kubelet_version.unwrap_or_default(),
        directory: directory(&config),
        stamps: None,
        socket: pod_resources_socket(&config),
        observer,
        pods,
        kept: Arc::default(),
        last,
        assigned: Vec::new(),
        is_news: true,
    };
    stop.run_until_cancelled(follower.run()).await;
}

/// Reads the state files in the kubelet's directory, with their checksums, as the ledger that they make, by the UID of
/// the pod and the name of the container. None at all: nothing is promised. Else says what is wrong with which file.
fn read_state(directory: &Path, version: KubeletVersion) -> Result<Ledger, String> {
    let text = |file: &str| {
        let path = directory.join(file);
        read_text(&path, &path)
    };
    let (cpus, memory) = (text(CpuCheckpoint::FILE)?, text(MemoryCheckpoint::FILE)?);
    let place = directory.display().to_string();
    let read = Checkpoints::read(cpus.as_deref(), memory.as_deref(), &place, version);
    let mut read = read.map_err(|error| error.to_string())?;
    if let Some(fault) = [&cpus, &memory].into_iter().find_map(|text| unverified_data(text.as_deref()?)) {
        tracing::warn!(directory = place, %fault, "a state file of the kubelet is read by its older fields");
    }
    if let Err(shared) = read.share_within_pods() {
        tracing::warn!(directory = place, %shared, "the kubelet's state file contradicts itself");
    }
    Ok(read.ledger())
}

struct Follower {
    version: KubeletVersion,
    directory: PathBuf,
    /// Of the state files that were read last without fault.
    stamps: Option<[Option<FileStamp>; 2]>,
    socket: PathBuf,
    observer: Arc<Observer>,
    pods: Option<Pods>,
    kept: Arc<Kept>,
    last: LastRead,
    assigned: Vec<PodResources>,
    /// Whether the state files changed since the kubelet was asked.
    is_news: bool,
}

impl Follower {
    async fn run(mut self) {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let came = self.observer.new_container();
        let mut changes = self.pods.as_ref().map(Pods::changes);
        let mut ask = Instant::now();
        loop {
            self.read();
            if Instant::now() >= ask && (self.is_news || self.has_nameless()) {
                self.ask().await;
                ask = Instant::now() + ASK;
            }
            self.report();
            let named = async {
                match &mut changes {
                    Some(changes) => changes.changed().await.is_ok(),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = came.notified() => {}
                is_open = named => if !is_open { changes = None },
                _ = look.tick() => {}
            }
        }
    }

    /// None: it is not there.
    fn stamp(&self, file: &str) -> Option<FileStamp> {
        fs::metadata(self.directory.join(file)).ok().as_ref().map(FileStamp::new)
    }

    /// Reads the state files if they changed. What cannot be read leaves what was read before.
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
                if ledger != self.kept.ledger {
                    tracing::info!(pods = ledger.owners().count(), "the kubelet's promises changed");
                    Arc::make_mut(&mut self.kept).ledger = ledger;
                    self.is_news = true;
                }
            }
            Err(problem) => self.observer.note(DaemonPart::Kubelet, Err(problem)),
        }
    }

    /// Whether there is a promised pod whose name is not known.
    fn has_nameless(&self) -> bool {
        let Kept { ledger, names, .. } = &*self.kept;
        ledger.owners().any(|(uid, _)| names.pod(uid.as_str()).is_none())
    }

    async fn ask(&mut self) {
        let asked = async {
            let client = Client::connect(&self.socket).await?;
            Ok::<_, CallError>((client.list().await?, client.allocatable().await?))
        };
        match asked.await {
            Ok((assigned, allocatable)) => {
                (self.assigned, self.is_news) = (assigned, false);
                let allocatable_cpus = cpu_set(&allocatable.cpu_ids);
                if allocatable_cpus != self.kept.allocatable_cpus {
                    Arc::make_mut(&mut self.kept).allocatable_cpus = allocatable_cpus;
                }
            }
            // The API server may know the names; and counters without names are still counters.
            Err(error) => tracing::debug!(%error, "the kubelet does not report what it assigned"),
        }
    }

    fn report(&mut self) {
        let stored = self.pods.as_ref().map(Pods::all).unwrap_or_default();
        let names = Names::new(stored.iter().map(AsRef::as_ref), &self.assigned, &self.kept.ledger);
        if names != self.kept.names {
            Arc::make_mut(&mut self.kept).names = names;
        }
        self.last.set(self.kept.clone());
        let kept: Arc<dyn ForeignGuarantees> = self.kept.clone();
        self.observer.adopt_foreign_guarantees(&kept);
    }
}

//! What the container runtime asks, and where each question goes.

use std::collections::BTreeMap;

use numaward_api::EnforcementMode;
use numaward_engine as engine;
use numaward_model::Settings;
use tokio::sync::{mpsc, oneshot};

use super::Attempt;
use crate::{
    error::AdmissionError,
    pod::{ContainerAsk, MemoryAsk, PodAsk, Synchronized, Unpinned, Update},
    reconciler::{Reconciler, ReconcilerLoop},
};

/// What the runtime asks of us, or tells.
pub(in crate::reconciler) enum Command {
    RunPod {
        ask: PodAsk,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    Create {
        ask: ContainerAsk,
        answer: oneshot::Sender<Result<(Settings, Option<Unpinned>), AdmissionError>>,
    },
    Bind {
        id: String,
        /// What to make of it if it is not known: its creation was not answered in time.
        ask: Option<Box<ContainerAsk>>,
        answer: oneshot::Sender<Option<Unpinned>>,
    },
    Stopped {
        id: String,
        answer: oneshot::Sender<()>,
    },
    PodOver {
        uid: String,
        sandbox: String,
        answer: oneshot::Sender<()>,
    },
    Synchronize {
        containers: Vec<ContainerAsk>,
        /// The UIDs of pods by the ids of their sandboxes.
        sandboxes: BTreeMap<String, String>,
        complete: bool,
        answer: oneshot::Sender<Synchronized>,
    },
    Resize {
        id: String,
        to: engine::Resources,
        memory: Option<MemoryAsk>,
        answer: oneshot::Sender<Result<Option<Settings>, AdmissionError>>,
    },
    /// What the containers of a pod share that have nothing of their own.
    ResizePod {
        uid: String,
        to: engine::Resources,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// From now on the runtime is told of settings that we write ourselves.
    Tell(mpsc::UnboundedSender<Vec<Update>>),
}

impl Reconciler {
    /// A pod is to run: what it asks for as a whole is admitted, or refused.
    pub async fn run_pod(&self, ask: PodAsk) -> Result<(), AdmissionError> {
        self.pods(|answer| Command::RunPod { ask, answer }).await?
    }

    /// A container is to be created: what the runtime shall set, and why it goes without a guarantee if it does.
    pub async fn create(&self, ask: ContainerAsk) -> Result<(Settings, Option<Unpinned>), AdmissionError> {
        self.pods(|answer| Command::Create { ask, answer }).await?
    }

    /// The container's process exists, and its cgroup; `ask` is what to make of it if its creation was not answered in
    /// time. Why it runs without what it should have, if it does.
    pub async fn bind(
        &self,
        id: String,
        ask: Option<Box<ContainerAsk>>,
    ) -> Result<Option<Unpinned>, AdmissionError> {
        self.pods(|answer| Command::Bind { id, ask, answer }).await
    }

    /// A container ended, or was never started.
    pub async fn stopped(&self, id: String) -> Result<(), AdmissionError> {
        self.pods(|answer| Command::Stopped { id, answer }).await
    }

    /// The sandbox of a pod was stopped.
    pub async fn pod_over(&self, uid: String, sandbox: String) -> Result<(), AdmissionError> {
        self.pods(|answer| Command::PodOver { uid, sandbox, answer }).await
    }

    /// These containers run, in these sandboxes with their pods' UIDs; no others, where this is `complete`.
    pub async fn synchronize(
        &self,
        containers: Vec<ContainerAsk>,
        sandboxes: BTreeMap<String, String>,
        complete: bool,
    ) -> Result<Synchronized, AdmissionError> {
        self.pods(|answer| Command::Synchronize { containers, sandboxes, complete, answer }).await
    }

    /// A container's requests are to change. What it is to hold then; none if it is not known.
    pub async fn resize(
        &self,
        id: String,
        to: engine::Resources,
        memory: Option<MemoryAsk>,
    ) -> Result<Option<Settings>, AdmissionError> {
        self.pods(|answer| Command::Resize { id, to, memory, answer }).await?
    }

    /// What the containers of a pod share that have nothing of their own is to change.
    pub async fn resize_pod(&self, uid: String, to: engine::Resources) -> Result<(), AdmissionError> {
        self.pods(|answer| Command::ResizePod { uid, to, answer }).await?
    }
}

impl ReconcilerLoop {
    /// Does what the runtime asks for.
    ///
    /// `overtakes`: something that the runtime asked before is not handled yet.
    pub(in crate::reconciler) fn pod_command(&mut self, command: Command, overtakes: bool) {
        // Whoever asked may have gone: what was decided stands, and is compared with what runs later.
        match command {
            Command::Tell(tell) => self.pods.tell = Some(tell),
            Command::RunPod { answer, .. } if self.mode() == EnforcementMode::Off => {
                drop(answer.send(Ok(())));
            }
            Command::Bind { answer, .. } if self.mode() == EnforcementMode::Off => drop(answer.send(None)),
            Command::Create { answer, .. } if self.mode() == EnforcementMode::Off => {
                drop(answer.send(Ok((Settings::default(), None))));
            }
            Command::Synchronize { answer, .. } if self.mode() == EnforcementMode::Off => {
                drop(answer.send(Synchronized::default()));
            }
            Command::Create { ask, answer } => {
                let attempt = if overtakes { Attempt::Again } else { Attempt::First };
                let created = self.create(&ask, attempt);
                if overtakes && matches!(created, Err(AdmissionError::Rejected(..))) {
                    // What it asks for may be given back by what it asked before.
                    self.put_off.push(Command::Create { ask, answer });
                    return;
                }
                let owner = created.as_ref().ok().and_then(|_| self.state.containers.get(&ask.id));
                let owner = owner.map(|placed| placed.of.owner.clone());
                drop(
                    answer.send(created.map(|(settings, unpinned)| (self.told(&ask.id, settings), unpinned))),
                );
                // The container is being made meanwhile.
                if let Some(owner) = owner {
                    self.decisions.note(&owner, &self.state);
                    self.publish();
                }
            }
            Command::RunPod { ask, answer } => {
                let admitted = self.run_pod(&ask, if overtakes { Attempt::Again } else { Attempt::First });
                if overtakes && matches!(admitted, Err(AdmissionError::Rejected(..))) {
                    self.put_off.push(Command::RunPod { ask, answer });
                    return;
                }
                drop(answer.send(admitted));
                self.publish();
            }
            Command::Bind { id, ask, answer } => {
                if let Some(ask) = ask.filter(|_| !self.state.containers.contains_key(&id)) {
                    self.adopt_started(&ask);
                }
                let _ = answer.send(self.bind(&id));
            }
            Command::Stopped { id, answer } => {
                self.stopped(&id);
                let _ = answer.send(());
            }
            Command::PodOver { uid, sandbox, answer } => {
                self.pod_over(&uid, &sandbox);
                let _ = answer.send(());
            }
            Command::Synchronize { containers, sandboxes, complete, answer } => {
                let mut result = self.synchronize(&containers, &sandboxes, complete);
                if self.mode() != EnforcementMode::On {
                    for update in result.updates.drain(..) {
                        self.told(&update.id, update.settings);
                    }
                }
                drop(answer.send(result));
            }
            Command::ResizePod { uid, to, answer } => drop(answer.send(self.resize_pod(&uid, &to))),
            Command::Resize { id, to, memory, answer } => {
                let resized = self.resize(&id, &to, memory);
                drop(answer.send(resized.map(|held| held.map(|settings| self.told(&id, settings)))));
            }
        }
    }

    /// What the runtime is told to set: nothing in a dry run.
    fn told(&self, id: &str, settings: Settings) -> Settings {
        if self.mode() == EnforcementMode::On {
            return settings;
        }
        for (knob, value) in settings.values().0 {
            tracing::info!(container = id, %knob, %value, "dry run: the runtime would be told");
        }
        Settings::default()
    }
}

//! What the container runtime asks of the reconciler.

use std::collections::BTreeMap;

use numaward_engine as engine;
use numaward_model::Settings;
use tokio::sync::{mpsc, oneshot};

use super::Reconciler;
use crate::core::{Message, pods::Command};
use numaward_guarantee::{
    error::AdmissionError,
    pod::{ContainerAsk, MemoryAsk, PodAsk, Synchronized, Unpinned, Update},
};

impl Reconciler {
    /// From now on what we write ourselves to containers is reported.
    pub fn send_updates(&self, sender: mpsc::UnboundedSender<Vec<Update>>) {
        // If the reconciler ends already, there is nothing to send.
        let _ = self.send(Message::Runtime(Box::new(Command::SendUpdates(sender))));
    }

    /// Asks on behalf of the container runtime, and waits for the answer.
    async fn runtime<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, AdmissionError> {
        let (answer, result) = oneshot::channel();
        self.send(Message::Runtime(Box::new(command(answer))))?;
        result.await.map_err(|_| AdmissionError::Stopping)
    }

    /// A pod is to run: what it asks for as a whole is admitted, or refused.
    pub async fn run_pod(&self, ask: PodAsk) -> Result<(), AdmissionError> {
        self.runtime(|answer| Command::RunPod { ask: Box::new(ask), answer }).await?
    }

    /// A container is to be created: what the runtime is to set, and why it goes without a guarantee if it does.
    pub async fn create(&self, ask: ContainerAsk) -> Result<(Settings, Option<Unpinned>), AdmissionError> {
        self.runtime(|answer| Command::Create { ask: Box::new(ask), answer }).await?
    }

    /// The container's process exists, and its cgroup; `ask` is what to make of it if its creation was not answered in
    /// time. Why it runs without what it should have, if it does.
    pub async fn bind(
        &self,
        id: String,
        ask: Option<Box<ContainerAsk>>,
    ) -> Result<Option<Unpinned>, AdmissionError> {
        self.runtime(|answer| Command::Bind { id, ask, answer }).await
    }

    /// A container ended, or was never started.
    pub async fn stopped(&self, id: String) -> Result<(), AdmissionError> {
        self.runtime(|answer| Command::Stopped { id, answer }).await
    }

    /// The sandbox of a pod was stopped.
    pub async fn pod_over(&self, uid: String, sandbox: String) -> Result<(), AdmissionError> {
        self.runtime(|answer| Command::PodOver { uid, sandbox, answer }).await
    }

    /// These containers run, in these sandboxes with their pods' UIDs; no others, where this is `complete`.
    pub async fn synchronize(
        &self,
        containers: Vec<ContainerAsk>,
        sandboxes: BTreeMap<String, String>,
        complete: bool,
    ) -> Result<Synchronized, AdmissionError> {
        self.runtime(|answer| Command::Synchronize { containers, sandboxes, complete, answer }).await
    }

    /// A container's requests are to change, and the runtime is asked to set `has`. What it is to hold then; none if it is
    /// not known.
    pub async fn resize(
        &self,
        id: String,
        to: engine::Resources,
        memory: Option<MemoryAsk>,
        has: Settings,
    ) -> Result<Option<Settings>, AdmissionError> {
        self.runtime(|answer| Command::Resize { id, to, memory, has: Box::new(has), answer }).await?
    }

    /// What the containers of a pod share that have nothing of their own is to change.
    pub async fn resize_pod(&self, uid: String, to: engine::Resources) -> Result<(), AdmissionError> {
        self.runtime(|answer| Command::ResizePod { uid, to, answer }).await?
    }
}

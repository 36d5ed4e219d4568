//! What the container runtime asks, and where each question goes.

use numaward_api::EnforcementMode;
use numaward_enforce::SettingsChange;
use numaward_guarantee::{command::PodCommand, error::AdmissionError, pod::SyncResult};
use numaward_model::Settings;
use tokio::sync::oneshot;

use super::Attempt;
use crate::core::{Core, inbox::RuntimeCommand};

/// Answers the runtime.
pub(super) type DeferredReply = Box<dyn FnOnce() + Send>;

impl Core {
    /// Does what the runtime asks for. What is answered when all know what was decided is returned.
    ///
    /// `overtakes`: something that the runtime asked before is not handled yet.
    pub(crate) fn pod_command(&mut self, numbered: RuntimeCommand, overtakes: bool) -> Option<DeferredReply> {
        /// Those who asked may have gone: what was decided stands, and is compared with what runs later.
        fn reply<T: Send + 'static>(answer: oneshot::Sender<T>, with: T) -> DeferredReply {
            Box::new(move || drop(answer.send(with)))
        }
        let attempt = if overtakes { Attempt::Again } else { Attempt::First };
        let is_off = self.mode() == EnforcementMode::Off;
        if self.must_wait(&numbered.command) {
            self.execution.deferred.push(numbered);
            return None;
        }
        let RuntimeCommand { number, command } = numbered;
        Some(match command {
            PodCommand::SendUpdates(sender) => {
                self.pods.updates = Some(sender);
                return None;
            }
            PodCommand::RunPod { answer, .. } if is_off => reply(answer, Ok(())),
            PodCommand::Bind { answer, .. } if is_off => reply(answer, None),
            PodCommand::Create { answer, .. } if is_off => reply(answer, Ok((Settings::default(), None))),
            PodCommand::Create { ask, answer } => {
                let created = self.create(&ask, attempt);
                if overtakes && matches!(created, Err(AdmissionError::Rejected(..))) {
                    // What it asks for may be given back by what it asked before.
                    let command = PodCommand::Create { ask, answer };
                    self.execution.deferred.push(RuntimeCommand { number, command });
                    return None;
                }
                let owner = created.as_ref().ok().and_then(|_| self.store.state.containers.get(&ask.id));
                let owner = owner.map(|placed| placed.of.owner.clone());
                let created =
                    created.map(|(settings, unpinned)| (self.for_runtime(&ask.id, settings), unpinned));
                drop(answer.send(created));
                // The container is being made meanwhile.
                if let Some(owner) = owner {
                    self.store.storage.decisions.note(&owner, &self.store.state);
                    self.note_guarantees_changed();
                }
                return None;
            }
            PodCommand::RunPod { ask, answer } => {
                let admitted = self.run_pod(&ask, attempt);
                if overtakes && matches!(admitted, Err(AdmissionError::Rejected(..))) {
                    let command = PodCommand::RunPod { ask, answer };
                    self.execution.deferred.push(RuntimeCommand { number, command });
                    return None;
                }
                let is_admitted = admitted.is_ok();
                drop(answer.send(admitted));
                if is_admitted {
                    self.note_guarantees_changed();
                }
                return None;
            }
            PodCommand::Bind { id, ask, answer } => {
                if let Some(ask) = ask.filter(|_| !self.store.state.containers.contains_key(&id)) {
                    self.adopt_started(&ask);
                }
                reply(answer, self.bind(&id))
            }
            PodCommand::Stopped { id, answer } => {
                self.stopped(&id);
                reply(answer, ())
            }
            PodCommand::PodStopped { uid, sandbox, answer } => {
                self.pod_stopped(&uid, &sandbox);
                reply(answer, ())
            }
            PodCommand::Synchronize { containers, sandboxes, complete, answer } => {
                let mut result = SyncResult::default();
                if is_off {
                    self.drop_gone(&containers, &sandboxes, complete);
                } else {
                    result = self.synchronize(&containers, &sandboxes, complete);
                }
                if self.mode() != EnforcementMode::On {
                    for update in result.updates.drain(..) {
                        self.for_runtime(&update.id, update.settings);
                    }
                    result.updates = self.take_back(&containers);
                }
                reply(answer, result)
            }
            PodCommand::ResizePod { uid, to, answer } => reply(answer, self.resize_pod(&uid, &to)),
            PodCommand::Resize { id, to, memory, has, answer } => {
                let resized = self.resize(&id, &to, memory, *has);
                reply(answer, resized.map(|held| held.map(|settings| self.for_runtime(&id, settings))))
            }
        })
    }

    /// Whether something else is waited for, and this would have to wait as well: pages would have to move.
    fn must_wait(&mut self, command: &PodCommand) -> bool {
        let PodCommand::Bind { id, .. } = command else { return false };
        let Some(placed) = self.store.state.containers.get(id).cloned() else { return false };
        if self.execution.busy.is_none() || !self.is_promised(&placed) {
            return false;
        }
        let change = SettingsChange::Hold(placed.cgroup.clone(), self.settings_of(&placed));
        self.plan(change).is_ok_and(|plan| self.execution.enforcer.may_wait(plan.steps()))
    }

    /// What the runtime is asked to set: nothing in a dry run.
    fn for_runtime(&self, id: &str, settings: Settings) -> Settings {
        if self.mode() == EnforcementMode::On {
            return settings;
        }
        for (knob, value) in settings.values().0 {
            tracing::info!(container = id, %knob, %value, "dry run: the runtime would be informed");
        }
        Settings::default()
    }
}

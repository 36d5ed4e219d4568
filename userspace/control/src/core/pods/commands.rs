//! Requests of the container runtime, and their dispatch.

use std::time::Instant;

use numaward_api::EnforcementMode;
use numaward_enforce::SettingsChange;
use numaward_guarantee::{command::PodCommand, error::AdmissionError, pod::SyncResult};
use numaward_model::Settings;
use tokio::sync::oneshot;

use super::{
    binding, ending,
    placement::{self, OwnerRequest},
    resize, room, shared_claims, synchronize, uninstall, waiting,
};
use crate::core::{Attempt, Core, execution::DeferredReply, inbox::RuntimeCommand, settings, shared_pool};

/// Handles a command of the runtime. Returns the reply that must be sent after the decision is published, if any.
///
/// `overtakes`: an earlier command of the runtime is not handled yet.
pub(crate) fn pod_command(
    core: &mut Core,
    numbered: RuntimeCommand,
    overtakes: bool,
) -> Option<DeferredReply> {
    /// The client may have disconnected. The decision remains, and is compared with the running containers later.
    fn reply<T: Send + 'static>(answer: oneshot::Sender<T>, with: T) -> DeferredReply {
        Box::new(move || drop(answer.send(with)))
    }
    let attempt = if overtakes { Attempt::Again } else { Attempt::First };
    let is_off = core.mode() == EnforcementMode::Off;
    if must_wait(core, &numbered.command) {
        core.execution.deferred.push(numbered);
        return None;
    }
    let RuntimeCommand { number, command } = numbered;
    Some(match command {
        PodCommand::SendUpdates(sender) => {
            core.execution.outbox.open(sender);
            return None;
        }
        PodCommand::RunPod { answer, .. } if is_off => reply(answer, Ok(())),
        PodCommand::Bind { answer, .. } if is_off => reply(answer, None),
        PodCommand::Create { answer, .. } if is_off => reply(answer, Ok((Settings::default(), None))),
        PodCommand::Create { ask, answer } => {
            let created = placement::create(core, &ask, attempt);
            if overtakes && matches!(created, Err(AdmissionError::Rejected(..))) {
                // An earlier command may release the resources that it requests.
                let command = PodCommand::Create { ask, answer };
                core.execution.deferred.push(RuntimeCommand { number, command });
                return None;
            }
            let asked = OwnerRequest::of_container(core, &ask);
            room::note_outcome(core, asked, &ask.pod, created.as_ref().err());
            let owner = created.as_ref().ok().and_then(|_| core.store.state.containers.get(&ask.id));
            let owner = owner.map(|placed| placed.of.owner.clone());
            let created =
                created.map(|(settings, unpinned)| (for_runtime(core, &ask.id, settings), unpinned));
            drop(answer.send(created));
            // The runtime creates the container meanwhile.
            if let Some(owner) = owner {
                core.store.storage.decisions.note(&owner, &core.store.state);
                shared_pool::note_guarantees_changed(core);
                shared_claims::divide(core, Instant::now());
            }
            return None;
        }
        PodCommand::RunPod { ask, answer } => {
            let admitted = placement::run_pod(core, &ask, attempt);
            if overtakes && matches!(admitted, Err(AdmissionError::Rejected(..))) {
                let command = PodCommand::RunPod { ask, answer };
                core.execution.deferred.push(RuntimeCommand { number, command });
                return None;
            }
            let is_admitted = admitted.is_ok();
            room::note_outcome(core, OwnerRequest::of_pod(&ask), &ask, admitted.as_ref().err());
            drop(answer.send(admitted));
            if is_admitted {
                shared_pool::note_guarantees_changed(core);
            }
            return None;
        }
        PodCommand::Bind { id, ask, answer } => {
            if let Some(ask) = ask.filter(|_| !core.store.state.containers.contains_key(&id)) {
                waiting::adopt_started(core, &ask);
            }
            reply(answer, binding::bind(core, &id))
        }
        PodCommand::Stopped { id, answer } => {
            ending::container_stopped(core, &id);
            reply(answer, ())
        }
        PodCommand::PodStopped { uid, sandbox, answer } => {
            ending::pod_stopped(core, &uid, &sandbox);
            reply(answer, ())
        }
        PodCommand::Synchronize { containers, sandboxes, complete, answer } => {
            let mut result = SyncResult::default();
            if is_off {
                synchronize::release_absent(core, &containers, &sandboxes, complete);
            } else {
                result = synchronize::synchronize(core, &containers, &sandboxes, complete);
            }
            if core.mode() != EnforcementMode::On {
                for update in result.updates.drain(..) {
                    for_runtime(core, &update.id, update.settings);
                }
                result.updates = uninstall::request_restores(core, &containers);
            }
            reply(answer, result)
        }
        PodCommand::ResizePod { uid, to, answer } => reply(answer, resize::resize_pod(core, &uid, &to)),
        PodCommand::Resize { id, to, memory, has, answer } => {
            let resized = resize::resize_container(core, &id, &to, memory, *has);
            reply(answer, resized.map(|held| held.map(|settings| for_runtime(core, &id, settings))))
        }
    })
}

/// Returns true if the command might block (because pages have to move) while another blocking operation is in progress.
fn must_wait(core: &mut Core, command: &PodCommand) -> bool {
    let PodCommand::Bind { id, .. } = command else { return false };
    let Some(placed) = core.store.state.containers.get(id).cloned() else { return false };
    if core.execution.busy.is_none() || !settings::is_guaranteed(core, &placed) {
        return false;
    }
    let change = SettingsChange::Hold(placed.cgroup.clone(), settings::container_settings(core, &placed));
    core.plan(change).is_ok_and(|plan| core.execution.enforcer.may_wait(plan.steps()))
}

/// Returns the settings for the runtime: none in a dry run, which logs them.
fn for_runtime(core: &Core, id: &str, settings: Settings) -> Settings {
    if core.mode() == EnforcementMode::On {
        return settings;
    }
    for (knob, value) in settings.values().0 {
        tracing::info!(container = id, %knob, %value, "dry run: the runtime would be asked to set this value");
    }
    Settings::default()
}

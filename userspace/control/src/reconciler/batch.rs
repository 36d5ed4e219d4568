//! Client commands: consecutive commands of the same kind are executed as one batch, all other commands one by one.

use numaward_guarantee::{
    command::{AdmissionOutcome, Command},
    error::AdmissionError,
    request::Request,
};
use tokio::sync::oneshot;

use super::ReconcilerLoop;
use crate::core::{Admission, BatchKind, QueuedCommand, batch, batch_key, rebalance::RoomRequest, release};

impl ReconcilerLoop {
    /// Executes the commands that were taken from the inbox.
    pub(super) fn handle_batch(&mut self, mut waiting: Vec<QueuedCommand>) {
        match waiting.first().and_then(|first| batch_key(&first.command)) {
            Some((kind, _)) if waiting.len() > 1 => match kind {
                BatchKind::Admission => self.admit_batch(waiting),
                BatchKind::Release => self.release_and_answer(waiting),
            },
            _ => waiting.drain(..).for_each(|waiting| self.command(waiting.command)),
        }
    }

    fn admit_batch(&mut self, waiting: Vec<QueuedCommand>) {
        let requests = waiting.iter().filter_map(|waiting| match &waiting.command {
            Command::Admit { request, .. } => Some(&**request),
            _ => None,
        });
        let requests: Vec<&Request> = requests.collect();
        let mut results = batch::admit_batch(&mut self.core, &requests).into_iter();
        self.process_effects();
        let mut postponed = Vec::new();
        let mut answers = Vec::new();
        for waiting in waiting {
            match results.next() {
                // An earlier command may release resources that this request needs.
                Some(Err(_)) if waiting.overtakes => postponed.push(waiting),
                None => postponed.push(waiting),
                Some(result) => answers.push((waiting.command, result)),
            }
        }
        if let Some(inbox) = &mut self.core.execution.inbox {
            inbox.requeue_clients(postponed);
        }
        for (command, result) in answers {
            if let Command::Admit { request, dry_run, answer } = command {
                self.answer_admission(&request, dry_run, answer, result);
            }
        }
    }

    fn release_and_answer(&mut self, waiting: Vec<QueuedCommand>) {
        let releases = waiting.into_iter().filter_map(|waiting| match waiting.command {
            Command::Release { name, answer } => Some((name, answer)),
            _ => None,
        });
        let releases: Vec<_> = releases.collect();
        let names: Vec<&str> = releases.iter().map(|(name, _)| name.as_str()).collect();
        let results = release::release_batch(&mut self.core, &names);
        self.process_effects();
        for ((_, answer), result) in releases.into_iter().zip(results) {
            let _ = answer.send(result);
        }
    }

    /// Answers the client of an admitted or refused request, unless a rebalance starts for the request.
    pub(super) fn answer_admission(
        &mut self,
        request: &Request,
        dry_run: bool,
        answer: oneshot::Sender<Result<AdmissionOutcome, AdmissionError>>,
        result: Result<Admission, AdmissionError>,
    ) {
        let (result, answer) = match self.answer(result, &request.name) {
            Err(refused @ AdmissionError::Rejected(..)) if !dry_run => {
                let waiter = Some((answer, refused));
                let room = RoomRequest::Workload(Box::new(request.clone()), true);
                let waiter = self.rebalancing.start_automatic(&mut self.core, &room, waiter);
                let Some((answer, refused)) = waiter else { return };
                (Err(refused), answer)
            }
            result => (result, answer),
        };
        let admitted = matches!(result, Ok(AdmissionOutcome::Admitted(_)));
        // No client is left to use or release the guarantee.
        if answer.send(result).is_err() && admitted {
            tracing::info!(
                name = request.name,
                "the client of this request disconnected: the guarantee is released"
            );
            let _ = release::release(&mut self.core, &request.name);
            // Needed here too, because the container runtime may wait for the freed resources.
            self.process_effects();
        }
    }
}

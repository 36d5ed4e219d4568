//! What clients asked for: commands that go together are handled as one, all others alone.

use numaward_guarantee::{
    command::{Answer, Command},
    error::AdmissionError,
    request::Request,
};
use tokio::sync::oneshot;

use super::ReconcilerLoop;
use crate::core::{Admission, Kind, Waiting, goes_with};

impl ReconcilerLoop {
    /// Handles what was taken from the inbox at once.
    pub(super) fn handle_batch(&mut self, mut waiting: Vec<Waiting>) {
        match waiting.first().and_then(|first| goes_with(&first.command)) {
            Some((kind, _)) if waiting.len() > 1 => match kind {
                Kind::Admission => self.admissions(waiting),
                Kind::Release => self.releases(waiting),
            },
            _ => waiting.drain(..).for_each(|waiting| self.command(waiting.command)),
        }
    }

    fn admissions(&mut self, waiting: Vec<Waiting>) {
        let requests = waiting.iter().filter_map(|waiting| match &waiting.command {
            Command::Admit { request, .. } => Some(&**request),
            _ => None,
        });
        let requests: Vec<&Request> = requests.collect();
        let mut results = self.core.admit_together(&requests).into_iter();
        self.process_effects();
        let mut later = Vec::new();
        let mut answers = Vec::new();
        for waiting in waiting {
            match results.next() {
                // What came before it may give back what it asks for.
                Some(Err(_)) if waiting.overtakes => later.push(waiting),
                None => later.push(waiting),
                Some(result) => answers.push((waiting.command, result)),
            }
        }
        if let Some(inbox) = &mut self.core.execution.inbox {
            inbox.put_back_others(later);
        }
        for (command, result) in answers {
            if let Command::Admit { request, dry_run, answer } = command {
                self.answer_admission(&request, dry_run, answer, result);
            }
        }
    }

    fn releases(&mut self, waiting: Vec<Waiting>) {
        let asked = waiting.into_iter().filter_map(|waiting| match waiting.command {
            Command::Release { name, answer } => Some((name, answer)),
            _ => None,
        });
        let asked: Vec<_> = asked.collect();
        let names: Vec<&str> = asked.iter().map(|(name, _)| name.as_str()).collect();
        let results = self.core.release_batch(&names);
        self.process_effects();
        for ((_, answer), result) in asked.into_iter().zip(results) {
            let _ = answer.send(result);
        }
    }

    /// Answers a client that asked for an allocation, unless room is made for it.
    pub(super) fn answer_admission(
        &mut self,
        request: &Request,
        dry_run: bool,
        answer: oneshot::Sender<Result<Answer, AdmissionError>>,
        result: Result<Admission, AdmissionError>,
    ) {
        let (result, answer) = match self.answer(result, &request.name) {
            Err(refused @ AdmissionError::Rejected(..)) if !dry_run => {
                let waiter = Some((answer, refused));
                let waiter = self.rebalancing.start_automatic(&mut self.core, request, waiter);
                let Some((answer, refused)) = waiter else { return };
                (Err(refused), answer)
            }
            result => (result, answer),
        };
        let admitted = matches!(result, Ok(Answer::Admitted(_)));
        // Nobody is there who would use or release it.
        if answer.send(result).is_err() && admitted {
            tracing::info!(name = request.name, "nobody waits for this allocation any more");
            let _ = self.core.release(&request.name);
            // Also where the container runtime waits for something.
            self.process_effects();
        }
    }
}

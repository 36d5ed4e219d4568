//! What was recorded, moment by moment: forth, back, and to a time.
//!
//! A moment is shown as top would have shown it: with its rates, and with the history before it. A step forth takes one
//! moment to be read; any other begins at a complete moment far enough back for the history.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use tokio::time::sleep_until;

use super::{
    feed::{self, Update},
    model::{HISTORY, Model, Recorded},
};
use crate::{
    args::Replay,
    recording::{Mark, Moment, Recording, part, time},
};

const MINUTE: u64 = 60_000;
/// While nothing was recorded, as the daemon was not reached, nobody waits for longer.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// A recording, and where it is looked at.
pub(crate) struct Player {
    pub(crate) recording: Recording,
    marks: Vec<Mark>,
    /// The moments that are shown: the first and the last.
    range: (usize, usize),
    at: usize,
    /// What is known at the moment.
    pub(crate) model: Model,
    /// When the moment was come to: it does not age.
    pub(crate) came: Instant,
    is_playing: bool,
}

impl Player {
    /// Opens a recording, at the beginning that was asked for.
    pub(crate) fn open(asked: &Replay) -> anyhow::Result<Self> {
        let mut recording = Recording::open(&asked.file)?;
        let marks = recording.marks.clone();
        let (Some(begin), Some(end)) = (marks.first(), marks.last()) else {
            bail!("{} holds nothing", asked.file.display());
        };
        let (begin, end) = (begin.at_millis, end.at_millis);
        let (from, to) = part(asked.begin, asked.end, (begin, end));
        let first = marks.partition_point(|mark| mark.at_millis < from);
        let after = marks.partition_point(|mark| mark.at_millis <= to);
        if first >= after {
            bail!(
                "{}: nothing was recorded from {} to {}; it was from {} to {}",
                asked.file.display(),
                time(from),
                time(to),
                time(begin),
                time(end)
            );
        }
        let model = Self::model_of(&mut recording, 0, Instant::now())?;
        let range = (first, after - 1);
        let mut player =
            Self { recording, marks, range, at: 0, model, came: Instant::now(), is_playing: false };
        player.show(first)?;
        Ok(player)
    }

    /// When the moment was, in milliseconds since 1970.
    pub(crate) fn at_millis(&self) -> u64 {
        self.marks[self.at].at_millis
    }

    /// Whether there is no other moment.
    pub(crate) fn is_alone(&self) -> bool {
        self.range.0 == self.range.1
    }

    /// Goes on by a moment. Not at the end.
    pub(crate) fn step(&mut self) -> anyhow::Result<bool> {
        let is_over = self.at >= self.range.1;
        if !is_over {
            self.go(self.at + 1)?;
        }
        Ok(!is_over)
    }

    /// While it plays: waits for the next moment.
    pub(crate) async fn play(&mut self) -> anyhow::Result<()> {
        if !self.is_playing {
            std::future::pending::<()>().await;
        }
        let next = self.marks[(self.at + 1).min(self.range.1)].at_millis;
        let wait = Duration::from_millis(next.saturating_sub(self.at_millis())).min(LONGEST_WAIT);
        sleep_until((self.came + wait).into()).await;
        if !self.step()? {
            self.is_playing = false;
            self.say();
        }
        Ok(())
    }

    /// Does what a key asks for, if it is one of a recording.
    pub(crate) fn key(&mut self, key: KeyEvent) -> anyhow::Result<bool> {
        let (first, last) = self.range;
        let now = self.at_millis();
        let before = |at: u64| self.marks.partition_point(|mark| mark.at_millis <= at).saturating_sub(1);
        let has_event = |at: &usize| self.marks[*at].sort.has_events;
        let at = match key.code {
            KeyCode::Char('t') => self.at + 1,
            KeyCode::Char('T') => self.at.saturating_sub(1),
            KeyCode::Char(']') => {
                self.marks.partition_point(|mark| mark.at_millis < now.saturating_add(MINUTE))
            }
            KeyCode::Char('[') => before(now.saturating_sub(MINUTE)),
            KeyCode::Char('n') => (self.at + 1..=last).find(has_event).unwrap_or(self.at),
            KeyCode::Char('N') => (first..self.at).rev().find(has_event).unwrap_or(self.at),
            KeyCode::Char('b') => first,
            KeyCode::Char('e') => last,
            KeyCode::Char('p') => {
                self.is_playing = !self.is_playing && self.at < last;
                self.came = Instant::now();
                self.say();
                return Ok(true);
            }
            _ => return Ok(false),
        };
        self.go(at.clamp(first, last))?;
        Ok(true)
    }

    fn go(&mut self, at: usize) -> anyhow::Result<()> {
        match at {
            at if at == self.at => Ok(()),
            at if at == self.at + 1 => {
                self.came = Instant::now();
                let moment = self.recording.moment(at)?;
                self.take(at, moment);
                self.at = at;
                self.say();
                Ok(())
            }
            at => self.show(at),
        }
    }

    /// Shows a moment from nothing: begins so far back that its history is known.
    fn show(&mut self, at: usize) -> anyhow::Result<()> {
        self.came = Instant::now();
        let from = self.recording.run_of(at.saturating_sub(HISTORY));
        self.model = Self::model_of(&mut self.recording, from, self.came)?;
        for at in from..=at {
            let moment = self.recording.moment(at)?;
            self.take(at, moment);
        }
        self.at = at;
        self.say();
        Ok(())
    }

    /// A model that knows the host, as a complete moment has it.
    fn model_of(recording: &mut Recording, at: usize, now: Instant) -> anyhow::Result<Model> {
        let host = recording.moment(at)?.host.context("a complete moment of the recording has no host")?;
        let mut model = Model::new(host.topology, host.version, now);
        model.step_seconds = host.step_seconds.max(1);
        if !recording.warnings.is_empty() {
            model.troubles.insert("recording", recording.warnings.join("; "));
        }
        Ok(model)
    }

    fn take(&mut self, at: usize, moment: Moment) {
        let mut updates = Vec::new();
        // Elsewhere, the host is the same, and what is counted goes on.
        if let Some(host) = moment.host.filter(|_| self.marks[at].sort.is_connected) {
            let (topology, version, past) = (host.topology, host.version, host.past);
            let host = feed::Host { topology, version, events: Vec::new(), past };
            updates.push(Update::Connected(Box::new(host)));
        }
        updates.extend(moment.allocations.map(Update::Allocations));
        updates.extend(moment.status.map(Update::Status));
        updates.extend(moment.events.into_iter().map(|event| Update::Event(Box::new(event))));
        updates.extend(Some(Update::Missed(moment.missed_events)));
        updates.extend(moment.sample.map(|sample| Update::Sample(Box::new(sample))));
        updates.extend(moment.lost.map(|reason| Update::Lost { reason, again: Duration::ZERO }));
        for update in updates {
            self.model.take(update, self.came);
        }
    }

    /// Has the screen show where it is.
    fn say(&mut self) {
        let (first, last) = self.range;
        self.model.recorded = Some(Recorded {
            time: time(self.at_millis()),
            number: self.at - first + 1,
            count: last - first + 1,
            is_playing: self.is_playing,
        });
    }
}

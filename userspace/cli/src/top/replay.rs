//! Player of a recording, which steps forward and back by moments and jumps to times.
//!
//! A moment is shown as top would have shown it, with rates and the history before it. A step forward reads one moment;
//! any other move reads from a complete moment that is far enough back for the history.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use tokio::time::sleep_until;

use super::{
    feed::{self, FeedUpdate},
    model::{MAX_HISTORY_SAMPLES, ReplayPosition, TopModel},
};
use crate::{
    args::ReplayArgs,
    recording::{Moment, MomentHeader, Recording, format_time, time_range},
};

const MILLIS_PER_MINUTE: u64 = 60_000;
/// Maximum pause of a replay between two moments. The recorded gap is longer while the daemon was not reached.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A recording and the current position in it.
pub(crate) struct Player {
    pub(crate) recording: Recording,
    headers: Vec<MomentHeader>,
    /// Indices of the first and the last moment that are shown.
    range: (usize, usize),
    at: usize,
    /// State at the current moment.
    pub(crate) model: TopModel,
    /// Time at which the current moment was shown. The moment itself does not age.
    pub(crate) shown_at: Instant,
    is_playing: bool,
}

impl Player {
    /// Opens a recording at the requested beginning.
    pub(crate) fn open(args: &ReplayArgs) -> anyhow::Result<Self> {
        let mut recording = Recording::open(&args.file)?;
        let headers = recording.headers.clone();
        let (Some(begin), Some(end)) = (headers.first(), headers.last()) else {
            bail!("{} has no moment", args.file.display());
        };
        let (begin, end) = (begin.at_millis, end.at_millis);
        let (from, to) = time_range(args.begin, args.end, (begin, end));
        let first = headers.partition_point(|header| header.at_millis < from);
        let after = headers.partition_point(|header| header.at_millis <= to);
        if first >= after {
            bail!(
                "{}: nothing was recorded from {} to {}; the recording is from {} to {}",
                args.file.display(),
                format_time(from),
                format_time(to),
                format_time(begin),
                format_time(end)
            );
        }
        let model = Self::model_at(&mut recording, 0, Instant::now())?;
        let range = (first, after - 1);
        let mut player =
            Self { recording, headers, range, at: 0, model, shown_at: Instant::now(), is_playing: false };
        player.rebuild(first)?;
        Ok(player)
    }

    /// Returns the time of the moment, in milliseconds since 1970.
    pub(crate) fn at_millis(&self) -> u64 {
        self.headers[self.at].at_millis
    }

    /// Returns whether only one moment is shown.
    pub(crate) fn is_single(&self) -> bool {
        self.range.0 == self.range.1
    }

    /// Goes to the next moment. Returns `false` at the end.
    pub(crate) fn step(&mut self) -> anyhow::Result<bool> {
        let is_over = self.at >= self.range.1;
        if !is_over {
            self.go_to(self.at + 1)?;
        }
        Ok(!is_over)
    }

    /// While the recording plays, waits for the next moment; otherwise never returns.
    pub(crate) async fn play(&mut self) -> anyhow::Result<()> {
        if !self.is_playing {
            std::future::pending::<()>().await;
        }
        let next = self.headers[(self.at + 1).min(self.range.1)].at_millis;
        let wait = Duration::from_millis(next.saturating_sub(self.at_millis())).min(MAX_PAUSE);
        sleep_until((self.shown_at + wait).into()).await;
        if !self.step()? {
            self.is_playing = false;
            self.update_position();
        }
        Ok(())
    }

    /// Handles a key of the player. Returns `false` for other keys.
    pub(crate) fn key(&mut self, key: KeyEvent) -> anyhow::Result<bool> {
        let (first, last) = self.range;
        let now = self.at_millis();
        let before =
            |at: u64| self.headers.partition_point(|header| header.at_millis <= at).saturating_sub(1);
        let has_event = |at: &usize| self.headers[*at].flags.has_events;
        let at = match key.code {
            KeyCode::Char('t') => self.at + 1,
            KeyCode::Char('T') => self.at.saturating_sub(1),
            KeyCode::Char(']') => self
                .headers
                .partition_point(|header| header.at_millis < now.saturating_add(MILLIS_PER_MINUTE)),
            KeyCode::Char('[') => before(now.saturating_sub(MILLIS_PER_MINUTE)),
            KeyCode::Char('n') => (self.at + 1..=last).find(has_event).unwrap_or(self.at),
            KeyCode::Char('N') => (first..self.at).rev().find(has_event).unwrap_or(self.at),
            KeyCode::Char('b') => first,
            KeyCode::Char('e') => last,
            KeyCode::Char('p') => {
                self.is_playing = !self.is_playing && self.at < last;
                self.shown_at = Instant::now();
                self.update_position();
                return Ok(true);
            }
            _ => return Ok(false),
        };
        self.go_to(at.clamp(first, last))?;
        Ok(true)
    }

    fn go_to(&mut self, at: usize) -> anyhow::Result<()> {
        match at {
            at if at == self.at => Ok(()),
            at if at == self.at + 1 => {
                self.shown_at = Instant::now();
                let moment = self.recording.moment(at)?;
                self.take(at, moment);
                self.at = at;
                self.update_position();
                Ok(())
            }
            at => self.rebuild(at),
        }
    }

    /// Rebuilds the model at a moment from a complete moment that is far enough back for the history.
    fn rebuild(&mut self, at: usize) -> anyhow::Result<()> {
        self.shown_at = Instant::now();
        let from = self.recording.run_start(at.saturating_sub(MAX_HISTORY_SAMPLES));
        self.model = Self::model_at(&mut self.recording, from, self.shown_at)?;
        for at in from..=at {
            let moment = self.recording.moment(at)?;
            self.take(at, moment);
        }
        self.at = at;
        self.update_position();
        Ok(())
    }

    /// Creates a model with the host of a complete moment.
    fn model_at(recording: &mut Recording, at: usize, now: Instant) -> anyhow::Result<TopModel> {
        let host = recording.moment(at)?.host.context("a complete moment of the recording has no host")?;
        let mut model = TopModel::new(host.topology, host.version, now);
        model.step_seconds = host.step_seconds.max(1);
        if !recording.warnings.is_empty() {
            model.failures.insert("recording", recording.warnings.join("; "));
        }
        Ok(model)
    }

    fn take(&mut self, at: usize, moment: Moment) {
        let mut updates = Vec::new();
        // Later complete moments of the same connection have the same host and continue its counters.
        if let Some(host) = moment.host.filter(|_| self.headers[at].flags.is_connected) {
            let (topology, version, past) = (host.topology, host.version, host.past);
            let host = feed::FeedHost { topology, version, events: Vec::new(), past };
            updates.push(FeedUpdate::Connected(Box::new(host)));
        }
        updates.extend(moment.allocations.map(FeedUpdate::Allocations));
        updates.extend(moment.status.map(FeedUpdate::Status));
        updates.extend(moment.events.into_iter().map(|event| FeedUpdate::Event(Box::new(event))));
        updates.extend(Some(FeedUpdate::Missed(moment.missed_events)));
        updates.extend(moment.sample.map(|sample| FeedUpdate::Sample(Box::new(sample))));
        updates.extend(moment.lost.map(|reason| FeedUpdate::Lost { reason, retry_in: Duration::ZERO }));
        for update in updates {
            self.model.take(update, self.shown_at);
        }
    }

    /// Updates the position that the screen shows.
    fn update_position(&mut self) {
        let (first, last) = self.range;
        self.model.recorded = Some(ReplayPosition {
            time: format_time(self.at_millis()),
            number: self.at - first + 1,
            count: last - first + 1,
            is_playing: self.is_playing,
        });
    }
}

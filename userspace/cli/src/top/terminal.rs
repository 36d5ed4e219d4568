//! Terminal of `top` and `replay`: takes it over, draws, and restores it.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyEvent, KeyEventKind},
};
use rustix::process::{Signal, getpid, kill_process};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};

use super::{
    draw,
    feed::FeedUpdate,
    model::TopModel,
    replay::Player,
    screen::{KeyAction, Screen, View},
};
use crate::args::WorkloadListArgs;

/// Interval at which the screen is drawn without new data, so that ages and waiting times grow.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);

/// Terminal that is restored when this is dropped. After a panic, the hook that ratatui sets restores it.
struct TerminalGuard(DefaultTerminal);

impl TerminalGuard {
    fn take() -> io::Result<Self> {
        // The setup may have failed half-way. Its error is more useful than one of the restoration.
        ratatui::try_init().map(Self).inspect_err(|_| drop(ratatui::try_restore()))
    }
}

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        let _ = self.0.show_cursor();
        // If the terminal no longer exists, nothing can be restored.
        let _ = ratatui::try_restore();
    }
}

/// Source of the data that is drawn.
pub(crate) enum ScreenSource {
    /// A daemon.
    Live { updates: mpsc::Receiver<FeedUpdate>, model: Box<TopModel> },
    /// A recording.
    Recorded(Box<Player>),
}

impl ScreenSource {
    fn model(&self) -> &TopModel {
        match self {
            Self::Live { model, .. } => model,
            Self::Recorded(player) => &player.model,
        }
    }

    /// Returns the time that ages are relative to.
    fn now(&self) -> Instant {
        match self {
            Self::Live { .. } => Instant::now(),
            Self::Recorded(player) => player.shown_at,
        }
    }

    /// Waits for new data.
    async fn next(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Live { updates, model } => {
                model.take(
                    updates.recv().await.context("the connection to the daemon has ended")?,
                    Instant::now(),
                );
                // All pending updates are taken before the next drawing.
                while let Ok(update) = updates.try_recv() {
                    model.take(update, Instant::now());
                }
                Ok(())
            }
            Self::Recorded(player) => player.play().await,
        }
    }

    /// Handles a key that the screen does not use. Returns whether it was used.
    fn key(&mut self, key: KeyEvent) -> anyhow::Result<bool> {
        match self {
            Self::Live { .. } => Ok(false),
            Self::Recorded(player) => player.key(key),
        }
    }
}

/// Draws until the user quits, or the terminal is gone. Begins with the details of the workload with this key, if one
/// is given.
pub(crate) async fn run(
    mut source: ScreenSource,
    list: WorkloadListArgs,
    key: Option<String>,
) -> anyhow::Result<()> {
    let palette = draw::Palette::from_environment();
    let view = key.clone().map_or(View::Lists, View::Workload);
    let mut screen = Screen { list, palette, view, selected: key, ..Screen::default() };
    let mut exit_signals =
        [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()].map(signal);
    let [Ok(terminate), Ok(hangup), Ok(interrupt)] = &mut exit_signals else {
        anyhow::bail!("signals cannot be received");
    };
    let unusable = "the terminal cannot be used; --batch or --once print tables";
    let mut terminal = TerminalGuard::take().context(unusable)?;
    let mut keys = keys();
    let mut ticks = interval(REDRAW_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        terminal
            .0
            .draw(|frame| draw::draw(frame, &mut screen, source.model(), source.now()))
            .context(unusable)?;
        tokio::select! {
            news = source.next() => news?,
            event = keys.recv() => match event {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                    if !screen.takes_text(key) && source.key(key)? {
                        continue;
                    }
                    match screen.handle_key(key, source.model()) {
                        KeyAction::Draw => {}
                        KeyAction::Quit => return Ok(()),
                        KeyAction::Suspend => {
                            drop(terminal);
                            // After `fg`, the process continues here.
                            kill_process(getpid(), Signal::TSTP).context("this process cannot be stopped")?;
                            terminal = TerminalGuard::take().context(unusable)?;
                        }
                    }
                }
                // The size is read at each drawing, so that a resize needs no action.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error).context(unusable),
                None => return Ok(()),
            },
            _ = ticks.tick() => {}
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
    }
}

/// Reads keys in a thread of its own.
fn keys() -> mpsc::Receiver<io::Result<Event>> {
    let (sender, receiver) = mpsc::channel(16);
    thread::spawn(move || {
        loop {
            let event = event::read();
            let is_over = event.is_err();
            if sender.blocking_send(event).is_err() || is_over {
                return;
            }
        }
    });
    receiver
}

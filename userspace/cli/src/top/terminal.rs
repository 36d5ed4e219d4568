//! The terminal: taken over, drawn on, and given back.

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
    feed::Update,
    model::Model,
    replay::Player,
    screen::{Screen, Then},
};
use crate::args::Choice;

/// Ages and waiting times that are shown grow also while nothing comes.
const TICK: Duration = Duration::from_secs(1);

/// Gives the terminal back when dropped. A panic gives it back too, by the hook that ratatui sets.
struct Taken(DefaultTerminal);

impl Taken {
    fn take() -> io::Result<Self> {
        // It may have come half-way. The first error says more than one from here.
        ratatui::try_init().map(Self).inspect_err(|_| drop(ratatui::try_restore()))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let _ = self.0.show_cursor();
        // Where there is no terminal any more, nothing is left to give back.
        let _ = ratatui::try_restore();
    }
}

/// Where what is drawn comes from.
pub(crate) enum Source {
    /// A daemon.
    Live { updates: mpsc::Receiver<Update>, model: Box<Model> },
    /// A recording.
    Recorded(Box<Player>),
}

impl Source {
    fn model(&self) -> &Model {
        match self {
            Self::Live { model, .. } => model,
            Self::Recorded(player) => &player.model,
        }
    }

    /// The time at which the model is looked at.
    fn now(&self) -> Instant {
        match self {
            Self::Live { .. } => Instant::now(),
            Self::Recorded(player) => player.came,
        }
    }

    /// Waits until there is something new.
    async fn next(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Live { updates, model } => {
                model.take(updates.recv().await.context("the daemon is no longer followed")?, Instant::now());
                // All that is there is taken in before it is drawn.
                while let Ok(update) = updates.try_recv() {
                    model.take(update, Instant::now());
                }
                Ok(())
            }
            Self::Recorded(player) => player.play().await,
        }
    }

    /// Does what a key asks for, if the screen has nothing to do with it.
    fn key(&mut self, key: KeyEvent) -> anyhow::Result<bool> {
        match self {
            Self::Live { .. } => Ok(false),
            Self::Recorded(player) => player.key(key),
        }
    }
}

/// Draws until the user has seen enough, or the terminal is gone.
pub(crate) async fn run(mut source: Source, choice: Choice) -> anyhow::Result<()> {
    let paint = draw::Paint::from_environment();
    let mut screen = Screen { choice, paint, ..Screen::default() };
    let mut ends = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()].map(signal);
    let [Ok(terminate), Ok(hangup), Ok(interrupt)] = &mut ends else {
        anyhow::bail!("signals cannot be received");
    };
    let unusable = "the terminal cannot be used; --batch or --once print tables";
    let mut taken = Taken::take().context(unusable)?;
    let mut keys = keys();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        taken
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
                    match screen.key(key, source.model()) {
                        Then::Draw => {}
                        Then::Quit => return Ok(()),
                        Then::Suspend => {
                            drop(taken);
                            // Goes on where it is continued.
                            kill_process(getpid(), Signal::TSTP).context("this process cannot be stopped")?;
                            taken = Taken::take().context(unusable)?;
                        }
                    }
                }
                // Its size is asked for each time it is drawn on.
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

/// Keys as they are pressed, read by a thread of their own.
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

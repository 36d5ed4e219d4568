//! `numaward top`: nodes and workloads live; and `numaward replay`: the same of a recording.
//!
//! ```text
//! daemon ──── stream ── feed ── updates ──┬── model ──┬── screen (keys, what is shown) ── draw ── terminal
//! recording ── moments ── replay ─────────┘           └── batch ── tables, or JSON lines
//! ```
//!
//! The screen works over ssh, on 80×24 and on whatever else, without colours (`NO_COLOR`) and without characters beyond
//! ASCII (a locale that is not UTF-8). The terminal is given back as it was, however it ends.

mod accesses;
mod batch;
mod detail;
mod draw;
pub(crate) mod feed;
mod list;
mod model;
mod replay;
mod screen;
mod terminal;

use std::{
    io::{self, IsTerminal},
    sync::Arc,
    time::Instant,
};

use anyhow::bail;
use tokio::sync::mpsc;

pub(crate) use self::model::Totals;
use self::{feed::Update, model::Model, replay::Player, terminal::Source};
use crate::{
    args::{Format, Replay, Shown},
    client::Server,
};

/// Updates that wait to be shown; the stream waits when they are so many.
const UPDATES: usize = 64;

/// Shows what the daemon sends, until the user has seen enough.
pub(crate) async fn run(server: Server, shown: &Shown, format: Format) -> anyhow::Result<()> {
    let is_batch = is_batch(shown, format)?;
    let host = feed::connect(&server).await?;
    let mut model = Model::new(host.topology.clone(), host.version.clone(), Instant::now());
    let (sender, mut updates) = mpsc::channel::<Update>(UPDATES);
    let feed = tokio::spawn(feed::follow(Arc::new(server), host, sender));
    let done = if is_batch {
        batch::run(&mut updates, &mut model, shown, format).await
    } else {
        terminal::run(Source::Live { updates, model: Box::new(model) }, shown.choice.clone()).await
    };
    feed.abort();
    done
}

/// Shows what was recorded.
pub(crate) async fn replay(asked: &Replay) -> anyhow::Result<()> {
    let shown = &asked.shown;
    let is_batch = is_batch(shown, asked.output.output)?;
    let player = Player::open(asked)?;
    if is_batch {
        batch::replay(player, shown, asked.output.output)
    } else {
        terminal::run(Source::Recorded(Box::new(player)), shown.choice.clone()).await
    }
}

/// Whether tables are wanted rather than a screen.
fn is_batch(shown: &Shown, format: Format) -> anyhow::Result<bool> {
    let is_batch =
        shown.batch || shown.once || shown.count.is_some() || matches!(format, Format::Json | Format::Yaml);
    if !is_batch {
        if !io::stdout().is_terminal() {
            bail!("the output is no terminal; --batch or --once print tables");
        }
        if matches!(std::env::var("TERM").as_deref(), Err(_) | Ok("" | "dumb")) {
            bail!(
                "this terminal can only print lines (TERM is dumb or not set); --batch or --once print tables"
            );
        }
    }
    Ok(is_batch)
}

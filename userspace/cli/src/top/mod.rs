//! `numaward top`: nodes and workloads live; and `numaward replay`: the same for a recording.
//!
//! ```text
//! daemon ──── stream ── feed ── updates ──┬── model ──┬── screen (keys, view) ── draw ── terminal
//! recording ── moments ── replay ─────────┘           └── batch ── tables, or JSON lines
//! ```
//!
//! The screen works over ssh, on 80×24 and any other size, without colours (`NO_COLOR`) and without characters beyond
//! ASCII (if the locale is not UTF-8). The terminal's previous state is restored, however the command ends.

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
use self::{feed::FeedUpdate, model::TopModel, replay::Player, terminal::ScreenSource};
use crate::{
    args::{OutputFormat, ReplayArgs, TopArgs},
    client::Server,
    workload_names,
};

/// Maximum number of pending updates; the stream waits when it is reached.
const MAX_PENDING_UPDATES: usize = 64;

/// Shows the daemon's data until the user ends it; with a name, only this workload, or its details first.
pub(crate) async fn run(
    server: Server,
    name: Option<&str>,
    mut args: TopArgs,
    format: OutputFormat,
) -> anyhow::Result<()> {
    let is_batch = is_batch(&args, format)?;
    let host = feed::connect(&server).await?;
    let key = match name {
        Some(name) => Some(workload_names::workload_key(&server, name).await?),
        None => None,
    };
    let mut model = TopModel::new(host.topology.clone(), host.version.clone(), Instant::now());
    let (sender, mut updates) = mpsc::channel::<FeedUpdate>(MAX_PENDING_UPDATES);
    let feed = tokio::spawn(feed::follow(Arc::new(server), host, sender));
    let result = if is_batch {
        args.list.key = key;
        batch::run(&mut updates, &mut model, &args, format).await
    } else {
        terminal::run(ScreenSource::Live { updates, model: Box::new(model) }, args.list, key).await
    };
    feed.abort();
    result
}

/// Shows a recording.
pub(crate) async fn replay(args: &ReplayArgs) -> anyhow::Result<()> {
    let top_args = &args.top;
    let is_batch = is_batch(top_args, args.output.output)?;
    let player = Player::open(args)?;
    if is_batch {
        batch::replay(player, top_args, args.output.output)
    } else {
        terminal::run(ScreenSource::Recorded(Box::new(player)), top_args.list.clone(), None).await
    }
}

/// Returns whether the output is tables instead of a screen.
fn is_batch(args: &TopArgs, format: OutputFormat) -> anyhow::Result<bool> {
    let is_batch = args.batch
        || args.once
        || args.count.is_some()
        || matches!(format, OutputFormat::Json | OutputFormat::Yaml);
    if !is_batch {
        if !io::stdout().is_terminal() {
            bail!("the output is not a terminal; --batch or --once print tables");
        }
        if matches!(std::env::var("TERM").as_deref(), Err(_) | Ok("" | "dumb")) {
            bail!(
                "this terminal can only print lines (TERM is dumb or not set); --batch or --once print tables"
            );
        }
    }
    Ok(is_batch)
}

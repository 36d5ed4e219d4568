//! `numaward record`: writes what a daemon shows into a file, for `numaward replay`.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use numaward_api::{Allocations, Event, Sample, Status, Workload};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep},
};

use crate::{
    args::Record,
    client::Server,
    recording::{Host, Moment, Sort, Writer, time},
    table::size,
    top::feed::{self, Update},
};

/// Updates that wait to be written.
const UPDATES: usize = 64;
/// Events that a complete moment has.
const EVENTS: usize = 200;
/// Without `--for`, nobody waits as long as this.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Records until the time is over, the file is full, or the user has enough.
pub(crate) async fn run(server: Server, args: Record) -> anyhow::Result<()> {
    let host = feed::connect(&server).await?;
    let path = args.file.unwrap_or_else(|| PathBuf::from(format!("numaward-{}.record", seconds())));
    let step = args.every.0;
    let mut tape = Tape {
        seen: Seen::default(),
        writer: Writer::create(&path, args.max_size)?,
        step_seconds: u32::try_from(step.as_secs()).unwrap_or(u32::MAX),
        times: None,
        count: 0,
    };
    let mut ends = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()].map(signal);
    let [Ok(terminate), Ok(hangup), Ok(interrupt)] = &mut ends else {
        anyhow::bail!("signals cannot be received");
    };
    let until = args.span.map_or_else(|| "Ctrl-C".to_owned(), |span| format!("{span} are over"));
    eprintln!("numaward: recording into {} until {until}", path.display());
    let (sender, mut updates) = mpsc::channel::<Update>(UPDATES);
    let feed = tokio::spawn(feed::follow(Arc::new(server), host, sender));
    let mut over = pin!(sleep(args.span.map_or(FOREVER, |span| span.0)));
    // A sample that comes a little early is not skipped.
    let pause = step.saturating_sub(Duration::from_millis(500));
    let mut last: Option<Instant> = None;
    let is_full = loop {
        let update = tokio::select! {
            update = updates.recv() => update.context("the daemon is no longer followed")?,
            () = &mut over => break false,
            _ = terminate.recv() => break false,
            _ = hangup.recv() => break false,
            _ = interrupt.recv() => break false,
        };
        let is_lost = matches!(update, Update::Lost { .. });
        let is_sample = matches!(update, Update::Sample(_));
        let is_news = tape.seen.take(update);
        let is_due = last.is_none_or(|last| last.elapsed() >= pause);
        // The first moment is there once all has been answered: what is asked for comes after the sample.
        let is_moment = if last.is_none() { !is_lost } else { is_lost || is_sample && is_due };
        if is_news && is_moment {
            last = Some(Instant::now());
            if !tape.write()? {
                break true;
            }
        }
    };
    feed.abort();
    let Tape { writer, times, count, .. } = tape;
    let Some((first, last)) = times else {
        anyhow::bail!("{}: nothing was recorded: the daemon sent nothing", path.display());
    };
    if is_full {
        eprintln!("numaward: the file has the size that --max-size allows; what comes now is not recorded");
    }
    let (first, last, bytes) = (time(first), time(last), size(writer.bytes));
    println!("{}: {count} moments from {first} to {last}, {bytes}", path.display());
    Ok(())
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The file, and what goes there.
struct Tape {
    seen: Seen,
    writer: Writer,
    step_seconds: u32,
    /// Of the first and the last moment.
    times: Option<(u64, u64)>,
    count: u64,
}

impl Tape {
    /// Writes what came since the last moment. Not if the file is full.
    fn write(&mut self) -> anyhow::Result<bool> {
        let is_connected = self.seen.is_connected;
        // What is complete begins with a sample.
        let is_complete =
            is_connected || self.count == 0 || self.writer.begins_run() && self.seen.lost.is_none();
        // What happened before the first moment did not happen then.
        let has_events = self.count > 0 && !self.seen.new_events.is_empty();
        let at = now().max(self.times.map_or(0, |(_, last)| last));
        let moment = self.seen.moment(is_complete, self.step_seconds);
        if !self.writer.add(at, &moment, Sort { is_complete, has_events, is_connected })? {
            return Ok(false);
        }
        self.times = Some((self.times.map_or(at, |(first, _)| first), at));
        self.count += 1;
        Ok(true)
    }
}

/// All that is seen, and what of it is not written yet.
#[derive(Default)]
struct Seen {
    host: Option<feed::Host>,
    is_connected: bool,
    /// The last one, but for its workloads.
    sample: Option<Sample>,
    workloads: BTreeMap<String, Workload>,
    changed: BTreeSet<String>,
    removed: BTreeSet<String>,
    events: VecDeque<Event>,
    new_events: Vec<Event>,
    missed_events: u64,
    allocations: Option<Result<Box<Allocations>, String>>,
    status: Option<Result<Box<Status>, String>>,
    has_allocations: bool,
    has_status: bool,
    lost: Option<String>,
}

impl Seen {
    /// Takes in what the daemon sent. Returns whether enough is known for a moment.
    fn take(&mut self, update: Update) -> bool {
        match update {
            Update::Connected(host) => {
                for event in &host.events {
                    if self.events.iter().all(|known| known.id != event.id) {
                        self.event(event.clone());
                    }
                }
                (self.host, self.is_connected) = (Some(*host), true);
            }
            Update::Sample(sample) => self.sample(*sample),
            Update::Event(event) => self.event(*event),
            Update::Missed(missed) => self.missed_events += missed,
            Update::Allocations(answer) => (self.allocations, self.has_allocations) = (Some(answer), true),
            Update::Status(answer) => (self.status, self.has_status) = (Some(answer), true),
            Update::Lost { reason, .. } => {
                let is_first = self.lost.is_none() && self.sample.is_some();
                self.lost = Some(reason);
                return is_first && self.is_known();
            }
        }
        self.is_known()
    }

    /// What is asked for beside the samples was answered, however.
    fn is_known(&self) -> bool {
        self.sample.is_some() && self.allocations.is_some() && self.status.is_some()
    }

    fn event(&mut self, event: Event) {
        self.new_events.push(event.clone());
        self.events.push_back(event);
        if self.events.len() > EVENTS {
            self.events.pop_front();
        }
    }

    fn sample(&mut self, mut sample: Sample) {
        self.lost = None;
        let workloads = mem::take(&mut sample.workloads);
        if sample.full {
            self.removed.extend(mem::take(&mut self.workloads).into_keys());
        }
        for workload in workloads {
            let key = workload.key().to_owned();
            self.removed.remove(&key);
            self.changed.insert(key.clone());
            self.workloads.insert(key, workload);
        }
        for key in mem::take(&mut sample.removed) {
            self.workloads.remove(&key);
            self.changed.remove(&key);
            self.removed.insert(key);
        }
        self.sample = Some(sample);
    }

    /// What came since the last one; a complete one has all that is known.
    fn moment(&mut self, is_complete: bool, step_seconds: u32) -> Moment {
        let (changed, removed) = (mem::take(&mut self.changed), mem::take(&mut self.removed));
        let new_events = mem::take(&mut self.new_events);
        let is_connected = mem::take(&mut self.is_connected);
        let host = self.host.as_mut().filter(|_| is_complete).map(|host| Host {
            topology: host.topology.clone(),
            version: host.version.clone(),
            step_seconds,
            past: host.past.take().filter(|_| is_connected),
        });
        let sample = self.sample.as_ref().filter(|_| self.lost.is_none()).map(|sample| {
            let workloads = self.workloads.iter().filter(|(key, _)| is_complete || changed.contains(*key));
            Sample {
                full: is_complete,
                workloads: workloads.map(|(_, workload)| workload.clone()).collect(),
                removed: if is_complete { Vec::new() } else { removed.into_iter().collect() },
                ..sample.clone()
            }
        });
        let (has_allocations, has_status) =
            (mem::take(&mut self.has_allocations), mem::take(&mut self.has_status));
        Moment {
            host,
            sample,
            events: if is_complete { self.events.iter().cloned().collect() } else { new_events },
            missed_events: mem::take(&mut self.missed_events),
            allocations: self.allocations.clone().filter(|_| is_complete || has_allocations),
            status: self.status.clone().filter(|_| is_complete || has_status),
            lost: self.lost.clone(),
        }
    }
}

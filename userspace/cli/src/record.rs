//! `numaward record`: writes the daemon's data into a file, for `numaward replay`.

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
    args::RecordArgs,
    client::Server,
    recording::{Moment, MomentFlags, RecordedHost, RecordingWriter, format_time},
    table::size,
    top::feed::{self, FeedHost, FeedUpdate},
};

/// Maximum number of updates that wait to be written.
const MAX_PENDING_UPDATES: usize = 64;
/// Number of events in a complete moment.
const EVENTS_PER_MOMENT: usize = 200;
/// Duration of a recording without `--for`, which is effectively unlimited.
const UNLIMITED: Duration = Duration::from_secs(u32::MAX as u64);

/// Records until the time has passed, the file is full, or the user ends it.
pub(crate) async fn run(server: Server, args: RecordArgs) -> anyhow::Result<()> {
    let host = feed::connect(&server).await?;
    let path = args.file.unwrap_or_else(|| PathBuf::from(format!("numaward-{}.record", seconds())));
    let step = args.every.0;
    let mut recorder = Recorder {
        state: RecorderState::default(),
        writer: RecordingWriter::create(&path, args.max_size)?,
        step_seconds: u32::try_from(step.as_secs()).unwrap_or(u32::MAX),
        times: None,
        count: 0,
    };
    let mut exit_signals =
        [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()].map(signal);
    let [Ok(terminate), Ok(hangup), Ok(interrupt)] = &mut exit_signals else {
        anyhow::bail!("signals cannot be received");
    };
    let until = args.span.map_or_else(|| "Ctrl-C".to_owned(), |span| format!("{span} have passed"));
    eprintln!("numaward: recording into {} until {until}", path.display());
    let (sender, mut updates) = mpsc::channel::<FeedUpdate>(MAX_PENDING_UPDATES);
    let feed = tokio::spawn(feed::follow(Arc::new(server), host, sender));
    let mut over = pin!(sleep(args.span.map_or(UNLIMITED, |span| span.0)));
    // Samples may come up to half a second early.
    let min_interval = step.saturating_sub(Duration::from_millis(500));
    let mut last: Option<Instant> = None;
    let is_full = loop {
        let update = tokio::select! {
            update = updates.recv() => update.context("the connection to the daemon has ended")?,
            () = &mut over => break false,
            _ = terminate.recv() => break false,
            _ = hangup.recv() => break false,
            _ = interrupt.recv() => break false,
        };
        let is_lost = matches!(update, FeedUpdate::Lost { .. });
        let is_sample = matches!(update, FeedUpdate::Sample(_));
        let is_known = recorder.state.take(update);
        let is_due = last.is_none_or(|last| last.elapsed() >= min_interval);
        // The first moment is written when all requests have been answered, which can be after the sample.
        let is_moment = if last.is_none() { !is_lost } else { is_lost || is_sample && is_due };
        if is_known && is_moment {
            last = Some(Instant::now());
            if !recorder.write()? {
                break true;
            }
        }
    };
    feed.abort();
    let Recorder { writer, times, count, .. } = recorder;
    let Some((first, last)) = times else {
        anyhow::bail!("{}: nothing was recorded: the daemon sent nothing", path.display());
    };
    if is_full {
        eprintln!("numaward: the file has reached --max-size; later data is not recorded");
    }
    let (first, last, bytes) = (format_time(first), format_time(last), size(writer.bytes));
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

/// A recording in progress: the file and the data for it.
struct Recorder {
    state: RecorderState,
    writer: RecordingWriter,
    step_seconds: u32,
    /// Times of the first and the last moment.
    times: Option<(u64, u64)>,
    count: u64,
}

impl Recorder {
    /// Writes the data since the last moment. Returns `false` if the file is full.
    fn write(&mut self) -> anyhow::Result<bool> {
        let is_connected = self.state.is_connected;
        // A complete moment contains a sample, so that none can be written while the daemon is not reached.
        let is_complete =
            is_connected || self.count == 0 || self.writer.begins_run() && self.state.lost.is_none();
        // Events before the first moment did not happen at its time.
        let has_events = self.count > 0 && !self.state.new_events.is_empty();
        let at = now().max(self.times.map_or(0, |(_, last)| last));
        let moment = self.state.take_moment(is_complete, self.step_seconds);
        if !self.writer.add(at, &moment, MomentFlags { is_complete, has_events, is_connected })? {
            return Ok(false);
        }
        self.times = Some((self.times.map_or(at, |(first, _)| first), at));
        self.count += 1;
        Ok(true)
    }
}

/// The daemon's data so far, and the parts of it that are not yet written.
#[derive(Default)]
struct RecorderState {
    host: Option<FeedHost>,
    is_connected: bool,
    /// The latest sample without its workloads.
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

impl RecorderState {
    /// Takes an update. Returns whether the data is sufficient for a moment.
    fn take(&mut self, update: FeedUpdate) -> bool {
        match update {
            FeedUpdate::Connected(host) => {
                for event in &host.events {
                    if self.events.iter().all(|known| known.id != event.id) {
                        self.add_event(event.clone());
                    }
                }
                (self.host, self.is_connected) = (Some(*host), true);
            }
            FeedUpdate::Sample(sample) => self.add_sample(*sample),
            FeedUpdate::Event(event) => self.add_event(*event),
            FeedUpdate::Missed(missed) => self.missed_events += missed,
            FeedUpdate::Allocations(answer) => {
                (self.allocations, self.has_allocations) = (Some(answer), true);
            }
            FeedUpdate::Status(answer) => (self.status, self.has_status) = (Some(answer), true),
            FeedUpdate::Lost { reason, .. } => {
                let is_first = self.lost.is_none() && self.sample.is_some();
                self.lost = Some(reason);
                return is_first && self.is_known();
            }
        }
        self.is_known()
    }

    /// Returns whether a sample was received, and the requests for allocations and status were answered or failed.
    fn is_known(&self) -> bool {
        self.sample.is_some() && self.allocations.is_some() && self.status.is_some()
    }

    fn add_event(&mut self, event: Event) {
        self.new_events.push(event.clone());
        self.events.push_back(event);
        if self.events.len() > EVENTS_PER_MOMENT {
            self.events.pop_front();
        }
    }

    fn add_sample(&mut self, mut sample: Sample) {
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

    /// Returns the data since the last moment; a complete moment has all data.
    fn take_moment(&mut self, is_complete: bool, step_seconds: u32) -> Moment {
        let (changed, removed) = (mem::take(&mut self.changed), mem::take(&mut self.removed));
        let new_events = mem::take(&mut self.new_events);
        let is_connected = mem::take(&mut self.is_connected);
        let host = self.host.as_mut().filter(|_| is_complete).map(|host| RecordedHost {
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

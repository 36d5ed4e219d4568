//! What a ledger holds after a loss of power, against what was answered before.
//!
//! The problem: power is lost at some moment between two writes to the disk, and what was answered until then has to be
//! durable. The log of the disk (`numaward_vm::WriteLog`) has the order of the writes; when an answer came has to be in the
//! same order. So the script notes that on the disk too, behind the file system: *marks*. They are written past all caches,
//! and are no flush: what the daemon has not made durable is not made so by them.
//!
//! A mark is a line of JSON, `{"begun": null}` before a request and `{"done": PROMISES}` after its answer, with all that is
//! promised then: a text for each workload.

use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};
use fastrand::Rng;
use numaward_api as api;
use numaward_engine::Ledger;
use numaward_store::{LoadedLedger, Store};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    client::{Answer, Client},
    daemon::{Daemon, Death, Home},
    workload::Workload,
};

/// As large as the blocks of any disk.
const BLOCK: usize = 4096;
/// Names that are in use or not.
const NAMES: usize = 5;

type Promises = BTreeMap<String, String>;

/// Writes marks to a disk from this byte on.
struct Marks {
    disk: std::fs::File,
    offset: u64,
    buffer: Vec<u8>,
}

impl Marks {
    fn open(disk: &Path, offset: u64) -> Result<Self> {
        let flags = rustix::fs::OFlags::DIRECT.bits().try_into()?;
        let file = OpenOptions::new().write(true).custom_flags(flags).open(disk);
        let disk = file.with_context(|| disk.display().to_string())?;
        Ok(Self { disk, offset, buffer: vec![0; 2 * BLOCK] })
    }

    fn put(&mut self, mark: &Value) -> Result<()> {
        let text = mark.to_string();
        // The kernel takes only buffers at such addresses past its cache.
        let start = self.buffer.as_ptr().align_offset(BLOCK);
        let block = self.buffer.get_mut(start..start + BLOCK).context("no block in the buffer")?;
        block.fill(0);
        block
            .get_mut(..text.len())
            .context("a mark is longer than a block")?
            .copy_from_slice(text.as_bytes());
        self.disk.write_all_at(block, self.offset).context("write a mark")
    }
}

/// Runs a daemon that has its files in this folder, and asks so often for something. Marks go to the disk from this byte on.
pub(crate) fn write(dir: &Path, disk: &Path, offset: u64, steps: u32, seed: u64) -> Result<String> {
    let home = Home::new(dir.to_str().context("the folder's name is no text")?)?;
    let client = home.client();
    let mut marks = Marks::open(disk, offset)?;
    let mut random = Rng::with_seed(seed);
    let mut workloads = BTreeMap::new();
    let mut refused = 0;
    marks.put(&json!({ "done": Promises::new() }))?;
    let mut daemon = Daemon::start(&home, &Death::Never)?;
    ensure!(daemon.comes_up(&client)?, "the daemon did not come up: {}", home.log_tail());
    for step in 0..steps {
        let name = format!("command{}", random.usize(0..NAMES));
        marks.put(&json!({ "begun": null }))?;
        if let Some(mut workload) = workloads.remove(&name) {
            Workload::end(&mut workload)?;
            match client.release(&name)? {
                // The daemon saw its end before it was asked.
                Answer::Done(()) | Answer::Unknown => {}
                Answer::Refused | Answer::None => bail!("step {step}: no release: {}", home.log_tail()),
            }
        } else {
            match client.admit(&request(&name, &mut random)?)? {
                Answer::Done(held) => {
                    workloads.insert(name, Workload::start(held.directory.as_ref())?);
                }
                Answer::Refused => refused += 1,
                Answer::Unknown | Answer::None => bail!("step {step}: no admission: {}", home.log_tail()),
            }
        }
        marks.put(&json!({ "done": promises(&client)? }))?;
    }
    daemon.stop()?;
    Ok(format!("{steps} requests, {refused} of them refused"))
}

fn request(name: &str, random: &mut Rng) -> Result<api::AllocationRequest> {
    let asked = json!({
        "name": name,
        "target": api::Target::Exec,
        "cpus": random.u32(1..=2),
        "memory": format!("{}Mi", random.u32(16..=48)),
    });
    Ok(serde_json::from_value(asked)?)
}

/// What the daemon says is promised.
fn promises(client: &Client) -> Result<Promises> {
    let held = client.allocations()?.context("the daemon does not answer")?;
    let promise = |held: &api::Allocation| {
        let memory =
            held.memory.iter().map(|block| format!(" {} {} {}", block.kind, block.nodes, block.bytes));
        format!("cpus {}{}", held.cpus, memory.collect::<String>())
    };
    Ok(held.allocations.iter().map(|held| (held.name.clone(), promise(held))).collect())
}

/// The part of a stored ledger that says what is promised.
#[derive(Deserialize)]
struct Stored {
    ledger: Ledger,
    /// As a start of the daemon takes them: what was not finished is undone, what was begun to be released is released.
    #[serde(default)]
    admitting: Vec<String>,
    #[serde(default)]
    releasing: Vec<String>,
}

/// What a start of the daemon would find in this folder: `{"done": PROMISES}`, or `{"lost": WHY}`.
pub(crate) fn read(dir: &Path) -> Result<String> {
    let found = match Store::<Value>::open(&dir.join("state"))?.1 {
        LoadedLedger::Fresh => json!({ "done": Promises::new() }),
        // What is set aside is then of an older save, into which the next one was being written.
        LoadedLedger::Current { ledger, set_aside: _ } => {
            json!({ "done": stored(serde_json::from_value(ledger)?) })
        }
        other => json!({ "lost": format!("{other:?}") }),
    };
    Ok(found.to_string())
}

fn stored(stored: Stored) -> Promises {
    let Stored { ledger, admitting, releasing } = stored;
    let mut promises = Promises::new();
    for (owner, _, held) in ledger.allocations() {
        let name = owner.to_string();
        if admitting.contains(&name) || releasing.contains(&name) {
            continue;
        }
        let cpus = held.cpus.as_ref().map(ToString::to_string).unwrap_or_default();
        let memory = held.blocks.iter();
        let memory = memory.map(|block| format!(" {} {} {}", block.kind, block.affinity, block.bytes.0));
        promises.insert(name, format!("cpus {cpus}{}", memory.collect::<String>()));
    }
    promises
}

//! Checks the ledger after a loss of power against the answers before it.
//!
//! # Problem
//! Power can be lost between any two writes to the disk, and every request that was answered before must be durable.
//! The log of the disk (`numaward_vm::WriteLog`) has the order of the writes, and the order of the answers relative to
//! them has to be known too.
//!
//! # Algorithm
//! The script writes *marks* to the disk, behind the file system. They bypass all caches and are no flush, so they make
//! no write of the daemon durable. A mark is a line of JSON: `{"begun": null}` before a request, and `{"done":
//! GUARANTEES}` after its answer, with a text for the guarantee of each workload.

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
    client::{ControlClient, RequestOutcome},
    daemon::{DaemonFolder, Death, RunningDaemon},
    workload::WorkloadProcess,
};

/// Alignment of marks, in bytes: as large as the blocks of any disk.
const BLOCK_SIZE: usize = 4096;
/// Number of workload names, with or without a guarantee.
const MAX_NAMES: usize = 5;

type GuaranteeTexts = BTreeMap<String, String>;

/// Writer of marks to a disk.
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
        Ok(Self { disk, offset, buffer: vec![0; 2 * BLOCK_SIZE] })
    }

    fn write(&mut self, mark: &Value) -> Result<()> {
        let text = mark.to_string();
        // Direct I/O requires an aligned buffer.
        let start = self.buffer.as_ptr().align_offset(BLOCK_SIZE);
        let block = self.buffer.get_mut(start..start + BLOCK_SIZE).context("no block in the buffer")?;
        block.fill(0);
        block
            .get_mut(..text.len())
            .context("a mark is longer than a block")?
            .copy_from_slice(text.as_bytes());
        self.disk.write_all_at(block, self.offset).context("write a mark")
    }
}

/// Runs a daemon with its files in this folder, and sends it `steps` requests. Marks are written to the disk from this
/// offset on.
pub(crate) fn write(dir: &Path, disk: &Path, offset: u64, steps: u32, seed: u64) -> Result<String> {
    let home = DaemonFolder::new(dir.to_str().context("the folder's name is no text")?)?;
    let client = home.client();
    let mut marks = Marks::open(disk, offset)?;
    let mut random = Rng::with_seed(seed);
    let mut workloads = BTreeMap::new();
    let mut refused = 0;
    marks.write(&json!({ "done": GuaranteeTexts::new() }))?;
    let mut daemon = RunningDaemon::start(&home, &Death::Never)?;
    ensure!(daemon.comes_up(&client)?, "the daemon did not come up: {}", home.log_tail());
    for step in 0..steps {
        let name = format!("command{}", random.usize(0..MAX_NAMES));
        marks.write(&json!({ "begun": null }))?;
        if let Some(mut workload) = workloads.remove(&name) {
            WorkloadProcess::end(&mut workload)?;
            match client.release(&name)? {
                // The daemon may have noticed the end of the workload before the release.
                RequestOutcome::Done(()) | RequestOutcome::Unknown => {}
                RequestOutcome::Refused | RequestOutcome::None => {
                    bail!("step {step}: no release: {}", home.log_tail())
                }
            }
        } else {
            match client.admit(&request(&name, &mut random)?)? {
                RequestOutcome::Done(held) => {
                    workloads.insert(name, WorkloadProcess::start(held.directory.as_ref())?);
                }
                RequestOutcome::Refused => refused += 1,
                RequestOutcome::Unknown | RequestOutcome::None => {
                    bail!("step {step}: no admission: {}", home.log_tail())
                }
            }
        }
        marks.write(&json!({ "done": guarantee_texts(&client)? }))?;
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

/// Returns the guarantees in the daemon's answer.
fn guarantee_texts(client: &ControlClient) -> Result<GuaranteeTexts> {
    let held = client.allocations()?.context("the daemon does not answer")?;
    let text = |held: &api::Allocation| {
        let memory =
            held.memory.iter().map(|block| format!(" {} {} {}", block.kind, block.nodes, block.bytes));
        format!("cpus {}{}", held.cpus, memory.collect::<String>())
    };
    Ok(held.allocations.iter().map(|held| (held.name.clone(), text(held))).collect())
}

/// The guarantees in a stored ledger.
#[derive(Deserialize)]
struct StoredLedger {
    ledger: Ledger,
    /// Pending changes, which the next start of the daemon undoes or finishes.
    #[serde(default)]
    admitting: Vec<String>,
    #[serde(default)]
    releasing: Vec<String>,
}

/// Reads the ledger in this folder as the next start of the daemon would. Returns `{"done": GUARANTEES}`, or `{"lost":
/// REASON}`.
pub(crate) fn read(dir: &Path) -> Result<String> {
    let found = match Store::<Value>::open(&dir.join("state"))?.1 {
        LoadedLedger::Fresh => json!({ "done": GuaranteeTexts::new() }),
        // The file that was set aside is an older version, which the next store was overwriting.
        LoadedLedger::Current { ledger, set_aside: _ } => {
            json!({ "done": stored(serde_json::from_value(ledger)?) })
        }
        other => json!({ "lost": format!("{other:?}") }),
    };
    Ok(found.to_string())
}

fn stored(stored: StoredLedger) -> GuaranteeTexts {
    let StoredLedger { ledger, admitting, releasing } = stored;
    let mut guarantees = GuaranteeTexts::new();
    for (owner, _, held) in ledger.allocations() {
        let name = owner.to_string();
        if admitting.contains(&name) || releasing.contains(&name) {
            continue;
        }
        let cpus = held.cpus.as_ref().map(ToString::to_string).unwrap_or_default();
        let memory = held.blocks.iter();
        let memory = memory.map(|block| format!(" {} {} {}", block.kind, block.affinity, block.bytes.0));
        guarantees.insert(name, format!("cpus {cpus}{}", memory.collect::<String>()));
    }
    guarantees
}

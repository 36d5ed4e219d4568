//! `numaward bugtool`: an archive for a bug report.
//!
//! A file that cannot be read is listed in `missing.txt` with the reason: bug reports are often about a daemon that
//! does not answer.

use std::{
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use flate2::{Compression, write::GzEncoder};
use numaward_api::{Version, Workloads, doctor::HostCheck};
use numaward_cgroup::{CgroupPath, Hierarchy};
use numaward_config::{Config, Problems, yaml};
use serde::Serialize;

use crate::{client::Server, doctor, topology};

/// Resources of the daemon's API, by their files in the archive.
const API_FILES: [(&str, &str); 9] = [
    ("daemon-version.json", "/api/v1/version"),
    ("status.json", "/api/v1/status"),
    ("readyz.txt", "/readyz"),
    ("allocations.json", "/api/v1/allocations"),
    ("workloads.json", "/api/v1/workloads"),
    ("nodes.json", "/api/v1/nodes"),
    ("daemon-topology.json", "/api/v1/topology"),
    ("events.json", "/api/v1/events?limit=1024"),
    ("metrics.txt", "/metrics"),
];
/// Files of the kernel, which are stored below `kernel/`.
const KERNEL_FILES: [&str; 7] = [
    "/proc/version",
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/vmstat",
    "/proc/buddyinfo",
    "/proc/zoneinfo",
    "/sys/fs/cgroup/cgroup.controllers",
];
/// Knobs of a cgroup that limit or count its resources.
const KNOBS: [&str; 23] = [
    "cgroup.controllers",
    "cgroup.subtree_control",
    "cgroup.events",
    "cpuset.cpus",
    "cpuset.cpus.effective",
    "cpuset.cpus.partition",
    "cpuset.mems",
    "cpuset.mems.effective",
    "cpu.max",
    "cpu.weight",
    "memory.current",
    "memory.min",
    "memory.low",
    "memory.high",
    "memory.max",
    "memory.swap.max",
    "memory.events",
    "memory.numa_stat",
    "memory.pressure",
    "hugetlb.2MB.max",
    "hugetlb.2MB.current",
    "hugetlb.1GB.max",
    "hugetlb.1GB.current",
];
/// Maximum number of lines of the daemon's log.
const MAX_LOG_LINES: &str = "10000";

/// Writes the archive, and returns its path.
pub(crate) async fn write(
    server: &Server,
    file: Option<PathBuf>,
    config: Result<&Config, &Problems>,
    checks: &[HostCheck],
) -> anyhow::Result<PathBuf> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let name = format!("numaward-bugtool-{now}");
    let path = file.unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    // The archive describes the host in detail: only its owner may read it.
    let out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let out = out.with_context(|| format!("{}: the archive cannot be created", path.display()))?;
    let mut archive =
        Archive { out: GzEncoder::new(out, Compression::default()), name, now, missing: String::new() };

    let uname = rustix::system::uname();
    archive.add("version.json", &json(&Version::on(uname.release().to_string_lossy()))?)?;
    match config
        .map_err(ToString::to_string)
        .and_then(|config| config.view().map_err(|error| error.to_string()))
    {
        Ok(view) => archive.add("config.yaml", yaml(&view).as_bytes())?,
        Err(problems) => archive.add_missing("config.yaml", &problems),
    }
    archive.add("doctor.txt", doctor::render(checks).as_bytes())?;
    match topology::machine(Path::new("/")) {
        Ok(machine) => archive.add("topology.json", &json(&numaward_api::Topology::from(&machine))?)?,
        Err(error) => archive.add_missing("topology.json", &format!("{error:#}")),
    }
    let mut workloads = Workloads { workloads: Vec::new() };
    for (file, path) in API_FILES {
        match server.fetch(path).await {
            Ok(body) => {
                if path == "/api/v1/workloads" {
                    workloads = serde_json::from_slice(&body).unwrap_or(workloads);
                }
                archive.add(file, &body)?;
            }
            Err(error) => archive.add_missing(file, &error.to_string()),
        }
    }
    for path in KERNEL_FILES {
        let file = format!("kernel{path}");
        match fs::read(path) {
            Ok(text) => archive.add(&file, &text)?,
            Err(error) => archive.add_missing(&file, &error.to_string()),
        }
    }
    let cgroups: Vec<_> =
        workloads.workloads.iter().filter_map(|workload| workload.cgroup.as_deref()).collect();
    let mount = config.as_ref().ok().and_then(|config| config.cgroup_mount.as_deref());
    match mount.map_or_else(Hierarchy::open, Hierarchy::open_at) {
        Ok(hierarchy) => {
            let root = hierarchy.dir(&CgroupPath::root());
            archive.add("cgroups.txt", knobs(&root, &cgroups).as_bytes())?;
        }
        Err(error) => archive.add_missing("cgroups.txt", &format!("{:#}", anyhow::Error::new(error))),
    }
    match log() {
        Ok(log) => archive.add("log.txt", &log)?,
        Err(reason) => archive.add_missing("log.txt", &reason),
    }
    let missing = if archive.missing.is_empty() { "nothing\n".to_owned() } else { archive.missing.clone() };
    archive.add("missing.txt", missing.as_bytes())?;
    archive.finish().with_context(|| format!("{}: the archive cannot be written", path.display()))?;
    eprint!("{}", archive_note(&missing));
    Ok(path)
}

fn archive_note(missing: &str) -> String {
    match missing.lines().count() {
        _ if missing == "nothing\n" => String::new(),
        count => {
            format!("numaward: {count} files could not be read: missing.txt in the archive has the reasons\n")
        }
    }
}

fn json(value: &impl Serialize) -> anyhow::Result<Vec<u8>> {
    Ok(serde_json::to_vec_pretty(value)?)
}

/// Returns the knobs of cgroups and their ancestors below the mount point.
fn knobs(mount: &Path, cgroups: &[&str]) -> String {
    let mut paths = std::collections::BTreeSet::new();
    for cgroup in cgroups {
        paths.extend(Path::new(cgroup).ancestors());
    }
    let mut text = String::new();
    for path in paths {
        let _ = writeln!(text, "{}", path.display());
        let directory = mount.join(path.strip_prefix("/").unwrap_or(path));
        for knob in KNOBS {
            // The knobs of a disabled controller do not exist.
            let Ok(value) = fs::read_to_string(directory.join(knob)) else { continue };
            let value = value.trim_end().replace('\n', "\n    ");
            let _ = writeln!(text, "  {knob}: {value}");
        }
    }
    text
}

/// Returns the daemon's log from the systemd journal.
fn log() -> Result<Vec<u8>, String> {
    let mut journal = Command::new("journalctl");
    journal.args([
        "--unit",
        "numaward",
        "--no-pager",
        "--output",
        "short-iso-precise",
        "--lines",
        MAX_LOG_LINES,
    ]);
    let output = journal.output().map_err(|error| format!("journalctl: {error}"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(format!("journalctl ended with {}: {}", output.status, message.trim()));
    }
    if output.stdout.starts_with(b"-- No entries --") || output.stdout.is_empty() {
        return Err("the journal has no entries of the unit numaward".to_owned());
    }
    Ok(output.stdout)
}

/// A tar archive (POSIX.1-1988, ustar) in progress.
struct Archive {
    out: GzEncoder<File>,
    /// Name of the directory of all files in the archive.
    name: String,
    now: u64,
    /// Files that could not be read, with their reasons, in lines.
    missing: String,
}

impl Archive {
    /// Adds a file.
    fn add(&mut self, file: &str, content: &[u8]) -> io::Result<()> {
        self.out.write_all(&header(&format!("{}/{file}", self.name), content.len(), self.now)?)?;
        self.out.write_all(content)?;
        let padding = content.len().next_multiple_of(512) - content.len();
        self.out.write_all(&[0; 512][..padding])
    }

    /// Records why a file is missing.
    fn add_missing(&mut self, file: &str, reason: &str) {
        let _ = writeln!(self.missing, "{file}: {}", reason.replace('\n', " "));
    }

    fn finish(mut self) -> io::Result<()> {
        self.out.write_all(&[0; 1024])?;
        self.out.finish()?.sync_all()
    }
}

/// Returns the header of a file.
fn header(path: &str, size: usize, time: u64) -> io::Result<[u8; 512]> {
    let mut header = [0_u8; 512];
    let mut write_field = |at: usize, length: usize, text: String| match header.get_mut(at..at + text.len()) {
        Some(field) if text.len() <= length => {
            field.copy_from_slice(text.as_bytes());
            Ok(())
        }
        _ => Err(io::Error::other(format!("{text:?} does not fit into the header of an archive"))),
    };
    write_field(0, 100, path.to_owned())?;
    write_field(100, 8, format!("{:07o}\0", 0o600))?;
    write_field(108, 8, format!("{:07o}\0", 0))?;
    write_field(116, 8, format!("{:07o}\0", 0))?;
    write_field(124, 12, format!("{size:011o}\0"))?;
    write_field(136, 12, format!("{time:011o}\0"))?;
    write_field(148, 8, " ".repeat(8))?;
    write_field(156, 1, "0".to_owned())?;
    write_field(257, 8, "ustar\x0000".to_owned())?;
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    let sum = format!("{sum:06o}\0 ");
    header[148..156].copy_from_slice(sum.as_bytes());
    Ok(header)
}

//! Workloads without a guarantee.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Seek as _, Write as _},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use memmap2::MmapOptions;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The mount point of the cgroup hierarchy.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";
/// The unit among the bystanders.
pub(crate) const UNIT: &str = "db.service";
/// Disks for reads and for swap, of 32 MiB each.
const READ_DISK: &str = "/dev/vda";
const SWAP_DISK: &str = "/dev/vdb";
const MIB: usize = 1 << 20;
const PAGE_SIZE: usize = 4096;
const HUGE_PAGE_SIZE: usize = 2 * MIB;
/// The pause of a bystander between two uses of its memory.
const USE_INTERVAL: Duration = Duration::from_millis(200);
/// The CPU of the bystander with a cpuset partition.
const PARTITION_CPU: &str = "5";

/// The behavior of a bystander.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Behavior {
    /// Waits.
    Idle,
    /// Reads a disk again and again.
    PageCache,
    /// Maps more and more anonymous memory, and writes to all of it.
    Growth,
    /// Uses 24 MiB of anonymous memory.
    Anonymous,
    /// Uses 24 MiB of anonymous memory now and then: more than its cgroup may have, so that pages go to swap and come back.
    Swapped,
    /// Restricts itself to CPU 1.
    Affinity,
    /// Reads its affinity and sets it again, as runtimes do that pin their threads.
    AffinityAgain,
    /// Reserves huge pages, and touches one more now and then.
    HugePages,
}

/// Enters the cgroup, prints a line, and behaves as asked until it is killed.
pub(crate) fn main(behavior: Behavior, cgroup: Option<&Path>) -> Result<()> {
    if let Some(cgroup) = cgroup {
        let procs = cgroup.join("cgroup.procs");
        // Opened without `create`: a cgroup that is gone must not become a file.
        let file = fs::OpenOptions::new().write(true).open(&procs);
        file.and_then(|mut file| file.write_all(b"0")).with_context(|| procs.display().to_string())?;
    }
    let ready = || println!("ready");
    match behavior {
        Behavior::Idle => {
            ready();
            loop {
                thread::sleep(USE_INTERVAL);
            }
        }
        Behavior::PageCache => {
            let mut disk = fs::File::open(READ_DISK).context(READ_DISK)?;
            let mut piece = vec![0; MIB];
            ready();
            loop {
                thread::sleep(USE_INTERVAL);
                if disk.read(&mut piece)? == 0 {
                    disk.rewind()?;
                }
            }
        }
        Behavior::Growth | Behavior::Anonymous | Behavior::Swapped => {
            let pause = if behavior == Behavior::Swapped { USE_INTERVAL * 50 } else { USE_INTERVAL };
            let mut pages = vec![0_u8; if behavior == Behavior::Growth { MIB } else { 24 * MIB }];
            write_to_all(&mut pages);
            ready();
            loop {
                thread::sleep(pause);
                if behavior == Behavior::Growth && pages.len() < 40 * MIB {
                    pages.resize(pages.len() + MIB / 4, 1);
                }
                write_to_all(&mut pages);
            }
        }
        Behavior::Affinity => {
            let mut mask = CpuSet::new();
            mask.set(1);
            sched_setaffinity(None, &mask)?;
            ready();
            loop {
                thread::sleep(USE_INTERVAL);
            }
        }
        Behavior::AffinityAgain => {
            ready();
            loop {
                sched_setaffinity(None, &sched_getaffinity(None)?)?;
                thread::sleep(USE_INTERVAL);
            }
        }
        Behavior::HugePages => {
            ready();
            loop {
                let mut pages = MmapOptions::new().len(8 * HUGE_PAGE_SIZE).huge(Some(21)).map_anon()?;
                for page in pages.chunks_mut(HUGE_PAGE_SIZE) {
                    thread::sleep(USE_INTERVAL * 20);
                    page[0] = 1;
                }
            }
        }
    }
}

fn write_to_all(pages: &mut [u8]) {
    for page in pages.chunks_mut(PAGE_SIZE) {
        page[0] = page[0].wrapping_add(1);
    }
}

/// A process that must live.
struct BystanderProcess {
    name: &'static str,
    child: Child,
}

/// All bystanders. They end with this value.
pub(crate) struct Bystanders {
    processes: Vec<BystanderProcess>,
}

impl Bystanders {
    /// Starts them all.
    pub(crate) fn start() -> Result<Self> {
        let mut all = Self { processes: Vec::new() };
        write("cgroup.subtree_control", "+cpuset +cpu +memory")?;
        all.behave("page_cache", Behavior::PageCache)?;
        all.behave("growth", Behavior::Growth)?;
        all.behave("affinity", Behavior::Affinity)?;
        all.behave("affinity_again", Behavior::AffinityAgain)?;

        all.load("tmpfs", &["--kind", "tmpfs", "--size", "24M"])?;
        all.load("interleave", &["--policy", "interleave:0-1", "--size", "16M"])?;
        for node in 0..2 {
            let pool = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
            fs::write(&pool, "8").context(pool)?;
        }
        all.behave("huge_pages", Behavior::HugePages)?;

        make("tight")?;
        write("tight/memory.max", "40M")?;
        all.behave("tight", Behavior::Anonymous)?;

        make("partition")?;
        write("partition/cpuset.cpus", PARTITION_CPU)?;
        write("partition/cpuset.cpus.partition", "isolated")?;
        all.behave("partition", Behavior::Idle)?;

        make("delegated/a")?;
        make("delegated/b")?;
        write("delegated/cgroup.subtree_control", "+cpuset +memory")?;
        write("delegated/a/cpuset.cpus", "0-2")?;
        write("delegated/a/memory.low", "8M")?;
        write("delegated/b/cpuset.mems", "1")?;
        all.behave("delegated/a", Behavior::Idle)?;
        all.behave("delegated/b", Behavior::Anonymous)?;

        make("swap")?;
        run(Command::new("mkswap").arg(SWAP_DISK))?;
        run(Command::new("swapon").arg(SWAP_DISK))?;
        write("swap/memory.high", "16M")?;
        all.behave("swap", Behavior::Swapped)?;

        let pod = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6c1f.slice";
        let container = format!("{pod}/cri-containerd-{}.scope", "ab".repeat(32));
        make(&container)?;
        all.start_in("container", &container, Command::new(std::env::current_exe()?), Behavior::Anonymous)?;

        start_unit()?;
        Ok(all)
    }

    /// Returns the number of bystanders.
    pub(crate) fn count(&self) -> usize {
        self.processes.len() + 1
    }

    /// Returns the process ids by name; an error names a bystander that has ended.
    pub(crate) fn processes(&mut self) -> Result<Vec<(&'static str, u32)>> {
        let mut found = Vec::new();
        for BystanderProcess { name, child } in &mut self.processes {
            if let Some(status) = child.try_wait()? {
                anyhow::bail!("the bystander {name} has ended: {status}");
            }
            found.push((*name, child.id()));
        }
        let pid = output(Command::new("systemctl").args(["show", "--value", "-p", "MainPID", UNIT]))?;
        let pid: u32 = pid.trim().parse()?;
        ensure!(pid > 0, "the bystander {UNIT} has ended");
        found.push((UNIT, pid));
        Ok(found)
    }

    fn behave(&mut self, name: &'static str, behavior: Behavior) -> Result<()> {
        make(name)?;
        self.start_in(name, name, Command::new(std::env::current_exe()?), behavior)
    }

    fn start_in(
        &mut self,
        name: &'static str,
        cgroup: &str,
        mut command: Command,
        behavior: Behavior,
    ) -> Result<()> {
        let behavior = behavior.to_possible_value().context("no name")?;
        command.args(["bystander", behavior.get_name(), "--cgroup"]).arg(Path::new(CGROUPS).join(cgroup));
        self.add(name, command)
    }

    fn load(&mut self, name: &'static str, arguments: &[&str]) -> Result<()> {
        make(name)?;
        let mut command = Command::new("numaward-load");
        command.args(arguments).args(["--report", "json", "--cgroup"]).arg(Path::new(CGROUPS).join(name));
        self.add(name, command)
    }

    /// Starts a process, and waits for its first output.
    fn add(&mut self, name: &'static str, mut command: Command) -> Result<()> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context(name)?;
        let mut said = BufReader::new(child.stdout.take().context("no output")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the bystander {name} does not start");
        self.processes.push(BystanderProcess { name, child });
        // The rest of its output is read, so that the pipe is never full.
        thread::spawn(move || said.read_to_end(&mut Vec::new()));
        Ok(())
    }
}

impl Drop for Bystanders {
    fn drop(&mut self) {
        for BystanderProcess { child, .. } in &mut self.processes {
            // The process may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A unit with settings of its file, of a drop-in, and of `systemctl set-property`.
fn start_unit() -> Result<()> {
    let program = std::env::current_exe()?;
    let file = format!("[Service]\nExecStart={} bystander anonymous\nMemoryLow=8M\n", program.display());
    fs::write(Path::new("/etc/systemd/system").join(UNIT), file)?;
    let folder = Path::new("/etc/systemd/system").join(format!("{UNIT}.d"));
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("10-limit.conf"), "[Service]\nMemoryMax=64M\nAllowedCPUs=0-4\n")?;
    run(Command::new("systemctl").arg("daemon-reload"))?;
    run(Command::new("systemctl").args(["start", UNIT]))?;
    run(Command::new("systemctl").args(["set-property", "--runtime", UNIT, "CPUWeight=80"]))
}

fn make(cgroup: &str) -> Result<()> {
    fs::create_dir_all(Path::new(CGROUPS).join(cgroup)).context(cgroup.to_owned())
}

fn write(knob: &str, text: &str) -> Result<()> {
    fs::write(Path::new(CGROUPS).join(knob), text).with_context(|| format!("{knob}: {text}"))
}

/// Runs a command that must succeed.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Returns the output of a command that must succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    let (said, failed) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    ensure!(done.status.success(), "{command:?}: {}: {said}\n{failed}", done.status);
    Ok(String::from_utf8(done.stdout)?)
}

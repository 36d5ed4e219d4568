//! Booting a guest and taking its exit code home.

use std::{
    env,
    fmt::Write as _,
    fs::{self, File},
    io::{self, Read as _, Write},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    str, thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    Arch, Debian, Error, GUEST_BUSYBOX, GUEST_FIRMWARE, GuestTopology, Kernel, Monitor, TOOLS, arch::Ports,
    initramfs::Initramfs,
};

/// Skips the tests of the kernel's own ciphers and of its noise from the CPU's jitter: almost half of an emulated boot.
const FASTER_BOOT: &str = "cryptomgr.notests initcall_blacklist=jent_mod_init";

/// For the network and the disk. The order matters, here and below: each needs those before it.
const VIRTIO_MODULES: &[&str] =
    &["virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci"];
const NETWORK_MODULES: &[&str] = &["failover", "net_failover", "virtio_net"];
const DISK_MODULES: &[&str] = &["virtio_blk"];
/// Lines of the console shown in an error.
const TAIL_LINES: usize = 40;
/// A guest comes up in 4 to 8 seconds, one with firmware in 15; on a host with far more to do than CPUs, in three times that.
const BOOT_LIMIT: Duration = Duration::from_mins(1);
const FIRMWARE_BOOT_LIMIT: Duration = Duration::from_mins(3);
/// systemd takes 15 seconds, and on a busy host minutes.
const SYSTEMD_BOOT_LIMIT: Duration = Duration::from_mins(5);
/// Only the script, and nobody at a terminal.
const SYSTEMD_ARGUMENTS: &str = "systemd.wants=numaward-vm.service systemd.mask=getty@tty1.service";
/// What `disk.sh` lays over the root file system.
const ONTO_DISK: &str = "/numaward-vm/files";
const BOOT_ATTEMPTS: u32 = 3;
/// A guest in virtual time whose emulator uses no CPU time, or gets little, is stopped after so many times its limit.
const IDLE_FACTOR: u32 = 10;
/// Kernels that hang in virtual time while they start the second CPU (seen with QEMU 7.2). Those for Arm were not tried.
const REAL_TIME_KERNELS: [&str; 2] = ["5.10", "6.1"];
/// An instruction takes 2 to the power of this nanoseconds of the guest's time.
const INSTRUCTION_SHIFT: u32 = 2;
/// The beginning of the line that [`Vm::start`] prints when it starts a machine again.
pub const RESTARTED: &str = "the machine did not come up";
const BOOT_PACE: Duration = Duration::from_millis(50);
/// The address at which a guest reaches what [`Vm::reach`] lets it reach.
pub const HOST_ADDRESS: &str = "10.0.2.100";
const DEFAULT_LIMIT: Duration = Duration::from_mins(3);
/// Exit codes of `timeout` that had to stop its command: politely, and by SIGKILL.
const TIMED_OUT: [i32; 2] = [124, 137];
/// The signal at the limit of CPU time (setrlimit(2)).
const SIGXCPU: i32 = 24;

/// A TCP port of the host's loopback interface that leads to one of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    /// On 127.0.0.1 of the host.
    pub host: u16,
    /// In the guest.
    pub guest: u16,
}

impl str::FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| text.parse::<u16>().ok().filter(|&port| port > 0);
        text.split_once(':')
            .and_then(|(host, guest)| Some(Self { host: port(host)?, guest: port(guest)? }))
            .ok_or_else(|| format!("`{text}` is not HOSTPORT:GUESTPORT"))
    }
}

/// A disk of a guest.
#[derive(Debug, Clone)]
struct Disk {
    file: PathBuf,
    log: Option<PathBuf>,
    /// The node of its bus.
    node: Option<u32>,
}

impl Disk {
    fn args(&self, number: usize) -> Vec<String> {
        let node = |mut node: Value, name: &str| {
            node["node-name"] = format!("{name}{number}").into();
            node
        };
        // This host writes the files: what they hold need not reach its own disk.
        let cache = json!({ "no-flush": true });
        let file = |path: &Path| json!({ "driver": "file", "filename": path, "cache": cache.clone() });
        let disk = json!({ "driver": "raw", "cache": cache, "file": file(&self.file) });
        let disk = match &self.log {
            None => disk,
            // The flushes of the guest have to come as far as the log.
            Some(log) => json!({ "driver": "blklogwrites", "file": disk, "log": file(log) }),
        };
        let mut args = vec!["-blockdev".to_owned(), node(disk, "disk").to_string()];
        let device = format!("virtio-blk-pci,drive=disk{number}");
        match self.node {
            // Buses from 160 on, of which each has a port with a bus of its own.
            Some(node) => args.extend(behind_port(&format!("disk{number}"), 160 + 4 * number, node, &device)),
            None => args.extend(["-device".to_owned(), device]),
        }
        args
    }
}

/// A device on a PCI bus of a node, as the firmware says: QEMU's arguments for the bus with this number, a port, and the device.
fn behind_port(name: &str, bus: usize, node: u32, device: &str) -> Vec<String> {
    [
        format!("pxb-pcie,id=bus-{name},bus_nr={bus},bus=pcie.0,numa_node={node}"),
        format!("pcie-root-port,id=port-{name},bus=bus-{name},chassis={bus}"),
        format!("{device},bus=port-{name}"),
    ]
    .into_iter()
    .flat_map(|device| ["-device".to_owned(), device])
    .collect()
}

/// A guest to be booted.
#[derive(Debug, Clone)]
pub struct Vm {
    kernel: Kernel,
    machine: GuestTopology,
    options: Options,
}

/// What a guest has beside its kernel and its machine.
#[derive(Debug, Clone)]
struct Options {
    append: Vec<String>,
    files: Vec<(PathBuf, String)>,
    /// Files that are copied only if the script names them.
    offered: Vec<(PathBuf, String)>,
    forwards: Vec<Forward>,
    /// By the address in the guest's network.
    reached: Vec<(String, Forward)>,
    modules: Vec<String>,
    disks: Vec<Disk>,
    limit: Duration,
    debian: Option<Debian>,
    /// A file system with systemd.
    system: Option<PathBuf>,
    has_device_tree: bool,
    /// The node of the network card.
    network_node: Option<u32>,
    clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            append: Vec::new(),
            files: Vec::new(),
            offered: Vec::new(),
            forwards: Vec::new(),
            reached: Vec::new(),
            modules: Vec::new(),
            disks: Vec::new(),
            limit: DEFAULT_LIMIT,
            debian: None,
            system: None,
            has_device_tree: false,
            network_node: None,
            clock: Clock::default(),
        }
    }
}

/// The clock of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Clock {
    /// Advances with executed instructions and skips idle time, so that a busy host cannot make the guest miss a deadline and
    /// a `sleep` takes no time. (QEMU, docs/devel/tcg-icount.)
    #[default]
    Instructions,
    /// The host's. A guest that talks to the host needs it: the other side does not skip time.
    RealTime,
}

impl Clock {
    fn args(self) -> Vec<String> {
        match self {
            Self::Instructions => {
                let icount = format!("shift={INSTRUCTION_SHIFT},sleep=off");
                ["-icount", &icount, "-rtc", "clock=vm"].map(str::to_owned).to_vec()
            }
            Self::RealTime => Vec::new(),
        }
    }

    /// The arguments of `timeout` that stop the emulator at this limit. Without a clock of the host, CPU time counts: it is the same
    /// on a busy host.
    fn limit_args(self, limit: Duration) -> Vec<String> {
        let seconds = limit.as_secs().max(1);
        match self {
            Self::Instructions => {
                vec![
                    (seconds * u64::from(IDLE_FACTOR)).to_string(),
                    "prlimit".to_owned(),
                    format!("--cpu={seconds}:{}", seconds + 10),
                ]
            }
            Self::RealTime => vec![seconds.to_string()],
        }
    }
}

impl Vm {
    /// Such a machine with this kernel; it may run for three minutes.
    pub fn new(kernel: Kernel, machine: GuestTopology) -> Self {
        Self { kernel, machine, options: Options::default() }
    }

    /// Describes the machine by a device tree, without firmware and ACPI. Only Arm has that.
    #[must_use]
    pub fn device_tree(mut self) -> Self {
        self.options.has_device_tree = true;
        self
    }

    /// Makes systemd the first process. The script is then a service, and finds busybox's programs and Debian's on its
    /// PATH. The root file system takes some 100 MiB of memory.
    #[must_use]
    pub fn systemd(mut self, debian: Debian) -> Self {
        self.options.debian = Some(debian);
        self
    }

    /// As [`Vm::systemd`], with the root file system in this image of ext4, which then takes no memory. It becomes the last
    /// disk. What the guest writes to it is lost with the guest.
    #[must_use]
    pub fn systemd_on_disk(mut self, image: impl Into<PathBuf>) -> Self {
        self.options.system = Some(image.into());
        self
    }

    /// More arguments for the kernel.
    #[must_use]
    pub fn append(mut self, arguments: impl Into<String>) -> Self {
        self.options.append.push(arguments.into());
        self
    }

    /// Copies a file of the host into the guest, mode included.
    #[must_use]
    pub fn file(mut self, host: impl Into<PathBuf>, guest: impl Into<String>) -> Self {
        self.options.files.push((host.into(), guest.into()));
        self
    }

    /// As [`Vm::file`], if the script that the guest boots with has the file's name in it.
    #[must_use]
    pub fn offer(mut self, host: impl Into<PathBuf>, guest: impl Into<String>) -> Self {
        self.options.offered.push((host.into(), guest.into()));
        self
    }

    /// Lets the host's loopback interface reach a port of the guest. Nothing else gets in.
    #[must_use]
    pub fn forward(mut self, forward: Forward) -> Self {
        self.options.forwards.push(forward);
        self
    }

    /// Lets the guest reach a port of the host's loopback interface, at the guest's port of [`HOST_ADDRESS`]. Nothing else
    /// gets out.
    #[must_use]
    pub fn reach(self, forward: Forward) -> Self {
        self.reach_at(HOST_ADDRESS, forward)
    }

    /// As [`Vm::reach`], at another address of 10.0.2.0/24. Not at those that QEMU itself answers: 10.0.2.2 and 10.0.2.3.
    #[must_use]
    pub fn reach_at(mut self, address: impl Into<String>, forward: Forward) -> Self {
        self.options.reached.push((address.into(), forward));
        self
    }

    /// Loads a module of the kernel before the script begins, after those given before and those of the network. What a
    /// kernel has built in, or setup has not kept, is passed over.
    #[must_use]
    pub fn module(mut self, name: impl Into<String>) -> Self {
        self.options.modules.push(name.into());
        self
    }

    /// Makes a file of the host the next disk: `/dev/vda`, then `/dev/vdb`, as it is. What the guest writes there outlives
    /// the guest.
    #[must_use]
    pub fn disk(mut self, file: impl Into<PathBuf>) -> Self {
        self.options.disks.push(Disk { file: file.into(), log: None, node: None });
        self
    }

    /// As [`Vm::disk`], on a PCI bus of this node, as the firmware says.
    #[must_use]
    pub fn disk_on(mut self, file: impl Into<PathBuf>, node: u32) -> Self {
        self.options.disks.push(Disk { file: file.into(), log: None, node: Some(node) });
        self
    }

    /// As [`Vm::disk`], and every write and flush is noted in the file `log`, which must exist: a [`WriteLog`](crate::WriteLog).
    #[must_use]
    pub fn disk_with_log(mut self, file: impl Into<PathBuf>, log: impl Into<PathBuf>) -> Self {
        self.options.disks.push(Disk { file: file.into(), log: Some(log.into()), node: None });
        self
    }

    /// Puts the network card on a PCI bus of this node, as the firmware says; a machine without a network gets one that leads
    /// nowhere.
    #[must_use]
    pub fn network_on(mut self, node: u32) -> Self {
        self.options.network_node = Some(node);
        self
    }

    /// Runs the guest by the host's clock.
    #[must_use]
    pub fn real_time(mut self) -> Self {
        self.options.clock = Clock::RealTime;
        self
    }

    /// The clock of the guest: the host's if it talks to the host, or if its kernel does not come up in virtual time.
    fn clock(&self) -> Clock {
        let talks = !self.options.forwards.is_empty() || !self.options.reached.is_empty();
        let comes_up = self.kernel.arch() == Arch::Amd64 && !REAL_TIME_KERNELS.contains(&self.kernel.name());
        if talks || !comes_up { Clock::RealTime } else { self.options.clock }
    }

    fn has_systemd(&self) -> bool {
        self.options.debian.is_some() || self.options.system.is_some()
    }

    fn has_network(&self) -> bool {
        !self.options.forwards.is_empty()
            || !self.options.reached.is_empty()
            || self.options.network_node.is_some()
    }

    /// The time after which the guest is stopped, booting included: CPU time of the emulator if the guest runs in virtual time.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.options.limit = limit;
        self
    }

    /// Boots, runs `script` (busybox sh) as root with its output going to `output` as it comes, and returns its
    /// exit code.
    pub fn run(&self, script: &str, output: &mut dyn Write) -> Result<u8, Error> {
        self.start(script)?.finish(output)
    }

    /// Boots, and returns when the script begins or the guest has ended. The guest is stopped when the returned value
    /// is dropped.
    ///
    /// A guest that does not come up is started again: nothing of the script has run. In real time, the emulation now and then loses
    /// a timer's interrupt on a busy host (the kernel then reports stalls on its console, or panics early).
    pub fn start(&self, script: &str) -> Result<RunningVm, Error> {
        let mut attempt = 1;
        loop {
            let mut running = self.attempt(script)?;
            let limit = match (self.clock(), self.kernel.arch()) {
                (Clock::Instructions, _) => self.options.limit * IDLE_FACTOR,
                _ if self.has_systemd() => SYSTEMD_BOOT_LIMIT,
                (_, Arch::Amd64) => BOOT_LIMIT,
                (_, Arch::Arm64) => FIRMWARE_BOOT_LIMIT,
            };
            if running.comes_up(limit)? || attempt == BOOT_ATTEMPTS {
                return Ok(running);
            }
            eprintln!("{RESTARTED} within {} s: starting it again", limit.as_secs());
            attempt += 1;
        }
    }

    fn attempt(&self, script: &str) -> Result<RunningVm, Error> {
        let arch = self.kernel.arch();
        let image_arch = self.options.system.is_some().then_some(Arch::Amd64);
        let root_arch = self.options.debian.as_ref().map(Debian::arch).or(image_arch);
        if root_arch.is_some_and(|root| root != arch) {
            return Err(Error::NoDebianFor(arch));
        }
        let emulator = arch.emulator();
        let mut busybox = PathBuf::new();
        for (tool, package) in [&emulator].into_iter().chain(TOOLS) {
            let path = find_tool(tool).ok_or(Error::NoTool { tool, package })?;
            if *tool == "busybox" {
                busybox = path;
            }
        }
        let folder = tempfile::Builder::new()
            .prefix("numaward-vm-")
            .tempdir()
            .map_err(Error::io("creating a folder in", env::temp_dir()))?;
        let initrd = folder.path().join("initrd");
        let of_guest = match arch {
            Arch::Amd64 => busybox.clone(),
            Arch::Arm64 => self.kernel.guest_file(GUEST_BUSYBOX)?,
        };
        self.stage(folder.path().join("root"), &of_guest, script)?.pack(&initrd)?;

        let [console, status, stderr, monitor] =
            ["console", "status", "stderr", "monitor"].map(|name| folder.path().join(name));
        let errors = File::create(&stderr).map_err(Error::io("creating", &stderr))?;
        let chardev = |id: &str, path: &Path| format!("file,id={id},path={}", path.display());
        let port = arch.ports().console;
        let of_systemd = format!("{SYSTEMD_ARGUMENTS} systemd.mask=serial-getty@{port}.service");
        let console_argument = format!("console={port}");
        let kernel_arguments = [
            console_argument.as_str(),
            "panic=-1 oops=panic quiet",
            FASTER_BOOT,
            arch.kernel_arguments(),
            if self.has_systemd() { &of_systemd } else { "" },
            &self.options.append.join(" "),
        ]
        .join(" ");
        let child = Command::new("setpriv")
            // When this process dies, however it dies, so does the guest.
            .args(["--pdeathsig", "TERM", "timeout", "--foreground", "--kill-after=5"])
            .args(self.clock().limit_args(self.options.limit))
            .args([emulator.0, "-nodefaults", "-no-user-config"])
            .args(arch.board_args())
            // One thread emulates all CPUs: with several, a CPU runs stale code now and then while the kernel
            // rewrites it (tracepoints, static branches), and the guest dies of an int3 that nobody set.
            .args(["-accel", "tcg,thread=single"])
            .args(self.clock().args())
            .args(self.firmware_args()?)
            .args(["-display", "none", "-monitor", "none", "-no-reboot"])
            .args(self.machine.qemu_args())
            .arg("-kernel")
            .arg(self.kernel.image())
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", kernel_arguments.trim()])
            .args(["-chardev", &chardev("console", &console)])
            .args(["-chardev", "stdio,id=output,signal=off"])
            .args(["-chardev", &chardev("status", &status)])
            .args(arch.port_args("console", "output", "status"))
            // Before the network: without a bus of their own, devices go to the bus that was named last.
            .args(self.disk_args())
            .args(self.network_args(&busybox))
            .args(self.monitor_args(&monitor))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .map_err(Error::io("starting", "setpriv"))?;
        Ok(RunningVm { child, _folder: folder, console, status, stderr, monitor, limit: self.options.limit })
    }

    fn stage(&self, folder: PathBuf, busybox: &Path, script: &str) -> Result<Initramfs, Error> {
        let tree = Initramfs::new(folder, self.options.debian.as_ref().map(Debian::archive))?;
        let systemd = include_str!("systemd.sh");
        if self.options.system.is_some() {
            tree.text(include_str!("disk.sh"), "/init")?;
            tree.text(systemd, "/numaward-vm/init")?;
        } else {
            tree.text(
                if self.options.debian.is_some() { systemd } else { include_str!("init.sh") },
                "/init",
            )?;
        }
        let Ports { output, status, .. } = self.kernel.arch().ports();
        tree.text(&format!("{output} {status}\n"), "/numaward-vm/ports")?;
        tree.text(include_str!("run.sh"), "/numaward-vm/run")?;
        tree.text(script, "/numaward-vm/script")?;
        tree.file(busybox, "/bin/busybox")?;
        let network = self.has_network().then_some(NETWORK_MODULES);
        let has_disk = !self.options.disks.is_empty() || self.options.system.is_some();
        let disk = has_disk.then_some(DISK_MODULES);
        let virtio = (network.is_some() || disk.is_some()).then_some(VIRTIO_MODULES);
        let devices = [virtio, network, disk].into_iter().flatten().flatten().copied();
        let names = devices.chain(self.options.modules.iter().map(String::as_str));
        let modules: Vec<_> = names.filter_map(|name| Some((name, self.kernel.module(name)?))).collect();
        for (name, path) in &modules {
            tree.file(path, &format!("/numaward-vm/{name}.ko"))?;
        }
        let names: Vec<_> = modules.iter().map(|(name, _)| *name).collect();
        tree.text(&names.join("\n"), "/numaward-vm/modules")?;
        if self.has_network() {
            tree.text("", "/numaward-vm/network")?;
        }
        let is_named = |(_, guest): &&(PathBuf, String)| {
            script.contains(guest.rsplit_once('/').map_or(guest.as_str(), |(_, name)| name))
        };
        for (host, guest) in self.options.files.iter().chain(self.options.offered.iter().filter(is_named)) {
            if self.options.system.is_none() {
                tree.file(host, guest)?;
            } else if let Some(program) = guest.strip_prefix("/bin/") {
                // A link on the disk.
                tree.file(host, &format!("{ONTO_DISK}/usr/bin/{program}"))?;
            } else {
                tree.file(host, &format!("{ONTO_DISK}{guest}"))?;
            }
        }
        Ok(tree)
    }

    /// What describes the machine to the kernel.
    fn firmware_args(&self) -> Result<Vec<String>, Error> {
        Ok(match self.kernel.arch() {
            Arch::Amd64 => Vec::new(),
            Arch::Arm64 if self.options.has_device_tree => Vec::new(),
            Arch::Arm64 => {
                let firmware = self.kernel.guest_file(GUEST_FIRMWARE)?;
                vec!["-bios".to_owned(), firmware.display().to_string()]
            }
        })
    }

    fn monitor_args(&self, socket: &Path) -> Vec<String> {
        if self.machine.has_room() {
            vec!["-qmp".to_owned(), format!("unix:{},server=on,wait=off", socket.display())]
        } else {
            Vec::new()
        }
    }

    fn disk_args(&self) -> Vec<String> {
        let mut args: Vec<_> =
            self.options.disks.iter().enumerate().flat_map(|(number, disk)| disk.args(number)).collect();
        if let Some(image) = &self.options.system {
            let drive = format!("file={},id=system,if=none,format=raw,snapshot=on", image.display());
            let device = "virtio-blk-pci,drive=system,serial=system".to_owned();
            args.extend(["-drive".to_owned(), drive, "-device".to_owned(), device]);
        }
        args
    }

    fn network_args(&self, busybox: &Path) -> Vec<String> {
        if !self.has_network() {
            return Vec::new();
        }
        let mut netdev = "user,id=n0,restrict=on".to_owned();
        // Writing to a String cannot fail.
        for Forward { host, guest } in &self.options.forwards {
            let _ = write!(netdev, ",hostfwd=tcp:127.0.0.1:{host}-:{guest}");
        }
        for (address, Forward { host, guest }) in &self.options.reached {
            // QEMU itself would pass on one connection and no more; of a command it starts one for each.
            let relay = format!("{} nc 127.0.0.1 {host}", busybox.display());
            let _ = write!(netdev, ",guestfwd=tcp:{address}:{guest}-cmd:{relay}");
        }
        let mut args = vec!["-netdev".to_owned(), netdev];
        let card = "virtio-net-pci,netdev=n0,romfile=";
        match self.options.network_node {
            Some(node) => args.extend(behind_port("card", 128, node, card)),
            None => args.extend(["-device".to_owned(), card.to_owned()]),
        }
        args
    }
}

/// A guest that has been started.
#[derive(Debug)]
pub struct RunningVm {
    child: Child,
    /// Removed with everything in it on drop.
    _folder: TempDir,
    console: PathBuf,
    status: PathBuf,
    stderr: PathBuf,
    monitor: PathBuf,
    limit: Duration,
}

impl RunningVm {
    /// What changes the machine while it runs; only for a machine with room, and once.
    pub fn monitor(&self) -> Result<Monitor, Error> {
        Monitor::connect(&self.monitor)
    }

    /// What stops the guest while [`RunningVm::finish`] waits for its end.
    pub fn stopper(&self) -> Stopper {
        Stopper { pid: self.child.id() }
    }

    /// Whether the script has begun in time. A guest that QEMU could not even start counts as well: trying again
    /// would not help.
    fn comes_up(&mut self, limit: Duration) -> Result<bool, Error> {
        let started = Instant::now();
        while started.elapsed() < limit {
            // In this order: a script may begin, and end, between the two.
            let ended = self.ended().map_err(Error::io("waiting for", "QEMU"))?;
            if fs::read_to_string(&self.status).unwrap_or_default().starts_with(BEGUN) {
                return Ok(true);
            }
            if ended {
                return Ok(panic_line(&self.read_console()).is_none());
            }
            thread::sleep(BOOT_PACE);
        }
        Ok(false)
    }

    /// Whether the guest has ended.
    pub fn ended(&mut self) -> io::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Passes the script's output on until the guest ends, and returns the script's exit code.
    pub fn finish(mut self, output: &mut dyn Write) -> Result<u8, Error> {
        if let Some(mut stdout) = self.child.stdout.take() {
            let mut buffer = [0; 8192];
            loop {
                let count = match stdout.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(count) => count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => {
                        return Err(Error::io("reading the output of", "QEMU")(error));
                    }
                };
                output
                    .write_all(&buffer[..count])
                    .and_then(|()| output.flush())
                    .map_err(Error::io("passing on the output of", "QEMU"))?;
            }
        }
        let status = self.child.wait().map_err(Error::io("waiting for", "QEMU"))?;
        let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let console = text(&self.console);
        if let Some(code) = exit_code(&text(&self.status)) {
            return Ok(code);
        }
        if let Some(reason) = panic_line(&console) {
            return Err(Error::Panic { reason: reason.to_owned(), console: tail(&console) });
        }
        match status.code() {
            Some(0) => Err(Error::NoExitCode { console: tail(&console) }),
            Some(code) if TIMED_OUT.contains(&code) => {
                Err(Error::Timeout { limit: self.limit, console: tail(&console) })
            }
            None if status.signal() == Some(SIGXCPU) => {
                Err(Error::Timeout { limit: self.limit, console: tail(&console) })
            }
            _ => Err(Error::Qemu { status, stderr: text(&self.stderr).trim().to_owned() }),
        }
    }

    /// The last lines of the guest's console so far.
    pub fn console_tail(&self) -> String {
        tail(&self.read_console())
    }

    fn read_console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }
}

/// Stops a guest.
#[derive(Debug, Clone, Copy)]
pub struct Stopper {
    pid: u32,
}

impl Stopper {
    /// Asks the guest's process to end; nothing happens if it has ended.
    pub fn stop(self) {
        let _ = Command::new("kill").arg(self.pid.to_string()).stderr(Stdio::null()).status();
    }

    /// The process that watches over QEMU.
    pub fn pid(self) -> u32 {
        self.pid
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        // Already waited for in the ordinary case. SIGKILL to `timeout` would orphan QEMU; it passes SIGTERM on.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.stopper().stop();
            let _ = self.child.wait();
        }
    }
}

/// What the guest's init writes before the script begins.
const BEGUN: &str = "begun\n";

/// The one line that the guest's init writes after the script has ended, and nothing else.
fn exit_code(status: &str) -> Option<u8> {
    status.strip_prefix(BEGUN)?.strip_prefix("exit ")?.strip_suffix('\n')?.parse().ok()
}

/// What a kernel says that gives up.
fn panic_line(console: &str) -> Option<&str> {
    console.lines().map(str::trim).find(|line| line.contains("Kernel panic"))
}

fn tail(console: &str) -> String {
    let lines: Vec<_> = console.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    if lines.is_empty() {
        return "The console is empty.".to_owned();
    }
    let shown = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    format!("The console's last lines:\n    {}", shown.join("\n    "))
}

/// The path of one of [`TOOLS`], from PATH or the folders of the administrator's tools, which may be missing from an
/// ordinary user's PATH.
pub fn find_tool(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_marker_is_an_exit_code() {
        assert_eq!(exit_code("exit 0\n"), None);
        assert_eq!(exit_code("begun\nexit 0\n"), Some(0));
        assert_eq!(exit_code("begun\nexit 255\n"), Some(255));
        for wrong in ["", "exit", "exit 3", "exit 256\n", "exit -1\n", "exit 0\nexit 1\n", "x\nexit 0\n"] {
            assert_eq!(exit_code(&format!("begun\n{wrong}")), None, "{wrong:?}");
        }
    }

    #[test]
    fn forwards_are_read() {
        assert_eq!("19560:9560".parse(), Ok(Forward { host: 19560, guest: 9560 }));
        for wrong in ["", "1", "1:", ":1", "0:1", "1:70000", "a:b", "1:2:3"] {
            assert!(wrong.parse::<Forward>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_tail_is_the_end() {
        let console = (0..100).fold(String::new(), |console, line| format!("{console}line {line}\r\n\r\n"));
        let tail = tail(&console);
        assert!(
            tail.ends_with("line 99") && tail.contains("line 60\n") && !tail.contains("line 59\n"),
            "{tail}"
        );
    }
}

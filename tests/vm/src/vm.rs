//! Boots a guest, runs a script in it, and returns the exit code.

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
    Arch, Debian, Error, GUEST_BUSYBOX, GUEST_FIRMWARE, GuestTopology, Kernel, Monitor, TOOLS,
    arch::SerialPorts, counter, image, initramfs::Initramfs,
};

/// Skips the self-tests of the kernel's ciphers and the initialization of its entropy from CPU jitter, which take
/// almost half of an emulated boot.
const FASTER_BOOT: &str = "cryptomgr.notests initcall_blacklist=jent_mod_init";

/// Modules for the network and the disk, each after those that it needs.
const VIRTIO_MODULES: &[&str] =
    &["virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci"];
const NETWORK_MODULES: &[&str] = &["failover", "net_failover", "virtio_net"];
const DISK_MODULES: &[&str] = &["virtio_blk"];
/// Number of console lines in an error.
const TAIL_LINES: usize = 40;
/// The time limit of a boot. A guest boots in 4 to 8 seconds, one with firmware in 15, and in three times that on an
/// overloaded host.
const BOOT_LIMIT: Duration = Duration::from_mins(1);
const FIRMWARE_BOOT_LIMIT: Duration = Duration::from_mins(3);
/// The time limit of a boot with systemd, which takes 15 seconds, and minutes on a busy host.
const SYSTEMD_BOOT_LIMIT: Duration = Duration::from_mins(5);
/// Arguments that make systemd run the script, and start no login prompt.
const SYSTEMD_ARGUMENTS: &str = "systemd.wants=numaward-vm.service systemd.mask=getty@tty1.service";
/// Folder of files that `disk.sh` copies over the root file system.
const DISK_OVERLAY: &str = "/numaward-vm/files";
const BOOT_ATTEMPTS: u32 = 3;
/// Multiple of its limit after which a guest in virtual time is stopped if its emulator gets little CPU time.
const IDLE_FACTOR: u32 = 10;
/// Kernels that hang in virtual time while they start the second CPU (seen with QEMU 7.2). Kernels for Arm were not
/// tried.
const REAL_TIME_KERNELS: [&str; 2] = ["5.10", "6.1"];
/// Binary logarithm of the nanoseconds of the guest's time that an instruction takes.
const INSTRUCTION_SHIFT: u32 = 2;
/// Beginning of the line that [`Vm::start`] prints when it starts a machine again.
pub const RESTARTED: &str = "the machine did not come up";
const BOOT_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Address at which a guest reaches the ports of [`Vm::reach`].
pub const HOST_ADDRESS: &str = "10.0.2.100";
const DEFAULT_LIMIT: Duration = Duration::from_mins(3);
/// Exit codes of `timeout` after it stopped its command by SIGTERM or by SIGKILL.
const TIMEOUT_EXIT_CODES: [i32; 2] = [124, 137];
/// Signal at the limit of CPU time (setrlimit(2)).
const SIGXCPU: i32 = 24;

/// A TCP port of the host's loopback interface that leads to a port of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    /// Port on 127.0.0.1 of the host.
    pub host: u16,
    /// Port in the guest.
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

#[derive(Debug, Clone)]
struct Disk {
    file: PathBuf,
    log: Option<PathBuf>,
    /// Node of its PCI bus.
    node: Option<u32>,
}

impl Disk {
    fn args(&self, number: usize) -> Vec<String> {
        let node = |mut node: Value, name: &str| {
            node["node-name"] = format!("{name}{number}").into();
            node
        };
        // The file belongs to this host, so its content need not be flushed to the host's disk.
        let cache = json!({ "no-flush": true });
        let file = |path: &Path| json!({ "driver": "file", "filename": path, "cache": cache.clone() });
        let disk = json!({ "driver": "raw", "cache": cache, "file": file(&self.file) });
        let disk = match &self.log {
            None => disk,
            // Flushes of the guest must be written to the log.
            Some(log) => json!({ "driver": "blklogwrites", "file": disk, "log": file(log) }),
        };
        let mut args = vec!["-blockdev".to_owned(), node(disk, "disk").to_string()];
        let device = format!("virtio-blk-pci,drive=disk{number}");
        match self.node {
            // Numbers of buses begin at 160; each bus has a port with a bus of its own.
            Some(node) => args.extend(behind_port(&format!("disk{number}"), 160 + 4 * number, node, &device)),
            None => args.extend(["-device".to_owned(), device]),
        }
        args
    }
}

/// Returns QEMU's arguments for a device on a PCI bus of a node: the bus with this number, a port, and the device. The
/// firmware reports the node.
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

/// A guest to boot.
#[derive(Debug, Clone)]
pub struct Vm {
    kernel: Kernel,
    machine: GuestTopology,
    options: GuestOptions,
}

/// Options of a guest besides its kernel and its topology.
#[derive(Debug, Clone)]
struct GuestOptions {
    append: Vec<String>,
    files: Vec<(PathBuf, String)>,
    /// Files that are copied only if the script names them.
    offered: Vec<(PathBuf, String)>,
    forwards: Vec<Forward>,
    /// Host ports that the guest reaches, with the address in the guest's network.
    reached: Vec<(String, Forward)>,
    modules: Vec<String>,
    disks: Vec<Disk>,
    limit: Duration,
    debian: Option<Debian>,
    /// Image of a root file system with systemd.
    system: Option<PathBuf>,
    has_device_tree: bool,
    /// Node of the network card's PCI bus.
    network_node: Option<u32>,
    clock: Clock,
}

impl Default for GuestOptions {
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

/// Clock of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Clock {
    /// Advances with executed instructions and skips idle time: a busy host cannot make the guest miss a deadline, and
    /// a `sleep` takes no time. (QEMU, docs/devel/tcg-icount.)
    #[default]
    Instructions,
    /// The host's clock. A guest that communicates with the host needs it, because the host does not skip time.
    RealTime,
}

impl Clock {
    /// Returns the clock of guests with this kernel, unless they communicate with the host.
    pub fn of_kernel(arch: Arch, name: &str) -> Self {
        let comes_up = arch == Arch::Amd64 && !REAL_TIME_KERNELS.contains(&name);
        if comes_up { Self::Instructions } else { Self::RealTime }
    }

    fn args(self) -> Vec<String> {
        match self {
            Self::Instructions => {
                let icount = format!("shift={INSTRUCTION_SHIFT},sleep=off");
                ["-icount", &icount, "-rtc", "clock=vm"].map(str::to_owned).to_vec()
            }
            Self::RealTime => Vec::new(),
        }
    }

    /// Returns arguments of the kernel.
    fn kernel_arguments(self, arch: Arch) -> String {
        let is_of_host = self == Self::RealTime && arch == Arch::Amd64 && cfg!(target_arch = "x86_64");
        let frequency = is_of_host.then(counter::frequency).flatten();
        frequency.map_or_else(String::new, |kilohertz| format!("tsc_early_khz={kilohertz}"))
    }

    /// Returns the arguments of `timeout` that stop the emulator at this limit. In virtual time, CPU time counts,
    /// because it does not depend on the load of the host.
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
    /// Creates a guest with this kernel and topology, and a time limit of three minutes.
    pub fn new(kernel: Kernel, machine: GuestTopology) -> Self {
        Self { kernel, machine, options: GuestOptions::default() }
    }

    /// Describes the machine by a device tree, without firmware and ACPI. Only Arm supports this.
    #[must_use]
    pub fn device_tree(mut self) -> Self {
        self.options.has_device_tree = true;
        self
    }

    /// Makes systemd the first process. The script is then a service, with busybox's and Debian's programs on its PATH.
    /// The root file system takes about 100 MiB of memory.
    #[must_use]
    pub fn systemd(mut self, debian: Debian) -> Self {
        self.options.debian = Some(debian);
        self
    }

    /// Like [`Vm::systemd`], with the root file system in this ext4 image, which takes no memory. The image becomes the
    /// last disk. Writes of the guest to it are discarded.
    #[must_use]
    pub fn systemd_on_disk(mut self, image: impl Into<PathBuf>) -> Self {
        self.options.system = Some(image.into());
        self
    }

    /// Adds arguments of the kernel.
    #[must_use]
    pub fn append(mut self, arguments: impl Into<String>) -> Self {
        self.options.append.push(arguments.into());
        self
    }

    /// Copies a file of the host into the guest, with its mode.
    #[must_use]
    pub fn file(mut self, host: impl Into<PathBuf>, guest: impl Into<String>) -> Self {
        self.options.files.push((host.into(), guest.into()));
        self
    }

    /// Like [`Vm::file`], but only if the script contains the file's name.
    #[must_use]
    pub fn offer(mut self, host: impl Into<PathBuf>, guest: impl Into<String>) -> Self {
        self.options.offered.push((host.into(), guest.into()));
        self
    }

    /// Lets the host's loopback interface reach a port of the guest. No other connection to the guest is possible.
    #[must_use]
    pub fn forward(mut self, forward: Forward) -> Self {
        self.options.forwards.push(forward);
        self
    }

    /// Lets the guest reach a port of the host's loopback interface, at the guest's port of [`HOST_ADDRESS`]. No other
    /// connection from the guest is possible.
    #[must_use]
    pub fn reach(self, forward: Forward) -> Self {
        self.reach_at(HOST_ADDRESS, forward)
    }

    /// Like [`Vm::reach`], at another address of 10.0.2.0/24, except for QEMU's own: 10.0.2.2 and 10.0.2.3.
    #[must_use]
    pub fn reach_at(mut self, address: impl Into<String>, forward: Forward) -> Self {
        self.options.reached.push((address.into(), forward));
        self
    }

    /// Loads a module of the kernel before the script begins, after the modules of earlier calls and those of the
    /// network. A module that is built in or not in the cache is skipped.
    #[must_use]
    pub fn module(mut self, name: impl Into<String>) -> Self {
        self.options.modules.push(name.into());
        self
    }

    /// Makes a file of the host the next disk: `/dev/vda`, then `/dev/vdb`. Writes of the guest change the file.
    #[must_use]
    pub fn disk(mut self, file: impl Into<PathBuf>) -> Self {
        self.options.disks.push(Disk { file: file.into(), log: None, node: None });
        self
    }

    /// Like [`Vm::disk`], on a PCI bus of this node, as the firmware reports.
    #[must_use]
    pub fn disk_on(mut self, file: impl Into<PathBuf>, node: u32) -> Self {
        self.options.disks.push(Disk { file: file.into(), log: None, node: Some(node) });
        self
    }

    /// Like [`Vm::disk`], with a log of every write and flush in the file `log`, which must exist: a
    /// [`WriteLog`](crate::WriteLog).
    #[must_use]
    pub fn disk_with_log(mut self, file: impl Into<PathBuf>, log: impl Into<PathBuf>) -> Self {
        self.options.disks.push(Disk { file: file.into(), log: Some(log.into()), node: None });
        self
    }

    /// Puts the network card on a PCI bus of this node, as the firmware reports. A machine without a network gets a
    /// card without connection.
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

    /// Returns the clock of the guest: the host's if the guest communicates with the host, or if its kernel does not
    /// boot in virtual time.
    fn clock(&self) -> Clock {
        let talks = !self.options.forwards.is_empty() || !self.options.reached.is_empty();
        let of_kernel = Clock::of_kernel(self.kernel.arch(), self.kernel.name());
        if talks || of_kernel == Clock::RealTime { Clock::RealTime } else { self.options.clock }
    }

    fn has_systemd(&self) -> bool {
        self.options.debian.is_some() || self.options.system.is_some()
    }

    fn has_network(&self) -> bool {
        !self.options.forwards.is_empty()
            || !self.options.reached.is_empty()
            || self.options.network_node.is_some()
    }

    /// Sets the time limit of the guest, including its boot. In virtual time, the CPU time of the emulator counts.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.options.limit = limit;
        self
    }

    /// Boots, runs `script` (busybox sh) as root, writes its output to `output` as it comes, and returns its exit code.
    pub fn run(&self, script: &str, output: &mut dyn Write) -> Result<u8, Error> {
        self.start(script)?.finish(output)
    }

    /// Boots, and returns when the script begins or the guest has ended. The guest is stopped when the returned value
    /// is dropped.
    ///
    /// A guest that does not boot is started again, because nothing of the script has run. In real time, the emulation
    /// sometimes loses a timer interrupt on a busy host (the kernel then reports stalls on its console, or panics
    /// early).
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

        let [console, status, stderr, monitor, program] =
            ["console", "status", "stderr", "monitor", "vmlinux"].map(|name| folder.path().join(name));
        let is_unpacked = arch == Arch::Amd64 && image::unpack(self.kernel.image(), &program)?;
        let kernel = if is_unpacked { &program } else { self.kernel.image() };
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
            &self.clock().kernel_arguments(arch),
            if self.has_systemd() { &of_systemd } else { "" },
            &self.options.append.join(" "),
        ]
        .join(" ");
        let child = Command::new("setpriv")
            // When this process dies for any reason, the guest dies too.
            .args(["--pdeathsig", "TERM", "timeout", "--foreground", "--kill-after=5"])
            .args(self.clock().limit_args(self.options.limit))
            .args([emulator.0, "-nodefaults", "-no-user-config"])
            .args(arch.board_args())
            // One thread emulates all CPUs. With several, a CPU sometimes runs stale code while the kernel rewrites it
            // (tracepoints,
            // static branches), and the guest dies of an unexpected int3.
            .args(["-accel", "tcg,thread=single"])
            .args(self.clock().args())
            .args(self.firmware_args()?)
            .args(["-display", "none", "-monitor", "none", "-no-reboot"])
            .args(self.machine.qemu_args())
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", kernel_arguments.trim()])
            .args(["-chardev", &chardev("console", &console)])
            .args(["-chardev", "stdio,id=output,signal=off"])
            .args(["-chardev", &chardev("status", &status)])
            .args(arch.port_args("console", "output", "status"))
            // Before the network: devices without a bus of their own are attached to the bus that was named last.
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
        let SerialPorts { output, status, .. } = self.kernel.arch().ports();
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
                // `/bin` is a link on the disk.
                tree.file(host, &format!("{DISK_OVERLAY}/usr/bin/{program}"))?;
            } else {
                tree.file(host, &format!("{DISK_OVERLAY}{guest}"))?;
            }
        }
        Ok(tree)
    }

    /// Returns QEMU's arguments for the firmware.
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
            // QEMU itself would forward only one connection, but starts a command for each.
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

/// A guest that was started.
#[derive(Debug)]
pub struct RunningVm {
    child: Child,
    /// Temporary folder, which is removed on drop.
    _folder: TempDir,
    console: PathBuf,
    status: PathBuf,
    stderr: PathBuf,
    monitor: PathBuf,
    limit: Duration,
}

impl RunningVm {
    /// Connects to the monitor, which changes the running machine. Possible once, and only for a topology with room for
    /// memory.
    pub fn monitor(&self) -> Result<Monitor, Error> {
        Monitor::connect(&self.monitor)
    }

    /// Returns a handle that stops the guest while [`RunningVm::finish`] waits for its end.
    pub fn stopper(&self) -> Stopper {
        Stopper { pid: self.child.id() }
    }

    /// Returns whether the script began in time. True also for a guest that QEMU could not start, because another
    /// attempt would not help.
    fn comes_up(&mut self, limit: Duration) -> Result<bool, Error> {
        let started = Instant::now();
        while started.elapsed() < limit {
            // In this order, because a script may begin and end between the two.
            let ended = self.ended().map_err(Error::io("waiting for", "QEMU"))?;
            if fs::read_to_string(&self.status).unwrap_or_default().starts_with(BEGUN) {
                return Ok(true);
            }
            if ended {
                return Ok(panic_line(&self.read_console()).is_none());
            }
            thread::sleep(BOOT_POLL_INTERVAL);
        }
        Ok(false)
    }

    /// Returns whether the guest has ended.
    pub fn ended(&mut self) -> io::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Writes the script's output to `output` until the guest ends, and returns the script's exit code.
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
            Some(code) if TIMEOUT_EXIT_CODES.contains(&code) => {
                Err(Error::Timeout { limit: self.limit, console: tail(&console) })
            }
            None if status.signal() == Some(SIGXCPU) => {
                Err(Error::Timeout { limit: self.limit, console: tail(&console) })
            }
            _ => Err(Error::Qemu { status, stderr: text(&self.stderr).trim().to_owned() }),
        }
    }

    /// Returns the last lines of the guest's console so far.
    pub fn console_tail(&self) -> String {
        tail(&self.read_console())
    }

    fn read_console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }
}

/// Handle that stops a guest.
#[derive(Debug, Clone, Copy)]
pub struct Stopper {
    pid: u32,
}

impl Stopper {
    /// Asks the guest's process to end; does nothing if it has ended.
    pub fn stop(self) {
        let _ = Command::new("kill").arg(self.pid.to_string()).stderr(Stdio::null()).status();
    }

    /// Returns the id of the process that supervises QEMU.
    pub fn pid(self) -> u32 {
        self.pid
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        // Normally the process has ended by now. SIGKILL to `timeout` would orphan QEMU; SIGTERM is forwarded.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.stopper().stop();
            let _ = self.child.wait();
        }
    }
}

/// Line that the guest's init writes before the script begins.
const BEGUN: &str = "begun\n";

/// Parses the line that the guest's init writes after the script has ended.
fn exit_code(status: &str) -> Option<u8> {
    status.strip_prefix(BEGUN)?.strip_prefix("exit ")?.strip_suffix('\n')?.parse().ok()
}

/// Returns the line with the kernel's panic.
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

/// Returns the path of one of [`TOOLS`], from PATH or the folders of the administrator's tools, which may not be in an
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
    fn parses_exit_code_line_only() {
        assert_eq!(exit_code("exit 0\n"), None);
        assert_eq!(exit_code("begun\nexit 0\n"), Some(0));
        assert_eq!(exit_code("begun\nexit 255\n"), Some(255));
        for wrong in ["", "exit", "exit 3", "exit 256\n", "exit -1\n", "exit 0\nexit 1\n", "x\nexit 0\n"] {
            assert_eq!(exit_code(&format!("begun\n{wrong}")), None, "{wrong:?}");
        }
    }

    #[test]
    fn parses_forwards() {
        assert_eq!("19560:9560".parse(), Ok(Forward { host: 19560, guest: 9560 }));
        for wrong in ["", "1", "1:", ":1", "0:1", "1:70000", "a:b", "1:2:3"] {
            assert!(wrong.parse::<Forward>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn tail_has_last_lines() {
        let console = (0..100).fold(String::new(), |console, line| format!("{console}line {line}\r\n\r\n"));
        let tail = tail(&console);
        assert!(
            tail.ends_with("line 99") && tail.contains("line 60\n") && !tail.contains("line 59\n"),
            "{tail}"
        );
    }
}

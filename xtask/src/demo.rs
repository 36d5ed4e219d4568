//! `cargo xtask demo`: shows numaward on machines with a single node.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use numaward_vm::{Arch, Cache, Forward, GuestTopology, Kernel, RunningVm, Vm};

use crate::setup::{self, Part, kernels};
use crate::{command, vm};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Ends after this number of seconds [default: at Ctrl-C]
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=MAX_SECONDS))]
    seconds: Option<u64>,
    /// Port of 127.0.0.1 on which the daemon answers; the next port takes changes
    #[arg(long, default_value_t = DAEMON_PORT, value_parser = clap::value_parser!(u16).range(1..u16::MAX.into()))]
    port: u16,
    /// Kernel to boot
    #[arg(long, default_value = kernels::DEFAULT, value_parser = kernels::names(Arch::Amd64))]
    kernel: String,
}

const ARCH: Arch = Arch::Amd64;
/// Port of the daemon inside the machine; the next port takes changes.
const DAEMON_PORT: u16 = 9560;
/// File in the checkout with the token for changes in the machine.
const TOKEN: &str = "target/demo.token";
/// Command that fixes the demo's workload.
pub(crate) const FIX: [&str; 8] =
    ["guarantee", "/database", "--cpus", "1", "--memory", "384Mi", "--node", "1"];
/// Maximum duration: a week, in seconds.
const MAX_SECONDS: u64 = 7 * 24 * 3600;
/// The time limit of the boot and of the daemon's start in seconds, on a busy host.
const BOOT_TIMEOUT: u64 = 180;

pub(crate) fn main(arguments: &Arguments) -> Result<ExitCode> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    // QEMU would report a used port only after everything was built.
    for address in [address, changes(address)] {
        if let Err(error) = TcpListener::bind(address) {
            bail!("cannot listen on {address}: {error}; choose another port with --port");
        }
    }
    let programs = programs(arguments)?;
    let running = boot(arguments, &programs, address)?;
    let program = vm::daemon(&programs)?;

    let mut announced = false;
    let (signalled, result) = vm::attend(running, || {
        if !announced && is_ready(address) {
            announced = true;
            println!("{}", what_to_look_at(program, address, arguments.seconds));
        }
    })?;
    if signalled {
        eprintln!("the machine is gone");
        return Ok(ExitCode::SUCCESS);
    }
    match result.context("the demo's machine failed")? {
        0 => Ok(ExitCode::SUCCESS),
        code => bail!("the demo's script ended with {code}, see above"),
    }
}

/// Installs the packages for the demo's machine, and builds its programs.
pub(crate) fn programs(arguments: &Arguments) -> Result<Vec<(String, PathBuf)>> {
    let kernel = kernels::find(ARCH, &arguments.kernel)?;
    setup::ensure(&[Part::Ebpf, Part::Qemu(ARCH), Part::Kernel(ARCH, kernel)])?;
    vm::few_programs(ARCH)
}

/// Boots the demo's machine, with the daemon on this address.
pub(crate) fn boot(
    arguments: &Arguments,
    programs: &[(String, PathBuf)],
    address: SocketAddr,
) -> Result<RunningVm> {
    let machine = GuestTopology::parse(
        Some(4),
        Some("2,2,2,2"),
        Some("1G,1G,1G,1G"),
        Some("10,12,32,32;12,10,32,32;32,32,10,12;32,32,12,10"),
    )?;
    let seconds = arguments.seconds.unwrap_or(MAX_SECONDS);
    let mut vm = Vm::new(Kernel::find(&Cache::locate()?, ARCH, &arguments.kernel)?, machine)
        .forward(Forward { host: address.port(), guest: DAEMON_PORT })
        .forward(Forward { host: changes(address).port(), guest: DAEMON_PORT + 1 })
        .limit(Duration::from_secs(seconds + BOOT_TIMEOUT));
    for (name, path) in programs {
        vm = vm.file(path, format!("/bin/{name}"));
    }
    let (control, token) = (DAEMON_PORT + 1, token()?);
    let script = format!(
        "port={DAEMON_PORT}\ncontrol={control}\ntoken={token}\nseconds={seconds}\n{}",
        include_str!("demo.sh")
    );
    eprintln!("booting a machine with four nodes, which takes some seconds");
    Ok(vm.start(&script)?)
}

/// Returns the address for changes.
fn changes(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port() + 1)
}

/// Returns the options of a command that makes changes in the machine.
pub(crate) fn changing(address: SocketAddr) -> [String; 4] {
    let server = format!("http://{}", changes(address));
    ["--server".to_owned(), server, "--token-file".to_owned(), TOKEN.to_owned()]
}

/// Creates a new token, and stores it in its file.
fn token() -> Result<String> {
    let mut random = [0; 16];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random)).context("/dev/urandom")?;
    let token = random.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    let path = command::root().join(TOKEN);
    let written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
    let written = written.and_then(|mut file| file.write_all(token.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))?;
    Ok(token)
}

/// Returns whether the daemon is ready.
pub(crate) fn is_ready(address: SocketAddr) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        write!(stream, "GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        std::io::Result::Ok(answer)
    };
    ask().is_ok_and(|answer| answer.split(' ').nth(1) == Some("200"))
}

fn what_to_look_at(program: &Path, address: SocketAddr, seconds: Option<u64>) -> String {
    let end =
        seconds.map_or_else(|| "Ctrl-C ends it.".to_owned(), |seconds| format!("It ends after {seconds} s."));
    let program = program.strip_prefix(command::root()).unwrap_or(program).display();
    let (fix, changing) = (FIX.join(" "), changing(address).join(" "));
    format!(
        "
numaward watches a machine with four nodes (0 and 1 are near each other, so are 2 and 3): http://{address}

The page is red: a guarantee is broken. `guarded` has a CPU for itself, and `database` runs on it, with all its memory on
node 3, two hops away. Give `database` a CPU and memory of its own, in another terminal:

  {program} {fix} {changing}

Its memory is local from the next allocation on, and a minute later the page is green: both guarantees are kept.

  {program} top --server http://{address}
  curl -s http://{address}/api/v1/workloads     per workload and node: allocated local and remote, resident
  curl -s http://{address}/metrics | grep memory_allocated_bytes

The others allocate memory again and again, each in a cgroup of its own:

  cache      runs on node 1 and allocates there: all local
  analytics  is interleaved over all nodes: three quarters remote
  inference  runs on node 2 in transparent huge pages: all local
  reports    uses on node 3 what was loaded on node 1: remote accesses, which the kernel samples

{end}"
    )
}

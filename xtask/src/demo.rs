//! `cargo xtask demo`: numaward at work, for those whose machine has one node.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use numaward_vm::{Cache, Forward, Kernel, Machine, Running, Vm};

use crate::setup::{self, Part, kernels};
use crate::vm;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Ends after so many seconds [default: at Ctrl-C]
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=LONGEST))]
    seconds: Option<u64>,
    /// Port of 127.0.0.1 that the daemon answers on
    #[arg(long, default_value_t = DAEMON_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Kernel to boot
    #[arg(long, default_value = kernels::DEFAULT, value_parser = kernels::names())]
    kernel: String,
}

/// Where the daemon listens inside.
const DAEMON_PORT: u16 = 9560;
/// A week, in seconds.
const LONGEST: u64 = 7 * 24 * 3600;
/// For booting and starting the daemon, on a busy host.
const BOOT: u64 = 180;

pub(crate) fn main(arguments: &Arguments) -> Result<ExitCode> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    // QEMU would say so only after all has been built.
    if let Err(error) = TcpListener::bind(address) {
        bail!("cannot listen on {address}: {error}; choose another port with --port");
    }
    let running = boot(arguments, address)?;

    let mut announced = false;
    let (signalled, result) = vm::attend(running, || {
        if !announced && is_ready(address) {
            announced = true;
            println!("{}", what_to_look_at(address, arguments.seconds));
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

/// Boots the demo's machine, whose daemon answers on this address.
pub(crate) fn boot(arguments: &Arguments, address: SocketAddr) -> Result<Running> {
    setup::ensure(&[Part::Ebpf, Part::Qemu, Part::Kernel(kernels::find(&arguments.kernel)?)])?;
    // Two pairs of nodes. Node 0 has a CPU to spare for a guarantee.
    let machine = Machine::parse(
        Some(4),
        Some("2,1,1,1"),
        Some("512M,512M,512M,512M"),
        Some("10,12,32,32;12,10,32,32;32,32,10,12;32,32,12,10"),
    )?;
    let seconds = arguments.seconds.unwrap_or(LONGEST);
    let mut vm = Vm::new(Kernel::find(&Cache::locate()?, &arguments.kernel)?, machine)
        .forward(Forward { host: address.port(), guest: DAEMON_PORT })
        .limit(Duration::from_secs(seconds + BOOT));
    for (name, path) in vm::programs(true)? {
        vm = vm.file(path, format!("/bin/{name}"));
    }
    let script = format!("port={DAEMON_PORT}\nseconds={seconds}\n{}", include_str!("demo.sh"));
    eprintln!("booting a machine with four nodes, which takes some seconds");
    Ok(vm.start(&script)?)
}

/// Whether the daemon says so.
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

fn what_to_look_at(address: SocketAddr, seconds: Option<u64>) -> String {
    let end =
        seconds.map_or_else(|| "Ctrl-C ends it.".to_owned(), |seconds| format!("It ends after {seconds} s."));
    format!(
        "
numaward watches a machine with four nodes (0 and 1 are near each other, so are 2 and 3): http://{address}

  cargo run -q -p numaward -- top --server http://{address}
  curl -s http://{address}/api/v1/nodes         the nodes: CPUs, memory, distances
  curl -s http://{address}/api/v1/workloads     per workload and node: allocated near, far, resident
  curl -s http://{address}/metrics | grep memory_allocated_bytes

Six workloads allocate memory again and again, each in a cgroup of its own:

  database   runs on node 0, its memory is bound to node 3: watch its locality=\"remote\" rise
  cache      runs on node 1 and allocates there: all local
  analytics  is interleaved over all nodes: three quarters remote
  inference  runs on node 2 in transparent huge pages: all local
  reports    uses on node 3 what was loaded on node 1: remote accesses, which the kernel samples
  guarded    has a guarantee: a CPU for itself, and memory on the node of that CPU

{end}"
    )
}

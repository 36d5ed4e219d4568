//! `numaward-scale` runs many synthetic hosts against a real control plane of Kubernetes: the API server, the controller manager and the
//! scheduler place the pods of traces, and each host publishes its devices and prepares claims as numaward does.
//!
//! | part | here |
//! |---|---|
//! | control plane | real, on this host; the folder with its programs is an argument |
//! | slices | written by `SlicePublisher`, one per host, with the device computation of the daemon |
//! | books of a host | the strategy `native` in the engine, in this process |
//! | allocation of a claim | read by `AllocationReader` |
//! | kubelet | fake: no containers, no gRPC, one watch of pods for all hosts |
//!
//! The pods, their times and their hosts are those of `numaward simulate --hosts`. The clock of the load stands while the scheduler has not
//! tried all pods, so the speed of this host does not determine which pods are admitted. When all pods have arrived, the clock stands until
//! the scheduler binds no more: then each pending pod is compared with the room on the hosts. Afterwards the clock runs until each pod has run
//! or is given up, so that each run decides on the same pods.

#![forbid(unsafe_code)]

mod figures;
mod host;
mod kubelet;
mod load;
mod run;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use numaward_control_plane::control_plane;

use self::{figures::Figures, host::DeviceOrder, load::Claiming, run::Run};

/// Pods, hosts and claims of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RunName {
    /// (a) Pods without claims: the hosts decide alone
    Plain,
    /// (c) Guaranteed pods have claims; the devices are in the order of the nodes
    Fixed,
    /// (d) As `fixed`, in the order of the daemon: the least free amounts first
    Ordered,
    /// (f) As `ordered`, and every second Guaranteed pod has no claim and is placed by its host
    Placed,
}

impl RunName {
    const fn parts(self) -> (Claiming, DeviceOrder) {
        match self {
            Self::Plain => (Claiming::Nothing, DeviceOrder::LeastFree),
            Self::Fixed => (Claiming::All, DeviceOrder::Fixed),
            Self::Ordered => (Claiming::All, DeviceOrder::LeastFree),
            Self::Placed => (Claiming::Half, DeviceOrder::LeastFree),
        }
    }
}

/// Many synthetic hosts of a real Kubernetes control plane
#[derive(Debug, Parser)]
struct Arguments {
    /// Folder with kube-apiserver, kube-controller-manager and kube-scheduler, each as it is or as .xz
    #[arg(long, value_name = "DIR")]
    kubernetes: PathBuf,
    /// The program etcd
    #[arg(long, value_name = "FILE")]
    etcd: PathBuf,
    /// Folder of the traces
    #[arg(long, value_name = "DIR", default_value = "tests/traces")]
    traces: PathBuf,
    /// Number of hosts: at least one for each trace
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    hosts: u32,
    /// Runs, one after the other [default: all]
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',')]
    run: Vec<RunName>,
    /// Minimum seconds of a tick
    #[arg(long, value_name = "S", default_value_t = 8.0)]
    tick: f64,
    /// Number of ticks in which pods arrive
    #[arg(long, value_name = "NUMBER", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    ticks: u64,
    /// Seed of the fleet's random numbers, as of numaward simulate
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Minimum time in seconds between two writes of a slice (kubernetes.dra.interval)
    #[arg(long, value_name = "S", default_value_t = 5)]
    interval: u64,
    /// Requests per second of the scheduler and of the controller manager (clientConnection.qps)
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    qps: u32,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    ensure!(
        arguments.tick.is_finite() && arguments.tick >= 0.01,
        "--tick {}: a tick has at least 0.01 seconds",
        arguments.tick
    );
    ensure!(arguments.etcd.is_file(), "{} is missing: give the program etcd", arguments.etcd.display());
    for name in control_plane::PROGRAMS {
        let (plain, packed) =
            (arguments.kubernetes.join(name), arguments.kubernetes.join(format!("{name}.xz")));
        ensure!(
            plain.is_file() || packed.is_file(),
            "{} has neither {name} nor {name}.xz: give --kubernetes the programs of a release",
            arguments.kubernetes.display()
        );
    }
    let traces = load::read_traces(&arguments.traces)?;
    let mut fleet = load::fleet(&traces, arguments.hosts.try_into()?, arguments.seed)?;
    fleet.retain_before(arguments.ticks);
    println!(
        "{} hosts in {} groups, {} traces, seed {}, {} ticks of at least {} s, a slice every {} s at most; scheduler and controller manager with \
         {} requests per second (default: 50 and 20)",
        arguments.hosts,
        fleet.groups.len(),
        traces.len(),
        arguments.seed,
        arguments.ticks,
        arguments.tick,
        arguments.interval,
        arguments.qps
    );
    println!(
        "not run: (b) NodeResourceTopologyMatch, which is a plugin and not in the scheduler of a release"
    );
    println!("not run: (e) firstAvailable with the host device, which numaward does not publish");
    let names = if arguments.run.is_empty() { RunName::value_variants() } else { &arguments.run };
    let mut is_good = true;
    for name in names {
        let (claiming, order) = name.parts();
        let run = Run {
            kubernetes: &arguments.kubernetes,
            etcd: &arguments.etcd,
            fleet: &fleet,
            claiming,
            order,
            tick: Duration::from_secs_f64(arguments.tick),
            interval: Duration::from_secs(arguments.interval),
            qps: arguments.qps,
        };
        let figures = run.start()?;
        let Figures { pods, claiming, raised, .. } = figures;
        println!(
            "{name:?}: {pods} pods, {claiming} with claims, {raised} of which request more than in the trace, to cover the claim"
        );
        print!("{figures}");
        let has_no_others = matches!(name, RunName::Fixed | RunName::Ordered);
        is_good &= figures.twice.is_empty() && !(has_no_others && figures.refused[0] > 0);
    }
    if !is_good {
        println!(
            "failed: a host refused a claim though no other pod has CPUs of its own, or claims were allocated twice"
        );
    }
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

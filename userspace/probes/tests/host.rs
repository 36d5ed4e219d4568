//! Tests of the probes on this host's kernel. They need root, BPF, and a cgroup v2 hierarchy.
//!
//! The counts are compared with child processes that touch a known number of pages in their own cgroups. A host with
//! one node is sufficient: further nodes are simulated.
//!
//! The file has its own `main` instead of libtest, because the program also has other roles: `host touch` touches
//! pages, `host terminals` fills terminals, `host spin` uses a CPU, and `host report` loads probes on a system with
//! missing parts.

#![expect(clippy::unwrap_used, reason = "a test without libtest, which clippy does not take for one")]

#[path = "host/expected.rs"]
mod expected;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use numaward_probes::{
    AllocationSnapshot, CgroupId, CgroupPlace, Counters, CpuTimeReader, CpuUsage, DutyCycle, Incident,
    IntruderClass, Mode, NodeCounters, Obstacle, Pages, Probe, ProbeEvent, ProbeOptions, Probes,
    RegisterError, SelfCheck, SlotError, SlotId, TestOverrides,
    pmu::{DramEvents, PerfEvent},
    stats_window,
};
use numaward_tests_support::is_ci;
use numaward_topology::{CpuId, Machine, NodeId, NodeSet, sysfs};
use rustix::param::page_size;
use rustix::thread::{
    CapabilitySet, CapabilitySets, CpuSet, sched_getaffinity, sched_setaffinity, set_capabilities,
};

use self::expected::Features;

/// The number of pages that a process touches: 32 MiB with pages of 4 KiB.
const PAGES: u64 = 8192;

/// Returns the number of pages that one page table maps, which is that of a huge page.
fn pages_per_table() -> u64 {
    page_size() as u64 / 8
}

type Test = fn(&ProbedHost);

const INTRUDERS: &str = "tasks_on_exclusive_cpus_are_reported";
const BTF: &str = "/sys/kernel/btf/vmlinux";

const TESTS: &[(&str, Test)] = &[
    ("pages_are_counted_by_tp_btf", |host| pages_are_counted(host, Mode::TpBtf, 512, Shards::OfCpus)),
    ("pages_are_counted_by_the_tracepoint", |host| {
        pages_are_counted(host, Mode::Tracepoint, 512, Shards::OfCpus);
    }),
    ("pages_are_counted_in_shared_counters", shared_counters),
    ("pages_outside_the_allowed_nodes_are_reported", outside_nodes),
    ("misses_are_counted_without_memory_controller", uncharged_workload),
    ("pages_allocated_without_sleep_are_of_no_workload", atomic_pages),
    ("lost_misses_are_counted_and_reported_later", ring_buffer_overflow),
    ("pages_of_another_node_are_remote", remote_pages),
    ("a_wrong_node_shift_falls_back_to_the_tracepoint", wrong_shift),
    ("reused_slot_starts_at_zero", slot_reuse),
    ("probes_and_kernel_count_the_same_pages", total_pages),
    ("added_nodes_are_counted", new_node),
    ("added_memory_is_counted", new_memory),
    ("a_nested_cgroup_is_booked_to_its_workload", nested_cgroups),
    ("without_a_slot_pages_are_booked_to_the_rest", no_slot),
    ("runs_and_their_time_are_read", run_statistics),
    ("debug_messages_arrive", debug_log),
    ("after_loading_no_privilege_is_needed", without_privileges_after_loading),
    ("tp_btf_needs_no_cap_sys_admin", without_sys_admin),
    ("without_privileges_the_reason_is_reported", without_privileges),
    ("tracepoints_replace_missing_btf", |_| without_btf()),
    ("without_btf_intruders_are_reported_as_well", |_| intruders_without_btf()),
    ("changed_structures_are_reported", |_| changed_kernel()),
    ("too_many_slots_are_refused", too_many_slots),
    (INTRUDERS, intruders),
    ("counters_of_cpus_are_split_by_workload", hardware_counters),
    ("missing_counters_are_reported", no_hardware_counters),
    ("cpu_time_is_that_of_the_kernel", cpu_time),
    ("duty_cycle_counts_are_estimates", duty_cycle),
    ("the_memory_of_maps_is_bounded", map_memory),
    ("only_missing_features_excuse_a_probe", |_| expected::only_missing_features_excuse()),
    ("supported_probes_are_attached", secondary_probes),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.find(|argument| !argument.starts_with('-'));
    match filter.as_deref() {
        Some("touch") => return touch(),
        Some("terminals") => return fill_terminals(),
        Some("spin") => return spin(),
        Some("report") => return report(),
        _ => {}
    }
    let host = match ProbedHost::new() {
        Ok(host) => host,
        Err(reason) if is_ci() => {
            println!("host: FAILED: cannot run on this host: {reason}");
            return ExitCode::FAILURE;
        }
        Err(reason) => {
            println!("host: skipped: {reason}");
            return ExitCode::SUCCESS;
        }
    };
    let mut failed = false;
    for (name, test) in
        TESTS.iter().filter(|(name, _)| filter.as_deref().is_none_or(|text| name.contains(text)))
    {
        let passed = catch_unwind(AssertUnwindSafe(|| test(&host))).is_ok();
        println!("host: {name}: {}", if passed { "ok" } else { "FAILED" });
        failed |= !passed;
    }
    ExitCode::from(u8::from(failed))
}

/// The role `touch`: touches the number of pages that each line of the input contains, and replies with a line.
fn touch() -> ExitCode {
    let mut held = Vec::new();
    for line in io::stdin().lock().lines() {
        let Some(pages) = line.ok().and_then(|line| line.parse::<usize>().ok()) else {
            return ExitCode::FAILURE;
        };
        let mut memory = vec![0u8; pages * page_size()];
        memory.iter_mut().step_by(page_size()).for_each(|byte| *byte = 1);
        held.push(memory);
        println!("done");
    }
    ExitCode::SUCCESS
}

/// The number of terminals of the role `terminals`.
const TERMINALS: u64 = 256;
/// The number of bytes that the kernel keeps of each of them, at least.
const TERMINAL_BYTES: u64 = 16 << 10;

/// The role `terminals`: opens pseudoterminals, and then fills as many of them as each line of the input says. Nobody
/// reads them, so the kernel buffers the written bytes. It allocates these buffers with `GFP_ATOMIC` (`tty_buffer_alloc` in
/// `drivers/tty/tty_buffer.c`).
fn fill_terminals() -> ExitCode {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let open = || options.open("/dev/ptmx").unwrap();
    let mut terminals: Vec<fs::File> = (0..=TERMINALS).map(|_| open()).collect();
    let mut full = Vec::new();
    let line = [b"a".repeat(63), b"\n".to_vec()].concat();
    for count in io::stdin().lock().lines() {
        let count: usize = count.unwrap().parse().unwrap();
        for mut terminal in terminals.drain(..count) {
            let written = std::iter::from_fn(|| terminal.write(&line).ok()).sum::<usize>();
            assert!(written as u64 >= TERMINAL_BYTES, "{written}");
            full.push(terminal);
        }
        println!("done");
    }
    ExitCode::SUCCESS
}

/// Returns the CPU on which [`spin`] runs: the last one that this process may use.
fn last_cpu() -> usize {
    let allowed = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu)).unwrap()
}

/// Restricts the calling thread to one CPU.
fn run_on(cpu: usize) {
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(None, &one).unwrap();
}

/// A number of names for which the probe has no room.
const NAMES: u32 = 6_000;

/// Returns the number of voluntary context switches of the calling thread (proc(5)).
fn sleeps() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    sleeps.trim().parse().unwrap()
}

/// The role `spin`: uses a CPU from the first line of input on.
fn spin() -> ExitCode {
    run_on(last_cpu());
    println!("ready");
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
    // Before Linux 6.2, a task loses its affinity when it is moved to a cgroup with the controller `cpuset`.
    run_on(last_cpu());
    // The process may have been moved to its cgroup while it was running. A task's workload is determined when it is
    // switched in, which may never happen on an idle CPU. One sleep may be too short to switch the task out.
    let before = sleeps();
    while sleeps() == before {
        thread::sleep(Duration::from_millis(1));
    }
    println!("pinned");
    loop {
        std::hint::spin_loop();
    }
}

/// A process in a cgroup that uses the last CPU (the role [`spin`]).
struct Load<'a> {
    cgroup: &'a Path,
    process: Child,
    /// CPU time of the cgroup when the process could run on the last CPU alone.
    before: Duration,
}

impl<'a> Load<'a> {
    fn start(cgroup: &'a Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let mut process = command.arg("spin").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut replies = BufReader::new(process.stdout.take().unwrap()).lines();
        assert_eq!(replies.next().unwrap().unwrap(), "ready");
        fs::write(cgroup.join("cgroup.procs"), process.id().to_string()).unwrap();
        writeln!(process.stdin.as_mut().unwrap()).unwrap();
        assert_eq!(replies.next().unwrap().unwrap(), "pinned");
        Self { cgroup, process, before: used_cpu_time(cgroup) }
    }

    /// Waits until the cgroup has used this much CPU time, and ends the process. Returns the used time, and the part of
    /// it that is certainly of the last CPU.
    fn stop_after(mut self, time: Duration) -> (Duration, Duration) {
        let deadline = Instant::now() + Duration::from_mins(2);
        while used_cpu_time(self.cgroup) < time {
            assert!(Instant::now() < deadline, "the process gets no CPU");
            thread::sleep(Duration::from_millis(50));
        }
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        let used = used_cpu_time(self.cgroup);
        (used, used.checked_sub(self.before).unwrap())
    }
}

fn used_cpu_time(cgroup: &Path) -> Duration {
    let stat = fs::read_to_string(cgroup.join("cpu.stat")).unwrap();
    let usage = stat.lines().find_map(|line| line.strip_prefix("usage_usec ")).unwrap();
    Duration::from_micros(usage.parse().unwrap())
}

/// Returns the time that the hypervisor has taken from a CPU, in ticks of a hundredth of a second (proc(5)).
fn stolen(cpu: CpuId) -> Duration {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let line = stat.lines().find_map(|line| line.strip_prefix(&format!("cpu{cpu} "))).unwrap();
    let ticks: u64 = line.split(' ').nth(7).unwrap().parse().unwrap();
    Duration::from_millis(ticks * 10)
}

/// The CPU time of a load that the probe reported, and that of the kernel's account.
#[derive(Debug)]
struct LoadSample {
    found: Duration,
    expected: Duration,
    stolen: Duration,
}

impl LoadSample {
    const COUNT: usize = 9;

    /// Returns the median of several loads in a cgroup. A kernel may hide switches of some processes from all tracing
    /// programs (that of a sandbox those of its agent): the time after a hidden switch is booked to the wrong class.
    /// This occurs about once a second.
    fn take(probes: &mut Probes, cpu: CpuId, cgroup: &Path, time_of: impl Fn(&CpuUsage) -> Duration) -> Self {
        let mut total = Duration::ZERO;
        let mut samples: Vec<Self> = (0..Self::COUNT)
            .map(|_| {
                let load = Load::start(cgroup);
                let stolen_before = stolen(cpu);
                let before = time_of(&probes.cpu_usage().unwrap()[&cpu]);
                let (used, expected) = load.stop_after(total + Duration::from_millis(100));
                let found = time_of(&probes.cpu_usage().unwrap()[&cpu]).saturating_sub(before);
                total = used;
                // The kernel's account excludes the time that a hypervisor takes; the probe cannot detect it.
                Self { found, expected, stolen: stolen(cpu).saturating_sub(stolen_before) }
            })
            .collect();
        samples.sort_by(|one, other| one.ratio().total_cmp(&other.ratio()));
        samples.swap_remove(Self::COUNT / 2)
    }

    fn ratio(&self) -> f64 {
        self.found.as_secs_f64() / self.expected.as_secs_f64()
    }

    #[track_caller]
    fn assert_near(&self, what: &str) {
        assert!(self.found.abs_diff(self.expected) <= self.expected / 20 + self.stolen, "{what}: {self:?}");
    }
}

fn intruders(host: &ProbedHost) {
    let mut probes = host.probes();
    let report = probes.reports().iter().find(|report| report.probe == Probe::Switch).unwrap();
    if Path::new(BTF).exists() {
        assert_eq!((report.mode, &report.reason), (Mode::TpBtf, &None));
    } else {
        let reason = report.reason.as_deref().unwrap_or_default();
        assert!(
            report.mode == Mode::Tracepoint && reason.contains("kernel threads are taken for"),
            "{report:?}"
        );
    }
    let [owner, neighbour, stranger] = ["owner", "neighbour", "stranger"].map(|name| host.cgroup(name));
    let owner_slot = probes.register(owner.id(), None).unwrap();
    let neighbour_slot = probes.register(neighbour.id(), None).unwrap();
    let cpu = CpuId(u32::try_from(last_cpu()).unwrap());
    // Attaching a loaded program needs no privileges.
    with_capabilities(required_capabilities(&probes), || {
        assert!(!probes.is_watching_cpus());
        probes.set_exclusive(&BTreeMap::from([(cpu, owner_slot)])).unwrap();
        assert!(probes.is_watching_cpus());
    });
    let own = LoadSample::take(&mut probes, cpu, &owner.0, |usage| usage.own);
    let workload =
        LoadSample::take(&mut probes, cpu, &neighbour.0, |usage| usage.time_of(IntruderClass::Workload));
    let time = Duration::from_millis(400);
    let (used, foreign) = Load::start(&stranger.0).stop_after(time);
    let reported = probes.cpu_usage().unwrap()[&cpu];
    own.assert_near("own");
    workload.assert_near("of a workload");
    // Further processes of this host run there, too.
    assert!(reported.time_of(IntruderClass::Host) * 20 >= foreign * 19, "{reported:?}, expected {foreign:?}");

    let intruders = probes.intruders().unwrap();
    let found = intruders.iter().find(|intruder| intruder.workload == Some(neighbour_slot)).unwrap();
    assert_eq!((found.owner, found.class), (owner_slot, IntruderClass::Workload));
    assert!(found.command.starts_with("host") && found.runs > 0, "{found:?}");
    assert_eq!(found.time, reported.time_of(IntruderClass::Workload), "{found:?}");
    let host_too = |intruder: &&numaward_probes::Intruder| {
        intruder.class == IntruderClass::Host && intruder.command == found.command
    };
    // This test has the same name and may run there.
    let stranger_by_name = intruders.iter().find(host_too).unwrap().time;
    assert!(stranger_by_name * 20 >= foreign * 19, "{stranger_by_name:?}, expected {foreign:?}");

    probes.release(neighbour_slot).unwrap();
    let left = probes.intruders().unwrap();
    assert!(
        left.iter().all(|intruder| intruder.workload != Some(neighbour_slot)),
        "its slot may be assigned again"
    );

    // The last name is known, even if there were too many.
    let of_many_names = thread::spawn(move || {
        run_on(last_cpu());
        for number in 0..NAMES {
            fs::write("/proc/thread-self/comm", format!("name-{number}")).unwrap();
            thread::sleep(Duration::from_micros(1));
        }
    });
    of_many_names.join().unwrap();
    let names = probes.intruders().unwrap();
    let last = format!("name-{}", NAMES - 1);
    assert!(names.iter().any(|intruder| intruder.command == last), "{} names", names.len());
    probes.set_exclusive(&BTreeMap::new()).unwrap();
    assert!(!probes.is_watching_cpus());
    let after = probes.cpu_usage().unwrap()[&cpu];
    Load::start(&stranger.0).stop_after(used + time);
    assert_eq!(probes.cpu_usage().unwrap()[&cpu], after, "nothing is exclusive any more");
}

/// The number of readings for the printed cost.
const COST_READINGS: u32 = 1000;

fn cpu_time(host: &ProbedHost) {
    let mut probes = Probes::load(&ProbeOptions { secondary: vec![Probe::CpuTime], ..host.options() });
    let report = &probes.reports()[1];
    if !Path::new(BTF).exists() {
        assert_eq!((report.mode, report.obstacle), (Mode::Absent, Some(Obstacle::Btf)), "{report:?}");
        return;
    }
    assert_eq!((report.mode, &report.reason), (Mode::OnDemand, &None));
    let kept = required_capabilities(&probes);
    let mut reader = probes.take_cpu_times().unwrap();
    assert!(probes.take_cpu_times().is_none());
    // Neither opening a cgroup nor reading it needs privileges.
    let add = |reader: &mut CpuTimeReader, cgroup: &Cgroup| {
        with_capabilities(kept, || reader.add(&fs::File::open(&cgroup.0).unwrap()))
    };
    let read = |reader: &mut CpuTimeReader, place: &CgroupPlace| {
        with_capabilities(kept, || reader.read(place).unwrap())
    };
    let [busy, idle] = ["busy", "idle"].map(|name| host.cgroup(name));
    let nested = Cgroup::new(&busy.0, "nested");
    let [busy_place, idle_place, nested_place] =
        [&busy, &idle, &nested].map(|cgroup| add(&mut reader, cgroup).unwrap());
    let start = read(&mut reader, &busy_place);
    assert_eq!(start.iter().sum::<u64>(), 0, "{start:?}");

    let (used, _) = Load::start(&busy.0).stop_after(Duration::from_millis(400));
    let times = read(&mut reader, &busy_place);
    let sum = Duration::from_nanos(times.iter().sum());
    assert!(sum.abs_diff(used) <= Duration::from_micros(1), "{times:?}, cpu.stat has {used:?}");
    // The kernel books a span to the CPU that ends it, such as one that wakes another task there.
    let of_cpu = Duration::from_nanos(times[last_cpu()]);
    assert!(of_cpu * 2 > used, "{times:?}, {used:?} on CPU {}", last_cpu());
    assert_eq!(read(&mut reader, &idle_place).iter().sum::<u64>(), 0);

    let start = Instant::now();
    for _ in 0..COST_READINGS {
        let _ = reader.read(&busy_place).unwrap();
    }
    println!(
        "host:   cpu_time: a reading takes {:?} on {} CPUs",
        start.elapsed() / COST_READINGS,
        times.len()
    );

    // The time of a nested cgroup is not part of it.
    let (used, _) = Load::start(&nested.0).stop_after(Duration::from_millis(100));
    assert_eq!(read(&mut reader, &busy_place), times);
    let nested_times = read(&mut reader, &nested_place);
    let sum = Duration::from_nanos(nested_times.iter().sum());
    assert!(sum.abs_diff(used) <= Duration::from_micros(1), "{nested_times:?}, cpu.stat has {used:?}");

    // A removed cgroup can be read until its place is given to another one.
    drop(nested);
    assert_eq!(read(&mut reader, &nested_place), nested_times);
    with_capabilities(kept, || reader.remove(nested_place).unwrap());
    let again = add(&mut reader, &idle).unwrap();
    assert_eq!(read(&mut reader, &again).iter().sum::<u64>(), 0);
    let others = std::iter::from_fn(|| reader.add(&fs::File::open(&idle.0).unwrap()).ok());
    assert_eq!(others.count() + 3, 16_384);
}

fn secondary_probes(host: &ProbedHost) {
    let probes = Probes::load(&ProbeOptions { secondary: Probe::SECONDARY.to_vec(), ..host.options() });
    let reports = probes.reports();
    assert_eq!(
        reports.iter().skip(1).map(|report| report.probe).collect::<Vec<_>>(),
        Probe::SECONDARY,
        "{reports:?}"
    );
    let by_default = host.probes();
    assert!(by_default.reports().iter().all(|report| report.probe != Probe::Hardware));
    for report in reports {
        println!(
            "host:   {}: {} {}",
            report.probe,
            report.mode,
            report.reason.as_deref().unwrap_or_default()
        );
        assert!(report.mode != Mode::Absent || report.reason.is_some(), "{report:?}");
    }
    let problems = Features::of_this_kernel().problems(reports);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Returns true if cgroups v2 have the controller `memory`.
fn charges_memory() -> bool {
    let controllers = |path| fs::read_to_string(path).unwrap_or_default();
    let unified = controllers("/sys/fs/cgroup/cgroup.controllers");
    let beside_v1 = controllers("/sys/fs/cgroup/unified/cgroup.controllers");
    unified.split_whitespace().chain(beside_v1.split_whitespace()).any(|name| name == "memory")
}

/// The role `report`: prints the state of the probes.
fn report() -> ExitCode {
    let machine = sysfs::read(Path::new("/")).unwrap();
    let options = ProbeOptions { charges_memory: charges_memory(), ..ProbeOptions::new(&machine) };
    let probes = Probes::load(&options);
    for report in probes.reports() {
        println!("{} {}: {}", report.probe, report.mode, report.reason.as_deref().unwrap_or_default());
    }
    ExitCode::SUCCESS
}

/// Runs this program with an argument, with these folders replaced by empty ones.
fn without(folders: &[&str], argument: &str) -> std::process::Output {
    let hide: Vec<String> =
        folders.iter().map(|folder| format!("mount -t tmpfs none {folder} && ")).collect();
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &format!("{}exec \"$0\" {argument}", hide.concat())])
        .arg(std::env::current_exe().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// Returns the output of `host report` with these folders replaced by empty ones.
fn report_without(folders: &[&str]) -> String {
    String::from_utf8(without(folders, "report").stdout).unwrap()
}

/// A child process in a cgroup that touches pages.
struct Toucher {
    child: Child,
    replies: BufReader<std::process::ChildStdout>,
}

impl Toucher {
    fn new(cgroup: &Path) -> Self {
        Self::in_role("touch", cgroup)
    }

    fn in_role(role: &str, cgroup: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).unwrap();
        let replies = BufReader::new(child.stdout.take().unwrap());
        let mut toucher = Self { child, replies };
        // The memory that the process needs to start is allocated before this returns.
        toucher.touch(1);
        toucher
    }

    fn touch(&mut self, pages: u64) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{pages}").unwrap();
        let mut reply = String::new();
        self.replies.read_line(&mut reply).unwrap();
        assert_eq!(reply, "done\n");
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _status = self.child.wait();
    }
}

/// An empty cgroup, removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(parent: &Path, name: &str) -> Self {
        let path = parent.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn id(&self) -> CgroupId {
        CgroupId(fs::metadata(&self.0).unwrap().ino())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A killed process may remain for a moment.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        println!("host: cannot remove {}", self.0.display());
    }
}

struct ProbedHost {
    machine: Machine,
    /// The mount point of the cgroup v2 hierarchy.
    cgroups: PathBuf,
    node: NodeId,
}

impl ProbedHost {
    fn new() -> Result<Self, String> {
        let machine = sysfs::read(Path::new("/")).map_err(|error| error.to_string())?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
        // mountinfo: ID PARENT DEVICE ROOT PLACE OPTIONS… - TYPE SOURCE OPTIONS
        let cgroups = mounts.lines().find(|line| line.contains(" - cgroup2 "));
        let cgroups =
            cgroups.and_then(|line| line.split(' ').nth(4)).ok_or("no cgroup v2 hierarchy is mounted")?;
        if fs::read_dir("/sys/kernel/tracing").is_ok_and(|mut entries| entries.next().is_none()) {
            // On hosts with systemd it is already mounted. If this fails, the tests of the tracepoint report it.
            let _result =
                Command::new("mount").args(["-t", "tracefs", "tracefs", "/sys/kernel/tracing"]).status();
        }
        let probes = Probes::load(&ProbeOptions::new(&machine));
        let reason = probes.reports()[0].reason.clone().unwrap_or_default();
        // Any other reason is a defect of the probes.
        if ["tp_btf: EPERM", "tp_btf: this binary has no probes"]
            .iter()
            .any(|start| reason.starts_with(start))
        {
            return Err(reason);
        }
        let node = machine.node_ids().first().ok_or("the machine has no node")?;
        Ok(Self { cgroups: cgroups.into(), node, machine })
    }

    fn options(&self) -> ProbeOptions<'_> {
        ProbeOptions { charges_memory: charges_memory(), ..ProbeOptions::new(&self.machine) }
    }

    fn probes(&self) -> Probes {
        let probes = Probes::load(&self.options());
        assert_ne!(probes.reports()[0].mode, Mode::Absent, "{:?}", probes.reports());
        probes
    }

    fn cgroup(&self, name: &str) -> Cgroup {
        Cgroup::new(&self.cgroups, name)
    }
}

fn sum(nodes: &NodeCounters) -> Counters {
    nodes.values().fold(Counters::default(), |mut sum, node| {
        sum.user_local.0 += node.user_local.0;
        sum.user_remote.0 += node.user_remote.0;
        sum.user_outside.0 += node.user_outside.0;
        sum.kernel.0 += node.kernel.0;
        sum
    })
}

fn counters(probes: &Probes) -> AllocationSnapshot {
    probes.counter_maps().allocations().unwrap().unwrap().decode(&probes.holders())
}

fn counted(probes: &Probes, slot: SlotId) -> Counters {
    sum(counters(probes).slots.get(slot).unwrap())
}

trait UserPages {
    fn user(&self) -> u64;
}

impl UserPages for Counters {
    /// Returns the user pages on all nodes.
    fn user(&self) -> u64 {
        self.user_local.0 + self.user_remote.0
    }
}

/// Asserts that the counted pages are the touched ones, and at most 1 % more for the process's own memory.
#[track_caller]
fn assert_pages(counted: u64, touched: u64) {
    assert_pages_but(0, counted, touched);
}

/// Like `assert_pages`, but up to `lost` pages may be missing.
#[track_caller]
fn assert_pages_but(lost: u64, counted: u64, touched: u64) {
    let expected = touched.saturating_sub(lost)..=touched + touched / 100;
    assert!(expected.contains(&counted), "{counted} counted, {touched} touched, {lost} lost");
}

fn shared_counters(host: &ProbedHost) {
    // Just more than 64 MiB of counters, of 32 bytes each, with a shard for each CPU.
    let counters_per_slot = host.machine.possible_cpus.len() * host.machine.nodes.len();
    let slots = (64 << 20) / 32 / counters_per_slot + 1;
    pages_are_counted(host, Mode::TpBtf, u32::try_from(slots).unwrap(), Shards::OfNodes);
}

/// The owners of the counters' shards.
#[derive(Clone, Copy)]
enum Shards {
    OfCpus,
    OfNodes,
}

fn pages_are_counted(host: &ProbedHost, mode: Mode, slots: u32, shards: Shards) {
    let modes = [mode];
    let mut probes = Probes::load(&ProbeOptions { alloc_modes: &modes, slots, ..host.options() });
    let report = &probes.reports()[0];
    assert_eq!(report.mode, mode);
    // tp_btf works on such kernels, but other modes are better.
    let lossy = report.reason.as_deref().is_some_and(|reason| reason.contains("preempts tasks"));
    assert!(report.reason.is_none() || lossy && mode == Mode::TpBtf, "{report:?}");
    assert!(
        matches!(&report.self_check, Some(SelfCheck::Passed(nodes)) if nodes.contains(host.node)),
        "{report:?}"
    );

    let cgroup = host.cgroup("count");
    let mut process = Toucher::new(&cgroup.0);
    let slot = probes.register(cgroup.id(), None).unwrap();
    assert!(matches!(probes.register(cgroup.id(), None), Err(RegisterError::AlreadyRegistered(_))));
    process.touch(PAGES);
    let now = counted(&probes, slot);
    // On a host with several nodes, the process's own node may be full.
    let lost = |probes: &Probes| if lossy { probes.costs().read().unwrap()[0].events_lost } else { 0 };
    assert_pages_but(lost(&probes), now.user(), PAGES);
    assert_eq!(now.user_outside.0, 0);
    if host.machine.nodes.len() == 1 {
        assert_eq!(now.user_remote.0, 0);
    }
    // Pages for page tables.
    assert!(now.kernel.0 >= PAGES / pages_per_table() && now.kernel.0 < PAGES / 64, "{now:?}");
    process.touch(PAGES);
    assert_pages_but(lost(&probes), counted(&probes, slot).user(), 2 * PAGES);
    assert_eq!(counters(&probes).unknown_node.0, 0);

    let usage = probes.map_usage();
    assert_eq!((usage[0].map, usage[0].entries, usage[0].capacity), ("ROOTS", 1, u64::from(slots)));
    let per_slot = usage[1].entries / 2;
    assert_eq!((usage[1].map, usage[1].capacity), ("CTR", (u64::from(slots) + 1) * per_slot));
    let of_cpus = host.machine.possible_cpus.len() * host.machine.nodes.len();
    match shards {
        Shards::OfCpus => assert!(per_slot >= of_cpus as u64, "{:?}", usage[1]),
        Shards::OfNodes => assert!(per_slot < of_cpus as u64, "{:?}", usage[1]),
    }
    drop(process);
    assert_pages_but(lost(&probes), sum(&probes.release(slot).unwrap()).user(), 2 * PAGES);
    assert!(matches!(probes.release(slot), Err(SlotError::NotRegistered(_))));
}

fn outside_nodes(host: &ProbedHost) {
    let mut probes = host.probes();
    let cgroup = host.cgroup("outside_nodes");
    let mut process = Toucher::new(&cgroup.0);
    let nowhere = NodeSet::single(NodeId(77));
    let slot = probes.register(cgroup.id(), Some(&nowhere)).unwrap();
    process.touch(PAGES);
    let now = counted(&probes, slot);
    assert_pages(now.user_outside.0, PAGES);
    // Some pages of the process are charged that are not movable, and the other way round.
    assert_pages(now.user(), PAGES);
    let events = probes.events().unwrap();
    assert_eq!(events.len(), 1, "one event of thousands of misses: {events:?}");
    let is_reported = |event: &ProbeEvent| {
        let Incident::Miss { node, pages } = event.incident else { return false };
        (event.slot, event.cgroup, event.pid) == (Some(slot), cgroup.id(), process.child.id())
            && node.is_some_and(|node| host.machine.nodes.contains_key(&node))
            && event.command.starts_with("host")
            && (1..=PAGES).contains(&pages.0)
    };
    assert!(is_reported(&events[0]), "{events:?}");

    // The new nodes apply from the next event on, on every CPU.
    probes.set_allowed(slot, Some(&host.machine.node_ids())).unwrap();
    process.touch(PAGES);
    let then = counted(&probes, slot);
    assert_eq!(then.user_outside, now.user_outside);
    assert_pages(then.user(), 2 * PAGES);
    probes.set_allowed(slot, Some(&nowhere)).unwrap();
    process.touch(PAGES);
    assert_pages(counted(&probes, slot).user_outside.0 - then.user_outside.0, PAGES);
    assert_eq!(probes.events().unwrap(), [], "that was reported less than a minute ago");
    // Another workload is reported immediately, also in the same slot.
    probes.release(slot).unwrap();
    thread::sleep(Duration::from_millis(1100));
    let again = probes.register(cgroup.id(), Some(&nowhere)).unwrap();
    assert_eq!(again, slot, "it has cooled");
    process.touch(64);
    assert!(matches!(
        probes.events().unwrap().as_slice(),
        [ProbeEvent { incident: Incident::Miss { .. }, .. }]
    ));
}

/// Misses of a workload without the memory controller: the kernel charges its pages to an ancestor.
fn uncharged_workload(host: &ProbedHost) {
    let mut probes = host.probes();
    let has_charge = probes.reports().iter().any(|of| of.probe == Probe::Charge && of.mode != Mode::Absent);
    let parent = host.cgroup("uncharged_workload");
    let cgroup = Cgroup::new(&parent.0, "child");
    assert!(!cgroup.0.join("memory.current").exists(), "the parent does not enable the controller");
    let mut process = Toucher::new(&cgroup.0);
    let slot = probes.register(cgroup.id(), Some(&NodeSet::single(NodeId(77)))).unwrap();
    let mut missed = |probes: &Probes| {
        let before = counted(probes, slot).user_outside.0;
        process.touch(PAGES);
        counted(probes, slot).user_outside.0 - before
    };
    if has_charge {
        assert_eq!(missed(&probes), 0, "charged to the parent");
        assert_eq!(probes.events().unwrap(), []);
    }
    probes.set_charged(slot, false).unwrap();
    assert_pages(missed(&probes), PAGES);
    let events = probes.events().unwrap();
    assert!(matches!(events.as_slice(), [ProbeEvent { incident: Incident::Miss { .. }, .. }]), "{events:?}");
    if has_charge {
        probes.set_charged(slot, true).unwrap();
        assert_eq!(missed(&probes), 0);
        // With the controller, only one of the probes counts.
        fs::write(parent.0.join("cgroup.subtree_control"), "+memory").unwrap();
        assert_pages(missed(&probes), PAGES);
        probes.set_charged(slot, false).unwrap();
        assert_pages(missed(&probes), PAGES);
    }
}

fn atomic_pages(host: &ProbedHost) {
    for mode in [Mode::TpBtf, Mode::Tracepoint] {
        let mut probes = Probes::load(&ProbeOptions { alloc_modes: &[mode], ..host.options() });
        let cgroup = host.cgroup("atomic-pages");
        let mut process = Toucher::in_role("terminals", &cgroup.0);
        let slot = probes.register(cgroup.id(), Some(&NodeSet::single(NodeId(77)))).unwrap();
        let unattributed = |probes: &Probes| {
            let by_node = counters(probes).unattributed;
            by_node.iter().fold(0, |sum, (_, pages)| sum + pages.atomic.0)
        };
        let before = unattributed(&probes);
        process.touch(TERMINALS);
        let filled = TERMINALS * TERMINAL_BYTES / page_size() as u64;
        let grown = unattributed(&probes) - before;
        let of_workload = counted(&probes, slot);
        // Some of the memory comes from slabs that were allocated before.
        assert!(grown >= filled / 2, "{mode}: {grown} of {filled} pages, {of_workload:?}");
        assert!(of_workload.kernel.0 < filled / 4, "{mode}: {grown} of {filled} pages, {of_workload:?}");
    }
}

/// Causes misses of more workloads than fit into the ring buffer.
fn ring_buffer_overflow(host: &ProbedHost) {
    // The ring buffer has one page; an event takes 56 bytes of it.
    let room = page_size() / 56;
    let workloads = room + 9;
    let bytes = u32::try_from(page_size()).unwrap();
    let fakes = TestOverrides { ring_bytes: Some(bytes), ..TestOverrides::default() };
    let mut probes = Probes::load(&ProbeOptions { fakes, ..host.options() });
    assert_ne!(probes.reports()[0].mode, Mode::Absent, "{:?}", probes.reports());
    let nowhere = NodeSet::single(NodeId(77));
    let cgroups: Vec<_> =
        (0..workloads).map(|number| host.cgroup(&format!("ring_buffer_overflow-{number}"))).collect();
    let mut process = Toucher::new(&cgroups[0].0);
    let mut slots = Vec::new();
    // Either of `alloc` and `charge` reports misses.
    let lost_so_far =
        |probes: &Probes| probes.costs().read().unwrap().iter().map(|costs| costs.events_lost).sum::<u64>();
    let mut miss = |probes: &Probes, cgroup: &Cgroup| {
        fs::write(cgroup.0.join("cgroup.procs"), process.child.id().to_string()).unwrap();
        process.touch(8);
        lost_so_far(probes)
    };
    let before = lost_so_far(&probes);
    let mut lost = before;
    for cgroup in &cgroups {
        slots.push(probes.register(cgroup.id(), Some(&nowhere)).unwrap());
        lost = miss(&probes, cgroup);
    }
    let reported = |probes: &mut Probes| -> Vec<SlotId> {
        let slot = |event: ProbeEvent| match event.incident {
            Incident::Miss { .. } => event.slot,
            Incident::OomKill { .. } | Incident::LongStall(_) => None,
        };
        probes.events().unwrap().into_iter().filter_map(slot).collect()
    };
    let first = reported(&mut probes);
    // The first events are reported in order; the rest was lost and counted. Each further page of these workloads tries
    // to report again.
    assert!((1..=room).contains(&first.len()), "{}", first.len());
    assert_eq!(first, slots[..first.len()]);
    let unlucky = workloads - first.len();
    assert!(lost - before >= unlucky as u64, "{lost} lost, {before} before, {unlucky} not reported");
    // All misses are counted, even if they are not reported.
    let counted = counters(&probes);
    assert!(
        slots.iter().all(|slot| sum(counted.slots.get(*slot).unwrap()).user_outside.0 >= 8),
        "{counted:?}"
    );
    // The lost workloads are reported with their next miss, because there is room now; the rest is silent for a minute.
    for cgroup in &cgroups {
        miss(&probes, cgroup);
    }
    assert_eq!(reported(&mut probes), slots[first.len()..]);
}

fn remote_pages(host: &ProbedHost) {
    for node in [NodeId(77), host.node] {
        let fakes = TestOverrides { cpu_node: Some(node), ..TestOverrides::default() };
        let mut probes = Probes::load(&ProbeOptions { fakes, ..host.options() });
        let cgroup = host.cgroup("remote_pages");
        let mut process = Toucher::new(&cgroup.0);
        let slot = probes.register(cgroup.id(), None).unwrap();
        process.touch(PAGES);
        let now = counted(&probes, slot);
        if node == NodeId(77) {
            assert_pages(now.user_remote.0, PAGES);
            assert_eq!(now.user_local.0, 0);
        } else if host.machine.nodes.len() == 1 {
            assert_pages(now.user_local.0, PAGES);
            assert_eq!(now.user_remote.0, 0);
        }
        assert_eq!(now.user_outside.0, 0);
    }
}

fn wrong_shift(host: &ProbedHost) {
    let fakes = TestOverrides { node_shift: Some(3), ..TestOverrides::default() };
    let probes = Probes::load(&ProbeOptions { fakes, ..host.options() });
    let report = &probes.reports()[0];
    assert_eq!(report.mode, Mode::Tracepoint, "{report:?}");
    let reason = report.reason.as_deref().unwrap();
    assert!(reason.starts_with("tp_btf: self-check: 64 pages"), "{reason}");
    assert!(matches!(report.self_check, Some(SelfCheck::Passed(_))));
}

fn slot_reuse(host: &ProbedHost) {
    let mut probes = Probes::load(&ProbeOptions { slots: 1, ..host.options() });
    let (first, second) = (host.cgroup("first"), host.cgroup("second"));
    let mut process = Toucher::new(&first.0);
    let slot = probes.register(first.id(), None).unwrap();
    process.touch(PAGES);
    let before = counted(&probes, slot);
    assert_pages(before.user(), PAGES);
    let last = sum(&probes.release(slot).unwrap());
    assert!(last.user() >= before.user() && last.kernel >= before.kernel, "{before:?} {last:?}");

    // The first workload continues for a while: its pages are booked to the rest of the host.
    process.touch(PAGES);
    assert!(
        matches!(probes.register(second.id(), None), Err(RegisterError::NoSlot { slots: 1 })),
        "it cools"
    );
    thread::sleep(Duration::from_millis(1100));
    let reused = probes.register(second.id(), None).unwrap();
    assert_eq!(reused, slot);
    assert_eq!(counted(&probes, reused), Counters::default());
    process.touch(PAGES);
    assert_eq!(counted(&probes, reused), Counters::default());
    let mut process = Toucher::new(&second.0);
    let start = counted(&probes, reused).user();
    process.touch(PAGES);
    assert_pages(counted(&probes, reused).user() - start, PAGES);
}

/// Compares the number of all pages with the kernel's, also while workloads get and release slots.
fn total_pages(host: &ProbedHost) {
    // Enough pages to outweigh those of other processes, and those allocated between the two readings.
    const TOUCHED: u64 = 16 * PAGES;
    let totals = |probes: &Probes| {
        (counters(probes).total.unwrap().0, sysfs::allocated_pages(Path::new("/")).unwrap())
    };
    for mode in [Mode::TpBtf, Mode::Tracepoint] {
        let mut probes = Probes::load(&ProbeOptions { slots: 2, alloc_modes: &[mode], ..host.options() });
        let before = totals(&probes);
        // The last slot is released first, so its rows are not read any more.
        for name in ["other", "first", "second"] {
            let cgroup = host.cgroup(name);
            let slot = (name != "other").then(|| probes.register(cgroup.id(), None).unwrap());
            Toucher::new(&cgroup.0).touch(TOUCHED);
            if let Some(slot) = slot {
                probes.release(slot).unwrap();
            }
        }
        let after = totals(&probes);
        let (seen, allocated) = (after.0 - before.0, after.1 - before.1);
        assert!(seen >= 3 * TOUCHED, "{mode}: {seen} of {allocated}");
        let percent = seen * 100 / allocated;
        assert!((95..=102).contains(&percent), "{mode}: {seen} of {allocated}");
    }
}

fn unknown(probes: &Probes) -> Pages {
    counters(probes).unknown_node
}

/// Starts the probes with a machine without this host's node, and adds the node later.
fn new_node(host: &ProbedHost) {
    let mut before = host.machine.clone();
    before.nodes.clear();
    for &mode in &[Mode::TpBtf, Mode::Tracepoint] {
        let options =
            ProbeOptions { machine: &before, alloc_modes: &[mode], self_check: false, ..host.options() };
        let mut probes = Probes::load(&options);
        let cgroup = host.cgroup("new-node");
        let mut process = Toucher::new(&cgroup.0);
        // The guarantee contains the node before the node exists.
        let slot = probes.register(cgroup.id(), Some(&host.machine.node_ids())).unwrap();
        process.touch(PAGES);
        assert_eq!(counted(&probes, slot), Counters::default());
        assert!(unknown(&probes).0 >= PAGES);

        probes.refresh(&host.machine).unwrap();
        let known = unknown(&probes);
        process.touch(PAGES);
        let now = counted(&probes, slot);
        assert_pages(now.user(), PAGES);
        assert_eq!(now.user_outside.0, 0);
        assert_eq!(unknown(&probes), known);
    }
}

/// Starts the probes with a machine without most of the node's memory, and adds the memory later.
fn new_memory(host: &ProbedHost) {
    let mut before = host.machine.clone();
    for node in before.nodes.values_mut() {
        node.memory_blocks.truncate(1);
    }
    let options = ProbeOptions {
        machine: &before,
        alloc_modes: &[Mode::Tracepoint],
        self_check: false,
        ..host.options()
    };
    let mut probes = Probes::load(&options);
    let cgroup = host.cgroup("new-memory");
    let mut process = Toucher::new(&cgroup.0);
    let slot = probes.register(cgroup.id(), None).unwrap();
    process.touch(PAGES);
    // The first block, of 128 MiB or more, may have some free pages.
    let early = counted(&probes, slot).user();
    assert!(unknown(&probes).0 + early >= PAGES);

    probes.refresh(&host.machine).unwrap();
    let known = unknown(&probes);
    process.touch(PAGES);
    assert_pages(counted(&probes, slot).user() - early, PAGES);
    assert_eq!(unknown(&probes), known);
    // The node of removed memory is unknown again.
    probes.refresh(&before).unwrap();
    process.touch(PAGES);
    assert!(unknown(&probes) > known);
}

fn nested_cgroups(host: &ProbedHost) {
    let mut probes = host.probes();
    let workload = host.cgroup("workload");
    let middle = Cgroup::new(&workload.0, "middle");
    let inner = Cgroup::new(&middle.0, "inner");
    let mut process = Toucher::new(&inner.0);
    // The cgroup allocates before it is registered, so that every CPU has cached an answer for it.
    process.touch(PAGES);
    let slot = probes.register(workload.id(), None).unwrap();
    process.touch(PAGES);
    let outer = counted(&probes, slot).user();
    assert_pages(outer, PAGES);

    // The deepest registered cgroup owns the pages.
    let inner_slot = probes.register(inner.id(), None).unwrap();
    process.touch(PAGES);
    assert_pages(counted(&probes, inner_slot).user(), PAGES);
    assert_eq!(counted(&probes, slot).user(), outer);

    // After its release, the next registered ancestor owns them.
    probes.release(inner_slot).unwrap();
    process.touch(PAGES);
    assert_pages(counted(&probes, slot).user(), outer + PAGES);
}

fn no_slot(host: &ProbedHost) {
    let mut probes = Probes::load(&ProbeOptions { slots: 0, ..host.options() });
    let cgroup = host.cgroup("other");
    let mut process = Toucher::new(&cgroup.0);
    assert!(matches!(probes.register(cgroup.id(), None), Err(RegisterError::NoSlot { slots: 0 })));
    let other = |probes: &Probes| sum(&counters(probes).other).user();
    let before = other(&probes);
    process.touch(PAGES);
    assert!(other(&probes) >= before + PAGES);
}

fn run_statistics(host: &ProbedHost) {
    let probes = host.probes();
    let cgroup = host.cgroup("run_statistics");
    let mut process = Toucher::new(&cgroup.0);
    let before = probes.costs().read().unwrap()[0];
    let window = stats_window().unwrap();
    process.touch(PAGES);
    drop(window);
    let after = probes.costs().read().unwrap()[0];
    let runs = after.run_count - before.run_count;
    let time = after.run_time.saturating_sub(before.run_time);
    // With huge pages, one event stands for all pages of a huge page.
    assert!(runs >= PAGES / pages_per_table(), "{runs}");
    assert!(
        time > Duration::ZERO && time / u32::try_from(runs).unwrap() < Duration::from_micros(50),
        "{time:?}"
    );
}

fn debug_log(host: &ProbedHost) {
    struct Lines;
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    impl log::Log for Lines {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }
        fn log(&self, record: &log::Record<'_>) {
            LINES.lock().unwrap().push(record.args().to_string());
        }
        fn flush(&self) {}
    }
    log::set_logger(&Lines).unwrap();
    log::set_max_level(log::LevelFilter::Debug);

    let mut probes = Probes::load(&ProbeOptions { debug_log: true, ..host.options() });
    let cgroup = host.cgroup("log");
    let mut process = Toucher::new(&cgroup.0);
    probes.register(cgroup.id(), None).unwrap();
    process.touch(PAGES);
    probes.flush_log();
    let expected = format!("cgroup {} counts in row ", cgroup.id().0);
    let lines = LINES.lock().unwrap();
    assert!(
        lines.iter().any(|line| line.starts_with(&expected)),
        "no {expected:?} among {} lines",
        lines.len()
    );
}

/// Runs `f` on a thread with only these capabilities.
fn with_capabilities<T: Send>(kept: CapabilitySet, f: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let sets =
                CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
            set_capabilities(None, sets).unwrap();
            f()
        });
        thread.join().unwrap()
    })
}

/// Returns the capabilities that have to be kept after loading, which depend on the kernel.
fn required_capabilities(probes: &Probes) -> CapabilitySet {
    let needs_bpf = probes.needs_cap_bpf().unwrap();
    // The expected value follows from the kernel's release and the administrator's setting.
    let disabled = fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled").unwrap();
    assert_eq!(needs_bpf, is_before(5, 19) && disabled.trim() != "0", "{disabled}");
    if needs_bpf { CapabilitySet::BPF } else { CapabilitySet::empty() }
}

/// Returns true if this host's kernel is older than this release.
fn is_before(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(str::parse::<u32>);
    (numbers.next().unwrap().unwrap(), numbers.next().unwrap().unwrap()) < (major, minor)
}

fn without_privileges_after_loading(host: &ProbedHost) {
    let mut probes = host.probes();
    let cgroup = host.cgroup("unprivileged");
    let mut process = Toucher::new(&cgroup.0);
    with_capabilities(required_capabilities(&probes), || {
        let slot = probes.register(cgroup.id(), None).unwrap();
        process.touch(PAGES);
        assert_pages(counted(&probes, slot).user(), PAGES);
        probes.set_allowed(slot, Some(&NodeSet::new())).unwrap();
        probes.costs().read().unwrap();
        let error = stats_window().unwrap_err().to_string();
        assert!(error.contains("EPERM"), "{error}");
        probes.release(slot).unwrap();
    });
}

fn without_sys_admin(host: &ProbedHost) {
    let cgroup = host.cgroup("bpf-only");
    let mut process = Toucher::new(&cgroup.0);
    with_capabilities(CapabilitySet::BPF | CapabilitySet::PERFMON, || {
        let mut probes = host.probes();
        assert_eq!(probes.reports()[0].mode, Mode::TpBtf, "{:?}", probes.reports());
        assert!(matches!(probes.reports()[0].self_check, Some(SelfCheck::Passed(_))));
        let slot = probes.register(cgroup.id(), None).unwrap();
        process.touch(PAGES);
        assert_pages(counted(&probes, slot).user(), PAGES);
    });
}

fn without_privileges(host: &ProbedHost) {
    let probes = with_capabilities(CapabilitySet::empty(), || Probes::load(&host.options()));
    let report = &probes.reports()[0];
    assert_eq!((report.mode, &report.self_check), (Mode::Absent, &None));
    let reason = report.reason.as_deref().unwrap();
    assert!(reason.contains("tp_btf: EPERM") && reason.contains("CAP_BPF"), "{reason}");
    let mut probes = probes;
    let slot = probes.register(CgroupId(1), None).unwrap();
    assert!(probes.counter_maps().allocations().unwrap().is_none());
    probes.release(slot).unwrap();
}

fn without_btf() {
    const NO_BTF: &str = "the kernel has no BTF (/sys/kernel/btf/vmlinux: ";
    // The first mode of each probe.
    let modes = [("alloc", "tp_btf"), ("migrate", "fexit"), ("switch", "tp_btf")];
    let report = report_without(&["/sys/kernel/btf"]);
    if is_before(5, 14) {
        // Without BTF, such a kernel does not provide the workload of a task.
        for line in report.lines() {
            assert!(line.contains(" absent: ") && line.contains("the kernel has no BTF"), "{line}");
        }
        let named = report.lines().filter(|line| line.contains("Linux 5.14 and newer have a helper"));
        assert!(named.count() >= 6, "{report}");
        return;
    }
    for (probe, mode) in modes {
        let expected = format!("{probe} tracepoint: {mode}: {NO_BTF}");
        assert!(report.lines().any(|line| line.starts_with(&expected)), "{report}");
    }
    assert!(report.contains("stall tracepoint: tp_btf: the kernel has no BTF"), "{report}");
    let report = report_without(&["/sys/kernel/btf", "/sys/kernel/tracing", "/sys/kernel/debug"]);
    for (probe, mode) in &modes[..2] {
        let expected = format!("{probe} absent: {mode}: {NO_BTF}");
        let absent = report.lines().find(|line| line.starts_with(&expected));
        assert!(absent.unwrap().contains("; tracepoint: tracefs is not visible"), "{report}");
    }
    assert!(report.contains("switch absent: tp_btf: ") && report.contains("stall absent: "), "{report}");
}

/// Returns the output of `host report` with one folder replaced by an empty one, and with these files replaced.
fn report_with(hidden: Option<&str>, files: &[(&str, &[u8])]) -> String {
    let mut script: Vec<_> =
        hidden.iter().map(|folder| format!("mount -t tmpfs none {folder} && ")).collect();
    let mut kept = Vec::new();
    for (path, content) in files {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        script.push(format!("mount --bind {} {path} && ", file.path().display()));
        kept.push(file);
    }
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &format!("{}exec \"$0\" report", script.concat())])
        .arg(std::env::current_exe().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Simulates a kernel with renamed structures, truncated BTF, or other tracepoint formats: only the probes that need
/// these report a problem.
fn changed_kernel() {
    let lines = |report: &str| -> BTreeMap<String, String> {
        let lines = report.lines().map(|line| line.split_once(' ').unwrap());
        lines.map(|(probe, rest)| (probe.to_owned(), rest.to_owned())).collect()
    };
    let good = lines(&report_without(&[]));
    let btf = fs::read(BTF).unwrap();
    let renamed = |name: &str| {
        let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
        let at = btf.windows(wanted.len()).position(|bytes| bytes == wanted).unwrap();
        let mut renamed = btf.clone();
        renamed[at + 1] = b'X';
        lines(&report_with(None, &[(BTF, &renamed)]))
    };
    // Before Linux 5.14, all probes need this path to find the workload.
    let mut of_cgroups = if is_before(5, 14) {
        vec!["alloc", "hint", "hugepages", "migrate", "oom_kill", "scan", "stall", "switch"]
    } else {
        vec!["oom_kill", "switch"]
    };
    let mut of_zones = vec!["alloc", "hugepages"];
    // Before Linux 6.0, no program for moves reads zones.
    if !good["migrate"].contains("no function move_to_new_folio") {
        of_zones.push("migrate");
    }
    if !good["charge"].starts_with("absent") {
        of_cgroups.push("charge");
        of_zones.push("charge");
    }
    for (name, probes, reason) in [
        ("oom_control", &["oom_kill"][..], "the kernel's BTF has no oom_control.constraint"),
        ("vm_area_struct", &["scan", "hugepages"], "the kernel's BTF has no vm_area_struct.vm_"),
        ("inode", &["hugepages"], "the kernel's BTF has no inode.i_blkbits"),
        ("zonelist", &of_zones, "the kernel's BTF has no array zonelist._zonerefs"),
        ("css_set", &of_cgroups, "the kernel's BTF has no css_set.dfl_cgrp"),
    ] {
        let reported = renamed(name);
        for (probe, good) in &good {
            if probes.contains(&probe.as_str()) {
                assert!(reported[probe].contains(reason), "{name}, {probe}: {}", reported[probe]);
            } else {
                assert_eq!(&reported[probe], good, "{name}, {probe}");
            }
        }
    }
    for cut in [btf.len() / 2, 7] {
        let reported = lines(&report_with(None, &[(BTF, &btf[..cut])]));
        let mode = if is_before(5, 14) { "absent" } else { "tracepoint" };
        let expected = format!("{mode}: tp_btf: ");
        assert!(
            reported["alloc"].starts_with(&expected) && reported["alloc"].contains("BTF is malformed"),
            "{reported:?}"
        );
        assert!(reported["oom_kill"].contains("BTF is malformed"), "{reported:?}");
    }

    let gfp_flags = if is_before(6, 0) { "offset:20;\tsize:4" } else { "offset:24;\tsize:8" };
    let formats = [
        ("kmem/mm_page_alloc", [gfp_flags, "offset:28;\tsize:4"]),
        ("migrate/mm_migrate_pages", ["int reason", "int why"]),
    ];
    let files = formats.map(|(event, [from, to])| {
        let path = format!("/sys/kernel/tracing/events/{event}/format");
        let format = fs::read_to_string(&path).unwrap();
        assert!(format.contains(from), "{format}");
        (path, format.replace(from, to))
    });
    let files = [0, 1].map(|index: usize| (files[index].0.as_str(), files[index].1.as_bytes()));
    // Tracepoints are checked only if there is no better mode.
    let reported = lines(&report_with(Some("/sys/kernel/btf"), &files));
    for (probe, reason) in [
        ("alloc", "format: the field gfp_flags is at offset 28, size 4; the probe expects offset 20, size 4"),
        ("migrate", "format: the field reason is missing; the probe expects offset 28, 52 or 60"),
    ] {
        // On such kernels the other probes of the family need BTF, and the report contains that reason.
        if probe == "migrate" && is_before(5, 14) {
            continue;
        }
        let reported = &reported[probe];
        assert!(reported.starts_with("absent: ") && reported.contains(reason), "{probe}: {reported}");
    }
}

fn intruders_without_btf() {
    if is_before(5, 14) {
        let report = report_without(&["/sys/kernel/btf"]);
        assert!(report.contains("switch absent: "), "{report}");
        return;
    }
    let output = without(&["/sys/kernel/btf"], INTRUDERS);
    let reported = String::from_utf8(output.stdout).unwrap();
    assert_eq!(reported.lines().last(), Some(&*format!("host: {INTRUDERS}: ok")), "{reported}");
}

/// The software events `PERF_COUNT_SW_PAGE_FAULTS_MIN` and `PERF_COUNT_SW_PAGE_FAULTS`, which replace the processor's
/// events.
const FAULTS: DramEvents =
    DramEvents { local: Some(PerfEvent { kind: 1, config: 5 }), remote: PerfEvent { kind: 1, config: 2 } };

fn hardware_counters(host: &ProbedHost) {
    for (events, has_local) in [(FAULTS, true), (DramEvents { local: None, ..FAULTS }, false)] {
        let fakes = TestOverrides { dram_events: Some(events), ..TestOverrides::default() };
        let secondary = vec![Probe::Hardware];
        let mut probes = Probes::load(&ProbeOptions { fakes, secondary, ..host.options() });
        let report = &probes.reports()[1];
        assert_eq!((report.probe, report.mode, &report.reason), (Probe::Hardware, Mode::TpBtf, &None));
        let cgroups = ["busy", "idle"].map(|name| host.cgroup(name));
        let mut processes = [0, 1].map(|index: usize| Toucher::new(&cgroups[index].0));
        let slots = [0, 1].map(|index: usize| probes.register(cgroups[index].id(), None).unwrap());
        processes[0].touch(PAGES);
        // The process waits for its next line, so it has been switched out.
        processes[1].touch(1);
        let of = |slot: usize| {
            let dram = probes.activity_of(slots[slot]).unwrap().dram;
            assert!(dram.iter().all(|node| node.local.is_some() == has_local), "{dram:?}");
            dram.iter().fold((0, 0), |sum, node| (sum.0 + node.local.unwrap_or(0), sum.1 + node.remote))
        };
        let deadline = Instant::now() + Duration::from_mins(1);
        // A process that has written its reply may still be running.
        while of(0).1 < PAGES / pages_per_table() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        let (busy, idle) = (of(0), of(1));
        // With huge pages, one fault stands for all pages of a huge page.
        assert!(busy.1 >= PAGES / pages_per_table() && busy.1 < 2 * PAGES, "{busy:?}");
        assert!(idle.1 < busy.1 / 2, "{busy:?} {idle:?}");
        assert_eq!(busy.0, if has_local { busy.1 } else { 0 }, "they are the same faults");
        let lost = probes.costs().read().unwrap().last().unwrap().events_lost;
        assert_eq!(lost, 0, "every CPU has its counters");

        // The next holder of the slot starts at zero.
        let heir = host.cgroup("heir");
        probes.release(slots[0]).unwrap();
        thread::sleep(Duration::from_millis(1100));
        let slot = probes.register(heir.id(), None).unwrap();
        assert_eq!(slot, slots[0]);
        let dram = probes.activity_of(slot).unwrap().dram;
        assert!(dram.iter().all(|node| node.remote == 0 && node.local.unwrap_or(0) == 0), "{dram:?}");
    }
}

fn no_hardware_counters(host: &ProbedHost) {
    let nothing = DramEvents { local: None, remote: PerfEvent { kind: 1, config: 4711 } };
    let report = |fakes: TestOverrides| {
        let probes =
            Probes::load(&ProbeOptions { fakes, secondary: vec![Probe::Hardware], ..host.options() });
        probes.reports()[1].clone()
    };
    let absent = report(TestOverrides { dram_events: Some(nothing), ..TestOverrides::default() });
    assert_eq!(absent.mode, Mode::Absent);
    assert!(absent.reason.as_deref().unwrap().starts_with("absent: the processor's counters"), "{absent:?}");
    // The result depends on the host, but an absent probe must have a reason.
    let real = report(TestOverrides::default());
    println!("host:   {}: {}", real.mode, real.reason.as_deref().unwrap_or_default());
    assert!(real.mode != Mode::Absent || real.reason.is_some(), "{real:?}");
}

fn duty_cycle(host: &ProbedHost) {
    let cycle = DutyCycle::new(Duration::from_secs(1), Duration::from_secs(5)).unwrap();
    let start = Instant::now();
    // Kernels that preempt tasks inside this program use the tracepoint, which is always attached.
    let modes = [Mode::TpBtf];
    let options = ProbeOptions { duty_cycle: Some(cycle), alloc_modes: &modes, ..host.options() };
    let mut probes = Probes::load(&options);
    assert_eq!(probes.duty_cycle(), Some(cycle));
    assert_eq!(counters(&probes).total, None, "it misses what happens while it is detached");
    let cgroup = host.cgroup("duty");
    let mut process = Toucher::new(&cgroup.0);
    let slot = probes.register(cgroup.id(), None).unwrap();
    process.touch(PAGES);
    let attached = counted(&probes, slot).user();
    assert_pages(attached, 5 * PAGES);
    // Attaching and detaching needs no privileges.
    with_capabilities(required_capabilities(&probes), || {
        probes.apply_duty_cycle(start + Duration::from_mins(1)).unwrap();
        process.touch(PAGES);
        assert_eq!(counted(&probes, slot).user(), attached, "it is detached");
        probes.apply_duty_cycle(start + Duration::from_hours(1)).unwrap();
        process.touch(PAGES);
        assert_pages(counted(&probes, slot).user(), 10 * PAGES);
        // A call in the middle of a phase changes nothing.
        probes.apply_duty_cycle(start + Duration::from_hours(1)).unwrap();
    });
    assert_pages(sum(&probes.release(slot).unwrap()).user(), 10 * PAGES);

    let modes = [Mode::Tracepoint];
    let options = ProbeOptions { duty_cycle: Some(cycle), alloc_modes: &modes, ..host.options() };
    let probes = Probes::load(&options);
    assert_eq!(probes.duty_cycle(), None);
    let reason = probes.reports()[0].reason.as_deref().unwrap();
    assert!(reason.contains("attached all the time"), "{reason}");
}

fn map_memory(host: &ProbedHost) {
    let total = |slots| {
        let fakes = TestOverrides { dram_events: Some(FAULTS), ..TestOverrides::default() };
        let probes = Probes::load(&ProbeOptions {
            slots,
            fakes,
            secondary: Probe::SECONDARY.to_vec(),
            ..host.options()
        });
        let memory: Vec<_> = probes.map_memory().collect();
        println!("host:   {slots} slots: {memory:?}");
        // Some hosts do not support the only hooks of these.
        let families = memory.iter().map(|(family, _)| *family);
        let families = families.filter(|family| !["charge", "hugepages"].contains(family));
        let expected = ["alloc", "faults", "trouble", "switch", "hardware", "cpu_time"];
        assert_eq!(families.collect::<Vec<_>>(), expected);
        assert!(memory.iter().all(|(_, bytes)| *bytes > 0), "{memory:?}");
        memory.iter().map(|(_, bytes)| bytes).sum::<u64>()
    };
    let (few, many) = (total(512), total(10_000));
    assert!(few < many && many < 192 << 20, "{few} {many}");
}

fn too_many_slots(host: &ProbedHost) {
    let machine = Machine::default();
    for (machine, slots) in [(&host.machine, u32::MAX), (&machine, 1 << 31)] {
        let probes = Probes::load(&ProbeOptions { slots, ..ProbeOptions::new(machine) });
        let report = &probes.reports()[0];
        let reason = report.reason.as_deref().unwrap_or_default();
        assert_eq!(report.mode, Mode::Absent);
        assert!(reason.contains("configure fewer slots") || reason.contains("E2BIG"), "{reason}");
    }
}

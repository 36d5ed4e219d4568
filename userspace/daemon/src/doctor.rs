//! Checks of the host (`numaward doctor`): features that numaward requires and that this host does not have, the consequences, and fixes.
//!
//! The checks read files below a root directory and write nothing. They look for features, not for kernel versions, where the kernel
//! shows them. A check *fails* if numaward cannot work without the feature, and *warns* if numaward works with restrictions.

mod affinity;
mod caches;
mod enforcement;
mod guard;
mod weights;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader, Read as _},
    path::Path,
};

use numaward_api::doctor::{CheckResult, HostCheck};
use numaward_cgroup::{TruncatedLines, kernel_features::detect};
use numaward_config::{Config, OperatingMode, Problems, home::HomeMode};
use numaward_guarantee::policy;
use numaward_probes::{Mode, Probe, ProbeReport};
use numaward_topology::{KernelFeature, KernelRelease, NodeSet, sysfs};
use rustix::thread::CapabilitySet;

use self::caches::caches;
use crate::kubernetes::kubelet::{
    self, Policies,
    configuration::KubeletConfiguration,
    reservations::{KubeletReservations, excess},
};

/// Result of a check: the verdict, the finding and the fix; a problem always has one.
type Outcome = (CheckResult, String, Option<String>);

/// The first release in which demotion respects `cpuset.mems`.
///
/// Source: `can_demote` in `mm/vmscan.c`, commit 7d709f49babc ("vmscan,cgroup: apply `mems_effective` to reclaim").
const DEMOTION_RESPECTS_CPUSETS: KernelRelease = KernelRelease::new(6, 16);

fn ok(finding: impl Into<String>) -> Outcome {
    (CheckResult::Ok, finding.into(), None)
}

fn unknown(finding: impl Into<String>, fix: Option<&str>) -> Outcome {
    (CheckResult::Unknown, finding.into(), fix.map(str::to_owned))
}

fn warn(finding: impl Into<String>, fix: impl Into<String>) -> Outcome {
    (CheckResult::Warn, finding.into(), Some(fix.into()))
}

fn fail(finding: impl Into<String>, fix: impl Into<String>) -> Outcome {
    (CheckResult::Fail, finding.into(), Some(fix.into()))
}

fn check(check: impl Into<String>, (verdict, finding, fix): Outcome) -> HostCheck {
    HostCheck { check: check.into(), verdict, finding, fix }
}

/// Checks the host with the file system at `root`.
///
/// - `probes`: results of attaching the probes; empty without an attempt.
/// - `needs`: features of the kernel that the probes use, with true if they are available, and `None` if that is unknown.
/// - `configured`: the configuration of the daemon, or its problems.
pub fn examine(
    root: &Path,
    probes: &[ProbeReport],
    needs: &[(KernelFeature, Option<bool>)],
    configured: Result<&Config, &Problems>,
) -> Vec<HostCheck> {
    let host = DoctorHost { root };
    let mut checks = vec![
        check("configuration", configuration(configured)),
        check("kernel", host.kernel()),
        check("NUMA nodes", host.nodes()),
        check("BTF", host.btf()),
        check("BPF JIT", host.jit()),
        check("privileges", host.privileges()),
    ];
    let access = [
        check("lockdown", host.lockdown()),
        check("BPF LSM", host.lsm()),
        check("tracefs", host.tracefs()),
        check("perf events", host.paranoid()),
        check("kprobes", host.kprobes()),
    ];
    let causes: Vec<&str> = checks[3..].iter().chain(&access).filter_map(possible_cause).collect();
    let fix = attach_fix(&causes);
    checks.extend(probes.iter().map(|report| probe(report, &fix)));
    checks.extend(access);
    checks.extend(host.cgroups());
    // With an invalid configuration, the daemon does not start: the other checks use the defaults.
    let config = configured.ok().cloned().unwrap_or_default();
    checks.extend([
        check("pressure", host.pressure()),
        check("NUMA balancing", host.balancing()),
        check("memory tiers", host.tiers()),
        check("kubelet", host.kubelet(&config)),
    ]);
    checks.extend(host.policy(&config).map(|outcome| check("policy", outcome)));
    checks.extend(host.enforcement());
    checks.extend(affinity::examine_threads(&host));
    checks.extend(config.enforcement.moves_interrupts().then(|| check("interrupts", host.interrupts())));
    checks.extend(config.enforcement.power_settings().map(|power| check("CPU power", host.power(power))));
    checks.extend(
        config
            .enforcement
            .set_weights()
            .map(|weights| check("interleave weights", weights::examine_weights(root, weights))),
    );
    checks.extend(
        config.enabled_resctrl().map(|resctrl| check("resctrl", caches(&config.resctrl_root(), resctrl))),
    );
    checks.extend((config.home.mode != HomeMode::Off).then(|| check("homes", host.homes(&config))));
    let features = detect(root);
    checks.extend(
        config
            .guard_reclaim
            .enabled
            .then(|| check("memory kept free", guard::examine_reclaim(&host, &config, &features))),
    );
    checks.extend(needs.iter().chain(&features).map(kernel_feature));
    checks
}

/// Reports an optional feature of the kernel. A missing one is a warning only if its fallback restricts numaward.
fn kernel_feature((feature, is_available): &(KernelFeature, Option<bool>)) -> HostCheck {
    let KernelFeature { name, since, fallback, is_degraded } = feature;
    let outcome = match is_available {
        Some(true) => ok(format!("available (since Linux {since})")),
        Some(false) if *is_degraded => {
            warn(format!("missing: {fallback}"), format!("use Linux {since} or newer, the first that has it"))
        }
        Some(false) => ok(format!("missing (Linux {since} is the first that has it): {fallback}")),
        None => unknown(format!("not known (since Linux {since}); the fallback is: {fallback}"), None),
    };
    check(format!("kernel: {name}"), outcome)
}

fn configuration(configured: Result<&Config, &Problems>) -> Outcome {
    let Err(problems) = configured else { return ok("valid") };
    let problems: Vec<_> = problems.0.iter().map(ToString::to_string).collect();
    let finding = format!("the daemon does not start with this configuration: {}", problems.join("; "));
    fail(finding, "fix these problems; `numaward config check` checks the result")
}

/// Returns the name of a check that may be the reason why a probe cannot be attached.
fn possible_cause(check: &HostCheck) -> Option<&str> {
    (check.verdict != CheckResult::Ok).then_some(check.check.as_str())
}

/// Returns the fix of probes that cannot be attached.
fn attach_fix(causes: &[&str]) -> String {
    match causes {
        [] => "no other check found a cause: look for denials in the kernel's log, and for a sandbox around this process"
            .to_owned(),
        causes => format!("see the results of these checks: {}", causes.join(", ")),
    }
}

fn probe(report: &ProbeReport, fix: &str) -> HostCheck {
    let reason = report.reason.as_deref().unwrap_or_default();
    let absent = |lost: &str| format!("cannot be attached ({reason}): {lost}");
    let outcome = match (report.probe, report.mode) {
        (probe @ Probe::Alloc, Mode::Absent) => fail(absent(effect_of_absence(probe)), fix),
        (probe, Mode::Absent) => warn(absent(effect_of_absence(probe)), fix),
        (_, Mode::Tracepoint) => {
            warn(format!("attaches by the classic tracepoint, which costs more CPU time ({reason})"), fix)
        }
        (_, Mode::TpBtf) => ok("attaches by tp_btf, the cheapest way"),
        (_, Mode::OnDemand) => ok("is read on demand, without a hook"),
        (_, mode) => ok(format!("attaches by {mode}")),
    };
    check(format!("probe {}", report.probe), outcome)
}

/// Returns the consequence of a missing probe.
fn effect_of_absence(probe: Probe) -> &'static str {
    match probe {
        Probe::Alloc => "allocations are not counted",
        Probe::Charge => "misses are booked to the task that asks for a page, not to its owner",
        Probe::Hugepages => {
            "hugepages taken from the pools are not counted; hugetlb.*.numa_stat has their present nodes"
        }
        Probe::Hint => "accesses to memory of other nodes are not counted; memory.stat may count some",
        Probe::Scan => "processes whose memory policy hides accesses are not detected",
        Probe::Migrate => "pages that move between nodes are not counted",
        Probe::Stall => "time lost in reclaim is not measured; memory.pressure includes a part of it",
        Probe::OomKill => "the causes of OOM kills are unknown; memory.events counts the kills",
        Probe::Switch => "other processes on exclusive CPUs are not detected",
        Probe::CpuTime => "the CPU time of workloads is not known by node; cpu.stat has its sum",
        Probe::Hardware => "accesses to local and remote DRAM are not counted",
        Probe::AllocChains => "the code that allocates on other nodes is unknown",
        Probe::AccessChains => "the code that accesses memory of other nodes is unknown",
    }
}

const NO_SECURITYFS: &str = "not known: securityfs is not mounted";
const MOUNT_SECURITYFS: &str = "mount -t securityfs none /sys/kernel/security";

/// Maximum number of bytes that are read of a file: more than any file of the kernel has that is not read line by line.
const MAX_FILE_BYTES: u64 = 256 << 10;

/// Returns the mount point, without the leading slash, and the mount options of a line of `proc_pid_mountinfo(5)`, if its file
/// system is of this type.
fn mount_of_kind(line: &str, kind: &str) -> Option<(String, String)> {
    // The type is the first field after a lone dash.
    let (mount, file_system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(4);
    let (point, options) = (fields.next()?, fields.next()?);
    let is_of_kind = file_system.split(' ').next() == Some(kind);
    is_of_kind.then(|| (point.trim_start_matches('/').to_owned(), options.to_owned()))
}

struct DoctorHost<'a> {
    root: &'a Path,
}

impl DoctorHost<'_> {
    fn read(&self, path: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        File::open(self.root.join(path))?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    fn node_count(&self) -> Result<usize, String> {
        let path = "sys/devices/system/node/online";
        let list = self.read(path).map_err(|error| format!("/{path} cannot be read: {error}"))?;
        list.parse::<NodeSet>().map(|nodes| nodes.len()).map_err(|error| format!("/{path}: {error}"))
    }

    fn kernel(&self) -> Outcome {
        let path = "proc/sys/kernel/osrelease";
        match self.read(path) {
            Ok(release) => ok(release),
            Err(error) => warn(format!("/{path} cannot be read: {error}"), "mount procfs at /proc"),
        }
    }

    fn nodes(&self) -> Outcome {
        match self.node_count() {
            Ok(1) => warn(
                "1 node: no memory can be remote, so there is nothing for numaward to improve",
                "use a host with several sockets or dies; some firmware has to be configured to show its nodes \
                 (AMD: NPS, Intel: SNC), and a virtual machine needs a virtual NUMA topology",
            ),
            Ok(count) => ok(self.count_kinds(count)),
            Err(error) => fail(error, "use a kernel with CONFIG_NUMA, and mount sysfs at /sys"),
        }
    }

    /// Returns the number of nodes as text; if some have no CPUs or no memory, also the numbers of nodes with each.
    fn count_kinds(&self, nodes: usize) -> String {
        let nodes_in = |file: &str| {
            let list = self.read(&format!("sys/devices/system/node/{file}")).ok()?;
            list.parse::<NodeSet>().ok().map(|nodes| nodes.len())
        };
        match (nodes_in("has_cpu"), nodes_in("has_memory")) {
            (Some(cpus), Some(memory)) if cpus < nodes || memory < nodes => {
                format!("{nodes} nodes: {cpus} with CPUs, {memory} with memory")
            }
            _ => format!("{nodes} nodes"),
        }
    }

    fn btf(&self) -> Outcome {
        let path = "sys/kernel/btf/vmlinux";
        match File::open(self.root.join(path)) {
            Ok(_) => ok(format!("/{path}")),
            Err(error) => warn(
                format!(
                    "/{path} cannot be read ({error}): probes attach in ways that cost more CPU time, some not at all"
                ),
                "use a kernel with CONFIG_DEBUG_INFO_BTF=y",
            ),
        }
    }

    fn jit(&self) -> Outcome {
        let path = "proc/sys/net/core/bpf_jit_enable";
        match self.read(path).as_deref() {
            Ok("0") => warn(
                "off: probes are interpreted and cost several times as much; tp_btf cannot attach",
                "sysctl net.core.bpf_jit_enable=1",
            ),
            Ok(_) => ok("on"),
            Err(error) => {
                unknown(format!("not known: /{path}: {error}"), Some("run as root, with procfs at /proc"))
            }
        }
    }

    fn privileges(&self) -> Outcome {
        let effective = self.read("proc/self/status").ok().and_then(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        });
        let Some(effective) = effective.map(CapabilitySet::from_bits_retain) else {
            return unknown("not known: /proc/self/status has no line CapEff", Some("mount procfs at /proc"));
        };
        let needed = [(CapabilitySet::BPF, "CAP_BPF"), (CapabilitySet::PERFMON, "CAP_PERFMON")];
        let missing = needed.into_iter().filter(|(capability, _)| !effective.contains(*capability));
        let missing: Vec<&str> = missing.map(|(_, name)| name).collect();
        // CAP_SYS_ADMIN includes both.
        if missing.is_empty() || effective.contains(CapabilitySet::SYS_ADMIN) {
            return ok("CAP_BPF and CAP_PERFMON");
        }
        fail(
            format!("{} missing: probes cannot be attached", missing.join(" and ")),
            "run as root, or grant these capabilities to the service or container",
        )
    }

    fn lockdown(&self) -> Outcome {
        let modes = self.read("sys/kernel/security/lockdown").unwrap_or_default();
        match modes.split(['[', ']']).nth(1) {
            Some("confidentiality") => warn(
                "confidentiality: the kernel loads only probes that attach by BTF and read no kernel memory",
                "boot with lockdown=integrity if the other probes are needed",
            ),
            Some(mode) => ok(mode),
            None if self.exists("sys/kernel/security/lsm") => ok("not in this kernel"),
            None => unknown(NO_SECURITYFS, Some(MOUNT_SECURITYFS)),
        }
    }

    fn lsm(&self) -> Outcome {
        match self.read("sys/kernel/security/lsm") {
            Ok(modules) if modules.split(',').any(|module| module == "bpf") => unknown(
                "active: a policy of this host may refuse probes, which then fail with EPERM",
                Some("if probes are refused, allow numaward to load them in that policy"),
            ),
            Ok(_) => ok("not active"),
            Err(_) => unknown(NO_SECURITYFS, Some(MOUNT_SECURITYFS)),
        }
    }

    fn tracefs(&self) -> Outcome {
        let paths = ["sys/kernel/tracing/events", "sys/kernel/debug/tracing/events"];
        match paths.into_iter().find(|path| self.exists(path)) {
            Some(path) => ok(format!("/{path}")),
            None => warn(
                "not found: probes that cannot attach by BTF have no fallback",
                "mount -t tracefs nodev /sys/kernel/tracing",
            ),
        }
    }

    fn paranoid(&self) -> Outcome {
        let path = "proc/sys/kernel/perf_event_paranoid";
        let Ok(level) = self.read(path) else {
            return warn(
                format!("/{path} is missing: classic tracepoints cannot be attached"),
                "use a kernel with CONFIG_PERF_EVENTS=y",
            );
        };
        let needs = if level.parse::<i32>().is_ok_and(|level| level >= 3) {
            ": classic tracepoints need CAP_SYS_ADMIN"
        } else {
            ""
        };
        ok(format!("perf_event_paranoid={level}{needs}"))
    }

    fn kprobes(&self) -> Outcome {
        if self.exists("sys/bus/event_source/devices/kprobe/type") {
            return ok("available");
        }
        warn(
            "not in this kernel: a probe that cannot attach by BTF may have no fallback",
            "use a kernel with CONFIG_KPROBE_EVENTS=y",
        )
    }

    /// Returns the first mount point of a file system of this type, without the leading slash, and its mount options
    /// (`proc_pid_mountinfo(5)`).
    fn mount(&self, kind: &str) -> Option<(String, String)> {
        // Any user can make it long by mounts of its own.
        let table = BufReader::new(File::open(self.root.join("proc/self/mountinfo")).ok()?);
        let mut lines = TruncatedLines::new(table);
        while let Some(line) = lines.next_line().ok()? {
            let found = mount_of_kind(&String::from_utf8_lossy(line), kind);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    fn cgroups(&self) -> Vec<HostCheck> {
        const V2_ONLY: &str = "boot with systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all";
        const HYBRID: &str = "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=0";
        let has_v1 = self.mount("cgroup").is_some();
        let Some((mount, _)) = self.mount("cgroup2") else {
            let (finding, fix) = if has_v1 {
                (
                    "not mounted, only cgroup v1: numaward sees no workloads, and counts the whole host as one",
                    format!("{V2_ONLY}; or, to observe allocations only, with {HYBRID}"),
                )
            } else {
                let fix = format!("{V2_ONLY}, or mount -t cgroup2 none /sys/fs/cgroup");
                ("not mounted: numaward sees no workloads", fix)
            };
            return vec![check("cgroup v2", fail(finding, fix))];
        };
        let mounted = if has_v1 {
            let finding = format!(
                "/{mount}, beside cgroup v1: workloads are observed by v2; the figures of controllers that v1 has are missing"
            );
            warn(finding, V2_ONLY)
        } else {
            ok(format!("/{mount}"))
        };
        let controller = |name: &str, lost: &str| {
            let has = |file: &str| {
                let list = self.read(&format!("{mount}/{file}")).unwrap_or_default();
                list.split_whitespace().any(|listed| listed == name)
            };
            let outcome = if !has("cgroup.controllers") {
                let fix = if has_v1 { V2_ONLY } else { "boot without cgroup_disable=" };
                warn(format!("missing in cgroup v2: {lost}"), fix)
            } else if !has("cgroup.subtree_control") {
                let fix = format!("echo +{name} > /{mount}/cgroup.subtree_control");
                warn(format!("not enabled below the root cgroup: {lost}"), fix)
            } else {
                ok("enabled")
            };
            check(format!("controller {name}"), outcome)
        };
        vec![
            check("cgroup v2", mounted),
            controller("memory", "the nodes of memory, pressure and OOM kills cannot be read"),
            controller("cpuset", "workloads cannot be bound to nodes"),
        ]
    }

    fn pressure(&self) -> Outcome {
        // With psi=0 the file exists and reading it fails.
        if self.read("proc/pressure/memory").is_ok() {
            return ok("measured");
        }
        warn(
            "not measured: time lost waiting for memory is unknown",
            "boot with psi=1, on a kernel with CONFIG_PSI=y",
        )
    }

    fn balancing(&self) -> Outcome {
        let single = self.node_count() == Ok(1);
        match self.read("proc/sys/kernel/numa_balancing").as_deref() {
            _ if single => ok("not needed with one node"),
            Ok("1") => ok("on"),
            Ok("0") => warn(
                "off: the kernel does not move memory to the CPUs that use it, and remote accesses cannot be sampled",
                "sysctl kernel.numa_balancing=1",
            ),
            Ok(mode) => warn(
                format!("mode {mode} (tiering): accesses between nodes of one tier are not sampled"),
                "sysctl kernel.numa_balancing=1 unless memory tiering is wanted",
            ),
            Err(_) => warn(
                "not in this kernel: remote accesses cannot be sampled",
                "use a kernel with CONFIG_NUMA_BALANCING=y",
            ),
        }
    }

    /// Checks the demotion of memory to slower nodes by the kernel.
    fn tiers(&self) -> Outcome {
        let by_node = match sysfs::memory_tiers(self.root) {
            Ok(by_node) => by_node,
            Err(error) => {
                return warn(error.to_string(), "let numaward read this file as the kernel writes it");
            }
        };
        let mut tiers = BTreeMap::<u32, NodeSet>::new();
        for (node, tier) in by_node {
            tiers.entry(tier).or_default().insert(node);
        }
        if tiers.len() < 2 {
            return ok("all memory is of one tier, according to the kernel");
        }
        let nodes = tiers.values().map(ToString::to_string).collect::<Vec<_>>().join(", then ");
        if !matches!(self.read("sys/kernel/mm/numa/demotion_enabled").as_deref(), Ok("true" | "1")) {
            return ok(format!(
                "from fast to slow: nodes {nodes}; demotion is off (/sys/kernel/mm/numa/demotion_enabled): the \
                 kernel drops or swaps pages that do not fit"
            ));
        }
        let finding = format!("from fast to slow: nodes {nodes}; unused pages are demoted");
        let release =
            self.read("proc/sys/kernel/osrelease").ok().and_then(|text| KernelRelease::parse(&text));
        if release.is_none_or(|release| release >= DEMOTION_RESPECTS_CPUSETS) {
            return ok(finding);
        }
        warn(
            format!(
                "{finding}, also to nodes that cpuset.mems does not allow, unless memory.min protects them"
            ),
            format!(
                "use guarantees, whose memory is protected, or Linux {DEMOTION_RESPECTS_CPUSETS} or newer, or switch demotion off: \
                 echo 0 >/sys/kernel/mm/numa/demotion_enabled"
            ),
        )
    }

    /// Checks that the host counts the accesses by which automatic placement chooses preferred nodes.
    fn homes(&self, config: &Config) -> Outcome {
        if self.node_count() == Ok(1) {
            return warn("no effect on a host with one node", "home.mode: off");
        }
        let is_sampled =
            self.read("proc/sys/kernel/numa_balancing").is_ok_and(|mode| mode == "1" || mode == "3");
        if !is_sampled && !config.probes.hardware.enabled {
            return warn(
                "no workload gets a preferred node: remote accesses are not counted on this host",
                "sysctl kernel.numa_balancing=1, or set probes.hardware.enabled if the processor counts them",
            );
        }
        let source = if config.probes.hardware.enabled {
            "the counters of the processor"
        } else {
            "samples of NUMA balancing"
        };
        if config.home.mode == HomeMode::Place && !config.places_workloads() {
            return warn(
                format!("preferred nodes are only reported, by {source}: enforcement.mode is not on"),
                "enforcement.mode: on",
            );
        }
        ok(format!("preferred nodes are chosen by {source}"))
    }

    /// Checks that the policy fits the machine; `None` if numaward does not enforce guarantees.
    fn policy(&self, config: &Config) -> Option<Outcome> {
        let policies = Policies::read(self.root, &config.kubernetes.kubelet.directory);
        if kubelet::mode(config, &policies) != Ok(OperatingMode::Enforce) {
            return None;
        }
        let machine = sysfs::read(self.root).ok()?;
        let file = KubeletConfiguration::read_file(self.root, &config.kubernetes.kubelet.directory);
        let found = file.ok().flatten().and_then(|file| {
            let reservations = KubeletReservations::from_configuration(&file.fields).ok()?;
            Some((reservations, file.source))
        });
        let filled = found.as_ref().and_then(|(found, _)| found.fill_in(config, &machine).ok());
        let fits = match (&found, &filled) {
            (Some((_, file)), Some(filled)) if filled != config => {
                format!("fits the machine, with the reservations of {file} where the configuration has none")
            }
            _ => "fits the machine".to_owned(),
        };
        let config = filled.as_ref().unwrap_or(config);
        Some(match policy::strategy(config, &machine) {
            Ok(_) => match found.and_then(|(found, _)| excess(found.allocatable(&machine), config, &machine))
            {
                Some(excess) => warn(
                    format!("{fits}; {excess}"),
                    "reserve the same in the kubelet's configuration (reservedSystemCPUs or kubeReserved, systemReserved, evictionHard) and in \
                     numaward's, or only in the kubelet's",
                ),
                None => ok(fits),
            },
            Err(problems) => fail(
                format!(
                    "does not fit the machine: {}. The daemon enforces existing guarantees and gives no new ones",
                    policy::join_problems(&problems)
                ),
                "change these keys of the configuration and restart the daemon, or bring back the CPUs and memory that \
                 they name; `numaward uninstall` restores all written values",
            ),
        })
    }

    fn kubelet(&self, config: &Config) -> Outcome {
        let directory = config.kubernetes.kubelet.directory.as_path();
        let policies = Policies::read(self.root, directory);
        if let Some(pins) = policies.pins() {
            let (found, fix) = (pins.found.join(", "), pins.fix.join(" and "));
            return match config.mode {
                Some(OperatingMode::Enforce) => fail(
                    format!(
                        "{found}: the kubelet pins containers itself, and mode: enforce is configured: numaward refuses \
                         to start, as both would write the same cgroups"
                    ),
                    format!("{fix}, rm its state files and restart it; or configure mode: observe"),
                ),
                Some(OperatingMode::Observe) => ok(format!(
                    "{found}: numaward checks the guarantees of the kubelet, as configured (mode: observe)"
                )),
                None => warn(
                    format!(
                        "{found}: the kubelet pins containers itself; numaward then only observes, and checks the guarantees \
                         of the kubelet (it refuses to start with mode: enforce)"
                    ),
                    format!("for numaward to place workloads, {fix}"),
                ),
            };
        }
        match policies.problems.as_slice() {
            [] if kubelet::below(self.root, directory).exists() => {
                let managers = "its CPU and memory managers are off: numaward can place workloads";
                let file = KubeletConfiguration::read_file(self.root, directory).ok().flatten();
                match file.and_then(|file| file.memory_qos()) {
                    None => ok(managers),
                    Some(found) if config.mode == Some(OperatingMode::Observe) => {
                        ok(format!("{managers}; its Memory QoS is on ({})", found.setting))
                    }
                    Some(found) => warn(
                        format!("{managers}; its Memory QoS is on ({}): {}", found.setting, found.effect()),
                        "set featureGates.MemoryQoS: false in the kubelet's configuration, or memoryReservationPolicy: None in numaward's",
                    ),
                }
            }
            [] => ok(format!("not on this host ({} is absent)", directory.display())),
            [problem, ..] => warn(
                format!("its policies cannot be read: {problem}"),
                "let numaward read these files as the kubelet writes them, so that it detects policies that conflict with its own",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_config as config;
    use numaward_probes::Probe;

    use super::*;

    pub(super) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn lists_tiers_from_fast_to_slow() {
        let slow = "sys/devices/virtual/memory_tiering/memory_tier72/nodelist";
        let demotion = "sys/kernel/mm/numa/demotion_enabled";
        let newer = ("proc/sys/kernel/osrelease", "6.16.0\n");
        for (files, expected, words) in [
            (&[][..], CheckResult::Ok, "all memory is of one tier"),
            (&[(slow, "2\n")], CheckResult::Ok, "nodes 0-1, then 2; demotion is off"),
            (
                &[(slow, "2\n"), (demotion, "true\n"), newer],
                CheckResult::Ok,
                "nodes 0-1, then 2; unused pages are demoted",
            ),
            (
                &[(slow, "2\n"), (demotion, "true\n")],
                CheckResult::Warn,
                "nodes 0-1, then 2; unused pages are demoted, also to nodes that cpuset.mems does not allow",
            ),
        ] {
            let root = tree(&[GOOD, files].concat());
            let (verdict, finding, fix) = DoctorHost { root: root.path() }.tiers();
            assert!(verdict == expected && finding.contains(words), "{finding}");
            let says_what_protects = |fix: &str| {
                let ways = ["use guarantees, whose memory is protected", "Linux 6.16", "switch demotion off"];
                ways.iter().all(|way| fix.contains(way))
            };
            assert_eq!(fix.as_deref().is_some_and(says_what_protects), expected == CheckResult::Warn);
        }
    }

    pub(super) const GOOD: &[(&str, &str)] = &[
        ("proc/sys/kernel/osrelease", "6.12.0\n"),
        ("sys/devices/system/node/online", "0-1\n"),
        ("sys/kernel/btf/vmlinux", ""),
        ("proc/sys/net/core/bpf_jit_enable", "1\n"),
        ("proc/self/status", "Name:\tx\nCapEff:\t000001ffffffffff\n"),
        ("sys/kernel/security/lockdown", "none [integrity] confidentiality\n"),
        ("sys/kernel/security/lsm", "lockdown,capability\n"),
        ("sys/kernel/tracing/events/header_page", ""),
        ("proc/sys/kernel/perf_event_paranoid", "3\n"),
        ("sys/bus/event_source/devices/kprobe/type", "8\n"),
        (
            "proc/self/mountinfo",
            "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        ),
        ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory\n"),
        ("sys/fs/cgroup/cgroup.subtree_control", "cpuset cpu memory\n"),
        ("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"),
        ("proc/sys/kernel/numa_balancing", "1\n"),
        ("proc/sys/fs/fanotify/max_user_groups", "128\n"),
        ("sys/devices/virtual/memory_tiering/memory_tier4/nodelist", "0-1\n"),
        ("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\nmemoryManagerPolicy: None\n"),
    ];

    #[test]
    fn good_host_passes() {
        for check in examine(tree(GOOD).path(), &[], &[], Ok(&Config::default())) {
            let HostCheck { check, verdict, finding, fix } = check;
            // The kernel of a tree of files has unknown features.
            let is_unknown_feature = verdict == CheckResult::Unknown && check.starts_with("kernel: ");
            assert!(verdict == CheckResult::Ok || is_unknown_feature, "{check}: {verdict:?}: {finding}");
            assert_eq!(fix, None, "{check}: {finding}");
        }
    }

    #[test]
    fn home_check_names_access_source() {
        let result = |config: &Config, files: &[(&str, &str)]| {
            let tree = tree(&[GOOD, files].concat());
            let checks = examine(tree.path(), &[], &[], Ok(config));
            checks
                .into_iter()
                .find(|check| check.check == "homes")
                .map(|check| (check.verdict, check.finding))
        };
        let off = [("proc/sys/kernel/numa_balancing", "0\n")];
        let mut config = Config::default();
        assert_eq!(result(&config, &[]), None);
        config.home.mode = HomeMode::Place;
        let sampled = "preferred nodes are chosen by samples of NUMA balancing".to_owned();
        assert_eq!(result(&config, &[]), Some((CheckResult::Ok, sampled)));
        let (verdict, finding) = result(&config, &off).unwrap();
        assert!(
            verdict == CheckResult::Warn && finding.contains("remote accesses are not counted"),
            "{finding}"
        );
        config.probes.hardware.enabled = true;
        assert_eq!(
            result(&config, &off),
            Some((CheckResult::Ok, "preferred nodes are chosen by the counters of the processor".to_owned()))
        );
        config.enforcement.mode = numaward_api::EnforcementMode::DryRun;
        let (verdict, finding) = result(&config, &off).unwrap();
        assert!(verdict == CheckResult::Warn && finding.contains("only reported"), "{finding}");
        config.home.mode = HomeMode::Report;
        assert_eq!(result(&config, &off).unwrap().0, CheckResult::Ok);
    }

    #[test]
    fn counts_nodes_with_cpus_and_memory() {
        let finding = |files: &[(&str, &str)]| {
            let tree = tree(&[GOOD, files].concat());
            let checks = examine(tree.path(), &[], &[], Ok(&Config::default()));
            checks.into_iter().find(|check| check.check == "NUMA nodes").unwrap().finding
        };
        let nodes = |name: &str| format!("sys/devices/system/node/{name}");
        let (online, cpus, memory) = (nodes("online"), nodes("has_cpu"), nodes("has_memory"));
        // A GPU's memory, and nodes for parts of the GPU.
        let gpu = [(&*online, "0-8\n"), (&*cpus, "0\n"), (&*memory, "0-1\n")];
        assert_eq!(finding(&gpu), "9 nodes: 1 with CPUs, 2 with memory");
        assert_eq!(finding(&[(&online, "0-1\n"), (&cpus, "0-1\n"), (&memory, "0-1\n")]), "2 nodes");
        assert_eq!(finding(&[(&online, "0-1\n"), (&cpus, "x\n")]), "2 nodes");
    }

    /// Each row is a fault on an otherwise good host: the file, its text (`None`: missing), the check that finds it, its verdict, and a
    /// part of its finding.
    #[test]
    fn finds_each_fault_with_a_fix() {
        use CheckResult::{Fail, Unknown, Warn};
        let faults: &[(&str, Option<&str>, &str, CheckResult, &str)] = &[
            ("proc/sys/kernel/osrelease", None, "kernel", Warn, "cannot be read"),
            ("sys/devices/system/node/online", Some("0\n"), "NUMA nodes", Warn, "1 node"),
            ("sys/devices/system/node/online", None, "NUMA nodes", Fail, "cannot be read"),
            ("sys/devices/system/node/online", Some("x"), "NUMA nodes", Fail, "is not a node list"),
            ("sys/kernel/btf/vmlinux", None, "BTF", Warn, "cannot be read"),
            ("proc/sys/net/core/bpf_jit_enable", Some("0\n"), "BPF JIT", Warn, "interpreted"),
            (
                "proc/self/status",
                Some("CapEff:\t0000000000000000\n"),
                "privileges",
                Fail,
                "CAP_BPF and CAP_PERFMON",
            ),
            (
                "proc/self/status",
                Some("CapEff:\t0000008000000000\n"),
                "privileges",
                Fail,
                "CAP_PERFMON missing",
            ),
            ("proc/sys/net/core/bpf_jit_enable", None, "BPF JIT", Unknown, "not known"),
            ("proc/self/status", Some("CapEff: zz"), "privileges", Unknown, "no line CapEff"),
            ("sys/kernel/security/lsm", None, "BPF LSM", Unknown, "securityfs is not mounted"),
            ("sys/kernel/security/lsm", Some("lockdown,bpf\n"), "BPF LSM", Unknown, "may refuse probes"),
            (
                "sys/kernel/security/lockdown",
                Some("none integrity [confidentiality]"),
                "lockdown",
                Warn,
                "only probes",
            ),
            ("sys/kernel/tracing/events/header_page", None, "tracefs", Warn, "no fallback"),
            ("proc/sys/kernel/perf_event_paranoid", None, "perf events", Warn, "missing"),
            ("sys/bus/event_source/devices/kprobe/type", None, "kprobes", Warn, "not in this kernel"),
            ("proc/self/mountinfo", Some(""), "cgroup v2", Fail, "sees no workloads"),
            ("proc/self/mountinfo", None, "cgroup v2", Fail, "sees no workloads"),
            (
                "proc/self/mountinfo",
                Some(
                    "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n31 23 0:27 / /x rw - cgroup cgroup rw,memory\n",
                ),
                "cgroup v2",
                Warn,
                "beside cgroup v1",
            ),
            (
                "sys/fs/cgroup/cgroup.controllers",
                Some("cpuset\n"),
                "controller memory",
                Warn,
                "missing in cgroup v2",
            ),
            (
                "sys/fs/cgroup/cgroup.subtree_control",
                Some("memory\n"),
                "controller cpuset",
                Warn,
                "not enabled",
            ),
            ("proc/pressure/memory", None, "pressure", Warn, "not measured"),
            ("proc/sys/kernel/numa_balancing", Some("0\n"), "NUMA balancing", Warn, "off"),
            ("proc/sys/kernel/numa_balancing", Some("2\n"), "NUMA balancing", Warn, "mode 2"),
            ("proc/sys/kernel/numa_balancing", None, "NUMA balancing", Warn, "not in this kernel"),
            (
                "var/lib/kubelet/config.yaml",
                Some("cpuManagerPolicy: static\nmemoryManagerPolicy: Static\n"),
                "kubelet",
                Warn,
                "cpuManagerPolicy: static in /var/lib/kubelet/config.yaml, memoryManagerPolicy: Static",
            ),
            ("var/lib/kubelet/config.yaml", Some("a: [\n"), "kubelet", Warn, "cannot be read"),
        ];
        for &(path, text, name, verdict, words) in faults {
            let dir = tree(GOOD);
            match text {
                Some(text) => fs::write(dir.path().join(path), text).unwrap(),
                None if path.ends_with("header_page") => {
                    fs::remove_dir_all(dir.path().join("sys/kernel/tracing")).unwrap();
                }
                None => fs::remove_file(dir.path().join(path)).unwrap(),
            }
            let checks = examine(dir.path(), &[], &[], Ok(&Config::default()));
            let check = checks.iter().find(|check| check.check == name).unwrap();
            assert_eq!(check.verdict, verdict, "{path} {text:?}: {check:?}");
            assert!(check.finding.contains(words), "{path} {text:?}: {check:?}");
            assert!(check.fix.is_some(), "{check:?}");
        }
    }

    #[test]
    fn kubelet_verdict_depends_on_mode() {
        let dir = tree(GOOD);
        let elsewhere = dir.path().join("data/kubelet");
        fs::create_dir_all(&elsewhere).unwrap();
        fs::write(elsewhere.join("config.yaml"), "memoryManagerPolicy: Static\n").unwrap();
        let kubelet = config::cluster::Kubelet { directory: "/data/kubelet".into(), ..Default::default() };
        let kubernetes = config::kubernetes::Kubernetes { kubelet, ..Default::default() };
        let config = |mode| Config { mode, kubernetes: kubernetes.clone(), ..Config::default() };
        let find = |configured: Result<&Config, &Problems>, name: &str| {
            let checks = examine(dir.path(), &[], &[], configured);
            checks.into_iter().find(|check| check.check == name).unwrap()
        };
        for (mode, verdict, words) in [
            (None, CheckResult::Warn, "numaward then only observes"),
            (Some(OperatingMode::Observe), CheckResult::Ok, "as configured (mode: observe)"),
            (Some(OperatingMode::Enforce), CheckResult::Fail, "numaward refuses to start"),
        ] {
            let check = find(Ok(&config(mode)), "kubelet");
            assert_eq!(check.verdict, verdict, "{check:?}");
            assert!(check.finding.contains(words), "{check:?}");
            assert!(check.finding.contains("memoryManagerPolicy: Static in /data/kubelet/config.yaml"));
        }
        let fix = find(Ok(&config(Some(OperatingMode::Enforce))), "kubelet").fix.unwrap();
        assert!(fix.contains("set memoryManagerPolicy: None") && fix.contains("mode: observe"), "{fix}");
        for (mode, reservations, verdict) in [
            (None, "None", CheckResult::Warn),
            (None, "TieredReservation", CheckResult::Warn),
            (Some(OperatingMode::Observe), "TieredReservation", CheckResult::Ok),
        ] {
            let memory_qos =
                format!("featureGates: {{MemoryQoS: true}}\nmemoryReservationPolicy: {reservations}\n");
            fs::write(elsewhere.join("config.yaml"), memory_qos).unwrap();
            let check = find(Ok(&config(mode)), "kubelet");
            assert_eq!(check.verdict, verdict, "{check:?}");
            assert!(
                check.finding.contains("featureGates.MemoryQoS: true in /data/kubelet/config.yaml"),
                "{check:?}"
            );
        }
        let file = dir.path().join("numaward.yaml");
        fs::write(&file, "mode: enforced\n").unwrap();
        let sources = config::Sources { file: Some(file), ..Default::default() };
        let problems = config::load(&sources).unwrap_err();
        let check = find(Err(&problems), "configuration");
        assert_eq!(check.verdict, CheckResult::Fail);
        assert!(check.finding.contains("numaward.yaml") && check.finding.contains("mode"), "{check:?}");
    }

    #[test]
    fn fails_if_policy_does_not_fit() {
        let mut files = vec![
            ("sys/devices/system/cpu/online".to_owned(), "0-3\n"),
            ("sys/devices/system/node/online".to_owned(), "0\n"),
            ("sys/devices/system/node/node0/cpulist".to_owned(), "0-3\n"),
            ("sys/devices/system/node/node0/distance".to_owned(), "10\n"),
            ("sys/devices/system/node/node0/meminfo".to_owned(), "Node 0 MemTotal: 4194304 kB\n"),
        ];
        for (cpu, id) in ["0\n", "1\n", "2\n", "3\n"].into_iter().enumerate() {
            let topology = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            files.push((format!("{topology}/physical_package_id"), "0\n"));
            files.push((format!("{topology}/core_id"), id));
        }
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let root = tree(&files);
        let policy = |config: &str| {
            let config: Config = serde_json::from_str(config).unwrap();
            DoctorHost { root: root.path() }.policy(&config)
        };
        assert_eq!(policy("{}").map(|(verdict, ..)| verdict), Some(CheckResult::Ok));
        let reserved = r#""reservedMemory": [{"numaNode": 7, "limits": {"memory": "1Gi"}}]"#;
        let (verdict, finding, fix) = policy(&format!("{{{reserved}}}")).unwrap();
        assert_eq!(verdict, CheckResult::Fail);
        assert!(finding.contains("NUMA node 7") && fix.is_some(), "{finding}");
        assert_eq!(policy(&format!(r#"{{"mode": "observe", {reserved}}}"#)), None);

        // The kubelet's reservations count unless there are others.
        let file = root.path().join("var/lib/kubelet/config.yaml");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "kubeReserved: {cpu: '1', memory: 412Mi}\n").unwrap();
        let (verdict, finding, _) = policy("{}").unwrap();
        assert_eq!(verdict, CheckResult::Ok, "{finding}");
        assert!(finding.contains("the reservations of /var/lib/kubelet/config.yaml"), "{finding}");
        let (verdict, finding, fix) = policy(r#"{"reservedSystemCPUs": "0-1"}"#).unwrap();
        assert!(verdict == CheckResult::Warn && fix.is_some(), "{finding}");
        assert!(finding.contains("3 CPUs, and numaward 2"), "{finding}");
    }

    #[test]
    fn names_first_kernel_with_feature() {
        let degraded =
            KernelFeature { name: "x", since: KernelRelease::new(6, 7), fallback: "y", is_degraded: true };
        let replaced = KernelFeature { is_degraded: false, ..degraded };
        for (feature, is_available, verdict, finding) in [
            (degraded, Some(true), CheckResult::Ok, "available (since Linux 6.7)"),
            (degraded, Some(false), CheckResult::Warn, "missing: y"),
            (replaced, Some(false), CheckResult::Ok, "missing (Linux 6.7 is the first that has it): y"),
            (degraded, None, CheckResult::Unknown, "not known (since Linux 6.7); the fallback is: y"),
        ] {
            let check = kernel_feature(&(feature, is_available));
            assert_eq!((check.check.as_str(), check.verdict), ("kernel: x", verdict));
            assert_eq!(check.finding, finding);
            let names_release = |fix: &String| fix.contains("Linux 6.7 or newer");
            assert_eq!(check.fix.as_ref().is_some_and(names_release), verdict == CheckResult::Warn);
        }
    }

    #[test]
    fn attach_mode_decides_verdict() {
        let report = |mode| ProbeReport {
            probe: Probe::Alloc,
            mode,
            reason: Some("no BTF".to_owned()),
            obstacle: None,
            self_check: None,
        };
        let verdicts =
            [Mode::TpBtf, Mode::Tracepoint, Mode::Absent].map(|mode| probe(&report(mode), "fix").verdict);
        assert_eq!(verdicts, [CheckResult::Ok, CheckResult::Warn, CheckResult::Fail]);
    }

    #[test]
    fn refused_probe_points_to_checks_that_found_something() {
        let report = ProbeReport {
            probe: Probe::Scan,
            mode: Mode::Absent,
            reason: Some("fexit: EPERM".to_owned()),
            obstacle: None,
            self_check: None,
        };
        let fix = |files: &[(&str, &str)], missing: &str| {
            let root = tree(&[GOOD, files].concat());
            if !missing.is_empty() {
                fs::remove_dir_all(root.path().join(missing)).unwrap();
            }
            let checks = examine(root.path(), std::slice::from_ref(&report), &[], Ok(&Config::default()));
            checks.into_iter().find(|check| check.check == "probe scan").and_then(|check| check.fix).unwrap()
        };
        assert!(fix(&[], "").starts_with("no other check found a cause"));
        assert_eq!(fix(&[], "sys/kernel/security"), "see the results of these checks: lockdown, BPF LSM");
        let locked = ("sys/kernel/security/lockdown", "none integrity [confidentiality]\n");
        assert_eq!(fix(&[locked], ""), "see the results of these checks: lockdown");
        let active = ("sys/kernel/security/lsm", "lockdown,capability,bpf\n");
        assert_eq!(fix(&[active], ""), "see the results of these checks: BPF LSM");
    }
}

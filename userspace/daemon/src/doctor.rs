//! What is missing on this host for numaward, what that means, and how to fix it.
//!
//! Reads files below a root directory and judges them; changes nothing. Features are probed for, never
//! kernel versions. A check *fails* where numaward cannot do its work, and *warns* where it works less
//! well than it could.

mod affinity;
mod caches;
mod enforcement;
mod guard;
mod weights;

use std::{collections::BTreeMap, fs, io, path::Path};

use numaward_api::doctor::{CheckResult, HostCheck};
use numaward_cgroup::kernel_features::detect;
use numaward_config::{Config, OperatingMode, Problems, home::HomeMode};
use numaward_guarantee::policy;
use numaward_probes::{Mode, Probe, ProbeReport};
use numaward_topology::{KernelFeature, KernelRelease, NodeSet, sysfs};
use rustix::thread::CapabilitySet;

use self::caches::caches;
use crate::kubernetes::kubelet::{self, Policies};

/// The outcome of a check: how it came out, what was found, and what to do about it.
type Outcome = (CheckResult, String, Option<String>);

/// The first release in which demotion heeds `cpuset.mems`.
///
/// Source: `can_demote` in `mm/vmscan.c`, commit 7d709f49babc ("vmscan,cgroup: apply `mems_effective` to reclaim").
const DEMOTION_HEEDS_CPUSETS: KernelRelease = KernelRelease::new(6, 16);

fn ok(finding: impl Into<String>) -> Outcome {
    (CheckResult::Ok, finding.into(), None)
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

/// Looks at the host whose file system is at `root`. `probes` is how the probes could be attached, if
/// that was tried, `needs` what they found of the kernel, `configured` what the daemon is configured to do, or what is
/// wrong with that.
pub fn examine(
    root: &Path,
    probes: &[ProbeReport],
    needs: &[(KernelFeature, Option<bool>)],
    configured: Result<&Config, &Problems>,
) -> Vec<HostCheck> {
    let host = Host { root };
    let mut checks = vec![
        check("configuration", configuration(configured)),
        check("kernel", host.kernel()),
        check("NUMA nodes", host.nodes()),
        check("BTF", host.btf()),
        check("BPF JIT", host.jit()),
        check("privileges", host.privileges()),
    ];
    checks.extend(probes.iter().map(probe));
    checks.extend([
        check("lockdown", host.lockdown()),
        check("BPF LSM", host.lsm()),
        check("tracefs", host.tracefs()),
        check("perf events", host.paranoid()),
        check("kprobes", host.kprobes()),
    ]);
    checks.extend(host.cgroups());
    // Where it cannot be read, the daemon does not start: what the kubelet does is judged as without any.
    let config = configured.ok().cloned().unwrap_or_default();
    checks.extend([
        check("pressure", host.pressure()),
        check("NUMA balancing", host.balancing()),
        check("memory tiers", host.tiers()),
        check("kubelet", host.kubelet(&config)),
    ]);
    checks.extend(host.policy(&config).map(|of| check("policy", of)));
    checks.extend(host.enforcement());
    checks.extend(host.narrow_threads());
    checks.extend(config.enforcement.moves_interrupts().then(|| check("interrupts", host.interrupts())));
    checks.extend(config.enforcement.power_settings().map(|power| check("CPU power", host.power(power))));
    checks.extend(
        config.enforcement.set_weights().map(|of| check("interleave weights", host.interleave_weights(of))),
    );
    checks.extend(
        config.enabled_resctrl().map(|wanted| check("resctrl", caches(&config.resctrl_root(), wanted))),
    );
    checks.extend((config.home.mode != HomeMode::Off).then(|| check("homes", host.homes(&config))));
    let looked = detect(root);
    checks.extend(
        config.guard_reclaim.enabled.then(|| check("memory kept free", host.kept_free(&config, &looked))),
    );
    checks.extend(needs.iter().chain(&looked).map(need));
    checks
}

/// What is used of the kernel, and what takes its place where it is missing.
fn need((need, is_here): &(KernelFeature, Option<bool>)) -> HostCheck {
    let KernelFeature { name, since, fallback: instead, is_degraded: loses } = need;
    let outcome = match is_here {
        Some(true) => ok(format!("here (since Linux {since})")),
        Some(false) if *loses => {
            warn(format!("missing: {instead}"), format!("use Linux {since} or newer, the first that has it"))
        }
        Some(false) => ok(format!("missing (Linux {since} is the first that has it): {instead}")),
        None => ok(format!("not known (since Linux {since}); without: {instead}")),
    };
    check(format!("kernel: {name}"), outcome)
}

fn configuration(configured: Result<&Config, &Problems>) -> Outcome {
    let Err(problems) = configured else { return ok("understood") };
    let problems: Vec<_> = problems.0.iter().map(ToString::to_string).collect();
    let finding = format!("the daemon does not start with it: {}", problems.join("; "));
    fail(finding, "`numaward config check` says whether it is fixed")
}

fn probe(report: &ProbeReport) -> HostCheck {
    const SEE: &str = "see the other checks: privileges, BTF, lockdown";
    let reason = report.reason.as_deref().unwrap_or_default();
    let absent = |lost: &str| format!("cannot be attached ({reason}): {lost}");
    let outcome = match (report.probe, report.mode) {
        (probe @ Probe::Alloc, Mode::Absent) => fail(absent(without(probe)), SEE),
        (probe, Mode::Absent) => warn(absent(without(probe)), SEE),
        (_, Mode::Tracepoint) => warn(
            format!("attaches by the classic tracepoint, which costs more ({reason})"),
            "see the other checks: BTF, JIT, lockdown",
        ),
        (_, Mode::TpBtf) => ok("attaches by tp_btf, the cheapest way"),
        (_, mode) => ok(format!("attaches by {mode}")),
    };
    check(format!("probe {}", report.probe), outcome)
}

/// What is not known without a probe.
fn without(probe: Probe) -> &'static str {
    match probe {
        Probe::Alloc => "allocations are not counted",
        Probe::Hugepages => {
            "hugepages taken from the pools are not counted; hugetlb.*.numa_stat says where they lie"
        }
        Probe::Hint => "accesses to memory of other nodes are not counted; memory.stat may count some",
        Probe::Scan => "it is not known whose memory policy hides accesses",
        Probe::Migrate => "pages that move between nodes are not counted",
        Probe::Stall => "time lost in reclaim is not measured; memory.pressure has part of it",
        Probe::OomKill => "why the OOM killer took a process is not known; memory.events counts them",
        Probe::Switch => "it is not known who else runs on exclusive CPUs",
        Probe::Hardware => "accesses to local and remote DRAM are not counted",
        Probe::AllocChains => "it is not known which code allocates on other nodes",
        Probe::AccessChains => "it is not known which code accesses memory of other nodes",
    }
}

struct Host<'a> {
    root: &'a Path,
}

impl Host<'_> {
    fn read(&self, path: &str) -> io::Result<String> {
        fs::read_to_string(self.root.join(path)).map(|text| text.trim().to_owned())
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

    /// How many nodes there are; where not all have both, with how many have CPUs and memory.
    fn count_kinds(&self, nodes: usize) -> String {
        let with = |what: &str| {
            let list = self.read(&format!("sys/devices/system/node/{what}")).ok()?;
            list.parse::<NodeSet>().ok().map(|nodes| nodes.len())
        };
        match (with("has_cpu"), with("has_memory")) {
            (Some(cpus), Some(memory)) if cpus < nodes || memory < nodes => {
                format!("{nodes} nodes: {cpus} with CPUs, {memory} with memory")
            }
            _ => format!("{nodes} nodes"),
        }
    }

    fn btf(&self) -> Outcome {
        let path = "sys/kernel/btf/vmlinux";
        match fs::File::open(self.root.join(path)) {
            Ok(_) => ok(format!("/{path}")),
            Err(error) => warn(
                format!("/{path} cannot be read ({error}): probes attach by dearer ways, some not at all"),
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
            Err(error) => ok(format!("unknown: /{path}: {error}")),
        }
    }

    fn privileges(&self) -> Outcome {
        let effective = self.read("proc/self/status").ok().and_then(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        });
        let Some(effective) = effective.map(CapabilitySet::from_bits_retain) else {
            return warn("unknown: /proc/self/status has no line CapEff", "mount procfs at /proc");
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
            "run as root, or give these capabilities to the service or container",
        )
    }

    fn lockdown(&self) -> Outcome {
        let modes = self.read("sys/kernel/security/lockdown").unwrap_or_default();
        match modes.split(['[', ']']).nth(1) {
            Some("confidentiality") => warn(
                "confidentiality: only probes that attach by BTF and read no kernel memory load",
                "boot with lockdown=integrity where the rest is needed",
            ),
            Some(mode) => ok(mode),
            None => ok("not in this kernel, or securityfs is not mounted"),
        }
    }

    fn lsm(&self) -> Outcome {
        ok(match self.read("sys/kernel/security/lsm") {
            Ok(modules) if modules.split(',').any(|module| module == "bpf") => {
                "active: a policy of this host may refuse probes; a probe so refused says EPERM"
            }
            Ok(_) => "not active",
            Err(_) => "unknown: securityfs is not mounted",
        })
    }

    fn tracefs(&self) -> Outcome {
        let places = ["sys/kernel/tracing/events", "sys/kernel/debug/tracing/events"];
        match places.into_iter().find(|path| self.exists(path)) {
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

    /// Where a file system of this type is mounted first, and the options of the mount (`proc_pid_mountinfo(5)`).
    fn mount(&self, kind: &str) -> Option<(String, String)> {
        let table = self.read("proc/self/mountinfo").ok()?;
        table.lines().find_map(|line| {
            // The type is the first field after a lone dash.
            let (mount, file_system) = line.split_once(" - ")?;
            let mut fields = mount.split(' ').skip(4);
            let (point, options) = (fields.next()?, fields.next()?);
            let is_asked = file_system.split(' ').next() == Some(kind);
            is_asked.then(|| (point.trim_start_matches('/').to_owned(), options.to_owned()))
        })
    }

    fn cgroups(&self) -> Vec<HostCheck> {
        const V2_ONLY: &str = "boot with systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all";
        const HYBRID: &str = "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=0";
        let beside = self.mount("cgroup").is_some();
        let Some((mount, _)) = self.mount("cgroup2") else {
            let (finding, fix) = if beside {
                (
                    "not mounted, only cgroup v1: numaward sees no workloads, and counts everything together",
                    format!("{V2_ONLY}; or, to observe allocations only, with {HYBRID}"),
                )
            } else {
                let fix = format!("{V2_ONLY}, or mount -t cgroup2 none /sys/fs/cgroup");
                ("not mounted: numaward sees no workloads", fix)
            };
            return vec![check("cgroup v2", fail(finding, fix))];
        };
        let mounted = if beside {
            let finding = format!(
                "/{mount}, beside cgroup v1: workloads are observed by it; what a controller knows that v1 holds is missing"
            );
            warn(finding, V2_ONLY)
        } else {
            ok(format!("/{mount}"))
        };
        let controller = |name: &str, lost: &str| {
            let has = |file: &str| {
                let list = self.read(&format!("{mount}/{file}")).unwrap_or_default();
                list.split_whitespace().any(|held| held == name)
            };
            let outcome = if !has("cgroup.controllers") {
                let fix = if beside { V2_ONLY } else { "boot without cgroup_disable=" };
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
            controller("memory", "where memory lies, pressure and OOM kills cannot be read"),
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
            _ if single => ok("of no use with one node"),
            Ok("1") => ok("on"),
            Ok("0") => warn(
                "off: the kernel moves no memory to the CPUs that use it, and remote accesses cannot be sampled",
                "sysctl kernel.numa_balancing=1",
            ),
            Ok(mode) => warn(
                format!("mode {mode} (tiering): accesses between nodes of one tier are not sampled"),
                "sysctl kernel.numa_balancing=1 where memory tiering is not wanted",
            ),
            Err(_) => warn(
                "not in this kernel: remote accesses cannot be sampled",
                "use a kernel with CONFIG_NUMA_BALANCING=y",
            ),
        }
    }

    /// Whether the kernel moves memory to slower nodes.
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
            return ok("all memory is of one tier, as far as the kernel knows");
        }
        let nodes = tiers.values().map(ToString::to_string).collect::<Vec<_>>().join(", then ");
        if !matches!(self.read("sys/kernel/mm/numa/demotion_enabled").as_deref(), Ok("true" | "1")) {
            return ok(format!(
                "from fast to slow: nodes {nodes}; demotion is off (/sys/kernel/mm/numa/demotion_enabled): what does not \
                 fit is dropped or swapped"
            ));
        }
        let finding = format!("from fast to slow: nodes {nodes}; what is not used is demoted");
        let release =
            self.read("proc/sys/kernel/osrelease").ok().and_then(|text| KernelRelease::parse(&text));
        if release.is_none_or(|release| release >= DEMOTION_HEEDS_CPUSETS) {
            return ok(finding);
        }
        warn(
            format!("{finding}, also to nodes that cpuset.mems does not allow; not what memory.min protects"),
            format!(
                "use guarantees, whose memory is protected, or Linux {DEMOTION_HEEDS_CPUSETS} or newer, or switch demotion off: \
                 echo 0 >/sys/kernel/mm/numa/demotion_enabled"
            ),
        )
    }

    /// Whether anything counts the accesses by which homes are judged.
    fn homes(&self, config: &Config) -> Outcome {
        if self.node_count() == Ok(1) {
            return warn("of no use with one node", "home.mode: off");
        }
        let is_sampled =
            self.read("proc/sys/kernel/numa_balancing").is_ok_and(|mode| mode == "1" || mode == "3");
        if !is_sampled && !config.probes.hardware.enabled {
            return warn(
                "nobody gets a home: nothing counts remote accesses on this host",
                "sysctl kernel.numa_balancing=1, or probes.hardware.enabled where the processor counts them",
            );
        }
        let by = if config.probes.hardware.enabled {
            "the processor's counters"
        } else {
            "NUMA balancing's samples"
        };
        if config.home.mode == HomeMode::Place && !config.places_workloads() {
            return warn(
                format!("only reported, by {by}: enforcement.mode is not on"),
                "enforcement.mode: on",
            );
        }
        ok(format!("judged by {by}"))
    }

    /// Whether the policy fits the machine, where numaward is to give guarantees.
    fn policy(&self, config: &Config) -> Option<Outcome> {
        let policies = Policies::read(self.root, &config.kubernetes.kubelet.directory);
        if kubelet::mode(config, &policies) != Ok(OperatingMode::Enforce) {
            return None;
        }
        let machine = sysfs::read(self.root).ok()?;
        Some(match policy::strategy(config, &machine) {
            Ok(_) => ok("fits the machine"),
            Err(problems) => fail(
                format!(
                    "does not fit the machine: {}. The daemon keeps guarantees, and gives no new ones",
                    policy::join_problems(&problems)
                ),
                "change these keys of the configuration and restart the daemon, or give back to the machine what they \
                 name; `numaward uninstall --restore` gives back all that was written",
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
                Some(OperatingMode::Observe) => {
                    ok(format!("{found}: numaward holds it to its promises, as configured (mode: observe)"))
                }
                None => warn(
                    format!(
                        "{found}: the kubelet pins containers itself; numaward then only observes, and holds it to its \
                         promises (it refuses to start with mode: enforce)"
                    ),
                    format!("for numaward to place workloads, {fix}"),
                ),
            };
        }
        match policies.problems.as_slice() {
            [] if kubelet::below(self.root, directory).exists() => {
                ok("it leaves CPUs and memory to numaward: its CPU and memory managers are off")
            }
            [] => ok(format!("none here ({} is absent)", directory.display())),
            [problem, ..] => warn(
                format!("its policies are not understood: {problem}"),
                "let numaward read these files as the kubelet writes them, to see policies that would fight with its own",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn memory_tiers_are_listed_from_fast_to_slow() {
        let slow = "sys/devices/virtual/memory_tiering/memory_tier72/nodelist";
        let demotion = "sys/kernel/mm/numa/demotion_enabled";
        let newer = ("proc/sys/kernel/osrelease", "6.16.0\n");
        for (more, expected, words) in [
            (&[][..], CheckResult::Ok, "all memory is of one tier"),
            (&[(slow, "2\n")], CheckResult::Ok, "nodes 0-1, then 2; demotion is off"),
            (
                &[(slow, "2\n"), (demotion, "true\n"), newer],
                CheckResult::Ok,
                "nodes 0-1, then 2; what is not used is demoted",
            ),
            (
                &[(slow, "2\n"), (demotion, "true\n")],
                CheckResult::Warn,
                "nodes 0-1, then 2; what is not used is demoted, also to nodes that cpuset.mems does not allow",
            ),
        ] {
            let root = tree(&[GOOD, more].concat());
            let (verdict, finding, fix) = Host { root: root.path() }.tiers();
            assert!(verdict == expected && finding.contains(words), "{finding}");
            assert_eq!(fix.is_some_and(|fix| fix.contains("Linux 6.16")), expected == CheckResult::Warn);
        }
    }

    pub(super) const GOOD: &[(&str, &str)] = &[
        ("proc/sys/kernel/osrelease", "6.12.0\n"),
        ("sys/devices/system/node/online", "0-1\n"),
        ("sys/kernel/btf/vmlinux", ""),
        ("proc/sys/net/core/bpf_jit_enable", "1\n"),
        ("proc/self/status", "Name:\tx\nCapEff:\t000001ffffffffff\n"),
        ("sys/kernel/security/lockdown", "none [integrity] confidentiality\n"),
        ("sys/kernel/security/lsm", "lockdown,capability,bpf\n"),
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
    fn a_good_host_passes() {
        for check in examine(tree(GOOD).path(), &[], &[], Ok(&Config::default())) {
            assert_eq!(
                (check.verdict, check.fix),
                (CheckResult::Ok, None),
                "{}: {}",
                check.check,
                check.finding
            );
        }
    }

    #[test]
    fn homes_are_judged_by_what_counts_accesses() {
        let of = |config: &Config, files: &[(&str, &str)]| {
            let tree = tree(&[GOOD, files].concat());
            let checks = examine(tree.path(), &[], &[], Ok(config));
            checks
                .into_iter()
                .find(|check| check.check == "homes")
                .map(|check| (check.verdict, check.finding))
        };
        let off = [("proc/sys/kernel/numa_balancing", "0\n")];
        let mut config = Config::default();
        assert_eq!(of(&config, &[]), None);
        config.home.mode = HomeMode::Place;
        let sampled = "judged by NUMA balancing's samples".to_owned();
        assert_eq!(of(&config, &[]), Some((CheckResult::Ok, sampled)));
        let (verdict, finding) = of(&config, &off).unwrap();
        assert!(
            verdict == CheckResult::Warn && finding.contains("nothing counts remote accesses"),
            "{finding}"
        );
        config.probes.hardware.enabled = true;
        assert_eq!(
            of(&config, &off),
            Some((CheckResult::Ok, "judged by the processor's counters".to_owned()))
        );
        config.enforcement.mode = numaward_api::EnforcementMode::DryRun;
        let (verdict, finding) = of(&config, &off).unwrap();
        assert!(verdict == CheckResult::Warn && finding.contains("only reported"), "{finding}");
        config.home.mode = HomeMode::Report;
        assert_eq!(of(&config, &off).unwrap().0, CheckResult::Ok);
    }

    #[test]
    fn nodes_are_counted_by_what_they_have() {
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

    /// Each fault on an otherwise good host: the file, its text (`None`: missing), the check it concerns,
    /// its verdict and a part of what is said.
    #[test]
    fn each_fault_is_found_and_can_be_mended() {
        use CheckResult::{Fail, Warn};
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
            ("proc/self/status", Some("CapEff: zz"), "privileges", Warn, "no line CapEff"),
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
            ("var/lib/kubelet/config.yaml", Some("a: [\n"), "kubelet", Warn, "not understood"),
        ];
        for &(path, text, name, verdict, said) in faults {
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
            assert!(check.finding.contains(said), "{path} {text:?}: {check:?}");
            assert!(check.fix.is_some(), "{check:?}");
        }
    }

    #[test]
    fn the_kubelet_is_judged_by_the_mode_that_is_configured() {
        let dir = tree(GOOD);
        let elsewhere = dir.path().join("data/kubelet");
        fs::create_dir_all(&elsewhere).unwrap();
        fs::write(elsewhere.join("config.yaml"), "memoryManagerPolicy: Static\n").unwrap();
        let kubelet = config::cluster::Kubelet { directory: "/data/kubelet".into(), ..Default::default() };
        let kubernetes = config::kubernetes::Kubernetes { kubelet, ..Default::default() };
        let config = |mode| Config { mode, kubernetes: kubernetes.clone(), ..Config::default() };
        let of = |configured: Result<&Config, &Problems>, name: &str| {
            let checks = examine(dir.path(), &[], &[], configured);
            checks.into_iter().find(|check| check.check == name).unwrap()
        };
        for (mode, verdict, said) in [
            (None, CheckResult::Warn, "numaward then only observes"),
            (Some(OperatingMode::Observe), CheckResult::Ok, "as configured (mode: observe)"),
            (Some(OperatingMode::Enforce), CheckResult::Fail, "numaward refuses to start"),
        ] {
            let check = of(Ok(&config(mode)), "kubelet");
            assert_eq!(check.verdict, verdict, "{check:?}");
            assert!(check.finding.contains(said), "{check:?}");
            assert!(check.finding.contains("memoryManagerPolicy: Static in /data/kubelet/config.yaml"));
        }
        let fix = of(Ok(&config(Some(OperatingMode::Enforce))), "kubelet").fix.unwrap();
        assert!(fix.contains("set memoryManagerPolicy: None") && fix.contains("mode: observe"), "{fix}");
        let file = dir.path().join("numaward.yaml");
        fs::write(&file, "mode: enforced\n").unwrap();
        let sources = config::Sources { file: Some(file), ..Default::default() };
        let problems = config::load(&sources).unwrap_err();
        let check = of(Err(&problems), "configuration");
        assert_eq!(check.verdict, CheckResult::Fail);
        assert!(check.finding.contains("numaward.yaml") && check.finding.contains("mode"), "{check:?}");
    }

    #[test]
    fn a_policy_that_does_not_fit_the_machine_fails() {
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
        let judged = |config: &str| {
            let config: Config = serde_json::from_str(config).unwrap();
            Host { root: root.path() }.policy(&config)
        };
        assert_eq!(judged("{}").map(|(verdict, ..)| verdict), Some(CheckResult::Ok));
        let reserved = r#""reservedMemory": [{"numaNode": 7, "limits": {"memory": "1Gi"}}]"#;
        let (verdict, finding, fix) = judged(&format!("{{{reserved}}}")).unwrap();
        assert_eq!(verdict, CheckResult::Fail);
        assert!(finding.contains("NUMA node 7") && fix.is_some(), "{finding}");
        assert_eq!(judged(&format!(r#"{{"mode": "observe", {reserved}}}"#)), None);
    }

    #[test]
    fn what_a_kernel_is_without_is_said_with_the_first_that_has_it() {
        let lost =
            KernelFeature { name: "x", since: KernelRelease::new(6, 7), fallback: "y", is_degraded: true };
        let replaced = KernelFeature { is_degraded: false, ..lost };
        for (of, is_here, verdict, finding) in [
            (lost, Some(true), CheckResult::Ok, "here (since Linux 6.7)"),
            (lost, Some(false), CheckResult::Warn, "missing: y"),
            (replaced, Some(false), CheckResult::Ok, "missing (Linux 6.7 is the first that has it): y"),
            (lost, None, CheckResult::Ok, "not known (since Linux 6.7); without: y"),
        ] {
            let check = need(&(of, is_here));
            assert_eq!((check.check.as_str(), check.verdict), ("kernel: x", verdict));
            assert_eq!(check.finding, finding);
            let names_release = |fix: &String| fix.contains("Linux 6.7 or newer");
            assert_eq!(check.fix.as_ref().is_some_and(names_release), verdict == CheckResult::Warn);
        }
    }

    #[test]
    fn how_the_probes_attach_is_judged() {
        let report = |mode| ProbeReport {
            probe: Probe::Alloc,
            mode,
            reason: Some("no BTF".to_owned()),
            obstacle: None,
            self_check: None,
        };
        let verdicts = [Mode::TpBtf, Mode::Tracepoint, Mode::Absent].map(|mode| probe(&report(mode)).verdict);
        assert_eq!(verdicts, [CheckResult::Ok, CheckResult::Warn, CheckResult::Fail]);
    }
}

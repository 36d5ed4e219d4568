//! What this host lacks for numaward, what that means, and how to mend it.
//!
//! Reads files below a root directory and judges them; changes nothing. Features are probed for, never
//! kernel versions. A check *fails* where numaward cannot do its work, and *warns* where it works less
//! well than it could.

mod enforcement;

use std::{fs, io, path::Path};

use numaward_config::{self as config, Config, Problems};
use numaward_probes::{Mode, Probe, ProbeReport};
use numaward_topology::NodeSet;
use serde::{Deserialize, Serialize};

use crate::kubernetes::kubelet::{self, Policies};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// numaward works, less well than it could.
    Warn,
    /// numaward cannot do its work.
    Fail,
}

/// One check and its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was looked at.
    pub check: String,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found, and what it means unless all is well.
    pub finding: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

impl Check {
    fn ok(check: &str, finding: impl Into<String>) -> Self {
        Self { check: check.to_owned(), verdict: Verdict::Ok, finding: finding.into(), mend: None }
    }

    fn warn(check: &str, finding: impl Into<String>, mend: impl Into<String>) -> Self {
        let (finding, mend) = (finding.into(), Some(mend.into()));
        Self { check: check.to_owned(), verdict: Verdict::Warn, finding, mend }
    }

    fn fail(check: &str, finding: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { verdict: Verdict::Fail, ..Self::warn(check, finding, mend) }
    }
}

/// Looks at the host whose file system is at `root`. `probes` is how the probes could be attached, if
/// that was tried, `configured` what the daemon is configured to do, or what is wrong with that.
pub fn examine(root: &Path, probes: &[ProbeReport], configured: Result<&Config, &Problems>) -> Vec<Check> {
    let host = Host { root };
    let mut checks = vec![configuration(configured)];
    checks.extend([host.kernel(), host.nodes(), host.btf(), host.jit(), host.privileges()]);
    checks.extend(probes.iter().map(probe));
    checks.extend([host.lockdown(), host.lsm(), host.tracefs(), host.paranoid(), host.kprobes()]);
    checks.extend(host.cgroups());
    checks.extend([host.pressure(), host.balancing()]);
    // Where it cannot be read, the daemon does not start: what the kubelet does is told as to one without any.
    let config = configured.ok().cloned().unwrap_or_default();
    checks.push(host.kubelet(&config));
    checks.extend(host.enforcement());
    checks
}

fn configuration(configured: Result<&Config, &Problems>) -> Check {
    let check = "configuration";
    match configured {
        Ok(_) => Check::ok(check, "understood"),
        Err(problems) => {
            let problems: Vec<_> = problems.0.iter().map(ToString::to_string).collect();
            let finding = format!("the daemon does not start with it: {}", problems.join("; "));
            Check::fail(check, finding, "`numaward check-config` tells whether it is mended")
        }
    }
}

fn probe(report: &ProbeReport) -> Check {
    let name = format!("probe {}", report.probe);
    let reason = report.reason.clone().unwrap_or_default();
    match (report.probe, report.mode) {
        (Probe::Alloc, Mode::Absent) => Check::fail(
            &name,
            format!("cannot be attached ({reason}): allocations are not counted"),
            "see the other checks: privileges, BTF, lockdown",
        ),
        (probe, Mode::Absent) => Check::warn(
            &name,
            format!("cannot be attached ({reason}): {}", without(probe)),
            "see the other checks: privileges, BTF, lockdown",
        ),
        (_, Mode::Tracepoint) => Check::warn(
            &name,
            format!("attaches by the classic tracepoint, which costs more ({reason})"),
            "see the other checks: BTF, JIT, lockdown",
        ),
        (_, Mode::TpBtf) => Check::ok(&name, "attaches by tp_btf, the cheapest way"),
        (_, mode) => Check::ok(&name, format!("attaches by {mode}")),
    }
}

/// What is not known without a probe.
fn without(probe: Probe) -> &'static str {
    match probe {
        Probe::Alloc => "allocations are not counted",
        Probe::Hint => "accesses to memory of other nodes are not counted; memory.stat may tell of some",
        Probe::Scan => "it is not known whose memory policy hides accesses",
        Probe::Migrate => "pages that move between nodes are not counted",
        Probe::Stall => "time lost in reclaim is not measured; memory.pressure tells of part of it",
        Probe::OomKill => "why the OOM killer took a process is not known; memory.events counts them",
        Probe::Switch => "it is not known who else runs on exclusive CPUs",
        Probe::Hardware => "accesses to local and remote DRAM are not counted",
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

    fn kernel(&self) -> Check {
        match self.read("proc/sys/kernel/osrelease") {
            Ok(release) => Check::ok("kernel", release),
            Err(error) => Check::warn(
                "kernel",
                format!("/proc/sys/kernel/osrelease cannot be read: {error}"),
                "mount procfs at /proc",
            ),
        }
    }

    fn nodes(&self) -> Check {
        match self.node_count() {
            Ok(1) => Check::warn(
                "NUMA nodes",
                "1 node: no memory can be remote, so there is nothing for numaward to improve",
                "use a host with several sockets or dies; some firmware has to be told to show its nodes \
                 (AMD: NPS, Intel: SNC), and a virtual machine needs a virtual NUMA topology",
            ),
            Ok(count) => Check::ok("NUMA nodes", format!("{count} nodes")),
            Err(error) => {
                Check::fail("NUMA nodes", error, "use a kernel with CONFIG_NUMA, and mount sysfs at /sys")
            }
        }
    }

    fn btf(&self) -> Check {
        let path = "sys/kernel/btf/vmlinux";
        match fs::File::open(self.root.join(path)) {
            Ok(_) => Check::ok("BTF", format!("/{path}")),
            Err(error) => Check::warn(
                "BTF",
                format!("/{path} cannot be read ({error}): probes attach by dearer ways, some not at all"),
                "use a kernel with CONFIG_DEBUG_INFO_BTF=y",
            ),
        }
    }

    fn jit(&self) -> Check {
        let path = "proc/sys/net/core/bpf_jit_enable";
        match self.read(path).as_deref() {
            Ok("0") => Check::warn(
                "BPF JIT",
                "off: probes are interpreted and cost several times as much; tp_btf cannot attach",
                "sysctl net.core.bpf_jit_enable=1",
            ),
            Ok(_) => Check::ok("BPF JIT", "on"),
            Err(error) => Check::ok("BPF JIT", format!("unknown: /{path}: {error}")),
        }
    }

    /// Capabilities by number in the kernel (include/uapi/linux/capability.h).
    fn privileges(&self) -> Check {
        const BPF: (u32, &str) = (39, "CAP_BPF");
        const PERFMON: (u32, &str) = (38, "CAP_PERFMON");
        const SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");
        let effective = self.read("proc/self/status").ok().and_then(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        });
        let Some(effective) = effective else {
            return Check::warn(
                "privileges",
                "unknown: /proc/self/status has no line CapEff",
                "mount procfs at /proc",
            );
        };
        let has = |(bit, _): (u32, &str)| effective & (1 << bit) != 0;
        let lacking: Vec<&str> =
            [BPF, PERFMON].into_iter().filter(|&capability| !has(capability)).map(|(_, name)| name).collect();
        // CAP_SYS_ADMIN includes both.
        if lacking.is_empty() || has(SYS_ADMIN) {
            return Check::ok("privileges", "CAP_BPF and CAP_PERFMON");
        }
        Check::fail(
            "privileges",
            format!("{} missing: probes cannot be attached", lacking.join(" and ")),
            "run as root, or give these capabilities to the service or container",
        )
    }

    fn lockdown(&self) -> Check {
        let mode = self.read("sys/kernel/security/lockdown").ok();
        let mode = mode.as_deref().and_then(|modes| modes.split(['[', ']']).nth(1));
        match mode {
            Some("confidentiality") => Check::warn(
                "lockdown",
                "confidentiality: only probes that attach by BTF and read no kernel memory load",
                "boot with lockdown=integrity where the rest is needed",
            ),
            Some(mode) => Check::ok("lockdown", mode),
            None => Check::ok("lockdown", "not in this kernel, or securityfs is not mounted"),
        }
    }

    fn lsm(&self) -> Check {
        match self.read("sys/kernel/security/lsm") {
            Ok(modules) if modules.split(',').any(|module| module == "bpf") => Check::ok(
                "BPF LSM",
                "active: a policy of this host may refuse probes; a probe so refused says EPERM",
            ),
            Ok(_) => Check::ok("BPF LSM", "not active"),
            Err(_) => Check::ok("BPF LSM", "unknown: securityfs is not mounted"),
        }
    }

    fn tracefs(&self) -> Check {
        let found = ["sys/kernel/tracing/events", "sys/kernel/debug/tracing/events"]
            .into_iter()
            .find(|path| self.exists(path));
        match found {
            Some(path) => Check::ok("tracefs", format!("/{path}")),
            None => Check::warn(
                "tracefs",
                "not found: probes that cannot attach by BTF have no fallback",
                "mount -t tracefs nodev /sys/kernel/tracing",
            ),
        }
    }

    fn paranoid(&self) -> Check {
        let path = "proc/sys/kernel/perf_event_paranoid";
        let Ok(level) = self.read(path) else {
            return Check::warn(
                "perf events",
                format!("/{path} is missing: classic tracepoints cannot be attached"),
                "use a kernel with CONFIG_PERF_EVENTS=y",
            );
        };
        match level.parse::<i32>() {
            Ok(3..) => Check::ok(
                "perf events",
                format!("perf_event_paranoid={level}: classic tracepoints need CAP_SYS_ADMIN"),
            ),
            _ => Check::ok("perf events", format!("perf_event_paranoid={level}")),
        }
    }

    fn kprobes(&self) -> Check {
        if self.exists("sys/bus/event_source/devices/kprobe/type") {
            Check::ok("kprobes", "available")
        } else {
            Check::warn(
                "kprobes",
                "not in this kernel: a probe that cannot attach by BTF may have no fallback",
                "use a kernel with CONFIG_KPROBE_EVENTS=y",
            )
        }
    }

    /// Where a file system of this type is mounted first.
    fn mount_point(&self, kind: &str) -> Option<String> {
        let table = self.read("proc/self/mountinfo").ok()?;
        table.lines().find_map(|line| {
            // proc_pid_mountinfo(5): the type is the first field after a lone dash.
            let (mount, file_system) = line.split_once(" - ")?;
            (file_system.split(' ').next()? == kind)
                .then(|| mount.split(' ').nth(4).map(|path| path.trim_start_matches('/').to_owned()))?
        })
    }

    fn cgroups(&self) -> Vec<Check> {
        const V2_ONLY: &str = "boot with systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all";
        let Some(mount) = self.mount_point("cgroup2") else {
            return vec![Check::fail(
                "cgroup v2",
                "not mounted: numaward sees no workloads",
                format!("{V2_ONLY}, or mount -t cgroup2 none /sys/fs/cgroup"),
            )];
        };
        let beside = self.mount_point("cgroup").is_some();
        let mounted = if beside {
            Check::warn(
                "cgroup v2",
                format!("/{mount}, beside cgroup v1: a controller that v1 holds is missing in v2"),
                V2_ONLY,
            )
        } else {
            Check::ok("cgroup v2", format!("/{mount}"))
        };
        let list = |file: &str| {
            let text = self.read(&format!("{mount}/{file}")).unwrap_or_default();
            text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let (present, enabled) = (list("cgroup.controllers"), list("cgroup.subtree_control"));
        let controller = |name: &str, lost: &str| {
            let check = format!("controller {name}");
            let has = |list: &[String]| list.iter().any(|held| held == name);
            if !has(&present) {
                let finding = format!("missing in cgroup v2: {lost}");
                Check::warn(&check, finding, if beside { V2_ONLY } else { "boot without cgroup_disable=" })
            } else if !has(&enabled) {
                let mend = format!("echo +{name} > /{mount}/cgroup.subtree_control");
                Check::warn(&check, format!("not enabled below the root cgroup: {lost}"), mend)
            } else {
                Check::ok(&check, "enabled")
            }
        };
        vec![
            mounted,
            controller("memory", "where memory lies, pressure and OOM kills cannot be read"),
            controller("cpuset", "workloads cannot be bound to nodes"),
        ]
    }

    fn pressure(&self) -> Check {
        // With psi=0 the file exists and reading it fails.
        match self.read("proc/pressure/memory") {
            Ok(_) => Check::ok("pressure", "measured"),
            Err(_) => Check::warn(
                "pressure",
                "not measured: time lost for want of memory is unknown",
                "boot with psi=1, on a kernel with CONFIG_PSI=y",
            ),
        }
    }

    fn balancing(&self) -> Check {
        let check = "NUMA balancing";
        let single = self.node_count() == Ok(1);
        match self.read("proc/sys/kernel/numa_balancing").as_deref() {
            _ if single => Check::ok(check, "of no use with one node"),
            Ok("1") => Check::ok(check, "on"),
            Ok("0") => Check::warn(
                check,
                "off: the kernel moves no memory to the CPUs that use it, and remote accesses cannot be sampled",
                "sysctl kernel.numa_balancing=1",
            ),
            Ok(mode) => Check::warn(
                check,
                format!("mode {mode} (tiering): accesses between nodes of one tier are not sampled"),
                "sysctl kernel.numa_balancing=1 where memory tiering is not wanted",
            ),
            Err(_) => Check::warn(
                check,
                "not in this kernel: remote accesses cannot be sampled",
                "use a kernel with CONFIG_NUMA_BALANCING=y",
            ),
        }
    }

    fn kubelet(&self, config: &Config) -> Check {
        let (check, directory) = ("kubelet", config.kubernetes.kubelet.directory.as_path());
        let policies = Policies::read(self.root, directory);
        if let Some(pins) = policies.pins() {
            let (found, mend) = (pins.found.join(", "), pins.mend.join(" and "));
            return match config.mode {
                Some(config::OperatingMode::Enforce) => Check::fail(
                    check,
                    format!(
                        "{found}: the kubelet pins containers itself, and mode: enforce is configured: numaward refuses \
                         to start, as both would write the same cgroups"
                    ),
                    format!("{mend}, rm its state files and restart it; or configure mode: observe"),
                ),
                Some(config::OperatingMode::Observe) => Check::ok(
                    check,
                    format!("{found}: numaward holds it to its promises, as configured (mode: observe)"),
                ),
                None => Check::warn(
                    check,
                    format!(
                        "{found}: the kubelet pins containers itself; numaward then only observes, and holds it to its \
                         promises (it refuses to start with mode: enforce)"
                    ),
                    format!("for numaward to place workloads, {mend}"),
                ),
            };
        }
        match policies.problems.as_slice() {
            [] if kubelet::below(self.root, directory).exists() => {
                Check::ok(check, "it leaves CPUs and memory to numaward: its CPU and memory managers are off")
            }
            [] => Check::ok(check, format!("none here ({} is absent)", directory.display())),
            [problem, ..] => Check::warn(
                check,
                format!("its policies are not understood: {problem}"),
                "let numaward read these files as the kubelet writes them, to see policies that would fight with its own",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
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
        ("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\nmemoryManagerPolicy: None\n"),
    ];

    #[test]
    fn a_good_host_passes() {
        for check in examine(tree(GOOD).path(), &[], Ok(&Config::default())) {
            assert_eq!(
                (check.verdict, check.mend),
                (Verdict::Ok, None),
                "{}: {}",
                check.check,
                check.finding
            );
        }
    }

    /// Each fault on an otherwise good host: the file, its text (`None`: missing), the check it concerns,
    /// its verdict and a part of what is said.
    #[test]
    fn each_fault_is_found_and_can_be_mended() {
        use Verdict::{Fail, Warn};
        let faults: &[(&str, Option<&str>, &str, Verdict, &str)] = &[
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
            let checks = examine(dir.path(), &[], Ok(&Config::default()));
            let check = checks.iter().find(|check| check.check == name).unwrap();
            assert_eq!(check.verdict, verdict, "{path} {text:?}: {check:?}");
            assert!(check.finding.contains(said), "{path} {text:?}: {check:?}");
            assert!(check.mend.is_some(), "{check:?}");
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
            let checks = examine(dir.path(), &[], configured);
            checks.into_iter().find(|check| check.check == name).unwrap()
        };
        for (mode, verdict, said) in [
            (None, Verdict::Warn, "numaward then only observes"),
            (Some(config::OperatingMode::Observe), Verdict::Ok, "as configured (mode: observe)"),
            (Some(config::OperatingMode::Enforce), Verdict::Fail, "numaward refuses to start"),
        ] {
            let check = of(Ok(&config(mode)), "kubelet");
            assert_eq!(check.verdict, verdict, "{check:?}");
            assert!(check.finding.contains(said), "{check:?}");
            assert!(check.finding.contains("memoryManagerPolicy: Static in /data/kubelet/config.yaml"));
        }
        let mend = of(Ok(&config(Some(config::OperatingMode::Enforce))), "kubelet").mend.unwrap();
        assert!(mend.contains("set memoryManagerPolicy: None") && mend.contains("mode: observe"), "{mend}");
        let file = dir.path().join("numaward.yaml");
        fs::write(&file, "mode: enforced\n").unwrap();
        let sources = config::Sources { file: Some(file), ..Default::default() };
        let problems = config::load(&sources).unwrap_err();
        let check = of(Err(&problems), "configuration");
        assert_eq!(check.verdict, Verdict::Fail);
        assert!(check.finding.contains("numaward.yaml") && check.finding.contains("mode"), "{check:?}");
    }

    #[test]
    fn how_the_probes_attach_is_judged() {
        let report = |mode| ProbeReport {
            probe: Probe::Alloc,
            mode,
            reason: Some("no BTF".to_owned()),
            self_check: None,
        };
        let verdicts = [Mode::TpBtf, Mode::Tracepoint, Mode::Absent].map(|mode| probe(&report(mode)).verdict);
        assert_eq!(verdicts, [Verdict::Ok, Verdict::Warn, Verdict::Fail]);
    }
}

//! Checks of obstacles to enforcement: a cgroup hierarchy that cannot be written, and other programs that write it.

use std::{
    collections::BTreeSet,
    fs,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use numaward_config::cpu_power::CpuPower;
use numaward_guarantee::power::power_settings;
use numaward_topology::CpuId;

use super::{DoctorHost, HostCheck, Outcome, check, ok, warn};

/// The first version of systemd with `AllowedCPUs=` and `AllowedMemoryNodes=`.
const SYSTEMD_WITH_CPUSETS: u32 = 244;

const WRITES_CPUSETS_AND_PROTECTION: &str = "it writes cpusets and memory protection itself";
const STOP_MANAGER: &str = "let only one program bind workloads to CPUs and nodes: stop this one, or switch its CPU and memory policies off";

/// Programs that may conflict with guarantees: the name in `/proc/PID/comm` (at most 15 bytes), the conflict, and the fix.
const CONFLICTING_PROGRAMS: &[(&str, &str, &str)] = &[
    (
        "irqbalance",
        "it moves interrupts to exclusive CPUs too",
        "set enforcement.interrupts to move-away, list the CPUs that workloads may get in IRQBALANCE_BANNED_CPULIST, or stop it",
    ),
    (
        "numad",
        "it binds processes to nodes itself, also processes with a guarantee",
        "systemctl disable --now numad",
    ),
    (
        "tuned",
        "profiles such as cpu-partitioning move processes and interrupts between CPUs",
        "tuned-adm profile throughput-performance, or another profile that does not change affinities",
    ),
    (
        "cgrulesengd",
        "it moves processes to other cgroups, also out of cgroups with a guarantee",
        "remove workloads with a guarantee from cgrules.conf",
    ),
    ("koordlet", WRITES_CPUSETS_AND_PROTECTION, STOP_MANAGER),
    ("katalyst-agent", WRITES_CPUSETS_AND_PROTECTION, STOP_MANAGER),
    ("cri-resmgr", "it writes cpusets itself", STOP_MANAGER),
    ("nri-resource-po", "it writes cpusets itself", STOP_MANAGER),
];

/// Argument of the kernel by which profiles of `TuneD` find partitioned CPUs after a start.
const PARTITIONED: &str = "tuned.non_isolcpus=";

/// Time for which arguments of processes are read.
const READ_TIMEOUT: Duration = Duration::from_secs(3);

/// A process of root.
struct Process {
    id: u32,
    name: String,
    /// Time at which reading of its arguments ends.
    deadline: Instant,
}

impl DoctorHost<'_> {
    pub(super) fn enforcement(&self) -> Vec<HostCheck> {
        let processes = self.processes();
        let mut checks = vec![
            check("cgroup writes", self.writable()),
            check("systemd", self.systemd()),
            check("fanotify", self.fanotify()),
            check("daemon", self.daemons(&processes)),
        ];
        let states = [("cpu_manager_state", "static"), ("memory_manager_state", "Static")];
        checks.extend(states.into_iter().filter_map(|(file, policy)| {
            Some(check(format!("kubelet {file}"), self.kubelet_state(file, policy)?))
        }));
        checks.extend(self.kubelet_flags(&processes).map(|outcome| check("kubelet flags", outcome)));
        checks.push(check("other writers", conflicting_programs(&processes)));
        checks.extend(self.partitioned_cpus().map(|outcome| check("CPU partitioning", outcome)));
        checks
    }

    /// Checks for a division of the CPUs by `TuneD`: its argument of the kernel has the CPUs that are not isolated.
    fn partitioned_cpus(&self) -> Option<Outcome> {
        let arguments = self.read("proc/cmdline").ok()?;
        let argument = arguments.split_whitespace().find(|argument| argument.starts_with(PARTITIONED))?;
        Some(warn(
            format!(
                "the kernel was started with {argument}: TuneD divides the CPUs of this host, for a PerformanceProfile of OpenShift or by its \
                 profile cpu-partitioning"
            ),
            "let one program divide the CPUs: on OpenShift, use mode observe beside a PerformanceProfile, or take this host out of its pool \
             of machines; elsewhere, use another profile of TuneD",
        ))
    }

    fn processes(&self) -> Vec<Process> {
        let Ok(entries) = fs::read_dir(self.root.join("proc")) else { return Vec::new() };
        let id = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let ids: BTreeSet<u32> = entries.flatten().filter_map(id).collect();
        let (deadline, own_user) = (Instant::now() + READ_TIMEOUT, rustix::process::geteuid().as_raw());
        // A user that runs a program with the setuid bit chooses its name and arguments.
        let is_trusted = |users: [u32; 3]| [0, own_user].iter().any(|user| users == [*user; 3]);
        let process = |id| {
            // A process that ended meanwhile has no files.
            let name = self.read(&format!("proc/{id}/comm")).ok()?;
            let is_checked = is_checked(&name) && is_trusted(self.users(id)?);
            is_checked.then_some(Process { id, name, deadline })
        };
        ids.into_iter().filter_map(process).collect()
    }

    /// Returns the real, effective and saved user of a process.
    fn users(&self, id: u32) -> Option<[u32; 3]> {
        let status = self.read(&format!("proc/{id}/status")).ok()?;
        let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        let mut users = users.split_whitespace().map_while(|user| user.parse().ok());
        Some([users.next()?, users.next()?, users.next()?])
    }

    /// Returns the arguments of a process, of which each may have megabytes; none if they cannot be read in time, because the process holds
    /// the lock of its memory map.
    fn arguments(&self, process: &Process) -> Vec<String> {
        let (root, path) = (self.root.to_owned(), format!("proc/{}/cmdline", process.id));
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(DoctorHost { root: &root }.read(&path)));
        let left = process.deadline.saturating_duration_since(Instant::now());
        let text = receiver.recv_timeout(left).ok().and_then(Result::ok).unwrap_or_default();
        text.split('\0').map(str::to_owned).collect()
    }

    fn writable(&self) -> Outcome {
        match self.mount("cgroup2") {
            None => warn("no cgroup v2: guarantees cannot be enforced", "see the check cgroup v2"),
            Some((_, options)) if options.split(',').any(|option| option == "ro") => warn(
                "the hierarchy is mounted read-only: workloads are observed, and guarantees are not enforced",
                "mount -o remount,rw /sys/fs/cgroup; for a container, mount the host's hierarchy read-write into it",
            ),
            Some(_) => ok("the hierarchy is mounted read-write"),
        }
    }

    /// Checks that the affinity of interrupts can be written.
    pub(super) fn interrupts(&self) -> Outcome {
        let path = "proc/irq/default_smp_affinity";
        match rustix::fs::access(self.root.join(path), rustix::fs::Access::WRITE_OK) {
            Ok(()) => ok("can be moved off exclusive CPUs"),
            Err(error) => warn(
                format!("/{path} cannot be written ({error}): interrupts stay on exclusive CPUs"),
                "let the daemon write /proc/irq and /sys/devices: ProtectKernelTunables=no in its unit; a container has to be \
                 privileged",
            ),
        }
    }

    /// Checks that the configured power settings can be written and that the kernel knows their values, on the first CPU.
    pub(super) fn power(&self, power: &CpuPower) -> Outcome {
        let problems = power_settings(power).into_iter().filter_map(|(knob, value)| {
            let path = knob.path(CpuId(0));
            if let Err(error) = rustix::fs::access(self.root.join(&path), rustix::fs::Access::WRITE_OK) {
                return Some(format!("/{path} cannot be written ({error})"));
            }
            let known = self.read(&knob.choices(&path)?).ok()?;
            let is_known = known.split_whitespace().any(|known| known == value);
            (!is_known).then(|| format!("/{path} does not accept {value:?}, but {}", known.trim()))
        });
        let problems: Vec<String> = problems.collect();
        if problems.is_empty() {
            return ok("the settings of exclusive CPUs can be written");
        }
        warn(
            format!("{}: these settings keep their values", problems.join("; ")),
            "configure values that this host has; let the daemon write /sys/devices/system/cpu: ProtectKernelTunables=no in its unit, \
             the component cpu-power on Kubernetes",
        )
    }

    fn systemd(&self) -> Outcome {
        if !self.exists("run/systemd/system") {
            return ok("not the init system of this host: every cgroup is written directly");
        }
        if !self.exists("run/dbus/system_bus_socket") {
            return warn(
                "its system bus is not found: units cannot get guarantees",
                "start dbus; for a container, mount /run/dbus/system_bus_socket into it",
            );
        }
        match self.systemd_version() {
            Some(version) if version < SYSTEMD_WITH_CPUSETS => warn(
                format!("version {version} cannot bind units to CPUs and nodes"),
                format!("use systemd {SYSTEMD_WITH_CPUSETS} or newer, or name cgroups outside of its slices"),
            ),
            Some(version) => ok(format!("version {version}; units are bound through it")),
            None => ok("units are bound through it"),
        }
    }

    /// Returns the version in the name of the private library of systemd: no other file has it.
    fn systemd_version(&self) -> Option<u32> {
        let directories = ["usr/lib/systemd", "usr/lib64/systemd", "usr/lib/x86_64-linux-gnu/systemd"];
        let entries =
            directories.iter().filter_map(|directory| fs::read_dir(self.root.join(directory)).ok()).flatten();
        entries.flatten().find_map(|entry| {
            let name = entry.file_name();
            let version = name.to_str()?.strip_prefix("libsystemd-shared-")?;
            version.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        })
    }

    fn fanotify(&self) -> Outcome {
        if self.exists("proc/sys/fs/fanotify") {
            return ok("available: a write of another program to a knob is detected at once");
        }
        warn(
            "not in this kernel: knobs are read every second instead, and the program that wrote them stays unknown",
            "use a kernel with CONFIG_FANOTIFY=y, 5.13 or newer",
        )
    }

    /// Checks a state file of the kubelet, which has the policy in use; the configuration may have changed since.
    fn kubelet_state(&self, file: &str, policy: &str) -> Option<Outcome> {
        let path = format!("var/lib/kubelet/{file}");
        let text = self.read(&path).ok()?;
        let Ok(state) = serde_json::from_str::<serde_json::Value>(&text) else {
            let fix = format!("rm /{path} and restart the kubelet, which refuses to start with it");
            return Some(warn(format!("/{path} is not JSON"), fix));
        };
        let name = state["policyName"].as_str().unwrap_or_default();
        if !name.eq_ignore_ascii_case(policy) {
            return Some(ok(format!("policy {name}")));
        }
        Some(warn(
            format!("policy {name}: the kubelet binds containers itself, or did until its policy changed"),
            format!(
                "`numaward import-kubelet-state /var/lib/kubelet` imports the guarantees of the kubelet; then set \
                 the policy to none, rm /{path} and restart the kubelet"
            ),
        ))
    }

    fn daemons(&self, processes: &[Process]) -> Outcome {
        let is_daemon = |process: &&Process| {
            process.name == "numaward"
                && self.arguments(process).get(1).is_some_and(|argument| argument == "run")
        };
        let running: Vec<_> =
            processes.iter().filter(is_daemon).map(|process| process.id.to_string()).collect();
        match running.as_slice() {
            [] => ok("none runs"),
            [id] => ok(format!("runs as process {id}")),
            ids => warn(
                format!("several run, as processes {}: they would bind the same workloads", ids.join(", ")),
                "stop all but one; a container and a service may each run one",
            ),
        }
    }

    /// Checks the flags of the kubelet, which override its configuration file; `None` if it does not run.
    fn kubelet_flags(&self, processes: &[Process]) -> Option<Outcome> {
        const POLICIES: [&str; 3] =
            ["--cpu-manager-policy", "--memory-manager-policy", "--topology-manager-policy"];
        let kubelet = processes.iter().find(|process| process.name == "kubelet")?;
        let (arguments, mut own) = (self.arguments(kubelet), Vec::new());
        for (index, argument) in arguments.iter().enumerate() {
            let next = || arguments.get(index + 1).map_or("", String::as_str);
            let (flag, value) = argument.split_once('=').unwrap_or_else(|| (argument, next()));
            if POLICIES.contains(&flag) && !value.eq_ignore_ascii_case("none") {
                own.push(format!("{flag}={value}"));
            }
        }
        if own.is_empty() {
            return Some(ok(format!("process {} has no flag that conflicts", kubelet.id)));
        }
        Some(warn(
            format!("{}: the kubelet places workloads itself; numaward only observes", own.join(" ")),
            "remove these flags of the kubelet before numaward places workloads",
        ))
    }
}

/// Returns true if a check is about processes of this name.
fn is_checked(name: &str) -> bool {
    matches!(name, "numaward" | "kubelet")
        || CONFLICTING_PROGRAMS.iter().any(|(program, ..)| *program == name)
}

fn conflicting_programs(processes: &[Process]) -> Outcome {
    let (mut findings, mut fixes) = (Vec::new(), Vec::new());
    for (name, conflict, fix) in CONFLICTING_PROGRAMS {
        if let Some(process) = processes.iter().find(|process| process.name == *name) {
            findings.push(format!("{name} runs (process {}): {conflict}", process.id));
            fixes.push(format!("{name}: {fix}"));
        }
    }
    if findings.is_empty() {
        return ok("no program that is known to conflict over CPUs and nodes is running");
    }
    warn(findings.join("; "), fixes.join("; "))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            CheckResult,
            tests::{GOOD, tree},
        },
        *,
    };
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::path::Path;

    const READ_ONLY: &str = "30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw\n";

    /// Writes files; their processes are of the own user.
    fn tree_with_processes(files: &[(&str, &str)]) -> tempfile::TempDir {
        let (dir, user) = (tree(files), rustix::process::geteuid().as_raw());
        for comm in files.iter().filter_map(|(path, _)| path.strip_suffix("/comm")) {
            set_users(dir.path(), comm, [user; 3]);
        }
        dir
    }

    fn set_users(root: &Path, process: &str, [real, effective, saved]: [u32; 3]) {
        let status = format!("Name:\tx\nUid:\t{real}\t{effective}\t{saved}\t{effective}\nGid:\t1\t1\t1\t1\n");
        fs::write(root.join(process).join("status"), status).unwrap();
    }

    fn check(files: &[(&str, &str)], name: &str) -> Option<HostCheck> {
        let all: Vec<_> = GOOD.iter().chain(files).copied().collect();
        let dir = tree_with_processes(&all);
        let checks = DoctorHost { root: dir.path() }.enforcement();
        checks.into_iter().find(|check| check.check == name)
    }

    /// Any user can choose the arguments of a process, and mount file systems of FUSE.
    #[test]
    fn long_files_are_read_in_part() {
        let long = "x".repeat(1 << 20);
        let arguments = format!("kubelet\0--cpu-manager-policy=static\0{long}");
        let files = [("proc/9/comm", "kubelet\n"), ("proc/9/cmdline", &*arguments)];
        assert_eq!(check(&files, "kubelet flags").unwrap().verdict, CheckResult::Warn);
        let dir = tree(&files);
        let read = DoctorHost { root: dir.path() }.read("proc/9/cmdline").unwrap();
        assert_eq!(read.len(), 256 << 10);
        let mounts = format!("1 2 3:4 / /{long} rw - fuse {long} rw\n{READ_ONLY}");
        let writes = check(&[("proc/self/mountinfo", &*mounts)], "cgroup writes").unwrap();
        assert!(writes.finding.contains("read-only"), "{}", writes.finding);
    }

    /// A process can hold the lock of its memory map for ever. The arguments are a pipe that is never written.
    #[test]
    fn locked_processes_are_not_awaited() {
        let dir = tree_with_processes(&[("proc/8/comm", "numaward\n"), ("proc/9/comm", "kubelet\n")]);
        for id in [8, 9] {
            let path = dir.path().join(format!("proc/{id}/cmdline"));
            mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        }
        let start = Instant::now();
        let checks = DoctorHost { root: dir.path() }.enforcement();
        assert!(start.elapsed() < 2 * READ_TIMEOUT, "{:?}", start.elapsed());
        let flags = checks.into_iter().find(|check| check.check == "kubelet flags").unwrap();
        assert_eq!(flags.verdict, CheckResult::Ok);
    }

    /// The effective user of a program with the setuid bit, such as su, is root.
    #[test]
    fn processes_of_other_users_are_ignored() {
        let dir = tree_with_processes(&[
            ("proc/9/comm", "kubelet\n"),
            ("proc/9/cmdline", "kubelet\0--cpu-manager-policy=static\0"),
        ]);
        let flags = || {
            let checks = DoctorHost { root: dir.path() }.enforcement();
            checks.into_iter().find(|check| check.check == "kubelet flags").map(|check| check.verdict)
        };
        assert_eq!(flags(), Some(CheckResult::Warn));
        let own = rustix::process::geteuid().as_raw();
        for (users, expected) in [
            ([0, 0, 0], Some(CheckResult::Warn)),
            ([own, own, own], Some(CheckResult::Warn)),
            ([65534, 65534, 65534], None),
            ([65534, 0, 0], None),
            ([0, 65534, 0], None),
            ([0, 0, 65534], None),
        ] {
            set_users(dir.path(), "proc/9", users);
            assert_eq!(flags(), expected, "{users:?}");
        }
    }

    #[test]
    fn interrupts_need_writable_files() {
        let dir = tree(&[("proc/irq/default_smp_affinity", "ff\n")]);
        assert_eq!(DoctorHost { root: dir.path() }.interrupts().0, CheckResult::Ok);
        let (verdict, finding, _) = DoctorHost { root: tree(GOOD).path() }.interrupts();
        assert!(
            verdict == CheckResult::Warn && finding.contains("cannot be written (No such file"),
            "{finding}"
        );
    }

    #[test]
    fn power_settings_need_known_values() {
        let power = |text: &str| serde_json::from_str::<CpuPower>(text).unwrap();
        let all = r#"{"governor": "performance", "energyPreference": "power", "wakeUpLatency": 0}"#;
        let path = |file: &str| format!("sys/devices/system/cpu/cpu0/{file}");
        let [governor, governors, latency] = [
            "cpufreq/scaling_governor",
            "cpufreq/scaling_available_governors",
            "power/pm_qos_resume_latency_us",
        ]
        .map(path);
        let preference = path("cpufreq/energy_performance_preference");
        let dir = tree(&[
            (&governor, "schedutil\n"),
            (&governors, "performance schedutil \n"),
            (&preference, "power\n"),
            (&latency, "0\n"),
        ]);
        let host = DoctorHost { root: dir.path() };
        assert_eq!(host.power(&power(all)).0, CheckResult::Ok, "{:?}", host.power(&power(all)));
        let (verdict, finding, _) = host.power(&power(r#"{"governor": "turbo"}"#));
        let problem = format!("/{governor} does not accept \"turbo\", but performance schedutil: ");
        assert!(verdict == CheckResult::Warn && finding.starts_with(&problem), "{finding}");
        let empty = tree(GOOD);
        let (verdict, finding, _) = DoctorHost { root: empty.path() }.power(&power(all));
        assert!(verdict == CheckResult::Warn, "{finding}");
        for file in [governor, preference, latency] {
            assert!(finding.contains(&format!("/{file} cannot be written (No such file")), "{finding}");
        }
    }

    #[test]
    fn finds_cpus_that_tuned_divides() {
        let name = "CPU partitioning";
        assert_eq!(check(&[("proc/cmdline", "ro nohz=on isolcpus=2-3 quiet\n")], name), None);
        let arguments = "ro nohz=on rcu_nocbs=2-23 tuned.non_isolcpus=03000003 quiet\n";
        let found = check(&[("proc/cmdline", arguments)], name).unwrap();
        assert_eq!(found.verdict, CheckResult::Warn);
        assert!(
            found.finding.contains("started with tuned.non_isolcpus=03000003: TuneD divides"),
            "{found:?}"
        );
        assert!(found.fix.unwrap().contains("mode observe beside a PerformanceProfile"));
    }

    /// Each row has files that are added to those of a good host (the last of a path counts), a check, its verdict and a part of its
    /// finding.
    #[test]
    fn finds_obstacles_to_enforcement() {
        use CheckResult::{Ok, Warn};
        type Row<'a> = (&'a [(&'a str, &'a str)], &'a str, CheckResult, &'a str);
        const STATIC: &str = r#"{"policyName":"static","defaultCpuSet":"0-3","checksum":1}"#;
        let systemd = ("run/systemd/system/.keep", "");
        let bus = ("run/dbus/system_bus_socket", "");
        let table: &[Row<'_>] = &[
            (&[], "cgroup writes", Ok, "read-write"),
            (&[("proc/self/mountinfo", READ_ONLY)], "cgroup writes", Warn, "read-only"),
            (&[("proc/self/mountinfo", "")], "cgroup writes", Warn, "no cgroup v2"),
            (&[], "systemd", Ok, "not the init system"),
            (&[systemd], "systemd", Warn, "system bus is not found"),
            (&[systemd, bus], "systemd", Ok, "bound through it"),
            (
                &[systemd, bus, ("usr/lib/systemd/libsystemd-shared-239.so", "")],
                "systemd",
                Warn,
                "version 239",
            ),
            (
                &[systemd, bus, ("usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-252.so", "")],
                "systemd",
                Ok,
                "version 252",
            ),
            (&[], "fanotify", Ok, "available"),
            (&[], "daemon", Ok, "none runs"),
            (
                &[("proc/7/comm", "numaward\n"), ("proc/7/cmdline", "numaward\0doctor\0")],
                "daemon",
                Ok,
                "none runs",
            ),
            (
                &[("proc/7/comm", "numaward\n"), ("proc/7/cmdline", "numaward\0run\0")],
                "daemon",
                Ok,
                "process 7",
            ),
            (
                &[
                    ("proc/7/comm", "numaward\n"),
                    ("proc/7/cmdline", "numaward\0run\0"),
                    ("proc/12/comm", "numaward\n"),
                    ("proc/12/cmdline", "/usr/bin/numaward\0run\0"),
                ],
                "daemon",
                Warn,
                "processes 7, 12",
            ),
            (
                &[("var/lib/kubelet/cpu_manager_state", STATIC)],
                "kubelet cpu_manager_state",
                Warn,
                "policy static",
            ),
            (
                &[("var/lib/kubelet/memory_manager_state", r#"{"policyName":"None"}"#)],
                "kubelet memory_manager_state",
                Ok,
                "policy None",
            ),
            (&[("var/lib/kubelet/cpu_manager_state", "{")], "kubelet cpu_manager_state", Warn, "not JSON"),
            (
                &[
                    ("proc/9/comm", "kubelet\n"),
                    (
                        "proc/9/cmdline",
                        "kubelet\0--cpu-manager-policy=static\0--memory-manager-policy\0Static\0",
                    ),
                ],
                "kubelet flags",
                Warn,
                "--cpu-manager-policy=static --memory-manager-policy=Static",
            ),
            (
                &[("proc/9/comm", "kubelet\n"), ("proc/9/cmdline", "kubelet\0--cpu-manager-policy=none\0")],
                "kubelet flags",
                Ok,
                "process 9",
            ),
            (&[], "other writers", Ok, "no program that is known"),
            (
                &[("proc/3/comm", "irqbalance\n"), ("proc/4/comm", "numad\n"), ("proc/5/comm", "numademo\n")],
                "other writers",
                Warn,
                "irqbalance runs (process 3): it moves interrupts to exclusive CPUs too; numad runs (process 4)",
            ),
        ];
        for (files, name, verdict, words) in table {
            let check = check(files, name).unwrap();
            assert_eq!(check.verdict, *verdict, "{files:?}: {check:?}");
            assert!(check.finding.contains(words), "{files:?}: {check:?}");
            assert_eq!(check.fix.is_some(), *verdict != Ok, "{check:?}");
        }
        for absent in ["kubelet flags", "kubelet cpu_manager_state"] {
            assert_eq!(check(&[], absent), None);
        }
    }
}
